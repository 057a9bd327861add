//! The least that jobs and transfers can take, and the load of units.

use super::blocks::Blocks;
use super::part::{Border, Part};
use super::priced::{Moment, Pricing};
use super::refute::{self, Stretch};
use super::{BLOCK_ROUNDS, Effort};
use crate::factors::class_index;
use crate::problem::Problem;
use crate::view::CostView;
use trefoil_core::OperatorClass;

/// The least that anything can take, whoever runs beside it.
#[derive(Debug, Clone)]
pub(crate) struct LeastTimes {
    units: usize,
    /// Smallest slowdown factor by unit and class.
    pub(super) factor: Vec<[f64; 2]>,
    /// Row-major jobs × units.
    ms: Vec<f64>,
    /// Sets of units that can be busy at once, with the fastest that each can be then.
    sets: Vec<Vec<(usize, f64)>>,
    /// Row-major models × units: least of any segment beyond its operators; empty for lone jobs.
    start: Vec<f64>,
    /// Row-major jobs × units: what a job costs beyond its time, in the goal's unit (millijoules for energy); empty for nothing. See
    /// [`super::memory`].
    pub(super) charges: Vec<f64>,
}

/// What loads between cuts are computed with.
pub(super) struct Series<'s> {
    pub moments: &'s [Moment],
    pub effort: Effort,
    /// Whether the class of work is known.
    pub classed: bool,
}

/// The work between cuts, one after another.
struct Between<'b> {
    least: &'b LeastTimes,
    problem: &'b Problem,
    blocks: &'b Blocks,
    series: Option<&'b Series<'b>>,
    /// The cut before, if there was one.
    before: Option<u32>,
    /// Local index of the jobs of the block looked at.
    local: Vec<u32>,
    rounds: usize,
    /// Rounds and partial placements for each value that is to be refuted.
    refuting: usize,
    nodes: u64,
}

impl<'b> Between<'b> {
    fn new(least: &'b LeastTimes, problem: &'b Problem, blocks: &'b Blocks, series: Option<&'b Series<'b>>) -> Self {
        let (jobs, units) = (problem.jobs().len(), least.units);
        let pairs = jobs * units * units;
        let series = series.filter(|series| !series.moments.is_empty() && blocks.inside.len() > 1);
        let paid = series.map_or(0, |series| series.effort.rounds(2 * pairs, units, 0, 40 + MOST_REFUTING));
        let rounds = paid.min(40);
        let refuting = (paid - rounds) / REFUTING_SHARE;
        let series = series.filter(|_| rounds > 0);
        let local = if series.is_some() { vec![u32::MAX; jobs] } else { Vec::new() };
        let stretches = blocks.inside.iter().filter(|inside| !inside.is_empty()).count() * units * units;
        let nodes = series.map_or(0, |series| refute::nodes(Effort(series.effort.0 / 2.0), stretches));
        Self { least, problem, blocks, series, before: None, local, rounds, refuting, nodes }
    }

