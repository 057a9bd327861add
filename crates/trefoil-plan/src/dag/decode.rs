//! The decoder: where jobs run and how urgent they are → a schedule in which no unit idles while something for it is ready.

use crate::engine::SIMULTANEOUS;
use crate::problem::{Goal, Problem, Schedule, Score, Step};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What is decoded: a unit and an urgency per job, the smaller the more urgent (finite, not negative).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    pub unit: Vec<u32>,
    pub urgency: Vec<f64>,
}

/// What waits for a unit, the most urgent first: urgency as bits (which order non-negative numbers), kind, index.
type Waiting = BinaryHeap<Reverse<(u64, u8, u32)>>;

const TRANSFER: u8 = 0;
const JOB: u8 = 1;
const HANDOVER: u8 = 2;
/// A tensor that only now is at its source (kind of an arrival).
const TENSOR: u8 = 3;

#[derive(Debug, Clone, Copy)]
struct Running {
    kind: u8,
    index: u32,
    unit: u32,
    class: u8,
    left: f64,
    rate: f64,
}

/// Times beyond a problem's own that make it part of a larger one (all zero otherwise).
#[derive(Debug, Clone, Default)]
pub(crate) struct Surroundings {
    /// Per resource: busy until, in milliseconds like all of these.
    pub ready: Vec<f64>,
    /// Row-major jobs × units: what must still follow its end there.
    pub tail: Vec<f64>,
    /// Per resource: what must still follow on it.
    pub resource_tail: Vec<f64>,
    /// Per tensor: at its source not before.
    pub tensor: Vec<f64>,
}

/// Runs list schedules of one problem, reusing its memory. The same semantics as the simulator's: replaying the order that
/// comes out gives the same times.
pub(crate) struct Decoder<'p> {
    problem: &'p Problem,
    around: Surroundings,
    missing: Vec<u32>,
    missing_at_start: Vec<u32>,
    /// Row-major tensors × units: whether a transfer was asked for.
    asked: Vec<bool>,
    waiting: Vec<Waiting>,
    /// Not yet released, by time.
    arrivals: BinaryHeap<Reverse<(u64, u8, u32, u32)>>,
    busy: Vec<bool>,
    /// Resources that become free at a time, descending.
    opening: Vec<(f64, u32)>,
    running: Vec<Running>,
    completion: Vec<f64>,
    /// Started steps, in order.
    pub order: Vec<Step>,
    /// Start of each of `order`.
    pub starts: Vec<f64>,
    /// End of each job.
    pub ends: Vec<f64>,
    /// Steps run since the decoder was made.
    pub steps: u64,
    idle: f64,
    watts: Vec<f64>,
    lone: bool,
    /// Rates by what is busy: `code · units + unit`, NaN until asked for. Code: base-3 digits per unit, 0 idle, class + 1 busy.
    rates: Vec<f64>,
    weight_of: Vec<usize>,
    busy_code: usize,
}

/// Most units for which rates are kept by what is busy (3⁷ × 7 numbers).
const RATED_UNITS: usize = 7;

impl<'p> Decoder<'p> {
    pub fn new(problem: &'p Problem) -> Self {
        Self::within(problem, Surroundings::default())
    }

    pub fn within(problem: &'p Problem, around: Surroundings) -> Self {
        let dense = &problem.dense;
        let jobs = problem.jobs().len();
        let units = dense.units;
        Self {
            problem,
            around,
            missing: Vec::new(),
            missing_at_start: (0..jobs).map(|job| dense.inputs.row(job).len() as u32).collect(),
            asked: vec![false; problem.tensors().len() * units],
            waiting: vec![Waiting::new(); units],
            arrivals: BinaryHeap::new(),
            busy: vec![false; problem.resources().len()],
            opening: Vec::new(),
            running: Vec::new(),
            completion: vec![0.0; problem.requests().len()],
            order: Vec::with_capacity(2 * jobs),
            starts: Vec::with_capacity(2 * jobs),
            ends: vec![0.0; jobs],
            steps: 0,
            idle: problem.idle_watts().unwrap_or(0.0),
            watts: problem.units().iter().map(|unit| unit.watts.unwrap_or(0.0)).collect(),
            lone: problem.requests().len() < 2,
            rates: if units <= RATED_UNITS { vec![f64::NAN; 3usize.pow(units as u32) * units] } else { Vec::new() },
            weight_of: (0..units.min(RATED_UNITS)).map(|unit| 3usize.pow(unit as u32)).collect(),
            busy_code: 0,
        }
    }

