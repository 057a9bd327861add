//! `trefoil weights pack` never replaces what it reads, nor anything that is no file.

use std::fs;
use std::path::Path;
use std::process::Command;

/// A checkpoint of one tensor; `pack` reads it before it says that the name fits no rule.
fn checkpoint(path: &Path) {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&[0; 8]);
    fs::write(path, bytes).unwrap();
}

#[test]
fn an_output_that_is_read_or_is_no_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("shards")).unwrap();
    for name in ["one.safetensors", "shards/m-1.safetensors"] {
        checkpoint(&at(name));
    }
    fs::write(at("shards/m.safetensors.index.json"), "{}").unwrap();
    let pack = |source: &str, output: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trefoil"));
        let done =
            command.current_dir(folder.path()).args(["weights", "pack", source, "-o"]).arg(output).output().unwrap();
        assert!(!done.status.success(), "{source} to {}", output.display());
        String::from_utf8(done.stderr).unwrap()
    };
    let before = fs::read(at("one.safetensors")).unwrap();
    let overwritten = "is read and would be overwritten; name another";
    assert!(pack("one.safetensors", &at("one.safetensors")).contains(overwritten));
    assert!(pack("shards", &at("shards/m-1.safetensors")).contains(overwritten));
    assert!(pack("shards/m.safetensors.index.json", &at("shards/m-1.safetensors")).contains(overwritten));
    assert!(pack("shards", &at("shards/m.safetensors.index.json")).contains(overwritten));
    assert!(pack("one.safetensors", &at("shards")).contains("is a folder; name a file to write"));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("one.safetensors", at("link.trefoil")).unwrap();
        assert!(pack("one.safetensors", &at("link.trefoil")).contains(overwritten));
        // A socket stands for devices, which a test must not touch.
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        assert!(pack("one.safetensors", &at("socket")).contains("is no regular file; name a file to write"));
    }
    assert_eq!(fs::read(at("one.safetensors")).unwrap(), before);
    assert!(at("shards/m-1.safetensors").is_file());
}

/// A checkpoint of matrices of zeros that take no room on disk, and take long enough to pack that a signal comes in time.
#[cfg(unix)]
fn large_checkpoint(path: &Path) {
    use std::io::Write;
    const SIDE: u64 = 8192;
    const BLOCKS: u64 = 8;
    let bytes = 4 * SIDE * SIDE;
    let entries: Vec<String> = (0..BLOCKS)
        .map(|block| {
            let (name, from) = (format!("blocks.{block}.attn1.to_q.weight"), block * bytes);
            format!(r#""{name}":{{"dtype":"F32","shape":[{SIDE},{SIDE}],"data_offsets":[{from},{}]}}"#, from + bytes)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut file = fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + BLOCKS * bytes).unwrap();
}

#[test]
#[cfg(unix)]
fn a_signal_ends_packing_and_leaves_nothing() {
    use rustix::process::{Pid, Signal, kill_process};
    use std::time::Duration;
    let folder = tempfile::tempdir().unwrap();
    large_checkpoint(&folder.path().join("m.safetensors"));
    for signal in [Signal::TERM, Signal::INT] {
        let mut packing = Command::new(env!("CARGO_BIN_EXE_trefoil"))
            .current_dir(folder.path())
            .args(["weights", "pack", "m.safetensors", "-o", "m.trefoil"])
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Once its temporary file is there, so is its handler.
        while folder.path().read_dir().unwrap().count() < 2 && packing.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        kill_process(Pid::from_child(&packing), signal).unwrap();
        let done = packing.wait_with_output().unwrap();
        let told = String::from_utf8(done.stderr).unwrap();
        assert_eq!(
            (done.status.code(), told.as_str()),
            (Some(130), "error: packing was stopped; nothing was written\n")
        );
        let left: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["m.safetensors"]);
    }
}
