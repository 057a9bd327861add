//! Decoding a clip, one latent frame at a time.
//!
//! Every causal convolution remembers the last two frames it saw. So a frame is decoded as a whole, depth first: where the
//! frame rate doubles, the first of the two frames goes through all finer levels before the second is made. No level ever
//! holds more than one frame besides its histories, whatever the number of frames of the clip.
//!
//! The time convolutions differ (Wan2.1's "Rep" marker): the first frame of a clip skips them **and** does not enter their
//! history, so the second frame sees zeros, not the first frame.

use super::compute::{Filter, Gain, Scratch};
use super::decoder::{Attention, CausalConv, Projections, Residual, Upsampler, VaeDecoder};
use super::map::{History, Map, MapKind};
use super::{DecoderKernels, DecoderPath, Latent, VaeError};
use crate::output::VideoFrame;
use serde::Serialize;
use trefoil_kernels::{
    Activation, AttentionSink, FloatEpilogue, FloatWeights, Frame, GemmSink, Operands, Rows, RowsMut, Workspace, opencl,
};

/// Largest latent side: 8,192 pixels at a scale of 8.
pub(super) const MAX_SIDE: usize = 1024;

/// Bytes that decoding takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DecoderMemory {
    /// Packed weights, shared by all clips and tiles.
    pub weights: usize,
    /// Frames that causal convolutions remember.
    pub history: usize,
    /// Working frames, attention and the frames handed out.
    pub working: usize,
}

impl DecoderMemory {
    /// All of it.
    pub fn total(&self) -> usize {
        self.weights + self.history + self.working
    }
}

/// A clip being decoded. Latent frames go in with [`DecoderSession::push`], video frames come out.
#[derive(Debug)]
pub struct DecoderSession<'d> {
    decoder: &'d VaeDecoder,
    height: usize,
    width: usize,
    latents: usize,
    histories: Vec<History>,
    /// What past frames add to the next picture and to the one after it.
    sums: History,
    /// Which time convolutions have let the first frame pass.
    is_started: Vec<bool>,
    /// Frames not in use, to be used again.
    spares: Vec<Map>,
    /// Normed pixels, and queries, keys and values of the attention.
    pixels: Vec<f32>,
    projections: Vec<f32>,
    scratch: Scratch,
    /// Frames of the current latent frame.
    out: Vec<VideoFrame>,
    count: Count,
}

/// Bytes now and at most.
#[derive(Debug, Default, Clone, Copy)]
struct Count {
    /// Of all maps.
    frames: usize,
    most_frames: usize,
    attention: usize,
    out: usize,
    /// Of the kernels: of a thread, or of a device.
    scratch: usize,
    /// The largest filter that is packed for its use.
    packed: usize,
}

impl Count {
    fn make(&mut self, map: &Map) {
        self.frames += map.bytes();
        self.most_frames = self.most_frames.max(self.frames);
    }

    fn use_filter(&mut self, filter: &Filter, x: &Map) {
        self.scratch = self.scratch.max(filter.scratch_bytes(x.height, x.width));
        self.packed = self.packed.max(filter.packed_bytes());
    }
}

impl<'d> DecoderSession<'d> {
    pub(super) fn new(decoder: &'d VaeDecoder, height: usize, width: usize) -> Result<DecoderSession<'d>, VaeError> {
        if height == 0 || width == 0 || height > MAX_SIDE || width > MAX_SIDE {
            return Err(VaeError::Latent {
                what: format!("of {height}×{width} pixels"),
                reason: format!("each side must have 1 to {MAX_SIDE} latent pixels; decode in tiles of such a size"),
            });
        }
        Ok(DecoderSession {
            decoder,
            height,
            width,
            latents: 0,
            histories: (0..decoder.slots).map(|_| History::default()).collect(),
            sums: History::default(),
            is_started: vec![false; decoder.slots],
            spares: Vec::new(),
            pixels: Vec::new(),
            projections: Vec::new(),
            scratch: Scratch::default(),
            out: Vec::new(),
            count: Count::default(),
        })
    }

    /// Walks four latent frames without data: histories are full after the third, and the fourth meets them full.
    pub(super) fn predict(
        decoder: &VaeDecoder,
        height: usize,
        width: usize,
        threads: usize,
    ) -> Result<DecoderMemory, VaeError> {
        let mut session = DecoderSession::new(decoder, height, width)?;
        for _ in 0..4 {
            session.step(None, None)?;
            session.out.clear();
        }
        let mut memory = session.memory();
        // A device's is counted already.
        memory.working +=
            if decoder.is_on_device() { 0 } else { threads * session.count.scratch + session.count.packed };
        Ok(memory)
    }

    /// Memory held now, and at most so far for working frames.
    pub fn memory(&self) -> DecoderMemory {
        let history = self.histories.iter().flatten().chain(&self.sums).flatten().map(Map::bytes).sum();
        // A device's scratch belongs to its kernels.
        let scratch = if self.decoder.is_on_device() { self.count.scratch } else { self.scratch.bytes() };
        DecoderMemory {
            weights: self.decoder.weight_bytes(),
            history,
            working: self.count.most_frames - history + self.count.attention + self.count.out + scratch,
        }
    }

    /// Latent frames pushed so far.
    pub fn latent_frames(&self) -> usize {
        self.latents
    }

    /// Decodes the next latent frame, `frame` of `latent`: one video frame from the first, `temporal_scale` from each later
    /// one. Values are as the decoder leaves them, not clamped.
    ///
    /// # Errors
    /// A latent of other extents than the session's, or a frame that it does not have; kernels of another kind than the decoder was
    /// opened for.
    pub fn push<'k>(
        &mut self,
        kernels: impl Into<DecoderKernels<'k>>,
        latent: &Latent,
        frame: usize,
    ) -> Result<Vec<VideoFrame>, VaeError> {
        let kernels = kernels.into();
        kernels.check(&self.decoder.norm_out)?;
        let config = self.decoder.config();
        if latent.channels() != config.z_dim || (latent.height(), latent.width()) != (self.height, self.width) {
            return Err(VaeError::Latent {
                what: format!("of {}", latent.shape()),
                reason: format!(
                    "this clip has latent frames of {} channels, {}×{} pixels",
                    config.z_dim, self.height, self.width
                ),
            });
        }
        let frame = latent.frame(frame)?;
        self.step(Some(kernels), Some(frame))?;
        Ok(std::mem::take(&mut self.out))
    }

