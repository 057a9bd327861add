//! Feature maps in INT8: one scale and one zero a frame, found when the frame is made.

use super::Frame;
use super::norm::{factor, root_of};
use crate::math::{LANES, ROUNDER, silu};
use crate::multiversion::multiversion;
use crate::{KernelError, Kernels, Workspace};
use trefoil_weights::tile::TILE;

/// Where SiLU is smallest, and its value there.
const SILU_VALLEY: f32 = -1.278_464_6;
const SILU_LEAST: f32 = -0.278_464_55;

/// One frame of features as codes, channels last, inside a border of one pixel of zeros (as [`Frame`]).
///
/// A value is `scale · (code − zero)`. `zero` is a code, so that zero padding is exact; the range is that of the frame, not
/// symmetric: what SiLU leaves is almost all positive, and symmetric codes would waste half of theirs.
#[derive(Debug, Clone)]
pub struct CodeFrame {
    height: usize,
    width: usize,
    channels: usize,
    scale: f32,
    zero: i8,
    /// With a tile of slack behind, which a reduction padded to whole tiles may read.
    codes: Vec<i8>,
    /// Sum of the codes of each pixel, border included.
    sums: Vec<i32>,
}

impl CodeFrame {
    /// A frame of zeros.
    pub fn new(height: usize, width: usize, channels: usize) -> CodeFrame {
        let pixels = (height + 2) * (width + 2);
        CodeFrame {
            height,
            width,
            channels,
            scale: 1.0,
            zero: 0,
            codes: vec![0; pixels * channels + TILE],
            sums: vec![0; pixels],
        }
    }

    /// Bytes that a frame of this size holds.
    pub fn bytes_of(height: usize, width: usize, channels: usize) -> usize {
        let pixels = (height + 2) * (width + 2);
        pixels * (channels + size_of::<i32>()) + TILE
    }

    /// Rows of pixels.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Pixels of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Codes of a pixel.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Distance of two neighbouring codes' values.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The code of zero.
    pub fn zero(&self) -> i8 {
        self.zero
    }

    /// Row `y`, `width · channels` codes.
    pub fn row(&self, y: usize) -> &[i8] {
        let stride = (self.width + 2) * self.channels;
        &self.codes[(y + 1) * stride + self.channels..][..self.width * self.channels]
    }

    /// All codes, border and slack included.
    pub(super) fn data(&self) -> &[i8] {
        &self.codes
    }

    /// Sum of each pixel's codes, border included.
    pub(super) fn sums(&self) -> &[i32] {
        &self.sums
    }

    /// `height×width×channels`, for messages.
    pub(super) fn shape(&self) -> String {
        format!("{}×{}×{}", self.height, self.width, self.channels)
    }

    /// Codes and sums of the rows of pixels, borders left and right included.
    fn rows_mut(&mut self) -> CodeRows<'_> {
        let padded = self.width + 2;
        CodeRows {
            codes: &mut self.codes[padded * self.channels..][..self.height * padded * self.channels],
            sums: &mut self.sums[padded..][..self.height * padded],
            padded,
            channels: self.channels,
        }
    }

    /// The border says zero in the codes of the day.
    fn fill_border(&mut self) {
        let (padded, channels, zero) = (self.width + 2, self.channels, self.zero);
        let sum = i32::from(zero) * channels as i32;
        let mut fill = |first: usize, count: usize| {
            self.codes[first * channels..][..count * channels].fill(zero);
            self.sums[first..][..count].fill(sum);
        };
        fill(0, padded);
        fill((self.height + 1) * padded, padded);
        for row in 1..=self.height {
            fill(row * padded, 1);
            fill((row + 1) * padded - 1, 1);
        }
    }
}

/// Whole rows of a frame of codes that one thread writes.
struct CodeRows<'a> {
    codes: &'a mut [i8],
    sums: &'a mut [i32],
    padded: usize,
    channels: usize,
}

impl<'a> CodeRows<'a> {
    /// Splits the first `count` rows off.
    fn take(&mut self, count: usize) -> CodeRows<'a> {
        let (padded, channels) = (self.padded, self.channels);
        let (codes, rest) = std::mem::take(&mut self.codes).split_at_mut(count * padded * channels);
        self.codes = rest;
        let (sums, rest) = std::mem::take(&mut self.sums).split_at_mut(count * padded);
        self.sums = rest;
        CodeRows { codes, sums, padded, channels }
    }

    /// Codes and sums of row `y` of these.
    fn row(&mut self, y: usize) -> (&mut [i8], &mut [i32]) {
        let width = self.padded - 2;
        let codes = &mut self.codes[(y * self.padded + 1) * self.channels..][..width * self.channels];
        (codes, &mut self.sums[y * self.padded + 1..][..width])
    }
}

