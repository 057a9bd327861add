//! Reads colour, shape and motion of the one coloured shape in a clip from its pixels: saturation, area moments, the path of
//! the centroid. Nothing is learned. The definition is the demo model's (`measure.py`), for clips of 64 × 64 pixels; distances
//! grow with the side of the clip.

#![allow(clippy::needless_range_loop, reason = "elimination indexes two matrices at once")]

use crate::output::VideoFrame;
use serde::Serialize;

/// Colour words and their hue in degrees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words of the prompts")]
pub enum Colour {
    Red,
    Yellow,
    Green,
    Cyan,
    Blue,
    Purple,
}

impl Colour {
    /// All, by hue.
    pub const ALL: [Colour; 6] =
        [Colour::Red, Colour::Yellow, Colour::Green, Colour::Cyan, Colour::Blue, Colour::Purple];

    /// Hue in degrees.
    pub fn hue(self) -> f64 {
        match self {
            Colour::Red => 0.0,
            Colour::Yellow => 55.0,
            Colour::Green => 120.0,
            Colour::Cyan => 182.0,
            Colour::Blue => 228.0,
            Colour::Purple => 290.0,
        }
    }
}

/// Shape words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words of the prompts")]
pub enum Shape {
    Circle,
    Square,
    Triangle,
}

impl Shape {
    /// All.
    pub const ALL: [Shape; 3] = [Shape::Circle, Shape::Square, Shape::Triangle];

    /// Signed distance from the outline at (x, y) from the centre, y downwards; the triangle stands on its base.
    fn distance(self, x: f64, y: f64, radius: f64) -> f64 {
        match self {
            Shape::Circle => x.hypot(y) - radius,
            Shape::Square => x.abs().max(y.abs()) - 0.88 * radius,
            Shape::Triangle => y.max(x.abs() * 0.866_025_4 - 0.5 * y) - 0.68 * radius,
        }
    }

    /// Area over the square of the radius.
    fn area(self) -> f64 {
        match self {
            Shape::Circle => std::f64::consts::PI,
            Shape::Square => 4.0 * 0.88 * 0.88,
            Shape::Triangle => 3.0 * 3f64.sqrt() * 0.68 * 0.68,
        }
    }
}

/// Motion words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words of the prompts")]
pub enum Motion {
    Left,
    Right,
    Up,
    Down,
    Grow,
    Shrink,
    Bounce,
}

impl Motion {
    /// All.
    pub const ALL: [Motion; 7] =
        [Motion::Left, Motion::Right, Motion::Up, Motion::Down, Motion::Grow, Motion::Shrink, Motion::Bounce];
}

/// What was read.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reading {
    /// Nearest hue; none where nothing is coloured enough.
    pub colour: Option<Colour>,
    /// From the moments of the area.
    pub shape: Option<Shape>,
    /// The largest of the motions' scores, if it is large enough.
    pub motion: Option<Motion>,
    /// That score; 1 is a full movement.
    pub motion_score: f64,
    /// Vertical skewness of the area: about −0.57 for a triangle, 0 for the others.
    pub skewness: f64,
    /// Fourfold moment of the area: about −0.43 for a square, 0 for a circle.
    pub fourfold: f64,
    /// PSNR in dB against a perfect clip with the attributes read: how crisp the clip is.
    pub ideal_psnr: f64,
}

const NOTHING: Reading = Reading {
    colour: None,
    shape: None,
    motion: None,
    motion_score: 0.0,
    skewness: 0.0,
    fourfold: 0.0,
    ideal_psnr: 0.0,
};

/// Saturation that the most saturated percent must have.
const LEAST_SATURATION: f64 = 0.25;
/// Score from which on a motion is one.
const LEAST_MOTION: f64 = 0.35;
/// Side of the clips that distances are stated for.
const SIDE: f64 = 64.0;

/// One frame's blob.
#[derive(Debug, Clone, Copy)]
struct Blob {
    area: f64,
    x: f64,
    y: f64,
}

