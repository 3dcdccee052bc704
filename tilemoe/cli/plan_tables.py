"""The tables of ``tilemoe plan``, from the values that its JSON has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilemoe.perf.layer import sums

_GIB, _MIB = 2**30, 2**20
_MEMORY = (
    ("weight_bytes", "weights", "of the experts"),
    ("saved_bytes", "saved", "between forward and backward, beside x"),
    ("inference_peak_bytes", "peak inference", "beside x and the weights"),
    ("forward_peak_bytes", "peak forward", "beside x and the weights"),
    ("backward_peak_bytes", "peak backward", "with all gradients"),
)
_ROUTER = ("logits", "route")  # prefixes of the names of its steps
_FP8_PEAKS = "               peaks are those of bf16: in FP8 0.85 to 1.43 times as much was measured (docs/fp8.md)"


def layer_lines(plan: Mapping[str, Any]) -> list[str]:
    """The layer, memory, padding, its steps and times, and the other designs."""
    return [
        *_head(plan),
        "",
        *(f"{label:15}{plan['memory'][key] / _GIB:8.2f} GiB   {note}" for key, label, note in _MEMORY),
        *([_FP8_PEAKS] if plan["shape"]["dtype"] == "fp8" else []),
        _padding(plan["padding"]),
        "",
        *_step_table(plan["steps"]),
        *(
            f"{part:9} {times['predicted_ms']:.3f} ms predicted ({plan['gpu']['rates']}), "
            f"no faster than {times['roofline_ms']:.3f} ms"
            for part, times in plan["times"].items()
        ),
        "",
        *_others(plan),
    ]


def _head(plan: Mapping[str, Any]) -> list[str]:
    shape, gpu = plan["shape"], plan["gpu"]
    sizes = (
        f"T={shape['num_tokens']} d={shape['hidden_size']} n={shape['intermediate_size']} E={shape['num_experts']} "
        f"K={shape['num_experts_per_tok']}"
    )
    changes = ", ".join(f"{name} {is_} (was {was})" for name, (was, is_) in plan["overridden"].items())
    kept = ", h kept in fp8" if shape["save"] == "fp8" else ""
    lines = [f"{plan['source']}: {sizes}, {'gated' if shape['is_gated'] else 'ungated'}, {shape['dtype']}{kept}"]
    if changes:
        lines.append(f"not {plan['source']} as published: {changes}")
    ceilings = f"{gpu['tflops']:g} TFLOP/s and {gpu['tbps']:g} TB/s ({gpu['ceilings']})"
    lines.append(f"{gpu['name']}: {ceilings}, ridge {gpu['ridge_flop_per_byte']:.0f} FLOP/byte; {gpu['source']}")
    rates = "fitted to recorded times" if gpu["rates"] == "measured" else "an H200's, scaled by what makers state"
    return [*lines, f"predictions: {gpu['rates']}, {rates}{gpu['note']}"]


def _padding(padding: Mapping[str, Any]) -> str:
    tile = f"rows beyond the tokens', expected of random routing in tiles of {padding['tile_rows']}"
    return f"{'padding':15}{100 * padding['waste']:8.1f} %     {tile}"


def _step_table(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"{'step':28}{'dtype':>6}{'GFLOP':>11}{'MiB':>9}{'FLOP/byte':>11}{'roofline ms':>13}{'predicted ms':>14}  bound"
    ]
    for step in steps:
        name, predicted = f"{step['step']:28}{step['dtype']:>6}", f"{step['predicted_ms']:14.3f}"
        if "flops" not in step:
            lines.append(f"{name}{'':44}{predicted}  launches")
            continue
        lines.append(
            f"{name}{step['flops'] / 1e9:11,.1f}{step['bytes'] / _MIB:9,.0f}{step['flop_per_byte']:11,.0f}"
            f"{step['roofline_ms']:13.3f}{predicted}  {step['bound']}"
        )
    return lines


def _others(plan: Mapping[str, Any]) -> list[str]:
    """One line for tilemoe and each other design: GiB saved, peaks, GiB moved, padding, forward and backward times."""
    router = [step for step in plan["steps"] if step["step"].startswith(_ROUTER)]
    experts = [step for step in plan["steps"] if step not in router]
    of_router = sums(router, "predicted_ms")
    ours = {
        **plan["memory"],
        "padding": plan["padding"],
        "moved_bytes": sums(experts, "bytes"),
        "roofline_ms": sums(experts, "roofline_ms"),
        "predicted_ms": {part: times["predicted_ms"] - of_router[part] for part, times in plan["times"].items()},
    }
    both = "forward backward"
    lines = [
        f"{'':14}{'':>6}{'peak, GiB':>24}{'moved, GiB':>24}{'':>11}{'no faster than, ms':>20}{'predicted, ms':>18}",
        f"{'experts alone':14}{'kept':>6}{both:>24}{both:>24}{'padding':>11}{both:>20}{both:>18}",
    ]
    for name, design in {"tilemoe": ours, **plan["others"]}.items():
        moved, least, predicted = (design[key] for key in ("moved_bytes", "roofline_ms", "predicted_ms"))
        lines.append(
            f"{name:14}{design['saved_bytes'] / _GIB:6.2f}"
            f"{design['forward_peak_bytes'] / _GIB:15.2f}{design['backward_peak_bytes'] / _GIB:9.2f}"
            f"{moved['forward'] / _GIB:15.2f}{moved['backward'] / _GIB:9.2f}{100 * design['padding']['waste']:9.1f} %"
            f"{least['forward']:11.3f}{least['backward']:9.3f}{predicted['forward']:10.3f}{predicted['backward']:8.3f}"
        )
    return lines


def other_lines(plan: Mapping[str, Any]) -> list[str]:
    """Each step of the other designs."""
    return [
        line
        for name, design in plan["others"].items()
        for line in ("", f"{name}, tiles of {design['padding']['tile_rows']} rows", *_step_table(design["steps"]))
    ]


def exchange_lines(exchange: Mapping[str, Any]) -> list[str]:
    """The layer over several hosts, by one exchange and by two levels."""
    hosts, gpus = exchange["hosts"], exchange["gpus_per_host"]
    forward, backward = exchange["computed_ms"]
    where = f"experts shared by {hosts} hosts x {gpus} GPUs, each with its tokens"
    lines = [
        f"{where}: {exchange['link_gbps']:.0f} GB/s in a host, {exchange['network_gbps']:g} GB/s between hosts",
        f"computed alone {forward:.3f} ms forward, {backward:.3f} ms backward; of the exchange nothing is hidden",
        "",
        f"{'':14}{'copies between hosts':>22}{'within':>9}{'exchange, ms':>15}{'forward, ms':>14}{'backward, ms':>14}",
    ]
    for name, way in exchange["ways"].items():
        forward, backward = way["layer_ms"]
        lines.append(
            f"{name:14}{way['network_copies']:22.2f}{way['link_copies']:9.2f}{way['exchange_ms']:15.3f}{forward:14.3f}"
            f"{backward:14.3f}"
        )
    return lines


def training_lines(train: Mapping[str, Any]) -> list[str]:
    """The model, and a column of memory and speed for each setup."""
    setups: Sequence[Mapping[str, Any]] = train["setups"]
    sizes = f"{train['parameters'] / 1e9:.2f} B parameters, {train['active_parameters'] / 1e9:.2f} B active"
    speed = f"{100 * train['mfu']:g}% MFU of {train['stated_tflops']:g} TFLOP/s before what is recomputed"
    longer = f", beyond its {train['max_seq_len']}" if train["seq_len"] > train["max_seq_len"] else ""
    tokens = f"{train['flops_per_token'] / 1e9:.2f} GFLOP per token in sequences of {train['seq_len']}{longer}"
    where = f"{train['gpus']} GPUs by FSDP" if train["gpus"] > 1 else "one GPU alone"
    room = f"{100 * train['usable']:g}% of {train['memory_bytes'] / 1e9:g} GB"
    lines = [
        f"training: {sizes}, {tokens}",
        f"on {where}, AdamW; EP: GPUs that share the experts; recomputed: the trainer's --parallel.checkpointing",
        f"assumed: {speed}, {room} usable",
        "",
        _row("", [f"{setup['dtype']}, EP {setup['expert_parallel']}" for setup in setups]),
        _row("fewest GPUs", [str(setup["fewest_gpus"] or "none fit") for setup in setups]),
        *_memory_rows(setups),
        _row("tokens/day, billions", [_gb(setup["tokens_per_day"]) for setup in setups]),
    ]
    if train["tokens_per_day_wanted"] is not None:
        label = f"GPUs for {train['tokens_per_day_wanted'] / 1e9:g} billion"
        lines.append(_row(label, [str(setup["gpus_for_tokens_per_day"] or "-") for setup in setups]))
    return lines + (_proposal_lines(train) if "proposals" in train else [])


def _proposal_lines(train: Mapping[str, Any]) -> list[str]:
    """The proposals of `tilemoe.perf.proposal`, one line for each card and checkpointing mode."""
    gpus, sequences = train["gpus"], train["sequences"]
    where = f"proposed for steps of {gpus * sequences} sequences, {sequences} of each of {gpus} GPUs"
    head = (
        "card, GB",
        "recomputed",
        "micro-batches",
        "kept between",
        "EP",
        "peak, GB",
        "step, ms",
        "tokens/s of a GPU",
    )
    lines = [
        "",
        f"{where}: the first line, which {train['taken_by']} takes;",
        "then with more or less recomputed, and on such GPUs with other memory; EP: GPUs that share the experts",
        "".join(f"{name:>{width}}" for name, width in zip(head, (8, 12, 16, 23, 4, 10, 10, 19), strict=True)),
    ]
    for row in train["proposals"]:
        start = f"{row['memory_gb']:8g}{row['checkpointing']:>12}"
        if (found := row["settings"]) is None:
            fewest = row["fewest_gpus"]
            lines.append(f"{start}   none fits" + (f", on {fewest} GPUs one sequence would" if fewest else ""))
            continue
        parts = f"{found['train.accumulation']} of {found['data.batch_size']}"
        lines.append(
            f"{start}{parts:>16}{found['parallel.between_micro_batches']:>23}{found['parallel.expert']:>4}"
            f"{row['bytes'] / 1e9:10.1f}{1e3 * row['seconds']:10,.0f}{row['tokens_per_second']:19,.0f}"
        )
    return lines


def adapter_lines(tuning: Mapping[str, Any]) -> list[str]:
    """The model, and a column of memory for each way to store the frozen experts."""
    setups: Sequence[Mapping[str, Any]] = tuning["setups"]
    room = f"{100 * tuning['usable']:g}% of {tuning['memory_bytes'] / 1e9:g} GB"
    of_attention = f", {tuning['attention_rank']} of attention's," * (tuning["attention_rank"] != tuning["rank"])
    of_which = f"{tuning['trained'] / 1e6:,.0f} M of adapters of rank {tuning['rank']}{of_attention}"
    return [
        f"training: {of_which} on {tuning['parameters'] / 1e9:.2f} B parameters, in sequences of {tuning['seq_len']}",
        f"on one GPU, {tuning['optimizer']}; recomputed: the trainer's --parallel.checkpointing",
        f"assumed: {tuning['attention']} attention, {room} usable, 95% of a card",
        "",
        _row("experts", [setup["experts"] for setup in setups]),
        *_memory_rows(setups),
        *(
            _row(f"on {card} GiB", [str(setup["micro_batch_of_card"][card] or "none") for setup in setups])
            for card in setups[0]["micro_batch_of_card"]
        ),
    ]


def _memory_rows(setups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        _row("recomputed", [setup["checkpointing"] for setup in setups]),
        _row("largest micro-batch", [str(setup["micro_batch"] or "none fits") for setup in setups]),
        *(_row(f"{part}, GB", [_gb(setup["memory"][part]) for setup in setups]) for part in setups[0]["memory"]),
        _row("all, GB", [_gb(sum(setup["memory"].values())) for setup in setups]),
    ]


def _row(label: str, cells: Iterable[str]) -> str:
    return f"{label:22}" + "".join(f"{cell:>13}" for cell in cells)


def _gb(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e9:,.2f}"
