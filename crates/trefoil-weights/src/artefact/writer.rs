//! Writing artefacts as a stream: sections and tensors in order, index and header last, then a rename.

use super::index::{FORMAT_NAME, Index};
use super::{
    FORMAT_VERSION, HEADER_BYTES, Header, SECTION_ALIGNMENT, SectionRecord, TENSOR_ALIGNMENT, TensorClass,
    TensorRecord, TensorSpec, hex, sha256,
};
use crate::WeightsError;
use sha2::{Digest as _, Sha256};
use std::collections::HashSet;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use trefoil_files::NewFile;

/// Which section to begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SectionName {
    /// The base weights of a block.
    Region {
        /// Block number.
        block: u32,
        /// Where its tensors come from, such as `blocks.3`.
        label: Option<String>,
    },
    /// Tensors of one class outside the regions.
    Class(TensorClass),
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteSummary {
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Fingerprint, hexadecimal.
    pub fingerprint: String,
}

/// Writes an artefact. Nothing appears under the output name before [`ArtefactWriter::finish`]; a writer that is dropped
/// removes its temporary file.
#[derive(Debug)]
pub struct ArtefactWriter {
    output: PathBuf,
    file: NewFile,
    /// Bytes of the file so far.
    position: u64,
    index: Index,
    names: HashSet<String>,
    blocks: HashSet<u32>,
    section: Option<OpenSection>,
}

#[derive(Debug)]
struct OpenSection {
    hasher: Sha256,
    start: u64,
    /// Bytes still to come of the tensor begun last.
    missing: u64,
}

impl ArtefactWriter {
    /// Starts an artefact beside `output`. `metadata` is stored as it is.
    pub fn create(
        output: &Path,
        metadata: serde_json::Map<String, serde_json::Value>,
    ) -> Result<ArtefactWriter, WeightsError> {
        let file = NewFile::create(output).map_err(WeightsError::io("write", output))?;
        file.as_file().set_len(HEADER_BYTES).map_err(WeightsError::io("write", output))?;
        file.as_file().seek(SeekFrom::Start(HEADER_BYTES)).map_err(WeightsError::io("write", output))?;
        Ok(ArtefactWriter {
            output: output.to_path_buf(),
            file,
            position: HEADER_BYTES,
            index: Index { format: FORMAT_NAME.to_string(), metadata, sections: Vec::new(), tensors: Vec::new() },
            names: HashSet::new(),
            blocks: HashSet::new(),
            section: None,
        })
    }

    /// Ends the section before, if any, and begins another.
    pub fn begin_section(&mut self, name: &SectionName) -> Result<(), WeightsError> {
        self.end_section()?;
        let (name, block, label) = match name {
            SectionName::Region { block, label } => {
                if !self.blocks.insert(*block) {
                    return self.misuse(format!("block {block} already has a region"));
                }
                (format!("region {block}"), Some(*block), label.clone())
            }
            SectionName::Class(class) => (class.to_string(), None, None),
        };
        if self.index.sections.iter().any(|section| section.name == name) {
            return self.misuse(format!("section `{name}` was written already"));
        }
        self.index.sections.push(SectionRecord {
            name,
            block,
            label,
            offset: self.position,
            bytes: 0,
            sha256: String::new(),
        });
        self.section = Some(OpenSection { hasher: Sha256::new(), start: self.position, missing: 0 });
        Ok(())
    }

