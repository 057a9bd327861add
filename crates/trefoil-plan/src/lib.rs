//! Pure planners: a [`Profile`](trefoil_core::Profile) in, a [`Plan`] out. No I/O, no hardware, no clocks; equal requests give equal plans.
//!
//! * [`plan`] runs a planner by name ([`METHODS`]): BIDENT's `sequential` and `phases`, literally; our `interval` search with
//!   segment costs, `phases-exclusive`, the parallel `dag` and the `pipeline` of a stream; `single:UNIT`; and `auto`, which falls
//!   back to the best single unit when mixing gains too little.
//! * [`plan_several`] plans several models at once ([`SEVERAL_METHODS`]): [`concurrent()`]; BIDENT's `aligned` and `joint`
//!   ([`plan_pair`]), literally, and `joint-units` beside them; [`pair_cap()`] bounds what any overlap could give.
//! * [`together`] puts whole models side by side from whole-model measurements, and gives the arrangements to beat.
//! * [`pareto_plans`] gives the front of latency, energy and memory.
//! * [`stream`] plans pipelines of items over blocks: HeteroVDiff's one cut, literally, and its generalisation.
//! * [`dag::solve`] schedules any [`Problem`]; [`model_bound`] says how good a schedule can be at best.
//! * [`import`] prices a split made by hand.
//! * [`simulate()`] is the one simulator that scores every plan.
//! * [`unmeasured_segments`] and [`estimate_audit`] serve the refinement loop of DESIGN 3: plan, measure what the plan
//!   assumes, append to the profile, plan again. Equal profiles give equal plans and each round adds a measurement of a
//!   segment that had none, so the loop ends; it ends at the first plan whose segments are all measured.
//! * [`explain()`] says why an operator is where it is; [`what_if()`] replays and plans anew on a changed machine; [`ports`] says
//!   what porting an operator would gain; [`diff()`] compares plans.
//! * [`certificate()`] writes what `trefoil-check` verifies. [`generate`] and [`contest`] serve measuring the planners themselves.
//!
//! Every cost that a plan states carries the ids of the measurements it was made from.

mod aligned;
mod assemble;
mod audit;
mod bounds;
mod certificate;
mod chain_bound;
mod checkpoint;
pub mod concurrent;
pub mod contest;
mod cuts;
pub mod dag;
mod diff;
mod engine;
pub mod error;
mod estimate;
pub mod explain;
mod factors;
pub mod generate;
mod interval;
mod joint;
mod joint_units;
mod judge;
pub mod list_scheduling;
mod memory;
pub mod mincut;
mod order;
mod pair;
mod pair_cap;
pub mod pareto;
pub mod phases;
mod port;
pub mod problem;
mod quality;
mod request;
mod sequential;
mod several;
pub mod simulate;
pub mod stream;
#[doc(hidden)]
pub mod testing;
mod throughput;
pub mod together;
mod view;
mod what_if;
mod whole;

pub use aligned::{AlignedCosts, aligned_dp};
pub use audit::{EstimateCheck, estimate_audit, unmeasured_segments};
pub use bounds::{Bound, BoundKind, model_bound, thorough_bound};
pub use certificate::{CERTIFICATE_FORMAT, CERTIFICATE_VERSION, Certificate, certificate};
pub use concurrent::{Application, ConcurrentRequest, Stage, StageLink, concurrent, concurrent_problem};
pub use diff::{Move, PlanDiff, PlanSummary, diff};
pub use error::PlanError;
pub use explain::{Alternative, Explanation, explain};
pub use factors::Factors;
pub use joint::{PairCosts, PairStep, joint_dp};
pub use joint_units::{MOST_PAIR_UNITS, PairOperators, PairRules, class_index, joint_units_dp};
pub use pair::{PAIR_METHODS, best_single, pair_cap_of, plan_pair};
pub use pair_cap::{CapCosts, PairCap, pair_cap};
pub use pareto::{PlanFront, pareto_plans};
pub use port::{Basis, Port, ports};
pub use problem::{Problem, Schedule};
pub use request::{Budget, Clock, Pin, PlanOptions, PlanRequest};
pub use sequential::sequential_dp;
pub use several::{SEVERAL_METHODS, plan_several};
pub use simulate::{Simulation, SimulationModel, simulate};
pub use together::{SharedModel, TogetherRequest};
pub use what_if::{Replay, WhatIf, what_if};
pub use whole::{Baseline, baselines, import};

