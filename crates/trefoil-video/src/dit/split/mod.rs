//! Blocks on two engines at once, column by column: the baseline Hetero-Tensor (HeteroVDiff 6, after HeteroInfer).
//!
//! Both engines hold the whole state. Of every linear layer the CPU computes the first columns and the device the rest, of attention
//! the first heads and the rest; after each of them both get the other's part, because what follows needs whole rows. Norms, the
//! quantisation of operands and an adapter's `x·Aᵀ` are computed by both. That is twelve exchanges a block: ten linear layers and two
//! attentions. On `w8a8` no value depends on who computed it, so the bits are those of one engine.

mod cpu;
mod device;

use super::{BlockScales, Site, ffn_rows, padded};
use crate::VideoError;
use crate::engine::WeightBuffers;
use crate::model::{AttentionView, BlockView, LinearView};
use cpu::CpuSide;
use device::DeviceSide;
use std::ops::Range;
use trefoil_kernels::opencl::{Buffer, Element};
use trefoil_kernels::{Activation, Kernels, RotaryTable, opencl};
use trefoil_weights::tile::TILE;

/// Exchanges of a block.
pub const EXCHANGES_PER_BLOCK: usize = 12;

/// Codes of a row operand, and the scale they have.
#[derive(Debug, Clone, Copy)]
enum Source {
    Input(Site),
    Context(Site),
    Middle(Site),
}

/// Where a linear layer's outputs go.
#[derive(Debug, Clone, Copy)]
enum Target {
    Projected,
    Value(Site),
    Middle(Site),
    /// Added to the state from this row on, times this row of the modulation.
    State(usize, Option<usize>),
}

/// Queries or keys.
#[derive(Debug, Clone, Copy)]
enum Normed {
    Query,
    Key,
}

/// The norm before a layer.
#[derive(Debug, Clone, Copy)]
enum Norm<'a> {
    /// Rows of the modulation: scale, shift.
    Adaptive(usize, usize),
    Affine(&'a [f32], &'a [f32]),
}

/// A part of a linear layer.
#[derive(Debug, Clone, Copy)]
struct Layer<'a> {
    /// The columns of this side.
    view: &'a LinearView<'a>,
    /// Where they begin.
    first: usize,
    /// All columns of the layer.
    width: usize,
    activation: Activation,
}

/// What stays the same during a block.
#[derive(Debug, Clone, Copy)]
struct Run<'a> {
    scales: &'a BlockScales,
    width: usize,
    heads: usize,
    eps: f32,
}

/// Heads of an attention, of which there are `Run::heads`.
#[derive(Debug, Clone)]
struct Heads {
    range: Range<usize>,
    queries: usize,
    keys: usize,
    /// Queries, keys, values, output.
    sites: [Site; 4],
}

/// Conditions as both sides have them.
#[derive(Debug, Clone, Copy)]
pub struct SplitConditions<'a> {
    /// On the CPU.
    pub cpu: super::Conditions<'a>,
    /// On the device.
    pub device: super::DeviceConditions<'a>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct SplitBlocks {
    cpu: CpuSide,
    device: DeviceSide,
    exchanges: usize,
    exchanged_bytes: usize,
}

/// The two engines and the share of columns that the CPU takes.
#[derive(Debug, Clone, Copy)]
pub struct Engines<'a> {
    /// CPU kernels.
    pub cpu: &'a Kernels,
    /// OpenCL kernels.
    pub device: &'a opencl::Kernels,
    /// Weights on the device.
    pub weights: &'a WeightBuffers,
    /// 0 to 1.
    pub cpu_share: f64,
}

impl SplitBlocks {
    /// Bytes of scratch and of both states.
    pub fn bytes(&self) -> usize {
        self.cpu.bytes() + self.device.bytes()
    }

    /// Exchanges so far, and the bytes that crossed, both ways together.
    pub fn exchanges(&self) -> (usize, usize) {
        (self.exchanges, self.exchanged_bytes)
    }

    /// Takes the state over.
    ///
    /// # Errors
    /// Sizes that the device refuses.
    pub fn load(&mut self, engines: &Engines<'_>, hidden: &[f32]) -> Result<(), VideoError> {
        self.cpu.load(hidden);
        self.device.load(engines.device, hidden)
    }

