//! Where a topological order may be cut into segments, and what every interval between two cuts costs.

use crate::view::CostView;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::cost::measurement_cost;
use trefoil_core::{OperatorId, TensorId};

/// A tensor (of nonzero price for some pair of units) that may cross between blocks.
#[derive(Debug, Clone)]
pub(crate) struct Crossing {
    /// Block of its producer; `None` for a model input.
    pub producer: Option<usize>,
    /// Blocks of its consumers, ascending, no duplicates.
    pub consumers: Vec<usize>,
    /// Row-major (units + 1) × units: price of making it available to `to` when it comes from `from`; the last row is the
    /// host's.
    prices: Vec<f64>,
}

impl Crossing {
    pub fn price(&self, from: usize, to: usize, units: usize) -> f64 {
        self.prices[from * units + to]
    }
}

/// The interval graph: blocks between consecutive cuts of an order, and for every unit and interval of blocks the cost of
/// running it there in the objective's unit (infinite where it cannot run), model outputs' transfers included: as one
/// segment, or as several one after another where that costs less (or where one piece is known to fail).
pub(crate) struct IntervalGraph {
    pub units: usize,
    /// Number of blocks.
    pub blocks: usize,
    /// Cut positions in the order; `cuts[b]..cuts[b + 1]` is block b.
    pub cuts: Vec<usize>,
    /// In one piece.
    whole: Vec<f64>,
    /// In as many pieces as is cheapest.
    cost: Vec<f64>,
    pub crossings: Vec<Crossing>,
    /// Per cut: `(next consuming block, crossing)` of the tensors that are made before it and read after it, ascending.
    pub live: Vec<Vec<(usize, usize)>>,
}

impl IntervalGraph {
    /// Cost of blocks `from..to` on `unit`.
    pub fn cost(&self, unit: usize, from: usize, to: usize) -> f64 {
        self.cost[(unit * self.blocks + from) * (self.blocks + 1) + to]
    }

    /// Cost of blocks `from..to` on `unit` as one segment.
    pub fn whole(&self, unit: usize, from: usize, to: usize) -> f64 {
        self.whole[(unit * self.blocks + from) * (self.blocks + 1) + to]
    }

    /// The segments that [`Self::cost`] is the cost of, in order.
    pub fn pieces(&self, unit: usize, from: usize, to: usize) -> Vec<(usize, usize)> {
        let (mut pieces, mut end) = (Vec::new(), to);
        while end > from {
            // The same sums as in `close_over_pieces`, so the smallest is met exactly.
            let before = |start: usize| if start == from { 0.0 } else { self.cost(unit, from, start) };
            let start = (from..end)
                .min_by(|&one, &other| {
                    let at = |start: usize| before(start) + self.whole(unit, start, end);
                    at(one).total_cmp(&at(other))
                })
                .unwrap_or(from);
            pieces.push((start, end));
            end = start;
        }
        pieces.reverse();
        pieces
    }

    /// Estimates are optimistic for some segments and not for others, and a measured segment may be slower than its
    /// parts: what is cheapest in pieces costs what the pieces cost.
    fn close_over_pieces(&mut self) {
        let (blocks, row) = (self.blocks, self.blocks + 1);
        self.cost.clone_from(&self.whole);
        for unit in 0..self.units {
            for from in 0..blocks {
                let base = (unit * blocks + from) * row;
                for middle in from + 1..blocks {
                    let before = self.cost[base + middle];
                    if before.is_infinite() {
                        continue;
                    }
                    let after = &self.whole[(unit * blocks + middle) * row..][..row];
                    let best = &mut self.cost[base..base + row];
                    for (best, &after) in best[middle + 1..].iter_mut().zip(&after[middle + 1..]) {
                        *best = best.min(before + after);
                    }
                }
            }
        }
    }

