//! The f32 operators on frames of OpenCL devices against the CPU's, on every device and in every variant that it has.
#![cfg(feature = "opencl")]

#[path = "support/opencl.rs"]
mod devices;
mod support;

use devices::ALL;
use proptest::prelude::*;
use support::Random;
use trefoil_kernels::opencl;
use trefoil_kernels::{
    Activation, AttentionSink, CodeFrame, ConvSink, ConvWeights, FilterShape, Frame, Int8ConvWeights, Isa, Kernels,
    Operands, Pool, Rows, RowsMut, Workspace,
};

fn cpu() -> Kernels {
    Kernels::new(Isa::best(), Pool::on_caller()).unwrap()
}

fn frame(height: usize, width: usize, channels: usize, random: &mut Random) -> Frame {
    let mut frame = Frame::new(height, width, channels);
    (0..height).for_each(|y| frame.row_mut(y).iter_mut().for_each(|value| *value = random.normal()));
    frame
}

fn on(kernels: &opencl::Kernels, frame: &Frame) -> opencl::Frame {
    let mut copy = kernels.frame(frame.height(), frame.width(), frame.channels()).unwrap();
    copy.write(frame).unwrap();
    copy
}

fn pixels(frame: &Frame) -> Vec<f32> {
    (0..frame.height()).flat_map(|y| frame.row(y)).copied().collect()
}

/// The largest difference. The border must still be zero: it is the next convolution's padding.
fn difference(got: &opencl::Frame, want: &Frame) -> f32 {
    let (got, want) = (got.read().unwrap(), pixels(want));
    assert_eq!(got.len(), want.len());
    got.iter()
        .zip(want)
        .map(|(got, want)| (got - want).abs())
        .fold(0.0, |most, off| if off > most { off } else { most })
}

#[derive(Debug, Clone)]
struct Case {
    shape: FilterShape,
    height: usize,
    width: usize,
    is_upsampling: bool,
    is_added: bool,
    /// Frames that are zero, from the oldest.
    absent: usize,
    seed: u64,
}

/// Runs a case in every variant. The oracle sums the products as they are defined, in another order.
fn run(case: &Case) {
    let Case { shape, height, width, is_upsampling, is_added, absent, seed } = *case;
    let mut random = Random::new(seed);
    let products = shape.elements() / shape.outputs;
    let weight = random.normals(shape.elements(), 1.0 / (products as f32).sqrt());
    let bias = random.normals(shape.outputs, 1.0);
    let frames: Vec<Option<Frame>> =
        (0..shape.frames).map(|at| (at >= absent).then(|| frame(height, width, shape.inputs, &mut random))).collect();
    let scale = if is_upsampling { 2 } else { 1 };
    let before = frame(height * scale, width * scale, shape.outputs, &mut random);
    let mut want = before.clone();
    let packed = if is_upsampling {
        ConvWeights::upsampling(shape, &weight, &bias)
    } else {
        ConvWeights::direct(shape, &weight, &bias)
    };
    let inputs: Vec<Option<&Frame>> = frames.iter().map(Option::as_ref).collect();
    let sink = if is_added { ConvSink::Add(&mut want) } else { ConvSink::Store(&mut want) };
    cpu().conv(&inputs, &packed.unwrap(), sink, &mut Workspace::new()).unwrap();
    for kernels in ALL.iter() {
        let weights = if is_upsampling {
            kernels.upsampling_weights(shape, &weight, &bias)
        } else {
            kernels.conv_weights(shape, &weight, &bias)
        };
        let weights = weights.unwrap();
        let frames: Vec<Option<opencl::Frame>> =
            frames.iter().map(|frame| frame.as_ref().map(|frame| on(kernels, frame))).collect();
        let inputs: Vec<Option<&opencl::Frame>> = frames.iter().map(Option::as_ref).collect();
        let mut got = on(kernels, &before);
        let sink = if is_added { opencl::ConvSink::Add(&mut got) } else { opencl::ConvSink::Store(&mut got) };
        kernels.conv(&inputs, &weights, sink).unwrap();
        let off = difference(&got, &want);
        assert!(off < 2e-5, "{}: {off:e} in {case:?}", kernels.variant());
        // What comes next reads the border as zeros: a filter of ones over it must see none.
        let shape = FilterShape { outputs: 1, inputs: shape.outputs, frames: 1, height: 3, width: 3 };
        let ones = vec![1.0 / shape.elements() as f32; shape.elements()];
        let (mut next, mut want_next) =
            (kernels.frame(got.height(), got.width(), 1).unwrap(), Frame::new(got.height(), got.width(), 1));
        let summing = kernels.conv_weights(shape, &ones, &[0.0]).unwrap();
        kernels.conv(&[Some(&got)], &summing, opencl::ConvSink::Store(&mut next)).unwrap();
        let summing = ConvWeights::direct(shape, &ones, &[0.0]).unwrap();
        cpu().conv(&[Some(&want)], &summing, ConvSink::Store(&mut want_next), &mut Workspace::new()).unwrap();
        let off = difference(&next, &want_next);
        assert!(off < 2e-5, "{}: border, {off:e} in {case:?}", kernels.variant());
    }
}

