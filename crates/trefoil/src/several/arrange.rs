//! The arrangements of a contest: what everybody does, and plans.

use super::ready::segment_options;
use super::slowdown::{Slowed, measure_slowdown, spread};
use super::{BASELINES, Question, Ready, all_units, energy, entrant, graphs, request};
use crate::context::{self, ProgressLine};
use crate::error::CliError;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;
use trefoil_core::{OperatorId, Origin, Plan, SegmentId, Unit, UnitAddress, Work};
use trefoil_plan::together::{self, RatePrediction, RateStream};
use trefoil_plan::{Application, ConcurrentRequest, PlanRequest, TogetherRequest};
use trefoil_run::together::Entrant;

/// An arrangement, and what is predicted of it when requests arrive at fixed rates.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The arrangement.
    pub entrant: Entrant,
    /// Prediction of serving.
    pub served: Option<RatePrediction>,
}

/// All arrangements of a contest.
#[derive(Debug)]
pub struct Arranged {
    /// Baselines first.
    pub candidates: Vec<Candidate>,
    /// How much the models slow each other down, one per core.
    pub slowdown: Option<Vec<Slowed>>,
    /// Remarks.
    pub notes: Vec<String>,
}

/// Slowdown of the first unit's work by the second's.
pub type Factors = BTreeMap<(UnitAddress, UnitAddress), f64>;

/// A cut must promise this fraction less than the best arrangement without one before its segments are measured.
const WORTH_MEASURING: f64 = 0.01;
/// Most cuts to measure.
const MOST_CUTS: usize = 8;

/// Makes the arrangements.
pub fn arrange(
    ready: &mut [Ready],
    which: &[usize],
    question: &Question,
    line: &ProgressLine,
) -> Result<Arranged, CliError> {
    let items = if question.arrivals.is_some() { 1 } else { question.items };
    let mut notes = Vec::new();
    line.step("how much the models slow each other down");
    let (slowdown, factors) = measure_slowdown(ready, which, question, &mut notes)?;

    // What everybody does.
    let mut candidates = Vec::new();
    {
        let mut base = request(ready, which, &question.baseline_units, items);
        base.slowdown = spread(&factors, &question.baseline_units);
        // A baseline that nobody can run here is told; the others stand.
        let plans = [
            (together::serial(&base), true),
            (together::own_threading(&base), false),
            (together::one_per_unit(&base), true),
        ];
        for (name, (plan, ordered)) in BASELINES.into_iter().zip(plans) {
            match plan {
                Ok(plan) => {
                    let served = predict(&base, &plan, ordered, question)?;
                    candidates.push(Candidate { entrant: entrant(ready, which, name, plan, ordered, true)?, served });
                }
                Err(error) => notes.push(format!("`{name}` cannot be run: {error}")),
            }
        }
    }

    // Ours.
    let plans = match (&question.given, &question.arrivals) {
        (Some(given), _) => {
            given.check(&graphs(ready, which))?;
            vec![given.clone()]
        }
        (None, Some(_)) => vec![served(ready, which, question, spread(&factors, &question.units))?],
        (None, None) => planned(ready, which, question, &factors, line, &mut notes)?,
    };
    let mut plans = plans;
    if question.energy {
        let units = all_units(question);
        let known = energy::powers_of(ready, &units)?;
        let mut asked = request(ready, which, &question.units, items);
        asked.slowdown = spread(&factors, &question.units);
        plans.push(together::frugal(&asked, &known.powers)?);
    }
    let base = request(ready, which, &question.baseline_units, items);
    for plan in plans {
        let same = candidates.iter().find(|known| {
            known.entrant.arrangement.ordered && same_arrangement(&known.entrant.arrangement.plan, &plan)
        });
        // A plan that was given is run whatever it is like.
        if let Some(same) = same.filter(|_| question.given.is_none()) {
            notes.push(format!("method `{}` arranges the models as `{}` does", plan.method, same.entrant.name));
            continue;
        }
        notes.extend(plan.notes.iter().map(|note| format!("{}: {note}", plan.method)));
        let taken = candidates.iter().any(|known| known.entrant.name == plan.method);
        let name = if taken { format!("{} (plan)", plan.method) } else { plan.method.clone() };
        let served = predict(&base, &plan, true, question)?;
        candidates.push(Candidate { entrant: entrant(ready, which, &name, plan, true, false)?, served });
    }
    Ok(Arranged { candidates, slowdown, notes })
}

