"""What is wrong with the precision of a program: one function for each kind of finding."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmp import tables
from jaxmp._jaxpr import reading
from jaxmp._jaxpr.walk import PRODUCTS
from jaxmp.engine.marks import DECIDED, region_of
from jaxmp.inspect.program import Place
from jaxmp.inspect.values import JOIN, TURN, TURNS, Value, Values, constant, leading_to, made_of, origins
from jaxmp.sharding import Collective


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong with the precision of a program.

    Attributes:
      kind: one of ``KINDS``.
      path: the modules and scopes, ``/`` between; of params and the like their names.
      source: the user's file and line; empty where JAX knows none.
      what: what is wrong, a sentence.
      remedy: what to do, a sentence.
    """

    kind: str
    path: str
    source: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.path or '(no scope)'} ({self.source or 'no line known'}): {self.what}; {self.remedy}"
        )


@dataclasses.dataclass(frozen=True)
class Sent:
    """What devices send each other.

    Attributes:
      row: the operations.
      weights: bytes of the arrays that have the size of an argument other than the batch, or of one layer of it.
      others: bytes of the rest.
      split: of ``weights``, bytes of those that are split over axes that the operations go over.
    """

    row: Collective
    weights: int
    others: int
    split: int


@dataclasses.dataclass(frozen=True)
class Argument:
    """What an argument of the program is: ``"params"``, ``"optimizer"`` or ``"statistics"``, and its name."""

    role: str
    path: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Audited:
    """What findings are read from.

    Attributes:
      values: of the program.
      products: each product's value, and what the audit says of it.
      arguments: what each argument is, None where nothing tells.
      kinds: of each argument its kind as :func:`jaxmp.inspect.memory` has it; None where nothing tells.
      weights: which operands of a product may be its weight, see :func:`weights_in`.
      policy: what the author declares; None for nothing.
      has_loss_scale: None where no loss scale is among the arguments.
      repeated: the casts in loops of the compiled program; None where there is none.
      on_cpu: whether it was compiled for one.
      sent: over the axes that the batch is split over; nothing where nothing was compiled.
    """

    values: Values
    products: list[tuple[Value, Any]]
    arguments: list[Argument | None]
    kinds: Sequence[str | None]
    weights: Callable[[Value], list[int]]
    policy: Any
    has_loss_scale: bool | None
    repeated: Callable[[Value], bool] | None
    on_cpu: bool
    sent: Sequence[Sent]


_EXACT = {"float16": 2**11, "bfloat16": 2**8}
_EXPONENTIAL = frozenset({"exp", "exp2", "expm1", "log", "log1p", "log2", "pow", "cumlogsumexp"})
_SCATTERS = frozenset({"scatter-add", "scatter-sub"})
_ASKED = frozenset({"float32", "tensorfloat32"})
_SCALING = frozenset({"mul", "div", "neg", "convert_element_type", "copy", "reduce_precision", "broadcast_in_dim"})
_SCALING |= {"reshape", "transpose", "squeeze"}
_OF_VARIANCE = frozenset({"add", "sub", "mul", "div", "max", "min", "convert_element_type", "abs", "neg"})


def findings(audited: Audited) -> tuple[Finding, ...]:
    """All findings, in program order within each kind; of several alike at one place the first."""
    found: dict[tuple[str, str, str], Finding] = {}
    paths: dict[str, str] = {}
    for place in audited.values.places.values():
        if place.path:
            paths.setdefault(place.source, place.path)
    for kind, find in KINDS.items():
        for at, what, remedy in find(audited):
            path, source = (at.path, at.source) if isinstance(at, Place) else at
            if isinstance(at, Place) and not path and source:  # JAX moved it out of a loop, and out of its scopes
                path = paths.get(source, "")
            found.setdefault((kind, path, source), Finding(kind, path, source, what, remedy))
    return tuple(found.values())


Found = Iterable[tuple[Place | tuple[str, str], str, str]]


