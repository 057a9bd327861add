//! `pareto`: the plans of which none is beaten in time, energy and memory at once.
//!
//! * On a **chain** (every job reads only what the one before made) nothing overlaps, so times and energies add up and a
//!   label-setting shortest path over (job, unit) is exact: a state keeps every partial plan that no other beats. Memory counts
//!   weights once per unit that uses them, so weights that several jobs share (iterations, items) cost more when those jobs
//!   are spread; a label remembers which it has loaded where. Limits of the units are obeyed.
//! * **Elsewhere** the front is a heuristic: the planners' own plans, and the steps of walks between them that move one group
//!   of jobs at a time, best exchange of time for energy (or memory) first, each scored by the simulator.
//!
//! That is about operators that each run alone ([`pareto`]). [`pareto_plans`] makes plans of them, whose neighbours merge into segments;
//! the other planners' plans and splits for mixtures of time and energy compete, and all are scored by the simulator as they stand.

mod chain;

use crate::list_scheduling::{fastest_unit, heft, ranked};
use crate::problem::{Problem, Schedule};
use crate::view::CostView;
use crate::{PlanError, PlanOptions, PlanRequest, plan_with};
use chain::{chain_front, chain_order};
use std::collections::BTreeMap;
use trefoil_core::{Objective, Plan};

/// What a plan costs.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Cost {
    /// Makespan in milliseconds.
    pub latency_ms: f64,
    /// Energy in joules; `None` where powers are unknown.
    pub energy_j: Option<f64>,
    /// Bytes of weights, once per unit that uses them.
    pub memory_bytes: u64,
}

impl Cost {
    /// Whether this is at most the other in everything.
    fn covers(&self, other: &Self) -> bool {
        self.latency_ms <= other.latency_ms * (1.0 + ROUNDING)
            && self.energy_j.unwrap_or(0.0) <= other.energy_j.unwrap_or(0.0) * (1.0 + ROUNDING)
            && self.memory_bytes <= other.memory_bytes
    }
}

/// A plan of the front.
#[derive(Debug, Clone, PartialEq)]
pub struct FrontPoint {
    /// What it costs.
    pub cost: Cost,
    /// The plan.
    pub schedule: Schedule,
}

/// The front as plans, by latency.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PlanFront {
    /// Each with what it costs by the simulator, segments and all.
    pub points: Vec<(Cost, Plan)>,
    /// Whether it is the whole front.
    pub exact: bool,
}

/// Planners whose plans a front starts from, and which none of its points may be beaten by.
const SEEDS: [&str; 4] = ["dag", "auto", "interval", "sequential"];
/// Part of what is left of the budget that each of them may use.
const SEED_SHARE: f64 = 0.3;
/// Mixtures of time and energy for which split plans are searched.
const MIXTURES: [f64; 5] = [0.1, 0.3, 0.5, 0.7, 0.9];

