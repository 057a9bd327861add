//! Reading and fusing a model of 24,917 nodes: the goal is at most one second for both.

use std::collections::BTreeMap;
use trefoil_core::{DataType, Granularity, TensorInfo};
use trefoil_onnx::testing::{GraphBuilder, named, node, with_ints};
use trefoil_onnx::{Model, Prepared};

const NODES: usize = 24_917;

fn main() {
    divan::main();
}

/// Transformer-like blocks until the count is reached: norms, products, activations, residuals, shape arithmetic.
fn model_bytes() -> Vec<u8> {
    let mut builder = GraphBuilder::new()
        .input("x", &[1, 16])
        .constant("w", &[16, 16], &[0.01; 256])
        .constant("b", &[16], &[0.1; 16])
        .constant("two", &[1], &[2.0])
        .constant("eps", &[1], &[1e-5]);
    let mut made = 0;
    let mut current = "x".to_owned();
    let mut add = |builder: GraphBuilder, operator: &str, inputs: &[&str], output: &str| {
        let mut proto = named(node(operator, inputs, &[output]), output);
        if operator == "ReduceMean" {
            proto = with_ints(proto, "axes", &[-1]);
        }
        made += 1;
        (builder.node(proto), made == NODES)
    };
    let mut block = 0;
    'all: loop {
        let n = |part: &str| format!("block{block}.{part}");
        let steps: Vec<(&str, Vec<String>, String)> = vec![
            ("ReduceMean", vec![current.clone()], n("mean")),
            ("Sub", vec![current.clone(), n("mean")], n("centred")),
            ("Pow", vec![n("centred"), "two".into()], n("square")),
            ("ReduceMean", vec![n("square")], n("variance")),
            ("Add", vec![n("variance"), "eps".into()], n("guarded")),
            ("Sqrt", vec![n("guarded")], n("deviation")),
            ("Div", vec![n("centred"), n("deviation")], n("normal")),
            ("Mul", vec![n("normal"), "b".into()], n("scaled")),
            ("Add", vec![n("scaled"), "b".into()], n("affine")),
            ("MatMul", vec![n("affine"), "w".into()], n("product")),
            ("Add", vec![n("product"), "b".into()], n("biased")),
            ("Sigmoid", vec![n("biased")], n("gate")),
            ("Mul", vec![n("biased"), n("gate")], n("silu")),
            ("Shape", vec![n("silu")], n("shape")),
            ("Reshape", vec![n("silu"), n("shape")], n("shaped")),
            ("MatMul", vec![n("shaped"), "w".into()], n("down")),
            ("Add", vec![current.clone(), n("down")], n("out")),
        ];
        for (operator, inputs, output) in steps {
            let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
            let (next, full) = add(builder, operator, &inputs, &output);
            builder = next;
            current = output;
            if full {
                break 'all;
            }
        }
        block += 1;
    }
    builder.output(&current).bytes()
}

fn values(model: &Model) -> BTreeMap<String, TensorInfo> {
    (0..model.node_count())
        .filter_map(|node| model.node_values(node))
        .flat_map(|(_, writes)| writes.into_iter().map(str::to_owned).collect::<Vec<_>>())
        .map(|name| (name.clone(), TensorInfo::new(name, DataType::F32, [1u64, 16])))
        .collect()
}

fn load(bytes: &[u8]) -> Model {
    Model::decode(bytes.to_vec().into(), std::path::Path::new("big.onnx")).expect("a valid model")
}

#[divan::bench(sample_count = 10)]
fn read_24917_nodes(bencher: divan::Bencher<'_, '_>) {
    let bytes = model_bytes();
    bencher.bench_local(|| load(&bytes));
}

#[divan::bench(sample_count = 10)]
fn prepare_24917_nodes(bencher: divan::Bencher<'_, '_>) {
    let model = load(&model_bytes());
    let values = values(&model);
    bencher.with_inputs(|| model.clone()).bench_local_values(|model| Prepared::new(model, &values).expect("prepares"));
}

#[divan::bench(sample_count = 10, args = [Granularity::Fused, Granularity::Node])]
fn group_24917_nodes(bencher: divan::Bencher<'_, '_>, granularity: Granularity) {
    let model = load(&model_bytes());
    let values = values(&model);
    let prepared = Prepared::new(model, &values).expect("prepares");
    bencher.bench_local(|| prepared.operator_graph(granularity, &[]).expect("groups"));
}

/// The whole way, as the goal counts it.
#[divan::bench(sample_count = 10)]
fn read_prepare_and_fuse_24917_nodes(bencher: divan::Bencher<'_, '_>) {
    let bytes = model_bytes();
    let values = values(&load(&bytes));
    bencher.bench_local(|| {
        let prepared = Prepared::new(load(&bytes), &values).expect("prepares");
        prepared.operator_graph(Granularity::Fused, &[]).expect("groups")
    });
}
