"""A corpus for all kinds of fault."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Text, in a folder of its own whose parent is free for what is made of it; the user's cache stays as it is."""
    folder = tmp_path_factory.mktemp("made") / "corpus"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEMOE_CACHE", str(folder.parent / "user-cache"))
        yield write_corpus(folder, 0)
