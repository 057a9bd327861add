//! Prompts with a right answer: the demo model's grammar (`tools/demo-model/dataset.py`).
//!
//! Every prompt asks for one colour, one shape and one motion. Some combinations of the three were never seen in training; a
//! model that makes them has learnt the words and not the list.

use super::{Colour, Motion, Shape};
use serde::Serialize;

/// Which combinations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Seen in training.
    Training,
    /// Never seen by the transformer and the text encoder.
    HeldOut,
}

impl Split {
    /// Both.
    pub const ALL: [Split; 2] = [Split::HeldOut, Split::Training];

    /// As text.
    pub fn name(self) -> &'static str {
        match self {
            Split::Training => "training",
            Split::HeldOut => "held-out",
        }
    }

    /// The split of a combination.
    pub fn of(colour: Colour, shape: Shape, motion: Motion) -> Split {
        // The enumerations are in the order of the training code's word lists.
        if (2 * colour as usize + 3 * shape as usize + motion as usize) % 8 == 5 {
            Split::HeldOut
        } else {
            Split::Training
        }
    }

    /// Its combinations.
    pub fn combinations(self) -> Vec<(Colour, Shape, Motion)> {
        let mut all = Vec::new();
        for colour in Colour::ALL {
            for shape in Shape::ALL {
                for motion in Motion::ALL {
                    if Split::of(colour, shape, motion) == self {
                        all.push((colour, shape, motion));
                    }
                }
            }
        }
        all
    }
}

/// A prompt and what its clip must show.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShapePrompt {
    /// The sentence.
    pub text: String,
    /// Colour asked for.
    pub colour: Colour,
    /// Shape asked for.
    pub shape: Shape,
    /// Motion asked for.
    pub motion: Motion,
}

const BACKGROUNDS: [&str; 9] = [
    "dark background",
    "black background",
    "dark backdrop",
    "grey background",
    "gray background",
    "grey backdrop",
    "light background",
    "white background",
    "bright backdrop",
];

fn colour_word(colour: Colour) -> &'static str {
    match colour {
        Colour::Red => "red",
        Colour::Yellow => "yellow",
        Colour::Green => "green",
        Colour::Cyan => "cyan",
        Colour::Blue => "blue",
        Colour::Purple => "purple",
    }
}

/// The plain word twice, because it is twice as likely as a synonym.
fn shape_words(shape: Shape) -> &'static [&'static str] {
    match shape {
        Shape::Circle => &["circle", "circle", "ball", "disc"],
        Shape::Square => &["square", "square", "box", "block"],
        Shape::Triangle => &["triangle"],
    }
}

fn motion_words(motion: Motion) -> &'static [&'static str] {
    match motion {
        Motion::Left => &[
            "moves to the left",
            "moving left",
            "going left",
            "slides to the left",
            "travels left across the screen",
            "drifts leftwards",
            "is moving to the left",
        ],
        Motion::Right => &[
            "moves to the right",
            "moving right",
            "going right",
            "slides to the right",
            "travels right across the screen",
            "drifts rightwards",
            "is moving to the right",
        ],
        Motion::Up => {
            &["moves up", "moving up", "going up", "rises", "floats upwards", "climbs to the top", "is moving upwards"]
        }
        Motion::Down => &[
            "moves down",
            "moving down",
            "going down",
            "falls",
            "sinks downwards",
            "drops to the bottom",
            "is moving downwards",
        ],
        Motion::Grow => {
            &["grows", "growing", "gets bigger", "becoming larger", "expands", "is getting bigger", "is growing larger"]
        }
        Motion::Shrink => &[
            "shrinks",
            "shrinking",
            "gets smaller",
            "becoming smaller",
            "contracts",
            "is getting smaller",
            "is shrinking away",
        ],
        Motion::Bounce => &[
            "bounces",
            "bouncing",
            "bounces up and down",
            "bouncing on the floor",
            "jumps on the floor",
            "is bouncing up and down",
            "hits the floor and bounces back",
        ],
    }
}

/// `SplitMix64`.
struct Random(u64);

impl Random {
    /// Below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((value ^ (value >> 31)) % bound as u64) as usize
    }

    fn one_of<'w>(&mut self, words: &[&'w str]) -> &'w str {
        words[self.below(words.len())]
    }
}

/// `count` prompts of a split: its combinations in a random order, again and again, so that each comes as often as any other
/// (or once more). Wording and backgrounds are random. The same arguments give the same prompts.
pub fn shape_prompts(split: Split, count: usize, seed: u64) -> Vec<ShapePrompt> {
    let mut random = Random(seed ^ (split as u64) << 32);
    let mut combinations = split.combinations();
    for last in (1..combinations.len()).rev() {
        combinations.swap(last, random.below(last + 1));
    }
    let prompt = |(colour, shape, motion): (Colour, Shape, Motion)| {
        let (hue, word) = (colour_word(colour), random.one_of(shape_words(shape)));
        let moves = random.one_of(motion_words(motion));
        let sentence = match random.below(6) {
            0 => format!("a {hue} {word} {moves}"),
            1 => format!("{hue} {word} {moves}"),
            2 => format!("the {hue} {word} {moves}"),
            3 => format!("a {word} that is {hue} {moves}"),
            4 => format!("a video of a {hue} {word} {moves}"),
            _ => format!("one {hue} {word} {moves}"),
        };
        let ground = random.one_of(&BACKGROUNDS);
        let text = match random.below(8) {
            0 => format!("{sentence} on a {ground}"),
            1 => format!("{sentence} over a {ground}"),
            2 => format!("{sentence}, {ground}"),
            3 => format!("{ground}, {sentence}"),
            _ => sentence,
        };
        ShapePrompt { text, colour, shape, motion }
    };
    combinations.iter().copied().cycle().take(count).map(prompt).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_splits_are_those_of_the_training_code() {
        // `python -c "import dataset; print(len(dataset.TRAIN), dataset.HELD_OUT[:3])"` in tools/demo-model.
        let held_out = Split::HeldOut.combinations();
        assert_eq!((held_out.len(), Split::Training.combinations().len()), (15, 111));
        assert_eq!(
            held_out[..3],
            [
                (Colour::Red, Shape::Circle, Motion::Shrink),
                (Colour::Red, Shape::Square, Motion::Up),
                (Colour::Yellow, Shape::Circle, Motion::Down)
            ]
        );
    }

    #[test]
    fn prompts_are_balanced_varied_and_reproducible() {
        for split in Split::ALL {
            let combinations = split.combinations();
            let prompts = shape_prompts(split, 2 * combinations.len(), 3);
            for &(colour, shape, motion) in &combinations {
                let asks =
                    |prompt: &&ShapePrompt| (prompt.colour, prompt.shape, prompt.motion) == (colour, shape, motion);
                assert_eq!(prompts.iter().filter(asks).count(), 2);
            }
            for prompt in &prompts {
                assert!(prompt.text.contains(colour_word(prompt.colour)), "{prompt:?}");
                assert!(shape_words(prompt.shape).iter().any(|word| prompt.text.contains(word)), "{prompt:?}");
                assert!(motion_words(prompt.motion).iter().any(|words| prompt.text.contains(words)), "{prompt:?}");
            }
            assert_eq!(prompts, shape_prompts(split, prompts.len(), 3));
            assert_ne!(prompts, shape_prompts(split, prompts.len(), 4));
            let mut texts: Vec<&str> = prompts.iter().map(|prompt| prompt.text.as_str()).collect();
            texts.sort_unstable();
            texts.dedup();
            assert!(texts.len() > prompts.len() * 3 / 4, "{} texts", texts.len());
        }
    }
}