def _float32_products(audited: Audited) -> Found:
    mixed = {(place.path, place.source) for place, *_ in _mixed_products(audited) if isinstance(place, Place)}
    for value, product in audited.products:
        place = value.at
        if set(product.operands) != {"float32"} or product.phase == "update" or _asks(audited, place):
            continue
        if product.phase == "backward" and (place.path, place.source) in mixed:  # the derivative of a mixed product
            continue
        half = _half_of(audited.policy, place)
        if half is None or (value.name == "dot_general" and not place.eqn.params["dimension_numbers"][0][0]):
            continue
        cast = [each.dtype.name for operand in value.inputs[:2] if (each := _before_cast(operand)).is_half]
        how = f" of which JAX promoted {len(cast)} from {cast[0]}" if cast else ""
        yield (
            place,
            f"a product of float32 operands{how}, where the policy asks for {half}",
            f"cast both operands to {half}, or declare it: an override of this path, jaxmp.precision('float32') or "
            "precision='highest'",
        )


def _mixed_products(audited: Audited) -> Found:
    for value, product in audited.products:
        dtypes = [np.dtype(name) for name in product.operands]
        if (
            len({*dtypes}) > 1
            and all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
            and max(d.itemsize for d in dtypes) > 1
        ):  # float8 has one format for values and one for gradients
            yield (
                value.at,
                f"a product of {' and '.join(product.operands)}: it runs in the wider one",
                f"cast both operands to {min(dtypes, key=lambda d: d.itemsize).name}",
            )


def _unaligned_products(audited: Audited) -> Found:
    total = sum(work(product) for _, product in audited.products)
    for value, product in audited.products:
        size = min(np.dtype(name).itemsize for name in product.operands)
        dims = unaligned(value, audited.weights(value))
        if product.phase != "backward" and size <= 2 and dims and work(product) > 0.01 * total:
            step = 16 // size
            names = " and ".join(f"{name} {number}" for name, number in dims.items())
            yield (
                value.at,
                f"{names}: no multiple of {step}, as tensor cores want of {product.operands[0]}",
                f"pad to a multiple of {step} (jaxmp.hardware.align_dim)",
            )


def _half_sums(audited: Audited) -> Found:
    for value in audited.values.all:
        if value.is_half and value.place and (terms := _terms(value)) > _EXACT[value.dtype.name]:
            yield (
                value.place,
                f"{value.name} of {terms:,} terms in {value.dtype.name}, which counts to {_EXACT[value.dtype.name]:,}",
                "sum in float32: cast before, or pass dtype=jnp.float32",
            )


def _half_exponentials(audited: Audited) -> Found:
    errors = {
        (each.place.path, each.place.source)
        for each in audited.values.all
        if each.place and each.name in ("erf", "erfc")
    }
    for value in audited.values.all:
        place = value.place
        if place is None:
            continue
        if value.name in _EXPONENTIAL and value.is_half:
            if value.name == "exp" and (place.path, place.source) in errors and _is_bell(value):
                continue  # the derivative of erf
            what = f"{value.name} in {value.dtype.name}"
            yield place, f"{what}, which loses the range or the digits that it needs", "cast to float32 before it"
        elif value.name in ("rsqrt", "sqrt") and place.phase != "backward":
            half = next((part for part in _variance(value) if part.is_half), None)
            if half is not None:
                yield (
                    half.at,
                    f"the variance under a {value.name} is computed in {half.dtype.name}",
                    "compute the statistics of a norm in float32",
                )


def _half_losses(audited: Audited) -> Found:
    remedy = "compute the loss in float32: cast the model's results before it"
    scalars = [value for value in audited.values.results if value.is_float and not value.shape]
    if len(scalars) == 1 and scalars[0].is_half:
        value = scalars[0]
        yield _where(value), f"the only scalar among the results is {value.dtype.name}", remedy
    scalar_seeds = (seed for seed in _seeds(audited) if not any(each.shape for each in seed.inputs))
    differentiated = {(seed.at.path, seed.at.source) for seed in scalar_seeds}
    for value in audited.values.all:
        place = value.place
        if place is None or not value.is_half or place.phase != "forward":
            continue
        transforms = reading.scopes_and_transforms(place.eqn)[1]
        if "jvp" not in transforms or (place.path, place.source) not in differentiated:
            continue
        if value.shape and not (len(value.shape) <= transforms.count("vmap") and _is_reduced(value)):
            continue  # nor a scalar of each example
        yield place, f"the scalar that is differentiated is {value.dtype.name}", remedy


