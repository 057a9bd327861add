//! The open loop: requests arrive at fixed rates whether or not earlier ones are finished.
//!
//! Response times count from the **scheduled** arrival, so a stall is charged to every request that it delays (no coordinated
//! omission). The rule of who runs next is [`Dispatcher`], the very code that predicted the plan. Each model's inferences run on
//! one thread of its own, which sleeps while nothing of that model may run.

use super::ModelInputs;
use super::latencies::{Latencies, LatencySummary};
use super::linked::as_one;
use super::rounds::{Equality, Outputs, each_alone, resident_bytes, whole};
use crate::RunError;
use crate::executor::{Executor, ExecutorOptions, FindUnit};
use crate::source::SegmentSource;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trefoil_core::{OperatorGraph, Plan};
use trefoil_plan::together::{DispatchStream, Dispatcher};

/// Requests of one model: one every `period_ms`, the first at `offset_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Arrivals {
    /// Milliseconds between arrivals, above 0.
    pub period_ms: f64,
    /// The first arrival, in milliseconds from the start.
    pub offset_ms: f64,
    /// Milliseconds from arrival in which a response is in time.
    pub deadline_ms: Option<f64>,
    /// Higher goes first.
    pub priority: i32,
}

/// How to serve.
#[derive(Debug, Clone, Copy)]
pub struct ServeOptions<'a> {
    /// How long requests arrive.
    pub duration: Duration,
    /// Most requests of a model that wait; further ones are turned away, which bounds the memory of an overloaded machine.
    pub limit: usize,
    /// How long what waits at the end may take to finish before it is given up.
    pub grace: Duration,
    /// Ends the arrivals early; what waits is given up.
    pub stop: &'a AtomicBool,
}

/// What came of one model's requests. `arrived = completed + failed + turned_away + unfinished`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StreamReport {
    /// Requests that arrived.
    pub arrived: u64,
    /// Answered.
    pub completed: u64,
    /// Ended by an error of a unit, or asked of a unit that panicked before.
    pub failed: u64,
    /// Turned away because too many waited.
    pub turned_away: u64,
    /// Given up at the end.
    pub unfinished: u64,
    /// Not answered by their deadline, for whatever reason; 0 without a deadline.
    pub missed: u64,
    /// From scheduled arrival to response.
    pub response: LatencySummary,
    /// Running alone took, while serving.
    pub service: LatencySummary,
    /// The first error, in one line.
    pub first_error: Option<String>,
}

impl StreamReport {
    /// Fraction of all requests that missed their deadline.
    pub fn miss_rate(&self) -> f64 {
        if self.arrived == 0 { 0.0 } else { self.missed as f64 / self.arrived as f64 }
    }
}

/// What serving gave.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ServeReport {
    /// Seconds from the first to the last moment.
    pub seconds: f64,
    /// By model.
    pub streams: Vec<StreamReport>,
    /// Responses a second, all models together.
    pub responses_per_second: f64,
    /// By unit, the fraction of the time in which it ran something.
    pub utilisation: BTreeMap<String, f64>,
    /// Comparison of outputs with each model alone.
    pub equality: Equality,
    /// Resident bytes of the process at the beginning and at the end, where the system tells.
    pub resident_bytes: Option<[u64; 2]>,
    /// Whether it was stopped before its time.
    pub stopped: bool,
}

impl ServeReport {
    /// Fraction of all requests that missed their deadline.
    pub fn miss_rate(&self) -> f64 {
        let sum = |of: fn(&StreamReport) -> u64| self.streams.iter().map(of).sum::<u64>();
        let arrived = sum(|stream| stream.arrived);
        if arrived == 0 { 0.0 } else { sum(|stream| stream.missed) as f64 / arrived as f64 }
    }

    /// Mean over models of their mean response time, in milliseconds; what was not answered counts as the whole time served.
    pub fn mean_response_ms(&self) -> f64 {
        let of = |stream: &StreamReport| {
            let lost = (stream.arrived - stream.completed) as f64;
            let sum = stream.response.mean_ms * stream.completed as f64 + lost * self.seconds * 1e3;
            if stream.arrived == 0 { 0.0 } else { sum / stream.arrived as f64 }
        };
        self.streams.iter().map(of).sum::<f64>() / self.streams.len().max(1) as f64
    }
}

