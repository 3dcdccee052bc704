"""Walks the package: no pickle is read, no text run as code, no template applied unbounded, no link written through,
and no file opened that may be a pipe, or read whole whatever its size.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tilemoe

ROOT = Path(tilemoe.__file__).parent
MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))
# Readers of pickles, and modules with nothing else. Processes of a job send each other pickled objects by torch's
# collectives, which read no file.
READERS = {"pickle", "_pickle", "marshal", "shelve", "dbm", "dill", "cloudpickle", "joblib", "yaml"}
READERS |= {
    "torch.load",
    "torch.serialization",
    "torch.jit.load",
    "torch.hub",
    "torch.package",
    "numpy.load",
    "np.load",
}
READERS |= {
    f"torch.distributed.checkpoint.{name}"
    for name in ("load", "filesystem", "FileSystemReader", "state_dict_loader", "format_utils")
}
# By which torch.load takes experts in 4 bit, and no more: tests/integrations/test_hf_quantized_folders.py
ADMITS = {"integrations/quantized_weight.py": ["torch.serialization.add_safe_globals", "torch.serialization"]}
RUNNERS = {"eval", "exec", "__import__"}
# Ways to apply a template, and the one module that has them: it bounds steps and texts.
TEMPLATES = {"jinja2", "chat_template_utils", "apply_chat_template", "render_jinja_template", "mako", "chevron"}
BOUNDED = "data/bounded.py"
# Functions that write by a name alone, into a folder that they, or who calls them, have just made under a new name.
IN_NEW_FOLDERS = {
    "files.py": {"write_atomic"},
    "data/shards.py": {"append", "write_index"},
    "integrations/peft.py": {"save_adapter"},
    "models/huggingface.py": {"_write_json", "_write_shards"},
    "models/sums.py": {"write_sums"},
    "train/checkpoints/distributed.py": {"_problem", "require_shared"},
    "train/checkpoints/folder.py": {"publish"},
    "train/checkpoints/sharded_state.py": {"_write_safetensors"},
}
# Functions that read a file of the package or of the system, or one that a reader of their own has looked at.
BY_NAME = {
    "bench/record.py": {"_cpu_model", "rows"},
    "bench/report.py": {"_html"},
    "cli/doctor_checks.py": {"recorded_speeds"},
    "data/bounded.py": {"_serve"},
    "data/corpus.py": {"_open_binary"},
    "files.py": {"digest_of_sources", "open_regular"},
    "train/checkpoints/sharded_state.py": {"_free_bytes"},
    "train/config.py": {"load_recipe"},
    "train/progress.py": {"_age"},
}
# Modules that parse JSON which no file holds that a user edits: messages between processes, records, rows of a corpus,
# of which the last of two names counts as in other readers.
OWN_JSON = {"bench/record.py", "checks.py", "cli/doctor_checks.py", "data/bounded.py", "data/corpus.py"}
OWN_JSON |= {"train/job/collective.py", "train/job/watch.py"}
# Whoever runs it says where its figures and records go.
ASKED_FOR = ("bench/", "plots.py")
WRITERS = {"write_text", "write_bytes", "touch", "save_file", "save_model", "savefig"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def nodes(tree: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Each node with the name of the function around it."""
    for child in ast.iter_child_nodes(tree):
        yield child, function
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from nodes(child, child.name if is_function else function)  # type: ignore[attr-defined]


def readers(tree: ast.AST) -> list[str]:
    """What of a module reads pickles or runs text."""
    found = []
    for node, _ in nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        found += [name for name in names if any(f"{name}.".startswith(f"{reader}.") for reader in READERS)]
        if isinstance(node, ast.Name) and node.id in RUNNERS:
            found.append(node.id)
        if isinstance(node, ast.Call) and dotted(node.func) == "compile":
            found.append("compile")
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            found.append(node.arg)
    return found


