"""A policy: the dtypes of params, computation and output."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from jaxmp.base import trees as _tree
from jaxmp.base.donation import donation_note
from jaxmp.base.dtypes import canonical_dtype, closest_names
from jaxmp.policy.float8 import Float8, get_recipe
from jaxmp.policy.off_switch import unless_policies_off

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# JAX also has algorithms for float8 operands, which no float32 product can use.
_ALGORITHMS = tuple(name for name in jax.lax.DotAlgorithmPreset.__members__ if "F8" not in name and name != "DEFAULT")
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32", *_ALGORITHMS)
"""The precisions of float32 products: those of JAX, and the names of ``jax.lax.DotAlgorithmPreset``."""


class PrecisionError(ValueError):
    """The precision of float32 products is unknown, or stands in place of a policy."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of the params, the computation and the output of a part of a model.

    A policy is frozen and hashable, so it can be a static argument of ``jax.jit``. A dtype is a name (``"float16"``),
    an alias (``"f16"``, ``"half"``) or a NumPy or JAX dtype. The names of the attributes are those of jmp. Mixed
    precision training was introduced by Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740.

    Attributes:
      param_dtype: the dtype of stored params (master weights).
      compute_dtype: the dtype of matrix products and convolutions.
      output_dtype: the dtype of results.
      matmul_precision: the precision of float32 products, or None for JAX's default. It is a name that
        ``jax.default_matmul_precision`` takes, in upper or lower case. On a GPU, JAX's default rounds the operands of
        float32 products to TensorFloat-32, and ``"highest"`` computes true float32. Other names are algorithms, such as
        ``"BF16_BF16_F32_X3"``: docs/concepts/formats.md compares them.
      float8: the settings of float8 products: a :class:`jaxmp.Float8`, its text (``"float8(min_dim=1024)"``), or None
        for no float8 products. ``apply_policy``, ``autocast`` and ``make_train_step`` use the settings. The methods
        ``cast_to_…`` ignore them.
      written: whether the code of a module runs as it is written, on operands in the compute dtype, so that no rule of
        autocast changes it. The override ``"written"`` of :func:`jaxmp.linen.apply_policy` sets this field.

    Raises:
      ValueError: a dtype is unknown, is not floating or has fewer than 16 bits; ``matmul_precision`` is unknown;
        ``float8`` is set and the compute dtype is not bfloat16; or ``float8`` and ``written`` are both set.

    >>> policy = Policy("float32", "float16", "float32")
    >>> policy.cast_to_compute(jax.numpy.ones(3)).dtype
    dtype('float16')
    >>> str(policy)
    'params=float32,compute=float16,output=float32'
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    matmul_precision: str | None = dataclasses.field(default=None, kw_only=True)
    float8: Float8 | None = dataclasses.field(default=None, kw_only=True)
    written: bool = dataclasses.field(default=False, kw_only=True)

    if TYPE_CHECKING:  # the fields are dtypes, but the arguments may be anything that names a dtype

        def __init__(
            self,
            param_dtype: Any,
            compute_dtype: Any,
            output_dtype: Any,
            *,
            matmul_precision: str | None = None,
            float8: Float8 | str | None = None,
            written: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = canonical_dtype(getattr(self, name))
            if dtype.itemsize == 1:
                raise ValueError(
                    f"a policy's dtypes have 16 bits or more, got {name}={dtype.name}; use bfloat16 or float16 (for "
                    "float8 products, 'mixed_float8')"
                )
            object.__setattr__(self, name, dtype)
        if self.matmul_precision is not None:
            object.__setattr__(self, "matmul_precision", _precision_named(self.matmul_precision))
        object.__setattr__(self, "float8", get_recipe(self.float8))
        if self.float8 is not None and self.compute_dtype.name != "bfloat16":
            raise ValueError(
                f"a policy with {self.float8} must have compute=bfloat16, got compute={self.compute_dtype.name}; write "
                "e.g. 'mixed_float8', or float8=None"
            )
        if self.float8 is not None and self.written:
            raise ValueError(
                f"code that runs as it is written has no float8 products, got written=True and {self.float8}; drop one "
                "of them"
            )

    def matmul_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which products run at ``matmul_precision``."""
        if self.matmul_precision is None:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.matmul_precision)

    def cast_to_param(self, tree: T) -> T:
        """Cast the floating arrays of ``tree`` to the param dtype."""
        return _cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Cast the floating arrays of ``tree`` to the compute dtype."""
        return _cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Cast the floating arrays of ``tree`` to the output dtype."""
        return _cast(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """Return a copy of this policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def wrap(self, fun: F) -> F:
        """Return ``fun`` with its arguments and its results cast.

        Arguments are cast to the compute dtype, and results to the output dtype.

        >>> half_dot = jaxmp.get_policy("mixed_float16").wrap(lambda x, y: x @ y)
        >>> half_dot(jax.numpy.full((1, 1), 1 / 3), jax.numpy.ones((1, 1)))[0, 0]  # a third, rounded to float16
        Array(0.33325195, dtype=float32)
        """

        @unless_policies_off(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.cast_to_compute((args, kwargs))
            with donation_note(), self.matmul_context():
                return self.cast_to_output(fun(*args, **kwargs))

        return wrapped

    def __str__(self) -> str:
        text = f"params={self.param_dtype.name},compute={self.compute_dtype.name},output={self.output_dtype.name}"
        text += f",matmul_precision={self.matmul_precision}" if self.matmul_precision is not None else ""
        text += ",written" if self.written else ""
        return text if self.float8 is None else f"{text},{self.float8}"


def _precision_named(name: Any) -> str:
    """Return the name of a precision of float32 products as JAX spells it."""
    names = {precision.lower(): precision for precision in PRECISIONS}
    if str(name).lower() not in names:
        raise PrecisionError(
            f"matmul_precision must be a precision of jax.default_matmul_precision, got {name!r}; nearest: "
            f"{closest_names(str(name), PRECISIONS, 4)}; for true float32 use 'highest'"
        )
    return names[str(name).lower()]


def _cast(tree: T, dtype: np.dtype) -> T:
    with donation_note():
        return _tree.cast(tree, dtype)


def check_backend(compute_dtype: np.dtype | None) -> None:
    """Raise a ValueError if the backend has no products in the compute dtype of a policy."""
    if compute_dtype == np.float16 and jax.default_backend() == "tpu":
        raise ValueError(
            "autocast needs a backend with products in the policy's compute dtype, got float16 on a TPU, which only "
            "has bfloat16 products; use 'mixed_bfloat16'"
        )
