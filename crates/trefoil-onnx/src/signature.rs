//! Fingerprints of operators: what makes two of them the same measurement.
//!
//! Hashed are the nodes in an order that follows the data (so that node order in the file does not matter), their operator types with
//! operator-set versions, attributes, subgraphs and functions, types and shapes of inputs and outputs, and the contents of
//! constants. Names are replaced by numbers throughout.

use crate::index::{NodeId, Origin, ValueId};
use crate::proto::{AttributeProto, GraphProto, NodeProto};
use crate::{Prepared, port, tensor};
use prost::Message;
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet};
use trefoil_core::{Signature, TensorEdge, TensorId};

/// Signs the operators of one prepared model.
pub(crate) struct Signer<'a> {
    prepared: &'a Prepared,
    /// Model-local functions by (domain, name, overload).
    functions: HashSet<(&'a str, &'a str, &'a str)>,
    /// Digest of all of them: one may call another.
    function_digest: [u8; 32],
}

/// Numbers for names, innermost scope last.
struct Scopes<'a> {
    prepared: &'a Prepared,
    locals: HashMap<ValueId, u64>,
    inner: Vec<HashMap<&'a str, u64>>,
    next: u64,
}

impl<'a> Signer<'a> {
    pub(crate) fn new(prepared: &'a Prepared) -> Self {
        let functions = &prepared.model.proto.functions;
        let mut hash = Sha256::new();
        for function in functions {
            // Shared by all operators of the model, so their bytes as they stand will do.
            hash_bytes(&mut hash, &function.encode_to_vec());
        }
        Self {
            prepared,
            functions: functions.iter().map(|each| (each.domain(), each.name(), each.overload())).collect(),
            function_digest: hash.finalize().into(),
        }
    }

    /// The signature of an operator: its nodes, the nodes it carries along, and the tensors it hands out.
    pub(crate) fn sign(
        &mut self,
        nodes: &[NodeId],
        carried: &[NodeId],
        outputs: &[TensorId],
        tensors: &[TensorEdge],
    ) -> Signature {
        let prepared = self.prepared;
        let mut scopes = Scopes { prepared, locals: HashMap::new(), inner: Vec::new(), next: 0 };
        let mut hash = Sha256::new();
        for node in self.data_order(nodes, carried) {
            self.hash_node(&mut hash, &prepared.graph().node[node as usize], &mut scopes);
        }
        hash.update(b"outputs");
        for &output in outputs {
            let edge = &tensors[output.index()];
            if let Some(value) = prepared.index.value(&edge.name) {
                hash.update(scopes.locals.get(&value).copied().unwrap_or(u64::MAX).to_le_bytes());
            }
            hash_type(&mut hash, edge.dtype.onnx_code(), &edge.shape);
        }
        Signature(tensor::hex(&hash.finalize()))
    }

    /// The nodes in depth-first post-order from those that nobody inside reads, inputs in order.
    fn data_order(&self, nodes: &[NodeId], carried: &[NodeId]) -> Vec<NodeId> {
        if let ([only], []) = (nodes, carried) {
            return vec![*only];
        }
        let index = &self.prepared.index;
        let mut state: HashMap<NodeId, bool> = nodes.iter().chain(carried).map(|&node| (node, false)).collect();
        let read_inside = |node: NodeId| {
            let mut readers = index.writes[node as usize].iter().flat_map(|&value| &index.readers[value as usize]);
            readers.any(|reader| state.contains_key(reader))
        };
        let starts: Vec<NodeId> = nodes.iter().copied().filter(|&node| !read_inside(node)).collect();
        let mut order = Vec::with_capacity(state.len());
        for start in starts {
            let mut stack = vec![(start, 0usize)];
            while let Some((node, next)) = stack.pop() {
                if next == 0 && std::mem::replace(state.entry(node).or_default(), true) {
                    continue;
                }
                match index.reads[node as usize].get(next) {
                    None => order.push(node),
                    Some(&value) => {
                        stack.push((node, next + 1));
                        if let Some(producer) = index.producer(value)
                            && state.get(&producer) == Some(&false)
                        {
                            stack.push((producer, 0));
                        }
                    }
                }
            }
        }
        order
    }

    fn hash_node(&self, hash: &mut Sha256, node: &'a NodeProto, scopes: &mut Scopes<'a>) {
        hash_text(hash, node.domain());
        hash_text(hash, node.op_type());
        hash_text(hash, node.overload());
        hash.update(self.prepared.model.opset(node.domain()).to_le_bytes());
        if self.functions.contains(&(node.domain(), node.op_type(), node.overload())) {
            hash.update(self.function_digest);
        }
        hash.update((node.input.len() as u64).to_le_bytes());
        for input in &node.input {
            scopes.hash_read(hash, input);
        }
        let mut attributes: Vec<&AttributeProto> = node.attribute.iter().collect();
        attributes.sort_by_key(|attribute| attribute.name());
        hash.update((attributes.len() as u64).to_le_bytes());
        for attribute in attributes {
            self.hash_attribute(hash, attribute, scopes);
        }
        hash.update((node.output.len() as u64).to_le_bytes());
        for output in &node.output {
            scopes.define(hash, output);
        }
    }

