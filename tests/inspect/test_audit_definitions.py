"""Edge cases of the audit's definitions, such as weight, sum and loss scale."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp.inspect import audit

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def finding_kinds(fun: Any, *args: Any, policy: str = "mixed_bfloat16") -> list[str]:
    return [finding.kind for finding in audit(fun, expect=policy, compile=False)(*args).findings]


UNALIGNED = "output features 13: not a multiple of 8, which tensor cores need for bfloat16"


def kinds_by_name(cases: dict[str, Any], policy: str = "mixed_bfloat16") -> dict[str, list[str]]:
    """Return the kinds of findings by name. A case is a function with arguments."""
    return {name: finding_kinds(fun, *args, policy=policy) for name, (fun, *args) in cases.items()}


def all_are(kinds: list[str], *tables: dict[str, Any]) -> dict[str, list[str]]:
    return {name: kinds for table in tables for name in table}


def features(fun: Any, *args: Any) -> list[str]:
    return [finding.what for finding in audit(fun, expect="mixed_bfloat16", compile=False)(*args).findings]


def normalised(x: Any) -> Any:
    return (x / jnp.sqrt((x**2).sum(1, keepdims=True))).astype(BF16)


@pytest.mark.once
def test_the_batch_is_no_output_feature_and_a_weight_is_one_wherever_it_comes_from() -> None:
    aligned, unaligned = jnp.ones((16, 16), BF16), jnp.ones((16, 13), BF16)
    seven, eight = shape(7, 16, dtype=BF16), shape(8, 16, dtype=BF16)
    assert features(lambda x: x @ aligned, seven) == []
    assert features(lambda x: x @ unaligned, eight) == [UNALIGNED]
    assert features(lambda x: aligned @ x, shape(16, 7, dtype=BF16)) == []
    assert features(lambda x: jnp.tanh(x @ aligned) @ unaligned, seven) == [UNALIGNED]
    assert features(lambda x, w: x @ w, seven, shape(16, 16, dtype=BF16)) == []
    assert features(lambda x, w: x @ w, eight, shape(16, 13, dtype=BF16)) == [UNALIGNED]
    assert features(lambda x, w: jnp.tanh(x @ w) @ w, seven, shape(16, 16, dtype=BF16)) == []
    # If neither operand is known to be a weight, the second one counts as the weight.
    assert features(lambda w, x: normalised(w) @ x, shape(16, 16), shape(16, 13, dtype=BF16)) == [UNALIGNED]
    assert features(lambda x, w: normalised(x) @ w, shape(7, 16), shape(16, 16, dtype=BF16)) == []
    # A tree of params, or an argument named params, is known to be weights.
    first = {"w": shape(13, 16)}
    assert features(lambda p, x: normalised(p["w"]) @ x, first, shape(16, 8, dtype=BF16)) == [UNALIGNED]
    assert features(lambda p, x: x @ normalised(p["w"]).T, first, seven) == [UNALIGNED]
    assert features(lambda x, params: x @ normalised(params).T, seven, shape(16, 16)) == []
    batch = jnp.ones((7, 16), BF16)
    assert features(lambda p: batch @ p["w"].astype(BF16).T, first) == [UNALIGNED]


@pytest.mark.once
def test_a_sum_is_one_however_it_is_written() -> None:
    def pool(x: Any) -> Any:
        return nn.avg_pool(x[None, :, :, None], (20, 20), (20, 20))

    assert finding_kinds(pool, shape(40, 40, dtype=BF16)) == ["half-sum"]


ROUND_TRIPS = {
    "cond": lambda h: jax.lax.cond(h[0, 0] > 0, lambda z: z.T, lambda z: jnp.maximum(z.T, 0), h.astype(F32)),
    "loop": lambda h: jax.lax.fori_loop(0, 3, lambda _, z: jnp.roll(z, 1, 0), h.astype(F32)),
    "tile": lambda h: jnp.tile(h.astype(F32), 2),
    "sort": lambda h: jnp.sort(h.astype(F32)),
    "top_k": lambda h: jax.lax.top_k(h.astype(F32), 3)[0],
}


def test_a_round_trip_goes_through_all_that_only_moves() -> None:
    h = shape(64, 16, dtype=BF16)
    moved = {name: (lambda h, move=move: move(h).astype(BF16), h) for name, move in ROUND_TRIPS.items()}
    changed = {name: (lambda h, move=move: jnp.cos(move(h)).astype(BF16), h) for name, move in ROUND_TRIPS.items()}
    assert kinds_by_name(moved) == all_are(["round-trip"], ROUND_TRIPS)
    assert kinds_by_name(changed) == all_are([], ROUND_TRIPS)


def test_the_derivative_of_what_is_computed_in_float32_is_no_round_trip() -> None:
    def loss(p: Any, x: Any, between: Any) -> Any:
        y = between((x.astype(BF16) @ p["w"].astype(BF16)).astype(F32), p)
        return jnp.mean((y.astype(BF16) @ p["v"].astype(BF16)).astype(F32) ** 2)

    params = {"w": shape(16, 16), "v": shape(16, 16), "b": shape(16)}
    for between in (lambda y, p: y + p["b"], lambda y, p: y + 1.0, lambda y, p: y + jnp.sum(y, 0)):
        grad = jax.grad(lambda p, x, between=between: loss(p, x, between))
        assert finding_kinds(grad, params, shape(8, 16)) == []
        remat = jax.grad(jax.checkpoint(lambda p, x, between=between: loss(p, x, between)))
        assert finding_kinds(remat, params, shape(8, 16)) == []
    assert finding_kinds(jax.grad(lambda p, x: loss(p, x, lambda y, p: y)), params, shape(8, 16)) == ["round-trip"]

    @jax.custom_vjp
    def custom(h: Any) -> Any:
        return h

    custom.defvjp(lambda h: (h, None), lambda _, ct: (ct.astype(F32).T.astype(BF16).T,))

    def ruled(p: Any, x: Any) -> Any:
        h = x.astype(BF16) @ p["w"].astype(BF16)
        h = custom(h)
        return jnp.mean(h.astype(F32) ** 2)

    assert finding_kinds(jax.grad(ruled), params, shape(8, 16)) == ["round-trip"]


OVERFLOWING = {
    "a bias": lambda s, m: s + jnp.where(m, 0.0, -1e9),
    "float32 scores": lambda s, m: jnp.where(m, s.astype(F32) * 0.1, -1e30).astype(F16),
}
HARMLESS = {
    "an infinity": lambda s, m: s + jnp.where(m, 0.0, -jnp.inf),
    "in float32": lambda s, m: jax.nn.softmax(s.astype(F32) + jnp.where(m, 0.0, -1e9)).astype(F16),
    "a factor": lambda s, m: (s.astype(F32) * jnp.where(m, 1e-3, 1e9)).astype(F16),
    "a bound": lambda s, m: jnp.minimum(s.astype(F32) * 0.1, 1e9).astype(F16),
}


@pytest.mark.once
def test_a_mask_whose_number_half_makes_infinite_is_found_however_it_is_written() -> None:
    args = shape(4, 8, 8, dtype=F16), shape(8, 8, dtype=jnp.bool_)
    kinds = kinds_by_name({name: (fun, *args) for name, fun in {**OVERFLOWING, **HARMLESS}.items()}, "mixed_float16")
    assert kinds == {**all_are(["overflowing-constant"], OVERFLOWING), **all_are([], HARMLESS)}


@pytest.mark.once
def test_an_iota_and_constant_integers_are_found_beyond_what_half_counts() -> None:
    for dtype, limit in ((BF16, 256), (F16, 2048)):
        check_integers(dtype, limit)


def check_integers(dtype: Any, limit: int) -> None:
    integers_by_case = {
        "an iota": lambda n: jnp.arange(n)[:, None].astype(dtype),
        "an iota in half": lambda n: jax.lax.iota(dtype, n),
        "a constant": lambda n: jnp.asarray(np.arange(n)).reshape(-1, 1).astype(dtype),
        "by way of float32": lambda n: jnp.asarray(np.arange(n)).astype(F32).astype(dtype),
    }
    for name, integers in integers_by_case.items():
        for n, kinds in ((limit + 1, []), (limit + 2, ["inexact-integers"])):
            assert finding_kinds(lambda integers=integers, n=n: integers(n)) == kinds, (name, n)
    assert finding_kinds(lambda: jnp.asarray(np.arange(0, 4 * limit, 4)).astype(dtype)) == []
    assert finding_kinds(lambda: (jnp.arange(4 * limit) / limit).astype(dtype)) == []
    mask = np.triu(np.full((8, 8), -1e4, np.float32), 1)
    assert finding_kinds(lambda h: h + jnp.asarray(mask).astype(dtype), shape(8, 8, dtype=dtype)) == []


def after(eps: float) -> dict[str, Any]:
    """Return functions of a sum with an epsilon: quotients, roots and a logarithm."""
    return {
        "div": lambda x: x / (jnp.abs(x) + eps),
        "of a mean": lambda x: x / (jnp.mean(jnp.abs(x), 1, keepdims=True) + eps),
        "rsqrt": lambda x: jax.lax.rsqrt(jnp.abs(x) + eps),
        "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + eps),
        "log": lambda x: jnp.log((jnp.abs(x) + eps).astype(F32)),
    }


@pytest.mark.once
def test_an_epsilon_that_tracing_rounded_to_0_is_found_by_what_it_protects() -> None:
    args = (shape(8, 8, dtype=F16),)

    def kinds(fun: Any, *args: Any) -> list[str]:
        return [kind for kind in finding_kinds(fun, *args, policy="mixed_float16") if kind != "half-exponential"]

    for fun in after(1e-8).values():
        assert kinds(fun, *args) == ["vanishing-constant"]
        assert kinds(fun, shape(8, 8, dtype=BF16)) == []  # bfloat16 can represent it
    for fun in after(1e-4).values():
        assert kinds(fun, *args) == []
    for fun in (lambda x: jnp.sqrt(jax.nn.relu(x)) + sum([x, x]), lambda x: x * 0.999 + 1.0):
        assert kinds(fun, *args) == []
    assert kinds(lambda x, eps: x / (x + eps), *args, shape(dtype=F16)) == []  # an argument may be anything


@pytest.mark.once
def test_a_constant_that_a_cast_makes_1_is_shown_as_its_distance() -> None:
    report = audit(lambda x: x * jnp.full(8, 1 - 1e-7).astype(F16), compile=False)(shape(8, 8, dtype=F16))
    assert [finding.what for finding in report.findings] == ["the constant 1 - 1e-07 is 1 in float16"]


PARAMS, X, SCALAR = {"w": shape(16, 16)}, shape(8, 16), shape()


def half(p: Any, x: Any) -> Any:
    return (x.astype(F16) @ p["w"].astype(F16)).astype(F32)


def mean(p: Any, x: Any) -> Any:
    return jnp.mean(half(p, x) ** 2)


def of_scale(factor: Any, inverse: Any = lambda s: 1 / s) -> Any:
    """Return the gradients of a loss times a factor, divided by it."""
    return lambda p, x, s: inverse(factor(s)) * jax.grad(lambda p: mean(p, x) * factor(s))(p)["w"]


def shared(p: Any, x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mean_over_devices = jax.shard_map(
        lambda p, x: jax.lax.pmean(mean(p, x), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P()
    )
    return mean_over_devices(p, x)


UNSCALED = {
    "of a shard_map": (jax.grad(shared), PARAMS, X),
    "a weight of the loss": (jax.grad(lambda p, x: 5.0 * mean(p, x)), PARAMS, X),
    "a penalty": (jax.grad(lambda p, x: mean(p, x) + 16.0 * jnp.abs(p["w"]).sum()), PARAMS, X),
    "a learned temperature": (
        jax.grad(lambda p, x: jnp.mean((half(p, x) * p["t"]) ** 2)), {**PARAMS, "t": SCALAR}, X
    ),
    "the weight of an example": (lambda p, x, s: jax.grad(lambda p: mean(p, x) * s)(p), PARAMS, X, SCALAR),
    "a weight that multiplies the gradients": (
        lambda p, x, s: s * jax.grad(lambda p: mean(p, x) * s)(p)["w"], PARAMS, X, SCALAR
    ),
    "a learned weight": (jax.grad(lambda p, x: mean(p, x) * p["t"]), {**PARAMS, "t": SCALAR}, X),
    "a scale of another loss": (
        jax.grad(lambda p, x: mean(p, x) + 1024.0 * jnp.mean((x @ p["v"]) ** 2)), {**PARAMS, "v": shape(16, 16)}, X
    ),
}  # fmt: skip
SCALED = {
    "in a tuple with the params": (
        lambda state, x: jax.grad(lambda p: state[1].scale(mean(p, x)))(state[0]), (PARAMS, jaxmp.DynamicLossScale()), X
    ),
    "of an array": (of_scale(lambda s: s[0]), PARAMS, X, shape(1)),
    "an exponent": (of_scale(lambda s: 2.0**s), PARAMS, X, SCALAR),
    "a negative exponent": (of_scale(lambda s: 2.0**s, lambda s: 2.0 ** -jnp.log2(s)), PARAMS, X, SCALAR),
    "a negative power": (of_scale(lambda s: s, lambda s: s**-1), PARAMS, X, SCALAR),
    "of a shard_map": (jax.grad(lambda p, x: shared(p, x) * 1024), PARAMS, X),
    "a constant": (jax.grad(lambda p, x: mean(p, x) * 1024), PARAMS, X),
    "of each example": (
        jax.vmap(jax.grad(lambda p, x: mean(p, x[None]) * 1024), (None, 0)), PARAMS, X
    ),
}  # fmt: skip


@pytest.mark.once
def test_a_factor_that_is_not_a_loss_scale_leaves_float16_unscaled() -> None:
    last = {name: kinds[-1:] for name, kinds in kinds_by_name(UNSCALED, "mixed_float16").items()}
    assert last == all_are(["unscaled-float16"], UNSCALED)


def test_a_loss_scale_is_one_however_it_is_written() -> None:
    assert kinds_by_name(SCALED, "mixed_float16") == all_are([], SCALED)
