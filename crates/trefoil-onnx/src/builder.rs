//! Builds small ONNX models in memory: for benchmarks of single operators, examples, and models Trefoil makes itself.

use crate::OnnxError;
use crate::proto::attribute_proto::AttributeType;
use crate::proto::tensor_shape_proto::{Dimension, dimension};
use crate::proto::type_proto::{Tensor, Value};
use crate::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto,
};
use prost::Message;
use std::path::Path;
use trefoil_core::{DataType, HostTensor, TensorInfo};

/// An attribute value.
#[derive(Debug, Clone, PartialEq)]
pub enum Attribute {
    /// One integer.
    Int(i64),
    /// A list of integers.
    Ints(Vec<i64>),
    /// One float.
    Float(f32),
    /// A string.
    Text(String),
}

/// A model under construction. Nodes are added in topological order; values are named by strings.
#[derive(Debug, Clone)]
pub struct ModelBuilder {
    opset: i64,
    domains: Vec<(String, i64)>,
    graph: GraphProto,
}

impl ModelBuilder {
    /// An empty graph `name` for `ai.onnx` opset `opset`.
    pub fn new(name: &str, opset: i64) -> Self {
        Self { opset, domains: Vec::new(), graph: GraphProto { name: Some(name.to_owned()), ..GraphProto::default() } }
    }

    /// Declares a graph input.
    #[must_use]
    pub fn input(mut self, info: &TensorInfo) -> Self {
        self.graph.input.push(value_info(info));
        self
    }

    /// Declares a graph input of rank `dims.len()`; an entry that is no number is a symbolic extent.
    #[must_use]
    pub fn symbolic_input(mut self, name: &str, dtype: DataType, dims: &[&str]) -> Self {
        let mut info = value_info(&TensorInfo::new(name, dtype, []));
        if let Some(Value::TensorType(tensor)) = info.r#type.as_mut().and_then(|kind| kind.value.as_mut()) {
            let dim = dims.iter().map(|&text| match text.parse() {
                Ok(extent) => dimension::Value::DimValue(extent),
                Err(_) => dimension::Value::DimParam(text.to_owned()),
            });
            let dim = dim.map(|value| Dimension { value: Some(value), ..Dimension::default() }).collect();
            tensor.shape = Some(TensorShapeProto { dim });
        }
        self.graph.input.push(info);
        self
    }

    /// Declares a graph output.
    #[must_use]
    pub fn output(mut self, info: &TensorInfo) -> Self {
        self.graph.output.push(value_info(info));
        self
    }

    /// Adds a constant.
    #[must_use]
    pub fn constant(mut self, tensor: &HostTensor) -> Self {
        self.graph.initializer.push(TensorProto {
            dims: tensor.info().shape.iter().map(|&extent| extent as i64).collect(),
            data_type: Some(tensor.info().dtype.onnx_code()),
            name: Some(tensor.info().name.clone()),
            raw_data: Some(bytes::Bytes::copy_from_slice(tensor.bytes())),
            ..TensorProto::default()
        });
        self
    }

    /// Adds an `f32` constant of seeded normal values scaled by `scale` (deterministic in name, shape and scale).
    #[must_use]
    pub fn random_constant(self, name: &str, shape: &[u64], scale: f32) -> Self {
        let count = shape.iter().product::<u64>();
        let mut state = name.bytes().fold(0x9e37_79b9_7f4a_7c15_u64, |seed, byte| {
            (seed ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
        });
        let mut uniform = || {
            // splitmix64
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((mixed ^ (mixed >> 31)) >> 40) as f32 / (1u64 << 24) as f32
        };
        // The sum of four uniforms is near enough to normal for weights.
        let values: Vec<f32> =
            (0..count).map(|_| ((0..4).map(|_| uniform()).sum::<f32>() - 2.0) * 1.732 * scale).collect();
        self.constant(&HostTensor::from_f32(name, shape, &values))
    }

    /// Adds a node of the `ai.onnx` domain, named after its first output.
    #[must_use]
    pub fn node(mut self, kind: &str, inputs: &[&str], outputs: &[&str], attributes: &[(&str, Attribute)]) -> Self {
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(ToString::to_string).collect(),
            output: outputs.iter().map(ToString::to_string).collect(),
            name: outputs.first().map(|output| format!("{kind}_{output}")),
            op_type: Some(kind.to_owned()),
            attribute: attributes.iter().map(|(name, value)| attribute(name, value)).collect(),
            ..NodeProto::default()
        });
        self
    }

    /// Adds a node of another domain, whose opset `version` is imported.
    #[must_use]
    pub fn node_in(
        mut self,
        domain: &str,
        version: i64,
        kind: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: &[(&str, Attribute)],
    ) -> Self {
        self = self.node(kind, inputs, outputs, attributes);
        if let Some(node) = self.graph.node.last_mut() {
            node.domain = Some(domain.to_owned());
        }
        if !self.domains.iter().any(|(name, _)| name == domain) {
            self.domains.push((domain.to_owned(), version));
        }
        self
    }

    /// The serialised model.
    pub fn to_bytes(&self) -> Vec<u8> {
        let model = ModelProto {
            // IR 8 is read by every runtime that knows opset 13 to 19; newer opsets ask for 10.
            ir_version: Some(if self.opset > 19 { 10 } else { 8 }),
            producer_name: Some("trefoil".to_owned()),
            opset_import: [(String::new(), self.opset)]
                .into_iter()
                .chain(self.domains.iter().cloned())
                .map(|(domain, version)| OperatorSetIdProto { domain: Some(domain), version: Some(version) })
                .collect(),
            graph: Some(self.graph.clone()),
            ..ModelProto::default()
        };
        model.encode_to_vec()
    }

    /// Writes the model to `path` under a temporary name and renames it.
    ///
    /// # Errors
    /// [`OnnxError`] naming the file when it cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), OnnxError> {
        crate::files::write_bytes(path, &self.to_bytes())
    }
}

