//! AMX: products of tiles of 16 rows × 64 codes with 64 × 16.
//!
//! `tdpbssd` multiplies signed by signed bytes, and reads its right-hand side as groups of four inputs × 16 columns: half a line of the
//! tile layout. So weights are read where they lie, with a stride of one group, activations too, and nothing is made unsigned. Sums are
//! exact 32-bit integers as everywhere.
//!
//! The compiler knows nothing of tiles: it has no type for them and never uses their registers, so what one block of assembly leaves there
//! the next one finds, as long as no other kernel runs on the thread in between. Every use is between a [`Tiles::configure`] and its drop.
//! While a product is in flight the rest of the core is free: what is done between two calls of [`Product::steps`] costs next to nothing.

use std::arch::asm;
use std::marker::PhantomData;
use std::sync::OnceLock;
use trefoil_weights::tile::{GROUP_BYTES, TILE};

/// Rows of a tile.
const ROWS: usize = 16;
/// Inputs of a step.
pub(crate) const STEP_INPUTS: usize = 64;
/// Rows of a product: two tiles.
pub(crate) const PRODUCT_ROWS: usize = 2 * ROWS;

/// Bytes of weights of a step: 64 inputs × 32 columns.
const STEP_BYTES: usize = STEP_INPUTS * TILE;
const _: () = assert!(GROUP_BYTES == 2 * 64 && STEP_BYTES == ROWS * GROUP_BYTES, "a tile is 16 groups of half a line");

/// Whether the processor has AMX with INT8 and the system lets this process use it. Asks for the permission at the first call; it holds for
/// all threads.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    // An interpreter knows neither the instructions nor the system call.
    !cfg!(miri) && *AVAILABLE.get_or_init(|| has_instructions() && permission())
}

fn has_instructions() -> bool {
    const TILE_AND_INT8: u32 = 1 << 24 | 1 << 25;
    std::arch::x86_64::__cpuid(0).eax >= 7
        && std::arch::x86_64::__cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8
}

/// Linux switches the registers' memory on for a process that asks for it.
#[cfg(target_os = "linux")]
fn permission() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: a system call that reads and writes no memory of this process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permission() -> bool {
    false
}

/// The shapes of the eight tiles: `ldtilecfg`'s operand.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static EIGHT_WHOLE_TILES: Configuration = {
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        configuration.row_bytes[tile] = 64;
        configuration.rows[tile] = ROWS as u8;
        tile += 1;
    }
    configuration
};

/// This thread's tiles, configured; given back when dropped, so that the system has nothing to save.
pub(crate) struct Tiles {
    /// They are the thread's.
    not_send: PhantomData<*const ()>,
}

