"""Text from a language model, token by token, in one loop on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training import mesh


def sample(
    apply: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> list[int]:
    """Return ``count`` tokens after a prompt.

    Every token is computed from the whole window anew: there is no cache.

    Args:
      apply: ``apply(params, tokens (1, context)) -> logits (1, context, vocabulary)``; a token may not depend on those
        to its right.
      params: the model's.
      prompt: tokens to begin with, at least one; of more than ``context`` the last are seen.
      count: how many to add.
      context: tokens that the model sees.
      temperature: what logits are divided by; 0 takes the largest.
      top_k: how many of the largest logits to draw from; 0 for all.
      seed: of the draws.

    Raises:
      ValueError: the prompt is empty.
    """
    if not len(prompt):
        raise ValueError(
            "a sample needs a prompt of at least one token, got none; write --prompt 'a word', for example"
        )
    last_tokens = np.asarray(prompt, np.int32)[-context:]
    window = jnp.asarray(np.pad(last_tokens, (0, context - len(last_tokens))))
    run = jax.jit(functools.partial(_run, apply, count, temperature, top_k))
    return mesh.on_host(run(params, window, jnp.asarray(len(last_tokens)), jax.random.key(seed))).tolist()


def _run(
    apply: Callable[..., jax.Array],
    count: int,
    temperature: float,
    top_k: int,
    params: Any,
    window: jax.Array,
    length: jax.Array,
    key: jax.Array,
) -> jax.Array:
    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window, length = carry
        logits = apply(params, window[None])[0, length - 1].astype(jnp.float32)
        token = choose(key, logits, temperature, top_k).astype(jnp.int32)
        full = length == len(window)
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, length - 1, length)].set(token)
        return (window, jnp.where(full, length, length + 1)), token

    return jax.lax.scan(step, (window, length), jax.random.split(key, count))[1]


def choose(key: jax.Array, logits: jax.Array, temperature: float, top_k: int) -> jax.Array:
    """A token drawn from the softmax of ``logits`` (vocabulary,), float32, among the ``top_k`` largest."""
    if temperature == 0:
        return jnp.argmax(logits)
    if 0 < top_k < len(logits):
        logits = jnp.where(logits < jax.lax.top_k(logits, top_k)[0][-1], -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)
