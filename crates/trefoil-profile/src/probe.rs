//! Finding out the shape of every value by one run.
//!
//! A backend must be told the shape of each output beforehand, and shapes are what a traced run is for. So two runs: the
//! first has the model's nodes, and for each value three more, `Shape → Concat with −1 × 16 → first 16`, whose result is
//! always i64\[16\]; one `Concat` joins them all into the only output. The second has all values as outputs, of the
//! shapes found. No backend needs to support outputs of unknown shape.

use crate::ProfileError;
use crate::typing::infer_types;
use prost::Message;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use trefoil_core::{DataType, HostTensor, TensorInfo};
use trefoil_onnx::Model;
use trefoil_onnx::proto::attribute_proto::AttributeType;
use trefoil_onnx::proto::{AttributeProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto};
use trefoil_units::SubModel;

/// Highest rank told.
const RANK: usize = 16;

/// Name of the probe's output.
pub const PROBE_OUTPUT: &str = "trefoil.probe/shapes";

/// A model whose values are to be traced: files in a folder, and what is known of its values.
#[derive(Debug)]
pub struct Probe {
    proto: ModelProto,
    folder: PathBuf,
    inputs: Vec<TensorInfo>,
    /// Values to trace, with the type each probably has.
    values: Vec<(String, DataType)>,
    /// Values of types that Trefoil cannot hold.
    opaque: Vec<String>,
    /// Shapes that the model itself declares for some of its values.
    declared: HashMap<String, Vec<u64>>,
}

/// Static shapes that a model declares for its values, as far as it does.
pub fn declared_shapes(traced: &Model) -> HashMap<String, Vec<u64>> {
    traced.outputs().iter().filter_map(|port| Some((port.name.clone(), port.info()?.shape))).collect()
}

impl Probe {
    /// For a model all of whose outputs are to be traced ([`Model::traced`], [`Model::single_node`]). Writes its weights
    /// into `folder`.
    pub fn new(
        traced: &Model,
        inputs: Vec<TensorInfo>,
        declared: HashMap<String, Vec<u64>>,
        folder: &Path,
    ) -> Result<Self, ProfileError> {
        let path = folder.join("traced.onnx");
        traced.save(&path)?;
        let bytes = std::fs::read(&path).map_err(ProfileError::io("read", &path))?;
        let proto = ModelProto::decode(bytes.as_slice()).map_err(|error| ProfileError::Format {
            path,
            what: "ONNX model",
            reason: error.to_string(),
        })?;
        let types = infer_types(&proto);
        let names = traced.outputs().into_iter().map(|port| port.name);
        // Outputs that are inputs or constants are known already.
        let written: std::collections::HashSet<&str> = proto
            .graph
            .iter()
            .flat_map(|graph| &graph.node)
            .flat_map(|node| &node.output)
            .map(String::as_str)
            .collect();
        let (mut values, mut opaque) = (Vec::new(), Vec::new());
        for name in names.filter(|name| written.contains(name.as_str())) {
            match DataType::from_onnx(types.get(&name).copied().unwrap_or(0)) {
                DataType::Opaque => opaque.push(name),
                dtype => values.push((name, dtype)),
            }
        }
        Ok(Self { proto, folder: folder.to_owned(), inputs, values, opaque, declared })
    }

    /// Values of types that Trefoil cannot hold; they are not traced.
    pub fn opaque(&self) -> &[String] {
        &self.opaque
    }

    /// Whether there is nothing to trace.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Number of values to trace.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Type of the first node, domain-qualified outside `ai.onnx`.
    pub fn first_kind(&self) -> String {
        let Some(node) = self.proto.graph.as_ref().and_then(|graph| graph.node.first()) else { return String::new() };
        match node.domain() {
            "" | "ai.onnx" => node.op_type().to_owned(),
            domain => format!("{domain}.{}", node.op_type()),
        }
    }

    /// Supposes another type for the only value that has no declared one, for trying types in turn.
    pub fn suppose(&mut self, value: usize, dtype: DataType) {
        if let Some(entry) = self.values.get_mut(value) {
            entry.1 = dtype;
        }
    }

