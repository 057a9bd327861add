//! Owning handles of OpenVINO's objects.

use super::ffi::{Functions, RawCompiledModel, RawInferRequest, RawModel, RawPort, RawTensor};
use super::library::Loaded;
use std::ptr::{self, NonNull};

/// An owning pointer to one of OpenVINO's objects.
macro_rules! owned {
    ($($(#[$doc:meta])* $name:ident($raw:ty) freed by $free:ident;)*) => {
        $($(#[$doc])*
        pub(super) struct $name {
            raw: NonNull<$raw>,
            functions: &'static Functions,
        }

        // SAFETY: OpenVINO's objects have no thread affinity; `&mut` access of the owner keeps uses apart.
        unsafe impl Send for $name {}

        impl $name {
            /// Takes over what `create` puts into the place it is given.
            pub(super) fn new(loaded: &'static Loaded, create: impl FnOnce(*mut *mut $raw) -> i32) -> Result<Self, String> {
                let mut raw = ptr::null_mut();
                loaded.check(create(&raw mut raw))?;
                let raw = NonNull::new(raw).ok_or("OpenVINO returned nothing")?;
                Ok(Self { raw, functions: &loaded.functions })
            }

            pub(super) fn get(&self) -> *mut $raw {
                self.raw.as_ptr()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by the matching function and freed once.
                unsafe { (self.functions.$free)(self.raw.as_ptr()) };
            }
        })*
    };
}

owned! {
    Model(RawModel) freed by model_free;
    Program(RawCompiledModel) freed by compiled_model_free;
    Request(RawInferRequest) freed by infer_request_free;
    Tensor(RawTensor) freed by tensor_free;
    PortHandle(RawPort) freed by output_const_port_free;
}
