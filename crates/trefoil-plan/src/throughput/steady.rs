//! The period of a stream by the simulator: items follow one another through a plan, and busy units slow each other down.
//!
//! Many items of the plan run on the event engine, each resource taking its tasks in a fixed order, and the period is the mean
//! distance between the ends of items in the middle, where the stream is full on both sides. An item starts when one of those before
//! it has left, so that no unit runs ahead of the others and is idle later, when it should slow them. Two orders are tried: items as
//! close behind one another as the loads allow, and one in which whatever comes from another unit was made a period before,
//! so that nothing waits within a period (more items are under way then). Where both are slower than one item after another, that is it.

use crate::PlanError;
use crate::engine::{self, Platform, Tasks};
use crate::factors::class_index;
use crate::simulate::{SimulationModel, resource_keys};
use crate::view::CostView;
use std::collections::BTreeMap;
use trefoil_core::{OperatorGraph, Plan};

/// Items in the middle over which the period is a mean.
const MIDDLE: usize = 8;
/// Most tasks of one simulation.
const MOST_TASKS: usize = 60_000;

/// A period and how it was got.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Period {
    /// Milliseconds between the ends of two items.
    pub ms: f64,
    /// How it was got.
    pub how: How,
}

/// How a period was got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// Simulated with so many items under way at once.
    UnderWay(usize),
    /// The stream was too long to simulate: an upper bound.
    Bound,
    /// Every item starts when the one before is complete.
    OneByOne,
    /// Many items of one model before those of the next, each through the model's own pipeline.
    InTurn,
}

impl Period {
    /// In words.
    pub fn how(&self) -> String {
        match self.how {
            How::UnderWay(items) => {
                format!("simulated with units slowing each other down, up to {items} item(s) under way")
            }
            How::Bound => {
                "an upper bound: all work as slow as anything beside it can make it, too long to simulate".to_owned()
            }
            How::OneByOne => {
                "one after another: what overlaps slows each other down by more than that saves".to_owned()
            }
            How::InTurn => {
                "each model's own pipeline in turn, many inferences of one model before the next's".to_owned()
            }
        }
    }
}

/// The tasks of one item, by dense unit.
struct Item<'p> {
    platform: &'p Platform,
    unit: Vec<u32>,
    ms: Vec<f64>,
    class: Vec<u8>,
    start: Vec<f64>,
    edges: Vec<(u32, u32)>,
}

