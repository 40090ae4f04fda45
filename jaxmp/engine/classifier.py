"""The classification of operations: their kinds, from marked regions, overrides and classes.

A region wins over an override, and an override wins over the class.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._internals.jax.sources import Names
from jaxmp.base.dtypes import CASTABLE, is_castable, is_half, is_other_float, may_sum_half, range_of
from jaxmp.engine.marks import DECIDED, OF_POLICY, is_widened, region_of
from jaxmp.engine.override_matching import OverrideMatcher
from jaxmp.engine.overrides import FLOAT32_RESULT, Level, is_float32
from jaxmp.engine.states import Kind
from jaxmp.policy.float8 import Float8, get_recipe
from jaxmp.policy.policies import Policy, check_backend
from jaxmp.program.equations import (
    HIGHEST,
    Precision,
    asks_for_highest,
    aval_of,
    names_a_dtype,
    precision_named,
    primitive_of,
)
from jaxmp.program.primitives import BOUNDS, CAST, PICKS, Class, Trait, classify, with_trait


class OperationKind(NamedTuple):
    """The kind of an operation, the reason that a plan shows, and a requested level."""

    kind: Kind
    reason: str
    requested: str = ""


class Request(NamedTuple):
    """The level that a region or an override requests for an operation.

    Attributes:
      level: one of :data:`jaxmp.engine.overrides.LEVELS`.
      source: a text that names the region or the override.
      products: the precision of float32 products; empty for the precision that the level means.
    """

    level: str
    source: str
    products: str = ""


Constants = Sequence[tuple[float, float] | None]
_COUNTS_TIES = with_trait(Trait.EXTREME) & with_trait(Trait.REDUCES)
"""Operations whose derivative counts the largest or smallest values, in a sum in the dtype of the operand."""


@dataclasses.dataclass
class Classifier:
    """The classifier of the operations of one function, with its half dtype and its overrides.

    Args:
      half: the compute dtype of code outside of marked modules; None if all code is marked.
      overrides: the levels of paths, primitives and classes, from :func:`jaxmp.engine.overrides.levels_of`. The first
        path that matches wins, as in a PolicyMap. A path with a primitive matches only that primitive.
      float8: the recipe for float8 products in code outside of marked modules; None for half products.
      in_model: whether the first scope of each path is the model, which keys of overrides may leave out.
      modules_before: for a path with a primitive, the number of overrides of modules that come before it. If a model
        has overrides of modules, they are in the marks around the code of these modules.
    """

    half: np.dtype | None
    overrides: dict[str, Level] = dataclasses.field(default_factory=dict)
    float8: Float8 | None = None
    in_model: bool = False
    modules_before: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.key = (self.half, tuple(self.overrides.items()), self.in_model, tuple(self.modules_before.items()))
        self.matcher = OverrideMatcher(self.overrides, self.in_model)

    def kind_of(self, eqn: JaxprEqn, constants: Constants, names: Names) -> OperationKind:
        """Return the kind of an equation without a body, and the reason.

        Args:
          eqn: the equation.
          constants: for each floating operand, its smallest nonzero magnitude and its largest magnitude; None for an
            operand that is not a constant.
          names: the scopes around the equation.

        Raises:
          ValueError: the policy around the equation computes in float16, and the backend is a TPU.
        """
        name = primitive_of(eqn)
        cls, half = classify(name), region_of(names).half or self.half
        if DECIDED in names:
            return OperationKind(Kind.KEPT, "decided by the autocast inside")
        self.matcher.visit(name, names)
        if cls is Class.HALF:
            self.matcher.match(name, names)  # also for a float64 product, which keeps its dtype
        if (fixed := self._fixed_kind(eqn, cls, half, names)) is not None:
            return fixed
        self.matcher.match(name, names)
        request = self.request_of(name, names)
        if cls is Class.CLEAR:
            return self._kind_of_move(eqn, half, request)
        if request is not None and (requested := self._requested_kind(eqn, cls, request, names)) is not None:
            return requested
        if cls is Class.HALF:
            return self._kind_of_product(eqn)
        if cls in (Class.POINTWISE, Class.ACCUMULATION, Class.LINALG):
            return OperationKind(Kind.FULL, f"{cls.value} is float32")
        return self._kind_by_constants(name, constants, half)

    def _fixed_kind(
        self, eqn: JaxprEqn, cls: Class | None, half: np.dtype | None, names: Names
    ) -> OperationKind | None:
        """Return the kind of an operation that overrides do not change, or None: a cast, or an operation left alone."""
        region = region_of(names)
        if any([is_other_float(getattr(atom.aval, "dtype", None)) for atom in (*eqn.invars, *eqn.outvars)]):
            return OperationKind(Kind.KEPT, "float64, complex and fp8 are left alone")
        if not any([is_castable(var.aval) for var in eqn.outvars]):
            return OperationKind(Kind.KEPT, "no floating result")
        if cls is None:
            return OperationKind(Kind.KEPT, "an unknown primitive keeps its dtypes")
        if primitive_of(eqn) == CAST:
            return self._kind_of_cast(eqn, names)
        check_backend(half)
        if region.level == "written" or (half is None and region.level is None):
            moves = primitive_of(eqn) in PICKS
            return OperationKind(Kind.CLEAR, "moves data") if moves else OperationKind(Kind.KEPT, "as it is written")
        if cls is Class.RECURSE:
            return OperationKind(Kind.KEPT, "a body that autocast does not look into")
        if cls is Class.OPAQUE or names_a_dtype(eqn):
            return OperationKind(Kind.KEPT, "opaque: its meaning depends on its dtypes")
        return None

    def _kind_of_move(self, eqn: JaxprEqn, half: np.dtype | None, request: Request | None) -> OperationKind:
        name, asks_for_half = primitive_of(eqn), request is not None and request.level == "half"
        if name in _COUNTS_TIES and not asks_for_half and not may_sum_half():
            return OperationKind(Kind.FULL, "jax_allow_f16_reductions is off")
        fill = abs(eqn.params.get("fill_value") or 0)  # a gather returns it for indices beyond the end
        by_constants = self._kind_by_constants(name, [(fill, fill)] if np.isfinite(fill) else [], half)
        return OperationKind(Kind.CLEAR, "moves data") if by_constants.kind is Kind.INFER else by_constants

    def _requested_kind(self, eqn: JaxprEqn, cls: Class | None, request: Request, names: Names) -> OperationKind | None:
        """Return the kind that a region or an override requests, or None if the operation cannot have it."""
        if request.level == FLOAT32_RESULT:
            is_product = cls is Class.HALF and self._kind_of_product(eqn).kind in (Kind.HALF, Kind.FULL)
            return OperationKind(Kind.HALF, request.source, request.level) if is_product else None
        if request.level != "half":
            return OperationKind(Kind.FULL, request.source, request.level)
        if cls is Class.LINALG and not self._is_named_half(primitive_of(eqn), names):
            return None
        return OperationKind(Kind.HALF, request.source, request.level)

    def request_of(self, name: str, names: Names) -> Request | None:
        """Return the request for a primitive in these scopes, or None."""
        region, levels = region_of(names), self.matcher.levels_of(name, names)
        if region.level is not None:
            return Request(region.level, region.asked_by, region.asked_products)
        of_module = Request("half", "the override of its module") if region.all_half else None
        if not levels:
            return of_module
        key, level = next(iter(levels.items()))
        if region.override is not None and self.modules_before.get(key, math.inf) > region.override:
            return of_module  # the override of the module comes first
        source = f"override {key!r}"
        if isinstance(level, str):
            return Request(level, source)
        if level.compute_dtype == np.float32:
            return Request("float32", source, level.matmul_precision or "")
        return None  # under a half policy the rules decide

    def half_of(self, name: str, names: Names) -> np.dtype | None:
        """Return the half dtype of a primitive in these scopes, or None for float32."""
        request = self.request_of(name, names)
        if request is not None and is_float32(request.level):
            return None
        return region_of(names).half or self.half

    def precision_of(self, eqn: JaxprEqn, names: Names) -> Precision:
        """Return the ``precision`` of a float32 product in these scopes.

        A region or an override sets it. JAX has algorithms for ``dot_general`` only: it would compute other products at
        its default precision, so they get the highest precision instead.
        """
        precision = self._requested_precision(eqn, names)
        is_algorithm = isinstance(precision, jax.lax.DotAlgorithmPreset)
        return HIGHEST if is_algorithm and eqn.primitive.name != "dot_general" else precision

    def _requested_precision(self, eqn: JaxprEqn, names: Names) -> Precision:
        traced, region = eqn.params["precision"], region_of(names)
        if region.asked_by == OF_POLICY:  # the code of a module is traced in the precision of its policy
            return traced
        default = precision_named(region.products) if region.products else None
        by_author = None if traced == default else traced
        request = self.request_of(eqn.primitive.name, names)
        if request is not None and request.level == "tensorfloat32":
            return by_author
        if request is not None and request.products:
            return precision_named(request.products) if by_author is None else by_author
        return traced if asks_for_highest(traced) else HIGHEST

    def recipe_of(self, name: str, names: Names) -> Float8 | None:
        """Return the float8 recipe for a product in these scopes, or None."""
        if DECIDED in names:
            return None
        if recipe := region_of(names).recipe:
            return get_recipe(recipe)
        levels = self.matcher.levels_of(name, names).values()
        policies = [level for level in levels if isinstance(level, Policy)]
        return policies[0].float8 if policies else self.float8

    def _is_named_half(self, name: str, names: Names) -> bool:
        """Return whether an override of the primitive itself asks for half.

        Overrides of its path or its class do not count.
        """
        levels = self.matcher.levels_of(name, names)
        return any(key.endswith(f":{name}") and level == "half" for key, level in levels.items())

    def _kind_of_cast(self, eqn: JaxprEqn, names: Names) -> OperationKind:
        old, new = aval_of(eqn.invars[0]).dtype, eqn.params["new_dtype"]
        if old == new or is_widened(names):
            return OperationKind(Kind.CLEAR, "moves data")
        if region_of(names).level == "written":
            return OperationKind(Kind.KEPT, f"a cast to {np.dtype(new).name}, as it is written")
        if old in CASTABLE and new.itemsize == 4:
            return OperationKind(Kind.FULL, "the author casts to float32")
        return OperationKind(Kind.KEPT, f"the author casts to {np.dtype(new).name}")

    def _kind_of_product(self, eqn: JaxprEqn) -> OperationKind:
        operands = [aval_of(atom) for atom in eqn.invars if not jax.numpy.issubdtype(aval_of(atom).dtype, np.integer)]
        if not all(is_castable(aval) for aval in operands) or len(operands) < 2:
            return OperationKind(Kind.KEPT, "a product with an operand that is not floating")
        if asks_for_highest(eqn.params.get("precision")):
            return OperationKind(Kind.FULL, "the author asks for the highest precision")
        if all(is_half(aval.dtype) for aval in operands):
            if is_half(aval_of(eqn.outvars[0]).dtype):
                return OperationKind(Kind.HALF, "product")
            return OperationKind(Kind.KEPT, "the author's dtypes")
        if eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]:
            return OperationKind(Kind.INFER, "an outer product")  # it sums nothing, as in positions times frequencies
        return OperationKind(Kind.HALF, "product")

    def _kind_by_constants(self, name: str, operands: Constants, half: np.dtype | None) -> OperationKind:
        """Return the kind that the magnitudes of an operation's constants require."""
        if half == np.float16 and name == "div" and operands[1] is None:
            return OperationKind(Kind.FULL, "the derivative of a quotient overflows in float16")
        constants = [magnitudes for magnitudes in operands if magnitudes is not None]
        if half is None or not constants:
            return OperationKind(Kind.INFER, "")
        tiny, huge = range_of(half)
        # A bound that becomes infinity still works as a bound.
        if name not in BOUNDS and any(largest > huge for _, largest in constants):
            return OperationKind(Kind.STRICT, f"a constant beyond {half.name}'s largest number")
        if any(0 < smallest < tiny for smallest, _ in constants):
            return OperationKind(Kind.FULL, f"a constant below {half.name}'s smallest normal number")
        return OperationKind(Kind.INFER, "")
