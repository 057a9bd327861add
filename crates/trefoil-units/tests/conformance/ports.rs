//! Ports, binding, and what must be refused.

use crate::bench::{Bench, Guarded};
use crate::case::{Case, own_folder};
use crate::numerics::compare;
use crate::{Subject, Verdict, ensure};
use trefoil_core::{DataType, HostTensor, TensorInfo, UnitAddress};
use trefoil_units::{CompileOptions, SubModel, UnitError};

fn plain() -> CompileOptions {
    CompileOptions::default()
}

/// Inputs written into the bound memory between runs are seen; outputs land in the bound memory each time.
pub fn changed_inputs_are_seen(subject: &Subject) -> Verdict {
    for name in ["mul_broadcast", "mul_i32", "add_i64", "transpose_u8", "bool_logic", "matmul_f16"] {
        let case = Case::own(name);
        let mut bench = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
        let (first, _) = bench.run()?;
        compare(subject, &case, &first)?;
        // Zero inputs: products and sums become zero, the negated conjunction true.
        for input in &mut bench.inputs {
            input.contents_mut().fill(0);
        }
        let (second, _) = bench.run()?;
        let ones = name == "bool_logic";
        ensure(second[0].to_f64().iter().all(|&value| (value != 0.0) == ones), || {
            format!("{name}: the changed input was not seen: {:?}", second[0].to_f64())
        })?;
        for (input, tensor) in bench.inputs.iter_mut().zip(&case.inputs) {
            input.contents_mut().copy_from_slice(tensor.bytes());
        }
        compare(subject, &case, &bench.run()?.0)?;
    }
    Ok(None)
}

/// Boolean outputs are the bytes 0 and 1.
pub fn booleans_are_zero_or_one(subject: &Subject) -> Verdict {
    for name in ["bool_logic", "cast_f32_bool"] {
        let case = Case::own(name);
        let mut bench = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
        let (outputs, _) = bench.run()?;
        ensure(outputs[0].bytes().iter().all(|byte| *byte <= 1), || format!("{name}: {:?}", outputs[0].bytes()))?;
    }
    Ok(None)
}

/// A second bind replaces the first; the first memory is left alone from then on.
pub fn rebinding(subject: &Subject) -> Verdict {
    let case = Case::own("matmul");
    let mut bench = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
    bench.run()?;
    let old = bench.outputs[0].contents().to_vec();
    let mut inputs: Vec<_> = case.inputs.iter().map(|tensor| Guarded::new(tensor.bytes().len())).collect();
    let mut output = Guarded::new(old.len());
    let input_buffers: Vec<_> = inputs.iter_mut().map(Guarded::buffer).collect();
    bench.bind_to(&input_buffers, &[output.buffer()]).map_err(|error| error.to_string())?;
    for (input, tensor) in inputs.iter_mut().zip(&case.inputs) {
        input.contents_mut().copy_from_slice(tensor.bytes());
    }
    // The old inputs must not be read any more.
    for input in &mut bench.inputs {
        input.contents_mut().fill(0xFF);
    }
    bench.run_fast()?;
    let result =
        HostTensor::from_bytes(case.outputs[0].info().clone(), output.contents()).map_err(|e| e.to_string())?;
    compare(subject, &case, &[result])?;
    ensure(bench.outputs[0].contents() == old, || "the run wrote to memory that is no longer bound".to_owned())?;
    bench.bind().map_err(|error| error.to_string())?;
    for (input, tensor) in bench.inputs.iter_mut().zip(&case.inputs) {
        input.contents_mut().copy_from_slice(tensor.bytes());
    }
    compare(subject, &case, &bench.run()?.0)?;
    Ok(None)
}

/// Several sub-models share buffers: one's output is the other's input, as in a plan.
pub fn chained_through_one_buffer(subject: &Subject) -> Verdict {
    let (relu, sigmoid) = (Case::own("relu"), Case::own("sigmoid"));
    let mut first = Bench::new(subject.backend, &subject.unit, &relu, &plain())?;
    let mut second = Bench::new(subject.backend, &subject.unit, &sigmoid, &plain())?;
    let shared = first.outputs[0].buffer();
    let own = second.outputs[0].buffer();
    second.bind_to(&[shared], &[own]).map_err(|error| error.to_string())?;
    first.run_fast()?;
    second.run_fast()?;
    let want: Vec<f64> = relu.outputs[0].to_f64().iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
    let have = HostTensor::from_bytes(sigmoid.outputs[0].info().clone(), second.outputs[0].contents())
        .map_err(|e| e.to_string())?;
    let worst = have.to_f64().iter().zip(&want).fold(0.0f64, |worst, (a, b)| worst.max((a - b).abs()));
    let limit = if subject.unit.kind.is_accelerator() { 5e-3 } else { 1e-5 };
    ensure(worst <= limit, || format!("the chained result is off by {worst:.1e}"))?;
    Ok(None)
}

