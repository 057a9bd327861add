//! Whole models side by side (ours): the arrangements of several models on one machine that need no operator-level costs.
//!
//! A **round** is `items` inferences of every model; what is minimised is its makespan. Costs are whole-model measurements, so
//! what a backend fuses stays fused (sums of isolated operators mislead, FACTS.md). Three arrangements are what everybody does
//! and thus the baselines of [`crate::concurrent()`] and of BIDENT 4.3; two are ours:
//!
//! * [`serial`]: one inference after another, each on its model's best unit, with all cores.
//! * [`one_per_unit`]: every model has a unit of its own (one core, one accelerator) for all its inferences.
//! * [`own_threading`]: the units for running all at once without any order, each backend on all cores; it has no prediction.
//! * [`placed`]: every inference goes to a slot (a core or an accelerator) or is run with all cores after the others.
//! * [`tail_cuts`]: as `placed`, and the inference that would finish last is cut in two segments: the head runs beside the other
//!   models, the tail with all cores once these are done. This is what fills cores that idle at the end of a round.
//!
//! Stages that hand tensors on ([`LinkedRequest`]) are placed whole: [`linked_staged`] on any units, [`linked_on_one_unit`] and
//! [`linked_serial`] as everybody does.
//!
//! Requests that arrive at fixed rates have no rounds: [`served`] gives each model the unit with which fewest deadlines are missed
//! under the rule of [`Dispatcher`], which the runtime keeps to.

mod build;
mod cost;
mod cut;
mod dispatch;
mod energy;
mod linked;
mod place;
mod rates;
#[cfg(test)]
mod tests;

pub use dispatch::{DispatchStream, Dispatcher, Started};
pub use energy::{Powers, frugal};
pub use linked::{LinkedRequest, linked_on_one_unit, linked_serial, linked_staged};
pub use rates::{RatePrediction, RateStream, predict_served, served};

use crate::PlanError;
use build::Execution;
use cost::Costs;
use place::Placement;
use std::collections::BTreeMap;
use trefoil_core::{OperatorGraph, OperatorId, Plan, Profile, Unit, UnitAddress};

/// A model and its measurements.
#[derive(Debug, Clone, Copy)]
pub struct SharedModel<'a> {
    /// Its measurements: the whole model on as many of the units as possible.
    pub profile: &'a Profile,
    /// The model.
    pub graph: &'a OperatorGraph,
}

/// What is to share the machine.
#[derive(Debug, Clone)]
pub struct TogetherRequest<'a> {
    /// The models; a model that is given twice runs twice.
    pub models: Vec<SharedModel<'a>>,
    /// Inferences of each model in a round, at least 1.
    pub items: u32,
    /// Units to use, of which several may share resources: a CPU backend on each core, and on all of them.
    pub units: Vec<Unit>,
    /// Measured slowdown of the first unit's work while the second works; 1 where nothing was measured.
    pub slowdown: BTreeMap<(UnitAddress, UnitAddress), f64>,
    /// Units that work slower now than when they were measured, by factor: somebody else is using them.
    pub strained: BTreeMap<UnitAddress, f64>,
}

impl<'a> TogetherRequest<'a> {
    /// One inference of each model, no slowdown.
    pub fn new(models: Vec<SharedModel<'a>>, units: Vec<Unit>) -> Self {
        Self { models, items: 1, units, slowdown: BTreeMap::new(), strained: BTreeMap::new() }
    }

    fn check(&self) -> Result<Costs, PlanError> {
        if self.models.is_empty() || self.items == 0 {
            let reason = "there is no model or no inference to run".to_owned();
            return Err(PlanError::Workload { model: String::new(), reason });
        }
        if self.units.is_empty() {
            return Err(PlanError::NoUnits);
        }
        Costs::new(self)
    }

    /// All operators of a model.
    fn all(&self, model: usize) -> Vec<OperatorId> {
        self.models[model].graph.ids().collect()
    }

    fn whole(&self, costs: &Costs, model: usize, item: u32, unit: usize) -> Execution {
        let cost = costs.whole(model, unit).cloned().unwrap_or_else(cost::nothing);
        Execution { model, item, iteration: 0, operators: self.all(model), unit, cost, after: Vec::new() }
    }

    fn execute(&self, costs: &Costs, placement: &Placement) -> Vec<Execution> {
        placement.order().map(|(job, unit)| self.whole(costs, job.model, job.item, unit)).collect()
    }
}

/// Every inference on its model's best unit, one after another. A unit of one core is the best one where all cores are slower.
///
/// # Errors
/// [`PlanError::Workload`] when nothing is to run or a model runs whole on no unit, [`PlanError::NoUnits`].
pub fn serial(request: &TogetherRequest<'_>) -> Result<Plan, PlanError> {
    let costs = request.check()?;
    let mut executions: Vec<Execution> = Vec::new();
    for item in 0..request.items {
        for model in 0..request.models.len() {
            let unit = costs.best(request, model, |_| true).ok_or_else(|| cost::runs_nowhere(request, model))?;
            let mut execution = request.whole(&costs, model, item, unit);
            // Best units may be disjoint; serial means one at a time all the same.
            execution.after.extend(executions.len().checked_sub(1));
            executions.push(execution);
        }
    }
    build::plan(request, "serial", &executions)
}

