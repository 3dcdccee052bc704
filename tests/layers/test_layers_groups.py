"""Over which processes a layer's losses and its balancing count, and who must call it: three processes with gloo.

T tokens · d hidden_size · E experts · K experts per token
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import raises_one_line, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tilemoe import reference
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.layers.moe import MoE
from tilemoe.models.decoder import DecoderLM

RANKS, D, E, K = 3, 16, 6, 2
ROUTER = RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01, selection_bias=True)
CFG = MoEConfig(D, 8, E, K, router=ROUTER, initializer_range=0.3)
ALONE = dist.GroupMember.NON_GROUP_MEMBER


def make(group: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(CFG, dtype=torch.float64, group=group)


def tokens(rank: int) -> Tensor:
    """Another number on each rank."""
    return torch.randn(5 + 3 * rank, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def loss_of(ranks: list[int]) -> Tensor:
    """Of their tokens in one batch, by the reference."""
    logits = torch.cat([tokens(rank) for rank in ranks]) @ make(ALONE).router.weight.detach().T
    return reference.route(logits, CFG, selection_bias=torch.zeros(E)).aux_loss.float()


def assert_counts_over(ranks: list[int], layer: MoE) -> None:
    """On each of ``ranks``: the mean of their losses is the whole batch's, and their biases move together."""
    out = layer(tokens(dist.get_rank()))
    losses: list[Any] = [out.aux_loss.detach()]
    counts = out.tokens_per_expert.clone()
    if len(ranks) > 1:
        losses = [torch.zeros(()) for _ in ranks]
        dist.all_gather(losses, out.aux_loss.detach(), group=layer.group)
        dist.all_reduce(counts, group=layer.group)
    torch.testing.assert_close(torch.stack(losses).mean(), loss_of(ranks))
    layer.update_selection_bias(out.tokens_per_expert, 0.25)
    expected = 0.25 * torch.sign(counts.double().mean() - counts)
    assert layer.selection_bias is not None
    torch.testing.assert_close(layer.selection_bias, expected.float())


def check_a_rank_outside_the_group_counts_for_itself() -> None:
    layer = make(dist.new_group([0, 2]))
    assert (layer.group is ALONE) == (dist.get_rank() == 1)
    assert_counts_over([1] if dist.get_rank() == 1 else [0, 2], layer)


def check_no_group_needs_no_other_rank() -> None:
    """Nor does evaluation with the default, which all ranks share in training."""
    if dist.get_rank() == 1:
        layer = make(ALONE)
        assert_counts_over([1], layer)
        layer.selection_bias.zero_()
        layer.group = None
        torch.testing.assert_close(layer.eval()(tokens(1)).aux_loss, loss_of([1]))
    assert_counts_over([0, 1, 2], make(None))


def check_a_decoder_balances_over_its_layers_group() -> None:
    model = DecoderLM(tiny_model(moe=MoEConfig(16, 8, E, K, router=ROUTER)))
    group = dist.new_group([0, 1])
    for layer in model.modules():
        if isinstance(layer, MoE):
            layer.group = group
    counts = torch.tensor([[[9, 0, 3, 4, 4, 4]], [[0, 3, 3, 4, 1, 4]], [[0, 9, 0, 0, 0, 0]]]).expand(3, 2, E)
    if dist.get_rank() < 2:
        model.update_selection_bias(counts[dist.get_rank()], 0.5)
        total = counts[0] + counts[1]
        expected = 0.5 * torch.sign(total.double().mean(-1, keepdim=True) - total)
        biases = [layer.selection_bias for layer in model.modules() if isinstance(layer, MoE)]
        torch.testing.assert_close(torch.stack(biases), expected.float())
    dist.barrier()


def check_a_mesh_is_no_group() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    with raises_one_line(r"group must be None or .* got DeviceMesh; pass mesh.get_group\(\) for a DeviceMesh"):
        MoE(CFG, group=mesh)
    assert_counts_over([0, 1, 2], make(mesh.get_group()))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.dist
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_groups_of_three_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


def test_what_is_no_group_is_one_line() -> None:
    for group in ("world", 2, [0, 1]):
        with raises_one_line("group must be None or a torch.distributed process group, got"):
            MoE(CFG, group=group)


def test_without_torch_distributed_a_layer_counts_for_itself() -> None:
    for group in (None, ALONE):
        torch.testing.assert_close(make(group)(tokens(0)).aux_loss, loss_of([0]))