def _is_reduced(value: Value) -> bool:
    """Whether an array is made, element by element, of what was reduced to its shape."""
    same = origins(value, lambda each: bool(each.inputs) and {one.shape for one in each.inputs} <= {value.shape, ()})
    return any(len(one.shape) > len(value.shape) for each in same for one in each.inputs)


def _round_trips(audited: Audited) -> Found:
    written = {
        (each.at.path, each.at.source, each.inputs[0].dtype, each.dtype)
        for each in audited.values.all
        if each.is_cast and each.at.phase != "backward"
    }

    def is_derived(cast: Value) -> bool:
        place = cast.at
        return place.phase == "backward" and (place.path, place.source, cast.dtype, cast.inputs[0].dtype) in written

    for value in audited.values.all:
        if not (value.is_half and value.is_cast and value.inputs[0].is_float and not value.inputs[0].is_half):
            continue
        place, before = value.at, list(origins(value.inputs[0], lambda each: each.is_move or each.name == JOIN))
        wide = [each for each in before if constant(each) is None]
        if not wide or not all(each.is_cast and each.inputs[0].dtype == value.dtype for each in wide):
            continue
        # Derivatives of casts have nothing between them where a bias was added, or an axis summed, in float32.
        if all(map(is_derived, (value, *wide))):
            continue
        if DECIDED in place.names and all(each is value.inputs[0] and each.at.path != place.path for each in wide):
            continue  # two modules that the engine ran, each with its own cast: XLA makes neither
        yield (
            place,
            f"{value.dtype.name} → {value.inputs[0].dtype.name} → {value.dtype.name} with nothing between that needs "
            f"{value.inputs[0].dtype.name}",
            "leave both casts out",
        )


def _casts_in_loops(audited: Audited) -> Found:
    if audited.repeated is None:
        return
    for value in audited.values.all:
        if not (value.is_cast and value.loops and value.shape and value.is_float and value.inputs[0].is_float):
            continue
        if value.dtype != value.inputs[0].dtype and _is_invariant(value) and audited.repeated(value):
            yield (
                value.at,
                f"the same {value.inputs[0].dtype.name} array is cast to {value.dtype.name} in every turn of a loop",
                "cast it once, before the loop",
            )


def _vanishing_constants(audited: Audited) -> Found:
    yield from _lost_constants(
        audited,
        lambda numbers, rounded: bool(np.any(numbers != 0)) and bool(np.all(rounded == 0)),
        lambda value: value == 0,
        "0",
        "use a larger constant, or compute this in float32",
    )


def _overflowing_constants(audited: Audited) -> Found:
    yield from _lost_constants(
        audited,
        lambda numbers, rounded: bool(np.any(np.isfinite(numbers) & np.isinf(rounded))),
        np.isinf,
        "infinite",
        "use jnp.finfo(x.dtype).min or .max, or compute this in float32",
    )


def _inexact_integers(audited: Audited) -> Found:
    ranges: dict[Value, _Range | None] = {}
    for value in audited.values.all:
        if not value.is_half or not (value.is_cast or value.name == "iota"):
            continue
        of = value if value.name == "iota" else value.inputs[0]
        if of.is_half and of is not value:
            continue
        numbers, dtype = constant(of), value.dtype
        ends = _range_of_integers(of, ranges)
        largest = max(map(abs, ends or (0.0,)))
        if largest <= _EXACT[dtype.name]:
            continue
        if numbers is not None:
            rounded = _rounded(numbers, dtype)
            are_counts = jnp.issubdtype(of.dtype, jnp.integer) or len(np.unique(rounded)) < len(np.unique(numbers))
            if not are_counts or np.array_equal(rounded, numbers):
                continue
        yield (
            value.at,
            f"integers up to {largest:,.0f} in {dtype.name}, which is exact up to {_EXACT[dtype.name]:,}",
            "compute with them in float32 or as integers, and cast the result",
        )


