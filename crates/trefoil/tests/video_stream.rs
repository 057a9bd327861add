//! `trefoil video stream` from prompts to files with the small trained model of `testdata`: jobs that go on, engines that are killed,
//! files that cannot be written.

mod common;

use common::{Workspace, json, stderr, stdout, trefoil};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PROMPTS: &str = "# colours and shapes\na red circle moves left over a dark background\n\n  a blue square grows over a grey background\na green triangle bounces over a light background\n";
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

/// A stream of small clips into `output`.
fn arguments(output: &str, more: &[&str]) -> Vec<String> {
    let model = model();
    let fixed = ["video", "stream", &model, "prompts.txt", "-o", output];
    fixed.iter().chain(&SMALL).chain(more).map(|&argument| argument.to_owned()).collect()
}

fn stream(space: &Workspace, output: &str, more: &[&str]) -> serde_json::Value {
    json(&space.output(arguments(output, &[more, &["--json"]].concat())))
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
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
fn prompts_become_clips_a_sheet_and_a_job_that_goes_on() {
    let space = workspace();
    let report = stream(&space, "out", &["--engines", "cpu@0", "--format", "gif", "--seed", "5"]);
    let out = space.path("out");
    let files = [
        "0001-a-red-circle-moves-left-over-a-dark.gif",
        "0002-a-blue-square-grows-over-a-grey.gif",
        "0003-a-green-triangle-bounces-over-a-light.gif",
        "contact-sheet.png",
        "job.json",
        "strips",
    ];
    assert_eq!(names(&out), files);
    assert_eq!(
        (report["clips"].as_u64(), report["finished"].as_u64(), report["blocks"].as_u64()),
        (Some(3), Some(3), Some(36))
    );
    assert!(report["decoder"]["ms"].as_f64().unwrap() > 0.0 && report["text_seconds"].as_f64().unwrap() > 0.0);
    let spans = report["configurations"][0]["report"]["spans"].as_array().unwrap();
    assert_eq!(spans.iter().filter(|span| span["work"] == "last").count(), 3, "a span of decoding for each clip");
    // A clip is what `generate` makes of its prompt and seed, to the byte.
    let model = model();
    let generate = ["video", "generate", &model, "a blue square grows over a grey background", "-o", "alone.gif"];
    space.run(generate.iter().chain(&SMALL).chain(&["--engines", "cpu@0", "--seed", "6"]));
    let second = fs::read(out.join(files[1])).unwrap();
    assert_eq!(fs::read(space.path("alone.gif")).unwrap(), second);
    let job: serde_json::Value = serde_json::from_slice(&fs::read(out.join("job.json")).unwrap()).unwrap();
    assert_eq!((job["clips"][1]["seed"].as_u64(), job["clips"][1]["done"]["frames"].as_u64()), (Some(6), Some(5)));
    assert!(job["clips"][1]["done"]["plan"] == "cpu@0" && job["settings"]["width"] == 32, "{job:#}");
    assert_eq!(job["settings"]["path"], serde_json::json!(["w8a16"]), "the path that was found, where none was given");

    // What is there is not made again; what is missing or damaged is, alike, also on other engines.
    let again = arguments("out", &["--engines", "cpu@0", "--format", "gif", "--seed", "5"]);
    assert!(stdout(&space.output(&again)).contains("all 3 clips are there already"));
    let named = [again.clone(), vec!["--path".to_owned(), "w8a16".to_owned()]].concat();
    assert!(stdout(&space.output(&named)).contains("all 3 clips are there already"), "the same path by its name");
    fs::remove_file(out.join(files[1])).unwrap();
    fs::write(out.join(files[2]), b"cut").unwrap();
    fs::write(out.join(".trefoil-left"), b"half").unwrap();
    let told = stdout(&space.output(&again));
    assert!(
        told.contains("2 clips of 8 tokens") && told.contains("3 of 3 clips, contact-sheet.png, job.json"),
        "{told}"
    );
    assert_eq!(fs::read(out.join(files[1])).unwrap(), second);
    assert_eq!(names(&out), files);

    // Another job is told apart in a line.
    let differs = |more: &[&str], want: &str| {
        let message = space.fails(arguments("out", more), 2);
        assert!(message.contains("out holds another job: ") && message.contains(want), "{message}");
        assert!(message.contains("name another folder, or remove out to start anew"), "{message}");
    };
    let gif = ["--format", "gif", "--seed", "5"];
    differs(&["--format", "png", "--seed", "5"], "its format is \"gif\", this one's is \"png\"");
    differs(&["--format", "gif"], "its clip 1 has seed 5, this one's has 0");
    differs(&[&gif[..], &["--path", "w8a8"]].concat(), "its path is [\"w8a16\"], this one's is [\"w8a8\"]");
    fs::write(space.path("prompts.txt"), PROMPTS.replace("blue", "green")).unwrap();
    differs(&gif, "its prompt 2 is \"a blue square");
    fs::write(space.path("prompts.txt"), format!("{PROMPTS}a red square moves up over a dark background\n")).unwrap();
    differs(&gif, "it has 3 prompts, this one has 4");
    assert_eq!(names(&out), files, "nothing was touched");
}

#[test]
fn every_format_is_written_and_the_pipeline_tells_predicted_and_measured() {
    let space = workspace();
    let engines = two_engines().unwrap_or("cpu");
    let is_pipeline = engines.contains(',');
    for (format, ending) in [("mp4", ".mp4"), ("png", ".png"), ("frames", ""), ("latents", ".safetensors")] {
        let more = ["--format", format, "--engines", engines, "--trace", "trace.json", "--count", "4"];
        let report = stream(&space, format, &more);
        let clip = space.path(format).join(format!("0004-a-red-circle-moves-left-over-a-dark{ending}"));
        match format {
            "frames" => assert_eq!(names(&clip).len(), 6, "five pictures and clip.json"),
            _ => assert!(fs::metadata(&clip).unwrap().len() > 100),
        }
        assert_eq!(space.path(format).join("contact-sheet.png").exists(), format != "latents");
        if is_pipeline {
            assert!(
                report["predicted_period_ms"].as_f64().unwrap() > 0.0 && report["period_ms"].as_f64().unwrap() > 0.0
            );
            assert!(
                report["observed"]["period_ms"].as_f64().unwrap() > 0.0
                    && report["rates"].as_array().unwrap().len() == 2
            );
            let trace = fs::read_to_string(space.path("trace.json")).unwrap();
            assert!(trace.contains("last stage"));
            if format != "latents" {
                assert!(report["decoder"]["rate"]["corun_ms"]["median"].as_f64().unwrap() > 0.0, "{report:#}");
            }
        }
    }
    let decode = [
        "video",
        "decode",
        &model(),
        "--latent",
        "latents/0001-a-red-circle-moves-left-over-a-dark.safetensors:latent",
    ];
    let decoded = json(&space.output(decode.iter().chain(&["-o", "d.gif", "--json"])));
    assert!(decoded["metadata"]["prompt"] == "a red circle moves left over a dark background", "{decoded:#}");
}

#[test]
fn baselines_say_what_is_best_and_who_keeps_which_deadline() {
    let Some(engines) = two_engines() else { return };
    let space = workspace();
    let more = ["--engines", engines, "--format", "gif", "--count", "3", "--baselines", "--online"];
    let report = stream(&space, "out", &more);
    assert!(report["configurations"].as_array().unwrap().len() >= 5, "{report:#}");
    let deadlines = report["slo"]["deadlines"].as_array().unwrap();
    assert_eq!(deadlines.len(), 6);
    let loosest = deadlines[5]["configurations"].as_array().unwrap();
    assert!(loosest.iter().any(|row| row["clips_per_hour_within"].as_f64().unwrap() > 0.0), "{loosest:?}");
    assert!(report["verdict"].is_string());
    assert_eq!(names(&space.path("out")).len(), 6, "what baselines write is removed");
}

#[test]
fn the_engine_that_ends_a_clip_decodes_it_and_may_be_chosen() {
    use trefoil_kernels::opencl::Device;
    let Some(engines) = two_engines() else { return };
    let space = workspace();
    // Paths of decoder and text encoder are settings of the job.
    let report = stream(&space, "int8", &["--engines", engines, "--format", "gif", "--vae-path", "int8"]);
    assert!(report["decoder"]["what"].as_str().unwrap().starts_with("decoding in int8 on cpu@1"), "{report:#}");
    let path = report["job"]["clips"][0]["done"]["numeric_path"].as_str().unwrap();
    assert!(path.ends_with(", decoder int8"), "{report:#}");
    let message = space.fails(arguments("int8", &["--format", "gif"]), 2);
    assert!(message.contains(r#"its decoder path is "int8", this one's is "f32""#), "{message}");
    let report =
        stream(&space, "text", &["--engines", engines, "--format", "gif", "--text-path", "int8", "--order", "auto"]);
    let orders = report["orders"].as_array().unwrap();
    assert_eq!((orders.len(), &orders[1]["engines"][1]), (2, &orders[0]["engines"][0]));
    let shortest = orders.iter().map(|order| order["cut"]["period"].as_f64().unwrap()).fold(f64::MAX, f64::min);
    assert_eq!(report["predicted_period_ms"].as_f64(), Some(shortest));
    if !Device::list().is_ok_and(|devices| devices.iter().any(|device| device.unfit.is_none())) {
        eprintln!("skipped: no OpenCL device");
        return;
    }
    let fixed = ["--format", "frames", "--engines", "cpu@0,opencl@1", "--cut", "9"];
    let report = stream(&space, "device", &fixed);
    assert!(report["decoder"]["what"].as_str().unwrap().contains("on opencl@1 (OpenCL"), "{report:#}");
    assert_eq!(names(&space.path("device/0002-a-blue-square-grows-over-a-grey")).len(), 6);
    let baselines = ["--engines", "cpu@0,opencl@1", "--baselines", "--count", "2", "--format", "gif"];
    let report = stream(&space, "baselines", &baselines);
    assert!(report["configurations"].as_array().unwrap().len() >= 4, "{report:#}");
}

/// A CPU device's threads belong to a process and are on one engine's cores, so two such engines are processes; the decoder, which stays
/// in this one, moves from one engine's cores to the other's.
#[test]
fn two_opencl_engines_on_different_cores_stream_with_baselines() {
    use trefoil_kernels::opencl::{Device, DeviceKind};
    if two_engines().is_none() {
        return;
    }
    let fits = |device: &trefoil_kernels::opencl::DeviceInfo| device.unfit.is_none() && device.kind == DeviceKind::Cpu;
    if !Device::list().is_ok_and(|devices| devices.iter().any(fits)) {
        eprintln!("skipped: no OpenCL device that is this CPU");
        return;
    }
    let space = workspace();
    let pair = ["--engines", "opencl@0,opencl@1", "--format", "gif", "--count", "2"];
    let message = space.fails(arguments("none", &pair), 2);
    assert!(message.contains("--processes"), "{message}");
    let more = [&pair[..], &["--processes", "--baselines", "--order", "auto"]].concat();
    let report = stream(&space, "out", &more);
    let rows = report["configurations"].as_array().unwrap();
    let all: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(all.len(), 5, "{all:?}");
    let alone = ["opencl@0 alone, w8a8", "opencl@1 alone, w8a8", "cpu@0-1 alone, w8a8"];
    assert!(alone.iter().all(|name| all.contains(name)), "{all:?}");
    assert!(all[4].starts_with("data-parallel, opencl@") && all[4].ends_with("decodes all"), "{all:?}");
    assert!(rows.iter().all(|row| row["report"]["clips"].as_array().unwrap().len() == 2), "{report:#}");
    assert_eq!(report["orders"].as_array().unwrap().len(), 2);
}

#[test]
fn guidance_takes_a_second_text_and_changes_the_clips() {
    let space = workspace();
    let model = model();
    let sampler = r#"{"sigmas":[1.0,0.8,0.4,0.0],"timesteps":[1000,800,400],"experts":["semantic","semantic","detail"],"guidance":3.0}"#;
    fs::write(space.path("guided.json"), sampler).unwrap();
    space.run(["video", "pack", &model, "-o", "guided.trefoil", "--sampler", "guided.json"]);
    let engines = two_engines().unwrap_or("cpu");
    let run = |output: &str, more: &[&str]| {
        let fixed = ["--artefact", "guided.trefoil", "--format", "latents", "--engines", engines, "--count", "2"];
        let report = stream(&space, output, &[&fixed[..], more].concat());
        assert_eq!(report["blocks"].as_u64(), Some(36), "three steps of two branches of six blocks");
        fs::read(space.path(output).join("0001-a-red-circle-moves-left-over-a-dark.safetensors")).unwrap()
    };
    let cut: &[&str] = if engines.contains(',') { &["--cut", "10"] } else { &[] };
    let empty = run("empty", cut);
    assert_ne!(empty, run("negative", &[cut, &["--negative", "a green triangle"]].concat()));
    assert_eq!(empty, run("processes", &[cut, &["--processes"]].concat()));
    // The same from text states.
    space.run(["video", "encode", &model, "prompts.txt", "-o", "texts.safetensors"]);
    let states = ["video", "stream", "guided.trefoil", "--text", "texts.safetensors", "--latent", "2,4,4"];
    assert!(space.fails(states, 2).contains("--negative FILE.safetensors:KEY"));
    let negative =
        ["--negative", "texts.safetensors:text_embeds.1", "--decoder", &model, "--format", "gif", "-o", "states"];
    space.run(states.iter().chain(&negative));
    assert!(space.path("states/clip-0002.gif").exists());
}

/// The program, started and not waited for, in a process group of its own.
fn start(space: &Workspace, arguments: &[String]) -> Child {
    use std::os::unix::process::CommandExt as _;
    trefoil()
        .current_dir(space.path(""))
        .env("TREFOIL_CACHE", space.path("cache"))
        .args(arguments)
        .process_group(0)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until `what` holds.
fn until(what: &dyn Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < Duration::from_mins(1), "it never came true");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn signal(name: &str, process: &str) {
    let sent = Command::new("kill").args([name, "--", process]).stderr(Stdio::null()).status().unwrap();
    // A process that ended meanwhile needs none.
    let _ = sent;
}

/// Processes whose parent is `parent`.
fn children(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let after = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        after.split_whitespace().nth(1).and_then(|word| word.parse().ok()) == Some(parent)
    })
    .collect()
}

fn clips(space: &Workspace, folder: &str) -> usize {
    let Ok(entries) = fs::read_dir(space.path(folder)) else { return 0 };
    entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with("00")).count()
}

#[test]
fn ctrl_c_ends_with_a_report_and_the_same_command_goes_on() {
    let space = workspace();
    let engines = two_engines().unwrap_or("cpu");
    let more = ["--engines", engines, "--processes", "--format", "latents", "--count", "400"];
    let stopped = start(&space, &arguments("out", &more));
    until(&|| clips(&space, "out") >= 3);
    // As a terminal does it: to the whole group.
    signal("-INT", &format!("-{}", stopped.id()));
    let output = stopped.wait_with_output().unwrap();
    let (told, error) = (stdout(&output), stderr(&output));
    assert_eq!(output.status.code(), Some(130), "{told}\n{error}");
    assert!(error.contains("interrupted after") && error.contains("the same command makes the rest"), "{error}");
    assert!(!error.contains("started again"), "workers outlive the signal: {error}");
    assert!(told.contains("of 400 clips") && told.contains("ms per clip"), "{told}");
    let made = clips(&space, "out");
    assert!((3..400).contains(&made) && !names(&space.path("out")).iter().any(|name| name.starts_with(".trefoil")));
    let job: serde_json::Value = serde_json::from_slice(&fs::read(space.path("out/job.json")).unwrap()).unwrap();
    let done = job["clips"].as_array().unwrap().iter().filter(|clip| clip.get("done").is_some()).count();
    assert_eq!(done, made);
}

#[test]
fn killed_workers_and_a_killed_program_leave_the_clips_of_an_undisturbed_run() {
    let Some(engines) = two_engines() else { return };
    let space = workspace();
    let more =
        ["--engines", engines, "--path", "w8a8", "--cut", "17", "--processes", "--format", "latents", "--count", "10"];
    stream(&space, "want", &more);
    // Workers are killed behind the second and the fifth clip, the program behind the seventh.
    let mut running = start(&space, &arguments("got", &more));
    for (made, nth) in [(2, 0), (5, 1)] {
        until(&|| clips(&space, "got") >= made || running_is_over(&running));
        if let Some(pid) = children(running.id()).get(nth) {
            signal("-KILL", &pid.to_string());
        }
    }
    until(&|| clips(&space, "got") >= 7 || running_is_over(&running));
    signal("-KILL", &running.id().to_string());
    running.wait().unwrap();
    let report = stream(&space, "got", &more);
    assert!(report["finished"].as_u64() <= report["clips"].as_u64());
    for name in names(&space.path("want")).iter().filter(|name| name.ends_with(".safetensors")) {
        let read = |folder: &str| fs::read(space.path(folder).join(name)).unwrap();
        assert!(read("want") == read("got"), "{name} differs");
    }
    assert_eq!(names(&space.path("want")), names(&space.path("got")));
}

/// Twenty times `kill -9` of either worker at moments that were drawn (a hundred times with `TREFOIL_LONG_TESTS`): all ten clips are
/// made, with the bits of an undisturbed run.
#[test]
fn twenty_kills_at_random_moments_leave_ten_clips_as_they_are() {
    let Some(engines) = two_engines() else { return };
    let wanted = if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { 100 } else { 20 };
    let space = workspace();
    let model = model();
    let clips_of = |folder: &str| -> Vec<String> {
        let fixed = ["video", "stream", &model, "prompts.txt", "-o", folder, "--size", "96x96", "--frames", "9"];
        let more = [
            "--engines",
            engines,
            "--path",
            "w8a8",
            "--cut",
            "17",
            "--processes",
            "--format",
            "latents",
            "--count",
            "10",
        ];
        fixed.iter().chain(&more).chain(&["--json"]).map(|&argument| argument.to_owned()).collect()
    };
    space.run(clips_of("want"));
    let read = |folder: &str| -> Vec<(String, Vec<u8>)> {
        let files = names(&space.path(folder)).into_iter().filter(|name| name.ends_with(".safetensors"));
        files.map(|name| (name.clone(), fs::read(space.path(folder).join(name)).unwrap())).collect()
    };
    let want = read("want");
    assert_eq!(want.len(), 10);
    let mut random = 0x2545_f491_u32;
    let mut draw = move |below: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) % below
    };
    let (mut kills, mut streams, mut restarts) = (0, 0, 0);
    while kills < wanted {
        let folder = format!("got-{streams}");
        let mut running = start(&space, &clips_of(&folder));
        until(&|| children(running.id()).len() == 2 || running_is_over(&running));
        while kills < wanted && running.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(u64::from(10 + draw(60))));
            // Between two processes of one engine there is one child only.
            let workers = children(running.id());
            if let Some(worker) = workers.get(draw(2) as usize) {
                signal("-KILL", &worker.to_string());
                kills += 1;
            }
        }
        let output = running.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let report = json(&output);
        assert_eq!(report["finished"].as_u64(), Some(10), "{report:#}");
        restarts +=
            report["processes"].as_array().unwrap().iter().filter_map(|row| row["restarts"].as_u64()).sum::<u64>();
        assert!(read(&folder) == want, "stream {streams}: the clips of an undisturbed run");
        streams += 1;
    }
    // A worker that has nothing left to do is not started again, and one kill may hit a process that another killed already.
    assert!(restarts * 3 >= kills && restarts <= kills, "{restarts} restarts of {kills} kills");
    eprintln!("{kills} kills in {streams} streams of ten clips, {restarts} restarts");
}

