//! Measurements that take two units: hand-over of a tensor, and slowdown of one unit by the other.
//!
//! **Transfers** are measured where they happen. A trivial operator runs to and fro over two shared caller buffers, X → Y
//! and Y → X. Three chains are timed hop by hop (a hop lasts from the end of the previous execution to the end of its
//! own): the first unit with itself, the second with itself, and both in turn. What the hop costs more on a unit when
//! the other one wrote its input is `T(other → unit)`: layout changes, cold caches, a thread hand-over between units
//! with cores of their own, entering the other core set between units that share cores. Each batch gives one sample,
//! the difference of the two medians, at least 0.
//!
//! **Slowdown** is time together over time alone, one sample per batch, with batches alone and together in turn.

use super::baton::Baton;
use super::execution::{Loaded, buffer_of};
use super::threads::panic_message;
use crate::protocol::{Answer, Failure, Item, Sampling};
use crate::sampling::{Pacer, milliseconds};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use trefoil_core::{HostTensor, Samples, Unit};
use trefoil_units::{Buffer, enter_unit, unit_cores};

/// Hops per chain and batch are odd-free pairs; this many pairs at most, so that one batch stays short.
const MOST_PAIRS: u32 = 200;

fn enter(unit: &Unit) -> Result<(), Failure> {
    let guard = enter_unit(unit).map_err(|error| Failure::new("bind", &error.to_string()))?;
    // The thread belongs to this measurement and ends with it: nothing is to be restored, as in the executor.
    std::mem::forget(guard);
    Ok(())
}

fn median(values: &mut [f64]) -> Option<f64> {
    Samples::from_values(values).map(|samples| samples.median)
}

/// The two shared buffers of a chain.
#[derive(Clone, Copy)]
struct Shared {
    x: Buffer,
    y: Buffer,
}

// SAFETY: only addresses are shared; each is dereferenced by the side whose turn it is (see `Baton`).
unsafe impl Sync for Shared {}

/// The trivial operator compiled twice for one unit: X → Y and Y → X.
struct ToAndFro {
    there: Loaded,
    back: Loaded,
}

impl ToAndFro {
    fn load(item: &Item, Shared { x, y }: Shared) -> Result<Self, Failure> {
        let mut there = Loaded::load(item)?;
        there.rebind(&[x], &[y])?;
        let mut back = Loaded::load(item)?;
        back.rebind(&[y], &[x])?;
        Ok(Self { there, back })
    }

    /// A chain of this unit alone: hop times of `there` and of `back`.
    fn alone(&mut self, pairs: u32) -> Result<(Vec<f64>, Vec<f64>), Failure> {
        let (mut there, mut back) = (Vec::new(), Vec::new());
        let mut last = Instant::now();
        for _ in 0..pairs {
            for (program, times) in [(&mut self.there, &mut there), (&mut self.back, &mut back)] {
                program.execute()?;
                let now = Instant::now();
                times.push(milliseconds(last, now));
                last = now;
            }
        }
        Ok((there, back))
    }
}

/// One batch's medians: the first unit's `there` hop and the second unit's `back` hop, alone and in turn.
#[derive(Default)]
struct Medians {
    first_alone: Option<f64>,
    second_alone: Option<f64>,
    first_in_turn: Option<f64>,
    second_in_turn: Option<f64>,
}

/// See the module.
pub fn transfer(first: &Item, second: &Item, sampling: Sampling) -> Result<Answer, Failure> {
    let info = first.model.inputs.first().ok_or_else(|| Failure::new("bind", "the operator has no input"))?.clone();
    let (mut tensor_x, mut tensor_y) = (HostTensor::zeros(info.clone()), HostTensor::zeros(info));
    let buffers = Shared { x: buffer_of(&mut tensor_x), y: buffer_of(&mut tensor_y) };
    // The units' threads end inside, before the tensors do.
    let batches = if first.unit.is_disjoint(&second.unit) {
        transfer_apart(first, second, sampling, buffers)?
    } else {
        // A thread of its own, since entering a unit is not undone.
        in_thread(|| transfer_on_one_thread(first, second, sampling, buffers))?
    };
    let samples = |alone: fn(&Medians) -> Option<f64>, turn: fn(&Medians) -> Option<f64>| {
        let mut extra: Vec<f64> =
            batches.iter().filter_map(|batch| Some((turn(batch)? - alone(batch)?).max(0.0))).collect();
        Samples::from_values(&mut extra).ok_or_else(|| Failure::new("run", "no sample was taken"))
    };
    Ok(Answer::Transferred {
        forward: samples(|batch| batch.second_alone, |batch| batch.second_in_turn)?,
        backward: samples(|batch| batch.first_alone, |batch| batch.first_in_turn)?,
    })
}

