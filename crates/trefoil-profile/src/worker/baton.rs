//! Whose turn it is between two threads, handed over the way the executor hands tasks over: the waiter spins for a
//! moment, then parks; the other side wakes it only if it parked.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Spinning time before a waiter parks; as the executor's.
const SPIN: Duration = Duration::from_micros(50);

/// Turn value that ends all waiting.
const ENDED: u64 = u64::MAX;

/// A turn counter that two threads pass to and fro. Thread 0 moves on even turns, thread 1 on odd ones.
#[derive(Debug, Default)]
pub struct Baton {
    turn: AtomicU64,
    threads: [OnceLock<Thread>; 2],
    parked: [AtomicBool; 2],
}

impl Baton {
    /// Registers the calling thread as side 0 or 1.
    pub fn join(&self, side: usize) {
        let _ = self.threads[side].set(std::thread::current());
    }

    /// Waits until the turn is `turn`; `false` when the other side ended the game.
    pub fn wait_for(&self, side: usize, turn: u64) -> bool {
        let ready = || {
            let now = self.turn.load(Ordering::Acquire);
            now == turn || now == ENDED
        };
        let began = Instant::now();
        while !ready() {
            if began.elapsed() < SPIN {
                for _ in 0..32 {
                    std::hint::spin_loop();
                }
                continue;
            }
            self.parked[side].store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if !ready() {
                std::thread::park();
            }
            self.parked[side].store(false, Ordering::Relaxed);
        }
        self.turn.load(Ordering::Acquire) != ENDED
    }

    /// Hands `turn` to the other side.
    pub fn hand_over(&self, side: usize, turn: u64) {
        // Ending is final: a late hand-over must not revive the game.
        let _ = self.turn.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| (now != ENDED).then_some(turn));
        self.wake(1 - side);
    }

    /// Ends the game for both sides.
    pub fn end(&self, side: usize) {
        self.turn.store(ENDED, Ordering::Release);
        self.wake(1 - side);
    }

    fn wake(&self, side: usize) {
        fence(Ordering::SeqCst);
        if self.parked[side].load(Ordering::Relaxed)
            && let Some(thread) = self.threads[side].get()
        {
            thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_alternate_and_an_end_frees_the_waiter() {
        let baton = Baton::default();
        let log = std::sync::Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for side in 0..2usize {
                let (baton, log) = (&baton, &log);
                scope.spawn(move || {
                    baton.join(side);
                    for round in 0..50u64 {
                        let turn = round * 2 + side as u64;
                        assert!(baton.wait_for(side, turn));
                        log.lock().unwrap().push(turn);
                        if round % 10 == 3 {
                            std::thread::sleep(SPIN * 3);
                        }
                        baton.hand_over(side, turn + 1);
                    }
                    if side == 0 {
                        // The other side's last turn first: an end overtakes turns that nobody saw yet.
                        assert!(baton.wait_for(0, 100));
                        baton.end(0);
                    } else {
                        assert!(!baton.wait_for(1, 1_000_000));
                    }
                });
            }
        });
        assert_eq!(*log.lock().unwrap(), (0..100).collect::<Vec<_>>());
    }
}
