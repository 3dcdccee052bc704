"""Single experts modules of transformers: layouts, sentinels, what is refused, and the switch itself."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers import assert_near, raises_one_line, run_python
from hf_models import COMMON, FAMILIES, SETTINGS, D, E, T, experts, routing, run, tokens
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts

from tilemoe.integrations import transformers as integration
from tilemoe.ops import inference
from tilemoe.testing import relative_error

pytestmark = pytest.mark.usefixtures("registered")
LAYOUTS = [MixtralExperts, OpenAIPrivacyFilterExperts, MiniMaxM3VLExperts, NemotronHExperts]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("shape", [(T, D), (2, T // 2, D)])
def test_inference_in_one_call(kind: type[nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU takes for generating, here on a CPU: the same numbers, and the operators are not called."""
    module, (x, ids, scores) = experts(kind), routing()
    expected = module(x.view(shape), ids, scores.double()).detach()
    monkeypatch.setattr(inference, "is_replayable", lambda first: True)
    monkeypatch.setattr(integration, "moe", lambda *args, **options: pytest.fail("called"))
    with torch.no_grad():
        found = module(x.view(shape), ids, scores.double())
    assert found.shape == shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", LAYOUTS[:2])
@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
def test_tokens_of_another_dtype_are_cast_to_the_weights_as_grouped_mm_does(
    kind: type[nn.Module], of_weights: torch.dtype
) -> None:
    other = torch.float32 if of_weights == torch.bfloat16 else torch.bfloat16
    module, (x, ids, scores) = experts(kind).to(of_weights), routing()
    ours = run(module, "tilemoe", x.to(other), ids, scores)
    theirs = run(module, "grouped_mm", x.to(other), ids, scores)
    eager = run(module.float(), "eager", x.bfloat16().float(), ids, scores)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert ours[0].dtype == other
    assert_near([t.float() for t in ours], [t.float() for t in theirs], 1.5e-2)
    assert_near([t.float() for t in ours], eager, 1.5e-2)


def test_a_changed_gate_is_seen() -> None:
    module = experts(MiniMaxM3VLExperts)
    before = run(module, "tilemoe", *routing())[0]
    module.swiglu_limit = module.limit = 0.3
    theirs = run(module, "eager", *routing())
    assert relative_error(before, theirs[0]) > 0.05
    assert_near(run(module, "tilemoe", *routing()), theirs, 1e-5)
    del module.swiglu_limit, module.limit
    module.__class__ = type("OfClass", (type(module),), {"limit": 0.5, "swiglu_limit": 0.5})
    assert_near(run(module, "tilemoe", *routing()), run(module, "eager", *routing()), 1e-5)
    module = experts(MixtralExperts)
    run(module, "tilemoe", *routing())
    module.act_fn = nn.Tanh()
    with pytest.raises(ValueError, match="its gate is none"):
        run(module, "tilemoe", *routing())


class _Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self.beta * z)


def _gelu_gate(self: nn.Module, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.gelu(gate) * up


@pytest.mark.parametrize("compiled", [False, True])
def test_an_activation_whose_own_number_is_changed_is_tried_again(compiled: bool) -> None:
    torch._dynamo.reset()
    module = experts(MixtralExperts)
    module.act_fn = _Swish()
    assert_near(run(module, "tilemoe", *routing()), run(module, "eager", *routing()), 1e-5)
    if compiled:
        module.config._experts_implementation = "tilemoe"
        module.compile(backend="aot_eager", fullgraph=True)
        module(*routing())
    module.act_fn.beta = 2.0
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported, RuntimeError), match="its gate is none"):
        run(module, "tilemoe", *routing())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("of_class", [False, True])
def test_a_gate_that_is_put_in_place_is_tried_again(of_class: bool, compiled: bool) -> None:
    """grouped_mm calls the gate; a class' own eager forward need not."""
    torch._dynamo.reset()
    module = experts(type("Own", (MixtralExperts,), {}))
    before = run(module, "tilemoe", *routing())
    if compiled:
        module.compile(backend="aot_eager", fullgraph=True)
        module(*routing())
    if of_class:
        type(module)._apply_gate = _gelu_gate
    else:
        module._apply_gate = MethodType(_gelu_gate, module)
    expected = run(module, "grouped_mm", *routing())
    assert relative_error(before[0], expected[0]) > 0.05
    assert_near(run(module, "tilemoe", *routing()), expected, 1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_an_activation_that_is_another_in_training_is_refused_in_either_mode(training: bool) -> None:
    module = experts(MixtralExperts).train(training)
    module.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5)).train(training)
    with raises_one_line("trying it out failed with .*it computes something else in training than in evaluation"):
        module(*routing())
    assert {part.training for part in module.modules()} == {training}


