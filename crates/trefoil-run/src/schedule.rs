//! From a plan to what each lane does: a static schedule with the fewest waits.
//!
//! **Lanes.** A lane is a thread. Units that share a resource pairwise form one lane: they can never run at once, so
//! one thread drives them all and a hand-off between them is a function call. (Sharing is not transitive: with units
//! on cores {0}, {1} and {0,1}, the first and the third form a lane and the second has its own, so that {0} and {1}
//! still run at once.) Since the plan orders the tasks of every resource, and any two tasks of a lane share one, a
//! lane's sequence is fixed. What remains to decide while running is *when* each task may start.
//!
//! **Waits.** Each lane counts its finished tasks. A task may start when the counts of the other lanes have reached
//! stated numbers. These come from vector clocks: the clock of a task holds, per lane, how many of that lane's tasks
//! are certainly finished when it finishes. A wait that the previous task of the same lane already implied is left out.
//! The clocks also answer exactly, in constant time and for any plan size, whether one task always finishes before
//! another starts, which is what buffer reuse needs ([`Schedule::precedes`]).
//!
//! **Transfers** of a plan are not executed: all units here read and write host memory, so the executor binds producer
//! and consumer to the same bytes, and whatever copying a port needs is inside its backend's `submit`/`wait` (and thus
//! inside the segment's measured time). A transfer's dependencies are passed on to the tasks that wait for it.
//!
//! **Iterations and items.** A value is named by (model, item, iteration, tensor). A task reads the value of the highest
//! iteration up to its own, so that what is computed once may be read by every repetition; all iterations of an item
//! read the same model inputs, and a model output is the value of its highest iteration. A linked input
//! ([`Plan::links`]) is another stage's value, or in a loop the previous iteration's own.

mod data_flow;

use crate::RunError;
use data_flow::DataFlow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};
use trefoil_core::{OperatorGraph, Plan, SegmentId, Task, TaskId, TensorId, TensorInfo, Unit, UnitAddress, Work};

/// Where a task reads an input from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A model input: index in [`Schedule::inputs`].
    Input(usize),
    /// A value: index in [`Schedule::values`].
    Value(usize),
}

/// A segment's execution on a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScheduledTask {
    /// The plan's task.
    pub task: TaskId,
    /// The plan's segment.
    pub segment: SegmentId,
    /// Its lane.
    pub lane: usize,
    /// How many tasks of its lane are finished once it is (1 for the first).
    pub position: u32,
    /// Other lanes and the counts they must have reached before it may start.
    pub waits: Vec<(usize, u32)>,
    /// Lanes that hold a task waiting for exactly this one.
    pub wakes: Vec<usize>,
    /// One per input of the segment.
    pub inputs: Vec<Source>,
    /// One per output of the segment: index in [`Schedule::values`].
    pub outputs: Vec<usize>,
}

/// A tensor instance made by one task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Index of the model.
    pub model: u32,
    /// Item of a stream; 0 for a single inference.
    pub item: u32,
    /// Repetition within an inference; 0 when nothing repeats.
    pub iteration: u32,
    /// The tensor.
    pub tensor: TensorId,
    /// Name, type and shape.
    pub info: TensorInfo,
    /// Index in [`Schedule::tasks`].
    pub producer: usize,
    /// Indices in [`Schedule::tasks`], ascending, no duplicates.
    pub consumers: Vec<usize>,
    /// Whether a model output is this value (it then has a buffer of its own).
    pub is_output: bool,
}

/// A model input or output of one item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelPort {
    /// Index of the model.
    pub model: u32,
    /// Item of a stream; 0 for a single inference.
    pub item: u32,
    /// The tensor.
    pub tensor: TensorId,
    /// Name, type and shape. With several models or items the name is `model/tensor#item`, else the tensor's.
    pub info: TensorInfo,
    /// Where an output's bytes are: a value, or (an output that is an input) an input port.
    /// For an input port: itself.
    pub source: Source,
}

