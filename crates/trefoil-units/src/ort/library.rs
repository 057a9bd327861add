//! The loaded ONNX Runtime library: one per process, with one environment, both kept until the process ends.

use super::LIBRARY;
use crate::{discovery, one_line};
use libloading::Library;
use ort_sys::{
    ONNXTensorElementDataType as Element, OrtAllocator, OrtAllocatorType, OrtApi, OrtApiBase, OrtEnv, OrtLoggingLevel,
    OrtMemType, OrtMemoryInfo, OrtStatusPtr,
};
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use trefoil_core::DataType;

/// Oldest and newest interface versions whose functions are used; the newest is what `ort-sys` is built for.
const OLDEST_API: u32 = 17;
const NEWEST_API: u32 = 24;

/// Interface version from which on execution provider plugins can be registered.
pub(super) const PLUGIN_API: u32 = 22;

/// ONNX Runtime, loaded.
pub(super) struct Loaded {
    /// The function table. A library older than [`NEWEST_API`] has a shorter one, so no reference to it is ever made, and
    /// functions newer than [`Loaded::api_version`] are never read.
    pub(super) api: *const OrtApi,
    pub(super) api_version: u32,
    pub(super) environment: *mut OrtEnv,
    pub(super) cpu_memory: *mut OrtMemoryInfo,
    pub(super) allocator: *mut OrtAllocator,
    pub(super) version: String,
    pub(super) path: PathBuf,
}

// SAFETY: the function table, the environment, the CPU memory description and the default allocator are thread-safe by ONNX
// Runtime's documentation and live until the process ends.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// Calls a function of the table that returns a status, and turns that into a result with ONNX Runtime's words. Expands to
/// unsafe code: the caller vouches for the arguments and for the function's presence in [`Loaded::api_version`].
macro_rules! call {
    ($loaded:expr, $function:ident($($argument:expr),* $(,)?)) => {{
        let api = $loaded.api;
        $loaded.check(((*api).$function)($($argument),*))
    }};
}
pub(super) use call;

/// An owning pointer to one of ONNX Runtime's objects.
macro_rules! owned {
    ($($name:ident($raw:ty) freed by $free:ident;)*) => {
        $(pub(super) struct $name {
            raw: std::ptr::NonNull<$raw>,
            loaded: &'static Loaded,
        }

        // SAFETY: the object has no thread affinity; `&mut` access of the owner keeps uses apart.
        unsafe impl Send for $name {}

        impl $name {
            /// Takes over what `create` puts into the place it is given.
            pub(super) fn new(
                loaded: &'static Loaded,
                create: impl FnOnce(*mut *mut $raw) -> Result<(), String>,
            ) -> Result<Self, String> {
                let mut raw = std::ptr::null_mut();
                create(&raw mut raw)?;
                let raw = std::ptr::NonNull::new(raw).ok_or("ONNX Runtime returned nothing")?;
                Ok(Self { raw, loaded })
            }

            pub(super) fn get(&self) -> *mut $raw {
                self.raw.as_ptr()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the matching function and freed once.
                unsafe { ((*self.loaded.api).$free)(self.raw.as_ptr()) };
            }
        })*
    };
}

owned! {
    Options(ort_sys::OrtSessionOptions) freed by ReleaseSessionOptions;
    Session(ort_sys::OrtSession) freed by ReleaseSession;
    Value(ort_sys::OrtValue) freed by ReleaseValue;
    TypeInfo(ort_sys::OrtTypeInfo) freed by ReleaseTypeInfo;
}

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
    type GetBase = unsafe extern "C" fn() -> *const OrtApiBase;
    // SAFETY: loading runs the library's initialisers; it is the library the user installed or named.
    let library = unsafe { Library::new(path) }.map_err(|error| one_line(&error.to_string()))?;
    // SAFETY: the symbol is the C function of that name and signature.
    let get_base = *unsafe { library.get::<GetBase>(b"OrtGetApiBase\0") }
        .map_err(|_| "it lacks the function OrtGetApiBase".to_owned())?;
    // Sessions and threads may outlive every value of ours, so the library is never unloaded.
    std::mem::forget(library);
    // SAFETY: the base is a static of the library, or null.
    let base = unsafe { get_base().as_ref() }.ok_or("OrtGetApiBase returns nothing")?;
    // SAFETY: returns a static string.
    let version = unsafe { CStr::from_ptr((base.GetVersionString)()) }.to_string_lossy().into_owned();
    // Release 1.N has interface versions up to N. Asking for more prints a complaint, so it is not tried.
    let mut numbers = version.split('.').map(str::parse::<u32>);
    let (Some(Ok(1)), Some(Ok(release))) = (numbers.next(), numbers.next()) else {
        return Err(format!("it is ONNX Runtime {version}, which this build does not know"));
    };
    if release < OLDEST_API {
        return Err(format!("it is ONNX Runtime {version}, older than 1.{OLDEST_API}"));
    }
    let api_version = release.min(NEWEST_API);
    // SAFETY: returns a static table, or null.
    let api = unsafe { (base.GetApi)(api_version) };
    if api.is_null() {
        return Err(format!("ONNX Runtime {version} does not offer interface version {api_version}"));
    }
    let mut loaded = Loaded {
        api,
        api_version,
        environment: ptr::null_mut(),
        cpu_memory: ptr::null_mut(),
        allocator: ptr::null_mut(),
        version,
        path: PathBuf::new(),
    };
    let (mut environment, mut cpu_memory, mut allocator) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let (arena, default) = (OrtAllocatorType::OrtArenaAllocator, OrtMemType::OrtMemTypeDefault);
    let (fatal, name) = (OrtLoggingLevel::ORT_LOGGING_LEVEL_FATAL, c"trefoil".as_ptr());
    // SAFETY: valid places for the results, and a static logging function and name.
    unsafe {
        call!(loaded, CreateEnvWithCustomLogger(ignore_log, ptr::null_mut(), fatal, name, &raw mut environment))?;
        call!(loaded, CreateCpuMemoryInfo(arena, default, &raw mut cpu_memory))?;
        call!(loaded, GetAllocatorWithDefaultOptions(&raw mut allocator))?;
        // Best effort: the official Linux builds have no telemetry.
        let _ = call!(loaded, DisableTelemetryEvents(environment));
    }
    (loaded.environment, loaded.cpu_memory, loaded.allocator) = (environment, cpu_memory, allocator);
    Ok(loaded)
}

