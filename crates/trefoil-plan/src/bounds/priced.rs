//! The load bound with transfers: what all work costs at least when every unit's time has a price.
//!
//! Let `λ(u, c)` price a millisecond of work of class c on unit u such that no set of units that can be busy at once, each with
//! any class of work and slowed as that implies, gets more than 1 of priced work done in a millisecond. Then every schedule takes
//! at least `min Σ_j λ(u_j, c_j) · t(j, u_j) + Σ_t Σ_v λ(v, memory) · T(t, u(maker) → v)` over placements, v running over the units
//! that read tensor t elsewhere than it was made: transfers occupy their destination. That minimum is a labelling problem, which is bounded in turn by its
//! Lagrangian dual: every reader of a tensor is paid `φ(t, reader, u)` for being on u, and the tensor, seeing its maker's unit,
//! collects what its readers are paid and pays its transfers. **Any** λ and φ give a valid bound, so they are the certificate:
//!
//! `Σ_j min_u [λ·t(j,u) + Σ_read φ(t,j,u) + Σ_made ψ(t,u)] + Σ_host ψ(t)`, with
//! `ψ(t,v) = min over sets U of units [Σ_{u ∈ U, u ≠ v} λ(u, memory)·T(t, v→u) − Σ_readers max_{u ∈ U} φ(t,reader,u)]`.
//!
//! For one λ, φ comes from a sweep against the data's direction in which each job hands what it prefers to the tensors that it
//! reads (on chains and out-trees that is the exact dynamic programme; two units with transfers are a minimum cut, whose dual this
//! is). λ and φ then ascend by subgradients.

use super::part::Part;
use crate::factors::Factors;
use crate::problem::Problem;

/// Above this many units sets of them are too many.
pub(crate) const MOST_UNITS: usize = 6;

/// Rounds without a gain of this fraction after which a search ends.
const PATIENCE: usize = 24;
const STALLED: f64 = 1e-5;

/// Rates of a moment: `(2 · unit + class, 1 / slowdown)` of each busy unit.
pub(crate) type Moment = Vec<(usize, f64)>;

/// Everything that can be busy at once, each unit with either class of work. Without `classed` the class of work is not known
/// (segments have that of most of their time): each set of units, as fast as any classes allow.
pub(crate) fn moments(problem: &Problem, classed: bool) -> Vec<Moment> {
    let units = problem.units().len();
    let factors: &Factors = problem.factors();
    let mut all = Vec::new();
    if !classed {
        for code in 1usize..1 << units {
            let set: Vec<usize> = (0..units).filter(|unit| code >> unit & 1 == 1).collect();
            if set.iter().all(|&one| set.iter().all(|&two| one == two || !problem.conflict(one, two))) {
                all.push(set.iter().map(|&unit| (2 * unit, 1.0 / factors.least_beside(unit, &set))).collect());
            }
        }
        return all;
    }
    for code in 1usize..3usize.pow(units as u32) {
        // A digit per unit: idle, compute-bound, memory-bound.
        let busy: Vec<(u32, u8)> = (0..units)
            .filter_map(|unit| match code / 3usize.pow(unit as u32) % 3 {
                0 => None,
                digit => Some((unit as u32, digit as u8 - 1)),
            })
            .collect();
        let apart = |(one, _): &(u32, u8)| {
            busy.iter().all(|(other, _)| other == one || !problem.conflict(*one as usize, *other as usize))
        };
        if !busy.iter().all(apart) {
            continue;
        }
        let rate = |&(unit, class): &(u32, u8)| {
            let others = busy.iter().copied().filter(|other| other.0 != unit);
            (2 * unit as usize + class as usize, 1.0 / factors.slowdown(unit, class, others))
        };
        all.push(busy.iter().map(rate).collect());
    }
    all
}

/// Prices and payments: the witness of a bound.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Witness {
    /// Row-major units × classes, such that no moment does more than 1 of priced work in a millisecond.
    pub weights: Vec<f64>,
    /// Row-major readers of all tensors × units.
    pub paid: Vec<f64>,
}

/// Scratch for one tensor: what its readers are paid at most by set of units.
struct Scratch {
    collected: Vec<f64>,
    /// Sum of the prices by set, from the unit looked at.
    transfers: Vec<f64>,
}