/// The period of a plan of one item (of one inference of each of its models). `load` is its busiest resource's work for it.
pub(super) fn period(
    views: &[&CostView<'_>],
    platform: &Platform,
    plan: &Plan,
    load: f64,
) -> Result<Period, PlanError> {
    if load <= 0.0 {
        return Ok(Period { ms: 0.0, how: How::UnderWay(1) });
    }
    let item = Item::new(views, platform, plan)?;
    // Items close behind one another: as many as overlap.
    let close = |at: usize, task: usize| at as f64 * load + item.start[task];
    let overlap = (plan.simulated_ms / load).ceil().max(1.0) as usize;
    let mut best = item.run(overlap + 1, close);
    // A period for every change of unit on the way to a task.
    let mut depth = vec![0usize; item.unit.len()];
    for &(from, to) in &item.edges {
        // Edges lead to later tasks, and stand in the order of those.
        let (from, to) = (from as usize, to as usize);
        depth[to] = depth[to].max(depth[from] + usize::from(item.unit[from] != item.unit[to]));
    }
    let deepest = depth.iter().copied().max().unwrap_or(0);
    let whole = 2.0 * plan.simulated_ms.max(load);
    let apart = item.run(deepest + 2, |at, task| (at + depth[task]) as f64 * whole + item.start[task]);
    if let Some(apart) = apart
        && best.is_none_or(|best| apart.ms < best.ms * (1.0 - 1e-9))
    {
        best = Some(apart);
    }
    let best = best.unwrap_or_else(|| item.slowest());
    // Nobody has to overlap items.
    let alone = Period { ms: plan.simulated_ms, how: How::OneByOne };
    Ok(if alone.ms < best.ms * (1.0 - 1e-9) { alone } else { best })
}

impl<'p> Item<'p> {
    fn new(views: &[&CostView<'_>], platform: &'p Platform, plan: &Plan) -> Result<Self, PlanError> {
        let indices: Vec<_> = views.iter().map(|view| &view.index).collect();
        let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
        let model = SimulationModel::from_profiles(&indices, &graphs, plan)?;
        let mut start = vec![0.0; plan.tasks.len()];
        for span in plan.timeline.lanes.iter().flat_map(|lane| &lane.spans) {
            start[span.task.0 as usize] = span.start_ms;
        }
        let unit_of = |task: &trefoil_core::Task| views[0].unit_index(&task.unit).unwrap_or(0) as u32;
        let unit: Vec<u32> = plan.tasks.iter().map(unit_of).collect();
        // What runs after another only because one item runs one thing at a time does not wait in a stream; resources keep the
        // order. What comes from another unit is the transfer's or the maker's.
        let edges = data_edges(plan);
        Ok(Self {
            platform,
            ms: plan.tasks.iter().map(|task| task.cost.ms).collect(),
            class: model.classes.iter().map(|&class| class_index(class) as u8).collect(),
            unit,
            start,
            edges,
        })
    }

    /// Runs enough items that `under_way` of them are on the way before and after the middle ones; `key` orders tasks of items.
    fn run(&self, under_way: usize, key: impl Fn(usize, usize) -> f64) -> Option<Period> {
        let count = self.unit.len();
        let items = 2 * under_way + MIDDLE + 1;
        if items * count > MOST_TASKS {
            return None;
        }
        let (mut first, mut last) = (vec![true; count], vec![true; count]);
        for &(from, to) in &self.edges {
            (last[from as usize], first[to as usize]) = (false, false);
        }
        let of = |marked: &[bool]| (0..count as u32).filter(|&task| marked[task as usize]).collect::<Vec<_>>();
        let (first, last) = (of(&first), of(&last));
        let mut order: Vec<(f64, u32)> = Vec::with_capacity(items * count);
        let mut tasks = Tasks::default();
        for item in 0..items {
            let base = (item * count) as u32;
            order.extend((0..count).map(|task| (key(item, task), base + task as u32)));
            tasks.unit.extend(&self.unit);
            tasks.ms.extend(&self.ms);
            tasks.class.extend(&self.class);
            tasks.edges.extend(self.edges.iter().map(|&(from, to)| (base + from, base + to)));
            if let Some(left) = item.checked_sub(under_way).map(|left| (left * count) as u32) {
                for &from in &last {
                    tasks.edges.extend(first.iter().map(|&to| (left + from, base + to)));
                }
            }
        }
        tasks.release = vec![0.0; items * count];
        order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut queues: Vec<Vec<u32>> = vec![Vec::new(); self.platform.resources];
        for (_, task) in order {
            for &resource in &self.platform.unit_resources[tasks.unit[task as usize] as usize] {
                queues[resource as usize].push(task);
            }
        }
        let run = engine::run(self.platform, &tasks, &queues, |_, _| {}).ok()?;
        let end = |item: usize| run.end[item * count..][..count].iter().copied().fold(0.0, f64::max);
        let ms = (end(under_way + MIDDLE) - end(under_way)) / MIDDLE as f64;
        Some(Period { ms, how: How::UnderWay(under_way) })
    }

    /// An upper bound: every resource's work, each task as slow as anything beside it can make it.
    fn slowest(&self) -> Period {
        let mut load = vec![0.0; self.platform.resources];
        for ((&unit, &ms), &class) in self.unit.iter().zip(&self.ms).zip(&self.class) {
            let slowed = ms * self.platform.factors.most(unit as usize, class as usize);
            for &resource in &self.platform.unit_resources[unit as usize] {
                load[resource as usize] += slowed;
            }
        }
        Period { ms: load.into_iter().fold(0.0, f64::max), how: How::Bound }
    }
}

/// Pairs of tasks of which the second reads what the first makes or brings, ordered by the second.
fn data_edges(plan: &Plan) -> Vec<(u32, u32)> {
    use trefoil_core::Work;
    // By model, inference of it and tensor.
    let mut made: BTreeMap<(u32, u32, u32), u32> = BTreeMap::new();
    let mut brought: BTreeMap<(u32, u32, u32, &trefoil_core::UnitAddress), u32> = BTreeMap::new();
    let mut edges = Vec::new();
    for (at, task) in plan.tasks.iter().enumerate() {
        let at = at as u32;
        match &task.work {
            Work::Segment { segment } => {
                let segment = &plan.segments[segment.0 as usize];
                for tensor in &segment.inputs {
                    let key = (segment.model, task.item, tensor.0);
                    let source = brought.get(&(key.0, key.1, key.2, &task.unit)).or_else(|| made.get(&key));
                    edges.extend(source.map(|&from| (from, at)));
                }
                made.extend(segment.outputs.iter().map(|tensor| ((segment.model, task.item, tensor.0), at)));
            }
            Work::Transfer { model, tensor, from } => {
                edges.extend(made.get(&(*model, task.item, tensor.0)).map(|&from| (from, at)));
                if from.as_ref() != Some(&task.unit) {
                    brought.insert((*model, task.item, tensor.0, &task.unit), at);
                }
            }
            Work::Blocks { .. } => {}
        }
    }
    edges
}

/// Milliseconds of work of each resource for one item.
pub(super) fn loads(plan: &Plan) -> BTreeMap<String, f64> {
    let mut load: BTreeMap<String, f64> = BTreeMap::new();
    for task in &plan.tasks {
        for unit in plan.units.iter().filter(|unit| unit.address == task.unit) {
            for key in resource_keys(unit) {
                *load.entry(key).or_default() += task.cost.ms;
            }
        }
    }
    load
}
