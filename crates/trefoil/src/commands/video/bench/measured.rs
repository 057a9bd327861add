//! What is known before the configurations run: the paper's three rates, alone and together (HeteroVDiff 3.3, Table 1), and what follows
//! from them.

use super::super::{keep_going, samples_json};
use super::configuration::Kind;
use super::last_stage::LastStage;
use crate::error::CliError;
use serde::Serialize;
use serde_json::{Value, json};
use trefoil_core::{Origin, Samples};
use trefoil_kernels::Kernels;
use trefoil_plan::stream::VideoRates;
use trefoil_report::{Table, format, text_table};
use trefoil_video::rates::{EngineRate, RateOptions, measure};
use trefoil_video::stream::{Division, LaneCosts, LastStageRate, forecast, measure_last_stage};
use trefoil_video::{Clip, EngineSpec, Lane, Tensor, VideoError};

/// Blocks timed per engine and condition.
const OPTIONS: RateOptions = RateOptions { samples: 10, warm_up: 2 };

/// What the parts of a clip cost on one engine.
#[derive(Serialize)]
pub struct LaneRates {
    /// A block.
    pub engine: EngineRate,
    /// The host's work around the blocks of one step, in milliseconds.
    pub host_ms: f64,
    /// A clip's conditions (text contexts, timesteps), alone and while the other engine runs blocks.
    pub conditions: LastStageRate,
    /// The last stage on its cores; of a stand-in what was declared.
    pub last_stage: LastStageRate,
}

/// Rates of the two engines and of the last stage.
pub struct Measured {
    /// `T_G` and `T_N`, and what else each engine does for a clip.
    pub lanes: [LaneRates; 2],
    /// The clip that was measured.
    clip: Clip,
    /// Block executions of a clip, and of a step.
    pub blocks: usize,
    pub layers: usize,
}

impl Measured {
    /// Measures on open lanes.
    pub fn of(
        lanes: &mut [Lane],
        specs: &[EngineSpec],
        last_stage: &LastStage,
        (noise, text): (&Tensor, &Tensor),
    ) -> Result<Measured, CliError> {
        let model = lanes[0].model().clone();
        let clip = Clip::new(lanes[0].host_mut(), &model, noise, text, None)?;
        let (blocks, layers) = (clip.trajectory().blocks(), clip.trajectory().layers);
        let check = || keep_going(0, blocks);
        let engines = measure(lanes, &clip, noise, OPTIONS, &check)?;
        let both = |engines: Vec<EngineRate>| <[EngineRate; 2]>::try_from(engines).ok();
        let (Some([one, two]), [first, second]) = (both(engines), lanes) else {
            return Err(CliError::Usage("the benchmark needs two engines".to_owned()));
        };
        let of = |engine, lane: &mut Lane, spec: &EngineSpec, beside: &mut Lane| {
            let kernels = LastStage::kernels(Some(spec))?;
            let last_stage = last_stage.rate(&kernels, Some((&mut *beside, &clip, noise)))?;
            LaneRates::of(engine, lane, &clip, (noise, text), last_stage, Some(beside))
        };
        let lanes = [of(one, first, &specs[0], second)?, of(two, second, &specs[1], first)?];
        Ok(Measured { lanes, clip, blocks, layers })
    }

    /// One more engine that runs alone, in the conditions in which it will.
    pub fn alone(
        &self,
        lane: Lane,
        kernels: &Kernels,
        last_stage: &LastStage,
        (noise, text): (&Tensor, &Tensor),
    ) -> Result<LaneRates, CliError> {
        let mut lanes = [lane];
        let rates = measure(&mut lanes, &self.clip, noise, OPTIONS, &|| keep_going(0, self.blocks))?;
        let [lane] = &mut lanes;
        let Some(engine) = rates.into_iter().next() else {
            let reason = "it was not timed".to_owned();
            return Err(VideoError::Engine { engine: lane.engine().name().to_owned(), reason }.into());
        };
        LaneRates::of(engine, lane, &self.clip, (noise, text), last_stage.rate(kernels, None)?, None)
    }

