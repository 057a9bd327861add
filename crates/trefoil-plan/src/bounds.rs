//! Lower bounds on what any schedule of a [`Problem`] costs.
//!
//! Every number here holds for all schedules under the problem's cost model: work is never faster than its time alone times
//! the smallest slowdown factor its unit can see, whoever runs beside it.
//!
//! * **Critical path.** `c(j, u)`, the earliest end of job j on unit u: the latest of its inputs, each from the unit that
//!   makes that earliest, transfer included, plus its own time.
//! * **Load.** Jobs are divided among units at will, and time among the sets S of units that can be busy at once (that share no
//!   resource), in which unit u works at the rate `1/f(u, S)`: `min Σ_S τ_S` so that `Σ_j x_ju · t_ju ≤ Σ_{S ∋ u} τ_S / f(u, S)`
//!   and `Σ_u x_ju = 1`. By duality that is `max_λ [Σ_j min_u λ_u t_ju] / [max_S Σ_{u ∈ S} λ_u / f(u, S)]` over weights λ of the
//!   units, and **any** λ gives a valid bound, so λ is the certificate.
//! * **Series.** A job that is before or after every other one (a cut) splits time: all before it end before it starts. The
//!   load bound then holds between every two cuts, and adds up with the critical path over them.

use crate::engine::Rows;
use crate::factors::class_index;
use crate::mincut::minimum_cut;
use crate::problem::{Goal, Problem};
use trefoil_core::OperatorClass;

/// What a bound rests on.
#[derive(Debug, Clone, PartialEq)]
pub enum BoundKind {
    /// The longest chain of dependent work.
    CriticalPath,
    /// Chains over cuts, with load bounds between them.
    Series,
    /// The load of units: one weight λ per unit.
    Load(Vec<f64>),
    /// Every job at its least energy, plus idling for the makespan's bound.
    Energy,
    /// Every request at its own critical path.
    Requests,
    /// Every assignment and order was searched.
    Search,
}

/// A lower bound on the goal's value.
#[derive(Debug, Clone, PartialEq)]
pub struct Bound {
    /// The bound, in the goal's unit.
    pub value: f64,
    /// What it rests on.
    pub kind: BoundKind,
}

/// Rounds of weight updates for a whole problem and between two cuts.
const ROUNDS: usize = 300;
const BLOCK_ROUNDS: usize = 40;
/// Problems above this many jobs get fewer rounds, so that bounding stays cheap.
const MANY_JOBS: usize = 4_000;

/// A lower bound on the value of every schedule of the problem.
pub fn model_bound(problem: &Problem) -> Bound {
    let least = LeastTimes::new(problem);
    let ends = least.earliest_ends(problem);
    let path = problem_end(problem, &least, &ends);
    match problem.goal() {
        Goal::Makespan => {
            let (ends, rest) = least.ends_over_cuts(problem, &Blocks::new(problem));
            let series = rest.max(problem_end(problem, &least, &ends));
            let all: Vec<u32> = (0..problem.jobs().len() as u32).collect();
            let rounds = if all.len() > MANY_JOBS { ROUNDS / 4 } else { ROUNDS };
            let (load, weights) = least.load(problem, &all, true, rounds);
            let earliest = problem.requests().iter().map(|request| request.release_ms).fold(f64::INFINITY, f64::min);
            let load = load + if earliest.is_finite() { earliest } else { 0.0 };
            if load >= series && load > path {
                Bound { value: load, kind: BoundKind::Load(weights) }
            } else if series > path {
                Bound { value: series, kind: BoundKind::Series }
            } else {
                Bound { value: path, kind: BoundKind::CriticalPath }
            }
        }
        Goal::WeightedCompletion => {
            let mut completion = vec![0.0f64; problem.requests().len()];
            for (job, details) in problem.jobs().iter().enumerate() {
                let slot = &mut completion[details.request as usize];
                *slot = slot.max(least.end_with_handover(problem, &ends, job));
            }
            let (mut sum, mut weights) = (0.0, 0.0);
            for (request, end) in problem.requests().iter().zip(completion) {
                sum += request.weight * (end - request.release_ms).max(0.0);
                weights += request.weight;
            }
            Bound { value: if weights > 0.0 { sum / weights } else { 0.0 }, kind: BoundKind::Requests }
        }
        Goal::Energy => {
            let idle = problem.idle_watts().unwrap_or(0.0);
            let work: f64 = (0..problem.jobs().len()).map(|job| least.joules(problem, job, idle)).sum();
            // Two units: the least sum with transfers is a minimum cut, if no unit draws less than idling.
            let more = |unit: usize| {
                let factor = least.factor[unit][0].min(least.factor[unit][1]);
                (problem.units()[unit].watts.unwrap_or(0.0) - idle) * factor
            };
            let prices: Vec<f64> = (0..problem.units().len()).map(more).collect();
            let cut = if prices.iter().all(|&price| price >= 0.0) { minimum_cut(problem, &prices) } else { None };
            let work = cut.map_or(work, |(value, _)| work.max(value / 1e3));
            Bound { value: (work + idle * path / 1e3).max(0.0), kind: BoundKind::Energy }
        }
    }
}

