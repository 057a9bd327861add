//! NumPy's `.npy` and `.npz` files: the inputs and outputs that people have lying around.
//!
//! Read: format versions 1 to 3, every element type of [`DataType`] (`bfloat16` as NumPy's two-byte void, which is
//! how `ml_dtypes` writes it), either byte order, C and Fortran order, stored or deflated archives. Not read: structured, string and
//! object arrays (an object array is a pickle, which could run code).

use crate::{OnnxError, files};
use std::collections::HashSet;
use std::io::{BufReader, Read, Write};
use std::path::Path;
use trefoil_core::{DataType, HostTensor, TensorInfo};
use trefoil_files::open_regular;

const MAGIC: &[u8] = b"\x93NUMPY";
/// Headers are padded so that contents start at a multiple of this.
const HEADER_ALIGNMENT: usize = 64;

/// Reads every array of an archive, in archive order, named by its key.
///
/// # Errors
/// [`OnnxError::Io`] and [`OnnxError::Npz`].
pub fn read_npz(path: &Path) -> Result<Vec<HostTensor>, OnnxError> {
    let file = open_regular(path).map_err(|error| OnnxError::io(path, &error))?;
    let bad = |reason: String| OnnxError::Npz { path: path.display().to_string(), reason };
    let mut archive =
        zip::ZipArchive::new(BufReader::new(file)).map_err(|error| bad(format!("no npz archive: {error}")))?;
    let mut names = HashSet::new();
    let mut tensors = Vec::with_capacity(archive.len());
    for position in 0..archive.len() {
        let entry = archive.by_index(position).map_err(|error| bad(error.to_string()))?;
        let full = entry.name().map_err(|error| bad(error.to_string()))?.into_owned();
        let name = full.strip_suffix(".npy").unwrap_or(&full).to_owned();
        if !names.insert(name.clone()) {
            return Err(bad(format!("array `{name}` stands twice")));
        }
        tensors.push(parse(entry, &name).map_err(|reason| bad(format!("array `{name}`: {reason}")))?);
    }
    Ok(tensors)
}

/// Reads one array; it is named after the file.
///
/// # Errors
/// [`OnnxError::Io`] and [`OnnxError::Npz`].
pub fn read_npy(path: &Path) -> Result<HostTensor, OnnxError> {
    let file = open_regular(path).map_err(|error| OnnxError::io(path, &error))?;
    let name = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
    parse(BufReader::new(file), &name).map_err(|reason| OnnxError::Npz { path: path.display().to_string(), reason })
}

/// Writes an archive (stored, not compressed), atomically. Keys are the tensors' names.
///
/// # Errors
/// [`OnnxError::Io`]; [`OnnxError::Npz`] for a tensor of type [`DataType::Opaque`] or two tensors of one name.
pub fn write_npz(path: &Path, tensors: &[&HostTensor]) -> Result<(), OnnxError> {
    let bad = |reason: String| OnnxError::Npz { path: path.display().to_string(), reason };
    let mut names = HashSet::new();
    for tensor in tensors {
        if !names.insert(tensor.info().name.as_str()) {
            return Err(bad(format!("two arrays are called `{}`", tensor.info().name)));
        }
    }
    files::write_atomically(path, |writer| {
        let mut archive = zip::ZipWriter::new(writer);
        for tensor in tensors {
            let info = tensor.info();
            let header = header(info).map_err(|reason| bad(format!("array `{}`: {reason}", info.name)))?;
            let options = zip::write::SimpleFileOptions::default()
                .compression_method(zip::CompressionMethod::Stored)
                .large_file(info.bytes() >= u64::from(u32::MAX));
            archive.start_file(format!("{}.npy", info.name), options).map_err(|error| bad(error.to_string()))?;
            archive.write_all(&header).map_err(|error| OnnxError::io(path, &error))?;
            archive.write_all(tensor.bytes()).map_err(|error| OnnxError::io(path, &error))?;
        }
        archive.finish().map_err(|error| bad(error.to_string()))?;
        Ok(())
    })
}

/// NumPy's type string without byte order.
fn type_code(dtype: DataType) -> Option<&'static str> {
    Some(match dtype {
        DataType::F32 => "f4",
        DataType::F64 => "f8",
        DataType::F16 => "f2",
        DataType::BF16 => "V2",
        DataType::I8 => "i1",
        DataType::I16 => "i2",
        DataType::I32 => "i4",
        DataType::I64 => "i8",
        DataType::U8 => "u1",
        DataType::U16 => "u2",
        DataType::U32 => "u4",
        DataType::U64 => "u8",
        DataType::Bool => "b1",
        DataType::Opaque => return None,
    })
}