    pub fn new(view: &CostView<'_>, order: &[OperatorId], cuts: Vec<usize>) -> Self {
        let units = view.unit_count();
        let blocks = cuts.len() - 1;
        let mut position = vec![0; order.len()];
        for (at, id) in order.iter().enumerate() {
            position[id.index()] = at;
        }
        let block_of: Vec<usize> = position.iter().map(|at| cuts.partition_point(|cut| cut <= at) - 1).collect();
        let crossings = crossings(view, &block_of);
        let mut live: Vec<Vec<(usize, usize)>> = vec![Vec::new(); blocks + 1];
        for (index, crossing) in crossings.iter().enumerate() {
            let first = crossing.producer.map_or(0, |block| block + 1);
            for (cut, list) in live.iter_mut().enumerate().skip(first) {
                let next = crossing.consumers.partition_point(|&block| block < cut);
                match crossing.consumers.get(next) {
                    Some(&block) => list.push((block, index)),
                    None => break,
                }
            }
        }
        for list in &mut live {
            list.sort_unstable();
        }
        let mut graph = Self { units, blocks, cuts, whole: Vec::new(), cost: Vec::new(), crossings, live };
        graph.price_intervals(view, order, &position, &block_of);
        graph.close_over_pieces();
        graph
    }

    fn price_intervals(&mut self, view: &CostView<'_>, order: &[OperatorId], position: &[usize], block_of: &[usize]) {
        let blocks = self.blocks;
        self.whole = vec![f64::INFINITY; self.units * blocks * (blocks + 1)];
        for unit in 0..self.units {
            let per_ms = view.per_ms[unit];
            let estimate = &view.estimates[unit];
            let prefix = |value: &dyn Fn(OperatorId) -> f64| {
                let mut sums = vec![0.0; blocks + 1];
                for block in 0..blocks {
                    let inside = &order[self.cuts[block]..self.cuts[block + 1]];
                    sums[block + 1] = sums[block] + inside.iter().map(|&id| value(id)).sum::<f64>();
                }
                sums
            };
            let share = prefix(&|id| estimate.share[id.index()]);
            let handed_out = prefix(&|id| {
                let outputs = view.graph.operator(id).outputs.iter().copied();
                outputs.filter(|&t| view.is_output[t.index()]).map(|t| view.output_ms(t, unit).0).sum()
            });
            let nodes = prefix(&|id| view.graph.operator(id).nodes.len() as f64);
            let bytes = prefix(&|id| view.graph.operator(id).weight_bytes as f64);
            // `reach[a]`: the first end that makes an interval from `a` infeasible, because of pins (hard), or of what
            // failed (soft: a set measured whole overrides it).
            let mut hard = vec![usize::MAX; blocks + 1];
            let mut soft = vec![usize::MAX; blocks + 1];
            for id in view.graph.ids() {
                let block = block_of[id.index()];
                if !view.allowed(id, unit) {
                    hard[block] = block + 1;
                }
                if view.table.cost(id, unit).is_none() {
                    soft[block] = block + 1;
                }
            }
            for failed in &view.failed[unit] {
                let first = failed.operators.iter().map(|&id| block_of[id.index()]).min().unwrap_or(0);
                let last = failed.operators.iter().map(|&id| block_of[id.index()]).max().unwrap_or(0);
                soft[first] = soft[first].min(last + 1);
            }
            let limits = &view.units[unit].limits;
            for start in (0..blocks).rev() {
                hard[start] = hard[start].min(hard[start + 1]);
                soft[start] = soft[start].min(soft[start + 1]);
            }
            let over = |sums: &[f64], limit: Option<u64>, from: usize, to: usize| {
                limit.is_some_and(|most| sums[to] - sums[from] > most as f64)
            };
            for from in 0..blocks {
                for to in from + 1..=blocks {
                    if to >= hard[from]
                        || to >= soft[from]
                        || over(&nodes, limits.max_nodes, from, to)
                        || over(&bytes, limits.memory_bytes, from, to)
                    {
                        break;
                    }
                    let inside = &order[self.cuts[from]..self.cuts[to]];
                    let ms = match inside {
                        [id] => view.table.cost(*id, unit).map_or(f64::INFINITY, |cost| cost.ms),
                        _ => estimate.dispatch_ms + (share[to] - share[from]),
                    };
                    let out = handed_out[to] - handed_out[from];
                    self.whole[(unit * blocks + from) * (blocks + 1) + to] = (ms + out) * per_ms;
                }
            }
            for (operators, record) in &view.measured[unit] {
                let Some((first, last)) = contiguous(operators, position) else { continue };
                let (Ok(from), Ok(to)) = (self.cuts.binary_search(&first), self.cuts.binary_search(&(last + 1))) else {
                    continue;
                };
                if to < hard[from]
                    && !over(&bytes, limits.memory_bytes, from, to)
                    && let Some(cost) = measurement_cost(record)
                {
                    let out = handed_out[to] - handed_out[from];
                    self.whole[(unit * blocks + from) * (blocks + 1) + to] = (cost.ms + out) * per_ms;
                }
            }
        }
    }
}

