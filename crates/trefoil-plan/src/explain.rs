//! Why an operator is where it is.

use crate::assemble::{Piece, is_serial, price};
use crate::pareto::schedule_of;
use crate::problem::{Goal, Problem, Schedule};
use crate::view::{CostView, composed};
use crate::whole::mode_at;
use crate::{PlanError, PlanRequest};
use std::fmt;
use trefoil_core::{CostRef, Objective, OperatorId, Origin, Plan, UnitAddress, Work};

/// Another unit, and what it would take to use it for one operator.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Alternative {
    /// The unit.
    pub unit: UnitAddress,
    /// The operator alone on it, in milliseconds.
    pub isolated_ms: Option<f64>,
    /// How that was got: `measured`, `predicted`, or what a machine description's number rests on.
    pub isolated_origin: Option<String>,
    /// Why it cannot be used: the failure, or the pin.
    pub unavailable: Option<String>,
    /// Change of the plan's cost (objective's unit) when only this operator moves there: its segment splits, transfers come
    /// and go, everything re-priced. Negative means cheaper under the costs as they stand now. In a parallel plan the
    /// schedule of lone operators is simulated with and without the move, in the plan's order.
    pub move_price: Option<f64>,
}

/// An operator's place in a plan. `Display` gives the text.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Explanation {
    /// The operator.
    pub operator: OperatorId,
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// Where the plan puts it.
    pub unit: UnitAddress,
    /// It alone there, in milliseconds; `None` when only measured inside larger segments.
    pub isolated_ms: Option<f64>,
    /// How that was got.
    pub isolated_origin: Option<String>,
    /// Index of its segment in [`Plan::segments`].
    pub segment: usize,
    /// Number of operators in that segment.
    pub segment_operators: usize,
    /// The segment's cost as the plan states it.
    pub segment_cost: CostRef,
    /// The pin that decided, if one did.
    pub pin: Option<String>,
    /// What the plan minimises.
    pub objective: Objective,
    /// The plan's cost under the request's profile, in the objective's unit.
    pub plan_cost: f64,
    /// How it and the prices of moves were got: `predicted`, or `simulated` where a part is.
    pub plan_origin: Origin,
    /// The other units, in the request's order.
    pub alternatives: Vec<Alternative>,
    /// Index in `alternatives` of the cheapest move.
    pub next_best: Option<usize>,
}

