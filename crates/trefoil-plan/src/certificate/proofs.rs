//! Witnesses of lower bounds.

use super::{Costs, Cut, Payment, Proof, Rule};
use crate::bounds::priced::{self, Border, Part, Pricing};
use crate::bounds::{Blocks, Effort, LeastTimes};
use crate::cuts::IntervalGraph;
use crate::mincut::cut_payments;
use crate::problem::{Instance, Problem, ProblemRequest};
use crate::quality::cheapest_cuts;
use crate::sequential::PaperCosts;
use crate::view::CostView;
use crate::{Factors, PlanError};
use std::collections::BTreeMap;
use trefoil_core::{OperatorId, Plan};

/// Chains above this many operators are certified by their operators' least costs only: potentials of all intervals are
/// quadratic to check.
const MOST_CHAIN: usize = 1_000;
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
pub(super) fn serial(view: &CostView<'_>) -> Vec<Proof> {
    let mut proofs = vec![Proof::Serial { value: view.lower_bound() }];
    let count = view.graph.len();
    if view.dag.is_chain() && (1..=MOST_CHAIN).contains(&count) {
        proofs.push(chain(view));
    }
    proofs
}

/// Forward potentials of the interval graph in which every position is a cut. A tensor is charged where it is certain which
/// unit made it: in the last operator before the cut, or at the host when nobody has read it before.
fn chain(view: &CostView<'_>) -> Proof {
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
            let (mut moved, mut host) = (vec![0.0; units], 0.0);
            for end in start + 1..=count {
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
                let cost = reached + host + graph.whole(unit, start, end);
                potentials[end][unit] = potentials[end][unit].min(cost);
            }
        }
    }
    let value = potentials[count].iter().copied().fold(f64::INFINITY, f64::min);
    Proof::Chain { value, potentials }
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
    let mut proofs = Vec::new();
    // Without arrivals.
    let mut paths: Vec<f64> = Vec::new();
    let models = if rule == Rule::Period { &[][..] } else { views };
    let once = executions.len() == 1 && executions.values().all(|&count| count == 1);
    for (model, view) in models.iter().enumerate() {
        let problem = least_problem(&[view], Problem::from_view(view)?, costs)?;
        let segments = (costs == Costs::Segments).then_some(*view);
        let mut proof = path(&problem, once, model, segments);
        let latest = executions.keys().filter(|of| of.0 as usize == model).map(|of| arrival(of.0, of.1));
        if let Proof::Path { value, .. } = &mut proof {
            paths.push(*value);
            *value += latest.fold(0.0, f64::max);
        }
        proofs.push(proof);
    }
    let groups: Vec<Vec<Vec<OperatorId>>> =
        views.iter().map(|view| view.graph.ids().map(|id| vec![id]).collect()).collect();
    let instances: Vec<Instance> = executions
        .iter()
        .map(|(&(model, item), &iterations)| Instance { model: model as usize, item, iterations, request: 0 })
        .collect();
    let whole = Problem::from_instances(views, &groups, &instances, &[], vec![ProblemRequest::default()])?;
    let mut whole = least_problem(views, whole, costs)?;
    if rule == Rule::Period {
        whole = without_slowdown(&whole)?;
    }
    let least = LeastTimes::new(&whole);
    let all: Vec<u32> = (0..whole.jobs().len() as u32).collect();
    let (value, weights) = least.load(&whole, &all, true, ROUNDS);
    proofs.push(Proof::Load { value, weights: named(&whole, value, &weights) });
    let shares: Vec<Share> = views
        .iter()
        .enumerate()
        .map(|(model, view)| {
            let of = executions.iter().filter(|entry| entry.0.0 as usize == model);
            let count = of.clone().map(|entry| f64::from(*entry.1)).sum();
            let once = of.clone().all(|entry| *entry.1 == 1);
            Ok(Share { model, problem: least_problem(&[view], Problem::from_view(view)?, costs)?, count, once })
        })
        .collect::<Result<_, PlanError>>()?;
    if whole.units().len() <= priced::MOST_UNITS && rule != Rule::WeightedCompletion {
        proofs.extend(priced_load(&whole, &weights, &shares, costs == Costs::Operators));
    }
    if rule == Rule::Energy {
        let makespan = proofs.iter().map(Proof::value).fold(0.0, f64::max);
        let idling = whole.idle_watts().unwrap_or(0.0) * makespan / 1e3;
        let without_transfers = energy(&whole, &least, makespan);
        let (with_transfers, payments) = priced_energy(&least, &shares);
        let with_transfers = with_transfers + idling;
        proofs.push(if with_transfers > without_transfers {
            Proof::Energy { value: with_transfers, payments }
        } else {
            Proof::Energy { value: without_transfers, payments: Vec::new() }
        });
    }
    if rule == Rule::WeightedCompletion {
        let mut requests: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for request in &plan.requests {
            let slot = requests.entry(request.request).or_insert((0.0, request.weight));
            slot.0 = slot.0.max(paths.get(request.model as usize).copied().unwrap_or(0.0));
        }
        let (sum, weights) = requests
            .values()
            .fold((0.0, 0.0), |(sum, weights), &(time, weight)| (sum + weight * time, weights + weight));
        proofs.push(Proof::Completions { value: if weights > 0.0 { sum / weights } else { 0.0 } });
    }
    Ok(proofs)
}

