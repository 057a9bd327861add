//! Two units with additive costs as a minimum cut: exact for any graph when things run one after another.
//!
//! Every job is on the source's side (unit 0) or the sink's (unit 1). Its cost on one unit is the capacity of its arc to the
//! other side. A tensor pays once when it is made on one side and read on the other, however many readers there are: its
//! maker points to a node of the tensor with the transfer's price, which points to every reader with infinite capacity;
//! likewise the other way round.

use crate::problem::Problem;
use std::collections::BTreeMap;

/// The least `Σ price_u · (jobs + handovers + transfers)` over all assignments of a problem with two units, and the assignment.
/// `price` is per unit: 1 for milliseconds, watts for millijoules. `None` when the problem has another number of units.
pub fn minimum_cut(problem: &Problem, price: &[f64]) -> Option<(f64, Vec<u32>)> {
    let solved = solve(problem, price, &[])?;
    let reached = solved.network.reachable(problem.jobs().len());
    Some((solved.value, (0..problem.jobs().len()).map(|job| u32::from(!reached[job])).collect()))
}

/// The least cost alone, where every job also costs what `charges` (row-major jobs × 2; empty for nothing) say of its unit.
pub(crate) fn charged_cut(problem: &Problem, price: &[f64], charges: &[f64]) -> Option<f64> {
    solve(problem, price, charges).map(|solved| solved.value)
}

/// By (tensor, reader).
pub(crate) type CutPayments = BTreeMap<(u32, u32), f64>;

/// What readers of tensors pay for being on unit 1, by (tensor, reader): the maximum flow as the witness that
/// [`crate::bounds::priced`] describes. By the duality of flows and cuts it proves all of the minimum cut.
pub(crate) fn cut_payments(problem: &Problem, price: &[f64], charges: &[f64]) -> Option<(f64, CutPayments)> {
    let solved = solve(problem, price, charges)?;
    let mut payments = CutPayments::new();
    for (key, arc, sign) in solved.reads {
        // The flow through an arc is what its reverse could take back.
        *payments.entry(key).or_insert(0.0) += sign * solved.network.left[arc as usize ^ 1];
    }
    Some((solved.value, payments))
}

/// A maximum flow, and the arcs between tensors and their readers.
struct Solved {
    value: f64,
    network: Network,
    /// (tensor, reader), the arc, and whether its flow is towards the reader (1) or away from it (−1).
    reads: Vec<((u32, u32), u32, f64)>,
}

fn solve(problem: &Problem, price: &[f64], charges: &[f64]) -> Option<Solved> {
    if problem.units().len() != 2 || price.len() != 2 {
        return None;
    }
    let dense = &problem.dense;
    let jobs = problem.jobs().len();
    let (source, sink) = (jobs, jobs + 1);
    let mut network = Network::new(jobs + 2);
    let mut reads = Vec::new();
    let handed = |job: usize, unit: usize| -> f64 {
        dense.outputs.row(job).iter().map(|&tensor| dense.to_host[tensor as usize * 2 + unit]).sum()
    };
    let cost = |job: usize, unit: usize| {
        let ms = dense.ms(job, unit) + handed(job, unit);
        // Where it cannot run it costs too much at any price, 0 included.
        let charge = charges.get(2 * job + unit).copied().unwrap_or(0.0);
        if ms.is_finite() { ms * price[unit] + charge } else { f64::INFINITY }
    };
    for job in 0..jobs {
        // On unit 1 the arc from the source is cut, on unit 0 the arc to the sink.
        network.arc(source, job, cost(job, 1));
        network.arc(job, sink, cost(job, 0));
    }
    for tensor in 0..problem.tensors().len() {
        let readers = dense.consumers.row(tensor);
        for (to, price) in price.iter().enumerate() {
            let maker = match dense.producer[tensor] {
                u32::MAX => None,
                maker => Some(maker as usize),
            };
            let ms = dense.transfer(tensor, if maker.is_some() { 1 - to } else { 2 }, to) * price;
            if ms <= 0.0 || readers.is_empty() {
                continue;
            }
            let node = network.node();
            match (to, maker) {
                (1, maker) => {
                    network.arc(maker.unwrap_or(source), node, ms);
                    for &job in readers {
                        reads.push(((tensor as u32, job), network.to.len() as u32, 1.0));
                        network.arc(node, job as usize, f64::INFINITY);
                    }
                }
                (_, maker) => {
                    network.arc(node, maker.unwrap_or(sink), ms);
                    for &job in readers {
                        reads.push(((tensor as u32, job), network.to.len() as u32, -1.0));
                        network.arc(job as usize, node, f64::INFINITY);
                    }
                }
            }
        }
    }
    let value = network.maximum_flow(source, sink);
    Some(Solved { value, network, reads })
}

