//! Profiling: every distinct operator on every unit, whole models, transfers, slowdowns, power.

use crate::power::PowerMeter;
use crate::prepare::PreparedModel;
use crate::protocol::{Answer, Failure, Job};
use crate::session::{Session, grouping_key, is_random, leniency_for, outcome_of, unexpected};
use crate::{ProfileError, ProfileOptions, Progress, backend_groups, pairs};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use trefoil_core::{
    Granularity, NodeTime, OperatorGraph, OperatorId, Outcome, Profile, Samples, Signature, Subject, Unit, UnitAddress,
    UnitKind,
};

/// Measures `model` on `units`. Every finished measurement is in the journal at once, so that a stopped profile resumes.
///
/// # Errors
/// [`ProfileError::Interrupted`] when `stop` is raised; [`ProfileError::Strict`]; errors of files, of workers that
/// cannot be started, and of the model. What a unit cannot run is a record, not an error.
pub fn profile(
    model: &PreparedModel,
    units: &[Unit],
    options: &ProfileOptions,
    progress: &mut dyn FnMut(Progress),
    stop: &AtomicBool,
) -> Result<Profile, ProfileError> {
    check_units(units)?;
    let mut profile = Profile::new(trefoil_units::machine());
    profile.units = units.to_vec();
    profile.declared_watts.clone_from(&options.watts);
    // Before minutes are spent on a profile that nobody could read.
    profile.check_watts()?;
    let mut session = Session::new(model, options, &profile, progress, stop)?;
    let groups = match options.granularity {
        Granularity::Backend => backend_groups::kernel_groups(&mut session, units)?,
        Granularity::Fused | Granularity::Node => Vec::new(),
    };
    let graph = model.graph(options.granularity, &groups)?;
    // All or none are simulated (`check_units`).
    if units.iter().any(|unit| unit.simulated) {
        crate::simulated::fill(&mut profile, &graph, units)?;
    } else {
        measure_real(&mut session, &mut profile, &graph, units)?;
    }
    let notes = std::mem::take(&mut session.notes);
    profile.models.push(graph);
    profile.notes.extend(notes);
    profile.validate()?;
    Ok(profile)
}

/// No unit twice, at least one, and not simulated and real ones together (nobody could tell their transfers).
fn check_units(units: &[Unit]) -> Result<(), ProfileError> {
    let fail = |what: &str| Err(ProfileError::Options { what: what.to_owned() });
    if units.is_empty() {
        return fail("no unit to profile on; name one, like openvino:CPU (see `trefoil units`)");
    }
    let mut seen = BTreeSet::new();
    if let Some(unit) = units.iter().find(|unit| !seen.insert(&unit.address)) {
        return fail(&format!("unit {} is named twice", unit.address));
    }
    if units.iter().any(|unit| unit.simulated) && units.iter().any(|unit| !unit.simulated) {
        return fail("simulated and real units cannot be profiled together; profile them one after the other");
    }
    Ok(())
}

fn measure_real(
    session: &mut Session<'_>,
    profile: &mut Profile,
    graph: &OperatorGraph,
    units: &[Unit],
) -> Result<(), ProfileError> {
    let representatives = representatives(graph);
    let mut self_checked = Vec::new();
    let baselines = if session.options.baselines { baseline_units(units) } else { Vec::new() };
    let meter = PowerMeter::discover();
    let power = meter.is_available() && session.options.power_seconds > 0.0;
    let pair_count = units.len() * units.len().saturating_sub(1) / 2;
    let mut total = (representatives.len() + 1) * units.len() + baselines.len() + 1;
    total += pair_count * 2 * session.options.transfer_sizes().len();
    total += if power { units.len() + 1 } else { 0 };
    total += if session.options.corun { pairs::slowdown_count(graph, units) } else { 0 };
    session.estimator.set_total(total);

    session.note(format!("reference values: {}", session.model.reference.description));
    for note in session.model.reference.notes.clone() {
        session.note(note);
    }
    for unit in units.iter().filter(|unit| session.model.reference.is_self_check(&unit.address.backend)) {
        self_checked.push(unit.address.to_string());
    }
    if !self_checked.is_empty() {
        session.note(format!(
            "{}: compared with the same backend without its optimisations only, since no other traced the model",
            self_checked.join(", ")
        ));
    }
    let spin_before = spin(session)?;
    for unit in units.iter().chain(&baselines) {
        whole_model(session, profile, graph, unit)?;
    }
    profile.modes = baselines;
    for (turn, &id) in representatives.values().enumerate() {
        // The order of units rotates, so that a drift of the machine does not hit one of them only.
        for offset in 0..units.len() {
            operator(session, profile, graph, id, &units[(turn + offset) % units.len()])?;
        }
    }
    pairs::transfers(session, profile, units)?;
    if session.options.corun {
        pairs::slowdowns(session, profile, graph, units)?;
    }
    if power {
        measure_power(session, profile, units)?;
    } else if session.options.power_seconds > 0.0 && session.options.watts.is_empty() {
        session.note("power: no meter is readable here and no watts were declared, so energy is unknown".to_owned());
    }
    let spin_after = spin(session)?;
    noise_notes(session, profile, [spin_before, spin_after]);
    Ok(())
}