def test_experts_of_two_ranks_add_up_to_all() -> None:
    """As under transformers' expert parallelism: ids count from the rank's first; one past its last means elsewhere."""
    x, ids, scores = routing()
    whole = experts(MixtralExperts)
    expected = run(whole, "eager", x, ids, scores)
    sums = [torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(scores)]
    for rank in range(2):
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        part = experts(MixtralExperts, num_local_experts=E // 2)
        part._is_expert_parallel = True
        with torch.no_grad():
            part.gate_up_proj.copy_(whole.gate_up_proj[mine])
            part.down_proj.copy_(whole.down_proj[mine])
        here = (ids >= mine.start) & (ids < mine.stop)
        local = torch.where(here, ids - mine.start, E // 2)
        operands = (x, local, scores.masked_fill(~here, 0.0))
        found = run(part, "tilemoe", *operands)
        assert_near(found, run(part, "grouped_mm", *operands), 1e-5)
        assert_near(found[3:], [dw[mine] for dw in expected[3:]], 1e-5)
        sums = [total + one for total, one in zip(sums, found[:3], strict=True)]
    assert_near(sums, expected[:3], 1e-5)


@pytest.mark.parametrize("kind", [MixtralExperts, MiniMaxM3VLExperts])
def test_layers_that_were_tried_share_what_is_compiled(kind: type[nn.Module]) -> None:
    """PyTorch compiles a code eight times, so that the ninth layer with a graph of its own would run uncompiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    modules = [experts(kind) for _ in range(10)]
    expected = [module(*routing()) for module in modules]
    for module, wanted in zip(modules, expected, strict=True):
        module.compile(backend=counter, fullgraph=True)
        assert torch.equal(module(*routing()), wanted)
    assert counter.frame_count == 1


def test_dynamic_shapes_take_one_graph() -> None:
    """The model's gate is recognised while it is compiled."""
    torch._dynamo.reset()
    counters.clear()
    options = {"attn_implementation": "eager", "experts_implementation": "tilemoe", "num_hidden_layers": 1}
    eager, model = (FAMILIES["gpt_oss"].make(**options).train() for _ in range(2))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 9), (3, 17), (4, 6)):
        found, expected = (traced_step(each, tokens(batch, length)) for each in (compiled, eager))
        torch.testing.assert_close(found, expected)
        assert counters["stats"]["unique_graphs"] == 1, f"compiled again for {batch} x {length} tokens"


