"""The audit finds each planted fault at its line, and nothing else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jaxmp
from jaxmp.inspect import Audit, audit
from jaxmp.inspect._audit.findings import FINDERS

pytestmark = pytest.mark.usefixtures("standard_promotion")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def float32_product(h: Any, w: Any) -> Any:
    wide = h.astype(F32)
    return jnp.tanh(wide @ w).astype(h.dtype)  # here


def mixed_product(h: Any, w: Any) -> Any:
    numbers = (((1,), (0,)), ((), ()))
    y = jax.lax.dot_general(h, w, numbers, preferred_element_type=F32)  # here
    return jnp.tanh(y).astype(h.dtype)


def unaligned_product(h: Any, w: Any) -> Any:
    narrow = w.astype(h.dtype)[:, :13]
    y = h @ narrow  # here
    return h + jnp.sum(y, axis=1, keepdims=True)


def half_sum(h: Any, w: Any) -> Any:
    return h - jnp.cumsum(h, axis=0, dtype=h.dtype)  # here


def half_scatter(h: Any, w: Any) -> Any:
    places = jnp.zeros((4096,), jnp.int32)
    return h.at[places, :].add(jnp.ones((4096, 16), h.dtype))  # here


def half_reduction(h: Any, w: Any) -> Any:
    total = jax.lax.reduce(h, h.dtype.type(0), jax.lax.add, (0,))  # here
    return h - jax.lax.stop_gradient(total)


def half_exponential(h: Any, w: Any) -> Any:
    return h * jnp.exp(h)  # here


def half_softmax(h: Any, w: Any) -> Any:
    return jax.nn.softmax(h)  # here


def half_power(h: Any, w: Any) -> Any:
    return jnp.power(h, 2.5)  # here


def round_trip(h: Any, w: Any) -> Any:
    wide = jnp.maximum(h.astype(F32).T, 0)
    return wide.T.astype(h.dtype)  # here


def vanishing_literal(h: Any, w: Any) -> Any:
    return h / (jnp.abs(h) + 1e-8)  # here


def vanishing_cast(h: Any, w: Any) -> Any:
    return jnp.maximum(h, jnp.full(16, 1e-9).astype(h.dtype))  # here


def vanishing_variable(h: Any, w: Any) -> Any:
    small = np.float16(1e-8)
    return h / (jnp.abs(h) + small)  # here


def vanishing_array(h: Any, w: Any) -> Any:
    several = np.full((16,), 1e-8, np.float16)
    return h / (jnp.abs(h) + several)  # here


def vanishing_decay(h: Any, w: Any) -> Any:
    return h * jnp.full(16, 0.999).astype(h.dtype)  # here


def overflowing_array(h: Any, w: Any) -> Any:
    mask = jnp.asarray(np.where(np.arange(16) < 8, 0.0, -1e9), F32)
    return h + mask.astype(h.dtype)  # here


def overflowing_mask(h: Any, w: Any) -> Any:
    return jnp.where(h > 0, h.astype(F32) * 0.1, -1e9).astype(h.dtype)  # here


def vanishing_term(h: Any, w: Any) -> Any:
    return h + 1e-9  # here


def vanishing_term_in_a_scan(h: Any, w: Any) -> Any:
    return jax.lax.scan(lambda carry, x: (carry, x - 1e-9), h[0], h)[1]  # here


def overflowing_factor(h: Any, w: Any) -> Any:
    mask = (h > 0).astype(h.dtype)
    return h + (1 - mask) * -1e9  # here


def inexact_positions(h: Any, w: Any) -> Any:
    positions = jnp.arange(4096)
    return h * positions.astype(h.dtype)[:, None]  # here


def inexact_iota(h: Any, w: Any) -> Any:
    return h + jnp.arange(4096, dtype=h.dtype)[:, None]  # here


def inexact_constant(h: Any, w: Any) -> Any:
    positions = jnp.asarray(np.arange(4096)[:, None])
    return h * positions.astype(h.dtype)  # here


def float64_product(h: Any, w: Any) -> Any:
    wide = h.astype(jnp.float64)  # here
    return jnp.tanh(wide).astype(h.dtype)


FAULTS: list[tuple[str, Callable[..., Any], Any]] = [
    ("float32-product", float32_product, BF16),
    ("mixed-product", mixed_product, BF16),
    ("unaligned-product", unaligned_product, BF16),
    ("half-sum", half_sum, BF16),
    ("half-sum", half_scatter, F16),
    ("half-sum", half_reduction, BF16),
    ("half-exponential", half_exponential, BF16),
    ("half-exponential", half_softmax, F16),
    ("half-exponential", half_power, BF16),
    ("round-trip", round_trip, BF16),
    ("vanishing-constant", vanishing_literal, F16),
    ("vanishing-constant", vanishing_cast, F16),
    ("vanishing-constant", vanishing_decay, BF16),
    ("vanishing-constant", vanishing_array, F16),
    ("vanishing-constant", vanishing_variable, F16),
    ("overflowing-constant", overflowing_array, F16),
    ("overflowing-constant", overflowing_mask, F16),
    ("inexact-integers", inexact_positions, BF16),
    ("vanishing-constant", vanishing_term, F16),
    ("inexact-integers", inexact_constant, BF16),
    ("float64", float64_product, BF16),
    ("inexact-integers", inexact_iota, F16),
    ("vanishing-constant", vanishing_term_in_a_scan, F16),
    ("overflowing-constant", overflowing_factor, F16),
]


def line_of(fault: Callable[..., Any]) -> str:
    lines, first = inspect.getsourcelines(fault)
    return f"test_audit_planted.py:{next(n for n, line in enumerate(lines, first) if '# here' in line)}"


class Faulty(nn.Module):
    fault: Callable[..., Any]

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        return self.fault(h, self.param("w", nn.initializers.normal(), (16, 16), F32))


class Around(nn.Module):
    fault: Callable[..., Any]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.Dense(16, dtype=self.dtype, use_bias=False)(x)
        return nn.Dense(16, dtype=self.dtype, use_bias=False)(Faulty(self.fault, name="planted")(h))


def functional(fault: Any, dtype: Any, body: Any = None) -> tuple[Any, Any]:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        h = x.astype(dtype) @ params["first"].astype(dtype)
        with jax.named_scope("planted"):
            h = (body or fault)(h, params["w"])
        return h @ params["last"].astype(dtype)

    return apply, {name: shape(16, 16) for name in ("first", "w", "last")}


def linen(fault: Any, dtype: Any) -> tuple[Any, Any]:
    model = Around(fault, dtype)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), shape(4096, 16))


def of_nnx(fault: Any, dtype: Any) -> tuple[Any, Any]:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(16, 16, use_bias=False, dtype=dtype, rngs=rngs)
            self.last = nnx.Linear(16, 16, use_bias=False, dtype=dtype, rngs=rngs)
            self.w = nnx.Param(jnp.ones((16, 16), F32))

        def __call__(self, x: jax.Array) -> jax.Array:
            h = self.first(x)
            with jax.named_scope("planted"):
                h = fault(h, self.w[...])
            return self.last(h)

    return lambda model, x: model(x), Model(nnx.Rngs(0))


def in_scan(fault: Any, dtype: Any) -> tuple[Any, Any]:
    def body(h: Any, w: Any) -> Any:
        return jax.lax.scan(lambda carry, weight: (fault(carry, weight), None), h, jnp.stack([w, w]))[0]

    return functional(fault, dtype, body)


def in_custom_vjp(fault: Any, dtype: Any) -> tuple[Any, Any]:
    @jax.custom_vjp
    def custom(h: Any, w: Any) -> Any:
        return fault(h, w)

    def forward(h: Any, w: Any) -> Any:
        return fault(h, w), (h, w)

    def backward(saved: Any, cotangent: Any) -> Any:
        return cotangent, jnp.zeros_like(saved[1])

    custom.defvjp(forward, backward)
    return functional(fault, dtype, custom)


STYLES = {"functional": functional, "linen": linen, "nnx": of_nnx, "scan": in_scan, "custom_vjp": in_custom_vjp}
# Each fault is planted in a function and in one other style; each style has several faults. In the gradient of a scan,
# JAX moves casts of constants out of the loop and of their scope, so the style "scan" has none of these.
OTHER_STYLES = [style for style in STYLES if style != "functional"]
PLANTED = {"functional": FAULTS, **{style: FAULTS[n :: len(OTHER_STYLES)] for n, style in enumerate(OTHER_STYLES)}}


def planted(report: Audit) -> set[tuple[str, str, str]]:
    return {
        (finding.kind, finding.path.rpartition("/")[2], finding.source.rpartition("/")[2])
        for finding in report.findings
    }


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # a warning of JAX about 1e6 in float16
@pytest.mark.parametrize(
    "style", [*OTHER_STYLES, pytest.param("functional", marks=pytest.mark.slow("plants all faults"))]
)
def test_a_fault_is_found_where_it_is_and_in_the_gradient_once(style: str) -> None:
    for kind, fault, dtype in PLANTED[style]:
        with jax.enable_x64(kind == "float64"):
            apply, params = STYLES[style](fault, dtype)
            policy = f"mixed_{np.dtype(dtype).name}"
            x, expected = shape(4096, 16), {(kind, "planted", line_of(fault))}
            assert planted(audit(apply, expect=policy, compile=False)(params, x)) == expected
            if style == "nnx":
                continue

            def loss(params: Any, x: Any, apply: Any = apply) -> jax.Array:
                return jnp.mean(apply(params, x).astype(F32)) * 1024.0

            assert planted(audit(jax.value_and_grad(loss), expect=policy, compile=False)(params, x)) == expected


def test_a_fault_in_a_backward_rule_is_found() -> None:
    @jax.custom_vjp
    def custom(h: Any, w: Any) -> Any:
        return h

    def backward(saved: Any, cotangent: Any) -> Any:
        return jnp.exp(cotangent), jnp.zeros((16, 16))

    custom.defvjp(lambda h, w: (h, None), backward)
    apply, params = functional(None, BF16, custom)
    grad = jax.grad(lambda params, x: jnp.mean(apply(params, x).astype(F32)))
    findings = audit(grad, expect="mixed_bfloat16", compile=False)(params, shape(8, 16)).findings
    assert [(finding.kind, finding.path) for finding in findings] == [("half-exponential", "planted")]


def kinds(report: Audit) -> list[str]:
    return [finding.kind for finding in report.findings]


def half_model(params: Any, x: Any) -> jax.Array:
    return x.astype(BF16) @ params["w"].astype(BF16)


PARAMS, X = {"w": shape(16, 16)}, shape(8, 16)


def test_a_half_loss_is_found() -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        h = half_model(params, x)
        return jnp.mean(h * h)  # here

    expected = [("half-loss", line_of(loss))]
    for fun in (loss, jax.grad(loss), jax.value_and_grad(loss), jax.jit(jax.value_and_grad(loss))):
        findings = audit(fun, expect="mixed_bfloat16", compile=False)(PARAMS, X).findings
        assert [(finding.kind, finding.source.rpartition("/")[2]) for finding in findings] == expected


@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_state_in_half_is_found_by_its_name() -> None:
    def create() -> Any:
        return jaxmp.TrainState.create(
            params={"dense": {"w": jnp.ones((16, 16), BF16)}},
            tx=optax.sgd(0.1, momentum=0.9, accumulator_dtype=BF16),
            model_state={"batch_stats": {"norm": {"mean": jnp.zeros(16, BF16)}}, "frozen": jnp.ones(16, BF16)},
        )

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        loss = jnp.mean((half_model(params["dense"], batch) * model_state["frozen"]).astype(F32))
        mean = model_state["batch_stats"]["norm"]["mean"]
        new = {**model_state, "batch_stats": {"norm": {"mean": mean * jnp.bfloat16(0.5)}}}
        return loss + jnp.sum(mean.astype(F32)), new

    findings = audit(jaxmp.make_train_step(loss_fn), expect="mixed_bfloat16", compile=False)(
        jax.eval_shape(create), X
    ).findings
    assert [(finding.kind, finding.path.rpartition("/")[2]) for finding in findings] == [
        ("half-params", "w"), ("half-optimizer-state", "w"), ("half-statistics", "mean")
    ]  # fmt: skip
    assert findings[0].path == "dense/w"
    assert findings[2].path == "norm/mean"
    variables = {"params": {"w": shape(16, 16, dtype=BF16)}, "batch_stats": {"mean": shape(16, dtype=F16)}}

    def apply(variables: Any, x: Any) -> Any:
        return half_model(variables["params"], x) + variables["batch_stats"]["mean"].astype(BF16)

    report = audit(apply, expect="mixed_bfloat16", compile=False)(variables, X)
    assert [(finding.kind, finding.path) for finding in report.findings] == [
        ("half-params", "w"),
        ("half-statistics", "mean"),
    ]
    assert kinds(audit(half_model, expect="mixed_bfloat16", compile=False)({"w": shape(16, 16, dtype=BF16)}, X)) == []
    policy = jaxmp.Policy(BF16, BF16, BF16)
    assert kinds(audit(apply, expect=policy, compile=False)(variables, X)) == ["half-statistics"]

    def flax() -> Any:
        return train_state.TrainState.create(apply_fn=None, params={"w": jnp.ones(8, F16)}, tx=optax.adam(1e-3))

    report = audit(lambda state: state.params["w"], expect="mixed_float16", compile=False)(jax.eval_shape(flax))
    assert kinds(report) == ["half-params", "half-optimizer-state", "half-optimizer-state"]


@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_params_may_have_the_dtype_of_an_override_for_a_class() -> None:
    def create(kernel_dtype: Any) -> Any:
        params = {"norm": {"scale": jnp.ones(16)}, "dense": {"kernel": jnp.ones((16, 16), kernel_dtype)}}
        return jaxmp.TrainState.create(params=params, tx=optax.adam(1e-3))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch.astype(BF16) @ params["dense"]["kernel"].astype(BF16)
        return jnp.mean(x.astype(F32) * params["norm"]["scale"])

    def paths(kernel_dtype: Any) -> list[str]:
        state = jax.eval_shape(lambda: create(kernel_dtype))
        report = audit(jaxmp.make_train_step(loss_fn), expect="bfloat16_sr", compile=False)(state, X)
        return [finding.path for finding in report.findings if finding.kind == "half-params"]

    assert paths(BF16) == [] and paths(F16) == ["dense/kernel"]  # the norms of this policy are float32


def test_averaged_params_and_caches_may_be_half_and_optimizer_state_outside_of_a_train_state_may_not() -> None:
    half, wide = {"w": shape(8, dtype=BF16)}, {"w": shape(8)}
    state = jax.eval_shape(lambda: jaxmp.TrainState.create(params={"w": jnp.ones(8)}, tx=optax.sgd(0.1)))
    state = state.replace(ema_params=half, model_state={"cache": half})
    assert kinds(audit(lambda state: state.params["w"], expect="mixed_bfloat16", compile=False)(state)) == []
    variables = {"params": wide, "cache": half}
    assert kinds(audit(lambda variables: variables, expect="mixed_bfloat16", compile=False)(variables)) == []
    momentum = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, half)
    report = audit(lambda w, momentum: w, expect="mixed_bfloat16", compile=False)(shape(8), momentum)
    assert [(finding.kind, finding.path) for finding in report.findings] == [("half-optimizer-state", "0/trace/w")]


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_bfloat16_state_is_accepted_only_of_low_precision(rounding: str) -> None:
    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean((x.astype(BF16) @ params["w"].astype(BF16)).astype(F32))

    def update(params: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def momentum(state: Any, batch: Any) -> Any:
        return jaxmp.base.trees.widen(optax.tree_utils.tree_get(state.opt_state, "mu"))

    def found(fun: Any, *arguments: Any) -> list[str]:
        return kinds(audit(fun, expect=jaxmp.Policy(BF16, BF16, F32), compile=False)(*arguments))

    tx = jaxmp.low_precision(optax.adam(1e-3), rounding=rounding, moments="bfloat16")
    state = jax.eval_shape(lambda: jaxmp.TrainState.create(params={"w": jnp.ones((16, 16), BF16)}, tx=tx))
    step, eval_step = jaxmp.make_train_step(loss_fn), jaxmp.make_eval_step(loss_fn)
    for fun in (step, eval_step, momentum):
        assert found(fun, state, X) == [], fun
    assert found(update, state.params, state.opt_state.inner_state, X) == []

    tx = optax.adam(1e-3)
    wide = jax.eval_shape(tx.init, state.params)
    halved = jax.tree.map(lambda leaf: leaf.update(dtype=BF16) if leaf.ndim else leaf, wide)
    assert found(update, state.params, halved, X) == ["half-optimizer-state"] * 2


NESTED = {
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "partition": lambda tx: optax.partition({"w": tx, "b": optax.sgd(0.1)}, {"w": "w", "b": "b"}),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
def test_half_moments_are_found_unless_low_precision_stores_them_in_half(nested: str, is_inside: bool) -> None:
    """Put the other transform inside of low_precision, or around it."""

    def state_of(**options: Any) -> Any:
        nest, adam = NESTED[nested], optax.adam(1e-3)
        tx = jaxmp.low_precision(nest(adam), **options) if is_inside else nest(jaxmp.low_precision(adam, **options))
        return jax.eval_shape(tx.init, {"w": jnp.ones((16, 16), BF16), "b": jnp.ones(16, BF16)})

    def halved(state: Any, dtype: Any) -> Any:
        """Return a state whose moments of ``w`` were cast by hand."""

        def cast(path: Any, leaf: Any) -> Any:
            return leaf.update(dtype=dtype) if {"mu", "nu"} & {*jaxmp.base.trees.path_parts(path)} else leaf

        return jax.tree.map_with_path(cast, state)

    def found(state: Any) -> set[str]:
        report = audit(lambda opt_state: opt_state, expect="mixed_bfloat16", compile=False)(state)
        assert {finding.kind for finding in report.findings} <= {"half-optimizer-state"}
        # MultiSteps around low_precision sums gradients in the params' dtype
        findings = [finding for finding in report.findings if "acc_grads" not in finding.path]
        return {finding.what.split()[0] for finding in findings}

    wide, half, kahan = state_of(), state_of(moments="bfloat16"), state_of(rounding="kahan", moments="float8")
    assert found(wide) == found(half) == found(kahan) == set()
    assert found(halved(wide, BF16)) == {"bfloat16"}
    assert found(halved(half, F16)) == {"float16"}  # not the format of this optimizer either


@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_state_of_nnx_in_half_is_found_by_its_name() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((16, 16), BF16))
            self.mean = nnx.BatchStat(jnp.ones((16,), BF16))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x.astype(BF16) @ self.w[...] + self.mean[...]

    model = Model()
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9, accumulator_dtype=BF16))

    def step(model: Any, optimizer: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean(model(x).astype(F32)))(model)
        optimizer.update(model, grads)
        model.mean[...] *= jnp.bfloat16(0.5)

    for fun in (step, nnx.jit(step)):
        findings = audit(fun, expect="mixed_bfloat16", compile=False)(model, optimizer, X).findings
        assert [finding.kind for finding in findings] == ["half-params", "half-optimizer-state", "half-statistics"]
        assert (findings[0].path, findings[2].path) == ("w", "mean")


def test_float16_products_without_a_loss_scale_are_found() -> None:
    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean((x.astype(F16) @ params["w"].astype(F16)).astype(F32))  # here

    unscaled = audit(jax.value_and_grad(loss), expect="mixed_float16", compile=False)(PARAMS, X).findings
    assert [(finding.kind, finding.source.rpartition("/")[2]) for finding in unscaled] == [
        ("unscaled-float16", line_of(loss))
    ]
    scaled = lambda params, x, scale: jax.grad(lambda params: loss(params, x) * scale)(params)["w"]  # noqa: E731
    divided = lambda params, x, scale: scaled(params, x, scale) / scale  # noqa: E731
    inverted = lambda params, x, scale: scaled(params, x, scale) * (1 / scale)  # noqa: E731
    for fun in (divided, inverted):
        assert kinds(audit(fun, expect="mixed_float16", compile=False)(PARAMS, X, shape())) == []
    # The weight of an example multiplies the loss, too, and the gradients are not divided by it.
    assert kinds(audit(scaled, expect="mixed_float16", compile=False)(PARAMS, X, shape())) == ["unscaled-float16"]
    of_jaxmp = lambda params, x, scale: jax.grad(lambda params: scale.scale(loss(params, x)))(params)  # noqa: E731
    scale = jax.eval_shape(lambda: jaxmp.DynamicLossScale())
    assert kinds(audit(of_jaxmp, expect="mixed_float16", compile=False)(PARAMS, X, scale)) == []
    constant = functools.partial(scaled, scale=1024.0)
    assert kinds(audit(constant, expect="mixed_float16", compile=False)(PARAMS, X)) == []
    assert kinds(audit(loss, expect="mixed_float16", compile=False)(PARAMS, X)) == []  # no gradients, no scale

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return loss(params, batch), model_state

    tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale())

    def weighted(params: Any, x: Any) -> Any:
        return loss(params, x) * x[0, 0]

    def own_step(value_and_grad: Any) -> Any:
        def steps(params: Any, opt_state: Any, batches: Any) -> Any:
            def step(carry: Any, x: Any) -> Any:
                params, opt_state = carry
                _, grads = value_and_grad(opt_state)(params, x)
                updates, opt_state = tx.update(grads, opt_state, params)
                return (optax.apply_updates(params, updates), opt_state), None

            return jax.lax.scan(step, (params, opt_state), batches)[0]

        return audit(steps, expect="mixed_float16", compile=False)(
            PARAMS, jax.eval_shape(tx.init, PARAMS), shape(3, *X.shape)
        )

    assert kinds(own_step(lambda opt_state: jaxmp.value_and_grad(loss, opt_state))) == []
    assert kinds(own_step(lambda opt_state: jaxmp.value_and_grad(weighted, opt_state))) == []
    for fun in (loss, weighted):  # forgets the scale
        assert kinds(own_step(lambda opt_state, fun=fun: jax.value_and_grad(fun))) == ["unscaled-float16"]

    for scale, expected in ((jaxmp.NoOpLossScale(), ["unscaled-float16"]), (jaxmp.DynamicLossScale(), [])):
        tx = jaxmp.loss_scaling(optax.sgd(0.1), scale)
        create = lambda tx=tx: jaxmp.TrainState.create(params={"w": jnp.ones((16, 16))}, tx=tx)  # noqa: E731
        step = jaxmp.make_train_step(loss_fn)
        assert kinds(audit(step, expect="mixed_float16", compile=False)(jax.eval_shape(create), X)) == expected


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_gradients_that_are_never_divided_by_the_loss_scale_are_found(dtype: Any) -> None:
    def gradient(w: Any, x: Any, scale: Any) -> Any:
        return jax.grad(lambda w: jnp.mean((x.astype(dtype) @ w.astype(dtype)).astype(F32) ** 2) * scale)(w)

    def clipped(w: Any, x: Any, scale: Any = 1024.0) -> Any:
        gradients = gradient(w, x, scale)
        norm = jnp.sqrt(jnp.sum(gradients**2))
        return w - 0.1 * gradients / jnp.maximum(norm, 1)  # here

    def divided(w: Any, x: Any, scale: Any = 1024.0) -> Any:
        return w - 0.1 * (gradient(w, x, scale) / scale)

    def inverted(w: Any, x: Any, scale: Any = 1024.0) -> Any:
        return w - 0.1 * (1 / scale * gradient(w, x, scale))

    def subtracted(w: Any, x: Any, scale: Any) -> Any:
        return w + (-(0.1 / scale)) * gradient(w, x, scale)

    def steps(step: Any) -> Any:
        return lambda w, xs: jax.lax.scan(lambda w, x: (step(w, x), None), w, xs)[0]

    def of_jaxmp(w: Any, x: Any, scale: Any) -> Any:
        return clipped(w, x, scale.loss_scale)

    def found(fun: Any, *args: Any) -> list[tuple[str, str]]:
        findings = audit(fun, compile=False)(shape(16, 16), *args).findings
        return [(finding.kind, finding.source.rpartition("/")[2]) for finding in findings]

    scale, expected = jax.eval_shape(lambda: jaxmp.DynamicLossScale()), [("never-unscaled", line_of(clipped))]
    assert found(of_jaxmp, X, scale) == expected
    of_constant = expected if dtype == F16 else []  # without float16, 1024 may be a weight of the loss
    assert found(clipped, X) == found(steps(clipped), shape(3, *X.shape)) == of_constant
    assert found(subtracted, X, shape()) == []
    for fun in (divided, inverted):
        assert found(fun, X) == found(fun, X, shape()) == found(steps(fun), shape(3, *X.shape)) == []
    assert found(lambda w, x: gradient(w, x, 1024.0), X) == []  # the caller may divide


def test_a_cast_that_the_compiler_leaves_in_a_loop_is_found() -> None:
    def fun(w: Any, x: Any, flags: Any) -> Any:
        def turn(carry: Any, flag: Any) -> Any:
            product = lambda carry: carry @ w.astype(BF16)  # here # noqa: E731
            return jax.lax.cond(flag, product, lambda carry: carry, carry), None

        return jax.lax.scan(turn, x, flags)[0]

    def hoisted(w: Any, x: Any, flags: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (carry @ w.astype(BF16), None), x, flags)[0]

    def looked_up(table: Any, x: Any, ids: Any) -> Any:
        return jax.lax.scan(lambda carry, row: (carry + table[row].astype(BF16), None), x, ids)[0]

    args = shape(16, 16), shape(8, 16, dtype=BF16), shape(4, dtype=bool)
    findings = audit(fun, expect="mixed_bfloat16")(*args).findings
    assert [(finding.kind, finding.source.rpartition("/")[2]) for finding in findings] == [
        ("cast-in-loop", line_of(fun))
    ]
    assert audit(fun, expect="mixed_bfloat16", compile=False)(*args).findings == ()
    assert audit(hoisted, expect="mixed_bfloat16")(*args).findings == ()
    assert audit(looked_up, expect="mixed_bfloat16")(*args[:2], shape(4, 8, dtype=jnp.int32)).findings == ()


def test_every_kind_is_planted_or_has_a_test_of_its_own() -> None:
    tested_here = {
        "half-loss",
        "half-params",
        "half-optimizer-state",
        "half-statistics",
        "unscaled-float16",
        "never-unscaled",
        "cast-in-loop",
    }
    tested_on_devices = {"float32-gather", "activation-gather", "gradient-all-reduce"}  # in test_many_devices.py
    tested_elsewhere = {*tested_on_devices, "half-product", "compiled-otherwise", "unknown-primitive"}
    assert {kind for kind, *_ in FAULTS} | tested_here | tested_elsewhere == set(FINDERS)


def test_the_remedy_for_a_mixed_product_in_a_derivative_is_autocast():
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 16), (16, 64))]
    derivative = jax.grad(lambda h, w: mixed_product(h, w).astype(F32).sum(), argnums=(0, 1))
    findings = audit(derivative, expect="mixed_bfloat16", compile=False)(*operands).findings
    (mixed,) = [finding for finding in findings if finding.kind == "mixed-product"]
    assert mixed.remedy == "cast both operands to bfloat16, or use autocast, which does so in derivatives"
