"""A float32 value to which a half product is added stays float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import compiled, dtypes_of, flat, half, in_turn, layer_norm, normal, products

import jaxmp

X, W, V = normal(0, 64, 16), normal(1, 16, 16, scale=0.1), normal(2, 16, 16, scale=0.25)
TARGET = normal(3, 64, 16)
ROWS, IDS = normal(4, 10, 16), np.arange(64) % 10


def two_updates(w, x):
    y = x + 280.0
    a = y + (y - 280.0) @ w
    c = a + (a - 280.0) @ w
    return jnp.mean((a - 280.0 - TARGET) ** 2) + jnp.mean((c - 280.0 - TARGET) ** 2)


def one_update(w, x):
    y = x + 280.0
    a = y + (y - 280.0) @ w
    return jnp.mean((a - 280.0 - TARGET) ** 2) + 0.001 * jnp.mean(jnp.tanh(a / 300.0) @ V)


def simulator(w, x):
    place, speed = x + 280.0, 0.1 * TARGET
    for _ in range(2):
        speed = speed + 0.01 * jnp.tanh((place - 280.0) @ w)
        place = place + 0.01 * speed
    return jnp.mean((place - (x + 280.0) - 0.02 * jnp.sin(x)) ** 2)


def clipped_boxes(w, x):
    """Refine boxes layer by layer, as a detector does; a mask leaves some of them as they are."""
    boxes, features = x + 280.0, jnp.tanh(x)
    for _ in range(2):
        features = jnp.tanh(features @ V)
        moved = jnp.clip(boxes + features @ w, 0.0, 512.0)
        boxes = jnp.where(x > 0, moved, boxes)
    return jnp.mean((boxes - 280.0 - TARGET) ** 2) + 0.001 * jnp.mean((boxes / 300.0) @ V)


def coordinates_of_a_graph(w, x):
    """Move nodes by a head that reads the distances between them."""
    places = 280.0 + x
    for _ in range(2):
        distances = jnp.sum((places[:, None] - places[None]) ** 2, -1)
        messages = jnp.tanh(distances @ TARGET / 64.0)
        places = places + messages @ w
    return jnp.mean((places - 280.0 - TARGET) ** 2)


PROGRAMS = (two_updates, one_update, simulator, clipped_boxes, coordinates_of_a_graph)


@pytest.mark.parametrize(("name", "policy"), in_turn([program.__name__ for program in PROGRAMS]))
def test_gradients_through_an_updated_argument_are_accurate(name, policy):
    loss = next(program for program in PROGRAMS if program.__name__ == name)
    gradients = (jax.grad(half(loss, policy)), half(jax.grad(loss), policy), jax.grad(loss))
    *results, true = compiled(lambda *args: [flat_gradient(*args) for flat_gradient in gradients])(W, X)
    for got in results:
        assert np.linalg.norm(flat(got) - flat(true)) < 0.01 * np.linalg.norm(flat(true))
    assert set(products(half(loss, policy), W, X)) == {policy.removeprefix("mixed_")}


def test_the_updated_value_has_a_half_copy_for_each_product_that_reads_it():
    def fun(w, x):
        a = x + x @ w
        return jax.nn.relu(a) @ w, a

    assert products(half(fun), W, X) == ["bfloat16", "bfloat16"]
    assert dtypes_of("add", half(fun), W, X) == ["float32"]
    assert dtypes_of("max", half(fun), W, X) == ["bfloat16"]


def blocks(x, w):
    for _ in range(2):
        x = x + layer_norm(x) @ w
    return layer_norm(x) @ w


STREAMS = {
    "begins with an argument": (lambda w, x: blocks(x, w), "float32"),
    "begins with a position code of an argument": (lambda w, x: blocks(x + jnp.arange(64.0)[:, None], w), "float32"),
    "begins with a constant": (lambda w, x: blocks(jnp.asarray(X), w), "float32"),
    "begins with a grid of pixels": (lambda w, x: blocks(jnp.arange(1024.0).reshape(64, 16) + x @ w, w), "float32"),
    "begins with integers": (lambda w, x: blocks(jnp.asarray(x * 9, int).astype("float32") + x @ w, w), "float32"),
    "begins with a mask": (lambda w, x: blocks((x > 0).astype("float32") + x @ w, w), "bfloat16"),
    "begins with zeros": (lambda w, x: blocks(jnp.asarray(np.zeros((64, 16), np.float32)) + x @ w, w), "bfloat16"),
    "begins with a product": (lambda w, x: blocks(x @ w, w), "bfloat16"),
    "begins with rows of a table": (lambda w, x: blocks(jnp.asarray(ROWS)[jnp.asarray(x[:, 0], int)], w), "bfloat16"),
    "gets a bias": (lambda w, x: blocks(x @ w + w[0], w), "bfloat16"),
    "gets a repeated bias": (lambda w, x: blocks(x @ w + jnp.broadcast_to(w[0], (64, 16)), w), "bfloat16"),
    "gets noise": (lambda w, x: blocks(x @ w + jax.random.normal(jax.random.key(0), (64, 16)), w), "bfloat16"),
    "gets sines of positions": (lambda w, x: blocks(x @ w + jnp.sin(jnp.arange(64.0))[:, None], w), "bfloat16"),
    "gets gated parts": (
        lambda w, x: blocks((h := x @ w) + jnp.multiply(*jnp.split(layer_norm(h) @ jnp.tile(w, 2), 2, -1)), w),
        "bfloat16",
    ),
    "gets a table of positions": (lambda w, x: blocks((x @ w).reshape(4, 16, 16) + w, w), "bfloat16"),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_residual_stream_is_half_unless_it_begins_with_a_float32_argument(name):
    fun, dtype = STREAMS[name]
    program = jax.make_jaxpr(half(fun))(W, X)
    sums = [eqn.outvars[0].aval for eqn in program.eqns if eqn.primitive.name == "add"]
    streams = [aval.dtype.name for aval in sums if aval.size == X.size]
    assert streams[-2:] == [dtype, dtype]


def test_the_bias_of_a_single_example_leaves_its_layer_half_but_its_state_is_float32():
    def layer(w, b, x):
        return jax.nn.relu(x @ w + b) @ w

    def update(w, b, x):
        return (x + jnp.tanh(x @ w)) @ w

    assert dtypes_of("add", half(layer), W, W[0], X[0]) == dtypes_of("add", half(layer), W, W[0], X) == ["bfloat16"]
    assert dtypes_of("add", half(update), W, W[0], X[0]) == dtypes_of("add", half(update), W, W[0], X) == ["float32"]


def test_the_plan_says_why_such_a_sum_is_float32():
    plan = jaxmp.cast_plan(lambda w, x: blocks(x, w), "mixed_bfloat16")(W, X)
    sums = [row.why for row in plan.rows if row.primitive == "add"]
    assert sums.count("added to a value that no product computed") == 2
