//! Reading models: what is accepted, what is refused and in which words, and that nothing panics.

use proptest::prelude::*;
use prost::Message;
use std::collections::BTreeMap;
use std::path::Path;
use trefoil_core::{DataType, HostTensor, TensorInfo};
use trefoil_onnx::proto::{ModelProto, StringStringEntryProto, TensorProto};
use trefoil_onnx::testing::{GraphBuilder, graph, node, value, with_graph, with_tensor};
use trefoil_onnx::{Dim, Model, OnnxError, Prepared};

fn decode(bytes: Vec<u8>) -> Result<Model, OnnxError> {
    Model::decode(bytes.into(), Path::new("dir/net.onnx"))
}

fn message<T>(result: Result<T, OnnxError>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn a_good_model_is_described() {
    let model = decode(
        GraphBuilder::new()
            .typed_input(value("x", 1, &["N", "3", "?"]))
            .constant("w", &[2], &[1.0, 2.0])
            .input("w", &[2])
            .node(node("Add", &["x", "w"], &["y"]))
            .output("y")
            .bytes(),
    )
    .unwrap();
    assert_eq!(model.name(), "net");
    assert_eq!(model.node_count(), 1);
    let inputs = model.inputs();
    assert_eq!(inputs.len(), 1, "an initializer that is listed as an input is none");
    assert_eq!(inputs[0].dims, Some(vec![Dim::Symbolic("N".into()), Dim::Fixed(3), Dim::Unknown]));
    assert_eq!(model.outputs()[0].dims, None);
    assert_eq!(model.fingerprint().len(), 32);
}

#[test]
fn old_models_are_saved_as_what_they_have_become() {
    // IR version 3 wants every initializer listed as an input; the traced model lists none.
    let mut old = GraphBuilder::new()
        .input("x", &[2])
        .input("w", &[2])
        .constant("w", &[2], &[1.0, 2.0])
        .node(node("Add", &["x", "w"], &["y"]))
        .output("y")
        .model();
    old.ir_version = Some(3);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("traced.onnx");
    decode(old.encode_to_vec()).unwrap().traced().unwrap().save(&path).unwrap();
    let written = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    assert_eq!((written.ir_version(), written.graph.unwrap().input.len()), (4, 1));
}

#[test]
fn garbage_is_refused_in_one_line() {
    assert!(
        message(decode(b"\xff\xff\xff\xff not a model".to_vec()))
            .starts_with("dir/net.onnx is not an ONNX model or is cut short")
    );
    assert_eq!(message(decode(Vec::new())), "dir/net.onnx holds no graph; it is not an ONNX model (or an empty one)");
    let bytes = graph("y = Relu(x)", &[]).bytes();
    assert!(message(decode(bytes[..bytes.len() - 3].to_vec())).contains("cut short"));
    let mut model = graph("y = Relu(x)", &[]).model();
    model.ir_version = Some(99);
    assert!(message(decode(model.encode_to_vec())).contains("IR version 99"));
    let mut model = graph("y = Relu(x)", &[]).model();
    model.opset_import.clear();
    assert!(message(decode(model.encode_to_vec())).contains("imports no operator set"));
    let mut model = graph("y = Relu(x)", &[]).model();
    model.opset_import[0].version = Some(6);
    assert!(message(decode(model.encode_to_vec())).contains("operator set 6 is older than 7"));
    assert!(message(Model::load(Path::new("no/such/model.onnx"))).starts_with("no/such/model.onnx: "));
    assert!(Model::load(&std::env::temp_dir()).is_err(), "a folder is no model");
}

fn external(location: &str, offset: &str, length: &str) -> TensorProto {
    let entry = |key: &str, value: &str| StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) };
    TensorProto {
        name: Some("w".into()),
        dims: vec![4],
        data_type: Some(1),
        data_location: Some(1),
        external_data: vec![entry("location", location), entry("offset", offset), entry("length", length)],
        ..TensorProto::default()
    }
}

fn load_external(folder: &Path, tensor: TensorProto) -> Result<Model, OnnxError> {
    let builder =
        GraphBuilder::new().input("x", &[4]).initializer(tensor).node(node("Add", &["x", "w"], &["y"])).output("y");
    Model::load(&builder.write(folder, "m.onnx").unwrap())
}

