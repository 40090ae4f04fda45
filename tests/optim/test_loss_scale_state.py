"""Loss scales as objects: pytrees, copies, serialization, transformations, and those of jmp."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from loss_scale_tools import ALL, HUGE, assert_same, every_scale

from jaxmp.optim.loss_scale import (
    DynamicLossScale,
    HeadroomLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    as_loss_scale,
)


def test_leaves_are_the_scale_and_the_counter_and_a_countdown_only_with_hysteresis() -> None:
    names = {
        kind: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(scale)]
        for kind, scale in zip(["none", "static", "plain", "hysteresis", "headroom"], ALL, strict=True)
    }
    assert names == {
        "none": [],
        "static": [],
        "plain": [".loss_scale", ".counter"],
        "hysteresis": [".loss_scale", ".counter", ".countdown"],
        "headroom": [".loss_scale", ".running_max"],
    }


@every_scale
def test_the_structure_is_hashable_and_a_program_keeps_every_field(scale: LossScale) -> None:
    hash(jax.tree.structure(scale))
    assert_same(jax.jit(lambda scale: scale)(scale), scale)
    assert_same(jax.lax.scan(lambda scale, _: (scale, None), scale, None, length=2)[0], scale)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
    back = jax.vmap(lambda _, scale: scale)(jnp.arange(2), stacked)
    assert_same(jax.tree.map(lambda x: x[1], back), scale)


@every_scale
@pytest.mark.parametrize("leaf", [object(), None, True, jax.ShapeDtypeStruct((), jnp.float32), PartitionSpec(), -1.0])
def test_trees_may_be_rebuilt_with_anything_as_leaves(scale: LossScale, leaf: Any) -> None:
    leaves, structure = jax.tree.flatten(scale)
    rebuilt = jax.tree.unflatten(structure, [leaf] * len(leaves))
    assert structure.flatten_up_to(rebuilt) == [leaf] * len(leaves)
    assert_same(jax.tree.unflatten(structure, leaves), scale)


@every_scale
def test_copies_of_every_kind_are_equal(scale: LossScale) -> None:
    for clone in (
        copy.copy(scale),
        copy.deepcopy(scale),
        pickle.loads(pickle.dumps(scale)),
        dataclasses.replace(scale),
        flax.serialization.from_state_dict(scale, flax.serialization.to_state_dict(scale)),
        flax.serialization.from_bytes(scale, flax.serialization.to_bytes(scale)),
    ):
        assert_same(clone, scale)


def test_a_copy_with_another_static_field_keeps_it() -> None:
    rebuilt = jax.tree.map(lambda leaf: leaf, DynamicLossScale(period=2000))
    clone = copy.copy(rebuilt)
    object.__setattr__(clone, "period", 7)
    assert jax.tree.map(lambda leaf: leaf, clone).period == 7
    object.__setattr__(clone, "note", "more")
    assert jax.tree.map(lambda leaf: leaf, clone).note == "more"
    assert jax.tree.map(lambda leaf: leaf, rebuilt).period == 2000


@every_scale
def test_restoring_brings_back_every_field_whatever_the_target_has(scale: LossScale) -> None:
    target = StaticLossScale(1.0) if isinstance(scale, StaticLossScale) else type(scale)()
    assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(scale)), scale)
    batched = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
    assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(batched)), batched)


def test_restoring_the_state_of_another_loss_scale_says_so() -> None:
    state = flax.serialization.to_state_dict(StaticLossScale(2.0))
    with pytest.raises(ValueError, match=r"the state of a DynamicLossScale has the entries \['backoff'.*restore it"):
        flax.serialization.from_state_dict(DynamicLossScale(), state)


def test_loss_scales_are_registered_with_flax_where_their_classes_are_made_and_no_finder_waits_for_it() -> None:
    program = """
import sys
from jaxmp import DynamicLossScale
assert not any(type(finder).__module__.startswith("jaxmp") for finder in sys.meta_path), "a hook on imports"
from flax.serialization import to_state_dict
assert to_state_dict(DynamicLossScale(8.0, period=5))["period"] == 5
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_replace_validates() -> None:
    with pytest.raises(ValueError, match="factor must be a finite number above 1"):
        dataclasses.replace(DynamicLossScale(), factor=0.5)
    assert dataclasses.replace(DynamicLossScale(), hysteresis=2).countdown == 2
    assert dataclasses.replace(DynamicLossScale(hysteresis=2), hysteresis=1).countdown is None


def test_members_of_a_population_have_their_own_scale() -> None:
    flags = jnp.array([True, False, True])
    shared = jax.vmap(DynamicLossScale(8.0, period=1).adjust)(flags)
    assert shared.loss_scale.tolist() == [16, 4, 16]
    own = jax.vmap(lambda scale, flag: scale.adjust(flag))(shared, ~flags)
    assert own.loss_scale.tolist() == [8, 8, 8]
    headroom = jax.vmap(lambda flag, largest: HeadroomLossScale().adjust(flag, largest))(flags, jnp.ones(3))
    assert headroom.loss_scale.tolist() == [2048, 2.0**14, 2048]


@every_scale
def test_a_step_neither_branches_nor_calls_the_host(scale: LossScale) -> None:
    program = str(
        jax.make_jaxpr(lambda scale, finite, x: (scale.adjust(finite, x), scale.unscale(x)))(scale, True, 1.0)
    )
    assert not any(word in program for word in ("cond", "while", "callback"))


@every_scale
def test_a_changing_scale_is_traced_once(scale: LossScale) -> None:
    traces = 0

    @jax.jit
    def step(scale: LossScale, finite: jax.Array, x: jax.Array) -> tuple[LossScale, jax.Array]:
        nonlocal traces
        traces += 1
        return scale.adjust(finite, jnp.float32(1)), scale.unscale(scale.scale(x))

    for i in range(6):
        scale, _ = step(scale, jnp.array(i % 3 == 0), jnp.ones(2))
    assert traces == 1


@every_scale
def test_donating_a_scale_works(scale: LossScale) -> None:
    scale = jax.tree.map(jnp.array, scale)
    step = jax.jit(lambda scale: scale.adjust(True, 1.0), donate_argnums=0)
    for _ in range(2):
        scale = step(scale)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(scale))


def test_a_scale_can_be_made_from_traced_and_abstract_leaves() -> None:
    made = jax.jit(lambda x: DynamicLossScale(x * 2, counter=jnp.int32(1)))(jnp.float16(16))
    assert_same(made, DynamicLossScale(32.0, counter=1))
    abstract = jax.ShapeDtypeStruct((), jnp.float32)
    assert DynamicLossScale(abstract).loss_scale is abstract
    assert jax.eval_shape(DynamicLossScale).counter.dtype == jnp.int32


def test_jmps_loss_scales_are_read() -> None:
    assert as_loss_scale(jmp.NoOpLossScale()) == NoOpLossScale()
    assert as_loss_scale(jmp.StaticLossScale(jnp.float32(8))) == StaticLossScale(8.0)
    theirs = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(2), 5, 4, np.float32(0.5))
    assert_same(as_loss_scale(theirs), DynamicLossScale(8.0, 2, 5, 4, 0.5, max_loss_scale=HUGE))


def test_a_loss_scale_is_returned_as_it_is_and_anything_else_refused() -> None:
    for scale in ALL:
        assert as_loss_scale(scale) is scale
        assert isinstance(scale, LossScale)
    with pytest.raises(
        TypeError, match=r"a loss scale must be one of jaxmp's or jmp's, got 32768\.0; write jaxmp\.loss_scaling"
    ):
        as_loss_scale(2.0**15)
