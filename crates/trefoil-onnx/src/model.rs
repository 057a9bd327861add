//! A decoded model and the two things done to it before it is prepared: fixing shapes and making it traceable.

use crate::index;
use crate::port::{self, ModelPort};
use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use crate::weights::{self, WeightStore};
use crate::{OnnxError, Values, external, files, tensor};
use bytes::Bytes;
use prost::Message;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use trefoil_core::{DataType, TensorInfo};

/// Oldest and newest intermediate representation read.
const IR_VERSIONS: std::ops::RangeInclusive<i64> = 3..=14;
/// Oldest default-domain operator set read.
const OLDEST_OPSET: i64 = 7;
/// Part of every fingerprint: changes when this crate would prepare the same file differently, so that cached
/// preparations and plans by node index are not mistaken for current ones.
const PREPARATION_VERSION: &str = "trefoil-onnx 1";

/// A model as its file has it: checked, nodes in topological order, every constant's contents at hand (memory-mapped).
///
/// Cloning copies the structure, never the weights.
#[derive(Debug, Clone)]
pub struct Model {
    pub(crate) proto: ModelProto,
    pub(crate) name: String,
    pub(crate) weights: Arc<WeightStore>,
    /// Identity of file contents and external data, whatever the shapes.
    contents: String,
    fingerprint: String,
}

impl Model {
    /// Reads a model file: any operator set from 7, external data in its folder, control flow, quantised and
    /// half-precision types, custom domains.
    ///
    /// # Errors
    /// Everything of [`OnnxError`] up to [`OnnxError::Malformed`].
    pub fn load(path: &Path) -> Result<Self, OnnxError> {
        let bytes = external::map(path).map_err(|error| OnnxError::io(path, &error))?;
        Self::decode(bytes, path)
    }

    /// As [`Model::load`], from bytes that are already in memory. `path` names the model, its folder holds external data.
    ///
    /// # Errors
    /// As [`Model::load`].
    #[allow(clippy::needless_pass_by_value)] // handed over: the model's constants are slices of it
    pub fn decode(bytes: Bytes, path: &Path) -> Result<Self, OnnxError> {
        let (mut model, external) = Self::decode_parts(&bytes, path)?;
        let mut weights = WeightStore::default();
        weights.add_file(&format!("weights-{}.data", model.contents), model.graph().initializer.iter());
        drop(external);
        model.weights = Arc::new(weights);
        Ok(model)
    }

