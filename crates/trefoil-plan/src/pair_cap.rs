//! What the best conceivable overlap of two requests could give: a cap on every pair search.

/// Lower bounds on any joint execution of two requests, and the speedups over serial execution that they allow. Everything
/// in the unit of the costs given.
///
/// Both requests' operators are chains here, as in BIDENT's pair searches (3.3.3): operators of one request never overlap.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct PairCap {
    /// Both requests one after the other, each on its best single unit: the baseline of BIDENT 4.3.
    pub serial: f64,
    /// Each request with every operator on its fastest unit and free transfers.
    pub chains: [f64; 2],
    /// All work spread over the units as well as any (fractional) division could.
    pub load: f64,
    /// The largest of `chains` and `load`: no execution on exclusive units is below it.
    pub bound: f64,
    /// `serial / bound`: no execution on exclusive units speeds the pair up more. At most twice the larger of the two ratios
    /// (best single unit / chain).
    pub speedup: f64,
    /// Lower bound on BIDENT's literal rule, in which two operators on one unit cost the *average* of their concurrent times,
    /// so that a long one may hide half of itself behind a short one.
    pub literal_bound: f64,
    /// `serial / literal_bound`.
    pub literal_speedup: f64,
}

/// Cost tables of one request for [`pair_cap`], row-major operators × units.
#[derive(Debug, Clone, Copy)]
pub struct CapCosts<'a> {
    /// Alone; infinite where the operator does not run.
    pub solo: &'a [f64],
    /// While the other request runs on the same unit; empty means never below `solo`.
    pub concurrent: &'a [f64],
    /// The whole request on its best single unit.
    pub alone: f64,
}

/// The cap on running two requests at once. Transfers are left out, so it holds for any transfer costs; slowdowns are taken
/// to be at least 1 (multiply by the smallest factor otherwise).
///
/// # Panics
/// If `k` is 0 or the arrays are not operators × `k` each.
pub fn pair_cap(first: CapCosts<'_>, second: CapCosts<'_>, k: usize) -> PairCap {
    for costs in [&first, &second] {
        assert!(k > 0 && costs.solo.len().is_multiple_of(k), "costs are not operators × {k} units");
        assert!(
            costs.concurrent.is_empty() || costs.concurrent.len() == costs.solo.len(),
            "concurrent costs differ in number"
        );
    }
    let row_least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let chain = |costs: &CapCosts<'_>| costs.solo.chunks_exact(k).map(row_least).sum::<f64>();
    // Each operator's part of a step under the literal rule is at least half the least of its costs.
    let literal = |costs: &CapCosts<'_>| {
        let rows = costs.solo.chunks_exact(k).map(row_least);
        let part = |(row, solo): (usize, f64)| {
            let together = costs.concurrent.get(row * k..(row + 1) * k).map_or(f64::INFINITY, row_least);
            0.5 * solo.min(together)
        };
        rows.enumerate().map(part).sum::<f64>()
    };
    let chains = [chain(&first), chain(&second)];
    let load = load_bound(&[first.solo, second.solo], k);
    let bound = chains[0].max(chains[1]).max(load);
    let literal_bound = literal(&first) + literal(&second);
    let serial = first.alone + second.alone;
    let ratio = |bound: f64| if bound > 0.0 { serial / bound } else { 1.0 };
    PairCap { serial, chains, load, bound, speedup: ratio(bound), literal_bound, literal_speedup: ratio(literal_bound) }
}

/// Lower bound on the busiest unit's work under any, even fractional, division of operators over units: the dual of the load
/// linear programme, `max_λ Σ_i min_u λ_u w(i,u)` over the simplex. Any λ gives a valid bound; a multiplicative ascent
/// finds a good one.
fn load_bound(tables: &[&[f64]], k: usize) -> f64 {
    const ROUNDS: u32 = 60;
    let rows: Vec<&[f64]> = tables.iter().flat_map(|table| table.chunks_exact(k)).collect();
    let mut weights = vec![1.0 / k as f64; k];
    let mut best = 0.0f64;
    for round in 0..ROUNDS {
        let mut load = vec![0.0; k];
        let mut value = 0.0;
        for row in &rows {
            let (mut least, mut at) = (f64::INFINITY, 0);
            for (unit, &cost) in row.iter().enumerate() {
                let weighted = weights[unit] * cost;
                if cost < f64::INFINITY && weighted < least {
                    (least, at) = (weighted, unit);
                }
            }
            if least < f64::INFINITY {
                value += least;
                load[at] += row[at];
            }
        }
        best = best.max(value);
        let total: f64 = load.iter().sum();
        if total <= 0.0 {
            break;
        }
        let rate = 2.0 / f64::from(round + 1).sqrt();
        for (weight, load) in weights.iter_mut().zip(&load) {
            *weight *= (rate * load / total).exp();
        }
        let sum: f64 = weights.iter().sum();
        for weight in &mut weights {
            *weight /= sum;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_complementary_requests_are_capped_at_two() {
        // Each runs only on its own unit: perfect overlap doubles.
        let inf = f64::INFINITY;
        let first = CapCosts { solo: &[1.0, inf, 1.0, inf], concurrent: &[], alone: 2.0 };
        let second = CapCosts { solo: &[inf, 2.0], concurrent: &[], alone: 2.0 };
        let cap = pair_cap(first, second, 2);
        assert!((cap.speedup - 2.0).abs() < 1e-12 && (cap.literal_speedup - 2.0).abs() < 1e-12, "{cap:?}");
        // Both on one unit: nothing to gain on exclusive units.
        let cap = pair_cap(first, CapCosts { solo: &[3.0, inf], concurrent: &[], alone: 3.0 }, 2);
        assert!((cap.speedup - 1.0).abs() < 1e-2, "{cap:?}");
    }
}
