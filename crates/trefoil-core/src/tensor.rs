//! Element types, tensor descriptions and host tensors with aligned storage.

use crate::CoreError;
use serde::{Deserialize, Serialize};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;

/// Element type of a tensor. Names follow Rust; the ONNX number is [`DataType::onnx_code`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // each variant is the type it names
pub enum DataType {
    F32,
    F64,
    F16,
    BF16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
    /// Anything Trefoil cannot move between units: strings, sequences, optionals, 4-bit and 8-bit floats.
    Opaque,
}

impl DataType {
    /// From `TensorProto.DataType`; types without a byte layout of their own map to [`DataType::Opaque`].
    pub fn from_onnx(code: i32) -> Self {
        match code {
            1 => Self::F32,
            2 => Self::U8,
            3 => Self::I8,
            4 => Self::U16,
            5 => Self::I16,
            6 => Self::I32,
            7 => Self::I64,
            9 => Self::Bool,
            10 => Self::F16,
            11 => Self::F64,
            12 => Self::U32,
            13 => Self::U64,
            16 => Self::BF16,
            _ => Self::Opaque,
        }
    }

    /// The `TensorProto.DataType` number; 0 (undefined) for [`DataType::Opaque`].
    pub fn onnx_code(self) -> i32 {
        match self {
            Self::F32 => 1,
            Self::U8 => 2,
            Self::I8 => 3,
            Self::U16 => 4,
            Self::I16 => 5,
            Self::I32 => 6,
            Self::I64 => 7,
            Self::Bool => 9,
            Self::F16 => 10,
            Self::F64 => 11,
            Self::U32 => 12,
            Self::U64 => 13,
            Self::BF16 => 16,
            Self::Opaque => 0,
        }
    }

    /// Bytes of one element; 0 for [`DataType::Opaque`].
    pub fn size(self) -> u64 {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
            Self::Opaque => 0,
        }
    }

    /// Whether values of this type are compared with a tolerance rather than exactly.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::BF16)
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::Bool => "bool",
            Self::Opaque => "opaque",
        })
    }
}

/// Name, element type and static shape of a tensor. Row-major, no strides.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorInfo {
    /// Name in the model.
    pub name: String,
    /// Element type.
    pub dtype: DataType,
    /// Extents, outermost first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// A description from its parts.
    pub fn new(name: impl Into<String>, dtype: DataType, shape: impl Into<Vec<u64>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }

    /// Number of elements (1 for a scalar, 0 if any extent is 0); saturates instead of overflowing.
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1u64, |product, &extent| product.saturating_mul(extent))
    }

    /// Bytes of the dense row-major tensor; saturates instead of overflowing.
    pub fn bytes(&self) -> u64 {
        self.elements().saturating_mul(self.dtype.size())
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{:?}", self.name, self.dtype, self.shape)
    }
}

/// Alignment of every buffer that Trefoil allocates for tensors, in bytes (an AVX-512 cache line; OpenCL wants 128).
pub const TENSOR_ALIGNMENT: usize = 128;

/// A zero-initialised heap buffer of fixed length, aligned to [`TENSOR_ALIGNMENT`]. Not `Clone`: a copy of a tensor
/// is asked for by name ([`HostTensor::duplicate`]).
pub struct AlignedBytes {
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: the buffer is owned uniquely by this value and has no thread affinity.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access is read-only through `&self`.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `length` zeroed bytes.
    pub fn zeroed(length: usize) -> Self {
        if length == 0 {
            let dangling = std::ptr::without_provenance_mut(TENSOR_ALIGNMENT);
            return Self { pointer: NonNull::new(dangling).expect("alignment is not zero"), length };
        }
        let layout = Self::layout(length);
        // SAFETY: the layout has a non-zero size.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(pointer) = NonNull::new(raw) else { handle_alloc_error(layout) };
        Self { pointer, length }
    }

    fn layout(length: usize) -> Layout {
        Layout::from_size_align(length, TENSOR_ALIGNMENT).expect("tensor length fits isize")
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `pointer` is valid for `length` initialised bytes (or dangling but aligned with length 0).
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.length) }
    }

    /// The bytes, writable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.length) }
    }

    /// Start address; valid for [`AlignedBytes::len`] bytes while this value lives.
    pub fn as_ptr(&self) -> *const u8 {
        self.pointer.as_ptr()
    }

    /// Start address for writing.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.length != 0 {
            // SAFETY: allocated in `zeroed` with the same layout, freed once.
            unsafe { dealloc(self.pointer.as_ptr(), Self::layout(self.length)) }
        }
    }
}

impl fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBytes({} bytes)", self.length)
    }
}

/// A dense row-major tensor in host memory, aligned to [`TENSOR_ALIGNMENT`].
#[derive(Debug)]
pub struct HostTensor {
    info: TensorInfo,
    data: AlignedBytes,
}

