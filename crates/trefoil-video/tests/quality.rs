//! The reader of coloured shapes, on clips drawn here.

#[path = "common/media.rs"]
mod media;

use media::{demo_model, raw};
use trefoil_video::output::VideoFrame;
use trefoil_video::quality::{Colour, Motion, Shape, read_shapes};

const FRAMES: usize = 17;
const SIDE: usize = 64;

/// A small deterministic generator.
struct Random(u64);

impl Random {
    /// Between `low` and `high`.
    fn between(&mut self, low: f64, high: f64) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        low + (high - low) * (self.0 >> 40) as f64 / f64::from(1u32 << 24)
    }
}

/// RGB of a hue in degrees.
fn colour(hue: f64, saturation: f64, value: f64) -> [f64; 3] {
    let channel = |offset: f64| {
        let k = (offset + hue.rem_euclid(360.0) / 60.0).rem_euclid(6.0);
        value - value * saturation * k.min(4.0 - k).clamp(0.0, 1.0)
    };
    [channel(5.0), channel(3.0), channel(1.0)]
}

/// How much of a pixel the shape covers.
fn cover(shape: Shape, x: f64, y: f64, radius: f64) -> f64 {
    let distance = match shape {
        Shape::Circle => x.hypot(y) - radius,
        Shape::Square => x.abs().max(y.abs()) - 0.88 * radius,
        Shape::Triangle => y.max(x.abs() * 0.866_025_4 - 0.5 * y) - 0.68 * radius,
    };
    (0.5 - distance).clamp(0.0, 1.0)
}

/// A clip like those the demo model is trained on, at `side` pixels.
fn draw(colour_word: Colour, shape: Shape, motion: Motion, random: &mut Random, side: usize) -> Vec<VideoFrame> {
    let zoom = side as f64 / SIDE as f64;
    let radius = random.between(11.0, 13.5);
    let edge = radius * 1.2 + 1.0;
    let (start, end) = (random.between(edge, edge + 3.0), random.between(61.0 - edge, 64.0 - edge));
    let (still_x, still_y) = (32.0 + random.between(-7.0, 7.0), 32.0 + random.between(-7.0, 7.0));
    let (small, large) = (random.between(6.0, 8.0), random.between(17.0, 20.0));
    let ink =
        colour(colour_word.hue() + random.between(-5.0, 5.0), random.between(0.85, 1.0), random.between(0.85, 1.0));
    let ground = [random.between(0.06, 0.16), random.between(0.4, 0.52), random.between(0.82, 0.92)]
        [(random.between(0.0, 3.0) as usize).min(2)];
    let slope = [random.between(-0.06, 0.06), random.between(-0.06, 0.06)];
    (0..FRAMES)
        .map(|frame| {
            let u = frame as f64 / (FRAMES - 1) as f64;
            let forth = start + (end - start) * u;
            let back = end + (start - end) * u;
            let (x, y, radius) = match motion {
                Motion::Left => (back, still_y, radius),
                Motion::Right => (forth, still_y, radius),
                Motion::Up => (still_x, back, radius),
                Motion::Down => (still_x, forth, radius),
                Motion::Grow => (still_x, still_y, small + (large - small) * u),
                Motion::Shrink => (still_x, still_y, large + (small - large) * u),
                Motion::Bounce => (still_x, end - (end - start) * (2.0 * u - 1.0).powi(2), radius),
            };
            let values = (0..side * side).flat_map(|pixel| {
                let (px, py) = ((pixel % side) as f64 + 0.5, (pixel / side) as f64 + 0.5);
                let alpha = cover(shape, px - x * zoom, py - y * zoom, radius * zoom);
                let half = side as f64 / 2.0;
                let ground = (ground + (px - half) / half * slope[0] + (py - half) / half * slope[1]).clamp(0.0, 1.0);
                ink.map(|ink| ((ground + alpha * (ink - ground)) * 2.0 - 1.0) as f32)
            });
            VideoFrame::from_signed(side, side, values.collect())
        })
        .collect()
}

