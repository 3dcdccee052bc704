"""A training step of transformers' own models, real widths and few layers: tilemoe's experts against transformers'.

    python benchmarks/hf_step.py --cases gpt-oss-20b,OLMoE-1B-7B --rounds 5
    python benchmarks/hf_step.py --profile gpt-oss-20b
    python benchmarks/hf_step.py --liger --cases Qwen3-30B-A3B,Mixtral-8x7B,gpt-oss-20b   # pip install liger-kernel

A step is forward, loss and backward in bf16, no optimiser: one model (`MODELS`, whose widths are public; nothing is
downloaded) with one batch of random tokens, of which only ``experts_implementation`` changes. Each implementation runs
once first: its loss and its gradients are compared with `grouped_mm`'s. ``noise`` is what transformers' "eager" experts
differ from `grouped_mm` by, which round where it does: so it is less than what bf16 leaves open. Where bf16 puts a
router's logits in another order a token goes elsewhere, so gradients differ by percents. One that runs out of memory is
recorded so. Then they are timed in the same rounds, in changing order, by the host's clock: a user waits for the host,
too. The peak of memory counts weights and gradients. With ``--liger`` all have Liger's norms, rotary positions and
fused cross entropy, and the rows are in results/hf_step_liger.jsonl.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import profiles
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tilemoe.bench import record, timing
from tilemoe.bench.check import Difference
from tilemoe.bench.record import Row, each_case, selected
from tilemoe.integrations import transformers as integration

NAME, NAME_WITH_LIGER, MODE = "hf_step", "hf_step_liger", "step"
OURS, THEIRS, REFERENCE = "tilemoe", "grouped_mm", "eager"
IMPLEMENTATIONS = (OURS, THEIRS, "batched_mm")
WARM_STEPS = 2
TOP = 25  # kernels that are printed
_GROUPS = (("experts", re.compile(r"\.experts\.")), ("router", re.compile(r"\.(gate|router)\.")))

Gradients = dict[str, Tensor]


# --------------------------------------------------------------------------------------------------------- the models


@dataclass(frozen=True)
class Model:
    """``model_type`` and ``config`` are transformers'; a batch is (batch, sequence) tokens.

    ``bar``: how many times as fast as grouped_mm a step has to be; None: no promise. with_liger: the rest of the
    model by Liger.
    """

    model_type: str
    config: Mapping[str, Any]
    batch: int = 4
    sequence: int = 4096
    attention: str = "sdpa"
    bar: float | None = None
    with_liger: bool = False

    def with_config(self, **changes: Any) -> Model:
        return replace(self, config={**self.config, **changes})


_QWEN3 = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_OLMOE = {
    "num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
    "num_experts_per_tok": 8, "norm_topk_prob": False, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 50304,
}  # fmt: skip
_MIXTRAL = {
    "num_hidden_layers": 2, "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "sliding_window": None,
}  # fmt: skip
_GPT_OSS = {
    "num_hidden_layers": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "sliding_window": 128,
}  # fmt: skip
_GLM = {  # behind its dense first layer all are alike
    "num_hidden_layers": 2, "first_k_dense_replace": 0, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
_GRANITE = {
    "num_hidden_layers": 8, "hidden_size": 1536, "intermediate_size": 512, "num_local_experts": 40,
    "num_experts_per_tok": 8, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 49155,
    "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625, "tie_word_embeddings": True,
}  # fmt: skip
_DEEPSEEK = {  # its vocabulary, 129280, is cut: one layer of 61 would vanish behind the head
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 8192,
}  # fmt: skip

MODELS = MappingProxyType(
    {
        "Qwen3-30B-A3B": Model("qwen3_moe", _QWEN3, bar=1.30),
        "OLMoE-1B-7B": Model("olmoe", _OLMOE, bar=1.50),
        "Mixtral-8x7B": Model("mixtral", _MIXTRAL, bar=1.12),
        # Its attention has sinks, which PyTorch's own has not: "eager" stores every score.
        "gpt-oss-20b": Model("gpt_oss", _GPT_OSS, batch=8, sequence=1024, attention="eager", bar=1.35),
        "GLM-4.5-Air": Model("glm4_moe", _GLM),
        "Granite-3b-a800m": Model("granitemoe", _GRANITE),
        "DeepSeek-V3": Model("deepseek_v3", _DEEPSEEK, batch=2),
    }
)
_TINY = MappingProxyType(
    {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64,
        "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
        "sliding_window": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
)  # fmt: skip


def tiny(model: Model) -> Model:
    """The same architecture, small enough for any machine."""
    config = {key: _TINY.get(key, value) for key, value in model.config.items()}
    if model.model_type == "deepseek_v3":  # a head of its own for every query
        config["num_key_value_heads"] = config["num_attention_heads"]
    return replace(model, config=config, batch=2, sequence=32)


def build(model: Model, device: torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The model with random weights, in training mode, made on ``device``."""
    config = AutoConfig.for_model(model.model_type, use_cache=False, pad_token_id=None, **model.config)
    torch.manual_seed(seed)
    with device:
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=model.attention)
    built = built.to(device).train()
    if model.with_liger:
        liger_patches()[model.model_type](model=built, swiglu=False)
    return built


