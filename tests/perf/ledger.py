"""The bytes that kernels hold at once, for the tests of what the planner says of the operators' peaks."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tilemoe.kernels.experts.formats.operand import Operand


class Ledger:
    """``most`` bytes alive at once, of the tensors that kernels return or write to, but for the storages in ``known``;
    ``calls`` of each kernel. rows: also of tensors that they read, and only of those with so many rows.
    """

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows
        self.start()

    def start(self, *known: Tensor) -> None:
        self.most, self.calls = 0, Counter[str]()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def run(self, name: str, kernel: Callable[..., Any], *args: Any) -> Any:
        """As `watch_kernels` calls it."""
        result = kernel(*args)
        self.calls[name] += 1
        if isinstance(result, Operand):
            made: tuple[Any, ...] = (result.data, result.scale)
        else:
            made = result if isinstance(result, tuple) else (args[-1] if result is None else result,)
        for tensor in made if self.rows is None else (*args, *made):
            if isinstance(tensor, Tensor) and self.rows in (None, tensor.shape[0]):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    size = storage.nbytes() if result is None else tensor.nbytes  # written to is a slice of it
                    self.alive[storage._cdata] = (StorageWeakRef(storage), size)
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result
