//! Rows drawn from plans: segments, transfers, and what the spans of a timeline refer to.

use crate::format;
use crate::totals::lane_origin;
use serde::Serialize;
use std::collections::BTreeMap;
use trefoil_core::{
    Objective, OperatorGraph, OperatorId, Origin, Plan, SpanKind, TaskId, TensorId, Timeline, UnitAddress, Work,
};

/// Most ranges of operator ids written out before they are only counted.
const RANGE_LIMIT: usize = 6;

/// A plan in a few numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanSummary {
    /// Planner.
    pub method: String,
    /// What it minimises.
    pub objective: Objective,
    /// What the planner claims, in the objective's unit.
    pub claimed: f64,
    /// The simulator's makespan in milliseconds.
    pub simulated_ms: f64,
    /// How the plan's times were got as a whole.
    pub origin: Origin,
    /// Lower bound under the same cost model.
    pub model_bound: Option<f64>,
    /// How far what the simulator says of the plan is above `model_bound`, relatively.
    pub gap: Option<f64>,
    /// Proven optimal under its cost model.
    pub exact: bool,
    /// Every segment's cost was measured whole.
    pub all_measured: bool,
    /// Crossings between units.
    pub crossings: usize,
    /// The planner's notes.
    pub notes: Vec<String>,
}

impl PlanSummary {
    /// Summarises `plan`.
    pub fn of(plan: &Plan) -> Self {
        Self {
            method: plan.method.clone(),
            objective: plan.objective,
            claimed: plan.claimed,
            simulated_ms: plan.simulated_ms,
            // A composed time is a prediction even when each part was measured.
            origin: match plan.timeline.origin {
                Origin::Measured => Origin::Predicted,
                other => other,
            },
            model_bound: plan.model_bound,
            gap: plan.gap,
            exact: plan.exact,
            all_measured: plan.all_measured,
            crossings: plan.crossings(),
            notes: plan.notes.clone(),
        }
    }
}

/// One segment of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SegmentRow {
    /// Index in the plan.
    pub id: u32,
    /// Unit address.
    pub unit: String,
    /// Operator ids as ranges.
    pub operators: String,
    /// How many operators.
    pub count: usize,
    /// The commonest node types: `12 Conv+Relu, 3 Add`.
    pub kinds: String,
    /// Cost in the plan, in milliseconds.
    pub ms: f64,
    /// How that was got.
    pub origin: Origin,
    /// Energy in joules, where powers are known.
    pub joules: Option<f64>,
    /// Tensors it reads that another unit wrote.
    pub crossings: usize,
    /// Their bytes.
    pub crossing_bytes: u64,
    /// Time in the run's trace, in milliseconds (one execution).
    pub traced_ms: Option<f64>,
    /// How the trace was got.
    pub traced_origin: Option<Origin>,
}

/// The segments that `plan` makes of its `model`-th model.
pub fn segment_rows(plan: &Plan, model: u32, graph: &OperatorGraph, trace: Option<&Timeline>) -> Vec<SegmentRow> {
    let mine = || plan.segments.iter().enumerate().filter(|(_, segment)| segment.model == model);
    let mut producer: BTreeMap<TensorId, &UnitAddress> = BTreeMap::new();
    for (_, segment) in mine() {
        producer.extend(segment.outputs.iter().map(|&tensor| (tensor, &segment.unit)));
    }
    let traced = traced_times(trace);
    mine()
        .map(|(id, segment)| {
            let crossing: Vec<_> = segment
                .inputs
                .iter()
                .filter(|tensor| producer.get(tensor).is_some_and(|unit| **unit != segment.unit))
                .collect();
            let task = plan
                .tasks
                .iter()
                .position(|task| matches!(task.work, Work::Segment { segment } if segment.0 as usize == id));
            let traced = task.and_then(|task| traced.get(&TaskId(task as u32)).copied());
            SegmentRow {
                id: id as u32,
                unit: segment.unit.to_string(),
                operators: operator_ranges(&segment.operators),
                count: segment.operators.len(),
                kinds: kinds(graph, &segment.operators),
                ms: segment.cost.ms,
                origin: segment.cost.origin,
                joules: segment.cost.joules,
                crossings: crossing.len(),
                crossing_bytes: crossing
                    .iter()
                    .filter_map(|tensor| graph.tensors.get(tensor.index()))
                    .map(|edge| edge.bytes)
                    .sum(),
                traced_ms: traced.map(|(ms, _)| ms),
                traced_origin: traced.map(|(_, origin)| origin),
            }
        })
        .collect()
}

fn operator_ranges(operators: &[OperatorId]) -> String {
    format::ranges(&operators.iter().map(|id| id.0).collect::<Vec<_>>(), RANGE_LIMIT)
}