#[test]
fn external_data_is_found_bounded_and_kept_inside() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("model");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(inside.join("w.bin"), [7u8; 32]).unwrap();
    std::fs::write(folder.path().join("secret"), [1u8; 32]).unwrap();
    let model = load_external(&inside, external("w.bin", "8", "16")).unwrap();
    let first = model.fingerprint().to_owned();
    std::fs::write(inside.join("w.bin"), [8u8; 32]).unwrap();
    let model = load_external(&inside, external("w.bin", "8", "16")).unwrap();
    assert_ne!(model.fingerprint(), first, "other weights, other model");

    let text = message(load_external(&inside, external("gone.bin", "0", "16")));
    assert!(text.contains("tensor `w`") && text.contains("gone.bin"), "{text}");
    let text = message(load_external(&inside, external("w.bin", "24", "16")));
    assert!(text.contains("wants bytes 24..40") && text.contains("which has 32"), "{text}");
    assert!(message(load_external(&inside, external("w.bin", "18446744073709551615", "16"))).contains("wants bytes"));
    assert!(message(load_external(&inside, external("w.bin", "0", "12"))).contains("12 bytes where"));
    assert!(message(load_external(&inside, external("w.bin", "-1", "16"))).contains("is not a number of bytes"));
    for outside in ["../secret", "/etc/passwd", ""] {
        let result = load_external(&inside, external(outside, "0", "16"));
        assert!(matches!(result, Err(OnnxError::ExternalEscape { .. })), "{outside}");
    }
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(folder.path().join("secret"), inside.join("link.bin")).unwrap();
        let result = load_external(&inside, external("link.bin", "0", "16"));
        assert!(matches!(result, Err(OnnxError::ExternalEscape { .. })), "a link that leads out");
    }
}

#[test]
fn constant_nodes_become_initializers() {
    let model = decode(
        GraphBuilder::new()
            .input("x", &[4])
            .node(with_tensor(
                node("Constant", &[], &["c"]),
                "value",
                trefoil_onnx::testing::constant("", &[4], &[1.0; 4]),
            ))
            .node(node("Add", &["x", "c"], &["y"]))
            .output("y")
            .bytes(),
    )
    .unwrap();
    assert_eq!(model.node_count(), 1);
}

fn symbolic() -> Model {
    decode(
        GraphBuilder::new()
            .typed_input(value("a", 1, &["N", "3"]))
            .typed_input(value("b", 1, &["N", "M"]))
            .node(node("MatMul", &["a", "b"], &["y"]))
            .output("y")
            .bytes(),
    )
    .unwrap()
}

fn shapes(list: &[(&str, &[u64])]) -> BTreeMap<String, Vec<u64>> {
    list.iter().map(|&(name, shape)| (name.to_owned(), shape.to_vec())).collect()
}

#[test]
fn shapes_are_fixed_through_symbols_and_conflicts_are_told() {
    let mut model = symbolic();
    let open = model.fingerprint().to_owned();
    model.fix_shapes(&shapes(&[("b", &[2, 5])])).unwrap();
    assert_eq!(model.inputs()[0].info().unwrap().shape, [2, 3]);
    assert_ne!(model.fingerprint(), open);
    assert_eq!(
        message(symbolic().fix_shapes(&shapes(&[("a", &[2, 3])]))),
        "model `net` leaves extents open: `b` [2, M]; fix them with --shape b=2,M (numbers for names)"
    );
    assert_eq!(
        message(symbolic().fix_shapes(&shapes(&[("q", &[2])]))),
        "the model has no input `q`; it has `a` [N, 3], `b` [N, M]"
    );
    assert_eq!(
        message(symbolic().fix_shapes(&shapes(&[("a", &[2])]))),
        "input `a` is [N, 3], but the shape given is [2] (1 dims where the model has 2)"
    );
    assert!(message(symbolic().fix_shapes(&shapes(&[("a", &[2, 4])]))).contains("dim 1 is fixed to 3"));
    for (extent, reason) in [(1 << 63, "fit 64 bits"), (1 << 34, "more than 17179869184 elements")] {
        assert!(message(symbolic().fix_shapes(&shapes(&[("a", &[extent, 3])]))).contains(reason));
    }
    assert!(
        message(symbolic().fix_shapes(&shapes(&[("a", &[2, 3]), ("b", &[4, 1])])))
            .contains("`N` is already 2 through input `a`")
    );
    assert!(
        message(Prepared::new(symbolic(), &BTreeMap::<String, HostTensor>::new()))
            .contains("--shape a=N,3 --shape b=N,M")
    );
}

#[test]
fn question_marks_are_not_one_symbol() {
    let mut model = decode(
        GraphBuilder::new()
            .typed_input(value("a", 1, &["?", "?"]))
            .node(node("Relu", &["a"], &["y"]))
            .output("y")
            .bytes(),
    )
    .unwrap();
    model.fix_shapes(&shapes(&[("a", &[2, 3])])).unwrap();
    assert_eq!(model.inputs()[0].info().unwrap().shape, [2, 3]);
}

#[test]
fn a_failed_fix_changes_nothing() {
    let mut model = symbolic();
    let before = (model.inputs(), model.fingerprint().to_owned());
    assert!(model.fix_shapes(&shapes(&[("a", &[2, 3])])).is_err());
    assert_eq!((model.inputs(), model.fingerprint().to_owned()), before);
}

#[test]
fn tracing_adds_tensors_and_leaves_out_sequences() {
    let model = decode(
        GraphBuilder::new()
            .input("x", &[4])
            .node(node("Relu", &["x"], &["a"]))
            .node(node("SplitToSequence", &["a"], &["s"]))
            .node(node("ConcatFromSequence", &["s"], &["b"]))
            .node(node("Dropout", &["b"], &["y", ""]))
            .output("y")
            .bytes(),
    )
    .unwrap();
    let traced = model.traced().unwrap();
    let names: Vec<String> = traced.outputs().into_iter().map(|port| port.name).collect();
    assert_eq!(names, ["y", "a", "b"]);
    assert_ne!(traced.fingerprint(), model.fingerprint());
}

