//! Execution provider plugins of ONNX Runtime: libraries that bring devices (`ort:WebGPU`).

use super::library::{Loaded, Options, PLUGIN_API, Session, call};
use crate::affinity::core_resources;
use crate::discovery::{self, LibrarySpec};
use ort_sys::{OrtEpDevice, OrtHardwareDeviceType, OrtKeyValuePairs};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char};
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use trefoil_core::{Resource, UnitAddress, UnitKind};

/// A provider that Trefoil knows by name. Registering one more is one more row.
pub(super) struct KnownProvider {
    /// Device part of the unit address.
    pub(super) device: &'static str,
    pub(super) kind: UnitKind,
    library: LibrarySpec,
    /// What to do about a missing library.
    pub(super) fix: &'static str,
    /// What to do when the library finds no device.
    no_device_fix: &'static str,
}

/// Providers whose plugins are published as packages.
pub(super) const KNOWN: [KnownProvider; 3] = [
    KnownProvider {
        device: "WebGPU",
        kind: UnitKind::Gpu,
        library: plugin("TREFOIL_ORT_WEBGPU_LIB", "onnxruntime_providers_webgpu", "onnxruntime_ep_webgpu"),
        fix: "pip install onnxruntime-ep-webgpu==0.4.0",
        no_device_fix: "install a Vulkan driver for the GPU, or set ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 and \
                        VK_ICD_FILENAMES to SwiftShader's vk_swiftshader_icd.json (Debian: in package chromium)",
    },
    KnownProvider {
        device: "CUDA",
        kind: UnitKind::Gpu,
        library: plugin("TREFOIL_ORT_CUDA_LIB", "onnxruntime_providers_cuda", "onnxruntime/capi"),
        fix: "point TREFOIL_ORT_LIB and TREFOIL_ORT_CUDA_LIB at the libraries of onnxruntime-gpu",
        no_device_fix: "install NVIDIA's driver",
    },
    KnownProvider {
        device: "QNN",
        kind: UnitKind::Npu,
        library: plugin("TREFOIL_ORT_QNN_LIB", "onnxruntime_providers_qnn", "onnxruntime_qnn"),
        fix: "accept Qualcomm's licence, install onnxruntime-qnn and point TREFOIL_ORT_QNN_LIB at its provider library",
        no_device_fix: "run on a machine with a Qualcomm NPU",
    },
];

const fn plugin(variable: &'static str, stem: &'static str, package_folder: &'static str) -> LibrarySpec {
    LibrarySpec { variable, stem, package_folder, system: false }
}

/// Why a known provider cannot be used, and what would help.
#[derive(Debug, Clone)]
pub(super) struct Missing {
    pub(super) reason: String,
    pub(super) fix: String,
}

/// A registered provider's devices.
#[derive(Debug, Clone)]
pub(super) struct Provider {
    /// Version of the plugin, where it tells one.
    pub(super) version: Option<String>,
    /// Device name and vendor as the driver tells them.
    pub(super) description: Option<String>,
    /// Whether the driver computes on the CPU (SwiftShader, lavapipe).
    pub(super) software: bool,
    /// One unit is one device, the provider's first.
    device: Device,
}

/// A device of the environment, which keeps it until the process ends.
#[derive(Debug, Clone, Copy)]
struct Device(*const OrtEpDevice);

// SAFETY: an immutable object of the environment.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Outcomes of registering each of [`KNOWN`], final for the process.
static REGISTERED: Mutex<[Option<Result<Provider, Missing>>; KNOWN.len()]> = Mutex::new([const { None }; KNOWN.len()]);

/// The provider with that device name, registered with ONNX Runtime by the first caller.
///
/// # Errors
/// `None` for a name that is not known; inside, why a known provider cannot be used.
pub(super) fn provider(loaded: &'static Loaded, device: &str) -> Option<Result<Provider, Missing>> {
    let index = KNOWN.iter().position(|known| known.device == device)?;
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    Some(registered[index].get_or_insert_with(|| register(loaded, &KNOWN[index])).clone())
}

