"""Stage 3b: goes on from work/dit.pt until shapes are obeyed. Differences to stage 3, all about the shape:
  * a batch holds whole groups: the same scene, noise, sigma and prompt template with each shape, so that what the shapes have in common cancels out of
    the gradient of what tells them apart;
  * below sigma .95, where the place of the shape is known, elements of the latent weigh up to ALPHA more where the shapes of the group differ;
  * a guidance term (GUIDE > 0): the target is moved by GUIDE times (prediction for this prompt - prediction for the same prompt with another shape
    word), both of the frozen starting model. It is what guidance with that prompt as the negative one would do, learnt, so that sampling needs one pass.
usage: [RANK WORLD NT] tune_dit.py --steps N --decay D ...; work/decay present: the decay begins at once (the log says at which step)."""
import argparse
from dit import *
import dataset as D, measure as M
import torch.distributed as dist
ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=100000, help="steps at the full rate"); ap.add_argument("--decay", type=int, default=300, help="steps of linear decay after them")
ap.add_argument("--scenes", type=int, default=4, help="scenes a step and rank"); ap.add_argument("--lr", type=float, default=1e-3); ap.add_argument("--mu", type=float, default=10)
ap.add_argument("--alpha", type=float, default=3.0); ap.add_argument("--guide", type=float, default=0.0); ap.add_argument("--shift", type=float, default=4.0)
ap.add_argument("--ema", type=float, default=0.006); ap.add_argument("--compile", action="store_true"); ap.add_argument("--seed", type=int, default=21)
ap.add_argument("--drop", type=float, default=0.0, help="share of groups whose prompts lose the word for the colour, the motion, or both")
ap.add_argument("--teacher", default="", help="whose predictions the guidance term takes; the starting model if absent"); ap.add_argument("--start", default="dit.pt"); ap.add_argument("--out", default="dit_tuned.pt")
o = ap.parse_args()
RK, WS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD", "1"))
if WS > 1: dist.init_process_group("gloo", init_method=f"file://{WORK}/ddp_{o.out}", rank=RK, world_size=WS)
torch.manual_seed(o.seed); rng = np.random.default_rng(o.seed + 1000 * RK)
d = torch.load(WORK + "/latents.pt", weights_only=False); Z, L, G, cw = d["z"], d["labels"], d["groups"], d["w"][:, None, None, None]
G = [g for g in G if len(g) > 1]; nv = 24; VG, G = G[-nv:], G[:-nv]
tx = Text(); te = UMT5EncoderModel(text_cfg(-(-tx.tok.get_vocab_size() // 32) * 32)); model = WanTransformer3DModel(**DIT_CFG)
P = {"dit." + k: v for k, v in model.named_parameters()}; P.update({"te." + k: v for k, v in te.named_parameters()})
ck = torch.load(f"{WORK}/{o.start}")
with torch.no_grad():
    for k, v in P.items(): v.copy_(ck[k])
pv = list(P.values()); ema = {k: v.detach().clone() for k, v in P.items()}; ev = list(ema.values())
W = {k[4:]: v for k, v in P.items() if k.startswith("dit.")}; 
te0 = UMT5EncoderModel(text_cfg(-(-tx.tok.get_vocab_size() // 32) * 32)).eval(); tk = torch.load(f"{WORK}/{o.teacher or o.start}")
T0 = {k[4:]: v for k, v in tk.items() if k.startswith("dit.")}                # the frozen teacher, with the text encoder it was trained with
with torch.no_grad():
    for k, v in te0.named_parameters(): v.copy_(tk["te." + k])
rope_table(5, 4, 4, 32, torch.float32)
fwd = torch.compile(forward, dynamic=False) if o.compile else forward
mats = [v for k, v in P.items() if k.startswith("dit.blocks") and v.dim() == 2 and min(v.shape) >= 64]; rest = [v for v in pv if not any(v is m for m in mats)]
opt = torch.optim.AdamW(rest, lr=o.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True); opt2 = Muon(mats[RK::WS]); flat = torch.zeros(sum(v.numel() for v in pv))
split = lambda f, ts: [a.view_as(t) for a, t in zip(f.split([t.numel() for t in ts]), ts)]
mbuf = [torch.zeros(sum(v.numel() for v in mats[r::WS])) for r in range(WS)]
torch.manual_seed(100 + o.seed + RK); B = 3 * o.scenes
def group_prompts(g, r):
    """One template for all shapes of a group; the shape words are drawn for each."""
    s = r.integers(1 << 30); out = []
    for i in g:
        p = D.prompt(*L[i], np.random.default_rng(s))                      # same draws: only the shape word differs, by its place in the list
        out.append(p)
    return out
def without(p, c, m, what):
    """The prompt without its word for the colour (what & 1), for the motion (what & 2). So a shape has to be drawn by its own word alone, whatever the
    colour and the motion: combinations that were never seen are drawn as asked only then."""
    if what & 1: p = p.replace(f" that is {c}", "").replace(f"{c} ", "", 1)
    if what & 2:
        for w in sorted(D.MOTION_WORDS[m], key=len, reverse=True):
            if " " + w in p: p = p.replace(" " + w, "", 1); break
    return p
def other_shape(i, p):
    """The prompt with a word of another shape."""
    for w in sorted(D.SHAPE_WORDS[L[i][1]], key=len, reverse=True):
        if w in p:
            s = D.SHAPES[(D.SHAPES.index(L[i][1]) + 1 + rng.integers(2)) % 3]; return p.replace(w, rng.choice(D.SHAPE_WORDS[s]), 1)
    return p
def weights(g):
    """1 + ALPHA x how much an element differs between the shapes of its group, relative to the clip's largest few."""
    q = (Z[g].std(0) * cw ** 0.5); return (q / q.flatten().kthvalue(int(q.numel() * 0.99)).values).clamp(max=1)
def batch():
    ix, pr, fp, gw, sc = [], [], [], [], []
    k = 0
    while len(ix) < B:
        g = G[rng.integers(len(G))]; g = g[:B - len(ix)]
        full = group_prompts(g, rng); what = rng.choice([1, 1, 2, 3]) if rng.random() < o.drop else 0
        ix += g; fp += full; pr += [without(p, L[i][0], L[i][2], what) for i, p in zip(g, full)]; w = weights(g) if len(g) > 1 else torch.zeros(Z.shape[1:]); gw += [w] * len(g); sc += [k] * len(g); k += 1
    return ix, pr, fp, torch.stack(gw), torch.tensor(sc), k
def val():
    """Weighted error by sigma and the shape-only error (deviation from the group mean) of held-back scenes."""
    gen = torch.Generator().manual_seed(5); r = np.random.default_rng(5); out = []; live = [v.detach().clone() for v in pv]
    with torch.no_grad():
        torch._foreach_copy_(pv, ev); ix = [i for g in VG for i in g]; pr = [p for g in VG for p in group_prompts(g, r)]; y = embed(te, tx.ids(pr))
        n = torch.cat([torch.randn(1, *Z.shape[1:], generator=gen).expand(len(g), -1, -1, -1, -1) for g in VG]); z = Z[ix]
        for s in (1.0, 0.9, 0.8, 0.6, 0.35):
            v = forward(W, DIT_CFG, (1 - s) * z + s * n, torch.full((len(ix),), s * 1000), y); e = v - (n - z); a = 0; ee = 0; en = 0
            for g in VG:
                q = e[a:a + len(g)]; t = z[a:a + len(g)]; ee += float(((q - q.mean(0)) ** 2).sum()); en += float(((t - t.mean(0)) ** 2).sum()); a += len(g)
            out.append((round(float((e ** 2).mean()), 4), round(ee / en, 4)))
        torch._foreach_copy_(pv, live)
    return out
t0 = time.time(); i = 0; run = 0; stop = None; end = o.steps
if RK == 0: print("clips", len(L), "groups", len(G), vars(o), "val (mse, shape-only relative)", val(), flush=True)
while True:
    if i % 20 == 0 and stop is None:
        f = torch.tensor([float(os.path.exists(WORK + "/decay") or i >= end)])
        if WS > 1: dist.broadcast(f, 0)
        if f.item(): stop = i; RK or print("decay begins at step", i, flush=True)
    if stop is not None and i >= stop + o.decay: break
    lr = o.lr * min(1, (i + 1) / 60) * (1 if stop is None else max(0.02, 1 - (i - stop) / o.decay))
    for g in opt.param_groups: g["lr"] = lr
    for g in opt2.param_groups: g["lr"] = lr * o.mu
    ix, pr, fp, gw, sc, k = batch(); z = Z[ix]; n = torch.randn(k, *Z.shape[1:])[sc]
    u = ((torch.arange(k) + torch.rand(k)) / k)[sc]; s = o.shift * u / (1 + (o.shift - 1) * u); s4 = s[:, None, None, None, None]; zt = (1 - s4) * z + s4 * n
    pr = ["" if rng.random() < 0.04 else p for p in pr]; y = embed(te, tx.ids(pr)); target = n - z
    if o.guide:
        with torch.no_grad():
            fp = [f if p else p for f, p in zip(fp, pr)]                       # the teacher always reads whole prompts
            y1, y2 = embed(te0, tx.ids(fp)), embed(te0, tx.ids([other_shape(j, p) if p else p for j, p in zip(ix, fp)]))
            target = target + o.guide * (fwd(T0, DIT_CFG, zt, s * 1000, y1) - fwd(T0, DIT_CFG, zt, s * 1000, y2))
    v = fwd(W, DIT_CFG, zt, s * 1000, y)
    ew = cw * (1 + o.alpha * gw * ((0.95 - s4) / 0.15).clamp(0, 1))
    loss = (ew * (v - target) ** 2).mean() / ew.mean()
    opt.zero_grad(); opt2.zero_grad(); loss.backward()
    if WS > 1:
        with torch.no_grad():
            gr = [p.grad if p.grad is not None else torch.zeros_like(p) for p in pv]; torch.cat([g.reshape(-1) for g in gr], out=flat); dist.all_reduce(flat); flat /= WS; torch._foreach_copy_(gr, split(flat, gr))
    gn = nn.utils.clip_grad_norm_(pv, 1.0); opt.step(); opt2.step(); i += 1
    if WS > 1:
        with torch.no_grad():
            torch.cat([m.reshape(-1) for m in mats[RK::WS]], out=mbuf[RK])
            for r in range(WS): dist.broadcast(mbuf[r], r)
            for r in range(WS):
                if r != RK: torch._foreach_copy_(mats[r::WS], split(mbuf[r], mats[r::WS]))
    with torch.no_grad(): torch._foreach_lerp_(ev, pv, max(o.ema, 1 / (i + 1)))
    run = loss.item() if i == 1 else 0.98 * run + 0.02 * loss.item()
    if RK: continue
    if i in (1, 5, 20) or i % 50 == 0: print(f"{i} {time.time()-t0:.0f}s cpu {time.process_time():.0f}s loss {run:.4f} gn {gn:.2f} lr {lr:.1e}", flush=True)
    if i % 200 == 0: print("   val", val(), flush=True); torch.save(ema, f"{WORK}/{o.out}.part"); os.replace(f"{WORK}/{o.out}.part", f"{WORK}/{o.out}")
if RK: sys.exit(0)
torch.save(ema, f"{WORK}/{o.out}"); print("end", i, "steps", time.time() - t0, "s val", val())
