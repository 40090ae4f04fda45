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


def noted(call, *phrases, what=""):
    """Assert that a call raises an error with one note, which has these phrases; return the error."""
    with pytest.raises(Exception) as caught:
        call()
        pytest.fail(f"not refused: {what}")
    notes = [note for note in getattr(caught.value, "__notes__", []) if "JAX has removed" not in note]
    assert len(notes) == 1, (what, caught.value)
    for phrase in phrases:
        assert phrase in notes[0], what
    assert len(notes[0]) <= 2 * 120, what
    return caught.value
