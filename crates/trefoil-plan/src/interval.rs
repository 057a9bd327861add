//! `interval`: sequential placement by segments (DESIGN 3, "Segment costs and refinement").
//!
//! Over the cuts of a topological order, `C(b,u) = min_{a, v≠u} C(a−1,v) + T + S(a,b,u)`, where S is what the segment cost
//! in one piece where that was measured and an estimate elsewhere, and T charges every tensor that enters the segment once
//! per (tensor, destination unit), skip connections included. T depends on the path: on the unit that made each tensor and
//! on the units that already have it. So a state (cut, unit) keeps several partial plans ("labels") with their exact cost:
//!
//! * A label is dropped only if another at the same state costs no more even after paying, for every tensor still alive,
//!   whatever it could have to pay more in the future. That is sound, so the search is exact as long as no state overflows
//!   [`crate::PlanOptions::label_limit`] (chains and low-traffic cuts hold one or two).
//! * Labels are pruned against the best plan known by a bound on the way to go: the same recurrence backwards, charging
//!   only tensors whose origin is certain (made in the last block before the cut).
//!
//! Several orders are searched: the graph's own, depth first, grouped by preferred unit, and twice grouped by the best plan
//! found, with the cuts of large graphs then dense around that plan's. In the recurrence neighbours are on different units; S is the cheapest way to run
//! `a..b` on u in one piece or in several, since estimates and measurements do not promise that one piece is cheapest.
//!
//! **What is guaranteed.** The plan's cost is exact under the cost view. It is optimal over the interval graph of its order
//! unless a note says that labels were dropped. It is marked `exact` (optimal over all sequential plans under the costs as
//! they stand) when the graph is a chain with all positions cut and nothing was dropped, or when it meets the lower bound
//! `Σ_i min_u least(i,u)`; else `model_bound` is that bound.

use crate::assemble::{Piece, ROUNDING, assemble, price, set_bound};
use crate::audit::audit_note;
use crate::cuts::{IntervalGraph, choose_cuts};
use crate::memory::{fitting, pieces_fit};
use crate::view::CostView;
use crate::whole::runs;
use crate::{PlanError, PlanOptions};
use trefoil_core::{OperatorId, Plan};

/// One partial plan: blocks before `end` are placed, the last segment being `start..end` on `unit`.
#[derive(Debug, Clone, Copy)]
struct Label {
    cost: f64,
    start: usize,
    unit: usize,
    parent: Option<usize>,
}

/// Chains of fewer operators are cut everywhere.
const CHAIN_CUTS: usize = 768;
/// Cuts that are affordable per square root of the milliseconds left, and at least.
const CUTS_PER_ROOT_MS: f64 = 8.0;
const LEAST_CUTS: usize = 24;
/// Smaller graphs are searched as if there were time.
const HURRIED_OPERATORS: usize = 200;
/// Most searches around the best plan found.
const FOCUS_PASSES: usize = 2;

/// What one order gave.
struct Solution {
    pieces: Vec<Piece>,
    cost: f64,
    /// Optimal over this order's interval graph.
    complete: bool,
}

