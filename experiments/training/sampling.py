"""Sample text from a language model, token by token, in a loop on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
    """Return ``count`` tokens that continue a prompt.

    There is no cache. Each token is computed from the whole window.

    Args:
      apply: ``apply(params, tokens (1, context)) -> logits (1, context, vocabulary)``. The logits at a position must
        not depend on later tokens.
      params: the params of the model.
      prompt: the tokens to continue, at least one. Only the last ``context`` tokens are used.
      count: the number of tokens to add.
      context: the number of tokens that the model sees.
      temperature: the number by which logits are divided; 0 takes the token with the largest logit.
      top_k: the number of largest logits to draw from; 0 for all.
      seed: the seed of the draws.

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
    return jax.device_get(run(params, window, jnp.asarray(len(last_tokens)), jax.random.key(seed))).tolist()


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
    """Draw a token from the softmax of the ``top_k`` largest logits.

    The logits are float32 (vocabulary,).
    """
    if temperature == 0:
        return jnp.argmax(logits)
    if 0 < top_k < len(logits):
        logits = jnp.where(logits < jax.lax.top_k(logits, top_k)[0][-1], -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)
