//! Bad input: one clear line each, a non-zero exit code, no panic, nothing half-written.

mod common;

use common::Workspace;
use serde_json::Value;
use std::fs;
use trefoil_core::{DataType, HostTensor, TensorInfo};
use trefoil_onnx::builder::ModelBuilder;

const PROFILE: [&str; 6] = ["-u", "rten:CPU", "--quick", "--no-refine", "-o", "p.json"];

fn profile_fails(space: &Workspace, model: &str) -> String {
    let message = space.fails(["profile", model].into_iter().chain(PROFILE), 2);
    assert!(!space.path("p.json").exists(), "nothing is half-written");
    message
}

#[test]
fn files_that_are_no_models() {
    let space = Workspace::with_model();
    let bytes = fs::read(space.path("small.onnx")).unwrap();
    fs::write(space.path("truncated.onnx"), &bytes[..bytes.len() / 2]).unwrap();
    fs::write(space.path("garbage.onnx"), [0x5a; 4096]).unwrap();
    fs::write(space.path("empty.onnx"), []).unwrap();
    for name in ["truncated.onnx", "garbage.onnx", "empty.onnx", "missing.onnx"] {
        let message = profile_fails(&space, name);
        assert!(message.contains(name), "{message}");
    }
}

fn relu_model(dtype: DataType) -> ModelBuilder {
    let info = |name: &str| TensorInfo::new(name, dtype, [2u64, 3]);
    ModelBuilder::new("relu", 17).input(&info("x")).node("Relu", &["x"], &["y"], &[]).output(&info("y"))
}

#[test]
fn cycles_undefined_values_and_wrong_types() {
    let space = Workspace::new();
    let info = |name: &str| TensorInfo::new(name, DataType::F32, [2u64, 3]);
    let cycle = ModelBuilder::new("cycle", 17)
        .input(&info("x"))
        .node("Add", &["x", "b"], &["a"], &[])
        .node("Relu", &["a"], &["b"], &[])
        .output(&info("b"));
    cycle.save(&space.path("cycle.onnx")).unwrap();
    assert!(profile_fails(&space, "cycle.onnx").contains("cycle"));

    let undefined = ModelBuilder::new("undefined", 17)
        .input(&info("x"))
        .node("Add", &["x", "ghost"], &["y"], &[])
        .output(&info("y"));
    undefined.save(&space.path("undefined.onnx")).unwrap();
    assert!(profile_fails(&space, "undefined.onnx").contains("ghost"));

    // Relu on booleans is no ONNX operator: no unit may run it, and the reason must come through.
    relu_model(DataType::Bool).save(&space.path("types.onnx")).unwrap();
    assert!(profile_fails(&space, "types.onnx").contains("Relu"));
}

#[test]
fn inputs_that_do_not_fit() {
    let space = Workspace::new();
    relu_model(DataType::F32).save(&space.path("relu.onnx")).unwrap();
    let write = |name: &str, tensor: &HostTensor| trefoil_onnx::npz::write_npz(&space.path(name), &[tensor]).unwrap();
    write("shape.npz", &HostTensor::from_f32("x", [3u64, 2], &[0.0; 6]));
    write("type.npz", &HostTensor::from_i64("x", [2u64, 3], &[0; 6]));
    write("name.npz", &HostTensor::from_f32("z", [2u64, 3], &[0.0; 6]));
    fs::write(space.path("text.npz"), "no archive").unwrap();
    for (file, expected) in [
        ("shape.npz", "[3, 2]"),
        ("type.npz", "i64"),
        ("name.npz", "x"),
        ("text.npz", "text.npz"),
        ("none.npz", "none.npz"),
    ] {
        let message =
            space.fails(["run", "relu.onnx", "-u", "rten:CPU", "--quick", "--input", file, "--output", "out.npz"], 2);
        assert!(message.contains(expected), "{file}: {message}");
        assert!(!space.path("out.npz").exists());
    }
}

#[test]
fn units_that_are_not_there() {
    let space = Workspace::with_model();
    for (unit, expected) in
        [("tpu:0", "tpu"), ("rten:NPU", "NPU"), ("rten:CPU@4000", "4000"), ("sim:no-such-soc/CPU", "no-such-soc")]
    {
        let message = space.fails(["profile", "small.onnx", "-u", unit, "--quick", "-o", "p.json"], 2);
        assert!(message.contains(expected), "{unit}: {message}");
    }
}

