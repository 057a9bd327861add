//! The OpenCL engine: the `w8a8` blocks on a GPU, or on this processor through a CPU driver such as PoCL.
//!
//! Weights are used where the artefact lies in memory ([`WeightBuffers`]); state and scratch are host memory that the device uses too. A
//! call copies the hidden state in, enqueues all its blocks on one in-order queue, and waits once.

mod conditions;
mod device;
mod hetero;
mod weights;

pub use device::choose_device;
pub use hetero::HeteroTensorEngine;
pub use weights::WeightBuffers;

use super::{Engine, EngineSpec};
use crate::calibrate::Calibration;
use crate::denoise::Clip;
use crate::dit::OpenClBlocks;
use crate::model::Model;
use crate::schedule::Piece;
use crate::{NumericPath, VideoError};
use conditions::HeldConditions;
pub(super) use device::HostThread;
use device::open_kernels;
use std::sync::Arc;
use trefoil_kernels::opencl::{Device, DeviceKind, Kernels, OpenClError, Variant};

/// See the module.
#[derive(Debug)]
pub struct OpenClEngine {
    name: String,
    model: Arc<Model>,
    calibration: Arc<Calibration>,
    cores: Vec<usize>,
    conditions: HeldConditions,
    blocks: OpenClBlocks,
    weights: WeightBuffers,
    kernels: Arc<Kernels>,
    notes: Vec<String>,
}

impl OpenClEngine {
    /// An engine as the command line names it. A CPU device computes in as many threads as `spec` has cores, bound to these; beside any
    /// other device they are where the host's part of the work runs.
    ///
    /// # Errors
    /// Paths other than `w8a8`; scales that are missing or another model's; no OpenCL library or no device that fits; cores that cannot
    /// be used.
    pub fn open(
        spec: &EngineSpec,
        model: &Arc<Model>,
        path: NumericPath,
        calibration: Option<&Arc<Calibration>>,
    ) -> Result<OpenClEngine, VideoError> {
        let name = spec.to_string();
        if path != NumericPath::W8a8 {
            return Err(VideoError::Engine {
                engine: name,
                reason: format!("its kernels are those of w8a8, not of {path}; give it --path w8a8"),
            });
        }
        let (kernels, notes) = kernels_of(spec)?;
        let mut engine = OpenClEngine::on(kernels, name, model, calibration, spec.resolved_cores())?;
        engine.notes.extend(notes);
        Ok(engine)
    }

    /// An engine on kernels made by the caller, such as those of another variant; `cores` are where the host's part of the work runs.
    ///
    /// # Errors
    /// Weights that are not quantised; scales that are missing or another model's.
    pub fn on(
        kernels: Kernels,
        name: String,
        model: &Arc<Model>,
        calibration: Option<&Arc<Calibration>>,
        cores: Vec<usize>,
    ) -> Result<OpenClEngine, VideoError> {
        model.check_path(NumericPath::W8a8)?;
        let calibration = calibration.ok_or_else(|| Calibration::missing(model))?;
        calibration.check(model)?;
        let kernels = Arc::new(kernels);
        let notes = notes_of(&kernels, &name);
        Ok(OpenClEngine {
            name,
            model: Arc::clone(model),
            calibration: Arc::clone(calibration),
            cores,
            conditions: HeldConditions::default(),
            blocks: OpenClBlocks::default(),
            weights: WeightBuffers::new(&kernels, model)?,
            kernels,
            notes,
        })
    }

    /// Kernels that run.
    pub fn variant(&self) -> Variant {
        self.kernels.variant()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.kernels.device()
    }

    /// The weights as the device knows them.
    pub fn weights(&self) -> &WeightBuffers {
        &self.weights
    }
}

impl Engine for OpenClEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn path(&self) -> NumericPath {
        NumericPath::W8a8
    }

    fn cores(&self) -> &[usize] {
        &self.cores
    }

    fn run_blocks(&mut self, clip: &Clip, piece: &Piece, hidden: &mut [f32]) -> Result<(), VideoError> {
        let _on_cores = HostThread::on(&self.cores);
        let conditions = self.conditions.hold(&self.kernels, clip, piece)?;
        let (model, expert) = (&self.model, clip.expert(piece.step));
        let config = model.config();
        self.blocks.load(&self.kernels, hidden)?;
        for number in piece.blocks.clone() {
            self.blocks.run(
                (&self.kernels, &self.weights),
                &model.block(expert, number)?,
                self.calibration.block(expert, number),
                (config.heads, config.eps),
                &conditions,
                clip.tokens(),
            )?;
        }
        self.blocks.store(&self.kernels, hidden)
    }

    fn scratch_bytes(&self) -> usize {
        self.blocks.bytes() + self.kernels.scratch_bytes() + self.conditions.bytes()
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

/// Whether the engine of `spec` computes on the cores it names, so that it could take more of them.
///
/// # Errors
/// As for [`choose_device`].
pub fn is_on_cores(spec: &EngineSpec) -> Result<bool, VideoError> {
    Ok(match spec.kind {
        super::EngineKind::Cpu => true,
        super::EngineKind::OpenCl => choose_device(spec)?.kind == DeviceKind::Cpu,
    })
}

/// Kernels on the device of `spec`, bound to its cores, and what was odd about them.
pub(super) fn kernels_of(spec: &EngineSpec) -> Result<(Kernels, Vec<String>), VideoError> {
    let failed = |error: OpenClError| VideoError::Engine {
        engine: spec.to_string(),
        reason: format!("{error}; `trefoil probe` shows the devices of this machine"),
    };
    let info = choose_device(spec)?;
    let device = Device::open(info.index, Some(&spec.resolved_cores())).map_err(failed)?;
    open_kernels(&device).map_err(failed)
}

/// Which device and kernels an engine is, for whoever reads its results.
pub(super) fn notes_of(kernels: &Kernels, name: &str) -> Vec<String> {
    let info = kernels.device().info();
    let mut notes =
        vec![format!("{name} is {} ({} {}), kernels {}", info.name, info.platform, info.driver, kernels.variant())];
    if !info.unified_memory {
        notes.push(format!("{name} has memory of its own, so its driver keeps a copy of the weights there"));
    }
    notes.extend(kernels.note().map(str::to_string));
    notes
}
