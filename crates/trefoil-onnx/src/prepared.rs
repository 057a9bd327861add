//! A model ready to be cut: static shapes everywhere, constants folded, dead nodes gone.

use crate::analysis::{self, Analysis, Shapes};
use crate::index::{self, GraphIndex, NodeId, ValueId};
use crate::port;
use crate::proto::GraphProto;
use crate::weights::{self, WeightStore};
use crate::{Model, OnnxError, Values, fold, model, tensor};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use trefoil_core::{DataType, TensorInfo};

/// A prepared model: the shape of every value that may cross an operator boundary is known, constants are folded, nodes
/// that no output needs are gone, the rest is in topological order and every node has a name of its own.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) model: Model,
    pub(crate) index: GraphIndex,
    pub(crate) infos: Vec<Option<TensorInfo>>,
    pub(crate) analysis: Analysis,
    /// By value: no operator boundary may cross it (no tensor, of a type that cannot move, or data-shaped).
    pub(crate) uncuttable: Vec<bool>,
    /// Output names in model order; may repeat.
    pub(crate) outputs: Vec<String>,
    /// By value: digest of a constant, computed when first asked for.
    digests: Vec<OnceLock<[u8; 32]>>,
}

impl Prepared {
    /// Prepares a model with what a run of [`Model::traced`] told.
    ///
    /// # Errors
    /// [`OnnxError::SymbolicDims`] if shapes are open; [`OnnxError::UnknownShape`] if the traced run misses a value.
    pub fn new(model: Model, values: &dyn Values) -> Result<Self, OnnxError> {
        let mut model = model;
        let name = model.name().to_owned();
        port::fix_shapes(&name, model.graph_mut(), &BTreeMap::new())?;
        let opset = model.opset("");
        let before = GraphIndex::new(model.graph())?;
        let mut infos = analysis::declared_infos(model.graph(), &before);
        for (value, info) in infos.iter_mut().enumerate() {
            if before.producer(value as ValueId).is_some()
                && let Some(told) = values.info(before.name(value as ValueId))
            {
                *info = Some(TensorInfo { name: before.name(value as ValueId).to_owned(), ..told });
            }
        }
        let no_tensors: Vec<String> = model::untraceable_values(model.graph()).into_iter().map(str::to_owned).collect();
        let outputs: Vec<String> = model.graph().output.iter().map(|output| output.name().to_owned()).collect();

        let new_constants = fold::fold(model.graph_mut(), &before, &infos, values, opset);
        let mut weights = WeightStore::clone(&model.weights);
        let fresh = || model.graph().initializer.iter().filter(|tensor| new_constants.contains(tensor.name()));
        weights.add_file(&weights::contents_name("folded", fresh()), fresh());
        model.weights = Arc::new(weights);

        let known: HashMap<&str, TensorInfo> = (0..infos.len())
            .filter_map(|value| infos[value].take().map(|info| (before.name(value as ValueId), info)))
            .collect();
        let after = GraphIndex::new(model.graph())?;
        let mut infos = analysis::declared_infos(model.graph(), &after);
        for (value, info) in infos.iter_mut().enumerate() {
            if let Some(told) = known.get(after.name(value as ValueId)) {
                *info = Some(told.clone());
            }
        }
        Self::assemble(model, after, infos, &no_tensors, outputs)
    }

    /// Derives everything else from a folded graph and what is known of its values.
    pub(crate) fn assemble(
        mut model: Model,
        index: GraphIndex,
        infos: Vec<Option<TensorInfo>>,
        no_tensors: &[String],
        outputs: Vec<String>,
    ) -> Result<Self, OnnxError> {
        let analysis = analysis::analyse(model.graph(), &index, &infos, Shapes::Activation);
        let mut uncuttable = analysis.data_shaped.clone();
        for name in no_tensors {
            if let Some(value) = index.value(name) {
                uncuttable[value as usize] = true;
            }
        }
        for (value, info) in infos.iter().enumerate() {
            let value_id = value as ValueId;
            let matters = !index.readers[value].is_empty() || index.is_output[value];
            match (info, index.producer(value_id)) {
                (Some(info), Some(_)) => uncuttable[value] |= info.dtype == DataType::Opaque,
                (None, Some(node)) if matters && !analysis.constant[value] && !uncuttable[value] => {
                    return Err(OnnxError::UnknownShape {
                        value: index.name(value_id).to_owned(),
                        context: format!("written by {}", index::describe(&model.graph().node[node as usize])),
                    });
                }
                _ => {}
            }
        }
        declare_outputs(model.graph_mut(), &index, &infos, &uncuttable);
        let digests = (0..index.names.len()).map(|_| OnceLock::new()).collect();
        Ok(Self { model, index, infos, analysis, uncuttable, outputs, digests })
    }

