//! Regions: one shareable allocation per block, mapped by any number of engines and processes, stored once.
//!
//! | kind | memory | shared by | sealed |
//! |---|---|---|---|
//! | [`RegionKind::File`] | the artefact's own pages | path or descriptor | by convention: artefacts are never changed |
//! | [`RegionKind::Memfd`] | anonymous shared memory | descriptor | size and, for weights, content |
//! | [`RegionKind::DmaHeap`] | device-visible memory from `/dev/dma_heap` | descriptor (dma-buf) | size, by the kernel |
//! | [`RegionKind::Udmabuf`] | a memfd exported as dma-buf by `/dev/udmabuf` | descriptor (dma-buf) | size |
//! | [`RegionKind::HardwareBuffer`] | Android's gralloc | — | not built: a clear error |
//!
//! Every creation takes a limit, because platforms refuse large regions and say so late (HeteroVDiff 3.2).

mod dmabuf;

use crate::artefact::SECTION_ALIGNMENT;
use crate::{Artefact, WeightsError};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// What kind of memory a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegionKind {
    /// A file mapping.
    File,
    /// A memfd.
    Memfd,
    /// A dma-buf from a dma-heap.
    DmaHeap,
    /// A dma-buf over a memfd.
    Udmabuf,
    /// An AHardwareBuffer.
    HardwareBuffer,
}

impl RegionKind {
    /// All kinds, portable ones first.
    pub const ALL: [RegionKind; 5] =
        [RegionKind::File, RegionKind::Memfd, RegionKind::DmaHeap, RegionKind::Udmabuf, RegionKind::HardwareBuffer];

    /// The name used in messages and reports.
    pub fn as_str(self) -> &'static str {
        match self {
            RegionKind::File => "file",
            RegionKind::Memfd => "memfd",
            RegionKind::DmaHeap => "dma-heap",
            RegionKind::Udmabuf => "udmabuf",
            RegionKind::HardwareBuffer => "hardware-buffer",
        }
    }

    /// Whether this machine can provide the kind at all, cheaply: device nodes are looked for, nothing is allocated.
    ///
    /// # Errors
    /// [`WeightsError::RegionUnavailable`] with the reason and what would change it.
    pub fn check(self) -> Result<(), WeightsError> {
        match self {
            RegionKind::File | RegionKind::Memfd => Ok(()),
            RegionKind::DmaHeap => dmabuf::find_heap().map(drop),
            RegionKind::Udmabuf => dmabuf::open_udmabuf().map(drop),
            RegionKind::HardwareBuffer => Err(WeightsError::RegionUnavailable {
                kind: self.as_str(),
                reason: if cfg!(target_os = "android") {
                    "this build does not link Android's libnativewindow".to_string()
                } else {
                    "AHardwareBuffer exists on Android only".to_string()
                },
                fix: "use memfd, or dma-heap where the device needs a dma-buf",
            }),
        }
    }

    /// Whether the processor's caches must be synchronised around accesses.
    pub fn needs_sync(self) -> bool {
        matches!(self, RegionKind::DmaHeap | RegionKind::Udmabuf)
    }
}

impl fmt::Display for RegionKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.as_str())
    }
}

/// Whether a region's content may still change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RegionAccess {
    /// Weights: written once before anyone else maps it.
    ReadOnly,
    /// State that engines hand over to each other.
    ReadWrite,
}

/// What the processor is about to do with a region, for cache synchronisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuAccess {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Both.
    ReadWrite,
}

/// One mapped region. Dropping it unmaps and closes this process's handle; others keep theirs.
#[derive(Debug)]
pub struct Region {
    block: u32,
    kind: RegionKind,
    access: RegionAccess,
    descriptor: OwnedFd,
    offset: u64,
    len: usize,
    map: MmapRaw,
}

impl Region {
    /// The region of a block of an artefact: mapped where it lies for [`RegionKind::File`], else copied once into new
    /// memory of the kind and sealed.
    pub fn from_artefact(
        artefact: &Artefact,
        block: u32,
        kind: RegionKind,
        limit: Option<u64>,
    ) -> Result<Region, WeightsError> {
        let view = artefact.region(block)?;
        if kind != RegionKind::File {
            return Region::build(block, view.bytes.len(), kind, limit, |bytes| bytes.copy_from_slice(view.bytes));
        }
        check_limit(block, view.section.bytes, kind, limit)?;
        let descriptor =
            artefact.file().as_fd().try_clone_to_owned().map_err(WeightsError::io("duplicate", artefact.path()))?;
        Region::map(descriptor, block, kind, RegionAccess::ReadOnly, view.section.offset, view.bytes.len())
    }

