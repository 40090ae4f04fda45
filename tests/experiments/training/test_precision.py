"""The flags of precision, for several loss functions at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from experiments.training.precision import split_overrides

X = jax.ShapeDtypeStruct((4, 4), "float32")


def in_scope(name):
    def loss(x):
        with jax.named_scope(name):
            return jnp.sum(x @ x)

    return loss, (X,)


def options_with(*patterns):
    return {"policy": "mixed_bfloat16", "overrides": dict.fromkeys(patterns, "float32")}


def test_each_loss_function_gets_the_overrides_that_match_in_it():
    ours, theirs = split_overrides(options_with("train", "*", "test"), [in_scope("train"), in_scope("test")])
    assert ours == options_with("train", "*") and theirs == options_with("*", "test")


def test_an_override_that_matches_in_none_is_an_error_and_so_is_any_other():
    with pytest.raises(ValueError, match=r"every override must match .* 'nope' matched none; nearest paths: 'train'"):
        split_overrides(options_with("train", "nope"), [in_scope("train"), in_scope("test")])

    def loss(x):
        raise ValueError("a batch has two axes")

    with pytest.raises(ValueError, match="a batch has two axes"):
        split_overrides(options_with("train"), [in_scope("train"), (loss, (X,))])
