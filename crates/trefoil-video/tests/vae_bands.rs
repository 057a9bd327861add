//! Decoding in bands gives the frames of the whole picture, bit for bit.

#[path = "common/media.rs"]
mod media;

use media::{golden, kernels};
use trefoil_kernels::{Isa, Kernels, Pool};
use trefoil_video::output::VideoFrame;
use trefoil_video::synthetic::write_vae_decoder;
use trefoil_video::vae::{DecoderPath, Latent, VaeConfig, VaeDecoder, VaeError};

fn decoder(config: &VaeConfig, path: DecoderPath) -> VaeDecoder {
    let folder = tempfile::tempdir().unwrap();
    write_vae_decoder(folder.path(), config, 5).unwrap();
    VaeDecoder::open_on(folder.path(), path).unwrap()
}

fn latent(frames: usize, height: usize, width: usize) -> Latent {
    let values = (0..16 * frames * height * width).map(|n| ((n * 37 % 101) as f32 - 50.0) / 30.0).collect();
    Latent::new(16, frames, height, width, values).unwrap()
}

fn in_bands(
    decoder: &VaeDecoder,
    kernels: &Kernels,
    latent: &Latent,
    bands: usize,
) -> Result<Vec<VideoFrame>, VaeError> {
    let (mut frames, mut asked) = (Vec::new(), vec![0; latent.frames()]);
    let mut before = |frame: usize| {
        asked[frame] += 1;
        Ok::<(), VaeError>(())
    };
    let mut take = |frame| {
        frames.push(frame);
        Ok(())
    };
    decoder.decode_in_bands(kernels, latent, bands, &mut before, &mut take)?;
    // The part before the bands, and each of them.
    let want = if bands == 1 { 1 } else { 1 + bands };
    assert!(asked.iter().all(|&times| times == want), "{asked:?}");
    Ok(frames)
}

fn bits(frames: &[VideoFrame]) -> Vec<u32> {
    frames.iter().flat_map(VideoFrame::values).map(|value| value.to_bits()).collect()
}

/// Wide enough for Winograd's form and for direct ones, with shortcuts, and with both kinds of upsampling.
fn wide() -> VaeConfig {
    VaeConfig {
        base_dim: 32,
        dim_mult: vec![1, 2, 4],
        num_res_blocks: 1,
        temporal_downsample: vec![false, true],
        ..VaeConfig::default()
    }
}

#[test]
fn bands_change_no_bit() {
    let decoder = decoder(&wide(), DecoderPath::F32);
    let scalar = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap();
    // Landscape, portrait, sides that no number of bands divides.
    for (height, width, counts) in [(3, 21, &[1, 2, 3, 5][..]), (17, 6, &[2, 4]), (5, 5, &[2, 5])] {
        let latent = latent(3, height, width);
        let whole = decoder.decode(&kernels(), &latent).unwrap();
        assert_eq!(whole.len(), 5);
        for &bands in counts {
            let banded = in_bands(&decoder, &kernels(), &latent, bands).unwrap();
            assert!(bits(&banded) == bits(&whole), "{height}×{width} in {bands} bands");
        }
    }
    let latent = latent(2, 1, 14);
    let whole = decoder.decode(&scalar, &latent).unwrap();
    assert!(bits(&in_bands(&decoder, &scalar, &latent, 2).unwrap()) == bits(&whole), "scalar kernels");
}

#[test]
fn bands_of_the_reference_decoder_change_no_bit() {
    let Some(folder) = golden() else { return };
    let config = folder.join("vae.config.json");
    let json = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    let config = VaeConfig::from_json(&json, &config).unwrap();
    let path = folder.join("vae.diffusers.safetensors");
    let checkpoint = trefoil_weights::checkpoint::Checkpoint::open(&path, &[]).unwrap();
    let decoder = VaeDecoder::load(&checkpoint, config, &path).unwrap();
    let latent = Latent::read(&folder.join("vae.io.safetensors"), "tile.z").unwrap();
    let whole = in_bands(&decoder, &kernels(), &latent, 1).unwrap();
    for bands in [2, 4] {
        assert!(bits(&in_bands(&decoder, &kernels(), &latent, bands).unwrap()) == bits(&whole), "{bands} bands");
    }
}