#[test]
fn faults_before_a_stream_are_one_line() {
    let space = workspace();
    let model = model();
    space.run(["video", "pack", &model, "-o", "a.trefoil"]);
    space.run(["video", "encode", &model, "prompts.txt", "-o", "t.safetensors"]);
    let stream = ["video", "stream", "a.trefoil", "--text", "t.safetensors", "-o", "out"];
    let fails = |more: &[&str], want: &str| {
        let message = space.fails(stream.iter().chain(more), 2);
        assert!(message.contains(want), "{message}");
        let made = fs::read_dir(space.path("out")).into_iter().flatten().flatten();
        let is_clip = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().ends_with(".safetensors");
        assert_eq!(made.filter(is_clip).count(), 0, "{message}");
    };
    // Too little memory, with what asks for it.
    fails(&["--latent", "512,2048,2048"], "of memory (weights ");
    fails(&["--latent", "512,2048,2048", "--processes"], "are available; choose smaller or shorter clips");
    // Scales of another schedule, stored into this artefact.
    let packed = trefoil_video::Model::open(&space.path("a.trefoil")).unwrap();
    let mut sampler = packed.sampler().clone();
    sampler.timesteps[0] = 990.0;
    let other = std::sync::Arc::new(packed.with_sampler(sampler).unwrap());
    let (noise, text) = trefoil_video::rates::random_inputs(other.config(), [other.config().channels, 1, 4, 4], 8);
    let cores = trefoil_video::engine::allowed_cores();
    let kernels = std::sync::Arc::new(trefoil_kernels::Kernels::best(&cores[..1]).unwrap());
    let clip = trefoil_video::CalibrationClip { noise: &noise, text: &text, negative: None };
    let calibration = trefoil_video::Calibration::observe(&other, &kernels, &[clip], &mut |_, _| Ok(())).unwrap();
    calibration.store(other.artefact().unwrap(), &space.path("a.trefoil")).unwrap();
    for more in [&["--path", "w8a8"][..], &["--path", "w8a8", "--processes"]] {
        fails(more, "it was made for timesteps [990.0,");
    }
    // Damage behind a header that is whole.
    let mut bytes = fs::read(space.path("a.trefoil")).unwrap();
    bytes[65_536 + 4000] ^= 0x10;
    fs::write(space.path("a.trefoil"), &bytes).unwrap();
    for more in [&[][..], &["--processes"]] {
        fails(more, "a.trefoil is corrupted in section `region 0`");
    }
}

