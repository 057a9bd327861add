//! The workloads of [`crate::bench`] on an OpenCL device.

use super::{
    ActivationScale, AttentionSink, Buffer, Codes, Epilogue, GemmSink, Kernels, Modulation, OpenClError,
    PackedKeyValue, RotaryTable, RowSink, Tiled,
};
use crate::bench::{EPS, Workload, codes, floats};
use crate::{AttentionScales, KernelError, Operands, rotary_table};
use trefoil_weights::tile::TileShape;

/// A workload with its operands in buffers, ready to run.
#[derive(Debug)]
pub struct Prepared<'k> {
    kernels: &'k Kernels,
    workload: Workload,
    shape: TileShape,
    weights: Buffer<i8>,
    scales: Buffer<f32>,
    bias: Buffer<f32>,
    floats: Buffer<f32>,
    input: Buffer<i8>,
    out: Buffer<f32>,
    out_codes: Buffer<i8>,
    packed: PackedKeyValue,
    rotary: Option<RotaryTable>,
}

impl<'k> Prepared<'k> {
    /// Makes the operands, the same as [`crate::bench::Prepared`].
    ///
    /// # Errors
    /// A size of zero, a workload without an OpenCL kernel ([`Workload::has_opencl`]); errors of the library.
    pub fn new(kernels: &'k Kernels, workload: Workload) -> Result<Prepared<'k>, OpenClError> {
        let refuse = |rule| KernelError::value("bench", "the workload", format!("{workload:?}"), rule);
        let (rows, d_in, d_out) = match workload {
            Workload::GemmW8a8 { m, k, n } | Workload::LinearW8a8 { m, k, n } => (m, k, n),
            Workload::AttentionW8a8 { tokens, heads, head_dim } => (tokens, heads * head_dim, heads * head_dim),
            _ => match workload.row_operator() {
                Some((rows, columns)) => (rows, columns, columns),
                None => return Err(refuse("OpenCL runs the w8a8 path").into()),
            },
        };
        let shape = TileShape::new(d_in, d_out).ok_or_else(|| refuse("every size must be above 0"))?;
        let is_gemm = matches!(workload, Workload::GemmW8a8 { .. } | Workload::LinearW8a8 { .. });
        let reads_floats = workload.row_operator().is_some() || matches!(workload, Workload::LinearW8a8 { .. });
        // What a workload does not use has one element.
        let input = match workload {
            Workload::AttentionW8a8 { .. } => 3 * rows * d_in,
            _ if is_gemm => rows * shape.padded_in(),
            _ => 1,
        };
        let rotary = match workload {
            Workload::RmsNorm { head_dim, .. } => Some(kernels.rotary_table(&rotary_table([1, 1, rows], head_dim)?)?),
            _ => None,
        };
        Ok(Prepared {
            kernels,
            workload,
            shape,
            weights: if is_gemm { kernels.copied(&codes(shape.bytes()))? } else { kernels.zeroed(1)? },
            scales: kernels.copied(&vec![0.01; shape.padded_out()])?,
            bias: kernels.copied(&floats(d_out))?,
            floats: kernels.copied(&floats(if reads_floats { rows * d_in } else { 1 }))?,
            input: kernels.copied(&codes(input))?,
            out: kernels.zeroed(if is_gemm { rows * d_out } else { 1 })?,
            out_codes: kernels.zeroed(if is_gemm { 1 } else { rows * shape.padded_in() })?,
            packed: PackedKeyValue::new(),
            rotary,
        })
    }

    /// One call, waited for.
    ///
    /// # Errors
    /// Errors of the kernels and of the library.
    pub fn run(&mut self) -> Result<(), OpenClError> {
        let kernels = self.kernels;
        match self.workload {
            Workload::AttentionW8a8 { tokens, heads, head_dim } => {
                let width = heads * head_dim;
                let [query, key, value] =
                    [0, 1, 2].map(|part| self.input.rows("operand", (part * tokens * width, tokens, width, width)));
                kernels.pack_key_value(key?, value?, heads, &mut self.packed)?;
                let scale = vec![0.01; heads];
                let scales = AttentionScales { query: &scale, key: &scale, value: &scale };
                let out = self.out_codes.rows_mut("output", (0, tokens, width, width))?;
                kernels.attention_w8a8(query?, &self.packed, scales, AttentionSink::Codes { out, scale: 0.01 })?;
            }
            Workload::GemmW8a8 { m, k, n } | Workload::LinearW8a8 { m, k, n } => {
                let stride = self.shape.padded_in();
                if matches!(self.workload, Workload::LinearW8a8 { .. }) {
                    let out = self.input.rows_mut("codes", (0, m, k, stride))?;
                    let sink = RowSink::Codes { out, scale: 0.01 };
                    kernels.quantise(self.floats.rows("input", (0, m, k, k))?, sink)?;
                }
                let weights = Tiled { shape: self.shape, codes: &self.weights, first: 0, scales: self.scales.vector() };
                let input =
                    Codes { codes: self.input.rows("input", (0, m, k, stride))?, scale: ActivationScale::Tensor(0.01) };
                let epilogue = Epilogue { bias: Some(self.bias.vector()), ..Epilogue::default() };
                let out = self.out.rows_mut("output", (0, m, n, n))?;
                kernels.gemm_w8a8(&input, &weights, &epilogue, GemmSink::F32 { out, operands: Operands::F32 })?;
            }
            _ => {
                let (columns, stride) = (self.shape.d_in, self.shape.padded_in());
                let (rows, _) = self.workload.row_operator().unwrap_or_default();
                let input = self.floats.rows("input", (0, rows, columns, columns))?;
                let sink =
                    RowSink::Codes { out: self.out_codes.rows_mut("codes", (0, rows, columns, stride))?, scale: 0.01 };
                let vector = self.bias.vector();
                match self.workload {
                    Workload::LayerNorm { .. } => {
                        let modulation = Modulation::AdaLn { scale: vector, shift: vector };
                        kernels.layer_norm(input, EPS, modulation, sink)?;
                    }
                    Workload::RmsNorm { .. } => {
                        kernels.rms_norm(input, EPS, vector, self.rotary.as_ref(), sink)?;
                    }
                    _ => kernels.quantise(input, sink)?,
                }
            }
        }
        kernels.finish()
    }
}
