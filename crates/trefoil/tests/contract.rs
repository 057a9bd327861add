//! The command contract, end to end, on the embedded backend: nothing needs to be installed.

mod common;

use common::{Workspace, json, stdout, trefoil};
use serde_json::Value;

#[test]
fn units_lists_every_backend_with_a_reason_and_a_fix() {
    let output = trefoil().args(["units", "--json"]).output().unwrap();
    let units = json(&output);
    let units = units["units"].as_array().unwrap();
    let find = |prefix: &str| units.iter().filter(|unit| unit["unit"].as_str().unwrap().starts_with(prefix)).count();
    assert!(find("rten:CPU") == 1 && find("openvino:") >= 1 && find("ort:") >= 1 && find("sim:") >= 2, "{units:#?}");
    for unit in units {
        let available = unit["available"].as_bool().unwrap();
        let text = |key: &str| unit[key].as_str().map(str::len).unwrap_or_default();
        assert!(available || (text("reason") > 0 && text("fix") > 0), "{unit}");
    }
}

#[test]
fn profile_plan_run_on_the_embedded_unit() {
    let space = Workspace::with_model();
    let profile = space.path("p.json");
    space.run(["profile", "small.onnx", "-u", "rten:CPU", "--quick", "-o", "p.json"]);
    let written: Value = serde_json::from_slice(&std::fs::read(&profile).unwrap()).unwrap();
    assert_eq!((written["format"].as_str(), written["version"].as_u64()), (Some("trefoil-profile"), Some(1)));

    let plan = json(&space.output(["plan", "p.json", "--json", "-o", "plan.json"]));
    assert_eq!(plan["format"], "trefoil-plan");
    assert!(plan["claimed"].as_f64().unwrap() > 0.0);

    let run = json(&space.output([
        "run",
        "small.onnx",
        "-u",
        "rten:CPU",
        "--quick",
        "--rounds",
        "2",
        "--verify",
        "--json",
        "--output",
        "out.npz",
        "--report",
        "r.html",
        "--trace",
        "t.json",
    ]));
    assert!(run["baselines"]["rten:CPU"].as_f64().unwrap() > 0.0, "{run:#}");
    for key in ["method", "predicted_ms", "measured_ms", "model_bound_ms", "segments"] {
        assert!(!run["plan"][key].is_null(), "{key} of {run:#}");
    }
    // The unit, or its one-core mode: which is faster is the machine's affair.
    let of_rten = |unit: &Value| unit.as_str().is_some_and(|unit| unit == "rten:CPU" || unit.starts_with("rten:CPU@"));
    assert!(of_rten(&run["plan"]["segments"][0]["unit"]), "{run:#}");
    assert!(run["plan"]["segments"][0]["operators"].as_array().is_some_and(|operators| !operators.is_empty()));
    assert!(of_rten(&run["winner"]), "{run:#}");
    assert_eq!(run["verify"]["ok"], true);
    let report = std::fs::read_to_string(space.path("r.html")).unwrap();
    assert!(report.contains("small") && !report.contains("http://") && !report.contains("https://"));
    let trace: Value = serde_json::from_slice(&std::fs::read(space.path("t.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 4));
    let outputs = trefoil_onnx::npz::read_npz(&space.path("out.npz")).unwrap();
    let scores = outputs.iter().find(|tensor| tensor.info().name == "scores").unwrap();
    let sum: f64 = scores.to_f64().iter().sum();
    assert!((sum - 1.0).abs() < 1e-4, "softmax sums to {sum}");
}

#[test]
fn a_hand_made_split_is_planned_compared_and_verified() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU", "rten:CPU@0"]);
    let split = r#"{"0": "rten:CPU@0"}"#;
    std::fs::write(space.path("split.json"), split).unwrap();
    let failed = space.fails(["plan", "p.json", "--import", "split.json", "-o", "plan.json"], 2);
    assert!(failed.contains("operator"), "an incomplete split names what is missing: {failed}");
    let inspected = json(&space.output(["inspect", "small.onnx", "--json"]));
    let count = inspected["operators"].as_array().unwrap().len();
    let split: serde_json::Map<String, Value> = (0..count)
        .map(|index| (index.to_string(), Value::from(if index < count / 2 { "rten:CPU@0" } else { "rten:CPU" })))
        .collect();
    std::fs::write(space.path("split.json"), serde_json::to_vec(&split).unwrap()).unwrap();
    space.run(["plan", "p.json", "--import", "split.json", "-o", "plan.json"]);
    let run = json(&space.output([
        "run",
        "small.onnx",
        "--profile",
        "p.json",
        "--plan",
        "plan.json",
        "--quick",
        "--rounds",
        "1",
        "--json",
        "--verify",
    ]));
    assert_eq!(run["plan"]["segments"].as_array().unwrap().len(), 2, "{run:#}");
    assert_eq!(run["verify"]["ok"], true);
}

#[test]
fn explain_prices_an_operator_on_every_unit() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU", "rten:CPU@0"]);
    let text = stdout(&space.output(["explain", "p.json", "0"]));
    assert!(text.contains("rten:CPU@0") && text.contains("rten:CPU"), "{text}");
    assert!(space.fails(["explain", "p.json", "no-such-operator"], 2).contains("no-such-operator"));
}

#[test]
fn a_deleted_measurement_stops_planning_with_its_name() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU"]);
    let mut profile: Value = serde_json::from_slice(&std::fs::read(space.path("p.json")).unwrap()).unwrap();
    let measurements = profile["measurements"].as_array_mut().unwrap();
    let at = measurements.iter().position(|m| m["id"].as_str().unwrap().starts_with("operator/")).unwrap();
    let id = measurements.remove(at)["id"].as_str().unwrap().to_owned();
    std::fs::write(space.path("p.json"), serde_json::to_vec(&profile).unwrap()).unwrap();
    let message = space.fails(["plan", "p.json"], 2);
    assert!(message.contains(&id), "{message} names {id}");
}

