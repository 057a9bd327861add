//! `trefoil video stream`: many prompts through the pipeline, resumable, with baselines.

use super::lanes::{self, OpenLanes};
use super::{block_bar, blocks, keep_going, rates::conditions};
use crate::cli::{CutArg, StreamArgs};
use crate::context::{check_writable, print, print_json, width, write_text};
use crate::error::CliError;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trefoil_core::Origin;
use trefoil_plan::stream::{VideoRates, one_cut};
use trefoil_report::{TableFormat, TraceMeta, chrome_trace, format};
use trefoil_video::noise::torch_normals;
use trefoil_video::rates::EngineRate;
use trefoil_video::stream::{ClipReport, Observed, StreamItem, StreamReport, run_stream};
use trefoil_video::tensors::{tensor_names, write_tensors};
use trefoil_video::{Clip, ClipState, EngineSpec, Event, Lane, Model, NumericPath, Tensor, TensorPath, VideoError};

/// Most clips of one stream.
const MAX_CLIPS: usize = 100_000;
/// Describes the job in its folder, so that another job does not go on in it.
const JOB_FILE: &str = "job.json";

/// One way to run the stream, and how it went.
struct Configuration {
    name: String,
    report: StreamReport,
}

/// Runs the command.
pub fn run(args: &StreamArgs) -> Result<(), CliError> {
    if !args.decoder_ms.is_finite() || args.decoder_ms < 0.0 {
        return Err(CliError::Usage(format!("--decoder-ms {} is no time", args.decoder_ms)));
    }
    check_writable(args.trace.as_deref())?;
    let prompts = read_prompts(&args.text)?;
    let count = args.count.unwrap_or(prompts.len());
    if count == 0 || count > MAX_CLIPS {
        return Err(CliError::Usage(format!("{count} clips; it must lie in 1..={MAX_CLIPS}")));
    }
    let model = Model::open(&args.artefact)?;
    let [frames, rows, columns] = args.latent.0;
    let shape = [1, model.config().channels, frames, rows, columns];
    if model.sampler().branches() > 1 {
        return Err(CliError::Usage(format!(
            "the sampler has guidance {}, which a stream of prompts without negative texts cannot serve; pack with guidance 1",
            model.sampler().guidance
        )));
    }
    drop(model);
    let job = Job { shape, seed: args.seed, prompts: &prompts };
    let done = match &args.output {
        Some(folder) => prepare_folder(folder, args, &prompts)?,
        None => BTreeSet::new(),
    };
    let numbers: Vec<usize> = (0..count).filter(|number| !done.contains(number)).collect();
    let first = job.item(numbers.first().copied().unwrap_or(0))?;
    let mut open = lanes::open(&args.artefact, &args.engines, (&first.noise, &first.text, None))?;
    if numbers.is_empty() {
        return print(&format!("all {count} clips are there already\n"));
    }
    let model = open.lanes[0].model().clone();
    let clip = Clip::new(open.lanes[0].host_mut(), &model, &first.noise, &first.text, None)?;
    let tokens = clip.tokens();
    let (cut, rates) = lanes::choose_cut(args.cut, &mut open.lanes, &clip, &first.noise, args.decoder_ms)?;
    drop(clip);
    let name = args.engines.engines.clone();
    let report = one_stream(&name, &mut open.lanes, &job, &numbers, cut, args, args.output.as_deref())?;
    if let Some(path) = &args.trace {
        let meta = TraceMeta { title: format!("video stream on {name}"), ..TraceMeta::default() };
        write_text(path, &chrome_trace(None, Some(&report.timeline(origin(args))), &meta))?;
    }
    let mut configurations = vec![Configuration { name, report }];
    if args.baselines {
        configurations.extend(baselines(&open, &job, &numbers, args)?);
    }
    finish(args, &open, &configurations, (cut, rates.as_deref()), (count, done.len(), tokens), blocks(&model))
}

/// What clips are made of.
struct Job<'a> {
    shape: [usize; 5],
    seed: u32,
    prompts: &'a [(String, Tensor)],
}

impl Job<'_> {
    /// Clip `number`: its own noise, the prompts in turn.
    fn item(&self, number: usize) -> Result<StreamItem, VideoError> {
        let len: usize = self.shape.iter().product();
        let mut values = torch_normals(self.seed.wrapping_add(number as u32), len.max(16));
        values.truncate(len);
        let noise = Tensor::new(format!("noise of clip {number}"), &self.shape, values)?;
        let (_, text) = &self.prompts[number % self.prompts.len()];
        Ok(StreamItem { number, noise, text: text.clone(), negative: None })
    }
}