fn running_is_over(child: &Child) -> bool {
    fs::read_to_string(format!("/proc/{}/stat", child.id())).is_ok_and(|stat| stat.contains(") Z "))
}

#[test]
fn a_full_disk_ends_the_stream_in_one_line_and_keeps_finished_clips() {
    let space = workspace();
    // Packs the model, so that the limit below is about clips.
    stream(&space, "first", &["--format", "latents", "--count", "1"]);
    fs::write(space.path("one.txt"), "a red circle moves left over a dark background\n".repeat(3)).unwrap();
    let run = |limit: u32, size: &str| {
        let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$@\"");
        Command::new("bash")
            .current_dir(space.path(""))
            .env("TREFOIL_CACHE", space.path("cache"))
            .args(["-c", &script, "bash", env!("CARGO_BIN_EXE_trefoil"), "video", "stream", &model(), "one.txt"])
            .args(["-o", "out", "--format", "latents", "--frames", "17", "--size", size])
            .output()
    };
    // A latent of 5×8×8 has 20 KiB of values; files may have 8.
    let Ok(output) = run(8, "64x64") else {
        eprintln!("skipped: no bash to set a limit with");
        return;
    };
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    let errors: Vec<&str> = message.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{message}");
    assert!(
        errors[0].contains("cannot write out/0001-") && errors[0].contains("0 of 3 clips are finished"),
        "{message}"
    );
    assert_eq!(names(&space.path("out")), ["job.json"], "nothing half-written");
    // With room it goes on.
    assert!(run(4096, "64x64").unwrap().status.success());
    assert_eq!(clips(&space, "out"), 3);
}

