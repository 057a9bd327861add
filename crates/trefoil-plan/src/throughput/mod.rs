//! `pipeline` of a model: items stream through segments on different units, for the shortest period.
//!
//! The operators, in a topological order cut at its calm positions, are the blocks of a [`StreamProblem`]; its stages become
//! segments. A local search that moves single operators between units competes. The stream's search prices a handoff by every tensor alive there; the plan that comes out is then priced like any other
//! (each tensor once per unit that reads it). The busiest resource's work for one item is what the search makes small; of the best plans found
//! the one with the shortest **period** by the simulator is taken, in which units that work at once slow each other down.

mod balance;
mod rounds;
mod steady;

pub(crate) use rounds::rounds;

use crate::assemble::{Piece, assemble, set_bound};
use crate::bounds::stream_bound;
use crate::certificate::proofs::without_slowdown;
use crate::cuts::{IntervalGraph, choose_cuts};
use crate::list_scheduling::fastest_unit;
use crate::pareto::schedule_of;
use crate::problem::Problem;
use crate::simulate::resource_keys;
use crate::stream::{StreamBlock, StreamProblem, StreamUnit, plan_stream};
use crate::view::CostView;
use crate::whole::{self, cheapest_grouping};
use crate::{PlanError, PlanOptions, interval};
use std::collections::BTreeMap;
use trefoil_core::{Objective, OperatorGraph, OperatorId, OwnClaim, Plan};

/// Most blocks of the stream: its search is quadratic in them.
const MOST_BLOCKS: usize = 220;
/// Rounds of weight updates of the load bound.
const ROUNDS: usize = 300;

/// Rounds of the price-driven search.
const PRICE_ROUNDS: usize = 40;

pub(crate) fn pipeline(view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let identity: Vec<OperatorId> = view.graph.ids().collect();
    let mut found = Found::default();
    let mut offer = |pieces: &[Piece]| found.offer(view, pieces);
    for unit in 0..view.unit_count() {
        offer(&[Piece { unit, operators: identity.clone() }]);
    }
    let mut orders = vec![identity.clone()];
    let depth_first = view.dag.depth_first();
    if depth_first != identity {
        orders.push(depth_first);
    }
    if view.graph.is_empty() {
        orders.clear();
        offer(&[]);
    }
    for order in &orders {
        let blocks = Blocks::new(view, order, options);
        if let Some(pieces) = blocks.stages() {
            offer(&pieces);
        }
        // A unit may take several stages: prices of the resources' time steer work away from the busiest (a Lagrangian
        // relaxation of the load).
        let mut weights: BTreeMap<String, f64> = BTreeMap::new();
        for round in 0..PRICE_ROUNDS {
            let price: Vec<f64> = (0..view.unit_count())
                .map(|unit| {
                    resource_keys(view.units[unit]).iter().map(|key| weights.get(key).copied().unwrap_or(1.0)).sum()
                })
                .collect();
            let Some(load) = offer(&blocks.priced(&price)) else { break };
            let most = load.values().copied().fold(0.0, f64::max);
            if most <= 0.0 {
                break;
            }
            let pace = 1.0 / (1.0 + round as f64).sqrt();
            for unit in &view.units {
                for key in resource_keys(unit) {
                    let busy = load.get(&key).copied().unwrap_or(0.0) / most;
                    *weights.entry(key).or_insert(1.0) *= (pace * (busy - 0.5)).exp();
                }
            }
        }
    }
    for pieces in balanced(view, found.plans.first()) {
        found.offer(view, &pieces);
    }
    if found.plans.is_empty()
        && found.over_memory.is_some()
        && let Some(pieces) = crate::memory::fitting(view)
    {
        found.offer(view, &pieces);
    }
    if let (true, Some(error)) = (found.plans.is_empty(), found.over_memory) {
        return Err(error);
    }
    let platform = Problem::of_least(view)?.platform;
    let mut best: Option<(steady::Period, Plan)> = None;
    // What takes least alone competes, too: overlap may slow units down by more than it saves.
    let mut alone = Found::default();
    let serial = whole::best_single(view).into_iter().chain(interval::interval(view, options));
    for plan in serial {
        alone.keep(Plan { method: "pipeline".to_owned(), notes: Vec::new(), ..plan }, &[view.graph]);
    }
    for plan in found.plans.into_iter().chain(alone.plans) {
        let period = steady::period(&[view], &platform, &plan, plan.claimed)?;
        if best.as_ref().is_none_or(|(known, _)| period.ms < known.ms * (1.0 - 1e-9)) {
            best = Some((period, plan));
        }
    }
    let Some((mut period, mut plan)) = best else { return Err(view.no_unit()) };
    if options.modes
        && let Some(mode) = whole::fastest_mode(view)
        && mode.claimed < period.ms
    {
        period = steady::Period { ms: mode.claimed, how: steady::How::OneByOne };
        let (method, objective) = ("pipeline".to_owned(), Objective::Throughput);
        plan = Plan { method, objective, ..mode };
    }
    let load = plan.claimed;
    // Whoever runs the model whole on a mode is busy for its whole time there.
    let on_a_mode = plan.units.iter().any(|unit| view.unit_index(&unit.address).is_none());
    let least = bound(view)?;
    set_bound(&mut plan, if on_a_mode { least.min(load) } else { least });
    plan.own = Some(OwnClaim {
        value: load,
        over: "the busiest resource's work for one item, slowdown between units not counted".to_owned(),
        bound: plan.model_bound,
        gap: plan.gap,
        exact: plan.exact,
    });
    plan.model_bound = None;
    plan.claimed = period.ms;
    plan.notes.push(format!(
        "claimed is the period: an item ends every {:.4} ms once the pipeline is full ({}); the busiest resource works {load:.4} ms for it; one item alone takes {:.4} ms",
        plan.claimed,
        period.how(),
        plan.simulated_ms
    ));
    Ok(plan)
}

