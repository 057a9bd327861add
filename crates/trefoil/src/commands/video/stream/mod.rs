//! `trefoil video stream`: many prompts through the pipeline, the decoder in it, resumable, with baselines.

mod args;
mod files;
mod progress;
mod report;
mod source;
mod stage;

use args::OrderArg;
pub use args::StreamArgs;

use super::keep_going;
use super::lanes::{self, OpenLanes};
use super::orders::{self, Order};
use crate::cli::CutArg;
use crate::context::{check_distinct, check_writable, print, print_json, shown, write_text};
use crate::error::CliError;
use files::{SHEET, outputs_of, scratch_outputs, sheet};
use progress::Progress;
use report::{Configuration, Outcome};
use serde_json::json;
use source::Source;
use stage::Stage;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tempfile::TempDir;
use trefoil_core::Origin;
use trefoil_plan::stream::{Cut, VideoRates, cut_at, one_cut};
use trefoil_report::{TraceMeta, chrome_trace};
use trefoil_video::job::{Finished, Job};
use trefoil_video::output::ClipMetadata;
use trefoil_video::rates::EngineRate;
use trefoil_video::stream::{
    Cost, Denoised, Division, LaneCosts, LastStageOn, LastStageRate, Observed, StreamItem, StreamReport, forecast,
    measure_last_stage, run_data_parallel_with, run_stream_reporting,
};
use trefoil_video::{Clip, EngineSpec, Event, Lane, NumericPath, Tensor, VideoError};

/// Runs the command.
pub fn run(args: &StreamArgs) -> Result<(), CliError> {
    if !args.decoder_ms.is_finite() || !(0.0..=1e9).contains(&args.decoder_ms) {
        return Err(CliError::Usage(format!("--decoder-ms {} is no time", args.decoder_ms)));
    }
    check_writable(args.trace.as_deref())?;
    if let Some(folder) = &args.output {
        trefoil_files::check_new_folder(folder).map_err(CliError::file("write to", folder))?;
    }
    let text =
        args.text.as_ref().map(|text| PathBuf::from(text.rsplit_once(':').map_or(text.as_str(), |(file, _)| file)));
    let inputs = [Some(args.model.clone()), args.prompts.clone(), text, args.artefact.clone(), args.decoder.clone()];
    check_distinct(&[args.trace.as_deref()], &inputs.into_iter().flatten().collect::<Vec<_>>())?;
    // Before a folder is made for a job that cannot run.
    let engines = lanes::engines_of(&args.engines, args.processes)?;
    if engines.len() == 1 && args.cut != CutArg::Auto {
        return Err(CliError::Usage("--cut needs two engines, like --engines cpu@0,cpu@1".to_owned()));
    }
    let Some(last) = engines.last() else { return Err(CliError::Usage("name an engine with --engines".to_owned())) };
    let mut source = match (&args.prompts, &args.text) {
        (Some(prompts), _) => source::from_prompts(args, prompts, last)?,
        (None, Some(text)) => source::from_texts(args, text, last)?,
        (None, None) => {
            return Err(CliError::Usage(
                "name a file of prompts (trefoil video stream MODEL_DIR PROMPTS.txt -o DIR/), or with an artefact --text"
                    .to_owned(),
            ));
        }
    };
    let mut job = source.job.take();
    if source.todo.is_empty() {
        return nothing_to_do(args, &source, job.as_ref());
    }
    // Scales that nobody stored are found on the first clip in every run of a job, so that all its clips have the same.
    let first = source.item(0)?;
    let texts = (&first.noise, &first.text, first.negative.as_ref());
    let mut open = lanes::open_in(&source.artefact, &args.engines, texts, args.processes)?;
    source.notes.append(&mut open.notes);
    source.notes.extend(source.stage.notes());
    let prepared = prepare(args, &mut source, job.as_ref(), &mut open, &first)?;
    drop(first);

    let sink = job.as_mut().map_or(Sink::Nowhere, Sink::Job);
    let name = open.specs.iter().map(EngineSpec::to_string).collect::<Vec<_>>().join(",");
    let run = Run { args, source: &source, cut: prepared.cut, planned: prepared.planned, paths: &open.paths };
    let (report, mut stopped) = run.stream(&name, &mut open.lanes, &source.stage, sink);
    if let Some(path) = &args.trace {
        let meta = TraceMeta { title: format!("video stream on {name}"), ..TraceMeta::default() };
        write_text(path, &chrome_trace(None, Some(&report.timeline(origin(args))), &meta))?;
    }
    let processes = report::processes(&open, &source.artefact);
    let mut configurations = vec![Configuration::pipeline(name, report)];
    if args.baselines && stopped.is_none() {
        stopped = run.baselines(&open, job.as_ref(), &mut configurations)?;
    }
    let sheet = match &job {
        Some(job) if matches!(source.stage, Stage::Decode(_)) => match sheet(job, &source) {
            // What stopped the stream is what matters: on a full disk there is no room for a sheet either.
            Err(_) if stopped.is_some() => false,
            made => made?,
        },
        _ => false,
    };
    let finished = job.as_ref().map(|job| job.state().clips.iter().filter(|clip| clip.done.is_some()).count());
    let outcome = Outcome {
        args,
        source: &source,
        open: &open,
        configurations: &configurations,
        prepared: &prepared,
        job: job.as_ref(),
        has_sheet: sheet,
        processes: &processes,
        stopped: stopped.as_ref(),
    };
    outcome.tell()?;
    match stopped {
        None => Ok(()),
        Some(error) => Err(match finished {
            Some(done) => CliError::Stream { source: Box::new(error), done, all: source.clips.len() },
            None => error.into(),
        }),
    }
}

