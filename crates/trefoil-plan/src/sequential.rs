//! `sequential`: BIDENT's shortest path over operators × units, literally (3.2.1, 3.3.1 eq. 1, 3.3.4).

use crate::PlanError;
use crate::assemble::{Piece, assemble};
use crate::view::CostView;
use trefoil_core::{Objective, OperatorId, Plan};

/// BIDENT eq. 1 over dense arrays: `cost(i,j) = w(i,j) + min_k [cost(i−1,k) + trans(i−1,k,i,j)]` with
/// `trans = H2D(i,j)` if j is an accelerator, plus `D2H(i−1,k)` if k is one, 0 for `k = j`; the start pays
/// `H2D(1,j)` and the end `D2H(n,j)` of accelerators.
///
/// `w`, `h2d` and `d2h` are row-major n × `k`; `w` is infinite where the operator cannot run; `h2d` and `d2h` are
/// finite and not negative. Returns the cost and one unit per operator; infinite cost and no assignment when some operator runs
/// nowhere. Ties keep the unit, then take the lower index. O(nk) time (the best unit to come from does not depend on
/// the destination except that staying is free), n·k bytes of memory.
///
/// # Panics
/// If the slices' lengths are not multiples of `k` that agree, or `k` is 0 or above 255.
pub fn sequential_dp(w: &[f64], h2d: &[f64], d2h: &[f64], accelerator: &[bool], k: usize) -> (f64, Vec<usize>) {
    assert!((1..=255).contains(&k) && accelerator.len() == k, "{k} units, {} accelerator flags", accelerator.len());
    assert!(w.len().is_multiple_of(k) && h2d.len() == w.len() && d2h.len() == w.len(), "arrays are not n × {k} each");
    match k {
        2 => dp_fixed::<2>(w, h2d, d2h, accelerator),
        3 => dp_fixed::<3>(w, h2d, d2h, accelerator),
        4 => dp_fixed::<4>(w, h2d, d2h, accelerator),
        _ => dp_any(w, h2d, d2h, accelerator, k),
    }
}

/// The recurrence with the number of units known to the compiler (2 to 4): rows live in registers, inner loops unroll and
/// minima are compare-and-select.
///
/// Leaving a unit for itself would cost `D2H + H2D ≥ 0` more than staying, so the minimum may run over all units and is one
/// for the whole row. `w + H2D` is added off the loop-carried chain, which is then min…, add, min, add. A row's parents are
/// one byte (the unit to come from, and one bit per unit that came from there), so that walking back loads bytes whose
/// address does not depend on the walk.
// Not inlined: three copies in one caller spill the rows to the stack, which doubles the time.
#[inline(never)]
fn dp_fixed<const K: usize>(w: &[f64], h2d: &[f64], d2h: &[f64], accelerator: &[bool]) -> (f64, Vec<usize>) {
    const { assert!(K >= 2 && K <= 4) };
    let (w, h2d, d2h) = (w.as_chunks::<K>().0, h2d.as_chunks::<K>().0, d2h.as_chunks::<K>().0);
    let count = w.len();
    if count == 0 {
        return (0.0, Vec::new());
    }
    let mut parents = vec![0u8; count];
    {
        // Equal lengths let the compiler drop the bounds checks.
        let (h2d, d2h, parents) = (&h2d[..count], &d2h[..count], &mut parents[..count]);
        let pays: [f64; K] = std::array::from_fn(|unit| f64::from(u8::from(accelerator[unit])));
        let mut cost: [f64; K] = std::array::from_fn(|unit| w[0][unit] + h2d[0][unit] * pays[unit]);
        let mut left: [f64; K] = std::array::from_fn(|unit| cost[unit] + d2h[0][unit] * pays[unit]);
        for row in 1..count {
            let (work, enter, leave) = (w[row], h2d[row], d2h[row]);
            let (mut best, mut from) = (left[0], 0u8);
            for (unit, &value) in left.iter().enumerate().skip(1) {
                from = if value < best { unit as u8 } else { from };
                best = if value < best { value } else { best };
            }
            let mut moves = 0u8;
            let mut next = [0.0; K];
            for unit in 0..K {
                let (arriving, staying) = (best + (enter[unit] * pays[unit] + work[unit]), cost[unit] + work[unit]);
                moves |= u8::from(arriving < staying) << unit;
                next[unit] = if arriving < staying { arriving } else { staying };
            }
            cost = next;
            left = std::array::from_fn(|unit| cost[unit] + leave[unit] * pays[unit]);
            parents[row] = from | moves << 2;
        }
        // `left` of the last row is the total: accelerators pay D2H at the end.
        let (total, unit) = best_end(left.into_iter());
        if total.is_finite() {
            return (total, walk_back(parents, unit));
        }
    }
    (f64::INFINITY, Vec::new())
}

