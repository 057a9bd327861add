//! `trefoil emulate`.

use super::{GranularityArg, Shape};
use clap::Args;
use std::path::PathBuf;
use trefoil_core::UnitAddress;

/// `trefoil emulate`.
#[derive(Debug, Args)]
pub struct EmulateArgs {
    /// ONNX models; several are executed at once
    #[arg(value_name = "MODEL.onnx", required = true)]
    pub models: Vec<PathBuf>,
    /// The machine to stand in for, like sim:lunar-lake
    #[arg(long, value_name = "sim:SOC", default_value = "sim:lunar-lake")]
    pub on: String,
    /// Static shape of an input whose extents are symbolic, for every model that has it; `MODEL/INPUT=1,3,48,320` for one model
    /// only, by the name of its file without .onnx (repeatable)
    #[arg(long = "shape", value_name = "INPUT=1,3,224,224")]
    pub shapes: Vec<Shape>,
    /// How nodes are grouped into operators
    #[arg(long, value_enum, default_value_t = GranularityArg::Fused)]
    pub granularity: GranularityArg,
    /// Use only these units of the machine (repeatable; all by default)
    #[arg(short, long = "unit", value_name = "UNIT")]
    pub units: Vec<UnitAddress>,
    /// Planners to compare (repeatable; by default BIDENT's and ours)
    #[arg(long = "method", value_name = "NAME")]
    pub methods: Vec<String>,
    /// Real units that compute (repeatable; by default one backend that is here, on each core)
    #[arg(long = "carrier", value_name = "UNIT")]
    pub carriers: Vec<UnitAddress>,
    /// Emulated milliseconds per described one; by default as small as the carriers allow
    #[arg(long, value_name = "FACTOR", value_parser = super::above_zero, allow_negative_numbers = true)]
    pub scale: Option<f64>,
    /// Rounds, in each of which every plan is executed once
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Folder for prepared models
    #[arg(long, value_name = "DIR", env = "TREFOIL_CACHE", hide_env_values = true)]
    pub cache: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
