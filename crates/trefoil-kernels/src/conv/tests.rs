use super::*;
use crate::gemm::Activation;
use crate::{Isa, Pool};
use proptest::prelude::*;

fn values(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        })
        .collect()
}

fn frame(height: usize, width: usize, channels: usize, seed: u32) -> Frame {
    let planes = values(height * width * channels, seed);
    Frame::from_planes(height, width, channels, |channel| &planes[channel * height * width..][..height * width])
        .unwrap()
}

/// The value at a pixel that may lie outside.
fn at(frame: &Frame, y: i64, x: i64, channel: usize) -> f64 {
    if (0..frame.height() as i64).contains(&y) && (0..frame.width() as i64).contains(&x) {
        f64::from(frame.row(y as usize)[x as usize * frame.channels() + channel])
    } else {
        0.0
    }
}

/// The definition, in f64: value and sum of magnitudes (for the error bound).
fn definition(
    frames: &[Option<&Frame>],
    shape: FilterShape,
    weight: &[f32],
    y: i64,
    x: i64,
    output: usize,
) -> (f64, f64) {
    let (mut sum, mut magnitude) = (0.0, 0.0);
    for (t, frame) in frames.iter().enumerate() {
        let Some(frame) = frame else { continue };
        for input in 0..shape.inputs {
            for row in 0..shape.height {
                for column in 0..shape.width {
                    let index = (((output * shape.inputs + input) * shape.frames + t) * shape.height + row)
                        * shape.width
                        + column;
                    let (dy, dx) = (row as i64 - shape.height as i64 / 2, column as i64 - shape.width as i64 / 2);
                    let product = f64::from(weight[index]) * at(frame, y + dy, x + dx, input);
                    sum += product;
                    magnitude += product.abs();
                }
            }
        }
    }
    (sum, magnitude)
}

/// Rows and columns repeated, as the reference does before its convolution.
fn doubled(frame: &Frame) -> Frame {
    let mut out = Frame::new(frame.height() * 2, frame.width() * 2, frame.channels());
    for y in 0..out.height() {
        let channels = frame.channels();
        let row = frame.row(y / 2).to_vec();
        for (x, pixel) in out.row_mut(y).chunks_exact_mut(channels).enumerate() {
            pixel.copy_from_slice(&row[x / 2 * channels..][..channels]);
        }
    }
    out
}

fn kernels() -> Vec<Kernels> {
    let mut all: Vec<Kernels> =
        Isa::available().into_iter().map(|isa| Kernels::new(isa, Pool::on_caller()).unwrap()).collect();
    match Pool::pinned(&[0, 1]) {
        Ok(pool) => all.push(Kernels::new(Isa::best(), pool).unwrap()),
        Err(error) => eprintln!("skipped: two threads ({error})"),
    }
    all
}

