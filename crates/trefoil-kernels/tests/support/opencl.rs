//! The OpenCL devices of this machine, for tests.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::path::PathBuf;
use std::sync::LazyLock;
use trefoil_kernels::opencl::{Device, Kernels, OpenClError, Variant};

/// Folder for compiled programs.
pub fn cache() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("opencl")
}

/// Every device that can run the kernels, or a message.
pub fn devices() -> Vec<Device> {
    let listed = match Device::list() {
        Ok(listed) => listed,
        Err(error @ (OpenClError::Library | OpenClError::NoDevice)) => {
            let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
            assert!(!is_set("TREFOIL_REQUIRE_BACKENDS") || is_set("TREFOIL_TEST_WITHOUT_OPENCL"), "{error}");
            eprintln!("skipped: {error}");
            return Vec::new();
        }
        Err(error) => panic!("{error}"),
    };
    listed
        .iter()
        .filter_map(|info| Device::open(info.index, None).map_err(|error| eprintln!("skipped: {error}")).ok())
        .collect()
}

/// Every variant of every device; fails if another one would run.
pub static ALL: LazyLock<Vec<Kernels>> = LazyLock::new(|| {
    let mut all = Vec::new();
    for device in devices() {
        let folder = cache();
        assert_eq!(Kernels::best(&device, Some(&folder)).unwrap().variant(), device.info().variants[0]);
        for &variant in &device.info().variants {
            let kernels = Kernels::new(&device, variant, Some(&folder)).unwrap();
            assert_eq!(kernels.variant(), variant);
            println!("{} of {} ({:?})", variant, device.info().name, kernels.program_origin());
            all.push(kernels);
        }
        for variant in Variant::ALL.into_iter().filter(|variant| !device.info().variants.contains(variant)) {
            let error = Kernels::new(&device, variant, None).unwrap_err();
            assert!(matches!(error, OpenClError::VariantUnavailable { .. }), "{error}");
        }
    }
    all
});
