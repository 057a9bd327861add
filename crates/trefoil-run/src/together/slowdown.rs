//! How much models that run at once slow each other down (BIDENT 3.1 and 3.2.2: each pair of models on each pair of units,
//! under barrier-synchronised simultaneous execution).
//!
//! Samples are taken in batches, and in each batch every model alone, all of them again and again, and all of them started
//! at one moment, so that a machine whose speed drifts slows both sides of a ratio. One ratio per batch is what the spread
//! is judged by.

use crate::RunError;
use crate::executor::Executor;
use crate::stats::median_interval;
use serde::{Deserialize, Serialize};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil_core::Samples;
use trefoil_core::measurement::NOISY_SPREAD;

/// Batches.
const BATCHES: u32 = 6;
/// Fewest samples of which a batch's median is taken, whatever the time.
const FEWEST: usize = 3;

/// How much models slow each other down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SlowdownReport {
    /// By model, milliseconds of its lanes' work alone (median of the batches' medians).
    pub alone_ms: Vec<f64>,
    /// By model, milliseconds beside all others, which run again and again (median of the batches' medians).
    pub beside_ms: Vec<f64>,
    /// By model, time beside all others over time alone, one sample per batch.
    pub factors: Vec<Samples>,
    /// Milliseconds from starting all at one moment, one execution each, until all have ended; one sample per batch.
    pub together_ms: Samples,
    /// Executions timed, over all models and batches.
    pub executions: u64,
}

impl SlowdownReport {
    /// Whether some model's factor varied by more than [`NOISY_SPREAD`] from batch to batch.
    pub fn is_noisy(&self) -> bool {
        self.worst_spread() > NOISY_SPREAD
    }

    /// The largest spread of a factor from batch to batch.
    pub fn worst_spread(&self) -> f64 {
        self.factors.iter().map(Samples::spread).fold(0.0, f64::max)
    }
}

/// Measures executors that share no resource, for about `time` in each of the three ways.
///
/// # Errors
/// Those of [`Executor::run_bound`].
pub(crate) fn slowdown(executors: &mut [Executor], time: Duration) -> Result<SlowdownReport, RunError> {
    let part = time / BATCHES;
    for executor in executors.iter_mut() {
        repeat(executor, &mut Vec::new(), part)?;
    }
    let mut found = vec![Batches::default(); executors.len()];
    let (mut together, mut executions) = (Vec::new(), 0u64);
    for _ in 0..BATCHES {
        for (executor, found) in executors.iter_mut().zip(&mut found) {
            let mut samples = Vec::new();
            repeat(executor, &mut samples, part)?;
            executions += samples.len() as u64;
            found.alone.push(median(samples));
        }
        for (samples, found) in beside(executors, part)?.into_iter().zip(&mut found) {
            executions += samples.len() as u64;
            found.beside.push(median(samples));
        }
        let samples = at_once(executors, part)?;
        executions += (samples.len() * executors.len()) as u64;
        together.push(median(samples));
    }
    let factors = found.iter().map(Batches::factors).collect::<Option<_>>();
    let (Some(factors), Some(together_ms)) = (factors, Samples::from_values(&mut together)) else {
        return Err(RunError::Compare { reason: "an execution took no time that could be measured".to_owned() });
    };
    Ok(SlowdownReport {
        alone_ms: found.iter().map(|found| median(found.alone.clone())).collect(),
        beside_ms: found.iter().map(|found| median(found.beside.clone())).collect(),
        factors,
        together_ms,
        executions,
    })
}

/// One model's medians by batch.
#[derive(Debug, Clone, Default)]
struct Batches {
    alone: Vec<f64>,
    beside: Vec<f64>,
}

impl Batches {
    fn factors(&self) -> Option<Samples> {
        let pairs = self.alone.iter().zip(&self.beside).filter(|(alone, _)| **alone > 0.0);
        Samples::from_values(&mut pairs.map(|(alone, beside)| beside / alone).collect::<Vec<_>>())
    }
}

fn median(mut samples: Vec<f64>) -> f64 {
    median_interval(&mut samples).map_or(0.0, |interval| interval.median)
}

/// Executes for `time`, and at least [`FEWEST`] times.
///
/// What is timed is the lanes' work only. The thread that calls has no core of its own: while every core runs a lane, it has to wait
/// for one, which plans that keep lanes busy do not have to (27 µs of work had been taken for 143 µs "beside" another model).
fn repeat(executor: &mut Executor, samples: &mut Vec<f64>, time: Duration) -> Result<(), RunError> {
    let began = Instant::now();
    while samples.len() < FEWEST || began.elapsed() < time {
        executor.run_bound()?;
        samples.push(executor.busy_ms());
    }
    Ok(())
}

/// All of them again and again from one barrier on, until each has had its time and its samples.
fn beside(executors: &mut [Executor], time: Duration) -> Result<Vec<Vec<f64>>, RunError> {
    let (waiting, start) = (AtomicUsize::new(executors.len()), Barrier::new(executors.len()));
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let threads: Vec<_> = executors
            .iter_mut()
            .map(|executor| {
                let (waiting, start, failed) = (&waiting, &start, &failed);
                scope.spawn(move || -> Result<Vec<f64>, RunError> {
                    let mut samples = Vec::new();
                    start.wait();
                    let outcome = repeat(executor, &mut samples, time);
                    waiting.fetch_sub(1, Ordering::AcqRel);
                    failed.fetch_or(outcome.is_err(), Ordering::AcqRel);
                    outcome?;
                    // Whoever has enough keeps the others company until they have, too; that counts for nothing.
                    while waiting.load(Ordering::Acquire) > 0 && !failed.load(Ordering::Acquire) {
                        executor.run_bound()?;
                    }
                    Ok(samples)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// All of them started at one moment, again and again; milliseconds until all have ended.
fn at_once(executors: &mut [Executor], time: Duration) -> Result<Vec<f64>, RunError> {
    let (began, mut samples) = (Instant::now(), Vec::new());
    while samples.len() < FEWEST || began.elapsed() < time {
        let began = Instant::now();
        let (mut outcome, mut launched) = (Ok(()), 0);
        for executor in executors.iter_mut() {
            outcome = executor.launch();
            if outcome.is_err() {
                break;
            }
            launched += 1;
        }
        for executor in &mut executors[..launched] {
            let joined = executor.join();
            outcome = outcome.and(joined);
        }
        outcome?;
        samples.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(samples)
}