    /// Decodes; `order`, `starts` and `ends` are those of this choice afterwards.
    pub fn run(&mut self, choice: &Choice) -> Score {
        let problem = self.problem;
        let dense = &problem.dense;
        self.missing.clone_from(&self.missing_at_start);
        self.asked.fill(false);
        self.waiting.iter_mut().for_each(BinaryHeap::clear);
        self.arrivals.clear();
        self.busy.fill(false);
        self.running.clear();
        self.busy_code = 0;
        self.completion.fill(0.0);
        self.order.clear();
        self.starts.clear();
        self.opening.clear();
        for (resource, &ready) in self.around.ready.iter().enumerate() {
            if ready > 0.0 {
                self.busy[resource] = true;
                self.opening.push((ready, resource as u32));
            }
        }
        self.opening.sort_by(|a, b| b.0.total_cmp(&a.0));
        for job in 0..self.missing.len() {
            if self.missing[job] == 0 {
                self.release(job as u32, choice, 0.0);
            }
        }
        for at in 0..dense.at_host.len() {
            let tensor = dense.at_host[at];
            let known = self.around.tensor.get(tensor as usize).copied().unwrap_or(0.0);
            if known > 0.0 {
                self.arrivals.push(Reverse((known.to_bits(), TENSOR, tensor, 0)));
            } else {
                self.offer(tensor, choice, 0.0);
            }
        }
        let (mut now, mut makespan, mut joules) = (0.0, 0.0f64, 0.0);
        loop {
            self.start_all(choice, now);
            let arrival = self.arrivals.peek().map(|Reverse((bits, ..))| f64::from_bits(*bits));
            let opening = self.opening.last().map(|&(ms, _)| ms);
            let next = match (arrival, opening) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            if self.running.is_empty()
                && (next.is_none() || self.waiting.iter().all(BinaryHeap::is_empty) && arrival.is_none())
            {
                break;
            }
            let mut step = next.map_or(f64::INFINITY, |at| at - now);
            let by_event = step;
            let mut power = 0.0;
            for at in 0..self.running.len() {
                let Running { unit, left, .. } = self.running[at];
                let slot = self.busy_code * dense.units + unit as usize;
                let rate = match self.rates.get(slot) {
                    Some(&rate) if !rate.is_nan() => rate,
                    known => {
                        let kept = known.is_some();
                        let rate = self.rate(at);
                        if kept {
                            self.rates[slot] = rate;
                        }
                        rate
                    }
                };
                self.running[at].rate = rate;
                step = step.min(left / rate);
                power += self.watts[unit as usize] - self.idle;
            }
            joules += (self.idle + power) * step / 1e3;
            now = match next {
                Some(at) if step.to_bits() == by_event.to_bits() => at,
                _ => now + step,
            };
            let mut kept = 0;
            for at in 0..self.running.len() {
                let mut task = self.running[at];
                if task.left / task.rate <= step * (1.0 + SIMULTANEOUS) {
                    let tail = self.finish(task, choice, now);
                    makespan = makespan.max(now + tail);
                } else {
                    task.left -= step * task.rate;
                    self.running[kept] = task;
                    kept += 1;
                }
            }
            self.running.truncate(kept);
            while self.opening.last().is_some_and(|&(ms, _)| ms <= now) {
                let (_, resource) = self.opening.pop().unwrap_or_default();
                self.busy[resource as usize] = false;
            }
            while let Some(&Reverse((bits, kind, index, unit))) = self.arrivals.peek() {
                if f64::from_bits(bits) > now {
                    break;
                }
                self.arrivals.pop();
                match kind {
                    TENSOR => self.offer(index, choice, now),
                    JOB => self.enqueue(unit, choice.urgency[index as usize], JOB, index),
                    _ => self.enqueue(unit, self.urgency_of(index, unit, choice), TRANSFER, index),
                }
            }
        }
        let mut score = Score { excess_bytes: 0.0, late: 0.0, tardiness_ms: 0.0, value: makespan };
        if !self.lone || problem.goal() != Goal::Makespan || problem.requests().iter().any(|r| r.deadline_ms.is_some())
        {
            score = problem.score(makespan, joules, &self.completion, &choice.unit);
        } else if dense.weights.is_some() {
            score.excess_bytes = problem.excess_bytes(&choice.unit);
        }
        self.steps += self.order.len() as u64;
        debug_assert!(self.order.iter().filter(|step| matches!(step, Step::Job(_))).count() == choice.unit.len());
        score
    }

    /// The schedule of the last run.
    pub fn schedule(&self, choice: &Choice) -> Schedule {
        Schedule { unit: choice.unit.clone(), order: self.order.clone(), after: Vec::new() }
    }

    /// Rate of a running task among the others.
    fn rate(&self, at: usize) -> f64 {
        let Running { unit, class, .. } = self.running[at];
        let others = self.running.iter().enumerate().filter(|(other, _)| *other != at);
        let others = others.map(|(_, task)| (task.unit, task.class));
        1.0 / self.problem.platform.factors.slowdown(unit, class, others)
    }

    fn enqueue(&mut self, unit: u32, urgency: f64, kind: u8, index: u32) {
        self.waiting[unit as usize].push(Reverse((urgency.to_bits(), kind, index)));
    }

    /// A job has all it reads.
    fn release(&mut self, job: u32, choice: &Choice, now: f64) {
        let release = self.problem.dense.release[job as usize];
        let unit = choice.unit[job as usize];
        if release > now {
            self.arrivals.push(Reverse((release.to_bits(), JOB, job, unit)));
        } else {
            self.enqueue(unit, choice.urgency[job as usize], JOB, job);
        }
    }

