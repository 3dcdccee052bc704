"""transformers' experts in 4 bit compute what the dequantised model computes, and PEFT trains adapters on them."""

import copy
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils.modeling import id_tensor_storage
from helpers import LargestTensor, assert_near, raises_one_line, redraw
from hf_models import COMMON, FAMILIES, Family, T, experts, routing, step, tokens
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import save_file
from test_hf_gates import REFUSED, every_class
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tilemoe.integrations import transformers as integration
from tilemoe.integrations.quantized import dequantize_experts, quantize_experts
from tilemoe.integrations.quantized_weight import (
    FrozenWeight,
    LowRank,
    adapters_of,
    quantized_weights,
    weight_names,
)
from tilemoe.kernels.experts.formats.nf4 import quantize_nf4
from tilemoe.testing import assert_equal, relative_error

pytestmark = pytest.mark.usefixtures("unregistered_after")
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def wide(family: str, **more: Any) -> Any:
    """A model of the family whose widths NF4 takes."""
    found = FAMILIES[family]
    sizes = {key: value for key, value in found.sizes.items() if key not in WIDE}
    return Family(found.prefix, sizes, found.moe_layers, COMMON | WIDE, found.config).make(**more)


def adapted(model: Any, **settings: Any) -> Any:
    """With adapters of PEFT, shaken, so that none is zero."""
    settings = {"r": 2, "lora_alpha": 3, "target_modules": [], "target_parameters": EXPERTS} | settings
    peft = get_peft_model(model, LoraConfig(**settings))
    redraw([parameter for name, parameter in peft.named_parameters() if "lora_" in name], 0.1, seed=0)
    return peft


def assert_as_dequantised(peft: Any) -> dict[str, Tensor]:
    """A step's gradients, which as its loss and logits are those of eager experts after `dequantize_experts`."""
    found, count = step(peft), len(list(quantized_weights(peft)))
    assert dequantize_experts(peft) == count
    peft.get_base_model().set_experts_implementation("eager")
    want = step(peft)
    torch.testing.assert_close(found[0], want[0], rtol=1e-5, atol=1e-5)
    assert relative_error(found[1], want[1]) < 3e-6, "logits up to 10; one near zero has the error of its terms"
    torch.testing.assert_close(found[2], want[2], rtol=1e-4, atol=1e-5)
    return found[2]


STORED = [(family, "nf4") for family in FAMILIES]
STORED += [(family, storage) for family in ("olmoe", "gpt_oss") for storage in ("nf4_double", "mxfp4")]


@pytest.mark.parametrize(("family", "storage"), STORED)
def test_a_step_is_that_of_the_dequantised_model(family: str, storage: str) -> None:
    """Adapters of PEFT on the experts and on attention, in fp32, in training with gradient checkpointing."""
    model = wide(family).train()
    assert quantize_experts(model, storage) == FAMILIES[family].moe_layers
    assert len(list(quantized_weights(model))) == 2 * FAMILIES[family].moe_layers
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    grads = assert_as_dequantised(adapted(model, target_modules=["q_proj", "q_b_proj"]))
    assert sum(".experts." in name for name in grads) == 4 * FAMILIES[family].moe_layers
    assert all(grad.any() for grad in grads.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_the_first_loss_in_bf16_and_what_is_generated(family: str) -> None:
    model = wide(family).bfloat16()
    quantize_experts(model)
    ids = model.generate(tokens(), max_new_tokens=3, do_sample=False)
    peft = get_peft_model(model.train(), LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS))
    loss = step(peft)[0]
    dequantize_experts(peft)
    torch.testing.assert_close(loss, step(peft)[0], rtol=1e-3, atol=0)
    assert torch.equal(model.eval().generate(tokens(), max_new_tokens=3, do_sample=False), ids)


def test_peft_s_path_makes_no_weight_whole() -> None:
    """The largest tensor that a step makes outside of the experts' operators is far smaller than a weight."""

    def largest(model: nn.Module) -> int:
        with LargestTensor() as seen:
            step(model)
        return seen.elements

    model = wide("mixtral", num_local_experts=16)
    quantize_experts(model)
    peft = adapted(model, r=1)
    size = 16 * 64 * 64  # of down_proj; the adapters' largest has 16 * 128
    assert largest(peft) <= size // 8
    dequantize_experts(peft)
    assert largest(peft) <= size // 8, "nor of plain weights"
    model.set_experts_implementation("grouped_mm")
    assert largest(peft) >= 2 * size, "as PEFT does"


def of_active_adapters(peft: Any) -> list[Any]:
    """One adapter of two, both, the other one, of another rank and scale, and none."""
    found: list[Any] = []
    for active in (["default"], ["default", "second"], ["second"]):
        peft.base_model.set_adapter(active)
        found.append(step(peft))
    with peft.disable_adapter():
        return [*found, peft(input_ids=tokens()).logits]