/// Searches weights and payments.
pub(crate) struct Pricing<'p> {
    part: &'p Part,
    moments: &'p [Moment],
    scratch: Scratch,
    /// Row-major tensors × units (or one entry, at unit 0, for a tensor without maker): `ψ`, and the set that gives it.
    psi: Vec<f64>,
    set: Vec<usize>,
    theta: Vec<f64>,
    chosen: Vec<u32>,
    loads: Vec<f64>,
    /// What the cheapest placement is charged beyond its priced time.
    charged: f64,
    /// A bound of this much is enough.
    enough: f64,
}

impl<'p> Pricing<'p> {
    pub fn new(part: &'p Part, moments: &'p [Moment]) -> Self {
        let units = part.units;
        Self {
            part,
            moments,
            scratch: Scratch { collected: vec![0.0; 1 << units], transfers: vec![0.0; 1 << units] },
            psi: vec![0.0; part.tensors.len() * units],
            set: vec![0; part.tensors.len() * units],
            theta: vec![0.0; units],
            chosen: vec![0; part.jobs()],
            loads: vec![0.0; 2 * units],
            charged: 0.0,
            enough: f64::INFINITY,
        }
    }

    /// Whether a bound of `enough` is found in so many rounds, beginning with some weights.
    pub fn reaches(&mut self, start: &[f64], rounds: usize, enough: f64) -> bool {
        self.enough = enough;
        let found = self.search(Some(start), rounds, rounds).0 >= enough;
        self.enough = f64::INFINITY;
        found
    }

    /// The best bound found in `rounds` rounds of weights and `sharpen` rounds of payments, with its witness. `start` are weights
    /// to begin with.
    pub fn search(&mut self, start: Option<&[f64]>, rounds: usize, sharpen: usize) -> (f64, Witness) {
        let units = self.part.units;
        let mut weights = start.map_or_else(|| vec![1.0; 2 * units], <[f64]>::to_vec);
        let mut paid = vec![0.0; self.part.slots * units];
        let mut best = (0.0, Witness { weights: weights.clone(), paid: paid.clone() });
        let mut since = 0;
        for round in 0..rounds.max(1) {
            let busiest = self.normalise(&mut weights);
            self.sweep(&weights, &mut paid, true);
            let value = self.evaluate(&weights, &paid);
            since = if value > best.0 * (1.0 + STALLED) { 0 } else { since + 1 };
            if value > best.0 {
                best = (value, Witness { weights: weights.clone(), paid: paid.clone() });
            }
            if since > PATIENCE
                || best.0 >= self.enough
                || !self.ascend(&mut weights, value, busiest, 0.5 / (1.0 + round as f64).sqrt())
            {
                break;
            }
        }
        weights.clone_from(&best.1.weights);
        paid.clone_from(&best.1.paid);
        let scale = best.0 / self.part.jobs().max(1) as f64;
        since = 0;
        for round in 0..sharpen {
            let busiest = self.normalise(&mut weights);
            let value = self.evaluate(&weights, &paid);
            since = if value > best.0 * (1.0 + STALLED) { 0 } else { since + 1 };
            if value > best.0 {
                best = (value, Witness { weights: weights.clone(), paid: paid.clone() });
            }
            if since > PATIENCE || best.0 >= self.enough {
                break;
            }
            self.agree(&mut paid, scale * 0.5 / (1.0 + 0.2 * round as f64));
            if round % 4 == 3 {
                self.sweep(&weights, &mut paid, false);
            }
            self.ascend(&mut weights, value, busiest, 0.05 / (1.0 + round as f64).sqrt());
        }
        best
    }

    /// The least sum of work and transfers at fixed prices, and payments that show it.
    pub fn at_prices(&mut self, weights: &[f64], rounds: usize) -> (f64, Vec<f64>) {
        let mut paid = vec![0.0; self.part.slots * self.part.units];
        self.sweep(weights, &mut paid, true);
        let mut best = (self.evaluate(weights, &paid), paid.clone());
        let scale = best.0 / self.part.jobs().max(1) as f64;
        for round in 0..rounds {
            self.agree(&mut paid, scale * 0.5 / (1.0 + 0.2 * round as f64));
            if round % 4 == 3 {
                self.sweep(weights, &mut paid, false);
            }
            let value = self.evaluate(weights, &paid);
            if value > best.0 {
                best = (value, paid.clone());
            }
        }
        best
    }

