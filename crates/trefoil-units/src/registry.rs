//! All backends, one line each, and what is asked of them together.

use crate::{Availability, Backend, CompileOptions, Compiled, SubModel, UnitError};
use serde::{Deserialize, Serialize};
use trefoil_core::{Unit, UnitAddress};

/// Every backend of this build, available here or not.
pub fn backends() -> &'static [&'static dyn Backend] {
    &[&crate::rten::RtenBackend, &crate::openvino::OpenVino, &crate::ort::OnnxRuntime, &crate::sim::SimBackend]
}

/// The backend of that name.
pub fn backend(name: &str) -> Option<&'static dyn Backend> {
    backends().iter().copied().find(|backend| backend.name() == name)
}

fn backend_of(address: &UnitAddress) -> Result<&'static dyn Backend, UnitError> {
    backend(&address.backend).ok_or_else(|| UnitError::UnknownBackend {
        unit: address.to_string(),
        backend: address.backend.clone(),
        have: backends().iter().map(|backend| backend.name()).collect::<Vec<_>>().join(", "),
    })
}

/// The unit at `address`, usable here: its backend's library is present, its device exists, its cores are allowed.
///
/// # Errors
/// [`UnitError::UnknownBackend`], [`UnitError::UnknownDevice`], [`UnitError::Cores`], and [`UnitError::Unavailable`]
/// with the reason and the fix.
pub fn resolve(address: &UnitAddress) -> Result<Unit, UnitError> {
    let backend = backend_of(address)?;
    if let Availability::Unavailable { reason, fix } = backend.check() {
        return Err(UnitError::Unavailable { unit: address.to_string(), reason, fix });
    }
    backend.unit(address)
}

/// Compiles a sub-model on the backend of `unit`. See [`Backend::compile`].
///
/// # Errors
/// [`UnitError::UnknownBackend`], and those of [`Backend::compile`].
pub fn compile(model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
    backend_of(&unit.address)?.compile(model, unit, options)
}

/// One line of `trefoil units`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitReport {
    /// Backend name.
    pub backend: String,
    /// The unit, on all its cores.
    pub unit: Unit,
    /// Whether it can be used, with library version and path, or why not and what would help.
    pub availability: Availability,
}

/// Every unit of every backend, usable or not.
pub fn list() -> Vec<UnitReport> {
    let mut reports = Vec::new();
    for backend in backends() {
        for (unit, availability) in backend.units() {
            reports.push(UnitReport { backend: backend.name().to_owned(), unit, availability });
        }
    }
    reports
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_distinct_and_found() {
        let names: BTreeSet<_> = backends().iter().map(|backend| backend.name()).collect();
        assert_eq!(names.len(), backends().len());
        for name in names {
            assert_eq!(backend(name).unwrap().name(), name);
        }
    }

    #[test]
    fn an_unknown_backend_lists_the_known_ones() {
        let error = resolve(&"tensorrt:0".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("`tensorrt`") && error.contains("openvino, ort"), "{error}");
    }

    #[test]
    fn every_listed_unit_belongs_to_its_backend_and_explains_itself() {
        let reports = list();
        for backend in backends() {
            assert!(reports.iter().any(|report| report.backend == backend.name()), "{}", backend.name());
        }
        for report in reports {
            assert_eq!(report.unit.address.backend, report.backend);
            match report.availability {
                Availability::Available { version, .. } => {
                    assert!(!version.is_empty());
                    assert_eq!(resolve(&report.unit.address).unwrap(), report.unit);
                }
                Availability::Unavailable { reason, fix } => {
                    assert!(!reason.is_empty() && !fix.is_empty() && !reason.contains('\n'), "{reason} / {fix}");
                    assert!(matches!(resolve(&report.unit.address), Err(UnitError::Unavailable { .. })), "{reason}");
                }
            }
        }
    }
}