fn in_thread<T: Send>(work: impl FnOnce() -> Result<T, Failure> + Send) -> Result<T, Failure> {
    std::thread::scope(|scope| join(scope.spawn(work)))
}

fn join<T>(handle: std::thread::ScopedJoinHandle<'_, Result<T, Failure>>) -> Result<T, Failure> {
    handle
        .join()
        .unwrap_or_else(|panic| Err(Failure::new("crash", &format!("panicked: {}", panic_message(panic.as_ref())))))
}

/// How many pairs of hops fit a batch, from the time that two hops took.
fn pairs_per_batch(sampling: Sampling, pair_ms: f64) -> u32 {
    let batches = f64::from(Pacer::new(sampling).batches());
    // Three chains share the cap.
    let fitting = sampling.cap_ms / batches / 3.0 / pair_ms.max(1e-4);
    (fitting as u32).clamp(2, (sampling.runs / Pacer::new(sampling).batches()).clamp(2, MOST_PAIRS))
}

fn transfer_on_one_thread(
    first: &Item,
    second: &Item,
    sampling: Sampling,
    buffers: Shared,
) -> Result<Vec<Medians>, Failure> {
    let same_cores = unit_cores(&first.unit) == unit_cores(&second.unit);
    enter(&second.unit)?;
    let mut b = ToAndFro::load(second, buffers)?;
    b.alone(3)?;
    enter(&first.unit)?;
    let mut a = ToAndFro::load(first, buffers)?;
    let began = Instant::now();
    a.alone(3)?;
    let pairs = pairs_per_batch(sampling, milliseconds(began, Instant::now()) / 3.0);
    let mut batches = Vec::new();
    for _ in 0..Pacer::new(sampling).batches() {
        let mut medians = Medians::default();
        enter(&first.unit)?;
        medians.first_alone = median(&mut a.alone(pairs)?.0);
        enter(&second.unit)?;
        medians.second_alone = median(&mut b.alone(pairs)?.1);
        let (mut of_first, mut of_second) = (Vec::new(), Vec::new());
        let mut last = Instant::now();
        for _ in 0..pairs {
            for (unit, program, times) in
                [(&first.unit, &mut a.there, &mut of_first), (&second.unit, &mut b.back, &mut of_second)]
            {
                if !same_cores {
                    enter(unit)?;
                }
                program.execute()?;
                let now = Instant::now();
                times.push(milliseconds(last, now));
                last = now;
            }
        }
        medians.first_in_turn = median(&mut of_first);
        medians.second_in_turn = median(&mut of_second);
        batches.push(medians);
    }
    Ok(batches)
}

fn transfer_apart(first: &Item, second: &Item, sampling: Sampling, buffers: Shared) -> Result<Vec<Medians>, Failure> {
    let baton = Baton::default();
    let pairs = AtomicU64::new(0);
    let base = Instant::now();
    let ended = AtomicU64::new(0);
    let batches = Mutex::new((0..Pacer::new(sampling).batches()).map(|_| Medians::default()).collect::<Vec<_>>());
    let count = Pacer::new(sampling).batches();
    // Both sides walk through the same sequence of turns; side 0 has the even ones.
    let side = |side: usize, item: &Item| -> Result<(), Failure> {
        baton.join(side);
        let play = || -> Result<(), Failure> {
            enter(&item.unit)?;
            let mut mine = ToAndFro::load(item, buffers)?;
            let mut turn = side as u64;
            let wait = |turn: &mut u64| {
                let mine = baton.wait_for(side, *turn);
                *turn += 2;
                if mine { Ok(()) } else { Err(Failure::new("run", "the other unit failed")) }
            };
            wait(&mut turn)?;
            let began = Instant::now();
            mine.alone(3)?;
            if side == 0 {
                let fitting = pairs_per_batch(sampling, milliseconds(began, Instant::now()) / 3.0);
                pairs.store(u64::from(fitting), Ordering::Release);
            }
            baton.hand_over(side, turn - 1);
            for batch in 0..count as usize {
                wait(&mut turn)?;
                let pairs = pairs.load(Ordering::Acquire) as u32;
                let (mut there, mut back) = mine.alone(pairs)?;
                let alone = median(if side == 0 { &mut there } else { &mut back });
                baton.hand_over(side, turn - 1);
                let mut in_turn = Vec::new();
                for pair in 0..pairs {
                    wait(&mut turn)?;
                    if side == 0 {
                        mine.there.execute()?
                    } else {
                        mine.back.execute()?
                    };
                    let now = base.elapsed().as_nanos() as u64;
                    let before = ended.swap(now, Ordering::AcqRel);
                    baton.hand_over(side, turn - 1);
                    // The first hop of side 0 has no previous hop of this chain.
                    if pair > 0 || side == 1 {
                        in_turn.push(now.saturating_sub(before) as f64 / 1e6);
                    }
                }
                let together = median(&mut in_turn);
                let mut batches = batches.lock().expect("no side panics while it holds this lock");
                let medians = &mut batches[batch];
                if side == 0 {
                    (medians.first_alone, medians.first_in_turn) = (alone, together);
                } else {
                    (medians.second_alone, medians.second_in_turn) = (alone, together);
                }
            }
            Ok(())
        };
        let outcome = play();
        if outcome.is_err() {
            baton.end(side);
        }
        outcome
    };
    std::thread::scope(|scope| {
        let one = scope.spawn(|| side(0, first));
        let other = scope.spawn(|| side(1, second));
        // If both failed, the one that did not merely wait for the other tells why.
        match (join(one), join(other)) {
            (Ok(()), Ok(())) => Ok(()),
            (Err(failure), Ok(())) | (Ok(()), Err(failure)) => Err(failure),
            (Err(failure), Err(second)) => {
                Err(if failure.reason == "the other unit failed" { second } else { failure })
            }
        }
    })?;
    Ok(batches.into_inner().expect("no side panicked while it held the lock"))
}

