//! One row of ours, in a process of its own.

use super::{BenchDecoderArgs, LATENT, Row, Run, Workbench};
use crate::commands::video::check_stopped;
use crate::commands::video::shared::decoding_spec;
use crate::context::{print_json, stop_flag};
use crate::error::CliError;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Instant;
use trefoil_video::engine::{DecoderEngine, EngineDecoder};
use trefoil_video::output::{ClipMetadata, ClipWriter, VideoFrame};
use trefoil_video::vae::{Latent, TileLayout, VaeError};
use trefoil_weights::memory::{peak_resident_bytes, reset_peak, resident_bytes};

/// A row to be measured by this program, started again.
pub struct Case<'a> {
    pub args: &'a BenchDecoderArgs,
    pub bench: &'a Workbench,
    pub row: &'a Row,
}

impl Case<'_> {
    /// Starts the process and reads what it tells.
    pub fn measure(&self) -> Result<Run, CliError> {
        let program = std::env::current_exe().map_err(|source| CliError::File {
            action: "find",
            path: "trefoil".into(),
            source,
        })?;
        let mut command = Command::new(&program);
        command.args(["bench", "decoder"]).arg(&self.bench.model);
        command.arg("--case").arg(self.bench.space.path()).args(["--engine", &self.row.engine.to_string()]);
        command.args(["--path", self.row.path.as_str()]);
        match self.row.tiles {
            Some([size, stride]) => {
                command.args(["--tile", &size.to_string(), "--tile-stride", &stride.to_string()]);
            }
            None => {
                command.args(["--untiled", "--bands", &self.row.bands.to_string()]);
            }
        }
        if self.args.json {
            command.arg("--json");
        }
        let run: Run = output_of(command, "the decoder's process")?;
        let left = self.bench.space.path().join("case.safetensors");
        let fail = |source| CliError::File { action: "rename", path: left.clone(), source };
        std::fs::rename(&left, &self.row.frames).map_err(fail)?;
        Ok(run)
    }
}

/// The JSON that a process prints.
pub fn output_of<T: serde::de::DeserializeOwned>(mut command: Command, what: &str) -> Result<T, CliError> {
    let output = command.stdin(Stdio::null()).output().map_err(|source| CliError::File {
        action: "start",
        path: command.get_program().into(),
        source,
    })?;
    if stop_flag().load(Ordering::SeqCst) {
        return Err(VaeError::Stopped.into());
    }
    let told = String::from_utf8_lossy(&output.stderr);
    let last = told.trim().lines().last().unwrap_or("it said nothing").trim().to_owned();
    if !output.status.success() {
        return Err(CliError::Failed(format!("{what} failed ({}): {last}", output.status)));
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| CliError::Failed(format!("{what} told no result ({error}): {last}")))
}

/// Measures the row that the flags describe in this process, and leaves its frames.
pub fn run(args: &BenchDecoderArgs, folder: &Path) -> Result<(), CliError> {
    let engine = DecoderEngine::open(&decoding_spec(args.engine.first(), None)?)?;
    let latent = Latent::read(&folder.join("latent.safetensors"), LATENT)?;
    let before_bytes = resident_bytes().unwrap_or(0);
    let model = args.model.as_deref().unwrap_or(folder);
    let path = args.path.first().copied().unwrap_or_default();
    let on = EngineDecoder::open_on(model, path, engine)?;
    let (decoder, kernels, threads) = (on.decoder(), on.kernels(), on.engine().threads());
    let latent = latent.denormalise(decoder.config())?;
    let stride = args.tile_stride.unwrap_or(args.tile);
    let tiles = TileLayout::new(latent.height(), latent.width(), args.tile, stride)?;
    let bands = args.bands.first().copied().unwrap_or(1);
    let memory = if args.untiled {
        decoder.memory_in_bands([latent.frames(), latent.height(), latent.width()], bands, threads)?
    } else {
        decoder.tiled_memory(&tiles, latent.frames(), threads)?
    };
    if decoder.is_on_device() {
        // Drivers compile when a kernel first runs.
        decoder.session(latent.height(), latent.width())?.push(kernels, &latent, 0)?;
    }
    // Reading a checkpoint takes more for a moment than decoding does; it is not what is compared.
    reset_peak();
    let mut frame_seconds = Vec::new();
    let mut frames: Vec<VideoFrame> = Vec::new();
    let start = Instant::now();
    if args.untiled {
        let mut collect = |frame| {
            frames.push(frame);
            Ok::<(), CliError>(())
        };
        // In bands every latent frame is met several times.
        frame_seconds = vec![0.0; latent.frames()];
        let mut running: Option<(usize, Instant)> = None;
        let mut note = |next: Option<usize>| {
            if let Some((frame, since)) = running.take() {
                frame_seconds[frame] += since.elapsed().as_secs_f64();
            }
            running = next.map(|frame| (frame, Instant::now()));
        };
        let mut before = |frame| {
            note(Some(frame));
            check_stopped(frame)
        };
        decoder.decode_in_bands(kernels, &latent, bands, &mut before, &mut collect)?;
        note(None);
    } else {
        let may_continue = || !stop_flag().load(Ordering::SeqCst);
        frames = decoder.decode_tiled(kernels, &latent, &tiles, &may_continue)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let peak_bytes = peak_resident_bytes().unwrap_or(0);
    let size = frames.first().map_or((0, 0), |frame| (frame.height(), frame.width()));
    let left = folder.join("case.safetensors");
    let metadata = ClipMetadata {
        fps: 16,
        prompt: None,
        seed: None,
        numeric_path: format!("decoder {path}"),
        plan: None,
        source: None,
    };
    let mut writer = ClipWriter::create(&left, size, frames.len(), metadata)?;
    for frame in &frames {
        writer.push(frame)?;
    }
    writer.finish()?;
    print_json(&Run {
        frame_seconds,
        seconds,
        peak_bytes,
        before_bytes,
        predicted_bytes: Some(memory.total() as u64),
        version: on.engine().kernels_name(),
    })
}
