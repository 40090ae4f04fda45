"""Places of equations, results of scopes, and evaluation with records."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from linen_zoo import numbers

import jaxmp
from jaxmp.inspect.program.borders import read_for_recording, returned
from jaxmp.inspect.program.recorded_evaluation import evaluate_and_record
from jaxmp.inspect.program.tracing import program_of
from jaxmp.program.reading import is_whole_with_rules, read_program

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]  # Flax's norms need it
X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.relu(nn.LayerNorm()(nn.Dense(4)(x))) + x, None


class Net(nn.Module):
    """A norm, a layer with remat, a layer that is called twice, and a loop of layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        x = nn.relu(nn.remat(nn.Dense)(4)(x))
        shared = nn.Dense(4, name="shared")
        x = shared(shared(x))
        blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return blocks(name="blocks")(x, None)[0]


@pytest.fixture(scope="module")
def net():
    variables = numbers(jax.eval_shape(Net().init, jax.random.key(0), X))

    def loss(params):
        y, state = Net().apply({**variables, "params": params}, X, mutable=["batch_stats"])
        return jnp.mean((y - 1) ** 2), state

    return loss, variables


def largest(*arrays):
    return [
        jnp.max(jnp.abs(array.astype(jnp.float32))) for array in arrays if jnp.issubdtype(array.dtype, jnp.floating)
    ]


class Largest:
    """Taps that record the largest magnitudes, and add the sink to the first result."""

    def at(self, key, results, sink):
        if sink is not None:
            results = [results[0] + sink.astype(results[0].dtype), *results[1:]]
        return results, largest(*results) or None


def test_a_module_returns_what_it_hands_out_call_by_call_and_statistics_are_no_result(net):
    loss, variables = net
    jaxpr, *_ = program_of(jaxmp.autocast(loss, "mixed_bfloat16"), variables["params"])
    values = returned(read_for_recording(jaxpr), [True] + [False] * (len(jaxpr.outvars) - 1))
    once = ["Dense_0", "BatchNorm_0", "CheckpointDense_0", "shared", "shared"]
    assert [(value.path, value.lengths) for value in values] == [
        *((f"Net/{name}", ()) for name in once), ("Net", ()), ("Net/blocks/Dense_0", (3,)),
        ("Net/blocks/LayerNorm_0", (3,)), ("Net/blocks", (3,)),
    ]  # fmt: skip
    # If all results count, the norm also returns its running mean and variance.
    assert [value.path for value in returned(read_for_recording(jaxpr))].count("Net/BatchNorm_0") > 1


def test_products_have_path_phase_turns_and_the_users_line(net):
    loss, variables = net
    jaxpr, *_ = program_of(jax.value_and_grad(loss, has_aux=True), variables["params"])
    products = [
        equation for equation in read_program(jaxpr).equations.values() if equation.eqn.primitive.name == "dot_general"
    ]
    # JAX does not know the caller of a Checkpoint module.
    known = [equation for equation in products if "Checkpoint" not in equation.path]
    assert {equation.source.partition(":")[0] for equation in known} == {"test_program.py"}
    forward = [equation for equation in products if equation.phase == "forward"]
    assert [equation.path.removeprefix("Net/") for equation in forward] == [
        "Dense_0", "CheckpointDense_0", "shared", "shared", "blocks/Dense_0",
    ]  # fmt: skip
    backward = [equation for equation in products if equation.phase == "backward"]
    # Each has two products, but the first layer's input has no gradient. Recomputed products may be added.
    assert {equation.path for equation in backward} == {equation.path for equation in forward}
    assert {equation.count for equation in products if "blocks" in equation.path} == {3}
    keys = list(read_program(jaxpr).equations)
    assert keys == sorted(keys)


def test_a_train_step_has_an_update_after_its_backward_pass(net):
    loss, variables = net
    tx = jaxmp.loss_scaling(optax.adam(1e-3), jaxmp.DynamicLossScale())
    state = jaxmp.TrainState.create(
        params=variables["params"], tx=tx, model_state={"batch_stats": variables["batch_stats"]}
    )
    step = jaxmp.make_train_step(lambda params, model_state, batch, rng: loss(params))
    equations = read_program(program_of(step, state, X)[0]).equations.values()
    phases = {equation.eqn.primitive.name: equation.phase for equation in equations}
    assert phases["sqrt"] == "update"  # Adam's
    assert {equation.phase for equation in equations if equation.path} == {"forward", "backward"}
    assert {equation.phase for equation in equations if equation.eqn.primitive.name == "dot_general"} == {
        "forward",
        "backward",
    }


