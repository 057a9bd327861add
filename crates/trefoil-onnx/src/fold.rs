//! Folding constants and dropping what is not needed.

use crate::analysis::{Analysis, Shapes, analyse};
use crate::index::{GraphIndex, ValueId};
use crate::model::is_default_domain;
use crate::proto::{GraphProto, NodeProto, TensorProto};
use crate::{Values, tensor};
use std::collections::{HashMap, HashSet};
use trefoil_core::{DataType, TensorInfo};

/// A folded constant of at most this many bytes is always fine.
const SMALL: u64 = 1 << 20;
/// All constants that folding makes larger than what they come from may together take this many bytes.
const GROWTH_BUDGET: u64 = 64 << 20;

/// Rewrites a graph: what follows from constants becomes initializers, pass-through nodes go, and so does everything
/// that no output needs. Returns the new initializers' names.
///
/// Kept on purpose: random operators; `DequantizeLinear` of weights (backends match it to pick integer kernels); constants
/// that would grow beyond 1 MiB and beyond what they are computed from (a mask expanded from one number).
pub(crate) fn fold(
    graph: &mut GraphProto,
    index: &GraphIndex,
    infos: &[Option<TensorInfo>],
    values: &dyn Values,
    opset: i64,
) -> HashSet<String> {
    let analysis = analyse(graph, index, infos, Shapes::Constant);
    let mut folder = Folder { graph, index, infos, values, roots: HashMap::new(), grown: 0, folded: HashMap::new() };
    folder.measure_roots(&analysis);
    let aliases = pass_through(graph, index, infos, &analysis, opset);
    let resolve = |mut value: ValueId| {
        while let Some(&source) = aliases.get(&value) {
            value = source;
        }
        value
    };

    // Walk back from the outputs: what is reached is needed. Constants are folded at the frontier where activations read
    // them, so what lies behind a folded constant is never reached.
    let mut needed_nodes = vec![false; graph.node.len()];
    let mut needed_constants: HashSet<ValueId> = HashSet::new();
    let mut visited: HashSet<ValueId> = HashSet::new();
    let mut stack: Vec<ValueId> = Vec::new();
    for output in &graph.output {
        stack.extend(index.value(output.name()));
    }
    while let Some(value) = stack.pop() {
        if !visited.insert(value) {
            continue;
        }
        let Some(node) = index.producer(value) else {
            needed_constants.insert(value);
            continue;
        };
        if analysis.constant[value as usize] && folder.try_fold(value) {
            continue;
        }
        if !needed_nodes[node as usize] {
            needed_nodes[node as usize] = true;
            stack.extend(index.reads[node as usize].iter().map(|&read| resolve(read)));
        }
    }
    let constants = folder.folded;
    rebuild(graph, index, &needed_nodes, &needed_constants, constants, resolve)
}

struct Folder<'a> {
    graph: &'a GraphProto,
    index: &'a GraphIndex,
    infos: &'a [Option<TensorInfo>],
    values: &'a dyn Values,
    /// Bytes of the initializers a constant is computed from, at most its own size.
    roots: HashMap<ValueId, u64>,
    grown: u64,
    folded: HashMap<ValueId, TensorProto>,
}

