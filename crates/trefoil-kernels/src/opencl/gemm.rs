//! INT8 GEMM on tiled weights as they lie.

use super::call::{Call, DISPATCH_ELEMENTS, DISPATCH_MULTIPLY_ADDS, SINK_CODES, SINK_F32, SINK_RESIDUAL, cut_grid};
use super::kernels::{Scratch, State};
use super::{Buffer, Kernels, OpenClError, Rows, RowsMut, Vector};
use crate::gemm::{MAX_INPUTS, row_block};
use crate::rows::check_scale;
use crate::view::Extent;
use crate::{Activation, KernelError, Operands};
use trefoil_weights::tile::{TILE, TileShape};

const FLAG_ROW_SCALES: u32 = 1;
const FLAG_BIAS: u32 = 2;
const FLAG_ADAPTER: u32 = 4;
pub(super) const FLAG_ROUND_F16: u32 = 8;
const FLAG_GATE: u32 = 16;
const FLAG_HIDDEN_ROW_SCALES: u32 = 32;

/// Most rows of a work-item, as in the CPU kernel.
const MOST_ROWS: usize = 240;

/// Tiled INT8 weights in a buffer.
#[derive(Debug, Clone, Copy)]
pub struct Tiled<'b> {
    /// Size of W.
    pub shape: TileShape,
    /// The buffer with the codes: a whole region, usually.
    pub codes: &'b Buffer<i8>,
    /// Where the codes start in it, a multiple of 4.
    pub first: usize,
    /// One scale per column.
    pub scales: Vector<'b>,
}

/// Scale of INT8 activations.
#[derive(Debug, Clone, Copy)]
pub enum ActivationScale<'b> {
    /// One for all (static, from calibration).
    Tensor(f32),
    /// One per row (dynamic).
    Row(Vector<'b>),
}

/// INT8 activations: `x ≈ code·scale`. Rows start at multiples of 4 and are readable up to a multiple of 32 columns; what
/// lies in the padding does not matter.
#[derive(Debug, Clone, Copy)]
pub struct Codes<'b> {
    /// `M × d_in` codes.
    pub codes: Rows<'b, i8>,
    /// Their scale.
    pub scale: ActivationScale<'b>,
}

/// The second half of a low-rank adapter, see [`crate::Adapter`].
#[derive(Debug, Clone, Copy)]
pub struct Adapter<'b> {
    /// `h`, `M × rank`.
    pub hidden: Codes<'b>,
    /// `Bᵀ` as a tiled `rank × d_out` matrix.
    pub up: Tiled<'b>,
    /// lora_alpha / rank.
    pub factor: f32,
}

/// What happens to the accumulators, see [`crate::Epilogue`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'b> {
    /// `b_j`; none is 0.
    pub bias: Option<Vector<'b>>,
    /// The adapter of the detail expert.
    pub adapter: Option<Adapter<'b>>,
    /// Function applied to every output.
    pub activation: Activation,
}

/// Where the outputs go, see [`crate::GemmSink`].
#[derive(Debug)]
pub enum GemmSink<'b> {
    /// Floats.
    F32 {
        /// `M × d_out`.
        out: RowsMut<'b, f32>,
        /// Rounding on store.
        operands: Operands,
    },
    /// INT8 codes for the next GEMM, padding zeroed.
    Codes {
        /// `M × d_out`, with room for padding to a multiple of 32 columns.
        out: RowsMut<'b, i8>,
        /// Static scale of the next GEMM's input.
        scale: f32,
    },
    /// `state ← state + y·gate`.
    Residual {
        /// `M × d_out`, updated in place.
        state: RowsMut<'b, f32>,
        /// One factor per column; none is 1.
        gate: Option<Vector<'b>>,
        /// [`Operands::F16`] keeps the state in FP16 precision.
        precision: Operands,
    },
}

