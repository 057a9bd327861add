//! Exact search for small problems: every assignment of jobs to units, every order on every resource, by branch and bound.
//!
//! The outer search (here) assigns jobs in topological order and prunes by the critical path, the loads of what is assigned (transfers
//! included) and, at the prices of units that bound the load best, the work of everything. For
//! a whole assignment the inner search ([`super::orders`]) tries all orders.

use super::decode::{Choice, Decoder};
use super::orders::{Inner, Waiting};
use crate::bounds::LeastTimes;
use crate::problem::{Problem, Schedule, Score};

/// Rounds of the search for prices of units.
const PRICE_ROUNDS: usize = 200;

/// Most search nodes, outer and inner together.
pub(crate) const NODE_LIMIT: u64 = 3_000_000;

/// Best schedule found, and whether it is proven best.
pub(crate) struct Exact {
    pub schedule: Option<Schedule>,
    pub score: Score,
    pub complete: bool,
    pub nodes: u64,
}

/// Searches for a schedule that is better than `incumbent`; gives up after `limit` nodes.
pub(crate) fn branch_and_bound(problem: &Problem, incumbent: Score, limit: u64, waiting: Waiting) -> Exact {
    let least = LeastTimes::new(problem);
    let free = least.earliest_ends(problem);
    let all: Vec<u32> = (0..problem.jobs().len() as u32).collect();
    let prices = least.normalised(&least.load(problem, &all, true, PRICE_ROUNDS).1);
    let mut place = vec![0u32; all.len()];
    let mut rest = vec![0.0; all.len() + 1];
    for (at, &job) in problem.topological().iter().enumerate().rev() {
        place[job as usize] = at as u32;
        let cheapest = (0..prices.len()).map(|unit| prices[unit] * with_handovers(problem, job as usize, unit));
        rest[at] = rest[at + 1] + cheapest.fold(f64::INFINITY, f64::min);
    }
    let mut search = Outer {
        problem,
        least: &least,
        free,
        place,
        prices,
        rest,
        priced: 0.0,
        decoder: Decoder::new(problem),
        unit: vec![0; problem.jobs().len()],
        ends: vec![0.0; problem.jobs().len()],
        load: vec![0.0; problem.resources().len()],
        best: Exact { schedule: None, score: incumbent, complete: true, nodes: 0 },
        limit,
        waiting,
    };
    search.assign(0);
    search.best
}

/// A job's time on a unit with handing its outputs over, undisturbed.
fn with_handovers(problem: &Problem, job: usize, unit: usize) -> f64 {
    let dense = &problem.dense;
    let handed = dense.outputs.row(job).iter().map(|&tensor| dense.to_host[tensor as usize * dense.units + unit]);
    dense.ms(job, unit) + handed.sum::<f64>()
}

struct Outer<'p> {
    problem: &'p Problem,
    least: &'p LeastTimes,
    /// Earliest ends when nothing is assigned, row-major jobs × units.
    free: Vec<f64>,
    /// Place of each job in the topological order.
    place: Vec<u32>,
    /// Of units: no set of them that can be busy at once does more than 1 of priced work in a millisecond.
    prices: Vec<f64>,
    /// The least priced work of all jobs from each place on.
    rest: Vec<f64>,
    /// The priced work of what is assigned, transfers included.
    priced: f64,
    decoder: Decoder<'p>,
    unit: Vec<u32>,
    /// Earliest end of each assigned job.
    ends: Vec<f64>,
    load: Vec<f64>,
    best: Exact,
    limit: u64,
    waiting: Waiting,
}

