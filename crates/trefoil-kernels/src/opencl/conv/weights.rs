//! Filters in the order in which the CPU's micro-kernel streams them, in memory that the device uses.

use crate::conv::weights::{ConvWeights as Packed, Form as PackedForm, Phase as PackedPhase, Placement};
use crate::conv::winograd;
use crate::opencl::{Buffer, Kernels, OpenClError};
use crate::{FilterShape, KernelError};

/// One filter: rows of consecutive pixels under it, and what they are multiplied with.
#[derive(Debug)]
pub(super) struct Phase {
    /// First row and column of the runs, relative to one left above the output's pixel.
    pub(super) row: usize,
    pub(super) column: usize,
    /// Rows of every frame, and pixels of a row.
    pub(super) rows: usize,
    pub(super) pixels: usize,
    pub(super) placement: Placement,
    pub(super) panels: Buffer<f32>,
}

/// How the products are taken.
#[derive(Debug)]
pub(super) enum Form {
    /// As defined, one phase, or four of an upsampling convolution.
    Direct(Vec<Phase>),
    /// Two neighbouring outputs from four products ([`crate::conv::winograd`]).
    Winograd(Buffer<f32>),
}

/// A packed convolution for a device.
#[derive(Debug)]
pub struct ConvWeights {
    pub(super) shape: FilterShape,
    pub(super) scale: usize,
    pub(super) form: Form,
    /// Padded to whole tiles.
    pub(super) bias: Buffer<f32>,
}

impl ConvWeights {
    /// Extents of the filter as stored in the checkpoint.
    pub fn shape(&self) -> FilterShape {
        self.shape
    }

    /// Rows and columns of the output per row and column of the input: 1, or 2 for an upsampling convolution.
    pub fn scale(&self) -> usize {
        self.scale
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let panels = match &self.form {
            Form::Direct(phases) => phases.iter().map(|phase| phase.panels.len()).sum(),
            Form::Winograd(panels) => panels.len(),
        };
        (panels + self.bias.len()) * size_of::<f32>()
    }

    /// Bytes of scratch that a call takes for frames of `height` × `width`.
    pub fn scratch_bytes(&self, height: usize, width: usize) -> usize {
        match &self.form {
            Form::Direct(_) => 0,
            Form::Winograd(_) => super::Band::of(self.shape, height, width).elements() * size_of::<f32>(),
        }
    }
}

impl Kernels {
    /// Packs a filter, see [`crate::ConvWeights::new`].
    ///
    /// # Errors
    /// As for the CPU's; errors of the library.
    pub fn conv_weights(&self, shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<ConvWeights, OpenClError> {
        // Few outputs leave most of a tile empty here; they are two hundredths of a decoder's work.
        let packed = if winograd::suits(shape) {
            Packed::new(shape, weight, bias)?
        } else {
            Packed::direct(shape, weight, bias)?
        };
        self.filter(&packed)
    }

    /// Packs a 3 × 3 convolution that follows a doubling of rows and columns, see [`crate::ConvWeights::upsampling`].
    ///
    /// # Errors
    /// As for the CPU's; errors of the library.
    pub fn upsampling_weights(
        &self,
        shape: FilterShape,
        weight: &[f32],
        bias: &[f32],
    ) -> Result<ConvWeights, OpenClError> {
        self.filter(&Packed::upsampling(shape, weight, bias)?)
    }

    fn filter(&self, packed: &Packed) -> Result<ConvWeights, OpenClError> {
        let form = match &packed.form {
            PackedForm::Direct(phases) => {
                Form::Direct(phases.iter().map(|phase| self.phase(phase)).collect::<Result<_, OpenClError>>()?)
            }
            PackedForm::Winograd(panels) => Form::Winograd(self.copied(panels)?),
            PackedForm::Few(_) => {
                return Err(KernelError::value("conv", "the filter", packed.shape, "this form is the CPU's").into());
            }
        };
        Ok(ConvWeights { shape: packed.shape, scale: packed.scale, form, bias: self.copied(&packed.bias)? })
    }

    /// The runs of a phase are the same rows of every frame, one after the other.
    fn phase(&self, packed: &PackedPhase) -> Result<Phase, OpenClError> {
        let first = packed.runs[0];
        let rows = packed.runs.iter().filter(|run| run.frame == first.frame).count();
        Ok(Phase {
            row: first.row,
            column: first.column,
            rows,
            pixels: first.pixels,
            placement: packed.placement,
            panels: self.copied(&packed.panels)?,
        })
    }
}
