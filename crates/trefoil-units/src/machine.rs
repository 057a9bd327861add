//! The machine that numbers are taken on.

use crate::{allowed_cores, backends};
use std::collections::BTreeMap;
use std::fs;
use trefoil_core::Machine;

/// Describes this machine: CPU, allowed cores, memory, operating system, instruction sets, and the versions of Trefoil and
/// of every backend library that is present. Loads those libraries.
pub fn machine() -> Machine {
    let mut versions = BTreeMap::from([("trefoil".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    for backend in backends() {
        versions.extend(backend.versions());
    }
    Machine {
        cpu: cpu_name(),
        cores: allowed_cores().to_vec(),
        memory_bytes: memory_bytes(),
        os: os_name(),
        features: features(),
        versions,
    }
}

/// Value of the first line `key : value` of a text in the style of `/proc/cpuinfo`.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.trim() == key)
        .map(|(_, value)| value.trim())
}

fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    // Arm kernels have no model name; the device tree often has.
    let device_tree = || {
        let model = fs::read_to_string("/proc/device-tree/model").ok()?;
        Some(model.trim_end_matches('\0').to_owned())
    };
    field(&text, "model name")
        .or_else(|| field(&text, "Hardware"))
        .map(str::to_owned)
        .or_else(device_tree)
        .unwrap_or_else(|| format!("unknown {}", std::env::consts::ARCH))
}

fn memory_bytes() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = field(&text, "MemTotal").and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

fn os_name() -> String {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map_or(std::env::consts::OS, |value| value.trim_matches('"'));
    match fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(kernel) => format!("{name}, kernel {}", kernel.trim()),
        Err(_) => name.to_owned(),
    }
}

/// Instruction sets that change which kernels the libraries pick, as the kernel names them (`asimd` is called `neon`).
fn features() -> Vec<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let Some(listed) = field(&text, "flags").or_else(|| field(&text, "Features")) else { return Vec::new() };
    let mut found: Vec<String> = listed
        .split_whitespace()
        .filter(|name| FEATURES.contains(name))
        .map(|name| if name == "asimd" { "neon".to_owned() } else { name.to_owned() })
        .collect();
    found.sort_unstable();
    found
}

const FEATURES: [&str; 18] = [
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "asimdhp",
    "i8mm",
    "bf16",
    "sve",
    "sve2",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_whole_key() {
        let text = "model\t\t: 17\nmodel name\t: A CPU: fast\nMemTotal:       123 kB\n";
        assert_eq!(field(text, "model name"), Some("A CPU: fast"));
        assert_eq!(field(text, "MemTotal"), Some("123 kB"));
        assert_eq!(field(text, "absent"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_a_name_memory_and_cores() {
        let machine = machine();
        assert!(
            !machine.cpu.is_empty() && machine.memory_bytes > 1 << 20 && machine.os.contains("kernel"),
            "{machine:?}"
        );
        assert_eq!(machine.cores, allowed_cores());
        assert_eq!(machine.versions["trefoil"], env!("CARGO_PKG_VERSION"));
    }
}
