//! Measured segments and refinement (DESIGN 3): sums of isolated operators mislead, so a plan's segments are measured
//! whole, the planner plans again with what was found, until its plan is all measured or the time is up.

use crate::prepare::PreparedModel;
use crate::session::{Session, grouping_key, leniency_for, outcome_of};
use crate::settle::{CONFIRMING_PROCESSES, LineupTimer, PROCESSES, settle};
use crate::{ProfileError, ProfileOptions, Progress};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use trefoil_core::{
    MeasurementId, OperatorGraph, OperatorId, Origin, Outcome, Plan, Profile, Subject, Unit, UnitAddress,
};

/// A plan segment that was measured, in a round of refinement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Audit {
    /// The record.
    pub measurement: MeasurementId,
    /// Unit.
    pub unit: UnitAddress,
    /// Number of operators.
    pub operators: usize,
    /// What the planner had predicted, in milliseconds.
    pub predicted_ms: f64,
    /// What was measured; `None` when it failed or computed wrongly there.
    pub measured_ms: Option<f64>,
    /// Why there is no time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// One round: a proposal, and what its unmeasured segments turned out to take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// What the plan claimed, in its objective's unit.
    pub claimed: f64,
    /// Its segments.
    pub segments: usize,
    /// Those that were measured in this round.
    pub measured: Vec<Audit>,
}

/// What came of refinement.
#[derive(Debug, Clone)]
pub struct Refinement {
    /// The last proposal.
    pub plan: Plan,
    /// All rounds, the last one included.
    pub rounds: Vec<Round>,
    /// Segments measured over all rounds.
    pub measured: usize,
    /// Whether every segment of `plan` is measured; otherwise the time was up.
    pub finished: bool,
    /// Whether every prediction was at most what was then measured. If so, and `finished`, the plan is the best under
    /// this cost model; if not, a better one may have been passed over.
    pub estimates_were_lower_bounds: bool,
}

/// Measures segments whole, each on its unit, verified against the trace, and appends the records to `profile`. Returns
/// their ids in order. A segment that fails or computes wrongly is a record too.
///
/// # Errors
/// As [`crate::profile`].
pub fn measure_segments(
    model: &PreparedModel,
    graph: &OperatorGraph,
    segments: &[(BTreeSet<OperatorId>, Unit)],
    profile: &mut Profile,
    options: &ProfileOptions,
    progress: &mut dyn FnMut(Progress),
    stop: &AtomicBool,
) -> Result<Vec<MeasurementId>, ProfileError> {
    if let Some((_, unit)) = segments.iter().find(|(_, unit)| unit.simulated) {
        let what = format!("{} is simulated, there is nothing to measure; use its profile as it is", unit.address);
        return Err(ProfileError::Options { what });
    }
    let mut session = Session::new(model, options, profile, progress, stop)?;
    session.estimator.set_total(segments.len());
    let outcome = measure_all(&mut session, graph, segments, profile);
    profile.notes.append(&mut session.notes);
    outcome
}

fn measure_all(
    session: &mut Session<'_>,
    graph: &OperatorGraph,
    segments: &[(BTreeSet<OperatorId>, Unit)],
    profile: &mut Profile,
) -> Result<Vec<MeasurementId>, ProfileError> {
    let mut ids = Vec::new();
    for (set, unit) in segments {
        let subject = segment_subject(graph, set);
        let label = format!("segment of {} operators on {}", set.len(), unit.address);
        let class = format!("{} {}", session.options.class(), grouping_key(graph));
        session
            .record(profile, &subject, &[unit], &class, &label, |session| measure_segment(session, graph, set, unit))?;
        ids.extend(profile.measurements.last().map(|measurement| measurement.id.clone()));
    }
    Ok(ids)
}

pub(crate) fn segment_subject(graph: &OperatorGraph, set: &BTreeSet<OperatorId>) -> Subject {
    Subject::Segment {
        model: graph.fingerprint.clone(),
        granularity: graph.granularity,
        operators: set.iter().copied().collect(),
    }
}

fn measure_segment(
    session: &mut Session<'_>,
    graph: &OperatorGraph,
    set: &BTreeSet<OperatorId>,
    unit: &Unit,
) -> Result<Outcome, ProfileError> {
    let extracted = match session.extract(graph, set) {
        Ok(extracted) => extracted,
        Err(failure) => return Ok(outcome_of(Err(failure))),
    };
    let item = session.item(&extracted, unit, leniency_for(graph, set, unit), true);
    let limit = session.options.timeout * 5;
    Ok(outcome_of(session.time_checked(&extracted, &item, limit)?))
}

