//! What the commands of `trefoil video` share: tensors named in files, cores.

use crate::context;
use crate::error::CliError;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use trefoil_core::UnitAddress;
use trefoil_kernels::Kernels;
use trefoil_units::{allowed_cores, cores_text};
use trefoil_video::EngineSpec;
use trefoil_video::pack::{CheckpointNote, note_path};

/// `FILE.safetensors:KEY`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorArg {
    /// File.
    pub path: PathBuf,
    /// Tensor in it.
    pub key: String,
}

impl FromStr for TensorArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // From the right: paths may hold `:`, keys do not.
        match text.rsplit_once(':') {
            Some((path, key)) if !path.is_empty() && !key.is_empty() => {
                Ok(Self { path: path.into(), key: key.to_owned() })
            }
            _ => Err("write FILE.safetensors:KEY".to_owned()),
        }
    }
}

/// A set of cores: `0-3,7`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoresArg(pub Vec<u32>);

impl FromStr for CoresArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address: UnitAddress =
            format!("cpu:CPU@{text}").parse().map_err(|_| format!("`{text}` is no set of cores like 0-3,7"))?;
        if address.cores.is_empty() { Err("name at least one core".to_owned()) } else { Ok(Self(address.cores)) }
    }
}

/// Kernels on the cores given, all that this process may use by default.
pub fn kernels(cores: Option<&CoresArg>) -> Result<Kernels, CliError> {
    let allowed = allowed_cores();
    let cores = cores.map_or(allowed, |cores| cores.0.as_slice());
    if let Some(core) = cores.iter().find(|core| !allowed.contains(core)) {
        let have = cores_text(allowed);
        return Err(CliError::Usage(format!("core {core} is not among those that this process may use ({have})")));
    }
    let cores: Vec<usize> = cores.iter().map(|&core| core as usize).collect();
    Kernels::best(&cores).map_err(|error| CliError::Failed(error.to_string()))
}

/// An engine as `--engine` or `--cores` name it, all cores of the CPU by default.
pub fn decoding_spec(engine: Option<&EngineSpec>, cores: Option<&CoresArg>) -> Result<EngineSpec, CliError> {
    let allowed = allowed_cores();
    let cores: Vec<usize> = match (engine, cores) {
        (Some(engine), _) => engine.resolved_cores(),
        (None, Some(cores)) => cores.0.iter().map(|&core| core as usize).collect(),
        (None, None) => allowed.iter().map(|&core| core as usize).collect(),
    };
    if let Some(core) = cores.iter().find(|&&core| !allowed.contains(&(core as u32))) {
        let have = cores_text(allowed);
        return Err(CliError::Usage(format!("core {core} is not among those that this process may use ({have})")));
    }
    Ok(engine.map_or_else(|| EngineSpec::cpu(&cores), |engine| engine.on(&cores)))
}

/// The folder must be there: a clear line before anything of it is looked for.
pub fn check_folder(model: &Path) -> Result<(), CliError> {
    match std::fs::metadata(model) {
        Ok(_) => Ok(()),
        Err(source) => Err(CliError::File { action: "read", path: model.to_owned(), source }),
    }
}

/// What the files of artefacts begin with.
const ARTEFACT: &[u8] = b"\x93TREFW\r\n";

/// Where a decoder is: a pipeline folder, a VAE's folder or file as it was given; of a packed transformer, which holds none, the pipeline
/// folder that it was packed from.
pub fn decoder_of(given: &Path) -> Result<PathBuf, CliError> {
    let mut head = [0u8; ARTEFACT.len()];
    let is_artefact = trefoil_files::open_regular(given).is_ok_and(|mut file| file.read_exact(&mut head).is_ok());
    if !is_artefact || head != ARTEFACT {
        return Ok(given.to_owned());
    }
    let note = CheckpointNote::beside(given)?;
    let has_decoder = |folder: &&Path| ["vae_decoder", "vae"].iter().any(|part| folder.join(part).is_dir());
    let found = note.as_ref().and_then(|note| note.checkpoint.ancestors().take(3).find(has_decoder));
    found.map(Path::to_owned).ok_or_else(|| {
        let whence = match &note {
            Some(note) => format!("none is beside {}, which it was packed from", note.checkpoint.display()),
            None => format!("{} does not say what it was packed from", note_path(given).display()),
        };
        CliError::Usage(format!(
            "{} is a packed model and holds no decoder, and {whence}; name the pipeline folder or its VAE",
            given.display()
        ))
    })
}

/// A contact sheet is a PNG, and can be written.
pub fn check_sheet(path: Option<&Path>) -> Result<(), CliError> {
    if let Some(path) = path
        && path.extension().is_some_and(|extension| !extension.eq_ignore_ascii_case("png"))
    {
        return Err(CliError::Usage(format!("{}: contact sheets are PNG; name a .png file", path.display())));
    }
    context::check_replaceable(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_and_cores_parse() {
        let tensor: TensorArg = "a:b/c.safetensors:latent.5".parse().unwrap();
        assert_eq!((tensor.path.to_str(), tensor.key.as_str()), (Some("a:b/c.safetensors"), "latent.5"));
        assert!("file".parse::<TensorArg>().is_err() && "file:".parse::<TensorArg>().is_err());
        assert_eq!("0-2,5".parse::<CoresArg>().unwrap().0, [0, 1, 2, 5]);
        assert!("".parse::<CoresArg>().is_err() && "x".parse::<CoresArg>().is_err());
    }
}