pub(crate) fn interval(view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    if view.graph.is_empty() {
        return assemble(view, "interval", &[]);
    }
    let chain = view.dag.is_chain();
    let identity: Vec<OperatorId> = view.graph.ids().collect();
    let mut orders = vec![identity];
    if !chain {
        let preferred = preferred_units(view);
        for order in [view.dag.depth_first(), view.dag.grouped(&preferred, view.unit_count(), None)] {
            if !orders.contains(&order) {
                orders.push(order);
            }
        }
    }
    // A chain is searched once and keeps one partial plan or so per state: it can afford all positions for longer, and with
    // all positions the result is exact.
    let limit = if chain { options.cut_limit.max(CHAIN_CUTS) } else { options.cut_limit.max(2) };
    // The search grows with the square of the cuts: with little time there are fewer.
    let limit = match options.left_ms() {
        Some(left) if view.graph.len() > HURRIED_OPERATORS => {
            limit.min(LEAST_CUTS.max((CUTS_PER_ROOT_MS * left.max(0.0).sqrt()) as usize))
        }
        _ => limit,
    };
    let labels = options.label_limit.max(1);
    let mut best: Option<Solution> = None;
    let mut improve = |order: &[OperatorId], focus: &[usize]| {
        let graph = IntervalGraph::new(view, order, choose_cuts(view, order, limit, focus));
        let upper = best.as_ref().map_or(f64::INFINITY, |solution| solution.cost);
        if let Some(solution) = search(&graph, order, labels, upper)
            && solution.cost < upper * (1.0 - ROUNDING)
        {
            best = Some(solution);
        }
        best.as_ref().map(|solution| solution.pieces.clone())
    };
    let mut incumbent = None;
    for order in &orders {
        if incumbent.is_some() && options.is_over() {
            break;
        }
        incumbent = improve(order, &[]);
    }
    let all_cut = view.graph.len() < limit;
    // The best split may allow longer runs in another order, and better cuts near its own: group by it and look there.
    for _ in 0..FOCUS_PASSES {
        let Some(pieces) = incumbent.take().filter(|_| !options.is_over()) else { break };
        let order = if chain {
            orders[0].clone()
        } else {
            let unit_of = assignment(view, &pieces);
            view.dag.grouped(&unit_of, view.unit_count(), pieces.first().map(|piece| piece.unit))
        };
        if all_cut && orders.contains(&order) {
            break;
        }
        let unit_of = assignment(view, &pieces);
        let focus: Vec<usize> =
            (1..order.len()).filter(|&at| unit_of[order[at].index()] != unit_of[order[at - 1].index()]).collect();
        let next = improve(&order, &focus);
        orders.push(order);
        if next.as_ref() == Some(&pieces) {
            break;
        }
        incumbent = next;
    }
    // Where there are more operators than cuts, the shortest path that takes estimates as they add up looks at every cut.
    if chain
        && !all_cut
        && let Some(pieces) = crate::chain_bound::chain_pieces(view)
        && let Ok(priced) = price(view, &pieces)
        && best.as_ref().is_none_or(|best| priced.total < best.cost * (1.0 - ROUNDING))
    {
        best = Some(Solution { pieces, cost: priced.total, complete: false });
    }
    let solution = match best {
        Some(solution) => solution,
        None => operator_by_operator(view)?,
    };
    if !pieces_fit(view, &solution.pieces) {
        return within_memory(view, &solution.pieces);
    }
    let mut plan = assemble(view, "interval", &solution.pieces)?;
    debug_assert!((plan.claimed - solution.cost).abs() <= 1e-6 * solution.cost.abs().max(1e-9));
    if chain && all_cut && solution.complete {
        let claimed = plan.claimed;
        set_bound(&mut plan, claimed);
    }
    if !solution.complete {
        plan.notes.push("the search dropped partial plans: not proven best over its interval graph".to_owned());
    }
    let estimated = crate::unmeasured_segments(&plan).len();
    if estimated > 0 {
        plan.notes.push(format!(
            "{estimated} of {} segments are estimates; measure them and plan again (`trefoil run` does)",
            plan.segments.len()
        ));
    }
    plan.notes.extend(audit_note(view));
    Ok(plan)
}

/// A split within the memory limits of units, where the cheapest one is not.
fn within_memory(view: &CostView<'_>, cheapest: &[Piece]) -> Result<Plan, PlanError> {
    let Some(pieces) = fitting(view) else {
        let plan = assemble(view, "interval", cheapest)?;
        crate::judge::check_memory(&plan, &[view.graph])?;
        return Ok(plan);
    };
    let mut plan = assemble(view, "interval", &pieces)?;
    plan.notes.push(
        "the cheapest split exceeds the memory of a unit; this one keeps to the limits, not proven best".to_owned(),
    );
    plan.notes.extend(audit_note(view));
    Ok(plan)
}

/// Per operator the unit with the smallest share of its segment's time.
fn preferred_units(view: &CostView<'_>) -> Vec<usize> {
    let share = |id: OperatorId, unit: usize| match view.runnable(id, unit) {
        Some(_) => view.estimates[unit].share[id.index()] * view.per_ms[unit],
        None => f64::INFINITY,
    };
    view.graph
        .ids()
        .map(|id| (0..view.unit_count()).min_by(|&a, &b| share(id, a).total_cmp(&share(id, b))).unwrap_or(0))
        .collect()
}

