"""The check that a call is refused with a helpful error."""

from __future__ import annotations

import pytest


def refused(call, kind, *phrases, what=""):
    """Assert that a call raises an error with these phrases and at most three lines."""
    with pytest.raises(kind) as caught:
        call()
        pytest.fail(f"not refused: {what}")
    assert type(caught.value) is kind, what
    message = str(caught.value)
    for phrase in phrases:
        assert phrase in message, what
    assert len(message) <= 3 * 120, what
