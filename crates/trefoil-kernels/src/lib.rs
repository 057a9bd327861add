//! Kernels of a diffusion transformer that eat the tile layout as it lies (HeteroVDiff 4.2, 4.4, appendix B).
//!
//! On the CPU, [`Kernels`] is an instruction set ([`Isa`]) and a set of cores ([`Pool`]); its methods are the operators of a block:
//!
//! | operator | method |
//! |---|---|
//! | INT8 GEMM with fused epilogue | [`Kernels::gemm_w8a8`] |
//! | the same with a norm of its rows while they are in the cache | [`Kernels::gemm_w8a8_norm`], [`Kernels::gemm_w8a8_then_norm`] |
//! | f32 GEMM on tiled INT8 or plain weights | [`Kernels::gemm_f32`] |
//! | INT8 attention | [`Kernels::pack_key_value`], [`Kernels::attention_w8a8`] |
//! | f32 attention | [`Kernels::attention_f32`] |
//! | convolution of video frames in f32 and INT8, norm over channels | [`Kernels::conv`], [`Kernels::conv_int8`], [`Kernels::pixel_norm`], [`Kernels::pixel_norm_codes`] |
//! | LayerNorm with modulation, RMSNorm with rotary positions, softmax, quantisation | [`Kernels::layer_norm`], [`Kernels::rms_norm`], [`Kernels::softmax`], [`Kernels::quantise`], … |
//!
//! The module `opencl` (feature `opencl`, on by default; nothing is linked) has the same operators for OpenCL devices. The
//! INT8 GEMM for Hexagon is C, in the folder `hexagon`.
//!
//! # One result
//! Integer products are exact. Everything else on the `w8a8` path is written once, in [`math`] and the generic row
//! functions, out of single IEEE-754 operations in a fixed order, and compiled for every instruction set: no contraction,
//! no reassociation, no library functions, no division on the device side. So every variant, any number of threads and any
//! cut give the same bits. The `f32` path may use fused multiply-add and is held to an error bound instead; with operands
//! rounded to FP16 its products are exact, so `w8a16` GEMM is bit-identical too.
//!
//! # Memory
//! No kernel keeps a converted copy of a weight. What a call needs beyond its arguments is in a [`Workspace`], which
//! grows on first use, is counted ([`Workspace::bytes`]) and then allocates nothing.

mod attention;
pub mod bench;
mod conv;
mod error;
mod gemm;
mod isa;
mod kernel;
mod kernels;
pub mod math;
mod multiversion;
#[cfg(feature = "opencl")]
pub mod opencl;
mod pool;
mod rotary;
mod rows;
mod transpose;
mod view;
mod workspace;

pub use attention::{AttentionScales, AttentionSink, KEY_BLOCK, PackedKeyValue};
pub use conv::{CodeFrame, ConvSink, ConvWeights, FilterShape, Frame, Int8ConvWeights};
pub use error::KernelError;
pub use gemm::{
    Activation, ActivationScale, Adapter, Codes, Epilogue, FloatAdapter, FloatEpilogue, FloatWeights, GemmSink,
    NormSink,
};
pub use isa::Isa;
pub use kernels::Kernels;
pub use pool::Pool;
pub use rotary::{RotaryTable, rotary_table};
pub use rows::{Modulation, Norm, Operands, RowSink};
pub use view::{Rows, RowsMut};
pub use workspace::Workspace;
