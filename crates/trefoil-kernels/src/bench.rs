//! Speed of the kernels against the peak of the same instructions, measured in the same run (`trefoil bench kernels`).
//!
//! Every number is measured here and now. The peak is a loop of independent multiply-add instructions on registers only, on
//! as many threads as the kernels use, re-measured before every kernel, because clocks move; a fraction is against the
//! peak next to it.

use crate::gemm::row_block;
use crate::{
    ActivationScale, AttentionScales, AttentionSink, Codes, Epilogue, FloatEpilogue, FloatWeights, GemmSink, Isa,
    KernelError, Kernels, Operands, PackedKeyValue, Rows, RowsMut, Workspace,
};
use serde::Serialize;
use std::time::Instant;
use trefoil_weights::TiledView;
use trefoil_weights::tile::TileShape;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kernel")]
pub enum Workload {
    /// [`Kernels::gemm_w8a8`], `m × k` times `k × n`, bias, f32 out.
    GemmW8a8 {
        /// Rows of the activations.
        m: usize,
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// [`Kernels::gemm_f32`] on tiled INT8 weights with FP16 operands.
    GemmW8a16 {
        /// Rows of the activations.
        m: usize,
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// [`Kernels::gemm_f32`] on unquantised weights.
    GemmF32 {
        /// Rows of the activations.
        m: usize,
        /// Inputs.
        k: usize,
        /// Outputs.
        n: usize,
    },
    /// [`Kernels::pack_key_value`] and [`Kernels::attention_w8a8`].
    AttentionW8a8 {
        /// Queries and keys.
        tokens: usize,
        /// Heads.
        heads: usize,
        /// Columns of a head.
        head_dim: usize,
    },
    /// [`Kernels::attention_f32`].
    AttentionF32 {
        /// Queries and keys.
        tokens: usize,
        /// Heads.
        heads: usize,
        /// Columns of a head.
        head_dim: usize,
    },
}

impl Workload {
    /// Operations of one call: two per multiply-add of the products, nothing else.
    pub fn operations(&self) -> f64 {
        match *self {
            Workload::GemmW8a8 { m, k, n } | Workload::GemmW8a16 { m, k, n } | Workload::GemmF32 { m, k, n } => {
                2.0 * m as f64 * k as f64 * n as f64
            }
            Workload::AttentionW8a8 { tokens, heads, head_dim }
            | Workload::AttentionF32 { tokens, heads, head_dim } => {
                4.0 * tokens as f64 * tokens as f64 * (heads * head_dim) as f64
            }
        }
    }

    fn is_integer(&self) -> bool {
        matches!(self, Workload::GemmW8a8 { .. } | Workload::AttentionW8a8 { .. })
    }

    /// The shapes of a block of the 1.3 B model at one latent frame (1,560 tokens) and, with `full`, at 17 frames (7,800).
    pub fn of_the_model(full: bool) -> Vec<Workload> {
        let mut workloads = Vec::new();
        let tokens: &[usize] = if full { &[1560, 7800] } else { &[1560] };
        for &m in tokens {
            for (k, n) in [(1536, 1536), (1536, 8960), (8960, 1536)] {
                workloads.push(Workload::GemmW8a8 { m, k, n });
            }
            workloads.push(Workload::AttentionW8a8 { tokens: m, heads: 12, head_dim: 128 });
        }
        workloads.push(Workload::GemmW8a16 { m: 1560, k: 1536, n: 1536 });
        workloads.push(Workload::GemmF32 { m: 1560, k: 1536, n: 1536 });
        workloads.push(Workload::AttentionF32 { tokens: 1560, heads: 12, head_dim: 128 });
        workloads
    }
}

/// One measured workload.
#[derive(Debug, Clone, Serialize)]
pub struct Measured {
    /// What ran.
    #[serde(flatten)]
    pub workload: Workload,
    /// On which instruction set.
    pub isa: Isa,
    /// On how many threads.
    pub threads: usize,
    /// Calls timed.
    pub samples: usize,
    /// Median time of a call.
    pub median_ms: f64,
    /// Fastest call.
    pub min_ms: f64,
    /// Slowest call.
    pub max_ms: f64,
    /// 10⁹ operations a second, from the median.
    pub gops: f64,
    /// The register-only peak of the same kind (INT8 or f32) on the same threads, measured around the calls; absent where
    /// the instruction set has no peak loop.
    pub peak_gops: Option<f64>,
    /// `gops / peak_gops`.
    pub fraction_of_peak: Option<f64>,
    /// Scratch held by the workspace after the calls.
    pub scratch_bytes: usize,
}

/// The register-only peak on all threads of `kernels`, 10⁹ operations a second: the best of `tries` short runs.
pub fn peak(kernels: &Kernels, is_integer: bool, tries: usize) -> Option<f64> {
    let isa = kernels.supported();
    let run = |rounds: u64| if is_integer { isa.dot_peak(rounds) } else { isa.fma_peak(rounds) };
    run(1)?;
    let mut workspace = Workspace::new();
    let mut best = 0f64;
    for _ in 0..tries.max(1) {
        let start = Instant::now();
        let threads = kernels.pool().threads();
        // A few hundred thousand rounds are milliseconds.
        const ROUNDS: u64 = 400_000;
        kernels.run_grains(
            threads,
            1,
            &mut workspace,
            |_| (),
            |_| {
                run(ROUNDS);
            },
        );
        let operations = run(0).map_or(0.0, |_| run(1).unwrap_or(0) as f64) * ROUNDS as f64 * threads as f64;
        best = best.max(operations / start.elapsed().as_secs_f64() / 1e9);
    }
    Some(best)
}

/// Deterministic bytes.
fn codes(len: usize) -> Vec<i8> {
    let mut state = 1u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 24) as u8 as i8).max(-127)
        })
        .collect()
}

