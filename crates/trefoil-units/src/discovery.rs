//! Finding the libraries of backends that are loaded at run time.
//!
//! Order: the backend's own variable (a file or a folder; if set, nothing else is looked at), a `.venv` beside or above the
//! working directory or the program, `VIRTUAL_ENV`, `CONDA_PREFIX`, system library folders, and at last the site-packages of
//! `python3`, which is started only if everything else failed. The first library that opens and has what is needed wins.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Variable with extra site-packages folders, separated like `PATH`. Where it is set, `python3` is not asked.
pub const SITE_PACKAGES_VARIABLE: &str = "TREFOIL_SITE_PACKAGES";

/// What to look for.
#[derive(Debug)]
pub(crate) struct LibrarySpec {
    /// Variable that names the file or its folder.
    pub(crate) variable: &'static str,
    /// File name without prefix and suffix: `openvino_c` for `libopenvino_c.so.2641`.
    pub(crate) stem: &'static str,
    /// Folder within site-packages.
    pub(crate) package_folder: &'static str,
    /// Whether system library folders may hold it too.
    pub(crate) system: bool,
}

/// The first candidate that `open` accepts. Opened at most once each.
///
/// # Errors
/// One line: what was looked for and where, or why each candidate was refused.
pub(crate) fn find<T>(
    spec: &LibrarySpec,
    mut open: impl FnMut(&Path) -> Result<T, String>,
) -> Result<(PathBuf, T), String> {
    let mut refused = Vec::new();
    let mut try_all = |candidates: Vec<PathBuf>, refused: &mut Vec<String>| {
        for path in candidates {
            match open(&path) {
                Ok(value) => return Some((path, value)),
                Err(reason) => refused.push(format!("{}: {reason}", path.display())),
            }
        }
        None
    };
    if let Some(value) = env::var_os(spec.variable).filter(|value| !value.is_empty()) {
        let place = PathBuf::from(value);
        let candidates = named_candidates(spec, &place);
        if candidates.is_empty() {
            return Err(format!("{}={} holds no {}", spec.variable, place.display(), file_text(spec.stem)));
        }
        return try_all(candidates, &mut refused).ok_or_else(|| refused.join("; "));
    }
    let stages: [&dyn Fn() -> Vec<PathBuf>; 3] = [
        &|| environment_site_packages().iter().flat_map(|site| in_site_packages(spec, site)).collect(),
        &|| {
            if spec.system {
                system_folders().iter().flat_map(|folder| in_folder(spec, folder)).collect()
            } else {
                vec![]
            }
        },
        &|| python_site_packages().iter().flat_map(|site| in_site_packages(spec, site)).collect(),
    ];
    for stage in stages {
        if let Some(found) = try_all(stage(), &mut refused) {
            return Ok(found);
        }
    }
    if refused.is_empty() {
        let system = if spec.system { " and system library folders" } else { "" };
        return Err(format!("{} is in no Python environment{system} here", file_text(spec.stem)));
    }
    Err(refused.join("; "))
}

fn file_text(stem: &str) -> String {
    format!("{}{stem}{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX)
}

/// Candidates of a place the user named: a file, the library's folder, a site-packages folder or an environment.
fn named_candidates(spec: &LibrarySpec, place: &Path) -> Vec<PathBuf> {
    if place.is_file() {
        return vec![place.to_path_buf()];
    }
    let mut candidates = in_folder(spec, place);
    candidates.extend(in_site_packages(spec, place));
    candidates.extend(site_packages_of(place).iter().flat_map(|site| in_site_packages(spec, site)));
    candidates
}

fn in_site_packages(spec: &LibrarySpec, site: &Path) -> Vec<PathBuf> {
    in_folder(spec, &site.join(spec.package_folder))
}

/// Files of that stem in a folder, newest version first. Wheels carry versioned names only (`lib….so.2641`).
fn in_folder(spec: &LibrarySpec, folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(|name| is_library_of(name, spec.stem)))
        .map(|entry| entry.path())
        .collect();
    found.sort_by_cached_key(|path| std::cmp::Reverse(version_key(path)));
    found
}

/// Whether a file name is `libSTEM.so`, `libSTEM.so.1.2`, `libSTEM.2641.dylib` or `STEM.dll`.
fn is_library_of(name: &str, stem: &str) -> bool {
    let Some(rest) = name.strip_prefix(env::consts::DLL_PREFIX).and_then(|rest| rest.strip_prefix(stem)) else {
        return false;
    };
    let suffix = env::consts::DLL_SUFFIX;
    let versioned = |middle: &str| {
        middle.is_empty() || middle.starts_with('.') && middle.chars().all(|c| c == '.' || c.is_ascii_digit())
    };
    rest.strip_prefix(suffix).is_some_and(versioned) || rest.strip_suffix(suffix).is_some_and(versioned)
}

/// Numbers in the file name, so that 1.32 sorts after 1.9.
fn version_key(path: &Path) -> Vec<u64> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

/// Site-packages folders of a Python environment: `lib/python3.*/site-packages`, or `Lib/site-packages` on Windows.
fn site_packages_of(environment: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for library in ["lib", "lib64"] {
        for entry in fs::read_dir(environment.join(library)).into_iter().flatten().flatten() {
            let site = entry.path().join("site-packages");
            if entry.file_name().to_string_lossy().starts_with("python3") && site.is_dir() {
                found.push(site);
            }
        }
    }
    found.sort_by_cached_key(|path| std::cmp::Reverse(version_key(path.parent().unwrap_or(path))));
    let windows = environment.join("Lib").join("site-packages");
    if cfg!(windows) && windows.is_dir() {
        found.push(windows);
    }
    found
}

