//! GEMM with a fused epilogue: INT8 ([`int8`]) and float ([`float`]).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod epilogue;
mod float;
mod int8;
mod normed;
#[cfg(target_arch = "x86_64")]
mod overlap;

pub use normed::NormSink;

use crate::rows::{Operands, check_codes, check_vector};
use crate::view::Extent;
use crate::{KernelError, Rows, RowsMut};
use trefoil_weights::TiledView;
use trefoil_weights::tile::TILE;

/// Longest reduction: `127·127·d_in` fits 32 bits.
pub(crate) const MAX_INPUTS: usize = 131_072;

/// Scale of INT8 activations.
#[derive(Debug, Clone, Copy)]
pub enum ActivationScale<'a> {
    /// One for all (static, from calibration).
    Tensor(f32),
    /// One per row (dynamic).
    Row(&'a [f32]),
}

impl ActivationScale<'_> {
    #[inline]
    pub(crate) fn of(&self, row: usize) -> f32 {
        match self {
            ActivationScale::Tensor(scale) => *scale,
            ActivationScale::Row(scales) => scales[row],
        }
    }
}

/// INT8 activations: `x ≈ code·scale`. Rows must be readable up to a multiple of 32 columns; what lies in the padding does
/// not matter.
#[derive(Debug, Clone, Copy)]
pub struct Codes<'a> {
    /// `M × d_in` codes.
    pub codes: Rows<'a, i8>,
    /// Their scale.
    pub scale: ActivationScale<'a>,
}

/// Function applied to every output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
    /// [`crate::math::gelu_tanh`].
    GeluTanh,
    /// [`crate::math::silu`].
    Silu,
}

/// The second half of a low-rank adapter, `factor·h·Bᵀ` (HeteroVDiff 4.2, equation 3: factor 2, `h = xAᵀ`).
#[derive(Debug, Clone, Copy)]
pub struct Adapter<'a> {
    /// `h`, `M × rank`, quantised with a scale per row.
    pub hidden: Codes<'a>,
    /// `Bᵀ` as a tiled `rank × d_out` matrix.
    pub up: TiledView<'a>,
    /// lora_alpha / rank.
    pub factor: f32,
}

/// What happens to the accumulators of an INT8 GEMM.
///
/// `y = act(acc·(s_x·s_j) + b_j + acc'·(s_h·(factor·s_Bj)))`, every operation rounded on its own, left to right.
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// `b_j`; none is 0.
    pub bias: Option<&'a [f32]>,
    /// The adapter of the detail expert.
    pub adapter: Option<Adapter<'a>>,
    /// `act`.
    pub activation: Activation,
}

/// Weights of a float GEMM.
#[derive(Debug, Clone, Copy)]
pub enum FloatWeights<'a> {
    /// Tiled INT8; a tile column at a time is widened to `code·scale` (rounded to FP16 with [`Operands::F16`]).
    Tiled(TiledView<'a>),
    /// Unquantised, `[d_out, d_in]` row-major as PyTorch stores Linear weights.
    OutIn(Rows<'a, f32>),
}

impl FloatWeights<'_> {
    /// `(d_in, d_out)`.
    pub fn shape(&self) -> (usize, usize) {
        match self {
            FloatWeights::Tiled(view) => (view.shape.d_in, view.shape.d_out),
            FloatWeights::OutIn(rows) => (rows.columns(), rows.rows()),
        }
    }
}

/// The second half of a low-rank adapter in a float GEMM.
#[derive(Debug, Clone, Copy)]
pub struct FloatAdapter<'a> {
    /// `h = xAᵀ`, `M × rank`.
    pub hidden: Rows<'a, f32>,
    /// `Bᵀ`, `rank × d_out`.
    pub up: FloatWeights<'a>,
    /// lora_alpha / rank.
    pub factor: f32,
}

/// What happens to the accumulators of a float GEMM: `y = act(acc + b_j + factor·acc')`.
#[derive(Debug, Clone, Copy, Default)]
pub struct FloatEpilogue<'a> {
    /// `b_j`; none is 0.
    pub bias: Option<&'a [f32]>,
    /// The adapter of the detail expert.
    pub adapter: Option<FloatAdapter<'a>>,
    /// `act`.
    pub activation: Activation,
}