/// The plugin versions of the providers that were registered so far, by device name.
pub(super) fn versions() -> Vec<(&'static str, String)> {
    let registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let version = |(known, outcome): (&'static KnownProvider, &Option<Result<Provider, Missing>>)| {
        Some((known.device, outcome.as_ref()?.as_ref().ok()?.version.clone()?))
    };
    KNOWN.iter().zip(registered.iter()).filter_map(version).collect()
}

fn register(loaded: &'static Loaded, known: &KnownProvider) -> Result<Provider, Missing> {
    let missing = |reason: String, fix: &str| Missing { reason, fix: fix.to_owned() };
    if loaded.api_version < PLUGIN_API {
        let reason =
            format!("ONNX Runtime {} is older than 1.{PLUGIN_API} and has no provider plugins", loaded.version);
        return Err(missing(reason, super::FIX));
    }
    let name = CString::new(known.device).map_err(|_| missing("odd name".to_owned(), known.fix))?;
    discovery::find(&known.library, |path| register_library(loaded, &name, path))
        .map_err(|reason| missing(reason, known.fix))?;
    let no_device = || missing(format!("the {} provider finds no device here", known.device), known.no_device_fix);
    let devices = devices(loaded).map_err(|reason| missing(reason, known.no_device_fix))?;
    let is_own = |name: &str| name.to_lowercase().starts_with(&known.device.to_lowercase());
    let (_, device) = devices.iter().find(|(name, _)| is_own(name)).ok_or_else(no_device)?;
    let facts = Facts::of(loaded, *device);
    let provider = Provider {
        version: facts.version(),
        description: facts.description(),
        software: facts.is_software(),
        device: *device,
    };
    provider.probe(loaded).map_err(|reason| missing(reason, known.no_device_fix))?;
    Ok(provider)
}

/// An ONNX file: `y = Relu(x)` of an f32 scalar, IR version 8, operator set 13.
const PROBE_MODEL: &[u8] = b"\x08\x08\x3a\x2b\x0a\x0c\x0a\x01x\x12\x01y\x22\x04Relu\x12\x01g\
    \x5a\x0b\x0a\x01x\x12\x06\x0a\x04\x08\x01\x12\x00\x62\x0b\x0a\x01y\x12\x06\x0a\x04\x08\x01\x12\x00\
    \x42\x04\x0a\x00\x10\x0d";

fn register_library(loaded: &'static Loaded, name: &CStr, path: &Path) -> Result<(), String> {
    let path = CString::new(path.to_str().ok_or("its path is not UTF-8")?).map_err(|_| "odd path")?;
    // SAFETY: the environment is live, strings are terminated and copied; the function exists from `PLUGIN_API` on.
    unsafe { call!(loaded, RegisterExecutionProviderLibrary(loaded.environment, name.as_ptr(), path.as_ptr())) }
}

/// All devices of all registered providers, with the provider's name.
fn devices(loaded: &'static Loaded) -> Result<Vec<(String, Device)>, String> {
    let (mut list, mut count) = (ptr::null(), 0);
    // SAFETY: valid places for the results; the list belongs to the environment and is read at once.
    unsafe {
        call!(loaded, GetEpDevices(loaded.environment, &raw mut list, &raw mut count))?;
        Ok((0..count)
            .map(|index| {
                let device = *list.add(index);
                (text(((*loaded.api).EpDevice_EpName)(device)).unwrap_or_default(), Device(device))
            })
            .collect())
    }
}

/// # Safety
/// `pointer` is null or a terminated string.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: by the function's contract.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// What ONNX Runtime tells about a device.
struct Facts {
    is_cpu: bool,
    vendor: String,
    pairs: Vec<(String, String)>,
}

