//! `w8a8`: a product and the norm of its rows, a block of rows at a time: what the product writes is still in the second-level cache when
//! the norm reads it. A whole matrix of floats would go to memory and come back.

use super::int8::{Gemm, GemmScratch, check_product};
use super::{Codes, Epilogue, GemmSink};
use crate::isa::Supported;
use crate::kernel::{TILE_ROWS, even_step};
use crate::rows::Operands;
use crate::view::Extent;
use crate::workspace::lines;
use crate::{Isa, KernelError, Kernels, Norm, RowSink, Rows, RowsMut, Workspace};
use trefoil_weights::TiledView;

/// A norm after a product, and where its rows go.
#[derive(Debug)]
pub struct NormSink<'a> {
    /// The norm.
    pub norm: Norm<'a>,
    /// `M × d_out`.
    pub out: RowSink<'a>,
}

impl<'a> NormSink<'a> {
    fn check(&mut self, operator: &'static str, rows: usize, columns: usize) -> Result<(), KernelError> {
        self.norm.check(operator, (rows, columns, Extent::new(rows, columns)))?;
        self.out.check(operator, rows, columns)
    }

    fn take_rows(&mut self, count: usize) -> NormSink<'a> {
        NormSink { norm: self.norm, out: self.out.take_rows(count) }
    }
}

/// Rows of a block, whose codes and floats stay in the second-level cache beside a tile column. At least some, because every block reads
/// all weights.
fn rows_of_block(isa: Supported, rows: usize, d_in: usize, d_out: usize) -> usize {
    // Bytes of cache; rows at least and at most. A tile unit needs more rows for the weights that it reads, and has a larger cache.
    let (cache, least, most) = match isa.isa() {
        Isa::AmxInt8 => (1536 * 1024, 16 * TILE_ROWS, 32 * TILE_ROWS),
        _ => (768 * 1024, 8 * TILE_ROWS, 20 * TILE_ROWS),
    };
    let fit = cache / (d_in + size_of::<f32>() * d_out).max(1) / TILE_ROWS * TILE_ROWS;
    even_step(rows, fit.clamp(least, most))
}

impl Kernels {
    /// `sink ← norm(epilogue(input · weights))`: the bits of [`Kernels::gemm_w8a8`] to floats and a norm of them, which are never there as a
    /// whole.
    ///
    /// # Errors
    /// Shapes that do not fit each other (with both shapes), scales that are not positive numbers.
    pub fn gemm_w8a8_norm(
        &self,
        input: &Codes<'_>,
        weights: &TiledView<'_>,
        epilogue: &Epilogue<'_>,
        mut sink: NormSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "gemm_w8a8_norm";
        let columns = weights.shape.d_out;
        check_product(operator, input, weights, epilogue)?;
        sink.check(operator, input.codes.rows(), columns)?;
        self.run_parts(
            input.codes.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                let step = rows_of_block(self.supported(), part.rows, weights.shape.d_in, columns);
                let floats = lines(&mut part.slot.floats, (step + 1) * columns);
                let (block, scratch) = floats.split_at_mut(step * columns);
                for offset in (0..part.rows).step_by(step) {
                    let (first, rows) = (part.first + offset, step.min(part.rows - offset));
                    let (isa, input, weights, epilogue) = (self.supported(), *input, *weights, *epilogue);
                    let gemm = Gemm { isa, input, weights, epilogue, first, rows };
                    let out = RowsMut::whole(&mut block[..rows * columns], rows, columns);
                    let scratch_of_product = GemmScratch { sums: &mut part.slot.integers, codes: &mut part.slot.codes };
                    gemm.run(&mut GemmSink::F32 { out, operands: Operands::F32 }, scratch_of_product);
                    let values = Rows::whole(&block[..rows * columns], rows, columns);
                    sink_rows(isa, values, first, &mut part.sink.take_rows(rows), scratch);
                }
            },
        );
        Ok(())
    }

    /// `product ← epilogue(input · weights)`, floats or added to a state, and `sink ← norm(product)`: the bits of [`Kernels::gemm_w8a8`] and a
    /// norm after it.
    ///
    /// # Errors
    /// Shapes that do not fit each other (with both shapes), scales that are not positive numbers, a product that goes to codes.
    pub fn gemm_w8a8_then_norm(
        &self,
        input: &Codes<'_>,
        weights: &TiledView<'_>,
        epilogue: &Epilogue<'_>,
        mut product: GemmSink<'_>,
        mut sink: NormSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "gemm_w8a8_then_norm";
        let columns = weights.shape.d_out;
        check_product(operator, input, weights, epilogue)?;
        product.check(operator, input.codes.rows(), columns)?;
        if let GemmSink::Codes { .. } = product {
            return Err(KernelError::value(operator, "the product", "codes", "a norm takes floats or a state"));
        }
        sink.check(operator, input.codes.rows(), columns)?;
        self.run_parts(
            input.codes.rows(),
            workspace,
            |count| (product.take_rows(count), sink.take_rows(count)),
            |part| {
                let (product, sink) = &mut part.sink;
                let step = rows_of_block(self.supported(), part.rows, weights.shape.d_in, columns);
                let scratch = lines(&mut part.slot.floats, columns);
                for offset in (0..part.rows).step_by(step) {
                    let (first, rows) = (part.first + offset, step.min(part.rows - offset));
                    let (isa, input, weights, epilogue) = (self.supported(), *input, *weights, *epilogue);
                    let gemm = Gemm { isa, input, weights, epilogue, first, rows };
                    let mut block = product.take_rows(rows);
                    let scratch_of_product = GemmScratch { sums: &mut part.slot.integers, codes: &mut part.slot.codes };
                    gemm.run(&mut block, scratch_of_product);
                    if let GemmSink::F32 { out: values, .. } | GemmSink::Residual { state: values, .. } = &block {
                        sink_rows(isa, values.as_rows(), first, &mut sink.take_rows(rows), scratch);
                    }
                }
            },
        );
        Ok(())
    }
}

/// Normalises a block of rows.
fn sink_rows(isa: Supported, values: Rows<'_, f32>, first: usize, sink: &mut NormSink<'_>, scratch: &mut [f32]) {
    sink.norm.run(isa, values, first, &mut sink.out, scratch);
}
