//! Model inputs and outputs, and fixing their shapes.

use crate::OnnxError;
use crate::proto::{GraphProto, TensorShapeProto, TypeProto, ValueInfoProto, tensor_shape_proto, type_proto};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use trefoil_core::{DataType, TensorInfo};

/// One dimension of a model port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dim {
    /// A number.
    Fixed(u64),
    /// A name that stands for the same number everywhere in the model.
    Symbolic(String),
    /// Nothing is known.
    Unknown,
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(extent) => write!(f, "{extent}"),
            Self::Symbolic(name) => f.write_str(name),
            Self::Unknown => f.write_str("?"),
        }
    }
}

/// An input or output of a model as its file declares it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelPort {
    /// Name.
    pub name: String,
    /// Element type; [`DataType::Opaque`] for strings and everything that is no tensor.
    pub dtype: DataType,
    /// Dimensions, outermost first; `None` when not even the rank is declared (or the value is no tensor).
    pub dims: Option<Vec<Dim>>,
}

impl ModelPort {
    /// The dims as text, such as `[N, 3, 224, 224]`.
    pub fn dims_text(&self) -> String {
        match &self.dims {
            None => "of unknown rank".into(),
            Some(dims) => format!("[{}]", dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
        }
    }

    /// Type and shape, if every dim is fixed.
    pub fn info(&self) -> Option<TensorInfo> {
        let dims = self.dims.as_ref()?;
        let shape: Option<Vec<u64>> =
            dims.iter().map(|dim| if let Dim::Fixed(extent) = dim { Some(*extent) } else { None }).collect();
        Some(TensorInfo::new(self.name.clone(), self.dtype, shape?))
    }
}

/// The tensor part of a type, if it is one.
pub(crate) fn tensor_type(value: &ValueInfoProto) -> Option<&type_proto::Tensor> {
    match value.r#type.as_ref()?.value.as_ref()? {
        type_proto::Value::TensorType(tensor) => Some(tensor),
        _ => None,
    }
}

fn tensor_type_mut(value: &mut ValueInfoProto) -> Option<&mut type_proto::Tensor> {
    match value.r#type.as_mut()?.value.as_mut()? {
        type_proto::Value::TensorType(tensor) => Some(tensor),
        _ => None,
    }
}

/// Whether a declaration says that the value is no dense tensor (a sequence, map, optional, sparse or opaque value).
pub(crate) fn is_other_type(value: &ValueInfoProto) -> bool {
    let kind = value.r#type.as_ref().and_then(|kind| kind.value.as_ref());
    kind.is_some_and(|kind| !matches!(kind, type_proto::Value::TensorType(_)))
}

/// A declaration as a port.
pub(crate) fn port(value: &ValueInfoProto) -> ModelPort {
    let tensor = tensor_type(value);
    let dims = tensor.and_then(|tensor| tensor.shape.as_ref()).map(|shape| {
        shape
            .dim
            .iter()
            .map(|dim| match &dim.value {
                Some(tensor_shape_proto::dimension::Value::DimValue(extent)) if *extent >= 0 => {
                    Dim::Fixed(*extent as u64)
                }
                Some(tensor_shape_proto::dimension::Value::DimParam(name)) if !name.is_empty() => {
                    Dim::Symbolic(name.clone())
                }
                // Old exporters write -1 for an open dim.
                _ => Dim::Unknown,
            })
            .collect()
    });
    let dtype = tensor.map_or(DataType::Opaque, |tensor| DataType::from_onnx(tensor.elem_type()));
    ModelPort { name: value.name().to_owned(), dtype, dims }
}

/// A declaration with a static shape.
pub(crate) fn declaration(info: &TensorInfo) -> ValueInfoProto {
    ValueInfoProto {
        name: Some(info.name.clone()),
        r#type: Some(TypeProto {
            value: Some(type_proto::Value::TensorType(type_proto::Tensor {
                elem_type: Some(info.dtype.onnx_code()),
                shape: Some(static_shape(&info.shape)),
            })),
            denotation: None,
        }),
        ..ValueInfoProto::default()
    }
}

fn static_shape(shape: &[u64]) -> TensorShapeProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = shape
        .iter()
        .map(|&extent| Dimension { value: Some(Value::DimValue(extent as i64)), denotation: None })
        .collect();
    TensorShapeProto { dim }
}

/// The declared inputs of a graph that are not initializers, with their positions in its input list.
pub(crate) fn real_inputs(graph: &GraphProto) -> Vec<(usize, ModelPort)> {
    let constants: HashSet<&str> = graph
        .initializer
        .iter()
        .map(super::proto::TensorProto::name)
        .chain(
            graph
                .sparse_initializer
                .iter()
                .filter_map(|sparse| sparse.values.as_ref().map(super::proto::TensorProto::name)),
        )
        .collect();
    graph
        .input
        .iter()
        .enumerate()
        .filter(|(_, input)| !constants.contains(input.name()))
        .map(|(position, input)| (position, port(input)))
        .collect()
}

