"""Recipes: everything that defines a training run, as frozen dataclasses that are validated when they are made.

Standard library only, so that ``tilemoe train --help`` never imports torch. A recipe is a JSON file; the packaged
recipes are in ``tilemoe/recipes``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from tilemoe.checks import expand_user, parse_json, require_fields, require_int, require_text, require_type
from tilemoe.config import ModelConfig, ParallelConfig, from_dict
from tilemoe.files import default_cache_dir, read_bytes
from tilemoe.models.flops import flops_per_token
from tilemoe.models.hf_base import HFBase, why_base
from tilemoe.models.sizes import ModelSizes, sizes_of

Packing = Literal["best_fit", "one_document"]
Storage = Literal["dense", "nf4", "nf4_double", "mxfp4"]  # how frozen experts with adapters are stored
_FP8_MULTIPLE = 16  # the sizes of an FP8 GEMM must be multiples of it
_MOST_THREADS = 4096  # torch crashes if the system cannot start as many threads as asked for


@dataclass(frozen=True)
class DataConfig:
    """The data of a run, and how they are cut into batches."""

    seq_len: int  # tokens per training sequence
    batch_size: int  # sequences per micro-batch and per process
    corpus: str = "stdlib"  # "stdlib", a .txt/.md/.py/.jsonl/.parquet file, or a folder; text may be .gz or .zst
    sources: tuple[str, ...] = ()  # several corpora instead, each "PATH=WEIGHT"; weight: share of training sequences
    format: Literal["text", "chat"] = "text"  # chat: .jsonl with "messages", or "prompt" and "completion"
    too_long: Literal["error", "skip", "truncate"] = "error"  # chat: what to do with an example longer than seq_len
    packing: Packing = "best_fit"  # chat: several examples in a sequence, or "one_document" in each
    undecodable: Literal["error", "replace"] = "error"  # bytes that are not UTF-8; replace: count them, use U+FFFD
    longest_line: int = 1 << 26  # characters in a line of .jsonl; a longer line is an error
    tokenizer: str = "bytes"  # "bytes", "bpe:N" (trained on the corpus), or the path of a tokenizer.json
    heldout_every: int = 20  # every N-th document is held out for evaluation
    cache_dir: str | None = None  # folder of token shards; default: $TILEMOE_CACHE, else the user's cache folder

    def __post_init__(self) -> None:
        require_fields("data.", self, at_least={"seq_len": 1, "batch_size": 1, "heldout_every": 2, "longest_line": 1})
        for name in ("corpus", "tokenizer"):
            require_text(f"data.{name}", getattr(self, name))
        self._check_sources()
        if self.tokenizer.startswith("bpe:") and (self.format == "chat" or self.sources):
            is_chat = self.format == "chat"
            of = "plain text, but data.format is chat" if is_chat else "data.corpus, not on data.sources"
            raise ValueError(
                f"data.tokenizer {self.tokenizer!r} is trained on {of}; give 'bytes', the path of a tokenizer.json, or "
                "--init-from a model with one"
            )
        if self.cache_dir is not None:
            require_text("data.cache_dir", self.cache_dir)

    def _check_sources(self) -> None:
        for source in self.sources:
            require_text("data.sources", source)
            corpus, _, weight = source.rpartition("=")
            if not corpus or not _is_number(_as_number(weight)) or float(weight) <= 0:
                raise ValueError(
                    f"data.sources: {source!r} must be PATH=WEIGHT with a weight > 0, as in {corpus or source}=1"
                )
        if not math.isfinite(total := sum(weight for _, weight in self.weight_of_corpus)):
            raise ValueError(f"data.sources: the weights add up to {total}; give smaller ones")

    @property
    def weight_of_corpus(self) -> list[tuple[str, float]]:
        """Each source with its weight, or the corpus alone."""
        pairs = (source.rpartition("=") for source in self.sources)
        return [(corpus, float(weight)) for corpus, _, weight in pairs] or [(self.corpus, 1.0)]

    @property
    def named(self) -> str:
        """The corpora, for messages."""
        return f"sources {', '.join(self.sources)}" if self.sources else f"corpus {self.corpus}"

    @property
    def cache_path(self) -> Path:
        return default_cache_dir() if self.cache_dir is None else expand_user(self.cache_dir)


@dataclass(frozen=True)
class MuonConfig:
    """Muon's own settings; names and meanings are those of ``torch.optim.Muon`` (`tilemoe.train.muon`)."""

    momentum: float = 0.95  # decay of the running mean of gradients
    nesterov: bool = True  # orthogonalise momentum * mean + (1 - momentum) * gradient, not the mean alone
    ns_steps: int = 5  # Newton-Schulz iterations
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)  # a, b, c of a x + b x^3 + c x^5
    lr_scale: float = 1.0  # Muon's learning rate divided by optim.lr, before adjust_lr_fn
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"  # match: updates as large as AdamW's

    def __post_init__(self) -> None:
        require_fields("optim.muon.", self, at_least={"ns_steps": 1}, positive=("lr_scale",))
        if self.momentum >= 1:
            raise ValueError(f"optim.muon.momentum must be in [0, 1), got {self.momentum!r}; 0.95 is usual")
        if self.ns_steps >= 100:
            raise ValueError(f"optim.muon.ns_steps must be below 100, got {self.ns_steps}; 5 is usual")
        given = self.ns_coefficients
        if not isinstance(given, tuple) or len(given) != 3 or not all(map(_is_number, given)):
            raise ValueError(
                f"optim.muon.ns_coefficients must be three finite numbers, got {given!r}; 3.4445 -4.775 2.0315 is usual"
            )


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, gradient clipping and the learning-rate schedule."""

    lr: float  # peak learning rate
    # muon: Muon for the blocks' matrices except the router's, AdamW for the rest; adamw8bit: AdamW with 8-bit moments
    name: Literal["adamw", "muon", "adamw8bit"] = "adamw"
    beta1: float = 0.9  # AdamW's
    beta2: float = 0.95  # AdamW's
    eps: float = 1e-8  # AdamW's
    weight_decay: float = 0.1  # of weight matrices only, not of norms, biases and the embedding table
    grad_clip: float = 1.0  # L2 norm that gradients are clipped to; 0: no clipping. A NaN or infinite norm ends the run
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # after the warm-up; wsd: constant, then a decay
    warmup_steps: int = 100  # linear warm-up, in optimiser steps; a shorter run ends within it
    decay_fraction: float = 0.2  # wsd: the last fraction of all steps, in which the rate decays
    min_lr_ratio: float = 0.1  # the last step's learning rate divided by the peak
    muon: MuonConfig = field(default_factory=MuonConfig)  # used if optim.name is muon

    def __post_init__(self) -> None:
        require_fields("optim.", self, positive=("lr", "eps"))
        if not isinstance(self.muon, MuonConfig):
            raise ValueError(f"optim.muon must be a MuonConfig, got {self.muon!r}; leave it out for its defaults")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ValueError(f"optim.{name} must be in [0, 1), got {getattr(self, name)!r}")
        for name in ("decay_fraction", "min_lr_ratio"):
            if getattr(self, name) > 1:
                raise ValueError(f"optim.{name} must be in [0, 1], got {getattr(self, name)!r}")


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685) that a run trains instead of its initial weights."""

    rank: int = 8  # of the experts' adapters; every expert has its own adapter
    attention_rank: int | None = None  # of attention's adapters; default: rank
    alpha: float = 16.0  # every adapter's product is multiplied by alpha / rank
    modules: tuple[Literal["experts", "attention"], ...] = ("experts", "attention")  # modules that get adapters
    storage: Storage = "dense"  # format of the frozen experts; with 4 bits all other frozen weights are in bf16
    linear: Literal["dense", "nf4"] = "dense"  # format of frozen linear layers beside 4-bit experts; nf4: bitsandbytes
    train_router: bool = False  # also train the routers' weights
    train_norms: bool = False  # also train the norms' weights
    base: str | None = None  # name of the base model in an exported adapter; default: taken from --init-from
    # Dtype of merged weights and, if train.precision is bf16, of frozen matrices beside dense experts; default: the
    # dtype in --init-from's files
    base_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        require_fields("lora.", self, at_least={"rank": 1}, positive=("alpha",))
        if not self.modules or not set(self.modules) <= {"experts", "attention"}:
            raise ValueError(f"lora.modules must be experts, attention or both, got {self.modules!r}")
        if self.attention_rank is not None:
            require_int("lora.attention_rank", self.attention_rank, 1)
            if "attention" not in self.modules:
                raise ValueError("lora.attention_rank needs adapters in attention; add attention to lora.modules")
        if self.storage != "dense" and "experts" not in self.modules:
            raise ValueError(f"lora.storage {self.storage!r} needs adapters in experts; add experts to lora.modules")
        if self.linear != "dense" and self.storage == "dense":
            raise ValueError(f"lora.linear {self.linear!r} needs experts in 4 bits; set --lora.storage, too")
        if self.base is not None:
            require_text("lora.base", self.base)


