//! `trefoil plan A.json B.json` on profiles made by hand, in which whole models are much shorter than their operators: nothing is measured.

mod common;

use common::{Workspace, json, stdout};
use serde_json::Value;
use trefoil_core::OperatorGraph;
use trefoil_plan::testing::{ProfileBuilder, chain};

/// A model of four operators of 0.04 ms and more on three units; whole it takes `whole` ms on the first and more on the others. Units
/// at work slow each other by half.
fn fused(name: &str, number: u64, whole: f64) -> ProfileBuilder {
    let mut graph: OperatorGraph = chain(4, 64);
    name.clone_into(&mut graph.model);
    graph.fingerprint = format!("{number:032x}");
    for (at, operator) in graph.operators.iter_mut().enumerate() {
        operator.signature.0 = format!("{number:016x}{at:016x}");
    }
    let mut builder = ProfileBuilder::new(&graph).cpus(3).transfers(&[(0, 0.01)]);
    for unit in 0..3 {
        let more = unit as f64;
        builder = builder.operators(unit, &[Some(0.04 + 0.002 * more); 4]).whole(unit, whole + 0.02 * more);
        for other in (0..3).filter(|&other| other < unit) {
            builder = builder.slowdown(unit, other, 1.5).slowdown(other, unit, 1.5);
        }
    }
    builder
}

fn write(space: &Workspace, name: &str, builder: &ProfileBuilder) {
    std::fs::write(space.path(name), serde_json::to_string(&builder.profile).unwrap()).unwrap();
}

fn read(space: &Workspace, name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(space.path(name)).unwrap()).unwrap()
}

fn pair() -> Workspace {
    let space = Workspace::new();
    write(&space, "a.json", &fused("one", 1, 0.03));
    write(&space, "b.json", &fused("two", 2, 0.035));
    space
}

#[test]
fn two_fused_models_are_not_planned_worse_than_one_after_the_other() {
    let space = pair();
    let plan = json(&space.output(["plan", "a.json", "b.json", "--json", "--certificate", "c.json"]));
    let number = |key: &str| plan[key].as_f64().unwrap_or_else(|| panic!("{key}: {plan:#}"));
    assert!((number("makespan_ms") - 0.065).abs() < 1e-12, "{plan:#}");
    assert!(number("model_bound_ms") <= 0.065 && plan["all_measured"].as_bool().unwrap());
    assert!(plan["own"]["over"].as_str().unwrap().contains("whole models"), "{plan:#}");
    let verdict = trefoil_check::check(&read(&space, "c.json"), &[read(&space, "a.json"), read(&space, "b.json")]);
    assert!((verdict.unwrap().value - 0.065).abs() < 1e-12);
    let text = stdout(&space.output(["plan", "a.json", "b.json"]));
    for want in ["time 0.0650 ms", "among: schedules of whole models", "one whole, two whole", "single operators costs"]
    {
        assert!(text.contains(want), "{want}: {text}");
    }
    // The same by name, on the first unit alone.
    let alone = json(&space.output(["plan", "a.json", "b.json", "--method", "concurrent", "-u", "a:CPU", "--json"]));
    assert!((alone["makespan_ms"].as_f64().unwrap() - 0.065).abs() < 1e-12, "{alone:#}");
}

#[test]
fn arrivals_and_deadlines_are_kept_with_whole_models() {
    let space = pair();
    let workload = r#"{ "applications": [
        { "stages": [{ "profile": 0 }], "items": 2, "period_ms": 0.1 },
        { "stages": [{ "profile": 1 }], "offset_ms": 0.01, "deadline_ms": 0.036 } ] }"#;
    std::fs::write(space.path("w.json"), workload).unwrap();
    let arguments = ["plan", "a.json", "b.json", "--workload", "w.json", "--json"];
    let plan = json(&space.output(arguments));
    // The second model runs first, from 0.01 to 0.045 ms; the others take 0.03 ms from 0.045 and from 0.1 on.
    assert!((plan["makespan_ms"].as_f64().unwrap() - 0.13).abs() < 1e-12, "{plan:#}");
    assert!(!plan["notes"].to_string().contains("miss their deadline"), "{}", plan["notes"]);
}

