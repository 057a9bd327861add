//! Cores of a device that is this machine's processor.
//!
//! Such a device computes in threads that the driver starts during the library's first call. They inherit name and cores of the thread
//! that makes it. So that call is made in a thread of its own, which is named [`THREADS`] and pinned where cores are asked for; later the
//! driver's threads are found by that name and moved (Linux). They belong to the process, not to a device object: as long as one engine
//! has them on some cores, nobody else moves them.

use super::OpenClError;
use rustix::thread::CpuSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Name of the thread that makes the first call, and so of the driver's threads. The system keeps 15 bytes.
const THREADS: &str = "trefoil-opencl";

/// The driver's threads stay on these cores as long as this lives.
#[derive(Debug)]
pub(super) struct Lease {
    cores: Vec<usize>,
}

impl Lease {
    /// The cores.
    pub(super) fn cores(&self) -> &[usize] {
        &self.cores
    }
}

/// What this process did with the library so far.
#[derive(Default)]
struct State {
    /// Cores of the first call, once it was made, ascending; none for all of them.
    first: Option<Vec<usize>>,
    holder: Weak<Lease>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Calls the library; the first call of the process is made in a thread of its own, on `cores`.
pub(super) fn call<R: Send>(
    cores: Option<&[usize]>,
    call: impl FnOnce() -> Result<R, OpenClError> + Send,
) -> Result<R, OpenClError> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let state = state.get_or_insert_default();
    if state.first.is_some() {
        return call();
    }
    let set = cores.map(set_of).transpose()?;
    let all = || cores.map(<[usize]>::to_vec).unwrap_or_default();
    let refused = |reason: String| OpenClError::Cores { cores: all(), reason };
    let result = std::thread::scope(|scope| {
        let starter = std::thread::Builder::new().name(THREADS.to_string()).spawn_scoped(scope, move || {
            if let Some(set) = &set {
                rustix::thread::sched_setaffinity(None, set).map_err(|error| error.to_string())?;
            }
            Ok::<_, String>(call())
        });
        let starter = starter.map_err(|error| refused(format!("a thread cannot be started ({error})")))?;
        starter.join().map_err(|_| refused("the thread that starts the library panicked".to_string()))
    })?;
    let devices = result.map_err(refused)??;
    let mut first = all();
    first.sort_unstable();
    state.first = Some(first);
    Ok(devices)
}

/// Moves the driver's threads to `cores` and keeps them there. `movable` says that the driver is known to start all of them in the first
/// call.
///
/// # Errors
/// Cores that another lease of this process excludes, cores that do not exist, threads that cannot be found.
pub(super) fn lease(cores: &[usize], movable: bool) -> Result<Arc<Lease>, OpenClError> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let state = state.get_or_insert_default();
    let mut cores = cores.to_vec();
    cores.sort_unstable();
    let refused = |reason: String| OpenClError::Cores { cores: cores.clone(), reason };
    if let Some(holder) = state.holder.upgrade() {
        if holder.cores == cores {
            return Ok(holder);
        }
        return Err(refused(format!(
            "another engine of this process has the driver's threads on cores {:?}; give each a process of its own (--processes)",
            holder.cores
        )));
    }
    let set = set_of(&cores)?;
    let started_there = state.first.as_ref() == Some(&cores);
    if movable {
        move_threads(&set).map_err(refused)?;
    } else if !started_there {
        return Err(refused(
            "this driver's threads cannot be told apart, so only the process's first call places them; use a process of its own (--processes)"
                .to_string(),
        ));
    }
    let lease = Arc::new(Lease { cores });
    state.holder = Arc::downgrade(&lease);
    Ok(lease)
}

fn set_of(cores: &[usize]) -> Result<CpuSet, OpenClError> {
    let refused = |reason: String| OpenClError::Cores { cores: cores.to_vec(), reason };
    if cores.is_empty() {
        return Err(refused("at least one core is needed".to_string()));
    }
    let mut set = CpuSet::new();
    for &core in cores {
        if core >= CpuSet::MAX_CPU {
            return Err(refused(format!("core {core} is above {}", CpuSet::MAX_CPU - 1)));
        }
        set.set(core);
    }
    Ok(set)
}

/// Gives every thread of the driver the cores of `set`.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn move_threads(set: &CpuSet) -> Result<(), String> {
    let threads = driver_threads()?;
    if threads.is_empty() {
        return Err("no thread of the driver was found to be moved there".to_string());
    }
    for thread in threads {
        rustix::thread::sched_setaffinity(Some(thread), set)
            .map_err(|error| format!("the driver's thread {} cannot run there ({error})", thread.as_raw_nonzero()))?;
    }
    Ok(())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn move_threads(_: &CpuSet) -> Result<(), String> {
    Err("threads can be moved on Linux only".to_string())
}

/// Threads of this process that were started by the first call.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn driver_threads() -> Result<Vec<rustix::thread::Pid>, String> {
    let listing = |error: std::io::Error| format!("the threads of this process cannot be listed ({error})");
    let mut threads = Vec::new();
    for entry in std::fs::read_dir("/proc/self/task").map_err(listing)? {
        let path = entry.map_err(listing)?.path();
        // A thread may end while they are listed.
        let is_driver = std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim_end() == THREADS);
        let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        if let (true, Some(thread)) = (is_driver, number.and_then(rustix::thread::Pid::from_raw)) {
            threads.push(thread);
        }
    }
    Ok(threads)
}