def _half_arguments(role: str, expected: Callable[[Any, Argument], np.dtype | None], whose: str) -> Any:
    def find(audited: Audited) -> Found:
        for value, argument in zip(audited.values.arguments, audited.arguments, strict=True):
            if argument is None or argument.role != role or not value.is_float or value.dtype.itemsize == 1:
                continue
            dtype = expected(audited.policy, argument)
            if dtype is not None and value.dtype != dtype:
                yield (
                    ("/".join(argument.path), value.reader.source if value.reader else ""),
                    f"{value.dtype.name} where {whose} {dtype.name}",
                    f"keep it in {dtype.name}",
                )

    return find


def _param_dtype(policy: Any, argument: Argument) -> np.dtype | None:
    if policy is None:
        return None
    return _resolved(policy, argument.path[:-1])[0].param_dtype if hasattr(policy, "resolve") else policy.param_dtype


def _float32(policy: Any, argument: Argument) -> np.dtype:
    return np.dtype(np.float32)


def _unscaled_float16(audited: Audited) -> Found:
    backward = [value for value, product in audited.products if product.phase == "backward"
                and "float16" in product.operands]  # fmt: skip
    if not backward:
        return
    if audited.has_loss_scale is None:
        seeds = set(_seeds(audited))
        scales = {seed for seed in seeds if _is_scale(seed, audited)}
        made = made_of(audited.values, lambda each: (each in seeds) + 2 * (each in scales))
        backward = [value for value in backward if made[value] == 1]  # of a cotangent, and of no scale
    elif audited.has_loss_scale:
        return
    if backward:
        yield (
            backward[0].at,
            f"{len(backward)} products of the backward pass in float16 and no loss scale: small gradients become 0",
            "scale the loss: jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()) with jaxmp.scaled_value_and_grad, or use "
            "bfloat16",
        )


def _float64(audited: Audited) -> Found:
    if not _has_half_products(audited):
        return
    entered = set[str]()
    for value in audited.values.all:
        is_strong = value.dtype == np.float64 and not getattr(value.aval, "weak_type", False)
        if is_strong and not any(each.dtype == np.float64 and each.name != "constant" for each in value.inputs):
            phase = value.place.phase if value.place else "forward"
            if phase == "backward" and "forward" in entered:  # the derivative of a cast back
                continue
            entered.add(phase)
            yield (
                _where(value),
                "float64 in a program with half products",
                "use float32: no strong float64 (np.float64, astype) should meet arrays of the program",
            )


def _compiled_otherwise(audited: Audited) -> Found:
    for value, product in audited.products:
        written = max(np.dtype(name).itemsize for name in product.operands)
        if audited.on_cpu or product.ran is None or written > 2 or np.dtype(product.ran).itemsize <= written:
            continue
        yield (
            value.at,
            f"written in {product.operands[0]} and compiled to {product.ran}",
            "look at what the device's library has no kernel for (alignment, dtypes of operands and result, layout)",
        )


def _has_half_products(audited: Audited) -> bool:
    return any(value.is_half for product, _ in audited.products for value in product.inputs)


def _sent(kind: str, dtype: str | None, size: Callable[[Sent], int], what: str, remedy: str) -> Callable[..., Found]:
    """A finding of each collective of a kind, and dtype if one is given, whose ``size`` is more than 1 MB.

    None on a CPU, which sends half as float32 and sums what others scatter.
    """

    def find(audited: Audited) -> Found:
        for each in audited.sent if not audited.on_cpu else ():
            row, is_meant = each.row, dtype is None or (_has_half_products(audited) and each.row.dtype == dtype)
            if row.kind == kind and is_meant and size(each) > 1e6:
                times = f"{row.count} time{'s' * (row.count > 1)} a call"
                amount = f"{tables.short(size(each))}B of {row.dtype} over {row.axis}"
                yield (row.path, row.source), f"{what}: {amount}, {times}", remedy

    return find


