//! `trefoil weights`: the packed INT8 artefact; and `trefoil probe`: how large a region of it may be here.

use crate::cli::{ProbeArgs, WeightsCommand};
use crate::context::{self, print, print_json};
use crate::error::CliError;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use trefoil_kernels::opencl::DeviceProbe;
use trefoil_report::format;
use trefoil_weights::probe::{Attempt, ChildCommand, CpuProbe, EngineLimit, ProbeOptions};
use trefoil_weights::{Artefact, MapProbe, PackOptions, PackProgress, render_info};

/// Does `work` with the engines that map regions here: the processor and every OpenCL device.
fn with_engines<T>(work: impl FnOnce(&[&dyn MapProbe]) -> T) -> T {
    let devices = DeviceProbe::all();
    let mut engines: Vec<&dyn MapProbe> = vec![&CpuProbe];
    engines.extend(devices.iter().map(|device| device as &dyn MapProbe));
    work(&engines)
}

/// Refuses an output that is read (the checkpoint, its index, one of its shards), or that is neither a file nor nothing: the
/// artefact is renamed into its place, which would put a file where a device was.
fn check_output(source: &Path, output: &Path) -> Result<(), CliError> {
    let is_index = source.extension().is_some_and(|extension| extension == "json");
    let folder = if source.is_dir() { Some(source) } else { source.parent().filter(|_| is_index) };
    let mut inputs = vec![source.to_owned()];
    // A folder that cannot be listed cannot be packed either, which is told better there.
    inputs
        .extend(folder.and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten().map(|one| one.path()));
    inputs.retain(|input| output.exists() && is_read(input));
    context::check_distinct(&[Some(output)], &inputs)?;
    if output.exists() && !output.is_file() {
        let what = if output.is_dir() { "a folder" } else { "no regular file" };
        return Err(CliError::Usage(format!("{} is {what}; name a file to write", output.display())));
    }
    context::check_writable(Some(output))
}

/// Whether packing reads a file of that name: an older artefact in the checkpoint's folder may be replaced.
fn is_read(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors" || extension == "json" || extension == "bin")
}

/// Runs `trefoil weights`.
pub fn run(command: &WeightsCommand) -> Result<(), CliError> {
    match command {
        WeightsCommand::Pack { source, output, region_limit, json } => {
            check_output(source, output)?;
            let bar = ProgressBar::new(0);
            if let Ok(style) = ProgressStyle::with_template("{bytes}/{total_bytes} {bytes_per_sec} {wide_msg}") {
                bar.set_style(style);
            }
            let show = |progress: PackProgress<'_>| {
                bar.set_length(progress.total_bytes);
                bar.set_position(progress.done_bytes);
                bar.set_message(progress.tensor.to_owned());
            };
            let options =
                PackOptions { region_limit: *region_limit, stop: Some(context::stop_flag()), ..PackOptions::default() };
            let report = trefoil_weights::pack(source, output, &options, show)?;
            bar.finish_and_clear();
            if *json {
                return print_json(&report);
            }
            print(&render_info(&Artefact::open(output)?.info(), false))
        }
        WeightsCommand::Info { artefact, tensors, json } => {
            let info = Artefact::open(artefact)?.info();
            if *json { print_json(&info) } else { print(&render_info(&info, *tensors)) }
        }
        WeightsCommand::Verify { artefact, json } => {
            let opened = Artefact::open(artefact)?;
            opened.verify()?;
            if *json {
                return print_json(&json!({ "artefact": context::shown(artefact), "ok": true }));
            }
            print(&format!("{}: every checksum agrees\n", artefact.display()))
        }
    }
}

/// Runs `trefoil probe`.
pub fn probe(args: &ProbeArgs) -> Result<(), CliError> {
    let options = ProbeOptions::new(ChildCommand::this_program(&["probe-child"])?);
    let report = with_engines(|engines| trefoil_weights::probe(engines, &options))?;
    if args.json {
        return print_json(&report);
    }
    let mut text = format!("largest region that each engine maps (tried up to {})\n", format::bytes(report.cap_bytes));
    for kind in &report.kinds {
        if let Some(reason) = &kind.unavailable {
            let _ = writeln!(text, "{}: unavailable, {reason}", kind.kind);
        }
        for limit in kind.engines.iter().chain(kind.together.iter().filter(|_| kind.engines.len() > 1)) {
            let _ = writeln!(text, "{}: {}", kind.kind, describe(limit));
        }
    }
    print(&text)
}

fn describe(limit: &EngineLimit) -> String {
    let engines = limit.engines.join(" and ");
    let largest = format::bytes(limit.largest_bytes);
    if limit.capped {
        return format!("{engines} map(s) at least {largest}, the most that was tried");
    }
    let failure = limit.first_failure.as_ref().map_or_else(String::new, |(bytes, attempt)| {
        let what = match attempt {
            Attempt::Mapped => "mapped".to_owned(),
            Attempt::Refused { reason } => reason.clone(),
            Attempt::Crashed { signal, message } => format!("crashed with signal {signal} {message}"),
            Attempt::NoAnswer { code, message } => format!("ended with {code} {message}"),
            Attempt::TimedOut { after_ms } => format!("no answer after {after_ms} ms"),
        };
        format!("; {} fails: {}", format::bytes(*bytes), what.trim())
    });
    format!("{engines} map(s) {largest}{failure}")
}

/// Body of a probe's child process.
pub fn probe_child() -> ExitCode {
    with_engines(trefoil_weights::probe_child_main)
}
