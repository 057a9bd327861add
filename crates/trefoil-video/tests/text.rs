//! Tokenizer and text encoder against the public implementations, and with damaged files and prompts.

#[path = "common/media.rs"]
mod media;

use media::{demo_model, errors, golden, integers, kernels, tensor, write_safetensors};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use trefoil_video::text::{TextConfig, TextEncoder, TextPath, Tokenizer, clean, pack_text};

fn tokenizer_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tokenizer")
}

#[derive(Deserialize)]
struct Sample {
    text: String,
    clean: String,
    ids: Vec<u32>,
    sentencepiece: bool,
}

#[test]
fn two_hundred_strings_have_the_reference_ids() {
    let tokenizer = Tokenizer::open(&tokenizer_folder(), 1).unwrap();
    let samples: Vec<Sample> =
        serde_json::from_slice(&std::fs::read(tokenizer_folder().join("prompts.json")).unwrap()).unwrap();
    assert_eq!(samples.len(), 200);
    assert_eq!(samples.iter().filter(|sample| sample.sentencepiece).count(), 195);
    for (number, sample) in samples.iter().enumerate() {
        assert_eq!(clean(&sample.text), sample.clean, "{:?}", sample.text);
        let tokenised = tokenizer.encode(&sample.text, 512, number + 1).unwrap();
        assert_eq!(tokenised.ids, sample.ids, "{:?}", sample.text);
        assert_eq!(tokenised.full_length, sample.ids.len());
        assert_eq!(tokenised.unknown, sample.ids.iter().filter(|&&id| id == 3).count());
    }
}

#[test]
fn long_prompts_keep_their_first_tokens_and_the_end_token() {
    let tokenizer = Tokenizer::open(&tokenizer_folder(), 1).unwrap();
    let prompt = "a red ball moves left ".repeat(60);
    let whole = tokenizer.encode(&prompt, 4096, 1).unwrap();
    let cut = tokenizer.encode(&prompt, 64, 1).unwrap();
    assert_eq!((cut.ids.len(), cut.full_length), (64, whole.ids.len()));
    assert!(whole.ids.len() > 64 && cut.ids[..63] == whole.ids[..63] && cut.ids[63] == 1);
}

#[test]
fn prompts_that_say_nothing_or_too_much_are_refused() {
    let tokenizer = Tokenizer::open(&tokenizer_folder(), 1).unwrap();
    let refuse = |prompt: &str| tokenizer.encode(prompt, 512, 7).unwrap_err().to_string();
    for empty in ["", " \n\t", "\u{feff}\u{3000}", "&nbsp;"] {
        assert_eq!(refuse(empty), "prompt 7: it has no text; write what the video should show");
    }
    let message = refuse(&"x".repeat(70_000));
    assert_eq!(message, "prompt 7: 70000 bytes are more than 65536; only about 512 words are used, shorten it");
    // A script that the vocabulary does not have: one unknown token, said and not refused.
    let strange = tokenizer.encode("𐎀𐎁𐎂", 512, 1).unwrap();
    assert!(strange.unknown >= 1, "{strange:?}");
}

#[test]
fn missing_and_foreign_tokenizers_are_one_clear_line() {
    let scratch = tempfile::tempdir().unwrap();
    let open = || Tokenizer::open(scratch.path(), 1).unwrap_err().to_string();
    std::fs::write(scratch.path().join("spiece.model"), [0u8; 16]).unwrap();
    assert!(open().contains("no tokenizer.json in it"), "{}", open());
    std::fs::write(scratch.path().join("tokenizer.json"), "{\"version\": \"1.0\"}").unwrap();
    assert!(open().contains("not a tokenizer.json"), "{}", open());
    std::fs::write(scratch.path().join("tokenizer.json"), [0xffu8; 8]).unwrap();
    assert!(open().contains("not a tokenizer.json"), "{}", open());
    let missing = Tokenizer::open(&scratch.path().join("nowhere"), 1).unwrap_err().to_string();
    assert!(missing.starts_with("tokenizer ") && missing.contains("nowhere"), "{missing}");
}

#[test]
fn position_buckets_are_the_references() {
    let Some(folder) = golden() else { return };
    let path = folder.join("umt5.config.json");
    let config =
        TextConfig::from_json(&serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap(), &path).unwrap();
    let io = folder.join("umt5.io.safetensors");
    for (relative, bucket) in integers(&io, "bucket.rel").into_iter().zip(integers(&io, "bucket.id")) {
        assert_eq!(config.bucket(i64::from(relative)), bucket as usize, "at distance {relative}");
    }
}

fn ids_of(io: &Path, case: &str) -> Vec<u32> {
    let mask = integers(io, &format!("{case}.mask"));
    let ids = integers(io, &format!("{case}.ids"));
    ids.into_iter().zip(mask).filter(|&(_, mask)| mask != 0).map(|(id, _)| id as u32).collect()
}

