"""Products, lookups and convolutions of gathered weights.

The gradients of the weights are summed in float32. One axis of each activation is split over the devices. A *row* is an
index of this axis. ``gathered_loss.py`` defines weights and taps. *Half* is short for half precision: float16 or
bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.sources import names_of
from jaxmp.base import trees as _tree
from jaxmp.base.dtypes import at_least_float32, is_narrow
from jaxmp.engine.marks import FLOAT32_RESULT, WIDE_SUMS
from jaxmp.policy import float8
from jaxmp.policy.direct_product import cotangent_of_operand
from jaxmp.policy.quantisation import as_float8, dequantised, quantised
from jaxmp.program.binding import bind_equation, params_in_dtype
from jaxmp.program.equations import bodies_of, names_a_dtype, opened
from jaxmp.program.primitives import PRODUCTS
from jaxmp.program.walk import equations, interpreted, jaxprs_in
from jaxmp.sharding.mesh_plan import Plan
from jaxmp.sharding.weights import Use, anywhere

_BFLOAT16 = np.dtype(jnp.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_BY_ROWS = frozenset({("dot_general", 0), ("dot_general", 1), ("gather", 0), ("conv_general_dilated", 1)})


def product_inside(eqn: Any) -> Any:
    """Return the product inside an equation of the level ``"float32_result"``.

    Return any other equation itself.
    """
    bodies = bodies_of(eqn)
    if bodies is not None and bodies.has_rule:
        inner = opened(bodies.jaxprs[0])[0].eqns
        if len(inner) == 1 and _has_float32_result(inner[0]):
            return inner[0]
    return eqn


def _has_float32_result(eqn: Any) -> bool:
    """Return whether an equation has half operands and a float32 result, but half derivatives."""
    return FLOAT32_RESULT in names_of(eqn)


def _differentiated(eqn: Any) -> dict[str, Any]:
    """Return the parameters of an equation in the backward pass."""
    return params_in_dtype(eqn, eqn.invars[0].aval.dtype) if _has_float32_result(eqn) else eqn.params


def goes_by_rows(eqn: Any, position: int, plan: Plan) -> bool:
    """Return whether :func:`product_by_rows` supports a weight at ``position``."""
    return (eqn.primitive.name, position) in _BY_ROWS and _rows_of(eqn, position, plan) is not None


def product_by_rows(eqn: Any, position: int, use: Use, values: Sequence[Any]) -> Any:
    """Return a product or a lookup whose weight gradient is summed by rows.

    In the backward pass, each device sums the weight's gradient over its own rows of the batch.
    """
    operands = [value for n, value in enumerate(values) if n != position]
    return _RowProduct(eqn, position, use).result(operands)


@dataclasses.dataclass(frozen=True)
class _RowProduct:
    """A product or a lookup with a weight as its operand at ``position``.

    In the methods, ``operands`` are the operands other than the weight, and ``half`` is the gathered weight.
    """

    eqn: Any
    position: int
    use: Use

    def result(self, operands: Sequence[Any]) -> Any:
        """Return the result for the other operands."""
        source = self.use.source
        half, tap = source.gathered()
        is_stored = not (source.gathers_again and source.plan.is_split(source.spec))

        @jax.custom_vjp
        def by_rows(tap: Any, weight: Any, param: Any, *arrays: Any) -> Any:
            return self._computed(weight, arrays, self.eqn.params)

        def forward(tap: Any, weight: Any, param: Any, *arrays: Any) -> tuple[Any, Any]:
            return self._computed(weight, arrays, self.eqn.params), (weight if is_stored else param, arrays)

        def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
            stored, arrays = residuals
            weight = stored if is_stored else source.gathered_again(stored)
            of_arrays = self._cotangents_of_operands(weight, arrays, cotangent)
            return self._cotangent_of_tap(cotangent, arrays), None, None, *of_arrays

        by_rows.defvjp(forward, backward)
        return by_rows(tap, half, None if is_stored else source.param, *operands)

    @property
    def _is_lookup(self) -> bool:
        return bool(self.eqn.primitive.name == "gather")

    def _bind(self, weight: Any, operands: Sequence[Any], params: Any) -> Any:
        all_operands = [*operands[: self.position], weight, *operands[self.position :]]
        return bind_equation(self.eqn, all_operands, params)[0]

    def _computed(self, half: Any, operands: Sequence[Any], params: Any) -> Any:
        # A lookup selects rows of the gathered weight, and casts only these rows.
        dtype = half.dtype if self._is_lookup else self.eqn.invars[self.position].aval.dtype
        weight = self.use.cast(self.use.moved(half), dtype)
        result = self._bind(weight, operands, params)
        with jax.named_scope(WIDE_SUMS):
            return result.astype(self.eqn.outvars[0].aval.dtype)

    def _cotangent_of_tap(self, cotangent: Any, operands: Sequence[Any]) -> Any:
        source, plan = self.use.source, self.use.source.plan
        dims = _rows_of(self.eqn, self.position, plan)
        assert dims is not None  # see goes_by_rows
        parts = plan.over_rows(self._cotangent_of_weight, dims, (cotangent, *operands))
        return plan.of_parts(parts, source.spec)

    def _cotangent_of_weight(self, cotangent: Any, *operands: Any) -> Any:
        """Return the cotangent of the weight, summed over the rows of ``operands``."""
        aval, source = self.eqn.invars[self.position].aval, self.use.source
        dtype = source.sum_dtype if self._is_lookup else aval.dtype
        params = anywhere(_differentiated(self.eqn))
        weight_type = jax.ShapeDtypeStruct(aval.shape, dtype)
        pull = jax.linear_transpose(lambda weight: self._bind(weight, operands, params), weight_type)
        if self._is_lookup or _has_float32_result(self.eqn):
            cotangent = cotangent.astype(dtype)
        return self.use.moved_back(_summed_in(source.sum_dtype, lambda part: pull(part)[0], cotangent))

    def _cotangents_of_operands(self, half: Any, operands: Sequence[Any], cotangent: Any) -> list[Any]:
        """Return the other operands' cotangents, None for operands that are not floats."""
        floats = [n for n, value in enumerate(operands) if _tree.is_float_array(value)]

        def of_floats(*values: Any) -> Any:
            filled = dict(zip(floats, values, strict=True))
            all_operands = [filled.get(n, value) for n, value in enumerate(operands)]
            return self._computed(half, all_operands, _differentiated(self.eqn))

        cotangents: list[Any] = [None] * len(operands)
        if floats:
            pulled = jax.vjp(of_floats, *(operands[n] for n in floats))[1](cotangent)
            for n, value in zip(floats, pulled, strict=True):
                cotangents[n] = value
        return cotangents


