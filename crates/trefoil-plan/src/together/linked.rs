//! Linked stages, each whole (ours): a pipeline of models that hand tensors on, some of them repeated, with whole-model costs.
//!
//! [`crate::concurrent()`] plans the operators of the same stages; sums of isolated operators mislead where a backend fuses
//! (FACTS.md), so stages that stay whole are the arrangement to fall back on, and those on one unit are what everybody does.

use super::TogetherRequest;
use super::build::{self, Execution};
use super::cost::{Costs, runs_nowhere};
use crate::{PlanError, StageLink};
use std::collections::BTreeSet;
use trefoil_core::{LinkEnd, Plan, PlannedLink};

/// Most assignments of stages to units that are looked at one by one.
const EXHAUSTIVE: usize = 50_000;
/// Assignments whose plan is simulated.
const SIMULATED: usize = 12;

/// Stages that hand tensors on.
#[derive(Debug, Clone)]
pub struct LinkedRequest<'a> {
    /// The stages as models, one inference of each, units and slowdowns.
    pub stages: TogetherRequest<'a>,
    /// Executions of each stage within one inference, at least 1.
    pub repeats: Vec<u32>,
    /// What they hand on; equal stages make a loop.
    pub links: Vec<StageLink>,
}

impl LinkedRequest<'_> {
    fn check(&self) -> Result<(Costs, Vec<usize>), PlanError> {
        let costs = self.stages.check()?;
        let count = self.stages.models.len();
        let wrong = |reason: String| Err(PlanError::Workload { model: String::new(), reason });
        if self.repeats.len() != count || self.repeats.contains(&0) || self.stages.items != 1 {
            return wrong(format!("{count} stages need a number of repeats each, at least 1, and run once"));
        }
        if let Some(link) = self.links.iter().find(|link| link.from.0 >= count || link.to.0 >= count) {
            return wrong(format!("a link names stage {} or {}, of {count}", link.from.0, link.to.0));
        }
        let mut order: Vec<usize> = Vec::new();
        while order.len() < count {
            let free = |stage: &usize| {
                let sources = self.sources(*stage);
                !order.contains(stage) && sources.iter().all(|source| order.contains(source))
            };
            match (0..count).find(free) {
                Some(next) => order.push(next),
                None => return wrong("links go round in a circle".to_owned()),
            }
        }
        Ok((costs, order))
    }

    /// Other stages that a stage reads from.
    fn sources(&self, stage: usize) -> BTreeSet<usize> {
        let into = self.links.iter().filter(|link| link.to.0 == stage && link.from.0 != stage);
        into.map(|link| link.from.0).collect()
    }

    fn links(&self) -> Vec<PlannedLink> {
        let end = |(stage, tensor): (usize, trefoil_core::TensorId)| LinkEnd { model: stage as u32, item: 0, tensor };
        self.links.iter().map(|link| PlannedLink { from: end(link.from), to: end(link.to) }).collect()
    }

    /// All stages in order, each on its unit. With `serial` each waits for the one before it.
    fn plan(
        &self,
        method: &str,
        costs: &Costs,
        order: &[usize],
        unit_of: &[usize],
        serial: bool,
    ) -> Result<Plan, PlanError> {
        let mut executions: Vec<Execution> = Vec::new();
        let mut last_of = vec![None; order.len()];
        for &stage in order {
            for iteration in 0..self.repeats[stage] {
                let mut execution = self.stages.whole(costs, stage, 0, unit_of[stage]);
                execution.iteration = iteration;
                if serial {
                    execution.after.extend(executions.len().checked_sub(1));
                } else {
                    execution.after.extend(self.sources(stage).iter().filter_map(|&source| last_of[source]));
                    execution.after.extend(last_of[stage]);
                }
                last_of[stage] = Some(executions.len());
                executions.push(execution);
            }
        }
        build::linked_plan(&self.stages, method, &executions, self.links())
    }

    /// Milliseconds of all executions of a stage on a unit.
    fn ms(&self, costs: &Costs, stage: usize, unit: usize) -> Option<f64> {
        costs.whole(stage, unit).map(|cost| cost.ms * f64::from(self.repeats[stage]))
    }
}

/// All stages on one unit, one after another, for every unit on which each of them runs: fastest first.
///
/// # Errors
/// [`PlanError::Workload`] when stages, repeats and links do not fit each other or a stage runs nowhere.
pub fn linked_on_one_unit(request: &LinkedRequest<'_>) -> Result<Vec<Plan>, PlanError> {
    let (costs, order) = request.check()?;
    let mut plans = Vec::new();
    for (at, unit) in request.stages.units.iter().enumerate() {
        if order.iter().all(|&stage| request.ms(&costs, stage, at).is_some()) {
            let method = format!("single:{}", unit.address);
            plans.push(request.plan(&method, &costs, &order, &vec![at; order.len()], true)?);
        }
    }
    plans.sort_by(|one, other| one.claimed.total_cmp(&other.claimed));
    Ok(plans)
}

