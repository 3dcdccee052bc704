"""Conversion to and from transformers' Qwen3MoeForCausalLM: the same names, logits, losses and gradients."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tilemoe.config import ModelConfig, MoEConfig, RouterConfig
from tilemoe.models import huggingface
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import (
    config_from_hf,
    from_hf_state_dict,
    hf_config_dict,
    load_hf,
    save_hf,
    to_hf_state_dict,
)
from tilemoe.testing import assert_equal

CONFIG = ModelConfig(
    vocab_size=53,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_seq_len=32,
    moe=MoEConfig(32, 24, 6, 2, router=RouterConfig(aux_loss_coef=0.01), initializer_range=0.2),
    dense_intermediate_size=40,
    dense_layers=(1,),
    rope_theta=500.0,
    norm_eps=1e-5,
    initializer_range=0.2,
)
MOE = CONFIG.moe
assert MOE is not None
VARIANTS = {
    "mixed": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True),
    "all experts": replace(CONFIG, dense_layers=(), dense_intermediate_size=0),
    "dense": replace(CONFIG, moe=None, dense_layers=()),
    "interleaved": replace(CONFIG, moe=replace(MOE, gate_up="interleaved")),
    "not normalised": replace(CONFIG, moe=replace(MOE, router=RouterConfig(normalize=False))),
    "softmax of the kept": replace(
        CONFIG, moe=replace(MOE, router=RouterConfig(softmax_after_topk=True, normalize=False))
    ),
}


def make(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> DecoderLM:
    """A model whose norms, as after some training, are not one."""
    model = DecoderLM(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    model.reset_parameters(generator)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.3, generator=generator)
    return model


def theirs(config: ModelConfig) -> Qwen3MoeForCausalLM:
    """A random model made by transformers, of what its configuration says and nothing else of ours."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**hf_config_dict(config))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


