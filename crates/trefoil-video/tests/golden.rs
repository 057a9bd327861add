//! The reference tensors: per-block hidden states, velocities and latents of both experts, mid-step resume, on every path.
//!
//! The gate for `f32` is the reference's own for a float32 implementation: relative RMS 2e-5, largest difference 2e-4.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::{cosine_and_psnr, errors, kernels, read, shared};
use trefoil_video::checkpoint::{CheckpointOptions, Layout, WanCheckpoint};
use trefoil_video::dit::patches::patchify;
use trefoil_video::sampler::{Solver, experts_by_threshold};
use trefoil_video::{
    Calibration, CalibrationClip, Clip, ClipState, Event, Lane, Model, NumericPath, Sampler, Tensor, VideoPackOptions,
    denoise,
};

const RELATIVE: f64 = 2e-5;
const LARGEST: f64 = 2e-4;

fn gate(what: &str, got: &[f32], want: &[f32]) {
    let (relative, largest) = errors(got, want);
    assert!(relative <= RELATIVE && largest <= LARGEST, "{what}: relative {relative:.2e}, largest {largest:.2e}");
}

/// One evaluation of the model at timestep `t`, with the expert that DCM takes there.
fn single(t: f32) -> Sampler {
    let timesteps = vec![t];
    Sampler {
        solver: Solver::Euler,
        sigmas: vec![t / 1000.0, 0.0],
        experts: experts_by_threshold(&timesteps, 978.0),
        timesteps,
        guidance: 1.0,
    }
}

fn reference_model(file: &Path, sampler: Option<Sampler>) -> Arc<Model> {
    let checkpoint = WanCheckpoint::open(file, &CheckpointOptions::default()).unwrap();
    Arc::new(Model::from_checkpoint(&checkpoint, sampler).unwrap())
}

fn lane(model: &Arc<Model>, path: NumericPath, calibration: Option<&Arc<Calibration>>) -> Lane {
    Lane::cpu("cpu".to_string(), kernels(), model, path, calibration).unwrap()
}

/// Velocities and latents of every step, in `[C, F, H, W]`.
fn trajectory(lane: Lane, noise: &Tensor, text: &Tensor) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let mut lanes = [lane];
    let model = Arc::clone(lanes[0].model());
    let clip = Clip::new(lanes[0].host_mut(), &model, noise, text, None).unwrap();
    let mut state = clip.start(noise).unwrap();
    let (mut velocities, mut latents) = (Vec::new(), Vec::new());
    denoise(&mut lanes, &clip, &mut state, 0, &mut |event| {
        if let Event::Step { velocity, latent, .. } = event {
            velocities.push(clip.unpatchify(velocity));
            latents.push(clip.unpatchify(latent));
        }
        Ok(())
    })
    .unwrap();
    (velocities, latents)
}

struct Files {
    folder: PathBuf,
    tag: &'static str,
}

impl Files {
    fn all() -> Vec<Files> {
        shared("golden").map_or_else(Vec::new, |folder| {
            ["dit_a", "dit_c"].into_iter().map(|tag| Files { folder: folder.clone(), tag }).collect()
        })
    }

    fn file(&self, kind: &str) -> PathBuf {
        self.folder.join(format!("{}.{kind}.safetensors", self.tag))
    }

    fn io(&self, key: &str) -> Tensor {
        read(&self.file("io"), key)
    }
}

#[test]
fn f32_velocities_and_hidden_states_of_both_experts() {
    for files in Files::all() {
        let (noise, text) = (files.io("noise"), files.io("text_embeds"));
        for (t, key) in [
            (1000.0, "t1000"),
            (992.0, "t992"),
            (982.0, "t982"),
            (949.0, "t949"),
            (905.0, "t905"),
            (810.0, "t810"),
            (500.0, "t500.0"),
            (37.5, "t37.5"),
        ] {
            let model = reference_model(&files.file("dcm"), Some(single(t)));
            let mut lane = lane(&model, NumericPath::F32, None);
            let clip = Clip::new(lane.host_mut(), &model, &noise, &text, None).unwrap();
            let mut state = clip.start(&noise).unwrap();
            let traced = [992.0, 905.0].contains(&t);
            let mut hidden_states = Vec::new();
            let mut velocity = Vec::new();
            lane.run(&clip, &mut state, model.config().layers, &mut |event| {
                match event {
                    Event::Blocks { hidden, .. } => hidden_states.push(hidden.to_vec()),
                    Event::Step { velocity: of_step, .. } => velocity = clip.unpatchify(of_step),
                }
                Ok(())
            })
            .unwrap();
            gate(&format!("{} velocity {key}", files.tag), &velocity, &files.io(&format!("velocity.{key}")).values);
            if traced {
                assert_eq!(hidden_states.len(), model.config().layers);
                let want = |name: &str| read(&files.file("trace"), &format!("{key}.{name}")).values;
                for (block, hidden) in hidden_states.iter().enumerate() {
                    gate(&format!("{} {key} block {block}", files.tag), hidden, &want(&format!("hidden.{block}")));
                }
                gate("temb", &clip.time(0).embedding, &want("temb"));
                gate("modulation", &clip.time(0).modulation, &want("timestep_proj"));
                gate("context", clip.conditions(0, 0).unwrap().context, &want("text_context"));
            }
        }
    }
}