    /// Decodes and checks; the weight store is still empty.
    pub(crate) fn decode_parts(bytes: &Bytes, path: &Path) -> Result<(Self, external::ExternalFiles), OnnxError> {
        let shown = || path.display().to_string();
        // A slice, so that contents become slices of `bytes` instead of copies.
        let mut proto = ModelProto::decode(bytes.clone())
            .map_err(|error| OnnxError::Decode { path: shown(), reason: error.to_string() })?;
        if proto.graph.is_none() {
            return Err(OnnxError::NoGraph { path: shown() });
        }
        let version = proto.ir_version();
        if !IR_VERSIONS.contains(&version) {
            return Err(OnnxError::IrVersion { path: shown(), version, newest: *IR_VERSIONS.end() });
        }
        check_opsets(&proto, path)?;
        let mut hash = Sha256::new();
        hash.update(PREPARATION_VERSION);
        hash.update(Sha256::digest(bytes));
        let mut external = external::ExternalFiles::new(files::parent(path));
        let graph = proto.graph.get_or_insert_default();
        normalise_graph(graph, &mut external)?;
        for function in &mut proto.functions {
            for node in &mut function.node {
                normalise_node(node, &mut external)?;
            }
        }
        lift_constants(graph);
        // Legal before IR version 4 only in one direction, and confusing in both: an initializer is no input.
        let inputs: HashSet<usize> = port::real_inputs(graph).into_iter().map(|(position, _)| position).collect();
        let mut position = 0;
        graph.input.retain(|_| {
            position += 1;
            inputs.contains(&(position - 1))
        });
        index::check_and_sort(graph)?;
        // From version 4 on, initializers need not be listed as inputs, and here they are not.
        proto.ir_version = Some(version.max(4));
        external.identify(&mut hash);
        let contents = tensor::hex(&hash.finalize());
        let name = path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned());
        let mut model = Self { proto, name, weights: Arc::default(), contents, fingerprint: String::new() };
        model.refresh_fingerprint();
        Ok((model, external))
    }

    /// Inputs, in graph order. Initializers that the file also lists as inputs are not inputs.
    pub fn inputs(&self) -> Vec<ModelPort> {
        self.graph().input.iter().map(port::port).collect()
    }

    /// Outputs as declared, in graph order; may repeat a name.
    pub fn outputs(&self) -> Vec<ModelPort> {
        self.graph().output.iter().map(port::port).collect()
    }

    /// Name: the file's stem.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number of nodes in the top-level graph (`Constant` nodes count as initializers).
    pub fn node_count(&self) -> usize {
        self.graph().node.len()
    }

    /// Name of a top-level node, or what it writes when it has none; `None` beyond the last.
    pub fn node_name(&self, node: usize) -> Option<&str> {
        let node = self.graph().node.get(node)?;
        Some(if node.name().is_empty() { node.output.first().map_or("", String::as_str) } else { node.name() })
    }

    /// Names of the values a top-level node reads (captured ones included) and of those it writes.
    pub fn node_values(&self, node: usize) -> Option<(Vec<&str>, Vec<&str>)> {
        let node = self.graph().node.get(node)?;
        let writes = node.output.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
        Some((index::reads(node), writes))
    }

    /// Identity of the model: file contents, external data and input shapes. 32 hex digits.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Fixes the shapes of inputs. A symbol that one input fixes is fixed everywhere.
    ///
    /// # Errors
    /// [`OnnxError::UnknownInput`], [`OnnxError::Rank`], [`OnnxError::ShapeConflict`], and [`OnnxError::SymbolicDims`]
    /// listing what is still open. The model is unchanged then.
    pub fn fix_shapes(&mut self, shapes: &BTreeMap<String, Vec<u64>>) -> Result<(), OnnxError> {
        let name = self.name.clone();
        port::fix_shapes(&name, self.graph_mut(), shapes)?;
        self.refresh_fingerprint();
        Ok(())
    }

    /// Writes the model. Large constants go to one weights file beside it, which models of the same origin in that
    /// folder share. Both appear atomically.
    ///
    /// # Errors
    /// [`OnnxError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), OnnxError> {
        let folder = files::parent(path);
        files::create_folder(folder)?;
        let bytes = self.encode(folder)?;
        files::write_bytes(path, &bytes)
    }

    /// Makes sure that the weights lie in `folder` and returns the model's file contents.
    pub(crate) fn encode(&self, folder: &Path) -> Result<Vec<u8>, OnnxError> {
        let mut proto = self.proto.clone();
        let graph = proto.graph.get_or_insert_default();
        let used = self.weights.detach(graph.initializer.iter_mut());
        self.weights.ensure(folder, &used)?;
        Ok(proto.encode_to_vec())
    }

    /// The model with every tensor of its top-level graph as an output, after its own outputs. Values known not to be
    /// tensors, or of types Trefoil cannot hold, are left out.
    ///
    /// # Errors
    /// None today; a model that cannot be traced may become one.
    pub fn traced(&self) -> Result<Self, OnnxError> {
        let mut model = self.clone();
        let untraceable = untraceable_values(self.graph());
        let graph = model.graph_mut();
        let declared: HashMap<&str, &ValueInfoProto> =
            graph.value_info.iter().map(|value| (value.name(), value)).collect();
        let mut seen: HashSet<&str> = HashSet::new();
        let mut outputs: Vec<ValueInfoProto> =
            graph.output.iter().filter(|output| seen.insert(output.name())).cloned().collect();
        for name in graph.node.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty()) {
            if !untraceable.contains(name.as_str()) && seen.insert(name) {
                outputs.push(declared.get(name.as_str()).map_or_else(
                    || ValueInfoProto { name: Some(name.clone()), ..ValueInfoProto::default() },
                    |&value| value.clone(),
                ));
            }
        }
        graph.output = outputs;
        model.derive_fingerprint("traced");
        Ok(model)
    }

    /// One top-level node as a model of its own; what it reads and is no constant becomes an input, typed from `known`
    /// or from the model's own inputs. For tracing models that no single backend runs, node by node.
    ///
    /// # Errors
    /// [`OnnxError::NodeIndex`]; [`OnnxError::UnknownShape`] if an input is not known or is no tensor.
    pub fn single_node(&self, node: usize, known: &dyn Values) -> Result<Self, OnnxError> {
        let graph = self.graph();
        let proto = graph.node.get(node).ok_or(OnnxError::NodeIndex { index: node, count: graph.node.len() })?;
        let untraceable = untraceable_values(graph);
        let mut single =
            GraphProto { name: Some(format!("node {node}")), node: vec![proto.clone()], ..Default::default() };
        let reads = index::reads(proto);
        let wanted: HashSet<&str> = reads.iter().copied().collect();
        single.initializer =
            graph.initializer.iter().filter(|tensor| wanted.contains(tensor.name())).cloned().collect();
        single.sparse_initializer = graph
            .sparse_initializer
            .iter()
            .filter(|sparse| sparse.values.as_ref().is_some_and(|values| wanted.contains(values.name())))
            .cloned()
            .collect();
        let constants: HashSet<String> = single
            .initializer
            .iter()
            .map(|tensor| tensor.name().to_owned())
            .chain(single.sparse_initializer.iter().map(|sparse| tensor::sparse_info(sparse).name))
            .collect();
        for name in reads.into_iter().filter(|&name| !constants.contains(name)) {
            let info = known.info(name).or_else(|| {
                graph.input.iter().find(|input| input.name() == name).and_then(|input| port::port(input).info())
            });
            match info {
                Some(info) if info.dtype != DataType::Opaque => {
                    single.input.push(port::declaration(&TensorInfo { name: name.to_owned(), ..info }));
                }
                _ => {
                    return Err(OnnxError::UnknownShape {
                        value: name.to_owned(),
                        context: format!("read by {}", index::describe(proto)),
                    });
                }
            }
        }
        let mut seen = HashSet::new();
        single.output = proto
            .output
            .iter()
            .filter(|name| !name.is_empty() && !untraceable.contains(name.as_str()) && seen.insert(name.as_str()))
            .map(|name| ValueInfoProto { name: Some(name.clone()), ..ValueInfoProto::default() })
            .collect();
        let mut model = Self {
            proto: ModelProto { graph: Some(single), ..self.header() },
            name: self.name.clone(),
            weights: Arc::clone(&self.weights),
            contents: self.contents.clone(),
            fingerprint: self.fingerprint.clone(),
        };
        model.derive_fingerprint(&format!("node {node}"));
        Ok(model)
    }

    /// The model without its graph: versions, operator sets, functions.
    pub(crate) fn header(&self) -> ModelProto {
        ModelProto {
            ir_version: self.proto.ir_version,
            opset_import: self.proto.opset_import.clone(),
            producer_name: Some("trefoil".into()),
            functions: self.proto.functions.clone(),
            ..ModelProto::default()
        }
    }

    pub(crate) fn graph(&self) -> &GraphProto {
        // `decode_parts` refuses models without a graph and nothing takes it away.
        self.proto.graph.as_ref().expect("a loaded model has a graph")
    }

    pub(crate) fn graph_mut(&mut self) -> &mut GraphProto {
        self.proto.graph.get_or_insert_default()
    }

    pub(crate) fn set_identity(&mut self, name: String, fingerprint: String) {
        self.name = name;
        self.fingerprint = fingerprint;
    }

    /// Version of the operator set of a domain; 0 when the model does not import it.
    pub(crate) fn opset(&self, domain: &str) -> i64 {
        opset(&self.proto, domain)
    }

    fn refresh_fingerprint(&mut self) {
        let mut hash = Sha256::new();
        hash.update(&self.contents);
        for port in self.inputs() {
            hash.update((port.name.len() as u64).to_le_bytes());
            hash.update(&port.name);
            hash.update(port.dims_text());
        }
        self.fingerprint = tensor::hex(&hash.finalize());
    }

    pub(crate) fn derive_fingerprint(&mut self, purpose: &str) {
        let mut hash = Sha256::new();
        hash.update(&self.fingerprint);
        hash.update(purpose);
        self.fingerprint = tensor::hex(&hash.finalize());
    }
}

