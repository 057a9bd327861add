//! Linked stages from a pipeline file, end to end, on the embedded backend.

mod common;

use common::{Workspace, json, stdout};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use trefoil_core::{DataType, HostTensor, TensorInfo};
use trefoil_onnx::builder::ModelBuilder;
use trefoil_onnx::npz;

/// A change to a pipeline file.
type Change = Box<dyn FnOnce(&mut Value)>;

fn info(name: &str, shape: &[u64]) -> TensorInfo {
    TensorInfo::new(name, DataType::F32, shape)
}

/// Two encoders, what joins them, and a step of a loop: `velocity = tanh(x·W + condition) · t`.
fn models(space: &Workspace) {
    ModelBuilder::new("text", 17)
        .random_constant("table", &[32, 16], 1.0)
        .input(&TensorInfo::new("tokens", DataType::I64, [4u64]))
        .node("Gather", &["table", "tokens"], &["words"], &[])
        .output(&info("words", &[4, 16]))
        .save(&space.path("text.onnx"))
        .unwrap();
    ModelBuilder::new("vision", 17)
        .input(&info("image", &[4, 48]))
        .random_constant("w", &[48, 16], 0.2)
        .node("MatMul", &["image", "w"], &["mixed"], &[])
        .node("Relu", &["mixed"], &["seen"], &[])
        .output(&info("seen", &[4, 16]))
        .save(&space.path("vision.onnx"))
        .unwrap();
    ModelBuilder::new("prefix", 17)
        .input(&info("seen", &[4, 16]))
        .input(&info("words", &[4, 16]))
        .node("Add", &["seen", "words"], &["sum"], &[])
        .random_constant("w", &[16, 8], 0.2)
        .node("MatMul", &["sum", "w"], &["condition"], &[])
        .output(&info("condition", &[4, 8]))
        .save(&space.path("prefix.onnx"))
        .unwrap();
    ModelBuilder::new("step", 17)
        .input(&info("x", &[4, 8]))
        .input(&info("t", &[1]))
        .input(&info("condition", &[4, 8]))
        .random_constant("w", &[8, 8], 0.3)
        .node("MatMul", &["x", "w"], &["turned"], &[])
        .node("Add", &["turned", "condition"], &["shifted"], &[])
        .node("Tanh", &["shifted"], &["bent"], &[])
        .node("Mul", &["bent", "t"], &["velocity"], &[])
        .output(&info("velocity", &[4, 8]))
        .save(&space.path("step.onnx"))
        .unwrap();
}

/// The file, with changes.
fn pipeline(space: &Workspace, name: &str, change: impl FnOnce(&mut Value)) {
    let mut file = json!({
        "format": "trefoil-pipeline",
        "version": 1,
        "stages": [
            { "name": "text", "model": "text.onnx", "inputs": { "tokens": { "values": [3, 1, 4, 1] } } },
            { "name": "vision", "model": "vision.onnx", "inputs": { "image": { "random": 5 } } },
            { "name": "prefix", "model": "prefix.onnx", "inputs": {
                "seen": { "from": "vision", "output": "seen" },
                "words": { "from": "text", "output": "words" } } },
            { "name": "step", "model": "step.onnx", "repeat": 10, "inputs": {
                "x": { "random": 7, "next": { "output": "velocity", "scale": -0.1, "keep": true } },
                "t": { "fill": 1.0, "next": { "add": -0.1 } },
                "condition": { "from": "prefix", "output": "condition" } } },
        ],
    });
    change(&mut file);
    std::fs::write(space.path(name), serde_json::to_vec(&file).unwrap()).unwrap();
}

/// `x·W` of row-major matrices.
fn product(x: &[f64], w: &[f64], inner: usize, columns: usize) -> Vec<f64> {
    let cell = |row: usize, column: usize| (0..inner).map(|k| x[row * inner + k] * w[k * columns + column]).sum();
    let rows = x.len() / inner;
    (0..rows * columns).map(|at| cell(at / columns, at % columns)).collect()
}

