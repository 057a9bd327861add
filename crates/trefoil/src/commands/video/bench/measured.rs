//! What is known before the configurations run: the paper's three rates, alone and together (HeteroVDiff 3.3, Table 1), and what follows
//! from them.

use super::super::lanes::OpenLanes;
use super::super::{keep_going, samples_json};
use super::last_stage::LastStage;
use crate::error::CliError;
use serde_json::{Value, json};
use std::time::Instant;
use trefoil_core::{Origin, Samples};
use trefoil_plan::stream::VideoRates;
use trefoil_report::{Table, format, text_table};
use trefoil_video::rates::{EngineRate, RateOptions, measure};
use trefoil_video::stream::{LastStageRate, measure_last_stage};
use trefoil_video::{Clip, EngineSpec, Lane, Tensor, VideoError};

/// Blocks timed per engine and condition of the two engines, and of others.
const OF_ENGINES: RateOptions = RateOptions { samples: 10, warm_up: 2 };
const OF_OTHERS: RateOptions = RateOptions { samples: 5, warm_up: 1 };

/// Rates of the two engines and of the last stage.
pub struct Measured {
    /// `T_G` and `T_N`.
    pub engines: Vec<EngineRate>,
    /// `T_V`; of a stand-in what was declared.
    pub last_stage: LastStageRate,
    /// The host's work around the blocks of one step, for each engine, in milliseconds.
    pub host_ms: Vec<f64>,
    /// A clip's conditions (text contexts, timesteps), in milliseconds.
    pub conditions_ms: f64,
    /// Block executions of a clip, and of a step.
    pub blocks: usize,
    pub layers: usize,
}

impl Measured {
    /// Measures on open lanes.
    pub fn of(
        open: &mut OpenLanes,
        last_stage: &LastStage,
        (noise, text): (&Tensor, &Tensor),
    ) -> Result<Measured, CliError> {
        let model = open.lanes[0].model().clone();
        let begun = Instant::now();
        let clip = Clip::new(open.lanes[0].host_mut(), &model, noise, text, None)?;
        let conditions_ms = begun.elapsed().as_secs_f64() * 1e3;
        let (blocks, layers) = (clip.trajectory().blocks(), clip.trajectory().layers);
        let check = || keep_going(0, blocks);
        let engines = measure(&mut open.lanes, &clip, noise, OF_ENGINES, &check)?;
        let mut host_ms = Vec::new();
        for lane in &mut open.lanes {
            host_ms.push(lane.time_host(&clip, noise)?.as_secs_f64() * 1e3);
        }
        let last_stage = match last_stage {
            LastStage::StandIn([solo, corun]) => {
                LastStageRate { solo_ms: Samples::exactly(*solo), corun_ms: Some(Samples::exactly(*corun)) }
            }
            LastStage::Decoder(_) => {
                let kernels = LastStage::kernels(open.specs.last())?;
                let mut stage = || {
                    let begun = Instant::now();
                    last_stage.run(&kernels, false)?;
                    Ok(begun.elapsed().as_secs_f64() * 1e3)
                };
                measure_last_stage(&mut stage, Some((&mut open.lanes[0], &clip, noise)), &check)?
            }
        };
        Ok(Measured { engines, last_stage, host_ms, conditions_ms, blocks, layers })
    }

    /// Rates while both run, the host's share of a block included: what a pipeline sees.
    pub fn corun(&self) -> VideoRates {
        self.rates(EngineRate::pipeline_ms, self.last_stage.pipeline_ms())
    }

    /// Rates alone.
    pub fn solo(&self) -> VideoRates {
        self.rates(|rate| rate.solo_ms.median, self.last_stage.solo_ms.median)
    }

    fn rates(&self, of: fn(&EngineRate) -> f64, decoder: f64) -> VideoRates {
        let block = |lane: usize| of(&self.engines[lane]) + self.host_ms[lane] / self.layers as f64;
        VideoRates { first: block(0) + self.conditions_ms / self.blocks as f64, second: block(1), decoder }
    }

    /// A clip on one engine whose block takes `block_ms` alone; its host is that of `lane`.
    pub fn serial_ms(&self, block_ms: f64, lane: usize) -> f64 {
        let steps = self.blocks / self.layers;
        self.blocks as f64 * block_ms
            + steps as f64 * self.host_ms[lane]
            + self.conditions_ms
            + self.last_stage.solo_ms.median
    }