/// Models, each compiled on its own units, ready to serve.
pub struct Server {
    executors: Vec<Executor>,
    resources: Vec<BTreeSet<trefoil_core::Resource>>,
    exclusive: bool,
}

impl Server {
    /// Compiles each model's part of a plan. With `exclusive` inferences that share a resource run one after another.
    ///
    /// # Errors
    /// Those of [`Executor::new`] and [`crate::match_inputs`].
    pub fn new(
        plan: &Plan,
        exclusive: bool,
        graphs: &[&OperatorGraph],
        source: &dyn SegmentSource,
        find: &FindUnit<'_>,
        options: &ExecutorOptions,
        inputs: &[ModelInputs<'_>],
    ) -> Result<Self, RunError> {
        let executors = each_alone(plan, graphs, source, find, options, inputs)?;
        let held = |executor: &Executor| {
            let units = executor.plan().units.iter();
            units.flat_map(|unit| unit.resources.iter().cloned()).collect()
        };
        Ok(Self { resources: executors.iter().map(held).collect(), executors, exclusive })
    }

    /// Compiles a plan of linked stages, all of which answer one request together: there is one stream.
    ///
    /// # Errors
    /// Those of [`Executor::new`] and [`crate::match_inputs`].
    pub fn linked(
        plan: &Plan,
        graphs: &[&OperatorGraph],
        source: &dyn SegmentSource,
        find: &FindUnit<'_>,
        options: &ExecutorOptions,
        inputs: &[ModelInputs<'_>],
    ) -> Result<Self, RunError> {
        let executor = whole(plan, graphs, source, find, options, inputs)?;
        let held = plan.units.iter().flat_map(|unit| unit.resources.iter().cloned()).collect();
        Ok(Self { executors: vec![executor], resources: vec![held], exclusive: true })
    }

    /// Runs every model a few times, so that what happens once is not charged to the first requests.
    ///
    /// # Errors
    /// Those of [`Executor::run_bound`].
    pub fn warm_up(&mut self) -> Result<(), RunError> {
        for executor in &mut self.executors {
            for _ in 0..3 {
                executor.run_bound()?;
            }
        }
        Ok(())
    }

    /// Serves; `expected` are the outputs of each model alone, or of linked stages run one after another. The server can serve again afterwards.
    ///
    /// # Errors
    /// [`RunError::Plan`] when there is not one [`Arrivals`] per model or a period is not above 0, [`RunError::Start`] when
    /// threads cannot be started. A unit that fails is told in the report.
    pub fn serve(
        &mut self,
        arrivals: &[Arrivals],
        expected: Option<&Outputs>,
        options: &ServeOptions<'_>,
    ) -> Result<ServeReport, RunError> {
        if arrivals.len() != self.executors.len() {
            let reason =
                format!("it has {} models, but arrivals of {} are given", self.executors.len(), arrivals.len());
            return Err(RunError::plan(reason));
        }
        if let Some(bad) = arrivals.iter().find(|stream| !(stream.period_ms > 0.0 && stream.period_ms.is_finite())) {
            return Err(RunError::plan(format!("a period of {} ms is not above 0", bad.period_ms)));
        }
        let streams = arrivals.iter().zip(&self.resources).map(|(stream, resources)| DispatchStream {
            resources: resources.clone(),
            priority: stream.priority,
            deadline_ns: stream.deadline_ms.map(|ms| (ms * 1e6) as u64),
        });
        let dispatcher = Dispatcher::new(streams.collect(), self.exclusive, options.limit);
        let desk = Desk {
            state: Mutex::new(State {
                dispatcher,
                granted: vec![None; arrivals.len()],
                dead: vec![false; arrivals.len()],
                closed: false,
            }),
            woken: arrivals.iter().map(|_| Condvar::new()).collect(),
            quiet: Condvar::new(),
            began: Instant::now(),
        };
        let resident = resident_bytes();
        // Linked stages are one executor, whose outputs are those of all stages.
        let one = expected.filter(|all| self.executors.len() == 1 && all.len() > 1).map(as_one);
        let expected = one.as_ref().or(expected);
        let mut report = ServeReport::default();
        std::thread::scope(|scope| -> Result<(), RunError> {
            let mut threads = Vec::new();
            let mut failed = None;
            for (stream, executor) in self.executors.iter_mut().enumerate() {
                let (desk, deadline) = (&desk, arrivals[stream].deadline_ms);
                let spawned = std::thread::Builder::new()
                    .name(format!("trefoil-stream-{stream}"))
                    .spawn_scoped(scope, move || answer(desk, stream, executor, deadline, expected));
                match spawned {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        let what = format!("a thread for model {stream}");
                        failed = Some(RunError::Start { what, reason: error.to_string() });
                        break;
                    }
                }
            }
            let mut counts = vec![StreamReport::default(); arrivals.len()];
            if failed.is_none() {
                report.stopped = desk.generate(arrivals, options, &mut counts);
                desk.drain(options, &mut counts, arrivals);
            }
            desk.close();
            report.seconds = desk.began.elapsed().as_secs_f64();
            let mut busy: BTreeMap<String, f64> = BTreeMap::new();
            for (count, thread) in counts.iter_mut().zip(threads) {
                // An executor catches its backends' panics, so one that got here is ours: let it through.
                let answered = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                count.completed = answered.response.count();
                count.failed += answered.failed;
                count.missed += answered.missed;
                count.response = answered.response.summary();
                count.service = answered.service.summary();
                count.first_error = answered.first_error;
                report.equality.merge(&answered.equality);
                for (unit, ms) in answered.busy {
                    *busy.entry(unit).or_insert(0.0) += ms;
                }
            }
            report.utilisation =
                busy.into_iter().map(|(unit, ms)| (unit, ms / 1e3 / report.seconds.max(1e-9))).collect();
            report.streams = counts;
            failed.map_or(Ok(()), Err)
        })?;
        let completed: u64 = report.streams.iter().map(|stream| stream.completed).sum();
        report.responses_per_second = completed as f64 / report.seconds.max(1e-9);
        report.resident_bytes = resident.zip(resident_bytes()).map(|(before, after)| [before, after]);
        Ok(report)
    }
}

/// Where arrivals and threads meet.
struct Desk {
    state: Mutex<State>,
    /// One per stream: its thread was granted a request, or all is over.
    woken: Vec<Condvar>,
    /// Something finished.
    quiet: Condvar,
    began: Instant,
}

struct State {
    dispatcher: Dispatcher,
    /// Per stream, the scheduled arrival of the request that its thread is to run.
    granted: Vec<Option<u64>>,
    /// Streams whose executor does not run again.
    dead: Vec<bool>,
    closed: bool,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Valid at every step, so poisoning carries no meaning.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// Grants what may start now.
    fn grant(&self, state: &mut State) {
        while let Some(started) = state.dispatcher.start() {
            state.granted[started.stream] = Some(started.arrival_ns);
            self.woken[started.stream].notify_one();
        }
    }

