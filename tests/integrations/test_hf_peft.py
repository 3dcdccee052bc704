"""transformers' models that PEFT wraps: `use` switches every copy of experts, and routing is recorded and replayed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FAMILIES, step, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from test_hf_replay import B, other_ids, recorded
from torch import Tensor, nn

from tilemoe.integrations import transformers as integration
from tilemoe.integrations.replay import record_routing, replay_routing
from tilemoe.layers.lora import add_lora
from tilemoe.testing import assert_equal

pytestmark = pytest.mark.usefixtures("registered")
SAVED = [("olmoe", "experts"), ("olmoe", "mlp"), ("gpt_oss", "experts"), ("gemma4", "experts")]
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"target_parameters": ["experts.down_proj"]},
    "two": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},  # one wrapper in the other
    "router": {
        "target_parameters": ["gate.weight", "router.weight", "experts.down_proj"],
        "target_modules": ["router.proj", "router.layer"],
    },
    "experts": {"target_modules": ["q_proj", "q_b_proj"], "modules_to_save": ["experts"]},
    "block": {"target_modules": ["q_proj", "q_b_proj"], "modules_to_save": ["mlp"]},
    "router saved": {"target_parameters": ["experts.down_proj"], "modules_to_save": ["gate", "router"]},
}


def settings(kind: str) -> LoraConfig:
    return LoraConfig(r=2, **{"target_modules": []} | SETTINGS[kind])


def computed_by(model: nn.Module) -> list[str]:
    """What each experts module of the model, copies too, is set to."""
    modules = [module for module in model.modules() if "has_gate" in vars(module)]
    return [module.config._experts_implementation for module in modules]


def shaken(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize(("family", "saved"), SAVED)
def test_use_switches_every_copy_that_peft_keeps(family: str, saved: str, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=[saved])
    model = get_peft_model(FAMILIES[family].make(experts_implementation="eager"), config)
    model.add_adapter("second", config)
    adapters, expected = ["default", "second"], []
    for seed, adapter in enumerate(adapters):
        model.set_adapter(adapter)
        shaken(model, seed)
        expected.append(step(model))
    assert integration.use(model) == FAMILIES[family].moe_layers
    assert computed_by(model) == ["tilemoe"] * 3 * FAMILIES[family].moe_layers
    model.add_adapter("third", config)
    assert set(computed_by(model)) == {"tilemoe"}
    for adapter, want in zip(adapters, expected, strict=True):
        model.set_adapter(adapter)
        torch.testing.assert_close(step(model), want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected[0][1], expected[1][1], atol=1e-3)
    base = FAMILIES[family].make(experts_implementation="tilemoe")
    with model.disable_adapter():
        assert_equal([model(input_ids=tokens()).logits], [base(input_ids=tokens()).logits])
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path / "second")
    assert set(computed_by(loaded)) == {"tilemoe"}
    torch.testing.assert_close(loaded(input_ids=tokens()).logits, expected[1][1], rtol=1e-4, atol=1e-5)
    merged = model.merge_and_unload()
    assert set(computed_by(merged)) == {"tilemoe"}
    torch.testing.assert_close(merged(input_ids=tokens()).logits, expected[1][1], rtol=1e-4, atol=1e-5)


def test_use_switches_no_copy_if_one_cannot_be() -> None:
    model = get_peft_model(FAMILIES["olmoe"].make(experts_implementation="eager"), settings("experts"))
    model.base_model.model.model.layers[1].mlp.experts.modules_to_save["default"].act_fn = nn.Tanh()
    with pytest.raises(ValueError, match=r"OlmoeExperts \(olmoe\): its gate is none of tilemoe's activations"):
        integration.use(model)
    assert computed_by(model) == ["eager"] * 4
    wrapped = nn.ModuleList([model.base_model.model, FAMILIES["mixtral"].make().model.layers[0]])
    model.base_model.model.model.layers[1].mlp.experts.modules_to_save["default"].act_fn = nn.SiLU()
    with pytest.raises(ValueError, match=r"MixtralExperts \(mixtral\) did not take up .*: pass the whole model"):
        integration.use(wrapped)
    assert set(computed_by(wrapped)) == {"eager", "grouped_mm"}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_add_lora_says_of_a_model_of_transformers_works(family: str) -> None:
    model = FAMILIES[family].make()
    assert integration.use(model) == FAMILIES[family].moe_layers
    with pytest.raises(ValueError, match=r"has no tilemoe.MoE to put adapters on; on a model of transformers") as error:
        add_lora(model, rank=2, alpha=4.0)
    call = str(error.value)[str(error.value).index("get_peft_model(") :]
    peft = eval(call, {"get_peft_model": get_peft_model, "LoraConfig": LoraConfig, "model": model})
    shaken(peft, 0)
    step(peft)
    adapters = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad and ".experts." in n}
    assert len(adapters) == 4 * FAMILIES[family].moe_layers
    assert all(grad is not None and grad.any() for grad in adapters.values())


@pytest.mark.parametrize("kind", ["one", "two"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_without_use_an_adapter_s_gradients_are_the_eager_experts(family: str, kind: str) -> None:
    found = []
    for implementation in ("eager", "tilemoe"):
        model = get_peft_model(FAMILIES[family].make(experts_implementation=implementation), settings(kind))
        shaken(model, 0)
        found.append(step(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("eager_first", [False, True])
def test_a_compiled_model_trains_adapters_of_its_experts(eager_first: bool) -> None:
    """PEFT's sum is traced; once a forward has run uncompiled, the wrappers lend their factors."""
    torch._dynamo.reset()
    peft = get_peft_model(FAMILIES["qwen3_moe"].make(num_hidden_layers=1), settings("one"))
    shaken(peft, 0)
    want = step(peft)
    integration.use(peft)
    if eager_first:
        step(peft)
    torch.testing.assert_close(step(torch.compile(peft, backend="eager"))[1], want[1], rtol=1e-4, atol=1e-5)
    grads = [parameter.grad for parameter in peft.parameters() if parameter.requires_grad]
    torch.testing.assert_close(grads, list(want[2].values()), rtol=1e-4, atol=1e-5)


