"""``tilemoe train``: a recipe, overrides of any of its settings, and resuming."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from tilemoe.checks import expand_user
from tilemoe.cli.batch import accumulated, gpu_here, options_in, proposal_for, proposed, sequences_of, without_auto
from tilemoe.cli.parsing import options_given, parse
from tilemoe.config import ModelConfig, ParallelConfig, TokenRounding
from tilemoe.files import default_cache_dir
from tilemoe.models.folder import find_folder, is_hf
from tilemoe.models.hf_base import HFBase, why_base
from tilemoe.models.hf_config import import_line
from tilemoe.models.sums import sums_line
from tilemoe.train.config import DataConfig, LoRAConfig, OptimConfig, Recipe, TrainConfig, list_recipes, load_recipe
from tilemoe.train.job.processes import Job
from tilemoe.train.progress import Phases

if TYPE_CHECKING:
    from tilemoe.train.checkpoints.folder import Checkpoint

_LATEST, _AUTO = "", "auto"  # values of --resume that name no path: none given, and the word for it
_ACCUMULATION = "--train.accumulation"
_STARTS = ("--recipe", "--resume", "--init-from", "--global-batch")
_FORMS: Mapping[str, Any] = MappingProxyType(
    {"--resume": {"nargs": "?", "const": _LATEST}, "--global-batch": {"type": int}}
)


@dataclass(frozen=True)
class Overrides:
    """The settings of a recipe that can be given on the command line: all of them."""

    model: ModelConfig | HFBase
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
    parallel: ParallelConfig
    lora: LoRAConfig | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see tilemoe train --help)")


def run(arguments: Sequence[str]) -> None:
    """Parse, train, and print the sample, the plot's path and the held-out loss."""
    job = Job.from_environment()
    with job.errors_with_rank():
        _run(arguments, job, Phases.since_command())


def _run(arguments: Sequence[str], job: Job, phases: Phases) -> None:
    first = _Parser(add_help=False, allow_abbrev=False)
    for option in _STARTS:
        first.add_argument(option, **_FORMS.get(option, {}))
    known, overrides = first.parse_known_args(list(arguments))
    overrides, is_auto = without_auto(overrides)
    if "-h" in overrides or "--help" in overrides:
        _override(load_recipe(known.recipe or list_recipes()[0]), overrides)
    resume = _LATEST if known.resume == _AUTO else known.resume
    init_from = None if known.init_from is None else _initial(known.init_from, resume)
    recipe, checkpoint = _choose(known.recipe, resume, overrides, init_from)
    if init_from is not None:
        recipe = _with_base(recipe, known.init_from, init_from)
    if is_auto or known.global_batch is not None:
        recipe = _with_batch(recipe, checkpoint, known.global_batch, is_auto, overrides, job)

    from tilemoe.train.run import Stopped, train

    if job.is_first and resume is not None:
        none_yet = f"no checkpoint in {recipe.train.out_dir} yet: starting at step 0"
        print(none_yet if checkpoint is None else f"resuming from {checkpoint.path}")
    if job.is_first and init_from is not None and checkpoint is None:
        print(f"starting from the weights in {init_from}")
        if is_hf(init_from) and (line := sums_line(init_from)):
            print(f"note: {line}")
        if isinstance(recipe.model, HFBase):
            print(f"note: adapters train in transformers' own class ({why_base(init_from)})")
    if job.is_first and (line := import_line(recipe.model)):
        print(f"note: {line}")
    is_theirs = bool(resume) and known.recipe is None and "--data.cache-dir" not in options_given(overrides)
    phases.end("imports")
    result = train(recipe, checkpoint, job, init_from, default_cache_dir() if is_theirs else None, phases)
    phases.end("end")
    if isinstance(result, Stopped):
        # A shell expects this status of a stopped command; torchrun would take it for a failure and restart the job.
        sys.exit(128 + result.number if job.is_alone else 0)
    if not job.is_first:
        return
    print(f"seconds: {phases}")
    if result.sample is not None:
        print(f"\nsample:\n{result.sample}\n")
    if result.plot is not None:
        print(f"plot: {result.plot}")
    print(f"held-out loss {result.evaluation.shown(2)}")


def _with_batch(
    recipe: Recipe, checkpoint: Checkpoint | None, stated: int | None, is_auto: bool, overrides: Sequence[str], job: Job
) -> Recipe:
    """The recipe with micro-batches of its own size or, if ``is_auto``, of a proposed size. ``stated``: the value of
    --global-batch; None: a step keeps its number of sequences.
    """
    given = options_in(overrides)
    if _ACCUMULATION in given:
        raise ValueError(f"{_ACCUMULATION} follows from the global batch and data.batch_size; leave it out")
    if stated is None:
        processes = job.world_size if checkpoint is None else checkpoint.state.processes or job.world_size
        sequences = sequences_of(recipe.sequences_per_step * processes, job.world_size)
    else:
        sequences = sequences_of(stated, job.world_size)
    if not is_auto:
        return accumulated(recipe, sequences)
    gpu = gpu_here(recipe, job)
    proposal = proposal_for(recipe, gpu, job.world_size, sequences, given)
    if job.is_first:
        print(f"data.batch_size auto: {proposal}")
    return proposed(recipe, proposal, given)


def _initial(name: str, resume: str | None) -> Path:
    if resume:
        raise ValueError(f"--init-from {name} starts a run, --resume {resume} goes on with one; leave one of them out")
    return find_folder("--init-from", name).resolve()  # the recipe keeps it; a run may be resumed from another folder