/// The front of a model. `request.objective` does not matter; energies are told where every unit's power is known. Every point
/// is a plan scored like any other, and the plans of the other planners compete.
///
/// # Errors
/// [`PlanError::NoSplit`] when no plan obeys the units' memory limits; whatever is wrong with the request.
pub fn pareto_plans(request: &PlanRequest<'_>, options: &PlanOptions) -> Result<PlanFront, PlanError> {
    let view = CostView::new(&PlanRequest { objective: Objective::Latency, ..request.clone() })?;
    let mut plans: Vec<Plan> = Vec::new();
    let mut refused = None;
    for objective in [Objective::Latency, Objective::Energy] {
        for method in SEEDS {
            // Energy may not be plannable, and a seed is not owed.
            match plan_with(method, &PlanRequest { objective, ..request.clone() }, &options.part(SEED_SHARE)) {
                Ok(plan) => plans.push(plan),
                Err(error @ PlanError::Memory { .. }) => refused = refused.or(Some(error)),
                Err(_) => {}
            }
        }
    }
    plans.extend((0..view.unit_count()).filter_map(|unit| crate::whole::single(&view, unit).ok()));
    plans.extend(mixed(CostView::new(&PlanRequest { objective: Objective::Latency, ..request.clone() })?, options));
    let mut exact = false;
    // An operator that runs inside larger segments only has no schedule of its own.
    if let Ok(problem) = Problem::from_view(&view) {
        let seeds: Vec<Schedule> = plans.iter().map(|plan| schedule_of(&problem, plan)).collect();
        let front = pareto(&problem, &seeds);
        // What is exact about lone operators is exact about all plans where segments save nothing.
        let least = Problem::of_least(&view)?;
        exact = front.exact
            && least.dense.ms.iter().zip(&problem.dense.ms).all(|(least, ms)| least >= &(ms * (1.0 - ROUNDING)));
        for point in front.points {
            plans.push(problem.to_plan(&[&view], &point.schedule, "pareto", true)?);
        }
    }
    let mut points: Vec<(Cost, Plan)> = Vec::new();
    for mut plan in plans {
        if plan.over_memory(&[view.graph]).is_some() {
            continue;
        }
        let cost = cost_of(&plan, &view);
        "pareto".clone_into(&mut plan.method);
        plan.objective = Objective::Latency;
        plan.claimed = cost.latency_ms;
        plan.simulated_j = cost.energy_j;
        plan.own = None;
        points.push((cost, plan));
    }
    if points.is_empty() && !view.graph.is_empty() {
        return Err(refused.unwrap_or_else(|| view.no_split("every plan found exceeds the memory of a unit")));
    }
    let (mut points, _) = undominated(points);
    let bound = crate::judge::bound_of_all(&view)?;
    for (_, plan) in &mut points {
        plan.model_bound = None;
        (plan.gap, plan.exact) = (None, false);
        crate::judge::judge(plan, &[&view], crate::problem::Goal::Makespan, bound)?;
        plan.own = None;
    }
    Ok(PlanFront { points, exact })
}

/// What a plan costs by the simulator.
fn cost_of(plan: &Plan, view: &CostView<'_>) -> Cost {
    let energy = crate::quality::plan_value(plan, &[view], crate::problem::Goal::Energy);
    Cost {
        latency_ms: plan.simulated_ms,
        energy_j: energy.ok(),
        memory_bytes: plan.weights_held(&[view.graph]).into_values().fold(0, u64::saturating_add),
    }
}

/// Splits into segments that are best for mixtures of time and energy.
fn mixed(mut view: CostView<'_>, options: &PlanOptions) -> Vec<Plan> {
    let Some(watts) = view.table.watts.iter().copied().collect::<Option<Vec<f64>>>() else { return Vec::new() };
    let mean = watts.iter().sum::<f64>() / watts.len().max(1) as f64;
    let mut plans = Vec::new();
    for share in MIXTURES.into_iter().filter(|_| mean > 0.0) {
        if options.is_over() {
            break;
        }
        view.per_ms = watts.iter().map(|watts| share + (1.0 - share) * watts / mean).collect();
        plans.extend(crate::interval::interval(&view, options));
    }
    plans
}

/// A plan's placement and order, of lone operators.
pub(crate) fn schedule_of(problem: &Problem, plan: &Plan) -> Schedule {
    let mut start = vec![0.0; plan.tasks.len()];
    for span in plan.timeline.lanes.iter().flat_map(|lane| &lane.spans) {
        start[span.task.0 as usize] = span.start_ms;
    }
    let mut place: BTreeMap<(u32, u32, u32, u32), (f64, u32)> = BTreeMap::new();
    for (task, &start) in plan.tasks.iter().zip(&start) {
        let trefoil_core::Work::Segment { segment } = task.work else { continue };
        let segment = &plan.segments[segment.0 as usize];
        let unit = problem.units().iter().position(|unit| unit.address == segment.unit).unwrap_or(0) as u32;
        for id in &segment.operators {
            place.insert((segment.model, task.item, task.iteration, id.0), (start, unit));
        }
    }
    let at: Vec<(f64, u32)> = problem
        .jobs()
        .iter()
        .map(|job| {
            let operator = job.operators.first().map_or(0, |id| id.0);
            place.get(&(job.model, job.item, job.iteration, operator)).copied().unwrap_or((0.0, 0))
        })
        .collect();
    let mut order = problem.topological().to_vec();
    // Stable: operators of one segment, and whatever starts at once, stay in topological order.
    order.sort_by(|&a, &b| at[a as usize].0.total_cmp(&at[b as usize].0));
    Schedule::from_jobs(problem, at.iter().map(|place| place.1).collect(), &order)
}

