//! Exact search for [`StreamProblem`]: a bottleneck recurrence over (block, set of used units), then branch and bound where
//! units may be used again.

use super::{Stage, StreamPlan, StreamProblem};
use crate::PlanError;
use std::collections::{BTreeMap, BTreeSet};

/// Most units: the recurrence runs over sets of them.
const MOST_UNITS: usize = 8;
/// Most nodes of branch and bound before it settles for the best found.
const MOST_NODES: u64 = 20_000_000;

/// The plan with the shortest period; among those the fewest stages, then the shortest latency.
///
/// Without revisits this is exact for any deadline: O(n²·2ᵏ·k²) steps for n blocks and k units, some twenty times that where a
/// deadline binds. With revisits a branch and bound over cuts follows, exact unless it passes its node limit (then
/// `exact` is false); it is meant for a few handoffs.
///
/// # Errors
/// [`PlanError::Stream`] for malformed problems (with the block and unit), and when no plan fits the limits (saying which).
pub fn plan_stream(problem: &StreamProblem) -> Result<StreamPlan, PlanError> {
    let model = Model::new(problem)?;
    let once = model.without_revisits();
    let mut search = Search { best: once.clone(), nodes: 0, ..Search::new(&model) };
    if problem.revisits && model.most_handoffs >= 2 || model.resources < model.units {
        search.run();
    }
    let exact = search.nodes <= MOST_NODES;
    match search.best {
        Some(found) => Ok(model.plan(&found.stages, exact)),
        None => Err(model.why_not()),
    }
}

/// A problem with prefix sums and indices instead of names.
struct Model<'a> {
    problem: &'a StreamProblem,
    units: usize,
    count: usize,
    resource: Vec<usize>,
    resources: usize,
    /// `[unit][block]`: cost of all blocks before; blocks that do not run count 0 here.
    before: Vec<Vec<f64>>,
    /// `[unit][block]`: how many blocks before do not run.
    refused: Vec<Vec<usize>>,
    /// Weights of each block (index, bytes); unnamed weights get an index of their own.
    weights: Vec<(usize, u64)>,
    weight_count: usize,
    most_handoffs: usize,
}

#[derive(Debug, Clone)]
struct Found {
    stages: Vec<(usize, usize, usize)>,
    period: f64,
    latency: f64,
}

/// Order of plans: shorter period, then fewer stages, then shorter latency. Differences within rounding do not count.
fn better(one: &Found, other: Option<&Found>) -> bool {
    let Some(other) = other else { return true };
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 * a.abs().max(b.abs());
    if !close(one.period, other.period) {
        return one.period < other.period;
    }
    match one.stages.len().cmp(&other.stages.len()) {
        std::cmp::Ordering::Equal => one.latency < other.latency && !close(one.latency, other.latency),
        order => order.is_lt(),
    }
}

