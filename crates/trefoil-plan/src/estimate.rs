//! What a segment that nobody measured whole will probably cost: an additive model per unit, corrected by every
//! segment that was measured.
//!
//! On one unit a segment σ costs `d + Σ_{i∈σ} x_i`:
//!
//! * `d`, one dispatch, is the smallest dispatch time the backend told, else the smallest isolated operator time but at
//!   most a quarter of the mean one (a model of heavy operators only has no operator that is all dispatch).
//! * `x_i = base_i · ρ_i`. `base_i` is the operator's share of the whole model's in-situ node times where the backend
//!   reports them for at least half of the time, else its isolated time less `d` (at least a tenth
//!   of it: nothing computes for free).
//! * `ρ_i` is the fusion ratio `(measured − d) / Σ base` of the **smallest** measured segment that holds the operator: the
//!   most local evidence. An operator that no measured segment holds takes the smallest ratio seen on the unit, which is
//!   optimistic; 1 when nothing was measured whole.
//!
//! So the model reproduces what was measured, a slow segment raises the estimate of everything that overlaps it (and
//! refinement does not walk through all its neighbours), and an untouched region stays optimistic. Whether the estimates
//! were in fact lower bounds is not assumed but told by [`crate::estimate_audit`].

use trefoil_core::{CostTable, NodeTime, OperatorGraph, OperatorId};

/// Share of the node times that must be matched to operators before they replace isolated times.
const MATCHED_ENOUGH: f64 = 0.5;
/// Most that the dispatch proxy may be of the mean isolated operator time.
const DISPATCH_CAP: f64 = 0.25;

/// Least part of an isolated operator time that counts as work and not as dispatch: nothing computes for free.
const LEAST_WORK: f64 = 0.1;

/// A set of operators measured in one piece on one unit.
#[derive(Debug, Clone)]
pub(crate) struct MeasuredSet {
    /// Ascending.
    pub operators: Vec<OperatorId>,
    pub ms: f64,
}

/// The additive model of one unit, in milliseconds, indexed by operator.
#[derive(Debug, Clone)]
pub(crate) struct UnitEstimate {
    /// One dispatch `d`.
    pub dispatch_ms: f64,
    /// Uncorrected shares `base_i`; 0 where the operator has no cost on the unit.
    pub base: Vec<f64>,
    /// Corrected shares `x_i`.
    pub share: Vec<f64>,
    /// Least that the operator can add to any plan under this model: the smallest of `x_i`, its isolated time, and its
    /// part of every measured segment that holds it; infinite where it can run in no segment. Sums over a plan never exceed
    /// the plan's compute cost.
    pub least: Vec<f64>,
    /// For each operator the index (in the list given to `calibrate`) of the measured set that its ratio came from.
    pub evidence: Vec<Option<u32>>,
}

impl UnitEstimate {
    /// The uncorrected model: dispatch and base shares of `unit`.
    pub fn new(
        graph: &OperatorGraph,
        table: &CostTable,
        unit: usize,
        dispatch: Option<f64>,
        nodes: &[NodeTime],
    ) -> Self {
        let isolated: Vec<Option<f64>> = graph.ids().map(|id| table.cost(id, unit).map(|cost| cost.ms)).collect();
        let known: Vec<f64> = isolated.iter().copied().flatten().collect();
        let smallest = known.iter().copied().fold(f64::INFINITY, f64::min);
        let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
        let dispatch_ms = match dispatch {
            _ if known.is_empty() => 0.0,
            Some(told) => told.min(smallest),
            None => smallest.min(DISPATCH_CAP * mean),
        };
        let alone: Vec<f64> =
            isolated.iter().map(|ms| ms.map_or(0.0, |ms| (ms - dispatch_ms).max(LEAST_WORK * ms))).collect();
        let base = in_situ(&alone, nodes).unwrap_or(alone);
        let mut estimate =
            Self { dispatch_ms, share: Vec::new(), least: Vec::new(), evidence: vec![None; base.len()], base };
        estimate.calibrate(&[], &isolated);
        estimate
    }