@dataclass(frozen=True)
class TrainConfig:
    """Length, precision and device of the run, and what it writes where."""

    steps: int  # optimiser steps
    out_dir: str  # the run's folder: checkpoints, metrics.jsonl, plot.png, result.json
    accumulation: int = 1  # micro-batches per optimiser step
    seed: int = 0  # of the initial weights and the data order
    precision: Literal["fp32", "bf16"] = "bf16"  # bf16: autocast over fp32 weights, or FSDP gathers them in bf16
    dense_precision: Literal["bf16", "fp8"] = "bf16"  # attention's projections: fp8 by torchao, bf16 as train.precision
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU if there is one
    compile: Literal["none", "blocks"] = "none"  # blocks: torch.compile every decoder block
    recompute: Literal["up_proj"] | None = None  # up_proj: experts save no pre-activations; backward reruns up_proj
    deterministic: bool = False  # bit-equal runs on a GPU too; attention's backward is slower
    threads: int = 0  # CPU threads; 0 leaves the choice to torch
    selection_bias_rate: float = 0.001  # step size of the router's selection bias, if the model has one
    log_every: int = 10  # steps between records of the training loss
    eval_every: int = 250  # steps between evaluations on held-out text; 0: only at the end
    eval_batches: int = 20  # batches per evaluation, spread over the held-out split; 0: the whole split
    save_every: int = 250  # steps between checkpoints; 0: only at the end
    keep_last: int = 2  # checkpoints kept
    tensorboard: bool = False  # also write TensorBoard event files
    wandb: bool = False  # also log to Weights & Biases, project tilemoe or $WANDB_PROJECT
    plot: bool = True  # draw plot.png at the end
    sample_prompt: str = "def "  # prompt of the sample at the end of the run
    sample_tokens: int = 200  # length of that sample; 0: no sample
    timeout: int = 600  # seconds that a process of a job waits for the others before it gives up

    def __post_init__(self) -> None:
        counts = ("steps", "accumulation", "log_every", "keep_last", "timeout")
        require_fields("train.", self, at_least=dict.fromkeys(counts, 1))
        require_text("train.out_dir", self.out_dir)
        if self.threads > _MOST_THREADS:
            raise ValueError(f"train.threads must be at most {_MOST_THREADS}, got {self.threads}; 0 leaves it to torch")
        if not isinstance(self.sample_prompt, str) or (self.sample_tokens and not self.sample_prompt):
            raise ValueError(f"train.sample_prompt must be a non-empty text, got {self.sample_prompt!r}")

    @property
    def out_path(self) -> Path:
        return expand_user(self.out_dir)