impl GemmSink<'_> {
    fn check(&self, operator: &'static str, rows: usize, columns: usize) -> Result<(), KernelError> {
        let (have, shape) = match self {
            GemmSink::F32 { out, .. } => (out.view.size(), out.view.shape()),
            GemmSink::Residual { state, .. } => (state.view.size(), state.view.shape()),
            GemmSink::Codes { out, .. } => (out.view.size(), out.view.shape()),
        };
        if have != (rows, columns) {
            return Err(KernelError::shapes(
                operator,
                ("the product", format!("{rows}×{columns}")),
                ("the destination", shape),
                "they must have the same shape",
            ));
        }
        match self {
            GemmSink::F32 { .. } | GemmSink::Residual { gate: None, .. } => Ok(()),
            GemmSink::Residual { gate: Some(gate), .. } => check_vector(operator, ("gate", gate), columns),
            GemmSink::Codes { out, scale } => check_codes(operator, &out.view, Some(*scale)),
        }
    }
}

/// Codes need room for their padding.
pub(super) fn check_codes(operator: &'static str, out: &Rows<'_, i8>, scale: Option<f32>) -> Result<(), KernelError> {
    let padded = out.columns.next_multiple_of(TILE);
    if !out.has_room(padded) {
        return Err(KernelError::shapes(
            operator,
            ("the destination", out.shape()),
            ("its padded row", format!("{padded} codes")),
            "the row stride must leave room for padding to a multiple of 32",
        ));
    }
    scale.map_or(Ok(()), |scale| check_scale(operator, "the scale of the destination", scale))
}

/// A vector with one value per column.
pub(super) fn check_vector(
    operator: &'static str,
    (name, vector): (&'static str, &Vector<'_>),
    columns: usize,
) -> Result<(), KernelError> {
    if vector.len < columns {
        return Err(KernelError::shapes(
            operator,
            (name, format!("{} values", vector.len)),
            ("the matrix", format!("{columns} columns")),
            "there must be at least one value per column",
        ));
    }
    Ok(())
}

/// Four codes are read as one word.
pub(super) fn check_words(operator: &'static str, what: &'static str, starts: &[usize]) -> Result<(), KernelError> {
    match starts.iter().find(|start| !start.is_multiple_of(4)) {
        Some(start) => Err(KernelError::value(operator, what, start, "it must be a multiple of 4 codes")),
        None => Ok(()),
    }
}

/// Codes must be readable up to their padding, in words, and have a scale per row.
fn check_activations(operator: &'static str, input: &Codes<'_>) -> Result<(), KernelError> {
    let codes = &input.codes;
    if !codes.has_room(codes.columns.next_multiple_of(TILE)) {
        return Err(KernelError::shapes(
            operator,
            ("the codes", format!("{} with row stride {}", codes.shape(), codes.stride)),
            ("their buffer", format!("{} elements", codes.buffer.len() - codes.first.min(codes.buffer.len()))),
            "rows must be readable up to a multiple of 32 columns",
        ));
    }
    check_words(operator, "the start or the row stride of the codes", &[codes.first, codes.stride])?;
    match &input.scale {
        ActivationScale::Tensor(scale) => check_scale(operator, "the scale of the input", *scale),
        ActivationScale::Row(scales) if scales.len < codes.rows => Err(KernelError::shapes(
            operator,
            ("the scales of the input", format!("{} values", scales.len)),
            ("the input", codes.shape()),
            "there must be one scale per row",
        )),
        ActivationScale::Row(_) => Ok(()),
    }
}

