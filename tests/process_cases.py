"""A plugin of pytest: files whose tests run in another process, where each is a case of this session all the same.

Triton reads its switches when it is imported and keeps its driver, and a process in which other tests left threads is
not safely forked, so some tests need a process of their own. Such a file has ``pytestmark =
pytest.mark.process(NAME)``. One process of each name, started when the first of its files is collected, serves all of
them: a session of pytest that runs what it is told to, so that fixtures, marks and reports are pytest's own. Its
``test_x[a]`` is ``test_x[NAME-a]`` here; ``-k``, ``-x`` and ``--lf`` work as ever, and of the marks ``thorough``. A
file that is marked ``gpu`` too is collected in this process as well.

To debug one, be that process: ``TRITON_INTERPRET=1 TEST_PROCESS=interpreter pytest FILE -k CASE --pdb``.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

# "forks": of tests that fork. A copy waits for ever for a lock that a thread of another test held in that moment.
ENVIRONMENTS = {"interpreter": {"TRITON_INTERPRET": "1"}, "fake_driver": {}, "forks": {}}
PATIENCE_S = 600.0  # that a case, or the collection, may take
NAME, PIPE = "TEST_PROCESS", "TEST_PROCESS_PIPE"  # environment variables: which process this is; who commands it


@cache
def marks(file: Path) -> tuple[str, bool]:
    """The process that runs the tests of ``file``, empty: this one; and whether they are for a GPU too."""
    text = file.read_text("utf-8")
    for node in ast.parse(text).body if "pytest.mark.process" in text else ():  # it is not imported for that
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found = re.search(r"pytest\.mark\.process\('(\w+)'\)", value := ast.unparse(node.value))
            if found and found[1] != os.environ.get(NAME):
                return found[1], "pytest.mark.gpu" in value
    return "", False


class Ended(Exception):
    """The process is no more; the message ends with its output."""


class Process:
    """One process, started when it is asked something: anew after it ended."""

    _running: subprocess.Popen[bytes] | None = None

    def __init__(self, name: str, config: pytest.Config) -> None:
        self._name, self._config = name, config

    def ask(self, file: Path, *case: Any) -> Any:
        """What `Served` answers. Ended: the process did not live to answer, or took too long."""
        if self._running is None:
            self._start(file)
        try:
            self._pipe.send((file, *case))
            if self._pipe.poll(PATIENCE_S):
                return self._pipe.recv()
            why = f"no answer in {PATIENCE_S:g} s"
        except (EOFError, ConnectionError):
            why = "the process ended"
        code = self.stop()
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace")
        raise Ended(f"{why}, exit code {code}; its last lines:\n{lines[-10_000:]}")

    def _start(self, file: Path) -> None:
        root, (self._pipe, theirs) = self._config.rootpath, Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the process ends
        tests = (path for top in self._config.getini("testpaths") or ["."] for path in (root / top).rglob("test_*.py"))
        files = sorted({file, *(path for path in tests if marks(path)[0] == self._name)})
        environment = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        environment |= {**ENVIRONMENTS[self._name], NAME: self._name, PIPE: str(theirs.fileno())}
        self._running = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={root}", *files],
            env=os.environ | environment,
            cwd=root,
            pass_fds=[theirs.fileno()],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()

    def stop(self) -> int | None:
        """Its exit code; None where it does not run."""
        running, self._running = self._running, None
        if running is None:
            return None
        self._pipe.close()
        try:
            return running.wait(timeout=1)
        except subprocess.TimeoutExpired:
            running.kill()
            return running.wait()


_processes = pytest.StashKey[dict[str, Process]]()


def process_of(file: Path, config: pytest.Config) -> Process:
    name, processes = marks(file)[0], config.stash.setdefault(_processes, {})
    if name not in processes:
        processes[name] = Process(name, config)
        config.add_cleanup(processes[name].stop)
    return processes[name]


class Cases(pytest.File):
    """A file of tests that another process imports."""

    def collect(self) -> Iterator[Case]:
        try:
            lines, problem = process_of(self.path, self.config).ask(self.path)
        except Ended as ended:
            raise self.CollectError(str(ended)) from None
        if problem:
            raise self.CollectError(problem)
        for name, (line, thorough) in lines.items():
            function, bracket, parameters = name.partition("[")
            shown = f"{function}[{marks(self.path)[0]}{f'-{parameters}' if bracket else ']'}"
            case = Case.from_parent(self, name=shown, there=name, line=line)
            if thorough:
                case.add_marker(pytest.mark.thorough)
            yield case


class Case(pytest.Item):
    """One test of theirs; ``there``: its name in the other process."""

    def __init__(self, *, there: str, line: int, **given: Any) -> None:
        super().__init__(**given)
        self.there, self.line = there, line

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.line, self.name

    def runtest(self) -> None:
        raise NotImplementedError("it runs in another process: see `reports`")

    def reports(self, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Of what ran there; ``nextitem`` says which fixtures to keep."""
        process, following = process_of(self.path, self.config), None
        if isinstance(nextitem, Case) and process_of(nextitem.path, self.config) is process:
            following = nextitem.path, nextitem.there
        try:
            found = process.ask(self.path, self.there, following)
        except Ended as ended:
            yield pytest.TestReport(self.nodeid, self.location, {}, "failed", str(ended), "call")
            return
        for data in found:
            report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
            report.nodeid, report.location = self.nodeid, self.location
            yield report


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """In both processes: beside the module that pytest makes of it."""
    both = file_path.match("test_*.py") and all(marks(file_path))
    return Cases.from_parent(parent, path=file_path) if both else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    name, both = marks(module_path)
    return Cases.from_parent(parent, path=module_path) if name and not both else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not isinstance(item, Case):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    item.ihook.pytest_runtest_setup(item=item)  # of its folders: only what the next item shares stays
    for report in item.reports(nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_teardown(item=item, nextitem=nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class Served:
    """The other side: a session that has collected its files and runs of them what it is told to."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._pipe = config, Connection(int(os.environ.pop(PIPE)))
        self._problems: dict[Path, str] = {}
        self._reports: list[dict[str, Any]] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._problems[self._config.rootpath / report.nodeid] = report.longreprtext

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items: dict[Path, dict[str, pytest.Item]] = defaultdict(dict)
        for item in session.items:
            items[item.path][item.name] = item
        while True:
            try:
                file, *case = self._pipe.recv()
            except EOFError:
                return True
            if not case:
                lines = {
                    name: (item.location[1], item.get_closest_marker("thorough") is not None)
                    for name, item in items[file].items()
                }
                self._pipe.send((lines, self._problems.get(file, "")))
                continue
            item, following = items[file][case[0]], case[1]
            self._reports.clear()
            nextitem = following and items[following[0]][following[1]]
            item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            self._pipe.send(self._reports)


def pytest_configure(config: pytest.Config) -> None:
    if PIPE in os.environ:
        config.pluginmanager.register(Served(config))
