//! For the refinement loop: what still rests on an estimate, and how good the estimates were.

use crate::estimate::MeasuredSet;
use crate::view::CostView;
use crate::{PlanError, PlanRequest};
use std::collections::BTreeMap;
use trefoil_core::cost::measurement_cost;
use trefoil_core::{MeasurementId, OperatorGraph, OperatorId, Plan, Profile, Segment, Subject, UnitAddress};

/// Indices of the plan's segments whose cost is not one measurement of exactly that segment, in plan order. Lone operators
/// are measured by their isolated measurement.
pub fn unmeasured_segments(plan: &Plan) -> Vec<usize> {
    // Ids are readable by design: what is composed from operators cites an `operator/…` record.
    let whole = |segment: &Segment| match segment.cost.measurements.as_slice() {
        [id] => segment.operators.len() == 1 || !id.0.starts_with("operator/"),
        _ => false,
    };
    (0..plan.segments.len()).filter(|&index| !whole(&plan.segments[index])).collect()
}

/// An estimate beside the measurement that came later.
#[derive(Debug, Clone, PartialEq)]
pub struct EstimateCheck {
    /// The unit.
    pub unit: UnitAddress,
    /// The segment's operators, ascending.
    pub operators: Vec<OperatorId>,
    /// The measurement.
    pub id: MeasurementId,
    /// What the estimate was from everything recorded before it, in milliseconds.
    pub estimate_ms: f64,
    /// What was measured, in milliseconds.
    pub measured_ms: f64,
}

impl EstimateCheck {
    /// Whether the estimate did not exceed the measurement, give or take the fraction `noise` of it.
    pub fn was_lower_bound(&self, noise: f64) -> bool {
        self.estimate_ms <= self.measured_ms * (1.0 + noise)
    }
}

/// For every segment of two or more operators that was measured whole on one of the units (all of the profile's when
/// empty): the estimate as it was from the records that stand before it in the profile, and the measurement. In profile
/// order. Refinement finds the optimum of the interval graph if every estimate was a lower bound.
///
/// # Errors
/// Whatever is wrong with the profile, as for [`crate::plan`].
pub fn estimate_audit(
    profile: &Profile,
    graph: &OperatorGraph,
    units: &[UnitAddress],
) -> Result<Vec<EstimateCheck>, PlanError> {
    let view = CostView::new(&PlanRequest { units: units.to_vec(), ..PlanRequest::new(profile, graph) })?;
    Ok(audit(&view))
}

pub(crate) fn audit(view: &CostView<'_>) -> Vec<EstimateCheck> {
    let mut before: Vec<BTreeMap<Vec<OperatorId>, f64>> = vec![BTreeMap::new(); view.unit_count()];
    let mut checks = Vec::new();
    let isolated: Vec<_> = (0..view.unit_count()).map(|unit| view.isolated(unit)).collect();
    for record in &view.index.profile.measurements {
        let [address] = record.units.as_slice() else { continue };
        let Some(unit) = view.unit_index(address) else { continue };
        let operators = match &record.subject {
            Subject::WholeModel { model } if *model == view.graph.fingerprint => view.graph.ids().collect(),
            Subject::Segment { model, granularity, operators }
                if *model == view.graph.fingerprint && *granularity == view.graph.granularity =>
            {
                operators.clone()
            }
            _ => continue,
        };
        let Some(cost) = measurement_cost(record) else { continue };
        if operators.len() < 2
            || operators
                .iter()
                .any(|id| view.table.costs.get(id.index() * view.unit_count() + unit).is_none_or(Option::is_none))
        {
            continue;
        }
        // A repetition has no estimate of its own; nor has the whole model, whose measurement every profile starts with.
        if matches!(record.subject, Subject::Segment { .. }) && !before[unit].contains_key(&operators) {
            let sets: Vec<MeasuredSet> =
                before[unit].iter().map(|(operators, &ms)| MeasuredSet { operators: operators.clone(), ms }).collect();
            let mut estimate = view.estimates[unit].clone();
            estimate.calibrate(&sets, &isolated[unit]);
            checks.push(EstimateCheck {
                unit: address.clone(),
                estimate_ms: estimate.segment_ms(&operators),
                measured_ms: cost.ms,
                id: record.id.clone(),
                operators: operators.clone(),
            });
        }
        before[unit].insert(operators, cost.ms);
    }
    checks
}

/// Noise allowed before an estimate counts as too high.
const AUDIT_NOISE: f64 = 0.02;

/// The audit in one line, for a plan's notes; `None` when nothing was measured whole beyond the model itself.
pub(crate) fn audit_note(view: &CostView<'_>) -> Option<String> {
    let checks = audit(view);
    let held = checks.iter().filter(|check| check.was_lower_bound(AUDIT_NOISE)).count();
    match (checks.len(), held) {
        (0, _) => None,
        (all, held) if all == held => {
            Some(format!("all {all} segment estimates turned out to be lower bounds of what was measured"))
        }
        (all, held) => {
            let worst = checks
                .iter()
                .filter(|check| check.measured_ms > 0.0)
                .map(|check| check.estimate_ms / check.measured_ms)
                .fold(0.0, f64::max);
            Some(format!(
                "{} of {all} segment estimates were above what was measured (by up to {worst:.2}x), so a better split may have been passed over",
                all - held
            ))
        }
    }
}
