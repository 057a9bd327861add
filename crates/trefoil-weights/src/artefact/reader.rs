//! Opening, checking and viewing artefacts.

use super::index::Index;
use super::{
    Checksum, FORMAT_VERSION, HEADER_BYTES, HEADER_COVERED, HEADER_USED, Header, Info, Layout, MAGIC, MAX_INDEX_BYTES,
    SECTION_ALIGNMENT, SectionRecord, StoredType, TensorRecord, hex, sha256,
};
use crate::files::open_regular;
use crate::tile::{TileShape, codes_of};
use crate::{ArtefactWriter, SectionName, TensorSpec, WeightsError, WriteSummary};
use memmap2::Mmap;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Bytes read at a time while verifying.
const VERIFY_CHUNK: usize = 1 << 20;

/// An open artefact, mapped read-only. Pages are read when first touched.
///
/// Artefacts are renamed into place and never changed, so a mapping stays valid; a process that truncates the file under
/// it raises SIGBUS, as with any mapping. Copy regions to a sealed memfd ([`crate::Region`]) where that must not happen.
#[derive(Debug)]
pub struct Artefact {
    path: PathBuf,
    file: File,
    map: Mmap,
    header: Header,
    index: Index,
    by_name: HashMap<String, usize>,
}

impl Artefact {
    /// Opens an artefact and checks header and index. Data sections are checked by [`Artefact::verify`].
    ///
    /// # Errors
    /// Foreign files, other versions, truncation, a corrupted header or index: each a different message.
    pub fn open(path: impl AsRef<Path>) -> Result<Artefact, WeightsError> {
        let path = path.as_ref();
        let file = open_regular(path)?;
        let (header, text) = read_head(path, &file)?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| WeightsError::corrupt(path, "index", format!("not the JSON of an index ({error})")))?;
        index.check(header.index_offset).map_err(|reason| WeightsError::corrupt(path, "index", reason))?;
        // SAFETY: read-only; the type's documentation says what a truncating process does to it.
        let map = unsafe { Mmap::map(&file) }.map_err(WeightsError::io("map", path))?;
        if map.len() as u64 != header.file_bytes {
            return Err(WeightsError::Length {
                path: path.to_path_buf(),
                have: map.len() as u64,
                want: header.file_bytes,
                of: "the file",
            });
        }
        let by_name = index.tensors.iter().enumerate().map(|(at, tensor)| (tensor.spec.name.clone(), at)).collect();
        Ok(Artefact { path: path.to_path_buf(), file, map, header, index, by_name })
    }

    /// The file's path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, for mapping regions of it elsewhere.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// SHA-256 of the index, which covers every byte of the file.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.header.index_checksum
    }

    /// The fingerprint in hexadecimal.
    pub fn fingerprint_hex(&self) -> String {
        hex(&self.header.index_checksum)
    }

    /// What the packer recorded.
    pub fn metadata(&self) -> &serde_json::Map<String, serde_json::Value> {
        &self.index.metadata
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> &[TensorRecord] {
        &self.index.tensors
    }

    /// All sections, in file order.
    pub fn sections(&self) -> &[SectionRecord] {
        &self.index.sections
    }

    /// Blocks that have a region, ascending.
    pub fn blocks(&self) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.index.sections.iter().filter_map(|section| section.block).collect();
        blocks.sort_unstable();
        blocks
    }

    /// Sizes by class, regions, tensors, metadata.
    pub fn info(&self) -> Info {
        Info::new(self, self.header.file_bytes)
    }

    /// The region of a block.
    pub fn region(&self, block: u32) -> Result<RegionView<'_>, WeightsError> {
        let number = self.index.sections.iter().position(|section| section.block == Some(block));
        let Some(number) = number else {
            return Err(WeightsError::UnknownRegion {
                path: self.path.clone(),
                block,
                have: match self.blocks().as_slice() {
                    [] => "none".to_string(),
                    [only] => format!("block {only}"),
                    [first, .., last] => format!("{} regions, blocks {first} to {last}", self.blocks().len()),
                },
            });
        };
        let section = &self.index.sections[number];
        let tensors = self.index.tensors.iter().filter(|tensor| tensor.section == number).collect();
        Ok(RegionView { block, section, bytes: self.slice(section.offset, section.bytes), tensors })
    }

    /// Every section as it lies in this process, with the padding behind it: what a device is given that takes whole pages.
    pub fn section_bytes(&self) -> impl Iterator<Item = (&SectionRecord, &[u8])> {
        self.index.sections.iter().map(|section| (section, self.slice(section.offset, section.padded_bytes())))
    }

    /// A tensor by name.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, WeightsError> {
        match self.by_name.get(name) {
            Some(&at) => Ok(self.view(&self.index.tensors[at])),
            None => Err(WeightsError::UnknownTensor {
                path: self.path.clone(),
                name: name.to_string(),
                hint: self.hint(name),
            }),
        }
    }

    /// A quantised matrix with its scales.
    pub fn matrix(&self, name: &str) -> Result<TiledView<'_>, WeightsError> {
        let codes = self.tensor(name)?;
        let record = codes.record;
        let shape = match (record.spec.layout, record.spec.shape.as_slice()) {
            (Layout::Tile32, &[d_in, d_out]) => TileShape::new(d_in as usize, d_out as usize),
            _ => None,
        };
        let Some(shape) = shape else {
            return Err(WeightsError::Tensor {
                tensor: name.to_string(),
                reason: format!("{} {:?} is not a tiled matrix", record.spec.dtype, record.spec.shape),
            });
        };
        let scales = self.tensor(&format!("{name}.scale"))?;
        let scales = scales.f32_values()?;
        if scales.len() != shape.padded_out() {
            return Err(WeightsError::Tensor {
                tensor: name.to_string(),
                reason: format!("{} scales for {} padded columns", scales.len(), shape.padded_out()),
            });
        }
        Ok(TiledView { shape, codes: codes.codes(), scales })
    }

    /// Tells the system that the pages of a block's region are not needed for now. They are read from the file again when they are
    /// touched; where the system does not take the hint, nothing changes.
    pub fn release(&self, block: u32) {
        let Some(section) = self.index.sections.iter().find(|section| section.block == Some(block)) else { return };
        // SAFETY: the mapping is read-only and of a file, so a page that is dropped comes back with the same bytes; the range was
        // checked against the file when it was opened.
        let _ = unsafe {
            self.map.unchecked_advise_range(
                memmap2::UncheckedAdvice::DontNeed,
                section.offset as usize,
                section.bytes as usize,
            )
        };
    }

    /// Reads the whole file again and compares every checksum; the error names the section that differs.
    ///
    /// Sections are split over the available cores. Memory is one buffer of 1 MiB per core.
    pub fn verify(&self) -> Result<(), WeightsError> {
        let (header, _) = read_head(&self.path, &self.file)?;
        if header != self.header {
            return Err(WeightsError::corrupt(&self.path, "header", "it changed since the artefact was opened"));
        }
        let mut zeros = vec![0u8; HEADER_BYTES as usize - HEADER_USED];
        self.file.read_exact_at(&mut zeros, HEADER_USED as u64).map_err(WeightsError::io("read", &self.path))?;
        if zeros.iter().any(|&byte| byte != 0) {
            return Err(WeightsError::corrupt(&self.path, "header", "its padding is not zero"));
        }
        let sections = &self.index.sections;
        let next = std::sync::atomic::AtomicUsize::new(0);
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(sections.len().max(1));
        let results: Vec<Result<(), (usize, WeightsError)>> = std::thread::scope(|scope| {
            let work = || {
                let mut buffer = vec![0u8; VERIFY_CHUNK];
                loop {
                    let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(section) = sections.get(at) else { return Ok(()) };
                    self.verify_section(section, &mut buffer).map_err(|error| (at, error))?;
                }
            };
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().map(|worker| worker.join().expect("verifying does not panic")).collect()
        });
        match results.into_iter().filter_map(Result::err).min_by_key(|(at, _)| *at) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// Writes a copy with further tensors and metadata: how calibration adds activation scales to a packed model. Extra
    /// tensors go to the section of their class, behind what is there, and replace a tensor of the same name (so a model can
    /// be calibrated again); everything else is copied byte for byte.
    pub fn extended(
        &self,
        output: &Path,
        extra: &[(TensorSpec, Vec<u8>)],
        metadata: serde_json::Map<String, serde_json::Value>,
    ) -> Result<WriteSummary, WeightsError> {
        let mut merged = self.index.metadata.clone();
        merged.extend(metadata);
        let mut writer = ArtefactWriter::create(output, merged)?;
        let mut done = vec![false; extra.len()];
        for (number, section) in self.index.sections.iter().enumerate() {
            writer.begin_section(&match section.block {
                Some(block) => SectionName::Region { block, label: section.label.clone() },
                None => SectionName::Class(self.class_of(section)?),
            })?;
            let replaced = |tensor: &TensorRecord| extra.iter().any(|(spec, _)| spec.name == tensor.spec.name);
            for tensor in self.index.tensors.iter().filter(|tensor| tensor.section == number && !replaced(tensor)) {
                writer.tensor(tensor.spec.clone(), self.view(tensor).bytes)?;
            }
            for (done, (spec, bytes)) in done.iter_mut().zip(extra) {
                if section.block.is_none() && spec.class.as_str() == section.name {
                    writer.tensor(spec.clone(), bytes)?;
                    *done = true;
                }
            }
        }
        for class in super::TensorClass::ALL {
            let rest: Vec<_> = extra
                .iter()
                .zip(&done)
                .filter(|((spec, _), done)| !**done && spec.class == class)
                .map(|(extra, _)| extra)
                .collect();
            if !rest.is_empty() {
                writer.begin_section(&SectionName::Class(class))?;
                for (spec, bytes) in rest {
                    writer.tensor(spec.clone(), bytes)?;
                }
            }
        }
        writer.finish()
    }

    fn class_of(&self, section: &SectionRecord) -> Result<super::TensorClass, WeightsError> {
        super::TensorClass::ALL
            .into_iter()
            .find(|class| class.as_str() == section.name)
            .ok_or_else(|| WeightsError::corrupt(&self.path, &section.name, "its name is neither a region nor a class"))
    }

    fn view<'a>(&'a self, record: &'a TensorRecord) -> TensorView<'a> {
        let section = &self.index.sections[record.section];
        TensorView { record, section, bytes: self.slice(section.offset + record.offset, record.bytes) }
    }

    /// The index was checked against the file's length, so this cannot be out of bounds.
    fn slice(&self, offset: u64, bytes: u64) -> &[u8] {
        &self.map[offset as usize..(offset + bytes) as usize]
    }

    fn verify_section(&self, section: &SectionRecord, buffer: &mut [u8]) -> Result<(), WeightsError> {
        let mut hasher = Sha256::new();
        let (mut at, end) = (section.offset, section.offset + section.padded_bytes());
        while at < end {
            let chunk = &mut buffer[..(end - at).min(VERIFY_CHUNK as u64) as usize];
            self.file.read_exact_at(chunk, at).map_err(WeightsError::io("read", &self.path))?;
            hasher.update(&*chunk);
            at += chunk.len() as u64;
        }
        let have = hex(&hasher.finalize());
        if have == section.sha256 {
            return Ok(());
        }
        Err(WeightsError::corrupt(
            &self.path,
            &section.name,
            format!("its SHA-256 is {have}, the index says {}", section.sha256),
        ))
    }

    /// Names that end or start alike, to make a typo or a layout mix-up visible.
    fn hint(&self, name: &str) -> String {
        let tail = name.rsplit_once('.').map_or(name, |(_, tail)| tail);
        let mut close: Vec<&str> = self
            .index
            .tensors
            .iter()
            .map(|tensor| tensor.spec.name.as_str())
            .filter(|other| other.contains(name) || name.contains(other))
            .collect();
        if close.is_empty() {
            close = self
                .index
                .tensors
                .iter()
                .map(|tensor| tensor.spec.name.as_str())
                .filter(|other| other.ends_with(tail))
                .collect();
        }
        close.truncate(3);
        match close.as_slice() {
            [] => format!("it has {} tensors, listed by `trefoil weights info`", self.index.tensors.len()),
            close => format!("did you mean {}?", close.join(", ")),
        }
    }
}