fn compare(
    frames: &[Option<&Frame>],
    reference: &[Option<&Frame>],
    weights: &ConvWeights,
    weight: &[f32],
    bias: &[f32],
) -> Result<(), TestCaseError> {
    let shape = weights.shape();
    let extent = reference.iter().flatten().next().map_or((2, 2), |frame| (frame.height(), frame.width()));
    for kernels in kernels() {
        for is_added in [false, true] {
            let mut out = frame(extent.0, extent.1, shape.outputs, 77);
            let before = out.clone();
            let sink = if is_added { ConvSink::Add(&mut out) } else { ConvSink::Store(&mut out) };
            kernels.conv(frames, weights, sink, &mut Workspace::new()).unwrap();
            for y in 0..extent.0 as i64 {
                for x in 0..extent.1 as i64 {
                    for (output, bias) in bias.iter().enumerate() {
                        let (sum, magnitude) = definition(reference, shape, weight, y, x, output);
                        let old = if is_added { at(&before, y, x, output) } else { 0.0 };
                        let want = sum + f64::from(*bias) + old;
                        let steps = shape.elements() / shape.outputs + 4;
                        let bound = (magnitude + 3.0) * steps as f64 * f64::from(f32::EPSILON);
                        let got = at(&out, y, x, output);
                        prop_assert!(
                            (got - want).abs() <= bound,
                            "{} {} at {} {}: {} {}",
                            kernels.isa(),
                            shape,
                            y,
                            x,
                            got,
                            want
                        );
                    }
                }
            }
            // The border stays zero: the next convolution rests on it.
            let inside: f64 = (0..out.height()).flat_map(|y| out.row(y)).map(|&x| f64::from(x.abs())).sum();
            let all: f64 = out.data().iter().map(|&x| f64::from(x.abs())).sum();
            prop_assert!((inside - all).abs() < 1e-9 * all.max(1.0));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn convolutions_are_the_definition(
        height in 1usize..7, width in 1usize..30, inputs in 1usize..20, outputs in 1usize..70,
        frames in prop::sample::select(vec![1usize, 3]), side in prop::sample::select(vec![1usize, 3]),
        absent in 0usize..4, seed in any::<u32>(),
    ) {
        let shape = FilterShape { outputs, inputs, frames, height: side, width: side };
        let weight = values(shape.elements(), seed);
        let bias = values(outputs, !seed);
        let weights = ConvWeights::direct(shape, &weight, &bias).unwrap();
        let held: Vec<Frame> = (0..frames).map(|t| frame(height, width, inputs, seed.wrapping_add(t as u32 * 9))).collect();
        let given: Vec<Option<&Frame>> = held.iter().enumerate().map(|(t, frame)| (t >= absent).then_some(frame)).collect();
        compare(&given, &given, &weights, &weight, &bias)?;
    }

    #[test]
    fn fewer_products_give_the_same_sums(
        height in 1usize..7, width in 1usize..30, inputs in 32usize..50, outputs in 32usize..70,
        frames in prop::sample::select(vec![1usize, 3]), absent in 0usize..3, seed in any::<u32>(),
    ) {
        let shape = FilterShape { outputs, inputs, frames, height: 3, width: 3 };
        let weight = values(shape.elements(), seed);
        let bias = values(outputs, !seed);
        let weights = ConvWeights::new(shape, &weight, &bias).unwrap();
        prop_assert!(matches!(weights.form, Form::Winograd(_)));
        let held: Vec<Frame> = (0..frames).map(|t| frame(height, width, inputs, seed.wrapping_add(t as u32 * 9))).collect();
        let given: Vec<Option<&Frame>> = held.iter().enumerate().map(|(t, frame)| (t >= absent).then_some(frame)).collect();
        compare(&given, &given, &weights, &weight, &bias)?;
    }

    #[test]
    fn few_outputs_give_the_same_sums(
        height in 1usize..7, width in 1usize..30, inputs in 1usize..40, outputs in 1usize..=3,
        frames in prop::sample::select(vec![1usize, 3]), absent in 0usize..3, seed in any::<u32>(),
    ) {
        let shape = FilterShape { outputs, inputs, frames, height: 3, width: 3 };
        let weight = values(shape.elements(), seed);
        let bias = values(outputs, !seed);
        let weights = ConvWeights::new(shape, &weight, &bias).unwrap();
        prop_assert!(matches!(weights.form, Form::Few(_)));
        let held: Vec<Frame> = (0..frames).map(|t| frame(height, width, inputs, seed.wrapping_add(t as u32 * 9))).collect();
        let given: Vec<Option<&Frame>> = held.iter().enumerate().map(|(t, frame)| (t >= absent).then_some(frame)).collect();
        compare(&given, &given, &weights, &weight, &bias)?;
    }

    #[test]
    fn upsampling_convolutions_are_the_definition_on_the_doubled_frame(
        height in 1usize..6, width in 1usize..20, inputs in 1usize..20, outputs in 1usize..40, seed in any::<u32>(),
    ) {
        let shape = FilterShape { outputs, inputs, frames: 1, height: 3, width: 3 };
        let weight = values(shape.elements(), seed);
        let bias = values(outputs, !seed);
        let weights = ConvWeights::upsampling(shape, &weight, &bias).unwrap();
        let input = frame(height, width, inputs, seed);
        let large = doubled(&input);
        compare(&[Some(&input)], &[Some(&large)], &weights, &weight, &bias)?;
    }
}

#[test]
fn long_reductions_are_taken_in_pieces() {
    // 3 · 200 products a run are three pieces; 13 × 40 pixels are two blocks.
    let shape = FilterShape { outputs: 33, inputs: 200, frames: 3, height: 3, width: 3 };
    let weight = values(shape.elements(), 5);
    let bias = values(33, 6);
    let weights = ConvWeights::direct(shape, &weight, &bias).unwrap();
    let frames: Vec<Frame> = (0..3).map(|t| frame(13, 40, 200, t)).collect();
    let given: Vec<Option<&Frame>> = frames.iter().map(Some).collect();
    let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
    let mut out = Frame::new(13, 40, 33);
    let mut workspace = Workspace::new();
    kernels.conv(&given, &weights, ConvSink::Store(&mut out), &mut workspace).unwrap();
    for (y, x) in [(0, 0), (12, 39), (6, 20), (9, 25), (0, 39)] {
        for output in [0, 31, 32] {
            let (sum, magnitude) = definition(&given, shape, &weight, y, x, output);
            let (got, want) = (at(&out, y, x, output), sum + f64::from(bias[output]));
            assert!((got - want).abs() < 1e-6 * magnitude, "{got} {want}");
        }
    }
    assert!(workspace.bytes() <= 48 << 10, "{}", workspace.bytes());
}

#[test]
fn threads_do_not_change_a_bit() {
    let Ok(pool) = Pool::pinned(&[0, 1]) else {
        eprintln!("skipped: two threads");
        return;
    };
    let alone = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
    let pair = Kernels::new(Isa::best(), pool).unwrap();
    // Both forms.
    for inputs in [24, 40] {
        let shape = FilterShape { outputs: 40, inputs, frames: 3, height: 3, width: 3 };
        let weights = ConvWeights::new(shape, &values(shape.elements(), 1), &values(40, 2)).unwrap();
        assert_eq!(matches!(weights.form, Form::Winograd(_)), inputs == 40);
        let frames: Vec<Frame> = (0..3).map(|t| frame(9, 31, inputs, t)).collect();
        let given: Vec<Option<&Frame>> = frames.iter().map(Some).collect();
        let [mut one, mut two] = [Frame::new(9, 31, 40), Frame::new(9, 31, 40)];
        let mut workspace = Workspace::new();
        alone.conv(&given, &weights, ConvSink::Store(&mut one), &mut workspace).unwrap();
        assert_eq!(workspace.bytes(), weights.scratch_bytes(9, 31), "scratch is known beforehand");
        pair.conv(&given, &weights, ConvSink::Store(&mut two), &mut Workspace::new()).unwrap();
        let bits = |frame: &Frame| frame.data().iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&one), bits(&two));
    }
}

