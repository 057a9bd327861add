//! Witnesses of lower bounds.

use super::prices::{Prices, with_memory};
use super::shares::{Share, priced_energy, priced_load};
use super::{Costs, Cut, ExecutionPotentials, MemoryPrices, Proof, Rule};
use crate::bounds::{Blocks, LeastTimes, by_request, completions, placed_bound, priced};
use crate::cuts::IntervalGraph;
use crate::problem::{Instance, Link, Problem, ProblemRequest};
use crate::sequential::PaperCosts;
use crate::view::CostView;
use crate::{Factors, PlanError};
use std::collections::BTreeMap;
use trefoil_core::{LinkEnd, OperatorId, Plan};

/// Chains above this many operators are certified by their operators' least costs only: potentials of all intervals are
/// quadratic to check.
const MOST_CHAIN: usize = 1_000;
/// Chains above this many operators are certified without prices of memory, each of which looks at all intervals.
const MOST_PRICED_CHAIN: usize = 200;
/// Rounds of weight updates for the whole load and between cuts.
const ROUNDS: usize = 300;
const BLOCK_ROUNDS: usize = 40;

/// Potentials of BIDENT's graph: the costs of the shortest paths themselves.
pub(super) fn paper_sequential(view: &CostView<'_>) -> Proof {
    let costs = PaperCosts::new(view);
    let units = view.unit_count();
    let mut potentials: Vec<Vec<f64>> = Vec::with_capacity(view.graph.len());
    let mut left = vec![0.0; units];
    for at in 0..view.graph.len() {
        let row: Vec<f64> = (0..units)
            .map(|unit| {
                let (work, enter) = (costs.w[at * units + unit], costs.h2d[at * units + unit]);
                let reached = match potentials.last() {
                    None => enter,
                    Some(before) => (0..units)
                        .map(|from| if from == unit { before[from] } else { left[from] + enter })
                        .fold(f64::INFINITY, f64::min),
                };
                reached + work
            })
            .collect();
        left = (0..units).map(|unit| row[unit] + costs.d2h[at * units + unit]).collect();
        potentials.push(row);
    }
    Proof::PaperSequential { value: left.into_iter().fold(f64::INFINITY, f64::min), potentials }
}

/// Bounds on plans that run one segment after another.
pub(super) fn serial(view: &CostView<'_>) -> Result<Vec<Proof>, PlanError> {
    let problem = Problem::of_least(view)?;
    let every = |prices: Prices<'_>| Proof::Serial {
        value: every_operator(view, prices.charges) - prices.allowance,
        memory: prices.named(&problem),
    };
    let mut proofs = vec![with_memory(&problem, &every)];
    let count = view.graph.len();
    if view.dag.is_chain() && (1..=MOST_CHAIN).contains(&count) {
        let chain = |prices: Prices<'_>| {
            let (value, potentials) = chain(view, prices.charges);
            Proof::Chain { value: value - prices.allowance, potentials, memory: prices.named(&problem) }
        };
        proofs.push(if count <= MOST_PRICED_CHAIN { with_memory(&problem, &chain) } else { chain(Prices::default()) });
    }
    Ok(proofs)
}

/// Every operator's least price and charge.
fn every_operator(view: &CostView<'_>, charges: &[f64]) -> f64 {
    let units = view.unit_count();
    let least = |id: OperatorId| {
        let prices = (0..units).filter(|&unit| view.possible(id, unit)).map(|unit| {
            let charge = charges.get(id.index() * units + unit).copied().unwrap_or(0.0);
            view.estimates[unit].least[id.index()] * view.per_ms[unit] + charge
        });
        prices.reduce(f64::min).unwrap_or(0.0)
    };
    view.graph.ids().map(least).sum()
}

