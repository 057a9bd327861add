//! `trefoil bench video`: the configurations table. Configurations take turns, round by round, over the same clips.

use super::lanes::{self, Models};
use super::{blocks, keep_going, rates::conditions, samples_json};
use crate::cli::{BenchVideoArgs, EngineArgs, RandomModel, SecondArgs};
use crate::context::{ProgressLine, print, print_json, width};
use crate::error::CliError;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use trefoil_core::{Origin, Samples};
use trefoil_plan::stream::Cut;
use trefoil_report::{TableFormat, format};
use trefoil_video::engine::{EngineKind, HeteroTensorEngine, allowed_cores, is_on_cores};
use trefoil_video::rates::{EngineRate, RateOptions, measure, random_inputs, shape_for_tokens};
use trefoil_video::stream::{StreamItem, StreamReport, run_data_parallel, run_stream};
use trefoil_video::{
    Clip, ClipState, EngineSpec, Model, NumericPath, Sampler, Tensor, VideoError, VideoPackOptions, pack_video,
};

/// Deadlines of the SLO sweep, as factors of the best single engine's latency.
const FACTORS: [f64; 5] = [1.0, 1.25, 1.5, 2.0, 3.0];
/// Most clips and rounds.
const MOST: usize = 1000;

/// What a configuration does with the clips.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// One engine makes them all.
    Single,
    /// Two engines, each makes whole clips from one queue.
    DataParallel,
    /// Two engines compute every block together; the CPU's share of the columns.
    HeteroTensor(f64),
    /// Two engines, cut here.
    Pipeline(usize),
}

impl Kind {
    /// Whether one clip after the other is made.
    fn is_serial(self) -> bool {
        matches!(self, Self::Single | Self::HeteroTensor(_))
    }
}

/// A configuration and what its rounds gave.
struct Configuration {
    name: String,
    kind: Kind,
    engines: Vec<(EngineSpec, NumericPath)>,
    /// Milliseconds per clip, of each round.
    per_clip: Vec<f64>,
    /// Latency of every clip.
    latencies: Vec<f64>,
    handoffs: usize,
    predicted: Option<f64>,
    idle: Option<Vec<f64>>,
    scratch: Vec<usize>,
}

