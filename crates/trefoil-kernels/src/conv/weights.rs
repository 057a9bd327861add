//! Filters, packed once into panels that the f32 micro-kernel streams.

use super::{few, winograd};
use crate::KernelError;
use crate::gemm::MAX_INPUTS;
use crate::kernel::TILE_ROWS;
use trefoil_weights::tile::TILE;

/// Extents of a filter: `[outputs, inputs, frames, height, width]`, the order of a Conv3d weight in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FilterShape {
    /// Output channels.
    pub outputs: usize,
    /// Input channels.
    pub inputs: usize,
    /// Frames under the filter, 1 or 3; the last is the current one.
    pub frames: usize,
    /// Rows under the filter, 1 or 3.
    pub height: usize,
    /// Columns under the filter, 1 or 3.
    pub width: usize,
}

impl FilterShape {
    /// Number of weights.
    pub fn elements(&self) -> usize {
        self.outputs * self.inputs * self.frames * self.height * self.width
    }
}

impl std::fmt::Display for FilterShape {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let FilterShape { outputs, inputs, frames, height, width } = self;
        write!(formatter, "{outputs}×{inputs}×{frames}×{height}×{width}")
    }
}

/// Neighbouring pixels of one row of one frame that are multiplied together: their channels are consecutive in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Which of the frames.
    pub(crate) frame: usize,
    /// Row and column of the first pixel, relative to one left above the output's pixel.
    pub(crate) row: usize,
    pub(crate) column: usize,
    /// Pixels.
    pub(crate) pixels: usize,
}

/// Where output pixel (y, x) goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placement {
    /// 1, or 2 for one of the four phases of an upsampling convolution.
    pub(crate) step: usize,
    pub(crate) row: usize,
    pub(crate) column: usize,
}

/// One packed filter: for each 32 output channels the products in the order of the runs, `[products][32]`.
#[derive(Debug, Clone)]
pub(crate) struct Phase {
    pub(crate) runs: Vec<Run>,
    pub(crate) placement: Placement,
    pub(crate) panels: Vec<f32>,
    /// Products of one output: Σ run.pixels · inputs.
    pub(crate) products: usize,
}

/// How the products are taken.
#[derive(Debug, Clone)]
pub(crate) enum Form {
    /// As defined, one phase, or four of an upsampling convolution.
    Direct(Vec<Phase>),
    /// Filters transformed for [`winograd`].
    Winograd(Vec<f32>),
    /// All taps of all outputs side by side ([`few`]).
    Few(Vec<f32>),
}

/// A packed convolution.
#[derive(Debug, Clone)]
pub struct ConvWeights {
    pub(crate) shape: FilterShape,
    pub(crate) form: Form,
    /// Padded to whole tiles.
    pub(crate) bias: Vec<f32>,
    pub(crate) scale: usize,
}

/// Taps of the largest filter.
const MOST_TAPS: usize = 27;

/// Filter rows (or columns) that meet the first and the second input row under the filter, by parity of the output.
const MEET: [[&[usize]; 2]; 2] = [[&[0], &[1, 2]], [&[0, 1], &[2]]];

/// `weight(output, input, run, pixel)` is the factor of one product.
fn pack(
    shape: FilterShape,
    runs: Vec<Run>,
    placement: Placement,
    weight: impl Fn(usize, usize, Run, usize) -> f32,
) -> Phase {
    let products: usize = runs.iter().map(|run| run.pixels * shape.inputs).sum();
    let mut panels = vec![0f32; products * shape.outputs.next_multiple_of(TILE)];
    for (column, panel) in panels.chunks_exact_mut(products * TILE).enumerate() {
        let outputs = column * TILE..shape.outputs.min((column + 1) * TILE);
        let taps = runs.iter().flat_map(|&run| (0..run.pixels).map(move |pixel| (run, pixel)));
        let taps = taps.flat_map(|tap| (0..shape.inputs).map(move |input| (tap, input)));
        for (((run, pixel), input), lanes) in taps.zip(panel.as_chunks_mut::<TILE>().0) {
            for (lane, output) in lanes.iter_mut().zip(outputs.clone()) {
                *lane = weight(output, input, run, pixel);
            }
        }
    }
    Phase { runs, placement, panels, products }
}