#[test]
fn one_node_stands_alone() {
    let body = GraphBuilder::new().node(node("Add", &["a", "w"], &["t"])).output("t").graph();
    let model = decode(
        GraphBuilder::new()
            .input("x", &[4])
            .typed_input(value("c", 9, &[]))
            .constant("w", &[4], &[0.0; 4])
            .node(node("Relu", &["x"], &["a"]))
            .node(with_graph(with_graph(node("If", &["c"], &["y"]), "then_branch", body.clone()), "else_branch", body))
            .output("y")
            .bytes(),
    )
    .unwrap();
    let nothing: BTreeMap<String, TensorInfo> = BTreeMap::new();
    assert!(message(model.single_node(1, &nothing)).contains("nothing tells the shape of `a`"));
    let known = BTreeMap::from([("a".to_owned(), TensorInfo::new("a", DataType::F32, [4u64]))]);
    let single = model.single_node(1, &known).unwrap();
    let names: Vec<String> = single.inputs().into_iter().map(|port| port.name).collect();
    assert_eq!(names, ["c", "a"], "the captured value is an input, the captured constant is not");
    let folder = tempfile::tempdir().unwrap();
    single.save(&folder.path().join("single.onnx")).unwrap();
    assert_eq!(Model::load(&folder.path().join("single.onnx")).unwrap().node_count(), 1);
    assert!(matches!(model.single_node(2, &nothing), Err(OnnxError::NodeIndex { index: 2, count: 2 })));
}

#[test]
fn saving_keeps_contents_and_writes_weights_once() {
    let folder = tempfile::tempdir().unwrap();
    let builder = GraphBuilder::new()
        .input("x", &[1, 1000])
        .constant("w", &[1000], &vec![0.25; 1000])
        .node(node("Add", &["x", "w"], &["y"]))
        .output("y");
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    let model = Model::load(&builder.write(&source, "m.onnx").unwrap()).unwrap();
    let out = folder.path().join("out");
    model.save(&out.join("a.onnx")).unwrap();
    model.traced().unwrap().save(&out.join("b.onnx")).unwrap();
    let files: Vec<String> = std::fs::read_dir(&out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(files.len(), 3, "two models and one weights file: {files:?}");
    let bytes = std::fs::read(out.join("a.onnx")).unwrap();
    assert!(bytes.len() < 1000);
    let written = ModelProto::decode(bytes.as_slice()).unwrap();
    let tensor = &written.graph.unwrap().initializer[0];
    let offset: u64 =
        tensor.external_data.iter().find(|entry| entry.key() == "offset").unwrap().value().parse().unwrap();
    assert_eq!(offset % 64, 0);
    let again = Model::load(&out.join("a.onnx")).unwrap();
    assert_eq!(again.inputs(), model.inputs());
}

fn seed_models() -> Vec<Vec<u8>> {
    let body = graph("t = Relu(x)", &[]).graph();
    let mut subgraph = body.clone();
    subgraph.input.clear();
    vec![
        graph("d = DequantizeLinear(x, c1); a = Conv(d, c2); s = Shape(a); r = Reshape(a, s); y = Add(r, c3)", &["a"])
            .bytes(),
        GraphBuilder::new()
            .input("x", &[2, 4])
            .typed_input(value("c", 9, &[]))
            .node(with_graph(node("If", &["c"], &["y"]), "then_branch", subgraph))
            .output("y")
            .bytes(),
        GraphBuilder::new()
            .input("x", &[4])
            .initializer(external("w.bin", "0", "16"))
            .node(node("Add", &["x", "w"], &["y"]))
            .output("y")
            .bytes(),
    ]
}

/// Everything that can be done with bytes that somebody else wrote.
fn exercise(bytes: Vec<u8>) {
    let Ok(mut model) = decode(bytes) else { return };
    let _ = model.fix_shapes(&BTreeMap::new());
    let _ = model.traced();
    let values: BTreeMap<String, TensorInfo> = (0..model.node_count())
        .filter_map(|node| model.node_values(node))
        .flat_map(|(_, writes)| writes.into_iter().map(str::to_owned).collect::<Vec<_>>())
        .map(|name| (name.clone(), TensorInfo::new(name, DataType::F32, [2u64, 4])))
        .collect();
    for node in 0..model.node_count() {
        let _ = model.single_node(node, &values);
    }
    if let Ok(prepared) = Prepared::new(model, &values) {
        for granularity in [trefoil_core::Granularity::Fused, trefoil_core::Granularity::Node] {
            if let Ok(graph) = prepared.operator_graph(granularity, &[]) {
                graph.validate().unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_models_never_panic(
        seed in 0usize..3,
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = seed_models().swap_remove(seed);
        for (position, byte) in edits {
            let position = position.index(bytes.len());
            bytes[position] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        exercise(bytes);
    }

    #[test]
    fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        exercise(bytes);
    }
}
