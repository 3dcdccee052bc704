"""A whole training run: sets up data, model and loop, resumes from a checkpoint, writes plot, sample and result."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import stat
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import tilemoe
from tilemoe.checks import told
from tilemoe.config import to_dict
from tilemoe.data import Mixture, PackedDocuments, Prepared
from tilemoe.files import digest_of_sources, owned_folder, write_atomic
from tilemoe.kernels.choose import choose_experts
from tilemoe.layers.lora import packed_weights
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.hf_base import HFBase
from tilemoe.plots import png, run_figure
from tilemoe.runtime.deterministic import repeatable
from tilemoe.train.checkpoints.distributed import require_shared
from tilemoe.train.checkpoints.folder import Checkpoint, CheckpointError, open_checkpoint
from tilemoe.train.checkpoints.initial import load_initial
from tilemoe.train.checkpoints.names import aside_of, clean_stale, list_checkpoints
from tilemoe.train.checkpoints.restore import build_model, build_shared_model, select_device
from tilemoe.train.config import Recipe, differences
from tilemoe.train.datasets import prepare_data
from tilemoe.train.evaluate import Evaluation
from tilemoe.train.job.collective import entries_of_hosts, joined, objects_of_processes
from tilemoe.train.job.processes import ALONE, Job
from tilemoe.train.job.signals import StopRequest, sigterm_interrupts, stop_request
from tilemoe.train.loop import Trainer, data_fingerprint, seed_process
from tilemoe.train.metrics import (
    METRICS_FILE,
    MetricsWriter,
    TensorBoard,
    Tracker,
    WandB,
    read_metrics,
    truncate_metrics,
)
from tilemoe.train.preflight import PLOT_FILE, RESULT_FILE, require_own, require_prompt, require_ready
from tilemoe.train.progress import Phases, Reporter, make_reporter
from tilemoe.train.sample import continue_text

Made = TypeVar("Made")
_FIXED = ("data.", "optim.name ", "train.seed ")  # settings that a resumed run must keep
_OF_A_STEP = ("data.batch_size ", "train.accumulation ")  # free if a step keeps its number of sequences
_SAMPLE_TEMPERATURE, _SAMPLE_TOP_K = 0.8, 40
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run."""

    evaluation: Evaluation
    sample: str | None
    plot: Path | None


@dataclass(frozen=True)
class Stopped:
    """A run that a signal ended before its last step; ``number`` is the signal's number."""

    number: int


def require_fresh(run_dir: Path) -> None:
    """Raise ValueError if ``run_dir`` holds anything but the empty record of a run that ended in its first step."""
    for file in run_dir.iterdir() if run_dir.is_dir() else ():
        found = file.lstat()
        if file.name != METRICS_FILE or found.st_size or not stat.S_ISREG(found.st_mode):
            raise ValueError(
                f"train.out_dir {run_dir} is not empty; add --resume to go on in it, or choose another --train.out-dir"
            )


def require_resumable(recipe: Recipe, checkpoint: Checkpoint, processes: int = 1) -> list[str]:
    """Raise unless ``recipe`` can go on from ``checkpoint``; returns the harmless differences, one line each.

    The model, its adapters, the data, their order and the optimiser must be the same. The length, the learning rate,
    the precision and what is logged may change. batch_size and accumulation may change if a step of all ``processes``
    keeps its number of sequences, because it then trains on the same sequences.
    """
    checkpoint.require_bytes()
    checkpoint.require_model(recipe.model)
    state = checkpoint.state
    is_same_step = recipe.tokens_per_step * processes == state.recipe.tokens_per_step * state.processes
    ours, saved = _without_places(recipe), _without_places(state.recipe)
    fixed = [*differences({"lora": ours["lora"]}, {"lora": saved["lora"]}, "")]
    free: list[str] = []
    for table in ("data", "optim", "train"):
        for line in differences(ours[table], saved[table], f"{table}."):
            is_free = is_same_step if line.startswith(_OF_A_STEP) else not line.startswith(_FIXED)
            (free if is_free else fixed).append(line)
    free += differences(ours["model"], saved["model"], "model.")  # only how experts compute: the rest is checked above
    if state.processes and not is_same_step:
        here, there = recipe.sequences_per_step * processes, state.recipe.sequences_per_step * state.processes
        keeps = "" if there % processes else f"; --global-batch {there} keeps it"
        free.append(f"a step has {here} sequences here and {there} in the checkpoint{keeps}")
    if fixed:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is of another run: {fixed[0]}; keep the saved value to resume"
        )
    if checkpoint.state.step > recipe.train.steps:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} is past train.steps ({recipe.train.steps}); raise train.steps to resume"
        )
    return [line for line in free if not line.startswith("train.out_dir ")]


