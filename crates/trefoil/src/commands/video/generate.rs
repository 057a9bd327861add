//! `trefoil video generate`: from a prompt to a clip. Each model of the folder is in memory only while it works: text encoder, then
//! transformer, then decoder.

use super::cache::artefact;
use super::check_stopped;
use super::decode::check_memory;
use super::encode::{TextSource, check_negative, check_text, read_negative, read_text};
use super::memory::{self, Need};
use super::shared::{check_folder, check_sheet, kernels};
use super::size::{Size, SizeArg, check_tokens};
use super::{block_bar, denoise, lanes};
use crate::cli::{CutArg, EngineArgs};
use crate::context::{self, print, print_json};
use crate::error::CliError;
use clap::Args;
use serde_json::json;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_report::format;
use trefoil_video::config::PATCH;
use trefoil_video::engine::{EngineDecoder, EngineKind, allowed_cores};
use trefoil_video::noise::torch_normals;
use trefoil_video::output::{ClipMetadata, ClipReport, ClipWriter, ContactSheet};
use trefoil_video::text::TextPath;
use trefoil_video::vae::{DecoderPath, Latent, VaeConfig, VaeDecoder};
use trefoil_video::{Clip, DenoiseReport, EngineSpec, Model, Tensor};

/// What takes less memory.
const LESS: &str = "choose a smaller or shorter one (--size, --frames)";

/// `trefoil video generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Pipeline folder laid out like the public ones: transformer/, vae/ or vae_decoder/, text_encoder/, tokenizer/
    #[arg(value_name = "MODEL_DIR")]
    pub model: PathBuf,
    /// What the clip should show
    #[arg(value_name = "PROMPT")]
    pub prompt: String,
    /// What it should not show, for samplers with guidance; nothing by default
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
    let size = Size::of(&args.model, args.size, args.frames, args.fps)?;
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
    check_tokens([frames, rows, columns], LESS)?;
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
    check_text(TextSource::plain(&args.model), std::slice::from_ref(&args.prompt))?;
    check_negative(TextSource::plain(&args.model), args.negative.as_deref())?;
    let start = Instant::now();
    let artefact = artefact(&args.model, args.artefact.as_deref(), args.cache.as_deref())?;
    seconds.pack = start.elapsed().as_secs_f64();
    let has_guidance = check(args, size, &vae, &artefact)?;
    let start = Instant::now();
    let (text, negative, mut notes) = texts(args, has_guidance)?;
    seconds.text = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let (report, latent) = denoised(args, size, &vae, &artefact, (&text, negative.as_ref()), &mut notes)?;
    seconds.denoise = start.elapsed().as_secs_f64();
    // As a stream's files say it: one path where both engines have the same.
    let mut paths: Vec<String> = report.lanes.iter().map(|lane| lane.path.to_string()).collect();
    paths.dedup();
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

/// Text states of the prompt and, with guidance, of the other branch.
fn texts(args: &GenerateArgs, has_guidance: bool) -> Result<(Tensor, Option<Tensor>, Vec<String>), CliError> {
    let kernels = kernels(None)?;
    let mut notes = Vec::new();
    let source = TextSource { model: &args.model, path: args.text_path, cache: args.cache.as_deref() };
    let states = read_text(source, std::slice::from_ref(&args.prompt), &kernels, &mut notes)?;
    let text = Tensor::new("text", &[1, states.text_len, states.width], states.prompt(0).to_vec())?;
    let negative = read_negative(source, args.negative.as_deref(), has_guidance, &kernels, &mut notes)?;
    Ok((text, negative, notes))
}

/// Refuses what the packed transformer cannot make of these flags, and what does not fit into memory. Tells whether the sampler has
/// guidance.
fn check(args: &GenerateArgs, size: Size, vae: &VaeConfig, artefact: &Path) -> Result<bool, CliError> {
    let model = Model::open(artefact)?;
    lanes::check_cut(args.cut, &model)?;
    let channels = model.config().channels;
    if vae.z_dim != channels {
        return Err(CliError::Usage(format!(
            "the decoder takes latents of {} channels and the transformer makes {channels}; is it this model's decoder?",
            vae.z_dim
        )));
    }
    let [frames, rows, columns] = size.latent(vae, PATCH)?;
    let needs = memory::of_engines(&args.engines, false, &model, artefact, [1, channels, frames, rows, columns], 1);
    memory::check("the clip", LESS, &needs)?;
    Ok(model.sampler().branches() > 1)
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
    open.models.packed().check_unchanged()?;
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