    /// By unit of the cut (`None` after the last one): no earlier start, or end of everything, given what lies between the cut before
    /// and this one.
    fn floors(&mut self, number: usize, cut: Option<u32>, ends: &[f64]) -> Vec<f64> {
        let (problem, blocks, least_times) = (self.problem, self.blocks, self.least);
        let units = least_times.units;
        let inside = &blocks.inside[number];
        let before = std::mem::replace(&mut self.before, cut);
        let ended = |unit: usize| before.map_or(0.0, |before| ends[before as usize * units + unit]);
        let least = (0..units).map(ended).fold(f64::INFINITY, f64::min);
        if inside.is_empty() {
            // What is read of the cut before is the path's.
            return vec![if cut.is_some() { 0.0 } else { least }; units];
        }
        let (load, weights) = least_times.load(problem, inside, cut.is_none(), BLOCK_ROUNDS);
        let mut floors = vec![least + load; units];
        let Some(series) = self.series else { return floors };
        for (at, &job) in inside.iter().enumerate() {
            self.local[job as usize] = at as u32;
        }
        let mut start: Vec<f64> = (0..2 * units).map(|at| weights[at / 2]).collect();
        let able = |job: u32, unit: usize| problem.dense.ms(job as usize, unit).is_finite();
        let rows: Vec<Option<usize>> = match cut {
            Some(cut) => (0..units).filter(|&unit| able(cut, unit)).map(Some).collect(),
            None => vec![None],
        };
        let columns: Vec<Option<usize>> = match before {
            Some(before) => (0..units).filter(|&unit| able(before, unit)).map(Some).collect(),
            None => vec![None],
        };
        for &to in &rows {
            let border = |from: Option<usize>| Border {
                before: before.zip(from),
                after: cut.zip(to),
                local: &self.local,
                inputs: before.is_none(),
                outputs: cut.is_none(),
                classed: series.classed,
                charges: &least_times.charges,
            };
            // By unit of the cut before: the floor, prices that show it, and whether more was tried.
            let mut found: Vec<(f64, Vec<f64>, bool)> = Vec::with_capacity(columns.len());
            for &from in &columns {
                let part = Part::new(problem, inside, border(from));
                let (value, witness) = Pricing::new(&part, series.moments).search(Some(&start), self.rounds, 0);
                start.clone_from(&witness.weights);
                found.push((from.map_or(0.0, ended) + value, witness.weights, false));
            }
            // Only the least of them counts: it is raised until another one is the least.
            let lowest = |found: &[(f64, Vec<f64>, bool)]| {
                (0..found.len())
                    .min_by(|&a, &b| found[a].0.total_cmp(&found[b].0))
                    .filter(|&at| !found[at].2 && found[at].0.is_finite())
            };
            while let Some(at) = lowest(&found) {
                let begins = columns[at].map_or(0.0, ended);
                let stretch = Stretch {
                    problem,
                    least: least_times,
                    jobs: inside,
                    border: border(columns[at]),
                    arrivals: false,
                    moments: series.moments,
                    rounds: self.refuting,
                    nodes: self.nodes,
                    earliest: 0.0,
                };
                found[at].0 = begins + stretch.bound(found[at].0 - begins, &found[at].1);
                found[at].2 = true;
            }
            let floor = found.iter().map(|found| found.0).fold(f64::INFINITY, f64::min);
            match to {
                Some(unit) => floors[unit] = floors[unit].max(floor),
                None => floors.iter_mut().for_each(|slot| *slot = slot.max(floor)),
            }
        }
        for &job in inside {
            self.local[job as usize] = u32::MAX;
        }
        floors
    }
}

/// Rounds that refuting values may take for one pair of cuts' units, and what part of them one value gets.
const MOST_REFUTING: usize = 192;
const REFUTING_SHARE: usize = 12;

/// Above this many units sets are not listed; all of them then count as free of slowdown and of shared resources.
const LISTED_UNITS: usize = 10;

/// Sets of units that share no resource, and the rate of each unit in them.
fn busy_sets(problem: &Problem) -> Vec<Vec<(usize, f64)>> {
    let units = problem.units().len();
    let factors = &problem.platform.factors;
    if units > LISTED_UNITS {
        let least = |unit| factors.least(unit, 0, |_| true).min(factors.least(unit, 1, |_| true));
        return vec![(0..units).map(|unit| (unit, 1.0 / least(unit))).collect()];
    }
    (1usize..1 << units)
        .map(|code| (0..units).filter(|unit| code >> unit & 1 == 1).collect::<Vec<_>>())
        .filter(|set| set.iter().all(|&one| set.iter().all(|&two| one == two || !problem.conflict(one, two))))
        .map(|set| set.iter().map(|&unit| (unit, 1.0 / factors.least_beside(unit, &set))).collect())
        .collect()
}

