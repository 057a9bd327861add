//! Simulated units: `sim:SOC/DEVICE`, such as `sim:lunar-lake/NPU`.
//!
//! A [`SocDescription`] states rates per operator and size, dispatch, transfers, slowdown factors and power of the
//! processing units of one SoC, and where each number comes from (a paper's section, or `assumed`). Planners and the
//! simulator can then work on machines that are not here. Simulated units plan and do not run: they compile nothing.
//! Every number they give is marked [`trefoil_core::Origin::Simulated`].

mod cost;
mod description;
mod profile;
#[cfg(test)]
// Published numbers are compared with their copies, not with results of arithmetic.
#[allow(clippy::float_cmp)]
mod tests;

pub use cost::{OperatorTime, Workload};
pub use description::{
    Device, NamedTask, Rate, SIM_PATH_VARIABLE, SOC_FORMAT, SOC_VERSION, Slowdown, SocDescription, Sourced, Transfer,
    Unsupported, WorkMeasure, description, descriptions, parse, read,
};
pub use profile::{profile_entries, simulated_profile};

use crate::{Availability, Backend, CompileOptions, Compiled, SubModel, UnitError};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{Resource, Unit, UnitAddress, UnitLimits};

/// The backend of simulated units.
#[derive(Debug, Clone, Copy, Default)]
pub struct SimBackend;

impl Backend for SimBackend {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn check(&self) -> Availability {
        Availability::Available { version: format!("format {SOC_VERSION}"), library: None }
    }

    fn units(&self) -> Vec<(Unit, Availability)> {
        let mut units = Vec::new();
        for soc in descriptions().into_iter().flatten() {
            for device in &soc.devices {
                let address = UnitAddress::new("sim", format!("{}/{}", soc.name, device.name));
                units.push((simulated_unit(&soc, device, address), self.check()));
            }
        }
        units
    }

    fn unit(&self, address: &UnitAddress) -> Result<Unit, UnitError> {
        let unknown =
            |have: String| UnitError::UnknownDevice { backend: "sim".to_owned(), device: address.device.clone(), have };
        let Some((soc_name, device_name)) = split_device(&address.device) else {
            let known: Vec<_> = descriptions().into_iter().flatten().collect();
            return Err(unknown(device_names(&known)));
        };
        let soc = description(soc_name)?;
        let device = soc.device(device_name).ok_or_else(|| unknown(device_names(std::slice::from_ref(&soc))))?;
        if !address.cores.is_empty() || address.precision.is_some() {
            return Err(UnitError::Unavailable {
                unit: address.to_string(),
                reason: "a simulated device has no cores and no precisions to choose from".to_owned(),
                fix: format!("write sim:{}", address.device),
            });
        }
        Ok(simulated_unit(&soc, device, address.clone()))
    }

    fn compile(
        &self,
        model: &SubModel,
        unit: &Unit,
        _options: &CompileOptions,
    ) -> Result<Box<dyn Compiled>, UnitError> {
        Err(UnitError::Compile {
            unit: unit.address.to_string(),
            model: model.path.display().to_string(),
            reason: "simulated units plan but do not run".to_owned(),
        })
    }

    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("sim".to_owned(), format!("format {SOC_VERSION}"))])
    }
}

/// `SOC/DEVICE` as its two parts.
fn split_device(device: &str) -> Option<(&str, &str)> {
    device.split_once('/').filter(|(soc, name)| !soc.is_empty() && !name.is_empty())
}

/// `SOC/DEVICE` of every device, for errors.
fn device_names(socs: &[SocDescription]) -> String {
    let names =
        socs.iter().flat_map(|soc| soc.devices.iter().map(move |device| format!("{}/{}", soc.name, device.name)));
    names.collect::<Vec<_>>().join(", ")
}

fn simulated_unit(soc: &SocDescription, device: &Device, address: UnitAddress) -> Unit {
    Unit {
        kind: device.kind,
        resources: BTreeSet::from([Resource::Device(format!("sim:{}/{}", soc.name, device.name))]),
        limits: UnitLimits {
            memory_bytes: device.memory_bytes.as_ref().map(|memory| memory.value as u64),
            ..UnitLimits::default()
        },
        simulated: true,
        description: Some(format!("{}, simulated", device.title)),
        address,
    }
}
