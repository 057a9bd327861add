//! Jobs of `trefoil video stream` that were damaged, changed or mixed up between two runs.

mod common;

use common::{Workspace, json, stderr, stdout};
use safetensors_free::write;
use std::fs;
use std::path::PathBuf;

/// Tensors as the tests need them, without another library.
mod safetensors_free {
    use std::path::Path;

    /// Writes f32 tensors `[1, rows, width]`.
    pub fn write(path: &Path, rows: usize, width: usize, tensors: &[(&str, Vec<f32>)]) {
        let bytes = rows * width * 4;
        let entries: Vec<String> = tensors
            .iter()
            .enumerate()
            .map(|(at, (name, _))| {
                let (from, to) = (at * bytes, (at + 1) * bytes);
                format!(r#""{name}":{{"dtype":"F32","shape":[1,{rows},{width}],"data_offsets":[{from},{to}]}}"#)
            })
            .collect();
        let header = format!("{{{}}}", entries.join(","));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        for (_, values) in tensors {
            assert_eq!(values.len(), rows * width);
            file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        }
        std::fs::write(path, file).unwrap();
    }
}

const PROMPTS: &str = "a red circle moves left\na blue square grows\na green triangle bounces\n";
const FILES: [&str; 3] = ["0001-a-red-circle-moves-left", "0002-a-blue-square-grows", "0003-a-green-triangle-bounces"];
/// Two latent frames of 4×4: milliseconds a clip.
const SMALL: [&str; 4] = ["--size", "32x32", "--frames", "5"];

fn model() -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/demo-model").display().to_string()
}

fn workspace() -> Workspace {
    let space = Workspace::new();
    fs::write(space.path("prompts.txt"), PROMPTS).unwrap();
    space
}

/// A stream of small clips into `out`.
fn stream(format: &str) -> Vec<String> {
    let model = model();
    let fixed = ["video", "stream", &model, "prompts.txt", "-o", "out", "--engines", "cpu@0", "--format", format];
    fixed.iter().chain(&SMALL).map(|&argument| argument.to_owned()).collect()
}

#[test]
fn a_damaged_clip_is_made_again_also_after_a_run_that_made_nothing() {
    let space = workspace();
    let model = model();
    space.run(["video", "pack", &model, "-o", "a.trefoil"]);
    let command = [stream("gif"), vec!["--artefact".to_owned(), "a.trefoil".to_owned()]].concat();
    space.run(&command);
    let clip = space.path("out").join(format!("{}.gif", FILES[1]));
    let want = fs::read(&clip).unwrap();
    fs::write(&clip, &want[..want.len() / 2]).unwrap();
    // A run that looks at the clips and is then refused: damage behind a header that is whole.
    let whole = fs::read(space.path("a.trefoil")).unwrap();
    let mut damaged = whole.clone();
    damaged[65_536 + 1000] ^= 1;
    fs::write(space.path("a.trefoil"), damaged).unwrap();
    assert!(space.fails(&command, 2).contains("is corrupted"));
    fs::write(space.path("a.trefoil"), whole).unwrap();
    let report = json(&space.output([command.clone(), vec!["--json".to_owned()]].concat()));
    assert_eq!((report["skipped"].as_u64(), report["finished"].as_u64()), (Some(2), Some(1)), "{report:#}");
    assert!(fs::read(&clip).unwrap() == want);
    // A folder in its place has no pictures written into it.
    fs::remove_file(&clip).unwrap();
    fs::create_dir(&clip).unwrap();
    space.run(&command);
    assert!(fs::read(&clip).unwrap() == want);
    // One that holds something is somebody's.
    fs::remove_file(&clip).unwrap();
    fs::create_dir(&clip).unwrap();
    fs::write(clip.join("letter.txt"), "dear").unwrap();
    assert!(space.fails(&command, 2).contains("letter.txt is none of its pictures"));
}

#[test]
fn a_folder_of_pictures_that_lacks_one_is_made_again() {
    let space = workspace();
    space.run(stream("frames"));
    let clip = space.path("out").join(FILES[1]);
    let picture = clip.join("frame_00003.png");
    let want = fs::read(&picture).unwrap();
    fs::remove_file(&picture).unwrap();
    assert!(stdout(&space.output(stream("frames"))).contains("1 clip of 8 tokens"));
    assert!(fs::read(&picture).unwrap() == want);
    assert!(stdout(&space.output(stream("frames"))).contains("all 3 clips are there already"));
}

#[test]
fn files_that_the_job_did_not_make_are_none_of_its_clips() {
    let space = workspace();
    fs::create_dir(space.path("out")).unwrap();
    // A job that made nothing gives way to another; what lies in the place of a clip does not.
    let job =
        r#"{"version":1,"trefoil":"0","settings":{},"clips":[{"file":"0001-other.gif","prompt":"other","seed":0}]}"#;
    fs::write(space.path("out/job.json"), job).unwrap();
    let clip = space.path("out").join(format!("{}.gif", FILES[1]));
    fs::write(&clip, "mine").unwrap();
    assert!(space.fails(stream("gif"), 2).contains("does not say that it is a clip of this job; move it away"));
    assert_eq!(fs::read(&clip).unwrap(), b"mine");
    fs::remove_file(&clip).unwrap();
    space.run(stream("gif"));
    assert!(clip.exists());
}

