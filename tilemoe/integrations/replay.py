"""Routing replay in transformers' models: record which experts a model chose, and have it choose them again.

T tokens · B sequences · S tokens each · L MoE layers · E experts · K experts per token

The model's own router runs. Where it takes the top K of E values, it gets the replayed experts and their values
instead, so it scores them as usual. Hooks are on the model's modules only inside a ``with`` block, and nothing of
transformers is changed. Any of its experts implementations works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tilemoe.integrations.transformers import experts_modules, layer_of, outermost
from tilemoe.routing.replay import RoutingRecord, check_replayed_ids
from tilemoe.routing.topk import checked_mask
from tilemoe.runtime.tensors import require_tensor
from tilemoe.runtime.tracing import is_in_backward


@contextmanager
def record_routing(model: nn.Module) -> Iterator[RoutingRecord]:
    """Inside the block every forward of ``model``, also by ``generate``, adds the ids of its experts to the record.

        with record_routing(model) as record:
            tokens = model.generate(prompt, max_new_tokens=N)
        expert_ids = record.expert_ids(B)  # (L, B, S, K), of tokens[:, :-1] with a key-value cache

    What activation checkpointing recomputes in a backward is not recorded again. All calls inside the block must have
    the same sequences in the same places, so beam search is not supported.

    ValueError: the model has no experts that transformers dispatches.

    Examples:
        >>> from tilemoe.integrations.replay import record_routing
        >>> from transformers import AutoModelForCausalLM, OlmoeConfig
        >>> config = OlmoeConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
        >>> model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
        >>> with record_routing(model) as record:
        ...     logits = model(input_ids=torch.randint(64, (3, 5))).logits
        >>> record.expert_ids(3).shape  # (L, B, S, K) int32
        torch.Size([2, 3, 5, 2])
    """
    record = RoutingRecord()

    def add(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not is_in_backward():
                record.add(name, _top_k_index(args, kwargs))

        return hook

    handles = [
        experts.register_forward_pre_hook(add(layer.name), with_kwargs=True)
        for layer in _layers(model)
        for experts in layer.experts
    ]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay_routing(model: nn.Module, expert_ids: Tensor, token_mask: Tensor | None = None) -> Iterator[None]:
    """Inside the block every forward of ``model`` uses these experts, with the scores that its routers give them.

        with replay_routing(model, expert_ids):
            loss = model(tokens[:, :-1], ...)
            loss.backward()

    expert_ids (L, B, S, K) or (L, T, K), int32 or int64, on the model's device. token_mask (B, S) or (T,): False or
    0 marks tokens whose ids are ignored; for these the router chooses by itself. Scores come from the full logits of
    the present weights, with gradients. transformers' models compute their balancing loss from the logits, with a top K
    of their own outside of the layers, so it counts that top K, not these experts.

    Run the backward inside the block, because activation checkpointing repeats the forward there. Each micro-batch has
    a block of its own, for forward and backward. torch.compile is not supported.

    ValueError: the model has no experts that transformers dispatches; the ids do not fit it, as for `tilemoe.route`; or
    a router takes the top K of E values more than once, or chooses other experts without taking it. (A router that
    looks experts up by token id, as in DeepSeek-V4's first layers, takes no top K, and finds the recorded ones again.)

    Examples:
        >>> from tilemoe.integrations.replay import replay_routing
        >>> from transformers import AutoModelForCausalLM, OlmoeConfig
        >>> config = OlmoeConfig(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
        >>> model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
        >>> tokens, expert_ids = torch.randint(64, (3, 5)), torch.rand(2, 3, 5, 4).topk(2).indices
        >>> with replay_routing(model, expert_ids):
        ...     model(input_ids=tokens, labels=tokens).loss.backward()
    """
    layers = _layers(model)
    if not isinstance(expert_ids, Tensor) or expert_ids.ndim not in (3, 4) or expert_ids.shape[0] != len(layers):
        found = tuple(expert_ids.shape) if isinstance(expert_ids, Tensor) else type(expert_ids).__name__
        raise ValueError(
            f"expert_ids must be (L, B, S, K) with the model's L = {len(layers)} MoE layers, got {found}; "
            "record.expert_ids(B) gives them so"
        )
    if token_mask is not None:
        require_tensor("token_mask", token_mask)
        shape = expert_ids.shape[1:-1]
        if token_mask.ndim == 1 or len(shape) == 1 or 1 in shape:  # 1: packed sequences
            token_mask, shape = token_mask.flatten(), torch.Size([shape.numel()])
        token_mask = checked_mask(token_mask, shape, expert_ids.device).flatten()
    replays, handles = [], []
    for layer, ids in zip(layers, expert_ids, strict=True):
        replays.append(replay := _Replay(layer, ids, token_mask))
        for module in layer.around_router:
            handles.append(module.register_forward_pre_hook(replay.begin))
            handles.append(module.register_forward_hook(replay.end, always_call=True))
        handles += [each.register_forward_pre_hook(replay.require, with_kwargs=True) for each in layer.experts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for replay in replays:  # code that was compiled before runs no hooks
        if not replay.is_used:
            raise ValueError(
                f"expert_ids were not taken by {replay.name}: run a forward of the model inside the block, without "
                "torch.compile"
            )


class _Layer(NamedTuple):
    """An MoE layer: its name, the experts modules that it calls, and the modules during whose forward its router runs.

    There is one of each, unless PEFT has copies of the layer; one copy runs.
    """

    name: str
    num_experts: int
    experts: list[nn.Module]
    around_router: list[nn.Module]


def _layers(model: nn.Module) -> list[_Layer]:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a model of transformers, got {type(model).__name__}")
    found: dict[str, _Layer] = {}
    for name, experts in experts_modules(model):
        called = outermost(name)
        block, wrapped = model.get_submodule(called.rpartition(".")[0]), model.get_submodule(called)
        num_experts = getattr(experts, "num_experts", None) or next(experts.parameters()).shape[0]
        layer = found.setdefault(layer_of(name), _Layer(layer_of(name), num_experts, [], []))
        if wrapped in layer.experts:  # added already, for another copy that it wraps
            continue
        layer.experts.append(wrapped)
        if hasattr(block, "gradient_checkpointing"):  # it checkpoints its forward alone: the recompute runs no hooks
            layer.around_router.extend(child for child in block.children() if child is not wrapped)
        else:
            layer.around_router.append(block)
    if not found or "" in found:
        raise ValueError(
            f"{type(model).__name__} has no MoE layers whose experts transformers dispatches; pass the whole model"
        )
    return list(found.values())


class _TopK(NamedTuple):
    """A top K of E values that a router took: the module whose forward took it, and its shape (..., K)."""

    module: nn.Module | None
    shape: torch.Size


class _Replay(TorchFunctionMode):
    """Active during a router's forward: a top K of E values returns the replayed indices instead.

    A mode applies to one thread, and a GPU's backward recomputes a forward in another, so each forward enters it anew.
    """

    def __init__(self, layer: _Layer, expert_ids: Tensor, token_mask: Tensor | None) -> None:
        super().__init__()
        self.name, self.is_used = layer.name, False
        self._shape, self._shape_of_x = expert_ids.shape[:-1], torch.Size([])
        self._ids, self._mask = expert_ids.flatten(0, -2), token_mask
        self._num_experts = layer.num_experts
        self._current: nn.Module | None = None
        self._taken: list[_TopK] = []  # since the experts last ran

    def begin(self, module: nn.Module, args: Any) -> None:
        self._current = module
        self._shape_of_x = args[0].shape[:-1] if args and isinstance(args[0], Tensor) else torch.Size([])
        self._taken = [taken for taken in self._taken if taken.module is not module]  # of a forward that ended early
        self.__enter__()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.__exit__(None, None, None)

    def require(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs before the experts. ValueError unless the router took the top K once, or chose these ids by itself."""
        chosen = _top_k_index(args, kwargs)
        self._check(chosen)
        given, found = self._shape, self._shape_of_x
        if len(given) == len(found) == 2 and given != found and 1 not in (given[0], found[0]):  # 1: packed sequences
            raise ValueError(
                f"expert_ids must be (L, B, S, K) with the batch's B, S = {tuple(found)}, not {tuple(given)}"
            )
        times, self._taken = len(self._taken), []
        are_replayed = times == 0 and torch.equal(chosen, self._where_replayed(chosen))
        if times != 1 and not are_replayed:  # a table of token ids takes no top K
            raise ValueError(
                f"expert_ids cannot be replayed by {self.name}: its router took the top {chosen.shape[-1]} of "
                f"{self._num_experts} values {times} times, not once; replay another model, or tilemoe.MoE"
            )
        self.is_used = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk):
            return out
        values = args[0] if args else kwargs["input"]
        if values.shape[-1] != self._num_experts or out.indices.shape[-1] != self._ids.shape[-1]:
            return out  # not the router's K of E values for each token
        # An earlier (..., 1, K) scored the only group by its best experts. That group is chosen whatever its score.
        of_one_group = torch.Size([*out.indices.shape[:-1], 1, out.indices.shape[-1]])
        self._taken = [taken for taken in self._taken if taken.shape != of_one_group]
        self._taken.append(_TopK(self._current, out.indices.shape))
        self._check(out.indices)
        ids = self._where_replayed(out.indices)
        return torch.return_types.topk((values.gather(-1, ids), ids))

    def _where_replayed(self, chosen: Tensor) -> Tensor:
        """The replayed ids, but the ``chosen`` ones for tokens that the mask excludes."""
        ids = self._ids.to(chosen.dtype).view(chosen.shape)
        return ids if self._mask is None else torch.where(self._mask.view(*ids.shape[:-1], 1), ids, chosen)

    def _check(self, chosen: Tensor) -> None:
        rows, k = chosen.shape[:-1].numel(), chosen.shape[-1]
        check_replayed_ids(self._ids, (rows, k), self._num_experts, chosen.device, self._mask)


def _top_k_index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The argument top_k_index (T, K) of an experts module."""
    return args[1] if len(args) > 1 else kwargs["top_k_index"]
