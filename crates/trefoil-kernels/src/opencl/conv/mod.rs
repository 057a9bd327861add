//! Operators on frames for devices: the video decoder's, in f32 and (`codes`) in INT8.
//!
//! The scheme is the CPU's ([`crate::ConvWeights`]): channels last inside a zero border make a convolution a product of a matrix
//! with overlapping rows and a packed filter, so nothing is gathered. A work-item holds a tile of neighbouring pixels × output
//! channels in registers; frames of zeros are not multiplied; wide frames use Winograd's F(2, 3), band by band.

mod attention;
mod codes;
mod frame;
mod weights;

pub use codes::{CodeFrame, Int8ConvWeights};
pub use frame::Frame;
pub use weights::ConvWeights;

use super::call::{DISPATCH_MULTIPLY_ADDS, cut_grid};
use super::kernels::State;
use super::{Buffer, Kernels, OpenClError};
use crate::conv::check_extents;
use crate::conv::norm::root_of;
use crate::conv::winograd::POINTS;
use crate::{Activation, FilterShape, KernelError};
use trefoil_weights::tile::TILE;
use weights::{Form, Phase};

const FLAG_BIAS: u32 = 1;
const FLAG_ADD: u32 = 2;
/// Most bytes of transformed inputs, but for the fewest rows.
const BAND_BYTES: usize = 8 << 20;
/// Fewest rows of a band: each band transforms two more than it computes.
const FEWEST_ROWS: usize = 6;
/// Pixels or pairs that a whole tile may read behind the last one, at least the rows of every variant's tile.
const TILE_SLACK: usize = 16;

