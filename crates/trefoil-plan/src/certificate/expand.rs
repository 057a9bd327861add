//! Which schedule of a parallel plan is certified: the one of lone operators that its planner searched over, where the plan
//! still shows it, else the plan as it stands.

use super::{Claim, Costs, Rule};
use crate::PlanError;
use crate::problem::Goal;
use crate::simulate::{Simulation, SimulationModel, simulate};
use crate::view::CostView;
use std::collections::BTreeMap;
use trefoil_core::{CostRef, Objective, OperatorGraph, Plan, Segment, SegmentId, Task, TaskId, Work};

/// Relative difference under which two costs are the same.
const EQUAL: f64 = 1e-9;

pub(super) fn parallel(views: &[&CostView<'_>], plan: &Plan) -> Result<(Plan, Claim, Costs), PlanError> {
    let energy = plan.objective == Objective::Energy;
    let rule = match (energy, plan.weighted) {
        (true, _) => Rule::Energy,
        // The completion of one request that is there from the start is the makespan.
        (false, true) if !plan.requests.is_empty() => Rule::WeightedCompletion,
        (false, _) => Rule::Makespan,
    };
    let value = |plan: &Plan, simulation: &Simulation| match rule {
        Rule::Energy => simulation.energy_j,
        Rule::WeightedCompletion => {
            let timed = Plan { timeline: simulation.timeline.clone(), ..plan.clone() };
            crate::quality::plan_value(&timed, views, Goal::WeightedCompletion).ok()
        }
        _ => Some(simulation.makespan_ms),
    };
    let run = |plan: &Plan| -> Result<Simulation, PlanError> {
        let indices: Vec<_> = views.iter().map(|view| &view.index).collect();
        let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
        simulate(plan, &SimulationModel::from_profiles(&indices, &graphs, plan)?)
    };
    if let Some(mut apart) = expand(views, plan) {
        let simulation = run(&apart)?;
        let own = value(&apart, &simulation);
        if own.is_some_and(|own| (own - plan.claimed).abs() <= EQUAL * plan.claimed.abs()) {
            apart.timeline = simulation.timeline;
            let claim = Claim { rule, value: plan.claimed, simulated_ms: simulation.makespan_ms };
            return Ok((apart, claim, Costs::Operators));
        }
    }
    let simulation = run(plan)?;
    let mut plan = plan.clone();
    // Without the power that an energy needs, the makespan is all that can be certified.
    let (rule, cost) = match value(&plan, &simulation) {
        Some(cost) => (rule, cost),
        None => (Rule::Makespan, simulation.makespan_ms),
    };
    plan.timeline = simulation.timeline;
    let lone = plan.segments.iter().all(|segment| segment.operators.len() == 1);
    let costs = if lone { Costs::Operators } else { Costs::Segments };
    Ok((plan, Claim { rule, value: cost, simulated_ms: simulation.makespan_ms }, costs))
}

/// The plan with every segment run operator by operator, each at its cost as a segment of its own; `None` where one has none.
fn expand(views: &[&CostView<'_>], plan: &Plan) -> Option<Plan> {
    let mut apart = Plan { segments: Vec::new(), tasks: Vec::new(), ..plan.clone() };
    let mut lone: BTreeMap<(SegmentId, usize), SegmentId> = BTreeMap::new();
    // First and last new task of each old one.
    let mut ends: Vec<(u32, u32)> = Vec::with_capacity(plan.tasks.len());
    for task in &plan.tasks {
        let first = apart.tasks.len() as u32;
        let after: Vec<TaskId> = task.after.iter().map(|before| TaskId(ends[before.0 as usize].1)).collect();
        let Work::Segment { segment: id } = task.work else {
            apart.tasks.push(Task { after, ..task.clone() });
            ends.push((first, first));
            continue;
        };
        let segment = &plan.segments[id.0 as usize];
        let view = views.get(segment.model as usize)?;
        let unit = view.unit_index(&segment.unit)?;
        for (place, &operator) in segment.operators.iter().enumerate() {
            let cost = view.segment(&[operator], unit).ok()?;
            let cost = CostRef {
                ms: cost.ms,
                joules: view.table.watts[unit].map(|watts| watts * cost.ms / 1e3),
                origin: cost.origin,
                measurements: cost.ids,
            };
            let next = SegmentId(apart.segments.len() as u32);
            let piece = *lone.entry((id, place)).or_insert(next);
            if piece == next {
                let (inputs, outputs) = view.graph.boundary(&std::iter::once(operator).collect());
                apart.segments.push(Segment {
                    operators: vec![operator],
                    inputs,
                    outputs,
                    cost: cost.clone(),
                    ..segment.clone()
                });
            }
            let before = apart.tasks.len() as u32;
            apart.tasks.push(Task {
                work: Work::Segment { segment: piece },
                after: if place == 0 { after.clone() } else { vec![TaskId(before - 1)] },
                cost,
                ..task.clone()
            });
        }
        ends.push((first, apart.tasks.len() as u32 - 1));
    }
    for list in apart.order.values_mut() {
        *list = list
            .iter()
            .flat_map(|task| {
                let (first, last) = ends[task.0 as usize];
                (first..=last).map(TaskId)
            })
            .collect();
    }
    Some(apart)
}
