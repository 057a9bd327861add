//! From groups of nodes to an operator graph.

use crate::fuse::{self, Groups};
use crate::index::{NodeId, ValueId};
use crate::model::is_default_domain;
use crate::{OnnxError, Prepared, flops, signature};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};
use trefoil_core::{Granularity, Operator, OperatorClass, OperatorGraph, OperatorId, TensorEdge, TensorId};

/// Nodes that one kernel of a backend computes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelGroup {
    /// Names of ONNX nodes, or of values that they write; unknown names are ignored (backends invent some).
    pub nodes: Vec<String>,
}

/// Operations per byte of operands and results above which an operator counts as compute-bound.
const COMPUTE_BOUND_ABOVE: f64 = 8.0;
/// Node types spelled out in an operator's kind.
const KIND_NODES: usize = 12;

impl Prepared {
    /// Groups the nodes into operators. `kernels` tell a backend's own fusion, for [`Granularity::Backend`].
    ///
    /// No boundary crosses a value that cannot move between units, or whose shape depends on data: its writer and readers, and
    /// everything between them, are one operator. Groups that would form a cycle fall apart into nodes (backends' kernels) or
    /// are merged (the former case).
    ///
    /// # Errors
    /// [`OnnxError::Graph`] if the result breaks an invariant.
    pub fn operator_graph(
        &self,
        granularity: Granularity,
        kernels: &[KernelGroup],
    ) -> Result<OperatorGraph, OnnxError> {
        let count = self.graph().node.len();
        let mut groups = match granularity {
            Granularity::Node => Groups::single(count),
            Granularity::Fused => fuse::fuse(self, fuse::ALL),
            Granularity::Backend => self.kernel_groups(kernels),
        };
        for value in 0..self.index.names.len() {
            if !self.uncuttable[value] {
                continue;
            }
            let Some(producer) = self.index.producer(value as ValueId) else { continue };
            for &reader in &self.index.readers[value] {
                groups.join(producer, reader);
            }
        }
        let shared = std::mem::take(&mut groups.shared);
        let mut operator_of = self.number(&mut groups, &shared);
        // Two groups that read from each other, directly or through others, can only run as one.
        for (node, component) in self.components(&operator_of) {
            groups.join(node, component);
        }
        operator_of = self.number(&mut groups, &shared);
        let members = self.in_order(&operator_of)?;
        let graph = self.assemble_graph(granularity, &members, &shared);
        graph.validate()?;
        Ok(graph)
    }

    /// Group number by node; `None` for nodes that go along with every reader.
    fn number(&self, groups: &mut Groups, shared: &[bool]) -> Vec<Option<u32>> {
        let mut numbers: HashMap<NodeId, u32> = HashMap::new();
        (0..self.graph().node.len())
            .map(|node| {
                if self.analysis.constant_node[node] || shared[node] {
                    return None;
                }
                let next = numbers.len() as u32;
                Some(*numbers.entry(groups.find(node as NodeId)).or_insert(next))
            })
            .collect()
    }

    fn kernel_groups(&self, kernels: &[KernelGroup]) -> Groups {
        let graph = self.graph();
        let by_name: HashMap<&str, NodeId> =
            graph.node.iter().enumerate().map(|(position, node)| (node.name(), position as NodeId)).collect();
        let lookup = |name: &String| {
            let node = by_name
                .get(name.as_str())
                .copied()
                .or_else(|| self.index.value(name).and_then(|value| self.index.producer(value)));
            node.filter(|&node| !self.analysis.constant_node[node as usize])
        };
        let mut taken: HashSet<NodeId> = HashSet::new();
        let mut sets: Vec<Vec<NodeId>> = Vec::new();
        for kernel in kernels {
            // A node that two kernels claim stays with the first.
            let nodes: BTreeSet<NodeId> =
                kernel.nodes.iter().filter_map(lookup).filter(|node| !taken.contains(node)).collect();
            taken.extend(&nodes);
            sets.push(nodes.into_iter().collect());
        }
        // A kernel that cannot be one operator (it waits for itself through others) falls apart; what is left may then fit.
        loop {
            let mut groups = Groups::single(graph.node.len());
            for nodes in &sets {
                for pair in nodes.windows(2) {
                    groups.join(pair[0], pair[1]);
                }
            }
            let operator_of = self.number(&mut groups, &vec![false; graph.node.len()]);
            let knotted: HashSet<NodeId> =
                self.components(&operator_of).into_iter().flat_map(|(node, other)| [node, other]).collect();
            let before = sets.len();
            sets.retain(|nodes| !nodes.iter().any(|node| knotted.contains(node)));
            if sets.len() == before {
                return groups;
            }
        }
    }