    /// All blocks of a clip on either engine while both run.
    pub fn whole_clips(&self) -> [f64; 2] {
        let rates = self.corun();
        // A clip's conditions are in the first engine's rate already.
        [rates.first * self.blocks as f64, rates.second * self.blocks as f64 + self.conditions_ms]
    }

    /// The three rates alone and while the other works, as the paper's Table 1.
    pub fn table(&self, specs: &[EngineSpec], origin: &str) -> Table {
        let headings = ["", ">block alone", ">while both work", ">slowdown", ">clip alone", ">clip while both work"]
            .map(str::to_owned);
        let plain = |cells: [String; 6]| cells.into_iter().map(|cell| (cell, false)).collect::<Vec<_>>();
        let [solo, corun] = [self.solo(), self.corun()];
        let clips = [[solo.first, corun.first], [solo.second, corun.second]];
        let names = ["T_G", "T_N"];
        let mut rows: Vec<Vec<(String, bool)>> = self
            .engines
            .iter()
            .zip(specs)
            .zip(names.iter().zip(clips))
            .enumerate()
            .map(|(lane, ((rate, spec), (name, [alone, together])))| {
                // The last stage belongs to the second engine.
                let [last_alone, last_together] = if lane == 1 { [solo.decoder, corun.decoder] } else { [0.0; 2] };
                let clip = |block: f64, last: f64| format::time(block * self.blocks as f64 + last);
                plain([
                    format!("{name}: {spec} on {}", rate.path),
                    spread(&rate.solo_ms),
                    rate.corun_ms.as_ref().map_or_else(|| format::ABSENT.to_owned(), spread),
                    rate.slowdown().map_or_else(|| format::ABSENT.to_owned(), format::ratio),
                    clip(alone, last_alone),
                    clip(together, last_together),
                ])
            })
            .collect();
        if solo.decoder > 0.0 || corun.decoder > 0.0 {
            rows.push(plain([
                "T_V: last stage, a clip".to_owned(),
                format::time(solo.decoder),
                format::time(corun.decoder),
                format::ratio(corun.decoder / solo.decoder),
                String::new(),
                String::new(),
            ]));
        }
        text_table(&format!("Rates of a block ({origin})"), &headings, rows)
    }

    /// The same for programs.
    pub fn json(&self, last_stage: &LastStage) -> Value {
        json!({
            "engines": self.engines,
            "slowdown": self.engines.iter().map(EngineRate::slowdown).collect::<Vec<_>>(),
            "last_stage": {
                "what": last_stage.describe(),
                "solo_ms": samples_json(&self.last_stage.solo_ms),
                "corun_ms": self.last_stage.corun_ms.as_ref().map(samples_json),
                "slowdown": self.last_stage.corun_ms.as_ref().map(|corun| corun.median / self.last_stage.solo_ms.median).filter(|ratio| ratio.is_finite()),
                "origin": if last_stage.is_emulated() { Origin::Emulated } else { Origin::Measured },
            },
            "host_ms": self.host_ms,
            "conditions_ms": self.conditions_ms,
            "solo": self.solo(),
            "corun": self.corun(),
        })
    }
}

/// A block of one more lane, alone.
pub fn block_alone(lane: Lane, noise: &Tensor, text: &Tensor) -> Result<EngineRate, CliError> {
    let mut lanes = [lane];
    let model = lanes[0].model().clone();
    let clip = Clip::new(lanes[0].host_mut(), &model, noise, text, None)?;
    let blocks = clip.trajectory().blocks();
    let mut rates = measure(&mut lanes, &clip, noise, OF_OTHERS, &|| keep_going(0, blocks))?;
    rates.pop().ok_or_else(|| {
        let reason = "it was not timed".to_owned();
        VideoError::Engine { engine: lanes[0].engine().name().to_owned(), reason }.into()
    })
}

/// `478 ms (468–496 ms)`.
fn spread(samples: &Samples) -> String {
    format!("{} ({})", format::time(samples.median), format::time_range(samples.p10, samples.p90))
}