/// Running without binding, waiting without running.
pub fn unbound_is_an_error(subject: &Subject) -> Verdict {
    let case = Case::own("relu");
    let mut bench =
        Bench::unbound(subject.backend, &subject.unit, &case, &plain()).map_err(|error| error.to_string())?;
    ensure(matches!(bench.compiled().submit(), Err(UnitError::Port { .. })), || {
        "submit without bind is no port error".to_owned()
    })?;
    ensure(bench.compiled().wait().is_err(), || "wait without submit is no error".to_owned())?;
    bench.bind().map_err(|error| error.to_string())?;
    compare(subject, &case, &bench.run()?.0)?;
    ensure(bench.compiled().wait().is_err(), || "a second wait for one submit is no error".to_owned())?;
    Ok(None)
}

/// Wrong counts and lengths of buffers. A refused bind unbinds or leaves the old binding, and a right one works after.
pub fn wrong_buffers_are_refused(subject: &Subject) -> Verdict {
    let case = Case::own("matmul");
    let mut bench = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
    let (inputs, outputs) = bench.buffers();
    let mut short = inputs.clone();
    short[1].length -= 4;
    let mut long = outputs.clone();
    long[0].length += 4;
    for (what, inputs, outputs) in [
        ("an input too few", &inputs[..1], &outputs[..]),
        ("no output", &inputs[..], &outputs[..0]),
        ("a short input", &short[..], &outputs[..]),
        ("a long output", &inputs[..], &long[..]),
    ] {
        match bench.bind_to(inputs, outputs) {
            Err(UnitError::Port { port, reason, .. }) => {
                ensure(!port.is_empty() && !reason.is_empty() && !reason.contains('\n'), || {
                    format!("{what}: the error says too little: {port}: {reason}")
                })?;
            }
            other => return Err(format!("{what} gave {other:?} instead of a port error")),
        }
    }
    bench.bind().map_err(|error| error.to_string())?;
    compare(subject, &case, &bench.run()?.0)?;
    Ok(None)
}