    fn step(&mut self, kernels: Option<DecoderKernels<'_>>, latent: Option<Frame>) -> Result<(), VaeError> {
        let decoder = self.decoder;
        let (height, width) = (self.height, self.width);
        let channels = decoder.config().z_dim;
        self.count.out = 0;
        // The latent and its 1 × 1 convolution are the caller's size, not a level's: made here, dropped here.
        let mut input = Map::new(decoder.kind(), (height, width, channels), kernels)?;
        if let Some(latent) = latent {
            input.fill(latent)?;
        }
        let quantised = self.take(kernels, (height, width, channels))?;
        let quantised = self.conv_into(kernels, &decoder.post_quant, &input, quantised, false)?;
        let middle = decoder.conv_in.weights.shape().outputs;
        let x = self.take(kernels, (height, width, middle))?;
        let mut x = self.causal(kernels, &decoder.conv_in, quantised, x, false)?;
        x = self.residual(kernels, &decoder.middle.0, x)?;
        x = self.attention(kernels, &decoder.middle.1, x)?;
        x = self.residual(kernels, &decoder.middle.2, x)?;
        self.level(kernels, 0, x)?;
        self.latents += 1;
        Ok(())
    }

    /// A level's residual blocks, its upsampling, and all finer levels.
    fn level(&mut self, kernels: Option<DecoderKernels<'_>>, index: usize, mut x: Map) -> Result<(), VaeError> {
        let decoder = self.decoder;
        let Some(level) = decoder.levels.get(index) else { return self.head(kernels, x) };
        for block in &level.residuals {
            x = self.residual(kernels, block, x)?;
        }
        let Some(upsampler) = &level.upsampler else { return self.level(kernels, index + 1, x) };
        match &upsampler.time {
            Some(time) if self.is_started[time.slot] => {
                for half in &time.halves {
                    let frame = self.take(kernels, (x.height, x.width, x.channels))?;
                    let frame = self.with_history(kernels, half, time.slot, &x, frame, false)?;
                    self.finer(kernels, upsampler, index, frame)?;
                }
                self.remember(time.slot, x);
                Ok(())
            }
            time => {
                if let Some(time) = time {
                    self.is_started[time.slot] = true;
                }
                self.finer(kernels, upsampler, index, x)
            }
        }
    }

    /// Doubles rows and columns of `x` and goes on with the next level.
    fn finer(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        upsampler: &Upsampler,
        index: usize,
        x: Map,
    ) -> Result<(), VaeError> {
        let channels = upsampler.resample.shape().outputs;
        let doubled = self.take(kernels, (2 * x.height, 2 * x.width, channels))?;
        let doubled = self.conv_into(kernels, &upsampler.resample, &x, doubled, false)?;
        self.spares.push(x);
        self.drop_spares();
        self.level(kernels, index + 1, doubled)?;
        self.drop_spares();
        Ok(())
    }

    /// Gives memory back between levels, whose maps have other extents: no level's lie idle beside another's. INT8 keeps them: it takes
    /// less memory as it is, and new pages cost it a greater part of its time. A device would have to be waited for.
    fn drop_spares(&mut self) {
        if self.decoder.path() == DecoderPath::F32 && !self.decoder.is_on_device() {
            for map in self.spares.drain(..) {
                self.count.frames -= map.bytes();
            }
        }
    }

