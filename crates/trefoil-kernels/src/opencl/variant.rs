//! Variants of the integer product.

use super::{DeviceKind, OpenClError};
use crate::Isa;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How the kernels multiply codes. All give the same integers and so the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// A column per work-item, `dot_4x8packed_ss_int`: GPUs with `cl_khr_integer_dot_product`.
    #[serde(rename = "dot-4x8packed")]
    Dot4x8Packed,
    /// A column per work-item, four multiplications: GPUs without it.
    Columns,
    /// Vectors of 16 columns in 32-bit integers: CPUs, portable.
    Vectors,
    /// Inline assembly with `vpdpbusd` on 512-bit registers: CPU devices on this machine, where it has AVX-512 VNNI.
    #[serde(rename = "x86-vnni")]
    X86Vnni,
}

impl Variant {
    /// All.
    pub const ALL: [Variant; 4] = [Variant::Dot4x8Packed, Variant::Columns, Variant::Vectors, Variant::X86Vnni];

    /// Name as in messages, options and reports.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Dot4x8Packed => "dot-4x8packed",
            Variant::Columns => "columns",
            Variant::Vectors => "vectors",
            Variant::X86Vnni => "x86-vnni",
        }
    }

    /// What a device can run, preferred one first.
    pub(super) fn available(kind: DeviceKind, integer_dot_product: bool) -> Vec<Variant> {
        let mut variants = match kind {
            DeviceKind::Cpu => vec![Variant::X86Vnni, Variant::Vectors, Variant::Dot4x8Packed, Variant::Columns],
            DeviceKind::Gpu | DeviceKind::Other => vec![Variant::Dot4x8Packed, Variant::Columns, Variant::Vectors],
        };
        variants.retain(|variant| match variant {
            Variant::Dot4x8Packed => integer_dot_product,
            Variant::Columns | Variant::Vectors => true,
            // An OpenCL device of kind CPU is this machine's processor.
            Variant::X86Vnni => Isa::Avx512Vnni.is_available(),
        });
        variants
    }

    /// Lanes of a work-item's vectors.
    pub(super) fn width(self) -> usize {
        match self {
            Variant::Dot4x8Packed | Variant::Columns => 1,
            Variant::Vectors | Variant::X86Vnni => 16,
        }
    }

    /// Rows of the product that a work-item holds in registers, as in the source.
    pub(super) fn tile_rows(self) -> usize {
        match self {
            Variant::Dot4x8Packed | Variant::Columns => 8,
            Variant::Vectors => 6,
            Variant::X86Vnni => 12,
        }
    }

    /// Columns of the product that a work-item holds in registers, as in the source.
    pub(super) fn tile_columns(self) -> usize {
        match self {
            Variant::Dot4x8Packed | Variant::Columns => 1,
            Variant::Vectors => 16,
            Variant::X86Vnni => 32,
        }
    }

    /// Work-items of a group along the columns of a product, as in the source.
    pub(super) fn group_items(self) -> usize {
        if self.width() == 1 { 32 } else { 1 }
    }

    /// Work-items that share a row of a row operator: a lane of the reduction each, or one for all 16.
    pub(super) fn row_items(self) -> usize {
        if self.width() == 1 { 16 } else { 1 }
    }

    /// Rows that an item of an operator on rows does one after the other: `ROW_BATCH` of types.cl.
    pub(super) fn row_batch(self) -> usize {
        if self.width() == 1 { 1 } else { 16 }
    }

    /// Whether a work-item does all steps of attention for its rows, or one of three as a lane.
    pub(super) fn fuses_attention(self) -> bool {
        self.width() == 16
    }

    /// Whether its program has a kernel of this name.
    pub(super) fn has(self, kernel: &str) -> bool {
        match kernel {
            "row_sums" => self.needs_row_sums(),
            "attention_fused" => self.fuses_attention(),
            "attention_scores" | "attention_codes" | "attention_values" => !self.fuses_attention(),
            _ => true,
        }
    }

    /// Whether the product needs the row sums of its activations.
    pub(super) fn needs_row_sums(self) -> bool {
        self == Variant::X86Vnni
    }

    /// The source of its integer product.
    pub(super) fn source(self) -> &'static str {
        match self {
            Variant::Dot4x8Packed | Variant::Columns => include_str!("cl/dot_columns.cl"),
            Variant::Vectors => include_str!("cl/dot_vectors.cl"),
            Variant::X86Vnni => include_str!("cl/dot_x86_vnni.cl"),
        }
    }
}

/// The names of variants, joined.
pub(super) fn names(variants: &[Variant]) -> String {
    variants.iter().map(|variant| variant.name()).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Variant {
    type Err = OpenClError;

    fn from_str(name: &str) -> Result<Variant, OpenClError> {
        Variant::ALL
            .into_iter()
            .find(|variant| variant.name() == name)
            .ok_or_else(|| OpenClError::VariantUnknown { name: name.to_string(), known: names(&Variant::ALL) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for variant in Variant::ALL {
            assert_eq!(variant.name().parse::<Variant>().unwrap(), variant);
            let json = serde_json::to_string(&variant).unwrap();
            assert_eq!(json, format!("\"{variant}\""));
        }
        let error = "fast".parse::<Variant>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown OpenCL variant `fast`; choose one of dot-4x8packed, columns, vectors, x86-vnni"
        );
    }

    #[test]
    fn a_variant_is_offered_only_where_it_can_run() {
        let gpu = Variant::available(DeviceKind::Gpu, true);
        assert_eq!(gpu[0], Variant::Dot4x8Packed);
        assert!(!gpu.contains(&Variant::X86Vnni));
        assert_eq!(Variant::available(DeviceKind::Gpu, false)[0], Variant::Columns);
        let cpu = Variant::available(DeviceKind::Cpu, false);
        assert_eq!(cpu.contains(&Variant::X86Vnni), Isa::Avx512Vnni.is_available());
        assert!(!cpu.contains(&Variant::Dot4x8Packed));
    }

    #[test]
    fn shapes_match_the_sources() {
        for variant in Variant::ALL {
            let source = variant.source();
            assert!(source.contains(&format!("#define ROWS {}\n", variant.tile_rows())), "{variant}");
            let slots = variant.tile_columns() / variant.width();
            assert!(source.contains(&format!("#define SLOTS {slots}\n")), "{variant}");
            assert!(source.contains(&format!("#define GROUP_ITEMS {}\n", variant.group_items())), "{variant}");
            assert_eq!(source.contains("#define NEEDS_ROW_SUMS 1"), variant.needs_row_sums(), "{variant}");
        }
    }
}
