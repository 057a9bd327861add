//! What can go wrong between a checkpoint and a mapped region.

use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Errors of this crate: lowercase, one line, naming file, tensor, section or peer and what to do next.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried (`open`, `map`, `write`, …).
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A checkpoint that is not readable as safetensors.
    #[error("checkpoint {}: {reason}", path.display())]
    Checkpoint {
        /// File or directory.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file that another process changed while it was read.
    #[error("{} {how} while it was read; leave it as it is until the command ends, and start again", path.display())]
    Changed {
        /// File.
        path: PathBuf,
        /// What happened to it.
        how: &'static str,
    },
    /// The caller asked to stop.
    #[error("packing was stopped; nothing was written")]
    Stopped,
    /// A weight that no scale can represent.
    #[error(
        "tensor `{tensor}` holds {value} at row {row}, column {column} of its {d_in}×{d_out} matrix (input × output); the checkpoint is damaged or not finished, pack a finite one"
    )]
    NonFinite {
        /// Tensor name in the source.
        tensor: String,
        /// `NaN`, `inf` or `-inf`.
        value: f32,
        /// Input index i of W.
        row: u64,
        /// Output index j of W.
        column: u64,
        /// Rows of W.
        d_in: u64,
        /// Columns of W.
        d_out: u64,
    },
    /// NaN or infinity in a tensor that is stored unquantised.
    #[error(
        "tensor `{tensor}` {shape:?} holds {value} at flat index {index}; the checkpoint is damaged or not finished, pack a finite one"
    )]
    NonFinitePlain {
        /// Tensor name in the source.
        tensor: String,
        /// `NaN`, `inf` or `-inf`.
        value: f32,
        /// Row-major index.
        index: u64,
        /// Shape.
        shape: Vec<u64>,
    },
    /// A tensor whose shape or type does not fit its use.
    #[error("tensor `{tensor}`: {reason}")]
    Tensor {
        /// Tensor name.
        tensor: String,
        /// What is wrong, with shapes.
        reason: String,
    },
    /// A rule set that cannot be applied.
    #[error("rule set `{rules}`: {reason}")]
    Rules {
        /// Name of the rule set.
        rules: String,
        /// What is wrong.
        reason: String,
    },
    /// A file that is no artefact at all.
    #[error("{} is not a trefoil weights artefact ({reason}); make one with `trefoil weights pack`", path.display())]
    Foreign {
        /// File.
        path: PathBuf,
        /// What it looks like instead.
        reason: String,
    },
    /// An artefact of a format version that this build does not read.
    #[error("{} is a weights artefact of version {found}, this trefoil reads version {supported}; {hint}", path.display())]
    Version {
        /// File.
        path: PathBuf,
        /// Version found.
        found: u32,
        /// Version read by this build.
        supported: u32,
        /// What to do.
        hint: &'static str,
    },
    /// The file is shorter or longer than its header says.
    #[error("{} {}; copy or pack it again", path.display(), length(*.have, *.want, .of))]
    Length {
        /// File.
        path: PathBuf,
        /// Bytes there are.
        have: u64,
        /// Bytes there should be.
        want: u64,
        /// What has so many bytes: `the file`, as its header says, or, where that is cut short itself, `the header alone`.
        of: &'static str,
    },
    /// Bytes that do not match their checksum, or an index that contradicts itself.
    #[error("{} is corrupted in section `{section}`: {reason}; copy or pack it again", path.display())]
    Corrupt {
        /// File.
        path: PathBuf,
        /// `header`, `index`, `region 3`, `scales`, …
        section: String,
        /// What does not fit.
        reason: String,
    },
    /// The artefact has no such tensor.
    #[error("{} has no tensor `{name}`; {hint}", path.display())]
    UnknownTensor {
        /// File.
        path: PathBuf,
        /// Name asked for.
        name: String,
        /// Similar names, or how many there are.
        hint: String,
    },
    /// The artefact has no region for a block.
    #[error("{} has no region for block {block}; it has {have}", path.display())]
    UnknownRegion {
        /// File.
        path: PathBuf,
        /// Block asked for.
        block: u32,
        /// Blocks it has.
        have: String,
    },
    /// A sequence of writer calls that would make a malformed artefact.
    #[error("artefact {} cannot be written: {reason}", path.display())]
    Writer {
        /// Output file.
        path: PathBuf,
        /// Which rule the caller broke.
        reason: String,
    },
    /// A region above the platform's limit.
    #[error(
        "region of block {block} needs {bytes} bytes, above the limit of {limit} for kind {kind}; choose another kind, or raise the limit if `trefoil probe` shows that it maps"
    )]
    RegionTooLarge {
        /// Block.
        block: u32,
        /// Bytes needed.
        bytes: u64,
        /// Bytes allowed.
        limit: u64,
        /// Region kind.
        kind: &'static str,
    },
    /// A region kind that this machine cannot provide.
    #[error("regions of kind {kind} are not available here: {reason}; {fix}")]
    RegionUnavailable {
        /// Region kind.
        kind: &'static str,
        /// Why.
        reason: String,
        /// What would fix it.
        fix: &'static str,
    },
    /// The system refused an operation on a region.
    #[error("cannot {action} a {kind} region of {bytes} bytes: {source}")]
    Region {
        /// What was tried.
        action: &'static str,
        /// Region kind.
        kind: &'static str,
        /// Size of the region.
        bytes: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// An access outside a region or against its access mode.
    #[error("region of block {block}: {reason}")]
    RegionAccess {
        /// Block.
        block: u32,
        /// Which bound or mode was broken.
        reason: String,
    },
    /// The peer closed its end or died.
    #[error("the peer closed the connection while {while_doing}; look at the peer's own messages")]
    PeerClosed {
        /// Step of the handshake.
        while_doing: &'static str,
    },
    /// The peer did not do its part in time.
    #[error("the peer did nothing useful for {waited_ms} ms while {while_doing}; it hangs or is not a trefoil process")]
    PeerTimeout {
        /// Step of the handshake.
        while_doing: &'static str,
        /// How long was waited.
        waited_ms: u64,
    },
    /// The peer sent something that is not the protocol.
    #[error("the peer broke the sharing protocol while {while_doing}: {reason}")]
    PeerProtocol {
        /// Step of the handshake.
        while_doing: &'static str,
        /// What was wrong.
        reason: String,
    },
    /// The peer understood and said no.
    #[error("the peer refused: {reason}")]
    PeerRefused {
        /// Its reason.
        reason: String,
    },
    /// The socket itself failed.
    #[error("socket error while {while_doing}: {source}")]
    Socket {
        /// Step of the handshake.
        while_doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

/// What is wrong with a length: what was expected, what is there.
fn length(have: u64, want: u64, of: &str) -> String {
    if have < want {
        format!("is truncated: {of} needs {want} bytes, {have} are there")
    } else {
        format!("has {have} bytes, and by its header {of} has {want}: something was appended")
    }
}

impl WeightsError {
    /// An [`WeightsError::Io`] with its place; used as `.map_err(WeightsError::io("open", path))`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> WeightsError {
        let path = path.to_path_buf();
        move |source| WeightsError::Io { action, path, source }
    }

    /// A [`WeightsError::Checkpoint`].
    pub(crate) fn checkpoint(path: &Path, reason: impl Into<String>) -> WeightsError {
        WeightsError::Checkpoint { path: path.to_path_buf(), reason: reason.into() }
    }

    /// A [`WeightsError::Corrupt`].
    pub(crate) fn corrupt(path: &Path, section: impl Into<String>, reason: impl Into<String>) -> WeightsError {
        WeightsError::Corrupt { path: path.to_path_buf(), section: section.into(), reason: reason.into() }
    }
}
