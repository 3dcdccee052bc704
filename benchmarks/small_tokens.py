"""Experts of few tokens, as a model that generates calls them, against transformers' own `batched_mm` and `grouped_mm`.

    python benchmarks/small_tokens.py --cases Qwen3-30B-A3B,OLMoE --tokens 1,4,16,64,256

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

bf16, no gradients, without the router. A call is `LAYERS` experts modules of transformers one after the other, each
with weights and a routing of its own, so that no layer finds its weights in a cache. "eager" is launched from Python,
"graph" is a replayed CUDA graph. Times are milliseconds of one layer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilemoe.bench import check, timing
from tilemoe.bench.run import each_case, selected
from tilemoe.integrations import transformers as integration
from tilemoe.shape import MoEShape

# T is set by --tokens.
CASES = {"Qwen3-30B-A3B": MoEShape(1, 2048, 768, 128, 8), "OLMoE": MoEShape(1, 2048, 1024, 64, 8)}
IMPLEMENTATIONS = ("tilemoe", "grouped_mm", "batched_mm")
LAYERS = 4
TOLERANCE = 2e-2  # RMS error over RMS value, of bf16 products in another order

# x (T, d), expert ids (T, K), scores (T, K)
Call = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--tokens", default="1,4,16,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here: this benchmark is for a machine with one")
    integration.register()

    def measured(name: str, shape: MoEShape) -> Iterator[list[dict[str, Any]]]:
        layers = make_layers(shape, LAYERS, torch.device("cuda"), torch.bfloat16)
        for tokens in map(int, options.tokens.split(",")):
            rows = measure(layers, tokens, options.rounds)
            yield [{"case": name, "layers": LAYERS, **row} for row in rows]

    each_case("small_tokens", selected("case", options.cases, CASES), measured, describe)


def make_layers(shape: MoEShape, count: int, device: torch.device, dtype: torch.dtype) -> list[nn.Module]:
    """Experts modules of transformers' Qwen3-MoE; OLMoE's compute the same."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_tok,
    )
    layers = []
    for _ in range(count):
        with torch.device("meta"):
            layer = Qwen3MoeExperts(config)
        layer = layer.to(dtype).to_empty(device=device).requires_grad_(False)
        for weight in layer.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5)
        layers.append(layer)
    return layers


def make_calls(layers: list[nn.Module], tokens: int, seed: int = 0) -> list[Call]:
    """For each layer x and a random routing, K different experts for each token; scores in the layer's dtype."""
    config: Any = layers[0].config
    weight: Any = layers[0].down_proj
    generator = torch.Generator(weight.device).manual_seed(seed)
    calls = []
    for _ in layers:
        x = torch.randn(tokens, config.hidden_size, generator=generator, device=weight.device).to(weight.dtype)
        logits = torch.randn(tokens, config.num_experts, generator=generator, device=weight.device)
        kept, ids = logits.topk(config.num_experts_per_tok, dim=1)
        calls.append((x, ids, kept.softmax(dim=1).to(weight.dtype)))
    return calls


def run(layers: list[nn.Module], calls: list[Call], implementation: str) -> list[Tensor]:
    """Each layer's output (T, d)."""
    config: Any = layers[0].config  # that of all of them
    config._experts_implementation = implementation
    return [layer(*call) for layer, call in zip(layers, calls, strict=True)]


def problem(outputs: list[Tensor], layers: list[nn.Module], calls: list[Call]) -> str | None:
    """None if every output agrees with plain fp32 loops, else what does not."""
    errors = {
        f"the output of layer {index}": check.relative(output, expected(layer, *call))
        for index, (output, layer, call) in enumerate(zip(outputs, layers, calls, strict=True))
    }
    return check.first_off(errors, TOLERANCE)


