"""Products, lookups and convolutions of gathered weights, whose gradients are summed in float32."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._internals.jax.bodies import bind_equation, params_in_dtype
from jaxmp._internals.jax.equations import names_a_dtype, opened
from jaxmp._internals.jax.walk import PRODUCTS, equations, interpreted
from jaxmp.base import trees as _tree
from jaxmp.base.dtypes import is_half
from jaxmp.policy import float8_product
from jaxmp.sharding.mesh_plan import Plan, sum_dtype
from jaxmp.sharding.weights import Use, anywhere

_FLOAT32 = np.dtype(np.float32)
_BY_ROWS = frozenset({("dot_general", 0), ("dot_general", 1), ("gather", 0), ("conv_general_dilated", 1)})


def goes_by_rows(eqn: Any, position: int) -> bool:
    """Return whether :func:`product_by_rows` takes an equation with a weight at this position."""
    return (eqn.primitive.name, position) in _BY_ROWS


def product_by_rows(eqn: Any, position: int, use: Use, values: Sequence[Any]) -> Any:
    """Return a product or a lookup; each device sums the gradient of the weight over its own rows."""
    others = [value for n, value in enumerate(values) if n != position]
    return _RowProduct(eqn, position, use).result(others)


@dataclasses.dataclass(frozen=True)
class _RowProduct:
    """A product or a lookup of one weight, whose operand at ``position`` is the weight."""

    eqn: Any
    position: int
    use: Use

    def result(self, others: Sequence[Any]) -> Any:
        """Return the result for the other operands."""
        source, plan = self.use.source, self.use.source.plan
        dims = _rows_of(self.eqn, self.position, plan)
        half, tap = source.gathered()
        keeps = not (source.gathers_again and plan.is_split(source.spec))

        @jax.custom_vjp
        def by_rows(target: Any, half: Any, param: Any, *others: Any) -> Any:
            return self._forward(half, others)

        def forward(target: Any, half: Any, param: Any, *others: Any) -> tuple[Any, Any]:
            return self._forward(half, others), (half if keeps else param, others)

        def backward(kept: Any, cotangent: Any) -> tuple[Any, ...]:
            half, others = kept
            half = half if keeps else source.gathered_again(half)
            of_others = self._cotangents_of_others(half, others, cotangent)
            if dims is None:  # one sum over all rows, whoever has them
                of_weight = self._cotangent_of_weight(True, cotangent, *others)
                gradient = plan.put(of_weight, source.spec).astype(source.param.dtype)
            else:
                of_own_rows = functools.partial(self._cotangent_of_weight, False)
                gradient = plan.of_parts(plan.over_rows(of_own_rows, dims, (cotangent, *others)), source.spec)
            return gradient, None, None, *of_others

        by_rows.defvjp(forward, backward)
        return by_rows(source.param if dims is None else tap, half, None if keeps else source.param, *others)

    @property
    def _is_lookup(self) -> bool:
        return bool(self.eqn.primitive.name == "gather")

    def _bound(self, weight: Any, others: Sequence[Any], params: Any) -> Any:
        operands = [*others[: self.position], weight, *others[self.position :]]
        return bind_equation(self.eqn, operands, params)[0]

    def _forward(self, half: Any, others: Sequence[Any]) -> Any:
        dtype = (
            half.dtype if self._is_lookup else self.eqn.invars[self.position].aval.dtype
        )  # rows are looked up in half
        weight = self.use.cast(self.use.moved(half), dtype)
        return self._bound(weight, others, self.eqn.params).astype(self.eqn.outvars[0].aval.dtype)

    def _cotangent_of_weight(self, is_whole: bool, cotangent: Any, *others: Any) -> Any:
        """Return the cotangent of the weight from these rows; ``is_whole`` if they are those of all devices."""
        aval, wide = self.eqn.invars[self.position].aval, self.use.source.wide
        dtype = wide if self._is_lookup else aval.dtype
        params = anywhere(self.eqn.params)
        weight = jax.ShapeDtypeStruct(aval.shape, dtype)
        pull = jax.linear_transpose(lambda weight: self._bound(weight, others, params), weight)
        cotangent = cotangent.astype(dtype) if self._is_lookup else cotangent
        return self.use.moved_back(_in_wide(lambda cotangent: pull(cotangent)[0], cotangent, wide, is_whole))

    def _cotangents_of_others(self, half: Any, others: Sequence[Any], cotangent: Any) -> list[Any]:
        """Return the cotangents of the other operands, None for those that are not floating."""
        floats = [n for n, value in enumerate(others) if _tree.is_float_array(value)]

        def of_floats(*values: Any) -> Any:
            filled = dict(zip(floats, values, strict=True))
            return self._forward(half, [filled.get(n, value) for n, value in enumerate(others)])

        cotangents: list[Any] = [None] * len(others)
        if floats:
            pulled = jax.vjp(of_floats, *(others[n] for n in floats))[1](cotangent)
            for n, value in zip(floats, pulled, strict=True):
                cotangents[n] = value
        return cotangents


def float8_row_product(eqn: Any, recipe: Any, values: Sequence[Any]) -> Any | None:
    """Return a float8 product; each device sums its rows of the gradient in float32.

    None where there are two weights, or nothing that the devices divide.
    """
    product = next(inner for inner in equations(eqn.params["call_jaxpr"]) if inner.primitive.name == "dot_general")
    operands = [
        value.read(atom.aval.dtype) if isinstance(value, Use) else value
        for value, atom in zip(values, eqn.invars, strict=True)
    ]
    sides = [side for side in (0, 1) if isinstance(values[3 * side], Use)]
    if len(sides) != 1:
        return None
    side, use = sides[0], values[3 * sides[0]]
    other, *cast = operands[3 - 3 * side :][:3]
    plan, dims = use.source.plan, _rows_of(product, side, use.source.plan)
    if dims is None:
        return None
    operands[3 * side] = jax.lax.stop_gradient(operands[3 * side])
    is_exact = recipe.weight_gradient == "compute"
    precision = jax.lax.Precision.DEFAULT if is_exact or recipe.accumulate == "fast" else jax.lax.Precision.HIGHEST
    params = {**anywhere(product.params), "precision": precision}

    def of_weight(cotangent: Any, scale: Any, other: Any, other_scale: Any) -> Any:
        if is_exact:
            cotangent, other = cotangent.astype(jnp.bfloat16), other.astype(jnp.bfloat16)
        else:
            cotangent = float8_product.dequantised((None, cotangent, scale), recipe.gradient)
            other = float8_product.dequantised((None, other, other_scale), recipe.forward)
        factors = [other, other]

        def multiplied(weight: Any) -> Any:
            factors[side] = weight
            return bind_equation(product, factors, params)[0]

        pull = jax.linear_transpose(multiplied, jax.ShapeDtypeStruct(product.invars[side].aval.shape, other.dtype))
        return use.moved_back(_in_wide(lambda cotangent: pull(cotangent)[0], cotangent, use.source.wide))

    @jax.custom_vjp
    def adding(result: Any, tap: Any, *kept: Any) -> Any:
        return result

    def backward(kept: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
        # It is quantised for the gradient of the other operand too: XLA does it once.
        of_result = (cotangent, kept[1]) if is_exact else float8_product.quantised(cotangent, recipe.gradient)[1:]
        parts = plan.over_rows(of_weight, (dims[0], 0, dims[1], 0), (*of_result, *kept))
        return cotangent, plan.of_parts(parts, use.source.spec), None, None

    adding.defvjp(lambda result, tap, *kept: (result, kept), backward)
    kept = jax.lax.stop_gradient((other, cast[1]) if is_exact else tuple(cast))
    return adding(bind_equation(eqn, operands, eqn.params)[0], use.source.gathered()[1], *kept)


def _rows_of(eqn: Any, position: int, plan: Plan) -> tuple[int, int] | None:
    """Return the axis of the batch in the result and in the operand that is no weight, or None."""
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
    """Return a product over several axes as one of matrices.

    On a CPU, XLA has no other products of half operands with float32 results.
    """
    matrices, shape = [], list[int]()
    for value, summed in zip(operands, eqn.params["dimension_numbers"][0], strict=True):
        kept = [dim for dim in range(value.ndim) if dim not in summed]
        shape += [value.shape[dim] for dim in kept]
        matrices.append(value.transpose(*summed, *kept).reshape(math.prod(value.shape[dim] for dim in summed), -1))
    params = {**eqn.params, "dimension_numbers": (((0,), (0,)), ((), ())), "preferred_element_type": dtype}
    return bind_equation(eqn, matrices, params)[0].reshape(shape)


def _in_wide(fun: Callable[..., Any], cotangent: Any, dtype: np.dtype, is_whole: bool = False) -> Any:
    """Return ``fun``, the transpose of a product of half operands, with its result in ``dtype``.

    Convolutions have half results, as cuDNN makes no others; those over the rows of all devices (``is_whole``), which
    XLA divides, are computed in ``dtype``.
    """
    jaxpr, consts = opened(jax.make_jaxpr(fun)(cotangent))

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "convert_element_type":
            return operands
        if name == "conv_general_dilated" and is_whole:
            operands = [value.astype(dtype) for value in operands]
        elif name != "dot_general":
            return bind_equation(eqn, operands, eqn.params)
        elif len((dims := eqn.params["dimension_numbers"])[0][0]) > 1 and not dims[1][0]:
            return [_of_matrices(eqn, operands, dtype)]
        return bind_equation(eqn, operands, {**eqn.params, "preferred_element_type": dtype})

    return interpreted(jaxpr, consts, [cotangent], equation)[0].astype(dtype)


def may_be_wide(eqn: Any) -> bool:
    """Return whether :func:`computed_wide` takes an equation with half operands."""
    has_half = any(is_half(getattr(atom.aval, "dtype", np.int32)) for atom in eqn.invars)
    return has_half and not names_a_dtype(eqn)


def computed_wide(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the float32 results of an equation of half operands, whose cotangents are summed in float32.

    A product is computed in half, the products of its derivative have results in float32.
    """
    avals, name = [atom.aval for atom in eqn.invars], eqn.primitive.name
    dtypes = [sum_dtype(aval.dtype) if jnp.issubdtype(aval.dtype, jnp.floating) else aval.dtype for aval in avals]
    operands = [jnp.asarray(value, dtype) for value, dtype in zip(operands, dtypes, strict=True)]
    if name not in PRODUCTS:
        return bind_equation(eqn, operands, params_in_dtype(eqn, _FLOAT32, False))

    @jax.custom_vjp
    def product(*operands: Any) -> Any:
        halves = [value.astype(aval.dtype) for value, aval in zip(operands, avals, strict=True)]
        return bind_equation(eqn, halves, eqn.params)[0].astype(dtypes[0])

    def forward(*operands: Any) -> tuple[Any, Any]:
        return product(*operands), [value.astype(aval.dtype) for value, aval in zip(operands, avals, strict=True)]

    def backward(kept: list[Any], cotangent: Any) -> tuple[Any, ...]:
        def of_operand(n: int) -> Any:
            def computed(value: Any) -> Any:
                return bind_equation(eqn, [*kept[:n], value, *kept[n + 1 :]], anywhere(eqn.params))[0]

            pull = jax.linear_transpose(computed, avals[n])
            half = cotangent.astype(eqn.outvars[0].aval.dtype)
            return _in_wide(lambda cotangent: pull(cotangent)[0], half, dtypes[n], is_whole=True)

        return tuple(map(of_operand, range(len(kept))))

    product.defvjp(forward, backward)
    return [product(*operands)]
