//! The sampler as data: noise levels, timesteps, solver, guidance and the expert of every step.

mod unipc;

use crate::VideoError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::Read as _;
use std::path::Path;
use trefoil_weights::files::open_regular;
pub use unipc::History;

/// Training timesteps of the flow schedule: t = 1000·σ.
const TRAIN_TIMESTEPS: f64 = 1000.0;
/// Most denoising steps.
const MAX_STEPS: usize = 1000;
/// Largest sampler file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// How a step goes from one noise level to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Solver {
    /// `z ← z + v·(σ' − σ)`: what DCM's phased consistency sampler does.
    Euler,
    /// Second-order UniPC (bh2) on the data prediction, as the stock Wan2.1 pipeline uses it.
    UniPc,
}

impl Solver {
    /// The name used in files.
    pub fn as_str(self) -> &'static str {
        match self {
            Solver::Euler => "euler",
            Solver::UniPc => "unipc",
        }
    }
}

/// N denoising steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampler {
    /// Solver.
    pub solver: Solver,
    /// Noise levels σ, N + 1 of them, falling; the last is that of the result, 0 as a rule.
    pub sigmas: Vec<f32>,
    /// What the model is told at each step, N of them.
    pub timesteps: Vec<f32>,
    /// Expert of each step: an index into the model's experts.
    pub experts: Vec<usize>,
    /// Classifier-free guidance `v = v_u + g·(v_c − v_u)`; at 1 there is no second branch.
    pub guidance: f32,
}

impl Sampler {
    /// DCM's six steps: σ = 1, .992, .982, .949, .905, .810, then 0; the detail expert acts where ⌊t⌋ ≤ 978.
    pub fn dcm() -> Sampler {
        let thousandths = [1000f32, 992.0, 982.0, 949.0, 905.0, 810.0, 0.0];
        let sigmas: Vec<f32> = thousandths.iter().map(|sigma| sigma / 1000.0).collect();
        let timesteps = thousandths[..6].to_vec();
        let experts = experts_by_threshold(&timesteps, 978.0);
        Sampler { solver: Solver::Euler, sigmas, timesteps, experts, guidance: 1.0 }
    }

    /// The stock Wan2.1 schedule: σ = `shift`·u/(1 + (`shift` − 1)·u) for u falling from 0.999 in `steps` equal steps, then 0.
    /// Timesteps are whole numbers, truncated, as the stock scheduler passes them.
    ///
    /// # Errors
    /// No steps or too many, a shift that is not positive.
    pub fn shifted(solver: Solver, steps: usize, shift: f64, guidance: f32) -> Result<Sampler, VideoError> {
        if steps == 0 || steps > MAX_STEPS {
            return Err(VideoError::sampler(format!("{steps} steps; it must lie in 1..={MAX_STEPS}")));
        }
        if !(shift.is_finite() && shift > 0.0) {
            return Err(VideoError::sampler(format!("shift {shift}; it must be a number above 0")));
        }
        let largest = 1.0 - 1.0 / TRAIN_TIMESTEPS;
        let sigmas: Vec<f64> = (0..steps)
            .map(|step| largest * (1.0 - step as f64 / steps as f64))
            .map(|u| shift * u / (1.0 + (shift - 1.0) * u))
            .collect();
        let timesteps = sigmas.iter().map(|sigma| (sigma * TRAIN_TIMESTEPS).trunc() as f32).collect();
        let sampler = Sampler {
            solver,
            sigmas: sigmas.into_iter().chain([0.0]).map(|sigma| sigma as f32).collect(),
            timesteps,
            experts: vec![0; steps],
            guidance,
        };
        sampler.check()?;
        Ok(sampler)
    }

    /// Denoising steps N.
    pub fn steps(&self) -> usize {
        self.timesteps.len()
    }

    /// Block-execution branches of a step: 2 with guidance (with and without the prompt), else 1.
    #[allow(clippy::float_cmp, reason = "exactly 1 means no guidance, in the model's own pipelines too")]
    pub fn branches(&self) -> usize {
        if self.guidance == 1.0 { 1 } else { 2 }
    }

    /// Number of experts that the steps refer to.
    pub fn expert_count(&self) -> usize {
        self.experts.iter().max().map_or(0, |most| most + 1)
    }

