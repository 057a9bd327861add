//! `trefoil bench video`, `trefoil bench quality` and `trefoil bench decoder`.

mod common;

use common::{Workspace, json};
use serde_json::Value;
use std::path::PathBuf;

fn model() -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/demo-model").display().to_string()
}

/// The row of a set whose paths and cut are these.
fn row<'v>(set: &'v Value, paths: &[&str], cut: Option<u64>) -> &'v Value {
    let rows = set["rows"].as_array().unwrap();
    let fits = |row: &&Value| {
        row["paths"] == serde_json::json!(paths) && row["cut"].as_u64() == cut && row["decoder"] == "f32"
    };
    rows.iter().find(fits).unwrap_or_else(|| panic!("no row {paths:?} {cut:?} in {set}"))
}

#[test]
fn quality_reads_the_clips_of_every_path_and_cut() {
    let space = Workspace::new();
    let model = model();
    // One core: clips this small gain nothing from a second, and tests run beside others.
    let cuts = "0,17,36";
    let arguments = ["bench", "quality", &model, "--clips", "3", "--cuts", cuts, "--cores", "0", "--json"];
    let told = json(&space.output(arguments));
    assert_eq!((told["blocks"].as_u64(), told["steps"].as_u64()), (Some(36), Some(6)));
    assert_eq!(told["calibration_clips"].as_u64(), Some(8));
    let sets = told["sets"].as_array().unwrap();
    let names: Vec<_> = sets.iter().map(|set| set["split"].as_str().unwrap()).collect();
    assert_eq!(names, ["held-out", "training"]);
    for set in sets {
        assert_eq!((set["clips"].as_u64(), set["rows"].as_array().unwrap().len()), (Some(3), 7));
        for row in set["rows"].as_array().unwrap() {
            assert_eq!((row["accuracy"]["pairs"].as_u64(), row["shuffled"]["pairs"].as_u64()), (Some(3), Some(6)));
            // Colours have always been obeyed; three clips of distinct combinations cannot all fit each other's prompts.
            assert_eq!(row["accuracy"]["colour"].as_f64(), Some(1.0), "{row}");
            assert!(row["shuffled"]["all"].as_f64().unwrap() < 0.5, "{row}");
            assert!((0.5..=1.0).contains(&row["subject_consistency"].as_f64().unwrap()), "{row}");
        }
        assert_eq!(row(set, &["f32"], None)["against_f32"], Value::Null);
        // A cut at either end leaves one path: the same clips, so the same numbers.
        let pair = ["w8a8", "w8a16"];
        assert_eq!(row(set, &pair, Some(0))["against_f32"], row(set, &["w8a16"], None)["against_f32"]);
        assert_eq!(row(set, &pair, Some(36))["against_f32"], row(set, &["w8a8"], None)["against_f32"]);
        let psnr = |row: &Value| row["against_f32"]["psnr_db"]["mean"].as_f64().unwrap();
        let [rounded, between, coarse] =
            [row(set, &["w8a16"], None), row(set, &pair, Some(17)), row(set, &["w8a8"], None)].map(psnr);
        assert!(rounded > 25.0 && between > 20.0 && coarse > 20.0, "{rounded} {between} {coarse}");
        let decoded = set["rows"].as_array().unwrap().last().unwrap();
        assert_eq!(decoded["decoder"], "int8");
        assert!(psnr(decoded) > 30.0, "{decoded}");
        assert!(rounded > coarse, "INT8 activations cost more than FP16 ones: {rounded} {coarse}");
    }
}

#[test]
fn quality_says_what_is_wrong() {
    let space = Workspace::new();
    let model = model();
    let fails = |arguments: &[&str]| space.fails(["bench", "quality"].into_iter().chain(arguments.iter().copied()), 2);
    assert!(fails(&["nowhere"]).contains("nowhere"));
    assert!(space.usage(["bench", "quality", &model, "--clips", "0"]).contains("--clips"));
    assert!(fails(&[&model, "--deployed", "w8a8"]).contains("two paths"));
    assert!(space.usage(["bench", "quality", &model, "--deployed", "w8a8,x"]).contains("choose f32, w8a16 or w8a8"));
    assert!(fails(&[&model, "--cuts", "37"]).contains("37"));
}

