//! Speed of the kernels against the peak of the same instructions, measured in the same run (`trefoil bench kernels`).
//!
//! Every number is measured here and now. The peak is a loop of independent multiply-add instructions on registers only, on
//! as many threads as the kernels use, re-measured before every kernel, because clocks move; a fraction is against the
//! peak next to it.

mod workload;

pub use workload::Workload;

use crate::{
    ActivationScale, AttentionScales, AttentionSink, Codes, ConvSink, ConvWeights, Epilogue, FilterShape,
    FloatEpilogue, FloatWeights, Frame, GemmSink, Isa, KernelError, Kernels, Modulation, Operands, PackedKeyValue,
    RotaryTable, RowSink, Rows, RowsMut, Workspace, rotary_table,
};
use serde::Serialize;
use std::time::Instant;
use trefoil_weights::TiledView;
use trefoil_weights::tile::TileShape;

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
    /// 10⁹ operations a second, from the median; 0 for a row operator.
    pub gops: f64,
    /// The same of the fastest call.
    pub best_gops: f64,
    /// The register-only peak of the same kind (INT8 or f32) on the same threads, measured around the calls; absent where
    /// the instruction set has no peak loop.
    pub peak_gops: Option<f64>,
    /// `gops / peak_gops`.
    pub fraction_of_peak: Option<f64>,
    /// `best_gops / peak_gops`.
    pub best_fraction_of_peak: Option<f64>,
    /// Scratch held after the calls, packed keys and values included.
    pub scratch_bytes: usize,
}

/// The register-only peak on all threads of `kernels`, 10⁹ operations a second: the best of `tries` short runs. `None`
/// where the instruction set has no loop for it.
pub fn peak(kernels: &Kernels, is_integer: bool, tries: usize) -> Option<f64> {
    /// A few milliseconds.
    const ROUNDS: u64 = 200_000;
    let isa = kernels.supported();
    let run = |rounds: u64| if is_integer { isa.dot_peak(rounds) } else { isa.fma_peak(rounds) };
    let per_round = run(1)? as f64;
    let threads = kernels.pool().threads();
    let mut workspace = Workspace::new();
    let mut best = 0f64;
    for _ in 0..tries.max(1) {
        let start = Instant::now();
        kernels.run_grains(
            threads,
            1,
            &mut workspace,
            |_| (),
            |_| {
                run(ROUNDS);
            },
        );
        best = best.max(per_round * ROUNDS as f64 * threads as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    Some(best)
}

/// `ε` of the norms.
pub(crate) const EPS: f32 = 1e-6;

/// Deterministic bytes.
pub(crate) fn codes(len: usize) -> Vec<i8> {
    let mut state = 1u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 24) as u8 as i8).max(-127)
        })
        .collect()
}

pub(crate) fn floats(len: usize) -> Vec<f32> {
    codes(len).into_iter().map(|code| f32::from(code) / 64.0).collect()
}

/// A workload with its operands, ready to run.
#[derive(Debug)]
pub struct Prepared {
    workload: Workload,
    shape: TileShape,
    weights: Vec<i8>,
    scales: Vec<f32>,
    input: Vec<i8>,
    floats: Vec<f32>,
    plain_weights: Vec<f32>,
    bias: Vec<f32>,
    out: Vec<f32>,
    out_codes: Vec<i8>,
    packed: PackedKeyValue,
    frames: Vec<Frame>,
    filter: Option<ConvWeights>,
    result: Option<Frame>,
    rotary: Option<RotaryTable>,
    workspace: Workspace,
}

