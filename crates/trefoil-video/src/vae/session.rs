//! Decoding a clip, one latent frame at a time.
//!
//! Every causal convolution remembers the last two frames it saw. So a frame is decoded as a whole, depth first: where the
//! frame rate doubles, the first of the two frames goes through all finer levels before the second is made. No level ever
//! holds more than one frame besides its histories, whatever the number of frames of the clip.
//!
//! The time convolutions differ (Wan2.1's "Rep" marker): the first frame of a clip skips them **and** does not enter their
//! history, so the second frame sees zeros, not the first frame.

use super::bands::Band;
use super::compute::{Filter, Scratch};
use super::decoder::{Upsampler, VaeDecoder};
use super::map::{History, Map};
use super::{DecoderKernels, DecoderPath, Latent, VaeError};
use crate::output::VideoFrame;
use serde::Serialize;
use trefoil_kernels::Frame;

/// Largest latent side: 8,192 pixels at a scale of 8.
pub(super) const MAX_SIDE: usize = 1024;

/// Latent frames of a prediction: histories are full after the third, and the fourth meets them full.
const PREDICTED: usize = 4;

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

/// What decoding in bands takes.
#[derive(Debug)]
pub(super) struct BandedMemory {
    /// Up to the end of the coarsest level.
    pub(super) front: DecoderMemory,
    /// What that leaves of each latent frame.
    pub(super) features: usize,
    /// Of each band after that.
    pub(super) bands: Vec<DecoderMemory>,
}

/// A clip being decoded. Latent frames go in with [`DecoderSession::push`], video frames come out.
#[derive(Debug)]
pub struct DecoderSession<'d> {
    pub(super) decoder: &'d VaeDecoder,
    height: usize,
    width: usize,
    latents: usize,
    /// The part of the picture that this session makes; none is all of it.
    pub(super) band: Option<Band>,
    pub(super) histories: Vec<History>,
    /// What past frames add to the next picture and to the one after it.
    pub(super) sums: History,
    /// Which time convolutions have let the first frame pass.
    is_started: Vec<bool>,
    /// Frames not in use, to be used again.
    pub(super) spares: Vec<Map>,
    /// Normed pixels, and queries, keys and values of the attention.
    pub(super) pixels: Vec<f32>,
    pub(super) projections: Vec<f32>,
    pub(super) scratch: Scratch,
    /// Frames of the current latent frame.
    pub(super) out: Vec<VideoFrame>,
    pub(super) count: Count,
}

/// Bytes now and at most.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Count {
    /// Of all maps.
    pub(super) frames: usize,
    most_frames: usize,
    pub(super) attention: usize,
    pub(super) out: usize,
    /// Of the kernels: of a thread, or of a device.
    scratch: usize,
    /// The largest filter that is packed for its use.
    packed: usize,
}

impl Count {
    pub(super) fn make(&mut self, map: &Map) {
        self.frames += map.bytes();
        self.most_frames = self.most_frames.max(self.frames);
    }

