"""What the settings of a transformers' config.json mean, on reading and on export, and which values are refused."""

import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from helpers import from_hf_state_dict, raises_one_line
from safetensors.torch import load_file, save_file
from test_models_huggingface import CONFIG, MOE, SIZES, batch
from test_models_huggingface import FAMILIES as MODELS
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tilemoe.config import RouterConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.folder import read_config
from tilemoe.models.hf_config import config_from_hf, hf_config_dict
from tilemoe.models.huggingface import load_hf, save_hf, whole_parameters

# Without a dense layer.
QWEN3 = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=6, head_dim=16)
FAMILIES = MODELS | {"qwen3_moe": (Qwen3MoeForCausalLM, QWEN3)}


LAYERS = {"one": {"num_hidden_layers": 1}, "five": {"num_hidden_layers": 5}}
MIXED = {
    "qwen3_moe, listed": {"num_hidden_layers": 6, "mlp_only_layers": [0, 4]},
    "qwen3_moe, every other": {"num_hidden_layers": 5, "decoder_sparse_step": 2},
}


def deep_model(family: str, **changes: Any) -> PreTrainedModel:
    """Of a family with wide routers' weights, so that loads and probabilities differ between experts and layers."""
    torch.manual_seed(1)
    kind, config = FAMILIES[family]
    model = kind(type(config)(**{**config.to_dict(), "router_aux_loss_coef": 0.7, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, 0.0, 1.0)
    return model


@pytest.mark.parametrize("layers", [*LAYERS, *MIXED])
@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_the_auxiliary_loss_is_transformers(family: str, layers: str, tmp_path: Path) -> None:
    if layers in MIXED and family != "qwen3_moe":
        pytest.skip("this family has no dense layers")
    hf = deep_model(family, **(LAYERS | MIXED)[layers], output_router_logits=True)
    hf.save_pretrained(tmp_path / "theirs")
    ours, tokens = load_hf(tmp_path / "theirs"), batch()
    out = hf(tokens, labels=tokens)
    torch.testing.assert_close(ours(tokens).aux_loss, 0.7 * out.aux_loss, rtol=1e-5, atol=0)
    labelled = ours(tokens[:, :-1], tokens[:, 1:])
    without = hf(tokens[:, :-1], output_router_logits=True)
    torch.testing.assert_close(labelled.aux_loss, 0.7 * without.aux_loss, rtol=1e-5, atol=0)

    if layers != "one":  # where a sum over layers is another number
        assert ours.config.moe is not None
        router = replace(ours.config.moe.router, aux_loss_over="layer")
        summed = DecoderLM(replace(ours.config, moe=replace(ours.config.moe, router=router)))
        summed.load_state_dict(ours.state_dict())
        assert float(summed(tokens).aux_loss) > 1.5 * float(ours(tokens).aux_loss)

    (0.7 * out.aux_loss).backward()
    ours.set_checkpointing("block")
    ours(tokens).aux_loss.backward()
    gradients = {name: p.grad for name, p in hf.named_parameters()}
    zeros = {name: torch.zeros_like(p) for name, p in hf.named_parameters()}
    expected = from_hf_state_dict(ours.config, {name: zeros[name] if g is None else g for name, g in gradients.items()})
    for name, parameter in ours.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-6, msg=name)
    assert expected["blocks.0.mlp.router.weight" if "blocks.0.mlp.router.weight" in expected else "embed.weight"].any()


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_whether_transformers_adds_the_loss_is_read_and_kept(family: str, tmp_path: Path) -> None:
    hf, tokens = deep_model(family), batch()
    for name, is_added in (("no", False), ("yes", True)):
        hf.config.output_router_logits = is_added
        hf.save_pretrained(tmp_path / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = load_hf(tmp_path / name)
        said = [str(each.message) for each in caught if "output_router_logits is false" in str(each.message)]
        assert len(said) == (0 if is_added else 1)
        assert all("add_aux_loss" in line and "0.7" in line and "\n" not in line for line in said)
        labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        out = ours(tokens, labels)
        torch.testing.assert_close(out.loss + out.aux_loss, hf(tokens, labels=tokens).loss, rtol=1e-6, atol=1e-6)
        assert bool(out.aux_loss) is is_added
        asked = 0.7 * hf(tokens, output_router_logits=True).aux_loss
        torch.testing.assert_close(ours(tokens).aux_loss, asked, rtol=1e-5, atol=0)

        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing differs, so nothing is said
            save_hf(ours, tmp_path / f"{name} again")
        written = json.loads((tmp_path / f"{name} again" / "config.json").read_text())
        assert written["output_router_logits"] is is_added
        assert written["router_aux_loss_coef"] == 0.7
        assert config_from_hf(written) == ours.config
        back = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} again")
        torch.testing.assert_close(back(tokens, labels=tokens).loss, hf(tokens, labels=tokens).loss)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "mixtral"])
