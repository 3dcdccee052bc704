"""Every class of experts that the installed transformers dispatches: computed like its eager forward, or refused."""

import importlib
import re
from pathlib import Path

import pytest
import transformers
from hf_experts import experts, routing, run
from torch import nn

from tilemoe.testing import relative_error

REFUSED = {"DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts", "Inkling2Experts", "MuseSparkExperts"}
_CLASS = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)


def every_class() -> dict[str, type[nn.Module]]:
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in _CLASS.findall(file.read_text(encoding="utf-8")):
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            found[name] = getattr(module, name)
    return found


@pytest.mark.usefixtures("registered")
def test_every_class() -> None:
    classes = every_class()
    assert len(classes) > 60
    wrong = {}
    for name, kind in classes.items():
        module = experts(kind, mlp_gate_softcap=1.0, mlp_up_softcap=1.0)
        if name in REFUSED:
            with pytest.raises(ValueError, match=rf"cannot compute {name} \(made_up\): "):
                run(module, "tilemoe", *routing())
            continue
        ours, eager = (run(module, implementation, *routing()) for implementation in ("tilemoe", "eager"))
        assert all(tensor.any() for tensor in eager), name
        error = max(relative_error(mine, theirs) for mine, theirs in zip(ours, eager, strict=True))
        if not error < 1e-5:
            wrong[name] = error
    assert not wrong
    assert classes.keys() >= REFUSED
