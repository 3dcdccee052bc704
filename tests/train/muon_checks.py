"""What jobs of two and of four processes check of Muon; `test_train_distributed_checkpoint` runs it.

E experts · m, n rows and columns of a matrix
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from distributed_checkpoint_checks import EXACT, KINDS, whole_state
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilemoe.config import ModelConfig, ParallelConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.parallel.gradients import clip_gradients
from tilemoe.parallel.mesh import build_meshes
from tilemoe.parallel.model import parallelize
from tilemoe.train.checkpoints.sharded_state import copy_part
from tilemoe.train.optim import make_optimizer

MODEL, MUON = KINDS["muon"]
MOE: Any = MODEL.moe
EP_FSDP = replace(EXACT, expert=2)
HSDP = replace(EXACT, replicate=2)


def with_experts(count: int) -> ModelConfig:
    return replace(MODEL, moe=replace(MOE, num_experts=count))


def make(config: ParallelConfig | None, model: ModelConfig = MODEL, **options: Any) -> Any:
    """A model and its optimiser, shared as ``config`` says, None: whole."""
    generator = torch.Generator().manual_seed(0)
    many = DecoderLM(model, device="meta" if config else "cpu", **options)
    if config is None:
        many.reset_parameters(generator)
    else:
        parallelize(many, build_meshes(config, model, "cpu"), device="cpu", generator=generator)
    return many, make_optimizer(many, MUON)


def gradients(model: nn.Module, number: int) -> Iterator[Tensor]:
    """Whole ones, the same in every process."""
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        yield torch.randn(parameter.shape, generator=generator)


def assert_near(got: Any, want: Any, limit: float) -> None:
    """Weights and states, each by its norm."""
    expected = whole_state(want)
    for name, tensor in whole_state(got).items():
        assert (tensor - expected[name]).norm() <= limit * expected[name].norm(), name


class Gathers(TorchDispatchMode):
    """Shapes and dtypes of what processes gather."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather" in func.name() or "reduce" in func.name() or "all_to_all" in func.name():
            self.seen.append((tuple(args[0].shape), args[0].dtype))
        return func(*args, **(kwargs or {}))


def check_given_gradients_move_weights_as_in_one_process() -> None:
    """However matrices are divided, up to fp32's rounding; experts' are sent only where their rows are divided.

    Gloo gathers what NCCL sends all to all, padded to as many as there are processes.
    """
    matrices_of: dict[ParallelConfig, Counter[tuple[int, ...]]] = {}
    for config, experts, sent in (
        (EXACT, 8, []),
        (EXACT, 6, [(8, 8, 16), (8, 4, 16), (2, 32, 16), (2, 16, 16)]),  # a fourth of the rows, then two whole experts
        (HSDP, 8, []),
        (EP_FSDP, 8, []),
        (EP_FSDP, 6, [(3, 16, 16), (3, 8, 16)]),  # half the rows of this process' three experts
    ):
        many, optimizer = make(config, with_experts(experts))
        one, reference = make(None, with_experts(experts))
        for number in range(3):
            for parameter, got, gradient in zip(
                one.parameters(), many.parameters(), gradients(one, number), strict=True
            ):
                parameter.grad, got.grad = gradient, torch.zeros_like(got)
                copy_part(got.grad, gradient.__getitem__)
            reference.step()
            with Gathers() as gathers:
                optimizer.step()
            assert all(dtype == torch.bfloat16 for _, dtype in gathers.seen)
            shapes = [shape for shape, _ in gathers.seen]
            # Nine of six rows, q, k and v of all layers: two rows of each, then three or five whole, in padded rows.
            assert (
                {(10, 3, 16), (5, 6, 16)} < set(shapes) if config is HSDP else {(12, 2, 16), (3, 8, 16)} < set(shapes)
            )
            matrices = matrices_of.setdefault(config, Counter(shapes))
            assert Counter(shapes) - matrices == Counter(2 * sent), shapes  # two MoE layers
            # Of one shape, there and back: q, k and v; o; dense w1; dense w2; shared w1; shared w2.
            assert matrices.total() == 2 * 6, shapes
        assert_near((many, optimizer), (one, reference), 1e-6)


def check_gate_and_up_are_two_matrices_wherever_shards_cut() -> None:
    """As torch.optim.Muon moves each: experts divided by rows, whole and by expert parallelism, and the shared expert,
    whose ten rows are divided as 3, 3, 3, 1.
    """
    for gate_up in ("concatenated", "interleaved"):
        for config, experts in ((EXACT, 6), (EXACT, 8), (EP_FSDP, 6)):
            moe = replace(MOE, num_experts=experts, intermediate_size=10, shared_intermediate_size=5, gate_up=gate_up)
            training = make(config, replace(MODEL, moe=moe))
            before = whole_state(training)
            for parameter, gradient in zip(training[0].parameters(), gradients(training[0], 1), strict=True):
                parameter.grad = torch.zeros_like(parameter)
                copy_part(parameter.grad, gradient.__getitem__)
            training[1].step()
            after, names = whole_state(training), [name for name, _ in training[0].named_parameters()]
            gradient_of = dict(zip(names, gradients(training[0], 1), strict=True))
            for name in ("blocks.1.mlp.experts.w1", "blocks.1.mlp.shared.w1"):
                half = before[name].shape[-2] // 2
                for rows in (slice(0, None, 2), slice(1, None, 2)) if gate_up == "interleaved" else (
                    slice(half), slice(half, None)
                ):  # fmt: skip
                    olds, news, grads = (
                        tensors[name][..., rows, :].reshape(-1, half, 16) for tensors in (before, after, gradient_of)
                    )
                    for old, new, grad in zip(olds, news, grads, strict=True):
                        alone = nn.Parameter(old.clone())
                        alone.grad = grad.clone()
                        settings = {"lr": MUON.lr, "weight_decay": MUON.weight_decay}
                        torch.optim.Muon([alone], **settings, adjust_lr_fn="match_rms_adamw").step()
                        want = alone.detach() - old
                        assert (new - old - want).norm() <= 2.0**-8 * want.norm(), (gate_up, config, name)


def check_training_is_that_of_one_process() -> None:
    """Three steps in fp64 with clipping, whose gradients differ in the last bits."""
    many, optimizer = make(EP_FSDP, dtype=torch.float64)
    one, reference = make(None, dtype=torch.float64)
    ids = torch.randint(32, (dist.get_world_size(), 2, 9), generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        for model, its, mine, share in (
            (one, reference, ids.flatten(0, 1), 1),
            (many, optimizer, ids[dist.get_rank()], dist.get_world_size()),
        ):
            out = model(mine[:, :-1], mine[:, 1:])
            (out.loss / share).backward()
            clip_gradients(model.parameters(), 0.5)
            its.step()
            its.zero_grad()
    assert_near((many, optimizer), (one, reference), 2.0**-8)


ON_TWO = (check_training_is_that_of_one_process,)
ON_FOUR = (
    check_given_gradients_move_weights_as_in_one_process,
    check_gate_and_up_are_two_matrices_wherever_shards_cut,
    check_training_is_that_of_one_process,
)
