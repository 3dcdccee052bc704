"""Windows over files: the protocol with pauses and planted faults, what does not fit, backwards in any order."""

import pytest
import window_checks
from ranks import named

pytestmark = pytest.mark.dist
CHECKS = window_checks.CHECKS
QUICK = (
    window_checks.check_with_pauses,
    window_checks.check_one_cta_at_a_time_in_any_order,
    window_checks.check_results_are_computed_where_they_are_read,
    window_checks.check_results_stay_while_other_tokens_are_sent,
    window_checks.check_results_that_others_replaced,
    window_checks.check_an_overflow,
    window_checks.check_one_rank_has_more_tokens_than_there_is_room_for,
    window_checks.check_what_a_layer_saves,
    window_checks.check_nothing_is_pulled_that_nobody_needs,
    window_checks.check_scores_of_another_dtype_in_turn,
    window_checks.check_a_window_that_inference_opened,
    window_checks.check_saved_bytes_follow_each_layer,
    window_checks.check_one_graph,
)


@pytest.mark.parametrize("results", ["files"], indirect=True)
@pytest.mark.parametrize("name", named(CHECKS, *QUICK))
def test_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