/// The prices of units at which the load bound is best.
pub(crate) fn load_weights(problem: &Problem) -> Vec<f64> {
    let all: Vec<u32> = (0..problem.jobs().len() as u32).collect();
    LeastTimes::new(problem).load(problem, &all, true, ROUNDS / 4).1
}

fn problem_end(problem: &Problem, least: &LeastTimes, ends: &[f64]) -> f64 {
    (0..problem.jobs().len()).map(|job| least.end_with_handover(problem, ends, job)).fold(0.0, f64::max)
}

/// The least that anything can take, whoever runs beside it.
pub(crate) struct LeastTimes {
    units: usize,
    /// Smallest slowdown factor by unit and class.
    factor: Vec<[f64; 2]>,
    /// Row-major jobs × units.
    ms: Vec<f64>,
    /// Sets of units that can be busy at once, with the fastest that each can be then.
    sets: Vec<Vec<(usize, f64)>>,
}

/// Above this many units sets are not listed; all of them then count as free of slowdown and of shared resources.
const LISTED_UNITS: usize = 10;

/// Sets of units that share no resource, and the rate of each unit in them.
fn busy_sets(problem: &Problem) -> Vec<Vec<(usize, f64)>> {
    let units = problem.units().len();
    let factors = &problem.platform.factors;
    if units > LISTED_UNITS {
        let least = |unit| factors.least(unit, 0, |_| true).min(factors.least(unit, 1, |_| true));
        return vec![(0..units).map(|unit| (unit, 1.0 / least(unit))).collect()];
    }
    (1usize..1 << units)
        .map(|code| (0..units).filter(|unit| code >> unit & 1 == 1).collect::<Vec<_>>())
        .filter(|set| set.iter().all(|&one| set.iter().all(|&two| one == two || !problem.conflict(one, two))))
        .map(|set| set.iter().map(|&unit| (unit, 1.0 / factors.least_beside(unit, &set))).collect())
        .collect()
}

impl LeastTimes {
    pub fn new(problem: &Problem) -> Self {
        let units = problem.units().len();
        let factor: Vec<[f64; 2]> = (0..units)
            .map(|unit| {
                [0, 1].map(|class| problem.platform.factors.least(unit, class, |other| !problem.conflict(unit, other)))
            })
            .collect();
        let dense = &problem.dense;
        let ms = dense
            .ms
            .iter()
            .zip(&dense.class)
            .enumerate()
            .map(|(at, (ms, &class))| ms * factor[at % units][class as usize])
            .collect();
        Self { units, factor, ms, sets: busy_sets(problem) }
    }

    /// Smallest factor of a class of work on a unit.
    pub fn factor(&self, unit: usize, class: OperatorClass) -> f64 {
        self.factor[unit][class_index(class)]
    }

    pub fn ms(&self, job: usize, unit: usize) -> f64 {
        self.ms[job * self.units + unit]
    }

