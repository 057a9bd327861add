//! Where the clips of a stream come from: prompts and a model folder, or text states and an artefact.

use super::args::{StreamArgs, StreamFormat};
use super::stage::{Decoding, Stage};
use crate::cli::LatentArg;
use crate::commands::video::cache::artefact;
use crate::commands::video::encode::{TextSource, check_negative, check_text, read_negative, read_prompts, read_text};
use crate::commands::video::lanes::{check_cut, resolve_paths};
use crate::commands::video::memory;
use crate::commands::video::shared::{check_folder, decoder_of, kernels};
use crate::commands::video::size::{Size, check_tokens};
use crate::error::CliError;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_video::config::PATCH;
use trefoil_video::job::{Job, JobClip, JobState, clip_stem, identity_of_files, identity_of_tensor};
use trefoil_video::noise::torch_normals;
use trefoil_video::stream::StreamItem;
use trefoil_video::tensors::tensor_names;
use trefoil_video::vae::{VaeConfig, VaeDecoder};
use trefoil_video::{Clip, EngineSpec, Model, NumericPath, Tensor, TensorPath, VideoError};

/// Most clips of one stream.
const MAX_CLIPS: usize = 100_000;
/// Prompts encoded at a time: their states are held with their padding only that long.
const BATCH: usize = 32;
/// What takes less memory.
const LESS: &str = "choose smaller or shorter clips (--size, --frames, --latent)";
/// Latent of text states where none is given.
const LATENT: LatentArg = LatentArg([1, 8, 8]);

/// A clip to be made.
#[derive(Debug, Clone)]
pub struct ClipPlan {
    /// Prompt, or name of the text states.
    pub prompt: String,
    /// Seed of its noise.
    pub seed: u32,
}

/// Text states without the zero rows at their end.
struct TextRows {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl TextRows {
    fn new(shape: Vec<usize>, mut values: Vec<f32>) -> Self {
        let end = values.iter().rposition(|&value| value != 0.0).map_or(0, |last| last + 1);
        values.truncate(end);
        values.shrink_to_fit();
        Self { shape, values }
    }