/// One operator for each distinct signature, in graph order.
fn representatives(graph: &OperatorGraph) -> BTreeMap<u32, OperatorId> {
    let mut seen: BTreeSet<&Signature> = BTreeSet::new();
    graph.ids().filter(|&id| seen.insert(&graph.operator(id).signature)).map(|id| (id.0, id)).collect()
}

/// Each CPU backend among `units` on one core and on all cores, as far as those are not among `units` already.
fn baseline_units(units: &[Unit]) -> Vec<Unit> {
    let mut found: Vec<Unit> = Vec::new();
    let allowed = trefoil_units::allowed_cores();
    for unit in units.iter().filter(|unit| unit.kind == UnitKind::Cpu && !unit.simulated) {
        let Some(backend) = trefoil_units::backend(&unit.address.backend) else { continue };
        let all = UnitAddress { cores: Vec::new(), ..unit.address.clone() };
        let first = unit.address.cores.first().or(allowed.first()).copied().unwrap_or(0);
        for address in [all.clone().with_cores([first]), all] {
            let present = |known: &Unit| known.address == address;
            if !units.iter().any(present)
                && !found.iter().any(present)
                && let Ok(unit) = backend.unit(&address)
                // The same cores under another name would be the same measurement.
                && !units.iter().any(|known| known.address.backend == address.backend
                    && known.address.device == address.device
                    && known.address.precision == address.precision
                    && known.resources == unit.resources)
            {
                found.push(unit);
            }
        }
    }
    found
}

fn operator(
    session: &mut Session<'_>,
    profile: &mut Profile,
    graph: &OperatorGraph,
    id: OperatorId,
    unit: &Unit,
) -> Result<(), ProfileError> {
    let operator = graph.operator(id);
    let subject = Subject::Operator { signature: operator.signature.clone() };
    let label = format!("{} {} on {}", operator.kind, operator.name, unit.address);
    let class = session.options.class();
    let set = BTreeSet::from([id]);
    if is_random(&operator.kind) {
        let name = &operator.name;
        session.note(format!("operator {id} `{name}` ({}) is random: timed, not compared", operator.kind));
    }
    let outcome = session.record(profile, &subject, &[unit], &class, &label, |session| {
        let extracted = match session.extract(graph, &set) {
            Ok(extracted) => extracted,
            Err(failure) => return Ok(outcome_of(Err(failure))),
        };
        let item = session.item(&extracted, unit, leniency_for(graph, &set, unit), false);
        let limit = session.options.timeout;
        Ok(outcome_of(session.time_checked(&extracted, &item, limit)?))
    })?;
    strict(session, &outcome, &label)
}

/// Under `strict`, what does not run where it was asked is an error.
fn strict(session: &Session<'_>, outcome: &Outcome, label: &str) -> Result<(), ProfileError> {
    let reason = match outcome {
        Outcome::Failed { stage, reason } => format!("{stage}: {reason}"),
        Outcome::Wrong { reason, .. } => format!("computes wrongly: {reason}"),
        Outcome::Ok { .. } | Outcome::Value { .. } => return Ok(()),
    };
    if session.options.strict { Err(ProfileError::Strict { what: format!("{label}: {reason}") }) } else { Ok(()) }
}

fn whole_model(
    session: &mut Session<'_>,
    profile: &mut Profile,
    graph: &OperatorGraph,
    unit: &Unit,
) -> Result<(), ProfileError> {
    let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
    let label = format!("the whole model on {}", unit.address);
    // Node times name operators of this granularity.
    let class = format!("{} {} nodes {}", session.options.class(), grouping_key(graph), session.options.node_times);
    let all: BTreeSet<_> = graph.ids().collect();
    let outcome = session.record(profile, &subject, &[unit], &class, &label, |session| {
        let extracted = match session.model.whole() {
            Ok(extracted) => extracted,
            Err(error) => return Ok(outcome_of(Err(Failure::new("extract", &error.to_string())))),
        };
        let item = session.item(&extracted, unit, leniency_for(graph, &all, unit), true);
        let limit = session.options.timeout * 5;
        let mut outcome = outcome_of(session.time_checked(&extracted, &item, limit)?);
        if let Outcome::Ok { nodes, .. } = &mut outcome
            && session.options.node_times
        {
            *nodes = node_times(session, graph, unit)?;
        }
        Ok(outcome)
    })?;
    if profile.units.iter().any(|known| known.address == unit.address) {
        // Segments may still avoid what makes the whole fail, so this is no reason to stop even under `strict`.
        if let Outcome::Failed { stage, reason } = &outcome {
            session.note(format!("the whole model does not run on {}: {stage}: {reason}", unit.address));
        }
        if let Outcome::Wrong { reason, .. } = &outcome {
            session.note(format!("the whole model computes wrongly on {}: {reason}", unit.address));
        }
    }
    Ok(())
}