/// Version of the operator set that a model imports for a domain; 0 when it does not.
pub(crate) fn opset(proto: &ModelProto, domain: &str) -> i64 {
    let default = |domain: &str| domain.is_empty() || domain == "ai.onnx";
    proto
        .opset_import
        .iter()
        .find(|import| import.domain() == domain || default(import.domain()) && default(domain))
        .map_or(0, super::proto::OperatorSetIdProto::version)
}

fn check_opsets(proto: &ModelProto, path: &Path) -> Result<(), OnnxError> {
    let fail = |reason: String| Err(OnnxError::Opset { path: path.display().to_string(), reason });
    if proto.opset_import.is_empty() {
        return fail("it imports no operator set".into());
    }
    let version = opset(proto, "");
    if version != 0 && version < OLDEST_OPSET {
        return fail(format!("operator set {version} is older than {OLDEST_OPSET}"));
    }
    Ok(())
}

fn normalise_graph(graph: &mut GraphProto, external: &mut external::ExternalFiles) -> Result<(), OnnxError> {
    for tensor in &mut graph.initializer {
        tensor::normalise(tensor, external)?;
    }
    for sparse in &mut graph.sparse_initializer {
        for part in [&mut sparse.values, &mut sparse.indices].into_iter().flatten() {
            tensor::normalise(part, external)?;
        }
    }
    for node in &mut graph.node {
        normalise_node(node, external)?;
    }
    Ok(())
}

