//! Operators on whole rows.

use super::call::{DISPATCH_ELEMENTS, SINK_CODES, SINK_DYNAMIC, SINK_F32};
use super::gemm::{FLAG_ROUND_F16, check_codes, check_vector};
use super::kernels::State;
use super::{Buffer, Kernels, OpenClError, Rows, RowsMut, Vector};
use crate::rows::check_eps;
use crate::{KernelError, Operands};

const COPY: u32 = 0;
const LAYER_NORM: u32 = 1;
const RMS_NORM: u32 = 2;
const SOFTMAX: u32 = 3;

/// What follows a LayerNorm, see [`crate::Modulation`].
#[derive(Debug, Clone, Copy)]
pub enum Modulation<'b> {
    /// Nothing.
    None,
    /// `n·gain + bias`.
    Affine {
        /// One per column.
        gain: Vector<'b>,
        /// One per column.
        bias: Vector<'b>,
    },
    /// `n·(1 + scale) + shift` (AdaLN).
    AdaLn {
        /// One per column.
        scale: Vector<'b>,
        /// One per column.
        shift: Vector<'b>,
    },
}

/// Where the rows of an operator go, see [`crate::RowSink`].
#[derive(Debug)]
pub enum RowSink<'b> {
    /// Floats.
    F32 {
        /// Destination.
        out: RowsMut<'b, f32>,
        /// Rounding on store.
        operands: Operands,
    },
    /// INT8 codes with a fixed scale, padding to a multiple of 32 columns zeroed.
    Codes {
        /// Destination.
        out: RowsMut<'b, i8>,
        /// Value of code 1, > 0.
        scale: f32,
    },
    /// INT8 codes with a scale per row.
    DynamicCodes {
        /// Destination, padded as above.
        out: RowsMut<'b, i8>,
        /// One scale per row.
        scales: &'b mut Buffer<f32>,
    },
}

impl RowSink<'_> {
    fn check(&self, operator: &'static str, rows: usize, columns: usize) -> Result<(), KernelError> {
        let (have, shape) = match self {
            RowSink::F32 { out, .. } => (out.view.size(), out.view.shape()),
            RowSink::Codes { out, .. } | RowSink::DynamicCodes { out, .. } => (out.view.size(), out.view.shape()),
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
            RowSink::Codes { out, scale } => check_codes(operator, &out.view, Some(*scale)),
            RowSink::DynamicCodes { out, scales } => {
                if scales.len() < rows {
                    return Err(KernelError::shapes(
                        operator,
                        ("the scales", format!("{} values", scales.len())),
                        ("the destination", shape),
                        "there must be one scale per row",
                    ));
                }
                check_codes(operator, &out.view, None)
            }
        }
    }
}

/// Cosines and sines of every position and pair in buffers, see [`crate::RotaryTable`].
#[derive(Debug)]
pub struct RotaryTable {
    cosines: Buffer<f32>,
    sines: Buffer<f32>,
    positions: usize,
    pairs: usize,
}

impl RotaryTable {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        (self.cosines.len() + self.sines.len()) * size_of::<f32>()
    }
}

/// What a row operator computes.
#[derive(Clone, Copy, Default)]
struct Operation<'b> {
    kind: u32,
    modulation: u32,
    first: Option<Vector<'b>>,
    second: Option<Vector<'b>>,
    eps: f32,
    rotary: Option<&'b RotaryTable>,
}

impl Kernels {
    /// A rotary table for the device.
    ///
    /// # Errors
    /// A table with fewer entries than positions and pairs; errors of the library.
    pub fn rotary_table(&self, table: &crate::RotaryTable) -> Result<RotaryTable, OpenClError> {
        let entries = table.positions * table.pairs;
        if table.cos.len() < entries || table.sin.len() < entries {
            return Err(KernelError::shapes(
                "rotary_table",
                ("the rotary table", format!("{} positions of {} pairs", table.positions, table.pairs)),
                ("its entries", format!("{} cosines and {} sines", table.cos.len(), table.sin.len())),
                "there must be one of each per position and pair",
            )
            .into());
        }
        Ok(RotaryTable {
            cosines: self.copied(&table.cos)?,
            sines: self.copied(&table.sin)?,
            positions: table.positions,
            pairs: table.pairs,
        })
    }

    /// LayerNorm with what follows it, see [`crate::Kernels::layer_norm`].
    ///
    /// # Errors
    /// Shapes that differ, vectors shorter than a row, no columns; errors of the library.
    #[allow(clippy::needless_pass_by_value, reason = "the sink is borrowed for the call, as in the CPU kernel")]
    pub fn layer_norm(
        &self,
        input: Rows<'_, f32>,
        eps: f32,
        modulation: Modulation<'_>,
        sink: RowSink<'_>,
    ) -> Result<(), OpenClError> {
        let operator = "layer_norm";
        check_eps(operator, input.columns, eps)?;
        let (modulation, vectors) = match modulation {
            Modulation::None => (0, None),
            Modulation::Affine { gain, bias } => (1, Some([("gain", gain), ("bias", bias)])),
            Modulation::AdaLn { scale, shift } => (2, Some([("scale", scale), ("shift", shift)])),
        };
        for (name, vector) in vectors.iter().flatten() {
            check_vector(operator, (name, vector), input.columns)?;
        }
        let [first, second] = [0, 1].map(|at| vectors.map(|vectors| vectors[at].1));
        let operation = Operation { kind: LAYER_NORM, modulation, first, second, eps, ..Operation::default() };
        self.row_operator(operator, input, &operation, &sink)
    }

