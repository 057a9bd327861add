//! INT8 convolution for devices: frames of codes with a scale and a zero that the device finds ([`crate::CodeFrame`]).

use super::{FLAG_ADD, FLAG_BIAS, Frame, check_norm};
use crate::conv::norm::root_of;
use crate::opencl::call::{DISPATCH_MULTIPLY_ADDS, cut_grid};
use crate::opencl::{Buffer, ConvSink, Kernels, OpenClError};
use crate::{FilterShape, Int8ConvWeights as Packed};
use trefoil_weights::tile::TILE;

/// Pixels behind the last one that a whole tile may read.
const SLACK: usize = 16;
/// Scale, its reciprocal, the code of zero.
const PARAMETERS: usize = 4;

/// One frame of features as codes for a device: channels last, padded to whole tiles, inside a border of one pixel of zeros.
#[derive(Debug)]
pub struct CodeFrame {
    height: usize,
    width: usize,
    channels: usize,
    codes: Buffer<i8>,
    /// Of every pixel: the sum of its codes and those of the next two.
    runs: Buffer<i32>,
    parameters: Buffer<f32>,
    /// Least and greatest value of every row, while codes are made.
    ranges: Buffer<f32>,
}

impl CodeFrame {
    /// Bytes that a frame of this size holds.
    pub fn bytes_of(height: usize, width: usize, channels: usize) -> usize {
        let pixels = (height + 2) * (width + 2) + SLACK;
        pixels * (channels.next_multiple_of(TILE) + size_of::<i32>()) + (PARAMETERS + 2 * height) * size_of::<f32>()
    }

    fn extent(&self) -> [usize; 3] {
        [self.height, self.width, self.channels]
    }

    /// Waits for the work so far and gives scale and code of zero, and all codes without border: `[height][width][channels]`.
    ///
    /// # Errors
    /// Errors of the work before.
    pub fn read(&self) -> Result<(f32, i8, Vec<i8>), OpenClError> {
        let stride = self.channels.next_multiple_of(TILE);
        let codes = self.codes.read()?;
        let mut values = Vec::with_capacity(self.height * self.width * self.channels);
        for line in codes.chunks_exact((self.width + 2) * stride).skip(1).take(self.height) {
            for pixel in line.chunks_exact(stride).skip(1).take(self.width) {
                values.extend_from_slice(&pixel[..self.channels]);
            }
        }
        let parameters = self.parameters.read()?;
        Ok((parameters[0], parameters[2] as i8, values))
    }
}

/// A 3 × 3 filter over 1 or 3 frames in INT8 for a device, one scale an output.
#[derive(Debug)]
pub struct Int8ConvWeights {
    shape: FilterShape,
    panels: Buffer<i8>,
    sums: Buffer<i32>,
    scales: Buffer<f32>,
    bias: Buffer<f32>,
}

impl Int8ConvWeights {
    /// Extents of the filter as stored in the checkpoint.
    pub fn shape(&self) -> FilterShape {
        self.shape
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.panels.len() + (self.sums.len() + self.scales.len() + self.bias.len()) * size_of::<f32>()
    }
}

impl Kernels {
    /// A frame of zeros.
    ///
    /// # Errors
    /// Sizes that the device refuses.
    pub fn code_frame(&self, height: usize, width: usize, channels: usize) -> Result<CodeFrame, OpenClError> {
        let pixels = (height + 2) * (width + 2) + SLACK;
        Ok(CodeFrame {
            height,
            width,
            channels,
            codes: self.zeroed(pixels * channels.next_multiple_of(TILE))?,
            runs: self.zeroed(pixels)?,
            parameters: self.copied(&[1.0, 1.0, 0.0, 0.0])?,
            ranges: self.zeroed(2 * height)?,
        })
    }

    /// Quantises and packs a filter, see [`crate::Int8ConvWeights::new`]: the same codes and scales.
    ///
    /// # Errors
    /// As for the CPU's; errors of the library.
    pub fn int8_conv_weights(
        &self,
        shape: FilterShape,
        weight: &[f32],
        bias: &[f32],
    ) -> Result<Int8ConvWeights, OpenClError> {
        let padded = FilterShape { inputs: shape.inputs.next_multiple_of(TILE), ..shape };
        let taps = shape.frames * shape.height * shape.width;
        let packed = if padded == shape || weight.len() != shape.elements() {
            Packed::new(shape, weight, bias)?
        } else {
            // Whole tiles of inputs: what is multiplied with the codes behind the channels is zero.
            let mut wide = vec![0f32; padded.elements()];
            for (wide, filter) in
                wide.chunks_exact_mut(padded.inputs * taps).zip(weight.chunks_exact(shape.inputs * taps))
            {
                wide[..filter.len()].copy_from_slice(filter);
            }
            Packed::new(padded, &wide, bias)?
        };
        Ok(Int8ConvWeights {
            shape,
            panels: self.copied(&packed.panels)?,
            sums: self.copied(packed.sums.as_flattened())?,
            scales: self.copied(&packed.scales)?,
            bias: self.copied(&packed.bias)?,
        })
    }

