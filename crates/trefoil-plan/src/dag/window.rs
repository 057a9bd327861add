//! Windows: a stretch of the schedule as a problem of its own, so that large problems are improved piece by piece.
//!
//! The jobs of a window are re-decided while everything else stands: what the window reads from before is there when it is
//! there, resources open when the last earlier step leaves them, and whatever follows outside must still fit in after an end.
//! That last part is the tail of a job or resource: the makespan less the latest time at which the follower may start, by
//! a backward pass over data and resource orders. So a window whose `max (end + tail)` shrinks shortens the whole schedule, as
//! far as slowdown factors stay what they were; the whole is decoded again before anything is kept.

use super::decode::{Choice, Surroundings};
use crate::engine::Rows;
use crate::problem::{Evaluation, Job, Problem, ProblemRequest, ProblemTensor, Schedule, Step};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use trefoil_core::OperatorClass;

/// A whole schedule, timed, with the latest times of its steps.
pub(crate) struct Timed {
    pub schedule: Schedule,
    pub evaluation: Evaluation,
    makespan: f64,
    /// Latest start of each step that keeps the makespan.
    latest: Vec<f64>,
    /// Jobs by start, and each job's place among them.
    pub jobs: Vec<u32>,
    place: Vec<u32>,
    /// Position in the order of each job.
    at: Vec<u32>,
}

impl Timed {
    pub fn new(problem: &Problem, schedule: Schedule, evaluation: Evaluation) -> Option<Self> {
        let edges = problem.step_edges(&schedule).ok()?;
        let order = &schedule.order;
        let makespan = evaluation.makespan_ms;
        let after = Rows::new(order.len(), &edges);
        // Time order: the given order may have steps of different resources in any sequence.
        let mut by_start: Vec<u32> = (0..order.len() as u32).collect();
        by_start.sort_by(|&a, &b| {
            let start = |at: u32| evaluation.spans[at as usize].0;
            start(a).total_cmp(&start(b)).then(a.cmp(&b))
        });
        let mut next: Vec<Option<usize>> = vec![None; problem.resources().len()];
        let mut latest = vec![0.0; order.len()];
        // Backwards along the order, which is topological and the order of every resource.
        for at in (0..order.len()).rev() {
            let unit = problem.step_unit(order[at], &schedule.unit) as usize;
            let mut end = makespan;
            for &then in after.row(at) {
                end = end.min(latest[then as usize]);
            }
            for &resource in &problem.platform.unit_resources[unit] {
                if let Some(then) = next[resource as usize].replace(at) {
                    end = end.min(latest[then]);
                }
            }
            let (start, finish) = evaluation.spans[at];
            latest[at] = end - (finish - start);
        }
        let mut at_of = vec![0; schedule.unit.len()];
        let mut jobs = Vec::with_capacity(schedule.unit.len());
        for at in by_start {
            if let Step::Job(job) = order[at as usize] {
                at_of[job as usize] = at;
                jobs.push(job);
            }
        }
        let mut place = vec![0; jobs.len()];
        jobs.iter().enumerate().for_each(|(at, &job)| place[job as usize] = at as u32);
        Some(Self { schedule, makespan, latest, jobs, place, at: at_of, evaluation })
    }

    fn start(&self, job: u32) -> f64 {
        self.evaluation.spans[self.at[job as usize] as usize].0
    }

    fn end(&self, at: usize) -> f64 {
        self.evaluation.spans[at].1
    }
}

/// When things start; a schedule follows from the order of these times.
#[derive(Debug, Clone)]
pub(crate) struct Times {
    pub unit: Vec<u32>,
    pub job: Vec<f64>,
    /// Row-major tensors × units; NaN where nothing was said.
    pub transfer: Vec<f64>,
    /// Per tensor.
    pub handover: Vec<f64>,
}

impl Times {
    /// Of jobs only.
    pub fn starting(problem: &Problem, choice: &Choice) -> Self {
        Self {
            unit: choice.unit.clone(),
            job: choice.urgency.clone(),
            transfer: vec![f64::NAN; problem.tensors().len() * problem.units().len()],
            handover: vec![f64::NAN; problem.tensors().len()],
        }
    }

    pub fn of(problem: &Problem, timed: &Timed) -> Self {
        let units = problem.units().len();
        let mut moments = Self {
            unit: timed.schedule.unit.clone(),
            job: vec![0.0; timed.jobs.len()],
            transfer: vec![f64::NAN; problem.tensors().len() * units],
            handover: vec![f64::NAN; problem.tensors().len()],
        };
        for (&step, &(start, _)) in timed.schedule.order.iter().zip(&timed.evaluation.spans) {
            moments.set(step, units, start);
        }
        moments
    }

