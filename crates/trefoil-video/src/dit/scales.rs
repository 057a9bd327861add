//! Activation scales of a block: which operands have one, and how they are found.

use trefoil_kernels::math::{MAX_CODE, largest_magnitude};

/// Operands with a static scale: the inputs of the GEMMs, then queries, keys and values of both attentions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the operand it names")]
pub enum Site {
    SelfIn,
    SelfOut,
    CrossIn,
    Text,
    CrossOut,
    FfnIn,
    FfnMiddle,
    SelfQuery,
    SelfKey,
    SelfValue,
    CrossQuery,
    CrossKey,
    CrossValue,
}

/// Number of [`Site`]s.
pub const SCALE_COUNT: usize = 13;

/// Largest magnitudes are never taken as smaller than this, so that a scale is a usable divisor.
const SMALLEST: f32 = 1e-6;

/// Static scales of a block (HeteroVDiff 4.4): `max|x|/127` over the real schedule, or 0 where nothing was observed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BlockScales(pub [f32; SCALE_COUNT]);

impl BlockScales {
    /// The scale of an operand.
    pub fn get(&self, site: Site) -> f32 {
        self.0[site as usize]
    }

    /// Whether every operand was observed and has a usable scale.
    pub fn is_complete(&self) -> bool {
        self.0.iter().all(|scale| scale.is_normal() && *scale > 0.0 && (1.0 / scale).is_normal())
    }

    /// Widens the range of an operand to hold `values`.
    pub(super) fn observe(&mut self, site: Site, values: &[f32]) {
        let scale = largest_magnitude(values).max(SMALLEST) / MAX_CODE;
        let known = &mut self.0[site as usize];
        *known = known.max(scale);
    }
}

/// Where an attention's operands have their scales.
pub(super) struct Sites {
    /// Inputs of the projections of queries, and of keys and values.
    pub inputs: [Site; 2],
    /// Queries, keys, values.
    pub operands: [Site; 3],
    /// What goes into the output projection.
    pub out: Site,
}

pub(super) const SELF_SITES: Sites = Sites {
    inputs: [Site::SelfIn, Site::SelfIn],
    operands: [Site::SelfQuery, Site::SelfKey, Site::SelfValue],
    out: Site::SelfOut,
};
pub(super) const CROSS_SITES: Sites = Sites {
    inputs: [Site::CrossIn, Site::Text],
    operands: [Site::CrossQuery, Site::CrossKey, Site::CrossValue],
    out: Site::CrossOut,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_only_grow() {
        let mut scales = BlockScales::default();
        assert!(!scales.is_complete());
        scales.observe(Site::Text, &[0.5, -2.54, 1.0]);
        scales.observe(Site::Text, &[0.1]);
        assert!((scales.get(Site::Text) - 0.02).abs() < 1e-8);
        scales.0.fill(1e-6);
        assert!(scales.is_complete());
        assert_eq!(Site::CrossValue as usize + 1, SCALE_COUNT);
    }
}