    /// Begins a tensor of `bytes` stored bytes; its bytes follow through [`ArtefactWriter::write`].
    pub fn begin_tensor(&mut self, spec: TensorSpec, bytes: u64) -> Result<(), WeightsError> {
        let name = spec.name.clone();
        if let Some(problem) = spec.problem(bytes) {
            return self.misuse(format!("tensor `{name}`: {problem}"));
        }
        let number = self.index.sections.len();
        let Some(section) = &self.section else {
            return self.misuse(format!("tensor `{name}` comes before any section"));
        };
        if section.missing != 0 {
            return self.misuse(format!(
                "tensor `{name}` comes while {} bytes of the one before are missing",
                section.missing
            ));
        }
        if let Some(block) = self.index.sections[number - 1].block
            && spec.block != Some(block)
        {
            return self
                .misuse(format!("tensor `{name}` of block {:?} does not belong into region {block}", spec.block));
        }
        if !self.names.insert(name.clone()) {
            return self.misuse(format!("tensor `{name}` was written already"));
        }
        let gap = (self.position - section.start).next_multiple_of(TENSOR_ALIGNMENT) - (self.position - section.start);
        self.raw(&[0u8; TENSOR_ALIGNMENT as usize][..gap as usize])?;
        let Some(section) = &mut self.section else { unreachable!("checked above") };
        section.missing = bytes;
        let offset = self.position - section.start;
        self.index.tensors.push(TensorRecord { spec, section: number - 1, offset, bytes });
        Ok(())
    }

    /// Appends bytes to the tensor begun last.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        match &mut self.section {
            Some(section) if section.missing >= bytes.len() as u64 => section.missing -= bytes.len() as u64,
            Some(section) => {
                let reason = format!("{} bytes were given where {} were missing", bytes.len(), section.missing);
                return self.misuse(reason);
            }
            None => return self.misuse("bytes come before any tensor".to_string()),
        }
        self.raw(bytes)
    }

    /// A whole tensor at once.
    pub fn tensor(&mut self, spec: TensorSpec, bytes: &[u8]) -> Result<(), WeightsError> {
        self.begin_tensor(spec, bytes.len() as u64)?;
        self.write(bytes)
    }

    /// Writes index and header, syncs the file to disk and gives it its name.
    pub fn finish(mut self) -> Result<WriteSummary, WeightsError> {
        self.end_section()?;
        let text = serde_json::to_vec(&self.index).map_err(|error| WeightsError::Writer {
            path: self.output.clone(),
            reason: format!("its index is no JSON ({error})"),
        })?;
        // What a reader would refuse must not be written.
        self.index.check(self.position).map_err(|reason| WeightsError::Writer { path: self.output.clone(), reason })?;
        let header = Header {
            file_bytes: self.position + text.len() as u64,
            index_offset: self.position,
            index_bytes: text.len() as u64,
            index_checksum: sha256(&text),
        };
        let output = self.output.clone();
        let io = || WeightsError::io("write", &output);
        let mut file = self.file.as_file();
        file.write_all(&text).map_err(io())?;
        file.seek(SeekFrom::Start(0)).map_err(io())?;
        file.write_all(&header.encode()).map_err(io())?;
        file.sync_all().map_err(io())?;
        self.file.commit().map_err(io())?;
        Ok(WriteSummary { file_bytes: header.file_bytes, fingerprint: hex(&header.index_checksum) })
    }

    /// Pads and closes the open section.
    fn end_section(&mut self) -> Result<(), WeightsError> {
        let Some(section) = &self.section else { return Ok(()) };
        if section.missing != 0 {
            let reason = format!("{} bytes of the last tensor are missing", section.missing);
            return self.misuse(reason);
        }
        let bytes = self.position - section.start;
        let zeros = vec![0u8; (bytes.next_multiple_of(SECTION_ALIGNMENT) - bytes) as usize];
        self.raw(&zeros)?;
        let Some(section) = self.section.take() else { unreachable!("checked above") };
        let record = self.index.sections.last_mut().expect("an open section has a record");
        record.bytes = bytes;
        record.sha256 = hex(&section.hasher.finalize());
        Ok(())
    }

    /// Hashes and writes.
    fn raw(&mut self, bytes: &[u8]) -> Result<(), WeightsError> {
        if let Some(section) = &mut self.section {
            section.hasher.update(bytes);
        }
        self.position += bytes.len() as u64;
        self.file.as_file().write_all(bytes).map_err(WeightsError::io("write", &self.output))
    }

    fn misuse<T>(&self, reason: String) -> Result<T, WeightsError> {
        Err(WeightsError::Writer { path: self.output.clone(), reason })
    }
}

const _: () = assert!(FORMAT_VERSION == 1, "the writer writes version 1");
