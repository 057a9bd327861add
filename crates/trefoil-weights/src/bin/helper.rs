//! The process that tests and benches start: to be probed, crashed, killed, and to share memory with.
//!
//! ```text
//! trefoil-weights-helper probe-child               one probe attempt with the test engines
//! trefoil-weights-helper receive SOCKET            receive regions, touch them, print a checksum, wait for a line
//! trefoil-weights-helper map ARTEFACT              map all regions of an artefact, likewise
//! trefoil-weights-helper pack SOURCE OUTPUT        pack, print the peak of resident memory in bytes
//! trefoil-weights-helper die SOCKET                greet as a receiver, then die without a word
//! ```

use std::io::{BufRead as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use trefoil_weights::probe::{CpuProbe, MapProbe, Mapped, probe_child_main};
use trefoil_weights::region::{Region, RegionKind, load_regions};
use trefoil_weights::share::{Expectation, receive};
use trefoil_weights::{Artefact, PackOptions, pack};

/// Where the misbehaving engines misbehave.
const THRESHOLD: usize = 5 << 20;

/// An engine that fails above a size, each in its own way.
struct Misbehaving(&'static str);

impl MapProbe for Misbehaving {
    fn name(&self) -> &str {
        self.0
    }

    fn try_map(&self, region: &Region) -> Result<Mapped, String> {
        println!("a library says hello");
        match self.0 {
            _ if region.len() <= THRESHOLD => CpuProbe.try_map(region),
            "picky" => Err(format!("{} bytes are\ntoo many", region.len())),
            "fragile" => {
                eprintln!("about to abort");
                std::process::abort()
            }
            "stuck" => loop {
                std::thread::sleep(Duration::from_secs(1));
            },
            _ => {
                eprintln!("giving up");
                std::process::exit(7)
            }
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["probe-child"] => {
            let engines = ["picky", "fragile", "stuck", "quitter"].map(Misbehaving);
            let [picky, fragile, stuck, quitter] = &engines;
            return probe_child_main(&[&CpuProbe, picky, fragile, stuck, quitter]);
        }
        ["receive", socket] => receive_and_hold(Path::new(socket)),
        ["map", artefact] => map_and_hold(Path::new(artefact)),
        ["pack", source, output] => pack_and_tell(Path::new(source), Path::new(output)),
        ["die", socket] => greet_and_die(Path::new(socket)),
        _ => Err("see the source for its commands".to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn receive_and_hold(socket: &Path) -> Result<(), String> {
    let socket = UnixStream::connect(socket).map_err(|error| error.to_string())?;
    let received =
        receive(&socket, &Expectation::default(), Duration::from_secs(30)).map_err(|error| error.to_string())?;
    hold(&received.regions)
}

fn map_and_hold(artefact: &Path) -> Result<(), String> {
    let artefact = Artefact::open(artefact).map_err(|error| error.to_string())?;
    let regions = load_regions(&artefact, RegionKind::File, None).map_err(|error| error.to_string())?;
    drop(artefact);
    hold(&regions)
}

/// Touches every page, says so with the sum of all bytes, and keeps the mappings until a line or the end of input comes.
fn hold(regions: &[Region]) -> Result<(), String> {
    let mut sum = 0u64;
    for region in regions {
        sum = region
            .bytes()
            .map_err(|error| error.to_string())?
            .iter()
            .fold(sum, |sum, &byte| sum.wrapping_add(u64::from(byte)));
    }
    println!("{sum}");
    std::io::stdout().flush().map_err(|error| error.to_string())?;
    std::io::stdin().lock().read_line(&mut String::new()).map_err(|error| error.to_string())?;
    Ok(())
}

fn pack_and_tell(source: &Path, output: &Path) -> Result<(), String> {
    let options = PackOptions { threads: 2, ..PackOptions::default() };
    let report = pack(source, output, &options, |_| ()).map_err(|error| error.to_string())?;
    println!("{}", report.peak_resident_bytes.unwrap_or(0));
    Ok(())
}

fn greet_and_die(socket: &Path) -> Result<(), String> {
    let mut socket = UnixStream::connect(socket).map_err(|error| error.to_string())?;
    let mut hello = [0u8; 48];
    hello[..8].copy_from_slice(b"TRFSHARE");
    hello[8] = 1;
    socket.write_all(&hello).map_err(|error| error.to_string())?;
    std::process::abort()
}
