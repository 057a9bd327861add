//! Executes a plan on real units, checks its results, and times it against single units.
//!
//! * [`Executor`] makes a [`trefoil_core::Plan`] ready (one thread per lane, segments compiled once, all buffers bound
//!   once) and runs it as often as wanted without allocating.
//! * [`verify()`] compares a run with a reference at every segment boundary and names the first operator that differs.
//! * [`Emulated`] runs a plan for a machine that is not here, on real units slowed to its rates.
//! * [`compare()`] times a plan and single units in fresh processes, interleaved; [`guard()`] decides from that which of
//!   them is used; [`time_lineup`] times in the same way what a prediction rests on.
//! * [`Session`] does the whole job in a few lines, for programs that use Trefoil as a library.
//! * [`together`] runs several models on one machine, in rounds or at fixed rates, and compares arrangements.

mod arena;
mod compare;
mod cores;
mod emulate;
mod error;
mod executor;
mod guard;
mod inputs;
mod lane;
mod lineup;
mod process;
mod schedule;
mod session;
mod setup;
mod signals;
mod source;
pub mod stats;
pub mod together;
mod verify;
mod worker;

/// What [`signals`] is built from; `tests/loom.rs` gives it loom's instead.
mod sync {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub(crate) use std::sync::{Mutex, MutexGuard};
    pub(crate) use std::thread::{Thread, current, park, yield_now};
}

use trefoil_core::{Unit, UnitAddress};
use trefoil_units::{Backend, UnitError};

pub use arena::{PAIRWISE_LIMIT, Placement};
pub use compare::{
    CompareOptions, CompareProgress, Comparison, Contender, ContenderResult, MORE_ROUNDS, Ratio, WorkerCommand,
    compare, compare_calibrated,
};
pub use emulate::{Emulated, Emulation, SlowdownOf};
pub use error::{Place, RunError};
pub use executor::{Executor, ExecutorOptions, FindUnit, MemoryReport, TaskTiming};
pub use guard::{GUARD_CONFIDENCE, Reason, Verdict, guard, undecided};
pub use inputs::match_inputs;
pub use lineup::time_lineup;
pub use schedule::{LaneSchedule, ModelPort, Schedule, ScheduledTask, Source, Value};
pub use session::{Session, SessionError, SessionOptions, serve_if_worker};
pub use source::{ExtractedSegments, OperatorSource, PreparedModelSource, PreparedSource, SegmentSource};
pub use verify::{BoundaryCheck, Difference, Reference, Verification, Verify, verify};
pub use worker::{RunJob, RunRequest, RunResult, RunSampling, WORKER_VERSION, run_worker_main, sample, serve};

/// Finds units through the registry of `trefoil-units`: what [`Executor::new`] is given outside tests.
///
/// # Errors
/// Those of [`trefoil_units::resolve`].
pub fn registry_units(address: &UnitAddress) -> Result<(&'static dyn Backend, Unit), UnitError> {
    let unit = trefoil_units::resolve(address)?;
    let backend = trefoil_units::backend(&address.backend).ok_or_else(|| UnitError::UnknownBackend {
        unit: address.to_string(),
        backend: address.backend.clone(),
        have: trefoil_units::backends().iter().map(|backend| backend.name()).collect::<Vec<_>>().join(", "),
    })?;
    Ok((backend, unit))
}
