//! A complete set of simulated measurements, so that a profile can be made without the hardware.

use super::cost::Workload;
use super::description::{Device, SOC_VERSION, SocDescription, description};
use super::{SimBackend, split_device};
use crate::{Backend, UnitError};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{
    Conditions, Machine, Measurement, MeasurementId, OperatorClass, OperatorGraph, Origin, Outcome, Profile, Samples,
    Subject, Timing, UnitAddress,
};

/// Tensor sizes at which transfers are listed; the description is linear between them.
const TRANSFER_BYTES: [u64; 4] = [1 << 10, 1 << 16, 1 << 20, 1 << 28];

/// Simulated measurements of `graph` on `units` (all of one SoC): every distinct operator, the whole model, transfers,
/// slowdown factors and power. All with [`Origin::Simulated`]. `taken_at` is the RFC 3339 time to record.
///
/// What a device does not run is a failed measurement with the description's reason, as a profiler would find it.
///
/// # Errors
/// [`UnitError::Description`] for an unknown or malformed description or units of several SoCs, and
/// [`UnitError::UnknownDevice`].
pub fn profile_entries(
    graph: &OperatorGraph,
    units: &[UnitAddress],
    taken_at: &str,
) -> Result<Vec<Measurement>, UnitError> {
    let soc = common_soc(units)?;
    let mut devices = Vec::with_capacity(units.len());
    for unit in units {
        SimBackend.unit(unit)?;
        let (_, name) = split_device(&unit.device).unwrap_or_default();
        let device = soc.device(name).ok_or_else(|| UnitError::UnknownDevice {
            backend: "sim".to_owned(),
            device: unit.device.clone(),
            have: super::device_names(std::slice::from_ref(&soc)),
        })?;
        devices.push((unit.clone(), device));
    }
    let recorder = Recorder { soc: &soc, taken_at };
    let mut entries = Vec::new();
    for (unit, device) in &devices {
        recorder.operators(graph, unit, device, &mut entries);
        entries.push(recorder.entry(
            Subject::Power,
            std::slice::from_ref(unit),
            Outcome::Value { value: Samples::exactly(device.watts.value) },
        ));
    }
    for (from, from_device) in &devices {
        for (to, to_device) in devices.iter().filter(|(to, _)| to != from) {
            recorder.pair(&[from.clone(), to.clone()], from_device, to_device, &mut entries);
        }
    }
    Ok(entries)
}

/// A whole profile of `graph` on simulated `units`, with the description's idle power and notes.
///
/// # Errors
/// As [`profile_entries`].
pub fn simulated_profile(graph: &OperatorGraph, units: &[UnitAddress], taken_at: &str) -> Result<Profile, UnitError> {
    let soc = common_soc(units)?;
    let mut profile = Profile::new(Machine {
        cpu: format!("simulated: {}", soc.title),
        cores: Vec::new(),
        memory_bytes: 0,
        os: "none".to_owned(),
        features: Vec::new(),
        versions: versions(&soc),
    });
    profile.measurements = profile_entries(graph, units, taken_at)?;
    for unit in units {
        profile.units.push(SimBackend.unit(unit)?);
    }
    profile.declared_watts.insert("idle".to_owned(), soc.idle_watts.value);
    profile.notes.push(format!("every number is simulated from the description `{}`", soc.name));
    profile.notes.extend(soc.notes.iter().cloned());
    profile.models.push(graph.clone());
    Ok(profile)
}

/// The description that all of `units` belong to.
fn common_soc(units: &[UnitAddress]) -> Result<SocDescription, UnitError> {
    let names: BTreeSet<&str> =
        units.iter().map(|unit| split_device(&unit.device).map_or(unit.device.as_str(), |(soc, _)| soc)).collect();
    match (names.first(), names.len()) {
        (Some(name), 1) => description(name),
        _ => Err(UnitError::Description {
            what: "simulated units".to_owned(),
            reason: format!(
                "a profile is of one machine, and these are of {}: {}",
                names.len(),
                names.into_iter().collect::<Vec<_>>().join(", ")
            ),
        }),
    }
}

fn versions(soc: &SocDescription) -> BTreeMap<String, String> {
    BTreeMap::from([("sim".to_owned(), format!("{} (format {SOC_VERSION})", soc.name))])
}