    /// Fits ratios to the measured sets. `isolated` is the operators' own time on the unit.
    pub fn calibrate(&mut self, sets: &[MeasuredSet], isolated: &[Option<f64>]) {
        let count = self.base.len();
        let sum = |set: &MeasuredSet| set.operators.iter().map(|id| self.base[id.index()]).sum::<f64>();
        let mut ratio: Vec<Option<f64>> = vec![None; count];
        let mut evidence = vec![None; count];
        let mut least: Vec<f64> = isolated.iter().map(|ms| ms.unwrap_or(f64::INFINITY)).collect();
        let mut smallest_ratio = f64::INFINITY;
        let mut by_size: Vec<usize> = (0..sets.len()).collect();
        by_size.sort_by_key(|&index| std::cmp::Reverse(sets[index].operators.len()));
        for index in by_size {
            let set = &sets[index];
            let total = sum(set);
            // A lone operator's own time is its cost already and says nothing about fusion.
            if let [id] = set.operators.as_slice() {
                let at = id.index();
                least[at] = least[at].min(set.ms);
                continue;
            }
            let fitted = (total > 0.0).then(|| (set.ms - self.dispatch_ms).max(0.0) / total);
            if let Some(fitted) = fitted {
                smallest_ratio = smallest_ratio.min(fitted);
            }
            for id in &set.operators {
                let at = id.index();
                let part = if total > 0.0 { set.ms * self.base[at] / total } else { 0.0 };
                least[at] = least[at].min(part);
                if fitted.is_some() {
                    ratio[at] = fitted;
                    evidence[at] = Some(index as u32);
                }
            }
        }
        if !smallest_ratio.is_finite() {
            smallest_ratio = 1.0;
        }
        self.share = self.base.iter().zip(&ratio).map(|(base, ratio)| base * ratio.unwrap_or(smallest_ratio)).collect();
        // Infinite where it runs neither alone nor inside anything that was measured whole.
        let finite = |(least, share): (&f64, &f64)| if least.is_finite() { least.min(*share) } else { *least };
        self.least = least.iter().zip(&self.share).map(finite).collect();
        self.evidence = evidence;
    }

    /// `d + Σ x_i`.
    pub fn segment_ms(&self, operators: &[OperatorId]) -> f64 {
        self.dispatch_ms + operators.iter().map(|id| self.share[id.index()]).sum::<f64>()
    }
}

/// Node times as shares per operator, or `None` when too little is matched. A node that covers several operators is
/// divided in proportion to their isolated times; time of unmatched nodes goes to operators without a node likewise.
fn in_situ(alone: &[f64], nodes: &[NodeTime]) -> Option<Vec<f64>> {
    let total: f64 = nodes.iter().map(|node| node.ms).sum();
    let matched: f64 = nodes.iter().filter(|node| !node.operators.is_empty()).map(|node| node.ms).sum();
    if total <= 0.0 || matched < MATCHED_ENOUGH * total {
        return None;
    }
    let mut share = vec![0.0; alone.len()];
    let mut covered = vec![false; alone.len()];
    let spread = |share: &mut [f64], members: &[usize], ms: f64| {
        let weight: f64 = members.iter().map(|&at| alone[at]).sum();
        for &at in members {
            share[at] += if weight > 0.0 { ms * alone[at] / weight } else { ms / members.len() as f64 };
        }
    };
    for node in nodes {
        let members: Vec<usize> = node.operators.iter().map(|id| id.index()).filter(|&at| at < alone.len()).collect();
        if !members.is_empty() {
            spread(&mut share, &members, node.ms);
            for at in members {
                covered[at] = true;
            }
        }
    }
    let rest: Vec<usize> = (0..alone.len()).filter(|&at| !covered[at]).collect();
    if !rest.is_empty() && total > matched {
        spread(&mut share, &rest, total - matched);
    }
    Some(share)
}
