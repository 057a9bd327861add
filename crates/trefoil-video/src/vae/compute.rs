//! What a decoder computes with: the kernels of the CPU or of an OpenCL device, their packed weights, and the few operators on
//! feature maps that a decoder is made of. Its structure is in [`super::session`], once for all.

use super::VaeError;
use super::map::{Map, Pixels};
use super::streamed::Streamed;
use std::sync::Arc;
use trefoil_kernels::{
    Activation, ConvSink, ConvWeights, FilterShape, Int8ConvWeights, KernelError, Kernels, Workspace, opencl,
};

/// Kernels that a decoder runs on. Its weights are packed for one kind of them ([`super::VaeDecoder::open_for`]).
#[derive(Debug, Clone, Copy)]
pub enum DecoderKernels<'k> {
    /// The CPU's.
    Cpu(&'k Kernels),
    /// An OpenCL device's.
    OpenCl(&'k opencl::Kernels),
}

impl<'k> From<&'k Kernels> for DecoderKernels<'k> {
    fn from(kernels: &'k Kernels) -> Self {
        DecoderKernels::Cpu(kernels)
    }
}

impl<'k> From<&'k Arc<Kernels>> for DecoderKernels<'k> {
    fn from(kernels: &'k Arc<Kernels>) -> Self {
        DecoderKernels::Cpu(kernels)
    }
}

impl<'k> From<&'k opencl::Kernels> for DecoderKernels<'k> {
    fn from(kernels: &'k opencl::Kernels) -> Self {
        DecoderKernels::OpenCl(kernels)
    }
}

impl DecoderKernels<'_> {
    /// The name of the kind.
    fn name(self) -> &'static str {
        match self {
            DecoderKernels::Cpu(_) => "the CPU's",
            DecoderKernels::OpenCl(_) => "an OpenCL device's",
        }
    }

    /// Weights or maps of the other kind.
    fn mismatch(self) -> VaeError {
        KernelError::Value {
            operator: "decoder",
            what: "the kernels",
            value: self.name().to_string(),
            rule: "its weights were packed for others; open it for the kernels that run it",
        }
        .into()
    }
}

/// A packed filter.
#[derive(Debug)]
pub(super) enum Filter {
    Float(ConvWeights),
    /// Of the CPU's, read and packed whenever it is used.
    Streamed(Streamed),
    Int8(Int8ConvWeights),
    OpenCl(opencl::ConvWeights),
    OpenClInt8(opencl::Int8ConvWeights),
}

impl Filter {
    pub(super) fn is_int8(&self) -> bool {
        matches!(self, Filter::Int8(_) | Filter::OpenClInt8(_))
    }

    pub(super) fn shape(&self) -> FilterShape {
        match self {
            Filter::Float(weights) => weights.shape(),
            Filter::Streamed(source) => source.shape(),
            Filter::Int8(weights) => weights.shape(),
            Filter::OpenCl(weights) => weights.shape(),
            Filter::OpenClInt8(weights) => weights.shape(),
        }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Filter::Float(weights) => weights.bytes(),
            Filter::Streamed(source) => source.bytes(),
            Filter::Int8(weights) => weights.bytes(),
            Filter::OpenCl(weights) => weights.bytes(),
            Filter::OpenClInt8(weights) => weights.bytes(),
        }
    }

    /// Bytes of scratch that each thread takes, a device as a whole; the INT8 kernel's accumulators are on the stack.
    pub(super) fn scratch_bytes(&self, height: usize, width: usize) -> usize {
        match self {
            Filter::Float(weights) => weights.scratch_bytes(height, width),
            Filter::Streamed(source) => source.scratch_bytes(),
            Filter::Int8(_) | Filter::OpenClInt8(_) => 0,
            Filter::OpenCl(weights) => weights.scratch_bytes(height, width),
        }
    }

    /// Bytes of the packed filter in a [`Scratch`], while it is used.
    pub(super) fn packed_bytes(&self) -> usize {
        match self {
            Filter::Streamed(source) => source.packed_bytes(),
            _ => 0,
        }
    }
}

/// What calls of the CPU's kernels work with.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) workspace: Workspace,
    /// The last filter that was packed for its use.
    pub(super) packed: Option<ConvWeights>,
}

impl Scratch {
    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.workspace.bytes() + self.packed.as_ref().map_or(0, ConvWeights::bytes)
    }
}

/// The gain of a norm.
#[derive(Debug)]
pub(super) enum Gain {
    Cpu(Vec<f32>),
    OpenCl(opencl::Buffer<f32>),
}

