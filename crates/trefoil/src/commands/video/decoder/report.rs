//! The table and the JSON of `trefoil bench decoder`.

use super::{BenchDecoderArgs, Decoder, Row, Run, Workbench};
use crate::commands::video::rates::conditions;
use crate::context::{self, print_json, width};
use crate::error::CliError;
use serde_json::{Value, json};
use std::fmt::Write as _;
use trefoil_core::Origin;
use trefoil_report::{TableFormat, format};
use trefoil_video::quality::Fidelity;

/// Seconds of a latent frame after the first, the mean over the clip.
fn later_seconds(run: &Run) -> Option<f64> {
    match run.frame_seconds.as_slice() {
        [_, later @ ..] if !later.is_empty() => Some(later.iter().sum::<f64>() / later.len() as f64),
        _ => None,
    }
}

/// Bytes that decoding takes: what was resident at most, without what was before the weights were read.
fn own_bytes(run: &Run) -> f64 {
    run.peak_bytes.saturating_sub(run.before_bytes) as f64
}

/// The peer of a row: diffusers on the same cores.
fn peer_of<'r>(row: &Row, rows: &'r [Row]) -> Option<&'r Row> {
    let fits = |other: &&Row| other.decoder == Decoder::Diffusers && other.cores == row.cores;
    rows.iter().find(fits).filter(|_| row.decoder == Decoder::Trefoil)
}

/// How many times as fast as the peer, and the share of its memory.
fn against_peer(row: &Row, rows: &[Row]) -> Option<(f64, f64)> {
    let peer = peer_of(row, rows)?;
    let speed = peer.median(|run| run.seconds) / row.median(|run| run.seconds);
    Some((speed, row.median(own_bytes) / peer.median(own_bytes)))
}

/// Prints the result.
pub fn print(
    args: &BenchDecoderArgs,
    bench: &Workbench,
    rows: &[Row],
    differences: &[Option<Fidelity>],
) -> Result<(), CliError> {
    if args.json {
        return print_json(&as_json(args, bench, rows, differences));
    }
    context::print(&text(args, bench, rows, differences))
}

fn text(args: &BenchDecoderArgs, bench: &Workbench, rows: &[Row], differences: &[Option<Fidelity>]) -> String {
    let headings = [
        "decoder",
        ">per latent frame",
        ">first",
        ">later",
        ">clip",
        ">memory",
        ">predicted",
        ">speed",
        ">of memory",
        ">PSNR dB",
    ]
    .map(str::to_owned);
    let absent = || format::ABSENT.to_owned();
    let seconds = |value: Option<f64>| format::optional_time(value.map(|seconds| seconds * 1e3));
    let cells = rows
        .iter()
        .zip(differences)
        .map(|(row, difference)| {
            let has_frames = row.runs.iter().all(|run| later_seconds(run).is_some());
            let has_first = row.runs.iter().all(|run| !run.frame_seconds.is_empty());
            let predicted = row.runs.first().and_then(|run| run.predicted_bytes);
            let against = against_peer(row, rows);
            let cells = [
                row.name(),
                seconds(Some(row.median(|run| run.seconds) / bench.latent_frames as f64)),
                seconds(has_first.then(|| row.median(|run| run.frame_seconds[0]))),
                seconds(has_frames.then(|| row.median(|run| later_seconds(run).unwrap_or_default()))),
                seconds(Some(row.median(|run| run.seconds))),
                format::bytes(row.median(own_bytes) as u64),
                predicted.map_or_else(absent, format::bytes),
                against.map_or_else(absent, |(speed, _)| format::ratio(speed)),
                against.map_or_else(absent, |(_, memory)| format::percent(memory)),
                difference.map_or_else(absent, |difference| format!("{:.1}", difference.psnr)),
            ];
            cells.into_iter().map(|cell| (cell, false)).collect()
        })
        .collect();
    let title = format!(
        "{}: {} latent frames to {} frames of {}, {} each",
        if bench.is_random { "Wan2.1's decoder, random weights (synthetic)" } else { "decoder" },
        bench.latent_frames,
        args.frames,
        args.size,
        format::plural(usize::from(args.rounds), "run")
    );
    let mut text = trefoil_report::text_table(&title, &headings, cells).render(TableFormat::Text, width());
    let versions: Vec<&str> = rows.iter().filter_map(|row| row.runs.first()).map(|run| run.version.as_str()).collect();
    let mut seen: Vec<&str> = Vec::new();
    for version in versions {
        if !seen.contains(&version) {
            seen.push(version);
        }
    }
    let _ = writeln!(
        text,
        "memory: highest resident while decoding, less what was resident before the weights were read (measured, a process a row); {}",
        seen.join("; ")
    );
    let _ = writeln!(
        text,
        "speed, of memory: against diffusers on the same cores; PSNR: against our untiled f32 frames (tiles see only their own part)"
    );
    text
}

fn as_json(args: &BenchDecoderArgs, bench: &Workbench, rows: &[Row], differences: &[Option<Fidelity>]) -> Value {
    let rows: Vec<Value> = rows
        .iter()
        .zip(differences)
        .map(|(row, difference)| {
            let against = against_peer(row, rows);
            json!({
                "name": row.name(),
                "decoder": row.decoder,
                "path": row.path,
                "cores": row.cores,
                "bands": row.bands,
                "tiles": row.tiles.map(|[size, stride]| json!({ "size": size, "stride": stride })),
                "seconds_per_latent_frame": row.median(|run| run.seconds) / bench.latent_frames as f64,
                "seconds": row.sorted(|run| run.seconds),
                "own_peak_bytes": row.median(own_bytes) as u64,
                "runs": row.runs,
                "speed_against_diffusers": against.map(|(speed, _)| speed),
                "memory_against_diffusers": against.map(|(_, memory)| memory),
                "frames_against_f32": difference,
            })
        })
        .collect();
    json!({
        "origin": Origin::Measured,
        "model": if bench.is_random { Value::from("random weights") } else { json!(crate::context::shown(&bench.model)) },
        "size": args.size.to_string(),
        "frames": args.frames,
        "latent_frames": bench.latent_frames,
        "channels": { "base": bench.config.base_dim, "factors": bench.config.dim_mult },
        "rounds": args.rounds,
        "rows": rows,
        "conditions": conditions(),
    })
}
