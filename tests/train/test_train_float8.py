"""``train.dense_precision="fp8"``: what multiplies in FP8, how near its losses are, that checkpoints do not know."""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import losses, raises_one_line
from small_runs import changed
from test_train_distributed import trained_by, written
from torch import nn

from tilemoe.config import ModelConfig, MoEConfig, ParallelConfig, RouterConfig
from tilemoe.kernels.choose import choose_projections
from tilemoe.layers.attention import Attention
from tilemoe.layers.float8 import quantize_projections
from tilemoe.models.decoder import DecoderLM
from tilemoe.runtime import tracing
from tilemoe.runtime.device import has_fast_gemm
from tilemoe.train.checkpoints.restore import build_model, restore
from tilemoe.train.config import LoRAConfig, Recipe
from tilemoe.train.run import train

CPU = torch.device("cpu")
NEAR = 1.5e-2  # relative, to the losses in bf16 of the same steps


def in_fp8(recipe: Recipe, experts: str = "fp8") -> Recipe:
    return changed(recipe, model__moe__precision=experts, train__dense_precision="fp8")


@pytest.fixture
def recipe(moe_recipe: Recipe) -> Recipe:
    """Widths that FP8 takes; an untied head, and a dense block beside the one with experts."""
    moe = MoEConfig(128, 128, 4, 2, router=RouterConfig(aux_loss_coef=0.01))
    model = ModelConfig(256, 128, 2, 4, 2, 32, 16, moe=moe, dense_layers=(0,), dense_intermediate_size=128)
    return replace(moe_recipe, model=model, train=replace(moe_recipe.train, steps=4, save_every=0, eval_every=0))


