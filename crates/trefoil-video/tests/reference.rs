//! The unquantised weights of an artefact: found, compared, and told apart; and what is wrong with a LoRA file, by its name.

mod support;

use std::path::{Path, PathBuf};
use support::{Random, SmallModel, config_json, random_tensors, small_config};
use trefoil_video::checkpoint::{CheckpointOptions, WanCheckpoint};
use trefoil_video::pack::{CheckpointNote, note_path};
use trefoil_video::tensors::write_tensors;
use trefoil_video::{Model, Tensor, VideoPackOptions, open_reference, pack_video};

/// A folder with weights and configuration.
fn folder_of(tensors: &[(String, Tensor)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config_json(&small_config(), 0)).unwrap();
    write_tensors(&folder.path().join("model.safetensors"), tensors).unwrap();
    folder
}

#[test]
fn a_checkpoint_that_differs_anywhere_is_not_the_artefacts() {
    let all = random_tensors(&small_config(), 0, 31);
    let folder = folder_of(&all);
    let output = folder.path().join("a.trefoil");
    pack_video(folder.path(), &output, &VideoPackOptions::default(), |_| {}).unwrap();
    let packed = Model::open(&output).unwrap();
    assert!(open_reference(&packed, Some(folder.path())).is_ok());
    for (name, factor, want) in [
        ("blocks.1.ffn.net.0.proj.weight", 0.5, "quantises to other codes"),
        ("blocks.2.attn2.to_out.0.weight", -1.0, "quantises to other codes"),
        ("blocks.0.norm2.weight", 1.001, "has other values"),
        ("blocks.2.ffn.net.2.bias", 1.001, "has other values"),
        ("proj_out.weight", 2.0, "has other values"),
    ] {
        let mut tensors = all.clone();
        let (_, tensor) = tensors.iter_mut().find(|(have, _)| have == name).unwrap_or_else(|| panic!("no {name}"));
        tensor.values.iter_mut().for_each(|value| *value *= factor);
        let other = folder_of(&tensors);
        let error = open_reference(&packed, Some(other.path())).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}` {want}")) && error.contains("was packed from"), "{error}");
    }
}

/// A base model and a LoRA file of one matrix, changed.
fn with_lora(change: impl Fn(&mut Vec<(String, Tensor)>)) -> (tempfile::TempDir, PathBuf) {
    let folder = folder_of(&random_tensors(&small_config(), 0, 32));
    let mut random = Random::new(33);
    let stem = "diffusion_model.blocks.1.self_attn.q";
    let mut lora = vec![
        (format!("{stem}.lora_down.weight"), random.tensor("down", &[4, 64], 0.2)),
        (format!("{stem}.lora_up.weight"), random.tensor("up", &[64, 4], 0.2)),
        (format!("{stem}.alpha"), Tensor::new("alpha", &[1], vec![2.0]).unwrap()),
    ];
    change(&mut lora);
    let file = folder.path().join("style.safetensors");
    write_tensors(&file, &lora).unwrap();
    // Weights and adapter must not lie in one folder, where both would be shards.
    let apart = tempfile::tempdir_in(folder.path()).unwrap().keep();
    std::fs::rename(&file, apart.join("style.safetensors")).unwrap();
    (folder, apart.join("style.safetensors"))
}

fn options(adapters: &[PathBuf]) -> CheckpointOptions {
    CheckpointOptions { adapters: adapters.to_vec(), ..CheckpointOptions::default() }
}

#[test]
fn an_adapter_is_found_for_f32_by_a_note_that_lies_anywhere() {
    let (folder, lora) = with_lora(|_| {});
    let output = folder.path().join("packed/a.trefoil");
    std::fs::create_dir(folder.path().join("packed")).unwrap();
    let base = folder.path().join("model.safetensors");
    let pack = VideoPackOptions { checkpoint: options(std::slice::from_ref(&lora)), ..VideoPackOptions::default() };
    pack_video(&base, &output, &pack, |_| {}).unwrap();
    let open = |given: Option<&Path>| {
        open_reference(&Model::open(&output).unwrap(), given).map(drop).map_err(|error| error.to_string())
    };
    let note = CheckpointNote::beside(&output).unwrap().unwrap();
    assert_eq!(note.adapters, [std::fs::canonicalize(&lora).unwrap()]);
    assert_eq!(open(None), Ok(()));
    assert_eq!(open(Some(&base)), Ok(()), "the note's adapters go with a checkpoint that is named");
    let elsewhere = folder.path().join("mine.checkpoint.json");
    std::fs::rename(note_path(&output), &elsewhere).unwrap();
    assert_eq!(open(Some(&elsewhere)), Ok(()));
    let error = open(Some(&base)).unwrap_err();
    assert!(
        error.contains("model.safetensors: ") && error.contains("\"adapters\": [LORA]") && !error.contains('\n'),
        "{error}"
    );
    assert!(open(None).unwrap_err().contains("--checkpoint"));
}

#[test]
fn what_is_wrong_with_a_lora_file_names_it() {
    let up = |lora: &mut Vec<(String, Tensor)>| drop(lora.remove(1));
    let rank = |lora: &mut Vec<(String, Tensor)>| lora[1].1 = Random::new(1).tensor("up", &[64, 3], 0.2);
    let unknown = |lora: &mut Vec<(String, Tensor)>| lora[0].0 = "diffusion_model.blocks.9.nothing".to_string();
    let alpha = |lora: &mut Vec<(String, Tensor)>| lora[2].1.values[0] = f32::NAN;
    let factor = |lora: &mut Vec<(String, Tensor)>| lora[0].1.values[7] = f32::INFINITY;
    for (change, want) in [
        (&up as &dyn Fn(&mut Vec<(String, Tensor)>), "has no counterpart"),
        (&rank, "which is no low-rank delta of a [64, 64] matrix"),
        (&unknown, "blocks.9.nothing"),
        (&alpha, "holds NaN"),
        (&factor, "holds inf"),
    ] {
        let (folder, lora) = with_lora(change);
        let output = folder.path().join("a.trefoil");
        let pack = VideoPackOptions { checkpoint: options(std::slice::from_ref(&lora)), ..VideoPackOptions::default() };
        let error = pack_video(&folder.path().join("model.safetensors"), &output, &pack, |_| {}).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with(&format!("{}: ", lora.display())) && error.contains(want), "{error}");
        assert!(!error.contains('\n') && !output.exists(), "{error}");
    }
    // What is wrong with the model is still the model's.
    let (folder, lora) = with_lora(|_| {});
    let mut tensors = random_tensors(&small_config(), 0, 32);
    tensors.pop();
    let base = folder_of(&tensors);
    let error = WanCheckpoint::open(base.path(), &options(&[lora])).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: 1 tensor is missing", base.path().display())), "{error}");
    drop(folder);
}

#[test]
fn writing_to_an_artefact_that_is_open_is_noticed() {
    let small = SmallModel::new();
    let output = small.packed();
    let model = Model::open(&output).unwrap();
    model.check_unchanged().unwrap();
    // Another file under its name: the old one stays open.
    let copy = output.with_extension("copy");
    std::fs::copy(&output, &copy).unwrap();
    std::fs::rename(&copy, &output).unwrap();
    model.check_unchanged().unwrap();
    let model = Model::open(&output).unwrap();
    let file = std::fs::File::options().write(true).open(&output).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let error = model.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("it was written to while its weights were in use"), "{error}");
}