/// Every model on one unit that shares nothing with those of other models, as far as there are enough such units: its best
/// one-core unit or accelerator. The assignment with the shortest round is taken.
///
/// # Errors
/// As [`serial`], and [`PlanError::Workload`] when a model runs on no such unit.
pub fn one_per_unit(request: &TogetherRequest<'_>) -> Result<Plan, PlanError> {
    let costs = request.check()?;
    let slots = place::slots(request);
    // A model's inferences stay together: they are one job of that many times the cost.
    let items = f64::from(request.items);
    let jobs: Vec<Vec<f64>> = (0..request.models.len())
        .map(|model| {
            slots.iter().map(|slot| items * costs.in_slot(model, slot).map_or(f64::INFINITY, |c| c.1)).collect()
        })
        .collect();
    if let Some(model) = jobs.iter().position(|row| row.iter().all(|cost| cost.is_infinite())) {
        return Err(cost::runs_nowhere(request, model));
    }
    let slot_of = place::shortest(&jobs);
    let mut executions = Vec::new();
    for item in 0..request.items {
        for (model, &slot) in slot_of.iter().enumerate() {
            let (unit, _) = costs.in_slot(model, &slots[slot]).ok_or_else(|| cost::runs_nowhere(request, model))?;
            executions.push(request.whole(&costs, model, item, unit));
        }
    }
    build::plan(request, "one-per-unit", &executions)
}

/// One inference of each model, whole, on the unit named for it (an index in the request's units).
///
/// # Errors
/// As [`serial`], and [`PlanError::Workload`] when there is not one unit for each model, or a model was not measured there.
pub fn on_units(request: &TogetherRequest<'_>, unit_of: &[usize]) -> Result<Plan, PlanError> {
    let costs = request.check()?;
    let wrong = |model: String, reason: String| Err(PlanError::Workload { model, reason });
    if unit_of.len() != request.models.len() || unit_of.iter().any(|&unit| unit >= request.units.len()) {
        let reason = format!("{} units are named for {} models", unit_of.len(), request.models.len());
        return wrong(String::new(), reason);
    }
    let mut executions = Vec::new();
    for (model, &unit) in unit_of.iter().enumerate() {
        if costs.whole(model, unit).is_none() {
            let name = request.models[model].graph.model.clone();
            return wrong(name, format!("it was not measured whole on {}", request.units[unit].address));
        }
        executions.push(request.whole(&costs, model, 0, unit));
    }
    build::plan(request, "on-units", &executions)
}

/// For each model its best unit of those that hold the most resources (a CPU backend on all cores): where it runs when every
/// model is left to its backend's own threading. The plan lists them one after another; running it without that order is what
/// the arrangement means.
///
/// # Errors
/// As [`serial`].
pub fn own_threading(request: &TogetherRequest<'_>) -> Result<Plan, PlanError> {
    let costs = request.check()?;
    let mut executions = Vec::new();
    for item in 0..request.items {
        for model in 0..request.models.len() {
            let wide = |unit: &Unit| is_widest(request, unit);
            let unit = costs
                .best(request, model, wide)
                .or_else(|| costs.best(request, model, |_| true))
                .ok_or_else(|| cost::runs_nowhere(request, model))?;
            executions.push(request.whole(&costs, model, item, unit));
        }
    }
    let mut plan = build::plan(request, "own-threading", &executions)?;
    plan.claimed = 0.0;
    plan.simulated_ms = 0.0;
    plan.model_bound = None;
    plan.gap = None;
    plan.notes.push("nothing is predicted of models that fight for the same cores".to_owned());
    Ok(plan)
}

/// Whether no other unit of the same backend and device holds more resources.
fn is_widest(request: &TogetherRequest<'_>, unit: &Unit) -> bool {
    let same =
        |other: &&Unit| other.address.backend == unit.address.backend && other.address.device == unit.address.device;
    request.units.iter().filter(same).all(|other| other.resources.len() <= unit.resources.len())
}

/// Every inference whole, on a slot beside others or with all cores after them: the division with the shortest round.
///
/// # Errors
/// As [`serial`].
pub fn placed(request: &TogetherRequest<'_>) -> Result<Plan, PlanError> {
    let costs = request.check()?;
    let placement = place::best(request, &costs)?;
    build::plan(request, "placed", &request.execute(&costs, &placement))
}

/// Cuts of the inference that would finish last, best first, at most `limit` and at most one per model. Segments that the
/// profile holds measured whole cost that; others their share of the whole model by isolated operator times. Measure the
/// segments of the first (its costs that are [`trefoil_core::Origin::Predicted`]) and ask again, until the first is measured.
/// Empty where no unit holds several slots.
///
/// # Errors
/// As [`serial`].
pub fn tail_cuts(request: &TogetherRequest<'_>, limit: usize) -> Result<Vec<Plan>, PlanError> {
    let costs = request.check()?;
    let mut plans = Vec::new();
    for executions in cut::best(request, &costs).into_iter().take(limit) {
        plans.push(build::plan(request, "tail-cut", &executions)?);
    }
    plans.sort_by(|one, other| one.claimed.total_cmp(&other.claimed));
    Ok(plans)
}