/// A job that is finished already; its contact sheet is made where it is missing.
fn nothing_to_do(args: &StreamArgs, source: &Source, job: Option<&Job>) -> Result<(), CliError> {
    let count = source.clips.len();
    if let Some(job) = job
        && matches!(source.stage, Stage::Decode(_))
        && !job.folder().join(SHEET).exists()
    {
        sheet(job, source)?;
    }
    if args.json {
        return print_json(
            &json!({ "clips": count, "skipped": count, "output": args.output.as_deref().map(shown), "configurations": [] }),
        );
    }
    print(&format!("all {count} clips are there already\n"))
}

/// What is known before the stream begins.
pub struct Prepared {
    /// Tokens of a clip.
    tokens: usize,
    /// Block executions of a clip.
    blocks: usize,
    /// First execution of the second engine.
    cut: usize,
    /// Measured rates, where the cut comes from them.
    rates: Option<Vec<EngineRate>>,
    /// The last stage's.
    last_stage: Option<LastStageRate>,
    /// The host's work around the blocks of a branch, for each engine, in milliseconds.
    host_ms: Vec<f64>,
    /// A clip's conditions (text contexts, timesteps), in milliseconds.
    conditions_ms: f64,
    /// What all of it promises for the cut.
    planned: Option<Cut>,
    /// The mean time between ends of as many clips as are to be made, from the same.
    forecast_ms: Option<f64>,
    /// Both orders of the engines, where they were compared.
    orders: Option<[Order; 2]>,
}

