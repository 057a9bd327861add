//! Which device an engine runs on, with which kernels, and where its host thread is.

use crate::VideoError;
use crate::engine::EngineSpec;
use std::path::PathBuf;
use trefoil_kernels::opencl::{Device, DeviceInfo, DeviceKind, Kernels, OpenClError};

/// The device of `spec`: by number as `trefoil probe` counts them, or by a part of its name or its platform's; without either the first
/// GPU that can run the kernels, else the first device that can.
///
/// # Errors
/// No library, no device, none or several that fit what was asked for.
pub fn choose_device(spec: &EngineSpec) -> Result<DeviceInfo, VideoError> {
    let fail = |reason: String| VideoError::Engine { engine: spec.to_string(), reason };
    // On the engine's cores already: some drivers start threads now.
    let devices = Device::list_on(Some(&spec.resolved_cores()))
        .map_err(|error| fail(format!("{error}; then look with `trefoil probe`")))?;
    choose(devices, spec.device.as_deref()).map_err(fail)
}

fn choose(devices: Vec<DeviceInfo>, wanted: Option<&str>) -> Result<DeviceInfo, String> {
    let list = |devices: &[DeviceInfo]| {
        let name = |device: &DeviceInfo| format!("{} ({}, {})", device.index, device.name, device.platform);
        devices.iter().map(name).collect::<Vec<_>>().join("; ")
    };
    let known = list(&devices);
    let Some(wanted) = wanted else {
        let reasons: Vec<String> =
            devices.iter().filter_map(|device| Some(format!("{}: {}", device.name, device.unfit.as_ref()?))).collect();
        let mut fit: Vec<DeviceInfo> = devices.into_iter().filter(|device| device.unfit.is_none()).collect();
        let at = fit.iter().position(|device| device.kind == DeviceKind::Gpu).unwrap_or(0);
        if fit.is_empty() {
            return Err(format!("no OpenCL device can run the kernels: {}", reasons.join("; ")));
        }
        return Ok(fit.swap_remove(at));
    };
    let fits = |device: &DeviceInfo| {
        if let Ok(index) = wanted.parse::<usize>() {
            return device.index == index;
        }
        let wanted = wanted.to_lowercase();
        [&device.name, &device.platform].into_iter().any(|name| name.to_lowercase().contains(&wanted))
    };
    let mut found: Vec<DeviceInfo> = devices.into_iter().filter(fits).collect();
    match found.len() {
        0 => Err(format!("there is no OpenCL device `{wanted}`; the devices are {known}")),
        1 => Ok(found.swap_remove(0)),
        _ => Err(format!("`{wanted}` is a part of several devices' names; give a number: {}", list(&found))),
    }
}

/// The kernels that the device prefers. Where its compiler refuses them, the next variant, which is said.
pub(super) fn open_kernels(device: &Device) -> Result<(Kernels, Vec<String>), OpenClError> {
    let cache = program_cache();
    let (mut notes, mut refused) = (Vec::new(), None);
    for &variant in &device.info().variants {
        match Kernels::new(device, variant, Some(&cache)) {
            Ok(kernels) => return Ok((kernels, notes)),
            Err(error @ OpenClError::Build { .. }) => {
                notes.push(error.to_string());
                refused.get_or_insert(error);
            }
            Err(error) => return Err(error),
        }
    }
    Err(refused.unwrap_or(OpenClError::NoDevice))
}

/// Folder of compiled programs, the one that `trefoil bench kernels` uses: `opencl` in `$TREFOIL_CACHE`, `$XDG_CACHE_HOME/trefoil`,
/// `~/.cache/trefoil` or the system's temporary folder.
fn program_cache() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("TREFOIL_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|path| path.join("trefoil")))
        .or_else(|| variable("HOME").map(|path| path.join(".cache/trefoil")))
        .unwrap_or_else(|| std::env::temp_dir().join("trefoil"))
        .join("opencl")
}

/// The calling thread on an engine's cores, so that enqueueing and waiting disturb no other engine's; it goes back when this is dropped.
#[derive(Debug)]
pub(in crate::engine) struct HostThread {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    before: Option<rustix::thread::CpuSet>,
}

impl HostThread {
    /// Goes there if the system lets it; where it runs changes no result.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    pub(in crate::engine) fn on(cores: &[usize]) -> HostThread {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let mut set = CpuSet::new();
        cores.iter().filter(|&&core| core < CpuSet::MAX_CPU).for_each(|&core| set.set(core));
        let before = sched_getaffinity(None).ok().filter(|before| *before != set);
        HostThread { before: before.filter(|_| sched_setaffinity(None, &set).is_ok()) }
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    pub(in crate::engine) fn on(_: &[usize]) -> HostThread {
        HostThread {}
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
impl Drop for HostThread {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // Where it was allowed before, it still is, unless someone else forbade it meanwhile.
            let _ = rustix::thread::sched_setaffinity(None, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: usize, name: &str, kind: DeviceKind, unfit: Option<&str>) -> DeviceInfo {
        DeviceInfo {
            index,
            name: name.to_string(),
            platform: "Vendor's Platform".to_string(),
            platform_version: "3.0".to_string(),
            driver: "1".to_string(),
            kind,
            compute_units: 2,
            unified_memory: true,
            largest_buffer: 1 << 30,
            alignment: 128,
            integer_dot_product: false,
            variants: Vec::new(),
            unfit: unfit.map(str::to_string),
        }
    }

    #[test]
    fn devices_are_chosen_by_number_by_name_or_by_kind() {
        let all = || {
            vec![
                device(0, "a processor", DeviceKind::Cpu, None),
                device(1, "Old GPU", DeviceKind::Gpu, Some("no compiler")),
                device(2, "New GPU", DeviceKind::Gpu, None),
            ]
        };
        let index = |wanted| choose(all(), wanted).map(|device| device.index);
        assert_eq!(index(None), Ok(2));
        assert_eq!(index(Some("0")), Ok(0));
        assert_eq!(index(Some("PROCESSOR")), Ok(0));
        assert_eq!(index(Some("old")), Ok(1));
        let error = index(Some("gpu")).unwrap_err();
        assert!(error.contains("several") && error.contains("1 (Old GPU") && error.contains("2 (New GPU"), "{error}");
        let error = index(Some("7")).unwrap_err();
        assert!(error.contains("no OpenCL device `7`") && error.contains("0 (a processor"), "{error}");
        assert!(index(Some("vendor's")).is_err());
        assert_eq!(choose(vec![device(0, "cpu", DeviceKind::Cpu, None)], None).unwrap().index, 0);
        let error = choose(vec![device(0, "x", DeviceKind::Gpu, Some("no compiler"))], None).unwrap_err();
        assert!(error.contains("x: no compiler"), "{error}");
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[test]
    fn the_host_thread_goes_there_and_back() {
        let here = || rustix::thread::sched_getaffinity(None).unwrap();
        let before = here();
        let core = crate::engine::allowed_cores()[0];
        {
            let _guard = HostThread::on(&[core]);
            assert!(here().is_set(core) && here().count() == 1);
        }
        assert!(here() == before);
        // A core that does not exist changes nothing.
        let _guard = HostThread::on(&[1000]);
        assert!(here() == before);
    }
}
