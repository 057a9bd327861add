//! How many operations a node does, from static shapes. Multiply and add count apart.

use crate::Prepared;
use crate::index::NodeId;
use crate::proto::NodeProto;
use std::collections::BTreeMap;

/// A sum of operations, and whether every node of it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    /// Operations of the nodes that are known.
    pub(crate) known: u64,
    /// Whether all are.
    pub(crate) complete: bool,
}

/// Operators that only move or select elements.
const MOVES: &[&str] = &[
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Identity",
    "Slice",
    "Split",
    "Concat",
    "Gather",
    "GatherElements",
    "GatherND",
    "ScatterND",
    "ScatterElements",
    "Expand",
    "Tile",
    "Pad",
    "Shape",
    "Size",
    "Constant",
    "ConstantOfShape",
    "Range",
    "DepthToSpace",
    "SpaceToDepth",
    "EyeLike",
    "Trilu",
    "OneHot",
    "ReverseSequence",
    "Dropout",
];

/// Reductions: one operation per input element.
const REDUCTIONS: &[&str] = &[
    "ReduceMean",
    "ReduceSum",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceSumSquare",
    "ArgMax",
    "ArgMin",
    "CumSum",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "TopK",
];

/// Operations per output element of operators that do several.
const PER_ELEMENT: &[(&str, u64)] = &[
    ("BatchNormalization", 2),
    ("Softmax", 5),
    ("LogSoftmax", 5),
    ("LayerNormalization", 8),
    ("RMSNormalization", 5),
    ("InstanceNormalization", 8),
    ("GroupNormalization", 8),
    ("HardSwish", 4),
    ("Gelu", 8),
    ("QuantizeLinear", 3),
    ("DequantizeLinear", 2),
];

/// Standard elementwise operators: one operation per output element.
const ELEMENTWISE: &[&str] = &[
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Sqrt",
    "Exp",
    "Log",
    "Erf",
    "Tanh",
    "Sigmoid",
    "Relu",
    "LeakyRelu",
    "PRelu",
    "Clip",
    "HardSigmoid",
    "Abs",
    "Neg",
    "Floor",
    "Ceil",
    "Round",
    "Sign",
    "Sin",
    "Cos",
    "Reciprocal",
    "Max",
    "Min",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "Not",
    "And",
    "Or",
    "Xor",
    "Where",
    "Cast",
    "Elu",
    "Selu",
    "Softplus",
    "Softsign",
    "Mod",
    "Mean",
    "Sum",
    "IsNaN",
    "IsInf",
    "Tan",
    "Atan",
    "Asin",
    "Acos",
    "Sinh",
    "Cosh",
];

/// Sums up the operations of a set of nodes.
pub(crate) fn estimate(prepared: &Prepared, nodes: &[NodeId]) -> Count {
    let mut count = Count { known: 0, complete: true };
    for &node in nodes {
        let proto = &prepared.graph().node[node as usize];
        match of_node(prepared, proto) {
            Some(operations) => count.known = count.known.saturating_add(operations),
            None => count.complete = false,
        }
    }
    count
}

struct Shapes<'a> {
    prepared: &'a Prepared,
    node: &'a NodeProto,
}

impl Shapes<'_> {
    fn of(&self, name: Option<&String>) -> Option<&[u64]> {
        let value = self.prepared.index.value(name.filter(|name| !name.is_empty())?)?;
        self.prepared.infos[value as usize].as_ref().map(|info| info.shape.as_slice())
    }

    fn input(&self, position: usize) -> Option<&[u64]> {
        self.of(self.node.input.get(position))
    }

    fn output(&self) -> Option<&[u64]> {
        self.of(self.node.output.first())
    }

    fn int(&self, name: &str) -> Option<i64> {
        self.node.attribute.iter().find(|attribute| attribute.name() == name).map(super::proto::AttributeProto::i)
    }
}

fn product(extents: &[u64]) -> u64 {
    extents.iter().fold(1u64, |product, &extent| product.saturating_mul(extent))
}

fn times(factors: &[u64]) -> u64 {
    product(factors)
}