impl Kernels {
    /// `out ← codes of SiLU(x / max(‖x‖₂, 1e-12) · √C · gain)` for the `C` channels of every pixel: [`Kernels::pixel_norm`] with
    /// SiLU, quantised to 8 bits over the range of the frame. Where a value is not finite, the scale is NaN.
    ///
    /// # Errors
    /// Shapes that do not fit each other.
    pub fn pixel_norm_codes(
        &self,
        input: &Frame,
        gain: &[f32],
        out: &mut CodeFrame,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "pixel_norm_codes";
        let channels = input.channels();
        if gain.len() != channels {
            return Err(KernelError::shapes(
                operator,
                ("the gain", format!("{} values", gain.len())),
                ("the input", input.shape()),
                "there must be one value per channel",
            ));
        }
        if (out.height, out.width, out.channels) != (input.height(), input.width(), channels) {
            return Err(KernelError::shapes(
                operator,
                ("the input", input.shape()),
                ("the destination", out.shape()),
                "they must have the same shape",
            ));
        }
        let root = root_of(channels);
        let range = self.silu_range(input, gain, root, workspace);
        let scale = (range[1] - range[0]) / 255.0;
        let scale = if scale == 0.0 { 1.0 } else { scale };
        out.scale = scale;
        // A saturating cast; of NaN it is 0.
        out.zero = (-128.0 - (range[0] / scale).round_ties_even()).clamp(-128.0, 127.0) as i8;
        out.fill_border();
        let (inverse, zero) = (1.0 / scale, f32::from(out.zero));
        let mut rows = out.rows_mut();
        self.run_grains(
            input.height(),
            1,
            workspace,
            |count| rows.take(count),
            |part| {
                for y in 0..part.rows {
                    let (codes, sums) = part.sink.row(y);
                    quantise(self.supported(), input.row(part.first + y), gain, root, inverse, zero, codes, sums);
                }
            },
        );
        Ok(())
    }

    /// Least and greatest value after norm and SiLU, zero among them; NaN where one is not finite.
    fn silu_range(&self, input: &Frame, gain: &[f32], root: f32, workspace: &mut Workspace) -> [f32; 2] {
        let mut ranges = vec![[0f32; 2]; input.height()];
        let mut rest = ranges.as_mut_slice();
        self.run_grains(
            input.height(),
            1,
            workspace,
            |count| {
                let (head, tail) = std::mem::take(&mut rest).split_at_mut(count);
                rest = tail;
                head
            },
            |part| {
                for (y, range) in part.sink.iter_mut().enumerate() {
                    norm_range(self.supported(), input.row(part.first + y), gain, root, range);
                }
            },
        );
        let [low, high] = ranges.into_iter().fold([0f32; 2], |all, row| {
            if all[0].is_nan() || row[0].is_nan() { [f32::NAN; 2] } else { [all[0].min(row[0]), all[1].max(row[1])] }
        });
        // SiLU falls to its valley and rises from there, so its range follows from that of its argument.
        let least = if low <= SILU_VALLEY { SILU_LEAST } else { silu(low) };
        [least, silu(high)]
    }
}

multiversion! {
    /// Least and greatest value of a row after the norm, zero among them; NaN where one is not finite.
    fn norm_range(input: &[f32], gain: &[f32], root: f32, range: &mut [f32; 2]) {
        let (mut least, mut greatest) = ([0f32; LANES], [0f32; LANES]);
        // A sum of zeros that any NaN or infinity spoils.
        let mut spoilt = [0f32; LANES];
        for x in input.chunks_exact(gain.len()) {
            let factor = factor(x, root);
            let (xs, x_rest) = x.as_chunks::<LANES>();
            let (gains, gain_rest) = gain.as_chunks::<LANES>();
            for (x, gain) in xs.iter().zip(gains) {
                for lane in 0..LANES {
                    let value = x[lane] * factor * gain[lane];
                    spoilt[lane] += value * 0.0;
                    least[lane] = if value < least[lane] { value } else { least[lane] };
                    greatest[lane] = if value > greatest[lane] { value } else { greatest[lane] };
                }
            }
            for (lane, (x, gain)) in x_rest.iter().zip(gain_rest).enumerate() {
                let value = x * factor * gain;
                spoilt[lane] += value * 0.0;
                least[lane] = if value < least[lane] { value } else { least[lane] };
                greatest[lane] = if value > greatest[lane] { value } else { greatest[lane] };
            }
        }
        *range = [least.into_iter().fold(0.0, f32::min), greatest.into_iter().fold(0.0, f32::max)];
        if spoilt.iter().any(|lane| lane.is_nan()) {
            *range = [f32::NAN; 2];
        }
    }
}

