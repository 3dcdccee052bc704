"""What a recipe says of a model of transformers' own class, on which a run trains adapters. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tilemoe.checks import require_fields, require_text
from tilemoe.models.families import sizes_from_hf
from tilemoe.models.folder import CONFIG_FILE, read_settings
from tilemoe.models.hf_config import Unimplemented, config_from_hf, number
from tilemoe.models.sizes import ModelSizes
from tilemoe.models.sums import Entries, canonical, file_entries, require_listed

_NO_LIMIT = 1 << 20  # tokens of a sequence, for a class of recurrent layers, which has no limit


@dataclass(frozen=True)
class HFBase:
    """A model that `DecoderLM` does not implement, in a folder of transformers.

    Attributes:
        folder: where its files are, which no checkpoint holds.
        model_type: config.json's.
        vocab_size, max_seq_len: of its text model.
        sha256: of its config.json and weights, by which a run finds the same base again; empty before one has begun.

    ValueError: a size is out of range, or a text is empty.
    """

    folder: str  # of the base; another place of the same files
    model_type: str
    vocab_size: int
    max_seq_len: int
    sha256: str = ""

    def __post_init__(self) -> None:
        require_fields("model.", self, at_least={"vocab_size": 1, "max_seq_len": 1})
        for name in ("folder", "model_type"):
            require_text(f"model.{name}", getattr(self, name))

    @property
    def moe(self) -> None:
        """None: no setting of its layers can be changed."""

    def sizes(self) -> ModelSizes:
        """The model's sizes. ValueError: the folder is not there, or the planner does not know the family."""
        return sizes_from_hf(read_settings(Path(self.folder) / CONFIG_FILE))

    def with_digest(self, entries_of: Callable[[list[Path]], Entries] = file_entries) -> HFBase:
        """This base with the digest of all its files, which ``entries_of`` hashes.

        ValueError: a file differs from the folder's checksums.
        """
        folder = Path(self.folder)
        files = entries_of([folder / CONFIG_FILE, *folder.glob("*.safetensors")])
        require_listed(folder, files)
        return replace(self, sha256=hashlib.sha256(canonical(files)).hexdigest())

    def require_there(self) -> None:
        """ValueError if the folder is not there."""
        if not (Path(self.folder) / CONFIG_FILE).is_file():
            raise ValueError(
                f"the base of these adapters is not in {self.folder}; put it there, or a link to it, or resume with "
                "--model.folder where it is"
            )

    def require_unchanged(self, entries_of: Callable[[list[Path]], Entries] = file_entries) -> None:
        """ValueError as for `require_there`, or if the folder has another model. ``entries_of``: see `with_digest`."""
        self.require_there()
        if self.with_digest(entries_of) != self:
            raise ValueError(
                f"{self.folder} has another model than the one whose adapters these are; restore its files, or resume "
                "with --model.folder where they are"
            )


def why_base(folder: Path) -> str | None:
    """Why the model in transformers' folder needs its own class instead of `DecoderLM`; None: no reason is known."""
    try:
        config_from_hf(read_settings(folder / CONFIG_FILE))
    except ValueError as error:
        return str(error) if isinstance(error, Unimplemented) else None
    return None


def read_base(folder: Path) -> HFBase:
    """The base in a folder of which `why_base` gives a reason. ValueError: no weights, or a setting is missing."""
    data = read_settings(folder / CONFIG_FILE)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no *.safetensors; give a folder with a model in it")
    text = data["text_config"] if isinstance(data.get("text_config"), dict) else data
    length = number(text, "max_position_embeddings", int, _NO_LIMIT)
    return HFBase(str(folder), data["model_type"], number(text, "vocab_size", int), length)