/// Site-packages of the environments that need no Python to be found, nearest first.
fn environment_site_packages() -> Vec<PathBuf> {
    let mut environments: Vec<PathBuf> = Vec::new();
    let program = env::current_exe().ok();
    let starts = [env::current_dir().ok(), program.as_deref().and_then(Path::parent).map(Path::to_path_buf)];
    for start in starts.into_iter().flatten() {
        environments.extend(start.ancestors().map(|folder| folder.join(".venv")));
    }
    environments.extend(["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(env::var_os).map(PathBuf::from));
    let mut sites: Vec<PathBuf> = Vec::new();
    for site in environments.iter().flat_map(|environment| site_packages_of(environment)) {
        if !sites.contains(&site) {
            sites.push(site);
        }
    }
    sites
}

fn system_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = ["LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"]
        .iter()
        .filter_map(env::var_os)
        .flat_map(|value| env::split_paths(&value).collect::<Vec<_>>())
        .filter(|folder| folder.is_absolute())
        .collect();
    if let Some(conda) = env::var_os("CONDA_PREFIX") {
        folders.push(PathBuf::from(conda).join("lib"));
    }
    let triple = format!("{}-linux-gnu", env::consts::ARCH);
    for base in ["/usr/local/lib", "/usr/lib", "/lib"] {
        folders.push(Path::new(base).join(&triple));
        folders.push(PathBuf::from(base));
    }
    folders.extend(["/usr/lib64", "/opt/homebrew/lib"].map(PathBuf::from));
    // Intel's archives unpack to /opt/intel/openvino_2026.4.1 or the like.
    let mut archives: Vec<PathBuf> = fs::read_dir("/opt/intel")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("openvino"))
        .map(|entry| entry.path())
        .collect();
    archives.sort_by_cached_key(|path| std::cmp::Reverse(version_key(path)));
    folders.extend(archives.into_iter().map(|archive| archive.join("runtime/lib/intel64")));
    folders
}

static PYTHON_SITES: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Site-packages of the `python3` on the path, asked once per process (starting Python takes up to a second).
fn python_site_packages() -> &'static [PathBuf] {
    PYTHON_SITES.get_or_init(|| {
        if let Some(value) = env::var_os(SITE_PACKAGES_VARIABLE) {
            return env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect();
        }
        let script = "import site, sysconfig\n\
            p = sysconfig.get_paths()\n\
            print('\\n'.join(dict.fromkeys([p['purelib'], p['platlib'], *site.getsitepackages(), site.getusersitepackages()])))";
        let output =
            Command::new("python3").args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::null()).output();
        match output {
            Ok(output) if output.status.success() => {
                String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).filter(|path| path.is_dir()).collect()
            }
            _ => Vec::new(),
        }
    })
}

/// Variables that spare worker processes the search: the libraries found so far and, if Python was asked, its answer.
pub fn worker_environment() -> Vec<(&'static str, PathBuf)> {
    let mut variables = Vec::new();
    variables.extend(crate::openvino::library_path().map(|path| (crate::openvino::LIBRARY.variable, path)));
    variables.extend(crate::ort::library_path().map(|path| (crate::ort::LIBRARY.variable, path)));
    if let Some(sites) = PYTHON_SITES.get()
        && let Ok(joined) = env::join_paths(sites)
    {
        variables.push((SITE_PACKAGES_VARIABLE, PathBuf::from(joined)));
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: LibrarySpec = LibrarySpec {
        variable: "TREFOIL_TEST_LIB_THAT_NOBODY_SETS",
        stem: "thing_c",
        package_folder: "thing/libs",
        system: false,
    };

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, b"not a library").unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn library_names() {
        for name in ["libthing_c.so", "libthing_c.so.2641", "libthing_c.so.1.32.0"] {
            assert!(is_library_of(name, "thing_c"), "{name}");
        }
        for name in ["libthing.so", "libthing_c_extra.so", "libthing_c.so.txt", "thing_c.so", "libthing_c.a"] {
            assert!(!is_library_of(name, "thing_c"), "{name}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn environments_site_packages_folders_and_files_are_searched_newest_first() {
        let folder = tempfile::tempdir().unwrap();
        let libraries = folder.path().join("lib/python3.11/site-packages/thing/libs");
        for name in ["libthing_c.so.1.9.0", "libthing_c.so.1.32.0"] {
            touch(&libraries.join(name));
        }
        let newest = libraries.join("libthing_c.so.1.32.0");
        for place in [folder.path(), libraries.parent().unwrap().parent().unwrap(), libraries.as_path(), &newest] {
            assert_eq!(named_candidates(&SPEC, place).first(), Some(&newest), "{}", place.display());
        }
        assert!(named_candidates(&SPEC, Path::new("/nowhere/at/all")).is_empty());
    }

    #[test]
    fn what_is_absent_is_told_in_one_line() {
        let error = find(&SPEC, |_| Ok(())).unwrap_err();
        assert!(error.contains("thing_c") && !error.contains('\n'), "{error}");
    }
}
