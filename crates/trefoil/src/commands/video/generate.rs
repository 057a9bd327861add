//! `trefoil video generate`: from a prompt to a clip. Each model of the folder is in memory only while it works: text encoder, then
//! transformer, then decoder.

use super::check_stopped;
use super::decode::check_memory;
use super::encode::{TextSource, check_text, read_text};
use super::memory::{self, Need};
use super::shared::{check_folder, check_sheet, kernels};
use super::{block_bar, denoise, lanes};
use crate::cli::{CutArg, EngineArgs};
use crate::context::{self, cache_dir, print, print_json, stop_flag};
use crate::error::CliError;
use clap::Args;
use serde_json::json;
use std::fmt::{self, Write as _};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;
use trefoil_report::format;
use trefoil_video::config::PATCH;
use trefoil_video::engine::{EngineDecoder, EngineKind, allowed_cores};
use trefoil_video::noise::torch_normals;
use trefoil_video::output::{ClipMetadata, ClipReport, ClipWriter, ContactSheet};
use trefoil_video::text::TextPath;
use trefoil_video::vae::{DecoderPath, Latent, VaeConfig, VaeDecoder};
use trefoil_video::{Clip, DenoiseReport, EngineSpec, Model, Tensor, VideoPackOptions, pack_video};

/// Frames, size and rate where neither the command line nor the model folder says any: the stock pipeline's.
const STOCK: Size = Size { frames: 81, width: 832, height: 480, fps: 16 };

