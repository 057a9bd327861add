//! Checks and errors of ports that every run-time-loaded backend shares.

use crate::{Buffer, Ports, SubModel, UnitError, one_line};
use trefoil_core::{DataType, TensorInfo, Unit};

/// Names for error messages about one compile call.
#[derive(Debug, Clone)]
pub(crate) struct PortNames {
    pub(crate) unit: String,
    pub(crate) model: String,
}

impl PortNames {
    pub(crate) fn new(model: &SubModel, unit: &Unit) -> Self {
        Self { unit: unit.address.to_string(), model: model.path.display().to_string() }
    }

    pub(crate) fn compile_error(&self, reason: &str) -> UnitError {
        UnitError::Compile { unit: self.unit.clone(), model: self.model.clone(), reason: one_line(reason) }
    }

    pub(crate) fn port_error(&self, port: &str, reason: String) -> UnitError {
        UnitError::Port { unit: self.unit.clone(), model: self.model.clone(), port: port.to_owned(), reason }
    }

    /// The file has another number of inputs or outputs than the caller expects.
    pub(crate) fn count_error(&self, word: &str, expected: usize, found: usize) -> UnitError {
        self.port_error(&format!("{word}s"), format!("{expected} {word}s were expected and the model has {found}"))
    }

    /// Refuses types without a byte layout (strings, sequences).
    ///
    /// # Errors
    /// [`UnitError::Port`] with the name of the first such port.
    pub(crate) fn check_types(&self, model: &SubModel) -> Result<(), UnitError> {
        for info in model.inputs.iter().chain(&model.outputs) {
            if info.dtype == DataType::Opaque {
                let reason = "strings, sequences and 4-bit or 8-bit floats cannot cross between units".to_owned();
                return Err(self.port_error(&info.name, reason));
            }
        }
        Ok(())
    }

    /// Compares what the caller expects of a port with what the backend made of it. `shape` is `None` where the backend
    /// knows no rank, its extents where it knows no number.
    ///
    /// # Errors
    /// [`UnitError::Port`] for an input (the caller's mistake), [`UnitError::Compile`] for an output (the backend's: its
    /// operators yield another shape or type than the model's).
    pub(crate) fn check_port(
        &self,
        word: &str,
        info: &TensorInfo,
        dtype: DataType,
        shape: Option<&[Option<u64>]>,
    ) -> Result<(), UnitError> {
        let same_extent = |(&expected, found): (&u64, &Option<u64>)| found.is_none_or(|found| found == expected);
        let same_shape =
            shape.is_none_or(|shape| shape.len() == info.shape.len() && info.shape.iter().zip(shape).all(same_extent));
        if dtype == info.dtype && same_shape {
            return Ok(());
        }
        let found = shape.map_or("[…]".to_owned(), |shape| {
            let extent = |extent: &Option<u64>| extent.map_or("?".to_owned(), |extent| extent.to_string());
            format!("[{}]", shape.iter().map(extent).collect::<Vec<_>>().join(", "))
        });
        let reason = format!("expected {} {:?}, it has {dtype} {found}", info.dtype, info.shape);
        Err(match word {
            "input" => self.port_error(&info.name, reason),
            _ => self.compile_error(&format!("{word} `{}`: {reason}", info.name)),
        })
    }
}

/// Checks counts and lengths of the buffers that are about to be bound.
///
/// # Errors
/// [`UnitError::Port`].
pub(crate) fn check_buffers(
    ports: &Ports,
    inputs: &[Buffer],
    outputs: &[Buffer],
    unit: &str,
    model: &str,
) -> Result<(), UnitError> {
    let names = PortNames { unit: unit.to_owned(), model: model.to_owned() };
    for (word, ports, buffers) in [("input", &ports.inputs, inputs), ("output", &ports.outputs, outputs)] {
        if ports.len() != buffers.len() {
            let reason = format!("{} buffers for {} {word}s", buffers.len(), ports.len());
            return Err(names.port_error(&format!("{word}s"), reason));
        }
        for (port, buffer) in ports.iter().zip(buffers) {
            if buffer.length as u64 != port.info.bytes() || buffer.pointer.is_null() {
                let reason = format!(
                    "a buffer of {} bytes for {} {:?}, which takes {}",
                    buffer.length,
                    port.info.dtype,
                    port.info.shape,
                    port.info.bytes()
                );
                return Err(names.port_error(&port.info.name, reason));
            }
        }
    }
    Ok(())
}

/// `submit` without `bind`.
pub(crate) fn unbound(unit: &str, model: &str) -> UnitError {
    UnitError::Port {
        unit: unit.to_owned(),
        model: model.to_owned(),
        port: "all".to_owned(),
        reason: "no buffers are bound; call `bind` first".to_owned(),
    }
}

/// `wait` without `submit`.
pub(crate) fn not_submitted(unit: &str, model: &str) -> UnitError {
    UnitError::Run {
        unit: unit.to_owned(),
        model: model.to_owned(),
        reason: "nothing was submitted; call `submit` before `wait`".to_owned(),
    }
}

#[cfg(test)]
pub(crate) mod overhead {
    //! What a call costs with and without our wrapper: measurements to read (`--ignored --nocapture`).

    use super::{DataType, TensorInfo};
    use std::time::Instant;

    /// Ports of `testdata/conformance/relu.onnx`, the smallest of the suite's models.
    pub(crate) fn relu_ports() -> (TensorInfo, TensorInfo) {
        let info = |name: &str| TensorInfo::new(name, DataType::F32, [3u64, 4, 5]);
        (info("x"), info("y"))
    }

    /// Times batches of both kinds of call in turn and prints the medians and the median difference in nanoseconds.
    pub(crate) fn compare_calls(name: &str, mut raw: impl FnMut(), mut wrapped: impl FnMut()) {
        const BATCH: u32 = 1000;
        let time = |call: &mut dyn FnMut()| {
            let start = Instant::now();
            for _ in 0..BATCH {
                call();
            }
            start.elapsed().as_nanos() as f64 / f64::from(BATCH)
        };
        let mut pairs: Vec<(f64, f64)> = (0..200).map(|_| (time(&mut raw), time(&mut wrapped))).collect();
        let mut median = |key: fn(&(f64, f64)) -> f64| {
            pairs.sort_by(|a, b| key(a).total_cmp(&key(b)));
            key(&pairs[pairs.len() / 2])
        };
        println!(
            "{name}: median raw {:.0} ns, submit + wait {:.0} ns, difference {:.0} ns",
            median(|pair| pair.0),
            median(|pair| pair.1),
            median(|pair| pair.1 - pair.0)
        );
        let least = |key: fn(&(f64, f64)) -> f64| pairs.iter().map(key).fold(f64::INFINITY, f64::min);
        println!("{name}: least raw {:.0} ns, submit + wait {:.0} ns", least(|pair| pair.0), least(|pair| pair.1));
    }

    #[test]
    fn comparing_runs_both_calls_equally_often() {
        let (raw, wrapped) = (std::cell::Cell::new(0u32), std::cell::Cell::new(0u32));
        compare_calls("nothing", || raw.set(raw.get() + 1), || wrapped.set(wrapped.get() + 1));
        assert_eq!((raw.get(), wrapped.get()), (200_000, 200_000));
    }
}