/// A clip in 0..1 with its mask.
struct Clip {
    width: usize,
    pixels: usize,
    /// `[frame][pixel][3]`.
    rgb: Vec<f64>,
    /// How much each pixel belongs to the shape, 0..1.
    mask: Vec<f64>,
}

impl Clip {
    /// Centres of pixels.
    fn place(&self, pixel: usize) -> (f64, f64) {
        ((pixel % self.width) as f64 + 0.5, (pixel / self.width) as f64 + 0.5)
    }

    fn frames(&self) -> impl Iterator<Item = (&[f64], &[f64])> {
        self.mask.chunks_exact(self.pixels).zip(self.rgb.chunks_exact(self.pixels * 3))
    }
}

/// Reads a clip; frames must have the same size. Fewer than two frames, or too little colour, read as nothing.
pub fn read_shapes(frames: &[VideoFrame]) -> Reading {
    let Some(first) = frames.first() else { return NOTHING };
    let (height, width) = (first.height(), first.width());
    if frames.len() < 2
        || height * width == 0
        || frames.iter().any(|frame| (frame.height(), frame.width()) != (height, width))
    {
        return NOTHING;
    }
    let scale = (height * width) as f64 / (SIDE * SIDE);
    let side = scale.sqrt();
    let rgb: Vec<f64> = frames
        .iter()
        .flat_map(VideoFrame::values)
        .map(|&value| if value.is_nan() { 0.0 } else { f64::from(value).mul_add(0.5, 0.5).clamp(0.0, 1.0) })
        .collect();
    let saturation: Vec<f64> =
        rgb.as_chunks::<3>().0.iter().map(|&[r, g, b]| r.max(g).max(b) - r.min(g).min(b)).collect();
    let top = quantile(&saturation, 0.99);
    if top < LEAST_SATURATION {
        return NOTHING;
    }
    let mask = saturation.iter().map(|value| ((value / top - 0.35) / 0.4).clamp(0.0, 1.0)).collect();
    let clip = Clip { width, pixels: height * width, rgb, mask };
    let blobs: Vec<Blob> = clip.frames().map(|(mask, _)| blob(&clip, mask)).collect();
    if blobs.iter().all(|blob| blob.area < 20.0 * scale) {
        return NOTHING;
    }
    let rgb = colour_of(&clip);
    let hue = hue(rgb);
    let apart = |colour: Colour| ((hue - colour.hue() + 180.0).rem_euclid(360.0) - 180.0).abs();
    let colour = Colour::ALL.into_iter().min_by(|&one, &other| apart(one).total_cmp(&apart(other)));
    let (motion, motion_score) = motion_of(&blobs, side, scale);
    let (skewness, fourfold) = moments(&clip, &blobs, 60.0 * scale);
    let shape = if skewness < -0.28 {
        Shape::Triangle
    } else if fourfold < -0.2 {
        Shape::Square
    } else {
        Shape::Circle
    };
    Reading {
        colour,
        shape: Some(shape),
        motion: (motion_score > LEAST_MOTION).then_some(motion),
        motion_score,
        skewness,
        fourfold,
        ideal_psnr: ideal_psnr(&clip, &blobs, shape, rgb),
    }
}

/// Between the two nearest ranks, linearly.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    let rank = share * (values.len() - 1) as f64;
    let (low, part) = (rank.floor() as usize, rank.fract());
    let (_, &mut value, above) = values.select_nth_unstable_by(low, f64::total_cmp);
    let next = above.iter().copied().min_by(f64::total_cmp).unwrap_or(value);
    value + (next - value) * part
}

fn blob(clip: &Clip, mask: &[f64]) -> Blob {
    let mut blob = Blob { area: 1e-9, x: 0.0, y: 0.0 };
    for (pixel, weight) in mask.iter().enumerate() {
        let (x, y) = clip.place(pixel);
        blob.area += weight;
        blob.x += weight * x;
        blob.y += weight * y;
    }
    Blob { area: blob.area, x: blob.x / blob.area, y: blob.y / blob.area }
}

