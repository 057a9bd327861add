//! The kernel's own numbers about memory: peak and mapped bytes, per process and per file.

use serde::Serialize;
use std::fs;

/// How much of one file (or memfd, or dma-buf) a process has mapped and resident. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MappingUsage {
    /// Mappings of that file.
    pub mappings: usize,
    /// Address space they take.
    pub size: u64,
    /// Resident bytes.
    pub resident: u64,
    /// Resident bytes, each page divided by the number of its mappings: sums over processes to physical memory.
    pub proportional: u64,
}

/// Highest resident memory of this process since it started or since [`reset_peak`] (`VmHWM`), in bytes.
pub fn peak_resident_bytes() -> Option<u64> {
    status_bytes("VmHWM:")
}

/// Resident memory of this process now (`VmRSS`), in bytes.
pub fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Makes the kernel count the peak from now on. False where the kernel does not allow it.
pub fn reset_peak() -> bool {
    fs::write("/proc/self/clear_refs", "5").is_ok()
}

/// Memory that the system could give to processes without swapping (`MemAvailable`), in bytes.
pub fn available_bytes() -> Option<u64> {
    line_bytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// Resident memory of a process by what it is, as `/proc/PID/status` tells it. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ResidentMemory {
    /// Its own (`RssAnon`): heap, stacks, scratch, copies.
    pub anonymous_bytes: u64,
    /// Of files that it has mapped (`RssFile`): programs, libraries, artefacts. Shared with all who map them.
    pub file_bytes: u64,
    /// Of shared memory (`RssShmem`): memfds.
    pub shared_bytes: u64,
    /// Highest sum since it started or since [`reset_peak`] (`VmHWM`).
    pub peak_bytes: u64,
}

/// Resident memory of process `pid`. `None` where the kernel does not tell it.
pub fn resident_memory(pid: u32) -> Option<ResidentMemory> {
    parse_status(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn parse_status(status: &str) -> Option<ResidentMemory> {
    let bytes = |key| line_bytes(status, key);
    Some(ResidentMemory {
        anonymous_bytes: bytes("RssAnon:")?,
        file_bytes: bytes("RssFile:")?,
        shared_bytes: bytes("RssShmem:")?,
        peak_bytes: bytes("VmHWM:")?,
    })
}

fn status_bytes(key: &str) -> Option<u64> {
    line_bytes(&fs::read_to_string("/proc/self/status").ok()?, key)
}

/// The value of a `Key:   123 kB` line, in bytes.
fn line_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Sums the mappings of the file with `device` and `inode` (as [`rustix::fs::fstat`] gives them) in process `pid`.
/// `None` where `/proc/PID/smaps` cannot be read.
pub fn mapping_usage(pid: u32, device: u64, inode: u64) -> Option<MappingUsage> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    Some(parse_smaps(&smaps, rustix::fs::major(device), rustix::fs::minor(device), inode))
}

fn parse_smaps(smaps: &str, major: u32, minor: u32, inode: u64) -> MappingUsage {
    let mut usage = MappingUsage::default();
    let mut wanted = false;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some(key) = first.strip_suffix(':') {
            let sum = match key {
                "Size" => &mut usage.size,
                "Rss" => &mut usage.resident,
                "Pss" => &mut usage.proportional,
                _ => continue,
            };
            if wanted {
                *sum += words.next().and_then(|word| word.parse::<u64>().ok()).map_or(0, |kib| kib * 1024);
            }
            continue;
        }
        // `start-end perms offset major:minor inode path` begins a mapping.
        let mut words = words.skip(2);
        let (device, number) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        wanted = number.parse() == Ok(inode)
            && device.split_once(':').is_some_and(|(a, b)| {
                u32::from_str_radix(a, 16) == Ok(major) && u32::from_str_radix(b, 16) == Ok(minor)
            });
        usage.mappings += usize::from(wanted);
    }
    usage
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000010000 r--s 00000000 08:1a 4711                       /tmp/a b
Size:                 64 kB
Rss:                  32 kB
Pss:                  16 kB
VmFlags: rd sh
7f0000020000-7f0000030000 r--s 00010000 08:1a 4711                       /tmp/a b
Size:                 64 kB
Rss:                   4 kB
Pss:                   4 kB
7f0000040000-7f0000050000 r--s 00000000 08:1b 4711                       /tmp/c
Size:                 64 kB
Rss:                  64 kB
Pss:                  64 kB
7f0000060000-7f0000070000 rw-p 00000000 00:00 0
Size:                 64 kB
Rss:                  64 kB
";

    #[test]
    fn only_the_asked_file_is_summed() {
        let usage = parse_smaps(SMAPS, 8, 0x1a, 4711);
        assert_eq!(usage, MappingUsage { mappings: 2, size: 128 << 10, resident: 36 << 10, proportional: 20 << 10 });
        assert_eq!(parse_smaps(SMAPS, 8, 0x1a, 1), MappingUsage::default());
    }

    #[test]
    fn resident_memory_is_told_by_kind() {
        let status = "Name:\tx\nVmHWM:\t    9000 kB\nVmRSS:\t    8000 kB\nRssAnon:\t    5000 kB\nRssFile:\t    2000 kB\nRssShmem:\t    1000 kB\n";
        let want = ResidentMemory {
            anonymous_bytes: 5000 << 10,
            file_bytes: 2000 << 10,
            shared_bytes: 1000 << 10,
            peak_bytes: 9000 << 10,
        };
        assert_eq!(parse_status(status), Some(want));
        assert_eq!(parse_status("VmHWM: 1 kB\n"), None, "an older kernel does not tell kinds");
        assert_eq!(resident_memory(u32::MAX), None);
    }

    #[test]
    fn this_process_has_a_peak_no_lower_than_its_present() {
        let (Some(now), Some(peak)) = (resident_bytes(), peak_resident_bytes()) else {
            eprintln!("skipped: /proc/self/status is not readable here");
            return;
        };
        assert!(peak >= now.min(peak) && now > 0);
        let block = vec![1u8; 32 << 20];
        assert!(std::hint::black_box(&block).contains(&1));
        assert!(peak_resident_bytes().unwrap() >= 32 << 20);
    }
}