use bounds::Effort;
use quality::{goal_of, state_quality};
use trefoil_core::{Objective, OwnClaim, Plan, Unit, UnitAddress};
use view::CostView;

/// A planner's name and what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MethodInfo {
    /// Name as given to [`plan`]; `single:UNIT` stands for one name per unit.
    pub name: &'static str,
    /// One line.
    pub summary: &'static str,
}

/// The planners that [`plan`] knows.
pub const METHODS: &[MethodInfo] = &[
    MethodInfo { name: "auto", summary: "interval, or the best single unit when mixing gains less than the noise" },
    MethodInfo {
        name: "interval",
        summary: "shortest path over segments with measured or estimated whole costs, every crossing tensor paid",
    },
    MethodInfo {
        name: "dag",
        summary: "operators in parallel on exclusive units, contention and order decided together; never worse than the others",
    },
    MethodInfo {
        name: "concurrent",
        summary: "several models at once, fused or not, with arrivals, deadlines and weights; for throughput rounds of them; one inference of one model as dag plans it",
    },
    MethodInfo {
        name: "phases",
        summary: "BIDENT 3.3.2 literally: branches between forks and joins, mapped one by one, slowed afterwards",
    },
    MethodInfo {
        name: "phases-exclusive",
        summary: "phases corrected: exclusive units, every crossing paid, each phase scheduled jointly",
    },
    MethodInfo { name: "sequential", summary: "BIDENT 3.3.1 literally: shortest path over isolated operator costs" },
    MethodInfo {
        name: "pipeline",
        summary: "a stream of items through segments on several units, for the shortest period (throughput)",
    },
    MethodInfo { name: "single:UNIT", summary: "everything on one unit" },
];

/// Plans with default options.
///
/// # Errors
/// See [`PlanError`].
pub fn plan(method: &str, request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    plan_with(method, request, &PlanOptions::default())
}

/// Plans with the method named, one of [`METHODS`].
///
/// # Errors
/// [`PlanError::UnknownMethod`], or whatever is wrong with the request.
pub fn plan_with(method: &str, request: &PlanRequest<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let single = method.strip_prefix("single:");
    if !METHODS.iter().any(|known| known.name == method && !known.name.contains(':')) && single.is_none() {
        return Err(PlanError::UnknownMethod {
            want: method.to_owned(),
            have: METHODS.iter().map(|method| method.name).collect::<Vec<_>>().join(", "),
        });
    }
    let streams = matches!(method, "pipeline") || method == "auto" && request.objective == Objective::Throughput;
    if request.objective == Objective::Throughput && !streams || request.objective == Objective::Energy && streams {
        let objective = format!("{:?}", request.objective).to_lowercase();
        return Err(PlanError::Objective { method: method.to_owned(), objective });
    }
    if let Some(unit) = single {
        return single_unit(unit, request);
    }
    // A mode asked for by name runs the whole model, which is all that is known of it.
    if let ("auto", [only]) = (method, request.units.as_slice())
        && !streams
        && whole::mode_at(request.profile, only).is_some()
    {
        return single_unit(&only.to_string(), request);
    }
    let view = CostView::new(request)?;
    // Before planning, so that it counts as part of a time budget.
    let bound = judge::bound_of_all_within(&view, Effort::within(options))?;
    let mut plan = if streams { throughput::pipeline(&view, options)? } else { make(method, &view, options)? };
    judge::check_memory(&plan, &[view.graph])?;
    // The bound is over plans on the units. A mode is chosen where it beats these, and none of the modes is faster.
    let on_units = plan.units.iter().all(|unit| view.unit_index(&unit.address).is_some());
    let bound = if on_units { bound } else { bound.min(plan.claimed) };
    judge::judge(&mut plan, &[&view], goal_of(view.objective), bound)?;
    Ok(plan)
}