/// A mode of a unit (one core), of which the profile has the whole model only.
#[test]
fn the_best_mode_is_found_in_the_file_and_planned_by_name() {
    let space = Workspace::new();
    let mut builder = fused("one", 1, 0.05);
    let mut mode = builder.profile.units[1].clone();
    mode.address = mode.address.with_cores([0]);
    let subject = trefoil_core::Subject::WholeModel { model: format!("{:032x}", 1) };
    builder.record(subject, std::slice::from_ref(&mode.address), trefoil_plan::testing::ok(0.0305));
    builder.profile.modes.push(mode);
    write(&space, "p.json", &builder);
    let methods: [&[&str]; 3] = [&[], &["--method", "single:b:CPU@0"], &["-u", "b:CPU@0"]];
    for method in methods {
        let arguments = [&["plan", "p.json", "--json", "--certificate", "c.json"], method].concat();
        let plan = json(&space.output(arguments));
        assert_eq!(plan["makespan_ms"], 0.0305, "{method:?}");
        assert_eq!(plan["assignments"][0]["unit"], "b:CPU@0", "{method:?}");
        assert!(plan["model_bound_ms"].as_f64().is_some_and(|bound| bound <= 0.0305), "{plan:#}");
        let verdict = trefoil_check::check(&read(&space, "c.json"), &[read(&space, "p.json")]).unwrap();
        assert!((verdict.value - 0.0305).abs() < 1e-12 && verdict.bound.is_some_and(|bound| bound <= 0.0305));
    }
    let text = stdout(&space.output(["plan", "p.json"]));
    assert!(text.contains("time 0.0305 ms") && text.contains("every segment measured whole"), "{text}");
    // Explained is the best plan on the units, and that is said.
    let text = stdout(&space.output(["explain", "p.json", "0"]));
    assert!(text.starts_with("`trefoil plan` runs the whole model on b:CPU@0 (0.0305 ms)"), "{text}");
    let message = space.fails(["plan", "p.json", "--method", "single:b:CPU@3"], 2);
    assert!(message.contains("a:CPU, b:CPU, c:CPU; of the whole model also b:CPU@0"), "{message}");
    let message = space.fails(["plan", "p.json", "--method", "dag", "-u", "b:CPU@0"], 2);
    assert!(message.contains("only the whole model was measured on b:CPU@0"), "{message}");
}

#[test]
fn several_models_have_a_throughput() {
    let space = pair();
    let arguments = ["plan", "a.json", "b.json", "--objective", "throughput"];
    let plan = json(&space.output([&arguments[..], &["--json", "--certificate", "c.json"]].concat()));
    let number = |key: &str| plan[key].as_f64().unwrap_or_else(|| panic!("{key}: {plan:#}"));
    // One unit does a round in 0.065 ms; two that slow each other by half do not do it in less.
    assert!(number("period_ms") <= 0.065 + 1e-12 && number("model_bound_ms") <= number("period_ms"), "{plan:#}");
    assert_eq!((plan["bound_of"].as_str(), plan["method"].as_str()), (Some("period"), Some("concurrent")));
    let verdict = trefoil_check::check(&read(&space, "c.json"), &[read(&space, "a.json"), read(&space, "b.json")]);
    assert!(verdict.unwrap().value <= number("period_ms") * (1.0 + 1e-9));
    let text = stdout(&space.output(arguments));
    assert!(text.contains("period 0.0") && text.contains("round of one inference of each of the 2 models"), "{text}");
    let message = space.fails(["plan", "a.json", "b.json", "--objective", "throughput", "--method", "joint"], 2);
    assert!(message.contains("`concurrent` rounds of several"), "{message}");
}
