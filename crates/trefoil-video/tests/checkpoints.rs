//! Reading and packing: layouts, shards, types, adapters, and what is wrong with a checkpoint, by name and shape.

mod support;

use std::path::Path;
use std::sync::Arc;
use support::{Random, SmallModel, config_json, errors, kernels, random_tensors, small_config};
use trefoil_video::checkpoint::{CheckpointOptions, Layout, WanCheckpoint};
use trefoil_video::sampler::Solver;
use trefoil_video::tensors::write_tensors;
use trefoil_video::{
    Calibration, CalibrationClip, Clip, Lane, Model, NumericPath, Sampler, Tensor, VideoPackOptions, denoise,
    open_reference, pack_video,
};

/// Tensors of a checkpoint by name.
type Tensors = Vec<(String, Tensor)>;

/// A folder with weights and configuration.
fn folder_of(tensors: &[(String, Tensor)], rank: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config_json(&small_config(), rank)).unwrap();
    write_tensors(&folder.path().join("model.safetensors"), tensors).unwrap();
    folder
}

fn open_checkpoint(path: &Path) -> Result<WanCheckpoint, String> {
    WanCheckpoint::open(path, &CheckpointOptions::default()).map_err(|error| error.to_string())
}

#[test]
fn a_dual_expert_folder_is_packed_with_its_sampler_and_found_again_for_f32() {
    let small = SmallModel::new();
    let output = small.packed();
    let model = Model::open(&output).unwrap();
    let record = model.record();
    let names: Vec<&str> = record.experts.iter().map(|expert| expert.name.as_str()).collect();
    assert_eq!((record.layout, names), (Layout::Dcm, vec!["semantic", "detail"]));
    assert_eq!((record.sampler.steps(), record.sampler.experts.clone()), (4, vec![0, 0, 1, 1]));
    assert!((record.adapter.as_ref().unwrap().default - 2.0).abs() < f32::EPSILON);
    let reference = open_reference(&model, None).unwrap();
    assert_eq!(reference.config(), model.config());
    assert!(model.private_bytes() == 0 && reference.private_bytes() > 100_000);
    for (model, path, want) in [
        (&model, NumericPath::F32, "give the checkpoint it was packed from"),
        (&reference, NumericPath::W8a8, "pack it first"),
    ] {
        let error = model.check_path(path).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    // The same model packed elsewhere has the same bytes: the note beside it is what differs.
    let other = tempfile::tempdir().unwrap();
    let again = other.path().join("again.trefoil");
    pack_video(small.path(), &again, &VideoPackOptions::default(), |_| {}).unwrap();
    assert!(std::fs::read(&again).unwrap() == std::fs::read(&output).unwrap());
    std::fs::remove_file(trefoil_video::pack::note_path(&again)).unwrap();
    let error = open_reference(&Model::open(&again).unwrap(), None).unwrap_err().to_string();
    assert!(error.contains("--checkpoint"), "{error}");
    assert!(open_reference(&Model::open(&again).unwrap(), Some(small.path())).is_ok());
    // Other weights of the same sizes are found out.
    let other = folder_of(&random_tensors(&small_config(), 8, 99), 8);
    let error = open_reference(&Model::open(&again).unwrap(), Some(other.path())).unwrap_err().to_string();
    assert!(error.contains("quantises to other codes"), "{error}");
}

#[test]
fn missing_odd_and_unknown_tensors_are_named_with_shapes() {
    let all = random_tensors(&small_config(), 8, 1);
    let change = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = all.clone();
        change(&mut tensors);
        open_checkpoint(folder_of(&tensors, 8).path()).unwrap_err()
    };
    let find =
        |tensors: &mut Vec<(String, Tensor)>, name: &str| tensors.iter().position(|(other, _)| other == name).unwrap();
    let error = change(&|tensors| {
        let at = find(tensors, "blocks.1.ffn.net.2.weight");
        tensors.remove(at);
    });
    assert!(error.contains("1 tensor is missing: blocks.1.ffn.net.2.weight [64, 96]"), "{error}");
    let error = change(&|tensors| tensors.retain(|(name, _)| !name.starts_with("blocks.2.")));
    assert!(
        error.contains("27 tensors are missing: blocks.2.attn1.norm_k.weight [64]") && error.contains("and 23 more"),
        "{error}"
    );
    let error = change(&|tensors| {
        let at = find(tensors, "patch_embedding.weight");
        tensors[at].1 = Random::new(3).tensor("x", &[64, 8, 1, 2, 2], 1.0);
    });
    assert!(error.contains("patch_embedding.weight is [64, 8, 1, 2, 2] instead of [64, 4, 1, 2, 2]"), "{error}");
    let error =
        change(&|tensors| tensors.push(("img_emb.proj.0.weight".to_string(), Random::new(3).tensor("x", &[5], 1.0))));
    assert!(error.contains("known to no text-to-video Wan transformer: img_emb.proj.0.weight [5]"), "{error}");
    let error = change(&|tensors| {
        let at = find(tensors, "blocks.0.attn1.to_q.lora_A.lora1.weight");
        tensors.remove(at);
    });
    assert!(
        error.contains("blocks.0.attn1.to_q.lora_B.lora1.weight") && error.contains("has no counterpart"),
        "{error}"
    );
    let error = change(&|tensors| {
        let at = find(tensors, "blocks.0.attn1.to_q.lora_A.lora1.weight");
        tensors[at].1 = Random::new(3).tensor("x", &[4, 64], 1.0);
    });
    assert!(error.contains("no low-rank delta of a [64, 64] matrix"), "{error}");
}

