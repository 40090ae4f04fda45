"""Find arrays that were deleted because they were donated to an earlier step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from jaxmp.base.trees import path_name

_REMEDY = (
    "An earlier train step may have donated this array. Use the state that the step returned, or write "
    "make_train_step(..., donate=False)"
)


def is_deleted(tree: Any) -> bool:
    """Return whether an array of ``tree`` was deleted, for example by a donation."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return any(leaf.is_deleted() for leaf in arrays if not isinstance(leaf, jax.core.Tracer))


def require_not_deleted(state: Any, error: BaseException | None = None, remedy: str | None = None) -> None:
    """Raise an error if an array of ``state`` was donated to an earlier step.

    Args:
      state: a state, or any tree.
      error: the error that JAX raised for the array, or None. The new error is raised from this error.
      remedy: the remedy in the message. By default, that of the state.

    Raises:
      RuntimeError: an array was donated. The message has the path of the array.
    """
    leaves = jax.tree.leaves_with_path(state)
    deleted = next((path for path, leaf in leaves if is_deleted(leaf)), None)
    if deleted is not None:
        remedy = remedy or getattr(state, "_to_copy", "use the state that the step returned")
        raise RuntimeError(
            f"{path_name(deleted)!r} was donated to an earlier step, which deleted it; {remedy}, or write "
            "make_train_step(..., donate=False)"
        ) from error


@contextlib.contextmanager
def donation_note() -> Iterator[None]:
    """Add a note to JAX's error for a deleted array.

    Under ``jax.grad``, the array is inside of a tracer, where :func:`require_not_deleted` does not see it.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        is_noted = _REMEDY in getattr(error, "__notes__", ())
        if "has been deleted" in str(error) and not is_noted:
            error.add_note(_REMEDY)
        raise