def liger_patches() -> Mapping[str, Any]:
    """Liger's patch of each ``model_type`` that it serves."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return MODEL_TYPE_TO_APPLY_LIGER_FN


# ---------------------------------------------------------------------------------------------------------- the steps


@dataclass(frozen=True, eq=False)
class Subject:
    """What is measured: the model, its tokens (batch, sequence), and where they are."""

    model: nn.Module
    ids: Tensor

    def step(self, implementation: str) -> Tensor:
        """Forward, loss and backward; every gradient is made anew. The loss."""
        self.model.set_experts_implementation(implementation)  # type: ignore[operator]
        self.model.zero_grad(set_to_none=True)
        loss: Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def release(self) -> None:
        """Gradients, and what PyTorch keeps of memory that is free."""
        self.model.zero_grad(set_to_none=True)
        if self.ids.is_cuda:
            torch.cuda.empty_cache()


def make(case: Model, device: torch.device) -> Subject:
    model = build(case, device, torch.bfloat16)
    integration.use(model)
    generator = torch.Generator(device).manual_seed(1)
    size = (case.batch, case.sequence)
    return Subject(model, torch.randint(case.config["vocab_size"], size, device=device, generator=generator))


def gradients(subject: Subject, implementation: str) -> tuple[float, Gradients]:
    """The loss and every parameter's gradient, which the model gives up."""
    loss = float(subject.step(implementation))
    found = {name: each.grad for name, each in subject.model.named_parameters() if each.grad is not None}
    subject.model.zero_grad(set_to_none=True)
    return loss, found


def difference(actual: Gradients, expected: Gradients) -> dict[str, float]:
    """RMS-relative, of the experts' parameters, the routers' and the rest."""
    assert actual.keys() == expected.keys(), "both have the same parameters"
    sums = {name: Difference() for name in ("experts", "router", "rest")}
    for name, gradient in expected.items():
        group = next((group for group, pattern in _GROUPS if pattern.search(name)), "rest")
        parts = zip(actual[name], gradient, strict=True) if gradient.ndim == 3 else [(actual[name], gradient)]
        for ours, theirs in parts:  # an expert at a time: differences take fp32 copies
            sums[group].add(ours, theirs.float())
    return {group: float(f"{each.relative():.3g}") for group, each in sums.items()}


def agree(subject: Subject, implementations: list[str]) -> dict[str, Row]:
    """Implementation, "eager" too, to its loss and its differences from `grouped_mm`."""
    found: dict[str, Row] = {}
    theirs, kept = gradients(subject, THEIRS)
    for name in dict.fromkeys([THEIRS, *implementations, REFERENCE]):
        try:
            loss, grads = (theirs, kept) if name == THEIRS else gradients(subject, name)
        except torch.OutOfMemoryError as error:
            found[name] = {"problem": ". ".join(str(error).split(". ")[:2])}
        else:
            found[name] = {"problem": None, "loss": loss, "loss_difference": abs(loss - theirs)}
            found[name]["grad_difference"] = difference(grads, kept)
            del grads
        subject.release()
        print(f"  {name}: {found[name]['problem'] or found[name]}", flush=True)
    return found


def measure(subject: Subject, names: list[str], args: argparse.Namespace) -> tuple[dict[str, list[float]], Row]:
    """Implementation to the milliseconds of a step by round, and to its peak of memory in bytes, None on a CPU."""
    peak: Row = dict.fromkeys(names)

    def timed(name: str) -> float:
        for _ in range(WARM_STEPS if peak[name] is None else 1):
            subject.step(name)
        timing.synchronize()
        if subject.ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        milliseconds = timing.wall_ms(partial(subject.step, name), args.steps)
        if subject.ids.is_cuda:
            peak[name] = max(peak[name] or 0, torch.cuda.max_memory_allocated())
        return milliseconds

    found = timing.in_turn({name: partial(timed, name) for name in names}, args.rounds)
    subject.release()
    return found, peak


def rows_of(case: Model, agreed: dict[str, Row], ms: dict[str, list[float]], peak: Row, names: list[str]) -> list[Row]:
    """A row for each implementation; ours has the ratios to `grouped_mm`, the noise and whether its bar is held."""
    rows = []
    for name in names:
        row: Row = {"implementation": name, **agreed[name]}
        if name in ms:
            row |= {"ms": timing.summary(ms[name]), "peak_bytes": peak[name]}
            row["tokens_per_s"] = round(1e3 * case.batch * case.sequence / statistics.median(ms[name]))
        if name == OURS and OURS in ms:
            eager = agreed[REFERENCE]
            row["noise"] = {key: eager.get(key) for key in ("problem", "loss_difference", "grad_difference")}
            row |= {"ratio": timing.ratio(ms[OURS], ms[THEIRS]), "bar": case.bar}
            row["memory_ratio"] = round(peak[OURS] / peak[THEIRS], 4) if peak[THEIRS] else None
            row["held"] = row["ratio"] >= (case.bar or 0) and (row["memory_ratio"] or 0) <= 1
        rows.append(row)
    return rows


