//! Which values are constant, and which have a shape that depends on data.
//!
//! A value is **constant** when it follows from initializers (and, before folding, from static shapes) by operators
//! without randomness. A value is **data-shaped** when its shape depends on the contents of an input: what `NonZero`
//! returns, a `Reshape` to a computed shape. Such a value has a known shape for one input only, so no operator boundary may
//! cross it and the `Shape` of it is no constant.

use crate::index::{self, GraphIndex, Origin, ValueId};
use crate::model::is_default_domain;
use crate::port;
use crate::proto::{GraphProto, NodeProto};
use crate::tensor;
use std::collections::HashMap;
use trefoil_core::TensorInfo;

/// Facts about values and nodes, by index.
#[derive(Debug, Clone, Default)]
pub(crate) struct Analysis {
    /// By value: constant.
    pub(crate) constant: Vec<bool>,
    /// By value: shape depends on data.
    pub(crate) data_shaped: Vec<bool>,
    /// By node: all that it writes is constant.
    pub(crate) constant_node: Vec<bool>,
}

/// Whether `Shape` and `Size` of a statically shaped activation count as constants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shapes {
    /// They do: before folding, which turns them into initializers.
    Constant,
    /// They do not: after folding, where a constant node must read constants only, and no graph output is constant.
    Activation,
}

/// Operators that give another result each time.
const RANDOM: &[&str] =
    &["RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"];

/// Operators whose output shape depends on the contents of a data input, always.
const DATA_SHAPED: &[&str] = &["NonZero", "Unique", "NonMaxSuppression", "Compress", "StringSplit"];

/// Operators with inputs that are parameters of the output shape: harmless when constant.
const SHAPE_PARAMETERS: &[(&str, &[usize])] = &[
    ("AffineGrid", &[1]),
    ("BlackmanWindow", &[0]),
    ("CenterCropPad", &[1]),
    ("Col2Im", &[1, 2]),
    ("ConstantOfShape", &[0]),
    ("DFT", &[1]),
    ("Expand", &[1]),
    ("HammingWindow", &[0]),
    ("HannWindow", &[0]),
    ("MaxUnpool", &[2]),
    ("MelWeightMatrix", &[0, 1]),
    ("OneHot", &[1]),
    ("Pad", &[1, 3]),
    ("Range", &[0, 1, 2]),
    ("ReduceL1", &[1]),
    ("ReduceL2", &[1]),
    ("ReduceLogSum", &[1]),
    ("ReduceLogSumExp", &[1]),
    ("ReduceMax", &[1]),
    ("ReduceMean", &[1]),
    ("ReduceMin", &[1]),
    ("ReduceProd", &[1]),
    ("ReduceSum", &[1]),
    ("ReduceSumSquare", &[1]),
    ("Reshape", &[1]),
    ("Resize", &[1, 2, 3]),
    ("STFT", &[1, 3]),
    ("Slice", &[1, 2, 3, 4]),
    ("Split", &[1]),
    ("Squeeze", &[1]),
    ("Tile", &[1]),
    ("TopK", &[1]),
    ("Trilu", &[]),
    ("Unsqueeze", &[1]),
    ("Upsample", &[1]),
];

/// Whether a node gives the same outputs for the same inputs. Custom operators may do anything; those of ONNX
/// Runtime's own domain are pure.
fn is_deterministic(node: &NodeProto) -> bool {
    let known = is_default_domain(node) || matches!(node.domain(), "com.microsoft" | "ai.onnx.ml");
    // Dropout's training mode is its third input; a constant `true` there means random.
    let training = node.op_type() == "Dropout" && node.input.get(2).is_some_and(|input| !input.is_empty());
    known
        && !training
        && !RANDOM.contains(&node.op_type())
        && index::subgraphs(node).all(|body| body.node.iter().all(is_deterministic))
}

/// Analyses a topologically sorted graph. `infos` are types and shapes by value, where known.
pub(crate) fn analyse(
    graph: &GraphProto,
    index: &GraphIndex,
    infos: &[Option<TensorInfo>],
    shapes: Shapes,
) -> Analysis {
    let values = index.names.len();
    let mut result = Analysis {
        constant: (0..values).map(|value| index.is_constant(value as ValueId)).collect(),
        data_shaped: vec![false; values],
        constant_node: vec![false; graph.node.len()],
    };
    let parameters: HashMap<&str, &[usize]> = SHAPE_PARAMETERS.iter().copied().collect();
    for (position, node) in graph.node.iter().enumerate() {
        let (reads, writes) = (&index.reads[position], &index.writes[position]);
        let of_shape = is_default_domain(node)
            && matches!(node.op_type(), "Shape" | "Size")
            && reads.first().is_some_and(|&value| !result.data_shaped[value as usize]);
        let constant = match shapes {
            Shapes::Constant if of_shape => reads.first().is_some_and(|&value| infos[value as usize].is_some()),
            _ => reads.iter().all(|&value| result.constant[value as usize]) && is_deterministic(node),
        };
        let is_output = writes.iter().any(|&value| index.is_output[value as usize]);
        let constant = constant && !writes.is_empty() && !(shapes == Shapes::Activation && is_output);
        result.constant_node[position] = constant;
        for (output, &value) in writes.iter().enumerate() {
            result.constant[value as usize] = constant;
            result.data_shaped[value as usize] =
                !constant && is_data_shaped(node, output, index, infos, &result, &parameters, reads);
        }
    }
    result
}

