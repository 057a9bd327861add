//! The command line: one definition of each command and flag.

mod emulate;
mod planning;
mod together;
mod video;
mod weights;

pub use emulate::EmulateArgs;
pub use planning::{
    BenchPlanArgs, ExplainArgs, ObjectiveArg, PaperArg, PaperArgs, PipelineArgs, PlanArgs, PlanningArgs, now_ms,
};
pub use together::{BenchCorunArgs, BenchMethodsArgs, BenchPairsArgs, TogetherArgs};
pub use video::{
    BenchVideoArgs, CalibrateArgs, CutArg, DenoiseArgs, EngineArgs, LatentArg, RandomModel, RatesArgs, SecondArgs,
    VideoArgs, VideoCommand, VideoInfoArgs, VideoPackArgs,
};
pub use weights::{WeightsArgs, WeightsCommand};

use crate::commands::video::{decoder::BenchDecoderArgs, quality::BenchQualityArgs};
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;
use trefoil_core::{Granularity, Quantity, UnitAddress};

/// Runs neural networks across CPU, GPU and NPU of one shared-memory machine: measures every operator on every unit, finds
/// the best placement, proves how good it is, runs it, and shows it.
#[derive(Debug, Parser)]
#[command(
    name = "trefoil",
    version,
    max_term_width = 110,
    after_help = "\
Exit codes: 0 done · 1 something failed while running · 2 bad input or usage · 3 --verify found a difference · \
4 --strict found something that did not run where it was asked · 130 interrupted"
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the units of this machine: available or not, why not, and what would fix it
    Units(UnitsArgs),
    /// List a model's operators, with sizes and how many are distinct
    Inspect(InspectArgs),
    /// Measure every distinct operator of a model on units, then whole segments until the best plan is all measured
    Profile(ProfileArgs),
    /// Find the best placement from a profile; or of several models at once, or ask what if
    Plan(PlanArgs),
    /// Cut a stream of videos between two engines from three rates, or divide any stream over any units
    Pipeline(PipelineArgs),
    /// Recompute what a paper's published numbers give, and print both side by side
    Paper(PaperArgs),
    /// Measure (or reuse what was measured), plan, compare with every single unit in fresh processes, run the winner
    Run(RunArgs),
    /// Say why an operator is where it is, and what the next-best unit would cost
    Explain(ExplainArgs),
    /// Measure, plan and run several models; one table and one report
    Survey(SurveyArgs),
    /// Execute plans for a described machine here, with real bytes, on real units slowed to its rates
    Emulate(EmulateArgs),
    /// Benchmarks
    Bench(BenchArgs),
    /// Pack, describe and check INT8 weights that several engines share
    Weights(WeightsArgs),
    /// Serve a video diffusion transformer (Wan2.1, DCM) on one engine or two from one weight copy
    Video(VideoArgs),
    /// Find the largest shared-memory region that each engine maps here
    Probe(ProbeArgs),
    /// Write a small model made by Trefoil itself (for trying things without any other file)
    MakeModel(MakeModelArgs),
    /// Measure in a process of its own (internal)
    #[command(hide = true)]
    Worker,
    /// Run a plan in a process of its own (internal)
    #[command(hide = true)]
    WorkerRun,
    /// Run several models in a process of its own (internal)
    #[command(hide = true)]
    WorkerTogether,
    /// Map one region in a process of its own (internal)
    #[command(hide = true)]
    ProbeChild,
    /// Run a video engine in a process of its own (internal)
    #[command(hide = true)]
    VideoWorker,
}

/// `trefoil units`.
#[derive(Debug, Args)]
pub struct UnitsArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Print nothing: exit 0 if UNIT is available, 1 if not
    #[arg(long, value_name = "UNIT")]
    pub quiet: Option<UnitAddress>,
}

