//! Schedules, and what they cost.

use super::{Goal, Problem};
use crate::PlanError;
use crate::engine::{self, Stall, Tasks};
use crate::simulate::EnergyMeter;
use std::cmp::Ordering;

/// One thing that occupies a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// Run a job on its unit.
    Job(u32),
    /// Make a tensor available to a unit (of a price above 0).
    Transfer {
        /// Which.
        tensor: u32,
        /// Where to; its resources are busy meanwhile.
        unit: u32,
    },
    /// Hand an output to the host (of a price above 0); occupies its maker's unit.
    Handover(u32),
}

/// Where every job runs, and in which order everything happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Unit of each job.
    pub unit: Vec<u32>,
    /// Every job once, every transfer that the units ask for once, every handover once; each after what it waits for. A
    /// resource takes its steps in this order.
    pub order: Vec<Step>,
    /// Steps that wait for other steps beside what they read: `(first, then)`. Barriers of phases are such.
    pub after: Vec<(Step, Step)>,
}

/// How good a schedule is, the most important thing first. Less is better.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Bytes of weights beyond the units' memory.
    pub excess_bytes: f64,
    /// Sum of the weights of requests that miss their deadline.
    pub late: f64,
    /// `Σ weight · (completion − deadline)` of those, in milliseconds.
    pub tardiness_ms: f64,
    /// The goal's value.
    pub value: f64,
}

impl Score {
    /// Nothing is worse.
    pub const WORST: Self =
        Self { excess_bytes: f64::INFINITY, late: f64::INFINITY, tardiness_ms: f64::INFINITY, value: f64::INFINITY };

    /// Compares by importance; values that are equal up to rounding count as equal.
    pub fn compare(&self, other: &Self) -> Ordering {
        let one = |a: f64, b: f64| {
            let (apart, largest) = ((a - b).abs(), a.abs().max(b.abs()));
            // Nothing finite is close to infinity.
            if largest.is_finite() && apart <= 1e-12 * largest { Ordering::Equal } else { a.total_cmp(&b) }
        };
        one(self.excess_bytes, other.excess_bytes)
            .then(one(self.late, other.late))
            .then(one(self.tardiness_ms, other.tardiness_ms))
            .then(one(self.value, other.value))
    }

    /// Whether this is better, by more than rounding.
    pub fn is_better(&self, other: &Self) -> bool {
        self.compare(other) == Ordering::Less
    }
}

/// What the engine makes of a schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// Its score.
    pub score: Score,
    /// End of the last step in milliseconds.
    pub makespan_ms: f64,
    /// Energy in joules, `None` when a power that matters is unknown.
    pub energy_j: Option<f64>,
    /// When each request is complete, in milliseconds.
    pub completion_ms: Vec<f64>,
    /// Start and end of each step of the order.
    pub spans: Vec<(f64, f64)>,
}

impl Schedule {
    /// A schedule from an order of the jobs: transfers go right before their first reader, handovers right after the maker.
    pub fn from_jobs(problem: &Problem, unit: Vec<u32>, jobs: &[u32]) -> Self {
        let dense = &problem.dense;
        let mut brought = vec![false; problem.tensors.len() * dense.units];
        let mut order = Vec::with_capacity(2 * jobs.len());
        for &job in jobs {
            let here = unit[job as usize];
            for &tensor in dense.inputs.row(job as usize) {
                let from = problem.source(tensor as usize, &unit);
                let slot = tensor as usize * dense.units + here as usize;
                if dense.transfer(tensor as usize, from, here as usize) > 0.0 && !brought[slot] {
                    brought[slot] = true;
                    order.push(Step::Transfer { tensor, unit: here });
                }
            }
            order.push(Step::Job(job));
            let outputs = dense.outputs.row(job as usize).iter();
            let handed = outputs.filter(|&&tensor| dense.to_host[tensor as usize * dense.units + here as usize] > 0.0);
            order.extend(handed.map(|&tensor| Step::Handover(tensor)));
        }
        Self { unit, order, after: Vec::new() }
    }
}

impl Problem {
    /// Where a tensor is made: a unit, or the number of units for the host.
    pub(crate) fn source(&self, tensor: usize, unit: &[u32]) -> usize {
        match self.dense.producer[tensor] {
            u32::MAX => self.dense.units,
            job => unit[job as usize] as usize,
        }
    }

    /// Unit of a step.
    pub(crate) fn step_unit(&self, step: Step, unit: &[u32]) -> u32 {
        match step {
            Step::Job(job) => unit[job as usize],
            Step::Transfer { unit, .. } => unit,
            Step::Handover(tensor) => unit[self.dense.producer[tensor as usize] as usize],
        }
    }

