"""transformers' `from_pretrained` and `save_pretrained` of experts in 4 bit, through its registry of quantizers."""

import gc
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers import raises_one_line
from hf_models import LIMIT, step, tokens
from safetensors.torch import load_file, save_file
from test_hf_quantized import STORED, adapted, wide
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Mxfp4Config, PreTrainedModel
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers import auto

from tilemoe.integrations import quantized_weight
from tilemoe.integrations import transformers as integration
from tilemoe.integrations.quantized import TilemoeConfig, dequantize_experts, quantize_experts, register_quantizer
from tilemoe.integrations.quantized_weight import FrozenWeight, quantize_weight, quantized_weights
from tilemoe.kernels.experts.formats.mxfp4 import quantize_mxfp4
from tilemoe.kernels.experts.formats.nf4 import quantize_nf4
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.testing import assert_equal

pytestmark = pytest.mark.usefixtures("unregistered_after")


def saved(family: str, folder: Path, **more: Any) -> PreTrainedModel:
    model: PreTrainedModel = wide(family, **more)
    model.save_pretrained(folder)
    return model


def loaded(model: PreTrainedModel, folder: Path, config: Any = None, **more: Any) -> Any:
    """With the class of ``model``, whose gates have their limit set on the modules."""
    found = type(model).from_pretrained(folder, quantization_config=config, **{"dtype": torch.float32} | more)
    for module in found.modules():
        if hasattr(module, "limit"):
            module.limit = LIMIT
    return found


def tensors(model: nn.Module) -> list[Tensor]:
    """Every parameter and buffer by its bits, in order."""
    state = dict(sorted(model.state_dict().items()))
    return [t for each in state.values() for t in (each.tensors() if isinstance(each, FrozenWeight) else [each])]


@pytest.mark.parametrize(("family", "storage"), STORED)
def test_a_folder_loads_in_4_bit_and_back_to_the_bit(family: str, storage: str, tmp_path: Path) -> None:
    """As `quantize_experts` stores it; what was saved loads without a word about 4 bit, and trains."""
    plain = saved(family, tmp_path / "plain")
    model = loaded(plain, tmp_path / "plain", TilemoeConfig(storage))
    quantize_experts(plain, storage)
    assert_equal(tensors(model), tensors(plain))
    found = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in found
    for source in (model, plain):  # loaded so, and quantised in place
        source.save_pretrained(tmp_path / "saved")
        found = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
        assert found == {"quant_method": "tilemoe", "experts": storage, "linear": None}
        for config in (TilemoeConfig(storage), None):
            again = loaded(plain, tmp_path / "saved", config)
            assert_equal(tensors(again), tensors(model))
    again.save_pretrained(tmp_path / "again")
    assert_equal(tensors(loaded(plain, tmp_path / "again")), tensors(model))
    assert again.config._experts_implementation == "tilemoe"
    peft = adapted(again.train())
    assert_equal(step(peft)[:2], step(adapted(model.train()))[:2])


@pytest.mark.parametrize("storage", STORAGES)
def test_torch_load_reads_a_state_by_its_default(storage: str, tmp_path: Path) -> None:
    """And accelerate does, to the bit, as it lies in memory; a model in another storage is left as it is."""
    model, other = wide("gpt_oss"), wide("gpt_oss")
    quantize_experts(model, storage)
    quantize_experts(other, "mxfp4" if storage == "nf4" else "nf4")
    bits, kept = ([t.clone() for t in tensors(each)] for each in (model, other))
    strides = [t.stride() for t in tensors(model)]
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    state = torch.load(tmp_path / "pytorch_model.bin")
    for read in (lambda: model.load_state_dict(state), lambda: accelerator.load_state(str(tmp_path))):
        for tensor in tensors(model):
            tensor.zero_()
        read()
        assert_equal(tensors(model), bits)
    with pytest.raises(RuntimeError, match=r"take no values of .*; quantise the model as it was when it was saved"):
        other.load_state_dict(state)
    assert_equal(tensors(other), kept)
    model.load_state_dict(state, assign=True)
    assert [t.stride() for t in tensors(model)] == strides