#[test]
fn what_is_wrong_is_one_line_before_anything_is_made() {
    let space = workspace();
    let model = model();
    let fails = |more: &[&str], want: &str| {
        let message = space.fails(["video", "stream"].iter().chain(more), 2);
        assert!(message.contains(want), "{message}");
        assert!(!space.path("out").exists(), "nothing was made: {message}");
    };
    for (file, bytes, want) in [
        ("empty.txt", &b"\n# nothing\n"[..], "holds no prompt"),
        ("latin.txt", b"ok\nf\xfcnf\n", "line 2 is not UTF-8"),
        ("blank.txt", b"a red circle\n&nbsp;\n", "prompt 2: it has no text"),
    ] {
        fs::write(space.path(file), bytes).unwrap();
        fails(&[&model, file, "-o", "out"], want);
    }
    fails(&[&model, "nowhere.txt", "-o", "out"], "cannot read nowhere.txt");
    fails(&["nowhere", "prompts.txt", "-o", "out"], "nowhere");
    fails(&[&model, "-o", "out"], "PROMPTS.txt");
    fails(&[&model, "prompts.txt"], "-o DIR");
    fails(&[&model, "prompts.txt", "-o", "out", "--count", "0"], "0 clips");
    fails(&[&model, "prompts.txt", "-o", "out", "--frames", "6"], "5 or 9");
    fails(&[&model, "prompts.txt", "-o", "out", "--size", "8192x8192", "--frames", "400001"], "of memory (decoder");
    fails(&[&model, "prompts.txt", "-o", "out", "--decoder-ms", "5"], "--format latents");
    fails(&["prompts.txt", "prompts.txt", "-o", "out"], "no folder");
    fails(&[&model, "prompts.txt", "-o", "out", "--engines", "cpu@0,cpu@4000"], "core 4000 is not among");
    fails(&[&model, "prompts.txt", "-o", "out", "--path", "w8a8,w8a8"], "2 paths for 1 engines");
    fails(&[&model, "prompts.txt", "-o", "out", "--engines", "opencl@0", "--path", "f32"], "not of f32");
    fails(&[&model, "prompts.txt", "-o", "out", "--fps", "0"], "0 frames a second; it must be 1 to 1000");
    fails(
        &[&model, "prompts.txt", "-o", "out", "--trace", "prompts.txt"],
        "prompts.txt is read and would be overwritten",
    );
    if let Some(engines) = two_engines() {
        fails(&[&model, "prompts.txt", "-o", "out", "--engines", engines, "--cut", "37"], "does not lie in 0..=36");
    }
    fails(
        &[&model, "prompts.txt", "-o", "prompts.txt/out"],
        "cannot write to prompts.txt/out: prompts.txt is a file; name another folder",
    );
    // A model folder without one of its parts.
    let copied = |part: &str| {
        let folder = space.path(&format!("without-{part}"));
        let copy = Command::new("cp").arg("-r").arg(&model).arg(&folder).status().unwrap();
        assert!(copy.success());
        fs::remove_dir_all(folder.join(part)).unwrap();
        format!("without-{part}")
    };
    fails(&[&copied("tokenizer"), "prompts.txt", "-o", "out"], "no tokenizer.json in it");
    fails(&[&copied("vae_decoder"), "prompts.txt", "-o", "out"], "a pipeline folder without vae/ or vae_decoder/");
    fs::create_dir(space.path("mine")).unwrap();
    fs::write(space.path("mine/letter.txt"), b"dear").unwrap();
    fails(&[&model, "prompts.txt", "-o", "mine"], "mine: it is not empty and holds no job.json");

    space.run(["video", "pack", &model, "-o", "a.trefoil"]);
    let mut bytes = fs::read(space.path("a.trefoil")).unwrap();
    bytes[65_536 + 1000] ^= 1;
    fs::write(space.path("bad.trefoil"), &bytes).unwrap();
    let arguments = arguments("damaged", &["--artefact", "bad.trefoil", "--format", "latents"]);
    assert!(space.fails(arguments, 2).contains("is corrupted in section `region 0`"));
    assert_eq!(clips(&space, "damaged"), 0);
    // Scales of another schedule do not fit.
    space.run(["video", "encode", &model, "prompts.txt", "-o", "t.safetensors"]);
    fails(&["a.trefoil", "--text", "t.safetensors", "--format", "mp4", "-o", "out"], "needs a decoder");
    fails(&["a.trefoil", "prompts.txt", "-o", "out"], "is no folder");
    fails(&["a.trefoil", "--text", "t.safetensors", "--latent", "1,5,8", "-o", "out"], "multiples of 2");
    // Two processes do not work in one folder.
    let busy = trefoil_video::job::Job::open(
        &space.path("busy"),
        trefoil_video::job::JobState::new(std::collections::BTreeMap::new(), Vec::new()),
        true,
    );
    let message = space.fails(["video", "stream", &model, "prompts.txt", "-o", "busy"], 2);
    assert!(message.contains("another process is working in busy"), "{message}");
    drop(busy);
}