/// Plans kept for the simulation of their period.
const MOST_PLANS: usize = 6;

/// The plans of least load, least first.
#[derive(Default)]
struct Found {
    /// `claimed` is the load of the busiest resource.
    plans: Vec<Plan>,
    over_memory: Option<PlanError>,
}

impl Found {
    /// Keeps a split if it is one of the best so far and within the units' memory; returns the load of each resource.
    fn offer(&mut self, view: &CostView<'_>, pieces: &[Piece]) -> Option<BTreeMap<String, f64>> {
        Some(self.keep(assemble(view, "pipeline", pieces).ok()?, &[view.graph]))
    }

    /// The same of a plan.
    fn keep(&mut self, mut plan: Plan, graphs: &[&OperatorGraph]) -> BTreeMap<String, f64> {
        let load = steady::loads(&plan);
        plan.objective = Objective::Throughput;
        plan.claimed = load.values().copied().fold(0.0, f64::max);
        if let Err(error) = crate::judge::check_memory(&plan, graphs) {
            self.over_memory.get_or_insert(error);
            return load;
        }
        let known = |other: &Plan| {
            (other.claimed - plan.claimed).abs() <= 1e-9 * plan.claimed && other.segments.len() <= plan.segments.len()
        };
        if !self.plans.iter().any(known) {
            let at = self.plans.partition_point(|other| other.claimed <= plan.claimed);
            self.plans.insert(at, plan);
            self.plans.truncate(MOST_PLANS);
        }
        load
    }
}

/// Splits of balanced placements, from the best plan so far and from each operator where it is fastest.
fn balanced(view: &CostView<'_>, best: Option<&Plan>) -> Vec<Vec<Piece>> {
    // Without an isolated cost somewhere there is nothing to balance with.
    let Ok(problem) = Problem::from_view(view) else { return Vec::new() };
    let mut starts = vec![fastest_unit(&problem).unit];
    starts.extend(best.map(|plan| schedule_of(&problem, plan).unit));
    let runs_there =
        |unit: &Vec<u32>| unit.iter().zip(problem.jobs()).all(|(&unit, job)| job.ms[unit as usize].is_finite());
    let splits = starts.into_iter().filter(runs_there).map(|unit| {
        let unit_of: Vec<usize> = balance::balance(&problem, unit).into_iter().map(|unit| unit as usize).collect();
        cheapest_grouping(view, &unit_of)
    });
    splits.filter_map(Result::ok).collect()
}

/// The load of all operators at the least they can add to any segment: no resource is busy for less.
fn bound(view: &CostView<'_>) -> Result<f64, PlanError> {
    let free = without_slowdown(&Problem::of_least(view)?)?;
    Ok(stream_bound(&free, ROUNDS))
}

/// An order cut into blocks, with what blocks and handoffs cost.
struct Blocks<'v, 'a> {
    view: &'v CostView<'a>,
    order: &'v [OperatorId],
    cuts: Vec<usize>,
    problem: StreamProblem,
}