def _without_places(recipe: Recipe) -> dict[str, Any]:
    """``recipe``'s settings without the paths of text and base: the digest of the tokens identifies the text."""
    settings = to_dict(recipe)
    data, lora = settings["data"], settings["lora"]
    settings["model"].pop("folder", None)
    del data["cache_dir"], data["corpus"], data["undecodable"], data["longest_line"]
    data["sources"] = [float(source.rpartition("=")[2]) for source in data["sources"]]  # the weights
    if lora is not None:
        del lora["base"], lora["base_dtype"]  # neither changes what a step computes
    return settings


def train(
    recipe: Recipe,
    checkpoint: Checkpoint | None = None,
    job: Job = ALONE,
    init_from: Path | None = None,
    cache_dir: Path | None = None,
    phases: Phases | None = None,
) -> RunResult | Stopped:
    """Run ``recipe`` to its last step, or until SIGTERM or Ctrl-C: then save and stop. Resumes ``checkpoint`` if given.

    ``init_from``: the folder whose weights a new run starts from; `adopt` took the recipe's model from it.
    ``cache_dir``: where missing token shards are written; ``recipe.data.cache_dir`` is then only read.
    ``phases``: records the seconds of each phase; result.json has those of every process.

    The tensor files of ``checkpoint`` are compared to its manifest while they are read.

    All processes of ``job`` must call it. They get the same result, but only rank 0 gets the plot.

    ValueError: settings, data, checkpoint and job do not fit together (found before the model is built), or training
        cannot go on. One line that names the cause and the fix.
    """
    if recipe.lora is not None and checkpoint is None and init_from is None:
        raise ValueError("lora: adapters need weights to adapt; add --init-from FOLDER, or leave --lora.* out")
    recipe.require_trainable()
    phases = phases or Phases()
    recipe = _with_digest_of(checkpoint, recipe)
    reporter = make_reporter(recipe.train.log_every, job)
    run_dir = recipe.train.out_path
    recipe.parallel_for(job.world_size)
    for line in require_resumable(recipe, checkpoint, job.world_size) if checkpoint else ():
        reporter.say(f"note: {line}")
    if isinstance(recipe.model, HFBase):
        recipe.model.require_there()
    require_ready(recipe, job, is_new=checkpoint is None, init_from=init_from)
    if job.is_first and run_dir.is_dir():  # fail before a corpus is read if another process owns it
        with _owned(run_dir):
            pass
    device = select_device(recipe.train.device, job)
    choose_experts(device, torch.bfloat16)  # runs the kernels' self-test, if due, before this process takes memory
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    seed_process(recipe.train.seed, job, 0)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.filterwarnings("ignore", message=r"precision='fp8'|attention's projections")  # `_fit` reports both
        if recipe.train.deterministic:
            stack.enter_context(repeatable())
        try:
            with sigterm_interrupts():
                phases.end("checks")
                data = _prepare(recipe, checkpoint, reporter, cache_dir)
                phases.end("data")
                settings = {} if job.is_alone else settings_of_process(recipe, checkpoint, init_from, data, device)
                progress = stack.enter_context(joined(job, device, recipe.train.timeout, settings))
                phases.end("processes")
                if isinstance(recipe.model, HFBase):
                    recipe = _with_base(recipe, recipe.model, checkpoint, job)
                model = build_model(recipe, device) if job.is_alone else build_shared_model(recipe, device, job)
                if init_from is not None and checkpoint is None and isinstance(model, DecoderLM):
                    load_initial(model, init_from)
                trainer = Trainer(recipe, model, data, device, job, progress, phases)
                phases.end("weights")
                if job.is_first:
                    stack.enter_context(_owned(run_dir))
                require_shared(run_dir, job, recipe.train.timeout)
                _enter(run_dir, trainer, checkpoint, reporter)
                phases.end("folder" if checkpoint is None else "reading the checkpoint")
        except KeyboardInterrupt as interrupt:
            if not job.is_alone:
                raise  # the exit code makes torchrun end the others, which would wait for this process
            reporter.say("stopped before the first step: there is nothing to save, the same command starts again")
            return Stopped(*interrupt.args or (signal.SIGINT,))
        with stop_request() as stop_requested:
            return _fit(trainer, reporter, stop_requested)


