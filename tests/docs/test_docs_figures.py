"""The tables that say what was measured are those of the newest rows under results/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tilemoe.bench import record
from tilemoe.bench.record import newest

ROOT = Path(__file__).parents[2]
PARTS = ("forward", "backward")
GIB, GB = 2**30, 10**9
TEXTS = ("corpus", "ways_text")  # of results/ways.jsonl
README, RESULTS = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs" / "results.md"))
LAYER = re.compile(r"^\| ([\w.-]+) \(([\d, ]+)\) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|(?: [^|]+ \|)?$", re.M)
ON_H200 = re.compile(r"^\| ([\w.-]+) \([\d, ]+\)(?: \| [^|]+){3} \| ([^|]+) \|$", re.M)
STEP = re.compile(r"^\| ([\w.-]+) \((\d+)\) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)
SIZES = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
LAYERS = newest("layer", "case", mode="sustained", contestant="sonic-moe")
H100 = "NVIDIA H100 80GB HBM3"
STEPS = newest("hf_step", "case", implementation="tilemoe", gpu="NVIDIA H200")


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def text_trained_on(row: dict[str, Any]) -> str:
    return str(row["options"][row["options"].index("--data.corpus") + 1])


def loss_of(row: dict[str, Any]) -> float:
    """Nats per held-out token at the end."""
    return float(row["heldout_nats_per_token"][-1][1])


def in_percent(loss: float, base: float) -> str:
    return f"{100 * (loss / base - 1):+.2f}%".replace("0.", ".")


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the page's table whose first line begins with ``first``, but for that line and the rule below it."""
    lines = iter(text_of(page).splitlines())
    assert any(line.startswith(first) for line in lines), first
    next(lines)
    cells = []
    for line in lines:
        if not line.startswith("|"):
            return cells
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells


def test_ways_of_training() -> None:
    """Rounding and FP8 beside top-K; a second seed of top-K gives the spread."""
    runs = {(row["way"], row["seed"], text_trained_on(row), row["parameters"]): row for row in record.rows("ways")}
    models = dict.fromkeys((text, parameters) for way, _, text, parameters in runs if way == "nearest")
    told, changes, gains = [], [], []
    for text, parameters in models:
        topk, nearest = (runs[way, 0, text, parameters] for way in ("top-K", "nearest"))
        before, after = loss_of(topk), loss_of(nearest)
        tokens = f"{topk['training_tokens'] / 1e6:.0f} M"
        speeds = f"{topk['tokens_per_second']:,.0f}; {nearest['tokens_per_second']:,.0f}"
        changes.append(100 * (after / before - 1))
        gains.append(100 * (nearest["tokens_per_second"] / topk["tokens_per_second"] - 1))
        told.append([tokens, f"{before:.4f}", f"{after:.4f} ({in_percent(after, before)})", speeds])
    assert [row[1:] for row in table("rounding.md", "| experts, K, text")] == told
    (of_fp8,) = (key[2:] for key in runs if key[0] == "fp8")
    assert f"at most {max(gains):.1f}% faster" in text_of("rounding.md")
    dropped = max(row["dropped_pairs"] for row in runs.values())
    assert f'"nearest" dropped at most {100 * dropped:.1f}% of the pairs' in text_of("rounding.md")
    fp8, bf16, other = (runs[run + of_fp8] for run in (("fp8", 0), ("top-K", 0), ("top-K", 1)))
    spread = in_percent(loss_of(other), loss_of(bf16)).removeprefix("+")
    assert f"On the second text another seed of top-K ended {spread} higher." in text_of("rounding.md")
    apart = f"| {in_percent(loss_of(fp8), loss_of(bf16))} at the end; two bf16 seeds differ by {spread}; "
    rates = (f"{row['tokens_per_second']:,.0f}" for row in (fp8, bf16))
    assert apart + "{} tokens/s, bf16 {} |".format(*rates) in text_of("fp8.md")
    assert f"[{100 * (loss_of(fp8) / loss_of(bf16) - 1):.1f}% above](results/figures/ways.svg) bf16's loss" in README
    assert f"[{min(changes):+.1f} to {max(changes):+.1f}% of top-K's loss](docs/rounding.md)" in README


