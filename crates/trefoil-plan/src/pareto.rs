//! `pareto`: the plans of which none is beaten in time, energy and memory at once.
//!
//! * On a **chain** (every job reads only what the one before made) nothing overlaps, so times and energies add up and a
//!   label-setting shortest path over (job, unit) is exact: a state keeps every partial plan that no other beats. Memory counts
//!   weights once per unit that uses them, so weights that several jobs share (iterations, items) cost more when those jobs
//!   are spread; a label remembers which it has loaded where. Limits of the units are obeyed.
//! * **Elsewhere** the front is a heuristic: the planners' own plans, and the steps of walks between them that move one group
//!   of jobs at a time, best exchange of time for energy (or memory) first, each scored by the simulator.

use crate::list_scheduling::{fastest_unit, heft, ranked};
use crate::problem::{Problem, Schedule};
use crate::view::CostView;
use crate::{PlanError, PlanOptions, PlanRequest, plan_with};
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
    /// Each with what it costs when every operator runs alone.
    pub points: Vec<(Cost, Plan)>,
    /// Whether it is the whole front.
    pub exact: bool,
}

/// The front of a model. `request.objective` does not matter; energies are told where every unit's power is known.
///
/// # Errors
/// [`PlanError::NoSplit`] when no plan obeys the units' memory limits; whatever is wrong with the request.
pub fn pareto_plans(request: &PlanRequest<'_>, options: &PlanOptions) -> Result<PlanFront, PlanError> {
    let view = CostView::new(&PlanRequest { objective: Objective::Latency, ..request.clone() })?;
    let problem = Problem::from_view(&view)?;
    let mut seeds = Vec::new();
    if chain_order(&problem).is_none() {
        for objective in [Objective::Latency, Objective::Energy] {
            for method in SEEDS {
                // Energy may not be plannable, and a seed is not owed.
                if let Ok(plan) = plan_with(method, &PlanRequest { objective, ..request.clone() }, options) {
                    seeds.push(schedule_of(&problem, &plan));
                }
            }
        }
    }
    let front = pareto(&problem, &seeds);
    if front.points.is_empty() && !problem.jobs().is_empty() {
        return Err(view.no_split("every plan found exceeds the memory of a unit"));
    }
    let points = front
        .points
        .iter()
        .map(|point| Ok((point.cost, problem.to_plan(&[&view], &point.schedule, "pareto", true)?)))
        .collect::<Result<_, PlanError>>()?;
    Ok(PlanFront { points, exact: front.exact })
}

/// Planners whose plans a heuristic front starts from.
const SEEDS: [&str; 3] = ["dag", "interval", "sequential"];

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
/// Most partial plans of a chain in all; each (job, unit) gets its part.
const MOST_LABELS: usize = 4_000_000;
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

/// The jobs in order, when each reads only what the one before made, only the first reads from the host and only the last
/// one's tensors go to the host: then nothing can overlap.
fn chain_order(problem: &Problem) -> Option<Vec<u32>> {
    let order = problem.topological();
    let mut place = vec![0usize; order.len()];
    order.iter().enumerate().for_each(|(at, &job)| place[job as usize] = at);
    let serial = order.windows(2).all(|pair| problem.successors(pair[0] as usize).contains(&pair[1]));
    let local = problem.tensors().iter().all(|tensor| {
        let readers = tensor.consumers.iter().map(|&job| place[job as usize]);
        match tensor.producer {
            Some(maker) => {
                let at = place[maker as usize];
                let goes = tensor.is_output && tensor.to_host_ms.iter().any(|&ms| ms > 0.0);
                readers.into_iter().all(|reader| reader == at + 1) && (!goes || at + 1 == order.len())
            }
            None => {
                let comes = tensor.transfer_ms[problem.units().len().pow(2)..].iter().any(|&ms| ms > 0.0);
                !comes || readers.into_iter().all(|reader| reader == 0)
            }
        }
    });
    let together = problem.requests().iter().all(|request| request.release_ms == 0.0);
    (serial && local && together).then(|| order.to_vec())
}

/// A partial plan: the jobs up to some place, the last of them on a known unit.
#[derive(Debug, Clone, PartialEq)]
struct Label {
    ms: f64,
    joules: f64,
    memory: u64,
    /// Bytes on each unit that limits memory.
    held: Vec<u64>,
    /// Which shared weights are loaded where, one bit per (shared weights, unit).
    loaded: u128,
    parent: u32,
}

struct Chain<'p> {
    problem: &'p Problem,
    weights: &'p Weights,
    /// Bit number of the first unit of shared weights that cost something to spread.
    bit: Vec<Option<u32>>,
    /// Units that limit memory.
    limited: Vec<usize>,
    /// Watts per unit; 0 where some are unknown, so that energy decides nothing.
    watts: Vec<f64>,
    /// Tensors that each job reads.
    reads: Vec<Vec<usize>>,
}

