//! The artefact file (`.trefoil`): packed INT8 weights and what belongs to them, ready to be mapped.
//!
//! # Format, version 1
//! All integers are little-endian. The file is a sequence of sections without gaps; every byte belongs to the header, a
//! section or the index, and every byte is covered by a checksum or checked to be zero.
//!
//! | where | what |
//! |---|---|
//! | 0 .. 65,536 | header (below), rest zero |
//! | 65,536 .. | data sections one after the other, each padded with zeros to a multiple of 65,536 |
//! | last | the index: UTF-8 JSON, not padded |
//!
//! | header byte | field |
//! |---|---|
//! | 0 .. 8 | magic `93 54 52 45 46 57 0D 0A` (`\x93TREFW\r\n`: a text-mode copy breaks it) |
//! | 8 .. 12 | format version, 1 |
//! | 12 .. 16 | section alignment, 65,536 |
//! | 16 .. 24 | bytes of the whole file |
//! | 24 .. 32 | offset of the index |
//! | 32 .. 40 | bytes of the index |
//! | 40 .. 48 | flags, 0; a reader refuses flags that it does not know |
//! | 48 .. 80 | SHA-256 of the index |
//! | 80 .. 112 | SHA-256 of bytes 0 .. 80 |
//!
//! **Sections.** One `region N` per block holds that block's base weights and nothing else; it can be mapped, copied or
//! handed to a device on its own. The other sections hold one memory class each: `adapter`, `scales`, `bias`, `norm`,
//! `embedder`, `step`, `other`. The alignment is that of the largest common page size, so every section can be mapped on
//! its own on any machine. Within a section, tensors start at multiples of 128 bytes (the alignment that OpenCL asks of
//! host pointers and one HVX vector); gaps are zero.
//!
//! **Index.** An object with `format` (`"trefoil-weights"`), `metadata` (an object: rule set, source, model configuration,
//! whatever the packer was given), `sections` (name, block, label, offset, bytes, SHA-256 over bytes **and** padding) and
//! `tensors` (name, class, owner, section number, offset in the section, bytes, element type, layout, shape, padded shape,
//! source name). Unknown fields are ignored, so fields may be added within a version; a change of meaning is a new version.
//! The SHA-256 of the index is the artefact's **fingerprint**: it covers all checksums and so all bytes.
//!
//! **Tensors.** Layout `tile32` is INT8 codes of a `d_in × d_out` matrix in the order of [`crate::tile`]; `shape` is
//! `[d_in, d_out]` (the transpose of a PyTorch Linear weight) and `padded_shape` its multiple of 32. Its scales are the
//! tensor `NAME.scale`: `f32`, one per padded column, 1 in the padding. The bias of a tiled matrix is padded with zeros to
//! the same length, so kernels may read whole tiles. Layout `row-major` is anything else.

mod index;
mod info;
mod reader;
mod writer;

pub use index::{Layout, SectionRecord, StoredType, TensorClass, TensorRecord, TensorSpec};
pub use info::{ClassBytes, Info, MemoryClasses, RegionInfo, memory_classes, render_info};
pub use reader::{Artefact, RegionView, TensorView, TiledView};
pub use writer::{ArtefactWriter, SectionName, WriteSummary};

/// Version that this build writes and reads.
pub const FORMAT_VERSION: u32 = 1;
/// Alignment of sections in bytes.
pub const SECTION_ALIGNMENT: u64 = 65_536;
/// Alignment of tensors within a section in bytes.
pub const TENSOR_ALIGNMENT: u64 = 128;

const MAGIC: [u8; 8] = *b"\x93TREFW\r\n";
const HEADER_BYTES: u64 = SECTION_ALIGNMENT;
/// Bytes 0 .. 80 are covered by the header checksum that follows them.
const HEADER_COVERED: usize = 80;
const HEADER_USED: usize = 112;
/// Largest index that is read: a model of a million tensors stays well below it.
const MAX_INDEX_BYTES: u64 = 256 << 20;

type Checksum = [u8; 32];

/// Lowercase hexadecimal.
fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The fixed fields of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    file_bytes: u64,
    index_offset: u64,
    index_bytes: u64,
    index_checksum: Checksum,
}

impl Header {
    fn encode(&self) -> [u8; HEADER_USED] {
        let mut bytes = [0u8; HEADER_USED];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(SECTION_ALIGNMENT as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.file_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.index_offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.index_bytes.to_le_bytes());
        bytes[48..80].copy_from_slice(&self.index_checksum);
        let checksum = sha256(&bytes[..HEADER_COVERED]);
        bytes[HEADER_COVERED..].copy_from_slice(&checksum);
        bytes
    }
}

/// SHA-256 of some bytes.
fn sha256(bytes: &[u8]) -> Checksum {
    use sha2::Digest as _;
    sha2::Sha256::digest(bytes).into()
}