def _with_digest_of(checkpoint: Checkpoint | None, recipe: Recipe) -> Recipe:
    """``recipe`` with its base's SHA-256 from ``checkpoint`` if it has none, as when the first command is repeated."""
    base, known = recipe.model, None if checkpoint is None else checkpoint.state.recipe.model
    if not (isinstance(base, HFBase) and isinstance(known, HFBase)) or base.sha256:
        return recipe
    return replace(recipe, model=replace(base, sha256=known.sha256))


def _with_base(recipe: Recipe, base: HFBase, checkpoint: Checkpoint | None, job: Job) -> Recipe:
    """``recipe`` with the digest of the base's files, which a resumed recipe already has. All processes must call it.

    ValueError: the files have changed, or differ between hosts.
    """
    entries_of = partial(entries_of_hosts, job=job)
    if checkpoint is None:
        return replace(recipe, model=base.with_digest(entries_of))
    base.require_unchanged(entries_of)
    return recipe


def _fit(trainer: Trainer, reporter: Reporter, stop_requested: StopRequest) -> RunResult | Stopped:
    """Train in the run's folder to the last step, or until a signal: then save and stop."""
    recipe, run_dir = trainer.recipe, trainer.run_dir
    parameters = _count(trainer.model)
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    for what, choice in trainer.kernels().items():
        reporter.say(f"{what}: {choice.name}, {choice.reason}")
    if trainer.lacks_bf16:
        reporter.say("precision: fp32, because this CPU has no instructions for bf16")
    job = trainer.job
    where = trainer.device.type if job.is_alone else f"{job.world_size} x {trainer.device.type}"
    of_which = "" if recipe.lora is None else f", {trained:,} of them trained,"
    reporter.say(
        f"{recipe.name}: {parameters:,} parameters{of_which} on {where}, {recipe.train.steps} steps, {run_dir}"
    )
    metrics = MetricsWriter(run_dir, _trackers(trainer, reporter)) if job.is_first else None
    try:
        evaluation = trainer.fit(metrics, reporter, stop_requested)
        if metrics is not None:
            metrics.sync()
        if evaluation is None:
            trainer.save_if_needed()
            reporter.say(
                f"stopped after step {trainer.step} of {recipe.train.steps} and saved; "
                f"go on with: tilemoe train --resume {run_dir}"
            )
            return Stopped(stop_requested.number)
        return _finish(trainer, evaluation, parameters, reporter)
    except (Exception, KeyboardInterrupt) as error:
        trainer.keep_save()  # whose thread Python would wait for at its exit, too, but no longer as the folder's owner
        # Nobody reads the output any more: save the steps done, which only a process without a job can do by itself.
        if isinstance(error, BrokenPipeError) and metrics is not None and job.is_alone:
            metrics.sync()
            trainer.save_if_needed()
        raise
    finally:
        if metrics is not None:
            metrics.close()


def _trackers(trainer: Trainer, reporter: Reporter) -> list[Tracker]:
    """The trackers that the recipe asks for and that are installed."""
    recipe, run_dir, first_step = trainer.recipe, trainer.run_dir, trainer.step + 1
    found: list[Tracker | None] = []
    if recipe.train.tensorboard:
        found.append(_if_installed(lambda: TensorBoard(run_dir, first_step), "TensorBoard files", "log", reporter))
    if recipe.train.wandb:
        found.append(_if_installed(lambda: WandB(run_dir, recipe), "Weights & Biases", "wandb", reporter))
    return [tracker for tracker in found if tracker is not None]


def _prepare(recipe: Recipe, checkpoint: Checkpoint | None, reporter: Reporter, cache_dir: Path | None) -> Prepared:
    """The token shards, checked against the checkpoint's data."""
    reporter.say(f"data: {recipe.data.named}, tokenizer {recipe.data.tokenizer}")
    # Use the checkpoint's copy of the tokenizer: the file that the recipe names may be gone.
    tokenizer = recipe.data.tokenizer if checkpoint is None else checkpoint.tokenizer_spec
    try:
        data = prepare_data(recipe.data, tokenizer, cache_dir)
    except (ValueError, OSError):
        if checkpoint is not None and not checkpoint.path.exists():  # with its copy of the tokenizer
            raise ValueError(
                f"train.out_dir {checkpoint.path.parent}: another process has trained in it and deleted "
                f"{checkpoint.path.name}; run the same command again when that process has ended"
            ) from None
        raise
    tokens = f"{data.train.num_tokens:,} training and {data.heldout.num_tokens:,} held-out tokens"
    reporter.say(f"data: {tokens}, {data.files}")
    for note in data.notes:
        reporter.say(f"data: {note}")
    parts = data.train.parts if isinstance(data.train, Mixture) else (data.train,)
    packed = [part for part in parts if isinstance(part, PackedDocuments)]
    if packed:
        full = sum(part.places for part in packed) / sum(part.num_windows * part.seq_len for part in packed)
        reporter.say(f"data: {data.train.num_targets:,} tokens to learn, {full:.1%} of the packed sequences filled")
    require_prompt(recipe, data.tokenizer)
    if checkpoint is not None and checkpoint.state.data_fingerprint != data_fingerprint(data):
        raise CheckpointError(
            f"data.{recipe.data.named} is not the text that checkpoint {checkpoint.path} was trained on; "
            "restore that text, or start a new run in another train.out_dir"
        )
    return data