impl Folder<'_> {
    fn bytes(&self, value: ValueId) -> Option<u64> {
        self.infos[value as usize].as_ref().map(TensorInfo::bytes)
    }

    fn root(&self, value: ValueId) -> u64 {
        self.roots.get(&value).copied().or_else(|| self.bytes(value)).unwrap_or(0)
    }

    fn roots_of_inputs(&self, node: u32) -> u64 {
        let node = node as usize;
        if is_shape_of(&self.graph.node[node]) {
            return u64::MAX;
        }
        self.index.reads[node].iter().fold(0u64, |sum, &read| sum.saturating_add(self.root(read)))
    }

    fn measure_roots(&mut self, analysis: &Analysis) {
        for node in 0..self.graph.node.len() as u32 {
            if analysis.constant_node[node as usize] {
                let sources = self.roots_of_inputs(node);
                for &value in &self.index.writes[node as usize] {
                    let own = self.bytes(value).unwrap_or(u64::MAX);
                    self.roots.insert(value, own.min(sources));
                }
            }
        }
    }

    /// Folds a constant value if that is wise and its contents are known.
    fn try_fold(&mut self, value: ValueId) -> bool {
        let Some(node) = self.index.producer(value) else { return false };
        let proto = &self.graph.node[node as usize];
        if proto.op_type() == "DequantizeLinear" {
            return false;
        }
        let name = self.index.name(value);
        if let Some(shape) = shape_value(proto, name, self.index, self.infos) {
            self.folded.insert(value, shape);
            return true;
        }
        let Some(info) = self.values.info(name) else { return false };
        if info.dtype == DataType::Opaque {
            return false;
        }
        let grows = info.bytes() > self.roots_of_inputs(node);
        if grows && (info.bytes() > SMALL || self.grown + info.bytes() > GROWTH_BUDGET) {
            return false;
        }
        let Some(contents) = self.values.tensor(name) else { return false };
        if grows {
            self.grown += info.bytes();
        }
        self.folded.insert(value, tensor::from_host(name, &contents));
        true
    }
}

fn is_shape_of(node: &NodeProto) -> bool {
    is_default_domain(node) && matches!(node.op_type(), "Shape" | "Size")
}

/// `Shape` (with `start` and `end`) or `Size` of a static shape.
fn shape_value(node: &NodeProto, name: &str, index: &GraphIndex, infos: &[Option<TensorInfo>]) -> Option<TensorProto> {
    if !is_shape_of(node) {
        return None;
    }
    let input = index.value(node.input.first()?)?;
    let info = infos[input as usize].as_ref()?;
    if node.op_type() == "Size" {
        return Some(tensor::from_i64(name, &[], &[info.elements() as i64]));
    }
    let rank = info.shape.len() as i64;
    let bound = |attribute: &str, default: i64| {
        let given = node.attribute.iter().find(|candidate| candidate.name() == attribute);
        let position = given.map_or(default, super::proto::AttributeProto::i);
        let from_start = if position < 0 { position.saturating_add(rank) } else { position };
        from_start.clamp(0, rank) as usize
    };
    let (start, end) = (bound("start", 0), bound("end", rank));
    let extents: Vec<i64> =
        info.shape.get(start..end.max(start)).unwrap_or_default().iter().map(|&extent| extent as i64).collect();
    Some(tensor::from_i64(name, &[extents.len() as i64], &extents))
}

/// Nodes that hand their first input through: which value may stand for which.
fn pass_through(
    graph: &GraphProto,
    index: &GraphIndex,
    infos: &[Option<TensorInfo>],
    analysis: &Analysis,
    opset: i64,
) -> HashMap<ValueId, ValueId> {
    let mut aliases = HashMap::new();
    for (position, node) in graph.node.iter().enumerate() {
        if !is_default_domain(node) || analysis.constant_node[position] {
            continue;
        }
        let (Some(&source), Some(&target)) = (index.reads[position].first(), index.writes[position].first()) else {
            continue;
        };
        let is_removable = match node.op_type() {
            "Identity" => true,
            // Until opset 12 inference is the only mode from 7 on; later the third input asks for training.
            "Dropout" => {
                let trains = opset >= 12 && node.input.get(2).is_some_and(|input| !input.is_empty());
                let mask_unused = index.writes[position][1..]
                    .iter()
                    .all(|&mask| index.readers[mask as usize].is_empty() && !index.is_output[mask as usize]);
                !trains && mask_unused
            }
            "Cast" => {
                let to = node
                    .attribute
                    .iter()
                    .find(|attribute| attribute.name() == "to")
                    .map(super::proto::AttributeProto::i);
                let from = infos[source as usize].as_ref().map(|info| info.dtype);
                from.is_some_and(|from| from != DataType::Opaque && to == Some(i64::from(from.onnx_code())))
            }
            _ => false,
        };
        // A name that a subgraph captures, or that the model outputs, must go on existing.
        let captured = index.readers[target as usize].iter().any(|&reader| {
            let reader = &graph.node[reader as usize];
            crate::index::subgraphs(reader).next().is_some()
        });
        if is_removable && !captured && !index.is_output[target as usize] {
            aliases.insert(target, source);
        }
    }
    aliases
}