/// Input and weights must fit, and the weights be whole.
fn check_product(operator: &'static str, input: &Codes<'_>, weights: &Tiled<'_>) -> Result<(), KernelError> {
    let shape = weights.shape;
    let size = || format!("{}×{}", shape.d_in, shape.d_out);
    if input.codes.columns != shape.d_in {
        return Err(KernelError::shapes(
            operator,
            ("the input", input.codes.shape()),
            ("the weights", size()),
            "columns of the input must be rows of the weights",
        ));
    }
    if shape.d_in > MAX_INPUTS {
        return Err(KernelError::value(operator, "d_in", shape.d_in, "a reduction is at most 131072 long"));
    }
    let codes = weights.codes.len().saturating_sub(weights.first);
    if codes < shape.bytes() || weights.scales.len < shape.d_out {
        return Err(KernelError::shapes(
            operator,
            ("the weights", size()),
            ("their storage", format!("{codes} codes and {} scales", weights.scales.len)),
            "there must be a code per padded element and a scale per column",
        ));
    }
    check_words(operator, "the start of the weights", &[weights.first])?;
    check_activations(operator, input)
}

impl ActivationScale<'_> {
    fn of_rows(&self) -> Option<Vector<'_>> {
        match self {
            ActivationScale::Tensor(_) => None,
            ActivationScale::Row(scales) => Some(*scales),
        }
    }

    fn of_tensor(&self) -> f32 {
        match self {
            ActivationScale::Tensor(scale) => *scale,
            ActivationScale::Row(_) => 0.0,
        }
    }
}

impl Kernels {
    /// `sink ← epilogue(input · weights)`, see [`crate::Kernels::gemm_w8a8`].
    ///
    /// # Errors
    /// Shapes that do not fit each other (with both shapes), scales that are not positive numbers, codes that do not start at
    /// multiples of 4; errors of the library.
    #[allow(clippy::needless_pass_by_value, reason = "the sink is borrowed for the call, as in the CPU kernel")]
    pub fn gemm_w8a8(
        &self,
        input: &Codes<'_>,
        weights: &Tiled<'_>,
        epilogue: &Epilogue<'_>,
        sink: GemmSink<'_>,
    ) -> Result<(), OpenClError> {
        let operator = "gemm_w8a8";
        let shape = weights.shape;
        let rows = input.codes.rows;
        check_product(operator, input, weights)?;
        if let Some(bias) = &epilogue.bias {
            check_vector(operator, ("bias", bias), shape.d_out)?;
        }
        if let Some(adapter) = &epilogue.adapter {
            check_product(operator, &adapter.hidden, &adapter.up)?;
            if adapter.hidden.codes.rows != rows || adapter.up.shape.d_out != shape.d_out {
                return Err(KernelError::shapes(
                    operator,
                    ("the adapter", Extent::new(adapter.hidden.codes.rows, adapter.up.shape.d_out)),
                    ("the product", Extent::new(rows, shape.d_out)),
                    "they must have the same shape",
                )
                .into());
            }
        }
        sink.check(operator, rows, shape.d_out)?;
        let mut state = self.state();
        self.sum_rows(&mut state, 0, &input.codes, 1)?;
        if let Some(adapter) = &epilogue.adapter {
            self.sum_rows(&mut state, 1, &adapter.hidden.codes, 1)?;
        }
        // A work-item of a CPU keeps a block of rows; one of a GPU has one tile of them.
        let tile_rows = self.variant().tile_rows();
        let block_rows = if self.variant().width() == 1 {
            tile_rows
        } else {
            row_block(shape.padded_in(), MOST_ROWS) / tile_rows * tile_rows
        };
        let rank = epilogue.adapter.as_ref().map_or(0, |adapter| adapter.up.shape.padded_in());
        let call = self.gemm_call(&state, input, weights, epilogue, &sink, block_rows)?;
        let columns = shape.padded_out() / self.variant().tile_columns();
        let group = self.variant().group_items();
        let cost = block_rows.min(rows) * self.variant().tile_columns() * (shape.padded_in() + rank);
        let grid = (columns, group, rows.div_ceil(block_rows));
        cut_grid(grid, cost, DISPATCH_MULTIPLY_ADDS, |columns, blocks| {
            call.run(&self.session, [columns, blocks, (0, 1)], [group, 1, 1])
        })
    }

