//! `trefoil bench quality`: the paper's Table 4 on a model everybody can run. The clips of each numeric path, and of two paths with
//! a cut between them, are read by [`read_shapes`], which knows what the prompts ask for, and compared with the clips that `f32`
//! makes of the same prompts and noise.

mod report;

use super::cache::artefact;
use super::encode::{TextSource, read_text};
use super::shared::{CoresArg, check_folder, kernels};
use super::size::Size;
use super::{bar, blocks, check_stopped, keep_going, lanes};
use crate::cli::SecondArgs;
use crate::error::CliError;
use clap::Args;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trefoil_kernels::Kernels;
use trefoil_video::config::PATCH;
use trefoil_video::noise::torch_normals;
use trefoil_video::output::VideoFrame;
use trefoil_video::quality::{
    Fidelity, Reading, ShapePrompt, Split, Steadiness, compare, read_shapes, shape_prompts, steadiness,
};
use trefoil_video::text::TextStates;
use trefoil_video::vae::{DecoderPath, Latent, VaeDecoder};
use trefoil_video::{
    Calibration, CalibrationClip, Clip, Event, Lane, Model, NumericPath, Tensor, VideoError, denoise, open_reference,
};

/// Clips that activation scales are found on: training combinations, other noise and wording than any measured clip.
const CALIBRATION_CLIPS: usize = 8;
const CALIBRATION_SEED: u32 = 900_000;

/// `trefoil bench quality`.
#[derive(Debug, Args)]
pub struct BenchQualityArgs {
    /// Model folder trained on the demo model's prompts [default: the demo model]
    #[arg(value_name = "MODEL_DIR")]
    pub model: Option<PathBuf>,
    /// Clips of each row and of each of the two sets of combinations
    #[arg(long, value_name = "N", default_value_t = 45, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub clips: u16,
    /// Numeric paths of the deployed pair: before and after the cut
    #[arg(long, value_name = "PATH,PATH", default_value = "w8a8,w8a16", value_delimiter = ',')]
    pub deployed: Vec<NumericPath>,
    /// Cuts of the deployed pair, in block executions [default: a quarter, half and three quarters of them]
    #[arg(long, value_name = "K,K,…", value_delimiter = ',')]
    pub cuts: Option<Vec<usize>>,
    /// Seed of the first clip's noise; each further clip has the next
    #[arg(long, default_value_t = 1000)]
    pub seed: u32,
    /// Cores to use, such as 0-3,7 [default: all]
    #[arg(long, value_name = "CORES")]
    pub cores: Option<CoresArg>,
    /// Folder for packed models
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How a clip is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// All of it on one path.
    On(NumericPath),
    /// On the deployed pair, cut here.
    Cut(usize),
    /// On `f32`, then decoded in INT8.
    Int8Decoder,
}

/// What the clips of one way gave, in order.
#[derive(Debug, Default)]
struct Outcome {
    readings: Vec<Reading>,
    /// Against the same clips on `f32`; empty for `f32` itself.
    fidelity: Vec<Fidelity>,
    steadiness: Vec<Steadiness>,
}

/// One set of prompts and what each way made of them.
struct Measured {
    split: Split,
    prompts: Vec<ShapePrompt>,
    outcomes: Vec<Outcome>,
}

/// Runs the command.
pub fn run(args: &BenchQualityArgs) -> Result<(), CliError> {
    let folder = demo_model(args.model.as_deref())?;
    check_folder(&folder)?;
    let clips = usize::from(args.clips);
    let mut maker = Maker::open(&folder, args)?;
    let count = maker.blocks;
    let cuts = args.cuts.clone().unwrap_or_else(|| vec![count / 4, count / 2, count * 3 / 4]);
    if let Some(&cut) = cuts.iter().find(|&&cut| cut > count) {
        return Err(VideoError::Cut { cut, blocks: count }.into());
    }
    // `f32` comes first: the others are compared with it.
    let ways: Vec<Way> = NumericPath::ALL
        .into_iter()
        .map(Way::On)
        .chain(cuts.into_iter().map(Way::Cut))
        .chain([Way::Int8Decoder])
        .collect();
    let bar = bar("bench quality {pos}/{len} clips, {eta} left {wide_msg}", args.json);
    bar.set_length((Split::ALL.len() * clips * ways.len()) as u64);
    let mut measured = Vec::new();
    for split in Split::ALL {
        let prompts = shape_prompts(split, clips, u64::from(args.seed));
        let texts = maker.read(&prompts)?;
        let mut outcomes: Vec<Outcome> = ways.iter().map(|_| Outcome::default()).collect();
        for clip in 0..clips {
            // Both sets of combinations have the same noise.
            let seed = args.seed.wrapping_add(clip as u32);
            let text = text_tensor(&texts, clip)?;
            let mut reference = Vec::new();
            for (&way, outcome) in ways.iter().zip(&mut outcomes) {
                bar.set_message(maker.name(way));
                let frames = maker.make(&text, seed, way)?;
                outcome.readings.push(read_shapes(&frames));
                outcome.steadiness.extend(steadiness(&frames));
                if way == Way::On(NumericPath::F32) {
                    reference = frames;
                } else {
                    outcome.fidelity.extend(compare(&frames, &reference));
                }
                bar.inc(1);
            }
        }
        measured.push(Measured { split, prompts, outcomes });
    }
    bar.finish_and_clear();
    report::print(args, &folder, &maker, &ways, &measured)
}