struct Recorder<'a> {
    soc: &'a SocDescription,
    taken_at: &'a str,
}

impl Recorder<'_> {
    fn entry(&self, subject: Subject, units: &[UnitAddress], outcome: Outcome) -> Measurement {
        Measurement {
            id: MeasurementId::new(&subject, units, 0),
            subject,
            units: units.to_vec(),
            origin: Origin::Simulated,
            outcome,
            conditions: Conditions::default(),
            versions: versions(self.soc),
            taken_at: self.taken_at.to_owned(),
        }
    }

    /// Every distinct operator on one unit, and the whole model as their sum.
    fn operators(&self, graph: &OperatorGraph, unit: &UnitAddress, device: &Device, entries: &mut Vec<Measurement>) {
        let host = &self.soc.host().name;
        let mut known: BTreeMap<&str, Result<f64, String>> = BTreeMap::new();
        let mut whole: Result<f64, String> = Ok(0.0);
        for operator in &graph.operators {
            let result = known.entry(&operator.signature.0).or_insert_with(|| {
                let work = Workload::of(graph, operator);
                let (outcome, result) = if let Some(time) = device.operator_time(&work) {
                    let handed = |from: &str, to: &str, bytes: u64| {
                        let ms = self.soc.transfer_ms(from, to, bytes)?;
                        device.kind.is_accelerator().then(|| Samples::exactly(ms))
                    };
                    let timing = Timing {
                        total: Some(Samples::exactly(time.total_ms())),
                        h2d: handed(host, &device.name, work.input_bytes),
                        dispatch: Some(Samples::exactly(time.dispatch_ms)),
                        exec: Some(Samples::exactly(time.exec_ms)),
                        d2h: handed(&device.name, host, work.output_bytes),
                    };
                    (Outcome::Ok { timing, error_to_peak: None, nodes: Vec::new() }, Ok(time.total_ms()))
                } else {
                    let reason = device.refusal(&work).unwrap_or_else(|| "no rate applies".to_owned());
                    (Outcome::Failed { stage: "compile".to_owned(), reason: reason.clone() }, Err(reason))
                };
                let subject = Subject::Operator { signature: operator.signature.clone() };
                let mut entry = self.entry(subject, std::slice::from_ref(unit), outcome);
                entry.versions.extend(device.rate_source(&work).map(|source| ("rate".to_owned(), source.to_owned())));
                entries.push(entry);
                result
            });
            whole = match (whole, result) {
                (Ok(sum), Ok(ms)) => Ok(sum + *ms),
                (Err(reason), _) => Err(reason),
                (_, Err(reason)) => Err(reason.clone()),
            };
        }
        let outcome = match whole {
            Ok(ms) => {
                let timing = Timing { total: Some(Samples::exactly(ms)), ..Timing::default() };
                Outcome::Ok { timing, error_to_peak: None, nodes: Vec::new() }
            }
            Err(reason) => Outcome::Failed { stage: "compile".to_owned(), reason },
        };
        let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
        entries.push(self.entry(subject, std::slice::from_ref(unit), outcome));
    }

    /// Transfers and slowdown factors of one ordered pair.
    fn pair(&self, units: &[UnitAddress; 2], first: &Device, second: &Device, entries: &mut Vec<Measurement>) {
        for bytes in TRANSFER_BYTES {
            if let Some(ms) = self.soc.transfer_ms(&first.name, &second.name, bytes) {
                let timing = Timing { total: Some(Samples::exactly(ms)), ..Timing::default() };
                let outcome = Outcome::Ok { timing, error_to_peak: None, nodes: Vec::new() };
                entries.push(self.entry(Subject::Transfer { bytes }, units, outcome));
            }
        }
        let factor = self.soc.slowdown(&first.name, &second.name);
        for class in [OperatorClass::Compute, OperatorClass::Memory] {
            for interference in [OperatorClass::Compute, OperatorClass::Memory] {
                let outcome = Outcome::Value { value: Samples::exactly(factor) };
                entries.push(self.entry(Subject::Slowdown { class, interference }, units, outcome));
            }
        }
    }
}