    /// Lets requests arrive until the time is up; whether it was stopped earlier.
    fn generate(&self, arrivals: &[Arrivals], options: &ServeOptions<'_>, counts: &mut [StreamReport]) -> bool {
        let end_ns = options.duration.as_nanos() as u64;
        let at = |stream: &Arrivals, number: u64| {
            ((stream.offset_ms + stream.period_ms * number as f64).max(0.0) * 1e6) as u64
        };
        let mut next: Vec<u64> = arrivals.iter().map(|stream| at(stream, 0)).collect();
        loop {
            let soonest = next.iter().copied().min().unwrap_or(end_ns).min(end_ns);
            loop {
                if options.stop.load(Ordering::Relaxed) {
                    return true;
                }
                let now = self.now_ns();
                if now >= soonest {
                    break;
                }
                // Not longer than people wait for Ctrl-C to work.
                std::thread::sleep(Duration::from_nanos((soonest - now).min(50_000_000)));
            }
            if soonest >= end_ns {
                return false;
            }
            let now = self.now_ns().min(end_ns);
            let mut state = self.lock();
            for (stream, next) in next.iter_mut().enumerate() {
                while *next <= now && *next < end_ns {
                    let count = &mut counts[stream];
                    count.arrived += 1;
                    let has_deadline = u64::from(arrivals[stream].deadline_ms.is_some());
                    if state.dead[stream] {
                        count.failed += 1;
                        count.missed += has_deadline;
                    } else if !state.dispatcher.arrive(stream, *next) {
                        count.turned_away += 1;
                        count.missed += has_deadline;
                    }
                    *next = at(&arrivals[stream], count.arrived);
                }
            }
            self.grant(&mut state);
        }
    }