/// One block's base weights.
#[derive(Debug, Clone)]
pub struct RegionView<'a> {
    /// Block number.
    pub block: u32,
    /// Its section; `offset` is a multiple of 64 KiB, so the region can be mapped from the file on its own.
    pub section: &'a SectionRecord,
    /// The bytes, without the section's padding.
    pub bytes: &'a [u8],
    /// Its tensors in order.
    pub tensors: Vec<&'a TensorRecord>,
}

/// One tensor's bytes and record.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// What and where it is.
    pub record: &'a TensorRecord,
    /// The section it lies in.
    pub section: &'a SectionRecord,
    /// Its stored bytes, 128-byte aligned.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// The elements of an `f32` tensor, padding included.
    pub fn f32_values(&self) -> Result<&'a [f32], WeightsError> {
        // SAFETY: every bit pattern is an f32.
        let (head, values, tail) = unsafe { self.bytes.align_to::<f32>() };
        if self.record.spec.dtype != StoredType::F32 || !head.is_empty() || !tail.is_empty() {
            return Err(WeightsError::Tensor {
                tensor: self.record.spec.name.clone(),
                reason: format!("it holds {} {:?}, not f32", self.record.spec.dtype, self.record.spec.shape),
            });
        }
        Ok(values)
    }

    /// The bytes as signed codes.
    pub fn codes(&self) -> &'a [i8] {
        codes_of(self.bytes)
    }
}

