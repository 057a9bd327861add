//! What a plan of one model is compared with: BIDENT's, the fastest, and single units on all cores.

use crate::pipeline::{SEQUENTIAL, Settings, run_options};
use trefoil_core::{Objective, OperatorGraph, Origin, Plan, Profile, Subject, Unit, UnitAddress, UnitKind};
use trefoil_plan::PlanRequest;

/// BIDENT's literal plan, for comparison; absent where it cannot be made (a plan from a file, no isolated costs).
pub fn sequential_plan(settings: &Settings, profile: &Profile, graph: &OperatorGraph, plan: &Plan) -> Option<Plan> {
    if settings.plan.is_some() || plan.method == SEQUENTIAL {
        return None;
    }
    let request = PlanRequest {
        profile,
        graph,
        units: settings.units.clone(),
        objective: settings.planning.objective().into(),
        pins: settings.planning.pins.clone(),
    };
    trefoil_plan::plan(SEQUENTIAL, &request).ok()
}

/// The plan with the shortest time, where energy was asked for; absent where it is the same.
pub fn fastest_plan(settings: &Settings, profile: &Profile, graph: &OperatorGraph, plan: &Plan) -> Option<Plan> {
    let request = PlanRequest {
        profile,
        graph,
        units: settings.units.clone(),
        objective: Objective::Latency,
        pins: settings.planning.pins.clone(),
    };
    let fastest = trefoil_plan::plan_with("auto", &request, &run_options(&settings.planning)).ok()?;
    (!same_placement(&fastest, plan)).then_some(fastest)
}

/// Whether both cut the model alike and put the same on each unit.
pub fn same_placement(one: &Plan, other: &Plan) -> bool {
    one.segments.len() == other.segments.len()
        && one.segments.iter().zip(&other.segments).all(|(a, b)| a.unit == b.unit && a.operators == b.operators)
}

/// A mode whose whole-model time is longer than the best one's by this factor is not timed again in fresh processes.
const HOPELESS: f64 = 1.2;

/// The units to beat: every unit asked for, each CPU backend among them with all the cores this process may use, and
/// those of their modes (one core) that measured about as fast as the best or that the plan uses.
pub fn baseline_units(profile: &Profile, graph: &OperatorGraph, plan: &Plan) -> Vec<Unit> {
    let units = &profile.units;
    let mut found: Vec<Unit> = Vec::new();
    for unit in units.iter().filter(|unit| !unit.simulated) {
        if !found.iter().any(|seen| seen.address == unit.address) {
            found.push(unit.clone());
        }
    }
    for unit in
        units.iter().filter(|unit| !unit.simulated && unit.kind == UnitKind::Cpu && !unit.address.cores.is_empty())
    {
        let address = UnitAddress { cores: Vec::new(), ..unit.address.clone() };
        if found.iter().any(|seen| seen.address == address) {
            continue;
        }
        if let Ok(all_cores) = trefoil_units::resolve(&address) {
            if found.iter().any(|seen| seen.address.backend == address.backend && seen.resources == all_cores.resources)
            {
                continue;
            }
            found.push(all_cores);
        }
    }
    let index = profile.index();
    let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
    let whole_ms = |unit: &Unit| index.newest(&subject, std::slice::from_ref(&unit.address))?.total().map(|t| t.median);
    let best = profile.units.iter().chain(&profile.modes).filter_map(whole_ms).fold(f64::INFINITY, f64::min);
    for mode in &profile.modes {
        let close = whole_ms(mode).is_some_and(|ms| ms <= best * HOPELESS);
        let used = plan.units_used().contains(&mode.address);
        if (close || used) && !found.iter().any(|seen| seen.address == mode.address) {
            found.push(mode.clone());
        }
    }
    found
}

/// The whole model on one unit, whether or not it is a unit of the profile. Its prediction is the whole-model measurement.
pub fn single_plan(profile: &Profile, graph: &OperatorGraph, unit: &Unit) -> Plan {
    let request = PlanRequest {
        profile,
        graph,
        units: vec![unit.address.clone()],
        objective: Objective::Latency,
        pins: Vec::new(),
    };
    if let Ok(plan) = trefoil_plan::plan(&format!("single:{}", unit.address), &request) {
        return plan;
    }
    let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
    let predicted = profile
        .index()
        .newest(&subject, std::slice::from_ref(&unit.address))
        .and_then(trefoil_core::cost::measurement_cost);
    let (ms, ids) = predicted.map_or((0.0, Vec::new()), |cost| (cost.ms, cost.ids));
    Plan::whole(graph, unit, ms, ids, Origin::Measured)
}
