"""Renders chat templates, which anybody may have written, with transformers in a subprocess of limited time and memory.

Jinja's sandbox keeps a template from touching the process, but not from looping or growing. So the system ends the
subprocess when it exceeds its CPU time, and limits its memory. This file is also the subprocess' program: it reads the
arguments of a rendering and writes the result, one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

_SECONDS, _MEMORY = 1.0, 2 << 30  # limits of a rendering: CPU time, and bytes
_LONGEST = 1 << 17  # characters of a template: the known ones have up to 30,000
_GROWTH = 8  # most bytes of an answer for each of the messages, beside the `_LONGEST` of a template
_TOO_MUCH = "rendering it needs too much time or memory, or makes too long a text"
# The subprocess imports from this process' sys.path, not from the current folder.
_PROGRAM = "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); runpy.run_path(sys.argv[2], {}, '__main__')"


class Renderer:
    """A chat template. ValueError: it is too long."""

    def __init__(self, source: str) -> None:
        if len(source) > _LONGEST:
            raise ValueError(f"the template has more than {_LONGEST:,} characters")
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None

    def render(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False, **tokens: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans that ``{% generation %}`` marks in it. ValueError: it fails, or exceeds a limit."""
        given = {"conversations": [messages], "chat_template": self._source, **tokens}
        asked = json.dumps(given | {"add_generation_prompt": add_generation_prompt}).encode() + b"\n"
        if self._process is None:
            self._process = _started()
            weakref.finalize(self, _end, self._process)
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None, "a pipe"
        assert answers is not None, "a pipe"
        said = b""
        with contextlib.suppress(BrokenPipeError):
            to.write(asked)
            to.flush()
            said = answers.readline(_LONGEST + _GROWTH * len(json.dumps(messages)))
        if not said.endswith(b"\n"):
            _end(self._process)
            self._process = None  # the next rendering begins anew
            raise ValueError(_TOO_MUCH)
        answer = json.loads(said)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"], [(first, end) for first, end in answer["marked"]]


def _started() -> subprocess.Popen[bytes]:
    """The subprocess, in its own session so that Ctrl-C does not reach it; it ends when its input ends."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), str(Path(__file__))],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError), process:  # ignore unread input, and wait for its end
        pass


def _serve() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action ends the process
    with contextlib.suppress(OSError, ValueError):  # only Linux reports and limits it
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, now + _MEMORY))
    for line in sys.stdin.buffer:
        given = json.loads(line)
        try:
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)
            texts, marked = render_jinja_template(**given, return_assistant_tokens_mask=True)
            answer = {"text": texts[0], "marked": marked[0]}
        except MemoryError:
            answer = {"error": _TOO_MUCH}
        except Exception as error:  # a template is a program, and may raise anything
            answer = {"error": str(error) or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
