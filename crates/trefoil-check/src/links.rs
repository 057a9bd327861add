//! What stages of an application hand on, and what repetitions of an item share.
//!
//! A link replaces a model input. What another stage made is that of its last repetition; a stage's own is that of its previous
//! repetition, while the first reads the model input or what another link hands it. Model inputs are brought once for all
//! repetitions of an item, and outputs are handed over after the last, unless another stage reads them.

use crate::CheckError;
use crate::costs::Model;
use crate::json::Reader;
use crate::schedule::Execution;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const CERTIFICATE: Reader = Reader("certificate");

/// Model, item and tensor.
type End = (usize, u64, usize);

/// Where a model input of an execution comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The host, which brings it for this execution and all later repetitions of the item.
    Host(Execution),
    /// A tensor that an execution makes.
    Made(Execution, usize),
}

#[derive(Debug, Default)]
pub struct Links {
    /// By what reads it: a tensor of its own previous repetition, and one of another stage.
    own: BTreeMap<End, usize>,
    other: BTreeMap<End, End>,
    /// What other stages read.
    handed_on: BTreeSet<End>,
    /// Executions of each model and item.
    repetitions: BTreeMap<(usize, u64), u64>,
}

impl Links {
    /// The links of a certificate whose schedule has these executions.
    pub fn read<'e>(
        certificate: &Value,
        models: &[Model],
        executions: impl Iterator<Item = &'e Execution>,
    ) -> Result<Self, CheckError> {
        let mut links = Self::default();
        for &(model, item, iteration) in executions {
            let count = links.repetitions.entry((model, item)).or_insert(0);
            // Executions come in order.
            if iteration != *count {
                let name = &models[model].name;
                return Err(CheckError::Schedule(format!("repetition {count} of item {item} of `{name}` is missing")));
            }
            *count += 1;
        }
        let listed = certificate.get("links").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for link in listed {
            let (from, to) = (links.end(&link["from"], models)?, links.end(&link["to"], models)?);
            let (made, read) = (&models[from.0].tensors[from.2], &models[to.0].tensors[to.2]);
            if made.producer.is_none() || read.producer.is_some() || made.bytes.total_cmp(&read.bytes).is_ne() {
                return Err(
                    CERTIFICATE.fail(format!("link {link} hands on what is not made, not read or of another size"))
                );
            }
            let again = if (from.0, from.1) == (to.0, to.1) {
                links.own.insert(to, from.2).is_some()
            } else {
                links.handed_on.insert(from);
                links.other.insert(to, from).is_some()
            };
            if again {
                return Err(CERTIFICATE.fail(format!("two links feed {}", link["to"])));
            }
        }
        Ok(links)
    }

    fn end(&self, value: &Value, models: &[Model]) -> Result<End, CheckError> {
        let model = CERTIFICATE.index(value, "model", models.len())?;
        let item = CERTIFICATE.count(value, "item")?;
        if !self.repetitions.contains_key(&(model, item)) {
            return Err(CERTIFICATE.fail(format!("a link names item {item} of model {model}, which is not executed")));
        }
        Ok((model, item, CERTIFICATE.index(value, "tensor", models[model].tensors.len())?))
    }

    pub fn is_empty(&self) -> bool {
        self.own.is_empty() && self.other.is_empty()
    }

    /// Whether a link joins items of different groups.
    pub fn joins_others(&self, group: impl Fn((usize, u64)) -> Option<u64>) -> bool {
        self.other.iter().any(|(to, from)| group((to.0, to.1)) != group((from.0, from.1)))
    }

    /// Where a model input comes from.
    pub fn source(&self, of: Execution, tensor: usize) -> Source {
        let (model, item, iteration) = of;
        let own = iteration.checked_sub(1).and_then(|before| Some((before, self.own.get(&(model, item, tensor))?)));
        if let Some((before, &made)) = own {
            return Source::Made((model, item, before), made);
        }
        match self.other.get(&(model, item, tensor)) {
            Some(&(model, item, made)) => Source::Made((model, item, self.repetitions[&(model, item)] - 1), made),
            None => Source::Host((model, item, 0)),
        }
    }

    /// Whether an execution hands a model output over to the host.
    pub fn hands_over(&self, of: Execution, tensor: usize) -> bool {
        let (model, item, iteration) = of;
        iteration + 1 == self.repetitions[&(model, item)] && !self.handed_on.contains(&(model, item, tensor))
    }
}