impl Outer<'_> {
    fn assign(&mut self, depth: usize) {
        self.best.nodes += 1;
        if self.best.nodes > self.limit {
            self.best.complete = false;
            return;
        }
        let problem = self.problem;
        let dense = &problem.dense;
        if depth == dense.order.len() {
            self.order();
            return;
        }
        let job = dense.order[depth] as usize;
        for unit in 0..dense.units {
            if dense.ms(job, unit).is_infinite() {
                continue;
            }
            self.unit[job] = unit as u32;
            let mut start = dense.release[job];
            for &tensor in dense.inputs.row(job) {
                let tensor = tensor as usize;
                let from = problem.source(tensor, &self.unit);
                let made = match dense.producer[tensor] {
                    u32::MAX => dense.tensor_release[tensor],
                    maker => self.ends[maker as usize],
                };
                start = start.max(made + dense.transfer(tensor, from, unit) * self.least.transfer_factor(unit));
            }
            let time = self.least.ms(job, unit);
            self.ends[job] = start + time;
            let moved = self.brought(job, unit);
            let busy = time + moved * self.least.transfer_factor(unit);
            let before = (self.priced, self.load.clone());
            self.priced += self.prices[unit] * (with_handovers(problem, job, unit) + moved);
            for &resource in &problem.platform.unit_resources[unit] {
                self.load[resource as usize] += busy;
            }
            if self.may_improve(depth + 1) {
                self.assign(depth + 1);
            }
            (self.priced, self.load) = before;
            if !self.best.complete {
                return;
            }
        }
    }

    /// Milliseconds of the transfers to the unit that the job is the first there to need.
    fn brought(&self, job: usize, unit: usize) -> f64 {
        let dense = &self.problem.dense;
        let first = |tensor: &&u32| {
            let mut readers = dense.consumers.row(**tensor as usize).iter().map(|&reader| reader as usize);
            !readers.any(|reader| self.place[reader] < self.place[job] && self.unit[reader] as usize == unit)
        };
        let fresh = dense.inputs.row(job).iter().filter(first).map(|&tensor| tensor as usize);
        fresh.map(|tensor| dense.transfer(tensor, self.problem.source(tensor, &self.unit), unit)).sum()
    }

    /// Whether the bound of the first `depth` assigned jobs leaves room for something better.
    fn may_improve(&self, depth: usize) -> bool {
        let problem = self.problem;
        let (dense, units) = (&problem.dense, self.problem.dense.units);
        let mut makespan = self.load.iter().copied().fold(self.priced + self.rest[depth], f64::max);
        let mut completion = vec![0.0f64; problem.requests().len()];
        let mut ends = self.free.clone();
        let mut joules = 0.0;
        let idle = problem.idle_watts().unwrap_or(0.0);
        for (at, &job) in dense.order.iter().enumerate() {
            let job = job as usize;
            let row = job * units;
            let more = |unit: usize| problem.units()[unit].watts.unwrap_or(0.0) - idle;
            if at < depth {
                let here = self.unit[job] as usize;
                (0..units).filter(|&unit| unit != here).for_each(|unit| ends[row + unit] = f64::INFINITY);
                ends[row + here] = self.ends[job];
                joules += (more(here) * self.least.ms(job, here)).max(0.0);
            } else {
                let mut cheapest = f64::INFINITY;
                for unit in 0..units {
                    let mut start = dense.release[job];
                    for &tensor in dense.inputs.row(job) {
                        let tensor = tensor as usize;
                        let factor = self.least.transfer_factor(unit);
                        let made = match dense.producer[tensor] {
                            u32::MAX => dense.tensor_release[tensor] + dense.transfer(tensor, units, unit) * factor,
                            maker => (0..units)
                                .map(|from| {
                                    ends[maker as usize * units + from] + dense.transfer(tensor, from, unit) * factor
                                })
                                .fold(f64::INFINITY, f64::min),
                        };
                        start = start.max(made);
                    }
                    ends[row + unit] = start + self.least.ms(job, unit);
                    if dense.ms(job, unit).is_finite() {
                        cheapest = cheapest.min((more(unit) * self.least.ms(job, unit)).max(0.0));
                    }
                }
                joules += cheapest;
            }
            let end = ends[row..row + units].iter().copied().fold(f64::INFINITY, f64::min);
            makespan = makespan.max(end);
            let slot = &mut completion[problem.jobs()[job].request as usize];
            *slot = slot.max(end);
        }
        // Units that draw less than idling make the sum no bound; nothing is pruned by energy then.
        let frugal = (0..units).any(|unit| problem.units()[unit].watts.unwrap_or(0.0) < idle);
        let joules = if frugal { 0.0 } else { (joules + idle * makespan) / 1e3 };
        problem.score(makespan, joules, &completion, &[]).is_better(&self.best.score)
    }

    /// Everything is assigned: search the orders.
    fn order(&mut self) {
        let problem = self.problem;
        let excess = problem.excess_bytes(&self.unit);
        if excess > self.best.score.excess_bytes {
            return;
        }
        // A list schedule first: a good one prunes.
        let ranks = crate::dag::construct::upward_ranks(problem, Some(&self.unit));
        let most = ranks.iter().copied().fold(0.0, f64::max);
        let choice =
            Choice { unit: self.unit.clone(), urgency: ranks.iter().map(|rank| (most - rank).max(0.0)).collect() };
        let score = self.decoder.run(&choice);
        if score.is_better(&self.best.score) {
            self.best.score = score;
            self.best.schedule = Some(self.decoder.schedule(&choice));
        }
        let schedule = Schedule::from_jobs(problem, self.unit.clone(), problem.topological());
        let Ok(edges) = problem.step_edges(&schedule) else { return };
        Inner::new(problem, self.least, &schedule, &edges, excess, self.waiting).run(&mut self.best, self.limit);
    }
}
