//! The layers of a decoder on a session's maps: what each takes, and where its frames come from and go.

use super::compute::{Filter, Gain};
use super::decoder::{Attention, CausalConv, Projections, Residual};
use super::map::{Map, MapKind};
use super::session::DecoderSession;
use super::{DecoderKernels, VaeError};
use crate::output::VideoFrame;
use trefoil_kernels::{
    Activation, AttentionSink, FloatEpilogue, FloatWeights, GemmSink, Operands, Rows, RowsMut, Workspace, opencl,
};

impl DecoderSession<'_> {
    /// The last norm and convolution: a video frame.
    pub(super) fn head(&mut self, kernels: Option<DecoderKernels<'_>>, x: Map) -> Result<(), VaeError> {
        let decoder = self.decoder;
        let normed = self.norm(kernels, &decoder.norm_out, &x, false)?;
        self.spares.push(x);
        let rgb = self.last(kernels, &normed)?;
        self.spares.push(normed);
        let picture = match &self.band {
            Some(band) => &rgb.part(band.kept(decoder.levels.len() - 1))?,
            None => &rgb,
        };
        let (height, width) = (picture.height, picture.width);
        self.count.out += height * width * 3 * size_of::<f32>();
        if let Some(values) = picture.read()? {
            self.out.push(VideoFrame::from_signed(height, width, values));
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

    pub(super) fn residual(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        block: &Residual,
        x: Map,
    ) -> Result<Map, VaeError> {
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

    pub(super) fn attention(
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
    pub(super) fn conv_into(
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
    pub(super) fn causal(
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

    pub(super) fn with_history(
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

    pub(super) fn remember(&mut self, slot: usize, x: Map) {
        let [older, newer] = &mut self.histories[slot];
        let forgotten = std::mem::replace(older, newer.replace(x));
        self.spares.extend(forgotten);
    }

    /// A frame to be overwritten: one that is free, else a new one.
    pub(super) fn take(
        &mut self,
        kernels: Option<DecoderKernels<'_>>,
        extent: (usize, usize, usize),
    ) -> Result<Map, VaeError> {
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
