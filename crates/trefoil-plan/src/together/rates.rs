//! Requests at fixed rates: where each model should run, by simulating the rule that the runtime keeps to.

use super::build;
use super::cost::Costs;
use super::dispatch::{DispatchStream, Dispatcher};
use super::place::slots;
use super::{TogetherRequest, cost};
use crate::PlanError;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use trefoil_core::{Plan, Resource, Work};

/// Requests of one model: one every `period_ms`, the first at `offset_ms`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RateStream {
    /// Milliseconds between arrivals, above 0.
    pub period_ms: f64,
    /// The first arrival.
    pub offset_ms: f64,
    /// Milliseconds from arrival in which a response is in time.
    pub deadline_ms: Option<f64>,
    /// Higher goes first.
    pub priority: i32,
}

/// What serving is predicted to give.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct RatePrediction {
    /// Fraction of requests that miss their deadline.
    pub miss_rate: f64,
    /// Mean over models of the mean response time, in milliseconds.
    pub mean_response_ms: f64,
    /// Mean response time by model.
    pub models_ms: Vec<f64>,
}

/// Simulated arrivals, of all candidates together: bounds the time that planning takes.
const SIMULATED: usize = 1_500_000;
/// Arrivals simulated for one candidate.
const ARRIVALS: (usize, usize) = (200, 5000);
/// Most placements that are tried one by one.
const PLACEMENTS: usize = 4096;

/// A placement of whole models for serving: every model on one unit. The one with fewest missed deadlines, then with the shortest
/// mean response, over `duration_ms` of simulated arrivals. Beyond 4096 placements they are improved one model at a time.
///
/// # Errors
/// [`PlanError::Workload`] when there is not one stream per model, a period is not above 0, or a model runs on no unit.
pub fn served(
    request: &TogetherRequest<'_>,
    streams: &[RateStream],
    duration_ms: f64,
) -> Result<(Plan, RatePrediction), PlanError> {
    let request = &TogetherRequest { items: 1, ..request.clone() };
    let costs = request.check()?;
    check(request, streams)?;
    let choices = choices(request, &costs)?;
    let total = choices.iter().map(Vec::len).try_fold(1usize, usize::checked_mul).unwrap_or(usize::MAX);
    let arrivals = (SIMULATED / total.min(PLACEMENTS)).clamp(ARRIVALS.0, ARRIVALS.1);
    let predict = |units: &[usize]| {
        let service: Vec<f64> = units
            .iter()
            .enumerate()
            .map(|(model, &unit)| costs.whole(model, unit).map_or(f64::INFINITY, |cost| cost.ms))
            .collect();
        let held: Vec<_> = units.iter().map(|&unit| request.units[unit].resources.clone()).collect();
        simulate(&service, &held, streams, duration_ms, costs.beside, arrivals)
    };
    let better = |one: &RatePrediction, other: &RatePrediction| {
        (one.miss_rate, one.mean_response_ms) < (other.miss_rate, other.mean_response_ms)
    };
    let mut digits = vec![0usize; choices.len()];
    let units_of =
        |digits: &[usize]| -> Vec<usize> { digits.iter().zip(&choices).map(|(&at, list)| list[at]).collect() };
    let mut best = (units_of(&digits), predict(&units_of(&digits)));
    if total <= PLACEMENTS {
        while let Some(at) = (0..digits.len()).find(|&at| digits[at] + 1 < choices[at].len()) {
            digits[..at].fill(0);
            digits[at] += 1;
            let units = units_of(&digits);
            let prediction = predict(&units);
            if better(&prediction, &best.1) {
                best = (units, prediction);
            }
        }
    } else {
        let mut improved = true;
        while improved {
            improved = false;
            for (model, list) in choices.iter().enumerate() {
                for &unit in list {
                    let mut units = best.0.clone();
                    units[model] = unit;
                    let prediction = predict(&units);
                    if better(&prediction, &best.1) {
                        best = (units, prediction);
                        improved = true;
                    }
                }
            }
        }
    }
    let executions: Vec<_> =
        best.0.iter().enumerate().map(|(model, &unit)| request.whole(&costs, model, 0, unit)).collect();
    let mut plan = build::plan(request, "served", &executions)?;
    plan.notes.push(format!(
        "predicted at these rates: {:.2} % of deadlines missed, {:.3} ms mean response",
        100.0 * best.1.miss_rate,
        best.1.mean_response_ms
    ));
    Ok((plan, best.1))
}

fn check(request: &TogetherRequest<'_>, streams: &[RateStream]) -> Result<(), PlanError> {
    let fail = |reason: String| Err(PlanError::Workload { model: request.models[0].graph.model.clone(), reason });
    if streams.len() != request.models.len() {
        return fail(format!("rates of {} models are given for {}", streams.len(), request.models.len()));
    }
    if let Some(bad) = streams.iter().find(|stream| !(stream.period_ms.is_finite() && stream.period_ms > 0.0)) {
        return fail(format!("a period of {} ms is not above 0", bad.period_ms));
    }
    Ok(())
}

