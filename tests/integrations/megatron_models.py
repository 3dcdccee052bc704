"""Tiny models of Megatron Core on a CPU, which it takes for a GPU here, with its experts and with tilemoe's."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import megatron_step
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tilemoe.integrations.megatron import tilemoe_spec
from tilemoe.testing import relative_error

E, K, D, N, VOCAB, LENGTH = 6, 2, 32, 16, 64, 16


class _CUDAIsCPU(TorchFunctionMode):
    """Megatron makes some tensors on "cuda" by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return args[0] if func is Tensor.cuda else func(*args, **kwargs)


def _all_to_all_single(output: Tensor, input: Tensor, **kwargs: Any) -> Any:
    """With sizes as sequences, as which they come from a GPU."""
    kwargs |= {name: sizes.tolist() for name, sizes in kwargs.items() if isinstance(sizes, Tensor)}
    return _EXCHANGE(output, input, **kwargs)


def _all_gather(outputs: list[Tensor], input: Tensor, group: Any = None, **kwargs: Any) -> Any:
    """Also of unequal sizes, as NCCL has it and gloo has not."""
    if len({output.shape for output in outputs}) == 1:
        return _GATHER(outputs, input, group=group, **kwargs)
    for rank, output in enumerate(outputs):
        if dist.get_rank(group) == rank:
            output.copy_(input)
        dist.broadcast(output, group=group, group_src=rank)
    return None


def _reduce_scatter(output: Tensor, inputs: list[Tensor], group: Any = None) -> None:
    for rank, each in enumerate(inputs):
        total = each.contiguous().clone()
        dist.all_reduce(total, group=group)
        if dist.get_rank(group) == rank:
            output.copy_(total)


_EXCHANGE, _GATHER = dist.all_to_all_single, dist.all_gather


@contextmanager
def megatron_on_cpu(**parallel: int) -> Iterator[None]:
    """Megatron's groups of the processes of this job, with a CPU's random numbers where it draws a GPU's."""
    state, put = (lambda *_, **__: torch.get_rng_state()), (lambda state, *_, **__: torch.set_rng_state(state))
    with ExitStack() as stack:
        for module, name, function in (
            (torch.cuda, "current_device", lambda: "cpu"),
            (torch.cuda, "manual_seed", torch.manual_seed),
            (torch.cuda, "get_rng_state", state),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "reset_peak_memory_stats", lambda *_: None),
            (torch.cuda, "current_stream", mock.MagicMock()),
            (torch.cuda, "Stream", mock.MagicMock()),
            (torch.cuda, "stream", nullcontext),
            (dist, "all_to_all_single", _all_to_all_single),
            (dist, "all_gather", _all_gather),
            (dist, "reduce_scatter", _reduce_scatter),
            (megatron_random, "_get_cuda_rng_state", state),
            (megatron_random, "_set_cuda_rng_state", put),
        ):
            stack.enter_context(mock.patch.object(module, name, function))
        stack.enter_context(_CUDAIsCPU())
        parallel_state.initialize_model_parallel(**parallel)
        stack.callback(parallel_state.destroy_model_parallel)
        megatron_random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield


