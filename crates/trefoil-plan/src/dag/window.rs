//! Windows: a stretch of the schedule as a problem of its own, so that large problems are improved piece by piece.
//!
//! The jobs of a window are re-decided while everything else stands: what the window reads from before is there when it is
//! there, resources open when the last earlier step leaves them, and whatever follows outside must still fit in after an end.
//! That last part is the tail of a job or resource: the makespan less the latest time at which the follower may start, by
//! a backward pass over data and resource orders. So a window whose `max (end + tail)` shrinks shortens the whole schedule, as
//! far as slowdown factors stay what they were; the whole is decoded again before anything is kept.

use super::decode::{Choice, Decoder, Surroundings};
use crate::problem::{Job, Problem, ProblemRequest, ProblemTensor, Schedule, Step};

/// A whole schedule, timed, with the latest times of its steps.
pub(crate) struct Timed {
    pub order: Vec<Step>,
    pub starts: Vec<f64>,
    pub makespan: f64,
    /// Latest start of each step that keeps the makespan.
    latest: Vec<f64>,
    ends: Vec<f64>,
    /// Jobs by start, and each job's place among them.
    pub jobs: Vec<u32>,
    place: Vec<u32>,
    /// Position in `order` of each job.
    at: Vec<u32>,
}

impl Timed {
    /// Times the decoder's last run of `choice`.
    pub fn new(problem: &Problem, choice: &Choice, decoder: &Decoder<'_>) -> Option<Self> {
        let order = decoder.order.clone();
        let starts = decoder.starts.clone();
        let schedule = Schedule { unit: choice.unit.clone(), order, after: Vec::new() };
        let edges = problem.step_edges(&schedule).ok()?;
        let order = schedule.order;
        // Ends of transfers are not told; a step ends no later than the next one on its resources or its first reader begins,
        // and no earlier than it takes alone; the latter is what a backward pass may rely on.
        let ends: Vec<f64> = order
            .iter()
            .zip(&starts)
            .map(|(&step, &start)| match step {
                Step::Job(job) => decoder.ends[job as usize],
                other => start + problem.step_ms(other, &choice.unit),
            })
            .collect();
        let makespan = ends.iter().copied().fold(0.0, f64::max);
        let mut latest_end = vec![makespan; order.len()];
        let mut after: Vec<Vec<u32>> = vec![Vec::new(); order.len()];
        for &(first, then) in &edges {
            after[first as usize].push(then);
        }
        let mut next: Vec<Option<usize>> = vec![None; problem.resources().len()];
        let mut latest = vec![0.0; order.len()];
        for at in (0..order.len()).rev() {
            let unit = problem.step_unit(order[at], &choice.unit) as usize;
            let mut end = latest_end[at];
            for &then in &after[at] {
                end = end.min(latest[then as usize]);
            }
            for &resource in &problem.platform.unit_resources[unit] {
                if let Some(then) = next[resource as usize].replace(at) {
                    end = end.min(latest[then]);
                }
            }
            latest_end[at] = end;
            latest[at] = end - (ends[at] - starts[at]);
        }
        let mut jobs = Vec::with_capacity(choice.unit.len());
        let mut at_of = vec![0; choice.unit.len()];
        for (at, &step) in order.iter().enumerate() {
            if let Step::Job(job) = step {
                at_of[job as usize] = at as u32;
                jobs.push(job);
            }
        }
        let mut place = vec![0; jobs.len()];
        jobs.iter().enumerate().for_each(|(at, &job)| place[job as usize] = at as u32);
        Some(Self { order, starts, makespan, latest, ends, jobs, place, at: at_of })
    }
}

/// A window as a problem.
pub(crate) struct Window {
    pub problem: Problem,
    pub around: Surroundings,
    pub start: Choice,
    /// The whole problem's job of each job.
    pub jobs: Vec<u32>,
    /// Time of the whole that is 0 here.
    pub zero_ms: f64,
}