def settings_of_process(
    recipe: Recipe, checkpoint: Checkpoint | None, init_from: Path | None, data: Prepared, device: torch.device
) -> dict[str, Any]:
    """Everything that decides what this process computes and writes; must be equal in all processes of a job."""
    return {
        "tilemoe": f"{tilemoe.__version__}, source {digest_of_sources(_PACKAGE)[:12]}",
        "torch": torch.__version__,
        "the kind of device": device.type,
        **_without_places(recipe),  # each host may have its own paths
        "the digest of data.corpus": data_fingerprint(data),
        "lora.base_dtype": None if recipe.lora is None else recipe.lora.base_dtype,
        "--init-from": None if init_from is None else str(init_from),
        "the checkpoint to go on from": None if checkpoint is None else checkpoint.path.name,
    }


@contextlib.contextmanager
def _owned(run_dir: Path) -> Iterator[None]:
    """Make and lock ``run_dir`` for this process; within the block an OSError becomes a ValueError with the fix."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with owned_folder(run_dir):
            yield
    except BlockingIOError as error:
        raise ValueError(
            f"train.out_dir {run_dir}: another process is training in it; wait, or choose another --train.out-dir"
        ) from error
    except BrokenPipeError:  # comes from standard output, not from the folder
        raise
    except OSError as error:
        named = os.fsdecode(error.filename or "")
        path = named if os.path.dirname(named) else run_dir / named  # `shutil.rmtree` names a file by its last part
        raise ValueError(
            f"train.out_dir {path}: cannot be used ({error.strerror or error}); make room or correct its permissions "
            "and go on with --resume, or choose another --train.out-dir"
        ) from error


def _enter(run_dir: Path, trainer: Trainer, checkpoint: Checkpoint | None, reporter: Reporter) -> None:
    """Load ``checkpoint``, or what came after it, into the trainer; clear the run's folder of what is newer."""
    if checkpoint is None and list_checkpoints(run_dir):
        raise ValueError(
            f"train.out_dir {run_dir} holds checkpoints, perhaps of a run that began meanwhile; once it has ended, the "
            "same command with --resume auto goes on from the newest, or choose another --train.out-dir"
        )
    require_own(trainer.recipe, 0 if checkpoint is None else checkpoint.state.step)
    if checkpoint is not None:
        checkpoint = _newest(run_dir, trainer, checkpoint, reporter)
        trainer.load(checkpoint)
    if not trainer.job.is_first:
        return
    clean_stale(run_dir)
    for path in list_checkpoints(run_dir, after=trainer.step):  # kept, but no longer the run's
        path.rename(aside_of(path))
    truncate_metrics(run_dir / METRICS_FILE, trainer.step)


def _newest(run_dir: Path, trainer: Trainer, checkpoint: Checkpoint, reporter: Reporter) -> Checkpoint:
    """``checkpoint`` or, if it was the newest, what another process has written since. ValueError: it was not."""
    names = [path.name for path in list_checkpoints(run_dir, after=checkpoint.state.step)]
    names = objects_of_processes(names, trainer.job)[0]  # other hosts may see an older list
    if checkpoint.newer.issuperset(names):
        return checkpoint
    found = open_checkpoint(run_dir / names[-1])
    if checkpoint.newer or found.state.data_fingerprint != checkpoint.state.data_fingerprint:
        raise ValueError(
            f"train.out_dir {run_dir}: another process has written {names[-1]} in it since {checkpoint.path.name} was "
            "opened; run the same command again when that process has ended"
        )
    require_resumable(trainer.recipe, found, trainer.job.world_size)
    reporter.say(f"note: going on from {found.path}, which another process has written meanwhile")
    return found


