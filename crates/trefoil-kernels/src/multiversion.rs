//! One source, compiled for every instruction set.
//!
//! The macro wraps a function whose body is generic Rust. Each compiled version is the same sequence of IEEE operations:
//! Rust never contracts `a * b + c` and never reorders floating-point additions, so vectorising changes the speed and not
//! the bits. What the body calls must be `#[inline(always)]` or small enough to be inlined, else it runs at baseline speed.

/// Defines `fn name(isa: Supported, …)`, which runs `body` compiled for that instruction set.
macro_rules! multiversion {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident ( $($argument:ident : $type:ty),* $(,)? ) $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "a kernel takes its operands one by one")]
        $visibility fn $name(isa: crate::isa::Supported, $($argument: $type),*) {
            #[inline(always)]
            #[allow(clippy::inline_always, clippy::too_many_arguments, reason = "compiled inside each version")]
            fn generic($($argument: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            #[allow(clippy::too_many_arguments, reason = "as above")]
            fn avx512($($argument: $type),*) { generic($($argument),*) }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments, reason = "as above")]
            fn avx2($($argument: $type),*) { generic($($argument),*) }

            match isa.isa() {
                #[cfg(target_arch = "x86_64")]
                crate::Isa::Avx512Vnni | crate::Isa::AmxInt8 => {
                    // SAFETY: `Supported` exists only for instruction sets that the processor was found to have.
                    unsafe { avx512($($argument),*) }
                }
                #[cfg(target_arch = "x86_64")]
                crate::Isa::Avx2 | crate::Isa::AvxVnni => {
                    // SAFETY: as above.
                    unsafe { avx2($($argument),*) }
                }
                // NEON is part of the aarch64 baseline.
                _ => generic($($argument),*),
            }
        }
    };
}
pub(crate) use multiversion;