/// One model's part of a workload.
struct Share {
    model: usize,
    /// One execution.
    problem: Problem,
    /// Executions.
    count: f64,
    /// Whether every item executes it once: only then each execution brings inputs and hands outputs over.
    once: bool,
}

impl Share {
    fn part(&self, classed: bool) -> Part {
        if self.once {
            return Part::whole(&self.problem, classed);
        }
        let mut local = vec![0; self.problem.jobs().len()];
        for (at, &job) in self.problem.topological().iter().enumerate() {
            local[job as usize] = at as u32;
        }
        let border = Border { local: &local, classed, ..Border::default() };
        Part::new(&self.problem, self.problem.topological(), border)
    }

    fn payments(&self, part: &Part, paid: &[f64]) -> Vec<Payment> {
        let rows = part.payments(paid).into_iter().filter(|row| row.2.iter().any(|&paid| paid != 0.0));
        rows.map(|(tensor, job, paid)| self.payment(tensor, job, paid)).collect()
    }

    fn payment(&self, tensor: u32, job: u32, paid: Vec<f64>) -> Payment {
        Payment {
            model: self.model,
            tensor: self.problem.tensors()[tensor as usize].tensor,
            reader: self.problem.jobs()[job as usize].operators[0],
            paid,
        }
    }
}

/// Rounds of the search for weights and payments.
const PRICED_ROUNDS: usize = 120;

/// The load with transfers: weights from the whole workload, payments for one execution of each model.
fn priced_load(whole: &Problem, weights: &[f64], shares: &[Share], classed: bool) -> Option<Proof> {
    let units = whole.units().len();
    let moments = priced::moments(whole, classed);
    let start: Vec<f64> = (0..2 * units).map(|at| weights[at / 2]).collect();
    let rounds = Effort::THOROUGH.rounds(whole.jobs().len(), units, 8, PRICED_ROUNDS);
    let part = Part::whole(whole, classed);
    let weights = Pricing::new(&part, &moments).search(Some(&start), rounds, rounds).1.weights;
    let (mut value, mut payments) = (0.0, Vec::new());
    for share in shares {
        let part = share.part(classed);
        let (least, paid) = Pricing::new(&part, &moments).at_prices(&weights, rounds);
        value += least * share.count;
        payments.extend(share.payments(&part, &paid));
    }
    let by_unit = |at: usize| [weights[2 * at], weights[2 * at + usize::from(classed)]];
    let names = whole.units().iter().enumerate().map(|(at, unit)| (unit.address.to_string(), by_unit(at)));
    (value > 0.0).then(|| Proof::PricedLoad { value, weights: names.collect(), payments })
}

/// Work and transfers at prices of watts above idling, in joules: a minimum cut for two units. 0 where a unit draws less
/// than idling.
fn priced_energy(least: &LeastTimes, shares: &[Share]) -> (f64, Vec<Payment>) {
    let (mut value, mut payments) = (0.0, Vec::new());
    for share in shares {
        let problem = &share.problem;
        let idle = problem.idle_watts().unwrap_or(0.0);
        let units = problem.units().len();
        let prices: Vec<f64> = (0..units)
            .map(|unit| (problem.units()[unit].watts.unwrap_or(0.0) - idle) * least.least_factor(unit))
            .collect();
        if prices.iter().any(|&price| price < 0.0) || units > priced::MOST_UNITS {
            return (0.0, Vec::new());
        }
        if share.once
            && let Some((cut, paid)) = cut_payments(problem, &prices)
        {
            value += cut * share.count;
            payments.extend(paid.into_iter().map(|((tensor, job), paid)| share.payment(tensor, job, vec![0.0, paid])));
            continue;
        }
        let part = share.part(false);
        let weights: Vec<f64> = (0..2 * units).map(|at| prices[at / 2]).collect();
        let rounds = Effort::THOROUGH.rounds(problem.jobs().len(), units, 8, PRICED_ROUNDS);
        let (cost, paid) = Pricing::new(&part, &[]).at_prices(&weights, rounds);
        value += cost * share.count;
        payments.extend(share.payments(&part, &paid));
    }
    (value / 1e3, payments)
}

/// The problem whose jobs take the least that their operators can add to a plan of segments.
fn least_problem(views: &[&CostView<'_>], problem: Problem, costs: Costs) -> Result<Problem, PlanError> {
    if costs == Costs::Operators { Ok(problem) } else { cheapest_cuts(&problem, views) }
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
fn path(problem: &Problem, series: bool, model: usize, segments: Option<&CostView<'_>>) -> Proof {
    let mut least = LeastTimes::new(problem);
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
    Proof::Path { value, model, potentials, cuts, tail }
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
