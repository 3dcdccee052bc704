"""What the golden hashes see and what they do not, how they are compared, and that results repeat."""

import json
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import torch

CPU = torch.device("cpu")
ONE = torch.arange(24.0).view(2, 3, 4)
OTHERS = {
    "a bit": torch.cat([ONE[:1], ONE[1:] * (1 + 2**-23)]),
    "the dtype": ONE.view(torch.int32),
    "the shape": ONE.view(2, 4, 3),
    "the strides": ONE.transpose(1, 2).contiguous().transpose(1, 2),
    "the sign of zero": torch.cat([-ONE[:1, :1, :1], ONE.flatten()[1:].view(1, 1, -1)], dim=2).view(2, 3, 4),
    "a NaN": ONE.masked_fill(ONE == 5, float("nan")),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_hash_sees(what: str) -> None:
    assert golden.digest(OTHERS[what]) != golden.digest(ONE)
    assert golden.digest(ONE.clone().requires_grad_()) == golden.digest(ONE)


def test_a_case_repeats_and_a_bit_of_it_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("layout/swiglu interleaved", "routing/sentinels", "fp8/saved", "router/mixtral, mask", "lora/plain")
    some = [case for case in golden.cases("torch", False) if case.name.split("/", 1)[1].rpartition("/")[0] in wanted]
    assert len(some) == 4 * 4 + 3
    found = golden.compute("torch", CPU, some)
    assert golden.compute("torch", CPU, some) == found
    renamed = [replace(case, name=f"{case.name}, again") for case in some]
    assert not {*map(str, found.values())} & {*map(str, golden.compute("torch", CPU, renamed).values())}
    name = some[0].name
    other = {**found, name: {**found[name], "o": "0", "db1": "1"}}
    other.pop(some[1].name)
    tensors = ", ".join(sorted(found[some[1].name]))
    assert golden.differences(found, other) == [f"{name} differs: db1, o", f"{some[1].name} differs: {tensors}"]


def test_hashes_of_the_tree_are_of_these_cases() -> None:
    kept = json.loads((golden.record.RESULTS / "golden.json").read_text())["cases"]
    here = [case.name for backend in ("torch", "triton") for case in golden.cases(backend, False)]
    assert sorted(kept) == sorted(here)
    assert not any("refused" in hashes for hashes in kept.values())
