"""A user's own loss scale: in a train step, in NNX, pickled, saved by Flax."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

import concrete
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from loss_scale_tools import assert_same
from optimizer_tools import problem, train_loss
from recompiles import compiled_once

import jaxmp
from jaxmp import DynamicLossScale, LossScale, TrainState, loss_scaling, make_train_step

pytestmark = pytest.mark.once


@dataclasses.dataclass(frozen=True)
class Data(LossScale):
    loss_scale: Any = 2.0**10
    bad: Any = 0
    floor: float = 1.0
    kind: str = "data"

    static_fields = ("kind",)

    def adjust(self, grads_finite: Any, grad_max: Any = None) -> Data:
        scale = jnp.where(grads_finite, self.loss_scale, jnp.maximum(self.loss_scale / 2, self.floor))
        return dataclasses.replace(self, loss_scale=scale, bad=self.bad + jnp.where(grads_finite, 0, 1))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["loss_scale"], meta_fields=["kind"])
@dataclasses.dataclass
class Registered(LossScale):
    """A class that its author registered as a pytree."""

    loss_scale: Any = 2.0**10
    kind: str = "registered"

    def adjust(self, grads_finite: Any, grad_max: Any = None) -> Registered:
        return Registered(jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2), self.kind)


class Struct(flax.struct.PyTreeNode, LossScale):
    """A class that is a pytree of Flax, which Flax can save."""

    loss_scale: Any = 2.0**10
    kind: str = flax.struct.field(pytree_node=False, default="struct")

    def adjust(self, grads_finite: Any, grad_max: Any = None) -> Struct:
        return self.replace(loss_scale=jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2))


@dataclasses.dataclass(frozen=True)
class Counting(DynamicLossScale):
    """A subclass of DynamicLossScale with one more field."""

    bad: Any = dataclasses.field(default=0, kw_only=True)

    def adjust(self, grads_finite: Any, grad_max: Any = None) -> Counting:
        new = super().adjust(grads_finite, grad_max)
        return dataclasses.replace(new, bad=self.bad + jnp.where(grads_finite, 0, 1))


@dataclasses.dataclass(frozen=True)
class Fixed(LossScale):
    loss_scale: Any = 2.0**10


FALLING = [Data, Registered, Struct, functools.partial(Counting, 2.0**10)]
every_falling = pytest.mark.parametrize("make", FALLING, ids=lambda make: getattr(make, "__name__", "Counting"))


@pytest.mark.parametrize("make", [Data, Registered, FALLING[-1]])
def test_a_train_step_with_a_custom_scale_compiles_once_and_skips(make):
    params, batch = problem()
    step = make_train_step(train_loss, donate=False, max_consecutive_skips=3)
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.1), make()))
    bad = {**batch, "x": batch["x"] * jnp.nan}
    scales = []
    for step_batch in (batch, bad, batch, bad):
        state, metrics = step(state, step_batch)
        scales.append(float(metrics["loss_scale"]))
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9] and state.skipped_steps == 2
    assert compiled_once(step)
    scanned, _ = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.stack([x, x]), bad))
    assert jaxmp.get_loss_scale(scanned.opt_state).loss_scale == 2.0**6
    assert type(jaxmp.get_loss_scale(scanned.opt_state)) is type(make())


@every_falling
def test_a_custom_scale_is_pickled_and_saved_by_flax_in_mid_run(make):
    tx = loss_scaling(optax.sgd(0.1), make())
    fresh = tx.init(concrete.ones(2))
    _, state = jax.jit(tx.update)(concrete.full(2, jnp.inf), fresh, concrete.ones(2))
    assert state.loss_scale.loss_scale == 2.0**9
    leaves, _ = jax.tree.flatten(state)
    assert len(leaves) == len(jax.tree.leaves(fresh)) and all(isinstance(leaf, jax.Array) for leaf in leaves)
    for back in (
        pickle.loads(pickle.dumps(state)),
        flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state)),
        flax.serialization.from_state_dict(fresh, flax.serialization.to_state_dict(state)),
    ):
        assert_same(back, state)
        _, again = jax.jit(tx.update)(concrete.full(2, jnp.inf), back, concrete.ones(2))
        assert again.loss_scale.loss_scale == 2.0**8


@pytest.mark.parametrize("make", [Data, Fixed])
def test_an_nnx_optimizer_takes_a_custom_scale(make):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), loss_scale=make())

    @nnx.jit
    def step(model, optimizer, x):
        _, grads = jaxmp.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2), optimizer)(model)
        optimizer.update(model, grads)

    for x in (concrete.ones((3, 2)), concrete.full((3, 2), jnp.nan), concrete.ones((3, 2))):
        step(model, optimizer, x)
    assert optimizer.skipped_steps == 1 and optimizer.loss_scale == (2.0**10 if make is Fixed else 2.0**9)


def test_a_custom_scale_that_never_changes_stops_a_stuck_run():
    params, batch = problem()
    step = make_train_step(train_loss, max_consecutive_skips=2)
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.1), Fixed()))
    bad = {**batch, "x": batch["x"] * jnp.nan}
    with pytest.raises(jaxmp.NonFiniteTrainingError, match="2 steps in a row were skipped, and the loss scale 1024"):
        for _ in range(9):
            state, metrics = step(state, bad)
            jax.block_until_ready(metrics)


def test_a_state_of_another_class_is_refused_by_name():
    with pytest.raises(
        ValueError, match=r"the state of a Data has the entries \['bad', 'floor', 'kind', 'loss_scale'\]"
    ):
        flax.serialization.from_state_dict(Data(), flax.serialization.to_state_dict(Registered()))


def test_a_scale_that_is_no_positive_scalar_trains_nothing():
    for scale, kind in ((concrete.ones(2), TypeError), ("text", TypeError)):
        with pytest.raises(kind):
            opt_state = loss_scaling(optax.sgd(0.1), Fixed(scale)).init(concrete.ones(2))
            jaxmp.value_and_grad(jnp.sum, opt_state)(concrete.ones(2))
    tx = loss_scaling(optax.sgd(0.1), Fixed(0.0))
    _, grads = jaxmp.value_and_grad(jnp.sum, tx.init(concrete.ones(2)))(concrete.ones(2))
    _, opt_state = tx.update(grads, tx.init(concrete.ones(2)))
    assert opt_state.skipped_steps == 1


def test_a_scale_that_starts_from_an_int_is_a_float():
    params, batch = problem()
    state = TrainState.create(params=params, tx=loss_scaling(optax.sgd(0.1), Data(1024)))
    assert state.opt_state.loss_scale.loss_scale.dtype == jnp.float32
    step = make_train_step(train_loss)
    for _ in range(2):
        state, _ = step(state, batch)
    assert compiled_once(step)
    jax.lax.scan(make_train_step(train_loss), state, jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), batch))