    /// The prepared model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Fingerprint of the model it was made from, shapes included.
    pub fn fingerprint(&self) -> &str {
        self.model.fingerprint()
    }

    /// Model inputs, in model order.
    pub fn inputs(&self) -> Vec<TensorInfo> {
        self.model.inputs().into_iter().filter_map(|port| port.info()).collect()
    }

    /// Model outputs, in model order; may repeat one. An output whose shape depends on data has the traced run's shape, and one
    /// that is no tensor has type [`DataType::Opaque`].
    pub fn outputs(&self) -> Vec<TensorInfo> {
        self.outputs.iter().map(|name| self.info_or_opaque(name)).collect()
    }

    /// Names of model outputs whose shape depends on the contents of inputs, so that other inputs than the traced ones may
    /// give other shapes.
    pub fn data_shaped_outputs(&self) -> Vec<&str> {
        let shaped =
            |name: &&str| self.index.value(name).is_some_and(|value| self.analysis.data_shaped[value as usize]);
        self.outputs.iter().map(String::as_str).filter(shaped).collect()
    }

    /// Type and shape of any value of the prepared model.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        self.infos[self.index.value(name)? as usize].clone()
    }

    pub(crate) fn info_or_opaque(&self, name: &str) -> TensorInfo {
        self.info(name).unwrap_or_else(|| TensorInfo::new(name, DataType::Opaque, []))
    }

    pub(crate) fn graph(&self) -> &GraphProto {
        self.model.graph()
    }

    /// Digest of a constant's type, shape and contents.
    pub(crate) fn digest(&self, value: ValueId) -> [u8; 32] {
        *self.digests[value as usize].get_or_init(|| match self.index.origin[value as usize] {
            index::Origin::Constant(position) => tensor::digest(&self.graph().initializer[position as usize]),
            index::Origin::Sparse(position) => {
                tensor::sparse_digest(&self.graph().sparse_initializer[position as usize])
            }
            _ => [0; 32],
        })
    }

    /// Nodes that the given nodes need and that go along with every reader, ascending: constant nodes that were not folded (cheap,
    /// or large as constants), and those in `shared`.
    pub(crate) fn carried(&self, nodes: &[NodeId], shared: &[bool]) -> Vec<NodeId> {
        let mut carried = std::collections::BTreeSet::new();
        let mut stack: Vec<NodeId> = nodes.to_vec();
        while let Some(node) = stack.pop() {
            for &value in &self.index.reads[node as usize] {
                if let Some(producer) = self.index.producer(value)
                    && (self.analysis.constant_node[producer as usize] || shared[producer as usize])
                    && carried.insert(producer)
                {
                    stack.push(producer);
                }
            }
        }
        carried.into_iter().collect()
    }
}

/// Gives graph outputs static declarations where their shape is static, and drops repeated ones: runtimes refuse them.
fn declare_outputs(graph: &mut GraphProto, index: &GraphIndex, infos: &[Option<TensorInfo>], uncuttable: &[bool]) {
    let mut seen = std::collections::HashSet::new();
    graph.output.retain(|output| seen.insert(output.name().to_owned()));
    for output in &mut graph.output {
        let Some(value) = index.value(output.name()).map(|value| value as usize) else { continue };
        if let Some(info) = infos[value].as_ref().filter(|info| info.dtype != DataType::Opaque) {
            let mut declared = port::declaration(info);
            if uncuttable[value] {
                port::forget_extents(&mut declared);
            }
            *output = declared;
        }
    }
}
