"""What the processes of a job, two or four of them, check of a decoder that they share.

B sequences of a rank · S tokens each · L MoE layers · E experts · K experts per token
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from helpers import raises_one_line, redraw
from ranks import device_of_rank
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tilemoe.config import KEPT_BETWEEN_MICRO_BATCHES, ModelConfig, MoEConfig, ParallelConfig, RouterConfig
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.layers.lora import ATTENTION, EXPERTS, add_lora, packed_weights
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate
from tilemoe.parallel.expert import expert_parallel, rows_of_experts
from tilemoe.parallel.gradients import clip_gradients
from tilemoe.parallel.mesh import Meshes, build_meshes
from tilemoe.parallel.model import begin_micro_batch, parallelize
from tilemoe.routing.replay import RoutingRecord
from tilemoe.testing import assert_equal
from tilemoe.testing.compare import ERROR_CAPS

Model = TypeVar("Model", bound=nn.Module)
E, K = 8, 2
ROUTER = RouterConfig(selection_bias=True, aux_loss_coef=0.1, z_loss_coef=0.01)
MOE = MoEConfig(16, 8, E, K, router=ROUTER, initializer_range=0.3, expert_bias=True, shared_intermediate_size=8)
MODEL = ModelConfig(
    vocab_size=61, hidden_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=8, max_seq_len=16, moe=MOE,
    dense_intermediate_size=24, dense_layers=(0,), initializer_range=0.3,
)  # fmt: skip
EXACT = ParallelConfig(param_dtype=None, reduce_dtype=None)
FSDP = EXACT
HSDP = replace(EXACT, replicate=2)  # 2 x 2, of four
EP_FSDP = replace(EXACT, expert=2)  # 2 x 2, of four
LIMIT_64, LIMIT_32 = 1e-12, 1e-6
# Of gradients in fp32 that are not to be had at 1e-6: see `limits_of`.
CAP_32 = ERROR_CAPS[torch.float32]
# The router's terms add up to zero over a token's experts and cancel over tokens, too; those of a query's scores, over
# its keys.
CANCELLING = ("router.bias", "k_norm.weight")
SEQUENCES = (2, 1, 0, 3)  # of each rank, of 7 tokens each: odd numbers, and a rank without any


def world() -> int:
    return dist.get_world_size()


def make_model(dtype: torch.dtype, config: ModelConfig = MODEL, **options: Any) -> DecoderLM:
    torch.manual_seed(2)
    model = DecoderLM(config, dtype=dtype, **options)
    for name, tensor in model.named_parameters():
        if name.endswith(("b1", "b2")):
            torch.nn.init.normal_(tensor, 0.0, 0.2)
    return model.to(device_of_rank())


def meshes_of(config: ParallelConfig, model: ModelConfig = MODEL) -> Meshes:
    return build_meshes(config, model, device_of_rank().type)


def send_all_to(model: DecoderLM, experts: slice) -> None:
    """Choose these experts, and only these, for every token."""
    for name, buffer in model.named_buffers():
        if name.endswith("selection_bias"):
            buffer.zero_()
            buffer[experts] = 10.0


def batch(sequences: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Each rank's ids and labels (B, S), some of them ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (sum(sequences), 8), generator=generator).to(device_of_rank())
    labels = ids[:, 1:].clone()
    labels[::2, 3] = -100
    return list(ids[:, :-1].split(sequences)), list(labels.split(sequences))


class Result(NamedTuple):
    """Of the whole batch; the auxiliary loss is fp32 in any model."""

    loss: Tensor
    aux_loss: Tensor
    gradients: dict[str, Tensor]
    tokens_per_expert: Tensor  # of this process


def whole_batch(model: DecoderLM, sequences: tuple[int, ...], expert_ids: Tensor | None = None) -> Result:
    """By one process; expert_ids (L, B of all ranks, S, K): those to be replayed."""
    ids, labels = (torch.cat(parts) for parts in batch(sequences[: world()]))
    out = model(ids, labels, expert_ids=expert_ids)
    assert out.loss is not None
    (out.loss + out.aux_loss).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Result(out.loss.detach(), out.aux_loss.detach(), gradients, out.tokens_per_expert)


def shared_backward(
    model: DecoderLM, sequences: tuple[int, ...], expert_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """This process' parts of the loss and the auxiliary loss, and its tokens per expert; expert_ids of all ranks."""
    ids, labels = batch(sequences[: world()])
    rank = dist.get_rank()
    here = None if expert_ids is None else expert_ids.split(sequences[: world()], dim=1)[rank]
    out = model(ids[rank], labels[rank], expert_ids=here)
    assert out.loss is not None
    counts = [(part != -100).sum().double() for part in labels]
    loss = out.loss * (counts[rank] / sum(counts)).to(out.loss.dtype)
    aux_loss = out.aux_loss / world()
    (loss + aux_loss).backward()
    return loss.detach().clone(), aux_loss.detach().clone(), out.tokens_per_expert


