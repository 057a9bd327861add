//! `T_V`: what the last stage costs a clip, alone and while the first engine runs (HeteroVDiff 3.3, Table 1).

use crate::VideoError;
use crate::denoise::{Clip, Lane};
use crate::rates::cycle;
use crate::tensors::Tensor;
use crate::vae::{DecoderKernels, Latent, VaeDecoder};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil_core::Samples;

/// Short stages are timed again until this much time is used, at most [`MOST_SAMPLES`] times: the first time memory is touched and caches are
/// cold, which a stream sees once.
const ENOUGH: Duration = Duration::from_secs(2);
const MOST_SAMPLES: usize = 5;
/// Blocks that the other engine runs before the stage beside it is timed.
const WARM_UP: usize = 2;

/// Milliseconds of the last stage for one clip.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LastStageRate {
    /// While the other engine is idle.
    pub solo_ms: Samples,
    /// While the other engine runs blocks; absent with one engine.
    pub corun_ms: Option<Samples>,
}

impl LastStageRate {
    /// The rate that a pipeline sees: co-run where there is one.
    pub fn pipeline_ms(&self) -> f64 {
        self.corun_ms.as_ref().unwrap_or(&self.solo_ms).median
    }
}

/// Times `stage`, which does the work of one clip (or a known part of it) and says what a clip costs in milliseconds: alone, and
/// while `beside` runs blocks.
///
/// # Errors
/// What the stage or the engine refuses; a run that was interrupted through `keep_going`.
pub fn measure_last_stage(
    stage: &mut (dyn FnMut() -> Result<f64, VideoError> + Send),
    beside: Option<(&mut Lane, &Clip, &Tensor)>,
    keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
) -> Result<LastStageRate, VideoError> {
    let solo_ms = sampled(stage, keep_going)?;
    let Some((lane, clip, noise)) = beside else { return Ok(LastStageRate { solo_ms, corun_ms: None }) };
    let (is_over, blocks) = (AtomicBool::new(false), AtomicUsize::new(0));
    let corun_ms = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let ran = cycle(lane, clip, noise, keep_going, &mut |_, _| {
                blocks.fetch_add(1, Ordering::AcqRel);
                !is_over.load(Ordering::Acquire)
            });
            // The stage must not wait for blocks that never come.
            blocks.fetch_add(WARM_UP, Ordering::AcqRel);
            ran
        });
        while blocks.load(Ordering::Acquire) < WARM_UP {
            std::thread::sleep(Duration::from_micros(200));
        }
        let timed = sampled(stage, keep_going);
        is_over.store(true, Ordering::Release);
        load.join().unwrap_or_else(|_| Err(panicked()))?;
        timed
    })?;
    Ok(LastStageRate { solo_ms, corun_ms: Some(corun_ms) })
}

fn sampled(
    stage: &mut (dyn FnMut() -> Result<f64, VideoError> + Send),
    keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
) -> Result<Samples, VideoError> {
    let begun = Instant::now();
    let mut values = Vec::new();
    while values.is_empty() || (values.len() < MOST_SAMPLES && begun.elapsed() < ENOUGH) {
        keep_going()?;
        values.push(stage()?);
    }
    Samples::from_values(&mut values)
        .ok_or_else(|| VideoError::Engine { engine: "last stage".to_string(), reason: "it was not timed".to_string() })
}

fn panicked() -> VideoError {
    VideoError::Engine { engine: "last stage".to_string(), reason: "the engine beside it panicked".to_string() }
}

/// Milliseconds of decoding a clip whose latent has `[frames, height, width]`, from its first three latent frames: the first and the
/// second differ from all later ones, which cost what the third does.
///
/// # Errors
/// Extents that the decoder refuses; an error of `keep_going`, which is asked before each latent frame.
pub fn time_decoding<'k>(
    decoder: &VaeDecoder,
    kernels: impl Into<DecoderKernels<'k>>,
    [frames, height, width]: [usize; 3],
    keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
) -> Result<f64, VideoError> {
    const TIMED: usize = 3;
    let channels = decoder.config().z_dim;
    let timed = frames.clamp(1, TIMED);
    let len = channels * timed * height * width;
    let mut values = crate::noise::torch_normals(41, len.max(16));
    values.truncate(len);
    let latent = Latent::new(channels, timed, height, width, values)?.denormalise(decoder.config())?;
    let kernels = kernels.into();
    let mut session = decoder.session(height, width)?;
    let (mut total, mut last) = (0.0, 0.0);
    for frame in 0..timed {
        keep_going()?;
        let begun = Instant::now();
        session.push(kernels, &latent, frame)?;
        last = begun.elapsed().as_secs_f64() * 1e3;
        total += last;
    }
    Ok(total + (frames.saturating_sub(timed)) as f64 * last)
}
