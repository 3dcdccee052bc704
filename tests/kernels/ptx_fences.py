"""Whether a kernel's PTX keeps the rule of proxies: stores and cp.async write shared memory by the generic proxy, wgmma
and tcgen05 read it by the async proxy, and a `fence.proxy.async` has to lie in between.

It may lie on either side of the barrier at which the threads meet (PTX ISA, memory consistency model, proxies); what
cp.async writes is there once its thread has waited for it. All ways through branches and loops are followed. Which
stores a product reads is not: each counts, but not copies of 4 bytes, of indices and scales that threads read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import triton
from torch.torch_version import TorchVersion
from triton_compile import bytes_of_copies

from tilemoe.runtime.device import TRITON_FOR_10

# From the release on that PyTorch's kernels wait for on capability 10.x.
TRITON_FENCES = TorchVersion(triton.__version__) >= TRITON_FOR_10

_WAIT = re.compile(r"cp\.async\.wait_(?:group|all)")
_STORE = re.compile(r"(?:st|red|atom)\.(?:\w+\.)*shared|stmatrix")
_TENSOR_MEMORY = re.compile(r"tcgen05\.(?:ld|st)\b")  # accumulators: no proxy, but each warp's part
_READ = re.compile(r"wgmma\.mma_async|tcgen05\.(?:mma|cp)\b")
_FENCE = re.compile(r"fence\.proxy\.async(?:\.shared::cta)?$")
_BARRIER = re.compile(r"bar(?:rier)?(?:\.cta)?\.sync")
_BRANCH = re.compile(r"bra(?:\.uni)?$")
_END = re.compile(r"(?:ret|exit|trap)$")
# What is not followed: a copy that other threads wait for, and jumps by a table or to a function.
_UNKNOWN = re.compile(r"cp\.async\.mbarrier|brx|call")

_UNFENCED, _UNMET = 1, 2  # since the last write, or the last access of tensor memory

# A vector's braces are within a statement; at its beginning they open and close a scope of labels, of inline assembly.
_TOKEN = re.compile(
    r"(?P<brace>[{}])|(?P<label>[\w$]+):(?!:)|(?P<predicate>@!?%?\w+\s+)?(?P<opcode>[\w.:]+)(?P<rest>[^;]*);"
)


class Instruction(NamedTuple):
    """target: of a branch, the index of the instruction that it leads to."""

    opcode: str
    is_predicated: bool
    target: int | None


def mmas_without_fence(ptx: str) -> tuple[int, int]:
    """(how many, of how many) MMAs are reached on some way from a write with no fence, or no barrier, in between."""
    body = instructions_of(ptx)
    assert not [each.opcode for each in body if _UNKNOWN.match(each.opcode)]
    has_copies = bool(bytes_of_copies(ptx) - {4})
    before: dict[int, int] = {}  # of each instruction that is reached, what is missing there on any way
    reached = [(0, 0)]
    while reached:
        at, missing = reached.pop()
        if missing | before.get(at, 0) == before.get(at):
            continue
        before[at] = missing | before.get(at, 0)
        after = _missing_after(body[at], before[at], has_copies)
        reached += [(successor, after) for successor in _successors(body[at], at)]
    reads = [missing for at, missing in before.items() if _READ.match(body[at].opcode)]
    return sum(missing != 0 for missing in reads), len(reads)


def _missing_after(instruction: Instruction, missing: int, has_copies: bool) -> int:
    if _STORE.match(instruction.opcode) or (has_copies and _WAIT.match(instruction.opcode)):
        return _UNFENCED | _UNMET
    if _TENSOR_MEMORY.match(instruction.opcode):
        return missing | _UNMET
    if instruction.is_predicated:  # then not all threads do it
        return missing
    if _FENCE.match(instruction.opcode):
        return missing & ~_UNFENCED
    return missing & ~_UNMET if _BARRIER.match(instruction.opcode) else missing


def _successors(instruction: Instruction, at: int) -> Iterator[int]:
    is_jump = instruction.target is not None
    if instruction.target is not None:
        yield instruction.target
    if instruction.is_predicated or not (is_jump or _END.match(instruction.opcode)):
        yield at + 1


def instructions_of(ptx: str) -> list[Instruction]:
    """Those of a module's only function."""
    _, entry, text = ptx.partition(".entry")
    assert entry
    assert not re.search(r"\.(?:entry|func)\b", text)
    text = re.sub(r"//.*|^\s*\.(?:loc|file|pragma)\b.*", "", text[text.index("\n{") :], flags=re.MULTILINE)
    found = list[tuple[re.Match[str], tuple[int, ...]]]()
    labels = dict[tuple[tuple[int, ...], str], int]()  # by scope and name: assembly that is repeated repeats its labels
    scope: tuple[int, ...] = ()
    for token in _TOKEN.finditer(text):
        if token["brace"] == "{":
            scope = (*scope, token.start())
        elif token["brace"] == "}":
            scope = scope[:-1]
            if not scope:
                break
        elif token["label"]:
            labels[scope, token["label"]] = len(found)
        elif not token["opcode"].startswith("."):  # a declaration
            found.append((token, scope))
    return [
        Instruction(
            token["opcode"],
            token["predicate"] is not None,
            _place(labels, scope, token["rest"].strip()) if _BRANCH.match(token["opcode"]) else None,
        )
        for token, scope in found
    ]


def _place(labels: dict[tuple[tuple[int, ...], str], int], scope: tuple[int, ...], name: str) -> int:
    """Of the label that a branch in ``scope`` calls so."""
    while (scope, name) not in labels:
        scope = scope[:-1]
    return labels[scope, name]
