"""The training loop: one optimiser step, and the order in which a run trains, records, saves and evaluates.

A step's order is fixed, because resuming relies on it: train, record, checkpoint, evaluate. Everything after a
checkpoint depends on the checkpoint alone, so a resumed run repeats exactly what the interrupted run did.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.data import Mixture, Prepared
from tilemoe.data.shards import read_index
from tilemoe.integrations.hf_decoder import HFDecoder
from tilemoe.integrations.quantized_weight import filled_rank
from tilemoe.kernels.choose import Choice, choose_experts, choose_projections
from tilemoe.layers.experts import Experts, accumulate_grads
from tilemoe.layers.lora import LoRAExperts
from tilemoe.models.decoder import DecoderLM
from tilemoe.parallel.expert import rows_of_experts, rows_of_ranks
from tilemoe.parallel.gradients import clip_gradients
from tilemoe.parallel.model import begin_micro_batch, micro_batches
from tilemoe.perf.hardware import find_gpu
from tilemoe.routing.balance import sum_over_ranks
from tilemoe.routing.topk import NonFiniteLogitsError
from tilemoe.runtime.device import has_fast_gemm
from tilemoe.train.checkpoints.distributed import JobSaver, verified
from tilemoe.train.checkpoints.folder import Checkpoint, TrainState
from tilemoe.train.checkpoints.names import list_checkpoints
from tilemoe.train.checkpoints.pending import PendingCheckpoint, Saver
from tilemoe.train.checkpoints.sharded_state import is_shared
from tilemoe.train.config import Recipe
from tilemoe.train.datasets import device_batch, make_sampler
from tilemoe.train.evaluate import Evaluation, evaluate
from tilemoe.train.finite import find_non_finite, first_bad_output, worst_gradient
from tilemoe.train.job.collective import LATER_SECONDS, any_process, objects_of_processes, values_of_processes
from tilemoe.train.job.processes import ALONE, Job
from tilemoe.train.job.watch import Progress
from tilemoe.train.metrics import MetricsWriter
from tilemoe.train.optim import learning_rate, make_optimizer, set_learning_rate
from tilemoe.train.progress import Phases, Reporter, Speed, StepStats
from tilemoe.train.room import Room

GPU_TILE = 128  # rows of a tile in the GPU kernels' GEMMs
_ROOM = slice(3, 7)  # in a process' values: `Room.overflow`, and the most rows that any of its group received
_PER_LAYER = 9  # numbers per layer after `_ROOM`: those of `StepStats`, and the most rows that this process received
_SPEED_MEMORY = 0.9  # weight of the past in the moving average of a step's seconds


class NonFiniteLossError(ValueError):
    """The loss or the gradient became NaN or infinite; weights and checkpoints are those of the step before."""


class NonFiniteWeightsError(ValueError):
    """An update made a weight or an optimiser state NaN or infinite; it was not saved."""


class _Routed(NamedTuple):
    """Per micro-batch: expert rows after token rounding and (token, expert) pairs before it, both
    (micro-batches, layers, experts) int64, and the routers' entropy (micro-batches, layers) fp32.
    """

    rows: Tensor
    pairs: Tensor
    entropy: Tensor


class Trainer:
    """Trains one model: holds the model, its optimiser and the position in the data.

    Args:
        model: on ``device``, trained weights in fp32; a job's processes share it (`tilemoe.parallel`).
        job: this process and its share of every step's sequences; rank 0 writes the records.
        progress: counts how far this process has come, block by block.
        phases: records the seconds of each phase of this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: DecoderLM | HFDecoder,
        data: Prepared,
        device: torch.device,
        job: Job = ALONE,
        progress: Progress | None = None,
        phases: Phases | None = None,
    ) -> None:
        self.recipe, self.model, self.data, self.device, self.job = recipe, model, data, device, job
        self._progress, self.phases = progress or Progress(), phases or Phases()
        if not job.is_alone:
            for block in model.blocks:
                block.register_forward_pre_hook(lambda module, given: self._progress.mark())
            self._progress.names = {id(module): name for name, module in model.named_modules()}
        self.optimizer = make_optimizer(model, recipe.optim)
        self.sampler = make_sampler(data, recipe.data, recipe.train.seed, job)
        self.data_fingerprint = data_fingerprint(data)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._saved_step = -1
        self._pending: PendingCheckpoint | None = None
        self.seconds_of_saves: list[float] = []  # for which training waited, per save
        self._saver: Saver | None = None
        self._room = Room(model, device, job, say=lambda line: None)
        moe = recipe.model.moe
        self._tile = GPU_TILE if moe is None or moe.rounding is None else moe.rounding.tile
        self._flops = recipe.flops_per_token()
        self._peak = peak_flops(device, recipe.train.precision)
        self._frozen_router = recipe.lora is not None and not recipe.lora.train_router
        gathered_in_bf16 = is_shared(model) and recipe.parallel.param_dtype == "bfloat16"
        self._wants_autocast = recipe.train.precision == "bf16" and not gathered_in_bf16
        if self._keeps_sums():
            accumulate_grads(model)

    @property
    def run_dir(self) -> Path:
        return self.recipe.train.out_path

    def autocast(self) -> AbstractContextManager[object]:
        """Autocast to bf16; disabled on a CPU without bf16, and where FSDP gathers the weights in bf16."""
        enabled = self._wants_autocast and has_fast_gemm(self.device.type, torch.bfloat16)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)

    @property
    def lacks_bf16(self) -> bool:
        """Whether the run asks for bf16 but computes in fp32, because the CPU has no instructions for bf16."""
        return self._wants_autocast and not has_fast_gemm(self.device.type, torch.bfloat16)

    def kernels(self) -> dict[str, Choice[Any]]:
        """The kernels, with the reason, for each distinct shape of experts and for attention's projections in FP8."""
        dtype = torch.bfloat16 if self.recipe.train.precision == "bf16" and not self.lacks_bf16 else torch.float32
        found: dict[str, Choice[Any]] = {}
        for layer in self.model.modules():
            if isinstance(layer, Experts):
                widths = [layer.cfg.hidden_size, layer.cfg.intermediate_size]
                widths += [layer.rank] if isinstance(layer, LoRAExperts) else []
                choice = choose_experts(self.device, dtype, widths, layer.cfg.precision)
                precision = "fp8" if choice.impl.precision == "fp8" else str(dtype).removeprefix("torch.")
                found[f"experts, d={widths[0]}, n={widths[1]}, in {precision}"] = choice
        if isinstance(self.model, HFDecoder) and self.recipe.lora is not None:
            for d, n in sorted(self.model.expert_widths()):
                rank = filled_rank(self.recipe.lora.rank, self.device)
                choice = choose_experts(self.device, dtype, [d, n, rank])
                found[f"experts, d={d}, n={n}, in {str(dtype).removeprefix('torch.')}"] = choice
        if self.recipe.train.dense_precision == "fp8":
            found["attention's projections"] = choose_projections(self.device)
        return found

    def _keeps_sums(self) -> bool:
        """Whether expert gradients stay unreduced, in fp32, between micro-batches, so that wgrad can add to them."""
        parallel = self.recipe.parallel
        kept = parallel.between_micro_batches == "weights_and_gradients" and parallel.reduce_dtype == "float32"
        has_experts = any(isinstance(module, Experts) for module in self.model.modules())
        return has_experts and self.recipe.train.accumulation > 1 and (kept or not is_shared(self.model))

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimiser, random-number states, step and tokens; verify ``checkpoint`` while reading it."""
        state = checkpoint.state
        # This seed stays in force for a rank (or a GPU) that did not exist when the checkpoint was saved.
        seed_process(self.recipe.train.seed, self.job, state.step)
        with verified(checkpoint, self.job):
            checkpoint.load_training(self.model, self.optimizer)
        for name in filter(None, objects_of_processes(find_non_finite(self.model, self.optimizer), self.job)):
            checkpoint.refuse_non_finite(name)
        self.step, self.tokens, self.seconds = state.step, state.tokens, state.seconds
        self._saved_step = state.step

    def save(self) -> None:
        """Begin to write a checkpoint of the present step; all processes of a job must call it.

        Raises:
            NonFiniteWeightsError: in every process, before anything is written.
            CheckpointError: it cannot be written.
        """
        self.finish_save()
        self._require_finite_weights()
        place = (self.step, self.tokens, self.seconds, self.data_fingerprint, self.job.world_size)
        state = TrainState(self.recipe, *place)
        if self._saver is None:
            self._saver = Saver() if self.job.is_alone else JobSaver(self.recipe.train.timeout + LATER_SECONDS)
        self._pending = PendingCheckpoint(
            self.run_dir,
            state,
            self.model,
            self.optimizer,
            tokenizer=self.data.tokenizer,
            keep_last=self.recipe.train.keep_last,
            saver=self._saver,
        )
        self._saved_step = self.step
        self.seconds_of_saves.append(self.phases.end("saves"))

    def when_saved(self, action: Callable[[], object]) -> None:
        """Run ``action`` after the checkpoint that is being written (`finish_save` then raises its error), or now."""
        if self._pending is None:
            action()
        else:
            self._pending.then(action)

    def finish_save(self) -> None:
        """Wait until a checkpoint that is being written is published."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()
            self.seconds_of_saves[-1] += self.phases.end("saves")

    def keep_save(self) -> None:
        """`finish_save` for a process that fails with another error: errors of the checkpoint are dropped."""
        with suppress(Exception):
            self.finish_save()

    def train_step(self) -> StepStats:
        """Run one optimiser step over ``accumulation`` micro-batches; repeat its gradients while rows do not fit.

        Until all rows fit, only gradients and random numbers change.

        NonFiniteLossError: raised before the model or the optimiser changes. If a router's logits are not finite, only
        the process that computed them raises it.
        """
        train = self.recipe.train
        lr = learning_rate(self.step, train.steps, self.recipe.optim)
        set_learning_rate(self.optimizer, lr)
        self._progress.step = self.step + 1
        values, pairs = self._room.until_it_fits(
            self._gradients,
            f"step {self.step + 1}",
            lambda found: [row[_ROOM][:3] for row in found[0]],
            self.optimizer.zero_grad,
            forwards=train.accumulation,
        )
        self._require_finite(values)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if pairs.numel() and train.selection_bias_rate > 0 and not self._frozen_router:
            assert isinstance(self.model, DecoderLM), "the others' routers are frozen"
            self.model.update_selection_bias(pairs, train.selection_bias_rate)
        self.step += 1
        self.tokens += self.recipe.tokens_per_step * self.job.world_size
        means = [sum(column) / len(values) for column in zip(*values, strict=True)]
        layers, first = len(pairs), _ROOM.stop
        per_layer = [[round(v, 4) for v in means[first + i * layers :][:layers]] for i in range(_PER_LAYER - 1)]
        stats = StepStats(self.step, self.tokens, means[0], means[1], lr, values[0][2], *per_layer)
        if (capacity := self._room.rows) is not None:
            most_rows = [round(row[_ROOM][3]) for row in values]
            stats = replace(stats, capacity=capacity, most_rows=max(most_rows), repeats=self._room.repeats)
            own = values[self.job.rank][first + layers * (_PER_LAYER - 1) :]
            self._room.learn(list(map(round, own)), most_rows[self.job.rank])
        return stats

    def _gradients(self) -> tuple[list[list[float]], Tensor]:
        """Compute and clip the next step's gradients. Returns a row of values per process (losses, norm, `_ROOM`,
        `_PER_LAYER` numbers of each layer) and this process' pairs (layers, experts).
        """
        with self._logits_in(f"step {self.step + 1}"), micro_batches(self.recipe.parallel):
            loss, aux_loss, routed = self._accumulate()
        self._progress.mark()
        rows, pairs = routed.rows.sum(0), routed.pairs.sum(0)
        all_rows, all_pairs = sum_over_ranks(torch.stack([rows, pairs]))
        entropy = (routed.entropy.double() * routed.pairs.sum(2)).sum(0)  # weighted: micro-batches differ in padding
        norm = clip_gradients(self.model.parameters(), self.recipe.optim.grad_clip)
        rows_there = rows_of_experts(self.model, routed.rows)
        rows_of_each, rank = rows_of_ranks(self.model, rows_there)
        own = torch.stack([loss.double(), aux_loss.double(), norm.double()])
        most_rows = torch.cat([rows_of_each.flatten(), rows_of_each.new_zeros(1)]).amax(0, keepdim=True)
        of_layers = [
            *expert_load(all_rows),
            *rounding_changes(routed.rows, routed.pairs),
            _tile_waste(rows_there, self._tile),
            self.job.world_size * entropy / all_pairs.sum(1).clamp(min=1),
            expert_load(rows_of_each.sum(0))[0],
            rows_of_each[..., rank].amax(0),
        ]
        assert len(of_layers) == _PER_LAYER
        # The step's only device-to-host sync; the update then runs while the host launches the next step.
        found = torch.cat([own, self._room.overflow(), most_rows, *of_layers])
        return values_of_processes(found, self.job), pairs

    def _accumulate(self) -> tuple[Tensor, Tensor, _Routed]:
        """Gradients of the mean loss over all micro-batches; returns this process' loss, aux loss and routing.

        Gradients are summed over processes. The loss is a mean over all labels of the step, so each micro-batch is
        weighted by its number of labels. The auxiliary loss has the same weight in every micro-batch.
        """
        parts = self.recipe.train.accumulation
        shares = parts * self.job.world_size
        targets = self.sampler.num_targets(self.step * parts, parts)
        losses, aux_losses, routed = [], [], []
        for part in range(parts):
            self._progress.mark()
            batch = device_batch(self.sampler.batch(self.step * parts + part), self.device)
            begin_micro_batch(self.model, self.recipe.parallel, is_last=part == parts - 1)
            with self.autocast():
                out = self.model(batch.inputs, batch.labels, documents=batch.documents, token_mask=batch.token_mask)
            assert out.loss is not None
            loss = out.loss * (batch.num_targets * shares / targets)  # times 1.0 if all have as many labels
            ((loss + out.aux_loss) / shares).backward()
            losses.append(loss.detach())
            aux_losses.append(out.aux_loss.detach())
            routed.append((out.tokens_per_expert.long(), out.pairs_per_expert.long(), out.router_entropy))
        stacked = _Routed(*map(torch.stack, zip(*routed, strict=True)))
        return torch.stack(losses).mean(), torch.stack(aux_losses).mean(), stacked

    def _require_finite(self, values: list[list[float]]) -> None:
        for index, name in enumerate(("loss", "auxiliary loss", "gradient norm")):
            for rank, row in enumerate(values):
                if not abs(row[index]) < float("inf"):
                    whose = "" if self.job.is_alone or index == 2 else f" of rank {rank}"  # the norm is of all
                    what = f"the {name}{whose} became {row[index]}{self._origin()}"
                    raise NonFiniteLossError(f"{what} in step {self.step + 1}; {self._remedy()}")

    @contextmanager
    def _logits_in(self, where: str) -> Iterator[None]:
        """Turn NonFiniteLogitsError into NonFiniteLossError, which adds ``where`` it happened and the remedy."""
        try:
            yield
        except NonFiniteLogitsError as error:  # only this process is here: no collectives
            what = f"{str(error).partition(';')[0]}{self._origin()}"
            raise NonFiniteLossError(f"{what} in {where}; {self._remedy()}") from error

    def _origin(self) -> str:
        """Text: the module or gradient where values are first not finite, by computing gradients again; "" in a job."""
        if not self.job.is_alone:
            return ""
        self.optimizer.zero_grad(set_to_none=True)
        with first_bad_output(self.model) as found, suppress(NonFiniteLogitsError):
            self._accumulate()
        cause = f"output of {found[0]}" if found else f"gradient of {worst_gradient(self.model)}"
        return f", due to the {cause},"

    def _require_finite_weights(self) -> None:
        for rank, name in enumerate(objects_of_processes(find_non_finite(self.model, self.optimizer), self.job)):
            if name is not None:
                whose = "" if self.job.is_alone else f" of rank {rank}"
                raise NonFiniteWeightsError(
                    f"{name}{whose} is not finite after the update of step {self.step}, which is not saved; "
                    f"{self._remedy()}"
                )

    def _remedy(self) -> str:
        """Text for an error: the last checkpoint, and the settings to change."""
        self.keep_save()
        saved = list_checkpoints(self.run_dir)
        last = f"the last checkpoint is {saved[-1]}" if saved else "no checkpoint was saved yet"
        return f"{last}; lower optim.lr or optim.grad_clip, or raise optim.warmup_steps"

    def fit(
        self, metrics: MetricsWriter | None, reporter: Reporter, stop_requested: Callable[[], bool]
    ) -> Evaluation | None:
        """Train to the last step and evaluate on the whole held-out split; None if any process was told to stop before.

        metrics: None in all processes but the first.
        """
        train = self.recipe.train
        started, seconds_before = time.perf_counter(), self.seconds
        step_seconds, first_step = 0.0, self.step
        reporter.start(self.step, train.steps)
        self._room.say = reporter.say
        try:
            while not any_process(stop_requested(), self.job):
                if self._is_due(train.eval_every):
                    result = self._evaluate(metrics, reporter, stop_requested)
                    self.phases.end("evaluation")
                    if self.step == train.steps or result is None:
                        return result
                begun = time.perf_counter()
                stats = self.train_step()
                now = time.perf_counter()
                self.phases.end("steps" if self.step > first_step + 1 else "first step")
                self.seconds = seconds_before + now - started
                if self.step - first_step <= 2:  # the first step warms up: the second replaces its time
                    step_seconds = now - begun
                step_seconds += (1.0 - _SPEED_MEMORY) * (now - begun - step_seconds)
                speed = self._speed(step_seconds)
                if metrics is not None and self._is_due(train.log_every):
                    measured = {"seconds": self.seconds, "tokens_per_second": speed.tokens_per_second, "mfu": speed.mfu}
                    metrics.write("train", {**asdict(stats), **measured})
                reporter.update(stats, speed, (train.steps - self.step) * step_seconds)
                # Every process has written its part, so none has to wait.
                if self._pending is not None and not any_process(not self._pending.is_written, self.job):
                    self.finish_save()
                if self._is_due(train.save_every):
                    if metrics is not None:
                        metrics.sync()
                    self.save()
            return None
        finally:
            reporter.stop()

    def save_if_needed(self) -> None:
        """Save the present step unless it is saved already, and wait until its checkpoint is published."""
        if self._saved_step != self.step:
            self.save()
        self.finish_save()

    def _is_due(self, every: int) -> bool:
        """Whether an action of every ``every`` steps (0: never) is due; at the last step it always is."""
        return self.step == self.recipe.train.steps or bool(every and self.step and self.step % every == 0)

    def _evaluate(
        self, metrics: MetricsWriter | None, reporter: Reporter, stop_requested: Callable[[], bool]
    ) -> Evaluation | None:
        """Evaluate and record the result; after the last step on the whole split. None if stopped in between."""
        is_last = self.step == self.recipe.train.steps
        begun, what = time.perf_counter(), f"the evaluation after step {self.step}"
        with self._logits_in(what):
            result = evaluate(
                self.model,
                self.data.heldout,
                seq_len=self.recipe.data.seq_len,
                batch_size=self.recipe.data.batch_size,
                device=self.device,
                autocast=self.autocast,
                max_batches=0 if is_last else self.recipe.train.eval_batches,
                stop_requested=stop_requested,
                job=self.job,
                until_it_fits=partial(self._room.until_it_fits, what=f"a batch of {what}"),
            )
        if result is None:
            return None
        seconds = time.perf_counter() - begun
        if metrics is not None:
            metrics.write("eval", {"step": self.step, **asdict(result), "seconds": seconds})
        reporter.say(f"step {self.step}/{self.recipe.train.steps}  {result}")
        return result

    def _speed(self, step_seconds: float) -> Speed:
        tokens_per_second = self.recipe.tokens_per_step * self.job.world_size / step_seconds
        flops = self._flops and self._flops * tokens_per_second / self.job.world_size
        return Speed(tokens_per_second, self.job.world_size, flops / self._peak if self._peak and flops else None)