fn floats(len: usize) -> Vec<f32> {
    codes(len).into_iter().map(|code| f32::from(code) / 64.0).collect()
}

/// Times `samples` calls of a workload after one untimed call, with the peak measured before and after.
///
/// # Errors
/// What the kernels refuse.
pub fn measure(kernels: &Kernels, workload: Workload, samples: usize) -> Result<Measured, KernelError> {
    let mut workspace = Workspace::new();
    let before = peak(kernels, workload.is_integer(), 3);
    let mut times = time(kernels, workload, samples.max(1), &mut workspace)?;
    let after = peak(kernels, workload.is_integer(), 3);
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let gops = workload.operations() / median / 1e6;
    let peak_gops = before.zip(after).map(|(before, after)| before.max(after));
    Ok(Measured {
        workload,
        isa: kernels.isa(),
        threads: kernels.pool().threads(),
        samples: times.len(),
        median_ms: median,
        min_ms: times[0],
        max_ms: times[times.len() - 1],
        gops,
        peak_gops,
        fraction_of_peak: peak_gops.map(|peak| gops / peak),
        scratch_bytes: workspace.bytes(),
    })
}

/// Milliseconds of each call.
fn time(
    kernels: &Kernels,
    workload: Workload,
    samples: usize,
    workspace: &mut Workspace,
) -> Result<Vec<f64>, KernelError> {
    let mut repeat = |call: &mut dyn FnMut(&mut Workspace) -> Result<(), KernelError>| {
        call(workspace)?;
        (0..samples)
            .map(|_| {
                let start = Instant::now();
                call(workspace)?;
                Ok(start.elapsed().as_secs_f64() * 1e3)
            })
            .collect()
    };
    match workload {
        Workload::GemmW8a8 { m, k, n } => {
            let (weights, scales, shape) = weights(k, n)?;
            let view = TiledView { shape, codes: &weights, scales: &scales };
            let (input, bias, mut out) = (codes(m * shape.padded_in()), floats(n), vec![0f32; m * n]);
            let input = Codes {
                codes: Rows::new("input", &input, m, k, shape.padded_in())?,
                scale: ActivationScale::Tensor(0.01),
            };
            let epilogue = Epilogue { bias: Some(&bias), ..Epilogue::default() };
            repeat(&mut |workspace| {
                let sink = GemmSink::F32 { out: RowsMut::dense("output", &mut out, m, n)?, operands: Operands::F32 };
                kernels.gemm_w8a8(&input, &view, &epilogue, sink, workspace)
            })
        }
        Workload::GemmW8a16 { m, k, n } | Workload::GemmF32 { m, k, n } => {
            let (weights, scales, shape) = weights(k, n)?;
            let plain = if matches!(workload, Workload::GemmF32 { .. }) { floats(k * n) } else { Vec::new() };
            let (input, mut out) = (floats(m * k), vec![0f32; m * n]);
            let (float_weights, operands) = if plain.is_empty() {
                (FloatWeights::Tiled(TiledView { shape, codes: &weights, scales: &scales }), Operands::F16)
            } else {
                (FloatWeights::OutIn(Rows::dense("weights", &plain, n, k)?), Operands::F32)
            };
            let input = Rows::dense("input", &input, m, k)?;
            repeat(&mut |workspace| {
                let sink = GemmSink::F32 { out: RowsMut::dense("output", &mut out, m, n)?, operands };
                kernels.gemm_f32(input, &float_weights, operands, &FloatEpilogue::default(), sink, workspace)
            })
        }
        Workload::AttentionW8a8 { tokens, heads, head_dim } => {
            let width = heads * head_dim;
            let data = codes(3 * tokens * width);
            let [query, key, value] = [0, 1, 2].map(|part| &data[part * tokens * width..(part + 1) * tokens * width]);
            let mut out = vec![0i8; tokens * width];
            let mut packed = PackedKeyValue::new();
            let scale = vec![0.01f32; heads];
            repeat(&mut |workspace| {
                let (key, value) =
                    (Rows::dense("key", key, tokens, width)?, Rows::dense("value", value, tokens, width)?);
                kernels.pack_key_value(key, value, heads, &mut packed, workspace)?;
                let scales = AttentionScales { query: &scale, key: &scale, value: &scale };
                let sink =
                    AttentionSink::Codes { out: RowsMut::dense("output", &mut out, tokens, width)?, scale: 0.01 };
                kernels.attention_w8a8(Rows::dense("query", query, tokens, width)?, &packed, scales, sink, workspace)
            })
        }
        Workload::AttentionF32 { tokens, heads, head_dim } => {
            let width = heads * head_dim;
            let data = floats(3 * tokens * width);
            let [query, key, value] = [0, 1, 2].map(|part| &data[part * tokens * width..(part + 1) * tokens * width]);
            let mut out = vec![0f32; tokens * width];
            repeat(&mut |workspace| {
                let [query, key, value] = [query, key, value].map(|data| Rows::dense("operand", data, tokens, width));
                let out = RowsMut::dense("output", &mut out, tokens, width)?;
                let sink = AttentionSink::F32 { out, operands: Operands::F32 };
                kernels.attention_f32(query?, key?, value?, heads, Operands::F32, sink, workspace)
            })
        }
    }
}

/// Tiled codes and scales of a `k × n` matrix.
fn weights(k: usize, n: usize) -> Result<(Vec<i8>, Vec<f32>, TileShape), KernelError> {
    let shape = TileShape::new(k, n)
        .ok_or_else(|| KernelError::value("bench", "the weights", format!("{k}×{n}"), "both sides must be above 0"))?;
    Ok((codes(shape.bytes()), vec![0.01; shape.padded_out()], shape))
}

/// Rows of activations that [`Kernels::gemm_w8a8`] keeps in cache for a reduction of `k`.
pub fn rows_per_block(k: usize) -> usize {
    row_block(k, usize::MAX)
}