/// The front, by latency.
#[derive(Debug, Clone, PartialEq)]
pub struct Front {
    /// Plans of which none covers another.
    pub points: Vec<FrontPoint>,
    /// Whether it is the whole front: a chain on which no partial plan had to be dropped.
    pub exact: bool,
}

/// Relative slack under which two sums count as equal.
const ROUNDING: f64 = 1e-9;
/// Most points that a front gives; of more, those nearest to an even spread over latency are kept.
const MOST_POINTS: usize = 64;
/// Steps of one walk between two plans.
const WALK_STEPS: usize = 48;

/// The front of a problem. Plans that exceed a unit's memory are left out; the front is empty if all do.
pub fn pareto(problem: &Problem, seeds: &[Schedule]) -> Front {
    let shared = Weights::new(problem);
    if let Some(order) = chain_order(problem)
        && let Some(front) = chain_front(problem, &order, &shared)
    {
        return front;
    }
    walk_front(problem, seeds, &shared)
}

/// Weights by number: jobs of equal model and operators share them.
struct Weights {
    number: Vec<usize>,
    bytes: Vec<u64>,
    /// How many jobs use each.
    users: Vec<usize>,
}

impl Weights {
    fn new(problem: &Problem) -> Self {
        let mut numbers = BTreeMap::new();
        let (mut bytes, mut users, mut number) = (Vec::new(), Vec::new(), Vec::new());
        for job in problem.jobs() {
            let next = bytes.len();
            let at = *numbers.entry((job.model, &job.operators)).or_insert(next);
            if at == next {
                bytes.push(job.weight_bytes);
                users.push(0);
            }
            users[at] += 1;
            number.push(at);
        }
        Self { number, bytes, users }
    }

    /// Bytes by unit of a placement.
    fn held(&self, unit_of: &[u32], units: usize) -> Vec<u64> {
        let mut held = vec![0; units];
        let mut seen = vec![false; self.bytes.len() * units];
        for (job, &unit) in unit_of.iter().enumerate() {
            let slot = self.number[job] * units + unit as usize;
            if !std::mem::replace(&mut seen[slot], true) {
                held[unit as usize] += self.bytes[self.number[job]];
            }
        }
        held
    }
}

fn fits(problem: &Problem, held: &[u64]) -> bool {
    problem.units().iter().zip(held).all(|(unit, &held)| unit.memory_bytes.is_none_or(|most| held <= most))
}

/// Keeps points that no other covers, by latency; the second value tells whether more were left than are given.
fn undominated<T>(mut points: Vec<(Cost, T)>) -> (Vec<(Cost, T)>, bool) {
    points.sort_by(|(a, _), (b, _)| {
        let key = |cost: &Cost| (cost.energy_j.unwrap_or(0.0), cost.memory_bytes);
        a.latency_ms.total_cmp(&b.latency_ms).then(key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal))
    });
    let mut kept: Vec<(Cost, T)> = Vec::new();
    for point in points {
        if !kept.iter().any(|other| other.0.covers(&point.0)) {
            kept.retain(|other| !point.0.covers(&other.0));
            kept.push(point);
        }
    }
    let thinned = kept.len() > MOST_POINTS;
    if thinned {
        let last = kept.len() - 1;
        let wanted: std::collections::BTreeSet<usize> =
            (0..MOST_POINTS).map(|at| at * last / (MOST_POINTS - 1)).collect();
        let mut index = 0;
        kept.retain(|_| {
            index += 1;
            wanted.contains(&(index - 1))
        });
    }
    (kept, thinned)
}

