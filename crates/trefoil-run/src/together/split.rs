//! One model's part of a plan for several.

use crate::RunError;
use crate::source::SegmentSource;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{Plan, SegmentId, Task, TaskId, Work};
use trefoil_units::SubModel;

/// What a plan does with one of its models, as a plan for that model alone, and which segments of the whole plan its
/// segments are. Waiting for other models is left out: alone there is nothing to wait for. It predicts nothing.
///
/// # Errors
/// [`RunError::Plan`] when the plan has no such model or runs blocks of a video model.
pub(crate) fn model_plan(plan: &Plan, model: u32) -> Result<(Plan, Vec<SegmentId>), RunError> {
    part_plan(plan, model, None)
}

/// As [`model_plan`], or only what it does in one iteration of an item, as if that were the only one.
///
/// # Errors
/// As [`model_plan`].
pub(crate) fn part_plan(plan: &Plan, model: u32, only: Option<(u32, u32)>) -> Result<(Plan, Vec<SegmentId>), RunError> {
    let planned = plan
        .models
        .get(model as usize)
        .ok_or_else(|| RunError::plan(format!("it has {} models, not a model {model}", plan.models.len())))?;
    let mut segment_of = BTreeMap::new();
    let (mut segments, mut kept) = (Vec::new(), Vec::new());
    let wanted = |task: &Task| only.is_none_or(|only| only == (task.item, task.iteration));
    let executed: BTreeSet<SegmentId> = plan
        .tasks
        .iter()
        .filter(|task| wanted(task))
        .filter_map(|task| match task.work {
            Work::Segment { segment } => Some(segment),
            _ => None,
        })
        .collect();
    for (index, segment) in plan.segments.iter().enumerate().filter(|(_, segment)| segment.model == model) {
        if only.is_some() && !executed.contains(&SegmentId(index as u32)) {
            continue;
        }
        segment_of.insert(index as u32, segments.len() as u32);
        kept.push(SegmentId(index as u32));
        segments.push(trefoil_core::Segment { model: 0, ..segment.clone() });
    }
    let mut task_of: BTreeMap<TaskId, TaskId> = BTreeMap::new();
    let mut tasks: Vec<Task> = Vec::new();
    for (index, task) in plan.tasks.iter().enumerate().filter(|(_, task)| wanted(task)) {
        let work = match &task.work {
            Work::Segment { segment } => match segment_of.get(&segment.0) {
                Some(&segment) => Work::Segment { segment: SegmentId(segment) },
                None => continue,
            },
            Work::Transfer { model: of, tensor, from } if *of == model => {
                Work::Transfer { model: 0, tensor: *tensor, from: from.clone() }
            }
            Work::Transfer { .. } => continue,
            Work::Blocks { .. } => {
                return Err(RunError::plan(format!("task {index} runs blocks of a video model")));
            }
        };
        task_of.insert(TaskId(index as u32), TaskId(tasks.len() as u32));
        let after = task.after.iter().filter_map(|before| task_of.get(before).copied()).collect();
        let iteration = if only.is_some() { 0 } else { task.iteration };
        tasks.push(Task { work, after, iteration, ..task.clone() });
    }
    let order = plan
        .order
        .iter()
        .map(|(resource, order)| (resource.clone(), order.iter().filter_map(|id| task_of.get(id).copied()).collect()))
        .filter(|(_, order): &(_, Vec<TaskId>)| !order.is_empty())
        .collect();
    let used = |unit: &&trefoil_core::Unit| tasks.iter().any(|task| task.unit == unit.address);
    let part = Plan {
        models: vec![planned.clone()],
        requests: Vec::new(),
        links: Vec::new(),
        units: plan.units.iter().filter(used).cloned().collect(),
        segments,
        order,
        claimed: 0.0,
        simulated_ms: 0.0,
        model_bound: None,
        gap: None,
        exact: false,
        own: None,
        simulated_j: None,
        weighted: false,
        notes: Vec::new(),
        timeline: trefoil_core::Timeline { origin: plan.timeline.origin, lanes: Vec::new() },
        tasks,
        ..plan.clone()
    };
    Ok((part, kept))
}

/// Sub-models of a part's segments, which are those of the whole plan under other numbers.
pub(crate) struct PartSource<'a> {
    pub whole: &'a Plan,
    pub kept: Vec<SegmentId>,
    pub source: &'a dyn SegmentSource,
}

impl SegmentSource for PartSource<'_> {
    fn segment(&self, plan: &Plan, segment: SegmentId) -> Result<SubModel, RunError> {
        let whole = self.kept.get(segment.0 as usize).ok_or_else(|| RunError::Extract {
            what: format!("segment {} of {}", segment.0, plan.segments.len()),
            reason: format!("only {} belong to the model", self.kept.len()),
        })?;
        self.source.segment(self.whole, *whole)
    }
}
