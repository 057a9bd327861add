//! The decoder's weights.

use super::build::{Slots, attention, causal, last, pointwise, residual, upsampler};
use super::compute::{DecoderKernels, Filter, Gain, Target};
use super::config::VaeConfig;
use super::load::{Layout, Loader};
use super::map::MapKind;
use super::streamed::Streaming;
use super::{DecoderMemory, DecoderSession, VaeError};
use serde::Serialize;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use trefoil_weights::checkpoint::Checkpoint;

/// What the decoder's residual blocks compute in. They are nine tenths of its work and of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DecoderPath {
    /// f32 throughout.
    #[default]
    F32,
    /// Convolutions of residual blocks in INT8: weights with a scale per output, activations (and their histories) with a scale
    /// and a zero per frame, found as the frame is made. Everything else is f32.
    Int8,
}

impl DecoderPath {
    /// All paths.
    pub const ALL: [DecoderPath; 2] = [DecoderPath::F32, DecoderPath::Int8];

    /// The name used in commands and results.
    pub fn as_str(self) -> &'static str {
        match self {
            DecoderPath::F32 => "f32",
            DecoderPath::Int8 => "int8",
        }
    }
}

impl fmt::Display for DecoderPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

impl FromStr for DecoderPath {
    type Err = String;

    fn from_str(text: &str) -> Result<DecoderPath, String> {
        let found = DecoderPath::ALL.into_iter().find(|path| path.as_str() == text);
        found.ok_or_else(|| "choose f32 or int8".to_string())
    }
}

/// A causal convolution over three frames and the slot of its history.
#[derive(Debug)]
pub(super) struct CausalConv {
    pub(super) weights: Filter,
    pub(super) slot: usize,
}

/// The last convolution: few outputs of many channels, so sums are remembered and not what they are of. Its filters meet the frame before
/// the last, the last, and the current one.
#[derive(Debug)]
pub(super) struct LastConv {
    pub(super) taps: [Filter; 3],
}

/// `shortcut(x) + conv2(SiLU(norm2(conv1(SiLU(norm1(x))))))`.
#[derive(Debug)]
pub(super) struct Residual {
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) norm1: Gain,
    pub(super) conv1: CausalConv,
    pub(super) norm2: Gain,
    pub(super) conv2: CausalConv,
    /// 1 × 1; none is the identity.
    pub(super) shortcut: Option<Filter>,
}

/// One head of attention over the pixels of a frame.
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) channels: usize,
    pub(super) norm: Gain,
    pub(super) projections: Projections,
}

/// What the attention's products are taken with.
#[derive(Debug)]
pub(super) enum Projections {
    /// Matrices for the CPU's products.
    Matrices {
        /// `[3·channels, channels]`: queries, keys, values.
        to_qkv: Vec<f32>,
        to_qkv_bias: Vec<f32>,
        /// `[channels, channels]`.
        proj: Vec<f32>,
        proj_bias: Vec<f32>,
    },
    /// 1 × 1 filters: queries, keys and values; and what follows.
    Filters(Box<[Filter; 2]>),
}

/// Doubling of rows and columns, of the frame rate too where there is a time convolution.
#[derive(Debug)]
pub(super) struct Upsampler {
    pub(super) time: Option<TimeConv>,
    pub(super) resample: Filter,
}

/// 3 × 1 × 1 over three frames; the halves of its outputs are two frames.
#[derive(Debug)]
pub(super) struct TimeConv {
    pub(super) halves: [Filter; 2],
    pub(super) slot: usize,
}

/// Residual blocks of one resolution.
#[derive(Debug)]
pub(super) struct Level {
    pub(super) residuals: Vec<Residual>,
    pub(super) upsampler: Option<Upsampler>,
}