/// A model and how to read it.
#[derive(Debug, Args, Clone)]
pub struct ModelArgs {
    /// ONNX model
    #[arg(value_name = "MODEL.onnx")]
    pub model: PathBuf,
    /// Static shape of an input whose extents are symbolic (repeatable). With several models it is for every one that has such an
    /// input; `MODEL/INPUT=1,3,48,320` is for one model, by the name of its file without .onnx
    #[arg(long = "shape", value_name = "INPUT=1,3,224,224")]
    pub shapes: Vec<Shape>,
    /// How nodes are grouped into operators
    #[arg(long, value_enum, default_value_t = GranularityArg::Fused)]
    pub granularity: GranularityArg,
    /// Input tensors: a .npz keyed by input names, a .npy for a single input, or `random`
    #[arg(long, value_name = "FILE|random", default_value = "random")]
    pub input: String,
    /// Folder for prepared models, measurements and compiled segments
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
}

/// `INPUT=1,3,224,224`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Input name.
    pub input: String,
    /// Extents.
    pub extents: Vec<u64>,
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // From the right: input names may hold `=`, shapes may not.
        let (input, extents) = text.rsplit_once('=').ok_or("write INPUT=1,3,224,224")?;
        let extents = match extents.trim() {
            "" => Vec::new(),
            list => list
                .split([',', 'x'])
                .map(|extent| {
                    extent.trim().parse().map_err(|_| format!("`{extent}` is no extent; extents are whole numbers"))
                })
                .collect::<Result<_, _>>()?,
        };
        Ok(Self { input: input.to_owned(), extents })
    }
}

/// [`Granularity`] as a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GranularityArg {
    /// A backend's own fused kernels
    Backend,
    /// Trefoil's fusion rules
    Fused,
    /// One operator per ONNX node
    Node,
}

impl From<GranularityArg> for Granularity {
    fn from(arg: GranularityArg) -> Self {
        match arg {
            GranularityArg::Backend => Self::Backend,
            GranularityArg::Fused => Self::Fused,
            GranularityArg::Node => Self::Node,
        }
    }
}

/// `trefoil inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Also write each operator as a stand-alone model into this folder (Netron opens them)
    #[arg(long, value_name = "DIR")]
    pub extract: Option<PathBuf>,
}

/// How to measure.
#[derive(Debug, Args, Clone)]
// Each is a flag of its own on the command line.
#[allow(clippy::struct_excessive_bools)]
pub struct MeasureArgs {
    /// Samples of each measurement
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Warm-up runs before the samples
    #[arg(long, default_value_t = 20)]
    pub warmup: u32,
    /// Most milliseconds to spend sampling one thing
    #[arg(long, default_value_t = 2000.0, value_name = "MS", value_parser = above_zero, allow_negative_numbers = true)]
    pub cap_ms: f64,
    /// A first look: fewer warm-ups and samples, a short cap
    #[arg(long)]
    pub quick: bool,
    /// Declared power where no sensor tells: `UNIT=WATTS` or `idle=WATTS` (repeatable)
    #[arg(long = "watts", value_name = "UNIT=WATTS")]
    pub watts: Vec<Watts>,
    /// Also measure how much disjoint units slow each other down
    #[arg(long)]
    pub corun: bool,
    /// Do not measure segments whole: the plan stays a proposal from isolated costs
    #[arg(long)]
    pub no_refine: bool,
    /// Most seconds to spend on refinement
    #[arg(
        long,
        default_value_t = 120.0,
        value_name = "SECONDS",
        value_parser = from_zero,
        allow_negative_numbers = true
    )]
    pub refine_budget: f64,
    /// Measure again even where the cache holds a measurement
    #[arg(long)]
    pub fresh: bool,
}

/// A flag's number from 0 on. `nan` and `inf` are numbers to Rust, but none to measure with.
pub fn from_zero(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    if number.is_finite() && number >= 0.0 { Ok(number) } else { Err(format!("{text} is no number from 0 on")) }
}

/// A flag's number above 0, see [`from_zero`].
pub fn above_zero(text: &str) -> Result<f64, String> {
    from_zero(text).and_then(|number| if number > 0.0 { Ok(number) } else { Err("0 is too little".to_owned()) })
}

/// `UNIT=WATTS`.
#[derive(Debug, Clone, PartialEq)]
pub struct Watts {
    /// Unit address or `idle`.
    pub unit: String,
    /// Watts.
    pub watts: f64,
}