KINDS: dict[str, Callable[[Audited], Found]] = {
    "float32-product": _float32_products,
    "mixed-product": _mixed_products,
    "unaligned-product": _unaligned_products,
    "half-sum": _half_sums,
    "half-exponential": _half_exponentials,
    "half-loss": _half_losses,
    "round-trip": _round_trips,
    "cast-in-loop": _casts_in_loops,
    "vanishing-constant": _vanishing_constants,
    "overflowing-constant": _overflowing_constants,
    "inexact-integers": _inexact_integers,
    "half-params": _half_arguments("params", _param_dtype, "the policy keeps params in"),
    "half-optimizer-state": _half_arguments("optimizer", _float32, "optimizer state is kept in"),
    "half-statistics": _half_arguments("statistics", _float32, "statistics are kept in"),
    "unscaled-float16": _unscaled_float16,
    "float64": _float64,
    "compiled-otherwise": _compiled_otherwise,
    "float32-gather": _sent(
        "all-gather",
        "float32",
        lambda sent: sent.weights,
        "weights are gathered in float32 in a program with half products",
        "gather them with jaxmp.sharding.gather, which casts them first",
    ),
    "activation-gather": _sent(
        "all-gather",
        None,
        lambda sent: sent.others,
        "activations are gathered, not the weights that they meet",
        "gather the weights (jaxmp.sharding.gather), and keep activations split along the batch, on axes of type Auto "
        "by jax.lax.with_sharding_constraint",
    ),
    "gradient-all-reduce": _sent(
        "all-reduce",
        None,
        lambda sent: sent.split,
        "gradients of weights that are split are summed whole on every device",
        "gather the weights with jaxmp.sharding.gather, which reduces and scatters their gradients at once, and "
        "outside of the loop that uses them, if one does",
    ),
}
"""What finds each kind of finding."""


