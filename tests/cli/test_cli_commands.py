"""The subcommands on a finished run, help without torch, and errors on one line."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import run_python

import tilemoe
from tilemoe.cli.main import COMMANDS, main
from tilemoe.runtime import device
from tilemoe.train import loop
from tilemoe.train.checkpoints import restore

RECIPE = "the recipe file of the fixtures"
Run, Fails = Callable[..., tuple[int, str, str]], Callable[..., str]


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def test_train_leaves_a_result(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    assert 0 < result["heldout_nats_per_byte"] < 5.6
    assert result["training_tokens"] == 30 * 2 * 4 * 32
    assert result["recipe"]["name"] == "little"
    assert result["parameters"] > 10_000
    assert result["flops_per_token"] > 0
    assert result["versions"]["tilemoe"] == tilemoe.__version__
    assert result["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", result["commit"])


def test_train_ends_with_sample_plot_and_loss(recipe_file: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "run"
    options = ("--train.steps", "5", "--train.plot", "--model.num-layers", "1", "--train.tensorboard")
    status, out, err = run("train", "--recipe", recipe_file, "--train.out-dir", folder, *options)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert "sample:" in lines
    assert lines[lines.index("sample:") + 1].startswith("ab")
    assert lines[-2] == f"plot: {folder / 'plot.png'}"
    assert re.fullmatch(r"held-out loss \d+\.\d\d nats/byte", lines[-1])
    assert any((folder / "tensorboard").iterdir())


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_the_recipe_of_one_gpu_trains_without_one(
    text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Its blocks are compiled there, too; "eager" only traces them."""
    chosen = restore.compile_backend
    monkeypatch.setattr(restore, "compile_backend", lambda recipe: chosen(recipe) and backend)
    sizes = {"vocab-size": 256, "hidden-size": 32, "num-layers": 1, "num-heads": 2, "num-kv-heads": 1, "head-dim": 16}
    moe = {"hidden-size": 32, "intermediate-size": 16, "num-experts": 4, "num-experts-per-tok": 2}
    settings = {
        **{f"model.{name}": value for name, value in sizes.items()},
        **{f"model.moe.{name}": value for name, value in moe.items()}, "model.max-seq-len": 32, "data.corpus": text,
        "data.cache-dir": tmp_path / "cache", "data.tokenizer": "bytes", "data.heldout-every": 4, "data.seq-len": 32,
        "data.batch-size": 2, "train.device": "cpu", "train.steps": 2, "train.accumulation": 2,
        "train.eval-batches": 1, "train.sample-tokens": 0, "train.out-dir": tmp_path / "run",
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name}", value)]
    status, out, err = run("train", "--recipe", "single-gpu", "--train.no-plot", "--train.no-tensorboard", *options)
    assert (status, err) == (0, "")
    assert re.search(r"held-out loss \d+\.\d\d nats/byte", out)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["recipe"]["train"]["compile"] == "blocks"


def test_eval_repeats_the_runs_figure(finished: Path, run: Run) -> None:
    result = json.loads((finished / "result.json").read_text())
    status, out, _ = run("eval", "--checkpoint", finished)
    assert status == 0
    assert out.splitlines()[-1] == f"held-out loss {result['heldout_nats_per_byte']:.2f} nats/byte"
    status, older, _ = run("eval", "--checkpoint", finished / "step_00000025", "--batches", "2")
    assert status == 0
    assert "subset of 256 tokens" in older
    assert older.endswith(" nats/byte, subset\n")