impl<'a> Model<'a> {
    fn new(problem: &'a StreamProblem) -> Result<Self, PlanError> {
        let fail = |reason: String| Err(PlanError::Stream { reason });
        let (units, count) = (problem.units.len(), problem.blocks.len());
        if units == 0 || units > MOST_UNITS {
            return fail(format!("there are {units} units; 1 to {MOST_UNITS} can be planned for"));
        }
        if count == 0 {
            return fail("there are no blocks".to_owned());
        }
        if !problem.handoffs.is_empty() && problem.handoffs.len() != count * units * units {
            return fail(format!(
                "there are {} handoff costs; give none or blocks x units x units = {}",
                problem.handoffs.len(),
                count * units * units
            ));
        }
        if let Some(bad) = problem.handoffs.iter().chain(&problem.deadline).find(|x| !x.is_finite() || **x < 0.0) {
            return fail(format!("{bad} is no handoff cost and no deadline"));
        }
        let mut before = vec![vec![0.0; count + 1]; units];
        let mut refused = vec![vec![0; count + 1]; units];
        for (at, block) in problem.blocks.iter().enumerate() {
            if block.cost.len() != units {
                return fail(format!("block {at} has {} costs for {units} units", block.cost.len()));
            }
            if block.cost.iter().all(Option::is_none) {
                return fail(format!("block {at} runs on no unit"));
            }
            for (unit, &cost) in block.cost.iter().enumerate() {
                if let Some(cost) = cost.filter(|cost| !cost.is_finite() || *cost < 0.0) {
                    return fail(format!("block {at} costs {cost} on {}, which is no time", problem.units[unit].name));
                }
                before[unit][at + 1] = before[unit][at] + cost.unwrap_or(0.0);
                refused[unit][at + 1] = refused[unit][at] + usize::from(cost.is_none());
            }
        }
        let mut names: BTreeMap<&str, usize> = BTreeMap::new();
        let mut resources = 0;
        let mut resource = Vec::with_capacity(units);
        for unit in &problem.units {
            let fresh = resources;
            let at = unit.resource.as_deref().map_or(fresh, |name| *names.entry(name).or_insert(fresh));
            resources += usize::from(at == fresh);
            resource.push(at);
        }
        let mut known: BTreeMap<u32, usize> = BTreeMap::new();
        let mut weight_count = 0;
        let mut weights = Vec::with_capacity(count);
        for block in &problem.blocks {
            let fresh = weight_count;
            let at = block.weights.map_or(fresh, |name| *known.entry(name).or_insert(fresh));
            weight_count += usize::from(at == fresh);
            weights.push((at, block.weight_bytes));
        }
        let most_handoffs = problem.most_handoffs.map_or(units - 1, |most| most as usize);
        Ok(Self { problem, units, count, resource, resources, before, refused, weights, weight_count, most_handoffs })
    }

    fn handoff(&self, block: usize, from: usize, to: usize) -> f64 {
        let k = self.units;
        self.problem.handoffs.get((block * k + from) * k + to).copied().unwrap_or(0.0)
    }

    /// Blocks `[first, end)` on a unit; infinite if one does not run.
    fn cost(&self, unit: usize, first: usize, end: usize) -> f64 {
        if self.refused[unit][end] > self.refused[unit][first] {
            return f64::INFINITY;
        }
        self.before[unit][end] - self.before[unit][first]
    }

    /// For each first block, the largest end whose weights fit the unit.
    fn fits_until(&self, unit: usize) -> Vec<usize> {
        let Some(limit) = self.problem.units[unit].memory_bytes else { return vec![self.count; self.count] };
        (0..self.count)
            .map(|first| {
                let mut resident = BTreeSet::new();
                let mut bytes = 0u64;
                let within = |&at: &usize| {
                    let (weights, size) = self.weights[at];
                    if resident.insert(weights) {
                        bytes = bytes.saturating_add(size);
                    }
                    bytes <= limit
                };
                first + (first..self.count).take_while(within).count()
            })
            .collect()
    }

    /// Each unit at most once: the least period, then the fewest stages, then the least latency that keeps the deadline.
    ///
    /// The least period alone is a bottleneck recurrence. With it as a limit on every stage, the least latency is a shortest
    /// path; where that misses the deadline the limit rises to the least stage time that meets it (latency falls as the limit
    /// rises), found by bisection over all stage times.
    fn without_revisits(&self) -> Option<Found> {
        let fits: Vec<Vec<usize>> = (0..self.units).map(|unit| self.fits_until(unit)).collect();
        let deadline = self.problem.deadline.unwrap_or(f64::INFINITY);
        let stages = Stages { model: self, fits: &fits };
        let least = stages.solve(f64::INFINITY, f64::max).best(f64::INFINITY, false)?.value;
        let within = |limit: f64| stages.solve(limit, |sum, time| sum + time).best(deadline, true);
        let found = within(least).or_else(|| {
            let mut limits = stages.times();
            limits.retain(|&time| time > least);
            limits.sort_unstable_by(f64::total_cmp);
            limits.dedup();
            let enough = limits.partition_point(|&limit| within(limit).is_none());
            within(*limits.get(enough)?)
        })?;
        let period = self.times(&found.stages).into_iter().fold(0.0, f64::max);
        Some(Found { stages: found.stages, period, latency: found.value })
    }

