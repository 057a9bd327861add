//! `trefoil video decode`: a latent to a clip.

use super::check_stopped;
use super::shared::{CoresArg, TensorArg, check_folder, check_sheet, decoder_of, decoding_spec};
use crate::context::{self, print, print_json, stop_flag};
use crate::error::CliError;
use clap::Args;
use serde_json::json;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Instant;
use trefoil_report::format;
use trefoil_video::EngineSpec;
use trefoil_video::engine::{DecoderEngine, EngineDecoder};
use trefoil_video::output::{ClipMetadata, ClipWriter, ContactSheet, VideoFrame};
use trefoil_video::vae::{DecoderMemory, DecoderPath, Latent, TileLayout};

/// `trefoil video decode`.
#[derive(Debug, Args)]
pub struct DecodeArgs {
    /// Pipeline folder (with `vae/` or `vae_decoder/`), VAE folder or safetensors file, or an artefact that was packed from a pipeline folder
    #[arg(value_name = "MODEL_DIR|A.trefoil")]
    pub model: PathBuf,
    /// Latent `[channels, frames, height, width]` (a leading 1 allowed), as the denoiser leaves it
    #[arg(long, value_name = "L.safetensors:KEY")]
    pub latent: TensorArg,
    /// The latent is de-normalised already (z·std + mean)
    #[arg(long)]
    pub denormalised: bool,
    /// Where to write the clip; the name says the format: .mp4, .png or .webp (animated), .gif, .safetensors, or a folder for PNG frames
    #[arg(short, long, value_name = "CLIP")]
    pub output: PathBuf,
    /// Frames a second
    #[arg(long, default_value_t = 16)]
    pub fps: u32,
    /// Also write a contact sheet
    #[arg(long, value_name = "SHEET.png")]
    pub contact_sheet: Option<PathBuf>,
    /// Decode in square tiles of this many latent pixels, for less memory
    #[arg(long, value_name = "PIXELS")]
    pub tile: Option<usize>,
    /// Latent pixels from one tile to the next; tiles overlap by the rest and are blended [default: 3/4 of the tile]
    #[arg(long, value_name = "PIXELS", requires = "tile")]
    pub tile_stride: Option<usize>,
    /// Cut the picture into this many bands, decoded one after the other: less memory, the same frames, more work; in f32 on the CPU
    /// [default: 2 from about 336 pixels on, else 1]
    #[arg(long, value_name = "COUNT", conflicts_with = "tile")]
    pub bands: Option<usize>,
    /// What the decoder computes in: f32, or int8 for less memory and time
    #[arg(long, value_name = "PATH", default_value_t = DecoderPath::F32)]
    pub vae_path: DecoderPath,
    /// Prompt to note in the clip [default: what the latent's file says]
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Seed to note in the clip [default: what the latent's file says]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Engine to decode on, like cpu@0-3, opencl or opencl:0@1 [default: the CPU]
    #[arg(long, value_name = "ENGINE", conflicts_with = "cores")]
    pub engine: Option<EngineSpec>,
    /// Cores of the CPU to use, such as 0-3,7 [default: all]
    #[arg(long, value_name = "CORES")]
    pub cores: Option<CoresArg>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: &DecodeArgs) -> Result<(), CliError> {
    check_folder(&args.model)?;
    context::check_distinct(
        &[Some(args.output.as_path()), args.contact_sheet.as_deref()],
        &[args.latent.path.clone(), args.model.clone()],
    )?;
    check_sheet(args.contact_sheet.as_deref())?;
    let engine = DecoderEngine::open(&decoding_spec(args.engine.as_ref(), args.cores.as_ref())?)?;
    let on = EngineDecoder::open_on(&decoder_of(&args.model)?, args.vae_path, engine)?;
    let (decoder, kernels) = (on.decoder(), on.kernels());
    let latent = Latent::read(&args.latent.path, &args.latent.key)?;
    let latent = if args.denormalised { latent } else { latent.denormalise(decoder.config())? };
    let tiles = match args.tile {
        Some(size) => {
            Some(TileLayout::new(latent.height(), latent.width(), size, args.tile_stride.unwrap_or(size - size / 4))?)
        }
        None => None,
    };
    let scale = decoder.config().spatial_scale();
    let size = (latent.height() * scale, latent.width() * scale);
    let frames = decoder.config().frames(latent.frames());
    let threads = on.engine().threads();
    let bands = match args.bands {
        Some(bands) => bands,
        None if tiles.is_some() => 1,
        None => decoder.bands(latent.height(), latent.width()),
    };
    let extents = [latent.frames(), latent.height(), latent.width()];
    let memory = match &tiles {
        Some(tiles) => decoder.tiled_memory(tiles, latent.frames(), threads)?,
        None => decoder.memory_in_bands(extents, bands, threads)?,
    };
    // Before the work: how much it is, and whether it fits.
    let in_bands = if bands > 1 { format!(", in {bands} bands") } else { String::new() };
    let summary = format!(
        "latent {} → {frames} frames of {}×{} at {} fps{in_bands}\nmemory: {}\n",
        latent.shape(),
        size.1,
        size.0,
        args.fps,
        describe(&memory)
    );
    let remedy = if args.tile.is_some() {
        "use smaller tiles"
    } else if args.vae_path == DecoderPath::F32 && !decoder.is_on_device() {
        "decode in more bands (--bands), in tiles (--tile 32) or in INT8 (--vae-path int8)"
    } else {
        "decode in tiles (--tile 32)"
    };
    check_memory(&memory, remedy)?;
    if !args.json {
        print(&summary)?;
    }
    let metadata = metadata(args, tiles.as_ref());
    let mut clip = ClipWriter::create(&args.output, size, frames, metadata.clone())?;
    let mut sheet = ContactSheet::new(size.0, size.1, frames);
    let stop = stop_flag();
    let start = Instant::now();
    let may_continue = || !stop.load(Ordering::SeqCst);
    let mut write = |frame: VideoFrame| {
        sheet.push(&frame);
        clip.push(&frame).map_err(CliError::from)
    };
    if let Some(tiles) = &tiles {
        decoder.decode_tiled(kernels, &latent, tiles, &may_continue)?.into_iter().try_for_each(write)?;
    } else {
        decoder.decode_in_bands(kernels, &latent, bands, &mut check_stopped, &mut write)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let report = clip.finish()?;
    if let Some(path) = &args.contact_sheet {
        sheet.write(path, &metadata)?;
    }
    let warning = report.health.warning();
    if args.json {
        return print_json(&json!({
            "output": context::shown(&args.output),
            "contact_sheet": args.contact_sheet.as_deref().map(context::shown),
            "frames": report.frames,
            "height": size.0,
            "width": size.1,
            "latent_frames": latent.frames(),
            "bands": bands,
            "engine": on.engine().spec().to_string(),
            "kernels": on.engine().kernels_name(),
            "notes": on.engine().notes(),
            "threads": threads,
            "seconds": seconds,
            "seconds_per_latent_frame": seconds / latent.frames() as f64,
            "memory": { "weights": memory.weights, "history": memory.history, "working": memory.working, "total": memory.total() },
            "health": report.health,
            "warning": warning,
            "metadata": metadata,
        }));
    }
    for note in on.engine().notes() {
        eprintln!("note: {note}");
    }
    if let Some(warning) = warning {
        eprintln!("warning: {warning}");
    }
    print(&format!(
        "wrote {}: {seconds:.2} s with the file, {:.3} s a latent frame on {} thread(s) ({})\n",
        args.output.display(),
        seconds / latent.frames() as f64,
        threads,
        on.engine().kernels_name()
    ))
}

fn describe(memory: &DecoderMemory) -> String {
    let bytes = |bytes: usize| format::bytes(bytes as u64);
    format!(
        "{} (weights {}, history {}, working {})",
        bytes(memory.total()),
        bytes(memory.weights),
        bytes(memory.history),
        bytes(memory.working)
    )
}

/// Refuses what would be ended by the system halfway. The weights are in memory already.
pub(super) fn check_memory(memory: &DecoderMemory, remedy: &str) -> Result<(), CliError> {
    let need = (memory.history + memory.working) as u64;
    match available_bytes() {
        Some(available) if need > available => Err(CliError::Usage(format!(
            "decoding needs {} besides the weights and {} are available; {remedy}",
            format::bytes(need),
            format::bytes(available)
        ))),
        _ => Ok(()),
    }
}

/// Memory that the system can give without swapping.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

fn metadata(args: &DecodeArgs, tiles: Option<&TileLayout>) -> ClipMetadata {
    let noted = Latent::notes(&args.latent.path);
    let note = |key: &str| noted.get(key).cloned();
    let tiles = tiles.map_or_else(String::new, |tiles| format!(", tiles {} every {}", tiles.size(), tiles.stride()));
    ClipMetadata {
        fps: args.fps,
        prompt: args.prompt.clone().or_else(|| note("prompt")),
        seed: args.seed.or_else(|| note("seed").and_then(|seed| seed.parse().ok())),
        numeric_path: note("numeric_path").map_or_else(String::new, |path| format!("{path}, "))
            + &format!("decoder {}", args.vae_path)
            + &tiles,
        plan: note("plan"),
        source: Some(format!("{}:{}", args.latent.path.display(), args.latent.key)),
    }
}