    fn tensor(&self, name: &str) -> Result<Tensor, VideoError> {
        let mut values = self.values.clone();
        values.resize(self.shape.iter().product(), 0.0);
        Tensor::new(format!("text of {name}"), &self.shape, values)
    }
}

/// Everything about the clips of a stream but the engines.
pub struct Source {
    /// Packed transformer.
    pub artefact: PathBuf,
    /// `[1, C, F, H, W]` of every clip.
    pub shape: [usize; 5],
    /// Every clip, in order.
    pub clips: Vec<ClipPlan>,
    /// Clips that are to be made.
    pub todo: Vec<usize>,
    /// Whether clips have prompts in words.
    pub has_prompts: bool,
    /// By prompt; what is not needed is absent.
    texts: BTreeMap<usize, TextRows>,
    prompts: usize,
    negative: Option<Tensor>,
    /// The folder of the clips.
    pub job: Option<Job>,
    /// The last stage.
    pub stage: Stage,
    /// Seconds of encoding.
    pub text_seconds: Option<f64>,
    /// What a reader of the result should know.
    pub notes: Vec<String>,
}

impl Source {
    /// Clip `number`: its own noise, its text.
    pub fn item(&self, number: usize) -> Result<StreamItem, VideoError> {
        let len: usize = self.shape.iter().product();
        let mut values = torch_normals(self.clips[number].seed, len.max(16));
        values.truncate(len);
        let noise = Tensor::new(format!("noise of clip {}", number + 1), &self.shape, values)?;
        let text = self.texts.get(&(number % self.prompts)).ok_or_else(|| VideoError::Input {
            what: format!("text of clip {}", number + 1),
            reason: "it was not encoded".to_owned(),
        })?;
        let text = text.tensor(&format!("clip {}", number + 1))?;
        Ok(StreamItem { number, noise, text, negative: self.negative.clone() })
    }
}

/// Prompts and a model folder; the decoder is opened for the engine that ends a clip.
pub fn from_prompts(args: &StreamArgs, file: &Path, last: &EngineSpec) -> Result<Source, CliError> {
    check_folder(&args.model)?;
    if !args.model.is_dir() {
        return Err(CliError::Usage(format!(
            "{} is no folder; prompts need a model folder with a text encoder (for an artefact give --text)",
            args.model.display()
        )));
    }
    let Some(folder) = &args.output else {
        return Err(CliError::Usage("say with -o DIR/ where the clips go".to_owned()));
    };
    let prompts = read_prompts(file)?;
    let count = count(args, prompts.len())?;
    let format = args.format.unwrap_or(StreamFormat::Mp4);
    if format != StreamFormat::Latents && args.decoder_ms > 0.0 {
        return Err(CliError::Usage("--decoder-ms stands in for a decoder; it goes with --format latents".to_owned()));
    }
    let size = Size::of(&args.model, args.size, args.frames, args.fps)?;
    let (stage, vae) = match format {
        StreamFormat::Latents => {
            let vae = VaeDecoder::open(&args.model).map_or_else(|_| VaeConfig::default(), |vae| vae.config().clone());
            (Stage::Latents { wait_ms: args.decoder_ms }, vae)
        }
        format => {
            let decoding = Decoding::open(&args.model, args.vae_path, last, size, format)?;
            let vae = decoding.config().clone();
            (Stage::Decode(Box::new(decoding)), vae)
        }
    };
    let [frames, rows, columns] = size.latent(&vae, PATCH)?;
    let mut needs = stage.needs([frames, rows, columns])?;
    memory::check("the stream", LESS, &needs)?;
    check_tokens([frames, rows, columns], LESS)?;
    let artefact = artefact(&args.model, args.artefact.as_deref(), args.cache.as_deref())?;
    let model = Model::open(&artefact)?;
    check_cut(args.cut, &model)?;
    let shape = [1, model.config().channels, frames, rows, columns];
    stage.check(model.config().channels)?;
    needs.extend(memory::of_engines(&args.engines, args.processes, &model, &artefact, shape, memory::IN_FLIGHT));
    memory::check("the stream", LESS, &needs)?;
    let has_guidance = model.sampler().branches() > 1;
    let settings = BTreeMap::from([
        ("model", json!(model.artefact().map(trefoil_weights::Artefact::fingerprint_hex))),
        ("second_model", second(args)?),
        ("text_encoder", json!(identity_of_files(&args.model.join("text_encoder")))),
        ("text_path", json!(args.text_path)),
        ("tokenizer", json!(identity_of_files(&args.model.join("tokenizer")))),
        ("decoder", if format == StreamFormat::Latents { Value::Null } else { json!(vae_identity(&args.model)) }),
        ("frames", json!(size.frames)),
        ("width", json!(size.width)),
        ("height", json!(size.height)),
        // Latents have none.
        ("fps", if format == StreamFormat::Latents { Value::Null } else { json!(size.fps) }),
        ("format", json!(format.as_str())),
        ("decoder_path", if format == StreamFormat::Latents { Value::Null } else { json!(args.vae_path) }),
        ("path", json!(paths(args)?)),
        ("negative_prompt", if has_guidance { json!(args.negative.as_deref().unwrap_or("")) } else { Value::Null }),
    ]);
    drop(model);
    let seed = args.seed.unwrap_or(0);
    let clips: Vec<ClipPlan> = (0..count)
        .map(|number| ClipPlan {
            prompt: prompts[number % prompts.len()].clone(),
            seed: seed.wrapping_add(number as u32),
        })
        .collect();
    let named = clips.iter().enumerate().map(|(index, clip)| {
        JobClip::new(format.file(&clip_stem(index + 1, &clip.prompt)), clip.prompt.clone(), clip.seed)
    });
    check_text(TextSource::plain(&args.model), &prompts)?;
    check_negative(TextSource::plain(&args.model), args.negative.as_deref())?;
    let job = Job::open(folder, JobState::new(owned(settings), named.collect()), false)?;
    let todo: Vec<usize> = (0..count).filter(|&number| !job.is_done(number)).collect();
    let mut source = Source {
        artefact,
        shape,
        todo,
        has_prompts: true,
        texts: BTreeMap::new(),
        prompts: prompts.len(),
        negative: None,
        job: Some(job),
        stage,
        text_seconds: None,
        notes: rate_note(args, format),
        clips,
    };
    if !source.todo.is_empty() {
        let begun = Instant::now();
        encode(args, &prompts, has_guidance, &mut source)?;
        source.text_seconds = Some(begun.elapsed().as_secs_f64());
    }
    Ok(source)
}

/// The numeric paths that clips are made on, whether they were given or not: one where all engines have the same.
fn paths(args: &StreamArgs) -> Result<Vec<NumericPath>, CliError> {
    let mut paths = resolve_paths(&args.engines.engines, &args.engines.path)?;
    if paths.iter().all(|path| *path == paths[0]) {
        paths.truncate(1);
    }
    Ok(paths)
}

/// Text states of every prompt that is needed. The first is always: scales that nobody stored are found on the job's first clip, in
/// every run of the job. The encoder is gone when this returns.
fn encode(args: &StreamArgs, prompts: &[String], has_guidance: bool, source: &mut Source) -> Result<(), CliError> {
    let kernels = kernels(None)?;
    let from = TextSource { model: &args.model, path: args.text_path, cache: args.cache.as_deref() };
    let needed: std::collections::BTreeSet<usize> =
        source.todo.iter().map(|number| number % prompts.len()).chain([0]).collect();
    let needed: Vec<usize> = needed.into_iter().collect();
    for batch in needed.chunks(BATCH) {
        let words: Vec<String> = batch.iter().map(|&index| prompts[index].clone()).collect();
        let states = read_text(from, &words, &kernels, &mut source.notes)?;
        for (at, &index) in batch.iter().enumerate() {
            let rows = TextRows::new(vec![1, states.text_len, states.width], states.prompt(at).to_vec());
            source.texts.insert(index, rows);
        }
    }
    source.negative = read_negative(from, args.negative.as_deref(), has_guidance, &kernels, &mut source.notes)?;
    Ok(())
}

/// Text states and an artefact.
pub fn from_texts(args: &StreamArgs, text: &str, last: &EngineSpec) -> Result<Source, CliError> {
    let named = read_states(text)?;
    let count = count(args, named.len())?;
    let model = Model::open(&args.model)?;
    check_cut(args.cut, &model)?;
    let [frames, rows, columns] = args.latent.unwrap_or(LATENT).0;
    if !rows.is_multiple_of(PATCH) || !columns.is_multiple_of(PATCH) {
        return Err(CliError::Usage(format!(
            "--latent {frames},{rows},{columns}; height and width must be multiples of {PATCH}"
        )));
    }
    let shape = [1, model.config().channels, frames, rows, columns];
    named.iter().try_for_each(|(_, text)| Clip::check_text(&model, text))?;
    let mut notes = Vec::new();
    let negative = match (model.sampler().branches(), &args.negative) {
        (1, None) => None,
        (1, Some(_)) => {
            notes.push("the sampler has no guidance, so --negative changes nothing".to_owned());
            None
        }
        (_, Some(path)) => Some(path.parse::<TensorPath>().map_err(CliError::Usage)?.read()?),
        (_, None) => {
            return Err(CliError::Usage(format!(
                "the sampler has guidance {}; give the text states of the other branch with --negative FILE.safetensors:KEY",
                model.sampler().guidance
            )));
        }
    };
    negative.iter().try_for_each(|negative| Clip::check_text(&model, negative))?;
    let format = args.format.unwrap_or(if args.decoder.is_some() { StreamFormat::Mp4 } else { StreamFormat::Latents });
    notes.extend(rate_note(args, format));
    let decoder = args.decoder.as_deref().map(decoder_of).transpose()?;
    let stage = match (&decoder, format) {
        (None, StreamFormat::Latents) => Stage::Latents { wait_ms: args.decoder_ms },
        (None, format) => {
            return Err(CliError::Usage(format!(
                "--format {} needs a decoder; name it with --decoder",
                format.as_str()
            )));
        }
        (Some(_), StreamFormat::Latents) => {
            return Err(CliError::Usage("--format latents and --decoder exclude each other".to_owned()));
        }
        (Some(path), format) => {
            let vae = VaeDecoder::open(path)?.config().clone();
            let scale = vae.spatial_scale();
            let fps = args.fps.unwrap_or(16);
            let size = Size { frames: vae.frames(frames), width: columns * scale, height: rows * scale, fps };
            Stage::Decode(Box::new(Decoding::open(path, args.vae_path, last, size, format)?))
        }
    };
    stage.check(model.config().channels)?;
    let mut needs = stage.needs([frames, rows, columns])?;
    needs.extend(memory::of_engines(&args.engines, args.processes, &model, &args.model, shape, memory::IN_FLIGHT));
    memory::check("the stream", LESS, &needs)?;
    check_tokens([frames, rows, columns], LESS)?;
    let seed = args.seed.unwrap_or(40);
    let clips: Vec<ClipPlan> = (0..count)
        .map(|number| ClipPlan {
            prompt: named[number % named.len()].0.clone(),
            seed: seed.wrapping_add(number as u32),
        })
        .collect();
    let mut settings = BTreeMap::from([
        ("model", json!(model.artefact().map(trefoil_weights::Artefact::fingerprint_hex))),
        ("second_model", second(args)?),
        ("latent", json!([frames, rows, columns])),
        ("negative_text", json!(negative.as_ref().map(identity_of_tensor))),
        ("format", json!(format.as_str())),
        ("path", json!(paths(args)?)),
    ]);
    if let (Some(path), Stage::Decode(decoding)) = (&decoder, &stage) {
        settings.insert("decoder", json!(vae_identity(path)));
        settings.insert("decoder_path", json!(args.vae_path));
        settings.insert("fps", json!(decoding.size.fps));
    }
    drop(model);
    let job = match &args.output {
        Some(folder) => {
            let identities: Vec<String> = named.iter().map(|(_, text)| identity_of_tensor(text)).collect();
            let clips = clips.iter().enumerate().map(|(index, clip)| {
                JobClip::new(format.file(&format!("clip-{index:04}")), clip.prompt.clone(), clip.seed)
                    .with_text(identities[index % identities.len()].clone())
            });
            Some(Job::open(folder, JobState::new(owned(settings), clips.collect()), true)?)
        }
        None => None,
    };
    let todo = (0..count).filter(|&number| job.as_ref().is_none_or(|job| !job.is_done(number))).collect();
    let prompts = named.len();
    let texts = named
        .into_iter()
        .enumerate()
        .map(|(index, (_, text))| (index, TextRows::new(text.shape, text.values)))
        .collect();
    Ok(Source {
        artefact: args.model.clone(),
        shape,
        clips,
        todo,
        has_prompts: false,
        texts,
        prompts,
        negative,
        job,
        stage,
        text_seconds: None,
        notes,
    })
}

/// That latents have no rate, where one was given.
fn rate_note(args: &StreamArgs, format: StreamFormat) -> Vec<String> {
    let is_vain = format == StreamFormat::Latents && args.fps.is_some();
    is_vain.then(|| "latents are no frames, so --fps changes nothing".to_owned()).into_iter().collect()
}

fn owned(settings: BTreeMap<&str, Value>) -> BTreeMap<String, Value> {
    settings.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn count(args: &StreamArgs, prompts: usize) -> Result<usize, CliError> {
    match args.count.unwrap_or(prompts) {
        count @ 1..=MAX_CLIPS => Ok(count),
        count => Err(CliError::Usage(format!("{count} clips; it must lie in 1..={MAX_CLIPS}"))),
    }
}

/// What the second whole model is, where there is one.
fn second(args: &StreamArgs) -> Result<Value, CliError> {
    let Some(path) = &args.engines.second.second else { return Ok(Value::Null) };
    let model = Model::open(path)?;
    let fingerprint = model.artefact().map(trefoil_weights::Artefact::fingerprint_hex);
    Ok(json!({ "fingerprint": fingerprint, "switch_timestep": args.engines.second.switch_timestep }))
}

/// Every tensor of a file, or the one that is named.
fn read_states(text: &str) -> Result<Vec<(String, Tensor)>, CliError> {
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

fn vae_identity(model: &Path) -> Option<String> {
    let inside = ["vae_decoder", "vae"].into_iter().map(|name| model.join(name)).find(|folder| folder.is_dir());
    identity_of_files(&inside.unwrap_or_else(|| model.to_owned()))
}