#[test]
fn profiles_and_plans_of_something_else() {
    let space = Workspace::with_model();
    space.run(["profile", "small.onnx"].into_iter().chain(PROFILE));
    space.run(["plan", "p.json", "-o", "plan.json"]);
    relu_model(DataType::F32).save(&space.path("other.onnx")).unwrap();
    let message = space.fails(["run", "other.onnx", "--profile", "p.json", "--quick"], 2);
    assert!(message.contains("small"), "names what the profile is of: {message}");
    let message = space.fails(["run", "other.onnx", "--plan", "plan.json", "--quick"], 2);
    assert!(message.contains("small"), "names what the plan is for: {message}");

    let plan = fs::read_to_string(space.path("plan.json")).unwrap();
    fs::write(space.path("absent.json"), plan.replace("rten:CPU", "tpu:0")).unwrap();
    assert!(space.fails(["run", "small.onnx", "--plan", "absent.json", "--quick"], 2).contains("tpu"));

    fs::write(space.path("not.json"), "{\"format\":").unwrap();
    assert!(space.fails(["plan", "not.json"], 2).contains("not.json"));
    assert!(space.fails(["plan", "plan.json"], 2).contains("plan.json"));
    let profile = fs::read_to_string(space.path("p.json")).unwrap();
    fs::write(
        space.path("newer.json"),
        profile.replacen("\"version\": 1", "\"version\": 99", 1).replacen("\"version\":1", "\"version\":99", 1),
    )
    .unwrap();
    assert!(space.fails(["plan", "newer.json"], 2).contains("99"));
    assert!(space.fails(["plan", "p.json", "--method", "psychic"], 2).contains("psychic"));
    assert!(space.fails(["plan", "p.json", "--pin", "NoSuchThing*=rten:CPU"], 2).contains("NoSuchThing"));
    assert!(space.fails(["plan", "p.json", "--objective", "energy"], 2).contains("watts"));
}

