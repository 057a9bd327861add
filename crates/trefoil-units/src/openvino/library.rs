//! The loaded OpenVINO library: one per process, with one core object, both kept until the process ends.

use super::LIBRARY;
use super::ffi::{Devices, ElementType, Functions, RawCore, RawTensor, Shape, Status, Version};
use crate::affinity;
use crate::discovery;
use crate::one_line;
use libloading::Library;
use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, OnceLock};
use trefoil_core::DataType;

/// Oldest release whose functions and properties are used.
const OLDEST: (u32, u32) = (2025, 0);

/// OpenVINO, loaded.
pub(super) struct Loaded {
    pub(super) functions: Functions,
    core: *mut RawCore,
    /// Added to the element type numbers of releases from 2025.1 on.
    element_offset: ElementType,
    pub(super) version: String,
    pub(super) path: PathBuf,
    devices: OnceLock<Vec<String>>,
}

// SAFETY: `ov::Core` is documented as thread-safe, and the rest is immutable.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

static LOADED: OnceLock<Result<Loaded, String>> = OnceLock::new();

/// The library, loaded by the first caller. Both outcomes are final for the process.
pub(super) fn loaded() -> Result<&'static Loaded, &'static str> {
    let outcome = LOADED.get_or_init(|| {
        let (path, mut loaded) = discovery::find(&LIBRARY, open)?;
        loaded.path = path;
        Ok(loaded)
    });
    outcome.as_ref().map_err(String::as_str)
}

/// Where the library was found, if it has been loaded.
pub(super) fn path_if_loaded() -> Option<PathBuf> {
    LOADED.get()?.as_ref().ok().map(|loaded| loaded.path.clone())
}

fn open(path: &Path) -> Result<Loaded, String> {
    // SAFETY: loading runs the library's initialisers; it is the library the user installed or named.
    let library = unsafe { Library::new(path) }.map_err(|error| one_line(&error.to_string()))?;
    let functions = Functions::load(&library)?;
    // Compiled models and worker threads may outlive every value of ours, so the library is never unloaded.
    std::mem::forget(library);
    let version = version(&functions)?;
    let numbers: Vec<u32> = version.split(['.', '-']).take(2).filter_map(|part| part.parse().ok()).collect();
    if let [year, release] = numbers[..]
        && (year, release) < OLDEST
    {
        return Err(format!("it is OpenVINO {version}, older than {}.{}", OLDEST.0, OLDEST.1));
    }
    if let Some(set_log_callback) = functions.util_set_log_callback {
        // SAFETY: the callback ignores its argument, so it cannot panic or race.
        unsafe { set_log_callback(Some(ignore_log)) };
    }
    let element_offset = element_offset(&functions).ok_or("its element types are numbered in an unknown way")?;
    let mut core = ptr::null_mut();
    let status = with_all_cores(|| {
        // SAFETY: `core` is a valid place for the result.
        unsafe { (functions.core_create)(&raw mut core) }
    });
    if status != 0 || core.is_null() {
        return Err(format!("no core object: {}", last_error(&functions, status)));
    }
    Ok(Loaded { functions, core, element_offset, version, path: PathBuf::new(), devices: OnceLock::new() })
}

/// OpenVINO and its thread library look at the calling thread's cores once, when they start, and never use more. So they
/// start on a thread that may use all of the process's cores, whatever it is pinned to now.
fn with_all_cores<T>(start: impl FnOnce() -> T) -> T {
    let before = affinity::thread_cores();
    affinity::pin_current(affinity::allowed_cores());
    let result = start();
    affinity::pin_current(&before);
    result
}

unsafe extern "C" fn ignore_log(_message: *const c_char) {}

fn version(functions: &Functions) -> Result<String, String> {
    let mut version = Version { build: ptr::null(), description: ptr::null() };
    // SAFETY: `version` is a valid place for the result, and is freed by the matching function after copying.
    unsafe {
        if (functions.get_openvino_version)(&raw mut version) != 0 || version.build.is_null() {
            return Err("it does not tell its version".to_owned());
        }
        let text = CStr::from_ptr(version.build).to_string_lossy().into_owned();
        (functions.version_free)(&raw mut version);
        Ok(text)
    }
}

/// Numbers of the element types from release 2025.1 on; before, an extra `undefined` at 0 shifted all by one.
fn element_number(dtype: DataType) -> Option<ElementType> {
    Some(match dtype {
        DataType::Bool => 1,
        DataType::BF16 => 2,
        DataType::F16 => 3,
        DataType::F32 => 4,
        DataType::F64 => 5,
        DataType::I8 => 7,
        DataType::I16 => 8,
        DataType::I32 => 9,
        DataType::I64 => 10,
        DataType::U8 => 16,
        DataType::U16 => 17,
        DataType::U32 => 18,
        DataType::U64 => 19,
        DataType::Opaque => return None,
    })
}

const DTYPES: [DataType; 13] = [
    DataType::Bool,
    DataType::BF16,
    DataType::F16,
    DataType::F32,
    DataType::F64,
    DataType::I8,
    DataType::I16,
    DataType::I32,
    DataType::I64,
    DataType::U8,
    DataType::U16,
    DataType::U32,
    DataType::U64,
];

