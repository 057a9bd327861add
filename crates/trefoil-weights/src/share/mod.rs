//! Sharing regions between processes: descriptors over a Unix-domain socket, never bytes.
//!
//! # Protocol, version 1
//! Little-endian, over a connected stream socket. Every message has a fixed size, so no length comes from the peer.
//!
//! 1. Receiver → owner, 48 bytes: magic `TRFSHARE`, version `u32`, zero `u32`, the fingerprint it wants (all zero: any).
//! 2. Owner → receiver, 64 bytes: magic, version, status `u32` (0 = yes), fingerprint, region count `u32`, zero `u32`, total
//!    bytes `u64`. With another status the exchange ends here.
//! 3. Owner → receiver, per batch of up to [`BATCH`] regions: 32 bytes for each (block `u32`, kind `u8`, access `u8`, zero
//!    `u16`, offset `u64`, bytes `u64`, zero `u64`), with one descriptor for each as `SCM_RIGHTS`.
//! 4. Receiver → owner, 16 bytes: magic, status (0 = all mapped), count.
//!
//! Each side gives the whole exchange one deadline, so a peer that dies, dawdles or sends garbage is an error in time.

mod wire;

use crate::WeightsError;
use crate::region::{Region, RegionAccess, RegionKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use wire::Wire;

/// Protocol version of this build.
pub const PROTOCOL_VERSION: u32 = 1;
/// Most regions of one exchange.
pub const MAX_REGIONS: u32 = 4096;
/// Regions whose descriptors travel in one message; the kernel allows 253.
pub const BATCH: usize = 64;

const MAGIC: [u8; 8] = *b"TRFSHARE";
const HELLO_BYTES: usize = 48;
const OFFER_BYTES: usize = 64;
const ENTRY_BYTES: usize = 32;
const ACK_BYTES: usize = 16;

const STATUS_OK: u32 = 0;
const STATUS_VERSION: u32 = 1;
const STATUS_FINGERPRINT: u32 = 2;
const STATUS_UNMAPPABLE: u32 = 3;

/// What a receiver got.
#[derive(Debug)]
pub struct Received {
    /// Fingerprint of the artefact that the regions belong to.
    pub fingerprint: [u8; 32],
    /// Regions in the owner's order, mapped.
    pub regions: Vec<Region>,
}

/// What a receiver accepts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expectation {
    /// The artefact it wants; any where `None`.
    pub fingerprint: Option<[u8; 32]>,
    /// Largest region it maps, in bytes.
    pub region_limit: Option<u64>,
    /// Most bytes of all regions together.
    pub total_limit: Option<u64>,
}

