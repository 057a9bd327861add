use super::*;
use proptest::prelude::*;
use std::io::{Read as _, Write as _};
use std::time::Instant;

const TIMEOUT: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(200);

fn weights(count: u32) -> Vec<Region> {
    (0..count)
        .map(|block| Region::build(block, 5000, RegionKind::Memfd, None, |bytes| bytes.fill(block as u8)).unwrap())
        .collect()
}

/// Runs the owner in a thread against `peer`, returns both results.
fn exchange<T>(regions: Vec<Region>, peer: impl FnOnce(UnixStream) -> T) -> (Result<(), WeightsError>, T) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let owner = std::thread::spawn(move || offer(&ours, [9; 32], &regions, TIMEOUT));
    let received = peer(theirs);
    (owner.join().unwrap(), received)
}

#[test]
fn more_regions_than_a_batch_arrive_in_order_as_the_same_memory() {
    let regions = weights(150);
    let ids: Vec<_> = regions.iter().map(|region| region.file_id().unwrap()).collect();
    let expectation =
        Expectation { fingerprint: Some([9; 32]), region_limit: Some(5000), total_limit: Some(150 * 5000) };
    let (offered, received) = exchange(regions, |socket| receive(&socket, &expectation, TIMEOUT));
    offered.unwrap();
    let received = received.unwrap();
    assert_eq!(received.fingerprint, [9; 32]);
    assert_eq!(received.regions.len(), 150);
    for (block, region) in received.regions.iter().enumerate() {
        assert_eq!(region.block(), block as u32);
        assert_eq!(region.file_id().unwrap(), ids[block]);
        assert!(region.bytes().unwrap().iter().all(|&byte| byte == block as u8));
    }
}

#[test]
fn the_wrong_artefact_and_too_large_regions_are_refused_on_both_sides() {
    let wanted = Expectation { fingerprint: Some([1; 32]), ..Expectation::default() };
    let (offered, received) = exchange(weights(1), |socket| receive(&socket, &wanted, TIMEOUT));
    assert!(offered.unwrap_err().to_string().contains("another artefact"));
    assert!(matches!(received.unwrap_err(), WeightsError::PeerRefused { .. }));

    let limited = Expectation { region_limit: Some(4999), ..Expectation::default() };
    let (offered, received) = exchange(weights(3), |socket| receive(&socket, &limited, TIMEOUT));
    assert!(matches!(offered.unwrap_err(), WeightsError::PeerRefused { .. }));
    assert!(matches!(received.unwrap_err(), WeightsError::RegionTooLarge { bytes: 5000, limit: 4999, .. }));

    let limited = Expectation { total_limit: Some(9999), ..Expectation::default() };
    let (_, received) = exchange(weights(2), |socket| receive(&socket, &limited, TIMEOUT));
    assert!(received.unwrap_err().to_string().contains("above the limit"));
}

#[test]
fn another_protocol_version_is_named() {
    let (offered, ()) = exchange(weights(1), |mut socket| {
        let mut hello = [0u8; HELLO_BYTES];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8] = 2;
        socket.write_all(&hello).unwrap();
        let mut offer = [0u8; OFFER_BYTES];
        socket.read_exact(&mut offer).unwrap();
        assert_eq!(u32_at(&offer, 12), STATUS_VERSION);
    });
    assert!(offered.unwrap_err().to_string().contains("version 2"));
}

#[test]
fn a_peer_that_closes_at_any_step_is_an_error_at_once() {
    // Owner side: closed before greeting, after greeting, after the offer.
    for keep in [0, 1, 2] {
        let start = Instant::now();
        let (offered, ()) = exchange(weights(70), |mut socket| {
            if keep >= 1 {
                let mut hello = [0u8; HELLO_BYTES];
                hello[..8].copy_from_slice(&MAGIC);
                hello[8] = 1;
                socket.write_all(&hello).unwrap();
            }
            if keep >= 2 {
                socket.read_exact(&mut [0; OFFER_BYTES]).unwrap();
            }
        });
        assert!(matches!(offered.unwrap_err(), WeightsError::PeerClosed { .. }), "step {keep}");
        assert!(start.elapsed() < TIMEOUT);
    }
    // Receiver side: closed in the middle of the offer.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&MAGIC).unwrap();
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    let error = receive(&ours, &Expectation::default(), TIMEOUT).unwrap_err();
    assert!(matches!(error, WeightsError::PeerClosed { .. }), "{error}");
}

