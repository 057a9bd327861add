//! How much the models slow each other down, one on each core: measured once per models and units, then taken from the cache.

use super::arrange::Factors;
use super::{Question, Ready, contest_options, entrant, graphs, request, stores};
use crate::error::CliError;
use serde::Serialize;
use trefoil_core::{Conditions, Measurement, Outcome, Samples, Subject, Unit, UnitAddress, UnitKind};
use trefoil_plan::together;
use trefoil_profile::{CoRunning, CoRuns};
use trefoil_run::RunError;
use trefoil_run::together::slowdown;

/// By how much a model is slowed on its unit while all others run on theirs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Slowed {
    /// Name of the model.
    pub model: String,
    /// Its unit.
    pub unit: UnitAddress,
    /// Time beside the others over time alone.
    pub factor: Samples,
    /// When it was measured.
    pub taken_at: String,
    /// Whether that was an earlier invocation.
    pub stored: bool,
}

/// Milliseconds for each way of running.
pub fn corun_ms(question: &Question) -> f64 {
    if question.measure.quick { 100.0 } else { 300.0 }
}

/// With how much care factors were measured, as the cache tells it apart.
pub fn corun_class(ms: f64) -> String {
    format!("models, work of lanes, {ms} ms")
}

/// Measures each model alone and beside all others, one per core; only where each can have a unit of its own.
pub fn measure_slowdown(
    ready: &[Ready],
    which: &[usize],
    question: &Question,
    notes: &mut Vec<String>,
) -> Result<(Option<Vec<Slowed>>, Factors), CliError> {
    let nothing = Ok((None, Factors::new()));
    if which.len() < 2 {
        return nothing;
    }
    let base = request(ready, which, &question.baseline_units, 1);
    let Ok(plan) = together::one_per_unit(&base) else { return nothing };
    let unit_of = |model: usize| -> Option<&Unit> {
        let segment = plan.segments.iter().find(|segment| segment.model as usize == model)?;
        plan.units.iter().find(|unit| unit.address == segment.unit)
    };
    let units: Vec<&Unit> = (0..which.len()).filter_map(unit_of).collect();
    let apart = units.iter().enumerate().all(|(at, unit)| units[..at].iter().all(|other| unit.is_disjoint(other)));
    if units.len() < which.len() || !apart {
        notes.push("there are more models than cores, so it was not measured how they slow each other down".to_owned());
        return nothing;
    }
    let subjects: Vec<Subject> =
        which.iter().map(|&model| Subject::WholeModel { model: ready[model].graph.fingerprint.clone() }).collect();
    let running: Vec<CoRunning<'_>> =
        subjects.iter().zip(&units).map(|(subject, unit)| CoRunning { subject, unit }).collect();
    let ms = corun_ms(question);
    let class = corun_class(ms);
    let mut log = CoRuns::open(&question.cache, trefoil_units::machine())?;
    let others = |at: usize| -> Vec<CoRunning<'_>> {
        let rest = running.iter().enumerate().filter(|&(other, _)| other != at);
        rest.map(|(_, one)| *one).collect()
    };
    let known = |log: &CoRuns| -> Option<Vec<Measurement>> {
        let exact: Option<Vec<Measurement>> =
            (0..running.len()).map(|at| log.get(running[at], &others(at), &class).cloned()).collect();
        // Of two models on other cores of the same backends, too: cores are taken to be alike.
        exact.or_else(|| two_alike(log, &running, &question.baseline_units, &class))
    };
    let stored = known(&log).filter(|_| !question.measure.fresh);
    let is_stored = stored.is_some();
    let records = if let Some(records) = stored {
        records
    } else {
        let probe = entrant(ready, which, "slowdown", plan.clone(), false, false)?;
        let (asked, inputs, options) = (graphs(ready, which), stores(ready, which), contest_options(question)?);
        let measure = || slowdown(&probe, &asked, &inputs, ms, &options);
        // A noisy result is taken again once, and the calmer of the two stands.
        let found = measure().and_then(|first| {
            if !first.is_noisy() {
                return Ok(first);
            }
            measure().map(|second| if second.worst_spread() < first.worst_spread() { second } else { first })
        });
        let found = match found {
            Ok(found) => found,
            // What cannot be run side by side will not be: the contest tells why.
            Err(error @ RunError::Worker { .. }) => {
                notes.push(format!("it was not measured how the models slow each other down: {error}"));
                return nothing;
            }
            Err(error) => return Err(error.into()),
        };
        if found.is_noisy() {
            notes.push(
                "how much the models slow each other down varied by more than 30 % while it was measured".to_owned(),
            );
        }
        let conditions = Conditions {
            warmup: 3,
            runs: (found.executions / running.len().max(1) as u64) as u32,
            cap_ms: Some(ms),
            load: None,
            denormals_flushed: true,
            fresh_process: true,
        };
        let mut records = Vec::new();
        for (at, factor) in found.factors.iter().enumerate() {
            records.push(log.put(running[at], &others(at), &class, *factor, &conditions)?);
        }
        records
    };
    let mut slowed = Vec::new();
    let mut factors = Factors::new();
    for ((record, unit), &model) in records.into_iter().zip(&units).zip(which) {
        let Outcome::Value { value } = record.outcome else { continue };
        for other in units.iter().filter(|other| other.address != unit.address) {
            factors.insert((unit.address.clone(), other.address.clone()), value.median);
        }
        slowed.push(Slowed {
            model: ready[model].name.clone(),
            unit: unit.address.clone(),
            factor: value,
            taken_at: record.taken_at,
            stored: is_stored,
        });
    }
    if let [first, second] = subjects.as_slice() {
        add_stored(&log, [first, second], &question.baseline_units, &class, &mut factors);
    }
    Ok((Some(slowed), factors))
}