    /// Smallest factor of transfers to a unit.
    pub fn transfer_factor(&self, unit: usize) -> f64 {
        self.factor[unit][1]
    }

    /// `c(j, u)`, row-major jobs × units.
    pub fn earliest_ends(&self, problem: &Problem) -> Vec<f64> {
        self.ends_over_cuts(problem, &Blocks::default()).0
    }

    /// The same with the loads between cuts, and the earliest end of what follows the last cut.
    fn ends_over_cuts(&self, problem: &Problem, blocks: &Blocks) -> (Vec<f64>, f64) {
        let (dense, units) = (&problem.dense, self.units);
        let mut ends = vec![f64::INFINITY; self.ms.len()];
        let mut before_cut = 0.0;
        for &job in &dense.order {
            let job = job as usize;
            let cut = blocks.number.get(job).copied().flatten();
            let mut floor = dense.release[job];
            if let Some(inside) = cut.map(|cut| &blocks.inside[cut]).filter(|inside| inside.len() > 1) {
                // Handovers to the host may end after the cut.
                floor = floor.max(before_cut + self.load(problem, inside, false, BLOCK_ROUNDS).0);
            }
            for unit in 0..units {
                let mut start = floor;
                for &tensor in dense.inputs.row(job) {
                    let tensor = tensor as usize;
                    let price = |from: usize| dense.transfer(tensor, from, unit) * self.transfer_factor(unit);
                    let there = match dense.producer[tensor] {
                        u32::MAX => dense.tensor_release[tensor] + price(units),
                        maker => (0..units)
                            .map(|from| ends[maker as usize * units + from] + price(from))
                            .fold(f64::INFINITY, f64::min),
                    };
                    start = start.max(there);
                }
                ends[job * units + unit] = start + self.ms(job, unit);
            }
            if cut.is_some() {
                before_cut = (0..units).map(|unit| ends[job * units + unit]).fold(f64::INFINITY, f64::min);
            }
        }
        let rest = blocks.inside.last().map_or(0.0, |inside| self.load(problem, inside, true, BLOCK_ROUNDS).0);
        (ends, before_cut + rest)
    }

    /// Earliest end of a job and of handing over what it makes for the host.
    pub fn end_with_handover(&self, problem: &Problem, ends: &[f64], job: usize) -> f64 {
        let (dense, units) = (&problem.dense, self.units);
        (0..units)
            .map(|unit| ends[job * units + unit] + self.handover(dense.outputs.row(job), problem, unit))
            .fold(f64::INFINITY, f64::min)
    }

    /// Time to hand over a job's outputs from a unit.
    fn handover(&self, outputs: &[u32], problem: &Problem, unit: usize) -> f64 {
        let handed = outputs.iter().map(|&tensor| problem.dense.to_host[tensor as usize * self.units + unit]);
        handed.sum::<f64>() * self.transfer_factor(unit)
    }

    /// The load bound of some jobs, with or without handing over their outputs, and the weights that show it.
    pub fn load(&self, problem: &Problem, jobs: &[u32], handovers: bool, rounds: usize) -> (f64, Vec<f64>) {
        let units = self.units;
        let dense = &problem.dense;
        let times: Vec<f64> = jobs
            .iter()
            .flat_map(|&job| (0..units).map(move |unit| (job as usize, unit)))
            .map(|(job, unit)| {
                let handed = if handovers { dense.outputs.row(job) } else { &[] };
                let handed = handed.iter().map(|&tensor| dense.to_host[tensor as usize * units + unit]);
                dense.ms(job, unit) + handed.sum::<f64>()
            })
            .collect();
        let mut weights = vec![1.0; units];
        let mut best = (0.0, weights.clone());
        let mut loads = vec![0.0; units];
        for round in 0..rounds.max(1) {
            // In one millisecond the busiest set does this much weighted work.
            let (most, set) = self.most_work(&weights);
            for weight in &mut weights {
                *weight /= most;
            }
            loads.fill(0.0);
            let mut value = 0.0;
            for row in times.chunks_exact(units) {
                let (mut least, mut chosen) = (f64::INFINITY, 0);
                for (unit, (time, weight)) in row.iter().zip(&weights).enumerate() {
                    if time.is_finite() && time * weight < least {
                        least = time * weight;
                        chosen = unit;
                    }
                }
                value += least;
                loads[chosen] += row[chosen];
            }
            if value > best.0 {
                best = (value, weights.clone());
            }
            // Ascend `value − T · work`: what is loaded beyond what the set can do in that time weighs more.
            let mut slope: Vec<f64> = loads.clone();
            for &(unit, rate) in set {
                slope[unit] -= value * rate;
            }
            let steepest = slope.iter().fold(0.0f64, |most, slope| most.max(slope.abs()));
            if steepest <= value * 1e-9 {
                break;
            }
            let pace = 0.5 / (1.0 + round as f64).sqrt();
            for (weight, slope) in weights.iter_mut().zip(&slope) {
                *weight *= (pace * slope / steepest).exp();
            }
        }
        best
    }

