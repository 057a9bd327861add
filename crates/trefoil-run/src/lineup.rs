//! Timing what a plan's prediction rests on, as settling and re-measuring ask for it
//! ([`trefoil_profile::LineupTimer`]): in fresh processes, by the executor that runs plans.

use crate::compare::{CompareOptions, Contender, run_process, write_jobs};
use crate::worker::{RunRequest, RunResult};
use crate::{RunError, Schedule};
use trefoil_core::{HostTensor, OperatorGraph, Origin, Plan, Samples, SegmentId, TaskId, Work};
use trefoil_profile::{Lineup, LineupTimes};

/// Times everything in the lineup once, each in a fresh process. `turn` alternates the order, so that none always comes
/// first.
///
/// The plan's segments are timed one after another even where the plan runs them at once: what they do to each other is
/// the simulator's to say, from slowdown measurements.
///
/// # Errors
/// As [`crate::compare`]. What fails, crashes or hangs has no times but a note.
pub fn time_lineup(
    lineup: &Lineup,
    graph: &OperatorGraph,
    inputs: &[&HostTensor],
    options: &CompareOptions,
    turn: u32,
) -> Result<LineupTimes, RunError> {
    let mut contenders = Vec::new();
    let mut order = Vec::new();
    let chained = !lineup.segments.is_empty();
    if chained {
        let (plan, segments) = one_after_another(&lineup.plan, graph)?;
        order = segments;
        let segments = lineup.segments.clone();
        contenders.push(Contender { name: "the plan's segments".to_owned(), plan, segments, baseline: false });
    }
    for unit in &lineup.units {
        let plan = Plan::whole(graph, unit, 0.0, Vec::new(), Origin::Predicted);
        let segments = vec![lineup.whole.clone()];
        contenders.push(Contender { name: unit.address.to_string(), plan, segments, baseline: true });
    }
    let folder = tempfile::Builder::new()
        .prefix("trefoil-lineup-")
        .tempdir()
        .map_err(|error| RunError::io(std::env::temp_dir(), &error))?;
    let jobs = write_jobs(folder.path(), &contenders, &[graph], inputs, options, chained)?;
    let mut results: Vec<Option<RunResult>> = contenders.iter().map(|_| None).collect();
    let mut notes = Vec::new();
    for place in 0..contenders.len() {
        let index = if turn.is_multiple_of(2) { place } else { contenders.len() - 1 - place };
        let name = &contenders[index].name;
        let request =
            RunRequest { job: jobs[index].clone(), result: folder.path().join(format!("{index}.result.json")) };
        match run_process(name, &request, options) {
            Ok(RunResult { failure: Some(reason), .. }) => notes.push(format!("{name}: {reason}")),
            Ok(result) => results[index] = Some(result),
            Err(error @ RunError::Worker { .. }) => notes.push(error.to_string()),
            Err(error) => return Err(error),
        }
    }
    let mut results = results.into_iter();
    let mut segments: Vec<Option<Samples>> = vec![None; lineup.segments.len()];
    if chained && let Some(result) = results.next().flatten() {
        for (segment, mut samples) in order.iter().zip(result.task_samples_ms) {
            segments[segment.0 as usize] = Samples::from_values(&mut samples);
        }
    }
    let whole = results.map(|result| Samples::from_values(&mut result?.samples_ms)).collect();
    let sampling = (options.sampling.warmup, options.sampling.runs, options.sampling.cap_ms);
    Ok(LineupTimes { segments, whole, notes, sampling })
}

/// The same segments on the same units, each starting only after the one before in the executor's order; and that order.
fn one_after_another(plan: &Plan, graph: &OperatorGraph) -> Result<(Plan, Vec<SegmentId>), RunError> {
    let schedule = Schedule::new(plan, &[graph])?;
    let order: Vec<(TaskId, SegmentId)> = schedule.tasks.iter().map(|task| (task.task, task.segment)).collect();
    let segments = order.iter().map(|(_, segment)| *segment).collect();
    if schedule.lanes.len() == 1 {
        return Ok((plan.clone(), segments));
    }
    // Tasks are renumbered in that order, so that they stay topologically ordered. Transfers are not executed: what hands
    // a tensor on is the segment before.
    let mut plan = plan.clone();
    let tasks = order.iter().enumerate().map(|(index, (task, segment))| trefoil_core::Task {
        work: Work::Segment { segment: *segment },
        after: index.checked_sub(1).map(|before| TaskId(before as u32)).into_iter().collect(),
        ..plan.tasks[task.0 as usize].clone()
    });
    plan.tasks = tasks.collect();
    plan.order.clear();
    for (index, task) in plan.tasks.iter().enumerate() {
        if let Some(resources) = plan.units.iter().find(|unit| unit.address == task.unit).map(|unit| &unit.resources) {
            for resource in resources {
                plan.order.entry(resource.to_string()).or_default().push(TaskId(index as u32));
            }
        }
    }
    Ok((plan, segments))
}