/// Text states of two clips, and of the other branch.
fn texts(space: &Workspace, name: &str, last: f32) {
    let states = |scale: f32| (0..32 * 64).map(|at| scale * ((at % 7) as f32 - 3.0)).collect::<Vec<f32>>();
    let mut second = states(0.2);
    second[100] = last;
    write(&space.path(name), 32, 64, &[("a", states(0.1)), ("b", second)]);
}

#[test]
fn a_job_of_text_states_knows_them_by_their_values() {
    let space = workspace();
    let model = model();
    space.run(["video", "encode", &model, "prompts.txt", "-o", "encoded.safetensors"]);
    let sampler = r#"{"sigmas":[1.0,0.5,0.0],"experts":[0,1],"guidance":3.0}"#;
    fs::write(space.path("guided.json"), sampler).unwrap();
    space.run(["video", "pack", &model, "-o", "a.trefoil", "--sampler", "guided.json"]);
    let run = |text: &str, negative: &str, more: &[&str]| -> Vec<String> {
        let fixed = ["video", "stream", "a.trefoil", "--text", text, "--negative", negative, "--latent", "1,4,4"];
        fixed.iter().chain(&["-o", "out", "--engines", "cpu@0"]).chain(more).map(|&word| word.to_owned()).collect()
    };
    space.run(["video", "encode", &model, "prompts.txt", "-o", "states.safetensors"]);
    space.run(run("states.safetensors", "encoded.safetensors:text_embeds.0", &["--count", "1"]));
    // The same states from another file, and more of them, are the same job.
    space.run(run("encoded.safetensors", "states.safetensors:text_embeds.0", &[]));
    // Other states under the same names are not.
    fs::write(space.path("prompts.txt"), PROMPTS.replace("blue", "red")).unwrap();
    space.run(["video", "encode", &model, "prompts.txt", "-o", "states.safetensors"]);
    let message = space.fails(run("states.safetensors", "encoded.safetensors:text_embeds.0", &[]), 2);
    assert!(message.contains("its clip 2 has other text states (\"text_embeds.1\")"), "{message}");
    let message = space.fails(run("encoded.safetensors", "encoded.safetensors:text_embeds.2", &[]), 2);
    assert!(message.contains("its negative text is "), "{message}");
}

#[test]
fn text_states_are_looked_at_before_anything_is_made() {
    let space = workspace();
    let model = model();
    space.run(["video", "pack", &model, "-o", "a.trefoil"]);
    let stream = ["video", "stream", "a.trefoil", "-o", "out", "--engines", "cpu@0", "--latent", "1,4,4"];
    // The second is of another model.
    let path = space.path("odd.safetensors");
    let header = r#"{"a":{"dtype":"F32","shape":[1,32,64],"data_offsets":[0,8192]},"b":{"dtype":"F32","shape":[1,32,60],"data_offsets":[8192,15872]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0u8; 15_872]);
    fs::write(&path, bytes).unwrap();
    let message = space.fails(stream.iter().chain(&["--text", "odd.safetensors"]), 2);
    assert!(message.contains("odd.safetensors:b") && !space.path("out").exists(), "{message}");
    // What changes nothing is said.
    texts(&space, "t.safetensors", 0.0);
    let vain = ["--text", "t.safetensors", "--negative", "t.safetensors:a", "--fps", "8"];
    let told = stderr(&space.output(stream.iter().chain(&vain)));
    assert!(told.contains("--negative changes nothing") && told.contains("--fps changes nothing"), "{told}");
    let denoise = ["video", "denoise", "a.trefoil", "--noise", "out/clip-0000.safetensors:latent", "-o", "o.st"];
    let texts = ["--text", "t.safetensors:a", "--negative", "t.safetensors:b"];
    assert!(stderr(&space.output(denoise.iter().chain(&texts))).contains("--negative changes nothing"));
    let second = ["--second", "a.trefoil", "--switch-timestep", "nan", "--text", "t.safetensors:a"];
    assert!(space.fails(denoise.iter().chain(&second), 2).contains("--switch-timestep NaN is no timestep"));
}

#[test]
fn a_clip_that_becomes_nan_is_told_and_the_others_are_made() {
    let space = workspace();
    let model = model();
    space.run(["video", "pack", &model, "-o", "a.trefoil"]);
    let states = (0..32 * 64).map(|at| ((at % 7) as f32 - 3.0) / 8.0).collect::<Vec<f32>>();
    let mut bad = states.clone();
    bad.iter_mut().step_by(3).for_each(|value| *value = 3e38);
    write(&space.path("t.safetensors"), 32, 64, &[("a", states.clone()), ("b", bad), ("c", states)]);
    let stream = ["video", "stream", "a.trefoil", "--text", "t.safetensors", "-o", "out", "--latent", "1,4,4"];
    for _ in 0..2 {
        let message = space.fails(stream, 1);
        assert!(
            message.contains("clip 2 could not be made: ") && message.contains("2 of 3 clips are finished"),
            "{message}"
        );
        let job: serde_json::Value = serde_json::from_slice(&fs::read(space.path("out/job.json")).unwrap()).unwrap();
        let has = |clip: usize, what: &str| job["clips"][clip].get(what).is_some();
        assert!(has(0, "done") && has(2, "done") && !has(1, "done") && has(1, "failed"), "{job:#}");
    }
}
