"""Marks: scopes on JAX's name stack that set the precision of operations inside.

The author's code places marks with :func:`precision`. The adapters of Linen and NNX place marks around modules.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.sources import Names, current_names
from jaxmp.base import cache_keys
from jaxmp.base.cache_keys import planned
from jaxmp.base.context_variables import setting
from jaxmp.engine.overrides import Level, checked_level
from jaxmp.policy.policies import Policy
from jaxmp.program.values import Equation

DECIDED = "jaxmp.decided"
"""The scope around all operations that the engine has emitted; an outer engine does not change them."""
_WIDENED = "jaxmp.widened"
OF_POLICY = "the policy of its module"
WITH_RULE = "jaxmp.rule"
"""The scope of the body of a function with a custom derivative rule, and of the rule."""
WIDE_SUMS = "jaxmp.wide_sums"
"""The scope around casts that jaxmp adds, so that gradients are summed in float32."""
FLOAT32_RESULT = "jaxmp.float32_result"
"""The scope of a product of half operands with a float32 result, whose derivatives are half products."""
_MARK = re.compile(r"jaxmp\.(precision|compute)\((\w+):?(\w*)(;half)?(?:;override=(\d+))?(?:;recipe=(.*))?\)")


class Region(NamedTuple):
    """The precision that the marks around an operation ask for."""

    level: str | None = None  # one of LEVELS; "written" for no change; None for the engine's decision
    half: np.dtype | None = None  # the half dtype of the module around it; None for the program's half dtype
    asked_by: str = ""  # the source of the level, in words
    products: str = ""  # the matmul_precision of the module's policy, for derivative rules that are traced later
    asked_products: str = ""  # the precision of float32 products that a region asks for; empty for that of its level
    recipe: str = ""  # the recipe of float8 products as text; "none" for half products, empty for the program's recipe
    override: int | None = None  # the number of the override that gives the module a half policy, from 0
    all_half: bool = False  # whether this override makes every operation of the module half


def precision(level: str | Policy) -> contextlib.AbstractContextManager[None]:
    """Set the precision of operations in this context under autocast.

    Use this context in place of ``astype("float32")``. Autocast traces float32 code in float32, so JAX drops such a
    cast and autocast cannot see the cast. The context also holds in gradients, loops and jitted functions. Outside of
    autocast the context changes nothing.

    A region also applies to the functions under autocast, and to the models and train steps under a policy, that are
    called in it. (In torch, an ``autocast`` inside of ``autocast(enabled=False)`` stays on.) If regions are nested, the
    innermost region applies.

    Args:
      level: one of the following:

        - ``"float32"``, with products at the highest precision;
        - ``"tensorfloat32"``, which is float32 with products at JAX's default precision;
        - ``"half"``, the compute dtype of the policy;
        - ``"float32_result"``: products read half operands and return float32, as with
          ``preferred_element_type=jnp.float32``. The rules decide for other operations;
        - a float32 policy, such as ``"matmul_precision=BF16_BF16_F32_X3"``, which is float32 with this precision of
          products.

    Raises:
      ValueError: the level is none of these.

    >>> def fun(x, w):
    ...     with precision("float32"):
    ...         return x @ w
    >>> import jax.numpy as jnp
    >>> from jaxmp.engine.autocast import autocast
    >>> autocast(fun, "mixed_bfloat16")(jnp.full((1, 1), 1 / 3), jnp.ones((1, 1)))[0, 0]  # bfloat16 gives 0.33398438
    Array(0.33333334, dtype=float32)
    """
    return _region(checked_level(level))


@contextlib.contextmanager
def _region(level: Level) -> Iterator[None]:
    # JAX's name stack begins anew in each jitted function and in each function under autocast. So the level is also
    # stored in a context, for which JAX traces jitted functions again.
    with mark_of(level), cache_keys.region(scope_of(level)):
        yield


def mark_of(level: Level) -> contextlib.AbstractContextManager[None]:
    """Return a context that marks the code in it with one of ``LEVELS``, or with a float32 policy.

    Unlike :func:`precision`, it does not apply to functions and models that have their own policy.
    """
    return jax.named_scope(scope_of(level))


def scope_of(level: Level) -> str:
    """Return the scope that marks a region of a level."""
    text = f"float32:{level.matmul_precision}" if isinstance(level, Policy) else level
    return f"jaxmp.precision({text})"


def names_around() -> Names:
    """Return the scope of the region around the running code, for a program that begins here."""
    scope: str = cache_keys.region.value
    return (scope,) if scope else ()


def names_here() -> Names:
    """Return the scopes around the running code, with the region around the program."""
    return (*names_around(), *current_names())


def computing(
    dtype: np.dtype | None,
    products: str | None = None,
    recipe: Any = None,
    override: int | None = None,
    all_half: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """Return a context that marks a module's code with its policy's compute dtype.

    With the dtype None, the code computes in its original dtypes. If an override names the module, ``override`` is the
    number of this override among the overrides of modules, and ``all_half`` says whether its level is ``"half"``.
    """
    name = "written" if dtype is None else dtype.name
    level = ";half" if all_half else ""
    suffix = ("" if override is None else f";override={override}") + (f";recipe={recipe}" if recipe else "")
    return jax.named_scope(f"jaxmp.compute({name}:{products or ''}{level}{suffix})")


def widened(value: jax.Array) -> jax.Array:
    """Return a half ``value`` in float32, for code that is traced in float32.

    The engine treats this cast as a move of data, so half operations read the half value.
    """
    with jax.named_scope(_WIDENED):
        return value.astype(jnp.float32)


def is_widened(names: Names) -> bool:
    """Return whether an operation in these scopes is the cast of :func:`widened`."""
    return bool(names) and names[-1] == _WIDENED


@functools.lru_cache(maxsize=4096)
def region_of(names: Names) -> Region:
    """Return the region of the innermost marks among some scopes."""
    marks = [mark.groups() for part in reversed(names) if (mark := _MARK.fullmatch(part))]
    products = next((products for kind, _, products, *_ in marks if kind == "compute"), "")
    recipe = next((recipe or "none" for kind, *_, recipe in marks if kind == "compute"), "")
    region = Region(products=products, recipe=recipe)
    for kind, text, asked_products, all_half, override, _ in marks:
        if kind == "precision" and region.level is None:
            argument = f"matmul_precision={asked_products}" if asked_products else text
            asked_by = f"region jaxmp.precision({argument!r})"
            region = region._replace(level=text, asked_by=asked_by, asked_products=asked_products)
        elif kind == "compute" and region.half is None:
            if text in ("written", "float32"):
                return region if region.level else region._replace(level=text, asked_by=OF_POLICY)
            number = None if override is None else int(override)
            region = region._replace(half=np.dtype(jnp.dtype(text)), override=number, all_half=bool(all_half))
    return region


@functools.lru_cache(maxsize=4096)
def ours(names: Names) -> Names:
    """Return jaxmp's scopes: the marks, and other scopes that affect decisions."""
    return tuple([part for part in names if part.startswith("jaxmp.")])


@functools.lru_cache(maxsize=4096)
def path_of(names: Names) -> Names:
    """Return the scopes of modules and of the author, without jaxmp's."""
    return tuple(part for part in names if not part.startswith("jaxmp."))


IsInside = Callable[[Equation], bool]
"""Whether an operation is in a region."""
_is_inside: ContextVar[IsInside | None] = ContextVar("jaxmp_trial_region", default=None)


@contextlib.contextmanager
def trial_region(is_inside: IsInside) -> Iterator[None]:
    """Decide as if the operations that ``is_inside`` accepts were in ``jaxmp.precision("float32")``.

    Programs in caches are not used.
    """
    with setting(_is_inside, is_inside), planned(object()):
        yield


def names_with_trial(equation: Equation) -> Names:
    """Return the scopes around an equation, with the region that a tool tries."""
    is_inside = _is_inside.get()
    if is_inside is None or equation.bodies is not None or not is_inside(equation):
        return equation.names
    return (*equation.names, scope_of("float32"))
