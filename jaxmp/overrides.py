"""What overrides of operations mean: one grammar for functions and for models under autocast.

A key is a path of modules or scopes, ``"primitive:exp"`` or ``"class:accumulation"``; a value is a level, or a policy
that computes at one. :mod:`jaxmp.patterns` has the keys that mean modules, :mod:`jaxmp.policy` the policies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmp.dtypes import nearest
from jaxmp.engine.classes import Class, classify, primitives_of
from jaxmp.patterns import OPERATIONS
from jaxmp.policy import Policy, get_policy

LEVELS = ("float32", "tensorfloat32", "half")
_FIXED = (Class.CLEAR, Class.OPAQUE, Class.RECURSE)


class UnknownOperationError(ValueError):
    """An override that names a primitive or class that there is not."""


def levels_of(overrides: Mapping[Any, Any], half: np.dtype | None) -> dict[str, str]:
    """The level that each key asks for.

    Args:
      overrides: ``"**/head"`` (a path of modules or scopes), ``"primitive:exp"`` or ``"class:accumulation"`` to one of
        ``LEVELS`` or a policy that computes at one.
      half: the compute dtype of the policy at hand.

    Raises:
      UnknownOperationError: an override names a primitive or a class that there is not.
      ValueError: an override asks for another level, for ``"half"`` where there is none, or names what computes in no
        dtype.
      TypeError: a key is a class of modules, or no string.
    """
    levels = {}
    for key, value in overrides.items():
        if not isinstance(key, str) or key.startswith("type:"):
            raise TypeError(
                f"an override of autocast is a path such as '**/head', 'primitive:<name>' or 'class:<name>', got "
                f"{key!r}: a function has no modules; jaxmp.linen.autocast and jaxmp.nnx.autocast take classes"
            )
        levels[key] = _level(value, half)
        if levels[key] == "half" and half == np.float32:
            raise ValueError(
                f"'half' in overrides is the compute dtype of the policy, but that is float32, got {key!r}: "
                f"{value!r}; make a half policy the default, and the rest float32 by overrides"
            )
        named = primitives_named_by(key) if key.startswith(OPERATIONS) else ()
        if fixed := sorted(name for name in named if classify(name) in _FIXED):
            raise ValueError(
                f"an override names operations that compute in a dtype, got {key!r}: {', '.join(fixed[:3])} "
                "move data, are opaque or have a body; mark a region with jaxmp.precision or override a path"
            )
    return levels


def _level(value: Any, half: np.dtype | None) -> str:
    if value not in LEVELS:
        with contextlib.suppress(ValueError, TypeError):
            policy = get_policy(value)
            if isinstance(policy, Policy) and policy.compute_dtype in (np.float32, half):
                return level_of(policy)
    return checked_level(value)


def checked_level(level: Any) -> str:
    """``level`` itself if it is one."""
    if level in LEVELS:
        return str(level)
    raise ValueError(
        f"a region or an override is computed in 'float32', in 'tensorfloat32' or in 'half' (the policy's compute "
        f"dtype), got {level!r}; write one of these"
    )


def level_of(policy: Policy) -> str:
    """The level at which a policy computes, where its half dtype is that of the policy at hand."""
    if policy.compute_dtype != np.float32:
        return "half"
    return "tensorfloat32" if policy.matmul_precision == "tensorfloat32" else "float32"


def primitives_named_by(key: str) -> frozenset[str]:
    """The primitives that ``"primitive:exp"`` or ``"class:accumulation"``, the key of an override, stands for.

    Raises:
      UnknownOperationError: there is no such primitive or class; the nearest names are listed.

    >>> primitives_named_by("primitive:exp")
    frozenset({'exp'})
    """
    kind, _, name = key.partition(":")
    if kind == "primitive" and classify(name) is not None:
        return frozenset({name})
    classes = [cls.value for cls in Class]
    if kind == "class" and name in classes:
        return primitives_of(Class(name))
    known = {"primitive": sorted(name for cls in Class for name in primitives_of(cls)), "class": classes}.get(kind)
    if known is None:
        raise UnknownOperationError(
            f"an override by operation is 'primitive:<name>' or 'class:<name>', such as 'primitive:exp' or "
            f"'class:accumulation', got {key!r}"
        )
    raise UnknownOperationError(
        f"the override {key!r} names a {kind} that does not exist; the nearest: {nearest(name, known)}; "
        f"jax.make_jaxpr(fun)(*args) shows the primitives of a function"
    )
