//! One thread per unit, entered into it once: pinned, denormals flushed, and then only fed with work.

use super::execution::Loaded;
use crate::protocol::Failure;
use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::JoinHandle;
use trefoil_core::Unit;

/// What a unit's thread keeps between jobs.
#[derive(Default)]
pub struct Session {
    /// Compiled sub-models that later jobs will use again.
    pub kept: BTreeMap<String, Loaded>,
}

type Work = Box<dyn FnOnce(&mut Session) + Send>;

/// A thread that has entered its units.
pub struct UnitThread {
    units: Vec<Unit>,
    work: Option<Sender<Work>>,
    handle: Option<JoinHandle<()>>,
}

impl UnitThread {
    /// A thread for `units`: one, or several that share resources, which it enters in order.
    pub fn new(units: Vec<Unit>) -> Self {
        let mut thread = Self { units, work: None, handle: None };
        thread.start();
        thread
    }

    fn start(&mut self) {
        let (sender, receiver) = channel::<Work>();
        let units = self.units.clone();
        self.handle = Some(std::thread::spawn(move || {
            let mut work_off = move || {
                let mut session = Session::default();
                while let Ok(work) = receiver.recv() {
                    work(&mut session);
                }
            };
            // Inside its one unit the backend's calls cost what they cost in the executor, which does the same: a backend with a
            // thread pool of its own would otherwise be timed with two thread switches a call.
            if let [unit] = units.as_slice()
                && let Some(backend) = trefoil_units::backend(&unit.address.backend)
                && backend.run_inside(unit, &mut work_off).is_ok()
            {
                return;
            }
            let guards: Vec<_> = units.iter().map(trefoil_units::enter_unit).collect();
            work_off();
            drop(guards);
        }));
        self.work = Some(sender);
    }

    /// Has `work` done on the thread and waits for it. A panic there (in a backend) is a failure, and everything the
    /// thread kept is dropped, since its state is unknown.
    pub fn run<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Session) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (sender, receiver) = sync_channel(1);
        let boxed: Work = Box::new(move |session| {
            let outcome = catch_unwind(AssertUnwindSafe(|| work(session)));
            let _ = sender.send(outcome.unwrap_or_else(|panic| {
                let dropped = catch_unwind(AssertUnwindSafe(|| session.kept.clear()));
                let rest = if dropped.is_ok() { "" } else { ", and again while cleaning up" };
                Err(Failure::new("crash", &format!("panicked: {}{rest}", panic_message(panic.as_ref()))))
            }));
        });
        let gone = || Failure::new("crash", "the unit's thread ended");
        self.work.as_ref().ok_or_else(gone)?.send(boxed).map_err(|_| gone())?;
        receiver.recv().map_err(|_| gone())?
    }
}

impl Drop for UnitThread {
    fn drop(&mut self) {
        drop(self.work.take());
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

/// The text of a panic, where it has one.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}