impl Prepared {
    /// Makes the operands.
    ///
    /// # Errors
    /// A size of zero.
    pub fn new(workload: Workload) -> Result<Prepared, KernelError> {
        let refuse =
            || KernelError::value("bench", "the workload", format!("{workload:?}"), "every size must be above 0");
        let (rows, d_in, d_out) = match workload {
            Workload::GemmW8a8 { m, k, n }
            | Workload::LinearW8a8 { m, k, n }
            | Workload::GemmW8a16 { m, k, n }
            | Workload::GemmF32 { m, k, n } => (m, k, n),
            Workload::AttentionW8a8 { tokens, heads, head_dim }
            | Workload::AttentionF32 { tokens, heads, head_dim } => (tokens, heads * head_dim, heads * head_dim),
            Workload::ConvF32 { height, width, inputs, outputs, .. } => (height * width, inputs, outputs),
            Workload::LayerNorm { rows, columns } | Workload::Quantise { rows, columns } => (rows, columns, columns),
            Workload::RmsNorm { rows, heads, head_dim } => (rows, heads * head_dim, heads * head_dim),
        };
        let shape = TileShape::new(d_in, d_out).ok_or_else(refuse)?;
        let mut prepared = Prepared {
            workload,
            shape,
            weights: Vec::new(),
            scales: vec![0.01; shape.padded_out()],
            input: Vec::new(),
            floats: Vec::new(),
            plain_weights: Vec::new(),
            bias: floats(d_out),
            out: Vec::new(),
            out_codes: Vec::new(),
            packed: PackedKeyValue::new(),
            frames: Vec::new(),
            filter: None,
            result: None,
            rotary: None,
            workspace: Workspace::new(),
        };
        match workload {
            Workload::GemmW8a8 { .. } | Workload::LinearW8a8 { .. } => {
                if matches!(workload, Workload::LinearW8a8 { .. }) {
                    prepared.floats = floats(rows * d_in);
                }
                prepared.weights = codes(shape.bytes());
                prepared.input = codes(rows * shape.padded_in());
                prepared.out = vec![0.0; rows * d_out];
            }
            Workload::GemmW8a16 { .. } => {
                prepared.weights = codes(shape.bytes());
                prepared.floats = floats(rows * d_in);
                prepared.out = vec![0.0; rows * d_out];
            }
            Workload::GemmF32 { .. } => {
                prepared.plain_weights = floats(d_in * d_out);
                prepared.floats = floats(rows * d_in);
                prepared.out = vec![0.0; rows * d_out];
            }
            Workload::AttentionW8a8 { .. } => {
                prepared.input = codes(3 * rows * d_in);
                prepared.out_codes = vec![0; rows * d_in];
            }
            Workload::AttentionF32 { .. } => {
                prepared.floats = floats(3 * rows * d_in);
                prepared.out = vec![0.0; rows * d_in];
            }
            Workload::ConvF32 { height, width, frames, inputs, outputs } => {
                let filter = FilterShape { outputs, inputs, frames, height: 3, width: 3 };
                prepared.filter = Some(ConvWeights::new(filter, &floats(filter.elements()), &prepared.bias)?);
                let planes = floats(rows * inputs);
                for _ in 0..frames {
                    let frame = Frame::from_planes(height, width, inputs, |channel| &planes[channel * rows..][..rows])?;
                    prepared.frames.push(frame);
                }
                prepared.result = Some(Frame::new(height, width, outputs));
            }
            Workload::LayerNorm { .. } | Workload::RmsNorm { .. } | Workload::Quantise { .. } => {
                if let Workload::RmsNorm { head_dim, .. } = workload {
                    prepared.rotary = Some(rotary_table([1, 1, rows], head_dim)?);
                }
                prepared.floats = floats(rows * d_in);
                prepared.out_codes = vec![0; rows * shape.padded_in()];
            }
        }
        Ok(prepared)
    }

    /// Scratch held after the calls so far, bytes.
    pub fn scratch_bytes(&self) -> usize {
        self.workspace.bytes() + self.packed.bytes()
    }

    /// One call.
    ///
    /// # Errors
    /// What the kernel refuses.
    pub fn run(&mut self, kernels: &Kernels) -> Result<(), KernelError> {
        let workspace = &mut self.workspace;
        let view = TiledView { shape: self.shape, codes: &self.weights, scales: &self.scales };
        match self.workload {
            Workload::GemmW8a8 { m, k, n } | Workload::LinearW8a8 { m, k, n } => {
                if matches!(self.workload, Workload::LinearW8a8 { .. }) {
                    let out = RowsMut::new("codes", &mut self.input, m, k, self.shape.padded_in())?;
                    let sink = RowSink::Codes { out, scale: 0.01 };
                    kernels.quantise(Rows::dense("input", &self.floats, m, k)?, sink, workspace)?;
                }
                let input = Codes {
                    codes: Rows::new("input", &self.input, m, k, self.shape.padded_in())?,
                    scale: ActivationScale::Tensor(0.01),
                };
                let epilogue = Epilogue { bias: Some(&self.bias), ..Epilogue::default() };
                let out = RowsMut::dense("output", &mut self.out, m, n)?;
                let sink = GemmSink::F32 { out, operands: Operands::F32 };
                kernels.gemm_w8a8(&input, &view, &epilogue, sink, workspace)
            }
            Workload::GemmW8a16 { m, k, n } | Workload::GemmF32 { m, k, n } => {
                let (weights, operands) = if matches!(self.workload, Workload::GemmF32 { .. }) {
                    (FloatWeights::OutIn(Rows::dense("weights", &self.plain_weights, n, k)?), Operands::F32)
                } else {
                    (FloatWeights::Tiled(view), Operands::F16)
                };
                let input = Rows::dense("input", &self.floats, m, k)?;
                let epilogue = FloatEpilogue { bias: Some(&self.bias), ..FloatEpilogue::default() };
                let sink = GemmSink::F32 { out: RowsMut::dense("output", &mut self.out, m, n)?, operands };
                kernels.gemm_f32(input, &weights, operands, &epilogue, sink, workspace)
            }
            Workload::AttentionW8a8 { tokens, heads, head_dim } => {
                let width = heads * head_dim;
                let [query, key, value] = thirds(&self.input).map(|data| Rows::dense("operand", data, tokens, width));
                kernels.pack_key_value(key?, value?, heads, &mut self.packed, workspace)?;
                let scale = &self.scales[..heads];
                let scales = AttentionScales { query: scale, key: scale, value: scale };
                let out = RowsMut::dense("output", &mut self.out_codes, tokens, width)?;
                let sink = AttentionSink::Codes { out, scale: 0.01 };
                kernels.attention_w8a8(query?, &self.packed, scales, sink, workspace)
            }
            Workload::AttentionF32 { tokens, heads, head_dim } => {
                let width = heads * head_dim;
                let [query, key, value] = thirds(&self.floats).map(|data| Rows::dense("operand", data, tokens, width));
                let out = RowsMut::dense("output", &mut self.out, tokens, width)?;
                let sink = AttentionSink::F32 { out, operands: Operands::F32 };
                kernels.attention_f32(query?, key?, value?, heads, Operands::F32, sink, workspace)
            }
            Workload::ConvF32 { .. } => {
                let (Some(filter), Some(result)) = (&self.filter, &mut self.result) else { return Ok(()) };
                // At most three: no allocation inside what is timed.
                let frames: [Option<&Frame>; 3] = std::array::from_fn(|frame| self.frames.get(frame));
                kernels.conv(&frames[..self.frames.len()], filter, ConvSink::Store(result), workspace)
            }
            Workload::LayerNorm { rows, .. } | Workload::RmsNorm { rows, .. } | Workload::Quantise { rows, .. } => {
                let columns = self.shape.d_in;
                let input = Rows::dense("input", &self.floats, rows, columns)?;
                let out = RowsMut::new("codes", &mut self.out_codes, rows, columns, self.shape.padded_in())?;
                let sink = RowSink::Codes { out, scale: 0.01 };
                match self.workload {
                    Workload::LayerNorm { .. } => {
                        let modulation = Modulation::AdaLn { scale: &self.bias, shift: &self.bias };
                        kernels.layer_norm(input, EPS, modulation, sink, workspace)
                    }
                    Workload::RmsNorm { .. } => {
                        kernels.rms_norm(input, EPS, &self.bias, self.rotary.as_ref(), sink, workspace)
                    }
                    _ => kernels.quantise(input, sink, workspace),
                }
            }
        }
    }
}