/// Mean colour of the inside, or of everything by weight where there is hardly an inside.
fn colour_of(clip: &Clip) -> [f64; 3] {
    let inside = clip.mask.iter().filter(|&&weight| weight > 0.95).count();
    let (mut sum, mut total) = ([0f64; 3], 0f64);
    for (&weight, rgb) in clip.mask.iter().zip(clip.rgb.as_chunks::<3>().0) {
        let weight = if inside > 10 { f64::from(u8::from(weight > 0.95)) } else { weight };
        total += weight;
        for (sum, value) in sum.iter_mut().zip(rgb) {
            *sum += weight * value;
        }
    }
    sum.map(|sum| sum / total.max(1e-9))
}

/// Hue in degrees.
fn hue([r, g, b]: [f64; 3]) -> f64 {
    let (high, low) = (r.max(g).max(b), r.min(g).min(b));
    let range = high - low;
    if range <= 0.0 {
        return 0.0;
    }
    let sector = if r >= g && r >= b {
        ((g - b) / range).rem_euclid(6.0)
    } else if g >= b {
        (b - r) / range + 2.0
    } else {
        (r - g) / range + 4.0
    };
    sector * 60.0
}

/// The motion with the largest score, from the beginning, the middle and the end of the clip.
fn motion_of(blobs: &[Blob], side: f64, scale: f64) -> (Motion, f64) {
    let count = blobs.len();
    let mean = |range: std::ops::Range<usize>, value: fn(&Blob) -> f64| {
        let part = &blobs[range.start..range.end.min(count)];
        part.iter().map(value).sum::<f64>() / part.len() as f64
    };
    let middle = (count / 2).saturating_sub(1)..count / 2 + 2;
    let at = |value: fn(&Blob) -> f64| (mean(0..2, value), mean(middle.clone(), value), mean(count - 2..count, value));
    let ((x0, _, x1), (y0, ym, y1), (a0, _, a1)) = (at(|blob| blob.x), at(|blob| blob.y), at(|blob| blob.area));
    let growth = 0.5 * ((a1 + 8.0 * scale) / (a0 + 8.0 * scale)).ln();
    let (far, high) = (24.0 * side, 21.0 * side);
    let score = |motion: Motion| match motion {
        Motion::Left => (x0 - x1) / far,
        Motion::Right => (x1 - x0) / far,
        Motion::Up => (y0 - y1) / far,
        Motion::Down => (y1 - y0) / far,
        Motion::Grow => growth / 0.9,
        Motion::Shrink => -growth / 0.9,
        Motion::Bounce => (ym - 0.5 * (y0 + y1)) / high,
    };
    let mut best = (Motion::Left, score(Motion::Left));
    for motion in Motion::ALL {
        if score(motion) > best.1 {
            best = (motion, score(motion));
        }
    }
    best
}

/// Vertical skewness and fourfold moment in units of the blob's own spread, averaged by area over frames with enough of it.
fn moments(clip: &Clip, blobs: &[Blob], least_area: f64) -> (f64, f64) {
    let (mut skewness, mut fourfold, mut total) = (0.0, 0.0, 0.0);
    for ((mask, _), blob) in clip.frames().zip(blobs).filter(|(_, blob)| blob.area > least_area) {
        let mean = |value: &dyn Fn(f64, f64) -> f64| {
            let terms = mask.iter().enumerate().map(|(pixel, weight)| {
                let (x, y) = clip.place(pixel);
                weight * value(x - blob.x, y - blob.y)
            });
            terms.sum::<f64>() / blob.area
        };
        let (wide, high) = ((mean(&|u, _| u * u) + 1e-9).sqrt(), (mean(&|_, v| v * v) + 1e-9).sqrt());
        skewness += blob.area * mean(&|_, v| (v / high).powi(3));
        let fourth = mean(&|u, v| {
            let (u, v) = (u / wide, v / high);
            u.powi(4) + v.powi(4) - 6.0 * u * u * v * v
        });
        let spread = mean(&|u, v| ((u / wide).powi(2) + (v / high).powi(2)).powi(2));
        fourfold += blob.area * fourth / spread;
        total += blob.area;
    }
    if total > 0.0 { (skewness / total, fourfold / total) } else { (0.0, 0.0) }
}