@pytest.mark.parametrize(
    "wrapped",
    [
        jax.jit,
        lambda loss: jax.jit(lambda *args: jax.jit(loss)(*args)),
        lambda loss: loss,
        lambda loss: lambda params, x: jax.lax.cond(x[0, 0] > 0, loss, lambda params, x: jnp.sum(params), params, x),
    ],
    ids=["jitted", "jitted twice", "plain", "in a branch"],
)
def test_the_forward_pass_at_an_adversarial_input_is_forward(wrapped):
    loss = wrapped(lambda params, x: jnp.sum(jnp.tanh(x @ params)))

    def step(params, x):
        x = x + jnp.sign(jax.grad(loss, 1)(params, x))
        return params - jax.grad(loss)(params, x)

    equations = read_program(program_of(step, jnp.ones((4, 4)), X)[0]).equations.values()
    phases = {
        name: [equation.phase for equation in equations if equation.eqn.primitive.name == name]
        for name in ("tanh", "dot_general", "sign")
    }
    expected = ["forward", "backward", "forward", "backward"]
    assert phases == {"tanh": ["forward", "forward"], "dot_general": expected, "sign": ["update"]}


def test_an_evaluated_program_computes_what_it_did_and_records_every_operation(net):
    loss, variables = net
    fun = jax.value_and_grad(jaxmp.autocast(loss, "mixed_bfloat16"), has_aux=True)
    params = variables["params"]
    jaxpr, consts, tree = program_of(fun, params)
    results, records = jax.jit(lambda *args: evaluate_and_record(jaxpr, consts, args, Largest()))(
        *jax.tree.leaves(params)
    )
    evaluated = jax.tree.unflatten(tree, results)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3), evaluated, jax.jit(fun)(params))
    by_key = read_program(jaxpr).equations
    for key, magnitudes in records.items():
        for magnitude in magnitudes:
            assert magnitude.shape == by_key[key].lengths
    ruled = {
        equation.key
        for equation in by_key.values()
        if equation.bodies is not None and is_whole_with_rules(equation.eqn)
    }
    for equation in by_key.values():
        is_operation = equation.bodies is None or equation.key in ruled
        is_inside_ruled = any(equation.key[:stop] in ruled for stop in range(len(equation.key)))
        has_floating_result = any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in equation.eqn.outvars)
        if is_operation and not is_inside_ruled and has_floating_result:
            assert equation.key in records


def test_a_sink_reaches_each_turn_and_its_gradient_is_the_cotangent(net):
    loss, variables = net
    jaxpr, consts, _ = program_of(loss, variables["params"])
    leaves, by_key = jax.tree.leaves(variables["params"]), read_program(jaxpr).equations
    values = returned(read_for_recording(jaxpr), [True] + [False] * (len(jaxpr.outvars) - 1))
    zero_sinks = {
        value.key: jnp.zeros((*value.lengths, *by_key[value.key].eqn.outvars[value.position].aval.shape))
        for value in values
    }
    gradients = jax.jit(jax.grad(lambda sinks: evaluate_and_record(jaxpr, consts, leaves, Largest(), sinks)[0][0]))(
        zero_sinks
    )
    out = jax.jit(lambda params: Net().apply({**variables, "params": params}, X, mutable=["batch_stats"])[0])
    expected = 2 * (out(variables["params"]) - 1) / X.size
    net_key = next(value.key for value in values if value.path == "Net")
    blocks_key = next(value.key for value in values if value.path == "Net/blocks")
    np.testing.assert_allclose(gradients[net_key], expected, rtol=1e-5)
    np.testing.assert_allclose(gradients[blocks_key][-1], expected, rtol=1e-5)  # the last turn returns the result
    assert np.abs(np.asarray(gradients[blocks_key])).max((1, 2)).min() > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_that_was_not_taken_records_zeros_and_a_while_loop_is_one_operation(sign):
    def fun(x):
        y = jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.exp(-c[1])), (0, x))[1]
        return jax.lax.cond(x.sum() > 0, lambda y: jnp.exp(y), lambda y: jnp.sin(y) * 2, y)

    x = jnp.full(3, 0.5 * sign)
    jaxpr, consts, _ = program_of(fun, x)
    results, records = jax.jit(lambda x: evaluate_and_record(jaxpr, consts, [x], Largest()))(x)
    np.testing.assert_allclose(results[0], jax.jit(fun)(x), rtol=1e-6)
    named = {}
    for equation in read_program(jaxpr).equations.values():
        if equation.key in records:
            named.setdefault(equation.eqn.primitive.name, []).append(float(records[equation.key][0]))
    value = float(x[0])
    for _ in range(5):
        value = np.exp(-value)
    assert named["while"] == [pytest.approx(value, rel=1e-6)]
    (exp,) = named["exp"]  # the exp of the loop is not recorded
    assert (exp == 0, named["sin"][0] == 0) == ((True, False) if sign < 0 else (False, True))
