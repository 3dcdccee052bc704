"""torch.distributed.checkpoint's ``.metadata`` without its pickle's powers: only its own types come out of it.

Its reader unpickles whatever the file says, and again what the file calls bytes. Neither happens here.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

METADATA_FILE = ".metadata"
_OF_METADATA = (
    "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ADMITTED = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in _OF_METADATA),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),  # looks a layout up by its name
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    }
)
_FIX = "do not use this checkpoint unless you know who made it"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ADMITTED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_metadata(folder: Path) -> Metadata:
    """What the file says, checked: tensors alone, each part of one within a file of the folder.

    Raises:
        ValueError: it asks for other types, or says what cannot be; the message names the file and what was refused.
    """
    path = folder / METADATA_FILE
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        _require_sound(folder, metadata)
    except MemoryError:
        raise
    except Exception as error:  # bytes that are no such pickle fail in any way
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"{path} is refused: {reason}; {_FIX}") from error
    assert isinstance(metadata, Metadata)
    return metadata


def _require_sound(folder: Path, metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise TypeError("it is no metadata of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name!r} is no tensor")  # the reader would unpickle it
        if not isinstance(entry.size, torch.Size) or not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"{name} has no shape and dtype")
    if not isinstance(metadata.storage_data, dict):
        raise TypeError("it does not say where the tensors are")
    for index, part in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(part, _StorageInfo) or part.transform_descriptors:
            raise TypeError("a part of a tensor is none of a checkpoint's")
        _require_within(folder, part)


def _require_within(folder: Path, part: _StorageInfo) -> None:
    name, numbers = part.relative_path, (part.offset, part.length)
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError(f"{name!r} is no file of the folder")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"a part of {name} has the bounds {numbers}")
    if sum(numbers) > (folder / name).stat().st_size:
        raise ValueError(f"a part of {name} reaches past its end")


class MetadataReader(FileSystemReader):
    """torch's reader of tensors, with `read_metadata` for its metadata. ``tensors``: shape and dtype of each."""

    def __init__(self, folder: Path) -> None:
        """ValueError: as `read_metadata`."""
        super().__init__(str(folder))
        self.metadata = read_metadata(folder)
        # `read_metadata` has refused all else.
        self.tensors = cast(dict[str, TensorStorageMetadata], self.metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata
