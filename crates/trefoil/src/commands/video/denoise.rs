//! `trefoil video denoise`.

use super::lanes::{self, OpenLanes};
use super::{block_bar, keep_going, memory};
use crate::cli::DenoiseArgs;
use crate::context::{check_distinct, check_replaceable, print, print_json, shown};
use crate::error::CliError;
use indicatif::ProgressBar;
use serde_json::json;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;
use trefoil_core::Origin;
use trefoil_report::format;
use trefoil_video::process::{Worker, WorkerCommand, WorkerEvent, WorkerSetup, denoise_in_workers};
use trefoil_video::tensors::write_tensors;
use trefoil_video::{Clip, DenoiseReport, Event, Lane, Model, Tensor, TensorPath, VideoError, denoise};

/// Runs the command.
pub fn run(args: &DenoiseArgs) -> Result<(), CliError> {
    check_replaceable(Some(&args.output))?;
    let inputs = [Some(&args.clip.noise), Some(&args.clip.text), args.clip.negative.as_ref()];
    let mut files: Vec<_> = inputs.into_iter().flatten().map(|path| path.file.clone()).collect();
    files.push(args.artefact.clone());
    check_distinct(&[Some(&args.output)], &files)?;
    let (noise, text) = (args.clip.noise.read()?, args.clip.text.read()?);
    let negative = args.clip.negative.as_ref().map(TensorPath::read).transpose()?;
    let has_guidance = check(args, &noise)?;
    let inputs = (&noise, &text, negative.as_ref());
    let mut open = lanes::open_in(&args.artefact, &args.engines, inputs, args.processes)?;
    let model = open.lanes[0].model().clone();
    if negative.is_some() && !has_guidance {
        open.notes.push("the sampler has no guidance, so --negative changes nothing".to_owned());
    }
    let start = Instant::now();
    let clip = Clip::new(open.lanes[0].host_mut(), &model, &noise, &text, negative.as_ref())?;
    let conditions_ms = start.elapsed().as_secs_f64() * 1e3;
    let (cut, rates) = lanes::choose_cut(args.cut, &mut open.lanes, &clip, &noise, 0.0)?;
    let tokens = clip.tokens();
    let bar = block_bar(args.json);
    bar.set_length(clip.trajectory().blocks() as u64);
    let (report, latents) = if args.processes {
        // Other processes than those that were timed: these carry the whole clip, the host's work included.
        drop(clip);
        open.lanes.clear();
        in_processes(args, &mut open, (&noise, &text, negative.as_ref()), cut, &bar)?
    } else {
        in_this_process(&mut open.lanes, &clip, &noise, cut, &bar)?
    };
    bar.finish_and_clear();
    open.models.packed().check_unchanged()?;
    let latents: Vec<(String, Tensor)> =
        latents.into_iter().enumerate().map(|(step, latent)| (format!("latent.{step}"), latent)).collect();
    write_tensors(&args.output, &latents)?;
    for note in &open.notes {
        if !args.json {
            eprintln!("note: {note}");
        }
    }
    let is_shaped = open.specs.iter().any(|spec| spec.shape.is_some());
    if args.json {
        return print_json(&json!({
            "output": shown(&args.output),
            "tensors": latents.iter().map(|(name, _)| name).collect::<Vec<_>>(),
            "shape": latents.first().map(|(_, latent)| &latent.shape),
            "tokens": tokens,
            "steps": latents.len(),
            "processes": args.processes,
            "blocks": report.blocks,
            "cut": report.cut,
            "engines": report.lanes,
            "handoffs": report.handoffs,
            "conditions_ms": conditions_ms,
            "rates": rates,
            "origin": if is_shaped { Origin::Emulated } else { Origin::Measured },
            "notes": open.notes,
        }));
    }
    print(&describe(&report, args, is_shaped))
}

/// Refuses what cannot run before weights are compared. Tells whether the sampler has guidance.
fn check(args: &DenoiseArgs, noise: &Tensor) -> Result<bool, CliError> {
    lanes::engines_of(&args.engines, args.processes)?;
    let model = Model::open(&args.artefact)?;
    lanes::check_cut(args.cut, &model)?;
    // Other shapes are refused with their reason where the clip is made.
    if let &[c, f, h, w] | &[1, c, f, h, w] = noise.shape.as_slice() {
        let needs = memory::of_engines(&args.engines, args.processes, &model, &args.artefact, [1, c, f, h, w], 1);
        memory::check("the clip", "choose a smaller or shorter latent", &needs)?;
    }
    Ok(model.sampler().branches() > 1)
}

