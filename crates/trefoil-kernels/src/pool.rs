//! Worker threads on an explicit set of cores.
//!
//! A call hands each worker one part of the work and waits. How work is cut into parts never changes a result: a part is
//! a range of rows, and no value depends on another row. Handing over costs two wake-ups and no allocation.

use crate::KernelError;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Most workers of a pool.
pub const MAX_WORKERS: usize = 64;

/// Part `index` of a call whose closure and parts lie in the caller's frame.
type Call = unsafe fn(*const (), index: usize);

#[derive(Clone, Copy)]
struct Job {
    call: Call,
    context: *const (),
    parts: usize,
}

// SAFETY: `context` points to a `Context` whose fields may be used from other threads (`Work: Sync`, `Part: Send`), and
// `Pool::run` does not return before every worker is done with it.
unsafe impl Send for Job {}

#[derive(Default)]
struct State {
    /// Counts jobs, so that a worker knows a new one.
    epoch: u64,
    job: Option<Job>,
    /// Workers that have not finished the job.
    busy: usize,
    panic: Option<Box<dyn Any + Send>>,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    started: Condvar,
    finished: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The lock is never held while foreign code runs, so a poisoned state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Threads that run the parts of a kernel call.
pub struct Pool {
    cores: Vec<usize>,
    shared: Arc<Shared>,
    /// Held during a call: one at a time.
    turn: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").field("cores", &self.cores).finish_non_exhaustive()
    }
}

impl Pool {
    /// Runs everything in the calling thread, on whatever core that is.
    pub fn on_caller() -> Pool {
        Pool { cores: Vec::new(), shared: Arc::default(), turn: Mutex::new(()), workers: Vec::new() }
    }

    /// One worker pinned to each of `cores` (numbers as the system counts them).
    ///
    /// # Errors
    /// An empty set, a core twice, more than `MAX_WORKERS`, or a core that this process may not use.
    pub fn pinned(cores: &[usize]) -> Result<Pool, KernelError> {
        let refuse = |reason: String| Err(KernelError::Cores { cores: cores.to_vec(), reason });
        if cores.is_empty() {
            return refuse("the set is empty; name at least one core".to_string());
        }
        if cores.len() > MAX_WORKERS {
            return refuse(format!("at most {MAX_WORKERS} cores are supported"));
        }
        if let Some(core) = cores.iter().enumerate().find_map(|(at, core)| cores[..at].contains(core).then_some(core)) {
            return refuse(format!("core {core} is named twice"));
        }
        let mut pool = Pool::on_caller();
        pool.cores = cores.to_vec();
        for (index, &core) in cores.iter().enumerate() {
            let shared = Arc::clone(&pool.shared);
            let (report, pinned) = std::sync::mpsc::channel();
            let worker = std::thread::Builder::new()
                .name(format!("kernels-{core}"))
                .spawn(move || {
                    let result = pin(core);
                    let is_pinned = result.is_ok();
                    // The receiver waits for exactly this message.
                    let _ = report.send(result);
                    if is_pinned {
                        work(&shared, index);
                    }
                })
                .map_err(|source| KernelError::Worker { action: "start", core, source })?;
            pool.workers.push(worker);
            match pinned.recv() {
                Ok(Ok(())) => {}
                Ok(Err(source)) => return Err(KernelError::Worker { action: "pin", core, source }),
                Err(_) => {
                    let source = std::io::Error::other("the thread ended before it reported");
                    return Err(KernelError::Worker { action: "start", core, source });
                }
            }
        }
        Ok(pool)
    }

    /// Parts that run at once; at least 1.
    pub fn threads(&self) -> usize {
        self.workers.len().max(1)
    }

    /// Cores of the workers; empty for [`Pool::on_caller`].
    pub fn cores(&self) -> &[usize] {
        &self.cores
    }

