"""Tracing under a policy or autocast makes not many more calls than tracing the bare model: they are counted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest

from experiments.benchmarks import tracing

pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.once]  # Flax's norms; the ratios differ little

# Of 12 layers they are 1.23, 1.30, 1.79 and 1.63: NNX's own tracing takes half as much.
LIMITS = {"Linen": {"apply_policy": 1.35, "autocast": 1.42}, "NNX": {"apply_policy": 1.87, "autocast": 1.8}}


def calls_of(fun: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """How many functions run, in Python or in C, while ``fun`` is traced."""
    count, before = 0, sys.getprofile()

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    make = jax.make_jaxpr(fun)
    sys.setprofile(note)
    try:
        make(*args)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("api", LIMITS)
def test_tracing_a_model_makes_few_more_calls_than_tracing_it_bare(api):
    calls: dict[str, int] = {}
    for round_ in range(2):  # the first warms JAX's caches up
        programs = tracing.losses(tracing.APIS[api], 4, "mixed_bfloat16", round_)
        calls = {name: calls_of(fun, args) for name, (fun, args) in programs.items()}
    bare = calls.pop("float32")
    for name, limit in LIMITS[api].items():
        assert calls[name] <= limit * bare, f"{api}, {name}: {calls[name] / bare:.2f} times the calls"
