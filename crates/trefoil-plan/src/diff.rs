//! What changed between two plans of the same models.

use crate::PlanError;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use trefoil_core::{CoreError, Objective, OperatorGraph, OperatorId, Plan, UnitAddress};

/// An operator that another plan puts elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Move {
    /// Index of the model.
    pub model: u32,
    /// The operator.
    pub operator: OperatorId,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// Units in the first plan; several where items or iterations differ.
    pub from: BTreeSet<UnitAddress>,
    /// Units in the second plan.
    pub to: BTreeSet<UnitAddress>,
}

/// One plan in numbers.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PlanSummary {
    /// Planner.
    pub method: String,
    /// What it minimises.
    pub objective: Objective,
    /// Cost that its planner claims, in the objective's unit.
    pub claimed: f64,
    /// Makespan by the simulator, in milliseconds.
    pub simulated_ms: f64,
    /// Lower bound, in the objective's unit.
    pub model_bound: Option<f64>,
    /// Number of segments.
    pub segments: usize,
    /// Distinct (tensor, destination unit) pairs that cross between units.
    pub crossings: usize,
    /// Operators by unit.
    pub operators: BTreeMap<UnitAddress, usize>,
}

impl PlanSummary {
    /// The summary of a plan.
    pub fn of(plan: &Plan) -> Self {
        let mut operators: BTreeMap<UnitAddress, BTreeSet<(u32, OperatorId)>> = BTreeMap::new();
        for segment in &plan.segments {
            let on = operators.entry(segment.unit.clone()).or_default();
            on.extend(segment.operators.iter().map(|&id| (segment.model, id)));
        }
        Self {
            method: plan.method.clone(),
            objective: plan.objective,
            claimed: plan.claimed,
            simulated_ms: plan.simulated_ms,
            model_bound: plan.model_bound,
            segments: plan.segments.len(),
            crossings: plan.crossings(),
            operators: operators.into_iter().map(|(unit, set)| (unit, set.len())).collect(),
        }
    }
}

/// Two plans side by side. `Display` gives the text.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PlanDiff {
    /// The first plan.
    pub first: PlanSummary,
    /// The second plan.
    pub second: PlanSummary,
    /// Operators on other units, in order.
    pub moves: Vec<Move>,
    /// Number of operators on the same units.
    pub unchanged: usize,
}

/// Compares two plans of the same models, in the order of `graphs`.
///
/// # Errors
/// [`CoreError::WrongModel`] when the plans are for other models than `graphs` or than each other.
pub fn diff(first: &Plan, second: &Plan, graphs: &[&OperatorGraph]) -> Result<PlanDiff, PlanError> {
    for plan in [first, second] {
        let same = plan.models.len() == graphs.len()
            && plan.models.iter().zip(graphs).all(|(model, graph)| {
                (&model.fingerprint, model.granularity) == (&graph.fingerprint, graph.granularity)
            });
        if !same {
            let names = |names: Vec<&str>| names.join(", ");
            return Err(CoreError::WrongModel {
                want: names(plan.models.iter().map(|model| model.name.as_str()).collect()),
                have: names(graphs.iter().map(|graph| graph.model.as_str()).collect()),
            }
            .into());
        }
    }
    let (before, after) = (units(first), units(second));
    let (mut moves, mut unchanged) = (Vec::new(), 0);
    let nowhere = BTreeSet::new();
    for (model, graph) in graphs.iter().enumerate() {
        for operator in graph.ids() {
            let key = (model as u32, operator);
            let (from, to) = (before.get(&key).unwrap_or(&nowhere), after.get(&key).unwrap_or(&nowhere));
            if from == to {
                unchanged += 1;
                continue;
            }
            let details = graph.operator(operator);
            moves.push(Move {
                model: model as u32,
                operator,
                name: details.name.clone(),
                kind: details.kind.clone(),
                from: from.clone(),
                to: to.clone(),
            });
        }
    }
    Ok(PlanDiff { first: PlanSummary::of(first), second: PlanSummary::of(second), moves, unchanged })
}

fn units(plan: &Plan) -> BTreeMap<(u32, OperatorId), BTreeSet<UnitAddress>> {
    let mut units: BTreeMap<_, BTreeSet<UnitAddress>> = BTreeMap::new();
    for segment in &plan.segments {
        for &id in &segment.operators {
            units.entry((segment.model, id)).or_default().insert(segment.unit.clone());
        }
    }
    units
}

/// Moves shown in the text; JSON has all.
const SHOWN: usize = 40;

impl fmt::Display for PlanDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, plan) in [("first", &self.first), ("second", &self.second)] {
            let unit = if plan.objective == Objective::Energy { "J" } else { "ms" };
            let spread: Vec<String> = plan.operators.iter().map(|(unit, count)| format!("{count} on {unit}")).collect();
            writeln!(
                f,
                "{name}: method {}, claimed {:.4} {unit}, simulated makespan {:.4} ms, {} segment(s), {} crossing(s); operators: {}",
                plan.method,
                plan.claimed,
                plan.simulated_ms,
                plan.segments,
                plan.crossings,
                spread.join(", ")
            )?;
        }
        if self.first.simulated_ms > 0.0 {
            let change = 100.0 * (self.second.simulated_ms / self.first.simulated_ms - 1.0);
            writeln!(f, "makespan of the second: {change:+.2}%")?;
        }
        writeln!(f, "{} operator(s) on other units, {} on the same", self.moves.len(), self.unchanged)?;
        let list = |units: &BTreeSet<UnitAddress>| {
            if units.is_empty() {
                return "nowhere".to_owned();
            }
            units.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
        };
        for change in self.moves.iter().take(SHOWN) {
            writeln!(
                f,
                "  {} `{}` ({}): {} → {}",
                change.operator,
                change.name,
                change.kind,
                list(&change.from),
                list(&change.to)
            )?;
        }
        if self.moves.len() > SHOWN {
            writeln!(f, "  … and {} more (`--json` lists all)", self.moves.len() - SHOWN)?;
        }
        Ok(())
    }
}
