//! What an artefact records about its model besides weights: configuration, experts, sampler.

use crate::VideoError;
use crate::checkpoint::{AdapterScaling, Layout, WanCheckpoint};
use crate::config::DitConfig;
use crate::sampler::Sampler;
use serde::{Deserialize, Serialize};
use trefoil_weights::Artefact;

/// Key of the record in the artefact's metadata.
pub const RECORD_KEY: &str = "video";
/// Version of the record; a change of meaning is a new one.
pub const RECORD_VERSION: u32 = 1;

/// One expert: the shared base with or without the adapter, and whose embedder and head.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertRecord {
    /// `base`, `semantic`, `detail`, `adapter`.
    pub name: String,
    /// Whether the low-rank factors act.
    pub adapter: bool,
    /// Whether it has a condition embedder and an output projection of its own.
    pub own_embedder: bool,
    /// Which stored base it runs on; 0 in every artefact, more where models are joined.
    #[serde(default, skip_serializing_if = "is_first")]
    pub base: usize,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_first(base: &usize) -> bool {
    *base == 0
}

/// Everything that denoising needs to know besides weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VideoRecord {
    /// [`RECORD_VERSION`].
    pub version: u32,
    /// Sizes.
    pub config: DitConfig,
    /// Layout of the checkpoint that was packed.
    pub layout: Layout,
    /// Experts; the sampler's indices refer to them.
    pub experts: Vec<ExpertRecord>,
    /// Factors of the adapter deltas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<AdapterScaling>,
    /// Steps, solver, guidance, expert of each step.
    pub sampler: Sampler,
}

impl VideoRecord {
    /// The record of a checkpoint. Without a `sampler`: DCM's six steps where there is a detail expert, else the stock schedule
    /// (UniPC, 50 steps, shift 3, guidance 5); a plain adapter acts in every step.
    ///
    /// # Errors
    /// A sampler that asks for experts that the checkpoint lacks.
    pub fn for_checkpoint(checkpoint: &WanCheckpoint, sampler: Option<Sampler>) -> Result<VideoRecord, VideoError> {
        let expert = |name: &str, adapter: bool, own_embedder: bool| ExpertRecord {
            name: name.to_string(),
            adapter,
            own_embedder,
            base: 0,
        };
        let has_adapter = checkpoint.adapter.is_some();
        let is_dual = checkpoint.has_detail_embedder;
        let experts = match (is_dual, has_adapter) {
            (true, adapter) => vec![expert("semantic", false, false), expert("detail", adapter, true)],
            (false, true) => vec![expert("base", false, false), expert("adapter", true, false)],
            (false, false) => vec![expert("base", false, false)],
        };
        let sampler = match sampler {
            Some(sampler) => sampler,
            None if is_dual => Sampler::dcm(),
            None => {
                let mut stock = Sampler::shifted(crate::sampler::Solver::UniPc, 50, 3.0, 5.0)?;
                if has_adapter {
                    stock.experts.fill(1);
                }
                stock
            }
        };
        let record = VideoRecord {
            version: RECORD_VERSION,
            config: checkpoint.config.clone(),
            layout: checkpoint.layout,
            experts,
            adapter: checkpoint.adapter.clone(),
            sampler,
        };
        record.check()?;
        Ok(record)
    }

    /// Reads the record of an artefact.
    ///
    /// # Errors
    /// No record, one of another version, or one that contradicts itself.
    pub fn of(artefact: &Artefact) -> Result<VideoRecord, VideoError> {
        let problem = |reason: String| VideoError::Artefact { path: artefact.path().to_path_buf(), reason };
        let Some(json) = artefact.metadata().get(RECORD_KEY) else {
            return Err(problem(
                "it has no video model in it; pack the model with `trefoil video pack` instead of `trefoil weights pack`"
                    .to_string(),
            ));
        };
        if json.get("version").and_then(serde_json::Value::as_u64) != Some(u64::from(RECORD_VERSION)) {
            return Err(problem(format!(
                "its video record has version {}, this trefoil reads {RECORD_VERSION}; pack the model again",
                json.get("version").unwrap_or(&serde_json::Value::Null)
            )));
        }
        let record: VideoRecord = serde_json::from_value(json.clone())
            .map_err(|error| problem(format!("its video record cannot be read ({error}); pack the model again")))?;
        record.check().map_err(|error| error.in_file(artefact.path()))?;
        if record.experts.is_empty() || record.experts.iter().any(|expert| expert.base != 0) {
            return Err(problem("its experts do not lie in it; pack the model again".to_string()));
        }
        Ok(record)
    }

    /// Checks that the parts fit each other.
    ///
    /// # Errors
    /// An impossible configuration or sampler, or steps whose expert does not exist.
    pub fn check(&self) -> Result<(), VideoError> {
        self.config.check()?;
        self.sampler.check()?;
        if self.sampler.expert_count() > self.experts.len() {
            let names: Vec<&str> = self.experts.iter().map(|expert| expert.name.as_str()).collect();
            return Err(VideoError::sampler(format!(
                "it asks for expert {} but the model has {} ({}); pack the checkpoint of the other expert too, or change the sampler",
                self.sampler.expert_count() - 1,
                self.experts.len(),
                names.join(", ")
            )));
        }
        Ok(())
    }
}