@pytest.mark.parametrize(
    ("family", "kept"),
    [("gpt_oss", "wrapped"), ("qwen3_moe", "used"), ("gpt_oss", "mxfp4"), ("olmoe", "nf4_double")],
)
def test_any_number_of_adapters_is_active_at_once(family: str, kept: str) -> None:
    """On experts in 4 bit, and on plain ones that PEFT wraps before or after `use`; then by eager experts."""
    model = wide(family)
    if kept == "used":
        integration.use(model)
    elif kept != "wrapped":
        quantize_experts(model, kept)
    peft = adapted(model)
    peft.add_adapter("second", LoraConfig(r=3, target_modules=[], target_parameters=EXPERTS))
    for parameter in peft.parameters():
        if parameter.ndim == 2 and not parameter.any():
            nn.init.normal_(parameter, 0.0, 0.1, torch.Generator().manual_seed(1))
    if kept == "wrapped":
        integration.use(peft)
    found = of_active_adapters(peft)
    dequantize_experts(peft)
    copied = copy.deepcopy(peft)
    for each in (peft, copied):
        each.get_base_model().set_experts_implementation("eager")
        torch.testing.assert_close(found, of_active_adapters(each), rtol=1e-4, atol=1e-5)
    model.set_experts_implementation("tilemoe")
    torch.testing.assert_close(peft.unload()(input_ids=tokens()).logits, found[-1], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_compiled_model_calls_them_between_graphs() -> None:
    """Without an eager step before, and with an adapter on attention, which is compiled."""
    model = wide("olmoe")
    quantize_experts(model)
    peft = adapted(model, target_modules=["q_proj"])
    compiled = torch.compile(copy.deepcopy(peft), backend="eager")
    found, want = step(compiled), step(peft)
    torch.testing.assert_close(found[:2], want[:2])
    torch.testing.assert_close(list(found[2].values()), list(want[2].values()))
    dequantize_experts(peft)
    explained = torch._dynamo.explain(peft)(input_ids=tokens())
    assert not any("4 bit" in str(each.reason) for each in explained.break_reasons), "plain experts are compiled"


def test_threads_lend_their_own_adapters() -> None:
    """One forward waits inside the first layer's experts until another has run."""
    model = wide("olmoe")
    peft = adapted(model)
    integration.use(peft)
    inside, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if not inside.is_set():
            inside.set()
            assert done.wait(60)

    with torch.no_grad(), ThreadPoolExecutor(1) as thread:
        logits = peft(input_ids=tokens()).logits
        dict(integration.experts_modules(model)).popitem()[1].register_forward_pre_hook(wait)
        other = thread.submit(lambda: peft(input_ids=tokens()).logits.detach())
        assert inside.wait(60)
        assert_equal(peft(input_ids=tokens()).logits, logits)
        done.set()
        assert_equal(other.result().detach(), logits)


def test_adapters_become_of_a_rank_and_a_scale_that_kernels_take() -> None:
    """Of two scales, one of them 0; on a GPU the rank is a multiple of 8."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    w1, w2 = FrozenWeight(drawn(2, 8, 4), torch.float32), FrozenWeight(drawn(2, 4, 4), torch.float32)
    one, other = LowRank(drawn(2, 8, 3), drawn(2, 3, 4), 0.0), LowRank(drawn(2, 4, 2), drawn(2, 2, 4), 3.0)
    found = adapters_of(w1.with_product(one), w2.with_product(other))
    assert (found.up_a.shape[1], found.down_a.shape[1]) == (3, 3)
    torch.testing.assert_close(found.scale * found.up_b @ found.up_a, torch.zeros(2, 8, 4))
    torch.testing.assert_close(found.scale * found.down_b @ found.down_a, 3.0 * other.left @ other.right)
    both = w2.with_product(other).with_product(LowRank(drawn(2, 4, 1), drawn(2, 1, 4), 0.0)).added
    assert both is not None
    torch.testing.assert_close(both.scale * both.left @ both.right, 3.0 * other.left @ other.right)
    elsewhere = [FrozenWeight(weight.stored.to("meta"), torch.float32) for weight in (w1, w2)]  # type: ignore[union-attr]
    moved = LowRank(other.left.to("meta"), other.right.to("meta"), 3.0)
    assert adapters_of(elsewhere[0], elsewhere[1].with_product(moved)).up_a.shape == (2, 8, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_parameters": EXPERTS[:1]},
        {"target_parameters": EXPERTS[1:]},
        {"rank_pattern": {"experts.down_proj": 5}, "alpha_pattern": {"experts.gate_up_proj": 7}},
        {"use_rslora": True, "init_lora_weights": "gaussian", "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "target_parameters": None},
    ],
)
def test_whatever_peft_adapts(settings: dict[str, Any]) -> None:
    model = wide("gpt_oss")
    quantize_experts(model)
    peft = adapted(model, **settings)
    with_it = peft(input_ids=tokens()).logits
    with peft.disable_adapter():
        assert not torch.allclose(peft(input_ids=tokens()).logits, with_it, atol=1e-3)
    assert_as_dequantised(peft)


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias"])
def test_biases_beside_4_bit_stay_frozen(name: str) -> None:
    model = wide("gpt_oss")
    quantize_experts(model)
    with raises_one_line(f"is in 4 bit, and its {name} cannot be trained; leave it out of PEFT's modules_to_save and"):
        step(adapted(model, target_parameters=[f"experts.{name}"]))


def test_bits_are_those_of_the_kernels_format_and_weights_stay_frozen() -> None:
    model, plain = wide("olmoe"), wide("olmoe")
    quantize_experts(model)
    for module, name, weight in quantized_weights(model):
        assert not weight.requires_grad
        key = next(key for key, each in model.named_modules() if each is module)
        want = quantize_nf4(plain.get_parameter(f"{key}.{name}"))
        assert_equal(weight.tensors(), [want.codes, want.absmax])
        assert_equal(torch.from_numpy(weight.detach().numpy()), weight.dense())
    module.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"in 4 bit, and its gate_up_proj cannot be trained; leave it out of PEFT's modules_to_save"
    ):
        model(input_ids=tokens())


def test_casts_copies_and_kbit_training_leave_the_bits() -> None:
    model = wide("qwen3_moe")
    quantize_experts(model)
    bits = [t.clone() for _, _, weight in quantized_weights(model) for t in weight.tensors()]
    for changed in (copy.deepcopy(model), prepare_model_for_kbit_training(model.bfloat16()), model.to("cpu")):
        weights = [weight for _, _, weight in quantized_weights(changed)]
        assert len(weights) == 4
        assert {weight.dtype for weight in weights} == {torch.float32}
        assert_equal([t for weight in weights for t in weight.tensors()], bits)
    plain = sum(p.nbytes for p in model.parameters() if not isinstance(p, FrozenWeight))
    assert model.get_memory_footprint(return_buffers=False) == plain + sum(t.nbytes for t in bits)
    for refused in (id_tensor_storage, lambda weight: save_file({"weight": weight}, "unwritten")):
        with pytest.raises(ValueError, match="pass safe_serialization=False, or call save_pretrained"):
            refused(weights[0])
    peft = adapted(model)
    want = step(peft)[0]
    model.bfloat16()
    assert {weight.dtype for _, _, weight in quantized_weights(model)} == {torch.bfloat16}
    torch.testing.assert_close(step(peft)[0].float(), want, rtol=2e-2, atol=0)


def test_it_is_shared_emptied_offloaded_and_staged_as_a_plain_model(tmp_path: Path) -> None:
    model = wide("olmoe")
    quantize_experts(model, "nf4_double")
    shared = copy.deepcopy(model).share_memory()
    assert all(weight.is_shared() and not weight.is_pinned() for weight in shared.parameters())
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    state = empty.state_dict()
    checkpoint.async_save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True).result()
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    for each in (shared, empty):
        pairs = list(zip(quantized_weights(each), quantized_weights(model), strict=True))
        assert len(pairs) == 4
        for (_, _, found), (_, _, want) in pairs:
            assert_equal(found.tensors(), want.tensors())
    with torch.no_grad():
        logits = model(input_ids=tokens()).logits
        offloaded = cpu_offload(copy.deepcopy(model), execution_device="cpu")
        offloaded.hf_device_map = {"": "cpu"}  # as from_pretrained's device_map leaves it
        offloaded.save_pretrained(tmp_path / "folder")
        for same in (offloaded, type(model).from_pretrained(tmp_path / "folder")):
            assert_equal(same(input_ids=tokens()).logits, logits)
        with pytest.raises(ValueError, match=r"4 bit cannot be offloaded to disk; offload them to the CPU"):
            disk_offload(model, tmp_path / "disk", execution_device="cpu")(input_ids=tokens())


@torch.no_grad()
def test_offloaded_experts_change_their_storage_once_they_are_back() -> None:
    """Else accelerate would put the former weights back in the next forward."""
    model = cpu_offload(wide("olmoe"), execution_device="cpu")
    logits = [model(input_ids=tokens()).logits]
    for change in (quantize_experts, dequantize_experts):
        with raises_one_line(
            r"OlmoeExperts \(olmoe\) are offloaded; call accelerate.hooks.remove_hook_from_submodules"
        ):
            change(model)
        assert_equal(model(input_ids=tokens()).logits, logits[-1])
        assert change(remove_hook_from_submodules(model) or model)
        logits.append(cpu_offload(model, execution_device="cpu")(input_ids=tokens()).logits)
    torch.testing.assert_close(logits[2], logits[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[1], logits[0], atol=1e-3)


def test_what_would_need_plain_weights_says_so() -> None:
    model = wide("olmoe")
    quantize_experts(model)
    with pytest.raises(
        ValueError, match=r"OlmoeExperts \(olmoe\) cannot be stored in 4 bit: it is Nf4Weight .* already"
    ):
        quantize_experts(model)
    for other in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(other)
        with pytest.raises(ValueError, match="only experts_implementation='tilemoe' computes with it"):
            model(input_ids=tokens())
    model.set_experts_implementation("tilemoe")
    peft = adapted(model)
    with pytest.raises(ValueError, match=r"dequantize_experts\(model\) makes it plain again"):
        peft.merge_and_unload()


@pytest.mark.parametrize("way", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": get_ema_avg_fn(0.5)}])
def test_an_average_is_of_what_is_trained(way: dict[str, Any]) -> None:
    """The whole model has none; with its trained parameters alone, PyTorch's averages are the plain model's."""
    model = wide("olmoe")
    quantize_experts(model, "nf4_double")
    plain = copy.deepcopy(model)
    dequantize_experts(plain)
    whole, averages = AveragedModel(peft := adapted(model), **way), []
    whole.update_parameters(peft)
    with pytest.raises(ValueError, match="an average takes the parameters that require gradients alone"):
        whole.update_parameters(peft)
    for each in (peft, adapted(plain)):
        trained = nn.ParameterList(parameter for parameter in each.parameters() if parameter.requires_grad)
        averages.append(AveragedModel(trained, **way))
        averages[-1].update_parameters(trained)
        redraw(trained, 0.1, seed=1)
        averages[-1].update_parameters(trained)
    assert_equal(list(averages[0].parameters()), list(averages[1].parameters()))
    assert len(list(averages[0].parameters())) == 8


def test_a_merged_model_is_plain(tmp_path: Path) -> None:
    """Adapters trained on 4 bit load into the plain model, too, and merge there."""
    plain = wide("deepseek_v3", dtype=torch.bfloat16)
    model = wide("deepseek_v3", dtype=torch.bfloat16)
    quantize_experts(model)
    peft = adapted(model, target_modules=["q_b_proj"])
    peft.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        want = peft(input_ids=tokens()).logits
    dequantize_experts(peft)
    merged = peft.merge_and_unload()
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
    torch.testing.assert_close(merged(input_ids=tokens()).logits, want, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert not torch.allclose(loaded(input_ids=tokens()).logits, want, atol=1e-3)
    loaded.merge_and_unload()


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("olmoe", {"hidden_size": 96}, "hidden_size must be a multiple of 64, the block of NF4, got 96"),
        ("gpt_oss", {"intermediate_size": 96}, "intermediate_size must be a multiple of 64, the block of NF4, got 96"),
        ("mixtral", {"dtype": torch.float64}, "its weights are fp64, and scales are fp32; cast the model first"),
        ("olmoe", {"hidden_act": "quick_gelu"}, "its gate is none of tilemoe's activations"),
    ],
)
def test_experts_that_cannot_be_in_4_bit_are_left_as_they_are(family: str, more: dict[str, Any], reason: str) -> None:
    model = wide(family, **more).to(more.get("dtype", torch.float32))
    with raises_one_line(reason):
        quantize_experts(model)
    assert not list(quantized_weights(model))


@pytest.mark.parametrize("name", sorted(every_class().keys() - REFUSED))
def test_every_class_computes_and_gives_gradients(name: str) -> None:
    """One module of each, as the layer of a model, with adapters on both weights."""
    kind = getattr(importlib.import_module(every_class()[name]), name)
    wide = dict.fromkeys(("hidden_size", "moe_hidden_size", "intermediate_size", "moe_intermediate_size"), 64)
    integration.register()
    model = nn.ModuleDict({"experts": experts(kind, **wide)})
    assert quantize_experts(model) == 1
    names = [f"experts.{name}" for name in weight_names(model["experts"])]
    peft = adapted(model, target_parameters=names)
    x, ids, scores = torch.randn(T, 64, generator=torch.Generator().manual_seed(0)), *routing()[1:]

    def found() -> list[Tensor]:
        module, parameters = peft.base_model.model["experts"], [p for p in peft.parameters() if p.requires_grad]
        out = module(x, ids, scores)
        return [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), parameters)]

    in_4_bit = found()
    dequantize_experts(model)
    assert_near(in_4_bit, found(), 1e-5)
