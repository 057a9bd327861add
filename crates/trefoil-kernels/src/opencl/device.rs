//! Devices: what there is, which kernels each can run, on which cores.

use super::error::During;
use super::{OpenClError, Variant};
use opencl3::device::{
    CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_CPU, CL_DEVICE_TYPE_GPU, CL_FP_DENORM, CL_FP_ROUND_TO_NEAREST,
};
use opencl3::types::cl_device_id;
use rustix::thread::CpuSet;
use serde::Serialize;
use std::sync::{Mutex, PoisonError};

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
    /// A `cl_device_id`; root devices are never released.
    id: usize,
}

/// Whether the library's threads run already, and where.
enum Started {
    No,
    OnAllCores,
    On(Vec<usize>),
}

static STARTED: Mutex<Started> = Mutex::new(Started::No);

impl Device {
    /// Every device, fit or not.
    ///
    /// # Errors
    /// [`OpenClError::Library`] and [`OpenClError::NoDevice`] with what to install; errors of the library.
    pub fn list() -> Result<Vec<DeviceInfo>, OpenClError> {
        Ok(start(None)?.into_iter().map(|device| device.info).collect())
    }

    /// Device `index`. `cores` are for devices that are this machine's CPU: the library's threads will run there only. They
    /// inherit the cores of the thread that first calls the library, so the first call of a process decides, and later ones
    /// must ask for the same cores or for none.
    ///
    /// # Errors
    /// As [`Device::list`]; an unknown index; a device that cannot give the results that every engine gives; cores that come
    /// too late or do not exist.
    pub fn open(index: usize, cores: Option<&[usize]>) -> Result<Device, OpenClError> {
        let devices = start(cores)?;
        let known =
            || devices.iter().map(|device| format!("{} ({})", device.info.index, device.info.name)).collect::<Vec<_>>();
        let Some(device) = devices.get(index) else {
            return Err(OpenClError::DeviceIndex { index, known: known().join(", ") });
        };
        match &device.info.unfit {
            Some(reason) => Err(OpenClError::Device { device: device.info.name.clone(), reason: reason.clone() }),
            None => Ok(device.clone()),
        }
    }

    /// What it says about itself.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(super) fn id(&self) -> cl_device_id {
        std::ptr::with_exposed_provenance_mut(self.id)
    }
}

/// Lists the devices. The first call of a process is made in a thread pinned to `cores`.
fn start(cores: Option<&[usize]>) -> Result<Vec<Device>, OpenClError> {
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    match (&*started, cores) {
        (Started::No, None) => {
            let devices = list()?;
            *started = Started::OnAllCores;
            Ok(devices)
        }
        (Started::No, Some(cores)) => {
            let refused = |reason: String| OpenClError::Cores { cores: cores.to_vec(), reason };
            let mut set = CpuSet::new();
            for &core in cores {
                if core >= CpuSet::MAX_CPU {
                    return Err(refused(format!("core {core} is above {}", CpuSet::MAX_CPU - 1)));
                }
                set.set(core);
            }
            // A thread of its own, so that the caller keeps its cores.
            let result = std::thread::spawn(move || {
                rustix::thread::sched_setaffinity(None, &set).map_err(|error| error.to_string()).map(|()| list())
            })
            .join()
            .map_err(|_| refused("the thread that starts the library panicked".to_string()))?;
            let devices = result.map_err(refused)??;
            *started = Started::On(cores.to_vec());
            Ok(devices)
        }
        (_, None) => list(),
        (Started::On(before), Some(cores)) if before == cores => list(),
        (before, Some(cores)) => Err(OpenClError::Cores {
            cores: cores.to_vec(),
            reason: match before {
                Started::On(before) => {
                    format!("this process started the OpenCL library on cores {before:?}; use another process")
                }
                _ => {
                    "this process started the OpenCL library on all cores; name the cores in its first call".to_string()
                }
            },
        }),
    }
}

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
            devices.push(Device { info, id: id.expose_provenance() });
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
    variants.retain(|variant| *variant != Variant::X86Vnni || platform == "Portable Computing Language");
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
                // The library's threads run already.
                let error = Device::open(0, Some(&[0])).unwrap_err();
                assert!(error.to_string().contains("started the OpenCL library on all cores"), "{error}");
            }
            Err(error @ (OpenClError::Library | OpenClError::NoDevice)) => {
                assert!(error.to_string().contains("install"), "{error}");
                eprintln!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
