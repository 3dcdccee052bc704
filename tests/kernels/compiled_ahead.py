"""What is compiled for a layer, when and in which thread: run by another test, in a process whose driver is a fake.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_driver
import pytest
import torch
from replayed_cases import CASES, Case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

import tilemoe
from tilemoe.kernels.triton import ahead, launch, launcher, plan_few
from tilemoe.kernels.triton import plan as triton_plan
from tilemoe.layers.lora import add_lora
from tilemoe.ops import inference, library, router
from tilemoe.ops import moe as moe_ops
from tilemoe.ops import plan as plan_ops
from tilemoe.ops.ahead import Ahead
from tilemoe.ops.moe import moe
from tilemoe.ops.replayed import Replayed
from tilemoe.routing import topk
from tilemoe.routing.build import plan_topk

BACKWARD = {"act_grad_kernel", "score_grad_kernel", "gemm_weights_kernel"}
SELECTION = (8, "softmax", True, 1.0, 1, 1, False, False)


class Compiled(NamedTuple):
    """A kernel, and whether it is compiled by the thread that launches."""

    name: str
    by_launcher: bool


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """What has been compiled, in order; at the start of a test, nothing is."""
    found: list[Compiled] = []
    compile_fake = JITFunction._do_compile

    def compile_one(kernel: Any, *args: Any) -> Any:
        found.append(Compiled(kernel.fn.__name__, threading.current_thread() is threading.main_thread()))
        return compile_fake(kernel, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_one)
    forget()
    yield found
    forget()


def forget() -> None:
    """All that is compiled, recorded or begun."""
    launch._compiled.cache_clear()
    launch._begun.cache_clear()
    for found in gc.get_objects():
        if type(found) in (JITFunction, GluonJITFunction):
            found.device_caches.clear()
        elif type(found) is Replayed:
            found._known.clear()
        elif type(found) is Ahead:
            found._seen.clear()


class Layer(NamedTuple):
    """Operands of a layer; a call of it launches what the layer does, from logits to the last gradient."""

    tokens: int
    d: int
    n: int
    experts: int
    k: int = 8
    frozen: tuple[str, ...] = ()

    def __call__(self, *, with_gradients: bool = True) -> None:
        shapes = {"w1": (self.experts, 2 * self.n, self.d), "w2": (self.experts, self.d, self.n)}
        leaves = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in shapes.items()}
        leaves |= {"x": torch.empty(self.tokens, self.d, dtype=torch.bfloat16)}
        logits = torch.zeros(self.tokens, self.experts)
        wanted = [leaf.requires_grad_() for name, leaf in leaves.items() if name not in self.frozen]
        with torch.set_grad_enabled(with_gradients):
            logits.requires_grad_(with_gradients)
            scores, ids, _, _ = router.select(logits, None, None, self.k, *SELECTION[1:])
            ids = torch.arange(self.k, dtype=torch.int32).expand(self.tokens, -1).contiguous()  # the fake writes none
            o = moe(leaves["x"], leaves["w1"], leaves["w2"], plan_topk(ids, self.experts), scores, kernels="hopper")
            if with_gradients:
                torch.autograd.grad(o, [*wanted, logits], torch.empty_like(o))


SMALL = Layer(40, 128, 64, 4, 2)


@pytest.fixture
def triton_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's plan builder for these CPU tensors."""
    builder = plan_ops.PlanBuilder("triton", triton_plan.plan_topk, "", triton_plan.plan_topk)
    monkeypatch.setattr(plan_ops, "builder_for", lambda *args: builder)


@pytest.mark.usefixtures("triton_plans")
def test_a_layer_is_compiled_ahead(compiled: list[Compiled]) -> None:
    SMALL()
    names = [each.name for each in compiled]
    assert {*BACKWARD, "up_proj_act_kernel", "gemm_rows_kernel", "combine_kernel", "place_kernel"} <= set(names)
    assert {"select_kernel", "select_grad_kernel"} <= set(names)
    assert not [each for each in compiled if each.by_launcher], "nothing is left to the launches"
    count = len(compiled)
    SMALL()
    SMALL._replace(tokens=41)()
    SMALL._replace(tokens=640)()
    assert len(compiled) == count, "another number of tokens compiles nothing"


@pytest.mark.usefixtures("triton_plans")
def test_what_a_second_shape_compiles(compiled: list[Compiled]) -> None:
    Layer(256, 1536, 256, 128)()
    compiled.clear()
    Layer(256, 2048, 1024, 64)()
    names = sorted(each.name for each in compiled)
    gemms = [name for name in names if "gemm" in name or name in ("up_proj_act_kernel", "act_grad_kernel")]
    assert [name for name in names if name not in gemms] == ["select_grad_kernel", "select_kernel"]
    assert len(gemms) <= 6, "no kernel twice"
    assert not [each for each in compiled if each.by_launcher]