impl HostTensor {
    /// A zero tensor of the given description.
    pub fn zeros(info: TensorInfo) -> Self {
        let data = AlignedBytes::zeroed(info.bytes() as usize);
        Self { info, data }
    }

    /// Copies `bytes` (little-endian elements, row-major) into a new tensor.
    ///
    /// # Errors
    /// [`CoreError::TensorBytes`] if the length does not fit the description.
    pub fn from_bytes(info: TensorInfo, bytes: &[u8]) -> Result<Self, CoreError> {
        if info.bytes() != bytes.len() as u64 {
            return Err(CoreError::TensorBytes {
                name: info.name.clone(),
                dtype: info.dtype.to_string(),
                want: info.bytes(),
                shape: info.shape,
                have: bytes.len() as u64,
            });
        }
        let mut tensor = Self::zeros(info);
        tensor.data.as_mut_slice().copy_from_slice(bytes);
        Ok(tensor)
    }

    /// An `f32` tensor from values; panics in debug builds if the count does not fit the shape.
    pub fn from_f32(name: impl Into<String>, shape: impl Into<Vec<u64>>, values: &[f32]) -> Self {
        let info = TensorInfo::new(name, DataType::F32, shape);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::from_bytes(info, &bytes).expect("value count fits the shape")
    }

    /// A tensor of any element type from numbers, the counterpart of [`HostTensor::to_f64`]; floats are rounded to their type.
    /// `None` if the count does not fit the shape, or an integer type cannot hold a number exactly.
    #[allow(clippy::float_cmp)] // exactly kept, or not
    pub fn from_f64(info: TensorInfo, values: &[f64]) -> Option<Self> {
        if values.len() as u64 != info.elements() {
            return None;
        }
        let mut bytes = Vec::with_capacity(info.bytes() as usize);
        for &value in values {
            match info.dtype {
                DataType::F32 => bytes.extend((value as f32).to_le_bytes()),
                DataType::F64 => bytes.extend(value.to_le_bytes()),
                DataType::F16 => bytes.extend(half::f16::from_f64(value).to_le_bytes()),
                DataType::BF16 => bytes.extend(half::bf16::from_f64(value).to_le_bytes()),
                DataType::Opaque => return None,
                DataType::Bool if value != 0.0 && value != 1.0 => return None,
                integer => {
                    // Little-endian two's complement of 16 bytes: its first bytes are those of every narrower type.
                    let whole = value as i128;
                    let width = integer.size() as usize;
                    bytes.extend(&whole.to_le_bytes()[..width]);
                }
            }
        }
        let tensor = Self::from_bytes(info, &bytes).ok()?;
        let kept = |(back, value): (f64, &f64)| tensor.info.dtype.is_float() || back == *value;
        tensor.to_f64().into_iter().zip(values).all(kept).then_some(tensor)
    }

    /// An `i64` tensor from values; panics if the count does not fit the shape.
    pub fn from_i64(name: impl Into<String>, shape: impl Into<Vec<u64>>, values: &[i64]) -> Self {
        let info = TensorInfo::new(name, DataType::I64, shape);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::from_bytes(info, &bytes).expect("value count fits the shape")
    }

    /// The description.
    pub fn info(&self) -> &TensorInfo {
        &self.info
    }

    /// Renames the tensor.
    pub fn set_name(&mut self, name: impl Into<String>) {
        self.info.name = name.into();
    }

