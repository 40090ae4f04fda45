"""Run the bodies of an equation one at a time.

Loops run in Python, and of the branches only the one that is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp.program.bodies import keep_finished
from jaxmp.program.equations import Array, Bodies

RunBody = Callable[[int, list[Array], int], list[Array]]
"""A function that runs a body.

Its arguments are the number of the body, the inputs of the body, and the number of the iteration. In a scan, the number
of the iteration is its index into the scanned arrays.
"""


def run_bodies(bodies: Bodies, operands: list[Array], run: RunBody) -> list[Array]:
    """Run an equation with bodies on arrays, and return its results.

    The equation must not be a scan without iterations.
    """
    if bodies.is_conditional:
        branch = int(operands[0])
        return run(branch, bodies.inputs(branch, operands), 0)
    if bodies.is_call:
        return run(0, operands, 0)
    if bodies.length is None:
        return _run_while(bodies, operands, run)
    return _run_scan(bodies, operands, run)


def _run_while(bodies: Bodies, operands: list[Array], run: RunBody) -> list[Array]:
    fixed, carry, turn = operands[: bodies.start], operands[bodies.start :], 0
    while True:
        operands = [*fixed, *carry]
        (goes_on,) = run(0, bodies.inputs(0, operands), turn)
        if not jnp.any(goes_on):
            return carry
        carry = keep_finished(goes_on, run(1, bodies.inputs(1, operands), turn), carry)
        turn += 1


def _run_scan(bodies: Bodies, operands: list[Array], run: RunBody) -> list[Array]:
    start, stop = bodies.carries.start, bodies.carries.stop
    fixed, carry, inputs = operands[:start], operands[start:stop], operands[stop:]
    stacks: list[Array] | None = None
    turns = range(bodies.length)
    for turn in turns[::-1] if bodies.reverse else turns:
        results = run(0, [*fixed, *carry, *_pick(inputs, turn)], turn)
        carry, outputs = results[: bodies.carry], results[bodies.carry :]
        stacks = _store(_repeat(outputs, bodies.length) if stacks is None else stacks, outputs, turn)
    return [*carry, *(stacks or [])]


@functools.partial(jax.jit, static_argnums=1)
def _repeat(values: list[Array], length: int) -> list[Array]:
    return [jnp.broadcast_to(value, (length, *value.shape)) for value in values]


@functools.partial(jax.jit, donate_argnums=0)
def _store(stacks: list[Array], values: list[Array], turn: Array) -> list[Array]:
    pairs = zip(stacks, values, strict=True)
    return [lax.dynamic_update_index_in_dim(stack, value, turn, axis=0) for stack, value in pairs]


@jax.jit
def _pick(stacks: list[Array], turn: Array) -> list[Array]:
    return [lax.dynamic_index_in_dim(stack, turn, axis=0, keepdims=False) for stack in stacks]
