//! Constructive starts: list scheduling with insertion (HEFT), greedy units, the chain recurrence.

use super::decode::Choice;
use crate::problem::Problem;

/// What a job's time is taken to be before its unit is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guess {
    /// The mean over the units that can run it.
    Mean,
    /// The least.
    Least,
}

fn guess_ms(problem: &Problem, job: usize, guess: Guess) -> f64 {
    let (mut sum, mut number, mut least) = (0.0, 0u32, f64::INFINITY);
    for &ms in &problem.jobs()[job].ms {
        if ms.is_finite() {
            sum += ms;
            number += 1;
            least = least.min(ms);
        }
    }
    match guess {
        Guess::Mean => sum / f64::from(number.max(1)),
        Guess::Least => least,
    }
}

/// Longest way from each job's start to the end: its own time on its unit (guessed if there is none yet) and transfers.
pub(crate) fn upward_ranks(problem: &Problem, unit: Option<&[u32]>) -> Vec<f64> {
    ranks(problem, unit, Guess::Mean)
}

fn ranks(problem: &Problem, unit: Option<&[u32]>, guess: Guess) -> Vec<f64> {
    let dense = &problem.dense;
    let units = dense.units;
    let mut rank = vec![0.0f64; problem.jobs().len()];
    for &job in dense.order.iter().rev() {
        let job = job as usize;
        let mut after = 0.0f64;
        for &tensor in dense.outputs.row(job) {
            let tensor = tensor as usize;
            for &next in dense.consumers.row(tensor) {
                let transfer = match unit {
                    Some(unit) => dense.transfer(tensor, unit[job] as usize, unit[next as usize] as usize),
                    None if guess == Guess::Least => 0.0,
                    None => {
                        let all = (0..units).flat_map(|from| (0..units).map(move |to| (from, to)));
                        all.map(|(from, to)| dense.transfer(tensor, from, to)).sum::<f64>() / (units * units) as f64
                    }
                };
                after = after.max(transfer + rank[next as usize]);
            }
            let handed = match unit {
                Some(unit) => dense.to_host[tensor * units + unit[job] as usize],
                None => 0.0,
            };
            after = after.max(handed);
        }
        let own = match unit {
            Some(unit) => dense.ms(job, unit[job] as usize),
            None => guess_ms(problem, job, guess),
        };
        rank[job] = own + after;
    }
    rank
}

/// Urgencies from ranks: who is farther from the end goes first.
pub(crate) fn by_rank(problem: &Problem, unit: Vec<u32>) -> Choice {
    let rank = upward_ranks(problem, Some(&unit));
    let most = rank.iter().copied().fold(0.0, f64::max);
    Choice { unit, urgency: rank.iter().map(|rank| (most - rank).max(0.0)).collect() }
}

/// The same choice with requests one after another as far as they compete: by deadline, then by the work per weight, then by
/// arrival.
pub(crate) fn by_request(problem: &Problem, choice: Choice) -> Choice {
    let most = choice.urgency.iter().copied().fold(0.0, f64::max) + 1.0;
    let mut work = vec![0.0; problem.requests().len()];
    for (job, details) in problem.jobs().iter().enumerate() {
        work[details.request as usize] += problem.dense.ms(job, choice.unit[job] as usize);
    }
    let mut order: Vec<usize> = (0..work.len()).collect();
    order.sort_by(|&a, &b| {
        let (first, second) = (&problem.requests()[a], &problem.requests()[b]);
        let due = |deadline: Option<f64>| deadline.unwrap_or(f64::INFINITY);
        due(first.deadline_ms)
            .total_cmp(&due(second.deadline_ms))
            .then((work[a] / first.weight).total_cmp(&(work[b] / second.weight)))
            .then(first.release_ms.total_cmp(&second.release_ms))
    });
    let mut place = vec![0.0; order.len()];
    order.iter().enumerate().for_each(|(at, &request)| place[request] = at as f64 * most);
    let urgency = choice.urgency.iter().zip(problem.jobs()).map(|(urgency, job)| urgency + place[job.request as usize]);
    Choice { urgency: urgency.collect(), ..choice }
}

/// Every job where it is fastest.
pub(crate) fn fastest(problem: &Problem) -> Vec<u32> {
    problem.jobs().iter().map(|job| least_index(job.ms.iter().copied())).collect()
}

/// Every job where its time costs least.
pub(crate) fn cheapest(problem: &Problem, price: &[f64]) -> Vec<u32> {
    let costs = problem.jobs().iter().map(|job| job.ms.iter().zip(price).map(|(ms, price)| ms * price));
    costs.map(least_index).collect()
}

