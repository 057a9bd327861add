//! Devices: what there is, which kernels each can run, on which cores.

use super::cores::{self, Lease};
use super::error::During;
use super::{OpenClError, Variant};
use opencl3::device::{
    CL_DEVICE_PARTITION_BY_COUNTS, CL_DEVICE_PARTITION_BY_COUNTS_LIST_END, CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_CPU,
    CL_DEVICE_TYPE_GPU, CL_FP_DENORM, CL_FP_ROUND_TO_NEAREST,
};
use opencl3::types::cl_device_id;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The platform whose CPU driver starts all its threads in the library's first call, takes inline assembly, and honours sub-devices.
const POCL: &str = "Portable Computing Language";

/// What kind of processor a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// This machine's processor.
    Cpu,
    /// A GPU.
    Gpu,
    /// Something else.
    Other,
}

/// What a device says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// Number under which it is opened: platforms in the library's order, devices in the platform's.
    pub index: usize,
    /// Name.
    pub name: String,
    /// Name of its platform.
    pub platform: String,
    /// Version of its platform.
    pub platform_version: String,
    /// Version of its driver.
    pub driver: String,
    /// Kind of processor.
    pub kind: DeviceKind,
    /// Things that compute at a time, as the driver counts them.
    pub compute_units: u32,
    /// Whether it works on the host's memory.
    pub unified_memory: bool,
    /// Largest buffer, bytes.
    pub largest_buffer: u64,
    /// Alignment that a shared host address must have, bytes.
    pub alignment: usize,
    /// Whether it multiplies and sums four packed bytes in one instruction (`cl_khr_integer_dot_product`).
    pub integer_dot_product: bool,
    /// Variants of the kernels that it can run, preferred one first.
    pub variants: Vec<Variant>,
    /// Why it cannot run the kernels, if it cannot.
    pub unfit: Option<String>,
}

/// A device to run kernels on.
#[derive(Debug, Clone)]
pub struct Device {
    info: DeviceInfo,
    /// A `cl_device_id`; neither root devices nor the sub-devices made here are ever released.
    id: usize,
    /// Keeps the driver's threads where they were asked to be.
    lease: Option<Arc<Lease>>,
}

impl Device {
    /// Every device, fit or not.
    ///
    /// # Errors
    /// [`OpenClError::Library`] and [`OpenClError::NoDevice`] with what to install; errors of the library.
    pub fn list() -> Result<Vec<DeviceInfo>, OpenClError> {
        Device::list_on(None)
    }

    /// As [`Device::list`], for somebody who will open one of them on `cores`: if this is the process's first call, the drivers' threads
    /// start there.
    ///
    /// # Errors
    /// As [`Device::list`]; cores that do not exist.
    pub fn list_on(cores: Option<&[usize]>) -> Result<Vec<DeviceInfo>, OpenClError> {
        Ok(cores::call(cores, list)?.into_iter().map(|device| device.info).collect())
    }

    /// Device `index`. `cores` are for devices that are this machine's CPU: the driver's threads run there only, as many of them as
    /// there are cores, as long as a device that was opened with cores or anything made from it lives. The threads belong to the
    /// process, so two devices with different cores are an error; without cores a device takes the threads as they are.
    ///
    /// # Errors
    /// As [`Device::list`]; an unknown index; a device that cannot give the results that every engine gives; cores that do not exist
    /// or that somebody else excludes.
    pub fn open(index: usize, cores: Option<&[usize]>) -> Result<Device, OpenClError> {
        let devices = cores::call(cores, list)?;
        let known =
            || devices.iter().map(|device| format!("{} ({})", device.info.index, device.info.name)).collect::<Vec<_>>();
        let Some(device) = devices.get(index) else {
            return Err(OpenClError::DeviceIndex { index, known: known().join(", ") });
        };
        if let Some(reason) = &device.info.unfit {
            return Err(OpenClError::Device { device: device.info.name.clone(), reason: reason.clone() });
        }
        let mut device = device.clone();
        if let (DeviceKind::Cpu, Some(cores)) = (device.info.kind, cores) {
            let is_pocl = device.is_pocl();
            device.lease = Some(cores::lease(cores, is_pocl)?);
            if is_pocl && cores.len() < device.info.compute_units as usize {
                device.use_units(cores.len() as u32);
            }
        }
        Ok(device)
    }

    /// What it says about itself.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Cores that its threads were bound to; `None` for devices that are no CPU, or were opened without cores.
    pub fn cores(&self) -> Option<&[usize]> {
        self.lease.as_deref().map(Lease::cores)
    }

    /// Whether PoCL drives it.
    pub(super) fn is_pocl(&self) -> bool {
        self.info.platform == POCL
    }