impl Gain {
    pub(super) fn len(&self) -> usize {
        match self {
            Gain::Cpu(values) => values.len(),
            Gain::OpenCl(buffer) => buffer.len(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.len() * size_of::<f32>()
    }
}

/// Where weights are packed for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Target<'k> {
    Cpu,
    OpenCl(&'k opencl::Kernels),
}

impl Target<'_> {
    pub(super) fn filter(self, shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<Filter, VaeError> {
        Ok(match self {
            Target::Cpu => Filter::Float(ConvWeights::new(shape, weight, bias)?),
            Target::OpenCl(kernels) => Filter::OpenCl(kernels.conv_weights(shape, weight, bias)?),
        })
    }

    pub(super) fn int8_filter(self, shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<Filter, VaeError> {
        Ok(match self {
            Target::Cpu => Filter::Int8(Int8ConvWeights::new(shape, weight, bias)?),
            Target::OpenCl(kernels) => Filter::OpenClInt8(kernels.int8_conv_weights(shape, weight, bias)?),
        })
    }

    pub(super) fn upsampling(self, shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<Filter, VaeError> {
        Ok(match self {
            Target::Cpu => Filter::Float(ConvWeights::upsampling(shape, weight, bias)?),
            Target::OpenCl(kernels) => Filter::OpenCl(kernels.upsampling_weights(shape, weight, bias)?),
        })
    }

    pub(super) fn gain(self, values: Vec<f32>) -> Result<Gain, VaeError> {
        Ok(match self {
            Target::Cpu => Gain::Cpu(values),
            Target::OpenCl(kernels) => Gain::OpenCl(kernels.copied(&values)?),
        })
    }
}

impl DecoderKernels<'_> {
    /// `out ← filter ∗ frames`, or added to it; frames oldest first, `None` for one of zeros.
    pub(super) fn conv(
        self,
        frames: &[Option<&Map>],
        filter: &Filter,
        (out, is_added): (&mut Map, bool),
        scratch: &mut Scratch,
    ) -> Result<(), VaeError> {
        let frames = frames.iter().copied();
        match (self, filter) {
            (DecoderKernels::Cpu(kernels), Filter::Float(_) | Filter::Streamed(_)) => {
                let frames: Vec<_> = frames.map(|map| map.and_then(Map::values)).collect();
                let Some(out) = out.values_mut() else { return Err(self.mismatch()) };
                let sink = if is_added { ConvSink::Add(out) } else { ConvSink::Store(out) };
                let Scratch { workspace, packed } = scratch;
                let weights = match filter {
                    Filter::Float(weights) => weights,
                    Filter::Streamed(source) => {
                        let old = packed.take();
                        &*packed.insert(source.pack(kernels, old, workspace)?)
                    }
                    _ => return Err(self.mismatch()),
                };
                kernels.conv(&frames, weights, sink, workspace)?;
            }
            (DecoderKernels::Cpu(kernels), Filter::Int8(weights)) => {
                let frames: Vec<_> = frames.map(|map| map.and_then(Map::codes)).collect();
                let Some(out) = out.values_mut() else { return Err(self.mismatch()) };
                let sink = if is_added { ConvSink::Add(out) } else { ConvSink::Store(out) };
                kernels.conv_int8(&frames, weights, sink, &mut scratch.workspace)?;
            }
            (DecoderKernels::OpenCl(kernels), Filter::OpenCl(weights)) => {
                let frames: Vec<_> = frames.map(|map| map.and_then(Map::device)).collect();
                let Some(out) = out.device_mut() else { return Err(self.mismatch()) };
                let sink = if is_added { opencl::ConvSink::Add(out) } else { opencl::ConvSink::Store(out) };
                kernels.conv(&frames, weights, sink)?;
            }
            (DecoderKernels::OpenCl(kernels), Filter::OpenClInt8(weights)) => {
                let frames: Vec<_> = frames.map(|map| map.and_then(Map::device_codes)).collect();
                let Some(out) = out.device_mut() else { return Err(self.mismatch()) };
                let sink = if is_added { opencl::ConvSink::Add(out) } else { opencl::ConvSink::Store(out) };
                kernels.conv_int8(&frames, weights, sink)?;
            }
            _ => return Err(self.mismatch()),
        }
        Ok(())
    }

    /// The norm of every pixel and an activation, as codes where `out` holds codes (then `SiLU`).
    pub(super) fn norm(
        self,
        x: &Map,
        gain: &Gain,
        activation: Activation,
        out: &mut Map,
        workspace: &mut Workspace,
    ) -> Result<(), VaeError> {
        match (self, gain, x.pixels(), out.pixels_mut()) {
            (DecoderKernels::Cpu(kernels), Gain::Cpu(gain), Some(Pixels::Values(x)), Some(Pixels::Values(out))) => {
                kernels.pixel_norm(x, gain, activation, out, workspace)?;
            }
            (DecoderKernels::Cpu(kernels), Gain::Cpu(gain), Some(Pixels::Values(x)), Some(Pixels::Codes(out))) => {
                kernels.pixel_norm_codes(x, gain, out, workspace)?;
            }
            (
                DecoderKernels::OpenCl(kernels),
                Gain::OpenCl(gain),
                Some(Pixels::Device(x)),
                Some(Pixels::Device(out)),
            ) => {
                kernels.pixel_norm(x, gain, activation, out)?;
            }
            (
                DecoderKernels::OpenCl(kernels),
                Gain::OpenCl(gain),
                Some(Pixels::Device(x)),
                Some(Pixels::DeviceCodes(out)),
            ) => kernels.pixel_norm_codes(x, gain, out)?,
            _ => return Err(self.mismatch()),
        }
        Ok(())
    }

    /// Refuses a decoder whose weights are of the other kind, before anything is made.
    pub(super) fn check(self, gain: &Gain) -> Result<(), VaeError> {
        match (self, gain) {
            (DecoderKernels::Cpu(_), Gain::Cpu(_)) | (DecoderKernels::OpenCl(_), Gain::OpenCl(_)) => Ok(()),
            _ => Err(self.mismatch()),
        }
    }
}