#[test]
fn every_combination_is_read_and_shuffled_labels_score_at_chance() {
    let mut random = Random(7);
    let mut read = Vec::new();
    for colour in Colour::ALL {
        for shape in Shape::ALL {
            for motion in Motion::ALL {
                let reading = read_shapes(&draw(colour, shape, motion, &mut random, SIDE));
                let got = (reading.colour, reading.shape, reading.motion);
                assert_eq!(got, (Some(colour), Some(shape), Some(motion)), "{reading:?}");
                assert!(reading.ideal_psnr > 30.0, "{colour:?} {shape:?} {motion:?}: {reading:?}");
                read.push((colour, shape, motion));
            }
        }
    }
    assert_eq!(read.len(), 126);
    // Against labels moved by a stride that is prime to all three numbers: what chance gives.
    let shifted = |get: fn(&(Colour, Shape, Motion)) -> usize| {
        let hits = (0..read.len()).filter(|&at| get(&read[at]) == get(&read[(at * 5 + 31) % read.len()])).count();
        hits as f64 / read.len() as f64
    };
    assert!((shifted(|labels| labels.0 as usize) - 1.0 / 6.0).abs() < 0.12);
    assert!((shifted(|labels| labels.1 as usize) - 1.0 / 3.0).abs() < 0.15);
    assert!((shifted(|labels| labels.2 as usize) - 1.0 / 7.0).abs() < 0.12);
}

#[test]
fn larger_clips_read_the_same() {
    let mut random = Random(3);
    for (colour, shape, motion) in [
        (Colour::Red, Shape::Triangle, Motion::Bounce),
        (Colour::Cyan, Shape::Square, Motion::Grow),
        (Colour::Purple, Shape::Circle, Motion::Left),
    ] {
        let reading = read_shapes(&draw(colour, shape, motion, &mut random, 128));
        assert_eq!(
            (reading.colour, reading.shape, reading.motion),
            (Some(colour), Some(shape), Some(motion)),
            "{reading:?}"
        );
    }
}

#[test]
fn clips_without_a_shape_read_as_nothing() {
    let gray: Vec<VideoFrame> =
        (0..FRAMES).map(|_| VideoFrame::from_signed(SIDE, SIDE, vec![0.1; SIDE * SIDE * 3])).collect();
    let nothing = read_shapes(&gray);
    assert_eq!((nothing.colour, nothing.shape, nothing.motion), (None, None, None));
    assert_eq!(read_shapes(&[]).colour, None);
    assert_eq!(read_shapes(&gray[..1]).colour, None);
    let damaged: Vec<VideoFrame> =
        (0..FRAMES).map(|_| VideoFrame::from_signed(SIDE, SIDE, vec![f32::NAN; SIDE * SIDE * 3])).collect();
    assert_eq!(read_shapes(&damaged).colour, None);
    // A shape that stays where it is moves nowhere.
    let mut random = Random(5);
    let clip = draw(Colour::Green, Shape::Circle, Motion::Right, &mut random, SIDE);
    let still = read_shapes(&vec![clip[8].clone(); FRAMES]);
    assert_eq!((still.colour, still.motion), (Some(Colour::Green), None), "{still:?}");
}

#[test]
fn a_generated_clip_reads_as_the_reference_reads_it() {
    let Some(model) = demo_model() else { return };
    let bytes = raw(&model.join("golden/prompt0.safetensors"), "frames_u8");
    let clip: Vec<VideoFrame> =
        bytes.chunks_exact(SIDE * SIDE * 3).map(|bytes| VideoFrame::from_bytes(SIDE, SIDE, bytes)).collect();
    let reading = read_shapes(&clip);
    // `measure.py` on the same bytes.
    let got = (reading.colour, reading.shape, reading.motion);
    assert_eq!(got, (Some(Colour::Red), Some(Shape::Circle), Some(Motion::Left)));
    for (got, want) in [
        (reading.motion_score, 0.900_109),
        (reading.skewness, -0.010_925),
        (reading.fourfold, -0.109_858),
        (reading.ideal_psnr, 25.590_909),
    ] {
        assert!((got - want).abs() < 1e-3, "{got} {want}");
    }
}