@dataclass(frozen=True)
class Recipe:
    """A complete, reproducible description of a training run.

    ``model`` configures `DecoderLM`, or names a model of transformers' own class, which only adapters can train
    (`tilemoe.models.hf_base`). ``parallel`` says how a job's processes share the model; under train.precision fp32 its
    dtypes are ignored. A single process shares nothing, but follows ``parallel.checkpointing``.
    """

    name: str
    description: str
    model: ModelConfig | HFBase
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig | None = None  # None: all weights are trained

    def __post_init__(self) -> None:
        require_text("name", self.name)
        require_type("description", self.description, str)
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len ({self.data.seq_len}) must not exceed model.max_seq_len ({self.model.max_seq_len})"
            )
        if self.train.dense_precision == "fp8" and isinstance(self.model, ModelConfig):
            self._check_dense_fp8(self.model)
        moe = self.model.moe
        if self.train.recompute is not None and moe is not None and moe.save != "full":
            raise ValueError(
                f"model.moe.save {moe.save!r} has no effect with train.recompute {self.train.recompute!r}, which saves "
                "no pre-activations; leave one of them out"
            )
        if self.lora is not None:
            self._check_lora(self.lora)

    def _check_dense_fp8(self, model: ModelConfig) -> None:
        data = self.data
        sizes = {
            "model.hidden_size": model.hidden_size,
            "model.num_heads * model.head_dim": model.num_heads * model.head_dim,
            "model.num_kv_heads * model.head_dim": model.num_kv_heads * model.head_dim,
            "data.batch_size * data.seq_len": data.batch_size * data.seq_len,  # K of the wgrad GEMM
        }
        for name, size in sizes.items():
            if size % _FP8_MULTIPLE:
                raise ValueError(
                    f"{name} ({size}) must be a multiple of {_FP8_MULTIPLE} where train.dense_precision is fp8; change "
                    "it, or use --train.dense-precision bf16"
                )
        if self.lora is not None and "attention" in self.lora.modules:
            raise ValueError(
                "train.dense_precision 'fp8' is not for attention with adapters; use --train.dense-precision bf16, or "
                "--lora.modules experts"
            )

    def _check_lora(self, lora: LoRAConfig) -> None:
        if self.optim.name == "muon":
            raise ValueError("optim.name 'muon' does not train adapters; use --optim.name adamw or adamw8bit")
        if isinstance(self.model, HFBase):
            return
        if lora.linear != "dense":
            raise ValueError(f"lora.linear {lora.linear!r} is for models of transformers' own classes; leave it out")
        if "experts" not in lora.modules:
            return
        moe = self.model.moe
        if moe is None:
            raise ValueError("lora.modules has experts, but the model is dense; use --lora.modules attention")
        for name, value, served, fix in (
            ("model.moe.precision", moe.precision, "bf16", "use --model.moe.precision bf16"),
            ("model.moe.save", moe.save, "full", "use --model.moe.save full"),
            ("train.recompute", self.train.recompute, None, "use --parallel.checkpointing block instead"),
        ):
            if value != served:
                raise ValueError(
                    f"{name} {value!r} is not for experts with adapters; {fix}, or --lora.modules attention"
                )

    def parallel_for(self, world_size: int) -> ParallelConfig:
        """``parallel`` for a job of ``world_size`` processes: sizes are filled in, and dtypes follow train.precision.

        ValueError: the product of the sizes is not the job's, or the experts cannot be divided evenly.
        """
        config = self.parallel.for_job(world_size, self.model)
        if self.train.precision == "fp32":
            return replace(config, param_dtype=None, reduce_dtype=None)
        return config

    def require_trainable(self) -> None:
        """ValueError: the model is of transformers' own class, which cannot be trained with one of the settings."""
        if not isinstance(self.model, HFBase):
            return
        what = f"a model of type {self.model.model_type!r} runs in transformers' own class"
        if self.lora is None:
            why = why_base(Path(self.model.folder)) or what
            raise ValueError(f"{why}; transformers' own class trains adapters only, so add --lora.rank 8")
        train, parallel = self.train, self.parallel
        for name, value, served in (
            ("optim.name", self.optim.name, ("adamw", "adamw8bit")),
            ("parallel.expert", parallel.expert, (1,)),
            ("parallel.checkpointing", parallel.checkpointing, ("none", "block")),
            ("train.compile", train.compile, ("none",)),
            ("train.dense_precision", train.dense_precision, ("bf16",)),
            ("train.recompute", train.recompute, (None,)),
            ("lora.train_router", self.lora.train_router, (False,)),
            ("lora.train_norms", self.lora.train_norms, (False,)),
        ):
            if value not in served:
                raise ValueError(
                    f"{what}, which does not support {name} {value!r}; use {' or '.join(map(str, served))}"
                )

    def sizes(self) -> ModelSizes:
        """The model's sizes. ValueError: it is transformers' own, of a family that the planner does not know."""
        return self.model.sizes() if isinstance(self.model, HFBase) else sizes_of(self.model)

    def flops_per_token(self) -> float | None:
        """FLOP of training per token; None where the planner does not know the model's family."""
        try:
            return flops_per_token(self.sizes(), self.data.seq_len, is_frozen=self.lora is not None)
        except ValueError:
            return None

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimiser step on one process."""
        return self.data.batch_size * self.train.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step on one process."""
        return self.sequences_per_step * self.data.seq_len


