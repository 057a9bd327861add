//! Every order of one assignment's steps.
//!
//! The search walks through time: at every event each step that could start now is started or held back. [`Waiting`] says until when: where a
//! step held back may only start once another step has used one of its resources, exactly the schedules that resource orders
//! can express are visited, each once. Where it may start whenever something ends, every schedule is whose tasks start at ends and
//! arrivals; what then waits without need is told with [`Schedule::after`].

use super::exact::Exact;
use crate::bounds::LeastTimes;
use crate::problem::{Goal, MEMORY, Problem, Schedule, Score, Step};

/// What a step that could start may wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// Another step that takes one of its resources first.
    Never,
    /// The end of any step that runs meanwhile.
    ForAnyEnd,
}

/// The order search for one assignment; steps are positions in `steps`.
pub(super) struct Inner<'p> {
    problem: &'p Problem,
    steps: Vec<Step>,
    unit: Vec<u32>,
    step_unit: Vec<u32>,
    class: Vec<u8>,
    ms: Vec<f64>,
    /// Least milliseconds.
    least: Vec<f64>,
    release: Vec<f64>,
    after: Vec<Vec<u32>>,
    before: Vec<Vec<u32>>,
    request: Vec<Option<u32>>,
    excess: f64,
    /// Of units, at which the work of this assignment takes longest.
    prices: Vec<f64>,
    /// Watts above idling of each step's unit.
    more: Vec<f64>,
    idle: f64,
    frugal: bool,
    waiting: Waiting,
}

#[derive(Clone)]
struct State {
    now: f64,
    joules: f64,
    /// Unfinished predecessors.
    missing: Vec<u32>,
    left: Vec<f64>,
    started: Vec<bool>,
    done: Vec<bool>,
    ends: Vec<f64>,
    /// Held back, by [`Waiting`] until a resource of theirs was used again or something ends.
    held: Vec<bool>,
    /// Ever held back until something ends; and for what each that did then waited.
    late: Vec<bool>,
    after: Vec<(u32, u32)>,
    /// A step that ended at this instant.
    ended: Option<u32>,
    /// Considered at this instant.
    order: Vec<u32>,
    running: Vec<u32>,
    free: Vec<bool>,
}

impl State {
    fn new(inner: &Inner<'_>, problem: &Problem) -> Self {
        let count = inner.steps.len();
        Self {
            now: 0.0,
            joules: 0.0,
            missing: inner.before.iter().map(|before| before.len() as u32).collect(),
            left: inner.ms.clone(),
            started: vec![false; count],
            done: vec![false; count],
            ends: vec![0.0; count],
            held: vec![false; count],
            late: vec![false; count],
            after: Vec::new(),
            ended: None,
            order: Vec::with_capacity(count),
            running: Vec::new(),
            free: vec![true; problem.resources().len()],
        }
    }
}

impl<'p> Inner<'p> {
    pub fn new(
        problem: &'p Problem,
        least: &LeastTimes,
        schedule: &Schedule,
        edges: &[(u32, u32)],
        excess: f64,
        waiting: Waiting,
    ) -> Self {
        let dense = &problem.dense;
        let steps = schedule.order.clone();
        let idle = problem.idle_watts().unwrap_or(0.0);
        let (mut before, mut after) = (vec![Vec::new(); steps.len()], vec![Vec::new(); steps.len()]);
        for &(first, then) in edges {
            before[then as usize].push(first);
            after[first as usize].push(then);
        }
        let step_unit: Vec<u32> = steps.iter().map(|&step| problem.step_unit(step, &schedule.unit)).collect();
        let ms: Vec<f64> = steps.iter().map(|&step| problem.step_ms(step, &schedule.unit)).collect();
        let of = |at: usize| (steps[at], step_unit[at] as usize);
        let more: Vec<f64> =
            step_unit.iter().map(|&unit| problem.units()[unit as usize].watts.unwrap_or(0.0) - idle).collect();
        let mut inner = Self {
            problem,
            class: (0..steps.len())
                .map(|at| match of(at) {
                    (Step::Job(job), unit) => dense.class[job as usize * dense.units + unit],
                    _ => MEMORY,
                })
                .collect(),
            least: (0..steps.len())
                .map(|at| match of(at) {
                    (Step::Job(job), unit) => least.ms(job as usize, unit),
                    (_, unit) => ms[at] * least.transfer_factor(unit),
                })
                .collect(),
            release: (0..steps.len())
                .map(|at| match steps[at] {
                    Step::Job(job) => dense.release[job as usize],
                    Step::Transfer { tensor, .. } | Step::Handover(tensor) => dense.tensor_release[tensor as usize],
                })
                .collect(),
            request: steps
                .iter()
                .map(|&step| match step {
                    Step::Job(job) => Some(problem.jobs()[job as usize].request),
                    Step::Handover(tensor) => Some(problem.jobs()[dense.producer[tensor as usize] as usize].request),
                    Step::Transfer { .. } => None,
                })
                .collect(),
            frugal: more.iter().any(|&more| more < 0.0),
            more,
            idle,
            steps,
            unit: schedule.unit.clone(),
            step_unit,
            ms,
            after,
            before,
            excess,
            prices: Vec::new(),
            waiting,
        };
        inner.prices = least.balance(&inner.loads());
        inner
    }

