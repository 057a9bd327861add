//! Plans that leave nothing to search: one unit for everything, and splits made by hand. And the baselines.

use crate::assemble::{Piece, assemble, price, set_bound};
use crate::simulate::SimulationModel;
use crate::view::CostView;
use crate::{PlanError, PlanRequest};
use std::collections::BTreeSet;
use trefoil_core::cost::measurement_cost;
use trefoil_core::profile::ProfileIndex;
use trefoil_core::{
    MeasurementId, Objective, OperatorGraph, OperatorId, Origin, Plan, Profile, Subject, Unit, UnitAddress,
};

/// Everything on one unit in one segment.
pub(crate) fn single(view: &CostView<'_>, unit: usize) -> Result<Plan, PlanError> {
    let method = format!("single:{}", view.table.units[unit]);
    if view.graph.is_empty() {
        return assemble(view, &method, &[]);
    }
    let mut plan = assemble(view, &method, &[Piece { unit, operators: view.graph.ids().collect() }])?;
    if !plan.all_measured {
        plan.notes
            .push(format!("the whole model was not measured on {}; its time is an estimate", view.table.units[unit]));
    }
    Ok(plan)
}

/// The cheapest single-unit plan, if any unit can run everything.
pub(crate) fn best_single(view: &CostView<'_>) -> Option<Plan> {
    let plans = (0..view.unit_count()).filter_map(|unit| single(view, unit).ok());
    plans.min_by(|a, b| a.claimed.total_cmp(&b.claimed))
}

/// `single`, or the same as a faster mode of a unit: the profile may know the whole model's time on other core counts of
/// the units ([`trefoil_core::Profile::modes`]). Only for latency, and only where no pin decides otherwise: a mode has no
/// operator costs to plan with.
pub(crate) fn best_mode(view: &CostView<'_>, single: Option<Plan>) -> Option<Plan> {
    if view.objective != Objective::Latency {
        return single;
    }
    match (single, fastest_mode(view)) {
        (Some(single), Some(mode)) if single.claimed <= mode.claimed => Some(single),
        (_, Some(mut mode)) => {
            // No plan over the units costs less than their bound, and no mode less than this one.
            set_bound(&mut mode, view.lower_bound());
            Some(mode)
        }
        (single, None) => single,
    }
}

/// The whole model on the mode of one of the view's units on which it takes least, for latency and throughput and without pins.
pub(crate) fn fastest_mode(view: &CostView<'_>) -> Option<Plan> {
    if view.objective == Objective::Energy || view.pinned.iter().any(Option::is_some) {
        return None;
    }
    let of_a_unit = |mode: &&Unit| {
        let same = |unit: &&Unit| {
            unit.address.backend == mode.address.backend
                && unit.address.device == mode.address.device
                && unit.address.precision == mode.address.precision
        };
        view.units.iter().any(same)
    };
    let bytes = view.graph.weight_bytes(view.graph.ids());
    let fits = |mode: &&Unit| mode.limits.memory_bytes.is_none_or(|most| bytes <= most);
    let modes = view.index.profile.modes.iter().filter(of_a_unit).filter(fits).filter_map(|mode| {
        let record = whole_record(&view.index, view.graph, &mode.address)?;
        Some((mode, record, measurement_cost(record)?))
    });
    let (mode, record, cost) = modes.min_by(|a, b| a.2.ms.total_cmp(&b.2.ms))?;
    Some(Plan::whole(view.graph, mode, cost.ms, vec![record.id.clone()], record.origin))
}

/// The newest measurement of the whole model on a unit.
fn whole_record<'a>(
    index: &ProfileIndex<'a>,
    graph: &OperatorGraph,
    unit: &UnitAddress,
) -> Option<&'a trefoil_core::Measurement> {
    index.newest(&Subject::WholeModel { model: graph.fingerprint.clone() }, std::slice::from_ref(unit))
}

