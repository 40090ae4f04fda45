"""Two processes share one state, and skip and fail at the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from joined_processes import results_of_two

pytestmark = pytest.mark.slow("starts two processes, which compile")
SCRIPT = Path(__file__).parent / "tools" / "two_processes.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Return the results of both processes. The second waits 20 ms in each step."""
    return results_of_two(SCRIPT, tmp_path_factory.mktemp("both"), "0.02")


def test_a_state_is_made_on_the_devices_of_both(both):
    assert [results["home"] for results in both] == [1, 1]


def test_a_bad_row_on_one_skips_the_step_on_both(both):
    for results in both:
        assert results["scales"] == [256.0, 256.0, 128.0]
        assert results["skips"] == [False, True, False]
    assert both[0]["losses"] == both[1]["losses"]


def test_both_end_with_the_same_error_at_the_same_step(both):
    first, second = both
    assert first["last"] == second["last"] < 30
    assert first["error"] == second["error"]
    assert (
        "5 steps in a row" in first["error"] or "steps in a row were skipped, and the loss scale 1 " in first["error"]
    )
    assert "gradients of 'a', 'b'; the batch. Look for NaN" in first["error"]
