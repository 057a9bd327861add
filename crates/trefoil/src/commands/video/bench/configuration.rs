//! A configuration: which engines, who does what, and what its rounds gave.

use super::super::keep_going;
use super::super::lanes::{Models, OpenLanes};
use super::cuts::Chosen;
use super::last_stage::LastStage;
use super::measured::{LaneRates, Measured};
use super::memory::WeightMemory;
use crate::error::CliError;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trefoil_core::Samples;
use trefoil_kernels::Kernels;
use trefoil_video::engine::Shape;
use trefoil_video::process::ProcessStatus;
use trefoil_video::stream::{
    ClipReport, Denoised, Observed, StreamItem, StreamReport, run_data_parallel_with, run_stream_reporting,
};
use trefoil_video::{EngineSpec, Event, Lane, NumericPath, Tensor, VideoError};
use trefoil_weights::memory::reset_peak;

/// Deadlines of the SLO sweep, as factors of the best single engine's latency (HeteroVDiff Figure 7).
pub const FACTORS: [f64; 5] = [1.25, 1.5, 1.75, 2.0, 3.0];

/// What a configuration does with the clips.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// One engine makes them all.
    Single,
    /// Two engines, each makes whole clips from one queue, from weights of its own.
    DataParallel,
    /// Two engines compute every block together.
    HeteroTensor {
        /// Of the columns, the CPU's.
        cpu_share: f64,
        /// What a block is slowed to (emulated).
        shape: Option<Shape>,
    },
    /// Two engines, cut here.
    Pipeline(usize),
}

impl Kind {
    /// Whether one clip after the other is made.
    pub fn is_serial(self) -> bool {
        matches!(self, Self::Single | Self::HeteroTensor { .. })
    }
}

/// See the module.
pub struct Configuration {
    pub name: String,
    pub kind: Kind,
    pub engines: Vec<(EngineSpec, NumericPath)>,
    /// Who chose its cut.
    pub chosen: Vec<Chosen>,
    /// Milliseconds per clip that rates promise for as many clips as run, of each round: measured before the round, so that a prediction's
    /// error can be told apart from the machine's drift.
    pub predictions: Vec<f64>,
    /// Milliseconds per clip, of each round.
    pub per_clip: Vec<f64>,
    /// Latency of every clip.
    pub latencies: Vec<f64>,
    /// What the last prediction rests on, where these engines were measured for it alone.
    pub rates: Option<LaneRates>,
    /// What the stream of the last round showed of its parts, the first clip left out.
    pub observed: Observed,
    /// Busy milliseconds a clip of either stage of a pipeline, of each round.
    pub stages: Vec<[f64; 2]>,
    /// Handoffs between engines in all rounds, and their bytes.
    pub handoffs: usize,
    pub handoff_bytes: usize,
    pub idle: Option<Vec<f64>>,
    pub scratch: Vec<usize>,
    pub memory: Option<WeightMemory>,
}

/// What all configurations share.
pub struct Bench<'a> {
    pub models: &'a Models,
    /// The second copy of the weights, for the data-parallel baseline.
    pub second: &'a Models,
    /// The artefact, and its copy.
    pub artefacts: [PathBuf; 2],
    pub last_stage: &'a LastStage,
    pub noise: &'a Tensor,
    pub text: &'a Tensor,
    pub clips: usize,
    pub blocks: usize,
}

impl Bench<'_> {
    /// The two engines on one copy of the weights, and their processes where they have some.
    pub fn open_pair(&self, open: &OpenLanes) -> Result<(Vec<Lane>, Vec<Arc<ProcessStatus>>), VideoError> {
        let started = open.specs.iter().zip(&open.paths).map(|(spec, &path)| self.models.start(spec, path));
        let (lanes, processes): (Vec<_>, Vec<_>) = started.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        Ok((lanes, processes.into_iter().flatten().collect()))
    }
}

impl Configuration {
    /// One that has not run.
    pub fn new(name: String, kind: Kind, engines: Vec<(EngineSpec, NumericPath)>) -> Self {
        Self {
            name,
            kind,
            engines,
            chosen: Vec::new(),
            predictions: Vec::new(),
            per_clip: Vec::new(),
            latencies: Vec::new(),
            rates: None,
            observed: Observed::default(),
            stages: Vec::new(),
            handoffs: 0,
            handoff_bytes: 0,
            idle: None,
            scratch: Vec::new(),
            memory: None,
        }
    }

    /// Its engines, and their processes where they have some.
    pub fn open(&self, bench: &Bench<'_>) -> Result<(Vec<Lane>, Vec<Arc<ProcessStatus>>), VideoError> {
        if let (Kind::HeteroTensor { cpu_share, shape }, [(first, _), (second, _)]) =
            (self.kind, self.engines.as_slice())
        {
            // Its halves are not slowed each for itself.
            let specs = [first, second].map(|spec| EngineSpec { shape: None, ..spec.clone() });
            let lane = bench.models.hetero_tensor(&specs, cpu_share)?;
            return Ok(match shape {
                None => (vec![lane], Vec::new()),
                Some(shape) => (vec![lane.shaped(self.name.clone(), shape)], Vec::new()),
            });
        }
        let (mut lanes, mut processes) = (Vec::new(), Vec::new());
        for (number, (spec, path)) in self.engines.iter().enumerate() {
            let models = if self.kind == Kind::DataParallel && number == 1 { bench.second } else { bench.models };
            let (lane, status) = models.start(spec, *path)?;
            lanes.push(lane);
            processes.extend(status);
        }
        Ok((lanes, processes))
    }

