//! Simulated annealing over units and urgencies, evaluated by the decoder.

use super::decode::{Choice, Decoder};
use crate::problem::{Problem, Score};
use crate::request::{Budget, PlanOptions};

/// A deterministic stream of random numbers (xorshift64*).
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        // Spread small seeds; the state must not be 0.
        Self((seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// In `0..count`; 0 when `count` is 0.
    pub fn below(&mut self, count: usize) -> usize {
        ((self.unit() * count as f64) as usize).min(count.saturating_sub(1))
    }
}

/// Search nodes a millisecond on a slow machine: only for turning a clock into a node limit.
const STEPS_PER_MS: f64 = 300.0;

/// What is left of a budget.
#[derive(Debug, Clone)]
pub(crate) struct Meter {
    budget: Budget,
    started_ms: f64,
    spent: u64,
}

impl Meter {
    pub fn new(options: &PlanOptions) -> Self {
        let started_ms = match options.budget {
            Budget::Steps(_) => 0.0,
            Budget::Until(clock) => (clock.now_ms)(),
        };
        Self { budget: options.budget, started_ms, spent: 0 }
    }

    pub fn spend(&mut self, steps: u64) {
        self.spent += steps;
    }

    /// Part of the budget that is gone, 1 or more when it is used up.
    pub fn used(&self) -> f64 {
        match self.budget {
            Budget::Steps(0) => 1.0,
            Budget::Steps(steps) => self.spent as f64 / steps as f64,
            Budget::Until(clock) => {
                let (gone, all) = ((clock.now_ms)() - self.started_ms, clock.end_ms - self.started_ms);
                if all > 0.0 { gone / all } else { 1.0 }
            }
        }
    }

    /// About as many steps as a share of what is left allows.
    pub fn steps_left(&self, share: f64) -> u64 {
        let left = match self.budget {
            Budget::Steps(steps) => steps.saturating_sub(self.spent) as f64,
            Budget::Until(clock) => STEPS_PER_MS * (clock.end_ms - (clock.now_ms)()).max(0.0),
        };
        (left * share) as u64
    }

    /// Milliseconds left, where a clock decides.
    pub fn left_ms(&self) -> Option<f64> {
        match self.budget {
            Budget::Steps(_) => None,
            Budget::Until(clock) => Some(clock.end_ms - (clock.now_ms)()),
        }
    }

    pub fn is_used_up(&self) -> bool {
        self.used() >= 1.0
    }
}

/// How one annealing run goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cooling {
    /// Evaluations at most.
    pub evaluations: u64,
    /// First and last temperature, in the value's unit, above 0.
    pub hot: f64,
    pub cold: f64,
    /// Part of the meter after which to stop.
    pub until: f64,
    /// A value that cannot be improved upon.
    pub bound: f64,
}

/// The score as one number that keeps its order in practice: what matters more weighs more.
fn scalar(score: &Score, scale: f64) -> f64 {
    let excess = if score.excess_bytes > 0.0 { 1e3 + score.excess_bytes / 1e6 } else { 0.0 };
    score.value + scale * (1e3 * excess + 10.0 * score.late) + score.tardiness_ms
}

/// Anneals from `start`; returns the best choice met and its score.
pub(crate) fn anneal(
    decoder: &mut Decoder<'_>,
    problem: &Problem,
    start: Choice,
    cooling: Cooling,
    meter: &mut Meter,
    random: &mut Random,
) -> (Choice, Score) {
    let jobs = problem.jobs().len();
    let before = decoder.steps;
    let score = decoder.run(&start);
    meter.spend(decoder.steps - before);
    let (mut best, mut best_score) = (start.clone(), score);
    if jobs == 0 {
        return (best, best_score);
    }
    let scale = score.value.max(f64::MIN_POSITIVE);
    let moves = Moves::new(problem);
    let mut current = start;
    let mut energy = scalar(&score, scale);
    let mut undo = Undo::default();
    let mut ends = decoder.ends.clone();
    let start_used = meter.used();
    for evaluation in 0..cooling.evaluations {
        // Reading the clock costs as much as a small evaluation.
        if evaluation % 16 == 0 && meter.used() >= cooling.until {
            break;
        }
        if best_score.late == 0.0 && best_score.excess_bytes == 0.0 && best_score.value <= cooling.bound * (1.0 + 1e-9)
        {
            break;
        }
        let by_count = evaluation as f64 / cooling.evaluations as f64;
        let by_meter = (meter.used() - start_used) / (cooling.until - start_used).max(1e-9);
        let progress = by_count.max(by_meter).clamp(0.0, 1.0);
        let temperature = cooling.hot * (cooling.cold / cooling.hot).powf(progress);
        undo.clear();
        moves.propose(&mut current, &mut undo, &ends, random);
        if undo.is_empty() {
            continue;
        }
        let before = decoder.steps;
        let score = decoder.run(&current);
        meter.spend(decoder.steps - before);
        let next = scalar(&score, scale);
        if next <= energy || random.unit() < ((energy - next) / temperature).exp() {
            energy = next;
            ends.clone_from(&decoder.ends);
            if score.is_better(&best_score) {
                best_score = score;
                best.clone_from(&current);
            }
        } else {
            undo.revert(&mut current);
        }
    }
    (best, best_score)
}