    /// The raw little-endian bytes.
    pub fn bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// The raw bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.data.as_mut_slice()
    }

    /// A copy in a new allocation.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        Self::from_bytes(self.info.clone(), self.bytes()).expect("own bytes fit own description")
    }

    /// The elements as `f64`, for comparison and display; empty for [`DataType::Opaque`].
    pub fn to_f64(&self) -> Vec<f64> {
        fn each<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.chunks_exact(N).map(|chunk| convert(chunk.try_into().expect("exact chunk"))).collect()
        }
        let bytes = self.bytes();
        match self.info.dtype {
            DataType::F32 => each(bytes, |b| f64::from(f32::from_le_bytes(b))),
            DataType::F64 => each(bytes, f64::from_le_bytes),
            DataType::F16 => each(bytes, |b| half::f16::from_le_bytes(b).to_f64()),
            DataType::BF16 => each(bytes, |b| half::bf16::from_le_bytes(b).to_f64()),
            DataType::I8 => each(bytes, |b: [u8; 1]| f64::from(b[0] as i8)),
            DataType::I16 => each(bytes, |b| f64::from(i16::from_le_bytes(b))),
            DataType::I32 => each(bytes, |b| f64::from(i32::from_le_bytes(b))),
            DataType::I64 => each(bytes, |b| i64::from_le_bytes(b) as f64),
            DataType::U8 => each(bytes, |b: [u8; 1]| f64::from(b[0])),
            DataType::U16 => each(bytes, |b| f64::from(u16::from_le_bytes(b))),
            DataType::U32 => each(bytes, |b| f64::from(u32::from_le_bytes(b))),
            DataType::U64 => each(bytes, |b| u64::from_le_bytes(b) as f64),
            DataType::Bool => each(bytes, |b: [u8; 1]| f64::from(u8::from(b[0] != 0))),
            DataType::Opaque => Vec::new(),
        }
    }

    /// Compares with a reference. The figure is `max |a − b| / (max |b| + 1e-9)` (relative to the reference's peak);
    /// infinite when shapes or types differ, or when one side is NaN or infinite where the other is not.
    pub fn error_to_peak(&self, reference: &Self) -> f64 {
        if self.info.shape != reference.info.shape || self.info.dtype != reference.info.dtype {
            return f64::INFINITY;
        }
        if self.bytes() == reference.bytes() {
            return 0.0;
        }
        let (mine, theirs) = (self.to_f64(), reference.to_f64());
        let peak = theirs.iter().filter(|value| value.is_finite()).fold(0.0f64, |peak, value| peak.max(value.abs()));
        let mut worst = 0.0f64;
        for (a, b) in mine.iter().zip(&theirs) {
            if a.is_finite() && b.is_finite() {
                worst = worst.max((a - b).abs());
            } else if !(a.is_nan() && b.is_nan() || a.total_cmp(b).is_eq()) {
                return f64::INFINITY;
            }
        }
        worst / (peak + 1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zeroed() {
        let tensor = HostTensor::zeros(TensorInfo::new("x", DataType::F32, [3u64, 5]));
        assert_eq!(tensor.bytes().len(), 60);
        assert_eq!(tensor.bytes().as_ptr() as usize % TENSOR_ALIGNMENT, 0);
        assert!(tensor.bytes().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn empty_and_scalar_shapes() {
        assert_eq!(TensorInfo::new("s", DataType::I64, []).bytes(), 8);
        let empty = HostTensor::zeros(TensorInfo::new("e", DataType::F32, [0u64, 4]));
        assert!(empty.bytes().is_empty());
    }

    #[test]
    fn wrong_length_names_the_tensor() {
        let error = HostTensor::from_bytes(TensorInfo::new("x", DataType::F32, [2u64]), &[0; 4]).unwrap_err();
        assert_eq!(error.to_string(), "tensor `x` of f32 [2] needs 8 bytes but has 4");
    }

    #[test]
    fn error_is_relative_to_the_peak_and_nan_aware() {
        let a = HostTensor::from_f32("a", [3u64], &[1.0, 2.0, 4.0]);
        let b = HostTensor::from_f32("b", [3u64], &[1.0, 2.2, 4.0]);
        assert!((a.error_to_peak(&b) - 0.05).abs() < 1e-6);
        let nan = HostTensor::from_f32("n", [3u64], &[1.0, f32::NAN, 4.0]);
        assert_eq!(a.error_to_peak(&nan), f64::INFINITY);
        assert_eq!(nan.error_to_peak(&nan), 0.0);
        let other_shape = HostTensor::from_f32("s", [1u64, 3], &[1.0, 2.0, 4.0]);
        assert_eq!(a.error_to_peak(&other_shape), f64::INFINITY);
    }

    #[test]
    fn numbers_become_tensors_of_any_type_that_holds_them() {
        for code in (1..=16).filter(|&code| DataType::from_onnx(code) != DataType::Opaque) {
            let info = TensorInfo::new("x", DataType::from_onnx(code), [2u64]);
            let tensor = HostTensor::from_f64(info.clone(), &[1.0, 0.0]).unwrap();
            assert_eq!(tensor.to_f64(), [1.0, 0.0], "{info}");
            assert!(HostTensor::from_f64(info, &[1.0]).is_none());
        }
        let of = |dtype: DataType, value: f64| HostTensor::from_f64(TensorInfo::new("x", dtype, [1u64]), &[value]);
        assert_eq!(of(DataType::I32, -7.0).unwrap().to_f64(), [-7.0]);
        assert!((of(DataType::F16, 0.1).unwrap().to_f64()[0] - 0.1).abs() < 1e-4);
        for (dtype, value) in [(DataType::I64, 0.5), (DataType::U8, -1.0), (DataType::U8, 256.0), (DataType::Bool, 2.0)]
        {
            assert!(of(dtype, value).is_none(), "{dtype} {value}");
        }
    }

    #[test]
    fn onnx_codes_round_trip() {
        for code in 1..=16 {
            let dtype = DataType::from_onnx(code);
            if dtype != DataType::Opaque {
                assert_eq!(dtype.onnx_code(), code);
            }
        }
    }
}
