//! Units: ways to compute, and the resources they hold while they do.

use crate::CoreError;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// Numeric precision a unit computes floats in, where that differs from the model's own types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // each variant is the precision it names
pub enum Precision {
    F32,
    F16,
    BF16,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        })
    }
}

/// Address of a unit: `backend:device[@cores][+precision]`, for example `openvino:CPU@0-1`, `ort:CPU@1`, `ort:WebGPU`,
/// `sim:lunar-lake/NPU`, `openvino:GPU+f16`. Cores are a set, written as ranges and commas.
///
/// Without cores a CPU unit may use every core the process may use. Without a precision the unit computes in the
/// model's own types.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitAddress {
    /// Backend name: `openvino`, `ort`, `rten`, `sim`, `opencl`.
    pub backend: String,
    /// Device within the backend: `CPU`, `GPU`, `GPU.1`, `NPU`, `WebGPU`, `lunar-lake/NPU`, `0`.
    pub device: String,
    /// CPU cores to pin to; empty means all cores of the process.
    pub cores: Vec<u32>,
    /// Precision override.
    pub precision: Option<Precision>,
}

impl UnitAddress {
    /// `backend:device` on all cores in the model's own precision.
    pub fn new(backend: impl Into<String>, device: impl Into<String>) -> Self {
        Self { backend: backend.into(), device: device.into(), cores: Vec::new(), precision: None }
    }

    /// The same unit pinned to `cores`.
    #[must_use]
    pub fn with_cores(mut self, cores: impl Into<Vec<u32>>) -> Self {
        self.cores = cores.into();
        self.cores.sort_unstable();
        self.cores.dedup();
        self
    }
}

fn parse_cores(text: &str) -> Result<Vec<u32>, String> {
    let mut cores = BTreeSet::new();
    for part in text.split(',') {
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| format!("`{part}` is no core or core range"));
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if last < first || last > 4095 {
            return Err(format!("core range `{part}` runs backwards or past 4095"));
        }
        cores.extend(first..=last);
    }
    Ok(cores.into_iter().collect())
}

impl FromStr for UnitAddress {
    type Err = CoreError;

    fn from_str(text: &str) -> Result<Self, CoreError> {
        let fail = |reason: &str| CoreError::UnitAddress { text: text.to_owned(), reason: reason.to_owned() };
        let (backend, rest) = text.split_once(':').ok_or_else(|| fail("no `:` after the backend"))?;
        let (rest, precision) = match rest.split_once('+') {
            None => (rest, None),
            Some((rest, "f32")) => (rest, Some(Precision::F32)),
            Some((rest, "f16")) => (rest, Some(Precision::F16)),
            Some((rest, "bf16")) => (rest, Some(Precision::BF16)),
            Some((_, other)) => return Err(fail(&format!("precision `{other}` is none of f32, f16, bf16"))),
        };
        let (device, cores) = match rest.split_once('@') {
            None => (rest, Vec::new()),
            Some((device, cores)) => (device, parse_cores(cores).map_err(|reason| fail(&reason))?),
        };
        let plain = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/'))
        };
        if !plain(backend) {
            return Err(fail("the backend name is empty or has odd characters"));
        }
        if !plain(device) {
            return Err(fail("the device name is empty or has odd characters"));
        }
        Ok(Self { backend: backend.to_owned(), device: device.to_owned(), cores, precision })
    }
}

impl fmt::Display for UnitAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.backend, self.device)?;
        let mut rest = self.cores.as_slice();
        let mut separator = '@';
        while let Some(&first) = rest.first() {
            let run = rest.iter().zip(first..).take_while(|(core, expected)| **core == *expected).count();
            match run {
                1 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{}", rest[run - 1])?,
            }
            separator = ',';
            rest = &rest[run..];
        }
        if let Some(precision) = self.precision {
            write!(f, "+{precision}")?;
        }
        Ok(())
    }
}

impl Serialize for UnitAddress {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for UnitAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What can do one thing at a time. Serialised as `core:3`, `queue:opencl:0`, `device:openvino:NPU`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Resource {
    /// One CPU core, by its operating-system number.
    Core(u32),
    /// An accelerator's execution queue or the accelerator as a whole, by a machine-wide name.
    Device(String),
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Core(core) => write!(f, "core:{core}"),
            Self::Device(name) => write!(f, "device:{name}"),
        }
    }
}

impl Serialize for Resource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Resource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        match text.split_once(':') {
            Some(("core", core)) => core.parse().map(Self::Core).map_err(serde::de::Error::custom),
            Some(("device", name)) => Ok(Self::Device(name.to_owned())),
            _ => Err(serde::de::Error::custom(format!("`{text}` is no resource (core:N or device:NAME)"))),
        }
    }
}

/// Kind of processor behind a unit. BIDENT's transfers (3.2.1) are paid by accelerators only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // each variant is the processor it names
pub enum UnitKind {
    Cpu,
    Gpu,
    Npu,
}

impl UnitKind {
    /// Whether data must be handed to it and back.
    pub fn is_accelerator(self) -> bool {
        self != Self::Cpu
    }
}

/// What a unit cannot exceed; `None` where it states no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitLimits {
    /// Bytes of device memory.
    pub memory_bytes: Option<u64>,
    /// Most nodes of one compiled sub-model.
    pub max_nodes: Option<u64>,
    /// Float precisions it computes in; empty when unstated.
    #[serde(default)]
    pub precisions: Vec<Precision>,
}

/// A way to compute: an address, the resources it occupies while it runs, and what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// Its address.
    pub address: UnitAddress,
    /// Processor kind.
    pub kind: UnitKind,
    /// Resources it holds; two units that share one never run at once.
    pub resources: BTreeSet<Resource>,
    /// Limits.
    #[serde(default)]
    pub limits: UnitLimits,
    /// True for `sim:` units, whose every number is simulated.
    #[serde(default)]
    pub simulated: bool,
    /// Human-readable device name, where the backend tells one.
    #[serde(default)]
    pub description: Option<String>,
}

impl Unit {
    /// Whether two units may run at once: they share no resource.
    pub fn is_disjoint(&self, other: &Self) -> bool {
        self.resources.is_disjoint(&other.resources)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parses_the_documented_forms() {
        for text in [
            "openvino:CPU@0-1",
            "openvino:NPU",
            "ort:CPU@1",
            "ort:WebGPU",
            "rten:CPU",
            "opencl:0",
            "sim:lunar-lake/NPU",
            "openvino:GPU.1+f16",
            "ort:CPU@0,2-3+f32",
        ] {
            let unit: UnitAddress = text.parse().unwrap();
            assert_eq!(unit.to_string(), text);
        }
        assert_eq!("ort:CPU@0-2".parse::<UnitAddress>().unwrap().cores, [0, 1, 2]);
    }

    #[test]
    fn refuses_malformed_addresses_in_one_line() {
        for text in
            ["", "openvino", "openvino:", ":CPU", "ort:CPU@", "ort:CPU@2-1", "ort:CPU@a", "ort:CPU+int8", "a b:CPU"]
        {
            let error = text.parse::<UnitAddress>().unwrap_err().to_string();
            assert!(!error.contains('\n') && error.contains("unit address"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_core_set_round_trips(cores in proptest::collection::btree_set(0u32..64, 0..10)) {
            let unit = UnitAddress::new("ort", "CPU").with_cores(cores.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(unit.to_string().parse::<UnitAddress>().unwrap(), unit);
        }
    }
}