/// The constant `name` of a serialised model that this builder made; `None` if it has none.
pub fn constant_of(model: &[u8], name: &str) -> Option<HostTensor> {
    let model = ModelProto::decode(model).ok()?;
    let constant = model.graph?.initializer.into_iter().find(|constant| constant.name() == name)?;
    let shape: Vec<u64> = constant.dims.iter().map(|&extent| extent.unsigned_abs()).collect();
    let info = TensorInfo::new(name, DataType::from_onnx(constant.data_type()), shape);
    HostTensor::from_bytes(info, constant.raw_data.as_deref().unwrap_or_default()).ok()
}

fn value_info(info: &TensorInfo) -> ValueInfoProto {
    let dim = info
        .shape
        .iter()
        .map(|&extent| Dimension { value: Some(dimension::Value::DimValue(extent as i64)), ..Dimension::default() })
        .collect();
    let tensor = Tensor { elem_type: Some(info.dtype.onnx_code()), shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto {
        name: Some(info.name.clone()),
        r#type: Some(TypeProto { value: Some(Value::TensorType(tensor)), ..TypeProto::default() }),
        ..ValueInfoProto::default()
    }
}

fn attribute(name: &str, value: &Attribute) -> AttributeProto {
    let mut proto = AttributeProto { name: Some(name.to_owned()), ..AttributeProto::default() };
    let kind = match value {
        Attribute::Int(value) => {
            proto.i = Some(*value);
            AttributeType::Int
        }
        Attribute::Ints(values) => {
            proto.ints.clone_from(values);
            AttributeType::Ints
        }
        Attribute::Float(value) => {
            proto.f = Some(*value);
            AttributeType::Float
        }
        Attribute::Text(value) => {
            proto.s = Some(value.clone().into_bytes());
            AttributeType::String
        }
    };
    proto.r#type = Some(kind as i32);
    proto
}

/// A small image classifier with seeded weights: convolutions, a squeeze-and-excitation branch, a cumulative sum and a
/// softmax, so that placement has something to decide. Input `image` f32 [1, 3, 64, 64], output `scores` f32 [1, 10].
pub fn sample_model() -> ModelBuilder {
    let ints = |values: &[i64]| Attribute::Ints(values.to_vec());
    let conv = |stride: i64| {
        [("kernel_shape", ints(&[3, 3])), ("pads", ints(&[1, 1, 1, 1])), ("strides", ints(&[stride, stride]))]
    };
    ModelBuilder::new("trefoil-sample", 17)
        .input(&TensorInfo::new("image", DataType::F32, [1u64, 3, 64, 64]))
        .random_constant("stem_w", &[16, 3, 3, 3], 0.19)
        .random_constant("stem_b", &[16], 0.05)
        .node("Conv", &["image", "stem_w", "stem_b"], &["stem"], &conv(2))
        .node("Relu", &["stem"], &["stem_act"], &[])
        .random_constant("depth_w", &[16, 1, 3, 3], 0.33)
        .node(
            "Conv",
            &["stem_act", "depth_w"],
            &["depth"],
            &[conv(1).as_slice(), &[("group", Attribute::Int(16))]].concat(),
        )
        .node("GlobalAveragePool", &["depth"], &["squeezed"], &[])
        .random_constant("gate_w", &[16, 16, 1, 1], 0.25)
        .node("Conv", &["squeezed", "gate_w"], &["gate"], &[("kernel_shape", ints(&[1, 1]))])
        .node("Sigmoid", &["gate"], &["gate_act"], &[])
        .node("Mul", &["depth", "gate_act"], &["excited"], &[])
        .node("Add", &["excited", "stem_act"], &["residual"], &[])
        .random_constant("mix_w", &[32, 16, 3, 3], 0.08)
        .node("Conv", &["residual", "mix_w"], &["mix"], &conv(2))
        .node("Relu", &["mix"], &["mix_act"], &[])
        .constant(&HostTensor::from_i64("tokens_shape", [3u64], &[1, 32, 256]))
        .node("Reshape", &["mix_act", "tokens_shape"], &["tokens"], &[])
        .constant(&HostTensor::from_i64("scan_axis", [], &[2]))
        .node("CumSum", &["tokens", "scan_axis"], &["scanned"], &[])
        .node("ReduceMean", &["scanned"], &["pooled"], &[("axes", ints(&[2])), ("keepdims", Attribute::Int(0))])
        .random_constant("head_w", &[32, 10], 0.18)
        .random_constant("head_b", &[10], 0.05)
        .node("Gemm", &["pooled", "head_w", "head_b"], &["logits"], &[])
        .node("Softmax", &["logits"], &["scores"], &[("axis", Attribute::Int(1))])
        .output(&TensorInfo::new("scores", DataType::F32, [1u64, 10]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_model_decodes_and_is_deterministic() {
        let bytes = sample_model().to_bytes();
        assert_eq!(bytes, sample_model().to_bytes());
        let model = ModelProto::decode(bytes.as_slice()).unwrap();
        let graph = model.graph.unwrap();
        assert_eq!((graph.node.len(), graph.initializer.len()), (15, 9));
    }
}