fn assignment(view: &CostView<'_>, pieces: &[Piece]) -> Vec<usize> {
    let mut unit_of = vec![0; view.graph.len()];
    for piece in pieces {
        piece.operators.iter().for_each(|id| unit_of[id.index()] = piece.unit);
    }
    unit_of
}

/// The last resort when the chosen cuts allow no plan (many failures in one piece): each operator where it alone is
/// cheapest, merged as far as that is known to run.
fn operator_by_operator(view: &CostView<'_>) -> Result<Solution, PlanError> {
    let unit_of = preferred_units(view);
    if view.graph.ids().any(|id| view.runnable(id, unit_of[id.index()]).is_none()) {
        return Err(view.no_unit());
    }
    let order = view.dag.grouped(&unit_of, view.unit_count(), None);
    let pieces = runs(view, &order, &unit_of);
    let cost = price(view, &pieces)?.total;
    Ok(Solution { pieces, cost, complete: false })
}

/// For each cut and unit (of the segment that ends there) a lower bound on the rest, row-major (blocks + 1) × units. It
/// charges a tensor only where its origin is certain: made in the block before the cut, so on the ending segment's unit, or
/// a model input that nobody read before.
fn bound_to_go(graph: &IntervalGraph) -> Vec<f64> {
    let (units, blocks) = (graph.units, graph.blocks);
    let mut bound = vec![f64::INFINITY; (blocks + 1) * units];
    bound[blocks * units..].fill(0.0);
    for cut in (1..blocks).rev() {
        let certain: Vec<(usize, usize)> = graph.live[cut]
            .iter()
            .copied()
            .filter(|&(next, index)| {
                let crossing = &graph.crossings[index];
                crossing.producer.map_or(crossing.consumers.first() == Some(&next), |block| block + 1 == cut)
            })
            .collect();
        for unit in 0..units {
            let mut least = f64::INFINITY;
            for next in (0..units).filter(|&next| next != unit) {
                let mut entering = certain.iter().peekable();
                let mut transfers = 0.0;
                for end in cut + 1..=blocks {
                    while let Some(&(_, index)) = entering.next_if(|&&(block, _)| block < end) {
                        let crossing = &graph.crossings[index];
                        let from = if crossing.producer.is_some() { unit } else { units };
                        transfers += crossing.price(from, next, units);
                    }
                    let rest = bound[end * units + next];
                    least = least.min(graph.cost(next, cut, end) + transfers + rest);
                }
            }
            bound[cut * units + unit] = least;
        }
    }
    bound
}

/// Partial plans by cut and unit.
struct Search<'g> {
    graph: &'g IntervalGraph,
    labels: Vec<Label>,
    /// Scratch: unit of every block of the path looked at.
    unit_of_block: Vec<usize>,
}

impl Search<'_> {
    /// Fills `unit_of_block` from the path that ends with a segment `start..end` on `unit`.
    fn walk(&mut self, unit: usize, start: usize, end: usize, parent: Option<usize>) {
        self.unit_of_block[start..end].fill(unit);
        let (mut at, mut end) = (parent, start);
        while let Some(index) = at {
            let label = self.labels[index];
            self.unit_of_block[label.start..end].fill(label.unit);
            end = label.start;
            at = label.parent;
        }
    }

    /// Price of making a tensor available to `to` after the walked path up to `cut`.
    fn charge(&self, crossing: usize, to: usize, cut: usize) -> f64 {
        let crossing = &self.graph.crossings[crossing];
        let from = match crossing.producer {
            Some(block) if self.unit_of_block[block] == to => return 0.0,
            Some(block) => self.unit_of_block[block],
            None => self.graph.units,
        };
        let price = crossing.price(from, to, self.graph.units);
        let there = || {
            crossing.consumers.iter().take_while(|&&block| block < cut).any(|&block| self.unit_of_block[block] == to)
        };
        if price == 0.0 || there() { 0.0 } else { price }
    }
}

/// Tries of one state that may be compared before the search gives up on completeness.
const TRIES_PER_LABEL: usize = 64;