fn kinds(graph: &OperatorGraph, operators: &[OperatorId]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for operator in operators.iter().filter_map(|id| graph.operators.get(id.index())) {
        *counts.entry(&operator.kind).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|&(kind, count)| (std::cmp::Reverse(count), kind));
    let mut parts: Vec<_> = counts.iter().take(4).map(|(kind, count)| format!("{count} {kind}")).collect();
    if counts.len() > 4 {
        parts.push(format!("{} more kinds", counts.len() - 4));
    }
    parts.join(", ")
}

/// Busy time of each task in a trace, waits left out.
fn traced_times(trace: Option<&Timeline>) -> BTreeMap<TaskId, (f64, Origin)> {
    let mut times = BTreeMap::new();
    for (trace, lane) in trace.iter().flat_map(|trace| trace.lanes.iter().map(move |lane| (trace, lane))) {
        for span in lane.spans.iter().filter(|span| span.kind != SpanKind::Wait) {
            times.entry(span.task).or_insert((0.0, lane_origin(trace, &lane.name))).0 += span.end_ms - span.start_ms;
        }
    }
    times
}

/// One tensor handed from unit to unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TransferRow {
    /// Tensor name.
    pub tensor: String,
    /// Its size; `None` if the graph does not know the tensor.
    pub bytes: Option<u64>,
    /// Unit it comes from, or `host`.
    pub from: String,
    /// Unit it goes to.
    pub to: String,
    /// Cost in the plan, in milliseconds.
    pub ms: f64,
    /// How that was got.
    pub origin: Origin,
    /// Time in the run's trace, in milliseconds.
    pub traced_ms: Option<f64>,
    /// How the trace was got.
    pub traced_origin: Option<Origin>,
}

/// The transfer tasks of the plan's `model`-th model.
pub fn transfer_rows(plan: &Plan, model: u32, graph: &OperatorGraph, trace: Option<&Timeline>) -> Vec<TransferRow> {
    let traced = traced_times(trace);
    let tasks = plan.tasks.iter().enumerate();
    tasks
        .filter_map(|(index, task)| match &task.work {
            Work::Transfer { model: of, tensor, from } if *of == model => {
                let edge = graph.tensors.get(tensor.index());
                let traced = traced.get(&TaskId(index as u32)).copied();
                Some(TransferRow {
                    tensor: edge.map_or_else(|| format!("tensor {}", tensor.0), |edge| edge.name.clone()),
                    bytes: edge.map(|edge| edge.bytes),
                    from: from.as_ref().map_or_else(|| "host".to_owned(), ToString::to_string),
                    to: task.unit.to_string(),
                    ms: task.cost.ms,
                    origin: task.cost.origin,
                    traced_ms: traced.map(|(ms, _)| ms),
                    traced_origin: traced.map(|(_, origin)| origin),
                })
            }
            _ => None,
        })
        .collect()
}

/// What a timeline's spans refer to, for tooltips and trace arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TaskDetail {
    /// `segment 3`, ``transfer of `t12` ``, `blocks 4-9`.
    pub what: String,
    /// Unit address.
    pub unit: String,
    /// Operator ids as ranges and the node types; empty for transfers.
    pub operators: String,
    /// How the task's cost in the plan was got.
    pub origin: Origin,
    /// Tasks it waits for.
    pub after: Vec<TaskId>,
}

/// Details of every task of a plan. `graphs` are in the order of [`Plan::models`]; a missing graph costs its names.
pub fn task_details(plan: &Plan, graphs: &[&OperatorGraph]) -> Vec<TaskDetail> {
    let several = plan.models.len() > 1;
    let of_model = |model: u32| match plan.models.get(model as usize) {
        Some(planned) if several => format!(" of {}", planned.name),
        _ => String::new(),
    };
    let detail = |task: &trefoil_core::Task| {
        let (what, operators) = match &task.work {
            Work::Segment { segment } => match plan.segments.get(segment.0 as usize) {
                Some(found) => {
                    let kinds = graphs.get(found.model as usize).map(|graph| kinds(graph, &found.operators));
                    let ranges = operator_ranges(&found.operators);
                    let text = match kinds {
                        Some(kinds) if !kinds.is_empty() => format!("{ranges}: {kinds}"),
                        _ => ranges,
                    };
                    (format!("segment {}{}", segment.0, of_model(found.model)), text)
                }
                None => (format!("segment {}", segment.0), String::new()),
            },
            Work::Transfer { model, tensor, .. } => {
                let edge = graphs.get(*model as usize).and_then(|graph| graph.tensors.get(tensor.index()));
                let name = edge.map_or_else(
                    || format!("tensor {}", tensor.0),
                    |edge| format!("`{}`, {}", edge.name, format::bytes(edge.bytes)),
                );
                (format!("transfer of {name}{}", of_model(*model)), String::new())
            }
            Work::Blocks { first, count } => {
                (format!("blocks {first}-{}", (first + count).saturating_sub(1)), String::new())
            }
        };
        TaskDetail { what, unit: task.unit.to_string(), operators, origin: task.cost.origin, after: task.after.clone() }
    };
    plan.tasks.iter().map(detail).collect()
}