def test_a_file_makes_weights_of_plain_tensors_alone(tmp_path: Path) -> None:
    codes, absmax = quantize_nf4(torch.ones(2, 64, 64)).tensors.values()
    half = codes[..., :16]

    def read(*call: Any) -> Any:
        torch.save(type("Call", (), {"__reduce__": lambda self: call})(), tmp_path / "state.pt")
        return torch.load(tmp_path / "state.pt")

    call = ([codes, absmax], "nf4", torch.float32, False)
    assert_equal(read(quantized_weight.loaded, call).tensors(), [codes, absmax])
    for refused in ((FrozenWeight, (codes, torch.float32)), (quantized_weight.loaded, call, {"stored": codes})):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            read(*refused)
    for wrong in ((codes, absmax.half()), (codes.int(), absmax), (codes[:1], absmax), (codes[0], absmax), (codes,),
                  (half, absmax), (half[..., :0], absmax), (codes.to_sparse(), absmax), (codes, half)):  # fmt: skip
        with raises_one_line("are no weight of torch.float32 in nf4; save it again"):
            read(quantized_weight.loaded, (list(wrong), *call[1:]))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_folder_in_4_bit_is_saved_dense(family: str, tmp_path: Path) -> None:
    """Under the names that transformers reads."""
    folder = tmp_path / "plain"
    if family == "gpt_oss":
        plain, config = gpt_oss_folder(folder), TilemoeConfig("mxfp4")
    else:
        plain, config = saved(family, folder), None
        names = load_file(folder / "model.safetensors").keys()
        loaded(plain, folder, TilemoeConfig("nf4")).save_pretrained(folder)
    model = loaded(plain, folder, config)
    dequantize_experts(model)
    model.save_pretrained(tmp_path / "dense")
    found = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in found
    assert_equal(tensors(loaded(plain, tmp_path / "dense")), tensors(model))
    if family != "gpt_oss":
        assert load_file(tmp_path / "dense" / "model.safetensors").keys() == names, "of each expert, as on the hub"


def gpt_oss_folder(folder: Path, **more: Any) -> PreTrainedModel:
    """A folder as gpt-oss's own, which transformers' loader knows; experts in bf16 are exactly its MXFP4."""
    plain: PreTrainedModel = wide("gpt_oss", **more).bfloat16()
    state = plain.state_dict()
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        packed = quantize_mxfp4(state.pop(name).mT)
        state[f"{name}_blocks"] = packed.codes.unflatten(-1, (-1, 16))
        state[f"{name}_scales"] = packed.exponents
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    settings = plain.config.to_dict() | {
        "architectures": [type(plain).__name__],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return plain


def test_a_folder_of_gpt_oss_s_own_is_not_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are stored as they are, and stand for what transformers makes of them, to the bit."""
    plain = gpt_oss_folder(tmp_path / "own")
    theirs = loaded(plain, tmp_path / "own", Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    monkeypatch.setattr(Mxfp4Dequantize, "convert", None)
    model = loaded(plain, tmp_path / "own", TilemoeConfig("mxfp4"), dtype=torch.bfloat16)
    found = {name: weight for name, weight in model.named_parameters() if isinstance(weight, FrozenWeight)}
    assert len(found) == 4
    for name, weight in found.items():
        assert_equal([weight.dense()], [theirs.get_parameter(name).detach()])
    model.save_pretrained(tmp_path / "saved")
    own, again = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "saved"))
    assert own.keys() == again.keys()
    assert_equal([again[name] for name in own], list(own.values()))
    assert_equal(tensors(loaded(plain, tmp_path / "saved", dtype=torch.bfloat16)), tensors(model))
    with pytest.raises(ValueError, match=r"quantized with Mxfp4Config but you are passing a TilemoeConfig"):
        loaded(plain, tmp_path / "own", TilemoeConfig("nf4"))
    peft = adapted(model.train())
    loss, _, grads = step(peft)
    assert loss.isfinite()
    assert sum(".experts." in name for name in grads) == 8


def test_attention_in_4_bit_beside_gpt_oss_s_own_experts(tmp_path: Path) -> None:
    plain = gpt_oss_folder(tmp_path / "own")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    config = TilemoeConfig("mxfp4", settings)
    model = loaded(plain, tmp_path / "own", config, dtype=torch.bfloat16).train()
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    assert model.is_loaded_in_4bit
    step(adapted(model, target_modules=["q_proj"]))
    model = loaded(plain, tmp_path / "own", config, dtype=torch.bfloat16).train()
    model.save_pretrained(tmp_path / "saved")
    assert_equal(tensors(loaded(plain, tmp_path / "saved", dtype=torch.bfloat16)), tensors(model))


def test_no_more_than_a_layer_is_ever_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is alive when a weight is quantised is counted; six layers have six times 3 * 16 * 64 * 64."""
    layer = 3 * 16 * 64 * 64 * 2
    kind = type(saved("qwen3_moe", tmp_path, num_hidden_layers=6, num_experts=16, dtype=torch.bfloat16).bfloat16())
    peak = 0

    def alive() -> dict[int, int]:
        """Bytes by address, of plain tensors: those of a tracing elsewhere have no address."""
        found = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
        in_bf16 = [t for t in found if t.device.type == "cpu" and t.dtype == torch.bfloat16]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in in_bf16}

    def counting(*args: Any) -> nn.Parameter:
        nonlocal peak
        peak = max(peak, sum(size for place, size in alive().items() if place not in before))
        return quantize_weight(*args)

    gc.collect()
    before = alive()
    monkeypatch.setattr("tilemoe.integrations.quantized.quantize_weight", counting)
    model = kind.from_pretrained(tmp_path, quantization_config=TilemoeConfig(), dtype=torch.bfloat16)
    rest = sum(p.numel() * 2 for p in model.parameters() if not isinstance(p, FrozenWeight))
    assert len(list(quantized_weights(model))) == 12
    assert layer / 2 < peak < 2 * layer + rest


