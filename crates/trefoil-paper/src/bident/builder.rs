//! Builds operator graphs of fused operators from a few words each.

use trefoil_core::{
    DataType, Granularity, Operator, OperatorClass, OperatorGraph, OperatorId, Signature, TensorEdge, TensorId,
};

/// Precision of a configuration (BIDENT 4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Width {
    /// All in FP16.
    Fp16,
    /// Convolutions and matrix products on 8-bit operands, the rest in FP16, as post-training quantisation leaves it.
    Int8,
}

impl Width {
    /// `fp16`, `int8`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp16 => "fp16",
            Self::Int8 => "int8",
        }
    }
}

/// Operations per byte above which an operator is compute-bound; the same threshold as for real models.
const COMPUTE_BOUND_ABOVE: f64 = 8.0;

/// Sizes of an attention: heads of a width, rows of queries, number of keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attention {
    pub heads: u64,
    pub rows: u64,
    pub keys: u64,
    pub head: u64,
}

/// A graph under construction.
pub(super) struct Builder {
    graph: OperatorGraph,
    pub width: Width,
}

/// 32 hex digits of a text (FNV-1a, twice with different offsets): equal texts, equal fingerprints.
fn fingerprint(text: &str) -> String {
    let hash = |offset: u64| {
        text.bytes().fold(offset, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    };
    format!("{:016x}{:016x}", hash(0xcbf2_9ce4_8422_2325), hash(0x9ae1_6a3b_2f90_404f))
}

impl Builder {
    pub fn new(model: &str, width: Width) -> Self {
        Self {
            graph: OperatorGraph {
                model: model.to_owned(),
                fingerprint: fingerprint(model),
                granularity: Granularity::Fused,
                tensors: Vec::new(),
                operators: Vec::new(),
                inputs: Vec::new(),
                outputs: Vec::new(),
            },
            width,
        }
    }

    /// A model input in FP16.
    pub fn input(&mut self, name: &str, shape: &[u64]) -> TensorId {
        let id = self.tensor(name.to_owned(), shape, None);
        self.graph.inputs.push(id);
        id
    }

    fn tensor(&mut self, name: String, shape: &[u64], producer: Option<OperatorId>) -> TensorId {
        let bytes = 2 * shape.iter().product::<u64>();
        self.graph.tensors.push(TensorEdge {
            name,
            dtype: DataType::F16,
            shape: shape.to_vec(),
            bytes,
            producer,
            consumers: Vec::new(),
        });
        TensorId(self.graph.tensors.len() as u32 - 1)
    }

    pub fn shape(&self, tensor: TensorId) -> Vec<u64> {
        self.graph.tensor(tensor).shape.clone()
    }

    /// One fused operator. `operations` is 0 for data movement and elementwise work that no rate counts.
    pub fn op(
        &mut self,
        kind: &str,
        inputs: &[TensorId],
        shape: &[u64],
        operations: u64,
        weight_bytes: u64,
    ) -> TensorId {
        let id = OperatorId(self.graph.operators.len() as u32);
        let mut reads: Vec<TensorId> = Vec::new();
        for &input in inputs {
            if !reads.contains(&input) {
                reads.push(input);
                self.graph.tensors[input.index()].consumers.push(id);
            }
        }
        let output = self.tensor(format!("t{}", id.0), shape, Some(id));
        let shapes: Vec<_> = reads.iter().chain([&output]).map(|&tensor| self.shape(tensor)).collect();
        let bytes: u64 = reads.iter().chain([&output]).map(|&tensor| self.graph.tensor(tensor).bytes).sum();
        let intensity = operations as f64 / (bytes + weight_bytes).max(1) as f64;
        self.graph.operators.push(Operator {
            name: format!("{}_{}", kind.split('+').next().unwrap_or(kind), id.0),
            kind: kind.to_owned(),
            nodes: vec![id.0],
            inputs: reads,
            outputs: vec![output],
            signature: Signature(fingerprint(&format!(
                "{kind} {shapes:?} {operations} {weight_bytes} {}",
                self.width.name()
            ))),
            class: if intensity > COMPUTE_BOUND_ABOVE { OperatorClass::Compute } else { OperatorClass::Memory },
            flops: (operations > 0).then_some(operations),
            weight_bytes,
        });
        output
    }

    /// Elementwise work on tensors of one shape; `kind` lists the fused ONNX types.
    pub fn each(&mut self, kind: &str, inputs: &[TensorId]) -> TensorId {
        let shape = self.shape(inputs[0]);
        self.op(kind, inputs, &shape, 0, 0)
    }

    fn weight_bytes(&self, elements: u64) -> u64 {
        match self.width {
            Width::Fp16 => 2 * elements,
            Width::Int8 => elements,
        }
    }

    /// Convolution of [1, c, h, w], padded to `h / stride`; `after` is what is fused behind it (`Relu`, or nothing).
    pub fn conv(&mut self, x: TensorId, out: u64, kernel: u64, stride: u64, groups: u64, after: &str) -> TensorId {
        let shape = self.shape(x);
        let (channels, height, width) = (shape[1], shape[2].div_ceil(stride), shape[3].div_ceil(stride));
        let weights = out * (channels / groups) * kernel * kernel;
        let name = match self.width {
            Width::Fp16 => "Conv",
            Width::Int8 => "QLinearConv",
        };
        let kind = if after.is_empty() { name.to_owned() } else { format!("{name}+{after}") };
        self.op(&kind, &[x], &[1, out, height, width], 2 * weights * height * width, self.weight_bytes(weights))
    }

    /// Product with a weight matrix along the last axis.
    pub fn linear(&mut self, x: TensorId, out: u64, after: &str) -> TensorId {
        let mut shape = self.shape(x);
        let input = shape.pop().unwrap_or(1);
        let rows: u64 = shape.iter().product();
        shape.push(out);
        let kind = self.matmul_kind(after);
        self.op(&kind, &[x], &shape, 2 * rows * input * out, self.weight_bytes(input * out))
    }

    fn matmul_kind(&self, after: &str) -> String {
        let name = match self.width {
            Width::Fp16 => "MatMul",
            Width::Int8 => "QLinearMatMul",
        };
        if after.is_empty() { name.to_owned() } else { format!("{name}+{after}") }
    }

    /// Product of two activations: `heads` products of rows × inner by inner × columns.
    pub fn product(&mut self, a: TensorId, b: TensorId, heads: u64, rows: u64, inner: u64, columns: u64) -> TensorId {
        let kind = self.matmul_kind("");
        self.op(&kind, &[a, b], &[1, heads, rows, columns], 2 * heads * rows * inner * columns, 0)
    }

    /// Scaled dot-product attention of projected queries, keys and values; the result has the queries' shape.
    pub fn attend(&mut self, [queries, keys, values]: [TensorId; 3], size: Attention) -> TensorId {
        let Attention { heads, rows, keys: count, head } = size;
        let scores = self.product(queries, keys, heads, rows, head, count);
        let weights = self.each("Mul+Softmax", &[scores]);
        let mixed = self.product(weights, values, heads, rows, count, head);
        self.op("Transpose+Reshape", &[mixed], &[1, rows, heads * head], 0, 0)
    }

    /// Finishes with `output` as the model's output.
    pub fn finish(mut self, outputs: &[TensorId]) -> OperatorGraph {
        self.graph.outputs = outputs.to_vec();
        self.graph
    }
}