    /// Runs `work` on every part, each in its own worker, and waits. At most [`Pool::threads`] parts.
    ///
    /// # Panics
    /// Where there are too many parts, and with the panic of a part once all parts have ended.
    pub(crate) fn run<Part: Send, Work: Fn(&mut Part) + Sync>(&self, parts: &mut [Part], work: Work) {
        struct Context<'a, Part, Work> {
            work: &'a Work,
            first: *mut Part,
        }
        /// # Safety
        /// `context` is a live `Context<Part, Work>`, `index` is one of its parts and no other call uses that part.
        unsafe fn call<Part, Work: Fn(&mut Part)>(context: *const (), index: usize) {
            // SAFETY: the caller's promise.
            let context = unsafe { &*context.cast::<Context<'_, Part, Work>>() };
            // SAFETY: the caller's promise: in bounds, and nobody else's.
            let part = unsafe { &mut *context.first.add(index) };
            (context.work)(part);
        }

        assert!(parts.len() <= self.threads(), "{} parts for {} threads", parts.len(), self.threads());
        if self.workers.is_empty() {
            parts.iter_mut().for_each(work);
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let context = Context { work: &work, first: parts.as_mut_ptr() };
        let panic = {
            let mut state = self.shared.lock();
            state.epoch += 1;
            state.busy = self.workers.len();
            state.job =
                Some(Job { call: call::<Part, Work>, context: (&raw const context).cast(), parts: parts.len() });
            self.shared.started.notify_all();
            // Every worker reports, also one without a part, before `context` and `parts` can go out of scope.
            while state.busy > 0 {
                state = self.shared.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.job = None;
            state.panic.take()
        };
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.started.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its parts, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

/// A worker's life.
fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        let job = {
            let mut state = shared.lock();
            while state.epoch == seen && !state.stop {
                state = shared.started.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.stop {
                return;
            }
            seen = state.epoch;
            state.job
        };
        let outcome = match job {
            Some(job) if index < job.parts => {
                // SAFETY: `Pool::run` waits for this worker, so the context lives; each worker has its own index.
                catch_unwind(AssertUnwindSafe(|| unsafe { (job.call)(job.context, index) }))
            }
            _ => Ok(()),
        };
        let mut state = shared.lock();
        if let Err(panic) = outcome {
            state.panic.get_or_insert(panic);
        }
        state.busy -= 1;
        if state.busy == 0 {
            shared.finished.notify_all();
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn pin(core: usize) -> std::io::Result<()> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if core >= CpuSet::MAX_CPU {
        return Err(std::io::Error::other(format!("cores are numbered below {}", CpuSet::MAX_CPU)));
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set)?;
    Ok(())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn pin(_core: usize) -> std::io::Result<()> {
    Err(std::io::Error::other("this system has no thread affinity; use a pool on the caller"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Option<Pool> {
        match Pool::pinned(&[0, 1]) {
            Ok(pool) => Some(pool),
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    #[test]
    fn every_part_runs_once_in_its_own_thread() {
        let Some(pool) = two() else { return };
        for round in 0..200usize {
            let mut parts = [(round, None), (round + 1, None)];
            pool.run(&mut parts, |part| *part = (part.0 * 2, Some(std::thread::current().id())));
            assert_eq!((parts[0].0, parts[1].0), (round * 2, round * 2 + 2));
            assert_ne!(parts[0].1, parts[1].1);
        }
        let mut one = [5];
        pool.run(&mut one, |part| *part += 1);
        assert_eq!(one, [6]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let Some(pool) = two() else { return };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&mut [1, 2], |part| assert!(*part != 2, "part two"));
        }));
        assert!(outcome.is_err());
        let mut parts = [1, 2];
        pool.run(&mut parts, |part| *part += 1);
        assert_eq!(parts, [2, 3]);
    }

    #[test]
    fn bad_core_sets_are_refused() {
        assert_eq!(
            Pool::pinned(&[]).unwrap_err().to_string(),
            "cannot use cores []: the set is empty; name at least one core"
        );
        assert_eq!(Pool::pinned(&[0, 0]).unwrap_err().to_string(), "cannot use cores [0, 0]: core 0 is named twice");
        let error = Pool::pinned(&[1000]).unwrap_err().to_string();
        assert!(error.starts_with("cannot pin a worker thread on core 1000: "), "{error}");
        assert!(Pool::pinned(&[usize::MAX]).is_err());
    }

    #[test]
    fn the_caller_s_pool_has_one_thread() {
        let pool = Pool::on_caller();
        let mut parts = [1];
        pool.run(&mut parts, |part| *part += 1);
        assert_eq!((parts, pool.threads()), ([2], 1));
    }
}
