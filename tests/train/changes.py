"""Recipes and command lines with other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any


def changed(config: Any, **settings: Any) -> Any:
    """``config`` with other settings, by their paths: ``changed(recipe, train__steps=3, model__moe__save="fp8")``."""
    for path, value in settings.items():
        name, _, rest = path.partition("__")
        config = replace(config, **{name: changed(getattr(config, name), **{rest: value}) if rest else value})
    return config


def words_of(options: Mapping[str, object]) -> list[str]:
    """The command line of ``options``, by name."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
