"""``--data.batch-size auto`` and ``--global-batch``: how a step's sequences are divided into micro-batches."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilemoe.checks import spelled
from tilemoe.cli.parsing import options_given
from tilemoe.config import CHECKPOINTING_MODES, KEPT_BETWEEN_MICRO_BATCHES, Kept
from tilemoe.models.hf_base import HFBase
from tilemoe.perf.hardware import Gpu, find_gpu
from tilemoe.perf.proposal import Choices, Proposal, propose, ways_to_share
from tilemoe.perf.training import Setup, precision_on
from tilemoe.train.config import Recipe

if TYPE_CHECKING:
    from tilemoe.train.job.processes import Job

_AUTO, _SIZE = "auto", "--data.batch-size"
_SHARED, _SHARD = "--parallel.expert", "--parallel.shard"
_KEPT, _RESHARD, _REPEATED = (
    f"--parallel.{name}" for name in ("between-micro-batches", "reshard-after-forward", "checkpointing")
)


def without_auto(words: Sequence[str]) -> tuple[list[str], bool]:
    """The options without ``--data.batch-size auto``, and whether it was there."""
    at = [i for i, word in enumerate(words[:-1]) if spelled(word) == _SIZE and words[i + 1] == _AUTO]
    rest = [word for i, word in enumerate(words) if i not in at and i - 1 not in at]
    found = [word for word in rest if (spelled(word.partition("=")[0]), word.partition("=")[2]) != (_SIZE, _AUTO)]
    return found, len(found) < len(words)


def sequences_of(global_batch: int, processes: int) -> int:
    """Sequences of each process in a step. ValueError: ``global_batch`` is no multiple of the processes."""
    if global_batch < 1 or global_batch % processes:
        raise ValueError(
            f"--global-batch, the sequences of a step, must be a multiple of {processes} processes, got {global_batch}"
        )
    return global_batch // processes


def accumulated(recipe: Recipe, sequences: int) -> Recipe:
    """The recipe with the micro-batches of a step of ``sequences``. ValueError: batch_size does not divide these."""
    size = recipe.data.batch_size
    if sequences % size:
        raise ValueError(
            f"--global-batch gives each process {sequences} sequences, no multiple of data.batch_size ({size}); "
            "change one of them, or use --data.batch-size auto"
        )
    return replace(recipe, train=replace(recipe.train, accumulation=sequences // size))


def proposal_for(
    recipe: Recipe, gpu: Gpu, processes: int, sequences: int, given: Collection[str] = frozenset()
) -> Proposal:
    """The settings that are predicted to be fastest on ``processes`` GPUs, with ``sequences`` per step on each.
    ``given``: options that the user has set, whose settings stay.

    ValueError: no settings fit, or the memory of such a run cannot be predicted.
    """
    model, parallel = recipe.model, recipe.parallel
    if isinstance(model, HFBase) or recipe.lora is not None:
        raise ValueError("data.batch_size auto cannot plan the training of adapters; give a number")
    if lacking := options_lacking(recipe, processes):
        raise ValueError(f"data.batch_size auto needs compiled blocks in bf16; add {' '.join(lacking)} or a number")
    is_held = parallel.shard != 0 or not {_SHARED, _SHARD}.isdisjoint(given)
    sizes = (parallel if is_held else replace(parallel, shard=0, expert=1)).for_job(processes, model)
    gpus = sizes.shard * sizes.expert  # of a replica of the model
    choices = Choices(
        expert_parallel=(sizes.expert,) if is_held else ways_to_share(model.moe, gpus),
        checkpointing=(parallel.checkpointing,) if _REPEATED in given else CHECKPOINTING_MODES,
        kept=_ways_to_keep(recipe, given),
    )
    setup = Setup(model, gpu, gpus, 1, recipe.data.seq_len, precision_on(gpu, model.moe), wrapped=processes > 1)
    found = propose(setup, sequences, choices)
    if found is None:
        raise ValueError(
            f"data.batch_size auto: not even one sequence of {recipe.data.seq_len} tokens fits in {gpu.memory_gb:.0f} "
            f"GB of a {gpu.name}; take more GPUs (tilemoe plan --train says how many), or lower data.seq_len"
        )
    return found


def options_lacking(recipe: Recipe, processes: int) -> list[str]:
    """The options that a run still needs to take the memory and the time of the plan."""
    is_narrow = processes == 1 or recipe.parallel.param_dtype == "bfloat16"
    is_as_planned = {
        "--train.precision bf16": recipe.train.precision == "bf16",
        "--train.compile blocks": recipe.train.compile == "blocks",
        "--parallel.param-dtype bfloat16": is_narrow,
    }
    return [option for option, is_so in is_as_planned.items() if not is_so]


def proposed(recipe: Recipe, proposal: Proposal, given: Collection[str] = frozenset()) -> Recipe:
    """The recipe with the proposal's settings, except those of the options ``given``."""
    values: dict[str, dict[str, Any]] = {}
    for name, value in proposal.settings().items():
        table, _, setting = name.partition(".")
        if spelled(f"--{name}") not in given:
            values.setdefault(table, {})[setting] = value
    return replace(recipe, **{table: replace(getattr(recipe, table), **each) for table, each in values.items()})


def options_in(words: Sequence[str]) -> set[str]:
    """The options on the command line; a switch that is off (``--no-...``) by its name when it is on."""
    return {re.sub(r"\bno-", "", name) for name in options_given(words)}


def gpu_here(recipe: Recipe, job: Job) -> Gpu:
    """This process' GPU, with at most the memory that it really has. ValueError: there is none, or it is not known."""
    import torch

    if recipe.train.device == "cpu" or not torch.cuda.is_available():
        raise ValueError("data.batch_size auto works on GPUs only; give a number for a run on a CPU")
    properties = torch.cuda.get_device_properties(job.local_rank)
    gpu = find_gpu(properties.name)
    return replace(gpu, memory_gb=min(gpu.memory_gb, properties.total_memory / 1e9))


def _ways_to_keep(recipe: Recipe, given: Collection[str]) -> Sequence[Kept]:
    """Values to try for ``between_micro_batches``. Weights kept for one backward take as much memory as for a step."""
    parallel = recipe.parallel
    if _KEPT in given and not (_RESHARD in given and parallel.between_micro_batches == "nothing"):
        return (parallel.between_micro_batches,)
    if _RESHARD not in given:
        return KEPT_BETWEEN_MICRO_BATCHES
    if parallel.reshard_after_forward:
        return ("nothing",)
    return ("weights",) if _KEPT in given else ("weights", "weights_and_gradients")
