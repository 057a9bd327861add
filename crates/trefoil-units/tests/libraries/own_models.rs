//! Inputs and expected outputs of the conformance suite's models, which lie in this crate.

use crate::npz;
use std::path::{Path, PathBuf};
use trefoil_core::{HostTensor, TensorInfo};

/// A model with its inputs and expected outputs.
pub struct OwnModel {
    pub path: PathBuf,
    pub inputs: Vec<HostTensor>,
    pub expected: Vec<HostTensor>,
}

impl OwnModel {
    pub fn load(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/conformance");
        let (mut inputs, mut expected) = (Vec::new(), Vec::new());
        for mut tensor in npz::read(&folder.join(format!("{name}.npz"))).unwrap() {
            let key = tensor.info().name.clone();
            if let Some(input) = key.strip_prefix("in_") {
                tensor.set_name(input);
                inputs.push(tensor);
            } else if let Some(output) = key.strip_prefix("out_") {
                tensor.set_name(output);
                expected.push(tensor);
            }
        }
        Self { path: folder.join(format!("{name}.onnx")), inputs, expected }
    }

    pub fn output_infos(&self) -> Vec<TensorInfo> {
        self.expected.iter().map(|tensor| tensor.info().clone()).collect()
    }
}