/// A change that makes a sub-model's ports differ from its file's.
type Change = (&'static str, fn(&mut SubModel));

/// Shapes, types and counts that are not the file's: refused when compiling, or at the latest when running; never a
/// wrong answer.
pub fn wrong_ports_are_refused(subject: &Subject) -> Verdict {
    refuses_all(
        subject,
        &[
            ("an output shape of equal size", |model| model.outputs[0].shape = vec![2, 3, 6, 4]),
            ("an output of another rank", |model| model.outputs[0].shape = vec![6, 4, 6]),
            ("an input of another shape", |model| model.inputs[0].shape = vec![2, 3, 4, 7]),
            ("an input of another type", |model| model.inputs[0].dtype = DataType::I32),
            ("an output of another type", |model| model.outputs[0].dtype = DataType::I32),
            ("an input too few", |model| model.inputs.clear()),
        ],
    )
}

/// Port names that the file does not have.
pub fn unknown_names_are_refused(subject: &Subject) -> Verdict {
    refuses_all(
        subject,
        &[
            ("an unknown input", |model| model.inputs[0].name.push_str("_nobody")),
            ("an unknown output", |model| model.outputs[0].name.push_str("_nobody")),
        ],
    )
}

fn refuses_all(subject: &Subject, changes: &[Change]) -> Verdict {
    let right = Case::own("matmul_batched").sub_model();
    for (what, change) in changes {
        let mut model = right.clone();
        change(&mut model);
        let zeros = |infos: &[TensorInfo]| infos.iter().map(|info| HostTensor::zeros(info.clone())).collect();
        let wrong = Case {
            name: "matmul_batched".to_owned(),
            path: model.path.clone(),
            inputs: zeros(&model.inputs),
            outputs: zeros(&model.outputs),
        };
        let result = Bench::new(subject.backend, &subject.unit, &wrong, &plain()).and_then(|mut bench| bench.run());
        let Err(reason) = result else { return Err(format!("{what} was accepted")) };
        ensure(!reason.contains('\n'), || format!("{what}: the error has several lines: {reason}"))?;
    }
    Ok(None)
}

/// Files that are no models: an error with the file's name, no crash.
pub fn broken_files_are_refused(subject: &Subject) -> Verdict {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let good = std::fs::read(own_folder().join("conv_3x3.onnx")).map_err(|error| error.to_string())?;
    let case = Case::own("conv_3x3");
    let mut files: Vec<(String, Option<Vec<u8>>)> = vec![
        ("missing".to_owned(), None),
        ("empty".to_owned(), Some(Vec::new())),
        ("text".to_owned(), Some(b"this is not a model\n".to_vec())),
        ("noise".to_owned(), Some((0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect())),
    ];
    for quarter in 1..4 {
        files.push((format!("cut{quarter}"), Some(good[..good.len() * quarter / 4].to_vec())));
    }
    for (what, contents) in files {
        let path = folder.path().join(format!("{what}.onnx"));
        if let Some(contents) = contents {
            std::fs::write(&path, contents).map_err(|error| error.to_string())?;
        }
        let model = SubModel { path: path.clone(), ..case.sub_model() };
        match subject.backend.compile(&model, &subject.unit, &plain()) {
            Ok(_) => return Err(format!("the {what} file was compiled")),
            Err(UnitError::Compile { model, reason, unit }) => {
                ensure(model == path.display().to_string(), || format!("{what}: the error names {model}"))?;
                ensure(unit == subject.unit.address.to_string(), || format!("{what}: the error names unit {unit}"))?;
                ensure(!reason.is_empty() && !reason.contains('\n'), || format!("{what}: bad reason `{reason}`"))?;
            }
            Err(other) => return Err(format!("the {what} file gave another error than Compile: {other}")),
        }
    }
    Ok(None)
}

/// Weights in a file that is missing or too short.
pub fn broken_external_data_is_refused(subject: &Subject) -> Verdict {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let case = Case::own("external_plain");
    let path = folder.path().join("model.onnx");
    std::fs::copy(&case.path, &path).map_err(|error| error.to_string())?;
    let model = SubModel { path, ..case.sub_model() };
    for what in ["missing", "short"] {
        if what == "short" {
            std::fs::write(folder.path().join("external_plain.onnx.data"), [0u8; 16]).map_err(|e| e.to_string())?;
        }
        match subject.backend.compile(&model, &subject.unit, &plain()) {
            Err(UnitError::Compile { .. }) => {}
            Err(other) => return Err(format!("{what} weights gave another error than Compile: {other}")),
            Ok(_) => return Err(format!("a model with {what} weights was compiled")),
        }
    }
    Ok(None)
}

/// Devices and cores that are not there.
pub fn unknown_places_are_refused(subject: &Subject) -> Verdict {
    let name = subject.backend.name();
    match subject.backend.unit(&UnitAddress::new(name, "TOASTER")) {
        Err(UnitError::UnknownDevice { backend, device, have }) => {
            ensure(backend == name && device == "TOASTER" && !have.is_empty(), || {
                format!("the error says too little: {backend}, {device}, {have}")
            })?;
        }
        other => return Err(format!("an unknown device gave {other:?}")),
    }
    let device = &subject.unit.address.device;
    if device == "CPU" {
        let address = UnitAddress::new(name, "CPU").with_cores(vec![4095]);
        ensure(matches!(subject.backend.unit(&address), Err(UnitError::Cores { .. })), || {
            "a core that is not allowed gave no cores error".to_owned()
        })?;
    }
    Ok(None)
}

/// An `i64` that a backend cannot represent is an error of the run or computed rightly, never silently another number.
pub fn large_integers_are_right_or_refused(subject: &Subject) -> Verdict {
    let case = Case::own("add_i64_large");
    let mut bench = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
    match bench.run() {
        Ok((outputs, _)) => compare(subject, &case, &outputs)?,
        Err(reason) => {
            ensure(reason.contains("3000000000"), || format!("the error does not name the value: {reason}"))?;
        }
    }
    Ok(None)
}

/// The parts of the timing are sane; what the backend cannot tell is absent.
pub fn timing_is_plausible(subject: &Subject) -> Verdict {
    let case = Case::own("matmul_odd_sizes");
    let mut bench = Bench::new(subject.backend, &subject.unit, &case, &plain())?;
    for _ in 0..20 {
        let start = std::time::Instant::now();
        let (_, timing) = bench.run()?;
        let wall = start.elapsed().as_secs_f64() * 1e3;
        let parts: Vec<f64> =
            [timing.h2d_ms, timing.dispatch_ms, timing.exec_ms, timing.d2h_ms].into_iter().flatten().collect();
        ensure(parts.iter().all(|part| part.is_finite() && *part >= 0.0), || format!("odd parts {timing:?}"))?;
        ensure(parts.iter().sum::<f64>() <= wall, || format!("parts {timing:?} exceed the wall time {wall} ms"))?;
    }
    Ok(None)
}

/// Per-node times, where the backend reports them.
pub fn node_times_are_plausible(subject: &Subject) -> Verdict {
    let case = Case::own("layer_normalization");
    let options = CompileOptions { profiling: true, ..plain() };
    let mut bench = Bench::new(subject.backend, &subject.unit, &case, &options)?;
    for _ in 0..3 {
        compare(subject, &case, &bench.run()?.0)?;
    }
    let Some(nodes) = bench.compiled().node_times() else { return Ok(Some("the backend reports none".to_owned())) };
    ensure(!nodes.is_empty(), || "profiling is on and the list is empty".to_owned())?;
    ensure(nodes.iter().all(|node| node.ms.is_finite() && node.ms >= 0.0), || format!("odd node times {nodes:?}"))?;
    Ok(None)
}