/// One lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaneSchedule {
    /// Its units; any two share a resource.
    pub units: Vec<UnitAddress>,
    /// Indices in [`Schedule::tasks`], in execution order.
    pub tasks: Vec<usize>,
}

/// What each lane does and waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Lanes.
    pub lanes: Vec<LaneSchedule>,
    /// Executions, in one topological order.
    pub tasks: Vec<ScheduledTask>,
    /// Values that tasks make.
    pub values: Vec<Value>,
    /// Model inputs: by model, item, and the graph's order.
    pub inputs: Vec<ModelPort>,
    /// Model outputs: by model, item, and the graph's order.
    pub outputs: Vec<ModelPort>,
    /// Row-major, tasks × lanes: how many tasks of the lane are finished once the task is.
    clocks: Vec<u32>,
}

impl Schedule {
    /// Builds the schedule of a plan that [`Plan::check`] accepts.
    ///
    /// # Errors
    /// [`RunError::Plan`] when tasks and segments disagree, an order is incomplete or contradicts the data flow, a
    /// tensor is read that no task makes, or the plan holds work that segments cannot express.
    pub fn new(plan: &Plan, graphs: &[&OperatorGraph]) -> Result<Self, RunError> {
        let kept = kept_tasks(plan)?;
        let mut before = predecessors(plan, &kept)?;
        add_resource_order(plan, &kept, &mut before)?;
        let flow = DataFlow::new(plan, graphs, &kept)?;
        for (consumer, sources) in flow.sources.iter().enumerate() {
            for source in sources {
                if let Source::Value(value) = source {
                    before[consumer].insert(flow.values[*value].producer);
                }
            }
        }
        let topological = topological_order(plan, &kept, &before)?;
        Ok(assemble(plan, &kept, &before, flow, &topological))
    }

    /// Whether the first task always finishes before the second starts (indices in [`Schedule::tasks`]).
    pub fn precedes(&self, first: usize, second: usize) -> bool {
        let (earlier, later) = (&self.tasks[first], &self.tasks[second]);
        if earlier.lane == later.lane {
            return earlier.position < later.position;
        }
        self.clocks[second * self.lanes.len() + earlier.lane] >= earlier.position
    }
}

/// A task that executes a segment.
struct Kept<'plan> {
    id: TaskId,
    task: &'plan Task,
    segment: SegmentId,
}

fn kept_tasks(plan: &Plan) -> Result<Vec<Kept<'_>>, RunError> {
    let mut kept = Vec::with_capacity(plan.tasks.len());
    for (index, task) in plan.tasks.iter().enumerate() {
        match task.work {
            Work::Segment { segment } => {
                let Some(description) = plan.segments.get(segment.0 as usize) else {
                    return Err(RunError::plan(format!(
                        "task {index} runs segment {}, but there are {}",
                        segment.0,
                        plan.segments.len()
                    )));
                };
                if description.unit != task.unit {
                    return Err(RunError::plan(format!(
                        "task {index} runs segment {} on {}, but the segment is for {}",
                        segment.0, task.unit, description.unit
                    )));
                }
                kept.push(Kept { id: TaskId(index as u32), task, segment });
            }
            Work::Transfer { .. } => {}
            Work::Blocks { .. } => {
                return Err(RunError::plan(format!(
                    "task {index} runs blocks of a video model, which is not for this executor"
                )));
            }
        }
    }
    Ok(kept)
}

/// Per kept task, the kept tasks it waits for by `after`, seen through transfers.
fn predecessors(plan: &Plan, kept: &[Kept<'_>]) -> Result<Vec<BTreeSet<usize>>, RunError> {
    let mut place = vec![None; plan.tasks.len()];
    for (index, task) in kept.iter().enumerate() {
        place[task.id.0 as usize] = Some(index);
    }
    // Seen through: what a transfer waits for, resolved once per transfer (`after` points backwards only).
    let mut through: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); plan.tasks.len()];
    let mut before = vec![BTreeSet::new(); kept.len()];
    for (index, task) in plan.tasks.iter().enumerate() {
        let mut set = BTreeSet::new();
        for earlier in &task.after {
            let earlier = earlier.0 as usize;
            if earlier >= index {
                return Err(RunError::plan(format!(
                    "task {index} waits for task {earlier}, which does not come before it"
                )));
            }
            match place[earlier] {
                Some(position) => {
                    set.insert(position);
                }
                None => set.extend(&through[earlier]),
            }
        }
        match place[index] {
            Some(position) => before[position] = set,
            None => through[index] = set,
        }
    }
    Ok(before)
}