/// Per model the units worth a try: the best of every slot, and the best of all others.
fn choices(request: &TogetherRequest<'_>, costs: &Costs) -> Result<Vec<Vec<usize>>, PlanError> {
    let slots = slots(request);
    let narrow: BTreeSet<usize> = slots.iter().flat_map(|slot| slot.units.iter().copied()).collect();
    (0..request.models.len())
        .map(|model| {
            let mut list: Vec<usize> = slots.iter().filter_map(|slot| Some(costs.in_slot(model, slot)?.0)).collect();
            let wide = (0..request.units.len())
                .filter(|unit| !narrow.contains(unit))
                .filter_map(|unit| Some((unit, costs.whole(model, unit)?.ms)))
                .min_by(|one, other| one.1.total_cmp(&other.1));
            list.extend(wide.map(|(unit, _)| unit));
            if list.is_empty() { Err(cost::runs_nowhere(request, model)) } else { Ok(list) }
        })
        .collect()
}

/// What serving with a plan's placement gives, by the same simulation; each model's first inference of the plan stands for all.
///
/// # Errors
/// As [`served`].
pub fn predict_served(
    request: &TogetherRequest<'_>,
    plan: &Plan,
    streams: &[RateStream],
    duration_ms: f64,
) -> Result<RatePrediction, PlanError> {
    check(request, streams)?;
    let costs = request.check()?;
    let mut service = vec![0.0; request.models.len()];
    let mut held: Vec<BTreeSet<Resource>> = vec![BTreeSet::new(); request.models.len()];
    for task in plan.tasks.iter().filter(|task| task.item == 0) {
        let Work::Segment { segment } = task.work else { continue };
        let Some(segment) = plan.segments.get(segment.0 as usize) else { continue };
        let model = segment.model as usize;
        if let (Some(sum), Some(held)) = (service.get_mut(model), held.get_mut(model)) {
            *sum += task.cost.ms;
            held.extend(plan.resources(&task.unit).into_iter().flatten().cloned());
        }
    }
    Ok(simulate(&service, &held, streams, duration_ms, costs.beside, ARRIVALS.1))
}

fn nanoseconds(ms: f64) -> u64 {
    (ms.max(0.0) * 1e6) as u64
}

/// Plays arrivals through the dispatcher. Work that begins while other work runs takes `beside` times as long.
fn simulate(
    service_ms: &[f64],
    held: &[BTreeSet<Resource>],
    streams: &[RateStream],
    duration_ms: f64,
    beside: f64,
    most: usize,
) -> RatePrediction {
    let rules = streams.iter().zip(held).map(|(stream, resources)| DispatchStream {
        resources: resources.clone(),
        priority: stream.priority,
        deadline_ns: stream.deadline_ms.map(nanoseconds),
    });
    let mut dispatcher = Dispatcher::new(rules.collect(), true, usize::MAX);
    // Events by time: (time, is an arrival, stream). Finishes come first, so that what they free can be taken at once.
    let mut events: BinaryHeap<Reverse<(u64, bool, usize)>> = BinaryHeap::new();
    let end = nanoseconds(duration_ms);
    let arrival =
        |stream: usize, number: u64| nanoseconds(streams[stream].offset_ms + streams[stream].period_ms * number as f64);
    let mut arrived = vec![0u64; streams.len()];
    for stream in 0..streams.len() {
        events.push(Reverse((arrival(stream, 0), true, stream)));
    }
    let mut running: Vec<Option<u64>> = vec![None; streams.len()];
    let (mut answered, mut sum_ms) = (vec![0u64; streams.len()], vec![0.0; streams.len()]);
    let (mut missed, mut total) = (0u64, 0u64);
    while let Some(Reverse((now, arrives, stream))) = events.pop() {
        if arrives {
            if now >= end || total as usize >= most {
                continue;
            }
            total += 1;
            dispatcher.arrive(stream, now);
            arrived[stream] += 1;
            events.push(Reverse((arrival(stream, arrived[stream]), true, stream)));
        } else if let Some(since) = running[stream].take() {
            dispatcher.finish(stream);
            let ms = (now - since) as f64 / 1e6;
            answered[stream] += 1;
            sum_ms[stream] += ms;
            missed += u64::from(streams[stream].deadline_ms.is_some_and(|deadline| ms > deadline));
        }
        // Of several events at one time the last one starts what can start.
        if events.peek().is_some_and(|Reverse((next, ..))| *next == now) {
            continue;
        }
        while let Some(started) = dispatcher.start() {
            let company = running.iter().any(Option::is_some);
            running[started.stream] = Some(started.arrival_ns);
            let ms = service_ms[started.stream] * if company { beside } else { 1.0 };
            events.push(Reverse((now + nanoseconds(ms).max(1), false, started.stream)));
        }
    }
    let models_ms: Vec<f64> =
        sum_ms.iter().zip(&answered).map(|(sum, &count)| if count > 0 { sum / count as f64 } else { 0.0 }).collect();
    RatePrediction {
        miss_rate: if total > 0 { missed as f64 / total as f64 } else { 0.0 },
        mean_response_ms: models_ms.iter().sum::<f64>() / models_ms.len().max(1) as f64,
        models_ms,
    }
}
