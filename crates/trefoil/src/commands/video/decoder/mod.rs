//! `trefoil bench decoder`: seconds per latent frame and peak memory of the VAE decoder, beside diffusers' when a Python that has it
//! is named. Every row runs in a process of its own, so that its peak is its own; rows take turns, round by round.

mod case;
mod peer;
mod report;

use super::shared::{CoresArg, check_folder};
use super::size::SizeArg;
use crate::context::{ProgressLine, stop_flag};
use crate::error::CliError;
use case::Case;
use clap::Args;
use peer::Peer;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use trefoil_units::allowed_cores;
use trefoil_video::engine::{EngineKind, is_on_cores};
use trefoil_video::noise::torch_normals;
use trefoil_video::output::{NamedTensor, VideoFrame, write_tensors};
use trefoil_video::quality::{Fidelity, compare};
use trefoil_video::synthetic::write_vae_decoder;
use trefoil_video::vae::{DecoderPath, Latent, TileLayout, VaeConfig, VaeDecoder, VaeError};
use trefoil_video::{EngineSpec, VideoError};

/// Seed of random weights and of the latent.
const SEED: u32 = 1;
/// Key of the frames that a case leaves for comparison.
const FRAMES: &str = "frames";
/// Key of the latent that all cases decode.
const LATENT: &str = "latent";

/// `trefoil bench decoder`.
#[derive(Debug, Args)]
pub struct BenchDecoderArgs {
    /// Pipeline folder (with `vae/` or `vae_decoder/`) or VAE folder [default: Wan2.1's sizes with random weights]
    #[arg(value_name = "MODEL_DIR")]
    pub model: Option<PathBuf>,
    /// Width and height of the video in pixels
    #[arg(long, value_name = "WxH", default_value = "416x240")]
    pub size: SizeArg,
    /// Frames of the video; the first latent frame gives one, each further one four (in Wan2.1)
    #[arg(long, default_value_t = 9)]
    pub frames: usize,
    /// Side of a tile in latent pixels, for the rows in tiles
    #[arg(long, value_name = "PIXELS", default_value_t = 32)]
    pub tile: usize,
    /// Latent pixels from one tile to the next [default: 3/4 of the tile]
    #[arg(long, value_name = "PIXELS")]
    pub tile_stride: Option<usize>,
    /// Engines to decode on: cpu, opencl, or opencl:DEVICE [default: the CPU, and OpenCL where there is a device]
    #[arg(long, value_name = "ENGINE,ENGINE", value_delimiter = ',')]
    pub engine: Vec<EngineSpec>,
    /// Cores to use, such as 0-3; rows are measured on the first of them and on all [default: all that this process may use]
    #[arg(long, value_name = "CORES")]
    pub cores: Option<CoresArg>,
    /// How often each row is measured, in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub rounds: u16,
    /// What our decoder computes in: f32, int8, or both
    #[arg(long, value_name = "PATH,PATH", value_delimiter = ',', default_values_t = DecoderPath::ALL)]
    pub path: Vec<DecoderPath>,
    /// Bands in which the f32 decoder cuts the picture on the CPU, a row each [default: as it does by itself]
    #[arg(long, value_name = "COUNT,COUNT", value_delimiter = ',')]
    pub bands: Vec<usize>,
    /// Python with torch, diffusers and safetensors, whose decoder is measured beside ours (see bench/decoder)
    #[arg(long, value_name = "PYTHON")]
    pub python: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Measure one row in this process: cores as given, in tiles or not
    #[arg(long, hide = true, value_name = "FOLDER")]
    pub case: Option<PathBuf>,
    /// Of a case
    #[arg(long, hide = true)]
    pub untiled: bool,
}

/// What one run of a row gave.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    /// Seconds of each latent frame; empty in tiles, which go through the clip one after the other.
    frame_seconds: Vec<f64>,
    /// Seconds of the whole clip.
    seconds: f64,
    /// Most memory the process had resident, bytes.
    peak_bytes: u64,
    /// What was resident before weights were read: libraries.
    before_bytes: u64,
    /// What was predicted before the work: weights, histories, working frames.
    predicted_bytes: Option<u64>,
    /// Instruction set, or the library's version.
    version: String,
}

/// Whose decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Decoder {
    Trefoil,
    Diffusers,
}

/// A row: a decoder on some cores.
#[derive(Debug, Serialize)]
struct Row {
    decoder: Decoder,
    /// On its cores; of the peer the CPU's.
    #[serde(serialize_with = "as_text")]
    engine: EngineSpec,
    path: DecoderPath,
    cores: Vec<u32>,
    /// Side and stride, latent pixels.
    tiles: Option<[usize; 2]>,
    /// Bands of a row without tiles.
    bands: usize,
    runs: Vec<Run>,
    /// Where its frames are kept for comparison.
    #[serde(skip)]
    frames: PathBuf,
}

