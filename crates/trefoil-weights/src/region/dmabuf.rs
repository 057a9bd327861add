//! dma-bufs: allocation from a dma-heap, export of a memfd through udmabuf, cache synchronisation.
//!
//! Structures and numbers are those of the kernel's `linux/dma-heap.h`, `linux/udmabuf.h` and `linux/dma-buf.h`.

use super::{CpuAccess, RegionKind, failed};
use crate::WeightsError;
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl, opcode};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

/// Heaps in order of preference: the general one, then the one behind an IOMMU-less device.
const HEAPS: [&str; 2] = ["/dev/dma_heap/system", "/dev/dma_heap/linux,cma"];
const UDMABUF: &str = "/dev/udmabuf";

/// `struct dma_heap_allocation_data`.
#[repr(C)]
struct HeapAllocation {
    len: u64,
    fd: u32,
    fd_flags: u32,
    heap_flags: u64,
}

/// `struct udmabuf_create`.
#[repr(C)]
struct UdmabufCreate {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

const HEAP_ALLOC: Opcode = opcode::read_write::<HeapAllocation>(b'H', 0);
const UDMABUF_CREATE: Opcode = opcode::write::<UdmabufCreate>(b'u', 0x42);
const BUF_SYNC: Opcode = opcode::write::<u64>(b'b', 0);
const SYNC_READ: u64 = 1;
const SYNC_WRITE: u64 = 2;
const SYNC_END: u64 = 4;
/// `UDMABUF_FLAGS_CLOEXEC`.
const UDMABUF_CLOEXEC: u32 = 1;

/// Opens the first dma-heap that there is.
pub(super) fn find_heap() -> Result<OwnedFd, WeightsError> {
    let kind = RegionKind::DmaHeap.as_str();
    let mut reasons = Vec::new();
    for path in HEAPS {
        match rustix::fs::open(Path::new(path), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(heap) => return Ok(heap),
            Err(error) => reasons.push(format!("{path}: {}", io::Error::from(error))),
        }
    }
    Err(WeightsError::RegionUnavailable {
        kind,
        reason: reasons.join(", "),
        fix: "load the dma-heap module and give this user read access, or use memfd",
    })
}

/// Opens the udmabuf device.
pub(super) fn open_udmabuf() -> Result<OwnedFd, WeightsError> {
    rustix::fs::open(Path::new(UDMABUF), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
        WeightsError::RegionUnavailable {
            kind: RegionKind::Udmabuf.as_str(),
            reason: format!("{UDMABUF}: {}", io::Error::from(error)),
            fix: "load the udmabuf module and give this user read and write access, or use memfd",
        }
    })
}

/// A dma-buf of `bytes` (a multiple of the page size) from a heap.
pub(super) fn allocate(bytes: u64) -> Result<OwnedFd, WeightsError> {
    let heap = find_heap()?;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mut data = HeapAllocation { len: bytes, fd: 0, fd_flags: flags.bits(), heap_flags: 0 };
    // SAFETY: the opcode is that of DMA_HEAP_IOCTL_ALLOC and `data` has its layout.
    unsafe { ioctl(&heap, Updater::<HEAP_ALLOC, HeapAllocation>::new(&mut data)) }
        .map_err(|error| failed("allocate", RegionKind::DmaHeap, bytes as usize)(error.into()))?;
    // SAFETY: the kernel made this descriptor for us and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(data.fd as i32) })
}

/// Exports a memfd as a dma-buf. udmabuf asks for a shrink seal and refuses a write seal.
pub(super) fn export_memfd(memfd: &OwnedFd, bytes: u64) -> Result<OwnedFd, WeightsError> {
    let kind = RegionKind::Udmabuf;
    rustix::fs::fcntl_add_seals(memfd, SealFlags::SHRINK)
        .map_err(|error| failed("seal", kind, bytes as usize)(error.into()))?;
    let device = open_udmabuf()?;
    let data = UdmabufCreate { memfd: memfd.as_raw_fd() as u32, flags: UDMABUF_CLOEXEC, offset: 0, size: bytes };
    // SAFETY: `CreateCall` is UDMABUF_CREATE over a `struct udmabuf_create` that outlives the call.
    unsafe { ioctl(&device, CreateCall(data)) }
        .map_err(|error| failed("export (see the udmabuf module's size_limit_mb)", kind, bytes as usize)(error.into()))
}

/// UDMABUF_CREATE returns the new descriptor as the call's result, for which rustix has no ready pattern.
struct CreateCall(UdmabufCreate);

// SAFETY: the opcode belongs to a `struct udmabuf_create`, `as_ptr` points to one, and the kernel only reads it.
unsafe impl Ioctl for CreateCall {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        UDMABUF_CREATE
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: a successful call returns a descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// `DMA_BUF_IOCTL_SYNC` at the begin or the end of a processor access. Interrupted calls are repeated, as the kernel asks.
pub(super) fn sync(buffer: &OwnedFd, access: CpuAccess, begin: bool) -> io::Result<()> {
    let mut flags = match access {
        CpuAccess::Read => SYNC_READ,
        CpuAccess::Write => SYNC_WRITE,
        CpuAccess::ReadWrite => SYNC_READ | SYNC_WRITE,
    };
    if !begin {
        flags |= SYNC_END;
    }
    loop {
        // SAFETY: the opcode is that of DMA_BUF_IOCTL_SYNC, whose argument is one u64 of flags.
        match unsafe { ioctl(buffer, Setter::<BUF_SYNC, u64>::new(flags)) } {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_numbers_are_the_kernel_s() {
        // _IOWR('H', 0, 24 bytes), _IOW('u', 0x42, 24 bytes), _IOW('b', 0, 8 bytes) on Linux's common encoding.
        if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
            assert_eq!((HEAP_ALLOC, UDMABUF_CREATE, BUF_SYNC), (0xc018_4800, 0x4018_7542, 0x4008_6200));
        }
    }
}