/// Everything on one unit. Only this unit's costs are needed: whatever else the profile lacks does not matter, but then the
/// bound is over plans on this unit alone.
fn single_unit(unit: &str, request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    let unit: UnitAddress = unit.parse().map_err(PlanError::Core)?;
    if let Some(mode) = whole::mode_at(request.profile, &unit) {
        return on_mode(mode, request);
    }
    let only = PlanRequest { units: vec![unit.clone()], ..request.clone() };
    let view = CostView::new(&only)?;
    let mut plan = whole::single(&view, 0)?;
    let bound = match CostView::new(request).and_then(|all| judge::bound_of_all(&all)) {
        Ok(bound) => bound,
        Err(error) => {
            plan.notes.push(format!("the bound is over plans on {unit} alone: {error}"));
            judge::bound_of_all(&view)?
        }
    };
    judge::judge(&mut plan, &[&view], goal_of(view.objective), bound)?;
    Ok(plan)
}

/// The whole model on a mode of a unit; the bound is over plans on the units and the whole model on any mode.
fn on_mode(mode: &Unit, request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    let mut plan = whole::on_mode(request, mode)?;
    let units: Vec<UnitAddress> =
        request.units.iter().filter(|unit| whole::mode_at(request.profile, unit).is_none()).cloned().collect();
    let others = PlanRequest { units, pins: Vec::new(), ..request.clone() };
    let bound = CostView::new(&others).and_then(|all| judge::bound_of_all(&all));
    plan.own = Some(OwnClaim {
        value: plan.claimed,
        over: format!("the whole model on {}", mode.address),
        bound: Some(plan.claimed),
        gap: Some(0.0),
        exact: true,
    });
    // Of the modes' energies nothing is known but this one's.
    let modes = if request.objective == Objective::Energy { plan.claimed } else { whole::least_on_modes(request) };
    let bound = bound.unwrap_or_else(|error| {
        plan.notes.push(format!("no bound over plans on the other units: {error}"));
        0.0
    });
    judge::state(&mut plan, bound.min(modes));
    Ok(plan)
}

/// Runs a planner; bound, gap and `exact` are the planner's own.
fn make(method: &str, view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    match method {
        "sequential" => sequential::sequential(view),
        "interval" => interval::interval(view, options),
        "dag" => dag::dag(view, options),
        // One inference of one model is what `dag` plans.
        "concurrent" => {
            let mut plan = dag::dag(view, options)?;
            "concurrent".clone_into(&mut plan.method);
            Ok(plan)
        }
        "phases" => phases::phases(view),
        "phases-exclusive" => phases::phases_exclusive(view, options),
        _ => auto(view, options),
    }
}

/// `interval`, unless it gains no more than the noise over the best single unit.
fn auto(view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let single = whole::best_single(view);
    let alone = if options.modes { whole::best_mode(view, single) } else { single };
    let mixed = interval::interval(view, options);
    let (mut alone, mixed) = match (alone, mixed) {
        (None, mixed) => return mixed,
        (Some(alone), Err(_)) => return Ok(alone),
        (Some(alone), Ok(mixed)) => (alone, mixed),
    };
    if mixed.claimed < alone.claimed * (1.0 - options.minimum_gain) {
        return Ok(mixed);
    }
    // Both are plans of one segment after another: what is proven of one holds for the other. (A mode of a unit has no
    // segments to be bounded by.)
    let bounds = [mixed.model_bound, alone.model_bound];
    if let Some(bound) = bounds.into_iter().flatten().reduce(f64::max) {
        assemble::set_bound(&mut alone, bound);
    }
    if mixed.segments.len() > 1 {
        let gain = if alone.claimed > 0.0 { 100.0 * (1.0 - mixed.claimed / alone.claimed) } else { 0.0 };
        alone.notes.push(if gain < 0.0 {
            format!("the best mixed plan claims {:.1}% more: one unit is best here", -gain)
        } else {
            let noise = 100.0 * options.minimum_gain;
            format!("the best mixed plan claims {gain:.1}% less, not above the {noise:.1}% that could be noise: one unit is best here")
        });
        alone.notes.extend(audit::audit_note(view));
    }
    Ok(alone)
}