/// What is stored of two models on units that differ from theirs in which cores they use.
fn two_alike(log: &CoRuns, running: &[CoRunning<'_>], units: &[Unit], class: &str) -> Option<Vec<Measurement>> {
    let [first, second] = running else { return None };
    let twins = |of: &CoRunning<'_>| -> Vec<&Unit> { units.iter().filter(|unit| alike(unit, of.unit)).collect() };
    for one in twins(first) {
        for other in twins(second).into_iter().filter(|other| one.is_disjoint(other)) {
            let (a, b) = (CoRunning { unit: one, ..*first }, CoRunning { unit: other, ..*second });
            if let (Some(of_first), Some(of_second)) = (log.get(a, &[b], class), log.get(b, &[a], class)) {
                return Some(vec![of_first.clone(), of_second.clone()]);
            }
        }
    }
    None
}

/// Whether two units are cores of one backend, as many of each.
fn alike(one: &Unit, other: &Unit) -> bool {
    one.kind == UnitKind::Cpu
        && other.kind == UnitKind::Cpu
        && (&one.address.backend, &one.address.device, one.address.precision, one.resources.len())
            == (&other.address.backend, &other.address.device, other.address.precision, other.resources.len())
}

/// Adds what is stored of two models on other pairs of units (`trefoil bench corun A B` measures them all); the mean, where either
/// may be the slowed one.
fn add_stored(log: &CoRuns, models: [&Subject; 2], units: &[Unit], class: &str, factors: &mut Factors) {
    for slowed in units {
        for other in units.iter().filter(|other| slowed.is_disjoint(other)) {
            let factor = |first: usize| {
                let of = |subject, unit| CoRunning { subject, unit };
                let found = log.get(of(models[first], slowed), &[of(models[1 - first], other)], class)?;
                match &found.outcome {
                    Outcome::Value { value } => Some(value.median),
                    _ => None,
                }
            };
            let known: Vec<f64> = [0, 1].into_iter().filter_map(factor).collect();
            if !known.is_empty() {
                let mean = known.iter().sum::<f64>() / known.len() as f64;
                factors.entry((slowed.address.clone(), other.address.clone())).or_insert(mean);
            }
        }
    }
}

/// What was measured between two units, for every two units that may run at once: their own factor, or the mean of all.
pub fn spread(measured: &Factors, units: &[Unit]) -> Factors {
    let mut factors = measured.clone();
    if measured.is_empty() {
        return factors;
    }
    let mean = measured.values().sum::<f64>() / measured.len() as f64;
    for unit in units {
        for other in units.iter().filter(|other| unit.is_disjoint(other)) {
            factors.entry((unit.address.clone(), other.address.clone())).or_insert(mean);
        }
    }
    factors
}
