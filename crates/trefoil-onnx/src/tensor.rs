//! Constants: bringing every `TensorProto` into one form, and converting to and from host tensors.

use crate::OnnxError;
use crate::external::ExternalFiles;
use crate::proto::{SparseTensorProto, TensorProto};
use bytes::Bytes;
use sha2::{Digest, Sha256};
use std::fmt::Write;
use trefoil_core::{DataType, HostTensor, TensorInfo};

/// `TensorProto.DataType.STRING`.
pub(crate) const STRING: i32 = 8;

/// Bits of one element as `raw_data` packs it; `None` for strings and types whose packing this build does not know.
fn element_bits(data_type: i32) -> Option<u64> {
    Some(match data_type {
        // float8 variants, int8, uint8, bool, float8e8m0
        2 | 3 | 9 | 17..=20 | 24 => 8,
        4 | 5 | 10 | 16 => 16,
        1 | 6 | 12 => 32,
        7 | 11 | 13 | 14 => 64,
        15 => 128,
        21..=23 => 4,
        25 | 26 => 2,
        _ => return None,
    })
}

/// Shape as unsigned extents.
pub(crate) fn shape_of(tensor: &TensorProto) -> Vec<u64> {
    tensor.dims.iter().map(|&extent| extent.max(0) as u64).collect()
}

/// Name, type and shape of a constant.
pub(crate) fn info_of(tensor: &TensorProto) -> TensorInfo {
    TensorInfo::new(tensor.name(), DataType::from_onnx(tensor.data_type()), shape_of(tensor))
}

/// Name, type and (dense) shape of a sparse constant; it is named by its values.
pub(crate) fn sparse_info(sparse: &SparseTensorProto) -> TensorInfo {
    let (name, data_type) = sparse.values.as_ref().map_or(("", 0), |values| (values.name(), values.data_type()));
    let shape: Vec<u64> = sparse.dims.iter().map(|&extent| extent.max(0) as u64).collect();
    TensorInfo::new(name, DataType::from_onnx(data_type), shape)
}

/// Bytes of a constant's contents.
pub(crate) fn content_len(tensor: &TensorProto) -> u64 {
    tensor
        .raw_data
        .as_ref()
        .map_or_else(|| tensor.string_data.iter().map(|text| text.len() as u64).sum(), |raw| raw.len() as u64)
}

/// Brings a constant into the one form the rest of the crate knows: contents in `raw_data` (mapped, sliced from the
/// model file, or converted from the typed fields), length checked against type and shape. Strings stay in `string_data`.
pub(crate) fn normalise(tensor: &mut TensorProto, external: &mut ExternalFiles) -> Result<(), OnnxError> {
    let fail =
        |tensor: &TensorProto, reason: String| Err(OnnxError::Constant { tensor: tensor.name().to_owned(), reason });
    let data_type = tensor.data_type();
    if !(1..=28).contains(&data_type) {
        return fail(tensor, format!("element type {data_type} is not an ONNX type this Trefoil knows"));
    }
    if tensor.segment.is_some() {
        return fail(tensor, "is stored in segments, which no runtime supports".into());
    }
    let Some(elements) = tensor
        .dims
        .iter()
        .try_fold(1u64, |product, &extent| u64::try_from(extent).ok().and_then(|extent| product.checked_mul(extent)))
    else {
        return fail(tensor, format!("shape {:?} is negative or too large", tensor.dims));
    };
    if data_type == STRING {
        let have = tensor.string_data.len() as u64;
        if have != elements {
            return fail(tensor, format!("shape {:?} needs {elements} strings but there are {have}", tensor.dims));
        }
        return Ok(());
    }
    let want = match element_bits(data_type) {
        Some(bits) => match elements.checked_mul(bits) {
            Some(total) => Some(total.div_ceil(8)),
            None => return fail(tensor, format!("shape {:?} is too large", tensor.dims)),
        },
        None => None,
    };
    if tensor.data_location() as i32 == 1 {
        let contents = external.slice(tensor, want)?;
        tensor.raw_data = Some(contents);
        tensor.external_data.clear();
        tensor.data_location = None;
    } else if tensor.raw_data.as_ref().is_none_or(Bytes::is_empty) {
        tensor.raw_data = Some(typed_contents(tensor));
        tensor.float_data = Vec::new();
        tensor.int32_data = Vec::new();
        tensor.int64_data = Vec::new();
        tensor.double_data = Vec::new();
        tensor.uint64_data = Vec::new();
    }
    let have = content_len(tensor);
    match want {
        Some(want) if want != have => fail(
            tensor,
            format!(
                "{} {:?} needs {want} bytes but has {have}; the file is damaged",
                type_name(data_type),
                tensor.dims
            ),
        ),
        _ => Ok(()),
    }
}

fn type_name(data_type: i32) -> String {
    match DataType::from_onnx(data_type) {
        DataType::Opaque => format!("element type {data_type}"),
        known => known.to_string(),
    }
}

