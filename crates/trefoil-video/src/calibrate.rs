//! Activation scales of the `w8a8` path (HeteroVDiff 4.4): found by running the real schedule, stored in the artefact.
//!
//! Clips are denoised on `w8a16` from the artefact itself; the range of every operand of every block is its largest magnitude
//! over all steps and clips. One set per expert, because experts see other timesteps and, with factors or an embedder of their
//! own, other operands.

use crate::denoise::{Clip, Lane, denoise};
use crate::dit::{BlockScales, Host, SCALE_COUNT};
use crate::engine::CpuEngine;
use crate::model::Model;
use crate::tensors::Tensor;
use crate::{NumericPath, VideoError};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::{Arc, Mutex};
use trefoil_kernels::Kernels;
use trefoil_weights::artefact::StoredType;
use trefoil_weights::{Artefact, TensorClass, TensorSpec, WriteSummary};

/// Tensor of the scales in an artefact: `[experts, layers, 13]`, f32.
pub const SCALES_TENSOR: &str = "calibration.scales";
/// Key of the record in the artefact's metadata.
pub const CALIBRATION_KEY: &str = "calibration";

/// How scales were found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CalibrationRecord {
    /// Timesteps of the schedule.
    pub timesteps: Vec<f32>,
    /// Latent shape `[C, F, H, W]` of each clip.
    pub clips: Vec<[usize; 4]>,
    /// Numeric path of the runs.
    pub path: NumericPath,
}

/// Scales of every block and expert.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    experts: usize,
    layers: usize,
    scales: Vec<BlockScales>,
    record: CalibrationRecord,
}

/// [`Calibration`] with the bits of its scales.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct CalibrationBits {
    experts: usize,
    layers: usize,
    scales: Vec<[u32; SCALE_COUNT]>,
    record: CalibrationRecord,
}

/// A clip to calibrate on.
#[derive(Debug, Clone, Copy)]
pub struct CalibrationClip<'a> {
    /// Starting latent.
    pub noise: &'a Tensor,
    /// Prompt.
    pub text: &'a Tensor,
    /// The other branch's text, with guidance.
    pub negative: Option<&'a Tensor>,
}

impl Calibration {
    /// That there is none, which `w8a8` needs.
    pub(crate) fn missing(model: &Model) -> VideoError {
        VideoError::Calibration {
            path: model.path().to_path_buf(),
            reason: "w8a8 needs activation scales; run `trefoil video calibrate`".to_string(),
        }
    }

    fn empty(model: &Model) -> Calibration {
        let (experts, layers) = (model.record().experts.len(), model.config().layers);
        Calibration {
            experts,
            layers,
            scales: vec![BlockScales::default(); experts * layers],
            record: CalibrationRecord {
                timesteps: model.sampler().timesteps.clone(),
                clips: Vec::new(),
                path: NumericPath::W8a16,
            },
        }
    }