/// What happens to the result, see [`crate::ConvSink`].
#[derive(Debug)]
pub enum ConvSink<'f> {
    /// Written.
    Store(&'f mut Frame),
    /// Added to what is there.
    Add(&'f mut Frame),
}

/// A product of runs of consecutive values and a packed panel; the arguments of `float_product`.
struct Product<'b> {
    inputs: [&'b Buffer<f32>; 3],
    /// One bit for each input that is not all zero.
    present: u32,
    frames: usize,
    input_at: usize,
    pixel_stride: usize,
    row_stride: usize,
    rows: usize,
    run: usize,
    panels: &'b Buffer<f32>,
    bias: Option<&'b Buffer<f32>>,
    out: &'b Buffer<f32>,
    out_at: usize,
    out_pixel: usize,
    out_line: usize,
    line: usize,
    width: usize,
    pixels: usize,
    outputs: usize,
    is_added: bool,
}

/// Rows whose inputs are transformed together.
#[derive(Debug, Clone, Copy)]
struct Band {
    rows: usize,
    pairs: usize,
    channels: usize,
    frames: usize,
}

impl Band {
    fn of(shape: FilterShape, height: usize, width: usize) -> Band {
        let (pairs, channels, frames) = (width.div_ceil(2), shape.inputs, shape.frames);
        let row = POINTS * frames * pairs * channels * size_of::<f32>();
        let rows = (BAND_BYTES / row.max(1)).saturating_sub(2).max(FEWEST_ROWS).min(height).max(1);
        Band { rows, pairs, channels, frames }
    }

    /// Values of one frame's transformed inputs of one point.
    fn plane(&self) -> usize {
        ((self.rows + 2) * self.pairs + TILE_SLACK) * self.channels
    }

    fn elements(&self) -> usize {
        self.frames * POINTS * self.plane()
    }
}

impl Kernels {
    /// `sink ← bias + filter ∗ frames` with zero padding in space, see [`crate::Kernels::conv`].
    ///
    /// # Errors
    /// Frames or a destination whose shapes do not fit the filter or each other, a filter of other kernels; errors of the library.
    pub fn conv(
        &self,
        frames: &[Option<&Frame>],
        weights: &ConvWeights,
        sink: ConvSink<'_>,
    ) -> Result<(), OpenClError> {
        let (out, is_added) = match sink {
            ConvSink::Store(out) => (&*out, false),
            ConvSink::Add(out) => (&*out, true),
        };
        let extents: Vec<Option<[usize; 3]>> = frames.iter().map(|frame| frame.map(Frame::extent)).collect();
        check_extents(&extents, (weights.shape, weights.scale), out.extent())?;
        self.check_owner("conv", "the filter", &weights.bias)?;
        for frame in frames.iter().flatten().copied().chain([out]) {
            self.check_owner("conv", "a frame", &frame.data)?;
        }
        let present = frames.iter().enumerate().fold(0, |bits, (at, frame)| bits | u32::from(frame.is_some()) << at);
        let inputs: [&Buffer<f32>; 3] =
            std::array::from_fn(|at| frames.get(at).copied().flatten().map_or(&self.no_floats, |frame| &frame.data));
        let job = Job { inputs, present, weights, out, is_added };
        match &weights.form {
            Form::Direct(phases) => {
                let state = self.state();
                phases.iter().try_for_each(|phase| self.product(&state, &job.of_phase(phase)))
            }
            Form::Winograd(panels) => self.winograd(&job, panels),
        }
    }

    /// `out ← act(x / max(‖x‖₂, 1e-12) · √C · gain)` for the `C` channels of every pixel, see [`crate::Kernels::pixel_norm`].
    ///
    /// # Errors
    /// Shapes that do not fit each other, an activation other than the identity and SiLU; errors of the library.
    pub fn pixel_norm(
        &self,
        input: &Frame,
        gain: &Buffer<f32>,
        activation: Activation,
        out: &mut Frame,
    ) -> Result<(), OpenClError> {
        let operator = "pixel_norm";
        check_norm(operator, input, gain, out.extent())?;
        if activation == Activation::GeluTanh {
            return Err(KernelError::value(operator, "the activation", "gelu", "use the identity or SiLU").into());
        }
        for buffer in [&input.data, gain, &out.data] {
            self.check_owner(operator, "a buffer", buffer)?;
        }
        let chunk = self.chunk(input.width);
        let state = self.state();
        let call = state
            .call(operator)?
            .buffer(&input.data)
            .buffer(gain)
            .value(root_of(input.channels))
            .value(activation as u32)
            .buffer(&out.data)
            .size(input.channels)
            .size(input.width)
            .size(chunk);
        let items = self.variant().row_items();
        let ranges = [(0, items), (0, input.width.div_ceil(chunk)), (0, input.height)];
        call.run(&self.session, ranges, [items, 1, 1])
    }

    /// Pixels that a work-item takes one after the other: a row where it is a thread, one where it is a lane.
    fn chunk(&self, width: usize) -> usize {
        if self.variant().width() == 1 { 1 } else { width.max(1) }
    }

    /// Memory of another context would be refused by the library with a number.
    fn check_owner(&self, operator: &'static str, what: &'static str, buffer: &Buffer<f32>) -> Result<(), KernelError> {
        if buffer.is_of(&self.session) {
            return Ok(());
        }
        Err(KernelError::value(operator, what, "of other kernels", "make it with the kernels that use it"))
    }

    fn product(&self, state: &State, product: &Product<'_>) -> Result<(), OpenClError> {
        let variant = self.variant();
        let mut flags = if product.bias.is_some() { FLAG_BIAS } else { 0 };
        flags |= if product.is_added { FLAG_ADD } else { 0 };
        let [first, second, third] = product.inputs;
        let call = state
            .call("float_product")?
            .buffer(first)
            .buffer(second)
            .buffer(third)
            .value(product.present)
            .size(product.frames)
            .value(product.input_at as u64)
            .size(product.pixel_stride)
            .size(product.row_stride)
            .size(product.rows)
            .size(product.run)
            .buffer(product.panels)
            .buffer(product.bias.unwrap_or(&self.no_floats))
            .buffer(product.out)
            .value(product.out_at as u64)
            .size(product.out_pixel)
            .size(product.out_line)
            .size(product.line)
            .size(product.width)
            .size(product.pixels)
            .size(product.outputs)
            .value(flags);
        let products = product.frames * product.rows * product.run;
        let items = TILE / variant.tile_columns();
        let grid = (product.pixels.div_ceil(variant.tile_rows()), 1, product.outputs.div_ceil(TILE));
        cut_grid(grid, variant.tile_rows() * TILE * products, DISPATCH_MULTIPLY_ADDS, |tiles, columns| {
            call.run(&self.session, [(0, items), tiles, columns], [variant.group_items(), 1, 1])
        })
    }

    fn winograd(&self, job: &Job<'_>, panels: &Buffer<f32>) -> Result<(), OpenClError> {
        let (shape, out, variant) = (job.weights.shape, job.out, self.variant());
        let (height, width) = (out.height, out.width);
        let band = Band::of(shape, height, width);
        let (plane, chunk) = (band.plane(), self.chunk(band.pairs));
        let mut state = self.state();
        state.frames.transformed.at_least(&self.session, band.elements())?;
        let state = &*state;
        let transformed = state.frames.transformed.get(&self.no_floats);
        let items = variant.row_items();
        for first in (0..height).step_by(band.rows) {
            let rows = band.rows.min(height - first);
            for (index, input) in job.inputs.iter().enumerate().filter(|(index, _)| job.present >> index & 1 == 1) {
                let call = state
                    .call("winograd_inputs")?
                    .buffer(input)
                    .value((first * (width + 2) * shape.inputs) as u64)
                    .buffer(transformed)
                    .value((index * POINTS * plane) as u64)
                    .value(plane as u64)
                    .size(shape.inputs)
                    .size(width + 2)
                    .size(band.pairs)
                    .size(chunk);
                let ranges = [(0, items), (0, band.pairs.div_ceil(chunk)), (0, rows + 2)];
                call.run(&self.session, ranges, [items, 1, 1])?;
            }
            let line = out.line();
            let call = state
                .call("winograd_product")?
                .buffer(transformed)
                .value(plane as u64)
                .value(job.present)
                .size(shape.frames)
                .size(shape.inputs)
                .size(band.pairs)
                .buffer(panels)
                .buffer(&job.weights.bias)
                .buffer(&out.data)
                .value(((first + 1) * line + out.channels) as u64)
                .size(out.channels)
                .size(line)
                .size(width)
                .size(rows * band.pairs)
                .size(shape.outputs)
                .value(FLAG_BIAS | if job.is_added { FLAG_ADD } else { 0 });
            let cost = variant.tile_rows() * TILE * POINTS * shape.frames * 3 * shape.inputs;
            let grid = ((rows * band.pairs).div_ceil(variant.tile_rows()), 1, shape.outputs.div_ceil(TILE));
            let items = TILE / variant.tile_columns();
            cut_grid(grid, cost, DISPATCH_MULTIPLY_ADDS, |tiles, columns| {
                call.run(&self.session, [(0, items), tiles, columns], [variant.group_items(), 1, 1])
            })?;
        }
        Ok(())
    }
}

/// A convolution whose shapes were checked.
struct Job<'b> {
    inputs: [&'b Buffer<f32>; 3],
    present: u32,
    weights: &'b ConvWeights,
    out: &'b Frame,
    is_added: bool,
}

impl<'b> Job<'b> {
    fn of_phase(&self, phase: &'b Phase) -> Product<'b> {
        let (shape, scale, out) = (self.weights.shape, self.weights.scale, self.out);
        let (height, width, channels) = (out.height / scale, out.width / scale, shape.inputs);
        let (line, at) = (width + 2, phase.placement);
        Product {
            inputs: self.inputs,
            present: self.present,
            frames: shape.frames,
            input_at: (phase.row * line + phase.column) * channels,
            pixel_stride: channels,
            row_stride: line * channels,
            rows: phase.rows,
            run: phase.pixels * channels,
            panels: &phase.panels,
            bias: Some(&self.weights.bias),
            out: &out.data,
            out_at: (at.row + 1) * out.line() + (at.column + 1) * out.channels,
            out_pixel: at.step * out.channels,
            out_line: at.step * out.line(),
            line,
            width,
            pixels: height.saturating_sub(1) * line + width,
            outputs: shape.outputs,
            is_added: self.is_added,
        }
    }
}

/// Whether gain and destination of a norm fit its input.
fn check_norm(operator: &'static str, input: &Frame, gain: &Buffer<f32>, out: [usize; 3]) -> Result<(), OpenClError> {
    if gain.len() >= input.channels && input.extent() == out {
        return Ok(());
    }
    Err(KernelError::shapes(
        operator,
        ("the input", format!("{:?}", input.extent())),
        ("gain and destination", format!("{} values and {out:?}", gain.len())),
        "there must be a gain per channel, and both frames have the same shape",
    )
    .into())
}