/// The typed fields as little-endian `raw_data`. `int32_data` carries every type of at most 32 bits, one element (or
/// one packed byte of 4- and 2-bit elements) per entry.
fn typed_contents(tensor: &TensorProto) -> Bytes {
    fn collect<T: Copy, const N: usize>(values: &[T], convert: impl Fn(T) -> [u8; N]) -> Bytes {
        values.iter().flat_map(|&value| convert(value)).collect::<Vec<u8>>().into()
    }
    match tensor.data_type() {
        1 | 14 => collect(&tensor.float_data, f32::to_le_bytes),
        11 | 15 => collect(&tensor.double_data, f64::to_le_bytes),
        7 => collect(&tensor.int64_data, i64::to_le_bytes),
        13 => collect(&tensor.uint64_data, u64::to_le_bytes),
        12 => collect(&tensor.uint64_data, |value| (value as u32).to_le_bytes()),
        6 => collect(&tensor.int32_data, i32::to_le_bytes),
        4 | 5 | 10 | 16 => collect(&tensor.int32_data, |value| (value as u16).to_le_bytes()),
        _ => collect(&tensor.int32_data, |value| [value as u8]),
    }
}

/// A constant with the contents of a host tensor.
pub(crate) fn from_host(name: &str, tensor: &HostTensor) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: tensor.info().shape.iter().map(|&extent| extent as i64).collect(),
        data_type: Some(tensor.info().dtype.onnx_code()),
        raw_data: Some(Bytes::copy_from_slice(tensor.bytes())),
        ..TensorProto::default()
    }
}

/// An `i64` constant.
pub(crate) fn from_i64(name: &str, shape: &[i64], values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: shape.to_vec(),
        data_type: Some(7),
        raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()),
        ..TensorProto::default()
    }
}

/// Digest of type, shape and contents of a constant, the same for every way of storing it.
pub(crate) fn digest(tensor: &TensorProto) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(tensor.data_type().to_le_bytes());
    hash.update((tensor.dims.len() as u64).to_le_bytes());
    for extent in &tensor.dims {
        hash.update(extent.to_le_bytes());
    }
    match &tensor.raw_data {
        Some(raw) => hash.update(raw),
        None => {
            for text in &tensor.string_data {
                hash.update((text.len() as u64).to_le_bytes());
                hash.update(text);
            }
        }
    }
    hash.finalize().into()
}

/// Digest of a sparse constant.
pub(crate) fn sparse_digest(sparse: &SparseTensorProto) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"sparse");
    for part in [&sparse.values, &sparse.indices].into_iter().flatten() {
        hash.update(digest(part));
    }
    for extent in &sparse.dims {
        hash.update(extent.to_le_bytes());
    }
    hash.finalize().into()
}

/// The first 16 bytes of a digest as 32 lowercase hex digits.
pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().take(16).fold(String::with_capacity(32), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(mut tensor: TensorProto) -> Result<TensorProto, OnnxError> {
        normalise(&mut tensor, &mut ExternalFiles::new(std::path::Path::new(".")))?;
        Ok(tensor)
    }

    #[test]
    fn every_way_of_storing_a_constant_has_one_digest() {
        let typed =
            TensorProto { dims: vec![2], data_type: Some(10), int32_data: vec![0x3c00, 0x4000], ..Default::default() };
        let raw = TensorProto {
            dims: vec![2],
            data_type: Some(10),
            raw_data: Some(Bytes::from_static(&[0x00, 0x3c, 0x00, 0x40])),
            ..Default::default()
        };
        let (typed, raw) = (normalised(typed).unwrap(), normalised(raw).unwrap());
        assert_eq!(typed.raw_data, raw.raw_data);
        assert_eq!(digest(&typed), digest(&raw));
    }

    #[test]
    fn four_bit_elements_are_packed() {
        let tensor =
            TensorProto { dims: vec![3], data_type: Some(22), int32_data: vec![0x21, 0x03], ..Default::default() };
        assert_eq!(normalised(tensor).unwrap().raw_data.unwrap().as_ref(), &[0x21, 0x03]);
    }

    #[test]
    fn lengths_are_checked() {
        let short = TensorProto {
            name: Some("w".into()),
            dims: vec![2, 3],
            data_type: Some(1),
            raw_data: Some(Bytes::from_static(&[0; 20])),
            ..Default::default()
        };
        assert_eq!(
            normalised(short).unwrap_err().to_string(),
            "constant `w`: f32 [2, 3] needs 24 bytes but has 20; the file is damaged"
        );
        let huge = TensorProto { dims: vec![i64::MAX, i64::MAX], data_type: Some(1), ..Default::default() };
        assert!(normalised(huge).is_err());
        let negative = TensorProto { dims: vec![-1], data_type: Some(1), ..Default::default() };
        assert!(normalised(negative).is_err());
    }

    #[test]
    fn scalars_and_empty_tensors() {
        let scalar = TensorProto { data_type: Some(1), float_data: vec![2.0], ..Default::default() };
        assert_eq!(content_len(&normalised(scalar).unwrap()), 4);
        let empty = TensorProto { dims: vec![0, 7], data_type: Some(1), ..Default::default() };
        assert_eq!(content_len(&normalised(empty).unwrap()), 0);
    }
}
