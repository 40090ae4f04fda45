"""Notes on errors that JAX and Flax raise in a step, which say what to write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxmp._internals.jax.errors import ShardingTypeError
from jaxmp.training.state import TrainState

_EXPLICIT_AXES = (
    "The mesh has axes of type Explicit, the default of jax.make_mesh. Flax's embeddings and dropout need Auto axes: "
    "write jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
)

_MODEL_STATE = (
    "The state has no model_state. If the model has batch statistics, write TrainState.create(params=params, tx=tx, "
    'model_state={"batch_stats": variables["batch_stats"]})'
)


@contextlib.contextmanager
def error_notes(state: TrainState) -> Iterator[None]:
    """Add a note to an error about a missing random key, missing batch statistics or Explicit axes.

    Args:
      state: the train state of the step.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ShardingTypeError):
            error.add_note(_EXPLICIT_AXES)
        # Flax raises a ValueError or an InvalidRngError and JAX a TypeError. All of them speak of a PRNG key.
        if state.rng is None and state._rng_remedy is not None and "PRNG" in str(error):
            error.add_note(state._rng_remedy)
        elif state.model_state is None and isinstance(error, TypeError) and "NoneType" in str(error):
            error.add_note(_MODEL_STATE)
        raise
