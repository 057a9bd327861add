//! Element types at the ports: what rten reads in place, what is converted, what is refused.

use crate::PortMemory;
use half::f16;
use rten::{Value, ValueType, ValueView};
use rten_tensor::prelude::*;
use trefoil_core::{DataType, TensorInfo};

/// rten's element type for an ONNX type, `None` for types it has no tensors of.
pub(super) fn rten_type(dtype: DataType) -> Option<rten::DataType> {
    match dtype {
        DataType::F32 | DataType::F16 | DataType::F64 => Some(rten::DataType::Float),
        DataType::I32 | DataType::I64 | DataType::Bool => Some(rten::DataType::Int32),
        DataType::I8 => Some(rten::DataType::Int8),
        DataType::U8 => Some(rten::DataType::UInt8),
        DataType::BF16 | DataType::I16 | DataType::U16 | DataType::U32 | DataType::U64 | DataType::Opaque => None,
    }
}

/// Whether an input of this type is read where it lies.
pub(super) fn input_memory(dtype: DataType) -> PortMemory {
    match dtype {
        DataType::F32 | DataType::I32 | DataType::I8 | DataType::U8 => PortMemory::Caller,
        _ => PortMemory::Copied,
    }
}

/// Converted copy of an input that rten cannot read in place; allocated once, at bind.
#[derive(Debug)]
pub(super) enum Staging {
    /// Read in place.
    None,
    /// `f16` or `f64` as `f32`.
    Float(Vec<f32>),
    /// `i64` or `bool` as `i32`.
    Int(Vec<i32>),
}

impl Staging {
    /// Room for one input.
    pub(super) fn for_port(info: &TensorInfo) -> Self {
        let elements = info.elements() as usize;
        match info.dtype {
            DataType::F16 | DataType::F64 => Self::Float(vec![0.0; elements]),
            DataType::I64 | DataType::Bool => Self::Int(vec![0; elements]),
            _ => Self::None,
        }
    }

    /// Converts the caller's bytes.
    ///
    /// # Errors
    /// The reason, when an `i64` does not fit `i32`.
    pub(super) fn fill(&mut self, dtype: DataType, bytes: &[u8]) -> Result<(), String> {
        match (self, dtype) {
            (Self::Float(floats), DataType::F16) => {
                for (float, chunk) in floats.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *float = f16::from_ne_bytes(*chunk).to_f32();
                }
            }
            (Self::Float(floats), DataType::F64) => {
                for (float, chunk) in floats.iter_mut().zip(bytes.as_chunks::<8>().0) {
                    *float = f64::from_ne_bytes(*chunk) as f32;
                }
            }
            (Self::Int(ints), DataType::I64) => {
                for (position, (int, chunk)) in ints.iter_mut().zip(bytes.as_chunks::<8>().0).enumerate() {
                    let wide = i64::from_ne_bytes(*chunk);
                    *int = i32::try_from(wide)
                        .map_err(|_| format!("element {position} is {wide}, and rten computes i64 in i32"))?;
                }
            }
            (Self::Int(ints), DataType::Bool) => {
                for (int, byte) in ints.iter_mut().zip(bytes) {
                    *int = i32::from(*byte != 0);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A view of the input: of the converted copy, or of the caller's bytes.
    ///
    /// # Errors
    /// The reason, when bytes and shape do not belong together (excluded by the checks at bind).
    pub(super) fn view<'a>(
        &'a self,
        dtype: DataType,
        shape: &[usize],
        bytes: &'a [u8],
    ) -> Result<ValueView<'a>, String> {
        fn of<'a, T>(shape: &[usize], data: &'a [T]) -> Result<ValueView<'a>, String>
        where
            ValueView<'a>: From<rten_tensor::TensorView<'a, T>>,
        {
            ValueView::from_shape(shape, data).map_err(|error| error.to_string())
        }
        match (self, dtype) {
            (Self::Float(floats), _) => of(shape, floats.as_slice()),
            (Self::Int(ints), _) => of(shape, ints.as_slice()),
            (Self::None, DataType::F32) => of(shape, elements_of::<f32>(bytes)?),
            (Self::None, DataType::I32) => of(shape, elements_of::<i32>(bytes)?),
            (Self::None, DataType::I8) => of(shape, elements_of::<i8>(bytes)?),
            (Self::None, DataType::U8) => of(shape, bytes),
            (Self::None, other) => Err(format!("rten reads no {other} in place")),
        }
    }
}

/// Types of which every bit pattern is a value.
trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for i32 {}
impl Plain for i8 {}

