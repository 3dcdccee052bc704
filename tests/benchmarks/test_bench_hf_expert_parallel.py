"""The step of transformers' model with divided experts beside our decoder's, on two processes and tiny weights."""

from pathlib import Path
from typing import Any

import hf_cases
import hf_expert_parallel
import pytest
import torch
from ranks import run_on_ranks
from transformers import AutoModelForCausalLM

from tilemoe.integrations import transformers as integration
from tilemoe.models.huggingface import save_hf, to_hf_state_dict
from tilemoe.testing import assert_equal

CPU = torch.device("cpu")
OPTIONS = ("--device", "cpu", "--rounds", "2", "--steps", "1", "--batch", "1", "--sequence", "16")


def test_stacked_is_what_transformers_loads(tmp_path: Path) -> None:
    """From a folder of ours, whose tensors have the hub's names: one for each expert."""
    theirs, ours = hf_expert_parallel.built(hf_cases.tiny(hf_cases.MODELS[hf_expert_parallel.CASE]), CPU)
    integration.unregister()
    save_hf(ours, tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    assert loaded["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 2 * 48, 64)
    assert_equal(hf_expert_parallel.stacked(to_hf_state_dict(ours)), loaded)
    assert_equal(dict(theirs.state_dict()), loaded)


def check_rows() -> None:
    args = hf_expert_parallel.parse([*OPTIONS, "--vocabulary", "61"])
    theirs, ours = hf_expert_parallel.measure(args, CPU)
    assert (theirs["model"], ours["model"]) == ("transformers", "tilemoe")
    for row in (theirs, ours):
        assert (row["processes"], row["compiled"], row["layers"], row["vocabulary"]) == (2, False, 2, 61)
        assert (row["batch"], row["sequence"], row["peak_bytes_beside_the_other"]) == (1, 16, None)
        assert row["tokens_per_second"] == pytest.approx(16e3 / row["ms"]["median"], rel=1e-3)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=hf_expert_parallel.GATE)
    assert theirs["held"] == (theirs["over_ours"] <= theirs["bar"] == 1.10)


def check_gate() -> None:
    """Models whose weights differ are not timed."""
    stacked = hf_expert_parallel.stacked

    def changed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: 3 * tensor if "lm_head" in name else tensor for name, tensor in stacked(state).items()}

    def never(*_: Any) -> Any:
        raise AssertionError("a step was timed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_expert_parallel, "stacked", changed)
        patch.setattr(hf_expert_parallel, "timed", never)
        with pytest.raises(SystemExit, match="losses of the same weights and tokens do not agree"):
            hf_expert_parallel.measure(hf_expert_parallel.parse([*OPTIONS]), CPU)


@pytest.fixture(scope="module")
def found_by_ranks(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected([check_rows, check_gate]), 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["check_rows", "check_gate"])
def test_two_processes(name: str, found_by_ranks: dict[str, str]) -> None:
    assert not found_by_ranks[name], found_by_ranks[name]
