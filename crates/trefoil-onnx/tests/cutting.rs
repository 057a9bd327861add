//! Preparing, grouping and extracting: folding, odd outputs, signatures, caching, shared weights, and random convex sets
//! whose pieces must compose to the whole.

use proptest::prelude::*;
use prost::Message;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use trefoil_core::{DataType, Granularity, HostTensor, OperatorClass, OperatorGraph, OperatorId, TensorInfo};
use trefoil_onnx::proto::{GraphProto, ModelProto};
use trefoil_onnx::testing::{GraphBuilder, graph, in_domain, named, node, prepare, value, with_graph, with_int};
use trefoil_onnx::{Extracted, KernelGroup, Model, OnnxError, Prepared};

fn ops(prepared: &Prepared) -> OperatorGraph {
    prepared.operator_graph(Granularity::Node, &[]).unwrap()
}

fn kinds(graph: &OperatorGraph) -> Vec<&str> {
    graph.operators.iter().map(|operator| operator.kind.as_str()).collect()
}

fn read(path: &Path) -> GraphProto {
    // Through the checking reader first: sorted, defined, no duplicates.
    Model::load(path).unwrap();
    ModelProto::decode(std::fs::read(path).unwrap().as_slice()).unwrap().graph.unwrap()
}

fn prepare_with(builder: GraphBuilder, values: &BTreeMap<String, HostTensor>) -> Result<Prepared, OnnxError> {
    Prepared::new(Model::decode(builder.bytes().into(), Path::new("test.onnx"))?, values)
}

fn tensors(list: Vec<HostTensor>) -> BTreeMap<String, HostTensor> {
    list.into_iter().map(|tensor| (tensor.info().name.clone(), tensor)).collect()
}

#[test]
fn shapes_and_what_follows_from_them_are_folded() {
    let builder = graph("a = Relu(x); s = Shape(a); g = Gather(s, i0); q = Concat(g, g); y = Reshape(x, q)", &[]);
    let values = tensors(vec![
        HostTensor::from_f32("a", [2u64, 4], &[0.0; 8]),
        HostTensor::from_i64("g", [1u64], &[4]),
        HostTensor::from_i64("q", [2u64], &[4, 2]),
        HostTensor::from_f32("y", [4u64, 2], &[0.0; 8]),
    ]);
    let prepared = prepare_with(builder, &values).unwrap();
    let operators = ops(&prepared);
    assert_eq!(kinds(&operators), ["Reshape"], "the Relu is only there for its shape");
    assert_eq!(operators.operators[0].weight_bytes, 16);
    let folder = tempfile::tempdir().unwrap();
    let piece = prepared.extract(&operators, &BTreeSet::from([OperatorId(0)]), folder.path()).unwrap();
    let constants = read(&piece.path).initializer;
    assert_eq!(constants.len(), 1);
    assert_eq!(constants[0].raw_data.as_ref().unwrap().as_ref(), [4i64, 2].map(i64::to_le_bytes).concat());
}

