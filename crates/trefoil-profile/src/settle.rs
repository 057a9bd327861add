//! Settling: what a decision rests on is timed once more, under one set of conditions and as it will be run.
//!
//! This crate does not execute plans, so the timing itself is a [`LineupTimer`] that its caller brings: `trefoil-run`'s
//! executes them in fresh processes with the executor that will run them, hand-off to its lane included. A loop around the
//! backend's call alone promises what no user sees: below 0.2 ms, waking a lane and the backend's own threads is half of
//! the time.

use crate::prepare::PreparedModel;
use crate::protocol::Sampling;
use crate::refine::segment_subject;
use crate::sampling::{pooled, typical_of};
use crate::session::{Session, sub_model};
use crate::{ProfileError, ProfileOptions, Progress};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use trefoil_core::{
    Granularity, OperatorGraph, Origin, Outcome, Plan, Profile, Samples, Subject, Timing, Unit, UnitAddress,
};
use trefoil_units::SubModel;

/// Fresh processes that each settling takes. The addresses and thread placement that a process happens to get move its
/// times by several percent, and stay for its life, so samples of one process alone would promise what the next breaks.
pub(crate) const PROCESSES: u32 = 3;

/// Those that confirm the choice, whose times are the prediction.
pub(crate) const CONFIRMING_PROCESSES: u32 = 5;

/// A unit on which the whole model is slower than on the best by more than this factor decides nothing.
const HOPELESS: f64 = 1.5;

/// What has been settled: keys of subjects, and units.
pub(crate) type Settled = BTreeSet<(String, UnitAddress)>;

/// What a plan's prediction and its choice rest on.
#[derive(Debug, Clone)]
pub struct Lineup {
    /// The plan.
    pub plan: Plan,
    /// Its segments' sub-models, in order; empty for a plan of one segment, which is the whole model on a unit.
    pub segments: Vec<SubModel>,
    /// The whole model.
    pub whole: SubModel,
    /// The units and modes to time it on: those where it is known to run in at most 1.5 × the best unit's time, and the
    /// plan's own.
    pub units: Vec<Unit>,
}

/// What a [`LineupTimer`] found in one fresh process each; `None` for what failed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LineupTimes {
    /// Milliseconds per segment of the plan, executed one after another; the first from the caller's request, the last
    /// until the caller has the result. Empty if the lineup has no segments.
    pub segments: Vec<Option<Samples>>,
    /// Milliseconds of the whole model per unit of the lineup, from the caller's request to its result.
    pub whole: Vec<Option<Samples>>,
    /// Why something failed.
    pub notes: Vec<String>,
    /// Warm-up runs and samples asked for in each process, and the cap on both in milliseconds.
    pub sampling: (u32, u32, f64),
}

/// Times a lineup, everything in a fresh process of its own; the number tells how many times that was done before, so
/// that orders can alternate.
pub type LineupTimer<'a> = dyn FnMut(&Lineup, u32) -> Result<LineupTimes, ProfileError> + 'a;

impl Lineup {
    /// For a plan of `graph`; `None` when part of it is simulated or cannot be extracted.
    ///
    /// # Errors
    /// [`ProfileError`] when a unit of the plan is not in the profile, or the model cannot be extracted.
    pub fn new(
        model: &PreparedModel,
        granularity: Granularity,
        graph: &OperatorGraph,
        plan: &Plan,
        profile: &Profile,
    ) -> Result<Option<Self>, ProfileError> {
        for segment in &plan.segments {
            if profile.unit(&segment.unit)?.simulated {
                return Ok(None);
            }
        }
        let folder = model.segments_dir(granularity);
        let mut segments = Vec::new();
        for segment in plan.segments.iter().filter(|_| plan.segments.len() > 1) {
            let set: BTreeSet<_> = segment.operators.iter().copied().collect();
            let Ok(extracted) = model.prepared.extract(graph, &set, &folder) else { return Ok(None) };
            segments.push(sub_model(&extracted));
        }
        let whole = sub_model(&model.whole()?);
        let known = whole_times(graph, profile);
        let best = known.iter().map(|(_, ms)| *ms).fold(f64::INFINITY, f64::min);
        let used = plan.units_used();
        let units = known
            .into_iter()
            .filter(|(unit, ms)| *ms <= best * HOPELESS || used.contains(&unit.address))
            .map(|(unit, _)| unit.clone())
            .collect();
        Ok(Some(Self { plan: plan.clone(), segments, whole, units }))
    }