def replayed(model: nn.Module, expert_ids: Tensor) -> tuple[float, Tensor]:
    """The loss, and the ids that the experts got; the backward gives every adapter of a router a gradient."""
    model.zero_grad()
    with replay_routing(model, expert_ids), record_routing(model) as record:
        out = model(input_ids=tokens(), labels=tokens())
        out.loss.backward()
    return out.loss.item(), record.expert_ids(B)


@pytest.mark.parametrize("kind", SETTINGS)
def test_replay_under_peft_is_the_model_s_own(kind: str) -> None:
    """Adapters at zero: the loss of the same ids without PEFT, also where blocks are repeated."""
    plain = FAMILIES["olmoe"].make(experts_implementation="tilemoe")
    own, other = recorded(plain), other_ids(plain)
    (own_loss, _), (loss, _) = replayed(plain, own), replayed(plain, other)
    assert abs(own_loss - loss) > 1e-3
    peft = get_peft_model(FAMILIES["olmoe"].make(), settings(kind)).train()
    integration.use(peft)
    hooks = [len(module._forward_pre_hooks) for module in peft.modules()]
    peft.enable_input_require_grads()
    peft.gradient_checkpointing_enable()
    assert torch.equal(recorded(peft), own)
    for ids, want in ((own, own_loss), (other, loss)):
        got, taken = replayed(peft, ids)
        assert got == pytest.approx(want, abs=1e-6)
        assert torch.equal(taken.long(), ids.long())
    peft.gradient_checkpointing_disable()
    assert [len(module._forward_pre_hooks) for module in peft.modules()] == hooks
