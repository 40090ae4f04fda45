"""jaxmp accepts jmp's objects, and users of jmp accept jaxmp's."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jmp as real
import numpy as np
import optax
import pytest
from linen_zoo import products, quick_jit
from optimizer_tools import problem as train_problem
from optimizer_tools import same_bits, standard, train_loss

import jaxmp
from jaxmp import jmp

pytestmark = pytest.mark.once

F32, F16 = np.dtype(np.float32), np.dtype(np.float16)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2, name="head")(nn.tanh(nn.Dense(8, name="body")(x)))


X = jnp.float32(np.random.default_rng(0).normal(size=(8, 3)))
MIXED, FULL = "p=f32,c=f16,o=f32", "full"


# --- jmp's objects here -----------------------------------------------------------------------------------------------


def test_a_policy_of_jmps_is_taken_by_get_policy_and_policy_map():
    for module in (real, jmp):
        policy, full = module.get_policy(MIXED), module.get_policy(FULL)
        assert jaxmp.get_policy(policy) == jaxmp.get_policy("mixed_float16")
        policies = jaxmp.PolicyMap(policy, {"head": full})
        assert policies == jaxmp.PolicyMap("mixed_float16", {"head": "p=f32"})
        assert hash(policies) == hash(jaxmp.PolicyMap("mixed_float16", {"head": "p=f32"}))
        assert jaxmp.get_policy(str(policies)) == policies
        assert jaxmp.PolicyMap(policies, {"body": full}).resolve(("body",))[0] == jaxmp.get_policy("p=f32")


def test_a_policy_of_jmps_is_taken_by_linen_as_policy_and_as_override():
    def programs(policy: Any, full: Any) -> tuple[str, list[str]]:
        model = jaxmp.linen.apply_policy(Net(), policy, {"head": full})
        variables = jax.eval_shape(model.init, jax.random.key(0), X)
        return str(jax.make_jaxpr(model.apply)(variables, X)), products(model.apply, variables, X)

    of_jmp = programs(real.get_policy(MIXED), real.get_policy(FULL))
    assert of_jmp == programs("mixed_float16", "p=f32")
    assert of_jmp[1] == ["float16", "float32"]


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        (real, "NoOpLossScale", ()),
        (jmp, "StaticLossScale", (jnp.float32(8.0),)),
        (real, "DynamicLossScale", (jnp.float32(2.0**20), jnp.int32(1), 3, 4, np.float32(2.0**18))),
    ],
)
def test_a_loss_scale_of_jmps_is_taken_by_the_optimizer_the_train_state_and_the_train_step(module, name, arguments):
    step, adam = jaxmp.make_train_step(train_loss), standard(optax.adam(1e-2))

    def run(scale: Any) -> Any:
        params, batch = train_problem()
        state = jaxmp.TrainState.create(params=params, tx=jaxmp.loss_scaling(adam, scale), rng=0)
        metrics = []
        for factor in (1.0, 1.0, np.nan, 1.0):
            scaled = jax.tree.map(lambda x, factor=factor: x * jnp.asarray(factor, x.dtype), batch)
            state, more = step(state, scaled)
            metrics.append(more)
        final_scale = jaxmp.get_loss_scale(state.opt_state)
        return state.params, final_scale.loss_scale, metrics[2]["skipped"], state.skipped_steps

    got = run(getattr(module, name)(*arguments))
    limits = {"max_loss_scale": np.finfo(np.float32).max} if name == "DynamicLossScale" else {}  # jmp has none
    assert same_bits(got, run(getattr(jaxmp, name)(*arguments, **limits)))
    assert got[2] and got[3] == 1


# --- jaxmp's objects in Haiku -----------------------------------------------------------------------------------------


def linear(policy: Any, kind: type[hk.Module] = hk.Linear) -> tuple[Any, jax.Array, Any]:
    """Return params, output and gradients of a Haiku network under ``policy``.

    Only its modules of ``kind`` have the policy.
    """

    def forward(x: jax.Array) -> jax.Array:
        return hk.Sequential([hk.Linear(8), jnp.tanh, hk.Linear(2)])(x)

    network = hk.without_apply_rng(hk.transform(forward))

    @quick_jit
    def run(key: jax.Array) -> Any:
        params = network.init(key, X)
        grads = jax.grad(lambda params: jnp.sum(network.apply(params, X).astype(jnp.float32)))(params)
        return params, network.apply(params, X), grads

    with hk.mixed_precision.push_policy(kind, policy):
        result: tuple[Any, jax.Array, Any] = run(jax.random.PRNGKey(0))
    return result


POLICIES = [
    (jmp.get_policy("c=f16,o=f32").with_output_dtype(jnp.bfloat16), "p=f32,c=f16,o=bf16", hk.Linear),
    (jaxmp.get_policy("float16"), "half", hk.Sequential),
]


@pytest.mark.parametrize(("policy", "text", "kind"), POLICIES, ids=[text for _, text, _ in POLICIES])
def test_haiku_gives_the_same_bits_under_a_policy_of_jaxmps_as_under_jmps(policy, text, kind):
    got = linear(policy, kind)
    assert same_bits(got, linear(real.get_policy(text), kind))
    params, out, grads = got
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {policy.param_dtype}
    assert out.dtype == policy.output_dtype
    assert hk.mixed_precision.get_policy(kind) is None
