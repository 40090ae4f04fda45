"""Loss scaling works under jit, scan, vmap and on several devices."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optimizer_tools import loss_fn, problem, same_bits, standard
from recompiles import compiled_once

import jaxmp
from jaxmp import DynamicLossScale, loss_scaling, value_and_grad

SCALES = [jaxmp.StaticLossScale(2.0**10), DynamicLossScale(hysteresis=2), jaxmp.HeadroomLossScale()]
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def make_step(tx):
    def step(params, state, batch):
        loss, grads = value_and_grad(loss_fn, state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def with_nan(batch):
    return {**batch, "x": batch["x"].at[0, 0].set(jnp.nan)}


def mesh_of_four(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("d",), axis_types=(kind,))


def collectives(compiled):
    text = compiled.as_text()
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}


# ---- one program on one device


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_a_step_has_no_branch_no_callback_and_no_loop():
    params, batch = problem()
    for scale in SCALES:
        tx = loss_scaling(standard(optax.adamw(1e-2)), scale)
        names = set(primitives(jax.make_jaxpr(make_step(tx))(params, tx.init(params), batch).jaxpr))
        assert "select_n" in names and "tanh" in names  # the search sees the whole step
        assert not {name for name in names if "callback" in name or name in ("cond", "while", "infeed", "outfeed")}


@pytest.mark.once
def test_fifty_steps_with_skips_are_compiled_once_and_never_touch_the_host():
    params, batch = problem()
    tx = loss_scaling(standard(optax.adamw(1e-2)), DynamicLossScale(period=7))
    step = jax.jit(make_step(tx), donate_argnums=(0, 1))
    state, bad = tx.init(params), with_nan(batch)
    params = jax.tree.map(jnp.copy, params)
    with jax.transfer_guard("disallow"):
        for i in range(50):
            params, state, _ = step(params, state, bad if i % 11 == 10 else batch)
    assert compiled_once(step)
    assert state.skipped_steps == 4
    assert state.loss_scale.loss_scale == 2.0**15  # 4 backoffs, and growth once in each 10 steps


@pytest.mark.once
def test_a_scan_over_steps_equals_the_steps():
    params, batch = problem()
    tx = loss_scaling(standard(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)), jaxmp.HeadroomLossScale())
    step = jax.jit(make_step(tx))
    batches = [batch, with_nan(batch), batch, batch]
    one_by_one, state = params, tx.init(params)
    for step_batch in batches:
        one_by_one, state, _ = step(one_by_one, state, step_batch)

    def body(carry, step_batch):
        params, state, loss = make_step(tx)(*carry, step_batch)
        return (params, state), loss

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    (scanned, scanned_state), losses = jax.jit(lambda c, b: jax.lax.scan(body, c, b))(
        (params, tx.init(params)), stacked
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), scanned, one_by_one)
    assert scanned_state.skipped_steps == state.skipped_steps == 1 and jnp.isnan(losses[1])
    assert jaxmp.get_loss_scale(scanned_state).loss_scale == jaxmp.get_loss_scale(state).loss_scale


@pytest.mark.once
def test_donating_the_state_leaves_the_optimizer_usable_for_a_second_run():
    params, batch = problem()
    loss_scale = DynamicLossScale()
    tx = loss_scaling(standard(optax.adam(1e-2)), loss_scale)
    step = jax.jit(make_step(tx), donate_argnums=1)
    ends = []
    for _ in range(2):
        state = tx.init(params)
        end, new_state, _ = step(params, state, batch)
        assert state.skipped_steps.is_deleted() and not new_state.skipped_steps.is_deleted()
        ends.append(end)
    assert same_bits(*ends) and compiled_once(step)
    assert loss_scale.loss_scale == 2.0**15  # the user's loss scale was not deleted


# ---- vmap over models, and mapped axes


def test_under_vmap_only_the_bad_model_skips():
    params, batch = problem()
    tx = loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale())
    members = jax.tree.map(lambda x: np.stack([x, 2 * np.asarray(x), 3 * np.asarray(x)]), params)
    states = jax.jit(jax.vmap(tx.init))(members)
    batches = jax.tree.map(lambda x: np.stack([x] * 3), batch)
    batches["x"][1, 0, 0] = np.inf
    new, states, _ = jax.jit(jax.vmap(make_step(tx)))(members, states, batches)
    np.testing.assert_array_equal(states.skipped_steps, [0, 1, 0])
    np.testing.assert_array_equal(jaxmp.get_loss_scale(states).loss_scale, [2.0**15, 2.0**14, 2.0**15])
    for i, unchanged in enumerate([False, True, False]):
        member = [jax.tree.map(lambda x, i=i: x[i], tree) for tree in (members, new)]
        assert same_bits(*member) == unchanged
    assert not states.inner_state[0].mu["out"]["w"][1].any()


@pytest.mark.parametrize("mapping", ["shard_map", "pmap", "vmap"])  # `make newest` runs the first case only
def test_an_infinity_on_one_device_makes_every_device_skip_and_keep_the_same_scale(mapping):
    params, _ = problem()
    scale = DynamicLossScale() if mapping == "pmap" else jaxmp.HeadroomLossScale()
    tx = loss_scaling(standard(optax.adam(1e-2)), scale, axis_name="d")
    # Each device has other gradients. Without the reduction over the axis, it would choose another scale.
    grads = jax.tree.map(lambda p: 2.0**15 * jnp.stack([p, p, p, 4 * p]), params)
    bad = {**grads, "out": {"w": grads["out"]["w"].at[2, 0, 0].set(jnp.inf)}}

    def update(grads, state):
        if mapping == "shard_map":
            grads = jax.tree.map(lambda g: g[0], grads)
        updates, state = tx.update(grads, state, params)
        if mapping == "shard_map":
            updates, state = jax.tree.map(lambda x: jnp.asarray(x)[None], (updates, state))
        return updates, state

    if mapping == "vmap":
        mapped = jax.jit(jax.vmap(update, in_axes=(0, None), axis_name="d"))
    elif mapping == "pmap":
        mapped = jax.pmap(update, in_axes=(0, None), axis_name="d")
    else:
        specs = {"in_specs": (PartitionSpec("d"), PartitionSpec()), "out_specs": PartitionSpec("d")}
        mapped = jax.jit(jax.shard_map(update, mesh=mesh_of_four(), **specs))
    updates, state = mapped(bad, tx.init(params))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(updates))
    np.testing.assert_array_equal(state.skipped_steps, [1] * 4)
    np.testing.assert_array_equal(jaxmp.get_loss_scale(state).loss_scale, [2.0**14] * 4)

    updates, state = mapped(grads, tx.init(params))
    assert all(np.asarray(leaf).any() for name, leaf in updates["out"].items())
    np.testing.assert_array_equal(state.last_finite, [True] * 4)
    scales = set(np.asarray(jaxmp.get_loss_scale(state).loss_scale).tolist())
    assert len(scales) == 1 and scales != {2.0**16}


def test_gradients_averaged_by_shard_map_keep_a_replicated_state():
    params, batch = problem()
    tx = loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale(), axis_name="d")
    specs = (PartitionSpec(), PartitionSpec(), PartitionSpec("d"))

    def step(params, state, batch):
        _, grads = value_and_grad(lambda p, b: jax.lax.pmean(loss_fn(p, b), "d"), state)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(step, mesh=mesh_of_four(), in_specs=specs, out_specs=(PartitionSpec(), PartitionSpec()))
    )
    got, state = step(params, tx.init(params), batch)
    expected, _, _ = jax.jit(
        make_step(tx_without_axis := loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale()))
    )(params, tx_without_axis.init(params), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, expected)
    _, state = step(params, tx.init(params), with_nan(batch))
    assert state.skipped_steps == 1 and state.loss_scale.loss_scale == 2.0**14


# ---- jit with sharded arrays


def sharded_problem(layout):
    """Return replicated or sharded params, and a batch sharded over examples."""
    mesh = mesh_of_four()
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), ()))
    shapes = ((4, 8), (8, 2), (16, 4), (16, 2))
    hidden, out, x, y = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in shapes)
    params = {"hidden": {"w": hidden, "b": np.zeros(8, np.float32)}, "out": {"w": out}}
    batch = {"x": x, "y": y}
    return jax.device_put(params, sharded if layout == "sharded" else replicated), jax.device_put(batch, sharded)


def test_the_update_of_sharded_params_adds_one_all_reduce_and_gathers_nothing():
    params, _ = sharded_problem("sharded")
    plain = optax.sgd(1e-2, momentum=0.9)
    wrapped = [loss_scaling(plain, scale) for scale in (DynamicLossScale(), jaxmp.HeadroomLossScale())]
    counts = [
        collectives(jax.jit(tx.update).lower(params, tx.init(params), params).compile()) for tx in (plain, *wrapped)
    ]
    none = dict.fromkeys(COLLECTIVES, 0)
    # HeadroomLossScale needs a maximum beside the sum of squares, and so a second instruction.
    assert counts == [none, none | {"all-reduce": 1}, none | {"all-reduce": 2}]


@pytest.mark.once
def test_a_sharded_step_equals_that_of_one_device_and_keeps_its_shardings():
    params, batch = sharded_problem("sharded")
    tx = loss_scaling(optax.sgd(1e-2, momentum=0.9), DynamicLossScale())
    step = jax.jit(make_step(tx))
    state, single_params, single_batch = tx.init(params), *jax.device_get((params, batch))
    single_state = tx.init(single_params)
    for step_batch, single_step_batch in (
        (batch, single_batch),
        (with_nan(batch), jax.device_get(with_nan(batch))),
        (batch, single_batch),
    ):
        new, state, _ = step(params, state, step_batch)
        single_params, single_state, _ = step(single_params, single_state, single_step_batch)
        for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True):
            assert after.sharding.is_equivalent_to(before.sharding, after.ndim)
        moment = state.inner_state[0].trace
        jax.tree.map(lambda m, p: np.testing.assert_equal(m.sharding.spec, p.sharding.spec), moment, new)
        shards = [float(shard.data) for shard in state.loss_scale.loss_scale.addressable_shards]
        assert shards == [float(single_state.loss_scale.loss_scale)] * 4
        params = new
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, single_params)
    assert state.skipped_steps == 1


def test_a_mesh_with_explicit_shardings_works_too():
    params, batch = jax.device_get(sharded_problem("sharded"))
    with jax.set_mesh(mesh_of_four(AxisType.Explicit)):
        params = jax.device_put(params, PartitionSpec())
        batch = jax.device_put(batch, PartitionSpec("d"))
        tx = loss_scaling(optax.sgd(1e-2, momentum=0.9), DynamicLossScale())
        new, _, _ = jax.jit(lambda params, batch: make_step(tx)(params, tx.init(params), batch))(params, batch)
        updates, state = jax.jit(lambda batch: tx.update(batch, tx.init(batch), batch))(batch)
    assert state.last_finite and updates["x"].sharding.is_equivalent_to(batch["x"].sharding, 2)
    assert not same_bits(new, params)
