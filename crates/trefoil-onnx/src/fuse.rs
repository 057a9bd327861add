//! Applies the [rules](crate::rules) to a prepared model.

use crate::Prepared;
use crate::index::{NodeId, ValueId};
use crate::model::is_default_domain;
use crate::pattern::{Matcher, Pattern};
use crate::proto::NodeProto;
use crate::rules::{CHAINS, Chain, Class, Condition, OPERATOR_CLASSES, Outcome, SHARED, TREES, Tree};
use std::collections::HashMap;

/// Sets of nodes by union-find. Each group remembers its last node, whose outputs alone may be read outside.
pub(crate) struct Groups {
    parent: Vec<NodeId>,
    /// By root.
    last: Vec<NodeId>,
    class: Vec<Class>,
    dequantizes: Vec<bool>,
    /// By node: every reader gets a copy of it, so it is in no group of its own.
    pub(crate) shared: Vec<bool>,
}

impl Groups {
    /// Every node on its own.
    pub(crate) fn single(count: usize) -> Self {
        Self {
            parent: (0..count as NodeId).collect(),
            last: (0..count as NodeId).collect(),
            class: vec![Class::Other; count],
            dequantizes: vec![false; count],
            shared: vec![false; count],
        }
    }

    /// The group of a node.
    pub(crate) fn find(&mut self, node: NodeId) -> NodeId {
        let mut root = node;
        while self.parent[root as usize] != root {
            root = self.parent[root as usize];
        }
        let mut at = node;
        while self.parent[at as usize] != root {
            at = std::mem::replace(&mut self.parent[at as usize], root);
        }
        root
    }

    /// Joins two groups; the second one's last node is the result's.
    pub(crate) fn join(&mut self, producer: NodeId, consumer: NodeId) {
        let (producer, consumer) = (self.find(producer), self.find(consumer));
        if producer != consumer {
            self.parent[producer as usize] = consumer;
            self.dequantizes[consumer as usize] |= self.dequantizes[producer as usize];
        }
    }
}

/// Class of a single node.
fn class_of(prepared: &Prepared, position: usize, node: &NodeProto, by_operator: &HashMap<&str, Class>) -> Class {
    if !is_default_domain(node) && node.domain() != "com.microsoft" {
        return Class::Other;
    }
    let reads = &prepared.index.reads[position];
    let constants = reads.iter().filter(|&&value| prepared.analysis.constant[value as usize]).count();
    let activations = reads.len() - constants;
    // A subtracted or dividing activation is no bias or scale of what comes before.
    let constant_last = || {
        let last = node.input.get(1).and_then(|name| prepared.index.value(name));
        last.is_some_and(|value| prepared.analysis.constant[value as usize])
    };
    match node.op_type() {
        "Add" if activations == 2 => Class::Sum,
        "Add" if activations == 1 && constants == 1 => Class::Bias,
        "Sub" if constant_last() => Class::Bias,
        "Mul" if activations == 1 && constants == 1 => Class::Scale,
        "Div" if constant_last() => Class::Scale,
        "Add" | "Sub" | "Mul" | "Div" => Class::Elementwise,
        "PRelu" if activations != 1 => Class::Elementwise,
        operator => match by_operator.get(operator) {
            Some(&class) => class,
            None if reads.is_empty() => Class::Generator,
            None => Class::Other,
        },
    }
}

/// A table of rules.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub(crate) trees: &'a [Tree],
    pub(crate) shared: &'a [Class],
    pub(crate) chains: &'a [Chain],
}

/// All rules there are.
pub(crate) const ALL: Rules<'static> = Rules { trees: TREES, shared: SHARED, chains: CHAINS };

/// Groups the nodes of a prepared model by the given rules. Constant nodes stay alone; they go along with their readers.
pub(crate) fn fuse(prepared: &Prepared, rules: Rules<'_>) -> Groups {
    let graph = prepared.graph();
    let mut groups = Groups::single(graph.node.len());
    let by_operator: HashMap<&str, Class> = OPERATOR_CLASSES
        .iter()
        .flat_map(|&(class, operators)| operators.iter().map(move |&operator| (operator, class)))
        .collect();
    for (position, node) in graph.node.iter().enumerate() {
        groups.class[position] = class_of(prepared, position, node, &by_operator);
        groups.dequantizes[position] = groups.class[position] == Class::Dequantize;
    }
    match_trees(prepared, rules.trees, &mut groups);
    share(prepared, rules.shared, &mut groups);
    for chain in rules.chains {
        apply_chain(prepared, chain, &mut groups);
    }
    groups
}