#[test]
fn the_decoder_is_measured_in_processes_of_its_own() {
    let space = Workspace::new();
    let model = model();
    let arguments =
        ["bench", "decoder", &model, "--size", "64x48", "--frames", "9", "--tile", "6", "--cores", "0", "--json"];
    let told = json(&space.output(arguments));
    assert_eq!((told["latent_frames"].as_u64(), told["origin"].as_str()), (Some(3), Some("measured")));
    let rows = told["rows"].as_array().unwrap();
    let is_on_device = |row: &&Value| row["name"].as_str().unwrap().contains("opencl");
    // Where there is an OpenCL device it takes its turn, too; not in tiles.
    let (device, cpu): (Vec<&Value>, Vec<&Value>) = rows.iter().partition(is_on_device);
    let [whole, tiled, coded, coded_tiled] = cpu[..] else { panic!("{told}") };
    if device.is_empty() {
        let set = |name| std::env::var_os(name).is_some();
        let required = set("TREFOIL_REQUIRE_BACKENDS") && !set("TREFOIL_TEST_WITHOUT_OPENCL");
        assert!(!required, "no OpenCL device: {told}");
        eprintln!("skipped: the decoder on OpenCL, because no device is here");
    } else {
        let [whole, coded] = device[..] else { panic!("{told}") };
        let against = |row: &Value| row["frames_against_f32"]["psnr"].as_f64().unwrap();
        assert!(against(whole) > 80.0 && against(coded) > 25.0, "{told}");
    }
    assert_eq!((whole["path"].as_str(), coded["path"].as_str()), (Some("f32"), Some("int8")));
    assert_eq!((whole["tiles"].is_null(), tiled["tiles"]["stride"].as_u64()), (true, Some(5)));
    assert_eq!(whole["runs"][0]["frame_seconds"].as_array().unwrap().len(), 3);
    for row in [whole, tiled, coded, coded_tiled] {
        assert!(row["seconds_per_latent_frame"].as_f64().unwrap() > 0.0);
        let own = row["own_peak_bytes"].as_u64().unwrap();
        let predicted = row["runs"][0]["predicted_bytes"].as_u64().unwrap();
        // The allocator and the frames kept for comparison come on top.
        assert!(own > predicted / 2 && own < predicted + (64 << 20), "{own} {predicted}");
    }
    assert_eq!(whole["frames_against_f32"], Value::Null);
    // INT8 changes little, tiles of six latent pixels more.
    let psnr = |row: &Value| row["frames_against_f32"]["psnr"].as_f64().unwrap();
    assert!(psnr(coded) > 25.0 && psnr(tiled) > 10.0, "{coded} {tiled}");
    let bytes = |row: &Value| row["runs"][0]["predicted_bytes"].as_u64().unwrap();
    assert!(bytes(coded) * 2 < bytes(whole), "{} {}", bytes(coded), bytes(whole));
}

#[test]
fn the_decoder_benchmark_says_what_is_wrong() {
    let space = Workspace::new();
    let model = model();
    let fails =
        |arguments: &[&str], code| space.fails(["bench", "decoder"].into_iter().chain(arguments.iter().copied()), code);
    assert!(fails(&["nowhere"], 2).contains("nowhere"));
    assert!(fails(&[&model, "--frames", "8"], 2).contains("5 or 9"));
    assert!(fails(&[&model, "--size", "60x64"], 2).contains("multiples of 8"));
    assert!(fails(&[&model, "--tile", "8", "--tile-stride", "9"], 2).contains("stride"));
    assert!(fails(&[&model, "--size", "64x64", "--python", "no-python"], 2).contains("no-python"));
    #[cfg(unix)]
    {
        // A Python that ends without a word about versions.
        assert!(fails(&[&model, "--size", "64x64", "--python", "/bin/false"], 1).contains("it said nothing"));
    }
}

/// Two cores that this process may use.
fn two_cores() -> bool {
    let has_two = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
    if !has_two {
        eprintln!("skipped: this process may use one core only");
    }
    has_two
}

/// `bench video` on a small random model.
fn bench_video(space: &Workspace, layers: &str, more: &[&str]) -> Value {
    let mut arguments = vec!["bench", "video", "--layers", layers, "--tokens", "16", "--text-rows", "8", "--json"];
    arguments.extend(more);
    json(&space.output(arguments))
}

fn configuration<'v>(report: &'v Value, name: &str) -> &'v Value {
    let rows = report["configurations"].as_array().unwrap();
    rows.iter()
        .find(|row| row["name"].as_str().is_some_and(|text| text.starts_with(name)))
        .unwrap_or_else(|| panic!("no {name} in {report:#}"))
}

