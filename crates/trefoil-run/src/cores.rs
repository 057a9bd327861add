//! Moving a lane's thread between the core sets of its units.
//!
//! Entering a unit ([`trefoil_units::enter_unit`]) asks the kernel several things and allocates. A lane does that once
//! per core set while it compiles, remembers the affinity it found itself with, and later only sets that: one system
//! call, and none at all between units on the same cores.

use trefoil_core::Unit;
use trefoil_units::{UnitError, UnitThread, enter_unit};

/// The cores a unit's thread is pinned to; empty if it is not pinned. Equal sets need no switch.
pub(crate) fn cores_of(unit: &Unit) -> Vec<u32> {
    let cores = trefoil_units::unit_cores(unit);
    if unit.simulated {
        Vec::new()
    } else if cores.is_empty() {
        unit.address.cores.clone()
    } else {
        cores
    }
}

/// A thread that has entered units and can move between their core sets, which are numbered.
#[derive(Default)]
pub(crate) struct CoreSwitch {
    /// Keeps denormals flushed; restores the thread when it goes.
    inside: Option<UnitThread>,
    current: Option<usize>,
    affinities: Vec<(usize, affinity::Set)>,
}

impl CoreSwitch {
    /// Enters `unit`, whose core set has this number, unless the thread is on that set already.
    pub(crate) fn enter(&mut self, core_set: usize, unit: &Unit) -> Result<(), UnitError> {
        if self.current == Some(core_set) {
            return Ok(());
        }
        // Leave first: a unit that pins nothing must not inherit another's cores.
        self.inside = None;
        self.current = None;
        self.inside = Some(enter_unit(unit)?);
        self.current = Some(core_set);
        if self.affinities.iter().all(|(known, _)| *known != core_set) {
            self.affinities.push((core_set, affinity::get()));
        }
        Ok(())
    }

    /// Moves to a core set that was entered before; whether it had to.
    pub(crate) fn switch(&mut self, core_set: usize) -> bool {
        if self.current == Some(core_set) {
            return false;
        }
        if let Some((_, set)) = self.affinities.iter().find(|(known, _)| *known == core_set) {
            affinity::set(set);
            self.current = Some(core_set);
        }
        true
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod affinity {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    /// `None` where the kernel would not tell.
    pub(super) type Set = Option<CpuSet>;

    pub(super) fn get() -> Set {
        sched_getaffinity(None).ok()
    }

    pub(super) fn set(set: &Set) {
        if let Some(set) = set {
            // Fails only when all of the set's cores went offline since it was entered; then any core is as good.
            let _ = sched_setaffinity(None, set);
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod affinity {
    pub(super) type Set = ();

    pub(super) fn get() -> Set {}

    pub(super) fn set(_set: &Set) {}
}
