//! Rates: what a block costs on each engine, alone and while the other runs too (HeteroVDiff 3.3, Table 1).

use crate::VideoError;
use crate::config::{DitConfig, PATCH};
use crate::denoise::{Clip, ClipState, Lane};
use crate::noise::torch_normals;
use crate::schedule::Piece;
use crate::stream::Cost;
use crate::tensors::Tensor;
use crate::threads::{OnDrop, panicked};
use serde::Serialize;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use trefoil_core::Samples;

/// How to measure.
#[derive(Debug, Clone, Copy)]
pub struct RateOptions {
    /// Block executions timed per engine and condition, at least one of each expert.
    pub samples: usize,
    /// Executions before them that do not count, at least one of each expert.
    pub warm_up: usize,
}

/// Times of a block on one engine, in milliseconds. Experts take turns, so that all are measured in the same conditions.
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
    /// The same samples, those of each expert apart: adapters cost time, and how many blocks they do depends on the sampler.
    pub experts: Vec<ExpertRate>,
}

/// Times of a block of one expert, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExpertRate {
    /// Which.
    pub expert: usize,
    /// Its block executions in a clip.
    pub blocks: usize,
    /// While the other engine is idle.
    pub solo_ms: Samples,
    /// While the other engine runs blocks too.
    pub corun_ms: Option<Samples>,
    /// Means of the same samples. What many executions take together is a sum, which a median falls short of where a few are late.
    pub mean_ms: Cost,
}

impl ExpertRate {
    fn cost(&self) -> Cost {
        let solo = self.solo_ms.median;
        Cost { solo, corun: self.corun_ms.as_ref().map_or(solo, |corun| corun.median) }
    }
}

impl EngineRate {
    /// Co-run over solo.
    pub fn slowdown(&self) -> Option<f64> {
        self.corun_ms.as_ref().map(|_| self.pipeline_ms() / self.alone_ms())
    }

    /// The rate that a pipeline sees, a mean over a clip's executions of their experts' medians: co-run where there is one.
    pub fn pipeline_ms(&self) -> f64 {
        self.mean(|cost| cost.corun)
    }

    /// The same of the engine alone.
    pub fn alone_ms(&self) -> f64 {
        self.mean(|cost| cost.solo)
    }

    /// A block of an expert as a part of many: the mean. One that was not measured costs what all do.
    pub fn block(&self, expert: usize) -> Cost {
        let known = self.experts.iter().find(|rate| rate.expert == expert);
        known.map_or_else(|| Cost { solo: self.alone_ms(), corun: self.pipeline_ms() }, |rate| rate.mean_ms)
    }

