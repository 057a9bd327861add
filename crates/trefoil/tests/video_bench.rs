//! `trefoil bench quality` and `trefoil bench decoder`.

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
    let [whole, tiled, coded, coded_tiled] = [0, 1, 2, 3].map(|index| &told["rows"][index]);
    assert_eq!(told["rows"].as_array().unwrap().len(), 4, "{told}");
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
