"""Megatron Core's models with tilemoe's experts against the same with its SequentialMLP, on a CPU.

The checks run on two and four processes, with Megatron's parallel groups.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raises_one_line, run_python
from ranks import named, run_on_ranks
from torch import nn

pytest.importorskip("megatron.core", reason="Megatron Core is not installed: make env")

import megatron_step
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.inference import utils as inference
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron_models import (
    LENGTH,
    D,
    E,
    K,
    N,
    Training,
    assert_same,
    assert_same_step,
    config,
    gpt,
    gradients,
    layer_of,
    loss_of,
    losses_of,
    megatron_on_cpu,
    models,
    shards_of,
    spec,
    tokens,
)

from tilemoe.bench import record
from tilemoe.integrations import megatron as integration

SILU, GELU = nn.functional.silu, nn.functional.gelu


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron_on_cpu():
        yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "dispatcher"),
    [
        ({}, "LocalTokenDispatcher"),
        ({"moe_shared_expert_intermediate_size": N}, "LocalTokenDispatcher"),
        (
            {"moe_shared_expert_intermediate_size": N, "moe_shared_expert_overlap": True}
            | {"moe_token_dispatcher_type": "alltoall"},
            "MoEAlltoAllTokenDispatcher",
        ),
        # Some tokens lose an expert, and Megatron fills experts with tokens of weight 0.
        ({"moe_expert_capacity_factor": 0.5}, "LocalTokenDispatcher"),
        ({"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}, "LocalTokenDispatcher"),
    ],
    ids=["plain", "shared", "overlapped", "dropped", "padded"],
)
def test_loss_and_every_gradient(changes: dict[str, Any], dispatcher: str) -> None:
    stock, ours = models(**changes)
    assert_same_step(stock, ours, tokens(1))
    assert type(layer_of(ours).token_dispatcher).__name__ == dispatcher


def test_decoding_that_pads_experts() -> None:
    """Megatron's inference turns padding on for a model that was made without."""
    found = []
    for model in models(moe_token_dispatcher_type="alltoall"):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(inference, "moe_layer_cache", None)
            inference.set_decode_expert_padding(model.eval(), True, capacity_factor=E / K)
            found.append({"losses": losses_of(model, tokens(1))})
    assert_same(found[1], found[0])


def test_the_experts_after_a_cuda_graph_of_the_router() -> None:
    """A replay runs no Python: the dispatcher has what the graph returned, as transformer_layer.py puts it there."""
    layer = layer_of(models()[1])
    x, dispatcher = torch.randn(LENGTH, 2, D), layer.token_dispatcher
    expected, _ = layer(x)
    layer.fwd_execution_map = ["route"]
    rows, probs, _ = layer(x, intermediate_tensors=())
    returned = {name: getattr(dispatcher, name) for name in dispatcher.cudagraph_attrs}
    dispatcher.routing_map = None
    vars(dispatcher).update(returned)
    layer.fwd_execution_map = ["expert_compute"]
    out, _ = layer(None, intermediate_tensors=(rows, probs))
    layer.fwd_execution_map = ["postprocess"]
    assert torch.equal(layer(None, intermediate_tensors=(out, None)), expected)


@pytest.mark.parametrize(
    ("bf16", "main_grad", "distributed"),
    [
        (False, torch.float32, False),
        (True, torch.float32, True),
        pytest.param(False, torch.float32, True, marks=pytest.mark.thorough),
        pytest.param(True, torch.float32, False, marks=pytest.mark.thorough),
        pytest.param(True, torch.bfloat16, True, marks=pytest.mark.thorough),
    ],
)
def test_megatrons_optimiser_takes_the_same_steps(bf16: bool, main_grad: torch.dtype, distributed: bool) -> None:
    """In bf16 to what it takes from fp32: CPUs with AMX round otherwise than those without."""
    stock, ours = (Training(model, main_grad, distributed) for model in models(bf16=bf16))
    exact = Training(models(bf16=False)[0], torch.float32, distributed)
    for run in (stock, ours, exact):
        run.go_on(4)
    weight = layer_of(ours.model).experts.w1
    assert weight.main_grad.dtype == main_grad
    assert weight.grad is None or weight.grad is weight.main_grad  # the optimiser in fp32 makes it so
    assert weight.grad_added_to_main_grad
    of_losses, of_norms = (apart(stock.losses, exact.losses), apart(stock.norms, exact.norms)) if bf16 else (0.0, 0.0)
    assert ours.losses == pytest.approx(stock.losses, rel=max(of_losses, 5e-5 if bf16 else 1e-6))
    assert ours.norms == pytest.approx(stock.norms, rel=max(of_norms, 5e-4 if bf16 else 1e-5))


