//! Certificates: a plan's schedule, what it costs, and witnesses of the lower bound, in a file that a second program can
//! verify from the profile alone (`trefoil-check`, which shares no code with this crate). Format: `docs/src/formats.md`.
//!
//! A certificate states no more than that program can verify. The bound may therefore be lower than the plan's
//! `model_bound`, and a plan that an exhaustive search proved optimal may be certified with a gap.

mod expand;
mod format;
mod prices;
pub(crate) mod proofs;
mod shares;

pub use format::*;

use crate::assemble::is_serial;
use crate::quality::AT_ONCE;
use crate::view::CostView;
use crate::whole::mode_at;
use crate::{PlanError, PlanRequest};
use trefoil_core::{Objective, OperatorGraph, Plan, UnitAddress, Work};

/// Most operators and units of a model whose optimality a checker can be asked to search for itself.
const SEARCHED_OPERATORS: usize = 7;
const SEARCHED_UNITS: usize = 3;

/// Plans of one segment after another of more operators are certified by bounds on such plans only: others are large to write.
const MOST_BOUNDED_TWICE: usize = 2_000;

/// The certificate of a plan made from `requests`, one for each of its models, in the plan's order.
///
/// # Errors
/// Whatever is wrong with a request; [`trefoil_core::CoreError`] when the plan is for other models or uses units that the requests do not
/// have; [`PlanError::Stuck`] when it cannot run.
pub fn certificate(requests: &[PlanRequest<'_>], plan: &Plan) -> Result<Certificate, PlanError> {
    let views: Vec<CostView<'_>> =
        requests.iter().map(|request| view_of(request, requests.len())).collect::<Result<_, _>>()?;
    let views: Vec<&CostView<'_>> = views.iter().collect();
    let Some(&first) = views.first() else { return Err(PlanError::NoUnits) };
    let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
    plan.check(&graphs)?;
    // The checker's proofs are over the units, and it knows what a mode changes for one inference of one model only.
    let is_mode = |unit: &&trefoil_core::Unit| mode_at(requests[0].profile, &unit.address).is_some();
    if let Some(mode) = plan.units.iter().find(is_mode)
        && (requests.len() > 1 || plan.objective == Objective::Throughput)
    {
        let what = "plans of streams or several models on it have no certificate".to_owned();
        return Err(PlanError::OnlyWhole { unit: mode.address.to_string(), what });
    }
    // The other methods' plans are the best of parallel ones, even where they run one task after another.
    let serial = is_serial(plan)
        && (matches!(plan.method.as_str(), "sequential" | "interval" | "imported")
            || plan.method.starts_with("single:"));
    let (schedule, claim, costs) = if serial && plan.method == "sequential" {
        let claim = Claim { rule: Rule::PaperSequential, value: plan.claimed, simulated_ms: plan.simulated_ms };
        (plan.clone(), claim, Costs::Operators)
    } else if plan.objective == Objective::Throughput {
        // What can be checked without running the stream: the busiest resource's work. Slowdown makes the period longer.
        let value = plan.own.as_ref().map_or(plan.claimed, |own| own.value);
        let claim = Claim { rule: Rule::Period, value, simulated_ms: plan.simulated_ms };
        (plan.clone(), claim, Costs::Segments)
    } else if serial {
        let claim = Claim { rule: Rule::BusySum, value: plan.claimed, simulated_ms: plan.simulated_ms };
        (plan.clone(), claim, Costs::Segments)
    } else {
        expand::parallel(&views, plan)?
    };
    // A mode of a unit, of which only the whole model is known: proofs are over the units, and no mode is faster than the bound.
    let mut units = first.table.units.clone();
    units.extend(
        plan.units
            .iter()
            .map(|unit| &unit.address)
            .filter(|unit| mode_at(requests[0].profile, unit).is_some())
            .cloned(),
    );
    let least_on_modes = match (units.len() > first.unit_count(), plan.objective) {
        (true, Objective::Latency) => crate::whole::least_on_modes(&requests[0]),
        _ => f64::INFINITY,
    };
    let tasks = tasks(&units, &schedule)?;
    let proofs = match claim.rule {
        Rule::PaperSequential => vec![proofs::paper_sequential(first)],
        Rule::BusySum => {
            let mut proofs = proofs::serial(first)?;
            // One segment after another takes what it is busy: bounds on every plan's makespan hold too.
            if plan.objective == Objective::Latency && first.graph.len() <= MOST_BOUNDED_TWICE {
                proofs.extend(proofs::parallel(&views, &schedule, costs, Rule::Makespan)?);
            }
            proofs
        }
        _ => proofs::parallel(&views, &schedule, costs, claim.rule)?,
    };
    let counts = |proof: &&Proof| match claim.rule {
        Rule::Energy => matches!(proof, Proof::Energy { .. }),
        Rule::WeightedCompletion => matches!(proof, Proof::Completions { .. }),
        _ => true,
    };
    let mut proofs = proofs;
    let mut best = proofs.iter().filter(counts).map(Proof::value).fold(0.0, f64::max);
    let searched = plan.own.as_ref().is_some_and(|own| {
        own.exact && !own.over.ends_with(AT_ONCE) && (own.value - claim.value).abs() <= 1e-9 * own.value
    });
    let small = views.len() == 1 && first.graph.len() <= SEARCHED_OPERATORS && first.unit_count() <= SEARCHED_UNITS;
    if claim.rule == Rule::Makespan
        && costs == Costs::Operators
        && plan.requests.is_empty()
        && plan.tasks.iter().all(|task| (task.item, task.iteration) == (0, 0))
        && searched
        && small
        && best < claim.value * (1.0 - 1e-9)
    {
        proofs.push(Proof::Search { value: claim.value });
        best = claim.value;
    }
    Ok(Certificate {
        format: CERTIFICATE_FORMAT.to_owned(),
        version: CERTIFICATE_VERSION,
        method: plan.method.clone(),
        objective: plan.objective,
        models: plan
            .models
            .iter()
            .map(|model| CertifiedModel {
                name: model.name.clone(),
                fingerprint: model.fingerprint.clone(),
                granularity: model.granularity,
            })
            .collect(),
        units,
        fixed: fixed(&views),
        requests: plan
            .requests
            .iter()
            .map(|request| CertifiedRequest {
                model: request.model,
                item: request.item,
                request: request.request,
                arrival_ms: request.arrival_ms,
                weight: (claim.rule == Rule::WeightedCompletion).then_some(request.weight),
            })
            .collect(),
        links: plan.links.clone(),
        tasks,
        bound: Some(CertifiedBound { costs, value: best.min(claim.value).min(least_on_modes), proofs }),
        claim,
    })
}

/// The view of one of several requests: of a workload's pins each needs to match somewhere, not in every model.
fn view_of<'a>(request: &PlanRequest<'a>, requests: usize) -> Result<CostView<'a>, PlanError> {
    let mut own = request.clone();
    own.units.retain(|unit| mode_at(request.profile, unit).is_none());
    if requests == 1 {
        return CostView::new(&own);
    }
    own.pins.retain(|pin| request.graph.operators.iter().any(|operator| pin.matches(operator)));
    CostView::new(&own)
}

