"""What is asked of an operation where it stands: a marked region, an override, its class; in this order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxmp._jaxpr import reading
from jaxmp.autocast.classes import Class, classify, primitives_named_by
from jaxmp.autocast.kinds import REAL, Kind, is_real
from jaxmp.dtypes import nearest
from jaxmp.patterns import matches

if TYPE_CHECKING:
    from jaxmp.autocast.graph import Node

DECIDED = "jaxmp.autocast"
"""The scope around everything that autocast has written: another autocast leaves it as it is."""
_REGION = re.compile(r"jaxmp\.precision\((float32|half)\)")

# To cast before or after is the same: each element has one origin and one destination, or the largest is picked, and
# rounding keeps the order. (Not so where the gradient is a sum: after a gather, a broadcast.)
MONOTONE = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "copy_p", "name", "convert_element_type"}
    | {"reduce_window_max", "reduce_window_min"}
)
MOVES = frozenset(
    {"concatenate", "select_n", "pad", "dynamic_update_slice", "stack", "max", "min", "clamp"}
    | {"scatter", "scatter-min", "scatter-max"}
)
"""Operations of several operands that round nothing, and so add up no error round a loop."""


def precision(level: str) -> contextlib.AbstractContextManager[None]:
    """Marks the code it surrounds: within :func:`jaxmp.autocast` its operations compute in this precision.

    Use it where an ``astype`` would leave no trace: in a function that autocast reads, everything is float32 already.
    The mark is a scope on JAX's name stack, so that it holds in gradients, loops and jitted functions alike; outside of
    autocast it changes nothing. Products in a float32 region run at the highest precision (no TF32).

    Args:
      level: ``"float32"`` or ``"half"``.

    Raises:
      ValueError: another level.

    >>> def fun(x, w):
    ...     with precision("float32"):
    ...         return x @ w
    >>> import jax.numpy as jnp
    >>> from jaxmp.autocast import autocast
    >>> autocast(fun, "mixed_bfloat16")(jnp.full((1, 1), 1 / 3), jnp.ones((1, 1)))[0, 0]  # bfloat16 gives 0.33398438
    Array(0.33333334, dtype=float32)
    """
    return jax.named_scope(f"jaxmp.precision({checked_level(level)})")


def checked_level(level: Any) -> str:
    """``level`` itself if it is one."""
    if level in ("float32", "half"):
        return str(level)
    raise ValueError(
        f"a region or an override is computed in 'float32' or in 'half' (the policy's compute dtype), got {level!r}"
    )


@dataclasses.dataclass
class Rules:
    """The half dtype and the overrides of one autocast; it notes which of them matched.

    Args:
      half: the compute dtype.
      overrides: ``"**/head"`` (a path of modules or scopes), ``"primitive:exp"`` or ``"class:accumulation"`` to
        ``"float32"`` or ``"half"``; of several paths the first that matches wins, as in a PolicyMap.

    Raises:
      UnknownOperationError: an override names a primitive or a class that there is not.
      ValueError: an override asks for neither ``"float32"`` nor ``"half"``.
    """

    half: np.dtype
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.operations: dict[str, dict[str, tuple[str, str]]] = {"primitive": {}, "class": {}}
        for key, level in self.overrides.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"an override of autocast is a path such as '**/head', 'primitive:<name>' or 'class:<name>', got "
                    f"{key!r}; classes of modules are for jaxmp.linen and jaxmp.nnx"
                )
            checked_level(level)
            if key.startswith(("primitive:", "class:")):
                kind = key.partition(":")[0]
                self.operations[kind].update(dict.fromkeys(primitives_named_by(key), (key, level)))
            else:
                self.paths[key] = level
        self.key = (self.half, tuple(self.overrides.items()))
        self.programs: dict[Any, Any] = {}
        self.matched: set[str] = set()
        self.visited: set[reading.Names] = set()
        self.primitives: set[str] = set()
        info = jax.numpy.finfo(self.half)
        self.largest, self.smallest = float(info.max), float(info.smallest_normal)
        self._path_rule = functools.lru_cache(maxsize=None)(self._find_path_rule)

    def is_decided(self, names: reading.Names) -> bool:
        """Whether what stands in these scopes was written by an autocast inside this one."""
        return DECIDED in names

    def check(self) -> None:
        """Raises a ValueError if an override matched nothing, with the nearest paths or primitives."""
        for key in self.overrides:
            if key in self.matched:
                continue
            if key in self.paths:
                known = sorted({"/".join(names) for names in self.visited} - {""})
                what = f"paths: {nearest(key, known) or 'none, the function has no scopes'}"
            else:
                what = f"primitives: {nearest(key.partition(':')[2], sorted(self.primitives))}"
            raise ValueError(
                f"every override must match an operation of the function, but {key!r} matched none; nearest {what}"
            )

    def kind_of(self, eqn: Any, operands: Sequence[Node | None], names: reading.Names) -> tuple[Kind, str]:
        """What an equation without a body is before its neighbours have a say, and why."""
        name, cls = eqn.primitive.name, classify(eqn.primitive.name)
        self.primitives.add(name)
        if self.is_decided(names):
            return Kind.KEPT, "decided by the autocast inside"
        path = tuple(part for part in names if not _REGION.fullmatch(part))
        self.visited.add(path)
        asked = self._asked(name, names, path)
        if any(_is_other_float(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
            return Kind.KEPT, "float64, complex and fp8 are left alone"
        if not any(is_real(var.aval) for var in eqn.outvars):
            return Kind.KEPT, "no floating result"
        if cls is None:
            return Kind.KEPT, "an unknown primitive keeps its dtypes"
        if name == "convert_element_type":
            return self._kind_of_cast(eqn)
        if cls in (Class.OPAQUE, Class.RECURSE) or _names_a_dtype(eqn):
            return Kind.KEPT, "opaque: its meaning depends on its dtypes"
        if cls is Class.CLEAR:
            return Kind.CLEAR, "moves data"
        if asked is not None:
            level, reason = asked
            if level == "float32":
                return Kind.FULL, reason
            if cls is not Class.LINALG or reason.startswith("override 'primitive:"):
                return Kind.HALF, reason
        if cls is Class.HALF:
            return self._kind_of_product(eqn)
        if cls in (Class.POINTWISE, Class.ACCUMULATION, Class.LINALG):
            return Kind.FULL, f"{cls.value} is float32"
        if reading.is_special(eqn):  # polynomials and series, whose parts are nothing that one would round
            return Kind.FULL, "part of a special function"
        return self._kind_by_constants(name, operands)

    def _asked(self, name: str, names: reading.Names, path: reading.Names) -> tuple[str, str] | None:
        rule = self._path_rule(path)
        if rule is not None:
            self.matched.add(rule)
        for kind in ("primitive", "class"):
            if name in self.operations[kind]:
                self.matched.add(self.operations[kind][name][0])
        for part in reversed(names):
            if region := _REGION.fullmatch(part):
                return region[1], f"region jaxmp.precision({region[1]!r})"
        if rule is not None:
            return self.paths[rule], f"override {rule!r}"
        for kind in ("primitive", "class"):
            if name in self.operations[kind]:
                key, level = self.operations[kind][name]
                return level, f"override {key!r}"
        return None

    def _find_path_rule(self, path: reading.Names) -> str | None:
        prefixes = [path[:depth] for depth in range(1, len(path) + 1)]
        return next((key for key in self.paths if any(matches(key, prefix, None) for prefix in prefixes)), None)

    def _kind_of_cast(self, eqn: Any) -> tuple[Kind, str]:
        old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
        if old == new:
            return Kind.CLEAR, "moves data"
        if old in REAL and new.itemsize == 4:
            return Kind.FULL, "the author casts to float32"
        return Kind.KEPT, f"the author casts to {np.dtype(new).name}"

    def _kind_of_product(self, eqn: Any) -> tuple[Kind, str]:
        operands = [atom.aval for atom in eqn.invars if not jax.numpy.issubdtype(atom.aval.dtype, np.integer)]
        if not all(is_real(aval) for aval in operands) or len(operands) < 2:
            return Kind.KEPT, "a product with an operand that is no float"
        if asks_for_highest(eqn.params.get("precision")):
            return Kind.FULL, "the author asks for the highest precision"
        if all(aval.dtype.itemsize == 2 for aval in operands):
            written = eqn.outvars[0].aval.dtype
            return (Kind.HALF, "product") if written.itemsize == 2 else (Kind.KEPT, "the author's dtypes")
        if eqn.primitive.name == "dot_general" and _is_outer(eqn):
            return Kind.INFER, "an outer product"
        return Kind.HALF, "product"

    def _kind_by_constants(self, name: str, operands: Sequence[Node | None]) -> tuple[Kind, str]:
        constants = [node.const for node in operands if node is not None and node.const is not None]
        if name in ("max", "min", "clamp"):  # the infinity or zero that the bound becomes bounds just as well
            constants = [value for value in constants if value < self.smallest]
        if any(value > self.largest for value in constants):
            return Kind.STRICT, f"a constant beyond {self.half.name}'s largest number"
        if any(0 < value < self.smallest for value in constants):
            return Kind.FULL, f"a constant below {self.half.name}'s smallest normal number"
        return Kind.INFER, ""


def asks_for_highest(precision: Any) -> bool:
    """Whether the ``precision`` of a product names more than the backend's default for float32 on some operand."""
    parts = precision if isinstance(precision, tuple) else (precision,)
    # An algorithm (jax.lax.DotAlgorithmPreset) states the dtypes in full.
    return any(part is not None and part not in (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH) for part in parts)


def _is_other_float(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and dtype not in REAL and _is_inexact(dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, np.inexact))


def _names_a_dtype(eqn: Any) -> bool:
    """Whether a parameter fixes the dtype of a result, as ``out_dtype`` of ``mul`` does."""
    return eqn.params.get("out_dtype") is not None


def _is_outer(eqn: Any) -> bool:
    """Whether a product sums nothing: then it is a multiplication, of positions and frequencies for instance."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[axis] == 1 for axis in contracted)