#[test]
fn not_a_number_is_named_when_it_is_read() {
    let mut tensors = random_tensors(&small_config(), 0, 1);
    let at = tensors.iter().position(|(name, _)| name == "blocks.1.attn1.to_q.weight").unwrap();
    tensors[at].1.values[70] = f32::NAN;
    let folder = folder_of(&tensors, 0);
    let output = folder.path().join("a.trefoil");
    let error = pack_video(folder.path(), &output, &VideoPackOptions::default(), |_| {}).unwrap_err().to_string();
    assert!(error.contains("blocks.1.attn1.to_q.weight") && error.contains("NaN") && !output.exists(), "{error}");
}

#[test]
fn foreign_inputs_are_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let expect = |path: &Path, want: &str| {
        let error = open_checkpoint(path).unwrap_err();
        assert!(error.contains(want) && !error.contains('\n'), "{error}");
    };
    expect(&folder.path().join("nowhere"), "cannot open");
    expect(folder.path(), "holds no .safetensors file");
    let weights = folder.path().join("model.safetensors");
    write_tensors(&weights, &random_tensors(&small_config(), 0, 1)).unwrap();
    expect(folder.path(), "there is no config.json beside the weights");
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    expect(&weights, "no Wan transformer");
    std::fs::write(folder.path().join("config.json"), config_json(&small_config(), 0)).unwrap();
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    expect(&weights, "not a valid safetensors file");
    // An artefact of `weights pack` is no video model.
    std::fs::write(&weights, &bytes).unwrap();
    let plain = folder.path().join("plain.trefoil");
    trefoil_weights::pack(&weights, &plain, &trefoil_weights::PackOptions::default(), |_| {}).unwrap();
    let error = Model::open(&plain).unwrap_err().to_string();
    assert!(error.contains("trefoil video pack"), "{error}");
    let error = Model::open(&weights).unwrap_err().to_string();
    assert!(error.contains("safetensors checkpoint"), "{error}");
}

#[test]
fn shards_and_types_are_read_alike() {
    let tensors = random_tensors(&small_config(), 0, 4);
    let whole = folder_of(&tensors, 0);
    let sharded = tempfile::tempdir().unwrap();
    std::fs::write(sharded.path().join("config.json"), config_json(&small_config(), 0)).unwrap();
    let mut map = serde_json::Map::new();
    for (number, part) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
        let name = format!("diffusion_pytorch_model-0000{}-of-00003.safetensors", number + 1);
        write_tensors(&sharded.path().join(&name), part).unwrap();
        map.extend(part.iter().map(|(tensor, _)| (tensor.clone(), name.clone().into())));
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    std::fs::write(sharded.path().join("diffusion_pytorch_model.safetensors.index.json"), index.to_string()).unwrap();
    let (whole, sharded) = (open_checkpoint(whole.path()).unwrap(), open_checkpoint(sharded.path()).unwrap());
    for name in whole.names() {
        assert!(whole.values(name).unwrap() == sharded.values(name).unwrap(), "{name}");
    }
    assert_eq!(whole.layout, Layout::Diffusers);
}

/// One step on a path; returns the latent.
fn one_clip(model: &Arc<Model>, path: NumericPath, noise: &Tensor, text: &Tensor) -> Vec<f32> {
    let mut lanes = [Lane::cpu("cpu".to_string(), kernels(), model, path, None).unwrap()];
    let clip = Clip::new(lanes[0].host_mut(), model, noise, text, None).unwrap();
    let mut state = clip.start(noise).unwrap();
    denoise(&mut lanes, &clip, &mut state, 0, &mut |_| Ok(())).unwrap();
    state.latent().to_vec()
}

