//! `trefoil video encode` and `decode`, end to end, on small models written here: nothing needs to be installed.

mod common;

use common::{Workspace, json, stderr, stdout};
use std::fs;
use std::path::{Path, PathBuf};

/// Name, shape and values of a tensor.
type Tensor = (String, Vec<usize>, Vec<f32>);

/// Pseudo-random values, different by name.
fn values(name: &str, count: usize, scale: f32) -> Vec<f32> {
    let mut state =
        name.bytes().fold(2_166_136_261u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(16_777_619)) | 1;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / 8_388_608.0 - 1.0) * scale
        })
        .collect()
}

fn tensor(name: impl Into<String>, shape: &[usize], scale: f32) -> Tensor {
    let name = name.into();
    let values = values(&name, shape.iter().product(), scale);
    (name, shape.to_vec(), values)
}

fn ones(name: impl Into<String>, shape: &[usize]) -> Tensor {
    (name.into(), shape.to_vec(), vec![1.0; shape.iter().product()])
}

/// Writes f32 tensors, or `dtype` tensors whose bytes the values already are.
fn write_safetensors(path: &Path, tensors: &[Tensor], notes: serde_json::Value) {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), notes);
    let mut data: Vec<u8> = Vec::new();
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    fs::write(path, file).unwrap();
}

/// Tensor `key` of a file: shape and values.
fn read_tensor(path: &Path, key: &str) -> (Vec<u64>, Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let entry = &header[key];
    let at = |index: usize| entry["data_offsets"][index].as_u64().unwrap() as usize + 8 + length;
    let shape = entry["shape"].as_array().unwrap().iter().map(|side| side.as_u64().unwrap()).collect();
    let values = bytes[at(0)..at(1)].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    (shape, values)
}