/// Every job on one unit where it runs there, else where it is fastest.
pub(crate) fn single(problem: &Problem, unit: usize) -> Vec<u32> {
    let jobs = problem.jobs().iter();
    jobs.map(|job| if job.ms[unit].is_finite() { unit as u32 } else { least_index(job.ms.iter().copied()) }).collect()
}

pub(crate) fn least_index(values: impl Iterator<Item = f64>) -> u32 {
    values.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(index, _)| index as u32)
}

/// The sequential recurrence over a topological order: neighbours on different units pay the transfers of what the later one
/// reads from the earlier one.
pub(crate) fn chain(problem: &Problem, price: &[f64]) -> Vec<u32> {
    let dense = &problem.dense;
    let (units, count) = (dense.units, dense.order.len());
    if count == 0 {
        return Vec::new();
    }
    let mut parent = vec![0u32; count * units];
    let mut cost: Vec<f64> = vec![0.0; units];
    let mut next = vec![0.0; units];
    for (at, &job) in dense.order.iter().enumerate() {
        let job = job as usize;
        let previous = at.checked_sub(1).map(|at| dense.order[at]);
        for to in 0..units {
            let (mut best, mut from_best) = (f64::INFINITY, to);
            for (from, &so_far) in cost.iter().enumerate() {
                let mut total = so_far;
                for &tensor in dense.inputs.row(job) {
                    let maker = dense.producer[tensor as usize];
                    if previous == Some(maker) {
                        total += dense.transfer(tensor as usize, from, to) * price[to];
                    } else if maker == u32::MAX {
                        total += dense.transfer(tensor as usize, units, to) * price[to];
                    }
                }
                // At equal cost it stays.
                if total < best || (total <= best && from == to) {
                    best = total;
                    from_best = from;
                }
            }
            let handed: f64 =
                dense.outputs.row(job).iter().map(|&tensor| dense.to_host[tensor as usize * units + to]).sum();
            next[to] = best + (dense.ms(job, to) + handed) * price[to];
            parent[at * units + to] = from_best as u32;
        }
        std::mem::swap(&mut cost, &mut next);
    }
    let mut here = least_index(cost.iter().copied()) as usize;
    let mut unit = vec![0; problem.jobs().len()];
    for at in (0..count).rev() {
        unit[dense.order[at] as usize] = here as u32;
        here = parent[at * units + here] as usize;
    }
    unit
}

/// HEFT (Topcuoglu, Hariri, Wu 2002) with insertion: jobs by upward rank, each where it ends earliest, into gaps of what is
/// placed already; transfers take time on their destination.
///
/// `penalty` (row-major jobs × units, or empty) is added to the end that decides between units.
pub(crate) fn heft(problem: &Problem, guess: Guess, penalty: &[f64]) -> Choice {
    let dense = &problem.dense;
    let rank = ranks(problem, None, guess);
    let mut jobs: Vec<u32> = dense.order.clone();
    // A stable sort: equal ranks (of free jobs) keep the topological order.
    jobs.sort_by(|&a, &b| rank[b as usize].total_cmp(&rank[a as usize]));
    let mut placement = Placement {
        problem,
        busy: vec![Vec::new(); problem.resources().len()],
        unit: vec![0; jobs.len()],
        end: vec![f64::NAN; jobs.len()],
        brought: vec![f64::NAN; problem.tensors().len() * dense.units],
    };
    let mut start = vec![0.0; jobs.len()];
    for job in jobs {
        let row = penalty.get(job as usize * dense.units..).unwrap_or_default();
        start[job as usize] = placement.place(job as usize, row);
    }
    Choice { unit: placement.unit, urgency: start }
}

/// End, start, and transfers `(tensor, start, end)` of a job on some unit.
type Attempt = (f64, f64, Vec<(u32, f64, f64)>);

/// What must still follow a job at best, from each unit (the optimistic cost table of PEFT, Arabnejad and Barbosa 2014).
pub(crate) fn optimistic_rest(problem: &Problem) -> Vec<f64> {
    let dense = &problem.dense;
    let units = dense.units;
    let mut rest = vec![0.0f64; problem.jobs().len() * units];
    for &job in dense.order.iter().rev() {
        for from in 0..units {
            let mut most = 0.0f64;
            for &tensor in dense.outputs.row(job as usize) {
                for &next in dense.consumers.row(tensor as usize) {
                    let next = next as usize;
                    let least = (0..units)
                        .map(|to| {
                            dense.transfer(tensor as usize, from, to) + dense.ms(next, to) + rest[next * units + to]
                        })
                        .fold(f64::INFINITY, f64::min);
                    most = most.max(least);
                }
            }
            rest[job as usize * units + from] = most;
        }
    }
    rest
}

