//! Baselines to compare planners with: HEFT as published, and each job on its fastest unit.
//!
//! Both are list schedulers. What they decide (units and an order) is then scored by [`Problem::evaluate`] like any other
//! schedule, so that every planner's number means the same.

use crate::problem::{Problem, Schedule};
use std::cmp::Ordering;

/// HEFT (Topcuoglu, Hariri and Wu 2002, "Performance-effective and low-complexity task scheduling"): jobs by decreasing
/// upward rank over mean costs, each on the unit where it finishes first, in a gap if one is long enough. As published it
/// knows no slowdowns, and transfers delay their reader without occupying anybody.
pub fn heft(problem: &Problem) -> Schedule {
    heft_after(problem, &vec![0.0; problem.resources().len()])
}

/// [`heft`] with resources that are free only from the given times on.
pub(crate) fn heft_after(problem: &Problem, ready_ms: &[f64]) -> Schedule {
    let rank = upward_rank(problem, &MeanCosts::new(problem));
    let count = problem.jobs().len();
    let mut order: Vec<u32> = problem.topological().to_vec();
    // Stable, so that equal ranks stay topological (a successor's rank never exceeds its predecessor's).
    order.sort_by(|&a, &b| rank[b as usize].total_cmp(&rank[a as usize]));
    let mut busy: Vec<Vec<(f64, f64)>> =
        ready_ms.iter().map(|&ms| if ms > 0.0 { vec![(0.0, ms)] } else { Vec::new() }).collect();
    let (mut unit_of, mut finish, mut start) = (vec![0u32; count], vec![0.0f64; count], vec![0.0f64; count]);
    let reads = Reads::new(problem);
    for &job in &order {
        let job = job as usize;
        let mut best = (f64::INFINITY, 0, 0.0);
        for (unit, &ms) in problem.jobs()[job].ms.iter().enumerate() {
            if ms.is_infinite() {
                continue;
            }
            let mut inputs_ms = problem.requests()[problem.jobs()[job].request as usize].release_ms;
            for &tensor in reads.of(job) {
                let edge = &problem.tensors()[tensor];
                let units = problem.units().len();
                let (from, made) = match edge.producer {
                    Some(maker) => (unit_of[maker as usize] as usize, finish[maker as usize]),
                    None => (units, 0.0),
                };
                inputs_ms = inputs_ms.max(made + edge.transfer_ms[from * units + unit]);
            }
            let at = earliest_gap(&busy, &problem.units()[unit].resources, inputs_ms, ms);
            if at + ms < best.0 {
                best = (at + ms, unit, at);
            }
        }
        let (end, unit, at) = best;
        (unit_of[job], finish[job], start[job]) = (unit as u32, end, at);
        for &resource in &problem.units()[unit].resources {
            occupy(&mut busy[resource as usize], at, end);
        }
    }
    by_start(problem, unit_of, &start)
}

/// Each job on the unit where it alone is fastest, jobs by decreasing upward rank.
pub fn fastest_unit(problem: &Problem) -> Schedule {
    let unit_of = problem
        .jobs()
        .iter()
        .map(|job| (0..job.ms.len()).min_by(|&a, &b| job.ms[a].total_cmp(&job.ms[b])).unwrap_or(0) as u32)
        .collect();
    ranked(problem, unit_of)
}

/// A given placement with jobs by decreasing upward rank over its own costs.
///
/// # Panics
/// If `unit_of` does not hold one unit for each job.
pub fn ranked(problem: &Problem, unit_of: Vec<u32>) -> Schedule {
    assert_eq!(unit_of.len(), problem.jobs().len(), "one unit for each job");
    let rank = upward_rank(problem, &PlacedCosts { problem, unit_of: &unit_of });
    let mut order: Vec<u32> = problem.topological().to_vec();
    order.sort_by(|&a, &b| rank[b as usize].total_cmp(&rank[a as usize]));
    Schedule::from_jobs(problem, unit_of, &order)
}

/// Costs that ranks are made of.
trait Costs {
    fn work(&self, job: usize) -> f64;
    fn transfer(&self, tensor: usize, reader: usize) -> f64;
}

/// Means over the units that can run a job, and over the pairs of distinct units for tensors.
struct MeanCosts {
    work: Vec<f64>,
    transfer: Vec<f64>,
}

