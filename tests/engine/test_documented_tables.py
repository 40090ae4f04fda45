"""Common programs have the dtypes that docs/autocast.md documents.

Each operation is in a scope with its name. A table has the dtype in which each operation computes.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax import named_scope as scope
from places import ROOT
from plan_tools import plan, shape

from jaxmp.program.primitives import AMPLIFIERS

HALF, FULL = "bfloat16", "float32"
COMPUTES_NOTHING = {"clear", "opaque", "recurse"}  # moves; the author's casts and positions; bodies


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * scale + bias


def batch_norm(x, scale, bias):
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x - mean).mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def convolution(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gpt_block(params, tokens, labels):
    x = params["table"][tokens]
    with scope("position sum"):
        x = x + params["positions"]
    with scope("first layer norm"):
        y = layer_norm(x, params["scale"], params["shift"])
    with scope("projections"):
        q, k, v = jnp.split(y @ params["qkv"] + params["qkv_bias"], 3, -1)
    with scope("scores"):
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
    with scope("scaling, mask"):
        scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores / 8.0, -1e9)
    with scope("softmax"):
        weights = jax.nn.softmax(scores)
    with scope("weighted values"):
        attended = jnp.einsum("bqk,bkd->bqd", weights, v)
    with scope("projections"):
        attended = attended @ params["out"] + params["out_bias"]
    with scope("residual sums"):
        x = x + attended
    with scope("second layer norm"):
        y = layer_norm(x, params["scale"], params["shift"])
    with scope("perceptron"):
        y = jax.nn.gelu(y @ params["up"] + params["up_bias"]) @ params["down"] + params["down_bias"]
    with scope("residual sums"):
        x = x + y
    with scope("last layer norm"):
        y = layer_norm(x, params["scale"], params["shift"])
    with scope("logits"):
        logits = y @ params["table"].T
    with scope("cross-entropy"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


GPT = {
    "table": shape(100, 64), "positions": shape(16, 64), "scale": shape(64), "shift": shape(64), "qkv": shape(64, 192),
    "qkv_bias": shape(192), "out": shape(64, 64), "out_bias": shape(64), "up": shape(64, 256), "up_bias": shape(256),
    "down": shape(256, 64), "down_bias": shape(64),
}  # fmt: skip
TOKENS = jax.ShapeDtypeStruct((2, 16), "int32")


def resnet_block(params, images, labels):
    with scope("convolutions"):
        x = convolution(images, params["stem"])
    with scope("batch norms"):
        x = batch_norm(x, params["scale"], params["shift"])
    with scope("relus"):
        x = jax.nn.relu(x)
    with scope("convolutions"):
        y = convolution(x, params["first"])
    with scope("batch norms"):
        y = batch_norm(y, params["scale"], params["shift"])
    with scope("relus"):
        y = jax.nn.relu(y)
    with scope("convolutions"):
        y = convolution(y, params["second"])
    with scope("batch norms"):
        y = batch_norm(y, params["scale"], params["shift"])
    with scope("residual sum"):
        x = x + y
    with scope("last relu"):
        x = jax.nn.relu(x)
    with scope("average pooling"):
        x = x.mean((1, 2))
    with scope("logits"):
        logits = x @ params["head"]
    with scope("last bias"):
        logits = logits + params["bias"]
    with scope("cross-entropy"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


RESNET = {
    "stem": shape(3, 3, 3, 16), "first": shape(3, 3, 16, 16), "second": shape(3, 3, 16, 16), "scale": shape(16),
    "shift": shape(16), "head": shape(16, 10), "bias": shape(10),
}  # fmt: skip


def lstm(params, xs, labels):
    def step(carry, x):
        h, c = carry
        with scope("products"):
            from_input, from_state = x @ params["input"], h @ params["state"]
        with scope("sum of products"):
            z = from_input + from_state
        with scope("bias"):
            z = z + params["bias"]
        i, f, g, o = jnp.split(z, 4, -1)
        with scope("gates"):
            i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        with scope("cell state"):
            c = f * c + i * g
        with scope("hidden state"):
            h = o * jnp.tanh(c)
        return (h, c), None

    zeros = jnp.zeros((8, 32))
    (h, _), _ = lax.scan(step, (zeros, zeros), xs)
    with scope("logits"):
        logits = h @ params["head"]
    with scope("cross-entropy"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


LSTM = {"input": shape(16, 128), "state": shape(32, 128), "bias": shape(128), "head": shape(32, 10)}


def vq_vae(params, x):
    with scope("encoder"):
        h = jax.nn.relu(x @ params["in"] + params["bias"]) @ params["code"]
    with scope("last bias of the encoder"):
        z = h + params["code_bias"]
    with scope("distances"):
        codes = params["codes"]
        distances = jnp.square(z).sum(-1, keepdims=True) - 2 * z @ codes.T + jnp.square(codes).sum(-1)
    q = codes[jnp.argmin(distances, -1)]
    with scope("straight-through estimator"):
        through = z + lax.stop_gradient(q - z)
    with scope("decoder"):
        decoded = jax.nn.relu(through @ params["decode"] + params["bias"]) @ params["out"]
    with scope("losses"):
        commitment = jnp.square(lax.stop_gradient(q) - z).mean()
        return jnp.square(decoded - x).mean() + 0.25 * commitment


VQ_VAE = {
    "in": shape(64, 32), "bias": shape(32), "code": shape(32, 8), "code_bias": shape(8), "codes": shape(128, 8),
    "decode": shape(8, 32), "out": shape(32, 64),
}  # fmt: skip
LABELS = jax.ShapeDtypeStruct((8,), "int32")

PROGRAMS = {
    "GPT block": (gpt_block, (GPT, TOKENS, TOKENS)),
    "ResNet block": (resnet_block, (RESNET, shape(8, 8, 8, 3), LABELS)),
    "LSTM in a scan": (lstm, (LSTM, shape(12, 8, 16), LABELS)),
    "VQ-VAE": (vq_vae, (VQ_VAE, shape(16, 64))),
}
TABLES = {
    "GPT block": {
        "position sum": FULL, "first layer norm": FULL, "projections": HALF, "scores": HALF, "scaling, mask": FULL,
        "softmax": FULL, "weighted values": HALF, "residual sums": HALF, "second layer norm": FULL, "perceptron": HALF,
        "last layer norm": FULL, "logits": HALF, "cross-entropy": FULL,
    },
    "ResNet block": {
        "convolutions": HALF, "batch norms": FULL, "relus": HALF, "residual sum": HALF, "last relu": FULL,
        "average pooling": FULL, "logits": HALF, "last bias": FULL, "cross-entropy": FULL,
    },
    "LSTM in a scan": {
        "products": HALF, "sum of products": HALF, "bias": FULL, "gates": FULL, "cell state": FULL,
        "hidden state": FULL, "logits": HALF, "cross-entropy": FULL,
    },
    "VQ-VAE": {
        "encoder": HALF, "last bias of the encoder": FULL, "distances": FULL, "straight-through estimator": FULL,
        "decoder": HALF, "losses": FULL,
    },
}  # fmt: skip


def dtypes_of(name):
    """Return the dtypes in which the operations of each scope compute."""
    fun, args = PROGRAMS[name]
    dtypes = {}
    for row in plan(fun, *args).rows:
        floats = {dtype for dtype in row.operands if "float" in dtype}
        if row.path and row.cls not in COMPUTES_NOTHING and floats:
            dtypes.setdefault(row.path.split("/")[0], set()).update(floats)
    return dtypes


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_operation_has_the_dtype_that_a_reader_predicts(name):
    assert dtypes_of(name) == {operation: {dtype} for operation, dtype in TABLES[name].items()}


def test_the_documentation_has_these_tables():
    page = (ROOT / "docs" / "autocast.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|`]+) \| ([^|`]+) \| ([^|`]+) \|$", page, re.MULTILINE)
    tables = {name: (half.split("; "), full.split("; ")) for name, half, full in cells if name in TABLES}
    for name, table in TABLES.items():
        half = [operation for operation, dtype in table.items() if dtype == HALF]
        full = [operation for operation, dtype in table.items() if dtype == FULL]
        assert tables[name] == (half, full)


def test_the_amplifiers_are_those_that_the_documentation_lists():
    text = (ROOT / "docs" / "autocast.md").read_text()
    (listed,) = re.findall(r"These functions are amplifiers: (.*), and the remainder\.", text)
    assert set(re.findall(r"`(\w+)`", listed)) == set(AMPLIFIERS) - {"rem"}