/// Warnings of ONNX Runtime would tear the program's tables; errors come back as statuses with the same words.
unsafe extern "system" fn ignore_log(
    _parameter: *mut c_void,
    _severity: OrtLoggingLevel,
    _category: *const c_char,
    _id: *const c_char,
    _location: *const c_char,
    _message: *const c_char,
) {
}

impl Loaded {
    /// Turns a status into a result with ONNX Runtime's words, and frees it.
    pub(super) fn check(&self, status: OrtStatusPtr) -> Result<(), String> {
        if status.0.is_null() {
            return Ok(());
        }
        // SAFETY: a live status, whose message is copied before it is released once.
        unsafe {
            let message = CStr::from_ptr(((*self.api).GetErrorMessage)(status.0)).to_string_lossy().into_owned();
            ((*self.api).ReleaseStatus)(status.0);
            Err(own_words(&message))
        }
    }

    /// Copies and frees a string that ONNX Runtime allocated.
    ///
    /// # Safety
    /// `text` is null or a terminated string of the default allocator.
    pub(super) unsafe fn take_text(&self, text: *mut c_char) -> Option<String> {
        if text.is_null() {
            return None;
        }
        // SAFETY: by the function's contract.
        unsafe {
            let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
            let _ = call!(self, AllocatorFree(self.allocator, text.cast()));
            Some(copy)
        }
    }
}

/// The message without the parts that tell only where in the source it was made: file positions, function signatures,
/// the conditions of failed checks.
fn own_words(message: &str) -> String {
    let words = message.split_whitespace().filter(|word| {
        let position = word.rsplit_once(':').is_some_and(|(file, line)| {
            [".cc", ".h"].iter().any(|suffix| file.ends_with(suffix)) && line.chars().all(|c| c.is_ascii_digit())
        });
        !position
    });
    let mut text = words.collect::<Vec<_>>().join(" ");
    // "signature [ONNXRuntimeError] : code : NAME : words" and "signature condition was false. words".
    if let Some((_, rest)) = text.rsplit_once("[ONNXRuntimeError] : ") {
        text = rest.splitn(3, " : ").last().unwrap_or(rest).to_owned();
    }
    if let Some((_, rest)) = text.split_once(" was false. ")
        && !rest.is_empty()
    {
        text = rest.to_owned();
    }
    one_line(&text)
}

/// ONNX Runtime's element type; `None` for types without a byte layout.
pub(super) fn element(dtype: DataType) -> Option<Element> {
    use Element::{
        ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
    };
    Some(match dtype {
        DataType::F32 => ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DataType::F64 => ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        DataType::F16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DataType::BF16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        DataType::I8 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        DataType::I16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        DataType::I32 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        DataType::I64 => ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        DataType::U8 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DataType::U16 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        DataType::U32 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        DataType::U64 => ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        DataType::Bool => ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        DataType::Opaque => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_positions_are_left_out() {
        let message = "[ShapeInferenceError] x\n/src/core/graph/graph.cc:99 Resolve  no such op";
        assert_eq!(own_words(message), "[ShapeInferenceError] x Resolve no such op");
        let message = "virtual int a::b(const c&) [ONNXRuntimeError] : 11 : EP_FAIL : f(int)::<lambda()> x == y was false. No GPU.";
        assert_eq!(own_words(message), "No GPU.");
    }

    #[test]
    fn element_numbers_are_those_of_onnx() {
        for code in 1..=16 {
            let dtype = DataType::from_onnx(code);
            if dtype != DataType::Opaque {
                assert_eq!(element(dtype).unwrap() as i32, code, "{dtype}");
            }
        }
    }
}