fn as_text<S: serde::Serializer>(engine: &EngineSpec, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(engine)
}

/// The decoder's input and what was made for it.
struct Workbench {
    space: tempfile::TempDir,
    /// Model folder or file.
    model: PathBuf,
    is_random: bool,
    config: VaeConfig,
    latent_frames: usize,
    tiles: TileLayout,
    /// Bands of the f32 decoder on the CPU, a row each.
    bands: Vec<usize>,
}

/// Runs the command.
pub fn run(args: &BenchDecoderArgs) -> Result<(), CliError> {
    if let Some(folder) = &args.case {
        return case::run(args, folder);
    }
    let cores = args.cores.as_ref().map_or_else(|| allowed_cores().to_vec(), |cores| cores.0.clone());
    super::shared::kernels(args.cores.as_ref())?;
    let progress = ProgressLine::new("bench decoder", args.json);
    progress.step("weights and latent");
    let bench = Workbench::new(args)?;
    let peer = args.python.as_deref().map(|python| Peer::find(python, bench.space.path())).transpose()?;
    let engines = engines(&args.engine)?;
    let mut rows = rows((&engines, &args.path), &cores, &bench, peer.is_some());
    for round in 0..args.rounds {
        for row in &mut rows {
            progress.step(&format!("round {} of {}: {}", round + 1, args.rounds, row.name()));
            let run = match (row.decoder, &peer) {
                (Decoder::Diffusers, Some(peer)) => peer.decode(&bench, &row.cores, &row.frames)?,
                _ => Case { args, bench: &bench, row }.measure()?,
            };
            row.runs.push(run);
            if stop_flag().load(Ordering::SeqCst) {
                return Err(VaeError::Stopped.into());
            }
        }
    }
    drop(progress);
    let differences = differences(&rows)?;
    report::print(args, &bench, &rows, &differences)
}

/// The engines to measure, and whether each computes on the cores it is given.
fn engines(asked: &[EngineSpec]) -> Result<Vec<(EngineSpec, bool)>, CliError> {
    let placed = |spec: &EngineSpec| Ok((spec.on(&[]), is_on_cores(spec)?));
    if !asked.is_empty() {
        return Ok(asked.iter().map(placed).collect::<Result<_, VideoError>>()?);
    }
    let mut engines = vec![(EngineSpec::cpu(&[]), true)];
    match placed(&EngineSpec::opencl(&[])) {
        Ok(engine) => engines.push(engine),
        Err(error) => eprintln!("note: no rows on OpenCL: {}", one_line(&error)),
    }
    Ok(engines)
}

fn one_line(error: &VideoError) -> String {
    error.to_string().replace('\n', " ")
}

/// One core and all, without tiles and with them; then the peer. An engine with processors of its own has one row.
fn rows(
    (engines, paths): (&[(EngineSpec, bool)], &[DecoderPath]),
    cores: &[u32],
    bench: &Workbench,
    has_peer: bool,
) -> Vec<Row> {
    let mut sets = vec![cores[..1].to_vec()];
    if cores.len() > 1 {
        sets.push(cores.to_vec());
    }
    let mut rows = Vec::new();
    for (number, cores) in sets.iter().enumerate() {
        let places: Vec<usize> = cores.iter().map(|&core| core as usize).collect();
        let mut push = |decoder, engine: &EngineSpec, path, tiles, bands| {
            let frames = bench.space.path().join(format!("frames-{}.safetensors", rows.len()));
            let engine = engine.on(&places);
            rows.push(Row { decoder, engine, path, cores: cores.clone(), tiles, bands, runs: Vec::new(), frames });
        };
        if has_peer {
            push(Decoder::Diffusers, &EngineSpec::cpu(&[]), DecoderPath::F32, None, 1);
        }
        let tiles = Some([bench.tiles.size(), bench.tiles.stride()]);
        for (engine, is_on_cores) in engines {
            for &path in paths {
                if engine.kind == EngineKind::Cpu {
                    let bands: &[usize] = if path == DecoderPath::F32 { &bench.bands } else { &[1] };
                    for &bands in bands {
                        push(Decoder::Trefoil, engine, path, None, bands);
                    }
                    push(Decoder::Trefoil, engine, path, tiles, 1);
                } else if *is_on_cores || number + 1 == sets.len() {
                    push(Decoder::Trefoil, engine, path, None, 1);
                }
            }
        }
    }
    rows
}

