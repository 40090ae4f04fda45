"""Find arguments whose values a half-precision program may have computed.

The float32 reference of a tool reads such an argument unchanged, so the tool does not see the error that is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.inspect.program.calls import differentiated, is_inexact


def half_arguments(paths: Sequence[str], args: Sequence[Any]) -> tuple[str, ...]:
    """Return the paths of arguments with values that are rounded to half precision.

    Arguments that are differentiated are left out.

    Args:
      paths: the path of each array among the arguments.
      args: the arguments.
    """
    leaves = jax.tree.leaves(tuple(args))
    params = differentiated(args) if any(map(is_inexact, leaves)) else []
    numbers = [number for number in range(len(leaves)) if number not in params]
    return tuple(paths[number] for number in numbers if is_rounded_to_half(leaves[number]))


def is_rounded_to_half(value: Any) -> bool:
    """Return whether all values of a floating array are rounded to float16 or bfloat16.

    Values on a grid are not rounded values, such as zeros, ones, small integers, and multiples of 1/256 below 1.

    >>> x = np.random.default_rng(0).normal(size=32).astype("float32")
    >>> is_rounded_to_half(x), is_rounded_to_half(x.astype(jnp.bfloat16)), is_rounded_to_half(np.ones(3, "float32"))
    (False, True, False)
    """
    if not is_inexact(value) or jnp.iscomplexobj(value):
        return False
    numbers = np.asarray(value).astype(np.float64).ravel()
    largest = float(np.max(np.abs(numbers), initial=0.0))
    if not 0 < largest < np.inf:
        return False
    for half in (jnp.bfloat16, jnp.float16):
        with np.errstate(over="ignore"):
            is_exact = np.array_equal(numbers.astype(np.float32).astype(half).astype(np.float64), numbers)
        if is_exact:
            spacing = 2.0 ** (np.frexp(largest)[1] - 1 - int(jnp.finfo(half).nmant))
            return bool(np.any(numbers % spacing))
    return False


def sentences_of_half_arguments(paths: Sequence[str]) -> list[str]:
    """Return a sentence about arguments with rounded values, in a list; an empty list if there are none."""
    if not paths:
        return []
    verb, them = ("has", "it") if len(paths) == 1 else ("have", "them")
    return [
        f"{', '.join(paths)} {verb} values in half precision, and the float32 reference reads {them} unchanged. If the "
        "model computed these values, compute them in float32 for the reference: their error is not measured here."
    ]
