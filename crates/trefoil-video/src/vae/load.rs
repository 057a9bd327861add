//! Tensors of a VAE checkpoint, in diffusers' or the original names.

use super::VaeError;
use super::compute::{Filter, Gain, Target};
use super::streamed::Streamed;
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use trefoil_kernels::{ConvWeights, FilterShape};
use trefoil_weights::FloatType;
use trefoil_weights::checkpoint::{Checkpoint, SourceTensor, SourceType};

/// Names of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `decoder.mid_block.resnets.0.conv1.weight` and so on.
    Diffusers,
    /// `decoder.middle.0.residual.2.weight` and so on, as Wan's own file has them.
    Original,
}

/// Reads and checks tensors one by one.
#[derive(Debug)]
pub(super) struct Loader<'c> {
    checkpoint: &'c Checkpoint,
    layout: Layout,
    /// Residual blocks of a decoder level, which number the original names.
    blocks: usize,
    target: Target<'c>,
    /// Weights from which on a filter stays in the file, and the files for it.
    stream_from: Cell<usize>,
    files: Arc<Checkpoint>,
    has_streamed: Cell<bool>,
}

impl<'c> Loader<'c> {
    /// Finds the layout; weights are packed for `target`, on the CPU when they are used from `stream_from` values on.
    pub(super) fn new(
        checkpoint: &'c Checkpoint,
        path: &Path,
        num_res_blocks: usize,
        (target, stream_from): (Target<'c>, usize),
    ) -> Result<Loader<'c>, VaeError> {
        let layout = if checkpoint.tensor("decoder.conv_in.weight").is_some() {
            Layout::Diffusers
        } else if checkpoint.tensor("decoder.conv1.weight").is_some() {
            Layout::Original
        } else {
            return Err(VaeError::Foreign {
                path: path.to_path_buf(),
                reason: "neither `decoder.conv_in.weight` (diffusers) nor `decoder.conv1.weight` (original) is in it"
                    .into(),
            });
        };
        let files = Arc::new(checkpoint.try_clone()?);
        Ok(Loader {
            checkpoint,
            layout,
            blocks: num_res_blocks + 1,
            target,
            stream_from: Cell::new(stream_from),
            files,
            has_streamed: Cell::new(false),
        })
    }

    /// From here on no filter stays in the file.
    pub(super) fn hold_all(&self) {
        self.stream_from.set(usize::MAX);
    }

    /// The files, if a filter stays in them.
    pub(super) fn streamed_files(&self) -> Option<Arc<Checkpoint>> {
        self.has_streamed.get().then(|| self.files.clone())
    }

    /// Where weights are packed for.
    pub(super) fn target(&self) -> Target<'c> {
        self.target
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// Name in the checkpoint of a tensor with this diffusers name.
    pub(super) fn name(&self, diffusers: &str) -> String {
        match self.layout {
            Layout::Diffusers => diffusers.to_string(),
            Layout::Original => original_name(diffusers, self.blocks),
        }
    }

    pub(super) fn has(&self, diffusers: &str) -> bool {
        self.checkpoint.tensor(&self.name(diffusers)).is_some()
    }

    /// A tensor by its diffusers name. Trailing extents of 1 may be there or not; everything else must be as expected.
    fn tensor(&self, diffusers: &str, expected: &[usize]) -> Result<(&'c SourceTensor, FloatType), VaeError> {
        let name = self.name(diffusers);
        let fail = |reason: String| VaeError::Tensor { name: name.clone(), reason, expected: expected.to_vec() };
        let tensor = self.checkpoint.tensor(&name).ok_or_else(|| fail("is missing".to_string()))?;
        let shape: Vec<usize> = tensor.shape.iter().map(|&side| side as usize).collect();
        if significant(&shape) != significant(expected) {
            return Err(fail(format!("is {shape:?}")));
        }
        let SourceType::Float(dtype) = &tensor.dtype else {
            return Err(fail(format!("has elements of type {:?}", tensor.dtype)));
        };
        let elements: usize = expected.iter().product();
        if tensor.bytes != (elements * dtype.bytes()) as u64 {
            return Err(fail(format!("has {} bytes", tensor.bytes)));
        }
        Ok((tensor, *dtype))
    }

    /// All values of a tensor, all of them finite.
    pub(super) fn values(&self, diffusers: &str, expected: &[usize]) -> Result<Vec<f32>, VaeError> {
        let (tensor, dtype) = self.tensor(diffusers, expected)?;
        let mut values = vec![0f32; expected.iter().product()];
        dtype.decode(self.checkpoint.window(tensor, 0, tensor.bytes)?.bytes(), &mut values);
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let reason = format!("holds {} at element {at}", values[at]);
            return Err(VaeError::Tensor { name: tensor.name.clone(), reason, expected: expected.to_vec() });
        }
        Ok(values)
    }

    /// A convolution `[outputs, inputs, frames, height, width]` with its bias.
    pub(super) fn conv(&self, stem: &str, shape: FilterShape) -> Result<Filter, VaeError> {
        let (weight, bias) = self.filter(stem, shape)?;
        if matches!(self.target, Target::Cpu) && weight.len() >= self.stream_from.get() && ConvWeights::is_direct(shape)
        {
            let (tensor, dtype) = self.tensor(&format!("{stem}.weight"), &extents(shape))?;
            self.has_streamed.set(true);
            return Ok(Filter::Streamed(Streamed::new(self.files.clone(), (tensor.clone(), dtype), shape, bias)));
        }
        self.target.filter(shape, &weight, &bias)
    }

    /// The gain of a norm.
    pub(super) fn gain(&self, name: &str, channels: usize) -> Result<Gain, VaeError> {
        self.target.gain(self.values(name, &[channels])?)
    }

    /// Weight and bias of a convolution.
    pub(super) fn filter(&self, stem: &str, shape: FilterShape) -> Result<(Vec<f32>, Vec<f32>), VaeError> {
        let weight = self.values(&format!("{stem}.weight"), &extents(shape))?;
        Ok((weight, self.values(&format!("{stem}.bias"), &[shape.outputs])?))
    }
}

