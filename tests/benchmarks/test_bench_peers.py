"""The layer benchmark's contestants from other libraries, as far as a CPU shows: their kernels in Triton's interpreter,
their calls against the sources of what is installed, and the adapters around experts written here."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tilemoe.bench import check, peers
from tilemoe.bench.layer import MEMORY, layer_memory
from tilemoe.shape import MoEShape

pytestmark = pytest.mark.process("interpreter")

SHAPE = MoEShape(50, 32, 16, 6, 3)
CPU = torch.device("cpu")


@pytest.fixture
def weights() -> peers.Weights:
    torch.manual_seed(0)
    return peers.make_weights(SHAPE, CPU, torch.bfloat16)


@pytest.mark.parametrize(("name", "package"), [("liger", "liger_kernel"), ("scattermoe", "scattermoe")])
def test_installed_experts_are_correct(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, since the interpreter adds no bf16 atomically. Passed with liger-kernel 0.8.5, one tile a kernel."""
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
    pytest.importorskip(package)
    weights = peers.make_weights(SHAPE, CPU, torch.float32)
    contestant = peers.PEERS[name](SHAPE, weights)
    assert (contestant.name, "AUTOTUNE=0" in contestant.version) == (name, name == "liger")
    assert check.problem(contestant, SHAPE, weights) is None


# (package, file, function or class) to what its call passes: by place, by name.
CALLS = {
    ("sonicmoe", "functional/__init__.py", "moe_TC_softmax_topk_layer"): ("x router_w w1 b1 w2 b2 K stream_id", ""),
    ("liger_kernel", "ops/fused_moe.py", "LigerFusedMoEFunction.forward"): (
        "ctx x gate_up_proj down_proj top_k_index top_k_weights",
        "",
    ),
    ("liger_kernel", "ops/configure.py", "configure"): ("", "moe"),
    ("liger_kernel", "transformers/moe.py", "LigerExpertParallelFusedMoe.forward"): (
        "self hidden_states expert_indices expert_weights all_B all_C all_A num_experts",
        "",
    ),
    ("liger_kernel", "ops/configure.py", "MoEConfig"): (
        "max_tokens hidden_size num_experts top_k",
        "num_hosts gpus_per_host max_inflight",
    ),
    ("liger_cute_kernels", "nvshmem.py", "pool_clear_all"): ("", ""),
    ("unsloth", "kernels/moe/autotune_cache.py", "get_or_autotune_moe_kernels"): (
        "num_experts hidden_dim intermediate_dim top_k dtype",
        "",
    ),
    ("unsloth", "kernels/moe/grouped_gemm/interface.py", "grouped_gemm"): (
        "X W",
        (
            "m_sizes topk gather_indices permute_x permute_y is_first_gemm"
            " kernel_config_fwd kernel_config_bwd_dX kernel_config_bwd_dW"
        ),
    ),
    ("unsloth_zoo", "temporary_patches/moe_fused_swiglu.py", "moe_fused_swiglu"): ("gate_up", ""),
    ("unsloth_zoo", "temporary_patches/moe_utils.py", "moe_routing_sort"): ("top_k_index num_experts", ""),
}