fn is_data_shaped(
    node: &NodeProto,
    output: usize,
    index: &GraphIndex,
    infos: &[Option<TensorInfo>],
    so_far: &Analysis,
    parameters: &HashMap<&str, &[usize]>,
    reads: &[ValueId],
) -> bool {
    let is_constant =
        |name: &str| name.is_empty() || index.value(name).is_some_and(|value| so_far.constant[value as usize]);
    if is_default_domain(node) {
        let operator = node.op_type();
        if matches!(operator, "Shape" | "Size") {
            return false;
        }
        if DATA_SHAPED.contains(&operator) {
            return true;
        }
        if let Some(positions) = parameters.get(operator)
            && positions.iter().filter_map(|&position| node.input.get(position)).any(|name| !is_constant(name))
        {
            return true;
        }
        if operator == "If"
            && !node.input.first().is_some_and(|name| is_constant(name))
            && !branches_agree(node, output)
        {
            return true;
        }
        if operator == "Loop" {
            let trip_count_known = node.input.first().is_some_and(|name| !name.is_empty() && is_constant(name))
                && node.input.get(1).is_none_or(|name| is_constant(name))
                && condition_never_changes(node);
            let carried = node.input.len().saturating_sub(2);
            let shape = |name: Option<&String>| {
                let value = name.and_then(|name| index.value(name))?;
                infos[value as usize].as_ref().map(|info| &info.shape)
            };
            let keeps_shape = output < carried && shape(node.output.get(output)) == shape(node.input.get(2 + output));
            if !trip_count_known && !keeps_shape {
                return true;
            }
        }
    }
    reads.iter().any(|&value| so_far.data_shaped[value as usize])
}

/// Whether both branches of an `If` declare the same static shape for an output.
fn branches_agree(node: &NodeProto, output: usize) -> bool {
    let mut declared = index::subgraphs(node).map(|branch| {
        let result = branch.output.get(output)?;
        let constant = branch.initializer.iter().find(|tensor| tensor.name() == result.name());
        constant.map(tensor::shape_of).or_else(|| port::port(result).info().map(|info| info.shape))
    });
    match (declared.next().flatten(), declared.next().flatten()) {
        (Some(one), Some(other)) => one == other,
        _ => false,
    }
}

/// Whether a `Loop` body hands its condition on unchanged (or a constant), so that the trip count alone ends the loop.
fn condition_never_changes(node: &NodeProto) -> bool {
    let Some(body) = index::subgraphs(node).next() else { return false };
    let Some(output) = body.output.first() else { return false };
    let mut name = output.name();
    // Each step moves to an earlier node of a sorted body, so this ends.
    for producer in body.node.iter().rev() {
        if !producer.output.iter().any(|written| written == name) {
            continue;
        }
        match producer.op_type() {
            "Identity" | "Cast" => name = producer.input.first().map_or("", String::as_str),
            "Constant" => return true,
            _ => return false,
        }
    }
    body.input.get(1).is_some_and(|input| input.name() == name)
        || body.initializer.iter().any(|tensor| tensor.name() == name)
}

/// Types and shapes of all values that are known without a traced run: initializers, inputs, static declarations.
pub(crate) fn declared_infos(graph: &GraphProto, index: &GraphIndex) -> Vec<Option<TensorInfo>> {
    let mut infos: Vec<Option<TensorInfo>> = vec![None; index.names.len()];
    for declared in graph.value_info.iter().chain(&graph.output) {
        if let (Some(value), Some(info)) = (index.value(declared.name()), port::port(declared).info())
            && !port::is_other_type(declared)
        {
            infos[value as usize] = Some(info);
        }
    }
    for (value, origin) in index.origin.iter().enumerate() {
        match origin {
            Origin::Constant(position) => infos[value] = Some(tensor::info_of(&graph.initializer[*position as usize])),
            Origin::Sparse(position) => {
                infos[value] = Some(tensor::sparse_info(&graph.sparse_initializer[*position as usize]));
            }
            Origin::Input(position) => infos[value] = port::port(&graph.input[*position as usize]).info(),
            Origin::Node(_) => {}
        }
    }
    infos
}
