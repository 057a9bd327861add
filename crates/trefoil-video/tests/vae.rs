//! The VAE decoder against the public implementation's tensors, and with checkpoints that are damaged.

#[path = "common/media.rs"]
mod media;

use media::{demo_model, errors, golden, kernels, raw, tensor, write_safetensors};
use std::path::Path;
use trefoil_video::output::VideoFrame;
use trefoil_video::vae::{Latent, Layout, TileLayout, VaeConfig, VaeDecoder};
use trefoil_weights::checkpoint::Checkpoint;

/// Name, shape and values.
type Tensor = (String, Vec<usize>, Vec<f32>);

fn config(folder: &Path) -> VaeConfig {
    let path = folder.join("vae.config.json");
    VaeConfig::from_json(&serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap(), &path).unwrap()
}

fn golden_decoder(folder: &Path) -> VaeDecoder {
    let path = folder.join("vae.diffusers.safetensors");
    VaeDecoder::load(&Checkpoint::open(&path, &[]).unwrap(), config(folder), &path).unwrap()
}

/// Planes `[3][frames][height][width]` of decoded frames, as the reference stores them.
fn planes(frames: &[VideoFrame], is_clamped: bool) -> Vec<f32> {
    (0..3)
        .flat_map(|channel| frames.iter().map(move |frame| (channel, frame)))
        .flat_map(|(channel, frame)| {
            let plane: Vec<f32> = if is_clamped {
                frame.plane(channel).collect()
            } else {
                frame.values().iter().skip(channel).step_by(3).copied().collect()
            };
            plane
        })
        .collect()
}

#[test]
fn frames_are_the_references() {
    let Some(folder) = golden() else { return };
    let decoder = golden_decoder(&folder);
    assert_eq!(decoder.layout(), Layout::Diffusers);
    assert_eq!(decoder.histories(), 32, "the reference numbers 32 cache slots");
    let io = folder.join("vae.io.safetensors");
    for (case, count) in [("f1", 1), ("f5", 5), ("f9", 9), ("f13", 13)] {
        let latent = Latent::read(&io, &format!("{case}.latent")).unwrap().denormalise(decoder.config()).unwrap();
        let (_, z) = tensor(&io, &format!("{case}.z"));
        assert!(errors(latent.values(), &z).1 < 1e-5, "de-normalisation of {case}");
        assert_eq!(decoder.config().frames(latent.frames()), count);
        let frames = decoder.decode(&kernels(), &latent).unwrap();
        assert_eq!(frames.len(), count);
        for (name, is_clamped) in [("raw", false), ("frames", true)] {
            let (shape, want) = tensor(&io, &format!("{case}.{name}"));
            assert_eq!(shape, [1, 3, count, frames[0].height(), frames[0].width()]);
            let (relative, largest) = errors(&planes(&frames, is_clamped), &want);
            println!("{case}.{name}: relative RMS {relative:.2e}, largest {largest:.2e}");
            assert!(relative < 2e-5 && largest < 2e-4, "{case}.{name}: {relative:e} {largest:e}");
        }
    }
}

#[test]
fn the_small_trained_model_decodes_to_its_own_frames() {
    let Some(model) = demo_model() else { return };
    let decoder = VaeDecoder::open(&model).unwrap();
    let io = model.join("golden/prompt0.safetensors");
    let latent = Latent::read(&io, "latent.5").unwrap().denormalise(decoder.config()).unwrap();
    let frames = decoder.decode(&kernels(), &latent).unwrap();
    let (_, want) = tensor(&io, "frames");
    let (relative, largest) = errors(&planes(&frames, true), &want);
    println!("relative RMS {relative:.2e}, largest {largest:.2e}");
    assert!(largest < 1e-4, "{relative:e} {largest:e}");
    let bytes: Vec<u8> = frames.iter().flat_map(VideoFrame::to_bytes).collect();
    let want = raw(&io, "frames_u8");
    let off = bytes.iter().zip(&want).filter(|(got, want)| got != want).count();
    assert!(bytes.iter().zip(&want).all(|(&got, &want)| got.abs_diff(want) <= 1));
    assert!(off * 10_000 < want.len(), "{off} of {} bytes differ by one", want.len());
}

