//! Instruction sets and what this processor has.

use crate::KernelError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// An instruction set that the kernels are compiled for. All give the same integers and, on the `w8a8` path, the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Isa {
    /// Portable Rust, compiled for the target's baseline.
    Scalar,
    /// AVX2 with FMA and F16C: `vpmaddubsw` with the sign trick.
    Avx2,
    /// AVX2 and the VEX-encoded VNNI.
    AvxVnni,
    /// AVX-512 (F, BW, DQ, VL) and VNNI.
    Avx512Vnni,
    /// AMX tiles of INT8 beside AVX-512 VNNI, where the system lets this process use them.
    AmxInt8,
    /// Armv8.2 `SDOT`.
    NeonDotprod,
    /// Armv8.6 `SMMLA`.
    NeonI8mm,
}

impl Isa {
    /// All, slowest first.
    pub const ALL: [Isa; 7] =
        [Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512Vnni, Isa::AmxInt8, Isa::NeonDotprod, Isa::NeonI8mm];

    /// Name as in messages, options and reports.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avx-vnni",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::AmxInt8 => "amx-int8",
            Isa::NeonDotprod => "neon-dotprod",
            Isa::NeonI8mm => "neon-i8mm",
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => has_avx2() && std::arch::is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => has_avx512_vnni(),
            #[cfg(target_arch = "x86_64")]
            Isa::AmxInt8 => has_avx512_vnni() && crate::kernel::amx::is_available(),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => std::arch::is_aarch64_feature_detected!("i8mm"),
            _ => false,
        }
    }

    /// What this processor has, slowest first. Never empty.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// The fastest that this processor has.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512_vnni() -> bool {
    has_avx2()
        && std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512dq")
        && std::arch::is_x86_feature_detected!("avx512vl")
        && std::arch::is_x86_feature_detected!("avx512vnni")
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

fn names(sets: &[Isa]) -> String {
    sets.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", ")
}

impl FromStr for Isa {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Isa, KernelError> {
        Isa::ALL
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| KernelError::IsaUnknown { name: name.to_string(), known: names(&Isa::ALL) })
    }
}

/// An instruction set that the processor was found to have. Unsafe calls into its kernels rest on this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Supported(Isa);

impl Supported {
    /// Checks the processor.
    pub(crate) fn check(isa: Isa) -> Result<Supported, KernelError> {
        if isa.is_available() {
            Ok(Supported(isa))
        } else {
            Err(KernelError::IsaUnavailable { isa, available: names(&Isa::available()) })
        }
    }

    /// Which.
    #[inline]
    pub(crate) fn isa(self) -> Isa {
        self.0
    }

    /// Whether the kernels in AVX-512 VNNI may run.
    #[inline]
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx512_vnni(self) -> bool {
        matches!(self.0, Isa::Avx512Vnni | Isa::AmxInt8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>().unwrap(), isa);
        }
        let error = "avx1024".parse::<Isa>().unwrap_err();
        assert!(
            error.to_string().starts_with("unknown instruction set `avx1024`; choose one of scalar, avx2"),
            "{error}"
        );
    }

    #[test]
    fn only_available_sets_are_supported() {
        assert!(Isa::available().contains(&Isa::Scalar));
        for isa in Isa::ALL {
            assert_eq!(Supported::check(isa).is_ok(), isa.is_available());
        }
        let foreign = if cfg!(target_arch = "x86_64") { Isa::NeonDotprod } else { Isa::Avx2 };
        let error = Supported::check(foreign).unwrap_err();
        assert!(error.to_string().contains("it has scalar"), "{error}");
    }
}