/// Runs the command.
pub fn run(args: &BenchVideoArgs) -> Result<(), CliError> {
    for (name, value) in [("--clips", args.clips), ("--rounds", args.rounds), ("--layers", args.layers)] {
        if value == 0 || value > MOST {
            return Err(CliError::Usage(format!("{name} {value}; it must lie in 1..={MOST}")));
        }
    }
    if args.clips < 2 || args.tokens == 0 || args.text_rows == 0 {
        return Err(CliError::Usage(
            "a stream needs at least 2 --clips, and --tokens and --text-rows above 0".to_owned(),
        ));
    }
    for decoder_ms in [args.decoder_ms, decoder_solo(args)] {
        if !decoder_ms.is_finite() || decoder_ms < 0.0 {
            return Err(CliError::Usage(format!("--decoder-ms {decoder_ms} is no time")));
        }
    }
    let space = tempfile::tempdir().map_err(|source| CliError::File {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let progress = ProgressLine::new("bench video", args.json);
    progress.step("the model");
    let (artefact, origin) = match &args.artefact {
        Some(artefact) => (artefact.clone(), "given"),
        None => (random_artefact(args, space.path())?, "random weights"),
    };
    let engines = EngineArgs {
        engines: engines(args)?,
        path: args.path.clone(),
        checkpoint: None,
        second: SecondArgs { second: None, switch_timestep: None },
    };
    let model = Model::open(&artefact)?;
    if model.sampler().branches() > 1 {
        return Err(CliError::Usage(
            "the benchmark takes no model with guidance; pack with a sampler of guidance 1".to_owned(),
        ));
    }
    let config = model.config().clone();
    let count = blocks(&model);
    drop(model);
    let shape = shape_for_tokens(&config, args.tokens);
    let (noise, text) = random_inputs(&config, shape, args.text_rows);
    let mut open = lanes::open(&artefact, &engines, (&noise, &text, None))?;
    if open.lanes.len() != 2 {
        return Err(CliError::Usage(
            "the benchmark needs two engines, like --engines cpu@0,cpu@1 or cpu@0,opencl@1".to_owned(),
        ));
    }
    progress.step("rates");
    let packed = open.lanes[0].model().clone();
    let clip = Clip::new(open.lanes[0].host_mut(), &packed, &noise, &text, None)?;
    let options = RateOptions { samples: 10, warm_up: 2 };
    let rates = measure(&mut open.lanes, &clip, &noise, options, &|| keep_going(0, count))?;
    drop(clip);
    open.lanes.clear();
    let corun = lanes::planned_cut(&rates, count, args.decoder_ms, EngineRate::pipeline_ms)?;
    let solo = lanes::planned_cut(&rates, count, args.decoder_ms, |rate| rate.solo_ms.median)?;
    let mut configurations = configurations(
        &open.specs,
        &open.paths,
        (&solo, &corun),
        &rates,
        (count, [decoder_solo(args), args.decoder_ms]),
    )?;
    for round in 0..args.rounds {
        for configuration in &mut configurations {
            progress.step(&format!("round {} of {}: {}", round + 1, args.rounds, configuration.name));
            configuration.round(&open.models, args, (&noise, &text), count)?;
        }
    }
    drop(progress);
    report(args, &configurations, &rates, (&solo, &corun), (&artefact, origin, count), &open.notes)
}

/// The decoder's time where one engine runs alone.
fn decoder_solo(args: &BenchVideoArgs) -> f64 {
    args.decoder_solo_ms.unwrap_or(args.decoder_ms)
}

/// The first two cores, unless told.
fn engines(args: &BenchVideoArgs) -> Result<String, CliError> {
    if let Some(engines) = &args.engines {
        return Ok(engines.clone());
    }
    match allowed_cores().as_slice() {
        [first, second, ..] => Ok(format!("cpu@{first},cpu@{second}")),
        _ => Err(CliError::Usage("two engines need two cores; this process may use one".to_owned())),
    }
}

/// Packs a model with random weights: DCM's six steps, its detail expert from the fourth.
fn random_artefact(args: &BenchVideoArgs, folder: &Path) -> Result<PathBuf, CliError> {
    let (config, rank) = match args.model {
        RandomModel::Small => (trefoil_video::synthetic::small(args.layers), 16),
        RandomModel::Wan13b => (trefoil_video::synthetic::wan_1_3b(args.layers), 128),
    };
    trefoil_video::synthetic::write_checkpoint(folder, &config, rank, 1)?;
    let output = folder.join("random.trefoil");
    let options = VideoPackOptions { sampler: Some(Sampler::dcm()), ..VideoPackOptions::default() };
    pack_video(folder, &output, &options, |_| {})?;
    Ok(output)
}

/// Each engine alone, one engine on all their cores, data-parallel, and the pipeline with the cut of solo and of co-run rates.
fn configurations(
    specs: &[EngineSpec],
    paths: &[NumericPath],
    (solo, corun): (&Cut, &Cut),
    rates: &[EngineRate],
    (blocks, [decoder_solo, decoder_corun]): (usize, [f64; 2]),
) -> Result<Vec<Configuration>, CliError> {
    let both: Vec<(EngineSpec, NumericPath)> = specs.iter().cloned().zip(paths.iter().copied()).collect();
    let new = |name: String, kind, engines: Vec<(EngineSpec, NumericPath)>, predicted| Configuration {
        name,
        kind,
        engines,
        per_clip: Vec::new(),
        latencies: Vec::new(),
        handoffs: 0,
        predicted,
        idle: None,
        scratch: Vec::new(),
    };
    let mut all: Vec<Configuration> = both
        .iter()
        .zip(rates)
        .map(|((spec, path), rate)| {
            let predicted = rate.solo_ms.median * blocks as f64 + decoder_solo;
            new(format!("{spec} alone"), Kind::Single, vec![(spec.clone(), *path)], Some(predicted))
        })
        .collect();
    for (spec, path) in on_all_cores(specs, paths)? {
        all.push(new(format!("{spec} alone, {path}"), Kind::Single, vec![(spec, path)], None));
    }
    // Two servers with whole clips: rates add up.
    let whole = |rate: &EngineRate| rate.pipeline_ms() * blocks as f64 + decoder_corun;
    let together = 1.0 / rates.iter().map(|rate| 1.0 / whole(rate)).sum::<f64>();
    all.push(new("data-parallel".to_owned(), Kind::DataParallel, both.clone(), Some(together)));
    if let Some(share) = cpu_share(specs, paths, rates) {
        let name = format!("hetero-tensor, {:.0}% of the columns on the CPU", share * 100.0);
        all.push(new(name, Kind::HeteroTensor(share), both.clone(), None));
    }
    all.push(new(
        format!("pipeline, cut {} (rates while both run)", corun.cut),
        Kind::Pipeline(corun.cut as usize),
        both.clone(),
        Some(corun.period),
    ));
    if solo.cut != corun.cut {
        let name = format!("pipeline, cut {} (rates alone)", solo.cut);
        all.push(new(name, Kind::Pipeline(solo.cut as usize), both, Some(solo.period)));
    }
    Ok(all)
}

/// The CPU's share of every layer's columns that lets both engines end together, where a CPU and an OpenCL engine run on `w8a8` (bits do
/// not depend on who computes a column there).
fn cpu_share(specs: &[EngineSpec], paths: &[NumericPath], rates: &[EngineRate]) -> Option<f64> {
    let of = |kind| specs.iter().position(|spec| spec.kind == kind && spec.shape.is_none());
    let (cpu, opencl) = (of(EngineKind::Cpu)?, of(EngineKind::OpenCl)?);
    let (cpu, opencl) = (rates[cpu].pipeline_ms(), rates[opencl].pipeline_ms());
    paths.iter().all(|path| *path == NumericPath::W8a8).then(|| opencl / (cpu + opencl))
}

/// Each different engine on the cores of both, where it computes on cores at all. A shaped one stands for hardware that has no more.
fn on_all_cores(specs: &[EngineSpec], paths: &[NumericPath]) -> Result<Vec<(EngineSpec, NumericPath)>, CliError> {
    let mut cores: Vec<usize> = specs.iter().flat_map(EngineSpec::resolved_cores).collect();
    cores.sort_unstable();
    let mut all: Vec<(EngineSpec, NumericPath)> = Vec::new();
    if specs.iter().any(|spec| spec.shape.is_some()) {
        return Ok(all);
    }
    for (spec, &path) in specs.iter().zip(paths) {
        let candidate = (spec.on(&cores), path);
        if is_on_cores(spec)? && !all.contains(&candidate) {
            all.push(candidate);
        }
    }
    Ok(all)
}

impl Configuration {
    /// Makes the clips once more.
    fn round(
        &mut self,
        models: &Models,
        args: &BenchVideoArgs,
        (noise, text): (&Tensor, &Tensor),
        blocks: usize,
    ) -> Result<(), CliError> {
        let mut lanes = match (self.kind, self.engines.as_slice()) {
            (Kind::HeteroTensor(share), [(first, _), (second, _)]) => {
                vec![models.hetero_tensor(&[first.clone(), second.clone()], share)?]
            }
            (_, engines) => {
                engines.iter().map(|(spec, path)| models.lane(spec, *path)).collect::<Result<Vec<_>, VideoError>>()?
            }
        };
        let items = (0..args.clips).map(|number| StreamItem {
            number,
            noise: noise.clone(),
            text: text.clone(),
            negative: None,
        });
        let decoder_ms = if self.kind.is_serial() { decoder_solo(args) } else { args.decoder_ms };
        let wait = |_: usize, _: &Clip, _: &ClipState| -> Result<(), VideoError> {
            if decoder_ms > 0.0 {
                std::thread::sleep(Duration::from_secs_f64(decoder_ms / 1e3));
            }
            Ok(())
        };
        let watch = |_: usize, _: &trefoil_video::Event<'_>| keep_going(0, blocks);
        let report: StreamReport = match self.kind {
            Kind::DataParallel => run_data_parallel(&mut lanes, items, &wait, &watch)?,
            Kind::Single | Kind::HeteroTensor(_) => {
                run_stream(&mut lanes, items, &mut |_, blocks| blocks, &mut { wait }, &watch)?
            }
            Kind::Pipeline(cut) => run_stream(&mut lanes, items, &mut |_, _| cut, &mut { wait }, &watch)?,
        };
        let per_clip = match self.kind {
            // Two clips end at about the same time, so the mean gap between ends says little about few clips.
            Kind::DataParallel => report.clips.last().map(|clip| clip.end_ms / args.clips as f64),
            _ => report.period_ms,
        };
        self.per_clip.extend(per_clip);
        self.latencies.extend(report.clips.iter().map(trefoil_video::stream::ClipReport::latency_ms));
        self.handoffs += match self.kind {
            Kind::HeteroTensor(_) => HeteroTensorEngine::EXCHANGES_PER_BLOCK * report.blocks * report.clips.len(),
            _ => report.handoffs,
        };
        self.idle = report.idle;
        self.scratch = lanes.iter().map(trefoil_video::Lane::scratch_bytes).collect();
        Ok(())
    }

    fn period(&self) -> Option<Samples> {
        Samples::from_values(&mut self.per_clip.clone())
    }

    fn latency(&self) -> Option<Samples> {
        Samples::from_values(&mut self.latencies.clone())
    }

    /// Share of clips within each factor of `best_ms`.
    fn attainment(&self, best_ms: f64) -> Vec<Value> {
        FACTORS
            .iter()
            .map(|factor| {
                let met = self.latencies.iter().filter(|&&latency| latency <= factor * best_ms).count();
                json!({ "factor": factor, "share": met as f64 / self.latencies.len().max(1) as f64 })
            })
            .collect()
    }
}

/// Which configuration a guard picks here, and why.
fn verdict(
    configurations: &[Configuration],
    best: &Configuration,
    single: &Configuration,
    best_latency: f64,
) -> String {
    let of = |configuration: &Configuration| configuration.period().map_or(f64::MAX, |samples| samples.median);
    if best.kind == Kind::Single {
        let divided =
            configurations.iter().filter(|row| row.kind != Kind::Single).min_by(|a, b| of(a).total_cmp(&of(b)));
        let why = divided.map_or_else(String::new, |other| {
            format!(
                ": the best that uses both engines, {}, has {} its throughput",
                other.name,
                format::ratio(of(best) / of(other))
            )
        });
        return format!("{} is best here{why}", best.name);
    }
    let mut text =
        format!("{} is best: {} the throughput of {}", best.name, format::ratio(of(single) / of(best)), single.name);
    if let Some(idle) = &best.idle {
        let idle: Vec<String> = idle.iter().map(|idle| format!("{:.0}%", idle * 100.0)).collect();
        let _ = write!(text, "; its engines wait {} of the time", idle.join(" and "));
    }
    if let Some(latency) = best.latency() {
        let factor = format::ratio(latency.median / best_latency);
        let _ = write!(text, ", and a clip takes {factor} what it takes on the fastest engine alone");
    }
    text
}

fn report(
    args: &BenchVideoArgs,
    configurations: &[Configuration],
    rates: &[EngineRate],
    (solo, corun): (&Cut, &Cut),
    (artefact, model, blocks): (&Path, &str, usize),
    notes: &[String],
) -> Result<(), CliError> {
    let median = |configuration: &Configuration| configuration.period().map_or(f64::MAX, |samples| samples.median);
    let singles = || configurations.iter().filter(|configuration| configuration.kind == Kind::Single);
    let best = configurations.iter().min_by(|a, b| median(a).total_cmp(&median(b)));
    let best_single = singles().min_by(|a, b| median(a).total_cmp(&median(b)));
    let best_latency = singles()
        .filter_map(|configuration| configuration.latency().map(|samples| samples.median))
        .fold(f64::INFINITY, f64::min);
    let verdict = best.zip(best_single).map(|(best, single)| verdict(configurations, best, single, best_latency));
    let is_shaped = configurations.iter().any(|row| row.engines.iter().any(|(spec, _)| spec.shape.is_some()));
    let origin = if args.decoder_ms > 0.0 || is_shaped { Origin::Emulated } else { Origin::Measured };
    let artefact_bytes = std::fs::metadata(artefact).map(|about| about.len()).ok();
    if args.json {
        let rows: Vec<Value> = configurations
            .iter()
            .map(|configuration| {
                let period = configuration.period();
                let error = period.as_ref().zip(configuration.predicted).map(|(period, predicted)| predicted / period.median - 1.0);
                json!({
                    "name": configuration.name,
                    "engines": configuration.engines.iter().map(|(spec, path)| json!({ "engine": spec.to_string(), "path": path })).collect::<Vec<_>>(),
                    "cut": match configuration.kind { Kind::Pipeline(cut) => Some(cut), _ => None },
                    "cpu_share": match configuration.kind { Kind::HeteroTensor(share) => Some(share), _ => None },
                    "ms_per_clip": period.as_ref().map(samples_json),
                    "rounds": configuration.per_clip,
                    "predicted_ms": configuration.predicted,
                    "prediction_error": error,
                    "latency_ms": configuration.latency().as_ref().map(samples_json),
                    "slo": configuration.attainment(best_latency),
                    "idle": configuration.idle,
                    "handoffs": configuration.handoffs,
                    "scratch_bytes": configuration.scratch,
                })
            })
            .collect();
        return print_json(&json!({
            "model": model,
            "tokens": args.tokens,
            "text_rows": args.text_rows,
            "blocks": blocks,
            "clips": args.clips,
            "rounds": args.rounds,
            "rates": rates,
            "cuts": { "solo": solo, "corun": corun },
            "decoder": { "ms": args.decoder_ms, "solo_ms": decoder_solo(args), "origin": Origin::Emulated },
            "origin": origin,
            "configurations": rows,
            "verdict": verdict,
            "weights": { "artefact_bytes": artefact_bytes, "copies": 1 },
            "peak_resident_bytes": trefoil_weights::memory::peak_resident_bytes(),
            "conditions": conditions(),
            "notes": notes,
        }));
    }
    let headings = ["configuration", ">ms per clip", ">p10 to p90", ">predicted", ">error", ">latency", ">handoffs"]
        .map(str::to_owned);
    let rows = configurations
        .iter()
        .map(|configuration| {
            let (period, latency) = (configuration.period(), configuration.latency());
            let error =
                period.as_ref().zip(configuration.predicted).map(|(period, predicted)| predicted / period.median - 1.0);
            let cells = [
                configuration.name.clone(),
                format::optional_time(period.as_ref().map(|samples| samples.median)),
                period
                    .as_ref()
                    .map_or_else(|| format::ABSENT.to_owned(), |samples| format::time_range(samples.p10, samples.p90)),
                format::optional_time(configuration.predicted),
                error.map_or_else(|| format::ABSENT.to_owned(), format::signed_percent),
                format::optional_time(latency.map(|samples| samples.median)),
                configuration.handoffs.to_string(),
            ];
            let is_best = best.is_some_and(|best| std::ptr::eq(best, configuration));
            cells.into_iter().map(|cell| (cell, is_best)).collect()
        })
        .collect();
    let title = format!(
        "{model}: {} tokens, {blocks} block executions a clip, {} rounds of {} clips, in turn",
        args.tokens, args.rounds, args.clips
    );
    let mut text = trefoil_report::text_table(&title, &headings, rows).render(TableFormat::Text, width());
    for rate in rates {
        let corun =
            rate.corun_ms.as_ref().map_or_else(|| format::ABSENT.to_owned(), |corun| format::time(corun.median));
        let _ = writeln!(
            text,
            "{} on {}: a block takes {} alone, {corun} while both run",
            rate.engine,
            rate.path,
            format::time(rate.solo_ms.median)
        );
    }
    if is_shaped {
        let _ = writeln!(text, "engines are slowed to stated rates: all times are emulated");
    }
    if configurations.iter().any(|row| matches!(row.kind, Kind::HeteroTensor(_))) {
        let _ = writeln!(
            text,
            "hetero-tensor hands over after every layer: {} times a block (the paper counts 26)",
            HeteroTensorEngine::EXCHANGES_PER_BLOCK
        );
    }
    if args.decoder_ms > 0.0 {
        let _ = writeln!(text, "the decoder is a stand-in that waits {} (emulated)", format::time(args.decoder_ms));
    }
    if let Some(verdict) = verdict {
        let _ = writeln!(text, "{verdict}");
    }
    for note in notes {
        eprintln!("note: {note}");
    }
    print(&text)
}