#[test]
fn silence_and_dripping_run_into_the_deadline() {
    let (ours, _theirs) = UnixStream::pair().unwrap();
    assert!(matches!(offer(&ours, [0; 32], &[], SHORT).unwrap_err(), WeightsError::PeerTimeout { .. }));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    // One correct byte every 20 ms never completes a message in 200 ms; each byte alone must not restart the clock.
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let dripping = std::thread::spawn(move || {
        for &byte in MAGIC.iter().chain([1, 0, 0, 0].iter()).cycle() {
            if stopped.load(std::sync::atomic::Ordering::Relaxed) || theirs.write_all(&[byte]).is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let error = receive(&ours, &Expectation::default(), SHORT).unwrap_err();
    assert!(matches!(error, WeightsError::PeerTimeout { waited_ms: 200, .. }), "{error}");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    dripping.join().unwrap();
}

#[test]
fn a_peer_that_never_reads_runs_into_the_deadline() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut hello = [0u8; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8] = 1;
    theirs.write_all(&hello).unwrap();
    let error = offer(&ours, [0; 32], &weights(200), SHORT).unwrap_err();
    assert!(matches!(error, WeightsError::PeerTimeout { .. } | WeightsError::Socket { .. }), "{error}");
}

/// An owner that follows the protocol up to the regions, then sends what `batch` says with as many descriptors.
fn lying_owner(count: u32, total: u64, entries: Vec<u8>, descriptors: Vec<OwnedFd>) -> WeightsError {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let lie = std::thread::spawn(move || {
        let wire = Wire::new(theirs.as_fd(), TIMEOUT);
        let _: [u8; HELLO_BYTES] = wire.receive("test").unwrap();
        let mut offer = [0u8; OFFER_BYTES];
        offer[..8].copy_from_slice(&MAGIC);
        offer[8] = 1;
        offer[48..52].copy_from_slice(&count.to_le_bytes());
        offer[56..64].copy_from_slice(&total.to_le_bytes());
        wire.send("test", &offer, &[]).unwrap();
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let _ = wire.send("test", &entries, &borrowed);
    });
    let error = receive(&ours, &Expectation::default(), TIMEOUT).unwrap_err();
    lie.join().unwrap();
    error
}

fn entry(kind: u8, access: u8, offset: u64, bytes: u64) -> Vec<u8> {
    let mut entry = vec![0, 0, 0, 0, kind, access, 0, 0];
    entry.extend(offset.to_le_bytes());
    entry.extend(bytes.to_le_bytes());
    entry.extend([0; 8]);
    entry
}

#[test]
fn owners_that_lie_are_caught() {
    let memfd =
        || Region::build(0, 5000, RegionKind::Memfd, None, |_| ()).unwrap().descriptor().try_clone_to_owned().unwrap();
    let file = || OwnedFd::from(tempfile::tempfile().unwrap());
    let cases = [
        (u32::MAX, 0, Vec::new(), Vec::new(), "more than 4096"),
        (1, 5000, entry(2, 1, 0, 5000), vec![], "0 descriptors where 1"),
        (1, 5000, entry(2, 1, 0, 5000), vec![memfd(), memfd()], "more than the 1 descriptors"),
        (1, 5000, entry(9, 1, 0, 5000), vec![memfd()], "kind 9"),
        (1, 5000, entry(2, 7, 0, 5000), vec![memfd()], "access mode 7"),
        (1, 4999, entry(2, 1, 0, 5000), vec![memfd()], "exceeds the bytes offered"),
        (1, 5001, entry(2, 1, 0, 5000), vec![memfd()], "did not come"),
        (1, u64::MAX, entry(2, 1, 0, u64::MAX), vec![memfd()], "do not lie in"),
        (1, 5000, entry(1, 1, 0, 5000), vec![file()], "do not lie in"),
        (1, 5000, entry(2, 1, 0, 5000), vec![file()], "do not lie in"),
        (1, 5000, entry(5, 1, 0, 5000), vec![memfd()], "do not travel"),
        (1, 5000, entry(3, 1, 0, 70_000), vec![memfd()], "exceeds"),
    ];
    for (count, total, entries, descriptors, want) in cases {
        let error = lying_owner(count, total, entries, descriptors).to_string();
        assert!(error.contains(want), "wanted `{want}` in `{error}`");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn garbage_is_an_error_on_either_side(mut bytes in prop::collection::vec(any::<u8>(), 0..400), magic in any::<bool>()) {
        if magic && bytes.len() > 12 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..12].copy_from_slice(&[1, 0, 0, 0]);
        }
        // A greeting that happens to be right is followed by a peer that closes, which is an error too.
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&bytes).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        prop_assert!(offer(&ours, [3; 32], &weights(1), TIMEOUT).is_err());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&bytes).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        if let Ok(received) = receive(&ours, &Expectation::default(), TIMEOUT) {
            // Only an offer of no regions can be completed by bytes alone.
            prop_assert!(received.regions.is_empty());
        }
    }
}
