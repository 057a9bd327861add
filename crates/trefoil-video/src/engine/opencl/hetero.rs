//! The baseline Hetero-Tensor: a CPU and an OpenCL engine that compute every block together.

use super::conditions::HeldConditions;
use super::device::HostThread;
use super::{WeightBuffers, kernels_of, notes_of};
use crate::calibrate::Calibration;
use crate::denoise::Clip;
use crate::dit::{EXCHANGES_PER_BLOCK, SplitBlocks, SplitConditions, SplitEngines};
use crate::engine::{Engine, EngineKind, EngineSpec};
use crate::model::Model;
use crate::schedule::Piece;
use crate::{NumericPath, VideoError};
use std::sync::Arc;
use trefoil_kernels::{Kernels, opencl};

/// Two engines as one: see [`SplitBlocks`].
#[derive(Debug)]
pub struct HeteroTensorEngine {
    name: String,
    model: Arc<Model>,
    calibration: Arc<Calibration>,
    cores: Vec<usize>,
    cpu: Arc<Kernels>,
    cpu_share: f64,
    conditions: HeldConditions,
    blocks: SplitBlocks,
    weights: WeightBuffers,
    device: Arc<opencl::Kernels>,
    notes: Vec<String>,
}

impl HeteroTensorEngine {
    /// Exchanges of a block.
    pub const EXCHANGES_PER_BLOCK: usize = EXCHANGES_PER_BLOCK;

    /// The engine of two specifications, one of each kind in any order. `cpu_share` (0 to 1) of the columns are the CPU's; what balances
    /// the two is `T_opencl / (T_cpu + T_opencl)`, from the times of a block.
    ///
    /// # Errors
    /// Other kinds of engine or shaped ones; scales that are missing or another model's; what either engine refuses.
    pub fn open(
        specs: &[EngineSpec; 2],
        cpu_share: f64,
        model: &Arc<Model>,
        calibration: Option<&Arc<Calibration>>,
    ) -> Result<HeteroTensorEngine, VideoError> {
        let name = format!("{}+{}", specs[0], specs[1]);
        let of_kind = |kind: EngineKind| specs.iter().find(|spec| spec.kind == kind && spec.shape.is_none());
        let (Some(cpu), Some(opencl)) = (of_kind(EngineKind::Cpu), of_kind(EngineKind::OpenCl)) else {
            let reason = "columns are divided between a cpu and an opencl engine that are not shaped".to_string();
            return Err(VideoError::Engine { engine: name, reason });
        };
        let (device, mut notes) = kernels_of(opencl)?;
        notes.extend(notes_of(&device, &opencl.to_string()));
        let cpu_cores = cpu.resolved_cores();
        let mut cores = [cpu_cores.clone(), opencl.resolved_cores()].concat();
        cores.sort_unstable();
        let kernels = Arc::new(Kernels::best(&cpu_cores)?);
        let mut engine = HeteroTensorEngine::on(kernels, device, name, cpu_share, model, calibration)?;
        engine.cores = cores;
        engine.notes = notes;
        Ok(engine)
    }

    /// The engine on kernels made by the caller.
    ///
    /// # Errors
    /// Weights that are not quantised; scales that are missing or another model's.
    pub fn on(
        cpu: Arc<Kernels>,
        device: opencl::Kernels,
        name: String,
        cpu_share: f64,
        model: &Arc<Model>,
        calibration: Option<&Arc<Calibration>>,
    ) -> Result<HeteroTensorEngine, VideoError> {
        model.check_path(NumericPath::W8a8)?;
        let calibration = calibration.ok_or_else(|| Calibration::missing(model))?;
        calibration.check(model)?;
        let device = Arc::new(device);
        Ok(HeteroTensorEngine {
            name,
            model: Arc::clone(model),
            calibration: Arc::clone(calibration),
            cores: cpu.pool().cores().to_vec(),
            cpu,
            cpu_share: cpu_share.clamp(0.0, 1.0),
            conditions: HeldConditions::default(),
            blocks: SplitBlocks::default(),
            weights: WeightBuffers::new(&device, model)?,
            device,
            notes: Vec::new(),
        })
    }

    /// Exchanges so far, and the bytes that crossed, both ways together.
    pub fn exchanges(&self) -> (usize, usize) {
        self.blocks.exchanges()
    }
}

impl Engine for HeteroTensorEngine {
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
        let conditions = SplitConditions {
            device: self.conditions.hold(&self.device, clip, piece)?,
            cpu: clip.conditions(piece.step, piece.branch)?,
        };
        let engines =
            SplitEngines { cpu: &self.cpu, device: &self.device, weights: &self.weights, cpu_share: self.cpu_share };
        let (config, expert) = (self.model.config(), clip.expert(piece.step));
        self.blocks.load(&engines, hidden)?;
        for number in piece.blocks.clone() {
            let (block, scales) = (self.model.block(expert, number)?, self.calibration.block(expert, number));
            let sizes = (config.heads, config.eps);
            self.blocks.run(&engines, &block, scales, sizes, &conditions, clip.tokens())?;
        }
        self.blocks.store(hidden);
        Ok(())
    }

    fn scratch_bytes(&self) -> usize {
        self.blocks.bytes() + self.device.scratch_bytes() + self.conditions.bytes()
    }

    fn exchanges(&self) -> (usize, usize) {
        HeteroTensorEngine::exchanges(self)
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}