def shared_batch(model: DecoderLM, sequences: tuple[int, ...], expert_ids: Tensor | None = None) -> Result:
    """By all processes, each with its own sequences."""
    *totals, tokens_per_expert = shared_backward(model, sequences, expert_ids)
    for total in totals:
        dist.all_reduce(total)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return Result(totals[0], totals[1], gradients, tokens_per_expert)


def whole(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300))


def assert_same(
    got: Result, want: Result, limit: float, limits: Callable[[], Mapping[str, float]] = dict[str, float]
) -> None:
    """``limits``: of the gradients whose limit is another, asked for where one is beyond ``limit``. On a CPU all
    gradients together are within that.
    """
    assert got.gradients.keys() == want.gradients.keys()
    pairs = {"loss": (got.loss, want.loss, limit), "aux_loss": (got.aux_loss, want.aux_loss, LIMIT_32)}
    if want.loss.device.type == "cpu":
        both = [torch.cat([of.gradients[name].flatten() for name in want.gradients]) for of in (got, want)]
        pairs["all gradients"] = (both[0], both[1], limit)
    for name, gradient in want.gradients.items():
        assert gradient.any() or "experts" in name, name
        pairs[name] = (got.gradients[name], gradient, limit)
    errors = {name: (error(a, b), most) for name, (a, b, most) in pairs.items()}
    if beyond(errors):
        errors |= {name: (errors[name][0], most) for name, most in limits().items()}
        assert_within({f"{name} in {want.loss.dtype}": each for name, each in errors.items()})


def assert_within(errors: Mapping[str, tuple[float, float]]) -> None:
    """Every (error, limit); all processes call it, and it fails in all of them or in none: they stay together."""
    found = beyond(errors)
    assert not found, "; ".join(found)


def beyond(errors: Mapping[str, tuple[float, float]]) -> list[str]:
    """A line for each error that is beyond its limit in any process; all call it, and find the same ones."""
    worst = torch.tensor([here for here, _ in errors.values()], dtype=torch.float64).nan_to_num(nan=math.inf)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return [
        f"{name}: error {of_any:.2e} of the worst process, {here:.2e} here, limit {limit:.2e}"
        for (name, (here, limit)), of_any in zip(errors.items(), worst.tolist(), strict=True)
        if not of_any <= limit
    ]


