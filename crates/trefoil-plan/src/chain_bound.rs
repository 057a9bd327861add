//! A lower bound on every plan of a pure chain, and a plan that often meets it, in time linear in its operators.
//!
//! In a **pure** chain each operator reads only what the one before made, so operators never overlap, and every plan is a sequence of
//! segments that are intervals. The estimate of a segment is additive, so it need not be looked at as a whole: a shortest path
//! over (operator, unit, whether a segment is open) sees every interval, and the few that were measured whole are edges of their
//! own. Memory limits count by prices of bytes ([`crate::bounds::memory`]). What is left out only lowers the value: failures in
//! one piece, node limits, and that an estimate does not stand where the same interval was measured.

use crate::assemble::Piece;
use crate::bounds::LeastTimes;
use crate::bounds::memory::Limits;
use crate::problem::Problem;
use crate::view::CostView;
use trefoil_core::cost::measurement_cost;
use trefoil_core::{OperatorId, TensorId};

/// Steps in which the price of a limited unit's bytes is narrowed.
const PRICE_STEPS: usize = 14;

/// Least cost of each way to stand after an operator.
#[derive(Debug, Clone)]
struct Ways {
    /// The last segment is complete.
    done: Vec<f64>,
    /// A segment of one operator so far, priced by the estimate, goes on.
    begun: Vec<f64>,
    /// The same with two operators or more: it may end here.
    open: Vec<f64>,
}

/// How an operator was reached on a unit.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    /// First operator of the complete segment that ends here, if that is a single one or was measured; else an open one ends.
    first: Option<u32>,
    /// Whether the open segment began with the operator before.
    second: bool,
    /// Unit of the segment before one that starts here.
    from: u32,
}

/// A shortest path.
struct Path {
    cost: f64,
    /// Segments by (first operator, one past the last, unit).
    segments: Vec<(usize, usize, usize)>,
}

/// The bound in the objective's unit; `None` where the graph is no pure chain, or where units may speed each other up (then what
/// is moved early could make the rest faster).
pub(crate) fn chain_bound(view: &CostView<'_>, least: &Problem) -> Option<f64> {
    if LeastTimes::new(least).speeds_up() {
        return None;
    }
    let plain = shortest(view, &[])?.cost;
    let Some(limits) = Limits::of(least) else { return Some(plain) };
    let priced = |prices: &[f64]| {
        shortest(view, &limits.charges(prices)).map_or(0.0, |path| path.cost - limits.allowance(prices))
    };
    Some(limits.search(plain, PRICE_STEPS, priced).0)
}

/// The segments of the shortest path, where the graph is a pure chain; for chains too long to look at every interval.
pub(crate) fn chain_pieces(view: &CostView<'_>) -> Option<Vec<Piece>> {
    let piece = |&(first, end, unit): &(usize, usize, usize)| Piece {
        unit,
        operators: (first as u32..end as u32).map(OperatorId).collect(),
    };
    shortest(view, &[]).map(|path| path.segments.iter().map(piece).collect())
}

