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
//! * **Priced load.** The same with transfers, which occupy their destination, and with weights by class of work: [`priced`].
//! * **Series.** A job that is before or after every other one (a cut) splits time: all before it end before it starts. The
//!   load bound then holds between every two cuts, given the units that both are on, and adds up with the critical path over them.
//! * **By contradiction.** If anything took less than v, jobs that are too long on a unit could not be there: [`refute`].
//! * **Memory.** Where units limit what they hold, the same with a price of every byte on such a unit: [`memory`].
//! * **Energy.** Work and transfers at prices of watts above idling, as a minimum cut for two units and by the dual of [`priced`] for
//!   more, plus idling for as long as the makespan's bound.

mod blocks;
mod enumerate;
mod least;
pub(crate) mod memory;
pub(crate) mod part;
pub(crate) mod priced;
mod refute;

pub(crate) use blocks::Blocks;
pub(crate) use least::LeastTimes;

use crate::mincut::charged_cut;
use crate::problem::{Goal, Problem};
use crate::request::PlanOptions;
use crate::view::CostView;
use least::Series;
use part::{Border, Part};
use priced::{Pricing, moments};
use refute::Stretch;

/// What a bound rests on.
#[derive(Debug, Clone, PartialEq)]
pub enum BoundKind {
    /// The longest chain of dependent work.
    CriticalPath,
    /// Chains over cuts, with load bounds between them.
    Series,
    /// The load of units: one weight λ per unit.
    Load(Vec<f64>),
    /// The load of units with transfers.
    PricedLoad,
    /// Every job at its least energy, plus idling for the makespan's bound.
    Energy,
    /// Every request at its own critical path.
    Requests,
    /// Any of these with prices of memory, where units limit it.
    Memory,
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

/// How much may be computed for a bound, in simple steps (about a nanosecond each).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Effort(pub f64);

impl Effort {
    /// Within a tenth of a second.
    pub const QUICK: Self = Self(6e7);
    /// Within a few seconds: where the bound is what is wanted.
    pub const THOROUGH: Self = Self(2e9);

    /// A small part of what is left of a budget, at most [`Self::QUICK`].
    pub fn within(options: &PlanOptions) -> Self {
        // Nanoseconds: a tenth of the milliseconds left.
        options.left_ms().map_or(Self::QUICK, |left| Self((left.max(0.0) * 1e5).min(Self::QUICK.0)))
    }

