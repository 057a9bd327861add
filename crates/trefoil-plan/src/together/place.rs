//! Dividing whole inferences over slots.

use super::TogetherRequest;
use super::cost::{Costs, runs_nowhere};
use crate::PlanError;
use std::collections::BTreeSet;
use trefoil_core::Resource;

/// Something that can run one inference beside those of other slots: a core, an accelerator.
pub(crate) struct Slot {
    /// Units that hold exactly this slot's resources; indices in the request.
    pub units: Vec<usize>,
}

/// The minimal sets of resources of the request's units, in their order: no slot's resources include another's, so that
/// `ort:CPU` on two cores is a slot only where nothing runs on one of them.
pub(crate) fn slots(request: &TogetherRequest<'_>) -> Vec<Slot> {
    let mut sets: Vec<&BTreeSet<Resource>> = Vec::new();
    for unit in &request.units {
        let minimal = request
            .units
            .iter()
            .all(|other| other.resources.len() >= unit.resources.len() || !other.resources.is_subset(&unit.resources));
        // Sets that overlap without one including the other cannot both be slots; the first is.
        if minimal && sets.iter().all(|set| set.is_disjoint(&unit.resources)) {
            sets.push(&unit.resources);
        }
    }
    let slot = |set: &&BTreeSet<Resource>| Slot {
        units: (0..request.units.len()).filter(|&unit| request.units[unit].resources == **set).collect(),
    };
    sets.iter().map(slot).collect()
}

/// One inference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Job {
    pub model: usize,
    pub item: u32,
}

/// Where each inference runs.
pub(crate) struct Placement {
    /// Per slot, what it runs, and on which of its units.
    pub beside: Vec<Vec<(Job, usize)>>,
    /// What runs after all of that, one by one.
    pub after: Vec<(Job, usize)>,
}

impl Placement {
    /// All inferences in an order that respects every slot's.
    pub fn order(&self) -> impl Iterator<Item = (Job, usize)> {
        self.beside.iter().flatten().chain(&self.after).copied()
    }
}

/// Most assignments to try one by one.
const EXHAUSTIVE: usize = 4096;
/// Most ways to choose how many inferences of each model run after the others.
const MOST_SPLITS: u64 = 4096;

/// For each job (row: its cost in each slot) a slot, for the shortest longest slot. Exact for few jobs; else longest jobs
/// first, each where it ends earliest, then improved by moves and swaps. Every job has a finite cost somewhere.
pub(crate) fn shortest(jobs: &[Vec<f64>]) -> Vec<usize> {
    let slots = jobs.first().map_or(0, Vec::len);
    let combinations = slots.checked_pow(jobs.len() as u32).unwrap_or(usize::MAX);
    if combinations <= EXHAUSTIVE { exhaustive(jobs, slots) } else { longest_first(jobs, slots) }
}

fn exhaustive(jobs: &[Vec<f64>], slots: usize) -> Vec<usize> {
    let mut best: (f64, f64, Vec<usize>) = (f64::INFINITY, f64::INFINITY, vec![0; jobs.len()]);
    let mut choice = vec![0; jobs.len()];
    loop {
        let loads = loads(jobs, &choice, slots);
        let longest = loads.iter().copied().fold(0.0, f64::max);
        // Among equally short ones the one with least work: it slows nobody down for nothing.
        let work = loads.iter().sum();
        if (longest, work) < (best.0, best.1) {
            best = (longest, work, choice.clone());
        }
        let Some(at) = choice.iter().position(|&slot| slot + 1 < slots) else { return best.2 };
        choice[..at].fill(0);
        choice[at] += 1;
    }
}

fn loads(jobs: &[Vec<f64>], choice: &[usize], slots: usize) -> Vec<f64> {
    let mut loads = vec![0.0; slots];
    for (row, &slot) in jobs.iter().zip(choice) {
        loads[slot] += row[slot];
    }
    loads
}

fn longest_first(jobs: &[Vec<f64>], slots: usize) -> Vec<usize> {
    let least = |job: usize| jobs[job].iter().copied().fold(f64::INFINITY, f64::min);
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by(|&one, &other| least(other).total_cmp(&least(one)));
    let mut load = vec![0.0; slots];
    let mut choice = vec![0; jobs.len()];
    for job in order {
        let end = |slot: usize| load[slot] + jobs[job][slot];
        let slot = (0..slots).min_by(|&one, &other| end(one).total_cmp(&end(other))).unwrap_or(0);
        load[slot] += jobs[job][slot];
        choice[job] = slot;
    }
    improve(jobs, &mut choice, &mut load);
    choice
}