/// A quantised matrix as it lies.
#[derive(Debug, Clone, Copy)]
pub struct TiledView<'a> {
    /// Size of W.
    pub shape: TileShape,
    /// Codes in tile order.
    pub codes: &'a [i8],
    /// One scale per padded column.
    pub scales: &'a [f32],
}

/// Reads and checks header and index bytes.
fn read_head(path: &Path, file: &File) -> Result<(Header, Vec<u8>), WeightsError> {
    let have = file.metadata().map_err(WeightsError::io("inspect", path))?.len();
    let foreign = |reason: String| WeightsError::Foreign { path: path.to_path_buf(), reason };
    let mut head = vec![0u8; HEADER_USED.min(have as usize)];
    file.read_exact_at(&mut head, 0).map_err(WeightsError::io("read", path))?;
    let magic = &head[..head.len().min(MAGIC.len())];
    if magic.is_empty() || magic != &MAGIC[..magic.len()] {
        return Err(foreign(describe(&head)));
    }
    let length = |want: u64, of: &'static str| WeightsError::Length { path: path.to_path_buf(), have, want, of };
    if head.len() < HEADER_USED {
        return Err(length(HEADER_BYTES, "the header alone"));
    }
    let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let long = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    let version = word(8);
    if version != FORMAT_VERSION {
        let hint =
            if version > FORMAT_VERSION { "update trefoil or pack the model again" } else { "pack the model again" };
        return Err(WeightsError::Version {
            path: path.to_path_buf(),
            found: version,
            supported: FORMAT_VERSION,
            hint,
        });
    }
    let header_problem = |reason: &str| WeightsError::corrupt(path, "header", reason);
    if head[HEADER_COVERED..] != sha256(&head[..HEADER_COVERED]) {
        return Err(header_problem("its SHA-256 does not match"));
    }
    if u64::from(word(12)) != SECTION_ALIGNMENT || long(40) != 0 {
        return Err(header_problem("it asks for an alignment or flags that this version does not have"));
    }
    let header = Header {
        file_bytes: long(16),
        index_offset: long(24),
        index_bytes: long(32),
        index_checksum: head[48..80].try_into().expect("32 bytes"),
    };
    if header.file_bytes != have {
        return Err(length(header.file_bytes, "the file"));
    }
    if header.index_offset < HEADER_BYTES || header.index_offset.checked_add(header.index_bytes) != Some(have) {
        return Err(header_problem("the index does not lie at the end of the file"));
    }
    if header.index_bytes > MAX_INDEX_BYTES {
        return Err(header_problem("the index is larger than 256 MiB"));
    }
    let mut text = vec![0u8; header.index_bytes as usize];
    file.read_exact_at(&mut text, header.index_offset).map_err(WeightsError::io("read", path))?;
    let checksum: Checksum = sha256(&text);
    if checksum != header.index_checksum {
        return Err(WeightsError::corrupt(path, "index", "its SHA-256 does not match"));
    }
    Ok((header, text))
}

/// What a foreign file looks like.
fn describe(head: &[u8]) -> String {
    match head {
        [] => "it is empty".to_string(),
        [b'P', b'K', ..] => "it looks like a zip or PyTorch file".to_string(),
        [b'G', b'G', b'U', b'F', ..] => "it looks like a GGUF file".to_string(),
        [_, _, _, _, _, 0, 0, 0, b'{', ..] => "it looks like a safetensors checkpoint".to_string(),
        _ => "it does not start with the magic bytes".to_string(),
    }
}
