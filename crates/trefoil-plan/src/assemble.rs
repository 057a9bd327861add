//! From segments in execution order to a priced, simulated [`Plan`].

use crate::PlanError;
use crate::simulate::{SimulationModel, resource_keys, simulate};
use crate::view::{CostView, SegmentCost, composed};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::plan::{PLAN_FORMAT, PLAN_VERSION, PlannedModel};
use trefoil_core::{
    CostRef, Objective, OperatorId, Origin, Plan, Segment, SegmentId, Task, TaskId, TensorId, Timeline, Work,
};

/// A segment before it is priced: operators (ascending) on a unit of the view.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    pub unit: usize,
    pub operators: Vec<OperatorId>,
}

/// Where a tensor comes from when a unit needs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Source {
    /// The caller's memory.
    Host,
    Unit(usize),
}

/// One tensor made available to one unit, or handed to the host by its own unit.
#[derive(Debug, Clone)]
pub(crate) struct Handover {
    pub tensor: TensorId,
    pub from: Source,
    pub unit: usize,
    pub cost: SegmentCost,
}

/// A piece with its price.
#[derive(Debug, Clone)]
pub(crate) struct PricedPiece {
    pub inputs: Vec<TensorId>,
    pub outputs: Vec<TensorId>,
    /// Transfers of nonzero cost before the segment, by tensor.
    pub before: Vec<Handover>,
    pub segment: SegmentCost,
    /// Model outputs handed to the host after it.
    pub after: Vec<Handover>,
}

/// Pieces in execution order with everything they cost.
#[derive(Debug, Clone)]
pub(crate) struct Priced {
    pub pieces: Vec<PricedPiece>,
    /// Sum over segments and transfers, in the objective's unit.
    pub total: f64,
}

/// Prices pieces that run one after another. Every crossing tensor pays once per destination unit.
pub(crate) fn price(view: &CostView<'_>, pieces: &[Piece]) -> Result<Priced, PlanError> {
    let graph = view.graph;
    let mut producer: BTreeMap<TensorId, usize> = BTreeMap::new();
    let mut available: BTreeSet<(TensorId, usize)> = BTreeSet::new();
    let mut priced = Vec::with_capacity(pieces.len());
    let mut total = 0.0;
    for piece in pieces {
        let unit = piece.unit;
        let segment = view.segment(&piece.operators, unit).map_err(|reason| PlanError::Unrunnable {
            unit: view.table.units[unit].to_string(),
            what: describe(view, &piece.operators),
            model: graph.model.clone(),
            reason,
        })?;
        let set: BTreeSet<OperatorId> = piece.operators.iter().copied().collect();
        let (inputs, outputs) = graph.boundary(&set);
        let mut before = Vec::new();
        for &tensor in &inputs {
            if !available.insert((tensor, unit)) {
                continue;
            }
            let (from, ms, ids, origin) = match producer.get(&tensor) {
                Some(&from) if from == unit => continue,
                Some(&from) => {
                    let transfer = view.table.transfer(from, unit);
                    let bytes = graph.tensor(tensor).bytes;
                    // Between measured sizes the price is interpolated, which is a prediction.
                    let origin = match transfer.origin {
                        Origin::Measured if transfer.points.iter().all(|&(size, _)| size != bytes) => Origin::Predicted,
                        origin => origin,
                    };
                    (Source::Unit(from), transfer.ms(bytes), transfer.ids.clone(), origin)
                }
                None => {
                    let (ms, ids, origin) = view.input_ms(tensor, unit);
                    (Source::Host, ms, ids.to_vec(), composed(Origin::Predicted, origin))
                }
            };
            if ms > 0.0 {
                total += ms * view.per_ms[unit];
                before.push(Handover { tensor, from, unit, cost: SegmentCost { ms, whole: true, ids, origin } });
            }
        }
        total += segment.ms * view.per_ms[unit];
        let mut after = Vec::new();
        for &tensor in &outputs {
            producer.insert(tensor, unit);
            if view.is_output[tensor.index()] {
                let (ms, ids, origin) = view.output_ms(tensor, unit);
                if ms > 0.0 {
                    total += ms * view.per_ms[unit];
                    let cost =
                        SegmentCost { ms, whole: true, ids: ids.to_vec(), origin: composed(Origin::Predicted, origin) };
                    after.push(Handover { tensor, from: Source::Unit(unit), unit, cost });
                }
            }
        }
        priced.push(PricedPiece { inputs, outputs, before, segment, after });
    }
    Ok(Priced { pieces: priced, total })
}

/// `the whole`, one operator by name, or a count with the first name.
pub(crate) fn describe(view: &CostView<'_>, operators: &[OperatorId]) -> String {
    match operators {
        [id] => format!("operator {id} `{}` ({})", view.graph.operator(*id).name, view.graph.operator(*id).kind),
        _ if operators.len() == view.graph.len() => "the whole".to_owned(),
        [first, ..] => {
            format!("a segment of {} operators from `{}`", operators.len(), view.graph.operator(*first).name)
        }
        [] => "an empty segment".to_owned(),
    }
}

