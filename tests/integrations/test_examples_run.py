"""The examples run as they are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import torchrun
from hf_models import FAMILIES, word_tokenizer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import tilemoe
from tilemoe.kernels.experts import registry

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / name))


@pytest.mark.usefixtures("unregistered_after")
def test_hf_finetune_learns_and_leaves_a_model_that_loads_without_tilemoe(tmp_path: Path) -> None:
    losses = example("hf_finetune.py")["main"](["--out", str(tmp_path), "--steps", "30", "--seq-len", "64"])
    assert losses[-1] < 0.8 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._experts_implementation != "tilemoe"
    assert model(input_ids=torch.tensor([[100, 101]])).logits.shape == (1, 2, 256)


@pytest.mark.usefixtures("unregistered_after")
@pytest.mark.parametrize(
    ("script", "family", "options"),
    [
        ("hf_finetune.py", "mixtral", ("--steps", "20", "--lr", "0.01")),
        ("lora.py", "olmoe", ("--steps", "30", "--lr", "0.02")),
    ],
)
def test_a_model_of_a_folder_learns_a_text(script: str, family: str, options: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), unk_token="<unk>")
    tokenizer.save_pretrained(tmp_path / "base")
    FAMILIES[family].make().save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 50)
    places = {"--model": tmp_path / "base", "--text": tmp_path / "text.txt", "--out": tmp_path / "tuned"}
    arguments = [str(word) for pair in places.items() for word in pair]
    losses = example(script)["main"]([*arguments, "--seq-len", "16", *options])
    assert losses[-1] < 0.8 * losses[0]
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert (tuned.config.model_type, tuned.dtype) == (family, torch.float32)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert theirs("a b h").input_ids == tokenizer("a b h").input_ids


@pytest.mark.usefixtures("registered")
def test_trl_sft_learns_and_its_adapters_load_without_tilemoe(tmp_path: Path, calls: list[Any]) -> None:
    script = example("trl_sft.py")
    torch.manual_seed(0)
    base = script["small_model"]()[0]
    torch.manual_seed(0)
    losses = script["main"](["--out", str(tmp_path), "--steps", "30"])
    assert losses[-1] < 0.8 * losses[0]
    assert len(calls) == 30 * 2 * 2  # steps, layers, and TRL recomputes the activations
    base.set_experts_implementation("eager")
    ids = torch.tensor([[65, 66, 67]])
    before = base(input_ids=ids).logits
    tuned = PeftModel.from_pretrained(base, tmp_path)
    assert not torch.allclose(tuned(input_ids=ids).logits, before, atol=0.1)
    assert len(calls) == 30 * 2 * 2


@pytest.mark.thorough
@pytest.mark.dist
def test_expert_parallel_learns_and_leaves_a_model_that_loads_without_tilemoe(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 4, EXAMPLES / "expert_parallel.py", "--out", "tuned", "--steps", 31, "--seq-len", 64)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    ids = torch.tensor([list(EXAMPLES.joinpath("lora.py").read_bytes()[:256])])
    assert model(input_ids=ids, labels=ids).loss < 0.8 * losses[0]


# accelerate has FSDP for GPUs and their like alone; on a CPU it is told that this is one.
AS_ON_GPUS = """
import runpy, sys
from accelerate import PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.thorough
@pytest.mark.dist
def test_accelerate_trains_alike_with_divided_experts_and_without(tmp_path: Path) -> None:
    (tmp_path / "as_on_gpus.py").write_text(AS_ON_GPUS)
    losses: list[list[float]] = []
    for expert in (1, 2):
        script = EXAMPLES / "accelerate_fsdp2.py"
        options = ["--out", f"out_{expert}", "--steps", 21, "--expert", expert]
        done = torchrun(tmp_path, 2, "as_on_gpus.py", script, *options)
        assert done.returncode == 0, done.stderr
        losses.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)])
        assert (tmp_path / f"out_{expert}" / "state" / "pytorch_model_fsdp_0" / ".metadata").exists()
        AutoModelForCausalLM.from_pretrained(tmp_path / f"out_{expert}")
    assert losses[0] == pytest.approx(losses[1], abs=0.01)  # three digits, and sums in another order
    assert losses[0][-1] < 0.7 * losses[0][0]


def test_custom_router_learns_with_every_expert_full() -> None:
    module = example("custom_router.py")
    losses = module["main"](["--steps", "120"])
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    layer = module["make_layer"](16, 8, experts=4)
    x = torch.randn(20, 16, requires_grad=True)
    out = layer(x)
    assert out.tokens_per_expert.tolist() == [10] * 4
    out.hidden.square().sum().backward()
    assert layer.router.linear.weight.grad.any()
    assert all(layer.experts.w1.grad[expert].any() for expert in range(4))


def test_routing_replay_keeps_the_log_probabilities_and_learns() -> None:
    steps = example("routing_replay.py")["main"](["--steps", "12"])
    assert all(step.replayed < 2e-5 for step in steps)
    assert steps[0].free > 0.1  # some tokens get another expert
    assert steps[-1].reward > steps[0].reward + 0.2


def test_routing_replay_takes_every_sampled_expert_whatever_the_weights_are() -> None:
    """A sampler in bf16, as engines are: its experts are not those of fp32, and replay brings the policies together."""
    module = example("routing_replay.py")
    torch.manual_seed(0)
    policy = module["make_policy"]()
    rollout = module["sample"](module["sampler_of"](policy).bfloat16())
    with torch.no_grad():
        replayed, free = (
            (module["log_probs_of"](policy, rollout.tokens, ids) - rollout.log_probs).abs().mean()
            for ids in (rollout.expert_ids, None)
        )
    assert replayed < 0.2 * free


def test_custom_backend_learns_and_its_kernel_is_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))  # what it registers is gone after
    module = example("custom_backend.py")
    losses = module["main"](["--steps", "120"])
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    cfg = tilemoe.MoEConfig(16, 8, 4, 2, expert_bias=True)
    plain, ours = (tilemoe.MoE(cfg, kernels=name) for name in ("torch", "loop"))
    torch.nn.init.normal_(plain.experts.b2)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(20, 16)
    torch.testing.assert_close(ours(x).hidden, plain(x).hidden)
