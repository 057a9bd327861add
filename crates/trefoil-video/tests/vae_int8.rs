//! The decoder with INT8 residual blocks beside the one in f32, on the trained model of `testdata`.

#[path = "common/media.rs"]
mod media;

use media::{demo_model, kernels};
use std::path::{Path, PathBuf};
use trefoil_kernels::Kernels;
use trefoil_video::noise::torch_normals;
use trefoil_video::quality::compare;
use trefoil_video::vae::{DecoderPath, Latent, VaeDecoder};

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/demo-model")
}

/// A latent of the usual size of values, which no denoiser made.
fn noise(decoder: &VaeDecoder) -> Latent {
    let values = torch_normals(3, 16 * 3 * 8 * 8);
    Latent::new(16, 3, 8, 8, values).unwrap().denormalise(decoder.config()).unwrap()
}

#[test]
fn int8_is_close_to_f32() {
    let [exact, coded] = DecoderPath::ALL.map(|path| VaeDecoder::open_on(&model(), path).unwrap());
    assert_eq!((exact.path(), coded.path()), (DecoderPath::F32, DecoderPath::Int8));
    let mut latents = vec![("noise", noise(&exact), 28.0)];
    if let Some(shared) = demo_model() {
        let latent = Latent::read(&shared.join("golden/prompt0.safetensors"), "latent.5").unwrap();
        latents.push(("a generated clip", latent.denormalise(exact.config()).unwrap(), 32.0));
    }
    for (name, latent, least) in latents {
        let frames = coded.decode(&kernels(), &latent).unwrap();
        let fidelity = compare(&frames, &exact.decode(&kernels(), &latent).unwrap()).unwrap();
        println!("{name}: PSNR {:.1} dB, SSIM {:.4}, cosine {:.5}", fidelity.psnr, fidelity.ssim, fidelity.cosine);
        assert!(fidelity.psnr.is_finite() && fidelity.psnr > least, "{name}: {fidelity:?}");
    }
}

#[test]
fn int8_takes_less_memory_which_is_known_beforehand() {
    let [exact, coded] = DecoderPath::ALL.map(|path| VaeDecoder::open_on(&model(), path).unwrap());
    let latent = noise(&coded);
    let predicted = coded.memory(8, 8, 1).unwrap();
    let mut session = coded.session(8, 8).unwrap();
    for frame in 0..latent.frames() {
        session.push(&kernels(), &latent, frame).unwrap();
        assert!(session.memory().working <= predicted.working + (1 << 20));
    }
    assert_eq!(session.memory().history, predicted.history);
    assert_eq!(session.memory().weights, predicted.weights);
    let all = exact.memory(8, 8, 1).unwrap();
    assert!(predicted.weights * 2 < all.weights, "{predicted:?} {all:?}");
    assert!(predicted.history * 2 < all.history, "{predicted:?} {all:?}");
}

#[test]
fn threads_do_not_change_a_bit_of_int8() {
    let Ok(pair) = Kernels::best(&[0, 1]) else {
        eprintln!("skipped: two threads");
        return;
    };
    let decoder = VaeDecoder::open_on(&model(), DecoderPath::Int8).unwrap();
    let latent = noise(&decoder);
    assert_eq!(decoder.decode(&kernels(), &latent).unwrap(), decoder.decode(&pair, &latent).unwrap());
}
