"""All kernels that an operator and its backward need are compiled before it launches, by threads. The driver is a fake.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import fake_driver
import pytest
import torch
from helpers import run_in_threads
from replay_cases import CASES, Args, forget, repeating, watch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from tilemoe.kernels.choose import Choice, PlanBuilder
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.plan import torch as torch_plan
from tilemoe.kernels.plan import triton as triton_plan
from tilemoe.ops import experts, inference, router
from tilemoe.ops import plan as plan_ops
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.runtime import precompile
from tilemoe.runtime.operator import Operator

pytestmark = pytest.mark.process("fake_driver")

CASE = CASES["hopper, bias"]
FORWARD = {"up_proj_act_kernel", "gemm_stationary_kernel", "combine_kernel"}
BACKWARD = {"gemm_dgrad_dact_kernel", "score_grad_kernel", "gemm_wgrad_kernel"}
SELECTION = ("softmax", True, 1.0, 1, 1, False, False)


class Log:
    """What happened, in order: (kernel's name, thread's name) of a compilation, a kernel's name for a launch."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def compiled(self) -> list[str]:
        return [event[0] for event in self.events if isinstance(event, tuple)]

    def threads(self) -> set[str]:
        return {event[1] for event in self.events if isinstance(event, tuple)}

    def launched(self) -> list[str]:
        return [event for event in self.events if isinstance(event, str)]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Of a process that has compiled nothing yet."""
    log, compile_one, launch_one = Log(), fake_driver._compiled, fake_driver._launch

    def compiled(kernel: Any, *args: Any) -> Any:
        log.events.append((kernel.fn.__name__, threading.current_thread().name))
        return compile_one(kernel, *args)

    def launched(name: str, *args: Any) -> None:
        log.events.append(name)
        launch_one(name, *args)

    monkeypatch.setattr(fake_driver, "_compiled", compiled)
    monkeypatch.setattr(fake_driver, "_launch", launched)
    forget()
    yield log
    forget()  # whose launches this test has seen


def trainable(args: Args) -> Args:
    """With gradients of x, the weights, the scores and the biases."""
    return tuple(arg.requires_grad_() if isinstance(arg, Tensor) else arg for arg in args)


def test_all_is_compiled_by_threads_before_anything_is_launched(log: Log) -> None:
    experts.moe(*trainable(CASE.args("moe")))
    first = next(i for i, event in enumerate(log.events) if isinstance(event, str))
    assert first == len(log.compiled())
    assert set(log.compiled()) >= FORWARD | BACKWARD
    assert all(name.startswith("tilemoe-compile") for name in log.threads())
    assert set(log.launched()) >= FORWARD
    assert not BACKWARD & set(log.launched())


@pytest.mark.parametrize(("name", "more"), [("moe", set()), ("moe_h_in_fp8", {"dequantize_rows_kernel"})])
def test_nothing_is_compiled_twice(name: str, more: set[str], log: Log) -> None:
    args = trainable(CASE.args(name))
    o, *_ = experts.moe(*args)
    compiled = len(log.events) - len(log.launched())
    o.backward(torch.empty_like(o))
    assert len(log.compiled()) == compiled
    assert set(log.launched()) >= BACKWARD | more
    keys = {key for kernel in kernels() for key in kernel.device_caches[0][0].items()}
    assert len(keys) == compiled


def kernels() -> list[Any]:
    return [each for each in gc.get_objects() if type(each) in (JITFunction, GluonJITFunction) and each.device_caches]


def test_without_gradients_no_backward_is_compiled(log: Log) -> None:
    experts.moe(*CASES["hopper, many rows"].args("moe_inference"))
    assert set(log.compiled()) >= FORWARD
    assert not BACKWARD & set(log.compiled())


def test_the_routers_backward_is_compiled_with_its_forward(log: Log) -> None:
    logits = torch.zeros(40, 8, requires_grad=True)
    router.select(logits, None, None, 2, *SELECTION)
    assert log.compiled() == ["select_kernel", "select_grad_kernel"]
    assert log.launched() == ["select_kernel"]


@pytest.mark.parametrize("name", ["moe", "down_proj_dgrad_dact", "up_proj_input_grad"])
def test_the_call_that_counts_is_the_one_without_it(name: str, log: Log) -> None:
    """The same results, allocations and launches, at last; nothing of the call without values is alive beside them."""
    run = getattr(experts, name).run
    operator, args = repeating(run), CASE.args(name)
    found, _ = watch(operator, args)
    count = len(log.launched())
    expected, _ = watch(run, args)
    launches = [event[:5] for event in expected.events if str(event[0]).endswith("_kernel")]
    assert [event[:5] for event in found.events if str(event[0]).endswith("_kernel")] == launches
    assert count == len(launches)
    assert found.peak_bytes() == expected.peak_bytes()


def test_from_the_first_kernel_that_is_not_compiled_on_nothing_is_launched(log: Log) -> None:
    case, b2 = CASES["hopper"], CASE.args("moe")[5]
    operator, args = repeating(experts.moe_forward), list(case.args("moe"))
    watch(operator, tuple(args))
    log.events.clear()
    args[5] = b2  # down_proj with a bias: up_proj is compiled, as is combine
    watch(operator, tuple(args))
    assert log.compiled() == ["gemm_stationary_kernel"]
    place = log.events.index((*log.compiled(), *log.threads()))
    assert "up_proj_act_kernel" in log.events[:place]
    assert "combine_kernel" not in log.events[:place]
    assert log.events[place + 1 :].count("up_proj_act_kernel") == 1
    assert log.events[-1] == "combine_kernel"


@pytest.mark.parametrize("name", ["add_down_proj_wgrad", "add_up_proj_wgrad"])
def test_what_adds_to_an_operand_runs_once(name: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, runs = getattr(experts, name), list[str]()
    run = operator.run
    monkeypatch.setattr(operator, "run", lambda *args: (runs.append(name), run(*args))[1])
    operator(*CASE.args(name))
    assert runs == [name]
    assert log.launched().count("gemm_wgrad_kernel") == log.compiled().count("gemm_wgrad_kernel") == 1


def test_a_kernel_that_does_not_compile_is_its_launchs_error(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one = fake_driver._compiled

    def fails(kernel: Any, *args: Any) -> Any:
        if kernel.fn.__name__ == "gemm_stationary_kernel":
            raise RuntimeError(f"ptxas failed in {threading.current_thread().name}")
        return compile_one(kernel, *args)

    with monkeypatch.context() as patch:
        patch.setattr(fake_driver, "_compiled", fails)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^ptxas failed in MainThread$"):
                experts.moe(*CASE.args("moe"))
            assert _async_compile.active_mode.get() is precompile.active() is None
    experts.moe(*CASE.args("moe"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["memory", "refusal"])
def test_an_error_of_the_backward_is_not_the_forwards(
    error: type[Exception], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(ctx: Any, *grads: Any) -> Any:
        raise error

    monkeypatch.setattr(experts.moe, "_backward", fails)
    experts.moe(*trainable(CASE.args("moe")))
    assert set(log.launched()) >= FORWARD


def test_an_error_of_the_operator_is_raised_when_its_compilations_have_ended(log: Log) -> None:
    def run(*args: Any) -> Tensor:
        experts.moe_forward(*args)
        raise KeyError("after the launches")

    operator = Operator("fails", run, arguments=experts.ROUTED)
    with pytest.raises(KeyError):
        operator(*CASE.args("moe"))
    assert set(log.compiled()) >= FORWARD
    assert log.launched() == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tilemoe-compile")]
    assert _async_compile.active_mode.get() is precompile.active() is None


def test_pytorch_does_not_index_by_what_no_kernel_has_written(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in PyTorch after a plan of kernels, as of fp32 on a GPU: on garbage, a device would assert."""
    used: list[list[str]] = []

    def build(ids: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        triton_plan.count_sort(ids, num_experts)
        return torch_plan.sort_by_expert(ids, num_experts)  # the fake's kernels write nothing

    class Watched(TorchBackend):
        def up_proj_act(self, *args: Any) -> tuple[Tensor, Tensor]:
            used.append(log.launched())
            return super().up_proj_act(*args)

    monkeypatch.setattr(inference, "builder_for", lambda *args, **options: PlanBuilder(build, build))
    monkeypatch.setattr(inference, "choose_experts", lambda *args: Choice("torch", Watched(), ""))
    x, w1, w2, s, b1, b2 = CASE.args("moe")[:6]
    ids = torch.zeros(40, 2, dtype=torch.int64)
    activation = inference.Activation("swiglu", "concatenated", None, None)
    Operator("inference", inference._run)(x, w1, w2, b1, b2, ids, s.view(40, 2), activation)
    (launched,) = used
    assert launched
    assert set(launched) == set(log.compiled())


def test_ctrl_c_while_kernels_compile_leaves_nothing_behind(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(futures: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_async_compile, "as_completed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            experts.moe(*CASE.args("moe"))
    assert _async_compile.active_mode.get() is precompile.active() is None
    forget()
    experts.moe(*CASE.args("moe"))
    assert set(log.launched()) >= FORWARD


def test_a_threads_compilations_are_its_own(log: Log) -> None:
    filters = list(warnings.filters)
    run_in_threads(*[lambda: experts.moe(*CASE.args("moe"))] * 4)
    assert log.launched().count("combine_kernel") == 4, "each ended well"
    assert list(warnings.filters) == filters


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of CPU tensors are built as a GPU's are."""
    builder = PlanBuilder(triton_plan.count_sort, triton_plan.count_sort)
    monkeypatch.setattr(plan_ops, "builder_for", lambda *args: builder)


class Layer(NamedTuple):
    """Operands of a layer; a call of it launches what the layer does, from logits to the last gradient."""

    tokens: int
    d: int
    n: int
    experts: int
    k: int = 8
    frozen: tuple[str, ...] = ()

    def __call__(self) -> None:
        shapes = {"w1": (self.experts, 2 * self.n, self.d), "w2": (self.experts, self.d, self.n)}
        leaves = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in shapes.items()}
        leaves |= {"x": torch.empty(self.tokens, self.d, dtype=torch.bfloat16)}
        logits = torch.zeros(self.tokens, self.experts, requires_grad=True)
        wanted = [leaf.requires_grad_() for name, leaf in leaves.items() if name not in self.frozen]
        scores, *_ = router.select(logits, None, None, self.k, *SELECTION)
        ids = torch.arange(self.k, dtype=torch.int32).expand(self.tokens, -1).contiguous()  # the fake writes none
        o = moe(leaves["x"], leaves["w1"], leaves["w2"], plan_topk(ids, self.experts), scores, kernels="hopper")
        torch.autograd.grad(o, [*wanted, logits], torch.empty_like(o))


SMALL = Layer(40, 128, 64, 4, 2)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_another_number_of_tokens_compiles_nothing(log: Log) -> None:
    SMALL()
    forward = {"up_proj_act_kernel", "gemm_stationary_kernel", "combine_kernel"}
    assert {*BACKWARD, *forward, "place_kernel"} <= set(log.compiled())
    assert {"select_kernel", "select_grad_kernel"} <= set(log.compiled())
    count = len(log.compiled())
    for tokens in (40, 41, 640):
        SMALL._replace(tokens=tokens)()
    assert len(log.compiled()) == count


@pytest.mark.parametrize(
    ("frozen", "gemms"), [(("w1", "w2"), 0), (("w1",), 1), (("x",), 2)], ids=["adapters", "w2 alone", "first layer"]
)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_needs_no_gradient_is_not_compiled(frozen: tuple[str, ...], gemms: int, log: Log) -> None:
    SMALL._replace(frozen=frozen)()
    assert log.compiled().count("gemm_wgrad_kernel") == gemms
    assert log.compiled().count("gemm_stationary_kernel") == (1 if frozen == ("x",) else 2)
