"""The program of one call of a model, and the checks after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmp.engine.autocast import computed
from jaxmp.engine.checks import check_half_products
from jaxmp.engine.decide import Decisions
from jaxmp.engine.model_policy import ModelPolicy


class ModelCall:
    """A call of a model from outside, as a program that the engine rewrites.

    The adapters of Linen and NNX create one for each call.
    """

    def __init__(self, policy: ModelPolicy) -> None:
        self._policy, self._classifier = policy, policy.classifier()
        self._decisions: Decisions | None = None

    def computed(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Return ``fun(*args)``, a pure function of arrays, with the decisions of the engine."""
        return computed(fun, self._classifier, args, {}, receive=self._receive)

    def _receive(self, decisions: Decisions) -> None:
        self._decisions = decisions

    def check(self, called_all: bool) -> None:
        """Check that the policy has an effect. Call it after :meth:`computed`.

        Args:
          called_all: whether the call ran every module with params. A call of a part of the model is not checked.

        Raises:
          UnmatchedOverrideError: an override of an operation matched nothing.
          ValueError: the policy is half, but no product is.
        """
        assert self._decisions is not None
        if called_all:
            self._classifier.matcher.check()
            check_half_products(self._decisions, self._policy.default)
