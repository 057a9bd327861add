//! What tells one input of a job from another.

use crate::tensors::Tensor;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

/// Files up to this size are read wholly.
const WHOLE: u64 = 64 << 20;
/// Pieces of a larger one.
const PIECES: u64 = 64;
/// Bytes of a piece.
const PIECE: usize = 4096;

/// A number (SHA-256, its first half) for the files of a model: their names, lengths and bytes. Of a file above 64 MiB only 64 pieces
/// are read, and the time of its last change stands for the rest. `None` where something cannot be read.
pub fn identity_of_files(path: &Path) -> Option<String> {
    let mut files: Vec<PathBuf> = if path.is_dir() {
        std::fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).filter(|file| file.is_file()).collect()
    } else {
        vec![path.to_owned()]
    };
    files.sort();
    let mut digest = Sha256::new();
    for path in &files {
        let name = path.file_name()?.as_encoded_bytes();
        let file = File::open(path).ok()?;
        let about = file.metadata().ok()?;
        digest.update((name.len() as u64).to_le_bytes());
        digest.update(name);
        digest.update(about.len().to_le_bytes());
        if about.len() <= WHOLE {
            digest.update(std::fs::read(path).ok()?);
            continue;
        }
        digest.update(about.mtime().to_le_bytes());
        digest.update(about.mtime_nsec().to_le_bytes());
        let mut piece = vec![0u8; PIECE];
        for number in 0..PIECES {
            file.read_exact_at(&mut piece, (about.len() - PIECE as u64) / (PIECES - 1) * number).ok()?;
            digest.update(&piece);
        }
    }
    Some(short(&digest.finalize()))
}

/// The same for a tensor: its shape and the bits of its values, wherever it was read from.
pub fn identity_of_tensor(tensor: &Tensor) -> String {
    let mut digest = Sha256::new();
    digest.update((tensor.shape.len() as u64).to_le_bytes());
    tensor.shape.iter().for_each(|&side| digest.update((side as u64).to_le_bytes()));
    tensor.values.iter().for_each(|value| digest.update(value.to_le_bytes()));
    short(&digest.finalize())
}

fn short(digest: &[u8]) -> String {
    digest.iter().take(16).fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_file_counts_and_a_copy_is_the_same() {
        let space = tempfile::tempdir().unwrap();
        let folder = |name: &str, change: Option<usize>| {
            let folder = space.path().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            let mut bytes = vec![7u8; 1 << 20];
            if let Some(at) = change {
                bytes[at] = 8;
            }
            std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
            std::fs::write(folder.join("config.json"), "{}").unwrap();
            identity_of_files(&folder).unwrap()
        };
        let one = folder("one", None);
        assert_eq!((one.len(), folder("copy", None)), (32, one.clone()));
        // Not where any of 64 pieces would lie.
        assert_ne!(folder("other", Some(10_000)), one);
        assert_eq!(identity_of_files(&space.path().join("none")), None);
        // Of a large one its time.
        let large = space.path().join("large");
        File::create(&large).unwrap().set_len(WHOLE + 1).unwrap();
        let before = identity_of_files(&large).unwrap();
        let time = std::time::SystemTime::UNIX_EPOCH;
        File::options().write(true).open(&large).unwrap().set_modified(time).unwrap();
        assert_ne!(identity_of_files(&large).unwrap(), before);
    }

    #[test]
    fn tensors_differ_in_shape_or_values() {
        let tensor = |shape: &[usize], last: f32| {
            identity_of_tensor(&Tensor::new("x", shape, vec![0.0, 1.0, 2.0, last]).unwrap())
        };
        assert_eq!(tensor(&[2, 2], 3.0), tensor(&[2, 2], 3.0));
        assert!(tensor(&[2, 2], 3.0) != tensor(&[4], 3.0) && tensor(&[4], 3.0) != tensor(&[4], 4.0));
    }
}
