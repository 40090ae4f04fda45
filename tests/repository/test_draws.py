"""The examples of a property are a function of that property."""

from __future__ import annotations

import importlib

import hypothesis
import hypothesis.strategies as st
import pytest


def drawn():
    examples = []

    @hypothesis.settings(max_examples=300)
    @hypothesis.given(st.floats(), st.integers())
    def draws(x, n):
        examples.append(repr((x, n)))

    draws()
    return examples


@pytest.mark.once
def test_a_property_has_the_same_examples_whatever_was_imported_before(tmp_path, monkeypatch):
    before = drawn()
    numbers = [number * 1.2345678 for number in range(100)] + [*range(70_001, 70_101)]
    (tmp_path / "numbers_of_ours.py").write_text("\n".join(f"N{i} = {number}" for i, number in enumerate(numbers)))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("numbers_of_ours")
    assert drawn() == before and len(set(before)) > 200
