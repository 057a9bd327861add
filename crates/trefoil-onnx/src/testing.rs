//! Small graphs for tests, benches and fuzzing: a builder that needs no Python. Not part of the stable interface.

use crate::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto, tensor_shape_proto, type_proto,
};
use prost::Message;

/// Builds a graph, then a model.
#[derive(Debug, Clone, Default)]
pub struct GraphBuilder {
    graph: GraphProto,
}

/// A node without attributes.
pub fn node(op_type: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.to_owned()),
        input: inputs.iter().map(|&name| name.to_owned()).collect(),
        output: outputs.iter().map(|&name| name.to_owned()).collect(),
        ..NodeProto::default()
    }
}

/// Adds an integer attribute.
pub fn with_int(mut node: NodeProto, name: &str, value: i64) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(2),
        i: Some(value),
        ..AttributeProto::default()
    });
    node
}

/// Adds an integer list attribute.
pub fn with_ints(mut node: NodeProto, name: &str, values: &[i64]) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(7),
        ints: values.to_vec(),
        ..AttributeProto::default()
    });
    node
}

/// Adds a string attribute.
pub fn with_string(mut node: NodeProto, name: &str, value: &str) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(3),
        s: Some(value.as_bytes().to_vec()),
        ..AttributeProto::default()
    });
    node
}

/// Adds a tensor attribute.
pub fn with_tensor(mut node: NodeProto, name: &str, value: TensorProto) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(4),
        t: Some(value),
        ..AttributeProto::default()
    });
    node
}

/// Adds a subgraph attribute.
pub fn with_graph(mut node: NodeProto, name: &str, graph: GraphProto) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(5),
        g: Some(graph),
        ..AttributeProto::default()
    });
    node
}

/// Sets the name.
pub fn named(mut node: NodeProto, name: &str) -> NodeProto {
    node.name = Some(name.to_owned());
    node
}

/// Sets the domain.
pub fn in_domain(mut node: NodeProto, domain: &str) -> NodeProto {
    node.domain = Some(domain.to_owned());
    node
}

/// A tensor type with fixed dims where the text is a number and symbolic ones otherwise; `?` is unknown.
pub fn value(name: &str, elem_type: i32, dims: &[&str]) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = dims
        .iter()
        .map(|&text| Dimension {
            value: match text.parse() {
                Ok(number) => Some(Value::DimValue(number)),
                Err(_) if text == "?" => None,
                Err(_) => Some(Value::DimParam(text.to_owned())),
            },
            denotation: None,
        })
        .collect();
    ValueInfoProto {
        name: Some(name.to_owned()),
        r#type: Some(TypeProto {
            value: Some(type_proto::Value::TensorType(type_proto::Tensor {
                elem_type: Some(elem_type),
                shape: Some(TensorShapeProto { dim }),
            })),
            denotation: None,
        }),
        ..ValueInfoProto::default()
    }
}

/// An `f32` constant with raw contents.
pub fn constant(name: &str, shape: &[i64], values: &[f32]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: shape.to_vec(),
        data_type: Some(1),
        raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()),
        ..TensorProto::default()
    }
}

impl GraphBuilder {
    /// An empty graph.
    pub fn new() -> Self {
        Self { graph: GraphProto { name: Some("test".into()), ..GraphProto::default() } }
    }

    /// Adds an `f32` input of fixed shape.
    #[must_use]
    pub fn input(self, name: &str, shape: &[i64]) -> Self {
        let dims: Vec<String> = shape.iter().map(ToString::to_string).collect();
        self.typed_input(value(name, 1, &dims.iter().map(String::as_str).collect::<Vec<_>>()))
    }

    /// Adds any input.
    #[must_use]
    pub fn typed_input(mut self, input: ValueInfoProto) -> Self {
        self.graph.input.push(input);
        self
    }

    /// Adds a node.
    #[must_use]
    pub fn node(mut self, node: NodeProto) -> Self {
        self.graph.node.push(node);
        self
    }

    /// Adds an `f32` initializer.
    #[must_use]
    pub fn constant(self, name: &str, shape: &[i64], values: &[f32]) -> Self {
        self.initializer(constant(name, shape, values))
    }

