//! Plans for two requests at once from profiles: BIDENT's `aligned` and `joint`, and `joint-units`.

use crate::assemble::{Piece, PricedPiece, Source, price};
use crate::sequential::PaperCosts;
use crate::simulate::{SimulationModel, resource_keys, simulate};
use crate::view::{CostView, SegmentCost};
use crate::{
    AlignedCosts, CapCosts, MOST_PAIR_UNITS, PairCap, PairCosts, PairOperators, PairRules, PairStep, PlanError,
    PlanRequest, aligned_dp, class_index, joint_dp, joint_units_dp, pair_cap,
};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::plan::{PLAN_FORMAT, PLAN_VERSION, PlannedModel};
use trefoil_core::{
    CoreError, CostRef, Objective, OperatorClass, OperatorId, Origin, Outcome, Plan, Segment, SegmentId, Subject, Task,
    TaskId, TensorId, Timeline, Work,
};

/// The planners of two requests, for [`plan_pair`].
pub const PAIR_METHODS: &[crate::MethodInfo] = &[
    crate::MethodInfo { name: "aligned", summary: "BIDENT 3.2.2 literally: two requests of one model in lockstep" },
    crate::MethodInfo { name: "joint", summary: "BIDENT 3.2.2 literally: two models, state (i, j) without units" },
    crate::MethodInfo {
        name: "joint-units",
        summary: "joint with units in the state, slowdown between units, exclusive resources",
    },
];

/// How much longer both operators take when two requests run on one unit at once, where nobody measured it: the unit takes
/// turns. Under BIDENT's averaging rule that prices sharing a unit like running one after the other.
const TIME_SLICED: f64 = 2.0;

/// Plans two requests that run at once, by the method named, one of [`PAIR_METHODS`]. Model 0 of the plan is the first
/// request's, model 1 the second's; tasks carry the request as `item`. `claimed` is the method's own sum, exact under its
/// model; `simulated_ms` is the one simulator's verdict on the same plan with exclusive resources and measured slowdowns.
///
/// Both requests must ask for the same units in the same order and for one objective; profiles may differ. Units disjoint
/// in resources may run at once.
///
/// # Errors
/// [`PlanError::UnknownMethod`], [`PlanError::Pair`] when the requests do not fit each other or the method, and whatever is
/// wrong with either request.
pub fn plan_pair(method: &str, first: &PlanRequest<'_>, second: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    if !PAIR_METHODS.iter().any(|known| known.name == method) {
        return Err(PlanError::UnknownMethod {
            want: method.to_owned(),
            have: PAIR_METHODS.iter().map(|method| method.name).collect::<Vec<_>>().join(", "),
        });
    }
    let views = pair_views(method, first, second)?;
    let papers = [PaperCosts::new(&views[0]), PaperCosts::new(&views[1])];
    let units = views[0].unit_count();
    let (claimed, steps) = match method {
        "aligned" => {
            let (one, other) = (views[0].graph, views[1].graph);
            if one.fingerprint != other.fingerprint || one.granularity != other.granularity {
                return Err(PlanError::Pair {
                    reason: format!(
                        "method `aligned` is for two requests of one model, and these are `{}` and `{}`; use joint",
                        one.model, other.model
                    ),
                });
            }
            let PaperCosts { w, h2d, d2h } = &papers[0];
            aligned_dp(AlignedCosts { solo: w, together: &shared(w), enter: h2d, leave: d2h }, units)
        }
        "joint" => {
            let concurrent = [shared(&papers[0].w), shared(&papers[1].w)];
            let costs = |who: usize| PairCosts { solo: &papers[who].w, concurrent: &concurrent[who] };
            joint_dp(costs(0), costs(1), units)
        }
        _ => {
            let tables = [own_costs(&views[0]), own_costs(&views[1])];
            let operators = |who: usize| {
                let (ms, classes) = &tables[who];
                PairOperators { ms, enter: &papers[who].h2d, leave: &papers[who].d2h, classes }
            };
            joint_units_dp(operators(0), operators(1), &pair_rules(&views[0])?, units)
        }
    };
    if claimed == f64::INFINITY {
        let view = views.iter().find(|view| !view.graph.is_empty()).unwrap_or(&views[0]);
        return Err(view.no_unit());
    }
    let mut plan = assemble_pair(&views, method, &steps)?;
    plan.claimed = claimed;
    plan.model_bound = Some(claimed);
    plan.gap = Some(0.0);
    plan.exact = true;
    let views: Vec<&CostView<'_>> = views.iter().collect();
    let goal = crate::goal_of(plan.objective);
    let problem = crate::concurrent::side_by_side(&views)?.with_goal(goal)?;
    crate::judge::judge(
        &mut plan,
        &views,
        goal,
        crate::judge::bound_of_workload(&problem, &views, crate::bounds::Effort::QUICK)?,
    )?;
    crate::judge::check_memory(&plan, &[views[0].graph, views[1].graph])?;
    plan.notes.push(match method {
        "joint-units" => "claimed is exact for steps that both requests finish together; the simulation starts operators as soon as they can".to_owned(),
        _ => format!(
            "claimed is the paper's sum (BIDENT 3.2.2, {method}), exact under that model; no co-run on one unit was measured, so it is taken as {TIME_SLICED} times the time alone; simulated_ms has exclusive units, paid transfers and slowdowns"
        ),
    });
    Ok(plan)
}

