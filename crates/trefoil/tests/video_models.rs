//! Model folders that change between two commands, say odd things of themselves, or were packed elsewhere.

mod common;

use common::{Workspace, json, stderr};
use std::fs;
use std::path::{Path, PathBuf};

const PROMPT: &str = "a red circle moves left over a dark background";
/// Two latent frames of 4×4: milliseconds a clip.
const SMALL: [&str; 4] = ["--size", "32x32", "--frames", "5"];
const SIX: &str = r#"{"sigmas":[1.0,0.96,0.9,0.8,0.62,0.36,0.0],"switch_timestep":800}"#;
const TWO: &str = r#"{"sigmas":[1.0,0.5,0.0],"experts":[0,1]}"#;

fn model() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/demo-model")
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let place = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &place);
        } else {
            fs::copy(entry.path(), place).unwrap();
        }
    }
}

/// A workspace with a copy of the model in `M`, whose sampler is `sampler`.
fn with_sampler(sampler: &str) -> Workspace {
    let space = Workspace::new();
    copy_folder(&model(), &space.path("M"));
    fs::write(space.path("M/scheduler/sampler.json"), sampler).unwrap();
    fs::write(space.path("one.txt"), format!("{PROMPT}\n")).unwrap();
    space
}

fn generate(space: &Workspace, output: &str, more: &[&str]) -> serde_json::Value {
    let fixed = ["video", "generate", "M", PROMPT, "-o", output, "--engines", "cpu@0", "--json"];
    json(&space.output(fixed.iter().chain(&SMALL).chain(more)))
}

fn packed(space: &Workspace) -> Vec<PathBuf> {
    let files = fs::read_dir(space.path("cache/video")).unwrap().flatten().map(|entry| entry.path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "trefoil")).collect()
}

#[test]
fn another_sampler_in_the_folder_is_another_packed_model() {
    let space = with_sampler(SIX);
    assert_eq!(generate(&space, "six.gif", &[])["blocks"].as_u64(), Some(36));
    generate(&space, "six.gif", &[]);
    assert_eq!(packed(&space).len(), 1, "packed once");
    // What a killed process left half-packed goes when the next is packed.
    fs::write(space.path("cache/video/.trefoil-killed"), "half").unwrap();
    fs::write(space.path("M/scheduler/sampler.json"), TWO).unwrap();
    assert_eq!(generate(&space, "two.gif", &[])["blocks"].as_u64(), Some(12));
    let stream = ["video", "stream", "M", "one.txt", "-o", "out", "--format", "gif", "--engines", "cpu@0", "--json"];
    let report = json(&space.output(stream.iter().chain(&SMALL)));
    assert_eq!(report["blocks"].as_u64(), Some(12), "{report:#}");
    assert_eq!(packed(&space).len(), 2);
    assert!(!space.path("cache/video/.trefoil-killed").exists());
}