/// The folder given, else the demo model: of this checkout, else of the one that the program was built in, else installed beside
/// the program.
fn demo_model(given: Option<&Path>) -> Result<PathBuf, CliError> {
    const IN_CHECKOUT: &str = "testdata/demo-model";
    if let Some(folder) = given {
        return Ok(folder.to_owned());
    }
    let program = std::env::current_exe().unwrap_or_default();
    let of_build = program.ancestors().skip(1).map(|folder| folder.join(IN_CHECKOUT));
    let installed = program.ancestors().nth(2).map(|prefix| prefix.join("share/trefoil/demo-model"));
    std::iter::once(PathBuf::from(IN_CHECKOUT))
        .chain(of_build)
        .chain(installed)
        .find(|folder| folder.join("transformer").is_dir())
        .ok_or_else(|| {
            CliError::Usage(format!(
                "the demo model is not here ({IN_CHECKOUT}); name a model folder, or run in a checkout of Trefoil"
            ))
        })
}

/// Makes clips. Everything that does not change from clip to clip is opened once.
struct Maker {
    folder: PathBuf,
    kernels: Arc<Kernels>,
    decoder: VaeDecoder,
    int8_decoder: VaeDecoder,
    size: Size,
    /// Channels, frames, rows and columns of the latent.
    latent: [usize; 4],
    /// One per path, in the order of [`NumericPath::ALL`].
    singles: Vec<Lane>,
    deployed: [NumericPath; 2],
    /// Of the deployed pair.
    pair: [Lane; 2],
    /// Block executions of a clip.
    blocks: usize,
    steps: usize,
    /// Clips that activation scales were found on here; 0 where the artefact has some.
    calibration_clips: usize,
    notes: Vec<String>,
}

impl Maker {
    fn open(folder: &Path, args: &BenchQualityArgs) -> Result<Self, CliError> {
        let &[before, after] = args.deployed.as_slice() else {
            return Err(CliError::Usage("--deployed takes two paths, like w8a8,w8a16".to_owned()));
        };
        let decoder = VaeDecoder::open(folder)?;
        let size = Size::of_folder(folder)?;
        let [frames, rows, columns] = size.latent(decoder.config(), PATCH)?;
        let artefact = artefact(folder, None, args.cache.as_deref())?;
        let packed = Arc::new(lanes::open_model(&artefact, &SecondArgs { second: None, switch_timestep: None })?);
        if packed.sampler().branches() > 1 {
            return Err(CliError::Usage(
                "the benchmark takes no model with guidance: its prompts have no negative".to_owned(),
            ));
        }
        let reference = Arc::new(open_reference(&packed, None)?);
        let kernels = Arc::new(kernels(args.cores.as_ref())?);
        let latent = [packed.config().channels, frames, rows, columns];
        let (mut notes, mut calibration_clips) = (Vec::new(), 0);
        let calibration = if let Some(stored) = Calibration::of(&packed)? {
            stored.check(&packed)?;
            stored
        } else {
            calibration_clips = CALIBRATION_CLIPS;
            observe(folder, &packed, &kernels, latent, &mut notes)?
        };
        let calibration = Arc::new(calibration);
        let lane = |path: NumericPath| -> Result<Lane, VideoError> {
            let model = if path == NumericPath::F32 { &reference } else { &packed };
            // One call of a whole piece: nothing is watched between blocks.
            let lane = Lane::cpu("cpu".to_owned(), Arc::clone(&kernels), model, path, Some(&calibration))?;
            Ok(lane.with_blocks_per_call(packed.config().layers))
        };
        Ok(Self {
            folder: folder.to_owned(),
            decoder,
            int8_decoder: VaeDecoder::open_on(folder, DecoderPath::Int8)?,
            size,
            latent,
            singles: NumericPath::ALL.into_iter().map(lane).collect::<Result<_, _>>()?,
            deployed: [before, after],
            pair: [lane(before)?, lane(after)?],
            blocks: blocks(&packed),
            steps: packed.sampler().steps(),
            calibration_clips,
            notes,
            kernels: Arc::clone(&kernels),
        })
    }

