//! Simulated units: their measurements come from a machine description, and every one says so.

use crate::ProfileError;
use crate::clock::now_utc;
use trefoil_core::{OperatorGraph, Profile, Unit};

/// Fills `profile` with what the description of `units` says about `graph`: costs, transfers, slowdowns, power, and the
/// described machine in place of this one. Declared watts of the user win over the description's.
pub(crate) fn fill(profile: &mut Profile, graph: &OperatorGraph, units: &[Unit]) -> Result<(), ProfileError> {
    let addresses: Vec<_> = units.iter().map(|unit| unit.address.clone()).collect();
    let simulated = trefoil_units::sim::simulated_profile(graph, &addresses, &now_utc())?;
    profile.machine = simulated.machine;
    for (name, watts) in simulated.declared_watts {
        profile.declared_watts.entry(name).or_insert(watts);
    }
    profile.notes.extend(simulated.notes);
    profile.measurements.extend(simulated.measurements);
    Ok(())
}