#[test]
fn odd_sizes_of_a_folder_and_absurd_ones_are_refused() {
    let space = with_sampler(r#"{"sigmas":[1.0,0.5,0.0],"width":64.0}"#);
    let model = model().display().to_string();
    space.run(["video", "pack", &model, "-o", "a.trefoil"]);
    let generate = |model: &str, more: &[&str]| {
        let fixed = ["video", "generate", model, PROMPT, "-o", "clip.gif", "--artefact", "a.trefoil"];
        space.fails(fixed.iter().chain(more), 2)
    };
    let stream = |model: &str, more: &[&str]| {
        let fixed = ["video", "stream", model, "one.txt", "-o", "out", "--artefact", "a.trefoil"];
        space.fails(fixed.iter().chain(more), 2)
    };
    for (sampler, want) in [
        (r#"{"sigmas":[1.0,0.5,0.0],"width":64.0}"#, "`width` is 64.0"),
        (r#"{"sigmas":[1.0,0.5,0.0],"num_frames":"17"}"#, "`num_frames` is \"17\""),
        (r#"{"sigmas":[1.0,"#, "not JSON"),
    ] {
        fs::write(space.path("M/scheduler/sampler.json"), sampler).unwrap();
        for message in [generate("M", &[]), stream("M", &[])] {
            assert!(message.contains("M/scheduler/sampler.json: ") && message.contains(want), "{message}");
        }
    }
    let long = ["--frames", "4000001", "--size", "64x64", "--vae-path", "int8"];
    for message in [generate(&model, &long), stream(&model, &long)] {
        assert!(message.contains("tokens, and a clip may have 1048576") || message.contains("of memory"), "{message}");
    }
    assert!(!space.path("clip.gif").exists() && !space.path("out").exists());
}

/// A stock model: the scheduler of the public pipelines, UniPC with guidance, and no negative prompt.
#[test]
fn a_stock_model_makes_a_clip_from_a_prompt_and_the_clip_of_a_stream() {
    let space = with_sampler(SIX);
    fs::remove_file(space.path("M/scheduler/sampler.json")).unwrap();
    let stock = r#"{"_class_name":"UniPCMultistepScheduler","flow_shift":3.0,"num_inference_steps":6}"#;
    fs::write(space.path("M/scheduler/scheduler_config.json"), stock).unwrap();
    let report = generate(&space, "alone.webp", &["--seed", "4"]);
    assert_eq!(report["blocks"].as_u64(), Some(72), "two branches");
    generate(&space, "empty.webp", &["--seed", "4", "--negative", ""]);
    generate(&space, "words.webp", &["--seed", "4", "--negative", "a green triangle"]);
    let read = |name: &str| fs::read(space.path(name)).unwrap();
    assert!(read("alone.webp") == read("empty.webp") && read("alone.webp") != read("words.webp"));
    let stream = ["video", "stream", "M", "one.txt", "-o", "out", "--format", "webp", "--engines", "cpu@0"];
    space.run(stream.iter().chain(&SMALL).chain(&["--seed", "4"]));
    assert!(read("out/0001-a-red-circle-moves-left-over-a-dark.webp") == read("alone.webp"), "to the byte");
    let cores = trefoil_video::engine::allowed_cores();
    if cores.contains(&0) && cores.contains(&1) {
        // Also what the files say of two engines.
        let two = ["--engines", "cpu@0,cpu@1", "--cut", "31", "--seed", "4"];
        let fixed = ["video", "generate", "M", PROMPT, "-o", "pair.webp"];
        space.run(fixed.iter().chain(&SMALL).chain(&two));
        let stream = ["video", "stream", "M", "one.txt", "-o", "pair", "--format", "webp"];
        space.run(stream.iter().chain(&SMALL).chain(&two));
        assert!(read("pair/0001-a-red-circle-moves-left-over-a-dark.webp") == read("pair.webp"), "to the byte");
    }
}

#[test]
fn without_guidance_a_negative_prompt_is_said_to_change_nothing() {
    let space = with_sampler(TWO);
    let fixed = ["video", "generate", "M", PROMPT, "-o", "a.gif", "--negative", "a green triangle"];
    assert!(stderr(&space.output(fixed.iter().chain(&SMALL))).contains("--negative changes nothing"));
}

#[test]
fn a_packed_model_has_the_decoder_of_the_folder_it_was_packed_from() {
    let space = with_sampler(TWO);
    space.run(["video", "pack", "M", "-o", "a.trefoil"]);
    space.run(["video", "encode", "M", "one.txt", "-o", "t.safetensors"]);
    let stream = |output: &str, more: &[&str]| -> Vec<String> {
        let fixed = ["video", "stream", "a.trefoil", "--text", "t.safetensors", "--latent", "2,4,4", "-o", output];
        fixed.iter().chain(&["--engines", "cpu@0"]).chain(more).map(|&word| word.to_owned()).collect()
    };
    space.run(stream("latents", &[]));
    let decode = |model: &str, output: &str| -> Vec<String> {
        let latent = "latents/clip-0000.safetensors:latent";
        ["video", "decode", model, "--latent", latent, "-o", output].map(str::to_owned).into()
    };
    space.run(decode("a.trefoil", "a.gif"));
    space.run(decode("M", "b.gif"));
    assert!(fs::read(space.path("a.gif")).unwrap() == fs::read(space.path("b.gif")).unwrap());
    space.run(stream("clips", &["--decoder", "a.trefoil", "--format", "gif"]));
    assert!(space.path("clips/clip-0000.gif").exists());
    // Elsewhere nothing says where it came from.
    fs::create_dir(space.path("moved")).unwrap();
    fs::copy(space.path("a.trefoil"), space.path("moved/a.trefoil")).unwrap();
    for message in [
        space.fails(decode("moved/a.trefoil", "c.gif"), 2),
        space.fails(stream("none", &["--decoder", "moved/a.trefoil"]), 2),
    ] {
        assert!(message.contains("moved/a.trefoil is a packed model and holds no decoder"), "{message}");
        assert!(message.contains("name the pipeline folder or its VAE"), "{message}");
    }
}
