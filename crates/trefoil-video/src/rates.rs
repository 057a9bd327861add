//! Rates: what a block costs on each engine, alone and while the other runs too (HeteroVDiff 3.3, Table 1).

use crate::VideoError;
use crate::config::{DitConfig, PATCH};
use crate::denoise::{Clip, ClipState, Event, Lane};
use crate::noise::torch_normals;
use crate::tensors::Tensor;
use serde::Serialize;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use trefoil_core::Samples;

/// How to measure.
#[derive(Debug, Clone, Copy)]
pub struct RateOptions {
    /// Block executions timed per engine and condition.
    pub samples: usize,
    /// Executions before them that do not count.
    pub warm_up: usize,
}

/// Times of a block on one engine, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EngineRate {
    /// Engine.
    pub engine: String,
    /// Numeric path.
    pub path: crate::NumericPath,
    /// While the other engine is idle.
    pub solo_ms: Samples,
    /// While the other engine runs blocks too; absent with one engine.
    pub corun_ms: Option<Samples>,
}

impl EngineRate {
    /// Co-run median over solo median.
    pub fn slowdown(&self) -> Option<f64> {
        self.corun_ms.as_ref().map(|corun| corun.median / self.solo_ms.median)
    }

    /// The rate that a pipeline sees: co-run where there is one.
    pub fn pipeline_ms(&self) -> f64 {
        self.corun_ms.as_ref().unwrap_or(&self.solo_ms).median
    }
}

/// Latent shape `[C, F, H, W]` with `tokens` tokens: whole frames of 30 × 52 patches (832 × 480 pixels) where they fit, else one
/// frame as square as the number allows.
pub fn shape_for_tokens(config: &DitConfig, tokens: usize) -> [usize; 4] {
    const FRAME: [usize; 2] = [30, 52];
    let frame = FRAME[0] * FRAME[1];
    let [frames, rows, columns] = if tokens > 0 && tokens.is_multiple_of(frame) {
        [tokens / frame, FRAME[0], FRAME[1]]
    } else {
        let rows = (1..=tokens.isqrt()).rev().find(|rows| tokens.is_multiple_of(*rows)).unwrap_or(1);
        [1, rows, tokens / rows]
    };
    [config.channels, frames, rows * PATCH, columns * PATCH]
}

/// Random noise and text of a shape: what rates are measured on. Times do not depend on the values.
pub fn random_inputs(config: &DitConfig, shape: [usize; 4], text_rows: usize) -> (Tensor, Tensor) {
    let fill = |origin: &str, shape: &[usize], seed: u32| Tensor {
        origin: origin.to_string(),
        shape: shape.to_vec(),
        values: {
            let len: usize = shape.iter().product();
            let mut values = torch_normals(seed, len.max(16));
            values.truncate(len);
            values
        },
    };
    (fill("random noise", &shape, 40), fill("random text", &[text_rows, config.text_dim], 41))
}

/// Runs lanes over the first blocks of `clip` again and again: each alone, then all together, and times single blocks.
///
/// Together, every lane runs until all have enough samples, and only executions begun while all ran count.
///
/// # Errors
/// What the engines refuse; a run that was interrupted through `keep_going`.
pub fn measure(
    lanes: &mut [Lane],
    clip: &Clip,
    noise: &Tensor,
    options: RateOptions,
    keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
) -> Result<Vec<EngineRate>, VideoError> {
    let mut rates = Vec::new();
    for lane in lanes.iter_mut() {
        let mut values = Vec::new();
        let mut left = options.warm_up + options.samples;
        cycle(lane, clip, noise, keep_going, &mut |ms| {
            values.push(ms);
            left -= 1;
            left > 0
        })?;
        rates.push(EngineRate {
            engine: lane.engine().name().to_string(),
            path: lane.engine().path(),
            solo_ms: summary(&mut values[options.warm_up..])?,
            corun_ms: None,
        });
    }
    if lanes.len() < 2 {
        return Ok(rates);
    }
    let (barrier, unfinished, failed) =
        (Barrier::new(lanes.len()), AtomicUsize::new(lanes.len()), AtomicBool::new(false));
    let results: Vec<Result<Vec<f64>, VideoError>> = std::thread::scope(|scope| {
        let workers: Vec<_> = lanes
            .iter_mut()
            .map(|lane| {
                let (barrier, unfinished, failed) = (&barrier, &unfinished, &failed);
                scope.spawn(move || {
                    barrier.wait();
                    let mut values = Vec::new();
                    let mut count = 0usize;
                    let ran = cycle(lane, clip, noise, keep_going, &mut |ms| {
                        count += 1;
                        let all_run = unfinished.load(Ordering::Acquire) > 0;
                        if count > options.warm_up && all_run {
                            values.push(ms);
                        }
                        if count == options.warm_up + options.samples {
                            unfinished.fetch_sub(1, Ordering::AcqRel);
                        }
                        // Go on so that the others stay under load.
                        unfinished.load(Ordering::Acquire) > 0 && !failed.load(Ordering::Acquire)
                    });
                    if ran.is_err() {
                        // The others must not wait for this one.
                        failed.store(true, Ordering::Release);
                    }
                    ran.map(|()| values)
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| panicked())).collect()
    });
    for (rate, values) in rates.iter_mut().zip(results) {
        rate.corun_ms = Some(summary(&mut values?)?);
    }
    Ok(rates)
}

fn panicked() -> Result<Vec<f64>, VideoError> {
    Err(VideoError::Engine { engine: "rates".to_string(), reason: "a measuring thread panicked".to_string() })
}

fn summary(values: &mut [f64]) -> Result<Samples, VideoError> {
    Samples::from_values(values).ok_or_else(|| VideoError::Engine {
        engine: "rates".to_string(),
        reason: "no block was timed; ask for at least one sample".to_string(),
    })
}

/// Runs the trajectory from its start, over and over, until `again` says no. Each call of it is one block.
pub(crate) fn cycle(
    lane: &mut Lane,
    clip: &Clip,
    noise: &Tensor,
    keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
    again: &mut dyn FnMut(f64) -> bool,
) -> Result<(), VideoError> {
    let blocks = clip.trajectory().blocks();
    let mut state: ClipState = clip.start(noise)?;
    let mut goes_on = true;
    while goes_on {
        if state.next() == blocks {
            state = clip.start(noise)?;
        }
        let until = state.next() + 1;
        lane.run(clip, &mut state, until, &mut |event| {
            keep_going()?;
            if let Event::Blocks { elapsed, .. } = event {
                goes_on = again(elapsed.as_secs_f64() * 1e3);
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_become_frames_of_the_released_size_where_they_fit() {
        let config = DitConfig {
            layers: 1,
            heads: 1,
            head_dim: 32,
            ffn: 32,
            channels: 16,
            text_dim: 8,
            frequency: 8,
            eps: 1e-6,
        };
        assert_eq!(shape_for_tokens(&config, 1560), [16, 1, 60, 104]);
        assert_eq!(shape_for_tokens(&config, 20_280), [16, 13, 60, 104]);
        assert_eq!(shape_for_tokens(&config, 72), [16, 1, 16, 18]);
        assert_eq!(shape_for_tokens(&config, 7), [16, 1, 2, 14]);
        let (noise, text) = random_inputs(&config, [1, 1, 2, 2], 3);
        assert_eq!((noise.values.len(), text.values.len()), (4, 24));
    }
}