fn cases(usual: u32) -> ProptestConfig {
    let cases = if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { usual * 20 } else { usual };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

proptest! {
    #![proptest_config(cases(8))]
    #[test]
    fn convolutions_are_the_cpus(
        (height, width, inputs, outputs) in (1usize..9, 1usize..20, 1usize..40, 1usize..70),
        kind in 0usize..5,
        is_added in any::<bool>(),
        absent in 0usize..4,
        seed in any::<u64>(),
    ) {
        let (frames, side_y, side_x, is_upsampling) =
            [(3, 3, 3, false), (1, 1, 1, false), (3, 1, 1, false), (1, 3, 3, false), (1, 3, 3, true)][kind];
        let shape = FilterShape { outputs, inputs, frames, height: side_y, width: side_x };
        // The filter's last frame may be zero too, then the bias alone remains.
        run(&Case { shape, height, width, is_upsampling, is_added, absent: absent.min(frames), seed });
    }
}

#[test]
fn winograd_bands_meet() {
    // Wide filters over frames of several bands, the last one short, odd and even widths.
    for (height, width, channels, absent) in [(9, 301, 128, 2), (4, 200, 40, 1)] {
        let shape = FilterShape { outputs: 33, inputs: channels, frames: 3, height: 3, width: 3 };
        run(&Case { shape, height, width, is_upsampling: false, is_added: true, absent, seed: 7 });
    }
}

#[test]
fn norms_are_the_cpus_and_nan_stays() {
    let mut random = Random::new(3);
    for (height, width, channels) in [(3, 5, 96), (1, 1, 7), (2, 9, 33)] {
        let mut input = frame(height, width, channels, &mut random);
        // A pixel of zeros is divided by the smallest norm.
        input.row_mut(0)[..channels].fill(0.0);
        let gain = random.normals(channels, 1.0);
        for activation in [Activation::Identity, Activation::Silu] {
            let mut want = Frame::new(height, width, channels);
            cpu().pixel_norm(&input, &gain, activation, &mut want, &mut Workspace::new()).unwrap();
            for kernels in ALL.iter() {
                let device = on(kernels, &input);
                let mut got = kernels.frame(height, width, channels).unwrap();
                kernels.pixel_norm(&device, &kernels.copied(&gain).unwrap(), activation, &mut got).unwrap();
                assert!(difference(&got, &want) < 2e-5, "{} {activation:?}", kernels.variant());
            }
        }
        input.row_mut(height - 1)[width * channels - 1] = f32::NAN;
        for kernels in ALL.iter() {
            let mut got = kernels.frame(height, width, channels).unwrap();
            let gain = kernels.copied(&gain).unwrap();
            kernels.pixel_norm(&on(kernels, &input), &gain, Activation::Identity, &mut got).unwrap();
            let values = got.read().unwrap();
            let (rest, last) = values.split_at(values.len() - channels);
            assert!(last.iter().all(|value| value.is_nan()) && rest.iter().all(|value| value.is_finite()));
        }
    }
}

#[test]
fn attention_over_pixels_is_the_cpus() {
    let mut random = Random::new(5);
    // The last one has several bands of queries.
    for (height, width, channels) in [(1, 1, 32), (5, 7, 64), (40, 41, 32)] {
        let qkv = frame(height, width, 3 * channels, &mut random);
        let values = pixels(&qkv);
        let pixel_count = height * width;
        let part =
            |at: usize| Rows::new("part", &values[at * channels..], pixel_count, channels, 3 * channels).unwrap();
        let mut want = vec![0f32; pixel_count * channels];
        let out = RowsMut::dense("out", &mut want, pixel_count, channels).unwrap();
        let sink = AttentionSink::F32 { out, operands: Operands::F32 };
        cpu().attention_f32(part(0), part(1), part(2), 1, Operands::F32, sink, &mut Workspace::new()).unwrap();
        for kernels in ALL.iter() {
            let mut out = kernels.frame(height, width, channels).unwrap();
            kernels.pixel_attention(&on(kernels, &qkv), &mut out).unwrap();
            let got = out.read().unwrap();
            let off = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0f32, f32::max);
            assert!(got.iter().all(|value| value.is_finite()) && off < 2e-5, "{}: {off:e}", kernels.variant());
            assert!(kernels.scratch_bytes() >= opencl::Kernels::pixel_attention_scratch(height, width, channels));
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(kernels) = ALL.first() else { return };
    let shape = FilterShape { outputs: 4, inputs: 2, frames: 3, height: 3, width: 3 };
    let weights = kernels.conv_weights(shape, &vec![0.0; shape.elements()], &[0.0; 4]).unwrap();
    let (mut out, input) = (kernels.frame(3, 4, 4).unwrap(), kernels.frame(3, 4, 2).unwrap());
    let mut message = |frames: &[Option<&opencl::Frame>]| {
        kernels.conv(frames, &weights, opencl::ConvSink::Store(&mut out)).unwrap_err().to_string()
    };
    assert!(message(&[Some(&input)]).contains("one frame per frame"));
    let narrow = kernels.frame(3, 5, 2).unwrap();
    assert!(message(&[Some(&input), Some(&narrow), None]).contains("same extent"));
    let thin = kernels.frame(3, 4, 1).unwrap();
    assert!(message(&[None, None, Some(&thin)]).contains("channels of the input"));
    let mut small = kernels.frame(2, 4, 4).unwrap();
    let error = kernels.conv(&[None, None, Some(&input)], &weights, opencl::ConvSink::Store(&mut small)).unwrap_err();
    assert!(error.to_string().contains("same shape"), "{error}");
    let gain = kernels.copied(&[1.0f32]).unwrap();
    let mut normed = kernels.frame(3, 4, 2).unwrap();
    assert!(kernels.pixel_norm(&input, &gain, Activation::Silu, &mut normed).is_err());
    assert!(kernels.pixel_attention(&input, &mut small).is_err());
    assert!(small.write(&Frame::new(1, 1, 4)).is_err());
    if let Some(other) = ALL.get(1) {
        let mut out = other.frame(3, 4, 4).unwrap();
        let frames = [None, None, Some(&input)];
        let error = kernels.conv(&frames, &weights, opencl::ConvSink::Store(&mut out)).unwrap_err();
        assert!(error.to_string().contains("other kernels"), "{error}");
    }
}

proptest! {
    #![proptest_config(cases(6))]
    #[test]
    fn codes_and_their_convolutions_are_the_cpus(
        (height, width, inputs, outputs) in (1usize..7, 1usize..17, 1usize..80, 1usize..50),
        frame_count in prop_oneof![Just(1usize), Just(3)],
        absent in 0usize..3,
        is_added in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut random = Random::new(seed);
        let shape = FilterShape { outputs, inputs, frames: frame_count, height: 3, width: 3 };
        let (weight, bias) = (random.normals(shape.elements(), 0.1), random.normals(outputs, 1.0));
        let gain = random.normals(inputs, 1.0);
        let sources: Vec<Option<Frame>> =
            (0..frame_count).map(|at| (at >= absent).then(|| frame(height, width, inputs, &mut random))).collect();
        let before = frame(height, width, outputs, &mut random);
        let mut workspace = Workspace::new();
        let coded: Vec<Option<CodeFrame>> = sources
            .iter()
            .map(|source| {
                let mut codes = CodeFrame::new(height, width, inputs);
                let source = source.as_ref()?;
                cpu().pixel_norm_codes(source, &gain, &mut codes, &mut workspace).unwrap();
                Some(codes)
            })
            .collect();
        let mut want = before.clone();
        let inputs_of: Vec<Option<&CodeFrame>> = coded.iter().map(Option::as_ref).collect();
        let sink = if is_added { ConvSink::Add(&mut want) } else { ConvSink::Store(&mut want) };
        let packed = Int8ConvWeights::new(shape, &weight, &bias).unwrap();
        cpu().conv_int8(&inputs_of, &packed, sink, &mut workspace).unwrap();
        for kernels in ALL.iter() {
            let weights = kernels.int8_conv_weights(shape, &weight, &bias).unwrap();
            let gain = kernels.copied(&gain).unwrap();
            let mut is_same = true;
            let device: Vec<Option<opencl::CodeFrame>> = sources
                .iter()
                .zip(&coded)
                .map(|(source, coded)| {
                    let (source, coded) = (source.as_ref()?, coded.as_ref()?);
                    let mut codes = kernels.code_frame(height, width, inputs).unwrap();
                    kernels.pixel_norm_codes(&on(kernels, source), &gain, &mut codes).unwrap();
                    let (scale, zero, values) = codes.read().unwrap();
                    let rows = (0..height).flat_map(|y| coded.row(y)).copied();
                    let apart = values.iter().zip(rows).map(|(&got, want)| got.abs_diff(want)).max().unwrap();
                    assert!(apart <= 1, "codes are {apart} apart");
                    assert!((scale / coded.scale() - 1.0).abs() < 1e-5 && zero.abs_diff(coded.zero()) <= 1);
                    is_same &= apart == 0 && scale.to_bits() == coded.scale().to_bits() && zero == coded.zero();
                    Some(codes)
                })
                .collect();
            let frames: Vec<Option<&opencl::CodeFrame>> = device.iter().map(Option::as_ref).collect();
            let mut got = on(kernels, &before);
            let sink = if is_added { opencl::ConvSink::Add(&mut got) } else { opencl::ConvSink::Store(&mut got) };
            kernels.conv_int8(&frames, &weights, sink).unwrap();
            let off = difference(&got, &want);
            // From the same codes the same bits.
            prop_assert!(if is_same { off == 0.0 } else { off < 0.5 }, "{}: {:e}", kernels.variant(), off);
            // PoCL rounds a square root and a division as the CPU does, so codes are the same there.
            let is_pocl = kernels.device().info().platform == "Portable Computing Language";
            prop_assert!(is_same || !is_pocl, "{}", kernels.variant());
        }
    }
}
