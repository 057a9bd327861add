//! Operators on whole rows: normalisation with modulation, rotary positions, softmax, quantisation.
//!
//! Each row is one thread's work from start to end, so the number of threads changes nothing.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod norm;

#[cfg(feature = "opencl")]
pub(crate) use norm::check_eps;
pub use norm::{Modulation, Norm};

use crate::math::{code, dynamic_scale, exp, lane_sum, largest_magnitude, recip, round_f16};
use crate::multiversion::multiversion;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Rows, RowsMut, Workspace};
use trefoil_weights::tile::TILE;

/// How operands of a float GEMM are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// As computed.
    F32,
    /// Rounded to the nearest FP16 value ([`crate::math::round_f16`]), kept in `f32`: the operands of `w8a16`.
    F16,
}

/// Where the rows of an operator go.
#[derive(Debug)]
pub enum RowSink<'a> {
    /// Floats.
    F32 {
        /// Destination.
        out: RowsMut<'a, f32>,
        /// Rounding on store.
        operands: Operands,
    },
    /// INT8 codes with a fixed scale; the row stride leaves room for padding to a multiple of 32, which is zeroed.
    Codes {
        /// Destination.
        out: RowsMut<'a, i8>,
        /// Value of code 1, > 0.
        scale: f32,
    },
    /// INT8 codes with a scale per row, `max|x|/127` ([`crate::math::dynamic_scale`]).
    DynamicCodes {
        /// Destination, padded as above.
        out: RowsMut<'a, i8>,
        /// One scale per row.
        scales: &'a mut [f32],
    },
}

/// Codes need room for their padding.
pub(crate) fn check_codes(
    operator: &'static str,
    out: &mut RowsMut<'_, i8>,
    scale: Option<f32>,
) -> Result<(), KernelError> {
    let padded = out.columns().next_multiple_of(TILE);
    if out.rows() > 0 && out.row_and_gap(out.rows() - 1).len() < padded
        || out.rows() > 1 && out.row_and_gap(0).len() < padded
    {
        return Err(KernelError::shapes(
            operator,
            ("the destination", out.shape()),
            ("its padded row", format!("{padded} codes")),
            "the row stride must leave room for padding to a multiple of 32",
        ));
    }
    match scale {
        Some(scale) => check_scale(operator, "the scale of the destination", scale),
        None => Ok(()),
    }
}

/// A scale must be usable as a divisor.
pub(crate) fn check_scale(operator: &'static str, what: &'static str, scale: f32) -> Result<(), KernelError> {
    if scale.is_normal() && scale > 0.0 && (1.0 / scale).is_normal() {
        Ok(())
    } else {
        Err(KernelError::value(operator, what, scale, "a scale is a finite normal number above 0"))
    }
}

/// A vector with one value per column.
pub(crate) fn check_vector(
    operator: &'static str,
    (name, vector): (&'static str, &[f32]),
    columns: usize,
) -> Result<(), KernelError> {
    if vector.len() < columns {
        return Err(KernelError::shapes(
            operator,
            (name, format!("{} values", vector.len())),
            ("the matrix", format!("{columns} columns")),
            "there must be at least one value per column",
        ));
    }
    Ok(())
}

impl<'a> RowSink<'a> {
    pub(crate) fn check(&mut self, operator: &'static str, rows: usize, columns: usize) -> Result<(), KernelError> {
        let (have, shape) = match self {
            RowSink::F32 { out, .. } => ((out.rows(), out.columns()), out.shape()),
            RowSink::Codes { out, .. } | RowSink::DynamicCodes { out, .. } => {
                ((out.rows(), out.columns()), out.shape())
            }
        };
        if have != (rows, columns) {
            return Err(KernelError::shapes(
                operator,
                ("the input", format!("{rows}×{columns}")),
                ("the destination", shape),
                "they must have the same shape",
            ));
        }
        match self {
            RowSink::F32 { .. } => Ok(()),
            RowSink::Codes { out, scale } => check_codes(operator, out, Some(*scale)),
            RowSink::DynamicCodes { out, scales } => {
                if scales.len() < rows {
                    return Err(KernelError::shapes(
                        operator,
                        ("the scales", format!("{} values", scales.len())),
                        ("the destination", out.shape()),
                        "there must be one scale per row",
                    ));
                }
                check_codes(operator, out, None)
            }
        }
    }

    pub(crate) fn take_rows(&mut self, count: usize) -> RowSink<'a> {
        match self {
            RowSink::F32 { out, operands } => RowSink::F32 { out: out.take_rows(count), operands: *operands },
            RowSink::Codes { out, scale } => RowSink::Codes { out: out.take_rows(count), scale: *scale },
            RowSink::DynamicCodes { out, scales } => {
                let all = std::mem::take(scales);
                let (head, tail) = all.split_at_mut(count.min(all.len()));
                *scales = tail;
                RowSink::DynamicCodes { out: out.take_rows(count), scales: head }
            }
        }
    }

    fn store(&mut self, isa: crate::isa::Supported, row: usize, values: &[f32]) {
        let padded = values.len().next_multiple_of(TILE);
        match self {
            RowSink::F32 { out, operands: Operands::F32 } => out.row_mut(row).copy_from_slice(values),
            RowSink::F32 { out, operands: Operands::F16 } => round_row(isa, values, out.row_mut(row)),
            RowSink::Codes { out, scale } => {
                let (codes, padding) = out.row_and_gap(row)[..padded].split_at_mut(values.len());
                quantise_row(isa, values, 1.0 / *scale, codes);
                padding.fill(0);
            }
            RowSink::DynamicCodes { out, scales } => {
                let (codes, padding) = out.row_and_gap(row)[..padded].split_at_mut(values.len());
                quantise_row_dynamic(isa, values, codes, &mut scales[row]);
                padding.fill(0);
            }
        }
    }
}