#[test]
fn one_run_shows_rates_cuts_deadlines_and_weights() {
    if !two_cores() {
        return;
    }
    let space = Workspace::new();
    let report = bench_video(&space, "2", &["--clips", "2", "--rounds", "1", "--decode", "1,4,4"]);
    assert_eq!((report["blocks"].as_u64(), report["origin"].as_str()), (Some(12), Some("measured")));
    // Table 1: all three rates, alone and together.
    let table = &report["table1"];
    for rate in table["engines"].as_array().unwrap() {
        assert!(rate["solo_ms"]["median"].as_f64() > Some(0.0) && rate["corun_ms"]["median"].as_f64() > Some(0.0));
    }
    assert!(table["slowdown"].as_array().unwrap().iter().all(|slowdown| slowdown.as_f64() > Some(0.0)));
    assert!(table["last_stage"]["solo_ms"]["median"].as_f64() > Some(0.0), "{table:#}");
    assert!(table["last_stage"]["corun_ms"]["median"].as_f64() > Some(0.0), "{table:#}");
    assert_eq!(table["last_stage"]["origin"], "measured");
    // Table 5: every chooser's cut ran.
    let cuts = report["cuts"]["table5"].as_array().unwrap();
    let choosers: Vec<&str> = cuts.iter().map(|cut| cut["chooser"].as_str().unwrap()).collect();
    assert_eq!(choosers, ["corun-rates", "solo-rates", "block-rates", "step-before", "step-after"]);
    for cut in cuts {
        let number = cut["cut"].as_u64().unwrap();
        let row = configuration(&report, &format!("pipeline, cut {number}"));
        assert_eq!((row["cut"].as_u64(), &row["ms_per_clip"]["median"]), (Some(number), &cut["measured_ms"]));
        assert!(cut["predicted_ms"].as_f64() > Some(0.0) && cut["stages_ms"][1].as_f64() > Some(0.0), "{cut:#}");
        let is_inside = (1..12).contains(&number);
        assert_eq!(row["handoffs"].as_u64(), Some(if is_inside { 2 } else { 0 }), "{row:#}");
        // The latent, and inside a step the hidden state: 16 tokens of 64 and 128 values.
        let bytes = if number % 2 == 0 { 4096 } else { 4096 + 8192 };
        assert_eq!(row["handoff_bytes"].as_u64(), Some(if is_inside { 2 * bytes } else { 0 }), "{row:#}");
    }
    let step = |index: usize| cuts[index]["cut"].as_u64().unwrap() % 2;
    assert_eq!((step(3), step(4)), (0, 0));
    for row in report["configurations"].as_array().unwrap() {
        assert!(row["predicted_ms"].as_f64() > Some(0.0) && row["gain"].as_f64() > Some(0.0), "{row:#}");
        let needs: Vec<f64> = row["needs"].as_array().unwrap().iter().map(|factor| factor.as_f64().unwrap()).collect();
        assert!(needs[0] <= needs[1], "{row:#}");
        for deadline in row["slo"].as_array().unwrap() {
            let factor = deadline["factor"].as_f64().unwrap();
            let all = if factor >= needs[1] { Some(1.0) } else { deadline["share"].as_f64() };
            assert_eq!(deadline["share"].as_f64(), all, "{row:#}");
        }
        // One copy, except where each engine has its own.
        let copies = if row["name"] == "data-parallel" { 2 } else { 1 };
        let Some(memory) = row["memory"].as_object() else {
            eprintln!("skipped: the kernel tells nothing about mappings");
            continue;
        };
        let artefacts = memory["artefacts"].as_array().unwrap();
        assert_eq!(artefacts.len(), copies, "{row:#}");
        let copies = copies as f64;
        let share = row["weights_over_artefact"].as_f64().unwrap();
        assert!(share > copies - 0.5 && share <= copies * 1.05, "{row:#}");
        assert!(artefacts.iter().all(|artefact| artefact["mappings"].as_u64() > Some(0)), "{row:#}");
    }
    let [first, second] =
        [0, 1].map(|index| configuration(&report, "data-parallel")["memory"]["artefacts"][index]["inode"].as_u64());
    assert!(first != second || first.is_none(), "two files");
}

