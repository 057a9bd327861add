//! What is measured: kernels at sizes.

#[cfg(doc)]
use crate::Kernels;
use serde::Serialize;

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
    /// [`Kernels::quantise`] with a static scale and then [`Workload::GemmW8a8`]: f32 in, f32 out, what other libraries do in
    /// one call.
    LinearW8a8 {
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
    /// [`Kernels::layer_norm`] with AdaLN modulation, f32 in, codes out.
    LayerNorm {
        /// Rows.
        rows: usize,
        /// Elements of a row.
        columns: usize,
    },
    /// [`Kernels::rms_norm`] over all heads with rotary positions, f32 in, codes out.
    RmsNorm {
        /// Rows.
        rows: usize,
        /// Heads.
        heads: usize,
        /// Columns of a head.
        head_dim: usize,
    },
    /// [`Kernels::quantise`] with a static scale.
    Quantise {
        /// Rows.
        rows: usize,
        /// Elements of a row.
        columns: usize,
    },
    /// [`Kernels::conv`], 3 × 3 over `frames` frames.
    ConvF32 {
        /// Rows of pixels.
        height: usize,
        /// Pixels of a row.
        width: usize,
        /// Frames under the filter, 1 or 3.
        frames: usize,
        /// Input channels.
        inputs: usize,
        /// Output channels.
        outputs: usize,
    },
}

impl Workload {
    /// Operations of one call: two per multiply-add of the products, nothing else; none of a row operator.
    pub fn operations(&self) -> f64 {
        match *self {
            Workload::GemmW8a8 { m, k, n }
            | Workload::LinearW8a8 { m, k, n }
            | Workload::GemmW8a16 { m, k, n }
            | Workload::GemmF32 { m, k, n } => 2.0 * m as f64 * k as f64 * n as f64,
            Workload::AttentionW8a8 { tokens, heads, head_dim }
            | Workload::AttentionF32 { tokens, heads, head_dim } => {
                4.0 * tokens as f64 * tokens as f64 * (heads * head_dim) as f64
            }
            Workload::ConvF32 { height, width, frames, inputs, outputs } => {
                2.0 * (height * width) as f64 * (9 * frames * inputs) as f64 * outputs as f64
            }
            Workload::LayerNorm { .. } | Workload::RmsNorm { .. } | Workload::Quantise { .. } => 0.0,
        }
    }

    /// Bytes that a call of a row operator reads and writes, f32 in and codes out; `None` for products, whose speed is counted
    /// in operations.
    pub fn bytes(&self) -> Option<f64> {
        let (rows, columns) = self.row_operator()?;
        Some((rows * columns * (size_of::<f32>() + size_of::<i8>())) as f64)
    }

    /// Rows and columns of a row operator.
    pub(crate) fn row_operator(&self) -> Option<(usize, usize)> {
        match *self {
            Workload::LayerNorm { rows, columns } | Workload::Quantise { rows, columns } => Some((rows, columns)),
            Workload::RmsNorm { rows, heads, head_dim } => Some((rows, heads * head_dim)),
            _ => None,
        }
    }

    /// Whether there is an OpenCL kernel: the `w8a8` path.
    pub fn has_opencl(&self) -> bool {
        self.is_integer() || self.row_operator().is_some()
    }

    /// The row operators of a block of the 1.3 B model.
    pub fn of_the_rows(rows: usize) -> [Workload; 3] {
        [
            Workload::LayerNorm { rows, columns: 1536 },
            Workload::RmsNorm { rows, heads: 12, head_dim: 128 },
            Workload::Quantise { rows, columns: 1536 },
        ]
    }

    /// Whether its products are of INT8 codes.
    pub fn is_integer(&self) -> bool {
        matches!(self, Workload::GemmW8a8 { .. } | Workload::LinearW8a8 { .. } | Workload::AttentionW8a8 { .. })
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

    /// Convolutions of the VAE decoder at 240 × 416 pixels, from the latent's resolution to the frame's.
    pub fn of_the_decoder() -> Vec<Workload> {
        [(30, 52, 384), (60, 104, 384), (120, 208, 192), (240, 416, 96)]
            .map(|(height, width, channels)| Workload::ConvF32 {
                height,
                width,
                frames: 3,
                inputs: channels,
                outputs: channels,
            })
            .to_vec()
    }
}