/// Plans, measures what the plan only predicts, and plans again, until the plan is all measured, `budget` is used up, or
/// the planner has nothing new to propose.
///
/// A plan that is all measured is then **settled**: its segments, and the whole model on every unit, are timed once more by
/// `timer`, in several fresh processes as they will be run, so that plan and baselines are compared under the same conditions
/// and not hours apart; without a timer that is left out. Planning goes on until the plan of choice is settled, and that is
/// then settled once more: what was chosen for a lucky measurement loses its luck.
///
/// # Errors
/// [`ProfileError::Planner`] when `propose` fails, and as [`crate::profile`].
#[allow(clippy::too_many_arguments)] // each is a thing of its own, and a struct of borrowed callbacks reads worse
pub fn refine<E: Display>(
    model: &PreparedModel,
    graph: &OperatorGraph,
    profile: &mut Profile,
    options: &ProfileOptions,
    budget: Duration,
    propose: &mut dyn FnMut(&Profile) -> Result<Plan, E>,
    mut timer: Option<&mut LineupTimer<'_>>,
    progress: &mut dyn FnMut(Progress),
    stop: &AtomicBool,
) -> Result<Refinement, ProfileError> {
    let began = Instant::now();
    let mut session = Session::new(model, options, profile, progress, stop)?;
    let mut refinement = Refinement {
        plan: ask(propose, profile)?,
        rounds: Vec::new(),
        measured: 0,
        finished: false,
        estimates_were_lower_bounds: true,
    };
    let (mut settled, mut confirmed) = (BTreeSet::new(), false);
    loop {
        let open = unmeasured(&refinement.plan, graph, profile)?;
        let mut round =
            Round { claimed: refinement.plan.claimed, segments: refinement.plan.segments.len(), measured: Vec::new() };
        if open.is_empty() {
            refinement.finished = true;
            // Past the budget the numbers at hand must do, but the first settling is what the budget was for.
            let processes = if confirmed { CONFIRMING_PROCESSES } else { PROCESSES };
            if let Some(timer) = &mut timer
                && (settled.is_empty() || began.elapsed() <= budget)
                && settle(&mut session, graph, &refinement.plan, profile, &mut settled, processes, *timer)?
            {
                // The fresh numbers may tip the balance; a plan that is then open or unsettled goes round again.
                refinement.plan = ask(propose, profile)?;
                refinement.finished = false;
                continue;
            }
            if !confirmed && !settled.is_empty() && began.elapsed() <= budget {
                // What is best by a measurement is partly so by luck, and its time looks too good. A second set of
                // measurements, which the choice did not see, tells the time without that luck.
                confirmed = true;
                settled.clear();
                continue;
            }
            refinement.rounds.push(round);
            break;
        }
        let (_, total) = session.estimator.counts();
        session.estimator.set_total(total + open.len());
        for candidate in &open {
            if began.elapsed() > budget {
                break;
            }
            let ids = measure_all(&mut session, graph, std::slice::from_ref(&candidate.place), profile)?;
            let audit = audit(profile, candidate, ids);
            refinement.estimates_were_lower_bounds &=
                audit.measured_ms.is_none_or(|measured| candidate.predicted_ms <= measured);
            round.measured.push(audit);
        }
        let all_done = round.measured.len() == open.len();
        refinement.measured += round.measured.len();
        refinement.rounds.push(round);
        if !all_done {
            break;
        }
        refinement.plan = ask(propose, profile)?;
    }
    refinement.plan.all_measured = refinement.finished;
    profile.notes.append(&mut session.notes);
    Ok(refinement)
}

fn ask<E: Display>(
    propose: &mut dyn FnMut(&Profile) -> Result<Plan, E>,
    profile: &Profile,
) -> Result<Plan, ProfileError> {
    propose(profile).map_err(|error| ProfileError::Planner { reason: error.to_string() })
}

struct Candidate {
    place: (BTreeSet<OperatorId>, Unit),
    predicted_ms: f64,
}

/// Segments of the plan that no record covers, each once.
fn unmeasured(plan: &Plan, graph: &OperatorGraph, profile: &Profile) -> Result<Vec<Candidate>, ProfileError> {
    let index = profile.index();
    let mut seen = BTreeSet::new();
    let mut open = Vec::new();
    for segment in plan.segments.iter().filter(|segment| segment.cost.origin == Origin::Predicted) {
        let set: BTreeSet<_> = segment.operators.iter().copied().collect();
        let subject = segment_subject(graph, &set);
        let key = std::slice::from_ref(&segment.unit);
        // A planner that predicts what is measured already would otherwise keep the loop going for ever.
        if index.newest(&subject, key).is_some() || !seen.insert((subject.key(), segment.unit.clone())) {
            continue;
        }
        let unit = profile.unit(&segment.unit)?.clone();
        if unit.simulated {
            // A simulated unit has nothing to measure: its description is all there is.
            continue;
        }
        open.push(Candidate { place: (set, unit), predicted_ms: segment.cost.ms });
    }
    Ok(open)
}

fn audit(profile: &Profile, candidate: &Candidate, mut ids: Vec<MeasurementId>) -> Audit {
    let record = profile.measurements.last();
    Audit {
        measurement: ids.pop().unwrap_or_else(|| MeasurementId(String::new())),
        unit: candidate.place.1.address.clone(),
        operators: candidate.place.0.len(),
        predicted_ms: candidate.predicted_ms,
        measured_ms: record.and_then(|record| record.total()).map(|total| total.median),
        failure: record.and_then(trefoil_core::Measurement::failure),
    }
}