/// What the best conceivable overlap of two requests could give, from profiles; in the objective's unit. Whole-model times
/// are sums over operators, so that both sides of the ratio come from the same costs.
///
/// # Errors
/// As [`plan_pair`]; [`PlanError::Pair`] when one request runs whole on no unit.
pub fn pair_cap_of(first: &PlanRequest<'_>, second: &PlanRequest<'_>) -> Result<PairCap, PlanError> {
    let views = pair_views("joint", first, second)?;
    let units = views[0].unit_count();
    let papers = [PaperCosts::new(&views[0]), PaperCosts::new(&views[1])];
    let alone = |who: usize| -> Result<f64, PlanError> {
        let PaperCosts { w, h2d, d2h } = &papers[who];
        let best = best_single(w, h2d, d2h, units);
        if best < f64::INFINITY {
            return Ok(best);
        }
        Err(PlanError::Pair {
            reason: format!("`{}` runs whole on no unit, so there is no serial baseline", views[who].graph.model),
        })
    };
    let alone = [alone(0)?, alone(1)?];
    let concurrent = [shared(&papers[0].w), shared(&papers[1].w)];
    let costs = |who: usize| CapCosts { solo: &papers[who].w, concurrent: &concurrent[who], alone: alone[who] };
    Ok(pair_cap(costs(0), costs(1), units))
}

/// The best single unit's cost of a chain with BIDENT's transfers at its ends (3.2.1): arrays as for
/// [`sequential_dp`](crate::sequential_dp), with 0 transfers for units that are no accelerators. Infinite if none runs all.
pub fn best_single(w: &[f64], h2d: &[f64], d2h: &[f64], k: usize) -> f64 {
    if w.is_empty() {
        return 0.0;
    }
    let column = |unit: usize| w.iter().skip(unit).step_by(k).sum::<f64>() + h2d[unit] + d2h[w.len() - k + unit];
    (0..k).map(column).fold(f64::INFINITY, f64::min)
}

fn pair_views<'a>(
    method: &str,
    first: &PlanRequest<'a>,
    second: &PlanRequest<'a>,
) -> Result<[CostView<'a>; 2], PlanError> {
    if first.objective == Objective::Throughput || second.objective == Objective::Throughput {
        return Err(PlanError::Objective { method: method.to_owned(), objective: "throughput".to_owned() });
    }
    if first.objective != second.objective {
        return Err(PlanError::Pair { reason: "the two requests minimise different objectives".to_owned() });
    }
    let views = [CostView::new(first)?, CostView::new(second)?];
    let list = |view: &CostView<'_>| view.table.units.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if views[0].table.units != views[1].table.units {
        return Err(PlanError::Pair {
            reason: format!(
                "the requests have different units ({}; {}); name the same ones with `-u`",
                list(&views[0]),
                list(&views[1])
            ),
        });
    }
    if views[0].unit_count() > MOST_PAIR_UNITS {
        return Err(PlanError::Pair {
            reason: format!(
                "at most {MOST_PAIR_UNITS} units can be planned for pairs; choose with `-u` among {}",
                list(&views[0])
            ),
        });
    }
    Ok(views)
}

fn shared(solo: &[f64]) -> Vec<f64> {
    solo.iter().map(|cost| cost * TIME_SLICED).collect()
}