    /// Sets all arguments, in the order of gemm.cl.
    fn gemm_call<'s>(
        &self,
        state: &'s State,
        input: &Codes<'_>,
        weights: &Tiled<'_>,
        epilogue: &Epilogue<'_>,
        sink: &GemmSink<'_>,
        block_rows: usize,
    ) -> Result<Call<'s>, OpenClError> {
        let (shape, adapter) = (weights.shape, epilogue.adapter.as_ref());
        let [input_sums, hidden_sums] = &state.sums;
        let integers = |scratch: &'s Scratch<i32>| scratch.get(&self.no_integers);
        let floats = &self.no_floats;
        let mut flags = 0;
        let mut set = |flag: u32, condition: bool| flags |= if condition { flag } else { 0 };
        set(FLAG_ROW_SCALES, input.scale.of_rows().is_some());
        set(FLAG_BIAS, epilogue.bias.is_some());
        set(FLAG_ADAPTER, adapter.is_some());
        set(FLAG_HIDDEN_ROW_SCALES, adapter.is_some_and(|adapter| adapter.hidden.scale.of_rows().is_some()));
        let mut call = state
            .call("gemm_w8a8")?
            .rows(&input.codes)
            .vector(input.scale.of_rows(), floats)
            .value(input.scale.of_tensor())
            .buffer(integers(input_sums))
            .at(weights.codes, weights.first)
            .vector(Some(weights.scales), floats)
            .vector(epilogue.bias, floats);
        call = match adapter {
            Some(Adapter { hidden, up, factor }) => call
                .rows(&hidden.codes)
                .vector(hidden.scale.of_rows(), floats)
                .value(hidden.scale.of_tensor())
                .buffer(integers(hidden_sums))
                .at(up.codes, up.first)
                .vector(Some(up.scales), floats)
                .value(*factor),
            None => call
                .at(&self.no_codes, 0)
                .size(0)
                .at(floats, 0)
                .value(0f32)
                .buffer(&self.no_integers)
                .at(&self.no_codes, 0)
                .at(floats, 0)
                .value(0f32),
        };
        let (call, kind) = match sink {
            GemmSink::F32 { out, operands } => {
                set(FLAG_ROUND_F16, *operands == Operands::F16);
                (call.rows(&out.view).at(floats, 0).value(0f32), SINK_F32)
            }
            GemmSink::Codes { out, scale } => (call.rows(&out.view).at(floats, 0).value(1.0 / scale), SINK_CODES),
            GemmSink::Residual { state, gate, precision } => {
                set(FLAG_ROUND_F16, *precision == Operands::F16);
                set(FLAG_GATE, gate.is_some());
                (call.rows(&state.view).vector(*gate, floats).value(0f32), SINK_RESIDUAL)
            }
        };
        Ok(call
            .value(flags)
            .value(kind)
            .value(epilogue.activation as u32)
            .size(input.codes.rows)
            .size(block_rows)
            .size(shape.padded_in())
            .size(adapter.map_or(0, |adapter| adapter.up.shape.padded_in()))
            .size(shape.d_out))
    }

    /// The sums of `heads` equal parts of every row, padded, where the variant needs them.
    pub(super) fn sum_rows(
        &self,
        state: &mut State,
        which: usize,
        codes: &Rows<'_, i8>,
        heads: usize,
    ) -> Result<(), OpenClError> {
        if !self.variant().needs_row_sums() {
            return Ok(());
        }
        let rows = codes.rows;
        state.sums[which].at_least(&self.session, rows * heads)?;
        let call = state
            .call("row_sums")?
            .rows(codes)
            .size((codes.columns / heads).next_multiple_of(TILE))
            .buffer(state.sums[which].get(&self.no_integers))
            .size(rows);
        let batch = self.variant().row_batch();
        let batches = rows.div_ceil(batch);
        let step = (DISPATCH_ELEMENTS / batch / codes.columns.max(1)).max(1);
        for first in (0..batches).step_by(step) {
            let count = step.min(batches - first);
            call.run(&self.session, [(first, count), (0, heads), (0, 1)], [1, 1, 1])?;
        }
        Ok(())
    }
}