#[test]
fn who_decodes_in_bands_by_itself_and_who_cannot() {
    let config = VaeConfig { base_dim: 8, ..VaeConfig::default() };
    let exact = decoder(&config, DecoderPath::F32);
    // Wan2.1's depth: two bands at 416 × 240 and at 832 × 480 either way round, one where they would overlap too far or where there is
    // little to remember.
    for (height, width, bands) in
        [(30, 52, 2), (52, 30, 2), (60, 104, 2), (42, 42, 2), (41, 41, 1), (8, 104, 1), (30, 30, 1), (1, 1, 1)]
    {
        assert_eq!(exact.bands(height, width), bands, "{height}×{width}");
    }
    let coded = decoder(&config, DecoderPath::Int8);
    assert_eq!(coded.bands(60, 104), 1);
    let latent = latent(1, 2, 3);
    let message = in_bands(&coded, &kernels(), &latent, 2).unwrap_err().to_string();
    assert_eq!(message, "2 bands: only the f32 decoder on the CPU cuts a picture into bands");
    for bands in [0, 4, usize::MAX] {
        let message = in_bands(&exact, &kernels(), &latent, bands).unwrap_err().to_string();
        assert_eq!(message, format!("{bands} bands: a latent of 2×3 pixels has 1 to 3"));
        assert!(exact.memory_in_bands([1, 2, 3], bands, 1).is_err());
    }
    let flat =
        VaeConfig { base_dim: 32, dim_mult: vec![1], temporal_downsample: Vec::new(), num_res_blocks: 1, ..config };
    let flat = decoder(&flat, DecoderPath::F32);
    assert!(in_bands(&flat, &kernels(), &latent, 2).unwrap_err().to_string().contains("nothing to cut"));
    assert_eq!(flat.bands(60, 104), 1);
}

#[test]
fn a_stop_or_a_full_disk_ends_it_at_once() {
    let decoder = decoder(&wide(), DecoderPath::F32);
    let latent = latent(2, 2, 6);
    let mut steps = 0;
    let mut before = |_| {
        steps += 1;
        if steps == 5 { Err(VaeError::Stopped) } else { Ok(()) }
    };
    let stopped =
        decoder.decode_in_bands(&kernels(), &latent, 2, &mut before, &mut |_| panic!("no frame is whole yet"));
    assert!(matches!(stopped, Err(VaeError::Stopped)));
    let mut taken = 0;
    let mut full = |_| {
        taken += 1;
        Err(VaeError::Stopped)
    };
    assert!(decoder.decode_in_bands(&kernels(), &latent, 2, &mut |_| Ok(()), &mut full).is_err());
    assert_eq!((steps, taken), (5, 1));
}

#[test]
fn bands_remember_less_and_say_so_beforehand() {
    let decoder = decoder(&wide(), DecoderPath::F32);
    let one = decoder.memory_in_bands([3, 12, 48], 1, 1).unwrap();
    assert_eq!(one, decoder.memory(12, 48, 1).unwrap());
    let two = decoder.memory_in_bands([3, 12, 48], 2, 1).unwrap();
    let four = decoder.memory_in_bands([3, 12, 48], 4, 1).unwrap();
    assert!(two.history * 10 < one.history * 7 && four.history < two.history, "{one:?} {two:?} {four:?}");
    assert!(two.total() < one.total() && two.weights == one.weights);
    // The clip's frames are kept, and what the coarsest level leaves of each latent frame.
    let longer = decoder.memory_in_bands([4, 12, 48], 2, 1).unwrap();
    let (frames, features) = (2 * 48 * 192 * 3 * 4, (12 + 2) * (48 + 2) * 128 * 4);
    assert_eq!(longer.working - two.working, frames + features);
}

/// `TREFOIL_LONG_TESTS=1`: the true size, whose weights are 250 MB.
#[test]
fn wan_in_two_bands_takes_less_than_a_third_of_what_diffusers_takes() {
    if std::env::var_os("TREFOIL_LONG_TESTS").is_none() {
        eprintln!("skipped: set TREFOIL_LONG_TESTS=1 to make weights of the true size");
        return;
    }
    let decoder = decoder(&VaeConfig::default(), DecoderPath::F32);
    for (latent, most) in [([2, 30, 52], 880), ([2, 60, 104], 2800)] {
        for bands in [1, 2, 3] {
            let memory = decoder.memory_in_bands(latent, bands, 2).unwrap();
            println!("{latent:?} in {bands} bands: {memory:?}, {} MB", memory.total() / 1_000_000);
        }
        let memory = decoder.clip_memory(latent, 2).unwrap();
        assert!(memory.total() < most * 1_000_000, "{memory:?}");
    }
}
