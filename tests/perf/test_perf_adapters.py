"""The planner's memory of adapters: weights counted in the trainer's models, tensors that the operator keeps alive."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import watch_kernels
from ledger import Ledger
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.bench import record
from tilemoe.config import ModelConfig, MoEConfig
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.models.preset_sizes import SIZES_PRESETS
from tilemoe.models.sizes import with_eager_attention
from tilemoe.ops import lora
from tilemoe.perf import adapters
from tilemoe.perf.adapters import BITS, CARDS, Tuning, adapter_parameters, memory_parts, tuning_plan
from tilemoe.perf.hardware import GPUS
from tilemoe.routing.build import plan_topk
from tilemoe.shape import MoEShape
from tilemoe.train.checkpoints.restore import make_decoder
from tilemoe.train.config import LoRAConfig, load_recipe

H200 = GPUS["H200"]
KERNELS = (
    "up_proj",
    "down_proj",
    "combine",
    "dact",
    "up_proj_dgrad",
    "combine_grad",
    "up_proj_wgrad",
    "down_proj_wgrad",
)
MOE = MoEConfig(128, 64, 8, 2, shared_intermediate_size=96)
CONFIG = ModelConfig(64, 128, 3, num_heads=8, num_kv_heads=4, head_dim=16, max_seq_len=64, moe=MOE)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [(MoEShape(50, 256, 64, 8, 2), 8), (MoEShape(50, 64, 256, 8, 2), 8), (MoEShape(50, 64, 64, 8, 2), 64)],
)
def test_working_bytes_are_those_of_the_operator(shape: MoEShape, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole buffers of fp32 scores are counted beside, which no kernel is given."""
    tokens, d, n, w, experts = shape.num_tokens, shape.hidden_size, shape.intermediate_size, shape.width, 8
    plan = plan_topk(torch.rand(tokens, experts).topk(2).indices, experts)
    rows, spec = plan.capacity, activation_spec("swiglu")

    def drawn(*size: int) -> Tensor:
        return torch.randn(size).bfloat16()

    x, do, s = drawn(tokens, d), drawn(tokens, d), torch.rand(rows)
    weights = (drawn(experts, w, d), drawn(experts, d, n))
    low_rank = (drawn(experts, rank, d), drawn(experts, w, rank), drawn(experts, rank, n), drawn(experts, d, rank))
    ledger = Ledger(rows)
    watch_kernels(monkeypatch, KERNELS, ledger.run)
    no_scales, plain = [None] * 4, ("dense dense", 2.0, plan, spec, backend_named("torch"))
    _, h, u = lora._run(x, *weights, s, *low_rank, None, None, *no_scales, *plain)
    forward = ledger.most - h.nbytes - u.nbytes
    ledger.start(h, u, s)
    lora._run_grad(do, x, *weights, s, *low_rank, None, *no_scales, h, u, *plain)
    beside = x.nbytes + 4 * 4 * rows
    assert max(forward, ledger.most) == pytest.approx(adapters.working_bytes(shape, rank) - beside, rel=0.02)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, dense_intermediate_size=192, dense_layers=(1,))])
