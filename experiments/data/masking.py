"""BERT's masking (Devlin et al. 2018, arXiv 1810.04805), drawn on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

IGNORE = -100  # the target of a token that is not to be guessed


class Masked(NamedTuple):
    """Tokens with some of them hidden, and what is to be guessed; both int32 (batch, sequence)."""

    tokens: jax.Array
    targets: jax.Array


def mask(key: jax.Array, tokens: jax.Array, size: int, mask_token: int, end: int | None, rate: float = 0.15) -> Masked:
    """Chooses tokens to guess; 80 % of them become [MASK], 10 % any token, 10 % stay.

    Every token is chosen by itself, so that the number of them varies and no shape does.

    Args:
      key: decides everything.
      tokens: int32 (batch, sequence).
      size: tokens to draw from, 0 to size - 1.
      mask_token: the number of [MASK].
      end: a token that is never chosen, that between documents; None if there is none.
      rate: the share of tokens chosen.

    Returns:
      The tokens to show, and the targets: the true token where one was chosen, ``IGNORE`` elsewhere.

    >>> shown, targets = mask(jax.random.key(0), jnp.full((1, 1000), 7), 10, 10, None)
    >>> bool(jnp.all((targets == 7) | (targets == IGNORE))), bool(jnp.all(shown[targets == IGNORE] == 7))
    (True, True)
    """
    choice_key, fate_key, token_key = jax.random.split(key, 3)
    chosen = jax.random.bernoulli(choice_key, rate, tokens.shape)
    if end is not None:
        chosen &= tokens != end
    fate = jax.random.uniform(fate_key, tokens.shape)
    any_token = jax.random.randint(token_key, tokens.shape, 0, size, tokens.dtype)
    hidden = jnp.where(fate < 0.8, jnp.asarray(mask_token, tokens.dtype), jnp.where(fate < 0.9, any_token, tokens))
    return Masked(jnp.where(chosen, hidden, tokens), jnp.where(chosen, tokens, jnp.asarray(IGNORE, tokens.dtype)))
