"""Reads a job's tensors from torch.distributed.checkpoint's files without executing a pickle.

PyTorch's ``.metadata``, a pickle, is for other programs. Our manifest describes each tensor, by name::

    {"dtype": "float32", "shape": [4, 8], "chunks": [{"offsets": [0, 0], "sizes": [2, 8], "file": "__0_0.distcp",
     "offset": 0, "length": 1577}, ...]}

At ``offset`` of ``file`` begins an archive of ``length`` bytes, as torch.save writes it. Only the tensor's strides and
its bytes are taken from it.
"""

from __future__ import annotations

import itertools
import math
import operator
import pickletools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from tilemoe.files import open_regular

METADATA_FILE = ".metadata"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_MOST_DIMENSIONS = 8
_MOST_AROUND = 1 << 16  # bytes of an archive without the tensor's own: 1,517 with PyTorch 2.13
_ENTRY, _STORAGE = b"PK\3\4", b"archive/data/0"  # an archive entry's first bytes; the name of the tensor's entry
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})


class Chunk(NamedTuple):
    """The box of a tensor at ``offsets``, and the archive that holds it."""

    offsets: list[int]
    sizes: list[int]
    file: str
    offset: int
    length: int


def describe(metadata: Metadata) -> dict[str, Any]:
    """The manifest's description of the tensors that torch has written."""
    told: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        told[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": []}
        for chunk in entry.chunks:
            at = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            place = Chunk(list(chunk.offsets), list(chunk.sizes), at.relative_path, at.offset, at.length)
            told[name]["chunks"].append(place._asdict())
    return told


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a folder's files; indexing reads any box of it, or with ``()`` all, like a slice of safetensors."""

    folder: Path
    dtype: torch.dtype
    shape: list[int]
    chunks: list[Chunk]

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        starts = [side.start for side in box] or [0] * len(self.shape)
        ends = [side.stop for side in box] or self.shape
        out = torch.empty([end - start for start, end in zip(starts, ends, strict=True)], dtype=self.dtype)
        for chunk in self.chunks:
            lows = list(map(max, starts, chunk.offsets))
            highs = [min(end, o + n) for end, o, n in zip(ends, chunk.offsets, chunk.sizes, strict=True)]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                out[_box(lows, highs, starts)].copy_(self._read(chunk)[_box(lows, highs, chunk.offsets)])
        return out

    def _read(self, chunk: Chunk) -> Tensor:
        """The tensor of ``chunk``. ValueError: there is no such tensor in that place."""
        where, rank = f"{chunk.file} at byte {chunk.offset}", len(chunk.sizes)
        tensor = torch.empty(math.prod(chunk.sizes), dtype=self.dtype)
        with open_regular(self.folder / chunk.file) as file:
            file.seek(chunk.offset)
            head = file.read(min(chunk.length, _MOST_AROUND))
            named = head.find(_STORAGE)
            if named < 30 or not head[:4] == head[named - 30 : named - 26] == _ENTRY:
                raise ValueError(f"{where} is no tensor")
            start = named + len(_STORAGE) + int.from_bytes(head[named - 2 : named], "little")
            file.seek(chunk.offset + start)
            into = tensor.view(torch.uint8).numpy().data
            if start + tensor.nbytes > chunk.length or file.readinto(into) != tensor.nbytes:
                raise ValueError(f"{where} is cut short")
        described = head[30 + sum(struct.unpack("<HH", head[26:30])) : named]  # data.pkl, the first entry
        numbers: list[Any] = [said for code, said, _ in pickletools.genops(described) if code.name in _NUMBERS]
        strides = numbers[2 + rank :]  # after the storage's size, the offset in it and the shape
        last = sum((size - 1) * stride for size, stride in zip(chunk.sizes, strides, strict=True))
        if numbers[1 : 2 + rank] != [0, *chunk.sizes] or min(strides, default=0) < 0 or last >= tensor.numel():
            raise ValueError(f"{where} is another tensor")
        return tensor.as_strided(chunk.sizes, strides)


def _box(lows: Any, highs: Any, origin: Any) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for low, high, start in zip(lows, highs, origin, strict=True))


def open_tensors(folder: Path, bytes_of_file: Mapping[str, int], told: Any) -> dict[str, StoredTensor]:
    """The tensors that a manifest describes in ``told``; all must lie in the files of ``bytes_of_file``, by size.

    ValueError: the description is impossible.
    """
    try:
        tensors = {name: _checked(folder, name, entry, bytes_of_file) for name, entry in dict(told).items()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"its description of tensors is malformed ({type(error).__name__}: {error})") from error
    places = sorted((c.file, c.offset, c.length) for tensor in tensors.values() for c in tensor.chunks)
    for (file, offset, length), (next_file, next_offset, _) in itertools.pairwise(places):
        if file == next_file and offset + length > next_offset:
            raise ValueError(f"two parts of tensors share bytes of {file}")
    return tensors


def _checked(folder: Path, name: str, told: Any, bytes_of_file: Mapping[str, int]) -> StoredTensor:
    """The tensor that ``told`` describes. KeyError, TypeError: no description; ValueError: an impossible one."""
    dtype, shape = _DTYPES[told["dtype"]], _counts(told["shape"])
    chunks = [Chunk(**chunk) for chunk in told["chunks"]]
    for offsets, sizes, file, offset, length in chunks:
        needed, ends = math.prod(_counts(sizes)) * dtype.itemsize, map(operator.add, _counts(offsets), sizes)
        if not len(offsets) == len(sizes) == len(shape) or any(map(operator.gt, ends, shape)):
            raise ValueError(f"a part of {name} lies outside the tensor")
        if file not in bytes_of_file:
            raise ValueError(f"a part of {name} is in {file!r}, which the manifest does not list")
        if sum(_counts([offset, length])) > bytes_of_file[file] or not needed < length <= needed + _MOST_AROUND:
            raise ValueError(f"a part of {name} cannot be in bytes {offset}+{length} of {file}")
    is_whole = sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(shape)
    if not is_whole or len({tuple(chunk.offsets) for chunk in chunks}) < len(chunks):
        raise ValueError(f"the parts of {name} do not cover it exactly once")
    return StoredTensor(folder, dtype, shape, chunks)


def _counts(told: Any) -> list[int]:
    """``told`` itself. TypeError: it is no list of at most 8 whole numbers, all at least 0."""
    is_short = type(told) is list and len(told) <= _MOST_DIMENSIONS
    if not is_short or not all(type(number) is int and 0 <= number < 1 << 63 for number in told):
        raise TypeError("no list of sizes")
    return told