const ALL_TYPES: [DataType; 13] = [
    DataType::F32,
    DataType::F64,
    DataType::F16,
    DataType::BF16,
    DataType::I8,
    DataType::I16,
    DataType::I32,
    DataType::I64,
    DataType::U8,
    DataType::U16,
    DataType::U32,
    DataType::U64,
    DataType::Bool,
];

fn header(info: &TensorInfo) -> Result<Vec<u8>, String> {
    let code = type_code(info.dtype).ok_or("values of this type cannot be stored as npy")?;
    let order = if info.dtype.size() == 1 || info.dtype == DataType::BF16 { '|' } else { '<' };
    let extents: Vec<String> = info.shape.iter().map(ToString::to_string).collect();
    // A tuple of one is written with its comma.
    let comma = if extents.len() == 1 { "," } else { "" };
    let mut text =
        format!("{{'descr': '{order}{code}', 'fortran_order': False, 'shape': ({}{comma}), }}", extents.join(", "));
    let prefix = MAGIC.len() + 4;
    let padded = (prefix + text.len() + 1).next_multiple_of(HEADER_ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', padded - prefix - text.len() - 1));
    text.push('\n');
    let length = u16::try_from(text.len()).map_err(|_| "the shape has too many dims".to_owned())?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend(length.to_le_bytes());
    bytes.extend(text.bytes());
    Ok(bytes)
}

fn parse(mut reader: impl Read, name: &str) -> Result<HostTensor, String> {
    let mut start = [0u8; 8];
    reader.read_exact(&mut start).map_err(|_| "not an npy array (too short)".to_owned())?;
    if &start[..6] != MAGIC {
        return Err("not an npy array".into());
    }
    let length = match start[6] {
        1 => {
            let mut bytes = [0u8; 2];
            reader.read_exact(&mut bytes).map_err(|error| error.to_string())?;
            usize::from(u16::from_le_bytes(bytes))
        }
        2 | 3 => {
            let mut bytes = [0u8; 4];
            reader.read_exact(&mut bytes).map_err(|error| error.to_string())?;
            u32::from_le_bytes(bytes) as usize
        }
        version => return Err(format!("npy format version {version} is not known")),
    };
    let text = read_at_most(&mut reader, length)?;
    let text = String::from_utf8(text).map_err(|_| "the header is not text".to_owned())?;
    let descr = field(&text, "descr").ok_or("the header has no descr")?;
    let descr = descr.strip_prefix(['\'', '"']).and_then(|rest| rest.split(['\'', '"']).next());
    let descr = descr.ok_or("structured arrays are not supported; store plain ones")?;
    let fortran = field(&text, "fortran_order").is_some_and(|value| value.starts_with("True"));
    let shape = shape(&text)?;
    let (order, code) = descr.split_at_checked(1).ok_or("the header has an empty descr")?;
    let dtype = ALL_TYPES
        .into_iter()
        .find(|&dtype| type_code(dtype) == Some(code))
        .ok_or_else(|| format!("arrays of NumPy type `{descr}` are not supported"))?;
    let info = TensorInfo::new(name, dtype, shape);
    let bytes = info.bytes();
    if bytes >= isize::MAX as u64 {
        return Err(format!("shape {:?} is too large", info.shape));
    }
    let mut contents = read_at_most(&mut reader, bytes as usize)?;
    if order == ">" && dtype.size() > 1 {
        contents.chunks_exact_mut(dtype.size() as usize).for_each(<[u8]>::reverse);
    }
    if fortran && info.shape.len() > 1 {
        contents = to_row_major(&contents, &info.shape, dtype.size() as usize);
    }
    HostTensor::from_bytes(info, &contents).map_err(|error| error.to_string())
}

/// Reads exactly `length` bytes. Memory grows with what is there, not with what a header claims.
fn read_at_most(reader: &mut impl Read, length: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    reader.take(length as u64).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() < length {
        return Err(format!("needs {length} bytes but has {}", bytes.len()));
    }
    Ok(bytes)
}

/// The text after `'key':` in a header's dictionary.
fn field<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let at = header.find(&format!("'{key}'")).or_else(|| header.find(&format!("\"{key}\"")))?;
    Some(header[at + key.len() + 2..].trim_start().strip_prefix(':')?.trim_start())
}

