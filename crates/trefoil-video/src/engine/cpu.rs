//! The CPU engine: the kernels on a set of cores, reading the artefact's pages as they lie.

use super::Engine;
use crate::calibrate::Calibration;
use crate::denoise::Clip;
use crate::dit::{FloatBlocks, Int8Blocks, TextKeyValue};
use crate::model::Model;
use crate::schedule::Piece;
use crate::{NumericPath, VideoError};
use std::collections::BTreeMap;
use std::sync::Arc;
use trefoil_kernels::{Kernels, Operands};

/// See the module.
#[derive(Debug)]
pub struct CpuEngine {
    name: String,
    model: Arc<Model>,
    kernels: Arc<Kernels>,
    path: Path,
    recording: Option<Calibration>,
}

#[derive(Debug)]
enum Path {
    Float(NumericPath, Box<FloatBlocks>),
    Int8(Arc<Calibration>, Box<Int8Blocks>, TextMemory),
}

/// Text keys and values of the blocks that ran for a clip.
#[derive(Debug, Default)]
struct TextMemory {
    clip: Option<u64>,
    /// Of expert, branch and block.
    of_blocks: BTreeMap<(usize, usize, usize), TextKeyValue>,
}

impl TextMemory {
    /// Those of a block, of this clip or empty.
    fn of(&mut self, clip: &Clip, block: (usize, usize, usize)) -> &mut TextKeyValue {
        if self.clip != Some(clip.serial()) {
            self.clip = Some(clip.serial());
            self.of_blocks.values_mut().for_each(TextKeyValue::forget);
        }
        self.of_blocks.entry(block).or_default()
    }

    fn bytes(&self) -> usize {
        self.of_blocks.values().map(TextKeyValue::bytes).sum()
    }
}

impl CpuEngine {
    /// An engine on a float path.
    ///
    /// # Errors
    /// Weights in another form than the path needs; `w8a8`, which needs [`CpuEngine::int8`].
    pub fn float(
        name: String,
        model: Arc<Model>,
        path: NumericPath,
        kernels: Arc<Kernels>,
    ) -> Result<CpuEngine, VideoError> {
        if path == NumericPath::W8a8 {
            return Err(Calibration::missing(&model));
        }
        model.check_path(path)?;
        Ok(CpuEngine { name, model, kernels, path: Path::Float(path, Box::default()), recording: None })
    }

    /// An engine on `w8a8` with its activation scales.
    ///
    /// # Errors
    /// Weights that are not quantised, scales of another model.
    pub fn int8(
        name: String,
        model: Arc<Model>,
        calibration: Arc<Calibration>,
        kernels: Arc<Kernels>,
    ) -> Result<CpuEngine, VideoError> {
        model.check_path(NumericPath::W8a8)?;
        calibration.check(&model)?;
        Ok(CpuEngine {
            name,
            model,
            kernels,
            path: Path::Int8(calibration, Box::default(), TextMemory::default()),
            recording: None,
        })
    }

    /// Records the ranges of every operand from now on (float paths only) into `calibration`.
    pub fn record(&mut self, calibration: Calibration) {
        self.recording = Some(calibration);
    }

    /// Ends recording.
    pub fn recorded(&mut self) -> Option<Calibration> {
        self.recording.take()
    }
}

impl Engine for CpuEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn path(&self) -> NumericPath {
        match self.path {
            Path::Float(path, _) => path,
            Path::Int8(..) => NumericPath::W8a8,
        }
    }

    fn cores(&self) -> &[usize] {
        self.kernels.pool().cores()
    }

    fn run_blocks(&mut self, clip: &Clip, piece: &Piece, hidden: &mut [f32]) -> Result<(), VideoError> {
        let config = self.model.config();
        let (expert, sizes) = (clip.expert(piece.step), (config.heads, config.eps));
        let conditions = clip.conditions(piece.step, piece.branch)?;
        for number in piece.blocks.clone() {
            let block = self.model.block(expert, number)?;
            match &mut self.path {
                Path::Float(path, blocks) => {
                    let operands = if *path == NumericPath::W8a16 { Operands::F16 } else { Operands::F32 };
                    let record = self.recording.as_mut().map(|recording| recording.block_mut(expert, number));
                    blocks.run(&self.kernels, operands, &block, sizes, &conditions, hidden, record)?;
                }
                Path::Int8(calibration, blocks, texts) => {
                    let scales = calibration.block(expert, number);
                    let text = texts.of(clip, (expert, piece.branch, number));
                    blocks.run(&self.kernels, &block, scales, sizes, (&conditions, text), hidden)?;
                }
            }
        }
        Ok(())
    }

    fn scratch_bytes(&self) -> usize {
        match &self.path {
            Path::Float(_, blocks) => blocks.bytes(),
            Path::Int8(_, blocks, texts) => blocks.bytes() + texts.bytes(),
        }
    }
}
