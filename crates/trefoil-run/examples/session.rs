//! Trefoil as a library: a model on units, in about ten lines. Without arguments it makes a small model and runs it on the
//! embedded backend; `cargo run --release -p trefoil-run --example session -- MODEL.onnx UNIT…` takes any other.

use trefoil_core::HostTensor;
use trefoil_run::Session;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    trefoil_run::serve_if_worker();
    let (model, units, _folder) = arguments()?;
    let units: Vec<&str> = units.iter().map(String::as_str).collect();

    let mut session = Session::plan(&model, &units)?;
    println!("{}", session.verdict().message);
    let inputs: Vec<HostTensor> = session.inputs().cloned().map(HostTensor::zeros).collect();
    for output in session.run(&inputs.iter().collect::<Vec<_>>())? {
        println!("{} = {:?}", output.info(), output.to_f64().iter().take(4).collect::<Vec<_>>());
    }
    Ok(())
}

/// The model, the units, and the temporary folder that holds a model made here.
fn arguments() -> Result<(std::path::PathBuf, Vec<String>, tempfile::TempDir), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let mut arguments = std::env::args().skip(1);
    if let Some(model) = arguments.next() {
        return Ok((model.into(), arguments.collect(), folder));
    }
    let model = folder.path().join("small.onnx");
    trefoil_onnx::builder::sample_model().save(&model)?;
    Ok((model, vec!["rten:CPU".to_owned()], folder))
}
