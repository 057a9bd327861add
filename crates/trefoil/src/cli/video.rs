//! `trefoil video`: flags.

use crate::commands::video::{decode::DecodeArgs, encode::EncodeArgs, generate::GenerateArgs, stream::StreamArgs};
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;
use trefoil_video::engine::EngineList;
use trefoil_video::vae::DecoderPath;
use trefoil_video::{NumericPath, TensorPath};

/// `trefoil video`.
#[derive(Debug, Args)]
pub struct VideoArgs {
    /// What to do
    #[command(subcommand)]
    pub command: VideoCommand,
}

/// The commands of `trefoil video`.
#[derive(Debug, Subcommand)]
pub enum VideoCommand {
    /// Pack a Wan2.1 or DCM transformer (a diffusers-style folder, or a checkpoint file and its config.json) into an artefact
    Pack(VideoPackArgs),
    /// Say what an artefact holds: sizes, experts, sampler, calibration, memory by class
    Info(VideoInfoArgs),
    /// Find the activation scales of the w8a8 path by running the real schedule, and store them in the artefact
    Calibrate(CalibrateArgs),
    /// Denoise one clip on one engine or two, cut anywhere; writes the latent after each step
    Denoise(DenoiseArgs),
    /// Measure what a block costs on each engine, alone and while the other runs, and the cut that follows
    Rates(RatesArgs),
    /// Make a clip of each prompt of a file through the two-engine pipeline, the decoder in it; resumable, with period, latency, idle
    Stream(StreamArgs),
    /// Encode prompts with a model's text encoder
    Encode(EncodeArgs),
    /// Decode a latent to a clip: a video file, an animation, pictures or tensors
    Decode(DecodeArgs),
    /// Make a clip from a prompt: text encoder, transformer on one engine or two, decoder
    Generate(GenerateArgs),
}

/// `trefoil video pack`.
#[derive(Debug, Args)]
pub struct VideoPackArgs {
    /// Model folder, checkpoint folder, .safetensors file or index
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Where to write the artefact
    #[arg(short, long, value_name = "A.trefoil")]
    pub output: PathBuf,
    /// The transformer's config.json, where it is not beside the weights
    #[arg(long, value_name = "CONFIG.json")]
    pub config: Option<PathBuf>,
    /// LoRA file whose factors become the adapter of a second expert (repeatable)
    #[arg(long = "lora", value_name = "LORA.safetensors")]
    pub adapters: Vec<PathBuf>,
    /// Sampler file: sigmas, timesteps, experts, solver (see the documentation); the model folder's own by default
    #[arg(long, value_name = "SAMPLER.json")]
    pub sampler: Option<PathBuf>,
    /// Refuse regions above this many bytes (see `trefoil probe`)
    #[arg(long, value_name = "BYTES")]
    pub region_limit: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil video info`.
#[derive(Debug, Args)]
pub struct VideoInfoArgs {
    /// Artefact
    #[arg(value_name = "A.trefoil")]
    pub artefact: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Noise and text of a clip.
#[derive(Debug, Args, Clone)]
pub struct ClipArgs {
    /// Starting latent [1, channels, frames, height, width]
    #[arg(long, value_name = "FILE.safetensors:KEY")]
    pub noise: TensorPath,
    /// Text states [1, rows, width], zero rows behind the prompt
    #[arg(long, value_name = "FILE.safetensors:KEY")]
    pub text: TensorPath,
    /// Text states of the branch without the prompt, where the sampler has guidance
    #[arg(long, value_name = "FILE.safetensors:KEY")]
    pub negative: Option<TensorPath>,
}

/// A second whole model as an expert.
#[derive(Debug, Args, Clone)]
pub struct SecondArgs {
    /// Artefact of a second whole model that is the expert for low noise (Wan2.2)
    #[arg(long, value_name = "B.trefoil", requires = "switch_timestep")]
    pub second: Option<PathBuf>,
    /// The second model acts where the timestep, truncated, is at most this
    #[arg(long, value_name = "T", requires = "second")]
    pub switch_timestep: Option<f64>,
}

/// `trefoil video calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Artefact
    #[arg(value_name = "A.trefoil")]
    pub artefact: PathBuf,
    /// Starting latent of each clip (repeatable; as many as texts, or one for all)
    #[arg(long, value_name = "FILE.safetensors:KEY", required = true)]
    pub noise: Vec<TensorPath>,
    /// Text states of each clip (repeatable)
    #[arg(long, value_name = "FILE.safetensors:KEY", required = true)]
    pub text: Vec<TensorPath>,
    /// Text states of the branch without the prompt, where the sampler has guidance
    #[arg(long, value_name = "FILE.safetensors:KEY")]
    pub negative: Option<TensorPath>,
    /// Cores to run on, like cpu@0-3
    #[arg(long, value_name = "ENGINE", default_value = "cpu")]
    pub engine: String,
    /// A second whole model; it gets its own scales in place
    #[command(flatten)]
    pub second: SecondArgs,
    /// Where to write the calibrated artefact; in place by default
    #[arg(short, long, value_name = "OUT.trefoil", conflicts_with = "second")]
    pub output: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Engines and what they compute in.
#[derive(Debug, Args, Clone)]
pub struct EngineArgs {
    /// One engine or two, in the order they take the trajectory, like cpu@0,cpu@1 or cpu@0,opencl@1 (opencl:0@1 on the first device of
    /// `trefoil probe`, opencl:NAME@1 on the one with NAME in its name); cpu@0=12.8ms is slowed to that per block (emulated)
    #[arg(long, value_name = "ENGINE[,ENGINE]", default_value = "cpu")]
    pub engines: EngineList,
    /// Numeric path: f32, w8a16 or w8a8; one for all engines or one each [default: w8a16, or w8a8 where an engine is opencl]
    #[arg(long, value_name = "PATH[,PATH]", value_delimiter = ',')]
    pub path: Vec<NumericPath>,
    /// Unquantised checkpoint for path f32; where the artefact was packed from by default
    #[arg(long, value_name = "MODEL", conflicts_with = "second")]
    pub checkpoint: Option<PathBuf>,
    /// A second whole model
    #[command(flatten)]
    pub second: SecondArgs,
}

/// `K` or `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutArg {
    /// From measured rates.
    Auto,
    /// First block execution of the second engine.
    At(usize),
}

