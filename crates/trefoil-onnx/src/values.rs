//! What a traced run tells: the type, shape and contents of values.

use std::collections::BTreeMap;
use trefoil_core::{HostTensor, TensorInfo};

/// Results of running a [traced](crate::Model::traced) model once, by value name.
///
/// A value that the run could not deliver (a sequence, a string tensor) is simply absent.
pub trait Values {
    /// Type and shape of a value; a run that met a tensor it cannot hold may answer with
    /// [`DataType::Opaque`](trefoil_core::DataType::Opaque).
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// Contents of a value.
    fn tensor(&self, name: &str) -> Option<HostTensor>;
}

impl Values for BTreeMap<String, HostTensor> {
    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.get(name).map(|tensor| TensorInfo { name: name.to_owned(), ..tensor.info().clone() })
    }

    fn tensor(&self, name: &str) -> Option<HostTensor> {
        self.get(name).map(|tensor| {
            let mut tensor = tensor.duplicate();
            tensor.set_name(name);
            tensor
        })
    }
}

/// Types and shapes without contents: enough for everything but folding.
impl Values for BTreeMap<String, TensorInfo> {
    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.get(name).cloned()
    }

    fn tensor(&self, _name: &str) -> Option<HostTensor> {
        None
    }
}
