//! Whether a graph is one.

use super::{OperatorGraph, OperatorId, TensorId};
use crate::CoreError;
use crate::quantity::MOST_BYTES;
use std::collections::HashSet;

impl OperatorGraph {
    /// Checks every invariant: indices in range, topological order, producers and consumers as operators tell them and the
    /// other way round, no duplicate tensor names, no more bytes than [`MOST_BYTES`].
    ///
    /// # Errors
    /// [`CoreError::Graph`] naming the first offender.
    pub fn validate(&self) -> Result<(), CoreError> {
        let fail = |reason: String| Err(CoreError::Graph { model: self.model.clone(), reason });
        let tensor_count = self.tensors.len() as u32;
        let operator_count = self.operators.len() as u32;
        let mut names = HashSet::with_capacity(self.tensors.len());
        for (index, tensor) in self.tensors.iter().enumerate() {
            if !names.insert(tensor.name.as_str()) {
                return fail(format!("tensor name `{}` stands twice", tensor.name));
            }
            if tensor.producer.is_some_and(|p| p.0 >= operator_count)
                || tensor.consumers.iter().any(|c| c.0 >= operator_count)
            {
                return fail(format!("tensor {index} `{}` names an operator that does not exist", tensor.name));
            }
        }
        for (index, operator) in self.operators.iter().enumerate() {
            let id = OperatorId(index as u32);
            for &tensor in operator.inputs.iter().chain(&operator.outputs) {
                if tensor.0 >= tensor_count {
                    return fail(format!(
                        "operator {index} `{}` names tensor {} of {tensor_count}",
                        operator.name, tensor.0
                    ));
                }
            }
            for &tensor in &operator.inputs {
                let edge = self.tensor(tensor);
                if edge.producer.is_some_and(|producer| producer >= id) {
                    return fail(format!(
                        "operator {index} `{}` reads `{}` before it is written",
                        operator.name, edge.name
                    ));
                }
                if !edge.consumers.contains(&id) {
                    return fail(format!(
                        "tensor `{}` does not list its reader {index} `{}`",
                        edge.name, operator.name
                    ));
                }
            }
            for &tensor in &operator.outputs {
                if self.tensor(tensor).producer != Some(id) {
                    return fail(format!(
                        "tensor `{}` has another producer than {index} `{}`",
                        self.tensor(tensor).name,
                        operator.name
                    ));
                }
            }
        }
        for &tensor in self.inputs.iter().chain(&self.outputs) {
            if tensor.0 >= tensor_count {
                return fail(format!("model port names tensor {} of {tensor_count}", tensor.0));
            }
        }
        if let Some(&input) = self.inputs.iter().find(|&&t| self.tensor(t).producer.is_some()) {
            return fail(format!("model input `{}` is written by an operator", self.tensor(input).name));
        }
        self.validate_edges()?;
        self.validate_bytes()
    }

    /// Whoever a tensor names as its producer writes it, and its consumers read it: planners follow either direction.
    fn validate_edges(&self) -> Result<(), CoreError> {
        let fail = |reason: String| Err(CoreError::Graph { model: self.model.clone(), reason });
        for (index, tensor) in self.tensors.iter().enumerate() {
            let id = TensorId(index as u32);
            if let Some(producer) = tensor.producer.filter(|&producer| !self.operator(producer).outputs.contains(&id)) {
                let name = &self.operator(producer).name;
                return fail(format!(
                    "tensor `{}` is said to be written by operator {producer} `{name}`, which does not write it",
                    tensor.name
                ));
            }
            if let Some(&reader) = tensor.consumers.iter().find(|&&reader| !self.operator(reader).inputs.contains(&id))
            {
                let name = &self.operator(reader).name;
                return fail(format!(
                    "tensor `{}` is said to be read by operator {reader} `{name}`, which does not read it",
                    tensor.name
                ));
            }
            if let Some(pair) = tensor.consumers.windows(2).find(|pair| pair[0] >= pair[1]) {
                let name = &self.operator(pair[1]).name;
                return fail(format!(
                    "tensor `{}` lists its reader {} `{name}` twice or out of order",
                    tensor.name, pair[1]
                ));
            }
        }
        Ok(())
    }

    /// Sums of bytes must neither wrap around nor be rounded, or memory limits mean nothing.
    fn validate_bytes(&self) -> Result<(), CoreError> {
        let fail = |reason: String| {
            let reason = format!("{reason}, more than the {MOST_BYTES} that can be added up; profile the model again");
            Err(CoreError::Graph { model: self.model.clone(), reason })
        };
        let mut total = 0u64;
        for (index, operator) in self.operators.iter().enumerate() {
            total = total.saturating_add(operator.weight_bytes);
            if total > MOST_BYTES {
                return fail(format!(
                    "operator {index} `{}` has {} bytes of weights, all up to it {total}",
                    operator.name, operator.weight_bytes
                ));
            }
        }
        total = 0;
        for tensor in &self.tensors {
            total = total.saturating_add(tensor.bytes);
            if total > MOST_BYTES {
                return fail(format!("tensor `{}` has {} bytes, all up to it {total}", tensor.name, tensor.bytes));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorEdge;
    use crate::graph::tests::from_edges;

    #[test]
    fn tensors_agree_with_operators_both_ways() {
        let chain = || from_edges(4, &[(0, 1), (1, 2), (2, 3)], 16);
        let told = |graph: &OperatorGraph| graph.validate().unwrap_err().to_string();
        let mut graph = chain();
        graph.tensors[1].consumers.push(OperatorId(3));
        assert!(told(&graph).contains("tensor `t0` is said to be read by operator 3 `op3`, which does not read it"));
        let mut graph = chain();
        graph.tensors[1].consumers.push(OperatorId(1));
        assert!(told(&graph).contains("tensor `t0` lists its reader 1 `op1` twice or out of order"));
        let mut graph = chain();
        graph.tensors.push(TensorEdge { name: "y".into(), producer: Some(OperatorId(2)), ..graph.tensors[4].clone() });
        assert!(told(&graph).contains("tensor `y` is said to be written by operator 2 `op2`, which does not write it"));
    }

    #[test]
    fn bytes_that_cannot_be_added_up_are_refused() {
        let mut graph = from_edges(4, &[(0, 1), (1, 2), (2, 3)], 16);
        graph.operators.iter_mut().take(2).for_each(|operator| operator.weight_bytes = MOST_BYTES / 2);
        graph.validate().unwrap();
        for bytes in [1, 1 << 63, u64::MAX] {
            graph.operators[2].weight_bytes = bytes;
            let message = graph.validate().unwrap_err().to_string();
            assert!(message.contains(&format!("operator 2 `op2` has {bytes} bytes of weights")), "{message}");
        }
        graph.operators[2].weight_bytes = 0;
        graph.tensors[3].bytes = MOST_BYTES;
        let message = graph.validate().unwrap_err().to_string();
        assert!(message.contains("tensor `t2` has 9007199254740992 bytes"), "{message}");
    }
}