#[test]
fn an_ordinary_lora_file_acts_as_if_it_were_merged() {
    let config = small_config();
    let base = random_tensors(&config, 0, 5);
    let mut random = Random::new(6);
    // As common tools write them: another prefix, down and up, an alpha of their own, the feed-forward too.
    let (stem, width, ffn, rank) = ("diffusion_model.blocks.1", 64, 96, 4);
    let alpha = 2.0f32;
    let mut lora = Vec::new();
    let mut merged = base.clone();
    for (theirs, ours, out, inputs) in [("self_attn.q", "attn1.to_q", width, width), ("ffn.2", "ffn.net.2", width, ffn)]
    {
        let (down, up) = (random.tensor("down", &[rank, inputs], 0.2), random.tensor("up", &[out, rank], 0.2));
        let (_, weight) = merged.iter_mut().find(|(name, _)| *name == format!("blocks.1.{ours}.weight")).unwrap();
        for (at, value) in weight.values.iter_mut().enumerate() {
            let (row, column) = (at / inputs, at % inputs);
            let delta: f32 = (0..rank).map(|r| up.values[row * rank + r] * down.values[r * inputs + column]).sum();
            *value += alpha / rank as f32 * delta;
        }
        lora.push((format!("{stem}.{theirs}.lora_down.weight"), down));
        lora.push((format!("{stem}.{theirs}.lora_up.weight"), up));
        lora.push((format!("{stem}.{theirs}.alpha"), Tensor::new("alpha", &[1], vec![alpha]).unwrap()));
    }
    let (base_folder, merged_folder) = (folder_of(&base, 0), folder_of(&merged, 0));
    let lora_folder = tempfile::tempdir().unwrap();
    let lora_file = lora_folder.path().join("style.safetensors");
    write_tensors(&lora_file, &lora).unwrap();
    let sampler = |expert| Sampler {
        solver: Solver::Euler,
        sigmas: vec![1.0, 0.5, 0.0],
        timesteps: vec![1000.0, 500.0],
        experts: vec![expert; 2],
        guidance: 1.0,
    };
    let options = CheckpointOptions { adapters: vec![lora_file], ..CheckpointOptions::default() };
    let opened = WanCheckpoint::open(&base_folder.path().join("model.safetensors"), &options).unwrap();
    assert!((opened.adapter.as_ref().unwrap().of("blocks.1.ffn.net.2") - 0.5).abs() < 1e-6);
    let with_lora = Arc::new(Model::from_checkpoint(&opened, Some(sampler(1))).unwrap());
    let plain =
        Arc::new(Model::from_checkpoint(&open_checkpoint(merged_folder.path()).unwrap(), Some(sampler(0))).unwrap());
    let (noise, text) = (random.tensor("noise", &[4, 1, 4, 4], 1.0), random.tensor("text", &[8, 24], 1.0));
    let [a, b] = [&with_lora, &plain].map(|model| one_clip(model, NumericPath::F32, &noise, &text));
    let (relative, _) = errors(&a, &b);
    assert!(relative < 2e-6, "{relative:e}");
    // Packed, the same model is near it.
    let output = base_folder.path().join("a.trefoil");
    let pack = VideoPackOptions { checkpoint: options, sampler: Some(sampler(1)), ..VideoPackOptions::default() };
    pack_video(&base_folder.path().join("model.safetensors"), &output, &pack, |_| {}).unwrap();
    let packed = Arc::new(Model::open(&output).unwrap());
    assert_eq!(packed.record().experts[1].name, "adapter");
    let (relative, _) = errors(&one_clip(&packed, NumericPath::W8a16, &noise, &text), &b);
    assert!(relative < 3e-2, "{relative:e}");
}

