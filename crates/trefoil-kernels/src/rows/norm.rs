//! Norms of rows, with what follows them.

use super::{RowSink, check_vector};
use crate::isa::Supported;
use crate::math::{lane_sum, rsqrt};
use crate::multiversion::multiversion;
use crate::view::Extent;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, RotaryTable, Rows, Workspace};

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

/// A norm of every row over all its columns, and what follows it; `eps` is added to the variance or the mean square.
#[derive(Debug, Clone, Copy)]
pub enum Norm<'a> {
    /// LayerNorm (biased variance).
    Layer {
        /// A normal number above 0.
        eps: f32,
        /// What follows.
        modulation: Modulation<'a>,
    },
    /// RMSNorm, all heads together.
    Rms {
        /// A normal number above 0.
        eps: f32,
        /// One per column.
        gain: &'a [f32],
        /// Positions that the heads are turned to then: row `r` has position `r`.
        rotary: Option<&'a RotaryTable>,
    },
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

impl Norm<'_> {
    /// Whether `rows × columns` values (`shape`) can be normalised.
    pub(crate) fn check(
        &self,
        operator: &'static str,
        (rows, columns, shape): (usize, usize, Extent),
    ) -> Result<(), KernelError> {
        let vector = |name, vector| check_vector(operator, (name, vector), columns);
        match *self {
            Norm::Layer { eps, modulation } => {
                check_eps(operator, columns, eps)?;
                match modulation {
                    Modulation::None => Ok(()),
                    Modulation::Affine { gain, bias } => vector("gain", gain).and_then(|()| vector("bias", bias)),
                    Modulation::AdaLn { scale, shift } => vector("scale", scale).and_then(|()| vector("shift", shift)),
                }
            }
            Norm::Rms { eps, gain, rotary } => {
                check_eps(operator, columns, eps)?;
                vector("gain", gain)?;
                rotary.map_or(Ok(()), |table| check_rotary(operator, table, (rows, columns, shape)))
            }
        }
    }

    /// Normalises rows, the first of which is row `first` of the whole; the sink starts there too. `scratch` holds a row.
    pub(crate) fn run(
        &self,
        isa: Supported,
        input: Rows<'_, f32>,
        first: usize,
        sink: &mut RowSink<'_>,
        scratch: &mut [f32],
    ) {
        let columns = input.columns();
        let per_column = 1.0 / columns as f32;
        #[cfg(target_arch = "x86_64")]
        if isa.has_avx512_vnni()
            && self.fills_registers()
            && let RowSink::Codes { out, scale } = sink
        {
            let (eps, inverse) = (self.eps(), 1.0 / *scale);
            let ahead = super::avx512::TOGETHER * input.stride();
            let mut rows = super::avx512::ToCodes { input, first, out, per_column, eps, inverse, ahead };
            // SAFETY: `isa` vouches for the instruction set.
            return unsafe {
                match *self {
                    Norm::Layer { modulation, .. } => rows.layer_norm(modulation),
                    Norm::Rms { gain, rotary: None, .. } => rows.rms_norm(gain),
                    Norm::Rms { gain, rotary: Some(table), .. } => rows.rms_norm_rotary(gain, table),
                }
            };
        }
        let scratch = &mut scratch[..columns];
        for row in 0..input.rows() {
            let values = input.row(row);
            match *self {
                Norm::Layer { eps, modulation } => layer_norm_row(isa, values, per_column, eps, modulation, scratch),
                Norm::Rms { eps, gain, rotary } => {
                    rms_norm_row(isa, values, per_column, eps, gain, scratch);
                    if let Some(table) = rotary {
                        let (cos, sin) = table.row(first + row);
                        rotate_row(isa, cos, sin, scratch);
                    }
                }
            }
            sink.store(isa, row, scratch);
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn eps(&self) -> f32 {
        match *self {
            Norm::Layer { eps, .. } | Norm::Rms { eps, .. } => eps,
        }
    }

    /// Whether the pairs of a head, if there are any, fill whole registers.
    #[cfg(target_arch = "x86_64")]
    fn fills_registers(&self) -> bool {
        match self {
            Norm::Rms { rotary: Some(table), .. } => (2 * table.pairs).is_multiple_of(crate::math::LANES),
            _ => true,
        }
    }
}

/// A position per row, and whole heads in a row.
fn check_rotary(
    operator: &'static str,
    table: &RotaryTable,
    (rows, columns, shape): (usize, usize, Extent),
) -> Result<(), KernelError> {
    if table.positions < rows || table.pairs == 0 || !columns.is_multiple_of(table.pairs * 2) {
        return Err(KernelError::shapes(
            operator,
            ("the input", shape),
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
    Ok(())
}

impl Kernels {
    fn norm(
        &self,
        operator: &'static str,
        input: Rows<'_, f32>,
        norm: Norm<'_>,
        mut sink: RowSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        norm.check(operator, (input.rows(), input.columns(), input.shape()))?;
        sink.check(operator, input.rows(), input.columns())?;
        self.run_parts(
            input.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                let scratch = at_least(&mut part.slot.floats, input.columns());
                let rows = input.part(part.first, part.rows);
                norm.run(self.supported(), rows, part.first, &mut part.sink, scratch);
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
        self.norm("layer_norm", input, Norm::Layer { eps, modulation }, sink, workspace)
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
        self.norm("rms_norm", input, Norm::Rms { eps, gain, rotary }, sink, workspace)
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
