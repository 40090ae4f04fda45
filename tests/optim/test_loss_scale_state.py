"""Loss scales are pytrees: copy, serialize, transform and convert them."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import concrete
import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from loss_scale_tools import ALL, HUGE, assert_same

from jaxmp.optim.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    as_loss_scale,
)


@pytest.mark.parametrize("scale", ALL[2:], ids=lambda scale: type(scale).__name__)
def test_the_structure_is_hashable_and_a_program_keeps_every_field(scale: LossScale) -> None:
    hash(jax.tree.structure(scale))
    assert_same(jax.jit(lambda scale: scale)(scale), scale)
    assert_same(jax.lax.scan(lambda scale, _: (scale, None), scale, None, length=2)[0], scale)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
    back = jax.vmap(lambda _, scale: scale)(concrete.arange(2), stacked)
    assert_same(jax.tree.map(lambda x: x[1], back), scale)


def test_trees_may_be_rebuilt_with_anything_as_leaves() -> None:
    for scale in ALL:
        leaves, structure = jax.tree.flatten(scale)
        for leaf in (object(), None, True, jax.ShapeDtypeStruct((), jnp.float32), PartitionSpec(), -1.0):
            rebuilt = jax.tree.unflatten(structure, [leaf] * len(leaves))
            assert structure.flatten_up_to(rebuilt) == [leaf] * len(leaves)
        assert_same(jax.tree.unflatten(structure, leaves), scale)


def test_copies_of_every_kind_are_equal() -> None:
    for scale in ALL:
        for clone in (
            copy.copy(scale),
            copy.deepcopy(scale),
            pickle.loads(pickle.dumps(scale)),
            dataclasses.replace(scale),
            flax.serialization.from_state_dict(scale, flax.serialization.to_state_dict(scale)),
        ):
            assert_same(clone, scale)


def test_restoring_brings_back_every_field_whatever_the_target_has() -> None:
    for scale in ALL:
        target = StaticLossScale(1.0) if isinstance(scale, StaticLossScale) else type(scale)()
        assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(scale)), scale)
        batched = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
        assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(batched)), batched)


def test_a_replaced_hysteresis_starts_its_countdown_or_ends_it() -> None:
    assert dataclasses.replace(DynamicLossScale(), hysteresis=2).countdown == 2
    assert dataclasses.replace(DynamicLossScale(hysteresis=2), hysteresis=1).countdown is None


def test_a_scale_can_be_made_from_traced_and_abstract_leaves() -> None:
    scale = jax.jit(lambda x: DynamicLossScale(x * 2, counter=jnp.int32(1)))(jnp.float16(16))
    assert_same(scale, DynamicLossScale(32.0, counter=1))
    abstract = jax.ShapeDtypeStruct((), jnp.float32)
    assert DynamicLossScale(abstract).loss_scale is abstract
    assert jax.eval_shape(DynamicLossScale).counter.dtype == jnp.int32


def test_python_numbers_and_half_arrays_become_float32_without_a_warning() -> None:
    for number in (2**15, 2.0**15, np.float64(2**15), jnp.float16(2**15), np.float32(2**15), True):
        scale = DynamicLossScale(number)
        assert scale.loss_scale.dtype == jnp.float32 and not scale.loss_scale.weak_type
        assert_same(scale.adjust(True), dataclasses.replace(scale, counter=1))


def test_jmps_loss_scales_are_read() -> None:
    assert as_loss_scale(jmp.NoOpLossScale()) == NoOpLossScale()
    assert as_loss_scale(jmp.StaticLossScale(jnp.float32(8))) == StaticLossScale(8.0)
    theirs = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(2), 5, 4, np.float32(0.5))
    assert_same(as_loss_scale(theirs), DynamicLossScale(8.0, 2, 5, 4, 0.5, max_loss_scale=HUGE))