def expected(layer: nn.Module, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """(T, d) fp32, one expert at a time."""
    w1: Any = layer.gate_up_proj
    w2: Any = layer.down_proj
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        rows = (each.float() for each in (x[token], w1[expert], w2[expert], scores[token, place]))
        out.index_add_(0, token, check.expert_rows(*rows))
    return out


def bytes_of_weights(layers: list[nn.Module], calls: list[Call]) -> int:
    """What a layer must read at least, the mean over the layers: the chosen experts' weights."""
    total = 0
    for layer, (_, ids, _) in zip(layers, calls, strict=True):
        of_expert = sum(weight[0].numel() * weight.element_size() for weight in layer.parameters())
        total += of_expert * int(ids.unique().numel())
    return total // len(layers)


@torch.no_grad()
def measure(layers: list[nn.Module], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for eager launches and one for CUDA graphs. Who is wrong in either is in the row, not timed."""
    calls = make_calls(layers, tokens)
    steps: dict[str, dict[str, timing.Step]] = {"eager": {}, "graph": {}}
    wrong: dict[str, dict[str, str]] = {"eager": {}, "graph": {}}
    for name in IMPLEMENTATIONS:
        torch.cuda.synchronize()

        def eager(name: str = name) -> list[Tensor]:
            return run(layers, calls, name)

        eager()
        eager()  # what is recorded is recorded now
        outcomes: list[tuple[str, list[Tensor], Callable[[], Any]]] = [("eager", eager(), eager)]
        try:
            graph, captured = capture(eager)
        except RuntimeError as error:  # it waits for the GPU, for one
            wrong["graph"][name] = str(error).splitlines()[0]
        else:
            poison(captured)
            graph.replay()
            outcomes.append(("graph", captured, graph.replay))
        for mode, outputs, call in outcomes:
            found = problem(outputs, layers, calls)
            if found is None:
                steps[mode][name] = timing.one_part(call)
            else:
                wrong[mode][name] = found
    # Of all together, in changing order.
    together = {f"{mode} {name}": step for mode, of_mode in steps.items() for name, step in of_mode.items()}
    found_ms = timing.rounds(together, "sustained", rounds)
    of_weights = bytes_of_weights(layers, calls)
    rows = []
    for mode in steps:
        ms = {name: [parts[0] / len(layers) for parts in found_ms[f"{mode} {name}"]] for name in steps[mode]}
        rows.append(
            {"mode": mode, "tokens": tokens, "bytes": of_weights, **row_of(ms, of_weights), "wrong": wrong[mode]}
        )
    return rows


def row_of(ms: dict[str, list[float]], of_weights: int) -> dict[str, Any]:
    """Statistics of each contestant's milliseconds by round, and the best peer's over ours."""
    row: dict[str, Any] = {"ms": {name: timing.summary(values) for name, values in ms.items()}}
    peers = {name: statistics.median(values) for name, values in ms.items() if name != "tilemoe"}
    if "tilemoe" in ms:
        row["gb_per_s"] = round(of_weights / statistics.median(ms["tilemoe"]) / 1e6, 1)
    if "tilemoe" in ms and peers:
        best = min(peers, key=lambda name: peers[name])
        row |= {"best_peer": best, "ratio": timing.ratio(ms["tilemoe"], ms[best])}
    return row


def capture(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of what ``call`` launches, and its outputs, which a replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph, outputs


def poison(tensors: list[Tensor]) -> None:
    """NaN, so that what a replay does not write shows."""
    for tensor in tensors:
        tensor.fill_(float("nan"))


def describe(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {1000 * found['median']:.1f}" for name, found in row["ms"].items())
    against = f"; {row['best_peer']} over ours {row['ratio']:.2f}" if "ratio" in row else ""
    wrong = "".join(f"; {name}: {what}" for name, what in row["wrong"].items())
    case = f"{row['case']} T={row['tokens']} {row['mode']}"
    return f"{case}: us {times}; ours {row.get('gb_per_s')} GB/s of weights{against}{wrong}"


if __name__ == "__main__":
    main()
