"""Specs: the axes that are split, the bytes on a device, and the errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import mesh_of
from stacked_layers import SPECS, make_params, shape

import jaxmp
from jaxmp import sharding

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam mixes dtypes


def test_the_largest_axis_that_divides_is_split_and_of_two_as_large_the_first():
    shapes = {"a": shape(512, 1024), "b": shape(1024, 512), "c": shape(510, 1026), "d": shape(2, 300, 1022)}
    specs = sharding.fsdp_specs({**shapes, "e": shape(512, 512)}, mesh_of())
    assert specs == {"a": P(None, "fsdp"), "b": P("fsdp"), "c": P(), "d": P(None, "fsdp"), "e": P("fsdp")}


def test_small_leaves_stay_whole():
    shapes = {"small": shape(255, 256), "large": shape(256, 256)}
    assert sharding.fsdp_specs(shapes, mesh_of()) == {"small": P(), "large": P("fsdp")}
    assert sharding.fsdp_specs(shapes, mesh_of(), min_size=1)["small"] == P(None, "fsdp")
    assert sharding.fsdp_specs(jax.eval_shape(lambda: {"scale": 0.5}), mesh_of()) == {"scale": P()}


def test_axis_0_of_stacked_leaves_is_layers():
    shapes = {"blocks": {"w": shape(1024, 64, 128), "b": shape(1024, 128)}, "head": shape(1024, 64)}
    specs = sharding.fsdp_specs(shapes, mesh_of(), min_size=8192, stacked=["blocks"])
    assert specs == {"blocks": {"w": P(None, None, "fsdp"), "b": P()}, "head": P("fsdp")}
    specs_of_blocks = sharding.fsdp_specs({"blocks": shape(512, 256, 256)}, mesh_of(), stacked="blocks")
    assert specs_of_blocks == {"blocks": P(None, "fsdp")}


def test_a_rule_is_the_whole_spec_of_all_below_and_the_first_wins():
    mesh = mesh_of(fsdp=2, tensor=2)
    shapes = {"mlp": {"up": shape(512, 1024), "down": shape(1024, 512)}, "head": shape(512, 512)}
    rules = {"mlp/up": P("fsdp", "tensor"), "**/mlp": P("tensor", "fsdp"), "head": P("fsdp"), "**": P()}
    assert sharding.fsdp_specs(shapes, mesh, rules=rules) == {
        "mlp": {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")},
        "head": P("fsdp"),
    }


def test_optimizer_and_average_follow_the_params():
    shapes = jax.eval_shape(
        lambda: jaxmp.TrainState.create(params=make_params(), tx=optax.adafactor(1e-3), ema=True, rng=0)
    )
    specs = sharding.fsdp_specs(shapes, mesh_of(), min_size=1024, stacked=["**"])
    assert specs.params == specs.ema_params == SPECS
    leaves = jax.tree.leaves_with_path(specs.opt_state, is_leaf=lambda leaf: isinstance(leaf, P))
    factored = [spec for path, spec in leaves if "v_row" in jax.tree_util.keystr(path)]
    assert factored and set(factored) == {P()}
    adam = jax.eval_shape(lambda: jaxmp.TrainState.create(params=make_params(), tx=optax.adam(1e-3)))
    inner = sharding.fsdp_specs(adam, mesh_of(), min_size=1024, stacked=["**"]).opt_state.inner_state[0]
    assert (inner.mu, inner.nu, inner.count) == (SPECS, SPECS, P())
    shapes = jax.eval_shape(lambda: jaxmp.TrainState.create(params=jnp.ones((256, 256)), tx=optax.adam(1e-3)))
    assert sharding.fsdp_specs(shapes, mesh_of()).opt_state.inner_state[0].mu == P("fsdp")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"axis": "data"}, "which has the axes 'fsdp', got 'data'"),
        ({"rules": {"**/kernal": P()}}, r"'\*\*/kernal' matches no leaf; the nearest paths: .*kernel"),
        (
            {"rules": {"**": P(), "dense/kernel": P(None, "fsdp")}},
            r"'dense/kernel' comes after '\*\*', which matches the same params; put '\*\*' last",
        ),
        ({"rules": {"type:Dense": P()}}, "must be a path, got 'type:Dense'"),
        ({"rules": {"**/kernel": P("fsdp", "fsdp")}}, "each mesh axis at most once"),
        ({"rules": {"**/kernel": P("fsdp")}}, r"got size 6 over 4 devices of 'fsdp' in 'dense/kernel'"),
    ],
)
def test_invalid_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        sharding.fsdp_specs({"dense": {"kernel": shape(6, 512)}}, mesh_of(), **options)


def test_described_bytes_are_those_that_a_device_holds():
    mesh = mesh_of(fsdp=2, tensor=2)
    shapes = {"a": shape(16, 8), "b": shape(16, 8, dtype="bfloat16"), "c": shape(3)}
    specs = {"a": P("fsdp", "tensor"), "b": P(("fsdp", "tensor")), "c": P()}
    description = sharding.describe(shapes, specs, mesh)
    arrays = jax.tree.map(
        lambda leaf, spec: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), NamedSharding(mesh, spec)),
        shapes,
        specs,
    )
    bytes_on_device = {name: array.addressable_shards[0].data.nbytes for name, array in arrays.items()}
    assert {row.path: row.bytes for row in description.rows} == bytes_on_device
    assert description.bytes == sum(bytes_on_device.values())
    assert [row.path for row in description.replicated] == ["c"]
    text = str(description)
    assert "12 in 1 leaves that every device holds whole" in text and "P('fsdp', 'tensor')" in text
    with pytest.raises(ValueError, match="got none for 'a'"):
        sharding.describe({"a": shape(4)}, {"b": P()}, mesh_of())
