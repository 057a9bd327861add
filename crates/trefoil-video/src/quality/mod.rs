//! Measures of clips: what they show, for models whose prompts have a right answer, how close they are to a reference, and how
//! steady they are.

mod fidelity;
mod shapes;

pub use fidelity::{Fidelity, Steadiness, compare, steadiness};
pub use shapes::{Colour, Motion, Reading, Shape, read_shapes};
