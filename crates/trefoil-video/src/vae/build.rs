//! The decoder's layers from the tensors of a checkpoint.

use super::VaeError;
use super::compute::{Filter, Target};
use super::decoder::{Attention, CausalConv, DecoderPath, LastConv, Projections, Residual, TimeConv, Upsampler};
use super::load::Loader;
use trefoil_kernels::FilterShape;

/// Numbers the histories in order of use.
#[derive(Debug, Default)]
pub(super) struct Slots(pub(super) usize);

impl Slots {
    fn next(&mut self) -> usize {
        self.0 += 1;
        self.0 - 1
    }
}

pub(super) fn causal(
    loader: &Loader<'_>,
    slots: &mut Slots,
    path: DecoderPath,
    stem: &str,
    (inputs, outputs): (usize, usize),
) -> Result<CausalConv, VaeError> {
    let shape = FilterShape { outputs, inputs, frames: 3, height: 3, width: 3 };
    let weights = match path {
        DecoderPath::F32 => loader.conv(stem, shape)?,
        DecoderPath::Int8 => {
            let (weight, bias) = loader.filter(stem, shape)?;
            loader.target().int8_filter(shape, &weight, &bias)?
        }
    };
    Ok(CausalConv { weights, slot: slots.next() })
}

pub(super) fn last(loader: &Loader<'_>, stem: &str, inputs: usize) -> Result<LastConv, VaeError> {
    let shape = FilterShape { outputs: 3, inputs, frames: 3, height: 3, width: 3 };
    let (weight, bias) = loader.filter(stem, shape)?;
    let tap = |frame: usize| {
        let of_frame: Vec<f32> = weight.chunks_exact(3 * 9).flat_map(|taps| &taps[frame * 9..][..9]).copied().collect();
        // Every output has its bias once.
        let bias = if frame == 2 { bias.clone() } else { vec![0.0; bias.len()] };
        loader.target().filter(FilterShape { frames: 1, ..shape }, &of_frame, &bias)
    };
    Ok(LastConv { taps: [tap(0)?, tap(1)?, tap(2)?] })
}

pub(super) fn pointwise(loader: &Loader<'_>, stem: &str, inputs: usize, outputs: usize) -> Result<Filter, VaeError> {
    loader.conv(stem, FilterShape { outputs, inputs, frames: 1, height: 1, width: 1 })
}

pub(super) fn residual(
    loader: &Loader<'_>,
    slots: &mut Slots,
    path: DecoderPath,
    stem: &str,
    (inputs, outputs): (usize, usize),
) -> Result<Residual, VaeError> {
    let shortcut = if inputs == outputs {
        None
    } else {
        Some(pointwise(loader, &format!("{stem}.conv_shortcut"), inputs, outputs)?)
    };
    Ok(Residual {
        inputs,
        outputs,
        norm1: loader.gain(&format!("{stem}.norm1.gamma"), inputs)?,
        conv1: causal(loader, slots, path, &format!("{stem}.conv1"), (inputs, outputs))?,
        norm2: loader.gain(&format!("{stem}.norm2.gamma"), outputs)?,
        conv2: causal(loader, slots, path, &format!("{stem}.conv2"), (outputs, outputs))?,
        shortcut,
    })
}

pub(super) fn attention(loader: &Loader<'_>, stem: &str, channels: usize) -> Result<Attention, VaeError> {
    let to_qkv = loader.values(&format!("{stem}.to_qkv.weight"), &[3 * channels, channels])?;
    let to_qkv_bias = loader.values(&format!("{stem}.to_qkv.bias"), &[3 * channels])?;
    let proj = loader.values(&format!("{stem}.proj.weight"), &[channels, channels])?;
    let proj_bias = loader.values(&format!("{stem}.proj.bias"), &[channels])?;
    let filter = |weight: &[f32], bias: &[f32]| {
        let shape = FilterShape { outputs: bias.len(), inputs: channels, frames: 1, height: 1, width: 1 };
        loader.target().filter(shape, weight, bias)
    };
    let projections = match loader.target() {
        Target::Cpu => Projections::Matrices { to_qkv, to_qkv_bias, proj, proj_bias },
        Target::OpenCl(_) => {
            Projections::Filters(Box::new([filter(&to_qkv, &to_qkv_bias)?, filter(&proj, &proj_bias)?]))
        }
    };
    Ok(Attention { channels, norm: loader.gain(&format!("{stem}.norm.gamma"), channels)?, projections })
}

pub(super) fn upsampler(
    loader: &Loader<'_>,
    slots: &mut Slots,
    stem: &str,
    channels: usize,
    is_timed: bool,
) -> Result<Upsampler, VaeError> {
    let time = if is_timed {
        let shape = FilterShape { outputs: 2 * channels, inputs: channels, frames: 3, height: 1, width: 1 };
        let (weight, bias) = loader.filter(&format!("{stem}.time_conv"), shape)?;
        let half = FilterShape { outputs: channels, ..shape };
        let (first, second) = weight.split_at(half.elements());
        let halves = [
            loader.target().filter(half, first, &bias[..channels])?,
            loader.target().filter(half, second, &bias[channels..])?,
        ];
        Some(TimeConv { halves, slot: slots.next() })
    } else {
        None
    };
    let shape = FilterShape { outputs: channels / 2, inputs: channels, frames: 1, height: 3, width: 3 };
    let (weight, bias) = loader.filter(&format!("{stem}.resample.1"), shape)?;
    Ok(Upsampler { time, resample: loader.target().upsampling(shape, &weight, &bias)? })
}