/// Milliseconds of every operator as a segment of its own, and classes; without the objective's price.
fn own_costs(view: &CostView<'_>) -> (Vec<f64>, Vec<OperatorClass>) {
    let units = 0..view.unit_count();
    let row = |id: OperatorId| units.clone().map(move |unit| view.segment_ms(&[id], unit).unwrap_or(f64::INFINITY));
    let ms = view.graph.ids().flat_map(row).collect();
    (ms, view.graph.operators.iter().map(|operator| operator.class).collect())
}

/// Slowdowns, disjointness and prices of the view's units.
fn pair_rules(view: &CostView<'_>) -> Result<PairRules, PlanError> {
    let k = view.unit_count();
    let mut slowdown: [[Vec<f64>; 2]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| vec![1.0; k * k]));
    for measurement in view.index.newest_of(|subject| matches!(subject, Subject::Slowdown { .. })) {
        let (Subject::Slowdown { class, interference }, [slowed, other]) =
            (&measurement.subject, measurement.units.as_slice())
        else {
            continue;
        };
        let (Some(a), Some(b)) = (view.unit_index(slowed), view.unit_index(other)) else { continue };
        let Outcome::Value { value } = &measurement.outcome else { continue };
        if value.median <= 0.0 {
            return Err(CoreError::BadNumber {
                place: format!("measurement `{}`", measurement.id),
                value: value.median.to_string(),
                what: "slowdown factor".to_owned(),
            }
            .into());
        }
        slowdown[class_index(*class)][class_index(*interference)][a * k + b] = value.median;
    }
    let energy = view.objective == Objective::Energy;
    let idle = view.table.idle_watts.unwrap_or(0.0) / 1e3;
    let overlap = |at: usize| if energy { view.per_ms[at / k] + view.per_ms[at % k] - idle } else { 1.0 };
    Ok(PairRules {
        disjoint: (0..k * k).map(|at| at / k != at % k && view.units[at / k].is_disjoint(view.units[at % k])).collect(),
        slowdown,
        solo: view.per_ms.clone(),
        overlap: (0..k * k).map(overlap).collect(),
    })
}

/// Tasks of a pair plan so far.
#[derive(Default)]
struct Tasks {
    list: Vec<Task>,
    labels: Vec<Option<TensorId>>,
}

/// One request's place in a pair plan.
#[derive(Default)]
struct Progress {
    next: usize,
    last: Option<TaskId>,
    produced_by: BTreeMap<TensorId, TaskId>,
    brought_by: BTreeMap<(TensorId, usize), TaskId>,
}

