"""Adapters on models of transformers' own classes: a plain loop's losses, resuming, the commands, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import losses, raises_one_line, watch_attention
from peft import PeftModel
from small_runs import words_of
from test_hf_quantized import wide
from test_hf_quantized_folders import gpt_oss_folder
from test_train_lora import losses_of_a_plain_loop
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Mxfp4Config

from tilemoe.cli.main import main
from tilemoe.config import ParallelConfig
from tilemoe.data import PackedDocuments
from tilemoe.data.tokenizer import ByteTokenizer
from tilemoe.integrations import hf_decoder
from tilemoe.integrations.hf_decoder import HFDecoder
from tilemoe.integrations.quantized import TilemoeConfig, dequantize_experts, quantize_experts
from tilemoe.parallel.mesh import Meshes
from tilemoe.parallel.model import shard_adapted
from tilemoe.testing import assert_equal, relative_error
from tilemoe.train.checkpoints.folder import open_checkpoint
from tilemoe.train.checkpoints.initial import adopt
from tilemoe.train.checkpoints.restore import build_model, restore
from tilemoe.train.config import DataConfig, LoRAConfig, Recipe
from tilemoe.train.datasets import device_batch, prepare_data
from tilemoe.train.run import train

CPU = torch.device("cpu")
BITS = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
LORA = LoRAConfig(rank=2, attention_rank=3, alpha=4.0)
FIRST = 3  # step with a checkpoint


def write_base(family: str, folder: Path, **more: Any) -> Path:
    wide(family, vocab_size=256, **more).save_pretrained(folder)
    ByteTokenizer().save(folder / "tokenizer.json")
    return folder


def adapted(recipe: Recipe, folder: Path, storage: Any = "dense", **train_settings: Any) -> Recipe:
    """``recipe`` for adapters on the model of ``folder``."""
    settings = replace(recipe.train, compile="blocks", **train_settings)  # of our decoder's, as in single-gpu
    recipe = adopt(replace(recipe, train=settings), folder)
    recipe = replace(recipe, lora=replace(LORA, storage=storage, base=str(folder)))
    return replace(recipe, optim=replace(recipe.optim, eps=1e-6, schedule="constant", warmup_steps=0))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def plain_losses(recipe: Recipe, folder: Path, adapters: Path) -> list[float]:
    """Of a loop over PEFT's model, with transformers' own experts, whose weights are those that the run decodes."""
    assert recipe.lora is not None
    if recipe.lora.linear == "nf4":
        config = TilemoeConfig(recipe.lora.storage, BITS)
        theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    else:
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        if recipe.lora.storage != "dense":
            quantize_experts(theirs, recipe.lora.storage)
            dequantize_experts(theirs)
        theirs.set_experts_implementation("eager")
    initial = build_model(recipe, CPU)
    assert isinstance(initial, HFDecoder)
    adapters.mkdir()
    initial.save_adapters(adapters, None)
    peft = PeftModel.from_pretrained(theirs, adapters, is_trainable=True).train()
    return losses_of_a_plain_loop(peft, recipe, initial)


@pytest.mark.parametrize(
    ("family", "storage"),
    [
        ("gpt_oss", "mxfp4"),
        ("qwen3_next", "dense"),
        *(
            pytest.param(family, storage, marks=pytest.mark.thorough)
            for family in ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next", "granite_moe", "gemma4")
            for storage in ("dense", "nf4", "nf4_double", "mxfp4")
            if (family, storage) not in (("gpt_oss", "mxfp4"), ("qwen3_next", "dense"))
        ),
    ],
)
def test_a_run_is_a_plain_loop_goes_on_bit_for_bit_and_is_exported(
    family: str, storage: str, moe_recipe: Recipe, tmp_path: Path
) -> None:
    base = write_base(family, tmp_path / "base")
    recipe = adapted(moe_recipe, base, storage, steps=2 * FIRST, eval_every=0, save_every=FIRST)
    expected = plain_losses(recipe, base, tmp_path / "initial")
    done = train(recipe, init_from=base)
    found = losses(run := Path(recipe.train.out_dir))
    assert found == pytest.approx(expected, rel=1e-4)
    last, checkpoint = run / f"step_{2 * FIRST:08d}", open_checkpoint(run / f"step_{FIRST:08d}")
    written = bytes_of(last)
    assert sum(map(len, written.values())) < (base / "model.safetensors").stat().st_size, "no base"
    again = train(checkpoint.state.recipe, checkpoint)
    assert (again.evaluation, again.sample) == (done.evaluation, done.sample)  # type: ignore[union-attr]
    assert bytes_of(last) == written
    assert losses(run) == found

    for words in (("merged",), ("adapter", "--adapter")):
        assert main(["export", "--checkpoint", str(run), "--out", str(tmp_path / words[0]), *words[1:]]) == 0
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours = restore(run, "cpu").model(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        plain = AutoModelForCausalLM.from_pretrained(base)
        if storage != "dense":
            quantize_experts(plain, storage)
            dequantize_experts(plain)
        assert relative_error(plain(ids).logits, ours) > 0.01
        assert relative_error(merged(ids).logits, ours) < 1e-5
        assert relative_error(PeftModel.from_pretrained(plain, tmp_path / "adapter")(ids).logits, ours) < 1e-5


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("qwen3_moe", "rope_parameters", YARN),
        ("qwen3_moe", "attention_bias", True),
        ("mixtral", "sliding_window", 8),
        ("olmoe", "clip_qkv", 0.1),
    ],
)
def test_a_setting_that_our_decoder_lacks_needs_adapters(
    family: str, name: str, value: object, moe_recipe: Recipe, tmp_path: Path
) -> None:
    base = write_base(family, tmp_path / "base", **{name: value})
    recipe = adapted(moe_recipe, base, steps=FIRST, eval_every=0, save_every=0)
    what = "rope_type" if value is YARN else name
    with raises_one_line(f"{what} must be .*; transformers' own class trains adapters only, so add --lora.rank 8"):
        train(replace(recipe, lora=None), init_from=base)
    expected = plain_losses(recipe, base, tmp_path / "initial")
    train(recipe, init_from=base)
    assert losses(Path(recipe.train.out_dir)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("storage", ["dense", "mxfp4"])
def test_a_folder_of_gpt_oss_s_own_is_exported_whole(storage: str, moe_recipe: Recipe, tmp_path: Path) -> None:
    """In bf16, as its files are, for its config.json does not say: to the bit what PEFT merges."""
    gpt_oss_folder(base := tmp_path / "base", vocab_size=256)
    ByteTokenizer().save(base / "tokenizer.json")
    recipe = adapted(moe_recipe, base, storage, steps=1, eval_every=0, sample_tokens=0)
    train(recipe, init_from=base)
    assert main(["export", "--checkpoint", recipe.train.out_dir, "--out", str(tmp_path / "merged")]) == 0
    merged, found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(found.values())
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    out = str(tmp_path / "adapter")
    assert main(["export", "--checkpoint", recipe.train.out_dir, "--out", out, "--adapter"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(base, quantization_config=Mxfp4Config(dequantize=True))
    theirs = PeftModel.from_pretrained(plain, out).merge_and_unload()
    assert_equal(dict(merged.state_dict()), dict(theirs.state_dict()))
    assert main(["verify", str(tmp_path / "merged")]) == main(["verify", str(base)]) == 0
    weights = tmp_path / "merged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert main(["verify", str(tmp_path / "merged")]) == 2


def test_a_table_of_experts_by_token_is_read(moe_recipe: Recipe, tmp_path: Path) -> None:
    base = write_base("deepseek_v4", tmp_path / "base", mlp_layer_types=["hash_moe", "moe"])
    assert isinstance(build_model(adapted(moe_recipe, base), CPU), HFDecoder)


def test_a_quantised_folder_of_our_decoder_s_is_verified(tmp_path: Path) -> None:
    model = wide("qwen3_moe", vocab_size=256)
    quantize_experts(model, "nf4")
    model.save_pretrained(tmp_path / "quantised")
    assert main(["verify", str(tmp_path / "quantised")]) == 0


def test_the_commands(moe_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The base is found again by its content. What is not served is one line, before a weight is read."""
    base, out, data = write_base("gpt_oss", tmp_path / "base"), tmp_path / "run", moe_recipe.data
    options = {"train.steps": 2, "train.out-dir": out, "data.corpus": data.corpus, "data.cache-dir": data.cache_dir,
               "data.seq-len": 16, "data.batch-size": 2, "data.heldout-every": 4}  # fmt: skip
    words = ["--recipe", "smoke", "--init-from", str(base), "--train.no-plot"]
    words += words_of(options)
    lora = ["--lora.rank", "2", "--lora.storage", "nf4"]

    def refused(words: list[str], message: str) -> None:
        capsys.readouterr()
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert "Loading weights" not in error

    what = "a model of type 'gpt_oss' runs in transformers' own class, "
    refused(["train", *words], "'gpt_oss'; transformers' own class trains adapters only, so add --lora.rank 8")
    refused(["train", *words, *lora, "--optim.name", "muon"], "optim.name 'muon' does not train adapters")
    for option, value, use in (
        ("parallel.expert", "2", "1"),
        ("parallel.checkpointing", "attention", "none or block"),
        ("train.compile", "blocks", "none"),
        ("lora.train-router", "", "False"),
    ):
        given = f" {option.replace('-', '_')} {value or True!r}".replace("'2'", "2")
        refused(
            ["train", *words, *lora, f"--{option}", *filter(None, [value])],
            f"{what}which does not support{given}; use {use}",
        )
    refused(
        ["train", *words, *lora, "--model.moe.num-experts", "4"], "--model.moe.num-experts: a model of transformers'"
    )
    assert not out.exists()

    assert main(["train", *words, *lora, "--parallel.checkpointing", "block"]) == 0
    trained = capsys.readouterr().out
    assert "of them trained, on cpu" in trained
    assert "experts, d=64, n=64, in float32: torch" in trained
    assert main(["eval", "--checkpoint", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == trained.splitlines()[-1]
    assert main(["generate", "--checkpoint", str(out), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    again = ["train", *words, *lora, "--parallel.checkpointing", "block", "--resume", "auto"]
    assert main(again) == 0, capsys.readouterr().err
    assert "resuming from" in capsys.readouterr().out, "the command that a scheduler repeats"
    moved = base.rename(tmp_path / "moved")
    refused(
        ["export", "--checkpoint", str(out), "--out", str(tmp_path / "no")],
        f"the base of these adapters is not in {base};",
    )
    resume = ["train", "--resume", str(out), "--train.steps", "3"]
    refused(resume, f"the base of these adapters is not in {base};")
    assert main([*resume, "--model.folder", str(moved)]) == 0, capsys.readouterr().err
    settings = json.loads((moved / "config.json").read_bytes())
    (moved / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.1}))
    refused([*resume, "--model.folder", str(moved)], f"{moved} has another model than the one whose adapters these are")
    again = ["train", *words[:2], "--init-from", str(moved), *words[4:], *lora, "--train.out-dir", str(tmp_path / "x")]
    of_others = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    for change, message in (
        ({"output_router_logits": True}, "output_router_logits is true, which adds an auxiliary loss"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is of 'fp8', which lora.storage 'nf4'"),
        (of_others, "transformers does not know it"),
    ):
        (moved / "config.json").write_text(json.dumps(settings | change))
        refused(again, message)
    (moved / "config.json").write_text(json.dumps(settings))
    (moved / "model.safetensors").write_bytes((moved / "model.safetensors").read_bytes()[:-1])
    refused(again, f"{moved}/model.safetensors cannot be read")


def test_cudnn_does_not_attend_to_a_cache(moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build_model(adapted(moe_recipe, write_base("glm4_moe", tmp_path / "base")), CPU)
    assert isinstance(decoder, HFDecoder)
    by_cudnn = watch_attention(monkeypatch)
    options: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "generator": torch.Generator(), "num_ids": 256}
    decoder.generate(torch.ones(1, 3, dtype=torch.int64), 2, **options)
    assert by_cudnn == [False] * 2 * len(decoder.blocks)


def test_a_row_holds_one_document_where_layers_carry_a_state(moe_recipe: Recipe, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    talks = [{"prompt": "ab"[: 1 + i % 2], "completion": "cd"} for i in range(12)]
    chats.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    settings: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "heldout_every": 4, "format": "chat"}
    recipe = replace(moe_recipe, data=DataConfig(16, 2, str(chats), **settings))
    for family, packing in (("gpt_oss", "best_fit"), ("qwen3_next", "one_document")):
        base = write_base(family, tmp_path / family)
        found = adapted(recipe, base, steps=2, sample_tokens=0, out_dir=str(tmp_path / f"run_{family}"))
        assert found.data.packing == packing
        data = prepare_data(found.data, found.data.tokenizer)
        assert (data.train.num_windows < 9) == (packing == "best_fit")
        train(found, init_from=base)
        if packing == "best_fit":
            assert isinstance(data.train, PackedDocuments)
            theirs, batch = AutoModelForCausalLM.from_pretrained(base), data.train.read(np.arange(1))
            rows = device_batch(batch, CPU)
            with torch.no_grad():
                ours = build_model(found, CPU)(rows.inputs, documents=rows.documents).logits[0]
                alone = [
                    theirs(ids[None]).logits[0] for ids in rows.inputs[0].split(rows.documents.bounds.diff().tolist())
                ]
            assert len(alone) > 2
            assert relative_error(torch.cat(alone), ours) < 1e-5
    packed = replace(found, data=replace(found.data, packing="best_fit"))
    with raises_one_line("Qwen3NextForCausalLM does not keep packed documents apart; use --data.packing one_document"):
        build_model(packed, CPU)


def test_a_model_of_text_is_evaluated_on_chats_example_by_example(
    moe_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its class does not keep packed documents apart, the loss is that of one that does."""
    base, chats = write_base("gpt_oss", tmp_path / "base"), tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "ab", "completion": "cd"}\n' * 12)
    train(adapted(moe_recipe, base, steps=1, eval_every=0, sample_tokens=0), init_from=base)
    words = ["--format", "chat", "--corpus", str(chats), "--heldout-every", "4"]
    found = []
    for apart in (True, False):
        if not apart:
            monkeypatch.setattr(hf_decoder, "_keeps_documents_apart", lambda _: False)
        assert main(["eval", "--checkpoint", moe_recipe.train.out_dir, *words]) == 0
        found.append(capsys.readouterr().out.splitlines()[-1])
    assert found[0] == found[1]


def test_other_linear_layers_in_4_bit(moe_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    base = write_base("gpt_oss", tmp_path / "base")
    recipe = adapted(moe_recipe, base, "mxfp4", steps=3, eval_every=0, save_every=0)
    recipe = replace(recipe, lora=replace(LORA, storage="mxfp4", linear="nf4", base=str(base)))
    expected = plain_losses(recipe, base, tmp_path / "initial")
    train(recipe, init_from=base)
    run = Path(recipe.train.out_dir)
    # At the third step some CPUs' rounding sends a token to another expert, which no tolerance is for.
    assert losses(run)[:2] == pytest.approx(expected[:2], rel=1e-4)
    assert losses(run) != pytest.approx(plain_losses(replace(recipe, lora=LORA), base, tmp_path / "dense"), rel=1e-4)
    checkpoint = open_checkpoint(run / "step_00000003")
    train(replace(checkpoint.state.recipe, train=replace(recipe.train, steps=4)), checkpoint)
    assert main(["export", "--checkpoint", str(run), "--out", str(tmp_path / "merged")]) == 2
    assert "linear layers in 4 bit are not merged; export --adapter" in capsys.readouterr().err
    assert main(["export", "--checkpoint", str(run), "--out", str(tmp_path / "adapter"), "--adapter"]) == 0
    with raises_one_line("lora.linear 'nf4' needs experts in 4 bits; set --lora.storage, too"):
        LoRAConfig(linear="nf4")
    with raises_one_line("lora.linear 'nf4' is for models of transformers' own classes; leave it out"):
        replace(moe_recipe, lora=LoRAConfig(storage="nf4", linear="nf4"))


def test_experts_in_4_bit_are_divided_evenly(moe_recipe: Recipe, tmp_path: Path) -> None:
    model = build_model(adapted(moe_recipe, write_base("gpt_oss", tmp_path / "base"), "nf4"), CPU)
    assert isinstance(model, HFDecoder)
    with raises_one_line("4 experts in 4 bit are not divided evenly by 3 processes; take a number that divides them"):
        shard_adapted(model, Meshes(ParallelConfig(shard=3), None, None))  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_trains_as_a_cpu_does(moe_recipe: Recipe, tmp_path: Path) -> None:
    """By flex attention; the sample is by the class' own."""
    base = write_base("gpt_oss", tmp_path / "base", head_dim=64)
    recipe = adapted(moe_recipe, base, "mxfp4", steps=4, eval_every=0)
    recipe = replace(recipe, lora=replace(LORA, rank=8, storage="mxfp4", base=str(base)))
    for device in ("cpu", "cuda"):
        train(
            replace(recipe, train=replace(recipe.train, device=device, out_dir=str(tmp_path / device))), init_from=base
        )
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
