//! The operator graph: what planners place and executors run.

mod validate;

use crate::DataType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Index of an operator in [`OperatorGraph::operators`], which is topologically ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OperatorId(pub u32);

/// Index of a tensor in [`OperatorGraph::tensors`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TensorId(pub u32);

impl OperatorId {
    /// As a slice index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl TensorId {
    /// As a slice index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for OperatorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Fingerprint under which operators are profiled once: node types, attributes, input shapes and types, and the
/// **values** of constants (denormal weights change time 55-fold). 32 lowercase hex digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Signature(pub String);

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How nodes are grouped into operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Granularity {
    /// A backend's own fused kernels, as its profiling reports them.
    Backend,
    /// Trefoil's fusion rules (data, in `trefoil-onnx`).
    #[default]
    Fused,
    /// One operator per ONNX node.
    Node,
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Backend => "backend",
            Self::Fused => "fused",
            Self::Node => "node",
        })
    }
}

/// What bounds an operator, for slowdown factors: arithmetic or memory traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperatorClass {
    /// Many operations per byte: MatMul, Conv.
    Compute,
    /// Few operations per byte: elementwise, data movement, GEMV.
    Memory,
}

/// A tensor that crosses operator boundaries (weights stay inside operators and are not listed).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEdge {
    /// Name in the prepared model.
    pub name: String,
    /// Element type.
    pub dtype: DataType,
    /// Static shape, outermost first.
    pub shape: Vec<u64>,
    /// Size in bytes.
    pub bytes: u64,
    /// The operator that writes it; `None` for a model input.
    pub producer: Option<OperatorId>,
    /// Operators that read it, ascending.
    pub consumers: Vec<OperatorId>,
}

impl TensorEdge {
    /// As a free-standing description.
    pub fn info(&self) -> crate::TensorInfo {
        crate::TensorInfo::new(self.name.clone(), self.dtype, self.shape.clone())
    }
}

/// An atom of scheduling: a group of ONNX nodes that a backend runs as one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operator {
    /// Name: the first node's, or one made from its output.
    pub name: String,
    /// Node types joined with `+`, such as `Conv+Relu`; domain-qualified outside `ai.onnx`.
    pub kind: String,
    /// Node indices in the prepared model, ascending.
    pub nodes: Vec<u32>,
    /// Tensors read from outside, in first-use order, no duplicates.
    pub inputs: Vec<TensorId>,
    /// Tensors written that somebody outside reads (or the model outputs).
    pub outputs: Vec<TensorId>,
    /// Fingerprint; equal fingerprints are measured once.
    pub signature: Signature,
    /// Compute- or memory-bound.
    pub class: OperatorClass,
    /// Floating-point or integer operations, multiply and add counted apart; `None` when unknown.
    pub flops: Option<u64>,
    /// Bytes of constants (weights) it reads.
    pub weight_bytes: u64,
}

/// A model as operators in topological order. Immutable once built; [`OperatorGraph::validate`] holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorGraph {
    /// Model name (file stem).
    pub model: String,
    /// Fingerprint of the prepared model: file contents and fixed shapes. 32 hex digits.
    pub fingerprint: String,
    /// How nodes were grouped.
    pub granularity: Granularity,
    /// Tensors crossing operator boundaries, model inputs first.
    pub tensors: Vec<TensorEdge>,
    /// Operators; every operator comes after those it reads from.
    pub operators: Vec<Operator>,
    /// Model inputs.
    pub inputs: Vec<TensorId>,
    /// Model outputs; may repeat a tensor or name an input.
    pub outputs: Vec<TensorId>,
}

impl OperatorGraph {
    /// Number of operators.
    pub fn len(&self) -> usize {
        self.operators.len()
    }

    /// Bytes of weights of some operators together; a graph that was not validated may hold more than there are numbers.
    pub fn weight_bytes(&self, of: impl IntoIterator<Item = OperatorId>) -> u64 {
        of.into_iter().fold(0, |sum, id| sum.saturating_add(self.operator(id).weight_bytes))
    }

    /// Whether there is no operator.
    pub fn is_empty(&self) -> bool {
        self.operators.is_empty()
    }

    /// The operator at `id`.
    pub fn operator(&self, id: OperatorId) -> &Operator {
        &self.operators[id.index()]
    }

    /// The tensor at `id`.
    pub fn tensor(&self, id: TensorId) -> &TensorEdge {
        &self.tensors[id.index()]
    }