#[test]
fn calibration_belongs_to_its_model_and_schedule() {
    let small = SmallModel::new();
    let output = small.packed();
    let model = Arc::new(Model::open(&output).unwrap());
    let clip = CalibrationClip { noise: &small.noise, text: &small.text, negative: None };
    let calibration = Calibration::observe(&model, &kernels(), &[clip, clip], &mut |_, _| Ok(())).unwrap();
    calibration.store(model.artefact().unwrap(), &output).unwrap();
    // Again, over the first.
    let model = Arc::new(Model::open(&output).unwrap());
    calibration.store(model.artefact().unwrap(), &output).unwrap();
    let model = Model::open(&output).unwrap();
    let found = Calibration::of(&model).unwrap().unwrap();
    assert_eq!(found, calibration);
    assert_eq!((found.record().clips.len(), found.record().path), (2, NumericPath::W8a16));
    model.artefact().unwrap().verify().unwrap();
    let mut other = model.sampler().clone();
    other.timesteps[1] = 850.0;
    let model = model.with_sampler(other).unwrap();
    let error = found.check(&model).unwrap_err().to_string();
    assert!(error.contains("1000") && error.contains("850") && error.contains("calibrate again"), "{error}");
    let model = Arc::new(Model::open(&output).unwrap());
    let error = Calibration::observe(&model, &kernels(), &[], &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(error.contains("no clip"), "{error}");
}

#[test]
fn inputs_that_do_not_fit_say_what_would() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let mut lane = Lane::cpu("cpu".to_string(), kernels(), &model, NumericPath::W8a16, None).unwrap();
    let mut random = Random::new(7);
    for (noise, text, want) in [
        (vec![1, 5, 2, 4, 4], vec![8, 24], "channels"),
        (vec![1, 4, 2, 3, 4], vec![8, 24], "must be even"),
        (vec![4, 4], vec![8, 24], "is no latent"),
        (vec![4, 1, 2, 2], vec![8, 25], "they must be [1, rows, 24]"),
        (vec![4, 0, 2, 2], vec![8, 24], "is no latent"),
    ] {
        let (noise, text) = (random.tensor("noise", &noise, 1.0), random.tensor("text", &text, 1.0));
        let error = Clip::new(lane.host_mut(), &model, &noise, &text, None).unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
    let too_many = Sampler { experts: vec![0, 0, 0, 2], ..model.sampler().clone() };
    let error = Model::open(&small.packed()).unwrap().with_sampler(too_many).unwrap_err().to_string();
    assert!(error.contains("expert 2 but the model has 2"), "{error}");
    let error =
        Lane::cpu("cpu".to_string(), kernels(), &model, NumericPath::W8a8, None).map(drop).unwrap_err().to_string();
    assert!(error.contains("trefoil video calibrate"), "{error}");
}

#[test]
fn two_whole_models_are_experts_of_one() {
    let config = small_config();
    let (high, low) = (random_tensors(&config, 0, 11), random_tensors(&config, 0, 12));
    let folders = [folder_of(&high, 0), folder_of(&low, 0)];
    let sampler = |experts: Vec<usize>| Sampler {
        solver: Solver::Euler,
        sigmas: vec![1.0, 0.6, 0.0],
        timesteps: vec![1000.0, 600.0],
        experts,
        guidance: 1.0,
    };
    let packed = folders.each_ref().map(|folder| {
        let output = folder.path().join("a.trefoil");
        let options = VideoPackOptions { sampler: Some(sampler(vec![0, 0])), ..VideoPackOptions::default() };
        pack_video(folder.path(), &output, &options, |_| {}).unwrap();
        output
    });
    let open = || packed.each_ref().map(|path| Model::open(path).unwrap());
    let [first, second] = open();
    let joined = Arc::new(first.joined(second, sampler(vec![0, 1])).unwrap());
    assert_eq!((joined.record().experts.len(), joined.artefacts().count()), (2, 2));
    let mut random = Random::new(13);
    let (noise, text) = (random.tensor("noise", &[4, 1, 4, 4], 1.0), random.tensor("text", &[8, 24], 1.0));
    // The oracle: the first model's first step, then the second model's second step from there.
    let [first, second] = open().map(Arc::new);
    let mut lanes = [&first, &second]
        .map(|model| Lane::cpu("cpu".to_string(), kernels(), model, NumericPath::W8a16, None).unwrap());
    let clips = [0, 1].map(|number| {
        let model = Arc::clone(lanes[number].model());
        Clip::new(lanes[number].host_mut(), &model, &noise, &text, None).unwrap()
    });
    let mut state = clips[0].start(&noise).unwrap();
    lanes[0].run(&clips[0], &mut state, config.layers, &mut |_| Ok(())).unwrap();
    let mut state = trefoil_video::ClipState::resume(&clips[1], config.layers, state.hidden(), state.latent()).unwrap();
    lanes[1].run(&clips[1], &mut state, 2 * config.layers, &mut |_| Ok(())).unwrap();
    let want = state.latent().to_vec();
    assert!(one_clip(&joined, NumericPath::W8a16, &noise, &text) == want);
    // Calibrated together, stored apart, found together.
    let clip = CalibrationClip { noise: &noise, text: &text, negative: None };
    let calibration = Calibration::observe(&joined, &kernels(), &[clip], &mut |_, _| Ok(())).unwrap();
    for (base, artefact) in joined.artefacts().enumerate() {
        calibration.of_base(&joined, base).store(artefact, artefact.path()).unwrap();
    }
    let [first, second] = open();
    let joined = first.joined(second, sampler(vec![0, 1])).unwrap();
    assert_eq!(Calibration::of(&joined).unwrap().unwrap(), calibration);
    // Other sizes are no expert of this model.
    let mut wider = config.clone();
    wider.ffn = 128;
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config_json(&wider, 0)).unwrap();
    write_tensors(&folder.path().join("model.safetensors"), &random_tensors(&wider, 0, 14)).unwrap();
    let wider = Model::from_checkpoint(&open_checkpoint(folder.path()).unwrap(), Some(sampler(vec![0, 0]))).unwrap();
    let error = joined.joined(wider, sampler(vec![0, 2])).unwrap_err().to_string();
    assert!(error.contains("no experts of one model"), "{error}");
}
