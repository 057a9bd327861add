//! Flags of `trefoil video stream`.

use crate::cli::{CutArg, EngineArgs, LatentArg};
use crate::commands::video::size::SizeArg;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use trefoil_video::text::TextPath;
use trefoil_video::vae::DecoderPath;

/// `trefoil video stream`.
#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub struct StreamArgs {
    /// Pipeline folder laid out like the public ones (transformer/, vae/ or vae_decoder/, text_encoder/, tokenizer/), for prompts; or
    /// an artefact, with --text
    #[arg(value_name = "MODEL_DIR|A.trefoil")]
    pub model: PathBuf,
    /// Prompts, one a line; empty lines and lines that begin with # are skipped
    #[arg(value_name = "PROMPTS.txt", conflicts_with = "text")]
    pub prompts: Option<PathBuf>,
    /// Text states instead of prompts: every tensor of the file is one, [1, rows, width] or [rows, width]; FILE.safetensors:KEY takes one
    #[arg(long, value_name = "FILE.safetensors[:KEY]")]
    pub text: Option<String>,
    /// What no clip should show, for samplers with guidance: words (nothing by default), or with --text FILE.safetensors:KEY
    #[arg(long, value_name = "TEXT")]
    pub negative: Option<String>,
    /// Clips to make; prompts are taken in order, from the start again where there are fewer [default: one of each]
    #[arg(long, value_name = "N")]
    pub count: Option<usize>,
    /// With --text: latent size of every clip, frames,height,width [default: 1,8,8]
    #[arg(long, value_name = "F,H,W", conflicts_with = "prompts")]
    pub latent: Option<LatentArg>,
    /// Width and height in pixels [default: the model folder's, else 832x480]
    #[arg(long, value_name = "WxH", conflicts_with = "text")]
    pub size: Option<SizeArg>,
    /// Frames, one more than a multiple of four [default: the model folder's, else 81]
    #[arg(long, conflicts_with = "text")]
    pub frames: Option<usize>,
    /// Frames a second [default: the model folder's, else 16]
    #[arg(long)]
    pub fps: Option<u32>,
    /// Seed of the first clip's noise (PyTorch's CPU generator); each further clip has the next [default: 0; 40 with --text]
    #[arg(long)]
    pub seed: Option<u32>,
    /// Engines
    #[command(flatten)]
    pub engines: EngineArgs,
    /// First block execution of the second engine; auto measures both engines and the decoder while both run
    #[arg(long, value_name = "K|auto", default_value = "auto")]
    pub cut: CutArg,
    /// Which engine ends a clip: the last one of --engines, or, with --cut auto, whichever gives the shorter period when both have
    /// decoded
    #[arg(long, value_enum, default_value_t = OrderArg::Given)]
    pub order: OrderArg,
    /// Cut each clip anew from the rates observed so far
    #[arg(long)]
    pub online: bool,
    /// Run each engine in a process of its own; one that is killed is started again, with the same result
    #[arg(long)]
    pub processes: bool,
    /// With --text: pipeline folder, VAE folder or file whose decoder is the last stage
    #[arg(long, value_name = "MODEL_DIR", requires = "text", conflicts_with = "decoder_ms")]
    pub decoder: Option<PathBuf>,
    /// What the text encoder's matrices are: f32, or int8, packed into the cache on first use
    #[arg(long, value_name = "PATH", default_value_t = TextPath::F32, conflicts_with = "text")]
    pub text_path: TextPath,
    /// What the decoder computes in: f32, or int8 for less memory and time
    #[arg(long, value_name = "PATH", default_value_t = DecoderPath::F32)]
    pub vae_path: DecoderPath,
    /// Stand-in for the decoder where latents are written: keep the second engine's cores waiting this long per clip (emulated)
    #[arg(long, value_name = "MS", default_value_t = 0.0, allow_negative_numbers = true)]
    pub decoder_ms: f64,
    /// Folder for the clips, their contact sheet and job.json; the same command again makes the clips that are missing
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// How clips are written [default: mp4; latents without a decoder]
    #[arg(long, value_enum)]
    pub format: Option<StreamFormat>,
    /// Packed transformer of the folder; packed into the cache on first use by default
    #[arg(long, value_name = "A.trefoil", conflicts_with = "text")]
    pub artefact: Option<PathBuf>,
    /// Perfetto/Chrome trace with a lane per engine
    #[arg(long, value_name = "TRACE.json")]
    pub trace: Option<PathBuf>,
    /// Also run each engine alone, one engine on the cores of both, and data-parallel, over the same clips: what is best, and clips per
    /// hour within deadlines
    #[arg(long)]
    pub baselines: bool,
    /// Folder for packed models
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Order of the engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OrderArg {
    /// As they were named
    Given,
    /// The better one by measured rates
    Auto,
}

/// How the clips of a stream are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StreamFormat {
    /// AV1 in MP4
    Mp4,
    /// Animated PNG
    Png,
    /// Animated WebP
    Webp,
    /// Animated GIF
    Gif,
    /// A folder of PNG pictures
    Frames,
    /// The latent, not decoded
    Latents,
}

impl StreamFormat {
    /// Its name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mp4 => "mp4",
            Self::Png => "png",
            Self::Webp => "webp",
            Self::Gif => "gif",
            Self::Frames => "frames",
            Self::Latents => "latents",
        }
    }

    /// A clip's file name; folders have no extension.
    pub fn file(self, stem: &str) -> String {
        match self {
            Self::Frames => stem.to_owned(),
            Self::Latents => format!("{stem}.safetensors"),
            other => format!("{stem}.{}", other.as_str()),
        }
    }
}