def limits_by_noise(
    make: Callable[[torch.dtype], Model], gradients_of: Callable[[Model], dict[str, Tensor]]
) -> dict[str, float]:
    """What rounding alone does to each gradient in fp32, by one process against fp64: twice that may be the error.

    A norm's weight of 8 elements is a sum over all tokens in which most cancels: fp32 gives it to 4e-7 to 3e-6, and two
    computations that add in another order differ by as much. How much it is varies by chance, with 8 numbers more than
    with many: so it is the worst of four computations, three of them with weights off by 0.1 %, and a margin for few
    numbers as in `tilemoe.testing.compare`. The cap is that of every fp32 result.
    """
    weights = {name: p.detach() for name, p in make(torch.float32).named_parameters()}
    generator = torch.Generator().manual_seed(2)
    noise: dict[str, float] = {}
    for distance in (0.0, 1e-3, 1e-3, 1e-3):
        results = []
        factors = {name: 1 + distance * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
        near = {name: w * factors[name].to(w.device) for name, w in weights.items()}
        for dtype in (torch.float64, torch.float32):
            one = make(dtype)
            one.load_state_dict({name: near.get(name, kept) for name, kept in one.state_dict().items()})
            results.append(gradients_of(one))
        exact, rounded = results
        for name, gradient in rounded.items():
            noise[name] = max(noise.get(name, 0.0), error(gradient, exact[name]))
    return {
        name: min(CAP_32, max(LIMIT_32, (1 + 4 / math.sqrt(weights[name].numel())) * 2 * each))
        for name, each in noise.items()
    }


def limits_of(
    make: Callable[[torch.dtype], Model], gradients_of: Callable[[Model], dict[str, Tensor]], dtype: torch.dtype
) -> dict[str, float]:
    """`limits_by_noise` in fp32: on a GPU of all gradients, on a CPU of the sums that cancel."""
    if dtype == torch.float64:
        return {}
    limits = limits_by_noise(make, gradients_of)
    on_gpu = device_of_rank().type == "cuda"
    return {name: limit for name, limit in limits.items() if on_gpu or name.endswith(CANCELLING)}


def assert_as_one_process(
    config: ParallelConfig,
    model: ModelConfig = MODEL,
    experts_of_all: tuple[slice, ...] = (slice(0, 0), slice(0, 2), slice(4, 6)),
    **options: Any,
) -> None:
    """Experts by score; then all on one rank, of four or of two. options: `parallelize`'s."""
    meshes = meshes_of(config, model)
    for dtype, limit in ((torch.float64, LIMIT_64), (torch.float32, LIMIT_32)):
        for experts in experts_of_all:

            def make(dtype: torch.dtype, experts: slice = experts) -> DecoderLM:
                made = make_model(dtype, model)
                send_all_to(made, experts)
                return made

            one, many = make(dtype), make(dtype)
            limits = partial(limits_of, make, lambda near: whole_batch(near, SEQUENCES).gradients, dtype)
            parallelize(many, meshes, **options)
            assert all(isinstance(block, FSDPModule) for block in many.blocks)
            assert_same(shared_batch(many, SEQUENCES), whole_batch(one, SEQUENCES), limit, limits)


def check_fsdp() -> None:
    assert_as_one_process(FSDP)


def check_hsdp() -> None:
    assert_as_one_process(HSDP)


def check_expert_parallel() -> None:
    assert_as_one_process(replace(EXACT, expert=world()))


def check_expert_parallel_and_fsdp() -> None:
    assert_as_one_process(EP_FSDP)


def check_expert_parallel_and_replicas() -> None:
    assert_as_one_process(replace(EXACT, expert=2, replicate=world() // 2))


def check_what_is_sharded_how() -> None:
    """Whole experts where FSDP's ranks divide them, else their rows."""
    for config, experts, placements in (
        (FSDP, 8, [Shard(0)]),
        (FSDP, 7, [Shard(1)]),
        (EP_FSDP, 8, None),
        (EP_FSDP, 6, [Shard(1), Shard(0)] if world() == 4 else None),
    ):
        model = replace(MODEL, moe=replace(MOE, num_experts=experts))
        many = make_model(torch.float32, model)
        whole_w1 = {name: p.detach().clone() for name, p in many.named_parameters() if name.endswith("experts.w1")}
        parallelize(many, meshes_of(config, model))
        for name, want in whole_w1.items():
            w1 = many.get_parameter(name)
            assert isinstance(w1, DTensor)
            assert placements is None or list(w1.placements) == placements
            assert w1.to_local().numel() * world() == want.numel()
            assert torch.equal(w1.full_tensor(), want)
    assert_as_one_process(FSDP, replace(MODEL, moe=replace(MOE, num_experts=7)))


def check_a_model_is_sharded_once() -> None:
    """By one function: expert_parallel averages gradients, parallelize sums them."""
    every, divided = meshes_of(FSDP), meshes_of(EP_FSDP)
    assert divided.experts is not None
    shards = fully_shard, partial(parallelize, meshes=every), partial(expert_parallel, mesh=divided.experts)
    for shard, meshes in product(shards, (every, divided)):
        shard(model := make_model(torch.float32))
        with raises_one_line("model is sharded already; call parallelize once"):
            parallelize(model, meshes)


def check_checkpointing() -> None:
    """Repeating a part of the forward changes no bit; the experts' own recomputation goes with the attention's."""
    expected = None
    for mode, recompute in (("none", None), ("none", "up_proj"), ("attention", "up_proj"), ("block", "up_proj")):
        model = make_model(torch.float32, recompute=recompute)
        parallelize(model, meshes_of(replace(EP_FSDP, checkpointing=mode)))  # type: ignore[arg-type]
        got = shared_batch(model, SEQUENCES)
        expected = expected or got
        errors = {f"loss, {mode}": (error(got.loss, expected.loss), 0.0)}
        for name, want in expected.gradients.items():
            errors[f"{name}, {mode}"] = (error(got.gradients[name], want), 0.0)
        assert_within(errors)


def check_replayed_routing() -> None:
    """Any experts, given for all tokens, across expert parallelism and a repeated forward; and the record of them."""
    sequences = SEQUENCES[: world()]
    ranks_ids = torch.rand(2, sum(sequences), 7, E, generator=torch.Generator().manual_seed(3)).argsort(-1)[..., :K]
    given = ranks_ids.to(device_of_rank())
    for checkpointing in ("none", "block"):
        one, many = (make_model(torch.float64) for _ in range(2))
        parallelize(many, meshes_of(replace(EP_FSDP, checkpointing=checkpointing)))  # type: ignore[arg-type]
        assert_same(shared_batch(many, SEQUENCES, given), whole_batch(one, SEQUENCES, given), LIMIT_64)
        records = [RoutingRecord(), RoutingRecord()]
        ids, _ = batch(sequences)
        one(torch.cat(ids), record=records[0])
        many(ids[dist.get_rank()], record=records[1])
        if sequences[dist.get_rank()]:
            want = records[0].expert_ids(sum(sequences)).split(sequences, dim=1)[dist.get_rank()]
            assert torch.equal(records[1].expert_ids(sequences[dist.get_rank()]), want)


def check_mixed_precision() -> None:
    """bf16 in the blocks, fp32 in the sums and the weights; not far from fp32 throughout."""
    one, many = (make_model(torch.float32) for _ in range(2))
    parallelize(many, meshes_of(replace(EP_FSDP, param_dtype="bfloat16", reduce_dtype="float32")))
    seen: list[torch.dtype] = []
    many.blocks[1].register_forward_pre_hook(lambda module, given: seen.extend([given[0].dtype, given[1][0].dtype]))
    got, want = shared_batch(many, (2, 2, 2, 2)), whole_batch(one, (2, 2, 2, 2))
    assert seen == [torch.bfloat16, torch.float32]  # activations, rotary angles
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in many.parameters() if p.grad is not None)
    rounding = error(got.loss, want.loss)
    assert rounding > 1e-5, f"the loss has an error of {rounding:.2e}, less than bf16 can give"
    of_embed = error(got.gradients["embed.weight"], want.gradients["embed.weight"])
    assert_within({"loss": (rounding, 0.02), "embed.weight": (of_embed, 0.2)})


def check_training() -> None:
    """Three steps of AdamW with clipping and the selection bias give the weights of one process."""
    one, many = (make_model(torch.float64) for _ in range(2))
    parallelize(many, meshes_of(EP_FSDP))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) for model in (one, many)]
    for _ in range(3):
        norms = []
        for model, optimizer, run in zip((one, many), optimizers, (whole_batch, shared_batch), strict=True):
            optimizer.zero_grad()
            counts = run(model, SEQUENCES).tokens_per_expert
            norms.append(clip_gradients(model.parameters(), 0.5))
            optimizer.step()
            # The sum over the processes counts the whole batch of one of them four times, which changes no sign.
            model.update_selection_bias(counts, 0.01)
        assert_within({"norm": (error(norms[1], norms[0]), LIMIT_64)})
        assert norms[0] > 0.5
    pairs = zip(one.named_parameters(), many.parameters(), strict=True)
    assert_within({name: (error(whole(got), want), 1e-9) for (name, want), got in pairs})
    assert_equal(list(many.buffers()), list(one.buffers()))


