//! Sources that change while they are packed, and packing that is told to stop: an error, and nothing is left behind.

mod common;

use common::{tiny_wan, write_safetensors};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use trefoil_weights::checkpoint::Checkpoint;
use trefoil_weights::{PackOptions, WeightsError, pack};

/// Packs; `during` is called before tensor number `at`.
fn pack_and(folder: &Path, options: &PackOptions, at: usize, during: &dyn Fn(&File)) -> Result<(), WeightsError> {
    let source = folder.join("model.safetensors");
    write_safetensors(&source, &tiny_wan());
    let file = File::options().write(true).open(&source).unwrap();
    let mut tensors = 0;
    let packed = pack(&source, &folder.join("model.trefoil"), options, |_| {
        if tensors == at {
            during(&file);
        }
        tensors += 1;
    });
    if packed.is_err() {
        let left: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["model.safetensors"], "nothing else is left");
    }
    packed.map(drop)
}

#[test]
fn a_source_that_is_cut_short_or_written_to_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors").display().to_string();
    let options = PackOptions::default();
    let told = |during: &dyn Fn(&File)| pack_and(folder.path(), &options, 5, during).unwrap_err().to_string();
    let advice = "while it was read; leave it as it is until the command ends, and start again";
    // To nothing, and to somewhere inside the data.
    for length in [0, 5000] {
        assert_eq!(told(&|file| file.set_len(length).unwrap()), format!("{source} became shorter {advice}"));
    }
    let append = |file: &File| file.set_len(file.metadata().unwrap().len() + 8).unwrap();
    assert_eq!(told(&append), format!("{source} became longer {advice}"));
    let write = |file: &File| file.set_modified(SystemTime::now() + Duration::from_secs(10)).unwrap();
    assert_eq!(told(&write), format!("{source} was written to {advice}"));
    // Another file under its name is none of its business: the open one is still what it was.
    let replace = |_: &File| {
        let other = folder.path().join("other");
        std::fs::write(&other, "x").unwrap();
        std::fs::rename(other, folder.path().join("model.safetensors")).unwrap();
    };
    pack_and(folder.path(), &options, 5, &replace).unwrap();
}

#[test]
fn packing_that_is_told_to_stop_leaves_nothing() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let folder = tempfile::tempdir().unwrap();
    let options = PackOptions { stop: Some(&STOP), ..PackOptions::default() };
    pack_and(folder.path(), &options, usize::MAX, &|_| ()).unwrap();
    std::fs::remove_file(folder.path().join("model.trefoil")).unwrap();
    let stopped = pack_and(folder.path(), &options, 7, &|_| STOP.store(true, Ordering::SeqCst)).unwrap_err();
    assert!(matches!(stopped, WeightsError::Stopped), "{stopped}");
    assert_eq!(stopped.to_string(), "packing was stopped; nothing was written");
}

#[test]
fn headers_that_promise_what_is_not_there_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_safetensors(&path, &tiny_wan());
    let whole = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap());
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Checkpoint::open(&path, &[]).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(open(&whole), Ok(()));
    let refused = |bytes: &[u8], what: &str| {
        let message = open(bytes).unwrap_err();
        assert!(message.contains(what) && !message.contains('\n'), "{message}");
    };
    refused(&[], "0 bytes are no safetensors file");
    refused(&whole[..7], "7 bytes are no safetensors file");
    refused(&whole[..100], &format!("a header of {header} bytes in 100"));
    refused(&whole[..whole.len() - 1], "bytes and");
    refused(&[&whole[..], &[0]].concat(), "bytes and");
    for length in [u64::MAX, u64::MAX - 8, 1 << 40, 0, 3] {
        refused(&[&length.to_le_bytes(), &whole[8..]].concat(), "not a valid safetensors file");
    }
    // Tensors that overlap, or overflow.
    let twisted = |from: &str, to: &str| {
        let text = String::from_utf8(whole[8..8 + header as usize].to_vec()).unwrap().replacen(from, to, 1);
        [&(text.len() as u64).to_le_bytes(), text.as_bytes(), &whole[8 + header as usize..]].concat()
    };
    refused(&twisted("\"data_offsets\":[0,", "\"data_offsets\":[4,"), "not a valid safetensors file");
    refused(&twisted("\"F32\"", "\"F8\""), "not a valid safetensors file");
    refused(&twisted("\"shape\":[40", "\"shape\":[18446744073709551615,40"), "not a valid safetensors file");
}
