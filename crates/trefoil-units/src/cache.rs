//! Keys of the on-disk caches of compiled sub-models.

use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Key of a model file: its contents, and place, size and time of change of every external data file that it names.
/// External weights may be gigabytes, so their contents are not read.
///
/// # Errors
/// When the model file cannot be read. A missing data file only changes the key: compiling reports it better.
pub(crate) fn model_key(model: &Path, salt: &[&str]) -> io::Result<String> {
    let contents = fs::read(model)?;
    let mut hash = Sha256::new();
    for part in salt {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    hash.update(&contents);
    let folder = model.parent().unwrap_or(Path::new("."));
    for location in external_locations(&contents) {
        let path = folder.join(&location);
        hash.update(path.as_os_str().as_encoded_bytes());
        if let Ok(data) = fs::metadata(&path) {
            let changed = data.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            hash.update(data.len().to_le_bytes());
            hash.update(changed.unwrap_or_default().as_nanos().to_le_bytes());
        }
    }
    let mut start = [0; 16];
    start.copy_from_slice(&hash.finalize()[..16]);
    Ok(format!("{:032x}", u128::from_be_bytes(start)))
}

/// External data files named in an ONNX file. An entry is the protobuf message `{1: "location", 2: path}`
/// (`StringStringEntryProto`), whose bytes are found without parsing the model around it; bytes that merely look like one
/// only add a harmless path to the key.
fn external_locations(model: &[u8]) -> BTreeSet<String> {
    const ENTRY: &[u8] = b"\x0a\x08location\x12";
    let mut found = BTreeSet::new();
    let mut rest = model;
    while let Some(start) = rest.windows(ENTRY.len()).position(|window| window == ENTRY) {
        rest = &rest[start + ENTRY.len()..];
        let (mut length, mut used) = (0usize, 0usize);
        for &byte in rest.iter().take(3) {
            length |= usize::from(byte & 0x7f) << (7 * used);
            used += 1;
            if byte & 0x80 == 0 {
                break;
            }
        }
        if let Some(path) = rest.get(used..used + length).and_then(|bytes| std::str::from_utf8(bytes).ok()) {
            found.insert(path.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_found() {
        let mut model = b"junk\x0a\x08location\x12\x0bweights.bin\x0a\x06offset".to_vec();
        model.extend(b"\x0a\x08location\x12\x82\x01");
        model.extend([b'w'; 130]);
        model.extend(b"\x0a\x08location\x12\x7fcut off");
        let found = external_locations(&model);
        assert_eq!(found.len(), 2);
        assert!(found.contains("weights.bin") && found.contains(&"w".repeat(130)));
    }

    #[test]
    fn keys_follow_contents_data_files_and_salt() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("m.onnx");
        fs::write(&model, b"\x0a\x08location\x12\x05w.bin").unwrap();
        let bare = model_key(&model, &["a"]).unwrap();
        assert_eq!(bare, model_key(&model, &["a"]).unwrap());
        assert_ne!(bare, model_key(&model, &["b"]).unwrap());
        fs::write(folder.path().join("w.bin"), b"weights").unwrap();
        assert_ne!(bare, model_key(&model, &["a"]).unwrap());
        assert!(model_key(&folder.path().join("absent.onnx"), &[]).is_err());
    }
}