#[test]
fn f32_resumes_inside_a_step_from_hidden_state_and_latent() {
    for files in Files::all() {
        let (noise, text) = (files.io("noise"), files.io("text_embeds"));
        for (t, key) in [(992.0, "t992"), (905.0, "t905")] {
            let model = reference_model(&files.file("dcm"), Some(single(t)));
            let mut lane = lane(&model, NumericPath::F32, None);
            let clip = Clip::new(lane.host_mut(), &model, &noise, &text, None).unwrap();
            let latent = patchify(&noise.values, clip.shape());
            for next in 1..model.config().layers {
                let hidden = read(&files.file("trace"), &format!("{key}.hidden.{}", next - 1)).values;
                let mut state = ClipState::resume(&clip, next, &hidden, &latent).unwrap();
                let mut velocity = Vec::new();
                lane.run(&clip, &mut state, model.config().layers, &mut |event| {
                    if let Event::Step { velocity: of_step, .. } = event {
                        velocity = clip.unpatchify(of_step);
                    }
                    Ok(())
                })
                .unwrap();
                let want = files.io(&format!("velocity.{key}")).values;
                gate(&format!("{} {key} resumed at block {next}", files.tag), &velocity, &want);
            }
        }
    }
}

#[test]
fn f32_six_steps_across_the_expert_switch() {
    for files in Files::all() {
        let model = reference_model(&files.file("dcm"), None);
        assert_eq!(model.sampler(), &Sampler::dcm());
        let (velocities, latents) =
            trajectory(lane(&model, NumericPath::F32, None), &files.io("noise"), &files.io("text_embeds"));
        for (step, (velocity, latent)) in velocities.iter().zip(&latents).enumerate() {
            gate(
                &format!("{} velocity {step}", files.tag),
                velocity,
                &files.io(&format!("sample.velocity.{step}")).values,
            );
            gate(&format!("{} latent {step}", files.tag), latent, &files.io(&format!("sample.latent.{step}")).values);
        }
        assert_eq!(latents.len(), 6);
    }
}

/// What needs nothing but this repository: the base expert of the smaller model.
#[test]
fn f32_base_expert_from_the_repository() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let files = Files { folder, tag: "dit_c" };
    let (noise, text) = (files.io("noise"), files.io("text_embeds"));
    for (t, key) in [(1000.0, "t1000"), (992.0, "t992"), (982.0, "t982")] {
        let model = reference_model(&files.file("diffusers"), Some(single(t)));
        let mut lane = lane(&model, NumericPath::F32, None);
        let clip = Clip::new(lane.host_mut(), &model, &noise, &text, None).unwrap();
        let mut state = clip.start(&noise).unwrap();
        let mut hidden_states = Vec::new();
        let mut velocity = Vec::new();
        lane.run(&clip, &mut state, 2, &mut |event| {
            match event {
                Event::Blocks { hidden, .. } => hidden_states.push(hidden.to_vec()),
                Event::Step { velocity: of_step, .. } => velocity = clip.unpatchify(of_step),
            }
            Ok(())
        })
        .unwrap();
        gate(key, &velocity, &files.io(&format!("velocity.{key}")).values);
        for (block, hidden) in hidden_states.iter().enumerate().filter(|_| key == "t992") {
            gate(key, hidden, &read(&files.file("trace"), &format!("t992.hidden.{block}")).values);
        }
    }
}

/// Noise from a seed is the reference generator's.
#[test]
fn seeds_give_the_noise_of_the_reference() {
    let Some(folder) = shared("golden") else { return };
    for key in ["seed40.latent", "seed40.n40"] {
        let want = read(&folder.join("noise.safetensors"), key).values;
        let got = trefoil_video::noise::torch_normals(40, want.len());
        let (_, largest) = errors(&got, &want);
        assert!(largest <= 2e-6, "{key}: {largest:e}");
    }
}

