"""States that a step returned and nobody has read yet: they are lists of leaves, which nobody may be able to tell."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any, Protocol, runtime_checkable

import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from optimizer_tools import bits, problem, same_bits, train_loss
from recompiles import compiled_once

import jaxmp
from jaxmp import DynamicLossScale, TrainState, _flattened, loss_scaling, make_train_step

pytestmark = pytest.mark.once


TX = loss_scaling(optax.sgd(0.1, momentum=0.9), DynamicLossScale(period=2))


def start(cls=TrainState, **fields):
    return cls.create(params=problem()[0], tx=TX, rng=0, **fields)


def is_unread(state):
    return "params" not in vars(state)


@pytest.fixture(scope="module")
def step():
    return make_train_step(train_loss, donate=False)


@pytest.fixture(scope="module")
def batch():
    return problem()[1]


@pytest.fixture(scope="module")
def expected(step, batch):
    """What the step makes of the start, by the jitted function of trees, which knows no such states."""
    return step.jitted(start(), batch)[0]


READS = {
    "a field": lambda state: state.params,
    "the leaves": jax.tree.leaves,
    "a map": lambda state: jax.tree.map(jnp.copy, state),
    "replace": lambda state: state.replace(apply_fn=None),
    "dataclasses": lambda state: [getattr(state, field.name) for field in dataclasses.fields(state)],
    "the text": repr,
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "a state dict": flax.serialization.to_state_dict,
    "bytes": lambda state: flax.serialization.to_bytes(state.replace(rng=None)),
    "a method": lambda state: state.with_tx(state.tx),
    "a jitted function": lambda state: jax.jit(lambda state: state.step + 1)(state),
}


@pytest.mark.parametrize("name", READS)
def test_reading_makes_the_state_that_it_is(step, batch, expected, name):
    state, _ = step(start(), batch)
    assert is_unread(state) and type(state) is TrainState and isinstance(state, jaxmp.TrainState)
    got = READS[name](state)
    assert not is_unread(state) and vars(state).keys() == vars(expected).keys()
    assert same_bits(state, expected) and jax.tree.structure(state) == jax.tree.structure(expected)
    if isinstance(got, TrainState):
        assert not is_unread(got) and same_bits(got, expected)
    if name == "the text":
        assert got.startswith("TrainState(step=Array(1")


def test_a_state_that_is_not_read_goes_from_step_to_step_and_its_counters_are_read_without_building_it(batch):
    step, other = (make_train_step(train_loss) for _ in range(2))
    state, same = start(), start()
    for number in range(6):
        batch_now = {**batch, "x": batch["x"] * (jnp.nan if number == 3 else 1)}
        state, metrics = step(state, batch_now)
        assert is_unread(state)
        same, expected = other.jitted(same, batch_now)
        assert same_bits(metrics, expected)
    assert (state.step, state.skipped, state.stuck) == (6, 1, 0) and is_unread(state)
    assert same_bits(state, same)
    for _ in range(2):  # one that was read is no other program
        state, _ = step(state, batch)
        assert state.params
    assert compiled_once(step)


def test_what_is_changed_in_place_in_a_state_is_what_the_next_step_gets(step, batch):
    state, _ = step(start(), batch)
    state.params["hidden"]["b"] = jnp.full(4, 7.0)
    by_hand = step.jitted(state, batch)[0]
    assert same_bits(step(state, batch)[0], by_hand)
    assert not same_bits(by_hand.params["hidden"]["b"], step(step(start(), batch)[0], batch)[0].params["hidden"]["b"])


def test_two_steps_hand_on_an_unread_state_to_each_other(batch):
    one, two = (make_train_step(train_loss) for _ in range(2))
    state, by_hand = start(), start()
    for step in (one, two, one, two):
        state, by_hand = step(state, batch)[0], one.jitted(by_hand, batch)[0]
    assert is_unread(state) and same_bits(state, by_hand) and compiled_once(one) and compiled_once(two)


def test_a_donated_state_that_was_never_read_is_gone_as_every_other(batch):
    step = make_train_step(train_loss)
    first, _ = step(start(), batch)
    second, _ = step(first, batch)
    with pytest.raises(RuntimeError, match="a state can be given to a donating step once only, but 'step'"):
        step(first, batch)
    assert second.step == 2 and all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))


def test_unread_states_inside_transformations(step, batch, expected):
    def twice(state, batch):
        return step(step(state, batch)[0], batch)[0]

    by_hand = step.jitted(expected, batch)[0]
    assert jax.tree.map(jnp.shape, jax.eval_shape(twice, start(), batch)) == jax.tree.map(jnp.shape, by_hand)
    looped, _ = jax.lax.scan(lambda state, _: (step(state, batch)[0], None), start(), None, length=2)
    batches = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), batch)
    mapped = jax.vmap(twice, (None, 0))(start(), batches)
    for state in (jax.jit(twice)(start(), batch), looped, jax.tree.map(lambda leaf: leaf[1], mapped)):
        for leaf, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(by_hand.params), strict=True):
            assert jnp.allclose(leaf, other, rtol=1e-5, atol=1e-6)
        assert state.step == 2


def test_an_unread_state_can_be_pickled():
    state = TrainState.create(params=problem()[0], tx=TX).replace(tx=None)  # which is made of functions of functions
    unread = _flattened.flattened(state).lazy()
    assert is_unread(unread)
    again = pickle.loads(pickle.dumps(unread))
    assert not is_unread(again) and same_bits(again, state)


def test_threads_may_read_one_state_at_once(step, batch, expected):
    for _ in range(20):
        state, _ = step(start(), batch)
        found, barrier = list[Any](), threading.Barrier(8)

        def read(state=state, found=found, barrier=barrier):
            barrier.wait()
            found.append(bits(state.params["hidden"]["b"]))

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [bits(expected.params["hidden"]["b"])] * 8


@runtime_checkable
class HasParams(Protocol):
    params: Any


def test_an_unread_state_has_the_attributes_of_a_state(step, batch):
    state, _ = step(start(), batch)
    assert {"params", "opt_state", "step", "replace"} <= {*dir(state)}
    assert not hasattr(state, "nothing") and is_unread(state) and isinstance(state, HasParams)
    with pytest.raises(AttributeError, match="'TrainState' object has no attribute 'nothing'"):
        _ = state.nothing
    assert not hasattr(TrainState, "params")


def test_what_is_set_in_spite_of_all_stays(step, batch):
    state, _ = step(start(), batch)
    params = jax.tree.map(jnp.zeros_like, start().params)
    object.__setattr__(state, "params", params)
    assert same_bits(step(state, batch)[0], step.jitted(state.replace(params=params), batch)[0])
    assert state.params is params and state.opt_state is not None and state.params is params


class WithDefaults(TrainState):
    seen: Any = None
    name: str = flax.struct.field(pytree_node=False, default="")


class WithOtherDefaults(WithDefaults):
    name: str = flax.struct.field(pytree_node=False, default="other")
    params: dict[str, Any]


class WithProperty(TrainState):
    @property
    def size(self):
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def broken(self):
        return self.not_there


class WithAttributes(TrainState):
    def __getattr__(self, name):
        if name == "more":
            return "more"
        raise AttributeError(name)


class WithState(TrainState):
    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name not in ("tx", "apply_fn")}

    def __setstate__(self, state):
        self.__dict__.update(state, tx=None, apply_fn=None)


def test_subclasses_find_their_own(step, batch):
    state, _ = step(start(WithDefaults, seen=jnp.ones(()), name="run"), batch)
    assert is_unread(state) and (state.name, state.seen, state.step) == ("run", 1, 1)
    assert (WithDefaults.seen, WithDefaults.name, WithOtherDefaults.name) == (None, "", "other")
    state, _ = step(start(WithOtherDefaults), batch)
    assert is_unread(state) and (state.name, state.seen, state.step) == ("other", None, 1)
    state, _ = step(start(WithProperty), batch)
    assert is_unread(state) and state.size == sum(leaf.size for leaf in jax.tree.leaves(problem()[0]))
    with pytest.raises(AttributeError, match=r"has no attribute '(broken|not_there)'"):
        _ = step(start(WithProperty), batch)[0].broken
    state, _ = step(start(WithAttributes), batch)
    assert state.more == "more" and state.step == 1 and not hasattr(state, "less")
    state, _ = step(start(WithState), batch)
    assert pickle.loads(pickle.dumps(state)).tx is None and copy.copy(state).tx is None and state.tx is TX


def test_errors_and_programs_name_the_leaves_of_the_state(batch):
    def branching(params, model_state, batch, rng):
        if params["out"]["w"][0, 0] > 0:
            return train_loss(params, model_state, batch, rng)
        raise AssertionError

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument state\.params\['out'\]\['w'\]"):
        make_train_step(branching)(start(), batch)
    step = make_train_step(train_loss)
    state = start()
    with pytest.raises(TypeError, match=r"state\.params\['more'\]"):
        step(state.replace(params={**state.params, "more": "text"}), batch)
    assert "state.params['out']['w']" in step.lower(state, batch).as_text(debug_info=True)
    with pytest.raises(TypeError, match=r"a step takes a jaxmp.TrainState and a batch, got dict as the state"):
        step(batch, state)
    for use in (step, step.lower):
        with pytest.raises(
            TypeError, match=r"takes a jaxmp.TrainState and a batch, got float32 of shape \(8, 3\) as the state"
        ):
            use(batch["x"], state)


def test_a_program_that_is_lowered_goes_by_the_state_it_is_given_and_not_by_the_last_one(batch):
    step = make_train_step(train_loss, donate=False)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    text = step.lower(start(), batch).as_text()
    step(jax.device_put(start(), whole), jax.device_put(batch, whole))
    assert step.lower(start(), batch).as_text() == text
