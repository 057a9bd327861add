//! The workloads of [`crate::bench`] on an OpenCL device.

use super::{
    ActivationScale, AttentionSink, Buffer, Codes, Epilogue, GemmSink, Kernels, OpenClError, PackedKeyValue, RowSink,
    Tiled,
};
use crate::bench::{Workload, codes, floats};
use crate::{AttentionScales, KernelError, Operands};
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
}

impl<'k> Prepared<'k> {
    /// Makes the operands, the same as [`crate::bench::Prepared`].
    ///
    /// # Errors
    /// A size of zero, a workload without an OpenCL kernel (the `f32` and `w8a16` paths); errors of the library.
    pub fn new(kernels: &'k Kernels, workload: Workload) -> Result<Prepared<'k>, OpenClError> {
        let refuse = |rule| KernelError::value("bench", "the workload", format!("{workload:?}"), rule);
        let (rows, d_in, d_out, is_attention) = match workload {
            Workload::GemmW8a8 { m, k, n } | Workload::LinearW8a8 { m, k, n } => (m, k, n, false),
            Workload::AttentionW8a8 { tokens, heads, head_dim } => (tokens, heads * head_dim, heads * head_dim, true),
            _ => return Err(refuse("OpenCL runs the w8a8 path").into()),
        };
        let shape = TileShape::new(d_in, d_out).ok_or_else(|| refuse("every size must be above 0"))?;
        let quantises = matches!(workload, Workload::LinearW8a8 { .. });
        Ok(Prepared {
            kernels,
            workload,
            shape,
            weights: if is_attention { kernels.zeroed(1)? } else { kernels.copied(&codes(shape.bytes()))? },
            scales: kernels.copied(&vec![0.01; shape.padded_out()])?,
            bias: kernels.copied(&floats(d_out))?,
            floats: kernels.copied(&floats(if quantises { rows * d_in } else { 1 }))?,
            input: kernels.copied(&codes(if is_attention { 3 * rows * d_in } else { rows * shape.padded_in() }))?,
            out: kernels.zeroed(if is_attention { 1 } else { rows * d_out })?,
            out_codes: kernels.zeroed(if is_attention { rows * d_in } else { 1 })?,
            packed: PackedKeyValue::new(),
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
            _ => {}
        }
        kernels.finish()
    }
}
