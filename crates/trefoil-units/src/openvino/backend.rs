//! OpenVINO's devices as units.

use super::library::{self, Loaded};
use super::{FIX, compiled};
use crate::affinity::core_resources;
use crate::{Availability, Backend, CompileOptions, Compiled, SubModel, UnitError};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use trefoil_core::{Precision, Resource, Unit, UnitAddress, UnitKind, UnitLimits};

/// The OpenVINO backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenVino;

/// Devices whose plugins OpenVINO's packages carry, with what they need to be found.
const KNOWN_DEVICES: [&str; 3] = ["CPU", "GPU", "NPU"];

const NAME: &str = "openvino";

impl Backend for OpenVino {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self) -> Availability {
        match library::loaded() {
            Ok(loaded) => available(loaded),
            Err(reason) => Availability::Unavailable { reason: reason.to_owned(), fix: FIX.to_owned() },
        }
    }

    fn units(&self) -> Vec<(Unit, Availability)> {
        let loaded = match library::loaded() {
            Ok(loaded) => loaded,
            Err(reason) => {
                let missing = Availability::Unavailable { reason: reason.to_owned(), fix: FIX.to_owned() };
                return KNOWN_DEVICES.iter().map(|device| (bare_unit(device), missing.clone())).collect();
            }
        };
        let mut found: Vec<String> = loaded.devices().to_vec();
        let is_found = |found: &[String], device: &str| found.iter().any(|name| device_class(name) == device);
        for device in KNOWN_DEVICES {
            if !is_found(&found, device) {
                found.push(device.to_owned());
            }
        }
        found
            .iter()
            .map(|device| match self.unit(&UnitAddress::new(NAME, device)) {
                Ok(unit) => (unit, available(loaded)),
                Err(UnitError::Unavailable { reason, fix, .. }) => {
                    (bare_unit(device), Availability::Unavailable { reason, fix })
                }
                Err(other) => {
                    let fix = "see the reason".to_owned();
                    (bare_unit(device), Availability::Unavailable { reason: other.to_string(), fix })
                }
            })
            .collect()
    }

    fn unit(&self, address: &UnitAddress) -> Result<Unit, UnitError> {
        let unavailable = |reason: String, fix: &str| UnitError::Unavailable {
            unit: address.to_string(),
            reason,
            fix: fix.to_owned(),
        };
        let loaded = library::loaded().map_err(|reason| unavailable(reason.to_owned(), FIX))?;
        let device = address.device.as_str();
        let class = device_class(device);
        if !KNOWN_DEVICES.contains(&class) && !loaded.devices().iter().any(|name| name == device) {
            let mut have: Vec<&str> = loaded.devices().iter().map(String::as_str).collect();
            have.extend(
                KNOWN_DEVICES.iter().filter(|known| !loaded.devices().iter().any(|d| device_class(d) == **known)),
            );
            return Err(UnitError::UnknownDevice {
                backend: NAME.to_owned(),
                device: device.to_owned(),
                have: have.join(", "),
            });
        }
        let kind = device_kind(class);
        let resources = if kind == UnitKind::Cpu {
            core_resources(address)?
        } else {
            // Cores of an accelerator's address pin the thread that drives it.
            if !address.cores.is_empty() {
                core_resources(address)?;
            }
            BTreeSet::from([Resource::Device(machine_wide_name(device))])
        };
        if class != "CPU" {
            // Asking the plugin costs less than asking for all devices, which loads every plugin.
            let ids = loaded.property(class, "AVAILABLE_DEVICES");
            let found = match &ids {
                Ok(ids) => match device.split_once('.') {
                    None => !ids.trim().is_empty(),
                    Some((_, id)) => ids.split_whitespace().any(|known| known == id),
                },
                Err(_) => false,
            };
            if !found {
                let (reason, fix) = why_missing(device, class, ids.err());
                return Err(unavailable(reason, fix));
            }
        }
        let description = loaded
            .property(device, "FULL_DEVICE_NAME")
            .map_err(|reason| unavailable(reason, "reinstall OpenVINO; a plugin is damaged or missing"))?;
        let precisions = precisions(&loaded.property(device, "OPTIMIZATION_CAPABILITIES").unwrap_or_default());
        if let Some(precision) = address.precision
            && !precisions.contains(&precision)
        {
            let have = precisions.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let reason = format!("{device} does not compute in {precision} natively (it has {have})");
            return Err(unavailable(reason, "leave the precision out of the unit's address"));
        }
        let memory = (kind == UnitKind::Gpu)
            .then(|| loaded.property(device, "GPU_DEVICE_TOTAL_MEM_SIZE").ok()?.trim().parse().ok())
            .flatten();
        Ok(Unit {
            address: address.clone(),
            kind,
            resources,
            limits: UnitLimits { memory_bytes: memory, max_nodes: None, precisions },
            simulated: false,
            description: Some(description.trim().to_owned()),
        })
    }

    fn compile(&self, model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
        let loaded = library::loaded().map_err(|reason| UnitError::Unavailable {
            unit: unit.address.to_string(),
            reason: reason.to_owned(),
            fix: FIX.to_owned(),
        })?;
        Ok(Box::new(compiled::compile(loaded, model, unit, options)?))
    }

    fn versions(&self) -> BTreeMap<String, String> {
        library::loaded().map(|loaded| BTreeMap::from([(NAME.to_owned(), loaded.version.clone())])).unwrap_or_default()
    }
}

