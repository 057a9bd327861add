//! Reads npz archives (zip of npy arrays, compressed or not) into host tensors named by their keys.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use trefoil_core::{DataType, HostTensor, TensorInfo};

pub fn read(path: &Path) -> Result<Vec<HostTensor>, String> {
    let fail = |reason: String| format!("{}: {reason}", path.display());
    let file = File::open(path).map_err(|error| fail(error.to_string()))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| fail(error.to_string()))?;
    let mut tensors = Vec::new();
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index).map_err(|error| fail(error.to_string()))?;
        let name = entry.name().map_err(|error| fail(error.to_string()))?.trim_end_matches(".npy").to_owned();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
        tensors.push(array(&name, &bytes).ok_or_else(|| fail(format!("array `{name}` is none that is read here")))?);
    }
    Ok(tensors)
}

fn array(name: &str, npy: &[u8]) -> Option<HostTensor> {
    let header_start = if *npy.get(6)? >= 2 { 12 } else { 10 };
    let header_size = usize::from(u16::from_le_bytes(npy.get(8..10)?.try_into().ok()?));
    let header = std::str::from_utf8(npy.get(header_start..header_start + header_size)?).ok()?;
    let after = |key: &str| header.split_once(key).map(|(_, rest)| rest.trim_start());
    let dtype = match after("'descr':")?.split('\'').nth(1)? {
        "<f4" => DataType::F32,
        "<f8" => DataType::F64,
        "<f2" => DataType::F16,
        "|i1" => DataType::I8,
        "<i2" => DataType::I16,
        "<i4" => DataType::I32,
        "<i8" => DataType::I64,
        "|u1" => DataType::U8,
        "|b1" => DataType::Bool,
        _ => return None,
    };
    let extents = after("'shape':")?.strip_prefix('(')?.split(')').next()?;
    let shape: Option<Vec<u64>> = extents
        .split(',')
        .map(str::trim)
        .filter(|extent| !extent.is_empty())
        .map(|extent| extent.parse().ok())
        .collect();
    let (info, contents) = (TensorInfo::new(name, dtype, shape?), npy.get(header_start + header_size..)?);
    if after("'fortran_order':")?.starts_with("False") {
        return HostTensor::from_bytes(info, contents).ok();
    }
    let reordered = row_major(contents, &info);
    HostTensor::from_bytes(info, &reordered).ok()
}

/// Elements stored with the first axis fastest, put into row-major order.
fn row_major(contents: &[u8], info: &TensorInfo) -> Vec<u8> {
    let size = info.dtype.size() as usize;
    let mut bytes = Vec::with_capacity(contents.len());
    let mut position = vec![0u64; info.shape.len()];
    for _ in 0..info.elements() {
        let index =
            position.iter().zip(&info.shape).rev().fold(0, |index, (&at, &extent)| index * extent + at) as usize;
        bytes.extend_from_slice(&contents[index * size..(index + 1) * size]);
        for (at, &extent) in position.iter_mut().zip(&info.shape).rev() {
            *at += 1;
            if *at < extent {
                break;
            }
            *at = 0;
        }
    }
    bytes
}