/// The bytes as elements.
fn elements_of<T: Plain>(bytes: &[u8]) -> Result<&[T], String> {
    // SAFETY: every bit pattern is a valid `T` (the trait's contract), and `align_to` keeps length and alignment right.
    let (before, elements, after) = unsafe { bytes.align_to::<T>() };
    if before.is_empty() && after.is_empty() { Ok(elements) } else { Err("the buffer is not aligned".to_owned()) }
}

/// Copies one result into the caller's buffer, converting where rten's type differs from the port's.
///
/// # Errors
/// The reason, with both shapes or types, when the result is not what the port promises.
pub(super) fn copy_output(value: &Value, info: &TensorInfo, bytes: &mut [u8]) -> Result<(), String> {
    let shape = value.shape();
    if shape.len() != info.shape.len() || shape.iter().zip(&info.shape).any(|(have, want)| *have as u64 != *want) {
        return Err(format!("output `{}` came out as {:?}, expected {:?}", info.name, shape.as_slice(), info.shape));
    }
    match (value, info.dtype) {
        (Value::FloatTensor(tensor), DataType::F32) => store(tensor, bytes, |x| f32::to_ne_bytes(*x)),
        (Value::FloatTensor(tensor), DataType::F16) => store(tensor, bytes, |x| f16::from_f32(*x).to_ne_bytes()),
        (Value::FloatTensor(tensor), DataType::F64) => store(tensor, bytes, |x| f64::from(*x).to_ne_bytes()),
        (Value::Int32Tensor(tensor), DataType::I32) => store(tensor, bytes, |x| i32::to_ne_bytes(*x)),
        (Value::Int32Tensor(tensor), DataType::I64) => store(tensor, bytes, |x| i64::from(*x).to_ne_bytes()),
        (Value::Int32Tensor(tensor), DataType::Bool) => store(tensor, bytes, |x| [u8::from(*x != 0)]),
        (Value::Int8Tensor(tensor), DataType::I8) => store(tensor, bytes, |x| i8::to_ne_bytes(*x)),
        (Value::UInt8Tensor(tensor), DataType::U8) => store(tensor, bytes, |x| [*x]),
        (other, want) => {
            let have = match other.dtype() {
                ValueType::Tensor(dtype) => dtype.to_string(),
                odd => odd.to_string(),
            };
            return Err(format!("output `{}` came out as {have}, expected {want}", info.name));
        }
    }
    Ok(())
}

/// Writes elements in row-major order. For a contiguous tensor whose conversion is the identity this is a `memcpy`.
fn store<T: Copy, const N: usize>(tensor: &rten_tensor::Tensor<T>, bytes: &mut [u8], convert: impl Fn(&T) -> [u8; N]) {
    let chunks = bytes.as_chunks_mut::<N>().0;
    if let Some(data) = tensor.data() {
        for (chunk, element) in chunks.iter_mut().zip(data) {
            *chunk = convert(element);
        }
    } else {
        for (chunk, element) in chunks.iter_mut().zip(tensor.iter()) {
            *chunk = convert(element);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rten_tensor::Tensor;

    #[test]
    fn i64_out_of_range_is_named() {
        let info = TensorInfo::new("x", DataType::I64, [2u64]);
        let mut staging = Staging::for_port(&info);
        let bytes: Vec<u8> = [7i64, -3_000_000_000].iter().flat_map(|x| x.to_ne_bytes()).collect();
        let reason = staging.fill(DataType::I64, &bytes).unwrap_err();
        assert!(reason.contains("element 1 is -3000000000"), "{reason}");
    }

    #[test]
    fn outputs_that_are_not_contiguous_come_out_row_major() {
        let mut tensor = Tensor::from_data(&[2, 3], vec![1i32, 2, 3, 4, 5, 6]);
        tensor.permute(&[1, 0]);
        let mut bytes = vec![0u8; 48];
        copy_output(&tensor.into(), &TensorInfo::new("y", DataType::I64, [3u64, 2]), &mut bytes).unwrap();
        let values: Vec<i64> = bytes.as_chunks::<8>().0.iter().map(|chunk| i64::from_ne_bytes(*chunk)).collect();
        assert_eq!(values, [1, 4, 2, 5, 3, 6]);
    }

    #[test]
    fn shapes_and_types_that_differ_are_errors_with_both() {
        let value: Value = Tensor::from_data(&[2], vec![1.0f32, 2.0]).into();
        let shape = copy_output(&value, &TensorInfo::new("y", DataType::F32, [2u64, 1]), &mut [0; 8]).unwrap_err();
        assert_eq!(shape, "output `y` came out as [2], expected [2, 1]");
        let dtype = copy_output(&value, &TensorInfo::new("y", DataType::I64, [2u64]), &mut [0; 16]).unwrap_err();
        assert_eq!(dtype, "output `y` came out as f32, expected i64");
    }
}
