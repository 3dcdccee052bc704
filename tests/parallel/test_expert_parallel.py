"""Experts divided over four processes, or GPUs, in anybody's module give the loss and the gradients of one process."""

from collections.abc import Iterator

import expert_checks
import pytest
import wrapper_checks
from expert_checks import RUN
from ranks import named

pytestmark = pytest.mark.dist
CHECKS = [*expert_checks.CHECKS, *wrapper_checks.CHECKS]
QUICK = (
    expert_checks.check_any_module,
    expert_checks.check_checkpoints,
    wrapper_checks.check_clipping,
    wrapper_checks.check_adapters_of_peft_on_experts,
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Which the processes share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN, str(tmp_path_factory.mktemp("shared")))
        yield


@pytest.mark.parametrize("name", named(CHECKS, *QUICK))
def test_on_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_gpus(name: str, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