/// Every tensor of a file, or the one that is named.
fn read_prompts(text: &str) -> Result<Vec<(String, Tensor)>, CliError> {
    // A file whose name holds a colon is still a file.
    if !Path::new(text).is_file()
        && let Ok(path) = text.parse::<TensorPath>()
    {
        return Ok(vec![(path.key.clone(), path.read()?)]);
    }
    let file = PathBuf::from(text);
    let names = tensor_names(&file)?;
    if names.is_empty() {
        return Err(CliError::Usage(format!("{text} holds no tensor, so there is no prompt")));
    }
    let read = |name: &String| Ok((name.clone(), TensorPath { file: file.clone(), key: name.clone() }.read()?));
    Ok(names.iter().map(read).collect::<Result<Vec<_>, VideoError>>()?)
}

/// Numbers of the clips that a job folder holds already. A new folder gets the job's description.
fn prepare_folder(folder: &Path, args: &StreamArgs, prompts: &[(String, Tensor)]) -> Result<BTreeSet<usize>, CliError> {
    let fail = |action| move |source| CliError::File { action, path: folder.to_owned(), source };
    std::fs::create_dir_all(folder).map_err(fail("create"))?;
    let model = Model::open(&args.artefact)?;
    let names: Vec<&str> = prompts.iter().map(|(name, _)| name.as_str()).collect();
    let description = json!({
        "artefact": model.artefact().map(trefoil_weights::Artefact::fingerprint_hex),
        "prompts": names,
        "latent": args.latent.0,
        "seed": args.seed,
        "path": args.engines.path,
    });
    let file = folder.join(JOB_FILE);
    match std::fs::read(&file) {
        Ok(text) => {
            let found: Option<Value> = serde_json::from_slice(&text).ok();
            if found.as_ref() != Some(&description) {
                return Err(CliError::Usage(format!(
                    "{} holds clips of another job (see {JOB_FILE} in it); name another folder",
                    folder.display()
                )));
            }
        }
        Err(_) => write_text(&file, &format!("{description:#}\n"))?,
    }
    let mut done = BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(fail("list"))? {
        let name = entry.map_err(fail("list"))?.file_name();
        let number: Option<usize> =
            name.to_str().and_then(|name| name.strip_prefix("clip-")?.strip_suffix(".safetensors")?.parse().ok());
        done.extend(number);
    }
    Ok(done)
}

