//! The decoder on OpenCL devices against the one on the CPU and the public implementation's tensors.

#[path = "common/media.rs"]
mod media;

use media::{demo_model, errors, golden, kernels, tensor};
use std::path::Path;
use std::sync::LazyLock;
use trefoil_kernels::opencl::{Device, Kernels, OpenClError};
use trefoil_video::EngineSpec;
use trefoil_video::engine::{DecoderEngine, EngineDecoder};
use trefoil_video::output::VideoFrame;
use trefoil_video::vae::{DecoderPath, Latent, TileLayout, VaeConfig, VaeDecoder};
use trefoil_weights::checkpoint::Checkpoint;

/// Every variant of every device; empty with a message where there is none.
static DEVICES: LazyLock<Vec<Kernels>> = LazyLock::new(|| {
    let listed = match Device::list() {
        Ok(listed) => listed,
        Err(error @ (OpenClError::Library | OpenClError::NoDevice)) => {
            let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
            assert!(!is_set("TREFOIL_REQUIRE_BACKENDS") || is_set("TREFOIL_TEST_WITHOUT_OPENCL"), "{error}");
            eprintln!("skipped: {error}");
            return Vec::new();
        }
        Err(error) => panic!("{error}"),
    };
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("opencl");
    let fit = listed.iter().filter(|info| info.unfit.is_none());
    fit.flat_map(|info| {
        let device = Device::open(info.index, None).unwrap();
        let kernels = info.variants.iter().map(|&variant| Kernels::new(&device, variant, Some(&cache)).unwrap());
        kernels.collect::<Vec<_>>()
    })
    .collect()
});

fn golden_decoder(folder: &Path, kernels: Option<&Kernels>) -> VaeDecoder {
    let path = folder.join("vae.config.json");
    let config = VaeConfig::from_json(&serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap(), &path).unwrap();
    let path = folder.join("vae.diffusers.safetensors");
    let checkpoint = Checkpoint::open(&path, &[]).unwrap();
    match kernels {
        Some(kernels) => VaeDecoder::load_for(&checkpoint, config, &path, DecoderPath::F32, kernels.into()).unwrap(),
        None => VaeDecoder::load(&checkpoint, config, &path).unwrap(),
    }
}

fn values(frames: &[VideoFrame]) -> Vec<f32> {
    frames.iter().flat_map(|frame| frame.values().iter().copied()).collect()
}

/// Planes `[3][frames][height][width]`, clamped, as the reference stores them.
fn planes(frames: &[VideoFrame]) -> Vec<f32> {
    (0..3).flat_map(|channel| frames.iter().flat_map(move |frame| frame.plane(channel))).collect()
}

#[test]
fn frames_are_the_cpus_and_the_references() {
    let Some(folder) = golden() else { return };
    let io = folder.join("vae.io.safetensors");
    let reference = golden_decoder(&folder, None);
    for device in DEVICES.iter() {
        let decoder = golden_decoder(&folder, Some(device));
        assert!(decoder.is_on_device() && decoder.histories() == reference.histories());
        for case in ["f1", "f5", "f9", "f13"] {
            let latent = Latent::read(&io, &format!("{case}.z")).unwrap();
            let frames = decoder.decode(device, &latent).unwrap();
            let (relative, largest) =
                errors(&values(&frames), &values(&reference.decode(&kernels(), &latent).unwrap()));
            let golden = errors(&planes(&frames), &tensor(&io, &format!("{case}.frames")).1).1;
            println!(
                "{} {case}: {relative:.1e}, {largest:.1e} of the CPU's; {golden:.1e} of the reference's",
                device.variant()
            );
            assert!(relative < 1e-5 && largest < 1e-4 && golden < 2e-4, "{}: {largest:e} {golden:e}", device.variant());
        }
    }
}