/// `trefoil video generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Pipeline folder laid out like the public ones: transformer/, vae/ or vae_decoder/, text_encoder/, tokenizer/
    #[arg(value_name = "MODEL_DIR")]
    pub model: PathBuf,
    /// What the clip should show
    #[arg(value_name = "PROMPT")]
    pub prompt: String,
    /// What it should not show, for samplers with guidance
    #[arg(long, value_name = "TEXT")]
    pub negative: Option<String>,
    /// Where to write the clip; the name says the format: .mp4, .png or .webp (animated), .gif, .safetensors, or a folder for PNG frames
    #[arg(short, long, value_name = "CLIP")]
    pub output: PathBuf,
    /// Seed of the noise (PyTorch's CPU generator)
    #[arg(long, default_value_t = 0)]
    pub seed: u32,
    /// Width and height in pixels [default: the model folder's, else 832x480]
    #[arg(long, value_name = "WxH")]
    pub size: Option<SizeArg>,
    /// Frames, one more than a multiple of four [default: the model folder's, else 81]
    #[arg(long)]
    pub frames: Option<usize>,
    /// Frames a second [default: the model folder's, else 16]
    #[arg(long)]
    pub fps: Option<u32>,
    /// Packed transformer; packed into the cache on first use by default
    #[arg(long, value_name = "A.trefoil")]
    pub artefact: Option<PathBuf>,
    /// Engines
    #[command(flatten)]
    pub engines: EngineArgs,
    /// First block execution of the second engine; auto measures both engines while both run
    #[arg(long, value_name = "K|auto", default_value = "auto")]
    pub cut: CutArg,
    /// What the text encoder's matrices are: f32, or int8, packed into the cache on first use
    #[arg(long, value_name = "PATH", default_value_t = TextPath::F32)]
    pub text_path: TextPath,
    /// What the decoder computes in: f32, or int8 for less memory and time
    #[arg(long, value_name = "PATH", default_value_t = DecoderPath::F32)]
    pub vae_path: DecoderPath,
    /// Also write a contact sheet
    #[arg(long, value_name = "SHEET.png")]
    pub contact_sheet: Option<PathBuf>,
    /// Folder for packed models
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `WIDTHxHEIGHT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeArg {
    width: usize,
    height: usize,
}

impl SizeArg {
    /// A video of this size.
    pub(super) fn video(self, frames: usize) -> Size {
        Size { frames, width: self.width, height: self.height, fps: STOCK.fps }
    }
}

impl fmt::Display for SizeArg {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}×{}", self.width, self.height)
    }
}

impl FromStr for SizeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sides = text.split_once(['x', '×']).and_then(|(width, height)| {
            Some(Self { width: width.trim().parse().ok()?, height: height.trim().parse().ok()? })
        });
        match sides {
            Some(size) if (1..=16_384).contains(&size.width) && (1..=16_384).contains(&size.height) => Ok(size),
            _ => Err("write WIDTHxHEIGHT, like 832x480".to_owned()),
        }
    }
}

/// What a clip looks like from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) frames: usize,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) fps: u32,
}

impl Size {
    /// What the command line says, else the model folder.
    pub(super) fn of(model: &Path, size: Option<SizeArg>, frames: Option<usize>, fps: Option<u32>) -> Self {
        let told = Self::of_folder(model);
        Self {
            frames: frames.unwrap_or(told.frames),
            width: size.map_or(told.width, |size| size.width),
            height: size.map_or(told.height, |size| size.height),
            fps: fps.unwrap_or(told.fps),
        }
    }

    /// What the model folder's sampler file says, else the stock pipeline's.
    pub(super) fn of_folder(model: &Path) -> Self {
        let text = std::fs::read_to_string(model.join("scheduler/sampler.json")).unwrap_or_default();
        let sampler: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let told = |key: &str, stock: usize| sampler[key].as_u64().map_or(stock, |value| value as usize);
        Self {
            frames: told("num_frames", STOCK.frames),
            width: told("width", STOCK.width),
            height: told("height", STOCK.height),
            fps: told("fps", STOCK.fps as usize) as u32,
        }
    }

    /// Frames, rows and columns of the latent.
    pub(super) fn latent(self, vae: &VaeConfig, patch: usize) -> Result<[usize; 3], CliError> {
        let (space, time) = (vae.spatial_scale(), vae.temporal_scale());
        let step = space * patch;
        if !self.width.is_multiple_of(step) || !self.height.is_multiple_of(step) || self.width * self.height == 0 {
            return Err(CliError::Usage(format!(
                "{}×{} pixels; width and height must be multiples of {step}",
                self.width, self.height
            )));
        }
        if self.frames % time != 1 % time {
            let below = self.frames.saturating_sub(1) / time * time + 1;
            let above = below + time;
            return Err(CliError::Usage(format!(
                "{} frames; the decoder makes one more than a multiple of {time}, like {below} or {above}",
                self.frames
            )));
        }
        Ok([self.frames.div_ceil(time), self.height / space, self.width / space])
    }
}

/// Seconds of each stage.
#[derive(Debug, Default, serde::Serialize)]
struct Seconds {
    text: f64,
    pack: f64,
    denoise: f64,
    decode: f64,
}

/// Runs the command.
pub fn run(args: &GenerateArgs) -> Result<(), CliError> {
    check_folder(&args.model)?;
    context::check_distinct(&[Some(&args.output), args.contact_sheet.as_deref()], std::slice::from_ref(&args.model))?;
    check_sheet(args.contact_sheet.as_deref())?;
    let size = Size::of(&args.model, args.size, args.frames, args.fps);
    let mut specs = lanes::engines_of(&args.engines, false)?;
    if specs.len() == 1 && args.cut != CutArg::Auto {
        return Err(CliError::Usage("--cut needs two engines, like --engines cpu@0,cpu@1".to_owned()));
    }
    let last = specs.pop();
    let mut seconds = Seconds::default();
    // Everything that can be wrong is found before the long part: the decoder is opened first, for its sizes, and closed again.
    let decoder = VaeDecoder::open(&args.model)?;
    let vae = decoder.config().clone();
    let [frames, rows, columns] = size.latent(&vae, PATCH)?;
    if args.vae_path == DecoderPath::F32 {
        // The weights are in memory already, here and when it is opened again.
        let memory = decoder.clip_memory([frames, rows, columns], allowed_cores().len())?;
        let need = Need { what: "decoder", bytes: (memory.history + memory.working) as u64 };
        memory::check("decoding the clip", "choose a smaller one (--size)", &[need])?;
    }
    drop(decoder);
    let metadata = |path: String, plan: Option<String>| ClipMetadata {
        fps: size.fps,
        prompt: Some(args.prompt.clone()),
        seed: Some(u64::from(args.seed)),
        numeric_path: path,
        plan,
        source: None,
    };
    drop(ClipWriter::create(&args.output, (size.height, size.width), size.frames, metadata(String::new(), None))?);
    check_text(TextSource::plain(&args.model), &prompts(args))?;
    let start = Instant::now();
    let artefact = artefact(&args.model, args.artefact.as_deref(), args.cache.as_deref())?;
    seconds.pack = start.elapsed().as_secs_f64();
    check(args, size, &vae, &artefact)?;
    let start = Instant::now();
    let (text, negative, mut notes) = texts(args)?;
    seconds.text = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let (report, latent) = denoised(args, size, &vae, &artefact, (&text, negative.as_ref()), &mut notes)?;
    seconds.denoise = start.elapsed().as_secs_f64();
    let paths: Vec<String> = report.lanes.iter().map(|lane| lane.path.to_string()).collect();
    let engines: Vec<String> = report.lanes.iter().map(|lane| lane.engine.clone()).collect();
    let plan = match report.handoffs.first() {
        Some(handoff) => format!("{} cut at {} of {}", engines.join(" then "), handoff.at, report.blocks),
        None => engines.join(" then "),
    };

    let start = Instant::now();
    // Nothing else runs any more, so the kind of engine that ends a clip has all cores.
    let on = match last.filter(|spec| spec.kind == EngineKind::OpenCl) {
        Some(spec) => spec.on(&[]),
        None => EngineSpec::cpu(&[]),
    };
    let on = EngineDecoder::open(&args.model, args.vae_path, &on)?;
    notes.extend(on.engine().notes().iter().cloned());
    let clip = decoded(
        args,
        size,
        latent,
        &on,
        &metadata(format!("{}, decoder {}", paths.join("/"), args.vae_path), Some(plan.clone())),
    )?;
    seconds.decode = start.elapsed().as_secs_f64();
    let warning = clip.health.warning();
    if args.json {
        return print_json(&json!({
            "output": context::shown(&args.output),
            "contact_sheet": args.contact_sheet.as_deref().map(context::shown),
            "prompt": args.prompt,
            "seed": args.seed,
            "frames": clip.frames,
            "width": size.width,
            "height": size.height,
            "fps": size.fps,
            "plan": plan,
            "blocks": report.blocks,
            "cut": report.cut,
            "engines": report.lanes,
            "decoder": { "engine": on.engine().spec().to_string(), "kernels": on.engine().kernels_name() },
            "handoffs": report.handoffs,
            "seconds": seconds,
            "health": clip.health,
            "warning": warning,
            "notes": notes,
        }));
    }
    for note in notes.iter().chain(&warning) {
        eprintln!("note: {note}");
    }
    let mut told = String::new();
    let _ = writeln!(
        told,
        "{}: {} of {}×{} at {} fps, {}",
        args.output.display(),
        format::plural(clip.frames, "frame"),
        size.width,
        size.height,
        size.fps,
        plan
    );
    let stage = |seconds: f64| format::time(seconds * 1e3);
    let _ = writeln!(
        told,
        "text {}, denoising {} ({} block executions), decoding {} (measured)",
        stage(seconds.text),
        stage(seconds.denoise),
        report.blocks,
        stage(seconds.decode)
    );
    print(&told)
}

/// What is to be encoded.
fn prompts(args: &GenerateArgs) -> Vec<String> {
    std::iter::once(&args.prompt).chain(&args.negative).cloned().collect()
}

/// Text states of the prompt and, where given, of the negative one.
fn texts(args: &GenerateArgs) -> Result<(Tensor, Option<Tensor>, Vec<String>), CliError> {
    let kernels = kernels(None)?;
    let mut notes = Vec::new();
    let prompts = prompts(args);
    let source = TextSource { model: &args.model, path: args.text_path, cache: args.cache.as_deref() };
    let states = read_text(source, &prompts, &kernels, &mut notes)?;
    let tensor = |index: usize| {
        Tensor::new("text", &[1, states.text_len, states.width], states.prompt(index).to_vec()).map_err(CliError::from)
    };
    let negative = args.negative.is_some().then(|| tensor(1)).transpose()?;
    Ok((tensor(0)?, negative, notes))
}

/// The packed transformer: given, or packed into the cache once for each state of the model folder.
pub(super) fn artefact(model: &Path, given: Option<&Path>, cache: Option<&Path>) -> Result<PathBuf, CliError> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let transformer = model.join("transformer");
    let folder = if transformer.is_dir() { transformer } else { model.to_owned() };
    let path = cached(&folder, "trefoil", cache)?;
    if !path.exists() {
        let options = VideoPackOptions { stop: Some(stop_flag()), ..VideoPackOptions::default() };
        pack_video(model, &path, &options, |_| {})?;
    }
    Ok(path)
}

/// Where the cache has what is packed from a folder's (or a file's) present state; the folder of it is made.
pub(super) fn cached(source: &Path, extension: &str, cache: Option<&Path>) -> Result<PathBuf, CliError> {
    let path = cache_dir(cache).join("video").join(format!("{:016x}.{extension}", state_of(source)?));
    let create = |source| CliError::File { action: "create", path: path.clone(), source };
    std::fs::create_dir_all(path.parent().unwrap_or(Path::new("."))).map_err(create)?;
    Ok(path)
}

/// A number that changes when a file of the folder does.
fn state_of(folder: &Path) -> Result<u64, CliError> {
    let read = |source| CliError::File { action: "read", path: folder.to_owned(), source };
    let mut files: Vec<(PathBuf, u64, Option<std::time::SystemTime>)> = Vec::new();
    let paths: Vec<PathBuf> = if folder.is_dir() {
        let entries = std::fs::read_dir(folder).map_err(read)?;
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>().map_err(read)?
    } else {
        vec![folder.to_owned()]
    };
    for path in paths {
        let about = std::fs::metadata(&path).map_err(read)?;
        files.push((path, about.len(), about.modified().ok()));
    }
    files.sort();
    let mut hasher = DefaultHasher::new();
    (env!("CARGO_PKG_VERSION"), std::fs::canonicalize(folder).map_err(read)?, files).hash(&mut hasher);
    Ok(hasher.finish())
}

/// Refuses what the packed transformer cannot make of these flags, and what does not fit into memory.
fn check(args: &GenerateArgs, size: Size, vae: &VaeConfig, artefact: &Path) -> Result<(), CliError> {
    let model = Model::open(artefact)?;
    lanes::check_cut(args.cut, &model)?;
    if model.sampler().branches() > 1 && args.negative.is_none() {
        return Err(CliError::Usage(format!(
            "the sampler has guidance {}; say with --negative what the clip should not show",
            model.sampler().guidance
        )));
    }
    let channels = model.config().channels;
    if vae.z_dim != channels {
        return Err(CliError::Usage(format!(
            "the decoder takes latents of {} channels and the transformer makes {channels}; is it this model's decoder?",
            vae.z_dim
        )));
    }
    let [frames, rows, columns] = size.latent(vae, PATCH)?;
    let needs = memory::of_engines(&args.engines, false, &model, artefact, [1, channels, frames, rows, columns], 1);
    memory::check("the clip", "choose a smaller or shorter one (--size, --frames)", &needs)
}

/// The latent of the clip after the last step.
fn denoised(
    args: &GenerateArgs,
    size: Size,
    vae: &VaeConfig,
    artefact: &Path,
    (text, negative): (&Tensor, Option<&Tensor>),
    notes: &mut Vec<String>,
) -> Result<(DenoiseReport, Latent), CliError> {
    let channels = vae.z_dim;
    let [frames, rows, columns] = size.latent(vae, PATCH)?;
    let shape = [1, channels, frames, rows, columns];
    let noise = Tensor::new("noise", &shape, torch_normals(args.seed, shape.iter().product()))?;
    let mut open = lanes::open(artefact, &args.engines, (&noise, text, negative))?;
    let model = open.lanes[0].model().clone();
    let clip = Clip::new(open.lanes[0].host_mut(), &model, &noise, text, negative)?;
    let (cut, _) = lanes::choose_cut(args.cut, &mut open.lanes, &clip, &noise, 0.0)?;
    let bar = block_bar(args.json);
    bar.set_length(clip.trajectory().blocks() as u64);
    let (report, mut latents) = denoise::in_this_process(&mut open.lanes, &clip, &noise, cut, &bar)?;
    bar.finish_and_clear();
    notes.append(&mut open.notes);
    let last = latents.pop().ok_or_else(|| CliError::Failed("the sampler has no step".to_owned()))?;
    Ok((report, Latent::new(channels, frames, rows, columns, last.values)?))
}

/// Decodes into the clip's file.
fn decoded(
    args: &GenerateArgs,
    size: Size,
    latent: Latent,
    on: &EngineDecoder,
    metadata: &ClipMetadata,
) -> Result<ClipReport, CliError> {
    let decoder = on.decoder();
    let latent = latent.denormalise(decoder.config())?;
    let memory = on.memory([latent.frames(), latent.height(), latent.width()])?;
    check_memory(&memory, "choose a smaller clip (--size)")?;
    let mut clip = ClipWriter::create(&args.output, (size.height, size.width), size.frames, metadata.clone())?;
    let mut sheet = ContactSheet::new(size.height, size.width, size.frames);
    let mut take = |frame| {
        sheet.push(&frame);
        clip.push(&frame).map_err(CliError::from)
    };
    decoder.decode_clip(on.kernels(), &latent, &mut check_stopped, &mut take)?;
    let report = clip.finish()?;
    if let Some(path) = &args.contact_sheet {
        sheet.write(path, metadata)?;
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        assert_eq!("832x480".parse(), Ok(SizeArg { width: 832, height: 480 }));
        assert!("832".parse::<SizeArg>().is_err() && "0x9".parse::<SizeArg>().is_err());
    }
}