    /// Milliseconds of a step alone.
    pub(crate) fn step_ms(&self, step: Step, unit: &[u32]) -> f64 {
        let dense = &self.dense;
        let here = self.step_unit(step, unit) as usize;
        match step {
            Step::Job(job) => dense.ms(job as usize, here),
            Step::Transfer { tensor, .. } => dense.transfer(tensor as usize, self.source(tensor as usize, unit), here),
            Step::Handover(tensor) => dense.to_host[tensor as usize * dense.units + here],
        }
    }

    /// Pairs of steps, by position in the order, of which the second waits for the first.
    ///
    /// # Errors
    /// [`PlanError::Stuck`] when the order lacks a step, has one twice or one that nobody needs, or has a step before what it
    /// waits for.
    pub(crate) fn step_edges(&self, schedule: &Schedule) -> Result<Vec<(u32, u32)>, PlanError> {
        let dense = &self.dense;
        let stuck = |reason: String| PlanError::Stuck { reason };
        let unit = &schedule.unit;
        if unit.len() != self.jobs.len() || unit.iter().any(|&unit| unit as usize >= dense.units) {
            return Err(stuck(format!(
                "{} units for {} jobs, or one that does not exist",
                unit.len(),
                self.jobs.len()
            )));
        }
        let mut job_at = vec![u32::MAX; self.jobs.len()];
        // Position of each transfer, row-major tensors × units, and of each handover.
        let mut transfer_at = vec![u32::MAX; self.tensors.len() * dense.units];
        let mut handover_at = vec![u32::MAX; self.tensors.len()];
        for (at, &step) in schedule.order.iter().enumerate() {
            let slot = match step {
                Step::Job(job) => job_at.get_mut(job as usize),
                Step::Transfer { tensor, unit } if (unit as usize) < dense.units => {
                    transfer_at.get_mut(tensor as usize * dense.units + unit as usize)
                }
                Step::Handover(tensor)
                    if dense.producer.get(tensor as usize).is_some_and(|&maker| maker != u32::MAX) =>
                {
                    handover_at.get_mut(tensor as usize)
                }
                _ => None,
            };
            if slot.is_none_or(|slot| std::mem::replace(slot, at as u32) != u32::MAX) {
                return Err(stuck(format!("step {at}, {step:?}, stands twice or is of nothing there is")));
            }
        }
        if let Some(job) = job_at.iter().position(|&at| at == u32::MAX) {
            return Err(stuck(format!("job {job} (operator `{}`) is left out", self.jobs[job].name)));
        }
        let mut edges = Vec::with_capacity(2 * schedule.order.len());
        let mut used = vec![false; schedule.order.len()];
        for (job, &at) in job_at.iter().enumerate() {
            used[at as usize] = true;
            let here = unit[job] as usize;
            if dense.ms(job, here).is_infinite() {
                let (name, address) = (&self.jobs[job].name, &self.units[here].address);
                return Err(stuck(format!("job {job} (operator `{name}`) cannot run on {address}")));
            }
            for &tensor in dense.inputs.row(job) {
                let from = self.source(tensor as usize, unit);
                let made = match dense.producer[tensor as usize] {
                    u32::MAX => None,
                    producer => Some(job_at[producer as usize]),
                };
                if dense.transfer(tensor as usize, from, here) > 0.0 {
                    let brought = transfer_at[tensor as usize * dense.units + here];
                    if brought == u32::MAX {
                        let step = Step::Transfer { tensor, unit: here as u32 };
                        return Err(stuck(format!("{step:?} is left out")));
                    }
                    if !std::mem::replace(&mut used[brought as usize], true) {
                        edges.extend(made.map(|made| (made, brought)));
                    }
                    edges.push((brought, at));
                } else {
                    edges.extend(made.map(|made| (made, at)));
                }
            }
            for &tensor in dense.outputs.row(job) {
                if dense.to_host[tensor as usize * dense.units + here] > 0.0 {
                    let handed = handover_at[tensor as usize];
                    if handed == u32::MAX {
                        return Err(stuck(format!("{:?} is left out", Step::Handover(tensor))));
                    }
                    used[handed as usize] = true;
                    edges.push((at, handed));
                }
            }
        }
        if let Some(at) = used.iter().position(|used| !used) {
            return Err(stuck(format!("step {at}, {:?}, serves nothing", schedule.order[at])));
        }
        let place = |step: Step| {
            let slot = match step {
                Step::Job(job) => job_at.get(job as usize),
                Step::Transfer { tensor, unit } if (unit as usize) < dense.units => {
                    transfer_at.get(tensor as usize * dense.units + unit as usize)
                }
                Step::Transfer { .. } => None,
                Step::Handover(tensor) => handover_at.get(tensor as usize),
            };
            slot.copied().filter(|&at| at != u32::MAX)
        };
        for &(first, then) in &schedule.after {
            match (place(first), place(then)) {
                (Some(first), Some(then)) => edges.push((first, then)),
                _ => return Err(stuck(format!("{first:?} and {then:?} are to run in turn but do not both exist"))),
            }
        }
        if let Some(&(first, then)) = edges.iter().find(|(first, then)| first >= then) {
            return Err(stuck(format!("step {then} stands before step {first}, for which it waits")));
        }
        Ok(edges)
    }