def traced_step(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits, loss and gradients."""
    out = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False)
    return [out.logits, out.loss, *torch.autograd.grad(out.loss, list(model.parameters()))]


@pytest.mark.parametrize("kind", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_without_values(family: str, kind: str) -> None:
    """The gate is tried with real values all the same."""

    def described(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        with torch.device(device):
            model = type(made)(made.config)
            return [(t.shape, t.dtype) for t in traced_step(model, torch.zeros(2, 9, dtype=torch.int64))]

    made = FAMILIES[family].make(attn_implementation="eager", experts_implementation="tilemoe")
    expected = described("cpu")
    with nullcontext() if kind == "meta" else FakeTensorMode(allow_non_fake_inputs=True):
        assert described(kind) == expected


def _activated_by(function: nn.Module) -> Any:
    module = experts(MixtralExperts)
    module.act_fn = function
    return module


def _with_up_proj(*weight: Tensor) -> Any:
    """Experts whose first weight is no parameter, if it is there."""
    module = experts(MixtralExperts)
    del module.gate_up_proj
    for each in weight:
        module.gate_up_proj = each
    return module


class _ClampedTwice(Gemma4TextExperts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate.clamp(max=1.0)) * up.clamp(-2.0, 2.0)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "clamped at two limits": (lambda: experts(_ClampedTwice), r"_ClampedTwice \(made_up\): its gate is"),
    "quick GELU gate": (
        lambda: experts(Gemma4TextExperts, hidden_activation="quick_gelu"),
        r"Gemma4TextExperts \(made_up\): its gate is none",
    ),
    "norm after the experts": (lambda: experts(MuseSparkExperts), "each expert's output is normalised"),
    "ungated and unknown": (lambda: experts(NemotronHExperts, mlp_hidden_act="tanh"), "its activation is none"),
    "trained activation": (lambda: _activated_by(nn.PReLU()), "PReLU has parameters"),
    "activation with a buffer": (
        lambda: _activated_by(nn.BatchNorm1d(8, affine=False)),
        "has buffers, which could change unseen",
    ),
    "int8": (
        lambda: _with_up_proj(torch.zeros(E, 16, D, dtype=torch.int8)),
        r"gate_up_proj is a Tensor of torch.int8; quantised",
    ),
    "packed elsewhere": (_with_up_proj, "has no weight gate_up_proj; quantised weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_with_what_works_instead(case: str) -> None:
    make, message = REFUSED[case]
    with raises_one_line(f"{message}.*use experts_implementation='grouped_mm' or 'eager' for it"):
        make()(*routing())


def test_fp8_experts_are_refused() -> None:
    made_up = type("MadeUpFP8", (FP8Experts,), {})  # the decorator changes the class that it is given
    kind = use_experts_implementation(made_up, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    module = kind(SimpleNamespace(**(SETTINGS | {"hidden_activation": "silu"})), block_size=(8, 8))
    with pytest.raises(ValueError, match=r"MadeUpFP8 .*: its weights are quantised to FP8; use experts_impl"):
        module(*routing())


def test_use_takes_a_model_that_is_wrapped_and_refuses_a_part_of_one() -> None:
    integration.unregister()  # `use` registers by itself
    models = [FAMILIES[family].make(experts_implementation="eager") for family in ("mixtral", "olmoe")]
    assert integration.use(nn.ModuleList(models)) == 4
    assert {model.config._experts_implementation for model in models} == {"tilemoe"}
    models[0].set_experts_implementation("eager")
    assert integration.use(torch.compile(models[0], backend="eager")) == 2
    models[0].set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r"MixtralExperts \(mixtral\) did not take up .*: pass the whole model"):
        integration.use(models[0].model.layers[0])
    assert models[0].config._experts_implementation == "eager"


def test_a_model_that_fsdp_shards(one_process: DeviceMesh) -> None:
    model = FAMILIES["qwen3_moe"].make(experts_implementation="eager")

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        gradient = model.model.layers[0].mlp.experts.gate_up_proj.grad
        return loss.detach(), gradient.to_local() if isinstance(gradient, DTensor) else gradient.clone()

    expected = loss_and_gradient()
    integration.use(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_process)
    fully_shard(model, mesh=one_process)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, DTensor)
    assert_near(loss_and_gradient(), expected, 1e-5)
    with pytest.raises(ValueError, match=r"is a DTensor of torch.float32; set 'tilemoe' before FSDP shards"):
        integration.use(model)


@pytest.mark.parametrize("shape", [(T, D), (2, T // 2, D)], ids=str)
@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
def test_the_output_of_experts_given_to_fsdp_may_be_changed_in_place(
    shape: tuple[int, ...], one_process: DeviceMesh
) -> None:
    """FSDP2 hangs the gather for the backward on the output, and warns of a view, which would lose it."""
    sharded, whole, (x, ids, scores) = experts(MixtralExperts), experts(MixtralExperts), routing()
    fully_shard(sharded, mesh=one_process)
    for module in (sharded, whole):
        out = module(x.view(shape), ids, scores)
        assert out.shape == shape
        out += x.view(shape)
        out.square().sum().backward()
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


def test_use_refuses_a_name() -> None:
    with pytest.raises(ValueError, match=r"use takes a model that is loaded, got str; load it, or call register\(\)"):
        integration.use("allenai/OLMoE-1B-7B-0924")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Llama", "SwitchTransformers"])
def test_use_refuses_a_model_without_experts_to_choose(kind: str) -> None:
    small = {"num_layers": 2, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_experts": 2}
    config = getattr(transformers, f"{kind}Config")(**(COMMON if kind == "Llama" else small | {"vocab_size": 31}))
    model = getattr(transformers, "LlamaForCausalLM" if kind == "Llama" else f"{kind}Model")(config)
    with pytest.raises(ValueError, match=f"{kind}.* has no experts whose implementation transformers lets one"):
        integration.use(model)


def test_unregistered_transformers_is_as_it_was() -> None:
    integration.unregister()
    tables = (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS)
    before = [dict(table) for table in tables]
    classes = [dict(type(table)._global_mapping) for table in tables]
    integration.unregister()  # without a register before it
    integration.register()
    integration.register()
    assert all("tilemoe" in table for table in tables)
    model = FAMILIES["mixtral"].make(experts_implementation="tilemoe")
    assert model.config._experts_implementation == "tilemoe"
    model(input_ids=tokens())
    integration.unregister()
    assert [dict(table) for table in tables] == before
    assert [dict(type(table)._global_mapping) for table in tables] == classes
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    with pytest.raises(KeyError, match="tilemoe") as forward:
        model(input_ids=tokens())
    with pytest.raises(ValueError, match="tilemoe") as loading:
        FAMILIES["mixtral"].make(experts_implementation="tilemoe")
    assert forward.value.args[0] in page
    assert str(loading.value).split(" `exp")[0] in page
    assert str(loading.value).split("arguments are")[0] in page
    model.set_experts_implementation("grouped_mm")
    model(input_ids=tokens())


def test_importing_neither_registers_nor_imports_transformers() -> None:
    run_python("import sys, tilemoe.integrations.transformers\nassert 'transformers' not in sys.modules")


@pytest.mark.parametrize("version", ["4.57.1", "5.6.0.dev0"])
def test_an_old_transformers_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its lazy module puts itself in sys.modules anew: what an import at the top has is not what a later one gets.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ValueError, match=rf"transformers {version} does not let .* -U 'transformers>=5.7'"):
        integration.register()


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]  # as importing does for a failure
    with pytest.raises(ValueError, match=r"transformers is not installed; pip install -U 'transformers>=5.7'"):
        integration.register()
