//! Regions shared by real processes: one physical copy by the kernel's own accounting, and peers that die.

mod common;

use common::{random, write_safetensors};
use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use trefoil_weights::memory::mapping_usage;
use trefoil_weights::region::load_regions;
use trefoil_weights::share::offer;
use trefoil_weights::{Artefact, PackOptions, Region, RegionKind, WeightsError, pack};

const TIMEOUT: Duration = Duration::from_secs(30);

fn helper(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_trefoil-weights-helper"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Kills and reaps the child however the test ends.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The line that a helper prints once it has touched every page.
fn ready(child: &mut Reaped) -> u64 {
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line.trim().parse().unwrap_or_else(|_| panic!("the helper said `{line}`"))
}

/// An artefact of three regions of 2.5 MiB.
fn artefact(folder: &Path) -> Artefact {
    let source = folder.join("model.safetensors");
    let tensors: Vec<_> =
        (0..3).map(|block| random(&format!("blocks.{block}.attn1.to_q.weight"), &[1024, 2560])).collect();
    write_safetensors(&source, &tensors);
    let output = folder.join("model.trefoil");
    pack(&source, &output, &PackOptions::default(), |_| ()).unwrap();
    Artefact::open(&output).unwrap()
}

fn sum(regions: &[Region]) -> u64 {
    regions.iter().flat_map(|region| region.bytes().unwrap()).map(|&byte| u64::from(byte)).sum()
}

/// Both processes have every page of `bytes` resident, and their proportional shares add up to one copy.
fn assert_one_copy(child: &Reaped, regions: &[Region], bytes: u64, what: &str) {
    let mut ids: Vec<_> = regions.iter().map(|region| region.file_id().unwrap()).collect();
    ids.dedup();
    let (mut ours, mut theirs) = ((0, 0), (0, 0));
    for (device, inode) in ids {
        let usage = mapping_usage(std::process::id(), device, inode).unwrap();
        ours = (ours.0 + usage.resident, ours.1 + usage.proportional);
        // Seeing the same device and inode in the other process is what makes it the same memory.
        let usage = mapping_usage(child.0.id(), device, inode).unwrap();
        theirs = (theirs.0 + usage.resident, theirs.1 + usage.proportional);
    }
    assert!(ours.0 >= bytes && theirs.0 >= bytes, "{what}: resident {ours:?} {theirs:?} of {bytes}");
    let copies = (ours.1 + theirs.1) as f64 / bytes as f64;
    eprintln!(
        "{what}: {bytes} bytes, Rss {} and {}, Pss {} and {}: {copies:.3} copies",
        ours.0, theirs.0, ours.1, theirs.1
    );
    assert!((0.95..1.05).contains(&copies), "{what}: {copies} copies in memory");
}

#[test]
fn two_processes_that_map_one_artefact_hold_one_copy() {
    let folder = tempfile::tempdir().unwrap();
    let artefact = artefact(folder.path());
    let mut child = Reaped(helper(&["map", artefact.path().to_str().unwrap()]).spawn().unwrap());
    let theirs = ready(&mut child);
    // Only the regions stay mapped here, as in an engine.
    let regions = load_regions(&artefact, RegionKind::File, None).unwrap();
    let bytes: u64 = regions.iter().map(|region| region.len() as u64).sum();
    drop(artefact);
    assert_eq!(sum(&regions), theirs);
    assert_one_copy(&child, &regions, bytes, "artefact");
}

#[test]
fn regions_passed_by_descriptor_are_one_copy() {
    for kind in [RegionKind::Memfd, RegionKind::File] {
        let folder = tempfile::tempdir().unwrap();
        let artefact = artefact(folder.path());
        let regions = load_regions(&artefact, kind, None).unwrap();
        let bytes: u64 = regions.iter().map(|region| region.len() as u64).sum();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut child = Reaped(helper(&["receive", socket.to_str().unwrap()]).spawn().unwrap());
        let (connection, _) = listener.accept().unwrap();
        offer(&connection, artefact.fingerprint(), &regions, TIMEOUT).unwrap();
        let theirs = ready(&mut child);
        drop(artefact);
        assert_eq!(sum(&regions), theirs);
        assert_one_copy(&child, &regions, bytes, kind.as_str());
    }
}

#[test]
fn a_peer_process_that_dies_is_an_error_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let regions: Vec<Region> =
        (0..100).map(|block| Region::build(block, 4096, RegionKind::Memfd, None, |_| ()).unwrap()).collect();
    let start = Instant::now();
    let _child = Reaped(helper(&["die", socket.to_str().unwrap()]).stderr(Stdio::null()).spawn().unwrap());
    let (connection, _) = listener.accept().unwrap();
    let error = offer(&connection, [0; 32], &regions, TIMEOUT).unwrap_err();
    assert!(matches!(error, WeightsError::PeerClosed { .. }), "{error}");
    assert!(start.elapsed() < TIMEOUT);
}

#[test]
fn a_peer_process_that_is_killed_while_it_holds_regions_takes_nothing_along() {
    let folder = tempfile::tempdir().unwrap();
    let artefact = artefact(folder.path());
    let regions = load_regions(&artefact, RegionKind::Memfd, None).unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut child = Reaped(helper(&["receive", socket.to_str().unwrap()]).spawn().unwrap());
    let (connection, _) = listener.accept().unwrap();
    offer(&connection, artefact.fingerprint(), &regions, TIMEOUT).unwrap();
    let before = ready(&mut child);
    drop(child);
    assert_eq!(sum(&regions), before);
    // The connection is dead, and saying so takes no time.
    let error = offer(&connection, artefact.fingerprint(), &regions, TIMEOUT).unwrap_err();
    assert!(matches!(error, WeightsError::PeerClosed { .. }), "{error}");
}
