//! `T_V`: what the last stage costs a clip, alone and while the first engine runs (HeteroVDiff 3.3, Table 1).

use crate::VideoError;
use crate::denoise::{Clip, Lane};
use crate::rates::cycle;
use crate::stream::Cost;
use crate::tensors::Tensor;
use crate::threads::{OnDrop, panicked};
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

    /// What a clip's last stage costs in a forecast.
    pub fn cost(&self) -> Cost {
        Cost { solo: self.solo_ms.median, corun: self.pipeline_ms() }
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
            cycle(lane, clip, noise, keep_going, &mut |_, _| {
                blocks.fetch_add(1, Ordering::AcqRel);
                !is_over.load(Ordering::Acquire)
            })
        });
        while blocks.load(Ordering::Acquire) < WARM_UP && !load.is_finished() {
            std::thread::sleep(Duration::from_micros(200));
        }
        // Whatever becomes of the stage, the load ends: nobody may wait for it for ever.
        let over = OnDrop::new(|| is_over.store(true, Ordering::Release));
        let timed = sampled(stage, keep_going);
        drop(over);
        load.join().unwrap_or_else(|cause| Err(panicked("the engine beside the last stage", &*cause)))?;
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
    // In bands every latent frame is met several times.
    let mut seconds = [0f64; TIMED];
    let mut running: Option<(usize, Instant)> = None;
    let mut stop = |running: &mut Option<(usize, Instant)>| {
        if let Some((frame, since)) = running.take() {
            seconds[frame] += since.elapsed().as_secs_f64();
        }
    };
    let mut before = |frame: usize| {
        stop(&mut running);
        keep_going()?;
        running = Some((frame, Instant::now()));
        Ok::<(), VideoError>(())
    };
    decoder.decode_clip(kernels, &latent, &mut before, &mut |_| Ok(()))?;
    stop(&mut running);
    let later = (frames.saturating_sub(timed)) as f64 * seconds[timed - 1];
    Ok((seconds.iter().sum::<f64>() + later) * 1e3)
}