multiversion! {
    /// Codes of a row, and their sum for each pixel.
    fn quantise(
        input: &[f32],
        gain: &[f32],
        root: f32,
        inverse: f32,
        zero: f32,
        codes: &mut [i8],
        sums: &mut [i32],
    ) {
        let pixels = input.chunks_exact(gain.len()).zip(codes.chunks_exact_mut(gain.len()));
        for ((x, codes), sum) in pixels.zip(sums) {
            let factor = factor(x, root);
            for ((code, &x), &gain) in codes.iter_mut().zip(x).zip(gain) {
                let value = silu(x * factor * gain) * inverse + zero;
                let value = if value > -128.0 { value } else { -128.0 };
                let value = if value < 127.0 { value } else { 127.0 };
                *code = (value + ROUNDER).to_bits() as u8 as i8;
            }
            *sum = codes.iter().map(|&code| i32::from(code)).sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Activation;
    use crate::{Isa, Pool};
    use proptest::prelude::*;

    fn frame(height: usize, width: usize, channels: usize, seed: u32) -> Frame {
        let mut state = seed | 1;
        let mut frame = Frame::new(height, width, channels);
        for y in 0..height {
            for value in frame.row_mut(y) {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *value = (state >> 8) as f32 / 8_388_608.0 - 1.0;
            }
        }
        frame
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn codes_are_the_nearest_to_the_normed_values(height in 1usize..5, width in 1usize..7, channels in 1usize..40, seed in any::<u32>()) {
            let input = frame(height, width, channels, seed);
            let gain: Vec<f32> = (0..channels).map(|channel| 0.2 + 0.1 * (channel % 7) as f32).collect();
            for isa in Isa::available() {
                let kernels = Kernels::new(isa, Pool::on_caller()).unwrap();
                let (mut exact, mut codes) = (Frame::new(height, width, channels), CodeFrame::new(height, width, channels));
                let mut workspace = Workspace::new();
                kernels.pixel_norm(&input, &gain, Activation::Silu, &mut exact, &mut workspace).unwrap();
                kernels.pixel_norm_codes(&input, &gain, &mut codes, &mut workspace).unwrap();
                let mut greatest = codes.zero();
                for y in 0..height {
                    for (&value, &code) in exact.row(y).iter().zip(codes.row(y)) {
                        let back = codes.scale() * (f32::from(code) - f32::from(codes.zero()));
                        // The zero is rounded to a code, so an end of the range may be half a code out.
                        prop_assert!((back - value).abs() <= codes.scale() * 1.01, "{} {}", value, back);
                        greatest = greatest.max(code);
                    }
                }
                // The range is used up but for what the rounding of zero takes.
                prop_assert!(greatest >= 126, "{}", greatest);
                let padded = width + 2;
                for (pixel, &sum) in codes.sums().iter().enumerate() {
                    let pixel_codes = &codes.data()[pixel * channels..][..channels];
                    prop_assert_eq!(sum, pixel_codes.iter().map(|&code| i32::from(code)).sum::<i32>());
                    let (y, x) = (pixel / padded, pixel % padded);
                    if y == 0 || x == 0 || y == height + 1 || x == width + 1 {
                        prop_assert!(pixel_codes.iter().all(|&code| code == codes.zero()));
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_have_a_scale_and_values_that_are_not_finite_spoil_it() {
        let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
        let mut codes = CodeFrame::new(2, 2, 32);
        assert_eq!(CodeFrame::bytes_of(2, 2, 32), codes.codes.len() + codes.sums.len() * 4);
        kernels.pixel_norm_codes(&Frame::new(2, 2, 32), &[1.0; 32], &mut codes, &mut Workspace::new()).unwrap();
        assert!(codes.scale() > 0.0 && codes.row(1).iter().all(|&code| code == codes.zero()));
        let mut input = frame(2, 2, 32, 1);
        input.row_mut(1)[40] = f32::NAN;
        kernels.pixel_norm_codes(&input, &[1.0; 32], &mut codes, &mut Workspace::new()).unwrap();
        assert!(codes.scale().is_nan());
        let error = kernels.pixel_norm_codes(&input, &[1.0; 31], &mut codes, &mut Workspace::new()).unwrap_err();
        assert!(error.to_string().contains("one value per channel"), "{error}");
        let error = kernels
            .pixel_norm_codes(&input, &[1.0; 32], &mut CodeFrame::new(2, 3, 32), &mut Workspace::new())
            .unwrap_err();
        assert!(error.to_string().contains("2×3×32"), "{error}");
    }
}
