//! Compiling the kernels, and keeping what was compiled.
//!
//! A compiled program is stored under a name that hashes the device, its platform and driver versions, the options and the
//! source, so a new driver or a new version of this crate never meets an old binary. A file that is damaged is not used; the
//! note says so.

use super::error::{During, one_line};
use super::{Device, OpenClError, Variant};
use opencl3::context::Context;
use opencl3::error_codes::CL_BUILD_PROGRAM_FAILURE;
use opencl3::program::Program;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// First bytes of a stored program.
const MAGIC: &[u8; 16] = b"trefoil-clbin-1\n";
/// Bytes before the binary: the magic and a SHA-256 of the binary.
const HEADER: usize = MAGIC.len() + 32;

/// Where a program came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProgramOrigin {
    /// Compiled in this process.
    Compiled,
    /// Read from this file.
    Cached(PathBuf),
}

/// A program and how it was got.
pub(super) struct Built {
    pub(super) program: Program,
    pub(super) origin: ProgramOrigin,
    /// What was odd about the cache, if something was.
    pub(super) note: Option<String>,
}

/// The whole source of a variant.
pub(super) fn source(variant: Variant) -> String {
    let dot = if variant == Variant::Dot4x8Packed { "#define INTEGER_DOT 1\n" } else { "" };
    let width = variant.width();
    let attention = if variant.fuses_attention() {
        include_str!("cl/attention_fused.cl")
    } else {
        include_str!("cl/attention_steps.cl")
    };
    [
        &format!("#define WIDTH {width}\n{dot}"),
        include_str!("cl/types.cl"),
        include_str!("cl/math.cl"),
        variant.source(),
        include_str!("cl/gemm.cl"),
        include_str!("cl/rows.cl"),
        include_str!("cl/attention.cl"),
        attention,
        include_str!("cl/conv.cl"),
        include_str!("cl/conv_codes.cl"),
    ]
    .concat()
}

/// Options of the compiler. Nothing that relaxes arithmetic.
fn options(variant: Variant, copy: usize) -> String {
    // The integer dot product is a built-in from OpenCL C 3.0 on.
    let standard = if variant == Variant::Dot4x8Packed { "-cl-std=CL3.0" } else { "-cl-std=CL1.2" };
    if copy == 0 { standard.to_string() } else { format!("{standard} -DTREFOIL_COPY={copy}") }
}

/// Number of a compiled copy of a variant that no other queue of this process uses; given back when dropped.
///
/// PoCL (3.1 and 5.0, and probably those between) keeps one list of compiled work-group functions a process. A dispatch takes the entry that fits
/// its grid and offsets, but gives back the first one of its kernel and group, so two queues that run the same kernel over
/// different grids at the same time abort the process (`pocl_release_dlhandle_cache`). Entries of programs that differ in
/// anything are apart, and an option that the source never reads makes them differ.
pub(super) struct ProgramCopy {
    variant: Variant,
    number: usize,
}

/// Copies in use.
static COPIES: Mutex<Vec<(Variant, usize)>> = Mutex::new(Vec::new());

impl ProgramCopy {
    /// The lowest number that is free; `None` where the driver has no such list.
    pub(super) fn free(device: &Device, variant: Variant) -> Option<ProgramCopy> {
        if !device.is_pocl() {
            return None;
        }
        let mut used = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
        let number = (0..=used.len()).find(|&number| !used.contains(&(variant, number)))?;
        used.push((variant, number));
        Some(ProgramCopy { variant, number })
    }
}

impl Drop for ProgramCopy {
    fn drop(&mut self) {
        COPIES.lock().unwrap_or_else(PoisonError::into_inner).retain(|used| *used != (self.variant, self.number));
    }
}

/// Builds `variant` for the device, from the cache where it has it.
pub(super) fn build(
    context: &Context,
    device: &Device,
    variant: Variant,
    copy: Option<&ProgramCopy>,
    cache: Option<&Path>,
) -> Result<Built, OpenClError> {
    let (source, options) = (source(variant), options(variant, copy.map_or(0, |copy| copy.number)));
    let path = cache.map(|folder| folder.join(format!("{}.clbin", key(device, &options, &source))));
    let mut note = None;
    if let Some(path) = &path {
        match load(path) {
            Ok(Some(binary)) => match from_binary(context, device, &binary, &options) {
                Ok(program) => return Ok(Built { program, origin: ProgramOrigin::Cached(path.clone()), note }),
                Err(error) => note = Some(format!("{} is not used: {error}", path.display())),
            },
            Ok(None) => {}
            Err(error) => note = Some(format!("{} is not used: {error}", path.display())),
        }
    }
    let program = from_source(context, device, variant, &source, &options)?;
    if let Some(path) = &path
        && let Err(error) = store(path, &program)
    {
        note = Some(format!("the compiled kernels are not kept in {}: {error}", path.display()));
    }
    Ok(Built { program, origin: ProgramOrigin::Compiled, note })
}

