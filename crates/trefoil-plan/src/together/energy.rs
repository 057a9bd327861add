//! Energy of arrangements of whole models (DESIGN 3): `∫ [P_idle + Σ_busy (P_u − P_idle)] dt`, so that units which work at once
//! do not pay for the idle package twice.

use super::TogetherRequest;
use super::build::{self, Execution};
use super::cost::{Costs, runs_nowhere};
use crate::PlanError;
use std::collections::BTreeMap;
use trefoil_core::{Objective, Plan, Resource, SpanKind, Timeline, UnitAddress};

/// Most assignments of models to units that are looked at one by one.
const EXHAUSTIVE: usize = 50_000;

/// Package power while nothing works, and while each unit alone does; watts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Powers {
    /// While nothing works; 0 where nobody knows.
    pub idle: f64,
    /// While a unit works.
    pub busy: BTreeMap<UnitAddress, f64>,
}

impl Powers {
    /// Joules of `ms` milliseconds in which each unit works so many milliseconds; `None` where a unit's power is not known.
    pub fn joules<'a>(&self, ms: f64, busy_ms: impl IntoIterator<Item = (&'a UnitAddress, f64)>) -> Option<f64> {
        let mut sum = self.idle * ms;
        for (unit, busy) in busy_ms {
            sum += (self.busy.get(unit)? - self.idle) * busy;
        }
        Some(sum / 1e3)
    }

    /// Joules of a timeline whose lanes are units.
    pub fn joules_of(&self, timeline: &Timeline) -> Option<f64> {
        let mut busy: BTreeMap<UnitAddress, f64> = BTreeMap::new();
        let mut end: f64 = 0.0;
        for lane in &timeline.lanes {
            let unit: UnitAddress = lane.name.parse().ok()?;
            let sum = busy.entry(unit).or_insert(0.0);
            for span in lane.spans.iter().filter(|span| span.kind != SpanKind::Wait) {
                *sum += span.end_ms - span.start_ms;
                end = end.max(span.end_ms);
            }
        }
        self.joules(end, busy.iter().map(|(unit, &ms)| (unit, ms)))
    }
}

/// Every model whole on one unit, for the least energy of a round; of equal ones the shortest round. Models on units that share
/// nothing overlap. `claimed` is in joules. Exact under these costs for few models and units, else each model goes where it
/// takes least by itself.
///
/// # Errors
/// As [`super::serial`]; [`PlanError::Workload`] when no unit with known power runs a model.
pub fn frugal(request: &TogetherRequest<'_>, powers: &Powers) -> Result<Plan, PlanError> {
    let costs = request.check()?;
    let models = request.models.len();
    let known = |model: usize, unit: usize| {
        costs.whole(model, unit).is_some() && powers.busy.contains_key(&request.units[unit].address)
    };
    let choices: Vec<Vec<usize>> =
        (0..models).map(|model| (0..request.units.len()).filter(|&unit| known(model, unit)).collect()).collect();
    if let Some(model) = choices.iter().position(Vec::is_empty) {
        return Err(runs_nowhere(request, model));
    }
    let combinations = choices.iter().try_fold(1usize, |all, units| all.checked_mul(units.len()));
    let mut best: Option<((f64, f64), Vec<usize>)> = None;
    let mut consider = |units: Vec<usize>| {
        let score = score(request, &costs, powers, &units);
        if best.as_ref().is_none_or(|(least, _)| score < *least) {
            best = Some((score, units));
        }
    };
    if combinations.is_some_and(|all| all <= EXHAUSTIVE) {
        let mut digits = vec![0; models];
        loop {
            consider(digits.iter().zip(&choices).map(|(&digit, units)| units[digit]).collect());
            let Some(at) = digits.iter().zip(&choices).position(|(&digit, units)| digit + 1 < units.len()) else {
                break;
            };
            digits[..at].fill(0);
            digits[at] += 1;
        }
    } else {
        let alone = |model: usize, unit: usize| {
            let ms = costs.whole(model, unit).map_or(f64::INFINITY, |cost| cost.ms);
            ms * powers.busy.get(&request.units[unit].address).copied().unwrap_or(f64::INFINITY)
        };
        let least = |(model, units): (usize, &Vec<usize>)| {
            units.iter().copied().min_by(|&one, &other| alone(model, one).total_cmp(&alone(model, other))).unwrap_or(0)
        };
        consider(choices.iter().enumerate().map(least).collect());
    }
    let (_, units) = best.ok_or_else(|| runs_nowhere(request, 0))?;
    let mut executions: Vec<Execution> = Vec::new();
    for item in 0..request.items {
        executions.extend(units.iter().enumerate().map(|(model, &unit)| request.whole(&costs, model, item, unit)));
    }
    let mut plan = build::plan(request, "frugal", &executions)?;
    plan.objective = Objective::Energy;
    plan.claimed = powers.joules_of(&plan.timeline).unwrap_or(plan.claimed);
    Ok(plan)
}

/// Joules and makespan of a round, without slowdowns.
fn score(request: &TogetherRequest<'_>, costs: &Costs, powers: &Powers, units: &[usize]) -> (f64, f64) {
    let mut free: BTreeMap<&Resource, f64> = BTreeMap::new();
    let (mut end, mut work) = (0.0f64, 0.0);
    for _ in 0..request.items {
        for (model, &at) in units.iter().enumerate() {
            let unit = &request.units[at];
            let ms = costs.whole(model, at).map_or(f64::INFINITY, |cost| cost.ms);
            let start = unit.resources.iter().filter_map(|resource| free.get(resource)).copied().fold(0.0, f64::max);
            for resource in &unit.resources {
                free.insert(resource, start + ms);
            }
            end = end.max(start + ms);
            work += ms * (powers.busy.get(&unit.address).copied().unwrap_or(f64::INFINITY) - powers.idle);
        }
    }
    (powers.idle * end + work, end)
}