    /// RMSNorm, gain and rotary positions, see [`crate::Kernels::rms_norm`].
    ///
    /// # Errors
    /// Shapes that differ, a table with fewer positions than rows or whose heads do not divide a row; errors of the library.
    #[allow(clippy::needless_pass_by_value, reason = "the sink is borrowed for the call, as in the CPU kernel")]
    pub fn rms_norm(
        &self,
        input: Rows<'_, f32>,
        eps: f32,
        gain: Vector<'_>,
        rotary: Option<&RotaryTable>,
        sink: RowSink<'_>,
    ) -> Result<(), OpenClError> {
        let operator = "rms_norm";
        check_eps(operator, input.columns, eps)?;
        check_vector(operator, ("gain", &gain), input.columns)?;
        if let Some(table) = rotary
            && (table.positions < input.rows || table.pairs == 0 || !input.columns.is_multiple_of(table.pairs * 2))
        {
            return Err(KernelError::shapes(
                operator,
                ("the input", input.shape()),
                ("the rotary table", format!("{} positions of {} pairs", table.positions, table.pairs)),
                "there must be a position per row, and whole heads in a row",
            )
            .into());
        }
        let operation = Operation { kind: RMS_NORM, first: Some(gain), eps, rotary, ..Operation::default() };
        self.row_operator(operator, input, &operation, &sink)
    }

    /// Softmax of every row, see [`crate::Kernels::softmax`].
    ///
    /// # Errors
    /// Shapes that differ; errors of the library.
    #[allow(clippy::needless_pass_by_value, reason = "as above")]
    pub fn softmax(&self, input: Rows<'_, f32>, sink: RowSink<'_>) -> Result<(), OpenClError> {
        self.row_operator("softmax", input, &Operation { kind: SOFTMAX, ..Operation::default() }, &sink)
    }

    /// Stores rows as the sink says, see [`crate::Kernels::quantise`].
    ///
    /// # Errors
    /// Shapes that differ, a scale that is not a positive number; errors of the library.
    #[allow(clippy::needless_pass_by_value, reason = "as above")]
    pub fn quantise(&self, input: Rows<'_, f32>, sink: RowSink<'_>) -> Result<(), OpenClError> {
        self.row_operator("quantise", input, &Operation { kind: COPY, ..Operation::default() }, &sink)
    }

    /// Sets all arguments, in the order of rows.cl, and runs.
    fn row_operator(
        &self,
        operator: &'static str,
        input: Rows<'_, f32>,
        operation: &Operation<'_>,
        sink: &RowSink<'_>,
    ) -> Result<(), OpenClError> {
        self.row_operator_in(&self.state(), operator, input, operation, sink)
    }

    /// Softmax of every row within a call that holds the lock.
    pub(super) fn softmax_in(
        &self,
        state: &State,
        input: Rows<'_, f32>,
        out: RowsMut<'_, f32>,
    ) -> Result<(), OpenClError> {
        let sink = RowSink::F32 { out, operands: Operands::F32 };
        self.row_operator_in(state, "softmax", input, &Operation { kind: SOFTMAX, ..Operation::default() }, &sink)
    }

    fn row_operator_in(
        &self,
        state: &State,
        operator: &'static str,
        input: Rows<'_, f32>,
        operation: &Operation<'_>,
        sink: &RowSink<'_>,
    ) -> Result<(), OpenClError> {
        sink.check(operator, input.rows, input.columns)?;
        let floats = &self.no_floats;
        let per_column = 1.0 / input.columns.max(1) as f32;
        let (cosines, sines, pairs) =
            operation.rotary.map_or((floats, floats, 0), |table| (&table.cosines, &table.sines, table.pairs));
        let call = state
            .call("row_operator")?
            .rows(&input)
            .value(operation.kind)
            .value(operation.modulation)
            .vector(operation.first, floats)
            .vector(operation.second, floats)
            .value(operation.eps)
            .value(per_column)
            .buffer(cosines)
            .buffer(sines)
            .size(pairs);
        let (call, flags, kind) = match sink {
            RowSink::F32 { out, operands } => {
                let flags = if *operands == Operands::F16 { FLAG_ROUND_F16 } else { 0 };
                (call.rows(&out.view).at(floats, 0).value(0f32), flags, SINK_F32)
            }
            RowSink::Codes { out, scale } => (call.rows(&out.view).at(floats, 0).value(1.0 / scale), 0, SINK_CODES),
            RowSink::DynamicCodes { out, scales } => {
                (call.rows(&out.view).at(&**scales, 0).value(0f32), 0, SINK_DYNAMIC)
            }
        };
        let call = call.value(flags).value(kind).size(input.columns).size(input.rows);
        let items = self.variant().row_items();
        let batches = input.rows.div_ceil(self.variant().row_batch());
        let step = (DISPATCH_ELEMENTS / self.variant().row_batch() / input.columns.max(1)).max(1);
        for first in (0..batches).step_by(step) {
            let count = step.min(batches - first);
            call.run(&self.session, [(first * items, count * items), (0, 1), (0, 1)], [items, 1, 1])?;
        }
        Ok(())
    }
}