fn fixed(views: &[&CostView<'_>]) -> Vec<Fixed> {
    let of = |(model, view): (usize, &&CostView<'_>)| -> Vec<Fixed> {
        let pinned = view.graph.ids().filter_map(|operator| {
            let (unit, _) = view.pinned[operator.index()].as_ref()?;
            Some(Fixed { model, operator, unit: *unit })
        });
        pinned.collect()
    };
    views.iter().enumerate().flat_map(of).collect()
}

fn tasks(units: &[UnitAddress], plan: &Plan) -> Result<Vec<CertifiedTask>, PlanError> {
    let mut times = vec![(0.0, 0.0); plan.tasks.len()];
    for span in plan.timeline.lanes.iter().flat_map(|lane| &lane.spans) {
        times[span.task.0 as usize] = (span.start_ms, span.end_ms);
    }
    let index = |address: &UnitAddress| {
        units.iter().position(|unit| unit == address).ok_or_else(|| trefoil_core::CoreError::UnknownUnit {
            want: address.to_string(),
            have: units.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        })
    };
    plan.tasks
        .iter()
        .zip(times)
        .map(|(task, (start_ms, end_ms))| {
            let (model, operators, tensor, from) = match &task.work {
                Work::Segment { segment } => {
                    let segment = &plan.segments[segment.0 as usize];
                    (segment.model, Some(segment.operators.clone()), None, None)
                }
                Work::Transfer { model, tensor, from } => {
                    (*model, None, Some(*tensor), from.as_ref().map(index).transpose()?)
                }
                Work::Blocks { .. } => {
                    let reason = "no certificate for blocks of a video".to_owned();
                    return Err(PlanError::Stuck { reason });
                }
            };
            Ok(CertifiedTask {
                unit: index(&task.unit)?,
                model,
                item: task.item,
                iteration: task.iteration,
                operators,
                tensor,
                from,
                ms: task.cost.ms,
                start_ms,
                end_ms,
            })
        })
        .collect()
}
