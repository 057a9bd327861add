//! The power meter: package energy through RAPL (powercap), else through the socket counters of hwmon.
//!
//! A package meter sees everything on the package, so what it tells is package power while the unit works, and the
//! profile says so in a note. Sensors of single devices and instantaneous power readings are not used: an energy counter
//! misses nothing between two looks. Where no meter exists or may be read, power is what the user declared, or absent.

use std::path::{Path, PathBuf};
use std::time::Instant;

/// An energy counter of one package.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Counter {
    file: PathBuf,
    /// Microjoules at which the counter wraps to 0.
    range: u64,
}

/// What the meters of this machine can tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PowerMeter {
    packages: Vec<Counter>,
}

/// A reading of all counters, to be paired with a later one.
#[derive(Debug)]
pub struct Reading {
    microjoules: Vec<u64>,
    at: Instant,
}

impl PowerMeter {
    /// The package counters that this process may read; none on most virtual machines, and root-only elsewhere. RAPL and
    /// hwmon may show the same counters, so hwmon is asked only where RAPL has none.
    pub fn discover() -> Self {
        let rapl = Self::rapl_in(Path::new("/sys/class/powercap"));
        if rapl.is_available() { rapl } else { Self::hwmon_in(Path::new("/sys/class/hwmon")) }
    }

    /// Counters `energyN_input` (microjoules) whose label is that of a whole socket (`Esocket0`, driver amd_energy; per-core
    /// ones are parts of it).
    fn hwmon_in(root: &Path) -> Self {
        let mut packages = Vec::new();
        for device in std::fs::read_dir(root).into_iter().flatten().flatten() {
            for entry in std::fs::read_dir(device.path()).into_iter().flatten().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let Some(number) = name.strip_prefix("energy").and_then(|rest| rest.strip_suffix("_label")) else {
                    continue;
                };
                let label = std::fs::read_to_string(entry.path()).unwrap_or_default();
                let file = device.path().join(format!("energy{number}_input"));
                // The driver accumulates into 64 bits, so there is no wrap to know of.
                if label.starts_with("Esocket") && read_number(&file).is_some() {
                    packages.push(Counter { file, range: u64::MAX });
                }
            }
        }
        packages.sort_by(|a, b| a.file.cmp(&b.file));
        Self { packages }
    }

    fn rapl_in(root: &Path) -> Self {
        let mut packages = Vec::new();
        let zones = std::fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
        for zone in zones {
            // Subzones (core, uncore, dram) are parts of their package; `psys` covers more than the package.
            let name = std::fs::read_to_string(zone.join("name")).unwrap_or_default();
            if !name.starts_with("package") {
                continue;
            }
            let counter = Counter {
                file: zone.join("energy_uj"),
                range: read_number(&zone.join("max_energy_range_uj")).unwrap_or(u64::MAX),
            };
            if read_number(&counter.file).is_some() {
                packages.push(counter);
            }
        }
        packages.sort_by(|a, b| a.file.cmp(&b.file));
        Self { packages }
    }

    /// Whether anything can be measured.
    pub fn is_available(&self) -> bool {
        !self.packages.is_empty()
    }

    /// Reads all counters.
    pub fn read(&self) -> Option<Reading> {
        let microjoules = self.packages.iter().map(|counter| read_number(&counter.file)).collect::<Option<Vec<_>>>()?;
        Some(Reading { microjoules, at: Instant::now() })
    }

    /// Mean package watts since `earlier`, all packages together.
    pub fn watts_since(&self, earlier: &Reading) -> Option<f64> {
        let now = self.read()?;
        let seconds = now.at.duration_since(earlier.at).as_secs_f64();
        let spent: u64 = self
            .packages
            .iter()
            .zip(earlier.microjoules.iter().zip(&now.microjoules))
            .map(
                |(counter, (&before, &after))| {
                    if after >= before { after - before } else { after + (counter.range - before) }
                },
            )
            .sum();
        (seconds > 0.0).then(|| spent as f64 / 1e6 / seconds)
    }
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether power can be measured here: some counter of energy can be read.
pub fn power_is_metered() -> bool {
    PowerMeter::discover().is_available()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(root: &Path, name: &str, kind: &str, energy: u64) {
        let zone = root.join(name);
        std::fs::create_dir_all(&zone).unwrap();
        std::fs::write(zone.join("name"), kind).unwrap();
        std::fs::write(zone.join("max_energy_range_uj"), "1000000\n").unwrap();
        std::fs::write(zone.join("energy_uj"), energy.to_string()).unwrap();
    }

    #[test]
    fn package_counters_are_summed_and_wrap() {
        let root = tempfile::tempdir().unwrap();
        zone(root.path(), "intel-rapl:0", "package-0\n", 900_000);
        zone(root.path(), "intel-rapl:1", "package-1\n", 100_000);
        zone(root.path(), "intel-rapl:0:0", "core\n", 5);
        zone(root.path(), "intel-rapl:2", "psys\n", 5);
        let meter = PowerMeter::rapl_in(root.path());
        assert_eq!(meter.packages.len(), 2);
        let mut reading = meter.read().unwrap();
        assert_eq!(reading.microjoules, [900_000, 100_000]);
        // As if two seconds had passed, with the first counter wrapped.
        reading.at -= std::time::Duration::from_secs(2);
        zone(root.path(), "intel-rapl:0", "package-0\n", 100_000);
        zone(root.path(), "intel-rapl:1", "package-1\n", 300_000);
        let watts = meter.watts_since(&reading).unwrap();
        assert!((watts - 0.2).abs() < 0.01, "{watts}");
    }

    #[test]
    fn socket_counters_of_hwmon_are_read_and_core_counters_are_not() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("hwmon3");
        std::fs::create_dir_all(&device).unwrap();
        for (number, label, energy) in
            [(1, "Ecore000", "7"), (17, "Esocket0", "4000000"), (18, "Esocket1", "unreadable")]
        {
            std::fs::write(device.join(format!("energy{number}_label")), format!("{label}\n")).unwrap();
            std::fs::write(device.join(format!("energy{number}_input")), energy).unwrap();
        }
        let meter = PowerMeter::hwmon_in(root.path());
        let mut reading = meter.read().unwrap();
        assert_eq!(reading.microjoules, [4_000_000]);
        reading.at -= std::time::Duration::from_secs(1);
        std::fs::write(device.join("energy17_input"), "19000000").unwrap();
        let watts = meter.watts_since(&reading).unwrap();
        assert!((watts - 15.0).abs() < 0.1, "{watts}");
    }

    #[test]
    fn a_machine_without_meters_has_none() {
        let root = tempfile::tempdir().unwrap();
        assert!(!PowerMeter::rapl_in(root.path()).is_available());
        assert!(!PowerMeter::rapl_in(Path::new("/nonexistent")).is_available());
        assert!(!PowerMeter::hwmon_in(Path::new("/nonexistent")).is_available());
    }
}