    /// Tries all orders; what is better than the best so far becomes the best.
    pub fn run(&mut self, best: &mut Exact, limit: u64) {
        self.search(State::new(self, self.problem), best, limit);
    }

    /// Work by unit, undisturbed.
    fn loads(&self) -> Vec<f64> {
        let mut loads = vec![0.0; self.problem.units().len()];
        self.step_unit.iter().zip(&self.ms).for_each(|(&unit, ms)| loads[unit as usize] += ms);
        loads
    }

    fn resources(&self, step: usize) -> &[u32] {
        &self.problem.platform.unit_resources[self.step_unit[step] as usize]
    }

    fn can_start(&self, state: &State, step: usize) -> bool {
        !state.started[step]
            && !state.held[step]
            && state.missing[step] == 0
            && self.release[step] <= state.now
            && self.resources(step).iter().all(|&resource| state.free[resource as usize])
    }

    fn search(&mut self, state: State, best: &mut Exact, limit: u64) {
        best.nodes += 1;
        if best.nodes > limit {
            best.complete = false;
            return;
        }
        if !self.may_improve(&state, &best.score) {
            return;
        }
        let Some(step) = (0..self.steps.len()).find(|&step| self.can_start(&state, step)) else {
            if let Some(next) = self.advance(state, best) {
                self.search(next, best, limit);
            }
            return;
        };
        // Holding back is for the sake of another step that takes one of its resources first, or would be slowed.
        let waits = self.waiting == Waiting::ForAnyEnd;
        let rival = (0..self.steps.len()).any(|other| {
            other != step
                && !state.done[other]
                && (waits
                    || !state.started[other]
                        && self.resources(other).iter().any(|resource| self.resources(step).contains(resource)))
        });
        let mut begun = state.clone();
        begun.started[step] = true;
        begun.order.push(step as u32);
        begun.running.push(step as u32);
        if let Some(ended) = begun.ended.filter(|_| begun.late[step]) {
            begun.after.push((ended, step as u32));
        }
        for &resource in self.resources(step) {
            begun.free[resource as usize] = false;
        }
        // What waits for these resources may go when they are free again.
        for other in 0..self.steps.len() {
            if !waits
                && begun.held[other]
                && self.resources(other).iter().any(|resource| self.resources(step).contains(resource))
            {
                begun.held[other] = false;
            }
        }
        self.search(begun, best, limit);
        if rival && best.complete {
            let mut held = state;
            held.held[step] = true;
            held.late[step] = waits;
            self.search(held, best, limit);
        }
    }

