//! Which unsupported operator to port next: what the plan would gain if a unit learned to run a kind of operator.

use crate::view::CostView;
use crate::{PlanError, PlanOptions, PlanRequest, plan_with};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use trefoil_core::{
    Measurement, MeasurementId, Objective, OperatorClass, OperatorId, Origin, Outcome, Profile, Samples, Signature,
    Subject, Timing, UnitAddress,
};

/// What an assumed time was derived from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Basis {
    /// How the unit does other operators of the same kind.
    SameKind,
    /// How it does other operators of the same class (compute- or memory-bound).
    SameClass,
    /// How it does whatever it runs.
    Anything,
}

/// A port and what it would bring. The times of operators that do not run yet are **assumed**, never measured.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Port {
    /// Kind of operator, such as `CumSum`.
    pub kind: String,
    /// The unit that would run it.
    pub unit: UnitAddress,
    /// How many operators of the model that would be.
    pub operators: usize,
    /// Why they do not run there today (of the first).
    pub reason: String,
    /// Where the assumed time comes from.
    pub basis: Basis,
    /// Assumed time on the unit over the time on the best unit that runs them today, the median.
    pub assumed_ratio: f64,
    /// Cost of the plan without the port, in the objective's unit.
    pub before: f64,
    /// Cost with it.
    pub after: f64,
    /// What is minimised.
    pub objective: Objective,
}

impl Port {
    /// What it brings, in the objective's unit; not below 0.
    pub fn gain(&self) -> f64 {
        (self.before - self.after).max(0.0)
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.objective == Objective::Energy { "J" } else { "ms" };
        let basis = match self.basis {
            Basis::SameKind => "as other operators of this kind there",
            Basis::SameClass => "as other operators of its class there",
            Basis::Anything => "as whatever runs there",
        };
        write!(
            f,
            "{} to {}: {} operator(s), plan {:.4} → {:.4} {unit} (gain {:.4} {unit}, predicted); assumed {:.2}x the best unit's time, {basis}; today: {}",
            self.kind,
            self.unit,
            self.operators,
            self.before,
            self.after,
            self.gain(),
            self.assumed_ratio,
            self.reason
        )
    }
}

/// Most ports that are planned with; those of most operator time come first.
const MOST_PORTS: usize = 24;

/// Every kind of operator that some unit of the request does not run, planned anew as if it did, by gain. The assumed time of
/// an operator is its best time today times the median ratio (unit over best other unit) of the operators that the unit does
/// run: those of the same kind if there are any, else of the same class, else all.
///
/// # Errors
/// Whatever is wrong with the request, as for [`crate::plan`].
pub fn ports(method: &str, request: &PlanRequest<'_>, options: &PlanOptions) -> Result<Vec<Port>, PlanError> {
    let view = CostView::new(request)?;
    let before = plan_with(method, request, options)?.claimed;
    let mut missing: BTreeMap<(String, usize), Vec<OperatorId>> = BTreeMap::new();
    for id in view.graph.ids() {
        for unit in 0..view.unit_count() {
            if view.table.cost(id, unit).is_none()
                && view.allowed(id, unit)
                && best_elsewhere(&view, id, unit).is_some()
            {
                missing.entry((view.graph.operator(id).kind.clone(), unit)).or_default().push(id);
            }
        }
    }
    let time =
        |ids: &[OperatorId], unit: usize| -> f64 { ids.iter().filter_map(|&id| best_elsewhere(&view, id, unit)).sum() };
    let mut candidates: Vec<((String, usize), Vec<OperatorId>)> = missing.into_iter().collect();
    candidates.sort_by(|a, b| time(&b.1, b.0.1).total_cmp(&time(&a.1, a.0.1)));
    candidates.truncate(MOST_PORTS);
    let mut ports = Vec::new();
    for ((kind, unit), ids) in candidates {
        let Some((basis, ratio)) = assumed_ratio(&view, &kind, ids[0], unit) else { continue };
        let profile = ported(&view, &ids, unit, ratio);
        let after = plan_with(method, &PlanRequest { profile: &profile, ..request.clone() }, options)?.claimed;
        ports.push(Port {
            kind,
            unit: view.table.units[unit].clone(),
            operators: ids.len(),
            reason: view.why_absent(ids[0], unit),
            basis,
            assumed_ratio: ratio,
            before,
            after,
            objective: request.objective,
        });
    }
    ports.sort_by(|a, b| b.gain().total_cmp(&a.gain()));
    Ok(ports)
}

/// The operator's best isolated time on the other units.
fn best_elsewhere(view: &CostView<'_>, id: OperatorId, unit: usize) -> Option<f64> {
    let others = (0..view.unit_count()).filter(|&other| other != unit);
    others.filter_map(|other| view.table.cost(id, other)).map(|cost| cost.ms).reduce(f64::min)
}

/// Median ratio of the unit's time over the best other unit's, among the operators nearest in nature.
fn assumed_ratio(view: &CostView<'_>, kind: &str, like: OperatorId, unit: usize) -> Option<(Basis, f64)> {
    let class: OperatorClass = view.graph.operator(like).class;
    let of = |fits: &dyn Fn(OperatorId) -> bool| -> Option<f64> {
        let mut seen: BTreeSet<&Signature> = BTreeSet::new();
        let mut ratios: Vec<f64> = view
            .graph
            .ids()
            .filter(|&id| fits(id) && seen.insert(&view.graph.operator(id).signature))
            .filter_map(|id| {
                let other = best_elsewhere(view, id, unit).filter(|&ms| ms > 0.0)?;
                Some(view.table.cost(id, unit)?.ms / other)
            })
            .collect();
        Samples::from_values(&mut ratios).map(|samples| samples.median)
    };
    of(&|id| view.graph.operator(id).kind == kind)
        .map(|ratio| (Basis::SameKind, ratio))
        .or_else(|| of(&|id| view.graph.operator(id).class == class).map(|ratio| (Basis::SameClass, ratio)))
        .or_else(|| of(&|_| true).map(|ratio| (Basis::Anything, ratio)))
}

/// The profile as if the operators ran on the unit.
fn ported(view: &CostView<'_>, ids: &[OperatorId], unit: usize, ratio: f64) -> Profile {
    let mut profile = view.index.profile.clone();
    let address = view.table.units[unit].clone();
    // A segment that failed may have failed because of one of them: it no longer counts.
    profile.measurements.retain(|record| {
        record.units.as_slice() != std::slice::from_ref(&address)
            || record.failure().is_none()
            || !matches!(record.subject, Subject::Segment { .. } | Subject::WholeModel { .. })
    });
    let mut done = BTreeSet::new();
    for &id in ids {
        let signature = view.graph.operator(id).signature.clone();
        let Some(ms) = best_elsewhere(view, id, unit).filter(|_| done.insert(signature.clone())) else { continue };
        let subject = Subject::Operator { signature };
        let units = vec![address.clone()];
        profile.measurements.push(Measurement {
            id: MeasurementId(format!("{} (assumed)", MeasurementId::new(&subject, &units, 0))),
            subject,
            units,
            origin: Origin::Predicted,
            outcome: Outcome::Ok {
                timing: Timing { total: Some(Samples::exactly(ms * ratio)), ..Timing::default() },
                error_to_peak: None,
                nodes: Vec::new(),
            },
            conditions: trefoil_core::Conditions::default(),
            versions: BTreeMap::new(),
            taken_at: String::new(),
        });
    }
    profile
}
