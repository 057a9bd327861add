//! How close a clip is to another, and how steady it is in itself.

use crate::output::VideoFrame;
use serde::Serialize;

/// How close a clip is to a reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Fidelity {
    /// Peak signal-to-noise ratio in dB over all values, black to white being the peak; infinite for equal clips.
    pub psnr: f64,
    /// Structural similarity of the luma, mean over frames; 1 for equal clips (Wang et al., 2004: Gaussian window of 11 pixels
    /// and σ 1.5, K₁ 0.01, K₂ 0.03).
    pub ssim: f64,
    /// Cosine of the angle between the clips as vectors of values in −1..1.
    pub cosine: f64,
}

/// How steady a clip is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Steadiness {
    /// Mean absolute difference of neighbouring frames, black to white being 1. Movement counts too, so it is for comparing
    /// clips of the same content.
    pub flicker: f64,
    /// How alike the colours of the saturated part are from frame to frame: mean cosine of its histogram with those of the
    /// first and of the preceding frame (the averaging of VBench's subject consistency, with histograms instead of learned
    /// features). 1 where nothing changes; none where nothing is saturated.
    pub subject_consistency: Option<f64>,
}

/// Compares clips of the same size and length; none where they differ in that or are empty.
pub fn compare(clip: &[VideoFrame], reference: &[VideoFrame]) -> Option<Fidelity> {
    let size = |frame: &VideoFrame| (frame.height(), frame.width());
    let fits = clip.len() == reference.len() && clip.iter().zip(reference).all(|(one, other)| size(one) == size(other));
    if !fits || clip.is_empty() || clip[0].values().is_empty() {
        return None;
    }
    let (mut squares, mut dot, mut norms, mut count) = (0f64, 0f64, [0f64; 2], 0usize);
    let mut similarity = 0.0;
    for (one, other) in clip.iter().zip(reference) {
        for (&a, &b) in one.values().iter().zip(other.values()) {
            let [a, b] = [a, b].map(shown);
            squares += ((a - b) / 2.0).powi(2);
            dot += a * b;
            norms[0] += a * a;
            norms[1] += b * b;
        }
        count += one.values().len();
        similarity += ssim(one, other);
    }
    let norm = (norms[0] * norms[1]).sqrt();
    Some(Fidelity {
        psnr: -10.0 * (squares / count as f64).log10(),
        ssim: similarity / clip.len() as f64,
        cosine: if norm > 0.0 { dot / norm } else { f64::from(u8::from(norms[0].to_bits() == norms[1].to_bits())) },
    })
}

/// Measures a clip in itself; none for fewer than two frames or frames of different sizes.
pub fn steadiness(clip: &[VideoFrame]) -> Option<Steadiness> {
    let first = clip.first()?;
    let is_even = clip.iter().all(|frame| (frame.height(), frame.width()) == (first.height(), first.width()));
    if clip.len() < 2 || !is_even || first.values().is_empty() {
        return None;
    }
    let mut differences = 0f64;
    for pair in clip.windows(2) {
        let changes = pair[0].values().iter().zip(pair[1].values());
        differences += changes.map(|(&a, &b)| (shown(a) - shown(b)).abs() / 2.0).sum::<f64>();
    }
    let flicker = differences / ((clip.len() - 1) * first.values().len()) as f64;
    let histograms: Option<Vec<Vec<f64>>> = clip.iter().map(histogram).collect();
    let subject_consistency = histograms.map(|histograms| {
        let alike =
            |pair: &[Vec<f64>], first: &[f64]| f64::midpoint(cosine(&pair[1], first), cosine(&pair[1], &pair[0]));
        let sum: f64 = histograms.windows(2).map(|pair| alike(pair, &histograms[0])).sum();
        sum / (clip.len() - 1) as f64
    });
    Some(Steadiness { flicker, subject_consistency })
}

/// A value as a picture shows it.
fn shown(value: f32) -> f64 {
    if value.is_nan() { -1.0 } else { f64::from(value.clamp(-1.0, 1.0)) }
}

/// Levels of each colour in a histogram.
const LEVELS: usize = 8;
/// Saturation from which on a pixel is part of the subject.
const SATURATED: f64 = 0.25;

