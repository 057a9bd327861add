//! Numbers: every case, optimised and as the plain reference.

use crate::bench::Bench;
use crate::case::Case;
use crate::{Subject, Verdict};
use trefoil_core::{DataType, HostTensor};
use trefoil_units::CompileOptions;

/// The largest error, relative to the expected peak, that passes.
fn tolerance(subject: &Subject, dtype: DataType) -> f64 {
    match dtype {
        DataType::F32 if subject.unit.kind.is_accelerator() => 5e-3,
        DataType::F32 => 1e-5,
        DataType::F16 | DataType::BF16 => 2e-3,
        DataType::F64 => 1e-12,
        _ => 0.0,
    }
}

/// Compares outputs with what is expected.
pub fn compare(subject: &Subject, case: &Case, outputs: &[HostTensor]) -> Result<(), String> {
    for (have, want) in outputs.iter().zip(&case.outputs) {
        let info = want.info();
        let quantised = case.name.contains("quant") || case.name.contains("qlinear");
        let within = if quantised && matches!(info.dtype, DataType::U8 | DataType::I8) {
            // Codes may differ by one where a product falls on a rounding boundary.
            have.to_f64().iter().zip(want.to_f64()).all(|(a, b)| (a - b).abs() <= 1.0)
        } else {
            have.error_to_peak(want) <= tolerance(subject, info.dtype)
        };
        if !within {
            return Err(format!(
                "output `{}` is off by {:.1e} of its peak; first values {:?}, expected {:?}",
                info.name,
                have.error_to_peak(want),
                have.to_f64().iter().take(4).collect::<Vec<_>>(),
                want.to_f64().iter().take(4).collect::<Vec<_>>(),
            ));
        }
    }
    Ok(())
}

/// One case: optimised twice (a first run may differ from later ones), then as the reference.
pub fn check(subject: &Subject, case: &Case) -> Verdict {
    for reference in [false, true] {
        let label = if reference { "reference" } else { "optimised" };
        let options = CompileOptions { reference, ..CompileOptions::default() };
        let labelled = |reason: String| format!("{label}: {reason}");
        let mut bench = Bench::new(subject.backend, &subject.unit, case, &options).map_err(labelled)?;
        for _ in 0..2 {
            let (outputs, _) = bench.run().map_err(labelled)?;
            compare(subject, case, &outputs).map_err(labelled)?;
        }
    }
    Ok(None)
}