    /// Milliseconds per clip that the rates of these engines give for so many clips, counted as [`super::configuration::Configuration`] counts
    /// what it measures.
    pub fn predict(&self, kind: Kind, lanes: &[&LaneRates], last_stage: &LastStage, clips: usize) -> Option<f64> {
        let costs: Vec<LaneCosts> = lanes
            .iter()
            .map(|lane| {
                let last = last_stage.cost(&lane.last_stage, kind.is_serial());
                let conditions = lane.conditions.cost();
                LaneCosts::of(&lane.engine, &self.clip, lane.host_ms, conditions, last)
            })
            .collect();
        match kind {
            Kind::Single | Kind::HeteroTensor { .. } => forecast(&costs, Division::Alone, clips).period_ms(),
            Kind::Pipeline(cut) => forecast(&costs, Division::Cut(cut), clips).period_ms(),
            Kind::DataParallel => {
                let over = forecast(&costs, Division::Whole(last_stage.in_data_parallel()), clips).end_ms();
                Some(over / clips as f64)
            }
        }
    }

    /// Rates while both run, the host's share of a block included: what a pipeline sees.
    pub fn corun(&self) -> VideoRates {
        self.rates(EngineRate::pipeline_ms, LastStageRate::pipeline_ms)
    }

    /// Rates alone.
    pub fn solo(&self) -> VideoRates {
        self.rates(EngineRate::alone_ms, |rate| rate.solo_ms.median)
    }

    fn rates(&self, of: fn(&EngineRate) -> f64, last: fn(&LastStageRate) -> f64) -> VideoRates {
        let [one, two] = &self.lanes;
        let block = |lane: &LaneRates| of(&lane.engine) + lane.host_ms / self.layers as f64;
        let conditions = last(&one.conditions) / self.blocks as f64;
        VideoRates { first: block(one) + conditions, second: block(two), decoder: last(&two.last_stage) }
    }

    /// `T_G` and `T_N`.
    pub fn engines(&self) -> impl Iterator<Item = &EngineRate> {
        self.lanes.iter().map(|lane| &lane.engine)
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
            .engines()
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
        let rate = &self.lanes[1].last_stage;
        json!({
            "engines": self.engines().collect::<Vec<_>>(),
            "slowdown": self.engines().map(EngineRate::slowdown).collect::<Vec<_>>(),
            "last_stage": {
                "what": last_stage.describe(),
                "solo_ms": samples_json(&rate.solo_ms),
                "corun_ms": rate.corun_ms.as_ref().map(samples_json),
                "slowdown": rate.corun_ms.as_ref().map(|corun| corun.median / rate.solo_ms.median).filter(|ratio| ratio.is_finite()),
                "origin": if last_stage.is_emulated() { Origin::Emulated } else { Origin::Measured },
            },
            "host_ms": self.lanes.iter().map(|lane| lane.host_ms).collect::<Vec<_>>(),
            "conditions_ms": self.lanes.iter().map(|lane| lane.conditions.pipeline_ms()).collect::<Vec<_>>(),
            "solo": self.solo(),
            "corun": self.corun(),
        })
    }
}

impl LaneRates {
    fn of(
        engine: EngineRate,
        lane: &mut Lane,
        clip: &Clip,
        (noise, text): (&Tensor, &Tensor),
        last_stage: LastStageRate,
        beside: Option<&mut Lane>,
    ) -> Result<LaneRates, CliError> {
        let host_ms = lane.time_host(clip, noise)?.as_secs_f64() * 1e3;
        let mut begin = || Ok(lane.time_conditions(noise, text, None)?.as_secs_f64() * 1e3);
        let beside = beside.map(|beside| (beside, clip, noise));
        let conditions = measure_last_stage(&mut begin, beside, &|| keep_going(0, clip.trajectory().blocks()))?;
        Ok(LaneRates { engine, host_ms, conditions, last_stage })
    }
}

/// `478 ms (468–496 ms)`.
fn spread(samples: &Samples) -> String {
    format!("{} ({})", format::time(samples.median), format::time_range(samples.p10, samples.p90))
}
