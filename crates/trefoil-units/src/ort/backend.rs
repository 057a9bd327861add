//! ONNX Runtime's CPU and its providers' devices as units.

use super::library::{self, Loaded};
use super::providers::{self, KNOWN, KnownProvider};
use super::{FIX, session};
use crate::affinity::core_resources;
use crate::{Availability, Backend, CompileOptions, Compiled, SubModel, UnitError};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{Precision, Resource, Unit, UnitAddress, UnitKind, UnitLimits};

/// The ONNX Runtime backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct OnnxRuntime;

const NAME: &str = "ort";

impl Backend for OnnxRuntime {
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
        let state = |address: &UnitAddress| match self.unit(address) {
            Ok(unit) => (Some(unit), self.check()),
            Err(UnitError::Unavailable { reason, fix, .. }) => (None, Availability::Unavailable { reason, fix }),
            Err(other) => {
                (None, Availability::Unavailable { reason: other.to_string(), fix: "see the reason".to_owned() })
            }
        };
        let devices =
            std::iter::once(("CPU", UnitKind::Cpu)).chain(KNOWN.iter().map(|known| (known.device, known.kind)));
        devices
            .map(|(device, kind)| {
                let address = UnitAddress::new(NAME, device);
                let (unit, availability) = state(&address);
                let bare = || {
                    let resources = match kind {
                        UnitKind::Cpu => core_resources(&address).unwrap_or_default(),
                        _ => providers::device_resource(kind),
                    };
                    new_unit(&address, kind, resources, None)
                };
                (unit.unwrap_or_else(bare), availability)
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
        if let Some(precision @ (Precision::F16 | Precision::BF16)) = address.precision {
            let reason = format!("ONNX Runtime computes in the model's own types, not in {precision}");
            return Err(unavailable(reason, "convert the model, or leave the precision out of the unit's address"));
        }
        if address.device == "CPU" {
            return Ok(new_unit(address, UnitKind::Cpu, core_resources(address)?, None));
        }
        let known = known(&address.device).ok_or_else(|| UnitError::UnknownDevice {
            backend: NAME.to_owned(),
            device: address.device.clone(),
            have: std::iter::once("CPU").chain(KNOWN.iter().map(|known| known.device)).collect::<Vec<_>>().join(", "),
        })?;
        if !address.cores.is_empty() {
            core_resources(address)?;
        }
        match providers::provider(loaded, known.device) {
            Some(Ok(provider)) => {
                let resources = provider.resources(known.kind, known.device);
                Ok(new_unit(address, known.kind, resources, provider.description))
            }
            Some(Err(missing)) => Err(unavailable(missing.reason, &missing.fix)),
            None => Err(unavailable("it is not a known provider".to_owned(), known.fix)),
        }
    }

    fn compile(&self, model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
        let unavailable = |reason: String, fix: &str| UnitError::Unavailable {
            unit: unit.address.to_string(),
            reason,
            fix: fix.to_owned(),
        };
        let loaded = library::loaded().map_err(|reason| unavailable(reason.to_owned(), FIX))?;
        let provider = match known(&unit.address.device) {
            None => None,
            Some(known) => providers::provider(loaded, known.device)
                .transpose()
                .map_err(|missing| unavailable(missing.reason, &missing.fix))?,
        };
        Ok(Box::new(session::compile(loaded, model, unit, options, provider)?))
    }

    fn versions(&self) -> BTreeMap<String, String> {
        let Ok(loaded) = library::loaded() else { return BTreeMap::new() };
        let mut versions = BTreeMap::from([(NAME.to_owned(), loaded.version.clone())]);
        // Plugins are looked for only when their unit is asked for, so only those in use have a say.
        for (device, version) in providers::versions() {
            versions.insert(format!("{NAME}:{device}"), version);
        }
        versions
    }
}

fn known(device: &str) -> Option<&'static KnownProvider> {
    KNOWN.iter().find(|known| known.device == device)
}

fn available(loaded: &Loaded) -> Availability {
    Availability::Available { version: loaded.version.clone(), library: Some(loaded.path.clone()) }
}

fn new_unit(address: &UnitAddress, kind: UnitKind, resources: BTreeSet<Resource>, description: Option<String>) -> Unit {
    Unit { address: address.clone(), kind, resources, limits: UnitLimits::default(), simulated: false, description }
}