impl Facts {
    fn of(loaded: &'static Loaded, device: Device) -> Self {
        // SAFETY: a device of the live environment, whose parts belong to it.
        unsafe {
            let hardware = ((*loaded.api).EpDevice_Device)(device.0);
            let mut pairs = key_values(loaded, ((*loaded.api).EpDevice_EpMetadata)(device.0));
            pairs.extend(key_values(loaded, ((*loaded.api).HardwareDevice_Metadata)(hardware)));
            Self {
                is_cpu: ((*loaded.api).HardwareDevice_Type)(hardware)
                    == OrtHardwareDeviceType::OrtHardwareDeviceType_CPU,
                vendor: text(((*loaded.api).HardwareDevice_Vendor)(hardware)).unwrap_or_default(),
                pairs,
            }
        }
    }

    fn is_software(&self) -> bool {
        let named = |text: &str| {
            let text = text.to_lowercase();
            ["swiftshader", "llvmpipe", "lavapipe", "software"].iter().any(|name| text.contains(name))
        };
        self.is_cpu || named(&self.vendor) || self.pairs.iter().any(|(_, value)| named(value))
    }

    fn version(&self) -> Option<String> {
        self.pairs.iter().find(|(key, _)| key.to_lowercase() == "version").map(|(_, value)| value.clone())
    }

    fn description(&self) -> Option<String> {
        let named = self.pairs.iter().find(|(key, _)| {
            let key = key.to_lowercase();
            key.contains("description") || key.contains("device_name")
        });
        named.map(|(_, value)| value.clone()).or_else(|| (!self.vendor.is_empty()).then(|| self.vendor.clone()))
    }
}

/// # Safety
/// `pairs` is null or a live object.
unsafe fn key_values(loaded: &'static Loaded, pairs: *const OrtKeyValuePairs) -> Vec<(String, String)> {
    if pairs.is_null() {
        return Vec::new();
    }
    let (mut keys, mut values, mut count) = (ptr::null(), ptr::null(), 0);
    // SAFETY: by the function's contract; the lists belong to the object and hold `count` terminated strings each.
    unsafe {
        ((*loaded.api).GetKeyValuePairs)(pairs, &raw mut keys, &raw mut values, &raw mut count);
        (0..count).filter_map(|index| Some((text(*keys.add(index))?, text(*values.add(index))?))).collect()
    }
}

impl Provider {
    /// Starts the device by compiling the smallest model: a provider lists devices whose driver may still refuse.
    fn probe(&self, loaded: &'static Loaded) -> Result<(), String> {
        // SAFETY: a valid place for the result.
        let options = Options::new(loaded, |place| unsafe { call!(loaded, CreateSessionOptions(place)) })?;
        self.append(loaded, &options)?;
        let (model, length) = (PROBE_MODEL.as_ptr().cast(), PROBE_MODEL.len());
        // SAFETY: live environment and options, a model of that length and a valid place for the result.
        Session::new(loaded, |place| unsafe {
            call!(loaded, CreateSessionFromArray(loaded.environment, model, length, options.get(), place))
        })
        .map(drop)
    }

    /// Makes a session run on this provider.
    pub(super) fn append(&self, loaded: &'static Loaded, options: &Options) -> Result<(), String> {
        // SAFETY: live options and a device of the live environment; no provider options.
        unsafe {
            call!(
                loaded,
                SessionOptionsAppendExecutionProvider_V2(
                    options.get(),
                    loaded.environment,
                    &raw const self.device.0,
                    1,
                    ptr::null(),
                    ptr::null(),
                    0
                )
            )
        }
    }

    /// A software adapter computes on the CPU, so its unit holds the cores that the process may use.
    pub(super) fn resources(&self, kind: UnitKind, device: &str) -> BTreeSet<Resource> {
        if self.software {
            return core_resources(&UnitAddress::new("ort", device)).unwrap_or_default();
        }
        device_resource(kind)
    }
}

/// ONNX Runtime offers the first device, which other backends call the same.
pub(super) fn device_resource(kind: UnitKind) -> BTreeSet<Resource> {
    let name = match kind {
        UnitKind::Npu => "npu0",
        _ => "gpu0",
    };
    BTreeSet::from([Resource::Device(name.to_owned())])
}