/// The mode of a profile's units at an address that is not a unit itself.
pub(crate) fn mode_at<'a>(profile: &'a Profile, address: &UnitAddress) -> Option<&'a Unit> {
    let is_here = |unit: &&Unit| unit.address == *address;
    if profile.units.iter().any(|unit| is_here(&unit)) { None } else { profile.modes.iter().find(is_here) }
}

/// The whole model on a mode of a unit, of which nothing else was measured. `claimed` is what it costs; nothing is said of quality.
pub(crate) fn on_mode(request: &PlanRequest<'_>, mode: &Unit) -> Result<Plan, PlanError> {
    let graph = request.graph;
    if let Some(pin) = request.pins.iter().find(|pin| pin.unit != mode.address) {
        return Err(PlanError::PinUnit { pin: pin.to_string(), have: mode.address.to_string() });
    }
    let fail = |reason: String| PlanError::Unrunnable {
        unit: mode.address.to_string(),
        what: "the whole".to_owned(),
        model: graph.model.clone(),
        reason,
    };
    let bytes = graph.weight_bytes(graph.ids());
    if let Some(most) = mode.limits.memory_bytes.filter(|&most| bytes > most) {
        return Err(fail(format!("{bytes} bytes of weights are more than the unit's memory of {most}")));
    }
    let index = request.profile.index();
    let record = whole_record(&index, graph, &mode.address)
        .ok_or_else(|| fail("the whole model was not measured on it".to_owned()))?;
    let cost = measurement_cost(record)
        .ok_or_else(|| fail(record.failure().unwrap_or_else(|| "it ran but no time was recorded".to_owned())))?;
    let mut plan = Plan::whole(graph, mode, cost.ms, vec![record.id.clone()], record.origin);
    plan.objective = request.objective;
    if request.objective == Objective::Energy {
        let model = SimulationModel::of_machine(&[&index], &BTreeSet::from([&mode.address]))?;
        let watts = model.watts.get(&mode.address).copied().ok_or_else(|| PlanError::NoPower {
            units: mode.address.to_string(),
            example: format!("{}=15", mode.address),
        })?;
        let joules = watts * cost.ms / 1e3;
        plan.claimed = joules;
        plan.simulated_j = Some(joules);
        for cost in plan
            .segments
            .iter_mut()
            .map(|segment| &mut segment.cost)
            .chain(plan.tasks.iter_mut().map(|task| &mut task.cost))
        {
            cost.joules = Some(joules);
        }
    }
    Ok(plan)
}

/// The least that the whole model takes on any mode, in milliseconds.
pub(crate) fn least_on_modes(request: &PlanRequest<'_>) -> f64 {
    let index = request.profile.index();
    let modes = request.profile.modes.iter();
    let cost = |mode: &Unit| measurement_cost(whole_record(&index, request.graph, &mode.address)?).map(|cost| cost.ms);
    modes.filter_map(cost).fold(f64::INFINITY, f64::min)
}

/// A split made by hand: every operator once, each on one of the request's units. Operators are grouped into runs that stay
/// on a unit as long as something assigned to it is ready, which makes segments convex; of the possible first units the one
/// that gives the cheapest plan is taken. `claimed` prices it like any other plan.
///
/// # Errors
/// [`PlanError::Assignment`] when an operator is missing, assigned twice or unknown; [`PlanError::Unrunnable`] when a unit
/// cannot run what it was given; and whatever is wrong with the request.
pub fn import(request: &PlanRequest<'_>, assignment: &[(OperatorId, UnitAddress)]) -> Result<Plan, PlanError> {
    let view = CostView::new(request)?;
    let graph = view.graph;
    let fail = |reason: String| PlanError::Assignment { model: graph.model.clone(), reason };
    let mut unit_of: Vec<Option<usize>> = vec![None; graph.len()];
    for (id, address) in assignment {
        let unit = view.unit_index(address).ok_or_else(|| {
            fail(format!("operator {id} is put on {address}, which is not among {}", view.unit_names()))
        })?;
        match unit_of.get_mut(id.index()) {
            None => return Err(fail(format!("operator {id} does not exist; there are {}", graph.len()))),
            Some(Some(_)) => {
                return Err(fail(format!("operator {id} `{}` is assigned twice", graph.operator(*id).name)));
            }
            Some(slot) => *slot = Some(unit),
        }
    }
    if let Some(missing) = unit_of.iter().position(Option::is_none) {
        return Err(fail(format!("operator {missing} `{}` is assigned to no unit", graph.operators[missing].name)));
    }
    let unit_of: Vec<usize> = unit_of.into_iter().flatten().collect();
    let mut plan = assemble(&view, "imported", &cheapest_grouping(&view, &unit_of)?)?;
    crate::judge::check_memory(&plan, &[graph])?;
    crate::judge::judge(&mut plan, &[&view], crate::goal_of(view.objective), crate::judge::bound_of_all(&view)?)?;
    Ok(plan)
}

