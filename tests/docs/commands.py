"""`tilemoe`, `python` and `torchrun` as copies of this process, which has imported what takes a new one seconds."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import processes
import torch
from copies import Copy
from helpers import HANGS

from tilemoe.cli.main import main

SERVER = "TEST_COMMANDS"  # an environment variable: where the process listens that copies itself
# What is found by a command's name: it says what it was given, and ends as the copy does.
CLIENT = f"""#!{sys.executable} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(os.environ["{SERVER}"])
    told = [os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]
    socket.send_fds(server, [json.dumps(told).encode()], [0, 1, 2])
    sys.exit(server.recv(9) != b"0")
"""


def run_by_copies(folder: Path, environment: dict[str, str], *command: str) -> str:
    """What a command prints in ``folder``; it must succeed. Those of `COMMANDS` that it starts are copies."""
    with tempfile.TemporaryDirectory() as made, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        for name in COMMANDS:
            Path(made, name).write_text(CLIENT)
            Path(made, name).chmod(0o755)
        server.bind(f"{made}/server")
        server.listen()
        environment = environment | {SERVER: f"{made}/server", "PATH": f"{made}:{environment['PATH']}"}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            started = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
            deadline, copies = time.monotonic() + HANGS, []
            while started.poll() is None and time.monotonic() < deadline:
                if select.select([server], [], [], 0.05)[0]:
                    connection, _ = server.accept()
                    with connection:
                        copies.append(Copy(partial(_serve, connection)))
            started.kill()
            for copy in copies:
                copy.wait(HANGS)
            for file in (out, err):
                file.seek(0)
            printed = out.read()
            assert started.wait() == 0, f"{command[-1]}\n{printed[-2000:]}\n{err.read()[-2000:]}"
    return printed


def _serve(connection: socket.socket) -> None:
    message, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
    name, arguments, folder, environment = json.loads(message)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ |= environment

    def run() -> object:
        torch.set_num_threads(1)  # PyTorch makes its pool anew in a copy; of threads that ask first, two may find none
        return COMMANDS[name](arguments)

    connection.send(str(Copy(run).wait()).encode())


def _python(arguments: list[str]) -> None:
    sys.argv, sys.path[:0] = arguments, [""]
    code = arguments[1] if arguments[0] == "-c" else Path(arguments[0]).read_text(encoding="utf-8")
    exec(compile(code, arguments[0], "exec"), {"__name__": "__main__"})


def _torchrun(arguments: list[str]) -> int:
    option, count, *rest = arguments
    assert option == "--nproc-per-node", arguments
    is_ours = rest[:2] == ["-m", "tilemoe"]
    return processes.torchrun(lambda: main(rest[2:]) if is_ours else _python(rest), int(count), 0)


COMMANDS: dict[str, Callable[[list[str]], object]] = {"tilemoe": main, "python": _python, "torchrun": _torchrun}