#[test]
fn the_small_trained_model_decodes_alike_on_an_engine() {
    let Some(model) = demo_model() else { return };
    let Some(device) = DEVICES.first() else { return };
    let spec = format!("opencl:{}", device.device().info().index);
    let on = EngineDecoder::open(&model, DecoderPath::F32, &spec.parse().unwrap()).unwrap();
    assert!(on.engine().notes()[0].contains("kernels"), "{:?}", on.engine().notes());
    let cpu = EngineDecoder::open(&model, DecoderPath::F32, &EngineSpec::cpu(&[0])).unwrap();
    let latent = Latent::read(&model.join("golden/prompt0.safetensors"), "latent.5").unwrap();
    let latent = latent.denormalise(cpu.decoder().config()).unwrap();
    let (got, want) =
        (on.decoder().decode(on.kernels(), &latent).unwrap(), cpu.decoder().decode(cpu.kernels(), &latent).unwrap());
    assert!(errors(&values(&got), &values(&want)).1 < 1e-4);
    // In tiles too, with the histories of each tile.
    let tiles = TileLayout::new(latent.height(), latent.width(), 4, 3).unwrap();
    let in_tiles = |on: &EngineDecoder| on.decoder().decode_tiled(on.kernels(), &latent, &tiles, &|| true).unwrap();
    assert!(errors(&values(&in_tiles(&on)), &values(&in_tiles(&cpu))).1 < 1e-4);
}

#[test]
fn int8_frames_are_almost_the_cpus() {
    let Some(model) = demo_model() else { return };
    let reference = VaeDecoder::open_on(&model, DecoderPath::Int8).unwrap();
    let latent = Latent::read(&model.join("golden/prompt0.safetensors"), "latent.5").unwrap();
    let latent = latent.denormalise(reference.config()).unwrap();
    let want = reference.decode(&kernels(), &latent).unwrap();
    for device in DEVICES.iter() {
        let decoder = VaeDecoder::open_for(&model, DecoderPath::Int8, device.into()).unwrap();
        assert!(decoder.is_on_device() && decoder.path() == DecoderPath::Int8);
        let frames = decoder.decode(device, &latent).unwrap();
        // Products are exact; what is left in f32 may turn a value that lies between two codes.
        let (relative, _) = errors(&values(&frames), &values(&want));
        println!("{}: relative RMS {relative:.1e} of the CPU's", device.variant());
        assert!(relative < 5e-3, "{}: {relative:e}", device.variant());
        let predicted = decoder.memory(latent.height(), latent.width(), 1).unwrap();
        let mut session = decoder.session(latent.height(), latent.width()).unwrap();
        (0..latent.frames()).for_each(|frame| drop(session.push(device, &latent, frame).unwrap()));
        assert!(session.memory().history == predicted.history && session.memory().total() <= predicted.total());
    }
}

#[test]
fn memory_on_a_device_is_known_beforehand() {
    let (Some(folder), Some(device)) = (golden(), DEVICES.first()) else { return };
    let decoder = golden_decoder(&folder, Some(device));
    let latent = Latent::read(&folder.join("vae.io.safetensors"), "f13.z").unwrap();
    let predicted = decoder.memory(latent.height(), latent.width(), 2).unwrap();
    let mut session = decoder.session(latent.height(), latent.width()).unwrap();
    for frame in 0..latent.frames() {
        session.push(device, &latent, frame).unwrap();
        assert!(session.memory().total() <= predicted.total(), "{:?} {predicted:?}", session.memory());
    }
    assert_eq!(session.memory(), predicted);
}

#[test]
fn weights_of_another_kind_are_refused() {
    let Some(folder) = golden() else { return };
    let latent = Latent::read(&folder.join("vae.io.safetensors"), "f1.z").unwrap();
    for device in DEVICES.iter().take(1) {
        let (there, here) = (golden_decoder(&folder, Some(device)), golden_decoder(&folder, None));
        for error in [there.decode(&kernels(), &latent).unwrap_err(), here.decode(device, &latent).unwrap_err()] {
            assert!(error.to_string().contains("open it for the kernels that run it"), "{error}");
        }
    }
    let message = DecoderEngine::open(&"opencl:no such device".parse().unwrap()).unwrap_err().to_string();
    assert!(message.contains("OpenCL") && !message.contains('\n'), "{message}");
}
