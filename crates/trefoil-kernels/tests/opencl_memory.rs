//! Weights are used where they lie. The tests of this program take turns, so that nothing else changes its memory.
#![cfg(feature = "opencl")]

#[path = "support/opencl.rs"]
mod devices;

use devices::ALL;
use std::sync::{Arc, Mutex, PoisonError};
use trefoil_kernels::Operands;
use trefoil_kernels::opencl::{ActivationScale, Buffer, Codes, DeviceProbe, Epilogue, GemmSink, Kernels, Tiled};
use trefoil_weights::probe::{MARK_STRIDE, MapProbe};
use trefoil_weights::tile::TileShape;
use trefoil_weights::{Region, RegionKind};

/// Held by each test.
static TURN: Mutex<()> = Mutex::new(());

/// One row of ones times a matrix that starts at `first`.
fn gemv(kernels: &Kernels, codes: &Buffer<i8>, first: usize, [d_in, d_out]: [usize; 2]) {
    let scales = kernels.copied(&vec![0.01; d_out]).unwrap();
    let input = kernels.copied(&vec![1i8; d_in]).unwrap();
    let mut out = kernels.zeroed::<f32>(d_out).unwrap();
    let weights = Tiled { shape: TileShape::new(d_in, d_out).unwrap(), codes, first, scales: scales.vector() };
    let input = Codes { codes: input.rows("input", (0, 1, d_in, d_in)).unwrap(), scale: ActivationScale::Tensor(1.0) };
    let sink = GemmSink::F32 { out: out.rows_mut("out", (0, 1, d_out, d_out)).unwrap(), operands: Operands::F32 };
    kernels.gemm_w8a8(&input, &weights, &Epilogue::default(), sink).unwrap();
    kernels.finish().unwrap();
}

#[test]
fn regions_are_used_as_they_lie() {
    const BYTES: usize = 48 << 20;
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let resident = || trefoil_weights::memory::resident_bytes();
    for kernels in &*ALL {
        let fill = |bytes: &mut [u8]| {
            for (index, byte) in bytes.iter_mut().enumerate() {
                *byte = (index % 251) as u8;
            }
        };
        let region = Arc::new(Region::build(0, BYTES, RegionKind::Memfd, None, fill).unwrap());
        // The kernel is compiled before memory is counted: a compiler needs some.
        gemv(kernels, &kernels.zeroed(64 * 64).unwrap(), 0, [64, 64]);
        // Every page of the mapping is in memory before the device sees it.
        let sum: u64 = region.bytes().unwrap().iter().step_by(4096).map(|&byte| u64::from(byte)).sum();
        let before = resident();
        let codes: Buffer<i8> = kernels.share(region.clone()).unwrap();
        assert_eq!(codes.len(), BYTES);
        assert_eq!(codes.as_ptr().cast::<u8>(), region.as_ptr());
        {
            // `read` fails where the driver maps another address.
            let read = codes.read().unwrap();
            assert_eq!(read.as_ptr(), codes.as_ptr());
            assert_eq!(read.iter().step_by(4096).map(|&code| u64::from(code as u8)).sum::<u64>(), sum);
        }
        // A matrix of 32 MiB inside it.
        gemv(kernels, &codes, 1 << 20, [2048, 16384]);
        if let (Some(before), Some(after)) = (before, resident()) {
            // Far below the weights: outputs and scratch.
            assert!(after < before + 8 * 1024 * 1024, "{before} bytes before, {after} after");
        }
        let read_only = {
            let mut codes = codes;
            codes.write().map(drop)
        };
        assert!(read_only.unwrap_err().to_string().contains("read-only"));
    }
}

#[test]
fn the_probe_maps_regions_and_keeps_them() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let probes = DeviceProbe::all();
    assert!(!probes.is_empty() || ALL.is_empty());
    for probe in probes {
        let fill = |bytes: &mut [u8]| {
            // The marks of the probe: one per MiB, and the last byte.
            let last = bytes.len() - 1;
            for at in (0..bytes.len()).step_by(MARK_STRIDE).chain([last]) {
                bytes[at] = (at / MARK_STRIDE) as u8 ^ 0x5a;
            }
        };
        let region = Region::build(0, 3 * MARK_STRIDE + 5, RegionKind::Memfd, None, fill).unwrap();
        let mapped = probe.try_map(&region).unwrap();
        drop(region);
        drop(mapped);
        let blank = Region::build(0, MARK_STRIDE, RegionKind::Memfd, None, |_| ()).unwrap();
        assert!(probe.try_map(&blank).unwrap_err().contains("instead of"), "{}", probe.name());
    }
}