impl Tiles {
    /// All whole: 16 rows of 64 bytes.
    ///
    /// # Safety
    /// The processor has AMX, and this process may use it: [`is_available`].
    pub(crate) unsafe fn configure() -> Tiles {
        // SAFETY: the caller's promise; the operand is 64 bytes that are read.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const EIGHT_WHOLE_TILES, options(nostack, readonly)) };
        Tiles { not_send: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `configure` found the instructions.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Codes of 32 rows as [`Product`] reads them: step by step 64 inputs of the first 16 rows, a line to a row, and of the others. What is not
/// there is 0, so any number of rows and inputs will do.
pub(crate) fn pack_rows(codes: &[i8], stride: usize, (rows, k): (usize, usize), packed: &mut [i8]) {
    let lines = packed.as_chunks_mut::<STEP_INPUTS>().0;
    for row in 0..PRODUCT_ROWS {
        let lines = lines[row..].iter_mut().step_by(PRODUCT_ROWS);
        if row < rows {
            let (whole, rest) = codes[row * stride..][..k].as_chunks::<STEP_INPUTS>();
            let mut lines = lines;
            for (codes, line) in whole.iter().zip(lines.by_ref()) {
                *line = *codes;
            }
            if let Some(line) = lines.next() {
                line[..rest.len()].copy_from_slice(rest);
                line[rest.len()..].fill(0);
            }
        } else {
            lines.for_each(|line| line.fill(0));
        }
    }
}

/// A product of 32 packed rows of codes with 32 columns of tiled weights, in steps of 64 inputs.
pub(crate) struct Product {
    codes: *const i8,
    weights: *const i8,
}

impl Product {
    /// Starts at 0.
    ///
    /// # Safety
    /// `tiles` are in use by no other product; every step that is asked for has 32 × 64 `codes` and 64 × 32 of `weights`.
    #[inline]
    pub(crate) unsafe fn new(_: &Tiles, codes: *const i8, weights: *const i8) -> Product {
        // SAFETY: the tiles are configured.
        unsafe {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
        Product { codes, weights }
    }

    /// `count` more steps.
    ///
    /// # Safety
    /// They are there, see [`Product::new`].
    #[inline]
    pub(crate) unsafe fn steps(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        // SAFETY: the caller's promise: 2 KiB at each address for each step.
        unsafe {
            asm!(
                "2:",
                "tileloadd tmm6, [{weights} + {group}*1]",
                "tileloadd tmm4, [{codes} + {line}*1]",
                "tileloadd tmm7, [{weights} + {group}*1 + 64]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{codes} + {line}*1 + 1024]",
                "tdpbssd tmm1, tmm4, tmm7",
                "tdpbssd tmm2, tmm5, tmm6",
                "add {weights}, 2048",
                "tdpbssd tmm3, tmm5, tmm7",
                "add {codes}, 2048",
                "dec {count}",
                "jnz 2b",
                weights = inout(reg) self.weights,
                codes = inout(reg) self.codes,
                count = inout(reg) count => _,
                group = in(reg) GROUP_BYTES,
                line = in(reg) STEP_INPUTS,
                options(nostack, readonly),
            );
        }
    }

    /// The sums, 32 of each of 32 rows, `stride` numbers apart.
    ///
    /// # Safety
    /// They are writable.
    #[inline]
    #[allow(clippy::unused_self, reason = "a product ends here")]
    pub(crate) unsafe fn store(self, to: *mut i32, stride: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilestored [{first} + {stride}*1], tmm0",
                "tilestored [{first} + {stride}*1 + 64], tmm1",
                "tilestored [{second} + {stride}*1], tmm2",
                "tilestored [{second} + {stride}*1 + 64], tmm3",
                first = in(reg) to,
                second = in(reg) to.wrapping_add(ROWS * stride),
                stride = in(reg) stride * size_of::<i32>(),
                options(nostack),
            );
        }
    }
}

/// See [`crate::isa::Supported::dot_peak`].
///
/// # Safety
/// [`is_available`].
pub(super) unsafe fn dot_peak(rounds: u64) -> u64 {
    // SAFETY: the caller's promise.
    let _tiles = unsafe { Tiles::configure() };
    let codes = [3i8; ROWS * STEP_INPUTS];
    // SAFETY: a tile of codes.
    unsafe {
        asm!(
            // Products of tiles that were never written are quicker.
            "tileloadd tmm4, [{codes} + {line}*1]",
            "tileloadd tmm5, [{codes} + {line}*1]",
            "tileloadd tmm6, [{codes} + {line}*1]",
            "tileloadd tmm7, [{codes} + {line}*1]",
            "2:",
            "tdpbssd tmm0, tmm4, tmm6",
            "tdpbssd tmm1, tmm4, tmm7",
            "tdpbssd tmm2, tmm5, tmm6",
            "tdpbssd tmm3, tmm5, tmm7",
            "dec {count}",
            "jnz 2b",
            count = inout(reg) rounds.max(1) => _,
            codes = in(reg) codes.as_ptr(),
            line = in(reg) STEP_INPUTS,
            options(nostack, readonly),
        );
    }
    rounds * 4 * (ROWS * ROWS * STEP_INPUTS * 2) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_weights::tile::off;

    #[test]
    fn products_are_exact() {
        if !is_available() {
            eprintln!("skipped: no AMX with INT8 here");
            return;
        }
        // All bytes, −128 too.
        let code = |seed: usize| (seed.wrapping_mul(2_654_435_761) >> 13) as u8 as i8;
        for (rows, k) in [(32usize, 192usize), (19, 96), (1, 32), (16, 64)] {
            let (stride, steps) = (k + 5, k.div_ceil(STEP_INPUTS));
            let a: Vec<i8> = (0..rows * stride).map(code).collect();
            // What lies after the last input meets zeros.
            let weights: Vec<i8> = (0..steps * STEP_INPUTS * TILE).map(|at| code(at + 77)).collect();
            let mut packed = vec![99; steps * PRODUCT_ROWS * STEP_INPUTS];
            pack_rows(&a, stride, (rows, k), &mut packed);
            let mut out = vec![7i32; PRODUCT_ROWS * 40];
            // SAFETY: available; codes, weights and sums of 32 rows.
            unsafe {
                let tiles = Tiles::configure();
                let mut product = Product::new(&tiles, packed.as_ptr(), weights.as_ptr());
                product.steps(1);
                product.steps(0);
                product.steps(steps - 1);
                product.store(out.as_mut_ptr(), 40);
            }
            for row in 0..PRODUCT_ROWS {
                for column in 0..40 {
                    let factor = |i: usize| i32::from(weights[off(i, column, k)]);
                    let want = match (row < rows, column < TILE) {
                        (_, false) => 7,
                        (false, true) => 0,
                        (true, true) => (0..k).map(|i| i32::from(a[row * stride + i]) * factor(i)).sum(),
                    };
                    assert_eq!(out[row * 40 + column], want, "{rows}×{k}: row {row}, column {column}");
                }
            }
        }
    }
}
