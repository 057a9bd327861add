//! Threads that end before their time: what others see of it.

use crate::VideoError;
use std::any::Any;

/// Does something when it is dropped, also while its thread panics.
pub(crate) struct OnDrop<F: Fn()>(Option<F>);

impl<F: Fn()> OnDrop<F> {
    pub(crate) fn new(action: F) -> OnDrop<F> {
        OnDrop(Some(action))
    }

    /// Does nothing after all.
    pub(crate) fn disarm(mut self) {
        self.0 = None;
    }
}

impl<F: Fn()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        if let Some(action) = &self.0 {
            action();
        }
    }
}

/// The error of whoever waited for a thread that panicked, with what it said.
pub(crate) fn panicked(engine: &str, cause: &(dyn Any + Send)) -> VideoError {
    let told = cause.downcast_ref::<&str>().copied().or_else(|| cause.downcast_ref::<String>().map(String::as_str));
    let reason = format!("a thread panicked ({}); that is a defect of trefoil", told.unwrap_or("it said nothing"));
    VideoError::Engine { engine: engine.to_string(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn what_a_thread_said_is_told_and_its_guard_acts() {
        let acted = AtomicUsize::new(0);
        let run = |text: Option<&'static str>| {
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    let guard = OnDrop::new(|| {
                        acted.fetch_add(1, Ordering::Relaxed);
                    });
                    match text {
                        Some("") => std::panic::panic_any(7),
                        Some(text) => panic!("{text} {}", 1),
                        None => guard.disarm(),
                    }
                });
                thread.join().map_err(|cause| panicked("x", &*cause).to_string())
            })
        };
        assert!(run(Some("no such block")).unwrap_err().contains("panicked (no such block 1)"));
        assert!(run(Some("")).unwrap_err().contains("it said nothing"));
        assert_eq!((run(None), acted.load(Ordering::Relaxed)), (Ok(()), 2));
    }
}
