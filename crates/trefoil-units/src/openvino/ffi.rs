//! OpenVINO's C interface as a table of function pointers, loaded at run time.
//!
//! Only what Trefoil calls. The declarations follow OpenVINO's public C headers (`openvino/c/*.h`, 2025.0 to 2026.4), whose
//! functions have kept their signatures since 2023.0. The variadic ones stay variadic here, so that properties can be
//! passed on every version.

use libloading::Library;
use std::ffi::{c_char, c_void};

/// `ov_status_e`: 0 is success.
pub(super) type Status = i32;
/// `ov_element_type_e`; its numbering changed once, see `library::element_offset`.
pub(super) type ElementType = u32;

/// An object that only OpenVINO looks into.
macro_rules! opaque {
    ($($name:ident)*) => {
        $(#[repr(C)]
        pub(super) struct $name {
            opaque: [u8; 0],
        })*
    };
}
opaque!(RawCore RawModel RawCompiledModel RawInferRequest RawTensor RawPort);

/// `ov_shape_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) rank: i64,
    pub(super) extents: *mut i64,
}

/// `ov_dimension_t`: equal bounds are a static extent, a maximum of −1 is unbounded.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Dimension {
    pub(super) min: i64,
    pub(super) max: i64,
}

/// `ov_partial_shape_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PartialShape {
    pub(super) rank: Dimension,
    pub(super) extents: *mut Dimension,
}

/// `ov_available_devices_t`.
#[repr(C)]
pub(super) struct Devices {
    pub(super) names: *mut *mut c_char,
    pub(super) count: usize,
}

/// `ov_version_t`.
#[repr(C)]
pub(super) struct Version {
    pub(super) build: *const c_char,
    pub(super) description: *const c_char,
}

/// `ov_profiling_info_t`; `status` 2 is "executed".
#[repr(C)]
pub(super) struct NodeProfile {
    pub(super) status: i32,
    pub(super) real_microseconds: i64,
    pub(super) cpu_microseconds: i64,
    pub(super) name: *const c_char,
    pub(super) exec_type: *const c_char,
    pub(super) node_type: *const c_char,
}

/// `ov_profiling_info_list_t`.
#[repr(C)]
pub(super) struct NodeProfiles {
    pub(super) nodes: *mut NodeProfile,
    pub(super) count: usize,
}

/// Most properties of one compile call.
pub(super) const MAX_PROPERTIES: usize = 12;

macro_rules! function_table {
    (
        required { $($name:ident: fn($($argument:ty),* $(; $variadic:tt)?) $(-> $result:ty)?;)* }
        optional { $($option:ident: fn($($option_argument:ty),*);)* }
    ) => {
        /// Function pointers, named as in the headers without the `ov_` prefix.
        #[allow(missing_docs)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),* $(, $variadic)?) $(-> $result)?,)*
            $(pub(super) $option: Option<unsafe extern "C" fn($($option_argument),*)>,)*
        }

        impl Functions {
            /// Looks every function up.
            ///
            /// # Errors
            /// The name of the first required function that the library lacks.
            pub(super) fn load(library: &Library) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the symbol is the C function of that name, whose signature the table repeats.
                        let symbol = unsafe { library.get(concat!("ov_", stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|_| concat!("it lacks the function ov_", stringify!($name)).to_owned())?
                    },)*
                    $($option: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get(concat!("ov_", stringify!($option), "\0").as_bytes()) };
                        symbol.ok().map(|symbol| *symbol)
                    },)*
                })
            }
        }
    };
}

function_table! {
    required {
        get_error_info: fn(Status) -> *const c_char;
        get_last_err_msg: fn() -> *const c_char;
        free: fn(*const c_char);
        get_openvino_version: fn(*mut Version) -> Status;
        version_free: fn(*mut Version);
        core_create: fn(*mut *mut RawCore) -> Status;
        core_get_property: fn(*const RawCore, *const c_char, *const c_char, *mut *mut c_char) -> Status;
        core_get_available_devices: fn(*const RawCore, *mut Devices) -> Status;
        available_devices_free: fn(*mut Devices);
        core_read_model: fn(*const RawCore, *const c_char, *const c_char, *mut *mut RawModel) -> Status;
        core_compile_model:
            fn(*const RawCore, *const RawModel, *const c_char, usize, *mut *mut RawCompiledModel; ...) -> Status;
        core_compile_model_from_file:
            fn(*const RawCore, *const c_char, *const c_char, usize, *mut *mut RawCompiledModel; ...) -> Status;
        model_free: fn(*mut RawModel);
        model_reshape_by_port_indexes: fn(*const RawModel, *const usize, *const PartialShape, usize) -> Status;
        compiled_model_free: fn(*mut RawCompiledModel);
        compiled_model_inputs_size: fn(*const RawCompiledModel, *mut usize) -> Status;
        compiled_model_outputs_size: fn(*const RawCompiledModel, *mut usize) -> Status;
        compiled_model_input_by_index: fn(*const RawCompiledModel, usize, *mut *mut RawPort) -> Status;
        compiled_model_output_by_index: fn(*const RawCompiledModel, usize, *mut *mut RawPort) -> Status;
        compiled_model_input_by_name: fn(*const RawCompiledModel, *const c_char, *mut *mut RawPort) -> Status;
        compiled_model_output_by_name: fn(*const RawCompiledModel, *const c_char, *mut *mut RawPort) -> Status;
        compiled_model_create_infer_request: fn(*const RawCompiledModel, *mut *mut RawInferRequest) -> Status;
        port_get_any_name: fn(*const RawPort, *mut *mut c_char) -> Status;
        port_get_element_type: fn(*const RawPort, *mut ElementType) -> Status;
        port_get_partial_shape: fn(*const RawPort, *mut PartialShape) -> Status;
        partial_shape_free: fn(*mut PartialShape);
        output_const_port_free: fn(*mut RawPort);
        tensor_create: fn(ElementType, Shape, *mut *mut RawTensor) -> Status;
        tensor_create_from_host_ptr: fn(ElementType, Shape, *mut c_void, *mut *mut RawTensor) -> Status;
        tensor_get_byte_size: fn(*const RawTensor, *mut usize) -> Status;
        tensor_get_shape: fn(*const RawTensor, *mut Shape) -> Status;
        tensor_data: fn(*const RawTensor, *mut *mut c_void) -> Status;
        tensor_free: fn(*mut RawTensor);
        shape_free: fn(*mut Shape) -> Status;
        infer_request_set_input_tensor_by_index: fn(*mut RawInferRequest, usize, *const RawTensor) -> Status;
        infer_request_set_output_tensor_by_index: fn(*mut RawInferRequest, usize, *const RawTensor) -> Status;
        infer_request_get_output_tensor_by_index: fn(*const RawInferRequest, usize, *mut *mut RawTensor) -> Status;
        infer_request_infer: fn(*mut RawInferRequest) -> Status;
        infer_request_start_async: fn(*mut RawInferRequest) -> Status;
        infer_request_wait: fn(*mut RawInferRequest) -> Status;
        infer_request_get_profiling_info: fn(*const RawInferRequest, *mut NodeProfiles) -> Status;
        infer_request_free: fn(*mut RawInferRequest);
        profiling_info_list_free: fn(*mut NodeProfiles);
    }
    optional {
        util_set_log_callback: fn(Option<unsafe extern "C" fn(*const c_char)>);
    }
}
