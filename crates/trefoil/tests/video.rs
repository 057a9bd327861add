//! `trefoil video`, end to end, on a small random model: nothing needs to be installed.

mod common;

use common::{Workspace, json, stderr, stdout, trefoil};
use std::path::{Path, PathBuf};
use trefoil_video::noise::torch_normals;
use trefoil_video::tensors::write_tensors;
use trefoil_video::{DitConfig, Tensor, TensorPath};

const CONFIG: DitConfig =
    DitConfig { layers: 3, heads: 2, head_dim: 32, ffn: 96, channels: 4, text_dim: 24, frequency: 32, eps: 1e-6 };

fn random(seed: u32, shape: &[usize], deviation: f32) -> Tensor {
    let len: usize = shape.iter().product();
    let mut values = torch_normals(seed, len.max(16));
    values.truncate(len);
    for value in &mut values {
        *value *= deviation;
    }
    Tensor::new("random", shape, values).unwrap()
}

/// A pipeline folder `model/` with a dual-expert transformer and four steps, and `in.safetensors` with noise and two texts.
fn workspace() -> Workspace {
    let space = Workspace::new();
    let (transformer, scheduler) = (space.path("model/transformer"), space.path("model/scheduler"));
    std::fs::create_dir_all(&transformer).unwrap();
    std::fs::create_dir_all(&scheduler).unwrap();
    let config = r#"{"patch_size":[1,2,2],"num_attention_heads":2,"attention_head_dim":32,"in_channels":4,"out_channels":4,
        "text_dim":24,"freq_dim":32,"ffn_dim":96,"num_layers":3,"cross_attn_norm":true,"qk_norm":"rms_norm_across_heads","eps":1e-6,
        "lora_rank":8,"lora_alpha":16}"#;
    std::fs::write(transformer.join("config.json"), config).unwrap();
    let sampler = r#"{"sigmas":[1.0,0.9,0.7,0.4,0.0],"timesteps":[1000,900,700,400],"switch_timestep":700}"#;
    std::fs::write(scheduler.join("sampler.json"), sampler).unwrap();
    let tensors: Vec<(String, Tensor)> = CONFIG
        .sizes(8)
        .tensors()
        .into_iter()
        .enumerate()
        .map(|(seed, (name, shape))| {
            let shape: Vec<usize> = shape.iter().map(|&side| side as usize).collect();
            let inputs: usize = shape[1..].iter().product();
            let mut tensor = random(seed as u32, &shape, 1.0 / (inputs.max(16) as f32).sqrt());
            if name.contains("norm") && name.ends_with("weight") {
                tensor.values.iter_mut().for_each(|gain| *gain += 1.0);
            }
            (name, tensor)
        })
        .collect();
    write_tensors(&transformer.join("diffusion_pytorch_model.safetensors"), &tensors).unwrap();
    let inputs =
        [("noise".to_owned(), random(7, &[1, 4, 2, 6, 8], 1.0)), ("text".to_owned(), random(8, &[1, 20, 24], 1.0))];
    write_tensors(&space.path("in.safetensors"), &inputs).unwrap();
    let prompts = [("a".to_owned(), random(9, &[20, 24], 1.0)), ("b".to_owned(), random(10, &[20, 24], 1.0))];
    write_tensors(&space.path("prompts.safetensors"), &prompts).unwrap();
    space.run(["video", "pack", "model", "-o", "a.trefoil"]);
    space
}

fn latent(file: &Path, key: &str) -> Vec<f32> {
    TensorPath { file: file.to_path_buf(), key: key.to_owned() }.read().unwrap().values
}

fn denoise(space: &Workspace, output: &str, more: &[&str]) -> serde_json::Value {
    let mut arguments =
        vec!["video", "denoise", "a.trefoil", "--noise", "in.safetensors:noise", "--text", "in.safetensors:text"];
    arguments.extend(["-o", output, "--json"]);
    arguments.extend(more);
    json(&space.output(arguments))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn relative(got: &[f32], want: &[f32]) -> f64 {
    let (mut square, mut reference) = (0f64, 0f64);
    for (&got, &want) in got.iter().zip(want) {
        square += f64::from(got - want).powi(2);
        reference += f64::from(want).powi(2);
    }
    (square / reference).sqrt()
}

/// Two engines on a core each, where there are two cores.
fn two_engines() -> Option<&'static str> {
    let cores = trefoil_video::engine::allowed_cores();
    if cores.contains(&0) && cores.contains(&1) {
        return Some("cpu@0,cpu@1");
    }
    eprintln!("skipped: two engines need cores 0 and 1");
    None
}