def apart(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def test_no_gradient_of_the_weights_dtype_is_made_beside_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilemoe.ops import experts as expert_ops

    for name in ("up_proj_wgrad", "down_proj_wgrad"):
        monkeypatch.setattr(expert_ops, name, None)  # those that return a gradient
    run = Training(models(bf16=True)[1])
    run.go_on(1)
    assert run.norms[0] > 0


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["moe", "full"],
)
def test_recomputation_changes_no_bit(recompute: dict[str, Any]) -> None:
    plain, again = (Training(models(bf16=True, **changes)[1]) for changes in ({}, recompute))
    for run in (plain, again):
        run.go_on(2)
    assert (again.losses, again.norms) == (plain.losses, plain.norms)


def test_plain_checkpoints_load_either_way() -> None:
    (stock, ours), (other_stock, other_ours) = models(), models()
    for source, target in ((stock, other_ours), (ours, other_stock)):
        moved(source)
        target.load_state_dict(source.state_dict())
        assert_same({"loss": loss_of(target, tokens(2))}, {"loss": loss_of(source, tokens(2))})


def test_te_grouped_names_are_read() -> None:
    stock, ours = (layer_of(model).experts for model in models())
    moved(stock)
    state = {}
    for name, weight in stock.state_dict().items():
        if weight is not None:
            _, index, linear, _ = name.split(".")
            state[f"{linear}.weight{index}"] = weight
    ours.load_state_dict(state | {"linear_fc1._extra_state": None})
    assert_same(ours.state_dict(), {name: weight for name, weight in stock.state_dict().items() if weight is not None})


def test_distributed_checkpoints_go_on_either_way(tmp_path: Path) -> None:
    for number in range(2):
        source, target = [Training(model) for model in models()][:: 1 - 2 * number]
        assert shards_of(target.model) == shards_of(source.model)
        source.go_on(3)
        target.go_on(1)  # so that it has states to be replaced
        folder = tmp_path / str(number)
        folder.mkdir()
        dist_checkpointing.save(source.state(), str(folder))
        target.load(dist_checkpointing.load(target.state(is_loading=True), str(folder)))
        target.losses = source.losses[:]  # their number says which tokens are next
        for run in (source, target):
            run.go_on(2)
        assert target.losses[-4:] == pytest.approx(source.losses[-4:], rel=1e-6)
        assert target.norms[-2:] == pytest.approx(source.norms[-2:], rel=1e-5)


def moved(model: nn.Module) -> None:
    """Its weights changed, so that what is loaded shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input=True"),
        ({"activation_func": quick_gelu}, "activation_func=quick_gelu with gated_linear_unit=True"),
        ({"moe_mlp_glu_interleave_size": 8}, "moe_mlp_glu_interleave_size=8"),
        ({"bias_activation_fusion": True, "activation_func_clamp_value": 7.0}, "not heeded by Megatron's fused SwiGLU"),
        ({"activation_func_fp8_input_store": True}, "fc1 outputs of a multiple of 128, not 32; unset it"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}, "offload_modules has 'moe_act'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    cfg = config()
    vars(cfg).update(changes)  # some of which Megatron takes with Transformer Engine alone
    with raises_one_line(message):
        gpt(cfg, integration.tilemoe_spec(spec(cfg)))


def test_biases_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gpt-oss has them. Megatron adds its own in place to a view that autograd refuses; the reference has a copy."""
    reduce = parallel_layers.reduce_from_tensor_model_parallel_region
    monkeypatch.setattr(
        parallel_layers,
        "reduce_from_tensor_model_parallel_region",
        lambda *args, **named: reduce(*args, **named).clone(),
    )
    gate = {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.05}
    stock, ours = models(add_bias_linear=True, expert_tensor_parallel_size=1, **gate)
    moved(stock)
    ours.load_state_dict(stock.state_dict())
    losses = [loss_of(model, tokens(1)) for model in (stock, ours)]
    for loss in losses:
        loss.backward()
    assert_same({"loss": losses[1]}, {"loss": losses[0]})
    expected = {name: each for name, each in gradients(stock).items() if each.any()}
    assert len([name for name in expected if "local_experts" in name and "bias" in name]) > 12  # some experts are idle
    assert_same({name: gradients(ours)[name] for name in expected}, expected, 3e-6)
    assert shards_of(ours) == shards_of(stock)
    weights = ({name for name, each in m.state_dict().items() if each is not None} for m in (stock, ours))
    assert next(weights) == next(weights)
    assert numel_without_decay(ours) == numel_without_decay(stock) > E * D


def numel_without_decay(model: nn.Module) -> int:
    groups = Training(model).optimizer.param_groups
    return sum(each.numel() for group in groups if group["wd_mult"] == 0 for each in group["params"])