/// Where the outputs of a GEMM go.
#[derive(Debug)]
pub enum GemmSink<'a> {
    /// Floats.
    F32 {
        /// `M × d_out`.
        out: RowsMut<'a, f32>,
        /// Rounding on store.
        operands: Operands,
    },
    /// INT8 codes for the next GEMM, `clip(round_half_even(y·(1/scale)), ±127)`, padding zeroed.
    Codes {
        /// `M × d_out`, with room for padding to a multiple of 32 columns.
        out: RowsMut<'a, i8>,
        /// Static scale of the next GEMM's input.
        scale: f32,
    },
    /// `state ← state + y·gate`.
    Residual {
        /// `M × d_out`, updated in place.
        state: RowsMut<'a, f32>,
        /// One factor per column; none is 1 (no multiplication).
        gate: Option<&'a [f32]>,
        /// [`Operands::F16`] keeps the state in FP16 precision, as an engine with an FP16 buffer does.
        precision: Operands,
    },
}

impl<'a> GemmSink<'a> {
    fn check(&mut self, operator: &'static str, rows: usize, columns: usize) -> Result<(), KernelError> {
        let (have, shape) = match self {
            GemmSink::F32 { out, .. } => ((out.rows(), out.columns()), out.shape()),
            GemmSink::Residual { state, .. } => ((state.rows(), state.columns()), state.shape()),
            GemmSink::Codes { out, .. } => ((out.rows(), out.columns()), out.shape()),
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
            GemmSink::F32 { .. } => Ok(()),
            GemmSink::Codes { out, scale } => check_codes(operator, out, Some(*scale)),
            GemmSink::Residual { gate, .. } => {
                gate.map_or(Ok(()), |gate| check_vector(operator, ("gate", gate), columns))
            }
        }
    }

    fn take_rows(&mut self, count: usize) -> GemmSink<'a> {
        match self {
            GemmSink::F32 { out, operands } => GemmSink::F32 { out: out.take_rows(count), operands: *operands },
            GemmSink::Codes { out, scale } => GemmSink::Codes { out: out.take_rows(count), scale: *scale },
            GemmSink::Residual { state, gate, precision } => {
                GemmSink::Residual { state: state.take_rows(count), gate: *gate, precision: *precision }
            }
        }
    }
}

/// Tiled weights must be whole.
pub(crate) fn check_tiled(operator: &'static str, view: &TiledView<'_>) -> Result<(), KernelError> {
    let shape = view.shape;
    if view.codes.len() < shape.bytes() || view.scales.len() < shape.d_out {
        return Err(KernelError::shapes(
            operator,
            ("the weights", format!("{}×{}", shape.d_in, shape.d_out)),
            ("their storage", format!("{} codes and {} scales", view.codes.len(), view.scales.len())),
            "there must be a code per padded element and a scale per column",
        ));
    }
    Ok(())
}

/// Input and weights must have the same inner dimension.
fn check_inner(
    operator: &'static str,
    input: Extent,
    columns: usize,
    (d_in, d_out): (usize, usize),
) -> Result<(), KernelError> {
    if columns != d_in {
        return Err(KernelError::shapes(
            operator,
            ("the input", input),
            ("the weights", format!("{d_in}×{d_out}")),
            "columns of the input must be rows of the weights",
        ));
    }
    if d_in > MAX_INPUTS {
        return Err(KernelError::value(operator, "d_in", d_in, "a reduction is at most 131072 long"));
    }
    Ok(())
}

/// Codes must be readable up to their padding and have a scale per row.
fn check_activations(operator: &'static str, input: &Codes<'_>) -> Result<(), KernelError> {
    let codes = &input.codes;
    let padded = codes.columns().next_multiple_of(TILE);
    let need = codes.rows().saturating_sub(1) * codes.stride() + padded;
    if codes.rows() > 0 && (codes.len() < need || codes.rows() > 1 && codes.stride() < padded) {
        return Err(KernelError::shapes(
            operator,
            ("the codes", format!("{} with row stride {}", codes.shape(), codes.stride())),
            ("their buffer", format!("{} elements", codes.len())),
            "rows must be readable up to a multiple of 32 columns",
        ));
    }
    match input.scale {
        ActivationScale::Tensor(scale) => crate::rows::check_scale(operator, "the scale of the input", scale),
        ActivationScale::Row(scales) if scales.len() < codes.rows() => Err(KernelError::shapes(
            operator,
            ("the scales of the input", format!("{} values", scales.len())),
            ("the input", codes.shape()),
            "there must be one scale per row",
        )),
        ActivationScale::Row(_) => Ok(()),
    }
}

/// Rows of activations that stay in the second-level cache while tile columns stream by: whole row tiles, at most `most`.
pub(crate) fn row_block(bytes_per_row: usize, most: usize) -> usize {
    const CACHE: usize = 384 * 1024;
    let rows = crate::kernel::TILE_ROWS;
    (CACHE / bytes_per_row.max(1) / rows * rows).clamp(2 * rows, most)
}