/// The sample profile with one change, which must be refused in one line that names the operator.
#[test]
fn damaged_profiles_name_the_operator() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU", "rten:CPU@0"]);
    let profile: Value = serde_json::from_slice(&fs::read(space.path("p.json")).unwrap()).unwrap();
    let refused = |what: &str, change: &dyn Fn(&mut Value)| -> String {
        let mut damaged = profile.clone();
        change(&mut damaged);
        assert_ne!(damaged, profile, "{what}");
        fs::write(space.path("damaged.json"), serde_json::to_vec(&damaged).unwrap()).unwrap();
        let messages = ["auto", "sequential", "dag"]
            .map(|method| space.fails(["plan", "damaged.json", "--method", method, "-o", "plan.json"], 2));
        assert!(!space.path("plan.json").exists(), "{what}: nothing is half-written");
        assert!(messages.iter().all(|message| *message == messages[0]), "{what}: {messages:?}");
        messages[0].clone()
    };
    let operator = &profile["models"][0]["operators"][1];
    let (name, signature) = (operator["name"].as_str().unwrap(), operator["signature"].clone());
    let of_operator = |record: &Value| record["subject"]["signature"] == signature;
    let negative = refused("a negative time", &|profile| {
        for record in profile["measurements"].as_array_mut().unwrap() {
            if of_operator(record) {
                record["outcome"]["timing"]["total"]["median"] = Value::from(-1.0);
            }
        }
    });
    assert!(negative.contains(name) && negative.contains("-1"), "{negative}");
    let nowhere = refused("an operator that no unit runs", &|profile| {
        let records = profile["measurements"].as_array_mut().unwrap();
        records.retain(|record| record["subject"]["kind"] != "whole-model");
        for record in records {
            if of_operator(record) {
                record["outcome"] =
                    serde_json::json!({ "result": "failed", "stage": "compile", "reason": "unsupported" });
            }
        }
    });
    assert!(nowhere.contains(name) && nowhere.contains("unsupported"), "{nowhere}");
    let missing = refused("a missing measurement", &|profile| {
        profile["measurements"].as_array_mut().unwrap().retain(|record| !of_operator(record));
    });
    assert!(missing.contains(name), "{missing}");
    let cycle = refused("a cycle", &|profile| {
        let operators = &mut profile["models"][0]["operators"];
        let last = operators.as_array().unwrap().len() - 1;
        let output = operators[last]["outputs"][0].clone();
        operators[1]["inputs"].as_array_mut().unwrap().push(output.clone());
        let readers = profile["models"][0]["tensors"][output.as_u64().unwrap() as usize]["consumers"].as_array_mut();
        readers.unwrap().push(Value::from(1));
    });
    assert!(cycle.contains(name), "{cycle}");
    assert!(refused("no units", &|profile| profile["units"] = serde_json::json!([])).contains("unit"));
    assert!(refused("another version", &|profile| profile["version"] = Value::from(7)).contains('7'));
    // JSON has no NaN: such a file is no profile, whoever wrote it.
    let text = fs::read_to_string(space.path("p.json")).unwrap();
    let median = text.find("\"median\":").unwrap();
    let end = median + text[median..].find(',').unwrap();
    fs::write(space.path("nan.json"), format!("{}\"median\":NaN{}", &text[..median], &text[end..])).unwrap();
    let message = space.fails(["plan", "nan.json"], 2);
    assert!(message.contains("nan.json") && message.contains("measurement"), "{message}");
    let first = profile["measurements"].as_array().unwrap().iter().position(of_operator).unwrap();
    let mark = 0.0625;
    let mut marked = profile.clone();
    marked["measurements"][first]["outcome"]["timing"]["total"]["median"] = Value::from(mark);
    let text = serde_json::to_string(&marked).unwrap().replace(&format!("\"median\":{mark}"), "\"median\":1e400");
    fs::write(space.path("endless.json"), text).unwrap();
    let message = space.fails(["plan", "endless.json"], 2);
    assert!(message.contains("1e400") && message.contains(&format!("of operator `{name}`")), "{message}");
    let odd = refused("a tensor below 0", &|profile| {
        profile["models"][0]["operators"][1]["inputs"] = serde_json::json!([-1]);
    });
    assert!(odd.contains(&format!("operator 1 `{name}`")) && odd.contains("-1"), "{odd}");
    let phantom = refused("a reader that does not read", &|profile| {
        profile["models"][0]["tensors"][0]["consumers"] = serde_json::json!([0, 1, 2]);
    });
    assert!(phantom.contains("which does not read it"), "{phantom}");
    let heavy = refused("weights that wrap around", &|profile| {
        profile["models"][0]["operators"][1]["weight_bytes"] = Value::from(1u64 << 63);
    });
    assert!(heavy.contains(name) && heavy.contains("9223372036854775808 bytes of weights"), "{heavy}");
    let endless = refused("a time of 1e308", &|profile| {
        profile["measurements"][first]["outcome"]["timing"]["total"]["median"] = Value::from(1e308);
    });
    assert!(endless.contains(name) && endless.contains("holds 1e308, which is no time"), "{endless}");
    // A terminal obeys control characters, wherever they come from.
    let coloured = refused("a reason that holds some", &|profile| {
        let records = profile["measurements"].as_array_mut().unwrap();
        records.retain(|record| record["subject"]["kind"] != "whole-model");
        for record in records.iter_mut().filter(|record| of_operator(record)) {
            let reason = "no \u{1b}[31mred\u{7}";
            record["outcome"] = serde_json::json!({ "result": "failed", "stage": "compile", "reason": reason });
        }
    });
    assert!(coloured.contains("\\u{1b}[31mred\\u{7}") && !coloured.contains('\u{1b}'), "{coloured}");
    let absent = space.fails(["plan", "p.json", "-u", "openvino:NPU"], 2);
    assert!(absent.contains("openvino:NPU") && absent.contains("rten:CPU"), "{absent}");
    for (flag, value, expected) in [
        ("--what-if", "melt:rten:CPU", "melt"),
        ("--budget", "soon", "soon"),
        ("--diff", "missing.json", "missing.json"),
        ("--workload", "missing.json", "missing.json"),
        ("--objective", "throughput", "pipeline"),
    ] {
        let output = if flag == "--objective" {
            space.fails(["plan", "p.json", "--method", "dag", flag, value], 2)
        } else if ["--what-if", "--budget"].contains(&flag) {
            space.usage(["plan", "p.json", flag, value])
        } else {
            space.fails(["plan", "p.json", flag, value], 2)
        };
        assert!(output.contains(expected), "{flag}: {output}");
    }
}

