//! Which engine ends a clip: both orders of two engines, each with the last stage on the engine that ends it, by the pipeline planner's
//! formula (HeteroVDiff 4.3).

use crate::error::CliError;
use serde::Serialize;
use std::fmt::Write as _;
use trefoil_plan::stream::{Cut, VideoRates, one_cut};
use trefoil_report::format;

/// One order of the engines, and the cut that is best for it.
#[derive(Debug, Clone, Serialize)]
pub struct Order {
    /// Who runs the first blocks, and who the rest and the last stage.
    pub engines: [String; 2],
    /// The last stage on the second of them, milliseconds a clip.
    pub decoder_ms: f64,
    /// The best cut.
    pub cut: Cut,
}

/// The order given and the other one. Milliseconds of a block and of the last stage are by engine, in the order given; whichever engine
/// comes first also takes `first_ms` a block (a clip's conditions).
pub fn both(
    engines: [String; 2],
    block_ms: [f64; 2],
    first_ms: f64,
    decoder_ms: [f64; 2],
    blocks: usize,
) -> Result<[Order; 2], CliError> {
    let [first, second] = engines;
    let order = |engines: [String; 2], [one, two]: [f64; 2], decoder: f64| {
        let cut = one_cut(VideoRates { first: one + first_ms, second: two, decoder }, blocks as u32)?;
        Ok::<_, CliError>(Order { engines, decoder_ms: decoder, cut })
    };
    Ok([
        order([first.clone(), second.clone()], block_ms, decoder_ms[1])?,
        order([second, first], [block_ms[1], block_ms[0]], decoder_ms[0])?,
    ])
}

/// The order with the shorter period; the one given where they are equal.
pub fn best(orders: &[Order; 2]) -> usize {
    usize::from(orders[1].cut.period < orders[0].cut.period)
}

/// A line for each, and why one is better.
pub fn tell(orders: &[Order; 2], blocks: usize, text: &mut String) {
    for Order { engines: [first, second], decoder_ms, cut } in orders {
        let _ = writeln!(
            text,
            "{first}, then {second} and the decoder ({}): cut {} of {blocks}, period {} (predicted)",
            format::time(*decoder_ms),
            cut.cut,
            format::time(cut.period)
        );
    }
    let chosen = best(orders);
    let (this, other) = (&orders[chosen], &orders[1 - chosen]);
    let gain = other.cut.period / this.cut.period - 1.0;
    if gain < 0.005 {
        let _ = writeln!(text, "either engine may end a clip: the periods differ by less than 0.5 %");
        return;
    }
    let decodes = if this.decoder_ms < other.decoder_ms { "which decodes faster" } else { "though it decodes slower" };
    let _ = writeln!(
        text,
        "{} should end a clip, {decodes}: the other order's period is {} longer",
        this.engines[1],
        format::percent(gain)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(block_ms: [f64; 2], decoder_ms: [f64; 2]) -> [Order; 2] {
        both(["a".to_owned(), "b".to_owned()], block_ms, 0.0, decoder_ms, 60).unwrap()
    }

    #[test]
    fn the_order_with_the_shorter_period_is_best() {
        // Equal engines: whoever decodes faster ends the clip.
        let equal = orders([10.0, 10.0], [100.0, 300.0]);
        assert_eq!(best(&equal), 1);
        assert_eq!(equal[1].engines, ["b", "a"]);
        // 60 blocks and 100 ms of decoding, shared equally.
        assert!((equal[1].cut.period - 350.0).abs() <= 5.0 && (equal[0].cut.period - 450.0).abs() <= 5.0);
        let mut text = String::new();
        tell(&equal, 60, &mut text);
        assert!(text.contains("a should end a clip, which decodes faster"), "{text}");
        // Every cut of one order is as good as its mirror image where decoding costs the same share of both.
        assert_eq!(best(&orders([10.0, 10.0], [100.0, 100.0])), 0);
        // The paper's rates: the slow engine's decoder would have to be free.
        assert_eq!(best(&orders([13.255, 3.163], [0.0, 267.0])), 1);
        assert_eq!(best(&orders([13.255, 3.163], [1100.0, 267.0])), 0);
    }
}