def test_attention_s_projections_and_nothing_else(recipe: Recipe) -> None:
    plain, converted = build_model(recipe, CPU), build_model(in_fp8(recipe), CPU)
    changed = {
        name
        for (name, ours), theirs in zip(converted.named_modules(), plain.modules(), strict=True)
        if type(ours) is not type(theirs)
    }
    assert changed == {f"blocks.{i}.attention.{name}_proj" for i in range(2) for name in "qkvo"}
    assert all(type(converted.get_submodule(name)).__name__ == "Float8Linear" for name in changed)
    assert all(type(parameter) is nn.Parameter for parameter in converted.parameters())
    for (name, ours), (theirs_name, theirs) in zip(
        converted.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert name == theirs_name
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.thorough)])
def test_losses_are_near_and_checkpoints_go_both_ways(
    recipe: Recipe, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run in FP8 that goes on without, of one that goes the other way, and of one that never was."""
    recipe = replace(recipe, train=replace(recipe.train, precision=precision))
    narrow = changed(in_fp8(recipe), model__moe__save="fp8")
    runs = {"plain": [recipe, recipe], "on": [recipe, narrow], "off": [narrow, recipe]}
    for name, (first, second) in runs.items():
        settings = {"out_dir": str(tmp_path / name)}
        train(replace(first, train=replace(first.train, **settings, steps=2)))
        train(replace(second, train=replace(second.train, **settings)), restore(tmp_path / name, "cpu").checkpoint)
    said = capsys.readouterr().out
    for setting, wide in (
        ("train.dense_precision", "bf16"),
        ("model.moe.precision", "bf16"),
        ("model.moe.save", "full"),
    ):
        for here, there in (("fp8", wide), (wide, "fp8")):
            assert f"note: {setting} is {here!r} here and {there!r} in the checkpoint" in said
    expected = losses(tmp_path / "plain")
    for name in ("on", "off"):
        found = losses(tmp_path / name)
        assert found != expected
        assert found == pytest.approx(expected, rel=NEAR)
    assert losses(tmp_path / "on")[:2] == expected[:2]
    assert losses(tmp_path / "off")[0] != expected[0]


def test_compiled_in_one_graph(recipe: Recipe) -> None:
    """As train.compile does, forward and backward."""
    plain, compiled = (build_model(in_fp8(recipe), CPU) for _ in range(2))
    for block in compiled.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    ids = torch.randint(256, (2, 16))
    found = []
    for model in (plain, compiled):
        model(ids, ids).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_compiled_steps_on_a_gpu_are_near(recipe: Recipe, tmp_path: Path) -> None:
    """Experts and attention in FP8, by the device's own products where it has them."""
    pytest.importorskip("torchao")
    settings = replace(recipe.train, steps=3, precision="bf16", device="cuda", compile="blocks")
    plain = replace(recipe, train=settings)
    for name, each in {"plain": plain, "fp8": in_fp8(plain)}.items():
        train(replace(each, train=replace(each.train, out_dir=str(tmp_path / name))))
    found, expected = losses(tmp_path / "fp8"), losses(tmp_path / "plain")
    assert found != expected
    assert found == pytest.approx(expected, rel=NEAR)


IN_FP8 = "in fp8: torch_fp8, FP8 is asked for; on a CPU it is emulated, not faster"
NOT_IN_FP8 = "in {dtype}: torch, not in FP8 (n is not a multiple of 128): change that, or set precision='bf16'; "


@pytest.mark.parametrize(
    ("width", "said", "precision"), [(128, IN_FP8, "fp32"), (64, NOT_IN_FP8, "fp32"), (64, NOT_IN_FP8, "bf16")]
)
def test_a_run_says_once_at_its_start_which_kernels_serve_and_result_json_too(
    recipe: Recipe, width: int, said: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tracing._warn.cache_clear()
    recipe = changed(in_fp8(recipe), model__moe__intermediate_size=width, train__steps=1, train__precision=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(recipe)
    assert not [each for each in caught if "fp8" in str(each.message).lower()]
    has_bf16 = precision == "bf16" and has_fast_gemm("cpu", torch.bfloat16)
    said = said.format(dtype="bfloat16" if has_bf16 else "float32")
    lines = [line for line in capsys.readouterr().out.splitlines() if "FP8" in line]
    assert len(lines) == 2
    assert lines[0].startswith(f"experts, d=128, n={width}, {said}")
    assert lines[1].startswith("attention's projections: torchao, FP8 is asked for; it is emulated here")
    kernels = json.loads((Path(recipe.train.out_dir) / "result.json").read_bytes())["kernels"]
    assert [f"{what}: {its['name']}, {its['reason']}" for what, its in kernels.items()] == lines


@pytest.mark.thorough
@pytest.mark.dist
@pytest.mark.usefixtures("one_thread")
def test_two_processes_train_near_one(recipe: Recipe, tmp_path: Path) -> None:
    """FSDP2 gathers in bf16; one process without FP8 goes on from what two with it have saved."""
    recipe = replace(recipe, train=replace(recipe.train, precision="bf16"))
    alone = replace(recipe, data=replace(recipe.data, batch_size=2 * recipe.data.batch_size))
    train(replace(alone, train=replace(recipe.train, out_dir=str(tmp_path / "one"))))
    both = replace(in_fp8(recipe), parallel=ParallelConfig(expert=2))
    for dense, steps in (("bf16", 1), ("fp8", 2)):
        path = written(both, tmp_path, out_dir=str(tmp_path / f"two in {dense}"), steps=steps, dense_precision=dense)
        said = "attention's projections: torchao, FP8 is asked for; it is emulated here"
        assert (said in trained_by(2, path).out) == (dense == "fp8")
    two = tmp_path / "two in fp8"
    assert losses(two)[0] != losses(tmp_path / "two in bf16")[0]
    checkpoint = restore(two, "cpu").checkpoint
    train(replace(alone, train=replace(recipe.train, out_dir=str(two))), checkpoint)
    assert losses(two) == pytest.approx(losses(tmp_path / "one"), rel=NEAR)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (
            {"hidden_size": 40},
            r"model\.hidden_size \(40\) must be a multiple of 16 where train\.dense_precision is fp8",
        ),
        ({"num_heads": 3, "num_kv_heads": 3}, r"model\.num_heads \* model\.head_dim \(24\) must be a multiple of 16"),
        ({"num_kv_heads": 1}, r"model\.num_kv_heads \* model\.head_dim \(8\) must be a multiple of 16"),
        ({"seq_len": 6}, r"data\.batch_size \* data\.seq_len \(24\) must be a multiple of 16"),
    ],
)
def test_sizes_that_fp8_does_not_take_are_named(dense_recipe: Recipe, sizes: dict[str, int], named: str) -> None:
    data = replace(dense_recipe.data, seq_len=sizes.pop("seq_len", 16))
    model = replace(dense_recipe.model, **{"hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8} | sizes)
    plain = replace(dense_recipe, model=model, data=data)
    with raises_one_line(named):
        replace(plain, train=replace(plain.train, dense_precision="fp8"))


def test_adapters_on_attention_are_refused_and_on_experts_are_not(recipe: Recipe) -> None:
    with raises_one_line(r"train\.dense_precision 'fp8' is not for attention with adapters"):
        replace(in_fp8(recipe, experts="bf16"), lora=LoRAConfig())
    replace(in_fp8(recipe, experts="bf16"), lora=LoRAConfig(modules=("experts",)))


def test_without_torchao_one_line_says_what_to_install(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    recipe = replace(recipe, data=replace(recipe.data, corpus="/not/there"))  # said before it is read
    for begin in (lambda: train(in_fp8(recipe)), lambda: build_model(in_fp8(recipe), CPU)):
        with raises_one_line(r"needs torchao: pip install 'tilemoe\[fp8\]'"):
            begin()
    assert choose_projections(CPU).reason.endswith("pip install 'tilemoe[fp8]'")
    assert not Path(recipe.train.out_dir).exists()


@pytest.mark.parametrize(("capability", "name"), [((8, 6), "torch"), ((8, 9), "torchao"), ((9, 0), "torchao")])
def test_a_gpu_without_fp8_computes_in_bf16(
    recipe: Recipe, capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = choose_projections(gpu)
    assert choice.name == name
    assert ("needs NVIDIA's compute capability 8.9" in choice.reason) == (name == "torch")
    model = DecoderLM(recipe.model, device="meta")
    quantize_projections(model, gpu)
    linears = [module.q_proj for module in model.modules() if isinstance(module, Attention)]
    assert {type(linear) is nn.Linear for linear in linears} == {name == "torch"}
