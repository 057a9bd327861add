//! The exact front of a chain: a label-setting shortest path over (job, unit).

use super::{Cost, Front, FrontPoint, Weights, undominated};
use crate::problem::{Problem, Schedule};

/// Most partial plans of a chain in all; each (job, unit) gets its part.
const MOST_LABELS: usize = 4_000_000;

/// The jobs in order, when each reads only what the one before made, only the first reads from the host and only the last
/// one's tensors go to the host: then nothing can overlap.
pub(super) fn chain_order(problem: &Problem) -> Option<Vec<u32>> {
    let order = problem.topological();
    let mut place = vec![0usize; order.len()];
    order.iter().enumerate().for_each(|(at, &job)| place[job as usize] = at);
    let serial = order.windows(2).all(|pair| problem.successors(pair[0] as usize).contains(&pair[1]));
    let local = problem.tensors().iter().all(|tensor| {
        let readers = tensor.consumers.iter().map(|&job| place[job as usize]);
        if let Some(maker) = tensor.producer {
            let at = place[maker as usize];
            let goes = tensor.is_output && tensor.to_host_ms.iter().any(|&ms| ms > 0.0);
            readers.into_iter().all(|reader| reader == at + 1) && (!goes || at + 1 == order.len())
        } else {
            let comes = tensor.transfer_ms[problem.units().len().pow(2)..].iter().any(|&ms| ms > 0.0);
            !comes || readers.into_iter().all(|reader| reader == 0)
        }
    });
    let together = problem.requests().iter().all(|request| request.release_ms == 0.0);
    (serial && local && together).then(|| order.to_vec())
}

/// A partial plan: the jobs up to some place, the last of them on a known unit.
#[derive(Debug, Clone, PartialEq)]
struct Label {
    ms: f64,
    joules: f64,
    memory: u64,
    /// Bytes on each unit that limits memory.
    held: Vec<u64>,
    /// Which shared weights are loaded where, one bit per (shared weights, unit).
    loaded: u128,
    parent: u32,
}

struct Chain<'p> {
    problem: &'p Problem,
    weights: &'p Weights,
    /// Bit number of the first unit of shared weights that cost something to spread.
    bit: Vec<Option<u32>>,
    /// Units that limit memory.
    limited: Vec<usize>,
    /// Watts per unit; 0 where some are unknown, so that energy decides nothing.
    watts: Vec<f64>,
    /// Tensors that each job reads.
    reads: Vec<Vec<usize>>,
}

pub(super) fn chain_front(problem: &Problem, order: &[u32], weights: &Weights) -> Option<Front> {
    let units = problem.units().len();
    let mut bits = 0u32;
    let bit: Vec<Option<u32>> = (0..weights.bytes.len())
        .map(|number| {
            let shared = weights.users[number] > 1 && weights.bytes[number] > 0;
            shared.then(|| {
                bits += units as u32;
                bits - units as u32
            })
        })
        .collect();
    if bits > u128::BITS {
        return None;
    }
    let known = problem.units().iter().all(|unit| unit.watts.is_some());
    let mut reads = vec![Vec::new(); order.len()];
    for (index, tensor) in problem.tensors().iter().enumerate() {
        tensor.consumers.iter().for_each(|&job| reads[job as usize].push(index));
    }
    let chain = Chain {
        reads,
        problem,
        weights,
        bit,
        limited: (0..units).filter(|&unit| problem.units()[unit].memory_bytes.is_some()).collect(),
        watts: problem.units().iter().map(|unit| if known { unit.watts.unwrap_or(0.0) } else { 0.0 }).collect(),
    };
    // Without memory to weigh, labels are dominated in one sweep; with it every pair is compared.
    let most = if chain.is_flat() { 4_096 } else { 256 };
    let limit = (MOST_LABELS / (order.len().max(1) * units)).clamp(8, most);
    let mut exact = true;
    // Every state's labels, kept for walking back.
    let mut levels: Vec<Vec<Vec<Label>>> = Vec::with_capacity(order.len());
    for (at, &job) in order.iter().enumerate() {
        let mut level = Vec::with_capacity(units);
        for unit in 0..units {
            let mut labels = chain.arrive(levels.last(), at, job, unit);
            exact &= chain.prune(&mut labels, limit);
            level.push(labels);
        }
        levels.push(level);
    }
    let mut ends: Vec<(Cost, usize, usize)> = Vec::new();
    if let (Some(last), Some(&job)) = (levels.last(), order.last()) {
        for (unit, labels) in last.iter().enumerate() {
            let handed = chain.handover(job, unit);
            for (index, label) in labels.iter().enumerate() {
                let cost = Cost {
                    latency_ms: label.ms + handed,
                    energy_j: known.then_some(label.joules + handed * chain.watts[unit] / 1e3),
                    memory_bytes: label.memory,
                };
                ends.push((cost, unit, index));
            }
        }
    }
    let points = ends
        .into_iter()
        .map(|(cost, mut unit, mut index)| {
            let mut unit_of = vec![0u32; order.len()];
            for at in (0..order.len()).rev() {
                unit_of[order[at] as usize] = unit as u32;
                let parent = levels[at][unit][index].parent as usize;
                (index, unit) = (parent / units, parent % units);
            }
            (cost, FrontPoint { cost, schedule: Schedule::from_jobs(problem, unit_of, order) })
        })
        .collect();
    let (points, thinned) = undominated(points);
    Some(Front { points: points.into_iter().map(|point| point.1).collect(), exact: exact && !thinned })
}

