"""Fine-tuning on conversations: transformers' own losses, documents that do not see each other, resuming, mistakes."""

import json
import random
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from helpers import losses, raises_one_line
from small_runs import changed, words_of
from test_train_initial import of_models, write_model
from test_train_loop import data_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from tilemoe.cli.main import main
from tilemoe.config import TokenRounding
from tilemoe.data import PackedBatch, PackedDocuments
from tilemoe.data.chat_encoder import ChatEncoder
from tilemoe.data.conversations import Conversation
from tilemoe.data.tokenizer import Tokenizer, load_tokenizer
from tilemoe.train import sample
from tilemoe.train.checkpoints.initial import adopt
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import DataConfig, Recipe
from tilemoe.train.datasets import device_batch, make_sampler
from tilemoe.train.evaluate import evaluate
from tilemoe.train.job.processes import ALONE
from tilemoe.train.loop import Trainer
from tilemoe.train.run import RunResult, train

CPU = torch.device("cpu")
WORDS = ("copy", "the", "word", "tile", "now", "please", "or", "else")
TURNS = "{% for m in messages %}{{ m.role }}> {{ m.content }}\n{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}assistant> {% endif %}"


def write_chats(path: Path, count: int, seed: int = 0) -> Path:
    """Conversations of one to three answers, and prompts with completions, of very different lengths."""
    rng = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    rows: list[dict[str, Any]] = []
    for number in range(count):
        if number % 4 == 3:
            rows.append({"prompt": words(1), "completion": words(2)})
        else:
            roles = ("user", "assistant") * rng.randint(1, 2)
            rows.append({"messages": [{"role": role, "content": words(1)} for role in roles]})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


@pytest.fixture
def recipe(moe_recipe: Recipe, tmp_path: Path) -> Recipe:
    """Without a balancing loss, which is one of whole micro-batches and not of tokens to learn."""
    recipe = changed(moe_recipe, model__moe__router__aux_loss_coef=0.0, model__moe__router__selection_bias=False)
    data = replace(
        moe_recipe.data, format="chat", corpus=str(write_chats(tmp_path / "chats.jsonl", 60)), seq_len=64,
        batch_size=2, too_long="skip", cache_dir=str(tmp_path / "cache"), heldout_every=4,
    )  # fmt: skip
    return replace(recipe, model=replace(recipe.model, max_seq_len=64), data=data)


@pytest.mark.parametrize("name", of_models("olmoe"))
def test_a_fine_tune_is_a_plain_loop_on_transformers_model(name: str, recipe: Recipe, tmp_path: Path) -> None:
    """Each document by itself, the mean over all tokens to learn of a step, AdamW and clipping of PyTorch."""
    theirs = write_model(name, tmp_path / "base").train()
    theirs.set_experts_implementation("eager")  # grouped GEMMs on a CPU round more
    theirs.get_input_embeddings().padding_idx = None  # the end-of-text token here, which is to be trained
    recipe = adopt(recipe, tmp_path / "base")
    steps, parts = 30, 2
    recipe = replace(
        changed(recipe, model__moe__router__aux_loss_coef=0.0),
        train=replace(recipe.train, steps=steps, accumulation=parts, eval_every=0, save_every=0),
        # eps: where a gradient is 0 but for rounding, AdamW's own 1e-8 would make full steps of the rounding.
        optim=replace(recipe.optim, lr=3e-3, eps=1e-6, schedule="constant", warmup_steps=0),
    )
    train(recipe, init_from=tmp_path / "base")
    sampler = make_sampler(data_of(recipe), recipe.data, recipe.train.seed, ALONE)
    matrices = [p for n, p in theirs.named_parameters() if p.ndim > 1 and "embed_tokens" not in n]
    others = [p for n, p in theirs.named_parameters() if p.ndim == 1 or "embed_tokens" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-6)
    expected = []
    for step in range(steps):
        nats, learnt = [], 0
        for part in range(parts):
            batch = sampler.batch(step * parts + part)
            assert isinstance(batch, PackedBatch)
            for inputs, targets, positions in zip(*map(torch.from_numpy, batch), strict=True):
                edges = [*(positions == 0).nonzero()[:, 0].tolist(), positions.numel()]
                for first, end in pairwise(edges):
                    if (targets[first:end] >= 0).any():
                        logits = theirs(input_ids=inputs[None, first:end]).logits[0]
                        nats.append(F.cross_entropy(logits, targets[first:end], reduction="sum"))
            learnt += int((batch.targets >= 0).sum())
        loss = torch.stack(nats).sum() / learnt
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), recipe.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = losses(recipe.train.out_dir)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < 0.8 * found[0]