fn shape(header: &str) -> Result<Vec<u64>, String> {
    let text = field(header, "shape").and_then(|text| text.strip_prefix('(')).and_then(|text| text.split(')').next());
    let text = text.ok_or("the header has no shape")?;
    text.split(',')
        .map(str::trim)
        .filter(|extent| !extent.is_empty())
        // Python 2 wrote long integers with an L.
        .map(|extent| extent.trim_end_matches('L').parse().map_err(|_| format!("`{extent}` is no extent")))
        .collect()
}

/// Column-major contents in row-major order.
fn to_row_major(contents: &[u8], shape: &[u64], size: usize) -> Vec<u8> {
    let mut result = Vec::with_capacity(contents.len());
    let mut position = vec![0u64; shape.len()];
    for _ in 0..contents.len() / size {
        let mut offset = 0u64;
        for (&at, &extent) in position.iter().zip(shape).rev() {
            offset = offset * extent + at;
        }
        let start = offset as usize * size;
        result.extend_from_slice(&contents[start..start + size]);
        for (at, &extent) in position.iter_mut().zip(shape).rev() {
            *at += 1;
            if *at < extent {
                break;
            }
            *at = 0;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_type_round_trips() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all.npz");
        let tensors: Vec<HostTensor> = ALL_TYPES
            .into_iter()
            .map(|dtype| {
                let info = TensorInfo::new(dtype.to_string(), dtype, [2u64, 3]);
                let bytes: Vec<u8> = (0..info.bytes())
                    .map(|byte| if dtype == DataType::Bool { (byte % 2) as u8 } else { byte as u8 })
                    .collect();
                HostTensor::from_bytes(info, &bytes).unwrap()
            })
            .chain([HostTensor::from_f32("scalar", [], &[1.5]), HostTensor::from_f32("empty", [0u64, 4], &[])])
            .collect();
        write_npz(&path, &tensors.iter().collect::<Vec<_>>()).unwrap();
        let back = read_npz(&path).unwrap();
        assert_eq!(back.len(), tensors.len());
        for (one, other) in tensors.iter().zip(&back) {
            assert_eq!((one.info(), one.bytes()), (other.info(), other.bytes()));
        }
    }

    fn npy(descr: &str, fortran: bool, shape: &str, contents: &[u8]) -> Vec<u8> {
        let fortran = if fortran { "True" } else { "False" };
        let text = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}\n");
        let mut bytes = MAGIC.to_vec();
        bytes.extend([2, 0]);
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.bytes());
        bytes.extend(contents);
        bytes
    }

    #[test]
    fn big_endian_and_fortran_order() {
        let tensor = parse(npy(">i2", true, "(2, 3)", &[0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6]).as_slice(), "x").unwrap();
        assert_eq!(tensor.to_f64(), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
    }

    #[test]
    fn refusals_say_why() {
        let reason = |bytes: Vec<u8>| parse(bytes.as_slice(), "x").unwrap_err();
        assert_eq!(reason(npy("|O", false, "(1,)", &[0; 8])), "arrays of NumPy type `|O` are not supported");
        assert_eq!(reason(npy("<f4", false, "(9,)", &[0; 8])), "needs 36 bytes but has 8");
        assert_eq!(
            reason(npy("<f4", false, "(18446744073709551615, 2)", &[])),
            "shape [18446744073709551615, 2] is too large"
        );
        assert_eq!(reason(b"PK".to_vec()), "not an npy array (too short)");
        assert_eq!(reason(npy("<f4", false, "(-1,)", &[])), "`-1` is no extent");
    }

    #[test]
    fn duplicate_names_are_refused_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.npz");
        let tensor = HostTensor::from_f32("x", [1u64], &[1.0]);
        assert!(write_npz(&path, &[&tensor, &tensor]).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    proptest! {
        #[test]
        fn damaged_arrays_never_panic(position in 0usize..80, byte in any::<u8>(), cut in 0usize..120) {
            let mut bytes = npy("<f4", true, "(2, 2)", &[0; 16]);
            let position = position % bytes.len();
            bytes[position] = byte;
            bytes.truncate(cut);
            let _ = parse(bytes.as_slice(), "x");
        }
    }
}
