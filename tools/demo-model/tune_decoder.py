"""Stage 4b: the VAE's decoder goes on from work/vae.pt on what it will be given: latents that the transformer sampled, beside latents of real clips.

A sampled clip has no true picture, so one is drawn: where the shape is, how large it is and its colours are read from the clip that the old decoder makes
(smoothed in time by the motion's own law), and the *prompt* says which shape it is. Clips whose colour or motion was not read as the prompt says are left out.
Only training combinations are sampled. The encoder and so the space of latents stay as they are. Loss as in stage 1: absolute and squared error, more near
the shape. usage: tune_decoder.py PAIRS SECONDS   (sampled clips, kept in work/pairs.pt; CPU seconds of training); LR, MU, SEED in the environment"""
from gen import *
n_pairs, budget = int(sys.argv[1]), float(sys.argv[2]); SJ = json.load(open(WORK + "/sampler.json")); SG, SW = SJ["sigmas"], SJ["switch_step"]
seed = int(os.environ.get("SEED", "11")); torch.manual_seed(seed); rng = np.random.default_rng(seed)
W, tx, te, vae, d = load(); lo = torch.load(WORK + "/lora.pt"); mean, std = (d[k][:, None, None, None] for k in ("mean", "std"))
AREA = {0: np.pi, 1: 4 * 0.88 ** 2, 2: 3 * 3 ** 0.5 * 0.68 ** 2}

def drawn(fr, label):
    """The scene (as `dataset.scene` makes them) of a clip that should show `label`; None where colour or motion are not read as asked."""
    r = M.analyse(fr)
    if r["colour"] != label[0] or r["motion"] != label[2]: return None
    T, H, Wd, _ = fr.shape; sat = fr.max(-1) - fr.min(-1); w = np.clip((sat / np.quantile(sat, 0.99) - 0.35) / 0.4, 0, 1).astype(np.float64)
    area = w.sum((1, 2)) + 1e-9; yy, xx = np.mgrid[:H, :Wd] + 0.5; cx = (w * xx).sum((1, 2)) / area; cy = (w * yy).sum((1, 2)) / area
    if area.min() < 12: return None
    u = np.linspace(0, 1, T); si = D.SHAPES.index(label[1]); m = label[2]
    fit = lambda v, k: np.polyval(np.polyfit(u, v, k), u)
    cx = fit(cx, 1 if m in ("left", "right") else 0); cy = fit(cy, {"up": 1, "down": 1, "bounce": 2}.get(m, 0)); rad = fit(np.sqrt(area / AREA[si]), 1 if m in ("grow", "shrink") else 0)
    far = (w.max(0) < 0.02) if m not in ("left", "right", "up", "down", "bounce") else None
    A = np.stack([np.ones_like(xx), (xx - Wd / 2) / (Wd / 2), (yy - H / 2) / (H / 2)], -1); a, b = [], []
    for t in range(0, T, 2):
        k = (w[t] < 0.02) & ((np.abs(xx - cx[t]) > 1.5 * rad[t]) | (np.abs(yy - cy[t]) > 1.5 * rad[t])); a.append(A[k]); b.append(fr[t][k])
    co = np.linalg.lstsq(np.concatenate(a), np.concatenate(b), rcond=None)[0]
    return dict(shape=si, r=rad, cx=cx, cy=cy, rgb=fr[w > 0.95].mean(0), bg=co[0], g=co[1:].mean(1))