/// Shortest path over the interval graph; `None` when nothing costs less than `upper`.
fn search(graph: &IntervalGraph, order: &[OperatorId], label_limit: usize, upper: f64) -> Option<Solution> {
    let (units, blocks) = (graph.units, graph.blocks);
    let to_go = bound_to_go(graph);
    let mut search = Search { graph, labels: Vec::new(), unit_of_block: vec![0; blocks] };
    // (cost, start, parent) of every way to end at (cut, unit).
    let mut candidates: Vec<Vec<(f64, usize, Option<usize>)>> = vec![Vec::new(); (blocks + 1) * units];
    let mut upper = upper;
    let mut complete = true;
    // Before cut b, the first block that the liveness at b depends on: labels that start no later agree on everything.
    let settled: Vec<usize> = (0..=blocks)
        .map(|cut| {
            let first = |&(_, index): &(usize, usize)| {
                let crossing = &graph.crossings[index];
                crossing.producer.or(crossing.consumers.first().copied()).unwrap_or(0)
            };
            graph.live[cut].iter().map(first).min().unwrap_or(blocks)
        })
        .collect();
    let mut finished: Option<usize> = None;
    for cut in 0..=blocks {
        // The partial plans that end here.
        let mut here: Vec<Option<usize>> = if cut == 0 { vec![None] } else { Vec::new() };
        for unit in 0..units {
            if cut == 0 {
                break;
            }
            let mut list = std::mem::take(&mut candidates[cut * units + unit]);
            list.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
            let mut kept: Vec<(f64, Vec<f64>)> = Vec::new();
            let mut has_settled = false;
            let mut tries = 0;
            for (cost, start, parent) in list {
                if cost + to_go[cut * units + unit] > upper * (1.0 + ROUNDING) {
                    break;
                }
                let is_settled = start <= settled[cut];
                if is_settled && has_settled {
                    continue;
                }
                if kept.len() == label_limit || tries == label_limit * TRIES_PER_LABEL {
                    complete = false;
                    break;
                }
                tries += 1;
                search.walk(unit, start, cut, parent);
                let future: Vec<f64> = graph.live[cut]
                    .iter()
                    .flat_map(|&(_, index)| (0..units).map(move |to| (index, to)))
                    .map(|(index, to)| search.charge(index, to, cut))
                    .collect();
                let dominated = kept.iter().any(|(other_cost, other)| {
                    let extra: f64 = other.iter().zip(&future).map(|(a, b)| (a - b).max(0.0)).sum();
                    other_cost + extra <= cost
                });
                has_settled |= is_settled;
                if !dominated {
                    search.labels.push(Label { cost, start, unit, parent });
                    here.push(Some(search.labels.len() - 1));
                    kept.push((cost, future));
                }
            }
        }
        if cut == blocks {
            finished =
                here.into_iter().flatten().min_by(|&a, &b| search.labels[a].cost.total_cmp(&search.labels[b].cost));
            break;
        }
        for parent in here {
            let (cost, last) =
                parent.map_or((0.0, None), |index| (search.labels[index].cost, Some(search.labels[index])));
            if let Some(label) = last {
                search.walk(label.unit, label.start, cut, label.parent);
            }
            for unit in 0..units {
                let mut transfers = 0.0;
                let mut entering = graph.live[cut].iter().peekable();
                for end in cut + 1..=blocks {
                    while let Some(&(_, index)) = entering.next_if(|&&(block, _)| block < end) {
                        transfers += search.charge(index, unit, cut);
                    }
                    // Neighbours on one unit are pieces of one interval, whose cost covers them.
                    let same = last.is_some_and(|label| label.unit == unit);
                    let total = cost + transfers + graph.cost(unit, cut, end);
                    let at = end * units + unit;
                    if same || total.is_infinite() || total + to_go[at] > upper * (1.0 + ROUNDING) {
                        continue;
                    }
                    if end == blocks {
                        upper = upper.min(total);
                    }
                    candidates[at].push((total, cut, parent));
                }
            }
        }
    }
    let last = finished?;
    let mut pieces = Vec::new();
    let (mut at, mut end) = (Some(last), blocks);
    while let Some(index) = at {
        let label = search.labels[index];
        for (from, to) in graph.pieces(label.unit, label.start, end).into_iter().rev() {
            let mut operators = order[graph.cuts[from]..graph.cuts[to]].to_vec();
            operators.sort_unstable();
            pieces.push(Piece { unit: label.unit, operators });
        }
        end = label.start;
        at = label.parent;
    }
    pieces.reverse();
    Some(Solution { pieces, cost: search.labels[last].cost, complete })
}