    pub(super) fn id(&self) -> cl_device_id {
        std::ptr::with_exposed_provenance_mut(self.id)
    }

    /// Becomes the sub-device of its first `units` compute units: two threads that take turns on one core evict each other's operands.
    /// A driver that makes none goes on with all its threads, on the same cores.
    fn use_units(&mut self, units: u32) {
        // Made once per device and size and never released: a queue may outlive whoever asked.
        static MADE: Mutex<BTreeMap<(usize, u32), usize>> = Mutex::new(BTreeMap::new());
        let mut sub_devices = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        let known = sub_devices.get(&(self.id, units)).copied();
        let make = || {
            let partition = [CL_DEVICE_PARTITION_BY_COUNTS, units as isize, CL_DEVICE_PARTITION_BY_COUNTS_LIST_END, 0];
            let parts = opencl3::device::Device::new(self.id()).create_sub_devices(&partition).ok()?;
            let ids: Vec<usize> = parts.iter().map(|part| part.id().expose_provenance()).collect();
            parts.into_iter().for_each(std::mem::forget);
            ids.first().copied()
        };
        let Some(id) = known.or_else(make) else { return };
        sub_devices.insert((self.id, units), id);
        self.id = id;
        self.info.compute_units = units;
    }
}

/// Every device of every platform.
fn list() -> Result<Vec<Device>, OpenClError> {
    let mut devices = Vec::new();
    for platform in opencl3::platform::get_platforms().during("list the platforms")? {
        let platform_name = platform.name().during("name a platform")?;
        let platform_version = platform.version().during("read a platform's version")?;
        let ids = match platform.get_devices(CL_DEVICE_TYPE_ALL).during("list the devices") {
            Err(OpenClError::NoDevice) => continue,
            other => other?,
        };
        for id in ids {
            let info = inspect(devices.len(), id, (&platform_name, &platform_version)).during("inspect a device")?;
            devices.push(Device { info, id: id.expose_provenance(), lease: None });
        }
    }
    if devices.is_empty() { Err(OpenClError::NoDevice) } else { Ok(devices) }
}

fn inspect(index: usize, id: cl_device_id, (platform, platform_version): (&str, &str)) -> opencl3::Result<DeviceInfo> {
    let device = opencl3::device::Device::new(id);
    let of_type = device.dev_type()?;
    let kind = if of_type & CL_DEVICE_TYPE_CPU != 0 {
        DeviceKind::Cpu
    } else if of_type & CL_DEVICE_TYPE_GPU != 0 {
        DeviceKind::Gpu
    } else {
        DeviceKind::Other
    };
    let extensions = device.extensions()?;
    let integer_dot_product = extensions.split_whitespace().any(|name| name == "cl_khr_integer_dot_product");
    let arithmetic = device.single_fp_config()?;
    let unfit = if !device.available()? {
        Some("the driver says that it is not available".to_string())
    } else if !device.compiler_available()? {
        Some("its driver has no compiler".to_string())
    } else if !device.endian_little()? {
        Some("it is big-endian, the codes are little-endian".to_string())
    } else if arithmetic & CL_FP_DENORM == 0 || arithmetic & CL_FP_ROUND_TO_NEAREST == 0 {
        Some("its single precision does not keep subnormal numbers or does not round to nearest".to_string())
    } else {
        None
    };
    let mut variants = Variant::available(kind, integer_dot_product);
    // Inline assembly needs a driver that compiles for the processor directly, as PoCL does; others refuse it.
    variants.retain(|variant| *variant != Variant::X86Vnni || platform == POCL);
    Ok(DeviceInfo {
        index,
        name: device.name()?,
        platform: platform.to_string(),
        platform_version: platform_version.to_string(),
        driver: device.driver_version()?,
        kind,
        compute_units: device.max_compute_units()?,
        unified_memory: device.host_unified_memory()?,
        largest_buffer: device.max_mem_alloc_size()?,
        // The driver counts bits.
        alignment: (device.mem_base_addr_align()? as usize / 8).max(64),
        integer_dot_product,
        variants,
        unfit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_listed_or_the_error_says_what_to_install() {
        match Device::list() {
            Ok(devices) => {
                for (index, device) in devices.iter().enumerate() {
                    assert_eq!(device.index, index);
                    assert!(!device.variants.is_empty() && !device.name.is_empty());
                }
                let error = Device::open(devices.len(), None).unwrap_err();
                assert!(error.to_string().contains(&devices[0].name), "{error}");
                assert_eq!(Device::open(0, None).unwrap().cores(), None);
            }
            Err(error @ (OpenClError::Library | OpenClError::NoDevice)) => {
                assert!(error.to_string().contains("install"), "{error}");
                eprintln!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
