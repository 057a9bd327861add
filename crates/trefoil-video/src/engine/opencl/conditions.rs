//! A clip's conditions on a device.

use crate::VideoError;
use crate::denoise::Clip;
use crate::dit::DeviceConditions;
use crate::schedule::Piece;
use trefoil_kernels::opencl::{Buffer, Kernels, RotaryTable};

/// What the device holds of the present clip.
#[derive(Debug, Default)]
pub(super) struct HeldConditions {
    clip: Option<u64>,
    rotary: Option<RotaryTable>,
    contexts: Vec<Context>,
    /// The projected timestep of the present call.
    modulation: Option<Buffer<f32>>,
}

/// Text context of an expert and a branch.
#[derive(Debug)]
struct Context {
    expert: usize,
    branch: usize,
    values: Buffer<f32>,
    rows: usize,
}

impl HeldConditions {
    /// The conditions of a piece, made known to the device as far as they are not.
    ///
    /// # Errors
    /// A branch that the clip does not have; sizes that the device refuses.
    pub(super) fn hold(
        &mut self,
        kernels: &Kernels,
        clip: &Clip,
        piece: &Piece,
    ) -> Result<DeviceConditions<'_>, VideoError> {
        let conditions = clip.conditions(piece.step, piece.branch)?;
        if self.clip != Some(clip.serial()) {
            self.clip = None;
            self.contexts.clear();
        }
        let key = (clip.expert(piece.step), piece.branch);
        let at = if let Some(at) = self.contexts.iter().position(|held| (held.expert, held.branch) == key) {
            at
        } else {
            let (expert, branch) = key;
            let values = kernels.copied(conditions.context)?;
            self.contexts.push(Context { expert, branch, values, rows: conditions.text });
            self.contexts.len() - 1
        };
        let rotary = match self.rotary.take() {
            Some(rotary) if self.clip.is_some() => rotary,
            _ => kernels.rotary_table(conditions.rotary)?,
        };
        let modulation = match self.modulation.take() {
            Some(mut buffer) if buffer.len() == conditions.modulation.len() => {
                buffer.write()?.copy_from_slice(conditions.modulation);
                buffer
            }
            _ => kernels.copied(conditions.modulation)?,
        };
        self.clip = Some(clip.serial());
        let context = &self.contexts[at];
        Ok(DeviceConditions {
            context: &context.values,
            text: context.rows,
            modulation: self.modulation.insert(modulation),
            rotary: self.rotary.insert(rotary),
        })
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        let floats = |buffer: &Buffer<f32>| buffer.len() * size_of::<f32>();
        self.contexts.iter().map(|held| floats(&held.values)).sum::<usize>()
            + self.modulation.as_ref().map_or(0, floats)
            + self.rotary.as_ref().map_or(0, RotaryTable::bytes)
    }
}
