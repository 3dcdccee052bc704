"""Adapters on experts in 4 bit: a run is one on the dequantised base, from either kind of folder; resumed, merged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import losses, raises_one_line
from safetensors.torch import load_file
from test_train_lora import adapted, weights_of

from tilemoe.cli.evaluate import EvalOptions, _evaluate, _of_checkpoint
from tilemoe.cli.main import main
from tilemoe.cli.train import _with_base
from tilemoe.config import ModelConfig, MoEConfig
from tilemoe.data.tokenizer import ByteTokenizer
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.layers.lora import packed_weights
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import load_hf, save_hf
from tilemoe.runtime import random
from tilemoe.testing import assert_equal, relative_error
from tilemoe.train.checkpoints.folder import find_latest
from tilemoe.train.checkpoints.restore import build_model, build_shared_model, frozen_dtype, make_decoder
from tilemoe.train.config import LoRAConfig, Recipe
from tilemoe.train.job.processes import Job
from tilemoe.train.preflight import require_ready
from tilemoe.train.run import train

CPU = torch.device("cpu")
MODEL = ModelConfig(256, 64, 2, 2, 1, 32, 16, moe=MoEConfig(64, 64, 4, 2))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers' with a model, and of each storage one with its dequantised experts."""
    root = tmp_path_factory.mktemp("bases")
    model = DecoderLM(MODEL)
    model.reset_parameters(torch.Generator().manual_seed(1))
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for storage in ("dense", *STORAGES):
        for name, tensor in plain.items() if storage != "dense" else ():
            if name.endswith((".w1", ".w2")):
                packed = STORAGES[storage].quantize(tensor)
                for expert in range(4):
                    model.get_parameter(name).data[expert] = packed.expert(expert, torch.float32)
        save_hf(model, root / storage)
        ByteTokenizer().save(root / storage / "tokenizer.json")
    return root


def assert_evaluated_as_in_training(run: Path) -> None:
    found = _evaluate(_of_checkpoint(run, EvalOptions(str(run), precision="bf16")), 0)
    assert found.nats_per_token == json.loads((run / "result.json").read_text())["heldout_nats_per_token"]


def recipe_of(recipe: Recipe, base: Path, out: Path, storage: str = "dense", steps: int = 4) -> Recipe:
    lora = LoRAConfig(rank=4, alpha=8.0, storage=storage)  # type: ignore[arg-type]
    made = adapted(recipe, base, lora, steps=steps, out_dir=str(out), eval_every=0, save_every=0)
    return replace(made, optim=replace(made.optim, schedule="constant", warmup_steps=0))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_run_is_one_on_the_dequantised_base(storage: str, moe_recipe: Recipe, bases: Path, tmp_path: Path) -> None:
    dense = recipe_of(moe_recipe, bases / storage, tmp_path / "dense")
    train(dense, init_from=bases / storage)
    packed = recipe_of(moe_recipe, bases / "dense", tmp_path / "packed", storage)
    train(packed, init_from=bases / "dense")
    want, got = losses(tmp_path / "dense"), losses(tmp_path / "packed")
    assert got == pytest.approx(want, rel=1e-5)
    assert got[-1] < got[0]
    counts = [json.loads((tmp_path / name / "result.json").read_bytes())["parameters"] for name in ("dense", "packed")]
    assert counts[0] == counts[1]
    part = recipe_of(moe_recipe, bases / "dense", tmp_path / "part", storage, steps=2)
    train(part, init_from=bases / "dense")
    train(replace(packed, train=replace(packed.train, out_dir=str(tmp_path / "part"))), find_latest(tmp_path / "part"))
    resumed, whole = weights_of(part), weights_of(packed)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    for name in ("dense", "packed"):
        assert main(["export", "--checkpoint", str(tmp_path / name), "--out", str(tmp_path / f"{name}-merged")]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        merged = [load_hf(tmp_path / f"{name}-merged")(ids).logits for name in ("dense", "packed")]
    assert relative_error(merged[1], merged[0]) < 1e-4


def test_a_checkpoint_of_ours_is_packed_as_it_is_read(moe_recipe: Recipe, bases: Path, tmp_path: Path) -> None:
    base = replace(moe_recipe, model=MODEL, train=replace(moe_recipe.train, steps=1, out_dir=str(tmp_path / "base")))
    train(base)
    recipe = recipe_of(moe_recipe, tmp_path / "base", tmp_path / "run", "nf4", steps=1)
    train(recipe, init_from=tmp_path / "base")
    before, after = weights_of(base), weights_of(recipe)
    for name, (_, names) in packed_weights(build_model(recipe, CPU)).items():
        for found, tensor in zip(names, STORAGES["nf4"].quantize(before[name]).tensors.values(), strict=True):
            assert torch.equal(after[found], tensor)


def test_beside_experts_in_4_bit_what_is_frozen_is_in_bf16(
    moe_recipe: Recipe, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(moe_recipe, bases / "dense", tmp_path / "run", "nf4", steps=2)
    assert frozen_dtype(recipe, CPU) == torch.float32
    recipe = replace(recipe, train=replace(recipe.train, precision="bf16"))
    for where in ("tilemoe.train.checkpoints.restore", "tilemoe.train.loop"):
        monkeypatch.setattr(f"{where}.has_fast_gemm", lambda device, dtype: True)
    model = build_model(recipe, CPU)
    dtypes = {(p.requires_grad, p.dtype) for name, p in model.named_parameters() if "absmax" not in name}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16), (False, torch.uint8)}
    train(recipe, init_from=bases / "dense")
    dense = recipe_of(moe_recipe, bases / "nf4", tmp_path / "dense", steps=2)
    train(dense, init_from=bases / "nf4")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "dense"), rel=1e-2)
    assert weights_of(recipe)["embed.weight"].dtype == torch.bfloat16, "as the run held it"
    assert_evaluated_as_in_training(tmp_path / "run")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("storage", ["dense", *STORAGES])
