//! Planning from the command line: contradictory flags, one meaning of bounds, origins in the text. Everything is simulated.

mod common;

use common::{Workspace, json, stdout};
use serde_json::Value;

/// The sample model's profile on a simulated SoC, as `p.json`.
fn simulated() -> Workspace {
    let space = Workspace::with_model();
    let units = ["sim:lunar-lake/CPU", "sim:lunar-lake/GPU", "sim:lunar-lake/NPU"];
    let mut arguments = vec!["profile", "small.onnx", "-o", "p.json"];
    arguments.extend(units.iter().flat_map(|unit| ["-u", unit]));
    space.run(arguments);
    space
}

#[test]
fn contradictory_flags_are_one_clear_line() {
    let space = simulated();
    let (cpu, npu) = ("sim:lunar-lake/CPU", "sim:lunar-lake/NPU");
    let single = format!("single:{cpu}");
    let pins = [format!("*={cpu}"), format!("*={npu}")];
    let gone = format!("without:{cpu}");
    let slow = format!("slow:{cpu}=2");
    let (endless, forever) = (format!("slow:{cpu}=1e308"), format!("busy:{cpu}=1e308"));
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["plan", "p.json", "--method", &single, "-u", npu], "-u names sim:lunar-lake/NPU"),
        (vec!["plan", "p.json", "--method", &single, "-u", cpu, "-u", npu], "uses sim:lunar-lake/CPU alone"),
        (vec!["plan", "p.json", "--method", &single, "--pin", &pins[1]], "names another unit"),
        (vec!["plan", "p.json", "--pin", &pins[0], "--pin", &pins[1]], "disagree on operator 0"),
        (vec!["explain", "p.json", "0", "--pin", &pins[0], "--pin", &pins[1]], "disagree on operator 0"),
        (vec!["plan", "p.json", "--pin", &pins[0], "-u", npu], "not among those planned for"),
        (vec!["plan", "p.json", "--method", "pipeline", "--objective", "latency"], "--objective throughput"),
        (vec!["plan", "p.json", "--method", "pipeline", "--objective", "energy"], "--objective throughput"),
        (vec!["plan", "p.json", "--method", "dag", "--objective", "throughput"], "throughput"),
        (vec!["plan", "p.json", "--method", "pareto", "--objective", "energy"], "leave --objective out"),
        (vec!["plan", "p.json", "--method", "pareto", "--what-if", &gone], "--what-if"),
        (vec!["plan", "p.json", "--method", "joint"], "two requests"),
        (vec!["plan", "p.json", "--what-if", &gone, "--what-if", &slow], "takes the unit away"),
        (vec!["plan", "p.json", "--what-if", &slow, "--what-if", &slow], "slowed twice"),
        (vec!["plan", "p.json", "--what-if", &endless], "is no time"),
        (vec!["plan", "p.json", "--what-if", &forever], "is no time"),
        (vec!["plan", "p.json", "p.json", "--method", "dag"], "plans one model, but 2 were given; concurrent, aligned"),
        (vec!["plan", "p.json", "p.json", "--method", "pipeline"], "plans one model"),
        (vec!["plan", "p.json", "p.json", "--method", &single], "plans one model"),
        (vec!["plan", "p.json", "p.json", "--method", "nonsense"], "no planning method `nonsense`"),
        (vec!["plan", "p.json", "--granularity", "node"], "--on"),
        (vec!["plan", "p.json", "--what-if", &gone, "--diff", "p.json"], "--diff"),
        (vec!["explain", "p.json", "--method", "pareto"], "several plans"),
        (vec!["pipeline", "--problem", "s.json", "--blocks", "3"], "--blocks"),
    ];
    for (arguments, want) in cases {
        let message = space.fails(arguments.clone(), 2);
        assert!(message.contains(want), "{arguments:?}: {message}");
        // clap explains usage in further lines; ours are one.
        assert!(message.contains("Usage:") || message.trim().lines().count() == 1, "{arguments:?}: {message}");
    }
    // What only repeats itself is no contradiction.
    space.run(["plan", "p.json", "--method", &single, "-u", cpu, "--pin", &pins[0], "--pin", &pins[0]]);
    // Method `pipeline` is about throughput, asked for or not.
    let stream = json(&space.output(["plan", "p.json", "--method", "pipeline", "--json"]));
    assert!(stream["period_ms"].as_f64().is_some_and(|period| period > 0.0), "{stream:#}");
}