#[test]
fn pack_info_calibrate_denoise() {
    let space = workspace();
    let info = json(&space.output(["video", "info", "a.trefoil", "--json"]));
    assert_eq!((info["blocks"].as_u64(), info["calibration"].is_null()), (Some(12), true), "{info:#}");
    assert_eq!(info["video"]["experts"].as_array().map(Vec::len), Some(2));
    assert_eq!(info["artefact"]["regions"].as_array().map(Vec::len), Some(3));
    assert!(stdout(&space.output(["video", "info", "a.trefoil"])).contains("no activation scales yet"));

    let exact = denoise(&space, "f32.safetensors", &["--path", "f32", "--engines", "cpu"]);
    assert_eq!(exact["tensors"], serde_json::json!(["latent.0", "latent.1", "latent.2", "latent.3"]));
    assert_eq!(exact["engines"][0]["path"], "f32");
    let want = latent(&space.path("f32.safetensors"), "latent.3");
    denoise(&space, "w8a16.safetensors", &[]);
    assert!(relative(&latent(&space.path("w8a16.safetensors"), "latent.3"), &want) < 3e-2);

    // Without stored scales w8a8 says what it did; with them it does not.
    let own = denoise(&space, "own.safetensors", &["--path", "w8a8"]);
    assert!(own["notes"][0].as_str().is_some_and(|note| note.contains("trefoil video calibrate")), "{own:#}");
    let calibrated = json(&space.output([
        "video",
        "calibrate",
        "a.trefoil",
        "--noise",
        "in.safetensors:noise",
        "--text",
        "in.safetensors:text",
        "--json",
    ]));
    assert_eq!(calibrated["calibration"]["clips"][0], serde_json::json!([4, 2, 6, 8]));
    let stored = denoise(&space, "stored.safetensors", &["--path", "w8a8"]);
    assert_eq!(stored["notes"], serde_json::json!([]));
    let (own, stored) =
        (latent(&space.path("own.safetensors"), "latent.3"), latent(&space.path("stored.safetensors"), "latent.3"));
    assert!(bits(&own) == bits(&stored), "the same clip gives the same scales");
    assert!(relative(&stored, &want) < 6e-2);
}

