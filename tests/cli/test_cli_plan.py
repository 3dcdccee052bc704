"""``tilemoe plan``: its tables and JSON against the arithmetic, what it takes, and what it refuses in one line."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from helpers import run_python

from tilemoe.bench import record
from tilemoe.kernels.experts.memory import backward_peak_bytes, saved_bytes
from tilemoe.models.presets import MOE_PRESETS
from tilemoe.perf.costs import kernel_costs, layer_roofline_ms, padding_waste
from tilemoe.perf.designs import DESIGNS
from tilemoe.perf.hardware import DTYPE_BYTES, GPUS, find_gpu
from tilemoe.perf.predict import layer_ms
from tilemoe.runtime.device import TRITON_FOR_10
from tilemoe.shape import MoEShape

OLMOE = MoEShape(32768, 2048, 1024, 64, 8)
PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
BAR, LOOP = 1.5, 0.12  # seconds: of a plan, and of the loop that shows how fast the core is, at rest
Run, Fails = Callable[..., tuple[int, str, str]], Callable[..., str]

# Sizes that every kind of config.json has, and a few of its own.
COMMON = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_experts_per_tok": 2, "max_position_embeddings": 64}  # fmt: skip
CONFIGS = [
    ({"model_type": "olmoe", "intermediate_size": 24, "num_experts": 16}, "d=64 n=24 E=16 K=2"),
    ({"model_type": "qwen3_moe", "moe_intermediate_size": 40, "num_experts": 8}, "d=64 n=40 E=8 K=2"),
    ({"model_type": "mixtral", "intermediate_size": 56, "num_local_experts": 4}, "d=64 n=56 E=4 K=2"),
    ({"model_type": "deepseek_v3", "moe_intermediate_size": 48, "n_routed_experts": 4}, "d=64 n=48 E=4 K=2, gated"),
    ({"model_type": "nemotron_h", "moe_intermediate_size": 48, "n_routed_experts": 4, "mlp_hidden_act": "relu2"},
     "d=64 n=48 E=4 K=2, ungated"),
    ({"model_type": "dbrx", "hidden_size": None, "d_model": 80, "num_experts_per_tok": None,
      "ffn_config": {"hidden_size": 7, "ffn_hidden_size": 48, "moe_num_experts": 16, "moe_top_k": 4}},
     "d=80 n=48 E=16 K=4, gated"),
    ({"model_type": "hunyuan_v1_moe", "moe_intermediate_size": [48, 48], "num_experts": 8, "moe_topk": [4, 4],
      "num_experts_per_tok": None}, "d=64 n=48 E=8 K=4, gated"),
]  # fmt: skip


def as_json(run: Run, *arguments: object, expected: int = 0) -> dict[str, Any]:
    status, out, _ = run("plan", *arguments, "--json")
    assert status == expected
    found: dict[str, Any] = json.loads(out)
    return found


def test_tables_show_what_the_arithmetic_says(run: Run) -> None:
    status, out, _ = run("plan", "--preset", "olmoe-1b-7b", "--tokens", 32768, "--gpu", "H200")
    assert status == 0
    assert f"{saved_bytes(OLMOE) / 2**30:.2f} GiB   between forward and backward" in out
    assert f"{backward_peak_bytes(OLMOE) / 2**30:.2f} GiB   with all gradients" in out
    roofs, predicted = layer_roofline_ms(OLMOE, find_gpu("H200").ceilings()), layer_ms(OLMOE, find_gpu("H200"))
    for part, roof, milliseconds in zip(("forward ", "backward"), roofs, predicted, strict=True):
        assert f"{part}  {milliseconds:.3f} ms predicted (measured), no faster than {roof:.3f} ms" in out
    (combine,) = [line for line in out.splitlines() if line.startswith("combine ")]
    assert combine.endswith("memory")
    (up_proj,) = [line for line in out.splitlines() if line.startswith("up_proj_act ")]
    assert up_proj.endswith("arithmetic")
    assert f"{kernel_costs(OLMOE)['up_proj_act'].flops / 1e9:,.1f}" in up_proj
    assert f"{100 * padding_waste(OLMOE, 128):8.1f} %" in out
    for name, style in DESIGNS.items():
        assert re.search(rf"^{name} +{style(OLMOE).saved_bytes / 2**30:.2f} ", out, flags=re.M)


def test_a_layer_over_several_hosts(run: Run, fails: Fails) -> None:
    over = ("--preset", "deepseek-v3", "--hosts", 4, "--network-gbps", 50)
    exchange = as_json(run, *over)["exchange"]
    one, two = (exchange["ways"][name] for name in ("one exchange", "two levels"))
    assert two["network_copies"] < one["network_copies"]
    assert two["layer_ms"][0] == pytest.approx(exchange["computed_ms"][0] + two["exchange_ms"])
    _, out, _ = run("plan", *over)
    assert re.search(rf"^two levels +{two['network_copies']:.2f} .* {two['layer_ms'][1]:.3f}$", out, flags=re.M)
    assert "--hosts needs --network-gbps" in fails("plan", "--hosts", 4)
    assert "must be at least 1 and divide the 64 experts, got 24" in fails("plan", "--hosts", 3, "--network-gbps", 9)
    assert "are for --hosts" in fails("plan", "--network-gbps", 9)


def test_the_other_designs_steps(run: Run) -> None:
    plan = as_json(run, "--preset", "olmoe")
    status, out, _ = run("plan", "--preset", "olmoe", "--others")
    assert status == 0
    for name, style in DESIGNS.items():
        found, other = style(OLMOE), plan["others"][name]
        assert other["backward_peak_bytes"] == found.backward_peak_bytes
        assert other["padding"] == {"tile_rows": found.tile_rows, "waste": found.padding_waste}
        steps = {step["step"]: step["predicted_ms"] for step in other["steps"]}
        assert list(steps) == [*found.forward, *found.backward]
        assert sum(other["predicted_ms"].values()) == pytest.approx(sum(steps.values()))
        table = out.split(f"\n{name}, tiles of {found.tile_rows} rows\n")[1]
        for step, milliseconds in steps.items():
            assert re.search(rf"^{re.escape(step)} +bf16 .* {milliseconds:.3f}  ", table, flags=re.M)
    (ours,) = re.findall(r"^tilemoe .* ([\d.]+) +([\d.]+)$", out, flags=re.M)
    routed = [step for step in plan["steps"] if step["step"].startswith(("logits", "route"))]
    for part, shown in zip(("forward", "backward"), ours, strict=True):
        router = sum(step["predicted_ms"] for step in routed if step["part"] == part)
        assert float(shown) == pytest.approx(plan["times"][part]["predicted_ms"] - router, abs=1e-3)


def test_h_kept_in_fp8(run: Run) -> None:
    plan, plain = (as_json(run, "--train", "--gpus", 8, *options) for options in (("--save", "fp8"), ()))
    assert plan["memory"]["saved_bytes"] == saved_bytes(replace(OLMOE, save="fp8")) < plain["memory"]["saved_bytes"]
    of_all, of_plain = (each["train"]["setups"][0] for each in (plan, plain))
    assert of_all["micro_batch"] > of_plain["micro_batch"]
    _, out, _ = run("plan", "--save", "fp8")
    assert out.splitlines()[0].endswith("gated, bf16, h kept in fp8")
    status, _, err = run("plan", "--save", "fp8", "--intermediate-size", 32)
    assert status != 0
    assert "save='fp8' needs the width of h (n, or 2n if gated) to be a multiple of 128, got 64" in err


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_in_each_dtype_that_it_has(gpu: str, run: Run) -> None:
    for dtype in DTYPE_BYTES:
        if dtype == "fp8" and not GPUS[gpu].fp8_tflops:
            continue
        plan = as_json(run, "--gpu", gpu, "--dtype", dtype)
        assert (f"Triton >= {TRITON_FOR_10}" in plan["gpu"]["note"]) == (gpu in ("B200", "B300"))
        assert ("no FP8 kernels" in plan["gpu"]["note"]) == (dtype == "fp8" and gpu not in ("H100", "H200"))
        is_fitted = gpu == "H200" and dtype in ("bf16", "fp16", "fp8")
        assert plan["gpu"]["rates"] == ("measured" if is_fitted else "spec")
        for times in plan["times"].values():
            assert times["predicted_ms"] > times["roofline_ms"]
    setups = as_json(run, "--gpu", gpu, "--train", "--gpus", 64)["train"]["setups"]
    assert ("fp8" in {setup["dtype"] for setup in setups}) == (gpu in ("H100", "H200"))


def test_sizes_that_are_given_replace_a_preset_s_and_are_named(run: Run) -> None:
    _, out, _ = run("plan", "--hidden-size", 4096, "--num-experts", 256, "--intermediate-size", 1024)
    assert "d=4096 n=1024 E=256 K=8" in out
    assert "not olmoe-1b-7b as published: hidden_size 4096 (was 2048), num_experts 256 (was 64)\n" in out


@pytest.mark.parametrize(("settings", "sizes"), CONFIGS, ids=[str(settings["model_type"]) for settings, _ in CONFIGS])
def test_a_folder_or_a_file_of_settings(settings: dict[str, object], sizes: str, tmp_path: Path, run: Run) -> None:
    present = {key: value for key, value in (COMMON | settings).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(present))
    (tmp_path / "other.json").write_text(json.dumps(present))
    for given in (tmp_path, tmp_path / "other.json"):
        status, out, _ = run("plan", "--checkpoint", given)
        assert status == 0
        assert sizes in out.splitlines()[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments", [(), ("--train", "--json"), ("--plot", "plan.png")], ids=["layer", "model", "plot"]
)
def test_it_is_quick_and_without_torch(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """By seconds of a core at rest; the first of matplotlib's on a machine looks for fonts.

    A core that also serves another, or another machine, takes longer for the same. So the same process times a loop.
    """
    (tmp_path / "config.json").write_text(json.dumps(COMMON | CONFIGS[0][0]))
    given = [str(tmp_path / word) if word.endswith(".png") else word for word in arguments]
    code = (
        "import sys, time\nfrom tilemoe.cli.main import main\n"
        "assert main(['plan', '--checkpoint', *sys.argv[1:]]) == 0\n"
        "taken = time.process_time()\nsum(len(str(number)) for number in range(2_000_000))\n"
        "print('torch' in sys.modules, taken, time.process_time() - taken)"
    )
    seconds = []
    while len(seconds) < 3 and min(seconds, default=BAR) >= BAR:
        imported, taken, loop = run_python(code, str(tmp_path), *given).splitlines()[-1].split()
        assert imported == "False"
        seconds.append(float(taken) / max(1.0, float(loop) / LOOP))
    assert min(seconds) < BAR


def test_a_checkpoint_and_the_hub(finished: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def hub(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(finished)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    for folder in (finished, finished / "step_00000030", "org/name"):
        status, out, _ = run("plan", "--checkpoint", folder, "--num-experts", 8)
        assert status == 0
        assert "d=32 n=32 E=8 K=2" in out
    assert asked == [("org/name", ["config.json"])]


@pytest.mark.parametrize("name", MOE_PRESETS)
def test_a_whole_model_in_training(name: str, run: Run) -> None:
    arguments = ("--preset", name, "--train", "--gpus", 256, "--seq-len", 1024, "--tokens-per-day", 1e12)
    train = as_json(run, *arguments)["train"]
    dtypes = ("bf16",) if name.startswith("gpt-oss") else ("bf16", "fp8")  # widths of 2880 have no whole blocks of 128
    ways = [(setup["dtype"], setup["expert_parallel"]) for setup in train["setups"]]
    assert ways == [(dtype, shared) for dtype in dtypes for shared in (1, 8)]
    assert ("FP8 needs d and n to be multiples" in run("plan", "--preset", name, "--dtype", "fp8")[1]) == (
        dtypes == ("bf16",)
    )
    fitting = [setup for setup in train["setups"] if setup["micro_batch"]]
    assert all(setup in fitting for setup in train["setups"] if setup["expert_parallel"] > 1)
    assert all(setup["tokens_per_day"] is None for setup in train["setups"] if setup not in fitting)
    for setup in fitting:
        per_gpu = setup["tokens_per_day"] / 256
        assert per_gpu * setup["gpus_for_tokens_per_day"] >= 1e12
        assert per_gpu * (setup["gpus_for_tokens_per_day"] - 8) < 1e12
    table = run("plan", *arguments)[1].split("training: ")[1]
    assert f"{train['parameters'] / 1e9:.2f} B parameters" in table
    recomputed = [setup["checkpointing"] for setup in train["setups"]]
    assert re.search(rf"^recomputed +{' +'.join(recomputed)}$", table, flags=re.M)
    micro_batches = [str(setup["micro_batch"] or "none fits") for setup in train["setups"]]
    assert re.search(rf"^largest micro-batch +{' +'.join(micro_batches)}$", table, flags=re.M)


def test_what_is_recomputed_is_what_is_given(run: Run) -> None:
    setups = as_json(run, "--train", "--gpus", 8, "--checkpointing", "attention")["train"]["setups"]
    assert {setup["checkpointing"] for setup in setups} == {"attention"}


def test_a_model_that_fits_nowhere_says_so(run: Run) -> None:
    arguments = ("--preset", "qwen3-235b", "--train", "--gpu", "rtx-4090", "--seq-len", 1 << 20)
    status, out, err = run("plan", *arguments)
    line = "--train: qwen3-235b-a22b does not fit; raise --gpus, lower --seq-len, or choose another --gpu"
    assert (status, err) == (2, f"tilemoe: error: {line}\n")
    assert as_json(run, *arguments, expected=2)["train"]["setups"][0]["micro_batch"] == 0
    assert re.search(r"^largest micro-batch( +none fits){2}$", out, flags=re.M)
    assert re.search(r"^tokens/day, billions( +-){2}$", out, flags=re.M)
    assert "does not fit; lower --lora, lower --seq-len, or" in run("plan", *arguments, "--lora", 8)[2]


def test_adapters_on_experts_in_4_bit(run: Run) -> None:
    arguments = ("--preset", "gpt-oss-20b", "--train", "--lora", 8, "--seq-len", 2048, "--optim", "adamw8bit")
    train = as_json(run, *arguments)["train"]
    assert [setup["experts"] for setup in train["setups"]] == ["nf4", "nf4_double", "mxfp4", "dense"]
    assert [setup["micro_batch_of_card"]["24"] > 0 for setup in train["setups"]] == [True, True, True, False]
    (only,) = as_json(run, *arguments, "--experts", "mxfp4")["train"]["setups"]
    assert only == train["setups"][2]
    table = run("plan", *arguments)[1].split("training: ")[1]
    assert table.startswith("92 M of adapters of rank 8 on 20.91 B parameters, in sequences of 2048\n")
    batches = [str(setup["micro_batch_of_card"]["16"] or "none") for setup in train["setups"]]
    assert re.search(rf"^on 16 GiB +{' +'.join(batches)}$", table, flags=re.M)
    eager = as_json(run, *arguments, "--attention", "eager")["train"]
    assert (train["attention"], eager["attention"]) == ("fused", "eager")
    for ours, theirs in zip(train["setups"], eager["setups"], strict=True):
        assert ours["micro_batch_of_card"]["80"] >= theirs["micro_batch_of_card"]["80"]
    assert eager["setups"][2]["micro_batch_of_card"]["80"] < train["setups"][2]["micro_batch_of_card"]["80"]
    of_attention = as_json(run, *arguments, "--attention-rank", 16)["train"]
    more = (of_attention["trained"] - train["trained"]) / 8
    assert more == 24 * (2880 + 4096 + 2 * (2880 + 512) + 4096 + 2880), "inputs and outputs of the four projections"
    assert "adapters of rank 8, 16 of attention's, on" in run("plan", *arguments, "--attention-rank", 16)[1]


@pytest.mark.parametrize(
    ("widths", "named", "planned"),
    [
        ((128, 96), "intermediate_size must be a multiple of 64, the block of NF4, got 96", ["mxfp4", "dense"]),
        ((80, 64), "hidden_size must be a multiple of 64, the block of NF4, got 80", ["dense"]),
    ],
)
def test_formats_whose_blocks_do_not_divide_the_widths_are_not_planned(
    widths: tuple[int, int], named: str, planned: list[str], tmp_path: Path, run: Run, fails: Fails
) -> None:
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok")
    others = {**dict.fromkeys(names, 2), "vocab_size": 64, "max_position_embeddings": 64}
    sizes = dict(zip(("hidden_size", "moe_intermediate_size"), widths, strict=True))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "head_dim": 16, **others, **sizes}))
    arguments = ("--checkpoint", tmp_path / "config.json", "--train", "--lora", 8)
    assert [setup["experts"] for setup in as_json(run, *arguments)["train"]["setups"]] == planned
    for experts in ("nf4", "nf4_double"):
        assert f"--experts {experts}: {named}" in fails("plan", *arguments, "--experts", experts)


def test_eager_attention_is_for_gpt_oss(fails: Fails) -> None:
    arguments = ("--preset", "qwen3-30b", "--attention", "eager", "--train", "--lora", 8)
    assert "--attention eager is for gpt-oss, and qwen3-30b-a3b has SDPA; leave it out" in fails("plan", *arguments)
    assert "--attention is for adapters" in fails("plan", *arguments[:-2])


def test_what_is_off_with_a_folder(tmp_path: Path, fails: Fails) -> None:
    assert "--checkpoint nowhere: no such folder" in fails("plan", "--checkpoint", "nowhere")
    assert f"{tmp_path}: no model can be read from it; give a run" in fails("plan", "--checkpoint", tmp_path)
    assert "leave one of them out" in fails("plan", "--checkpoint", tmp_path, "--preset", "olmoe-1b-7b")
    names = ("vocab_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "intermediate_size")
    dense = {"model_type": "qwen3_moe", "decoder_sparse_step": 0, "hidden_size": 16, **dict.fromkeys(names, 8)}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dense))
    assert "this model is dense; give one that has experts" in fails("plan", "--checkpoint", tmp_path)
    config.write_text(json.dumps(dense | {"model_type": "llama"}))
    assert "no experts, which are one of num_local_experts" in fails("plan", "--checkpoint", tmp_path)
    config.write_text(json.dumps(COMMON | CONFIGS[3][0] | {"moe_intermediate_size": [48, 64]}))
    differs = "moe_intermediate_size differs from layer to layer, [48, 64]; give the sizes of one"
    assert differs in fails("plan", "--checkpoint", tmp_path)
    config.write_text(json.dumps(COMMON | CONFIGS[3][0]))
    assert "(config.json: qk_rope_head_dim is missing)" in fails("plan", "--checkpoint", config, "--train")
    config.write_text(json.dumps(COMMON | CONFIGS[4][0]))
    assert "(config.json: model_type must be one of 'qwen2_moe'" in fails("plan", "--checkpoint", config, "--train")
    config.write_text("[]")
    assert "must hold a table of settings, got list" in fails("plan", "--checkpoint", tmp_path)
    config.write_text("{")
    assert "cannot be read" in fails("plan", "--checkpoint", config)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--preset", "nope"), "olmoe-1b-7b"),
        (("--gpu", "V100"), "H200"),
        (("--dtype", "int8"), "bf16"),
        (("--dtype", "fp8", "--gpu", "a100"), "choose bf16"),
        (("--save", "fp8", "--gpu", "a100"), "--save fp8: the A100 has no FP8; give --save full"),
        (("--num-experts-per-tok", 100), "num_experts"),
        (("--hidden-size", 0), "hidden_size must be at least 1"),
        (("--tokens", 0), "--tokens must be >= 1"),
        (("--tokens", 1 << 30), "must be below 2**31"),
        (("--plot", "plan.gif"), "--plot must end in .png, .svg, .pdf"),
        (("--plot", "nowhere/plan.png"), "no such folder"),
        (("--train", "--hidden-size", 4096), "as it is; leave out hidden_size"),
        (("--gpus", 8), "--gpus is for a whole model in training; give --train, too"),
        (("--train", "--mfu", "nan"), "--mfu must be above 0 and at most 1"),
        (("--train", "--gpus", -8), "--gpus must be >= 1"),
        (("--train", "--expert-parallel", 7), "--expert-parallel must divide the 64 experts"),
        (("--train", "--gpus", 12, "--expert-parallel", 8), "and the GPUs, got 8"),
        (("--lora", 8), "--lora is for a whole model in training; give --train, too"),
        (("--train", "--lora", 0), "--lora must be >= 1"),
        (("--train", "--experts", "nf4"), "--experts is for adapters on a whole model; give --train --lora RANK, too"),
        (("--train", "--attention-rank", 8), "--attention-rank is for adapters on a whole model; give --train --lora"),
        (("--train", "--lora", 8, "--attention-rank", 0), "--attention-rank must be >= 1"),
        (("--train", "--lora", 8, "--gpus", 2), "--gpus is not for --lora, which plans the memory of one GPU"),
        (("--train", "--tokens-per-day", "nan"), "--tokens-per-day must be above 0"),
    ],
)
def test_nonsense_is_one_sentence(arguments: tuple[str | int, ...], word: str, fails: Fails) -> None:
    assert word in fails("plan", *map(str, arguments))


def test_the_page_shows_what_the_command_prints(run: Run) -> None:
    """Every block of docs/planner.md that begins with the command; a line of points stands for lines left out."""
    blocks = re.findall(r"```console\n\$ tilemoe plan ([^\n]*)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) >= 2
    for arguments, shown in blocks:
        status, out, _ = run("plan", *arguments.split())
        assert status == 0
        assert re.fullmatch(re.escape(shown).replace(re.escape("...\n"), "(?:.*\n)+"), out)


def test_the_peaks_in_fp8_are_what_was_recorded(run: Run) -> None:
    """Over bf16's of the same rounds, as the row's own ratios say: of each case the newest, forward and backward."""
    newest = record.newest("fp8_layer", "case", contestant="tilemoe[hopper_fp8]")
    ratios = [
        row[f"{part}_peak_bytes"] / row["baseline"][f"{part}_peak_bytes"]
        for row in newest.values()
        for part in ("forward", "backward")
    ]
    assert f"in FP8 {min(ratios):.2f} to {max(ratios):.2f} times as much" in run("plan", "--dtype", "fp8")[1]
