//! From a backend's node times to nodes of the model, and from there to operators and kernel groups.
//!
//! Backends name their kernels after nodes of the model: the node itself, one of the fused nodes, or such a name with
//! something added (`fused conv1`, `matmul/MatMulAddFusion`). So names are matched exactly first, against node names and
//! the values nodes write, then without a known beginning (`fused `, `InsertedCast_`), then by the longest model name that the kernel's name
//! continues. Nodes that no kernel is named after were fused away: such a node belongs to the kernel that makes its first
//! input if nobody else reads that input (an epilogue: Conv ← Relu), else to the kernel of its readers if they share one
//! (a prologue: Transpose → MatMul). What remains is its own. This is a reading of names, not a report of the backend:
//! where it misreads, groups are coarser or finer than the kernels, never wrong results.

use crate::ProfileError;
use crate::profiler::raw_node_times;
use crate::session::Session;
use std::collections::{BTreeSet, HashMap};
use trefoil_core::{NodeTime, OperatorGraph, OperatorId, Unit};
use trefoil_onnx::{KernelGroup, Prepared};

/// Nodes of a prepared model by every name they go by, and their neighbours.
pub(crate) struct NodeNames<'a> {
    by_name: HashMap<&'a str, usize>,
    /// Producer of each node's first input that a node writes, if this node is the only reader.
    epilogue_of: Vec<Option<usize>>,
    readers: Vec<Vec<usize>>,
}

impl<'a> NodeNames<'a> {
    pub(crate) fn new(prepared: &'a Prepared) -> Self {
        let model = prepared.model();
        let count = model.node_count();
        let mut by_name: HashMap<&str, usize> = HashMap::new();
        let mut producer: HashMap<&str, usize> = HashMap::new();
        let mut reads_of: Vec<Vec<&str>> = Vec::with_capacity(count);
        for node in 0..count {
            let (reads, writes) = model.node_values(node).unwrap_or_default();
            producer.extend(writes.iter().map(|&name| (name, node)));
            for name in model.node_name(node).into_iter().chain(writes) {
                by_name.entry(name).or_insert(node);
            }
            reads_of.push(reads);
        }
        let mut readers = vec![Vec::new(); count];
        let mut readers_of_value: HashMap<&str, usize> = HashMap::new();
        for (node, reads) in reads_of.iter().enumerate() {
            for name in reads {
                *readers_of_value.entry(name).or_insert(0) += 1;
                if let Some(&from) = producer.get(name) {
                    readers[from].push(node);
                }
            }
        }
        let outputs: BTreeSet<String> = prepared.outputs().into_iter().map(|info| info.name).collect();
        let epilogue_of = reads_of
            .iter()
            .map(|reads| {
                let &first = reads.iter().find(|name| producer.contains_key(*name))?;
                (readers_of_value[first] == 1 && !outputs.contains(first)).then(|| producer[first])
            })
            .collect();
        Self { by_name, epilogue_of, readers }
    }

    /// The node that a backend's kernel is named after.
    fn find(&self, kernel: &str) -> Option<usize> {
        let decorated = ["fused ", "InsertedPrecisionFreeCast_", "InsertedCast_"];
        let bare = decorated.iter().find_map(|prefix| kernel.strip_prefix(prefix)).unwrap_or(kernel).trim();
        if let Some(&node) = self.by_name.get(kernel).or_else(|| self.by_name.get(bare)) {
            return Some(node);
        }
        // The longest proper prefix that ends where the backend began to add its own.
        bare.char_indices()
            .rev()
            .filter(|&(position, letter)| position >= 3 && !letter.is_alphanumeric())
            .find_map(|(position, _)| self.by_name.get(&bare[..position]).copied())
    }

    /// For each node the kernel (index in `kernels`) that computes it.
    fn assign(&self, kernels: &[NodeTime]) -> Vec<Option<usize>> {
        let mut kernel_of = vec![None; self.readers.len()];
        for (index, kernel) in kernels.iter().enumerate() {
            if let Some(node) = self.find(&kernel.name) {
                kernel_of[node].get_or_insert(index);
            }
        }
        if kernel_of.iter().all(Option::is_none) {
            return kernel_of;
        }
        for node in 0..kernel_of.len() {
            if kernel_of[node].is_none() {
                kernel_of[node] = self.epilogue_of[node].and_then(|producer| kernel_of[producer]);
            }
        }
        for node in (0..kernel_of.len()).rev() {
            let mut theirs = self.readers[node].iter().map(|&reader| kernel_of[reader]);
            if kernel_of[node].is_none()
                && let Some(Some(first)) = theirs.next()
                && theirs.all(|kernel| kernel == Some(first))
            {
                kernel_of[node] = Some(first);
            }
        }
        kernel_of
    }
}

/// Fills in [`NodeTime::operators`]: the operators whose nodes a kernel computes.
pub(crate) fn match_operators(prepared: &Prepared, graph: &OperatorGraph, kernels: &mut [NodeTime]) {
    let names = NodeNames::new(prepared);
    let kernel_of = names.assign(kernels);
    let mut operator_of: HashMap<usize, OperatorId> = HashMap::new();
    for id in graph.ids() {
        operator_of.extend(graph.operator(id).nodes.iter().map(|&node| (node as usize, id)));
    }
    let mut sets: Vec<BTreeSet<OperatorId>> = vec![BTreeSet::new(); kernels.len()];
    for (node, kernel) in kernel_of.iter().enumerate() {
        if let (Some(kernel), Some(&operator)) = (kernel, operator_of.get(&node)) {
            sets[*kernel].insert(operator);
        }
    }
    for (index, kernel) in kernels.iter_mut().enumerate() {
        // A kernel that lost its node to an earlier one of the same name still belongs to that operator.
        if sets[index].is_empty()
            && let Some(operator) = names.find(&kernel.name).and_then(|node| operator_of.get(&node))
        {
            sets[index].insert(*operator);
        }
        kernel.operators = std::mem::take(&mut sets[index]).into_iter().collect();
    }
}

/// Kernel groups of the first unit whose backend reports node times.
pub(crate) fn kernel_groups(session: &mut Session<'_>, units: &[Unit]) -> Result<Vec<KernelGroup>, ProfileError> {
    for unit in units.iter().filter(|unit| !unit.simulated) {
        let kernels = raw_node_times(session, unit)?;
        let prepared = &session.model.prepared;
        let kernel_of = NodeNames::new(prepared).assign(&kernels);
        let mut groups = vec![KernelGroup::default(); kernels.len()];
        for (node, kernel) in kernel_of.iter().enumerate() {
            if let (Some(kernel), Some(name)) = (kernel, prepared.model().node_name(node)) {
                groups[*kernel].nodes.push(name.to_owned());
            }
        }
        groups.retain(|group| !group.nodes.is_empty());
        if !groups.is_empty() {
            session.note(format!(
                "granularity backend: {} kernels of {}, read from the names in its profiling",
                groups.len(),
                unit.address
            ));
            return Ok(groups);
        }
    }
    session.note("granularity backend: no unit reports its kernels, so every node is an operator".to_owned());
    Ok(Vec::new())
}