def renderers(tree: ast.AST) -> list[str]:
    """What of a module may apply a template."""
    found = []
    for node, _ in nodes(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in TEMPLATES]
        elif isinstance(node, ast.ImportFrom):
            found += [alias.name for alias in node.names if {*str(node.module).split("."), alias.name} & TEMPLATES]
        elif isinstance(node, ast.Attribute) and node.attr in TEMPLATES:
            found.append(node.attr)
    return found


def parses(tree: ast.AST) -> bool:
    """Whether a module parses JSON by itself, not by `tilemoe.checks.parse_json`."""
    return any(
        isinstance(node, ast.Attribute) and dotted(node) in ("json.loads", "json.load") for node, _ in nodes(tree)
    )


def openers(tree: ast.AST) -> list[tuple[str, str]]:
    """The functions of a module that read a file by its name alone, and how: it may be a pipe, or endless."""
    found = []
    for node, function in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            modes = {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
            is_method = isinstance(node.func, ast.Attribute)
            is_open = name == "open" and (modes & {"r", "rb", "rt"} or (is_method and not modes and not node.args))
            if is_open or (is_method and name in ("read_text", "read_bytes")):
                found.append((function, name))
    return found


def writers(tree: ast.AST) -> list[tuple[str, str]]:
    """The functions of a module that open for writing, make or fill a file wherever its name leads, and how."""
    found = []
    for node, function in nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        name, words = dotted(node.func).rpartition(".")[2], {word.arg for word in node.keywords}
        name = node.func.attr if isinstance(node.func, ast.Attribute) else name
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        modes += [
            word.value.value for word in node.keywords if word.arg == "mode" and isinstance(word.value, ast.Constant)
        ]
        is_open = name == "open" and any(set(mode) <= set("rwxabt+") and set(mode) & set("wa+x") for mode in modes)
        if (is_open and "opener" not in words) or name in WRITERS:
            found.append((function, name))
    return found


def test_every_module_keeps_the_rules() -> None:
    for module in MODULES:
        tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
        assert readers(tree) == ADMITS.get(module, []), f"{module} reads a pickle, or runs text"
        assert parses(tree) == (module in OWN_JSON), f"{module} parses JSON in which a name may be there twice"
        assert bool(renderers(tree)) == (module == BOUNDED), f"{module} applies a template without bounds"
        assert {function for function, _ in openers(tree)} == BY_NAME.get(module, set()), f"{module} opens by a name"
        if not module.startswith(ASKED_FOR):
            found = {function for function, _ in writers(tree)}
            assert found == IN_NEW_FOLDERS.get(module, set()), f"{module} writes in place, and may follow a link"


def test_the_walk_sees_them() -> None:
    """So that it does not pass because it looks for nothing."""
    for line in ("from pickle import load", "torch.load(f)", "f = exec", "g(f, weights_only=True)", "compile(t, n, m)"):
        assert readers(ast.parse(line)), line
    assert not readers(
        ast.parse("import pickletools, torch\nmodel.eval()\ntorch.compile(f)\nre.compile(t)\njson.load(f)")
    )
    assert parses(ast.parse("json.loads(t)"))
    for line in ("from jinja2 import Template", "tokenizer.apply_chat_template(m)"):
        assert renderers(ast.parse(line)), line
    for line in ("open(p, 'rb')", "p.open('rb')", "p.open()", "p.read_text()", "(a / b).read_bytes()"):
        assert openers(ast.parse(f"def f():\n  {line}"))[0][0] == "f", line
    assert not openers(ast.parse("open(p, 'wb')\nread_text(p)\nopen(p, 'r+b', opener=o)"))
    for line in ("open(p, 'w')", "p.open('ab')", "(a / b).open(mode='r+')", "p.write_text(t)", "save_file(t, p)"):
        assert writers(ast.parse(f"def f():\n  {line}"))[0][0] == "f", line
    assert not writers(ast.parse("open(p, 'w', opener=never_a_link)\np.open('rb')\nopen(p)"))