/// Every stage on its own best unit, one after another.
///
/// # Errors
/// As [`linked_on_one_unit`].
pub fn linked_serial(request: &LinkedRequest<'_>) -> Result<Plan, PlanError> {
    let (costs, order) = request.check()?;
    let best =
        |stage: usize| costs.best(&request.stages, stage, |_| true).ok_or_else(|| runs_nowhere(&request.stages, stage));
    let units: Vec<usize> = (0..order.len()).map(best).collect::<Result<_, _>>()?;
    request.plan("serial", &costs, &order, &units, true)
}

/// The assignment of whole stages to units with the shortest makespan; stages that do not read from each other overlap where
/// their units share nothing. Exact under these costs for few stages and units, but for slowdowns, which only decide between
/// the dozen best; else improved stage by stage.
///
/// # Errors
/// As [`linked_on_one_unit`].
pub fn linked_staged(request: &LinkedRequest<'_>) -> Result<Plan, PlanError> {
    let (costs, order) = request.check()?;
    let choices: Vec<Vec<usize>> = (0..order.len())
        .map(|stage| (0..request.stages.units.len()).filter(|&at| request.ms(&costs, stage, at).is_some()).collect())
        .collect();
    if let Some(stage) = choices.iter().position(Vec::is_empty) {
        return Err(runs_nowhere(&request.stages, stage));
    }
    let combinations = choices.iter().try_fold(1usize, |all, units| all.checked_mul(units.len()));
    let length = |units: &[usize]| request.makespan(&costs, &order, units);
    let mut found: Vec<(f64, Vec<usize>)> = Vec::new();
    let mut keep = |units: &[usize]| {
        let ms = length(units);
        let at = found.partition_point(|known| known.0 <= ms);
        if at < SIMULATED && !found.iter().any(|known| known.1 == units) {
            found.insert(at, (ms, units.to_vec()));
            found.truncate(SIMULATED);
        }
    };
    if combinations.is_some_and(|all| all <= EXHAUSTIVE) {
        let mut digits = vec![0; choices.len()];
        loop {
            keep(&digits.iter().zip(&choices).map(|(&digit, units)| units[digit]).collect::<Vec<_>>());
            let Some(at) = digits.iter().zip(&choices).position(|(&digit, units)| digit + 1 < units.len()) else {
                break;
            };
            digits[..at].fill(0);
            digits[at] += 1;
        }
    } else {
        let best = |stage: usize| costs.best(&request.stages, stage, |_| true).unwrap_or(choices[stage][0]);
        let mut units: Vec<usize> = (0..order.len()).map(best).collect();
        keep(&units);
        // Each pass shortens the makespan or is the last.
        loop {
            let before = length(&units);
            for (stage, known) in choices.iter().enumerate() {
                for &unit in known {
                    let other: Vec<usize> =
                        units.iter().enumerate().map(|(at, &known)| if at == stage { unit } else { known }).collect();
                    keep(&other);
                    if length(&other) < length(&units) {
                        units = other;
                    }
                }
            }
            if length(&units) >= before * (1.0 - 1e-9) {
                break;
            }
        }
    }
    let mut best: Option<Plan> = None;
    for (_, units) in &found {
        let plan = request.plan("staged", &costs, &order, units, false)?;
        if best.as_ref().is_none_or(|known| plan.claimed < known.claimed) {
            best = Some(plan);
        }
    }
    best.ok_or_else(|| runs_nowhere(&request.stages, 0))
}

impl LinkedRequest<'_> {
    /// Makespan of whole stages on units, in order, without slowdowns.
    fn makespan(&self, costs: &Costs, order: &[usize], unit_of: &[usize]) -> f64 {
        let mut free: Vec<(&trefoil_core::Resource, f64)> = Vec::new();
        let mut end_of = vec![0.0f64; order.len()];
        for &stage in order {
            let unit = &self.stages.units[unit_of[stage]];
            let ready = self.sources(stage).iter().map(|&source| end_of[source]).fold(0.0, f64::max);
            let idle = free.iter().filter(|(resource, _)| unit.resources.contains(*resource));
            let start = idle.map(|(_, since)| *since).fold(ready, f64::max);
            let end = start + self.ms(costs, stage, unit_of[stage]).unwrap_or(f64::INFINITY);
            free.retain(|(resource, _)| !unit.resources.contains(*resource));
            free.extend(unit.resources.iter().map(|resource| (resource, end)));
            end_of[stage] = end;
        }
        end_of.into_iter().fold(0.0, f64::max)
    }
}
