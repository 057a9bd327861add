//! The fusion rules of granularity `fused`, as data.
//!
//! Three tables, applied in order. [`TREES`] are fixed shapes that exporters leave of one mathematical function: a GELU, a
//! layer normalisation. [`SHARED`] are cheap nodes that several
//! readers each get a copy of. [`CHAINS`] join two neighbouring groups when the first one's result goes to the second and nowhere
//! else. In every group a rule makes, only the last node's outputs are visible outside; that is what keeps each operator
//! convex, however the rules combine (a way out of a group starts at its last node, which no node of the group follows).

/// What a group of nodes is, as far as the rules care.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Contractions: convolutions and matrix products, with whatever scale and bias already follows.
    Contraction,
    /// A contraction with a residual added.
    ContractionSum,
    /// A contraction with its activation; takes nothing more.
    ContractionDone,
    /// `BatchNormalization`.
    BatchNorm,
    /// `Add` or `Sub` of a constant.
    Bias,
    /// `Mul` or `Div` by a constant.
    Scale,
    /// `Add` of two activations.
    Sum,
    /// An activation function, one node or a tree.
    Activation,
    /// Any other elementwise operator.
    Elementwise,
    /// A normalisation, one node or a tree.
    Normalization,
    /// `Softmax`, one node or a tree.
    Softmax,
    /// `DequantizeLinear` of an activation.
    Dequantize,
    /// `QuantizeLinear`.
    Quantize,
    /// Changes only the shape or the order of elements.
    Layout,
    /// Reads nothing: a random source.
    Generator,
    /// Everything else.
    Other,
}

use Class::{
    Activation, BatchNorm, Bias, Contraction, ContractionDone, ContractionSum, Dequantize, Elementwise, Generator,
    Layout, Normalization, Other, Quantize, Scale, Softmax, Sum,
};

/// Standard-domain operators by class; `Add`, `Sub`, `Mul` and `Div` depend on their inputs and are classed in code.
/// Everything not listed is [`Class::Other`].
pub const OPERATOR_CLASSES: &[(Class, &[&str])] = &[
    (
        Contraction,
        &[
            "Conv",
            "ConvTranspose",
            "Gemm",
            "MatMul",
            "ConvInteger",
            "MatMulInteger",
            "QLinearConv",
            "QLinearMatMul",
            "Einsum",
            "FusedMatMul",
            "FusedConv",
            "MatMulNBits",
        ],
    ),
    (BatchNorm, &["BatchNormalization"]),
    (
        Activation,
        &[
            "Relu",
            "LeakyRelu",
            "PRelu",
            "Clip",
            "Sigmoid",
            "HardSwish",
            "HardSigmoid",
            "Tanh",
            "Elu",
            "Celu",
            "Selu",
            "Gelu",
            "Mish",
            "Softplus",
            "Swish",
            "ThresholdedRelu",
            "QuickGelu",
            "FastGelu",
        ],
    ),
    (
        Elementwise,
        &[
            "Abs",
            "Acos",
            "Acosh",
            "And",
            "Asin",
            "Asinh",
            "Atan",
            "Atanh",
            "BitShift",
            "BitwiseAnd",
            "BitwiseNot",
            "BitwiseOr",
            "BitwiseXor",
            "Cast",
            "Ceil",
            "Cos",
            "Cosh",
            "Equal",
            "Erf",
            "Exp",
            "Floor",
            "Greater",
            "GreaterOrEqual",
            "IsInf",
            "IsNaN",
            "Less",
            "LessOrEqual",
            "Log",
            "Max",
            "Min",
            "Mod",
            "Neg",
            "Not",
            "Or",
            "Pow",
            "Reciprocal",
            "Round",
            "Shrink",
            "Sign",
            "Sin",
            "Sinh",
            "Softsign",
            "Sqrt",
            "Tan",
            "Where",
            "Xor",
        ],
    ),
    (
        Normalization,
        &[
            "LayerNormalization",
            "RMSNormalization",
            "GroupNormalization",
            "InstanceNormalization",
            "SimplifiedLayerNormalization",
            "SkipLayerNormalization",
            "LpNormalization",
        ],
    ),
    (Softmax, &["Softmax", "LogSoftmax"]),
    (Dequantize, &["DequantizeLinear"]),
    (Quantize, &["QuantizeLinear"]),
    (Layout, &["Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"]),
];