def pairs():
    path = f"{WORK}/pairs.pt"
    if os.path.exists(path): return torch.load(path, weights_only=False)
    Z, S, t0, kept = [], [], time.time(), 0
    old = AutoencoderKLWan(**VAE_CFG).eval(); old.load_state_dict(torch.load(WORK + "/vae.pt"))
    with torch.inference_mode():
        for i in range(0, n_pairs, 24):
            lab, pr = make_prompts(D.TRAIN, 24, 1000 + seed + i); y = embed(te, tx.ids(pr)); noise = torch.randn(24, 16, 5, 8, 8, generator=torch.Generator().manual_seed(5000 + seed + i))
            z = sample(W, DIT_CFG, y, noise, SG, lo if (i // 24) % 4 else None, SW); f = frames(old, d, z)
            for q, fr, l in zip(z, f, lab):
                s = drawn(fr, l)
                if s is not None: Z.append(q.clone()); S.append(s)
            if i % 240 == 0: print("pairs", i + 24, "kept", len(S), f"{time.time()-t0:.0f}s", flush=True)
    torch.save((torch.stack(Z), S), path); return torch.stack(Z), S
Z, S = pairs(); print(len(S), "pairs", flush=True)

for n, p in vae.named_parameters(): p.requires_grad_(n.startswith(("decoder", "post_quant")))
for p in vae.parameters():                                                # channels_last weights are ~15 % faster on CPU
    if p.dim() == 5: p.data = p.data.contiguous(memory_format=torch.channels_last_3d)
    if p.dim() == 4: p.data = p.data.contiguous(memory_format=torch.channels_last)
live = [p for p in vae.parameters() if p.requires_grad]
mat = [p for n, p in vae.named_parameters() if p.requires_grad and p.dim() >= 4 and "gamma" not in n and not n.endswith("decoder.conv_out.weight")]
rest = [p for p in live if not any(p is q for q in mat)]; ema = [p.detach().clone() for p in live]
LR = float(os.environ.get("LR", "2.5e-4")); MU = float(os.environ.get("MU", "5")); opt = torch.optim.Adam(rest, lr=LR, betas=(0.9, 0.98)); opt2 = Muon(mat)
C = D.TRAIN + D.HELD_OUT                                                   # the VAE has always seen all combinations (stage 1)

def evaluate(n=45):
    """Sampled clips of training combinations (other seeds), and the round trip of real ones, with the averaged weights."""
    keep = [p.detach().clone() for p in live]
    with torch.inference_mode():
        torch._foreach_copy_(live, ema); lab, pr = make_prompts(D.TRAIN, n, 77); y = embed(te, tx.ids(pr)); noise = torch.randn(n, 16, 5, 8, 8, generator=torch.Generator().manual_seed(77))
        a = M.score(frames(vae, d, sample(W, DIT_CFG, y, noise, SG, lo, SW)), lab)[0]
        g = np.random.default_rng(99); sc = [D.sample(g, C) for _ in range(48)]; xs = torch.from_numpy(np.stack([D.render(s[4])[0] for s in sc])).permute(0, 4, 1, 2, 3) * 2 - 1
        ys = torch.cat([decode_seq(vae, encode_seq(vae, x)[0]).clamp(-1, 1) for x in xs.split(8)]); psnr = float((-10 * (((ys - xs) ** 2).mean((1, 2, 3, 4)) / 4).log10()).mean())
        b = M.score((ys.permute(0, 2, 3, 4, 1) * 0.5 + 0.5).numpy(), [s[:3] for s in sc])[0]
        torch._foreach_copy_(live, keep)
    return f"sampled: shape {a['shape']:.3f} all {a['all3']:.3f} ideal {a['ideal_psnr']:.2f} dB; round trip: shape {b['shape']:.3f} PSNR {psnr:.2f} dB"
def save():
    sd = vae.state_dict(); names = [n for n, p in vae.named_parameters() if p.requires_grad]
    torch.save({**{k: v.contiguous() for k, v in sd.items()}, **{n: e.contiguous() for n, e in zip(names, ema)}}, WORK + "/vae_tuned.pt.part"); os.replace(WORK + "/vae_tuned.pt.part", WORK + "/vae_tuned.pt")
print("start", evaluate(), flush=True)
c0 = time.process_time(); i = 0; run = 0; paused = 0.0
while True:
    el = time.process_time() - c0 - paused; fr = el / budget
    if fr >= 1: break
    zs, xs, ws = [], [], []
    k = rng.integers(len(S)); x, al = D.render(S[k]); zs.append(Z[k] * std + mean); xs.append(x); ws.append(al)
    if rng.random() < 0.6: k = rng.integers(len(S)); x, al = D.render(S[k]); zs.append(Z[k] * std + mean)
    else:
        x, al = D.render(D.sample(rng, C)[4])
        with torch.no_grad(): m_, lv = encode_seq(vae, (torch.from_numpy(x).permute(3, 0, 1, 2)[None] * 2 - 1)); zs.append((m_ + torch.randn_like(m_) * (0.5 * lv.clamp(-20, -6)).exp())[0])
    xs.append(x); ws.append(al)
    z = torch.stack(zs).contiguous(memory_format=torch.channels_last_3d); x = torch.from_numpy(np.stack(xs)).permute(0, 4, 1, 2, 3) * 2 - 1
    w = 1 + 3 * F.max_pool2d(torch.from_numpy(np.stack(ws)), 5, 1, 2)[:, None]
    lr = LR * min(1, (i + 1) / 30) * max(0.02, min(1, (1 - fr) / 0.6))
    for g in opt.param_groups: g["lr"] = lr
    for g in opt2.param_groups: g["lr"] = lr * MU
    e = decode_seq(vae, z) - x; loss = (w * (e.abs() + 2 * e * e)).mean() / w.mean()
    opt.zero_grad(); opt2.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(live, 1.0); opt.step(); opt2.step(); i += 1
    with torch.no_grad(): torch._foreach_lerp_(ema, live, max(0.01, 1 / (i + 1)))
    run = loss.item() if i == 1 else 0.98 * run + 0.02 * loss.item()
    if i in (5, 20, 50) or i % 100 == 0: print(f"{i} {el:.0f} CPU s loss {run:.4f} lr {lr:.1e}", flush=True)
    if i % 600 == 0: c1 = time.process_time(); print("  ", evaluate(), flush=True); save(); paused += time.process_time() - c1
save(); print("end", i, "steps", evaluate(90))