/// The decoder of a Wan VAE: weights packed for [`trefoil_kernels::Kernels::conv`] and
/// [`trefoil_kernels::Kernels::conv_int8`], or for [`trefoil_kernels::opencl::Kernels::conv`]. Immutable; what a clip needs
/// besides is in a [`DecoderSession`], so several clips and tiles share one decoder.
#[derive(Debug)]
pub struct VaeDecoder {
    config: VaeConfig,
    path: DecoderPath,
    layout: Layout,
    pub(super) post_quant: Filter,
    pub(super) conv_in: CausalConv,
    pub(super) middle: (Residual, Attention, Residual),
    pub(super) levels: Vec<Level>,
    pub(super) norm_out: Gain,
    pub(super) conv_out: LastConv,
    pub(super) slots: usize,
    /// The checkpoint's files, where filters stay in them.
    files: Option<Arc<Checkpoint>>,
}

impl VaeDecoder {
    /// Opens a `vae/` folder, a safetensors file, or a pipeline folder that holds `vae_decoder/` or `vae/`. Without a
    /// `config.json` the sizes of Wan2.1's VAE are assumed, and every tensor's shape is checked against them.
    ///
    /// # Errors
    /// Files that cannot be read, a config that makes no decoder, tensors missing or of another shape (by name).
    pub fn open(path: &Path) -> Result<VaeDecoder, VaeError> {
        VaeDecoder::open_on(path, DecoderPath::F32)
    }

    /// The same, computing in `on`.
    ///
    /// # Errors
    /// As [`VaeDecoder::open`].
    pub fn open_on(path: &Path, on: DecoderPath) -> Result<VaeDecoder, VaeError> {
        VaeDecoder::open_as(path, on, Target::Cpu)
    }

    /// The same, packed for the kernels that will run it.
    ///
    /// # Errors
    /// As [`VaeDecoder::open`]; errors of the library.
    pub fn open_for(path: &Path, on: DecoderPath, kernels: DecoderKernels<'_>) -> Result<VaeDecoder, VaeError> {
        match kernels {
            DecoderKernels::Cpu(_) => VaeDecoder::open_as(path, on, Target::Cpu),
            DecoderKernels::OpenCl(kernels) => VaeDecoder::open_as(path, on, Target::OpenCl(kernels)),
        }
    }

    fn open_as(path: &Path, on: DecoderPath, target: Target<'_>) -> Result<VaeDecoder, VaeError> {
        let path = locate(path);
        if path.join("model_index.json").is_file() || path.join("transformer").is_dir() {
            let reason = "it is a pipeline folder without vae/ or vae_decoder/; copy the model's decoder there".into();
            return Err(VaeError::Foreign { path, reason });
        }
        let checkpoint = Checkpoint::open(&path, &[])?;
        let config = match checkpoint.config() {
            Some(config) => VaeConfig::from_json(config, &path.join("config.json"))?,
            None => VaeConfig::default(),
        };
        VaeDecoder::load_as(&checkpoint, config, (&path, on), target)
    }

    /// Reads the decoder's tensors from an open checkpoint; `path` is named in errors.
    ///
    /// # Errors
    /// As [`VaeDecoder::open`].
    pub fn load(checkpoint: &Checkpoint, config: VaeConfig, path: &Path) -> Result<VaeDecoder, VaeError> {
        VaeDecoder::load_on(checkpoint, config, path, DecoderPath::F32)
    }

    /// The same, computing in `on`.
    ///
    /// # Errors
    /// As [`VaeDecoder::open`].
    pub fn load_on(
        checkpoint: &Checkpoint,
        config: VaeConfig,
        path: &Path,
        on: DecoderPath,
    ) -> Result<VaeDecoder, VaeError> {
        VaeDecoder::load_as(checkpoint, config, (path, on), Target::Cpu)
    }