    /// Lets time pass until something ends or arrives; `None` at the end or when nothing ever will.
    fn advance(&self, mut state: State, best: &mut Exact) -> Option<State> {
        let problem = self.problem;
        let arrival = (0..self.steps.len())
            .filter(|&step| !state.started[step] && self.release[step] > state.now)
            .map(|step| self.release[step])
            .fold(f64::INFINITY, f64::min);
        if state.running.is_empty() && arrival.is_infinite() {
            if state.done.iter().all(|&done| done) {
                let score = self.score(&state);
                if score.is_better(&best.score) {
                    best.score = score;
                    best.schedule = Some(Schedule {
                        unit: self.unit.clone(),
                        order: state.order.iter().map(|&step| self.steps[step as usize]).collect(),
                        after: state
                            .after
                            .iter()
                            .map(|&(first, then)| (self.steps[first as usize], self.steps[then as usize]))
                            .collect(),
                    });
                }
            }
            return None;
        }
        let kind = |step: u32| (self.step_unit[step as usize], self.class[step as usize]);
        let rates: Vec<f64> = state
            .running
            .iter()
            .map(|&step| {
                let (unit, class) = kind(step);
                let others = state.running.iter().filter(|&&other| other != step).map(|&other| kind(other));
                1.0 / problem.platform.factors.slowdown(unit, class, others)
            })
            .collect();
        let waits = |(&step, rate): (&u32, &f64)| state.left[step as usize] / rate;
        let step_ms = state.running.iter().zip(&rates).map(waits).fold(arrival - state.now, f64::min);
        let power: f64 = state.running.iter().map(|&step| self.more[step as usize]).sum();
        state.joules += (self.idle + power) * step_ms / 1e3;
        state.now = if step_ms.to_bits() == (arrival - state.now).to_bits() { arrival } else { state.now + step_ms };
        let running = std::mem::take(&mut state.running);
        state.ended = None;
        for (&step, rate) in running.iter().zip(&rates) {
            let at = step as usize;
            if state.left[at] / rate <= step_ms * (1.0 + crate::engine::SIMULTANEOUS) {
                state.left[at] = 0.0;
                state.done[at] = true;
                state.ends[at] = state.now;
                state.ended = Some(step);
                for &resource in self.resources(at) {
                    state.free[resource as usize] = true;
                }
                for &next in &self.after[at] {
                    state.missing[next as usize] -= 1;
                }
            } else {
                state.left[at] -= step_ms * rate;
                state.running.push(step);
            }
        }
        if self.waiting == Waiting::ForAnyEnd && state.ended.is_some() {
            state.held.fill(false);
        }
        Some(state)
    }

    fn score(&self, state: &State) -> Score {
        let mut completion = vec![0.0f64; self.problem.requests().len()];
        for (request, &end) in self.request.iter().zip(&state.ends) {
            if let Some(request) = request {
                let slot = &mut completion[*request as usize];
                *slot = slot.max(end);
            }
        }
        let mut score = self.problem.score(state.now, state.joules, &completion, &[]);
        score.excess_bytes = self.excess;
        score
    }

    /// Bound: everything left at its least, each resource one thing at a time.
    fn may_improve(&self, state: &State, incumbent: &Score) -> bool {
        let problem = self.problem;
        let count = self.steps.len();
        let mut ends = vec![0.0f64; count];
        let mut load = vec![state.now; problem.resources().len()];
        let mut completion = vec![0.0f64; problem.requests().len()];
        let (mut makespan, mut joules, mut priced) = (state.now, state.joules, state.now);
        // `steps` is a topological order.
        for step in 0..count {
            ends[step] = if state.done[step] {
                state.ends[step]
            } else {
                let share = if self.ms[step] > 0.0 { state.left[step] / self.ms[step] } else { 0.0 };
                let left = self.least[step] * share;
                for &resource in self.resources(step) {
                    load[resource as usize] += left;
                }
                joules += (self.more[step] * left).max(0.0) / 1e3;
                priced += self.prices[self.step_unit[step] as usize] * state.left[step];
                let ready = if state.started[step] {
                    state.now
                } else {
                    let before = self.before[step].iter().map(|&before| ends[before as usize]);
                    before.fold(state.now.max(self.release[step]), f64::max)
                };
                ready + left
            };
            makespan = makespan.max(ends[step]);
            if let Some(request) = self.request[step] {
                let slot = &mut completion[request as usize];
                *slot = slot.max(ends[step]);
            }
        }
        makespan = load.iter().copied().fold(makespan.max(priced), f64::max);
        joules += self.idle * (makespan - state.now) / 1e3;
        if self.frugal && problem.goal() == Goal::Energy {
            return true;
        }
        let mut bound = problem.score(makespan, joules, &completion, &[]);
        bound.excess_bytes = self.excess;
        bound.is_better(incumbent)
    }
}
