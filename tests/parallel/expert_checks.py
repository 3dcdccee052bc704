"""What the processes of a job, four or two of them, check of `expert_parallel`: any module, and transformers' models.

B sequences of a rank · S tokens each · L MoE layers · E experts · K experts per token
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raises_one_line, redraw
from hf_models import FAMILIES, VOCAB
from parallel_checks import (
    LIMIT_32,
    LIMIT_64,
    SEQUENCES,
    Result,
    assert_same,
    assert_within,
    batch,
    error,
    limits_of,
    whole,
    world,
)
from peft import LoraConfig, get_peft_model
from ranks import device_of_rank
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.integrations import transformers as integration
from tilemoe.integrations.replay import replay_routing
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.layers.lora import add_lora
from tilemoe.layers.moe import MoE
from tilemoe.parallel import expert_parallel
from tilemoe.plan import RoutingPlan
from tilemoe.testing import assert_equal

RUN = "TILEMOE_TEST_EXPERTS"  # names a folder that the processes share
D, E, K = 16, 8, 2
ROUTER = RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01)
CFG = MoEConfig(D, 8, E, K, router=ROUTER, initializer_range=0.3)
OTHER = MoEConfig(
    D,
    12,
    4,
    1,
    router=replace(ROUTER, normalize=False),
    initializer_range=0.3,
    expert_bias=True,
    shared_intermediate_size=8,
)
DTYPES = (torch.float64, torch.float32)
Make = Callable[[torch.dtype], Any]  # a Net or one of transformers' models


class Net(nn.Module):
    """Somebody's: a dense part and two MoE layers that differ; the second may be a block of transformers."""

    def __init__(self, theirs: nn.Module | None = None, cfg: MoEConfig = CFG) -> None:
        super().__init__()
        width = cfg.hidden_size
        self.embed = nn.Embedding(VOCAB, width)
        self.dense = nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Linear(20, width))
        self.first, self.second = MoE(cfg), theirs or MoE(OTHER)
        self.head = nn.Linear(width, VOCAB)
        self.repeats = False  # the MoE layers' forward in the backward

    def forward(self, ids: Tensor, expert_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """ids (B, S), expert_ids (2, B, S, K) to be replayed -> logits (B, S, V), auxiliary loss."""
        x = self.embed(ids)
        x = x + self.dense(x)
        aux_loss = torch.zeros((), device=x.device)
        for number, layer in enumerate((self.first, self.second)):
            options: dict[str, Any] = {}
            if expert_ids is not None and isinstance(layer, MoE):
                options = {"expert_ids": expert_ids[number, ..., : layer.cfg.num_experts_per_tok]}
            out = checkpoint(layer, x, **options, use_reentrant=False) if self.repeats else layer(x, **options)
            if isinstance(layer, MoE):
                aux_loss, out = aux_loss + out.aux_loss, out.hidden
            x = x + out
        return self.head(x), aux_loss


def make_net(dtype: torch.dtype, theirs: nn.Module | None = None) -> Net:
    torch.manual_seed(0)
    net = Net(theirs).to(device_of_rank(), dtype)
    if isinstance(net.second, MoE):
        nn.init.normal_(net.second.experts.b1, 0.0, 0.2)
    return net


def make_theirs(family: str, dtype: torch.dtype, **sizes: Any) -> Any:
    """Of transformers, with as many experts as four processes divide.

    Of `hf_models`' weights, three times as large, one process' own gradients in fp32 are up to 8e-6 off; of these 1e-6.
    """
    integration.register()
    sizes = {"initializer_range": 0.1, **sizes}
    names = {"num_experts", "num_local_experts", "n_routed_experts"} & FAMILIES[family].sizes.keys()
    sizes |= dict.fromkeys(names, E)
    return FAMILIES[family].make(experts_implementation="tilemoe", **sizes).train().to(device_of_rank(), dtype)


def make_net_with_a_block(dtype: torch.dtype) -> Net:
    return make_net(dtype, make_theirs("qwen3_moe", dtype, hidden_size=D).model.layers[0].mlp)


def layers_of(model: Any) -> list[nn.Module]:
    return [model.dense, model.first, model.second] if isinstance(model, Net) else list(model.model.layers)


def mesh_of(*sizes: int, names: tuple[str, ...] = ("fsdp", "expert")) -> DeviceMesh:
    return init_device_mesh(device_of_rank().type, sizes, mesh_dim_names=names)


def ep_and_fsdp() -> DeviceMesh:
    return mesh_of(world() // 2, 2)


def ep_alone() -> DeviceMesh:
    return mesh_of(world(), names=("expert",))


def share(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> None:
    """As a user does it; ``mesh`` None: FSDP alone."""
    if mesh is not None:
        expert_parallel(model, mesh, **options)
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)


def loss_of(
    model: nn.Module, ids: Tensor, labels: Tensor, labels_of_all: int, expert_ids: Tensor | None
) -> list[Tensor]:
    """The share of these tokens in the mean over all labels, and the auxiliary loss."""
    if isinstance(model, Net):
        logits, aux_loss = model(ids, expert_ids)
    else:
        logits, aux_loss = model(input_ids=ids, use_cache=False).logits, torch.zeros((), device=ids.device)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return [loss / labels_of_all, aux_loss]


def sequences_of(model: nn.Module) -> tuple[int, ...]:
    """Of each rank. A model of transformers cannot have none: there the empty rank has one without a label."""
    return tuple(number if isinstance(model, Net) else max(1, number) for number in SEQUENCES[: world()])


def backward(model: nn.Module, *, shared: bool, expert_ids: Tensor | None = None) -> Result:
    """Of all sequences by this process, or of its own ones, with FSDP's mean over processes taken back.

    expert_ids (L, B of all ranks, S, K): those to be replayed.
    """
    sequences = sequences_of(model)
    ids, labels = batch(sequences)
    for number, real in enumerate(SEQUENCES[: world()]):
        if not real:
            labels[number].fill_(-100)
    labels_of_all = sum(int((part != -100).sum()) for part in labels)
    mine, given = (torch.cat(ids), torch.cat(labels)), expert_ids
    if shared:
        rank = dist.get_rank()
        mine = ids[rank], labels[rank]
        given = None if expert_ids is None else expert_ids.split(sequences, dim=1)[rank]
    of_theirs = given is not None and not isinstance(model, Net)
    with replay_routing(model, given) if of_theirs else nullcontext():
        loss, aux_loss = loss_of(model, *mine, labels_of_all=labels_of_all, expert_ids=given)
        (loss * (world() if shared else 1) + aux_loss).backward()
    loss, aux_loss = loss.detach().clone(), aux_loss.detach().clone()
    if shared:
        aux_loss /= world()
        for total in (loss, aux_loss):
            dist.all_reduce(total)
    gradients = {n: whole(p.grad) if shared else p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Result(loss, aux_loss, gradients, torch.empty(0))


def gradients_of_one(model: nn.Module, expert_ids: Tensor | None = None) -> dict[str, Tensor]:
    """By one process."""
    return backward(model, shared=False, expert_ids=expert_ids).gradients


def to_one_rank(model: nn.Module) -> Tensor:
    """(L, B of all ranks, S, K): the first K experts for every token."""
    ids, _ = batch(sequences_of(model))
    layers = 2 if isinstance(model, Net) else len(list(integration.experts_modules(model)))
    k = K if isinstance(model, Net) else model.config.num_experts_per_tok
    return torch.arange(k, device=device_of_rank()).expand(layers, *torch.cat(ids).shape, k)


def assert_as_one_process(
    make: Make, mesh: DeviceMesh, dtypes: tuple[torch.dtype, ...] = DTYPES, **options: Any
) -> None:
    """Experts by score; then all tokens to experts of one rank."""
    for dtype in dtypes:
        limit = LIMIT_64 if dtype == torch.float64 else LIMIT_32
        for to_one in (False, True):
            one, many = make(dtype), make(dtype)
            share(many, mesh, **options)
            expert_ids = to_one_rank(one) if to_one else None
            want = backward(one, shared=False, expert_ids=expert_ids)
            got = backward(many, shared=True, expert_ids=expert_ids)
            of_one = partial(gradients_of_one, expert_ids=expert_ids)
            assert_same(got, want, limit, partial(limits_of, make, of_one, dtype))


def check_any_module() -> None:
    for mesh in (ep_and_fsdp(), ep_alone()):
        assert_as_one_process(make_net, mesh)
    assert_as_one_process(make_net_with_a_block, ep_alone())
    net = make_net(torch.float32)
    expert_parallel(net, ep_alone(), keep_received=True, max_tokens=5000)
    transports = net.first.experts.dispatcher.transports
    assert (transports.keep_received, transports.max_tokens) == (True, 5000)


def check_meshes_of_three_dimensions_and_of_another_order() -> None:
    assert_as_one_process(make_net, mesh_of(2, world() // 2, 1, names=("expert", "replicate", "fsdp")))
    assert_as_one_process(make_net, mesh_of(world() // 2, 2, names=("dp", "ep")), dim="ep")


def make_net_with_h_in_fp8(dtype: torch.dtype, save: str = "fp8") -> Net:
    """Of this seed some h lie so near the middle of two e4m3 numbers that the order of a sum decides which it is."""
    torch.manual_seed(2)
    wide = partial(replace, intermediate_size=128, save=save)
    return Net(MoE(wide(OTHER)), wide(CFG)).to(device_of_rank(), dtype)


def codes(kept: Operand) -> Tensor:
    """Of e4m3, those of neighbours being neighbours."""
    return kept.data.view(torch.uint8)


@contextmanager
def quantized_as(take: Callable[[RoutingPlan, Tensor, Operand], None]) -> Iterator[None]:
    """``take`` is given each h that is quantised in the block, its plan and its e4m3, which it may change."""
    plans: list[RoutingPlan] = []

    def planned(real: Callable[..., Any]) -> Callable[..., Any]:
        def up_proj_act(self: Backend, x: Tensor, w1: Any, b1: Any, plan: RoutingPlan, spec: Any) -> Any:
            plans.append(plan)
            return real(self, x, w1, b1, plan, spec)

        return up_proj_act

    def rounded(real: Callable[..., Any]) -> Callable[..., Any]:
        def quantize_h(self: Backend, h: Tensor) -> Operand:
            kept: Operand = real(self, h)
            take(plans[-1], h, kept)
            return kept

        return quantize_h

    with pytest.MonkeyPatch.context() as patch:
        for backend in (Backend, TorchBackend, TritonBackend):
            for name, around in (("up_proj_act", planned), ("quantize_h", rounded)):
                if name in vars(backend):
                    patch.setattr(backend, name, around(getattr(backend, name)))
        yield


def check_h_in_fp8() -> None:
    """Of one process whose h are rounded as those of the job are: the two differ by a tie at most.

    What rounding in fp32 does is asked of the net that keeps h as it is: fp64 is not quantised.
    """
    mesh, plain = ep_and_fsdp(), partial(make_net_with_h_in_fp8, save="full")
    for to_one in (False, True):
        one, many = (make_net_with_h_in_fp8(torch.float32) for _ in range(2))
        share(many, mesh)
        expert_ids = to_one_rank(one) if to_one else None
        here: list[list[tuple[Tensor, ...]]] = []  # of each layer and expert of this process

        def keep(plan: RoutingPlan, h: Tensor, kept: Operand, here: Any = here) -> None:
            sizes = plan.row_start_of_expert.diff().tolist()
            parts = [each[: sum(sizes)].cpu().split(sizes) for each in (h, codes(kept), kept.scale)]
            here.append([*zip(*parts, strict=True)])

        with quantized_as(keep):
            got = backward(many, shared=True, expert_ids=expert_ids)
        ranks: list[Any] = [None] * world()
        dist.all_gather_object(ranks, here)
        layers = iter(range(len(here)))

        def round_alike(plan: RoutingPlan, h: Tensor, kept: Operand, ranks: Any = ranks, layers: Any = layers) -> None:
            """Its rows are those of each expert in the order of the ranks, of which every second has that expert."""
            layer = next(layers)
            parts = [part for first in (0, 1) for part in zip(*(of[layer] for of in ranks[first::2]), strict=True)]
            theirs, data, scale = (
                torch.cat([rows[i] for part in parts for rows in part]).to(h.device) for i in range(3)
            )
            rows = len(theirs)
            assert error(h[:rows], theirs) < LIMIT_32
            assert (codes(kept)[:rows].int() - data.int()).abs().max() <= 1
            codes(kept)[:rows], kept.scale[:rows] = data, scale

        with quantized_as(round_alike):
            want = backward(one, shared=False, expert_ids=expert_ids)
        of_one = partial(gradients_of_one, expert_ids=expert_ids)
        assert_same(got, want, LIMIT_32, partial(limits_of, plain, of_one, torch.float32))


def make_net_with_adapters(dtype: torch.dtype) -> Net:
    return with_adapters(make_net(dtype))


def make_net_in_4_bit(dtype: torch.dtype) -> Net:
    """Experts in doubly quantised NF4, whose blocks are 64 wide."""
    torch.manual_seed(0)
    wide = partial(replace, hidden_size=64, intermediate_size=128, initializer_range=0.1)
    return with_adapters(Net(MoE(wide(OTHER)), wide(CFG)), storage="nf4_double").to(device_of_rank(), dtype)


def with_adapters(net: Net, **options: Any) -> Net:
    redraw(add_lora(net, 3, 6.0, **options), 0.1, seed=5)
    return net


def check_adapters() -> None:
    assert_as_one_process(make_net_with_adapters, ep_and_fsdp())
    assert_as_one_process(make_net_in_4_bit, ep_and_fsdp())


def check_transformers() -> None:
    integration.unregister()
    tables = dict(ALL_EXPERTS_FUNCTIONS)
    mesh = ep_and_fsdp()
    for family in ("qwen3_moe", "gpt_oss", "mixtral", "olmoe"):
        assert_as_one_process(partial(make_theirs, family), mesh)
    # DeepSeek-V3's router computes in fp32, whatever the model's dtype is.
    assert_as_one_process(partial(make_theirs, "deepseek_v3"), mesh, (torch.float32,))
    assert_as_one_process(partial(make_theirs, "qwen3_moe"), ep_alone())
    integration.unregister()
    assert dict(ALL_EXPERTS_FUNCTIONS) == tables


def check_activation_checkpointing() -> None:
    """A repeated forward, exchanges and all, changes no bit; FSDP gathers the experts for it again."""
    for make in (make_net, partial(make_theirs, "qwen3_moe")):
        plain, repeating = make(torch.float32), make(torch.float32)
        if isinstance(repeating, Net):
            repeating.repeats = True
        else:
            repeating.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for expert_ids in (None, to_one_rank(plain)):
            results = []
            for model in (plain, repeating):
                if not isinstance(model, FSDPModule):
                    share(model, ep_and_fsdp())
                model.zero_grad()
                results.append(backward(model, shared=True, expert_ids=expert_ids))
            want, got = results
            assert_within({name: (error(got.gradients[name], g), 0.0) for name, g in want.gradients.items()})


def check_compiled() -> None:
    for dtype, limit in zip(DTYPES, (LIMIT_64, LIMIT_32), strict=True):
        one, many = make_net(dtype), make_net(dtype)
        many.first.compile(backend="eager")
        share(many, ep_and_fsdp())
        limits = partial(limits_of, make_net, gradients_of_one, dtype)
        assert_same(backward(many, shared=True), backward(one, shared=False), limit, limits)


def check_mixed_precision() -> None:
    """FSDP casts the experts' weights and not their scores."""
    net = make_net(torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    expert_parallel(net, ep_and_fsdp(), mp_policy=policy)
    for layer in layers_of(net):
        fully_shard(layer, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    seen: list[torch.dtype] = []

    def look(experts: nn.Module, given: tuple[Any, ...]) -> None:
        seen.extend([given[0].dtype, given[2].dtype, experts.get_parameter("w1").dtype])

    net.first.experts.register_forward_pre_hook(look)
    backward(net, shared=True)
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in net.parameters())


def trained(make: Make, mesh: DeviceMesh | None, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After one step, so that the optimiser has a state. ``seed``: other weights than another's."""
    model = make(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * seed)
    share(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    backward(model, shared=True)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    weights, moments = get_state_dict(model, optimizer)
    tensors = weights | {f"{n}.{kind}": t for n, of in moments["state"].items() for kind, t in of.items()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def check_checkpoints() -> None:
    """Written by EP x FSDP, read by EP, by FSDP and by one process, bit for bit, the optimiser's state too."""
    for make, name in ((make_net, "net"), (partial(make_theirs, "gpt_oss"), "gpt_oss")):
        folder = Path(os.environ[RUN]) / name
        source = trained(make, ep_and_fsdp(), 0)
        expected = whole_state(*source)
        weights, moments = get_state_dict(*source)
        save({"weights": weights, "moments": moments}, checkpoint_id=folder)
        for mesh in (ep_alone(), None):
            target = trained(make, mesh, 1)
            assert not any(torch.equal(whole(p), expected[name]) for name, p in target[0].named_parameters())
            weights, moments = get_state_dict(*target)
            load({"weights": weights, "moments": moments}, checkpoint_id=folder)
            set_state_dict(*target, model_state_dict=weights, optim_state_dict=moments)
            assert_equal(whole_state(*target), expected)
        alone = make(torch.float32).state_dict()
        load({"weights": alone}, checkpoint_id=folder, no_dist=True)
        assert_equal(dict(alone), {name: expected[name] for name in alone})


def check_from_meta() -> None:
    """Weights come from a checkpoint, and no process ever holds all of them."""
    folder, mesh = Path(os.environ[RUN]) / "meta", ep_and_fsdp()
    source = make_net(torch.float32)
    save({"weights": source.state_dict()}, checkpoint_id=folder)
    with torch.device("meta"):
        net = Net()
    share(net, mesh)
    net.to_empty(device=device_of_rank())
    weights = get_model_state_dict(net)
    load({"weights": weights}, checkpoint_id=folder)
    assert_equal({name: whole(p) for name, p in net.named_parameters()}, dict(source.named_parameters()))
    backward(net, shared=True)


def check_errors() -> None:
    net, mesh = make_net(torch.float32), ep_alone()
    ranks = world()
    odd = MoE(MoEConfig(D, 8, 2 * ranks + 1, K))
    grouped = make_theirs("qwen3_moe", torch.float32)
    grouped.set_experts_implementation("grouped_mm")
    theirs = make_theirs("qwen3_moe", torch.float32)
    theirs.model.layers[1].mlp.experts._is_expert_parallel = True
    adapted = make_theirs("gpt_oss", torch.float32)
    adapted = get_peft_model(adapted, LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj_bias"]))
    common, sharded, divided = (make_net(torch.float32) for _ in range(3))
    common.first.experts.scale = nn.Parameter(torch.ones(()))
    fully_shard(sharded)
    expert_parallel(divided, mesh)
    data_parallel = DistributedDataParallel(make_net(torch.float32))
    part = f"{ranks // 2} of the job's {ranks} processes; pass a mesh of all of them, with a second dimension"
    cases = [
        (nn.Linear(2, 2), mesh, {}, r"module \(Linear\) has no MoE layer to divide: .*fully_shard alone"),
        (None, mesh, {}, "module must be a torch.nn.Module, got NoneType"),
        (net, mesh_of(1, ranks, names=("a", "ep")), {}, r"mesh has no dimension 'expert' \(it has 'a', 'ep'\); .*dim="),
        (net, None, {}, "mesh must be a DeviceMesh, got NoneType; make one by init_device_mesh"),
        (net, init_device_mesh("cpu", (ranks,)), {}, r"mesh has no dimension 'expert' \(it has no names\); pass"),
        (net, mesh_of(1, 1, 1, ranks, names=("a", "b", "c", "expert")), {}, "mesh has 3 dimensions beside 'expert'"),
        (net, mesh_of(2, ranks // 2)["expert"], {}, f"mesh has only the dimension .* and {part}"),
        (net, mesh, {"gradient_divide_factor": 0}, "gradient_divide_factor must be .*, got 0"),
        (net, mesh, {"exchange": "post"}, "exchange"),
        (nn.Sequential(net, odd), mesh, {}, rf"num_experts \({2 * ranks + 1}\) must be divisible by the {ranks}"),
        (grouped, mesh, {}, r"Qwen3MoeExperts \(qwen3_moe\) computes its experts by 'grouped_mm', .*use\(model\)"),
        (theirs, mesh, {}, "divided by transformers' own expert parallelism; load it without distributed_config"),
        (adapted, mesh, {}, r"of PEFT \(base_model.model.model.layers.0.mlp.experts\) on something else .*; merge it"),
        (common, mesh, {}, r"experts \(first.experts\) that share the parameter scale, which cannot be divided"),
        (sharded, mesh, {}, r"sharded already \(first.experts\); call expert_parallel once, before fully_shard"),
        (data_parallel, mesh, {}, "wrapped by DistributedDataParallel already; call expert_parallel before you"),
        (nn.Sequential(data_parallel), mesh, {}, r"wrapped by DistributedDataParallel \(0\) already"),
        (divided, mesh, {}, r"sharded already \(first.experts\); call expert_parallel once, before fully_shard"),
    ]  # fmt: skip
    for module, over, options, message in cases:
        with raises_one_line(message):
            expert_parallel(module, over, **options)
    untouched = [*net.named_parameters(), *grouped.named_parameters(), *theirs.named_parameters()]
    assert not any(isinstance(parameter, DTensor) for _, parameter in untouched)
    expert_parallel(net, mesh_of(ranks, 1))
    assert not any(isinstance(parameter, DTensor) for parameter in net.parameters())


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
