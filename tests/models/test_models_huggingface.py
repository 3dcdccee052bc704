"""Conversion to and from transformers' Qwen3-MoE, OLMoE and Mixtral: names, logits, losses, gradients, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Watching, from_hf_state_dict, tiny_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tilemoe.config import ModelConfig, MoEConfig, RouterConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.flops import count_parameters
from tilemoe.models.hf_config import config_from_hf, hf_config_dict
from tilemoe.models.huggingface import load_hf, save_hf, to_hf_state_dict
from tilemoe.testing import assert_equal

ROUTER = RouterConfig(aux_loss_coef=0.01, aux_loss_over="model")
CONFIG = tiny_model(
    vocab_size=53, hidden_size=32, head_dim=16, max_seq_len=32,
    moe=MoEConfig(32, 24, 6, 2, router=ROUTER, initializer_range=0.2), dense_intermediate_size=40, rope_theta=500.0,
    norm_eps=1e-5, initializer_range=0.2,
)  # fmt: skip
MOE = CONFIG.moe
assert MOE is not None
KEPT = RouterConfig(softmax_after_topk=True, normalize=False)
VARIANTS = {
    "mixed": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True),
    "all experts": replace(CONFIG, dense_layers=(), dense_intermediate_size=0),
    "dense": replace(CONFIG, moe=None, dense_layers=()),
    "interleaved": replace(CONFIG, moe=replace(MOE, gate_up="interleaved")),
    "not normalised": replace(CONFIG, moe=replace(MOE, router=replace(ROUTER, normalize=False))),
    "softmax of the kept": replace(CONFIG, moe=replace(MOE, router=KEPT)),
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


SIZES: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2, "initializer_range": 0.2,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=6, head_dim=16, mlp_only_layers=[1]),
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SIZES, num_experts=6)),
    "olmoe, normalised and tied": (
        OlmoeForCausalLM,
        OlmoeConfig(**SIZES, num_experts=6, norm_topk_prob=True, tie_word_embeddings=True),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=6)),
    "mixtral, wide heads": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=6, head_dim=16)),
}


def transformers_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model that transformers makes: of a family, or a Qwen3-MoE of what one of VARIANTS says."""
    torch.manual_seed(0)
    qwen3 = VARIANTS.get(name)
    kind, config = (Qwen3MoeForCausalLM, Qwen3MoeConfig(**hf_config_dict(qwen3))) if qwen3 else FAMILIES[name]
    model = kind(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        elif qwen3 is None and parameter_name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.to(dtype)


def our_weights(theirs: PreTrainedModel, config: ModelConfig) -> dict[str, Tensor]:
    """Theirs under our names; a head that is the embedding is not among them."""
    state = theirs.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    return from_hf_state_dict(config, state)


def batch() -> Tensor:
    return torch.randint(0, 53, (2, 17), generator=torch.Generator().manual_seed(2))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


class Allocations(Watching):
    """Bytes of every result of an operator that is no view of its arguments, by the operator's name."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.made: list[tuple[str, int]] = []

    def _note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor) and out.device.type == "cpu":
            given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and arg.is_cpu}
            if out.untyped_storage().data_ptr() not in given:
                self.made.append((func.__name__, out.untyped_storage().nbytes()))


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
        assert_equal(ours.state_dict(), back.state_dict())


def test_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        save_hf(make(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    save_hf(make(), tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


@pytest.mark.parametrize(
    ("qk_norm", "change", "name"),
    [
        ("head", {"activation": "geglu"}, "moe.activation='geglu' has no place in Qwen3MoeForCausalLM"),
        ("head", {"router": RouterConfig(score="sigmoid")}, "moe.router.score"),
        ("head", {"router": RouterConfig(scale=2.0)}, "moe.router.scale"),
        ("head", {"router": RouterConfig(selection_bias=True)}, "moe.router.selection_bias"),
        ("head", {"router": RouterConfig(bias=True)}, "moe.router.bias"),
        ("head", {"router": RouterConfig(num_groups=2)}, "moe.router.num_groups"),
        ("none", {"router": RouterConfig(normalize=False)}, "moe.router.normalize=False has no place in MixtralFor"),
        ("full", {"expert_bias": True}, "moe.expert_bias=True has no place in OlmoeForCausalLM"),
        ("full", {"shared_intermediate_size": 8}, r"moe\.shared_intermediate_size"),
    ],
)
def test_what_an_architecture_cannot_express_is_not_exported(
    qk_norm: Any, change: dict[str, Any], name: str, tmp_path: Path
) -> None:
    dense = {} if qk_norm == "head" else {"dense_layers": ()}
    config = replace(CONFIG, qk_norm=qk_norm, head_dim=8, moe=replace(MOE, **change), **dense)
    with pytest.raises(ValueError, match=name):
        save_hf(DecoderLM(config), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_missing_setting_and_other_spellings() -> None:
    data = hf_config_dict(CONFIG)
    del data["moe_intermediate_size"]
    with pytest.raises(ValueError, match="moe_intermediate_size is missing"):
        config_from_hf(data)
    with pytest.raises(ValueError, match="must hold a table of settings, got list"):
        config_from_hf([])
    unset = {"num_key_value_heads": None, "rms_norm_eps": None, "decoder_sparse_step": None, "attention_dropout": None}
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


@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
def test_a_random_transformers_model_gives_the_same_logits_loss_and_gradients(name: str) -> None:
    hf, tokens = transformers_model(name), batch()
    if name != "dense":  # whose tuple of router logits is empty, and transformers takes its first
        hf.config.output_router_logits = True
    config = VARIANTS[name] if name in VARIANTS else config_from_hf(hf.config.to_dict())
    ours = DecoderLM(config)
    ours.load_state_dict(our_weights(hf, config))
    assert count_parameters(config) == hf.num_parameters() == sum(p.numel() for p in ours.parameters())
    torch.testing.assert_close(ours(tokens).logits, hf(tokens).logits, rtol=1e-4, atol=1e-5)
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    out, hf_loss = ours(tokens, labels), hf(tokens, labels=tokens).loss
    loss = out.loss + out.aux_loss
    torch.testing.assert_close(loss, hf_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    hf_loss.backward()
    expected = from_hf_state_dict(config, {name: parameter.grad for name, parameter in hf.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert expected[name].any(), name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_in_and_out_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = transformers_model(family, dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ours = load_hf(tmp_path / "theirs", dtype=dtype)
    save_hf(ours, tmp_path / "ours", max_shard_bytes=15_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == dtype
        assert torch.equal(after[name], tensor), name
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(before)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in ours.parameters())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]

    back, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(back) is type(theirs)
    assert not any(report.values()), report
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")  # .to(dtype) has rounded theirs' rotary buffers
    with torch.no_grad():
        assert torch.equal(back(batch()).logits, again(batch()).logits)


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_nothing_larger_than_a_tensor_of_the_file_is_made_beside_the_model(gate_up: str, tmp_path: Path) -> None:
    theirs = transformers_model("mixtral")
    theirs.save_pretrained(tmp_path / "model")
    largest = max(tensor.nbytes for tensor in tensors_of(tmp_path / "model").values())
    config = config_from_hf(theirs.config.to_dict())
    assert config.moe is not None
    model = DecoderLM(replace(config, moe=replace(config.moe, gate_up=gate_up)))
    assert sum(p.nbytes for p in model.parameters()) > 10 * largest

    with Allocations() as exporting:
        tensors = to_hf_state_dict(model)
    assert not exporting.made
    if gate_up == "concatenated":
        assert all(tensor.is_contiguous() for tensor in tensors.values())  # so safetensors writes from where they lie

    with Allocations() as loading:
        load_hf(tmp_path / "model")
    parameters = [nbytes for name, nbytes in loading.made if name.startswith("empty")]
    assert sum(parameters) == sum(p.nbytes for p in model.parameters())
    assert max((nbytes for name, nbytes in loading.made if not name.startswith("empty")), default=0) <= largest


def test_what_only_qwen3_has() -> None:
    config = config_from_hf(FAMILIES["mixtral"][1].to_dict())
    for qk_norm in ("none", "full"):
        dense = replace(config, qk_norm=qk_norm, dense_layers=(0,), dense_intermediate_size=8)
        with pytest.raises(ValueError, match="number of dense layers=1 has no place"):
            hf_config_dict(dense)
    with pytest.raises(ValueError, match="head_dim=16 has no place in OlmoeForCausalLM; only 8"):
        hf_config_dict(replace(config, qk_norm="full", head_dim=16))
