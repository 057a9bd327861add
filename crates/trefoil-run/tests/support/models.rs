//! Small real models, made in the test, and plans over them.
#![allow(dead_code)] // each test and bench uses its part

use crate::support;
use std::collections::BTreeMap;
use std::path::Path;
use trefoil_core::{DataType, Granularity, HostTensor, OperatorGraph, Plan, TensorInfo, Unit};
use trefoil_onnx::testing::{GraphBuilder, named, node};
use trefoil_onnx::{Model, Prepared};

/// A prepared model with its operators and reference values (inputs included).
pub struct SmallModel {
    pub prepared: Prepared,
    pub graph: OperatorGraph,
    pub values: BTreeMap<String, HostTensor>,
}

impl SmallModel {
    fn new(folder: &Path, builder: GraphBuilder, values: BTreeMap<String, HostTensor>) -> Self {
        let path = builder.write(folder, "model.onnx").unwrap();
        let prepared = Prepared::new(Model::load(&path).unwrap(), &values).unwrap();
        let graph = prepared.operator_graph(Granularity::Node, &[]).unwrap();
        Self { prepared, graph, values }
    }

    pub fn inputs(&self) -> Vec<&HostTensor> {
        self.graph.inputs.iter().map(|&id| &self.values[&self.graph.tensor(id).name]).collect()
    }
}

/// `x → Relu → t0 → Relu → t1 …`, `count` nodes of `width` values.
pub fn relu_chain(folder: &Path, count: usize, width: u64) -> SmallModel {
    let shape = [1, width as i64];
    let mut builder = GraphBuilder::new().input("x", &shape);
    let numbers: Vec<f32> = (0..width).map(|index| index as f32 - 7.5).collect();
    let positive: Vec<f32> = numbers.iter().map(|value| value.max(0.0)).collect();
    let mut values = BTreeMap::from([("x".to_owned(), HostTensor::from_f32("x", [1, width], &numbers))]);
    for index in 0..count {
        let from = if index == 0 { "x".to_owned() } else { format!("t{}", index - 1) };
        let to = format!("t{index}");
        builder = builder.node(named(node("Relu", &[&from], &[&to]), &format!("relu{index}")));
        values.insert(to.clone(), HostTensor::from_f32(to.as_str(), [1, width], &positive));
    }
    SmallModel::new(folder, builder.output(&format!("t{}", count - 1)), values)
}

/// Two branches of `MatMul` and `Relu` from one input, joined by `Add` and a last `MatMul`:
/// operators 0 `a0` 1 `a1` (branch a), 2 `b0` 3 `b1` (branch b), 4 `join`, 5 `last` — by name, not number.
pub fn two_branches(folder: &Path, width: usize) -> SmallModel {
    let square = [width as i64, width as i64];
    let mut random = support::Random(11);
    let mut matrix = || -> Vec<f32> {
        (0..width * width).map(|_| (random.below(2001) as f32 - 1000.0) / 1000.0 / (width as f32).sqrt()).collect()
    };
    let (first, second, third) = (matrix(), matrix(), matrix());
    let input: Vec<f32> = (0..width).map(|index| ((index * 37 % 19) as f32 - 9.0) / 5.0).collect();
    let product = |vector: &[f32], weights: &[f32]| -> Vec<f32> {
        (0..width).map(|column| (0..width).map(|row| vector[row] * weights[row * width + column]).sum()).collect()
    };
    let relu = |vector: &[f32]| -> Vec<f32> { vector.iter().map(|value| value.max(0.0)).collect() };
    let a0 = product(&input, &first);
    let a1 = relu(&a0);
    let b0 = product(&input, &second);
    let b1 = relu(&b0);
    let join: Vec<f32> = a1.iter().zip(&b1).map(|(a, b)| a + b).collect();
    let last = product(&join, &third);
    let tensor = |name: &str, values: &[f32]| (name.to_owned(), HostTensor::from_f32(name, [1, width as u64], values));
    let values = BTreeMap::from([
        tensor("x", &input),
        tensor("a0", &a0),
        tensor("a1", &a1),
        tensor("b0", &b0),
        tensor("b1", &b1),
        tensor("join", &join),
        tensor("last", &last),
    ]);
    let builder = GraphBuilder::new()
        .input("x", &[1, width as i64])
        .constant("w1", &square, &first)
        .constant("w2", &square, &second)
        .constant("w3", &square, &third)
        .node(named(node("MatMul", &["x", "w1"], &["a0"]), "a0"))
        .node(named(node("Relu", &["a0"], &["a1"]), "a1"))
        .node(named(node("MatMul", &["x", "w2"], &["b0"]), "b0"))
        .node(named(node("Relu", &["b0"], &["b1"]), "b1"))
        .node(named(node("Add", &["a1", "b1"], &["join"]), "join"))
        .node(named(node("MatMul", &["join", "w3"], &["last"]), "last"))
        .output("last");
    SmallModel::new(folder, builder, values)
}

/// `r = Relu(x)`, `d = r − almost x`, `y = x + d` for large `x`: rounding of `r` is large in `d` and gone in `y`. Outputs `y`,
/// and `d` if asked for.
pub fn cancelling(folder: &Path, hand_out_difference: bool) -> SmallModel {
    let large: Vec<f32> = (0..8u8).map(|index| 100_000.0 + f32::from(index) * 64.0).collect();
    let near: Vec<f32> = large.iter().map(|value| value - 0.5).collect();
    let sum: Vec<f32> = large.iter().map(|value| value + 0.5).collect();
    let tensor = |name: &str, values: &[f32]| (name.to_owned(), HostTensor::from_f32(name, [1, 8u64], values));
    let values = BTreeMap::from([tensor("x", &large), tensor("r", &large), tensor("d", &[0.5; 8]), tensor("y", &sum)]);
    let mut builder = GraphBuilder::new()
        .input("x", &[1, 8])
        .constant("near", &[1, 8], &near)
        .node(named(node("Relu", &["x"], &["r"]), "r"))
        .node(named(node("Sub", &["r", "near"], &["d"]), "d"))
        .node(named(node("Add", &["x", "d"], &["y"]), "y"))
        .output("y");
    if hand_out_difference {
        builder = builder.output("d");
    }
    SmallModel::new(folder, builder, values)
}

/// One segment per operator; `place` gives each operator's unit (index in `units`).
pub fn plan_of(graph: &OperatorGraph, units: &[Unit], place: impl Fn(usize) -> usize) -> Plan {
    let cuts: Vec<_> = (0..graph.len()).map(|index| (vec![index as u32], place(index))).collect();
    let sequence: Vec<_> = (0..graph.len()).map(|segment| (segment, 0)).collect();
    support::plan(graph, units, &cuts, &sequence, true)
}

/// Everything in one segment on one unit.
pub fn whole_plan(graph: &OperatorGraph, unit: &Unit) -> Plan {
    let cuts = [((0..graph.len() as u32).collect(), 0)];
    support::plan(graph, std::slice::from_ref(unit), &cuts, &[(0, 0)], false)
}

/// `f32` description.
pub fn floats(name: &str, shape: &[u64]) -> TensorInfo {
    TensorInfo::new(name, DataType::F32, shape)
}

/// The unit, or `None` with a line that says why; a failure when `TREFOIL_REQUIRE_BACKENDS=1`.
pub fn real_unit(address: &str) -> Option<Unit> {
    match trefoil_run::registry_units(&address.parse().unwrap()) {
        Ok((_, unit)) => Some(unit),
        Err(error) => {
            let required = std::env::var_os("TREFOIL_REQUIRE_BACKENDS").is_some_and(|value| value == "1");
            assert!(!required, "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}