    /// The set of units that does the most weighted work in a unit of time, with their rates.
    fn most_work(&self, weights: &[f64]) -> (f64, &[(usize, f64)]) {
        let work = |set: &Vec<(usize, f64)>| set.iter().map(|&(unit, rate)| weights[unit] * rate).sum::<f64>();
        let best = self.sets.iter().map(|set| (work(set), set)).max_by(|a, b| a.0.total_cmp(&b.0));
        best.map_or((1.0, &[][..]), |(work, set)| (work, set.as_slice()))
    }

    /// Least energy of a job beyond idling, in joules; its outputs' handovers included.
    fn joules(&self, problem: &Problem, job: usize, idle: f64) -> f64 {
        let dense = &problem.dense;
        (0..self.units)
            .filter(|&unit| dense.ms(job, unit).is_finite())
            .map(|unit| {
                let more = problem.units()[unit].watts.unwrap_or(0.0) - idle;
                let time = if more >= 0.0 {
                    self.ms(job, unit) + self.handover(dense.outputs.row(job), problem, unit)
                } else {
                    // Drawing less than idling: the longest it can take.
                    let class = dense.class[job * self.units + unit] as usize;
                    let made = dense.outputs.row(job).iter();
                    let handed: f64 = made.map(|&tensor| dense.to_host[tensor as usize * self.units + unit]).sum();
                    let read: f64 = dense
                        .inputs
                        .row(job)
                        .iter()
                        .map(|&tensor| {
                            (0..=self.units).map(|from| dense.transfer(tensor as usize, from, unit)).fold(0.0, f64::max)
                        })
                        .sum();
                    let factors = &problem.platform.factors;
                    dense.ms(job, unit) * factors.most(unit, class) + (handed + read) * factors.most(unit, 1)
                };
                more * time / 1e3
            })
            .fold(f64::INFINITY, f64::min)
    }
}

/// Cuts (jobs that are before or after every other one) and what lies between them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Blocks {
    /// Per job: its number among the cuts.
    pub number: Vec<Option<usize>>,
    /// Jobs before the first cut, between cuts, after the last; one more than there are cuts.
    pub inside: Vec<Vec<u32>>,
}

impl Blocks {
    pub fn new(problem: &Problem) -> Self {
        let dense = &problem.dense;
        let count = problem.jobs().len();
        let forward = alone(count, &dense.before, &dense.after);
        let backward = alone(count, &dense.after, &dense.before);
        let mut number = vec![None; count];
        let mut inside = vec![Vec::new()];
        for &job in &dense.order {
            // Both passes have all other jobs behind them once, or twice those that are neither before nor after.
            let cut = forward[job as usize]
                .zip(backward[job as usize])
                .is_some_and(|(before, after)| before + after + 1 == count);
            if cut {
                number[job as usize] = Some(inside.len() - 1);
                inside.push(Vec::new());
            } else if let Some(block) = inside.last_mut() {
                block.push(job);
            }
        }
        Self { number, inside }
    }
}