    fn set(&mut self, step: Step, units: usize, start: f64) {
        match step {
            Step::Job(job) => self.job[job as usize] = start,
            Step::Transfer { tensor, unit } => self.transfer[tensor as usize * units + unit as usize] = start,
            Step::Handover(tensor) => self.handover[tensor as usize] = start,
        }
    }

    /// The schedule in the order of these times, as far as dependencies allow; transfers that nothing was said of go right
    /// before their first reader.
    pub fn schedule(&self, problem: &Problem) -> Schedule {
        let dense = &problem.dense;
        let (units, jobs) = (dense.units, self.job.len());
        let mut steps: Vec<(f64, Step)> =
            (0..jobs as u32).map(|job| (self.job[job as usize], Step::Job(job))).collect();
        let mut brought = vec![u32::MAX; problem.tensors().len() * units];
        let mut edges: Vec<(u32, u32)> = Vec::with_capacity(4 * jobs);
        for job in 0..jobs {
            let here = self.unit[job] as usize;
            for &tensor in dense.inputs.row(job) {
                let maker = dense.producer[tensor as usize];
                let from = problem.source(tensor as usize, &self.unit);
                if dense.transfer(tensor as usize, from, here) > 0.0 {
                    let slot = tensor as usize * units + here;
                    if brought[slot] == u32::MAX {
                        brought[slot] = steps.len() as u32;
                        if maker != u32::MAX {
                            edges.push((maker, brought[slot]));
                        }
                        let said = self.transfer[slot];
                        let start = if said.is_nan() { f64::INFINITY } else { said };
                        steps.push((start, Step::Transfer { tensor, unit: here as u32 }));
                    }
                    let step = &mut steps[brought[slot] as usize];
                    step.0 = step.0.min(self.job[job]);
                    edges.push((brought[slot], job as u32));
                } else if maker != u32::MAX {
                    edges.push((maker, job as u32));
                }
            }
            for &tensor in dense.outputs.row(job) {
                if dense.to_host[tensor as usize * units + here] > 0.0 {
                    edges.push((job as u32, steps.len() as u32));
                    let said = self.handover[tensor as usize];
                    steps.push((if said.is_nan() { self.job[job] } else { said }, Step::Handover(tensor)));
                }
            }
        }
        let mut waiting = vec![0u32; steps.len()];
        for &(_, then) in &edges {
            waiting[then as usize] += 1;
        }
        let after = Rows::new(steps.len(), &edges);
        // Of equal times transfers go first: their readers may start then.
        let key = |at: u32| {
            let (start, step) = steps[at as usize];
            let kind = match step {
                Step::Transfer { .. } => 0u8,
                Step::Job(_) => 1,
                Step::Handover(_) => 2,
            };
            Reverse((start.max(0.0).to_bits(), kind, at))
        };
        let mut ready: BinaryHeap<_> =
            (0..steps.len() as u32).filter(|&at| waiting[at as usize] == 0).map(key).collect();
        let mut order = Vec::with_capacity(steps.len());
        while let Some(Reverse((_, _, at))) = ready.pop() {
            order.push(steps[at as usize].1);
            for &then in after.row(at as usize) {
                waiting[then as usize] -= 1;
                if waiting[then as usize] == 0 {
                    ready.push(key(then));
                }
            }
        }
        Schedule { unit: self.unit.clone(), order, after: Vec::new() }
    }
}

/// How many steps before and after a window are looked at for what occupies resources around it.
const NEAR: usize = 64;

/// A window as a problem.
pub(crate) struct Window {
    pub problem: Problem,
    pub around: Surroundings,
    pub start: Choice,
    /// The whole problem's job of each job, and tensor of each tensor.
    pub jobs: Vec<u32>,
    pub tensors: Vec<u32>,
    /// Transfers and handovers for others that happen meanwhile: further jobs, tied to their unit.
    errands: Vec<Step>,
    /// Time of the whole that is 0 here.
    pub zero_ms: f64,
    /// What the window comes to as it stands: `max (end + tail)`.
    pub value: f64,
}

impl Window {
    /// Carries steps of the window, started at the given times, over to the whole.
    pub fn carry(&self, times: &mut Times, units: usize, choice: &Choice, order: &[Step], starts: &[f64]) {
        for (&job, &unit) in self.jobs.iter().zip(&choice.unit) {
            times.unit[job as usize] = unit;
        }
        for (&step, &start) in order.iter().zip(starts) {
            let step = match step {
                Step::Job(job) => match self.jobs.get(job as usize) {
                    Some(&job) => Step::Job(job),
                    None => self.errands[job as usize - self.jobs.len()],
                },
                Step::Transfer { tensor, unit } => Step::Transfer { tensor: self.tensors[tensor as usize], unit },
                Step::Handover(tensor) => Step::Handover(self.tensors[tensor as usize]),
            };
            times.set(step, units, self.zero_ms + start);
        }
    }
}