/// Measures what is asked for and chooses the cut (HeteroVDiff 4.3), and with `--order auto` the engine that ends a clip.
fn prepare(
    args: &StreamArgs,
    source: &mut Source,
    job: Option<&Job>,
    open: &mut OpenLanes,
    first: &StreamItem,
) -> Result<Prepared, CliError> {
    let model = open.lanes[0].model().clone();
    let begun = Instant::now();
    let clip = Clip::new(open.lanes[0].host_mut(), &model, &first.noise, &first.text, first.negative.as_ref())?;
    let mut conditions_ms = begun.elapsed().as_secs_f64() * 1e3;
    let blocks = clip.trajectory().blocks();
    let is_measured = args.cut == CutArg::Auto && open.lanes.len() == 2;
    let inputs = (&clip, &first.noise);
    let mut last_stage = if is_measured {
        Some(measured_stage(&source.stage, source.shape, job, (&mut open.lanes[0], inputs))?)
    } else {
        None
    };
    // The same at the end of the engine that comes first.
    let mut other = match (args.order, is_measured) {
        (OrderArg::Auto, true) => {
            let stage = source.stage.on(&open.specs[0])?;
            let rate = measured_stage(&stage, source.shape, job, (&mut open.lanes[1], inputs))?;
            Some((stage, rate))
        }
        _ => None,
    };
    let last_ms = last_stage.as_ref().map_or(args.decoder_ms, LastStageRate::pipeline_ms);
    let (mut cut, mut rates) = lanes::choose_cut(args.cut, &mut open.lanes, &clip, &first.noise, last_ms)?;
    let mut host_ms = Vec::new();
    for lane in &mut open.lanes {
        host_ms.push(lane.time_host(&clip, &first.noise)?.as_secs_f64() * 1e3);
    }
    let (mut planned, mut orders) = (None, None);
    if let Some([one, two]) = rates.as_deref() {
        let (noise, text) = (&first.noise, &first.text);
        conditions_ms = open.lanes[0].time_conditions(noise, text, first.negative.as_ref())?.as_secs_f64() * 1e3;
        // What the host does around a branch's blocks belongs to each of them, and a clip's conditions to the first engine.
        let around = |rate: &EngineRate, host: f64| rate.pipeline_ms() + host / clip.trajectory().layers as f64;
        let block_ms = [around(one, host_ms[0]), around(two, host_ms[1])];
        let conditions = conditions_ms / blocks as f64;
        let rates = VideoRates { first: block_ms[0] + conditions, second: block_ms[1], decoder: last_ms };
        let mut best = one_cut(rates, blocks as u32)?;
        if let Some((_, rate)) = &other {
            let names = [one.engine.clone(), two.engine.clone()];
            let both = orders::both(names, block_ms, conditions, [rate.pipeline_ms(), last_ms], blocks)?;
            best = both[orders::best(&both)].cut;
            orders = Some(both);
        }
        cut = best.cut as usize;
        planned = Some(best);
    }
    if let Some((stage, rate)) = other.take_if(|_| orders.as_ref().is_some_and(|both| orders::best(both) == 1)) {
        source.stage = stage;
        last_stage = Some(rate);
        open.reverse();
        host_ms.reverse();
        if let Some(rates) = &mut rates {
            rates.reverse();
        }
    }
    // A decoder on the engine that was not chosen may have had its place.
    drop(other);
    source.stage.ready()?;
    let forecast_ms = match (rates.as_deref(), &last_stage) {
        (Some(rates), Some(last)) => {
            let last = last.cost();
            let costs: Vec<LaneCosts> = rates
                .iter()
                .zip(&host_ms)
                .map(|(rate, &host_ms)| LaneCosts::of(rate, &clip, host_ms, Cost::always(conditions_ms), last))
                .collect();
            forecast(&costs, Division::Cut(cut), source.todo.len()).period_ms()
        }
        _ => None,
    };
    let tokens = clip.tokens();
    Ok(Prepared { tokens, blocks, cut, rates, last_stage, host_ms, conditions_ms, planned, forecast_ms, orders })
}

/// The last stage at the end of one engine, alone and while the other one, `beside`, runs blocks.
fn measured_stage(
    stage: &Stage,
    [_, _, frames, rows, columns]: [usize; 5],
    job: Option<&Job>,
    (beside, (clip, noise)): (&mut Lane, (&Clip, &Tensor)),
) -> Result<LastStageRate, CliError> {
    let folder = job.map_or_else(std::env::temp_dir, |job| job.folder().to_owned());
    let check = || keep_going(0, clip.trajectory().blocks());
    let mut timed = || {
        let ms = stage.time([frames, rows, columns], &folder, &check)?;
        let begun = Instant::now();
        job.map_or(Ok(()), Job::write)?;
        Ok(ms + begun.elapsed().as_secs_f64() * 1e3)
    };
    Ok(measure_last_stage(&mut timed, Some((beside, clip, noise)), &check)?)
}

/// Where finished clips go.
enum Sink<'a> {
    /// Into the job's folder.
    Job(&'a mut Job),
    /// Into a folder that is removed.
    Scratch(&'a TempDir),
    /// Nowhere.
    Nowhere,
}

/// What all configurations of a command share.
struct Run<'a> {
    args: &'a StreamArgs,
    source: &'a Source,
    cut: usize,
    planned: Option<Cut>,
    paths: &'a [NumericPath],
}