def real_tokens(batch: PackedBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(B, S) bool: False after the last document of each window, walked through one by one."""
    real = np.zeros(batch.inputs.shape, np.bool_)
    for row, targets, positions in zip(real, batch.targets, batch.positions, strict=True):
        for first, end in pairwise([*np.flatnonzero(positions == 0), row.size]):
            row[first:end] = (targets[first:end] >= 0).any()
    return real


@pytest.mark.parametrize("rounding", [None, TokenRounding("nearest", 16)])
def test_balancing_and_statistics_leave_out_what_fills_windows_up(
    recipe: Recipe, rounding: TokenRounding | None
) -> None:
    recipe = changed(recipe, model__moe__rounding=rounding, train__accumulation=3)
    recipe = changed(recipe, model__moe__router__aux_loss_coef=0.05, model__moe__router__selection_bias=True)
    trainer, outs, moved = Trainer(recipe, build_model(recipe, CPU), data_of(recipe), CPU), [], []
    trainer.model.register_forward_hook(lambda module, args, out: outs.append(out))
    trainer.model.update_selection_bias = lambda pairs, rate: moved.append(pairs)  # type: ignore[method-assign]
    stats = trainer.train_step()
    real = [int(real_tokens(trainer.sampler.batch(part)).sum()) for part in range(3)]
    assert len(set(real)) > 1, "there is more padding in some"
    assert max(real) < 2 * 64
    assert [out.pairs_per_expert.sum(1).tolist() for out in outs] == [[2 * n] * 2 for n in real]
    assert moved[0].sum(1).tolist() == [2 * sum(real)] * 2
    for layer in range(2):
        expected = np.average([out.router_entropy[layer].item() for out in outs], weights=real)
        assert stats.router_entropy[layer] == pytest.approx(expected, abs=1e-4)


def test_an_export_ends_generation_with_the_turn_too(recipe: Recipe, tmp_path: Path) -> None:
    write_model("qwen3_moe", tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<0x21>", "chat_template": TEMPLATE})
    )
    recipe = adopt(replace(recipe, train=replace(recipe.train, steps=1)), tmp_path / "base")
    train(recipe, init_from=tmp_path / "base")
    assert main(["export", "--checkpoint", recipe.train.out_dir, "--out", str(tmp_path / "out")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.generation_config.eos_token_id == found.config.eos_token_id == [0, ord("!")]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<0x21>"


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML = TURN + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def exported_fine_tune(recipe: Recipe, tmp_path: Path, tokenizer: str, template: str | None) -> tuple[Path, Tokenizer]:
    """The export of one step from a base with this tokenizer and template, and the tokenizer that it trained with."""
    write_model("qwen3_moe", tmp_path / "base", 300)
    if tokenizer == "bpe":
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        backend.train_from_iterator(
            ["user assistant hello Yo! " * 3],
            tokenizers.trainers.BpeTrainer(vocab_size=270, special_tokens=special, initial_alphabet=alphabet),
        )
        backend.save(str(tmp_path / "base" / "tokenizer.json"))
    if template is not None:
        (tmp_path / "base" / "chat_template.jinja").write_text(template)
    recipe = adopt(replace(recipe, train=replace(recipe.train, steps=1)), tmp_path / "base")
    used = load_tokenizer(recipe.data.tokenizer)
    assert isinstance(train(recipe, init_from=tmp_path / "base"), RunResult)
    shutil.rmtree(tmp_path / "base")
    assert main(["export", "--checkpoint", recipe.train.out_dir, "--out", str(tmp_path / "out")]) == 0
    return tmp_path / "out", used


@pytest.mark.parametrize(("tokenizer", "template"), [("bytes", None), ("bpe", None), ("bpe", CHATML)])
def test_an_export_has_the_template_that_it_was_trained_with(
    tokenizer: str, template: str | None, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in one, too: transformers gives the ids that were trained, and a run from the export trains them."""
    out, used = exported_fine_tune(recipe, tmp_path, tokenizer, template)
    says = [("system", "Be é"), ("user", "Hi\n"), ("assistant", " Yo!"), ("user", "Bye"), ("assistant", "So long")]
    messages = [{"role": role, "content": content} for role, content in says]
    example = Conversation("a:1", tuple(messages))
    ids, learnt = ChatEncoder(used).encode(example)
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.apply_chat_template(messages, tokenize=True, return_dict=False) == ids.tolist()
    asked = theirs.apply_chat_template(messages[1:2], tokenize=True, return_dict=False, add_generation_prompt=True)
    assert asked == used.encode(ChatEncoder(used).ask("Hi\n")[0]).tolist()
    if template is None:
        monkeypatch.setitem(sys.modules, "transformers", None)  # not needed
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        mask = theirs.apply_chat_template(messages, **options)["assistant_masks"]
        assert mask == learnt.astype(int).tolist()
    again = load_tokenizer(adopt(recipe, out).data.tokenizer)
    found = ChatEncoder(again).encode(example)
    assert again.chat_template is not None
    assert [part.tolist() for part in found] == [ids.tolist(), learnt.tolist()]


def test_generate_answers_by_the_chat_template(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the token that ends a turn, though the tokenizer's eos_token is another."""
    out, used = exported_fine_tune(recipe, tmp_path, "bpe", CHATML)
    asked: list[list[int]] = []

    def fake(model: object, ids: torch.Tensor, count: int, **options: object) -> torch.Tensor:
        asked.append(ids[0].tolist())
        new = used.encode("Yo!<|im_end|>\n<|im_start|>user").tolist()
        return torch.cat([ids, torch.tensor([new])], dim=1)

    monkeypatch.setattr(sample, "generate", fake)
    for checkpoint in (recipe.train.out_dir, str(out)):
        capsys.readouterr()
        assert main(["generate", "--checkpoint", checkpoint, "--prompt", "Hi", "--chat"]) == 0
        assert capsys.readouterr().out == "Yo!\n"
    assert asked == [used.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").tolist()] * 2
    (out / "tokenizer_config.json").write_text("{}")
    (out / "checksums.json").unlink()  # they tell of the other one
    assert main(["generate", "--checkpoint", str(out), "--prompt", "Hi", "--chat"]) == 2
    assert "--chat: the checkpoint has no chat template; fine-tune it with --data.format" in capsys.readouterr().err


def test_the_held_out_loss_is_of_the_tokens_to_learn(recipe: Recipe) -> None:
    data, model = data_of(recipe), build_model(recipe, CPU)
    heldout = data.heldout
    assert isinstance(heldout, PackedDocuments)
    options: dict[str, Any] = {"seq_len": 64, "device": CPU, "autocast": lambda: torch.autocast("cpu", enabled=False)}
    found = [evaluate(model, heldout, batch_size=size, **options) for size in (1, 3)]
    batch = device_batch(heldout.read(np.arange(heldout.num_windows)), CPU)
    with torch.no_grad():
        expected = model(batch.inputs, batch.labels, documents=batch.documents).loss.item()
    for result in found:
        assert result is not None
        assert result.nats_per_token == pytest.approx(expected, rel=1e-6)
        assert (result.tokens, result.whole_split, result.nats_per_byte) == (heldout.num_targets, True, None)


def test_the_command_line_fine_tunes_and_evaluates(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model("olmoe", tmp_path / "base")
    with Path(recipe.data.corpus).open("a") as file:
        file.write(json.dumps({"prompt": "x" * 60, "completion": "y" * 60}) + "\n")
    options = {"train.steps": 3, "train.out-dir": tmp_path / "run", "data.corpus": recipe.data.corpus,
               "data.format": "chat", "data.cache-dir": recipe.data.cache_dir, "data.seq-len": 64,
               "data.heldout-every": 4, "train.sample-tokens": 0, "train.plot": False}  # fmt: skip
    words = words_of(options)
    words = [word for word in words if word != "False"]
    words[words.index("--train.plot")] = "--train.no-plot"
    command = ["train", "--recipe", "smoke", "--init-from", str(tmp_path / "base"), *words]
    assert main(command) == 2
    assert f"{recipe.data.corpus}:" in (message := capsys.readouterr().err)
    assert "data.too_long to skip or truncate" in message
    assert main([*command, "--data.too-long", "skip"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert f"left out: {recipe.data.corpus}:61" in out
    assert "tokens to learn" in out
    assert "nats/token" in out.splitlines()[-1]
    assert main(["eval", "--checkpoint", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]
    assert main(["eval", "--checkpoint", str(tmp_path / "run"), "--seq-len", "48"]) == 0
    assert "changed since training" not in capsys.readouterr().out  # more examples are too long
    other = ["eval", "--checkpoint", str(tmp_path / "base"), "--corpus", recipe.data.corpus, "--format", "chat"]
    assert main([*other, "--seq-len", "64", "--heldout-every", "4"]) == 2
    assert "data.too_long to skip or truncate" in capsys.readouterr().err
    assert main([*other, "--seq-len", "64", "--heldout-every", "4", "--too-long", "skip"]) == 0
    capsys.readouterr()
    with Path(recipe.data.corpus).open("a") as file:
        file.write('{"messages": []}\n')
    assert main([*command, "--data.too-long", "skip", "--train.out-dir", str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_settings_that_chat_cannot_have() -> None:
    with raises_one_line("data.tokenizer 'bpe:400' is trained on plain text, but data.format is chat"):
        DataConfig(8, 1, tokenizer="bpe:400", format="chat")
    with raises_one_line("data.format must be one of chat, text; got 'json'"):
        DataConfig(8, 1, format="json")
    with raises_one_line("data.too_long must be one of error, skip, truncate; got 'drop'"):
        DataConfig(8, 1, too_long="drop")