    /// Denoises `clips` and records every operand's range. `progress` is told (executions done, of how many).
    ///
    /// # Errors
    /// No clips, tensors that do not fit, and what denoising refuses.
    pub fn observe(
        model: &Arc<Model>,
        kernels: &Arc<Kernels>,
        clips: &[CalibrationClip<'_>],
        progress: &mut dyn FnMut(usize, usize) -> Result<(), VideoError>,
    ) -> Result<Calibration, VideoError> {
        if clips.is_empty() {
            return Err(VideoError::Calibration {
                path: model.path().to_path_buf(),
                reason: "there is no clip to calibrate on; give noise and text".to_string(),
            });
        }
        let mut calibration = Calibration::empty(model);
        let mut host = Host::new(Arc::clone(kernels));
        for (number, clip) in clips.iter().enumerate() {
            let conditions = Clip::new(&mut host, model, clip.noise, clip.text, clip.negative)?;
            let mut engine = CpuEngine::float(
                "calibration".to_string(),
                Arc::clone(model),
                NumericPath::W8a16,
                Arc::clone(kernels),
            )?;
            calibration.record.clips.push(conditions.shape());
            engine.record(calibration);
            let shared = Arc::new(Mutex::new(engine));
            let lane =
                Lane::new(Box::new(Shared(Arc::clone(&shared))), Host::new(Arc::clone(kernels)), Arc::clone(model));
            let mut state = conditions.start(clip.noise)?;
            let blocks = conditions.trajectory().blocks();
            let (before, all) = (number * blocks, clips.len() * blocks);
            denoise(&mut [lane], &conditions, &mut state, blocks, &mut |event| match event {
                crate::denoise::Event::Blocks { done, .. } => progress(before + done, all),
                crate::denoise::Event::Step { .. } => Ok(()),
            })?;
            calibration = shared
                .lock()
                .ok()
                .and_then(|mut engine| engine.recorded())
                .unwrap_or_else(|| Calibration::empty(model));
        }
        calibration.check(model)?;
        Ok(calibration)
    }

    /// The scales stored in the model's artefacts, if all have some. Whether they fit the schedule is [`Calibration::check`]'s.
    ///
    /// # Errors
    /// Scales of another model, artefacts that were calibrated apart.
    pub fn of(model: &Model) -> Result<Option<Calibration>, VideoError> {
        let mut all: Option<Calibration> = None;
        for artefact in model.artefacts() {
            let Some(part) = Calibration::of_artefact(artefact, model)? else { return Ok(None) };
            match &mut all {
                None => all = Some(part),
                Some(all) if all.record != part.record => {
                    return Err(VideoError::Calibration {
                        path: artefact.path().to_path_buf(),
                        reason: format!(
                            "it was not made together with {}'s; calibrate both at once",
                            model.path().display()
                        ),
                    });
                }
                Some(all) => {
                    all.experts += part.experts;
                    all.scales.extend(part.scales);
                }
            }
        }
        Ok(all)
    }

    fn of_artefact(artefact: &Artefact, model: &Model) -> Result<Option<Calibration>, VideoError> {
        let problem = |reason: String| VideoError::Calibration { path: artefact.path().to_path_buf(), reason };
        let Some(json) = artefact.metadata().get(CALIBRATION_KEY) else { return Ok(None) };
        let record: CalibrationRecord = serde_json::from_value(json.clone())
            .map_err(|error| problem(format!("its record cannot be read ({error}); calibrate again")))?;
        let stored = artefact.tensor(SCALES_TENSOR)?;
        let values = stored.f32_values()?;
        let (layers, shape) = (model.config().layers, stored.record.spec.shape.as_slice());
        let experts = match *shape {
            [experts, blocks, sites] if blocks == layers as u64 && sites == SCALE_COUNT as u64 => experts as usize,
            _ => {
                let reason =
                    format!("its scales are {shape:?} instead of [experts, {layers}, {SCALE_COUNT}]; calibrate again");
                return Err(problem(reason));
            }
        };
        let scales = values.as_chunks::<SCALE_COUNT>().0.iter().map(|&scales| BlockScales(scales)).collect();
        Ok(Some(Calibration { experts, layers, scales, record }))
    }

    /// The scales of the experts that run on base `base` of the model.
    #[must_use]
    pub fn of_base(&self, model: &Model, base: usize) -> Calibration {
        let experts = &model.record().experts;
        let scales: Vec<BlockScales> = (0..self.experts)
            .filter(|&expert| experts.get(expert).is_some_and(|expert| expert.base == base))
            .flat_map(|expert| self.scales[expert * self.layers..(expert + 1) * self.layers].iter().copied())
            .collect();
        Calibration { experts: scales.len() / self.layers, layers: self.layers, scales, record: self.record.clone() }
    }

    /// Writes a copy of an artefact with these scales in it, replacing older ones. `output` may be the artefact itself. Of a model
    /// that was joined, each artefact gets its own ([`Calibration::of_base`]).
    ///
    /// # Errors
    /// A model that is no artefact, a disk that is full.
    pub fn store(&self, artefact: &Artefact, output: &Path) -> Result<WriteSummary, VideoError> {
        let shape = [self.experts as u64, self.layers as u64, SCALE_COUNT as u64];
        let spec = TensorSpec::plain(SCALES_TENSOR, TensorClass::Step, StoredType::F32, &shape);
        let bytes = self.scales.iter().flat_map(|scales| scales.0).flat_map(f32::to_le_bytes).collect();
        let record = serde_json::to_value(&self.record).map_err(|error| VideoError::Calibration {
            path: output.to_path_buf(),
            reason: format!("its record is no JSON ({error})"),
        })?;
        let metadata = serde_json::Map::from_iter([(CALIBRATION_KEY.to_string(), record)]);
        let _packing = crate::pack::PackingFolder::join(trefoil_files::folder_of(output)).ok();
        Ok(artefact.extended(output, &[(spec, bytes)], metadata)?)
    }

    /// A form that passes through text unchanged.
    pub(crate) fn to_bits(&self) -> CalibrationBits {
        let scales = self.scales.iter().map(|scales| scales.0.map(f32::to_bits)).collect();
        CalibrationBits { experts: self.experts, layers: self.layers, scales, record: self.record.clone() }
    }

    /// The inverse of [`Calibration::to_bits`].
    pub(crate) fn from_bits(bits: &CalibrationBits) -> Calibration {
        let scales = bits.scales.iter().map(|scales| BlockScales(scales.map(f32::from_bits))).collect();
        Calibration { experts: bits.experts, layers: bits.layers, scales, record: bits.record.clone() }
    }

    /// How the scales were found.
    pub fn record(&self) -> &CalibrationRecord {
        &self.record
    }

    /// Scales of a block.
    pub fn block(&self, expert: usize, block: usize) -> &BlockScales {
        &self.scales[expert * self.layers + block]
    }

    pub(crate) fn block_mut(&mut self, expert: usize, block: usize) -> &mut BlockScales {
        &mut self.scales[expert * self.layers + block]
    }

    /// Checks that the scales fit a model and its schedule: every expert that acts has been observed, at these timesteps.
    ///
    /// # Errors
    /// [`VideoError::Calibration`] with what differs.
    pub fn check(&self, model: &Model) -> Result<(), VideoError> {
        let problem = |reason: String| {
            Err(VideoError::Calibration {
                path: model.path().to_path_buf(),
                reason: format!("{reason}; calibrate again"),
            })
        };
        let sampler = model.sampler();
        if (self.experts, self.layers) != (model.record().experts.len(), model.config().layers)
            || self.scales.len() != self.experts * self.layers
        {
            return problem(format!(
                "it has {} experts of {} blocks, the model {} of {}",
                self.experts,
                self.layers,
                model.record().experts.len(),
                model.config().layers
            ));
        }
        if self.record.timesteps != sampler.timesteps {
            return problem(format!(
                "it was made for timesteps {:?}, the sampler has {:?}",
                self.record.timesteps, sampler.timesteps
            ));
        }
        for (step, &expert) in sampler.experts.iter().enumerate() {
            if let Some(block) = (0..self.layers).find(|&block| !self.block(expert, block).is_complete()) {
                return problem(format!(
                    "expert {} (step {step}) has no usable scales for block {block}",
                    model.record().experts[expert].name
                ));
            }
        }
        Ok(())
    }
}

/// An engine whose recording can be taken out of a lane again.
struct Shared(Arc<Mutex<CpuEngine>>);

impl crate::engine::Engine for Shared {
    fn name(&self) -> &'static str {
        "calibration"
    }

    fn path(&self) -> NumericPath {
        NumericPath::W8a16
    }

    fn cores(&self) -> &[usize] {
        &[]
    }

    fn run_blocks(
        &mut self,
        clip: &Clip,
        piece: &crate::schedule::Piece,
        hidden: &mut [f32],
    ) -> Result<(), VideoError> {
        match self.0.lock() {
            Ok(mut engine) => engine.run_blocks(clip, piece, hidden),
            Err(_) => Err(VideoError::Engine { engine: self.name().to_string(), reason: "it panicked".to_string() }),
        }
    }

    fn scratch_bytes(&self) -> usize {
        0
    }
}