def test_a_base_that_is_read_is_not_drawn(storage: str, moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a job; what trains has the values that it has in a model that is drawn whole."""
    lora = LoRAConfig(rank=4, storage=storage, train_router=True)  # type: ignore[arg-type]
    recipe = replace(moe_recipe, model=MODEL, lora=lora)
    whole = make_decoder(recipe)
    whole.reset_parameters(torch.Generator().manual_seed(recipe.train.seed))
    trained = {name: parameter for name, parameter in whole.named_parameters() if parameter.requires_grad}
    drawn: list[torch.Tensor] = []
    fill = random._fill
    monkeypatch.setattr(random, "_fill", lambda weight, *more: (drawn.append(weight), fill(weight, *more)))
    for model in (build_model(recipe, CPU), build_shared_model(recipe, CPU, Job())):
        found = {name: random.local_part(each)[0] for name, each in model.named_parameters() if each.requires_grad}
        assert_equal(found, trained)
        assert not any(parameter.is_meta for parameter in model.parameters())
    assert all(weight.is_meta or weight.requires_grad for weight in drawn)


def test_what_cannot_be_stored_so_is_said_before_anything_is_read(
    moe_recipe: Recipe, bases: Path, tmp_path: Path
) -> None:
    with raises_one_line("lora.storage 'nf4' needs adapters in experts; add experts to lora.modules"):
        LoRAConfig(modules=("attention",), storage="nf4")
    recipe = recipe_of(moe_recipe, bases / "dense", tmp_path / "run", "mxfp4")
    narrow = replace(recipe, model=replace(MODEL, moe=MoEConfig(64, 48, 4, 2)))
    with raises_one_line("intermediate_size must be a multiple of 32, the block of MXFP4, got 48"):
        require_ready(narrow, Job(), is_new=True, init_from=bases / "dense")


def test_a_base_in_bf16_stays_so_and_every_loss_is_that_of_fp32(
    moe_recipe: Recipe, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast; in checkpoints too, from which a run begun in fp32 goes on."""
    for where in ("tilemoe.train.checkpoints.restore", "tilemoe.train.loop"):
        monkeypatch.setattr(f"{where}.has_fast_gemm", lambda device, dtype: True)
    folder = tmp_path / "base"
    save_hf(load_hf(bases / "dense", dtype=torch.bfloat16), folder)
    ByteTokenizer().save(folder / "tokenizer.json")

    def run(name: str, dtype: str, steps: int) -> Recipe:
        made = recipe_of(moe_recipe, folder, tmp_path / name, steps=steps)
        settings = replace(made.train, precision="bf16", sample_tokens=2)
        return replace(made, train=settings, lora=replace(made.lora, base_dtype=dtype))  # type: ignore[type-var]

    assert _with_base(run("x", "float32", 1), str(folder), folder).lora.base_dtype == "float32"  # type: ignore[union-attr]
    given = replace(run("x", "float32", 1), lora=LoRAConfig())
    found = [_with_base(given, str(each), each).lora for each in (folder, bases / "dense")]
    assert [each and each.base_dtype for each in found] == ["bfloat16", "float32"]
    for name, dtype in (("wide", "float32"), ("narrow", "bfloat16")):
        train(run(name, dtype, 4), init_from=folder)
        assert main(["export", "--checkpoint", str(tmp_path / name), "--out", str(tmp_path / f"{name}-merged")]) == 0
    train(run("resumed", "float32", 2), init_from=folder)
    train(run("resumed", "bfloat16", 4), find_latest(tmp_path / "resumed"))
    assert losses(tmp_path / "wide") == losses(tmp_path / "narrow") == losses(tmp_path / "resumed")
    wide = weights_of(run("wide", "float32", 4))
    for name in ("narrow", "resumed"):
        other = weights_of(run(name, "bfloat16", 4))
        assert all(torch.equal(other[each].float(), tensor) for each, tensor in wide.items())
    first, second = (load_file(tmp_path / f"{name}-merged/model.safetensors") for name in ("wide", "narrow"))
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}
    assert_equal(second, {name: tensor.bfloat16() for name, tensor in first.items()})
    stored = load_file(tmp_path / "narrow/step_00000004/model.safetensors")
    in_fp32 = ("up_", "down_", "lora_", "norm", "router", "embed")
    for tensors in (stored, other):
        assert all((t.dtype == torch.float32) == any(part in name for part in in_fp32) for name, t in tensors.items())
    for name in ("wide", "narrow"):
        assert_evaluated_as_in_training(tmp_path / name)
        generate = ["generate", "--checkpoint", str(tmp_path / name), "--prompt", "a", "--max-new-tokens", "2"]
        assert main(generate) == 0
