"""BERT's masking (Devlin et al. 2018, arXiv 1810.04805), drawn on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

IGNORE = -100  # the target of a token that is not predicted


class Masked(NamedTuple):
    """Tokens of which some are masked, and the targets to predict.

    Both arrays are int32 (batch, sequence).
    """

    tokens: jax.Array
    targets: jax.Array


def mask(key: jax.Array, tokens: jax.Array, size: int, mask_token: int, end: int | None, rate: float = 0.15) -> Masked:
    """Choose tokens to predict.

    Of the chosen tokens, 80 % become [MASK], 10 % become a random token, and 10 % stay. Each token is chosen
    independently, so the number of chosen tokens varies. All shapes are fixed.

    Args:
      key: the key of all random numbers.
      tokens: int32 (batch, sequence).
      size: random tokens are drawn from 0 to size - 1.
      mask_token: the number of [MASK].
      end: the token between documents, which is never chosen; None if there is no such token.
      rate: the share of tokens that are chosen.

    Returns:
      The input tokens, and the targets: the original token where a token was chosen, ``IGNORE`` elsewhere.

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