impl Row {
    fn name(&self) -> String {
        let name = match self.decoder {
            Decoder::Trefoil => "trefoil",
            Decoder::Diffusers => "diffusers",
        };
        let path = self.path;
        let name = if self.engine.kind == EngineKind::OpenCl { format!("{name} on opencl") } else { name.to_owned() };
        let tiles = self.tiles.map_or_else(String::new, |[size, stride]| format!(", tiles {size}/{stride}"));
        let bands = if self.bands > 1 { format!(", {} bands", self.bands) } else { String::new() };
        let cores = if self.cores.len() == 1 { "1 core".to_owned() } else { format!("{} cores", self.cores.len()) };
        format!("{name}, {path}{tiles}{bands}, {cores}")
    }

    /// Values of every run, smallest first.
    fn sorted(&self, value: impl Fn(&Run) -> f64) -> Vec<f64> {
        let mut values: Vec<f64> = self.runs.iter().map(value).collect();
        values.sort_unstable_by(f64::total_cmp);
        values
    }

    fn median(&self, value: impl Fn(&Run) -> f64) -> f64 {
        let values = self.sorted(value);
        let middle = values.len() / 2;
        if values.len().is_multiple_of(2) { f64::midpoint(values[middle - 1], values[middle]) } else { values[middle] }
    }
}

impl Workbench {
    /// Opens the model or makes one, and makes the latent.
    fn new(args: &BenchDecoderArgs) -> Result<Self, CliError> {
        let space = tempfile::tempdir().map_err(|source| CliError::File {
            action: "create",
            path: std::env::temp_dir(),
            source,
        })?;
        let model = if let Some(model) = &args.model {
            check_folder(model)?;
            model.clone()
        } else {
            // A folder of its own: what the rows leave are safetensors files too.
            let folder = space.path().join("weights");
            let fail = |source| CliError::File { action: "create", path: folder.clone(), source };
            std::fs::create_dir(&folder).map_err(fail)?;
            write_vae_decoder(&folder, &VaeConfig::default(), SEED)?;
            folder
        };
        let decoder = VaeDecoder::open(&model)?;
        let config = decoder.config().clone();
        let [frames, height, width] = args.size.video(args.frames).latent(&config, 1)?;
        let stride = args.tile_stride.unwrap_or(args.tile - args.tile / 4);
        let tiles = TileLayout::new(height, width, args.tile, stride)?;
        let bands = if args.bands.is_empty() { vec![decoder.bands(height, width)] } else { args.bands.clone() };
        for &bands in &bands {
            let memory = decoder.memory_in_bands([frames, height, width], bands, 1)?;
            super::decode::check_memory(&memory, "choose a smaller --size, or more --bands")?;
        }
        let shape = [1, config.z_dim, frames, height, width];
        let values = torch_normals(SEED, shape.iter().product::<usize>().max(16));
        let tensor = NamedTensor { name: LATENT, shape: &shape, values: &values[..shape.iter().product()] };
        write_tensors(&space.path().join("latent.safetensors"), &[tensor], &[])?;
        Ok(Self { space, model, is_random: args.model.is_none(), config, latent_frames: frames, tiles, bands })
    }

    /// Folder with the weights and the `config.json`, for programs that look for no others.
    fn weights(&self) -> PathBuf {
        let parts = ["vae_decoder", "vae"].map(|part| self.model.join(part));
        parts.into_iter().find(|part| part.is_dir()).unwrap_or_else(|| self.model.clone())
    }
}

/// Frames of each row beside those of the first untiled f32 row of ours; diffusers' too. None for that row itself.
fn differences(rows: &[Row]) -> Result<Vec<Option<Fidelity>>, CliError> {
    let is_reference =
        |row: &Row| row.decoder == Decoder::Trefoil && row.path == DecoderPath::F32 && row.tiles.is_none();
    let Some(at) = rows.iter().position(is_reference) else { return Ok(vec![None; rows.len()]) };
    let reference = read_frames(&rows[at].frames)?;
    let against = |(index, row): (usize, &Row)| -> Result<Option<Fidelity>, CliError> {
        if index == at { Ok(None) } else { Ok(compare(&read_frames(&row.frames)?, &reference)) }
    };
    rows.iter().enumerate().map(against).collect()
}

/// `[1, 3, frames, height, width]` as frames.
fn read_frames(path: &Path) -> Result<Vec<VideoFrame>, CliError> {
    let clip = Latent::read(path, FRAMES)?;
    let plane = clip.height() * clip.width();
    let channel = |index: usize| &clip.values()[index * clip.frames() * plane..][..clip.frames() * plane];
    let [red, green, blue] = [0, 1, 2].map(channel);
    let frames = (0..clip.frames()).map(|frame| {
        let pixels = frame * plane..(frame + 1) * plane;
        let values = pixels.flat_map(|pixel| [red[pixel], green[pixel], blue[pixel]]).collect();
        VideoFrame::from_signed(clip.height(), clip.width(), values)
    });
    Ok(frames.collect())
}