#[test]
fn a_profile_that_repeats_a_unit_or_lacks_its_model_is_one_clear_line() {
    let space = simulated();
    let profile: Value = serde_json::from_str(&std::fs::read_to_string(space.path("p.json")).unwrap()).unwrap();
    let refused = |what: &str, wants: &[&str], change: &dyn Fn(&mut Value)| {
        let mut odd = profile.clone();
        change(&mut odd);
        std::fs::write(space.path("odd.json"), odd.to_string()).unwrap();
        let message = space.fails(["plan", "odd.json"], 2);
        assert!(wants.iter().all(|want| message.contains(want)), "{what}: {message}");
    };
    refused("a repeated unit", &["lists unit `sim:lunar-lake/CPU` twice"], &|odd| {
        let first = odd["units"][0].clone();
        odd["units"].as_array_mut().unwrap().push(first);
    });
    refused("no model", &["holds no model"], &|odd| odd["models"] = serde_json::json!([]));
    refused("two models", &["holds 2 models", "into a file of its own"], &|odd| {
        let mut other = odd["models"][0].clone();
        other["model"] = "another".into();
        odd["models"].as_array_mut().unwrap().push(other);
    });
}

#[test]
fn bound_gap_and_exact_mean_the_same_in_every_methods_json() {
    let space = simulated();
    let mut bounds: Vec<f64> = Vec::new();
    let mut least = f64::INFINITY;
    for method in ["auto", "sequential", "phases", "phases-exclusive", "interval", "dag", "concurrent"] {
        let plan = json(&space.output(["plan", "p.json", "--method", method, "--json"]));
        let number = |key: &str| plan[key].as_f64().unwrap_or_else(|| panic!("{key} of {method}: {plan:#}"));
        assert_eq!(plan["bound_of"], "makespan");
        let (makespan, bound, gap) = (number("makespan_ms"), number("model_bound_ms"), number("gap"));
        assert!((gap - (makespan / bound - 1.0)).abs() < 1e-9, "{method}: {makespan} {bound} {gap}");
        assert_eq!(plan["exact"].as_bool().unwrap(), makespan <= bound * (1.0 + 1e-9), "{method}");
        assert!(plan["own"]["over"].as_str().is_some_and(|over| !over.is_empty()), "{method}: {plan:#}");
        assert!(plan["own"]["value"].as_f64().is_some(), "{method}");
        least = least.min(makespan);
        bounds.push(bound);
    }
    assert!(bounds.iter().all(|bound| (bound - bounds[0]).abs() < 1e-9 * bound && *bound <= least), "{bounds:?}");
}

#[test]
fn explain_and_what_if_say_how_every_number_was_got() {
    let space = simulated();
    let text = stdout(&space.output(["explain", "p.json", "0"]));
    let times: Vec<&str> = text.lines().filter(|line| line.contains(" ms alone")).collect();
    assert!(times.len() >= 2, "{text}");
    for line in times {
        assert!(line.contains("(simulated, rate "), "{line}");
        assert!(line.contains("assumed") || line.contains("described"), "{line}");
    }
    assert!(text.lines().any(|line| line.contains("the plan costs") && line.contains("(simulated)")), "{text}");
    let text = stdout(&space.output(["plan", "p.json", "--what-if", "slow:sim:lunar-lake/CPU=2"]));
    assert!(text.contains("assumed; everything else simulated"), "{text}");
    for line in text.lines().filter(|line| line.contains("cost") && line.starts_with("  ")) {
        assert!(line.contains("(simulated"), "{line}");
    }
    // A measured profile says measured and predicted.
    space.run(["profile", "small.onnx", "-u", "rten:CPU@0", "--quick", "--no-refine", "-o", "m.json"]);
    let text = stdout(&space.output(["explain", "m.json", "0"]));
    assert!(text.contains("ms alone (measured)") && text.contains("(predicted)"), "{text}");
}

#[test]
fn a_front_holds_nothing_that_autos_plans_beat() {
    let space = simulated();
    let front = json(&space.output(["plan", "p.json", "--method", "pareto", "--json"]));
    let points = front["points"].as_array().unwrap();
    let energy = |plan: &Value| plan["energy_j"].as_f64();
    for objective in ["latency", "energy"] {
        let plan = json(&space.output(["plan", "p.json", "--objective", objective, "--json"]));
        let makespan = plan["makespan_ms"].as_f64().unwrap();
        assert!(points.iter().any(|point| point["latency_ms"].as_f64().unwrap() <= makespan * (1.0 + 1e-9)));
        if let Some(joules) = energy(&plan) {
            let beaten = |point: &Value| {
                let (time, other) = (point["latency_ms"].as_f64().unwrap(), energy(point).unwrap());
                makespan < time * (1.0 - 1e-9) && joules < other * (1.0 - 1e-9)
            };
            assert!(!points.iter().any(beaten), "{front:#}");
            assert!(points.iter().any(|point| energy(point).unwrap() <= joules * (1.0 + 1e-9)));
        }
    }
}