/// Colours of the saturated pixels, of length 1; none where there are none.
fn histogram(frame: &VideoFrame) -> Option<Vec<f64>> {
    let mut bins = vec![0f64; LEVELS * LEVELS * LEVELS];
    for &pixel in frame.values().as_chunks::<3>().0 {
        let rgb = pixel.map(|value| f64::midpoint(shown(value), 1.0));
        let range = rgb.iter().copied().fold(0.0, f64::max) - rgb.iter().copied().fold(1.0, f64::min);
        if range >= SATURATED {
            let level = |value: f64| ((value * LEVELS as f64) as usize).min(LEVELS - 1);
            bins[(level(rgb[0]) * LEVELS + level(rgb[1])) * LEVELS + level(rgb[2])] += 1.0;
        }
    }
    let norm = bins.iter().map(|count| count * count).sum::<f64>().sqrt();
    (norm > 0.0).then(|| bins.into_iter().map(|count| count / norm).collect())
}

fn cosine(one: &[f64], other: &[f64]) -> f64 {
    one.iter().zip(other).map(|(a, b)| a * b).sum()
}

/// Pixels of the window, fewer where the frame is smaller, and its spread.
const WINDOW: usize = 11;
const SIGMA: f64 = 1.5;
/// (0.01·1)² and (0.03·1)².
const STABILISERS: [f64; 2] = [1e-4, 9e-4];

/// A picture of one value a pixel.
#[derive(Debug, Clone)]
struct Plane {
    width: usize,
    values: Vec<f64>,
}

impl Plane {
    /// BT.601 luma in 0..1, as SSIM is usually computed.
    fn luma(frame: &VideoFrame) -> Plane {
        let weigh = |&pixel: &[f32; 3]| {
            let [red, green, blue] = pixel.map(|value| f64::midpoint(shown(value), 1.0));
            0.299 * red + 0.587 * green + 0.114 * blue
        };
        Plane { width: frame.width(), values: frame.values().as_chunks::<3>().0.iter().map(weigh).collect() }
    }

    fn product(&self, other: &Plane) -> Plane {
        Plane { width: self.width, values: self.values.iter().zip(&other.values).map(|(a, b)| a * b).collect() }
    }

    /// Filtered with `window` along rows, then columns; only where the window fits.
    fn blurred(&self, window: &[f64]) -> Plane {
        let width = self.width - window.len() + 1;
        let rows: Vec<f64> = self
            .values
            .chunks_exact(self.width)
            .flat_map(|row| {
                row.windows(window.len())
                    .map(|part| part.iter().zip(window).map(|(value, weight)| value * weight).sum::<f64>())
            })
            .collect();
        let height = rows.len() / width - window.len() + 1;
        let value = |at: usize| (0..window.len()).map(|row| rows[at + row * width] * window[row]).sum();
        Plane { width, values: (0..height * width).map(value).collect() }
    }
}

