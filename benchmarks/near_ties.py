"""What noise does to the choices of experts and to each token's loss, in transformers in fp64; results/near_ties.jsonl.

python benchmarks/near_ties.py EXPORTED TEXT    # EXPORTED: of `tilemoe train --recipe tiny --train.steps 240`
"""

import sys

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

ids = torch.frombuffer(bytearray(open(sys.argv[2], "rb").read(257 * 256)), dtype=torch.uint8).long().view(256, 257)
x, y = ids[:, :-1], ids[:, 1:]


def run(model, k, noise=0.0):
    got = []
    routers = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
    hooks = [
        r.register_forward_hook(
            lambda m, a, o: got.append((o if torch.is_tensor(o) else o[0]).flatten(0, -2).topk(k).indices.sort().values)
        )
        for r in routers
    ]
    if noise:
        e = model.get_input_embeddings()
        hooks.append(e.register_forward_hook(lambda m, a, o: o * (1 + noise * torch.randn_like(o))))
    with torch.no_grad():
        logits = model(x).logits.flatten(0, 1).double()
    for h in hooks:
        h.remove()
    return F.cross_entropy(logits, y.flatten(), reduction="none"), torch.stack(got)


m = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float64, experts_implementation="eager").eval()
k = m.config.num_experts_per_tok
base, a = run(m, k)
for name, noise in (("fp32", 0), ("1e-7", 1e-7), ("1e-6", 1e-6), ("1e-5", 1e-5), ("1e-4", 1e-4)):
    if name == "fp32":
        loss, b = run(
            AutoModelForCausalLM.from_pretrained(
                sys.argv[1], dtype=torch.float32, experts_implementation="eager"
            ).eval(),
            k,
        )
    else:
        loss, b = run(m, k, noise)
    d = (loss - base).abs()
    flips = (a != b).any(2)
    first = flips.view(len(a), 256, 256).any(0)  # windows, positions
    after = first.cumsum(1) > 0
    print(
        name,
        "relative change of the mean",
        (loss.mean() / base.mean() - 1).item(),
        "flips",
        flips.sum().item(),
        "of",
        flips.numel(),
        "largest |d| without a flip before",
        d.view(256, 256)[~after].max().item(),
        "largest |d|",
        d.max().item(),
        "sum of d of others",
        (loss - base).view(256, 256)[~after].sum().item(),
        "sum of d",
        (loss - base).sum().item(),
    )