/// Without the trailing extents of 1.
fn significant(shape: &[usize]) -> &[usize] {
    let end = shape.iter().rposition(|&side| side != 1).map_or(0, |last| last + 1);
    &shape[..end]
}

/// Wan's own name. Levels are numbered through: `blocks` residual blocks and, except at the last level, an upsampler.
fn original_name(diffusers: &str, blocks: usize) -> String {
    let residual = |prefix: String, rest: &str| {
        // A `Sequential` of norm, SiLU, conv, norm, SiLU, dropout, conv.
        let (part, leaf) = rest.split_once('.').unwrap_or((rest, ""));
        match part {
            "norm1" => format!("{prefix}.residual.0.{leaf}"),
            "conv1" => format!("{prefix}.residual.2.{leaf}"),
            "norm2" => format!("{prefix}.residual.3.{leaf}"),
            "conv2" => format!("{prefix}.residual.6.{leaf}"),
            _ => format!("{prefix}.shortcut.{leaf}"),
        }
    };
    if let Some(rest) = diffusers.strip_prefix("post_quant_conv.") {
        return format!("conv2.{rest}");
    }
    if let Some(rest) = diffusers.strip_prefix("decoder.conv_in.") {
        return format!("decoder.conv1.{rest}");
    }
    if let Some(rest) = diffusers.strip_prefix("decoder.norm_out.") {
        return format!("decoder.head.0.{rest}");
    }
    if let Some(rest) = diffusers.strip_prefix("decoder.conv_out.") {
        return format!("decoder.head.2.{rest}");
    }
    if let Some(rest) = diffusers.strip_prefix("decoder.mid_block.attentions.0.") {
        return format!("decoder.middle.1.{rest}");
    }
    if let Some((number, rest)) =
        diffusers.strip_prefix("decoder.mid_block.resnets.").and_then(|rest| rest.split_once('.'))
    {
        return residual(format!("decoder.middle.{}", if number == "0" { 0 } else { 2 }), rest);
    }
    let level = diffusers.strip_prefix("decoder.up_blocks.").and_then(|rest| rest.split_once('.'));
    if let Some((level, rest)) = level
        && let Ok(level) = level.parse::<usize>()
    {
        let first = level * (blocks + 1);
        if let Some(rest) = rest.strip_prefix("upsamplers.0.") {
            return format!("decoder.upsamples.{}.{rest}", first + blocks);
        }
        if let Some((number, rest)) = rest.strip_prefix("resnets.").and_then(|rest| rest.split_once('.'))
            && let Ok(number) = number.parse::<usize>()
        {
            return residual(format!("decoder.upsamples.{}", first + number), rest);
        }
    }
    diffusers.to_string()
}

/// Extents of a filter's tensor: a flat one has no frames.
fn extents(shape: FilterShape) -> Vec<usize> {
    let FilterShape { outputs, inputs, frames, height, width } = shape;
    if frames == 1 && (height, width) == (3, 3) {
        vec![outputs, inputs, height, width]
    } else {
        vec![outputs, inputs, frames, height, width]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn original_names_are_those_of_the_published_table() {
        for (diffusers, original) in [
            ("post_quant_conv.bias", "conv2.bias"),
            ("decoder.conv_in.weight", "decoder.conv1.weight"),
            ("decoder.mid_block.attentions.0.norm.gamma", "decoder.middle.1.norm.gamma"),
            ("decoder.mid_block.attentions.0.to_qkv.weight", "decoder.middle.1.to_qkv.weight"),
            ("decoder.mid_block.resnets.0.norm1.gamma", "decoder.middle.0.residual.0.gamma"),
            ("decoder.mid_block.resnets.1.conv2.weight", "decoder.middle.2.residual.6.weight"),
            ("decoder.up_blocks.0.resnets.2.conv1.bias", "decoder.upsamples.2.residual.2.bias"),
            ("decoder.up_blocks.0.upsamplers.0.time_conv.weight", "decoder.upsamples.3.time_conv.weight"),
            ("decoder.up_blocks.1.resnets.0.conv_shortcut.weight", "decoder.upsamples.4.shortcut.weight"),
            ("decoder.up_blocks.1.resnets.1.norm2.gamma", "decoder.upsamples.5.residual.3.gamma"),
            ("decoder.up_blocks.2.upsamplers.0.resample.1.bias", "decoder.upsamples.11.resample.1.bias"),
            ("decoder.up_blocks.3.resnets.2.conv2.weight", "decoder.upsamples.14.residual.6.weight"),
            ("decoder.norm_out.gamma", "decoder.head.0.gamma"),
            ("decoder.conv_out.weight", "decoder.head.2.weight"),
        ] {
            assert_eq!(original_name(diffusers, 3), original);
        }
    }

    #[test]
    fn trailing_ones_do_not_matter() {
        assert_eq!(significant(&[8, 1, 1, 1]), significant(&[8]));
        assert_eq!(significant(&[1, 3]), [1, 3]);
        assert_ne!(significant(&[3, 1, 2]), significant(&[3, 2]));
    }
}