/// Explains the placement of one operator. Prices are those of the request's profile; a plan of older measurements is
/// re-priced.
///
/// # Errors
/// [`PlanError::NoOperator`]; [`trefoil_core::CoreError`] when plan and graph do not belong together or the plan uses a
/// unit that the request does not have; whatever is wrong with the request.
pub fn explain(request: &PlanRequest<'_>, plan: &Plan, operator: OperatorId) -> Result<Explanation, PlanError> {
    let view = CostView::new(request)?;
    let graph = view.graph;
    if operator.index() >= graph.len() {
        return Err(PlanError::NoOperator { model: graph.model.clone(), operator: operator.0, count: graph.len() });
    }
    plan.check(&[graph])?;
    let mut pieces: Vec<Piece> = Vec::new();
    let mut home = (0, 0);
    for task in &plan.tasks {
        let Work::Segment { segment: id } = task.work else { continue };
        let segment = &plan.segments[id.0 as usize];
        let unit = view.unit_index(&segment.unit).ok_or_else(|| {
            if mode_at(request.profile, &segment.unit).is_some() {
                let what = "no operator's place in this plan can be explained".to_owned();
                return PlanError::OnlyWhole { unit: segment.unit.to_string(), what };
            }
            let (want, have) = (segment.unit.to_string(), view.unit_names());
            trefoil_core::CoreError::UnknownUnit { want, have }.into()
        })?;
        if segment.operators.binary_search(&operator).is_ok() {
            home = (pieces.len(), id.0 as usize);
        }
        pieces.push(Piece { unit, operators: segment.operators.clone() });
    }
    let (place, segment) = home;
    let parallel = if is_serial(plan) { None } else { Some(Parallel::new(&view, plan)?) };
    let plan_cost = match &parallel {
        Some(parallel) => parallel.cost,
        None => price(&view, &pieces)?.total,
    };
    let here = pieces[place].unit;
    let alternatives: Vec<Alternative> = (0..view.unit_count())
        .filter(|&unit| unit != here)
        .map(|unit| {
            let unavailable = view.check_segment(&[operator], unit).err();
            let move_price = unavailable.is_none().then(|| {
                if let Some(parallel) = &parallel {
                    return parallel.moved(operator, unit).map(|cost| cost - plan_cost);
                }
                let moved = moved(&view, &pieces, place, operator, unit);
                price(&view, &moved).ok().map(|priced| priced.total - plan_cost)
            });
            Alternative {
                unit: view.table.units[unit].clone(),
                isolated_ms: view.table.cost(operator, unit).map(|cost| cost.ms),
                isolated_origin: view.origin_of(operator, unit),
                unavailable,
                move_price: move_price.flatten(),
            }
        })
        .collect();
    let next_best = (0..alternatives.len())
        .filter_map(|index| Some((alternatives[index].move_price?, index)))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, index)| index);
    Ok(Explanation {
        operator,
        name: graph.operator(operator).name.clone(),
        kind: graph.operator(operator).kind.clone(),
        unit: view.table.units[here].clone(),
        isolated_ms: view.table.cost(operator, here).map(|cost| cost.ms),
        isolated_origin: view.origin_of(operator, here),
        segment,
        segment_operators: pieces[place].operators.len(),
        segment_cost: plan.segments[segment].cost.clone(),
        pin: view.pinned[operator.index()].as_ref().map(|(_, pin)| pin.to_string()),
        objective: plan.objective,
        plan_cost,
        plan_origin: view.graph.ids().fold(Origin::Predicted, |so_far, id| {
            let units = (0..view.unit_count()).filter_map(|unit| view.table.cost(id, unit));
            units.fold(so_far, |so_far, cost| composed(so_far, cost.origin))
        }),
        alternatives,
        next_best,
    })
}

impl CostView<'_> {
    /// How the operator's isolated time on a unit was got, in words.
    fn origin_of(&self, operator: OperatorId, unit: usize) -> Option<String> {
        let record = self.operator_record(operator, unit);
        self.table.cost(operator, unit)?;
        Some(label(record.origin, record.versions.get(SOURCE).map(String::as_str)))
    }
}

/// Under this name a simulated record's `versions` tell the source of its rate.
const SOURCE: &str = "rate";

/// How a number was got. A machine description's numbers have a source each, or are assumed.
pub(crate) fn label(origin: Origin, source: Option<&str>) -> String {
    match (origin, source) {
        (Origin::Simulated, Some(source)) if source.starts_with("assumed") => "simulated, rate assumed".to_owned(),
        (Origin::Simulated, Some(source)) => {
            let place = source.split([':', ';']).next().unwrap_or(source);
            let partly = if source.contains("assumed") { ", in part assumed" } else { "" };
            format!("simulated, rate described by {place}{partly}")
        }
        (Origin::Simulated, None) => "simulated from a machine description".to_owned(),
        (origin, _) => origin.to_string(),
    }
}

/// A parallel plan as a schedule of lone operators, for moving one of them.
struct Parallel {
    problem: Problem,
    schedule: Schedule,
    /// Jobs in the schedule's order.
    order: Vec<u32>,
    cost: f64,
}

