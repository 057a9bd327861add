//! Everything that can be wrong with an ONNX model, a shape, an extraction or an `.npz` file.

use crate::ModelPort;
use thiserror::Error;

/// Errors of this crate: one lowercase line each, with the names involved and what to do next.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OnnxError {
    /// The operating system refused.
    #[error("{path}: {reason}")]
    Io {
        /// File or folder.
        path: String,
        /// The operating system's words.
        reason: String,
    },
    /// The bytes are no protobuf message of an ONNX model.
    #[error("{path} is not an ONNX model or is cut short: {reason}")]
    Decode {
        /// File.
        path: String,
        /// The decoder's words.
        reason: String,
    },
    /// A protobuf message without a graph.
    #[error("{path} holds no graph; it is not an ONNX model (or an empty one)")]
    NoGraph {
        /// File.
        path: String,
    },
    /// An intermediate representation this build does not know.
    #[error(
        "{path} has ONNX IR version {version}; this Trefoil reads 3 to {newest}, convert the model with onnx.version_converter"
    )]
    IrVersion {
        /// File.
        path: String,
        /// Version found; 0 when absent.
        version: i64,
        /// Newest version known.
        newest: i64,
    },
    /// No operator set, or one before 7.
    #[error("{path}: {reason}; convert the model with onnx.version_converter to opset 13 or later")]
    Opset {
        /// File.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// A constant whose bytes do not fit its type and shape, or whose description makes no sense.
    #[error("constant `{tensor}`: {reason}")]
    Constant {
        /// Tensor name.
        tensor: String,
        /// What is wrong, with numbers.
        reason: String,
    },
    /// An external data file that is not there.
    #[error(
        "tensor `{tensor}` lies in external data file {file}, which cannot be read ({reason}); put it beside the model"
    )]
    ExternalMissing {
        /// Tensor name.
        tensor: String,
        /// File as resolved.
        file: String,
        /// The operating system's words.
        reason: String,
    },
    /// External data beyond the end of its file.
    #[error(
        "tensor `{tensor}` wants bytes {offset}..{end} of {file}, which has {size}; the data file belongs to another model or is cut short"
    )]
    ExternalRange {
        /// Tensor name.
        tensor: String,
        /// File as resolved.
        file: String,
        /// First byte.
        offset: u64,
        /// One past the last byte; saturated.
        end: u64,
        /// File size.
        size: u64,
    },
    /// External data outside the model's folder, which could leak any file of the machine into a model's outputs.
    #[error("tensor `{tensor}` points to external data `{location}` outside the model's folder; refused")]
    ExternalEscape {
        /// Tensor name.
        tensor: String,
        /// Location as written in the model.
        location: String,
    },
    /// Nodes that read from each other in a circle.
    #[error("the graph has a cycle through nodes {nodes}")]
    Cycle {
        /// Node names joined with ` → `.
        nodes: String,
    },
    /// A value that nothing defines.
    #[error("{reader} reads `{value}`, which no input, initializer or node defines")]
    Undefined {
        /// Who reads it, such as ``node `conv1` (Conv)``.
        reader: String,
        /// The value.
        value: String,
    },
    /// A value defined more than once.
    #[error("value `{value}` is defined twice: by {first} and by {second}")]
    Duplicate {
        /// The value.
        value: String,
        /// First definition.
        first: String,
        /// Second definition.
        second: String,
    },
    /// A required part is missing from the model.
    #[error("malformed graph: {reason}")]
    Malformed {
        /// What, with names.
        reason: String,
    },
    /// A model input that is a sequence, map, optional or sparse tensor.
    #[error("input `{name}` is no dense tensor; Trefoil feeds and moves dense tensors only")]
    InputKind {
        /// Input name.
        name: String,
    },
    /// A shape was given for an input that the model does not have.
    #[error("the model has no input `{name}`; it has {have}")]
    UnknownInput {
        /// Name given.
        name: String,
        /// Inputs there are.
        have: String,
    },
    /// A shape of the wrong rank.
    #[error("input `{name}` is {dims}, but the shape given is {given:?} ({rank} dims where the model has {want})")]
    Rank {
        /// Input name.
        name: String,
        /// Dims in the model.
        dims: String,
        /// Shape given.
        given: Vec<u64>,
        /// Its rank.
        rank: usize,
        /// Rank in the model.
        want: usize,
    },
    /// A shape that contradicts the model.
    #[error("input `{name}` is {dims}, but the shape given is {given:?}: {reason}")]
    ShapeConflict {
        /// Input name.
        name: String,
        /// Dims in the model.
        dims: String,
        /// Shape given.
        given: Vec<u64>,
        /// Where they differ.
        reason: String,
    },
    /// Extents that are still open.
    #[error("model `{model}` leaves extents open: {}; fix them with {} (numbers for names)", listed(.open), flags(.whose, .open))]
    SymbolicDims {
        /// The model's name.
        model: String,
        /// Inputs that have open extents.
        open: Vec<ModelPort>,
        /// What the names of inputs begin with in the flags that fix them: `MODEL/` where several models are asked about at once.
        whose: String,
    },
    /// A value whose shape or type nobody told.
    #[error("nothing tells the shape of `{value}` ({context}); run the traced model first and pass its results")]
    UnknownShape {
        /// The value.
        value: String,
        /// Who writes or reads it.
        context: String,
    },
    /// A node index out of range.
    #[error("the model has {count} nodes, there is no node {index}")]
    NodeIndex {
        /// Index given.
        index: usize,
        /// Number of nodes.
        count: usize,
    },
    /// A set of operators that cannot be cut out.
    #[error("cannot extract operators {operators}: {reason}")]
    Extract {
        /// The ids.
        operators: String,
        /// Why.
        reason: String,
    },
    /// An input that cannot be carried on from one iteration to the next as asked.
    #[error("input `{input}` cannot be carried on: {reason}")]
    Update {
        /// The input.
        input: String,
        /// Why.
        reason: String,
    },
    /// A graph broke its own invariants; a bug of this crate rather than of the model.
    #[error("{0}")]
    Graph(#[from] trefoil_core::CoreError),
    /// A prepared model that cannot be read back.
    #[error("prepared model in {dir}: {reason}; delete the folder and prepare the model again")]
    Cache {
        /// Folder.
        dir: String,
        /// What is wrong.
        reason: String,
    },
    /// An `.npz` or `.npy` file that cannot be read or written.
    #[error("{path}: {reason}")]
    Npz {
        /// File.
        path: String,
        /// What is wrong, with the array's name.
        reason: String,
    },
}

impl OnnxError {
    pub(crate) fn io(path: &std::path::Path, error: &std::io::Error) -> Self {
        Self::Io { path: path.display().to_string(), reason: error.to_string() }
    }
}

/// `` `x` [batch, 3], `y` [?] ``.
fn listed(ports: &[ModelPort]) -> String {
    ports.iter().map(|port| format!("`{}` {}", port.name, port.dims_text())).collect::<Vec<_>>().join(", ")
}

/// `--shape x=batch,3 --shape y=?`: what is left to do is to write numbers.
fn flags(whose: &str, ports: &[ModelPort]) -> String {
    let flag = |port: &ModelPort| {
        let dims = port.dims.as_ref().map_or_else(
            || "D0,D1,…".to_owned(),
            |dims| dims.iter().map(|dim| dim.to_string().replace([' ', ','], "_")).collect::<Vec<_>>().join(","),
        );
        format!("--shape {whose}{}={dims}", port.name)
    };
    ports.iter().map(flag).collect::<Vec<_>>().join(" ")
}
