//! Makes ONNX files loadable by rten where rten is stricter than the format.
//!
//! rten takes external weights only from a plain file name ending in `.data…` or `.onnx_data…` beside the model, and
//! only with `offset` and `length` stated; it keeps node names and value names in one table, so a node named like a
//! value hides that value; and it looks at the file's extension. Files that already comply are used as they are. Others
//! get a small rewritten copy in a temporary folder, with symbolic links to the original weights, which is removed once
//! rten has mapped them. Only the few message fields concerned are touched; everything else is copied byte for byte.

use super::wire::{Payload, fields, put_bytes, varint};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file that rten can load. Dropping it removes the temporary copy, if there was one.
pub(super) struct Staged {
    path: PathBuf,
    folder: Option<PathBuf>,
    integer_products: bool,
}

impl Staged {
    /// The file to load.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether there are `MatMulInteger`, `ConvInteger` or the like among the nodes.
    pub(super) fn has_integer_products(&self) -> bool {
        self.integer_products
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            // A leftover in the temporary folder is harmless.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// Checks the file at `path` and stages a rewritten copy if rten needs one.
///
/// # Errors
/// The reason: unreadable file, malformed message, missing external file.
pub(super) fn stage(path: &Path) -> Result<Staged, String> {
    let bytes = std::fs::read(path).map_err(|error| format!("cannot read the file: {error}"))?;
    let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
    let mut survey = Survey::default();
    survey.model(&bytes)?;
    if survey.nodes == 0 && survey.values.is_empty() {
        return Err("the file holds no ONNX graph".to_owned());
    }
    let integer_products = survey.integer_products;
    let hidden: BTreeSet<_> = survey.node_names.intersection(&survey.values).cloned().collect();
    let extension = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("onnx"));
    if extension && hidden.is_empty() && !survey.rewrite_external {
        return Ok(Staged { path: path.to_path_buf(), folder: None, integer_products });
    }
    let mut rewrite = Rewrite { hidden, base: folder, targets: Vec::new() };
    let rewritten = rewrite.model(&bytes)?;
    let mut staged = write_copy(&rewritten, &rewrite.targets)?;
    staged.integer_products = integer_products;
    Ok(staged)
}

/// Writes the copy and its links.
fn write_copy(bytes: &[u8], targets: &[PathBuf]) -> Result<Staged, String> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("trefoil-rten-{}-{number}", std::process::id()));
    let fail = |error: std::io::Error| format!("cannot stage a copy in {}: {error}", folder.display());
    std::fs::create_dir_all(&folder).map_err(fail)?;
    let staged = Staged { path: folder.join("model.onnx"), folder: Some(folder.clone()), integer_products: false };
    std::fs::write(&staged.path, bytes).map_err(fail)?;
    for (number, target) in targets.iter().enumerate() {
        let target = target
            .canonicalize()
            .map_err(|error| format!("external data file {} cannot be found: {error}", target.display()))?;
        std::os::unix::fs::symlink(target, folder.join(link_name(number))).map_err(fail)?;
    }
    Ok(staged)
}

fn link_name(number: usize) -> String {
    format!("weights{number}.data")
}

/// Whether rten takes this location as it is.
fn is_plain_location(location: &str) -> bool {
    let path = Path::new(location);
    let mut parts = path.components();
    let single = matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none();
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    single && (extension.starts_with("data") || extension.starts_with("onnx_data"))
}

// Field numbers of onnx.proto.
mod field {
    pub(super) const MODEL_GRAPH: u64 = 7;
    pub(super) const GRAPH_NODE: u64 = 1;
    pub(super) const GRAPH_INITIALIZER: u64 = 5;
    pub(super) const GRAPH_INPUT: u64 = 11;
    pub(super) const GRAPH_OUTPUT: u64 = 12;
    pub(super) const VALUE_INFO_NAME: u64 = 1;
    pub(super) const NODE_INPUT: u64 = 1;
    pub(super) const NODE_OUTPUT: u64 = 2;
    pub(super) const NODE_NAME: u64 = 3;
    pub(super) const NODE_TYPE: u64 = 4;
    pub(super) const NODE_ATTRIBUTE: u64 = 5;
    pub(super) const ATTRIBUTE_TENSOR: u64 = 5;
    pub(super) const ATTRIBUTE_GRAPH: u64 = 6;
    pub(super) const ATTRIBUTE_TENSORS: u64 = 10;
    pub(super) const ATTRIBUTE_GRAPHS: u64 = 11;
    pub(super) const TENSOR_DIMS: u64 = 1;
    pub(super) const TENSOR_DATA_TYPE: u64 = 2;
    pub(super) const TENSOR_NAME: u64 = 8;
    pub(super) const TENSOR_EXTERNAL: u64 = 13;
    pub(super) const TENSOR_LOCATION: u64 = 14;
    pub(super) const ENTRY_KEY: u64 = 1;
    pub(super) const ENTRY_VALUE: u64 = 2;
}