def batch() -> Tensor:
    return torch.randint(0, 53, (2, 17), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_random_transformers_model_gives_the_same_logits_loss_and_gradients(config: ModelConfig) -> None:
    hf, tokens = theirs(config), batch()
    state = hf.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    ours = DecoderLM(config)
    ours.load_state_dict(from_hf_state_dict(config, state))
    torch.testing.assert_close(ours(tokens).logits, hf(tokens).logits, rtol=1e-4, atol=1e-5)

    loss = ours(tokens[:, :-1], tokens[:, 1:]).loss
    hf_loss = hf(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, hf_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    hf_loss.backward()
    expected = from_hf_state_dict(config, {name: parameter.grad for name, parameter in hf.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert expected[name].any(), name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_saved_folder_loads_in_transformers_with_the_same_logits(config: ModelConfig, tmp_path: Path) -> None:
    ours, tokens = make(config), batch()
    save_hf(ours, tmp_path / "model")
    hf, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert isinstance(hf, Qwen3MoeForCausalLM)
    assert not any(report.values()), report
    with torch.no_grad():
        torch.testing.assert_close(hf(tokens).logits, ours(tokens).logits, rtol=1e-4, atol=1e-5)

    hf.save_pretrained(tmp_path / "again")
    back = load_hf(tmp_path / "again")
    function = replace(config, moe=back.config.moe) if config.moe else config
    assert back.config == function
    layout = config.moe.gate_up if config.moe else "concatenated"
    if layout == "concatenated":
        for name, tensor in ours.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor), name


def test_configuration_survives_the_round_trip() -> None:
    for name in ("mixed", "tied", "all experts", "dense", "not normalised"):
        config = VARIANTS[name]
        if config.moe is not None:  # one initializer_range there, two here
            config = replace(config, moe=replace(config.moe, initializer_range=config.initializer_range))
        assert config_from_hf(json.loads(json.dumps(hf_config_dict(config)))) == config, name


def test_names_are_the_hubs() -> None:
    names = set(to_hf_state_dict(make()))
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names
    assert "model.layers.1.mlp.up_proj.weight" in names
    assert "model.layers.2.self_attn.q_norm.weight" in names
    assert "lm_head.weight" in names
    assert "lm_head.weight" not in to_hf_state_dict(make(VARIANTS["tied"]))
    assert len(names) == 3 + 3 * 8 + 2 * (1 + 3 * 6) + 3


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_state_survives_the_round_trip_bit_for_bit(config: ModelConfig) -> None:
    model = make(config, torch.bfloat16)
    back = from_hf_state_dict(config, to_hf_state_dict(model))
    assert back.keys() == model.state_dict().keys()
    assert_equal(back, model.state_dict())


def test_converted_tensors_are_views() -> None:
    model = make()
    storages = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in to_hf_state_dict(model).values()} == storages


# ----------------------------------------------------------------------------------------------------------- folders


def test_large_models_are_sharded(tmp_path: Path) -> None:
    model = make()
    save_hf(model, tmp_path / "model", max_shard_bytes=30_000)
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert [file.name for file in files] == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert set(index["weight_map"]) == set(to_hf_state_dict(model))
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "model" / file, framework="pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 (it is no dict)
    assert all(file.stat().st_size < 40_000 for file in files)
    tokens = batch()
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(hf(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(load_hf(tmp_path / "model")(tokens).logits, model(tokens).logits)


def test_dtype_is_kept(tmp_path: Path) -> None:
    save_hf(make(dtype=torch.bfloat16), tmp_path / "model")
    assert {t.dtype for t in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    assert load_hf(tmp_path / "model", dtype=torch.float64).embed.weight.dtype == torch.float64


def test_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        save_hf(make(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    save_hf(make(), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(huggingface, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_hf(make(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_damaged_folders_are_one_line(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            load_hf(tmp_path / "model")
        assert "\n" not in str(error.value)

    refused("config.json cannot be read")
    save_hf(make(), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused("model.safetensors cannot be read")
    weights.unlink()
    refused(r"holds no model\*.safetensors")
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    refused("model.layers.3.input_layernorm.weight.* missing")


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"activation": "geglu"}, "moe.activation"),
        ({"expert_bias": True}, "moe.expert_bias"),
        ({"shared_intermediate_size": 8}, "moe.shared_intermediate_size"),
        ({"router": RouterConfig(score="sigmoid")}, "moe.router.score"),
        ({"router": RouterConfig(scale=2.0)}, "moe.router.scale"),
        ({"router": RouterConfig(selection_bias=True)}, "moe.router.selection_bias"),
        ({"router": RouterConfig(bias=True)}, "moe.router.bias"),
        ({"router": RouterConfig(num_groups=2)}, "moe.router.num_groups"),
    ],
)
def test_what_qwen3_cannot_express_is_not_exported(change: dict[str, Any], name: str, tmp_path: Path) -> None:
    config = replace(CONFIG, moe=replace(MOE, **change))
    with pytest.raises(ValueError, match=name):
        hf_config_dict(config)
    with pytest.raises(ValueError, match=name):
        save_hf(DecoderLM(config), tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be one of 'qwen3_moe', 'olmoe', 'mixtral'; got 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "rope_type must be 'default', got 'yarn'"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_experts": "many"}, "num_experts must be a number, got 'many'"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_heads"),
        ({"initializer_range": [0.1]}, "initializer_range must be a number"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be a table of settings or null, got 'yarn'"),
    ],
)
def test_what_the_decoder_does_not_implement_is_not_imported(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({**hf_config_dict(CONFIG), **change})


def test_missing_setting_and_other_spellings() -> None:
    data = hf_config_dict(CONFIG)
    del data["moe_intermediate_size"]
    with pytest.raises(ValueError, match="moe_intermediate_size is missing"):
        config_from_hf(data)
    with pytest.raises(ValueError, match="must hold a table of settings, got list"):
        config_from_hf([])
    unset = {"num_key_value_heads": None, "rms_norm_eps": None, "decoder_sparse_step": None}
    assert config_from_hf({**hf_config_dict(CONFIG), **unset}).num_kv_heads == CONFIG.num_heads
    older = hf_config_dict(replace(CONFIG, dense_layers=(0, 2)))
    del older["rope_parameters"], older["head_dim"]
    older |= {"rope_scaling": None, "mlp_only_layers": [], "decoder_sparse_step": 2}
    config = config_from_hf(older)
    assert config.rope_theta == 500.0
    assert config.head_dim == 8
    assert config.dense_layers == (0, 2)


def test_wrong_tensors_are_named() -> None:
    state = to_hf_state_dict(make())
    expert = "model.layers.2.mlp.experts.5.up_proj.weight"
    with pytest.raises(ValueError, match=r"experts\.5\.up_proj\.weight: this tensor is missing"):
        from_hf_state_dict(CONFIG, {name: t for name, t in state.items() if name != expert})
    with pytest.raises(ValueError, match=r"extra\.weight: the configuration has no such tensor"):
        from_hf_state_dict(CONFIG, {**state, "extra.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"norm.weight must be \(32,\)"):
        from_hf_state_dict(CONFIG, {**state, "model.norm.weight": torch.zeros(31)})