/// Fixes the shapes of the inputs of `model`'s graph. A symbol fixed through one input holds for all inputs and outputs.
pub(crate) fn fix_shapes(
    model: &str,
    graph: &mut GraphProto,
    shapes: &BTreeMap<String, Vec<u64>>,
) -> Result<(), OnnxError> {
    let inputs = real_inputs(graph);
    if let Some(name) = shapes.keys().find(|name| !inputs.iter().any(|(_, port)| port.name == **name)) {
        let have = inputs.iter().map(|(_, port)| format!("`{}` {}", port.name, port.dims_text())).collect::<Vec<_>>();
        return Err(OnnxError::UnknownInput { name: name.clone(), have: have.join(", ") });
    }
    if let Some(input) =
        inputs.iter().find_map(|(position, _)| Some(&graph.input[*position]).filter(|i| is_other_type(i)))
    {
        return Err(OnnxError::InputKind { name: input.name().to_owned() });
    }
    let mut symbols: BTreeMap<String, (u64, String)> = BTreeMap::new();
    let mut fixed: Vec<(usize, ModelPort)> = Vec::new();
    for (position, mut port) in inputs {
        if let Some(given) = shapes.get(&port.name) {
            bind(&port, given, &mut symbols)?;
            port.dims = Some(given.iter().map(|&extent| Dim::Fixed(extent)).collect());
        }
        fixed.push((position, port));
    }
    let mut open = Vec::new();
    for (_, port) in &mut fixed {
        for dim in port.dims.iter_mut().flatten() {
            if let Dim::Symbolic(name) = dim
                && let Some(&(extent, _)) = symbols.get(name)
            {
                *dim = Dim::Fixed(extent);
            }
        }
        if port.info().is_none() {
            open.push(port.clone());
        }
    }
    if !open.is_empty() {
        return Err(OnnxError::SymbolicDims { model: model.to_owned(), open, whose: String::new() });
    }
    for (position, port) in &fixed {
        let Some(info) = port.info() else { continue };
        if let Some(tensor) = tensor_type_mut(&mut graph.input[*position]) {
            tensor.shape = Some(static_shape(&info.shape));
        }
    }
    // Symbols elsewhere follow where they are known; other stale dims are dropped, because a runtime that believes a
    // declared shape over the real one plans buffers of the wrong size.
    for value in graph.output.iter_mut().chain(&mut graph.value_info) {
        let Some(tensor) = tensor_type_mut(value) else { continue };
        for dim in tensor.shape.iter_mut().flat_map(|shape| &mut shape.dim) {
            use tensor_shape_proto::dimension::Value;
            if let Some(Value::DimParam(name)) = &dim.value {
                dim.value = symbols.get(name).map(|&(extent, _)| Value::DimValue(extent as i64));
            }
        }
    }
    Ok(())
}

/// Most elements of an input: 64 GiB of floats. A larger extent is a slip of the pen, and asking for its memory would end the process.
const MOST_ELEMENTS: u64 = 1 << 34;

fn bind(port: &ModelPort, given: &[u64], symbols: &mut BTreeMap<String, (u64, String)>) -> Result<(), OnnxError> {
    let conflict = |reason: String| OnnxError::ShapeConflict {
        name: port.name.clone(),
        dims: port.dims_text(),
        given: given.to_vec(),
        reason,
    };
    if given.iter().any(|&extent| i64::try_from(extent).is_err())
        || given.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent)).is_none()
    {
        return Err(conflict("it has more elements than fit 64 bits".into()));
    }
    if given.iter().product::<u64>() > MOST_ELEMENTS {
        return Err(conflict(format!("it has more than {MOST_ELEMENTS} elements")));
    }
    let Some(dims) = &port.dims else { return Ok(()) };
    if dims.len() != given.len() {
        return Err(OnnxError::Rank {
            name: port.name.clone(),
            dims: port.dims_text(),
            given: given.to_vec(),
            rank: given.len(),
            want: dims.len(),
        });
    }
    for (axis, (dim, &extent)) in dims.iter().zip(given).enumerate() {
        match dim {
            Dim::Fixed(fixed) if *fixed != extent => {
                return Err(conflict(format!("dim {axis} is fixed to {fixed} by the model")));
            }
            // Some exporters write one such name for every extent that they do not know.
            Dim::Symbolic(name) if matches!(name.as_str(), "" | "?" | "-1") => {}
            Dim::Symbolic(name) => match symbols.get(name) {
                Some((other, input)) if *other != extent => {
                    return Err(conflict(format!("`{name}` is already {other} through input `{input}`")));
                }
                Some(_) => {}
                None => {
                    symbols.insert(name.clone(), (extent, port.name.clone()));
                }
            },
            _ => {}
        }
    }
    Ok(())
}

/// Leaves only the element type and the rank of a declaration (a shape must be there to be valid).
pub(crate) fn forget_extents(value: &mut ValueInfoProto) {
    if let Some(tensor) = tensor_type_mut(value) {
        tensor.shape.iter_mut().flat_map(|shape| &mut shape.dim).for_each(|dim| dim.value = None);
    }
}