    /// `out ← codes of SiLU(x / max(‖x‖₂, 1e-12) · √C · gain)`, see [`crate::Kernels::pixel_norm_codes`].
    ///
    /// # Errors
    /// Shapes that do not fit each other; errors of the library.
    pub fn pixel_norm_codes(&self, input: &Frame, gain: &Buffer<f32>, out: &mut CodeFrame) -> Result<(), OpenClError> {
        let operator = "pixel_norm_codes";
        check_norm(operator, input, gain, out.extent())?;
        for buffer in [&input.data, gain, &out.parameters] {
            self.check_owner(operator, "a buffer", buffer)?;
        }
        let (root, items) = (root_of(input.channels), self.variant().row_items());
        let state = self.state();
        let ranges = state
            .call("norm_ranges")?
            .buffer(&input.data)
            .buffer(gain)
            .value(root)
            .buffer(&out.ranges)
            .size(input.channels)
            .size(input.width);
        ranges.run(&self.session, [(0, items), (0, 1), (0, input.height)], [items, 1, 1])?;
        let parameters = state.call("code_parameters")?.buffer(&out.ranges).size(input.height).buffer(&out.parameters);
        parameters.run(&self.session, [(0, 1); 3], [1, 1, 1])?;
        let codes = state
            .call("norm_codes")?
            .buffer(&input.data)
            .buffer(gain)
            .value(root)
            .buffer(&out.parameters)
            .buffer(&out.codes)
            .buffer(&out.runs)
            .size(input.channels)
            .size(input.channels.next_multiple_of(TILE))
            .size(input.height)
            .size(input.width);
        codes.run(&self.session, [(0, items), (0, 1), (0, input.height + 2)], [items, 1, 1])
    }

    /// `sink ← bias + filter ∗ frames` in INT8, see [`crate::Kernels::conv_int8`]: the same bits from the same codes.
    ///
    /// # Errors
    /// Frames or a destination whose shapes do not fit the filter or each other; errors of the library.
    pub fn conv_int8(
        &self,
        frames: &[Option<&CodeFrame>],
        weights: &Int8ConvWeights,
        sink: ConvSink<'_>,
    ) -> Result<(), OpenClError> {
        let operator = "conv_int8";
        let (out, is_added) = match sink {
            ConvSink::Store(out) => (&*out, false),
            ConvSink::Add(out) => (&*out, true),
        };
        let shape = weights.shape;
        let extents: Vec<Option<[usize; 3]>> = frames.iter().map(|frame| frame.map(CodeFrame::extent)).collect();
        crate::conv::check_extents(&extents, (shape, 1), out.extent())?;
        self.check_owner(operator, "the filter", &weights.scales)?;
        self.check_owner(operator, "a frame", &out.data)?;
        for frame in frames.iter().flatten() {
            self.check_owner(operator, "a frame", &frame.parameters)?;
        }
        let variant = self.variant();
        let (line, stride) = (out.width + 2, shape.inputs.next_multiple_of(TILE));
        let pixels = out.height.saturating_sub(1) * line + out.width;
        let frame = |at: usize| frames.get(at).copied().flatten();
        let present = (0..3).fold(0u32, |bits, at| bits | u32::from(frame(at).is_some()) << at);
        let state = self.state();
        let mut call = state.call("codes_product")?;
        for at in 0..3 {
            call = call.buffer(frame(at).map_or(&self.no_codes, |frame| &frame.codes));
        }
        for at in 0..3 {
            call = call.buffer(frame(at).map_or(&self.no_integers, |frame| &frame.runs));
        }
        for at in 0..3 {
            call = call.buffer(frame(at).map_or(&self.no_floats, |frame| &frame.parameters));
        }
        let call = call
            .value(present)
            .size(shape.frames)
            .size(stride)
            .buffer(&weights.panels)
            .buffer(&weights.sums)
            .buffer(&weights.scales)
            .buffer(&weights.bias)
            .buffer(&out.data)
            .value((out.line() + out.channels) as u64)
            .size(out.channels)
            .size(out.line())
            .size(line)
            .size(out.width)
            .size(pixels)
            .size(shape.outputs)
            .value(FLAG_BIAS | if is_added { FLAG_ADD } else { 0 });
        let cost = variant.tile_rows() * TILE * shape.frames * 9 * stride;
        let grid = (pixels.div_ceil(variant.tile_rows()), 1, shape.outputs.div_ceil(TILE));
        let items = TILE / variant.tile_columns();
        cut_grid(grid, cost, DISPATCH_MULTIPLY_ADDS, |tiles, columns| {
            call.run(&self.session, [(0, items), tiles, columns], [variant.group_items(), 1, 1])
        })
    }
}
