"""The tables of the README and of docs/results.md are those of the newest rows under results/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README, RESULTS = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs" / "results.md"))
LAYER = re.compile(r"^\| ([\w.-]+) \(([\d, ]+)\) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)
STEP = re.compile(r"^\| ([\w.-]+) \((\d+)\) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)
PARTS = ("forward", "backward")
SIZES = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


def newest(name: str, **wanted: str) -> dict[str, dict[str, Any]]:
    """Case to its newest row of results/<name>.jsonl with these values."""
    rows = map(json.loads, (ROOT / "results" / f"{name}.jsonl").read_text().splitlines())
    return {row["case"]: row for row in rows if wanted.items() <= row.items()}


LAYERS = newest("layer", mode="sustained", contestant="sonic-moe")
H100 = "NVIDIA H100 80GB HBM3"
STEPS = newest("hf_step", implementation="tilemoe", gpu="NVIDIA H200")


@pytest.mark.parametrize(
    ("page", "rows"),
    [(README, newest("layer", mode="alone", contestant="sonic-moe", gpu=H100)), (RESULTS, LAYERS)],
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


def test_the_steps_of_models_are_the_newest_recorded() -> None:
    told = {case: numbers for case, *numbers in STEP.findall(RESULTS)}
    assert told.keys() == STEPS.keys() - {"gpt-oss-20b"}  # two kinds of attention in a row
    for case, found in told.items():
        row = STEPS[case]
        ms = 1e3 * row["batch"] * row["sequence"] / row["tokens_per_s"]
        assert found == [str(row["layers"]), f"{ms:.1f}", f"{row['ratio']:.2f}", f"{row['memory_ratio']:.2f}"], case


def test_the_steps_of_models_on_an_h100_are_the_newest_recorded() -> None:
    found = {}
    for attention in ("eager", "flex_attention", "sdpa"):
        rows = newest("hf_step", implementation="tilemoe", gpu=H100, attention=attention)
        found |= {(case, attention): f"{row['ratio']:.2f}" for case, row in rows.items()}
    gpt_oss = " / ".join(found["gpt-oss-20b", attention] for attention in ("eager", "flex_attention"))
    qwen3, olmoe, mixtral = (found[name, "sdpa"] for name in ("Qwen3-30B-A3B", "OLMoE-1B-7B", "Mixtral-8x7B"))
    assert f"the first four rows are {gpt_oss}, {qwen3}, {olmoe} and {mixtral}." in RESULTS


def test_what_hosts_do_on_the_smallest_cases_is_recorded() -> None:
    """Host milliseconds at one commit, and sonic-moe's times of a machine with a faster host over ours."""
    names = ("7B-n256", "7B-n1024", "1.4B-n256")
    rows = {
        (row["commit"][:7], row["contestant"], row["case"]): row
        for row in map(json.loads, (ROOT / "results" / "layer.jsonl").read_text().splitlines())
        if row["mode"] == "sustained"
    }

    def both(value: str, commit: str, contestant: str) -> list[float]:
        found = [rows[commit, contestant, name][value] for name in names]
        return [each["median"] if isinstance(each, dict) else each for each in found]

    theirs, ours = (both("forward_host_ms", "3462e76", name) for name in ("sonic-moe", "tilemoe"))
    faster, here = both("forward_ms", "8c06118", "sonic-moe"), both("forward_ms", "3462e76", "tilemoe")
    least = [f"{limit(hosts):.1f}" for hosts in (theirs, ours) for limit in (min, max)]
    ratios = [f"{them / us:.2f}" for them, us in zip(faster, here, strict=True)]
    for page in (README, RESULTS):
        assert re.search(rf"{least[0]} to {least[1]} ms.*{least[2]} to {least[3]}", page.replace("\n", " "))
        assert f"{ratios[0]}, {ratios[1]} and {ratios[2]}" in page.replace("\n", " ")
    slow = [f"{rows['3462e76', 'sonic-moe', name]['forward_ratio']:.2f}" for name in names]
    assert f"{slow[0]}, {slow[1]} and {slow[2]}" in README.replace("\n", " ")
    assert f"{', '.join(f'{each:.2f}' for each in faster[:2])} and {faster[2]:.2f} ms" in RESULTS.replace("\n", " ")


def test_what_fp8_gains_is_the_newest_recorded_on_every_page() -> None:
    """Least and most of the cases, with the host or without: the forward, and both parts together."""
    forward, both = [], []
    for row in newest("fp8_layer", contestant="tilemoe[hopper_fp8]", gpu="NVIDIA H200").values():
        forward.append(1 / row["forward_ratio"])
        times = [sum(each[f"{part}_ms"]["median"] for part in PARTS) for each in (row["baseline"], row)]
        both.append(times[0] / times[1])
    ranges = [f"{min(each):.2f} to {max(each):.2f}" for each in (forward, both)]
    for page in ("docs/results.md", "docs/fp8.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text(encoding="utf-8").replace("\n", " ")
        told = rf"H200:?(?: \w+ layer's)? forward (?:is )?{ranges[0]} times.*?{ranges[1]}\s+times"
        assert re.search(told, text), page


def test_what_is_left_without_hosts_is_the_newest_recorded() -> None:
    rows = newest("layer", mode="alone", contestant="sonic-moe", gpu="NVIDIA H200").values()
    least_and_most = [
        f"{min(ratios):.2f} to {max(ratios):.2f}"
        for part in PARTS
        if (ratios := [row[f"{part}_ratio"] for row in rows])
    ]
    assert f"{least_and_most[0]} times as fast as sonic-moe's, backwards {least_and_most[1]}" in RESULTS
    assert f"{least_and_most[0]} times as fast" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_each_number_of_the_readme_is_on_the_list() -> None:
    """What its results say apart from the table: each is in a row of docs/results.md, with how to have it again."""
    prose = README.split("## Results")[1].split("## Why this one")[0]
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("|"))
    listed = RESULTS.split("## The README's numbers")[1].split("## The layer")[0]
    numbers = set(re.findall(r"(?<![\w.])\d\.\d+(?![\w.]*\d)", prose)) - {"0.1"}
    assert len(numbers) >= 10
    assert [number for number in sorted(numbers) if number not in listed] == []
