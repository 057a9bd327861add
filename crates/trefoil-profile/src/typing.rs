//! Element types of every value of a graph, from the operator specifications.
//!
//! A traced run must tell its backend the type of each output beforehand. Declared types come first; the rest follows
//! from the node: nearly all operators hand on the type of their first input, and the exceptions are listed here. What is
//! not known (custom operators that change types without declaring it) gets its first input's type, and the backend's
//! refusal shows the mistake.

use std::collections::HashMap;
use trefoil_onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, type_proto,
};

/// `TensorProto.DataType` numbers.
const FLOAT: i32 = 1;
const UINT8: i32 = 2;
const INT32: i32 = 6;
const INT64: i32 = 7;
const BOOL: i32 = 9;

/// Element types by value name, as `TensorProto.DataType` numbers. Values that are no tensors are absent.
pub type Types = HashMap<String, i32>;

/// Infers the types of all values of the top-level graph.
pub fn infer_types(model: &ModelProto) -> Types {
    let mut types = Types::new();
    if let Some(graph) = &model.graph {
        infer_graph(model, graph, &mut types);
    }
    types
}

fn declared(value: &ValueInfoProto) -> Option<i32> {
    match value.r#type.as_ref()?.value.as_ref()? {
        type_proto::Value::TensorType(tensor) => tensor.elem_type.filter(|&code| code != 0),
        _ => None,
    }
}

fn infer_graph(model: &ModelProto, graph: &GraphProto, types: &mut Types) {
    for tensor in &graph.initializer {
        types.insert(tensor.name().to_owned(), tensor.data_type());
    }
    for sparse in graph.sparse_initializer.iter().filter_map(|sparse| sparse.values.as_ref()) {
        types.insert(sparse.name().to_owned(), sparse.data_type());
    }
    for value in graph.input.iter().chain(&graph.value_info).chain(&graph.output) {
        if let Some(code) = declared(value) {
            types.insert(value.name().to_owned(), code);
        }
    }
    infer_nodes(model, &graph.node, types);
}

fn infer_nodes(model: &ModelProto, nodes: &[NodeProto], types: &mut Types) {
    for node in nodes {
        let found = node_types(model, node, types);
        for (name, code) in node.output.iter().zip(found) {
            if let Some(code) = code
                && !name.is_empty()
            {
                types.entry(name.clone()).or_insert(code);
            }
        }
    }
}

fn attribute<'a>(node: &'a NodeProto, name: &str) -> Option<&'a AttributeProto> {
    node.attribute.iter().find(|attribute| attribute.name() == name)
}

fn tensor_type(tensor: Option<&TensorProto>) -> Option<i32> {
    tensor.and_then(|tensor| tensor.data_type)
}