/// Arrivals as the planner wants them.
fn streams(question: &Question) -> Option<Vec<RateStream>> {
    let stream = |one: &trefoil_run::together::Arrivals| RateStream {
        period_ms: one.period_ms,
        offset_ms: one.offset_ms,
        deadline_ms: one.deadline_ms,
        priority: one.priority,
    };
    question.arrivals.as_ref().map(|all| all.iter().map(stream).collect())
}

fn predict(
    request: &TogetherRequest<'_>,
    plan: &Plan,
    ordered: bool,
    question: &Question,
) -> Result<Option<RatePrediction>, CliError> {
    match streams(question).filter(|_| ordered) {
        Some(streams) => {
            let duration_ms = question.duration.as_secs_f64() * 1e3;
            Ok(Some(together::predict_served(request, plan, &streams, duration_ms)?))
        }
        None => Ok(None),
    }
}

fn served(ready: &[Ready], which: &[usize], question: &Question, factors: Factors) -> Result<Plan, CliError> {
    let mut asked = request(ready, which, &question.units, 1);
    asked.slowdown = factors;
    let streams = streams(question).unwrap_or_default();
    Ok(together::served(&asked, &streams, question.duration.as_secs_f64() * 1e3)?.0)
}

/// Plans of the method asked for.
fn planned(
    ready: &mut [Ready],
    which: &[usize],
    question: &Question,
    factors: &Factors,
    line: &ProgressLine,
    notes: &mut Vec<String>,
) -> Result<Vec<Plan>, CliError> {
    match question.method.as_str() {
        "auto" => {}
        "concurrent" => return Ok(vec![concurrent(ready, which, question)?]),
        method => {
            let requests: Vec<PlanRequest<'_>> =
                which.iter().map(|&model| plan_request(&ready[model], question)).collect();
            return Ok(vec![trefoil_plan::plan_several(method, &requests, &question.options)?]);
        }
    }
    let mut plans = Vec::new();
    let mut asked = request(ready, which, &question.units, question.items);
    asked.slowdown = spread(factors, &question.units);
    let placed = together::placed(&asked)?;
    let mut best = placed.claimed.min(together::serial(&asked)?.claimed);
    plans.push(placed);
    if let Some(cut) = tail_cut(ready, which, question, factors, best, line, notes)? {
        best = best.min(cut.claimed);
        plans.push(cut);
    }
    // Operators of several models on units of their own: worth a try where the units that were asked for can run at once, and
    // where isolated costs, which overstate what is fused, promise a gain all the same.
    let resolved = context::resolve_units(&question.asked)?;
    let some_apart =
        resolved.iter().enumerate().any(|(at, unit)| resolved[..at].iter().any(|one| unit.is_disjoint(one)));
    if some_apart {
        match concurrent(ready, which, question) {
            Ok(plan) if plan.claimed < best * (1.0 - question.options.minimum_gain) => plans.push(plan),
            Ok(plan) => notes.push(format!("method `concurrent` claims {:.3} ms, which is no gain", plan.claimed)),
            Err(error) => notes.push(format!("method `concurrent` has no plan: {error}")),
        }
    }
    Ok(plans)
}

fn plan_request<'a>(ready: &'a Ready, question: &Question) -> PlanRequest<'a> {
    PlanRequest { units: question.asked.clone(), ..PlanRequest::new(&ready.profile, &ready.graph) }
}

