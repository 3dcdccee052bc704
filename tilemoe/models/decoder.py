"""A decoder language model, the architecture of Qwen3-MoE, OLMoE or Mixtral: pre-norm blocks of attention and an MLP.

B sequences · S tokens each · d model width · V vocabulary · E experts · K experts per token · L MoE layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple
from torch.utils.checkpoint import checkpoint

from tilemoe.activations import activation_spec
from tilemoe.checks import require_choice, require_type
from tilemoe.config import CHECKPOINTING_MODES, ModelConfig
from tilemoe.files import digest_of_sources
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.kernels.experts.registry import check_kernels
from tilemoe.kernels.lm.documents import Documents
from tilemoe.layers.attention import Attention, KVCache, LayerCache, rotary_angles, without_cudnn
from tilemoe.layers.mlp import MLP
from tilemoe.layers.moe import MoE
from tilemoe.layers.norm import RMSNorm
from tilemoe.models.loss import IGNORED, chunked_cross_entropy
from tilemoe.ops.moe import check_options
from tilemoe.routing.balance import update_selection_bias
from tilemoe.routing.replay import RoutingRecord
from tilemoe.routing.topk import aux_loss_of_layers, checked_mask, router_entropy
from tilemoe.runtime.operator import refuse_transforms
from tilemoe.runtime.random import normal_
from tilemoe.runtime.tensors import require_factory, require_tensor, require_tensors
from tilemoe.runtime.tracing import autocast_dtype, can_be_read


class LMOutput(NamedTuple):
    """What `DecoderLM` returns.

    Attributes:
        loss: scalar, mean cross-entropy in nats over labels that are neither -100 nor padding, without auxiliary
            losses; fp32, fp64 for an fp64 model; None without labels
        aux_loss: fp32 scalar over all layers, taken as ``config.moe.router.aux_loss_over`` says, coefficients applied;
            0 if there are no auxiliary losses, or if labels are given and ``config.moe.router.add_aux_loss`` is False
        logits: (B, S, V); None when labels were given
        tokens_per_expert: (L, E) int32, rows that each expert computes; (0, 0) for a dense model
        pairs_per_expert: (L, E) int32, (token, expert) pairs before token rounding
        router_entropy: (L,) fp32, see `tilemoe.routing.topk.router_entropy`; 0 in evaluation
    """

    loss: Tensor | None
    aux_loss: Tensor
    logits: Tensor | None
    tokens_per_expert: Tensor
    pairs_per_expert: Tensor
    router_entropy: Tensor


_register_namedtuple(LMOutput, serialized_type_name="tilemoe.LMOutput")  # as MoEOutput is


class BlockOutput(NamedTuple):
    """What a block returns; all but hidden are None for a dense block, and the entropy is None in evaluation.

    hidden (B, S, d) · aux_loss () fp32 · tokens_per_expert (E,), rows that are computed · pairs_per_expert (E,), pairs
    before rounding · router_entropy () fp32 · statistics (2E + 1,), see `MoEOutputOfModel` · expert_ids (B*S, K). The
    tuple is flat, because activation checkpointing does not look into nested ones.
    """

    hidden: Tensor
    aux_loss: Tensor | None
    tokens_per_expert: Tensor | None
    pairs_per_expert: Tensor | None
    router_entropy: Tensor | None
    statistics: Tensor | None
    expert_ids: Tensor | None


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))`` with a MoE or, in a dense layer, a swiglu MLP.

    ``checkpointing`` says what the backward recomputes, see `DecoderLM.set_checkpointing`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: str | None = None,
        kernels: str | Backend | None = None,
    ) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.norm_eps
        self.checkpointing = "none"
        self.compiled_by: str | None = None  # torch.compile's backend; None: not compiled
        self.attention_norm = RMSNorm(d, eps, device=device, dtype=dtype)
        self.attention = Attention(config, device=device, dtype=dtype)
        self.mlp_norm = RMSNorm(d, eps, device=device, dtype=dtype)
        self.mlp: MoE | MLP
        if config.moe is not None and config.is_moe_layer(layer):
            self.mlp = MoE(config.moe, device=device, dtype=dtype, recompute=recompute, kernels=kernels)
        else:
            n, spec = config.dense_intermediate_size, activation_spec("swiglu")
            self.mlp = MLP(d, n, spec, config.initializer_range, device=device, dtype=dtype)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.attention_norm.reset_parameters()
        self.attention.reset_parameters(generator)
        self.mlp_norm.reset_parameters()
        self.mlp.reset_parameters(generator)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: LayerCache | None = None,
        documents: Documents | None = None,
        expert_ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> BlockOutput:
        """A MoE block replays expert_ids (B, S, K), if given, and leaves out what token_mask (B, S) says is padding."""
        # torch.compile is applied inside checkpointing, and inside hooks such as FSDP's.
        run = Block.body if self.compiled_by is None else _compiled_body(self.compiled_by)
        if self.checkpointing == "block" and cache is None and torch.is_grad_enabled():
            return checkpoint(run, self, x, angles, None, documents, expert_ids, token_mask, use_reentrant=False)
        return run(self, x, angles, cache, documents, expert_ids, token_mask)

    def body(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        cache: LayerCache | None,
        documents: Documents | None,
        expert_ids: Tensor | None,
        token_mask: Tensor | None,
    ) -> BlockOutput:
        x = x + self._attend(self.attention_norm(x), angles, cache, documents)
        normed = self.mlp_norm(x)
        if not isinstance(self.mlp, MoE):
            return BlockOutput(x + self.mlp(normed), None, None, None, None, None, None)
        token_mask = None if token_mask is None else token_mask.flatten()
        out = self.mlp(normed, token_mask, expert_ids=expert_ids)
        entropy = None
        if self.training and out.router_logits is not None:
            entropy = router_entropy(out.router_logits, self.mlp.cfg.router, token_mask)
        routed = (out.tokens_per_expert, out.pairs_per_expert, entropy, getattr(out, "statistics", None))
        return BlockOutput(x + out.hidden, out.aux_loss, *routed, out.expert_ids)

    def _attend(
        self, x: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache | None, documents: Documents | None
    ) -> Tensor:
        if self.checkpointing == "attention" and cache is None and torch.is_grad_enabled():
            return checkpoint(self.attention, x, angles, None, documents, use_reentrant=False)
        return self.attention(x, angles, cache, documents)


# AOTAutograd does not cache graphs that call these, unless the option below allows it.
_CACHEABLE = (
    "torch.ops.higher_order.autograd_function_apply",
    "torch.amp.autocast_mode._enter_autocast",
    "torch.amp.autocast_mode._exit_autocast",
)


@lru_cache
def _compiled_body(backend: str) -> Callable[..., BlockOutput]:
    """`Block.body` under torch.compile, shared by all blocks: a block that held it could not be pickled."""
    if backend != "inductor":
        return torch.compile(Block.body, backend=backend)
    # The cache key covers the bodies and arguments of these calls, but not our operators' backwards. It also covers
    # the values of this table, so each value is a digest of our sources.
    cacheable = dict.fromkeys(_CACHEABLE, digest_of_sources(Path(__file__).parents[1]))
    options: dict[str, Any] = {"unsafe_marked_cacheable_functions": cacheable}
    return torch.compile(Block.body, options=options)


class DecoderLM(nn.Module):
    """The language model of a `ModelConfig`, kept as ``.config``; its blocks are ``.blocks``.

    Args:
        config: sizes, and which blocks have experts.
        device: of the parameters.
        dtype: of the parameters. Under autocast to bf16 the residual stream is bf16.
        recompute: passed to every MoE layer, see `tilemoe.MoE`.
        kernels: likewise.

    Raises:
        ValueError: an argument is invalid; the message names it.

    Examples:
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> model = tilemoe.DecoderLM(config)
        >>> tokens = torch.randint(64, (2, 9))
        >>> out = model(tokens[:, :-1], labels=tokens[:, 1:])
        >>> (out.loss + out.aux_loss).backward()
        >>> model(tokens).logits.shape
        torch.Size([2, 9, 64])
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: str | None = None,
        kernels: str | Backend | None = None,
    ) -> None:
        super().__init__()
        require_type("config", config, ModelConfig)
        require_factory(device, dtype, FLOAT_DTYPES)
        check_options("concatenated", recompute)
        if kernels is not None:
            check_kernels(kernels)
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(config, layer, device=device, dtype=dtype, recompute=recompute, kernels=kernels)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, device=device, dtype=dtype)
        self.head: nn.Linear | None = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype)
        self.reset_embeddings(None)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw every matrix from normal(0, initializer_range); norms become 1, biases 0.

        The weights depend on the generator's state alone (None: the CPU's default generator), not on the device or
        sharding (`tilemoe.runtime.random`).
        """
        self.reset_embeddings(generator)
        for block in self._blocks():
            block.reset_parameters(generator)
        self.norm.reset_parameters()

    def reset_embeddings(self, generator: torch.Generator | None) -> None:
        """Draw the embedding table, and the head if it is a matrix of its own; `reset_parameters` draws these first."""
        tables = [self.embed.weight] if self.head is None else [self.embed.weight, self.head.weight]
        for table in tables:
            normal_(table, self.config.initializer_range, generator)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Documents | None = None,
        expert_ids: Tensor | None = None,
        record: RoutingRecord | None = None,
        token_mask: Tensor | None = None,
    ) -> LMOutput:
        """input_ids (B, S) integers; labels (B, S), already shifted: labels[b, s] is the token after input_ids[b, s].

        cache: the tokens follow those that it holds, and are added to it; for inference alone, without labels.
        documents: each sequence consists of several texts, which do not attend to each other and begin at position 0.
        expert_ids (L, B, S, K): replayed by the MoE layers, see `MoE.forward`. record: gets each layer's expert ids.

        token_mask (B, S): bool or integers, False or 0 for padding, which must come last or be a document. Losses,
        counts and rounding leave padding out, attention does not. None: with labels, as `Documents.real_tokens` says.

        Raises:
            ValueError: a shape or device is wrong, the tokens exceed ``config.max_seq_len`` or the cache, or (on CPU)
                an id is outside the vocabulary or names no expert, or padding comes before text that attends to it.
        """
        self._check(input_ids, labels, cache, record)
        self._check_documents(input_ids, cache, documents)
        self._check_expert_ids(input_ids, expert_ids)
        token_mask = _real_tokens(input_ids, labels, documents, token_mask)
        if token_mask is not None and labels is not None:
            labels = labels.masked_fill(~token_mask, IGNORED)
        hidden, aux_loss, layers = self._hidden(input_ids, cache, documents, expert_ids, record, token_mask)
        routed = _of_layers(layers, hidden.device)
        if labels is None:
            return LMOutput(None, aux_loss, F.linear(hidden, self._head_weight()), *routed)
        if self.config.moe is not None and not self.config.moe.router.add_aux_loss:
            aux_loss = torch.zeros_like(aux_loss)
        loss = chunked_cross_entropy(hidden.flatten(0, 1), self._head_weight(), labels.flatten())
        return LMOutput(loss, aux_loss, None, *routed)

    @without_cudnn()
    def next_logits(self, input_ids: Tensor, cache: KVCache, record: RoutingRecord | None = None) -> Tensor:
        """(B, V) logits of the token after the last one of input_ids (B, S). The tokens are added to the cache, and
        their expert ids to ``record``.
        """
        self._check(input_ids, None, cache, record)
        hidden, _, _ = self._hidden(input_ids, cache, None, None, record)
        return F.linear(hidden[:, -1], self._head_weight())

    def update_selection_bias(self, pairs_per_expert: Tensor, rate: float) -> None:
        """Balance the experts without a loss: move every layer's selection bias by ``rate`` towards an even load.

        pairs_per_expert (L, E): before token rounding, summed over the micro-batches of one optimiser step. Call it
        once per step on all ranks of the layers' ``group``, over which it sums the counts. Without selection biases it
        does nothing.
        """
        layers = [block.mlp for block in self._blocks() if isinstance(block.mlp, MoE)]
        biases = [moe.selection_bias for moe in layers if moe.selection_bias is not None]
        if biases:
            update_selection_bias(biases, pairs_per_expert, rate, layers[0].group)

    def set_checkpointing(self, mode: str) -> None:
        """What the backward recomputes to save memory: "none", each block's "attention", or each whole "block".

        A recomputed block keeps nothing of its experts, whose backward follows at once: ``recompute="up_proj"`` would
        only run that GEMM a third time, and ``save="fp8"`` would only round, so "block" switches both off.
        """
        require_choice("checkpointing", mode, CHECKPOINTING_MODES)
        for block in self._blocks():
            block.checkpointing = mode
            if mode == "block" and isinstance(block.mlp, MoE):
                block.mlp.experts.recompute, block.mlp.experts.save = None, "full"

    def compile_blocks(self, backend: str) -> None:
        """torch.compile every block's computation, with this backend."""
        for block in self._blocks():
            block.compiled_by = backend

    def _hidden(
        self,
        input_ids: Tensor,
        cache: KVCache | None,
        documents: Documents | None,
        expert_ids: Tensor | None,
        record: RoutingRecord | None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Sequence[Tensor | None]]]:
        """(normalised hidden (B, S, d), auxiliary loss (), (counts, pairs, entropy, statistics) of each MoE block)."""
        config, start = self.config, 0 if cache is None else cache.length
        hidden = self.embed(input_ids)
        if hidden.dtype == torch.float32 and autocast_dtype(hidden.device.type) == torch.bfloat16:
            hidden = hidden.to(torch.bfloat16)  # not to fp16, which the residual stream overflows
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if documents is None:
            positions = torch.arange(start, start + input_ids.shape[1], device=hidden.device)
        else:
            positions = documents.positions
        angles = rotary_angles(positions, config.head_dim, config.rope_theta, dtype)
        layer_caches = [None] * config.num_layers if cache is None else list(cache)
        aux_loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        layers: list[Sequence[Tensor | None]] = []
        for number, (block, layer_cache) in enumerate(zip(self.blocks, layer_caches, strict=True)):
            replayed = None if expert_ids is None or not isinstance(block.mlp, MoE) else expert_ids[len(layers)]
            rest = (documents, replayed, token_mask)
            hidden, block_aux_loss, *routed, chosen = block(hidden, angles, layer_cache, *rest)
            if block_aux_loss is not None:
                aux_loss = aux_loss + block_aux_loss
                layers.append(routed)  # not the whole output, which would keep the hidden states
                if record is not None:
                    record.add(number, chosen)
        statistics = [of_layer for *_, of_layer in layers if of_layer is not None]
        if config.moe is not None and statistics and len(statistics) == len(layers):  # a custom router may have none
            aux_loss = aux_loss_of_layers(torch.stack(statistics), config.moe.router)
        return self.norm(hidden), aux_loss, layers

    def _head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _check_documents(self, input_ids: Tensor, cache: KVCache | None, documents: Documents | None) -> None:
        if documents is None:
            return
        require_type("documents", documents, Documents)
        if cache is not None:
            raise ValueError("documents and cache were both given, but a cache holds one text; drop one")
        if documents.positions.shape != input_ids.shape or documents.positions.device != input_ids.device:
            raise ValueError(
                f"documents must have positions {tuple(input_ids.shape)} on {input_ids.device}, got "
                f"{tuple(documents.positions.shape)} on {documents.positions.device}"
            )

    def _check_expert_ids(self, input_ids: Tensor, expert_ids: Tensor | None) -> None:
        moe = self.config.moe
        if expert_ids is None:
            return
        if moe is None:
            raise ValueError("expert_ids was given to a model without experts (config.moe is None); drop it")
        shape = (self.config.num_layers - self.config.num_dense_layers, *input_ids.shape, moe.num_experts_per_tok)
        require_tensor("expert_ids", expert_ids)
        if tuple(expert_ids.shape) != shape:
            raise ValueError(
                f"expert_ids must be (L, B, S, K) = {shape}, got {tuple(expert_ids.shape)}; give K ids of each MoE "
                "layer for each of input_ids"
            )

    def _check(
        self, input_ids: Tensor, labels: Tensor | None, cache: KVCache | None, record: RoutingRecord | None
    ) -> None:
        require_tensors({"input_ids": input_ids}, {"labels": labels})
        refuse_transforms("tilemoe.DecoderLM", input_ids, labels, self.embed.weight)
        if cache is not None:
            require_type("cache", cache, KVCache)
            if len(cache) != self.config.num_layers:
                raise ValueError(f"cache must be of {self.config.num_layers} layers, got one of {len(cache)}")
        if record is not None:
            require_type("record", record, RoutingRecord)
        if input_ids.ndim != 2 or input_ids.shape[1] == 0 or input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"input_ids must be (B, S) integers with S >= 1, got {tuple(input_ids.shape)} {input_ids.dtype}"
            )
        if cache is not None and cache.batch_size not in (None, input_ids.shape[0]):
            raise ValueError(
                f"input_ids has {input_ids.shape[0]} sequences but the cache holds {cache.batch_size}; begin another "
                "KVCache"
            )
        device = self.embed.weight.device
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids is not None and ids.device != device:
                raise ValueError(f"{name} is on {ids.device} but the model is on {device}; move them to one device")
        held = 0 if cache is None else cache.length
        room = self.config.max_seq_len if cache is None else min(cache.max_tokens, self.config.max_seq_len)
        if held + input_ids.shape[1] > room:
            where = f"the cache, which holds {held} of {room}" if held else f"the {room} the model has positions for"
            raise ValueError(f"input_ids has {input_ids.shape[1]} tokens, too many for {where}; shorten it")
        _check_ids("input_ids", input_ids, self.config.vocab_size, lowest=0)
        if labels is None:
            return
        if cache is not None:
            raise ValueError("labels and cache were both given, but a cache is for inference; drop one")
        if labels.shape != input_ids.shape or labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be {tuple(input_ids.shape)} torch.int64, got {tuple(labels.shape)} {labels.dtype}"
            )
        _check_ids("labels", labels, self.config.vocab_size, lowest=IGNORED)