/// Tells the two numberings apart by the sizes of tensors of every type.
fn element_offset(functions: &Functions) -> Option<ElementType> {
    let size = |element: ElementType| {
        let mut extents = [3i64];
        let mut tensor: *mut RawTensor = ptr::null_mut();
        let mut bytes = 0;
        // SAFETY: valid places for the results; the tensor is freed by the matching function.
        unsafe {
            let shape = Shape { rank: 1, extents: extents.as_mut_ptr() };
            if (functions.tensor_create)(element, shape, &raw mut tensor) != 0 {
                return None;
            }
            let status = (functions.tensor_get_byte_size)(tensor, &raw mut bytes);
            (functions.tensor_free)(tensor);
            (status == 0).then_some(bytes as u64)
        }
    };
    (0..=1).find(|offset| {
        DTYPES
            .iter()
            .all(|&dtype| element_number(dtype).and_then(|number| size(number + offset)) == Some(3 * dtype.size()))
    })
}

/// The message of the call that just failed with `status` on this thread.
pub(super) fn last_error(functions: &Functions, status: Status) -> String {
    // The message of some releases is a copy to be freed and of others the library's own; not freeing it costs a few hundred
    // bytes per error and is right for both.
    let text = |pointer: *const c_char| {
        // SAFETY: both functions below return null or a terminated string.
        (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
    };
    // SAFETY: no arguments beyond a number.
    let (message, kind) = unsafe { (text((functions.get_last_err_msg)()), text((functions.get_error_info)(status))) };
    let message = message.map(|message| own_words(&message)).filter(|message| !message.is_empty());
    message.or(kind).unwrap_or_else(|| format!("status {status}"))
}

/// The message without the source positions that OpenVINO puts in front of each level of it.
fn own_words(message: &str) -> String {
    let lines = message.lines().map(str::trim).filter(|line| {
        let position = line.starts_with("Exception from ") && line.ends_with(':');
        !position && !line.is_empty()
    });
    let text = lines.collect::<Vec<_>>().join(" ");
    // "Check 'condition' failed at file:line: words" becomes the words where there are any.
    let words = text.split(" failed at ").last().and_then(|rest| rest.split_once(": ")).map(|(_, words)| words.trim());
    match words {
        Some(words) if text.starts_with("Check '") && !words.is_empty() => one_line(words),
        _ => one_line(&text),
    }
}

impl Loaded {
    /// Turns a status into a result with OpenVINO's words.
    pub(super) fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 { Ok(()) } else { Err(last_error(&self.functions, status)) }
    }

    pub(super) fn core(&self) -> *const RawCore {
        self.core
    }

    /// The element type's number in this release; `None` for types without a byte layout.
    pub(super) fn element(&self, dtype: DataType) -> Option<ElementType> {
        element_number(dtype).map(|number| number + self.element_offset)
    }

    /// The type behind a number; `Opaque` for those that Trefoil cannot move.
    pub(super) fn dtype(&self, element: ElementType) -> DataType {
        DTYPES.into_iter().find(|&dtype| self.element(dtype) == Some(element)).unwrap_or(DataType::Opaque)
    }

    /// A property of a device as text.
    pub(super) fn property(&self, device: &str, key: &str) -> Result<String, String> {
        // Two threads must not load the same plugin at once: releases differ in whether that is safe.
        static QUERY: Mutex<()> = Mutex::new(());
        let _one_at_a_time = QUERY.lock();
        let (Ok(device), Ok(key)) = (CString::new(device), CString::new(key)) else {
            return Err("a name with a NUL byte".to_owned());
        };
        let mut value = ptr::null_mut();
        // SAFETY: terminated strings, and a valid place for the result, which is copied and freed.
        unsafe {
            self.check((self.functions.core_get_property)(self.core, device.as_ptr(), key.as_ptr(), &raw mut value))?;
            let text = CStr::from_ptr(value).to_string_lossy().into_owned();
            (self.functions.free)(value);
            Ok(text)
        }
    }

    /// Devices that OpenVINO finds here: `CPU`, `GPU.0`, `NPU`… Loads every plugin, so it is asked once.
    pub(super) fn devices(&self) -> &[String] {
        self.devices.get_or_init(|| {
            let mut devices = Devices { names: ptr::null_mut(), count: 0 };
            // SAFETY: a valid place for the result, which holds `count` terminated strings until it is freed.
            unsafe {
                if (self.functions.core_get_available_devices)(self.core, &raw mut devices) != 0 {
                    return Vec::new();
                }
                let names = (0..devices.count)
                    .map(|index| CStr::from_ptr(*devices.names.add(index)).to_string_lossy().into_owned())
                    .collect();
                (self.functions.available_devices_free)(&raw mut devices);
                names
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_positions_are_left_out() {
        let message = "Exception from src/inference/src/cpp/core.cpp:133:\nException from src/core/x.cpp:10:\nCheck \
                       'a == b' failed at src/core/y.cpp:7:\nno such operator: Foo\n\n";
        assert_eq!(own_words(message), "no such operator: Foo");
        assert_eq!(own_words("plain words"), "plain words");
        assert_eq!(own_words(""), "");
    }
}
