//! A shaped unit: a real engine slowed on purpose to a stated rate, to stand in for hardware that is absent. It computes real blocks on
//! real bytes; its times are **emulated**.

use super::Engine;
use crate::denoise::Clip;
use crate::schedule::Piece;
use crate::{NumericPath, VideoError};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Shaped engines of this process that are in a block: what tells one that others run too.
static BUSY: AtomicUsize = AtomicUsize::new(0);
/// The end of a wait is spun, because sleeping wakes late.
const SPIN: Duration = Duration::from_micros(300);

/// What a block shall take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// While no other shaped engine is in a block.
    pub solo: Duration,
    /// While another is.
    pub corun: Duration,
}

/// See the module.
pub struct ShapedEngine {
    name: String,
    inner: Box<dyn Engine>,
    shape: Shape,
}

impl ShapedEngine {
    /// `inner` under another name, slowed to `shape`. A block that takes longer anyway is not made faster.
    pub fn new(name: String, inner: Box<dyn Engine>, shape: Shape) -> ShapedEngine {
        ShapedEngine { name, inner, shape }
    }
}

/// Counts an engine as busy while it lives, also through an error.
struct Busy;

impl Busy {
    /// Whether others were busy already.
    fn enter() -> (Busy, bool) {
        (Busy, BUSY.fetch_add(1, Ordering::AcqRel) > 0)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        BUSY.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Returns at `deadline`, as closely as the machine allows.
fn wait_until(deadline: Instant) {
    if let Some(rest) = deadline.checked_duration_since(Instant::now()).and_then(|left| left.checked_sub(SPIN)) {
        std::thread::sleep(rest);
    }
    while Instant::now() < deadline {
        std::hint::spin_loop();
    }
}

/// Stands in for work of an engine that is not blocks, such as decoding on hardware that is absent: takes `time`, and to a shaped engine it is
/// as if another one were in a block. What it makes of a measurement is **emulated**.
pub fn stand_in(time: Duration) {
    let deadline = Instant::now() + time;
    let (_busy, _) = Busy::enter();
    wait_until(deadline);
}

impl Engine for ShapedEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn path(&self) -> NumericPath {
        self.inner.path()
    }

    fn cores(&self) -> &[usize] {
        self.inner.cores()
    }

    fn run_blocks(&mut self, clip: &Clip, piece: &Piece, hidden: &mut [f32]) -> Result<(), VideoError> {
        for block in piece.blocks.clone() {
            let start = Instant::now();
            let (busy, others) = Busy::enter();
            let one = Piece { step: piece.step, branch: piece.branch, blocks: block..block + 1 };
            self.inner.run_blocks(clip, &one, hidden)?;
            wait_until(start + if others { self.shape.corun } else { self.shape.solo });
            drop(busy);
        }
        Ok(())
    }

    fn scratch_bytes(&self) -> usize {
        self.inner.scratch_bytes()
    }

    fn exchanges(&self) -> (usize, usize) {
        self.inner.exchanges()
    }

    fn notes(&self) -> Vec<String> {
        self.inner.notes()
    }
}
