"""Hashes of all that tilemoe computes, to show that a change of the code changes no bit of it.

    python benchmarks/golden.py --backend torch --write results/golden/torch-cpu.json
    python benchmarks/golden.py --backend triton --check results/golden/triton-interpreted.json
    python benchmarks/golden.py --backend hopper --check FILE --only 'large/.*bands' --verbose

A file holds a SHA-256 for each tensor of each case of `golden_cases`: outputs and every gradient, NaN as one pattern.
``--check`` computes them again, lists what differs and ends with 1 if anything does. Hashes hold on one kind of machine
and one release of PyTorch and Triton alone: the file's header names them, and ``--check`` warns where they differ.

``torch`` runs on the CPU, with one thread. ``triton`` and ``hopper`` run on a GPU, ``triton`` without one in Triton's
interpreter. On a GPU each case runs three times, first launched, then recorded, then replayed; a case whose bits do not
repeat is listed and not written. ``--part 3/8`` takes every eighth case: eight at once fill Triton's cache sooner.

The files in results/golden were made for the redesign. Other commits have changed bits on purpose since (adapters, the
gradient of normalised scores), so to compare two commits write a file at one and check it at the other.

A case that the package refuses by a ValueError is written as such. Any other error is listed, and ends with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import golden_cases
import golden_large
import torch
import torch.utils.deterministic
from golden_cases import BF16, FP16, FP32, FP64, Case
from golden_inputs import Source
from golden_runs import Found, Where
from torch import Tensor

from tilemoe.bench import record

BACKENDS = ("torch", "triton", "hopper")
ENVIRONMENT_OF_CPU = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
INTERPRET = "TRITON_INTERPRET"
REFUSED = "refused"
_POISON_BYTES = 1 << 30
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Hashes = dict[str, dict[str, str]]


def canonical(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, contiguous; every NaN is the same one."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full((), float("nan"), dtype=tensor.dtype).to(tensor.device), tensor)
    return tensor.view(_AS_INTEGERS[tensor.element_size()])


def digest(value: Tensor | str) -> str:
    """SHA-256 of dtype, shape and bits; text is its own."""
    if isinstance(value, str):
        return value
    found = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    found.update(canonical(value).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def same(one: Found, other: Found) -> bool:
    """Whether two runs of a case gave the same bits."""

    def equal(left: Tensor | str, right: Tensor | str) -> bool:
        if isinstance(left, str) or isinstance(right, str):
            return left is right or left == right
        return left.shape == right.shape and torch.equal(canonical(left), canonical(right))

    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


class Unrepeatable(Exception):
    """Two runs of a case differ."""


class Runner:
    """Runs cases of one backend on one device."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self.device = backend, device
        self.is_interpreted = backend != "torch" and device.type == "cpu"
        self.repeats = 3 if device.type == "cuda" else 1

    def cases(self) -> Iterator[Case]:
        if self.is_interpreted:
            yield from golden_cases.interpreted_cases()
            return
        if self.device.type == "cuda":
            yield from golden_large.gpu_cases()
            return
        yield from golden_cases.small_cases((FP32, FP16, BF16, FP64))
        yield from golden_large.middling_cases()

    def hashes(self, case: Case) -> dict[str, str]:
        """By tensor. Unrepeatable where two runs differ."""
        try:
            first = self._run(case)
        except ValueError as error:
            return {REFUSED: type(error).__name__}
        for _ in range(self.repeats - 1):
            if not same(first, self._run(case)):
                raise Unrepeatable(case.name)
        return {name: digest(value) for name, value in first.items()}

    def _run(self, case: Case) -> Found:
        self._poison()
        with self._settled(case), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's, of padding; the rounding's, of few tokens
            return case.run(Where(Source(case.name, self.device), self.backend))

    @contextmanager
    def _settled(self, case: Case) -> Iterator[None]:
        with ExitStack() as stack:
            if self.is_interpreted:
                from golden_seams import let_triton_serve_the_cpu

                stack.enter_context(let_triton_serve_the_cpu(case.by_descriptor))
            if self.device.type == "cuda" and "model/" in case.name:  # attention's own backward adds in any order
                stack.enter_context(deterministic(fill=False))
            torch.manual_seed(0)
            yield

    def _poison(self) -> None:
        """Leave NaN in memory that is handed out next. On a CPU the deterministic mode does so."""
        if self.device.type == "cuda":
            nan = partial(torch.full, fill_value=float("nan"), device=self.device, dtype=torch.bfloat16)
            _ = [nan((_POISON_BYTES // 2,)), *(nan((1 << size,)) for size in range(8, 20) for _ in range(4))]


@contextmanager
def deterministic(fill: bool) -> Iterator[None]:
    """PyTorch's own operators repeat. ``fill``: uninitialised memory is NaN, as in `tilemoe.testing.poisoned_memory`,
    which this file does not import: `golden_seams` alone names the package, so that older commits can be compared.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic  # a module whose attributes are properties: opaque to type checkers
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        settings.fill_uninitialized_memory = filled


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def header(backend: str, device: torch.device) -> dict[str, Any]:
    """Where hashes come from. All but the commit must agree for a comparison to mean anything."""
    provenance = record.provenance()
    found = {name: provenance[name] for name in ("commit", "python", "torch", "triton")}
    on_cpu = device.type == "cpu"
    found["machine"] = provenance["machine"] if on_cpu else provenance["gpu"]
    found["cpu_capability"] = torch.backends.cpu.get_cpu_capability() if on_cpu else None
    found |= {"backend": backend, "device": device.type, "interpreted": backend != "torch" and on_cpu}
    return found


def differences(old: Hashes, new: Hashes) -> list[str]:
    """One line for each case or tensor that is missing, extra or another."""
    lines = [f"{case}: missing" for case in sorted(old.keys() - new.keys())]
    lines += [f"{case}: extra" for case in sorted(new.keys() - old.keys())]
    for case in sorted(old.keys() & new.keys()):
        before, after = old[case], new[case]
        for name in sorted(before.keys() | after.keys()):
            if name not in after:
                lines.append(f"{case}: {name} is missing")
            elif name not in before:
                lines.append(f"{case}: {name} is extra")
            elif before[name] != after[name]:
                lines.append(f"{case}: {name} differs")
    return lines


def header_warnings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    fields = sorted((old.keys() | new.keys()) - {"commit"})
    return [
        f"warning: {field} was {old.get(field)!r} and is {new.get(field)!r}: the hashes need not agree"
        for field in fields
        if old.get(field) != new.get(field)
    ]


def compute(runner: Runner, chosen: list[Case], verbose: bool) -> tuple[Hashes, list[str]]:
    """(hashes, what went wrong, one line each)."""
    found: Hashes = {}
    problems: list[str] = []
    for case in chosen:
        start = time.perf_counter()
        try:
            found[case.name] = runner.hashes(case)
        except Unrepeatable:
            problems.append(f"{case.name}: does not repeat")
        except Exception as error:  # one case's fault must not hide the others
            text = " ".join(str(error).split())[:200]
            problems.append(f"{case.name}: {type(error).__name__}: {text}")
        if verbose:
            print(f"{time.perf_counter() - start:7.3f} s  {case.name}", flush=True)
    return found, problems


def select(cases: Iterator[Case], only: str, part: str) -> list[Case]:
    """Those whose name the pattern finds, and of these every ``of``-th from ``index`` on."""
    index, of = (int(number) for number in part.split("/"))
    every = list(cases)
    repeated = len(every) - len({case.name for case in every})
    assert not repeated, f"{repeated} cases share their names"
    return [case for case in every if re.search(only, case.name)][index::of]


def write(path: Path, head: dict[str, Any], found: Hashes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"header": head, "cases": found}, sort_keys=True, indent=0) + "\n", encoding="utf-8")


def check(path: Path, head: dict[str, Any], found: Hashes, args: argparse.Namespace, chosen: list[Case]) -> list[str]:
    """What differs from the file, of the cases that were chosen."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    for line in header_warnings(kept["header"], head):
        print(line)
    old: Hashes = kept["cases"]
    if args.only or args.part != "0/1":
        names = {case.name for case in chosen}
        old = {name: hashes for name, hashes in old.items() if name in names}
    return differences(old, found)


def summary(found: Hashes, problems: list[str], seconds: float) -> str:
    tensors = sum(len(hashes) for hashes in found.values())
    refused = [case for case, hashes in found.items() if REFUSED in hashes]
    listed = "".join(f"refused: {case}\n" for case in refused)
    counts = f"{len(found)} cases, {tensors} hashes, {len(refused)} refused, {len(problems)} problems"
    return f"{listed}{counts}, {seconds:.0f} s"


def again_in(environment: dict[str, str], arguments: list[str]) -> int:
    """Run this program anew: libraries read these variables when they are loaded."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    what.add_argument("--list", action="store_true", help="print the cases' names and compute nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cpu for torch, else a GPU if there is one")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of the cases' names, a regular expression")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th case, from the I-th on")
    parser.add_argument("--verbose", action="store_true", help="print each case's seconds")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    on_gpu = args.device == "cuda" or (args.device is None and args.backend != "torch" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    if args.backend == "hopper" and not on_gpu:
        raise SystemExit("--backend hopper needs a GPU: the interpreter does not run its kernels")
    wanted = {INTERPRET: "1" if args.backend != "torch" and not on_gpu else "0"}
    wanted |= {} if on_gpu else ENVIRONMENT_OF_CPU
    if any(os.environ.get(name, "0") != value for name, value in wanted.items()):
        return again_in(wanted, arguments)
    runner = Runner(args.backend, device)
    chosen = select(runner.cases(), args.only, args.part)
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    start = time.perf_counter()
    with ExitStack() as stack:
        if not on_gpu:
            stack.enter_context(one_thread())
            stack.enter_context(deterministic(fill=True))
        found, problems = compute(runner, chosen, args.verbose)
    head = header(args.backend, device)
    if args.write is not None:
        write(args.write, head, found)
    else:
        problems += check(args.check, head, found, args, chosen)
    print("\n".join([*problems, summary(found, problems, time.perf_counter() - start)]))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