/// Owner side: hands `regions` to the peer and waits until it has mapped them.
///
/// # Errors
/// A peer of another version or that wants another artefact, closes, times out or breaks the protocol.
pub fn offer(
    socket: &UnixStream,
    fingerprint: [u8; 32],
    regions: &[Region],
    timeout: Duration,
) -> Result<(), WeightsError> {
    let count = u32::try_from(regions.len()).ok().filter(|&count| count <= MAX_REGIONS);
    let Some(count) = count else {
        return Err(protocol("offering", format!("{} regions are more than {MAX_REGIONS}", regions.len())));
    };
    let wire = Wire::new(socket.as_fd(), timeout);
    let hello: [u8; HELLO_BYTES] = wire.receive("waiting for the peer's greeting")?;
    if hello[..8] != MAGIC {
        return Err(protocol("waiting for the peer's greeting", "its magic bytes are wrong".to_string()));
    }
    let version = u32_at(&hello, 8);
    let wanted: [u8; 32] = hello[16..48].try_into().expect("32 bytes");
    let status = if version != PROTOCOL_VERSION {
        STATUS_VERSION
    } else if wanted != [0; 32] && wanted != fingerprint {
        STATUS_FINGERPRINT
    } else {
        STATUS_OK
    };
    let total: u64 = regions.iter().map(|region| region.len() as u64).sum();
    let mut offer = [0u8; OFFER_BYTES];
    offer[..8].copy_from_slice(&MAGIC);
    offer[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    offer[12..16].copy_from_slice(&status.to_le_bytes());
    offer[16..48].copy_from_slice(&fingerprint);
    offer[48..52].copy_from_slice(&count.to_le_bytes());
    offer[56..64].copy_from_slice(&total.to_le_bytes());
    wire.send("sending the offer", &offer, &[])?;
    match status {
        STATUS_OK => {}
        STATUS_VERSION => {
            let reason = format!(
                "it speaks version {version}, this is version {PROTOCOL_VERSION}; run the same trefoil on both sides"
            );
            return Err(protocol("greeting", reason));
        }
        _ => return Err(protocol("greeting", "it wants another artefact than this one".to_string())),
    }
    for batch in regions.chunks(BATCH) {
        let mut entries = Vec::with_capacity(batch.len() * ENTRY_BYTES);
        for region in batch {
            entries.extend(region.block().to_le_bytes());
            entries.extend([kind_code(region.kind()), access_code(region.access()), 0, 0]);
            entries.extend(region.offset().to_le_bytes());
            entries.extend((region.len() as u64).to_le_bytes());
            entries.extend([0; 8]);
        }
        let descriptors: Vec<_> = batch.iter().map(Region::descriptor).collect();
        wire.send("sending regions", &entries, &descriptors)?;
    }
    let ack: [u8; ACK_BYTES] = wire.receive("waiting for the peer to map the regions")?;
    if ack[..8] != MAGIC {
        return Err(protocol("waiting for the peer to map the regions", "its magic bytes are wrong".to_string()));
    }
    match (u32_at(&ack, 8), u32_at(&ack, 12)) {
        (STATUS_OK, mapped) if mapped == count => Ok(()),
        (STATUS_OK, mapped) => {
            Err(protocol("waiting for the peer to map the regions", format!("it says {mapped} of {count} regions")))
        }
        (status, at) => {
            Err(WeightsError::PeerRefused { reason: format!("it could not map region number {at} (status {status})") })
        }
    }
}

/// Receiver side: asks for the regions and maps them. The socket may be reused for other messages afterwards.
///
/// # Errors
/// As for [`offer`]; also regions above the limits, descriptors that are too small or unsealed.
pub fn receive(socket: &UnixStream, expectation: &Expectation, timeout: Duration) -> Result<Received, WeightsError> {
    let wire = Wire::new(socket.as_fd(), timeout);
    let mut hello = [0u8; HELLO_BYTES];
    hello[..8].copy_from_slice(&MAGIC);
    hello[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    hello[16..48].copy_from_slice(&expectation.fingerprint.unwrap_or([0; 32]));
    wire.send("greeting", &hello, &[])?;
    let step = "waiting for the peer's offer";
    let offer: [u8; OFFER_BYTES] = wire.receive(step)?;
    if offer[..8] != MAGIC {
        return Err(protocol(step, "its magic bytes are wrong".to_string()));
    }
    match u32_at(&offer, 12) {
        STATUS_OK => {}
        STATUS_VERSION => {
            let reason =
                format!("it speaks version {} of the sharing protocol, this is {PROTOCOL_VERSION}", u32_at(&offer, 8));
            return Err(WeightsError::PeerRefused { reason });
        }
        STATUS_FINGERPRINT => {
            return Err(WeightsError::PeerRefused {
                reason: "it serves another artefact than the one asked for".to_string(),
            });
        }
        status => return Err(protocol(step, format!("it answered with the unknown status {status}"))),
    }
    let fingerprint: [u8; 32] = offer[16..48].try_into().expect("32 bytes");
    if expectation.fingerprint.is_some_and(|wanted| wanted != fingerprint) {
        return Err(protocol(step, "it offers another artefact than the one asked for".to_string()));
    }
    let (count, total) = (u32_at(&offer, 48), u64_at(&offer, 56));
    if count > MAX_REGIONS {
        return Err(protocol(step, format!("it offers {count} regions, more than {MAX_REGIONS}")));
    }
    if let Some(limit) = expectation.total_limit.filter(|&limit| total > limit) {
        return Err(protocol(step, format!("it offers {total} bytes, above the limit of {limit}")));
    }
    let received = receive_regions(&wire, count, total, expectation);
    // The owner learns which region failed, before this side reports why.
    let (status, at) = match &received {
        Ok(regions) => (STATUS_OK, regions.len() as u32),
        Err((at, _)) => (STATUS_UNMAPPABLE, *at),
    };
    let mut ack = [0u8; ACK_BYTES];
    ack[..8].copy_from_slice(&MAGIC);
    ack[8..12].copy_from_slice(&status.to_le_bytes());
    ack[12..16].copy_from_slice(&at.to_le_bytes());
    let acknowledged = wire.send("acknowledging", &ack, &[]);
    let regions = received.map_err(|(_, error)| error)?;
    acknowledged?;
    Ok(Received { fingerprint, regions })
}

/// Receives and maps `count` regions; errors carry the number of the region.
fn receive_regions(
    wire: &Wire<'_>,
    count: u32,
    total: u64,
    expectation: &Expectation,
) -> Result<Vec<Region>, (u32, WeightsError)> {
    let step = "receiving regions";
    let mut regions: Vec<Region> = Vec::new();
    let mut left = total;
    while (regions.len() as u32) < count {
        let at = regions.len() as u32;
        let batch = BATCH.min((count - at) as usize);
        let mut entries = vec![0u8; batch * ENTRY_BYTES];
        let descriptors: Vec<OwnedFd> =
            wire.receive_with_descriptors(step, &mut entries, batch).map_err(|error| (at, error))?;
        for (entry, descriptor) in entries.chunks(ENTRY_BYTES).zip(descriptors) {
            let at = regions.len() as u32;
            let region = map_entry(entry, descriptor, &mut left, expectation).map_err(|error| (at, error))?;
            regions.push(region);
        }
    }
    if left != 0 {
        return Err((count, protocol(step, format!("{left} of the {total} bytes offered did not come"))));
    }
    Ok(regions)
}

fn map_entry(
    entry: &[u8],
    descriptor: OwnedFd,
    left: &mut u64,
    expectation: &Expectation,
) -> Result<Region, WeightsError> {
    let step = "receiving regions";
    let block = u32_at(entry, 0);
    let kind = kind_of(entry[4]).ok_or_else(|| protocol(step, format!("region kind {} is unknown", entry[4])))?;
    let access = access_of(entry[5]).ok_or_else(|| protocol(step, format!("access mode {} is unknown", entry[5])))?;
    let (offset, bytes) = (u64_at(entry, 8), u64_at(entry, 16));
    *left = left
        .checked_sub(bytes)
        .ok_or_else(|| protocol(step, format!("region of block {block} exceeds the bytes offered")))?;
    if let Some(limit) = expectation.region_limit.filter(|&limit| bytes > limit) {
        return Err(WeightsError::RegionTooLarge { block, bytes, limit, kind: kind.as_str() });
    }
    let len =
        usize::try_from(bytes).map_err(|_| protocol(step, format!("a region of {bytes} bytes cannot be mapped")))?;
    Region::from_descriptor(descriptor, block, kind, access, offset, len)
}

fn kind_code(kind: RegionKind) -> u8 {
    match kind {
        RegionKind::File => 1,
        RegionKind::Memfd => 2,
        RegionKind::DmaHeap => 3,
        RegionKind::Udmabuf => 4,
        RegionKind::HardwareBuffer => 5,
    }
}

fn kind_of(code: u8) -> Option<RegionKind> {
    RegionKind::ALL.into_iter().find(|&kind| kind_code(kind) == code)
}

fn access_code(access: RegionAccess) -> u8 {
    match access {
        RegionAccess::ReadOnly => 1,
        RegionAccess::ReadWrite => 2,
    }
}

fn access_of(code: u8) -> Option<RegionAccess> {
    [RegionAccess::ReadOnly, RegionAccess::ReadWrite].into_iter().find(|&access| access_code(access) == code)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn protocol(while_doing: &'static str, reason: String) -> WeightsError {
    WeightsError::PeerProtocol { while_doing, reason }
}

#[cfg(test)]
mod tests;