/// Groups an assignment into runs, trying every unit as the first.
pub(crate) fn cheapest_grouping(view: &CostView<'_>, unit_of: &[usize]) -> Result<Vec<Piece>, PlanError> {
    let mut best: Option<(f64, Vec<Piece>)> = None;
    let mut error = None;
    for start in 0..view.unit_count() {
        let order = view.dag.grouped(unit_of, view.unit_count(), Some(start));
        let pieces = runs(view, &order, unit_of);
        match price(view, &pieces) {
            Ok(priced) if best.as_ref().is_none_or(|(total, _)| priced.total < *total) => {
                best = Some((priced.total, pieces));
            }
            Ok(_) => {}
            Err(reason) => error = error.or(Some(reason)),
        }
    }
    match (best, error) {
        (Some((_, pieces)), _) => Ok(pieces),
        (None, Some(error)) => Err(error),
        (None, None) => Ok(Vec::new()),
    }
}

/// Cuts an order where the unit changes, or where the run would hold something that is known to fail in one piece.
pub(crate) fn runs(view: &CostView<'_>, order: &[OperatorId], unit_of: &[usize]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for &id in order {
        let unit = unit_of[id.index()];
        match pieces.last_mut() {
            Some(piece) if piece.unit == unit && view.can_extend(piece, id) => piece.operators.push(id),
            _ => pieces.push(Piece { unit, operators: vec![id] }),
        }
    }
    for piece in &mut pieces {
        piece.operators.sort_unstable();
    }
    pieces
}

/// The whole model on one unit, as measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Baseline {
    /// The unit.
    pub unit: UnitAddress,
    /// Measured milliseconds of the whole model in one piece; `None` when it was not measured or does not run.
    pub ms: Option<f64>,
    /// The measurement.
    pub id: Option<MeasurementId>,
    /// How `ms` was got.
    pub origin: Origin,
    /// Why there is no number.
    pub reason: Option<String>,
}

/// Every unit of the request (of the profile when the request names none) alone, in the request's order.
pub fn baselines(request: &PlanRequest<'_>) -> Vec<Baseline> {
    let index = request.profile.index();
    let units: Vec<UnitAddress> = if request.units.is_empty() {
        request.profile.units.iter().map(|unit| unit.address.clone()).collect()
    } else {
        request.units.clone()
    };
    let subject = Subject::WholeModel { model: request.graph.fingerprint.clone() };
    units
        .into_iter()
        .map(|unit| match index.newest(&subject, std::slice::from_ref(&unit)) {
            None => Baseline {
                reason: Some("the whole model was not measured on it".to_owned()),
                unit,
                ms: None,
                id: None,
                origin: Origin::Measured,
            },
            Some(record) => {
                let cost = measurement_cost(record);
                let reason = cost
                    .is_none()
                    .then(|| record.failure().unwrap_or_else(|| "it ran but no time was recorded".to_owned()));
                Baseline {
                    unit,
                    ms: cost.map(|cost| cost.ms),
                    id: Some(record.id.clone()),
                    origin: record.origin,
                    reason,
                }
            }
        })
        .collect()
}