fn of_node(prepared: &Prepared, node: &NodeProto) -> Option<u64> {
    let shapes = Shapes { prepared, node };
    let operator = node.op_type();
    if MOVES.contains(&operator) {
        return Some(0);
    }
    if ELEMENTWISE.contains(&operator) {
        return shapes.output().map(product);
    }
    if REDUCTIONS.contains(&operator) {
        return shapes.input(0).map(product);
    }
    if let Some((_, each)) = PER_ELEMENT.iter().find(|(name, _)| *name == operator) {
        return shapes.output().map(|shape| times(&[product(shape), *each]));
    }
    match operator {
        "MatMul" | "MatMulInteger" | "FusedMatMul" => {
            let inner = *shapes.input(0)?.last()?;
            Some(times(&[2, product(shapes.output()?), inner]))
        }
        "QLinearMatMul" => Some(times(&[2, product(shapes.output()?), *shapes.input(0)?.last()?])),
        "MatMulNBits" => Some(times(&[2, product(shapes.output()?), shapes.int("K")? as u64])),
        "Gemm" => {
            let first = shapes.input(0)?;
            let inner = if shapes.int("transA").unwrap_or(0) == 0 { *first.get(1)? } else { *first.first()? };
            let bias =
                if node.input.get(2).is_some_and(|name| !name.is_empty()) { product(shapes.output()?) } else { 0 };
            Some(times(&[2, product(shapes.output()?), inner]).saturating_add(bias))
        }
        "Conv" | "ConvInteger" | "FusedConv" => convolution(shapes.output()?, shapes.input(1)?, node, 2),
        "QLinearConv" => convolution(shapes.output()?, shapes.input(3)?, node, 8),
        "ConvTranspose" => {
            let weights = shapes.input(1)?;
            let bias =
                if node.input.get(2).is_some_and(|name| !name.is_empty()) { product(shapes.output()?) } else { 0 };
            // Every input element meets each weight of its input channel once.
            Some(times(&[2, product(shapes.input(0)?), product(weights.get(1..)?)]).saturating_add(bias))
        }
        "MaxPool" | "AveragePool" | "LpPool" => {
            let kernel = node.attribute.iter().find(|attribute| attribute.name() == "kernel_shape")?;
            let window = kernel.ints.iter().fold(1u64, |size, &extent| size.saturating_mul(extent.max(1) as u64));
            Some(times(&[product(shapes.output()?), window]))
        }
        "Einsum" => einsum(&shapes),
        "LSTM" => recurrent(&shapes, 4),
        "GRU" => recurrent(&shapes, 3),
        "RNN" => recurrent(&shapes, 1),
        "Attention" | "MultiHeadAttention" => attention(&shapes),
        "DFT" => {
            let length = product(shapes.input(0)?);
            // 5 N log₂ N of the radix-2 algorithm, with N the longest axis as an upper bound on the transformed one.
            let longest = *shapes.input(0)?.iter().max()?;
            Some(times(&[5, length, u64::from(longest.max(2).ilog2())]))
        }
        _ => None,
    }
}

fn convolution(output: &[u64], weights: &[u64], node: &NodeProto, bias_input: usize) -> Option<u64> {
    // Weights are [outputs, inputs per group, kernel…].
    let per_output = product(weights.get(1..)?);
    let bias = if node.input.get(bias_input).is_some_and(|name| !name.is_empty()) { product(output) } else { 0 };
    Some(times(&[2, product(output), per_output]).saturating_add(bias))
}

/// Two operands: two operations for every combination of all labels.
fn einsum(shapes: &Shapes<'_>) -> Option<u64> {
    let equation = shapes.node.attribute.iter().find(|attribute| attribute.name() == "equation")?;
    let equation = std::str::from_utf8(equation.s()).ok()?.replace(' ', "");
    let terms: Vec<&str> = equation.split("->").next()?.split(',').collect();
    if terms.len() != shapes.node.input.len() || equation.contains('.') {
        return None;
    }
    let mut extents: BTreeMap<char, u64> = BTreeMap::new();
    for (position, term) in terms.iter().enumerate() {
        for (label, &extent) in term.chars().zip(shapes.input(position)?) {
            extents.insert(label, extent);
        }
    }
    let all: Vec<u64> = extents.into_values().collect();
    Some(times(&[terms.len() as u64, product(&all)]))
}

/// Inputs [steps, batch, features], weights [directions, gates · hidden, features].
fn recurrent(shapes: &Shapes<'_>, gates: u64) -> Option<u64> {
    let &[steps, batch, features] = shapes.input(0)? else { return None };
    let directions = *shapes.input(1)?.first()?;
    let hidden = u64::try_from(shapes.int("hidden_size")?).ok()?;
    Some(times(&[2, steps, batch, directions, gates, hidden, features.saturating_add(hidden)]))
}