/// Runs the clips on these engines; `folder` gets the latents.
fn one_stream(
    name: &str,
    lanes: &mut [Lane],
    job: &Job<'_>,
    numbers: &[usize],
    cut: usize,
    args: &StreamArgs,
    folder: Option<&Path>,
) -> Result<StreamReport, CliError> {
    let per_clip = lanes.first().map_or(0, |lane| blocks(lane.model()));
    let bar = block_bar(args.json);
    bar.set_length((numbers.len() * per_clip) as u64);
    bar.set_message(name.to_owned());
    let executed = AtomicUsize::new(0);
    let watch = |_: usize, event: &Event<'_>| -> Result<(), VideoError> {
        if let Event::Blocks { .. } = event {
            let executed = executed.fetch_add(1, Ordering::Relaxed) + 1;
            bar.set_position(executed as u64);
            return keep_going(executed, numbers.len() * per_clip);
        }
        Ok(())
    };
    let mut finish = |number: usize, clip: &Clip, state: &ClipState| -> Result<(), VideoError> {
        if args.decoder_ms > 0.0 {
            std::thread::sleep(Duration::from_secs_f64(args.decoder_ms / 1e3));
        }
        let Some(folder) = folder else { return Ok(()) };
        let [channels, frames, height, width] = clip.shape();
        let latent = Tensor::new("latent", &[1, channels, frames, height, width], clip.unpatchify(state.latent()))?;
        write_tensors(&folder.join(format!("clip-{number:04}.safetensors")), &[("latent".to_owned(), latent)])
    };
    // Items are made as they are needed; a shape that does not fit is refused by the first of them.
    let mut bad = None;
    let items = numbers.iter().map_while(|&number| match job.item(number) {
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
    let report = run_stream(lanes, items, &mut choose, &mut finish, &watch)?;
    bar.finish_and_clear();
    match bad {
        Some(error) => Err(error.into()),
        None => Ok(report),
    }
}

/// Each engine alone over the same clips, and one engine on the cores of both; without outputs, one after the other.
fn baselines(
    open: &OpenLanes,
    job: &Job<'_>,
    numbers: &[usize],
    args: &StreamArgs,
) -> Result<Vec<Configuration>, CliError> {
    let mut contenders: Vec<(EngineSpec, NumericPath)> = Vec::new();
    if let [first, second] = open.specs.as_slice() {
        let mut cores = first.resolved_cores();
        cores.extend(second.resolved_cores());
        cores.sort_unstable();
        let both = EngineSpec::cpu(&cores);
        contenders.extend(open.specs.iter().cloned().zip(open.paths.iter().copied()));
        let mut paths = open.paths.clone();
        paths.dedup();
        contenders.extend(paths.into_iter().map(|path| (both.clone(), path)));
    }
    let mut results = Vec::new();
    for (spec, path) in contenders {
        let mut lanes = [open.models.lane(&spec, path)?];
        let name = format!("{spec} alone, {path}");
        let report = one_stream(&name, &mut lanes, job, numbers, 0, args, None)?;
        results.push(Configuration { name, report });
    }
    Ok(results)
}

/// A stand-in for the decoder or a shaped engine makes the times emulated.
fn origin(args: &StreamArgs) -> Origin {
    if args.decoder_ms > 0.0 || args.engines.engines.contains('=') { Origin::Emulated } else { Origin::Measured }
}

/// Milliseconds per clip: the steady period, or with one clip its latency.
fn per_clip(report: &StreamReport) -> Option<f64> {
    report.period_ms.or(report.fill_ms)
}

fn finish(
    args: &StreamArgs,
    open: &OpenLanes,
    configurations: &[Configuration],
    (cut, rates): (usize, Option<&[EngineRate]>),
    (count, skipped, tokens): (usize, usize, usize),
    blocks: usize,
) -> Result<(), CliError> {
    let Some(main) = configurations.first() else { return Ok(()) };
    let predicted = match rates {
        Some(rates) => Some(lanes::planned_cut(rates, blocks, args.decoder_ms, EngineRate::pipeline_ms)?.period),
        None => None,
    };
    let best = configurations
        .iter()
        .min_by(|a, b| per_clip(&a.report).unwrap_or(f64::MAX).total_cmp(&per_clip(&b.report).unwrap_or(f64::MAX)));
    let verdict = best.map(|best| {
        if best.name == main.name {
            format!("{} is the fastest of the configurations that ran", main.name)
        } else {
            format!("{} is best here; the engines asked for were slower", best.name)
        }
    });
    let origin = origin(args);
    let memory = json!({
        "artefact_bytes": std::fs::metadata(&args.artefact).map(|about| about.len()).ok(),
        "scratch_bytes": open.lanes.iter().map(Lane::scratch_bytes).collect::<Vec<_>>(),
        "peak_resident_bytes": trefoil_weights::memory::peak_resident_bytes(),
    });
    if args.json {
        let table: Vec<Value> = configurations
            .iter()
            .map(|configuration| {
                json!({
                    "name": configuration.name,
                    "ms_per_clip": per_clip(&configuration.report),
                    "report": configuration.report,
                    "latency_ms": configuration.report.clips.iter().map(ClipReport::latency_ms).collect::<Vec<_>>(),
                })
            })
            .collect();
        return print_json(&json!({
            "clips": count,
            "skipped": skipped,
            "tokens": tokens,
            "blocks": blocks,
            "cut": cut,
            "cut_arg": match args.cut { CutArg::Auto => json!("auto"), CutArg::At(cut) => json!(cut) },
            "online": args.online,
            "rates": rates,
            "predicted_period_ms": predicted,
            "period_ms": main.report.period_ms,
            "decoder": { "ms": args.decoder_ms, "origin": Origin::Emulated },
            "origin": origin,
            "configurations": table,
            "verdict": verdict,
            "memory": memory,
            "conditions": conditions(),
            "output": args.output,
            "notes": open.notes,
        }));
    }
    let headings = ["configuration", ">ms per clip", ">latency", ">idle", ">handoffs"].map(str::to_owned);
    let rows = configurations
        .iter()
        .map(|configuration| {
            let report = &configuration.report;
            let mut latencies: Vec<f64> = report.clips.iter().map(ClipReport::latency_ms).collect();
            let latency = trefoil_core::Samples::from_values(&mut latencies);
            let idle = report.idle.as_ref().map_or_else(
                || format::ABSENT.to_owned(),
                |idle| idle.iter().map(|share| format::percent(*share)).collect::<Vec<_>>().join(" / "),
            );
            let cells = [
                configuration.name.clone(),
                format::optional_time(per_clip(report)),
                format::optional_time(latency.map(|samples| samples.median)),
                idle,
                report.handoffs.to_string(),
            ];
            cells.into_iter().map(|cell| (cell, false)).collect()
        })
        .collect();
    let title = format!("{} clips of {tokens} tokens, {blocks} block executions each ({origin:?})", count - skipped);
    let table = trefoil_report::text_table(&title.to_lowercase(), &headings, rows);
    let mut text = table.render(TableFormat::Text, width());
    if open.lanes.len() == 2 {
        let _ = write!(text, "cut {cut} of {blocks}");
        if let Some(predicted) = predicted {
            let _ = write!(text, ", period {} (predicted from rates while both run)", format::time(predicted));
        }
        text.push('\n');
    }
    if args.decoder_ms > 0.0 {
        let _ = writeln!(text, "the decoder is a stand-in that waits {} (emulated)", format::time(args.decoder_ms));
    }
    if let (Some(verdict), true) = (verdict, configurations.len() > 1) {
        let _ = writeln!(text, "{verdict}");
    }
    for note in &open.notes {
        eprintln!("note: {note}");
    }
    print(&text)
}