/// Name of the initializer behind a graph output that is constant: an output wants a node, an `Identity`.
fn constant_behind(output: &str) -> String {
    format!("{output}/constant")
}

fn rebuild(
    graph: &mut GraphProto,
    index: &GraphIndex,
    needed_nodes: &[bool],
    needed_constants: &HashSet<ValueId>,
    folded: HashMap<ValueId, TensorProto>,
    resolve: impl Fn(ValueId) -> ValueId,
) -> HashSet<String> {
    // Constant graph outputs get an Identity; direct readers read the constant itself.
    let constant_outputs: HashSet<ValueId> = (0..index.names.len() as ValueId)
        .filter(|&value| {
            index.is_output[value as usize]
                && (folded.contains_key(&value) || index.is_constant(value) && needed_constants.contains(&value))
        })
        .collect();
    let mut identities: Vec<ValueId> = constant_outputs.iter().copied().collect();
    identities.sort_unstable();

    let mut position = 0;
    graph.node.retain(|_| {
        position += 1;
        needed_nodes[position - 1]
    });
    for node in &mut graph.node {
        for input in node.input.iter_mut().filter(|input| !input.is_empty()) {
            let Some(value) = index.value(input) else { continue };
            let source = resolve(value);
            if constant_outputs.contains(&source) {
                *input = constant_behind(index.name(source));
            } else if source != value {
                input.clear();
                input.push_str(index.name(source));
            }
        }
    }
    let needed = |name: &str| index.value(name).is_some_and(|value| needed_constants.contains(&value));
    graph.initializer.retain(|tensor| needed(tensor.name()));
    graph.sparse_initializer.retain(|sparse| sparse.values.as_ref().is_some_and(|values| needed(values.name())));
    let mut fresh: Vec<(ValueId, TensorProto)> = folded.into_iter().collect();
    fresh.sort_unstable_by_key(|&(value, _)| value);
    let mut names = HashSet::new();
    for (value, tensor) in fresh {
        let name = if constant_outputs.contains(&value) {
            constant_behind(index.name(value))
        } else {
            index.name(value).to_owned()
        };
        names.insert(name.clone());
        graph.initializer.push(TensorProto { name: Some(name), ..tensor });
    }
    let mut nodes = Vec::with_capacity(identities.len() + graph.node.len());
    for value in identities {
        let name = index.name(value);
        let hidden = constant_behind(name);
        if let Some(tensor) = graph.initializer.iter_mut().find(|tensor| tensor.name() == name) {
            tensor.name = Some(hidden.clone());
        }
        for sparse in &mut graph.sparse_initializer {
            if let Some(values) = sparse.values.as_mut().filter(|values| values.name() == name) {
                values.name = Some(hidden.clone());
            }
        }
        nodes.push(NodeProto {
            op_type: Some("Identity".into()),
            input: vec![hidden],
            output: vec![name.to_owned()],
            ..NodeProto::default()
        });
    }
    // In front: subgraphs anywhere may capture the output's name.
    nodes.append(&mut graph.node);
    graph.node = nodes;
    graph.value_info.clear();
    graph.quantization_annotation.clear();
    name_nodes(graph);
    names
}

/// Gives every node a name of its own, so that backends' reports can be matched to nodes.
fn name_nodes(graph: &mut GraphProto) {
    let mut taken: HashSet<String> = HashSet::with_capacity(graph.node.len());
    for node in &mut graph.node {
        if !node.name().is_empty() && taken.insert(node.name().to_owned()) {
            continue;
        }
        let output = node.output.iter().find(|output| !output.is_empty()).map_or("", String::as_str);
        let base = format!("{}:{output}", node.op_type());
        let mut name = base.clone();
        let mut suffix = 1u32;
        while !taken.insert(name.clone()) {
            suffix += 1;
            name = format!("{base}#{suffix}");
        }
        node.name = Some(name);
    }
}