/// A plan that runs `pieces` one after another: tasks form a chain, so that the simulated makespan is the sum.
pub(crate) fn assemble(view: &CostView<'_>, method: &str, pieces: &[Piece]) -> Result<Plan, PlanError> {
    let graph = view.graph;
    let priced = price(view, pieces)?;
    let cost_ref = |cost: &SegmentCost, unit: usize| CostRef {
        ms: cost.ms,
        joules: view.table.watts[unit].map(|watts| watts * cost.ms / 1e3),
        origin: cost.origin,
        measurements: cost.ids.clone(),
    };
    let mut segments = Vec::with_capacity(pieces.len());
    let mut tasks: Vec<Task> = Vec::new();
    let mut produced_by: BTreeMap<TensorId, TaskId> = BTreeMap::new();
    let mut brought_by: BTreeMap<(TensorId, usize), TaskId> = BTreeMap::new();
    for (piece, priced) in pieces.iter().zip(&priced.pieces) {
        let mut push = |work: Work, unit: usize, cost: CostRef, needs: Vec<TaskId>| {
            let id = TaskId(tasks.len() as u32);
            // Data dependencies, and the previous task: one thing at a time.
            let mut after: BTreeSet<TaskId> = needs.into_iter().collect();
            after.extend(id.0.checked_sub(1).map(TaskId));
            tasks.push(Task {
                work,
                unit: view.table.units[unit].clone(),
                iteration: 0,
                item: 0,
                after: after.into_iter().collect(),
                cost,
            });
            id
        };
        let address = |from: Source| match from {
            Source::Host => None,
            Source::Unit(from) => Some(view.table.units[from].clone()),
        };
        let mut needs = Vec::new();
        for handover in &priced.before {
            let work = Work::Transfer { model: 0, tensor: handover.tensor, from: address(handover.from) };
            let source = produced_by.get(&handover.tensor).copied().into_iter().collect();
            let id = push(work, handover.unit, cost_ref(&handover.cost, handover.unit), source);
            brought_by.insert((handover.tensor, handover.unit), id);
        }
        for &tensor in &priced.inputs {
            let brought = brought_by.get(&(tensor, piece.unit)).or_else(|| produced_by.get(&tensor));
            needs.extend(brought.copied());
        }
        let segment = SegmentId(segments.len() as u32);
        let cost = cost_ref(&priced.segment, piece.unit);
        let done = push(Work::Segment { segment }, piece.unit, cost.clone(), needs);
        produced_by.extend(priced.outputs.iter().map(|&tensor| (tensor, done)));
        for handover in &priced.after {
            let work = Work::Transfer { model: 0, tensor: handover.tensor, from: address(handover.from) };
            push(work, handover.unit, cost_ref(&handover.cost, handover.unit), vec![done]);
        }
        segments.push(Segment {
            model: 0,
            unit: view.table.units[piece.unit].clone(),
            operators: piece.operators.clone(),
            inputs: priced.inputs.clone(),
            outputs: priced.outputs.clone(),
            cost,
        });
    }
    let used: BTreeSet<usize> = pieces.iter().map(|piece| piece.unit).collect();
    let units: Vec<_> = used.iter().map(|&unit| view.units[unit].clone()).collect();
    let mut order: BTreeMap<String, Vec<TaskId>> = BTreeMap::new();
    for (index, task) in tasks.iter().enumerate() {
        for unit in units.iter().filter(|unit| unit.address == task.unit) {
            for key in resource_keys(unit) {
                order.entry(key).or_default().push(TaskId(index as u32));
            }
        }
    }
    let bound = view.lower_bound();
    let mut plan = Plan {
        format: PLAN_FORMAT.to_owned(),
        version: PLAN_VERSION,
        method: method.to_owned(),
        objective: view.objective,
        models: vec![PlannedModel {
            name: graph.model.clone(),
            fingerprint: graph.fingerprint.clone(),
            granularity: graph.granularity,
            operators: graph.len() as u32,
        }],
        requests: Vec::new(),
        links: Vec::new(),
        units,
        all_measured: priced.pieces.iter().all(|piece| piece.segment.whole),
        segments,
        tasks,
        order,
        claimed: priced.total,
        simulated_ms: 0.0,
        model_bound: None,
        gap: None,
        exact: false,
        own: None,
        simulated_j: None,
        weighted: false,
        notes: Vec::new(),
        timeline: Timeline { origin: Origin::Predicted, lanes: Vec::new() },
    };
    set_bound(&mut plan, bound);
    let model = SimulationModel::new(&view.index, &[graph], &plan)?;
    let simulation = simulate(&plan, &model)?;
    plan.simulated_ms = simulation.makespan_ms;
    plan.timeline = simulation.timeline;
    label_tensors(&mut plan, view);
    if view.objective == Objective::Energy && view.table.idle_watts.is_none() {
        plan.notes.push(
            "energy is the sum of busy time x unit power; idle power is not declared (`--watts idle=…`)".to_owned(),
        );
    }
    Ok(plan)
}

/// Spans of transfers carry the tensor's name, which a plan alone does not know.
fn label_tensors(plan: &mut Plan, view: &CostView<'_>) {
    let tasks = &plan.tasks;
    for span in plan.timeline.lanes.iter_mut().flat_map(|lane| &mut lane.spans) {
        if let Work::Transfer { tensor, .. } = &tasks[span.task.0 as usize].work {
            span.label.clone_from(&view.graph.tensor(*tensor).name);
        }
    }
}

/// Whether a plan runs one task after another.
pub(crate) fn is_serial(plan: &Plan) -> bool {
    plan.requests.is_empty()
        && plan.models.len() == 1
        && plan.tasks.iter().zip(0u32..).all(|(task, at)| at == 0 || task.after.iter().any(|before| before.0 + 1 == at))
}

/// Relative slack under which two sums of the same costs in different order count as equal.
pub(crate) const ROUNDING: f64 = 1e-9;

/// Records a lower bound and what follows from it.
pub(crate) fn set_bound(plan: &mut Plan, bound: f64) {
    // A bound above the claim by rounding is the claim.
    let bound = bound.min(plan.claimed);
    plan.model_bound = Some(bound);
    plan.gap = if bound > 0.0 {
        Some(plan.claimed / bound - 1.0)
    } else if plan.claimed == 0.0 {
        Some(0.0)
    } else {
        None
    };
    plan.exact = plan.claimed <= bound * (1.0 + ROUNDING);
}
