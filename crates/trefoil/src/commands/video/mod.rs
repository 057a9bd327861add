//! `trefoil video`: pack, describe, calibrate, denoise, measure and stream video diffusion transformers.

mod bench;
mod cache;
pub mod decode;
pub mod decoder;
mod denoise;
pub mod encode;
pub mod generate;
mod lanes;
mod memory;
mod orders;
pub mod quality;
mod rates;
mod shared;
mod size;
pub mod stream;

use crate::cli::{CalibrateArgs, VideoCommand, VideoInfoArgs, VideoPackArgs};
use crate::context::{check_distinct, check_replaceable, print, print_json, stop_flag};
use crate::error::CliError;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use trefoil_kernels::Kernels;
use trefoil_video::checkpoint::CheckpointOptions;
use trefoil_video::engine::EngineKind;
use trefoil_video::vae::VaeError;
use trefoil_video::{
    Calibration, CalibrationClip, EngineSpec, Model, Sampler, TensorPath, VideoError, VideoPackOptions, pack_video,
};
use trefoil_weights::{Artefact, PackProgress, render_info};

pub use bench::run as bench;

/// Runs the command.
pub fn run(command: &VideoCommand) -> Result<(), CliError> {
    match command {
        VideoCommand::Pack(args) => pack(args),
        VideoCommand::Info(args) => info(args),
        VideoCommand::Calibrate(args) => calibrate(args),
        VideoCommand::Denoise(args) => denoise::run(args),
        VideoCommand::Rates(args) => rates::run(args),
        VideoCommand::Stream(args) => stream::run(args),
        VideoCommand::Encode(args) => encode::run(args),
        VideoCommand::Decode(args) => decode::run(args),
        VideoCommand::Generate(args) => generate::run(args),
    }
}

fn pack(args: &VideoPackArgs) -> Result<(), CliError> {
    check_replaceable(Some(&args.output))?;
    let mut inputs = vec![args.model.clone()];
    inputs.extend(args.config.iter().chain(&args.sampler).chain(&args.adapters).cloned());
    check_distinct(&[Some(&args.output)], &inputs)?;
    let bar = bar("{bytes}/{total_bytes} {bytes_per_sec} {wide_msg}", args.json);
    let show = |progress: PackProgress<'_>| {
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
        bar.set_message(progress.tensor.to_owned());
    };
    let options = VideoPackOptions {
        checkpoint: CheckpointOptions { config: args.config.clone(), adapters: args.adapters.clone() },
        sampler: args.sampler.as_deref().map(Sampler::read).transpose()?,
        region_limit: args.region_limit,
        stop: Some(stop_flag()),
    };
    let report = pack_video(&args.model, &args.output, &options, show)?;
    bar.finish_and_clear();
    let model = Model::open(&args.output)?;
    if args.json {
        let report = serde_json::to_value(&report).map_err(|error| CliError::Failed(error.to_string()))?;
        return print_json(&json!({ "pack": report, "video": model.record() }));
    }
    print(&describe(&model, None))
}

fn info(args: &VideoInfoArgs) -> Result<(), CliError> {
    let model = Model::open(&args.artefact)?;
    let calibration = Calibration::of(&model)?;
    if args.json {
        return print_json(&json!({
            "artefact": model.artefact().map(Artefact::info),
            "video": model.record(),
            "blocks": blocks(&model),
            "calibration": calibration.as_ref().map(Calibration::record),
        }));
    }
    print(&describe(&model, calibration.as_ref()))
}

/// Block executions of a clip.
fn blocks(model: &Model) -> usize {
    model.sampler().steps() * model.sampler().branches() * model.config().layers
}

fn describe(model: &Model, calibration: Option<&Calibration>) -> String {
    let (config, sampler, record) = (model.config(), model.sampler(), model.record());
    let mut text = format!(
        "video transformer: {} blocks of width {}, {} heads of {}, feed-forward {}, {} latent channels, text width {}\n",
        config.layers,
        config.width(),
        config.heads,
        config.head_dim,
        config.ffn,
        config.channels,
        config.text_dim
    );
    let experts: Vec<String> = record
        .experts
        .iter()
        .enumerate()
        .map(|(index, expert)| {
            let steps = sampler.experts.iter().filter(|&&of_step| of_step == index).count();
            format!("{} ({steps} steps)", expert.name)
        })
        .collect();
    let _ = writeln!(
        text,
        "sampler {}: {} steps, guidance {}, timesteps {}; experts: {}",
        sampler.solver.as_str(),
        sampler.steps(),
        sampler.guidance,
        shortened(&sampler.timesteps),
        experts.join(", ")
    );
    let _ = writeln!(text, "{} block executions a clip", blocks(model));
    let _ = match calibration {
        Some(calibration) => {
            let clips = trefoil_report::format::plural(calibration.record().clips.len(), "clip");
            match calibration.check(model) {
                Ok(()) => writeln!(text, "activation scales for w8a8 from {clips}"),
                Err(error) => writeln!(text, "activation scales from {clips} that do not fit: {error}"),
            }
        }
        None => writeln!(text, "no activation scales yet; `trefoil video calibrate` stores some, which w8a8 needs"),
    };
    if let Some(artefact) = model.artefact() {
        let _ = write!(text, "\n{}", render_info(&artefact.info(), false));
    }
    text
}

