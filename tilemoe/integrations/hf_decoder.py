"""A decoder for the trainer, made of transformers' own model, tilemoe's experts and PEFT's adapters, which alone train.

B sequences · S tokens each · V vocabulary · E experts · L MoE layers
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilemoe.integrations import transformers as integration
from tilemoe.integrations.hf_folder import DENSE, class_of, config_of, loaded, options_of, planned, readable, slices_of
from tilemoe.integrations.peft import lora_ranks, require_peft
from tilemoe.integrations.quantized_weight import check_quantizable, weight_names
from tilemoe.kernels.lm.documents import Documents
from tilemoe.layers.attention import without_cudnn
from tilemoe.layers.lora import ATTENTION, EXPERTS
from tilemoe.models.decoder import LMOutput
from tilemoe.models.generate import continued, sample
from tilemoe.models.hf_base import HFBase
from tilemoe.models.loss import IGNORED, chunked_cross_entropy
from tilemoe.models.sums import SHARD_BYTES
from tilemoe.runtime.random import uniform_

_FLEX = "flex_attention"
_MIXER = re.compile(r"attn|attention|mamba|mixer|conv")  # in the name of a layer's token mixer
_LINEAR = ("Linear", "Linear4bit")  # by the exact name: a subclass may have another forward
# PEFT mistakes layers of these names for parts of stacked weights; an indexer, which chooses keys, has no gradient.
_LEFT_OUT = re.compile(r"(gate_proj|up_proj|down_proj)$|indexer\b")
_PROBE = 4  # tokens of a document
_SAME = 0.01  # relative error between a probe's rows, which are equal unless a document sees the one before it


class HFDecoder(nn.Module):
    """``peft``, a PEFT model around a transformers model, with the methods of `DecoderLM` that training calls.

    Its state dict has only the parameters that train: the base stays in its folder. `load_decoder` makes it.
    """

    def __init__(self, peft: Any, config: HFBase) -> None:
        super().__init__()
        self.peft, self.config = peft, config
        self.fuses_head = False  # see `_head_is_a_product`
        # How documents of a sequence are kept apart: by the class from their positions, by masks that it is also given,
        # or not at all, so that each row must hold a single document.
        self.documents_by: Literal["positions", "masks", "rows"] = "rows"
        self._counts: dict[str, Tensor] = {}
        for name, module in integration.experts_modules(peft):
            module.register_forward_pre_hook(partial(self._count, name))

    @property
    def model(self) -> Any:
        """transformers' own model, whose linear layers and experts PEFT has wrapped."""
        return self.peft.get_base_model()

    @property
    def blocks(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.model.base_model.layers
        return layers

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {name: tensor for name, tensor in super().state_dict(*args, **kwargs).items() if name in trained}

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        documents: Documents | None = None,
        token_mask: Tensor | None = None,
    ) -> LMOutput:
        """As `DecoderLM.forward`, without auxiliary loss and entropies. token_mask is ignored: labels say what is
        learnt. Padding comes last or is a document; its experts are computed and counted.
        """
        self._counts.clear()
        model: Any = self.model
        given: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if documents is not None and self.documents_by != "rows":
            given["position_ids"] = documents.positions
        if documents is not None and self.documents_by == "masks":
            given["attention_mask"] = self._masks(documents)
        loss, logits = None, None
        if labels is not None and self.fuses_head:
            hidden = model.base_model(**given)[0].flatten(0, 1)
            loss = chunked_cross_entropy(hidden, model.get_output_embeddings().weight, labels.flatten())
        else:
            logits = model(**given).logits
        if labels is not None and logits is not None:
            nats = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
            loss, logits = nats / (labels != IGNORED).sum().clamp(min=1), None
        counts = list(self._counts.values())
        rows = torch.stack(counts) if counts else input_ids.new_zeros(0, 0, dtype=torch.int32)
        zeros = torch.zeros(1 + len(counts), device=input_ids.device)
        return LMOutput(loss, zeros[0], logits, rows, rows, zeros[1:])

    @without_cudnn()
    def next_logits(self, input_ids: Tensor, cache: list[Any]) -> Tensor:
        """(B, V) logits of the token after the last one of input_ids (B, S). The tokens follow those in ``cache``, at
        first an empty list, and are added to it.
        """
        out = self.model(input_ids=input_ids, past_key_values=next(iter(cache), None), use_cache=True)
        cache[:] = [out.past_key_values]
        logits: Tensor = out.logits[:, -1]
        return logits

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float,
        top_k: int,
        generator: torch.Generator,
        num_ids: int,
    ) -> Tensor:
        """As `tilemoe.models.generate.generate`, with transformers' own cache. Eager attention replaces flex attention,
        which would be compiled for each length.
        """
        cache: list[Any] = []
        is_flex = self.model.config._attn_implementation == _FLEX

        def next_token(tokens: Tensor) -> Tensor:
            return sample(self.next_logits(tokens, cache)[:, :num_ids], temperature, top_k, generator)

        if is_flex:
            self.model.set_attn_implementation("eager")
        try:
            return continued(self, input_ids, max_new_tokens, next_token)
        finally:
            if is_flex:
                self.model.set_attn_implementation(_FLEX)

    def expert_widths(self) -> set[tuple[int, int]]:
        """(d, n) of the layers' experts."""
        found = set()
        for _, module in integration.experts_modules(self):
            down: Any = module.down_proj
            found.add(tuple(down.shape[:0:-1] if module.is_transposed else down.shape[1:]))
        return found

    def save_adapters(self, folder: Path, base: str | None) -> None:
        """Write PEFT's folder; ``base``: the base model's name in it, or None."""
        self.peft.peft_config["default"].base_model_name_or_path = base
        self.peft.save_pretrained(str(folder), save_embedding_layers=False)

    def save_merged(self, folder: Path) -> None:
        """Write transformers' folder of the weights with the adapters merged into them."""
        from tilemoe.integrations.quantized import dequantize_experts

        if getattr(self.model, "is_loaded_in_4bit", False):
            raise ValueError(
                "linear layers in 4 bit are not merged; export --adapter, and merge it into the bf16 model"
            )
        dequantize_experts(self.peft)
        self.peft.merge_and_unload().save_pretrained(folder, max_shard_size=SHARD_BYTES)

    def set_checkpointing(self, mode: str) -> None:
        """As `DecoderLM.set_checkpointing`, but "attention" recomputes nothing."""
        if mode == "block":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable`")  # to be renamed
                self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def require_documents_apart(self) -> None:
        """ValueError if the results for a document in a packed sequence would depend on the document before it."""
        if self.documents_by == "rows":
            raise ValueError(
                f"{type(self.model).__name__} does not keep packed documents apart; use --data.packing one_document"
            )

    def _masks(self, documents: Documents) -> Any:
        """transformers' attention masks that keep documents apart, by layer type if the model has several types."""
        from transformers.masking_utils import create_masks_for_generate

        like = self.model.get_input_embeddings().weight.new_empty(*documents.positions.shape, 0)
        return create_masks_for_generate(
            self.model.config,
            inputs_embeds=like,
            attention_mask=None,
            past_key_values=None,
            position_ids=documents.positions,
        )

    def _count(self, name: str, experts: Any, given: tuple[Tensor, ...]) -> None:
        """Keep how many pairs each expert of a layer gets; a recomputed forward writes the same counts again."""
        ids = given[1].flatten().long()
        counts = torch.zeros(experts.down_proj.shape[0], dtype=torch.int32, device=ids.device)
        self._counts[name] = counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


def load_decoder(
    base: HFBase,
    *,
    rank: int,
    attention_rank: int | None,
    alpha: float,
    modules: Collection[str],
    storage: str,
    linear: str,
    dtype: torch.dtype,
    device: torch.device,
    home: torch.device,
    generator: torch.Generator,
) -> HFDecoder:
    """The base in ``dtype``, frozen, with fp32 adapters, in training mode. Its experts are stored as ``storage`` says,
    its other linear layers as ``linear``, "dense" or "nf4".

    It lies on ``home`` and will compute on ``device``; if ``home`` is the meta device, no weight is read. Ranks,
    ``alpha`` and ``modules`` are as for `add_lora`. The adapters' values depend on the generator's state alone.

    ValueError, of one line: transformers or PEFT is missing; the class, its loss, experts, widths or storage are not
    supported; or a weight is missing or of another shape.
    """
    options = options_of(base, storage, linear)
    if home.type == "meta":
        return _adapted(_unread(base, storage, dtype), base, rank, attention_rank or rank, alpha, modules)
    if home.type != "cpu":
        options["device_map"] = {"": str(home)}
    model = loaded(base, dtype, options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # with it, bitsandbytes' layers could only evaluate
            module.support_avx512bf16_for_cpu = False
    decoder = _adapted(model, base, rank, attention_rank or rank, alpha, modules)
    for name, parameter in decoder.named_parameters():
        if ".lora_A." in name:
            uniform_(parameter, parameter.shape[-1] ** -0.5, generator)
    with readable(base, "it cannot be computed"):
        decoder.fuses_head = _head_is_a_product(decoder)
        for way in () if mixes_documents(base) else ("positions", "masks"):
            decoder.documents_by = way
            if _keeps_documents_apart(decoder):
                break
            decoder.documents_by = "rows"
    if device.type == "cuda" and not model._supports_sdpa and model._supports_flex_attn:
        model.set_attn_implementation(_FLEX)  # the class' other attention stores S^2 numbers for each head
    return decoder


def _unread(base: HFBase, storage: str, dtype: torch.dtype) -> Any:
    """transformers' model on the meta device, checked as for loading. ValueError: as for `load_decoder`."""
    config = config_of(base)
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"{base.folder}: config.json: output_router_logits is true, which adds an auxiliary loss that is not added "
            "here; set it to false"
        )
    model = planned(base, config, dtype, len(slices_of(base)))
    integration.use(model)
    if storage != DENSE:
        for _, module in integration.experts_modules(model):
            check_quantizable(module, storage)
    return model


def mixes_documents(base: HFBase) -> bool:
    """Whether the class has layers that carry a state past the end of a document, as it declares itself, or that
    choose keys (DeepSeek's sparse attention) and may choose those of other documents.
    """
    config = config_of(base)
    text, is_stateful = config.get_text_config(), getattr(class_of(base, config), "_is_stateful", False)
    kinds = map(str, getattr(text, "layer_types", None) or ())
    is_recurrent = is_stateful or any("attention" not in each or "linear" in each for each in kinds)
    return is_recurrent or getattr(text, "index_topk", None) is not None


def _adapted(
    model: Any, base: HFBase, rank: int, attention_rank: int, alpha: float, modules: Collection[str]
) -> HFDecoder:
    """``model`` frozen, with adapters, whose A factors the caller must still draw."""
    peft = require_peft()
    targets = _attention(model) if ATTENTION in modules else []
    settings = peft.LoraConfig(
        **lora_ranks(rank, alpha, dict.fromkeys(targets, attention_rank)),
        target_modules=targets,
        target_parameters=_weights(model) if EXPERTS in modules else None,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")  # meant for PEFT's authors
        try:
            adapted = peft.get_peft_model(model, settings, low_cpu_mem_usage=model.device.type == "meta")
        except ValueError as error:  # PEFT does not adapt a module of the class
            raise ValueError(f"{' '.join(str(error).split())}; here by --lora.modules experts") from error
    integration.use(adapted)  # its experts then read the adapters' factors
    return HFDecoder(adapted, base).train()


def _attention(model: Any) -> list[str]:
    """Name suffixes of the linear layers in attention, or in another token mixer."""
    found: set[str] = set()
    for layer in model.base_model.layers:
        for name, mixer in layer.named_children():
            if _MIXER.search(name) and "norm" not in name and not any(integration.experts_modules(mixer)):
                linear = [inner for inner, each in mixer.named_modules() if type(each).__name__ in _LINEAR]
                found.update(f"{name}.{inner}".removesuffix(".") for inner in linear if not _LEFT_OUT.match(inner))
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layers of attention; use --lora.modules experts")
    return sorted(found)


def _weights(model: nn.Module) -> list[str]:
    """Name suffixes of the experts' weights."""
    found = {
        f"{name.rpartition('.')[2]}.{weight}"
        for name, module in integration.experts_modules(model)
        for weight in weight_names(module)
    }
    return sorted(found)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def _keeps_documents_apart(decoder: HFDecoder) -> bool:
    """Whether a second document's logits stay the same when the first document changes."""
    device = decoder.model.get_input_embeddings().weight.device
    positions = torch.arange(_PROBE).repeat(2, 2)
    ids = positions % decoder.config.vocab_size
    ids[1, :_PROBE] = ids[1, :_PROBE].flip(0)
    decoder.eval()
    try:
        found = decoder(ids.to(device), documents=Documents(*(t.to(device) for t in Documents.of(positions)))).logits
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        if decoder.documents_by == "positions":
            raise
        return False  # the class does not take such masks
    finally:
        decoder.train()
    one, other = found[:, _PROBE:].float()
    return bool((one - other).norm() < _SAME * other.norm())


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def _head_is_a_product(decoder: HFDecoder) -> bool:
    """Whether the logits are the head's weight times the hidden states: nothing is added, scaled or capped."""
    model, head, found = decoder.model, decoder.model.get_output_embeddings(), []
    if not isinstance(head, nn.Linear):
        return False
    with model.base_model.register_forward_hook(lambda module, given, out: found.append(out[0])):
        logits = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=head.weight.device), use_cache=False).logits
    return torch.equal(F.linear(found[0], head.weight).to(logits.dtype), logits)
