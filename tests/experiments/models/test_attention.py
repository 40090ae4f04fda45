"""The experiments' attention compared with float64, and its use of cuDNN."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import attention

pytestmark = pytest.mark.once

SHAPE = (2, 6, 2, 8)
MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1]])


def operands(dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(SHAPE, np.float32), dtype) for _ in range(3)]


def formula(q: Any, k: Any, v: Any, causal: bool, mask: Any) -> np.ndarray:
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    out = np.zeros(q.shape)
    for batch, query, head in np.ndindex(*q.shape[:3]):
        visible = [i for i in range(k.shape[1]) if (not causal or i <= query) and (mask is None or mask[batch, i])]
        scores = np.exp(k[batch, visible, head] @ q[batch, query, head] / np.sqrt(q.shape[-1]))
        out[batch, query, head] = scores @ v[batch, visible, head] / scores.sum()
    return out


@pytest.mark.parametrize(
    ("causal", "mask", "dtype"),
    [(True, None, "bfloat16"), (False, MASK, "float16"), (True, MASK, "float32")],
)
def test_attention_is_the_formula_to_the_rounding_of_its_inputs(causal, mask, dtype):
    q, k, v = operands(dtype)
    ours = attention.attention(q, k, v, causal=causal, mask=None if mask is None else jnp.asarray(mask))
    assert ours.dtype == dtype
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(ours, np.float64), formula(q, k, v, causal, mask), rtol=0, atol=tolerance)


class Kernel:
    """Replace ``jax.nn.dot_product_attention``; accept only half precision."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        self.calls.append({"dtype": q.dtype.name, **options})
        if q.dtype == jnp.float32:
            raise NotImplementedError("Q must be fp16/bf16")
        return 2 * v


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stand_in = Kernel()
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return stand_in


def test_cudnn_computes_half_inputs_and_plain_products_compute_float32(kernel):
    q, k, v = operands("bfloat16")
    with attention.implementation("cudnn"):
        np.testing.assert_array_equal(attention.attention(q, k, v, causal=True, mask=jnp.asarray(MASK)), 2 * v)
        with attention.implementation("portable"):
            assert not jnp.array_equal(attention.attention(q, k, v), 2 * v)
    assert not jnp.array_equal(attention.attention(q, k, v), 2 * v)  # a CPU
    (call,) = kernel.calls
    assert (call["dtype"], call["implementation"], call["is_causal"]) == ("bfloat16", "cudnn", True)
    np.testing.assert_array_equal(call["mask"], np.broadcast_to(MASK.astype(bool)[:, None, None], (2, 1, 6, 6)))

    kernel.calls.clear()
    q, k, v = operands("float32")
    with attention.implementation("cudnn"):
        ours = attention.attention(q, k, v)
    assert not kernel.calls
    np.testing.assert_allclose(ours, formula(q, k, v, False, None), atol=1e-5)
