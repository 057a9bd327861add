//! The executor's signals under loom, which tries every interleaving (up to a bound on preemptions) of small runs, weak memory
//! included. `src/signals.rs` is compiled here as it is, against loom's atomics instead of the standard library's.
//!
//! What lanes hand each other is a cell that loom watches: two accesses that are not ordered are an error, a wake-up that is
//! lost is a deadlock, and both end the test.

#![allow(dead_code)] // the executor uses all of it, each model a part

mod sync {
    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use loom::thread::{Thread, current, park, yield_now};
}

#[path = "../src/signals.rs"]
mod signals;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread::JoinHandle;
use signals::Signals;
use std::time::Duration;

/// What the threads share: the signals, and one value per lane that only this lane writes.
struct Bench {
    signals: Signals,
    values: Vec<UnsafeCell<u32>>,
}

// SAFETY: the cells are what is being tested: loom reports accesses that the signals do not order.
unsafe impl Sync for Bench {}
// SAFETY: as above; nothing in it belongs to a thread.
unsafe impl Send for Bench {}

impl Bench {
    /// Neither spins nor lingers: loom has no clock, and sleeping is what can lose a wake-up.
    fn new(lanes: usize) -> Arc<Self> {
        let signals = Signals::new(lanes, Duration::ZERO, Duration::ZERO);
        Arc::new(Self { signals, values: (0..lanes).map(|_| UnsafeCell::new(0)).collect() })
    }

    fn get(&self, lane: usize) -> u32 {
        // SAFETY: loom checks that no write is concurrent.
        self.values[lane].with(|value| unsafe { *value })
    }

    fn set(&self, lane: usize, number: u32) {
        // SAFETY: loom checks that no other access is concurrent.
        self.values[lane].with_mut(|value| unsafe { *value = number });
    }

    /// A lane's thread, as the executor's: `run` is its sequence.
    fn lane(bench: &Arc<Self>, lane: usize, run: fn(&Bench)) -> JoinHandle<()> {
        let bench = Arc::clone(bench);
        loom::thread::spawn(move || {
            let mut seen = 0;
            while let Some(run_number) = bench.signals.next_run(lane, seen) {
                seen = run_number;
                run(&bench);
                bench.signals.finish_lane();
            }
        })
    }
}

/// Runs a model under all interleavings with at most so many preemptions; for 20 seconds at most, or as long as it takes under
/// `TREFOIL_LONG_TESTS=1`.
fn explore(preemptions: usize, model: fn()) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    let long = std::env::var_os("TREFOIL_LONG_TESTS").is_some();
    builder.max_duration = if long { None } else { Some(Duration::from_secs(20)) };
    builder.check(model);
}

fn end(bench: &Bench, lanes: Vec<JoinHandle<()>>) {
    bench.signals.stop();
    for lane in lanes {
        lane.join().unwrap();
    }
}

/// Lane 0 makes a value, lane 1 reads it and makes its own, which the caller reads after the run; twice, so that counts of one
/// run must not be taken for the next one's.
#[test]
fn a_value_is_handed_from_lane_to_lane_and_to_the_caller() {
    explore(2, || {
        let bench = Bench::new(2);
        let first = Bench::lane(&bench, 0, |bench| {
            let before = bench.get(0);
            bench.set(0, before + 1);
            bench.signals.publish(0, 1, &[1]);
        });
        let second = Bench::lane(&bench, 1, |bench| {
            bench.signals.wait_for(1, &[(0, 1)]);
            let made = bench.get(0);
            bench.set(1, made * 10);
            bench.signals.publish(1, 1, &[]);
        });
        for run in 1..=2 {
            bench.signals.launch();
            assert!(!bench.signals.join());
            assert_eq!((bench.get(0), bench.get(1)), (run, run * 10));
        }
        end(&bench, vec![first, second]);
    });
}

/// There and back: lane 0 continues only after lane 1 has answered.
#[test]
fn lanes_answer_each_other() {
    explore(2, || {
        let bench = Bench::new(2);
        let first = Bench::lane(&bench, 0, |bench| {
            bench.set(0, 1);
            bench.signals.publish(0, 1, &[1]);
            bench.signals.wait_for(0, &[(1, 1)]);
            let answer = bench.get(1);
            bench.set(0, answer + 1);
            bench.signals.publish(0, 2, &[]);
        });
        let second = Bench::lane(&bench, 1, |bench| {
            bench.signals.wait_for(1, &[(0, 1)]);
            let asked = bench.get(0);
            bench.set(1, asked + 10);
            bench.signals.publish(1, 1, &[0]);
        });
        bench.signals.launch();
        assert!(!bench.signals.join());
        assert_eq!((bench.get(0), bench.get(1)), (12, 11));
        end(&bench, vec![first, second]);
    });
}

/// A lane that fails publishes nothing; the one that waits for it comes to rest all the same, and the next run is whole again.
#[test]
fn a_failure_releases_who_waits_for_it() {
    explore(2, || {
        let bench = Bench::new(2);
        let first = Bench::lane(&bench, 0, |bench| {
            let runs = bench.get(0) + 1;
            bench.set(0, runs);
            if runs == 1 {
                bench.signals.abort();
            } else {
                bench.signals.publish(0, 1, &[1]);
            }
        });
        let second = Bench::lane(&bench, 1, |bench| {
            bench.signals.wait_for(1, &[(0, 1)]);
            if !bench.signals.aborted() {
                let made = bench.get(0);
                bench.set(1, made);
                bench.signals.publish(1, 1, &[]);
            }
        });
        bench.signals.launch();
        assert!(bench.signals.join());
        assert_eq!(bench.get(1), 0, "nothing that depends on the failed task has run");
        bench.signals.launch();
        assert!(!bench.signals.join());
        assert_eq!(bench.get(1), 2);
        end(&bench, vec![first, second]);
    });
}

/// Lanes end whether they sleep already or are still on their way there.
#[test]
fn lanes_that_were_never_called_end() {
    explore(3, || {
        let bench = Bench::new(2);
        let lanes = vec![Bench::lane(&bench, 0, |_| unreachable!()), Bench::lane(&bench, 1, |_| unreachable!())];
        end(&bench, lanes);
    });
}