def one_case(args: argparse.Namespace, name: str, case: Model) -> Iterator[list[Row]]:
    """A row of each implementation; none where the model itself needs more memory than there is."""
    try:
        yield implementations(args, name, case)
    except torch.OutOfMemoryError as error:
        print(f"{name} is left out: {error}", flush=True)


def implementations(args: argparse.Namespace, name: str, case: Model) -> list[Row]:
    subject = make(case, torch.device(args.device))
    parameters = sum(each.numel() for each in subject.model.parameters())
    layers, vocabulary = case.config["num_hidden_layers"], case.config["vocab_size"]
    where = {
        "case": name, "mode": MODE, "layers": layers, "batch": case.batch,
        "sequence": case.sequence,
        "attention": case.attention, "vocabulary": vocabulary, "parameters": parameters,
        "transformers": transformers.__version__, "liger": record.version("liger-kernel"), "rounds": args.rounds,
        "steps": args.steps,
    }  # fmt: skip
    print(f"{parameters / 1e9:.2f} B parameters, {args.rounds} rounds of {args.steps} steps", flush=True)
    names = list(dict.fromkeys([OURS, THEIRS, *args.implementations.split(",")]))
    agreed = agree(subject, names)
    ms, peak = measure(subject, [each for each in names if agreed[each]["problem"] is None], args)
    return [{**where, **row} for row in rows_of(case, agreed, ms, peak, names)]


def describe(row: Row) -> str:
    head = f"{row['case']:16} {row['implementation']:10}"
    if row["problem"]:
        return f"{head} {row['problem']}"
    memory = f", {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else ""
    line = f"{head} {row['ms']['median']:8.2f} ms, {row['tokens_per_s']} tokens/s{memory}, loss {row['loss']:.4f}"
    if "ratio" not in row:
        return line
    bar = "" if row["bar"] is None else f" of {row['bar']:.2f} asked"
    held = "held" if row["held"] else "MISSED"
    return f"{line}; {row['ratio']:.3f}x{bar}, memory {row['memory_ratio']}, {held}; gradients {_differences(row)}"


def _differences(row: Row) -> str:
    noise = row["noise"]["grad_difference"] or {}
    return ", ".join(f"{group} {e:.1e} (noise {noise.get(group)})" for group, e in row["grad_difference"].items())


def profile(args: argparse.Namespace, name: str, case: Model) -> None:
    """Print the longest kernels of a step of each implementation; all of them go to results/profiles."""
    subject = make(case, torch.device(args.device))
    folder = record.RESULTS / "profiles"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"hf-step-{name}-{record.commit()}.txt"
    for implementation in (OURS, THEIRS):
        for _ in range(WARM_STEPS):
            subject.step(implementation)
        rows = profiles.by_name(profiles.of_gpu(partial(subject.step, implementation)))
        title = f"{name}, {implementation}"
        profiles.write(path, title, rows)
        print(f"{title}: {sum(ms for _, ms, _ in rows):.2f} ms of kernels")
        for kernel, ms, count in rows[:TOP]:
            print(f"{ms:10.3f} ms {count:6d}  {kernel[:100]}", flush=True)
    print(f"all of them: {path.name}")


def cases_of(args: argparse.Namespace, names: str) -> dict[str, Model]:
    """The models asked for, changed as the options say; on a CPU small ones of the same architecture."""
    changes = {key: value for key in ("batch", "sequence", "attention") if (value := getattr(args, key)) is not None}
    inner = {"num_hidden_layers": args.layers, "vocab_size": args.vocabulary}
    inner = {key: value for key, value in inner.items() if value is not None}
    found = {}
    for name, case in selected("case", names, MODELS).items():
        case = tiny(case) if args.device == "cpu" else case
        if args.liger and case.model_type not in liger_patches():
            print(f"{name} is left out: Liger has no patch for {case.model_type}", flush=True)
            continue
        found[name] = replace(case.with_config(**inner), with_liger=args.liger, **changes)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="all")
    parser.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help=f"beside {OURS} and {THEIRS}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in a round, of each implementation")
    parser.add_argument("--profile", metavar="CASE", help="print the kernels of a step and measure nothing")
    parser.add_argument("--device", default="cuda", help='"cpu" runs tiny models, to see that everything works')
    for name in ("batch", "sequence", "layers", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, help="instead of the case's")
    parser.add_argument("--liger", action="store_true", help="all but the experts by Liger, where it serves the model")
    parser.add_argument("--attention", help="transformers' attn_implementation instead of the case's")
    args = parser.parse_args(arguments)
    if args.profile:
        for name, case in cases_of(args, args.profile).items():
            profile(args, name, case)
    else:
        each_case(
            NAME_WITH_LIGER if args.liger else NAME, cases_of(args, args.cases), partial(one_case, args), describe
        )


if __name__ == "__main__":
    main()