    /// A tensor is there, at its maker's unit or at the host: readers get it, or transfers are asked for.
    fn offer(&mut self, tensor: u32, choice: &Choice, now: f64) {
        let problem = self.problem;
        let dense = &problem.dense;
        let from = problem.source(tensor as usize, &choice.unit);
        for &job in dense.consumers.row(tensor as usize) {
            let unit = choice.unit[job as usize] as usize;
            if dense.transfer(tensor as usize, from, unit) > 0.0 {
                let slot = tensor as usize * dense.units + unit;
                if !std::mem::replace(&mut self.asked[slot], true) {
                    let release = dense.tensor_release[tensor as usize];
                    if release > now {
                        self.arrivals.push(Reverse((release.to_bits(), TRANSFER, tensor, unit as u32)));
                    } else {
                        let urgency = self.urgency_of(tensor, unit as u32, choice);
                        self.enqueue(unit as u32, urgency, TRANSFER, tensor);
                    }
                }
            } else {
                self.missing[job as usize] -= 1;
                if self.missing[job as usize] == 0 {
                    self.release(job, choice, now);
                }
            }
        }
    }

    /// That of the most urgent reader there.
    fn urgency_of(&self, tensor: u32, unit: u32, choice: &Choice) -> f64 {
        let readers = self.problem.dense.consumers.row(tensor as usize).iter();
        let there = readers.filter(|&&job| choice.unit[job as usize] == unit);
        there.map(|&job| choice.urgency[job as usize]).fold(f64::INFINITY, f64::min)
    }

    fn start_all(&mut self, choice: &Choice, now: f64) {
        let problem = self.problem;
        let dense = &problem.dense;
        loop {
            let mut best: Option<((u64, u8, u32), usize)> = None;
            for (unit, list) in self.waiting.iter().enumerate() {
                let Some(&Reverse(first)) = list.peek() else { continue };
                if best.is_none_or(|(key, _)| first < key)
                    && problem.platform.unit_resources[unit].iter().all(|&id| !self.busy[id as usize])
                {
                    best = Some((first, unit));
                }
            }
            let Some(((_, kind, index), unit)) = best else { return };
            self.waiting[unit].pop();
            let (step, class) = match kind {
                JOB => (Step::Job(index), dense.class[index as usize * dense.units + unit]),
                TRANSFER => (Step::Transfer { tensor: index, unit: unit as u32 }, crate::problem::MEMORY),
                _ => (Step::Handover(index), crate::problem::MEMORY),
            };
            for &resource in &problem.platform.unit_resources[unit] {
                self.busy[resource as usize] = true;
            }
            let left = match kind {
                JOB => dense.ms(index as usize, unit),
                _ => problem.step_ms(step, &choice.unit),
            };
            self.busy_code += self.weight_of.get(unit).map_or(0, |weight| weight * (usize::from(class) + 1));
            self.running.push(Running { kind, index, unit: unit as u32, class, left, rate: 1.0 });
            self.order.push(step);
            self.starts.push(now);
        }
    }

    /// Ends a task; returns what must follow it outside.
    fn finish(&mut self, task: Running, choice: &Choice, now: f64) -> f64 {
        let problem = self.problem;
        let dense = &problem.dense;
        let mut tail = 0.0f64;
        let weight = self.weight_of.get(task.unit as usize).copied().unwrap_or(0);
        self.busy_code -= weight * (usize::from(task.class) + 1);
        for &resource in &problem.platform.unit_resources[task.unit as usize] {
            self.busy[resource as usize] = false;
            tail = tail.max(self.around.resource_tail.get(resource as usize).copied().unwrap_or(0.0));
        }
        match task.kind {
            TRANSFER => {
                for &job in dense.consumers.row(task.index as usize) {
                    if choice.unit[job as usize] == task.unit {
                        self.missing[job as usize] -= 1;
                        if self.missing[job as usize] == 0 {
                            self.release(job, choice, now);
                        }
                    }
                }
            }
            JOB => {
                let job = task.index as usize;
                self.ends[job] = now;
                tail = tail.max(self.around.tail.get(job * dense.units + task.unit as usize).copied().unwrap_or(0.0));
                self.complete(job, now);
                for &tensor in dense.outputs.row(job) {
                    self.offer(tensor, choice, now);
                    if dense.to_host[tensor as usize * dense.units + task.unit as usize] > 0.0 {
                        // One request: outputs can wait for whatever else there is to do.
                        let urgency = if self.lone { f64::MAX } else { choice.urgency[job] };
                        self.enqueue(task.unit, urgency, HANDOVER, tensor);
                    }
                }
            }
            _ => self.complete(dense.producer[task.index as usize] as usize, now),
        }
        tail
    }

    fn complete(&mut self, job: usize, now: f64) {
        let slot = &mut self.completion[self.problem.jobs()[job].request as usize];
        *slot = slot.max(now);
    }
}