    /// The last stage's kernels, for each of its lanes.
    pub fn kernels(&self) -> Result<Vec<Kernels>, VideoError> {
        if let Kind::HeteroTensor { .. } = self.kind {
            let all: Vec<usize> = self.engines.iter().flat_map(|(spec, _)| spec.resolved_cores()).collect();
            return Ok(vec![Kernels::best(&all)?]);
        }
        self.engines.iter().map(|(spec, _)| LastStage::kernels(Some(spec))).collect()
    }

    /// What the next round will take by the rates of the two engines or, where other engines run, by theirs, measured now on engines like
    /// those that will run.
    pub fn predict(&mut self, bench: &Bench<'_>, measured: &Measured, specs: &[EngineSpec]) -> Result<(), CliError> {
        let [one, two] = &measured.lanes;
        let known = match (self.kind, self.engines.as_slice()) {
            (Kind::Single, [(spec, _)]) => measured.lanes.iter().zip(specs).find(|(_, known)| *known == spec),
            _ => None,
        };
        let predicted = match (self.kind, known) {
            (Kind::DataParallel | Kind::Pipeline(_), _) => {
                measured.predict(self.kind, &[one, two], bench.last_stage, bench.clips)
            }
            (_, Some((lane, _))) => measured.predict(self.kind, &[lane], bench.last_stage, bench.clips),
            (_, None) => {
                let (mut lanes, _processes) = self.open(bench)?;
                let inputs = (bench.noise, bench.text);
                let lane = measured.alone(lanes.swap_remove(0), &self.kernels()?[0], bench.last_stage, inputs)?;
                let predicted = measured.predict(self.kind, &[&lane], bench.last_stage, bench.clips);
                self.rates = Some(lane);
                predicted
            }
        };
        self.predictions.extend(predicted);
        Ok(())
    }

    /// Makes the clips once more.
    pub fn round(&mut self, bench: &Bench<'_>) -> Result<(), CliError> {
        // Where the kernel does not let it be reset, the peak is that of everything before too.
        reset_peak();
        let (mut lanes, processes) = self.open(bench)?;
        let is_serial = self.kind.is_serial();
        let kernels = self.kernels()?;
        let items = (0..bench.clips).map(|number| StreamItem {
            number,
            noise: bench.noise.clone(),
            text: bench.text.clone(),
            negative: None,
        });
        let finish = |done: &Denoised<'_>| bench.last_stage.run(&kernels[done.lane], is_serial);
        let watch = |_: usize, _: &Event<'_>| keep_going(0, bench.blocks);
        let report = if self.kind == Kind::DataParallel {
            run_data_parallel_with(&mut lanes, items, bench.last_stage.in_data_parallel(), &finish, &watch)?
        } else {
            let mut cut = |_: &_, blocks| if let Kind::Pipeline(cut) = self.kind { cut } else { blocks };
            match run_stream_reporting(&mut lanes, items, &mut cut, &mut { finish }, &watch) {
                (report, None) if report.failed.is_empty() => report,
                (report, None) => {
                    return Err(CliError::Failed(format!("a clip could not be made: {}", report.failed[0].reason)));
                }
                (_, Some(error)) => return Err(error.into()),
            }
        };
        self.keep(&report, bench.clips);
        for (handoffs, bytes) in lanes.iter().map(|lane| lane.engine().exchanges()) {
            self.handoffs += handoffs;
            self.handoff_bytes += bytes;
        }
        self.scratch = lanes.iter().map(Lane::scratch_bytes).collect();
        self.memory = self.weights(bench, &lanes, &processes);
        Ok(())
    }

    fn keep(&mut self, report: &StreamReport, clips: usize) {
        let per_clip = match self.kind {
            // Two clips end at about the same time, so the mean gap between ends says little about few clips.
            Kind::DataParallel => report.clips.last().map(|clip| clip.end_ms / clips as f64),
            _ => report.period_ms,
        };
        self.per_clip.extend(per_clip);
        self.latencies.extend(report.clips.iter().map(ClipReport::latency_ms));
        self.handoffs += report.handoffs;
        self.handoff_bytes += report.clips.iter().map(|clip| clip.handoff_bytes).sum::<usize>();
        self.idle.clone_from(&report.idle);
        let observed = report.observed();
        self.observed = observed;
        if let Kind::Pipeline(cut) = self.kind {
            let first = observed.first_ms.unwrap_or(0.0) * cut as f64;
            let second = observed.second_ms.unwrap_or(0.0) * (report.blocks - cut) as f64;
            self.stages.push([first, second + observed.last_stage_ms.unwrap_or(0.0)]);
        }
    }

