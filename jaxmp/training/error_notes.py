"""A note on an error that JAX raises in a step on a mesh with Explicit axes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxmp._internals.jax.errors import ShardingTypeError

_EXPLICIT_AXES = (
    "The mesh has axes of type Explicit, the default of jax.make_mesh. Flax's embeddings and dropout need Auto axes: "
    "write jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
)


@contextlib.contextmanager
def note_for_explicit_axes() -> Iterator[None]:
    """Add a note to JAX's error about the types of mesh axes."""
    try:
        yield
    except ShardingTypeError as error:
        error.add_note(_EXPLICIT_AXES)
        raise