    /// A read-only region of `len` bytes that `fill` writes before it is sealed.
    pub fn build(
        block: u32,
        len: usize,
        kind: RegionKind,
        limit: Option<u64>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Region, WeightsError> {
        let writable = Region::shared(block, len, kind, limit)?;
        writable.begin_cpu(CpuAccess::Write)?;
        // SAFETY: the region was just made, its descriptor has been given to nobody, so this is the only view of its
        // `len` mapped bytes.
        fill(unsafe { std::slice::from_raw_parts_mut(writable.map.as_mut_ptr(), len) });
        writable.end_cpu(CpuAccess::Write)?;
        let Region { descriptor, map, .. } = writable;
        // A write seal needs every writable mapping gone.
        drop(map);
        if kind == RegionKind::Memfd {
            rustix::fs::fcntl_add_seals(&descriptor, SealFlags::WRITE | SealFlags::SEAL)
                .map_err(|error| failed("seal", kind, len)(error.into()))?;
        }
        Region::map(descriptor, block, kind, RegionAccess::ReadOnly, 0, len)
    }

    /// A zeroed region that engines and processes may write: the state that crosses a handoff. Its size is sealed.
    pub fn shared(block: u32, len: usize, kind: RegionKind, limit: Option<u64>) -> Result<Region, WeightsError> {
        kind.check()?;
        check_limit(block, len as u64, kind, limit)?;
        if len == 0 {
            return Err(WeightsError::RegionAccess { block, reason: "a region of zero bytes cannot be mapped".into() });
        }
        let padded = (len as u64).next_multiple_of(SECTION_ALIGNMENT);
        let descriptor = match kind {
            RegionKind::File => {
                let file = tempfile::tempfile().map_err(failed("create", kind, len))?;
                file.set_len(padded).map_err(failed("grow", kind, len))?;
                OwnedFd::from(file)
            }
            RegionKind::Memfd => {
                let memfd = create_memfd(padded).map_err(failed("create", kind, len))?;
                rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW)
                    .map_err(|error| failed("seal", kind, len)(error.into()))?;
                memfd
            }
            RegionKind::DmaHeap => dmabuf::allocate(padded)?,
            RegionKind::Udmabuf => {
                let memfd = create_memfd(padded).map_err(failed("create", kind, len))?;
                dmabuf::export_memfd(&memfd, padded)?
            }
            RegionKind::HardwareBuffer => unreachable!("refused by `check` above"),
        };
        Region::map(descriptor, block, kind, RegionAccess::ReadWrite, 0, len)
    }

    /// A region over a descriptor that came from elsewhere. Its size and seals are checked, because a peer that shrinks
    /// the memory under a mapping could kill this process.
    pub fn from_descriptor(
        descriptor: OwnedFd,
        block: u32,
        kind: RegionKind,
        access: RegionAccess,
        offset: u64,
        len: usize,
    ) -> Result<Region, WeightsError> {
        let wrong = |reason: String| Err(WeightsError::RegionAccess { block, reason });
        let end = offset.checked_add(len as u64);
        let have = match kind {
            RegionKind::File | RegionKind::Memfd => {
                rustix::fs::fstat(&descriptor).map_err(|error| failed("inspect", kind, len)(error.into()))?.st_size
                    as u64
            }
            RegionKind::DmaHeap | RegionKind::Udmabuf => rustix::fs::seek(&descriptor, rustix::fs::SeekFrom::End(0))
                .map_err(|error| failed("inspect", kind, len)(error.into()))?,
            RegionKind::HardwareBuffer => return wrong("hardware buffers do not travel as descriptors".to_string()),
        };
        if len == 0 || end.is_none_or(|end| end > have) {
            return wrong(format!(
                "{len} bytes at {offset} do not lie in the {have} bytes of the given {kind} descriptor"
            ));
        }
        if !offset.is_multiple_of(SECTION_ALIGNMENT) {
            return wrong(format!("offset {offset} is not a multiple of {SECTION_ALIGNMENT}"));
        }
        if kind == RegionKind::Memfd {
            let seals = rustix::fs::fcntl_get_seals(&descriptor)
                .map_err(|error| failed("read the seals of", kind, len)(error.into()))?;
            let mut needed = SealFlags::SHRINK;
            if access == RegionAccess::ReadOnly {
                needed |= SealFlags::WRITE;
            }
            if !seals.contains(needed) {
                return wrong(format!(
                    "the given memfd has seals {seals:?}, not {needed:?}; refuse what can change under a mapping"
                ));
            }
        }
        Region::map(descriptor, block, kind, access, offset, len)
    }

    fn map(
        descriptor: OwnedFd,
        block: u32,
        kind: RegionKind,
        access: RegionAccess,
        offset: u64,
        len: usize,
    ) -> Result<Region, WeightsError> {
        let mut options = MmapOptions::new();
        options.offset(offset).len(len);
        let map = match access {
            RegionAccess::ReadOnly => options.map_raw_read_only(descriptor.as_raw_fd()),
            RegionAccess::ReadWrite => options.map_raw(descriptor.as_raw_fd()),
        }
        .map_err(failed("map", kind, len))?;
        Ok(Region { block, kind, access, descriptor, offset, len, map })
    }