#[test]
fn threads_do_not_change_a_bit() {
    let Some(folder) = golden() else { return };
    let Ok(pair) = trefoil_kernels::Kernels::best(&[0, 1]) else {
        eprintln!("skipped: two threads");
        return;
    };
    let decoder = golden_decoder(&folder);
    let latent = Latent::read(&folder.join("vae.io.safetensors"), "f5.z").unwrap();
    assert_eq!(decoder.decode(&kernels(), &latent).unwrap(), decoder.decode(&pair, &latent).unwrap());
}

#[test]
fn memory_is_known_beforehand_and_does_not_grow_with_the_clip() {
    let Some(folder) = golden() else { return };
    let decoder = golden_decoder(&folder);
    let latent = Latent::read(&folder.join("vae.io.safetensors"), "f13.z").unwrap();
    let predicted = decoder.memory(latent.height(), latent.width(), 1).unwrap();
    let mut session = decoder.session(latent.height(), latent.width()).unwrap();
    for frame in 0..latent.frames() {
        session.push(&kernels(), &latent, frame).unwrap();
        let held = session.memory();
        assert!(held.history <= predicted.history);
        // Scratch of the attention and its products comes on top: less than a MiB a thread, whatever the size.
        assert!(held.working <= predicted.working + (1 << 20), "{held:?} {predicted:?}");
    }
    assert_eq!(session.memory().history, predicted.history);
    assert_eq!(session.memory().weights, predicted.weights);
    // The true size, without any weights: the prediction is linear in the pixels, to the border.
    let (one, four) = (decoder.memory(8, 8, 1).unwrap(), decoder.memory(16, 16, 1).unwrap());
    assert!(four.history > 3 * one.history && four.history < 4 * one.history);
}

#[test]
fn sessions_are_independent_and_sizes_are_checked() {
    let Some(folder) = golden() else { return };
    let decoder = golden_decoder(&folder);
    let io = folder.join("vae.io.safetensors");
    let latent = Latent::read(&io, "f9.z").unwrap();
    let alone = decoder.decode(&kernels(), &latent).unwrap();
    let mut sessions = [(); 2].map(|()| decoder.session(4, 6).unwrap());
    let mut frames = [Vec::new(), Vec::new()];
    for frame in 0..3 {
        for (session, frames) in sessions.iter_mut().zip(&mut frames) {
            frames.extend(session.push(&kernels(), &latent, frame).unwrap());
        }
    }
    assert!(frames.iter().all(|frames| *frames == alone));
    let mut session = decoder.session(5, 6).unwrap();
    let message = session.push(&kernels(), &latent, 0).unwrap_err().to_string();
    assert_eq!(message, "latent of 16×3×4×6: this clip has latent frames of 16 channels, 5×6 pixels");
    assert!(sessions[0].push(&kernels(), &latent, 3).unwrap_err().to_string().contains("has no frame 3"));
    assert!(decoder.session(0, 6).is_err() && decoder.session(4, 5000).is_err());
    let message = Latent::read(&io, "f9.latents").unwrap_err().to_string();
    assert!(
        message.contains("there is no such tensor; the file has bucket") || message.contains("e2e.frames"),
        "{message}"
    );
    assert!(Latent::read(&io, "e2e.u8").unwrap_err().to_string().contains("its elements are"));
    let three = Latent::read(&io, "f5.frames").unwrap();
    assert!(three.denormalise(decoder.config()).unwrap_err().to_string().contains("have 16 channels"));
}