    /// Stage times, period and a cyclic schedule.
    fn plan(&self, stages: &[(usize, usize, usize)], exact: bool) -> StreamPlan {
        let times = self.times(stages);
        let mut loads = vec![0.0; self.resources];
        for (&(unit, ..), time) in stages.iter().zip(&times) {
            loads[self.resource[unit]] += time;
        }
        let period = loads.iter().copied().fold(0.0, f64::max);
        let starts = self.starts(stages, &times, period);
        let latency = starts.last().zip(times.last()).map_or(0.0, |(start, time)| start + time);
        let stage = |((&(unit, first, end), &time), &start)| Stage { unit, first, end, time, start };
        let busy = |unit: usize| -> f64 {
            stages.iter().zip(&times).filter(|((at, ..), _)| *at == unit).map(|(_, time)| time).sum()
        };
        StreamPlan {
            stages: stages.iter().zip(&times).zip(&starts).map(stage).collect(),
            period,
            latency,
            fill: latency,
            idle: (0..self.units).map(|unit| period - busy(unit)).collect(),
            exact,
        }
    }

    fn times(&self, stages: &[(usize, usize, usize)]) -> Vec<f64> {
        let time = |(at, &(unit, first, end)): (usize, &(usize, usize, usize))| {
            let received = at.checked_sub(1).map_or(0.0, |before| self.handoff(first, stages[before].0, unit));
            self.cost(unit, first, end) + received
        };
        stages.iter().enumerate().map(time).collect()
    }

    /// Starts of an item's stages in a schedule of that period: every resource repeats its stages back to back in stage order,
    /// beginning when the first of them is ready; a later one waits for its place in the cycle.
    fn starts(&self, stages: &[(usize, usize, usize)], times: &[f64], period: f64) -> Vec<f64> {
        // Where the next stage of a resource stands in its cycle.
        let mut place: Vec<Option<f64>> = vec![None; self.resources];
        let mut ready = 0.0;
        let mut starts = Vec::with_capacity(stages.len());
        for (&(unit, ..), time) in stages.iter().zip(times) {
            let slot = &mut place[self.resource[unit]];
            let start = match *slot {
                Some(slot) if period > 0.0 => slot + ((ready - slot) / period - 1e-9).ceil().max(0.0) * period,
                _ => ready,
            };
            let start = f64::max(start, ready);
            *slot = Some(start + time);
            starts.push(start);
            ready = start + time;
        }
        starts
    }

    fn why_not(&self) -> PlanError {
        let mut limits = vec![format!("{} handoffs at most", self.most_handoffs)];
        if let Some(deadline) = self.problem.deadline {
            limits.push(format!("a deadline of {deadline}"));
        }
        let limited = self.problem.units.iter().filter_map(|unit| Some((&unit.name, unit.memory_bytes?)));
        limits.extend(limited.map(|(name, bytes)| format!("{bytes} bytes on {name}")));
        PlanError::Stream { reason: format!("no division of the blocks fits {}; relax one", limits.join(", ")) }
    }
}

/// The recurrence over (block, set of used units, last unit).
struct Stages<'m, 'a> {
    model: &'m Model<'a>,
    /// `[unit][first]`: the largest end whose weights fit.
    fits: &'m [Vec<usize>],
}

/// Values of all states, and the state that each came from.
struct Solved {
    count: usize,
    units: usize,
    value: Vec<f64>,
    /// First block of the last stage and the unit before it.
    parent: Vec<(u32, u8)>,
}

/// A path through the states.
struct Path {
    value: f64,
    stages: Vec<(usize, usize, usize)>,
}

