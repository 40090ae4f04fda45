"""Errors of the inspect tools about wrong arguments, and rare results as text."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmp.inspect import audit, tune
from jaxmp.inspect.plots.drawing import percent

pytestmark = pytest.mark.once
X = jnp.ones((8, 8))


def loss_fn(w: Any, x: Any) -> Any:
    with jax.named_scope("layer"):
        return jnp.mean((x @ w) ** 2)


MISTAKES = {
    "memory of a program that was not compiled": (
        lambda folder: audit(loss_fn, expect="mixed_bfloat16", compile=False)(X, X).check(max_bytes=1),
        ValueError,
        "max_bytes needs a compiled program",
    ),
    "batches of arrays": (
        lambda folder: tune(loss_fn, "mixed_bfloat16")(X, X, batches=[X]),
        TypeError,
        "write [(batch,)]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_argument_is_refused(mistake, tmp_path):
    call, kind, phrase = MISTAKES[mistake]
    with pytest.raises(kind, match=re.escape(phrase)):
        call(tmp_path)


def test_an_audit_that_was_not_compiled_does_not_know_what_ran():
    shown = str(audit(jax.grad(loss_fn), expect="mixed_bfloat16", compile=False)(X, X))
    assert "peak memory" not in shown and "?" in shown


def test_a_share_is_shown_as_0_or_100_percent_only_if_it_is_exact():
    assert [percent(share) for share in (0, 0.0004, 0.5, 0.9996, 1)] == ["0%", "<0.1%", "50.0%", ">99.9%", "100%"]