class Collectives(TorchDispatchMode):
    """How often FSDP gathers weights and reduces gradients; integers are the sizes that experts' processes exchange."""

    gathers = reduces = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += func is torch.ops.c10d._allgather_base_.default and args[0].is_floating_point()
        self.reduces += func is torch.ops.c10d._reduce_scatter_base_.default
        return func(*args, **(kwargs or {}))


def check_between_micro_batches() -> None:
    """Whatever stays whole between two micro-batches, two steps make the same gradients, by fewer collectives."""
    for config in (EP_FSDP, HSDP if world() == 4 else FSDP):
        first: list[Result] = []
        counts = {}
        for kept in KEPT_BETWEEN_MICRO_BATCHES:
            held = replace(config, reshard_after_forward=kept == "nothing", between_micro_batches=kept)
            model = make_model(torch.float64)
            parallelize(model, meshes_of(held))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            steps = []
            for _ in range(2):
                with Collectives() as seen:
                    begin_micro_batch(model, held, is_last=False)
                    shared_backward(model, SEQUENCES)
                    begin_micro_batch(model, held, is_last=True)
                    steps.append(shared_batch(model, SEQUENCES[::-1]))
                optimizer.step()
                optimizer.zero_grad()
            first = first or steps
            for got, want in zip(steps, first, strict=True):
                assert_same(got, want, LIMIT_64)
            counts[kept] = seen.gathers, seen.reduces
        if config is EP_FSDP and world() == 2:
            continue  # there a rank's experts are one process' alone, for which FSDP reduces nothing
        groups = sum(isinstance(module, FSDPModule) for module in model.modules())
        assert counts["nothing"][0] > 2 * groups
        assert counts["nothing"][1] == 2 * groups
        assert counts["weights"] == (groups, 2 * groups)
        assert counts["weights_and_gradients"] == (groups, groups)