#[test]
fn simulated_units_plan_without_hardware() {
    let space = Workspace::with_model();
    simulated(&space, "p.json");
    let text = stdout(&space.output(["plan", "p.json", "--method", "sequential"]));
    assert!(text.contains("simulated"), "a simulated number is labelled: {text}");
}

/// A profile of the sample model on a simulated SoC: several unlike units without hardware.
fn simulated(space: &Workspace, output: &str) {
    space.run([
        "profile",
        "small.onnx",
        "-u",
        "sim:lunar-lake/CPU",
        "-u",
        "sim:lunar-lake/GPU",
        "-u",
        "sim:lunar-lake/NPU",
        "-o",
        output,
    ]);
}

#[test]
fn every_method_prints_the_contract_and_a_certificate_that_holds() {
    let space = Workspace::with_model();
    simulated(&space, "p.json");
    let profile: Value = serde_json::from_slice(&std::fs::read(space.path("p.json")).unwrap()).unwrap();
    let operators = profile["models"][0]["operators"].as_array().unwrap().len();
    for (method, objective) in [
        ("auto", "latency"),
        ("sequential", "latency"),
        ("phases", "latency"),
        ("phases-exclusive", "energy"),
        ("dag", "latency"),
        ("dag", "energy"),
        ("interval", "energy"),
        ("concurrent", "latency"),
        ("pipeline", "throughput"),
    ] {
        let plan = json(&space.output([
            "plan",
            "p.json",
            "--method",
            method,
            "--objective",
            objective,
            "--budget",
            "50ms",
            "--json",
            "-o",
            "plan.json",
            "--certificate",
            "c.json",
        ]));
        for key in ["makespan_ms", "gap", "exact", "timeline", "claimed", "method"] {
            assert!(!plan[key].is_null(), "{key} of {method} for {objective}: {plan:#}");
        }
        let bound = if objective == "energy" { "model_bound_j" } else { "model_bound_ms" };
        assert!(plan[bound].as_f64().unwrap() > 0.0, "{bound} of {method}");
        assert_eq!(plan["period_ms"].is_null(), objective != "throughput");
        assert_eq!(plan["assignments"].as_array().unwrap().len(), operators, "{method}");
        assert!(plan["assignments"][0]["unit"].as_str().unwrap().starts_with("sim:lunar-lake/"));
        let paper: Value = serde_json::from_slice(&std::fs::read(space.path("c.json")).unwrap()).unwrap();
        let verdict = trefoil_check::check(&paper, std::slice::from_ref(&profile))
            .unwrap_or_else(|error| panic!("{method} for {objective}: {error}"));
        assert!(verdict.bound.is_some(), "{method}");
    }
    let listed = stdout(&space.output(["plan", "--list-methods"]));
    for method in ["dag", "phases", "aligned", "joint", "concurrent", "pipeline", "pareto", "sequential"] {
        assert!(listed.lines().any(|line| line.starts_with(method)), "{method} of {listed}");
    }
}