/// A tree that is one function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tree {
    /// Name, for tests and reports.
    pub name: &'static str,
    /// The tree: operators with their inputs in brackets, last node first. A lower-case name is any value, the same wherever the
    /// name stands; `#` is any constant; `name:Operator(…)` names what a node writes; `A|B(…)` allows either operator.
    pub pattern: &'static str,
    /// Class of the group.
    pub class: Class,
}

/// Fixed shapes. Larger ones come first, so that a GELU is not taken apart by a rule for its inside.
pub const TREES: &[Tree] = &[
    // BERT and ViT exports: 0.5 · x · (1 + erf(x / √2)), in the orders that exporters write.
    Tree { name: "gelu-erf", pattern: "Mul(Mul(x, Add(Erf(Div|Mul(x, #)), #)), #)", class: Activation },
    Tree { name: "gelu-erf-half-first", pattern: "Mul(Mul(x, #), Add(Erf(Div|Mul(x, #)), #))", class: Activation },
    Tree { name: "gelu-erf-half-last", pattern: "Mul(x, Mul(Add(Erf(Div|Mul(x, #)), #), #))", class: Activation },
    // GPT-2's approximation: 0.5 · x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))).
    Tree {
        name: "gelu-tanh",
        pattern: "Mul(Mul(x, #), Add(Tanh(Mul(Add(x, Mul(Pow(x, #), #)), #)), #))",
        class: Activation,
    },
    Tree {
        name: "gelu-tanh-half-last",
        pattern: "Mul(Mul(x, Add(Tanh(Mul(Add(x, Mul(Pow(x, #), #)), #)), #)), #)",
        class: Activation,
    },
    Tree {
        name: "gelu-tanh-cube",
        pattern: "Mul(Mul(x, #), Add(Tanh(Mul(Add(x, Mul(Mul(Mul(x, x), x), #)), #)), #))",
        class: Activation,
    },
    Tree { name: "silu", pattern: "Mul(x, Sigmoid(x))", class: Activation },
    Tree { name: "quick-gelu", pattern: "Mul(x, Sigmoid(Mul(x, #)))", class: Activation },
    Tree { name: "hard-swish", pattern: "Mul(x, HardSigmoid(x))", class: Activation },
    Tree { name: "hard-swish-clip", pattern: "Div|Mul(Mul(x, Clip(Add(x, #))), #)", class: Activation },
    Tree { name: "mish", pattern: "Mul(x, Tanh(Softplus(x)))", class: Activation },
    // (x − mean) / √(var + ε) [· γ [+ β]]; γ and β join through the chains.
    Tree {
        name: "layer-norm",
        pattern: "Div(d:Sub(x, ReduceMean(x)), Sqrt(Add(ReduceMean(Pow(d, #)), #)))",
        class: Normalization,
    },
    Tree {
        name: "layer-norm-square",
        pattern: "Div(d:Sub(x, ReduceMean(x)), Sqrt(Add(ReduceMean(Mul(d, d)), #)))",
        class: Normalization,
    },
    Tree {
        name: "layer-norm-reciprocal",
        pattern: "Mul(d:Sub(x, ReduceMean(x)), Reciprocal(Sqrt(Add(ReduceMean(Pow|Mul(d, _)), #))))",
        class: Normalization,
    },
    // x / √(mean(x²) + ε) [· γ], as LLaMA exports have it.
    Tree { name: "rms-norm", pattern: "Mul(x, Reciprocal(Sqrt(Add(ReduceMean(Pow(x, #)), #))))", class: Normalization },
    Tree {
        name: "rms-norm-division",
        pattern: "Mul(x, Div(#, Sqrt(Add(ReduceMean(Pow(x, #)), #))))",
        class: Normalization,
    },
    Tree { name: "rms-norm-direct", pattern: "Div(x, Sqrt(Add(ReduceMean(Pow(x, #)), #)))", class: Normalization },
    Tree {
        name: "rms-norm-square",
        pattern: "Mul(x, Reciprocal(Sqrt(Add(ReduceMean(Mul(x, x)), #))))",
        class: Normalization,
    },
    Tree { name: "softmax", pattern: "Div(e:Exp(Sub(x, ReduceMax(x))), ReduceSum(e))", class: Softmax },
    Tree { name: "softmax-plain", pattern: "Div(e:Exp(x), ReduceSum(e))", class: Softmax },
];

