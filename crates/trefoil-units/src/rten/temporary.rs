//! Stand-in until `crate::enter_unit` exists.
use crate::UnitError;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use trefoil_core::{Resource, Unit};
pub(super) fn allowed_cores() -> Vec<u32> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..1024u32).filter(|core| set.is_set(*core as usize)).collect()
}
pub(super) fn enter_unit(unit: &Unit) -> Result<(), UnitError> {
    let mut set = CpuSet::new();
    for resource in &unit.resources {
        if let Resource::Core(core) = resource { set.set(*core as usize); }
    }
    let _ = sched_setaffinity(None, &set);
    Ok(())
}