@pytest.mark.thorough  # Megatron compiles some
@pytest.mark.parametrize(
    "changes",
    [
        {"activation_func": GELU},
        {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.02},
        {"activation_func": SILU, "activation_func_clamp_value": 0.02},
        {"activation_func": nn.functional.relu, "gated_linear_unit": False},
        {"activation_func": integration.squared_relu, "gated_linear_unit": False},
        {"activation_func": GELU, "gated_linear_unit": False},
    ],
    ids=["geglu", "swiglu_oai", "swiglu_clamped", "relu", "relu2", "gelu"],
)
def test_activations(changes: dict[str, Any]) -> None:
    stock, ours = (layer_of(model).experts for model in models(**changes))
    x = torch.randn(12, stock.config.hidden_size, generator=torch.Generator().manual_seed(1))
    counts, probs = torch.full((6,), 2), torch.ones(12)
    assert_same({"out": ours(x, counts, probs)[0]}, {"out": stock(x, counts, probs)[0]})


def test_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(moe_layer_freq=[1, 0])
    stock = spec(cfg)
    ours = integration.tilemoe_spec(stock)
    assert ours.layer_specs[0].submodules.mlp.func is integration.TileMoELayer
    assert stock.layer_specs[0].submodules.mlp.func is MoELayer
    assert ours.layer_specs[1] is stock.layer_specs[1]  # a dense layer
    assert integration.gpt_spec(cfg).layer_specs[0].submodules.mlp.func is integration.TileMoELayer
    hybrid = integration.tilemoe_spec(hybrid_stack_spec).submodules.moe_layer
    assert hybrid.submodules.mlp.func is integration.TileMoELayer
    old = ModuleSpec(module=MoELayer, submodules=stock.layer_specs[0].submodules.mlp.keywords["submodules"])
    assert integration.tilemoe_spec(old).module is integration.TileMoELayer
    with raises_one_line(r"spec \(TransformerBlockSubmodules\) has no MoE layer of Megatron's"):
        integration.tilemoe_spec(dense := spec(config(moe_layer_freq=[0, 0])))
    with raises_one_line("is num_moe_experts set, or is it ours"):
        integration.tilemoe_spec(ours)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    assert integration.tilemoe_spec(dense) is dense  # a stage, and the others have MoE layers


def test_importing_tilemoe_does_not_import_megatron() -> None:
    assert "megatron" in sys.modules
    assert run_python("import sys, tilemoe, tilemoe.integrations; print('megatron' in sys.modules)") == "False\n"


@pytest.mark.thorough
def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    sizes = "--device cpu --layers 1 --sequence 32 --vocabulary 64 --steps 3 --warm 1"
    megatron_step.main([*sizes.split(), "--contestants", "grouped_mm,tilemoe,tilemoe-dispatched"])
    rows = record.rows("megatron")
    assert [row["contestant"] for row in rows] == list(megatron_step.SPECS)
    for row in rows[1:]:
        assert row["problem"] is None
        assert 0 < row["loss_difference"]["largest"] < 1e-3
        assert min(row["grad_difference"].values()) > 0
    wrong = {**rows[1], "step_ms": {"median": 1.0}}
    gradients = {name: torch.ones(2) for name in megatron_step.COMPARED}
    found = megatron_step.compared(wrong, rows[0], gradients, gradients | {"mlp.experts.fc1": torch.zeros(2) + 2})
    assert "mlp.experts.fc1 is off by" in found["problem"]
    assert found["step_ms"] is None