/// Classes of single nodes that every reader gets a copy of when there are several. A dequantisation costs next to nothing inside a
/// kernel, its input is a quarter of its output, and an integer kernel needs to see it.
pub const SHARED: &[Class] = &[Dequantize];

/// Joins a group to the single group that reads its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    /// Name, for tests and reports.
    pub name: &'static str,
    /// Classes of the group whose result is handed on.
    pub producer: &'static [Class],
    /// Classes of the group that reads it.
    pub consumer: &'static [Class],
    /// Class of the result.
    pub result: Outcome,
    /// A further condition.
    pub condition: Condition,
}

/// Class of a joined group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// This one.
    Class(Class),
    /// The producer's.
    Producer,
    /// The consumer's.
    Consumer,
}

/// A condition on joining two groups besides that nobody else reads in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// None.
    Always,
    /// The producer's result has no more elements than the consumer's: one loop computes both.
    NoLarger,
    /// The producer's group dequantises its inputs.
    Dequantized,
}

const ELEMENTWISE: &[Class] = &[Bias, Scale, Sum, Activation, Elementwise];
const ANY: &[Class] = &[
    Contraction,
    ContractionSum,
    ContractionDone,
    BatchNorm,
    Bias,
    Scale,
    Sum,
    Activation,
    Elementwise,
    Normalization,
    Softmax,
    Dequantize,
    Quantize,
    Layout,
    Generator,
    Other,
];
const NO_LAYOUT: &[Class] = &[
    Contraction,
    ContractionSum,
    ContractionDone,
    BatchNorm,
    Bias,
    Scale,
    Sum,
    Activation,
    Elementwise,
    Normalization,
    Softmax,
    Dequantize,
    Quantize,
    Other,
];
const NO_CAST: &[Class] =
    &[Contraction, BatchNorm, Bias, Scale, Sum, Activation, Elementwise, Normalization, Softmax, Layout, Other];

/// Neighbours that are one kernel, in the order they are tried; each is applied along the whole graph before the next.
pub const CHAINS: &[Chain] = &[
    Chain {
        name: "generator",
        producer: &[Generator],
        consumer: NO_LAYOUT,
        result: Outcome::Consumer,
        condition: Condition::Always,
    },
    // Integer kernels read their quantised inputs directly: DQ → operator (→ Q below).
    Chain {
        name: "dequantize",
        producer: &[Dequantize],
        consumer: NO_CAST,
        result: Outcome::Consumer,
        condition: Condition::Always,
    },
    Chain {
        name: "contraction-batch-norm",
        producer: &[Contraction],
        consumer: &[BatchNorm, Bias, Scale],
        result: Outcome::Class(Contraction),
        condition: Condition::Always,
    },
    Chain {
        name: "contraction-residual",
        producer: &[Contraction],
        consumer: &[Sum],
        result: Outcome::Class(ContractionSum),
        condition: Condition::NoLarger,
    },
    Chain {
        name: "contraction-activation",
        producer: &[Contraction, ContractionSum],
        consumer: &[Activation],
        result: Outcome::Class(ContractionDone),
        condition: Condition::Always,
    },
    Chain {
        name: "normalization-affine",
        producer: &[Normalization, BatchNorm],
        consumer: &[Scale, Bias],
        result: Outcome::Producer,
        condition: Condition::Always,
    },
    Chain {
        name: "batch-norm-activation",
        producer: &[BatchNorm],
        consumer: &[Activation],
        result: Outcome::Producer,
        condition: Condition::Always,
    },
    Chain {
        name: "elementwise",
        producer: ELEMENTWISE,
        consumer: ELEMENTWISE,
        result: Outcome::Class(Elementwise),
        condition: Condition::NoLarger,
    },
    Chain {
        name: "quantize",
        producer: NO_LAYOUT,
        consumer: &[Quantize],
        result: Outcome::Consumer,
        condition: Condition::Dequantized,
    },
    Chain {
        name: "layout-run",
        producer: &[Layout],
        consumer: &[Layout],
        result: Outcome::Class(Layout),
        condition: Condition::Always,
    },
    Chain {
        name: "layout-after",
        producer: NO_LAYOUT,
        consumer: &[Layout],
        result: Outcome::Producer,
        condition: Condition::Always,
    },
    Chain {
        name: "layout-before",
        producer: &[Layout],
        consumer: ANY,
        result: Outcome::Consumer,
        condition: Condition::Always,
    },
];
