"""TrainState is created, saved, restored and placed on several devices."""

from __future__ import annotations

import functools
import pickle
import re
import warnings
from typing import Any

import concrete
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import mesh_of
from optimizer_tools import bits, loss_fn, problem, same_bits, standard, train_loss
from recompiles import compiled_once

import jaxmp
from jaxmp import DynamicLossScale, StaticLossScale, TrainState, loss_scaling, make_train_step

pytestmark = pytest.mark.once  # test_step.py makes states with the newest JAX


def sgd():
    return loss_scaling(optax.sgd(0.1, momentum=0.9), DynamicLossScale(period=2))


def test_a_fresh_state_has_the_documented_fields():
    params, _ = problem()
    state = TrainState.create(apply_fn=len, params=params, tx=sgd(), model_state={"n": 1.0}, rng=0, ema=True)
    assert (state.step, state.skipped_steps) == (0, 0) and state.step.dtype == state.skipped_steps.dtype == jnp.int32
    assert state.apply_fn is len and state.model_state["n"] == 1
    assert same_bits(state.params, params) and same_bits(state.ema_params, params)
    assert same_bits(state.rng, jax.random.key(0))
    bare = TrainState.create(params=params, tx=sgd())
    assert bare.model_state is bare.ema_params is bare.rng is bare.apply_fn is None
    assert state.replace(step=state.step + 1).step == 1


def test_a_bare_optimizer_is_wrapped_so_that_it_skips_and_scales_nothing():
    params, batch = problem()
    state = TrainState.create(params=params, tx=optax.sgd(0.1))
    assert type(jaxmp.get_loss_scale(state.opt_state)) is jaxmp.NoOpLossScale
    new, metrics = make_train_step(train_loss, donate=False)(state, {**batch, "x": batch["x"] * jnp.nan})
    assert bool(metrics["skipped"]) and metrics["loss_scale"] == 1 and same_bits(new.params, state.params)


def test_a_subclass_may_have_fields_of_its_own():
    class WithCounts(TrainState):
        examples: Any = None
        name: str = flax.struct.field(pytree_node=False, default="")

    params, batch = problem()
    state = WithCounts.create(params=params, tx=sgd(), examples=concrete.zeros(()), name="run")
    state, _ = make_train_step(train_loss)(state, batch)
    assert type(state) is WithCounts and state.name == "run" and state.examples == 0
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params), examples=state.examples + 8)
    assert state.examples == 8 and state.step == 2


def test_an_optimizer_whose_state_holds_the_params_themselves_can_be_donated():
    params, batch = problem()
    params["hidden"]["b2"] = params["hidden"]["b"]  # two params are the same array

    def loss(params, *args):
        return train_loss(params, *args)

    state = TrainState.create(
        params=params, tx=loss_scaling(standard(optax.contrib.prodigy()), DynamicLossScale()), ema=True
    )
    state, _ = make_train_step(loss, ema_decay=0.9)(state, batch)
    assert state.step == 1 and same_bits(state.params["hidden"]["b2"], concrete.zeros(4))


def test_states_of_weak_type_or_numpy_are_compiled_for_once():
    params = {"weak": jnp.asarray(1.0), "numpy": np.ones(3, np.float32)}
    assert params["weak"].weak_type
    step = make_train_step(lambda p, s, b, r: (p["weak"] * jnp.sum(p["numpy"]) * b, {"n": s["n"] + 1}), ema_decay=0.9)
    state = TrainState.create(params=params, tx=sgd(), model_state={"n": 0}, ema=True)
    for _ in range(3):
        state, _ = step(state, jnp.float32(0.1))
    assert compiled_once(step) and state.model_state["n"] == 3


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.scale(-0.1)])  # the second takes no extra arguments
@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_new_state_of_the_same_optimizer_does_not_compile_the_step_again(tx, is_scaled):
    params, batch = problem()
    step = make_train_step(loss_fn)
    for seed in range(3):
        params, _ = problem(seed)
        scaled = loss_scaling(tx, DynamicLossScale(4.0)) if is_scaled else tx
        step(TrainState.create(params=params, tx=scaled), batch)
    assert compiled_once(step)


def test_a_loss_scale_of_other_numbers_is_another_optimizer():
    tx, params = optax.sgd(0.1), problem()[0]
    for scale in (DynamicLossScale(4.0), DynamicLossScale(8.0), DynamicLossScale(8.0, period=3), StaticLossScale(8.0)):
        assert same_bits(loss_scaling(tx, scale).init(params).loss_scale, scale)


