//! The top-level graph as integers: who writes and reads which value, captures of subgraphs included.

use crate::OnnxError;
use crate::proto::{AttributeProto, GraphProto, NodeProto};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

/// Index of a value in a [`GraphIndex`].
pub(crate) type ValueId = u32;
/// Index of a node in its graph.
pub(crate) type NodeId = u32;

/// What defines a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Model input `n` (position in the graph's input list).
    Input(u32),
    /// Initializer `n`.
    Constant(u32),
    /// Sparse initializer `n`.
    Sparse(u32),
    /// Output of a node.
    Node(NodeId),
}

/// Values, nodes and how they hang together.
#[derive(Debug, Clone, Default)]
pub(crate) struct GraphIndex {
    /// Value names.
    pub(crate) names: Vec<String>,
    /// By value: its definition.
    pub(crate) origin: Vec<Origin>,
    /// By value: nodes that read it, ascending, no duplicates.
    pub(crate) readers: Vec<Vec<NodeId>>,
    /// By value: whether it is a graph output.
    pub(crate) is_output: Vec<bool>,
    /// By node: values it reads, in order, captures after its own inputs, no duplicates.
    pub(crate) reads: Vec<Vec<ValueId>>,
    /// By node: values it writes, in order (empty optional outputs left out).
    pub(crate) writes: Vec<Vec<ValueId>>,
    by_name: HashMap<String, ValueId>,
}

/// A node as a person would call it.
pub(crate) fn describe(node: &NodeProto) -> String {
    if !node.name().is_empty() {
        return format!("node `{}` ({})", node.name(), node.op_type());
    }
    match node.output.iter().find(|output| !output.is_empty()) {
        Some(output) => format!("the {} node that writes `{output}`", node.op_type()),
        None => format!("a {} node", node.op_type()),
    }
}

/// The graphs in a node's attributes.
pub(crate) fn subgraphs(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|attribute: &AttributeProto| attribute.g.iter().chain(&attribute.graphs))
}

/// The graphs in a node's attributes, mutable.
pub(crate) fn subgraphs_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute.iter_mut().flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs))
}

/// Names that a graph defines itself.
fn definitions(graph: &GraphProto) -> HashSet<&str> {
    let inputs = graph.input.iter().map(super::proto::ValueInfoProto::name);
    let constants = graph.initializer.iter().map(super::proto::TensorProto::name);
    let sparse = graph
        .sparse_initializer
        .iter()
        .filter_map(|sparse| sparse.values.as_ref().map(super::proto::TensorProto::name));
    let outputs = graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str));
    inputs.chain(constants).chain(sparse).chain(outputs).filter(|name| !name.is_empty()).collect()
}

/// Names a subgraph reads from the graphs around it, in first-use order, no duplicates.
pub(crate) fn captures(graph: &GraphProto) -> Vec<&str> {
    let own = definitions(graph);
    let mut seen = HashSet::new();
    let mut result = Vec::new();
    let mut read = |name| {
        if !own.contains(name) && seen.insert(name) {
            result.push(name);
        }
    };
    for node in &graph.node {
        node.input.iter().map(String::as_str).filter(|name| !name.is_empty()).for_each(&mut read);
        subgraphs(node).flat_map(captures).for_each(&mut read);
    }
    // The standard asks for an own value here, but exporters do hand outer values straight through.
    graph.output.iter().map(super::proto::ValueInfoProto::name).filter(|name| !name.is_empty()).for_each(&mut read);
    result
}

