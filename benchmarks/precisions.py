"""What of a recipe's step multiplies in FP8, by the names that the benchmarks record."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilemoe.train.config import Recipe

PLAIN = "bf16"  # the layer's own dtype: under a recipe in fp32, that
# model.moe.precision and train.dense_precision of each.
PRECISIONS = MappingProxyType({PLAIN: ("bf16", "bf16"), "fp8": ("fp8", "bf16"), "fp8+dense": ("fp8", "fp8")})


def in_precision(recipe: Recipe, name: str) -> Recipe:
    """``recipe`` in one of `PRECISIONS`."""
    if name not in PRECISIONS:
        raise ValueError(f"no precision called {name!r}; known are {', '.join(PRECISIONS)}")
    experts, dense = PRECISIONS[name]
    moe = recipe.model.moe
    assert moe is not None, "the recipe has experts"
    model = replace(recipe.model, moe=replace(moe, precision=experts))
    return replace(recipe, model=model, train=replace(recipe.train, dense_precision=dense))