    /// Pairs of nodes whose groups lie on a common cycle of the contracted graph, each cycle's groups chained to one node.
    /// Tarjan's strongly connected components, without recursion.
    fn components(&self, operator_of: &[Option<u32>]) -> Vec<(NodeId, NodeId)> {
        let (successors, representative) = self.contracted(operator_of);
        let count = successors.len();
        let unvisited = u32::MAX;
        let (mut order, mut low) = (vec![unvisited; count], vec![0u32; count]);
        let mut on_stack = vec![false; count];
        let mut stack: Vec<u32> = Vec::new();
        let mut clock = 0;
        let mut pairs = Vec::new();
        for start in 0..count as u32 {
            if order[start as usize] != unvisited {
                continue;
            }
            let mut path: Vec<(u32, usize)> = vec![(start, 0)];
            while let Some((at, next)) = path.pop() {
                if next == 0 {
                    order[at as usize] = clock;
                    low[at as usize] = clock;
                    clock += 1;
                    stack.push(at);
                    on_stack[at as usize] = true;
                }
                if let Some(&successor) = successors[at as usize].get(next) {
                    path.push((at, next + 1));
                    if order[successor as usize] == unvisited {
                        path.push((successor, 0));
                    } else if on_stack[successor as usize] {
                        low[at as usize] = low[at as usize].min(order[successor as usize]);
                    }
                    continue;
                }
                if let Some(&(parent, _)) = path.last() {
                    low[parent as usize] = low[parent as usize].min(low[at as usize]);
                }
                if low[at as usize] == order[at as usize] {
                    while let Some(member) = stack.pop() {
                        on_stack[member as usize] = false;
                        if member == at {
                            break;
                        }
                        pairs.push((representative[member as usize], representative[at as usize]));
                    }
                }
            }
        }
        pairs
    }

    /// Operators that read a value, themselves or through a node that goes along with its readers. Ascending, no duplicates.
    fn readers<T: Copy + Ord>(&self, value: ValueId, operator_of: &[Option<T>]) -> Vec<T> {
        let mut readers = Vec::with_capacity(self.index.readers[value as usize].len());
        let mut stack = vec![value];
        while let Some(value) = stack.pop() {
            for &reader in &self.index.readers[value as usize] {
                match operator_of[reader as usize] {
                    Some(operator) => readers.push(operator),
                    None => stack.extend(&self.index.writes[reader as usize]),
                }
            }
        }
        readers.sort_unstable();
        readers.dedup();
        readers
    }

    /// Successor lists of the contracted graph, and one node of every group.
    fn contracted(&self, operator_of: &[Option<u32>]) -> (Vec<Vec<u32>>, Vec<NodeId>) {
        let count = operator_of.iter().flatten().max().map_or(0, |&last| last as usize + 1);
        let mut successors: Vec<Vec<u32>> = vec![Vec::new(); count];
        let mut representative = vec![0; count];
        for (node, operator) in operator_of.iter().enumerate() {
            let Some(operator) = *operator else { continue };
            representative[operator as usize] = node as NodeId;
            for &value in &self.index.writes[node] {
                let others = self.readers(value, operator_of).into_iter().filter(|&other| other != operator);
                successors[operator as usize].extend(others);
            }
        }
        for list in &mut successors {
            list.sort_unstable();
            list.dedup();
        }
        (successors, representative)
    }

    /// Nodes of every operator, operators in topological order (by their last nodes where that is free), nodes ascending.
    fn in_order(&self, operator_of: &[Option<u32>]) -> Result<Vec<Vec<NodeId>>, OnnxError> {
        let (successors, _) = self.contracted(operator_of);
        let mut members: Vec<Vec<NodeId>> = vec![Vec::new(); successors.len()];
        for (node, operator) in operator_of.iter().enumerate() {
            if let Some(operator) = operator {
                members[*operator as usize].push(node as NodeId);
            }
        }
        let mut waiting = vec![0u32; successors.len()];
        for &successor in successors.iter().flatten() {
            waiting[successor as usize] += 1;
        }
        let entry = |operator: u32, members: &[Vec<NodeId>]| {
            Reverse((members[operator as usize].last().copied().unwrap_or(0), operator))
        };
        let mut ready: BinaryHeap<_> = (0..successors.len() as u32)
            .filter(|&operator| waiting[operator as usize] == 0)
            .map(|operator| entry(operator, &members))
            .collect();
        let mut order = Vec::with_capacity(successors.len());
        while let Some(Reverse((_, operator))) = ready.pop() {
            order.push(operator);
            for &successor in &successors[operator as usize] {
                waiting[successor as usize] -= 1;
                if waiting[successor as usize] == 0 {
                    ready.push(entry(successor, &members));
                }
            }
        }
        if order.len() != successors.len() {
            // `components` has merged every cycle; this would be a bug, and is told as one.
            return Err(OnnxError::Malformed { reason: "operators form a cycle".into() });
        }
        Ok(order.into_iter().map(|operator| std::mem::take(&mut members[operator as usize])).collect())
    }