    /// The last norm and convolution: a video frame.
    fn head(&mut self, kernels: Option<DecoderKernels<'_>>, x: Map) -> Result<(), VaeError> {
        let decoder = self.decoder;
        let normed = self.norm(kernels, &decoder.norm_out, &x, false)?;
        self.spares.push(x);
        let rgb = self.last(kernels, &normed)?;
        self.spares.push(normed);
        self.count.out += rgb.height * rgb.width * 3 * size_of::<f32>();
        if let Some(values) = rgb.read()? {
            self.out.push(VideoFrame::from_signed(rgb.height, rgb.width, values));
        }
        self.spares.push(rgb);
        Ok(())
    }

    /// The causal convolution with three outputs. What this frame adds to the next one and to the one after it is kept instead of the
    /// frame itself, a thirtieth of its size.
    fn last(&mut self, kernels: Option<DecoderKernels<'_>>, x: &Map) -> Result<Map, VaeError> {
        let decoder = self.decoder;
        let [to_second, to_next, here] = &decoder.conv_out.taps;
        let [next, second] = std::mem::take(&mut self.sums);
        let added = |session: &mut Self, filter: &Filter, sum: Option<Map>| {
            let is_added = sum.is_some();
            let out = match sum {
                Some(sum) => sum,
                None => session.take(kernels, (x.height, x.width, filter.shape().outputs))?,
            };
            session.conv_into(kernels, filter, x, out, is_added)
        };
        let rgb = added(self, here, next)?;
        let next = added(self, to_next, second)?;
        let second = added(self, to_second, None)?;
        self.sums = [Some(next), Some(second)];
        Ok(rgb)
    }

    fn residual(&mut self, kernels: Option<DecoderKernels<'_>>, block: &Residual, x: Map) -> Result<Map, VaeError> {
        let extent = (x.height, x.width, block.outputs);
        debug_assert_eq!(x.channels, block.inputs, "channels of a residual block");
        let normed = self.norm(kernels, &block.norm1, &x, block.conv1.weights.is_int8())?;
        let inner = self.take(kernels, extent)?;
        let inner = self.causal(kernels, &block.conv1, normed, inner, false)?;
        let normed = self.norm(kernels, &block.norm2, &inner, block.conv2.weights.is_int8())?;
        self.spares.push(inner);
        let base = match &block.shortcut {
            None => x,
            Some(shortcut) => {
                let base = self.take(kernels, extent)?;
                let base = self.conv_into(kernels, shortcut, &x, base, false)?;
                self.spares.push(x);
                base
            }
        };
        self.causal(kernels, &block.conv2, normed, base, true)
    }

    fn attention(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        weights: &Attention,
        mut x: Map,
    ) -> Result<Map, VaeError> {
        let (height, width, channels) = (x.height, x.width, weights.channels);
        let normed = self.norm(kernels, &weights.norm, &x, false)?;
        match &weights.projections {
            Projections::Matrices { to_qkv, to_qkv_bias, proj, proj_bias } => {
                self.count.attention = 4 * height * width * channels * size_of::<f32>();
                self.attend(kernels, [(to_qkv, to_qkv_bias), (proj, proj_bias)], &normed, &mut x)?;
                self.spares.push(normed);
                Ok(x)
            }
            Projections::Filters(filters) => {
                let [to_qkv, proj] = &**filters;
                self.count.attention = opencl::Kernels::pixel_attention_scratch(height, width, channels);
                let qkv = self.take(kernels, (height, width, 3 * channels))?;
                let qkv = self.conv_into(kernels, to_qkv, &normed, qkv, false)?;
                // The normed pixels are used up; what was attended to goes in their place.
                let mut attended = normed;
                if let (Some(DecoderKernels::OpenCl(kernels)), Some(qkv), Some(attended)) =
                    (kernels, qkv.device(), attended.device_mut())
                {
                    kernels.pixel_attention(qkv, attended)?;
                }
                self.spares.push(qkv);
                let x = self.conv_into(kernels, proj, &attended, x, true)?;
                self.spares.push(attended);
                Ok(x)
            }
        }
    }

