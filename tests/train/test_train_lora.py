"""Adapters on a frozen base: PEFT's own losses, resuming, what stays as it was, the commands, mistakes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from helpers import losses, raises_one_line
from peft import PeftModel
from small_runs import changed, words_of
from test_train_initial import of_models, write_model
from transformers import AutoModelForCausalLM

from tilemoe.cli.main import main
from tilemoe.integrations.peft import save_adapter
from tilemoe.layers.lora import adapter_names
from tilemoe.models.decoder import DecoderLM
from tilemoe.testing import relative_error
from tilemoe.train import preflight
from tilemoe.train.checkpoints.folder import find_latest
from tilemoe.train.checkpoints.initial import adopt, load_initial
from tilemoe.train.checkpoints.restore import build_model, restore
from tilemoe.train.config import LoRAConfig, Recipe
from tilemoe.train.datasets import prepare_data
from tilemoe.train.loop import Trainer
from tilemoe.train.run import train

CPU = torch.device("cpu")
LORA = LoRAConfig(rank=3, attention_rank=5, alpha=6.0)


def adapted(recipe: Recipe, folder: Path, lora: LoRAConfig = LORA, **train_settings: Any) -> Recipe:
    """``recipe`` for adapters on the model of ``folder``, without a loss that balances experts."""
    recipe = changed(adopt(recipe, folder), lora=lora, model__moe__router__aux_loss_coef=0.0)
    return replace(recipe, train=replace(recipe.train, **train_settings))


def weights_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    """At the end of its run."""
    return dict(restore(Path(recipe.train.out_dir), "cpu").model.state_dict())


def losses_of_a_plain_loop(peft: Any, recipe: Recipe, initial: Any) -> list[float]:
    """Of each step of a loop over PEFT's model, with AdamW and clipping of PyTorch; ``initial``: the run's model."""
    adapters = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    sampler = Trainer(recipe, initial, prepare_data(recipe.data, recipe.data.tokenizer), CPU).sampler
    found = []
    for step in range(recipe.train.steps):
        inputs, targets = map(torch.from_numpy, sampler.batch(step)[:2])
        loss = F.cross_entropy(peft(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, recipe.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", of_models("qwen3_moe"))
def test_a_run_is_a_plain_loop_on_peft_and_transformers(name: str, moe_recipe: Recipe, tmp_path: Path) -> None:
    """With AdamW and clipping of PyTorch; what is exported afterwards, merged or not, computes what the run does."""
    theirs = write_model(name, tmp_path / "base", max_shard_size="30KB")
    theirs.set_experts_implementation("eager")  # grouped GEMMs on a CPU round more
    steps = 20
    recipe = adapted(moe_recipe, tmp_path / "base", steps=steps, eval_every=0, save_every=0)
    recipe = replace(recipe, optim=replace(recipe.optim, eps=1e-6, schedule="constant", warmup_steps=0))
    initial = build_model(recipe, CPU)
    load_initial(initial, tmp_path / "base")
    (tmp_path / "initial").mkdir()
    save_adapter(initial, tmp_path / "initial")
    peft = PeftModel.from_pretrained(theirs, tmp_path / "initial", is_trainable=True)
    expected = losses_of_a_plain_loop(peft, recipe, initial)
    train(recipe, init_from=tmp_path / "base")
    found = losses(Path(recipe.train.out_dir))
    assert found[0] == pytest.approx(expected[0], rel=1e-5), "the adapters are 0"
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < 0.9 * found[0]

    for words in (("merged",), ("adapter", "--adapter")):
        out = str(tmp_path / words[0])
        assert main(["export", "--checkpoint", recipe.train.out_dir, "--out", out, *words[1:]]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours = restore(Path(recipe.train.out_dir), "cpu").model(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert relative_error(base(ids).logits, ours) > 0.05
        assert relative_error(merged(ids).logits, ours) < 1e-5
        assert relative_error(PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits, ours) < 1e-5


@pytest.mark.parametrize(
    ("lora", "also"),
    [
        (replace(LORA, modules=("experts",), attention_rank=None), ()),
        (replace(LORA, modules=("attention",)), ()),
        (replace(LORA, train_router=True, train_norms=True), ("router.", "norm.")),
    ],
)
def test_nothing_else_changes_and_the_optimiser_holds_nothing_else(
    lora: LoRAConfig, also: tuple[str, ...], moe_recipe: Recipe, tmp_path: Path
) -> None:
    """The base is a checkpoint of ours, whose routers have a selection bias, which stays as well."""
    base = replace(moe_recipe, train=replace(moe_recipe.train, out_dir=str(tmp_path / "base"), sample_tokens=0))
    train(base)
    recipe = adapted(moe_recipe, tmp_path / "base", lora)
    train(recipe, init_from=tmp_path / "base")
    before, after = weights_of(base), weights_of(recipe)
    trained = adapter_names(build_model(recipe, CPU))
    assert len(trained) == 8 * ("experts" in lora.modules) + 16 * ("attention" in lora.modules)
    trained |= {name for name in before if name.endswith(".weight") and any(part in name for part in also)}
    assert after.keys() == before.keys() | trained
    if lora.train_router:
        trained |= {name for name in before if name.endswith("selection_bias")}
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == trained & before.keys()
    checkpoint = find_latest(Path(recipe.train.out_dir))
    assert checkpoint is not None
    model = build_model(recipe, CPU)
    trainer = Trainer(recipe, model, prepare_data(recipe.data, recipe.data.tokenizer), CPU)
    checkpoint.load_training(model, trainer.optimizer)
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if name in trained}
    assert len(trainer.optimizer.state) == len(held)
    assert all(model.get_parameter(name).any() for name in adapter_names(model))


def test_the_commands_train_resume_evaluate_and_generate(
    moe_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model("olmoe", tmp_path / "base")
    data, out = moe_recipe.data, tmp_path / "run"
    options = {"train.steps": 4, "train.out-dir": out, "data.corpus": data.corpus, "data.cache-dir": data.cache_dir,
               "data.seq-len": 16, "data.batch-size": 2, "data.heldout-every": 4, "lora.rank": 2,
               "lora.attention-rank": 4}  # fmt: skip
    words = words_of(options)
    command = ["train", "--recipe", "smoke", "--init-from", str(tmp_path / "base"), *words, "--train.no-plot"]
    assert main(command) == 0, capsys.readouterr().err
    trained = capsys.readouterr().out
    assert "of them trained, on cpu" in trained
    assert f"starting from the weights in {tmp_path / 'base'}" in trained
    checkpoint = find_latest(out)
    assert checkpoint is not None
    lora = checkpoint.state.recipe.lora
    assert lora == LoRAConfig(rank=2, attention_rank=4, base=str(tmp_path / "base"), base_dtype="float32")
    assert main(["eval", "--checkpoint", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == trained.splitlines()[-1]
    assert main(["export", "--checkpoint", str(out), "--out", str(tmp_path / "merged")]) == 0
    texts = []
    for folder in (out, tmp_path / "merged"):
        capsys.readouterr()
        assert main(["generate", "--checkpoint", str(folder), "--prompt", "ab", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--train.steps", "6"]) == 0, capsys.readouterr().err
    assert f"resuming from {checkpoint.path}" in capsys.readouterr().out
    assert main(["export", "--checkpoint", str(out), "--out", str(tmp_path / "adapter"), "--adapter"]) == 0
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert (written["r"], written["lora_alpha"], set(written["rank_pattern"].values())) == (2, 16, {4})
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    assert (tmp_path / "adapter" / "tokenizer_config.json").exists()
    capsys.readouterr()
    for wrong, message in (
        (["train", *command[1:3], *words, "--train.out-dir", str(tmp_path / "x")], "lora: adapters need weights to"),
        ([*command[:-1], "--lora.rank", "0"], "lora.rank must be an integer >= 1, got 0"),
        (["train", "--resume", str(out), "--lora.rank", "4"], "lora.rank is 4 here and 2 in the checkpoint"),
        (["train", "--resume", str(out), "--lora.attention-rank", "2"], "lora.attention_rank is 2 here and 4 in the"),
        ([*command[:4], str(out), "--train.out-dir", str(tmp_path / "x")], "holds adapters, from which no run can"),
    ):
        assert main(wrong) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_adapters_on_a_model_of_the_hub_name_it(
    moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("mixtral", tmp_path / "base")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "base"))
    data, out = moe_recipe.data, str(tmp_path / "run")
    options = {"data.corpus": data.corpus, "data.cache-dir": data.cache_dir, "data.seq-len": 16, "train.steps": 1,
               "train.out-dir": out, "train.sample-tokens": 0, "lora.modules": "attention"}  # fmt: skip
    words = words_of(options)
    assert main(["train", "--recipe", "smoke", "--init-from", "org/name", *words, "--train.no-plot"]) == 0
    assert main(["export", "--checkpoint", out, "--out", str(tmp_path / "adapter"), "--adapter"]) == 0
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert written["base_model_name_or_path"] == "org/name"
    assert not written["target_parameters"]


def test_a_checkpoint_needs_room_for_the_base_and_for_the_adapters_moments(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(moe_recipe, lora=LORA)
    model = build_model(recipe, CPU)
    base = sum(p.numel() for p in DecoderLM(recipe.model, device="meta").parameters())
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert preflight._checkpoint_bytes(recipe) == 4 * base + 12 * adapters
    assert preflight._checkpoint_bytes(moe_recipe) == 12 * base


def test_settings_that_do_not_go_with_adapters(moe_recipe: Recipe, dense_recipe: Recipe) -> None:
    with raises_one_line(r"lora\.alpha must be a finite number > 0, got 0"):
        LoRAConfig(alpha=0)
    for modules in ((), ("mlp",)):
        with raises_one_line(r"lora\.modules must be experts, attention or both, got \("):
            LoRAConfig(modules=modules)
    with raises_one_line("lora.attention_rank needs adapters in attention; add attention to lora.modules"):
        replace(LORA, modules=("experts",))
    with raises_one_line("lora.attention_rank must be an integer >= 1, got 0"):
        replace(LORA, attention_rank=0)
    with raises_one_line("optim.name 'muon' does not train adapters; use --optim.name adamw"):
        replace(moe_recipe, lora=LORA, optim=replace(moe_recipe.optim, name="muon"))
    with raises_one_line("lora.modules has experts, but the model is dense; use --lora.modules attention"):
        replace(dense_recipe, lora=LORA)
    replace(dense_recipe, lora=replace(LORA, modules=("attention",)))
    with raises_one_line("train.recompute 'up_proj' is not for experts with adapters"):
        replace(moe_recipe, lora=LORA, train=replace(moe_recipe.train, recompute="up_proj"))
    moe = moe_recipe.model.moe
    assert moe is not None
    with raises_one_line(r"model\.moe\.precision 'fp8' is not for experts with adapters"):
        replace(moe_recipe, lora=LORA, model=replace(moe_recipe.model, moe=replace(moe, precision="fp8")))
    in_fp8 = replace(moe_recipe.model, moe=replace(moe, intermediate_size=128, save="fp8"))
    with raises_one_line(r"model\.moe\.save 'fp8' is not for experts with adapters; use --model\.moe\.save full"):
        replace(moe_recipe, lora=LORA, model=in_fp8)
    with raises_one_line(r"model\.moe\.save 'fp8' has no effect with train\.recompute 'up_proj'"):
        replace(moe_recipe, train=replace(moe_recipe.train, recompute="up_proj"), model=in_fp8)