def config(**changes: Any) -> TransformerConfig:
    """Two layers as Qwen3-MoE's, in fp32."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": D,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": N,
        "num_moe_experts": E,
        "moe_router_topk": K,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": False,  # else processes with other experts would draw the same
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**settings | changes)


def spec(cfg: TransformerConfig, vp_stage: int | None = None) -> Any:
    layers = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    return megatron_step.with_norms(layers) if cfg.sequence_parallel else layers


def gpt(cfg: TransformerConfig, layers: Any, **stage: Any) -> GPTModel:
    """A GPT of these layers, or a stage of its pipeline, whose weights depend on the configuration alone."""
    megatron_random.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(0)
    return GPTModel(cfg, layers, vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope", **stage)


def tokens(seed: int) -> Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def losses_of(model: Any, ids: Tensor) -> Tensor:
    """(B, S), or what a stage hands to the next."""
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    found: Tensor = model(ids, torch.arange(LENGTH).expand(ids.shape), mask, labels=ids.roll(-1, 1))
    return found


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return losses_of(model, ids).mean()


def models(**changes: Any) -> tuple[nn.Module, nn.Module]:
    """Megatron's own model and the one with tilemoe's experts, of equal weights."""
    if changes.get("bf16"):
        changes["params_dtype"] = torch.bfloat16
    if changes.get("moe_pad_expert_input_to_capacity"):
        changes["moe_token_dispatcher_type"] = "alltoall"
    cfg = config(**changes)
    return gpt(cfg, spec(cfg)), gpt(cfg, tilemoe_spec(spec(cfg)))


def layer_of(model: Any) -> Any:
    """The first mixture-of-experts layer."""
    return model.decoder.layers[0].mlp


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient under the names of Megatron's experts, zero where an expert had no token."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if ours := re.fullmatch(r"(.*)([wb])([12])", name):
            before, kind, number = ours.groups()
            linear = f"linear_fc{number}." + {"w": "weight", "b": "bias"}[kind]
            experts = model.get_parameter(f"{before}w1").shape[0]
            each = gradient.unflatten(0, (experts, -1)).squeeze(1)
            found |= {f"{before}local_experts.{i}.{linear}": each[i] for i in range(experts)}
        else:
            found[name] = gradient
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 1e-6) -> None:
    """Relative errors below ``limit``."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(found[name].detach(), value.detach().double()) < limit, name


def assert_same_step(stock: nn.Module, ours: nn.Module, ids: Any) -> None:
    """The same loss of these tokens, and gradients, which are left."""
    losses = [loss_of(model, ids) for model in (stock, ours)]
    for loss in losses:
        loss.backward()
    assert_same({"loss": losses[1]}, {"loss": losses[0]})
    assert_same(gradients(ours), gradients(stock), 3e-6)


def shards_of(model: Any) -> set[tuple[Any, ...]]:
    """Key, shape, place and copy of everything that a distributed checkpoint of the model has."""
    state = model.sharded_state_dict()
    apply_factories(state)
    found: set[tuple[Any, ...]] = set()
    left = list(state.values())
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        else:
            found.add((each.key, each.global_shape, each.global_offset, each.replica_id))
    return found


class Training:
    """Megatron's data parallelism and optimiser over a model, whose dtype they take."""

    def __init__(self, model: Any, main_grad: torch.dtype = torch.float32, distributed: bool = False) -> None:
        cfg, self.model = model.config, model
        options = {"use_distributed_optimizer": distributed, "overlap_grad_reduce": distributed}
        reduce = DistributedDataParallelConfig(grad_reduce_in_fp32=main_grad == torch.float32, **options)
        self.wrapped = DistributedDataParallel(cfg, reduce, Float16Module(cfg, model) if cfg.bf16 else model)
        settings = {"bf16": cfg.bf16, "params_dtype": cfg.params_dtype, "use_distributed_optimizer": distributed}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, **settings), [self.wrapped])
        self.losses: list[float] = []
        self.norms: list[float] = []

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """What a distributed checkpoint is written from, or read into."""
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
        }
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(self.model.sharded_state_dict(), is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def go_on(self, steps: int) -> None:
        """Steps of two micro-batches, of eight in turn."""
        first = 1000 * parallel_state.get_data_parallel_rank()
        for _ in range(steps):
            self.wrapped.zero_grad_buffer()
            self.optimizer.zero_grad()
            # Both forwards come first, as in a pipeline.
            losses = [loss_of(self.wrapped, tokens(first + (len(self.losses) + i) % 8)) for i in range(2)]
            for loss in losses:
                (loss / 2).backward()
                self.losses.append(loss.item())
            finalize_model_grads([self.wrapped])
            self.norms.append(float(self.optimizer.step()[1]))