/// First and last position of a set that is an interval of the order.
fn contiguous(operators: &[OperatorId], position: &[usize]) -> Option<(usize, usize)> {
    let places = operators.iter().map(|id| position[id.index()]);
    let (first, last) = (places.clone().min()?, places.max()?);
    (last + 1 - first == operators.len()).then_some((first, last))
}

fn crossings(view: &CostView<'_>, block_of: &[usize]) -> Vec<Crossing> {
    let units = view.unit_count();
    let mut crossings = Vec::new();
    for (index, edge) in view.graph.tensors.iter().enumerate() {
        let producer = edge.producer.map(|id| block_of[id.index()]);
        let consumers: BTreeSet<usize> = edge.consumers.iter().map(|&id| block_of[id.index()]).collect();
        if consumers.iter().all(|&block| Some(block) == producer) {
            continue;
        }
        let mut prices = vec![0.0; (units + 1) * units];
        for to in 0..units {
            if producer.is_some() {
                for from in (0..units).filter(|&from| from != to) {
                    prices[from * units + to] = view.table.transfer(from, to).ms(edge.bytes) * view.per_ms[to];
                }
            } else {
                prices[units * units + to] = view.input_ms(TensorId(index as u32), to).0 * view.per_ms[to];
            }
        }
        if prices.iter().any(|&price| price > 0.0) {
            crossings.push(Crossing { producer, consumers: consumers.into_iter().collect(), prices });
        }
    }
    crossings
}

/// Farthest from a cut of the best plan that [`choose_cuts`] looks for a better one.
const FOCUS_RADIUS: usize = 12;

/// Chooses the cuts of an order: all positions when they are few. Otherwise, within the limit: those without which some
/// block has no unit; the ends of every segment that was measured; those in `focus` and around; where a per-operator shortest path with transfers priced
/// at several rates changes units (next to strong differences of affinity); and, spread over the order, those with the
/// least traffic.
pub(crate) fn choose_cuts(view: &CostView<'_>, order: &[OperatorId], limit: usize, focus: &[usize]) -> Vec<usize> {
    let count = order.len();
    if count < limit {
        return (0..=count).collect();
    }
    let mut position = vec![0; count];
    for (at, id) in order.iter().enumerate() {
        position[id.index()] = at;
    }
    let mut cuts = BTreeSet::from([0, count]);
    needed_cuts(view, order, &mut cuts);
    for measured in &view.measured {
        for operators in measured.keys() {
            if let Some((first, last)) = contiguous(operators, &position) {
                cuts.extend([first, last + 1]);
            }
        }
    }
    cuts.extend(focus);
    if !focus.is_empty() {
        // Widening rings around the given cuts, up to half of what is left.
        let ring_limit = cuts.len() + limit.saturating_sub(cuts.len()) / 2;
        for (distance, &cut) in (1..=FOCUS_RADIUS).flat_map(|distance| focus.iter().map(move |cut| (distance, cut))) {
            if cuts.len() >= ring_limit {
                break;
            }
            cuts.extend([cut.saturating_sub(distance), (cut + distance).min(count)]);
        }
    }
    let traffic = traffic(view, order, &position);
    // Half of what is left goes to affinity, the rest to calm places.
    let affinity_limit = cuts.len() + limit.saturating_sub(cuts.len()) / 2;
    for rate in [1.0, 2.0, 0.5, 0.25, 0.0] {
        for cut in affinity_switches(view, order, &traffic, rate) {
            if cuts.len() >= affinity_limit {
                break;
            }
            cuts.insert(cut);
        }
    }
    let windows = limit.saturating_sub(cuts.len());
    for window in 0..windows {
        let (first, last) = (window * count / windows, (window + 1) * count / windows);
        let calm = (first.max(1)..last).min_by(|&a, &b| traffic[a].total_cmp(&traffic[b]).then(a.cmp(&b)));
        cuts.extend(calm);
    }
    cuts.into_iter().collect()
}

