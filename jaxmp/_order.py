"""What stands before or around ``loss_scaling`` in an optimizer, and sees gradients that are still scaled."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import jax
import optax

from jaxmp.optimizer import LossScaling, LossScalingState, scalings_in

_looked_at: deque[Any] = deque(maxlen=16)  # optimizers


def warn_if_behind(tx: optax.GradientTransformation, params: Any, stacklevel: int, again: bool = True) -> None:
    """Warns if ``tx`` is a chain, or has one in it, with another transform before ``loss_scaling``, or around it.

    ``stacklevel`` is that of the caller's own ``warnings.warn``; ``again``: whether to look at the same ``tx`` twice.
    """
    if isinstance(tx, LossScaling) or (not again and tx in _looked_at):
        return
    found: list[str] = []
    # Looked at while it is traced: the names of a named chain are sorted afterwards.
    jax.eval_shape(lambda params: found.extend(_before(tx.init(params))), params)
    _looked_at.append(tx)
    for rule in found[:1]:
        warnings.warn(rule, stacklevel=stacklevel + 1)


def _before(state: Any) -> list[str]:
    """What is wrong with the place of each loss scale in an optimizer's state."""
    if isinstance(state, LossScalingState) or not isinstance(state, (tuple, dict)) or not state:
        return []
    if isinstance(state, tuple) and hasattr(state, "_fields"):  # of one transform; dicts in it stand side by side
        parts = [part.values() if isinstance(part, dict) else [part] for part in state]
        around = next((rule for kind, rule in _AROUND.items() if kind(state) and _scales(state)), None)
        return [around] if around else [rule for part in parts for each in part for rule in _before(each)]
    first, *others = state.values() if isinstance(state, dict) else state  # a chain, or a named one
    return _before(first) or ([_CHAIN] if any(map(_scales, others)) else [])


def _scales(state: Any) -> bool:
    """Whether a loss scale in a state multiplies: a static one is a number."""
    scales = [scaling.loss_scale.loss_scale for scaling in scalings_in(state)]
    return any(isinstance(scale, jax.Array) or scale != 1 for scale in scales)


_CHAIN = (
    "loss_scaling must be the first transform of a chain, but another stands before it here, which sees the gradients "
    "still multiplied by the loss scale (clipping would cut them all to nearly nothing): put it inside, "
    "jaxmp.loss_scaling(optax.chain(…, tx), loss_scale)"
)
# Those around it that do more than hand the gradients on, or add them up.
_AROUND = {
    lambda state: isinstance(state, optax.contrib.SAMState): (
        "loss_scaling must stand around optax.contrib.sam, but stands inside of it here, so that the adversarial step "
        "is made of gradients still multiplied by the loss scale: write jaxmp.loss_scaling(optax.contrib.sam(tx, "
        "adversary), loss_scale)"
    ),
    lambda state: isinstance(state, optax.MultiStepsState) and "norm_squared" in state.skip_state: (
        "loss_scaling must stand around optax.MultiSteps with optax.skip_large_updates, but stands inside of it here, "
        "so that norms are compared while the gradients are still multiplied by the loss scale, and all are skipped: "
        "write jaxmp.loss_scaling(optax.MultiSteps(…), loss_scale)"
    ),
}
