"""The text that results/ways.jsonl was trained on: sources of the packages in ways_text.txt, as .jsonl files.

    python -m pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \\
        --require-hashes -r benchmarks/ways_text.txt -d WHEELS
    python benchmarks/ways_text.py WHEELS FOLDER

Left out: generated files, data in Python's syntax, and files of which most lines were in those before; a package gives
`MOST_OF_A_PACKAGE` characters at most, so that none prevails. The same wheels give the same bytes.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

MOST_OF_A_PACKAGE, FEWEST, MOST, FILES = 5_000_000, 300, 400_000, 16  # characters; of a file
GENERATED = re.compile("generated|do not edit", re.IGNORECASE)


def is_written(text: str) -> bool:
    """Whether a person wrote it, as far as its length, its beginning, its longest line and its digits tell."""
    digits, longest = sum(map(str.isdigit, text)), max(map(len, text.split("\n")))
    return FEWEST < len(text) < MOST and not GENERATED.search(text[:1500]) and longest < 1000 and digits < len(text) / 7


def texts(wheels: Path) -> Iterator[str]:
    known: set[bytes] = set()  # lines, by hash
    for path in sorted(wheels.glob("*.whl")):
        with ZipFile(path) as wheel:
            names, taken = [name for name in wheel.namelist() if name.endswith(".py")], 0
            for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):  # from all folders
                text = wheel.read(name).decode("utf-8", "replace").replace("\r\n", "\n")
                if "\N{REPLACEMENT CHARACTER}" in text or not is_written(text):
                    continue
                lines = {hashlib.blake2b(line.strip().encode(), digest_size=8).digest() for line in text.split("\n")}
                if taken + len(text) < MOST_OF_A_PACKAGE and len(lines - known) > len(lines) / 2:
                    known |= lines
                    taken += len(text)
                    yield text


def write(found: list[str], folder: Path) -> None:
    folder.mkdir()
    for part in range(FILES):
        here = found[len(found) * part // FILES : len(found) * (part + 1) // FILES]
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in here)
        (folder / f"{part:02}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    found = list(texts(Path(sys.argv[1])))
    write(found, Path(sys.argv[2]))
    print(f"{len(found)} files, {sum(map(len, found))} characters")
