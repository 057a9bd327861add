//! Thread pools of rten units, one per set of cores.

use crate::{UnitError, enter_unit, unit_cores};
use rten::ThreadPool;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use trefoil_core::Unit;

/// Pools in use, by core set. Weak, so that a pool's threads end with the last compiled sub-model that uses it.
static POOLS: Mutex<BTreeMap<Vec<u32>, Weak<ThreadPool>>> = Mutex::new(BTreeMap::new());

/// The pool of `unit`: one thread per core, all of them pinned to the unit's cores and flushing denormals.
///
/// Two units with the same cores share a pool, as they share the cores.
///
/// # Errors
/// [`UnitError::Run`] when no thread can be started, or what entering the unit reports.
pub(super) fn pool_of(unit: &Unit) -> Result<Arc<ThreadPool>, UnitError> {
    let cores = unit_cores(unit);
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    pools.retain(|_, pool| pool.strong_count() > 0);
    if let Some(pool) = pools.get(&cores).and_then(Weak::upgrade) {
        return Ok(pool);
    }
    // A new thread inherits affinity and floating-point environment from its creator (pthread_create(3)). So the pool
    // is made on a thread that has entered the unit, which leaves the caller's own state alone.
    let threads = cores.len().max(1);
    let pool = std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("rten-pool".to_owned())
            .spawn_scoped(scope, || enter_unit(unit).map(|_inside| ThreadPool::with_num_threads(threads)))
            .map_err(|error| UnitError::Run {
                unit: unit.address.to_string(),
                model: "its thread pool".to_owned(),
                reason: format!("cannot start a thread: {error}"),
            })?
            .join()
            .unwrap_or_else(|_| {
                Err(UnitError::Run {
                    unit: unit.address.to_string(),
                    model: "its thread pool".to_owned(),
                    reason: "the thread that makes it panicked".to_owned(),
                })
            })
    })?;
    let pool = Arc::new(pool);
    pools.insert(cores, Arc::downgrade(&pool));
    Ok(pool)
}