def _real_tokens(
    input_ids: Tensor, labels: Tensor | None, documents: Documents | None, token_mask: Tensor | None
) -> Tensor | None:
    """(B, S) bool, False for padding; None: there is none. ValueError: a mask does not fit, or pads on the left."""
    if token_mask is not None:
        require_tensor("token_mask", token_mask)
        token_mask = checked_mask(token_mask, input_ids.shape, input_ids.device)
    elif documents is not None and labels is not None:
        token_mask = documents.real_tokens(input_ids, labels)
    if token_mask is None or not can_be_read(token_mask):
        return token_mask
    begins_text = ~token_mask[:, :-1] & token_mask[:, 1:]
    if documents is not None:
        begins_text &= documents.positions[:, 1:] > 0
    if begins_text.any():
        raise ValueError("token_mask has padding before text, which attends to it; pad on the right or pass documents")
    return None if token_mask.all() else token_mask


def _of_layers(layers: Sequence[Any], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The last three fields of `LMOutput`."""
    if not layers:
        none = torch.zeros(0, 0, dtype=torch.int32, device=device)
        return none, none, torch.zeros(0, device=device)
    counts, pairs, entropies, _ = zip(*layers, strict=True)
    known = [entropy for entropy in entropies if entropy is not None]
    entropy = torch.stack(known) if len(known) == len(layers) else torch.zeros(len(layers), device=device)
    return torch.stack(counts), torch.stack(pairs), entropy


def _check_ids(name: str, ids: Tensor, vocab_size: int, *, lowest: int) -> None:
    """ValueError for an id outside the vocabulary; only on CPU and outside torch.compile, where reading costs nothing.

    If ``lowest`` is negative, it is the only negative id that may occur.
    """
    if not can_be_read(ids) or ids.numel() == 0:
        return
    bad = ids[((ids < 0) & (ids != lowest)) | (ids >= vocab_size)]
    if bad.numel():
        allowed = f"[0, {vocab_size})" + (f" or {lowest}" if lowest < 0 else "")
        raise ValueError(f"{name} must lie in {allowed}, got {int(bad[0])}; is it the right tokenizer?")