#[test]
fn states_are_the_references_in_both_layouts() {
    let Some(folder) = golden() else { return };
    let io = folder.join("umt5.io.safetensors");
    let prompts: Vec<Vec<u32>> = ["s", "full", "long"].map(|case| ids_of(&io, case)).to_vec();
    for layout in ["umt5.hf.safetensors", "umt5.wan_orig.safetensors"] {
        let encoder = TextEncoder::open(&folder.join(layout)).unwrap();
        assert_eq!((encoder.config().num_layers, encoder.config().d_kv, encoder.config().text_len), (3, 32, 512));
        let states = encoder.encode(&kernels(), &prompts).unwrap();
        assert_eq!(states.lengths, [7, 64, 301]);
        for (index, case) in ["s", "full", "long"].into_iter().enumerate() {
            let (shape, want) = tensor(&io, &format!("{case}.context"));
            let rows = shape[1] * shape[2];
            let (relative, largest) = errors(&states.prompt(index)[..rows], &want);
            println!("{layout} {case}: relative RMS {relative:.2e}, largest {largest:.2e}");
            assert!(relative < 2e-5 && largest < 2e-4, "{layout} {case}: {relative:e} {largest:e}");
            let length = states.lengths[index];
            assert!(states.prompt(index)[length * 64..].iter().all(|&value| value == 0.0), "rows after the prompt");
        }
    }
}

#[test]
fn prompts_of_one_call_do_not_touch_each_other() {
    let Some(folder) = golden() else { return };
    let encoder = TextEncoder::open(&folder.join("umt5.hf.safetensors")).unwrap();
    let io = folder.join("umt5.io.safetensors");
    let [short, full] = ["s", "full"].map(|case| ids_of(&io, case));
    let together = encoder.encode(&kernels(), &[full.clone(), short.clone()]).unwrap();
    let alone = encoder.encode(&kernels(), &[short]).unwrap();
    assert_eq!(together.prompt(1), alone.prompt(0));
    let Ok(pair) = trefoil_kernels::Kernels::best(&[0, 1]) else { return };
    assert_eq!(encoder.encode(&pair, &[full]).unwrap().prompt(0), together.prompt(0));
    assert_eq!(encoder.encode(&pair, &[]).unwrap().values, Vec::<f32>::new());
}

#[test]
fn the_small_model_encodes_its_prompt() {
    let Some(model) = demo_model() else { return };
    let encoder = TextEncoder::open(&model).unwrap();
    let tokenizer = Tokenizer::open(&model, encoder.config().eos_token_id).unwrap();
    let text_len = encoder.config().text_len;
    assert_eq!(text_len, 32);
    let io = model.join("golden/prompt0.safetensors");
    let tokenised = tokenizer.encode("a red circle moves to the left", text_len, 1).unwrap();
    let padded = integers(&io, "ids");
    let ids: Vec<i32> = tokenised.ids.iter().map(|&id| id as i32).collect();
    assert_eq!(ids, padded[..ids.len()]);
    assert!(padded[ids.len()..].iter().all(|&id| id == 0));
    let states = encoder.encode(&kernels(), &[tokenised.ids]).unwrap();
    let (shape, want) = tensor(&io, "text_embeds");
    assert_eq!(shape, [1, 32, 64]);
    let (relative, largest) = errors(states.prompt(0), &want);
    println!("relative RMS {relative:.2e}, largest {largest:.2e}");
    assert!(largest < 1e-4, "{relative:e} {largest:e}");
}

#[test]
fn damaged_encoders_and_foreign_ids_are_named() {
    let Some(folder) = golden() else { return };
    let source = folder.join("umt5.hf.safetensors");
    let encoder = TextEncoder::open(&source).unwrap();
    let refuse = |prompts: &[Vec<u32>]| encoder.encode(&kernels(), prompts).unwrap_err().to_string();
    assert_eq!(refuse(&[vec![5, 1], vec![]]), "prompt 2: 0 tokens; there must be 1 to 512");
    assert_eq!(
        refuse(&[vec![384, 1]]),
        "prompt 1: token 384 has no embedding (the encoder knows 384); is this its tokenizer?"
    );
    assert!(refuse(&[vec![1; 513]]).contains("513 tokens"));
    let scratch = tempfile::tempdir().unwrap();
    let names: Vec<String> = trefoil_weights::checkpoint::Checkpoint::open(&source, &[])
        .unwrap()
        .tensors()
        .map(|tensor| tensor.name.clone())
        .collect();
    let whole: Vec<_> = names
        .iter()
        .map(|name| {
            let (shape, values) = tensor(&source, name);
            (name.clone(), shape, values)
        })
        .collect();
    let write = |tensors: &[(String, Vec<usize>, Vec<f32>)]| {
        let path = scratch.path().join("t5.safetensors");
        write_safetensors(&path, tensors);
        std::fs::copy(folder.join("umt5.config.json"), scratch.path().join("config.json")).unwrap();
        TextEncoder::open(&path)
    };
    assert!(write(&whole).is_ok());
    let name = "encoder.block.2.layer.1.DenseReluDense.wo.weight";
    let mut tensors = whole.clone();
    tensors.retain(|tensor| tensor.0 != name);
    let message = write(&tensors).unwrap_err().to_string();
    assert_eq!(message, format!("text encoder tensor `{name}` is missing; the checkpoint is not whole"));
    let mut tensors = whole.clone();
    let wrong = tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap();
    wrong.1.reverse();
    let message = write(&tensors).unwrap_err().to_string();
    assert!(message.contains("is [160, 64], but the config asks for [64, 160]"), "{message}");
    let mut tensors = whole.clone();
    tensors.iter_mut().find(|tensor| tensor.0 == "encoder.final_layer_norm.weight").unwrap().2[0] = f32::NAN;
    let damaged = write(&tensors).unwrap();
    let message = damaged.encode(&kernels(), &[vec![5, 1]]).unwrap_err().to_string();
    assert_eq!(message, "prompt 1: the encoder gave NaN; its weights are damaged");
    let message = TextEncoder::open(&folder.join("vae.diffusers.safetensors")).unwrap_err().to_string();
    assert!(message.contains("it is no umT5 encoder"), "{message}");
}