    /// What the kernel says about the weights while the engines hold them.
    fn weights(&self, bench: &Bench<'_>, lanes: &[Lane], processes: &[Arc<ProcessStatus>]) -> Option<WeightMemory> {
        let copies = if self.kind == Kind::DataParallel { 2 } else { 1 };
        let artefacts: Vec<&Path> = bench.artefacts[..copies].iter().map(PathBuf::as_path).collect();
        let engines = self.engines.iter().zip(processes);
        let mut all = vec![("trefoil".to_owned(), std::process::id())];
        all.extend(engines.filter_map(|((spec, _), status)| Some((spec.to_string(), status.pid()?))));
        // Lanes on one path share what is in memory.
        let mut private: Vec<(*const trefoil_video::Model, usize)> =
            lanes.iter().map(|lane| (Arc::as_ptr(lane.model()), lane.model().private_bytes())).collect();
        private.sort_unstable();
        private.dedup();
        WeightMemory::of(&artefacts, all, private.into_iter().map(|(_, bytes)| bytes).sum())
    }

    /// Milliseconds per clip.
    pub fn period(&self) -> Option<Samples> {
        Samples::from_values(&mut self.per_clip.clone())
    }

    /// Its median, for comparisons.
    pub fn ms(&self) -> f64 {
        self.period().map_or(f64::MAX, |samples| samples.median)
    }

    /// Milliseconds from a clip's beginning to its end.
    pub fn latency(&self) -> Option<Samples> {
        Samples::from_values(&mut self.latencies.clone())
    }

    /// The median prediction.
    pub fn predicted(&self) -> Option<f64> {
        Some(Samples::from_values(&mut self.predictions.clone())?.median)
    }

    /// Predicted over measured, less one: the median of the rounds.
    pub fn error(&self) -> Option<f64> {
        let rounds = self.predictions.iter().zip(&self.per_clip);
        let mut errors: Vec<f64> = rounds.map(|(predicted, measured)| predicted / measured - 1.0).collect();
        Some(Samples::from_values(&mut errors)?.median)
    }

    /// Median busy milliseconds a clip of both stages.
    pub fn stage(&self, stage: usize) -> Option<f64> {
        let mut values: Vec<f64> = self.stages.iter().map(|stages| stages[stage]).collect();
        Some(Samples::from_values(&mut values)?.median)
    }

    /// Share of clips whose latency is within a deadline.
    pub fn attainment(&self, deadline_ms: f64) -> f64 {
        let met = self.latencies.iter().filter(|&&latency| latency <= deadline_ms).count();
        met as f64 / self.latencies.len().max(1) as f64
    }

    /// Clips an hour that keep a deadline.
    pub fn hourly_within(&self, deadline_ms: f64) -> Option<f64> {
        Some(self.attainment(deadline_ms) * 3.6e6 / self.period()?.median)
    }

    /// The factors of `latency_ms` from which its fastest clip and all its clips keep the deadline.
    pub fn needs(&self, latency_ms: f64) -> Option<[f64; 2]> {
        let latency = self.latency()?;
        Some([latency.min / latency_ms, latency.max / latency_ms])
    }

    /// For programs.
    pub fn json(&self, best_single_ms: f64, best_single_predicted: Option<f64>, best_latency: f64) -> Value {
        let samples = |samples: Option<Samples>| samples.as_ref().map(super::super::samples_json);
        let slo = |factor: &f64| {
            let deadline = factor * best_latency;
            json!({ "factor": factor, "share": self.attainment(deadline), "clips_per_hour_within": self.hourly_within(deadline) })
        };
        json!({
            "name": self.name,
            "engines": self.engines.iter().map(|(spec, path)| json!({ "engine": spec.to_string(), "path": path })).collect::<Vec<_>>(),
            "cut": match self.kind { Kind::Pipeline(cut) => Some(cut), _ => None },
            "cpu_share": match self.kind { Kind::HeteroTensor { cpu_share, .. } => Some(cpu_share), _ => None },
            "ms_per_clip": samples(self.period()),
            "rounds": self.per_clip,
            "predicted_ms": self.predicted(),
            "predictions": self.predictions,
            "observed": self.observed,
            "rates": self.rates,
            "prediction_error": self.error(),
            "gain": self.period().map(|period| best_single_ms / period.median),
            "predicted_gain": self.predicted().zip(best_single_predicted).map(|(predicted, single)| single / predicted),
            "latency_ms": samples(self.latency()),
            "needs": self.needs(best_latency),
            "slo": FACTORS.iter().map(slo).collect::<Vec<_>>(),
            "idle": self.idle,
            "stages_ms": [self.stage(0), self.stage(1)],
            "handoffs": self.handoffs,
            "handoff_bytes": self.handoff_bytes,
            "scratch_bytes": self.scratch,
            "weight_bytes": self.memory.as_ref().map(WeightMemory::bytes),
            "weights_over_artefact": self.memory.as_ref().and_then(WeightMemory::over_artefact),
            "memory": self.memory,
        })
    }
}