    fn hash_attribute(&self, hash: &mut Sha256, attribute: &'a AttributeProto, scopes: &mut Scopes<'a>) {
        hash_text(hash, attribute.name());
        hash_text(hash, attribute.ref_attr_name());
        hash.update(attribute.r#type.unwrap_or(0).to_le_bytes());
        hash.update(attribute.f().to_bits().to_le_bytes());
        hash.update(attribute.i().to_le_bytes());
        hash_bytes(hash, attribute.s());
        hash.update((attribute.floats.len() as u64).to_le_bytes());
        attribute.floats.iter().for_each(|value| hash.update(value.to_bits().to_le_bytes()));
        hash.update((attribute.ints.len() as u64).to_le_bytes());
        attribute.ints.iter().for_each(|value| hash.update(value.to_le_bytes()));
        hash.update((attribute.strings.len() as u64).to_le_bytes());
        attribute.strings.iter().for_each(|text| hash_bytes(hash, text));
        attribute.t.iter().chain(&attribute.tensors).for_each(|value| hash.update(tensor::digest(value)));
        let sparse = attribute.sparse_tensor.iter().chain(&attribute.sparse_tensors);
        sparse.for_each(|value| hash.update(tensor::sparse_digest(value)));
        attribute.tp.iter().chain(&attribute.type_protos).for_each(|kind| hash_bytes(hash, &kind.encode_to_vec()));
        for graph in attribute.g.iter().chain(&attribute.graphs) {
            self.hash_graph(hash, graph, scopes);
        }
    }

    fn hash_graph(&self, hash: &mut Sha256, graph: &'a GraphProto, scopes: &mut Scopes<'a>) {
        hash.update(b"graph");
        scopes.inner.push(HashMap::new());
        for input in &graph.input {
            scopes.define(hash, input.name());
            let port = port::port(input);
            hash.update(port.dtype.onnx_code().to_le_bytes());
            hash_text(hash, &port.dims_text());
        }
        for constant in &graph.initializer {
            scopes.define(hash, constant.name());
            hash.update(tensor::digest(constant));
        }
        for constant in &graph.sparse_initializer {
            scopes.define(hash, constant.values.as_ref().map_or("", |values| values.name()));
            hash.update(tensor::sparse_digest(constant));
        }
        for node in &graph.node {
            self.hash_node(hash, node, scopes);
        }
        for output in &graph.output {
            scopes.hash_read(hash, output.name());
        }
        scopes.inner.pop();
    }
}

impl<'a> Scopes<'a> {
    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn define(&mut self, hash: &mut Sha256, name: &'a str) {
        if name.is_empty() {
            hash.update(u64::MAX.to_le_bytes());
            return;
        }
        let number = self.fresh();
        hash.update(number.to_le_bytes());
        if let Some(scope) = self.inner.last_mut() {
            scope.insert(name, number);
        } else if let Some(value) = self.prepared.index.value(name) {
            self.locals.insert(value, number);
        }
    }

    /// A value that is read: its number if it was met before; otherwise a new number with what there is to know of it.
    fn hash_read(&mut self, hash: &mut Sha256, name: &str) {
        if name.is_empty() {
            hash.update(b"none");
            return;
        }
        if let Some(&number) = self.inner.iter().rev().find_map(|scope| scope.get(name)) {
            hash.update(b"inner");
            hash.update(number.to_le_bytes());
            return;
        }
        let Some(value) = self.prepared.index.value(name) else { return };
        if let Some(&number) = self.locals.get(&value) {
            hash.update(b"local");
            hash.update(number.to_le_bytes());
            return;
        }
        let number = self.fresh();
        self.locals.insert(value, number);
        match self.prepared.index.origin[value as usize] {
            Origin::Constant(_) | Origin::Sparse(_) => {
                hash.update(b"constant");
                hash.update(self.prepared.digest(value));
            }
            Origin::Input(_) | Origin::Node(_) => {
                hash.update(b"input");
                match &self.prepared.infos[value as usize] {
                    Some(info) => hash_type(hash, info.dtype.onnx_code(), &info.shape),
                    None => hash.update(b"unknown"),
                }
            }
        }
    }
}

fn hash_type(hash: &mut Sha256, code: i32, shape: &[u64]) {
    hash.update(code.to_le_bytes());
    hash.update((shape.len() as u64).to_le_bytes());
    for extent in shape {
        hash.update(extent.to_le_bytes());
    }
}

fn hash_bytes(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn hash_text(hash: &mut Sha256, text: &str) {
    hash_bytes(hash, text.as_bytes());
}
