//! Models with inputs and expected outputs.

use crate::npz;
use std::path::{Path, PathBuf};
use trefoil_core::{HostTensor, TensorInfo};
use trefoil_units::SubModel;

/// One model of the suite.
pub struct Case {
    pub name: String,
    pub path: PathBuf,
    pub inputs: Vec<HostTensor>,
    pub outputs: Vec<HostTensor>,
}

impl Case {
    fn load(name: String, path: PathBuf, arrays: &Path) -> Result<Self, String> {
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for mut tensor in npz::read(arrays)? {
            let key = tensor.info().name.clone();
            if let Some(name) = key.strip_prefix("in_") {
                tensor.set_name(name);
                inputs.push(tensor);
            } else if let Some(name) = key.strip_prefix("out_") {
                tensor.set_name(name);
                outputs.push(tensor);
            }
        }
        Ok(Self { name, path, inputs, outputs })
    }

    /// One of the suite's own models.
    pub fn own(name: &str) -> Self {
        let folder = own_folder();
        Self::load(name.to_owned(), folder.join(format!("{name}.onnx")), &folder.join(format!("{name}.npz")))
            .unwrap_or_else(|reason| panic!("{reason}"))
    }

    /// What a backend is asked to compile.
    pub fn sub_model(&self) -> SubModel {
        let infos =
            |tensors: &[HostTensor]| tensors.iter().map(|tensor| tensor.info().clone()).collect::<Vec<TensorInfo>>();
        SubModel { path: self.path.clone(), inputs: infos(&self.inputs), outputs: infos(&self.outputs) }
    }
}

/// The suite's own models.
pub fn own_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/conformance")
}

/// Every case with its check's name: our own models, and ONNX's node tests where the repository's neighbour has them.
pub fn all() -> Result<Vec<(String, Case)>, String> {
    let mut cases = Vec::new();
    for path in sorted(&own_folder())? {
        if path.extension().is_some_and(|extension| extension == "onnx") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            cases.push((format!("own/{name}"), Case::own(&name)));
        }
    }
    if cases.is_empty() {
        return Err(format!("no models in {}; run tools/make_conformance_models.py", own_folder().display()));
    }
    if let Some(folder) = node_tests() {
        for path in sorted(&folder)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let name = name.trim_start_matches("test_").to_owned();
            cases.push((format!("onnx/{name}"), Case::load(name, path.join("model.onnx"), &path.join("io.npz"))?));
        }
    }
    Ok(cases)
}

/// ONNX's own node tests, if present beside the repository.
pub fn node_tests() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/node_tests");
    folder.is_dir().then_some(folder)
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let list = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<_> = list.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    paths.sort();
    Ok(paths)
}
