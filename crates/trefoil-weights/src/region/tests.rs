use super::*;

#[test]
fn a_built_memfd_is_sealed_and_readable_through_its_descriptor() {
    let region = Region::build(3, 100_000, RegionKind::Memfd, None, |bytes| bytes.fill(7)).unwrap();
    assert_eq!(region.bytes().unwrap(), vec![7u8; 100_000]);
    assert!(region.as_ptr().addr().is_multiple_of(4096));
    let seals = rustix::fs::fcntl_get_seals(region.descriptor()).unwrap();
    assert!(seals.contains(SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    // The seal is real: a writable mapping and a truncation are both refused by the kernel.
    let file = File::from(region.descriptor().try_clone_to_owned().unwrap());
    assert!(file.set_len(0).is_err());
    assert!(MmapOptions::new().len(4096).map_raw(&file).is_err());
    assert!(region.write_at(0, &[1]).unwrap_err().to_string().contains("read-only"));
    assert!(region.as_mut_ptr().is_err());
    // A second handle is the same memory.
    let twin = Region::from_descriptor(file.into(), 3, RegionKind::Memfd, RegionAccess::ReadOnly, 0, 100_000).unwrap();
    assert_eq!(twin.file_id().unwrap(), region.file_id().unwrap());
    assert_eq!(twin.bytes().unwrap(), region.bytes().unwrap());
}

#[test]
fn shared_state_is_seen_by_every_handle_and_bounded() {
    for kind in [RegionKind::Memfd, RegionKind::File] {
        let region = Region::shared(0, 1000, kind, None).unwrap();
        let descriptor = region.descriptor().try_clone_to_owned().unwrap();
        let twin = Region::from_descriptor(descriptor, 0, kind, RegionAccess::ReadWrite, 0, 1000).unwrap();
        region.begin_cpu(CpuAccess::Write).unwrap();
        region.write_at(996, &[1, 2, 3, 4]).unwrap();
        region.end_cpu(CpuAccess::Write).unwrap();
        let mut seen = [0; 4];
        twin.read_at(996, &mut seen).unwrap();
        assert_eq!(seen, [1, 2, 3, 4]);
        assert!(region.write_at(997, &[0; 4]).is_err());
        assert!(region.read_at(usize::MAX, &mut seen).is_err());
        assert!(region.bytes().unwrap_err().to_string().contains("read_at"));
    }
}

#[test]
fn descriptors_that_could_change_under_a_mapping_are_refused() {
    let unsealed = create_memfd(65_536).unwrap();
    let refuse = |descriptor: OwnedFd, kind, access, offset, len| {
        Region::from_descriptor(descriptor, 5, kind, access, offset, len).unwrap_err().to_string()
    };
    let message = refuse(unsealed.try_clone().unwrap(), RegionKind::Memfd, RegionAccess::ReadWrite, 0, 10);
    assert!(message.contains("seals"), "{message}");
    // A writable region is not accepted where read-only weights are expected.
    let shared = Region::shared(0, 10, RegionKind::Memfd, None).unwrap();
    let descriptor = shared.descriptor().try_clone_to_owned().unwrap();
    assert!(refuse(descriptor, RegionKind::Memfd, RegionAccess::ReadOnly, 0, 10).contains("seals"));
    for (offset, len) in [(0, 65_537), (65_536, 1), (u64::MAX, 2), (0, 0), (0, usize::MAX)] {
        let message = refuse(unsealed.try_clone().unwrap(), RegionKind::File, RegionAccess::ReadOnly, offset, len);
        assert!(message.contains("do not lie in"), "{message}");
    }
    assert!(refuse(unsealed, RegionKind::File, RegionAccess::ReadOnly, 4096, 1).contains("multiple"));
}

#[test]
fn limits_and_empty_regions_are_errors() {
    let error = Region::shared(7, 100, RegionKind::Memfd, Some(99)).unwrap_err().to_string();
    assert_eq!(
        error,
        "region of block 7 needs 100 bytes, above the limit of 99 for kind memfd; choose another kind, or raise the limit if \
         `trefoil probe` shows that it maps"
    );
    assert!(Region::shared(7, 0, RegionKind::Memfd, None).is_err());
    assert!(Region::shared(7, usize::MAX - 70_000, RegionKind::Memfd, None).is_err());
}

#[test]
fn kinds_without_their_device_say_what_is_missing() {
    let error = Region::shared(0, 4096, RegionKind::HardwareBuffer, None).unwrap_err().to_string();
    assert!(error.contains("hardware-buffer") && error.contains("memfd"), "{error}");
    for (kind, device) in [(RegionKind::DmaHeap, "/dev/dma_heap"), (RegionKind::Udmabuf, "/dev/udmabuf")] {
        match kind.check() {
            Ok(()) => {
                // The device is there: then the whole path must work.
                let region = Region::build(1, 100_000, kind, None, |bytes| bytes.fill(9)).unwrap();
                region.begin_cpu(CpuAccess::Read).unwrap();
                assert!(region.bytes().unwrap().iter().all(|&byte| byte == 9));
                region.end_cpu(CpuAccess::Read).unwrap();
            }
            Err(error) => {
                eprintln!("skipped: {error}");
                let error = error.to_string();
                assert!(error.contains(device) && error.contains("memfd"), "{error}");
            }
        }
    }
}
