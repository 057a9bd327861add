//! UniPC of order 2 (Zhao et al. 2023, "B(h) = e^h − 1", data prediction) for flow schedules: α = 1 − σ, λ = ln(α/σ).
//!
//! Each step first corrects the present latent with the new data prediction, then predicts the next. The first and the last
//! step are of order 1, as in the stock pipeline.

/// What the solver carries from step to step, in the order of the latent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    /// Data predictions of the last two steps, newest first.
    predictions: [Vec<f32>; 2],
    /// The latent that the last step started from.
    last: Vec<f32>,
    /// Order of the last step's prediction.
    order: usize,
    /// Steps done since the start.
    done: usize,
}

impl History {
    /// Predictions (newest first), last latent, order, steps done: to carry it elsewhere.
    pub(crate) fn parts(&self) -> (&[Vec<f32>; 2], &[f32], usize, usize) {
        (&self.predictions, &self.last, self.order, self.done)
    }

    /// The inverse of [`History::parts`].
    pub(crate) fn from_parts(predictions: [Vec<f32>; 2], last: Vec<f32>, order: usize, done: usize) -> History {
        History { predictions, last, order, done }
    }

    /// Bytes that must cross a handoff besides hidden state and latent; 0 for a one-step solver.
    pub fn bytes(&self) -> usize {
        (self.predictions.iter().map(Vec::len).sum::<usize>() + self.last.len()) * size_of::<f32>()
    }
}

/// `ln((1 − σ)/σ)`; +∞ at 0.
fn lambda(sigma: f32) -> f64 {
    let sigma = f64::from(sigma);
    (1.0 - sigma).ln() - sigma.ln()
}

/// What both halves of a step need of an interval σ → σ'.
struct Interval {
    /// λ' − λ.
    h: f64,
    /// σ'/σ.
    ratio: f64,
    /// α'·(e^{−h} − 1), which is B(h)·α' too.
    factor: f64,
}

impl Interval {
    fn new(from: f32, to: f32) -> Interval {
        let h = lambda(to) - lambda(from);
        Interval { h, ratio: f64::from(to) / f64::from(from), factor: (1.0 - f64::from(to)) * (-h).exp_m1() }
    }
}

/// See [`super::Sampler::advance`].
pub(super) fn advance(sigmas: &[f32], step: usize, velocity: &[f32], latent: &mut [f32], history: &mut History) {
    let sigma = f64::from(sigmas[step]);
    let newest: Vec<f32> =
        latent.iter().zip(velocity).map(|(&z, &v)| (f64::from(z) - sigma * f64::from(v)) as f32).collect();
    if history.done > 0 {
        correct(sigmas, step, &newest, latent, history);
    }
    history.predictions.swap(0, 1);
    history.predictions[0] = newest;
    let left = sigmas.len() - 1 - step;
    history.order = 2.min(left).min(history.done + 1);
    history.last.clear();
    history.last.extend_from_slice(latent);
    history.done += 1;
    predict(sigmas, step, latent, history);
}

/// Replaces the predicted latent at `step` by the corrected one, with the order that predicted it.
fn correct(sigmas: &[f32], step: usize, newest: &[f32], latent: &mut [f32], history: &History) {
    let interval = Interval::new(sigmas[step - 1], sigmas[step]);
    let hh = -interval.h;
    let [before, earlier] = &history.predictions;
    // Weights of (earlier − before)/r and of (newest − before); order 1 has only the latter.
    let (earlier_weight, newest_weight) = if history.order == 2 {
        let r = (lambda(sigmas[step - 2]) - lambda(sigmas[step - 1])) / interval.h;
        let phi_1 = hh.exp_m1();
        let phi_2 = phi_1 / hh - 1.0;
        let phi_3 = phi_2 / hh - 0.5;
        let (b1, b2) = (phi_2 / phi_1, 2.0 * phi_3 / phi_1);
        // [1 1; r 1]·(a, b) = (b1, b2).
        let a = (b2 - b1) / (r - 1.0);
        (a / r, b1 - a)
    } else {
        (0.0, 0.5)
    };
    for (at, z) in latent.iter_mut().enumerate() {
        let m = f64::from(before[at]);
        let mut sum = newest_weight * (f64::from(newest[at]) - m);
        if history.order == 2 {
            sum += earlier_weight * (f64::from(earlier[at]) - m);
        }
        let base = interval.ratio * f64::from(history.last[at]) - interval.factor * m;
        *z = (base - interval.factor * sum) as f32;
    }
}

/// Predicts the latent at `step + 1`.
fn predict(sigmas: &[f32], step: usize, latent: &mut [f32], history: &History) {
    let interval = Interval::new(sigmas[step], sigmas[step + 1]);
    let [newest, before] = &history.predictions;
    let weight =
        if history.order == 2 { 0.5 * interval.h / (lambda(sigmas[step - 1]) - lambda(sigmas[step])) } else { 0.0 };
    for (at, z) in latent.iter_mut().enumerate() {
        let m = f64::from(newest[at]);
        let mut value = interval.ratio * f64::from(*z) - interval.factor * m;
        if history.order == 2 {
            value -= interval.factor * weight * (f64::from(before[at]) - m);
        }
        *z = value as f32;
    }
}