    /// The same, packed for the kernels that will run it.
    ///
    /// # Errors
    /// As [`VaeDecoder::open_for`].
    pub fn load_for(
        checkpoint: &Checkpoint,
        config: VaeConfig,
        path: &Path,
        on: DecoderPath,
        kernels: DecoderKernels<'_>,
    ) -> Result<VaeDecoder, VaeError> {
        let target = match kernels {
            DecoderKernels::Cpu(_) => Target::Cpu,
            DecoderKernels::OpenCl(kernels) => Target::OpenCl(kernels),
        };
        VaeDecoder::load_as(checkpoint, config, (path, on), target)
    }

    fn load_as(
        checkpoint: &Checkpoint,
        config: VaeConfig,
        (path, on): (&Path, DecoderPath),
        target: Target<'_>,
    ) -> Result<VaeDecoder, VaeError> {
        VaeDecoder::load_streaming(checkpoint, config, (path, on), (target, Streaming::WIDE))
    }

    /// The filters that `streaming` says stay in the checkpoint's file, where they are the CPU's.
    pub(super) fn load_streaming(
        checkpoint: &Checkpoint,
        config: VaeConfig,
        (path, on): (&Path, DecoderPath),
        (target, streaming): (Target<'_>, Streaming),
    ) -> Result<VaeDecoder, VaeError> {
        let loader = Loader::new(checkpoint, path, config.num_res_blocks, (target, streaming.from))?;
        let mut slots = Slots::default();
        let middle = config.middle();
        if !middle.is_multiple_of(32) {
            return Err(VaeError::config(
                path,
                format!("the middle has {middle} channels; its attention needs a multiple of 32"),
            ));
        }
        let post_quant = pointwise(&loader, "post_quant_conv", config.z_dim, config.z_dim)?;
        let conv_in = causal(&loader, &mut slots, DecoderPath::F32, "decoder.conv_in", (config.z_dim, middle))?;
        let middle = (
            residual(&loader, &mut slots, on, "decoder.mid_block.resnets.0", (middle, middle))?,
            attention(&loader, "decoder.mid_block.attentions.0", middle)?,
            residual(&loader, &mut slots, on, "decoder.mid_block.resnets.1", (middle, middle))?,
        );
        let mut levels = Vec::new();
        for (number, level) in config.levels().into_iter().enumerate() {
            if number == streaming.levels {
                loader.hold_all();
            }
            let stem = format!("decoder.up_blocks.{number}");
            let mut residuals = Vec::new();
            for block in 0..=config.num_res_blocks {
                let inputs = if block == 0 { level.inputs } else { level.channels };
                let stem = format!("{stem}.resnets.{block}");
                residuals.push(residual(&loader, &mut slots, on, &stem, (inputs, level.channels))?);
            }
            let upsampler = if level.is_upsampled {
                let stem = format!("{stem}.upsamplers.0");
                Some(upsampler(&loader, &mut slots, &stem, level.channels, level.is_time_upsampled)?)
            } else {
                None
            };
            levels.push(Level { residuals, upsampler });
        }
        // A tensor for a shape this config does not have says that the config is another model's.
        let beyond = format!("decoder.up_blocks.{}.resnets.0.conv1.weight", levels.len());
        if loader.has(&beyond) {
            let reason = format!(
                "the checkpoint has `{}`, beyond the {} levels of its config",
                loader.name(&beyond),
                levels.len()
            );
            return Err(VaeError::config(path, reason));
        }
        let norm_out = loader.gain("decoder.norm_out.gamma", config.base_dim * config.dim_mult[0])?;
        let conv_out = last(&loader, "decoder.conv_out", norm_out.len())?;
        Ok(VaeDecoder {
            files: loader.streamed_files(),
            layout: loader.layout(),
            path: on,
            config,
            post_quant,
            conv_in,
            middle,
            levels,
            norm_out,
            conv_out,
            slots: slots.0,
        })
    }

    /// Sizes and statistics.
    pub fn config(&self) -> &VaeConfig {
        &self.config
    }

    /// Names that the checkpoint uses.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What its residual blocks compute in.
    pub fn path(&self) -> DecoderPath {
        self.path
    }

    /// Whether its weights are packed for a device.
    pub fn is_on_device(&self) -> bool {
        matches!(self.norm_out, Gain::OpenCl(_))
    }

    /// What its feature maps are, but for those that an INT8 convolution reads.
    pub(super) fn kind(&self) -> MapKind {
        if self.is_on_device() { MapKind::Device } else { MapKind::Values }
    }

    /// What an INT8 convolution reads.
    pub(super) fn code_kind(&self) -> MapKind {
        if self.is_on_device() { MapKind::DeviceCodes } else { MapKind::Codes }
    }

    /// Histories that a clip keeps: two frames each, two sums of the last convolution.
    pub fn histories(&self) -> usize {
        self.slots + 1
    }

    /// Bytes of the packed weights, but for wide f32 filters: they stay in the checkpoint's file and are packed when they are used, one
    /// at a time, which counts as working memory.
    pub fn weight_bytes(&self) -> usize {
        let residual = |block: &Residual| {
            block.norm1.bytes()
                + block.norm2.bytes()
                + block.conv1.weights.bytes()
                + block.conv2.weights.bytes()
                + block.shortcut.as_ref().map_or(0, Filter::bytes)
        };
        let attention = &self.middle.1;
        let projections: usize = match &attention.projections {
            Projections::Matrices { to_qkv, to_qkv_bias, proj, proj_bias } => {
                [to_qkv, to_qkv_bias, proj, proj_bias].map(|values| values.capacity() * size_of::<f32>()).iter().sum()
            }
            Projections::Filters(filters) => filters.iter().map(Filter::bytes).sum(),
        };
        let levels = self.levels.iter().map(|level| {
            let blocks: usize = level.residuals.iter().map(residual).sum();
            let upsampler = level.upsampler.as_ref().map_or(0, |upsampler| {
                let time = upsampler.time.as_ref().map_or(0, |time| time.halves.iter().map(Filter::bytes).sum());
                upsampler.resample.bytes() + time
            });
            blocks + upsampler
        });
        attention.norm.bytes()
            + projections
            + self.norm_out.bytes()
            + levels.sum::<usize>()
            + residual(&self.middle.0)
            + residual(&self.middle.2)
            + self.post_quant.bytes()
            + self.conv_in.weights.bytes()
            + self.conv_out.taps.iter().map(Filter::bytes).sum::<usize>()
    }

    /// Whether the checkpoint is as it was when it was opened, if filters are still read from it. Asked at the end of every clip: frames that
    /// were decoded from a file that somebody wrote to are no model's.
    ///
    /// # Errors
    /// The file that was changed ([`trefoil_weights::WeightsError::Changed`]).
    pub fn check_unchanged(&self) -> Result<(), VaeError> {
        self.files.as_ref().map_or(Ok(()), |files| Ok(files.check_unchanged()?))
    }

    /// A clip of latents of `height` × `width`: empty histories. Whoever pushes its last frame asks [`VaeDecoder::check_unchanged`].
    ///
    /// # Errors
    /// An empty extent or one too large to count.
    pub fn session(&self, height: usize, width: usize) -> Result<DecoderSession<'_>, VaeError> {
        DecoderSession::new(self, height, width)
    }

    /// Memory that a clip of latents of `height` × `width` will take on `threads` threads (of the CPU's kernels), by walking the same
    /// steps without data.
    ///
    /// # Errors
    /// As [`VaeDecoder::session`].
    pub fn memory(&self, height: usize, width: usize, threads: usize) -> Result<DecoderMemory, VaeError> {
        DecoderSession::predict(self, height, width, threads)
    }
}

/// The folder of the VAE in a pipeline folder, else the path itself.
fn locate(path: &Path) -> PathBuf {
    ["vae_decoder", "vae"]
        .into_iter()
        .map(|folder| path.join(folder))
        .find(|folder| folder.is_dir())
        .unwrap_or_else(|| path.to_path_buf())
}
