//! Stages that hand tensors on to each other (a text encoder, a vision encoder, ten steps of a denoiser): what they give when
//! they are executed plainly, one after another.

use super::ModelInputs;
use super::rounds::Outputs;
use super::split::{PartSource, part_plan};
use crate::executor::{Executor, ExecutorOptions, FindUnit};
use crate::source::SegmentSource;
use crate::{RunError, match_inputs};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{HostTensor, OperatorGraph, Plan, PlannedLink, Work};

/// A model of the plan, and an item of it.
type Stage = (u32, u32);

/// What the stages of a plan give when nothing overlaps and nothing is shared: one after another, iteration by iteration, each
/// in an executor of its own with the plan's own segments, its inputs copied in from `inputs` (by model) or from what earlier
/// stages gave. A plan's outputs should be bit-equal to these.
///
/// # Errors
/// [`RunError::Plan`] when links go round in a circle, and those of [`Executor::new`], [`match_inputs`] and
/// [`Executor::run_bound`].
pub fn sequential_outputs(
    plan: &Plan,
    graphs: &[&OperatorGraph],
    source: &dyn SegmentSource,
    find: &FindUnit<'_>,
    options: &ExecutorOptions,
    inputs: &[ModelInputs<'_>],
) -> Result<Outputs, RunError> {
    let iterations = iterations(plan);
    let mut outputs = Outputs::new();
    for stage in stage_order(&plan.links, iterations.keys().copied())? {
        let (model, item) = stage;
        let graph = graphs[model as usize];
        let mut given: Vec<HostTensor> = inputs[model as usize].iter().map(|tensor| tensor.duplicate()).collect();
        for link in plan.links.iter().filter(|link| link.to.stage() == stage && link.from.stage() != stage) {
            let made = made_by(&outputs, graphs, link)?;
            replace(&mut given, made, graph, link);
        }
        let mut ready: Option<(Plan, Executor)> = None;
        for iteration in 0..iterations[&stage] {
            if iteration > 0 {
                for link in plan.links.iter().filter(|link| link.to.stage() == stage && link.from.stage() == stage) {
                    let made = made_by(&outputs, graphs, link)?;
                    replace(&mut given, made, graph, link);
                }
            }
            let (part, kept) = part_plan(plan, model, Some((item, iteration)))?;
            // Iterations that are planned alike share an executor.
            let (_, executor) = if let Some(known) = ready.take().filter(|(known, _)| same_work(known, &part)) {
                ready.insert(known)
            } else {
                let source = PartSource { whole: plan, kept, source };
                ready.insert((part.clone(), Executor::new(part, &[graph], &source, find, options)?))
            };
            let wanted: Vec<_> = graph.inputs.iter().map(|&tensor| graph.tensor(tensor).info()).collect();
            let references: Vec<&HostTensor> = given.iter().collect();
            let chosen = match_inputs(&wanted, &references)?;
            for (port, given_at) in chosen.into_iter().enumerate() {
                executor.input_mut(port).copy_from_slice(given[given_at].bytes());
            }
            executor.run_bound()?;
            let made: Result<Vec<_>, _> = (0..graph.outputs.len())
                .map(|index| HostTensor::from_bytes(graph.tensor(graph.outputs[index]).info(), executor.output(index)))
                .collect();
            outputs.insert(stage, made?);
        }
    }
    Ok(outputs)
}

/// How often each stage is executed.
pub(crate) fn iterations(plan: &Plan) -> BTreeMap<Stage, u32> {
    let mut iterations = BTreeMap::new();
    for task in &plan.tasks {
        if let Work::Segment { segment } = task.work
            && let Some(segment) = plan.segments.get(segment.0 as usize)
        {
            let count = iterations.entry((segment.model, task.item)).or_insert(0);
            *count = (*count).max(task.iteration + 1);
        }
    }
    iterations
}

/// Stages in an order in which every one comes after those it reads from.
fn stage_order(links: &[PlannedLink], stages: impl Iterator<Item = Stage>) -> Result<Vec<Stage>, RunError> {
    let mut left: BTreeSet<Stage> = stages.collect();
    let mut order = Vec::with_capacity(left.len());
    while !left.is_empty() {
        let free = |stage: &&Stage| {
            let into = links.iter().filter(|link| link.to.stage() == **stage && link.from.stage() != **stage);
            into.into_iter().all(|link| !left.contains(&link.from.stage()))
        };
        let Some(&next) = left.iter().find(free) else {
            return Err(RunError::plan("its links go round in a circle".to_owned()));
        };
        left.remove(&next);
        order.push(next);
    }
    Ok(order)
}

/// A copy of what a link hands on.
fn made_by(outputs: &Outputs, graphs: &[&OperatorGraph], link: &PlannedLink) -> Result<HostTensor, RunError> {
    let graph = graphs[link.from.model as usize];
    let at = graph.outputs.iter().position(|&tensor| tensor == link.from.tensor);
    let made = at.and_then(|at| outputs.get(&link.from.stage())?.get(at));
    made.map(HostTensor::duplicate).ok_or_else(|| {
        let name = &graph.tensor(link.from.tensor).name;
        RunError::plan(format!("it hands on `{name}`, which is no output of `{}`", graph.model))
    })
}

fn replace(given: &mut Vec<HostTensor>, mut made: HostTensor, graph: &OperatorGraph, link: &PlannedLink) {
    let name = &graph.tensor(link.to.tensor).name;
    made.set_name(name.clone());
    given.retain(|tensor| tensor.info().name != *name);
    given.push(made);
}

fn same_work(one: &Plan, other: &Plan) -> bool {
    one.tasks == other.tasks && one.order == other.order && one.segments == other.segments
}

/// All outputs as one list, in the order in which an executor of the whole plan has them.
pub(crate) fn as_one(outputs: &Outputs) -> Outputs {
    let all = outputs.values().flatten().map(HostTensor::duplicate).collect();
    Outputs::from([((0, 0), all)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{LinkEnd, TensorId};

    fn link(from: Stage, to: Stage) -> PlannedLink {
        let end = |(model, item): Stage| LinkEnd { model, item, tensor: TensorId(0) };
        PlannedLink { from: end(from), to: end(to) }
    }

    #[test]
    fn stages_come_after_what_they_read() {
        let stages = [(0, 0), (1, 0), (2, 0)];
        let links = [link((2, 0), (0, 0)), link((1, 0), (1, 0)), link((0, 0), (1, 0))];
        assert_eq!(stage_order(&links, stages.into_iter()).unwrap(), [(2, 0), (0, 0), (1, 0)]);
        let circle = [link((0, 0), (1, 0)), link((1, 0), (0, 0))];
        assert!(stage_order(&circle, stages.into_iter()).unwrap_err().to_string().contains("circle"));
    }
}
