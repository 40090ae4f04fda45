"""jaxmp requests no 64-bit dtype, whatever JAX does with such requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax's Adam

W, X = (np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8) + offset for offset in (0, np.float32(0.1)))


@pytest.fixture
def explicit_x64() -> Iterator[Callable[[str], None]]:
    """Return a function that sets what JAX does with requests for 64-bit dtypes while x64 is disabled."""
    before = jax.config.jax_explicit_x64_dtypes
    yield lambda mode: jax.config.update("jax_explicit_x64_dtypes", mode)
    jax.config.update("jax_explicit_x64_dtypes", before)


def loss_fn(params, model_state, batch, rng):
    with jax.named_scope("layer"):
        x = jnp.tanh(batch @ params["w"] + 0.01 * jax.random.normal(rng, (8,)))
    logits = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["w"]), None), x, length=2)[0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), model_state


def state_of(tx=None, dtype="float32"):
    tx = jaxmp.loss_scaling(tx or optax.adam(1e-2), jaxmp.DynamicLossScale(2.0**8))
    return jaxmp.TrainState.create(params={"w": jnp.asarray(W, dtype)}, tx=tx, rng=0)


def autocast_gradient():
    fun = jaxmp.autocast(lambda w, x: loss_fn({"w": w}, None, x, jax.random.key(0))[0], "mixed_float16")
    return jax.jit(jax.value_and_grad(fun)), (W, X)


def loss_scaled_update():
    state = state_of()
    return jax.jit(state.tx.update), (state.params, state.opt_state, state.params)


def train_step():
    step = jaxmp.make_train_step(loss_fn, policy="mixed_float16", accumulate_steps=2, remat="dots", donate=False)
    return step, (state_of(), X)


def low_precision_step():
    tx = jaxmp.low_precision(optax.adam(1e-2), rounding="stochastic")
    step = jaxmp.make_train_step(loss_fn, policy="bfloat16", donate=False)
    return step, (state_of(tx, "bfloat16"), X)


def counters():
    return lambda *args: jaxmp.inspect.numerics(train_step()[0])(*args), (state_of(), X)


def watched_step():
    watch = jaxmp.inspect.Watch(train_step()[0], every=1)
    return lambda *args: (watch(1, *args), watch.scalars(1)), (state_of(), X)


TRACED = [autocast_gradient, loss_scaled_update, train_step, low_precision_step]
# The tests loop over the calls, because `make newest` runs only the first case of a parametrised test.


def test_no_call_requests_a_64_bit_dtype(explicit_x64):
    explicit_x64("error")
    with pytest.raises(ValueError, match="float64"):
        jnp.zeros(3, "float64")
    for call in (*TRACED, counters, watched_step):
        fun, args = call()
        jax.block_until_ready(fun(*args))


def test_no_program_has_a_64_bit_value_where_jax_allows_it(explicit_x64):
    explicit_x64("allow")
    assert jnp.zeros(3, "float64").dtype == "float64"
    for call in TRACED:
        fun, args = call()
        program = str(jax.make_jaxpr(getattr(fun, "jitted", fun))(*args))
        assert re.search(r"\bf(16|32)\[", program) and not re.search(r"\b[fiu]64\[", program), call.__name__
