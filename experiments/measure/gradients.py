"""Count gradients that are zero in half precision but not in float32.

The gradients of params and of activations are counted. Here, an activation is the result of a matrix product, of a
convolution or of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp
from jaxmp.inspect.program.borders import AtBorder, at_border, read_for_recording
from jaxmp.inspect.program.recorded_evaluation import evaluate_and_record
from jaxmp.inspect.program.taps import Taps
from jaxmp.inspect.program.tracing import program_of
from jaxmp.program import walk
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.values import ARGUMENT, Program, Value, is_move_or_cast, origins


def zero_share(reference: Any, grads: Any) -> float:
    """Return the share of ``reference``'s nonzero entries that are zero in ``grads``.

    Args:
      reference: a tree of gradients in float32.
      grads: the same gradients in another format, scaled or not.

    Raises:
      ValueError: the trees do not match, or ``reference`` is zero everywhere.
    """
    pairs = jax.tree.leaves(jax.tree.map(lambda r, g: ((r != 0).sum(), ((r != 0) & (g == 0)).sum()), reference, grads))
    counts = [int(count) for count in jax.device_get(pairs)]
    nonzero, lost = sum(counts[::2]), sum(counts[1::2])
    if not nonzero:
        raise ValueError("the reference gradients must not all be zero, because a share of zero entries is undefined")
    return lost / nonzero


def gradients(loss_fn: Callable[..., Any], state: jaxmp.TrainState, batch: Any) -> tuple[Any, list[jax.Array]]:
    """Return the gradients of the scaled loss for params and activations.

    The gradient of an activation has the dtype in which the program computes the activation. In this dtype, the
    products of the backward pass read the gradient. If it is zero there, it is zero for all earlier layers too.

    Args:
      loss_fn: ``loss_fn(params, model_state, batch, rng) -> (loss, ...)``.
      state: the state with the params and the loss scale.
      batch: a batch.
    """

    def scaled_loss(params: Any) -> jax.Array:
        loss = loss_fn(params, state.model_state, batch, state.rng)[0]
        return jaxmp.get_loss_scale(state.opt_state).scale(loss.astype(jnp.float32))

    jaxpr, consts, _ = program_of(scaled_loss, state.params)
    taps = _GradientTaps(list(_activations(read_for_recording(jaxpr))))

    def run(params: Any, sinks: Any, consts: Any) -> jax.Array:
        (loss,), _ = evaluate_and_record(jaxpr, consts, jax.tree.leaves(params), taps, sinks)
        return loss

    params, sinks = jax.jit(jax.grad(run, argnums=(0, 1)))(state.params, taps.sinks(), consts)
    return params, jax.tree.leaves(sinks)


def _activations(program: Program) -> Iterator[AtBorder]:
    for value in program.values:
        equation = value.equation
        if equation is not None and value.is_float and (_has_product(equation.eqn) or _is_embedding(value)):
            yield at_border(equation, value.position, equation.path)


def _has_product(eqn: Any) -> bool:
    """Return whether an operation is a product, or calls a function with derivative rules that contains products."""
    inside = [inner for jaxpr in walk.jaxprs_in(eqn) for inner in walk.equations(jaxpr)]
    return any(inner.primitive.name in PRODUCTS for inner in [eqn, *inside])


def _is_embedding(value: Value) -> bool:
    """Return whether a value consists of rows of a param."""
    if value.name != "gather":
        return False
    return all(origin.name == ARGUMENT for origin in origins(value.inputs[0], is_move_or_cast))


class _GradientTaps(Taps):
    """Taps that record whole gradients, each in its own dtype."""

    def record(self, value: jax.Array) -> tuple[()]:
        return ()

    def record_cotangent(self, cotangent: jax.Array) -> jax.Array:
        return cotangent

    def sink(self, aval: Any, lengths: tuple[int, ...]) -> jax.Array:
        return jnp.zeros((*lengths, *aval.shape), aval.dtype)
