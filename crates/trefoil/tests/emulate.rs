//! `trefoil emulate`: described rates, real bytes.

mod common;

use common::{Workspace, json};

#[test]
fn one_model_is_held_to_the_described_rates_and_computes_rightly() {
    let space = Workspace::with_model();
    let output = space.output(["emulate", "small.onnx", "--carrier", "rten:CPU", "--rounds", "2", "--json"]);
    let told = json(&output);
    assert_eq!((told["origin"].as_str(), told["stands_in_for"].as_str()), (Some("emulated"), Some("sim:lunar-lake")));
    let plans = told["plans"].as_array().unwrap();
    let named = |name: &str| plans.iter().any(|plan| plan["plan"] == name);
    assert!(named("sim:lunar-lake/CPU alone") && named("sequential") && named("dag"), "{plans:?}");
    for plan in plans {
        let (simulated, emulated) = (plan["simulated_ms"].as_f64().unwrap(), plan["emulated_ms"].as_f64().unwrap());
        // Nothing ends before its described work is done; how much later depends on this machine.
        assert!(emulated >= 0.99 * simulated, "{plan}");
        assert_eq!(plan["right"], true);
        assert_eq!(plan["rounds_ms"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn two_models_run_at_once() {
    let space = Workspace::with_model();
    let carried = ["--carrier", "rten:CPU@0", "--rounds", "1", "--json"];
    let output = space.output(["emulate", "small.onnx", "small.onnx"].into_iter().chain(carried));
    let told = json(&output);
    let names: Vec<&str> =
        told["plans"].as_array().unwrap().iter().map(|plan| plan["plan"].as_str().unwrap()).collect();
    assert!(names.contains(&"at once (concurrent)") && names.contains(&"at once (joint)"), "{names:?}");
    assert!(told["plans"].as_array().unwrap().iter().all(|plan| plan["right"] == true));
}

#[test]
fn what_cannot_be_emulated_is_told_in_one_line() {
    let space = Workspace::with_model();
    let message = space.fails(["emulate", "small.onnx", "--on", "sim:nowhere"], 2);
    assert!(message.contains("nowhere") && message.contains("lunar-lake"), "{message}");
    let message = space.fails(["emulate", "small.onnx", "--carrier", "sim:lunar-lake/CPU"], 2);
    assert!(message.contains("carrier"), "{message}");
    let message = space.fails(["emulate", "small.onnx", "--scale", "-1"], 2);
    assert!(message.contains("scale") || message.contains("-1"), "{message}");
    let message = space.fails(["emulate", "small.onnx", "--scale", "nan"], 2);
    assert!(message.contains("scale") || message.contains("NaN"), "{message}");
}
