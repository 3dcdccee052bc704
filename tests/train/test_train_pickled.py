"""No pickle is read: what one says is refused in one line or stays a plain value, and the process is as before."""

from __future__ import annotations

import pathlib
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from tilemoe.train.checkpoints.folder import open_checkpoint
from tilemoe.train.checkpoints.pickled import read_pickled

CLASSES = {
    "PosixPath": pathlib.PosixPath,
    "Size": torch.Size,
    "Metadata": dcp_metadata.Metadata,
    "StorageMeta": dcp_metadata.StorageMeta,
    "MetadataIndex": dcp_metadata.MetadataIndex,
    "TensorProperties": dcp_metadata.TensorProperties,
    "TensorStorageMetadata": dcp_metadata.TensorStorageMetadata,
    "ChunkStorageMetadata": dcp_metadata.ChunkStorageMetadata,
    "_MEM_FORMAT_ENCODING": dcp_metadata._MEM_FORMAT_ENCODING,
    "_StorageInfo": _StorageInfo,
}


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def name_of(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def named(kind: type) -> bytes:
    return name_of("pathlib" if kind is pathlib.PosixPath else kind.__module__, kind.__name__)


MKDIR, MARKER = name_of("posix", "mkdir"), "/nonexistent/marker"
MADE = b"(" + text("marked") + b"\x88u"  # the items of a state
SLOTS = b"N}" + MADE + b"\x86b"  # BUILD with (None, {"marked": True}), which sets attributes
VARIANTS = {
    **{f"BUILD on {name}": named(kind) + SLOTS for name, kind in CLASSES.items()},
    **{f"BUILD on an empty {name}": named(kind) + b")\x81" + SLOTS for name, kind in CLASSES.items()},
    "BUILD on an enum's member": named(CLASSES["_MEM_FORMAT_ENCODING"]) + b"K\x00\x85R}" + MADE + b"b",
    "BUILD on a path": named(pathlib.PosixPath) + text("a") + b"\x85R}" + MADE + b"b",
    "BUILD twice": named(dcp_metadata.StorageMeta) + b")\x81}b}" + MADE + b"b",
    "REDUCE": MKDIR + text(MARKER) + b"\x85R",
    "GLOBAL": b"cposix\nmkdir\n" + text(MARKER) + b"\x85R",
    "INST": b"(" + text(MARKER) + b"iposix\nmkdir\n",
    "OBJ": b"(" + named(pathlib.PosixPath) + text(MARKER) + b"o",
    "NEWOBJ with arguments": named(dcp_metadata.Metadata) + text("a") + b"\x85\x81",
    "NEWOBJ_EX": named(dcp_metadata.Metadata) + b")}\x92",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "PERSID": b"Pid\n",
    "BINPERSID": text("id") + b"Q",
    "NEXT_BUFFER": b"\x97",
    "DUP": b")2",
    "memo loop": b"]\x94h\x00a",
    "memo that is empty": b"j\xff\xff\xff\x00",
    "nested 40 times, each twice": b")\x94" + b"".join(b"h%c\x86\x94" % i for i in range(40)),
    "nested deep": b")" + b"\x85" * 100_000,
    "marks without end": b"(" * 100_000,
}
PLAIN = {"memo loop", "nested 40 times, each twice"}  # values that are no harm where nobody looks
PLAIN |= {f"BUILD on an empty {kind.__name__}" for kind in CLASSES.values() if kind.__module__.startswith("torch.d")}


def process_state() -> dict[str, Any]:
    """What an attack on the reading process would change."""
    kinds = {name: dict(vars(kind)) for name, kind in CLASSES.items()}
    encoding: Any = dcp_metadata._MEM_FORMAT_ENCODING
    return {**kinds, "enum": [dict(encoding._value2member_map_), dict(encoding._member_map_)]}


@pytest.mark.parametrize("place", ["alone", "beside what is needed", "in the place of what is not"])
def test_a_pickle_changes_nothing(tmp_path: Path, sharded: Path, place: str) -> None:
    intact, path = (sharded / ".metadata").read_bytes(), tmp_path / ".metadata"
    told, before = read_pickled(sharded / ".metadata"), process_state()
    for variant, attack in VARIANTS.items():
        raw = {
            "alone": b"\x80\x04" + attack + b".",
            "beside what is needed": intact.replace(text("properties"), attack + text("properties"), 1),
            "in the place of what is not": intact.replace(text("1.0.0"), attack, 1),
        }[place]
        assert raw != intact
        path.write_bytes(raw)
        begun = time.monotonic()
        if place == "in the place of what is not" and variant in PLAIN:
            assert read_pickled(path) == told, variant
        else:
            with raises_one_line(r"\.metadata is refused: "):
                read_pickled(path)
        assert time.monotonic() - begun < 5, variant
        assert process_state() == before, variant
        assert not Path(MARKER).exists(), variant
        assert read_pickled(sharded / ".metadata") == told, variant
    assert open_checkpoint(sharded).open_tensors().keys() == told.keys()


def shared_parts(tensors: int, parts: int) -> bytes:
    """A file in which so many ``tensors`` have the same list of ``parts``, which it holds once."""
    size = name_of("torch", "Size") + b"(K\x02t\x85R"
    part = named(CLASSES["ChunkStorageMetadata"]) + b")\x81}(" + text("offsets") + size + text("sizes") + size + b"ub"
    chunks = b"](" + part + b"\x94" + b"h\x00" * (parts - 1) + b"e"
    kind = b"(" + text("x") + name_of("torch", "float32") + b"\x85t"
    fields = text("properties") + kind + text("size") + size + text("chunks") + chunks
    tensor = named(CLASSES["TensorStorageMetadata"]) + b")\x81}(" + fields + b"ub\x94"
    again = b"".join(text(f"{number:x}") + b"h\x01" for number in range(tensors - 1))
    stored = text("storage_data") + b"}" + text("storage_meta") + named(CLASSES["StorageMeta"]) + b")\x81}b"
    metadata = text("state_dict_metadata") + b"}(" + text("first") + tensor + again + b"u" + stored
    return b"\x80\x04" + named(CLASSES["Metadata"]) + b")\x81}(" + metadata + b"ub."


def test_what_is_written_once_is_not_read_many_times(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(shared_parts(2000, 2000))
    start = time.process_time()
    with raises_one_line("it has more parts of tensors than places in files"):
        read_pickled(tmp_path / ".metadata")
    assert time.process_time() - start < 2
