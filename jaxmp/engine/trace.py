"""Trace the program of one call in its original dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from jaxmp._internals.flax.nnx_if_imported import make_pure_call
from jaxmp._internals.jax.patches import half_attention
from jaxmp.base.context_variables import setting
from jaxmp.base.dtypes import is_castable, is_half
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.marks import names_here
from jaxmp.policy.policies import Policy
from jaxmp.program.equations import Array, aval_of
from jaxmp.program.traced_program import TracedProgram, arrays_in

_tracing: ContextVar[Callable[[], np.dtype | None] | None] = ContextVar("jaxmp_autocast_tracing", default=None)


@contextlib.contextmanager
def tracing(classifier: Classifier, products: str = "") -> Iterator[None]:
    """Enter the context in which the engine traces the author's code.

    ``products`` is the default precision of products in that code.
    """

    def ask() -> np.dtype | None:
        return classifier.half_of("dot_general", names_here())

    # Reset the default precision of products, so that each product keeps the precision that its author wrote. The
    # adapters set the precision of each module's policy.
    precision: Any = contextlib.nullcontext()
    if products or classifier.half is not None:
        precision = jax.default_matmul_precision(products or None)
    with setting(_tracing, ask), half_attention(classifier.key, ask), precision:
        yield


def autocast_dtype() -> np.dtype | None:
    """Return the half dtype that autocast will use for a float32 product here.

    Use it in a kernel or a custom derivative rule that chooses its residuals by the dtypes of its arguments. Autocast
    traces such code in the original dtypes, so the arguments look like float32.

    Returns:
      The half dtype; None outside of autocast, and in code that :func:`jaxmp.precision` or an override keeps in
      float32.

    >>> half = jaxmp.autocast(lambda x: x.astype(jaxmp.autocast_dtype() or x.dtype), "mixed_bfloat16")
    >>> half(jnp.ones(2)).dtype, jaxmp.autocast_dtype()
    (dtype(bfloat16), None)
    """
    ask = _tracing.get()
    return None if ask is None else ask()


def result_dtypes(program: TracedProgram, policy: Policy | None = None) -> list[np.dtype | None]:
    """Return each result's dtype: the original, or the policy's half output dtype.

    An integer or bool result has the dtype None. So has a result that keeps the dtype in which it is computed.
    """
    results = zip(program.open_jaxpr[0].outvars, program.are_as_computed, strict=True)
    dtypes = [
        None if as_computed or not is_castable(atom.aval) else aval_of(atom).dtype for atom, as_computed in results
    ]
    if policy is not None and is_half(policy.output_dtype):
        dtypes[: program.result_count] = [dtype and policy.output_dtype for dtype in dtypes[: program.result_count]]
    return dtypes


def traced(
    fun: Callable[..., Any], args: Any, kwargs: Any, classifier: Classifier
) -> tuple[TracedProgram, list[Array]]:
    """Trace one call in its original dtypes, and return its program and arrays."""
    pure, arguments, write = make_pure_call(fun, args, kwargs)
    with tracing(classifier):
        return TracedProgram(pure, arguments, write), arrays_in(jax.tree.leaves(arguments))
