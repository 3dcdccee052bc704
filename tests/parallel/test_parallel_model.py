"""A decoder that four processes share, and two or four GPUs through NCCL, gives the loss and the gradients of one."""

import accumulation_checks
import parallel_checks
import pytest
from ranks import named

pytestmark = pytest.mark.dist
CHECKS = [*parallel_checks.CHECKS, *accumulation_checks.CHECKS]
QUICK = (
    parallel_checks.check_fsdp, parallel_checks.check_expert_parallel_and_fsdp, parallel_checks.check_replayed_routing,
    parallel_checks.check_training, parallel_checks.check_a_model_is_sharded_once,
    accumulation_checks.check_nothing_else_touches_the_sums,
)  # fmt: skip


@pytest.mark.parametrize("name", named(CHECKS, *QUICK))
def test_decoder_on_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_decoder_on_gpus(name: str, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
