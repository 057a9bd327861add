//! Measures of clips: what they show, for models whose prompts have a right answer, how close they are to a reference, and how
//! steady they are.

mod accuracy;
mod fidelity;
mod prompts;
mod shapes;

pub use accuracy::{Accuracy, accuracy, interval, shuffled_accuracy};
pub use fidelity::{Fidelity, Steadiness, compare, steadiness};
pub use prompts::{ShapePrompt, Split, shape_prompts};
pub use shapes::{Colour, Motion, Reading, Shape, read_shapes};