/// `TensorProto.DataLocation.EXTERNAL`.
const EXTERNAL: u64 = 1;
/// Subgraphs nested deeper than this are refused rather than followed.
const MAX_DEPTH: u32 = 64;

/// What a read-only walk over a model finds.
#[derive(Default)]
struct Survey {
    nodes: usize,
    node_names: BTreeSet<String>,
    values: BTreeSet<String>,
    rewrite_external: bool,
    integer_products: bool,
}

impl Survey {
    fn value(&mut self, name: &[u8]) {
        let name = String::from_utf8_lossy(name);
        if !name.is_empty() && !self.values.contains(name.as_ref()) {
            self.values.insert(name.into_owned());
        }
    }

    fn model(&mut self, bytes: &[u8]) -> Result<(), String> {
        for field in fields(bytes) {
            let field = field?;
            if let (field::MODEL_GRAPH, Payload::Bytes(graph)) = (field.number, &field.payload) {
                self.graph(graph, 0)?;
            }
        }
        Ok(())
    }

    fn graph(&mut self, bytes: &[u8], depth: u32) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("subgraphs are nested more than {MAX_DEPTH} deep"));
        }
        for field in fields(bytes) {
            let field = field?;
            let Payload::Bytes(inner) = field.payload else { continue };
            match field.number {
                field::GRAPH_NODE => self.node(inner, depth)?,
                field::GRAPH_INITIALIZER => self.tensor(inner)?,
                field::GRAPH_INPUT | field::GRAPH_OUTPUT => {
                    for entry in fields(inner) {
                        let entry = entry?;
                        if let (field::VALUE_INFO_NAME, Payload::Bytes(name)) = (entry.number, &entry.payload) {
                            self.value(name);
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn node(&mut self, bytes: &[u8], depth: u32) -> Result<(), String> {
        self.nodes += 1;
        for field in fields(bytes) {
            let field = field?;
            let Payload::Bytes(inner) = field.payload else { continue };
            match field.number {
                field::NODE_INPUT | field::NODE_OUTPUT => self.value(inner),
                field::NODE_NAME if !inner.is_empty() => {
                    self.node_names.insert(String::from_utf8_lossy(inner).into_owned());
                }
                field::NODE_TYPE => self.integer_products |= inner.windows(7).any(|window| window == b"Integer"),
                field::NODE_ATTRIBUTE => {
                    for part in fields(inner) {
                        let part = part?;
                        let Payload::Bytes(value) = part.payload else { continue };
                        match part.number {
                            field::ATTRIBUTE_TENSOR | field::ATTRIBUTE_TENSORS => self.tensor(value)?,
                            field::ATTRIBUTE_GRAPH | field::ATTRIBUTE_GRAPHS => self.graph(value, depth + 1)?,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn tensor(&mut self, bytes: &[u8]) -> Result<(), String> {
        let external = External::of(bytes)?;
        self.value(external.name.as_bytes());
        self.rewrite_external |= external.outside && external.needs_rewrite();
        Ok(())
    }
}

/// What a tensor says about where its data lies.
#[derive(Default)]
struct External {
    name: String,
    outside: bool,
    location: Option<String>,
    offset: Option<u64>,
    length: Option<u64>,
    elements: u64,
    data_type: i32,
    /// Whether there is a key that rten does not know.
    odd_key: bool,
}

impl External {
    fn of(tensor: &[u8]) -> Result<Self, String> {
        let mut external = Self { elements: 1, ..Self::default() };
        for field in fields(tensor) {
            let field = field?;
            match (field.number, field.payload) {
                (field::TENSOR_DIMS, Payload::Varint(extent)) => {
                    external.elements = external.elements.saturating_mul(extent);
                }
                (field::TENSOR_DIMS, Payload::Bytes(mut packed)) => {
                    while let Some((extent, rest)) = varint(packed) {
                        external.elements = external.elements.saturating_mul(extent);
                        packed = rest;
                    }
                }
                (field::TENSOR_DATA_TYPE, Payload::Varint(code)) => external.data_type = code as i32,
                (field::TENSOR_NAME, Payload::Bytes(name)) => {
                    external.name = String::from_utf8_lossy(name).into_owned();
                }
                (field::TENSOR_LOCATION, Payload::Varint(location)) => external.outside = location == EXTERNAL,
                (field::TENSOR_EXTERNAL, Payload::Bytes(entry)) => external.entry(entry)?,
                _ => {}
            }
        }
        Ok(external)
    }

    fn entry(&mut self, entry: &[u8]) -> Result<(), String> {
        let (mut key, mut value) = (String::new(), String::new());
        for field in fields(entry) {
            let field = field?;
            match (field.number, field.payload) {
                (field::ENTRY_KEY, Payload::Bytes(text)) => key = String::from_utf8_lossy(text).into_owned(),
                (field::ENTRY_VALUE, Payload::Bytes(text)) => value = String::from_utf8_lossy(text).into_owned(),
                _ => {}
            }
        }
        let number = |value: &str| {
            value.parse::<u64>().map_err(|_| format!("external data of `{}`: {key} `{value}` is no number", self.name))
        };
        match key.as_str() {
            "location" => self.location = Some(value),
            "offset" => self.offset = Some(number(&value)?),
            "length" => self.length = Some(number(&value)?),
            "checksum" => {}
            _ => self.odd_key = true,
        }
        Ok(())
    }

    fn needs_rewrite(&self) -> bool {
        self.odd_key
            || self.offset.is_none()
            || self.length.is_none()
            || !self.location.as_deref().is_some_and(is_plain_location)
    }

    /// Bytes of the tensor: as stated, else from shape and type.
    fn byte_length(&self) -> u64 {
        let size = trefoil_core::DataType::from_onnx(self.data_type).size();
        self.length.unwrap_or_else(|| self.elements.saturating_mul(size))
    }
}

/// The second walk: copies the model with external locations replaced and hiding node names left out.
struct Rewrite {
    hidden: BTreeSet<String>,
    base: PathBuf,
    /// Weight files, in link order.
    targets: Vec<PathBuf>,
}

impl Rewrite {
    fn model(&mut self, bytes: &[u8]) -> Result<Vec<u8>, String> {
        self.message(bytes, &|this, number, inner| match number {
            field::MODEL_GRAPH => this.graph(inner).map(Some),
            _ => Ok(None),
        })
    }

    fn graph(&mut self, bytes: &[u8]) -> Result<Vec<u8>, String> {
        self.message(bytes, &|this, number, inner| match number {
            field::GRAPH_NODE => this.node(inner).map(Some),
            field::GRAPH_INITIALIZER => this.tensor(inner),
            _ => Ok(None),
        })
    }

    fn node(&mut self, bytes: &[u8]) -> Result<Vec<u8>, String> {
        self.message(bytes, &|this, number, inner| match number {
            // An empty name is the same as none.
            field::NODE_NAME if this.hidden.contains(String::from_utf8_lossy(inner).as_ref()) => Ok(Some(Vec::new())),
            field::NODE_ATTRIBUTE => this.attribute(inner).map(Some),
            _ => Ok(None),
        })
    }

    fn attribute(&mut self, bytes: &[u8]) -> Result<Vec<u8>, String> {
        self.message(bytes, &|this, number, inner| match number {
            field::ATTRIBUTE_TENSOR | field::ATTRIBUTE_TENSORS => this.tensor(inner),
            field::ATTRIBUTE_GRAPH | field::ATTRIBUTE_GRAPHS => this.graph(inner).map(Some),
            _ => Ok(None),
        })
    }

    /// A tensor with its external entries replaced; `None` when its data is inside.
    fn tensor(&mut self, bytes: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let external = External::of(bytes)?;
        if !external.outside {
            return Ok(None);
        }
        let location = external
            .location
            .as_deref()
            .ok_or_else(|| format!("tensor `{}` is external without a location", external.name))?;
        let target = self.base.join(location);
        let number = self.targets.iter().position(|known| *known == target).unwrap_or_else(|| {
            self.targets.push(target);
            self.targets.len() - 1
        });
        let mut tensor = Vec::with_capacity(bytes.len());
        for field in fields(bytes) {
            let field = field?;
            if field.number != field::TENSOR_EXTERNAL {
                tensor.extend_from_slice(field.whole);
            }
        }
        for (key, value) in [
            ("location", link_name(number)),
            ("offset", external.offset.unwrap_or(0).to_string()),
            ("length", external.byte_length().to_string()),
        ] {
            let mut entry = Vec::new();
            put_bytes(&mut entry, field::ENTRY_KEY, key.as_bytes());
            put_bytes(&mut entry, field::ENTRY_VALUE, value.as_bytes());
            put_bytes(&mut tensor, field::TENSOR_EXTERNAL, &entry);
        }
        Ok(Some(tensor))
    }

    /// Copies a message, with those length-delimited fields replaced for which `replace` gives new contents.
    fn message(&mut self, bytes: &[u8], replace: &Replace<'_>) -> Result<Vec<u8>, String> {
        let mut out = Vec::with_capacity(bytes.len());
        for field in fields(bytes) {
            let field = field?;
            let new = match field.payload {
                Payload::Bytes(inner) => replace(self, field.number, inner)?,
                Payload::Varint(_) | Payload::Fixed => None,
            };
            match new {
                Some(inner) => put_bytes(&mut out, field.number, &inner),
                None => out.extend_from_slice(field.whole),
            }
        }
        Ok(out)
    }
}

type Replace<'r> = dyn Fn(&mut Rewrite, u64, &[u8]) -> Result<Option<Vec<u8>>, String> + 'r;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rten::wire::put_varint;
    use proptest::prelude::*;

    fn tensor(name: &str, entries: &[(&str, &str)]) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, field::TENSOR_DIMS << 3);
        put_varint(&mut out, 3);
        put_varint(&mut out, field::TENSOR_DATA_TYPE << 3);
        put_varint(&mut out, 1);
        put_bytes(&mut out, field::TENSOR_NAME, name.as_bytes());
        for (key, value) in entries {
            let mut entry = Vec::new();
            put_bytes(&mut entry, field::ENTRY_KEY, key.as_bytes());
            put_bytes(&mut entry, field::ENTRY_VALUE, value.as_bytes());
            put_bytes(&mut out, field::TENSOR_EXTERNAL, &entry);
        }
        put_varint(&mut out, field::TENSOR_LOCATION << 3);
        put_varint(&mut out, EXTERNAL);
        out
    }

    #[test]
    fn locations_that_rten_takes() {
        assert!(is_plain_location("model.onnx.data") && is_plain_location("w.onnx_data_3"));
        assert!(!is_plain_location("w.bin") && !is_plain_location("../w.data") && !is_plain_location("/w.data"));
    }

    #[test]
    fn odd_locations_become_links_with_offset_and_length() {
        let mut rewrite = Rewrite { hidden: BTreeSet::new(), base: "/models".into(), targets: Vec::new() };
        let out = rewrite.tensor(&tensor("w", &[("location", "../w.bin"), ("basepath", "x")])).unwrap().unwrap();
        let external = External::of(&out).unwrap();
        assert!(!external.needs_rewrite());
        assert_eq!((external.offset, external.length, external.elements), (Some(0), Some(12), 3));
        assert_eq!(rewrite.targets, [PathBuf::from("/models/../w.bin")]);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut survey = Survey::default();
            let _ = survey.model(&bytes);
            let mut rewrite = Rewrite { hidden: BTreeSet::new(), base: PathBuf::new(), targets: Vec::new() };
            let _ = rewrite.model(&bytes);
        }

        #[test]
        fn a_message_without_external_data_is_copied_unchanged(name in "[a-z]{1,9}", payload in any::<u64>()) {
            let mut node = Vec::new();
            put_bytes(&mut node, field::NODE_NAME, name.as_bytes());
            put_varint(&mut node, 99 << 3);
            put_varint(&mut node, payload);
            let (mut graph, mut model) = (Vec::new(), Vec::new());
            put_bytes(&mut graph, field::GRAPH_NODE, &node);
            put_bytes(&mut model, field::MODEL_GRAPH, &graph);
            let mut rewrite = Rewrite { hidden: BTreeSet::new(), base: PathBuf::new(), targets: Vec::new() };
            prop_assert_eq!(rewrite.model(&model).unwrap(), model);
        }
    }
}
