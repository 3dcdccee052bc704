"""transformers' experts in 4 bit, with adapters of PEFT, shared by two processes."""

from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import VOCAB
from ranks import named
from test_hf_quantized import adapted, wide
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tilemoe.integrations import transformers as integration
from tilemoe.integrations.quantized import quantize_experts
from tilemoe.integrations.quantized_weight import FrozenWeight, quantized_weights
from tilemoe.ops.lora import moe_lora
from tilemoe.parallel import expert_parallel
from tilemoe.testing import assert_equal

pytestmark = pytest.mark.dist
RANKS = 2


def model_of(family: str, storage: str = "nf4") -> Any:
    model = wide(family).train()
    quantize_experts(model, storage)
    return adapted(model, target_modules=["q_proj"])


def shard(model: Any, policy: MixedPrecisionPolicy) -> list[DTensor]:
    """The shards of the experts' weights, after a check that each has its share of the bits."""
    whole = {n: p.tensors() for n, p in model.named_parameters() if isinstance(p, FrozenWeight)}
    base = model.get_base_model()
    for layer in base.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(base, mp_policy=policy)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: list[DTensor] = []
    for name, tensors in whole.items():
        parameter: Any = model.get_parameter(name)
        assert isinstance(parameter, DTensor)
        for own, all_ in zip(parameter.to_local().tensors(), tensors, strict=True):
            assert torch.equal(own, all_.chunk(ranks)[rank])
        found.append(parameter)
    assert len(found) == 4
    return found


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _check_fsdp(family: str, storage: str) -> None:
    """Gradients of two steps are one process' of all sequences; the 4 bit weights stay, and are gathered whole."""
    ids = torch.randint(3, VOCAB, (2 * dist.get_world_size(), 9), generator=torch.Generator().manual_seed(0))
    alone, model = model_of(family, storage), model_of(family, storage)
    shards = shard(model, MixedPrecisionPolicy())
    bits = [t.clone() for parameter in shards for t in parameter.to_local().tensors()]
    for _ in range(2):
        loss_of(alone, ids).backward()
        loss_of(model, ids.chunk(dist.get_world_size())[dist.get_rank()]).backward()
    want = {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}
    assert sum(".experts." in name for name in want) == 8
    for name, grad in want.items():
        found: Any = model.get_parameter(name).grad
        torch.testing.assert_close(found.full_tensor(), grad, rtol=1e-4, atol=1e-6)
    for own, before in zip((t for each in shards for t in each.to_local().tensors()), bits, strict=True):
        assert torch.equal(own, before)
    for (_, _, want), each in zip(quantized_weights(alone), shards, strict=True):
        assert_equal(each.full_tensor().tensors(), want.tensors())


def check_mixed_precision_casts_no_scale() -> None:
    """Under a policy of bf16 the experts compute in bf16 with codes and scales as they were."""
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    alone, model = model_of("qwen3_moe"), model_of("qwen3_moe")
    shard(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    met: list[Tensor] = []

    def watched(x: Tensor, w1: Any, w2: Any, *args: Any, **more: Any) -> Tensor:
        assert x.dtype == torch.bfloat16
        met.extend(tensor.clone() for weight in (w1, w2) for tensor in (weight.codes, weight.absmax))
        return moe_lora(x, w1, w2, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "moe_lora", watched)
        loss_of(model, ids)
    whole = [parameter for _, _, parameter in quantized_weights(alone)]
    want = [tensor for weight in whole for tensor in weight.tensors()]
    assert {tensor.dtype for tensor in met} == {torch.uint8, torch.float32}
    assert_equal(met, want)


def check_fsdp() -> None:
    _check_fsdp("qwen3_moe", "nf4_double")


def check_fsdp_of_transposed_weights() -> None:
    _check_fsdp("gpt_oss", "mxfp4")


def check_sharded_checkpoint() -> None:
    """What accelerate's SHARDED_STATE_DICT writes of FSDP2's shards, another model reads to the bit."""
    for storage, family in (("nf4_double", "qwen3_moe"), ("mxfp4", "gpt_oss")):
        model, other = model_of(family, storage), model_of(family, storage)
        shards, read = (shard(each, MixedPrecisionPolicy()) for each in (model, other))
        for tensor in (tensor for each in read for tensor in each.to_local().tensors()):
            tensor.zero_()
        with TemporaryDirectory() as folder:
            dist.broadcast_object_list(folders := [folder], 0)
            checkpoint.save(get_model_state_dict(model), checkpoint_id=folders[0])
            state = get_model_state_dict(other)
            checkpoint.load(state, checkpoint_id=folders[0])
            dist.barrier()
        set_model_state_dict(other, state)
        for one, another in zip(shards, read, strict=True):
            assert_equal(one.to_local().tensors(), another.to_local().tensors())


def check_expert_parallel() -> None:
    """Each process has its own experts' bits, and the adapters' gradients are one process' of all sequences."""
    ids = torch.randint(3, VOCAB, (2 * dist.get_world_size(), 9), generator=torch.Generator().manual_seed(0))
    alone, model = model_of("qwen3_moe"), model_of("qwen3_moe")
    expert_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",)))
    divided = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    assert [type(each.to_local()) for each in divided] == [FrozenWeight] * 4
    loss_of(alone, ids).backward()
    loss_of(model, ids.chunk(dist.get_world_size())[dist.get_rank()]).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum(".experts." in name for name in grads) == 8
    for name, grad in grads.items():
        assert grad is not None
        dist.all_reduce(grad)
        want = alone.get_parameter(name).grad
        torch.testing.assert_close(grad / dist.get_world_size(), want, rtol=1e-4, atol=1e-6)


def check_ddp() -> None:
    """It averages the adapters' gradients and leaves the weights alone."""
    ids = torch.randint(3, VOCAB, (2 * dist.get_world_size(), 9), generator=torch.Generator().manual_seed(0))
    alone, model = model_of("qwen3_moe"), model_of("qwen3_moe")
    loss_of(alone, ids).backward()
    copies = DistributedDataParallel(model)
    loss_of(copies, ids.chunk(dist.get_world_size())[dist.get_rank()]).backward()
    for name, parameter in alone.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-6)


CHECKS = [
    check_ddp,
    check_expert_parallel,
    check_fsdp,
    check_fsdp_of_transposed_weights,
    check_mixed_precision_casts_no_scale,
    check_sharded_checkpoint,
]


@pytest.mark.parametrize("name", named(CHECKS, *CHECKS))
def test_on_two_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