def test_an_optimizer_made_in_a_trace_keeps_no_tracer():
    def updated(learning_rate):
        tx = loss_scaling(optax.sgd(learning_rate), DynamicLossScale())
        params = {"w": jnp.ones(3)}
        return tx.update(params, tx.init(params), params)[0]["w"]

    with jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(updated)(0.1), -0.1 * np.ones(3), rtol=1e-6)


def test_a_state_can_be_made_under_jit_and_abstractly():
    params, _ = problem()

    def create(params):
        return TrainState.create(params=params, tx=tx, rng=0, ema=True, model_state={"n": jnp.zeros(())})

    tx = sgd()
    assert same_bits(jax.jit(create)(params), create(params))
    shapes = jax.eval_shape(create, params)
    assert jax.tree.map(lambda x: x.shape, shapes.params) == jax.tree.map(lambda x: x.shape, params)


def test_a_state_saved_in_mid_run_continues_bit_for_bit():
    params, batch = problem()
    rng = jax.random.PRNGKey(0)  # Flax cannot save typed keys
    state = TrainState.create(params=params, tx=sgd(), model_state={"n": concrete.zeros(())}, rng=rng, ema=True)
    step = make_train_step(
        lambda p, s, b, r: (train_loss(p, s, b, r)[0], {"n": s["n"] + 1}), ema_decay=0.9, donate=False
    )
    bad = {**batch, "x": batch["x"] * jnp.inf}
    for step_batch in (batch, bad, batch):
        state, _ = step(state, step_batch)
    blank = TrainState.create(
        params=jax.tree.map(jnp.zeros_like, params), tx=state.tx, model_state={"n": concrete.ones(())}, rng=1, ema=True
    )
    end = state
    for step_batch in (bad, batch, batch):
        end, _ = step(end, step_batch)
    assert end.skipped_steps == 2
    for copy in (
        flax.serialization.from_state_dict(blank, flax.serialization.to_state_dict(state)),
        flax.serialization.from_bytes(blank, flax.serialization.to_bytes(state)),
        jax.tree.unflatten(jax.tree.structure(blank), pickle.loads(pickle.dumps(jax.tree.leaves(state)))),
    ):
        assert bits(copy) == bits(state) and copy.opt_state.loss_scale.period == 2
        for step_batch in (bad, batch, batch):
            copy, _ = step(copy, step_batch)
        assert bits(copy) == bits(end)


# ---- several devices


def sharded_state(layout, kind=AxisType.Auto):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), ()))
    rng = np.random.default_rng(0)
    params = {"hidden": {"w": rng.normal(size=(4, 8)), "b": np.zeros(8)}, "out": {"w": rng.normal(size=(8, 2))}}
    batch = {"x": rng.normal(size=(16, 4)), "y": rng.normal(size=(16, 2))}
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (params, batch))
    tx = loss_scaling(standard(optax.adam(1e-2)), DynamicLossScale())

    def create(params):
        return TrainState.create(params=params, tx=tx, model_state={"n": jnp.zeros(())}, rng=0, ema=True)

    placed = jax.device_put(params, sharded if layout == "sharded" else replicated)
    return create(placed), jax.device_put(batch, sharded), create(params), batch


@pytest.fixture
def compilations():
    """Yield a list that gets an entry for each program that XLA compiles."""
    programs: list[str] = []
    active = [True]

    def listen(event, duration, **kwargs):
        if active[0] and event == "/jax/core/compile/backend_compile_duration":
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield programs
    active[0] = False  # no public function removes a listener


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_microbatches_of_a_sharded_batch_stay_where_they_are(kind):
    state, batch, single_state, single_batch = sharded_state("replicated", kind)
    step = make_train_step(train_loss, accumulate_steps=4, ema_decay=0.9, donate=False)
    text = step.lower(state, batch).compile().as_text()
    moved = re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    assert not moved and re.search(r" all-reduce(?:-start)?\(", text)
    new, _ = step(state, batch)
    expected, _ = step(single_state, single_batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), new.params, expected.params)


def per_example(params, model_state, batch, rng):
    """Return a loss that uses one row of params for each example.

    Without out_shardings, XLA would leave the gradients of these rows sharded like the batch.
    """
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    loss = jnp.mean((hidden @ params["v"] * params["rows"] - batch["y"]) ** 2)
    return loss, {"n": model_state["n"] + 1, "mean": jnp.mean(hidden, 0)}, {"draw": jax.random.uniform(rng)}


TX = loss_scaling(optax.sgd(0.01, momentum=0.9), DynamicLossScale())


@functools.cache
def single_step(n):
    """Return a step with n microbatches for a state on one device."""
    return make_train_step(per_example, accumulate_steps=n, ema_decay=0.9, donate=False)