impl Stages<'_, '_> {
    /// `f(end, S, u) = min over first, v of join(f(first, S − u, v), time of the stage)` over stages within `limit`.
    fn solve(&self, limit: f64, join: impl Fn(f64, f64) -> f64) -> Solved {
        let Model { units: k, count: n, .. } = *self.model;
        // Sums in another order than the limit's differ by rounding.
        let limit = limit * (1.0 + 1e-12);
        let states = ((n + 1) * k) << k;
        let mut solved =
            Solved { count: n, units: k, value: vec![f64::INFINITY; states], parent: vec![(0, 0); states] };
        for end in 1..=n {
            for set in (1usize..1 << k).filter(|set| set.count_ones() as usize <= self.model.most_handoffs + 1) {
                for unit in (0..k).filter(|unit| set >> unit & 1 == 1) {
                    let rest = set & !(1 << unit);
                    let shares = |other: usize| self.model.resource[other] == self.model.resource[unit];
                    if (0..k).any(|other| rest >> other & 1 == 1 && shares(other)) {
                        continue;
                    }
                    let (mut best, mut parent) = (f64::INFINITY, (0, 0));
                    if rest == 0 {
                        let time = self.model.cost(unit, 0, end);
                        if time <= limit && time < f64::INFINITY && self.fits[unit][0] >= end {
                            best = time;
                        }
                    } else {
                        for first in (1..end).rev() {
                            let work = self.model.cost(unit, first, end);
                            // Longer stages only cost more and hold more.
                            if work > limit || work == f64::INFINITY || self.fits[unit][first] < end {
                                break;
                            }
                            for from in (0..k).filter(|from| rest >> from & 1 == 1) {
                                let before = solved.value[solved.at(first, rest, from)];
                                let time = work + self.model.handoff(first, from, unit);
                                let value = join(before, time);
                                if time <= limit && value < best {
                                    (best, parent) = (value, (first as u32, from as u8));
                                }
                            }
                        }
                    }
                    let at = solved.at(end, set, unit);
                    (solved.value[at], solved.parent[at]) = (best, parent);
                }
            }
        }
        solved
    }

    /// Times of all possible stages.
    fn times(&self) -> Vec<f64> {
        let Model { units: k, count: n, .. } = *self.model;
        let mut times = Vec::new();
        for unit in 0..k {
            for first in 0..n {
                for end in first + 1..=self.fits[unit][first] {
                    let work = self.model.cost(unit, first, end);
                    if work == f64::INFINITY {
                        break;
                    }
                    if first == 0 {
                        times.push(work);
                        continue;
                    }
                    let others = (0..k).filter(|&from| from != unit);
                    times.extend(others.map(|from| work + self.model.handoff(first, from, unit)));
                }
            }
        }
        times
    }
}

impl Solved {
    fn at(&self, block: usize, set: usize, unit: usize) -> usize {
        ((block << self.units) + set) * self.units + unit
    }

    /// The path with the least value, with the fewest stages before that if `fewest`, among those with a value of at most `most`.
    fn best(&self, most: f64, fewest: bool) -> Option<Path> {
        let mut best: Option<(f64, usize, usize)> = None;
        for set in 1usize..1 << self.units {
            for unit in 0..self.units {
                let value = self.value[self.at(self.count, set, unit)];
                if value == f64::INFINITY || value > most {
                    continue;
                }
                let better = best.is_none_or(|(least, chosen, _)| {
                    let order = set.count_ones().cmp(&chosen.count_ones());
                    if fewest { order.is_lt() || order.is_eq() && value < least } else { value < least }
                });
                if better {
                    best = Some((value, set, unit));
                }
            }
        }
        let (value, mut set, mut unit) = best?;
        let (mut end, mut stages) = (self.count, Vec::new());
        while end > 0 {
            let (first, from) = self.parent[self.at(end, set, unit)];
            stages.push((unit, first as usize, end));
            (end, set, unit) = (first as usize, set & !(1 << unit), usize::from(from));
        }
        stages.reverse();
        Some(Path { value, stages })
    }
}

