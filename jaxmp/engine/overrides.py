"""The grammar of overrides for functions and models under autocast.

A key is a path of modules or scopes, a path with a primitive (``"encoder/flow:add"``), ``"primitive:exp"`` or
``"class:accumulation"``. A value is a level, or a policy that computes at a level. :mod:`jaxmp.policy.patterns`
describes the keys that name modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmp.base.arguments import printed
from jaxmp.base.dtypes import CASTABLE, canonical_dtype, closest_names, is_half
from jaxmp.policy.patterns import EVERY, OPERATIONS, checked_overrides, path_and_primitive
from jaxmp.policy.policies import Policy, PrecisionError
from jaxmp.policy.policy_map import PolicyMap, get_policy
from jaxmp.program.primitives import PRODUCTS, Class, classify, of_class

FLOAT32_RESULT = "float32_result"
"""The level of products with half operands and a float32 result; other operations keep the level of the policy."""
LEVELS = ("float32", "tensorfloat32", "half", FLOAT32_RESULT)
Level = str | Policy
"""One of ``LEVELS``, or a policy.

With a half policy, the rules and the policy's float8 recipe decide. A float32 policy stands for float32 with products
at its ``matmul_precision``.
"""
FIXED = (Class.CLEAR, Class.OPAQUE, Class.RECURSE)


class UnknownOperationError(ValueError):
    """An override names an unknown primitive or class."""


def policy_and_exceptions(policy: Any, overrides: Mapping[str, Any] | None = None) -> tuple[Policy, dict[str, Level]]:
    """Return the policy and the overrides of a function.

    ``overrides`` win over the overrides of a PolicyMap. A float32 policy with half policies at some paths becomes a
    half policy with a float32 override for all other operations.

    Raises:
      ValueError, TypeError: as in :func:`jaxmp.autocast`.
    """
    policies = PolicyMap(policy)
    if policies.compute_dtype not in CASTABLE:
        raise ValueError(
            f"autocast must compute in float16, bfloat16 or float32, got {policies.compute_dtype.name}; "
            "use 'mixed_bfloat16' or 'mixed_float16'"
        )
    if policies.root.written:
        raise ValueError(
            "'written' is a level for modules of a model, but jaxmp.autocast takes a function; use apply_policy"
        )
    exceptions = checked_overrides(overrides)
    for override in policies.overrides:
        exceptions.setdefault(override.pattern, override.level)
    root, on_paths = policies.root, (value for key, value in exceptions.items() if not str(key).startswith(OPERATIONS))
    of_half = next((policy for policy in map(_policy_of, on_paths) if policy and is_half(policy.compute_dtype)), None)
    if root.compute_dtype != np.float32:
        return root, levels_of(exceptions, root.compute_dtype)
    default = level_of(root)
    if of_half is not None:
        root = dataclasses.replace(of_half, param_dtype=root.param_dtype, output_dtype=root.output_dtype)
    levels = levels_of(exceptions, root.compute_dtype)
    return root, {**levels, EVERY: levels.get(EVERY, default)} if levels else {}


def levels_of(overrides: Mapping[Any, Any], half: np.dtype | None) -> dict[str, Level]:
    """Return the level of each override.

    Args:
      overrides: a mapping from key to value, as the docstring of this module describes them.
      half: the compute dtype of the policy.

    Raises:
      UnknownOperationError: an override names an unknown primitive or class.
      ValueError: an override has an unknown level, is ``"half"`` under a float32 policy, or names operations that do
        not compute.
      TypeError: a key is a class of modules, or not a string.
    """
    levels: dict[str, Level] = {}
    for key, value in overrides.items():
        if not isinstance(key, str) or key.startswith("type:"):
            raise TypeError(
                "a function under autocast has no modules, so its overrides are for paths such as '**/head', for "
                f"'primitive:<name>' or for 'class:<name>', got {printed(key)}; for classes of modules use "
                "jaxmp.linen.autocast or jaxmp.nnx.autocast"
            )
        _, primitive = path_and_primitive(key)
        operation = f"primitive:{primitive}" if primitive else key
        is_operation = operation.startswith(OPERATIONS)
        levels[key] = _level_of_value(value, half, is_operation)
        if not is_float32(levels[key]) and half == np.float32 and isinstance(levels[key], str):
            raise ValueError(
                f"{levels[key]!r} in overrides uses the compute dtype of the policy, but that is float32, got "
                f"{key!r}: {value!r}; use a half policy, and write 'float32' overrides for the rest"
            )
        if key == f"class:{Class.LINALG}" and levels[key] == "half":
            raise ValueError(
                f"{key!r} stays float32, because few of its kernels exist in half precision, got 'half'; leave out the "
                "override, or write 'primitive:<name>' for one primitive"
            )
        if primitive == "custom_linear_solve" or key == "primitive:custom_linear_solve":
            raise ValueError(
                f"{key!r} keeps the dtypes of its author, got {value!r}; leave out the override, and cast the operands "
                "of the solver instead"
            )
        named = primitives_named_by(operation) if is_operation and operation != EVERY else frozenset[str]()
        is_at_path = bool(primitive) or not is_operation
        if levels[key] == FLOAT32_RESULT and (not is_at_path or (named and named.isdisjoint(PRODUCTS))):
            # Products that cancel must stay float32, so this level is for named places.
            raise ValueError(
                f"{FLOAT32_RESULT!r} is a level of products at a path, got {key!r}; write a path, or "
                "'<path>:dot_general'"
            )
        if fixed := sorted(name for name in named if classify(name) in FIXED):
            raise ValueError(
                f"an override must name operations that compute, got {key!r}: {', '.join(fixed[:3])} "
                "move data, are opaque or have a body; mark a region with jaxmp.precision or override a path"
            )
    return levels


def _level_of_value(value: Any, half: np.dtype | None, is_operation: bool) -> Level:
    if _is_level(value):
        return str(value).strip().lower()
    policy = _policy_of(value)
    if policy is not None and policy.compute_dtype in (np.float32, half):
        if is_operation and policy.compute_dtype == half and policy.float8 is None:
            return "half"
        return level_of(policy)
    dtypes = " or ".join(dict.fromkeys(["float32", *([half.name] if half is not None else [])]))
    raise ValueError(
        f"an override must be 'float32', 'tensorfloat32', 'half' (the policy's compute dtype), 'float32_result' or a "
        f"policy that computes in {dtypes}, got {printed(value)}; write one of these"
    )


def _is_level(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in LEVELS


def _policy_of(value: Any) -> Policy | None:
    """Return the policy that the value of an override names, or None."""
    if not _is_level(value):
        try:
            policy = get_policy(value)
            return policy if isinstance(policy, Policy) else None
        except PrecisionError:
            raise
        except (ValueError, TypeError):
            return _policy_of_half_dtype(value)
    return None


def _policy_of_half_dtype(value: Any) -> Policy | None:
    """Return the policy of a half dtype or its alias, or None for another value.

    :func:`get_policy` refuses some of these names, because they do not say the dtype of params. An override of autocast
    does not change params.
    """
    try:
        dtype = canonical_dtype(value)
    except ValueError:
        return None
    return Policy(dtype, dtype, dtype) if is_half(dtype) else None


def checked_level(level: Any) -> Level:
    """Return the ``level`` of a region if it is valid."""
    if _is_level(level):
        return str(level).strip().lower()
    policy = _policy_of(level)
    if policy is not None and policy.compute_dtype == np.float32:
        return level_of(policy)
    remedy = "one of these" if policy is None else "'half'"
    raise ValueError(
        "a region must be 'float32', 'tensorfloat32', 'half' (the policy's compute dtype) or 'float32_result', or a "
        f"float32 policy, got {printed(level)}; write {remedy}"
    )


def level_of(policy: Policy) -> Level:
    """Return the level at which a policy computes.

    A float32 policy whose products have another precision than those of a level is its own level.
    """
    if policy.compute_dtype == np.float32 and policy.matmul_precision in (None, "tensorfloat32"):
        return "tensorfloat32"
    if policy.compute_dtype == np.float32 and policy.matmul_precision in ("highest", "float32"):
        return "float32"
    return policy


def is_float32(level: Level) -> bool:
    """Return whether every operation at a level is float32."""
    return level.compute_dtype == np.float32 if isinstance(level, Policy) else level not in ("half", FLOAT32_RESULT)


def primitives_named_by(key: str) -> frozenset[str]:
    """Return the primitives that the key of an override names.

    Raises:
      UnknownOperationError: the primitive or class is unknown; the error lists the nearest names.

    >>> primitives_named_by("primitive:exp")
    frozenset({'exp'})
    """
    kind, _, name = key.partition(":")
    if kind == "primitive" and classify(name) is not None:
        return frozenset({name})
    classes = [cls.value for cls in Class]
    if kind == "class" and name in classes:
        return of_class(Class(name))
    if kind == "primitive":
        known = sorted(name for cls in Class for name in of_class(cls))
        remedy = "jax.make_jaxpr(fun)(*args) shows the primitives of a function"
    else:
        known = [cls.value for cls in Class if cls not in FIXED]
        remedy = "these are all; cast_plan(fun, policy)(*args) shows the class of each operation (see docs/autocast.md)"
    raise UnknownOperationError(
        f"the override {key!r} names a {kind} that does not exist; the nearest: "
        f"{closest_names(name, known, len(classes))}; {remedy}"
    )