impl FromStr for CutArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        text.parse().map(Self::At).map_err(|_| "write a number of block executions, or auto".to_owned())
    }
}

/// `trefoil video denoise`.
#[derive(Debug, Args)]
pub struct DenoiseArgs {
    /// Artefact
    #[arg(value_name = "A.trefoil")]
    pub artefact: PathBuf,
    /// The clip
    #[command(flatten)]
    pub clip: ClipArgs,
    /// Engines
    #[command(flatten)]
    pub engines: EngineArgs,
    /// First block execution of the second engine, 0 to steps × blocks; auto measures a few blocks first
    #[arg(long, value_name = "K|auto", default_value = "auto")]
    pub cut: CutArg,
    /// Run each engine in a process of its own; descriptors of weights and state are passed, never bytes
    #[arg(long)]
    pub processes: bool,
    /// Where to write the tensors latent.0, latent.1, …
    #[arg(short, long, value_name = "OUT.safetensors")]
    pub output: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil video rates`.
#[derive(Debug, Args)]
pub struct RatesArgs {
    /// Artefact
    #[arg(value_name = "A.trefoil")]
    pub artefact: PathBuf,
    /// Tokens of a clip; 1,560 is one latent frame of 832×480
    #[arg(long, value_name = "M", default_value_t = 1560)]
    pub tokens: usize,
    /// Text rows
    #[arg(long, value_name = "ROWS", default_value_t = 512)]
    pub text_rows: usize,
    /// Engines
    #[command(flatten)]
    pub engines: EngineArgs,
    /// Measure this decoder on either engine too, alone and while the other one runs blocks, and compare both orders of the engines:
    /// pipeline folder, VAE folder or file
    #[arg(long, value_name = "MODEL_DIR", conflicts_with = "decoder_ms")]
    pub decoder: Option<PathBuf>,
    /// What that decoder computes in: f32 or int8
    #[arg(long, value_name = "PATH", default_value_t = DecoderPath::F32, requires = "decoder")]
    pub vae_path: DecoderPath,
    /// Milliseconds of the decoder on the second engine, for the cut (declared, not measured)
    #[arg(long, value_name = "MS", default_value_t = 0.0, allow_negative_numbers = true)]
    pub decoder_ms: f64,
    /// Block executions timed per engine and condition
    #[arg(long, default_value_t = 10)]
    pub samples: usize,
    /// Measure each engine in a process of its own, as `stream --processes` runs it
    #[arg(long)]
    pub processes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil bench video`.
#[derive(Debug, Args)]
pub struct BenchVideoArgs {
    /// Artefact; a model with random weights where there is none
    #[arg(long, value_name = "A.trefoil")]
    pub artefact: Option<PathBuf>,
    /// Widths of the random model
    #[arg(long, value_enum, default_value_t = RandomModel::Small)]
    pub model: RandomModel,
    /// Blocks of the random model, which takes six steps
    #[arg(long, default_value_t = 2)]
    pub layers: usize,
    /// Tokens of a clip
    #[arg(long, value_name = "M", default_value_t = 256)]
    pub tokens: usize,
    /// Text rows
    #[arg(long, value_name = "ROWS", default_value_t = 64)]
    pub text_rows: usize,
    /// Two engines, like cpu@0,cpu@1 or cpu@0,opencl@1; the CPU engine on the first two cores by default. Shaped ones, like cpu@0=12.6:12.8ms (alone, with the other), are
    /// slowed to stand in for other hardware (emulated)
    #[arg(long, value_name = "ENGINE,ENGINE")]
    pub engines: Option<EngineList>,
    /// Numeric path: one for both engines or one each
    #[arg(long, value_name = "PATH[,PATH]", default_value = "w8a8", value_delimiter = ',')]
    pub path: Vec<NumericPath>,
    /// End every clip with the VAE decoder of the released widths (random weights) on a latent of this size, frames,height,width
    #[arg(long, value_name = "F,H,W", conflicts_with_all = ["decoder_ms", "decoder_solo_ms"])]
    pub decode: Option<LatentArg>,
    /// Stand-in for the decoder: the engine that ends a clip waits this long (emulated)
    #[arg(long, value_name = "MS", default_value_t = 0.0, allow_negative_numbers = true)]
    pub decoder_ms: f64,
    /// The same where one engine runs alone; as --decoder-ms by default
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub decoder_solo_ms: Option<f64>,
    /// With shaped engines: what a block takes that both compute together, column by column (emulated); left out without it
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub hetero_tensor_ms: Option<f64>,
    /// Run each engine in a process of its own; the table of weights then has all their pages
    #[arg(long)]
    pub processes: bool,
    /// Clips of each configuration in a round
    #[arg(long, default_value_t = 4)]
    pub clips: usize,
    /// Rounds; configurations take turns
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Widths of a random model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RandomModel {
    /// Width 128
    Small,
    /// Width 1536, feed-forward 8960, rank 128: the blocks of DCM-Wan2.1-1.3B
    #[value(name = "wan-1.3b")]
    Wan13b,
}

/// `F,H,W`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentArg(pub [usize; 3]);

impl FromStr for LatentArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sides: Result<Vec<usize>, _> = text.split([',', 'x']).map(|side| side.trim().parse()).collect();
        match sides.ok().and_then(|sides| <[usize; 3]>::try_from(sides).ok()) {
            Some(sides) if sides.iter().all(|side| (1..=4096).contains(side)) => Ok(Self(sides)),
            _ => Err("write frames,height,width of the latent, like 5,8,8".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_and_latents_parse() {
        assert_eq!(("auto".parse(), "12".parse()), (Ok(CutArg::Auto), Ok(CutArg::At(12))));
        assert!("-1".parse::<CutArg>().is_err());
        assert_eq!("5,8,8".parse(), Ok(LatentArg([5, 8, 8])));
        assert!("5,8".parse::<LatentArg>().is_err() && "0,8,8".parse::<LatentArg>().is_err());
    }
}
