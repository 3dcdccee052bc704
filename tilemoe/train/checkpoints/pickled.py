"""Parses ``.metadata`` of a job's older checkpoint, a pickle, into plain values; nothing is imported or called.

Only those opcodes and names are accepted with which torch.distributed.checkpoint describes its tensors.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilemoe.checks import told
from tilemoe.files import read_bytes

_MOST_VALUES = 1 << 12  # on the stack at once; pickle pushes up to 1,000 pairs at a time
_BYTES_OF_LIST = 4  # at least: PyTorch's files have 10 for each; one for each would take 80 times the file in memory
_MOST_FIELDS = 16  # of an object, and dimensions of a tensor: bounds the work, since memoised values can repeat
_PLAIN = {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_TAKEN = {  # how many values an opcode takes off the stack; 0: all since the last mark
    "TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "APPENDS": 0, "SETITEM": 2, "SETITEMS": 0,
    "STACK_GLOBAL": 2, "NEWOBJ": 2, "REDUCE": 2, "BUILD": 1,
}  # fmt: skip
_HOMES = ("torch", "torch.serialization", "pathlib", "pathlib._local")
_CLASSES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def read_pickled(path: Path) -> dict[str, Any]:
    """The description of tensors in our manifests' form, unchecked (see `tilemoe.train.checkpoints.metadata`).

    ValueError: PyTorch writes no such file.
    """
    try:
        return _tensors(_value(read_bytes(path)))
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # damaged bytes raise any of these
        reason = told(error)[:200] if type(error) is ValueError else "it is not a checkpoint's file"
        raise ValueError(f"{path} is refused: {reason}; use the checkpoint only if you know who made it") from error


def _value(raw: bytes) -> Any:
    """``raw`` as lists: an object is [name, state], a call's result [name, arguments], a dict [key, value, ...]."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    left = len(raw) // _BYTES_OF_LIST
    said: Any
    for code, said, at in pickletools.genops(raw):
        taken: list[Any] = []
        if code.name in _TAKEN:
            start = len(stack) - _TAKEN[code.name] if _TAKEN[code.name] else marks.pop()
            taken = stack[start:]
            del stack[start:]
        if code.name in _PLAIN:
            stack.append(said)
        elif code.name.startswith(("EMPTY", "TUPLE")):
            left -= 1
            stack.append(taken)
        elif code.name.startswith(("APPEND", "SETITEM")):
            stack[-1].extend(taken)
        elif code.name == "MARK":
            marks.append(len(stack))
        elif code.name == "MEMOIZE":
            memo.append(stack[-1])
        elif code.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[said])
        elif code.name == "STACK_GLOBAL":
            stack.append(_known(*taken))
        elif code.name == "NEWOBJ" and taken[1] == [] and taken[0].startswith(_CLASSES):
            stack.append(taken[:1])
        elif code.name == "REDUCE":
            stack.append(taken)
        elif code.name == "BUILD" and len(stack[-1]) == 1:
            stack[-1].extend(taken)
        elif code.name == "STOP" and len(stack) == 1 and not marks and (at or 0) + 1 == len(raw):
            return stack[0]
        elif code.name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has opcode {code.name} in an unexpected place")
        if len(stack) + len(marks) > _MOST_VALUES or left < 0:
            raise ValueError("it is nested too deeply")
    raise ValueError("it does not end")


def _known(module: str, name: str) -> str:
    if module not in _HOMES + _CLASSES:
        raise ValueError(f"it asks for {module}.{name}, which no checkpoint needs")
    return f"{module}.{name}"


def _tensors(value: Any) -> dict[str, Any]:
    metadata = _fields(value, "Metadata")
    _fields(metadata["storage_meta"], "StorageMeta")
    told: dict[str, Any] = {}
    chunk_at: dict[Any, dict[str, Any]] = {}
    left = len(metadata["storage_data"]) // 2  # places not used yet: each chunk has one
    for name, tensor in _pairs(metadata["state_dict_metadata"]):
        entry = _fields(tensor, "TensorStorageMetadata")
        dtype = entry["properties"][1][0].removeprefix("torch.")
        told[name] = {"dtype": dtype, "shape": _sizes(entry["size"]), "chunks": []}
        left -= len(entry["chunks"])
        if left < 0:
            raise ValueError("it has more parts of tensors than places in files")
        for chunk in entry["chunks"]:
            sides = {side: _sizes(sizes) for side, sizes in _fields(chunk, "ChunkStorageMetadata").items()}
            told[name]["chunks"].append(sides)
            chunk_at[name, tuple(sides["offsets"])] = sides
    for index, place in _pairs(metadata["storage_data"]):
        at, where = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
        where["file"] = where.pop("relative_path")
        chunk_at[at["fqn"], tuple(_sizes(at["offset"]))] |= where
    return told


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not value[0].endswith(f".{name}"):
        raise ValueError(f"it has {value[0]} instead of a {name}")
    fields = dict(_pairs(value[1][: 2 * _MOST_FIELDS]))
    if len(value[1]) > 2 * _MOST_FIELDS or not all(type(key) is str for key in fields):
        raise ValueError(f"a {name} has unknown fields")
    return fields


def _sizes(value: Any) -> list[Any]:
    _, [sizes] = value
    if len(sizes) > _MOST_FIELDS:
        raise ValueError("a tensor has too many dimensions")
    return sizes