def test_a_process_without_the_quantizer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide("olmoe")
    quantize_experts(model)
    model.save_pretrained(tmp_path)
    integration.unregister()
    words: list[str] = []
    monkeypatch.setattr(auto.logger, "warning", words.append)
    _, found = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert words[0].startswith("Unknown quantization type, got tilemoe")
    assert "model.layers.0.mlp.experts.down_proj" in found["missing_keys"]
    integration.register()
    with raises_one_line("the folder has experts in 4 bit; call tilemoe.integrations.quantized.register_quantizer()"):
        type(model).from_pretrained(tmp_path)
    register_quantizer()
    integration.register()  # which leaves the quantizer
    again, found = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert_equal(tensors(again), tensors(model))


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("olmoe", {"hidden_size": 96}, "hidden_size must be a multiple of 64"),
        ("olmoe", {"hidden_act": "quick_gelu"}, "its gate is none of tilemoe's activations"),
        (None, {}, "LlamaForCausalLM has no experts whose implementation transformers lets one choose"),
    ],
)
def test_refused_before_a_weight_is_read(
    family: str | None, more: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family is None:
        config = LlamaConfig(vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    else:
        saved(family, tmp_path, **more)
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", None)
    with raises_one_line(reason):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TilemoeConfig())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"experts": "int3"}, "experts must be one of mxfp4, nf4, nf4_double; got"),
        ({"linear": BitsAndBytesConfig(load_in_8bit=True)}, r"linear must be None or BitsAndBytesConfig\(load_in_4bit"),
        ({"rank": 8}, "TilemoeConfig takes experts and linear, got 'rank' too; leave it out"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TilemoeConfig(**settings)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4"])
def test_attention_in_4_bit_beside_the_experts(family: str, tmp_path: Path) -> None:
    """Routers and the head stay plain; loaded so, and the experts quantised after bitsandbytes had its part."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    plain = saved(family, tmp_path / "plain")
    model = loaded(plain, tmp_path / "plain", TilemoeConfig("nf4", settings)).train()
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if "Linear" in type(module).__name__}
    assert kinds["model.layers.0.self_attn.q_proj"] == "Linear4bit"
    whole = [name for name, kind in kinds.items() if kind == "Linear"]
    assert whole == ["model.layers.0.router.proj", "model.layers.1.router.proj", "lm_head"][-len(whole) :]
    model.save_pretrained(tmp_path / "saved")
    loaded(plain, tmp_path / "saved").save_pretrained(tmp_path / "again")
    again = loaded(plain, tmp_path / "again").train()
    assert_equal(step(adapted(again))[:2], step(adapted(model))[:2])
    freed = loaded(plain, tmp_path / "again").dequantize()
    freed.save_pretrained(tmp_path / "freed")
    assert_equal(tensors(loaded(plain, tmp_path / "freed")), tensors(freed))
    if family == "qwen3_moe":
        other = loaded(plain, tmp_path / "plain", settings).train()
        assert quantize_experts(other) == 2
        assert_equal([other(input_ids=tokens()).logits], [loaded(plain, tmp_path / "saved").train()(tokens()).logits])
