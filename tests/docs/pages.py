"""The code blocks of README and quick starts as commands, for the tests and for `newcomer.py`.

A block with a title is a file, the same as the one of that name in docs/quickstart. Blocks of sh are for bash, those of
Python for one process a page.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tilemoe.integrations import transformers as integration

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "quickstart"
BLOCK = re.compile(r'^```(\S+)(?: title="(\S+)")?\n(.*?)^```$', re.M | re.S)
SCRIPTS = {"train_folder.sh", "finetune.sh", "swap_experts.py", "two_processes.py", "one_gpu.py"}


class Block(NamedTuple):
    language: str
    title: str | None
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = [Block(*parts) for parts in BLOCK.findall(text)]
    assert 2 * len(found) == text.count("```"), f"{page.name} has a block without a language, or one that is not closed"
    return found


def commands_of(page: Path, folder: Path, *not_run: str) -> Iterator[tuple[str, ...]]:
    """Of a page, in order, its Python last; files are written to ``folder``.

    Lines of sh that begin with one of ``not_run`` are left out.
    """
    python = ""
    for language, title, text in blocks_of(page):
        assert language in ("sh", "python", "json"), f"{page.name} has a block of {language}, which nothing runs"
        if title:
            (folder / title).write_text(text, encoding="utf-8")
            assert title not in SCRIPTS or text == (PAGES / title).read_text(encoding="utf-8"), title
        elif language == "python":
            python += text
        elif lines := [line for line in text.splitlines() if not line.startswith(not_run)]:
            yield "bash", "-euo", "pipefail", "-c", "\n".join(lines)
    if python:
        yield "python", "-c", python


def save_model(folder: Path) -> None:
    """A model of transformers that NF4 can store, with its tokenizer: for a page that asks for the reader's own."""
    integration.register()
    model, tokenizer = runpy.run_path(str(ROOT / "examples" / "trl_sft.py"))["small_model"]()
    integration.unregister()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