#[test]
fn engines_in_processes_share_one_copy_of_the_weights() {
    if !two_cores() {
        return;
    }
    let space = Workspace::new();
    let report = bench_video(&space, "1", &["--clips", "2", "--rounds", "1", "--processes"]);
    assert_eq!((report["processes"].as_bool(), report["weights"]["copies"].as_u64().is_some()), (Some(true), true));
    let pipeline = configuration(&report, "pipeline");
    let Some(memory) = pipeline["memory"].as_object() else {
        eprintln!("skipped: the kernel tells nothing about mappings");
        return;
    };
    let processes = memory["processes"].as_array().unwrap();
    let names: Vec<&str> = processes.iter().map(|process| process["what"].as_str().unwrap()).collect();
    assert_eq!(names[1..], ["cpu@0", "cpu@1"], "{pipeline:#}");
    // Each process maps the one file; together they hold it once, though each has it resident.
    let artefact = &memory["artefacts"][0];
    let (all, once) = (artefact["resident_bytes"].as_u64().unwrap(), artefact["proportional_bytes"].as_u64().unwrap());
    let size = artefact["bytes"].as_u64().unwrap();
    assert!(once <= size + size / 20, "{pipeline:#}");
    // On a machine whose cores are not free alike, one engine may get all blocks.
    let (cut, blocks) = (pipeline["cut"].as_u64().unwrap(), report["blocks"].as_u64().unwrap());
    assert!(cut.is_multiple_of(blocks) || all > once + once / 2, "{pipeline:#}");
    assert!(processes.iter().all(|process| process["resident"]["anonymous_bytes"].as_u64() > Some(0)));
    // Two files, of which an engine that gets no clip (the other may take both) touches little.
    let parallel = configuration(&report, "data-parallel");
    let files = parallel["memory"]["artefacts"].as_array().unwrap();
    assert!(files.len() == 2 && files[0]["inode"] != files[1]["inode"], "{parallel:#}");
    let held: Vec<u64> = files.iter().map(|file| file["resident_bytes"].as_u64().unwrap()).collect();
    let is_shared_out = held.iter().all(|&bytes| bytes > size / 2);
    assert!(parallel["weights_over_artefact"].as_f64() > Some(if is_shared_out { 1.5 } else { 0.9 }), "{parallel:#}");
}

#[test]
fn shaped_engines_keep_the_order_of_the_paper() {
    if !two_cores() {
        return;
    }
    let space = Workspace::new();
    // The paper's 49-frame rates, a ten-thousandth of a second for a second and blocks ten times as long: a balance of its own, fast.
    let engines = "cpu@0=12.633:13.255ms,cpu@1=3.352:3.163ms";
    let flags =
        ["--engines", engines, "--decoder-ms", "26.7", "--decoder-solo-ms", "30.8", "--clips", "4", "--rounds", "1"];
    let report = bench_video(&space, "3", &flags);
    assert_eq!((report["blocks"].as_u64(), report["origin"].as_str()), (Some(18), Some("emulated")));
    let table = &report["table1"];
    assert_eq!(table["last_stage"]["solo_ms"]["median"].as_f64(), Some(30.8));
    assert_eq!(
        (table["last_stage"]["origin"].as_str(), table["last_stage"]["corun_ms"]["median"].as_f64()),
        (Some("emulated"), Some(26.7))
    );
    let ms = |name: &str| configuration(&report, name)["ms_per_clip"]["median"].as_f64().unwrap();
    let cut = report["cuts"]["table5"][0]["cut"].as_u64().unwrap();
    // 18 blocks: (18 · 3.163 + 26.7) / (13.255 + 3.163) is 5.1, with a little of the host.
    assert!((4..=6).contains(&cut), "{cut}");
    let (npu, gpu) = (ms("cpu@1=3.352:3.163ms alone"), ms("cpu@0=12.633:13.255ms alone"));
    // A shaped engine is never faster than its rate, whatever else the machine does.
    assert!(npu >= 18.0 * 3.352 + 30.8 - 0.5 && gpu >= 18.0 * 12.633 + 30.8 - 0.5, "{npu} {gpu}");
    assert!(ms(&format!("pipeline, cut {cut}")) < npu && npu < gpu, "{report:#}");
    assert!(report["verdict"].as_str().is_some_and(|verdict| verdict.contains("the rates predict")), "{report:#}");
    let fails = |more: &[&str]| space.fails(["bench", "video"].into_iter().chain(more.iter().copied()), 2);
    assert!(fails(&["--engines", engines, "--hetero-tensor-ms", "3"]).contains("an opencl engine"));
    assert!(fails(&["--decoder-ms=-1"]).contains("--decoder-ms -1 is no time"));
    assert!(space.usage(["bench", "video", "--decode", "1,4,4", "--decoder-ms", "3"]).contains("cannot be used with"));
}