impl MeanCosts {
    fn new(problem: &Problem) -> Self {
        let units = problem.units().len();
        let mean = |values: &mut dyn Iterator<Item = f64>| {
            let (sum, count) = values.fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
            sum / count.max(1) as f64
        };
        Self {
            work: problem
                .jobs()
                .iter()
                .map(|job| mean(&mut job.ms.iter().copied().filter(|ms| ms.is_finite())))
                .collect(),
            transfer: problem
                .tensors()
                .iter()
                .map(|tensor| {
                    let pairs = (0..units).flat_map(|from| (0..units).map(move |to| (from, to)));
                    mean(
                        &mut pairs
                            .filter(|(from, to)| from != to)
                            .map(|(from, to)| tensor.transfer_ms[from * units + to]),
                    )
                })
                .collect(),
        }
    }
}

impl Costs for MeanCosts {
    fn work(&self, job: usize) -> f64 {
        self.work[job]
    }

    fn transfer(&self, tensor: usize, _reader: usize) -> f64 {
        self.transfer[tensor]
    }
}

struct PlacedCosts<'p> {
    problem: &'p Problem,
    unit_of: &'p [u32],
}

impl Costs for PlacedCosts<'_> {
    fn work(&self, job: usize) -> f64 {
        self.problem.jobs()[job].ms[self.unit_of[job] as usize]
    }

    fn transfer(&self, tensor: usize, reader: usize) -> f64 {
        let edge = &self.problem.tensors()[tensor];
        let units = self.problem.units().len();
        let from = edge.producer.map_or(units, |maker| self.unit_of[maker as usize] as usize);
        edge.transfer_ms[from * units + self.unit_of[reader] as usize]
    }
}

/// Longest way from the start of each job to the end of everything that depends on it.
fn upward_rank(problem: &Problem, costs: &impl Costs) -> Vec<f64> {
    let mut made: Vec<Vec<usize>> = vec![Vec::new(); problem.jobs().len()];
    for (index, tensor) in problem.tensors().iter().enumerate() {
        if let Some(maker) = tensor.producer {
            made[maker as usize].push(index);
        }
    }
    let mut rank = vec![0.0; problem.jobs().len()];
    for &job in problem.topological().iter().rev() {
        let job = job as usize;
        let after = made[job].iter().flat_map(|&tensor| {
            let readers = problem.tensors()[tensor].consumers.iter();
            readers.map(move |&reader| (tensor, reader as usize))
        });
        let longest =
            after.map(|(tensor, reader)| costs.transfer(tensor, reader) + rank[reader]).fold(0.0f64, f64::max);
        rank[job] = costs.work(job) + longest;
    }
    rank
}

/// Tensors that each job reads.
struct Reads(Vec<Vec<usize>>);

impl Reads {
    fn new(problem: &Problem) -> Self {
        let mut reads = vec![Vec::new(); problem.jobs().len()];
        for (index, tensor) in problem.tensors().iter().enumerate() {
            tensor.consumers.iter().for_each(|&job| reads[job as usize].push(index));
        }
        Self(reads)
    }

    fn of(&self, job: usize) -> &[usize] {
        &self.0[job]
    }
}

/// First time from `ready` at which all the resources are free for `ms`.
fn earliest_gap(busy: &[Vec<(f64, f64)>], resources: &[u32], ready: f64, ms: f64) -> f64 {
    let mut at = ready;
    loop {
        let mut moved = false;
        for &resource in resources {
            let list = &busy[resource as usize];
            let mut next = list.partition_point(|interval| interval.1 <= at);
            while let Some(&(from, to)) = list.get(next)
                && from < at + ms
            {
                at = at.max(to);
                moved = true;
                next += 1;
            }
        }
        if !moved {
            return at;
        }
    }
}

/// Adds a busy interval, joined with those that it touches.
fn occupy(list: &mut Vec<(f64, f64)>, from: f64, to: f64) {
    if to <= from {
        return;
    }
    let first = list.partition_point(|interval| interval.1 < from);
    let beyond = list.partition_point(|interval| interval.0 <= to);
    let joined = list[first..beyond]
        .iter()
        .fold((from, to), |joined, interval| (joined.0.min(interval.0), joined.1.max(interval.1)));
    list.splice(first..beyond, [joined]);
}

/// A schedule whose jobs are in the order of their start times, ties in topological order.
fn by_start(problem: &Problem, unit_of: Vec<u32>, start: &[f64]) -> Schedule {
    let mut place = vec![0usize; start.len()];
    for (at, &job) in problem.topological().iter().enumerate() {
        place[job as usize] = at;
    }
    let mut order: Vec<u32> = problem.topological().to_vec();
    order.sort_by(|&a, &b| match start[a as usize].total_cmp(&start[b as usize]) {
        Ordering::Equal => place[a as usize].cmp(&place[b as usize]),
        other => other,
    });
    Schedule::from_jobs(problem, unit_of, &order)
}
