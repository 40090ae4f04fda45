"""Take the values of an NNX model's Variables out of the model, and put values into it.

In a State without Variables, ``nnx.merge`` and ``nnx.update`` read a dict of a Variable as a level of the model. The
functions of this file accept any pytree in a Variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModelForm:
    """A model without its values.

    Attributes:
      graphdef: the model without its Variables.
      paths: the paths of the Variables, and of the arrays that are in no Variable.
      structure: the structure of the parts of :func:`split_values`, with one leaf for each path.
    """

    graphdef: Any
    paths: tuple[Any, ...]
    structure: Any

    def merge(self, *parts: Any) -> Any:
        """Return the model with the values ``parts``, as :func:`split_values` returned them."""
        new_containers = jax.tree.map(lambda leaf: leaf, parts)  # the model may change a dict in place
        values = self.structure.flatten_up_to(new_containers)
        return nnx.merge(self.graphdef, nnx.FlatState(zip(self.paths, values, strict=True), sort=False))


def split_values(model: Any, *filters: Any) -> tuple[ModelForm, tuple[Any, ...]]:
    """Return a model without its values, and the values that each filter selects."""
    graphdef, *states = nnx.split(model, *filters, graph=True)
    paths = tuple(path for path, _ in _leaves(states))
    return ModelForm(graphdef, paths, _structure(states)), tuple(map(nnx.as_pure, states))


def set_values(model: Any, *parts: tuple[Any, Any]) -> None:
    """Set the Variables of a model.

    Each part is a filter and the values for the Variables that it selects, as :func:`split_values` returned them.
    """
    filters, values = zip(*parts, strict=True)
    _, *states = nnx.split(model, *filters, ..., graph=True)
    states.pop()  # of the Variables that no filter selects
    arrays = []
    for (path, leaf), value in zip(_leaves(states), _structure(states).flatten_up_to(values), strict=True):
        if isinstance(leaf, nnx.Variable):
            nnx.update(leaf, value)
        else:
            arrays.append((path, value))
    nnx.update(model, nnx.from_flat_state(arrays))


def _leaves(states: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the Variables, and the arrays that are in no Variable, with their paths."""
    return [item for state in states for item in nnx.to_flat_state(state)]


def _structure(states: Sequence[Any]) -> Any:
    """Return the structure of ``states`` with one leaf for each item of :func:`_leaves`."""
    return jax.tree.structure(tuple(states), is_leaf=lambda node: isinstance(node, nnx.Variable))