/// What a move changed.
#[derive(Debug, Default)]
struct Undo {
    unit: Vec<(u32, u32)>,
    urgency: Vec<(u32, f64)>,
}

impl Undo {
    fn clear(&mut self) {
        self.unit.clear();
        self.urgency.clear();
    }

    fn is_empty(&self) -> bool {
        self.unit.is_empty() && self.urgency.is_empty()
    }

    fn revert(&self, choice: &mut Choice) {
        self.unit.iter().rev().for_each(|&(job, unit)| choice.unit[job as usize] = unit);
        self.urgency.iter().rev().for_each(|&(job, urgency)| choice.urgency[job as usize] = urgency);
    }
}

struct Moves<'p> {
    problem: &'p Problem,
    /// Units that can run each job.
    able: Vec<Vec<u32>>,
    /// Jobs with a choice of unit.
    movable: Vec<u32>,
}

impl<'p> Moves<'p> {
    fn new(problem: &'p Problem) -> Self {
        let able: Vec<Vec<u32>> = problem
            .jobs()
            .iter()
            .map(|job| (0..job.ms.len() as u32).filter(|&unit| job.ms[unit as usize].is_finite()).collect())
            .collect();
        let movable = (0..able.len() as u32).filter(|&job| able[job as usize].len() > 1).collect();
        Self { problem, able, movable }
    }

    fn set(choice: &mut Choice, undo: &mut Undo, job: u32, unit: u32) {
        let slot = &mut choice.unit[job as usize];
        if *slot != unit {
            undo.unit.push((job, *slot));
            *slot = unit;
        }
    }

    /// Changes the choice a little; `ends` are the jobs' ends in the current schedule.
    fn propose(&self, choice: &mut Choice, undo: &mut Undo, ends: &[f64], random: &mut Random) {
        let kind = random.unit();
        if self.movable.is_empty() || kind < 0.2 {
            // A job becomes just more or less urgent than another one.
            let (job, other) = (random.below(ends.len()), random.below(ends.len()));
            let to = choice.urgency[other] * if random.unit() < 0.5 { 1.0 - 1e-9 } else { 1.0 + 1e-9 };
            if job != other {
                undo.urgency.push((job as u32, choice.urgency[job]));
                choice.urgency[job] = to;
            }
            return;
        }
        let job = self.movable[random.below(self.movable.len())];
        let units = &self.able[job as usize];
        let unit = units[random.below(units.len())];
        if kind < 0.5 {
            Self::set(choice, undo, job, unit);
        } else if kind < 0.85 {
            // A connected cluster on one unit moves together: a walk along edges, up or down.
            let home = choice.unit[job as usize];
            let mut length = 1 + random.below(if kind < 0.7 { 4 } else { 16 });
            let mut at = job;
            Self::set(choice, undo, at, unit);
            while length > 0 {
                length -= 1;
                let near = if random.unit() < 0.5 {
                    self.problem.successors(at as usize)
                } else {
                    self.problem.predecessors(at as usize)
                };
                if near.is_empty() {
                    continue;
                }
                let next = near[random.below(near.len())];
                if self.able[next as usize].contains(&unit) {
                    if choice.unit[next as usize] == home {
                        Self::set(choice, undo, next, unit);
                    }
                    at = next;
                }
            }
        } else {
            // Two jobs that are near in time trade units.
            let other = self.movable[random.below(self.movable.len())];
            let (a, b) = (choice.unit[job as usize], choice.unit[other as usize]);
            if a != b && self.able[job as usize].contains(&b) && self.able[other as usize].contains(&a) {
                Self::set(choice, undo, job, b);
                Self::set(choice, undo, other, a);
            }
        }
    }
}
