"""Meshes of the four devices of the tests."""

from __future__ import annotations

import jax
from jax.sharding import AxisType

from jaxmp.inspect.compiled.collectives import collectives_of
from jaxmp.inspect.compiled.hlo import HloProgram


def mesh_of(kind=AxisType.Auto, **sizes):
    """Return a mesh with axes of one type, by default one axis "fsdp" over four devices."""
    sizes = sizes or {"fsdp": 4}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def explicit_mesh(**sizes):
    return mesh_of(AxisType.Explicit, **sizes)


def mesh_of_two_types():
    return jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Explicit))


def collectives_in(compiled):
    """Return the collectives of a compiled program."""
    return collectives_of(compiled, HloProgram(str(compiled.as_text())))