def test_weights_and_adapters_are_those_of_the_trainer_s_model(config: ModelConfig) -> None:
    recipe = replace(load_recipe("smoke"), model=replace(config, max_seq_len=128), lora=LoRAConfig(4, 6, 8.0))
    model = make_decoder(recipe, device="meta", frozen=torch.bfloat16)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad)
    norms = sum(2 * parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    tuning = Tuning(config, H200, 4, 6, "dense", "adamw", 64)
    assert adapter_parameters(tuning) == trained
    parts = memory_parts(tuning, 1)
    assert parts["experts"] + parts["frozen rest"] == frozen - norms
    assert (parts["adapters"], parts["gradients"], parts["optimiser"]) == (4 * trained, 4 * trained, 8 * trained)


def test_a_30b_fits_80_gb_in_bf16_and_smaller_cards_in_4_bit() -> None:
    plan = tuning_plan(SIZES_PRESETS["qwen3-30b-a3b"], H200, 4096, (8, 8), ("dense", "nf4", "nf4_double"), "adamw8bit")
    dense, nf4, double = plan["setups"]
    assert plan["trained"] == 48 * 8 * (128 * (2 * 2048 + 3 * 768) + 4 * 2048 + 2 * (32 + 4) * 128)
    assert dense["micro_batch_of_card"]["48"] == 0 < nf4["micro_batch_of_card"]["48"]
    assert dense["micro_batch_of_card"]["80"] > 0
    assert 0.9 < double["memory"]["experts"] / (29e9 * 0.5159) < 1.1
    assert double["memory"]["experts"] < nf4["memory"]["experts"] < dense["memory"]["experts"] / 3.5
    for row in (dense, nf4, double):
        found = [row["micro_batch_of_card"][str(card)] for card in CARDS]
        assert found == sorted(found)


def test_peaks_are_those_recorded() -> None:
    """SFTTrainer's: adapters of rank 16 on attention. If that is in NF4, TRL makes all adapters bf16."""
    storages, seen = ("nf4_double", "mxfp4"), 0
    for row in record.rows("finetune", mode="sft"):
        if row["experts"] not in storages:
            continue
        if row["loading"]["reserved_bytes"] > 0.99 * row["reserved_bytes"]:  # the peak was loading's
            continue
        sizes = SIZES_PRESETS[row["case"].lower()]
        assert sizes.num_layers == row["layers"]
        eager = sizes if row["case"] != "gpt-oss-20b" else with_eager_attention(sizes, row["length"])
        tuning = Tuning(eager, H200, 8, 16, row["experts"], "adamw8bit", row["length"], "block")
        parts = memory_parts(tuning, row["tokens"] // row["length"])
        assert parts["adapters"] == parts["gradients"] == 4 * row["trained"]
        if row["linear"]:
            parts |= {"adapters": 2 * row["trained"], "gradients": 2 * row["trained"]}
            attention = sum(count * mixer.matrices for count, mixer in sizes.mixers)
            parts["frozen rest"] -= round(attention * (2 - BITS["nf4_double"] / 8))
        assert row["reserved_bytes"] == pytest.approx(sum(parts.values()), rel=0.05), row
        seen += 1
    assert seen >= 2


def test_peaks_of_the_trainer_are_those_recorded() -> None:
    """`tilemoe train`'s, as nvidia-smi has them: CUDA's context takes 0.8 GB more."""
    rows = [row for row in record.rows("finetune", mode="train") if "card_bytes" in row]
    for row in rows:
        sizes, experts = SIZES_PRESETS[row["case"].lower()], row["experts"].replace("bf16", "dense")
        assert sizes.num_layers == row["layers"]
        tuning = Tuning(sizes, H200, 8, 16, experts, "adamw8bit", row["length"], "block")
        planned = sum(memory_parts(tuning, row["tokens"] // row["length"]).values())
        assert row["card_bytes"] - 0.8e9 == pytest.approx(planned, rel=0.05), (row["case"], experts)
    assert len(rows) >= 4


def test_eager_attention_keeps_the_scores_of_gpt_oss() -> None:
    attend = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward
    sequences, heads, length, width = 2, 8, 128, 16
    query, key, value = (torch.randn(sequences, n, length, width).bfloat16().requires_grad_() for n in (heads, 2, 2))
    module = SimpleNamespace(num_key_value_groups=heads // 2, sinks=torch.zeros(heads).bfloat16(), training=True)
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = attend(module, query, key, value, torch.zeros(sequences, 1, length, length).bfloat16(), 0.25)
    assert outputs[0].shape == (sequences, length, heads, width)
    expected = with_eager_attention(SIZES_PRESETS["gpt-oss-20b"], length)
    (_, plain), *_ = SIZES_PRESETS["gpt-oss-20b"].mixers
    (_, mixer), *_ = expected.mixers
    of_a_head = (mixer.kept - plain.kept) // 64  # gpt-oss-20b's heads
    of_scores = sum(size for size in saved.values() if size >= 2 * sequences * heads * length * length)
    assert of_scores == pytest.approx(2 * sequences * length * heads * of_a_head, rel=0.01)
