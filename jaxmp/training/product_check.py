"""Check that the products of a loss fit the loss scale and the policy of its step.

A product is a matrix product or a convolution.
"""

from __future__ import annotations

import jax
import numpy as np

from jaxmp._internals.jax.walk import computing_only, product_dtypes
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale


def mismatch_of_products(traced: jax.stages.Traced, loss_scale: LossScale, expects_half: bool) -> str | None:
    """Return a warning about the products of a step's loss, or None.

    Args:
      traced: the traced program of a train step, whose results are the new state and the metrics.
      loss_scale: the loss scale of the step.
      expects_half: whether the step has a half-precision policy.
    """
    has_loss_scale = not isinstance(loss_scale, NoOpLossScale)
    dtypes = _products_of_loss(traced)
    if "float16" in dtypes and not has_loss_scale:
        return (
            "the loss has float16 products and no loss scale, so small gradients become zero; write tx = "
            "jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()), or for an NNX model jaxmp.nnx.Optimizer(model, tx, "
            "loss_scale=jaxmp.DynamicLossScale())"
        )
    is_wide = all(np.dtype(name).itemsize > 2 for name in dtypes)
    if dtypes and is_wide and (has_loss_scale or expects_half):
        cause = "a half-precision policy" if expects_half else "a loss scale"
        return (
            f"the step has {cause}, but every product of its loss is {' or '.join(sorted(dtypes))}; in the loss, use "
            "the model that apply_policy returned, under a half-precision policy. To see the products, write "
            "print(jaxmp.inspect.audit(step)(state, batch)), for NNX audit(step)(model, optimizer, batch)"
        )
    return None


def _products_of_loss(traced: jax.stages.Traced) -> set[str]:
    """Return the dtypes of the operands of all products that the loss depends on."""
    state, metrics = traced.out_info
    is_loss = {name: jax.tree.map(lambda _, name=name: name == "loss", value) for name, value in metrics.items()}
    is_wanted = jax.tree.leaves((jax.tree.map(lambda _: False, state), is_loss))
    return product_dtypes(computing_only(traced.jaxpr, is_wanted))