/// Branch and bound over runs of blocks; loads only grow, so a partial plan at or above the best period is dropped.
struct Search<'m, 'a> {
    model: &'m Model<'a>,
    /// Cheapest cost of all blocks from here on, for the bound.
    cheapest_after: Vec<f64>,
    loads: Vec<f64>,
    /// Per unit, how often each weight is resident, and the bytes.
    resident: Vec<(Vec<u32>, u64)>,
    stages: Vec<(usize, usize, usize)>,
    best: Option<Found>,
    nodes: u64,
}

impl<'m, 'a> Search<'m, 'a> {
    fn new(model: &'m Model<'a>) -> Self {
        let mut cheapest_after = vec![0.0; model.count + 1];
        for (at, block) in model.problem.blocks.iter().enumerate().rev() {
            let least = block.cost.iter().flatten().copied().fold(f64::INFINITY, f64::min);
            cheapest_after[at] = cheapest_after[at + 1] + least;
        }
        Self {
            model,
            cheapest_after,
            loads: vec![0.0; model.resources],
            resident: vec![(vec![0; model.weight_count], 0); model.units],
            stages: Vec::new(),
            best: None,
            nodes: 0,
        }
    }

    fn run(&mut self) {
        self.extend(0, self.model.most_handoffs);
    }

    /// Above this a load cannot lead to a better plan (equal periods may still have fewer stages).
    fn limit(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.period * (1.0 + 1e-12))
    }

    fn extend(&mut self, first: usize, handoffs: usize) {
        let model = self.model;
        let last = self.stages.last().map(|&(unit, ..)| unit);
        let may_use = |unit: usize| {
            Some(unit) != last && (model.problem.revisits || self.stages.iter().all(|&(used, ..)| used != unit))
        };
        let candidates: Vec<usize> = (0..model.units).filter(|&unit| may_use(unit)).collect();
        for unit in candidates {
            let resource = model.resource[unit];
            let kept = (self.loads[resource], self.resident[unit].clone());
            let received = last.map_or(0.0, |from| model.handoff(first, from, unit));
            for end in first + 1..=model.count {
                self.nodes += 1;
                if self.nodes > MOST_NODES {
                    break;
                }
                let work = model.cost(unit, first, end);
                self.loads[resource] = kept.0 + received + work;
                if work == f64::INFINITY || self.loads[resource] > self.limit() || !self.take(unit, end - 1) {
                    break;
                }
                let total: f64 = self.loads.iter().sum::<f64>() + self.cheapest_after[end];
                if total > self.limit() * model.resources as f64 {
                    continue;
                }
                self.stages.push((unit, first, end));
                if end == model.count {
                    self.finish();
                } else if handoffs > 0 {
                    self.extend(end, handoffs - 1);
                }
                self.stages.pop();
            }
            (self.loads[resource], self.resident[unit]) = kept;
        }
    }

    /// Makes a block's weights resident; false if they do not fit.
    fn take(&mut self, unit: usize, block: usize) -> bool {
        let (weights, size) = self.model.weights[block];
        let (counts, bytes) = &mut self.resident[unit];
        counts[weights] += 1;
        if counts[weights] == 1 {
            *bytes = bytes.saturating_add(size);
        }
        self.model.problem.units[unit].memory_bytes.is_none_or(|limit| *bytes <= limit)
    }

    fn finish(&mut self) {
        let plan = self.model.plan(&self.stages, true);
        let found = Found { stages: self.stages.clone(), period: plan.period, latency: plan.latency };
        let in_time = self.model.problem.deadline.is_none_or(|deadline| plan.latency <= deadline);
        if in_time && better(&found, self.best.as_ref()) {
            self.best = Some(found);
        }
    }
}