#[test]
fn every_layout_of_the_base_gives_the_same_velocity() {
    for files in Files::all() {
        let (noise, text) = (files.io("noise"), files.io("text_embeds"));
        for (kind, layout) in [("wan_orig", Layout::Original), ("diffusers", Layout::Diffusers)] {
            let model = reference_model(&files.file(kind), Some(single(992.0)));
            assert_eq!((model.record().layout, model.record().experts.len()), (layout, 1));
            let (velocities, _) = trajectory(lane(&model, NumericPath::F32, None), &noise, &text);
            gate(&format!("{} {kind}", files.tag), &velocities[0], &files.io("velocity.t992").values);
        }
    }
}

/// Errors of the final latent that the quantised paths stay within: (cosine, PSNR in dB, peak = the reference's range). Seen:
/// dit_a 0.99996 and 58.4 (w8a16), 0.99993 and 55.3 (w8a8); dit_c 0.99998 and 59.1, 0.99994 and 54.0; demo 0.99965 and 49.3,
/// 0.9986 and 44.2. Weight quantisation alone costs dit_a 7.7e-3 relative RMS, w8a16 8.5e-3, w8a8 1.2e-2.
struct Allowed {
    w8a16: (f64, f64),
    w8a8: (f64, f64),
}

fn quantised_paths(name: &str, folder: &Path, noise: &Tensor, text: &Tensor, want: &[f32], allowed: &Allowed) {
    let space = tempfile::tempdir().unwrap();
    let output = space.path().join("a.trefoil");
    trefoil_video::pack_video(folder, &output, &VideoPackOptions::default(), |_| {}).unwrap();
    let model = Arc::new(Model::open(&output).unwrap());
    assert!(Calibration::of(&model).unwrap().is_none());
    let clip = CalibrationClip { noise, text, negative: None };
    let calibration = Calibration::observe(&model, &kernels(), &[clip], &mut |_, _| Ok(())).unwrap();
    // Through the artefact, as a later run finds it.
    calibration.store(model.artefact().unwrap(), &output).unwrap();
    let model = Arc::new(Model::open(&output).unwrap());
    let calibration = Arc::new(Calibration::of(&model).unwrap().unwrap());
    for (path, (cosine_at_least, psnr_at_least)) in
        [(NumericPath::W8a16, allowed.w8a16), (NumericPath::W8a8, allowed.w8a8)]
    {
        let (_, latents) = trajectory(lane(&model, path, Some(&calibration)), noise, text);
        let last = latents.last().unwrap();
        let (cosine, psnr) = cosine_and_psnr(last, want);
        let (relative, _) = errors(last, want);
        println!("{name} {path}: cosine {cosine:.6}, PSNR {psnr:.1} dB, relative RMS {relative:.2e}");
        assert!(
            cosine >= cosine_at_least && psnr >= psnr_at_least,
            "{name} {path}: cosine {cosine:.6}, PSNR {psnr:.1} dB"
        );
    }
}

#[test]
fn quantised_paths_stay_within_stated_errors() {
    let allowed = Allowed { w8a16: (0.9999, 56.0), w8a8: (0.9998, 52.0) };
    for files in Files::all() {
        let want = files.io("sample.latent.5").values;
        let (noise, text) = (files.io("noise"), files.io("text_embeds"));
        quantised_paths(files.tag, &files.file("dcm"), &noise, &text, &want, &allowed);
    }
}

#[test]
fn the_demo_model_runs_its_own_six_steps() {
    let Some(folder) = shared("demo-model") else { return };
    let golden = folder.join("golden/prompt0.safetensors");
    let (noise, text) = (read(&golden, "noise"), read(&golden, "text_embeds"));
    let sampler = Sampler::read(&folder.join("scheduler/sampler.json")).unwrap();
    let model = reference_model(&folder, Some(sampler));
    let (velocities, latents) = trajectory(lane(&model, NumericPath::F32, None), &noise, &text);
    for (step, (velocity, latent)) in velocities.iter().zip(&latents).enumerate() {
        gate(&format!("demo velocity {step}"), velocity, &read(&golden, &format!("velocity.{step}")).values);
        gate(&format!("demo latent {step}"), latent, &read(&golden, &format!("latent.{step}")).values);
    }
    let allowed = Allowed { w8a16: (0.9995, 47.0), w8a8: (0.998, 42.0) };
    quantised_paths("demo", &folder, &noise, &text, latents.last().unwrap(), &allowed);
}