    /// Scales weights so that the busiest moment does 1 of priced work; returns which that is.
    fn normalise(&self, weights: &mut [f64]) -> usize {
        let work = |moment: &Moment| moment.iter().map(|&(at, rate)| weights[at] * rate).sum::<f64>();
        let (mut most, mut busiest) = (0.0, 0);
        for (at, moment) in self.moments.iter().enumerate() {
            let work = work(moment);
            if work > most {
                (most, busiest) = (work, at);
            }
        }
        if most > 0.0 {
            for weight in weights.iter_mut() {
                *weight /= most;
            }
        }
        busiest
    }

    /// A step of the weights towards what is loaded beyond what the busiest moment can do; `false` at the top.
    fn ascend(&self, weights: &mut [f64], value: f64, busiest: usize, pace: f64) -> bool {
        let mut slope = self.loads.clone();
        for &(at, rate) in &self.moments[busiest] {
            slope[at] -= (value - self.charged) * rate;
        }
        let steepest = slope.iter().fold(0.0f64, |most, slope| most.max(slope.abs()));
        if steepest <= value * 1e-9 {
            return false;
        }
        for (weight, slope) in weights.iter_mut().zip(&slope) {
            *weight *= (pace * slope / steepest).exp();
        }
        true
    }

    /// `ψ` of a tensor for every unit of its maker.
    fn project(&mut self, tensor: usize, weights: &[f64], paid: &[f64]) {
        let part = self.part;
        let units = part.units;
        let details = &part.tensors[tensor];
        let sets = 1usize << units;
        let collected = &mut self.scratch.collected;
        collected.fill(0.0);
        for place in 0..details.readers.len() {
            let row = &paid[(details.slot + place) * units..][..units];
            // The best of a set is the better of its lowest unit and the rest.
            let most = &mut self.scratch.transfers;
            most[0] = f64::NEG_INFINITY;
            for set in 1..sets {
                let lowest = set.trailing_zeros() as usize;
                most[set] = row[lowest].max(most[set & (set - 1)]);
                collected[set] += most[set];
            }
        }
        if !details.readers.is_empty() {
            collected[0] = f64::NEG_INFINITY;
        }
        let rows = details.ms.len() / units;
        for from in 0..rows {
            let row = &details.ms[from * units..][..units];
            let transfers = &mut self.scratch.transfers;
            transfers[0] = 0.0;
            let (mut least, mut which) = (f64::INFINITY, 0);
            for set in 0..sets {
                if set > 0 {
                    let lowest = set.trailing_zeros() as usize;
                    transfers[set] = transfers[set & (set - 1)] + weights[2 * lowest + part.memory] * row[lowest];
                }
                if set & details.must != details.must {
                    continue;
                }
                let total = transfers[set] - collected[set];
                if total < least {
                    (least, which) = (total, set);
                }
            }
            self.psi[tensor * units + from] = least;
            self.set[tensor * units + from] = which;
        }
    }

    /// What a job costs on each unit with its payments, into `theta`.
    fn price(&mut self, job: usize, weights: &[f64], paid: &[f64]) {
        let units = self.part.units;
        for unit in 0..units {
            let at = job * units + unit;
            let ms = self.part.ms[at];
            self.theta[unit] = if ms.is_finite() {
                let mut sum = weights[2 * unit + self.part.class[at] as usize] * ms
                    + weights[2 * unit + self.part.memory] * self.part.handed[at]
                    + self.part.charges[at];
                for &(tensor, place) in &self.part.reads[job] {
                    let slot = self.part.tensors[tensor as usize].slot + place as usize;
                    sum += paid[slot * units + unit];
                }
                for &tensor in &self.part.makes[job] {
                    sum += self.psi[tensor as usize * units + unit];
                }
                sum
            } else {
                f64::INFINITY
            };
        }
    }