/// Forward potentials of the interval graph in which every position is a cut. A tensor is charged where it is certain which
/// unit made it: in the last operator before the cut, or at the host when nobody has read it before.
///
/// `charges` are what operators cost on units beyond their time, row-major operators × units; empty for nothing.
fn chain(view: &CostView<'_>, charges: &[f64]) -> (f64, Vec<Vec<f64>>) {
    let charge = |at: usize, unit: usize| charges.get(at * view.unit_count() + unit).copied().unwrap_or(0.0);
    let (count, units) = (view.graph.len(), view.unit_count());
    let order: Vec<OperatorId> = view.graph.ids().collect();
    let graph = IntervalGraph::new(view, &order, (0..=count).collect());
    let mut potentials = vec![vec![f64::INFINITY; units]; count + 1];
    potentials[0] = vec![0.0; units];
    for start in 0..count {
        let certain: Vec<(usize, usize)> = graph.live[start]
            .iter()
            .copied()
            .filter(|&(next, index)| {
                let crossing = &graph.crossings[index];
                match crossing.producer {
                    Some(block) => block + 1 == start,
                    None => crossing.consumers.first() == Some(&next),
                }
            })
            .collect();
        for unit in 0..units {
            let mut entering = certain.iter().peekable();
            let (mut moved, mut host, mut weights) = (vec![0.0; units], 0.0, 0.0);
            for end in start + 1..=count {
                weights += charge(end - 1, unit);
                while let Some(&(_, index)) = entering.next_if(|&&(block, _)| block < end) {
                    let crossing = &graph.crossings[index];
                    if crossing.producer.is_some() {
                        moved.iter_mut().enumerate().for_each(|(from, sum)| *sum += crossing.price(from, unit, units));
                    } else {
                        host += crossing.price(units, unit, units);
                    }
                }
                let reached = if start == 0 {
                    0.0
                } else {
                    (0..units).map(|from| potentials[start][from] + moved[from]).fold(f64::INFINITY, f64::min)
                };
                let cost = reached + host + graph.whole(unit, start, end) + weights;
                potentials[end][unit] = potentials[end][unit].min(cost);
            }
        }
    }
    let value = potentials[count].iter().copied().fold(f64::INFINITY, f64::min);
    (value, potentials)
}

