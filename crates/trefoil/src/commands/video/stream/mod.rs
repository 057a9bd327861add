//! `trefoil video stream`: many prompts through the pipeline, the decoder in it, resumable, with baselines.

mod args;
mod files;
mod prepare;
mod progress;
mod report;
mod source;
mod stage;

pub use args::StreamArgs;

use super::keep_going;
use super::lanes::{self, Models, OpenLanes};
use crate::cli::CutArg;
use crate::context::{check_distinct, check_writable, print, print_json, shown, write_text};
use crate::error::CliError;
use files::{SHEET, outputs_of, scratch_outputs, sheet};
use prepare::{Prepared, prepare};
use progress::Progress;
use report::{Configuration, Outcome};
use serde_json::json;
use source::Source;
use stage::Stage;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;
use trefoil_core::Origin;
use trefoil_plan::stream::{Cut, VideoRates, cut_at, one_cut};
use trefoil_report::{TraceMeta, chrome_trace, format};
use trefoil_video::job::{Finished, Job};
use trefoil_video::output::ClipMetadata;
use trefoil_video::stream::{
    Denoised, FailedClip, LastStageOn, Observed, StreamReport, run_data_parallel_with, run_stream_reporting,
};
use trefoil_video::{EngineSpec, Event, Lane, NumericPath, VideoError};

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
    let run = Run {
        args,
        source: &source,
        models: &open.models,
        cut: prepared.cut,
        planned: prepared.planned,
        block_ms: prepared.block_ms,
        paths: &open.paths,
    };
    let (report, mut stopped) = run.stream(&name, &mut open.lanes, &source.stage, sink);
    let failed = report.failed.clone();
    if let Some(job) = &mut job {
        failed.iter().try_for_each(|clip| job.fail(clip.item, clip.reason.clone()))?;
    }
    if let Some(path) = &args.trace {
        let meta = TraceMeta { title: format!("video stream on {name}"), ..TraceMeta::default() };
        write_text(path, &chrome_trace(None, Some(&report.timeline(origin(args))), &meta))?;
    }
    let processes = report::processes(&open, &source.artefact);
    let mut configurations = vec![Configuration::pipeline(name, report)];
    if args.baselines && stopped.is_none() && failed.is_empty() {
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
        None => told_of_failed(&failed, finished, source.clips.len()),
        Some(error) => Err(match finished {
            Some(done) => CliError::Stream { source: Box::new(error), done, all: source.clips.len() },
            None => error.into(),
        }),
    }
}

/// The error of a stream that made all clips but some.
fn told_of_failed(failed: &[FailedClip], finished: Option<usize>, all: usize) -> Result<(), CliError> {
    let Some(first) = failed.first() else { return Ok(()) };
    let others = match failed.len() {
        1 => String::new(),
        count => format!(", and {} more", format::plural(count - 1, "clip")),
    };
    let finished = finished.map_or_else(String::new, |done| format!("; {done} of {all} clips are finished"));
    Err(CliError::Failed(format!("clip {} could not be made: {}{others}{finished}", first.item + 1, first.reason)))
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
    models: &'a Models,
    cut: usize,
    planned: Option<Cut>,
    /// Milliseconds of a block on either engine, for one that was not observed yet.
    block_ms: Option<[f64; 2]>,
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
            self.models.packed().check_unchanged()?;
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
        let mut choose = |observed: &Observed, blocks: usize| {
            let better = args.online.then(|| online_cut(observed, self.block_ms, blocks)).flatten();
            better.unwrap_or(cut)
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

/// The best cut by what was observed. An engine that has had no block yet is taken at the rate that was measured before the stream:
/// otherwise a first cut at either end would be the cut of all clips.
fn online_cut(observed: &Observed, measured: Option<[f64; 2]>, blocks: usize) -> Option<usize> {
    let first = observed.first_ms.or(measured.map(|rates| rates[0]))?;
    let second = observed.second_ms.or(measured.map(|rates| rates[1]))?;
    let rates = VideoRates { first, second, decoder: observed.last_stage_ms? };
    Some(one_cut(rates, blocks as u32).ok()?.cut as usize)
}

/// Equation 4 with rates that were observed, at the cut that ran.
fn period_of(observed: &Observed, blocks: usize, cut: usize) -> Option<f64> {
    let decoder = observed.last_stage_ms?;
    // An engine without blocks has no rate and needs none.
    let first = if cut > 0 { observed.first_ms? } else { 0.0 };
    let second = if cut < blocks { observed.second_ms? } else { 0.0 };
    Some(cut_at(VideoRates { first, second, decoder }, blocks as u32, cut as u32).ok()?.period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_without_blocks_is_cut_for_at_its_measured_rate() {
        let all_on_second = Observed { first_ms: None, second_ms: Some(2.0), last_stage_ms: Some(0.0) };
        assert_eq!(online_cut(&all_on_second, Some([2.0, 9.0]), 12), Some(6), "what was observed counts");
        assert_eq!(online_cut(&all_on_second, None, 12), None);
        let all_on_first = Observed { first_ms: Some(2.0), second_ms: None, last_stage_ms: Some(0.0) };
        assert_eq!(online_cut(&all_on_first, Some([9.0, 4.0]), 12), Some(8));
        assert_eq!(online_cut(&Observed::default(), Some([1.0, 1.0]), 12), None, "no clip has ended yet");
    }
}