def test_near_ties() -> None:
    """Why an export's loss in transformers is not ours to the last bits."""
    (row,) = record.rows("near_ties", relative_noise_of_embeddings=1e-6)
    keys = ("largest_change_of_a_token", "largest_change_of_a_token_before_any", "relative_change_of_mean")
    told = "by up to {:.1e} nats a token; elsewhere by up to {:.1e}, and the mean by a share of {:.1e}"
    assert told.format(*map(row.get, keys)) in text_of("lab/routing.md")
    assert f"changed {row['choices_changed']} of {row['choices']:,} choices" in text_of("lab/routing.md")
    apart: dict[str, list[float]] = {text: [] for text in TEXTS}
    for row in record.rows("ways"):
        losses = row["exported_nats_per_token"]
        apart[text_trained_on(row)].append(1e6 * abs(losses["transformers"] / losses["tilemoe"] - 1))
    told = "from transformers by at most {:.1f} millionths on the first text and {:.1f} on the second"
    assert told.format(*(max(apart[text]) for text in TEXTS)) in " ".join(text_of("lab/routing.md").split())


def test_reading_with_checksums() -> None:
    ratios = newest("load", "page_cache", mode="load_hf", beside=None)
    warm, cold = (round(100 * abs(ratios[cache]["ratio"] - 1)) for cache in ("warm", "cold"))
    page = text_of("faults.md")
    assert f"costs {warm}% when 2.8 GB of `1b` are read from the page cache" in page
    assert f"saves {cold}% from a disk" in page