/// Scores and their product with the values: 4 · batch · heads · queries · keys · width.
fn attention(shapes: &Shapes<'_>) -> Option<u64> {
    let (query, key) = (shapes.input(0)?, shapes.input(1)?);
    match (query, key) {
        ([batch, heads, queries, width], [_, _, keys, _]) => Some(times(&[4, *batch, *heads, *queries, *keys, *width])),
        // [batch, length, heads · width]
        ([batch, queries, hidden], [_, keys, _]) => Some(times(&[4, *batch, *queries, *keys, *hidden])),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{GraphBuilder, node, with_int, with_string};
    use std::collections::BTreeMap as Map;
    use trefoil_core::{DataType, TensorInfo};

    fn flops(builder: GraphBuilder, values: &[(&str, &[u64])]) -> Option<u64> {
        let folder = tempfile::tempdir().unwrap();
        let path = builder.write(folder.path(), "m.onnx").unwrap();
        let known: Map<String, TensorInfo> = values
            .iter()
            .map(|&(name, shape)| (name.to_owned(), TensorInfo::new(name, DataType::F32, shape)))
            .collect();
        let prepared = Prepared::new(crate::Model::load(&path).unwrap(), &known).unwrap();
        let count = estimate(&prepared, &[0]);
        count.complete.then_some(count.known)
    }

    #[test]
    fn matmul_counts_multiply_and_add() {
        let graph = GraphBuilder::new()
            .input("a", &[5, 2, 3])
            .input("b", &[3, 7])
            .node(node("MatMul", &["a", "b"], &["y"]))
            .output("y");
        assert_eq!(flops(graph, &[("y", &[5, 2, 7])]), Some(2 * 5 * 2 * 3 * 7));
    }

    #[test]
    fn gemm_with_a_transposed_operand_and_bias() {
        let graph = GraphBuilder::new()
            .input("a", &[3, 2])
            .input("b", &[3, 7])
            .constant("c", &[7], &[0.0; 7])
            .node(with_int(node("Gemm", &["a", "b", "c"], &["y"]), "transA", 1))
            .output("y");
        assert_eq!(flops(graph, &[("y", &[2, 7])]), Some(2 * 2 * 3 * 7 + 14));
    }

    #[test]
    fn grouped_convolution_and_its_transpose() {
        let graph = GraphBuilder::new()
            .input("x", &[1, 4, 8, 8])
            .constant("w", &[6, 2, 3, 3], &[0.0; 108])
            .node(with_int(node("Conv", &["x", "w"], &["y"]), "group", 2))
            .output("y");
        assert_eq!(flops(graph, &[("y", &[1, 6, 6, 6])]), Some(2 * (6 * 6 * 6) * (2 * 3 * 3)));
        let graph = GraphBuilder::new()
            .input("x", &[1, 4, 8, 8])
            .constant("w", &[4, 6, 2, 2], &[0.0; 96])
            .node(node("ConvTranspose", &["x", "w"], &["y"]))
            .output("y");
        assert_eq!(flops(graph, &[("y", &[1, 6, 9, 9])]), Some(2 * (4 * 8 * 8) * (6 * 2 * 2)));
    }

    #[test]
    fn attention_and_einsum_agree_on_scores() {
        let graph = GraphBuilder::new()
            .input("q", &[2, 3, 5, 8])
            .input("k", &[2, 3, 7, 8])
            .input("v", &[2, 3, 7, 8])
            .node(node("Attention", &["q", "k", "v"], &["y"]))
            .output("y");
        assert_eq!(flops(graph, &[("y", &[2, 3, 5, 8])]), Some(4 * 2 * 3 * 5 * 7 * 8));
        let graph = GraphBuilder::new()
            .input("q", &[2, 3, 5, 8])
            .input("k", &[2, 3, 7, 8])
            .node(with_string(node("Einsum", &["q", "k"], &["y"]), "equation", "bhqd,bhkd->bhqk"))
            .output("y");
        assert_eq!(flops(graph, &[("y", &[2, 3, 5, 7])]), Some(2 * 2 * 3 * 5 * 7 * 8));
    }

    #[test]
    fn unknown_operators_are_unknown() {
        let graph = GraphBuilder::new().input("x", &[2]).node(node("Frobnicate", &["x"], &["y"])).output("y");
        assert_eq!(flops(graph, &[("y", &[2])]), None);
    }

    #[test]
    fn no_operator_is_listed_twice() {
        let single = MOVES.iter().chain(REDUCTIONS).chain(ELEMENTWISE).copied();
        let listed: Vec<&str> = single.chain(PER_ELEMENT.iter().map(|(name, _)| *name)).collect();
        assert_eq!(listed.iter().collect::<std::collections::BTreeSet<_>>().len(), listed.len());
    }
}
