"""The layer sizes that are timed.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from tilemoe.checks import expand_user, parse_json, require_int
from tilemoe.config import from_dict
from tilemoe.files import read_text
from tilemoe.shape import MoEShape

_SIZES = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
MOST_EXPERTS = 512  # and at most d: `check` gives each expert a different logit in bf16
# Seven cases that have recorded figures of other implementations: softmax over the kept scores, SwiGLU, bf16.
MAIN = MappingProxyType(
    {
        "7B-n256": MoEShape(24576, 1536, 256, 128, 8),
        "7B-n1024": MoEShape(24576, 1536, 1024, 32, 2),
        "1.4B-n256": MoEShape(40960, 768, 256, 128, 8),
        "OLMoE": MoEShape(32768, 2048, 1024, 64, 8),
        "Qwen3-Next": MoEShape(32768, 2048, 512, 512, 10),
        "Qwen3-235B": MoEShape(32768, 4096, 1536, 128, 8),
        "30B-n256": MoEShape(32768, 4096, 256, 256, 16),
    }
)
# Other granularities of the paper's (arXiv 2512.14080) 1.4B, 7B, 30B and 120B models, and layers of public models.
MORE = MappingProxyType(
    {
        "1.4B-n512": MoEShape(40960, 768, 512, 64, 4),
        "1.4B-n1024": MoEShape(40960, 768, 1024, 32, 2),
        "7B-n512": MoEShape(24576, 1536, 512, 64, 4),
        "30B-n512": MoEShape(32768, 4096, 512, 128, 8),
        "30B-n1024": MoEShape(32768, 4096, 1024, 64, 4),
        "120B-n512": MoEShape(32768, 4096, 512, 256, 16),
        "120B-n1024": MoEShape(32768, 4096, 1024, 128, 8),
        "120B-n2048": MoEShape(32768, 4096, 2048, 64, 4),
        "gpt-oss-20b": MoEShape(32768, 2880, 2880, 32, 4),
        "Kimi-Linear": MoEShape(32768, 2304, 1024, 256, 8),
        "DeepSeek-V3": MoEShape(32768, 7168, 2048, 256, 8),
    }
)
ALL = MappingProxyType({**MAIN, **MORE})
CPU = MappingProxyType({"small": MoEShape(256, 256, 128, 8, 2)})  # seconds on two cores


def find(names: str) -> dict[str, MoEShape]:
    """{name: case} of "main", "all", "cpu", a comma-separated list or a .json file: {name: {"num_tokens": ...}}.

    ValueError: a name is unknown (the message lists all), or the file is wrong.
    """
    if names in ("main", "all", "cpu"):
        return dict({"main": MAIN, "all": ALL, "cpu": CPU}[names])
    if names.endswith(".json"):
        return _read(expand_user(names))
    unknown = [name for name in names.split(",") if name not in ALL]
    if unknown:
        raise ValueError(f"no case called {unknown[0]!r}; known are main, all, cpu, {', '.join(ALL)}, or a .json file")
    return {name: ALL[name] for name in names.split(",")}


def _read(path: Path) -> dict[str, MoEShape]:
    try:
        data = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give a file of cases") from error
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{path}: expected a table of cases, each with its sizes")
    for name, sizes in data.items():
        for field, size in sizes.items() if isinstance(sizes, dict) else ():
            if field not in _SIZES:
                raise ValueError(f"{path}: {name}.{field} cannot be set; a case has {', '.join(_SIZES)}")
            require_int(f"{path}: {name}.{field}", size, 1)
    found = {name: from_dict(MoEShape, sizes, f"{path}: {name}.") for name, sizes in data.items()}
    for name, shape in found.items():
        if shape.num_experts > (most := min(MOST_EXPERTS, shape.hidden_size)):
            raise ValueError(f"{path}: {name}.num_experts must be at most {most}; the check needs distinct logits")
    return found
