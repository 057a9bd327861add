//! Flags of several models at once.

use super::planning::BudgetArg;
use super::{GranularityArg, MeasureArgs, Shape};
use clap::Args;
use std::path::PathBuf;
use trefoil_core::UnitAddress;

/// How several models run together.
#[derive(Debug, Args, Clone)]
pub struct TogetherArgs {
    /// Several models: how long the arrangement of choice is run in the end, and with `--rate` each round of the comparison
    #[arg(long, value_name = "TIME", default_value = "3s")]
    pub duration: BudgetArg,
    /// Several models: requests a second of each, in the order of the models, whether or not earlier ones are finished. Without
    /// it each round begins when the last one has ended
    #[arg(long = "rate", value_name = "HZ,HZ…", value_delimiter = ',', allow_hyphen_values = true)]
    pub rates: Vec<f64>,
    /// Several models with `--rate`: milliseconds from arrival in which a response is in time; one for all, or one per model
    #[arg(
        long = "deadline-ms",
        value_name = "MS,MS…",
        value_delimiter = ',',
        requires = "rates",
        allow_hyphen_values = true
    )]
    pub deadlines_ms: Vec<f64>,
    /// Several models with `--rate`: whose requests go first (higher), one per model
    #[arg(
        long = "priority",
        value_name = "N,N…",
        value_delimiter = ',',
        requires = "rates",
        allow_hyphen_values = true
    )]
    pub priorities: Vec<i32>,
    /// Several models without `--rate`: inferences of each model in a round. With more than one, cores are easier to keep busy
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub items: u32,
    /// While the arrangement of choice runs in the end, watch the time of every segment; when a unit becomes slow or fails, plan
    /// anew between two rounds and go on with that. Also for one model; not with `--rate`
    #[arg(long, conflicts_with = "rates")]
    pub adapt: bool,
}

/// `trefoil bench pairs`.
#[derive(Debug, Args)]
pub struct BenchPairsArgs {
    /// Models, at least two
    #[arg(value_name = "MODEL.onnx", required = true, num_args = 2..)]
    pub models: Vec<PathBuf>,
    /// Unit to use (repeatable); without cores it stands for its backend on any core and on all of them
    #[arg(short, long = "unit", required = true, value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// Static shape of an input whose extents are symbolic, for every model that has it; `MODEL/INPUT=1,3,48,320` for one model
    /// only, by the name of its file without .onnx (repeatable)
    #[arg(long = "shape", value_name = "INPUT=1,3,224,224")]
    pub shapes: Vec<Shape>,
    /// How nodes are grouped into operators
    #[arg(long, value_enum, default_value_t = GranularityArg::Fused)]
    pub granularity: GranularityArg,
    /// How to measure
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Inferences of each model in a round
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub items: u32,
    /// Rounds of fresh processes in which the arrangements of a pair are timed, interleaved. What takes 15 % more than the
    /// round's best baseline in each of the first two is left out of the others
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Most milliseconds to time an arrangement in one process, or a segment; at least three rounds of it are run
    #[arg(long, default_value_t = 500.0, value_name = "MS", allow_negative_numbers = true)]
    pub pair_ms: f64,
    /// Folder for prepared models, measurements and compiled segments
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Self-contained HTML page with the heat map; a .png and a .csv of the same name are written beside it, all after every pair
    #[arg(long, value_name = "REPORT.html")]
    pub report: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil bench corun`.
#[derive(Debug, Args)]
pub struct BenchCorunArgs {
    /// Models to pair instead of the paper's operators, at least two
    #[arg(value_name = "MODEL.onnx")]
    pub models: Vec<PathBuf>,
    /// Unit to use (repeatable; every available one by default); one without cores stands for its backend on any core, too
    #[arg(short, long = "unit", value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// Static shape of an input whose extents are symbolic, for every model that has it; `MODEL/INPUT=1,3,48,320` for one model
    /// only, by the name of its file without .onnx (repeatable)
    #[arg(long = "shape", value_name = "INPUT=1,3,224,224", requires = "models")]
    pub shapes: Vec<Shape>,
    /// How to measure
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Folder for prepared models, measurements and compiled segments
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Append the slowdown factors to this file, one measurement a line
    #[arg(short, long, value_name = "FILE.jsonl")]
    pub output: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `trefoil bench methods`.
#[derive(Debug, Args)]
pub struct BenchMethodsArgs {
    /// Models
    #[arg(value_name = "MODEL.onnx", required = true)]
    pub models: Vec<PathBuf>,
    /// Unit to use (repeatable); branches of a model run at once on units that share no core
    #[arg(short, long = "unit", required = true, value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// Planners (`trefoil plan --list-methods` lists all)
    #[arg(long, value_name = "METHOD,METHOD…", value_delimiter = ',', default_value = "sequential,phases,dag")]
    pub methods: Vec<String>,
    /// Static shape of an input whose extents are symbolic, for every model that has it; `MODEL/INPUT=1,3,48,320` for one model
    /// only, by the name of its file without .onnx (repeatable)
    #[arg(long = "shape", value_name = "INPUT=1,3,224,224")]
    pub shapes: Vec<Shape>,
    /// How nodes are grouped into operators
    #[arg(long, value_enum, default_value_t = GranularityArg::Fused)]
    pub granularity: GranularityArg,
    /// How to measure
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Rounds of fresh processes in which plans and baselines are timed, interleaved
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Folder for prepared models, measurements and compiled segments
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
