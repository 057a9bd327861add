//! What is packed into the cache on first use: once for each state of what it is packed from.

use crate::context::{cache_dir, stop_flag};
use crate::error::CliError;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use trefoil_video::pack::{PackingFolder, sampler_file};
use trefoil_video::{VideoPackOptions, pack_video};

/// The packed transformer of a model folder: the one that is given, or one packed into the cache from the folder's present weights and sampler.
pub fn artefact(model: &Path, given: Option<&Path>, cache: Option<&Path>) -> Result<PathBuf, CliError> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let transformer = model.join("transformer");
    let mut sources = vec![if transformer.is_dir() { transformer } else { model.to_owned() }];
    // The artefact has it in it, so another one is another artefact.
    sources.extend(sampler_file(model));
    packed(&sources, "trefoil", cache, |path| {
        let options = VideoPackOptions { stop: Some(stop_flag()), ..VideoPackOptions::default() };
        pack_video(model, path, &options, |_| {})?;
        Ok(())
    })
}

/// Where the cache has what is packed from the present state of `sources`; where it has none, `pack` is asked to write it.
pub fn packed(
    sources: &[PathBuf],
    extension: &str,
    cache: Option<&Path>,
    pack: impl FnOnce(&Path) -> Result<(), CliError>,
) -> Result<PathBuf, CliError> {
    let folder = cache_dir(cache).join("video");
    let path = folder.join(format!("{:016x}.{extension}", state_of(sources)?));
    if !path.exists() {
        std::fs::create_dir_all(&folder).map_err(CliError::file("create", &path))?;
        let _packing = PackingFolder::tidied(&folder)?;
        pack(&path)?;
    }
    Ok(path)
}

/// A number that changes when a file does, or one that lies in a folder.
fn state_of(sources: &[PathBuf]) -> Result<u64, CliError> {
    let mut hasher = DefaultHasher::new();
    env!("CARGO_PKG_VERSION").hash(&mut hasher);
    for source in sources {
        let read = |error| CliError::File { action: "read", path: source.clone(), source: error };
        let mut files: Vec<(PathBuf, u64, Option<SystemTime>)> = Vec::new();
        let paths: Vec<PathBuf> = if source.is_dir() {
            let entries = std::fs::read_dir(source).map_err(read)?;
            entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>().map_err(read)?
        } else {
            vec![source.clone()]
        };
        for path in paths {
            let about = std::fs::metadata(&path).map_err(read)?;
            files.push((path, about.len(), about.modified().ok()));
        }
        files.sort();
        (std::fs::canonicalize(source).map_err(read)?, files).hash(&mut hasher);
    }
    Ok(hasher.finish())
}