/// `charges` are what operators cost on units beyond their time, row-major operators × units; empty for nothing.
fn shortest(view: &CostView<'_>, charges: &[f64]) -> Option<Path> {
    let (graph, units) = (view.graph, view.unit_count());
    let count = graph.len();
    if count == 0 || !is_pure_chain(view) {
        return None;
    }
    let charge = |at: usize, unit: usize| charges.get(at * units + unit).copied().unwrap_or(0.0);
    // Measured intervals by their end.
    let mut measured: Vec<Vec<(usize, usize, f64)>> = vec![Vec::new(); count];
    for (unit, sets) in view.measured.iter().enumerate() {
        for (operators, record) in sets {
            let (Some(first), Some(last)) = (operators.first(), operators.last()) else { continue };
            let allowed = operators.iter().all(|&id| view.possible(id, unit));
            if let Some(cost) = measurement_cost(record)
                && allowed
                && last.index() + 1 - first.index() == operators.len()
            {
                let held: f64 = operators.iter().map(|id| charge(id.index(), unit)).sum();
                measured[last.index()].push((first.index(), unit, cost.ms * view.per_ms[unit] + held));
            }
        }
    }
    let infinite = vec![f64::INFINITY; units];
    // Cost of standing before each operator with its segment about to start on each unit.
    let mut before: Vec<Vec<f64>> = Vec::with_capacity(count);
    let mut steps = vec![Step::default(); count * units];
    let mut ways = Ways { done: infinite.clone(), begun: infinite.clone(), open: infinite.clone() };
    for (at, operator) in graph.operators.iter().enumerate() {
        let id = OperatorId(at as u32);
        let mut start = vec![f64::INFINITY; units];
        for (unit, slot) in start.iter_mut().enumerate() {
            let price = view.per_ms[unit];
            if at == 0 {
                *slot = operator.inputs.iter().map(|&tensor| view.input_ms(tensor, unit).0).sum::<f64>() * price;
                continue;
            }
            let moved = |from: usize| -> f64 {
                let made = operator.inputs.iter().filter(|&&tensor| graph.tensor(tensor).producer.is_some());
                let ms: f64 = made.map(|&tensor| view.table.transfer(from, unit).ms(graph.tensor(tensor).bytes)).sum();
                if from == unit { 0.0 } else { ms * price }
            };
            for from in 0..units {
                let cost = ways.done[from] + moved(from);
                if cost < *slot {
                    *slot = cost;
                    steps[at * units + unit].from = from as u32;
                }
            }
        }
        let mut next = Ways { done: infinite.clone(), begun: infinite.clone(), open: infinite.clone() };
        for unit in 0..units {
            if !view.possible(id, unit) {
                continue;
            }
            let Some(cost) = view.table.cost(id, unit) else { continue };
            let (price, estimate) = (view.per_ms[unit], &view.estimates[unit]);
            let step = &mut steps[at * units + unit];
            let held = charge(at, unit);
            let share = estimate.share[at] * price + held;
            next.begun[unit] = start[unit] + estimate.dispatch_ms * price + share;
            step.second = ways.begun[unit] < ways.open[unit];
            next.open[unit] = ways.begun[unit].min(ways.open[unit]) + share;
            // As a segment of its own, where that was measured, it is one of the measured intervals.
            let lone = if view.measured[unit].contains_key([id].as_slice()) { f64::INFINITY } else { cost.ms };
            let alone = start[unit] + lone * price + held;
            step.first = (alone <= next.open[unit]).then_some(at as u32);
            next.done[unit] = alone.min(next.open[unit]);
        }
        before.push(start);
        for &(first, unit, cost) in &measured[at] {
            let whole = before[first][unit] + cost;
            // Also of equal ones: a measured interval counts as measured.
            if whole <= next.done[unit] {
                next.done[unit] = whole;
                steps[at * units + unit].first = Some(first as u32);
            }
        }
        ways = next;
    }
    let last = &graph.operators[count - 1];
    let handed = |unit: usize| -> f64 {
        let outputs = last.outputs.iter().filter(|tensor| view.is_output[tensor.index()]);
        outputs.map(|&tensor: &TensorId| view.output_ms(tensor, unit).0).sum::<f64>() * view.per_ms[unit]
    };
    let ends = (0..units).map(|unit| (ways.done[unit] + handed(unit), unit));
    let (cost, mut unit) = ends.min_by(|a, b| a.0.total_cmp(&b.0)).filter(|end| end.0.is_finite())?;
    let mut segments = Vec::new();
    let mut end = count;
    while end > 0 {
        let mut first = end - 1;
        if let Some(whole) = steps[first * units + unit].first {
            first = whole as usize;
        } else {
            // An open segment: back to where it had one operator.
            while !steps[first * units + unit].second {
                first -= 1;
            }
            first -= 1;
        }
        segments.push((first, end, unit));
        unit = steps[first * units + unit].from as usize;
        end = first;
    }
    segments.reverse();
    Some(Path { cost, segments })
}

/// Whether every operator but the first reads what the one before it made and nothing that another operator made.
fn is_pure_chain(view: &CostView<'_>) -> bool {
    let graph = view.graph;
    graph.operators.iter().enumerate().skip(1).all(|(at, operator)| {
        let mut makers = operator.inputs.iter().filter_map(|&tensor| graph.tensor(tensor).producer).peekable();
        makers.peek().is_some() && makers.all(|maker| maker.index() + 1 == at)
    })
}