/// The heuristic front: seeds, and walks between the extreme ones.
fn walk_front(problem: &Problem, seeds: &[Schedule], weights: &Weights) -> Front {
    let mut starts: Vec<Schedule> = seeds.to_vec();
    starts.extend([heft(problem), fastest_unit(problem), ranked(problem, least_energy(problem))]);
    starts.extend((0..problem.units().len()).filter_map(|unit| alone(problem, unit)));
    let mut points: Vec<(Cost, FrontPoint)> = Vec::new();
    let score = |schedule: Schedule, points: &mut Vec<(Cost, FrontPoint)>| {
        let Ok(evaluation) = problem.evaluate(&schedule) else { return };
        let held = weights.held(&schedule.unit, problem.units().len());
        if fits(problem, &held) {
            let cost = Cost {
                latency_ms: evaluation.makespan_ms,
                energy_j: evaluation.energy_j,
                memory_bytes: held.iter().copied().fold(0, u64::saturating_add),
            };
            points.push((cost, FrontPoint { cost, schedule }));
        }
    };
    for schedule in &starts {
        score(schedule.clone(), &mut points);
    }
    let (front, _) = undominated(points.clone());
    // From each plan of the front towards the next one, and towards the one of least energy.
    let pairs: Vec<(usize, usize)> = (0..front.len())
        .flat_map(|at| [(at, at + 1), (at, front.len().saturating_sub(1))])
        .filter(|&(from, to)| from < to && to < front.len())
        .take(8)
        .collect();
    for (from, to) in pairs {
        for schedule in walk(problem, &front[from].1.schedule, &front[to].1.schedule) {
            score(schedule, &mut points);
        }
    }
    Front { points: undominated(points).0.into_iter().map(|point| point.1).collect(), exact: false }
}

/// Each job where it takes the least energy alone.
fn least_energy(problem: &Problem) -> Vec<u32> {
    let watts: Vec<f64> = problem.units().iter().map(|unit| unit.watts.unwrap_or(1.0)).collect();
    let joules = |ms: f64, unit: usize| if ms.is_finite() { ms * watts[unit] } else { f64::INFINITY };
    let best =
        |ms: &[f64]| (0..ms.len()).min_by(|&a, &b| joules(ms[a], a).total_cmp(&joules(ms[b], b))).unwrap_or(0) as u32;
    problem.jobs().iter().map(|job| best(&job.ms)).collect()
}

/// Everything on one unit, where it runs there.
fn alone(problem: &Problem, unit: usize) -> Option<Schedule> {
    let runs = problem.jobs().iter().all(|job| job.ms[unit].is_finite());
    runs.then(|| Schedule::from_jobs(problem, vec![unit as u32; problem.jobs().len()], problem.topological()))
}

/// Placements on the way from one to another, jobs that save the most energy per millisecond lost first.
fn walk(problem: &Problem, from: &Schedule, to: &Schedule) -> Vec<Schedule> {
    let watts: Vec<f64> = problem.units().iter().map(|unit| unit.watts.unwrap_or(1.0)).collect();
    let exchange = |job: usize| {
        let (a, b) = (from.unit[job] as usize, to.unit[job] as usize);
        let ms = &problem.jobs()[job].ms;
        let saved = ms[a] * watts[a] - ms[b] * watts[b];
        let lost = ms[b] - ms[a];
        if lost <= 0.0 { f64::INFINITY } else { saved / lost }
    };
    let mut moving: Vec<usize> = (0..from.unit.len()).filter(|&job| from.unit[job] != to.unit[job]).collect();
    moving.sort_by(|&a, &b| exchange(b).total_cmp(&exchange(a)).then(a.cmp(&b)));
    let size = moving.len().div_ceil(WALK_STEPS).max(1);
    let mut unit_of = from.unit.clone();
    let mut steps = Vec::new();
    for group in moving.chunks(size) {
        for &job in group {
            unit_of[job] = to.unit[job];
        }
        steps.push(ranked(problem, unit_of.clone()));
    }
    steps
}