fn key(device: &Device, options: &str, source: &str) -> String {
    let info = device.info();
    let mut hash = Sha256::new();
    for part in [&info.name, &info.platform, &info.platform_version, &info.driver, options, source] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    // The driver's binary may be of the processor's own instructions.
    hash.update(crate::Isa::best().name());
    hash.finalize().iter().take(16).fold(String::new(), |mut name, byte| {
        let _ = write!(name, "{byte:02x}");
        name
    })
}

/// The stored binary; `None` where there is none.
fn load(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let damaged = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    if bytes.len() <= HEADER || &bytes[..MAGIC.len()] != MAGIC {
        return Err(damaged("it is no stored program or was cut short"));
    }
    let binary = bytes.split_off(HEADER);
    if Sha256::digest(&binary).as_slice() != &bytes[MAGIC.len()..] {
        return Err(damaged("its checksum is wrong"));
    }
    Ok(Some(binary))
}

/// Writes the binary under a temporary name and renames it.
fn store(path: &Path, program: &Program) -> io::Result<()> {
    let binary = program.get_binaries().map_err(|error| io::Error::other(error.to_string()))?.swap_remove(0);
    if binary.is_empty() {
        return Err(io::Error::other("the driver gives no binary"));
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let bytes = [MAGIC.as_slice(), Sha256::digest(&binary).as_slice(), &binary].concat();
    fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

fn from_binary(context: &Context, device: &Device, binary: &[u8], options: &str) -> Result<Program, OpenClError> {
    // SAFETY: the device is the one that the context was made for.
    let mut program =
        unsafe { Program::create_from_binary(context, &[device.id()], &[binary]) }.during("load a compiled program")?;
    program.build(&[device.id()], options).during("link a compiled program")?;
    Ok(program)
}

fn from_source(
    context: &Context,
    device: &Device,
    variant: Variant,
    source: &str,
    options: &str,
) -> Result<Program, OpenClError> {
    let mut program = Program::create_from_source(context, source).during("create a program")?;
    match program.build(&[device.id()], options) {
        Err(error) if error.0 == CL_BUILD_PROGRAM_FAILURE => {
            let log = program.get_build_log(device.id()).during("read the compiler's log")?;
            Err(OpenClError::Build { device: device.info().name.clone(), variant, log: one_line(&log) })
        }
        result => result.during("compile the kernels").map(|()| program),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_files_are_refused_with_the_reason() {
        let folder = std::env::temp_dir().join(format!("trefoil-clbin-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("x.clbin");
        assert!(load(&path).unwrap().is_none());
        let whole = [MAGIC.as_slice(), Sha256::digest(b"binary").as_slice(), b"binary"].concat();
        fs::write(&path, &whole).unwrap();
        assert_eq!(load(&path).unwrap().unwrap(), b"binary");
        for (bytes, reason) in [
            (&b""[..], "cut short"),
            (&whole[..HEADER], "cut short"),
            (&whole[..whole.len() - 1], "checksum"),
            (&[b"x".as_slice(), &whole[1..]].concat(), "no stored program"),
        ] {
            fs::write(&path, bytes).unwrap();
            assert!(load(&path).unwrap_err().to_string().contains(reason));
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn sources_differ_by_variant_only() {
        assert!(source(Variant::Dot4x8Packed).contains("#define INTEGER_DOT 1"));
        assert!(!source(Variant::Columns).contains("#define INTEGER_DOT 1"));
        for variant in Variant::ALL {
            assert!(source(variant).starts_with(&format!("#define WIDTH {}\n", variant.width())));
            assert!(source(variant).contains("#pragma OPENCL FP_CONTRACT OFF"));
            let options = options(variant, 1);
            assert!(!options.contains("fast") && !options.contains("mad"));
            // The number of a copy makes programs differ and is not read.
            assert!(options.contains("TREFOIL_COPY") && !source(variant).contains("TREFOIL_COPY"));
        }
    }
}