/// What the pipeline should give, by hand: the state after the last step but one, which the last one starts from, and its velocity.
fn by_hand(space: &Workspace) -> Vec<f64> {
    let constant = |model: &str, name: &str| {
        let bytes = std::fs::read(space.path(model)).unwrap();
        trefoil_onnx::builder::constant_of(&bytes, name).unwrap().to_f64()
    };
    let sample = |name: &str, shape: &[u64], seed: u64| {
        let integers = trefoil_profile::sample_data::Integers::Small;
        trefoil_profile::sample_data::sample_tensor(&info(name, shape), seed, integers).to_f64()
    };
    let table = constant("text.onnx", "table");
    let words = [3usize, 1, 4, 1].iter().flat_map(|&token| table[token * 16..(token + 1) * 16].to_vec());
    let image = sample("image", &[4, 48], 5);
    let seen = product(&image, &constant("vision.onnx", "w"), 48, 16).into_iter().map(|value| value.max(0.0));
    let sum: Vec<f64> = seen.zip(words).map(|(seen, word)| seen + word).collect();
    let condition = product(&sum, &constant("prefix.onnx", "w"), 16, 8);
    let w = constant("step.onnx", "w");
    let (mut x, mut t) = (sample("x", &[4, 8], 7), 1.0);
    for _ in 0..10 {
        let turned = product(&x, &w, 8, 8);
        let velocity: Vec<f64> = turned.iter().zip(&condition).map(|(a, b)| (a + b).tanh() * t).collect();
        x = x.iter().zip(&velocity).map(|(x, velocity)| x - 0.1 * velocity).collect();
        t -= 0.1;
    }
    x
}

const QUICK: [&str; 6] = ["--quick", "--rounds", "2", "--duration", "200ms", "-u"];