fn chain_front(problem: &Problem, order: &[u32], weights: &Weights) -> Option<Front> {
    let units = problem.units().len();
    let mut bits = 0u32;
    let bit: Vec<Option<u32>> = (0..weights.bytes.len())
        .map(|number| {
            let shared = weights.users[number] > 1 && weights.bytes[number] > 0;
            shared.then(|| {
                bits += units as u32;
                bits - units as u32
            })
        })
        .collect();
    if bits > u128::BITS {
        return None;
    }
    let known = problem.units().iter().all(|unit| unit.watts.is_some());
    let mut reads = vec![Vec::new(); order.len()];
    for (index, tensor) in problem.tensors().iter().enumerate() {
        tensor.consumers.iter().for_each(|&job| reads[job as usize].push(index));
    }
    let chain = Chain {
        reads,
        problem,
        weights,
        bit,
        limited: (0..units).filter(|&unit| problem.units()[unit].memory_bytes.is_some()).collect(),
        watts: problem.units().iter().map(|unit| if known { unit.watts.unwrap_or(0.0) } else { 0.0 }).collect(),
    };
    // Without memory to weigh, labels are dominated in one sweep; with it every pair is compared.
    let most = if chain.is_flat() { 4_096 } else { 256 };
    let limit = (MOST_LABELS / (order.len().max(1) * units)).clamp(8, most);
    let mut exact = true;
    // Every state's labels, kept for walking back.
    let mut levels: Vec<Vec<Vec<Label>>> = Vec::with_capacity(order.len());
    for (at, &job) in order.iter().enumerate() {
        let mut level = Vec::with_capacity(units);
        for unit in 0..units {
            let mut labels = chain.arrive(levels.last(), at, job, unit);
            exact &= chain.prune(&mut labels, limit);
            level.push(labels);
        }
        levels.push(level);
    }
    let mut ends: Vec<(Cost, usize, usize)> = Vec::new();
    if let (Some(last), Some(&job)) = (levels.last(), order.last()) {
        for (unit, labels) in last.iter().enumerate() {
            let handed = chain.handover(job, unit);
            for (index, label) in labels.iter().enumerate() {
                let cost = Cost {
                    latency_ms: label.ms + handed,
                    energy_j: known.then_some(label.joules + handed * chain.watts[unit] / 1e3),
                    memory_bytes: label.memory,
                };
                ends.push((cost, unit, index));
            }
        }
    }
    let points = ends
        .into_iter()
        .map(|(cost, mut unit, mut index)| {
            let mut unit_of = vec![0u32; order.len()];
            for at in (0..order.len()).rev() {
                unit_of[order[at] as usize] = unit as u32;
                let parent = levels[at][unit][index].parent as usize;
                (index, unit) = (parent / units, parent % units);
            }
            FrontPoint { cost, schedule: Schedule::from_jobs(problem, unit_of, order) }
        })
        .collect();
    let (points, thinned) = undominated(points);
    Some(Front { points, exact: exact && !thinned })
}