fn gaussian(length: usize) -> Vec<f64> {
    let middle = (length - 1) as f64 / 2.0;
    let weights: Vec<f64> =
        (0..length).map(|at| (-(at as f64 - middle).powi(2) / (2.0 * SIGMA * SIGMA)).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Mean structural similarity of two frames.
fn ssim(one: &VideoFrame, other: &VideoFrame) -> f64 {
    let window = gaussian(WINDOW.min(one.height()).min(one.width()));
    let (x, y) = (Plane::luma(one), Plane::luma(other));
    let (mean_x, mean_y) = (x.blurred(&window), y.blurred(&window));
    let (xx, yy, xy) = (x.product(&x).blurred(&window), y.product(&y).blurred(&window), x.product(&y).blurred(&window));
    let [c1, c2] = STABILISERS;
    let mut sum = 0.0;
    for at in 0..xy.values.len() {
        let (mx, my) = (mean_x.values[at], mean_y.values[at]);
        let (var_x, var_y, cov) = (xx.values[at] - mx * mx, yy.values[at] - my * my, xy.values[at] - mx * my);
        sum += (2.0 * mx * my + c1) * (2.0 * cov + c2) / ((mx * mx + my * my + c1) * (var_x + var_y + c2));
    }
    sum / xy.values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(height: usize, width: usize, seed: u32, scale: f32) -> VideoFrame {
        let mut state = seed | 1;
        let values = (0..height * width * 3).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / 8_388_608.0 - 1.0) * scale
        });
        VideoFrame::from_signed(height, width, values.collect())
    }

    /// The definition, window by window.
    fn ssim_by_windows(one: &VideoFrame, other: &VideoFrame) -> f64 {
        let side = WINDOW.min(one.height()).min(one.width());
        let weights = gaussian(side);
        let (x, y) = (Plane::luma(one), Plane::luma(other));
        let mut all = Vec::new();
        for top in 0..=one.height() - side {
            for left in 0..=one.width() - side {
                let mean = |value: &dyn Fn(f64, f64) -> f64| -> f64 {
                    let cells = (0..side * side).map(|cell| (cell / side, cell % side));
                    cells
                        .map(|(row, column)| {
                            let at = (top + row) * one.width() + left + column;
                            weights[row] * weights[column] * value(x.values[at], y.values[at])
                        })
                        .sum()
                };
                let (mx, my) = (mean(&|a, _| a), mean(&|_, b| b));
                let (vx, vy) = (mean(&|a, _| (a - mx).powi(2)), mean(&|_, b| (b - my).powi(2)));
                let cov = mean(&|a, b| (a - mx) * (b - my));
                let [c1, c2] = STABILISERS;
                all.push((2.0 * mx * my + c1) * (2.0 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2)));
            }
        }
        all.iter().sum::<f64>() / all.len() as f64
    }

    #[test]
    fn similarity_is_its_definition() {
        for (height, width) in [(16, 20), (11, 11), (5, 9), (1, 1)] {
            let (one, other) = (noise(height, width, 1, 0.9), noise(height, width, 2, 0.7));
            assert!((ssim(&one, &other) - ssim_by_windows(&one, &other)).abs() < 1e-9);
            assert!((ssim(&one, &one) - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn equal_clips_are_equal_and_opposite_ones_opposite() {
        let clip: Vec<VideoFrame> = (0..3).map(|seed| noise(12, 12, seed, 1.0)).collect();
        let same = compare(&clip, &clip).unwrap();
        assert!(same.psnr.is_infinite() && (same.ssim - 1.0).abs() < 1e-9 && (same.cosine - 1.0).abs() < 1e-9);
        let turned: Vec<VideoFrame> = clip
            .iter()
            .map(|frame| VideoFrame::from_signed(12, 12, frame.values().iter().map(|x| -x).collect()))
            .collect();
        assert!((compare(&clip, &turned).unwrap().cosine + 1.0).abs() < 1e-9);
        // Off by a tenth of the range everywhere: 20 dB.
        let [low, high] = [-0.1f32, 0.1].map(|value| vec![VideoFrame::from_signed(12, 12, vec![value; 432])]);
        assert!((compare(&low, &high).unwrap().psnr - 20.0).abs() < 1e-5);
        assert_eq!(compare(&clip, &clip[..2]), None);
        assert_eq!(compare(&[], &[]), None);
    }

    #[test]
    fn steady_clips_are_steady() {
        let red = |value: f32| VideoFrame::from_signed(8, 8, [value, -1.0, -1.0].repeat(64));
        let still = steadiness(&[red(1.0), red(1.0), red(1.0)]).unwrap();
        assert!(still.flicker.abs() < 1e-12 && (still.subject_consistency.unwrap() - 1.0).abs() < 1e-12);
        // From red to black: a third of the values changes by the whole range.
        let fading = steadiness(&[red(1.0), red(-1.0)]).unwrap();
        assert!((fading.flicker - 1.0 / 3.0).abs() < 1e-6);
        assert_eq!(fading.subject_consistency, None, "black is no subject");
        let blue = VideoFrame::from_signed(8, 8, [-1.0f32, -1.0, 1.0].repeat(64));
        let turned = steadiness(&[red(1.0), blue]).unwrap();
        assert!(turned.subject_consistency.unwrap().abs() < 1e-12);
        assert_eq!(steadiness(&[red(1.0)]), None);
    }
}
