//! Denoising a clip: its conditions, its state, and lanes that carry the state along the flattened trajectory.
//!
//! Patch embedding belongs to a branch's first block execution, head (and, after the last branch, the sampler's step) to its
//! last. So the state between any two executions is the hidden state and the running latent (with guidance also the first
//! branch's velocity, with a multi-step solver its history), and a lane can take over anywhere.

mod clip;
mod lane;

pub use clip::{Clip, ClipState, MAX_TOKENS};
pub(crate) use clip::{ClipOutline, latent_shape, text_rows};
pub use lane::{Event, Lane};

use crate::VideoError;
use crate::schedule::Place;
use serde::Serialize;
use std::time::Instant;

/// The one transfer at the cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Handoff {
    /// Execution that comes next.
    pub at: usize,
    /// Its step.
    pub step: usize,
    /// Its block.
    pub block: usize,
    /// Bytes of the hidden state, tokens × d × 4; 0 at the start of a branch, which embeds the latent anew.
    pub hidden_bytes: usize,
    /// Bytes of the patchified running latent, tokens × d_z × 4.
    pub latent_bytes: usize,
    /// Bytes of whatever guidance and a multi-step solver add.
    pub extra_bytes: usize,
}

/// What one engine did of a clip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LaneReport {
    /// Engine.
    pub engine: String,
    /// Numeric path.
    pub path: crate::NumericPath,
    /// Block executions.
    pub blocks: usize,
    /// Wall time in milliseconds, host work included.
    pub ms: f64,
}

/// What a denoising run did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DenoiseReport {
    /// Block executions B.
    pub blocks: usize,
    /// First execution of the second engine.
    pub cut: usize,
    /// Engines that did something, in order.
    pub lanes: Vec<LaneReport>,
    /// Transfers between engines: one, or none where one engine did everything.
    pub handoffs: Vec<Handoff>,
}

/// Carries `state` to the end: the first lane runs executions up to `cut`, the second the rest. With one lane `cut` is ignored.
///
/// # Errors
/// A cut outside 0..=B, no lane, and what the engines refuse. The state is then wherever it had got to.
pub fn denoise(
    lanes: &mut [Lane],
    clip: &Clip,
    state: &mut ClipState,
    cut: usize,
    watch: &mut dyn FnMut(&Event<'_>) -> Result<(), VideoError>,
) -> Result<DenoiseReport, VideoError> {
    let blocks = clip.trajectory().blocks();
    if cut > blocks {
        return Err(VideoError::Cut { cut, blocks });
    }
    let ends: &[usize] = match lanes.len() {
        1 => &[blocks],
        2 => &[cut, blocks],
        other => {
            let reason = format!("{other} lanes; a trajectory with one cut takes one or two");
            return Err(VideoError::Engine { engine: "denoise".to_string(), reason });
        }
    };
    let mut report = DenoiseReport { blocks, cut: ends[0], lanes: Vec::new(), handoffs: Vec::new() };
    for (lane, &end) in lanes.iter_mut().zip(ends) {
        let first = state.next();
        if first >= end {
            continue;
        }
        if !report.lanes.is_empty() {
            report.handoffs.push(handoff(clip, state));
        }
        let start = Instant::now();
        lane.run(clip, state, end, watch)?;
        report.lanes.push(LaneReport {
            engine: lane.engine().name().to_string(),
            path: lane.engine().path(),
            blocks: end - first,
            ms: start.elapsed().as_secs_f64() * 1e3,
        });
    }
    Ok(report)
}

/// What crosses if another engine goes on from here.
pub fn handoff(clip: &Clip, state: &ClipState) -> Handoff {
    let Place { step, block, .. } = clip.trajectory().place(state.next());
    Handoff {
        at: state.next(),
        step,
        block,
        hidden_bytes: if block == 0 { 0 } else { state.hidden_bytes() },
        latent_bytes: state.latent_bytes(),
        extra_bytes: state.extra_bytes(),
    }
}