@pytest.mark.usefixtures("triton_plans")
def test_inference_compiles_no_backward(compiled: list[Compiled]) -> None:
    Layer(640, 128, 64, 4, 2)(with_gradients=False)
    names = {each.name for each in compiled}
    assert "up_proj_act_kernel" in names
    assert not names & BACKWARD
    assert "select_grad_kernel" not in names
    assert {each.name for each in compiled if each.by_launcher} <= {"select_kernel"}, "which comes alone"


@pytest.mark.parametrize("experts", [4, 8])
def test_the_routers_product_is_compiled_ahead(
    experts: int, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "problem_of_triton", lambda *args: None)
    monkeypatch.setattr(router, "is_replayable", lambda first: True)
    x, weight = torch.zeros(40, 128, dtype=torch.bfloat16), torch.zeros(experts, 128, dtype=torch.bfloat16)
    router.compile_ahead(x, weight)
    with torch.no_grad():
        router.compile_ahead(x.requires_grad_(), weight)
    assert not compiled, "nobody will ask for a gradient"
    router.compile_ahead(x, weight)
    served = [Compiled("input_grad_kernel", by_launcher=False)] if experts == 8 else []  # rows of 8 bytes are not
    assert compiled == served
    router.input_grad.run(torch.zeros(40, experts, dtype=torch.bfloat16), weight, x.detach())
    assert compiled == served, "nothing is left to the launch"


