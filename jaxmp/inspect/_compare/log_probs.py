"""Compare the log-probabilities that two programs give the same tokens: :func:`jaxmp.inspect.compare_log_probs`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base import tables


@dataclasses.dataclass(frozen=True)
class LogProbComparison(tables.Shown):
    """The differences of two models in the log-probabilities of the same tokens, in nats.

    The difference of a token is ``log p_train - log p_serve``. It is the logarithm of the importance ratio in
    reinforcement learning.

    Attributes:
      tokens: the number of tokens.
      rms: the root mean square of the differences.
      mean_absolute_difference: the mean magnitude of the differences.
      largest_difference: the largest magnitude of a difference.
      kl: the mean KL divergence at a token, ``KL(p_serve || p_train)``. It is exact if logits were compared. Otherwise
        it is the mean of ``ratio - 1 - log(ratio)``, an estimate for tokens that the served model drew.
      flips: the share of tokens at which the largest logits of the models are of different tokens; None without logits.
    """

    tokens: int
    rms: float
    mean_absolute_difference: float
    largest_difference: float
    kl: float
    flips: float | None

    def _shown(self) -> Any:
        title = f"The log-probabilities of {self.tokens} tokens differ by {self.rms:.2e} nats (root mean square)"
        columns = "rms", "mean\n|difference|", "largest\n|difference|", "KL(serve, train)", "flips"
        numbers = self.rms, self.mean_absolute_difference, self.largest_difference, self.kl
        flips = "" if self.flips is None else f"{self.flips:.2%}"
        return title, columns, [[*(f"{number:.2e}" for number in numbers), flips]], []


def compare_log_probs(train: Any, serve: Any, tokens: Any = None, *, where: Any = None) -> LogProbComparison:
    """Compare the log-probabilities that a trained and a served model give the same tokens.

    Use it for reinforcement learning, where a difference changes the importance ratios of the loss. Pass the
    log-probabilities of the tokens, as inference servers return them, or the logits of both models with ``tokens``.

    Args:
      train: the log-probabilities of the tokens in the trained model, in any shape. With ``tokens``, the logits of the
        trained model. The last axis of logits is the vocabulary.
      serve: the same numbers of the served model.
      tokens: the tokens, of the shape of the logits without the last axis.
      where: a boolean for each token: whether it counts. Leave out padding and prompts. None means all tokens.

    Raises:
      ValueError: the shapes of the arguments do not fit, or no token counts.

    >>> train = jnp.log(jnp.array([[0.6, 0.4], [0.2, 0.8]]))
    >>> serve = jnp.log(jnp.array([[0.4, 0.6], [0.2, 0.8]]))
    >>> comparison = compare_log_probs(train, serve, jnp.array([0, 1]))
    >>> comparison.largest_difference, comparison.flips  # log(0.6 / 0.4), and one of two largest logits
    (0.405..., 0.5)
    """
    counts = _counted_tokens(np.shape(train), np.shape(serve), None if tokens is None else np.shape(tokens), where)
    if tokens is None:
        difference = np.asarray(train, np.float64)[counts] - np.asarray(serve, np.float64)[counts]
        kl, flips = float(np.mean(np.expm1(difference) - difference)), None
    else:
        of_logits = _of_logits(jnp.asarray(train), jnp.asarray(serve), jnp.asarray(tokens))
        difference, divergences, flipped = (np.asarray(array, np.float64)[counts] for array in of_logits)
        kl, flips = float(np.mean(divergences)), float(np.mean(flipped))
    return LogProbComparison(
        tokens=difference.size,
        rms=float(np.sqrt(np.mean(difference**2))),
        mean_absolute_difference=float(np.mean(np.abs(difference))),
        largest_difference=float(np.max(np.abs(difference))),
        kl=kl,
        flips=flips,
    )


_Shape = tuple[int, ...]


def _counted_tokens(train: _Shape, serve: _Shape, tokens: _Shape | None, where: Any) -> np.ndarray:
    """Return a boolean for each token: whether it counts."""
    if train != serve:
        raise ValueError(f"train and serve need equal shapes, got {train} and {serve}; pass those of the same tokens")
    if tokens is None:
        tokens = train
    elif tokens != train[:-1]:
        raise ValueError(
            f"tokens need the shape of the logits without the vocabulary, {train[:-1]}, got {tokens}; for the "
            "log-probabilities of the tokens alone, leave tokens out"
        )
    counts = np.ones(tokens, bool) if where is None else np.asarray(where, bool)
    if counts.shape != tokens or not counts.any():
        raise ValueError(
            f"where needs a boolean for each token, {tokens}, and one that is True, got {counts.shape} with "
            f"{counts.sum()}; pass the mask of the tokens that the model drew"
        )
    return counts


@jax.jit
def _of_logits(train: jax.Array, serve: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return for each token: the difference, the KL divergence, and whether the largest logit flips."""
    log_train = jax.nn.log_softmax(train.astype(jnp.float32))
    log_serve = jax.nn.log_softmax(serve.astype(jnp.float32))
    log_ratio = log_train - log_serve
    difference = jnp.take_along_axis(log_ratio, tokens[..., None], -1)[..., 0]
    # The sum of p_serve * (ratio - 1) is 0. With it, all terms are positive, and small divergences stay accurate.
    p_serve = jnp.exp(log_serve)
    terms = jnp.where(p_serve > 0, p_serve * (jnp.expm1(log_ratio) - log_ratio), jnp.exp(log_train))
    flips = jnp.argmax(train, -1) != jnp.argmax(serve, -1)
    return difference, jnp.sum(terms, -1), flips
