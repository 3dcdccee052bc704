"""Sampling text from a decoder, one token at a time, with a key-value cache.

B sequences · S tokens of the prompt · N new tokens · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tilemoe.checks import require_finite, require_int, require_type
from tilemoe.layers.attention import KVCache
from tilemoe.layers.experts import capacity_of
from tilemoe.models.decoder import DecoderLM
from tilemoe.routing.replay import RoutingRecord
from tilemoe.runtime.tensors import require_generator, require_tensor

_LEAST_TEMPERATURE = 1e-30  # dividing by less overflows fp32 logits; the likeliest token is certain long before


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiled blocks would recompile for every length
def generate(
    model: DecoderLM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    num_ids: int | None = None,
    record: RoutingRecord | None = None,
) -> Tensor:
    """Continue input_ids (B, S) by ``max_new_tokens`` tokens: (B, S + N) int64, the prompt included.

    temperature: divides the logits; 0 takes the likeliest token. top_k: sample among the k likeliest; 0 among all.
    generator: of the model's device; with it the text is a function of the prompt and the generator's state.
    num_ids: sample only ids below it, for a vocabulary larger than the tokenizer's; None: any.
    record: gets the experts of every token except the last, which no layer has processed: ``record.expert_ids(B)`` are
        those of ``output[:, :-1]``.

    Raises:
        ValueError: an argument is out of range, or prompt and new tokens exceed ``model.config.max_seq_len``; or, under
            expert parallelism, a process has no room for the rows that it receives.

    Examples:
        >>> from tilemoe.models.generate import generate
        >>> moe = tilemoe.MoEConfig(32, 16, num_experts=4, num_experts_per_tok=2)
        >>> config = tilemoe.ModelConfig(64, 32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        ...                              max_seq_len=16, moe=moe)
        >>> generate(tilemoe.DecoderLM(config), torch.tensor([[1, 2, 3]]), max_new_tokens=4, temperature=0).shape
        torch.Size([1, 7])
    """
    _check(model, input_ids, max_new_tokens, temperature, top_k)
    require_generator(generator)
    if num_ids is not None:
        require_int("num_ids", num_ids, 1)
    if record is not None:
        require_type("record", record, RoutingRecord)
    if max_new_tokens == 0:
        return input_ids.long()
    total = input_ids.shape[1] + max_new_tokens
    cache, capacity = KVCache(model.config.num_layers, total), capacity_of(model, input_ids.device)

    def next_token(tokens: Tensor) -> Tensor:
        logits = model.next_logits(tokens, cache, record)[:, :num_ids]
        if capacity is not None:
            capacity.check()  # ValueError instead of NaN logits
        return sample(logits, temperature, top_k, generator)

    return continued(model, input_ids, max_new_tokens, next_token)


def continued(
    model: nn.Module, input_ids: Tensor, max_new_tokens: int, next_token: Callable[[Tensor], Tensor]
) -> Tensor:
    """input_ids (B, S) and ``max_new_tokens`` more: ``next_token`` maps the prompt, then each new token, to (B, 1).

    Meanwhile ``model`` is in evaluation mode.
    """
    were_training = [module for module in model.modules() if module.training]  # a part may be in eval mode
    model.eval()
    try:
        tokens = [input_ids.long()]
        for _ in range(max_new_tokens):
            tokens.append(next_token(tokens[-1]))
        return torch.cat(tokens, dim=1)
    finally:
        for module in were_training:
            module.training = True


def sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """(B, 1) token ids sampled from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / max(temperature, _LEAST_TEMPERATURE)
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k, dim=-1)
        choice = torch.multinomial(torch.softmax(best.values, dim=-1), 1, generator=generator)
        return best.indices.gather(1, choice)
    return torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)


def _check(model: DecoderLM, input_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int) -> None:
    require_type("model", model, DecoderLM)
    require_tensor("input_ids", input_ids)
    if input_ids.ndim != 2 or input_ids.shape[1] == 0 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "input_ids must be (B, S) integers with a prompt of S >= 1 tokens, got "
            f"{tuple(input_ids.shape)} {input_ids.dtype}"
        )
    require_int("max_new_tokens", max_new_tokens, 0)
    require_finite("temperature", temperature)
    require_int("top_k", top_k, 0)
    prompt, limit = input_ids.shape[1], model.config.max_seq_len
    if prompt > limit:
        raise ValueError(f"input_ids has {prompt} tokens, but model.max_seq_len is {limit}; shorten the prompt")
    if prompt + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens ({max_new_tokens}) after a prompt of {prompt} exceeds model.max_seq_len ({limit}); "
            f"ask for at most {limit - prompt}"
        )