fn shortened(timesteps: &[f32]) -> String {
    let list: Vec<String> = timesteps.iter().map(f32::to_string).collect();
    match list.as_slice() {
        [first, second, .., end] if list.len() > 8 => format!("{first}, {second}, … {end}"),
        few => few.join(", "),
    }
}

fn calibrate(args: &CalibrateArgs) -> Result<(), CliError> {
    let output = args.output.as_deref().unwrap_or(&args.artefact);
    check_replaceable(Some(output))?;
    let files = args.noise.iter().chain(&args.text).chain(&args.negative).map(|tensor| tensor.file.clone());
    check_distinct(&[Some(output)], &files.collect::<Vec<_>>())?;
    let model = Arc::new(lanes::open_model(&args.artefact, &args.second)?);
    let spec: EngineSpec = args.engine.parse()?;
    if spec.kind != EngineKind::Cpu {
        return Err(CliError::Usage(format!(
            "--engine {spec}; ranges are found on w8a16, which runs on the CPU: write cpu@CORES"
        )));
    }
    let kernels = Arc::new(Kernels::best(&spec.resolved_cores()).map_err(VideoError::from)?);
    if args.noise.len() != args.text.len() && args.noise.len() != 1 {
        return Err(CliError::Usage(format!(
            "{} --noise for {} --text; give one for each, or one for all",
            args.noise.len(),
            args.text.len()
        )));
    }
    let read = |paths: &[TensorPath]| paths.iter().map(TensorPath::read).collect::<Result<Vec<_>, _>>();
    let (noises, texts) = (read(&args.noise)?, read(&args.text)?);
    let negative = args.negative.as_ref().map(TensorPath::read).transpose()?;
    let clips: Vec<CalibrationClip<'_>> = texts
        .iter()
        .enumerate()
        .map(|(number, text)| CalibrationClip {
            noise: noises.get(number).unwrap_or(&noises[0]),
            text,
            negative: negative.as_ref(),
        })
        .collect();
    let bar = block_bar(args.json);
    let calibration = Calibration::observe(&model, &kernels, &clips, &mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        keep_going(done, all)
    })?;
    bar.finish_and_clear();
    let mut stored = Vec::new();
    for (base, artefact) in model.artefacts().enumerate() {
        let output = if base == 0 { output } else { artefact.path() };
        let summary = calibration.of_base(&model, base).store(artefact, output)?;
        stored.push(json!({ "output": output, "fingerprint": summary.fingerprint }));
    }
    if output != args.artefact.as_path() {
        copy_note(&args.artefact, output)?;
    }
    if args.json {
        return print_json(&json!({ "stored": stored, "calibration": calibration.record() }));
    }
    print(&format!(
        "{}: activation scales of {} blocks from {} stored\n",
        output.display(),
        model.config().layers,
        trefoil_report::format::plural(clips.len(), "clip")
    ))
}

/// The note about the unquantised checkpoint goes along with a copy of its artefact.
fn copy_note(from: &Path, to: &Path) -> Result<(), CliError> {
    let (from, to) = (trefoil_video::pack::note_path(from), trefoil_video::pack::note_path(to));
    match std::fs::read_to_string(&from) {
        Ok(text) => crate::context::write_text(&to, &text),
        // Without it `f32` asks for --checkpoint.
        Err(_) => Ok(()),
    }
}

/// An error once Ctrl-C was pressed.
fn keep_going(done: usize, blocks: usize) -> Result<(), VideoError> {
    if stop_flag().load(Ordering::Relaxed) { Err(VideoError::Interrupted { done, blocks }) } else { Ok(()) }
}

/// Asked before the work on a latent frame.
fn check_stopped(_latent_frame: usize) -> Result<(), CliError> {
    if stop_flag().load(Ordering::SeqCst) { Err(VaeError::Stopped.into()) } else { Ok(()) }
}

/// A progress bar on standard error, hidden with `quiet` and off a terminal.
fn bar(template: &str, quiet: bool) -> ProgressBar {
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// A progress bar over block executions.
fn block_bar(quiet: bool) -> ProgressBar {
    bar("{pos}/{len} blocks, {eta} left {wide_msg}", quiet)
}

/// Medians and spreads for people.
fn samples_json(samples: &trefoil_core::Samples) -> Value {
    json!({ "median": samples.median, "p10": samples.p10, "p90": samples.p90, "count": samples.count })
}