/// Cuts before operators that share no unit with everything since the last such cut.
fn needed_cuts(view: &CostView<'_>, order: &[OperatorId], cuts: &mut BTreeSet<usize>) {
    let units = view.unit_count();
    let mut possible = vec![true; units];
    for (at, &id) in order.iter().enumerate() {
        let here: Vec<bool> = (0..units).map(|unit| view.runnable(id, unit).is_some()).collect();
        let joint: Vec<bool> = possible.iter().zip(&here).map(|(a, b)| *a && *b).collect();
        if joint.contains(&true) {
            possible = joint;
        } else {
            cuts.insert(at);
            possible = here;
        }
    }
}

/// Mean price, in the objective's unit, of moving to another unit at each position: every tensor alive there.
fn traffic(view: &CostView<'_>, order: &[OperatorId], position: &[usize]) -> Vec<f64> {
    let units = view.unit_count();
    let mut change = vec![0.0; order.len() + 1];
    let mut prices: BTreeMap<u64, f64> = BTreeMap::new();
    for edge in &view.graph.tensors {
        let Some(producer) = edge.producer else { continue };
        let Some(last) = edge.consumers.iter().map(|id| position[id.index()]).max() else { continue };
        let price = *prices.entry(edge.bytes).or_insert_with(|| {
            let pairs =
                (0..units).flat_map(|from| (0..units).map(move |to| (from, to))).filter(|(from, to)| from != to);
            let total: f64 =
                pairs.map(|(from, to)| view.table.transfer(from, to).ms(edge.bytes) * view.per_ms[to]).sum();
            total / (units * units.saturating_sub(1)).max(1) as f64
        });
        // Alive at cuts producer+1 ..= last consumer.
        change[position[producer.index()] + 1] += price;
        change[last + 1] -= price;
    }
    let mut alive = 0.0;
    change
        .iter()
        .map(|change| {
            alive += change;
            f64::max(alive, 0.0)
        })
        .collect()
}

/// Positions where a per-operator shortest path changes units when a change costs `rate` times traffic and dispatch.
fn affinity_switches(view: &CostView<'_>, order: &[OperatorId], traffic: &[f64], rate: f64) -> Vec<usize> {
    let units = view.unit_count();
    let price = |id: OperatorId, unit: usize| {
        view.runnable(id, unit).map_or(f64::INFINITY, |_| view.estimates[unit].share[id.index()] * view.per_ms[unit])
    };
    let mut cost = vec![0.0; units];
    let mut parents = vec![0usize; order.len() * units];
    for (at, &id) in order.iter().enumerate() {
        let (cheapest, least) = cost
            .iter()
            .copied()
            .enumerate()
            .fold((0, f64::INFINITY), |best, (unit, value)| if value < best.1 { (unit, value) } else { best });
        for unit in 0..units {
            let dispatch = view.estimates[unit].dispatch_ms * view.per_ms[unit];
            let moved = least + rate * (traffic[at] + dispatch);
            let (from, value) = if moved < cost[unit] { (cheapest, moved) } else { (unit, cost[unit]) };
            parents[at * units + unit] = from;
            cost[unit] = value + price(id, unit);
        }
    }
    let mut unit = (0..units).min_by(|&a, &b| cost[a].total_cmp(&cost[b])).unwrap_or(0);
    let mut switches = Vec::new();
    for at in (1..order.len()).rev() {
        let from = parents[at * units + unit];
        if from != unit {
            switches.push(at);
        }
        unit = from;
    }
    switches
}