impl LeastTimes {
    pub fn new(problem: &Problem) -> Self {
        let units = problem.units().len();
        let factor: Vec<[f64; 2]> = (0..units)
            .map(|unit| {
                [0, 1].map(|class| problem.platform.factors.least(unit, class, |other| !problem.conflict(unit, other)))
            })
            .collect();
        let dense = &problem.dense;
        let ms = dense
            .ms
            .iter()
            .zip(&dense.class)
            .enumerate()
            .map(|(at, (ms, &class))| ms * factor[at % units][class as usize])
            .collect();
        Self { units, factor, ms, sets: busy_sets(problem), start: Vec::new(), charges: Vec::new() }
    }

    /// The same with what jobs cost beyond their time, row-major jobs × units in the goal's unit.
    pub fn charging(&self, charges: Vec<f64>) -> Self {
        Self { charges, ..self.clone() }
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Smallest factor of any work on a unit.
    pub fn least_factor(&self, unit: usize) -> f64 {
        self.factor[unit][0].min(self.factor[unit][1])
    }

    /// Counts what every segment costs beyond its operators.
    pub fn starts(&mut self, views: &[&CostView<'_>]) {
        let of = |view: &&CostView<'_>| {
            (0..self.units).map(|unit| view.least_start(unit) * self.least_factor(unit)).collect::<Vec<_>>()
        };
        self.start = views.iter().flat_map(of).collect();
    }

    /// Whether jobs stand for what operators add to segments, whose class is not known.
    pub(super) fn of_segments(&self) -> bool {
        !self.start.is_empty()
    }

    /// Least of a segment on a unit beyond its operators.
    pub fn start(&self, problem: &Problem, job: usize, unit: usize) -> f64 {
        self.start.get(problem.jobs()[job].model as usize * self.units + unit).copied().unwrap_or(0.0)
    }

    /// The same at prices of units, where it is least: there is one segment at least.
    pub(super) fn first_start(&self, prices: &[f64]) -> f64 {
        let costs = self.start.iter().enumerate().map(|(at, start)| start * prices[at % self.units].max(0.0));
        costs.reduce(f64::min).unwrap_or(0.0)
    }

    /// Whether any unit works faster beside another than alone.
    pub fn speeds_up(&self) -> bool {
        self.factor.iter().flatten().any(|factor| *factor < 1.0)
    }

    /// Smallest factor of a class of work on a unit.
    pub fn factor(&self, unit: usize, class: OperatorClass) -> f64 {
        self.factor[unit][class_index(class)]
    }

    /// Least time and charge.
    pub fn ms(&self, job: usize, unit: usize) -> f64 {
        self.ms[job * self.units + unit] + self.charge(job, unit)
    }

    /// What a job costs on a unit beyond its time.
    fn charge(&self, job: usize, unit: usize) -> f64 {
        self.charges.get(job * self.units + unit).copied().unwrap_or(0.0)
    }

    /// Smallest factor of transfers to a unit.
    pub fn transfer_factor(&self, unit: usize) -> f64 {
        self.factor[unit][1]
    }

    /// `c(j, u)`, row-major jobs × units.
    pub fn earliest_ends(&self, problem: &Problem) -> Vec<f64> {
        self.ends_over_cuts(problem, &Blocks::default(), None).0
    }

    /// The same with the loads between cuts, and the earliest end of what follows the last cut.
    pub(super) fn ends_over_cuts(
        &self,
        problem: &Problem,
        blocks: &Blocks,
        series: Option<&Series<'_>>,
    ) -> (Vec<f64>, f64) {
        let (dense, units) = (&problem.dense, self.units);
        let mut ends = vec![f64::INFINITY; self.ms.len()];
        let mut between = Between::new(self, problem, blocks, series);
        for &job in &dense.order {
            let cut = blocks.number.get(job as usize).copied().flatten();
            let floor = match cut {
                Some(cut) => between.floors(cut, Some(job), &ends),
                None => vec![0.0; units],
            };
            let job = job as usize;
            for unit in 0..units {
                let mut start = dense.release[job].max(floor[unit]);
                // A segment of which this is the first operator, or which reads something from elsewhere.
                let begins = self.start(problem, job, unit);
                if dense.inputs.row(job).is_empty() {
                    start += begins;
                }
                for &tensor in dense.inputs.row(job) {
                    let tensor = tensor as usize;
                    let price = |from: usize| {
                        let transfer = dense.transfer(tensor, from, unit) * self.transfer_factor(unit);
                        transfer + if from == unit { 0.0 } else { begins }
                    };
                    let there = match dense.producer[tensor] {
                        u32::MAX => dense.tensor_release[tensor] + price(units),
                        maker => (0..units)
                            .map(|from| ends[maker as usize * units + from] + price(from))
                            .fold(f64::INFINITY, f64::min),
                    };
                    start = start.max(there);
                }
                ends[job * units + unit] = start + self.ms(job, unit);
            }
        }
        let rest = match blocks.inside.len().checked_sub(1) {
            Some(last) => between.floors(last, None, &ends).into_iter().fold(f64::INFINITY, f64::min),
            None => 0.0,
        };
        (ends, if rest.is_finite() { rest } else { 0.0 })
    }

    /// Earliest end of a job and of handing over what it makes for the host.
    pub fn end_with_handover(&self, problem: &Problem, ends: &[f64], job: usize) -> f64 {
        let (dense, units) = (&problem.dense, self.units);
        (0..units)
            .map(|unit| ends[job * units + unit] + self.handover(dense.outputs.row(job), problem, unit))
            .fold(f64::INFINITY, f64::min)
    }

    /// Time to hand over a job's outputs from a unit.
    fn handover(&self, outputs: &[u32], problem: &Problem, unit: usize) -> f64 {
        let handed = outputs.iter().map(|&tensor| problem.dense.to_host[tensor as usize * self.units + unit]);
        handed.sum::<f64>() * self.transfer_factor(unit)
    }

    /// The load bound of some jobs, with or without handing over their outputs, and the weights that show it.
    pub fn load(&self, problem: &Problem, jobs: &[u32], handovers: bool, rounds: usize) -> (f64, Vec<f64>) {
        let units = self.units;
        let dense = &problem.dense;
        let times: Vec<f64> = jobs
            .iter()
            .flat_map(|&job| (0..units).map(move |unit| (job as usize, unit)))
            .map(|(job, unit)| {
                let handed = if handovers { dense.outputs.row(job) } else { &[] };
                let handed = handed.iter().map(|&tensor| dense.to_host[tensor as usize * units + unit]);
                dense.ms(job, unit) + handed.sum::<f64>()
            })
            .collect();
        let mut weights = vec![1.0; units];
        let mut best = (0.0, weights.clone());
        let mut loads = vec![0.0; units];
        let charge = |at: usize, unit: usize| self.charge(jobs[at] as usize, unit);
        for round in 0..rounds.max(1) {
            // In one millisecond the busiest set does this much weighted work.
            let (most, set) = self.most_work(&weights);
            for weight in &mut weights {
                *weight /= most;
            }
            loads.fill(0.0);
            let (mut value, mut charged) = (0.0, 0.0);
            for (at, row) in times.chunks_exact(units).enumerate() {
                let (mut least, mut chosen) = (f64::INFINITY, 0);
                for (unit, (time, weight)) in row.iter().zip(&weights).enumerate() {
                    let cost = time * weight + charge(at, unit);
                    if time.is_finite() && cost < least {
                        least = cost;
                        chosen = unit;
                    }
                }
                value += least;
                charged += charge(at, chosen);
                loads[chosen] += row[chosen];
            }
            if value > best.0 {
                best = (value, weights.clone());
            }
            // Ascend `value − T · work`: what is loaded beyond what the set can do in that time weighs more.
            let mut slope: Vec<f64> = loads.clone();
            for &(unit, rate) in set {
                slope[unit] -= (value - charged) * rate;
            }
            let steepest = slope.iter().fold(0.0f64, |most, slope| most.max(slope.abs()));
            if steepest <= value * 1e-9 {
                break;
            }
            let pace = 0.5 / (1.0 + round as f64).sqrt();
            for (weight, slope) in weights.iter_mut().zip(&slope) {
                *weight *= (pace * slope / steepest).exp();
            }
        }
        best
    }

    /// The weights at which given loads of units take longest: no set of units does more than 1 of weighted work in a millisecond.
    pub fn balance(&self, loads: &[f64]) -> Vec<f64> {
        let mut weights = vec![1.0; self.units];
        let mut best = (0.0, weights.clone());
        for round in 0..BLOCK_ROUNDS {
            let (most, set) = self.most_work(&weights);
            for weight in &mut weights {
                *weight /= most;
            }
            let value: f64 = loads.iter().zip(&weights).map(|(load, weight)| load * weight).sum();
            if value > best.0 {
                best = (value, weights.clone());
            }
            let mut slope = loads.to_vec();
            for &(unit, rate) in set {
                slope[unit] -= value * rate;
            }
            let steepest = slope.iter().fold(0.0f64, |most, slope| most.max(slope.abs()));
            if steepest <= value * 1e-9 {
                break;
            }
            let pace = 0.5 / (1.0 + round as f64).sqrt();
            weights.iter_mut().zip(&slope).for_each(|(weight, slope)| *weight *= (pace * slope / steepest).exp());
        }
        self.normalised(&best.1)
    }

    /// Weights scaled so that the busiest set does 1 of weighted work in a millisecond.
    pub fn normalised(&self, weights: &[f64]) -> Vec<f64> {
        let most = self.most_work(weights).0;
        weights.iter().map(|weight| weight / most).collect()
    }

    /// The set of units that does the most weighted work in a unit of time, with their rates.
    fn most_work(&self, weights: &[f64]) -> (f64, &[(usize, f64)]) {
        let work = |set: &Vec<(usize, f64)>| set.iter().map(|&(unit, rate)| weights[unit] * rate).sum::<f64>();
        let best = self.sets.iter().map(|set| (work(set), set)).max_by(|a, b| a.0.total_cmp(&b.0));
        best.map_or((1.0, &[][..]), |(work, set)| (work, set.as_slice()))
    }

    /// Least energy of a job beyond idling, in joules; its outputs' handovers included.
    pub(super) fn joules(&self, problem: &Problem, job: usize, idle: f64) -> f64 {
        let dense = &problem.dense;
        (0..self.units)
            .filter(|&unit| dense.ms(job, unit).is_finite())
            .map(|unit| {
                let more = problem.units()[unit].watts.unwrap_or(0.0) - idle;
                let time = if more >= 0.0 {
                    self.ms[job * self.units + unit] + self.handover(dense.outputs.row(job), problem, unit)
                } else {
                    // Drawing less than idling: the longest it can take.
                    let class = dense.class[job * self.units + unit] as usize;
                    let made = dense.outputs.row(job).iter();
                    let handed: f64 = made.map(|&tensor| dense.to_host[tensor as usize * self.units + unit]).sum();
                    let read: f64 = dense
                        .inputs
                        .row(job)
                        .iter()
                        .map(|&tensor| {
                            (0..=self.units).map(|from| dense.transfer(tensor as usize, from, unit)).fold(0.0, f64::max)
                        })
                        .sum();
                    let factors = &problem.platform.factors;
                    dense.ms(job, unit) * factors.most(unit, class) + (handed + read) * factors.most(unit, 1)
                };
                (more * time + self.charge(job, unit)) / 1e3
            })
            .fold(f64::INFINITY, f64::min)
    }
}