def placed_problem(n, mesh, layout):
    """Return a state in a layout, an equal one on one device, and their batches.

    ``n`` is the number of microbatches.
    """
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 8), "b": (8,), "v": (8, 2), "rows": (16 // n, 2)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    batch = {"x": jnp.asarray(rng.normal(size=(16, 4)), jnp.float32), "y": jnp.ones((16, 2))}
    model_state = {"n": 0.0, "mean": np.zeros(8, np.float32)}
    specs = (
        {"w": (None, "d"), "b": ("d",), "v": ("d",), "rows": ()} if layout == "sharded" else dict.fromkeys(params, ())
    )
    shardings = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}

    def create(params):
        params = jax.tree.map(jnp.array, params)
        return TrainState.create(params=params, tx=TX, rng=0, ema=True, model_state=model_state)

    state = create(params if layout in ("uncommitted", "numpy") else jax.device_put(params, shardings))
    if layout == "numpy":  # like a state that Flax restored from bytes
        state = state.replace(**jax.device_get({"params": state.params, "opt_state": state.opt_state}))
    return state, create(params), jax.device_put(batch, NamedSharding(mesh, PartitionSpec("d"))), batch


@pytest.mark.parametrize(("layout", "n"), [("sharded", 4), ("uncommitted", 1), ("numpy", 1), ("explicit", 1)])
def test_a_state_comes_back_in_the_shardings_it_came_with_and_is_compiled_for_once(layout, n, compilations):
    kind = AxisType.Explicit if layout == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[2:])
    state, single_state, batch, single_batch = placed_problem(n, mesh, layout)
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    on_all = NamedSharding(mesh, PartitionSpec())
    expected = [sharding if isinstance(sharding, NamedSharding) else on_all for sharding in shardings]
    traces = []

    def loss(*args):
        traces.append(1)
        return per_example(*args)

    step = make_train_step(loss, accumulate_steps=n, ema_decay=0.9)
    compilations.clear()
    for _ in range(2):
        before = state
        state, metrics = step(state, batch)
        for leaf, sharding in zip(jax.tree.leaves(state), expected, strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.ema_params)))
    assert len(compilations) == 1 and len(traces) == 1
    memory = step.lower(state, batch).compile().memory_analysis()
    assert len(compilations) == 1  # `lower` returned the program that had run
    arrays = jax.tree.leaves((state.params, state.ema_params, state.opt_state.inner_state))
    assert memory.alias_size_in_bytes >= sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)
    for _ in range(2):
        single_state, single_metrics = single_step(n)(single_state, single_batch)
    for name in ("params", "ema_params", "model_state", "opt_state"):
        pairs = (getattr(end_state, name) for end_state in (state, single_state))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *pairs)
    np.testing.assert_allclose(metrics["draw"], single_metrics["draw"])


def test_a_state_on_one_device_moves_to_the_mesh_of_a_later_batch(compilations):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    _, state, batch, single_batch = placed_problem(1, mesh, "uncommitted")
    step = make_train_step(per_example, ema_decay=0.9, donate=False)
    compilations.clear()
    first, _ = step(state, single_batch)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(first)} == {1}
    second, _ = step(first, batch)
    third, _ = step(second, batch)
    for leaf in jax.tree.leaves((second, third)):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 4
    again, _ = step(step(first, single_batch)[0], single_batch)  # another run on one device, in between
    assert len(compilations) == 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), third.params, again.params)


@pytest.mark.parametrize(("put", "device"), [("params", 1), ("state", 0), ("batch", 1)])
def test_uncommitted_arrays_follow_committed_ones_and_one_program_is_compiled(put, device):
    params, batch = problem()
    device = jax.devices()[device]
    if put == "params":
        params = jax.device_put(params, device)
    state, step = TrainState.create(params=params, tx=sgd(), rng=0), make_train_step(train_loss)
    state = jax.device_put(state, device) if put == "state" else state
    batch = jax.device_put(batch, device) if put == "batch" else batch
    for _ in range(3):
        state, _ = step(state, batch)
    assert compiled_once(step)
    assert {leaf.device for leaf in jax.tree.leaves(state)} == {device}


def test_a_step_on_a_mesh_also_runs_inside_another_transformation():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    state, _, batch, _ = placed_problem(1, mesh, "replicated")
    step = make_train_step(per_example, ema_decay=0.9, donate=False)
    expected, _ = step(state, batch)
    new, _ = jax.lax.scan(step, state, jax.tree.map(lambda leaf: leaf[None], batch))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), new.params, expected.params)
    assert bits(step(state, batch)[0].params) == bits(expected.params)


class WithTarget(TrainState):
    target: Any = None