    /// The whole model on every unit where it competes with units that have as many resources: work that shares a machine with
    /// other work may be given one core or all of them. `None` where it runs whole on no real unit.
    fn whole(model: &PreparedModel, graph: &OperatorGraph, profile: &Profile) -> Result<Option<Self>, ProfileError> {
        let known = whole_times(graph, profile);
        let best = |like: &Unit| {
            let alike = known.iter().filter(|(unit, _)| unit.resources.len() == like.resources.len());
            alike.map(|(_, ms)| *ms).fold(f64::INFINITY, f64::min)
        };
        let units: Vec<Unit> =
            known.iter().filter(|(unit, ms)| *ms <= best(unit) * HOPELESS).map(|(unit, _)| (*unit).clone()).collect();
        let Some(first) = units.first() else { return Ok(None) };
        let plan = Plan::whole(graph, first, 0.0, Vec::new(), Origin::Predicted);
        Ok(Some(Self { plan, segments: Vec::new(), whole: sub_model(&model.whole()?), units }))
    }

    /// Subjects and units in the order of the times: segments, then the whole model on each unit.
    fn places(&self, graph: &OperatorGraph) -> Vec<(Subject, UnitAddress)> {
        let segments = self.plan.segments.iter().take(self.segments.len());
        let parts = segments
            .map(|segment| (segment_subject(graph, &segment.operators.iter().copied().collect()), &segment.unit));
        let whole =
            self.units.iter().map(|unit| (Subject::WholeModel { model: graph.fingerprint.clone() }, &unit.address));
        parts.chain(whole).map(|(subject, unit)| (subject, unit.clone())).collect()
    }
}

/// Real units and modes on which the whole model was measured, and its milliseconds there.
fn whole_times<'a>(graph: &OperatorGraph, profile: &'a Profile) -> Vec<(&'a Unit, f64)> {
    let index = profile.index();
    let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
    let time = |unit: &Unit| index.newest(&subject, std::slice::from_ref(&unit.address))?.total().map(|t| t.median);
    let units = profile.units.iter().chain(&profile.modes).filter(|unit| !unit.simulated);
    units.filter_map(|unit| Some((unit, time(unit)?))).collect()
}

/// Times the whole model once more on every unit and mode where it may be placed, in three fresh processes as it will be run
/// there, and appends what was found to `profile`: what arrangements of several models rest on.
///
/// # Errors
/// As [`crate::profile`], and those of the timer.
pub fn settle_whole(
    model: &PreparedModel,
    graph: &OperatorGraph,
    profile: &mut Profile,
    options: &ProfileOptions,
    timer: &mut LineupTimer<'_>,
    progress: &mut dyn FnMut(Progress),
    stop: &AtomicBool,
) -> Result<(), ProfileError> {
    let Some(lineup) = Lineup::whole(model, graph, profile)? else { return Ok(()) };
    let mut session = Session::new(model, options, profile, progress, stop)?;
    let settled = settle_lineup(&mut session, graph, &lineup, profile, &mut Settled::new(), PROCESSES, timer);
    profile.notes.append(&mut session.notes);
    settled.map(|_| ())
}

/// Times the plan's segments, one after another as the plan runs them, and the whole model on every unit that competes,
/// `processes` times in fresh processes; appends what was found. The typical process counts. Returns whether anything was
/// appended: not if all of it has been settled before.
pub(crate) fn settle(
    session: &mut Session<'_>,
    graph: &OperatorGraph,
    plan: &Plan,
    profile: &mut Profile,
    settled: &mut Settled,
    processes: u32,
    timer: &mut LineupTimer<'_>,
) -> Result<bool, ProfileError> {
    let granularity = session.options.granularity;
    match Lineup::new(session.model, granularity, graph, plan, profile)? {
        Some(lineup) => settle_lineup(session, graph, &lineup, profile, settled, processes, timer),
        None => Ok(false),
    }
}