@pytest.mark.parametrize("called", CALLS, ids=" ".join)
def test_calls_are_those_of_the_installed_source(called: tuple[str, str, str]) -> None:
    """It is read, not imported. Passed with sonic-moe 0.1.2.post1, Liger and LigerCute 0.8.5, Unsloth 2026.10.9."""
    package, file, name = called
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    node: Any = ast.parse((Path(found.origin).parent / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    if isinstance(node, ast.ClassDef):
        parameters = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
    else:
        parameters = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
    by_place, by_name = (each.split() for each in CALLS[called])
    assert parameters[: len(by_place)] == by_place
    assert set(by_name) <= set(parameters[len(by_place) :])


def rows_of(ids: Tensor) -> Tensor:
    """The position in ids.flatten() of each row, rows sorted by expert."""
    return ids.flatten().argsort(stable=True)


def per_expert(rows: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return torch.cat([part @ w[i].t() for i, part in enumerate(rows.split(counts.tolist()))])


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Modules of these contents, dots in their names written __."""
    for name, contents in modules.items():
        parts = name.split("__")
        for i in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:i]))
            vars(module).update(contents if i == len(parts) else {})
            if i == len(parts) or module.__name__ not in sys.modules:
                monkeypatch.setitem(sys.modules, module.__name__, module)


def test_unsloth_is_called_for_the_layer(weights: peers.Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []

    def get(*gemm: Any) -> tuple[str, str, str]:
        tuned.append(gemm[:4])
        return "forward", "dX", "dW"

    def grouped_gemm(X: Tensor, W: Tensor, **given: Any) -> Tensor:
        """As Unsloth's documentation says: permute_x gathers a token's rows, permute_y puts them back."""
        order, k = given["gather_indices"], given["topk"]
        assert (given["permute_x"], given["permute_y"]) == (given["is_first_gemm"], not given["is_first_gemm"])
        assert [given[f"kernel_config_{each}"] for each in ("fwd", "bwd_dX", "bwd_dW")] == ["forward", "dX", "dW"]
        y = per_expert(X[order // k] if given["permute_x"] else X, W, given["m_sizes"])
        return torch.empty_like(y).index_copy(0, order, y) if given["permute_y"] else y

    def swiglu(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, None]:
        return ids.flatten().bincount(minlength=experts), rows_of(ids), None

    install(
        monkeypatch,
        unsloth__kernels__moe__autotune_cache={"get_or_autotune_moe_kernels": get},
        unsloth__kernels__moe__grouped_gemm__interface={"grouped_gemm": grouped_gemm},
        unsloth_zoo__temporary_patches__moe_fused_swiglu={"moe_fused_swiglu": swiglu},
        unsloth_zoo__temporary_patches__moe_utils={"moe_routing_sort": sort},
    )
    assert check.problem(peers.PEERS["unsloth"](SHAPE, weights), SHAPE, weights) is None
    assert tuned == [(6, 32, 16, 3), (6, 16, 16, 3)]  # once each: w1 (6, 32, 32), w2 (6, 32, 16)


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the group and to NVSHMEM's pool, in order."""
    done: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **given: done.append(f"group of {given['world_size']}"))
    monkeypatch.setattr(dist, "is_initialized", lambda: "group of 1" in done)
    return done


def fake_liger_cute(done: list[str], *, serves: bool) -> dict[str, dict[str, Any]]:
    class Experts:
        def __call__(self, *given: Any) -> Tensor:
            x, ids, scores, gate, up, down, experts = given
            assert (scores.dtype, gate.is_contiguous(), up.is_contiguous()) == (torch.bfloat16, True, True)
            assert experts == SHAPE.num_experts
            return peers.grouped_mm_experts(x, scores.float(), ids, torch.cat([gate, up], 1), down)

    def configure(*, moe: SimpleNamespace) -> bool:
        done.append(f"room of {moe.sizes}")
        return serves

    def sizes(*places: int, **names: int) -> SimpleNamespace:
        return SimpleNamespace(sizes=places)

    return {
        "liger_cute_kernels": {"nvshmem": SimpleNamespace(pool_clear_all=lambda: done.append("cleared"))},
        "liger_kernel__ops__configure": {"configure": configure, "MoEConfig": sizes},
        "liger_kernel__transformers__moe": {"LigerExpertParallelFusedMoe": Experts},
    }


def test_liger_cute_has_a_group_of_one_process_and_a_room_for_each_case(
    weights: peers.Weights, monkeypatch: pytest.MonkeyPatch, no_group: list[str]
) -> None:
    install(monkeypatch, **fake_liger_cute(no_group, serves=True))
    for _ in range(2):
        contestant = peers.PEERS["liger-cute"](SHAPE, weights)
    assert no_group == ["group of 1", "room of (50, 32, 6, 3)", "cleared", "room of (50, 32, 6, 3)"]
    assert check.problem(contestant, SHAPE, weights) is None
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))  # where PyTorch would count too few bytes
    assert layer_memory(contestant, on_gpu, on_gpu) == dict.fromkeys(MEMORY)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in peers.PEERS if name not in ("tilemoe", "grouped_mm")])
def test_who_cannot_take_part_is_refused_in_one_line(
    name: str, weights: peers.Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is imported on a CPU; where there is a GPU, for which "meta" stands, it says what is missing."""
    assert peers.build(name, SHAPE, weights) == "it needs a GPU"
    for package in ("sonicmoe", "scattermoe", "liger_kernel", "liger_cute_kernels", "unsloth"):
        for module in (package, *(each for each in sys.modules if each.startswith(f"{package}."))):
            monkeypatch.setitem(sys.modules, module, None)
    found = peers.build(name, SHAPE, peers.make_weights(SHAPE, torch.device("meta"), torch.bfloat16))
    assert isinstance(found, str)
    assert found.startswith("not importable here: ")
    assert "\n" not in found


@pytest.mark.parametrize(
    "refuse",
    [lambda: fake_liger_cute([], serves=False), lambda: {"liger_cute_kernels": {}}],
    ids=["a GPU without kernels", "an older wheel"],
)
def test_liger_cute_that_cannot_serve_is_refused(
    refuse: Callable[[], dict[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, no_group: list[str]
) -> None:
    install(monkeypatch, **refuse())
    found = peers.build("liger-cute", SHAPE, peers.make_weights(SHAPE, torch.device("meta"), torch.bfloat16))
    assert isinstance(found, str)
    assert found.startswith("not importable here: ")
