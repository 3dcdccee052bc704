"""Times a training step (forward, loss, backward, AdamW) of a small decoder with each contestant's experts.

T tokens · S tokens of a sequence · d hidden_size

Attention, norms, embedding, loss and optimiser are the same modules for all; bf16, `LAYERS` blocks of the case's layer.
The learning rate is 0: every step does all its work, and all contestants have the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from tilemoe.bench import peers, timing
from tilemoe.bench.layer import admitted, time_rows
from tilemoe.bench.record import Row
from tilemoe.config import ModelConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.shape import MoEShape

LAYERS = 2
VOCABULARY, LONGEST, HEAD_DIM = 32768, 4096, 128


class PeerMLP(nn.Module):
    """A block's MLP, x (B, S, d) -> (B, S, d), computed by a contestant, whose weights are its parameters."""

    def __init__(self, contestant: peers.Contestant) -> None:
        super().__init__()
        self.run = contestant.run
        self.weights = nn.ParameterList(contestant.leaves)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x.flatten(0, 1)).view_as(x)


def step(settings: timing.Settings, name: str, shape: MoEShape) -> Iterator[list[Row]]:
    """For each mode a list with one row per contestant. Tokens that do not fill a sequence are left out."""
    torch.compiler.reset()
    weights = [peers.make_weights(shape, settings.device, torch.bfloat16) for _ in range(LAYERS)]
    contestants = admitted(settings.peers, shape, weights[0])
    model = decoder(shape, settings.device)
    length = min(LONGEST, shape.num_tokens)
    ids = torch.randint(model.config.vocab_size, (shape.num_tokens // length, length + 1), device=settings.device)
    runs = {c.name: _run(model, _layers(c, shape, weights), ids) for c in contestants}
    peaks = {c.name: None if c.own_heap else _peak(runs[c.name], settings.device) for c in contestants}
    once = {c.name: {"version": c.version, "peak_bytes": peaks[c.name]} for c in contestants}
    for mode in settings.modes if runs else ():
        found = timing.rounds(
            {contestant: timing.one_part(run) for contestant, run in runs.items()}, mode, settings.rounds
        )
        where = {"case": name, **asdict(shape), "mode": mode, "rounds": settings.rounds, "layers": LAYERS}
        rows = [{**where, "sequence": length, "step_ratio": None, **row} for row in time_rows(found, ["step"])]
        for row in rows:
            tokens_per_s = round(1e3 * ids.shape[0] * length / row["step_ms"]["median"])
            row |= {"tokens_per_s": tokens_per_s, **once[row["contestant"]]}
        yield rows


def describe(row: Row) -> str:
    return f"{row['case']} {row['mode']} {row['contestant']}: {row['step_ms']['median']:.2f} ms"


def decoder(shape: MoEShape, device: torch.device) -> DecoderLM:
    """`LAYERS` blocks, whose MLPs are replaced before every step."""
    heads = max(1, shape.hidden_size // HEAD_DIM)
    config = ModelConfig(
        vocab_size=VOCABULARY if device.type == "cuda" else min(VOCABULARY, 2048),  # a CPU's logits would take minutes
        hidden_size=shape.hidden_size,
        num_layers=LAYERS,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=min(HEAD_DIM, shape.hidden_size // 2 * 2),
        max_seq_len=LONGEST,
        dense_intermediate_size=1,
    )
    model = DecoderLM(config, device=device, dtype=torch.bfloat16)
    model.reset_parameters()
    return model


def _layers(contestant: peers.Contestant, shape: MoEShape, weights: Sequence[peers.Weights]) -> list[PeerMLP]:
    """The MLP of each layer; ``contestant`` is the first one's and has passed the check."""
    others = [peers.build(contestant.name, shape, each) for each in weights[1:]]
    return [PeerMLP(each) for each in (contestant, *others) if isinstance(each, peers.Contestant)]


def _run(model: DecoderLM, layers: Sequence[PeerMLP], ids: Tensor) -> Callable[[], None]:
    """A step of the model with these MLPs; every gradient is newly allocated."""
    for block, mlp in zip(model.blocks, layers, strict=True):
        block.mlp = mlp
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=ids.is_cuda)

    def run() -> None:
        for block, mlp in zip(model.blocks, layers, strict=True):
            block.mlp = mlp
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids[:, :-1], ids[:, 1:]).loss
        assert loss is not None
        loss.backward()
        optimizer.step()

    return run


def _peak(run: Callable[[], None], device: torch.device) -> int | None:
    """Peak bytes of a step beyond what is allocated between steps; None if they cannot be counted."""
    run()
    return timing.memory_of(run)[2] if device.type == "cuda" else None