/// Redraws the clip from what was read, over a plane fitted to each frame's background, and compares.
fn ideal_psnr(clip: &Clip, blobs: &[Blob], shape: Shape, rgb: [f64; 3]) -> f64 {
    let mut error = 0.0;
    for ((mask, frame), blob) in clip.frames().zip(blobs) {
        let planes = background(clip, mask, frame);
        let radius = (blob.area / shape.area()).sqrt();
        for (pixel, values) in frame.as_chunks::<3>().0.iter().enumerate() {
            let (x, y) = clip.place(pixel);
            let cover = (0.5 - shape.distance(x - blob.x, y - blob.y, radius)).clamp(0.0, 1.0);
            for ((value, plane), colour) in values.iter().zip(&planes).zip(rgb) {
                let ground = plane[0] + plane[1] * x + plane[2] * y;
                error += (ground + cover * (colour - ground) - value).powi(2);
            }
        }
    }
    -10.0 * (error / clip.rgb.len() as f64 + 1e-12).log10()
}

/// `a + b·x + c·y` for each colour, by least squares over the pixels outside the shape.
fn background(clip: &Clip, mask: &[f64], frame: &[f64]) -> [[f64; 3]; 3] {
    let mut normal = [[0f64; 3]; 3];
    let mut right = [[0f64; 3]; 3];
    for ((pixel, _), values) in
        mask.iter().enumerate().zip(frame.as_chunks::<3>().0).filter(|((_, weight), _)| **weight < 0.02)
    {
        let (x, y) = clip.place(pixel);
        let basis = [1.0, x, y];
        for (row, one) in normal.iter_mut().zip(basis) {
            for (sum, other) in row.iter_mut().zip(basis) {
                *sum += one * other;
            }
        }
        for (sums, value) in right.iter_mut().zip(values) {
            for (sum, one) in sums.iter_mut().zip(basis) {
                *sum += one * value;
            }
        }
    }
    right.map(|right| solve(normal, right))
}

/// Gaussian elimination with pivoting; zeros where the system has no single solution (a frame without a background).
fn solve(mut matrix: [[f64; 3]; 3], mut right: [f64; 3]) -> [f64; 3] {
    for column in 0..3 {
        let pivot =
            (column..3).max_by(|&one, &other| matrix[one][column].abs().total_cmp(&matrix[other][column].abs()));
        let pivot = pivot.unwrap_or(column);
        if matrix[pivot][column].abs() < 1e-9 {
            return [0.0; 3];
        }
        matrix.swap(column, pivot);
        right.swap(column, pivot);
        for row in column + 1..3 {
            let factor = matrix[row][column] / matrix[column][column];
            for k in column..3 {
                matrix[row][k] -= factor * matrix[column][k];
            }
            right[row] -= factor * right[column];
        }
    }
    let mut solution = [0f64; 3];
    for row in (0..3).rev() {
        let known: f64 = (row + 1..3).map(|k| matrix[row][k] * solution[k]).sum();
        solution[row] = (right[row] - known) / matrix[row][row];
    }
    solution
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_hues_and_planes_are_right() {
        assert!((quantile(&[4.0, 1.0, 3.0, 2.0], 0.5) - 2.5).abs() < 1e-12);
        for (rgb, want) in [
            ([1.0, 0.0, 0.0], 0.0),
            ([1.0, 1.0, 0.0], 60.0),
            ([0.0, 1.0, 0.0], 120.0),
            ([0.0, 1.0, 1.0], 180.0),
            ([0.0, 0.0, 1.0], 240.0),
            ([1.0, 0.0, 1.0], 300.0),
            ([0.5, 0.5, 0.5], 0.0),
        ] {
            assert!((hue(rgb) - want).abs() < 1e-9, "{rgb:?}");
        }
        let solution = solve([[2.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 4.0]], [4.0, 10.0, 14.0]);
        assert!(solution.iter().zip([1.0, 2.0, 3.0]).all(|(got, want)| (got - want).abs() < 1e-9), "{solution:?}");
        assert!(solve([[0.0; 3]; 3], [1.0; 3]).iter().all(|&value| value == 0.0));
    }
}