impl Chain<'_> {
    /// Partial plans that put the job at place `at` on `unit`.
    fn arrive(&self, before: Option<&Vec<Vec<Label>>>, at: usize, job: u32, unit: usize) -> Vec<Label> {
        let (problem, units) = (self.problem, self.problem.units().len());
        let ms = problem.jobs()[job as usize].ms[unit];
        if ms.is_infinite() {
            return Vec::new();
        }
        let read = |from: usize| -> f64 {
            let tensors = self.reads[job as usize].iter().map(|&tensor| &problem.tensors()[tensor]);
            tensors
                .map(|tensor| tensor.transfer_ms[if tensor.producer.is_some() { from } else { units } * units + unit])
                .sum()
        };
        let start = Label { ms: 0.0, joules: 0.0, memory: 0, held: vec![0; self.limited.len()], loaded: 0, parent: 0 };
        let mut labels = Vec::new();
        let mut extend = |label: &Label, spent: f64, parent: u32| {
            let mut label = Label { parent, ..label.clone() };
            label.ms += spent;
            label.joules += spent * self.watts[unit] / 1e3;
            let number = self.weights.number[job as usize];
            let bit = self.bit[number].map(|first| 1u128 << (first + unit as u32));
            if bit.is_none_or(|bit| label.loaded & bit == 0) {
                let bytes = self.weights.bytes[number];
                label.memory += bytes;
                label.loaded |= bit.unwrap_or(0);
                if let Some(place) = self.limited.iter().position(|&limited| limited == unit) {
                    label.held[place] += bytes;
                    if problem.units()[unit].memory_bytes.is_some_and(|most| label.held[place] > most) {
                        return;
                    }
                }
            }
            labels.push(label);
        };
        match before {
            None => extend(&start, ms + read(units), 0),
            Some(before) => {
                debug_assert!(at > 0);
                for (from, list) in before.iter().enumerate() {
                    let spent = ms + read(from);
                    for (index, label) in list.iter().enumerate() {
                        extend(label, spent, (index * units + from) as u32);
                    }
                }
            }
        }
        labels
    }

    /// Whether time and energy are all that tells partial plans of one state apart.
    fn is_flat(&self) -> bool {
        self.limited.is_empty() && self.bit.iter().all(Option::is_none)
    }

    fn handover(&self, job: u32, unit: usize) -> f64 {
        let made = self.problem.tensors().iter().filter(|tensor| tensor.producer == Some(job) && tensor.is_output);
        made.map(|tensor| tensor.to_host_ms[unit]).sum()
    }

    /// Keeps the labels that no other beats, at most `limit` of them; `false` if some of those had to go.
    fn prune(&self, labels: &mut Vec<Label>, limit: usize) -> bool {
        labels.sort_by(|a, b| a.ms.total_cmp(&b.ms).then(a.joules.total_cmp(&b.joules)).then(a.memory.cmp(&b.memory)));
        let mut kept: Vec<Label> = Vec::new();
        let flat = self.is_flat();
        for label in labels.drain(..) {
            if flat {
                if kept.last().is_none_or(|last| label.joules < last.joules) {
                    kept.push(label);
                }
            } else if !kept.iter().rev().any(|other| self.beats(other, &label)) {
                kept.push(label);
            }
        }
        let complete = kept.len() <= limit;
        if !complete {
            // Both ends stay, and an even spread between them.
            let last = kept.len() - 1;
            let mut index = 0;
            let wanted: std::collections::BTreeSet<usize> = (0..limit).map(|at| at * last / (limit - 1)).collect();
            kept.retain(|_| {
                index += 1;
                wanted.contains(&(index - 1))
            });
        }
        *labels = kept;
        complete
    }

    /// Whether `a` can do whatever `b` can, for no more of anything: even after loading what `b` has loaded already.
    fn beats(&self, a: &Label, b: &Label) -> bool {
        if a.ms > b.ms || a.joules > b.joules || a.memory > b.memory {
            return false;
        }
        let lacking = b.loaded & !a.loaded;
        if lacking == 0 {
            return a.held.iter().zip(&b.held).all(|(a, b)| a <= b);
        }
        let units = self.problem.units().len();
        let mut held = a.held.clone();
        let mut memory = a.memory;
        for (number, first) in self.bit.iter().enumerate() {
            let Some(first) = first else { continue };
            for unit in (0..units).filter(|&unit| lacking >> (*first as usize + unit) & 1 == 1) {
                memory += self.weights.bytes[number];
                if let Some(place) = self.limited.iter().position(|&limited| limited == unit) {
                    held[place] += self.weights.bytes[number];
                }
            }
        }
        memory <= b.memory && held.iter().zip(&b.held).all(|(a, b)| a <= b)
    }
}

/// Keeps points that no other covers, by latency; the second value tells whether more were left than are given.
fn undominated(mut points: Vec<FrontPoint>) -> (Vec<FrontPoint>, bool) {
    points.sort_by(|a, b| {
        let key = |cost: &Cost| (cost.energy_j.unwrap_or(0.0), cost.memory_bytes);
        a.cost
            .latency_ms
            .total_cmp(&b.cost.latency_ms)
            .then(key(&a.cost).partial_cmp(&key(&b.cost)).unwrap_or(std::cmp::Ordering::Equal))
    });
    let mut kept: Vec<FrontPoint> = Vec::new();
    for point in points {
        if !kept.iter().any(|other| other.cost.covers(&point.cost)) {
            kept.retain(|other| !point.cost.covers(&other.cost));
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
    let mut points: Vec<FrontPoint> = Vec::new();
    let score = |schedule: Schedule, points: &mut Vec<FrontPoint>| {
        let Ok(evaluation) = problem.evaluate(&schedule) else { return };
        let held = weights.held(&schedule.unit, problem.units().len());
        if fits(problem, &held) {
            let cost = Cost {
                latency_ms: evaluation.makespan_ms,
                energy_j: evaluation.energy_j,
                memory_bytes: held.iter().sum(),
            };
            points.push(FrontPoint { cost, schedule });
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
        for schedule in walk(problem, &front[from].schedule, &front[to].schedule) {
            score(schedule, &mut points);
        }
    }
    Front { points: undominated(points).0, exact: false }
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