fn concurrent(ready: &[Ready], which: &[usize], question: &Question) -> Result<Plan, CliError> {
    let application =
        |&model: &usize| Application::new(&ready[model].profile, &ready[model].graph).every(question.items, 0.0, 0.0);
    let asked = ConcurrentRequest {
        units: question.asked.clone(),
        ..ConcurrentRequest::new(which.iter().map(application).collect())
    };
    Ok(trefoil_plan::concurrent(&asked, &question.options)?)
}

/// The best cut whose segments are measured; `None` where none promises more than `best`, in milliseconds.
fn tail_cut(
    ready: &mut [Ready],
    which: &[usize],
    question: &Question,
    factors: &Factors,
    best: f64,
    line: &ProgressLine,
    notes: &mut Vec<String>,
) -> Result<Option<Plan>, CliError> {
    let began = Instant::now();
    let budget = question.measure.refine_budget.clamp(0.0, 1e6);
    for round in 0..=MOST_CUTS {
        let mut asked = request(ready, which, &question.units, question.items);
        asked.slowdown = spread(factors, &question.units);
        let Some(cut) = together::tail_cuts(&asked, 1)?.into_iter().next() else { return Ok(None) };
        if cut.claimed > best * (1.0 - WORTH_MEASURING) {
            return Ok(None);
        }
        let open = unmeasured(&cut, &graphs(ready, which).iter().map(|graph| graph.len()).collect::<Vec<_>>());
        if open.is_empty() {
            return Ok(Some(cut));
        }
        if question.measure.no_refine || round == MOST_CUTS || began.elapsed().as_secs_f64() > budget {
            notes.push("tail-cut: its segments were not all measured whole".to_owned());
            return Ok(Some(cut));
        }
        for (model, places) in open {
            let Ready { prepared, profile, .. } = &mut ready[which[model]];
            let graph = profile.model(Some(prepared.prepared.fingerprint()))?.clone();
            let options = segment_options(&question.measure, &question.cache, question.strict, graph.granularity)?;
            let mut show = |progress: trefoil_profile::Progress| line.show(&progress);
            let stop = context::stop_flag();
            trefoil_profile::measure_segments(prepared, &graph, &places, profile, &options, &mut show, stop)?;
        }
    }
    Ok(None)
}

/// By model, the parts of it whose cost is only predicted, each with its unit.
type Open = BTreeMap<usize, Vec<(BTreeSet<OperatorId>, Unit)>>;

fn unmeasured(plan: &Plan, operators: &[usize]) -> Open {
    let mut open = Open::new();
    for segment in &plan.segments {
        let model = segment.model as usize;
        let unit = plan.units.iter().find(|unit| unit.address == segment.unit);
        if let (Origin::Predicted, Some(unit)) = (segment.cost.origin, unit)
            && segment.operators.len() < operators[model]
        {
            open.entry(model).or_default().push((segment.operators.iter().copied().collect(), unit.clone()));
        }
    }
    open
}

/// Model, item, iteration, operators and unit of an execution.
type Executed = (u32, u32, u32, Vec<OperatorId>, UnitAddress);

/// Whether every resource executes the same in the same order.
pub fn same_arrangement(one: &Plan, other: &Plan) -> bool {
    let whole = |plan: &Plan| -> BTreeMap<String, Vec<Executed>> {
        let execution = |id: &trefoil_core::TaskId| {
            let task = plan.tasks.get(id.0 as usize)?;
            let Work::Segment { segment: SegmentId(segment) } = task.work else { return None };
            let segment = plan.segments.get(segment as usize)?;
            Some((segment.model, task.item, task.iteration, segment.operators.clone(), segment.unit.clone()))
        };
        let orders = plan.order.iter();
        orders.map(|(resource, order)| (resource.clone(), order.iter().filter_map(execution).collect())).collect()
    };
    one.models.len() == other.models.len() && whole(one) == whole(other)
}