/// A plan with one segment and one task per operator, resources taking tasks in the order of the steps.
fn assemble_pair(views: &[CostView<'_>; 2], method: &str, steps: &[PairStep]) -> Result<Plan, PlanError> {
    let mut pieces: [Vec<Piece>; 2] = [Vec::new(), Vec::new()];
    for step in steps {
        for (who, unit) in [step.first, step.second].into_iter().enumerate() {
            if let Some(unit) = unit {
                let id = OperatorId(pieces[who].len() as u32);
                pieces[who].push(Piece { unit, operators: vec![id] });
            }
        }
    }
    let priced = [price(&views[0], &pieces[0])?, price(&views[1], &pieces[1])?];
    let mut segments = Vec::with_capacity(pieces[0].len() + pieces[1].len());
    let mut tasks = Tasks::default();
    let mut progress = [Progress::default(), Progress::default()];
    for step in steps {
        for (who, unit) in [step.first, step.second].into_iter().enumerate() {
            if unit.is_some() {
                let at = progress[who].next;
                let piece = (&pieces[who][at], &priced[who].pieces[at]);
                push_operator(&views[who], who as u32, piece, &mut progress[who], &mut tasks, &mut segments);
            }
        }
    }
    let used: BTreeSet<usize> = pieces.iter().flatten().map(|piece| piece.unit).collect();
    let units: Vec<_> = used.iter().map(|&unit| views[0].units[unit].clone()).collect();
    let mut order: BTreeMap<String, Vec<TaskId>> = BTreeMap::new();
    for (index, task) in tasks.list.iter().enumerate() {
        for unit in units.iter().filter(|unit| unit.address == task.unit) {
            for key in resource_keys(unit) {
                order.entry(key).or_default().push(TaskId(index as u32));
            }
        }
    }
    let models = views.iter().map(|view| PlannedModel {
        name: view.graph.model.clone(),
        fingerprint: view.graph.fingerprint.clone(),
        granularity: view.graph.granularity,
        operators: view.graph.len() as u32,
    });
    let mut plan = Plan {
        format: PLAN_FORMAT.to_owned(),
        version: PLAN_VERSION,
        method: method.to_owned(),
        objective: views[0].objective,
        models: models.collect(),
        requests: Vec::new(),
        links: Vec::new(),
        units,
        segments,
        tasks: tasks.list,
        order,
        claimed: 0.0,
        simulated_ms: 0.0,
        model_bound: None,
        gap: None,
        exact: false,
        own: None,
        simulated_j: None,
        weighted: false,
        all_measured: priced.iter().flat_map(|priced| &priced.pieces).all(|piece| piece.segment.whole),
        notes: Vec::new(),
        timeline: Timeline { origin: Origin::Predicted, lanes: Vec::new() },
    };
    let graphs = [views[0].graph, views[1].graph];
    let model = SimulationModel::from_profiles(&[&views[0].index, &views[1].index], &graphs, &plan)?;
    let simulation = simulate(&plan, &model)?;
    plan.simulated_ms = simulation.makespan_ms;
    plan.timeline = simulation.timeline;
    for span in plan.timeline.lanes.iter_mut().flat_map(|lane| &mut lane.spans) {
        let at = span.task.0 as usize;
        let graph = graphs[plan.tasks[at].item as usize];
        if let Some(tensor) = tasks.labels[at] {
            span.label.clone_from(&graph.tensor(tensor).name);
        }
    }
    Ok(plan)
}

fn push_operator(
    view: &CostView<'_>,
    who: u32,
    (piece, priced): (&Piece, &PricedPiece),
    progress: &mut Progress,
    tasks: &mut Tasks,
    segments: &mut Vec<Segment>,
) {
    let unit = piece.unit;
    let cost_ref = |cost: &SegmentCost| CostRef {
        ms: cost.ms,
        joules: view.table.watts[unit].map(|watts| watts * cost.ms / 1e3),
        origin: cost.origin,
        measurements: cost.ids.clone(),
    };
    let Progress { next, last, produced_by, brought_by } = progress;
    let mut push = |work: Work, cost: CostRef, label: Option<TensorId>, needs: Vec<TaskId>| {
        let id = TaskId(tasks.list.len() as u32);
        // A request runs one operator at a time, as in the search.
        let after: BTreeSet<TaskId> = needs.into_iter().chain(*last).collect();
        *last = Some(id);
        tasks.list.push(Task {
            work,
            unit: view.table.units[unit].clone(),
            iteration: 0,
            item: who,
            after: after.into_iter().collect(),
            cost,
        });
        tasks.labels.push(label);
        id
    };
    let address = |from: Source| match from {
        Source::Host => None,
        Source::Unit(from) => Some(view.table.units[from].clone()),
    };
    for handover in &priced.before {
        let work = Work::Transfer { model: who, tensor: handover.tensor, from: address(handover.from) };
        let source = produced_by.get(&handover.tensor).copied().into_iter().collect();
        let id = push(work, cost_ref(&handover.cost), Some(handover.tensor), source);
        brought_by.insert((handover.tensor, unit), id);
    }
    let needs = priced
        .inputs
        .iter()
        .filter_map(|&tensor| brought_by.get(&(tensor, unit)).or_else(|| produced_by.get(&tensor)).copied());
    let needs = needs.collect();
    let segment = SegmentId(segments.len() as u32);
    let done = push(Work::Segment { segment }, cost_ref(&priced.segment), None, needs);
    produced_by.extend(priced.outputs.iter().map(|&tensor| (tensor, done)));
    for handover in &priced.after {
        let work = Work::Transfer { model: who, tensor: handover.tensor, from: address(handover.from) };
        push(work, cost_ref(&handover.cost), Some(handover.tensor), vec![done]);
    }
    segments.push(Segment {
        model: who,
        unit: view.table.units[unit].clone(),
        operators: piece.operators.clone(),
        inputs: priced.inputs.clone(),
        outputs: priced.outputs.clone(),
        cost: cost_ref(&priced.segment),
    });
    *next += 1;
}
