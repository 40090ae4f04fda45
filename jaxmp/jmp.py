"""A drop-in replacement for jmp 0.0.4.

Write ``from jaxmp import jmp`` instead of ``import jmp``. This module has the names of jmp and the code of jaxmp. You
can pass its policies and loss scales to jaxmp (:func:`jaxmp.loss_scaling`, ``jaxmp.linen`` and so on). Code that is
written for jmp, such as Haiku's ``hk.mixed_precision``, accepts them too. jaxmp also accepts the policies and loss
scales of the real jmp.

>>> from jaxmp import jmp
>>> policy, loss_scale = jmp.get_policy("p=f32,c=f16,o=f32"), jmp.DynamicLossScale(jmp.half_dtype()(2**15))
>>> @jax.jit
... def step(params, loss_scale, x):
...     def loss_fn(params):
...         params, half = policy.cast_to_compute((params, x))
...         return loss_scale.scale(policy.cast_to_output(jnp.mean(half * params["w"])))
...     grads = loss_scale.unscale(jax.grad(loss_fn)(params))
...     grads_finite = jmp.all_finite(grads)
...     updated = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
...     return jmp.select_tree(grads_finite, updated, params), loss_scale.adjust(grads_finite)
>>> params, loss_scale = step({"w": jnp.float32(1)}, loss_scale, jnp.ones(4))
>>> print(params["w"], loss_scale.loss_scale, loss_scale.counter)
0.5 32768.0 1

Differences from jmp:

- A dynamic scale keeps every field through ``jit`` and ``scan``. In jmp, it loses ``min_loss_scale`` (jmp#44).
- A scale is always float32. In jmp, ``adjust`` raises an error for a float16 scale, although jmp's README uses such a
  scale (jmp#47).
- ``scale`` and ``unscale`` return half-precision leaves in float32. In float16, a loss of 2 would be infinite after it
  is multiplied by a scale of 2^15. Small unscaled gradients would become 0. In jmp, JAX's type promotion applies, so a
  float16 leaf stays float16 if the scale is float16 or a Python number.
- ``scale`` and ``unscale`` do not change integers, bools and keys. jmp makes them floating or raises an error.
- If you lower ``period`` to the value of ``counter`` or below, the scale grows at the next finite step. In jmp, the
  count restarts.
- A ``min_loss_scale`` of 0 means float32's smallest normal number. jmp's scale can reach 0, and then all gradients are
  NaN.
- A dynamic scale must be finite and at least ``min_loss_scale``. In jmp, a scale below this minimum *grows* to the
  minimum at an overflow.
- Unscaling by more than 2^126 gives NaN, so that the step is skipped. In jmp, the reciprocal of such a scale is
  flushed to 0, and so all gradients are 0.
- A static scale is stored as a Python float, and must not be a tracer. A static scale of 0, which jmp's tests have, is
  an error only when the scale is used.
- A policy's dtypes must be floating. Their type is ``numpy.dtype``: they equal ``jnp.float16`` and so on, but you
  cannot call them, and their hashes differ from those of jmp's dtypes.
- Case and spaces in the keys and dtypes of a policy are ignored. An unknown name raises a ValueError, as in jmp. The
  error lists the known names. A repeated key is an error. The names of presets (``mixed_float16``) are unknown here;
  use :func:`jaxmp.get_policy` for them.
- NumPy scalars and ``jax.ShapeDtypeStruct`` are cast like arrays.
- ``LossScale`` is the base class of all loss scales, not a Union (``typing.get_args`` returns nothing for it).
  ``isinstance`` and annotations work as in jmp.
- The fields ``period``, ``factor`` and ``min_loss_scale`` of a dynamic scale must not be traced. ``adjust`` takes a
  bool, not an int.
- ``select_tree`` casts to the dtypes of its last argument. jmp raises an error if dtypes differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxmp.base import dtypes
from jaxmp.base import trees as _tree
from jaxmp.base.trees import all_finite
from jaxmp.optim import loss_scale
from jaxmp.optim.loss_scale import LossScale, NoOpLossScale
from jaxmp.optim.loss_scale_state import HUGE, is_concrete, require
from jaxmp.policy import policies, policy_map

__all__ = (
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "dtype_to_names",
    "get_policy",
    "half_dtype",
    "select_tree",
)
__version__ = "0.0.4"  # the version of jmp with this interface

T = TypeVar("T")

# Both jnp.float16 and its numpy.dtype are keys, because their hashes differ.
dtype_to_names: dict[Any, tuple[str, ...]] = {
    key: names
    for dtype, names in (
        (jnp.bfloat16, ("bf16", "bfloat16")),
        (jnp.float16, ("f16", "float16")),
        (jnp.float32, ("full", "f32", "float32")),
        (jnp.float64, ("f64", "float64")),
    )
    for key in (dtype, np.dtype(dtype))
}
"""The names of each dtype in jmp. Policies print the first name."""


class Policy(policies.Policy):
    """A :class:`jaxmp.Policy` that is printed in jmp's notation.

    The policy equals any other policy with the same fields, even a :class:`jaxmp.Policy`.

    >>> print(Policy("float32", jnp.float16, jnp.float32))
    p=full,c=f16,o=full
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, policies.Policy) and dataclasses.astuple(self) == dataclasses.astuple(other)

    __hash__ = policies.Policy.__hash__

    def __str__(self) -> str:
        named = {"p": self.param_dtype, "c": self.compute_dtype, "o": self.output_dtype}
        parts = [f"{key}={dtype_to_names.get(dtype, (dtype.name,))[0]}" for key, dtype in named.items()]
        if self.matmul_precision:
            parts.append(f"m={self.matmul_precision}")
        if self.float8:
            parts.append(str(self.float8))
        return ",".join(parts)