    /// Runs a schedule on the simulator's engine.
    ///
    /// # Errors
    /// [`PlanError::Stuck`] when the order lacks a step, has one twice or one that nobody needs, or has a step before what it
    /// waits for; when a job is on a unit that cannot run it.
    pub fn evaluate(&self, schedule: &Schedule) -> Result<Evaluation, PlanError> {
        let edges = self.step_edges(schedule)?;
        let dense = &self.dense;
        let mut tasks = Tasks { edges, ..Tasks::default() };
        let mut queues: Vec<Vec<u32>> = vec![Vec::new(); self.resources.len()];
        for (at, &step) in schedule.order.iter().enumerate() {
            let here = self.step_unit(step, &schedule.unit);
            tasks.unit.push(here);
            tasks.ms.push(self.step_ms(step, &schedule.unit));
            let (class, release) = match step {
                Step::Job(job) => {
                    (dense.class[job as usize * dense.units + here as usize], dense.release[job as usize])
                }
                Step::Transfer { tensor, .. } | Step::Handover(tensor) => {
                    (MEMORY, dense.tensor_release[tensor as usize])
                }
            };
            tasks.class.push(class);
            tasks.release.push(release);
            for &resource in &self.platform.unit_resources[here as usize] {
                queues[resource as usize].push(at as u32);
            }
        }
        let mut known = EnergyMeter::new(self.units.iter().map(|unit| unit.watts), self.idle_watts);
        let mut assumed =
            EnergyMeter::new(self.units.iter().map(|unit| unit.watts), Some(self.idle_watts.unwrap_or(0.0)));
        let run = engine::run(&self.platform, &tasks, &queues, |ms, running| {
            known.pass(ms, running.iter().map(|&task| tasks.unit[task as usize]));
            assumed.pass(ms, running.iter().map(|&task| tasks.unit[task as usize]));
        })
        .map_err(|stall| {
            let (Stall::Order(at) | Stall::Circle(at)) = stall;
            PlanError::Stuck { reason: format!("step {at}, {:?}, is never reached", schedule.order[at]) }
        })?;
        let mut completion_ms = vec![0.0f64; self.requests.len()];
        for (at, &step) in schedule.order.iter().enumerate() {
            let job = match step {
                Step::Job(job) => job,
                Step::Handover(tensor) => dense.producer[tensor as usize],
                Step::Transfer { .. } => continue,
            };
            let slot = &mut completion_ms[self.jobs[job as usize].request as usize];
            *slot = slot.max(run.end[at]);
        }
        let score = self.score(run.makespan, assumed.joules.unwrap_or(0.0), &completion_ms, &schedule.unit);
        Ok(Evaluation {
            score,
            makespan_ms: run.makespan,
            energy_j: known.joules,
            completion_ms,
            spans: run.start.into_iter().zip(run.end).collect(),
        })
    }

    /// Puts the parts of a score together.
    pub(crate) fn score(&self, makespan: f64, joules: f64, completion: &[f64], unit: &[u32]) -> Score {
        let (mut late, mut tardiness_ms, mut weighted, mut weights) = (0.0, 0.0, 0.0, 0.0);
        for (request, &end) in self.requests.iter().zip(completion) {
            if let Some(over) = request.deadline_ms.map(|deadline| end - deadline).filter(|&over| over > 0.0) {
                late += request.weight;
                tardiness_ms += request.weight * over;
            }
            weighted += request.weight * (end - request.release_ms).max(0.0);
            weights += request.weight;
        }
        let value = match self.goal {
            Goal::Makespan => makespan,
            Goal::WeightedCompletion => weighted / weights,
            Goal::Energy => joules,
        };
        Score { excess_bytes: self.excess_bytes(unit), late, tardiness_ms, value }
    }

    /// Bytes of weights beyond the units' memory; weights shared by items and iterations count once per unit.
    pub(crate) fn excess_bytes(&self, unit: &[u32]) -> f64 {
        let Some((number, bytes)) = &self.dense.weights else { return 0.0 };
        let units = self.dense.units;
        let mut seen = vec![false; bytes.len() * units];
        let mut held = vec![0u64; units];
        for (job, &here) in unit.iter().enumerate() {
            let (weights, here) = (number[job] as usize, here as usize);
            if !std::mem::replace(&mut seen[weights * units + here], true) {
                held[here] += bytes[weights];
            }
        }
        let over = held
            .iter()
            .zip(&self.units)
            .map(|(&held, unit)| unit.memory_bytes.map_or(0, |most| held.saturating_sub(most)));
        over.sum::<u64>() as f64
    }
}

/// Dense class of transfers.
pub(crate) const MEMORY: u8 = 1;