/// A flow network (Dinic).
struct Network {
    /// Per node, indices of its arcs.
    out: Vec<Vec<u32>>,
    to: Vec<u32>,
    /// Residual capacity; arc `a ^ 1` is the reverse of arc `a`.
    left: Vec<f64>,
    scale: f64,
}

impl Network {
    fn new(nodes: usize) -> Self {
        Self { out: vec![Vec::new(); nodes], to: Vec::new(), left: Vec::new(), scale: 0.0 }
    }

    fn node(&mut self) -> usize {
        self.out.push(Vec::new());
        self.out.len() - 1
    }

    fn arc(&mut self, from: usize, to: usize, capacity: f64) {
        for (from, to, capacity) in [(from, to, capacity), (to, from, 0.0)] {
            self.out[from].push(self.to.len() as u32);
            self.to.push(to as u32);
            self.left.push(capacity);
            if capacity.is_finite() {
                self.scale = self.scale.max(capacity);
            }
        }
    }

    /// What counts as no capacity: rounding of the largest.
    fn nothing(&self) -> f64 {
        self.scale * 1e-14
    }

    fn levels(&self, source: usize) -> Vec<u32> {
        let mut level = vec![u32::MAX; self.out.len()];
        level[source] = 0;
        let mut queue = std::collections::VecDeque::from([source]);
        while let Some(node) = queue.pop_front() {
            for &arc in &self.out[node] {
                let to = self.to[arc as usize] as usize;
                if self.left[arc as usize] > self.nothing() && level[to] == u32::MAX {
                    level[to] = level[node] + 1;
                    queue.push_back(to);
                }
            }
        }
        level
    }

    fn reachable(&self, source: usize) -> Vec<bool> {
        self.levels(source).into_iter().map(|level| level != u32::MAX).collect()
    }

    fn maximum_flow(&mut self, source: usize, sink: usize) -> f64 {
        let mut flow = 0.0;
        loop {
            let level = self.levels(source);
            if level[sink] == u32::MAX {
                return flow;
            }
            let mut next = vec![0usize; self.out.len()];
            // Depth first along rising levels, without recursion: graphs can be tens of thousands of nodes deep.
            let mut path: Vec<u32> = Vec::new();
            let mut node = source;
            loop {
                if node == sink {
                    let least = path.iter().map(|&arc| self.left[arc as usize]).fold(f64::INFINITY, f64::min);
                    flow += least;
                    let mut back = 0;
                    for (at, &arc) in path.iter().enumerate().rev() {
                        self.left[arc as usize] -= least;
                        self.left[arc as usize ^ 1] += least;
                        if self.left[arc as usize] <= self.nothing() {
                            back = at;
                        }
                    }
                    path.truncate(back);
                    node = path.last().map_or(source, |&arc| self.to[arc as usize] as usize);
                    continue;
                }
                let from = next[node];
                let found = self.out[node][from.min(self.out[node].len())..].iter().position(|&arc| {
                    self.left[arc as usize] > self.nothing()
                        && level[self.to[arc as usize] as usize] == level[node].saturating_add(1)
                });
                if let Some(skipped) = found {
                    next[node] = from + skipped;
                    let arc = self.out[node][next[node]];
                    path.push(arc);
                    node = self.to[arc as usize] as usize;
                } else {
                    next[node] = self.out[node].len();
                    let Some(arc) = path.pop() else { break };
                    node = self.to[arc as usize ^ 1] as usize;
                    next[node] += 1;
                }
            }
        }
    }
}
