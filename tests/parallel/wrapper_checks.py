"""What the processes of a job check of `expert_parallel` under DistributedDataParallel and PEFT, and of clipping.

E experts
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from expert_checks import (
    CFG,
    E,
    Make,
    Net,
    assert_as_one_process,
    ep_alone,
    ep_and_fsdp,
    make_net,
    make_net_with_a_block,
    make_theirs,
    mesh_of,
    share,
)
from helpers import assert_near, raises_one_line
from hf_models import VOCAB
from parallel_checks import whole, world
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from ranks import device_of_rank
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization

from tilemoe.integrations import transformers as integration
from tilemoe.integrations.replay import record_routing, replay_routing
from tilemoe.layers.moe import MoE
from tilemoe.parallel import clip_gradients, expert_parallel

INF = float("inf")
PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def backward(model: nn.Module, *, shared: bool, seed: int = 0) -> None:
    """Of two sequences of each process, by this one or by all."""
    ids = torch.randint(3, VOCAB, (2 * world(), 9), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(device_of_rank())
    if shared:
        ids = ids.chunk(world())[dist.get_rank()]
    out = model(ids)
    logits, aux_loss = out if isinstance(out, tuple) else (out.logits, 0.0)
    (nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + aux_loss).backward()


def gradients_of(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [whole(gradient) if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def check_data_parallel() -> None:
    """Experts are left alone, the rest is averaged: over accumulated micro-batches, and after buckets are rebuilt."""
    makes: list[Make] = [make_net, make_net_with_a_block, partial(make_theirs, "qwen3_moe")]
    for make in makes:
        for mesh in (ep_alone(), ep_and_fsdp()):
            one, many = make(torch.float32), make(torch.float32)
            expert_parallel(many, mesh)
            wrapped = DistributedDataParallel(many)
            for step in range(2):
                one.zero_grad()
                many.zero_grad()
                for micro_batch in range(2):
                    backward(one, shared=False, seed=2 * step + micro_batch)
                    backward(wrapped, shared=True, seed=2 * step + micro_batch)
                got, want = gradients_of(many), gradients_of(one)
                assert len(got) == len(want) == len(list(one.parameters()))
                assert_near(got, want, 1e-5)
    assert "aten.cat.default got mixed torch.Tensor and DTensor" in PAGE  # PyTorch 2.11 has a colon after default
    with pytest.raises(
        RuntimeError, match=r"aten.cat.default:? got mixed torch.Tensor and DTensor"
    ):  # it asks the module that it wraps what to leave alone
        DistributedDataParallel(nn.Sequential(many))


def make_saved(dtype: torch.dtype) -> Any:
    """PEFT keeps a copy of each layer's experts, which is trained."""
    model = make_theirs("qwen3_moe", dtype)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["experts"]))
    assert integration.use(model) == len(model.model.layers)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero, it would give lora_A no gradient
            nn.init.normal_(parameter, 0.0, 0.1)
    return model


def check_copies_of_experts() -> None:
    one, many = make_saved(torch.float32), make_saved(torch.float32)
    share(many, ep_and_fsdp())
    backward(one, shared=False)
    backward(many, shared=True)
    got, want = gradients_of(many), gradients_of(one)
    assert len(got) == len(want) == 4 * len(one.model.layers)
    assert_near(got, want, 1e-5)


def make_adapted(family: str, targets: list[str], dtype: torch.dtype) -> Any:
    """PEFT's adapters on the experts' weights."""
    model = make_theirs(family, dtype)
    get_peft_model(model, LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=targets))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero, it would give lora_A no gradient
            parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, 0.1, generator=generator))
    return model


def check_adapters_of_peft_on_experts() -> None:
    """Each whole in all processes, the weights as they lie and transposed; on and off."""
    both = ["experts.gate_up_proj", "experts.down_proj"]
    assert_as_one_process(partial(make_adapted, "qwen3_moe", both), ep_and_fsdp(), (torch.float32,))
    assert_as_one_process(partial(make_adapted, "gpt_oss", both[1:]), ep_alone(), (torch.float32,))
    one, many = (make_adapted("qwen3_moe", both, torch.float32) for _ in range(2))
    expert_parallel(many, ep_alone())
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = []
    for is_on in (True, False):
        for module in (*one.modules(), *many.modules()):
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(is_on)
        logits.append(one(input_ids=ids).logits)
        assert_near([many(input_ids=ids).logits], logits[-1:], 1e-6)
    assert not torch.allclose(*logits, atol=1e-3)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def make_parametrised(dtype: torch.dtype) -> Net:
    net = make_net(dtype)
    register_parametrization(net.first.experts, "w1", Halved())
    return net


def check_parametrised_and_tied_weights() -> None:
    assert_as_one_process(make_parametrised, ep_and_fsdp())
    tied = make_net_with_a_block(torch.float32)
    tied.second = MoE(CFG)
    tied.second.experts.w2 = tied.first.experts.w2
    with raises_one_line(r"experts \(second.experts\) that share the parameter w2, which cannot be divided; move it"):
        expert_parallel(tied, ep_alone())


