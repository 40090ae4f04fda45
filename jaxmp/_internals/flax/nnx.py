"""What jaxmp uses of NNX that is not public: every private name of it stands here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN = "_pytree__"
"""How the names of attributes begin in which NNX keeps what it knows of an object."""
NODES, STATE = f"{OWN}nodes", f"{OWN}state"


def are_data(node: Any) -> Mapping[str, bool]:
    """Of the attributes of an object, by name, whether they are data, which transforms trace."""
    names: Mapping[str, bool] = node._pytree__nodes
    return names


def has_int_keys(node: Any) -> bool:
    """Whether the attributes of an object are the elements of a list, under their indices."""
    return bool(node._pytree__has_int_keys)


def is_pytree_class(cls: Any) -> bool:
    """Whether instances of a class are pytrees for JAX."""
    return bool(cls._pytree__is_pytree)


def check_may_change(node: Any) -> None:
    """Raises Flax's TraceContextError if an object was made outside of the transformation that runs now."""
    node._check_valid_context(lambda: f"Cannot mutate {type(node).__name__} from a different trace level")