    /// Adds an `i64` vector initializer.
    #[must_use]
    pub fn indices(self, name: &str, values: &[i64]) -> Self {
        self.initializer(crate::tensor::from_i64(name, &[values.len() as i64], values))
    }

    /// Adds any initializer.
    #[must_use]
    pub fn initializer(mut self, tensor: TensorProto) -> Self {
        self.graph.initializer.push(tensor);
        self
    }

    /// Adds an output without a shape.
    #[must_use]
    pub fn output(mut self, name: &str) -> Self {
        let mut output = value(name, 1, &[]);
        if let Some(type_proto::Value::TensorType(tensor)) = output.r#type.as_mut().and_then(|kind| kind.value.as_mut())
        {
            tensor.shape = None;
        }
        self.graph.output.push(output);
        self
    }

    /// The graph.
    pub fn graph(self) -> GraphProto {
        self.graph
    }

    /// The graph as a model of opset 17.
    pub fn model(self) -> ModelProto {
        ModelProto {
            ir_version: Some(8),
            opset_import: vec![
                OperatorSetIdProto { domain: Some(String::new()), version: Some(17) },
                OperatorSetIdProto { domain: Some("com.microsoft".into()), version: Some(1) },
            ],
            graph: Some(self.graph),
            ..ModelProto::default()
        }
    }

    /// The model's file contents.
    pub fn bytes(self) -> Vec<u8> {
        self.model().encode_to_vec()
    }

    /// Writes the model into a folder and returns its path.
    ///
    /// # Errors
    /// The operating system's.
    pub fn write(self, folder: &std::path::Path, name: &str) -> std::io::Result<std::path::PathBuf> {
        let path = folder.join(name);
        std::fs::write(&path, self.bytes())?;
        Ok(path)
    }
}

/// A graph from text such as `s = Sigmoid(x); y = Mul(x, s)`: names that start with `c` are `f32[4]` constants, those with
/// `i` are `i64[1]` ones, other names that nothing writes are `f32[2, 4]` inputs. Several results are written `a, b = Split(x)`.
/// The last result is the output, and so is every name in `outputs`.
pub fn graph(text: &str, outputs: &[&str]) -> GraphBuilder {
    let mut builder = GraphBuilder::new();
    let mut known: std::collections::BTreeSet<String> = std::collections::BTreeSet::new();
    let mut last = String::new();
    for statement in text.split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
        let (results, call) = statement.split_once('=').expect("a result");
        let (operator, arguments) = call.trim().trim_end_matches(')').split_once('(').expect("a call");
        let results: Vec<&str> = results.split(',').map(str::trim).collect();
        let arguments: Vec<&str> = arguments.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        for &name in &arguments {
            if !known.insert(name.to_owned()) {
                continue;
            }
            builder = match name.as_bytes()[0] {
                b'c' => builder.constant(name, &[4], &[0.5; 4]),
                b'i' => builder.indices(name, &[1]),
                _ => builder.input(name, &[2, 4]),
            };
        }
        builder = builder.node(named(node(operator, &arguments, &results), results[0]));
        known.extend(results.iter().map(|&name| name.to_owned()));
        results[results.len() - 1].clone_into(&mut last);
    }
    for &name in outputs {
        builder = builder.output(name);
    }
    builder.output(&last)
}

/// `f32[2, 4]` for every value that a node of the graph writes, as if a traced run had told it.
pub fn uniform(graph: &GraphProto) -> std::collections::BTreeMap<String, trefoil_core::TensorInfo> {
    let names = graph.node.iter().flat_map(|node| &node.output).filter(|name| !name.is_empty());
    names
        .map(|name| (name.clone(), trefoil_core::TensorInfo::new(name, trefoil_core::DataType::F32, [2u64, 4])))
        .collect()
}

/// Decodes and prepares a graph with [`uniform`] shapes.
///
/// # Errors
/// Whatever reading or preparing finds wrong.
pub fn prepare(builder: GraphBuilder) -> Result<crate::Prepared, crate::OnnxError> {
    let values = uniform(&builder.graph);
    let model = crate::Model::decode(builder.bytes().into(), std::path::Path::new("test.onnx"))?;
    crate::Prepared::new(model, &values)
}
