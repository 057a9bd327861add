//! The ONNX message types.
//!
//! `onnx.rs` was generated from `onnx.proto` (ONNX 1.23, the `onnx.proto3`-free proto2 file) with `prost-build` 0.14 and
//! `protox` as the parser, with one setting: `.bytes([".onnx.TensorProto.raw_data"])`, so that tensor contents are slices
//! of the file's memory map instead of copies. It is checked in so that building Trefoil needs no protobuf compiler.

#![allow(missing_docs, clippy::all, clippy::pedantic, rustdoc::all)]

include!("onnx.rs");