impl Parallel {
    fn new(view: &CostView<'_>, plan: &Plan) -> Result<Self, PlanError> {
        let goal = if view.objective == Objective::Energy { Goal::Energy } else { Goal::Makespan };
        let problem = Problem::from_view(view)?.with_goal(goal)?;
        let schedule = schedule_of(&problem, plan);
        let order = schedule
            .order
            .iter()
            .filter_map(|step| match step {
                crate::problem::Step::Job(job) => Some(*job),
                _ => None,
            })
            .collect();
        let cost = problem.evaluate(&schedule)?.score.value;
        Ok(Self { problem, schedule, order, cost })
    }

    fn moved(&self, operator: OperatorId, unit: usize) -> Option<f64> {
        let mut units = self.schedule.unit.clone();
        units[operator.index()] = unit as u32;
        let schedule = Schedule::from_jobs(&self.problem, units, &self.order);
        self.problem.evaluate(&schedule).ok().map(|evaluation| evaluation.score.value)
    }
}

/// The pieces with one operator on another unit: its segment splits around it, and it joins neighbours of its new unit.
fn moved(view: &CostView<'_>, pieces: &[Piece], place: usize, operator: OperatorId, unit: usize) -> Vec<Piece> {
    let mut result: Vec<Piece> = Vec::new();
    // Joins only across the seams that the move made: other neighbours stay as the plan has them.
    let mut append = |piece: Piece, joins: bool| {
        if piece.operators.is_empty() {
            return;
        }
        if let Some(last) = result.last_mut()
            && joins
            && last.unit == piece.unit
        {
            let mut joint = [last.operators.as_slice(), piece.operators.as_slice()].concat();
            joint.sort_unstable();
            if view.check_segment(&joint, piece.unit).is_ok() {
                last.operators = joint;
                return;
            }
        }
        result.push(piece);
    };
    for (index, piece) in pieces.iter().enumerate() {
        if index != place {
            append(piece.clone(), index == place + 1);
            continue;
        }
        // Ascending ids are a topological order, so both halves are convex and nothing before waits for what comes after.
        let at = piece.operators.partition_point(|&id| id < operator);
        let halves = (piece.operators[..at].to_vec(), piece.operators[at + 1..].to_vec());
        append(Piece { unit: piece.unit, operators: halves.0 }, true);
        append(Piece { unit, operators: vec![operator] }, true);
        append(Piece { unit: piece.unit, operators: halves.1 }, true);
    }
    result
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.objective == Objective::Energy { "J" } else { "ms" };
        let ms = |ms: Option<f64>, origin: &Option<String>| match (ms, origin) {
            (Some(ms), Some(origin)) => format!("{ms:.4} ms alone ({origin})"),
            (Some(ms), None) => format!("{ms:.4} ms alone"),
            (None, _) => "no time of its own".to_owned(),
        };
        let origin = self.plan_origin;
        writeln!(f, "operator {} `{}` ({}) runs on {}", self.operator, self.name, self.kind, self.unit)?;
        if let Some(pin) = &self.pin {
            writeln!(f, "  because of the pin `{pin}`")?;
        }
        writeln!(f, "  there: {}", ms(self.isolated_ms, &self.isolated_origin))?;
        writeln!(
            f,
            "  in segment {} of {} operator(s), {:.4} ms ({})",
            self.segment, self.segment_operators, self.segment_cost.ms, self.segment_cost.origin
        )?;
        writeln!(f, "  the plan costs {:.4} {suffix} ({origin})", self.plan_cost)?;
        for (index, other) in self.alternatives.iter().enumerate() {
            let alone = ms(other.isolated_ms, &other.isolated_origin);
            write!(f, "  {}: ", other.unit)?;
            match (&other.unavailable, other.move_price) {
                (Some(reason), _) => write!(f, "not possible: {reason}")?,
                (None, Some(price)) => {
                    write!(f, "{alone}; moving it there alone changes the plan by {price:+.4} {suffix} ({origin})")?;
                }
                (None, None) => write!(f, "{alone}; the split that moving it makes cannot run")?,
            }
            writeln!(f, "{}", if Some(index) == self.next_best { " (next best)" } else { "" })?;
        }
        Ok(())
    }
}