/// Marks nodes of the given classes that several groups read; the readers count as dequantising then.
fn share(prepared: &Prepared, classes: &[Class], groups: &mut Groups) {
    let index = &prepared.index;
    for position in 0..prepared.graph().node.len() {
        let node = position as NodeId;
        if prepared.analysis.constant_node[position]
            || groups.find(node) != node
            || !classes.contains(&groups.class[position])
        {
            continue;
        }
        let [written] = index.writes[position].as_slice() else { continue };
        let movable = |value: &ValueId| !prepared.uncuttable[*value as usize];
        if index.is_output[*written as usize] || !movable(written) || !index.reads[position].iter().all(movable) {
            continue;
        }
        let mut readers: Vec<NodeId> =
            index.readers[*written as usize].iter().map(|&reader| groups.find(reader)).collect();
        readers.sort_unstable();
        readers.dedup();
        if readers.len() > 1 {
            groups.shared[position] = true;
            for reader in readers {
                groups.dequantizes[reader as usize] |= groups.class[position] == Class::Dequantize;
            }
        }
    }
}

fn match_trees(prepared: &Prepared, trees: &[Tree], groups: &mut Groups) {
    let graph = prepared.graph();
    let matcher = Matcher { graph, index: &prepared.index, constant: &prepared.analysis.constant };
    let mut taken = vec![false; graph.node.len()];
    let parsed: Vec<(Pattern, Class)> = trees
        .iter()
        .filter_map(|tree| Pattern::parse(tree.pattern).ok().map(|pattern| (pattern, tree.class)))
        .collect();
    let mut by_root: HashMap<&str, Vec<usize>> = HashMap::new();
    for (rule, (pattern, _)) in parsed.iter().enumerate() {
        for &operator in pattern.roots() {
            by_root.entry(operator).or_default().push(rule);
        }
    }
    // From the end: the last node of a large tree is met before the trees inside it.
    for position in (0..graph.node.len()).rev() {
        if taken[position] || prepared.analysis.constant_node[position] {
            continue;
        }
        let Some(rules) = by_root.get(graph.node[position].op_type()) else { continue };
        for &rule in rules {
            let (pattern, class) = &parsed[rule];
            let Some(nodes) = matcher.find(pattern, position as NodeId) else { continue };
            if nodes.iter().any(|&node| taken[node as usize]) {
                continue;
            }
            for &node in &nodes {
                taken[node as usize] = true;
                groups.join(node, position as NodeId);
            }
            let root = groups.find(position as NodeId) as usize;
            groups.class[root] = *class;
            break;
        }
    }
}

fn apply_chain(prepared: &Prepared, chain: &Chain, groups: &mut Groups) {
    for position in 0..prepared.graph().node.len() {
        if prepared.analysis.constant_node[position] || groups.shared[position] {
            continue;
        }
        for &value in &prepared.index.reads[position] {
            let Some(writer) = prepared.index.producer(value) else { continue };
            if prepared.analysis.constant_node[writer as usize] || groups.shared[writer as usize] {
                continue;
            }
            let (producer, consumer) = (groups.find(writer), groups.find(position as NodeId));
            if producer == consumer
                || !chain.producer.contains(&groups.class[producer as usize])
                || !chain.consumer.contains(&groups.class[consumer as usize])
                || groups.last[producer as usize] != writer
            {
                continue;
            }
            let allowed = match chain.condition {
                Condition::Always => true,
                Condition::NoLarger => is_no_larger(prepared, value, groups.last[consumer as usize]),
                Condition::Dequantized => groups.dequantizes[producer as usize],
            };
            if allowed && is_private(prepared, writer, consumer, groups) {
                let class = match chain.result {
                    Outcome::Class(class) => class,
                    Outcome::Producer => groups.class[producer as usize],
                    Outcome::Consumer => groups.class[consumer as usize],
                };
                groups.join(producer, consumer);
                groups.class[consumer as usize] = class;
            }
        }
    }
}

/// Whether only one group reads what a node writes, and the model does not output it.
fn is_private(prepared: &Prepared, writer: NodeId, consumer: NodeId, groups: &mut Groups) -> bool {
    prepared.index.writes[writer as usize].iter().all(|&value| {
        !prepared.index.is_output[value as usize]
            && prepared.index.readers[value as usize].iter().all(|&reader| groups.find(reader) == consumer)
    })
}

fn is_no_larger(prepared: &Prepared, value: ValueId, last: NodeId) -> bool {
    let elements = |value: ValueId| prepared.infos[value as usize].as_ref().map(trefoil_core::TensorInfo::elements);
    let result = prepared.index.writes[last as usize].first().and_then(|&written| elements(written));
    matches!((elements(value), result), (Some(produced), Some(result)) if produced <= result)
}
