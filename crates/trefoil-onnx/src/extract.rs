//! Cutting convex sets of operators out as stand-alone models.

use crate::index::{NodeId, Origin, ValueId};
use crate::proto::{GraphProto, ModelProto, ValueInfoProto};
use crate::{OnnxError, Prepared, files, port, tensor};
use prost::Message;
use sha2::{Digest, Sha256};
use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use trefoil_core::{DataType, OperatorGraph, OperatorId, TensorInfo};

/// A sub-model on disk, and its ports in graph order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extracted {
    /// The `.onnx` file; its weights lie in a `.data` file beside it.
    pub path: PathBuf,
    /// Inputs.
    pub inputs: Vec<TensorInfo>,
    /// Outputs.
    pub outputs: Vec<TensorInfo>,
}

impl Prepared {
    /// Writes a convex set of operators as a model of its own into `dir`. Ports are those of [`OperatorGraph::boundary`],
    /// in its order. The file is named after its contents; one that is there already is taken as it is. Constants above 1 KiB
    /// go to a weights file that all sub-models in the folder share, written once.
    ///
    /// # Errors
    /// [`OnnxError::Extract`] if the set is empty, not convex, or of another model's graph; [`OnnxError::Io`].
    pub fn extract(
        &self,
        graph: &OperatorGraph,
        operators: &BTreeSet<OperatorId>,
        dir: &Path,
    ) -> Result<Extracted, OnnxError> {
        let fail = |reason: String| OnnxError::Extract { operators: list(operators), reason };
        if graph.fingerprint != self.fingerprint() {
            return Err(fail(format!(
                "the operator graph is of model {} {}, not of {} {}",
                graph.model,
                graph.fingerprint,
                self.model.name(),
                self.fingerprint()
            )));
        }
        if operators.is_empty() {
            return Err(fail("the set is empty".into()));
        }
        if let Some(beyond) = operators.iter().find(|id| id.index() >= graph.len()) {
            return Err(fail(format!("the graph has {} operators, there is no {beyond}", graph.len())));
        }
        if !graph.is_convex(operators) {
            return Err(fail(
                "a path leaves the set and re-enters it; add the operators between or split the set".into(),
            ));
        }
        let nodes: BTreeSet<NodeId> =
            operators.iter().flat_map(|&id| graph.operator(id).nodes.iter().copied()).collect();
        if nodes.iter().any(|&node| node as usize >= self.graph().node.len()) {
            return Err(fail("the graph names nodes that the model does not have".into()));
        }
        let (inputs, outputs) = graph.boundary(operators);
        let inputs: Vec<TensorInfo> = inputs.into_iter().map(|id| graph.tensor(id).info()).collect();
        let outputs: Vec<TensorInfo> = outputs.into_iter().map(|id| graph.tensor(id).info()).collect();
        self.write(&nodes.into_iter().collect::<Vec<_>>(), inputs, outputs, dir)
    }

    /// Writes the whole prepared model into `dir`. Inputs and outputs are in model order; an output that the model lists
    /// twice stands once.
    ///
    /// # Errors
    /// [`OnnxError::Io`].
    pub fn whole(&self, dir: &Path) -> Result<Extracted, OnnxError> {
        let mut seen = HashSet::new();
        let outputs =
            self.outputs.iter().filter(|name| seen.insert(name.as_str())).map(|name| self.info_or_opaque(name));
        let outputs = outputs.collect();
        let nodes: Vec<NodeId> = (0..self.graph().node.len() as NodeId).collect();
        let declared = self.graph().input.iter().map(|input| self.info_or_opaque(input.name())).collect();
        self.write(&nodes, declared, outputs, dir)
    }

    fn write(
        &self,
        nodes: &[NodeId],
        inputs: Vec<TensorInfo>,
        outputs: Vec<TensorInfo>,
        dir: &Path,
    ) -> Result<Extracted, OnnxError> {
        files::create_folder(dir)?;
        let whole = self.graph();
        let mut graph = GraphProto {
            name: Some(self.model.name().to_owned()),
            node: nodes.iter().map(|&node| whole.node[node as usize].clone()).collect(),
            input: inputs.iter().map(|info| self.declare(info)).collect(),
            output: outputs.iter().map(|info| self.declare(info)).collect(),
            ..GraphProto::default()
        };
        let read = nodes.iter().flat_map(|&node| self.index.reads[node as usize].iter().copied());
        let constants: BTreeSet<ValueId> = read.filter(|&value| self.index.is_constant(value)).collect();
        for value in constants {
            match self.index.origin[value as usize] {
                Origin::Constant(position) => graph.initializer.push(whole.initializer[position as usize].clone()),
                Origin::Sparse(position) => {
                    graph.sparse_initializer.push(whole.sparse_initializer[position as usize].clone());
                }
                Origin::Input(_) | Origin::Node(_) => {}
            }
        }
        for constant in &mut graph.initializer {
            constant.doc_string = None;
        }
        let used = self.model.weights.detach(graph.initializer.iter_mut());
        self.model.weights.ensure(dir, &used)?;
        let mut header = self.model.header();
        if !self.calls_functions(&graph) {
            header.functions.clear();
        }
        let bytes = ModelProto { graph: Some(graph), ..header }.encode_to_vec();
        let path = dir.join(format!("{}.onnx", tensor::hex(&Sha256::digest(&bytes))));
        // The name is a digest of the contents and files appear by a rename, so one of the right length is the one.
        if !std::fs::metadata(&path).is_ok_and(|metadata| metadata.len() == bytes.len() as u64) {
            files::write_bytes(&path, &bytes)?;
        }
        Ok(Extracted { path, inputs, outputs })
    }

    /// A port's declaration. Values that are no tensors, or of types without a name here, keep the model's own; a shape that depends
    /// on data is left open.
    fn declare(&self, info: &TensorInfo) -> ValueInfoProto {
        if info.dtype == DataType::Opaque {
            let graph = self.graph();
            let own = graph.input.iter().chain(&graph.output).find(|value| value.name() == info.name);
            return own
                .cloned()
                .unwrap_or_else(|| ValueInfoProto { name: Some(info.name.clone()), ..Default::default() });
        }
        let mut declared = port::declaration(info);
        let value = self.index.value(&info.name);
        if value.is_some_and(|value| self.analysis.data_shaped[value as usize]) {
            port::forget_extents(&mut declared);
        }
        declared
    }

    fn calls_functions(&self, graph: &GraphProto) -> bool {
        fn calls(graph: &GraphProto, names: &HashSet<(&str, &str)>) -> bool {
            graph.node.iter().any(|node| {
                names.contains(&(node.domain(), node.op_type()))
                    || crate::index::subgraphs(node).any(|body| calls(body, names))
            })
        }
        let functions = &self.model.proto.functions;
        let names = functions.iter().map(|function| (function.domain(), function.name())).collect();
        !functions.is_empty() && calls(graph, &names)
    }
}

fn list(operators: &BTreeSet<OperatorId>) -> String {
    let mut text: Vec<String> = operators.iter().take(8).map(ToString::to_string).collect();
    if operators.len() > 8 {
        text.push("…".into());
    }
    format!("{{{}}}", text.join(", "))
}