/// Bounds on parallel schedules: each model's critical path, the load of all of them together, and energy.
pub(super) fn parallel(
    views: &[&CostView<'_>],
    plan: &Plan,
    costs: Costs,
    rule: Rule,
) -> Result<Vec<Proof>, PlanError> {
    let mut executions: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for task in &plan.tasks {
        if let trefoil_core::Work::Segment { segment } = task.work {
            let model = plan.segments[segment.0 as usize].model;
            let count = executions.entry((model, task.item)).or_default();
            *count = (*count).max(task.iteration + 1);
        }
    }
    let arrival = |model: u32, item: u32| {
        let request = plan.requests.iter().find(|request| (request.model, request.item) == (model, item));
        request.map_or(0.0, |request| request.arrival_ms)
    };
    let (linked, repeated) = (!plan.links.is_empty(), executions.values().any(|&count| count > 1));
    let mut proofs = Vec::new();
    // Without arrivals, by model and item.
    let mut paths: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    let once = executions.len() == 1 && !linked && !repeated;
    for (model, view) in views.iter().enumerate().filter(|_| rule != Rule::Period && !linked) {
        let problem = one_execution(view, costs)?;
        let segments = (costs == Costs::Segments).then_some(*view);
        let mut proof = with_memory(&problem, &|prices| path(&problem, once, model, segments, prices));
        if let Proof::Path { value, .. } = &mut proof {
            let items = executions.keys().filter(|of| of.0 as usize == model);
            paths.extend(items.clone().map(|&of| (of, *value)));
            *value += items.map(|&(model, item)| arrival(model, item)).fold(0.0, f64::max);
        }
        proofs.push(proof);
    }
    let groups: Vec<Vec<Vec<OperatorId>>> =
        views.iter().map(|view| view.graph.ids().map(|id| vec![id]).collect()).collect();
    let instances: Vec<Instance> = executions
        .iter()
        .map(|(&(model, item), &iterations)| Instance { model: model as usize, item, iterations, request: 0 })
        .collect();
    if linked {
        let problem = linked_problem(views, &groups, plan, &instances, &arrival, costs)?;
        let mut least = LeastTimes::new(&problem);
        if costs == Costs::Segments {
            least.starts(views);
        }
        proofs.push(if rule == Rule::WeightedCompletion {
            // What it shows of each item counts, which prices of memory raise for some only.
            paths = times_of_items(&problem, &least, &arrival);
            workload_path(&problem, &least, Prices::default())
        } else {
            with_memory(&problem, &|prices| workload_path(&problem, &least, prices))
        });
    }
    let mut whole = priced_problem(views, &groups, &instances, &[], vec![ProblemRequest::default()], costs)?;
    if rule == Rule::Period {
        whole = without_slowdown(&whole)?;
    }
    let least = LeastTimes::new(&whole);
    let all: Vec<u32> = (0..whole.jobs().len() as u32).collect();
    // Repetitions share what the host hands in and out, and links replace it.
    let load = |prices: Prices<'_>| {
        let least = least.charging(prices.charges.to_vec());
        let (value, weights) = least.load(&whole, &all, !linked && !repeated, ROUNDS);
        let named = named(&whole, value, &weights);
        Proof::Load { value: value - prices.allowance, weights: named, memory: prices.named(&whole) }
    };
    let load = with_memory(&whole, &load);
    let shares: Vec<Share> = views
        .iter()
        .enumerate()
        .map(|(model, view)| {
            let of = executions.iter().filter(|entry| entry.0.0 as usize == model);
            let count = of.clone().map(|entry| f64::from(*entry.1)).sum();
            let once = !linked && of.clone().all(|entry| *entry.1 == 1);
            Ok(Share { model, problem: one_execution(view, costs)?, count, once })
        })
        .collect::<Result<_, PlanError>>()?;
    proofs.push(load.clone());
    if whole.units().len() <= priced::MOST_UNITS && rule != Rule::WeightedCompletion {
        proofs.extend(priced_load(&whole, &load, &shares, costs == Costs::Operators));
    }
    let from_start = plan.requests.iter().all(|request| request.arrival_ms <= 0.0);
    let each_once = executions.len() <= views.len() && !linked && !repeated && from_start;
    if matches!(rule, Rule::Makespan | Rule::Energy) && each_once {
        proofs.extend(placements(&whole, &least, &proofs, costs));
    }
    if rule == Rule::Energy {
        let makespan = proofs.iter().map(Proof::value).fold(0.0, f64::max);
        let idling = whole.idle_watts().unwrap_or(0.0) * makespan / 1e3;
        let without_transfers = energy(&whole, &least, makespan);
        let with_transfers = |prices: Prices<'_>| {
            let (work, payments) = priced_energy(&least, &shares, prices.per_byte);
            let value = work - prices.allowance + idling;
            Proof::Energy { value, payments, memory: prices.named(&whole) }
        };
        let with_transfers = with_memory(&whole, &with_transfers);
        proofs.push(if with_transfers.value() > without_transfers {
            with_transfers
        } else {
            Proof::Energy { value: without_transfers, payments: Vec::new(), memory: MemoryPrices::new() }
        });
    }
    if rule == Rule::WeightedCompletion {
        let mut requests: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for request in &plan.requests {
            let slot = requests.entry(request.request).or_insert((0.0, request.weight));
            slot.0 = slot.0.max(paths.get(&(request.model, request.item)).copied().unwrap_or(0.0));
        }
        let (sum, weights) = requests
            .values()
            .fold((0.0, 0.0), |(sum, weights), &(time, weight)| (sum + weight * time, weights + weight));
        let value = if weights > 0.0 { sum / weights } else { 0.0 };
        let by_paths = Proof::Completions { value, executions: Vec::new(), memory: MemoryPrices::new() };
        let limited = whole.units().iter().any(|unit| unit.memory_bytes.is_some());
        let priced = if limited { Some(priced_completions(views, &groups, plan, &instances, costs)?) } else { None };
        proofs.push(priced.filter(|priced| priced.value() > value).unwrap_or(by_paths));
    }
    Ok(proofs)
}