/// Type of each output of a node; `None` where nothing is known.
#[allow(clippy::match_same_arms)] // one arm per family of operators, as the specification groups them
fn node_types(model: &ModelProto, node: &NodeProto, types: &Types) -> Vec<Option<i32>> {
    let input = |index: usize| node.input.get(index).and_then(|name| types.get(name)).copied();
    let number = |name: &str| attribute(node, name).and_then(|attribute| attribute.i).map(|code| code as i32);
    let first = input(0);
    let count = node.output.len();
    let all = |code: Option<i32>| vec![code; count];
    let with = |known: &[Option<i32>]| (0..count).map(|index| known.get(index).copied().flatten()).collect();
    let default_domain = matches!(node.domain(), "" | "ai.onnx");
    let opset =
        model.opset_import.iter().find(|o| matches!(o.domain(), "" | "ai.onnx")).map_or(0, OperatorSetIdProto::version);
    if let Some(function) = model.functions.iter().find(|f| f.name() == node.op_type() && f.domain() == node.domain()) {
        let mut inner: Types = function
            .input
            .iter()
            .zip(&node.input)
            .filter_map(|(inside, outside)| Some((inside.clone(), *types.get(outside)?)))
            .collect();
        infer_nodes(model, &function.node, &mut inner);
        return function.output.iter().map(|name| inner.get(name).copied()).collect();
    }
    match node.op_type() {
        "Cast" => all(number("to")),
        "CastLike" | "Where" => all(input(1)), // the first input is the value or the condition
        "Constant" => all(constant_type(node)),
        "ConstantOfShape" => {
            all(tensor_type(attribute(node, "value").and_then(|value| value.t.as_ref())).or(Some(FLOAT)))
        }
        "Shape" | "Size" | "ArgMax" | "ArgMin" | "NonZero" | "NonMaxSuppression" => all(Some(INT64)),
        "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" | "Not" | "And" | "Or" | "Xor" | "IsNaN"
        | "IsInf" => all(Some(BOOL)),
        "TopK" | "MaxPool" => with(&[first, Some(INT64)]),
        "Unique" => with(&[first, Some(INT64), Some(INT64), Some(INT64)]),
        // Before operator set 10 the mask had the data's type.
        "Dropout" => with(&[first, if opset >= 10 { Some(BOOL) } else { first }]),
        "OneHot" => all(input(2)),
        "EyeLike" | "RandomNormalLike" | "RandomUniformLike" | "Bernoulli" => all(number("dtype").or(first)),
        "RandomNormal" | "RandomUniform" => all(number("dtype").or(Some(FLOAT))),
        "Multinomial" => all(number("dtype").or(Some(INT32))),
        "BlackmanWindow" | "HannWindow" | "HammingWindow" => all(number("output_datatype").or(Some(FLOAT))),
        "MelWeightMatrix" => all(number("output_datatype").or(Some(FLOAT))),
        "QuantizeLinear" => all(input(2).or(number("output_dtype").filter(|&code| code != 0)).or(Some(UINT8))),
        "DequantizeLinear" => all(number("output_dtype").filter(|&code| code != 0).or(input(1))),
        "DynamicQuantizeLinear" => with(&[Some(UINT8), Some(FLOAT), Some(UINT8)]),
        "MatMulInteger" | "ConvInteger" => all(Some(INT32)),
        // The stash type of mean and inverse deviation is f32 unless said otherwise.
        "LayerNormalization" | "SimplifiedLayerNormalization" => {
            let stash = number("stash_type").or(Some(FLOAT));
            with(&[first, stash, stash])
        }
        "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => {
            with(&[first, Some(FLOAT), Some(FLOAT), first])
        }
        // Running statistics may be wider than the data; they exist in training mode only.
        "BatchNormalization" => with(&[first, input(3), input(4)]),
        "If" => branch_types(model, node, types, "then_branch"),
        "Loop" => loop_types(model, node, types),
        "Scan" => scan_types(model, node, types),
        "SequenceAt" | "SplitToSequence" | "SequenceConstruct" | "SequenceInsert" | "SequenceErase"
        | "SequenceEmpty" | "ConcatFromSequence" | "StringSplit" => all(None),
        "SequenceLength" => all(Some(INT64)),
        "ImageDecoder" => all(Some(UINT8)),
        "QLinearConv" | "QLinearMatMul" if default_domain => all(input(7).or(first)),
        "QLinearAdd" | "QLinearMul" => all(first),
        "QGemm" => all(input(8).or(Some(FLOAT))),
        "DynamicQuantizeMatMul" | "MatMulIntegerToFloat" | "QAttention" | "DequantizeBFP" => all(Some(FLOAT)),
        "EmbedLayerNormalization" => with(&[input(2), Some(INT32), input(2)]),
        _ => all(first.or_else(|| node.input.iter().find_map(|name| types.get(name)).copied())),
    }
}

fn constant_type(node: &NodeProto) -> Option<i32> {
    for attribute in &node.attribute {
        match attribute.name() {
            "value" => return tensor_type(attribute.t.as_ref()),
            "sparse_value" => {
                return tensor_type(attribute.sparse_tensor.as_ref().and_then(|sparse| sparse.values.as_ref()));
            }
            "value_float" | "value_floats" => return Some(FLOAT),
            "value_int" | "value_ints" => return Some(INT64),
            _ => {}
        }
    }
    None
}

fn body<'a>(node: &'a NodeProto, name: &str) -> Option<&'a GraphProto> {
    attribute(node, name).and_then(|attribute| attribute.g.as_ref())
}

fn output_types(graph: &GraphProto, types: &Types) -> Vec<Option<i32>> {
    graph.output.iter().map(|output| types.get(output.name()).copied()).collect()
}