#[test]
fn several_profiles_are_planned_together() {
    let space = Workspace::with_model();
    simulated(&space, "p.json");
    for method in ["auto", "concurrent", "aligned", "joint", "joint-units"] {
        let plan = json(&space.output(["plan", "p.json", "p.json", "--method", method, "--budget", "50ms", "--json"]));
        assert_eq!(plan["models"].as_array().unwrap().len(), 2, "{method}: {plan:#}");
        assert!(plan["makespan_ms"].as_f64().unwrap() > 0.0);
    }
    let text = space.fails(["plan", "p.json", "p.json", "p.json", "--method", "joint"], 2);
    assert!(text.contains("two"), "{text}");
    let text = space.fails(["plan", "p.json", "p.json", "--method", "sequential"], 2);
    assert!(text.contains("concurrent"), "{text}");
    let workload = r#"{ "applications": [
        { "stages": [{ "profile": 0 }], "items": 2, "period_ms": 0.05, "deadline_ms": 500 },
        { "stages": [{ "profile": 0 }], "offset_ms": 0.01, "weight": 2 } ], "weighted": true }"#;
    std::fs::write(space.path("w.json"), workload).unwrap();
    let plan = json(&space.output(["plan", "p.json", "--workload", "w.json", "--budget", "50ms", "--json"]));
    assert_eq!(plan["requests"].as_array().unwrap().len(), 3, "{plan:#}");
    // Repetitions are certified like everything else.
    let workload =
        r#"{ "applications": [{ "stages": [{ "profile": 0, "repeat": 3 }, { "profile": 0 }], "items": 2 }] }"#;
    std::fs::write(space.path("w.json"), workload).unwrap();
    space.run(["plan", "p.json", "--workload", "w.json", "--budget", "50ms", "--certificate", "c.json"]);
    let read = |name: &str| serde_json::from_slice(&std::fs::read(space.path(name)).unwrap()).unwrap();
    let (paper, profile): (Value, Value) = (read("c.json"), read("p.json"));
    let verdict = trefoil_check::check(&paper, &[profile]).unwrap();
    assert!(verdict.bound.is_some_and(|bound| bound > 0.0), "{verdict:?}");
    std::fs::write(space.path("w.json"), r#"{ "applications": [{ "stages": [{ "profile": 7 }] }] }"#).unwrap();
    assert!(space.fails(["plan", "p.json", "--workload", "w.json"], 2).contains("profile 7"));
}