fn normalise_node(node: &mut NodeProto, external: &mut external::ExternalFiles) -> Result<(), OnnxError> {
    for attribute in &mut node.attribute {
        let sparse = attribute.sparse_tensor.iter_mut().chain(&mut attribute.sparse_tensors);
        let sparse = sparse.flat_map(|sparse| [&mut sparse.values, &mut sparse.indices]).flatten();
        for tensor in attribute.t.iter_mut().chain(&mut attribute.tensors).chain(sparse) {
            tensor::normalise(tensor, external)?;
        }
        for graph in attribute.g.iter_mut().chain(&mut attribute.graphs) {
            normalise_graph(graph, external)?;
        }
    }
    Ok(())
}

/// Turns `Constant` nodes of the top-level graph into initializers, which is what they are. Those that are graph
/// outputs stay: an output wants a node.
fn lift_constants(graph: &mut GraphProto) {
    let outputs: HashSet<&str> = graph.output.iter().map(super::proto::ValueInfoProto::name).collect();
    let mut lifted: Vec<TensorProto> = Vec::new();
    let mut gone: BTreeSet<usize> = BTreeSet::new();
    for (position, node) in graph.node.iter().enumerate() {
        let [output] = node.output.as_slice() else { continue };
        if node.op_type() != "Constant"
            || !is_default_domain(node)
            || outputs.contains(output.as_str())
            || output.is_empty()
        {
            continue;
        }
        if let Some(constant) = constant_value(node, output) {
            lifted.push(constant);
            gone.insert(position);
        }
    }
    if gone.is_empty() {
        return;
    }
    let mut position = 0;
    graph.node.retain(|_| {
        position += 1;
        !gone.contains(&(position - 1))
    });
    graph.initializer.append(&mut lifted);
}

/// Whether a node is of the standard operator set.
pub(crate) fn is_default_domain(node: &NodeProto) -> bool {
    matches!(node.domain(), "" | "ai.onnx")
}