def check_fsdp1() -> None:
    """`use` on a model whose weights lie flat between forwards, and replay in it; it cannot be divided any more."""
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0)).to(device_of_rank())
    for family in ("mixtral", "gpt_oss"):
        one = make_theirs(family, torch.float32)
        with record_routing(one) as record:
            one(input_ids=ids)
        replayed = (record.expert_ids(2).long() + 1) % E
        want = [one(input_ids=ids).logits]
        with replay_routing(one, replayed):
            want.append(one(input_ids=ids).logits)
        for keeps_parameters in (True, False):
            model = make_theirs(family, torch.float32)
            model.set_experts_implementation("eager")
            sharded = FullyShardedDataParallel(
                model,
                use_orig_params=keeps_parameters,
                auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
                device_id=device_of_rank(),
            )
            assert integration.use(sharded) == 2
            got = [sharded(input_ids=ids).logits]
            with replay_routing(sharded, replayed):
                got.append(sharded(input_ids=ids).logits)
            assert_near(got, want, 1e-5)
            with raises_one_line("wrapped by FullyShardedDataParallel already; call expert_parallel before you"):
                expert_parallel(sharded, ep_alone())


def two_of(rest: str) -> tuple[Net, Net]:
    """One process' net and one with divided experts, with the same gradients; ``rest``: what the others are."""
    one, many = make_net(torch.float32), make_net(torch.float32)
    if rest == "plain":
        expert_parallel(many, ep_and_fsdp())
        backward(DistributedDataParallel(many), shared=True)
    else:
        share(many, ep_and_fsdp())
        backward(many, shared=True)
    backward(one, shared=False)
    return one, many


def check_clipping() -> None:
    """Of plain tensors beside DTensors, and of two meshes, which PyTorch refuses: as it clips one process'."""
    refused = {
        "plain": "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling "
        "distributed operators!",
        "sharded": "All operands in aten.stack.default must have the same mesh, but got DeviceMesh",
    }
    for rest, message in refused.items():
        for norm_type in (2.0, 1.0, 3.0, INF):
            for foreach in (None, False):
                one, many = two_of(rest)
                want = nn.utils.clip_grad_norm_(one.parameters(), 0.05, norm_type)
                got = clip_gradients(many.parameters(), 0.05, norm_type, error_if_nonfinite=True, foreach=foreach)
                assert_near([got], [want], 1e-5)
                assert want > 0.05
                assert_near(gradients_of(many), gradients_of(one), 1e-5)
        one, many = two_of(rest)
        assert message in PAGE
        with pytest.raises(RuntimeError, match=re.escape(message)):
            nn.utils.clip_grad_norm_(many.parameters(), 0.05)
        want = nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        if device_of_rank().type == "cpu":
            assert_near([Accelerator(cpu=True).clip_grad_norm_(many.parameters(), 0.05)], [want], 1e-5)
            assert_near(gradients_of(many), gradients_of(one), 1e-5)


def norms_of_all(norm: Tensor) -> list[float]:
    norms = [torch.empty_like(norm) for _ in range(world())]
    dist.all_gather(norms, norm)
    return [each.item() for each in norms]


def check_clipping_of_gradients_that_differ() -> None:
    """A process without gradients, one without rows, NaN in one process, and a sum that is not added up yet."""
    device, mesh, rank = device_of_rank(), mesh_of(world(), names=("fsdp",)), dist.get_rank()
    rows = nn.Parameter(distribute_tensor(torch.zeros(world() - 1, 2, device=device), mesh, [Shard(0)]))
    plain = nn.Parameter(torch.zeros(2, device=device))
    norms: dict[float, float] = {2.0: 5.0, 1.0: 7.0, INF: 4.0}
    for norm_type, want in norms.items():
        rows.grad = plain.grad = None
        if rank == 0:
            full = torch.tensor([[3.0, -4.0]], device=device)
            rows.grad = DTensor.from_local(full, mesh, rows.placements, shape=rows.shape, stride=rows.stride())
        norms_of_ranks = norms_of_all(clip_gradients([plain, rows], 1.0, norm_type))
        assert norms_of_ranks == [want] * world(), (norm_type, norms_of_ranks)
    if rank == 0:
        rows.grad.to_local()[0, 0] = float("nan")
    for norm_type in norms:
        with pytest.raises(RuntimeError, match=r"the gradients' norm of order .*; error_if_nonfinite"):
            clip_gradients([plain, rows], 1.0, norm_type, error_if_nonfinite=True)
    copied = nn.Parameter(distribute_tensor(torch.zeros(2, device=device), mesh, [Replicate()]))
    part = torch.tensor([3.0, 4.0], device=device) / world()
    copied.grad = DTensor.from_local(part, mesh, [Partial()])
    norm = clip_gradients(copied, 1.0)
    assert_near([norm.cpu(), whole(copied.grad).cpu()], [torch.tensor(5.0), torch.tensor([0.6, 0.8])], 1e-5)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
