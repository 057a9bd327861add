//! How many clips show what their prompts ask for.

use super::{Reading, ShapePrompt};
use serde::Serialize;

/// Shares of clips that were read as their prompts say, 0..1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Accuracy {
    /// Pairs of a clip and a prompt.
    pub pairs: usize,
    /// Right colour.
    pub colour: f64,
    /// Right shape.
    pub shape: f64,
    /// Right motion.
    pub motion: f64,
    /// All three right.
    pub all: f64,
}

/// Counts of the same.
#[derive(Debug, Default)]
struct Hits {
    pairs: usize,
    counts: [usize; 4],
}

impl Hits {
    fn add(&mut self, reading: &Reading, prompt: &ShapePrompt) {
        let hits = [
            reading.colour == Some(prompt.colour),
            reading.shape == Some(prompt.shape),
            reading.motion == Some(prompt.motion),
        ];
        let all = hits.iter().all(|&hit| hit);
        self.pairs += 1;
        for (count, hit) in self.counts.iter_mut().zip(hits.into_iter().chain([all])) {
            *count += usize::from(hit);
        }
    }

    fn shares(&self) -> Option<Accuracy> {
        let [colour, shape, motion, all] = self.counts.map(|count| count as f64 / self.pairs as f64);
        (self.pairs > 0).then_some(Accuracy { pairs: self.pairs, colour, shape, motion, all })
    }
}

/// Each clip against its prompt; none without clips.
pub fn accuracy(readings: &[Reading], prompts: &[ShapePrompt]) -> Option<Accuracy> {
    let mut hits = Hits::default();
    readings.iter().zip(prompts).for_each(|(reading, prompt)| hits.add(reading, prompt));
    hits.shares()
}

/// Each clip against every other clip's prompt: the mean over all ways to shuffle the prompts, which is what chance gives. None
/// for fewer than two clips.
pub fn shuffled_accuracy(readings: &[Reading], prompts: &[ShapePrompt]) -> Option<Accuracy> {
    let mut hits = Hits::default();
    for (clip, reading) in readings.iter().enumerate() {
        for (_, prompt) in prompts.iter().enumerate().filter(|&(other, _)| other != clip) {
            hits.add(reading, prompt);
        }
    }
    hits.shares()
}

/// Wilson's 95 % interval of a share that was counted over `count` independent clips (E. B. Wilson, 1927).
pub fn interval(share: f64, count: usize) -> (f64, f64) {
    const Z: f64 = 1.959_964;
    if count == 0 {
        return (0.0, 1.0);
    }
    let count = count as f64;
    let spread = Z * (share * (1.0 - share) / count + Z * Z / (4.0 * count * count)).sqrt();
    let (middle, scale) = (share + Z * Z / (2.0 * count), 1.0 + Z * Z / count);
    (((middle - spread) / scale).max(0.0), ((middle + spread) / scale).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::super::{Colour, Motion, Shape, Split, shape_prompts};
    use super::*;

    fn read(colour: Colour, shape: Shape, motion: Option<Motion>) -> Reading {
        Reading {
            colour: Some(colour),
            shape: Some(shape),
            motion,
            motion_score: 1.0,
            skewness: 0.0,
            fourfold: 0.0,
            ideal_psnr: 30.0,
        }
    }

    #[test]
    fn right_clips_score_one_and_shuffled_ones_what_chance_gives() {
        let prompts = shape_prompts(Split::Training, 111, 1);
        let right: Vec<Reading> =
            prompts.iter().map(|prompt| read(prompt.colour, prompt.shape, Some(prompt.motion))).collect();
        let scored = accuracy(&right, &prompts).unwrap();
        assert_eq!(scored, Accuracy { pairs: 111, colour: 1.0, shape: 1.0, motion: 1.0, all: 1.0 });
        let shuffled = shuffled_accuracy(&right, &prompts).unwrap();
        assert_eq!(shuffled.pairs, 111 * 110);
        // Every combination occurs once, so no other clip has all three.
        assert!(shuffled.all.abs() < 1e-12);
        for (share, chance) in [(shuffled.colour, 6.0), (shuffled.shape, 3.0), (shuffled.motion, 7.0)] {
            assert!((share - 1.0 / chance).abs() < 0.02, "{shuffled:?}");
        }
    }

    #[test]
    fn one_wrong_word_counts_where_it_is_wrong() {
        let prompts = shape_prompts(Split::HeldOut, 2, 1);
        let mut readings: Vec<Reading> =
            prompts.iter().map(|prompt| read(prompt.colour, prompt.shape, Some(prompt.motion))).collect();
        readings[1].motion = None;
        let scored = accuracy(&readings, &prompts).unwrap();
        assert_eq!(scored, Accuracy { pairs: 2, colour: 1.0, shape: 1.0, motion: 0.5, all: 0.5 });
        assert_eq!(accuracy(&[], &[]), None);
        assert_eq!(shuffled_accuracy(&readings[..1], &prompts[..1]), None);
    }

    #[test]
    fn intervals_are_wilsons() {
        // R. G. Newcombe, Two-sided confidence intervals for the single proportion, 1998, table I, method 3.
        for (hits, count, low, high) in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)] {
            let got = interval(f64::from(hits) / count as f64, count);
            assert!((got.0 - low).abs() < 6e-5 && (got.1 - high).abs() < 6e-5, "{hits} of {count}: {got:?}");
        }
        assert_eq!(interval(0.0, 0), (0.0, 1.0));
    }
}
