"""A policy: the dtypes of params, compute and output of one piece of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import numpy as np

from jaxmp.base import trees as _tree
from jaxmp.base.cache_keys import policies_off
from jaxmp.base.dtypes import canonical_dtype
from jaxmp.policy.float8 import Float8, get_recipe

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of one piece of a model. Frozen and hashable: a static argument of ``jax.jit``.

    Attributes:
      param_dtype: what parameters are stored in (master weights).
      compute_dtype: what matrix products and convolutions run in.
      output_dtype: what results are handed out in.
      matmul_precision: ``jax.default_matmul_precision`` for the code under this policy, or None for JAX's own choice.
        On a GPU that choice for float32 products is TensorFloat-32; ``"highest"`` asks for true float32.
      float8: which products are float8, and how: a :class:`jaxmp.Float8` or its text (``"float8(min_dim=1024)"``), or
        None for none. ``apply_policy``, ``autocast`` and ``make_train_step`` use it; casts do not.

    The dtypes may be given as anything :func:`jaxmp.base.dtypes.canonical_dtype` reads. The scheme is that of
    Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; the names are jmp's.

    Raises:
      ValueError: a dtype is unknown, not floating or float8, the precision is none that JAX knows, or there are float8
        products in what does not compute in bfloat16.

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

    if TYPE_CHECKING:  # the fields are dtypes, the arguments whatever names one

        def __init__(
            self,
            param_dtype: Any,
            compute_dtype: Any,
            output_dtype: Any,
            *,
            matmul_precision: str | None = None,
            float8: Float8 | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = canonical_dtype(getattr(self, name))
            if dtype.itemsize == 1:
                needs = "a float8 product needs a scale for each operand, which no cast has"
                remedy = "use bfloat16, with float8='float8' for such products"
                if not dtype.name.startswith("float8"):
                    needs, remedy = "no product here computes in it", "use bfloat16 or float16"
                raise ValueError(f"a policy's dtypes have 16 bits or more, got {name}={dtype.name}: {needs}; {remedy}")
            object.__setattr__(self, name, dtype)
        if self.matmul_precision is not None:
            try:
                jax.default_matmul_precision(self.matmul_precision)  # checks its argument when it is made
            except ValueError:
                raise ValueError(
                    f"matmul_precision must be one that jax.default_matmul_precision takes, got "
                    f"{self.matmul_precision!r}; use 'highest' for true float32, 'tensorfloat32', 'bfloat16', or None"
                ) from None
        object.__setattr__(self, "float8", get_recipe(self.float8))
        if self.float8 is not None and self.compute_dtype.name != "bfloat16":
            raise ValueError(
                f"float8 products stand in for those of bfloat16, so {self.float8} goes with compute=bfloat16, "
                f"got compute={self.compute_dtype.name}; write e.g. 'mixed_float8', or float8=None"
            )

    def matmul_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which products run at ``matmul_precision``; None changes nothing."""
        if self.matmul_precision is None:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.matmul_precision)

    def cast_to_param(self, tree: T) -> T:
        """Cast the floating arrays of ``tree`` to the param dtype (see :func:`jaxmp.base.trees.cast`)."""
        return _tree.cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Cast the floating arrays of ``tree`` to the compute dtype (see :func:`jaxmp.base.trees.cast`)."""
        return _tree.cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Cast the floating arrays of ``tree`` to the output dtype (see :func:`jaxmp.base.trees.cast`)."""
        return _tree.cast(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """Return the same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def wrap(self, fun: F) -> F:
        """Cast the floating arguments of ``fun`` to the compute dtype, and its results to the output dtype.

        >>> half_dot = jaxmp.get_policy("mixed_float16").wrap(lambda x, y: x @ y)
        >>> half_dot(jax.numpy.full((1, 1), 1 / 3), jax.numpy.ones((1, 1)))[0, 0]  # a third, rounded to float16
        Array(0.33325195, dtype=float32)
        """

        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if policies_off.value:
                return fun(*args, **kwargs)
            args, kwargs = self.cast_to_compute((args, kwargs))
            with self.matmul_context():
                return self.cast_to_output(fun(*args, **kwargs))

        return cast(F, wrapped)

    def __str__(self) -> str:
        text = f"params={self.param_dtype.name},compute={self.compute_dtype.name},output={self.output_dtype.name}"
        text += f",matmul_precision={self.matmul_precision}" if self.matmul_precision is not None else ""
        return text if self.float8 is None else f"{text},{self.float8}"


def check_backend(policy: Policy) -> None:
    """Raise a ValueError if the default backend has no products in the policy's compute dtype."""
    if policy.compute_dtype == np.float16 and jax.default_backend() == "tpu":
        raise ValueError(
            "autocast needs a backend that multiplies in the policy's compute dtype, got float16 on a TPU, whose "
            "matrix unit has bfloat16 only; use 'mixed_bfloat16'"
        )
