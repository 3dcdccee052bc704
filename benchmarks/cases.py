"""The layer sizes that are timed.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from types import MappingProxyType

from tilemoe.shape import MoEShape

# Seven with recorded figures of other implementations: softmax over the kept scores, SwiGLU, bf16.
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
# The paper's (arXiv 2512.14080) further granularities of its 1.4B, 7B, 30B and 120B models, and public models' layers.
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


def find(names: str) -> dict[str, MoEShape]:
    """Cases by name from "main", "all" or a comma-separated list. ValueError lists the names."""
    if names in ("main", "all"):
        return dict(MAIN if names == "main" else ALL)
    unknown = [name for name in names.split(",") if name not in ALL]
    if unknown:
        raise ValueError(f"no case called {unknown[0]!r}; known are main, all, {', '.join(ALL)}")
    return {name: ALL[name] for name in names.split(",")}