    fn mean(&self, of: fn(Cost) -> f64) -> f64 {
        let blocks: usize = self.experts.iter().map(|rate| rate.blocks).sum();
        self.experts.iter().map(|rate| of(rate.cost()) * rate.blocks as f64).sum::<f64>() / blocks as f64
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

/// Runs lanes over the blocks of `clip` again and again: each alone, then all together, and times single blocks.
///
/// Together, every lane runs until all have enough samples, and only executions that ended while all ran count.
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
    let experts = acting(clip);
    let warm_up = options.warm_up.max(experts.len());
    let enough = warm_up + options.samples.max(experts.len());
    let mut alone = Vec::new();
    for lane in lanes.iter_mut() {
        let mut values = Vec::new();
        cycle(lane, clip, noise, keep_going, &mut |expert, ms| {
            values.push((expert, ms));
            values.len() < enough
        })?;
        alone.push(values.split_off(warm_up));
    }
    let mut together = vec![None; lanes.len()];
    if lanes.len() > 1 {
        for (values, timed) in
            together.iter_mut().zip(measure_together(lanes, clip, noise, [warm_up, enough], keep_going))
        {
            *values = Some(timed?);
        }
    }
    let rates = lanes.iter().zip(alone.into_iter().zip(together));
    rates.map(|(lane, (alone, together))| rate_of(lane, clip, &experts, &alone, together.as_deref())).collect()
}

/// An execution that was timed: its expert, its milliseconds.
type Timed = (usize, f64);

fn measure_together(
    lanes: &mut [Lane],
    clip: &Clip,
    noise: &Tensor,
    [warm_up, enough]: [usize; 2],
    keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
) -> Vec<Result<Vec<Timed>, VideoError>> {
    let (barrier, unfinished, failed) =
        (Barrier::new(lanes.len()), AtomicUsize::new(lanes.len()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers: Vec<_> = lanes
            .iter_mut()
            .map(|lane| {
                let (barrier, unfinished, failed) = (&barrier, &unfinished, &failed);
                scope.spawn(move || {
                    // The others must not go on for this one's sake, neither after an error nor after a panic.
                    let gone = OnDrop::new(|| failed.store(true, Ordering::Release));
                    barrier.wait();
                    let mut values = Vec::new();
                    let mut count = 0usize;
                    let ran = cycle(lane, clip, noise, keep_going, &mut |expert, ms| {
                        count += 1;
                        let all_run = unfinished.load(Ordering::Acquire) > 0;
                        if count > warm_up && all_run {
                            values.push((expert, ms));
                        }
                        if count == enough {
                            unfinished.fetch_sub(1, Ordering::AcqRel);
                        }
                        // Go on so that the others stay under load.
                        unfinished.load(Ordering::Acquire) > 0 && !failed.load(Ordering::Acquire)
                    });
                    if ran.is_ok() {
                        gone.disarm();
                    }
                    ran.map(|()| values)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|cause| Err(panicked("rates", &*cause))))
            .collect()
    })
}

/// Experts that act in a clip, and the first step of each.
fn acting(clip: &Clip) -> Vec<(usize, usize)> {
    let mut experts: Vec<(usize, usize)> = Vec::new();
    for step in 0..clip.trajectory().steps {
        let expert = clip.expert(step);
        if experts.iter().all(|&(known, _)| known != expert) {
            experts.push((expert, step));
        }
    }
    experts
}

fn rate_of(
    lane: &Lane,
    clip: &Clip,
    experts: &[(usize, usize)],
    alone: &[Timed],
    together: Option<&[Timed]>,
) -> Result<EngineRate, VideoError> {
    let all = |values: &[Timed]| summary(values.iter().map(|&(_, ms)| ms).collect());
    let of = |values: &[Timed], expert: usize| {
        summary(values.iter().filter(|&&(of, _)| of == expert).map(|&(_, ms)| ms).collect())
    };
    let mean = |values: &[Timed], expert: usize| {
        let (sum, count) = values
            .iter()
            .filter(|&&(of, _)| of == expert)
            .fold((0.0, 0usize), |(sum, count), &(_, ms)| (sum + ms, count + 1));
        sum / count.max(1) as f64
    };
    let trajectory = clip.trajectory();
    let each = experts.iter().map(|&(expert, _)| {
        let steps = (0..trajectory.steps).filter(|&step| clip.expert(step) == expert).count();
        Ok(ExpertRate {
            expert,
            blocks: steps * trajectory.branches * trajectory.layers,
            solo_ms: of(alone, expert)?,
            corun_ms: together.map(|values| of(values, expert)).transpose()?,
            mean_ms: Cost { solo: mean(alone, expert), corun: mean(together.unwrap_or(alone), expert) },
        })
    });
    Ok(EngineRate {
        engine: lane.engine().name().to_string(),
        path: lane.engine().path(),
        solo_ms: all(alone)?,
        corun_ms: together.map(all).transpose()?,
        experts: each.collect::<Result<_, VideoError>>()?,
    })
}

fn summary(mut values: Vec<f64>) -> Result<Samples, VideoError> {
    Samples::from_values(&mut values).ok_or_else(|| VideoError::Engine {
        engine: "rates".to_string(),
        reason: "no block was timed; ask for at least one sample".to_string(),
    })
}

/// Runs block after block until `again`, which is told each one's expert and milliseconds, says no. Each execution is the next block of the
/// next expert, so that neither weights nor adapters stay in a cache longer than in a stream. State is embedded anew before block 0.
pub(crate) fn cycle(
    lane: &mut Lane,
    clip: &Clip,
    noise: &Tensor,
    keep_going: &(dyn Fn() -> Result<(), VideoError> + Sync),
    again: &mut dyn FnMut(usize, f64) -> bool,
) -> Result<(), VideoError> {
    let (experts, layers) = (acting(clip), clip.trajectory().layers);
    let mut state: ClipState = clip.start(noise)?;
    for turn in 0.. {
        keep_going()?;
        // Where the experts divide the layers each would be timed on some of the blocks only; then it is one expert further at each
        // wrap of the layers.
        let (block, wraps) = (turn % layers, turn / layers);
        let shift = if layers.is_multiple_of(experts.len()) { wraps } else { 0 };
        let (expert, step) = experts[(turn + shift) % experts.len()];
        let elapsed = lane.time_block(clip, &mut state, &Piece { step, branch: 0, blocks: block..block + 1 })?;
        if !again(expert, elapsed.as_secs_f64() * 1e3) {
            break;
        }
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