/// Engines of this process. Returns the latent after every step.
pub(super) fn in_this_process(
    lanes: &mut [Lane],
    clip: &Clip,
    noise: &Tensor,
    cut: usize,
    bar: &ProgressBar,
) -> Result<(DenoiseReport, Vec<Tensor>), CliError> {
    let mut state = clip.start(noise)?;
    let mut latents = Vec::new();
    let blocks = clip.trajectory().blocks();
    let report = denoise(lanes, clip, &mut state, cut, &mut |event| match event {
        Event::Blocks { done, engine, .. } => {
            bar.set_position(*done as u64);
            bar.set_message((*engine).to_owned());
            keep_going(*done, blocks)
        }
        Event::Step { latent, .. } => {
            latents.push(with_batch(clip.shape(), clip.unpatchify(latent))?);
            Ok(())
        }
    })?;
    Ok((report, latents))
}

/// Engines in processes of their own.
fn in_processes(
    args: &DenoiseArgs,
    open: &mut OpenLanes,
    (noise, text, negative): (&Tensor, &Tensor, Option<&Tensor>),
    cut: usize,
    bar: &ProgressBar,
) -> Result<(DenoiseReport, Vec<Tensor>), CliError> {
    let calibration = open.models.calibration().map(Arc::clone);
    let checkpoint = args.engines.checkpoint.clone();
    let setup = Arc::new(WorkerSetup::new(open.models.packed(), checkpoint, calibration, noise, text, negative)?);
    let command = WorkerCommand::this_program(&["video-worker"])?;
    let mut workers = open
        .specs
        .iter()
        .zip(&open.paths)
        .map(|(spec, &path)| Worker::start(&command, spec, path, &setup))
        .collect::<Result<Vec<_>, _>>()?;
    let (blocks, mut notes) = (setup.trajectory().blocks(), Vec::new());
    let mut executed = 0;
    let (report, latents) = denoise_in_workers(&mut workers, &setup, cut, &mut |event| {
        match event {
            WorkerEvent::Blocks { done, engine, .. } => {
                executed = *done;
                bar.set_position(*done as u64);
                bar.set_message((*engine).to_owned());
            }
            WorkerEvent::Died { engine, reason } => {
                notes.push(format!("{engine} died ({reason}) and was started again"));
            }
            WorkerEvent::Step { .. } => {}
        }
        keep_going(executed, blocks)
    })?;
    open.notes.extend(notes);
    let latents = latents.into_iter().map(|latent| with_batch(setup.shape(), latent)).collect::<Result<_, _>>()?;
    Ok((report, latents))
}

/// `[C, F, H, W]` values as a batch of one.
fn with_batch([channels, frames, height, width]: [usize; 4], values: Vec<f32>) -> Result<Tensor, VideoError> {
    Tensor::new("latent", &[1, channels, frames, height, width], values)
}

fn describe(report: &DenoiseReport, args: &DenoiseArgs, is_shaped: bool) -> String {
    let mut text = String::new();
    for lane in &report.lanes {
        let each = lane.ms / lane.blocks.max(1) as f64;
        let _ = writeln!(
            text,
            "{} on {}: {} of {} block executions in {} ({}, {} each with the work around them)",
            lane.engine,
            lane.path,
            lane.blocks,
            report.blocks,
            format::time(lane.ms),
            if is_shaped { "emulated" } else { "measured" },
            format::time(each)
        );
    }
    for handoff in &report.handoffs {
        let bytes = handoff.hidden_bytes + handoff.latent_bytes + handoff.extra_bytes;
        let _ = writeln!(
            text,
            "handoff before execution {} (step {}, block {}): {}",
            handoff.at,
            handoff.step,
            handoff.block,
            format::bytes(bytes as u64)
        );
    }
    let _ = writeln!(text, "{} written", args.output.display());
    text
}