#[test]
fn damaged_checkpoints_are_named_by_tensor_and_shape() {
    let Some(folder) = golden() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let source = folder.join("vae.diffusers.safetensors");
    let checkpoint = Checkpoint::open(&source, &[]).unwrap();
    let names: Vec<String> = checkpoint
        .tensors()
        .map(|tensor| tensor.name.clone())
        .filter(|name| name.starts_with("decoder.") || name.starts_with("post_quant"))
        .collect();
    let whole: Vec<_> = names
        .iter()
        .map(|name| {
            let (shape, values) = tensor(&source, name);
            (name.clone(), shape, values)
        })
        .collect();
    let open = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = whole.clone();
        change(&mut tensors);
        let path = scratch.path().join("vae.safetensors");
        write_safetensors(&path, &tensors);
        let checkpoint = Checkpoint::open(&path, &[]).unwrap();
        VaeDecoder::load(&checkpoint, config(&folder), &path).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(open(&|_| ()), Ok(()));
    let name = "decoder.up_blocks.1.resnets.0.conv_shortcut.weight";
    let message = open(&|tensors| tensors.retain(|tensor| tensor.0 != name)).unwrap_err();
    assert_eq!(
        message,
        format!(
            "VAE tensor `{name}` is missing, but the config asks for [32, 16, 1, 1, 1]; is it the VAE of this config?"
        )
    );
    let edit = |name: &'static str, edit: fn(&mut Tensor)| {
        open(&move |tensors| edit(tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap())).unwrap_err()
    };
    let message = edit("decoder.conv_out.weight", |tensor| tensor.1 = vec![8, 3, 3, 3, 3]);
    assert!(message.contains("`decoder.conv_out.weight` is [8, 3, 3, 3, 3], but the config asks for [3, 8, 3, 3, 3]"));
    let message = edit("decoder.norm_out.gamma", |tensor| tensor.2[3] = f32::NAN);
    assert!(message.contains("`decoder.norm_out.gamma` holds NaN at element 3"), "{message}");
    let message = open(&|tensors| tensors.retain(|tensor| tensor.0 == "post_quant_conv.bias")).unwrap_err();
    assert!(message.contains("holds no Wan VAE decoder: neither `decoder.conv_in.weight`"), "{message}");
    // The public sizes with these weights: the first tensor that differs is named.
    let message = VaeDecoder::load(&checkpoint, VaeConfig::default(), &source).unwrap_err().to_string();
    assert!(
        message.contains("`decoder.conv_in.weight` is [32, 16, 3, 3, 3], but the config asks for [384, 16, 3, 3, 3]")
    );
}

#[test]
fn tiles_are_the_references_and_differ_from_the_whole() {
    let Some(folder) = golden() else { return };
    let decoder = golden_decoder(&folder);
    let io = folder.join("vae.io.safetensors");
    let latent = Latent::read(&io, "tile.z").unwrap();
    let layout = TileLayout::new(12, 20, 8, 6).unwrap();
    let tiled = planes(&decoder.decode_tiled(&kernels(), &latent, &layout, &|| true).unwrap(), true);
    let whole = planes(&decoder.decode(&kernels(), &latent).unwrap(), true);
    let clamped = |name: &str| tensor(&io, name).1.into_iter().map(|x| x.clamp(-1.0, 1.0)).collect::<Vec<f32>>();
    let (relative, largest) = errors(&tiled, &clamped("tile.tiled_64_48"));
    println!("tiled: relative RMS {relative:.2e}, largest {largest:.2e}");
    assert!(relative < 2e-5 && largest < 2e-4, "{relative:e} {largest:e}");
    assert!(errors(&whole, &clamped("tile.full")).1 < 2e-4);
    // Random weights make attention matter most: a trained VAE differs far less.
    let (relative, _) = errors(&tiled, &whole);
    println!("tiled against whole: relative RMS {relative:.3}");
    assert!((0.2..0.5).contains(&relative), "{relative}");
    // One tile over everything is no tiling.
    let one = TileLayout::new(12, 20, 20, 15).unwrap();
    assert!(TileLayout::new(12, 20, 24, 12).unwrap().count() == 2 && one.count() == 2);
    let all = TileLayout::new(12, 20, 20, 20).unwrap();
    assert_eq!(planes(&decoder.decode_tiled(&kernels(), &latent, &all, &|| true).unwrap(), true), whole);
    // Memory: the histories are a tile's.
    let need = decoder.tiled_memory(&layout, 2, 1).unwrap();
    assert_eq!(need.history, decoder.memory(8, 8, 1).unwrap().history);
    let stopped = decoder.decode_tiled(&kernels(), &latent, &layout, &|| false).unwrap_err();
    assert_eq!(stopped.to_string(), "decoding was stopped; nothing was written");
    let other = TileLayout::new(12, 21, 8, 6).unwrap();
    assert!(decoder.decode_tiled(&kernels(), &latent, &other, &|| true).is_err());
}

