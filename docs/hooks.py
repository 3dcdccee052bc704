"""For mkdocs: pages link to files of the repository as a code host serves them; the site gets a copy of each.

A relative link that leaves docs/ is turned into one within the site. CONTRIBUTING.md and CHANGELOG.md become pages.
Fenced blocks of formulas, plain text in the files, are typeset.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
UNLISTED = InclusionLevel.NOT_IN_NAV
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
FORMULAS = re.compile(r"^```formula\n(.*?)^```$", re.M | re.S)
INDEXED = re.compile(r"([A-Za-z]\w*?'?)_(t\(r\)|[ret])(?!\w)")  # h_r, da'_r, dx_rows_r, x_t(r)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/, and every file that a page links to."""
    for name in OUTSIDE_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in list(files.documentation_pages()):
        for link in LINK.findall(Path(page.abs_src_path).read_text(encoding="utf-8")):
            target = linked(page, link)
            if target is not None and target.is_file() and files.get_file_from_path(place(target)) is None:
                files.append(File.generated(config, place(target), abs_src_path=str(target), inclusion=UNLISTED))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to the copies."""

    def inside(match: re.Match[str]) -> str:
        target = linked(page.file, match[0])
        if target is None:
            return match[0]
        here = os.path.dirname(page.file.src_uri)
        return os.path.relpath(place(target), here or ".")

    return FORMULAS.sub(typeset, LINK.sub(inside, markdown))


def typeset(block: re.Match[str]) -> str:
    """Lines of cells, two spaces or more apart, as a table with indices, transposes and inner products."""
    lines = [re.split(" {2,}", line) for line in block[1].splitlines()]
    rows = "".join(f"<tr>{''.join(f'<td>{formula(cell)}</td>' for cell in cells)}</tr>" for cells in lines)
    return f'<div class="formulas"><table class="formulas">{rows}</table></div>'


def formula(text: str) -> str:
    if re.fullmatch(r"[a-z]+_[a-z_]{3,}|combine", text):  # an operator's name
        return f"<code>{text}</code>"
    text = html.escape(re.sub(r"<([^<>]*)>", r"⟨\1⟩", text), quote=False)
    text = re.sub(r"sum over ([et])'s rows(?: r)? of", r"∑<sub>r of \1</sub>", text)
    return INDEXED.sub(r"<var>\1</var><sub>\2</sub>", text).replace("^T", "<sup>T</sup>")


def linked(page: File, link: str) -> Path | None:
    """What a link leads to where mkdocs would not find it: out of docs/, or from a page that lies outside."""
    if "://" in link or link.startswith(("#", "mailto:")):
        return None
    target = (Path(page.abs_src_path).parent / link).resolve()
    moved = DOCS not in Path(page.abs_src_path).parents
    return target if target.exists() and (moved or DOCS not in target.parents) else None


def place(target: Path) -> str:
    """Where the site has a file of the repository: its path below docs/, or below the root."""
    return (target.relative_to(DOCS) if DOCS in target.parents else target.relative_to(ROOT)).as_posix()
