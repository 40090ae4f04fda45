"""The bytes that devices send in a compiled step."""

from __future__ import annotations

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import collectives_in, explicit_mesh
from stacked_layers import LAYERS, SPECS, WIDTH, a_batch, loss_on, make_params

import jaxmp
from jaxmp.inspect.compiled.groups import axis_of, groups_of
from jaxmp.sharding import Sharding


def test_collectives_of_a_gather_and_its_gradient_are_counted_by_layer():
    mesh = explicit_mesh()
    state = jaxmp.TrainState.create_sharded(make_params, optax.sgd(0.1), Sharding(mesh, SPECS))
    with jax.set_mesh(mesh):
        batch = jax.device_put(a_batch(), P("fsdp"))
        step = jaxmp.make_train_step(loss_on(SPECS, "float32"))
        collectives = collectives_in(step.lower(state, batch).compile())
    weight = 4 * WIDTH * 2 * WIDTH
    gathers = [row for row in collectives.rows if row.kind == "all-gather" and row.bytes == weight]
    assert sum(row.count for row in gathers) == 2 * LAYERS  # once for two weights in each turn: the result is kept
    assert {(row.dtype, row.axis) for row in collectives.rows} == {("float32", "fsdp")}
    assert sum(row.wire for row in gathers) == 2 * LAYERS * weight * 3 / 4
    assert f"{collectives.wire:,.0f} bytes sent by each device" in str(collectives)


def test_groups_are_read_in_each_notation_of_xla():
    notations = {
        "replica_groups={{0,1},{2,3}}": [[0, 1], [2, 3]],
        "replica_groups=[2,2]<=[4]": [[0, 1], [2, 3]],
        "replica_groups=[2,2]<=[2,2]T(1,0)": [[0, 2], [1, 3]],
        "replica_groups=mesh['a'=2,'b'=2] {'b'}": [[0, 1], [2, 3]],
        "replica_groups=mesh['a'=2,'b'=2] {'a'}": [[0, 2], [1, 3]],
        "replica_groups=mesh['a'=8] {'a':(2)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "replica_groups=mesh['a'=2,'b'=2], device_ids=[3,2,1,0] {'b'}": [[3, 2], [1, 0]],
        "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}": [[0, 2], [1, 3]],
        "replica_groups={}": [],
        "source_target_pairs={{0,1},{1,0}}": [[0, 1], [1, 0]],
    }
    assert {text: groups_of(text) for text in notations} == notations
    with pytest.raises(ValueError, match=r"XLA's notations .* got replica_groups=<4x2>; use a JAX version"):
        groups_of("all-reduce(%x), replica_groups=<4x2>, to_apply=%add")


def test_groups_of_devices_are_named_by_their_mesh_axes():
    mesh = explicit_mesh(data=2, fsdp=2)
    assert axis_of([[0, 1], [2, 3]], mesh) == "fsdp"
    assert axis_of([[0, 2], [1, 3]], mesh) == "data"
    assert axis_of([[0, 1, 2, 3]], mesh) == "data+fsdp"
    assert axis_of([[0, 1], [1, 0]], mesh) == "fsdp"
    assert axis_of([[0, 1]], None) == "2 devices"