fn thirds<T>(data: &[T]) -> [&[T]; 3] {
    let third = data.len() / 3;
    [0, 1, 2].map(|part| &data[part * third..(part + 1) * third])
}

/// Times `samples` calls of a workload (wall clock) after one untimed call, with the peak measured before and after. On a
/// host that also does other work the fastest call is the better figure; the spread shows it.
///
/// # Errors
/// What the kernels refuse.
pub fn measure(kernels: &Kernels, workload: Workload, samples: usize) -> Result<Measured, KernelError> {
    let mut prepared = Prepared::new(workload)?;
    prepared.run(kernels)?;
    // A row operator has no products to compare.
    let peak = || workload.bytes().map_or_else(|| peak(kernels, workload.is_integer(), 5), |_| None);
    let before = peak();
    let mut times = Vec::with_capacity(samples.max(1));
    for _ in 0..samples.max(1) {
        let start = Instant::now();
        prepared.run(kernels)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let after = peak();
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let gops = workload.operations() / median / 1e6;
    let best_gops = workload.operations() / times[0] / 1e6;
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
        best_gops,
        peak_gops,
        fraction_of_peak: peak_gops.map(|peak| gops / peak),
        best_fraction_of_peak: peak_gops.map(|peak| best_gops / peak),
        scratch_bytes: prepared.scratch_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pool;

    #[test]
    fn every_workload_runs_and_counts_its_operations() {
        let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
        for workload in [
            Workload::GemmW8a8 { m: 13, k: 40, n: 33 },
            Workload::LinearW8a8 { m: 13, k: 40, n: 33 },
            Workload::GemmW8a16 { m: 13, k: 40, n: 33 },
            Workload::GemmF32 { m: 13, k: 40, n: 33 },
            Workload::AttentionW8a8 { tokens: 13, heads: 2, head_dim: 32 },
            Workload::AttentionF32 { tokens: 13, heads: 2, head_dim: 32 },
            Workload::ConvF32 { height: 5, width: 7, frames: 3, inputs: 4, outputs: 33 },
            Workload::LayerNorm { rows: 13, columns: 40 },
            Workload::RmsNorm { rows: 13, heads: 2, head_dim: 32 },
            Workload::Quantise { rows: 13, columns: 40 },
        ] {
            let row = measure(&kernels, workload, 2).unwrap();
            assert!(row.min_ms <= row.median_ms && row.median_ms <= row.max_ms);
            // Either operations or bytes are counted.
            assert_eq!(row.gops > 0.0, workload.bytes().is_none(), "{workload:?}");
            assert!(workload.bytes().is_none() || row.peak_gops.is_none(), "{workload:?}");
            assert_eq!((row.samples, row.threads), (2, 1));
            assert!(row.scratch_bytes > 0 || workload.row_operator().is_some(), "{workload:?}");
        }
        assert_eq!(Workload::GemmW8a8 { m: 2, k: 3, n: 5 }.operations().to_bits(), 60f64.to_bits());
        assert!(Prepared::new(Workload::GemmF32 { m: 1, k: 0, n: 1 }).is_err());
        if Isa::best() != Isa::Scalar {
            assert!(peak(&kernels, true, 1).unwrap() > 0.0);
        }
    }
}