    /// Block number, or whatever number the maker gave a state buffer.
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Kind of memory.
    pub fn kind(&self) -> RegionKind {
        self.kind
    }

    /// Whether the content may change.
    pub fn access(&self) -> RegionAccess {
        self.access
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: empty regions are refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The descriptor that others can map; offset says where in it the region starts.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Bytes from the start of the descriptor's memory to the region.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Address of the first byte in this process: what zero-copy engines take. Page-aligned.
    pub fn as_ptr(&self) -> *const u8 {
        self.map.as_ptr()
    }

    /// Address for engines that write; errors for read-only regions.
    pub fn as_mut_ptr(&self) -> Result<*mut u8, WeightsError> {
        self.check_writable()?;
        Ok(self.map.as_mut_ptr())
    }

    /// Device and inode of the memory, which are equal exactly where two regions are views of the same one.
    pub fn file_id(&self) -> Result<(u64, u64), WeightsError> {
        let stat = rustix::fs::fstat(&self.descriptor)
            .map_err(|error| failed("inspect", self.kind, self.len)(error.into()))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// The bytes of a read-only region. For kinds that need it, call between [`Region::begin_cpu`] and [`Region::end_cpu`].
    pub fn bytes(&self) -> Result<&[u8], WeightsError> {
        if self.access != RegionAccess::ReadOnly {
            return Err(WeightsError::RegionAccess {
                block: self.block,
                reason: "its content may change under a reference; use read_at".to_string(),
            });
        }
        // SAFETY: `len` bytes are mapped until `self` is dropped. Content does not change: memfds carry a write seal, files
        // are artefacts, and dma-bufs made here are handed out as read-only regions.
        Ok(unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.len) })
    }

    /// Copies bytes out of the region.
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), WeightsError> {
        self.check_bounds(offset, into.len())?;
        // SAFETY: the range was checked; raw copies do not assume that nobody else writes, a torn value is the protocol's
        // business (handoffs are ordered by messages).
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(offset), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes into a writable region.
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<(), WeightsError> {
        self.check_writable()?;
        self.check_bounds(offset, from.len())?;
        // SAFETY: as in `read_at`; the mapping is writable.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.map.as_mut_ptr().add(offset), from.len()) };
        Ok(())
    }

    /// Makes what devices wrote visible to the processor before it touches the region. Nothing to do for file and memfd.
    pub fn begin_cpu(&self, access: CpuAccess) -> Result<(), WeightsError> {
        self.sync(access, true)
    }

    /// Makes what the processor wrote visible to devices.
    pub fn end_cpu(&self, access: CpuAccess) -> Result<(), WeightsError> {
        self.sync(access, false)
    }

    fn sync(&self, access: CpuAccess, begin: bool) -> Result<(), WeightsError> {
        if self.kind.needs_sync() {
            dmabuf::sync(&self.descriptor, access, begin).map_err(failed("synchronise", self.kind, self.len))?;
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<(), WeightsError> {
        if self.access == RegionAccess::ReadWrite {
            return Ok(());
        }
        Err(WeightsError::RegionAccess { block: self.block, reason: "it is read-only".to_string() })
    }

    fn check_bounds(&self, offset: usize, len: usize) -> Result<(), WeightsError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len) {
            return Ok(());
        }
        let reason = format!("{len} bytes at {offset} do not lie in its {} bytes", self.len);
        Err(WeightsError::RegionAccess { block: self.block, reason })
    }
}

/// All regions of an artefact in one kind, by block.
pub fn load_regions(artefact: &Artefact, kind: RegionKind, limit: Option<u64>) -> Result<Vec<Region>, WeightsError> {
    artefact.blocks().into_iter().map(|block| Region::from_artefact(artefact, block, kind, limit)).collect()
}

fn check_limit(block: u32, bytes: u64, kind: RegionKind, limit: Option<u64>) -> Result<(), WeightsError> {
    match limit {
        Some(limit) if bytes > limit => Err(WeightsError::RegionTooLarge { block, bytes, limit, kind: kind.as_str() }),
        _ => Ok(()),
    }
}

/// A memfd that can be sealed.
fn create_memfd(bytes: u64) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know the flag that says "never executable".
    let memfd = rustix::fs::memfd_create("trefoil-region", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create("trefoil-region", flags))?;
    let file = File::from(memfd);
    file.set_len(bytes)?;
    Ok(file.into())
}

/// A [`WeightsError::Region`] with its place.
fn failed(action: &'static str, kind: RegionKind, bytes: usize) -> impl FnOnce(io::Error) -> WeightsError {
    move |source| WeightsError::Region { action, kind: kind.as_str(), bytes: bytes as u64, source }
}

#[cfg(test)]
mod tests;