/// Products of one output of a filter that is packed as it is defined.
pub(super) fn direct_products(shape: FilterShape) -> usize {
    shape.elements() / shape.outputs
}

/// The panel of up to 32 outputs, `[frame, row, column][input][32]`, from their weights, `[outputs][input][frame, row, column]`. Lanes
/// past the last output are zero.
pub(super) fn pack_column(shape: FilterShape, weight: &[f32], panel: &mut [f32]) {
    let (inputs, taps) = (shape.inputs, direct_products(shape) / shape.inputs);
    // One input's weights, gathered where writing in steps of a line costs nothing.
    let mut tile = [[0f32; TILE]; MOST_TAPS];
    for input in 0..inputs {
        for (lane, weight) in weight.chunks_exact(inputs * taps).enumerate() {
            for (values, &weight) in tile.iter_mut().zip(&weight[input * taps..][..taps]) {
                values[lane] = weight;
            }
        }
        for (tap, values) in tile.iter().take(taps).enumerate() {
            panel[(tap * inputs + input) * TILE..][..TILE].copy_from_slice(values);
        }
    }
}

impl ConvWeights {
    /// Packs a filter in the form that is fastest for its shape. 3 × 3 filters have a padding of one zero pixel; frames before
    /// the current one are history.
    ///
    /// # Errors
    /// Extents other than 1 and 3, empty channels, a weight or bias of another size.
    pub fn new(shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<ConvWeights, KernelError> {
        check(shape, weight, bias)?;
        let form = if winograd::suits(shape) {
            Form::Winograd(winograd::pack(shape, weight))
        } else if few::suits(shape) {
            Form::Few(few::pack(shape, weight))
        } else {
            return ConvWeights::direct(shape, weight, bias);
        };
        Ok(ConvWeights { shape, form, bias: padded(bias, shape.outputs), scale: 1 })
    }

    /// Packs a filter for products as they are defined: the smallest form, and the most precise.
    ///
    /// # Errors
    /// As [`ConvWeights::new`].
    pub fn direct(shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<ConvWeights, KernelError> {
        check(shape, weight, bias)?;
        let mut panels = vec![0f32; direct_products(shape) * shape.outputs.next_multiple_of(TILE)];
        let columns = panels.chunks_exact_mut(direct_products(shape) * TILE);
        for (panel, weight) in columns.zip(weight.chunks(TILE * direct_products(shape))) {
            pack_column(shape, weight, panel);
        }
        Ok(ConvWeights::from_direct(shape, panels, bias))
    }

    /// A filter of [`ConvWeights::direct`] from its panels.
    pub(super) fn from_direct(shape: FilterShape, panels: Vec<f32>, bias: &[f32]) -> ConvWeights {
        let FilterShape { frames, height, width, .. } = shape;
        let runs = (0..frames)
            .flat_map(|frame| (0..height).map(move |row| (frame, row)))
            .map(|(frame, row)| Run {
                frame,
                row: if height == 1 { 1 } else { row },
                column: usize::from(width == 1),
                pixels: width,
            })
            .collect();
        let placement = Placement { step: 1, row: 0, column: 0 };
        let phase = Phase { runs, placement, panels, products: direct_products(shape) };
        ConvWeights { shape, form: Form::Direct(vec![phase]), bias: padded(bias, shape.outputs), scale: 1 }
    }

    /// The memory of the panels, for another filter.
    pub(super) fn into_panels(self) -> Vec<f32> {
        match self.form {
            Form::Direct(phases) => phases.into_iter().next().map_or_else(Vec::new, |phase| phase.panels),
            Form::Winograd(panels) | Form::Few(panels) => panels,
        }
    }

    /// Whether [`ConvWeights::new`] packs filters of this shape as [`ConvWeights::direct`] does.
    pub fn is_direct(shape: FilterShape) -> bool {
        !winograd::suits(shape) && !few::suits(shape)
    }

    /// Packs a 3 × 3 convolution that follows a doubling of rows and columns by repetition (nearest neighbour).
    ///
    /// The doubled frame is never made: under the filter at output pixel (2y + r, 2x + c) lie only 2 × 2 different input
    /// pixels, so the weights that meet the same pixel are added once, here. Four phases of 4 products replace 9 each.
    ///
    /// # Errors
    /// As [`ConvWeights::new`]; the filter must be 1 × 3 × 3.
    pub fn upsampling(shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<ConvWeights, KernelError> {
        check(shape, weight, bias)?;
        if (shape.frames, shape.height, shape.width) != (1, 3, 3) {
            return Err(KernelError::value("conv", "the filter", shape, "an upsampling filter is N×C×1×3×3"));
        }
        let mut phases = Vec::with_capacity(4);
        for (row, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let runs = (0..2).map(|offset| Run { frame: 0, row: row + offset, column, pixels: 2 }).collect();
            let placement = Placement { step: 2, row, column };
            phases.push(pack(shape, runs, placement, |output, input, run, pixel| {
                let filter = &weight[(output * shape.inputs + input) * 9..][..9];
                let rows = MEET[row][run.row - row];
                // In f64, so that the sum is rounded once.
                rows.iter()
                    .flat_map(|&y| MEET[column][pixel].iter().map(move |&x| f64::from(filter[y * 3 + x])))
                    .sum::<f64>() as f32
            }));
        }
        Ok(ConvWeights { shape, form: Form::Direct(phases), bias: padded(bias, shape.outputs), scale: 2 })
    }

    /// Extents of the filter as stored in the checkpoint.
    pub fn shape(&self) -> FilterShape {
        self.shape
    }

    /// Rows and columns of the output per row and column of the input: 1, or 2 for an upsampling convolution.
    pub fn scale(&self) -> usize {
        self.scale
    }

    /// Bytes of scratch that each thread takes at most for frames of `height` × `width`.
    pub fn scratch_bytes(&self, height: usize, width: usize) -> usize {
        let values = match self.form {
            Form::Direct(_) => super::BLOCK_PIXELS * TILE,
            Form::Winograd(_) => winograd::scratch(self.shape, height, width),
            Form::Few(_) => few::scratch(width),
        };
        values * size_of::<f32>()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let panels = match &self.form {
            Form::Direct(phases) => phases.iter().map(|phase| phase.panels.capacity()).sum(),
            Form::Winograd(panels) | Form::Few(panels) => panels.capacity(),
        };
        (panels + self.bias.capacity()) * size_of::<f32>()
    }
}

fn padded(bias: &[f32], outputs: usize) -> Vec<f32> {
    let mut padded = vec![0.0; outputs.next_multiple_of(TILE)];
    padded[..bias.len()].copy_from_slice(bias);
    padded
}

fn check(shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<(), KernelError> {
    check_shape(shape, bias)?;
    if weight.len() != shape.elements() {
        return Err(KernelError::shapes(
            "conv",
            ("the filter", shape),
            ("its weights", format!("{} values", weight.len())),
            "there must be one value per element",
        ));
    }
    Ok(())
}

/// Extents of a filter, and one bias per output.
pub(super) fn check_shape(shape: FilterShape, bias: &[f32]) -> Result<(), KernelError> {
    let odd = |extent: usize| extent == 1 || extent == 3;
    if !(odd(shape.frames) && odd(shape.height) && odd(shape.width)) || shape.outputs == 0 || shape.inputs == 0 {
        return Err(KernelError::value(
            "conv",
            "the filter",
            shape,
            "filters have 1 or 3 frames, rows and columns and at least one channel on each side",
        ));
    }
    // The longest reduction of the micro-kernel, and offsets of a row tile far from overflow.
    if shape.inputs > MAX_INPUTS / (9 * TILE_ROWS) || shape.outputs > MAX_INPUTS {
        return Err(KernelError::value("conv", "the filter", shape, "at most 1213 input and 131072 output channels"));
    }
    if bias.len() != shape.outputs {
        return Err(KernelError::shapes(
            "conv",
            ("the filter", shape),
            ("its bias", format!("{} values", bias.len())),
            "there must be one value per output channel",
        ));
    }
    Ok(())
}
