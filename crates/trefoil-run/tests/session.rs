//! Trefoil as a library computes what the reference computes, on units that are always there.

use std::time::Duration;
use trefoil_core::HostTensor;
use trefoil_profile::Launcher;
use trefoil_run::{Session, SessionError, SessionOptions, WorkerCommand};

fn options(cache: &std::path::Path) -> SessionOptions {
    // The workers of a test are not the test program: its harness reads the command line itself.
    let program: std::path::PathBuf = env!("CARGO_BIN_EXE_trefoil-session-worker").into();
    let launcher = Launcher::new(program.clone(), vec!["--trefoil-worker=measure".into()]);
    let command = WorkerCommand { program, arguments: vec!["--trefoil-worker=run".into()] };
    SessionOptions {
        cache: cache.to_owned(),
        refine: Duration::from_secs(2),
        rounds: 2,
        workers: Some((launcher, command)),
        ..SessionOptions::default()
    }
}

#[test]
fn a_session_plans_and_runs() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("small.onnx");
    trefoil_onnx::builder::sample_model().save(&model).unwrap();
    let mut session = Session::with(&model, &["rten:CPU"], &options(&folder.path().join("cache"))).unwrap();
    assert!(session.verdict().choice.is_some() && !session.verdict().message.is_empty());
    assert!(session.comparison().best_baseline().is_some());
    let inputs: Vec<HostTensor> = session.inputs().cloned().map(HostTensor::zeros).collect();
    let given: Vec<&HostTensor> = inputs.iter().collect();
    let first = session.run(&given).unwrap();
    let scores = first.iter().find(|tensor| tensor.info().name == "scores").unwrap();
    let sum: f64 = scores.to_f64().iter().sum();
    assert!((sum - 1.0).abs() < 1e-4, "softmax sums to {sum}");
    let again = session.run(&given).unwrap();
    assert_eq!(first.len(), again.len());
    assert!(first.iter().zip(&again).all(|(one, other)| one.bytes() == other.bytes()));
    let missing = session.run(&[]).unwrap_err().to_string();
    assert!(missing.contains("needs input"), "{missing}");
}

#[test]
fn what_cannot_be_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let options = options(folder.path());
    let error = |model: &str, unit: &str| Session::with(folder.path().join(model), &[unit], &options).unwrap_err();
    assert!(matches!(error("m.onnx", "rten"), SessionError::Core(_)));
    assert!(matches!(error("m.onnx", "nobody:CPU"), SessionError::Unit(_)));
    assert!(matches!(error("m.onnx", "sim:lunar-lake/NPU"), SessionError::Simulated { .. }));
    assert!(error("absent.onnx", "rten:CPU").to_string().contains("absent.onnx"));
}