multiversion! {
    fn round_row(values: &[f32], out: &mut [f32]) {
        for (out, &value) in out.iter_mut().zip(values) {
            *out = round_f16(value);
        }
    }
}

multiversion! {
    fn quantise_row(values: &[f32], inverse: f32, codes: &mut [i8]) {
        for (out, &value) in codes.iter_mut().zip(values) {
            *out = code(value, inverse);
        }
    }
}

multiversion! {
    fn quantise_row_dynamic(values: &[f32], codes: &mut [i8], scale: &mut f32) {
        let (row_scale, inverse) = dynamic_scale(largest_magnitude(values));
        *scale = row_scale;
        for (out, &value) in codes.iter_mut().zip(values) {
            *out = code(value, inverse);
        }
    }
}

multiversion! {
    /// `exp(x − max)/Σ`; the sum is a lane sum, the quotient a product with its reciprocal.
    fn softmax_row(values: &[f32], out: &mut [f32]) {
        let mut largest = [f32::NEG_INFINITY; crate::math::LANES];
        for chunk in values.chunks(crate::math::LANES) {
            for (largest, &value) in largest.iter_mut().zip(chunk) {
                *largest = if value > *largest { value } else { *largest };
            }
        }
        let largest = largest.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
        for (out, &value) in out.iter_mut().zip(values) {
            *out = exp(value - largest);
        }
        let factor = recip(lane_sum(out, |x| x));
        for out in out.iter_mut() {
            *out *= factor;
        }
    }
}

impl Kernels {
    /// Does `compute(row number, input row, scratch row)` for every row and stores the scratch rows.
    fn row_operator(
        &self,
        operator: &'static str,
        input: Rows<'_, f32>,
        mut sink: RowSink<'_>,
        workspace: &mut Workspace,
        compute: impl Fn(usize, &[f32], &mut [f32]) + Sync,
    ) -> Result<(), KernelError> {
        sink.check(operator, input.rows(), input.columns())?;
        self.run_parts(
            input.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                let scratch = at_least(&mut part.slot.floats, input.columns());
                for row in 0..part.rows {
                    compute(part.first + row, input.row(part.first + row), scratch);
                    part.sink.store(self.supported(), row, scratch);
                }
            },
        );
        Ok(())
    }

    /// Softmax of every row.
    ///
    /// # Errors
    /// Shapes that differ.
    pub fn softmax(
        &self,
        input: Rows<'_, f32>,
        sink: RowSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        self.row_operator("softmax", input, sink, workspace, |_, values, out| {
            softmax_row(self.supported(), values, out);
        })
    }

    /// Stores rows as the sink says: quantised with a fixed scale or one per row, rounded to FP16, or copied.
    ///
    /// # Errors
    /// Shapes that differ, a scale that is not a positive number.
    pub fn quantise(
        &self,
        input: Rows<'_, f32>,
        mut sink: RowSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        sink.check("quantise", input.rows(), input.columns())?;
        // Straight from the input: there is nothing to compute in between.
        self.run_parts(
            input.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                for row in 0..part.rows {
                    part.sink.store(self.supported(), row, input.row(part.first + row));
                }
            },
        );
        Ok(())
    }
}