#[test]
fn every_cut_between_two_engines_gives_the_same_bits() {
    let Some(engines) = two_engines() else { return };
    let space = workspace();
    space.run(["video", "calibrate", "a.trefoil", "--noise", "in.safetensors:noise", "--text", "in.safetensors:text"]);
    denoise(&space, "one.safetensors", &["--path", "w8a8", "--engines", "cpu@1"]);
    let want = bits(&latent(&space.path("one.safetensors"), "latent.3"));
    for cut in ["0", "1", "6", "7", "12"] {
        let report = denoise(&space, "two.safetensors", &["--path", "w8a8", "--engines", engines, "--cut", cut]);
        assert!(bits(&latent(&space.path("two.safetensors"), "latent.3")) == want, "cut {cut}");
        let crossed = usize::from(!["0", "12"].contains(&cut));
        assert_eq!(report["handoffs"].as_array().map(Vec::len), Some(crossed), "{report:#}");
    }
    // The same in processes of their own.
    for cut in ["0", "5", "12"] {
        let arguments = ["--path", "w8a8", "--engines", engines, "--cut", cut, "--processes"];
        assert_eq!(denoise(&space, "two.safetensors", &arguments)["processes"], true);
        assert!(bits(&latent(&space.path("two.safetensors"), "latent.3")) == want, "processes, cut {cut}");
    }
    // Each engine on a path of its own, cut by measured rates.
    let report = denoise(&space, "auto.safetensors", &["--path", "w8a8,w8a16", "--engines", engines, "--cut", "auto"]);
    let cut = report["cut"].as_u64().unwrap();
    assert!(cut <= 12 && report["rates"].as_array().map(Vec::len) == Some(2), "{report:#}");
    for key in ["solo_ms", "corun_ms"] {
        assert!(report["rates"][0][key]["median"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn rates_are_measured_alone_and_together() {
    let Some(engines) = two_engines() else { return };
    let space = workspace();
    let arguments = [
        "video",
        "rates",
        "a.trefoil",
        "--tokens",
        "24",
        "--text-rows",
        "20",
        "--engines",
        engines,
        "--samples",
        "4",
        "--json",
    ];
    let rates = json(&space.output(arguments));
    assert_eq!(
        (rates["blocks"].as_u64(), rates["origin"].as_str(), rates["cuts_origin"].as_str()),
        (Some(12), Some("measured"), Some("predicted"))
    );
    for engine in rates["engines"].as_array().unwrap() {
        assert!(
            engine["solo_ms"]["median"].as_f64().unwrap() > 0.0 && engine["corun_ms"]["count"].as_u64().unwrap() >= 1,
            "{rates:#}"
        );
    }
    assert!(rates["cuts"]["corun"]["cut"].as_u64().unwrap() <= 12 && !rates["conditions"]["machine"].is_null());
}

#[test]
fn the_benchmark_compares_configurations_in_turn() {
    if two_engines().is_none() {
        return;
    }
    let space = Workspace::new();
    let arguments = [
        "bench",
        "video",
        "--layers",
        "1",
        "--tokens",
        "16",
        "--text-rows",
        "8",
        "--clips",
        "3",
        "--rounds",
        "2",
        "--json",
    ];
    let report = json(&space.output(arguments));
    let rows = report["configurations"].as_array().unwrap();
    assert!(rows.len() >= 5 && report["blocks"] == 6, "{report:#}");
    for row in rows {
        assert_eq!(row["rounds"].as_array().map(Vec::len), Some(2), "{row:#}");
        assert_eq!(
            (row["latency_ms"]["count"].as_u64(), row["slo"].as_array().map(Vec::len)),
            (Some(6), Some(5)),
            "{row:#}"
        );
    }
    assert!(report["verdict"].as_str().is_some_and(|verdict| verdict.contains("best")));
    let bench = |more: &[&str]| space.fails(["bench", "video"].iter().chain(more), 2);
    assert!(bench(&["--clips", "1"]).contains("--clips"));
    assert!(bench(&["--tokens", "18446744073709551615"]).contains("tokens must lie in 1..=1048576"));
    assert!(bench(&["--engines", "cpu@0"]).contains("needs two engines"));
    assert!(bench(&["--engines", "cpu@0,cpu@4000"]).contains("core 4000 is not among"));
}

/// A CPU and an OpenCL engine on a core each, where this machine has both.
fn cpu_and_opencl() -> Option<&'static str> {
    use trefoil_kernels::opencl::{Device, OpenClError};
    two_engines()?;
    match Device::list() {
        Ok(devices) if devices.iter().any(|device| device.unfit.is_none()) => Some("cpu@0,opencl@1"),
        Ok(_) | Err(OpenClError::Library | OpenClError::NoDevice) => {
            let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
            let required = is_set("TREFOIL_REQUIRE_BACKENDS") && !is_set("TREFOIL_TEST_WITHOUT_OPENCL");
            assert!(!required, "no OpenCL device");
            eprintln!("skipped: no OpenCL device");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn an_opencl_engine_has_the_bits_of_the_cpu_in_every_command() {
    let Some(engines) = cpu_and_opencl() else { return };
    let space = workspace();
    space.run(["video", "calibrate", "a.trefoil", "--noise", "in.safetensors:noise", "--text", "in.safetensors:text"]);
    denoise(&space, "one.safetensors", &["--path", "w8a8", "--engines", "cpu@1"]);
    let want = bits(&latent(&space.path("one.safetensors"), "latent.3"));
    for (engines, cut, process) in [
        (engines, "0", None),
        (engines, "7", None),
        ("opencl@1,cpu@0", "7", Some("--processes")),
        ("opencl:0@1,cpu@0", "5", None),
        (engines, "auto", Some("--processes")),
    ] {
        // No --path: w8a8 is what both have.
        let mut arguments = vec!["--engines", engines, "--cut", cut];
        arguments.extend(process);
        let report = denoise(&space, "two.safetensors", &arguments);
        assert!(bits(&latent(&space.path("two.safetensors"), "latent.3")) == want, "{engines}, cut {cut}");
        let note = report["notes"].as_array().and_then(|notes| notes.first()?.as_str()).unwrap_or_default();
        assert!(note.contains("opencl") && note.contains("kernels"), "{report:#}");
    }
    let rates = json(&space.output([
        "video",
        "rates",
        "a.trefoil",
        "--tokens",
        "24",
        "--text-rows",
        "20",
        "--engines",
        engines,
        "--samples",
        "3",
        "--json",
    ]));
    assert_eq!(
        (rates["engines"][1]["engine"].as_str(), rates["engines"][1]["path"].as_str()),
        (Some("opencl@1"), Some("w8a8"))
    );
    assert!(rates["cuts"]["corun"]["cut"].as_u64().unwrap() <= 12, "{rates:#}");
    let report = json(&space.output([
        "bench",
        "video",
        "--layers",
        "1",
        "--tokens",
        "16",
        "--text-rows",
        "8",
        "--clips",
        "2",
        "--rounds",
        "1",
        "--engines",
        engines,
        "--json",
    ]));
    let names: Vec<&str> =
        report["configurations"].as_array().unwrap().iter().filter_map(|row| row["name"].as_str()).collect();
    for want in ["cpu@0 alone", "opencl@1 alone", "cpu@0-1 alone, w8a8", "data-parallel", "hetero-tensor", "pipeline"] {
        assert!(names.iter().any(|name| name.starts_with(want)), "{want} in {names:?}");
    }
    assert!(report["verdict"].as_str().is_some_and(|verdict| verdict.contains("best")), "{report:#}");
    // What cannot be is one line, and nothing is written.
    let fails = |more: &[&str], want: &str| {
        let mut arguments = vec!["video", "denoise", "a.trefoil", "--noise", "in.safetensors:noise"];
        arguments.extend(["--text", "in.safetensors:text", "-o", "not.safetensors"]);
        arguments.extend(more);
        let message = space.fails(arguments, 2);
        assert!(message.contains(want) && !space.path("not.safetensors").exists(), "{message}");
    };
    fails(&["--engines", "opencl@0,opencl@1"], "give each a process of its own (--processes)");
    fails(&["--engines", engines, "--path", "w8a16"], "its kernels are those of w8a8, not of w8a16");
    fails(&["--engines", "opencl:no such@1"], "there is no OpenCL device `no such`; the devices are 0 (");
}

#[test]
fn two_opencl_engines_on_different_cores_run_in_processes_of_their_own() {
    if cpu_and_opencl().is_none() {
        return;
    }
    let space = workspace();
    space.run(["video", "calibrate", "a.trefoil", "--noise", "in.safetensors:noise", "--text", "in.safetensors:text"]);
    denoise(&space, "one.safetensors", &["--path", "w8a8", "--engines", "cpu@1"]);
    let want = bits(&latent(&space.path("one.safetensors"), "latent.3"));
    let engines = ["--engines", "opencl@0,opencl@1", "--processes"];
    for cut in ["5", "auto"] {
        let report = denoise(&space, "two.safetensors", &[&engines[..], &["--cut", cut]].concat());
        assert!(bits(&latent(&space.path("two.safetensors"), "latent.3")) == want, "cut {cut}");
        let notes: Vec<&str> =
            report["notes"].as_array().unwrap().iter().filter_map(serde_json::Value::as_str).collect();
        // What the processes tell about their devices arrives.
        assert!(["opencl@0 is ", "opencl@1 is "].iter().all(|name| notes.iter().any(|note| note.starts_with(name))));
    }
    let mut arguments = vec!["video", "rates", "a.trefoil", "--tokens", "24", "--text-rows", "20", "--samples", "3"];
    arguments.extend(engines);
    arguments.push("--json");
    let rates = json(&space.output(arguments));
    assert_eq!((rates["processes"].as_bool(), rates["engines"].as_array().map(Vec::len)), (Some(true), Some(2)));
    assert!(rates["engines"].as_array().unwrap().iter().all(|rate| rate["corun_ms"]["median"].as_f64() > Some(0.0)));
    let mut arguments = vec!["video", "stream", "a.trefoil", "--text", "prompts.safetensors", "--latent", "1,4,6"];
    arguments.extend(engines);
    arguments.extend(["--count", "3", "--baselines", "--json"]);
    let report = json(&space.output(arguments));
    // The engines asked for, either alone, the CPU on both cores, data-parallel.
    assert_eq!(report["configurations"].as_array().map(Vec::len), Some(5), "{report:#}");
    let restarts = report["processes"].as_array().unwrap().iter().map(|process| process["restarts"].as_u64());
    assert!(restarts.eq([Some(0), Some(0)]), "{report:#}");
}

#[test]
fn without_opencl_the_engine_says_what_to_install() {
    let space = workspace();
    // The loader looks for drivers in this folder; a machine without the loader says the same.
    let output = trefoil()
        .current_dir(space.path(""))
        .env("OCL_ICD_VENDORS", "/nonexistent/")
        .args(["video", "rates", "a.trefoil", "--tokens", "24", "--text-rows", "20", "--engines", "opencl@0"])
        .output()
        .unwrap();
    let message = stderr(&output);
    let lines: Vec<&str> = message.lines().filter(|line| !line.starts_with("note:")).collect();
    assert!(!output.status.success() && lines.len() == 1, "{message}");
    assert!(lines[0].contains("pocl-opencl-icd") && lines[0].contains("trefoil probe"), "{message}");
}

#[test]
fn a_stream_is_written_clip_by_clip_and_goes_on_where_it_stopped() {
    let space = workspace();
    let engines = two_engines().unwrap_or("cpu");
    let run = |folder: &str, count: &str, more: &[&str]| {
        let mut arguments = vec!["video", "stream", "a.trefoil", "--text", "prompts.safetensors", "--latent", "1,4,6"];
        arguments.extend(["--engines", engines, "--path", "w8a16", "--count", count, "-o", folder, "--json"]);
        arguments.extend(more);
        json(&space.output(arguments))
    };
    let report = run("out", "5", &["--baselines", "--online", "--trace", "trace.json"]);
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(space.path("trace.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 5));
    let clips = report["configurations"][0]["report"]["clips"].as_array().unwrap().clone();
    assert_eq!(clips.iter().map(|clip| clip["item"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert!(report["period_ms"].as_f64().unwrap() > 0.0 && report["verdict"].is_string());
    let files = |folder: &str| {
        let mut names: Vec<String> = std::fs::read_dir(space.path(folder))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(files("out").len(), 6, "five clips and the job: {:?}", files("out"));
    let first = latent(&space.path("out/clip-0000.safetensors"), "latent");
    assert!(bits(&first) != bits(&latent(&space.path("out/clip-0002.safetensors"), "latent")), "its own noise each");
    // A clip that is missing is made again, the others are not.
    std::fs::remove_file(space.path("out/clip-0003.safetensors")).unwrap();
    let report = run("out", "5", &[]);
    assert_eq!((report["skipped"].as_u64(), files("out").len()), (Some(4), 6), "{report:#}");
    // A decoder of another model is refused before anything is made.
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/demo-model").display().to_string();
    let foreign = ["video", "stream", "a.trefoil", "--text", "prompts.safetensors", "--decoder", &demo, "-o", "new"];
    assert!(space.fails(foreign, 2).contains("latents of 16 channels and the transformer makes 4"));
    assert!(!space.path("new").exists());
    // Another job does not go on in the same folder.
    let other = ["video", "stream", "a.trefoil", "--text", "prompts.safetensors", "--latent", "1,4,4", "-o", "out"];
    assert!(space.fails(other, 2).contains("another job"));
}

#[test]
fn what_is_wrong_is_one_line() {
    let space = workspace();
    let clip = ["--noise", "in.safetensors:noise", "--text", "in.safetensors:text", "-o", "out.safetensors"];
    let fails = |artefact: &str, more: &[&str], want: &str| {
        let mut arguments = vec!["video", "denoise", artefact];
        arguments.extend(clip);
        arguments.extend(more);
        let message = space.fails(arguments, 2);
        assert!(message.contains(want), "{message}");
        assert!(!space.path("out.safetensors").exists());
    };
    fails("nowhere.trefoil", &[], "cannot open nowhere.trefoil");
    fails("in.safetensors", &[], "safetensors");
    fails(
        "a.trefoil",
        &["--engines", "cpu@0,openvino@1"],
        "this build has no such engine; write cpu@CORES or opencl@CORES",
    );
    fails("a.trefoil", &["--engines", "cpu@1,opencl@0-1"], "both engines use core 1");
    fails("a.trefoil", &["--engines", "cpu@0,cpu@0"], "both engines use core 0");
    fails("a.trefoil", &["--path", "f32,w8a8"], "2 paths for 1 engines");
    fails("a.trefoil", &["--cut", "3"], "--cut needs two engines");
    fails("a.trefoil", &["--engines", "cpu@4000"], "core 4000 is not among those that this process may use");
    fails("a.trefoil", &["--engines", "opencl@0", "--path", "f32"], "its kernels are those of w8a8, not of f32");
    let rates = |more: &[&str], want: &str| {
        let message = space.fails(["video", "rates", "a.trefoil"].iter().chain(more), 2);
        assert!(message.contains(want), "{message}");
    };
    rates(&["--engines", "cpu@4000"], "core 4000 is not among");
    rates(&["--tokens", "1048577"], "tokens must lie in 1..=1048576");
    rates(&["--tokens", "4", "--text-rows", "1000000000000"], "choose fewer --tokens or --text-rows");
    rates(&["--tokens", "0"], "above 0");
    if let Some(engines) = two_engines() {
        fails("a.trefoil", &["--engines", engines, "--cut", "13"], "cut 13 does not lie in 0..=12");
    }
    let calibrate = ["video", "calibrate", "a.trefoil", "--noise", "in.safetensors:noise"];
    let calibrate = |output: &str| {
        let rest = ["--text", "in.safetensors:text", "-o", output];
        space.fails(calibrate.iter().chain(&rest), 2)
    };
    assert!(calibrate("in.safetensors").contains("in.safetensors is read and would be overwritten"));
    assert!(calibrate("no/such.trefoil").contains("cannot write no/such.trefoil"));
    let pack = |output: &str| space.fails(["video", "pack", "model", "-o", output], 2);
    assert!(pack("no/such.trefoil").contains("cannot write no/such.trefoil"));
    assert!(pack("model").contains("it is a folder; name a regular file"));
    let mut bytes = std::fs::read(space.path("a.trefoil")).unwrap();
    bytes[65_536 + 1000] ^= 1;
    std::fs::write(space.path("bad.trefoil"), &bytes).unwrap();
    fails("bad.trefoil", &[], "is corrupted in section `region 0`");
    std::fs::write(space.path("bad.trefoil"), &bytes[..bytes.len() - 100]).unwrap();
    fails("bad.trefoil", &[], "truncated");
    std::fs::remove_file(space.path("a.trefoil.checkpoint.json")).unwrap();
    fails("a.trefoil", &["--path", "f32"], "--checkpoint");
    let wrong_key =
        ["video", "denoise", "a.trefoil", "--noise", "in.safetensors:nois", "--text", "in.safetensors:text", "-o", "o"];
    assert!(space.fails(wrong_key, 2).contains("the file has noise, text"));
    std::fs::remove_file(space.path("model/transformer/config.json")).unwrap();
    assert!(space.fails(["video", "pack", "model", "-o", "b.trefoil"], 2).contains("no config.json"));
    assert!(
        space
            .usage(["video", "denoise", "a.trefoil", "--noise", "x", "--text", "y:z", "-o", "o"])
            .contains("FILE.safetensors:KEY")
    );
}

/// The reference files, if they are beside the repository.
fn golden() -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/golden");
    if folder.is_dir() {
        return Some(folder);
    }
    eprintln!("skipped: {} is not there", folder.display());
    None
}

#[test]
fn the_reference_latents_come_out_of_the_program() {
    let Some(golden) = golden() else { return };
    let space = Workspace::new();
    let weights = golden.join("dit_a.dcm.safetensors");
    let output = trefoil()
        .current_dir(space.path(""))
        .args(["video", "pack"])
        .arg(&weights)
        .args(["-o", "a.trefoil"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let io = golden.join("dit_a.io.safetensors");
    let (noise, text) = (format!("{}:noise", io.display()), format!("{}:text_embeds", io.display()));
    space.run([
        "video",
        "denoise",
        "a.trefoil",
        "--noise",
        &noise,
        "--text",
        &text,
        "--path",
        "f32",
        "-o",
        "out.safetensors",
    ]);
    for step in 0..6 {
        let got = latent(&space.path("out.safetensors"), &format!("latent.{step}"));
        let want = latent(&io, &format!("sample.latent.{step}"));
        assert!(relative(&got, &want) <= 2e-5, "step {step}: {:e}", relative(&got, &want));
    }
}