/// The window of the jobs that start `first..first + count`-th.
pub(crate) fn window(problem: &Problem, choice: &Choice, timed: &Timed, first: usize, count: usize) -> Option<Window> {
    let dense = &problem.dense;
    let units = dense.units;
    let last = (first + count).min(timed.jobs.len());
    let mut jobs: Vec<u32> = timed.jobs[first..last].to_vec();
    jobs.sort_unstable();
    let inside = |job: u32| {
        let place = timed.place[job as usize] as usize;
        place >= first && place < last
    };
    let local = |job: u32| jobs.binary_search(&job).ok().map(|at| at as u32);
    let zero = timed.starts[timed.at[timed.jobs[first] as usize] as usize];
    let limit = timed.at[*timed.jobs.get(last - 1)? as usize] as usize;
    // What occupies resources around the window.
    let mut ready_ms = vec![0.0f64; problem.resources().len()];
    let mut resource_tail_ms = vec![0.0f64; problem.resources().len()];
    let mut seen_after = vec![false; problem.resources().len()];
    let begin = timed.at[timed.jobs[first] as usize] as usize;
    // Steps long before ended long ago: look back only as far as something may still run.
    let mut back = begin;
    let mut quiet = 0;
    while back > 0 && quiet < 4 * problem.resources().len() + 16 {
        back -= 1;
        quiet = if timed.ends[back] > zero { 0 } else { quiet + 1 };
    }
    let mut brought: Vec<(u32, u32)> = Vec::new();
    let mut open = problem.resources().len();
    for at in back..timed.order.len() {
        let step = timed.order[at];
        let unit = problem.step_unit(step, &choice.unit) as usize;
        let mine = match step {
            Step::Job(job) => inside(job),
            Step::Handover(tensor) => inside(dense.producer[tensor as usize]),
            Step::Transfer { tensor, unit } => {
                let readers = dense.consumers.row(tensor as usize).iter();
                let serves = readers.filter(|&&job| choice.unit[job as usize] == unit);
                serves.clone().any(|&job| inside(job)) && (at >= begin || serves.into_iter().all(|&job| inside(job)))
            }
        };
        if mine && at >= begin {
            continue;
        }
        if at < begin {
            if let Step::Transfer { tensor, unit } = step {
                brought.push((tensor, unit));
            }
            for &resource in &problem.platform.unit_resources[unit] {
                let slot = &mut ready_ms[resource as usize];
                *slot = slot.max(timed.ends[at] - zero);
            }
            continue;
        }
        for &resource in &problem.platform.unit_resources[unit] {
            // Between the window's first and last job, others' steps may stand anywhere; they count as following.
            if !std::mem::replace(&mut seen_after[resource as usize], true) {
                resource_tail_ms[resource as usize] = timed.makespan - timed.latest[at];
                open -= 1;
            }
        }
        if open == 0 && at > limit {
            break;
        }
    }
    let mut parts = Parts { jobs: Vec::new(), tensors: Vec::new(), tensor_ms: Vec::new(), tail_ms: Vec::new() };
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
                        let there = choice.unit[next as usize] as usize;
                        let follow = timed.makespan - timed.latest[timed.at[next as usize] as usize];
                        tail = tail.max(follow + dense.transfer(tensor as usize, unit, there));
                    }
                }
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
            let from = problem.source(index, &choice.unit);
            for unit in 0..units {
                let there = brought.contains(&(tensor, unit as u32));
                transfer_ms[units * units + unit] = if there { 0.0 } else { dense.transfer(index, from, unit) };
            }
            if maker != u32::MAX {
                known = (timed.ends[timed.at[maker as usize] as usize] - zero).max(0.0);
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
    }
    let start = Choice {
        unit: jobs.iter().map(|&job| choice.unit[job as usize]).collect(),
        urgency: jobs.iter().map(|&job| (timed.starts[timed.at[job as usize] as usize] - zero).max(0.0)).collect(),
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
    let around = Surroundings { ready_ms, tail_ms: parts.tail_ms, resource_tail_ms, tensor_ms: parts.tensor_ms };
    Some(Window { problem: window, around, start, jobs, zero_ms: zero })
}

struct Parts {
    jobs: Vec<Job>,
    tensors: Vec<ProblemTensor>,
    tensor_ms: Vec<f64>,
    tail_ms: Vec<f64>,
}