#[test]
fn norms_are_the_definition_and_zero_pixels_stay_zero() {
    let mut input = frame(3, 5, 37, 4);
    input.row_mut(1)[37..74].fill(0.0);
    let gain = values(37, 8);
    for kernels in kernels() {
        for activation in [Activation::Identity, Activation::Silu] {
            let mut out = Frame::new(3, 5, 37);
            kernels.pixel_norm(&input, &gain, activation, &mut out, &mut Workspace::new()).unwrap();
            for y in 0..3i64 {
                for x in 0..5i64 {
                    let norm = (0..37).map(|c| at(&input, y, x, c).powi(2)).sum::<f64>().sqrt().max(1e-12);
                    for (channel, gain) in gain.iter().enumerate() {
                        let plain = at(&input, y, x, channel) / norm * 37f64.sqrt() * f64::from(*gain);
                        let want = if activation == Activation::Silu { plain / (1.0 + (-plain).exp()) } else { plain };
                        assert!((at(&out, y, x, channel) - want).abs() < 2e-6, "{} {activation:?}", kernels.isa());
                    }
                }
            }
        }
    }
    input.row_mut(0)[3] = f32::NAN;
    let mut out = Frame::new(3, 5, 37);
    let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
    kernels.pixel_norm(&input, &gain, Activation::Silu, &mut out, &mut Workspace::new()).unwrap();
    assert!(out.row(0)[..37].iter().all(|value| value.is_nan()), "damage is not hidden");
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let shape = FilterShape { outputs: 2, inputs: 4, frames: 3, height: 3, width: 3 };
    let weights = ConvWeights::new(shape, &[0.0; 216], &[0.0; 2]).unwrap();
    let kernels = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap();
    let (input, wide) = (Frame::new(2, 3, 4), Frame::new(2, 5, 4));
    let run = |frames: &[Option<&Frame>], out: &mut Frame| {
        kernels.conv(frames, &weights, ConvSink::Store(out), &mut Workspace::new()).unwrap_err().to_string()
    };
    let mut out = Frame::new(2, 3, 2);
    let message = run(&[Some(&input)], &mut out);
    assert_eq!(
        message,
        "conv: the input is 1 frames but the filter is 2×4×3×3×3; there must be one frame per frame of the filter"
    );
    assert!(run(&[Some(&input), None, Some(&wide)], &mut out).contains("2×3×4 but another is 2×5×4"));
    assert!(run(&[None, None, Some(&wide)], &mut out).contains("the destination is 2×3×2 but the result is 2×5×2"));
    assert!(run(&[None, None, Some(&Frame::new(2, 3, 5))], &mut out).contains("channels of the input"));
    let odd = FilterShape { width: 2, ..shape };
    assert!(ConvWeights::new(odd, &[0.0; 144], &[0.0; 2]).unwrap_err().to_string().contains("2×4×3×3×2"));
    assert!(ConvWeights::new(shape, &[0.0; 215], &[0.0; 2]).unwrap_err().to_string().contains("215 values"));
    assert!(ConvWeights::new(shape, &[0.0; 216], &[0.0; 3]).unwrap_err().to_string().contains("3 values"));
    assert!(ConvWeights::upsampling(shape, &[0.0; 216], &[0.0; 2]).unwrap_err().to_string().contains("N×C×1×3×3"));
}
