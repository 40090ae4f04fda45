"""Check that a train step's loss uses the params, and that its products fit the policy.

They must also fit the loss scale. A product is a matrix product or a convolution.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.sources import Names, names_of
from jaxmp.base.dtypes import is_half, is_narrow
from jaxmp.base.hardware import detect
from jaxmp.engine.marks import DECIDED, OF_POLICY, ours, region_of
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale, StaticLossScale
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import computing_only, inputs_used, jaxprs_in


def mismatch_of_products(traced: jax.stages.Traced, loss_scale: LossScale, policy_dtype: np.dtype | None) -> str | None:
    """Return a warning about the products of a step's loss, or None.

    Args:
      traced: the traced program of a train step, whose results are the new state and the metrics.
      loss_scale: the loss scale of the step.
      policy_dtype: the compute dtype of the step's policy; None without a policy.
    """
    has_loss_scale = not _keeps_gradients(loss_scale)
    products = _products_of_loss(traced)
    dtypes = {_policy_dtype(operand.aval.dtype) for product, _ in products for operand in product.invars[:2]}
    if np.dtype(np.float16) in dtypes and detect().platform == "tpu":
        return "a TPU multiplies float16 no faster than bfloat16; use mixed_bfloat16, which needs no loss scale"
    if np.dtype(np.float16) in dtypes and not has_loss_scale:
        lacks = "no loss scale" if isinstance(loss_scale, NoOpLossScale) else "a loss scale of 1"
        return (
            f"the loss has float16 products and {lacks}, so small gradients become zero; write tx = "
            "jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()), or for an NNX model jaxmp.nnx.Optimizer(model, tx, "
            "loss_scale=jaxmp.DynamicLossScale())"
        )
    narrow = {dtype for dtype in dtypes if is_narrow(dtype)}
    names = " and ".join(sorted(dtype.name for dtype in narrow or dtypes))
    if policy_dtype is None:
        if has_loss_scale and dtypes and not narrow and not any(DECIDED in scopes for _, scopes in products):
            return (
                f"the step has a loss scale, but every product of its loss is {names}; in the loss, use the model that "
                "apply_policy returned. To see the products, write print(jaxmp.inspect.audit(step)(state, batch))"
            )
        return None
    if narrow:
        is_model_half = any(region_of(ours(scopes)).half is not None for _, scopes in products)
        is_overruled = policy_dtype not in dtypes and (is_model_half or is_half(policy_dtype))
    else:  # somebody may have asked for float32, or the rules of autocast may have decided so
        is_overruled = bool(dtypes) and is_half(policy_dtype) and all(_follows_model(scopes) for _, scopes in products)
    if not is_overruled:
        return None
    policy = f"mixed_{policy_dtype.name}" if is_half(policy_dtype) else policy_dtype.name
    return (
        f"the step has a policy for {policy_dtype.name}, but the policy of its model computes in {names}; write "
        f"apply_policy(…, {policy!r}) where the model gets its policy, and leave policy= out of the step"
    )


def _policy_dtype(dtype: np.dtype) -> np.dtype:
    """Return the compute dtype of the policies whose products have operands of ``dtype``."""
    return np.dtype(jnp.bfloat16) if dtype.name.startswith("float8") else dtype


def _keeps_gradients(loss_scale: LossScale) -> bool:
    """Return whether a loss scale changes no gradient, because it is 1 in every step."""
    return isinstance(loss_scale, (NoOpLossScale, StaticLossScale)) and loss_scale.loss_scale == 1


def ignores_params(traced: jax.stages.Traced) -> bool:
    """Return whether the loss of a train step does not depend on the params.

    ``traced`` is as for :func:`mismatch_of_products`.
    """
    is_used = inputs_used(traced.jaxpr, loss_among_results(traced))
    return not any(map(operator.and_, params_among_arguments(traced), is_used))


def params_among_arguments(traced: jax.stages.Traced) -> list[bool]:
    """Return for each argument of a train step's program whether it is a param."""
    state, batch = traced.args_info[0]
    no_state, no_batch = jax.tree.map(lambda _: False, (state, batch))
    return jax.tree.leaves((no_state.replace(params=jax.tree.map(lambda _: True, state.params)), no_batch))


def _follows_model(scopes: Names) -> bool:
    """Return whether the policy of a model, and nothing else, decides on an operation in these scopes."""
    return region_of(ours(scopes)).asked_by == OF_POLICY


def _products_of_loss(traced: jax.stages.Traced) -> list[tuple[Any, Names]]:
    """Return the equations of all products that the loss depends on, with the scopes around them."""
    return list(_products_in(computing_only(traced.jaxpr, loss_among_results(traced)), ()))


def loss_among_results(traced: jax.stages.Traced) -> list[bool]:
    """Return for each result of a train step's program whether it is the loss."""
    state, metrics = traced.out_info
    is_loss = {name: jax.tree.map(lambda _, name=name: name == "loss", value) for name, value in metrics.items()}
    return jax.tree.leaves((jax.tree.map(lambda _: False, state), is_loss))


def _products_in(jaxpr: Any, around: Names) -> Iterator[tuple[Any, Names]]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        scopes = (*around, *names_of(eqn))
        if eqn.primitive.name in PRODUCTS:
            yield eqn, scopes
        for inner in jaxprs_in(eqn):
            yield from _products_in(inner, scopes)