/// What using a unit costs a job beyond the unit that is best for it when units are priced by the load bound's weights, in
/// milliseconds of makespan times `scale`.
pub(crate) fn regret(problem: &Problem, weights: &[f64], scale: f64) -> Vec<f64> {
    let units = problem.dense.units;
    let mut regret = Vec::with_capacity(problem.jobs().len() * units);
    for job in problem.jobs() {
        let priced = |(ms, weight): (&f64, &f64)| if ms.is_finite() { ms * weight } else { f64::INFINITY };
        let row: Vec<f64> = job.ms.iter().zip(weights).map(priced).collect();
        let least = row.iter().copied().fold(f64::INFINITY, f64::min);
        regret.extend(row.iter().map(|cost| scale * (cost - least)));
    }
    regret
}

struct Placement<'p> {
    problem: &'p Problem,
    /// Per resource: busy intervals, ascending.
    busy: Vec<Vec<(f64, f64)>>,
    unit: Vec<u32>,
    end: Vec<f64>,
    /// Row-major tensors × units: when a tensor is there.
    brought: Vec<f64>,
}

impl Placement<'_> {
    /// Earliest start of `ms` on a unit, not before `from`.
    fn gap(&self, unit: usize, from: f64, ms: f64) -> f64 {
        let mut start = from;
        loop {
            let mut moved = false;
            for &resource in &self.problem.platform.unit_resources[unit] {
                let list = &self.busy[resource as usize];
                let mut at = list.partition_point(|&(_, end)| end <= start);
                while let Some(&(begin, end)) = list.get(at) {
                    if begin >= start + ms {
                        break;
                    }
                    start = end;
                    moved = true;
                    at += 1;
                }
            }
            if !moved {
                return start;
            }
        }
    }

    fn occupy(&mut self, unit: usize, start: f64, end: f64) {
        if end <= start {
            return;
        }
        for &resource in &self.problem.platform.unit_resources[unit] {
            let list = &mut self.busy[resource as usize];
            let at = list.partition_point(|&(begin, _)| begin < start);
            list.insert(at, (start, end));
        }
    }

    /// Tries a unit: `(end, start, transfers (tensor, start, end))`.
    fn attempt(&self, job: usize, unit: usize) -> Attempt {
        let dense = &self.problem.dense;
        let mut ready = dense.release[job];
        let mut transfers: Vec<(u32, f64, f64)> = Vec::new();
        let mut cursor = 0.0f64;
        for &tensor in dense.inputs.row(job) {
            let index = tensor as usize;
            let there = self.brought[index * dense.units + unit];
            if !there.is_nan() {
                ready = ready.max(there);
                continue;
            }
            let (from, made) = match dense.producer[index] {
                u32::MAX => (dense.units, dense.tensor_release[index]),
                maker => (self.unit[maker as usize] as usize, self.end[maker as usize]),
            };
            let ms = dense.transfer(index, from, unit);
            if ms > 0.0 {
                let start = self.gap(unit, made.max(cursor), ms);
                cursor = start + ms;
                transfers.push((tensor, start, cursor));
                ready = ready.max(cursor);
            } else {
                ready = ready.max(made);
            }
        }
        let start = self.gap(unit, ready, dense.ms(job, unit));
        (start + dense.ms(job, unit), start, transfers)
    }

    /// Places a job where its end and the unit's penalty come to the least; returns its start.
    fn place(&mut self, job: usize, penalty: &[f64]) -> f64 {
        let dense = &self.problem.dense;
        let mut best: Option<(f64, Attempt, usize)> = None;
        for unit in (0..dense.units).filter(|&unit| dense.ms(job, unit).is_finite()) {
            let attempt = self.attempt(job, unit);
            let value = attempt.0 + penalty.get(unit).copied().unwrap_or(0.0);
            if best.as_ref().is_none_or(|(least, ..)| value < *least) {
                best = Some((value, attempt, unit));
            }
        }
        let Some((_, (end, start, transfers), unit)) = best else { return 0.0 };
        for (tensor, begin, finish) in transfers {
            self.occupy(unit, begin, finish);
            self.brought[tensor as usize * dense.units + unit] = finish;
        }
        self.occupy(unit, start, end);
        self.unit[job] = unit as u32;
        self.end[job] = end;
        start
    }
}