    /// Waits for what waits, as long as it may take, and gives up the rest.
    fn drain(&self, options: &ServeOptions<'_>, counts: &mut [StreamReport], arrivals: &[Arrivals]) {
        let until = Instant::now() + options.grace;
        let mut state = self.lock();
        let streams = counts.len();
        let waits = |state: &State| (0..streams).any(|stream| state.dispatcher.waiting(stream) > 0);
        while (waits(&state) || !state.dispatcher.is_idle()) && !options.stop.load(Ordering::Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let left = left.min(Duration::from_millis(50));
            state = self.quiet.wait_timeout(state, left).map_or_else(|error| error.into_inner().0, |woken| woken.0);
        }
        for (stream, count) in counts.iter_mut().enumerate() {
            let given_up = state.dispatcher.clear(stream) as u64;
            let dead = state.dead[stream];
            *(if dead { &mut count.failed } else { &mut count.unfinished }) += given_up;
            count.missed += if arrivals[stream].deadline_ms.is_some() { given_up } else { 0 };
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.woken.iter().for_each(Condvar::notify_all);
    }
}

/// What one thread answered.
#[derive(Default)]
struct Answered {
    response: Latencies,
    service: Latencies,
    failed: u64,
    missed: u64,
    first_error: Option<String>,
    equality: Equality,
    busy: BTreeMap<String, f64>,
}

/// Outputs larger than this are compared after every sixteenth inference only.
const COMPARE_ALWAYS: usize = 1 << 16;

/// Body of a stream's thread.
fn answer(
    desk: &Desk,
    stream: usize,
    executor: &mut Executor,
    deadline_ms: Option<f64>,
    expected: Option<&Outputs>,
) -> Answered {
    let mut answered = Answered::default();
    let wanted = expected.and_then(|all| all.get(&(stream as u32, 0)));
    let bytes: usize = wanted.into_iter().flatten().map(|tensor| tensor.bytes().len()).sum();
    let compare_every = if bytes > COMPARE_ALWAYS { 16 } else { 1 };
    let units: Vec<String> = executor.plan().segments.iter().map(|segment| segment.unit.to_string()).collect();
    loop {
        let mut state = desk.lock();
        let arrival_ns = loop {
            match state.granted[stream].take() {
                Some(arrival) => break arrival,
                None if state.closed => return answered,
                None => state = desk.woken[stream].wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(state);
        let started_ns = desk.now_ns();
        let outcome = executor.run_bound();
        let ended_ns = desk.now_ns();
        let mut state = desk.lock();
        state.dispatcher.finish(stream);
        state.dead[stream] |= matches!(outcome, Err(RunError::Panicked { .. } | RunError::Poisoned { .. }));
        if state.dead[stream] {
            // Nothing of it will be answered; the others go on.
            let given_up = state.dispatcher.clear(stream) as u64;
            answered.failed += given_up;
            answered.missed += if deadline_ms.is_some() { given_up } else { 0 };
        }
        desk.grant(&mut state);
        drop(state);
        desk.quiet.notify_all();
        let response_ms = (ended_ns - arrival_ns.min(ended_ns)) as f64 / 1e6;
        match outcome {
            Ok(()) => {
                answered.response.add(response_ms);
                answered.service.add((ended_ns - started_ns) as f64 / 1e6);
                answered.missed += u64::from(deadline_ms.is_some_and(|deadline| response_ms > deadline));
                for timing in executor.timings() {
                    let unit = &units[timing.segment.0 as usize];
                    let ms = timing.end_ms - timing.start_ms;
                    match answered.busy.get_mut(unit) {
                        Some(sum) => *sum += ms,
                        None => drop(answered.busy.insert(unit.clone(), ms)),
                    }
                }
                if let Some(wanted) = wanted
                    && answered.response.count() % compare_every == 1 % compare_every
                {
                    for (index, wanted) in wanted.iter().enumerate() {
                        answered.equality.add(executor.output(index), Some(wanted));
                    }
                }
            }
            Err(error) => {
                answered.failed += 1;
                answered.missed += u64::from(deadline_ms.is_some());
                answered.first_error.get_or_insert(error.to_string());
            }
        }
    }
}
