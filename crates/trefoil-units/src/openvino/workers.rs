//! Keeping OpenVINO's worker threads on the cores of the units that use them.
//!
//! OpenVINO's CPU plugin computes with threads of oneTBB, which are created on demand, are shared by all compiled models
//! of the process, and inherit the cores of whichever thread happened to create them: a model compiled on one pinned core
//! would leave workers there that a two-core unit later needs elsewhere. The C interface has no handle on them. So Trefoil
//! gives the calling thread a marker name while it is inside OpenVINO (new threads inherit the name), finds the workers by
//! it, and gives each a core of its own, in turn, among the union of the core sets of the multi-core units in use, all but
//! the first: that one is left to the calling thread, which computes as well. Free to move, a worker is at times woken on
//! the core that the caller is busy on, and small operators then take half as long again until the kernel parts the two.
//! Single-core units compute in the calling thread and need none of this.

use crate::affinity;
use std::sync::{Mutex, PoisonError};

/// Core sets of the multi-core compiled models that exist now, one entry per model.
static IN_USE: Mutex<Vec<Vec<u32>>> = Mutex::new(Vec::new());

/// Executions of a compiled model after which the workers are looked for again: they appear on demand.
const WATCHED_RUNS: u32 = 3;

/// The claim of one compiled model on the worker threads.
#[derive(Debug)]
pub(super) struct Workers {
    cores: Vec<u32>,
    runs: u32,
}

impl Workers {
    /// Registers a multi-core unit and moves the existing workers.
    pub(super) fn claim(cores: &[u32]) -> Self {
        if cores.len() > 1 {
            lock().push(cores.to_vec());
            pin_workers();
        }
        Self { cores: cores.to_vec(), runs: 0 }
    }

    /// Moves the workers that compiling has created.
    pub(super) fn settle(&self) {
        if self.cores.len() > 1 {
            pin_workers();
        }
    }

    /// Runs `call`, moving the workers that it creates if this is one of the first executions.
    pub(super) fn watch<T>(&mut self, call: impl FnOnce() -> T) -> T {
        if self.cores.len() < 2 || self.runs >= WATCHED_RUNS {
            return call();
        }
        self.runs += 1;
        let result = marked(call);
        pin_workers();
        result
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.cores.len() > 1 {
            let mut in_use = lock();
            if let Some(position) = in_use.iter().position(|cores| *cores == self.cores) {
                in_use.swap_remove(position);
            }
        }
    }
}

fn lock() -> std::sync::MutexGuard<'static, Vec<Vec<u32>>> {
    IN_USE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pin_workers() {
    let mut cores: Vec<u32> = lock().iter().flatten().copied().collect();
    cores.sort_unstable();
    cores.dedup();
    for (thread, core) in worker_threads().into_iter().zip(worker_cores(&cores).cycle()) {
        affinity::pin_thread(thread, &[core]);
    }
}

/// Cores for workers, in turn: all but the first, which is the calling thread's, unless there is no other.
fn worker_cores(cores: &[u32]) -> impl Iterator<Item = u32> + Clone {
    let first = usize::from(cores.len() > 1);
    cores[first..].iter().copied()
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod marker {
    use std::ffi::CStr;
    use std::fs;

    /// At most 15 bytes.
    const MARKER: &CStr = c"trefoil-ov-work";

    /// Runs `call` under the marker name, which threads created meanwhile keep.
    pub(in crate::openvino) fn marked<T>(call: impl FnOnce() -> T) -> T {
        let before = rustix::thread::name();
        let renamed = before.is_ok() && rustix::thread::set_name(MARKER).is_ok();
        let result = call();
        if let (true, Ok(name)) = (renamed, before) {
            let _ = rustix::thread::set_name(&name);
        }
        result
    }

    /// Ids of the threads that carry the marker name now.
    pub(in crate::openvino) fn worker_threads() -> Vec<i32> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            let named = fs::read(entry.path().join("comm")).is_ok_and(|name| name.trim_ascii() == MARKER.to_bytes());
            if let (true, Some(id)) = (named, entry.file_name().to_str().and_then(|id| id.parse().ok())) {
                found.push(id);
            }
        }
        found
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod marker {
    pub(in crate::openvino) fn marked<T>(call: impl FnOnce() -> T) -> T {
        call()
    }

    pub(in crate::openvino) fn worker_threads() -> Vec<i32> {
        Vec::new()
    }
}

pub(super) use marker::{marked, worker_threads};

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_made_under_the_marker_is_found_and_others_are_not() {
        let (stop, stopped) = mpsc::channel::<()>();
        let before = worker_threads().len();
        let thread = marked(|| {
            std::thread::Builder::new().spawn(move || {
                let _ = stopped.recv();
            })
        })
        .unwrap();
        // The marker thread itself has its own name back.
        assert_eq!(worker_threads().len(), before + 1);
        stop.send(()).unwrap();
        thread.join().unwrap();
    }
}