#[test]
fn impossible_streams_and_splits_name_the_file() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU"]);
    let stream = |units: &str, cost: &str, bytes: u64| {
        format!(r#"{{"units": [{units}], "blocks": [{{"cost": [1, {cost}], "weight_bytes": {bytes}}}]}}"#)
    };
    let (two, twins) = (r#"{"name": "a"}, {"name": "b"}"#, r#"{"name": "a"}, {"name": "a"}"#);
    for (text, expected) in [
        (stream(two, "1e308", 0), "block 0 on b costs 1e308, which is no time"),
        (stream(two, "-1", 0), "block 0 on b costs -1, which is no time"),
        (stream(two, "1", 1 << 62), "block 0 has 4611686018427387904 bytes of weights"),
        (stream(twins, "1", 0), "two units are named `a`"),
    ] {
        fs::write(space.path("s.json"), text).unwrap();
        let message = space.fails(["pipeline", "--problem", "s.json"], 2);
        assert!(message.contains("s.json") && message.contains(expected), "{expected}: {message}");
    }
    fs::write(space.path("s.json"), stream(two, "1", 5)).unwrap();
    space.run(["pipeline", "--problem", "s.json"]);
    fs::write(space.path("split.json"), r#"{"0": "rten:CPU", "1": "rten:CPU", "0": "rten:CPU"}"#).unwrap();
    let message = space.fails(["plan", "p.json", "--import", "split.json"], 2);
    assert!(message.contains("split.json") && message.contains("it names operator `0` twice"), "{message}");
}

#[test]
fn impossible_workloads_name_the_file_and_the_application() {
    let space = Workspace::with_model();
    space.run(["profile", "small.onnx"].into_iter().chain(PROFILE));
    for (odd, expected) in [
        (r#""weight": 0"#, "a weight of 0, which is no weight (from 1e-9 to 1e9)"),
        (r#""weight": -2.5"#, "a weight of -2.5, which is no weight"),
        (r#""weight": 1e308"#, "a weight of 1e308, which is no weight"),
        (r#""items": 3, "period_ms": 1e308"#, "a period_ms of 1e308, which is no time"),
        (r#""items": 3, "period_ms": 1e12"#, "a last item after a time of 2e12, which is no time"),
        (r#""offset_ms": 1e308"#, "an offset_ms of 1e308, which is no time (0, or from 1e-12 to 1e12 ms)"),
        (r#""deadline_ms": 1e300"#, "a deadline_ms of 1e300"),
        (r#""period_ms": -1"#, "a period_ms of -1, which is no time"),
    ] {
        let text = format!(
            r#"{{"applications": [{{"stages": [{{"profile": 0}}]}}, {{"stages": [{{"profile": 0}}], {odd}}}]}}"#
        );
        std::fs::write(space.path("w.json"), text).unwrap();
        let message = space.fails(["plan", "p.json", "--workload", "w.json"], 2);
        assert!(message.contains("w.json: application 1 has ") && message.contains(expected), "{odd}: {message}");
    }
}

#[test]
fn symbolic_shapes_are_all_listed() {
    let space = Workspace::new();
    let info = TensorInfo::new("y", DataType::F32, [2u64, 3]);
    let model = ModelBuilder::new("symbolic", 17)
        .symbolic_input("x", DataType::F32, &["batch", "3"])
        .node("Relu", &["x"], &["y"], &[])
        .output(&info);
    model.save(&space.path("symbolic.onnx")).unwrap();
    let message = profile_fails(&space, "symbolic.onnx");
    assert!(message.contains("batch") && message.contains("--shape"), "{message}");
    space.run(["profile", "symbolic.onnx", "--shape", "x=2,3"].into_iter().chain(PROFILE));
}

/// Wherever there is `--shape`, both its forms are understood, and an extent of 0 is refused where the model has none.
#[test]
fn shapes_are_given_alike_everywhere() {
    let space = Workspace::new();
    let info = |dims: &[u64]| TensorInfo::new("y", DataType::F32, dims);
    let relu = |name: &str, dims: &[&str]| {
        ModelBuilder::new(name, 17).symbolic_input("x", DataType::F32, dims).node("Relu", &["x"], &["y"], &[])
    };
    relu("open", &["batch", "3"]).output(&info(&[2, 3])).save(&space.path("open.onnx")).unwrap();
    relu("empty", &["0", "3"]).output(&info(&[0, 3])).save(&space.path("empty.onnx")).unwrap();
    let unit = ["-u", "rten:CPU", "--quick", "--no-refine", "--rounds", "1"];
    for command in [
        &["inspect"][..],
        &["profile", "-u", "rten:CPU", "--quick", "--no-refine", "-o", "p.json"],
        &["plan", "--on", "sim:lunar-lake"],
        &["emulate", "--rounds", "1"],
    ] {
        let given = |shape: &'static str| command.iter().copied().chain(["open.onnx", "--shape", shape]);
        space.run(given("open/x=2,3"));
        for (shape, wanted) in [("x=0,3", "extents start at 1"), ("other/x=2,3", "`other/x`, which open does not have")]
        {
            let message = space.fails(given(shape), 2);
            assert!(message.contains(wanted), "{command:?} {shape}: {message}");
        }
    }
    space.run(["inspect", "empty.onnx", "--shape", "x=0,3"]);

    // A survey: for all models or one; a model's own settings win.
    fs::copy(space.path("open.onnx"), space.path("wide.onnx")).unwrap();
    let shapes = ["--shape", "x=2,3", "--shape", "wide/x=4,3", "--json"];
    let own = ["survey", "open.onnx", "--model", "path=wide.onnx", "--model", "path=open.onnx;name=own;x=8,3"];
    let output = space.output(own.into_iter().chain(unit).chain(shapes));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let models = found["models"].as_array().unwrap();
    assert_eq!(models.len(), 3, "{found:#}");
    assert!(models.iter().all(|model| model["ok"] == true), "{found:#}");
    for (shape, wanted) in
        [("x=0,3", "extents start at 1"), ("x=2", "where the model has 2"), ("z=1", "none of the models has")]
    {
        let message = space.fails(["survey", "open.onnx", "wide.onnx", "--shape", shape].into_iter().chain(unit), 2);
        assert!(message.contains(wanted), "{shape}: {message}");
    }
    // What is read and written besides the models is looked at before the first one is measured.
    for (settings, wanted) in [
        ("path=wide.onnx;expect=gone.npz", "gone.npz"),
        ("path=wide.onnx;input=gone.npz", "gone.npz"),
        ("path=wide.onnx;output=no/folder/out.npz", "no/folder/out.npz"),
        ("path=wide.onnx;output=open.onnx", "open.onnx is read and would be overwritten"),
    ] {
        let arguments = ["survey", "open.onnx", "--shape", "x=2,3", "--model", settings];
        let message = space.fails(arguments.into_iter().chain(unit), 2);
        assert!(message.contains(wanted), "{settings}: {message}");
    }
}

/// The repository's demo model.
fn demo_model() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/demo-model").to_owned()
}

/// Told at once, with the path that the user gave and never with that of a temporary file.
#[test]
fn unwritable_outputs() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU"]);
    fs::remove_dir_all(space.path("cache")).unwrap();
    fs::write(space.path("prompts.txt"), "a red circle\n").unwrap();
    let (demo, unit) = (demo_model(), ["-u", "rten:CPU"]);
    let transformer = format!("{demo}/transformer");
    for (command, flag) in [
        (&["make-model"][..], None),
        (&["profile", "small.onnx", unit[0], unit[1]], Some("-o")),
        (&["plan", "p.json"], Some("-o")),
        (&["plan", "p.json"], Some("--certificate")),
        (&["run", "small.onnx", unit[0], unit[1]], Some("--output")),
        (&["run", "small.onnx", unit[0], unit[1]], Some("--report")),
        (&["run", "small.onnx", unit[0], unit[1]], Some("--trace")),
        (&["survey", "small.onnx", unit[0], unit[1]], Some("--report")),
        (&["bench", "pairs", "small.onnx", "small.onnx", unit[0], unit[1]], Some("--report")),
        (&["bench", "corun", "small.onnx", "small.onnx", unit[0], unit[1]], Some("-o")),
        (&["weights", "pack", &transformer], Some("-o")),
        (&["video", "pack", &demo], Some("-o")),
        (&["video", "encode", &demo, "prompts.txt"], Some("-o")),
        (&["video", "generate", &demo, "a red circle"], Some("-o")),
        (&["video", "generate", &demo, "a red circle", "-o", "clip.png"], Some("--contact-sheet")),
        (&["video", "stream", &demo, "prompts.txt", "-o", "clips"], Some("--trace")),
    ] {
        for (place, wanted) in [
            ("no/folder/out.png", "folder no/folder does not exist; create it"),
            ("p.json/out.png", "p.json is a file; name another folder"),
        ] {
            let message = space.fails(command.iter().copied().chain(flag).chain([place]), 2);
            let end = format!("{place}: {wanted}");
            assert!(message.ends_with(&end), "{command:?} {flag:?}: {message}");
        }
    }
    for entry in fs::read_dir(space.path(".")).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(["small.onnx", "p.json", "prompts.txt"].iter().any(|known| name == *known), "{}", name.display());
    }
    for folder in ["small.onnx", "small.onnx/deep"] {
        let message = space.fails(["inspect", "small.onnx", "--extract", folder], 2);
        assert!(message.ends_with("small.onnx is a file; name another folder"), "{message}");
    }
    let message = space.fails(["make-model", "folder/"], 2);
    assert!(message.contains("folder/: it is no file's name"), "{message}");
}

/// A file that is renamed into its place would put itself where a pipe or a device was.
#[test]
#[cfg(unix)]
fn what_is_no_file_is_not_replaced_by_one() {
    let space = Workspace::with_model();
    for name in ["pipe", "pipe.png"] {
        rustix::fs::mknodat(rustix::fs::CWD, space.path(name), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    }
    fs::write(space.path("prompts.txt"), "a red circle\n").unwrap();
    let demo = demo_model();
    for command in [
        &["run", "small.onnx", "-u", "rten:CPU", "--output", "pipe"][..],
        &["survey", "-u", "rten:CPU", "--model", "path=small.onnx;output=pipe"],
        &["video", "encode", &demo, "prompts.txt", "-o", "pipe"],
        &["video", "pack", &demo, "-o", "pipe"],
        &["video", "generate", &demo, "a red circle", "-o", "pipe.png"],
        &["video", "generate", &demo, "a red circle", "-o", "clip.png", "--contact-sheet", "pipe.png"],
    ] {
        let message = space.fails(command, 2);
        assert!(message.ends_with("it is a named pipe; name a regular file"), "{command:?}: {message}");
        assert!(!space.path("cache/models").exists(), "{command:?}: something was prepared");
    }
    let sheet = ["video", "generate", &demo, "a red circle", "-o", "clip.png", "--contact-sheet", "sheet.webp"];
    assert!(space.fails(sheet, 2).contains("sheet.webp: contact sheets are PNG"));
}

/// A limit on the size of files stands for a disk that fills up while something is written.
#[test]
#[cfg(unix)]
fn what_cannot_be_written_to_its_end_is_told_with_its_path_and_leaves_nothing() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU"]);
    fs::write(space.path("prompts.txt"), "a red circle\n").unwrap();
    let demo = demo_model();
    let before = fs::read_dir(space.path(".")).unwrap().count();
    for command in [
        &["make-model", "out.onnx"][..],
        &["plan", "p.json", "-o", "out.json"],
        &["weights", "pack", &format!("{demo}/transformer"), "-o", "out.trefoil"],
        &["video", "encode", &demo, "prompts.txt", "-o", "out.safetensors"],
    ] {
        let output = std::process::Command::new("sh")
            // The signal that comes with the error would end the program.
            .args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_trefoil")])
            .args(command)
            .current_dir(space.path("."))
            .env("TREFOIL_CACHE", space.path("cache"))
            .output()
            .unwrap();
        let message = common::stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {message}");
        let line = message.trim_end();
        assert!(line.contains("out.") && line.contains("File too large") && !line.contains(".trefoil-"), "{message}");
        assert_eq!(line.lines().count(), 1, "{message}");
        assert_eq!(fs::read_dir(space.path(".")).unwrap().count(), before, "{command:?} left something");
    }
}

#[test]
fn what_is_read_is_not_overwritten() {
    let space = Workspace::with_model();
    space.profile(&["rten:CPU"]);
    space.run(["plan", "p.json", "-o", "plan.json"]);
    for (flag, path) in [("--output", "small.onnx"), ("--trace", "./small.onnx"), ("--report", "plan.json")] {
        let before = fs::read(space.path(path)).unwrap();
        let message = space.fails(["run", "small.onnx", "--plan", "plan.json", "--quick", flag, path], 2);
        assert!(message.contains("would be overwritten"), "{flag} {path}: {message}");
        assert_eq!(fs::read(space.path(path)).unwrap(), before);
    }
    let twice = ["run", "small.onnx", "--plan", "plan.json", "--report", "new", "--trace", "./new"];
    assert!(space.fails(twice, 2).contains("two outputs are named new;"));
}

/// A path is bytes. Reports and JSON show what of it is text.
#[test]
#[cfg(target_os = "linux")]
fn paths_that_are_no_text_are_paths() {
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStrExt as _;
    let space = Workspace::with_model();
    let named = |name: &[u8]| OsStr::from_bytes(name).to_owned();
    let model = named(b"m\xff;x=1.onnx");
    fs::copy(space.path("small.onnx"), space.path(".").join(&model)).unwrap();
    fs::write(space.path("prompts.txt"), "a red circle\n").unwrap();
    let unit = ["-u", "rten:CPU", "--quick", "--no-refine"].map(OsString::from);
    let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
    let run = |parts: &[&[OsString]]| -> Value {
        let output = space.output(parts.concat().into_iter().chain(["--json".into()]));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let out = |name: &[u8]| [OsString::from("-o"), named(name)];
    let profile = run(&[&words(&["profile"]), std::slice::from_ref(&model), &unit, &out(b"p\xff.json")]);
    assert_eq!(profile["profile"], "p\u{fffd}.json");
    let once = words(&["--rounds", "1", "--report", "r.html"]);
    run(&[&words(&["run"]), std::slice::from_ref(&model), &unit, &once]);
    assert!(fs::read_to_string(space.path("r.html")).unwrap().contains("m\u{fffd};x=1"));
    let survey = run(&[&words(&["survey"]), std::slice::from_ref(&model), &unit, &once]);
    assert_eq!(survey["models"][0]["ok"], true, "{survey:#}");
    let demo = demo_model();
    let encoded = run(&[&words(&["video", "encode", &demo, "prompts.txt"]), &out(b"t\xff.safetensors")]);
    assert_eq!(encoded["output"], "t\u{fffd}.safetensors");
    let clip = run(&[&words(&["video", "generate", &demo, "a red circle", "--frames", "1"]), &out(b"c\xff.webp")]);
    assert_eq!(clip["output"], "c\u{fffd}.webp");
    for name in [&b"p\xff.json"[..], b"t\xff.safetensors", b"c\xff.webp"] {
        assert!(space.path(".").join(named(name)).is_file(), "{name:?}");
    }
}

/// What no measurement can mend is told before there is one.
#[test]
fn questions_that_no_planner_answers_are_refused_before_anything_is_measured() {
    let space = Workspace::with_model();
    for command in [&["run", "small.onnx"][..], &["survey", "small.onnx"], &["run", "small.onnx", "small.onnx"]] {
        for (more, wanted) in [
            (&["--method", "psychic"][..], "there is no planning method `psychic`"),
            (&["--method", "pareto"], "there is no planning method `pareto`"),
            (&["--pin", "Conv*=ort:CPU"], "pin"),
            (&["--objective", "throughput", "--method", "dag"], "throughput"),
            (&["-u", "rten:NPU"], "has no device `NPU`"),
        ] {
            let message = space.fails(command.iter().chain(&["-u", "rten:CPU"]).chain(more), 2);
            assert!(message.contains(wanted), "{command:?} {more:?}: {message}");
        }
        if !trefoil_profile::power_is_metered() {
            let message = space.fails(command.iter().chain(&["-u", "rten:CPU", "--objective", "energy"]), 2);
            assert!(message.contains("no power is known of rten:CPU") && message.contains("--watts"), "{message}");
        }
        assert!(!space.path("cache").exists(), "{command:?}: something was prepared");
    }
    let three = ["run", "small.onnx", "small.onnx", "small.onnx", "-u", "rten:CPU", "--method", "joint"];
    assert!(space.fails(three, 2).contains("plans two models, not 3"));
    let items = ["run", "small.onnx", "small.onnx", "-u", "rten:CPU", "--method", "joint", "--items", "2"];
    assert!(space.fails(items, 2).contains("leave --items out"));
}

/// `nan` is a number to the parser of numbers, and so is a negative one.
#[test]
fn numbers_that_measure_nothing_are_refused() {
    let space = Workspace::with_model();
    for (flag, value) in [
        ("--refine-budget", "nan"),
        ("--refine-budget", "-1"),
        ("--cap-ms", "inf"),
        ("--cap-ms", "0"),
        ("--runs", "0"),
        ("--rounds", "0"),
    ] {
        let message = space.fails(["run", "small.onnx", "-u", "rten:CPU", flag, value], 2);
        assert!(message.contains(&format!("invalid value '{value}' for '{flag}")), "{message}");
    }
    for (command, flag, value) in [
        (&["emulate", "small.onnx"][..], "--scale", "-2"),
        (&["emulate", "small.onnx"], "--rounds", "0"),
        (&["bench", "pairs", "small.onnx", "small.onnx", "-u", "rten:CPU"], "--pair-ms", "-1"),
        (&["run", "small.onnx", "small.onnx", "-u", "rten:CPU"], "--rate", "-1,2"),
        (&["bench", "kernels"], "--core", "4000"),
        (&["bench", "video"], "--decoder-ms", "-1"),
    ] {
        let message = space.fails(command.iter().copied().chain([flag, value]), 2);
        let told = value.split(',').next().unwrap();
        assert!(message.contains(told) && !message.contains("unexpected argument"), "{command:?}: {message}");
    }
}

#[test]
fn a_usage_error_is_one_line_and_help_is_help() {
    let space = Workspace::new();
    for arguments in [
        &["profile"][..],
        &["run", "m.onnx", "--no-such-flag"],
        &["plan", "p.json", "--objective", "speed"],
        &["plan", "p.json", "--budget", "soon"],
        &["no-such-command"],
    ] {
        let message = space.fails(arguments.iter().copied(), 2);
        assert!(message.ends_with("try `--help`") && !message.contains("Usage"), "{message}");
    }
    space.run(["run", "--help"]);
    space.run(["--version"]);
}

/// Nobody writes into the pipe: a command that opened it would wait for ever.
#[test]
#[cfg(unix)]
fn pipes_folders_and_devices_are_refused_at_once() {
    let space = Workspace::with_model();
    space.run(["profile", "small.onnx", "-u", "rten:CPU", "--quick", "--no-refine", "-o", "p.json"]);
    for name in ["pipe", "pipe.safetensors", "pipe.onnx", "pipe.npz"] {
        rustix::fs::mknodat(rustix::fs::CWD, space.path(name), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    }
    fs::create_dir(space.path("folder")).unwrap();
    for (what, name) in [("a named pipe", "pipe"), ("a folder", "folder"), ("a device", "/dev/null")] {
        for command in [
            &["weights", "info", "X"][..],
            &["weights", "verify", "X"],
            &["video", "info", "X"],
            &["inspect", "X"],
            &["plan", "X"],
            &["explain", "X"],
            &["pipeline", "--problem", "X"],
            &["run", "X", "--plan", "p.json"],
            &["run", "small.onnx", "--plan", "X"],
            &["plan", "p.json", "--workload", "X"],
        ] {
            let command: Vec<&str> = command.iter().map(|&word| if word == "X" { name } else { word }).collect();
            let message = space.fails(&command, 2);
            assert!(message.contains(&format!("{name}: it is {what}; name a regular file")), "{command:?}: {message}");
            assert_eq!(message.trim_end().lines().count(), 1, "{message}");
        }
    }
    for command in [
        &["weights", "pack", "pipe.safetensors", "-o", "o.trefoil"][..],
        &["video", "pack", "pipe.safetensors", "-o", "o.trefoil"],
        &["video", "encode", ".", "pipe", "-o", "t.safetensors"],
        &["video", "decode", ".", "--latent", "pipe.safetensors:latent", "-o", "c.png"],
        &["profile", "pipe.onnx", "-u", "rten:CPU", "-o", "q.json"],
        &["profile", "small.onnx", "--input", "pipe.npz", "-u", "rten:CPU", "-o", "q.json"],
    ] {
        let message = space.fails(command, 2);
        assert_eq!(message.trim_end().lines().count(), 1, "{message}");
    }
}
