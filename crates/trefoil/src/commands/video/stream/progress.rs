//! A stream on standard error while it runs: how many clips, how long it will take, and what each engine is at.

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use trefoil_video::Event;
use trefoil_video::schedule::Trajectory;

/// See the module. Nothing is shown off a terminal or with `quiet`.
pub struct Progress {
    all: ProgressBar,
    engines: Vec<(String, ProgressBar)>,
    /// Kept, because it draws.
    _lines: MultiProgress,
    clock: Mutex<Clock>,
}

/// When clips ended.
struct Clock {
    begun: Instant,
    first_end: Option<Instant>,
    last_end: Option<Instant>,
    done: usize,
    clips: usize,
    /// What rates promise: the first clip's latency and the period.
    predicted: Option<(Duration, Duration)>,
}

impl Clock {
    /// Time left, where anything is known.
    fn left(&self, now: Instant) -> Option<Duration> {
        let left = self.clips.saturating_sub(self.done) as u32;
        let (period, next) = match (self.first_end, self.last_end, self.done) {
            (Some(first), Some(last), 2..) => {
                let period = (last - first) / (self.done as u32 - 1);
                (period, last + period)
            }
            (Some(first), _, 1) => {
                let period = self.predicted.map_or(first - self.begun, |(_, period)| period);
                (period, first + period)
            }
            _ => {
                let (fill, period) = self.predicted?;
                (period, self.begun + fill)
            }
        };
        // A clip that is late is due now.
        Some(next.saturating_duration_since(now) + period * left.saturating_sub(1))
    }
}

impl Progress {
    /// Lines for a stream of `clips` clips on `engines`; `predicted_ms` is the first clip's latency and the period, where known.
    pub fn new(name: &str, engines: &[String], clips: usize, predicted_ms: Option<(f64, f64)>, quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let lines = MultiProgress::with_draw_target(target);
        let line = |template: &str, len: usize| {
            let bar = lines.add(ProgressBar::new(len as u64));
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar
        };
        let all = line("{prefix} {bar:24} {pos}/{len} clips {wide_msg}", clips).with_prefix(name.to_owned());
        let engines = engines
            .iter()
            .map(|engine| (engine.clone(), line("  {prefix:14} {bar:20} {wide_msg}", 1).with_prefix(engine.clone())))
            .collect();
        let duration = |ms: f64| Duration::from_secs_f64((ms / 1e3).clamp(0.0, 1e9));
        let clock = Clock {
            begun: Instant::now(),
            first_end: None,
            last_end: None,
            done: 0,
            clips,
            predicted: predicted_ms.map(|(fill, period)| (duration(fill), duration(period))),
        };
        let progress = Self { all, engines, _lines: lines, clock: Mutex::new(clock) };
        progress.show_left();
        progress
    }

    /// Blocks of a clip that ran.
    pub fn event(&self, clip: usize, trajectory: Trajectory, event: &Event<'_>) {
        let Event::Blocks { engine, piece, done, .. } = event else { return };
        if let Some((_, bar)) = self.engines.iter().find(|(name, _)| name == engine) {
            bar.set_length(trajectory.blocks() as u64);
            bar.set_position(*done as u64);
            bar.set_message(format!(
                "clip {}, step {} of {}, block {} of {}",
                clip + 1,
                piece.step + 1,
                trajectory.steps,
                piece.blocks.end,
                trajectory.layers
            ));
        }
        self.show_left();
    }

    /// The last stage of a clip begins.
    pub fn last_stage(&self, clip: usize, what: &str) {
        if let Some((_, bar)) = self.engines.last() {
            bar.set_message(format!("clip {}, {what}", clip + 1));
        }
    }

    /// A clip is finished.
    pub fn finished(&self) {
        if let Ok(mut clock) = self.clock.lock() {
            let now = Instant::now();
            clock.first_end.get_or_insert(now);
            clock.last_end = Some(now);
            clock.done += 1;
        }
        self.all.inc(1);
        self.show_left();
    }

    fn show_left(&self) {
        let left = self.clock.lock().ok().and_then(|clock| clock.left(Instant::now()));
        self.all.set_message(left.map_or_else(String::new, |left| format!("about {} left", words(left))));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        for (_, bar) in &self.engines {
            bar.finish_and_clear();
        }
        self.all.finish_and_clear();
    }
}

/// `2 h 5 min`, `3 min 20 s`, `12 s`.
fn words(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_comes_from_rates_and_then_from_what_was_seen() {
        let begun = Instant::now();
        let seconds = Duration::from_secs;
        let mut clock = Clock {
            begun,
            first_end: None,
            last_end: None,
            done: 0,
            clips: 10,
            predicted: Some((seconds(30), seconds(20))),
        };
        assert_eq!(clock.left(begun), Some(seconds(210)));
        (clock.done, clock.first_end, clock.last_end) = (1, Some(begun + seconds(40)), Some(begun + seconds(40)));
        assert_eq!(clock.left(begun + seconds(45)), Some(seconds(15 + 8 * 20)));
        (clock.done, clock.last_end) = (3, Some(begun + seconds(90)));
        assert_eq!(clock.left(begun + seconds(100)), Some(seconds(15 + 6 * 25)));
        // Late: due now.
        assert_eq!(clock.left(begun + seconds(200)), Some(seconds(6 * 25)));
        clock.predicted = None;
        (clock.done, clock.first_end) = (0, None);
        assert_eq!(clock.left(begun), None);
        assert_eq!(
            [words(seconds(59)), words(seconds(200)), words(seconds(7500))],
            ["59 s", "3 min 20 s", "2 h 5 min"]
        );
    }
}
