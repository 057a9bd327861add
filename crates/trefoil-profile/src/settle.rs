//! Settling: what a decision rests on is measured once more, under one set of conditions and as it will be run.

use crate::prepare::PreparedModel;
use crate::protocol::{Answer, Failure, Item, ItemResult, Job};
use crate::refine::segment_subject;
use crate::sampling::{pooled, typical_of};
use crate::session::{Session, outcome_of, unexpected};
use crate::{ProfileError, ProfileOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use trefoil_core::{OperatorGraph, Outcome, Plan, Profile, Samples, Subject, Unit, UnitAddress};

/// Fresh processes that each settling takes. The addresses and thread placement that a process happens to get move its
/// times by several percent, and stay for its life, so samples of one process alone would promise what the next breaks.
const PROCESSES: usize = 3;

/// What has been settled: keys of subjects, and units.
pub(crate) type Settled = BTreeSet<(String, UnitAddress)>;

/// What to measure together.
struct Lineup {
    places: Vec<(Subject, Unit, Item)>,
    /// The first so many are the plan's segments.
    chained: usize,
}

impl Lineup {
    /// The plan's segments and the whole model on every unit and mode on which it is known to run; `None` when part of that is
    /// simulated or cannot be extracted. A plan of one segment is the whole model on a unit.
    fn new(
        session: &Session<'_>,
        graph: &OperatorGraph,
        plan: &Plan,
        profile: &Profile,
    ) -> Result<Option<Self>, ProfileError> {
        let simulated = |unit: &UnitAddress| profile.unit(unit).is_ok_and(|unit| unit.simulated);
        if plan.segments.iter().any(|segment| simulated(&segment.unit)) {
            return Ok(None);
        }
        // Results were checked when each was first measured, with a second opinion where needed; here only times count.
        let mut places = Vec::new();
        for segment in plan.segments.iter().filter(|_| plan.segments.len() > 1) {
            let set: BTreeSet<_> = segment.operators.iter().copied().collect();
            let unit = profile.unit(&segment.unit)?.clone();
            let Ok(extracted) = session.extract(graph, &set) else { return Ok(None) };
            let item = session.item(&extracted, &unit, None, true);
            places.push((segment_subject(graph, &set), unit, item));
        }
        let chained = places.len();
        let whole = session.model.whole()?;
        let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
        for unit in profile.units.iter().chain(&profile.modes).filter(|unit| !unit.simulated) {
            let key = std::slice::from_ref(&unit.address);
            if profile.index().newest(&subject, key).and_then(|record| record.total()).is_some() {
                places.push((subject.clone(), unit.clone(), session.item(&whole, unit, None, true)));
            }
        }
        Ok(Some(Self { places, chained }))
    }

    fn keys(&self) -> impl Iterator<Item = (String, UnitAddress)> {
        self.places.iter().map(|(subject, unit, _)| (subject.key(), unit.address.clone()))
    }

    /// Measures everything once, in one fresh process. What fails there is noted: each was measured alone before, so
    /// it is no finding about any of them.
    fn measure(&self, session: &mut Session<'_>) -> Result<Vec<Option<ItemResult>>, ProfileError> {
        let sampling = session.options.deciding_sampling();
        let items = self.places.iter().map(|(_, _, item)| item.clone()).collect();
        let job = Job::Measure { items, chained: self.chained, sampling };
        let limit = session.options.timeout * (self.places.len() as u32 + 4);
        session.retire("settling");
        let answer = session.call("settling", &job, limit)?;
        session.retire("settling");
        match answer {
            Ok(Answer::Measured { items }) if items.len() == self.places.len() => Ok(items
                .into_iter()
                .map(|item| item.into_result().map_err(|failure| note_failure(session, &failure)).ok())
                .collect()),
            other => {
                note_failure(session, &other.err().unwrap_or_else(unexpected));
                Ok(vec![None; self.places.len()])
            }
        }
    }
}

/// Measures the plan's segments, one after another as the plan runs them, and the whole model on every unit on which it
/// is known to run, in alternating batches of [`PROCESSES`] fresh processes; appends what was found. The typical process
/// counts. Returns whether anything was appended: not if all of it has been settled before.
pub(crate) fn settle(
    session: &mut Session<'_>,
    graph: &OperatorGraph,
    plan: &Plan,
    profile: &mut Profile,
    settled: &mut Settled,
) -> Result<bool, ProfileError> {
    let Some(lineup) = Lineup::new(session, graph, plan, profile)? else { return Ok(false) };
    if lineup.keys().all(|key| settled.contains(&key)) {
        return Ok(false);
    }
    // Whatever comes of it: should this fail, another try would fail too.
    settled.extend(lineup.keys());
    let mut found: Vec<Vec<ItemResult>> = lineup.places.iter().map(|_| Vec::new()).collect();
    for _ in 0..PROCESSES {
        for (results, result) in found.iter_mut().zip(lineup.measure(session)?) {
            results.extend(result);
        }
    }
    let mut appended = false;
    let load = crate::clock::load_average();
    let sampling = session.options.deciding_sampling();
    for ((subject, unit, _), results) in lineup.places.iter().zip(found) {
        let Some(result) = typical_process(results) else { continue };
        let mut outcome = outcome_of(Ok(result));
        if let Outcome::Ok { nodes, error_to_peak, .. } = &mut outcome
            && let Some(Outcome::Ok { nodes: known, error_to_peak: error, .. }) =
                profile.index().newest(subject, std::slice::from_ref(&unit.address)).map(|record| &record.outcome)
        {
            // The newest record of a subject counts, so it must go on telling the node times and the error.
            nodes.clone_from(known);
            *error_to_peak = *error;
        }
        let measurement = session.measurement_sampled(subject, &[unit], outcome, load, sampling);
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

/// Measures, in one fresh process, what a plan's prediction rests on: its segments one after another as it runs them, and
/// the whole model on every unit of the profile. Nothing is recorded. Taken right before each round of a comparison, it
/// tells how far the cost model is off without the drift of the machine since the profile was taken.
///
/// # Errors
/// As [`crate::profile`].
pub fn remeasure(
    model: &PreparedModel,
    graph: &OperatorGraph,
    plan: &Plan,
    profile: &Profile,
    options: &ProfileOptions,
    stop: &AtomicBool,
) -> Result<Remeasured, ProfileError> {
    let mut silent = |_| {};
    let mut session = Session::new(model, options, profile, &mut silent, stop)?;
    let Some(lineup) = Lineup::new(&session, graph, plan, profile)? else { return Ok(Remeasured::default()) };
    let mut found = lineup.measure(&mut session)?.into_iter().map(|result| Some(result?.timing.total?.median));
    let segments: Vec<Option<f64>> = found.by_ref().take(lineup.chained).collect();
    let units = lineup.places.iter().skip(lineup.chained).map(|(_, unit, _)| unit.address.clone());
    Ok(Remeasured { segments, whole: units.zip(found).collect() })
}

/// The result of the process whose median is the typical one, with the extremes of all.
fn typical_process(results: Vec<ItemResult>) -> Option<ItemResult> {
    let totals: Vec<Samples> = results.iter().filter_map(|result| result.timing.total).collect();
    let at = typical_of(&totals)?;
    let mut result = results.into_iter().filter(|result| result.timing.total.is_some()).nth(at)?;
    result.timing.total = Some(pooled(&totals, at));
    Some(result)
}

fn note_failure(session: &mut Session<'_>, failure: &Failure) {
    session.note(format!("settling did not end well ({}: {})", failure.stage, failure.reason));
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::Timing;

    fn result(values: &[f64]) -> ItemResult {
        let total = Samples::from_values(&mut values.to_vec());
        ItemResult { timing: Timing { total, ..Timing::default() }, deviation: None, repeatable: true }
    }

    #[test]
    fn the_typical_process_counts_and_extremes_are_of_all() {
        let results = vec![result(&[9.0, 9.5]), result(&[1.0, 1.5]), result(&[3.0, 4.0])];
        let total = typical_process(results).unwrap().timing.total.unwrap();
        assert_eq!((total.median, total.min, total.max, total.count), (3.5, 1.0, 9.5, 6));
        assert!(typical_process(Vec::new()).is_none());
    }
}
