"""What an error says of training that cannot go on."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxmp import tree as _tree
from jaxmp.loss_scale import LossScale
from jaxmp.optimizer import global_norm


def explanation(loss: Any, grads: Any, loss_scale: LossScale, params: Any, batch: Any, skips: int) -> str:
    """Which of these is not finite, after so many skipped steps, and what to do.

    ``loss`` is the true loss, ``grads`` are the gradients of the scaled one.
    """
    found = [
        f"{what} {', '.join(repr(name) for name in names[:8])}{', …' if len(names) > 8 else ''}" if names[0] else whole
        for what, whole, tree in (
            ("gradients of", "the gradient", grads),
            ("params", "the params", params),
            ("batch entries", "the batch", batch),
        )
        if (names := _tree.non_finite(tree))
    ]
    if not np.isfinite(loss):
        found.insert(0, f"the loss ({loss})")
    if not _tree.non_finite(grads) and not np.isfinite(global_norm(loss_scale.unscale(_tree.widen(grads)))):
        found.append(
            "the norm of the gradients, each of which is finite: the sum of their squares passes float32's "
            "largest number, 3.4e38; make the loss smaller (a mean in place of a sum, say)"
        )
    what = "; ".join(found) or "nothing in the gradients, so it is the optimizer's updates"
    lowest, scale = getattr(loss_scale, "min_loss_scale", None), float(loss_scale.loss_scale)
    cannot_fall = "which cannot fall"
    if lowest is not None and scale > float(lowest):
        cannot_fall = (
            "which did not fall, as a transform around loss_scaling dropped the gradients before it (write "
            "jaxmp.loss_scaling(optax.apply_if_finite(…), loss_scale), say)"
        )
    return (
        f"training must be finite to go on, but {skips} steps in a row were skipped at loss scale "
        f"{scale:g}, {cannot_fall}; not finite now: {what}. Look for NaN in the data, lower "
        "the learning rate, or compute the modules of these params in float32 (by overrides)"
    )
