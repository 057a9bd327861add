"""Stage 2b: latents of scenes that are drawn once with every shape the DiT may see for their colour and motion; replaces stage 2's clips in
work/latents.pt and keeps its mean and std (else those of vae/config.json), so that a DiT can go on. usage: latents_by_shape.py SCENES [SEED]"""
from common import *
import dataset as D

scenes, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 15
vae = AutoencoderKLWan(**VAE_CFG); vae.load_state_dict(torch.load(WORK + "/vae.pt")); vae.eval()
if os.path.exists(WORK + "/latents.pt"):
    d = torch.load(WORK + "/latents.pt", weights_only=False); mean, std = d["mean"], d["std"]
else:
    d = json.load(open(OUT + "/vae/config.json")); mean, std = torch.tensor(d["latents_mean"]), torch.tensor(d["latents_std"])
by = lambda v: v[:, None, None, None]
rng = np.random.default_rng(seed); pairs = [(c, m) for c in D.COLOURS for m in D.MOTIONS]; train = set(D.TRAIN); t0 = time.time()
clips, labels, groups = [], [], []
for i in range(scenes):
    c, m = pairs[i % len(pairs)]; bg = D.BGS[rng.integers(3)]; sc = D.scene(c, "circle", m, bg, rng); groups.append([])
    for k, s in enumerate(D.SHAPES):
        if (c, s, m) in train: groups[-1].append(len(labels)); labels.append((c, s, m, bg)); clips.append({**sc, "shape": k})
z = []
with torch.inference_mode():
    for i in range(0, len(clips), 8):
        x = torch.from_numpy(np.stack([D.render(sc)[0] for sc in clips[i:i + 8]])).permute(0, 4, 1, 2, 3) * 2 - 1
        z.append(((encode_seq(vae, x.contiguous(memory_format=torch.channels_last_3d))[0] - by(mean)) / by(std)).contiguous())
        if i % 400 == 0: print(i, len(clips), f"{time.time() - t0:.0f}s", flush=True)
    z = torch.cat(z); raw = z[:4] * by(std) + by(mean); y0 = decode_seq(vae, raw); sens = []
    for c in range(16):                                                    # per-channel loss weight from decoder sensitivity, as in stage 2
        q = raw.clone(); q[:, c] += 0.5 * std[c] * torch.randn(q[:, c].shape, generator=torch.Generator().manual_seed(c))
        sens.append(((decode_seq(vae, q) - y0) ** 2).mean().item())
w = torch.tensor(sens) ** 0.5; w = w / w.mean(); print("channel weights", w.numpy().round(2))
torch.save(dict(z=z, labels=labels, groups=groups, w=w, mean=mean, std=std), WORK + "/latents.pt")
print(len(labels), "clips of", scenes, "scenes", time.time() - t0, "s")