def check_expert_parallelism() -> None:
    with megatron_on_cpu(expert_model_parallel_size=2):
        for dispatcher in ("allgather", "alltoall"):
            stock, ours = models(expert_model_parallel_size=2, moe_token_dispatcher_type=dispatcher)
            assert layer_of(ours).experts.w1.shape == (E // 2, 2 * N, D)
            assert not layer_of(ours).experts.w1.allreduce  # the other process has other experts
            assert_same_step(stock, ours, tokens(1 + dist.get_rank()))
            assert shards_of(ours) == shards_of(stock)


def check_expert_tensor_parallelism() -> None:
    """And context parallelism, of the layer alone: Megatron's attention has neither without Transformer Engine."""
    for parallel, shape in (
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, (E, N, D)),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, (E, 2 * N, D)),  # tokens stay
        ({"context_parallel_size": 2, "expert_model_parallel_size": 2}, (E // 2, 2 * N, D)),
    ):
        with megatron_on_cpu(**parallel):
            cfg = config(**parallel, sequence_parallel="tensor_model_parallel_size" in parallel)
            found = []
            for layers in (spec(cfg), integration.tilemoe_spec(spec(cfg))):
                megatron_random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
                torch.manual_seed(0)
                layer = layers.layer_specs[0].submodules.mlp(config=cfg, pg_collection=None, is_mtp_layer=False)
                generator = torch.Generator().manual_seed(2 + dist.get_rank())
                x, do = torch.randn(2, LENGTH // 2, 2, D, generator=generator)
                out, _ = layer(x.requires_grad_())
                out.backward(do)
                found.append(({"out": out, "x": x.grad, **gradients(layer)}, shards_of(layer)))
            assert layer.experts.w1.shape == shape
            assert isinstance(layer.token_dispatcher, integration.LocalTokenDispatcher) == (shape == (E, 2 * N, D))
            assert_same(found[1][0], found[0][0], 3e-6)
            assert found[1][1] == found[0][1]


def losses_and_gradients_of_a_pipeline(cfg: Any, wrap: Callable[[Any], Any]) -> tuple[list[float], dict[str, Any]]:
    """Of two micro-batches and the stages of this process."""
    stages = []
    for number in range(cfg.virtual_pipeline_model_parallel_size or 1):
        stage = {"vp_stage": number if cfg.virtual_pipeline_model_parallel_size else None}
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
        }
        stages.append(gpt(cfg, wrap(spec(cfg, **stage)), **ends, **stage))

    def forward(batches: Any, model: Any) -> tuple[Any, Any]:
        return losses_of(model, next(batches)), lambda losses: (losses.mean(), losses.mean().item())

    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter([tokens(1), tokens(2)]) for _ in stages],
        model=stages,
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return losses, {f"{i}.{name}": each for i, stage in enumerate(stages) for name, each in gradients(stage).items()}


def check_pipelines() -> None:
    """The first stage has no MoE layer."""
    for parallel, layers in (
        ({"pipeline_model_parallel_size": 2}, [0, 0, 1, 1]),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, [0, 1, 1, 1]),
    ):
        with megatron_on_cpu(**parallel):
            cfg = config(**parallel, num_layers=4, moe_layer_freq=layers, pipeline_dtype=torch.float32)
            stock, ours = (
                losses_and_gradients_of_a_pipeline(cfg, wrap) for wrap in (lambda spec: spec, integration.tilemoe_spec)
            )
            assert ours[0] == pytest.approx(stock[0], rel=1e-6)
            assert_same(ours[1], stock[1], 3e-6)


LAYOUTS: list[dict[str, Any]] = [
    {"expert_model_parallel_size": 4},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
]


def runs_of(layout: dict[str, Any]) -> tuple[Training, Training]:
    """Of Megatron's experts and of ours."""
    parallel = {**layout, "sequence_parallel": "tensor_model_parallel_size" in layout}
    stock, ours = models(**parallel, num_moe_experts=8, moe_token_dispatcher_type="alltoall")
    return Training(stock), Training(ours)


def check_fifty_steps_and_a_checkpoint_of_another_layout() -> None:
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    folder, after = Path(folders[0]), []
    for number, layout in enumerate(LAYOUTS):
        with megatron_on_cpu(**layout):
            runs = runs_of(layout)
            for which, run in enumerate(runs):
                run.go_on(50)
                (folder / f"{number}{which}").mkdir(exist_ok=True)
                dist_checkpointing.save(run.state(), str(folder / f"{number}{which}"))
                after.append(loss_of(run.model, tokens(9)).item())
            assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-5)
            assert runs[1].norms == pytest.approx(runs[0].norms, rel=1e-4)
            assert runs[1].losses[-1] < runs[1].losses[0] - 0.1
    for number, layout in enumerate(reversed(LAYOUTS)):
        with megatron_on_cpu(**layout):
            for which, run in enumerate(runs_of(layout)):
                state = run.state(is_loading=True)
                run.load(dist_checkpointing.load(state, str(folder / f"{number}{1 - which}")))
                assert loss_of(run.model, tokens(9)).item() == pytest.approx(after[2 * number + 1 - which], rel=1e-6)
                run.go_on(1)


CHECKS = [check_expert_parallelism, check_expert_tensor_parallelism, check_pipelines]


@pytest.mark.dist
@pytest.mark.parametrize("name", named(CHECKS, check_expert_parallelism))
def test_two_processes(name: str, tmp_path: Path) -> None:
    checks = [check for check in CHECKS if check.__name__ == name]
    assert run_on_ranks(checks, 2, tmp_path) == {name: ""}


@pytest.mark.dist
@pytest.mark.thorough
def test_four_processes(tmp_path: Path) -> None:
    check = check_fifty_steps_and_a_checkpoint_of_another_layout
    assert run_on_ranks([check], 4, tmp_path) == {check.__name__: ""}
