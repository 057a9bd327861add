//! The `w8a8` kernels for OpenCL devices: the same operators on the same bytes, with the same bits as the CPU's; and the f32
//! and INT8 operators of the video decoder ([`Frame`], [`ConvWeights`], [`Int8ConvWeights`]), of which f32 is held to an error bound.
//!
//! The library is loaded when it is first used; a machine without it gets [`OpenClError::Library`]. [`Device::list`] shows
//! what there is, [`Device::open`] takes one by number, [`Kernels`] has the operators of [`crate::Kernels`]. Memory is the
//! host's: [`Buffer`] shares it with the device at the same address, and [`Kernels::share`] takes a weight region as it lies.
//!
//! # One result
//! The sources in `cl/` are the formulas of the CPU kernels, one IEEE operation at a time: contraction is off, there is no
//! division and no library function. [`Kernels::new`] runs a check of the device's arithmetic and refuses one that contracts,
//! flushes subnormal numbers or rounds otherwise.
//!
//! # Time of a dispatch
//! Mobile drivers kill work that takes too long. No dispatch has more than [`DISPATCH_MULTIPLY_ADDS`] multiply-adds (but for a
//! single item of the grid) or [`DISPATCH_ELEMENTS`] elements, and each is sent on its own. Attention is fused where a
//! work-item is a thread of a CPU, and de-fused where it is a lane of a GPU: scores, softmax and values of [`QUERY_BLOCK`] queries at a time.

mod attention;
pub mod bench;
mod buffer;
mod call;
mod conv;
mod cores;
mod device;
mod error;
mod fused;
mod gemm;
mod kernels;
mod probe;
mod program;
mod rows;
mod variant;

pub use attention::{AttentionSink, PackedKeyValue, QUERY_BLOCK};
pub use buffer::{Buffer, Element, HostMemory, Reading, Rows, RowsMut, Vector, Writing};
pub use call::{DISPATCH_ELEMENTS, DISPATCH_MULTIPLY_ADDS};
pub use conv::{CodeFrame, ConvSink, ConvWeights, Frame, Int8ConvWeights};
pub use device::{Device, DeviceInfo, DeviceKind};
pub use error::OpenClError;
pub use gemm::{ActivationScale, Adapter, Codes, Epilogue, GemmSink, Tiled};
pub use kernels::Kernels;
pub use probe::DeviceProbe;
pub use program::ProgramOrigin;
pub use rows::{Modulation, RotaryTable, RowSink};
pub use variant::Variant;