#[test]
fn fronts_what_ifs_diffs_and_ports() {
    let space = Workspace::with_model();
    simulated(&space, "p.json");
    let front = json(&space.output(["plan", "p.json", "--method", "pareto", "--budget", "50ms", "--json"]));
    let points = front["points"].as_array().unwrap();
    assert!(!points.is_empty());
    for pair in points.windows(2) {
        assert!(pair[0]["latency_ms"].as_f64() < pair[1]["latency_ms"].as_f64(), "{front:#}");
    }
    assert!(stdout(&space.output(["plan", "p.json", "--method", "pareto", "--budget", "50ms"])).contains("simulated"));

    let gone = json(&space.output(["plan", "p.json", "--what-if", "without:sim:lunar-lake/CPU", "--json"]));
    assert!(gone["replanned"].as_f64() >= gone["before"].as_f64(), "{gone:#}");
    let assignments = gone["plan"]["assignments"].as_array().unwrap();
    assert!(assignments.iter().all(|entry| entry["unit"] != "sim:lunar-lake/CPU"));
    let busy = stdout(&space.output(["plan", "p.json", "--what-if", "busy:sim:lunar-lake/CPU=3"]));
    assert!(busy.contains("predicted"), "{busy}");
    assert!(space.fails(["plan", "p.json", "--what-if", "slow:rten:CPU=2"], 2).contains("rten:CPU"));

    space.run(["plan", "p.json", "--method", "single:sim:lunar-lake/NPU", "-o", "npu.json"]);
    let moved =
        stdout(&space.output(["plan", "p.json", "--method", "single:sim:lunar-lake/CPU", "--diff", "npu.json"]));
    assert!(moved.contains("sim:lunar-lake/NPU → sim:lunar-lake/CPU"), "{moved}");

    let ports = json(&space.output(["explain", "p.json", "--ports", "--json"]));
    assert!(ports.as_array().is_some());
}

#[test]
fn bench_kernels_measures_every_kernel_against_the_peak_beside_it() {
    let space = Workspace::new();
    let arguments = ["bench", "kernels", "--quick", "--samples", "1", "--no-peers", "--json"];
    let bench = json(&space.output(arguments));
    assert_eq!(bench["origin"], "measured");
    let rows = bench["rows"].as_array().unwrap();
    for kernel in [
        "gemm-w8a8",
        "linear-w8a8",
        "gemm-w8a16",
        "gemm-f32",
        "attention-w8a8",
        "attention-f32",
        "layer-norm",
        "rms-norm",
        "quantise",
    ] {
        assert!(rows.iter().any(|row| row["kernel"] == kernel), "no {kernel}");
    }
    for row in rows {
        let results = row["results"].as_array().unwrap();
        assert_eq!(results[0]["engine"], "cpu");
        for result in results {
            // Products are counted in operations, row operators in bytes.
            let speed = result["gops"].as_f64().or(result["gb_per_s"].as_f64());
            assert!(speed.unwrap() > 0.0 && (result["gops"].is_null() || result["gb_per_s"].is_null()), "{row:#}");
            let ratio = results[0]["median_ms"].as_f64().unwrap() / result["median_ms"].as_f64().unwrap();
            assert!((result["speed_of_ours"].as_f64().unwrap() - ratio).abs() < 1e-9, "{row:#}");
            // The portable kernels have no peak loop.
            if let Some(peak) = row["peak_gops"].as_f64() {
                let fraction = result["gops"].as_f64().unwrap() / peak;
                assert!((result["fraction_of_peak"].as_f64().unwrap() - fraction).abs() < 1e-9, "{row:#}");
            }
        }
    }
    // Every goal says what it wants and what was measured.
    for goal in bench["goals"].as_array().unwrap() {
        let (wanted, measured) = (goal["wanted"].as_f64().unwrap(), goal["measured"].as_f64().unwrap());
        assert_eq!(goal["is_met"], measured >= wanted, "{goal:#}");
    }
    // A device, or the reason why there is none.
    assert!(bench["opencl"].is_object() || bench["absent"][0]["reason"].is_string(), "{bench:#}");
}
