//! Operators on whole rows: normalisation with modulation, rotary positions, softmax, quantisation.
//!
//! Each row is one thread's work from start to end, so the number of threads changes nothing.

#[cfg(target_arch = "x86_64")]
mod avx512;

use crate::math::{code, dynamic_scale, exp, lane_sum, largest_magnitude, recip, round_f16, rsqrt};
use crate::multiversion::multiversion;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, RotaryTable, Rows, RowsMut, Workspace};
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

/// What follows a LayerNorm.
#[derive(Debug, Clone, Copy)]
pub enum Modulation<'a> {
    /// Nothing.
    None,
    /// `n·gain + bias`.
    Affine {
        /// One per column.
        gain: &'a [f32],
        /// One per column.
        bias: &'a [f32],
    },
    /// `n·(1 + scale) + shift` (AdaLN).
    AdaLn {
        /// One per column.
        scale: &'a [f32],
        /// One per column.
        shift: &'a [f32],
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
    fn check(&mut self, operator: &'static str, rows: usize, columns: usize) -> Result<(), KernelError> {
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

    fn take_rows(&mut self, count: usize) -> RowSink<'a> {
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
    /// `n = (x − mean)·rsqrt(var + eps)`, then the modulation. `per_column` is 1/columns.
    fn layer_norm_row(values: &[f32], per_column: f32, eps: f32, modulation: Modulation<'_>, out: &mut [f32]) {
        let mean = lane_sum(values, |x| x) * per_column;
        let variance = lane_sum(values, |x| (x - mean) * (x - mean)) * per_column;
        let factor = rsqrt(variance + eps);
        match modulation {
            Modulation::None => {
                for (out, &x) in out.iter_mut().zip(values) {
                    *out = (x - mean) * factor;
                }
            }
            Modulation::Affine { gain, bias } => {
                for ((out, &x), (&gain, &bias)) in out.iter_mut().zip(values).zip(gain.iter().zip(bias)) {
                    *out = ((x - mean) * factor) * gain + bias;
                }
            }
            Modulation::AdaLn { scale, shift } => {
                for ((out, &x), (&scale, &shift)) in out.iter_mut().zip(values).zip(scale.iter().zip(shift)) {
                    *out = ((x - mean) * factor) * (1.0 + scale) + shift;
                }
            }
        }
    }
}

multiversion! {
    /// `x·rsqrt(mean(x²) + eps)·gain`.
    fn rms_norm_row(values: &[f32], per_column: f32, eps: f32, gain: &[f32], out: &mut [f32]) {
        let factor = rsqrt(lane_sum(values, |x| x * x) * per_column + eps);
        for ((out, &x), &gain) in out.iter_mut().zip(values).zip(gain) {
            *out = (x * factor) * gain;
        }
    }
}

multiversion! {
    /// `(a, b) → (a·cos − b·sin, a·sin + b·cos)` on the adjacent pairs of every head.
    fn rotate_row(cos: &[f32], sin: &[f32], row: &mut [f32]) {
        for head in row.chunks_exact_mut(cos.len() * 2) {
            for ((pair, &cos), &sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                let [a, b] = *pair;
                *pair = [a * cos - b * sin, a * sin + b * cos];
            }
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

    /// Does `work` on every part, straight from the input to codes; nothing where `sink` takes something else.
    #[cfg(target_arch = "x86_64")]
    fn to_codes(
        &self,
        (operator, eps): (&'static str, f32),
        input: Rows<'_, f32>,
        mut sink: RowSink<'_>,
        workspace: &mut Workspace,
        work: impl Fn(&mut avx512::ToCodes<'_, '_>) + Sync,
    ) -> Result<(), KernelError> {
        sink.check(operator, input.rows(), input.columns())?;
        let per_column = 1.0 / input.columns() as f32;
        self.run_parts(
            input.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                if let RowSink::Codes { out, scale } = &mut part.sink {
                    let rows = input.part(part.first, part.rows);
                    let inverse = 1.0 / *scale;
                    let ahead = avx512::TOGETHER * input.stride();
                    work(&mut avx512::ToCodes { input: rows, out, per_column, eps, inverse, ahead });
                }
            },
        );
        Ok(())
    }

    /// LayerNorm (biased variance) of every row with what follows it, in f32; `eps` is added to the variance.
    ///
    /// # Errors
    /// Shapes that differ, vectors shorter than a row, no columns.
    pub fn layer_norm(
        &self,
        input: Rows<'_, f32>,
        eps: f32,
        modulation: Modulation<'_>,
        sink: RowSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "layer_norm";
        check_eps(operator, input.columns(), eps)?;
        match modulation {
            Modulation::None => {}
            Modulation::Affine { gain, bias } => {
                check_vector(operator, ("gain", gain), input.columns())?;
                check_vector(operator, ("bias", bias), input.columns())?;
            }
            Modulation::AdaLn { scale, shift } => {
                check_vector(operator, ("scale", scale), input.columns())?;
                check_vector(operator, ("shift", shift), input.columns())?;
            }
        }
        let per_column = 1.0 / input.columns() as f32;
        #[cfg(target_arch = "x86_64")]
        if self.isa() == crate::Isa::Avx512Vnni && matches!(sink, RowSink::Codes { .. }) {
            return self.to_codes((operator, eps), input, sink, workspace, |rows| {
                // SAFETY: the instruction set was just asked for.
                unsafe { rows.layer_norm(modulation) }
            });
        }
        self.row_operator(operator, input, sink, workspace, |_, values, out| {
            layer_norm_row(self.supported(), values, per_column, eps, modulation, out);
        })
    }

    /// RMSNorm of every row over all its columns (all heads together), times `gain`, then rotary positions where a table is
    /// given: row `r` has position `r`.
    ///
    /// # Errors
    /// Shapes that differ, a table with fewer positions than rows or whose heads do not divide a row.
    pub fn rms_norm(
        &self,
        input: Rows<'_, f32>,
        eps: f32,
        gain: &[f32],
        rotary: Option<&RotaryTable>,
        sink: RowSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "rms_norm";
        check_eps(operator, input.columns(), eps)?;
        check_vector(operator, ("gain", gain), input.columns())?;
        if let Some(table) = rotary {
            if table.positions < input.rows() || table.pairs == 0 || !input.columns().is_multiple_of(table.pairs * 2) {
                return Err(KernelError::shapes(
                    operator,
                    ("the input", input.shape()),
                    ("the rotary table", format!("{} positions of {} pairs", table.positions, table.pairs)),
                    "there must be a position per row, and whole heads in a row",
                ));
            }
            if table.cos.len() < table.positions * table.pairs || table.sin.len() < table.positions * table.pairs {
                return Err(KernelError::shapes(
                    operator,
                    ("the rotary table", format!("{} positions of {} pairs", table.positions, table.pairs)),
                    ("its entries", format!("{} cosines and {} sines", table.cos.len(), table.sin.len())),
                    "there must be one of each per position and pair",
                ));
            }
        }
        let per_column = 1.0 / input.columns() as f32;
        #[cfg(target_arch = "x86_64")]
        if self.isa() == crate::Isa::Avx512Vnni && matches!(sink, RowSink::Codes { .. }) && rotary.is_none() {
            return self.to_codes((operator, eps), input, sink, workspace, |rows| {
                // SAFETY: the instruction set was just asked for.
                unsafe { rows.rms_norm(gain) }
            });
        }
        self.row_operator(operator, input, sink, workspace, |row, values, out| {
            rms_norm_row(self.supported(), values, per_column, eps, gain, out);
            if let Some(table) = rotary {
                let (cos, sin) = table.row(row);
                rotate_row(self.supported(), cos, sin, out);
            }
        })
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

/// A norm needs columns and a usable `eps`.
pub(crate) fn check_eps(operator: &'static str, columns: usize, eps: f32) -> Result<(), KernelError> {
    if columns == 0 {
        return Err(KernelError::value(operator, "the number of columns", 0, "a norm needs at least one"));
    }
    if !(eps.is_normal() && eps > 0.0) {
        return Err(KernelError::value(operator, "eps", eps, "it must be a normal number above 0"));
    }
    Ok(())
}
