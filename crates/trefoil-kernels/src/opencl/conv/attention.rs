//! f32 attention over the pixels of a frame, one head, de-fused: scores, softmax and values of a band of rows at a time.

use super::{Frame, Product, TILE_SLACK};
use crate::KernelError;
use crate::opencl::{Kernels, OpenClError, RowsMut};
use trefoil_weights::tile::TILE;

/// Most values of a band's scores, but for one row of pixels: 8 MiB.
const BAND_SCORES: usize = 2 << 20;

/// Rows of pixels whose scores are held at a time.
fn band_rows(height: usize, width: usize) -> usize {
    let keys = (height * width).next_multiple_of(TILE);
    (BAND_SCORES / (keys * (width + 2)).max(1)).clamp(1, height.max(1))
}

impl Kernels {
    /// `out ← softmax(q·kᵀ/√C)·v` over all pixels of a frame, one head of `C` channels; `qkv` has the queries, keys and values of a
    /// pixel side by side.
    ///
    /// # Errors
    /// Frames whose shapes do not fit each other, channels that are no multiple of 32; errors of the library.
    pub fn pixel_attention(&self, qkv: &Frame, out: &mut Frame) -> Result<(), OpenClError> {
        let operator = "pixel_attention";
        let (height, width, channels) = (out.height, out.width, out.channels);
        if qkv.extent() != [height, width, 3 * channels] || !channels.is_multiple_of(TILE) || height * width == 0 {
            return Err(KernelError::shapes(
                operator,
                ("the input", format!("{:?}", qkv.extent())),
                ("the destination", format!("{:?}", out.extent())),
                "there must be three times the channels, and these a multiple of 32",
            )
            .into());
        }
        for frame in [qkv, out] {
            self.check_owner(operator, "a frame", &frame.data)?;
        }
        let (pixels, line) = (height * width, width + 2);
        let keys = pixels.next_multiple_of(TILE);
        let rows = band_rows(height, width);
        let queries = |rows: usize| (rows - 1) * line + width;
        let scores = (queries(rows) + TILE_SLACK) * keys;
        {
            let mut state = self.state();
            state.frames.keys.at_least(&self.session, keys * channels)?;
            state.frames.values.at_least(&self.session, pixels * channels)?;
            let state = &*state;
            let call = state
                .call("pack_pixels")?
                .buffer(&qkv.data)
                .size(channels)
                .size(width)
                .size(pixels)
                .value((1.0 / (channels as f64).sqrt()) as f32)
                .buffer(state.frames.keys.get(&self.no_floats))
                .buffer(state.frames.values.get(&self.no_floats));
            call.run(&self.session, [(0, keys), (0, 1), (0, 1)], [1, 1, 1])?;
        }
        for first in (0..height).step_by(rows) {
            let count = queries(rows.min(height - first));
            let product = |run| Product {
                inputs: [&self.no_floats; 3],
                present: 1,
                frames: 1,
                input_at: 0,
                pixel_stride: 0,
                row_stride: 0,
                rows: 1,
                run,
                panels: &self.no_floats,
                bias: None,
                out: &self.no_floats,
                out_at: 0,
                out_pixel: 0,
                out_line: 0,
                line: count,
                width: count,
                pixels: count,
                outputs: 0,
                is_added: false,
            };
            let (mut state, none) = (self.state(), &self.no_floats);
            state.frames.scores.at_least(&self.session, scores)?;
            state.frames.shares.at_least(&self.session, scores)?;
            self.product(
                &state,
                &Product {
                    inputs: [&qkv.data; 3],
                    input_at: (first + 1) * qkv.line() + qkv.channels,
                    pixel_stride: qkv.channels,
                    panels: state.frames.keys.get(none),
                    out: state.frames.scores.get(none),
                    out_pixel: keys,
                    outputs: keys,
                    ..product(channels)
                },
            )?;
            let view = (0, count, pixels, keys);
            let input = state.frames.scores.get(none).rows("scores", view)?;
            let out_rows = RowsMut::of_scratch(state.frames.shares.get(none).rows("shares", view)?);
            self.softmax_in(&state, input, out_rows)?;
            self.product(
                &state,
                &Product {
                    inputs: [state.frames.shares.get(none); 3],
                    pixel_stride: keys,
                    panels: state.frames.values.get(none),
                    out: &out.data,
                    out_at: (first + 1) * out.line() + out.channels,
                    out_pixel: channels,
                    out_line: out.line(),
                    line,
                    width,
                    outputs: channels,
                    ..product(pixels)
                },
            )?;
        }
        Ok(())
    }

    /// Bytes of scratch that attention over a frame of `height` × `width` pixels of `channels` takes.
    pub fn pixel_attention_scratch(height: usize, width: usize, channels: usize) -> usize {
        let keys = (height * width).next_multiple_of(TILE);
        let queries = (band_rows(height, width) - 1) * (width + 2) + width;
        ((keys + height * width) * channels + 2 * (queries + TILE_SLACK) * keys) * size_of::<f32>()
    }
}
