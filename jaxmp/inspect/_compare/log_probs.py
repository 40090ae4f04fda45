"""The comparison of the log-probabilities that two programs give the same tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import special

from jaxmp.base import tables
from jaxmp.optim.checks import described

_LOGITS_AT_ONCE = 2**22


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
    The differences are computed in float64, on the host.

    Args:
      train: the log-probabilities of the tokens in the trained model, in any shape. With ``tokens``, the logits of the
        trained model. The last axis of logits is the vocabulary.
      serve: the same numbers of the served model.
      tokens: the tokens, of the shape of the logits without the last axis.
      where: a boolean for each token: whether it counts. Leave out padding and prompts. None means all tokens.

    Raises:
      ValueError: the shapes of the arguments do not fit, no token counts, a token that counts is outside of the
        vocabulary, or a log-probability that counts is above 0.
      TypeError: ``train`` or ``serve`` is not an array, ``where`` is not boolean, or ``tokens`` are not integers.

    >>> train = jnp.log(jnp.array([[0.6, 0.4], [0.2, 0.8]]))
    >>> serve = jnp.log(jnp.array([[0.4, 0.6], [0.2, 0.8]]))
    >>> comparison = compare_log_probs(train, serve, jnp.array([0, 1]))
    >>> comparison.largest_difference, comparison.flips  # log(0.6 / 0.4), and one of two largest logits
    (0.405..., 0.5)
    """
    for name, value in (("train", train), ("serve", serve)):
        if not hasattr(value, "shape") and not isinstance(value, list):
            raise TypeError(
                f"{name} needs to be an array of logits or log-probabilities, got {described(value)}; for a model that "
                "returns (logits, …), pass the logits alone"
            )
    counts = _counted_tokens(np.shape(train), np.shape(serve), None if tokens is None else np.shape(tokens), where)
    train, serve = np.asarray(train)[counts], np.asarray(serve)[counts]
    if tokens is None:
        difference = _checked_log_probs(train) - _checked_log_probs(serve)
        kl, flips = float(np.mean(np.expm1(difference) - difference)), None
    else:
        tokens = _checked_tokens(np.asarray(tokens)[counts], train.shape[-1])
        difference, divergences, is_flipped = _of_logits(train, serve, tokens)
        kl, flips = float(np.mean(divergences)), float(np.mean(is_flipped))
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
    counts = np.ones(tokens, bool) if where is None else np.asarray(where)
    if counts.dtype != bool:
        raise TypeError(f"where needs booleans, got {counts.dtype}; for a mask of zeros and ones, write where=mask > 0")
    if counts.shape != tokens or not counts.any():
        raise ValueError(
            f"where needs a boolean for each token, {tokens}, and one that is True, got {counts.shape} with "
            f"{counts.sum()}; pass the mask of the tokens that the model drew"
        )
    return counts


def _checked_log_probs(log_probs: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64.

    Raises:
      ValueError: one of them is above 0 by more than a rounding error.
    """
    log_probs = log_probs.astype(np.float64)
    largest = np.max(log_probs)
    if largest > 1e-3:
        raise ValueError(f"log-probabilities need to be at most 0, got {largest:.3g}; for logits, pass the tokens too")
    return log_probs


def _checked_tokens(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return tokens. Raise an error if they are not indices of a vocabulary."""
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"tokens need to be integers, got {tokens.dtype}; pass the indices of the tokens")
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if outside.size:
        raise ValueError(
            f"tokens need to be from 0 to {vocabulary - 1}, the vocabulary of the logits, got {outside[0]}; leave out "
            "padding with where="
        )
    return tokens


def _of_logits(train: np.ndarray, serve: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each token: the difference, the KL divergence, and whether the largest logit flips.

    The logits have two axes, and the tokens have one.
    """
    tokens_at_once = max(1, _LOGITS_AT_ONCE // train.shape[-1])
    parts = []
    for start in range(0, len(tokens), tokens_at_once):
        part = slice(start, start + tokens_at_once)
        parts.append(_of_few_logits(train[part].astype(np.float64), serve[part].astype(np.float64), tokens[part]))
    difference, divergences, is_flipped = map(np.concatenate, zip(*parts, strict=True))
    return difference, divergences, is_flipped


def _of_few_logits(
    train: np.ndarray, serve: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    log_train, log_serve = special.log_softmax(train, axis=-1), special.log_softmax(serve, axis=-1)
    with np.errstate(invalid="ignore"):  # both logits of a masked token are -inf
        log_ratio = log_train - log_serve
        # The sum of p_serve * (ratio - 1) is 0. With it, all terms are positive, and small divergences stay accurate.
        p_serve = np.exp(log_serve)
        terms = np.where(p_serve > 0, p_serve * (np.expm1(log_ratio) - log_ratio), np.exp(log_train))
    difference = np.take_along_axis(log_ratio, tokens[:, None], -1)[:, 0]
    return difference, np.sum(terms, -1), np.argmax(train, -1) != np.argmax(serve, -1)
