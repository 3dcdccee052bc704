"""The ``tilemoe`` command: picks the subcommand and turns errors into one line.

Nothing here or in the subcommands' modules imports torch until a command really runs.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from tilemoe import __version__
from tilemoe.checks import told
from tilemoe.train.job.signals import heed_sigterm, sigterm_interrupts

# name -> (module with ``run(arguments)``, one line of help)
COMMANDS = {
    "train": ("tilemoe.cli.train", "train a model from a recipe; --resume goes on where a run stopped"),
    "eval": ("tilemoe.cli.evaluate", "held-out loss of a checkpoint or of a model of transformers"),
    "generate": ("tilemoe.cli.generate", "continue a prompt with a checkpoint or a model of transformers"),
    "export": ("tilemoe.cli.export", "write a checkpoint as a folder that transformers loads"),
    "verify": ("tilemoe.cli.verify", "check every byte of a checkpoint, of a run or of an exported folder"),
    "plan": ("tilemoe.cli.plan", "FLOPs, bytes, memory and time of a layer or a model, by arithmetic"),
    "bench": ("tilemoe.cli.bench", "times and memory of the layer, its kernels or a step, against other libraries"),
    "report": ("tilemoe.cli.report", "recorded results as Markdown, PNG and one HTML page"),
    "doctor": ("tilemoe.cli.doctor", "what is installed, which kernels serve which device and why, and a self-test"),
}


_USAGE = """\
usage: tilemoe COMMAND [options]

Train mixture-of-experts language models.

commands:
{commands}

options:
  -h, --help  this text; `tilemoe COMMAND --help` for a command's own
  --version"""


def usage() -> str:
    return _USAGE.format(commands="\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0, or 2 after a one-line error on stderr, or 130 or 143 after SIGINT or SIGTERM. A training run that one of these
    signals stopped, and that was saved, exits with the same status (SystemExit). A process of a job that SIGTERM ends
    prints nothing, because torchrun has said why.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a generated character must not end a run on an ASCII terminal
    given = list(sys.argv[1:] if arguments is None else arguments)
    atexit.register(gc.freeze)  # else Python's exit collects cycles in all of torch: 1.2 s after training, .2 s with it
    try:
        with sigterm_interrupts():
            _dispatch(given)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough; spare it Python's complaint at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError, RuntimeError, KeyboardInterrupt) as error:
        # torch has an error class for a GPU's memory (compared by name: importing torch is slow), none for the host's.
        is_memory = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
        if isinstance(error, RuntimeError) and not is_memory:
            raise  # a defect of ours, whose traceback is wanted
        if os.environ.get("TILEMOE_DEBUG") == "1":
            traceback.print_exc()
        status = 128 + (*error.args, signal.SIGINT)[0] if isinstance(error, KeyboardInterrupt) else 2
        is_of_job = "WORLD_SIZE" in os.environ
        if status != 128 + signal.SIGTERM or not is_of_job:  # torchrun sends SIGTERM to end the remaining processes
            # In one write: the processes of a job may print at the same time.
            kept = "; checkpoints written so far are intact" if given[:1] == ["train"] else ""
            message = f"interrupted{kept}" if isinstance(error, KeyboardInterrupt) else one_line(error)
            print(f"tilemoe: error: {message}\n", end="", file=sys.stderr, flush=True)
        if is_of_job:
            heed_sigterm()
        return status
    return 0


def _dispatch(arguments: list[str]) -> None:
    if not arguments:
        raise ValueError(f"no command; give one of {', '.join(COMMANDS)} (see tilemoe --help)")
    first, *rest = arguments
    if first in ("-h", "--help"):
        print(usage())
    elif first == "--version":
        print(f"tilemoe {__version__}")
    elif first in COMMANDS:
        import_module(COMMANDS[first][0]).run(rest)
    else:
        raise ValueError(f"unknown command {first!r}; give one of {', '.join(COMMANDS)} (see tilemoe --help)")


def one_line(error: BaseException) -> str:
    """An error's message on one line."""
    text = told(error)
    if isinstance(error, (MemoryError, RuntimeError)):
        return f"out of memory; lower data.batch_size, data.seq_len or the model's sizes ({text})"
    return text
