"""Casts of large weights in kernels of their own, on TPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.engine import separate_casts
from jaxmp.inspect.compiled import compiling
from jaxmp.program.walk import equations

LARGE, SMALL = (4096, 4100), (4096, 4096)  # more than half of the 128 MiB in a core of v5e, and exactly half


def loss(w, x):
    return jnp.sum(jnp.square(x @ w.T))


def separate_casts_of(fun, *shapes, device="v5e"):
    """Return the types of the separate casts of a program for a device."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with jaxmp.hardware.assumed(device):
        program = jax.make_jaxpr(fun)(*arguments)
    return [eqn.outvars[0].aval.str_short() for eqn in equations(program) if eqn.primitive.name == "separate_cast"]


def test_a_large_weight_is_cast_once_for_its_products_forward_and_backward():
    gradients = jax.grad(jaxmp.autocast(loss, "mixed_bfloat16"), (0, 1))
    assert separate_casts_of(gradients, LARGE, (64, LARGE[1])) == ["bfloat16[4096,4100]"]


def test_a_small_weight_is_cast_in_each_product():
    assert separate_casts_of(jaxmp.autocast(loss, "mixed_bfloat16"), SMALL, (64, SMALL[1])) == []


def test_the_limit_follows_the_memory_of_the_core():
    shapes = (2048, 4100), (64, 4100)
    limits = {"v5e": 0, "v6e": 0, "v4": 1, "v5p": 1, "tpu7x": 1}
    for device, count in limits.items():
        assert len(separate_casts_of(jaxmp.autocast(loss, "mixed_bfloat16"), *shapes, device=device)) == count


def test_other_devices_have_no_separate_cast():
    half = jaxmp.autocast(loss, "mixed_bfloat16")
    assert separate_casts_of(half, LARGE, (64, LARGE[1]), device="h200") == []
    program = jax.make_jaxpr(half)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in (LARGE, (64, LARGE[1]))))
    assert "separate_cast" not in str(program)  # a CPU


def test_activations_and_elementwise_operands_have_no_separate_cast():
    def fun(w, scale, x):
        hidden = jnp.tanh(x @ w)
        return jnp.sum((hidden * scale) @ w)

    half = jaxmp.autocast(fun, "mixed_bfloat16")
    rows = 2**18
    assert separate_casts_of(half, (128, 128), (rows, 128), (rows, 128)) == [
        "bfloat16[262144,128]"
    ]  # the inputs of the function


def test_float8_products_read_the_weight_itself():
    half = jaxmp.autocast(lambda w, x: jnp.sum(x @ w), "mixed_float8")
    assert separate_casts_of(half, (4096, 4096), (4096, 4096), device="tpu7x") == []


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.vmap(f, (None, 0)), jax.checkpoint])
def test_values_and_gradients_stay_the_same(transform, monkeypatch):
    half = jaxmp.autocast(loss, "mixed_bfloat16")

    def gradients(w, x):
        return jax.grad(lambda w, x: jnp.sum(transform(half)(w, x)), (0, 1))(w, x)

    rng = np.random.default_rng(0)
    w, x = np.float32(rng.normal(size=(16, 8))), np.float32(rng.normal(size=(3, 4, 8)))
    expected = jax.jit(gradients)(w, x)
    monkeypatch.setattr(separate_casts, "_SHARE", 0)
    with jaxmp.hardware.assumed("v5e"):
        assert "separate_cast" in str(jax.make_jaxpr(gradients)(w, x))
        results = jax.jit(gradients)(w, x)
    jax.tree.map(np.testing.assert_array_equal, results, expected)


@pytest.mark.absent_tpu
def test_the_compiled_program_casts_a_large_weight_in_a_kernel_of_its_own(monkeypatch):
    def kernels_with_half_weight():
        text = compiling.compiled(half, shapes, "v5e").as_text()
        return re.findall(r"= bf16\[256,384\]\S* (\w+)", text[text.index("ENTRY") :])

    half = jaxmp.autocast(lambda x, w: jnp.sum(x @ w), "mixed_bfloat16")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 256), (256, 384))]
    assert kernels_with_half_weight() == []
    monkeypatch.setattr(separate_casts, "_SHARE", 0)  # the weight is large
    assert kernels_with_half_weight() == ["convert"]