def float8_row_product(eqn: Any, recipe: Any, values: Sequence[Any]) -> Any | None:
    """Return a float8 product whose weight gradient is summed by rows.

    In the backward pass, each device sums over its own rows in float32. Return None if both operands are weights, or if
    no axis of the other operand can be split over the devices.
    """
    product = next(
        inner for jaxpr in jaxprs_in(eqn) for inner in equations(jaxpr) if inner.primitive.name == "dot_general"
    )
    sides = [side for side in (0, 1) if isinstance(values[3 * side], Use)]
    if len(sides) != 1:
        return None
    side = sides[0]
    source = values[3 * side].source
    dims = _rows_of(product, side, source.plan)
    if dims is None:
        return None
    operands = [
        value.read(atom.aval.dtype) if isinstance(value, Use) else value
        for value, atom in zip(values, eqn.invars, strict=True)
    ]
    operands[3 * side] = jax.lax.stop_gradient(operands[3 * side])
    other, *quantised_other = operands[3 - 3 * side :][:3]
    is_exact = recipe.weight_gradient == "compute"
    of_rows = _float8_gradient(product, side, values[3 * side], recipe)

    @jax.custom_vjp
    def adding(result: Any, tap: Any, *factor: Any) -> Any:
        return result

    def backward(factor: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
        # The other operand's gradient needs the quantised cotangent too. XLA merges the two computations.
        of_result = (cotangent, factor[1]) if is_exact else quantised(cotangent, recipe.gradient)[1:]
        parts = source.plan.over_rows(of_rows, (dims[0], 0, dims[1], 0), (*of_result, *factor))
        return cotangent, source.plan.of_parts(parts, source.spec), None, None

    adding.defvjp(lambda result, tap, *factor: (result, factor), backward)
    factor = jax.lax.stop_gradient((other, quantised_other[1]) if is_exact else tuple(quantised_other))
    return adding(bind_equation(eqn, operands, eqn.params)[0], source.gathered()[1], *factor)


def _float8_gradient(product: Any, side: int, use: Use, recipe: Any) -> Callable[..., Any]:
    """Return a function from rows of a float8 product to the weight's cotangent.

    Args:
      product: the equation of the product.
      side: the position of the weight among the product's operands.
      use: the use of the weight.
      recipe: the float8 recipe.
    """
    is_exact = recipe.weight_gradient == "compute"
    precision = jax.lax.Precision.DEFAULT if is_exact or recipe.accumulate == "fast" else jax.lax.Precision.HIGHEST
    # A direct product of float8 operands has a float32 result.
    params = {**anywhere(product.params), "precision": precision, "preferred_element_type": _BFLOAT16}
    weight = product.invars[side].aval
    is_direct = weight.dtype.name.startswith("float8")
    shape_of_weight = jax.ShapeDtypeStruct(weight.shape, _BFLOAT16)

    def of_rows(cotangent: Any, scale: Any, factor: Any, factor_scale: Any) -> Any:
        if is_exact:
            cotangent, factor = cotangent.astype(_BFLOAT16), factor.astype(_BFLOAT16)
        else:
            of_result = as_float8((None, cotangent, scale), recipe.gradient)
            other = as_float8((None, factor, factor_scale), float8.FORWARD_FORMAT)
            if is_direct:
                numbers = product.params["dimension_numbers"]
                total = cotangent_of_operand(side, shape_of_weight, of_result, other, numbers)
                return use.moved_back(total.astype(use.source.sum_dtype))
            cotangent, factor = dequantised(*of_result), dequantised(*other)

        def multiplied(weight: Any) -> Any:
            factors = (weight, factor) if side == 0 else (factor, weight)
            return bind_equation(product, factors, params)[0]

        pull = jax.linear_transpose(multiplied, shape_of_weight)
        return use.moved_back(_summed_in(use.source.sum_dtype, lambda part: pull(part)[0], cotangent))

    return of_rows


def _rows_of(eqn: Any, position: int, plan: Plan) -> tuple[int, int] | None:
    """Return the batch axis in the result and in the operand that is not the weight.

    The batch axis is the first shared axis of the result and this operand whose size is divisible by the number of
    devices. Return None if there is no such axis.
    """
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.invars[1 - position].aval.shape
    pairs: list[tuple[int, int]] = []
    if name == "dot_general":
        contracting, batch = params["dimension_numbers"]
        bound_dims = [[*contracting[n], *batch[n]] for n in (0, 1)]
        free = [dim for dim in range(len(shape)) if dim not in bound_dims[1 - position]]
        weight = len(eqn.invars[position].aval.shape) - len(bound_dims[position])
        first = len(batch[0]) + (weight if position == 0 else 0)
        pairs = [(first + n, dim) for n, dim in enumerate(free)]
    elif name == "gather" and not params["dimension_numbers"].operand_batching_dims:
        offsets = params["dimension_numbers"].offset_dims
        rows = [dim for dim in range(len(eqn.outvars[0].aval.shape)) if dim not in offsets]
        pairs = [(dim, n) for n, dim in enumerate(rows)]
    elif name == "conv_general_dilated" and params["batch_group_count"] == 1:
        numbers = params["dimension_numbers"]
        pairs = [(numbers.out_spec[0], numbers.lhs_spec[0])]
    pairs = [pair for pair in pairs if shape[pair[1]] % plan.devices == 0]
    return pairs[0] if pairs else None


def _of_matrices(eqn: Any, operands: Sequence[Any], dtype: np.dtype) -> Any:
    """Compute a product over several axes as one matrix product.

    On a CPU, XLA supports half operands with a float32 result only in matrix products.
    """
    matrices, shape = [], list[int]()
    for value, summed in zip(operands, eqn.params["dimension_numbers"][0], strict=True):
        free = [dim for dim in range(value.ndim) if dim not in summed]
        shape += [value.shape[dim] for dim in free]
        matrices.append(value.transpose(*summed, *free).reshape(math.prod(value.shape[dim] for dim in summed), -1))
    params = {**eqn.params, "dimension_numbers": (((0,), (0,)), ((), ())), "preferred_element_type": dtype}
    return bind_equation(eqn, matrices, params)[0].reshape(shape)


def _not_merged(result: Any) -> Any:
    """Return the float32 result of a product of half operands with batch dimensions.

    XLA for CPUs merges the product with a transposition of its result, and fails on the merged product.
    """
    return jax.lax.platform_dependent(result, cpu=jax.lax.optimization_barrier, default=lambda result: result)


def _summed_in(dtype: np.dtype, fun: Callable[..., Any], cotangent: Any, widens_convolutions: bool = False) -> Any:
    """Return ``fun(cotangent)`` in ``dtype``.

    ``fun`` is the transpose of a product of half operands. The matrix products in ``fun`` have results in ``dtype``.
    The convolutions have half results, because cuDNN offers no others. With ``widens_convolutions``, the operands of
    convolutions are cast to ``dtype``, and so the results are also in ``dtype``. (XLA splits a convolution over all
    rows, and sums the parts in the dtype of the result.)
    """
    jaxpr, consts = opened(jax.make_jaxpr(fun)(cotangent))

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "convert_element_type":
            return operands
        if name == "conv_general_dilated" and widens_convolutions:
            operands = [value.astype(dtype) for value in operands]
        elif name != "dot_general":
            return bind_equation(eqn, operands, eqn.params)
        elif len((dims := eqn.params["dimension_numbers"])[0][0]) > 1 and not dims[1][0]:
            return [_of_matrices(eqn, operands, dtype)]
        result = bind_equation(eqn, operands, {**eqn.params, "preferred_element_type": dtype})[0]
        return [_not_merged(result) if eqn.params["dimension_numbers"][1][0] else result]

    # Not a `Rewriter`: the jaxpr is traced here and has no bodies, so the current scopes are already its own.
    return interpreted(jaxpr, consts, [cotangent], equation)[0].astype(dtype)


def may_be_wide(eqn: Any) -> bool:
    """Return whether an equation has a half operand and may be computed in float32."""
    has_half = any(is_narrow(getattr(atom.aval, "dtype", np.int32)) for atom in eqn.invars)
    return has_half and not names_a_dtype(eqn)


def computed_wide(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the float32 results of an equation of half operands.

    In the forward pass, a product is computed in half, and its result is cast to float32. In the backward pass, the
    products that compute the cotangents have float32 results.
    """
    avals, name = [atom.aval for atom in eqn.invars], eqn.primitive.name
    dtypes = [at_least_float32(aval.dtype) for aval in avals]
    with jax.named_scope(WIDE_SUMS):
        operands = [jnp.asarray(value, dtype) for value, dtype in zip(operands, dtypes, strict=True)]
    if name not in PRODUCTS:
        return bind_equation(eqn, operands, params_in_dtype(eqn, _FLOAT32))

    @jax.custom_vjp
    def product(*arrays: Any) -> Any:
        result = bind_equation(eqn, narrowed(arrays), eqn.params)[0]
        with jax.named_scope(WIDE_SUMS):
            return result.astype(dtypes[0])

    def narrowed(arrays: Sequence[Any]) -> list[Any]:
        return [value.astype(aval.dtype) for value, aval in zip(arrays, avals, strict=True)]

    def forward(*arrays: Any) -> tuple[Any, Any]:
        return product(*arrays), narrowed(arrays)

    def backward(halves: list[Any], cotangent: Any) -> tuple[Any, ...]:
        params = anywhere(_differentiated(eqn))
        like = eqn.invars[0] if _has_float32_result(eqn) else eqn.outvars[0]
        half_cotangent = cotangent.astype(like.aval.dtype)

        def of_operand(n: int) -> Any:
            def computed(value: Any) -> Any:
                return bind_equation(eqn, [*halves[:n], value, *halves[n + 1 :]], params)[0]

            pull = jax.linear_transpose(computed, avals[n])
            return _summed_in(dtypes[n], lambda part: pull(part)[0], half_cotangent, widens_convolutions=True)

        return tuple(map(of_operand, range(len(halves))))

    product.defvjp(forward, backward)
    return [product(*operands)]