/// Partial placements that are looked at for each value that is tried.
const PLACED_NODES: u64 = 50_000;

/// What no placement of few operators takes less than, if that is more than what the proofs so far show.
fn placements(whole: &Problem, least: &LeastTimes, proofs: &[Proof], costs: Costs) -> Option<Proof> {
    let known = proofs.iter().map(Proof::value).fold(0.0, f64::max);
    let classed = costs == Costs::Operators;
    let by_class = proofs.iter().rev().find_map(|proof| match proof {
        Proof::PricedLoad { weights, .. } => Some(weights.clone()),
        Proof::Load { weights, .. } => {
            Some(weights.iter().map(|(unit, &weight)| (unit.clone(), [weight; 2])).collect::<BTreeMap<_, _>>())
        }
        _ => None,
    })?;
    let flat: Vec<f64> = whole
        .units()
        .iter()
        .flat_map(|unit| by_class.get(&unit.address.to_string()).copied().unwrap_or_default())
        .collect();
    let (value, weights) = placed_bound(whole, least, classed, known, &flat, PLACED_NODES)?;
    let names = whole.units().iter().map(|unit| unit.address.to_string());
    let pairs = weights.chunks_exact(2).map(|pair| [pair[0], pair[usize::from(classed)]]);
    (value > known).then(|| Proof::Placements { value, weights: names.zip(pairs).collect() })
}