/// How many jobs went before a job (Kahn), if it was the only ready one when its turn came: all that was left came after it.
fn alone(count: usize, before: &Rows, after: &Rows) -> Vec<Option<usize>> {
    let mut waiting: Vec<usize> = (0..count).map(|job| before.row(job).len()).collect();
    let mut ready: Vec<u32> = (0..count as u32).filter(|&job| waiting[job as usize] == 0).collect();
    let mut result = vec![None; count];
    let mut gone = 0;
    while let Some(job) = ready.pop() {
        result[job as usize] = ready.is_empty().then_some(gone);
        gone += 1;
        for &next in after.row(job as usize) {
            waiting[next as usize] -= 1;
            if waiting[next as usize] == 0 {
                ready.push(next);
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PlanRequest;
    use crate::testing::{ProfileBuilder, graph};

    /// Oracle: with two units and no slowdown the fractional assignment gives jobs to unit 0 in the order of how much it is
    /// better there, and divides one.
    #[test]
    fn loads_of_two_units_are_those_of_the_sorted_split() {
        let mut numbers = crate::testing::Numbers(77);
        let mut roll = || 0.05 + numbers.next().unwrap_or(0.0);
        for count in [1, 2, 3, 7, 40, 300] {
            let graph = graph(&vec![1; count], &[]);
            let times: Vec<(f64, f64)> = (0..count).map(|_| (roll(), roll())).collect();
            let builder = ProfileBuilder::new(&graph).cpus(2).transfers(&[(0, 0.0)]);
            let builder = builder
                .operators(0, &times.iter().map(|times| Some(times.0)).collect::<Vec<_>>())
                .operators(1, &times.iter().map(|times| Some(times.1)).collect::<Vec<_>>());
            let problem = Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
            let mut sorted = times.clone();
            sorted.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
            let (mut first, mut second) = (0.0, times.iter().map(|times| times.1).sum::<f64>());
            let mut optimum = f64::INFINITY;
            for &(one, two) in &sorted {
                // The split of this job at which both units end together, if there is one.
                let share = ((second - first) / (one + two)).clamp(0.0, 1.0);
                optimum = optimum.min(f64::max(first + share * one, second - share * two));
                first += one;
                second -= two;
            }
            let jobs: Vec<u32> = (0..count as u32).collect();
            let (found, weights) = LeastTimes::new(&problem).load(&problem, &jobs, true, ROUNDS);
            assert!(found <= optimum * (1.0 + 1e-9), "{count}: {found} above {optimum}");
            assert!(found >= optimum * 0.995, "{count}: {found} far below {optimum}");
            // Anybody can check the weights.
            let shown: f64 = times.iter().map(|times| (times.0 * weights[0]).min(times.1 * weights[1])).sum();
            assert!((shown / (weights[0] + weights[1]) - found).abs() < 1e-9 * found);
        }
    }

    #[test]
    fn cuts_are_the_jobs_that_nothing_runs_beside() {
        // 0 → {1, 2} → 3 → 4, and 5 beside everything but 0 and 4 in the second graph.
        let edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)];
        let with_skip = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 4)];
        for (count, edges, cuts) in [
            (5, edges.as_slice(), vec![0, 3, 4]),
            (5, &with_skip, vec![0, 3, 4]),
            (6, &[(0, 1), (0, 2), (1, 3), (2, 3), (3, 5), (0, 4), (4, 5)], vec![0, 5]),
            (2, &[], vec![]),
        ] {
            let graph = graph(&vec![1; count], edges);
            let builder = ProfileBuilder::new(&graph).cpus(2).transfers(&[(0, 0.0)]);
            let builder = builder.operators(0, &vec![Some(1.0); count]).operators(1, &vec![Some(1.0); count]);
            let problem = Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
            let blocks = Blocks::new(&problem);
            let found: Vec<usize> = (0..count).filter(|&job| blocks.number[job].is_some()).collect();
            assert_eq!(found, cuts);
            assert_eq!(blocks.inside.iter().map(Vec::len).sum::<usize>() + cuts.len(), count);
        }
    }
}