def unaligned(value: Value, weights: Sequence[int]) -> dict[str, int]:
    """The contracted and output-feature dimensions of a product that are no multiple of 16 bytes, by what they are.

    The batch is none of them: output features are those of the operand that is the weight, and where either of two may
    be (``weights``), those that are a multiple. A dimension of 1 is none either: that is no matrix product; nor are the
    few channels of a stem.
    """
    eqn, (left, right) = value.at.eqn, value.inputs[:2]
    step = max(16 // min(each.dtype.itemsize for each in (left, right)), 1)
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        if eqn.params["batch_group_count"] > 1:  # the derivative of a grouped one
            return {}
        found = {"channels in": left.shape[numbers.lhs_spec[1]], "channels out": right.shape[numbers.rhs_spec[0]]}
        if found["channels in"] <= 4:
            del found["channels in"]
    elif eqn.primitive.name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        kept = [
            [size for axis, size in enumerate(value.inputs[n].shape) if axis not in (*contracted[n], *batch[n])]
            for n in weights
        ]
        found = {
            "contracted dimension": math.prod(left.shape[axis] for axis in contracted[0]),
            "output features": min(map(math.prod, kept), key=lambda size: size % step),
        }
    else:
        (_, contracted), (_, batch) = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        known_axes = {*contracted, *batch, *eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions}
        found = {
            "contracted dimension": math.prod(right.shape[axis] for axis in contracted),
            "output features": math.prod(size for n, size in enumerate(right.shape) if n not in known_axes),
        }
    return {name: size for name, size in found.items() if size % step and size > 1}


_WEIGHT, _DATA, _UNTOLD, _PRODUCT = 1, 2, 4, 8


def weights_in(values: Values, kinds: Sequence[str | None]) -> Callable[[Value], list[int]]:
    """Tells which operands of a product may be its weight, 0 and 1 for left and right: one, or both where none tells.

    Args:
      values: of the program.
      kinds: as in :class:`Audited`.
    """

    def mark(value: Value) -> int:
        if value.name != "argument" or not value.shape or value.dtype == "V":  # a scalar or a random key is neither
            return _PRODUCT if value.name in PRODUCTS else 0
        kind = kinds[value.position]
        return _UNTOLD if kind is None else _WEIGHT if kind in ("params", "optimizer", "model_state") else _DATA

    made = made_of(values, mark)

    def side(value: Value) -> list[int]:
        found = [made.get(each, 0) for each in value.inputs[:2]]
        ranks = [2 if bits & _DATA else 0 if bits & _WEIGHT else 1 for bits in found]
        if ranks[0] != ranks[1]:
            return [int(ranks[1] < ranks[0])]
        are_plain = all(map(_is_plain, value.inputs[:2]))
        is_constant_first = found[1] & _UNTOLD > found[0] & _UNTOLD  # a weight with data, or data with params
        if ranks[0] != 1 or (are_plain and not is_constant_first):
            return [1]
        are_products = [bool(bits & _PRODUCT) for bits in found]
        if are_products[0] != are_products[1]:
            return [int(are_products[0])]
        return [1] if are_products[0] else [0, 1]

    return side


def _is_plain(value: Value) -> bool:
    """Whether a value is an argument or a constant, cast or moved maybe."""
    found = origins(value, lambda each: each.is_move or each.is_cast or each.name == JOIN)
    return all(each.name in ("argument", "constant") for each in found)


def _where(value: Value) -> Place | tuple[str, str]:
    """Where a value is computed; of a loop's or branch's result within it."""
    seen = {value}
    while value.name in (JOIN, TURN, TURNS) and value.inputs[-1] not in seen:
        value = value.inputs[-1]
        seen.add(value)
    return value.place or ("", value.reader.source if value.reader else "")


def work(product: Any) -> int:
    """The FLOPs of all times that a product runs; of one where only the run tells."""
    return int(product.flops * (product.count or 1))


def _before_cast(value: Value) -> Value:
    while (value.is_move or value.is_cast) and len(value.inputs) == 1:
        value = value.inputs[0]
        if value.is_half:
            break
    return value


def _asks(audited: Audited, place: Place) -> bool:
    """Whether somebody asked for a float32 product."""
    precision = place.eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    is_default = all(part is None or str(part).rpartition(".")[2] == "DEFAULT" for part in parts)
    return not is_default or region_of(place.names).level in _ASKED


def _half_of(policy: Any, place: Place) -> str | None:
    """The half dtype that the policy asks for at a place; None where it asks for none."""
    region = region_of(place.names)
    if policy is None:
        return region.half.name if region.half is not None else None
    policies = _resolved(policy, tuple(place.path.split("/"))) if hasattr(policy, "resolve") else [policy]
    dtypes = {each.compute_dtype for each in policies}
    half = next((dtype.name for dtype in dtypes if dtype.itemsize == 2), None)
    return None if np.dtype(np.float32) in dtypes else half


def _resolved(policies: Any, path: tuple[str, ...]) -> list[Any]:
    """The policies of a path whose first names may be scopes around the model: those of overrides, or the default."""
    found = [policies.resolve(path[start:]) for start in range(len(path) + 1)]
    return [policy for policy, pattern in found if pattern is not None] or [policies.root]


def _terms(value: Value) -> int:
    """How many terms each element of a sum has; 0 of what is none."""
    params, name = value.at.eqn.params, value.name
    if name in ("reduce", "reduce_window"):
        body = reading.opened(params["jaxpr"])[0]
        if {eqn.primitive.name for eqn in body.eqns} != {"add"}:
            return 0
    if name in ("reduce_sum", "reduce"):
        return math.prod(value.inputs[0].shape[axis] for axis in params.get("axes", params.get("dimensions")))
    if name == "cumsum":
        return int(value.inputs[0].shape[params["axis"]])
    if name in ("reduce_window_sum", "reduce_window"):
        return math.prod(params["window_dimensions"])
    if name in _SCATTERS and not params["unique_indices"]:
        batching = getattr(params["dimension_numbers"], "scatter_indices_batching_dims", ())
        indices = value.inputs[1].shape[:-1]
        return math.prod(size for axis, size in enumerate(indices) if axis not in batching)
    return 0


def _is_bell(value: Value) -> bool:
    """Whether an exponential is that of minus a square."""
    negated = value.inputs[0]
    return negated.name == "neg" and _is_square(negated.inputs[0])


def _is_square(value: Value) -> bool:
    is_power = value.name == "integer_pow" and value.at.eqn.params["y"] == 2
    return value.name == "square" or is_power or (value.name == "mul" and value.inputs[0] is value.inputs[1])


def _variance(value: Value) -> list[Value]:
    """If a root is that of a variance: the squares, their sum, what is between it and the root, and the root."""
    around = list[Value]()

    def goes_on(each: Value) -> bool:
        is_between = each.is_move or each.name in _OF_VARIANCE
        around.extend([each] if is_between and each.place else [])
        return is_between

    for total in origins(value.inputs[0], goes_on):
        between = [*sorted(around, key=lambda each: each.at.key), value]
        if _is_dot_of_itself(total):
            return [total, *between]
        if total.place and _terms(total):
            for square in origins(total.inputs[0], lambda each: each.is_move or each.is_cast):
                if _is_square(square):
                    return [square, total, *between]
    return []


def _is_dot_of_itself(value: Value) -> bool:
    """Whether a value is a sum of squares as a product writes it: the same on both sides, each number with itself."""
    if value.name != "dot_general":
        return False
    (left, right), (batch, _) = value.at.eqn.params["dimension_numbers"]
    is_whole = left == right and len(left) + len(batch) == len(value.inputs[0].shape)
    return is_whole and set(origins(value.inputs[0])) == set(origins(value.inputs[1]))


def _seeds(audited: Audited) -> list[Value]:
    """The cotangents that are a factor times the one that differentiation begins with."""
    found: dict[Value, None] = {}
    for value in audited.values.all:
        if value.place is None or value.place.phase != "backward" or value.name not in _SCALING:
            continue
        floats = [each for each in value.inputs if each.is_float]
        is_first = all(not each.shape for each in floats) and any(_is_one(each) for each in floats)
        if is_first or any(each in found for each in floats):
            found[value] = None
    return list(found)


def _is_one(value: Value) -> bool:
    const = constant(value)
    return const is not None and const.shape == () and abs(float(const)) == 1


def _is_scale(value: Value, audited: Audited) -> bool:
    """Whether a cotangent that is one number is multiplied by a loss scale.

    That is a constant power of two of at least 8, or computed from arguments of one number each that are no params.
    """
    floats = [each for each in value.inputs if each.is_float]
    if value.name not in ("mul", "div") or any(math.prod(each.shape) != 1 for each in floats):
        return False
    for each in floats[value.name == "div" :]:
        const = constant(each)
        if const is not None:
            factor = abs(float(const.reshape(())))
            factor = 1 / factor if value.name == "div" and factor else factor
            if factor >= 8 and math.frexp(factor)[0] == 0.5:
                return True
        elif value.name == "mul":
            given = [one for one in leading_to([each]) if one.name == "argument"]
            if given and all(math.prod(one.shape) == 1 and audited.kinds[one.position] != "params" for one in given):
                return True
    return False


def _is_invariant(value: Value) -> bool:
    """Whether a value in a loop is made of what comes from outside of it."""
    loop = value.loops[-1]

    def goes_on(each: Value) -> bool:
        return each.is_move and each.name not in (TURN, JOIN) and loop in each.loops

    return all(loop not in each.loops and constant(each) is None for each in origins(value.inputs[0], goes_on))


def _lost_constants(
    audited: Audited, is_lost: Callable[[Any, Any], bool], suspicious: Callable[[Any], Any], what: str, remedy: str
) -> Found:
    for value in audited.values.all:
        if value.is_half and value.is_cast and not value.inputs[0].is_half:
            numbers = constant(value.inputs[0])
            if numbers is not None and numbers.size and jnp.issubdtype(numbers.dtype, jnp.number):
                numbers = numbers.astype(np.float64)
                if is_lost(numbers, _rounded(numbers, value.dtype)):
                    worst = numbers.flat[np.argmax(np.abs(numbers))]
                    yield value.at, f"the constant {worst:g} is {what} in {value.dtype.name}", remedy
        if value.place is None or not any(each.is_float for each in value.inputs):
            continue
        for operand in value.inputs:
            if operand.name != "constant" or not operand.is_half or operand.const is None or operand.const.size != 1:
                continue
            if not suspicious(float(operand.const.reshape(()))):
                continue
            for number in _numbers_in(reading.user_code_of(value.place.eqn)):
                array = np.float64(number)
                if np.isfinite(array) and is_lost(array, _rounded(array, operand.dtype)):
                    yield value.place, f"the constant {number:g} is {what} in {operand.dtype.name}", remedy
                    break


def _rounded(numbers: Any, dtype: np.dtype) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(numbers).astype(np.float32).astype(dtype).astype(np.float64)


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Pow: operator.pow, ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")


def _numbers_in(code: str) -> Iterator[float]:
    """The numbers that are written in an expression, powers and quotients of numbers computed."""
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:  # a part of a statement
        yield from (float(number) for number in _NUMBER.findall(code))
        return
    for node in ast.walk(tree):
        if (number := _number(node)) is not None:
            yield number


def _number(node: ast.AST) -> float | None:
    parts: tuple[ast.AST, ...]
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=op, operand=operand):
            parts = (operand,)
        case ast.BinOp(left=left, op=op, right=right):
            parts = (left, right)
        case _:
            return None
    try:
        return float(_OPERATORS[type(op)](*map(_number, parts)))
    except (ArithmeticError, KeyError, TypeError):  # another operator, or of what is no number, or a complex result
        return None