/// A VAE decoder of two levels (twice the size, twice the rate) with 32 and 16 channels and 4 latent channels.
fn write_vae(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let config = serde_json::json!({
        "_class_name": "AutoencoderKLWan", "base_dim": 16, "dim_mult": [1, 2], "num_res_blocks": 0,
        "temperal_downsample": [true], "z_dim": 4, "latents_mean": [0.0, 0.1, -0.1, 0.0], "latents_std": [1.0, 2.0, 1.0, 0.5],
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut tensors = Vec::new();
    let mut conv = |stem: &str, shape: &[usize]| {
        let fan: usize = shape[1..].iter().product();
        tensors.push(tensor(format!("{stem}.weight"), shape, 1.5 / (fan as f32).sqrt()));
        tensors.push(tensor(format!("{stem}.bias"), &shape[..1], 0.1));
    };
    conv("post_quant_conv", &[4, 4, 1, 1, 1]);
    conv("decoder.conv_in", &[32, 4, 3, 3, 3]);
    for (stem, inputs, outputs) in [
        ("decoder.mid_block.resnets.0", 32, 32),
        ("decoder.mid_block.resnets.1", 32, 32),
        ("decoder.up_blocks.0.resnets.0", 32, 32),
        ("decoder.up_blocks.1.resnets.0", 16, 16),
    ] {
        conv(&format!("{stem}.conv1"), &[outputs, inputs, 3, 3, 3]);
        conv(&format!("{stem}.conv2"), &[outputs, outputs, 3, 3, 3]);
    }
    conv("decoder.mid_block.attentions.0.to_qkv", &[96, 32, 1, 1]);
    conv("decoder.mid_block.attentions.0.proj", &[32, 32, 1, 1]);
    conv("decoder.up_blocks.0.upsamplers.0.time_conv", &[64, 32, 3, 1, 1]);
    conv("decoder.up_blocks.0.upsamplers.0.resample.1", &[16, 32, 3, 3]);
    conv("decoder.conv_out", &[3, 16, 3, 3, 3]);
    for (stem, channels) in [
        ("decoder.mid_block.resnets.0", 32),
        ("decoder.mid_block.resnets.1", 32),
        ("decoder.up_blocks.0.resnets.0", 32),
        ("decoder.up_blocks.1.resnets.0", 16),
    ] {
        tensors.push(ones(format!("{stem}.norm1.gamma"), &[channels, 1, 1, 1]));
        tensors.push(ones(format!("{stem}.norm2.gamma"), &[channels, 1, 1, 1]));
    }
    tensors.push(ones("decoder.mid_block.attentions.0.norm.gamma", &[32, 1, 1]));
    tensors.push(ones("decoder.norm_out.gamma", &[16, 1, 1, 1]));
    write_safetensors(&folder.join("diffusion_pytorch_model.safetensors"), &tensors, serde_json::json!({}));
}

/// A text encoder of one layer for the tokenizer of the tests.
fn write_text_encoder(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    let config = serde_json::json!({
        "model_type": "umt5", "vocab_size": 1800, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2,
        "text_len": 24,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let layer = "encoder.block.0.layer";
    let mut tensors = vec![tensor("shared.weight", &[1800, 32], 1.0), ones("encoder.final_layer_norm.weight", &[32])];
    for name in ["q", "k", "v", "o"] {
        tensors.push(tensor(format!("{layer}.0.SelfAttention.{name}.weight"), &[32, 32], 0.2));
    }
    tensors.push(tensor(format!("{layer}.0.SelfAttention.relative_attention_bias.weight"), &[32, 2], 0.5));
    tensors.push(tensor(format!("{layer}.1.DenseReluDense.wi_0.weight"), &[48, 32], 0.2));
    tensors.push(tensor(format!("{layer}.1.DenseReluDense.wi_1.weight"), &[48, 32], 0.2));
    tensors.push(tensor(format!("{layer}.1.DenseReluDense.wo.weight"), &[32, 48], 0.2));
    tensors.push(ones(format!("{layer}.0.layer_norm.weight"), &[32]));
    tensors.push(ones(format!("{layer}.1.layer_norm.weight"), &[32]));
    write_safetensors(&folder.join("model.safetensors"), &tensors, serde_json::json!({}));
}

/// A folder with a whole model and a latent of three frames.
fn space() -> Workspace {
    let space = Workspace::new();
    write_vae(&space.path("model/vae"));
    write_text_encoder(&space.path("model/text_encoder"));
    fs::create_dir(space.path("model/tokenizer")).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../trefoil-video/testdata/tokenizer/tokenizer.json");
    fs::copy(tokenizer, space.path("model/tokenizer/tokenizer.json")).unwrap();
    let latent = tensor("latent", &[1, 4, 3, 8, 12], 1.0);
    let notes = serde_json::json!({ "prompt": "a red ball", "seed": "40", "numeric_path": "w8a8" });
    write_safetensors(&space.path("l.safetensors"), &[latent], notes);
    space
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const LATENT: &str = "l.safetensors:latent";

#[test]
fn a_latent_becomes_a_clip_in_every_format() {
    let space = space();
    let decode = |output: &str| {
        space.output([
            "video",
            "decode",
            "model",
            "--latent",
            LATENT,
            "-o",
            output,
            "--json",
            "--contact-sheet",
            "sheet.png",
        ])
    };
    for output in ["clip.png", "clip.webp", "clip.gif", "clip.mp4", "frames.safetensors", "frames/"] {
        let result = json(&decode(output));
        assert_eq!(
            (result["frames"].as_u64(), result["height"].as_u64(), result["width"].as_u64()),
            (Some(5), Some(16), Some(24))
        );
        assert!(
            result["memory"]["total"].as_u64().unwrap() > 0
                && result["seconds_per_latent_frame"].as_f64().unwrap() > 0.0
        );
        assert_eq!(result["metadata"]["prompt"], "a red ball", "noted in the latent's file");
        assert_eq!(result["metadata"]["seed"], 40);
        assert_eq!(result["metadata"]["numeric_path"], "w8a8, decoder f32");
        assert!(space.path(output).exists() && space.path("sheet.png").exists());
    }
    let (shape, frames) = read_tensor(&space.path("frames.safetensors"), "frames");
    assert_eq!(shape, [1, 3, 5, 16, 24]);
    assert!(frames.iter().all(|value| (-1.0..=1.0).contains(value)) && frames.iter().any(|value| value.abs() > 0.01));
    assert_eq!(names(&space.path("frames")).len(), 6);
    // The same latent, cores or not: the same bytes.
    let before = fs::read(space.path("frames.safetensors")).unwrap();
    space.run(["video", "decode", "model/vae", "--latent", LATENT, "-o", "frames.safetensors", "--cores", "0"]);
    let (_, again) = read_tensor(&space.path("frames.safetensors"), "frames");
    assert_eq!(again, frames);
    assert_eq!(fs::read(space.path("frames.safetensors")).unwrap(), before);
    // Tiles: less history, almost the same size of picture.
    let tiled = json(&space.output([
        "video",
        "decode",
        "model",
        "--latent",
        LATENT,
        "-o",
        "tiled.safetensors",
        "--tile",
        "8",
        "--tile-stride",
        "6",
        "--json",
    ]));
    assert_eq!(tiled["metadata"]["numeric_path"], "w8a8, decoder f32, tiles 8 every 6");
    assert_eq!(read_tensor(&space.path("tiled.safetensors"), "frames").0, [1, 3, 5, 16, 24]);
    // What a person reads.
    let output = space.output(["video", "decode", "model", "--latent", LATENT, "-o", "clip.png", "--prompt", "mine"]);
    let text = stdout(&output);
    assert!(text.contains("latent 4×3×8×12 → 5 frames of 24×16 at 16 fps\nmemory: "), "{text}");
    assert!(text.contains("wrote clip.png"), "{text}");
    let bytes = fs::read(space.path("clip.png")).unwrap();
    assert!(bytes.windows(14).any(|window| window == b"\"prompt\":\"mine"));
}

/// Whether an OpenCL device can run the decoder here.
fn has_opencl() -> bool {
    use trefoil_kernels::opencl::{Device, OpenClError};
    match Device::list() {
        Ok(devices) if devices.iter().any(|device| device.unfit.is_none()) => true,
        Ok(_) | Err(OpenClError::Library | OpenClError::NoDevice) => {
            let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
            let required = is_set("TREFOIL_REQUIRE_BACKENDS") && !is_set("TREFOIL_TEST_WITHOUT_OPENCL");
            assert!(!required, "no OpenCL device");
            eprintln!("skipped: no OpenCL device");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn either_engine_decodes_a_latent() {
    let space = space();
    let decode = |engine: &str, more: &[&str]| {
        let fixed = ["video", "decode", "model", "--latent", LATENT, "-o", "f.safetensors", "--json", "--engine"];
        let told = json(&space.output(fixed.iter().chain(&[engine]).chain(more)));
        (told, read_tensor(&space.path("f.safetensors"), "frames").1)
    };
    let (told, on_cpu) = decode("cpu@0", &[]);
    assert_eq!((told["engine"].as_str(), told["threads"].as_u64()), (Some("cpu@0"), Some(1)));
    let fails = |more: &[&str], want: &str| {
        let fixed = ["video", "decode", "model", "--latent", LATENT, "-o", "none.safetensors"];
        let message = space.fails(fixed.iter().chain(more), 2);
        assert!(message.contains(want), "{message}");
    };
    fails(&["--engine", "gpu"], "unknown kind");
    fails(&["--engine", "cpu@4000"], "core 4000 is not among");
    fails(&["--engine", "cpu@0", "--cores", "0"], "cannot be used with");
    if !has_opencl() {
        return;
    }
    let (coded, on_device) =
        (decode("cpu@0", &["--vae-path", "int8"]).1, decode("opencl@0", &["--vae-path", "int8"]).1);
    let off: f32 = coded.iter().zip(&on_device).map(|(a, b)| (a - b) * (a - b)).sum();
    let all: f32 = coded.iter().map(|a| a * a).sum();
    assert!((off / all).sqrt() < 1e-2, "{}", (off / all).sqrt());
    for more in [&[][..], &["--tile", "6", "--tile-stride", "4"]] {
        let (told, on_device) = decode("opencl@0", more);
        assert!(told["kernels"].as_str().unwrap().starts_with("OpenCL"), "{told:#}");
        assert!(told["notes"][0].as_str().unwrap().contains("opencl@0 is"), "{told:#}");
        let (_, want) = decode("cpu@0", more);
        let off = on_device.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0f32, f32::max);
        assert!(off < 1e-4 && on_device.len() == on_cpu.len(), "{off:e}");
    }
    fails(&["--engine", "opencl:no such"], "there is no OpenCL device `no such`");
}

#[test]
fn a_packed_text_encoder_gives_almost_the_same_states() {
    let space = space();
    fs::write(space.path("p.txt"), "a ball\n").unwrap();
    let encode = |path: &str| {
        let fixed = ["video", "encode", "model", "p.txt", "-o", "t.safetensors", "--json", "--cache", "cache"];
        let told = json(&space.output(fixed.iter().chain(&["--text-path", path])));
        assert_eq!(told["text_path"], path);
        read_tensor(&space.path("t.safetensors"), "text_embeds").1
    };
    let (exact, packed) = (encode("f32"), encode("int8"));
    let files = names(&space.path("cache/video"));
    assert!(files.len() == 1 && files[0].ends_with(".text.trefoil"), "{files:?}");
    let off: f32 = exact.iter().zip(&packed).map(|(a, b)| (a - b) * (a - b)).sum();
    let all: f32 = exact.iter().map(|a| a * a).sum();
    assert!(off > 0.0 && (off / all).sqrt() < 0.03, "{}", (off / all).sqrt());
    assert_eq!(encode("int8"), packed, "from the cache");
    // The packed file can be named, where the tokenizer is said.
    let file = format!("cache/video/{}", files[0]);
    let named = ["video", "encode", &file, "p.txt", "-o", "t.safetensors", "--tokenizer", "model"];
    assert!(space.fails(named, 2).contains("packed in int8; give --text-path int8"));
    space.run(named.iter().chain(&["--text-path", "int8"]));
    assert_eq!(read_tensor(&space.path("t.safetensors"), "text_embeds").1, packed);
}

#[test]
fn prompts_become_text_states() {
    let space = space();
    fs::write(space.path("prompts.txt"), "a red ball moves left\n\n  ein Hund läuft — 犬が走る \n").unwrap();
    let result = json(&space.output(["video", "encode", "model", "prompts.txt", "-o", "t.safetensors", "--json"]));
    assert_eq!(result["keys"], serde_json::json!(["text_embeds.0", "text_embeds.1"]));
    assert_eq!(result["shape"], serde_json::json!([1, 24, 32]));
    let lengths: Vec<usize> =
        result["lengths"].as_array().unwrap().iter().map(|length| length.as_u64().unwrap() as usize).collect();
    for (index, length) in lengths.iter().enumerate() {
        let (shape, states) = read_tensor(&space.path("t.safetensors"), &format!("text_embeds.{index}"));
        assert_eq!(shape, [1, 24, 32]);
        assert!(states[length * 32..].iter().all(|&value| value == 0.0));
        assert!(states[..length * 32].iter().any(|&value| value != 0.0));
    }
    // Ids give the same states as the prompt they are of.
    let ids: Vec<i64> = result["ids"][0].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect();
    let mut padded = ids.clone();
    padded.resize(24, 0);
    let header =
        serde_json::json!({ "ids": { "dtype": "I64", "shape": [24], "data_offsets": [0, 24 * 8] } }).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.bytes());
    file.extend(padded.iter().flat_map(|id| id.to_le_bytes()));
    fs::write(space.path("ids.safetensors"), file).unwrap();
    space.run(["video", "encode", "model", "--ids", "ids.safetensors:ids", "-o", "i.safetensors"]);
    let (_, of_ids) = read_tensor(&space.path("i.safetensors"), "text_embeds");
    assert_eq!(of_ids, read_tensor(&space.path("t.safetensors"), "text_embeds.0").1);
    // A prompt that is cut says so.
    fs::write(space.path("long.txt"), "a red ball moves left and ".repeat(20)).unwrap();
    let output = space.output(["video", "encode", "model", "long.txt", "-o", "t.safetensors"]);
    assert!(stderr(&output).contains("note: prompt 1: "), "{}", stderr(&output));
    assert!(stdout(&output).contains("1 prompt(s), 24 tokens"), "{}", stdout(&output));
}

#[test]
fn bad_input_is_one_clear_line_and_leaves_nothing() {
    let space = space();
    let fails = |arguments: &[&str]| space.fails([&["video"][..], arguments].concat(), 2);
    let encode = |prompts: &[u8]| {
        fs::write(space.path("p.txt"), prompts).unwrap();
        fails(&["encode", "model", "p.txt", "-o", "t.safetensors"])
    };
    assert!(encode(b"").contains("p.txt holds no prompt"));
    assert!(encode(b"\n \n").contains("holds no prompt"));
    assert!(encode(b"fine\n\xff\xfe").contains("line 2 is not UTF-8"));
    assert!(encode("&nbsp;".as_bytes()).contains("prompt 1: it has no text"));
    assert!(encode("x".repeat(100_000).as_bytes()).contains("prompt 1: 100000 bytes are more than 65536"));
    assert!(fails(&["encode", "model", "none.txt", "-o", "t.safetensors"]).contains("cannot read none.txt"));
    assert!(fails(&["encode", "nowhere", "p.txt", "-o", "t.safetensors"]).contains("cannot read nowhere"));
    fs::write(space.path("p.txt"), "a ball").unwrap();
    assert!(fails(&["encode", "model/vae", "p.txt", "-o", "t.safetensors"]).contains("it is no umT5 encoder"));
    let rename = |from: &str, to: &str| fs::rename(space.path(from), space.path(to)).unwrap();
    rename("model/tokenizer/tokenizer.json", "tokenizer.json");
    assert!(fails(&["encode", "model", "p.txt", "-o", "t.safetensors"]).contains("no tokenizer.json in it"));
    space.run(["video", "encode", "model", "p.txt", "-o", "t.safetensors", "--tokenizer", "tokenizer.json"]);
    fs::remove_file(space.path("t.safetensors")).unwrap();
    let message = fails(&["encode", "model", "--ids", "l.safetensors:latent", "-o", "t.safetensors"]);
    assert!(message.contains("token ids are i32 or i64"), "{message}");

    let decode = |rest: &[&str]| fails(&[&["decode", "model"][..], rest].concat());
    assert!(
        decode(&["--latent", "l.safetensors:z", "-o", "c.png"])
            .contains("there is no such tensor; the file has latent")
    );
    assert!(decode(&["--latent", LATENT, "-o", "c.avi"]).contains("clips are not written as .avi"));
    assert!(decode(&["--latent", LATENT, "-o", "no/where/c.png"]).contains("cannot write"));
    assert!(decode(&["--latent", LATENT, "-o", "l.safetensors"]).contains("would be overwritten"));
    assert!(
        decode(&["--latent", LATENT, "-o", "c.png", "--tile", "8", "--tile-stride", "2"])
            .contains("may overlap by at most")
    );
    assert!(decode(&["--latent", LATENT, "-o", "c.png", "--fps", "0"]).contains("0 frames a second"));
    let wide = tensor("latent", &[16, 1, 4, 4], 1.0);
    write_safetensors(&space.path("wide.safetensors"), &[wide], serde_json::json!({}));
    assert!(
        decode(&["--latent", "wide.safetensors:latent", "-o", "c.png"]).contains("this VAE's latents have 4 channels")
    );
    let mut broken = tensor("latent", &[4, 1, 4, 4], 1.0);
    broken.2[7] = f32::NAN;
    write_safetensors(&space.path("nan.safetensors"), &[broken], serde_json::json!({}));
    assert!(decode(&["--latent", "nan.safetensors:latent", "-o", "c.png"]).contains("it holds NaN at element 7"));
    // A VAE that is another model's, and one that is damaged.
    let message = fails(&["decode", "model/text_encoder", "--latent", LATENT, "-o", "c.png"]);
    assert!(message.contains("holds no Wan VAE decoder") || message.contains("VAE"), "{message}");
    let weights = space.path("model/vae/diffusion_pytorch_model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    assert!(decode(&["--latent", LATENT, "-o", "c.png"]).contains("not a valid safetensors file"));
    let config = space.path("model/vae/config.json");
    let text = fs::read_to_string(&config).unwrap().replace("[1,2]", "[1,4]");
    fs::write(&weights, &bytes).unwrap();
    fs::write(&config, text).unwrap();
    assert!(decode(&["--latent", LATENT, "-o", "c.png"]).contains("is it the VAE of this config?"));
    let left = names(&space.path(""));
    assert!(
        !left.iter().any(|name| name.starts_with('.') || name.starts_with("c.") || name.starts_with("t.")),
        "{left:?}"
    );
}

#[test]
fn damage_in_the_frames_is_a_warning() {
    let space = space();
    // Weights of the last convolution a thousand times too large: everything is black or white.
    let weights = space.path("model/vae/diffusion_pytorch_model.safetensors");
    let mut tensors = Vec::new();
    let bytes = fs::read(&weights).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    for name in header.as_object().unwrap().keys().filter(|name| *name != "__metadata__") {
        let (shape, mut values) = read_tensor(&weights, name);
        if name == "decoder.conv_out.weight" {
            for value in &mut values {
                *value *= 1000.0;
            }
        }
        tensors.push((name.clone(), shape.iter().map(|&side| side as usize).collect(), values));
    }
    write_safetensors(&weights, &tensors, serde_json::json!({}));
    let output = space.output(["video", "decode", "model", "--latent", LATENT, "-o", "clip.png"]);
    assert!(
        stderr(&output).contains("warning: ") && stderr(&output).contains("beyond black or white"),
        "{}",
        stderr(&output)
    );
}

/// The small trained model beside the repository.
fn demo_model() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/demo-model");
    if folder.join("model_index.json").exists() {
        return fs::canonicalize(folder).ok();
    }
    eprintln!("skipped: no demo model beside the repository");
    None
}

#[test]
fn the_small_trained_model_gives_its_own_text_states_and_frames() {
    let Some(model) = demo_model() else { return };
    let space = Workspace::new();
    let golden = model.join("golden/prompt0.safetensors");
    let model = model.to_str().unwrap();
    fs::write(space.path("p.txt"), "a red circle moves to the left").unwrap();
    space.run(["video", "encode", model, "p.txt", "-o", "t.safetensors"]);
    let close = |file: &str, key: &str, golden_key: &str| {
        let (shape, got) = read_tensor(&space.path(file), key);
        let (want_shape, want) = read_tensor(&golden, golden_key);
        assert_eq!(shape, want_shape);
        let largest = got.iter().zip(&want).map(|(got, want)| (got - want).abs()).fold(0f32, f32::max);
        assert!(largest < 1e-4, "{key}: {largest}");
    };
    close("t.safetensors", "text_embeds", "text_embeds");
    let latent = format!("{}:latent.5", golden.display());
    space.run(["video", "decode", model, "--latent", &latent, "-o", "f.safetensors"]);
    close("f.safetensors", "frames", "frames");
}