    /// Gives the state back; all work is done after every block.
    pub fn store(&self, hidden: &mut [f32]) {
        hidden.copy_from_slice(self.cpu.state(hidden.len()));
    }

    /// Runs a block on the state of `tokens` rows.
    ///
    /// # Errors
    /// Shapes that do not fit each other, weights that are not quantised, errors of the device.
    pub fn run(
        &mut self,
        engines: &Engines<'_>,
        block: &BlockView<'_>,
        scales: &BlockScales,
        (heads, eps): (usize, f32),
        conditions: &SplitConditions<'_>,
        tokens: usize,
    ) -> Result<(), VideoError> {
        use Site::{CrossIn, CrossKey, CrossOut, CrossQuery, CrossValue, FfnIn, FfnMiddle};
        use Site::{SelfIn, SelfKey, SelfOut, SelfQuery, SelfValue, Text};
        let run = Run { scales, width: block.norm_gain.len(), heads, eps };
        self.cpu.modulate(block.table, conditions.cpu.modulation);
        self.device.modulate(engines, block.table, conditions.device.modulation)?;
        let [self_attention, cross_attention] = &block.attention;
        let text = conditions.cpu.text;
        self.norm(engines, &run, 0..tokens, Norm::Adaptive(1, 0), SelfIn)?;
        let operands = (Source::Input(SelfIn), Source::Input(SelfIn));
        let part =
            Heads { range: 0..0, queries: tokens, keys: tokens, sites: [SelfQuery, SelfKey, SelfValue, SelfOut] };
        self.attend(engines, &run, self_attention, operands, Some(conditions), &part)?;
        self.linear(
            engines,
            &run,
            tokens,
            &self_attention.out,
            Activation::Identity,
            Source::Input(SelfOut),
            Target::State(0, Some(2)),
        )?;
        self.norm(engines, &run, 0..tokens, Norm::Affine(block.norm_gain, block.norm_bias), CrossIn)?;
        self.cpu.quantise_context(engines, &run, &conditions.cpu)?;
        self.device.quantise_context(engines, &run, &conditions.device)?;
        let operands = (Source::Input(CrossIn), Source::Context(Text));
        let part =
            Heads { range: 0..0, queries: tokens, keys: text, sites: [CrossQuery, CrossKey, CrossValue, CrossOut] };
        self.attend(engines, &run, cross_attention, operands, None, &part)?;
        self.linear(
            engines,
            &run,
            tokens,
            &cross_attention.out,
            Activation::Identity,
            Source::Input(CrossOut),
            Target::State(0, None),
        )?;
        let [into, out_of] = &block.ffn;
        let most = ffn_rows(tokens);
        for first in (0..tokens).step_by(most) {
            let rows = most.min(tokens - first);
            self.norm(engines, &run, first..first + rows, Norm::Adaptive(4, 3), FfnIn)?;
            self.linear(
                engines,
                &run,
                rows,
                into,
                Activation::GeluTanh,
                Source::Input(FfnIn),
                Target::Middle(FfnMiddle),
            )?;
            let to = Target::State(first, Some(5));
            self.linear(engines, &run, rows, out_of, Activation::Identity, Source::Middle(FfnMiddle), to)?;
        }
        Ok(())
    }

    fn norm(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        rows: Range<usize>,
        norm: Norm<'_>,
        site: Site,
    ) -> Result<(), VideoError> {
        // The device first: it goes on while the CPU computes.
        self.device.norm(engines, run, rows.clone(), norm, site)?;
        self.cpu.norm(engines, run, rows, norm, site)
    }