def whole_layer(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tilemoe.MoE:
    """A module of bf16 whose CPU tensors pass for a GPU's; of its router, choosing experts is what PyTorch does."""
    monkeypatch.setattr(moe_ops, "is_replayable", lambda first: True)
    monkeypatch.setattr(topk, "_check_values", lambda logits: None)  # the fake computes none
    cfg = tilemoe.MoEConfig(128, 64, 4, 2, **options)
    return tilemoe.MoE(cfg, dtype=torch.bfloat16, kernels="hopper")


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_whole_layer_begins_before_it_routes(
    with_gradients: bool, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = whole_layer(monkeypatch)
    begun: list[str] = []

    def routed(module: Any, args: Any, output: Any) -> None:
        begun.extend(each.name for each in compiled)

    layer.router.register_forward_hook(routed)
    x = torch.randn(640, 128, dtype=torch.bfloat16)
    with torch.set_grad_enabled(with_gradients):
        for _ in range(3):
            hidden = layer(x.requires_grad_(with_gradients)).hidden
            if with_gradients:
                torch.autograd.grad(hidden, [x, *layer.parameters()], torch.ones_like(hidden))
    assert set(begun) >= {"up_proj_act_kernel", "gemm_rows_kernel", "combine_kernel"}
    assert (set(begun) >= BACKWARD) is with_gradients
    count = len([each for each in compiled if each.name not in ("select_kernel", "select_grad_kernel")])
    assert begun[:count] == [each.name for each in compiled][:count], "what was begun is what is needed"
    assert len(set(begun)) == len({each.name for each in compiled})


@pytest.mark.parametrize("case", ["rounding", "adapters", "autocast", "no tokens"])
def test_a_layer_that_computes_otherwise_begins_nothing(
    case: str, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = whole_layer(monkeypatch, rounding=tilemoe.TokenRounding() if case == "rounding" else None)
    monkeypatch.setattr(launch, "rehearse", lambda *args: pytest.fail("rehearsed"))
    x = torch.randn(0 if case == "no tokens" else 8, 128, dtype=torch.bfloat16)
    if case == "adapters":
        add_lora(layer, rank=8, alpha=8.0)
        layer(x)
        compiled.clear()
    else:
        with torch.autocast("cpu", enabled=case == "autocast"):
            layer.experts.compile_ahead(x)
    assert not compiled


@pytest.mark.parametrize("tokens", [1, 640])
def test_inference_by_ids_is_compiled_ahead(
    tokens: int, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = plan_ops.PlanBuilder("triton", plan_few.plan_topk, "", plan_few.plan_topk_in_one)
    monkeypatch.setattr(inference, "builder_for", lambda *args, **options: builder)
    monkeypatch.setattr(inference, "name_for", lambda *args: "hopper")
    monkeypatch.setattr(inference, "is_replayable", lambda first: True)
    activation = inference.Activation("swiglu", "concatenated", None, None)
    x, w1, w2, s, *_ = Case(tokens=tokens).args("moe")
    ids = torch.zeros(tokens, 2, dtype=torch.int64)
    compiled.clear()
    for _ in range(3):
        with torch.no_grad():
            assert inference.experts(x, w1, w2, None, None, ids, s.view(tokens, 2), activation) is not None
    few = ["combine_kernel", "down_proj_few_rows_kernel", "plan_few_kernel", "up_proj_act_few_rows_kernel"]
    names = sorted(each.name for each in compiled)
    assert names == few if tokens == 1 else "plan_few_kernel" in names
    assert not {*names} & BACKWARD
    assert not [each for each in compiled if each.by_launcher]


@pytest.mark.usefixtures("triton_plans")
@pytest.mark.parametrize(
    ("frozen", "gemms"), [(("w1", "w2"), 0), (("w1",), 1), (("x",), 2)], ids=["adapters", "w2 alone", "first layer"]
)
def test_what_needs_no_gradient_is_not_compiled(frozen: tuple[str, ...], gemms: int, compiled: list[Compiled]) -> None:
    SMALL._replace(frozen=frozen)()
    names = [each.name for each in compiled]
    assert names.count("gemm_weights_kernel") == gemms
    assert names.count("gemm_rows_kernel") == (1 if frozen == ("x",) else 2)


def test_a_compiled_graphs_forward_begins_the_backward(compiled: list[Compiled]) -> None:
    """There, no tensor says whether it needs a gradient; that h is kept says so."""
    library.moe.run(*Case().args("moe"))
    names = [each.name for each in compiled]
    assert set(names) >= BACKWARD
    assert names.count("gemm_weights_kernel") == 2


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_is_left_to_the_launches(case: Case, compiled: list[Compiled]) -> None:
    """Of any layout that a forward and a backward may have."""
    plan = case.plan()
    args = case.args("moe", plan)
    compiled.clear()
    library.moe.run(*args)
    begun = sorted(each.name for each in compiled)
    for operator in library.BACKWARD_OPS:
        if (case.bias or "bias" not in operator.name) and operator.name != "up_proj":
            operator.run(*case.args(operator.name, plan))
    assert sorted(each.name for each in compiled) == begun
    assert not [each for each in compiled if each.by_launcher]


def test_other_kernels_are_not_rehearsed(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    given = [case.args("moe") for case in (Case("torch"), Case(tokens=0))]
    compiled.clear()
    monkeypatch.setattr(launch, "rehearse", lambda *args: pytest.fail("rehearsed"))
    for args in given:
        library.moe.run(*args)
    assert not compiled


@pytest.mark.parametrize("from_ahead", [True, False], ids=["ahead only", "always"])
def test_a_compilation_that_fails_is_an_error_of_the_launch(
    from_ahead: bool, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one = JITFunction._do_compile

    def fail(kernel: Any, *args: Any) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        if kernel.fn.__name__ == "combine_kernel" and not (from_ahead and is_main):
            raise RuntimeError(f"ptxas failed in {'main' if is_main else 'another'}")
        return compile_one(kernel, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", fail)
    args = Case().args("moe_inference")
    compiled.clear()
    if from_ahead:
        library.moe.run(*args)
        assert [each.name for each in compiled if each.by_launcher] == ["combine_kernel"]
    else:
        with pytest.raises(RuntimeError, match="ptxas failed in main"):
            library.moe.run(*args)


class Devices(TorchDispatchMode):
    """Where all results lie."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


def test_nothing_is_launched_or_allocated_ahead(compiled: list[Compiled]) -> None:
    args = Case().args("moe")
    with fake_driver.tracked([arg for arg in args if isinstance(arg, Tensor)]) as tracker, Devices() as devices:
        launch.rehearse(library._layers_launches(*args), args)
    assert {each.name for each in compiled} >= BACKWARD
    assert not [event for event in tracker.events if "kernel" in str(event[0])]
    assert devices.found == {"meta"}


def test_kinds_do_not_grow_without_bound() -> None:
    begun: list[int] = []
    one = Ahead(lambda x, size: size or None, lambda x, size: lambda *args: begun.append(size))
    x = torch.zeros(1)
    for size in [*range(1, 300), 299, 1, 0]:
        one(x, size)
    assert begun == [*range(1, 300), 1]
    assert len(one._seen) <= 256


class Source:
    """Of a kernel: making its IR takes until ``made``."""

    signature: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def make_ir(self) -> None:
        self._log.append(f"IR of {self._name}")


def test_kernels_compile_at_the_same_time_but_for_their_ir() -> None:
    log: list[str] = []
    together = threading.Barrier(4, timeout=30)

    def compile_alone(source: Any) -> None:
        source.make_ir()
        together.wait()  # opens when all four are here

    compiler = launcher._Compiler(compile_alone, has_function=False)
    begun = [ahead.begin(partial(compiler, Source(log, name))) for name in "abcd"]
    assert log == [f"IR of {name}" for name in "abcd"], "one after the other, in order"
    for future in begun:
        future.result(timeout=30)


@pytest.mark.parametrize("fails_in", ["IR", "before", "after"])
def test_whoever_begins_a_compilation_that_fails_goes_on(fails_in: str) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    def compile_alone(source: Any) -> None:
        if fails_in == "before":
            fail()
        source.make_ir()
        fail()

    source: Any = SimpleNamespace(make_ir=fail if fails_in == "IR" else lambda: None)
    future = ahead.begin(partial(launcher._Compiler(compile_alone, has_function=False), source))
    assert isinstance(future.exception(timeout=30), RuntimeError)


def test_only_threads_that_compile_are_listened_to() -> None:
    source: Any = SimpleNamespace(make_ir=lambda: 1)
    made: Callable[[], int] = source.make_ir
    ahead.announce_ir(source)
    assert source.make_ir is made
