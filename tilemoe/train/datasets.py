"""Prepares the data that a recipe names, makes its sampler, and moves batches to the device.

B sequences · S tokens per sequence
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.data import (
    MixedSampler,
    Mixture,
    PackedBatch,
    PackedDocuments,
    PackedSampler,
    Prepared,
    Sampler,
    TokenShards,
    prepare,
    prepare_chat,
)
from tilemoe.data.mixture import ROUND, sequences_of_round
from tilemoe.data.sampler import Batch
from tilemoe.kernels.lm.documents import Documents
from tilemoe.train.config import DataConfig
from tilemoe.train.job.processes import ALONE, Job


def prepare_data(settings: DataConfig, tokenizer: str, cache_dir: Path | None = None) -> Prepared:
    """The corpora of ``settings`` in the ids of ``tokenizer``. ValueError: anything is wrong with them.

    ``cache_dir`` is written to instead of the settings' own cache, which is then only read.
    """
    corpora, weights = zip(*settings.weight_of_corpus, strict=True)
    found = [_prepare_corpus(corpus, settings, tokenizer, cache_dir) for corpus in corpora]
    if not settings.sources:
        return found[0]
    counts = sequences_of_round(weights)
    notes = [f"{n / ROUND:.1%} of the sequences from {corpus}" for corpus, n in zip(corpora, counts, strict=True)]
    notes += [note for each in found for note in each.notes]
    train, heldout = (
        Mixture(tuple(parts), weights) for parts in zip(*((p.train, p.heldout) for p in found), strict=True)
    )
    return Prepared(train, heldout, found[0].tokenizer, tuple(notes), "; ".join(each.files for each in found))


def _prepare_corpus(corpus: str, settings: DataConfig, tokenizer: str, cache_dir: Path | None) -> Prepared:
    cache = cache_dir or settings.cache_path
    options: dict[str, Any] = {"heldout_every": settings.heldout_every, "read_only": settings.cache_path}
    options |= {"undecodable": settings.undecodable, "longest_line": settings.longest_line}
    if settings.format == "text":
        return prepare(corpus, tokenizer, cache, **options)
    options |= {"seq_len": settings.seq_len, "too_long": settings.too_long, "packing": settings.packing}
    return prepare_chat(corpus, tokenizer, cache, **options)


def make_sampler(data: Prepared, settings: DataConfig, seed: int, job: Job) -> Sampler | PackedSampler | MixedSampler:
    """The sampler of this process' training batches."""
    if isinstance(data.train, Mixture):
        one = replace(settings, batch_size=1)
        samplers: list[Any] = [_sampler_of(part, one, seed, ALONE) for part in data.train.parts]
        return MixedSampler(samplers, data.train.weights, settings.batch_size, seed, job.rank, job.world_size)
    return _sampler_of(data.train, settings, seed, job)


def _sampler_of(
    shards: TokenShards | PackedDocuments, settings: DataConfig, seed: int, job: Job
) -> Sampler | PackedSampler:
    if isinstance(shards, PackedDocuments):
        return PackedSampler(shards, settings.batch_size, seed, job.rank, job.world_size)
    return Sampler(shards, settings.seq_len, settings.batch_size, seed, job.rank, job.world_size)


class DeviceBatch(NamedTuple):
    """The arguments of a forward: inputs and labels (B, S) int64, and the documents of packed sequences.

    ``num_targets``: the number of labels that are not -100, known on the host.
    """

    inputs: Tensor
    labels: Tensor
    documents: Documents | None
    num_targets: int
    token_mask: Tensor | None  # (B, S) bool, False for padding of a window or a batch; None: no padding


def device_batch(batch: Batch | PackedBatch, device: torch.device) -> DeviceBatch:
    """Copy ``batch`` to ``device``; the host does not wait for the copies."""
    inputs, targets, *positions = (torch.from_numpy(array) for array in batch)
    documents = Documents.of(*positions) if positions else None
    is_real = targets >= 0  # in text every token has a target; below: a document without targets is padding
    num_targets = int(is_real.sum())
    if documents is not None:
        lengths = documents.bounds.diff().long()
        has_targets = torch.segment_reduce(is_real.flatten().float(), "max", lengths=lengths) > 0
        is_real = has_targets.repeat_interleave(lengths).view_as(targets)

    def moved(tensor: Tensor) -> Tensor:
        # Only a copy from pinned memory is asynchronous.
        tensor = tensor.pin_memory() if device.type == "cuda" else tensor
        return tensor.to(device, non_blocking=True)

    placed = None if documents is None else Documents(*map(moved, documents))
    mask = None if documents is None and is_real.all() else moved(is_real)
    return DeviceBatch(moved(inputs), moved(targets), placed, num_targets, mask)