def test_a_coefficient_that_config_json_lacks_is_the_classs(family: str) -> None:
    data = FAMILIES[family][1].to_dict()
    default = type(FAMILIES[family][1])().router_aux_loss_coef
    del data["router_aux_loss_coef"], data["output_router_logits"]
    moe = config_from_hf(data).moe
    assert moe is not None
    assert (moe.router.aux_loss_coef, moe.router.add_aux_loss) == (default, False)
    off = config_from_hf({**data, "router_aux_loss_coef": 0.0}).moe
    assert off is not None
    assert off.router.add_aux_loss  # a coefficient given later adds the loss


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (RouterConfig(aux_loss_coef=0.01), r"one balancing loss .*router_aux_loss_coef 0\.02 in config\.json"),
        (RouterConfig(z_loss_coef=0.01), "without z-loss"),
        (
            RouterConfig(aux_loss_coef=0.01, aux_loss_over="model", z_loss_coef=0.1),
            r"z-loss; router_aux_loss_coef 0\.01",
        ),
    ],
)
def test_an_export_says_where_transformers_loss_differs(router: RouterConfig, message: str, tmp_path: Path) -> None:
    config = replace(CONFIG, moe=replace(MOE, router=router))
    with pytest.warns(UserWarning, match=message):
        save_hf(DecoderLM(config), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["output_router_logits"] is (router.aux_loss_coef > 0)
    one_layer = replace(
        config, moe=replace(MOE, router=RouterConfig(aux_loss_coef=0.01)), num_layers=1, dense_layers=()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_hf(DecoderLM(one_layer), tmp_path / "other")


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"load_in_8bit": True}, "gguf",
    ],
    ids=str,
)  # fmt: skip
def test_a_quantised_checkpoint_is_refused_by_name(quantization: Any) -> None:
    named = quantization.get("quant_method", "load_in_8bit") if isinstance(quantization, dict) else quantization
    data = {**QWEN3.to_dict(), "quantization_config": quantization}
    with raises_one_line(rf"quantization_config is of .*{named}.*, not implemented; give the model in bf16, or "):
        config_from_hf(data)
    assert config_from_hf({**data, "quantization_config": None})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    deep_model("qwen3_moe").save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = next(each for each in tensors if "experts.3" in each)
    tensors[name] = (tensors[name] * 100).to(dtype)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    for read in (load_hf, lambda path: list(whole_parameters(path, read_config(path)))):
        with raises_one_line(rf"model\.safetensors has {name} in \w+, which are no floats .*bf16"):
            read(tmp_path / "model")


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen3_moe",
            {"model_type": "llama"},
            "model_type must be one of 'qwen3_moe', 'olmoe', 'mixtral'; got 'llama'",
        ),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias must be False"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window must be False"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'default', got 'yarn'"),
        ("qwen3_moe", {"rope_parameters": "yarn"}, "rope_parameters must be a table of settings or null, got 'yarn'"),
        (
            "qwen3_moe",
            {"attention_dropout": 0.1},
            "attention_dropout must be 0, got 0.1; .* set it to 0 in config.json",
        ),
        ("qwen3_moe", {"vocab_size": 0}, "vocab_size"),
        ("qwen3_moe", {"num_attention_heads": 0, "head_dim": None}, "num_heads"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv must be None, got 8.0"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window must be None, got 4096"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("mixtral", {"router_jitter_noise": 0.02}, "router_jitter_noise must be 0, got 0.02; .* set it to 0 in config"),
        ("qwen3_moe", {"hidden_size": 32.7}, "hidden_size must be an integer, got 32.7"),
        ("qwen3_moe", {"num_experts_per_tok": True}, "num_experts_per_tok must be a number, got True"),
        ("qwen3_moe", {"vocab_size": "53"}, "vocab_size must be a number, got '53'"),
        ("qwen3_moe", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be a number, got nan"),
        ("qwen3_moe", {"rms_norm_eps": 10**400}, "rms_norm_eps must be a number, got an integer of 1329 bits"),
        ("qwen3_moe", {"hidden_size": 1e300}, r"hidden_size must be below 2\*\*63"),
        ("qwen3_moe", {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ("qwen3_moe", {"attention_bias": "false"}, "attention_bias must be False, got 'false'"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers must be a list of layers, got"),
    ],
)
def test_what_the_decoder_does_not_implement_is_not_imported(family: str, change: dict[str, Any], message: str) -> None:
    """Nor is a value of another kind converted."""
    with raises_one_line(message):
        config_from_hf({**FAMILIES[family][1].to_dict(), **change})


def test_whole_numbers_and_null_are_taken() -> None:
    data = hf_config_dict(CONFIG)
    unset = {"tie_word_embeddings": None, "output_router_logits": None, "mlp_only_layers": None, "hidden_size": 32.0}
    config = config_from_hf({**data, **unset})
    assert (config.hidden_size, config.tie_embeddings, config.dense_layers) == (32, False, ())
    assert isinstance(config.hidden_size, int)


def hostile_folder(folder: Path, change: dict[str, Any], padding: int) -> Path:
    """A whole model whose config.json claims something else, and a file beside it with many bytes and no weight."""
    save_hf(DecoderLM(CONFIG), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    if padding:  # so that the number of bytes alone does not tell
        save_file({"nothing": torch.zeros(padding, dtype=torch.uint8)}, folder / "other.safetensors")
    return folder


SMALL = {
    "hidden_size": 2, "head_dim": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 1,
    "moe_intermediate_size": 1, "num_experts": 2,
}  # fmt: skip
CLAIMS = {
    "layers": (SMALL | {"num_hidden_layers": 100_000, "mlp_only_layers": []}, 30_000_000, "is missing"),
    "dense layers": (
        SMALL | {"num_hidden_layers": 100_000, "mlp_only_layers": [*range(1, 100_000)] * 3}, 8_000_000, "is missing",
    ),
    "experts without bytes": ({"num_experts": 10**12}, 0, "claims .* parameters, and the files have"),
    "wider experts": ({"moe_intermediate_size": 10**4}, 20_000_000, r"must be \(10000, 32\) as the configuration"),
    "vocabulary": ({"vocab_size": 10**5}, 10_000_000, r"must be \(100000, 32\) as the configuration"),
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_what_no_weights_back_is_refused_before_anything_is_made(
    claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, padding, message = CLAIMS[claim]
    folder = hostile_folder(tmp_path / "model", change, padding)
    made: list[object] = []
    monkeypatch.setattr(DecoderLM, "to_empty", lambda self, **options: made.append(self))
    start = time.perf_counter()
    with raises_one_line(message):
        load_hf(folder)
    assert time.perf_counter() - start < 5
    assert not made


def test_load_hf_takes_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf(DecoderLM(CONFIG), tmp_path / "model")
    asked: list[str] = []

    def give(name: str, **options: Any) -> str:
        asked.append(name)
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    monkeypatch.chdir(tmp_path)
    assert load_hf("org/name").config.hidden_size == 32
    assert asked == ["org/name"]
    load_hf("model")
    load_hf(Path("model"))
    assert asked == ["org/name"]
    with raises_one_line("^folder nowhere: no such folder"):
        load_hf("nowhere")
    with raises_one_line(r"^folder model/config\.json is a file; give its folder"):
        load_hf("model/config.json")