def test_eval_shows_how_far_it_is_on_a_terminal_alone(
    finished: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("eval", "--checkpoint", finished)[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    status, out, err = run("eval", "--checkpoint", finished)
    assert status == 0
    assert "held-out tokens" in err
    assert "100%" in err
    assert "held-out tokens" not in out


def test_eval_of_an_exported_folder_is_that_of_its_checkpoint(
    finished: Path, text: Path, tmp_path: Path, run: Run, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEMOE_CACHE", str(tmp_path / "cache"))
    hub = tmp_path / "hub"
    assert run("export", "--checkpoint", finished, "--out", hub)[0] == 0
    status, expected, _ = run("eval", "--checkpoint", finished)
    assert status == 0
    status, found, _ = run("eval", "--checkpoint", hub, "--corpus", text, "--heldout-every", 4)
    assert status == 0
    assert found.splitlines()[0].startswith(f"checkpoint {hub}, ")
    assert found.partition(", ")[2] == expected.partition(", ")[2]
    assert "--corpus is missing" in fails("eval", "--checkpoint", hub)
    options = ("eval", "--checkpoint", hub, "--corpus", text)
    assert "--seq-len (64) must not exceed the 32 that the model takes" in fails(*options, "--seq-len", 64)
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    (hub / "checksums.json").unlink()  # they tell of the other one
    assert "tokenizer.json has 256 ids and the model's vocab_size is 200" in fails(*options)


def test_eval_takes_other_settings_than_the_trainings(finished: Path, run: Run) -> None:
    figures = set()
    for options in ((), ("--precision", "bf16"), ("--seq-len", 16), ("--heldout-every", 2)):
        status, out, _ = run("eval", "--checkpoint", finished, *options)
        assert status == 0
        assert "note:" not in out
        figures.add(out.splitlines()[0])
    assert len(figures) == 4


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_cpu_without_bf16_trains_and_evaluates_in_fp32(
    recipe_file: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    for module in (device, loop):
        monkeypatch.setattr(module, "has_fast_gemm", lambda device_type, dtype: has_bf16)
    options = ("--train.precision", "bf16", "--train.steps", 6, "--train.out-dir", tmp_path / "run")
    status, said, _ = run("train", "--recipe", recipe_file, *options)
    assert status == 0
    assert ("precision: fp32, because this CPU has no instructions for bf16" in said) != has_bf16
    evaluate = ("eval", "--checkpoint", tmp_path / "run", "--batches", 2)
    assert run(*evaluate) == run(*evaluate, "--precision", "bf16" if has_bf16 else "fp32")
    seen: list[bool] = []
    forward = tilemoe.DecoderLM.forward

    def seeing(model: tilemoe.DecoderLM, *args: Any, **options: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return forward(model, *args, **options)

    monkeypatch.setattr(tilemoe.DecoderLM, "forward", seeing)
    for precision, is_cast in (((), has_bf16), (("--precision", "fp32"), False), (("--precision", "bf16"), True)):
        seen.clear()
        assert run(*evaluate, *precision)[0] == 0
        assert set(seen) == {is_cast}


def test_generate_continues_the_prompt(finished: Path, run: Run) -> None:
    arguments = ("generate", "--checkpoint", finished, "--prompt", "abc", "--max-new-tokens", "6")
    status, out, _ = run(*arguments, "--seed", "3")
    assert status == 0
    assert out.startswith("abc")
    assert run(*arguments, "--seed", "3")[1] == out
    greedy = [run(*arguments, "--temperature", "0", "--seed", str(seed))[1] for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_generate_says_that_the_context_is_full(finished: Path, run: Run) -> None:
    arguments = ("generate", "--checkpoint", finished, "--prompt", " " * 30, "--temperature", "0")
    status, out, err = run(*arguments, "--max-new-tokens", "2")
    assert (status, err) == (0, "")
    assert run(*arguments) == (
        0,
        out,
        "note: 2 of 200 new tokens; with the prompt they fill the 32 that the model takes\n",
    )


def test_export_is_loaded_by_transformers_with_equal_logits(finished: Path, tmp_path: Path, run: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "hub"
    status, said, _ = run("export", "--checkpoint", finished, "--out", out)
    assert status == 0
    assert "note: transformers trains it otherwise" in said  # one loss of both layers, with half the strength
    assert "router_aux_loss_coef 0.02 in config.json" in said
    ids = torch.arange(97, 117)[None]
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(ids).logits, restore.restore(finished, "cpu").model(ids).logits, rtol=1e-4, atol=1e-4
        )
    tokenizer, text = AutoTokenizer.from_pretrained(out), "a  b\n, é. <|endoftext|>"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.model_max_length == theirs.config.max_position_embeddings == 32
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 0
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}


HELP = """
import sys, time
start = time.perf_counter()
from tilemoe.cli.main import COMMANDS, main
for command in ("", *COMMANDS):
    try:
        main([*command.split(), "--help"])
    except SystemExit as leave:
        assert not leave.code
    assert time.perf_counter() - start < 2.0, command
    assert "torch" not in sys.modules, command
    start = time.perf_counter()
"""


def test_help_is_quick_and_imports_no_torch() -> None:
    out = run_python(HELP)
    found = re.findall(r"^usage: tilemoe (\w+)", out, re.MULTILINE)
    assert found == ["COMMAND", *COMMANDS]


def test_python_m_tilemoe() -> None:
    done = subprocess.run([sys.executable, "-m", "tilemoe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tilemoe {tilemoe.__version__}\n"


def test_every_option_of_train_is_in_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["train", "--recipe", "tiny", "--help"])
    assert not leave.value.code
    out = capsys.readouterr().out
    moe = ("--model.moe.num-experts", "--model.moe.rounding.mode")
    for option in ("--recipe", "--resume", "--train.steps", "--model.num-layers", *moe, "--data.corpus"):
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "no command; give one of train"),
        (["bench", "nothing", "--help"], "invalid choice 'nothing'"),
        (["x" * 100_000], "give one of train, eval"),
        (["trian"], "unknown command 'trian'; give one of train"),
        (["train"], "--recipe NAME is missing; choose one of"),
        (["train", "--recipe", "huge"], "unknown recipe 'huge'; choose one of 1b, 30b-layer, 7b, 7b-ep"),
        (["train", "--recipe", "nowhere/x.json"], "no file nowhere/x.json"),
        (["train", "--recipe", RECIPE, "--train.stpes", "5"], "perhaps you meant --train.steps"),
        (["train", "--recipe", RECIPE, "--train.steps", "1.5"], "--train.steps: '1.5' is not a whole number"),
        (["train", "--recipe", RECIPE, "--train.plot", "False"], "error: 'False' belongs to no option; a switch takes"),
        (["generate", "--chekpoint", "x", "--prompt", "x"], "perhaps you meant --checkpoint ("),
        (["eval", "--checkpoint", "x", "--data.format", "chat"], "perhaps you meant --format ("),
        (["train", "--recipe", RECIPE, "--train.steps", "0"], "train.steps must be an integer >= 1"),
        (["train", "--recipe", RECIPE, "--optim.schedule", "x"], "--optim.schedule"),
        (["train", "--recipe", RECIPE, "--model.moe.num-experts-per-tok", "9"], "must not exceed num_experts (4)"),
        (["train", "--recipe", RECIPE, "--model.moe.rounding.tile", "24"], "rounding.tile must be a power of two"),
        (["train", "--resume", "nowhere"], "no folder nowhere"),
        (["eval", "--checkpoint", "nowhere"], "--checkpoint nowhere: no such folder; give a run"),
        (["eval", "--checkpoint", "x", "--seq-len", "0"], "--seq-len must be >= 1, got 0"),
        (["generate", "--checkpoint", "x", "--prompt", "x", "--temperature", "-1"], "--temperature must be"),
        (["generate", "--checkpoint", "x", "--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be >= 1"),
        (["generate", "--checkpoint", "x", "--prompt", "x", "--seed", "9" * 23], "--seed must be below 2**63"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], named: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    monkeypatch.chdir(tmp_path)
    message = fails(*[recipe_file if argument == RECIPE else argument for argument in arguments])
    assert named in message
    assert len(message) < 5000
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--train.lr", "--optim.lr"), ("--optim.learning_rate=1", "--optim.lr"),
        ("--per_device_train_batch_size", "--data.batch-size"), ("--epochs", "--train.steps"),
        ("--recipie", "--recipe"), ("--model.num-experts", "--model.moe.num-experts"), ("--zzz", None),
    ],
)  # fmt: skip
def test_an_unknown_option_suggests_the_setting_of_that_name(
    given: str, meant: str | None, recipe_file: Path, fails: Fails
) -> None:
    message = fails("train", "--recipe", recipe_file, given, "3")
    named = given.partition("=")[0].replace("_", "-")
    hint = "" if meant is None else f"; perhaps you meant {meant}"
    assert f"there is no option {named}{hint} (see tilemoe train --help)" in message


def test_whole_numbers_may_be_written_as_floats(text: Path, recipe_file: Path, tmp_path: Path, run: Run) -> None:
    """On the command line and in a recipe, whose experts are as wide as the model without saying so."""
    settings = json.loads(recipe_file.read_text())
    del settings["model"]["moe"]["hidden_size"]
    settings["train"]["sample_tokens"] = 0
    own = tmp_path / "own.json"
    own.write_text(json.dumps(settings).replace('"accumulation": 2', '"accumulation": 2e0'))
    options = ("--train.out-dir", tmp_path / "run", "--train.steps", "0.2e1", "--model.hidden_size=48")
    assert run("train", "--recipe", own, *options)[0] == 0
    recipe = json.loads((tmp_path / "run" / "result.json").read_text())["recipe"]
    assert str((recipe["train"]["steps"], recipe["train"]["accumulation"])) == "(2, 2)"
    assert recipe["model"]["moe"]["hidden_size"] == 48  # of the command line, too
    assert run("plan", "--preset", "olmoe", "--train", "--seq-len", "1e3", "--gpus", "8")[0] == 0  # which may be None


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--recipe", "{}.json"),
        ("train", "--recipe", RECIPE, "--train.out-dir", "{}"),
        ("train", "--recipe", RECIPE, "--data.cache-dir", "{}"),
        ("train", "--resume", "{}"),
        ("eval", "--checkpoint", "{}"),
        ("export", "--checkpoint", "x", "--out", "{}"),
        ("plan", "--checkpoint", "{}"),
        ("bench", "layer", "--cases", "{}.json"),
        ("report", "--out", "{}"),
    ],
)
def test_a_home_folder_of_nobody_is_one_line(
    arguments: Sequence[str], recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    monkeypatch.chdir(tmp_path)
    path = "~nobody-of-that-name/x"
    message = fails(*[recipe_file if given == RECIPE else given.format(path) for given in arguments])
    assert re.search(rf"{path}(\.json)?: no such home folder; write the path without ~", message)
    assert not any(tmp_path.glob("*nobody*"))


def test_a_model_too_large_for_the_memory_is_one_line(
    recipe_file: Path, tmp_path: Path, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**18))  # which is looked at first
    base = ("train", "--recipe", recipe_file, "--train.out-dir", tmp_path / "run")
    assert "out of memory; lower data.batch_size" in fails(*base, "--model.vocab-size", 10**13)
    assert "out of memory; lower data.batch_size" in fails(*base, "--data.batch-size", 10**14)


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("tilemoe.cli.export.run", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["export"])


def test_evaluating_a_changed_corpus_says_so(recipe_file: Path, text: Path, tmp_path: Path, run: Run) -> None:
    corpus = tmp_path / "corpus"
    shutil.copytree(text, corpus)
    options = ("--data.corpus", corpus, "--train.out-dir", tmp_path / "run", "--train.steps", "1")
    assert run("train", "--recipe", recipe_file, *options)[0] == 0
    assert "note:" not in run("eval", "--checkpoint", tmp_path / "run")[1]
    (corpus / "00.txt").write_text("changed " * 100)
    status, out, _ = run("eval", "--checkpoint", tmp_path / "run")
    assert status == 0
    assert "changed since training" in out.splitlines()[0]


def test_damaged_and_foreign_checkpoints_are_one_line(
    recipe_file: Path, finished: Path, tmp_path: Path, fails: Fails
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    base = ("train", "--recipe", recipe_file, "--resume", folder)
    assert "model.num_layers is 3 here and 2 in the checkpoint" in fails(*base, "--model.num-layers", "3")
    assert "stays in" in fails(*base, "--train.out-dir", tmp_path / "elsewhere")
    newest = folder / "step_00000030" / "model.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    for arguments in (
        base,
        ("eval", "--checkpoint", folder),
        ("generate", "--checkpoint", folder, "--prompt", "a"),
        ("export", "--checkpoint", folder, "--out", tmp_path / "out"),
    ):
        message = fails(*arguments)
        assert "model.safetensors does not match its checksum" in message
        assert f"--resume {folder / 'step_00000025'}" in message
    assert not (tmp_path / "out").exists()


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TILEMOE_DEBUG", "1")
    assert main(["train"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_reader_that_stops_reading_is_no_error() -> None:
    code = f"{sys.executable} -m tilemoe train --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


@pytest.mark.thorough
def test_a_training_whose_output_nobody_reads_is_saved(recipe_file: Path, tmp_path: Path) -> None:
    options = f"--train.out-dir {tmp_path / 'run'} --train.steps 9999 --train.eval-every 0 --train.save-every 0"
    code = f"{sys.executable} -m tilemoe train --recipe {recipe_file} {options} | grep -m 1 'step 3/'"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert checkpoint_steps(tmp_path / "run")[-1] >= 3
