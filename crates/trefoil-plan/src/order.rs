//! Topological orders of an operator graph, chosen so that segments can be intervals of one.

use std::collections::BTreeSet;
use trefoil_core::{OperatorGraph, OperatorId};

/// Successors and in-degrees, without duplicates. Built once: the graph's own accessors allocate.
#[derive(Debug, Clone)]
pub(crate) struct Dag {
    pub successors: Vec<Vec<u32>>,
    pub indegree: Vec<u32>,
}

impl Dag {
    pub fn new(graph: &OperatorGraph) -> Self {
        let mut successors = vec![Vec::new(); graph.len()];
        let mut indegree = vec![0; graph.len()];
        for id in graph.ids() {
            let next: Vec<u32> = graph.successors(id).into_iter().map(|next| next.0).collect();
            for &at in &next {
                indegree[at as usize] += 1;
            }
            successors[id.index()] = next;
        }
        Self { successors, indegree }
    }

    /// Whether the graph has one topological order only: each operator feeds the next.
    pub fn is_chain(&self) -> bool {
        self.successors
            .iter()
            .zip(1u32..)
            .all(|(next, following)| next.contains(&following) || following as usize == self.successors.len())
    }

    /// Depth first: the newest ready operator goes next, so that tensors die soon.
    pub fn depth_first(&self) -> Vec<OperatorId> {
        let mut waiting = self.indegree.clone();
        let mut stack: Vec<u32> = (0..waiting.len() as u32).rev().filter(|&at| waiting[at as usize] == 0).collect();
        let mut order = Vec::with_capacity(waiting.len());
        while let Some(at) = stack.pop() {
            order.push(OperatorId(at));
            for &next in self.successors[at as usize].iter().rev() {
                waiting[next as usize] -= 1;
                if waiting[next as usize] == 0 {
                    stack.push(next);
                }
            }
        }
        order
    }

    /// Stays on a unit as long as an operator assigned to it is ready (lowest id first), then moves to the unit of the
    /// lowest ready operator. Runs of equal units are then as long as this greedy rule can make them, and being
    /// intervals of a topological order they are convex and never wait for each other in a circle. `start` is the unit
    /// to begin with.
    pub fn grouped(&self, unit_of: &[usize], units: usize, start: Option<usize>) -> Vec<OperatorId> {
        let mut waiting = self.indegree.clone();
        let mut ready: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); units];
        for (at, &count) in waiting.iter().enumerate() {
            if count == 0 {
                ready[unit_of[at]].insert(at as u32);
            }
        }
        let lowest = |ready: &[BTreeSet<u32>]| {
            (0..units).filter_map(|unit| Some((*ready[unit].first()?, unit))).min().map(|(_, unit)| unit)
        };
        let mut order = Vec::with_capacity(waiting.len());
        let mut current = start.unwrap_or(usize::MAX);
        loop {
            let next = ready.get(current).and_then(|ready| ready.first().copied());
            let Some(at) = next else {
                match lowest(&ready) {
                    Some(unit) => current = unit,
                    None => break,
                }
                continue;
            };
            ready[current].remove(&at);
            order.push(OperatorId(at));
            for &successor in &self.successors[at as usize] {
                waiting[successor as usize] -= 1;
                if waiting[successor as usize] == 0 {
                    ready[unit_of[successor as usize]].insert(successor);
                }
            }
        }
        order
    }
}