#[test]
fn a_loop_behind_two_encoders_gives_what_it_should_in_every_arrangement() {
    let space = Workspace::new();
    models(&space);
    pipeline(&space, "vla.json", |_| {});
    let arguments = ["run", "vla.json"].into_iter().chain(QUICK).chain(["rten:CPU", "--output", "out.npz"]);
    let run = json(&space.output(arguments.chain(["--trace", "t.json", "--json"])));
    assert_eq!(run["pipeline"], "vla");
    let stages = run["stages"].as_array().unwrap();
    let names: Vec<_> = stages.iter().map(|stage| stage["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["text", "vision", "prefix", "step"]);
    assert_eq!(stages[3]["executions"], 10);
    assert!(stages.iter().all(|stage| stage["predicted_ms"].as_f64() > Some(0.0)), "{stages:#?}");
    assert!(stages.iter().all(|stage| stage["measured_ms"].as_f64() > Some(0.0)), "{stages:#?}");
    assert!(stages[3]["begins_ms"].as_f64() >= stages[2]["ends_ms"].as_f64(), "{stages:#?}");
    assert_eq!(run["links"].as_array().unwrap().len(), 5, "{}", run["links"]);
    assert!(
        run["baselines"]["serial"].as_f64() > Some(0.0) || run["notes"].to_string().contains("`serial`"),
        "{run:#}"
    );
    assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
    assert_eq!(run["verify"]["equality"]["worst_error"].as_f64(), Some(0.0));
    for entrant in run["contest"]["entrants"].as_array().unwrap() {
        assert_eq!(entrant["equality"]["worst_error"].as_f64(), Some(0.0), "{entrant:#}");
        assert!(entrant["equality"]["compared"].as_u64() > Some(0), "{entrant:#}");
    }
    // The last execution's `x.next` is the end of the loop.
    let outputs = npz::read_npz(&space.path("out.npz")).unwrap();
    let end = outputs.iter().find(|tensor| tensor.info().name == "step/x.next").unwrap().to_f64();
    let wanted = by_hand(&space);
    let worst = end.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-4, "{worst}: {end:?} {wanted:?}");

    let arguments = ["run", "vla.json"].into_iter().chain(QUICK).chain(["rten:CPU", "--method", "staged"]);
    let text = stdout(&space.output(arguments));
    for wanted in ["Stages of vla", "step", "inferences a second", "bit-equal to the stages run plainly"] {
        assert!(text.contains(wanted), "no `{wanted}` in\n{text}");
    }
}

#[test]
fn operators_of_linked_stages_are_planned_one_by_one() {
    let space = Workspace::new();
    models(&space);
    pipeline(&space, "vla.json", |_| {});
    let arguments = ["run", "vla.json"].into_iter().chain(QUICK).chain(["rten:CPU@0", "--method", "concurrent"]);
    let run = json(&space.output(arguments.chain(["--json"])));
    let planned = run["arrangements"].as_array().unwrap().iter().any(|one| one["method"] == "concurrent");
    assert!(planned || run["notes"].to_string().contains("`concurrent`"), "{run:#}");
    assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
}

#[test]
fn a_pipeline_is_asked_for_at_a_rate() {
    let space = Workspace::new();
    models(&space);
    pipeline(&space, "vla.json", |file| {
        file["rate_hz"] = json!(50);
        file["offset_ms"] = json!(10);
        file["deadline_ms"] = json!(500);
    });
    let arguments = ["run", "vla.json"].into_iter().chain(QUICK).chain(["rten:CPU", "--json"]);
    let run = json(&space.output(arguments));
    let stream = &run["run"]["streams"][0];
    // 10, 30, …, 190 ms.
    assert_eq!(
        (stream["arrived"].as_u64(), run["run"]["streams"].as_array().map(Vec::len)),
        (Some(10), Some(1)),
        "{run:#}"
    );
    assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
}

#[test]
fn what_is_wrong_with_a_pipeline_is_told_in_a_line_with_its_key() {
    let space = Workspace::new();
    models(&space);
    let set = |path: &'static str, value: Value| move |file: &mut Value| *file.pointer_mut(path).unwrap() = value;
    let cases: Vec<(Change, &str)> = vec![
        (Box::new(set("/stages/0/model", json!("gone.onnx"))), "stages[0].model: gone.onnx"),
        (
            Box::new(set("/stages/2/inputs/seen/output", json!("gone"))),
            "stages[2].inputs.seen: stage `vision` has no output `gone`; it has seen",
        ),
        (Box::new(set("/stages/2/inputs/seen/from", json!("step"))), "circle"),
        (
            Box::new(set("/stages/0/inputs", json!({ "words": { "fill": 1 } }))),
            "stages[0].inputs.words: the model has no such input; it has tokens",
        ),
        (Box::new(set("/stages/0/inputs/tokens/values", json!([1, 2]))), "stages[0].inputs.tokens: 2 values"),
        (Box::new(set("/stages/0/inputs/tokens/values", json!([1, 2, 3, 0.5]))), "stages[0].inputs.tokens: a value"),
        (Box::new(set("/stages/3/inputs/x/next/output", json!("gone"))), "stages[3].inputs.x.next"),
        (
            Box::new(set("/stages/3/inputs/condition", json!({ "file": "gone.npz" }))),
            "stages[3].inputs.condition: gone.npz",
        ),
        (Box::new(set("/stages/3/repeat", json!("ten"))), "stages[3].repeat"),
        (
            Box::new(set("/stages/2/inputs/seen", json!({ "from": "text", "output": "words", "rate": 1 }))),
            "stages[2].inputs.seen",
        ),
        (Box::new(set("/version", json!(2))), "version: is 2"),
    ];
    for (change, wanted) in cases {
        pipeline(&space, "bad.json", change);
        let message = space.fails(["run", "bad.json", "-u", "rten:CPU", "--quick"], 2);
        assert!(message.contains("bad.json: ") && message.contains(wanted), "{wanted}: {message}");
    }
    std::fs::write(space.path("bad.json"), "{").unwrap();
    assert!(space.fails(["run", "bad.json", "-u", "rten:CPU"], 2).contains("is no pipeline file"));
    assert!(space.fails(["run", "none.json", "-u", "rten:CPU"], 2).contains("none.json"));
    pipeline(&space, "good.json", |_| {});
    for (more, wanted) in [
        (vec!["text.onnx"], "by itself"),
        (vec!["--rate", "3"], "stand in its file"),
        (vec!["--shape", "x=1"], "stand in its file"),
        (vec!["--method", "dag"], "auto, staged"),
        (vec!["--objective", "energy"], "for latency"),
        (vec!["-u", "sim:lunar-lake/NPU"], "simulated"),
    ] {
        let message = space.fails(["run", "good.json", "-u", "rten:CPU"].into_iter().chain(more.iter().copied()), 2);
        assert!(message.contains(wanted), "{more:?}: {message}");
    }
}

/// A pipeline has no flags for shapes, so its message does not name any.
#[test]
fn open_extents_are_fixed_in_the_file() {
    let space = Workspace::new();
    let info = TensorInfo::new("y", DataType::F32, [2u64, 3]);
    let model = ModelBuilder::new("open", 17).symbolic_input("x", DataType::F32, &["batch", "3"]);
    model.node("Relu", &["x"], &["y"], &[]).output(&info).save(&space.path("open.onnx")).unwrap();
    let fails = |shapes: Value| {
        let stage = json!({ "name": "only", "model": "open.onnx", "shapes": shapes });
        let file = json!({ "format": "trefoil-pipeline", "version": 1, "stages": [stage] });
        std::fs::write(space.path("open.json"), file.to_string()).unwrap();
        space.fails(["run", "open.json", "-u", "rten:CPU"], 2)
    };
    let message = fails(json!({}));
    let wanted = "leaves extents open: `x` [batch, 3]; write \"shapes\": {\"x\": [batch, 3]} (numbers for names)";
    assert!(message.contains(wanted), "{message}");
    let message = fails(json!({ "x": [0, 3] }));
    assert!(message.contains("stages[0].shapes.x: dim 0 is 0; extents start at 1"), "{message}");
}

/// The stages of the π0.5-like model, if the shared models are here, against ONNX Runtime running the same stages one after another
/// from the same inputs (`testdata/pi05-actions.npz`; the whole model is another draw of weights).
#[test]
fn four_stages_give_what_they_give_one_by_one() {
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/zoo_tiny");
    let stage = |name: &str| zoo.join(format!("pi05_{name}_tiny_fp32.onnx"));
    let given_inputs: PathBuf = zoo.join("pi05_tiny_fp32.npz");
    if !stage("denoise").exists() || !given_inputs.exists() {
        eprintln!("skipped: no {}", given_inputs.display());
        return;
    }
    let space = Workspace::new();
    let from = |stage: &str, output: &str| json!({ "from": stage, "output": output });
    let given = |tensor: &str| json!({ "file": given_inputs, "tensor": format!("in_{tensor}") });
    let mut noise = given("noise");
    noise["next"] = json!({ "output": "velocity", "scale": -1.0 / 3.0, "keep": true });
    // The tiny model takes three steps.
    let file = json!({
        "format": "trefoil-pipeline", "version": 1, "name": "pi05",
        "stages": [
            { "name": "text", "model": stage("text"), "inputs": { "tokens": given("tokens") } },
            { "name": "vision", "model": stage("vision"), "inputs": { "image": given("image") } },
            { "name": "prefix", "model": stage("prefix"), "inputs": {
                "image_emb": from("vision", "image_emb"), "text_emb": from("text", "text_emb") } },
            { "name": "denoise", "model": stage("denoise"), "repeat": 3, "inputs": {
                "x_t": noise,
                "t": { "fill": 1.0, "next": { "add": -1.0 / 3.0 } },
                "k0": from("prefix", "k0"), "v0": from("prefix", "v0"),
                "k1": from("prefix", "k1"), "v1": from("prefix", "v1") } },
        ],
    });
    std::fs::write(space.path("pi05.json"), serde_json::to_vec(&file).unwrap()).unwrap();
    let arguments = ["run", "pi05.json"].into_iter().chain(QUICK).chain(["rten:CPU", "--output", "o.npz", "--json"]);
    let run = json(&space.output(arguments));
    assert_eq!(run["verify"]["ok"], true, "{}", run["verify"]);
    let outputs = npz::read_npz(&space.path("o.npz")).unwrap();
    let made = outputs.iter().find(|tensor| tensor.info().name == "denoise/x_t.next").unwrap();
    let wanted = npz::read_npz(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/pi05-actions.npz")).unwrap();
    let error = HostTensor::error_to_peak(made, &wanted[0]);
    assert!(error < 1e-3, "actions differ by {error:.1e} of their peak");
}
