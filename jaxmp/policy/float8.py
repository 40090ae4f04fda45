"""The settings of float8 products (a recipe), and the products that they cover."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import numpy as np

from jaxmp.base import hardware
from jaxmp.base.dtypes import closest_names, dtype_among
from jaxmp.base.user_warnings import warn_user

FORWARD_FORMAT = "float8_e4m3fn"
"""The format of both operands in the forward pass. No GPU multiplies two operands in float8_e5m2."""

_E5M2 = "float8_e5m2"
_CHOICES = {
    "weight_gradient": ("float8", "compute"),
    "accumulate": ("fast", "precise", "fast_forward"),
}
_DIVISOR = 16  # divides each dimension of a float8 product, because XLA copies and pads operands of other sizes
_MIN_DIM, _MIN_DIM_ON_TPU = 1536, 4096
"""The default of ``min_dim``: a width at which two blocks of GPT-2 gain from float8.

The benchmark ``experiments.benchmarks.float8`` measures it, and compares the compiler's cycles for a TPU7x.
"""
_VARIABLE = "JAXMP_FLOAT8"
_warned: list[str] = []


@dataclasses.dataclass(frozen=True)
class Float8:
    """The settings of a policy's float8 products: ``Policy(..., float8=Float8())``.

    In the forward pass, both operands of a product are float8_e4m3fn. The default formats are those of Micikevicius et
    al., "FP8 Formats for Deep Learning", arXiv:2209.05433. The object is frozen and hashable.

    Attributes:
      gradient: the format of the gradient with respect to a product's result: float8_e5m2, which has more range, or
        float8_e4m3fn.
      weight_gradient: the dtype of the product that computes the weight's gradient: ``"float8"``, or ``"compute"`` for
        the policy's compute dtype.
      accumulate: how precisely Hopper's tensor cores sum: ``"fast"`` (about 14 bits), ``"precise"`` (float32), or
        ``"fast_forward"`` (fast in the forward pass, precise in the backward pass). A TPU always sums in float32.
      min_dim: the minimum size of both dimensions of a weight. Products with smaller weights are not float8. None
        means 1,536, or 4,096 on a TPU7x.
      min_tokens: the minimum number of rows (tokens) that a product multiplies by the weight. Smaller products are not
        float8.

    Raises:
      ValueError: an attribute has a value that is not listed above, or a size is not a positive integer.

    >>> str(jaxmp.Float8(min_dim=1024))
    'float8(min_dim=1024)'
    """

    gradient: str = _E5M2
    weight_gradient: str = "float8"
    accumulate: str = "fast_forward"
    min_dim: int | None = None
    min_tokens: int = 1024

    def __post_init__(self) -> None:
        gradient = dtype_among("gradient", self.gradient, (FORWARD_FORMAT, _E5M2))
        object.__setattr__(self, "gradient", gradient)
        for name, known in _CHOICES.items():
            choice = getattr(self, name)
            if choice not in known:
                raise ValueError(
                    f"{name} of a Float8 must be {' or '.join(map(repr, known))}, got {choice!r}; "
                    f"nearest: {closest_names(str(choice), known, 1)}"
                )
        for name in ("min_dim", "min_tokens"):
            size = getattr(self, name)
            if size is None and name == "min_dim":
                continue
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise ValueError(
                    f"{name} of a Float8 must be a positive integer, got {size!r}; it is the minimum size of a float8 "
                    "product, and 1 allows every size"
                )
            object.__setattr__(self, name, int(size))

    def __str__(self) -> str:
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={value}")
        return f"float8({','.join(changed)})" if changed else "float8"


def get_recipe(recipe: Any) -> Float8 | None:
    """Return the recipe that a text describes, or None for ``"none"`` and None.

    A :class:`Float8` is returned unchanged.

    Raises:
      ValueError: the text does not describe a recipe, or a value is not allowed.
      TypeError: ``recipe`` is not a text, a Float8 or None.

    >>> str(get_recipe("float8(gradient=e4m3, min_dim=1024)"))
    'float8(gradient=float8_e4m3fn,min_dim=1024)'
    """
    if recipe is None or isinstance(recipe, Float8):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"float8 of a policy must be a jaxmp.Float8, a text such as 'float8(min_dim=1024)' or None, got {recipe!r}"
        )
    text = "".join(recipe.split()).lower()
    if text == "none":
        return None
    match = re.fullmatch(r"float8(?:\(([^()]*)\))?", text)
    if match is None:
        raise ValueError(
            f"a float8 recipe is 'float8' or 'float8(FIELD=VALUE,…)', got {recipe!r}; write e.g. 'float8(min_dim=1024)'"
        )
    names = [field.name for field in dataclasses.fields(Float8)]
    fields: dict[str, Any] = {}
    for part in filter(None, (match[1] or "").split(",")):
        name, _, value = part.partition("=")
        if name not in names or name in fields or not value:
            raise ValueError(
                f"float8(…) takes FIELD=VALUE, each field once, got {part!r} in {recipe!r}; write e.g. min_dim=1024; "
                f"fields, nearest first: {closest_names(name, names)}"
            )
        fields[name] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return Float8(**fields)


def refusal(lhs: Any, rhs: Any, dimension_numbers: Any, recipe: Float8, *, weight: str = "rhs") -> str | None:
    """Return why a product of these shapes is not float8; None if it is float8.

    Examples are ``"768 < 1536"`` (a dimension of the weight is below ``min_dim``) and ``"50257 % 16"`` (a dimension is
    not divisible by 16).

    Args:
      lhs: an array or a shape.
      rhs: an array or a shape.
      dimension_numbers: as ``jax.lax.dot_general`` takes them, without batch dimensions.
      recipe: the recipe with the minimum sizes.
      weight: the operand that is the weight, ``"lhs"`` or ``"rhs"``. The number of tokens is the product of the other
        operand's dimensions that are not contracted.

    >>> lhs, rhs = jax.ShapeDtypeStruct((8, 512, 768), "bfloat16"), jax.ShapeDtypeStruct((768, 3072), "bfloat16")
    >>> refusal(lhs, rhs, (((2,), (0,)), ((), ())), jaxmp.Float8())
    '768 < 1536'
    """
    contracting, _ = dimension_numbers
    inner = math.prod(lhs.shape[axis] for axis in contracting[0])
    left = math.prod(size for axis, size in enumerate(lhs.shape) if axis not in contracting[0])
    right = math.prod(size for axis, size in enumerate(rhs.shape) if axis not in contracting[1])
    tokens, outer = (left, right) if weight == "rhs" else (right, left)
    if not all(isinstance(size, int) for size in (inner, outer, tokens)):
        return "a dimension that jax.export leaves open"
    min_dim = _default_min_dim() if recipe.min_dim is None else recipe.min_dim
    if min(inner, outer) < min_dim:
        return f"{min(inner, outer)} < {min_dim}"
    if tokens < recipe.min_tokens:
        return f"{tokens} tokens < {recipe.min_tokens}"
    for size in (inner, outer, tokens):
        if size % _DIVISOR:
            return f"{size} % {_DIVISOR}"
    return None


def _default_min_dim() -> int:
    return _MIN_DIM_ON_TPU if hardware.detect().platform == "tpu" else _MIN_DIM


def available() -> str:
    """Return how float8 products run: ``"native"``, ``"emulate"`` or ``"no"``.

    - ``"native"``: the device multiplies float8. The device is the first local device, or the device of
      :func:`jaxmp.hardware.assumed`.
    - ``"emulate"``: the environment has ``JAXMP_FLOAT8=emulate``. Products are computed with casts, which give the same
      numbers on any device.
    - ``"no"``: products are bfloat16 instead. A warning says so once per process.

    Raises:
      ValueError: ``JAXMP_FLOAT8`` has another value than ``emulate``.
    """
    setting = emulation()
    if setting not in ("", "emulate"):
        raise ValueError(
            f"{_VARIABLE} must be unset or 'emulate', got {setting!r}; {_VARIABLE}=emulate computes float8 products "
            "with casts on any device"
        )
    if setting:
        return setting
    device = hardware.detect()
    if FORWARD_FORMAT in device.tensor_cores:
        return "native"
    if not _warned:
        _warned.append(device.name)
        warn_user(
            f"float8 products need a GPU of compute capability 8.9 or more, or a TPU7x, got {device.name}: they are "
            f"bfloat16 here. Set {_VARIABLE}=emulate to compute them with casts, or trace in "
            "jaxmp.hardware.assumed('h200') to compile for another device",
        )
    return "no"


def emulation() -> str:
    """Return the value of ``JAXMP_FLOAT8``; empty if it is unset."""
    return os.environ.get(_VARIABLE, "")


def is_direct() -> bool:
    """Return whether float8 arrays are multiplied directly, without casts to bfloat16.

    TPUs multiply directly. The device is that of :func:`available`.
    """
    device = hardware.detect()
    return device.platform == "tpu" and FORWARD_FORMAT in device.tensor_cores and not emulation()