impl FromStr for Watts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (unit, watts) = text.rsplit_once('=').ok_or("write UNIT=WATTS or idle=WATTS")?;
        if unit != "idle" {
            unit.parse::<UnitAddress>().map_err(|error| error.to_string())?;
        }
        let given = watts;
        let watts: f64 = given.parse().map_err(|_| format!("`{given}` is no number of watts"))?;
        if !Quantity::Power.holds(watts) {
            return Err(format!("`{given}` is no {}", Quantity::Power));
        }
        Ok(Self { unit: unit.to_owned(), watts })
    }
}

/// `trefoil profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArgs,
    /// Unit to measure on (repeatable)
    #[arg(short, long = "unit", required = true, value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// How to measure
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Where to write the profile
    #[arg(short, long, value_name = "PROFILE.json")]
    pub output: PathBuf,
    /// Print a JSON summary instead of tables
    #[arg(long)]
    pub json: bool,
}

/// `trefoil run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The model
    #[command(flatten)]
    pub model: ModelArgs,
    /// Further models: all run together, and the arrangement is compared with running them one after another, all at once and
    /// one per core. A CPU unit without cores then stands for its backend on any core and on all of them
    #[arg(value_name = "MORE.onnx")]
    pub more: Vec<PathBuf>,
    /// Several models: how they are run
    #[command(flatten)]
    pub together: TogetherArgs,
    /// Unit to use (repeatable)
    #[arg(short, long = "unit", value_name = "UNIT", required_unless_present_any = ["plan", "profile"])]
    pub units: Vec<UnitAddress>,
    /// How to measure
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// What to plan for
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// Use this profile instead of measuring
    #[arg(long, value_name = "PROFILE.json")]
    pub profile: Option<PathBuf>,
    /// Use this plan instead of planning
    #[arg(long, value_name = "PLAN.json")]
    pub plan: Option<PathBuf>,
    /// What to show and check
    #[command(flatten)]
    pub show: ShowArgs,
    /// Write the outputs, keyed by output names
    #[arg(long, value_name = "OUT.npz")]
    pub output: Option<PathBuf>,
    /// Perfetto/Chrome trace with predicted and measured lanes
    #[arg(long, value_name = "TRACE.json")]
    pub trace: Option<PathBuf>,
}

/// What to show and check after running.
#[derive(Debug, Args, Clone)]
pub struct ShowArgs {
    /// Rounds of fresh processes in which the plan and every single unit are timed, interleaved; up to three times as many
    /// where a plan leads and these are too few to be sure
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Compare with a single-unit run at every segment boundary and name the first operator that differs
    #[arg(long)]
    pub verify: bool,
    /// Make it an error when something did not run where it was asked
    #[arg(long)]
    pub strict: bool,
    /// Self-contained HTML report
    #[arg(long, value_name = "REPORT.html")]
    pub report: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil survey`.
#[derive(Debug, Args)]
pub struct SurveyArgs {
    /// A model with its settings (repeatable): `path=M.onnx[;name=N][;input=IN.npz][;output=OUT.npz][;expect=E.npz][;tolerance=1e-4]`,
    /// and `INPUT=1,3,224,224` for each symbolic input
    #[arg(long = "model", value_name = "SETTINGS")]
    pub models: Vec<String>,
    /// Models without settings
    #[arg(value_name = "MODEL.onnx")]
    pub paths: Vec<PathBuf>,
    /// Static shape of an input whose extents are symbolic, for every model that has it; `MODEL/INPUT=1,3,48,320` for one model
    /// only, by the name of its file without .onnx (repeatable). Settings of a model win
    #[arg(long = "shape", value_name = "INPUT=1,3,224,224")]
    pub shapes: Vec<Shape>,
    /// Unit to use (repeatable)
    #[arg(short, long = "unit", required = true, value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// How nodes are grouped into operators
    #[arg(long, value_enum, default_value_t = GranularityArg::Fused)]
    pub granularity: GranularityArg,
    /// Folder for prepared models, measurements and compiled segments
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// How to measure
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// What to plan for
    #[command(flatten)]
    pub planning: PlanningArgs,
    /// What to show and check
    #[command(flatten)]
    pub show: ShowArgs,
    /// Print the summary table as Markdown
    #[arg(long)]
    pub markdown: bool,
}

/// `trefoil bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Which
    #[command(subcommand)]
    pub bench: BenchCommand,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// BIDENT's Observations 1 and 2 on the units present: seven operators, and a MatMul size sweep with its crossovers
    Operators(BenchOperatorsArgs),
    /// A video model on two engines: every configuration in turn, the cut's prediction beside what came of it
    Video(BenchVideoArgs),
    /// Planning itself: distance to the optimum or to a lower bound over generated graphs (or given profiles), and speed
    Plan(BenchPlanArgs),
    /// Every pair of models together: predicted and measured speed-up over the best of running them one after another, both at
    /// once and one per core, beside the cap of the pair
    Pairs(BenchPairsArgs),
    /// Quality of the clips on each numeric path and for cuts between two paths: what a reader of the frames sees, and how close they
    /// are to f32
    Quality(BenchQualityArgs),
    /// Seconds per latent frame and peak memory of the VAE decoder on one core and on all, in tiles and not, beside diffusers'
    Decoder(BenchDecoderArgs),
    /// BIDENT's Observation 3 on the units present: three pairs of operators (or pairs of models) on every two units that can
    /// work at once, how much each slows the other, and the speed-up over one after the other on the best unit
    Corun(BenchCorunArgs),
    /// One model on several units by each planner (predicted and measured), against every backend with all cores
    Methods(BenchMethodsArgs),
    /// The kernels of the video path against the peak of their instructions, OpenCL and other libraries, on one core
    Kernels(BenchKernelsArgs),
}