impl Run<'_> {
    /// Runs the clips that are to be made on these engines.
    fn stream(
        &self,
        name: &str,
        lanes: &mut [Lane],
        stage: &Stage,
        mut sink: Sink<'_>,
    ) -> (StreamReport, Option<VideoError>) {
        let (args, source, cut) = (self.args, self.source, self.cut);
        let engines: Vec<String> = lanes.iter().map(|lane| lane.engine().name().to_owned()).collect();
        let paths: Vec<NumericPath> = lanes.iter().map(|lane| lane.engine().path()).collect();
        let predicted = self.planned.filter(|_| lanes.len() == 2).map(|cut| (cut.latency, cut.period));
        let progress = Progress::new(name, &engines, source.todo.len(), predicted, args.json);
        let trajectory = trajectory_of(&lanes[0]);
        let total = source.todo.len() * trajectory.blocks();
        let executed = AtomicUsize::new(0);
        let watch = |number: usize, event: &Event<'_>| -> Result<(), VideoError> {
            if let Event::Blocks { .. } = event {
                let executed = executed.fetch_add(1, Ordering::Relaxed) + 1;
                progress.event(number, trajectory, event);
                return keep_going(executed, total);
            }
            Ok(())
        };
        let mut finish = |done: &Denoised<'_>| -> Result<(), VideoError> {
            progress
                .last_stage(done.number, if matches!(source.stage, Stage::Decode(_)) { "decoding" } else { "writing" });
            let metadata = self.metadata(done, &engines, &paths);
            let outputs = match &sink {
                Sink::Job(job) => Some(outputs_of(job, source, done.number, metadata.clone())?),
                Sink::Scratch(folder) => Some(scratch_outputs(folder.path(), source, done.number, metadata.clone())),
                Sink::Nowhere => None,
            };
            let report = stage.run(done, outputs.as_ref())?;
            if let Sink::Job(job) = &mut sink {
                job.finish(
                    done.number,
                    Finished {
                        frames: report.map(|report| report.frames),
                        plan: metadata.plan,
                        numeric_path: Some(metadata.numeric_path),
                        warning: report.and_then(|report| report.health.warning()),
                        ..Finished::default()
                    },
                )?;
            }
            progress.finished();
            Ok(())
        };
        // Items are made as they are needed; a shape that does not fit is refused by the first of them.
        let mut bad = None;
        let items = source.todo.iter().map_while(|&number| match source.item(number) {
            Ok(item) => Some(item),
            Err(error) => {
                bad = Some(error);
                None
            }
        });
        let mut choose = |observed: &Observed, blocks: usize| match (args.online, observed) {
            (true, Observed { first_ms: Some(first), second_ms: Some(second), last_stage_ms: Some(decoder) }) => {
                let rates = VideoRates { first: *first, second: *second, decoder: *decoder };
                one_cut(rates, blocks as u32).map_or(cut, |best| best.cut as usize)
            }
            _ => cut,
        };
        let (report, stopped) = run_stream_reporting(lanes, items, &mut choose, &mut finish, &watch);
        (report, stopped.or(bad))
    }

    /// What a clip's files say.
    fn metadata(&self, done: &Denoised<'_>, engines: &[String], paths: &[NumericPath]) -> ClipMetadata {
        let (blocks, cut) = (done.clip.trajectory().blocks(), done.cut);
        let plan = &self.source.clips[done.number];
        let used = match engines.len() {
            1 => 0..1,
            _ if cut == 0 => 1..2,
            _ if cut == blocks => 0..1,
            _ => 0..2,
        };
        let mut names: Vec<String> = paths[used.clone()].iter().map(NumericPath::to_string).collect();
        names.dedup();
        let engines = engines[used.clone()].join(" then ");
        ClipMetadata {
            fps: self.source.stage.fps().unwrap_or(1),
            prompt: self.source.has_prompts.then(|| plan.prompt.clone()),
            seed: Some(u64::from(plan.seed)),
            numeric_path: self.source.stage.numeric_path(&names.join("/")),
            plan: Some(if used.len() == 2 { format!("{engines} cut at {cut} of {blocks}") } else { engines }),
            source: None,
        }
    }

    /// Each engine alone over the same clips, one engine on the cores of both, and data-parallel; one after the other, what they write
    /// is removed. Returns why they stopped early.
    fn baselines(
        &self,
        open: &OpenLanes,
        job: Option<&Job>,
        configurations: &mut Vec<Configuration>,
    ) -> Result<Option<VideoError>, CliError> {
        let [first, second] = open.specs.as_slice() else { return Ok(None) };
        let mut cores = first.resolved_cores();
        cores.extend(second.resolved_cores());
        cores.sort_unstable();
        cores.dedup();
        let both = EngineSpec::cpu(&cores);
        let mut contenders: Vec<(EngineSpec, NumericPath)> =
            open.specs.iter().cloned().zip(self.paths.iter().copied()).collect();
        let mut paths = self.paths.to_vec();
        paths.dedup();
        contenders.extend(paths.into_iter().map(|path| (both.clone(), path)));
        let scratch = || match job {
            Some(job) => tempfile::Builder::new().prefix(".trefoil-baseline-").tempdir_in(job.folder()).map(Some),
            None => Ok(None),
        };
        let fail = |source| CliError::File { action: "write", path: "the job's folder".into(), source };
        for (spec, path) in contenders {
            let mut lanes = [open.models.lane(&spec, path)?];
            let stage = self.source.stage.on(&spec)?;
            let name = format!("{spec} alone, {path}");
            let folder = scratch().map_err(fail)?;
            let sink = folder.as_ref().map_or(Sink::Nowhere, Sink::Scratch);
            let (report, stopped) = self.stream(&name, &mut lanes, &stage, sink);
            if stopped.is_some() {
                return Ok(stopped);
            }
            configurations.push(Configuration::single(name, report));
        }
        let folder = scratch().map_err(fail)?;
        match self.data_parallel(open, folder.as_ref()) {
            Ok(ran) => configurations.push(ran),
            Err(error) => return Ok(Some(error)),
        }
        Ok(None)
    }

    /// Whole clips from one queue on both engines; where one process cannot decode on both, the last engine does for both.
    fn data_parallel(&self, open: &OpenLanes, folder: Option<&TempDir>) -> Result<Configuration, VideoError> {
        let source = self.source;
        let engines = || open.specs.iter().zip(self.paths);
        let mut lanes = engines().map(|(spec, &path)| open.models.lane(spec, path)).collect::<Result<Vec<_>, _>>()?;
        let (is_each, name) = match open.specs.as_slice() {
            [one, other] if !source.stage.fits_both([one, other])? => {
                (false, format!("data-parallel, {other} decodes all"))
            }
            _ => (true, "data-parallel".to_owned()),
        };
        let skipped = if is_each { 0 } else { open.specs.len().saturating_sub(1) };
        let stages =
            open.specs.iter().skip(skipped).map(|spec| source.stage.on(spec)).collect::<Result<Vec<_>, _>>()?;
        let on = if is_each { LastStageOn::Each } else { LastStageOn::Last };
        let names: Vec<String> = open.specs.iter().map(EngineSpec::to_string).collect();
        let progress = Progress::new(&name, &names, source.todo.len(), None, self.args.json);
        let trajectory = trajectory_of(&lanes[0]);
        let finish = |done: &Denoised<'_>| {
            let engine = done.lane..=done.lane;
            let metadata = self.metadata(done, &names[engine.clone()], &self.paths[engine]);
            let outputs = folder.map(|folder| scratch_outputs(folder.path(), source, done.number, metadata));
            stages[done.lane - skipped].run(done, outputs.as_ref())?;
            progress.finished();
            Ok(())
        };
        let watch = |number: usize, event: &Event<'_>| {
            progress.event(number, trajectory, event);
            keep_going(0, trajectory.blocks())
        };
        let items = source.todo.iter().filter_map(|&number| source.item(number).ok());
        let report = run_data_parallel_with(&mut lanes, items, on, &finish, &watch)?;
        Ok(Configuration::data_parallel(name, report))
    }
}

fn trajectory_of(lane: &Lane) -> trefoil_video::Trajectory {
    let (sampler, layers) = (lane.model().sampler(), lane.model().config().layers);
    trefoil_video::Trajectory { steps: sampler.steps(), branches: sampler.branches(), layers }
}

/// A stand-in for the decoder or a shaped engine makes the times emulated.
fn origin(args: &StreamArgs) -> Origin {
    if args.decoder_ms > 0.0 || args.engines.engines.iter().any(|engine| engine.shape.is_some()) {
        Origin::Emulated
    } else {
        Origin::Measured
    }
}

/// Equation 4 with rates that were observed, at the cut that ran.
fn period_of(observed: &Observed, blocks: usize, cut: usize) -> Option<f64> {
    let decoder = observed.last_stage_ms?;
    // An engine without blocks has no rate and needs none.
    let first = if cut > 0 { observed.first_ms? } else { 0.0 };
    let second = if cut < blocks { observed.second_ms? } else { 0.0 };
    Some(cut_at(VideoRates { first, second, decoder }, blocks as u32, cut as u32).ok()?.period)
}
