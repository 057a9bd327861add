//! A prepared model on disk, so that a second start needs no traced run.

use crate::index::{GraphIndex, ValueId};
use crate::weights::WeightStore;
use crate::{Model, OnnxError, Prepared, external, files, model};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use trefoil_core::TensorInfo;

const MODEL_FILE: &str = "prepared.onnx";
const FACTS_FILE: &str = "prepared.json";
const VERSION: u32 = 1;

/// What the model file cannot say.
#[derive(Serialize, Deserialize)]
struct Facts {
    version: u32,
    name: String,
    fingerprint: String,
    /// Output names in model order; may repeat.
    outputs: Vec<String>,
    /// Types and shapes of all values that nodes write.
    values: Vec<TensorInfo>,
    /// Values that are no tensors.
    no_tensors: Vec<String>,
}

impl Prepared {
    /// Writes the prepared model into a folder: `prepared.onnx`, `prepared.json` and its weights, each atomically, the
    /// JSON last. Sub-models extracted into the same folder share the weights.
    ///
    /// # Errors
    /// [`OnnxError::Io`].
    pub fn save(&self, dir: &Path) -> Result<(), OnnxError> {
        self.model.save(&dir.join(MODEL_FILE))?;
        let written = |value: &ValueId| self.index.producer(*value).is_some();
        let values = 0..self.index.names.len() as ValueId;
        let facts = Facts {
            version: VERSION,
            name: self.model.name().to_owned(),
            fingerprint: self.fingerprint().to_owned(),
            outputs: self.outputs.clone(),
            values: values.clone().filter(written).filter_map(|value| self.infos[value as usize].clone()).collect(),
            no_tensors: values
                .filter(written)
                .filter(|&value| self.uncuttable[value as usize] && !self.analysis.data_shaped[value as usize])
                .map(|value| self.index.name(value).to_owned())
                .collect(),
        };
        let path = dir.join(FACTS_FILE);
        let json = serde_json::to_vec(&facts)
            .map_err(|error| OnnxError::Io { path: path.display().to_string(), reason: error.to_string() })?;
        files::write_bytes(&path, &json)
    }

    /// Reads a prepared model back.
    ///
    /// # Errors
    /// [`OnnxError::Cache`] when the folder holds none or one of another version.
    pub fn load(dir: &Path) -> Result<Self, OnnxError> {
        let cache = |reason: String| OnnxError::Cache { dir: dir.display().to_string(), reason };
        let json = std::fs::read(dir.join(FACTS_FILE)).map_err(|error| cache(format!("{FACTS_FILE}: {error}")))?;
        let facts: Facts = serde_json::from_slice(&json).map_err(|error| cache(format!("{FACTS_FILE}: {error}")))?;
        if facts.version != VERSION {
            return Err(cache(format!("format version {} where this Trefoil reads {VERSION}", facts.version)));
        }
        let path = dir.join(MODEL_FILE);
        let bytes = external::map(&path).map_err(|error| cache(format!("{MODEL_FILE}: {error}")))?;
        let (mut model, external) = Model::decode_parts(&bytes, &path).map_err(|error| cache(error.to_string()))?;
        let weights = WeightStore::existing(dir, &external, model::large_constants(model.graph()))?;
        model.weights = Arc::new(weights);
        model.set_identity(facts.name, facts.fingerprint);
        let index = GraphIndex::new(model.graph())?;
        let mut infos = crate::analysis::declared_infos(model.graph(), &index);
        let known: HashMap<&str, &TensorInfo> = facts.values.iter().map(|info| (info.name.as_str(), info)).collect();
        for (value, info) in infos.iter_mut().enumerate() {
            if let Some(&told) = known.get(index.name(value as ValueId)) {
                *info = Some(told.clone());
            }
        }
        Self::assemble(model, index, infos, &facts.no_tensors, facts.outputs)
    }
}
