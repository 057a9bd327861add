//! Several models in one run, end to end, on the embedded backend: nothing needs to be installed.

mod common;

use common::{Workspace, json, stdout};
use serde_json::Value;
use trefoil_core::{DataType, TensorInfo};
use trefoil_onnx::builder::ModelBuilder;
use trefoil_onnx::npz;

/// `small.onnx` and a small model of another kind, `other.onnx`.
fn two_models() -> Workspace {
    let space = Workspace::with_model();
    let info = |name: &str, shape: &[u64]| TensorInfo::new(name, DataType::F32, shape);
    ModelBuilder::new("other", 17)
        .input(&info("signal", &[8, 64]))
        .random_constant("weights", &[64, 64], 0.2)
        .node("MatMul", &["signal", "weights"], &["mixed"], &[])
        .node("Relu", &["mixed"], &["kept"], &[])
        .node("MatMul", &["kept", "weights"], &["again"], &[])
        .node("Sigmoid", &["again"], &["gates"], &[])
        .output(&info("gates", &[8, 64]))
        .save(&space.path("other.onnx"))
        .unwrap();
    space
}

const QUICK: [&str; 7] = ["-u", "rten:CPU", "--quick", "--rounds", "2", "--duration", "300ms"];

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn two_models_run_in_rounds_and_are_compared_with_what_everybody_does() {
    let space = two_models();
    let files = ["--output", "out.npz", "--trace", "t.json", "--report", "r.html", "--json"];
    let run = json(&space.output(["run", "small.onnx", "other.onnx"].into_iter().chain(QUICK).chain(files)));
    assert_eq!(keys(&run["baselines"]), ["all-at-once", "one-per-core", "serial"], "{run:#}");
    assert!(run["baselines"].as_object().unwrap().values().all(|ms| ms.as_f64().unwrap() > 0.0), "{run:#}");
    let arrangements = run["arrangements"].as_array().unwrap();
    let serial = arrangements.iter().find(|one| one["name"] == "serial").unwrap();
    assert!(serial["predicted_ms"].as_f64().unwrap() > 0.0 && serial["prediction_error"].is_number());
    assert_eq!(serial["segments"].as_array().unwrap().len(), 2, "{serial:#}");
    // Nothing is predicted of models that fight for cores.
    assert!(arrangements.iter().any(|one| one["name"] == "all-at-once" && one["predicted_ms"].is_null()));
    // Two rounds decide nothing, so what is used is one of the baselines.
    assert!(keys(&run["baselines"]).contains(&run["winner"].as_str().unwrap()), "{}", run["verdict"]);
    assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
    let models = run["run"]["models"].as_array().unwrap();
    assert_eq!(models.len(), 2);
    for model in models {
        assert!(model["count"].as_u64().unwrap() >= 3 && model["p50_ms"].as_f64() <= model["p99_ms"].as_f64());
    }
    assert!(run["run"]["rounds_per_second"].as_f64().unwrap() > 0.0);
    assert!(run["run"]["utilisation"].as_object().is_some_and(|units| !units.is_empty()));
    for entrant in run["contest"]["entrants"].as_array().unwrap() {
        assert_eq!(entrant["equality"]["worst_error"].as_f64(), Some(0.0), "{entrant:#}");
    }

    let outputs = npz::read_npz(&space.path("out.npz")).unwrap();
    let names: Vec<&str> = outputs.iter().map(|tensor| tensor.info().name.as_str()).collect();
    assert!(names.contains(&"small/scores") && names.contains(&"other/gates"), "{names:?}");
    let gates = outputs.iter().find(|tensor| tensor.info().name == "other/gates").unwrap();
    assert!(gates.to_f64().iter().all(|gate| (0.0..=1.0).contains(gate)));
    let report = std::fs::read_to_string(space.path("r.html")).unwrap();
    assert!(report.contains("one-per-core") && !report.contains("http://"));
    let trace: Value = serde_json::from_slice(&std::fs::read(space.path("t.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 4));
}

#[test]
fn requests_at_fixed_rates_are_counted_from_their_arrival() {
    let space = two_models();
    let rates = ["--rate", "50,20", "--deadline-ms", "250", "--priority", "1,0", "--json"];
    let run = json(&space.output(["run", "small.onnx", "other.onnx"].into_iter().chain(QUICK).chain(rates)));
    let streams = run["run"]["streams"].as_array().unwrap();
    let arrived: Vec<_> = streams.iter().map(|stream| stream["arrived"].as_u64().unwrap()).collect();
    assert_eq!(arrived, [15, 6], "{run:#}");
    for stream in streams {
        let count = |key: &str| stream[key].as_u64().unwrap();
        let ended = count("completed") + count("failed") + count("turned_away") + count("unfinished");
        assert_eq!(count("arrived"), ended, "{stream:#}");
        assert!(stream["response"]["p50_ms"].as_f64() >= stream["service"]["p50_ms"].as_f64().map(|ms| ms * 0.9));
    }
    assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
    assert!(run["arrangements"][0]["predicted_miss_rate"].is_number(), "{run:#}");
    let text =
        stdout(&space.output(["run", "small.onnx", "other.onnx"].into_iter().chain(QUICK).chain(["--rate", "50,20"])));
    for wanted in ["deadlines missed", "responses a second", "bit-equal", "turned away"] {
        assert!(text.contains(wanted), "no `{wanted}` in\n{text}");
    }
}

#[test]
fn a_model_may_run_beside_itself_and_several_times_a_round() {
    let space = two_models();
    let arguments = ["run", "small.onnx", "small.onnx"].into_iter().chain(QUICK).chain(["--items", "2", "--json"]);
    let run = json(&space.output(arguments));
    let names: Vec<_> = run["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["small", "small~2"]);
    let rounds = run["run"]["rounds"].as_u64().unwrap();
    assert_eq!(run["run"]["models"][1]["count"].as_u64(), Some(2 * rounds));
    assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
}

#[test]
fn one_model_or_several_run_adapting() {
    let space = two_models();
    for models in [vec!["small.onnx"], vec!["small.onnx", "other.onnx"]] {
        let arguments = std::iter::once("run").chain(models.iter().copied()).chain(QUICK).chain(["--adapt", "--json"]);
        let run = json(&space.output(arguments));
        assert!(run["adaptations"].is_array() && run["repeated_rounds"] == 0, "{run:#}");
        assert_eq!(run["run"]["models"].as_array().unwrap().len(), models.len());
        assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
    }
}

#[test]
fn a_plan_of_several_models_from_a_file_is_run() {
    let space = two_models();
    for model in ["small", "other"] {
        let file = format!("{model}.json");
        let model = format!("{model}.onnx");
        let units = ["-u", "rten:CPU", "--quick", "--no-refine", "-o", &file];
        space.run(["profile", &model].into_iter().chain(units));
    }
    space.run(["plan", "small.json", "other.json", "--method", "concurrent", "-o", "both.json"]);
    let arguments = ["run", "small.onnx", "other.onnx"].into_iter().chain(QUICK);
    let run = json(&space.output(arguments.chain(["--plan", "both.json", "--json"])));
    assert!(run["arrangements"].as_array().unwrap().iter().any(|one| one["method"] == "concurrent"), "{run:#}");
    assert_eq!(run["verify"]["ok"], true);
}

#[test]
fn pairs_are_tabled_and_mapped() {
    let space = two_models();
    std::fs::copy(space.path("other.onnx"), space.path("third.onnx")).unwrap();
    let arguments = ["bench", "pairs", "small.onnx", "other.onnx", "third.onnx", "-u", "rten:CPU", "--quick"];
    let more = ["--no-refine", "--rounds", "1", "--json", "--report", "pairs.html"];
    let found = json(&space.output(arguments.into_iter().chain(more)));
    let pairs = found["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 3, "{found:#}");
    for pair in pairs {
        assert!(pair["baseline"]["ms"].as_f64().unwrap() > 0.0 && pair["reason"].is_string(), "{pair:#}");
        assert!(pair["speed_up"]["median"].as_f64().unwrap() > 0.0 && pair["cap"].as_f64().unwrap() > 0.0, "{pair:#}");
        // One round decides nothing.
        assert_eq!((pair["used"].as_bool(), pair["effective"].as_f64()), (Some(false), Some(1.0)));
    }
    let page = std::fs::read_to_string(space.path("pairs.html")).unwrap();
    assert!(page.contains("third") && page.contains("Pairs of models") && !page.contains("http"));
    let csv = std::fs::read_to_string(space.path("pairs.csv")).unwrap();
    assert_eq!(csv.lines().count(), 4, "{csv}");
    let picture = std::fs::read(space.path("pairs.png")).unwrap();
    assert!(picture.starts_with(b"\x89PNG\r\n") && picture.len() > 1000);

    // The same command again, in another order and with a model less, measures nothing: it goes on from what is finished.
    let again =
        ["bench", "pairs", "third.onnx", "small.onnx", "-u", "rten:CPU", "--quick", "--no-refine", "--rounds", "1"];
    let output = space.output(again.into_iter().chain(["--json"]));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let stored = json(&output);
    assert!(!told.contains('+') && told.contains("[2/2] small: measured"), "{told}");
    assert_eq!(stored["pairs"][0]["speed_up"], pairs[1]["speed_up"], "{stored:#}");
    assert!(
        stored["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().contains("earlier invocations"))
    );
    let text = stdout(&space.output(again));
    assert!(text.contains("third + small") && text.contains("geometric mean over 1 pair"), "{text}");
    // Unless that is asked for.
    let told = space.output(again.into_iter().chain(["--fresh"])).stderr;
    assert!(String::from_utf8_lossy(&told).contains("[1/1] third + small: "), "{}", String::from_utf8_lossy(&told));
    for (more, wanted) in [(["--pair-ms", "0"], "--pair-ms 0"), (["--report", "third.onnx"], "would be overwritten")] {
        let message = space.fails(again.into_iter().chain(more), 2);
        assert!(message.contains(wanted), "{message}");
    }
}

#[test]
fn what_several_models_cannot_have_is_told_in_a_line() {
    let space = two_models();
    let both = ["run", "small.onnx", "other.onnx", "-u", "rten:CPU"];
    for (more, wanted) in [
        (vec!["--rate", "30"], "--rate has 1 entries for 2 models"),
        (vec!["--rate", "30,0"], "no number of requests"),
        (vec!["--rate", "30,5", "--deadline-ms", "1,2,3"], "--deadline-ms has 3 entries"),
        (vec!["--rate", "30,5", "--deadline-ms", "0"], "above 0"),
        (vec!["--rate", "30,5", "--items", "2"], "--items is for rounds"),
        (vec!["--rate", "30,5", "--method", "concurrent"], "leave --method out"),
        (vec!["--input", "x.npz"], "--input is for one model"),
        (vec!["--profile", "p.json"], "--profile is for one model"),
        (vec!["--objective", "throughput"], "plans rounds"),
        (vec!["--objective", "energy", "--rate", "3,3"], "--objective energy is for rounds"),
        (vec!["--objective", "energy", "--method", "concurrent"], "compares all arrangements"),
        (vec!["--shape", "nothing=1,2"], "none of the models has"),
        (vec!["-u", "sim:lunar-lake/NPU"], "simulated"),
        (vec!["--duration", "0s"], "--duration is 0"),
    ] {
        let message = space.fails(both.into_iter().chain(more.iter().copied()), 2);
        assert!(message.contains(wanted), "{more:?}: {message}");
    }
    let lone = space.fails(["run", "small.onnx", "-u", "rten:CPU", "--rate", "3"], 2);
    assert!(lone.contains("several models"), "{lone}");
}

/// What is wrong with the last model, an output or a unit is told before the first model is even prepared: the cache stays empty.
#[test]
fn shapes_models_outputs_and_units_are_checked_before_anything_is_measured() {
    let space = two_models();
    ModelBuilder::new("open", 17)
        .symbolic_input("x", DataType::F32, &["batch", "3"])
        .node("Relu", &["x"], &["y"], &[])
        .output(&TensorInfo::new("y", DataType::F32, [2u64, 3]))
        .save(&space.path("open.onnx"))
        .unwrap();
    std::fs::write(space.path("damaged.onnx"), [0x5a; 999]).unwrap();
    let unit = ["-u", "rten:CPU", "--quick", "--no-refine"];
    for command in [&["run"][..], &["bench", "pairs"], &["bench", "methods"], &["bench", "corun"]] {
        for (more, wanted) in [
            (
                &["small.onnx", "open.onnx"][..],
                "model `open` leaves extents open: `x` [batch, 3]; fix them with --shape open/x=batch,3 (numbers for names)",
            ),
            (
                &["small.onnx", "open.onnx", "--shape", "open/x=2"],
                "open: input `x` is [batch, 3], but the shape given is [2]",
            ),
            (
                &["small.onnx", "open.onnx", "--shape", "x=2,4"],
                "open: input `x` is [batch, 3], but the shape given is [2, 4]",
            ),
            (
                &["small.onnx", "open.onnx", "--shape", "x=0,3"],
                "--shape of input `x` of open: dim 0 is 0; extents start at 1",
            ),
            (&["small.onnx", "other.onnx", "--shape", "small/signal=8,64"], "none of the models has; they have small/"),
            (&["small.onnx", "gone.onnx"], "gone.onnx"),
            (&["small.onnx", "damaged.onnx"], "damaged.onnx"),
            (&["small.onnx", "other.onnx", "-u", "rten:NPU"], "has no device `NPU`"),
        ] {
            let message = space.fails(command.iter().chain(more).chain(&unit), 2);
            assert!(message.contains(wanted), "{command:?} {more:?}: {message}");
            assert!(!space.path("cache").exists(), "{command:?} {more:?}: something was prepared");
        }
    }
    for (command, flag) in [
        (&["run", "small.onnx", "other.onnx"][..], "--output"),
        (&["run", "small.onnx", "other.onnx"], "--trace"),
        (&["run", "small.onnx", "other.onnx"], "--report"),
        (&["bench", "pairs", "small.onnx", "other.onnx"], "--report"),
        (&["bench", "corun", "small.onnx", "other.onnx"], "-o"),
    ] {
        let message = space.fails(command.iter().chain(&unit).chain(&[flag, "no/folder/out"]), 2);
        assert!(message.contains("no/folder/out"), "{command:?} {flag}: {message}");
        assert!(!space.path("cache").exists(), "{command:?} {flag}: something was prepared");
    }
}

#[test]
fn energy_is_compared_beside_time() {
    let space = two_models();
    let watts = ["--objective", "energy", "--watts", "rten:CPU=20", "--watts", "idle=5"];
    let run = json(
        &space.output(["run", "small.onnx", "other.onnx"].into_iter().chain(QUICK).chain(watts).chain(["--json"])),
    );
    let energy = &run["energy"];
    assert_eq!(energy["watts"], "declared", "{energy:#}");
    let arrangements = energy["arrangements"].as_array().unwrap();
    let names: Vec<&str> = arrangements.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"serial") && !names.contains(&"all-at-once"), "{names:?}");
    assert!(arrangements.iter().all(|one| one["joules"].as_f64() > Some(0.0)), "{arrangements:#?}");
    let winner = run["winner"].as_str().unwrap();
    assert!(names.contains(&winner) && run["verdict"]["message"].as_str().unwrap().contains("declared watts"));
    let least = arrangements.iter().map(|one| one["joules"].as_f64().unwrap()).fold(f64::INFINITY, f64::min);
    let of_winner = arrangements.iter().find(|one| one["name"] == winner).unwrap()["joules"].as_f64().unwrap();
    assert!(of_winner <= least * 1.011, "{of_winner} {least}");
    // Nothing is invented.
    let none = ["--objective", "energy"];
    let message = space.fails(["run", "small.onnx", "other.onnx"].into_iter().chain(QUICK).chain(none), 2);
    assert!(message.contains("no power is known of rten:CPU") && message.contains("--watts"), "{message}");

    let text = stdout(&space.output(["run", "small.onnx"].into_iter().chain(QUICK).chain(watts)));
    assert!(text.contains("Energy of an inference") && text.contains("takes least energy"), "{text}");
}

#[test]
fn operators_and_models_are_measured_beside_each_other_and_that_is_kept() {
    if trefoil_units::allowed_cores().len() < 2 {
        eprintln!("skipped: one core has no two units that work at once");
        return;
    }
    let space = two_models();
    let bench = ["bench", "corun", "-u", "rten:CPU", "--quick", "-o", "m.jsonl", "--json"];
    let found = json(&space.output(bench));
    let pairs = found["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 3, "{found:#}");
    for pair in pairs {
        assert!(pair["serial"][1].as_f64() > Some(0.0) && pair["published"].as_f64() > Some(1.0), "{pair:#}");
        let placements = pair["placements"].as_array().unwrap();
        assert!(!placements.is_empty(), "{pair:#}");
        for placement in placements {
            assert!(placement["speed_up"].as_f64() > Some(0.0), "{placement:#}");
            assert_eq!(placement["slowdown"][0]["count"].as_u64(), Some(6), "{placement:#}");
        }
    }
    let lines = std::fs::read_to_string(space.path("m.jsonl")).unwrap();
    let kept: Vec<trefoil_core::Measurement> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found["measurements"].as_u64(), Some(kept.len() as u64));
    assert!(kept.len() >= 6 && kept.iter().all(|one| one.units.len() == 2), "{lines}");

    // Of two models it is the same, and `run` takes it from there.
    let models = ["bench", "corun", "small.onnx", "other.onnx", "-u", "rten:CPU", "--quick"];
    let text = stdout(&space.output(models));
    assert!(text.contains("small ‖ other (measured)") && text.contains("kept for `trefoil run`"), "{text}");
    let run = json(&space.output(["run", "small.onnx", "other.onnx"].into_iter().chain(QUICK).chain(["--json"])));
    let slowdown = run["slowdown"].as_array().unwrap();
    assert!(slowdown.len() == 2 && slowdown.iter().all(|one| one["stored"] == true), "{slowdown:#?}");
    let message = space.fails(["bench", "corun", "small.onnx", "-u", "rten:CPU"], 2);
    assert!(message.contains("nothing to run beside"), "{message}");
}

#[test]
fn methods_are_tabled_against_every_backend() {
    let cores = trefoil_units::allowed_cores();
    let units: Vec<String> = cores.iter().take(2).map(|core| format!("rten:CPU@{core}")).collect();
    let space = Workspace::with_model();
    let mut arguments = vec!["bench", "methods", "small.onnx", "--quick", "--rounds", "2", "--refine-budget", "5"];
    for unit in &units {
        arguments.extend(["-u", unit.as_str()]);
    }
    let found = json(&space.output(arguments.iter().copied().chain(["--json"])));
    let rows = found["models"][0]["rows"].as_array().unwrap();
    let named = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}: {rows:#?}"));
    for method in ["sequential", "phases", "dag"] {
        let row = named(method);
        assert!(row["predicted_ms"].as_f64() > Some(0.0) && row["measured_ms"].as_f64() > Some(0.0), "{row:#}");
        assert!(row["equal"] == true && row["speed_up"]["median"].as_f64() > Some(0.0), "{row:#}");
    }
    assert!(named("rten:CPU")["baseline"] == true, "{rows:#?}");
    let message = space.fails(arguments.into_iter().chain(["--methods", "nothing"]), 2);
    assert!(message.contains("no method `nothing`"), "{message}");
}