def check_rows_of_experts() -> None:
    """Counts of the processes that share a layer's experts add up; without expert parallelism each has its own."""
    mine = torch.arange(2 * E, device=device_of_rank()).view(2, E) + dist.get_rank()
    pairs = {"expert": 2 * mine + (1 if dist.get_rank() % 2 == 0 else -1), "none": mine}
    for name, config in (("expert", EP_FSDP), ("none", FSDP)):
        model = make_model(torch.float32)
        parallelize(model, meshes_of(config))
        kept = mine.clone()
        assert torch.equal(rows_of_experts(model, mine), pairs[name])
        assert torch.equal(mine, kept)


def check_from_meta() -> None:
    """Weights, and adapters, are a function of the generator, whatever the mesh; so is what is decoded."""
    device = device_of_rank()
    ids = torch.arange(5, device=device)[None]
    for with_lora in (False, True):
        one, many = DecoderLM(MODEL, device=device), DecoderLM(MODEL, device="meta")
        if with_lora:
            for model in (one, many):
                add_lora(model, 3, 6.0, modules=(EXPERTS, ATTENTION))
        one.reset_parameters(torch.Generator().manual_seed(7))
        parallelize(many, meshes_of(EP_FSDP), device=device, generator=torch.Generator().manual_seed(7))
        for (name, want), got in zip(one.named_parameters(), many.parameters(), strict=True):
            assert torch.equal(whole(got), want), name
            assert got.requires_grad == want.requires_grad, name
        assert not with_lora or one.blocks[1].mlp.experts.up_a.any()
        assert_equal(list(many.buffers()), list(one.buffers()))
        tokens = [generate(model, ids, 4, temperature=0.0) for model in (one, many)]
        assert torch.equal(*tokens)