    fn assemble_graph(&self, granularity: Granularity, members: &[Vec<NodeId>], shared: &[bool]) -> OperatorGraph {
        let mut operator_of: Vec<Option<OperatorId>> = vec![None; self.graph().node.len()];
        for (operator, nodes) in members.iter().enumerate() {
            for &node in nodes {
                operator_of[node as usize] = Some(OperatorId(operator as u32));
            }
        }
        let mut tensors: Vec<TensorEdge> = Vec::new();
        let mut tensor_of: HashMap<ValueId, TensorId> = HashMap::new();
        let mut add = |value: ValueId, producer: Option<OperatorId>| {
            let info = self.info_or_opaque(self.index.name(value));
            let id = TensorId(tensors.len() as u32);
            let mut consumers = self.readers(value, &operator_of);
            consumers.retain(|&reader| Some(reader) != producer);
            let bytes = info.bytes();
            tensors.push(TensorEdge {
                name: info.name,
                dtype: info.dtype,
                shape: info.shape,
                bytes,
                producer,
                consumers,
            });
            tensor_of.insert(value, id);
            id
        };
        let mut inputs = Vec::new();
        for input in &self.graph().input {
            if let Some(value) = self.index.value(input.name()) {
                inputs.push(add(value, None));
            }
        }
        let mut outputs_of: Vec<Vec<TensorId>> = Vec::with_capacity(members.len());
        for (operator, nodes) in members.iter().enumerate() {
            let id = OperatorId(operator as u32);
            let mut written = Vec::new();
            for &value in nodes.iter().flat_map(|&node| &self.index.writes[node as usize]) {
                let read_outside = || self.readers(value, &operator_of).iter().any(|&reader| reader != id);
                if self.index.is_output[value as usize] || read_outside() {
                    written.push(add(value, Some(id)));
                }
            }
            outputs_of.push(written);
        }
        let outputs = self
            .outputs
            .iter()
            .filter_map(|name| self.index.value(name).and_then(|value| tensor_of.get(&value).copied()))
            .collect();
        let mut signer = signature::Signer::new(self);
        let operators = members
            .iter()
            .zip(outputs_of)
            .map(|(nodes, outputs)| {
                let carried = self.carried(nodes, shared);
                self.operator(nodes, &carried, outputs, &tensor_of, &tensors, &mut signer)
            })
            .collect();
        OperatorGraph {
            model: self.model.name().to_owned(),
            fingerprint: self.fingerprint().to_owned(),
            granularity,
            tensors,
            operators,
            inputs,
            outputs,
        }
    }

    fn operator(
        &self,
        nodes: &[NodeId],
        carried: &[NodeId],
        outputs: Vec<TensorId>,
        tensor_of: &HashMap<ValueId, TensorId>,
        tensors: &[TensorEdge],
        signer: &mut signature::Signer<'_>,
    ) -> Operator {
        let graph = self.graph();
        let own: HashSet<NodeId> = nodes.iter().chain(carried).copied().collect();
        let mut inputs = Vec::new();
        let mut seen = HashSet::new();
        let mut weight_bytes = 0u64;
        for &node in nodes.iter().chain(carried) {
            for &value in &self.index.reads[node as usize] {
                if !seen.insert(value) {
                    continue;
                }
                if self.index.is_constant(value) {
                    let info = self.infos[value as usize].as_ref();
                    // Opaque types (strings, 4-bit) have no element size; their contents count as they are.
                    let stored = info.map_or(0, trefoil_core::TensorInfo::bytes);
                    weight_bytes =
                        weight_bytes.saturating_add(if stored == 0 { self.stored_bytes(value) } else { stored });
                } else if !self.analysis.constant[value as usize]
                    && self.index.producer(value).is_none_or(|producer| !own.contains(&producer))
                {
                    inputs.extend(tensor_of.get(&value));
                }
            }
        }
        let spelled = |&node: &NodeId| {
            let node = &graph.node[node as usize];
            if is_default_domain(node) {
                node.op_type().to_owned()
            } else {
                format!("{}.{}", node.domain(), node.op_type())
            }
        };
        let mut kind = nodes.iter().take(KIND_NODES).map(spelled).collect::<Vec<_>>().join("+");
        if nodes.len() > KIND_NODES {
            kind = format!("{kind}+…{} more", nodes.len() - KIND_NODES);
        }
        let count = flops::estimate(self, nodes);
        let moved: u64 = inputs
            .iter()
            .chain(&outputs)
            .map(|id: &TensorId| tensors[id.index()].bytes)
            .fold(weight_bytes, u64::saturating_add);
        let intensity = count.known as f64 / moved.max(1) as f64;
        let mut all: Vec<u32> = nodes.iter().chain(carried).copied().collect();
        all.sort_unstable();
        Operator {
            name: graph.node[nodes[0] as usize].name().to_owned(),
            kind,
            signature: signer.sign(nodes, carried, &outputs, tensors),
            nodes: all,
            inputs,
            outputs,
            class: if intensity > COMPUTE_BOUND_ABOVE { OperatorClass::Compute } else { OperatorClass::Memory },
            flops: count.complete.then_some(count.known),
            weight_bytes,
        }
    }

    fn stored_bytes(&self, value: ValueId) -> u64 {
        match self.index.origin[value as usize] {
            crate::index::Origin::Constant(position) => {
                crate::tensor::content_len(&self.graph().initializer[position as usize])
            }
            _ => 0,
        }
    }
}
