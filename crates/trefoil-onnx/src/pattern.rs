//! The little language of tree patterns in [`crate::rules`], and its matcher.
//!
//! A pattern describes a tree of nodes from its last node backwards:
//!
//! ```text
//! Mul(x, Sigmoid(x))                          x: any value, the same wherever the name stands
//! Div(d:Sub(x, ReduceMean(x)), Sqrt(_))       d: the value this node writes; `_`: any value
//! Mul(Erf(Div|Mul(x, #)), #)                  `#`: any constant; `|`: one of these operators
//! ```
//!
//! The arguments of `Add` and `Mul` match in either order. Inputs beyond the listed ones must be constants (the axes of a
//! reduction). Operators are those of the standard domain.

use crate::index::{GraphIndex, NodeId, ValueId};
use crate::model::is_default_domain;
use crate::proto::GraphProto;
use std::collections::BTreeSet;

/// A parsed pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Any value.
    Any,
    /// Any constant.
    Constant,
    /// The same value wherever the name stands.
    Variable(&'static str),
    /// A node.
    Node {
        /// Name of the value it writes.
        label: Option<&'static str>,
        /// Operator types.
        operators: Vec<&'static str>,
        /// Inputs.
        arguments: Vec<Pattern>,
    },
}

impl Pattern {
    /// Parses a pattern.
    ///
    /// # Errors
    /// What is wrong and where; a test parses every rule of the table.
    pub(crate) fn parse(text: &'static str) -> Result<Self, String> {
        let mut rest = text;
        let pattern = Self::parse_one(&mut rest)?;
        if rest.trim().is_empty() { Ok(pattern) } else { Err(format!("`{rest}` is left over in `{text}`")) }
    }

    fn parse_one(rest: &mut &'static str) -> Result<Self, String> {
        let trimmed = rest.trim_start();
        let end = trimmed.find(['(', ')', ',']).unwrap_or(trimmed.len());
        let (head, tail) = trimmed.split_at(end);
        let head = head.trim();
        let Some(mut inside) = tail.strip_prefix('(') else {
            *rest = tail;
            return match head {
                "" => Err(format!("a pattern is missing before `{tail}`")),
                "_" => Ok(Self::Any),
                "#" => Ok(Self::Constant),
                name => Ok(Self::Variable(name)),
            };
        };
        let (label, operators) = match head.split_once(':') {
            Some((label, operators)) => (Some(label.trim()), operators),
            None => (None, head),
        };
        let mut arguments = Vec::new();
        loop {
            arguments.push(Self::parse_one(&mut inside)?);
            let next = inside.trim_start();
            if let Some(after) = next.strip_prefix(',') {
                inside = after;
            } else if let Some(after) = next.strip_prefix(')') {
                *rest = after;
                let operators = operators.split('|').map(str::trim).collect();
                return Ok(Self::Node { label, operators, arguments });
            } else {
                return Err(format!("`)` is missing before `{next}`"));
            }
        }
    }

    /// Operator types that the last node may have.
    pub(crate) fn roots(&self) -> &[&'static str] {
        match self {
            Self::Node { operators, .. } => operators,
            _ => &[],
        }
    }
}

/// What a matcher looks at.
#[derive(Clone, Copy)]
pub(crate) struct Matcher<'a> {
    pub(crate) graph: &'a GraphProto,
    pub(crate) index: &'a GraphIndex,
    /// By value: constant.
    pub(crate) constant: &'a [bool],
}

#[derive(Clone, Default)]
struct Bindings {
    names: Vec<(&'static str, ValueId)>,
    nodes: BTreeSet<NodeId>,
}

impl Bindings {
    fn bind(&mut self, name: &'static str, value: ValueId) -> bool {
        if let Some(&(_, bound)) = self.names.iter().find(|(bound, _)| *bound == name) {
            bound == value
        } else {
            self.names.push((name, value));
            true
        }
    }
}

impl Matcher<'_> {
    /// The nodes of a match whose last node is `root`, ascending; `None` if there is no match, or if a value inside is read or
    /// output outside (then the nodes cannot be one kernel).
    pub(crate) fn find(&self, pattern: &Pattern, root: NodeId) -> Option<Vec<NodeId>> {
        let mut bindings = Bindings::default();
        if !self.match_node(pattern, root, &mut bindings) {
            return None;
        }
        let inside = |value: &ValueId| {
            !self.index.is_output[*value as usize]
                && self.index.readers[*value as usize].iter().all(|reader| bindings.nodes.contains(reader))
        };
        let closed = bindings
            .nodes
            .iter()
            .filter(|&&node| node != root)
            .all(|&node| self.index.writes[node as usize].iter().all(inside));
        closed.then(|| bindings.nodes.into_iter().collect())
    }

    fn match_value(&self, pattern: &Pattern, value: ValueId, bindings: &mut Bindings) -> bool {
        match pattern {
            Pattern::Any => true,
            Pattern::Constant => self.constant[value as usize],
            Pattern::Variable(name) => bindings.bind(name, value),
            Pattern::Node { .. } => self
                .index
                .producer(value)
                .filter(|&node| {
                    !self.constant[value as usize] && self.index.writes[node as usize].first() == Some(&value)
                })
                .is_some_and(|node| self.match_node(pattern, node, bindings)),
        }
    }

    fn match_node(&self, pattern: &Pattern, node: NodeId, bindings: &mut Bindings) -> bool {
        let Pattern::Node { label, operators, arguments } = pattern else { return false };
        let proto = &self.graph.node[node as usize];
        if !is_default_domain(proto) || !operators.contains(&proto.op_type()) {
            return false;
        }
        // Optional inputs left out are no values; a pattern never needs one before a listed input.
        let inputs: Option<Vec<ValueId>> =
            proto.input.iter().filter(|name| !name.is_empty()).map(|name| self.index.value(name)).collect();
        let Some(inputs) = inputs else { return false };
        if inputs.len() < arguments.len()
            || inputs[arguments.len()..].iter().any(|&extra| !self.constant[extra as usize])
        {
            return false;
        }
        let Some(&written) = self.index.writes[node as usize].first() else { return false };
        let mut orders = vec![[0, 1]];
        if arguments.len() == 2 && matches!(proto.op_type(), "Add" | "Mul") {
            orders.push([1, 0]);
        }
        for order in orders {
            let mut attempt = bindings.clone();
            attempt.nodes.insert(node);
            let bound = label.is_none_or(|label| attempt.bind(label, written));
            let matched = bound
                && arguments.iter().enumerate().all(|(position, argument)| {
                    let input = if arguments.len() == 2 { inputs[order[position]] } else { inputs[position] };
                    self.match_value(argument, input, &mut attempt)
                });
            if matched {
                *bindings = attempt;
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_parse() {
        let pattern = Pattern::parse("Div(d:Sub(x, _), Erf|Tanh(#))").unwrap();
        assert_eq!(pattern.roots(), ["Div"]);
        let Pattern::Node { arguments, .. } = &pattern else { panic!() };
        assert_eq!(
            arguments[0],
            Pattern::Node {
                label: Some("d"),
                operators: vec!["Sub"],
                arguments: vec![Pattern::Variable("x"), Pattern::Any]
            }
        );
        assert!(Pattern::parse("Add(x").is_err());
        assert!(Pattern::parse("Add(x))").is_err());
        assert!(Pattern::parse("Add(,x)").is_err());
    }
}
