"""Check the batch of a train step and split it into microbatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxmp.base import trees as _tree


def require_examples(batch: Any) -> None:
    """Raise a ValueError if a batch has no examples.

    The gradients of an empty batch are zero, but momentum or weight decay would still change the params.
    """
    shapes = [shape for shape in map(jnp.shape, jax.tree.leaves(batch)) if shape]
    if {shape[0] for shape in shapes} == {0}:
        raise ValueError(
            f"a batch must have at least one example, got arrays of shape "
            f"{', '.join(map(str, dict.fromkeys(shapes)))}; skip empty batches"
        )


def microbatches(batch: Any, n: int) -> Any:
    """Return a batch as ``n`` microbatches, stacked along axis 0.

    Leaves of shape (batch, …) become (n, batch / n, …). Example i goes into microbatch i % n. Scalars are repeated.

    Raises:
      ValueError: leaves have different numbers of examples, or ``n`` does not divide the number of examples.
    """
    arrays = [(path, leaf) for path, leaf in jax.tree.leaves_with_path(batch) if jnp.ndim(leaf) and jnp.size(leaf)]
    lengths = [(path, len(leaf)) for path, leaf in arrays]
    for path, length in lengths:
        if length != lengths[0][1]:
            raise ValueError(
                "accumulate_steps needs arrays with the same number of examples, got "
                f"{lengths[0][1]} in {_tree.path_name(lengths[0][0])!r} and {length} in "
                f"{_tree.path_name(path)!r}; put arrays that all examples share into model_state"
            )

    def split(path: Any, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if leaf.ndim == 0:
            return jnp.broadcast_to(leaf, (n,))
        examples = leaf.shape[0]
        where = f"batch entry {_tree.path_name(path)!r}" if path else "the batch"
        if examples % n:
            raise ValueError(
                f"accumulate_steps must divide the batch, got {n} for {examples} examples in {where}; use a batch of "
                f"{n * (examples // n + 1)}, say"
            )
        return jnp.moveaxis(leaf.reshape(examples // n, n, *leaf.shape[1:]), 1, 0)

    return jax.tree.map_with_path(split, batch)