impl<'v, 'a> Blocks<'v, 'a> {
    fn new(view: &'v CostView<'a>, order: &'v [OperatorId], options: &PlanOptions) -> Self {
        let units = view.unit_count();
        let cuts = choose_cuts(view, order, options.cut_limit.clamp(2, MOST_BLOCKS), &[]);
        let graph = IntervalGraph::new(view, order, cuts);
        let blocks = (0..graph.blocks).map(|block| {
            let inside = &order[graph.cuts[block]..graph.cuts[block + 1]];
            let cost = |unit: usize| {
                let runs = inside.iter().all(|&id| view.runnable(id, unit).is_some());
                runs.then(|| inside.iter().map(|id| view.estimates[unit].share[id.index()]).sum())
            };
            StreamBlock {
                cost: (0..units).map(cost).collect(),
                weights: None,
                weight_bytes: view.graph.weight_bytes(inside.iter().copied()),
            }
        });
        let blocks: Vec<StreamBlock> = blocks.collect();
        let mut handoffs = Vec::with_capacity(graph.blocks * units * units);
        for block in 0..graph.blocks {
            for from in 0..units {
                for to in 0..units {
                    let alive = graph.live[block].iter().map(|&(_, index)| &graph.crossings[index]);
                    let made = alive.filter(|crossing| crossing.producer.is_some());
                    let moved: f64 = made.map(|crossing| crossing.price(from, to, units)).sum();
                    handoffs.push(if from == to { 0.0 } else { moved + view.estimates[to].dispatch_ms });
                }
            }
        }
        let problem = StreamProblem {
            units: stream_units(view),
            blocks,
            handoffs,
            most_handoffs: None,
            revisits: false,
            deadline: None,
        };
        Self { view, order, cuts: graph.cuts, problem }
    }

    fn piece(&self, unit: usize, first: usize, end: usize) -> Piece {
        let mut operators = self.order[self.cuts[first]..self.cuts[end]].to_vec();
        operators.sort_unstable();
        Piece { unit, operators }
    }

    /// One stage on each unit at most: the stream's exact search.
    fn stages(&self) -> Option<Vec<Piece>> {
        let found = plan_stream(&self.problem).ok()?;
        Some(found.stages.iter().map(|stage| self.piece(stage.unit, stage.first, stage.end)).collect())
    }

    /// Shortest path when a millisecond on each unit has a price.
    fn priced(&self, price: &[f64]) -> Vec<Piece> {
        let units = self.view.unit_count();
        let blocks = &self.problem.blocks;
        let work = |block: usize, unit: usize| blocks[block].cost[unit].map_or(f64::INFINITY, |ms| ms * price[unit]);
        let mut cost: Vec<f64> = (0..units).map(|unit| work(0, unit)).collect();
        let mut parents = vec![0usize; blocks.len() * units];
        for block in 1..blocks.len() {
            let mut next = vec![f64::INFINITY; units];
            for (to, slot) in next.iter_mut().enumerate() {
                for (from, &before) in cost.iter().enumerate() {
                    let handoff = self.problem.handoffs[(block * units + from) * units + to] * price[to];
                    let total = before + handoff + work(block, to);
                    if total < *slot {
                        *slot = total;
                        parents[block * units + to] = from;
                    }
                }
            }
            cost = next;
        }
        let mut unit = (0..units).min_by(|&a, &b| cost[a].total_cmp(&cost[b])).unwrap_or(0);
        let mut pieces = Vec::new();
        let mut end = blocks.len();
        for block in (0..blocks.len()).rev() {
            let from = if block == 0 { usize::MAX } else { parents[block * units + unit] };
            if from != unit {
                pieces.push(self.piece(unit, block, end));
                (unit, end) = (from, block);
            }
        }
        pieces.reverse();
        pieces
    }
}

/// Units with one resource each: those that share any have the same.
fn stream_units(view: &CostView<'_>) -> Vec<StreamUnit> {
    let units = view.unit_count();
    let mut group: Vec<usize> = (0..units).collect();
    for first in 0..units {
        for second in 0..first {
            if !view.units[first].is_disjoint(view.units[second]) {
                let (from, to) = (group[first], group[second]);
                group.iter_mut().filter(|number| **number == from).for_each(|number| *number = to);
            }
        }
    }
    (0..units)
        .map(|unit| StreamUnit {
            name: view.table.units[unit].to_string(),
            resource: Some(format!("group {}", group[unit])),
            memory_bytes: view.units[unit].limits.memory_bytes,
        })
        .collect()
}