def get_policy(policy_name: str) -> Policy:
    """Return the policy that jmp reads from a string.

    Args:
      policy_name: entries ``KEY=DTYPE``, separated by commas. The keys are ``p`` or ``params`` (default: float32),
        ``c`` or ``compute`` (default: the params' dtype) and ``o`` or ``output`` (default: the compute dtype). A single
        dtype without a key is used for all three keys.

    Raises:
      ValueError: a key or a dtype is unknown, or a key appears twice.

    >>> get_policy("half") == get_policy("p=half"), str(get_policy("c=bfloat16,o=full"))
    (True, 'p=full,c=bf16,o=full')
    """
    try:
        if "=" not in policy_name:
            return Policy(policy_name, policy_name, policy_name)
        read = policy_map.get_policy(policy_name)
        if isinstance(read, policy_map.PolicyMap):
            raise ValueError(f"a policy of jmp has no rules, got {policy_name!r}; use jaxmp.get_policy")
        return Policy(**vars(read))
    except ValueError as error:
        message = str(error)
        raise ValueError(message[:1].upper() + message[1:]) from None  # jmp's messages begin with a capital


def half_dtype() -> Any:
    """Return ``jnp.bfloat16`` on TPU, else ``jnp.float16``."""
    return getattr(jnp, dtypes.half_dtype().name)


def cast_to_full(tree: T) -> T:
    """Cast the floating arrays of ``tree`` to float32."""
    return _tree.cast(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Cast the floating arrays of ``tree`` to :func:`half_dtype`."""
    return _tree.cast(tree, half_dtype())


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Return ``a`` if the bool scalar ``pred`` is true, else ``b``.

    Raises:
      AssertionError: ``pred`` is not a boolean scalar.
    """
    flag = jnp.asarray(pred)
    if flag.ndim or flag.dtype != jnp.bool_:
        raise AssertionError(
            f"expected boolean scalar, got {flag.dtype} of shape {flag.shape}: pass the result of all_finite"
        )
    return _tree.select_tree(flag, a, b)


class _Widening(LossScale):
    def scale(self, tree: T) -> T:
        """Multiply ``tree`` by the scale; half-precision leaves become float32 first."""
        return super().scale(_tree.widen(tree))


@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Widening, loss_scale.StaticLossScale):
    """A :class:`jaxmp.StaticLossScale` that rejects 0 only when it is used.

    >>> StaticLossScale(2**15).scale(jnp.float16(3))
    Array(98304., dtype=float32)
    """

    def __post_init__(self) -> None:
        if not (is_concrete(self.loss_scale) and np.ndim(self.loss_scale) == 0 and self.loss_scale == 0):
            super().__post_init__()

    def scale(self, tree: T) -> T:
        """Multiply ``tree`` by the scale; half-precision leaves become float32 first."""
        require("loss_scale", self.loss_scale)
        return super().scale(tree)

    def unscale(self, tree: T) -> T:
        """Divide ``tree`` by the scale; half-precision leaves become float32 first."""
        require("loss_scale", self.loss_scale)
        return super().unscale(tree)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Widening, loss_scale.DynamicLossScale):
    """A :class:`jaxmp.DynamicLossScale` without a maximum, as in jmp.

    >>> scale = DynamicLossScale(jnp.float32(2.0**126), period=1)
    >>> for _ in range(3):
    ...     scale = scale.adjust(jnp.bool_(True))
    ...     print(float(scale.loss_scale) == 2.0**127)
    True
    True
    True
    """

    max_loss_scale: Any = dataclasses.field(default=HUGE, kw_only=True)