/// The window of the jobs that start `first..first + count`-th; `None` if nothing in it decides the makespan.
pub(crate) fn window(problem: &Problem, timed: &Timed, first: usize, count: usize) -> Option<Window> {
    let dense = &problem.dense;
    let units = dense.units;
    let unit_of = &timed.schedule.unit;
    let order = &timed.schedule.order;
    let last = (first + count).min(timed.jobs.len());
    let mut jobs: Vec<u32> = timed.jobs[first..last].to_vec();
    jobs.sort_unstable();
    let inside = |job: u32| {
        let place = timed.place[job as usize] as usize;
        place >= first && place < last
    };
    let local = |job: u32| jobs.binary_search(&job).ok().map(|at| at as u32);
    let zero = timed.start(*timed.jobs.get(first)?);
    // What occupies resources around the window: what starts before it, and what of others starts later.
    let mut ready = vec![0.0f64; problem.resources().len()];
    let mut resource_tail = vec![0.0f64; problem.resources().len()];
    let mut value = 0.0f64;
    let mut brought: Vec<(u32, u32)> = Vec::new();
    let (begin, limit) = {
        let positions = jobs.iter().map(|&job| timed.at[job as usize] as usize);
        let (lowest, highest) =
            positions.fold((usize::MAX, 0), |(lowest, highest), at| (lowest.min(at), highest.max(at)));
        // Steps far away in the order are far away in time: only their nearest on each resource matters.
        (lowest.saturating_sub(NEAR), (highest + NEAR).min(order.len()))
    };
    let mut ends_of_window: Vec<(usize, f64)> = Vec::new();
    let mut errands: Vec<usize> = Vec::new();
    let latest_start = timed.start(timed.jobs[last - 1]);
    for (at, &step) in order.iter().enumerate().take(limit).skip(begin) {
        let unit = problem.step_unit(step, unit_of) as usize;
        let (start, end) = timed.evaluation.spans[at];
        let mine = match step {
            Step::Job(job) => inside(job),
            Step::Handover(tensor) => inside(dense.producer[tensor as usize]),
            Step::Transfer { tensor, .. } => {
                let readers = dense.consumers.row(tensor as usize).iter();
                let serves = readers.filter(|&&job| unit_of[job as usize] as usize == unit);
                // One that also serves others stays, if it is early.
                serves.clone().any(|&job| inside(job)) && (start >= zero || serves.into_iter().all(|&job| inside(job)))
            }
        };
        if mine && start >= zero {
            ends_of_window.push((unit, end - zero));
            continue;
        }
        if start < zero {
            if let Step::Transfer { tensor, .. } = step {
                brought.push((tensor, unit as u32));
            }
            for &resource in &problem.platform.unit_resources[unit] {
                let slot = &mut ready[resource as usize];
                *slot = slot.max(end - zero);
            }
            continue;
        }
        if start < latest_start && !matches!(step, Step::Job(_)) {
            ends_of_window.push((unit, end - zero));
            errands.push(at);
            continue;
        }
        for &resource in &problem.platform.unit_resources[unit] {
            let slot = &mut resource_tail[resource as usize];
            *slot = slot.max(timed.makespan - timed.latest[at]);
        }
    }
    for (unit, end) in ends_of_window {
        for &resource in &problem.platform.unit_resources[unit] {
            value = value.max(end + resource_tail[resource as usize]);
        }
    }
    let mut parts =
        Parts { jobs: Vec::new(), tensors: Vec::new(), tensor_ms: Vec::new(), tail_ms: Vec::new(), whole: Vec::new() };
    for &job in &jobs {
        parts.jobs.push(Job {
            request: 0,
            operators: Vec::new(),
            name: String::new(),
            ..problem.jobs()[job as usize].clone()
        });
        for unit in 0..units {
            let mut tail = 0.0f64;
            for &tensor in dense.outputs.row(job as usize) {
                for &next in dense.consumers.row(tensor as usize) {
                    if !inside(next) {
                        let there = unit_of[next as usize] as usize;
                        let follow = timed.makespan - timed.latest[timed.at[next as usize] as usize];
                        tail = tail.max(follow + dense.transfer(tensor as usize, unit, there));
                    }
                }
            }
            if unit == unit_of[job as usize] as usize {
                value = value.max(timed.end(timed.at[job as usize] as usize) - zero + tail);
            }
            parts.tail_ms.push(tail);
        }
    }
    let mut tensors: Vec<u32> = jobs
        .iter()
        .flat_map(|&job| dense.inputs.row(job as usize).iter().chain(dense.outputs.row(job as usize)).copied())
        .collect();
    tensors.sort_unstable();
    tensors.dedup();
    for tensor in tensors {
        let index = tensor as usize;
        let maker = dense.producer[index];
        let consumers: Vec<u32> = dense.consumers.row(index).iter().filter_map(|&job| local(job)).collect();
        let own = maker != u32::MAX && inside(maker);
        let is_output = own && (0..units).any(|unit| dense.to_host[index * units + unit] > 0.0);
        if consumers.is_empty() && !is_output {
            continue;
        }
        let details = &problem.tensors()[index];
        let mut transfer_ms = details.transfer_ms.clone();
        let mut known = 0.0;
        if !own {
            // From outside: prices as from where it is, 0 where it already was brought.
            let from = problem.source(index, unit_of);
            for unit in 0..units {
                let there = brought.contains(&(tensor, unit as u32));
                transfer_ms[units * units + unit] = if there { 0.0 } else { dense.transfer(index, from, unit) };
            }
            if maker != u32::MAX {
                known = (timed.end(timed.at[maker as usize] as usize) - zero).max(0.0);
            }
        }
        parts.tensors.push(ProblemTensor {
            producer: if own { local(maker) } else { None },
            consumers,
            transfer_ms,
            to_host_ms: details.to_host_ms.clone(),
            is_output: details.is_output && own,
            ..*details
        });
        parts.tensor_ms.push(known);
        parts.whole.push(tensor);
    }
    for (number, &at) in errands.iter().enumerate() {
        let (Step::Transfer { tensor, .. } | Step::Handover(tensor)) = order[at] else { continue };
        let here = problem.step_unit(order[at], unit_of) as usize;
        let (start, end) = timed.evaluation.spans[at];
        let mut ms = vec![f64::INFINITY; units];
        ms[here] = problem.step_ms(order[at], unit_of);
        parts.jobs.push(Job {
            name: String::new(),
            model: 0,
            item: 0,
            iteration: 0,
            operators: Vec::new(),
            class: vec![OperatorClass::Memory; units],
            ms,
            weight_bytes: 0,
            request: 0,
        });
        let tail = timed.makespan - (timed.latest[at] + (end - start));
        value = value.max(end - zero + tail);
        parts.tail_ms.extend(std::iter::repeat_n(tail, units));
        let maker = dense.producer[tensor as usize];
        if maker != u32::MAX {
            let own = local(maker);
            let known = (timed.end(timed.at[maker as usize] as usize) - zero).max(0.0);
            parts.tensor_ms.push(if own.is_some() { 0.0 } else { known });
            parts.tensors.push(ProblemTensor {
                producer: own,
                consumers: vec![(jobs.len() + number) as u32],
                transfer_ms: vec![0.0; (units + 1) * units],
                to_host_ms: vec![0.0; units],
                is_output: false,
                ..problem.tensors()[tensor as usize].clone()
            });
            parts.whole.push(tensor);
        }
    }
    if value < (timed.makespan - zero) * (1.0 - 1e-9) {
        return None;
    }
    // More than that only says that others' steps stand between the window's.
    let value = timed.makespan - zero;
    let start = Choice {
        unit: jobs
            .iter()
            .map(|&job| unit_of[job as usize])
            .chain(errands.iter().map(|&at| problem.step_unit(order[at], unit_of)))
            .collect(),
        urgency: jobs
            .iter()
            .map(|&job| timed.start(job))
            .chain(errands.iter().map(|&at| timed.evaluation.spans[at].0))
            .map(|start| (start - zero).max(0.0))
            .collect(),
    };
    let window = Problem::new(
        problem.units().to_vec(),
        problem.resources().to_vec(),
        parts.jobs,
        parts.tensors,
        vec![ProblemRequest::default()],
        problem.factors().clone(),
        problem.idle_watts(),
    )
    .ok()?;
    let around = Surroundings { ready, tail: parts.tail_ms, resource_tail, tensor: parts.tensor_ms };
    let errands = errands.into_iter().map(|at| order[at]).collect();
    Some(Window { problem: window, around, start, jobs, errands, tensors: parts.whole, zero_ms: zero, value })
}

struct Parts {
    jobs: Vec<Job>,
    tensors: Vec<ProblemTensor>,
    tensor_ms: Vec<f64>,
    tail_ms: Vec<f64>,
    /// The whole problem's tensor of each.
    whole: Vec<u32>,
}