    /// Rounds of the dual ascent over some jobs that this pays for.
    pub fn rounds(self, jobs: usize, units: usize, least: usize, most: usize) -> usize {
        let round = jobs.max(1) as f64 * 8.0 * (units << units.min(priced::MOST_UNITS)) as f64;
        ((self.0 / round) as usize).clamp(least, most)
    }
}

/// A lower bound on the value of every schedule of the problem.
pub fn model_bound(problem: &Problem) -> Bound {
    bound_within(problem, Effort::QUICK)
}

/// The same for as much as it may cost.
pub(crate) fn bound_within(problem: &Problem, effort: Effort) -> Bound {
    bound_by(problem, &LeastTimes::new(problem), effort)
}

/// The same with much more time for it.
pub fn thorough_bound(problem: &Problem) -> Bound {
    bound_by(problem, &LeastTimes::new(problem), Effort::THOROUGH)
}

/// A lower bound on every plan of segments, given the problem whose jobs take the least that they can add to any segment. Every
/// segment costs something beyond that ([`CostView::least_start`]), and starts when all that it reads is there.
pub(crate) fn bound_over_segments(least: &Problem, views: &[&CostView<'_>], effort: Effort) -> f64 {
    let mut times = LeastTimes::new(least);
    times.starts(views);
    bound_by(least, &times, effort).value
}

fn bound_by(problem: &Problem, least: &LeastTimes, effort: Effort) -> Bound {
    match problem.goal() {
        Goal::Makespan => makespan_bound(problem, least, effort),
        Goal::WeightedCompletion => {
            let value = |least: &LeastTimes| completions(problem, &by_request(problem, least)).0;
            let step = (problem.jobs().len() * problem.units().len()) as f64 * 40.0;
            let full = |least: &LeastTimes| Bound { value: value(least), kind: BoundKind::Requests };
            memory::with_memory(problem, least, memory::Limits::narrowing(effort, step), value, full)
        }
        Goal::Energy => {
            let idle = problem.idle_watts().unwrap_or(0.0);
            // In millijoules, as charges are.
            let work = |least: &LeastTimes, effort: Effort| 1e3 * work_above_idle(problem, least, idle, effort);
            let step = problem.jobs().len() as f64 * 400.0;
            let narrowing = memory::Limits::narrowing(effort, step);
            let work = memory::with_memory(
                problem,
                least,
                narrowing,
                |least| work(least, Effort(effort.0 / 100.0)),
                |least| Bound { value: work(least, effort), kind: BoundKind::Energy },
            );
            let idling = if idle > 0.0 { makespan_bound(problem, least, effort).value } else { 0.0 };
            Bound { value: ((work.value + idle * idling) / 1e3).max(0.0), kind: BoundKind::Energy }
        }
    }
}

/// The weighted mean of what each request takes at least by its own critical path, and the earliest ends that show it.
pub(crate) fn completions(problem: &Problem, least: &LeastTimes) -> (f64, Vec<f64>) {
    let ends = least.earliest_ends(problem);
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
    (if weights > 0.0 { sum / weights } else { 0.0 }, ends)
}

/// The same with charges that count in the mean as often as they are: the time of a request counts there by its weight only, so what
/// its jobs are charged is divided by its share of all weights. (A path stays within its request, so nothing is charged twice.)
pub(crate) fn by_request(problem: &Problem, least: &LeastTimes) -> LeastTimes {
    let total: f64 = problem.requests().iter().map(|request| request.weight).sum();
    let (jobs, units) = (problem.jobs(), problem.units().len());
    let times = |at: usize| total / problem.requests()[jobs[at / units].request as usize].weight;
    least.charging(least.charges.iter().enumerate().map(|(at, charge)| charge * times(at)).collect())
}

/// The least energy of work and transfers beyond idling, in joules.
fn work_above_idle(problem: &Problem, least: &LeastTimes, idle: f64, effort: Effort) -> f64 {
    let work: f64 = (0..problem.jobs().len()).map(|job| least.joules(problem, job, idle)).sum();
    let above = |unit: usize| problem.units()[unit].watts.unwrap_or(0.0) - idle;
    let units = problem.units().len();
    // With transfers, if no unit draws less than idling.
    if (0..units).any(|unit| above(unit) < 0.0) {
        return work;
    }
    let prices: Vec<f64> = (0..units).map(|unit| above(unit) * least.least_factor(unit)).collect();
    let first = least.first_start(&prices);
    let least_cost = charged_cut(problem, &prices, &least.charges).or_else(|| {
        (units <= priced::MOST_UNITS).then(|| {
            let factor = |unit: usize, class: usize| {
                if least.of_segments() { least.least_factor(unit) } else { least.factor[unit][class] }
            };
            let weights: Vec<f64> = (0..2 * units).map(|at| above(at / 2) * factor(at / 2, at % 2)).collect();
            let part = Part::whole(problem, !least.of_segments(), &least.charges);
            let rounds = effort.rounds(problem.jobs().len(), units, 0, 200);
            Pricing::new(&part, &[]).at_prices(&weights, rounds).0
        })
    });
    least_cost.map_or(work, |cost| work.max((cost + first) / 1e3))
}

fn makespan_bound(problem: &Problem, least: &LeastTimes, effort: Effort) -> Bound {
    let blocks = Blocks::new(problem);
    let all: Vec<u32> = (0..problem.jobs().len() as u32).collect();
    let rough = |least: &LeastTimes| {
        let (ends, rest) = least.ends_over_cuts(problem, &blocks, None);
        let series = rest.max(problem_end(problem, least, &ends));
        series.max(least.load(problem, &all, true, BLOCK_ROUNDS).0 + earliest(problem))
    };
    let step = (all.len() * problem.units().len() * BLOCK_ROUNDS) as f64 * 4.0;
    let narrowing = memory::Limits::narrowing(effort, step);
    memory::with_memory(problem, least, narrowing, rough, |least| makespan_at(problem, least, &blocks, effort))
}

/// No request arrives before.
fn earliest(problem: &Problem) -> f64 {
    let earliest = problem.requests().iter().map(|request| request.release_ms).fold(f64::INFINITY, f64::min);
    if earliest.is_finite() { earliest } else { 0.0 }
}

/// The load bound of a stream's item, memory limits included, in milliseconds.
pub(crate) fn stream_bound(problem: &Problem, rounds: usize) -> f64 {
    let all: Vec<u32> = (0..problem.jobs().len() as u32).collect();
    let load = |least: &LeastTimes| least.load(problem, &all, true, rounds).0;
    let step = (all.len() * problem.units().len() * rounds) as f64 * 2.0;
    let narrowing = memory::Limits::narrowing(Effort::QUICK, step);
    let full = |least: &LeastTimes| Bound { value: load(least), kind: BoundKind::PricedLoad };
    memory::with_memory(problem, &LeastTimes::new(problem), narrowing, load, full).value
}

fn makespan_at(problem: &Problem, least: &LeastTimes, blocks: &Blocks, effort: Effort) -> Bound {
    let units = problem.units().len();
    let path = problem_end(problem, least, &least.earliest_ends(problem));
    let classed = !least.of_segments();
    let moments = if units <= priced::MOST_UNITS { moments(problem, classed) } else { Vec::new() };
    let series = Series { moments: &moments, effort: Effort(effort.0 / 2.0), classed };
    let (ends, rest) = least.ends_over_cuts(problem, blocks, Some(&series));
    let series = rest.max(problem_end(problem, least, &ends));
    let all: Vec<u32> = (0..problem.jobs().len() as u32).collect();
    let rounds = if all.len() > MANY_JOBS { ROUNDS / 4 } else { ROUNDS };
    let (load, weights) = least.load(problem, &all, true, rounds);
    let earliest = earliest(problem);
    let load = load + earliest;
    let paid = Effort(effort.0 / 2.0).rounds(all.len(), units, 0, 1_000);
    let priced_rounds = paid.min(240);
    // Transfers seldom double the load: where the path is much longer there is nothing to gain.
    let priced = if moments.is_empty() || load < 0.4 * series || all.len() < 2 || priced_rounds < 2 {
        0.0
    } else {
        let part = Part::whole(problem, classed, &least.charges);
        let start: Vec<f64> = (0..2 * units).map(|at| weights[at / 2]).collect();
        let (priced, witness) =
            Pricing::new(&part, &moments).search(Some(&start), priced_rounds / 2, priced_rounds / 2);
        let mut local = vec![0; all.len()];
        for (at, &job) in problem.topological().iter().enumerate() {
            local[job as usize] = at as u32;
        }
        let charges = &least.charges;
        let stretch = Stretch {
            problem,
            least,
            jobs: problem.topological(),
            border: Border { local: &local, inputs: true, outputs: true, classed, charges, ..Border::default() },
            arrivals: true,
            moments: &moments,
            rounds: (paid - priced_rounds) / 18,
            nodes: refute::nodes(Effort(effort.0 / 4.0), 1),
            earliest,
        };
        stretch.bound((priced + earliest).max(series), &witness.weights)
    };
    let kinds = [
        (series, BoundKind::Series),
        (path, BoundKind::CriticalPath),
        (load, BoundKind::Load(weights)),
        (priced, BoundKind::PricedLoad),
    ];
    let mut best = Bound { value: 0.0, kind: BoundKind::CriticalPath };
    for (value, kind) in kinds {
        if value > best.value || kind == BoundKind::CriticalPath && value >= best.value {
            best = Bound { value, kind };
        }
    }
    best
}

/// Most units of a bound that somebody else is to verify by trying all placements.
const MOST_VERIFIED_UNITS: usize = 4;

/// A bound that rests on all placements alone: at least `known`, at prices of units' time by unit and class, which are returned scaled so that
/// no moment does more than 1 of priced work in a millisecond. `None` for too many jobs or units.
pub(crate) fn placed_bound(
    problem: &Problem,
    least: &LeastTimes,
    classed: bool,
    known: f64,
    weights: &[f64],
    nodes: u64,
) -> Option<(f64, Vec<f64>)> {
    let units = problem.units().len();
    if problem.jobs().len() > refute::MOST_PLACED || units > MOST_VERIFIED_UNITS || known <= 0.0 {
        return None;
    }
    let moments = moments(problem, classed);
    let work = |moment: &priced::Moment| moment.iter().map(|&(at, rate)| weights[at] * rate).sum::<f64>();
    let most = moments.iter().map(work).fold(0.0, f64::max);
    if most <= 0.0 {
        return None;
    }
    let weights: Vec<f64> = weights.iter().map(|weight| weight / most).collect();
    let mut local = vec![0; problem.jobs().len()];
    for (at, &job) in problem.topological().iter().enumerate() {
        local[job as usize] = at as u32;
    }
    let stretch = Stretch {
        problem,
        least,
        jobs: problem.topological(),
        border: Border { local: &local, inputs: true, outputs: true, classed, ..Border::default() },
        arrivals: false,
        moments: &moments,
        // Loads of what is left have witnesses of their own.
        rounds: 0,
        nodes,
        earliest: 0.0,
    };
    Some((stretch.bound(known, &weights), weights))
}

/// The prices of units at which the load bound is best.
pub(crate) fn load_weights(problem: &Problem) -> Vec<f64> {
    let all: Vec<u32> = (0..problem.jobs().len() as u32).collect();
    LeastTimes::new(problem).load(problem, &all, true, ROUNDS / 4).1
}

fn problem_end(problem: &Problem, least: &LeastTimes, ends: &[f64]) -> f64 {
    (0..problem.jobs().len()).map(|job| least.end_with_handover(problem, ends, job)).fold(0.0, f64::max)
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