impl Chain<'_> {
    /// Partial plans that put the job at place `at` on `unit`.
    fn arrive(&self, before: Option<&Vec<Vec<Label>>>, at: usize, job: u32, unit: usize) -> Vec<Label> {
        let (problem, units) = (self.problem, self.problem.units().len());
        let ms = problem.jobs()[job as usize].ms[unit];
        if ms.is_infinite() {
            return Vec::new();
        }
        let read = |from: usize| -> f64 {
            let tensors = self.reads[job as usize].iter().map(|&tensor| &problem.tensors()[tensor]);
            tensors
                .map(|tensor| tensor.transfer_ms[if tensor.producer.is_some() { from } else { units } * units + unit])
                .sum()
        };
        let start = Label { ms: 0.0, joules: 0.0, memory: 0, held: vec![0; self.limited.len()], loaded: 0, parent: 0 };
        let mut labels = Vec::new();
        let mut extend = |label: &Label, spent: f64, parent: u32| {
            let mut label = Label { parent, ..label.clone() };
            label.ms += spent;
            label.joules += spent * self.watts[unit] / 1e3;
            let number = self.weights.number[job as usize];
            let bit = self.bit[number].map(|first| 1u128 << (first + unit as u32));
            if bit.is_none_or(|bit| label.loaded & bit == 0) {
                let bytes = self.weights.bytes[number];
                label.memory += bytes;
                label.loaded |= bit.unwrap_or(0);
                if let Some(place) = self.limited.iter().position(|&limited| limited == unit) {
                    label.held[place] += bytes;
                    if problem.units()[unit].memory_bytes.is_some_and(|most| label.held[place] > most) {
                        return;
                    }
                }
            }
            labels.push(label);
        };
        match before {
            None => extend(&start, ms + read(units), 0),
            Some(before) => {
                debug_assert!(at > 0);
                for (from, list) in before.iter().enumerate() {
                    let spent = ms + read(from);
                    for (index, label) in list.iter().enumerate() {
                        extend(label, spent, (index * units + from) as u32);
                    }
                }
            }
        }
        labels
    }

    /// Whether time and energy are all that tells partial plans of one state apart.
    fn is_flat(&self) -> bool {
        self.limited.is_empty() && self.bit.iter().all(Option::is_none)
    }

    fn handover(&self, job: u32, unit: usize) -> f64 {
        let made = self.problem.tensors().iter().filter(|tensor| tensor.producer == Some(job) && tensor.is_output);
        made.map(|tensor| tensor.to_host_ms[unit]).sum()
    }

    /// Keeps the labels that no other beats, at most `limit` of them; `false` if some of those had to go.
    fn prune(&self, labels: &mut Vec<Label>, limit: usize) -> bool {
        labels.sort_by(|a, b| a.ms.total_cmp(&b.ms).then(a.joules.total_cmp(&b.joules)).then(a.memory.cmp(&b.memory)));
        let mut kept: Vec<Label> = Vec::new();
        let flat = self.is_flat();
        for label in labels.drain(..) {
            if flat {
                if kept.last().is_none_or(|last| label.joules < last.joules) {
                    kept.push(label);
                }
            } else if !kept.iter().rev().any(|other| self.beats(other, &label)) {
                kept.push(label);
            }
        }
        let complete = kept.len() <= limit;
        if !complete {
            // Both ends stay, and an even spread between them.
            let last = kept.len() - 1;
            let mut index = 0;
            let wanted: std::collections::BTreeSet<usize> = (0..limit).map(|at| at * last / (limit - 1)).collect();
            kept.retain(|_| {
                index += 1;
                wanted.contains(&(index - 1))
            });
        }
        *labels = kept;
        complete
    }

    /// Whether `a` can do whatever `b` can, for no more of anything: even after loading what `b` has loaded already.
    fn beats(&self, a: &Label, b: &Label) -> bool {
        if a.ms > b.ms || a.joules > b.joules || a.memory > b.memory {
            return false;
        }
        let lacking = b.loaded & !a.loaded;
        if lacking == 0 {
            return a.held.iter().zip(&b.held).all(|(a, b)| a <= b);
        }
        let units = self.problem.units().len();
        let mut held = a.held.clone();
        let mut memory = a.memory;
        for (number, first) in self.bit.iter().enumerate() {
            let Some(first) = first else { continue };
            for unit in (0..units).filter(|&unit| lacking >> (*first as usize + unit) & 1 == 1) {
                memory += self.weights.bytes[number];
                if let Some(place) = self.limited.iter().position(|&limited| limited == unit) {
                    held[place] += self.weights.bytes[number];
                }
            }
        }
        memory <= b.memory && held.iter().zip(&b.held).all(|(a, b)| a <= b)
    }
}