    /// Ids of all operators, in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = OperatorId> + use<> {
        (0..self.operators.len() as u32).map(OperatorId)
    }

    /// Whether the model outputs this tensor.
    pub fn is_model_output(&self, tensor: TensorId) -> bool {
        self.outputs.contains(&tensor)
    }

    /// Operators that `id` reads from, ascending, no duplicates.
    pub fn predecessors(&self, id: OperatorId) -> Vec<OperatorId> {
        let set: BTreeSet<_> = self.operator(id).inputs.iter().filter_map(|&t| self.tensor(t).producer).collect();
        set.into_iter().collect()
    }

    /// Operators that read from `id`, ascending, no duplicates.
    pub fn successors(&self, id: OperatorId) -> Vec<OperatorId> {
        let set: BTreeSet<_> =
            self.operator(id).outputs.iter().flat_map(|&t| self.tensor(t).consumers.iter().copied()).collect();
        set.into_iter().collect()
    }

    /// Number of distinct signatures.
    pub fn distinct(&self) -> usize {
        self.operators.iter().map(|operator| &operator.signature).collect::<BTreeSet<_>>().len()
    }

    /// Tensors that a set of operators reads from outside and those it must hand out (read outside the set or model
    /// outputs), each in ascending order.
    pub fn boundary(&self, set: &BTreeSet<OperatorId>) -> (Vec<TensorId>, Vec<TensorId>) {
        let mut inputs = BTreeSet::new();
        let mut outputs = BTreeSet::new();
        for &id in set {
            let operator = self.operator(id);
            inputs.extend(
                operator.inputs.iter().copied().filter(|&t| self.tensor(t).producer.is_none_or(|p| !set.contains(&p))),
            );
            outputs.extend(
                operator
                    .outputs
                    .iter()
                    .copied()
                    .filter(|&t| self.is_model_output(t) || self.tensor(t).consumers.iter().any(|c| !set.contains(c))),
            );
        }
        (inputs.into_iter().collect(), outputs.into_iter().collect())
    }

    /// Whether no path leaves the set and re-enters it. O(operators + edges).
    pub fn is_convex(&self, set: &BTreeSet<OperatorId>) -> bool {
        let (Some(&first), Some(&last)) = (set.first(), set.last()) else { return true };
        // `tainted`: reachable from the set through an operator outside it.
        let mut tainted = vec![false; last.index() + 1];
        for index in first.0..=last.0 {
            let id = OperatorId(index);
            let mut from_set = false;
            let mut from_tainted = false;
            for &tensor in &self.operator(id).inputs {
                if let Some(producer) = self.tensor(tensor).producer {
                    if set.contains(&producer) {
                        from_set = true;
                    } else {
                        from_tainted |= tainted[producer.index()];
                    }
                }
            }
            if set.contains(&id) {
                if from_tainted {
                    return false;
                }
            } else {
                tainted[id.index()] = from_set || from_tainted;
            }
        }
        true
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A graph from edges `(from, to)` with `from < to`; one tensor of `bytes` per operator.
    pub(crate) fn from_edges(count: u32, edges: &[(u32, u32)], bytes: u64) -> OperatorGraph {
        let mut tensors = vec![TensorEdge {
            name: "x".into(),
            dtype: DataType::F32,
            shape: vec![bytes / 4],
            bytes,
            producer: None,
            consumers: Vec::new(),
        }];
        for index in 0..count {
            let consumers: BTreeSet<_> =
                edges.iter().filter(|(from, _)| *from == index).map(|&(_, to)| OperatorId(to)).collect();
            tensors.push(TensorEdge {
                name: format!("t{index}"),
                dtype: DataType::F32,
                shape: vec![bytes / 4],
                bytes,
                producer: Some(OperatorId(index)),
                consumers: consumers.into_iter().collect(),
            });
        }
        let operators: Vec<_> = (0..count)
            .map(|index| {
                let mut inputs: Vec<_> =
                    edges.iter().filter(|(_, to)| *to == index).map(|&(from, _)| TensorId(from + 1)).collect();
                inputs.sort_unstable();
                inputs.dedup();
                if inputs.is_empty() {
                    inputs.push(TensorId(0));
                    tensors[0].consumers.push(OperatorId(index));
                }
                Operator {
                    name: format!("op{index}"),
                    kind: "Relu".into(),
                    nodes: vec![index],
                    inputs,
                    outputs: vec![TensorId(index + 1)],
                    signature: Signature(format!("{index:032x}")),
                    class: OperatorClass::Memory,
                    flops: None,
                    weight_bytes: 0,
                }
            })
            .collect();
        let outputs = (1..=count).map(TensorId).filter(|t| tensors[t.index()].consumers.is_empty()).collect();
        OperatorGraph {
            model: "test".into(),
            fingerprint: "0".repeat(32),
            granularity: Granularity::Node,
            tensors,
            operators,
            inputs: vec![TensorId(0)],
            outputs,
        }
    }

    /// Oracle for convexity: depth-first search over every path.
    fn convex_by_search(graph: &OperatorGraph, set: &BTreeSet<OperatorId>) -> bool {
        fn reenters(graph: &OperatorGraph, set: &BTreeSet<OperatorId>, at: OperatorId, outside: bool) -> bool {
            graph.successors(at).into_iter().any(|next| {
                let inside = set.contains(&next);
                (inside && outside) || reenters(graph, set, next, outside || !inside)
            })
        }
        !set.iter().any(|&id| reenters(graph, set, id, false))
    }

    proptest! {
        #[test]
        fn convexity_agrees_with_path_search(
            edges in proptest::collection::vec((0u32..8, 0u32..8), 0..14),
            members in proptest::collection::btree_set(0u32..8, 0..6),
        ) {
            let edges: Vec<_> = edges.into_iter().filter(|(a, b)| a < b).collect();
            let graph = from_edges(8, &edges, 16);
            graph.validate().unwrap();
            let set: BTreeSet<_> = members.into_iter().map(OperatorId).collect();
            prop_assert_eq!(graph.is_convex(&set), convex_by_search(&graph, &set));
        }
    }

    #[test]
    fn boundary_of_a_diamond_branch() {
        let graph = from_edges(4, &[(0, 1), (0, 2), (1, 3), (2, 3)], 16);
        let set = BTreeSet::from([OperatorId(1), OperatorId(3)]);
        assert_eq!(graph.boundary(&set), (vec![TensorId(1), TensorId(3)], vec![TensorId(4)]));
        assert!(graph.is_convex(&set));
        assert!(!graph.is_convex(&BTreeSet::from([OperatorId(0), OperatorId(1), OperatorId(3)])));
    }

    #[test]
    fn validate_names_the_offender() {
        let mut graph = from_edges(2, &[(0, 1)], 16);
        graph.operators[0].inputs = vec![TensorId(2)];
        assert!(graph.validate().unwrap_err().to_string().contains("op0"));
    }
}