def check_compiled() -> None:
    """A compiled block, with the exchanges between its graphs."""
    model = replace(MODEL, num_layers=1, dense_layers=())
    config = replace(EP_FSDP, checkpointing="block")
    assert_as_one_process(config, model, (slice(0, 0),), compile_backend="eager")


def with_adapters(model: DecoderLM, modules: tuple[str, ...], storage: str = "dense") -> DecoderLM:
    redraw(add_lora(model, 3, 6.0, modules=modules, storage=storage), 0.2, seed=5)
    return model


def check_adapters() -> None:
    """Gradients of the adapters alone, whatever shares them; the dense layer, and what is below, may have none."""
    for config in (FSDP, HSDP, EP_FSDP, replace(EP_FSDP, checkpointing="block"), replace(EXACT, expert=world())):
        for modules in ((EXPERTS, ATTENTION), (EXPERTS,)):
            meshes = meshes_of(config)
            one, many = (with_adapters(make_model(torch.float64), modules) for _ in range(2))
            parallelize(many, meshes)
            expected = whole_batch(one, SEQUENCES)
            assert len(expected.gradients) == 2 * 4 + (3 * 8 if ATTENTION in modules else 0)
            assert_same(shared_batch(many, SEQUENCES), expected, LIMIT_64)


def make_model_in_4_bit(storage: str) -> DecoderLM:
    moe = replace(MOE, hidden_size=64, intermediate_size=64)
    model = make_model(torch.float32, replace(MODEL, hidden_size=64, moe=moe))
    return with_adapters(model, (EXPERTS, ATTENTION), storage)


def check_adapters_on_experts_in_4_bit() -> None:
    """What is stored is gathered as it is, whatever the others are cast to; gradients are those of one process."""
    for config in (FSDP, HSDP, EP_FSDP, replace(EP_FSDP, checkpointing="block"), replace(EXACT, expert=world())):
        for storage in STORAGES:
            one, many = (make_model_in_4_bit(storage) for _ in range(2))
            parallelize(many, meshes_of(config, many.config))
            assert_same(shared_batch(many, SEQUENCES), whole_batch(one, SEQUENCES), CAP_32)
    for storage, expert in product(STORAGES, (1, 2)):
        one, many = (make_model_in_4_bit(storage) for _ in range(2))
        stored = {name: one.state_dict()[name].clone() for _, names in packed_weights(one).values() for name in names}
        for name, parameter in many.named_parameters():
            if not (parameter.requires_grad or name in stored):
                parameter.data = parameter.bfloat16()  # as the trainer keeps it
        parallelize(many, meshes_of(ParallelConfig(expert=expert), many.config))
        got, want = shared_batch(many, SEQUENCES), whole_batch(one, SEQUENCES)
        assert error(got.loss, want.loss) < 1e-2
        assert all(gradient.dtype == torch.float32 for gradient in got.gradients.values())
        for module in many.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        for name, tensor in stored.items():
            gathered = many.get_parameter(name)
            here = gathered.to_local() if isinstance(gathered, DTensor) else gathered
            first = dist.get_rank() % expert * here.shape[0]
            assert torch.equal(here.view(tensor.dtype), tensor[first : first + here.shape[0]]), name


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