def list_recipes() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    names = (entry.name for entry in files("tilemoe.recipes").iterdir())
    return sorted(name[: -len(".json")] for name in names if name.endswith(".json"))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """The packaged recipe of that name, or the recipe in a ``.json`` file."""
    text = str(name_or_path)
    if text.endswith(".json"):
        path = expand_user(text)
        if not path.is_file():
            raise ValueError(
                f"recipe: no file {path}; give an existing .json file or one of {', '.join(list_recipes())}"
            )
        return parse_recipe(read_bytes(path), str(path))
    if text not in list_recipes():
        raise ValueError(f"recipe: unknown recipe {text!r}; choose one of {', '.join(list_recipes())} or a .json file")
    return parse_recipe((files("tilemoe.recipes") / f"{text}.json").read_text(encoding="utf-8"), f"recipe {text}")


def parse_recipe(text: str | bytes, where: str) -> Recipe:
    """A recipe from JSON text (bytes: UTF-8); ``where`` names its origin in error messages."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where}: cannot be read ({error}); correct the file") from error
    try:
        recipe: Recipe = from_dict(Recipe, data)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return recipe


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str, here: str = "here", there: str = "in the checkpoint"
) -> Iterator[str]:
    """A text for each setting (``to_dict``) that differs, in order: its dotted name and both values."""
    for key, value in ours.items():
        other = theirs.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from differences(value, other, f"{where}{key}.", here, there)
        elif value != other:
            yield f"{where}{key} is {_short(value)} {here} and {_short(other)} {there}"


def _is_number(value: Any) -> bool:
    most = math.inf if isinstance(value, float) else 1 << 63  # a tensor cannot be multiplied by a larger integer
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < most


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _short(value: Any) -> str:
    return "a table of settings" if isinstance(value, Mapping) else repr(value)