def _choose(
    name: str | None, resume: str | None, overrides: Sequence[str], init_from: Path | None
) -> tuple[Recipe, Checkpoint | None]:
    """The recipe to run and the checkpoint to go on from.

    ``init_from`` gives a recipe its model and its tokenizer, which options may then change.
    """
    if resume:
        return _resume_from(expand_user(resume), name, overrides)
    if name is None:
        raise ValueError(f"--recipe NAME is missing; choose one of {', '.join(list_recipes())} or a .json file")
    base = load_recipe(name)
    if init_from is not None:
        from tilemoe.train.checkpoints.initial import adopt

        base = adopt(base, init_from)
    recipe = _override(base, overrides)
    run_dir = recipe.train.out_path

    from tilemoe.train.checkpoints.folder import find_latest
    from tilemoe.train.checkpoints.names import read_newest
    from tilemoe.train.run import require_fresh

    if resume is None:
        require_fresh(run_dir)
        return recipe, None
    return recipe, read_newest(run_dir, lambda: find_latest(run_dir))


def _resume_from(path: Path, name: str | None, overrides: Sequence[str]) -> tuple[Recipe, Checkpoint]:
    """``--resume PATH``: the run stays in PATH's folder, with the checkpoint's own recipe unless one is named."""
    from tilemoe.train.checkpoints.folder import resolve_checkpoint
    from tilemoe.train.checkpoints.names import read_newest

    checkpoint = read_newest(path, lambda: resolve_checkpoint(path))
    run_dir = str(checkpoint.path.parent)
    base = checkpoint.state.recipe if name is None else load_recipe(name)
    recipe = _override(replace(base, train=replace(base.train, out_dir=run_dir)), overrides)
    if recipe.train.out_dir != run_dir:
        raise ValueError(f"train.out_dir: a run resumed from {path} stays in {run_dir}; leave --train.out-dir out")
    return recipe, checkpoint


def _override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    description = (
        "Train a model. --recipe NAME selects the settings, which the options below override "
        f"({', '.join(list_recipes())}, or a .json file; defaults shown: {recipe.name}). --resume continues from the "
        "newest checkpoint in train.out_dir, if any (--resume auto is the same); --resume PATH from a run's folder or "
        "a step_* folder. --init-from FOLDER starts a run with the weights, architecture and tokenizer of a "
        "transformers model or a checkpoint; with any --lora option it trains adapters and freezes these weights. Any "
        "--model.moe.rounding option turns rounding on. --global-batch N sets the sequences per step of all processes. "
        "--data.batch-size auto uses the micro-batch, and any --parallel setting not given, that tilemoe plan --train "
        "proposes for this GPU. For several processes: torchrun --nproc-per-node N -m tilemoe train ..."
    )
    changed = [word for word in overrides if word.startswith("--model.") and not word.startswith("--model.folder")]
    if changed and isinstance(recipe.model, HFBase):
        raise ValueError(f"{changed[0]}: a model of transformers' own class takes it from its folder; leave it out")
    model = _with_rounding(recipe.model, overrides)
    lora = recipe.lora or (LoRAConfig() if _is_asked_for("--lora.", overrides) else None)
    settings = parse(
        Overrides,
        _with_width(model, overrides),
        others=_STARTS,
        prog="tilemoe train",
        description=description,
        default=Overrides(model, recipe.data, recipe.optim, recipe.train, recipe.parallel, lora),
    )
    return replace(recipe, **{field.name: getattr(settings, field.name) for field in fields(settings)})


def _with_rounding(model: ModelConfig | HFBase, overrides: Sequence[str]) -> ModelConfig | HFBase:
    """The model with rounding set, if its options or --help are given: tyro has no options for a table that is None."""
    if isinstance(model, HFBase):
        return model
    moe = model.moe
    if moe is None or moe.rounding is not None or not _is_asked_for("--model.moe.rounding.", overrides):
        return model
    return replace(model, moe=replace(moe, rounding=TokenRounding()))


def _with_width(model: ModelConfig | HFBase, overrides: Sequence[str]) -> list[str]:
    """The options, in which a given --model.hidden-size also sets the experts' width, unless that is given."""
    found = list(overrides)
    ours, theirs = "--model.hidden-size", "--model.moe.hidden-size"
    if model.moe is None or theirs in options_given(overrides):
        return found
    for place, word in enumerate(overrides):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == ours:
            found += [theirs, *([value] if value else overrides[place + 1 : place + 2])]
    return found


def _is_asked_for(table: str, words: Sequence[str]) -> bool:
    """Whether options of an optional table, or help for them, are on the command line."""
    return any(word.startswith(table) or word in ("-h", "--help") for word in words)


def _with_base(recipe: Recipe, name: str, folder: Path) -> Recipe:
    """The recipe; if it has adapters, ``lora`` gets the base's folder or hub name, and the dtype of its files."""
    if recipe.lora is None:
        return recipe

    from tilemoe.models.huggingface import is_in_bf16

    base = recipe.lora.base or (str(folder) if expand_user(name).is_dir() else name)
    dtype = recipe.lora.base_dtype
    if dtype is None and isinstance(recipe.model, ModelConfig):
        dtype = "bfloat16" if is_hf(folder) and is_in_bf16(folder) else "float32"
    return replace(recipe, lora=replace(recipe.lora, base=base, base_dtype=dtype))