fn walk_back(parents: &[u8], mut unit: usize) -> Vec<usize> {
    let mut assignment = vec![0; parents.len()];
    for (slot, parent) in assignment.iter_mut().zip(parents).rev() {
        *slot = unit;
        unit = if parent >> (unit + 2) & 1 == 1 { usize::from(parent & 3) } else { unit };
    }
    assignment
}

/// The same for any number of units.
fn dp_any(w: &[f64], h2d: &[f64], d2h: &[f64], accelerator: &[bool], k: usize) -> (f64, Vec<usize>) {
    let count = w.len() / k;
    if count == 0 {
        return (0.0, Vec::new());
    }
    let pays: Vec<f64> = accelerator.iter().map(|&flag| f64::from(u8::from(flag))).collect();
    let mut cost: Vec<f64> = (0..k).map(|unit| w[unit] + h2d[unit] * pays[unit]).collect();
    let mut parents = vec![0u8; w.len()];
    for row in 1..count {
        let (here, before) = (row * k, (row - 1) * k);
        // Cheapest and second cheapest unit to leave: every destination comes from one of the two.
        let (mut first, mut second) = ((f64::INFINITY, 0), (f64::INFINITY, 0));
        for unit in 0..k {
            let left = cost[unit] + d2h[before + unit] * pays[unit];
            if left < first.0 {
                second = first;
                first = (left, unit);
            } else if left < second.0 {
                second = (left, unit);
            }
        }
        for unit in 0..k {
            let (best, from) = if first.1 == unit { second } else { first };
            let moved = best + (h2d[here + unit] * pays[unit] + w[here + unit]);
            let stayed = cost[unit] + w[here + unit];
            let moving = moved < stayed;
            cost[unit] = if moving { moved } else { stayed };
            parents[here + unit] = if moving { from as u8 } else { unit as u8 };
        }
    }
    let (total, unit) = best_end((0..k).map(|unit| cost[unit] + d2h[(count - 1) * k + unit] * pays[unit]));
    if total.is_infinite() {
        return (total, Vec::new());
    }
    let (mut at, mut assignment) = (unit, vec![0; count]);
    for row in (0..count).rev() {
        assignment[row] = at;
        at = usize::from(parents[row * k + at]);
    }
    (total, assignment)
}

fn best_end(totals: impl Iterator<Item = f64>) -> (f64, usize) {
    let mut best = (f64::INFINITY, 0);
    for (unit, total) in totals.enumerate() {
        if total < best.0 {
            best = (total, unit);
        }
    }
    best
}

/// The dense arrays of [`sequential_dp`] in the objective's unit: milliseconds, or joules when the cost of an operator
/// is `w · p` (3.3.4) and a transfer costs the power of the accelerator that moves it.
///
/// Where a backend cannot tell `h2d` or `d2h`, the paper's term is the profile's own transfer cost between the host (the
/// first unit that is no accelerator, else the cheapest other unit) and the accelerator, summed over the operator's
/// inputs or outputs.
pub(crate) struct PaperCosts {
    pub w: Vec<f64>,
    pub h2d: Vec<f64>,
    pub d2h: Vec<f64>,
}