    /// Checks that the parts fit each other.
    ///
    /// # Errors
    /// Lists of different lengths, noise levels that rise or leave 0..=1, a first level of 1 with UniPC.
    pub fn check(&self) -> Result<(), VideoError> {
        let steps = self.timesteps.len();
        if steps == 0 || steps > MAX_STEPS {
            return Err(VideoError::sampler(format!("{steps} timesteps; there must be 1 to {MAX_STEPS}")));
        }
        if self.sigmas.len() != steps + 1 || self.experts.len() != steps {
            return Err(VideoError::sampler(format!(
                "{} sigmas and {} experts for {steps} timesteps; there must be one sigma more and as many experts",
                self.sigmas.len(),
                self.experts.len()
            )));
        }
        if let Some(sigma) = self.sigmas.iter().find(|sigma| !(0.0..=1.0).contains(*sigma)) {
            return Err(VideoError::sampler(format!("sigma {sigma} does not lie in 0..=1")));
        }
        if let Some([before, after]) = self.sigmas.array_windows().find(|[before, after]| after >= before) {
            return Err(VideoError::sampler(format!("sigmas must fall, but {after} follows {before}")));
        }
        if let Some(timestep) = self.timesteps.iter().find(|timestep| !timestep.is_finite()) {
            return Err(VideoError::sampler(format!("timestep {timestep} is no number")));
        }
        if !self.guidance.is_finite() {
            return Err(VideoError::sampler(format!("guidance {} is no number", self.guidance)));
        }
        if self.solver == Solver::UniPc && self.sigmas[0] >= 1.0 {
            return Err(VideoError::sampler(
                "UniPC needs a first sigma below 1, because it works with log((1 − σ)/σ); use euler or a shifted schedule",
            ));
        }
        Ok(())
    }