    /// From the last job to the first: what a job prefers goes to the tensors that it reads. With `afresh` payments start at 0.
    fn sweep(&mut self, weights: &[f64], paid: &mut [f64], afresh: bool) {
        let units = self.part.units;
        if afresh {
            for tensor in &self.part.tensors {
                for (place, &reader) in tensor.readers.iter().enumerate() {
                    for unit in 0..units {
                        let able = self.part.ms[reader as usize * units + unit].is_finite();
                        paid[(tensor.slot + place) * units + unit] = if able { 0.0 } else { f64::NEG_INFINITY };
                    }
                }
            }
        }
        for job in (0..self.part.jobs()).rev() {
            // Its readers come later and are settled.
            for at in 0..self.part.makes[job].len() {
                self.project(self.part.makes[job][at] as usize, weights, paid);
            }
            let inner = |&&(tensor, _): &&(u32, u32)| self.part.tensors[tensor as usize].maker.is_some();
            let count = self.part.reads[job].iter().filter(inner).count();
            if count == 0 {
                continue;
            }
            self.price(job, weights, paid);
            let least = self.theta.iter().copied().fold(f64::INFINITY, f64::min);
            for &(tensor, place) in &self.part.reads[job] {
                let tensor = &self.part.tensors[tensor as usize];
                if tensor.maker.is_none() {
                    continue;
                }
                let slot = (tensor.slot + place as usize) * units;
                for unit in 0..units {
                    if self.theta[unit].is_finite() {
                        paid[slot + unit] -= (self.theta[unit] - least) / count as f64;
                    }
                }
            }
        }
    }

    /// The bound; leaves the loads of the cheapest placement in `loads`.
    fn evaluate(&mut self, weights: &[f64], paid: &[f64]) -> f64 {
        let units = self.part.units;
        self.loads.fill(0.0);
        self.charged = 0.0;
        let mut value = 0.0;
        for tensor in 0..self.part.tensors.len() {
            self.project(tensor, weights, paid);
            if self.part.tensors[tensor].maker.is_none() {
                value += self.psi[tensor * units];
                self.load_transfers(tensor, 0);
            }
        }
        for job in 0..self.part.jobs() {
            self.price(job, weights, paid);
            let (mut least, mut chosen) = (f64::INFINITY, 0);
            for (unit, &theta) in self.theta.iter().enumerate() {
                if theta < least {
                    (least, chosen) = (theta, unit);
                }
            }
            value += least;
            self.chosen[job] = chosen as u32;
            let at = job * units + chosen;
            self.charged += self.part.charges[at];
            self.loads[2 * chosen + self.part.class[at] as usize] += self.part.ms[at];
            self.loads[2 * chosen + self.part.memory] += self.part.handed[at];
            for at in 0..self.part.makes[job].len() {
                self.load_transfers(self.part.makes[job][at] as usize, chosen);
            }
        }
        value
    }

    fn load_transfers(&mut self, tensor: usize, from: usize) {
        let units = self.part.units;
        let set = self.set[tensor * units + from];
        let row = if self.part.tensors[tensor].maker.is_some() { from } else { 0 };
        for unit in (0..units).filter(|unit| set >> unit & 1 == 1) {
            self.loads[2 * unit + self.part.memory] += self.part.tensors[tensor].ms[row * units + unit];
        }
    }

    /// Readers that are elsewhere than their tensor thinks: the tensor pays more for where they are and less for where it thinks.
    fn agree(&self, paid: &mut [f64], step: f64) {
        let units = self.part.units;
        for (number, tensor) in self.part.tensors.iter().enumerate() {
            let from = tensor.maker.map_or(0, |maker| self.chosen[maker as usize] as usize);
            let set = self.set[number * units + from];
            for (place, &reader) in tensor.readers.iter().enumerate() {
                let row = &mut paid[(tensor.slot + place) * units..][..units];
                let here = self.chosen[reader as usize] as usize;
                let (mut most, mut thinks) = (f64::NEG_INFINITY, here);
                for unit in (0..units).filter(|unit| set >> unit & 1 == 1) {
                    if row[unit] > most || row[unit] >= most && unit == here {
                        (most, thinks) = (row[unit], unit);
                    }
                }
                if thinks != here {
                    row[here] += step;
                    row[thinks] -= step;
                }
            }
        }
    }
}