def _count(model: nn.Module) -> int:
    """The number of parameters; a weight stored in 4 bits counts two values per byte of codes, and no scales."""
    stored = {name: 2 * name.endswith("_codes") for _, names in packed_weights(model).values() for name in names}
    return sum(stored.get(name, 1) * parameter.numel() for name, parameter in model.named_parameters())


def _finish(trainer: Trainer, evaluation: Evaluation, parameters: int, reporter: Reporter) -> RunResult:
    """Make plot and sample while the last checkpoint is written; write result.json after it, and again at the end."""
    recipe, run_dir, phases = trainer.recipe, trainer.run_dir, trainer.phases
    plot, sample = None, None

    def make_result() -> Callable[[], None]:
        if trainer.job.is_first:
            require_own(recipe, trainer.step)  # other people's files may have come since the first step
        of_processes = objects_of_processes(phases.rounded(), trainer.job)
        result = _result(trainer, evaluation, parameters) | {"phases": of_processes}

        def write() -> None:
            write_atomic(run_dir / RESULT_FILE, (json.dumps(result, indent=2) + "\n").encode())

        return write if trainer.job.is_first else lambda: None

    trainer.when_saved(make_result())  # even if something below fails
    if trainer.job.is_first and recipe.train.plot:
        make = partial(_unless_it_fails, lambda: draw(run_dir, recipe.name), "plot", reporter)
        plot = _if_installed(make, "plot", "plot", reporter)
        phases.end("plot")
    if recipe.train.sample_tokens:
        sample = _unless_it_fails(lambda: _sample(trainer), "sample", reporter)
    phases.end("sample")
    trainer.finish_save()
    make_result()()
    return RunResult(evaluation, sample, plot)


def draw(run_dir: Path, title: str) -> Path:
    """Draw ``run_dir``'s metrics into ``plot.png``; returns its path. ModuleNotFoundError: matplotlib is missing."""
    target, records = run_dir / PLOT_FILE, list(read_metrics(run_dir / METRICS_FILE))
    try:
        drawn = png(run_figure(records, title))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:  # records may hold anything
        raise ValueError(f"{METRICS_FILE} cannot be drawn ({type(error).__name__}: {told(error)})") from error
    write_atomic(target, drawn)
    return target


def _unless_it_fails(make: Callable[[], Made], what: str, reporter: Reporter) -> Made | None:
    """The result of ``make``; None if it fails, which is reported: a finished run does not fail for it."""
    try:
        return make()
    except (OSError, ValueError) as error:
        reporter.say(f"no {what}: {error}")
        return None


def _sample(trainer: Trainer) -> str:
    """The continued prompt; all processes of a job must call it."""
    settings = trainer.recipe.train
    lora = trainer.recipe.lora
    # Embeddings are in fp32 and frozen matrices in bf16: without autocast their product would fail.
    is_mixed = lora is not None and lora.storage == "dense" and lora.base_dtype == "bfloat16"
    with trainer.autocast() if is_mixed else contextlib.nullcontext():
        return continue_text(
            trainer.model,
            trainer.data.tokenizer,
            settings.sample_prompt,
            settings.sample_tokens,
            temperature=_SAMPLE_TEMPERATURE,
            top_k=_SAMPLE_TOP_K,
            seed=settings.seed,
        ).text


def _result(trainer: Trainer, evaluation: Evaluation, parameters: int) -> dict[str, Any]:
    """The content of result.json."""
    recipe, device = trainer.recipe, trainer.device
    return {
        "heldout_nats_per_byte": evaluation.nats_per_byte,
        "heldout_nats_per_token": evaluation.nats_per_token,
        "heldout_tokens": evaluation.tokens,
        "training_tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "seconds_of_saves": [round(seconds, 3) for seconds in trainer.seconds_of_saves],
        "parameters": parameters,
        "flops_per_token": recipe.flops_per_token(),
        "recipe": to_dict(recipe),
        "versions": {"tilemoe": tilemoe.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "kernels": {what: {"name": choice.name, "reason": choice.reason} for what, choice in trainer.kernels().items()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}",
        "processes": trainer.job.world_size,
        "threads": torch.get_num_threads(),
        "commit": git_commit(),
    }


def _if_installed(make: Callable[[], Made], what: str, extra: str, reporter: Reporter) -> Made | None:
    """The result of ``make``; None if a package that it needs is missing, which is reported."""
    try:
        return make()
    except ImportError:
        reporter.say(f"no {what}: pip install 'tilemoe[{extra}]'")
        return None


def git_commit() -> str | None:
    """The commit of the checkout this package runs from; None when it is installed, or git is missing."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()