    /// The first run: one output that holds all shapes.
    pub fn shapes_model(&self) -> Result<SubModel, ProfileError> {
        let mut proto = self.proto.clone();
        let opset = proto
            .opset_import
            .iter()
            .find(|o| matches!(o.domain(), "" | "ai.onnx"))
            .map_or(13, OperatorSetIdProto::version);
        let graph = proto.graph.get_or_insert_default();
        let constant = |name: &str, values: &[i64]| TensorProto {
            name: Some(name.to_owned()),
            dims: vec![values.len() as i64],
            data_type: Some(DataType::I64.onnx_code()),
            int64_data: values.to_vec(),
            ..TensorProto::default()
        };
        graph.initializer.push(constant("trefoil.probe/pad", &[-1; RANK]));
        graph.initializer.push(constant("trefoil.probe/zero", &[0]));
        graph.initializer.push(constant("trefoil.probe/rank", &[RANK as i64]));
        let mut parts = Vec::new();
        for (index, (name, _)) in self.values.iter().enumerate() {
            let at = |what: &str| format!("trefoil.probe/{what}{index}");
            graph.node.push(node("Shape", &[name], &at("shape"), &[]));
            let padded = [at("shape"), "trefoil.probe/pad".to_owned()];
            graph.node.push(node("Concat", &padded, &at("padded"), &[int("axis", 0)]));
            if opset >= 10 {
                let bounds = ["trefoil.probe/zero", "trefoil.probe/rank", "trefoil.probe/zero"].map(str::to_owned);
                let inputs: Vec<String> = std::iter::once(at("padded")).chain(bounds).collect();
                graph.node.push(node("Slice", &inputs, &at("part"), &[]));
            } else {
                let bounds = [ints("starts", &[0]), ints("ends", &[RANK as i64]), ints("axes", &[0])];
                graph.node.push(node("Slice", &[at("padded")], &at("part"), &bounds));
            }
            parts.push(at("part"));
        }
        graph.node.push(node("Concat", &parts, PROBE_OUTPUT, &[int("axis", 0)]));
        let output = TensorInfo::new(PROBE_OUTPUT, DataType::I64, [(RANK * self.values.len()) as u64]);
        graph.output = vec![declaration(&output)];
        self.write("shapes.onnx", &proto, vec![output])
    }

    /// The first value whose shape is another one than the model declares: the backend that ran computes it wrongly (or
    /// the declaration is wrong, which is rarer).
    pub fn contradiction(&self, shapes: &HostTensor) -> Option<String> {
        self.found(shapes).into_iter().find_map(|info| {
            let declared = self.declared.get(&info.name)?;
            (*declared != info.shape)
                .then(|| format!("it makes {info} of a value that the model declares as {declared:?}"))
        })
    }

    fn found(&self, shapes: &HostTensor) -> Vec<TensorInfo> {
        let extents: Vec<i64> =
            shapes.bytes().as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        let shape = |extents: &[i64]| -> Vec<u64> {
            extents.iter().take_while(|&&extent| extent >= 0).map(|&extent| extent as u64).collect()
        };
        let pairs = self.values.iter().zip(extents.chunks(RANK));
        pairs.map(|((name, dtype), extents)| TensorInfo::new(name.clone(), *dtype, shape(extents))).collect()
    }

    /// The second run: all values as outputs, in the shapes that the first run told.
    pub fn values_model(&self, shapes: &HostTensor) -> Result<SubModel, ProfileError> {
        let outputs = self.found(shapes);
        let mut proto = self.proto.clone();
        proto.graph.get_or_insert_default().output = outputs.iter().map(declaration).collect();
        self.write("values.onnx", &proto, outputs)
    }

    fn write(&self, name: &str, proto: &ModelProto, outputs: Vec<TensorInfo>) -> Result<SubModel, ProfileError> {
        let path = self.folder.join(name);
        std::fs::write(&path, proto.encode_to_vec()).map_err(ProfileError::io("write", &path))?;
        Ok(SubModel { path, inputs: self.inputs.clone(), outputs })
    }
}

fn node(kind: &str, inputs: &[impl AsRef<str>], output: &str, attributes: &[AttributeProto]) -> NodeProto {
    NodeProto {
        op_type: Some(kind.to_owned()),
        // rten keeps nodes and values in one table of names, so a node must not be named as what it writes.
        name: Some(format!("{output}/node")),
        input: inputs.iter().map(|input| input.as_ref().to_owned()).collect(),
        output: vec![output.to_owned()],
        attribute: attributes.to_vec(),
        ..NodeProto::default()
    }
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    }
}

fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Ints as i32),
        ints: values.to_vec(),
        ..AttributeProto::default()
    }
}

fn declaration(info: &TensorInfo) -> ValueInfoProto {
    use trefoil_onnx::proto::tensor_shape_proto::{Dimension, dimension};
    use trefoil_onnx::proto::{TensorShapeProto, TypeProto, type_proto};
    let dim = info
        .shape
        .iter()
        .map(|&extent| Dimension { value: Some(dimension::Value::DimValue(extent as i64)), ..Dimension::default() })
        .collect();
    ValueInfoProto {
        name: Some(info.name.clone()),
        r#type: Some(TypeProto {
            value: Some(type_proto::Value::TensorType(type_proto::Tensor {
                elem_type: Some(info.dtype.onnx_code()),
                shape: Some(TensorShapeProto { dim }),
            })),
            denotation: None,
        }),
        ..ValueInfoProto::default()
    }
}
