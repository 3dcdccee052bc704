"""The registry of backends by name: the package's own, imported at first use, and those that users register."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from tilemoe.checks import shown
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.table import ROWS, Row
from tilemoe.runtime.device import has_triton
from tilemoe.runtime.tracing import constant_when_traced

# Name -> a registered class, or a row of the package's table. Only `register_backend` adds to it.
_BACKENDS: dict[str, type[Backend] | Row] = {row.name: row for row in ROWS}


def register_backend(name: str, cls: type[Backend]) -> None:
    """Make ``kernels=name`` compute the experts with ``cls``, which is instantiated once, without arguments.

    ValueError: the name is taken or is not ``cls.name``, or cls is no `Backend` or leaves a method abstract.

    Examples:
        >>> from tilemoe.kernels.experts.torch.backend import TorchBackend
        >>> class Mine(TorchBackend):
        ...     name = "mine"
        >>> tilemoe.register_backend("mine", Mine)
        >>> layer = tilemoe.MoE(tilemoe.MoEConfig(16, 8, num_experts=4, num_experts_per_tok=2), kernels="mine")
    """
    if not isinstance(name, str) or not name.isidentifier():  # operators pass it inside a string, between spaces
        raise ValueError(f"name must be letters, digits and underscores, got {shown(name)}")
    if name in _BACKENDS:
        raise ValueError(f"name {name!r} is taken; the backends are {_names()}")
    if not isinstance(cls, type) or not issubclass(cls, Backend):
        raise ValueError(f"cls must be a subclass of tilemoe.Backend, got {shown(cls)}")
    if cls.__abstractmethods__:
        raise ValueError(f"cls {cls.__name__} does not define {', '.join(sorted(cls.__abstractmethods__))}")
    if getattr(cls, "name", None) != name:
        raise ValueError(f"cls {cls.__name__} must be named as it is registered; set name = {name!r} in it")
    _BACKENDS[name] = cls


@constant_when_traced
def backend_named(name: str) -> Backend:
    """The backend that is registered as ``name``.

    ValueError: no such name (the message lists the names), or the backend needs Triton, which is not installed.
    """
    _check_name(name)
    return _made(name)


def backend_of(kernels: str | Backend) -> Backend:
    """The backend for the argument ``kernels``: a name, or an instance of a registered class. Traceable.

    ValueError: that of `backend_named`, or the instance's class is not the one registered under its name.
    """
    if not isinstance(kernels, Backend):
        return backend_named(kernels)
    if type(backend_named(kernels.name)) is not type(kernels):
        called = type(kernels).__name__
        raise ValueError(
            f"kernels: {called} is not the class registered as {kernels.name!r}; give it a name of its own and call "
            f"tilemoe.register_backend(name, {called})"
        )
    return kernels


def check_kernels(kernels: Any) -> None:
    """ValueError unless `backend_of` accepts this. Does not import the backend that a name stands for."""
    if isinstance(kernels, Backend):
        backend_of(kernels)
    else:
        _check_name(kernels)


@cache
def _made(name: str) -> Backend:
    found = _BACKENDS[name]
    return found() if isinstance(found, type) else class_of(found)()


def class_of(row: Row) -> type[Backend]:
    """The row's architecture, or a subclass whose name, precision, format and batch invariance are the row's.

    It is a class because torch.compile treats class attributes as constants, and instance attributes not.
    """
    if row.needs_triton and not has_triton():
        raise ValueError(f"kernels={row.name!r} needs the package triton; install a build of PyTorch for GPUs")
    module, _, attribute = row.architecture.partition(":")
    cls: type[Backend] = getattr(import_module(module), attribute)
    if cls.name == row.name:
        return cls
    invariance = row.batch_invariance or cls.batch_invariance
    of = None if row.format is None else import_module(row.format)
    data = {"name": row.name, "precision": row.precision, "format": of, "batch_invariance": invariance}
    return type(f"{attribute}:{row.name}", (cls,), data)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name not in _BACKENDS:
        raise ValueError(f"kernels must be None or one of {_names()}; got {shown(name)}")


def _names() -> str:
    return ", ".join(sorted(_BACKENDS))