def seed_process(seed: int, job: Job, step: int) -> None:
    """Seed torch's random numbers (used for random rounding, say) from ``train.seed``, the world size, the rank and
    ``step``.
    """
    text = f"{seed} {job.world_size} {job.rank} {step}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))


def data_fingerprint(data: Prepared) -> str:
    """Digest of the tokens themselves; it does not depend on where their text and shards are kept."""
    if isinstance(data.train, Mixture):
        content = [read_index(part.directory)["splits"] for part in data.train.parts]
    else:
        content = read_index(data.train.directory)["splits"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The vendor's peak FLOP/s for dense GEMMs in ``precision``; None for a CPU or a GPU that is not in our table."""
    if device.type != "cuda":
        return None
    try:
        gpu = find_gpu(torch.cuda.get_device_name(device))
    except ValueError:
        return None
    return 1e12 * (gpu.bf16_tflops if precision == "bf16" else gpu.fp32_tflops)


def expert_load(counts: Tensor) -> Tensor:
    """Per MoE layer: maximum and 95th percentile of tokens per expert, both divided by the mean, and the number of
    experts without tokens; (layers, experts) -> (3, layers) fp64.
    """
    if not counts.numel():
        return counts.new_empty(3, 0, dtype=torch.float64)
    ascending, mean = counts.sort(1).values.double(), counts.double().mean(1).clamp(min=1e-9)
    p95 = ascending[:, math.ceil(0.95 * counts.shape[1]) - 1]  # by nearest rank
    return torch.stack([ascending[:, -1] / mean, p95 / mean, (counts == 0).sum(1).double()])


def rounding_changes(rows: Tensor, pairs: Tensor) -> Tensor:
    """Per MoE layer: pairs that token rounding dropped, and pairs that it added, each divided by all pairs;
    (micro-batches, layers, experts) each -> (2, layers) fp64.
    """
    if not rows.numel():
        return rows.new_empty(2, 0, dtype=torch.float64)
    added, total = rows - pairs, pairs.sum((0, 2)).clamp(min=1)
    return torch.stack([side.clamp(min=0).sum((0, 2)) / total.double() for side in (-added, added)])


def _tile_waste(rows: Tensor, tile: int) -> Tensor:
    """Per MoE layer: rows that pad each expert to a multiple of ``tile``, divided by the experts' rows;
    (micro-batches, layers, experts) -> (layers,) fp64.
    """
    if not rows.numel():
        return rows.new_empty(0, dtype=torch.float64)
    padding = -rows % tile
    return padding.sum((0, 2)).double() / rows.sum((0, 2)).clamp(min=1)
