//! The few atomics through which an executor's lanes and its caller meet.
//!
//! **Protocol.** The caller resets every lane's count of finished tasks, then raises `epoch`; each lane runs its
//! sequence once and lowers `remaining`; the last one wakes the caller. Within a run a lane publishes its count after
//! every task and waits, where its schedule says so, until other lanes' counts have reached stated numbers. Every lane
//! is idle while the caller resets, so no lane ever sees a count of another run.
//!
//! **Sleeping.** A lane that waits for another lane spins for a while. A lane that waits for the next run, and the caller
//! that waits for its end, **linger**: they look again and again but give their core away between looks, because a caller
//! that merely spins on a core that some lane or backend's worker is pinned to keeps that very thread from running. Waking a
//! sleeper takes 5 µs, and 80 where an idle virtual core must first be scheduled by its host. After that the waiter announces
//! that it parks, looks once more, and parks. A signaller stores, then looks whether the waiter announced. Both have a
//! sequentially consistent fence between their store and their load, so at least one sees the other (Dekker's argument) and no
//! wake-up is lost; a superfluous one is harmless since waiters check again. Between tasks, where no waiter sleeps, nothing
//! enters the kernel and nothing locks.
//!
//! **Failure.** `abort` is raised and everybody is woken; lanes stop before their next task. A failed task never advances its
//! lane's count, so nothing that depends on it starts.
//!
//! `tests/loom.rs` compiles this very file against loom's atomics and tries every interleaving of small runs.

use super::sync::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, Thread, current, fence, park,
    spin_loop, yield_now,
};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// What all threads of an executor share.
pub(crate) struct Signals {
    lanes: Box<[Lane]>,
    epoch: AtomicU64,
    remaining: AtomicUsize,
    stop: AtomicBool,
    abort: AtomicBool,
    caller: Sleeper,
    spin: Duration,
    linger: Duration,
}

/// A lane's public side, on cache lines of its own.
#[repr(align(128))]
struct Lane {
    finished: AtomicU32,
    sleeper: Sleeper,
}

/// Who sleeps, if anybody does.
struct Sleeper {
    parked: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

/// A mutex here only guards plain data that is valid at every step, so poisoning carries no meaning.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sleeper {
    fn new() -> Self {
        Self { parked: AtomicBool::new(false), thread: Mutex::new(None) }
    }

    /// Lingers, then sleeps until `ready`.
    fn linger_until(&self, linger: Duration, ready: impl Fn() -> bool) {
        if !linger.is_zero() {
            let began = Instant::now();
            while began.elapsed() < linger {
                for _ in 0..16 {
                    if ready() {
                        return;
                    }
                    spin_loop();
                }
                yield_now();
            }
        }
        self.sleep_until(ready);
    }

    /// Sleeps until `ready`.
    fn sleep_until(&self, ready: impl Fn() -> bool) {
        *lock(&self.thread) = Some(current());
        loop {
            self.parked.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ready() {
                break;
            }
            park();
        }
        self.parked.store(false, Ordering::Relaxed);
    }

    /// Wakes whoever announced to sleep. What it sleeps for has been stored, and a fence issued since.
    fn wake(&self) {
        if self.parked.load(Ordering::Relaxed)
            && let Some(thread) = lock(&self.thread).as_ref()
        {
            thread.unpark();
        }
    }
}

impl Signals {
    /// For so many lanes; for the times see [`crate::ExecutorOptions`].
    pub fn new(lanes: usize, spin: Duration, linger: Duration) -> Self {
        let lane = |_| Lane { finished: AtomicU32::new(0), sleeper: Sleeper::new() };
        Self {
            lanes: (0..lanes).map(lane).collect(),
            epoch: AtomicU64::new(0),
            remaining: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            abort: AtomicBool::new(false),
            caller: Sleeper::new(),
            spin,
            linger,
        }
    }

    /// Starts every lane once. Called by one thread at a time, while all lanes are idle. What the caller wrote before, every
    /// lane sees.
    pub fn launch(&self) {
        for lane in &self.lanes {
            lane.finished.store(0, Ordering::Relaxed);
        }
        self.abort.store(false, Ordering::Relaxed);
        self.remaining.store(self.lanes.len(), Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        self.lanes.iter().for_each(|lane| lane.sleeper.wake());
    }

    /// Waits until all lanes that were started are idle again; whether the run was aborted. What the lanes wrote, the caller
    /// sees.
    pub fn join(&self) -> bool {
        self.caller.linger_until(self.linger, || self.remaining.load(Ordering::Acquire) == 0);
        self.abort.load(Ordering::Relaxed)
    }

    /// Ends all lanes after what they are doing.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.lanes.iter().for_each(|lane| lane.sleeper.wake());
    }

    /// A lane's wait for the run after `seen`, whose number is returned; `None` when it is to end.
    pub fn next_run(&self, lane: usize, seen: u64) -> Option<u64> {
        let called = || self.epoch.load(Ordering::Acquire) != seen || self.stop.load(Ordering::Acquire);
        self.lanes[lane].sleeper.linger_until(self.linger, called);
        if self.stop.load(Ordering::Acquire) { None } else { Some(self.epoch.load(Ordering::Acquire)) }
    }

    /// A lane's wait until other lanes' counts have reached the numbers, or the run is aborted. Whether there was anything to
    /// wait for.
    pub fn wait_for(&self, lane: usize, waits: &[(usize, u32)]) -> bool {
        let ready = || waits.iter().all(|&(other, count)| self.lanes[other].finished.load(Ordering::Acquire) >= count);
        if ready() {
            return false;
        }
        let released = || ready() || self.abort.load(Ordering::Acquire);
        if !self.spin_until(released) {
            self.lanes[lane].sleeper.sleep_until(released);
        }
        true
    }

    /// Whether the run was aborted, so that a lane starts nothing more.
    pub fn aborted(&self) -> bool {
        self.abort.load(Ordering::Relaxed)
    }

    /// A lane has finished so many tasks; `wakes` are the lanes that may wait for the last of them.
    pub fn publish(&self, lane: usize, count: u32, wakes: &[usize]) {
        self.lanes[lane].finished.store(count, Ordering::Release);
        if !wakes.is_empty() {
            fence(Ordering::SeqCst);
            for &other in wakes {
                self.lanes[other].sleeper.wake();
            }
        }
    }

    /// Aborts the run.
    pub fn abort(&self) {
        self.abort.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.lanes.iter().for_each(|lane| lane.sleeper.wake());
    }

    /// A lane is idle again.
    pub fn finish_lane(&self) {
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            fence(Ordering::SeqCst);
            self.caller.wake();
        }
    }

    /// Spins for at most `self.spin` (a lane waiting for another lane); whether `ready` came true.
    fn spin_until(&self, ready: impl Fn() -> bool) -> bool {
        if ready() {
            return true;
        }
        if self.spin.is_zero() {
            return false;
        }
        let began = Instant::now();
        loop {
            for _ in 0..32 {
                if ready() {
                    return true;
                }
                spin_loop();
            }
            if began.elapsed() >= self.spin {
                return false;
            }
        }
    }
}
