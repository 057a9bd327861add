//! A second opinion on plans: reads a certificate and the profile(s) it was made from, and verifies from the measurements
//! alone that the schedule can happen, that it costs what is claimed, and that no plan of its kind costs less than the
//! stated bound.
//!
//! This crate shares no code with the planners, the simulator or the vocabulary crate: it reads both files as plain JSON and
//! derives every cost anew. Each proof is checked by substitution, in time linear in its size, but for two: where a planner says that it searched
//! everything, a model of up to seven operators is searched anew, and where it says that no placement takes less, those of up to 24 operators are
//! tried anew. The
//! format is described in `docs/src/formats.md` (Certificate) and the arguments behind the proofs in `docs/src/planning.md`.

#![cfg_attr(test, allow(clippy::float_cmp))]

mod bounds;
mod costs;
mod form;
mod json;
mod links;
mod machine;
mod memory;
mod placements;
mod priced;
mod ranges;
mod schedule;
mod search;
mod serial;
mod workload;

use serde_json::Value;
use thiserror::Error;

/// Name of the file format, first field of every certificate.
pub const CERTIFICATE_FORMAT: &str = "trefoil-certificate";
/// Version that this checker reads.
pub const CERTIFICATE_VERSION: u64 = 1;
/// Relative slack for sums of the same numbers in another order.
pub const TOLERANCE: f64 = 1e-6;

/// Why a certificate is refused.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum CheckError {
    /// A file is not what it should be.
    #[error("cannot read the {file}: {reason}")]
    Format {
        /// `certificate` or `profile`.
        file: &'static str,
        /// What is missing or odd, with its place.
        reason: String,
    },
    /// The certificate belongs to another profile.
    #[error("the certificate is not for this profile: {0}")]
    OtherProfile(String),
    /// The schedule cannot happen.
    #[error("the schedule is not feasible: {0}")]
    Schedule(String),
    /// A cost is not what the profile says.
    #[error("task {task} is said to cost {stated} ms, but the profile gives {derived} ms")]
    Cost {
        /// Index of the task.
        task: usize,
        /// What the certificate says.
        stated: f64,
        /// What the profile gives.
        derived: f64,
    },
    /// The claimed objective does not follow from the schedule.
    #[error("the claim is wrong: {0}")]
    Claim(String),
    /// A lower bound does not hold.
    #[error("the lower bound is not proven: {0}")]
    Bound(String),
}

/// What was verified.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// `latency`, `energy` or `throughput`.
    pub objective: String,
    /// The verified cost in the objective's unit (ms or J).
    pub value: f64,
    /// Makespan of the verified schedule, in milliseconds.
    pub makespan_ms: f64,
    /// The best verified lower bound, in the objective's unit; `None` when the certificate states none.
    pub bound: Option<f64>,
    /// Kinds of the proofs that were verified.
    pub proofs: Vec<String>,
    /// Number of tasks.
    pub tasks: usize,
    /// Tasks whose cost is an estimate that was derived anew, not one measurement.
    pub estimated: usize,
    /// The units that the bound is over.
    pub units: Vec<String>,
    /// Operators that are pinned, under which the bound holds.
    pub pinned: usize,
}

impl Verdict {
    /// `value / bound − 1`.
    pub fn gap(&self) -> Option<f64> {
        self.bound.filter(|&bound| bound > 0.0).map(|bound| (self.value / bound - 1.0).max(0.0))
    }

    /// Whether cost and bound meet.
    pub fn is_optimal(&self) -> bool {
        self.bound.is_some_and(|bound| close_above(bound, self.value))
    }
}

/// Whether `low ≥ high` but for rounding; nothing is above infinity.
fn close_above(low: f64, high: f64) -> bool {
    high.is_finite() && low >= high - TOLERANCE * high.abs().max(1e-9)
}

/// Whether two sums are equal but for rounding; infinities equal nothing.
fn close(a: f64, b: f64) -> bool {
    a.is_finite() && b.is_finite() && (a - b).abs() <= TOLERANCE * a.abs().max(b.abs()).max(1e-9)
}

