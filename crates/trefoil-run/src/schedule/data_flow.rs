//! Who makes and who reads each value of a plan.

use super::{Kept, ModelPort, Source, Value};
use crate::RunError;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use trefoil_core::{LinkEnd, OperatorGraph, Plan, TensorId, TensorInfo};

/// Who makes and who reads what; task indices are those of the kept tasks.
pub(super) struct DataFlow {
    pub(super) values: Vec<Value>,
    pub(super) sources: Vec<Vec<Source>>,
    pub(super) made: Vec<Vec<usize>>,
    pub(super) inputs: Vec<ModelPort>,
    pub(super) outputs: Vec<ModelPort>,
}

impl DataFlow {
    /// Follows every value of the kept tasks from where it is made to where it is read.
    ///
    /// # Errors
    /// Two tasks make one value, or none makes one that is read.
    pub(super) fn new(plan: &Plan, graphs: &[&OperatorGraph], kept: &[Kept<'_>]) -> Result<Self, RunError> {
        let mut items: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); graphs.len()];
        for task in kept {
            items[plan.segments[task.segment.0 as usize].model as usize].insert(task.task.item);
        }
        items.iter_mut().filter(|items| items.is_empty()).for_each(|items| {
            items.insert(0);
        });
        let lone = graphs.len() == 1 && items[0].len() == 1;

        // Model inputs.
        let mut inputs = Vec::new();
        let mut input_place = HashMap::new();
        for (model, graph) in graphs.iter().enumerate() {
            for &item in &items[model] {
                for &tensor in &graph.inputs {
                    let info = port_info(graph, tensor, item, lone);
                    input_place.insert((model as u32, item, tensor), inputs.len());
                    let source = Source::Input(inputs.len());
                    inputs.push(ModelPort { model: model as u32, item, tensor, info, source });
                }
            }
        }

        // Values, by (model, item, tensor) and iteration.
        let mut values: Vec<Value> = Vec::new();
        let mut made = vec![Vec::new(); kept.len()];
        let mut versions: HashMap<(u32, u32, TensorId), BTreeMap<u32, usize>> = HashMap::new();
        for (index, task) in kept.iter().enumerate() {
            let segment = &plan.segments[task.segment.0 as usize];
            let graph = graphs[segment.model as usize];
            for &tensor in &segment.outputs {
                let (item, iteration) = (task.task.item, task.task.iteration);
                let previous =
                    versions.entry((segment.model, item, tensor)).or_default().insert(iteration, values.len());
                if let Some(previous) = previous {
                    return Err(RunError::plan(format!(
                        "tasks {} and {} both make `{}` (item {item}, iteration {iteration})",
                        kept[values[previous].producer].id.0,
                        task.id.0,
                        graph.tensor(tensor).name
                    )));
                }
                made[index].push(values.len());
                values.push(Value {
                    model: segment.model,
                    item,
                    iteration,
                    tensor,
                    info: graph.tensor(tensor).info(),
                    producer: index,
                    consumers: Vec::new(),
                    is_output: false,
                });
            }
        }

        // Readers.
        let mut sources = vec![Vec::new(); kept.len()];
        for (index, task) in kept.iter().enumerate() {
            let segment = &plan.segments[task.segment.0 as usize];
            for &tensor in &segment.inputs {
                let mut key = (segment.model, task.task.item, tensor);
                let mut newest = task.task.iteration;
                if let Some(&port) = input_place.get(&key) {
                    let Some((from, iteration)) = handed_on(plan, key, task.task.iteration) else {
                        sources[index].push(Source::Input(port));
                        continue;
                    };
                    (key, newest) = (from, iteration);
                }
                let version = versions.get(&key).and_then(|all| all.range(..=newest).next_back());
                let Some((_, &value)) = version else {
                    return Err(RunError::plan(format!(
                        "task {} (item {}, iteration {}) reads `{}`, which no task makes",
                        task.id.0,
                        task.task.item,
                        task.task.iteration,
                        graphs[key.0 as usize].tensor(key.2).name
                    )));
                };
                sources[index].push(Source::Value(value));
                if values[value].consumers.last() != Some(&index) {
                    values[value].consumers.push(index);
                }
            }
        }

        // Model outputs.
        let mut outputs = Vec::new();
        for (model, graph) in graphs.iter().enumerate() {
            for &item in &items[model] {
                for &tensor in &graph.outputs {
                    let key = (model as u32, item, tensor);
                    let source = if let Some(&port) = input_place.get(&key) {
                        Source::Input(port)
                    } else if let Some((_, &value)) = versions.get(&key).and_then(BTreeMap::last_key_value) {
                        values[value].is_output = true;
                        Source::Value(value)
                    } else {
                        return Err(RunError::plan(format!(
                            "no task makes the model output `{}` (item {item})",
                            graph.tensor(tensor).name
                        )));
                    };
                    let info = port_info(graph, tensor, item, lone);
                    outputs.push(ModelPort { model: model as u32, item, tensor, info, source });
                }
            }
        }
        Ok(Self { values, sources, made, inputs, outputs })
    }
}

/// What an iteration reads instead of a model input, and the newest iteration of it that counts: a loop's own value from the
/// second iteration on, else what another stage made.
fn handed_on(
    plan: &Plan,
    (model, item, tensor): (u32, u32, TensorId),
    iteration: u32,
) -> Option<((u32, u32, TensorId), u32)> {
    let to = LinkEnd { model, item, tensor };
    let link = |own: bool| plan.links.iter().find(|link| link.to == to && (link.from.stage() == to.stage()) == own);
    let of = |from: LinkEnd, newest: u32| ((from.model, from.item, from.tensor), newest);
    match iteration.checked_sub(1).and_then(|before| Some((link(true)?, before))) {
        Some((own, before)) => Some(of(own.from, before)),
        None => link(false).map(|other| of(other.from, u32::MAX)),
    }
}

fn port_info(graph: &OperatorGraph, tensor: TensorId, item: u32, lone: bool) -> TensorInfo {
    let mut info = graph.tensor(tensor).info();
    if !lone {
        info.name.insert_str(0, &format!("{}/", graph.model));
        let _ = write!(info.name, "#{item}");
    }
    info
}
