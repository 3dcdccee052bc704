"""The configuration: what it accepts, what it refuses and how it says so, and the way to JSON and back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers import raises_one_line

from tilemoe.activations import validate_activation
from tilemoe.config import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    UNGATED_ACTIVATIONS,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    TokenRounding,
    from_dict,
    to_dict,
)

NAN, INF = float("nan"), float("inf")


def moe(**changes: Any) -> MoEConfig:
    base = {"hidden_size": 16, "intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 2}
    return MoEConfig(**{**base, **changes})


def model(**changes: Any) -> ModelConfig:
    base: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
    base |= {"head_dim": 4, "max_seq_len": 8, "dense_intermediate_size": 32}
    return ModelConfig(**{**base, **changes})


def router(**changes: Any) -> RouterConfig:
    return RouterConfig(**changes)


REFUSED: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (router, {"score": "tanh"}, "router.score must be one of sigmoid, softmax; got 'tanh'"),
    (router, {"score": None}, "router.score must be one of"),
    (router, {"normalize": 1}, "router.normalize must be True or False, got 1"),
    (router, {"scale": 0.0}, "router.scale must be a finite number > 0, got 0.0"),
    (router, {"scale": NAN}, "router.scale must be a finite number > 0, got nan"),
    (router, {"aux_loss_coef": -0.1}, "router.aux_loss_coef must be a finite number >= 0"),
    (router, {"z_loss_coef": INF}, "router.z_loss_coef must be a finite number >= 0"),
    (router, {"num_groups": 0}, "router.num_groups must be an integer >= 1"),
    (router, {"top_groups": 1.0}, "router.top_groups must be an integer >= 1"),
    (router, {"num_groups": 2, "top_groups": 3}, r"router.top_groups \(3\) must not exceed router.num_groups \(2\)"),
    (
        router,
        {"softmax_after_topk": True, "score": "sigmoid"},
        "router.softmax_after_topk needs router.score='softmax'",
    ),
    (RouterConfig.preset, {"name": "gpt5"}, "router preset must be one of .*mixtral.*; got 'gpt5'"),
    (TokenRounding, {"mode": "floor"}, "rounding.mode must be one of balance, .*; got 'floor'"),
    (TokenRounding, {"tile": 8}, "rounding.tile must be an integer >= 16, got 8"),
    (TokenRounding, {"tile": 96}, "rounding.tile must be a power of two >= 16, got 96"),
    (moe, {"hidden_size": 0}, "hidden_size must be an integer >= 1, got 0"),
    (moe, {"intermediate_size": True}, "intermediate_size must be an integer >= 1, got True"),
    (moe, {"num_experts": -1}, "num_experts must be an integer >= 1, got -1"),
    (moe, {"num_experts_per_tok": 0}, "num_experts_per_tok must be an integer >= 1, got 0"),
    (moe, {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) must not exceed num_experts \(8\)"),
    (moe, {"activation": "swish"}, "activation must be one of .*; got 'swish'"),
    (moe, {"activation_limit": 7.0}, "activation_limit is a parameter of activation='swiglu_oai'"),
    (moe, {"activation": "swiglu_oai", "activation_limit": -1.0}, "activation_limit must be a finite number > 0"),
    (moe, {"gate_up": "mixed"}, "gate_up must be one of concatenated, interleaved; got 'mixed'"),
    (moe, {"expert_bias": 1}, "expert_bias must be True or False"),
    (moe, {"shared_gate": True}, "shared_gate needs a shared expert: set shared_intermediate_size > 0"),
    (moe, {"shared_intermediate_size": -8}, "shared_intermediate_size must be an integer >= 0"),
    (moe, {"initializer_range": -1.0}, "initializer_range must be a finite number >= 0"),
    (moe, {"router": {"score": "softmax"}}, "router must be a RouterConfig, got dict"),
    (moe, {"router": router(num_groups=3)}, r"router.num_groups \(3\) must divide num_experts \(8\)"),
    (moe, {"router": router(num_groups=8)}, "into groups of at least 2"),
    (
        moe,
        {"router": router(num_groups=4), "num_experts_per_tok": 3},
        r"num_experts_per_tok \(3\) exceeds the 2 experts of the router.top_groups \(1\) eligible groups",
    ),
    (model, {"vocab_size": 0}, "model.vocab_size must be an integer >= 1"),
    (model, {"num_kv_heads": 3}, r"model.num_kv_heads \(3\) must divide model.num_heads \(4\)"),
    (model, {"head_dim": 3}, "model.head_dim must be even for rotary embeddings, got 3"),
    (model, {"rope_theta": 0.0}, "model.rope_theta must be a finite number > 0"),
    (model, {"norm_eps": NAN}, "model.norm_eps must be a finite number > 0"),
    (model, {"initializer_range": "0.02"}, "model.initializer_range must be a finite number >= 0"),
    (model, {"moe": moe(hidden_size=8)}, r"model.moe.hidden_size \(8\) must equal model.hidden_size \(16\)"),
    (model, {"moe": {"hidden_size": 16}}, "model.moe must be a MoEConfig or None, got dict"),
    (model, {"dense_intermediate_size": 0}, "model.dense_intermediate_size must be > 0 when a block is dense"),
    (model, {"moe": moe(), "dense_layers": (3,)}, "model.dense_layers names 3, but layers run from 0 to 2"),
    (model, {"moe": moe(), "dense_layers": (-1,)}, "model.dense_layers: each layer must be an integer >= 0, got -1"),
    (model, {"moe": moe(), "dense_layers": 1}, "model.dense_layers must be a tuple of layer numbers, got 1"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED, ids=[str(case[1]) for case in REFUSED])
def test_bad_values_are_named_in_one_line(make: Callable[..., object], arguments: dict[str, Any], message: str) -> None:
    with raises_one_line(message):
        make(**arguments)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"hidden": 8}, "hidden: no such setting of MoEConfig; it has hidden_size, intermediate_size"),
        ({"hidden_size": 8}, "intermediate_size: required by MoEConfig and not given"),
        ({"router": {"scor": "softmax"}}, "^hidden_size: required by MoEConfig and not given"),
        ([], "MoEConfig: expected a table of settings, got list"),
        ({**to_dict(moe()), "router": 3}, "^router: expected a table of settings, got int"),
        ({**to_dict(moe()), "router": {"scor": "softmax"}}, "router.scor: no such setting of RouterConfig"),
        ({**to_dict(moe()), "activation": ["swiglu"]}, "activation must be one of"),
        ({**to_dict(moe()), "router": {"score": {}}}, "router.score must be one of"),
    ],
    ids=str,
)
def test_bad_tables_are_named_in_one_line(data: Any, message: str) -> None:
    with raises_one_line(message):
        from_dict(MoEConfig, data)


def test_limits_themselves_are_accepted() -> None:
    assert moe(num_experts_per_tok=8).num_experts_per_tok == 8
    assert moe(hidden_size=1, intermediate_size=1, num_experts=1, num_experts_per_tok=1).up_rows == 2
    assert moe(hidden_size=13, intermediate_size=7).hidden_size == 13, (
        "odd sizes are a kernel's concern, not the config's"
    )
    assert moe(initializer_range=0).initializer_range == 0
    assert moe(shared_intermediate_size=8, shared_gate=True).shared_gate
    assert moe(activation="swiglu_oai", activation_limit=7, activation_alpha=1.5).activation_limit == 7
    assert moe(router=router(num_groups=4, top_groups=4), num_experts_per_tok=8).router.top_groups == 4
    assert TokenRounding(tile=16).tile == 16
    assert model(moe=moe(), dense_layers=(0, 2)).num_dense_layers == 2
    assert model(moe=moe(), dense_intermediate_size=0).num_dense_layers == 0


def test_gated_and_ungated_make_up_the_activations() -> None:
    assert not GATED_ACTIVATIONS & UNGATED_ACTIVATIONS
    for name in ACTIVATIONS:
        validate_activation(name, None, None)
        config = moe(activation=name)
        assert config.is_gated == (name in GATED_ACTIVATIONS)
        assert config.up_rows == (16 if config.is_gated else 8)


def test_to_json_and_back() -> None:
    config = model(
        moe=moe(activation="swiglu_oai", activation_alpha=1.1, router=router(score="sigmoid", num_groups=2)),
        dense_layers=(1,),
    )
    data = to_dict(config)
    assert from_dict(ModelConfig, json.loads(json.dumps(data))) == config
    assert from_dict(ModelConfig, to_dict(model())) == model()
    assert data["dense_layers"] == [1]
    assert data["moe"]["router"]["score"] == "sigmoid"