@pytest.mark.parametrize(
    "shared",
    [
        lambda state: state.replace(params=state.ema_params),
        lambda state: state.replace(target={"w": state.params["w"]}, ema_params=state.params),
        lambda state: state.replace(params=state.target),
    ],
)
def test_a_state_that_has_an_array_twice_can_be_donated(shared):
    params = {"w": concrete.arange(2.0)}
    state = WithTarget.create(params=params, target=params, tx=optax.sgd(0.1), ema=True)
    steps = [
        make_train_step(lambda p, s, b, r: (jnp.sum(p["w"] ** 2) * b, s), ema_decay=0.5, donate=donate)
        for donate in (False, True)
    ]
    state = shared(steps[0](state, 1.0)[0])
    (expected, _), (got, _) = (step(state, 1.0) for step in steps)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert jnp.array_equal(a, b)
    for _ in range(2):
        got, _ = steps[1](shared(got), 1.0)
    assert steps[1].lower(got, 1.0).compile() is not None


@pytest.mark.usefixtures("standard_promotion")
def test_a_key_that_an_optimizer_holds_outlives_a_donating_step():
    key = jax.random.key(0)
    tx = loss_scaling(optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(0.1)), jaxmp.DynamicLossScale())
    step = make_train_step(lambda p, s, b, r: (jnp.sum(p**2), s))
    runs = [step(TrainState.create(params=concrete.ones(2), tx=tx), 1.0)[0].params for _ in range(2)]
    assert jnp.array_equal(*runs) and jax.random.key_data(key).shape == (2,)


@pytest.mark.parametrize("is_nnx", [False, True], ids=["Linen", "NNX"])
def test_a_step_does_not_repeat_the_warning_of_its_state(is_nnx):
    tx, losses = optax.sgd(0.1), lambda params: jnp.mean(params.astype("float32") ** 2)
    for _ in range(2):  # two runs with one optimizer
        with pytest.warns(UserWarning, match="updates below 1/512") as caught:
            if is_nnx:
                model = nnx.Linear(3, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
                optimizer = jaxmp.nnx.Optimizer(model, tx)
                step = jaxmp.nnx.make_train_step(lambda model, _: losses(model.kernel[...]))
                step(model, optimizer, 0.0)
            else:
                state = TrainState.create(params=jnp.ones(2, jnp.bfloat16), tx=tx)
                jax.eval_shape(make_train_step(lambda params, _: losses(params)), state, 0.0)
        assert len(caught) == 1


@pytest.mark.parametrize("make", ["state", "with_tx", "replace", "sharded", "nnx", "own step"])
def test_half_params_that_a_plain_optimizer_updates_are_warned_of(make):
    def warned(tx, dtype=jnp.bfloat16):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params = {"kernel": jnp.ones((3, 2), dtype), "bias": jnp.ones(2)}
            if make == "state":
                TrainState.create(params=params, tx=tx)
            elif make == "with_tx":
                TrainState.create(params=jax.tree.map(jnp.float32, params), tx=tx).replace(params=params).with_tx(tx)
            elif make == "replace":
                state = TrainState.create(params=jax.tree.map(jnp.float32, params), tx=tx).replace(params=params)
                step = make_train_step(lambda params, _: jnp.mean(params["kernel"].astype("float32") ** 2))
                jax.eval_shape(step, state, 0.0)
            elif make == "own step":
                is_scaled = "LossScalingState" in repr(tx.init(jax.tree.map(jnp.float32, params)))
                (tx if is_scaled else loss_scaling(tx, jaxmp.NoOpLossScale())).init(params)
            elif make == "sharded":
                TrainState.create_sharded(lambda: params, tx, jaxmp.sharding.Sharding(mesh_of()))
            else:
                model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
                model.kernel.set_raw_value(jnp.ones((3, 2), dtype))
                jaxmp.nnx.Optimizer(model, tx)
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    def labels(params):
        return jax.tree.map_with_path(
            lambda path, _: "kernel" if "kernel" in jax.tree_util.keystr(path) else "bias", params
        )

    adam = standard(optax.adam(1e-3))
    frozen = optax.multi_transform({"bias": adam, "kernel": optax.set_to_zero()}, labels)
    scaled = loss_scaling(adam, DynamicLossScale())
    chained = [optax.chain(optax.clip(1.0), scaled)] if make == "own step" else []
    for tx in (adam, scaled, *chained):
        (message,) = warned(tx)
        assert message.startswith(
            "updates below 1/512 of a weight are lost, because params such as 'kernel' are bfloat16"
        )
        assert "write tx = jaxmp.low_precision(tx)" in message
    assert len(warned(adam, jnp.float16)) == 1 and warned(adam, jnp.float32) == []
    stored = jaxmp.low_precision(adam, moments="bfloat16")
    for tx in (stored, frozen, loss_scaling(frozen, DynamicLossScale())):
        assert warned(tx) == []