/// See the module.
pub fn slowdown(slowed: &Item, interfering: &Item, sampling: Sampling) -> Result<Answer, Failure> {
    if !slowed.unit.is_disjoint(&interfering.unit) {
        return Err(Failure::new("run", "the two units share a resource, so they never run at once"));
    }
    let (on, stop, busy) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(true));
    let executions = AtomicU64::new(0);
    let broken = Mutex::new(None);
    let factors = std::thread::scope(|scope| {
        scope.spawn(|| {
            let work = || -> Result<(), Failure> {
                enter(&interfering.unit)?;
                let mut loaded = Loaded::load(interfering)?;
                loaded.execute()?;
                while !stop.load(Ordering::Acquire) {
                    busy.store(on.load(Ordering::Acquire), Ordering::Release);
                    if busy.load(Ordering::Acquire) {
                        loaded.execute()?;
                        executions.fetch_add(1, Ordering::AcqRel);
                    } else {
                        std::thread::sleep(std::time::Duration::from_micros(200));
                    }
                }
                Ok(())
            };
            if let Err(failure) = work() {
                *broken.lock().expect("nobody panics while holding this lock") = Some(failure);
            }
        });
        let timed = scope.spawn(|| {
            let outcome = time_slowed(slowed, sampling, &|together| {
                on.store(together, Ordering::Release);
                let before = executions.load(Ordering::Acquire);
                // Until the interference really runs, or really rests, or has failed.
                let waiting = || {
                    if together { executions.load(Ordering::Acquire) <= before } else { busy.load(Ordering::Acquire) }
                };
                while waiting() && broken.lock().expect("nobody panics while holding this lock").is_none() {
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
            });
            stop.store(true, Ordering::Release);
            outcome
        });
        let outcome = join(timed);
        stop.store(true, Ordering::Release);
        outcome
    });
    if let Some(failure) = broken.into_inner().expect("nobody panicked while holding this lock") {
        return Err(Failure::new(&failure.stage, &format!("the interfering operator: {}", failure.reason)));
    }
    let factor = Samples::from_values(&mut factors?).ok_or_else(|| Failure::new("run", "no sample was taken"))?;
    Ok(Answer::Slowed { factor })
}

/// Factors of one batch each: median with interference over median without.
fn time_slowed(item: &Item, sampling: Sampling, interfere: &dyn Fn(bool)) -> Result<Vec<f64>, Failure> {
    enter(&item.unit)?;
    let mut loaded = Loaded::load(item)?;
    interfere(false);
    let pacer = Pacer::new(sampling);
    pacer.warm_up(|| loaded.execute().map(drop))?;
    let mut factors = Vec::new();
    for _ in 0..pacer.batches() {
        let mut medians = [None, None];
        for (together, slot) in [false, true].into_iter().zip(&mut medians) {
            interfere(together);
            let mut times = Vec::new();
            pacer.batch(|| {
                let began = Instant::now();
                loaded.execute()?;
                times.push(milliseconds(began, Instant::now()));
                Ok::<_, Failure>(())
            })?;
            *slot = median(&mut times);
        }
        interfere(false);
        if let [Some(alone), Some(together)] = medians
            && alone > 0.0
        {
            factors.push(together / alone);
        }
    }
    Ok(factors)
}