/// Verifies a certificate against the profile(s) that its plan was made from, in the order they were given to the planner.
///
/// # Errors
/// The first [`CheckError`] found.
pub fn check(certificate: &Value, profiles: &[Value]) -> Result<Verdict, CheckError> {
    let header = |value: &Value, file, format: &str| {
        let found = (json::text(value, "format"), value.get("version").and_then(Value::as_u64));
        match found {
            (Some(name), Some(1)) if name == format => Ok(()),
            (name, version) => Err(CheckError::Format {
                file,
                reason: format!("format `{}` version {version:?}, not `{format}` version 1", name.unwrap_or_default()),
            }),
        }
    };
    header(certificate, "certificate", CERTIFICATE_FORMAT)?;
    for profile in profiles {
        header(profile, "profile", "trefoil-profile")?;
        ranges::profile(profile)?;
    }
    form::fields(certificate)?;
    let found = costs::profiles_of(certificate, profiles)?;
    form::models(certificate, &found)?;
    let mut distinct: Vec<&Value> = Vec::new();
    for profile in found.iter().map(|found| found.0).chain(profiles.first()) {
        if !distinct.iter().any(|known| std::ptr::eq(*known, profile)) {
            distinct.push(profile);
        }
    }
    let machine = machine::Machine::read(certificate, &distinct)?;
    form::unit_names(certificate, &machine)?;
    let mut objective = json::text(certificate, "objective").unwrap_or_default().to_owned();
    let per_ms = machine.prices(&objective)?;
    let models = costs::Model::read_all(certificate, &found, &machine)?;
    let schedule = schedule::Schedule::read(certificate, &models, &machine)?;
    form::requests(certificate, &schedule)?;
    form::method(certificate, &machine, &schedule)?;
    ranges::certificate(certificate)?;
    schedule.verify(&models, &machine)?;
    let value = schedule.verify_claim(certificate, &models, &machine, &per_ms)?;
    let (bound, proofs) = if machine.units.iter().any(|unit| unit.is_mode) {
        let plain = machine.without_modes(certificate, &distinct)?;
        let models = costs::Model::read_all(certificate, &found, &plain)?;
        let prices = plain.prices(&objective)?;
        let verified = bounds::verify(certificate, &models, &plain, &prices, &schedule)?;
        for (profile, graph) in found.iter().filter(|_| objective == "latency") {
            let least = machine::Machine::least_on_modes(profile, graph)?;
            if verified.0.is_some_and(|bound| !close_above(least, bound)) {
                return Err(CheckError::Bound(format!(
                    "the whole model takes {least} ms on a mode, less than the bound"
                )));
            }
        }
        verified
    } else {
        bounds::verify(certificate, &models, &machine, &per_ms, &schedule)?
    };
    if !value.is_finite() || !schedule.makespan().is_finite() {
        return Err(CheckError::Claim(format!("it costs {value} and ends after {} ms", schedule.makespan())));
    }
    if let Some(bound) = bound
        && !close_above(value, bound)
    {
        return Err(CheckError::Bound(format!("the bound {bound} is above the cost {value}")));
    }
    if json::text(&certificate["claim"], "rule") == Some("makespan") {
        // Of a plan for energy on units whose powers do not tell it: milliseconds.
        "latency".clone_into(&mut objective);
    }
    Ok(Verdict {
        objective,
        value,
        makespan_ms: schedule.makespan(),
        bound,
        proofs,
        tasks: schedule.tasks.len(),
        estimated: schedule.estimated,
        units: machine.units.iter().map(|unit| unit.address.clone()).collect(),
        pinned: models.iter().flat_map(|model| &model.fixed).flatten().count(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_are_close_to_nothing() {
        for odd in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            assert!(!close(0.001, odd) && !close(odd, 0.001) && !close(odd, odd), "{odd}");
        }
        assert!(!close_above(f64::INFINITY, f64::INFINITY) && !close_above(1.0, f64::INFINITY));
        assert!(!close_above(f64::NAN, 1.0) && !close_above(1.0, f64::NAN));
        assert!(close_above(f64::INFINITY, 1.0), "what nothing can do takes longer than any bound");
    }
}