/// Adds an edge between neighbours of every resource's order, and checks that the orders are complete.
fn add_resource_order(plan: &Plan, kept: &[Kept<'_>], before: &mut [BTreeSet<usize>]) -> Result<(), RunError> {
    let place: HashMap<u32, usize> = kept.iter().enumerate().map(|(index, task)| (task.id.0, index)).collect();
    let units: BTreeMap<&UnitAddress, &Unit> = plan.units.iter().map(|unit| (&unit.address, unit)).collect();
    let mut listed: Vec<BTreeSet<&str>> = vec![BTreeSet::new(); kept.len()];
    for (resource, order) in &plan.order {
        let mut previous = None;
        for id in order {
            if id.0 as usize >= plan.tasks.len() {
                return Err(RunError::plan(format!(
                    "the order of {resource} names task {}, which does not exist",
                    id.0
                )));
            }
            let Some(&index) = place.get(&id.0) else { continue };
            if !listed[index].insert(resource) {
                return Err(RunError::plan(format!("the order of {resource} names task {} twice", id.0)));
            }
            if let Some(previous) = previous.replace(index) {
                before[index].insert(previous);
            }
        }
    }
    for (task, listed) in kept.iter().zip(&listed) {
        let Some(unit) = units.get(&task.task.unit) else {
            return Err(RunError::plan(format!(
                "task {} is for {}, which the plan does not describe",
                task.id.0, task.task.unit
            )));
        };
        let holds: BTreeSet<String> = unit.resources.iter().map(ToString::to_string).collect();
        if let Some(missing) = holds.iter().find(|resource| !listed.contains(resource.as_str())) {
            return Err(RunError::plan(format!(
                "the order of {missing} leaves out task {} ({})",
                task.id.0, unit.address
            )));
        }
        if let Some(extra) = listed.iter().find(|resource| !holds.contains(**resource)) {
            return Err(RunError::plan(format!(
                "the order of {extra} names task {}, but {} does not hold that resource",
                task.id.0, unit.address
            )));
        }
    }
    Ok(())
}

/// Kahn's algorithm; among ready tasks the smallest plan id goes first.
fn topological_order(plan: &Plan, kept: &[Kept<'_>], before: &[BTreeSet<usize>]) -> Result<Vec<usize>, RunError> {
    let mut after = vec![Vec::new(); kept.len()];
    let mut missing: Vec<usize> = before.iter().map(BTreeSet::len).collect();
    for (index, set) in before.iter().enumerate() {
        for &earlier in set {
            after[earlier].push(index);
        }
    }
    let mut ready: BinaryHeap<Reverse<usize>> =
        missing.iter().enumerate().filter(|(_, count)| **count == 0).map(|(index, _)| Reverse(index)).collect();
    let mut order = Vec::with_capacity(kept.len());
    while let Some(Reverse(index)) = ready.pop() {
        order.push(index);
        for &later in &after[index] {
            missing[later] -= 1;
            if missing[later] == 0 {
                ready.push(Reverse(later));
            }
        }
    }
    if order.len() < kept.len() {
        let stuck = missing.iter().position(|&count| count > 0).unwrap_or(0);
        let unit = &plan.tasks[kept[stuck].id.0 as usize].unit;
        return Err(RunError::plan(format!(
            "task {} ({unit}) can never start: the order of its resources contradicts what it waits for",
            kept[stuck].id.0
        )));
    }
    Ok(order)
}

/// Units into lanes: each unit joins the first lane all of whose units it shares a resource with.
fn lanes_of(plan: &Plan, kept: &[Kept<'_>]) -> (Vec<LaneSchedule>, BTreeMap<UnitAddress, usize>) {
    let used: BTreeSet<&UnitAddress> = kept.iter().map(|task| &task.task.unit).collect();
    let mut lanes: Vec<(Vec<&Unit>, LaneSchedule)> = Vec::new();
    let mut lane_of = BTreeMap::new();
    for unit in plan.units.iter().filter(|unit| used.contains(&unit.address)) {
        if lane_of.contains_key(&unit.address) {
            continue;
        }
        let fits = lanes.iter().position(|(members, _)| members.iter().all(|member| !member.is_disjoint(unit)));
        let lane = fits.unwrap_or_else(|| {
            lanes.push((Vec::new(), LaneSchedule { units: Vec::new(), tasks: Vec::new() }));
            lanes.len() - 1
        });
        lanes[lane].0.push(unit);
        lanes[lane].1.units.push(unit.address.clone());
        lane_of.insert(unit.address.clone(), lane);
    }
    (lanes.into_iter().map(|(_, lane)| lane).collect(), lane_of)
}

fn assemble(
    plan: &Plan,
    kept: &[Kept<'_>],
    before: &[BTreeSet<usize>],
    flow: DataFlow,
    topological: &[usize],
) -> Schedule {
    let (mut lanes, lane_of) = lanes_of(plan, kept);
    let width = lanes.len();
    let mut clocks = vec![0u32; kept.len() * width];
    // From here on tasks are renumbered by their topological position.
    let mut renumbered = vec![0; kept.len()];
    let mut tasks: Vec<ScheduledTask> = Vec::with_capacity(kept.len());
    for (index, &old) in topological.iter().enumerate() {
        renumbered[old] = index;
        let lane = lane_of[&kept[old].task.unit];
        let mut clock = vec![0u32; width];
        let mut raise = |row: &[u32]| clock.iter_mut().zip(row).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
        let previous = lanes[lane].tasks.last().copied();
        if let Some(previous) = previous {
            raise(&clocks[previous * width..(previous + 1) * width]);
        }
        for &earlier in &before[old] {
            let earlier = renumbered[earlier];
            raise(&clocks[earlier * width..(earlier + 1) * width]);
        }
        // Lanes it must wait for: those whose count some direct predecessor raised beyond what the lane already knows.
        let known = |other: usize| previous.map_or(0, |previous| clocks[previous * width + other]);
        let mut needs: BTreeMap<usize, u32> = BTreeMap::new();
        for &earlier in &before[old] {
            let earlier = &tasks[renumbered[earlier]];
            if earlier.lane != lane && earlier.position > known(earlier.lane) {
                let need = needs.entry(earlier.lane).or_default();
                *need = (*need).max(earlier.position);
            }
        }
        let waits: Vec<(usize, u32)> = needs.into_iter().collect();
        for &(other, count) in &waits {
            let awaited = lanes[other].tasks[count as usize - 1];
            if !tasks[awaited].wakes.contains(&lane) {
                tasks[awaited].wakes.push(lane);
            }
        }
        let position = lanes[lane].tasks.len() as u32 + 1;
        clock[lane] = position;
        clocks[index * width..(index + 1) * width].copy_from_slice(&clock);
        lanes[lane].tasks.push(index);
        tasks.push(ScheduledTask {
            task: kept[old].id,
            segment: kept[old].segment,
            lane,
            position,
            waits,
            wakes: Vec::new(),
            inputs: flow.sources[old].clone(),
            outputs: flow.made[old].clone(),
        });
    }
    let mut values = flow.values;
    for value in &mut values {
        value.producer = renumbered[value.producer];
        value.consumers.iter_mut().for_each(|consumer| *consumer = renumbered[*consumer]);
        value.consumers.sort_unstable();
    }
    Schedule { lanes, tasks, values, inputs: flow.inputs, outputs: flow.outputs, clocks }
}
