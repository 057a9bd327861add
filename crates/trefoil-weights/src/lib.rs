//! One stored copy of INT8 weights: quantisation, tile layout, artefact file, shared regions (HeteroVDiff 3.2, 4.2).
//!
//! [`pack()`] turns a checkpoint into an [`Artefact`]: base weights quantised per output column ([`mod@quantise`]) and laid out in
//! 32 × 32 tiles ([`tile`]) that every engine eats as they lie, one region per block, everything else beside them. A
//! [`Region`] is one block's bytes in memory that several engines and processes map at once ([`share`]), within limits that
//! [`probe()`] finds. [`memory`] checks what the kernel says about all this.

pub mod artefact;
pub mod checkpoint;
mod error;
pub mod files;
mod float;
pub mod memory;
pub mod pack;
pub mod probe;
pub mod quantise;
pub mod region;
pub mod rules;
pub mod shapes;
pub mod share;
pub mod tile;

pub use artefact::{
    Artefact, ArtefactWriter, Info, RegionView, SectionName, TensorClass, TensorRecord, TensorSpec, TensorView,
    TiledView, WriteSummary, render_info,
};
pub use error::WeightsError;
pub use float::FloatType;
pub use pack::{PackOptions, PackPlan, PackProgress, PackReport, pack};
pub use probe::{MapProbe, ProbeReport, probe, probe_child_main};
pub use region::{Region, RegionAccess, RegionKind};
pub use rules::RuleSet;

#[cfg(target_endian = "big")]
compile_error!("artefacts are mapped as they lie and are little-endian; this target is big-endian");
