//! Samplers of stock models (UniPC, guidance) through every command that makes a clip.

mod common;

use common::{Workspace, json};
use std::fs;
use std::path::{Path, PathBuf};

const PROMPT: &str = "a red circle moves left over a dark background";
/// Two latent frames of 4×4: milliseconds a clip.
const SMALL: [&str; 4] = ["--size", "32x32", "--frames", "5"];

fn model() -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/demo-model").display().to_string()
}

/// Two engines on a core each, where there are two cores.
fn two_engines() -> Option<&'static str> {
    let cores = trefoil_video::engine::allowed_cores();
    (cores.contains(&0) && cores.contains(&1)).then_some("cpu@0,cpu@1")
}

/// The bytes of a folder's pictures.
fn pictures(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<(String, Vec<u8>)> = fs::read_dir(folder)
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "png"))
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .collect();
    all.sort();
    assert_eq!(all.len(), 5);
    all
}

/// A multi-step solver has a history that measuring must not leave to the clips: on one engine, on two with a measured cut, and in
/// processes, a stream's clip is the one that `generate` makes.
#[test]
fn a_stream_with_unipc_makes_the_clips_of_generate() {
    let space = Workspace::new();
    let model = model();
    fs::write(space.path("one.txt"), format!("{PROMPT}\n")).unwrap();
    let sampler = r#"{"solver":"unipc","sigmas":[0.99,0.8,0.36,0.0],"experts":[0,0,1],"guidance":1.0}"#;
    fs::write(space.path("unipc.json"), sampler).unwrap();
    space.run(["video", "pack", &model, "-o", "u.trefoil", "--sampler", "unipc.json"]);
    let fixed = ["--artefact", "u.trefoil", "--path", "w8a8", "--seed", "3"];
    let generate = ["video", "generate", &model, PROMPT, "-o", "alone", "--engines", "cpu@0"];
    space.run(generate.iter().chain(&SMALL).chain(&fixed));
    let alone = pictures(&space.path("alone"));
    let stream = |output: &str, more: &[&str]| {
        let stream = ["video", "stream", &model, "one.txt", "-o", output, "--format", "frames"];
        space.run(stream.iter().chain(&SMALL).chain(&fixed).chain(more));
        let clip = format!("{output}/0001-a-red-circle-moves-left-over-a-dark");
        assert!(pictures(&space.path(&clip)) == alone, "{output}: not generate's frames");
    };
    stream("one", &["--engines", "cpu@0"]);
    if let Some(engines) = two_engines() {
        stream("two", &["--engines", engines]);
        stream("processes", &["--engines", engines, "--processes"]);
        stream("inside", &["--engines", engines, "--cut", "9"]);
        let bench = ["bench", "video", "--artefact", "u.trefoil", "--tokens", "8", "--text-rows", "8"];
        let more = ["--clips", "2", "--rounds", "1", "--engines", engines, "--json"];
        let report = json(&space.output(bench.iter().chain(&more)));
        assert!(report["verdict"].is_string(), "{report:#}");
    }
}
