"""How golden hashes are compared, and that results repeat."""

from dataclasses import replace
from pathlib import Path

import golden
import pytest
import torch

CPU = torch.device("cpu")


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
