//! Serial splits that keep to the memory limits of units.
//!
//! Weights count once per unit that executes their operator. A price per byte on each unit, raised where too much is held and
//! lowered where there is room (a Lagrangian relaxation), turns the limits into costs of a shortest path over (operator, unit);
//! every split met on the way that fits is a candidate. What still does not fit is repaired operator by operator.

use crate::assemble::Piece;
use crate::view::CostView;
use crate::whole::cheapest_grouping;
use trefoil_core::OperatorId;

/// Rounds of price updates.
const ROUNDS: usize = 40;
/// Candidates that are grouped and priced at most.
const MOST_CANDIDATES: usize = 12;

/// Bytes of weights on each unit of an assignment.
fn held(view: &CostView<'_>, unit_of: &[usize]) -> Vec<u64> {
    let mut held = vec![0u64; view.unit_count()];
    for (operator, &unit) in view.graph.operators.iter().zip(unit_of) {
        held[unit] = held[unit].saturating_add(operator.weight_bytes);
    }
    held
}

/// Whether an assignment keeps to the limits.
fn fits(view: &CostView<'_>, unit_of: &[usize]) -> bool {
    let held = held(view, unit_of);
    view.units.iter().zip(held).all(|(unit, held)| unit.limits.memory_bytes.is_none_or(|most| held <= most))
}

/// Whether pieces keep to the limits.
pub(crate) fn pieces_fit(view: &CostView<'_>, pieces: &[Piece]) -> bool {
    let mut unit_of = vec![0; view.graph.len()];
    for piece in pieces {
        piece.operators.iter().for_each(|id| unit_of[id.index()] = piece.unit);
    }
    fits(view, &unit_of)
}

/// The cheapest split found that keeps to the limits; `None` when none was found.
pub(crate) fn fitting(view: &CostView<'_>) -> Option<Vec<Piece>> {
    let units = view.unit_count();
    let size: f64 = view.graph.operators.iter().map(|operator| operator.weight_bytes as f64).sum::<f64>().max(1.0);
    let scale = (0..view.graph.len() as u32).map(|at| view.least(OperatorId(at))).sum::<f64>().max(1e-9);
    let mut price = vec![0.0f64; units];
    let mut candidates: Vec<Vec<usize>> = Vec::new();
    for round in 0..ROUNDS {
        let Some(unit_of) = cheapest_path(view, &price) else { break };
        let held = held(view, &unit_of);
        let mut moved = false;
        let pace = 4.0 / (1.0 + round as f64).sqrt();
        for (unit, slot) in price.iter_mut().enumerate() {
            let Some(most) = view.units[unit].limits.memory_bytes else { continue };
            // Relative to what is too much; a limit of 0 tolerates nothing.
            let over = (held[unit] as f64 - most as f64) / size;
            let next = (*slot + pace * over * scale / size).max(0.0);
            moved |= next.total_cmp(slot).is_ne();
            *slot = next;
        }
        let repaired = if fits(view, &unit_of) { Some(unit_of) } else { repair(view, unit_of) };
        if let Some(unit_of) = repaired.filter(|unit_of| !candidates.contains(unit_of)) {
            candidates.push(unit_of);
        }
        if !moved {
            break;
        }
    }
    // The last ones are those of the best prices.
    let first = candidates.len().saturating_sub(MOST_CANDIDATES);
    let grouped = candidates[first..].iter().filter_map(|unit_of| cheapest_grouping(view, unit_of).ok());
    let priced = grouped.filter_map(|pieces| Some((crate::assemble::price(view, &pieces).ok()?.total, pieces)));
    priced.min_by(|a, b| a.0.total_cmp(&b.0)).map(|best| best.1)
}

/// Shortest path over (operator in order, unit) where neighbours on different units pay what the later one reads of the earlier
/// one, and every byte of weights has a price.
fn cheapest_path(view: &CostView<'_>, price: &[f64]) -> Option<Vec<usize>> {
    let (graph, units) = (view.graph, view.unit_count());
    let mut cost = vec![0.0f64; units];
    let mut from_of: Vec<usize> = Vec::with_capacity(graph.len() * units);
    for (at, operator) in graph.operators.iter().enumerate() {
        let id = OperatorId(at as u32);
        let mut next = vec![f64::INFINITY; units];
        for (to, slot) in next.iter_mut().enumerate() {
            let bytes = operator.weight_bytes as f64;
            let work = view
                .check_segment(&[id], to)
                .is_ok()
                .then(|| (view.estimates[to].share[at] * view.per_ms[to]) + bytes * price[to]);
            let (mut best, mut best_from) = (f64::INFINITY, to);
            if let Some(work) = work {
                for (from, &before) in cost.iter().enumerate() {
                    let made = |tensor: &&trefoil_core::TensorId| {
                        at > 0 && graph.tensor(**tensor).producer == Some(OperatorId(at as u32 - 1))
                    };
                    let moved: f64 = operator
                        .inputs
                        .iter()
                        .filter(made)
                        .map(|&tensor| view.table.transfer(from, to).ms(graph.tensor(tensor).bytes) * view.per_ms[to])
                        .sum();
                    let total = before + moved + work;
                    if total < best || total <= best && from == to {
                        (best, best_from) = (total, from);
                    }
                }
            }
            *slot = best;
            from_of.push(best_from);
        }
        cost = next;
    }
    let mut unit = (0..units).min_by(|&a, &b| cost[a].total_cmp(&cost[b]))?;
    if cost[unit].is_infinite() {
        return None;
    }
    let mut unit_of = vec![0; graph.len()];
    for at in (0..graph.len()).rev() {
        unit_of[at] = unit;
        unit = from_of[at * units + unit];
    }
    Some(unit_of)
}

/// Moves operators off units that hold too much to where there is room, those first that lose least time per byte.
fn repair(view: &CostView<'_>, mut unit_of: Vec<usize>) -> Option<Vec<usize>> {
    let room = |unit: usize, held: &[u64]| {
        view.units[unit].limits.memory_bytes.map_or(u64::MAX, |most| most.saturating_sub(held[unit]))
    };
    let mut held = held(view, &unit_of);
    let cost = |at: usize, unit: usize| view.estimates[unit].share[at] * view.per_ms[unit];
    for unit in 0..view.unit_count() {
        let Some(most) = view.units[unit].limits.memory_bytes else { continue };
        let heavy = |at: &usize| unit_of[*at] == unit && view.graph.operators[*at].weight_bytes > 0;
        let mut moves: Vec<(f64, usize, usize)> = (0..unit_of.len())
            .filter(heavy)
            .flat_map(|at| {
                let bytes = view.graph.operators[at].weight_bytes as f64;
                let able = (0..view.unit_count()).filter(move |&to| to != unit);
                let able = able.filter(move |&to| view.check_segment(&[OperatorId(at as u32)], to).is_ok());
                able.map(move |to| ((cost(at, to) - cost(at, unit)) / bytes, at, to)).collect::<Vec<_>>()
            })
            .collect();
        moves.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (_, at, to) in moves {
            if held[unit] <= most {
                break;
            }
            let bytes = view.graph.operators[at].weight_bytes;
            if unit_of[at] == unit && room(to, &held) >= bytes {
                unit_of[at] = to;
                held[unit] -= bytes;
                held[to] += bytes;
            }
        }
    }
    fits(view, &unit_of).then_some(unit_of)
}