fn settle_lineup(
    session: &mut Session<'_>,
    graph: &OperatorGraph,
    lineup: &Lineup,
    profile: &mut Profile,
    settled: &mut Settled,
    processes: u32,
    timer: &mut LineupTimer<'_>,
) -> Result<bool, ProfileError> {
    let places = lineup.places(graph);
    if places.iter().all(|(subject, unit)| settled.contains(&(subject.key(), unit.clone()))) {
        return Ok(false);
    }
    // Whatever comes of it: should this fail, another try would fail too.
    settled.extend(places.iter().map(|(subject, unit)| (subject.key(), unit.clone())));
    let load = crate::clock::load_average();
    let mut sampling = session.options.sampling();
    let mut found: Vec<Vec<Samples>> = places.iter().map(|_| Vec::new()).collect();
    for process in 0..processes {
        session.interrupted()?;
        session.step(&format!("settling, fresh processes {} of {processes}", process + 1));
        let found_times = timer(lineup, process)?;
        let (warmup, runs, cap_ms) = found_times.sampling;
        sampling = Sampling { warmup, runs, batches: 1, cap_ms };
        for note in found_times.notes {
            // Each was measured alone before, so a failure here is no finding about any of them.
            session.note(format!("settling did not end well: {note}"));
        }
        for (samples, time) in found.iter_mut().zip(found_times.segments.into_iter().chain(found_times.whole)) {
            samples.extend(time);
        }
    }
    let mut appended = false;
    for ((subject, address), samples) in places.iter().zip(found) {
        let Some(at) = typical_of(&samples) else { continue };
        let timing = Timing { total: Some(pooled(&samples, at)), ..Timing::default() };
        let mut outcome = Outcome::Ok { timing, error_to_peak: None, nodes: Vec::new() };
        if let Outcome::Ok { nodes, error_to_peak, .. } = &mut outcome
            && let Some(Outcome::Ok { nodes: known, error_to_peak: error, .. }) =
                profile.index().newest(subject, std::slice::from_ref(address)).map(|record| &record.outcome)
        {
            // The newest record of a subject counts, so it must go on telling the node times and the error.
            nodes.clone_from(known);
            *error_to_peak = *error;
        }
        let unit = profile.unit(address)?.clone();
        let measurement = session.measurement_sampled(subject, &[&unit], outcome, load, sampling, true);
        profile.measurements.push(measurement);
        appended = true;
    }
    Ok(appended)
}

/// What [`remeasure`] found, in milliseconds; `None` for what failed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Remeasured {
    /// Per segment of the plan; empty for a plan of one segment, which is the whole model on a unit.
    pub segments: Vec<Option<f64>>,
    /// The whole model per unit.
    pub whole: BTreeMap<UnitAddress, Option<f64>>,
}

/// Times, in fresh processes, what a plan's prediction rests on, as settling does. Nothing is recorded. Taken right before
/// each round of a comparison (`round` from 0), it tells how far the cost model is off without the drift of the machine
/// since the profile was taken.
///
/// # Errors
/// As [`crate::profile`], and those of the timer.
pub fn remeasure(
    model: &PreparedModel,
    graph: &OperatorGraph,
    plan: &Plan,
    profile: &Profile,
    options: &ProfileOptions,
    round: u32,
    timer: &mut LineupTimer<'_>,
) -> Result<Remeasured, ProfileError> {
    let Some(lineup) = Lineup::new(model, options.granularity, graph, plan, profile)? else {
        return Ok(Remeasured::default());
    };
    let found_times = timer(&lineup, round)?;
    let median = |samples: Option<Samples>| samples.map(|samples| samples.median);
    let units = lineup.units.into_iter().map(|unit| unit.address);
    Ok(Remeasured {
        segments: found_times.segments.into_iter().map(median).collect(),
        whole: units.zip(found_times.whole.into_iter().map(median)).collect(),
    })
}