/// The value of a `Constant` node as an initializer; `None` for sparse values.
fn constant_value(node: &NodeProto, name: &str) -> Option<TensorProto> {
    let [attribute] = node.attribute.as_slice() else { return None };
    let mut result = TensorProto { name: Some(name.to_owned()), ..TensorProto::default() };
    let raw = |values: Vec<u8>| Some(Bytes::from(values));
    match attribute.name() {
        "value" => {
            let mut tensor = attribute.t.clone()?;
            tensor.name = result.name;
            return Some(tensor);
        }
        "value_float" => {
            result.data_type = Some(1);
            result.raw_data = raw(attribute.f().to_le_bytes().to_vec());
        }
        "value_int" => {
            result.data_type = Some(7);
            result.raw_data = raw(attribute.i().to_le_bytes().to_vec());
        }
        "value_floats" => {
            result.data_type = Some(1);
            result.dims = vec![attribute.floats.len() as i64];
            result.raw_data = raw(attribute.floats.iter().flat_map(|value| value.to_le_bytes()).collect());
        }
        "value_ints" => {
            result.data_type = Some(7);
            result.dims = vec![attribute.ints.len() as i64];
            result.raw_data = raw(attribute.ints.iter().flat_map(|value| value.to_le_bytes()).collect());
        }
        "value_string" => {
            result.data_type = Some(tensor::STRING);
            result.string_data = vec![attribute.s().to_vec()];
        }
        "value_strings" => {
            result.data_type = Some(tensor::STRING);
            result.dims = vec![attribute.strings.len() as i64];
            result.string_data.clone_from(&attribute.strings);
        }
        _ => return None,
    }
    Some(result)
}

/// Operators whose outputs are sequences, maps or optionals.
const NON_TENSOR_OPERATORS: &[&str] = &[
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceInsert",
    "SequenceErase",
    "SequenceMap",
    "SplitToSequence",
    "Optional",
    "ZipMap",
    "StringSplit",
    "StringConcat",
    "StringNormalizer",
    "RegexReplace",
];

/// Values that are known not to be tensors, or of a type that host memory cannot hold (strings, 4-bit and 8-bit floats).
pub(crate) fn untraceable_values(graph: &GraphProto) -> HashSet<&str> {
    let mut names: HashSet<&str> = HashSet::new();
    for value in graph.value_info.iter().chain(&graph.output).chain(&graph.input) {
        let opaque_element = port::tensor_type(value)
            .is_some_and(|tensor| tensor.elem_type() != 0 && port::port(value).dtype == DataType::Opaque);
        if port::is_other_type(value) || opaque_element {
            names.insert(value.name());
        }
    }
    for node in &graph.node {
        let int = |name: &str| {
            node.attribute.iter().find(|attribute| attribute.name() == name).map(super::proto::AttributeProto::i)
        };
        let target = match node.op_type() {
            "Cast" => int("to"),
            "QuantizeLinear" => int("output_dtype").filter(|&code| code != 0),
            _ => None,
        };
        let opaque_target = target.is_some_and(|code| DataType::from_onnx(code as i32) == DataType::Opaque);
        if NON_TENSOR_OPERATORS.contains(&node.op_type()) || opaque_target {
            names.extend(node.output.iter().map(String::as_str));
        }
        // Outputs of control flow are what its bodies declare.
        for body in index::subgraphs(node) {
            let skipped = usize::from(node.op_type() == "Loop");
            for (output, declared) in node.output.iter().zip(body.output.iter().skip(skipped)) {
                if port::is_other_type(declared) {
                    names.insert(output);
                }
            }
        }
        // What passes a value through passes its kind through.
        let passes =
            matches!(node.op_type(), "Identity" | "OptionalGetElement" | "Reshape" | "Transpose" | "Gather" | "Slice");
        if passes
            && node.input.first().is_some_and(|input| names.contains(input.as_str()))
            && node.op_type() != "OptionalGetElement"
        {
            names.extend(node.output.iter().map(String::as_str));
        }
    }
    names
}

/// All constants of a graph that may go to a weights file.
pub(crate) fn large_constants(graph: &GraphProto) -> impl Iterator<Item = &TensorProto> {
    graph.initializer.iter().filter(|tensor| weights::is_large(tensor))
}