/// In-situ node times of the whole model on a unit, matched to operators; empty when the backend tells none.
fn node_times(session: &mut Session<'_>, graph: &OperatorGraph, unit: &Unit) -> Result<Vec<NodeTime>, ProfileError> {
    let mut nodes = raw_node_times(session, unit)?;
    backend_groups::match_operators(&session.model.prepared, graph, &mut nodes);
    let matched = nodes.iter().filter(|node| !node.operators.is_empty()).count();
    if !nodes.is_empty() && matched < nodes.len() {
        session.note(format!(
            "node times of {}: {matched} of {} nodes matched to operators by name",
            unit.address,
            nodes.len()
        ));
    }
    Ok(nodes)
}

/// As the backend names them. A separate compilation with profiling on: never the one that is timed.
pub(crate) fn raw_node_times(session: &mut Session<'_>, unit: &Unit) -> Result<Vec<NodeTime>, ProfileError> {
    let extracted = session.model.whole()?;
    let mut item = session.item(&extracted, unit, None, false);
    item.options.profiling = true;
    let (runs, cap_ms) = if session.options.quick { (40, 300.0) } else { (200, 3000.0) };
    let slot = format!("{} profiling", unit.address);
    let limit = session.options.timeout * 5;
    let answer = session.call(&slot, &Job::NodeTimes { item, runs, cap_ms }, limit)?;
    session.retire(&slot);
    match answer {
        Ok(Answer::Nodes { nodes }) => Ok(nodes.unwrap_or_default()),
        Ok(_) => Ok(Vec::new()),
        Err(failure) => {
            session.note(format!("node times of {}: {}: {}", unit.address, failure.stage, failure.reason));
            Ok(Vec::new())
        }
    }
}

fn measure_power(session: &mut Session<'_>, profile: &mut Profile, units: &[Unit]) -> Result<(), ProfileError> {
    session.note("power is package power (RAPL) while the unit works, not the unit's own".to_owned());
    let seconds = session.options.power_seconds;
    let idle = session.options.watts.get("idle").copied().unwrap_or(0.0);
    let class = format!("power {seconds}");
    let limit = session.options.timeout * 5 + std::time::Duration::from_secs_f64(seconds);
    let units: Vec<Option<&Unit>> = std::iter::once(None).chain(units.iter().map(Some)).collect();
    for unit in units {
        let label = format!("power {}", unit.map_or("while idle".to_owned(), |unit| format!("of {}", unit.address)));
        let place: Vec<&Unit> = unit.into_iter().collect();
        session.record(profile, &Subject::Power, &place, &class, &label, |session| {
            let item = match unit {
                None => None,
                Some(unit) => Some(session.item(&session.model.whole()?, unit, None, true)),
            };
            let slot = unit.map_or("idle".to_owned(), |unit| unit.address.to_string());
            Ok(match session.call(&slot, &Job::Load { item, seconds }, limit)? {
                Ok(Answer::Loaded { watts: Some(watts), .. }) if unit.is_some() && watts < idle => {
                    let reason =
                        format!("the meter says {watts} W, less than the {idle} W declared of the idle machine");
                    outcome_of(Err(Failure::new("run", &reason)))
                }
                Ok(Answer::Loaded { watts: Some(watts), .. }) => Outcome::Value { value: Samples::exactly(watts) },
                Ok(Answer::Loaded { .. }) => {
                    outcome_of(Err(Failure::new("run", "the power meter could not be read in the worker")))
                }
                Ok(_) => outcome_of(Err(unexpected())),
                Err(failure) => outcome_of(Err(failure)),
            })
        })?;
    }
    Ok(())
}

/// Milliseconds of a fixed loop, to tell how quiet the machine is. Not a record: it is about the machine, now.
fn spin(session: &mut Session<'_>) -> Result<Option<Samples>, ProfileError> {
    let answer = session.call("spin", &Job::Spin { runs: 200 }, session.options.timeout)?;
    session.retire("spin");
    Ok(match answer {
        Ok(Answer::Spun { samples }) => Some(samples),
        _ => None,
    })
}

/// Spread of the spin loop above which the host is called noisy: it has no memory traffic and no system calls.
const NOISY_SPIN: f64 = 0.10;

fn noise_notes(session: &mut Session<'_>, profile: &Profile, spins: [Option<Samples>; 2]) {
    let worst = spins.iter().flatten().map(Samples::spread).fold(0.0f64, f64::max);
    if worst > NOISY_SPIN {
        session.note(format!(
            "noisy host: a fixed loop varied by {:.0} % (p10 to p90); other work runs here, times are less sure",
            worst * 100.0
        ));
    }
    if let [Some(before), Some(after)] = spins {
        let drift = after.median / before.median - 1.0;
        if drift.abs() > NOISY_SPIN {
            session.note(format!("the host's speed changed by {:+.0} % while profiling", -drift * 100.0));
        }
    }
    if session.second_opinions > 0 {
        session.note(format!(
            "{} results differ from the traced run but agree with the reference unit running the same operators alone, \
             which rounds between nodes as their types say",
            session.second_opinions
        ));
    }
    if session.repeated > 0 {
        session.note(format!(
            "{} of {} measurements were noisy (spread above 30 %) and taken again; {} stayed so",
            session.repeated,
            profile.measurements.len(),
            session.noisy
        ));
    }
}