impl PaperCosts {
    pub(crate) fn new(view: &CostView<'_>) -> Self {
        let (graph, table, units) = (view.graph, &view.table, view.unit_count());
        let host = table.accelerator.iter().position(|&accelerator| !accelerator);
        let size = graph.len() * units;
        let mut costs =
            Self { w: Vec::with_capacity(size), h2d: Vec::with_capacity(size), d2h: Vec::with_capacity(size) };
        for id in graph.ids() {
            let operator = graph.operator(id);
            for unit in 0..units {
                let per_ms = view.per_ms[unit];
                let cost = view.runnable(id, unit);
                costs.w.push(cost.map_or(f64::INFINITY, |cost| cost.ms * per_ms));
                if !table.accelerator[unit] {
                    costs.h2d.push(0.0);
                    costs.d2h.push(0.0);
                    continue;
                }
                let handed = |tensors: &[trefoil_core::TensorId], outward: bool| -> f64 {
                    let price = |bytes: u64, other: usize| {
                        let (from, to) = if outward { (unit, other) } else { (other, unit) };
                        table.transfer(from, to).ms(bytes)
                    };
                    let one = |bytes: u64| match host {
                        Some(host) => price(bytes, host),
                        None if units == 1 => 0.0,
                        // Accelerators only: the paper charges both ends, our measured transfer covers both: charge the entry.
                        None if outward => 0.0,
                        None => (0..units)
                            .filter(|&other| other != unit)
                            .map(|other| price(bytes, other))
                            .fold(f64::INFINITY, f64::min),
                    };
                    tensors.iter().map(|&tensor| one(graph.tensor(tensor).bytes)).sum()
                };
                let h2d = cost.and_then(|cost| cost.h2d_ms).unwrap_or_else(|| handed(&operator.inputs, false));
                let d2h = cost.and_then(|cost| cost.d2h_ms).unwrap_or_else(|| handed(&operator.outputs, true));
                costs.h2d.push(h2d * per_ms);
                costs.d2h.push(d2h * per_ms);
            }
        }
        costs
    }
}

/// BIDENT's sequential plan. `claimed` is the paper's own sum; neighbours on one unit are merged into segments for
/// execution only, and segments, transfers and `simulated_ms` are priced by Trefoil's own cost view, so that the two
/// figures side by side show what isolated costs and free skip connections hide.
pub(crate) fn sequential(view: &CostView<'_>) -> Result<Plan, PlanError> {
    let costs = PaperCosts::new(view);
    let (claimed, assignment) =
        sequential_dp(&costs.w, &costs.h2d, &costs.d2h, &view.table.accelerator, view.unit_count());
    if !view.graph.is_empty() && assignment.is_empty() {
        return Err(view.no_unit());
    }
    let mut pieces: Vec<Piece> = Vec::new();
    for (index, &unit) in assignment.iter().enumerate() {
        let id = OperatorId(index as u32);
        match pieces.last_mut() {
            Some(piece) if piece.unit == unit && view.can_extend(piece, id) => piece.operators.push(id),
            _ => pieces.push(Piece { unit, operators: vec![id] }),
        }
    }
    let mut plan = assemble(view, "sequential", &pieces)?;
    let own = plan.claimed;
    plan.claimed = claimed;
    plan.model_bound = Some(claimed);
    plan.gap = Some(0.0);
    plan.exact = true;
    let suffix = if view.objective == Objective::Energy { "J" } else { "ms" };
    plan.notes.push(format!(
        "claimed is the paper's sum over isolated operators (BIDENT eq. 1), exact under that model; with segments and every crossing tensor priced the same plan costs {own:.4} {suffix}"
    ));
    Ok(plan)
}
