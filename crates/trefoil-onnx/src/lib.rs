//! From an ONNX file to operators that can be placed, and back to files that backends compile.
//!
//! The pipeline:
//!
//! 1. [`Model::load`] reads and checks the file; weights stay memory-mapped.
//! 2. [`Model::fix_shapes`] makes every input shape static (`--shape name=1,3,224,224`).
//! 3. Somebody who has a backend runs [`Model::traced`] once on real data and hands the results over as [`Values`]. Where
//!    no single backend runs the whole model, [`Model::single_node`] gives it node by node.
//! 4. [`Prepared::new`] knows from it the shape of every value, folds what depends only on constants and static shapes, and drops
//!    what no output needs. [`Prepared::save`] keeps that, so that a second start needs no traced run.
//! 5. [`Prepared::operator_graph`] groups nodes into operators: a backend's own kernels, the fusion rules of [`rules`],
//!    or one operator per node.
//! 6. [`Prepared::extract`] writes any convex set of operators as a stand-alone ONNX file. All files in one folder
//!    share one copy of the weights.
//!
//! No backend is known here; nothing here computes.

mod analysis;
pub mod builder;
mod cache;
mod error;
mod external;
mod extract;
mod files;
mod flops;
mod fold;
mod fuse;
#[cfg(test)]
mod fuse_tests;
mod index;
mod model;
pub mod npz;
mod operators;
mod pattern;
mod port;
mod prepared;
#[doc(hidden)]
pub mod proto;
pub mod rules;
mod signature;
mod tensor;
#[doc(hidden)]
pub mod testing;
mod update;
mod values;
mod weights;

pub use error::OnnxError;
pub use extract::Extracted;
pub use model::Model;
pub use operators::KernelGroup;
pub use port::{Dim, ModelPort};
pub use prepared::Prepared;
pub use update::Update;
pub use values::Values;