    /// Reads a sampler file: this crate's own form, a list of sigmas with a switch, or diffusers' `scheduler_config.json`.
    ///
    /// | key | meaning |
    /// |---|---|
    /// | `sigmas` | N or N + 1 noise levels |
    /// | `timesteps` | N; 1000·σ where absent |
    /// | `experts` | N names (`semantic`, `detail`) or indices |
    /// | `switch_timestep` | where there are no `experts`: the last expert acts where ⌊t⌋ is at most this |
    /// | `guidance`, `guidance_scale` | a number, or `"none"` |
    /// | `solver` | `euler` (default) or `unipc` |
    /// | `_class_name`, `flow_shift`, `num_inference_steps` | of a stock scheduler: 50 steps and shift 3 where absent, guidance 5 |
    ///
    /// # Errors
    /// A file that cannot be read or is neither, and what [`Sampler::check`] refuses.
    pub fn read(path: &Path) -> Result<Sampler, VideoError> {
        let mut file = open_regular(path)?;
        let length = file.metadata().map_err(VideoError::io("open", path))?.len();
        if length > MAX_FILE {
            return Err(VideoError::sampler(format!("{length} bytes are above {MAX_FILE}")).in_file(path));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(VideoError::io("read", path))?;
        serde_json::from_slice(&text)
            .map_err(|error| VideoError::sampler(format!("not JSON ({error})")))
            .and_then(|json| Sampler::from_json(&json))
            .map_err(|error| error.in_file(path))
    }

    /// See [`Sampler::read`].
    ///
    /// # Errors
    /// As there.
    pub fn from_json(json: &Value) -> Result<Sampler, VideoError> {
        let guidance = |default: f32| match json.get("guidance").or_else(|| json.get("guidance_scale")) {
            None => Ok(default),
            Some(Value::String(text)) if text == "none" => Ok(1.0),
            Some(value) => value
                .as_f64()
                .map(|number| number as f32)
                .ok_or_else(|| VideoError::sampler(format!("guidance is {value}, neither a number nor \"none\""))),
        };
        if json.get("sigmas").is_none() {
            let Some(class) = json.get("_class_name").and_then(Value::as_str) else {
                return Err(VideoError::sampler("it has neither `sigmas` nor the `_class_name` of a scheduler"));
            };
            if class != "UniPCMultistepScheduler" {
                return Err(VideoError::sampler(format!(
                    "scheduler {class} is not supported; give a file with `sigmas` and `solver`"
                )));
            }
            // What the stock model sets; another value would be another schedule or another solver.
            for (key, want) in [
                ("use_flow_sigmas", Value::from(true)),
                ("prediction_type", Value::from("flow_prediction")),
                ("solver_order", Value::from(2)),
                ("solver_type", Value::from("bh2")),
                ("predict_x0", Value::from(true)),
                ("final_sigmas_type", Value::from("zero")),
                ("num_train_timesteps", Value::from(1000)),
            ] {
                if let Some(have) = json.get(key).filter(|have| **have != want) {
                    return Err(VideoError::sampler(format!("`{key}` is {have}; only {want} is supported")));
                }
            }
            let number = |key: &str, default: f64| match json.get(key) {
                None | Some(Value::Null) => Ok(default),
                Some(value) => {
                    value.as_f64().ok_or_else(|| VideoError::sampler(format!("`{key}` is {value}, not a number")))
                }
            };
            let (shift, steps) = (number("flow_shift", 3.0)?, number("num_inference_steps", 50.0)?);
            return Sampler::shifted(Solver::UniPc, steps as usize, shift, guidance(5.0)?);
        }
        let solver = match json.get("solver").map(|solver| solver.as_str().unwrap_or("?")) {
            None | Some("euler") => Solver::Euler,
            Some("unipc") => Solver::UniPc,
            Some(other) => return Err(VideoError::sampler(format!("solver `{other}`; choose euler or unipc"))),
        };
        let mut sigmas = floats(json, "sigmas")?;
        let timesteps = if json.get("timesteps").is_some() {
            floats(json, "timesteps")?
        } else {
            let steps = if sigmas.last() == Some(&0.0) { sigmas.len() - 1 } else { sigmas.len() };
            sigmas[..steps].iter().map(|sigma| sigma * TRAIN_TIMESTEPS as f32).collect()
        };
        if sigmas.len() == timesteps.len() {
            sigmas.push(0.0);
        }
        let experts = match (json.get("experts"), json.get("switch_timestep")) {
            (Some(Value::Array(experts)), _) => experts.iter().map(expert_index).collect::<Result<_, _>>()?,
            (Some(other), _) => return Err(VideoError::sampler(format!("`experts` is {other}, not a list"))),
            (None, Some(switch)) => {
                let switch = switch
                    .as_f64()
                    .ok_or_else(|| VideoError::sampler(format!("`switch_timestep` is {switch}, not a number")))?;
                experts_by_threshold(&timesteps, switch)
            }
            (None, None) => vec![0; timesteps.len()],
        };
        let sampler = Sampler { solver, sigmas, timesteps, experts, guidance: guidance(1.0)? };
        sampler.check()?;
        Ok(sampler)
    }

    /// Goes from noise level `step` to the next: `latent` in, `velocity` the model's output there (flow velocity, noise −
    /// data), both in any common order. `history` is what a multi-step solver carries.
    pub fn advance(&self, step: usize, velocity: &[f32], latent: &mut [f32], history: &mut History) {
        debug_assert_eq!(velocity.len(), latent.len(), "one velocity per value of the latent");
        match self.solver {
            Solver::Euler => {
                let increment = f64::from(self.sigmas[step + 1]) - f64::from(self.sigmas[step]);
                for (z, &v) in latent.iter_mut().zip(velocity) {
                    *z = (f64::from(*z) + f64::from(v) * increment) as f32;
                }
            }
            Solver::UniPc => unipc::advance(&self.sigmas, step, velocity, latent, history),
        }
    }
}

/// 1 where the timestep, truncated, is at most `switch`; 0 elsewhere.
pub fn experts_by_threshold(timesteps: &[f32], switch: f64) -> Vec<usize> {
    timesteps.iter().map(|&timestep| usize::from(f64::from(timestep).trunc() <= switch)).collect()
}

fn expert_index(value: &Value) -> Result<usize, VideoError> {
    match value {
        Value::String(name) if name == "semantic" || name == "base" => Ok(0),
        Value::String(name) if name == "detail" => Ok(1),
        other => {
            other.as_u64().filter(|&index| index < 16).map(|index| index as usize).ok_or_else(|| {
                VideoError::sampler(format!("expert {other}; write semantic, detail or an index below 16"))
            })
        }
    }
}

fn floats(json: &Value, key: &str) -> Result<Vec<f32>, VideoError> {
    let list = json.get(key).and_then(Value::as_array);
    let numbers: Option<Vec<f32>> =
        list.and_then(|list| list.iter().map(|value| value.as_f64().map(|number| number as f32)).collect());
    numbers.ok_or_else(|| VideoError::sampler(format!("`{key}` is not a list of numbers")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dcm_has_six_steps_and_switches_at_the_fourth() {
        let sampler = Sampler::dcm();
        sampler.check().unwrap();
        assert_eq!((sampler.steps(), sampler.branches(), sampler.expert_count()), (6, 1, 2));
        assert_eq!(sampler.experts, [0, 0, 0, 1, 1, 1]);
        // Near 17u/(1 + 16u) on the grid of 50 phases.
        for (entry, &timestep) in [0, 6, 12, 24, 32, 40].into_iter().zip(&sampler.timesteps) {
            let u = 1.0 - f64::from(entry) / 50.0;
            assert!((17.0 * u / (1.0 + 16.0 * u) * 1000.0 - f64::from(timestep)).abs() < 0.51, "{timestep}");
        }
    }

    #[test]
    fn files_of_every_form_are_read() {
        let demo = json!({"sigmas": [1.0, 0.96, 0.9, 0.8, 0.62, 0.36, 0.0], "timesteps": [1000.0, 960.0, 900.0, 800.0, 620.0, 360.0],
            "switch_timestep": 800, "experts": ["semantic", "semantic", "semantic", "detail", "detail", "detail"],
            "guidance": "none"});
        let sampler = Sampler::from_json(&demo).unwrap();
        assert_eq!(
            (sampler.solver, sampler.experts.clone(), sampler.branches()),
            (Solver::Euler, vec![0, 0, 0, 1, 1, 1], 1)
        );
        let switched = json!({"sigmas": [1.0, 0.96, 0.9, 0.8, 0.62, 0.36], "switch_timestep": 800});
        assert_eq!(Sampler::from_json(&switched).unwrap().experts, sampler.experts);
        let own = serde_json::to_value(&sampler).unwrap();
        assert_eq!(Sampler::from_json(&own).unwrap(), sampler);
        let stock = json!({"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0, "num_train_timesteps": 1000});
        let stock = Sampler::from_json(&stock).unwrap();
        assert_eq!((stock.solver, stock.steps(), stock.branches()), (Solver::UniPc, 50, 2));
        assert!((stock.sigmas[0] - 0.999_666).abs() < 1e-6 && stock.timesteps[0].to_bits() == 999f32.to_bits());
        for (json, want) in [
            (json!({"sigmas": [0.5, 0.6]}), "must fall"),
            (json!({"sigmas": [1.0, "x"]}), "not a list of numbers"),
            (json!({"sigmas": [1.0, 0.5], "experts": [0]}), "1 experts for 2 timesteps"),
            (json!({"sigmas": [1.0, 0.5], "experts": ["painter", "x"]}), "\"painter\""),
            (json!({"sigmas": [1.0, 0.5], "solver": "unipc"}), "below 1"),
            (json!({"sigmas": []}), "0 timesteps"),
            (json!({"_class_name": "DDIMScheduler"}), "DDIMScheduler is not supported"),
            (json!({"_class_name": "UniPCMultistepScheduler", "solver_order": 3}), "`solver_order` is 3; only 2"),
            (json!({}), "neither"),
        ] {
            let error = Sampler::from_json(&json).unwrap_err().to_string();
            assert!(error.contains(want), "{json}: {error}");
        }
    }

    /// `dz/dσ = v(z, σ)` with a known solution: data x₀ and noise n mix as z = (1 − σ)·x₀(σ) + σ·n.
    fn final_error(solver: Solver, steps: usize) -> f64 {
        // v = −3z has z(σ) = z(σ₀)·e^{−3(σ − σ₀)}.
        let sampler = Sampler::shifted(solver, steps, 3.0, 1.0).unwrap();
        let mut latent = vec![1f32, -2.0];
        let mut history = History::default();
        for step in 0..steps {
            let velocity: Vec<f32> = latent.iter().map(|z| -3.0 * z).collect();
            sampler.advance(step, &velocity, &mut latent, &mut history);
        }
        let exact = (3.0 * f64::from(sampler.sigmas[0])).exp();
        (f64::from(latent[0]) / exact - 1.0).abs().max((f64::from(latent[1]) / (-2.0 * exact) - 1.0).abs())
    }

    #[test]
    fn unipc_converges_faster_than_euler() {
        let (euler, euler_half) = (final_error(Solver::Euler, 20), final_error(Solver::Euler, 40));
        assert!((1.6..2.6).contains(&(euler / euler_half)), "euler is of first order: {euler:e} {euler_half:e}");
        let (unipc, unipc_half) = (final_error(Solver::UniPc, 20), final_error(Solver::UniPc, 40));
        assert!(unipc < euler / 4.0, "{unipc:e} {euler:e}");
        assert!(unipc / unipc_half > 2.6, "unipc is above first order: {unipc:e} {unipc_half:e}");
    }

    #[test]
    fn both_solvers_are_exact_for_straight_paths() {
        // With v constant the data prediction is constant, so any number of steps lands on z − σ·v.
        for solver in [Solver::Euler, Solver::UniPc] {
            let sampler = Sampler::shifted(solver, 7, 5.0, 1.0).unwrap();
            let (start, velocity) = (vec![0.25f32, -1.5, 2.0], vec![1.0f32, 0.5, -0.75]);
            let mut latent = start.clone();
            let mut history = History::default();
            for step in 0..7 {
                sampler.advance(step, &velocity, &mut latent, &mut history);
            }
            for ((z, start), v) in latent.iter().zip(start).zip(velocity) {
                assert!((z - (start - sampler.sigmas[0] * v)).abs() < 2e-6, "{solver:?}");
            }
        }
    }
}
