//! What one call of a tiny operator (Relu of 60 elements) costs on each CPU backend, one core, `submit` and `wait`.
//!
//! All run on a thread inside `rten`'s unit of that core ([`trefoil_units::Backend::run_inside`]), as an executor's
//! worker does; `TREFOIL_BENCH_OUTSIDE=1` runs them on a plain thread of the core, which costs rten two thread switches.

use std::path::Path;
use trefoil_core::tensor::AlignedBytes;
use trefoil_core::{DataType, TensorInfo, UnitAddress};
use trefoil_units::{Buffer, CompileOptions, SubModel, allowed_cores, enter_unit, resolve};

fn address(backend: &str) -> UnitAddress {
    UnitAddress::new(backend, "CPU").with_cores(&allowed_cores()[..1])
}

fn main() {
    let unit = resolve(&address("rten")).expect("rten is embedded");
    if std::env::var_os("TREFOIL_BENCH_OUTSIDE").is_some() {
        let _inside = enter_unit(&unit).expect("the first allowed core");
        divan::main();
    } else {
        let backend = trefoil_units::backend("rten").expect("rten is embedded");
        backend.run_inside(&unit, &mut divan::main).expect("the first allowed core");
    }
}

#[divan::bench(args = ["rten", "openvino", "ort"], sample_count = 300, sample_size = 50)]
fn tiny_operator(bencher: divan::Bencher<'_, '_>, backend: &str) {
    let unit = match resolve(&address(backend)) {
        Ok(unit) => unit,
        Err(reason) => {
            eprintln!("skipped: {reason}");
            return;
        }
    };
    let port = |name: &str| TensorInfo::new(name, DataType::F32, [3u64, 4, 5]);
    let model = SubModel {
        path: Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/conformance/relu.onnx"),
        inputs: vec![port("x")],
        outputs: vec![port("y")],
    };
    let mut compiled = trefoil_units::compile(&model, &unit, &CompileOptions::default()).expect("Relu compiles");
    let (mut input, mut output) = (AlignedBytes::zeroed(240), AlignedBytes::zeroed(240));
    let buffer = |bytes: &mut AlignedBytes| Buffer { pointer: bytes.as_mut_ptr(), length: 240 };
    // SAFETY: both buffers outlive every run below, and nobody else touches them.
    unsafe { compiled.bind(&[buffer(&mut input)], &[buffer(&mut output)]) }.expect("the ports' sizes");
    bencher.bench_local(|| {
        compiled.submit().expect("runs");
        compiled.wait().expect("runs")
    });
}