/// The mean of what requests take at least, with prices of memory.
fn priced_completions(
    views: &[&CostView<'_>],
    groups: &[Vec<Vec<OperatorId>>],
    plan: &Plan,
    instances: &[Instance],
    costs: Costs,
) -> Result<Proof, PlanError> {
    let mut numbers: BTreeMap<u32, u32> = BTreeMap::new();
    let mut requests = Vec::new();
    let mut instances = instances.to_vec();
    for instance in &mut instances {
        let of = (instance.model as u32, instance.item);
        let asked = plan.requests.iter().find(|request| (request.model, request.item) == of);
        let Some(asked) = asked else {
            return Err(PlanError::Stuck { reason: format!("item {} of model {} belongs to no request", of.1, of.0) });
        };
        instance.request = *numbers.entry(asked.request).or_insert_with(|| {
            let (release_ms, weight) = (asked.arrival_ms, asked.weight);
            requests.push(ProblemRequest { release_ms, weight, ..ProblemRequest::default() });
            requests.len() as u32 - 1
        });
    }
    let links = links_of(plan, &instances)?;
    let problem = priced_problem(views, groups, &instances, &links, requests, costs)?;
    let mut least = LeastTimes::new(&problem);
    if costs == Costs::Segments {
        least.starts(views);
    }
    Ok(with_memory(&problem, &|prices| {
        let charged = by_request(&problem, &least.charging(prices.charges.to_vec()));
        let (mean, ends) = completions(&problem, &charged);
        let executions = executions(&problem, &ends);
        Proof::Completions { value: mean - prices.allowance, executions, memory: prices.named(&problem) }
    }))
}

/// Links between instances.
fn links_of(plan: &Plan, instances: &[Instance]) -> Result<Vec<Link>, PlanError> {
    let end = |end: LinkEnd| {
        let number = instances.iter().position(|one| (one.model, one.item) == (end.model as usize, end.item));
        let lost = || PlanError::Stuck { reason: format!("a link names item {}, which is not executed", end.item) };
        number.map(|number| (number, end.tensor)).ok_or_else(lost)
    };
    plan.links.iter().map(|link| Ok(Link { from: end(link.from)?, to: end(link.to)? })).collect()
}

/// The problem of a plan with links: an instance of each (model, item), each arriving as its request does.
fn linked_problem(
    views: &[&CostView<'_>],
    groups: &[Vec<Vec<OperatorId>>],
    plan: &Plan,
    instances: &[Instance],
    arrival: &dyn Fn(u32, u32) -> f64,
    costs: Costs,
) -> Result<Problem, PlanError> {
    let links = links_of(plan, instances)?;
    let instances: Vec<Instance> =
        instances.iter().zip(0..).map(|(one, request)| Instance { request, ..one.clone() }).collect();
    let requests = instances
        .iter()
        .map(|one| ProblemRequest { release_ms: arrival(one.model as u32, one.item), ..ProblemRequest::default() })
        .collect();
    priced_problem(views, groups, &instances, &links, requests, costs)
}

/// Earliest ends over arrivals, links and repetitions.
fn workload_path(problem: &Problem, least: &LeastTimes, prices: Prices<'_>) -> Proof {
    let least = least.charging(prices.charges.to_vec());
    let ends = least.earliest_ends(problem);
    let value = (0..problem.jobs().len()).map(|job| least.end_with_handover(problem, &ends, job)).fold(0.0, f64::max);
    let value = value - prices.allowance;
    Proof::WorkloadPath { value, executions: executions(problem, &ends), memory: prices.named(problem) }
}

/// Earliest ends by execution.
fn executions(problem: &Problem, ends: &[f64]) -> Vec<ExecutionPotentials> {
    let units = problem.units().len();
    let mut executions: Vec<ExecutionPotentials> = Vec::new();
    // Jobs are the operators in order, execution by execution.
    for (at, job) in problem.jobs().iter().enumerate() {
        let of = (job.model, job.item, job.iteration);
        if executions.last().is_none_or(|last| (last.model, last.item, last.iteration) != of) {
            let (model, item, iteration) = of;
            executions.push(ExecutionPotentials { model, item, iteration, potentials: Vec::new() });
        }
        if let Some(last) = executions.last_mut() {
            last.potentials.push(ends[at * units..][..units].to_vec());
        }
    }
    executions
}

/// By model and item: the least time from arrival to completion.
fn times_of_items(
    problem: &Problem,
    least: &LeastTimes,
    arrival: &dyn Fn(u32, u32) -> f64,
) -> BTreeMap<(u32, u32), f64> {
    let ends = least.earliest_ends(problem);
    let mut paths: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    for (at, job) in problem.jobs().iter().enumerate() {
        let slot = paths.entry((job.model, job.item)).or_insert(0.0);
        *slot = slot.max(least.end_with_handover(problem, &ends, at) - arrival(job.model, job.item));
    }
    paths
}

/// The problem whose jobs take what their operators cost one by one, or the least that they can add to a plan of segments.
fn priced_problem(
    views: &[&CostView<'_>],
    groups: &[Vec<Vec<OperatorId>>],
    instances: &[Instance],
    links: &[Link],
    requests: Vec<ProblemRequest>,
    costs: Costs,
) -> Result<Problem, PlanError> {
    let of = if costs == Costs::Operators { Problem::from_instances } else { Problem::least_of_instances };
    of(views, groups, instances, links, requests)
}

/// The same for one execution of one model.
fn one_execution(view: &CostView<'_>, costs: Costs) -> Result<Problem, PlanError> {
    if costs == Costs::Operators { Problem::from_view(view) } else { Problem::of_least(view) }
}

/// The same problem on units that leave each other alone: a period counts no slowdown.
pub(crate) fn without_slowdown(problem: &Problem) -> Result<Problem, PlanError> {
    Problem::new(
        problem.units().to_vec(),
        problem.resources().to_vec(),
        problem.jobs().to_vec(),
        problem.tensors().to_vec(),
        problem.requests().to_vec(),
        Factors::none(problem.units().len()),
        problem.idle_watts(),
    )
}

/// Weights by unit; none at all show that nothing is less than 0.
fn named(problem: &Problem, value: f64, weights: &[f64]) -> BTreeMap<String, f64> {
    let names = problem.units().iter().map(|unit| unit.address.to_string());
    names.zip(weights.iter().map(|&weight| if value > 0.0 { weight } else { 0.0 })).collect()
}

/// Earliest ends, with the load between cuts where a model is executed once. Over plans of `segments` every segment costs
/// something beyond its operators.
fn path(problem: &Problem, series: bool, model: usize, segments: Option<&CostView<'_>>, prices: Prices<'_>) -> Proof {
    let mut least = LeastTimes::new(problem).charging(prices.charges.to_vec());
    if let Some(view) = segments {
        least.starts(&[view]);
    }
    let units = problem.units().len();
    let blocks = if series { Blocks::new(problem) } else { Blocks::default() };
    let mut ends = vec![f64::INFINITY; problem.jobs().len() * units];
    let mut cuts: Vec<Cut> = Vec::new();
    let mut before_cut = 0.0;
    // Jobs are the operators in order.
    for &job in problem.topological() {
        let at = job as usize;
        let cut = blocks.number.get(at).copied().flatten();
        let mut floor = 0.0;
        if let Some(number) = cut {
            let mut weights = None;
            if blocks.inside[number].len() > 1 {
                let (load, found) = least.load(problem, &blocks.inside[number], false, BLOCK_ROUNDS);
                floor = before_cut + load;
                weights = Some(named(problem, load, &found));
            }
            cuts.push(Cut { operator: problem.jobs()[at].operators[0], weights });
        }
        for unit in 0..units {
            let mut start = floor;
            let begins = least.start(problem, at, unit);
            if problem.dense.inputs.row(at).is_empty() {
                start += begins;
            }
            for &tensor in problem.dense.inputs.row(at) {
                let tensor = tensor as usize;
                let price = |from: usize| {
                    let transfer = problem.dense.transfer(tensor, from, unit) * least.transfer_factor(unit);
                    transfer + if from == unit { 0.0 } else { begins }
                };
                let there = match problem.dense.producer[tensor] {
                    u32::MAX => price(units),
                    maker => (0..units)
                        .map(|from| ends[maker as usize * units + from] + price(from))
                        .fold(f64::INFINITY, f64::min),
                };
                start = start.max(there);
            }
            ends[at * units + unit] = start + least.ms(at, unit);
        }
        if cut.is_some() {
            before_cut = ends[at * units..][..units].iter().copied().fold(f64::INFINITY, f64::min);
        }
    }
    let mut value =
        (0..problem.jobs().len()).map(|job| least.end_with_handover(problem, &ends, job)).fold(0.0, f64::max);
    let mut tail = None;
    if let Some(inside) = blocks.inside.last().filter(|inside| inside.len() > 1) {
        let (load, weights) = least.load(problem, inside, true, BLOCK_ROUNDS);
        value = value.max(before_cut + load);
        tail = Some(named(problem, load, &weights));
    }
    let potentials = ends.chunks_exact(units).map(<[f64]>::to_vec).collect();
    Proof::Path { value: value - prices.allowance, model, potentials, cuts, tail, memory: prices.named(problem) }
}

/// Idle power for the makespan, plus every job's least energy above idle.
fn energy(problem: &Problem, least: &LeastTimes, makespan: f64) -> f64 {
    let idle = problem.idle_watts().unwrap_or(0.0);
    let above = |unit: usize| (problem.units()[unit].watts.unwrap_or(0.0) - idle).max(0.0) / 1e3;
    let work: f64 = (0..problem.jobs().len())
        .map(|job| {
            let joules = (0..problem.units().len())
                .filter(|&unit| least.ms(job, unit).is_finite())
                .map(|unit| least.ms(job, unit) * above(unit));
            joules.fold(f64::INFINITY, f64::min)
        })
        .sum();
    work + idle * makespan / 1e3
}