    fn name(&self, way: Way) -> String {
        match way {
            Way::On(path) => path.to_string(),
            Way::Cut(cut) => format!("{} to {cut}, then {}", self.deployed[0], self.deployed[1]),
            Way::Int8Decoder => "f32, decoder int8".to_owned(),
        }
    }

    /// Text states of all prompts.
    fn read(&mut self, prompts: &[ShapePrompt]) -> Result<TextStates, CliError> {
        let texts: Vec<String> = prompts.iter().map(|prompt| prompt.text.clone()).collect();
        read_text(TextSource::plain(&self.folder), &texts, &self.kernels, &mut self.notes)
    }

    /// The frames of a clip.
    fn make(&mut self, text: &Tensor, seed: u32, way: Way) -> Result<Vec<VideoFrame>, CliError> {
        let single = |path| NumericPath::ALL.iter().position(|&other| other == path).unwrap_or(0);
        let (lanes, cut) = match way {
            Way::On(path) => (&mut self.singles[single(path)..=single(path)], self.blocks),
            Way::Cut(cut) => (&mut self.pair[..], cut),
            Way::Int8Decoder => (&mut self.singles[single(NumericPath::F32)..][..1], self.blocks),
        };
        let decoder = if way == Way::Int8Decoder { &self.int8_decoder } else { &self.decoder };
        let noise = noise(self.latent, seed)?;
        let model = Arc::clone(lanes[0].model());
        let clip = Clip::new(lanes[0].host_mut(), &model, &noise, text, None)?;
        let mut state = clip.start(&noise)?;
        denoise(lanes, &clip, &mut state, cut, &mut |event| match event {
            Event::Blocks { done, .. } => keep_going(*done, self.blocks),
            Event::Step { .. } => Ok(()),
        })?;
        let [channels, frames, rows, columns] = self.latent;
        let latent = Latent::new(channels, frames, rows, columns, clip.unpatchify(state.latent()))?;
        let latent = latent.denormalise(decoder.config())?;
        let mut video = Vec::with_capacity(self.size.frames);
        let mut collect = |frame| {
            video.push(frame);
            Ok::<(), CliError>(())
        };
        decoder.decode_clip(&self.kernels, &latent, &mut check_stopped, &mut collect)?;
        Ok(video)
    }
}

fn text_tensor(texts: &TextStates, index: usize) -> Result<Tensor, CliError> {
    Ok(Tensor::new("text", &[1, texts.text_len, texts.width], texts.prompt(index).to_vec())?)
}

fn noise([channels, frames, rows, columns]: [usize; 4], seed: u32) -> Result<Tensor, CliError> {
    let shape = [1, channels, frames, rows, columns];
    Ok(Tensor::new("noise", &shape, torch_normals(seed, shape.iter().product()))?)
}

/// Activation scales for `w8a8`, from clips that are not measured.
fn observe(
    folder: &Path,
    packed: &Arc<Model>,
    kernels: &Arc<Kernels>,
    latent: [usize; 4],
    notes: &mut Vec<String>,
) -> Result<Calibration, CliError> {
    let prompts = shape_prompts(Split::Training, CALIBRATION_CLIPS, u64::from(CALIBRATION_SEED));
    let prompts: Vec<String> = prompts.into_iter().map(|prompt| prompt.text).collect();
    let texts = read_text(TextSource::plain(folder), &prompts, kernels, notes)?;
    let mut inputs = Vec::new();
    for index in 0..CALIBRATION_CLIPS {
        inputs.push((noise(latent, CALIBRATION_SEED + index as u32)?, text_tensor(&texts, index)?));
    }
    let clips: Vec<CalibrationClip<'_>> =
        inputs.iter().map(|(noise, text)| CalibrationClip { noise, text, negative: None }).collect();
    Ok(Calibration::observe(packed, kernels, &clips, &mut keep_going)?)
}