/// Everything a node reads by name: inputs, then captures; duplicates and empty optional inputs left out.
pub(crate) fn reads(node: &NodeProto) -> Vec<&str> {
    let inputs = node.input.iter().map(String::as_str).filter(|name| !name.is_empty());
    let mut names: Vec<&str> = Vec::with_capacity(node.input.len());
    if node.input.len() <= 16 && subgraphs(node).next().is_none() {
        for name in inputs {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    } else {
        let mut seen = HashSet::new();
        names.extend(inputs.chain(subgraphs(node).flat_map(captures)).filter(|&name| seen.insert(name)));
    }
    names
}

impl GraphIndex {
    /// Indexes a graph and checks that every value is defined once and every read is defined.
    pub(crate) fn new(graph: &GraphProto) -> Result<Self, OnnxError> {
        Self::with_outer(graph, &HashSet::new())
    }

    /// As [`GraphIndex::new`] for a subgraph that may read the names in `outer`.
    fn with_outer(graph: &GraphProto, outer: &HashSet<String>) -> Result<Self, OnnxError> {
        let mut index = Self {
            reads: vec![Vec::new(); graph.node.len()],
            writes: vec![Vec::new(); graph.node.len()],
            ..Self::default()
        };
        for (position, tensor) in graph.initializer.iter().enumerate() {
            index.define(tensor.name(), Origin::Constant(position as u32), graph)?;
        }
        for (position, sparse) in graph.sparse_initializer.iter().enumerate() {
            let name = sparse.values.as_ref().map_or("", |values| values.name());
            index.define(name, Origin::Sparse(position as u32), graph)?;
        }
        for (position, input) in graph.input.iter().enumerate() {
            // Before IR version 4 every initializer had to be listed as an input too; the constant wins.
            let is_constant = index
                .by_name
                .get(input.name())
                .is_some_and(|&value| !matches!(index.origin[value as usize], Origin::Input(_)));
            if !is_constant {
                index.define(input.name(), Origin::Input(position as u32), graph)?;
            }
        }
        for (position, node) in graph.node.iter().enumerate() {
            for output in node.output.iter().filter(|output| !output.is_empty()) {
                let value = index.define(output, Origin::Node(position as u32), graph)?;
                index.writes[position].push(value);
            }
        }
        for (position, node) in graph.node.iter().enumerate() {
            for name in reads(node) {
                match index.by_name.get(name) {
                    Some(&value) => {
                        index.reads[position].push(value);
                        index.readers[value as usize].push(position as u32);
                    }
                    None if outer.contains(name) => {}
                    None => return Err(OnnxError::Undefined { reader: describe(node), value: name.to_owned() }),
                }
            }
        }
        for output in &graph.output {
            match index.by_name.get(output.name()) {
                Some(&value) => index.is_output[value as usize] = true,
                None if outer.contains(output.name()) => {}
                None => {
                    return Err(OnnxError::Undefined {
                        reader: "the list of graph outputs".into(),
                        value: output.name().to_owned(),
                    });
                }
            }
        }
        Ok(index)
    }

    fn define(&mut self, name: &str, origin: Origin, graph: &GraphProto) -> Result<ValueId, OnnxError> {
        if name.is_empty() {
            return Err(OnnxError::Malformed { reason: format!("{} has no name", describe_origin(origin, graph)) });
        }
        if let Some(&first) = self.by_name.get(name) {
            return Err(OnnxError::Duplicate {
                value: name.to_owned(),
                first: describe_origin(self.origin[first as usize], graph),
                second: describe_origin(origin, graph),
            });
        }
        let value = self.names.len() as ValueId;
        self.names.push(name.to_owned());
        self.by_name.insert(name.to_owned(), value);
        self.origin.push(origin);
        self.readers.push(Vec::new());
        self.is_output.push(false);
        Ok(value)
    }

    /// The value of this name.
    pub(crate) fn value(&self, name: &str) -> Option<ValueId> {
        self.by_name.get(name).copied()
    }

    /// The name of a value.
    pub(crate) fn name(&self, value: ValueId) -> &str {
        &self.names[value as usize]
    }

    /// The node that writes a value.
    pub(crate) fn producer(&self, value: ValueId) -> Option<NodeId> {
        match self.origin[value as usize] {
            Origin::Node(node) => Some(node),
            _ => None,
        }
    }

    /// Whether a value is an initializer.
    pub(crate) fn is_constant(&self, value: ValueId) -> bool {
        matches!(self.origin[value as usize], Origin::Constant(_) | Origin::Sparse(_))
    }

    /// A topological order of the nodes that keeps the given order wherever it can.
    fn order(&self, graph: &GraphProto) -> Result<Vec<NodeId>, OnnxError> {
        let count = self.reads.len();
        let mut waiting: Vec<usize> = vec![0; count];
        for (node, reads) in self.reads.iter().enumerate() {
            waiting[node] = reads.iter().filter(|&&value| self.producer(value).is_some()).count();
        }
        let mut ready: BinaryHeap<Reverse<NodeId>> =
            (0..count as u32).filter(|&node| waiting[node as usize] == 0).map(Reverse).collect();
        let mut order = Vec::with_capacity(count);
        while let Some(Reverse(node)) = ready.pop() {
            order.push(node);
            for &value in &self.writes[node as usize] {
                for &reader in &self.readers[value as usize] {
                    waiting[reader as usize] -= 1;
                    if waiting[reader as usize] == 0 {
                        ready.push(Reverse(reader));
                    }
                }
            }
        }
        if order.len() == count { Ok(order) } else { Err(self.cycle(graph, &waiting)) }
    }

    /// Names one cycle among the nodes that never became ready.
    fn cycle(&self, graph: &GraphProto, waiting: &[usize]) -> OnnxError {
        let blocked_producer = |node: NodeId| {
            self.reads[node as usize]
                .iter()
                .filter_map(|&value| self.producer(value))
                .find(|&producer| waiting[producer as usize] > 0)
        };
        let mut path = Vec::new();
        let mut position = HashMap::new();
        let mut at = waiting.iter().position(|&count| count > 0).map(|node| node as NodeId);
        let mut start = 0;
        while let Some(node) = at {
            if let Some(&first) = position.get(&node) {
                start = first;
                break;
            }
            position.insert(node, path.len());
            path.push(node);
            at = blocked_producer(node);
        }
        // Walked against the data flow; told along it.
        let mut nodes: Vec<String> = path[start..]
            .iter()
            .rev()
            .take(8)
            .map(|&node| {
                let node = &graph.node[node as usize];
                let name =
                    if node.name().is_empty() { node.output.first().map_or("", String::as_str) } else { node.name() };
                format!("`{name}`")
            })
            .collect();
        if path.len() - start > 8 {
            nodes.push("…".into());
        } else if let Some(first) = nodes.first().cloned() {
            nodes.push(first);
        }
        OnnxError::Cycle { nodes: nodes.join(" → ") }
    }
}

fn describe_origin(origin: Origin, graph: &GraphProto) -> String {
    match origin {
        Origin::Input(_) => "a graph input".into(),
        Origin::Constant(_) => "an initializer".into(),
        Origin::Sparse(_) => "a sparse initializer".into(),
        Origin::Node(node) => describe(&graph.node[node as usize]),
    }
}

/// Checks a graph and its subgraphs (definitions, duplicates, cycles) and sorts their nodes topologically. Float16
/// conversion tools emit unsorted graphs, and not every runtime takes those.
pub(crate) fn check_and_sort(graph: &mut GraphProto) -> Result<(), OnnxError> {
    check_and_sort_inside(graph, &HashSet::new())
}

fn check_and_sort_inside(graph: &mut GraphProto, outer: &HashSet<String>) -> Result<(), OnnxError> {
    let index = GraphIndex::with_outer(graph, outer)?;
    let order = index.order(graph)?;
    if !order.is_sorted() {
        let mut nodes: Vec<Option<NodeProto>> = std::mem::take(&mut graph.node).into_iter().map(Some).collect();
        graph.node = order.iter().filter_map(|&node| nodes[node as usize].take()).collect();
    }
    if graph.node.iter().any(|node| subgraphs(node).next().is_some()) {
        let mut visible = outer.clone();
        visible.extend(index.names);
        for node in &mut graph.node {
            for subgraph in subgraphs_mut(node) {
                check_and_sort_inside(subgraph, &visible)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{GraphBuilder, node};

    #[test]
    fn unsorted_nodes_are_sorted_stably() {
        let mut graph = GraphBuilder::new()
            .input("x", &[1])
            .node(node("Relu", &["b"], &["c"]))
            .node(node("Relu", &["x"], &["a"]))
            .node(node("Relu", &["a"], &["b"]))
            .output("c")
            .graph();
        check_and_sort(&mut graph).unwrap();
        let outputs: Vec<_> = graph.node.iter().map(|node| node.output[0].as_str()).collect();
        assert_eq!(outputs, ["a", "b", "c"]);
    }

    #[test]
    fn a_cycle_is_named() {
        let mut graph = GraphBuilder::new()
            .input("x", &[1])
            .node(node("Add", &["x", "c"], &["a"]))
            .node(node("Relu", &["a"], &["b"]))
            .node(node("Relu", &["b"], &["c"]))
            .output("c")
            .graph();
        let error = check_and_sort(&mut graph).unwrap_err();
        assert_eq!(error.to_string(), "the graph has a cycle through nodes `b` → `c` → `a` → `b`");
    }

    #[test]
    fn undefined_and_duplicate_values_are_named() {
        let mut graph =
            GraphBuilder::new().input("x", &[1]).node(node("Add", &["x", "ghost"], &["a"])).output("a").graph();
        assert_eq!(
            check_and_sort(&mut graph).unwrap_err().to_string(),
            "the Add node that writes `a` reads `ghost`, which no input, initializer or node defines"
        );
        let mut graph = GraphBuilder::new().input("x", &[1]).node(node("Relu", &["x"], &["x"])).output("x").graph();
        assert_eq!(
            check_and_sort(&mut graph).unwrap_err().to_string(),
            "value `x` is defined twice: by a graph input and by the Relu node that writes `x`"
        );
        let mut graph = GraphBuilder::new().input("x", &[1]).output("y").graph();
        assert!(matches!(check_and_sort(&mut graph), Err(OnnxError::Undefined { .. })));
    }

    #[test]
    fn captures_count_as_reads_through_nested_subgraphs() {
        let inner = GraphBuilder::new().node(node("Add", &["x", "local"], &["z"])).output("z").graph();
        let middle = GraphBuilder::new()
            .node(node("Relu", &["y"], &["local"]))
            .node(crate::testing::with_graph(node("If", &["local"], &["w"]), "then_branch", inner))
            .output("w")
            .graph();
        assert_eq!(captures(&middle), ["y", "x"]);
        let mut graph = GraphBuilder::new()
            .input("x", &[1])
            .input("c", &[1])
            .node(crate::testing::with_graph(node("If", &["c"], &["out"]), "then_branch", middle))
            .node(node("Relu", &["x"], &["y"]))
            .output("out")
            .graph();
        check_and_sort(&mut graph).unwrap();
        assert_eq!(graph.node[0].op_type(), "Relu", "the captured value is computed first");
        let index = GraphIndex::new(&graph).unwrap();
        assert_eq!(index.reads[1].len(), 3);
    }
}