    /// `input ← codes of attention`. `rotary` are the conditions where positions count.
    fn attend(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        attention: &AttentionView<'_>,
        (of_queries, of_keys): (Source, Source),
        rotary: Option<&SplitConditions<'_>>,
        part: &Heads,
    ) -> Result<(), VideoError> {
        let Heads { queries, keys, sites: [query_site, key_site, value_site, _], .. } = *part;
        for (linear, gain, from, rows, normed, site) in [
            (&attention.query, attention.query_gain, of_queries, queries, Normed::Query, query_site),
            (&attention.key, attention.key_gain, of_keys, keys, Normed::Key, key_site),
        ] {
            self.linear(engines, run, rows, linear, Activation::Identity, from, Target::Projected)?;
            let (cpu, device): (Option<&RotaryTable>, _) =
                (rotary.map(|both| both.cpu.rotary), rotary.map(|both| both.device.rotary));
            self.device.rms_norm(engines, run, rows, normed, gain, device, site)?;
            self.cpu.rms_norm(engines, run, rows, normed, gain, cpu, site)?;
        }
        self.linear(engines, run, keys, &attention.value, Activation::Identity, of_keys, Target::Value(value_site))?;
        let split = (engines.cpu_share * run.heads as f64).round() as usize;
        let (ours, theirs) = (0..split.min(run.heads), split.min(run.heads)..run.heads);
        let head_dim = run.width / run.heads;
        let columns = ours.end * head_dim;
        if !theirs.is_empty() {
            self.device.attend(engines, run, &Heads { range: theirs, ..part.clone() })?;
        }
        if !ours.is_empty() {
            self.cpu.attend(engines, run, &Heads { range: ours, ..part.clone() })?;
        }
        let (device, cpu) =
            (self.device.input(engines, queries, run.width)?, self.cpu.input(queries * padded(run.width)));
        let bytes = exchange(device, cpu, (0, queries), padded(run.width), columns)?;
        self.count(bytes);
        Ok(())
    }

    /// A linear layer, its columns divided, and the exchange.
    #[allow(clippy::too_many_arguments, reason = "a layer and its place in the block")]
    fn linear(
        &mut self,
        engines: &Engines<'_>,
        run: &Run<'_>,
        rows: usize,
        linear: &LinearView<'_>,
        activation: Activation,
        from: Source,
        to: Target,
    ) -> Result<(), VideoError> {
        let width = linear.bias.len();
        let tiles = width.div_ceil(TILE);
        let split = ((engines.cpu_share * tiles as f64).round() as usize * TILE).min(width);
        if split < width {
            let layer = Layer { view: &linear.columns(split..width)?, first: split, width, activation };
            self.device.linear(engines, run, rows, &layer, from, to)?;
        }
        if split > 0 {
            let layer = Layer { view: &linear.columns(0..split)?, first: 0, width, activation };
            self.cpu.linear(engines, run, rows, &layer, from, to)?;
        }
        let bytes = match to {
            Target::Projected => {
                let (device, cpu) = (self.device.projected(engines, rows, width)?, self.cpu.projected(rows * width));
                exchange(device, cpu, (0, rows), width, split)?
            }
            Target::State(first, _) => {
                let (device, cpu) = (self.device.state(engines, first + rows, width)?, self.cpu.state_mut());
                exchange(device, cpu, (first, rows), width, split)?
            }
            Target::Value(_) => {
                let (device, cpu) = (self.device.value(engines, rows, width)?, self.cpu.value(rows * padded(width)));
                exchange(device, cpu, (0, rows), padded(width), split)?
            }
            Target::Middle(_) => {
                let (device, cpu) = (self.device.middle(engines, rows, width)?, self.cpu.middle(rows * padded(width)));
                exchange(device, cpu, (0, rows), padded(width), split)?
            }
        };
        self.count(bytes);
        Ok(())
    }

    fn count(&mut self, bytes: usize) {
        self.exchanges += 1;
        self.exchanged_bytes += bytes;
    }
}

/// Waits for the device and gives each side the other's columns: the CPU has those below `split`, the device the rest. Returns the bytes
/// that crossed.
fn exchange<T: Element>(
    device: &mut Buffer<T>,
    cpu: &mut [T],
    (first, rows): (usize, usize),
    stride: usize,
    split: usize,
) -> Result<usize, VideoError> {
    let mut device = device.write()?;
    let range = first * stride..(first + rows) * stride;
    let (device, cpu) = (&mut device[range.clone()], &mut cpu[range]);
    for (device, cpu) in device.chunks_exact_mut(stride).zip(cpu.chunks_exact_mut(stride)) {
        device[..split].copy_from_slice(&cpu[..split]);
        cpu[split..].copy_from_slice(&device[split..]);
    }
    Ok(rows * stride * size_of::<T>())
}
