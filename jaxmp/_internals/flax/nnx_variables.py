"""The Variables and submodules of NNX modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jaxmp._internals.flax.nnx import OWN
from jaxmp.base import trees as _tree


def is_object(value: Any) -> bool:
    """Return whether a value is an object of NNX.

    Some of these objects are also pytrees for JAX.
    """
    return isinstance(value, (nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef))


def is_node(value: Any) -> bool:
    """Return whether a value is a Variable or a module.

    NNX's transforms take these objects as arguments, and change them.
    """
    return isinstance(value, (nnx.Pytree, nnx.Variable))


@functools.cache
def is_container_class(cls: Any) -> bool:
    """Return whether instances of ``cls`` are only containers, such as ``nnx.List``."""
    is_container = not issubclass(cls, nnx.Module) or issubclass(cls, (nnx.List, nnx.Dict))
    return is_container and not any("__call__" in vars(base) for base in cls.__mro__)


def is_module(node: Any) -> bool:
    """Return whether ``node`` is a module, and not only a container.

    Flax counts some containers as modules.
    """
    cls: Any = type(node)
    return isinstance(node, nnx.Module) and not is_container_class(cls)


def items(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in a module, or in a container of NNX or JAX."""
    if isinstance(node, nnx.Pytree):
        yield from ((str(name), value) for name, value in vars(node).items() if not name.startswith(OWN))
    elif not is_object(node):
        for path, value in jax.tree.leaves_with_path(node, is_leaf=lambda leaf: leaf is not node):
            if path:
                yield _tree.path_name(path), value


def _values_in(node: Any) -> Iterator[Any]:
    """Yield the values in a module and in the module's containers.

    A submodule is yielded, but the values in it are not.
    """
    for _, value in items(node):
        yield value
        if not is_module(value):
            yield from _values_in(value)


def own_variables(node: Any) -> list[nnx.Variable[Any]]:
    """Return the Variables of a module, without those of its submodules."""
    return [value for value in _values_in(node) if isinstance(value, nnx.Variable)]


def modules_in(root: Any) -> Iterator[tuple[tuple[str, ...], nnx.Module]]:
    """Yield ``root`` and the modules below it with their paths, parents last.

    A module that appears several times is yielded once.

    Paths are those of ``nnx.iter_modules``, with indices as strings.
    """
    for path, module in nnx.iter_modules(root, graph=True):
        yield tuple(map(str, path)), module


def replace_variables(node: Any, change: Callable[[nnx.Variable[Any]], nnx.Variable[Any]]) -> None:
    """Replace each Variable of a module by ``change(variable)``, except those of its submodules."""
    containers = [value for value in _values_in(node) if isinstance(value, nnx.Pytree) and not is_module(value)]
    for container in (node, *containers):
        for name, value in list(items(container)):
            if isinstance(value, nnx.Variable):
                vars(container)[name] = change(value)
            elif not is_object(value):
                leaves, structure = jax.tree.flatten(value, is_leaf=is_object)
                changed = [change(leaf) if isinstance(leaf, nnx.Variable) else leaf for leaf in leaves]
                if any(a is not b for a, b in zip(leaves, changed, strict=True)):
                    vars(container)[name] = jax.tree.unflatten(structure, changed)


def cast_variable(var: nnx.Variable[Any], dtype: Any) -> nnx.Variable[Any]:
    """Return a Variable like ``var`` with its floating arrays in ``dtype``."""
    value = var[...] if var.ref else var.get_raw_value()
    cast = _tree.cast(value, dtype)
    same = all(a is b for a, b in zip(jax.tree.leaves(cast), jax.tree.leaves(value), strict=True))
    return var if same else var.copy(cast, ref=False)