    pub(super) fn use_filter(&mut self, filter: &Filter, x: &Map) {
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
            band: None,
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

    /// The same for one band of the picture. It begins where [`DecoderSession::enter`] of a whole session ends.
    pub(super) fn of_band(decoder: &'d VaeDecoder, band: Band) -> Result<DecoderSession<'d>, VaeError> {
        let (height, width) = band.latent();
        Ok(DecoderSession { band: Some(band), ..DecoderSession::new(decoder, height, width)? })
    }

    /// Walks [`PREDICTED`] latent frames without data.
    pub(super) fn predict(
        decoder: &VaeDecoder,
        height: usize,
        width: usize,
        threads: usize,
    ) -> Result<DecoderMemory, VaeError> {
        let mut session = DecoderSession::new(decoder, height, width)?;
        for _ in 0..PREDICTED {
            session.step(None, None)?;
            session.out.clear();
        }
        Ok(session.predicted(threads))
    }

    /// The same for a clip in bands.
    pub(super) fn predict_bands(
        decoder: &VaeDecoder,
        (height, width): (usize, usize),
        bands: &[Band],
        threads: usize,
    ) -> Result<BandedMemory, VaeError> {
        let mut front = DecoderSession::new(decoder, height, width)?;
        let mut features = front.features(None, None)?;
        for _ in 1..PREDICTED {
            features = front.features(None, None)?;
        }
        let mut memory = Vec::new();
        for band in bands {
            let mut session = DecoderSession::of_band(decoder, band.clone())?;
            for _ in 0..PREDICTED {
                session.step_from(None, &features)?;
            }
            memory.push(session.predicted(threads));
        }
        Ok(BandedMemory { front: front.predicted(threads), features: features.bytes(), bands: memory })
    }

    /// Memory after a walk without data.
    fn predicted(&self, threads: usize) -> DecoderMemory {
        let mut memory = self.memory();
        // A device's is counted already.
        memory.working +=
            if self.decoder.is_on_device() { 0 } else { threads * self.count.scratch + self.count.packed };
        memory
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
        let frame = self.checked(kernels, latent, frame)?;
        self.step(Some(kernels), Some(frame))?;
        Ok(std::mem::take(&mut self.out))
    }

    /// The frame, if the decoder can take it on these kernels.
    fn checked(&self, kernels: DecoderKernels<'_>, latent: &Latent, frame: usize) -> Result<Frame, VaeError> {
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
        latent.frame(frame)
    }

    /// What the part before the bands makes of the next latent frame.
    pub(super) fn push_front(
        &mut self,
        kernels: DecoderKernels<'_>,
        latent: &Latent,
        frame: usize,
    ) -> Result<Map, VaeError> {
        let frame = self.checked(kernels, latent, frame)?;
        self.features(Some(kernels), Some(frame))
    }

    fn features(&mut self, kernels: Option<DecoderKernels<'_>>, latent: Option<Frame>) -> Result<Map, VaeError> {
        let x = self.enter(kernels, latent)?;
        // From here on it is the caller's.
        self.count.frames -= x.bytes();
        self.latents += 1;
        Ok(x)
    }

    /// The band's part of the frames of the next latent frame, from what [`DecoderSession::push_front`] made of it.
    pub(super) fn push_band(
        &mut self,
        kernels: DecoderKernels<'_>,
        features: &Map,
    ) -> Result<Vec<VideoFrame>, VaeError> {
        self.step_from(Some(kernels), features)?;
        Ok(std::mem::take(&mut self.out))
    }

    fn step_from(&mut self, kernels: Option<DecoderKernels<'_>>, features: &Map) -> Result<(), VaeError> {
        self.count.out = 0;
        let x = match &self.band {
            Some(band) => features.part(band.kept(0))?,
            None => return Err(VaeError::Bands { bands: 1, reason: "a whole picture has no bands".to_string() }),
        };
        self.count.make(&x);
        self.leave(kernels, 0, x)?;
        self.latents += 1;
        Ok(())
    }

    fn step(&mut self, kernels: Option<DecoderKernels<'_>>, latent: Option<Frame>) -> Result<(), VaeError> {
        self.count.out = 0;
        let x = self.enter(kernels, latent)?;
        self.leave(kernels, 0, x)?;
        self.latents += 1;
        Ok(())
    }

    /// From the latent to the end of the coarsest level's residual blocks.
    fn enter(&mut self, kernels: Option<DecoderKernels<'_>>, latent: Option<Frame>) -> Result<Map, VaeError> {
        let decoder = self.decoder;
        let (height, width) = (self.height, self.width);
        let channels = decoder.config().z_dim;
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
        self.residuals(kernels, 0, x)
    }

    /// A level's residual blocks.
    fn residuals(&mut self, kernels: Option<DecoderKernels<'_>>, index: usize, mut x: Map) -> Result<Map, VaeError> {
        let decoder = self.decoder;
        for block in &decoder.levels[index].residuals {
            x = self.residual(kernels, block, x)?;
        }
        Ok(x)
    }

    /// What follows a level's residual blocks: its upsampling and all finer levels, or the head.
    fn leave(&mut self, kernels: Option<DecoderKernels<'_>>, index: usize, x: Map) -> Result<(), VaeError> {
        let decoder = self.decoder;
        let Some(upsampler) = &decoder.levels[index].upsampler else { return self.head(kernels, x) };
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
        let x = self.residuals(kernels, index + 1, doubled)?;
        let x = self.kept(index + 1, x)?;
        self.leave(kernels, index + 1, x)?;
        self.drop_spares();
        Ok(())
    }

    /// What the finer levels need of a level's pixels: in a band its neighbourhood, which shrinks from level to level.
    fn kept(&mut self, index: usize, x: Map) -> Result<Map, VaeError> {
        let part = match &self.band {
            // The head's pixels are cut when they are a picture.
            Some(band) if index + 1 < self.decoder.levels.len() && !band.keeps_all(index) => {
                x.part(band.kept(index))?
            }
            _ => return Ok(x),
        };
        self.count.make(&part);
        self.spares.push(x);
        self.drop_spares();
        Ok(part)
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
}