#[test]
fn the_shape_of_a_data_shaped_value_is_not_folded_and_not_cut() {
    let prepared =
        prepare(graph("n = NonZero(x); s = Shape(n); t = Transpose(n); y = Expand(t, s); z = Neg(y)", &[])).unwrap();
    let operators = ops(&prepared);
    assert_eq!(operators.len(), 1, "{:?}", kinds(&operators));
    assert_eq!(prepared.data_shaped_outputs(), ["z"]);
    let folder = tempfile::tempdir().unwrap();
    let output = read(&prepared.whole(folder.path()).unwrap().path).output.remove(0);
    assert!(output.r#type.is_some_and(|kind| format!("{kind:?}").contains("dim")), "a rank, open extents");
}

#[test]
fn constants_that_would_grow_stay_with_their_readers() {
    let builder = GraphBuilder::new()
        .input("x", &[1024, 1024])
        .indices("shape", &[1024, 1024])
        .constant("one", &[1], &[1.0])
        .node(node("Expand", &["one", "shape"], &["mask"]))
        .node(node("Add", &["x", "mask"], &["a"]))
        .node(node("Softmax", &["a"], &["b"]))
        .node(node("Mul", &["b", "mask"], &["y"]))
        .output("y");
    let big = |name: &str| HostTensor::zeros(TensorInfo::new(name, DataType::F32, [1024u64, 1024]));
    let values = tensors(["mask", "a", "b", "y"].map(big).into());
    let prepared = prepare_with(builder, &values).unwrap();
    let operators = ops(&prepared);
    assert_eq!(kinds(&operators), ["Add", "Softmax", "Mul"]);
    assert_eq!(operators.operators[0].nodes.len(), 2, "the Expand comes along");
    assert_eq!(operators.operators[2].nodes.len(), 2);
    assert!(operators.operators.iter().all(|operator| !operator.inputs.is_empty()));
}

#[test]
fn quantised_weights_and_random_values_are_not_folded() {
    let builder = graph("w = DequantizeLinear(c1, c2); r = RandomNormal(); a = MatMul(x, w); y = Add(a, r)", &[]);
    let names = ["w", "r", "a", "y"];
    let values = tensors(names.map(|name| HostTensor::zeros(TensorInfo::new(name, DataType::F32, [2u64, 4]))).into());
    let prepared = prepare_with(builder, &values).unwrap();
    assert_eq!(prepared.model().node_count(), 4);
    let operators = ops(&prepared);
    assert_eq!(kinds(&operators), ["RandomNormal", "MatMul", "Add"]);
}

#[test]
fn pass_through_nodes_go_unless_somebody_needs_their_name() {
    let prepared = prepare(graph("a = Identity(x); b = Dropout(a); d = Relu(b); y = Identity(d)", &[])).unwrap();
    assert_eq!(kinds(&ops(&prepared)), ["Relu", "Identity"]);
    let cast = |to: i64| {
        let builder = GraphBuilder::new()
            .input("x", &[2, 4])
            .node(with_int(node("Cast", &["x"], &["a"]), "to", to))
            .node(node("Relu", &["a"], &["y"]))
            .output("y");
        ops(&prepare(builder).unwrap()).len()
    };
    assert_eq!((cast(1), cast(10)), (1, 2));
    let body = graph("t = Neg(a)", &[]).graph();
    let body = GraphProto { input: Vec::new(), ..body };
    let builder = GraphBuilder::new()
        .input("x", &[2, 4])
        .typed_input(value("c", 9, &[]))
        .node(node("Identity", &["x"], &["a"]))
        .node(with_graph(with_graph(node("If", &["c"], &["y"]), "then_branch", body.clone()), "else_branch", body))
        .output("y");
    let prepared = prepare(builder).unwrap();
    let operators = ops(&prepared);
    assert_eq!(kinds(&operators), ["Identity", "If"], "a subgraph captures the name");
    assert_eq!(operators.operators[1].inputs.len(), 2, "condition and captured value");
}

#[test]
fn odd_outputs_are_handed_out() {
    let builder = GraphBuilder::new()
        .input("x", &[2, 4])
        .constant("w", &[4], &[1.0, 2.0, 3.0, 4.0])
        .node(node("Add", &["x", "w"], &["y"]))
        .node(node("Relu", &["y"], &["z"]))
        .output("y")
        .output("w")
        .output("x")
        .output("z")
        .output("y");
    let prepared = prepare(builder).unwrap();
    let operators = ops(&prepared);
    let names: Vec<&str> = operators.outputs.iter().map(|&id| operators.tensor(id).name.as_str()).collect();
    assert_eq!(names, ["y", "w", "x", "z", "y"]);
    assert_eq!(kinds(&operators), ["Identity", "Add", "Relu"], "a constant output has a writer");
    let folder = tempfile::tempdir().unwrap();
    let whole = prepared.whole(folder.path()).unwrap();
    let outputs: Vec<&str> = whole.outputs.iter().map(|info| info.name.as_str()).collect();
    assert_eq!(outputs, ["y", "w", "x", "z"]);
    read(&whole.path);
    let adder = OperatorId(1);
    let piece = prepared.extract(&operators, &BTreeSet::from([adder]), folder.path()).unwrap();
    assert_eq!(piece.outputs[0].name, "y", "an output that others read too");
}

#[test]
fn sequences_are_never_cut() {
    let builder = GraphBuilder::new()
        .input("x", &[2, 4])
        .node(node("Relu", &["x"], &["a"]))
        .node(node("SplitToSequence", &["a"], &["s"]))
        .node(node("ConcatFromSequence", &["s"], &["b"]))
        .node(node("Relu", &["b"], &["y"]))
        .output("y");
    assert_eq!(kinds(&ops(&prepare(builder).unwrap())), ["Relu", "SplitToSequence+ConcatFromSequence", "Relu"]);
}

#[test]
fn what_a_forced_group_encloses_joins_it() {
    // s crosses no boundary, and the Neg between its writer and its reader would wait for both.
    let builder = GraphBuilder::new()
        .input("x", &[2, 4])
        .node(node("Split", &["x"], &["a", "b"]))
        .node(node("SequenceConstruct", &["a"], &["s"]))
        .node(node("ConcatFromSequence", &["s"], &["t"]))
        .node(node("Neg", &["t"], &["u"]))
        .node(node("SequenceInsert", &["s", "u"], &["v"]))
        .node(node("ConcatFromSequence", &["v"], &["y"]))
        .output("y");
    let operators = ops(&prepare(builder).unwrap());
    assert_eq!(operators.len(), 2, "{:?}", kinds(&operators));
}

#[test]
fn a_missing_value_is_named() {
    let model = Model::decode(graph("a = Relu(x); y = Neg(a)", &[]).bytes().into(), Path::new("m.onnx")).unwrap();
    let error = Prepared::new(model, &BTreeMap::<String, HostTensor>::new()).unwrap_err().to_string();
    assert_eq!(
        error,
        "nothing tells the shape of `a` (written by node `a` (Relu)); run the traced model first and pass its results"
    );
}

#[test]
fn signatures_see_values_and_attributes_but_no_names() {
    let sign = |text: &str| ops(&prepare(graph(text, &[])).unwrap()).operators.remove(0).signature;
    assert_eq!(sign("y = Add(x, c1)"), sign("other = Add(source, c9)"));
    assert_ne!(sign("y = Add(x, c1)"), sign("y = Sub(x, c1)"));
    assert_ne!(sign("y = Add(x, c1)"), sign("y = Add(c1, x)"));
    assert_ne!(sign("y = Add(x, x)"), sign("y = Add(x, z)"));
    let scaled = |values: &[f32], axis: i64| {
        let builder = GraphBuilder::new()
            .input("x", &[2, 4])
            .constant("w", &[4], values)
            .node(with_int(node("Add", &["x", "w"], &["y"]), "axis", axis))
            .output("y");
        ops(&prepare(builder).unwrap()).operators.remove(0).signature
    };
    assert_eq!(scaled(&[1.0; 4], 0), scaled(&[1.0; 4], 0));
    assert_ne!(scaled(&[1.0; 4], 0), scaled(&[1e-40; 4], 0), "denormal weights take another time");
    assert_ne!(scaled(&[1.0; 4], 0), scaled(&[1.0; 4], 1));
    let branch = |inner: &str, operator: &str| {
        let body = GraphBuilder::new().node(node(operator, &["x"], &[inner])).output(inner).graph();
        let builder = GraphBuilder::new()
            .input("x", &[2, 4])
            .typed_input(value("c", 9, &[]))
            .node(with_graph(with_graph(node("If", &["c"], &["y"]), "then_branch", body.clone()), "else_branch", body))
            .output("y");
        ops(&prepare(builder).unwrap()).operators.remove(0).signature
    };
    assert_eq!(branch("t", "Relu"), branch("name", "Relu"), "names inside bodies do not matter");
    assert_ne!(branch("t", "Relu"), branch("t", "Neg"));
}

#[test]
fn repeated_layers_are_measured_once() {
    let layer = |from: &str, to: &str| format!("{to}m = MatMul({from}, c1); {to} = Relu({to}m); ");
    let text = layer("x", "a") + &layer("a", "b") + &layer("b", "y");
    let graph = prepare(graph(&text, &[])).unwrap().operator_graph(Granularity::Fused, &[]).unwrap();
    assert_eq!((graph.len(), graph.distinct()), (3, 1));
}

#[test]
fn classes_follow_intensity() {
    let builder = |size: i64| {
        GraphBuilder::new()
            .input("x", &[size, size])
            .constant("w", &[size, size], &vec![0.5; (size * size) as usize])
            .node(node("MatMul", &["x", "w"], &["y"]))
            .output("y")
    };
    let class = |size: u64| {
        let values = tensors(vec![HostTensor::zeros(TensorInfo::new("y", DataType::F32, [size, size]))]);
        ops(&prepare_with(builder(size as i64), &values).unwrap()).operators.remove(0)
    };
    let large = class(256);
    assert_eq!((large.class, large.flops, large.weight_bytes), (OperatorClass::Compute, Some(2 << 24), 256 * 256 * 4));
    assert_eq!(class(8).class, OperatorClass::Memory);
}

#[test]
fn backend_kernels_are_followed_where_they_can_be() {
    let prepared = prepare(graph("a = Conv(x, c1); b = Relu(a); d = Neg(x); y = Concat(b, d)", &[])).unwrap();
    let group = |names: &[&str]| KernelGroup { nodes: names.iter().map(|&name| name.to_owned()).collect() };
    let graph =
        prepared.operator_graph(Granularity::Backend, &[group(&["a", "b", "invented"]), group(&["d"])]).unwrap();
    assert_eq!(kinds(&graph), ["Conv+Relu", "Neg", "Concat"]);
    // a → b → d with {a, d} as one kernel would wait for itself.
    let prepared = prepare(graph_text()).unwrap();
    let graph = prepared.operator_graph(Granularity::Backend, &[group(&["a", "d"]), group(&["b"])]).unwrap();
    assert_eq!(kinds(&graph), ["Relu", "Neg", "Add"]);
}

fn graph_text() -> GraphBuilder {
    graph("a = Relu(x); b = Neg(a); d = Add(a, b)", &[])
}

#[test]
fn extraction_refuses_what_is_no_segment() {
    let prepared = prepare(graph_text()).unwrap();
    let operators = ops(&prepared);
    let folder = tempfile::tempdir().unwrap();
    let extract = |ids: &[u32]| {
        let set = ids.iter().map(|&id| OperatorId(id)).collect();
        prepared.extract(&operators, &set, folder.path()).unwrap_err().to_string()
    };
    assert!(extract(&[0, 2]).contains("{0, 2}: a path leaves the set and re-enters it"));
    assert!(extract(&[]).contains("the set is empty"));
    assert!(extract(&[7]).contains("there is no 7"));
    let other = ops(&prepare(graph("a = Relu(x)", &[])).unwrap());
    let error = prepared.extract(&other, &BTreeSet::from([OperatorId(0)]), folder.path()).unwrap_err().to_string();
    assert!(error.contains("the operator graph is of model"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn pieces_share_one_weights_file_and_repeat_nothing() {
    let builder = GraphBuilder::new()
        .input("x", &[1, 512])
        .constant("w", &[512], &vec![0.5; 512])
        .constant("v", &[512], &vec![0.25; 512])
        .node(node("Add", &["x", "w"], &["a"]))
        .node(in_domain(node("Custom", &["a", "v"], &["y"]), "org.example"))
        .output("y");
    let prepared = prepare(builder).unwrap();
    let operators = ops(&prepared);
    assert_eq!(operators.operators[1].kind, "org.example.Custom");
    let folder = tempfile::tempdir().unwrap();
    let cut = |id: u32| prepared.extract(&operators, &BTreeSet::from([OperatorId(id)]), folder.path()).unwrap();
    let pieces = [cut(0), cut(1), cut(0)];
    assert_eq!(pieces[0], pieces[2], "the same set is the same file");
    let data = |graph: &GraphProto| {
        let entries = &graph.initializer[0].external_data;
        let entry = |key: &str| entries.iter().find(|entry| entry.key() == key).unwrap().value().to_owned();
        (entry("location"), entry("offset").parse::<u64>().unwrap())
    };
    let (first, second) = (data(&read(&pieces[0].path)), data(&read(&pieces[1].path)));
    assert_eq!(first.0, second.0);
    assert!(first.0.starts_with("weights-") && first.1 % 4096 == 0 && second.1 % 4096 == 0 && first.1 != second.1);
    let bytes = std::fs::read(folder.path().join(&second.0)).unwrap();
    assert_eq!(&bytes[second.1 as usize..second.1 as usize + 4], 0.25f32.to_le_bytes());
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn a_prepared_model_is_read_back_as_it_was() {
    let builder = GraphBuilder::new()
        .input("x", &[1, 512])
        .constant("w", &[512], &vec![0.5; 512])
        .node(node("Shape", &["x"], &["s"]))
        .node(node("Add", &["x", "w"], &["a"]))
        .node(node("Reshape", &["a", "s"], &["y"]))
        .output("y")
        .output("y")
        .output("w");
    let values =
        tensors(["a", "y"].map(|name| HostTensor::zeros(TensorInfo::new(name, DataType::F32, [1u64, 512]))).into());
    let prepared = prepare_with(builder, &values).unwrap();
    let folder = tempfile::tempdir().unwrap();
    prepared.save(folder.path()).unwrap();
    let again = Prepared::load(folder.path()).unwrap();
    assert_eq!(again.fingerprint(), prepared.fingerprint());
    assert_eq!((again.inputs(), again.outputs()), (prepared.inputs(), prepared.outputs()));
    for granularity in [Granularity::Node, Granularity::Fused] {
        let graph = prepared.operator_graph(granularity, &[]).unwrap();
        assert_eq!(again.operator_graph(granularity, &[]).unwrap(), graph);
        let all = graph.ids().collect();
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let before = prepared.extract(&graph, &all, one.path()).unwrap();
        let after = again.extract(&graph, &all, two.path()).unwrap();
        assert_eq!(before.path.file_name(), after.path.file_name(), "the same contents");
    }
    std::fs::write(folder.path().join("prepared.json"), "{}").unwrap();
    let error = Prepared::load(folder.path()).unwrap_err().to_string();
    assert!(error.contains("delete the folder and prepare the model again"), "{error}");
}

/// A random graph of elementwise nodes over `[2, 4]`, some with subgraphs that capture, some with two outputs.
fn random_graph(choices: &[(u8, usize, usize)]) -> GraphBuilder {
    let mut builder = GraphBuilder::new()
        .input("x0", &[2, 4])
        .input("x1", &[2, 4])
        .typed_input(value("cond", 9, &[]))
        .constant("c0", &[4], &[1.0; 4])
        .constant("c1", &[4], &[2.0; 4]);
    let mut values: Vec<String> = vec!["x0".into(), "x1".into(), "c0".into(), "c1".into()];
    for (position, &(kind, first, second)) in choices.iter().enumerate() {
        let (a, b) = (values[first % values.len()].clone(), values[second % values.len()].clone());
        let out = format!("v{position}");
        let name = format!("n{position}");
        let made = match kind % 8 {
            0 => node("Relu", &[&a], &[&out]),
            1 => node("Add", &[&a, &b], &[&out]),
            2 => node("Mul", &[&a, &b], &[&out]),
            3 => node("Conv", &[&a, "c0", "c1"], &[&out]),
            4 => node("Transpose", &[&a], &[&out]),
            5 => node("DequantizeLinear", &[&a, "c0"], &[&out]),
            6 => {
                let extra = format!("w{position}");
                let made = node("Split", &[&a], &[&out, &extra]);
                values.push(extra);
                made
            }
            _ => {
                let body = |from: &str| GraphBuilder::new().node(node("Neg", &[from], &["t"])).output("t").graph();
                with_graph(with_graph(node("If", &["cond"], &[&out]), "then_branch", body(&a)), "else_branch", body(&b))
            }
        };
        builder = builder.node(named(made, &name));
        values.push(out);
    }
    // What nobody may read otherwise: the last value, and one from the middle.
    builder.output(&values[values.len() - 1]).output(&values[values.len() / 2])
}

/// A reference interpreter of graph structure: the value of a node's output is a term over model inputs and constants.
fn terms(graph: &GraphProto, given: &HashMap<String, String>) -> HashMap<String, String> {
    let mut known = given.clone();
    for constant in &graph.initializer {
        let raw = constant.raw_data.as_ref().map(|raw| format!("{:?}", &raw[..4]));
        known.insert(constant.name().to_owned(), format!("#{}", raw.unwrap_or_default()));
    }
    for node in &graph.node {
        let read = |name: &String| known.get(name).unwrap_or_else(|| panic!("`{name}` is not there")).clone();
        let mut arguments: Vec<String> = node.input.iter().filter(|name| !name.is_empty()).map(read).collect();
        for body in node.attribute.iter().filter_map(|attribute| attribute.g.as_ref()) {
            let inner = terms(body, &known);
            arguments.push(inner[body.output[0].name()].clone());
        }
        if node.op_type() == "Identity" {
            // Preparing puts one behind a constant output, and drops others.
            known.insert(node.output[0].clone(), arguments.remove(0));
            continue;
        }
        for (position, output) in node.output.iter().enumerate().filter(|(_, output)| !output.is_empty()) {
            // Terms grow exponentially with sharing; a digest of the term is as good.
            let term = format!("{}.{position}({})", node.op_type(), arguments.join(","));
            let mut hasher = DefaultHasher::new();
            term.hash(&mut hasher);
            known.insert(output.clone(), format!("{}:{:016x}", node.op_type(), hasher.finish()));
        }
    }
    known
}

fn compose(pieces: &[Extracted], inputs: &HashMap<String, String>) -> HashMap<String, String> {
    let mut known = inputs.clone();
    for piece in pieces {
        let graph = read(&piece.path);
        let ports = |list: &[trefoil_onnx::proto::ValueInfoProto]| {
            list.iter().map(|port| port.name().to_owned()).collect::<Vec<_>>()
        };
        let names = |list: &[TensorInfo]| list.iter().map(|info| info.name.clone()).collect::<Vec<_>>();
        assert_eq!(ports(&graph.input), names(&piece.inputs));
        assert_eq!(ports(&graph.output), names(&piece.outputs));
        let given = piece.inputs.iter().map(|info| (info.name.clone(), known[&info.name].clone())).collect();
        let result = terms(&graph, &given);
        for output in &piece.outputs {
            known.insert(output.name.clone(), result[&output.name].clone());
        }
    }
    known
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Cuts a random graph at random places (runs of a random topological order are convex) and checks that running the pieces
    /// one after another computes what the whole computes.
    #[test]
    fn random_convex_sets_compose_to_the_whole(
        choices in proptest::collection::vec((any::<u8>(), any::<usize>(), any::<usize>()), 1..24),
        fused in any::<bool>(),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..5),
        ranks in proptest::collection::vec(any::<u16>(), 64),
    ) {
        let builder = random_graph(&choices);
        let original = builder.clone().graph();
        let prepared = prepare(builder).unwrap();
        let granularity = if fused { Granularity::Fused } else { Granularity::Node };
        let graph = prepared.operator_graph(granularity, &[]).unwrap();
        let inputs: HashMap<String, String> =
            original.input.iter().map(|input| (input.name().to_owned(), input.name().to_owned())).collect();
        let expected = terms(&original, &inputs);

        // A random topological order: among the ready operators the one of lowest rank goes first.
        let mut order: Vec<OperatorId> = Vec::new();
        let mut done: BTreeSet<OperatorId> = BTreeSet::new();
        while order.len() < graph.len() {
            let ready = graph.ids().filter(|&id| !done.contains(&id) && graph.predecessors(id).iter().all(|p| done.contains(p)));
            let next = ready.min_by_key(|id| (ranks[id.index() % ranks.len()], *id)).unwrap();
            done.insert(next);
            order.push(next);
        }
        let folder = tempfile::tempdir().unwrap();
        let mut places: BTreeSet<usize> = cuts.iter().map(|cut| cut.index(order.len() + 1)).collect();
        places.insert(order.len());
        let mut pieces = Vec::new();
        let mut start = 0;
        for end in places {
            if end > start {
                let set: BTreeSet<OperatorId> = order[start..end].iter().copied().collect();
                prop_assert!(graph.is_convex(&set));
                let piece = prepared.extract(&graph, &set, folder.path()).unwrap();
                let (inputs, outputs) = graph.boundary(&set);
                prop_assert_eq!(piece.inputs.len(), inputs.len());
                prop_assert_eq!(piece.outputs.len(), outputs.len());
                pieces.push(piece);
            }
            start = end;
        }
        let result = compose(&pieces, &inputs);
        let whole = compose(&[prepared.whole(folder.path()).unwrap()], &inputs);
        for output in &original.output {
            let want = expected[output.name()].clone();
            prop_assert_eq!(&result[output.name()], &want, "{}", output.name());
            prop_assert_eq!(&whole[output.name()], &want, "{}", output.name());
        }
        // Every operator alone is a segment.
        for id in graph.ids() {
            let set = BTreeSet::from([id]);
            prop_assert!(graph.is_convex(&set));
            read(&prepared.extract(&graph, &set, folder.path()).unwrap().path);
        }
    }
}