/// Relative RMS of the error, and the cosine.
fn likeness(got: &[f32], want: &[f32]) -> (f64, f64) {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    (errors(got, want).0, dot(got, want) / (dot(got, got) * dot(want, want)).sqrt())
}

#[test]
fn packed_encoders_give_states_like_those_of_f32() {
    let scratch = tempfile::tempdir().unwrap();
    let packed = scratch.path().join("text.trefoil");
    if let Some(folder) = golden() {
        let io = folder.join("umt5.io.safetensors");
        let prompts: Vec<Vec<u32>> = ["s", "full", "long"].map(|case| ids_of(&io, case)).to_vec();
        for layout in ["umt5.hf.safetensors", "umt5.wan_orig.safetensors"] {
            let plain = TextEncoder::open(&folder.join(layout)).unwrap();
            let report = pack_text(&folder.join(layout), &packed, |_| {}).unwrap();
            // Seven matrices of each of three layers.
            assert_eq!((report.regions, report.unmatched.len()), (3, 0), "{report:?}");
            let encoder = TextEncoder::open(&packed).unwrap();
            assert_eq!((encoder.text_path(), encoder.config()), (TextPath::Int8, plain.config()));
            let (got, want) =
                (encoder.encode(&kernels(), &prompts).unwrap(), plain.encode(&kernels(), &prompts).unwrap());
            assert_eq!(got.lengths, want.lengths);
            let (relative, cosine) = likeness(&got.values, &want.values);
            println!("{layout}: relative RMS {relative:.2e}, cosine {cosine:.6}");
            assert!(relative < 2e-2 && cosine > 0.9998, "{layout}: {relative:e} {cosine}");
            // Twice is the same: pages that were given back are read again.
            assert_eq!(encoder.encode(&kernels(), &prompts).unwrap(), got);
            let message = pack_text(&packed, &scratch.path().join("again"), |_| {}).unwrap_err().to_string();
            assert!(message.contains("packed already"), "{message}");
        }
    }
    if let Some(model) = demo_model() {
        let plain = TextEncoder::open(&model).unwrap();
        pack_text(&model, &packed, |_| {}).unwrap();
        let encoder = TextEncoder::open(&packed).unwrap();
        let tokenizer = Tokenizer::open(&model, plain.config().eos_token_id).unwrap();
        let text = "a red circle moves left over a dark background";
        let ids = vec![tokenizer.encode(text, plain.config().text_len, 1).unwrap().ids];
        let (got, want) = (encoder.encode(&kernels(), &ids).unwrap(), plain.encode(&kernels(), &ids).unwrap());
        let (relative, cosine) = likeness(&got.values, &want.values);
        println!("demo model: relative RMS {relative:.2e}, cosine {cosine:.6}");
        assert!(relative < 2e-2 && cosine > 0.9998, "{relative:e} {cosine}");
        let size = |path: &Path| std::fs::metadata(path).unwrap().len();
        assert!(encoder.working_bytes(16) < plain.working_bytes(16) && size(&packed) > 0);
    }
}

#[test]
fn files_that_are_no_packed_encoder_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("x.trefoil");
    std::fs::write(&file, b"not an artefact").unwrap();
    let message = TextEncoder::open(&file).unwrap_err().to_string();
    assert!(message.contains("x.trefoil") && !message.contains('\n'), "{message}");
    let missing = TextEncoder::open(&scratch.path().join("nowhere.trefoil")).unwrap_err().to_string();
    assert!(missing.contains("nowhere.trefoil"), "{missing}");
}