_Range = tuple[float, float]


def _range_of_integers(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    """The smallest and largest of what is an array of known integers, or computed from such; None of all else."""
    if value not in known:
        known[value] = None  # a loop's carry
        known[value] = _find_range(value, known)
    return known[value]


def _find_range(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    if value.name == "iota":
        return 0.0, float(value.shape[value.at.eqn.params["dimension"]] - 1)
    if value.const is not None:
        is_number = jnp.issubdtype(value.dtype, jnp.number) and value.const.size > 1
        if not is_number or jnp.issubdtype(value.dtype, jnp.complexfloating):
            return None
        numbers = value.const.astype(np.float64)
        is_integer = bool(np.all(np.isfinite(numbers)) and np.all(numbers == np.round(numbers)))
        return (float(np.min(numbers)), float(np.max(numbers))) if is_integer else None
    is_arithmetic = value.name in ("add", "sub", "mul")
    if not (value.is_move or value.is_cast or is_arithmetic) or value.is_half or value.dtype == np.bool_:
        return None
    inputs = value.inputs[1:] if value.name == "select_n" else value.inputs
    if value.name in ("gather", "dynamic_slice", "slice"):
        inputs = inputs[:1]
    found = [_scalar_or_range(each, known) for each in inputs]
    scalars = [(const := constant(each)) is not None and const.size == 1 for each in inputs]
    ranges = [each for each in found if each is not None]
    if len(ranges) < len(found) or all(scalars):
        return None
    if value.name in _OF_RANGES:
        ends = [_OF_RANGES[value.name](*ends) for ends in itertools.product(*ranges)]
        return min(ends), max(ends)
    return min(low for low, _ in ranges), max(high for _, high in ranges)


_OF_RANGES: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": min, "max": max,
    "clamp": lambda low, each, high: min(max(low, each), high),
}  # fmt: skip
"""Operations that are monotone in each operand, so that the ends of their results are those of some ends."""


def _scalar_or_range(value: Value, known: dict[Value, _Range | None]) -> _Range | None:
    const = constant(value)
    if const is not None and const.size == 1:
        number = float(const.reshape(()))
        return (number, number) if number.is_integer() else None
    return _range_of_integers(value, known)