fn available(loaded: &Loaded) -> Availability {
    Availability::Available { version: loaded.version.clone(), library: Some(loaded.path.clone()) }
}

/// `GPU` of `GPU.1`.
fn device_class(device: &str) -> &str {
    device.split('.').next().unwrap_or(device)
}

fn device_kind(class: &str) -> UnitKind {
    match class {
        "CPU" => UnitKind::Cpu,
        "NPU" => UnitKind::Npu,
        _ => UnitKind::Gpu,
    }
}

/// Names shared by all backends for the same accelerator: `gpu0`, `gpu1`, `npu0`.
fn machine_wide_name(device: &str) -> String {
    let (class, id) = device.split_once('.').unwrap_or((device, "0"));
    format!("{}{id}", class.to_lowercase())
}

/// A unit that cannot be used, for listing.
fn bare_unit(device: &str) -> Unit {
    let address = UnitAddress::new(NAME, device);
    let kind = device_kind(device_class(device));
    let resources = match kind {
        UnitKind::Cpu => core_resources(&address).unwrap_or_default(),
        _ => BTreeSet::from([Resource::Device(machine_wide_name(device))]),
    };
    Unit { address, kind, resources, limits: UnitLimits::default(), simulated: false, description: None }
}

/// Float precisions among a device's capabilities (`FP32 INT8 BIN BF16 EXPORT_IMPORT`).
fn precisions(capabilities: &str) -> Vec<Precision> {
    let known = [("FP32", Precision::F32), ("FP16", Precision::F16), ("BF16", Precision::BF16)];
    let listed: Vec<&str> = capabilities.split_whitespace().collect();
    known.into_iter().filter(|(name, _)| listed.contains(name)).map(|(_, precision)| precision).collect()
}

/// Why OpenVINO finds no such device, as far as the operating system tells.
fn why_missing(device: &str, class: &str, plugin_error: Option<String>) -> (String, &'static str) {
    let (node, driver_fix) = match class {
        "GPU" => ("/dev/dri", "install Intel's GPU driver (intel-opencl-icd) and let this user open /dev/dri/renderD*"),
        "NPU" => {
            ("/dev/accel", "install Intel's NPU driver (linux-npu-driver) and let this user open /dev/accel/accel*")
        }
        _ => ("", "see OpenVINO's device documentation"),
    };
    if let Some((class, _)) = device.split_once('.') {
        return (format!("there is no {device}"), if class == "GPU" { "use openvino:GPU" } else { driver_fix });
    }
    if cfg!(target_os = "linux") && !node.is_empty() && !Path::new(node).exists() {
        return (format!("this machine has no {class} that a driver offers ({node} does not exist)"), driver_fix);
    }
    let words = plugin_error.map(|words| format!(": {words}")).unwrap_or_default();
    (format!("OpenVINO's {class} plugin finds no device{words}"), driver_fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_machine_wide_names() {
        assert_eq!(["GPU", "GPU.0", "GPU.1", "NPU"].map(machine_wide_name), ["gpu0", "gpu0", "gpu1", "npu0"]);
    }

    #[test]
    fn capabilities_become_precisions() {
        assert_eq!(precisions("FP32 INT8 BIN BF16 EXPORT_IMPORT"), [Precision::F32, Precision::BF16]);
        assert!(precisions("").is_empty());
    }
}
