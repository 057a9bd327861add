//! The discrete-event engine behind [`crate::simulate()`] and every planner's evaluation: dense tasks, fixed orders per
//! resource, rates that change at every start and finish.

use crate::factors::Factors;

/// Finishes closer than this fraction of a step count as simultaneous: equal ends end together whatever rounding says.
pub(crate) const SIMULTANEOUS: f64 = 1e-12;

/// Adjacency in compressed rows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows {
    starts: Vec<u32>,
    items: Vec<u32>,
}

impl Rows {
    /// From `(row, item)` pairs; items keep their order within a row.
    pub fn new(rows: usize, pairs: &[(u32, u32)]) -> Self {
        let mut starts = vec![0u32; rows + 1];
        for &(row, _) in pairs {
            starts[row as usize + 1] += 1;
        }
        for row in 0..rows {
            starts[row + 1] += starts[row];
        }
        let mut at = starts.clone();
        let mut items = vec![0; pairs.len()];
        for &(row, item) in pairs {
            items[at[row as usize] as usize] = item;
            at[row as usize] += 1;
        }
        Self { starts, items }
    }

    pub fn row(&self, row: usize) -> &[u32] {
        &self.items[self.starts[row] as usize..self.starts[row + 1] as usize]
    }
}

/// Units as sets of dense resources, with their slowdown factors.
#[derive(Debug, Clone)]
pub(crate) struct Platform {
    /// Per unit, the resources it holds.
    pub unit_resources: Vec<Vec<u32>>,
    pub resources: usize,
    pub factors: Factors,
}

/// Tasks to run, by dense index.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tasks {
    pub unit: Vec<u32>,
    /// Milliseconds alone.
    pub ms: Vec<f64>,
    /// Dense class.
    pub class: Vec<u8>,
    /// Not before, in milliseconds.
    pub release: Vec<f64>,
    /// `(task, follower)` pairs; a pair may stand several times.
    pub edges: Vec<(u32, u32)>,
}

/// When every task ran.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub start: Vec<f64>,
    pub end: Vec<f64>,
    pub makespan: f64,
}

/// Nothing runs and nothing can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stall {
    /// Its inputs are there, but the orders never reach it.
    Order(usize),
    /// It waits for tasks that wait for it.
    Circle(usize),
}

/// Runs tasks in the given order of each resource. `pass(ms, running)` is told every stretch of time between two events.
pub(crate) fn run(
    platform: &Platform,
    tasks: &Tasks,
    queues: &[Vec<u32>],
    mut pass: impl FnMut(f64, &[u32]),
) -> Result<Run, Stall> {
    let count = tasks.unit.len();
    let followers = Rows::new(count, &tasks.edges);
    let mut missing = vec![0u32; count];
    for &(_, follower) in &tasks.edges {
        missing[follower as usize] += 1;
    }
    let mut releases: Vec<f64> = tasks.release.iter().copied().filter(|&ms| ms > 0.0).collect();
    releases.sort_by(|a, b| b.total_cmp(a));
    let mut left = tasks.ms.clone();
    let (mut start, mut end) = (vec![f64::NAN; count], vec![f64::NAN; count]);
    let mut reached = vec![0usize; platform.resources];
    let mut busy = vec![false; platform.resources];
    let mut running: Vec<u32> = Vec::new();
    let mut rate: Vec<f64> = Vec::new();
    let (mut now, mut done) = (0.0, 0);
    while done < count {
        // A start only takes what it needs and moves the orders it heads, so starts of one instant do not compete.
        for resource in 0..platform.resources {
            let Some(&task) = queues[resource].get(reached[resource]) else { continue };
            let index = task as usize;
            let resources = &platform.unit_resources[tasks.unit[index] as usize];
            let free = missing[index] == 0
                && tasks.release[index] <= now
                && resources.iter().all(|&other| {
                    let other = other as usize;
                    !busy[other] && queues[other].get(reached[other]) == Some(&task)
                });
            if free {
                for &other in resources {
                    busy[other as usize] = true;
                    reached[other as usize] += 1;
                }
                start[index] = now;
                running.push(task);
            }
        }
        while releases.last().is_some_and(|&release| release <= now) {
            releases.pop();
        }
        let arrival = releases.last().map_or(f64::INFINITY, |release| release - now);
        if running.is_empty() && arrival.is_infinite() {
            let waits = |at: &usize| start[*at].is_nan() && missing[*at] > 0;
            return Err(match (0..count).find(|&at| start[at].is_nan() && missing[at] == 0) {
                Some(task) => Stall::Order(task),
                None => Stall::Circle((0..count).find(waits).unwrap_or(0)),
            });
        }
        running.sort_unstable();
        rate.clear();
        let kind = |task: u32| (tasks.unit[task as usize], tasks.class[task as usize]);
        for (at, &task) in running.iter().enumerate() {
            let (unit, class) = kind(task);
            let others = running.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, &task)| kind(task));
            rate.push(1.0 / platform.factors.slowdown(unit, class, others));
        }
        let waits = |(task, rate): (&u32, &f64)| left[*task as usize] / rate;
        let step = running.iter().zip(&rate).map(waits).fold(arrival, f64::min);
        pass(step, &running);
        now = match releases.last() {
            // Exactly: the step is the arrival's own number then.
            Some(&release) if step.to_bits() == arrival.to_bits() => release,
            _ => now + step,
        };
        let mut kept = 0;
        for at in 0..running.len() {
            let (task, rate) = (running[at], rate[at]);
            let index = task as usize;
            if left[index] / rate <= step * (1.0 + SIMULTANEOUS) {
                left[index] = 0.0;
                end[index] = now;
                done += 1;
                for &resource in &platform.unit_resources[tasks.unit[index] as usize] {
                    busy[resource as usize] = false;
                }
                for &follower in followers.row(index) {
                    missing[follower as usize] -= 1;
                }
            } else {
                left[index] -= step * rate;
                running[kept] = task;
                kept += 1;
            }
        }
        running.truncate(kept);
    }
    Ok(Run { start, end, makespan: now })
}