def test_token_rounding() -> None:
    pairs, topk = {}, {}
    for row in record.rows("token_rounding", mode="sustained"):
        topk = row if row["contestant"] == "top-K" else topk  # a job times it first
        if row["contestant"] == "nearest":
            pairs[row["case"], row["kernels"]] = topk, row

    def of(layer: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """Its padding in %, its rows of top-K and of "nearest"."""
        name, _, portable = layer.partition(", ")
        case = "Qwen3-Next-16k" if "Qwen" in name else "-".join(name.split()[:3])
        topk, nearest = pairs[case, "triton" if portable else "chosen"]
        assert topk["case"] == case
        assert "Qwen" in name or name.endswith(f"K{topk['num_experts_per_tok']}")
        return f"{topk['waste_percent']:.0f}", topk, nearest

    for layer, *told in table("rounding.md", "| layer | padding of top-K"):
        padding, _, row = of(layer)
        assert told == [f"{padding}%", f"{row['forward_speedup']:.2f}", f"{row['total_speedup']:.2f}"], layer
    for layer, *told in table("lab/rounding.md", "| case | padding"):
        padding, topk, row = of(layer)
        times = [" + ".join(f"{each[f'{part}_ms']['median']:.3f}" for part in PARTS) for each in (topk, row)]
        speeds = [f"{row['forward_speedup']:.3f}", f"{row['total_speedup']:.3f}", f"{row['routing_percent']:.1f}%"]
        assert told == [f"{padding} / {topk['waste_half_tile_percent']:.0f}%", *times, *speeds], layer


def test_fp8_other_contestants_and_gpt_oss() -> None:
    rows = newest("fp8_layer", "case", "contestant", mode="sustained", gpu="NVIDIA H200")
    rows |= newest("fp8_layer", "case", "contestant", mode="alone", gpu="NVIDIA H200")
    for layer, *told in table("fp8.md", "| (T, d, n, E, K) | forward"):
        case = layer.partition(" (")[0].replace("32 of its experts", "32 experts")
        bf16, row = rows[case, "tilemoe"], rows[case, "tilemoe[hopper_fp8]"]
        for part, cells in zip(PARTS, (told[:3], told[3:6]), strict=True):
            times = [f"{each[f'{part}_ms']['median']:.2f}" for each in (bf16, row)]
            assert cells == [*times, f"{1 / row[f'{part}_ratio']:.2f}x"], layer
    names = {"ScatterMoE 0.3.0, same rounds": "scattermoe", "PyTorch's grouped_mm": "grouped_mm"}
    for contestant, *told in table("results.md", "| contestant |"):
        rows = newest("layer", "case", mode="sustained", contestant=names[contestant])
        for case, cell in zip(("7B-n256", "7B-n1024", "1.4B-n256", "OLMoE"), told, strict=True):
            assert not cell or cell == " / ".join(f"{rows[case][f'{part}_ratio']:.2f}" for part in PARTS), case
    steps = newest("hf_step", "attention", implementation="tilemoe", gpu="NVIDIA H200", case="gpt-oss-20b")
    both = [steps[attention] for attention in ("eager", "flex_attention")]
    times = " / ".join(f"{1e3 * row['batch'] * row['sequence'] / row['tokens_per_s']:.1f}" for row in both)
    ratios = [" / ".join(f"{row[name]:.2f}" for row in both) for name in ("ratio", "memory_ratio")]
    assert table("results.md", "| model (layers) |")[0][1:] == [times, *ratios]


def test_few_tokens() -> None:
    rows = newest("small_tokens", "case", "mode", "tokens")
    for tokens, *told in table("lab/inference.md", "| tokens | Qwen3"):
        found = [rows[case, mode, int(tokens)] for case in ("Qwen3-30B-A3B", "OLMoE") for mode in ("graph", "eager")]
        times = [1e3 * row["ms"]["tilemoe"]["median"] for row in found]
        digits = [".1f", ".0f"] * 2
        for at, (row, time, form) in enumerate(zip(found, times, digits, strict=True)):
            assert told[2 * at] == format(time, form)
            assert float(told[2 * at + 1]) == pytest.approx(row["ratio"], abs=0.00501), (tokens, row["mode"])


def test_a_layer_on_two_cores() -> None:
    rows = newest("cpu_layer", "what", "routing", "dtype")
    for what, routing, *told in table("results.md", "| | routing | bf16"):
        found = [rows[what.partition(" ")[0], routing, dtype] for dtype in ("bfloat16", "float32")]
        times = [
            " / ".join(f"{row[f'{each}_ms']['total']:.1f}" for each in ("tilemoe", "transformers")) for row in found
        ]
        assert told == [times[0], f"{found[0]['speedup']:.2f}x", times[1], f"{found[1]['speedup']:.2f}x"], what


def test_the_tiny_recipe_and_its_twin() -> None:
    rows = newest("tiny", "recipe", "seed")
    for recipe, *told in table("results.md", "| recipe | parameters | MFLOP"):
        found = [rows[recipe.split("`")[1], seed] for seed in range(3)]
        losses = ", ".join(f"{row['heldout_nats_per_byte']:.3f}" for row in found)
        sizes = [f"{found[0]['parameters'] / 1e6:.2f} M", f"{found[0]['flops_per_token'] / 1e6:.2f}"]
        assert [*told[:2], told[2].removesuffix(" (three seeds)")] == [*sizes, losses]


def test_optimisers() -> None:
    rates = (5e-4, 1e-3, 2e-3)
    rows = newest("optimizers", "optimizer", "steps", "lr", recipe="single-gpu")
    told = {name: cells for name, *cells in table("results.md", "| optimiser |")}
    for name, cells in told.items():
        optimizer, steps = name.split()[0].strip(",").lower(), int(name.split()[1])
        for rate, cell in zip(rates, cells, strict=True):
            row = rows.get((optimizer, steps, rate))
            assert row is None or f"{row['heldout_nats_per_byte']:.3f}" in cell, (name, rate)
    whole = [f"{row['heldout_nats_per_byte']:.3f}" for row in newest("end_to_end", "commit").values()]
    assert whole == [told["AdamW, 770 steps"][1], told["Muon, 770 steps"][1], told["Muon, 770 steps"][2].split(";")[0]]


def test_megatron() -> None:
    rows, gpus = newest("megatron", "gpus", "contestant"), ""
    for number, experts, *told in table("integrations.md", "| GPUs | experts | step, ms"):
        gpus = number[:1] or gpus
        row = rows[int(gpus), {"`SequentialMLP`": "sequential"}.get(experts, experts)]
        mean = f"{row['loss_difference']['mean']:.1e}".replace("e-0", "e-") if told[2] else ""
        assert told == [f"{row['step_ms']['median']:.1f}", f"{row['peak_bytes'] / GB:.2f}", mean], (gpus, experts)


def test_liger() -> None:
    rows = newest("hf_step_liger", "case", "layers", implementation="tilemoe")
    for model, *told in table("integrations.md", "| model (layers) | ours with Liger"):
        name, layers = model.rstrip(")").split(" (")
        row = rows[name, int(layers)]
        assert told == [f"{row['ms']['median']:.1f}", f"{row['ratio']:.2f}", f"{row['memory_ratio']:.2f}"], model


def test_log_probabilities() -> None:
    rows = newest("grpo", "model", "replay", mode="log_probs")
    names = (
        "dense, transformers",
        *(f"experts, {each}" for each in ("transformers", "tilemoe", "tilemoe, fp8", "tilemoe, batch")),
    )
    for name, (_, *told) in zip(names, table("replay.md", "| model | without replay"), strict=True):
        found = [rows.get((name, replayed)) for replayed in (False, True)]
        assert told == [f"{row['mean']:.4f}" if row else "" for row in found], name


def test_fine_tuning() -> None:
    rows = newest("finetune", "case", "experts", "implementation", "linear", mode="sft", tokens=4096, layers=48)
    rows |= newest("finetune", "case", "experts", "implementation", "linear", mode="sft", layers=24)
    case = ""
    for model, experts, attention, *told in table("fine-tuning.md", "| model | experts | attention"):
        case, (kind, _, by) = model or case, experts.replace("`", "").partition(", ")
        row = rows[case, kind, by or "tilemoe", attention == "NF4"]
        memory, loading = (row["reserved_bytes"] + row["context_bytes"]) / GIB, row["loading"]
        host, seconds = loading["host_anonymous_bytes"] / GB, loading["seconds"]
        assert told == [f"{memory:.1f}", f"{host:.1f}", f"{seconds + 1e-9:.0f}", f"{row['tokens_per_second']:,}"], (
            experts
        )
    rows = newest("finetune", "case", "experts", mode="train")
    for model, experts, *told in table("fine-tuning.md", "| model | experts | GPU memory"):
        case, row = model or case, rows[model or case, experts.replace("`", "")]
        memory, host = row["card_bytes"] / GIB, row["loading"]["host_anonymous_bytes"] / GB
        assert told == [f"{memory:.1f}", f"{host:.1f}", f"{row['tokens_per_second']:,}"], experts
    rows = newest("nf4_adapters", "size", "storage", mode="step")
    for layer, tokens, *told in table("fine-tuning.md", "| layer | tokens | bf16, ms"):
        size = layer if tokens == "16384" else f"{layer}, {tokens} tokens"
        times = [f"{rows[size, storage]['ms']['median']:.2f}" for storage in ("bf16", "nf4")]
        assert told == [*times, f"{rows[size, 'nf4']['speed']:.2f}x"], size


@pytest.mark.parametrize(
    ("page", "rows"),
    [(README, newest("layer", "case", mode="alone", contestant="sonic-moe", gpu=H100)), (RESULTS, LAYERS)],
    ids=["README", "results"],
)
def test_the_layer_s_table_is_the_newest_recorded(page: str, rows: dict[str, dict[str, Any]]) -> None:
    told = {case: (shape, *numbers) for case, shape, *numbers in LAYER.findall(page) if "," in shape}
    assert told.keys() == rows.keys()
    for case, row in rows.items():
        ours = " / ".join(f"{row['baseline'][f'{part}_ms']['median']:.2f}" for part in PARTS)
        pairs = [" / ".join(f"{row[f'{part}_{kind}']:.2f}" for part in PARTS) for kind in ("ratio", "peak_ratio")]
        assert told[case] == (", ".join(str(row[size]) for size in SIZES), ours, *pairs), case
        assert row["commit"][:7] in page, case


def test_the_readme_s_last_column_is_the_newest_of_an_h200() -> None:
    rows = newest("layer", "case", mode="alone", contestant="sonic-moe", gpu="NVIDIA H200")
    told = {case: cell for case, cell in ON_H200.findall(README) if cell != "–"}
    assert told == {case: " / ".join(f"{row[f'{part}_ratio']:.2f}" for part in PARTS) for case, row in rows.items()}
    assert {row["commit"][:7] in README for row in rows.values()} == {True}


def test_the_steps_of_models_are_the_newest_recorded() -> None:
    told = {case: numbers for case, *numbers in STEP.findall(RESULTS)}
    assert told.keys() == STEPS.keys() - {"gpt-oss-20b"}  # two kinds of attention in a row
    for case, found in told.items():
        row = STEPS[case]
        ms = 1e3 * row["batch"] * row["sequence"] / row["tokens_per_s"]
        assert found == [str(row["layers"]), f"{ms:.1f}", f"{row['ratio']:.2f}", f"{row['memory_ratio']:.2f}"], case


def test_each_number_of_the_readme_is_on_the_list() -> None:
    """What its results say apart from the table: each is in a row of docs/results.md, with how to have it again."""
    prose = README.split("## Results")[1].split("## Why this one")[0]
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("|"))
    listed = RESULTS.split("## The README's numbers")[1].split("## The layer")[0]
    numbers = set(re.findall(r"(?<![\w.])\d\.\d+(?![\w.]*\d)", prose)) - {"0.1"}
    assert len(numbers) >= 10
    assert [number for number in sorted(numbers) if number not in listed] == []
