"""What is wrong with the precision of a program: one function for each kind of finding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmp._internals.jax.sources import scopes_and_transforms
from jaxmp.base import tables
from jaxmp.engine.marks import DECIDED
from jaxmp.inspect.program.constants import inexact_integers, overflowing_constants, vanishing_constants
from jaxmp.inspect.program.equations import Place
from jaxmp.inspect.program.evidence import Argument, Audited, Found, Sent
from jaxmp.inspect.program.products import compiled_otherwise, float32_products, mixed_products, unaligned_products
from jaxmp.inspect.program.sums import half_sums, terms
from jaxmp.inspect.program.values import JOIN, TURN, TURNS, Value, constant, leading_to, made_of, origins

_EXPONENTIAL = frozenset({"exp", "exp2", "expm1", "log", "log1p", "log2", "pow", "cumlogsumexp"})
_SCALING = frozenset({"mul", "div", "neg", "convert_element_type", "copy", "reduce_precision", "broadcast_in_dim"})
_SCALING |= {"reshape", "transpose", "squeeze"}
_OF_VARIANCE = frozenset({"add", "sub", "mul", "div", "max", "min", "convert_element_type", "abs", "neg"})


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong with the precision of a program.

    Attributes:
      kind: one of ``FINDERS``.
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


def findings(audited: Audited) -> tuple[Finding, ...]:
    """All findings, in program order within each kind; of several alike at one place the first."""
    found: dict[tuple[str, str, str], Finding] = {}
    paths: dict[str, str] = {}
    for place in audited.values.places.values():
        if place.path:
            paths.setdefault(place.source, place.path)
    for kind, find in FINDERS.items():
        for at, what, remedy in find(audited):
            path, source = (at.path, at.source) if isinstance(at, Place) else at
            if isinstance(at, Place) and not path and source:  # JAX moved it out of a loop, and out of its scopes
                path = paths.get(source, "")
            found.setdefault((kind, path, source), Finding(kind, path, source, what, remedy))
    return tuple(found.values())


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
        if total.place and terms(total):
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
        transforms = scopes_and_transforms(place.eqn)[1]
        if "jvp" not in transforms or (place.path, place.source) not in differentiated:
            continue
        if value.shape and not (len(value.shape) <= transforms.count("vmap") and _is_reduced(value)):
            continue  # nor a scalar of each example
        yield place, f"the scalar that is differentiated is {value.dtype.name}", remedy


def _is_reduced(value: Value) -> bool:
    """Whether an array is made, element by element, of what was reduced to its shape."""
    same = origins(value, lambda each: bool(each.inputs) and {one.shape for one in each.inputs} <= {value.shape, ()})
    return any(len(one.shape) > len(value.shape) for each in same for one in each.inputs)


def _where(value: Value) -> Place | tuple[str, str]:
    """Where a value is computed; of a loop's or branch's result within it."""
    seen = {value}
    while value.name in (JOIN, TURN, TURNS) and value.inputs[-1] not in seen:
        value = value.inputs[-1]
        seen.add(value)
    return value.place or ("", value.reader.source if value.reader else "")


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
        carried = set(origins(value.inputs[0], lambda each: each.name == JOIN))
        if DECIDED in place.names and all(each in carried and each.at.path != place.path for each in wide):
            continue  # two modules that the engine ran, or turns of one, each with its own cast: a carry has one dtype
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


def _is_invariant(value: Value) -> bool:
    """Whether a value in a loop is made of what comes from outside of it."""
    loop = value.loops[-1]

    def goes_on(each: Value) -> bool:
        return each.is_move and each.name not in (TURN, JOIN) and loop in each.loops

    return all(loop not in each.loops and constant(each) is None for each in origins(value.inputs[0], goes_on))


def _half_arguments(role: str, expected: Callable[[Audited, Argument], np.dtype | None], whose: str) -> Any:
    def find(audited: Audited) -> Found:
        for value, argument in zip(audited.values.arguments, audited.arguments, strict=True):
            if argument is None or argument.role != role or not value.is_float or value.dtype.itemsize == 1:
                continue
            dtype = expected(audited, argument)
            if dtype is not None and value.dtype != dtype:
                yield (
                    ("/".join(argument.path), value.reader.source if value.reader else ""),
                    f"{value.dtype.name} where {whose} {dtype.name}",
                    f"keep it in {dtype.name}",
                )

    return find


def _param_dtype(audited: Audited, argument: Argument) -> np.dtype | None:
    return next((policy.param_dtype for policy in audited.policies_of(argument.path[:-1])), None)


def _float32(audited: Audited, argument: Argument) -> np.dtype:
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
            "scale the loss: jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale()) with jaxmp.value_and_grad, or use "
            "bfloat16",
        )


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


def _float64(audited: Audited) -> Found:
    if not audited.has_half_products:
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


def _sent(kind: str, dtype: str | None, size: Callable[[Sent], int], what: str, remedy: str) -> Callable[..., Found]:
    """A finding of each collective of a kind, and dtype if one is given, whose ``size`` is more than 1 MB.

    None on a CPU, which sends half as float32 and sums what others scatter.
    """

    def find(audited: Audited) -> Found:
        for each in audited.sent if not audited.on_cpu else ():
            row, is_meant = each.row, dtype is None or (audited.has_half_products and each.row.dtype == dtype)
            if row.kind == kind and is_meant and size(each) > 1e6:
                times = f"{row.count} time{'s' * (row.count > 1)} a call"
                amount = f"{tables.short(size(each))}B of {row.dtype} over {row.axis}"
                yield (row.path, row.source), f"{what}: {amount}, {times}", remedy

    return find


FINDERS: dict[str, Callable[[Audited], Found]] = {
    "float32-product": float32_products,
    "mixed-product": mixed_products,
    "unaligned-product": unaligned_products,
    "half-sum": half_sums,
    "half-exponential": _half_exponentials,
    "half-loss": _half_losses,
    "round-trip": _round_trips,
    "cast-in-loop": _casts_in_loops,
    "vanishing-constant": vanishing_constants,
    "overflowing-constant": overflowing_constants,
    "inexact-integers": inexact_integers,
    "half-params": _half_arguments("params", _param_dtype, "the policy keeps params in"),
    "half-optimizer-state": _half_arguments("optimizer", _float32, "optimizer state is kept in"),
    "half-statistics": _half_arguments("statistics", _float32, "statistics are kept in"),
    "unscaled-float16": _unscaled_float16,
    "float64": _float64,
    "compiled-otherwise": compiled_otherwise,
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