fn branch_types(model: &ModelProto, node: &NodeProto, types: &Types, name: &str) -> Vec<Option<i32>> {
    let Some(graph) = body(node, name) else { return Vec::new() };
    let mut inner = types.clone();
    infer_graph(model, graph, &mut inner);
    output_types(graph, &inner)
}

fn loop_types(model: &ModelProto, node: &NodeProto, types: &Types) -> Vec<Option<i32>> {
    let Some(graph) = body(node, "body") else { return Vec::new() };
    let mut inner = types.clone();
    // Body inputs: iteration number, condition, carried values.
    let outside = [Some(INT64), Some(BOOL)].into_iter().chain(node.input.iter().skip(2).map(|n| types.get(n).copied()));
    seed(graph, outside, &mut inner);
    infer_graph(model, graph, &mut inner);
    // Body outputs: condition, carried values, scan outputs.
    output_types(graph, &inner).into_iter().skip(1).collect()
}

fn scan_types(model: &ModelProto, node: &NodeProto, types: &Types) -> Vec<Option<i32>> {
    let Some(graph) = body(node, "body") else { return Vec::new() };
    let mut inner = types.clone();
    seed(graph, node.input.iter().map(|name| types.get(name).copied()), &mut inner);
    infer_graph(model, graph, &mut inner);
    output_types(graph, &inner)
}

fn seed(graph: &GraphProto, outside: impl Iterator<Item = Option<i32>>, inner: &mut Types) {
    for (input, code) in graph.input.iter().zip(outside) {
        if let Some(code) = code {
            inner.insert(input.name().to_owned(), code);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_onnx::testing::{GraphBuilder, node, value, with_graph, with_int};

    #[test]
    fn types_follow_the_specifications() {
        let model = GraphBuilder::new()
            .input("x", &[2, 3])
            .typed_input(value("q", 3, &["2"]))
            .node(node("Relu", &["x"], &["a"]))
            .node(with_int(node("Cast", &["a"], &["h"]), "to", 10))
            .node(node("TopK", &["h", "k"], &["top", "where"]))
            .node(node("Greater", &["top", "top"], &["g"]))
            .node(node("Where", &["g", "h", "h"], &["w"]))
            .node(node("DequantizeLinear", &["q", "x"], &["d"]))
            .node(node("MatMulInteger", &["q", "q"], &["m"]))
            .node(node("LayerNormalization", &["h", "h"], &["n", "mean"]))
            .model();
        let types = infer_types(&model);
        let expected = [
            ("a", 1),
            ("h", 10),
            ("top", 10),
            ("where", 7),
            ("g", 9),
            ("w", 10),
            ("d", 1),
            ("m", 6),
            ("n", 10),
            ("mean", 1),
        ];
        for (name, code) in expected {
            assert_eq!(types.get(name), Some(&code), "{name}");
        }
    }

    #[test]
    fn old_dropout_masks_have_the_datas_type() {
        let mut model = GraphBuilder::new().input("x", &[2]).node(node("Dropout", &["x"], &["y", "mask"])).model();
        assert_eq!(infer_types(&model).get("mask"), Some(&BOOL));
        model.opset_import[0].version = Some(8);
        assert_eq!(infer_types(&model).get("mask"), Some(&FLOAT));
    }

    #[test]
    fn loops_hand_on_what_they_carry_and_scan() {
        let body = GraphBuilder::new()
            .typed_input(value("i", 7, &[]))
            .typed_input(value("go", 9, &[]))
            .typed_input(ValueInfoProto { name: Some("carried".into()), ..ValueInfoProto::default() })
            .node(node("Identity", &["go"], &["go_on"]))
            .node(node("Add", &["carried", "carried"], &["next"]))
            .node(with_int(node("Cast", &["next"], &["seen"]), "to", 6))
            .output("go_on")
            .output("next")
            .output("seen")
            .graph();
        let mut body = body;
        body.output.iter_mut().for_each(|output| output.r#type = None);
        let model = GraphBuilder::new()
            .typed_input(value("x", 10, &["1"]))
            .node(with_graph(node("Loop", &["n", "c", "x"], &["last", "all"]), "body", body))
            .model();
        let types = infer_types(&model);
        assert_eq!((types.get("last"), types.get("all")), (Some(&10), Some(&6)));
    }
}
