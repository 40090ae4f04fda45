"""Checkpoints and custom rules under autocast, also as JAX's newer transforms (hi primitives)."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_tools import half, products
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from jaxmp.inspect import audit
from jaxmp.program.equations import primitive_of
from jaxmp.program.primitives import Class, classify, replaced_by
from jaxmp.program.walk import equations

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
HAS_FLAGS = hasattr(jax.config, FLAGS[-1])

X, W, V = (np.random.default_rng(n).normal(size=(32, 32)).astype("float32") / 4 for n in range(3))


@pytest.fixture
def newer():
    """Switch the newer transforms on or off, at first off."""
    before = {flag: getattr(jax.config, flag) for flag in FLAGS if HAS_FLAGS}

    def switch(is_on):
        if is_on and not HAS_FLAGS:
            pytest.skip("this JAX has no such flags")
        for flag in before:
            jax.config.update(flag, is_on)

    switch(False)
    yield switch
    for flag, value in before.items():
        jax.config.update(flag, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activated(activation, x, w):
    return activation(x @ w)


def forward(activation, x, w):
    y = activation(x @ w)
    return y, (x, w, y)


def backward(activation, residuals, g):
    x, w, y = residuals
    g = 2 * g * (1 - y * y)  # twice the true cotangent
    return g @ w.T, x.T @ g


activated.defvjp(forward, backward)


@jax.custom_jvp
def multiplied(x, w):
    return x @ w


@multiplied.defjvp
def double(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, 2 * (dx @ w + x @ dw)  # twice the true tangent


def layer(x, w, v):
    return checkpoint_name(jnp.tanh(x @ w), "hidden") @ v


def scanned(x, w, v):
    def body(h, weights):
        return jax.checkpoint(layer)(h, *weights), None

    return jax.lax.scan(body, x, (jnp.stack([w, v]), jnp.stack([v, w])))[0]


by_name = jax.checkpoint_policies.save_only_these_names("hidden")
FUNCTIONS = {
    "checkpoint": jax.checkpoint(layer),
    "saved dots": jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable),
    "saved names": jax.checkpoint(layer, policy=by_name),
    "merged": jax.checkpoint(layer, prevent_cse=False),
    "nested": jax.checkpoint(lambda x, w, v: jax.checkpoint(layer, policy=by_name)(x, w, v) @ w),
    "jitted": jax.checkpoint(jax.jit(layer)),
    "scan": scanned,
    "custom_vjp": lambda x, w, v: activated(jnp.tanh, x, w) @ v,
    "custom_vjp in checkpoint": jax.checkpoint(lambda x, w, v: activated(jnp.tanh, x, w) @ v),
    "custom_jvp": lambda x, w, v: multiplied(x, w) @ v,
    "relu": jax.checkpoint(lambda x, w, v: jax.nn.relu(x @ w) @ v),
    "vmap": lambda x, w, v: jax.vmap(jax.checkpoint(layer), (0, None, None))(x.reshape(2, 16, 32), w, v),
    "vmap of custom_vjp": lambda x, w, v: jax.vmap(lambda x: activated(jnp.tanh, x, w))(x.reshape(2, 16, 32)) @ v,
}


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_are_half_and_gradients_those_of_float32(name, is_newer, newer):
    fun = FUNCTIONS[name]

    def loss(x, w, v):
        return jnp.mean(fun(x, w, v).astype(jnp.float32) ** 2)

    count = len(products(jax.grad(loss, (1, 2)), X, W, V))
    wanted = jax.jit(jax.grad(loss, (1, 2)))(X, W, V)
    newer(is_newer)
    gradients = jax.grad(half(loss), (1, 2)), half(jax.grad(loss, (1, 2)))
    for gradient in gradients:  # as many products: the policy decides what is computed again
        assert products(gradient, X, W, V) == ["bfloat16"] * count
    for form in (half(loss), jax.grad(jax.checkpoint(half(loss)), 1)):
        assert set(products(form, X, W, V)) == {"bfloat16"}
    for got, want in zip(jax.jit(gradients[0])(X, W, V), wanted, strict=True):
        assert got.dtype == np.float32
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_a_barrier_keeps_the_recomputation_apart_as_without_autocast(newer):
    newer(True)
    for prevent_cse, count in ((True, 1), (False, 0), ((True, False, False), 1)):
        fun = jax.checkpoint(layer, prevent_cse=prevent_cse)
        for form in (fun, half(fun)):
            gradient = jax.grad(lambda w, form=form: jnp.sum(form(X, w, V)))
            assert str(jax.make_jaxpr(gradient)(W)).count("optimization_barrier") == count


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = nn.remat(nn.Dense)(32, name=f"layer_{number}")(nn.relu(x))
        return x


def test_the_plan_the_audit_and_the_budget_are_the_same(newer):
    net = Net()
    params = jax.eval_shape(net.init, jax.random.key(0), X)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.1, leaf.dtype), params)

    def loss(params, x):
        return jnp.mean(net.apply(params, x).astype(jnp.float32) ** 2)

    def described():
        plan = jaxmp.cast_plan(loss, "mixed_bfloat16")(params, X)
        audited = audit(jax.grad(half(loss)), expect="mixed_bfloat16", compile=False)(params, X)
        rows = [(row.path, row.primitive, row.operands, row.result, row.why) for row in plan.rows]
        return rows, sorted((p.path, p.phase, p.operands, p.count) for p in audited.products), audited.findings

    before = described()
    newer(True)
    assert described() == before
    assert {operands for _, _, operands, _ in before[1]} == {("bfloat16", "bfloat16")}


def test_a_hi_primitive_that_changed_or_has_more_rules_replaces_nothing():
    assert replaced_by({"jaxpr": None, "policy": None, "prevent_cse": True}) == "remat2"
    assert replaced_by({"jaxpr": None, "policy": None, "prevent_cse": True, "something_new": 1}) is None
    fields = [
        "traced",
        "fwd",
        "bwd",
        "symbolic_zeros",
        "opt_remat",
        "with_logs",
        "remat_rules",
        "bwd_accums",
        "generic_batching",
    ]
    assert replaced_by(dict.fromkeys(fields)) == "custom_vjp_call"
    assert replaced_by({**dict.fromkeys(fields), "remat_rules": ()}) is None


@pytest.mark.skipif(not HAS_FLAGS, reason="this JAX has no such flags")
def test_another_hi_primitive_with_a_name_is_no_identity(newer):
    from jax.experimental import hijax

    class Doubled(hijax.HiPrim):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {"name": "doubled"}
            super().__init__()

        def expand(self, x):
            return 2 * x

    (eqn,) = jax.make_jaxpr(lambda x: Doubled(jax.typeof(x))(x))(X).eqns
    assert primitive_of(eqn) == "Doubled"
    assert classify("Doubled") is None
    newer(True)
    (eqn,) = jax.make_jaxpr(lambda x: checkpoint_name(x, "hidden"))(X).eqns
    assert primitive_of(eqn) == "name"
    assert classify("name") is Class.CLEAR


def test_a_rule_for_checkpoint_keeps_float32_and_is_told(newer):
    newer(True)

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defremat(lambda x, w: (x @ w, None), lambda _, x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    with pytest.warns(UserWarning, match="cannot read the primitive 'CustomVJPTraced'.* stay float32: 1"):
        program = jax.make_jaxpr(half(lambda x, w: product(x, w) @ w))(X, W)
    assert [eqn.invars[0].aval.dtype.name for eqn in equations(program) if eqn.primitive.name == "dot_general"] == [
        "float32", "bfloat16",
    ]  # fmt: skip