/// Moves a job out of the longest slot, or swaps it with another's, while that makes both slots shorter than the longest was.
fn improve(jobs: &[Vec<f64>], choice: &mut [usize], load: &mut [f64]) {
    // Each step lowers the longest slot or the number of slots that long; the bound only guards against rounding.
    for _ in 0..jobs.len() * jobs.len() * load.len() + 8 {
        let longest = (0..load.len()).max_by(|&one, &other| load[one].total_cmp(&load[other])).unwrap_or(0);
        let limit = load[longest] * (1.0 - 1e-12);
        let mut step = None;
        'search: for job in (0..jobs.len()).filter(|&job| choice[job] == longest) {
            for slot in (0..load.len()).filter(|&slot| slot != longest) {
                if load[slot] + jobs[job][slot] < limit {
                    step = Some((job, slot, None));
                    break 'search;
                }
            }
            for other in (0..jobs.len()).filter(|&other| choice[other] != longest) {
                let slot = choice[other];
                let mine = load[longest] - jobs[job][longest] + jobs[other][longest];
                let theirs = load[slot] - jobs[other][slot] + jobs[job][slot];
                if mine < limit && theirs < limit {
                    step = Some((job, slot, Some(other)));
                    break 'search;
                }
            }
        }
        let Some((job, slot, other)) = step else { return };
        load[longest] -= jobs[job][longest];
        load[slot] += jobs[job][slot];
        choice[job] = slot;
        if let Some(other) = other {
            load[slot] -= jobs[other][slot];
            load[longest] += jobs[other][longest];
            choice[other] = longest;
        }
    }
}

/// Every inference of `counts[model]` per model on slots; empty slots where there is nothing. `None` if one fits no slot.
pub(crate) fn beside(
    request: &TogetherRequest<'_>,
    costs: &Costs,
    slots: &[Slot],
    jobs: &[Job],
) -> Option<Vec<Vec<(Job, usize)>>> {
    let mut placed = vec![Vec::new(); slots.len()];
    if jobs.is_empty() {
        return Some(placed);
    }
    let cost = |job: &Job, slot: &Slot| costs.in_slot(job.model, slot).map_or(f64::INFINITY, |(_, ms)| ms);
    let rows: Vec<Vec<f64>> = jobs.iter().map(|job| slots.iter().map(|slot| cost(job, slot)).collect()).collect();
    if rows.iter().any(|row| row.iter().all(|ms| ms.is_infinite())) {
        return None;
    }
    debug_assert!(jobs.iter().all(|job| job.model < request.models.len()), "a job of no model");
    for (&job, slot) in jobs.iter().zip(shortest(&rows)) {
        placed[slot].push((job, costs.in_slot(job.model, &slots[slot])?.0));
    }
    Some(placed)
}

/// The longest slot.
pub(crate) fn longest(costs: &Costs, placed: &[Vec<(Job, usize)>]) -> f64 {
    let load = |slot: &Vec<(Job, usize)>| -> f64 {
        slot.iter().filter_map(|&(job, unit)| Some(costs.whole(job.model, unit)?.ms)).sum()
    };
    // Work that has no company is not slowed down.
    let busy = placed.iter().filter(|slot| !slot.is_empty()).count();
    placed.iter().map(load).fold(0.0, f64::max) * if busy > 1 { costs.beside } else { 1.0 }
}

/// The division with the shortest round: for every choice of how many inferences of each model run after the others with all
/// cores (none or all, where there are too many choices), the rest on slots.
pub(crate) fn best(request: &TogetherRequest<'_>, costs: &Costs) -> Result<Placement, PlanError> {
    let slots = slots(request);
    let models = request.models.len();
    let choices = u64::from(request.items) + 1;
    let step = if choices.checked_pow(models as u32).is_some_and(|all| all <= MOST_SPLITS) { 1 } else { request.items };
    // Beyond that many models, each is either beside the others or the only one after them.
    let few = (1u64 << models.min(63)) <= MOST_SPLITS || step == 1;
    let mut counts = vec![0u32; models];
    let mut found: Option<(f64, Placement)> = None;
    let mut alone = 0;
    loop {
        if let Some((total, placement)) = divide(request, costs, &slots, &counts)
            && found.as_ref().is_none_or(|(least, _)| total < *least)
        {
            found = Some((total, placement));
        }
        if few {
            let Some(at) = counts.iter().position(|&count| count < request.items) else { break };
            counts[..at].fill(0);
            counts[at] += step;
        } else if alone < models {
            counts.fill(0);
            counts[alone] = request.items;
            alone += 1;
        } else if alone == models {
            counts.fill(request.items);
            alone += 1;
        } else {
            break;
        }
    }
    found.map(|(_, placement)| placement).ok_or_else(|| runs_nowhere(request, 0))
}

fn divide(request: &TogetherRequest<'_>, costs: &Costs, slots: &[Slot], counts: &[u32]) -> Option<(f64, Placement)> {
    let (mut jobs, mut after, mut total) = (Vec::new(), Vec::new(), 0.0);
    for item in 0..request.items {
        for (model, &count) in counts.iter().enumerate() {
            let job = Job { model, item };
            if item + count < request.items {
                jobs.push(job);
            } else {
                let unit = costs.best(request, model, |_| true)?;
                total += costs.whole(model, unit)?.ms;
                after.push((job, unit));
            }
        }
    }
    let beside = beside(request, costs, slots, &jobs)?;
    total += longest(costs, &beside);
    Some((total, Placement { beside, after }))
}
