//! Numbers as text, the same everywhere: tables, HTML, Markdown.
//!
//! Three significant digits; times in ns, µs, ms or s; sizes and counts in powers of **1000** (1 kB = 1000 bytes).

/// Shown for a number that nobody could tell.
pub const ABSENT: &str = "–";

/// States the powers behind kB, MB and GB; printed once wherever sizes show.
pub const SIZE_NOTE: &str = "1 kB = 10³ bytes, 1 MB = 10⁶ bytes, 1 GB = 10⁹ bytes";

/// Three significant digits for values below 1000, whole numbers above.
fn three(value: f64) -> String {
    let magnitude = value.abs();
    let decimals = if magnitude >= 99.95 {
        0
    } else if magnitude >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.decimals$}")
}

/// Picks the largest scale at which the rounded value is at least 1; the last scale holds everything larger.
fn scaled(value: f64, scales: &[(f64, &str)]) -> String {
    if !value.is_finite() {
        return ABSENT.to_owned();
    }
    let mut chosen = scales[0];
    for &(factor, suffix) in scales {
        // 0.9995 rounds to 1.00: the larger scale takes it, so that `1000 µs` never shows.
        if (value / factor).abs() >= 0.9995 {
            chosen = (factor, suffix);
        }
    }
    format!("{} {}", three(value / chosen.0), chosen.1)
}

/// A time given in milliseconds: `850 ns`, `12.3 µs`, `4.56 ms`, `1.23 s`. Not finite: [`ABSENT`].
pub fn time(ms: f64) -> String {
    if ms == 0.0 {
        return "0 ms".to_owned();
    }
    scaled(ms, &[(1e-6, "ns"), (1e-3, "µs"), (1.0, "ms"), (1e3, "s")])
}

/// An energy in joules: `850 µJ`, `12.3 mJ`, `4.56 J`.
pub fn joules(value: f64) -> String {
    if value == 0.0 {
        return "0 J".to_owned();
    }
    scaled(value, &[(1e-9, "nJ"), (1e-6, "µJ"), (1e-3, "mJ"), (1.0, "J"), (1e3, "kJ")])
}

/// A time that may be absent.
pub fn optional_time(ms: Option<f64>) -> String {
    ms.map_or_else(|| ABSENT.to_owned(), time)
}

/// Two times in one unit, the larger one's: `9.98–10.4 ms`.
pub fn time_range(low: f64, high: f64) -> String {
    let text = time(high);
    let factor = match text.rsplit(' ').next() {
        Some("ns") => 1e-6,
        Some("µs") => 1e-3,
        Some("s") => 1e3,
        _ => 1.0,
    };
    format!("{}–{text}", three(low / factor))
}

/// A size in bytes, powers of 1000 (see [`SIZE_NOTE`]): `512 B`, `12.3 kB`, `129.8 MB` as `130 MB`.
pub fn bytes(size: u64) -> String {
    if size < 1000 {
        return format!("{size} B");
    }
    scaled(size as f64, &[(1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")])
}

/// A large count (operations): `950`, `12.3 k`, `4.1 G`.
pub fn count(number: u64) -> String {
    if number < 1000 {
        return number.to_string();
    }
    scaled(number as f64, &[(1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")])
}

/// A ratio: `1.07×`; from 100 on without decimals.
pub fn ratio(value: f64) -> String {
    if value.is_finite() { format!("{}×", three(value)) } else { ABSENT.to_owned() }
}

/// The bounds of a ratio's interval: `1.05–1.09`.
pub fn interval(low: f64, high: f64) -> String {
    format!("{}–{}", three(low), three(high))
}

/// A fraction as a percentage with one decimal: `12.3%`.
pub fn percent(fraction: f64) -> String {
    if fraction.is_finite() { format!("{:.1}%", fraction * 100.0) } else { ABSENT.to_owned() }
}

/// A signed fraction as a percentage: `+3.1%`, `-0.4%`.
pub fn signed_percent(fraction: f64) -> String {
    if fraction.is_finite() { format!("{:+.1}%", fraction * 100.0) } else { ABSENT.to_owned() }
}

/// Ascending indices as ranges: `0-3,7`. Beyond `limit` ranges the rest is counted: `0-3,7,… (41)`.
pub fn ranges(indices: &[u32], limit: usize) -> String {
    let mut parts = Vec::new();
    let mut rest = indices;
    while let Some(&first) = rest.first() {
        if parts.len() == limit {
            parts.push(format!("… ({})", indices.len()));
            break;
        }
        let run = rest.iter().zip(first..).take_while(|(index, expected)| **index == *expected).count();
        parts.push(if run == 1 { first.to_string() } else { format!("{first}-{}", rest[run - 1]) });
        rest = &rest[run..];
    }
    parts.join(",")
}

/// `1 segment`, `3 segments`.
pub fn plural(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_pick_their_unit_after_rounding() {
        for (ms, text) in [
            (0.0, "0 ms"),
            (0.000_85, "850 ns"),
            (0.000_999_6, "1.00 µs"),
            (0.0123, "12.3 µs"),
            (0.999_4, "999 µs"),
            (0.999_6, "1.00 ms"),
            (4.5649, "4.56 ms"),
            (99.96, "100 ms"),
            (999.6, "1.00 s"),
            (1_234_000.0, "1234 s"),
            (-0.5, "-500 µs"),
            (f64::NAN, "–"),
        ] {
            assert_eq!(time(ms), text, "{ms}");
        }
        assert_eq!(time_range(9.98, 10.44), "9.98–10.4 ms");
        assert_eq!(time_range(0.5, 1.5), "0.50–1.50 ms");
    }

    #[test]
    fn sizes_and_counts_use_powers_of_1000() {
        assert_eq!([bytes(999), bytes(1000), bytes(129_800_000)], ["999 B", "1.00 kB", "130 MB"]);
        assert_eq!([count(999), count(4_100_000_000)], ["999", "4.10 G"]);
    }

    #[test]
    fn ranges_are_cut_at_the_limit() {
        assert_eq!(ranges(&[0, 1, 2, 5], 4), "0-2,5");
        assert_eq!(ranges(&[0, 2, 4, 6], 2), "0,2,… (4)");
        assert_eq!(ranges(&[], 2), "");
    }
}