/// `trefoil bench kernels`.
#[derive(Debug, Args)]
pub struct BenchKernelsArgs {
    /// Small products only (240 rows)
    #[arg(long)]
    pub quick: bool,
    /// Calls timed per engine and shape
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub samples: u16,
    /// Core to run on (the first one by default)
    #[arg(long)]
    pub core: Option<u32>,
    /// OpenCL device to run on
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub opencl: usize,
    /// Leave other libraries out
    #[arg(long)]
    pub no_peers: bool,
    /// Folder for caches
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil bench operators`.
#[derive(Debug, Args)]
pub struct BenchOperatorsArgs {
    /// Unit to measure (repeatable; every available one by default)
    #[arg(short, long = "unit", value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// How to measure
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Folder for caches
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Largest N of the MatMul sweep
    #[arg(long, default_value_t = 2048)]
    pub max_size: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil probe`.
#[derive(Debug, Args)]
pub struct ProbeArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil make-model`.
#[derive(Debug, Args)]
pub struct MakeModelArgs {
    /// Where to write it
    #[arg(value_name = "OUT.onnx")]
    pub output: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn shapes_and_watts_parse() {
        let shape: Shape = "x:0=1,3,48,320".parse().unwrap();
        assert_eq!((shape.input.as_str(), shape.extents.as_slice()), ("x:0", [1, 3, 48, 320].as_slice()));
        assert_eq!("s=".parse::<Shape>().unwrap().extents, Vec::<u64>::new());
        assert!("x".parse::<Shape>().is_err() && "x=1,a".parse::<Shape>().is_err());
        for odd in ["idle=1e308", "idle=-1", "idle=nan", "ort:CPU=1e-300"] {
            assert!(odd.parse::<Watts>().unwrap_err().contains("is no power (0, or from 1e-9 to 1e9 W)"), "{odd}");
        }
        assert_eq!("ort:CPU@0=7.5".parse::<Watts>().unwrap().watts.to_bits(), 7.5f64.to_bits());
        assert!("ort=3".parse::<Watts>().is_err() && "idle=-1".parse::<Watts>().is_err());
    }

    #[test]
    fn numbers_are_ones_to_measure_with() {
        assert_eq!((from_zero("0"), above_zero("2.5")), (Ok(0.0), Ok(2.5)));
        for text in ["nan", "inf", "-inf", "-1", "1s", ""] {
            assert!(from_zero(text).is_err() && above_zero(text).is_err(), "{text}");
        }
        assert!(above_zero("0").is_err());
    }
}
