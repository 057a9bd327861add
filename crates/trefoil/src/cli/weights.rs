//! Flags of `trefoil weights`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `trefoil weights`.
#[derive(Debug, Args)]
pub struct WeightsArgs {
    /// What to do
    #[command(subcommand)]
    pub command: WeightsCommand,
}

/// The commands of `trefoil weights`.
#[derive(Debug, Subcommand)]
pub enum WeightsCommand {
    /// Quantise a safetensors checkpoint (a file, or a folder with an index) to INT8 tiles, one region per block
    Pack {
        /// Checkpoint
        #[arg(value_name = "MODEL.safetensors|DIR")]
        source: PathBuf,
        /// Where to write the artefact
        #[arg(short, long, value_name = "A.trefoil")]
        output: PathBuf,
        /// Refuse regions above this many bytes (see `trefoil probe`)
        #[arg(long, value_name = "BYTES")]
        region_limit: Option<u64>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Say what an artefact holds
    Info {
        /// Artefact
        #[arg(value_name = "A.trefoil")]
        artefact: PathBuf,
        /// List every tensor
        #[arg(long)]
        tensors: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Check every checksum of an artefact
    Verify {
        /// Artefact
        #[arg(value_name = "A.trefoil")]
        artefact: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}