    /// `x ← x + attention(normed)` by the CPU's products; weight and bias of both projections.
    fn attend(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        [(to_qkv, to_qkv_bias), (proj, proj_bias)]: [(&[f32], &[f32]); 2],
        normed: &Map,
        x: &mut Map,
    ) -> Result<(), VaeError> {
        let (pixels, channels) = (x.height * x.width, proj_bias.len());
        if let (Some(DecoderKernels::Cpu(kernels)), Some(x), Some(frame)) = (kernels, x.values_mut(), normed.values()) {
            self.pixels.resize(pixels * channels, 0.0);
            self.projections.resize(3 * pixels * channels, 0.0);
            for (y, row) in self.pixels.chunks_exact_mut(normed.width * channels).enumerate() {
                row.copy_from_slice(frame.row(y));
            }
            let project = |weight: &[f32], bias: &[f32], input: &[f32], out: &mut [f32], workspace: &mut Workspace| {
                let outputs = bias.len();
                let input = Rows::dense("pixels", input, pixels, channels)?;
                let weight = FloatWeights::OutIn(Rows::dense("weights", weight, outputs, channels)?);
                let epilogue = FloatEpilogue { bias: Some(bias), ..FloatEpilogue::default() };
                let out = RowsMut::dense("projections", out, pixels, outputs)?;
                let sink = GemmSink::F32 { out, operands: Operands::F32 };
                kernels.gemm_f32(input, &weight, Operands::F32, &epilogue, sink, workspace)
            };
            let workspace = &mut self.scratch.workspace;
            project(to_qkv, to_qkv_bias, &self.pixels, &mut self.projections, workspace)?;
            let part = |index: usize| {
                Rows::new("projection", &self.projections[index * channels..], pixels, channels, 3 * channels)
            };
            let out = RowsMut::dense("attention", &mut self.pixels, pixels, channels)?;
            let sink = AttentionSink::F32 { out, operands: Operands::F32 };
            kernels.attention_f32(part(0)?, part(1)?, part(2)?, 1, Operands::F32, sink, workspace)?;
            let out = &mut self.projections[..pixels * channels];
            project(proj, proj_bias, &self.pixels, out, workspace)?;
            for (y, added) in out.chunks_exact(normed.width * channels).enumerate() {
                for (x, &added) in x.row_mut(y).iter_mut().zip(added) {
                    *x += added;
                }
            }
        }
        Ok(())
    }

    /// `SiLU` follows every norm but the attention's. As codes where an INT8 convolution comes next.
    fn norm(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        gain: &Gain,
        x: &Map,
        is_coded: bool,
    ) -> Result<Map, VaeError> {
        let is_plain = std::ptr::eq(gain, &raw const self.decoder.middle.1.norm);
        let activation = if is_plain { Activation::Identity } else { Activation::Silu };
        let kind = if is_coded { self.decoder.code_kind() } else { self.decoder.kind() };
        let mut out = self.take_as(kernels, kind, (x.height, x.width, x.channels))?;
        if let Some(kernels) = kernels {
            kernels.norm(x, gain, activation, &mut out, &mut self.scratch.workspace)?;
        }
        Ok(out)
    }

    /// A convolution without history into `out`, or added to it.
    fn conv_into(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        weights: &Filter,
        x: &Map,
        mut out: Map,
        is_added: bool,
    ) -> Result<Map, VaeError> {
        self.count.use_filter(weights, x);
        if let Some(kernels) = kernels {
            kernels.conv(&[Some(x)], weights, (&mut out, is_added), &mut self.scratch)?;
        }
        Ok(out)
    }

    /// A causal convolution of `x` and what the slot remembers; then `x` is remembered.
    fn causal(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        conv: &CausalConv,
        x: Map,
        out: Map,
        is_added: bool,
    ) -> Result<Map, VaeError> {
        let out = self.with_history(kernels, &conv.weights, conv.slot, &x, out, is_added)?;
        self.remember(conv.slot, x);
        Ok(out)
    }

    fn with_history(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        filter: &Filter,
        slot: usize,
        x: &Map,
        mut out: Map,
        is_added: bool,
    ) -> Result<Map, VaeError> {
        self.count.use_filter(filter, x);
        if let Some(kernels) = kernels {
            let [older, newer] = self.histories[slot].each_ref().map(Option::as_ref);
            kernels.conv(&[older, newer, Some(x)], filter, (&mut out, is_added), &mut self.scratch)?;
        }
        Ok(out)
    }

    fn remember(&mut self, slot: usize, x: Map) {
        let [older, newer] = &mut self.histories[slot];
        let forgotten = std::mem::replace(older, newer.replace(x));
        self.spares.extend(forgotten);
    }

    /// A frame to be overwritten: one that is free, else a new one.
    fn take(&mut self, kernels: Option<DecoderKernels<'_>>, extent: (usize, usize, usize)) -> Result<Map, VaeError> {
        self.take_as(kernels, self.decoder.kind(), extent)
    }

    /// The same, of another kind.
    fn take_as(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        kind: MapKind,
        extent: (usize, usize, usize),
    ) -> Result<Map, VaeError> {
        if let Some(at) = self.spares.iter().position(|map| map.is(kind, extent)) {
            return Ok(self.spares.swap_remove(at));
        }
        let map = Map::new(kind, extent, kernels)?;
        self.count.make(&map);
        Ok(map)
    }
}