#[test]
fn tiles_of_the_small_trained_model_are_close_to_the_whole() {
    let Some(model) = demo_model() else { return };
    let decoder = VaeDecoder::open(&model).unwrap();
    let latent = Latent::read(&model.join("golden/prompt0.safetensors"), "z_vae").unwrap();
    let layout = TileLayout::new(8, 8, 6, 4).unwrap();
    let tiled = planes(&decoder.decode_tiled(&kernels(), &latent, &layout, &|| true).unwrap(), true);
    let whole = planes(&decoder.decode(&kernels(), &latent).unwrap(), true);
    let (relative, largest) = errors(&tiled, &whole);
    println!("tiled against whole: relative RMS {relative:.3}, largest {largest:.3}");
    assert!((0.01..0.1).contains(&relative), "{relative}");
}

/// The names of Wan's own file for this configuration, by counting through its `Sequential`s.
fn original_names() -> Vec<(String, String)> {
    let mut names = Vec::new();
    let residual = |names: &mut Vec<(String, String)>, diffusers: String, original: String| {
        for (one, other) in [
            ("norm1", "residual.0"),
            ("conv1", "residual.2"),
            ("norm2", "residual.3"),
            ("conv2", "residual.6"),
            ("conv_shortcut", "shortcut"),
        ] {
            names.push((format!("{diffusers}.{one}."), format!("{original}.{other}.")));
        }
    };
    for (one, other) in [
        ("post_quant_conv.", "conv2."),
        ("decoder.conv_in.", "decoder.conv1."),
        ("decoder.norm_out.", "decoder.head.0."),
        ("decoder.conv_out.", "decoder.head.2."),
        ("decoder.mid_block.attentions.0.", "decoder.middle.1."),
    ] {
        names.push((one.to_string(), other.to_string()));
    }
    residual(&mut names, "decoder.mid_block.resnets.0".into(), "decoder.middle.0".into());
    residual(&mut names, "decoder.mid_block.resnets.1".into(), "decoder.middle.2".into());
    let mut number = 0;
    for level in 0..4 {
        for block in 0..3 {
            let diffusers = format!("decoder.up_blocks.{level}.resnets.{block}");
            residual(&mut names, diffusers, format!("decoder.upsamples.{number}"));
            number += 1;
        }
        if level < 3 {
            let diffusers = format!("decoder.up_blocks.{level}.upsamplers.0.");
            names.push((diffusers, format!("decoder.upsamples.{number}.")));
            number += 1;
        }
    }
    names
}

#[test]
fn the_original_names_decode_to_the_same_frames() {
    let Some(folder) = golden() else { return };
    let source = folder.join("vae.diffusers.safetensors");
    let checkpoint = Checkpoint::open(&source, &[]).unwrap();
    let names = original_names();
    let tensors: Vec<_> = checkpoint
        .tensors()
        .filter_map(|entry| {
            let (prefix, original) = names.iter().find(|(prefix, _)| entry.name.starts_with(prefix))?;
            let (shape, values) = tensor(&source, &entry.name);
            Some((entry.name.replace(prefix, original), shape, values))
        })
        .collect();
    assert_eq!(tensors.len(), 108, "decoder and post_quant_conv");
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("wan_vae.safetensors");
    write_safetensors(&path, &tensors);
    let original = VaeDecoder::load(&Checkpoint::open(&path, &[]).unwrap(), config(&folder), &path).unwrap();
    assert_eq!(original.layout(), Layout::Original);
    let latent = Latent::read(&folder.join("vae.io.safetensors"), "f5.z").unwrap();
    let decoded = original.decode(&kernels(), &latent).unwrap();
    assert_eq!(decoded, golden_decoder(&folder).decode(&kernels(), &latent).unwrap());
}

#[test]
fn the_original_file_decodes_to_the_reference_frames() {
    let Some(folder) = golden() else { return };
    let decoder = VaeDecoder::open(&folder.join("vae.wan_orig.decoder_only.bf16.pth")).unwrap();
    assert_eq!(decoder.layout(), Layout::Original);
    let io = folder.join("vae.io.safetensors");
    let latent = Latent::read(&io, "f9.z").unwrap();
    let frames = decoder.decode(&kernels(), &latent).unwrap();
    let (relative, largest) = errors(&planes(&frames, false), &tensor(&io, "f9.raw").1);
    println!("f9 from the original file: relative RMS {relative:.2e}, largest {largest:.2e}");
    assert!(relative < 2e-5 && largest < 2e-4, "{relative:e} {largest:e}");
}
