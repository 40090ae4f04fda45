"""The names, aliases and ranges of dtypes."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.arguments import printed

NAMES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_ALIASES = {
    **dict.fromkeys(("f64", "fp64", "double"), "float64"),
    **dict.fromkeys(("f32", "fp32", "full", "single"), "float32"),
    **dict.fromkeys(("f16", "fp16"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("f8_e4m3", "e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("f8_e5m2", "e5m2"), "float8_e5m2"),
}
_FLOAT8 = ("float8", "fp8", "f8")
CASTABLE = frozenset(np.dtype(dtype) for dtype in (np.float32, np.float16, jnp.bfloat16))
"""The dtypes that the engine (``jaxmp.engine``) casts from and to.

It never casts float64, complex numbers or float8.
"""

HALF_DTYPES = frozenset(np.dtype(dtype) for dtype in (np.float16, jnp.bfloat16))
"""The dtypes of half precision."""


class UnknownDtypeError(ValueError):
    """The name of a dtype is unknown."""


def is_castable(aval: Any) -> bool:
    """Return whether the engine may change the dtype of a value."""
    # The dtype of a reference (a mutable array) must not change, because its readers and writers rely on it.
    return getattr(aval, "dtype", None) in CASTABLE and not hasattr(aval, "inner_aval")


def name_of(typed: Any) -> str:
    """Return the name of a value's dtype, or of its type if it has no dtype."""
    return str(getattr(getattr(typed, "dtype", None), "name", None) or type(typed).__name__)


@functools.cache
def is_other_float(dtype: Any) -> bool:
    """Return whether ``dtype`` is one that the engine never casts.

    These dtypes are float64, complex numbers and float8.
    """
    return dtype is not None and dtype not in CASTABLE and bool(jnp.issubdtype(dtype, np.inexact))


def half_dtype() -> np.dtype:
    """Return the dtype that ``"half"`` means.

    ``"half"`` means bfloat16 on a TPU and float16 elsewhere, as in jmp.
    """
    return np.dtype(jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16)


def canonical_dtype(dtype: Any) -> np.dtype:
    """Return the floating NumPy dtype of a name, an alias or any dtype-like object.

    Names may be in upper or lower case, and may have spaces around them, as in ``" BF16 "``. Aliases are, for example,
    ``"f16"`` and ``"fp16"``. ``"full"`` means float32. :func:`half_dtype` says what ``"half"`` means.

    Raises:
      UnknownDtypeError: the name is unknown, or it is ``"float8"``, which could mean two dtypes. For an unknown name,
        the error lists the nearest known names.
      ValueError: the dtype is not floating.

    >>> canonical_dtype("bf16")
    dtype(bfloat16)
    """
    if isinstance(dtype, str):
        text = dtype.strip().lower()
        if text == "half":
            return half_dtype()
        if text in _FLOAT8:
            raise UnknownDtypeError(
                f"float8 could mean 'float8_e4m3fn' or 'float8_e5m2', got {dtype!r}; write one of them, or for float8 "
                "products the policy 'mixed_float8'"
            )
        name = _ALIASES.get(text, text)
        if name in NAMES:
            return np.dtype(getattr(jnp, name))
    result = _numpy_dtype(dtype)
    if result is None:
        known = [*NAMES, *_ALIASES, "half"]
        raise UnknownDtypeError(
            f"unknown dtype {dtype!r}; known names, nearest first: {closest_names(str(dtype), known)}"
        ) from None
    if not jnp.issubdtype(result, jnp.floating):
        raise ValueError(
            f"the dtype must be floating, got {result.name}: integers, bools and keys are never cast; "
            f"use one of {', '.join(NAMES[:4])}"
        )
    return result


def dtype_among(argument: str, dtype: Any, known: Sequence[str]) -> str:
    """Return the known name that a dtype has.

    Args:
      argument: the name of the argument, for the error message.
      dtype: a name, an alias or any dtype-like object, as for :func:`canonical_dtype`. ``"float8"`` stands for itself.
      known: the names that are allowed.

    Raises:
      UnknownDtypeError: the dtype is ``"float8"``, which could mean two of the known names.
      ValueError: the dtype has none of these names. For a misspelled name, the error says which known name is nearest.

    >>> dtype_among("moments", "bf16", ["float32", "bfloat16"])
    'bfloat16'
    """
    is_float8 = isinstance(dtype, str) and dtype.strip().lower() in _FLOAT8
    if is_float8 and "float8" in known:
        return "float8"
    remedy = f"write e.g. {argument}={known[0]!r}"
    try:
        name = canonical_dtype(dtype).name
        if name in known:
            return name
    except UnknownDtypeError as error:
        if is_float8 and {"float8_e4m3fn", "float8_e5m2"} <= set(known):
            raise UnknownDtypeError(f"{argument}: {error}") from None
        if not is_float8:
            remedy = f"nearest: {nearest_first(str(dtype), known)[0]!r}"
    except ValueError:  # the dtype is not floating
        pass
    raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {printed(dtype)}; {remedy}")


def _numpy_dtype(dtype: Any) -> np.dtype | None:
    """Return NumPy's dtype of a name or a dtype-like object, or None.

    A string must be a full name, not ``"f8"`` or ``"c"``.
    """
    if not isinstance(dtype, (str, type, np.dtype)):  # NumPy would accept arrays and other objects with a dtype
        return None
    try:
        result = np.dtype(dtype)
    except (TypeError, ValueError):  # ValueError for a string with digits, which NumPy reads as a format
        return None
    return None if dtype is None or (isinstance(dtype, str) and result.name != dtype.strip().lower()) else result


def nearest_first(word: str, known: Iterable[str]) -> list[str]:
    """Return the names ``known`` without repetitions, the closest to ``word`` first."""
    names = list(dict.fromkeys(known))
    similarity = {name: difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio() for name in names}
    return sorted(names, key=lambda name: -similarity[name])


def closest_names(word: str, known: Iterable[str], most: int = 8) -> str:
    """Return up to ``most`` names of ``known``, the closest to ``word`` first.

    The names are quoted and separated by commas.
    """
    ranked = nearest_first(word, known)
    return ", ".join(repr(name) for name in ranked[:most]) + (", …" if len(ranked) > most else "")


def may_sum_half() -> bool:
    """Return whether JAX allows sums in half precision: the flag ``jax_allow_f16_reductions``."""
    config: Any = jax.config  # its stub does not have all flags
    return bool(config.jax_allow_f16_reductions)


def is_half(dtype: np.dtype | None) -> TypeGuard[np.dtype]:
    """Return whether ``dtype`` is float16 or bfloat16. None is not."""
    return dtype is not None and np.dtype(dtype) in HALF_DTYPES


def is_narrow(dtype: Any) -> bool:
    """Return whether ``dtype`` is a floating dtype of at most 16 bits: half precision or float8."""
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits <= 16


def at_least_float32(dtype: Any) -> Any:
    """Return float32 for a floating dtype of at most 16 bits, otherwise ``dtype``."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype


@functools.cache
def range_of(dtype: np.dtype) -> tuple[float, float]:
    """Return the smallest normal number and the largest number of a floating dtype."""
    info = jnp.finfo(dtype)
    return float(info.smallest_normal), float(info.max)


class AsComputed:
    """A result of a traced function that keeps the dtype in which it is computed.

    Other results have the dtypes in which they are traced.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
