//! Whole-program tests that need OpenVINO and ONNX Runtime: a model that no single unit here runs rightly, and a sample of
//! `../shared/models` through profile, plan and verified run.

mod common;

use common::{Workspace, json, stdout, trefoil};
use trefoil_core::{DataType, HostTensor, TensorInfo};
use trefoil_onnx::builder::{Attribute, ModelBuilder};
use trefoil_onnx::npz;

/// Whether both libraries are there. Without them: a message, or a failure where they are required.
fn backends_present() -> bool {
    let space = Workspace::new();
    let output = space.output(["units", "--json"]);
    let listed = json(&output);
    let available = |unit: &str| {
        listed["units"].as_array().unwrap().iter().any(|row| row["unit"] == unit && row["available"] == true)
    };
    if available("openvino:CPU") && available("ort:CPU") {
        return true;
    }
    assert!(
        std::env::var_os("TREFOIL_REQUIRE_BACKENDS").is_none(),
        "OpenVINO and ONNX Runtime are required: {}",
        stdout(&output)
    );
    eprintln!("skipped: OpenVINO or ONNX Runtime is not installed; ./test installs them");
    false
}

/// One-sided DFT (OpenVINO gives another rank) beside an operator of OpenVINO's own domain (nobody else has it).
fn needs_both() -> ModelBuilder {
    let info = |name: &str, shape: &[u64]| TensorInfo::new(name, DataType::F32, shape);
    ModelBuilder::new("needs-both", 17)
        .input(&info("signal", &[4, 64, 1]))
        .node("DFT", &["signal"], &["spectrum"], &[("axis", Attribute::Int(1)), ("onesided", Attribute::Int(1))])
        .random_constant("mix", &[2, 8], 0.5)
        .node("MatMul", &["spectrum", "mix"], &["mixed"], &[])
        .node_in("org.openvinotoolkit", 1, "Swish", &["mixed"], &["gated"], &[])
        .node("Softmax", &["gated"], &["scores"], &[("axis", Attribute::Int(2))])
        .output(&info("scores", &[4, 33, 8]))
}

/// What `needs_both` must give, in f64.
fn expected(signal: &[f64], mix: &[f64]) -> Vec<f64> {
    let mut out = Vec::new();
    for batch in 0..4 {
        for bin in 0..33 {
            let angle = |sample: usize| -2.0 * std::f64::consts::PI * (bin * sample % 64) as f64 / 64.0;
            let part =
                |f: fn(f64) -> f64| (0..64).map(|sample| signal[batch * 64 + sample] * f(angle(sample))).sum::<f64>();
            let (re, im) = (part(f64::cos), part(f64::sin));
            let gated: Vec<f64> =
                (0..8).map(|column| re * mix[column] + im * mix[8 + column]).map(|x| x / (1.0 + (-x).exp())).collect();
            let peak = gated.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = gated.iter().map(|x| (x - peak).exp()).sum();
            out.extend(gated.iter().map(|x| (x - peak).exp() / sum));
        }
    }
    out
}

#[test]
fn a_model_that_no_single_unit_runs_rightly_runs_split() {
    if !backends_present() {
        return;
    }
    let space = Workspace::new();
    needs_both().save(&space.path("both.onnx")).unwrap();
    let values: Vec<f32> = (0..256).map(|index| ((index * 37 % 101) as f32 / 50.0) - 1.0).collect();
    let signal = HostTensor::from_f32("signal", [4u64, 64, 1], &values);
    npz::write_npz(&space.path("in.npz"), &[&signal]).unwrap();
    let run = json(&space.output([
        "run",
        "both.onnx",
        "-u",
        "openvino:CPU",
        "-u",
        "ort:CPU",
        "--quick",
        "--rounds",
        "1",
        "--input",
        "in.npz",
        "--output",
        "out.npz",
        "--verify",
        "--json",
    ]));
    for unit in ["openvino:CPU", "ort:CPU"] {
        assert!(run["baselines"][unit].is_null(), "{unit} alone must not run this model: {run:#}");
    }
    let executed: std::collections::BTreeSet<&str> =
        run["executed"].as_array().unwrap().iter().map(|unit| unit.as_str().unwrap()).collect();
    assert_eq!(executed.len(), 2, "{run:#}");
    assert_eq!(run["verify"]["ok"], true, "{run:#}");

    let bytes = needs_both().to_bytes();
    let mix = trefoil_onnx::builder::constant_of(&bytes, "mix").unwrap().to_f64();
    let wanted = expected(&signal.to_f64(), &mix);
    let got = npz::read_npz(&space.path("out.npz")).unwrap().remove(0).to_f64();
    assert_eq!(got.len(), wanted.len());
    let worst = got.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-4, "against f64: {worst}");
}

#[test]
fn a_dozen_shared_models_profile_plan_and_verify() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models");
    if !folder.join("MANIFEST.json").exists() {
        eprintln!("skipped: ../shared/models is not there");
        return;
    }
    if !backends_present() {
        return;
    }
    let models = [
        ("zoo_tiny/kan_tiny_fp32", 1e-4),
        ("zoo_tiny/hyena_tiny_fp32", 1e-4),
        ("zoo_tiny/hyena_rfft_tiny_fp32", 1e-4),
        ("zoo_tiny/mamba370m_tiny_fp32", 1e-4),
        ("zoo_tiny/mamba370m_loop_tiny_fp32", 1e-4),
        ("zoo_tiny/resnet50_tiny_int8", 0.03),
        ("zoo_tiny/vit_b16_tiny_fp16", 0.02),
        ("zoo_tiny/bitnet_tiny_int8", 0.03),
        ("zoo_tiny/pi05_text_tiny_fp32", 1e-4),
        ("light/light_shufflenet", 1e-3),
        ("node_tests/test_if", 1e-4),
        ("node_tests/test_qlinearconv", 1e-4),
    ];
    let space = Workspace::new();
    let mut command: Vec<String> = [
        "survey",
        "--quick",
        "--rounds",
        "1",
        "--refine-budget",
        "20",
        "--verify",
        "--json",
        "-u",
        "openvino:CPU",
        "-u",
        "ort:CPU",
        "-u",
        "rten:CPU",
    ]
    .map(str::to_owned)
    .to_vec();
    for (name, tolerance) in models {
        let (model, io) = if name.starts_with("node_tests") {
            (format!("{name}/model.onnx"), format!("{name}/io.npz"))
        } else {
            (format!("{name}.onnx"), format!("{name}.npz"))
        };
        let (model, io) = (folder.join(model).display().to_string(), folder.join(io).display().to_string());
        command.push("--model".to_owned());
        command.push(format!("name={name};path={model};input={io};expect={io};tolerance={tolerance}"));
    }
    let survey = json(&space.output(command));
    let models_done = survey["models"].as_array().unwrap();
    assert_eq!(models_done.len(), models.len());
    for model in models_done {
        assert_eq!(model["ok"], true, "{}: {}", model["name"], model["error"]);
    }
}

#[test]
fn strict_refuses_what_did_not_run_where_it_was_asked() {
    if !backends_present() {
        return;
    }
    let space = Workspace::new();
    needs_both().save(&space.path("both.onnx")).unwrap();
    let message = space
        .fails(["run", "both.onnx", "-u", "openvino:CPU", "-u", "ort:CPU", "--quick", "--rounds", "1", "--strict"], 4);
    assert!(message.contains("DFT") || message.contains("Swish"), "{message}");
}

#[test]
fn the_program_itself_starts_without_any_library() {
    let output = trefoil().args(["units", "--json"]).env_clear().env("PATH", "/nonexistent").output().unwrap();
    assert!(output.status.success());
}
