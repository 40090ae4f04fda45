"""Cast constants by equations of the program, instead of rounding them while autocast traces.

A tool that counts roundings needs these casts, because a rounded constant does not show its original value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmp.base.cache_keys import planned
from jaxmp.base.context_variables import setting
from jaxmp.program.equations import Array

_in_program: ContextVar[bool] = ContextVar("jaxmp_casts_of_constants", default=False)


@contextlib.contextmanager
def casting_constants_in_program() -> Iterator[None]:
    """Let autocast cast constants by equations of the program. Programs in caches are not used."""
    with setting(_in_program, True), planned(object()):
        yield


def casts_constants_in_program() -> bool:
    """Return whether casts of constants are equations."""
    return _in_program.get()


def constant_in(value: Array, dtype: np.dtype) -> Array:
    """Return a constant in another dtype."""
    array = np.asarray(value)
    if not casts_constants_in_program() or array.dtype == dtype or array.dtype.kind not in "fV":
        return array.astype(dtype)
    # JAX casts constants at once. The identity `checkpoint_name` hides that the value is a constant.
    return jax.lax.convert_element_type(checkpoint_name(array, "constant"), dtype)
