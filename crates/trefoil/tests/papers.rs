//! `trefoil pipeline`, `trefoil paper` and `trefoil plan --on`: nothing needs to be installed.

mod common;

use common::{Workspace, json, stdout};

#[test]
fn pipeline_prints_cut_period_and_idle() {
    let space = Workspace::new();
    let found = json(&space.output(["pipeline", "--rates", "12.8,3.101,275", "--blocks", "180", "--json"]));
    let number = |key: &str| found[key].as_f64().unwrap();
    assert_eq!(found["cut"], 52);
    assert!((number("period") - 671.928).abs() < 1e-9 && (number("idle") - 6.328).abs() < 1e-9, "{found}");
    let step = json(&space.output(["pipeline", "--rates", "12.8,3.101,275", "--cut", "60", "--json"]));
    assert!((step["idle"].as_f64().unwrap() - 120.88).abs() < 1e-9 && step["idle_engine"] == "second", "{step}");
    assert_eq!(step["best_cut"], 52);
    let text = stdout(&space.output(["pipeline", "--rates", "12.8,3.101,275", "--cut", "30"]));
    assert!(text.contains("the first engine waits 356.150") && text.contains("predicted"), "{text}");
}

#[test]
fn pipeline_divides_a_stream_from_a_file() {
    let space = Workspace::new();
    let stream = r#"{
        "units": [{"name": "gpu"}, {"name": "npu", "memory_bytes": 20}, {"name": "cpu"}],
        "blocks": [
            {"cost": [4, 2, 9], "weights": 0, "weight_bytes": 10},
            {"cost": [4, 2, 9], "weights": 1, "weight_bytes": 10},
            {"cost": [4, 2, 9], "weights": 2, "weight_bytes": 10},
            {"cost": [null, null, 3]}
        ]
    }"#;
    std::fs::write(space.path("stream.json"), stream).unwrap();
    let found = json(&space.output(["pipeline", "--problem", "stream.json", "--json"]));
    // The NPU holds two of three weights; the decoder is the CPU's.
    assert_eq!((found["period"].as_f64(), found["exact"].as_bool()), (Some(4.0), Some(true)), "{found}");
    assert_eq!(found["stages"].as_array().map(Vec::len), Some(3));
    for (name, text, want) in [
        ("empty.json", "{}", "units"),
        ("key.json", r#"{"units": [{"name": "a"}], "blocks": [], "colour": 1}"#, "colour"),
        ("blocks.json", r#"{"units": [{"name": "a"}], "blocks": []}"#, "no blocks"),
    ] {
        std::fs::write(space.path(name), text).unwrap();
        let message = space.fails(["pipeline", "--problem", name], 2);
        assert!(message.contains(want), "{message}");
    }
}

#[test]
fn bad_rates_are_one_line() {
    let space = Workspace::new();
    for (arguments, want) in [
        (vec!["--rates", "1,2"], "2 number(s)"),
        (vec!["--rates", "1,x,2"], "`x`"),
        (vec!["--rates", "-1,2,3"], "T_G is -1"),
        (vec!["--rates", "1,nan,3"], "T_N is NaN"),
        (vec!["--rates", "1,1,1", "--blocks", "0"], "no blocks"),
        (vec!["--rates", "1,1,1", "--blocks", "-5"], "-5"),
        (vec!["--rates", "1,1,1", "--cut", "181"], "cut 181"),
        (vec!["--problem", "none.json"], "none.json"),
        (vec![], "--rates"),
    ] {
        let message = space.fails(["pipeline"].into_iter().chain(arguments), 2);
        assert!(message.contains(want), "{message}");
    }
}

#[test]
fn papers_are_recomputed() {
    let space = Workspace::new();
    let found = json(&space.output(["paper", "heterovdiff", "--json"]));
    let rows: Vec<_> =
        found["sections"].as_array().unwrap().iter().flat_map(|s| s["rows"].as_array().unwrap()).collect();
    let row = |name: &str| *rows.iter().find(|row| row["name"] == name).unwrap();
    for (name, cut) in [("cut_corun", 51.0), ("cut_no_vae", 34.0), ("cut_solo", 57.0), ("cut_table1", 52.0)] {
        assert_eq!(row(name)["recomputed"]["low"].as_f64(), Some(cut), "{name}");
    }
    assert_eq!(row("gpu_trajectory")["verdict"], "contradicts");
    assert_eq!(
        (row("gpu_trajectory")["published"].as_str(), row("gpu_trajectory")["place"].as_str()),
        (Some("2,350"), Some("3.1"))
    );
    let text = stdout(&space.output(["paper", "heterovdiff"]));
    assert!(text.contains("cannot be checked") && text.contains("CONTRADICTS"), "{text}");
    assert!(space.fails(["paper", "heterovdiff", "--sensitivity"], 2).contains("bident"));
    let found = json(&space.output(["paper", "bident", "--json"]));
    assert_eq!((found["pairs"].as_array().unwrap().len(), found["origin"].as_str()), (190, Some("simulated")));
    assert!(found["pairs"][0]["cap"]["speedup"].as_f64().unwrap() > 1.0);
}

#[test]
fn a_model_is_planned_for_a_machine_that_is_not_here() {
    let space = Workspace::with_model();
    let plan = json(&space.output(["plan", "--on", "sim:lunar-lake", "small.onnx", "--json"]));
    assert_eq!(plan["timeline"]["origin"], "simulated");
    for segment in plan["segments"].as_array().unwrap() {
        assert_eq!(segment["cost"]["origin"], "simulated", "{segment}");
        assert!(segment["unit"].as_str().unwrap().starts_with("sim:lunar-lake/"));
    }
    let text = stdout(&space.output([
        "plan",
        "--on",
        "sim:lunar-lake",
        "small.onnx",
        "--method",
        "sequential",
        "-u",
        "sim:lunar-lake/NPU",
    ]));
    assert!(
        text.contains("every number is simulated") && text.contains("sim:lunar-lake/npu")
            || text.contains("sim:lunar-lake/NPU"),
        "{text}"
    );
    for (machine, want) in [("lunar-lake", "sim:SOC"), ("sim:moon", "snapdragon-8-elite"), ("sim:", "sim:SOC")] {
        assert!(space.fails(["plan", "--on", machine, "small.onnx"], 2).contains(want), "{machine}");
    }
}
