//! From a schedule to what each lane's thread needs: units, sub-models, ports matched to tensors, buffers.

use crate::cores::cores_of;
use crate::error::{Place, RunError};
use crate::executor::{ExecutorOptions, FindUnit};
use crate::lane::{Binding, LaneSetup, LaneTask, Program};
use crate::schedule::{Schedule, Source};
use crate::source::SegmentSource;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{
    OperatorGraph, OperatorId, Plan, Resource, Segment, SegmentId, TensorId, TensorInfo, Unit, UnitAddress,
};
use trefoil_units::{Backend, Buffer, CompileOptions, SubModel};

/// Every unit of a plan that runs segments, and its backend.
pub(crate) type Units = BTreeMap<UnitAddress, (&'static dyn Backend, Unit)>;

/// Finds them.
pub(crate) fn find_units(plan: &Plan, find: &FindUnit<'_>) -> Result<Units, RunError> {
    plan.units_used().into_iter().map(|address| Ok((address.clone(), find(address)?))).collect()
}

/// Compares the plan's idea of resources with what is here. Differences are notes, unless two units of different lanes
/// share a resource here: they would run at once though they must not.
pub(crate) fn check_resources(plan: &Plan, units: &Units, schedule: &Schedule) -> Result<Vec<String>, RunError> {
    let list =
        |resources: &BTreeSet<Resource>| resources.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let mut notes = Vec::new();
    for (address, (_, unit)) in units {
        let planned = plan
            .resources(address)
            .ok_or_else(|| RunError::plan(format!("a segment is for {address}, which the plan does not describe")))?;
        if *planned != unit.resources {
            notes.push(format!(
                "{address} holds {} here but {} in the plan; plan again on this machine",
                list(&unit.resources),
                list(planned)
            ));
        }
        for (other_address, (_, other)) in units.range(..address.clone()) {
            let planned_disjoint = plan.resources(other_address).is_some_and(|other| other.is_disjoint(planned));
            let apart =
                schedule.lanes.iter().all(|lane| !(lane.units.contains(address) && lane.units.contains(other_address)));
            if planned_disjoint && apart && !unit.is_disjoint(other) {
                return Err(RunError::plan(format!(
                    "{other_address} and {address} share a resource on this machine but not in the plan"
                )));
            }
        }
    }
    Ok(notes)
}

/// `segment 3: Conv+Relu, MatMul and 10 more`.
pub(crate) fn label(index: usize, segment: &Segment, graphs: &[&OperatorGraph]) -> String {
    format!("segment {index}: {}", some_of(segment, |id| graphs[segment.model as usize].operator(id).kind.clone()))
}

/// The first three and how many more.
fn some_of(segment: &Segment, text: impl Fn(OperatorId) -> String) -> String {
    let shown: Vec<_> = segment.operators.iter().take(3).map(|&id| text(id)).collect();
    match segment.operators.len().saturating_sub(shown.len()) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Where the bytes of everything are.
pub(crate) struct Buffers {
    pub inputs: Vec<Buffer>,
    pub values: Vec<Buffer>,
}

/// What one lane's thread needs: its segments' sub-models, its tasks, and where the bytes are.
#[allow(clippy::too_many_arguments)] // everything that is known about a plan meets here
pub(crate) fn lane_setup(
    lane: usize,
    plan: &Plan,
    graphs: &[&OperatorGraph],
    schedule: &Schedule,
    source: &dyn SegmentSource,
    units: &Units,
    buffers: &Buffers,
    options: &ExecutorOptions,
) -> Result<LaneSetup, RunError> {
    let mut setup = LaneSetup {
        lane,
        programs: Vec::new(),
        tasks: Vec::new(),
        bindings: Vec::new(),
        options: CompileOptions { cache: options.cache.clone(), profiling: options.profiling, reference: false },
    };
    let mut program_of: BTreeMap<SegmentId, usize> = BTreeMap::new();
    let mut ports: Vec<PortMap> = Vec::new();
    // Bindings of each program, so that executions with equal buffers share one.
    let mut bindings_of: Vec<Vec<usize>> = Vec::new();
    let mut core_sets: Vec<Vec<u32>> = Vec::new();
    for &index in &schedule.lanes[lane].tasks {
        let task = &schedule.tasks[index];
        let segment = &plan.segments[task.segment.0 as usize];
        let graph = graphs[segment.model as usize];
        let program = if let Some(&program) = program_of.get(&task.segment) {
            program
        } else {
            let (backend, unit) = &units[&segment.unit];
            let cores = cores_of(unit);
            let core_set = core_sets.iter().position(|set| *set == cores).unwrap_or_else(|| {
                core_sets.push(cores);
                core_sets.len() - 1
            });
            let model = source.segment(plan, task.segment)?;
            let place = Place {
                segment: task.segment.0,
                unit: segment.unit.to_string(),
                operators: some_of(segment, |id| format!("`{}`", graph.operator(id).name)),
            };
            ports.push(PortMap::new(&model, segment, graph, &place)?);
            setup.programs.push(Program { place, backend: *backend, unit: unit.clone(), model, core_set });
            bindings_of.push(Vec::new());
            program_of.insert(task.segment, setup.programs.len() - 1);
            setup.programs.len() - 1
        };
        let binding = Binding {
            inputs: ports[program]
                .inputs
                .iter()
                .map(|&port| match task.inputs[port] {
                    Source::Input(input) => buffers.inputs[input],
                    Source::Value(value) => buffers.values[value],
                })
                .collect(),
            outputs: ports[program].outputs.iter().map(|&port| buffers.values[task.outputs[port]]).collect(),
        };
        let known = bindings_of[program].iter().copied().find(|&known| setup.bindings[known] == binding);
        let binding = known.unwrap_or_else(|| {
            setup.bindings.push(binding);
            bindings_of[program].push(setup.bindings.len() - 1);
            setup.bindings.len() - 1
        });
        setup.tasks.push(LaneTask {
            task: index,
            program,
            binding,
            waits: task.waits.clone().into(),
            wakes: task.wakes.clone().into(),
        });
    }
    Ok(setup)
}

/// For each port of a sub-model, its position in the segment's inputs or outputs.
struct PortMap {
    inputs: Vec<usize>,
    outputs: Vec<usize>,
}

impl PortMap {
    fn new(model: &SubModel, segment: &Segment, graph: &OperatorGraph, place: &Place) -> Result<Self, RunError> {
        let fail = |reason: String| RunError::Extract { what: place.to_string(), reason };
        let find = |port: &TensorInfo, tensors: &[TensorId], side: &str| {
            let position = tensors.iter().position(|&tensor| graph.tensor(tensor).name == port.name);
            let position =
                position.ok_or_else(|| fail(format!("the sub-model has an {side} `{}` too many", port.name)))?;
            let edge = graph.tensor(tensors[position]);
            if edge.dtype != port.dtype || edge.shape != port.shape {
                return Err(fail(format!("{side} {port} of the sub-model is {} in the graph", edge.info())));
            }
            Ok(position)
        };
        let inputs: Vec<_> =
            model.inputs.iter().map(|port| find(port, &segment.inputs, "input")).collect::<Result<_, _>>()?;
        let outputs: Vec<_> =
            model.outputs.iter().map(|port| find(port, &segment.outputs, "output")).collect::<Result<_, _>>()?;
        if let Some(missing) = (0..segment.outputs.len()).find(|position| !outputs.contains(position)) {
            let name = &graph.tensor(segment.outputs[missing]).name;
            return Err(fail(format!("the sub-model does not hand out `{name}`")));
        }
        Ok(Self { inputs, outputs })
    }
}
