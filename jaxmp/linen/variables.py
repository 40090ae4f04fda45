"""Store variables of Linen modules in the dtypes that they have without a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxmp._internals.flax.linen import children_of, mutable_collection
from jaxmp.base import trees as _tree
from jaxmp.engine.module_border import Treatment, like, narrow, same_structure
from jaxmp.policy.patterns import Path

Variables = Mapping[str, Any]
PARAMS = "params"
# The collections in _ACTIVATIONS keep the dtypes in which their values were computed. All other collections have the
# dtypes that they have without a policy. A module that is traced in float32 casts the collections in _COMPUTED to its
# compute dtype.
_COMPUTED = ("cache", "intermediates")
_ACTIVATIONS = (*_COMPUTED, "perturbations")


def leaves(collection: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf of ``collection`` with its path, a tuple of strings."""
    for keys, leaf in jax.tree.leaves_with_path(collection):
        yield _path_of_keys(keys), leaf


def _path_of_keys(keys: Any) -> Path:
    """Return a key path of JAX as a tuple of strings."""
    return tuple(_tree.path_name((key,)) for key in keys)


def descend(collection: Any, path: Path) -> Any:
    """Return the value at ``path``, or None."""
    for name in path:
        collection = collection.get(name) if isinstance(collection, Mapping) else None
    return collection


def own_leaves(collection: Variables) -> list[Any]:
    """Return the arrays of a module without those of its submodules."""
    return jax.tree.leaves([value for value in collection.values() if not isinstance(value, Mapping)])


def has_children(collections: Variables) -> bool:
    """Return whether a submodule has variables in ``collections``."""
    return any(isinstance(value, Mapping) for collection in collections.values() for value in collection.values())


def keep_statistics(module: nn.Module, before: Variables, decision: Treatment) -> None:
    """Cast changed variables to the dtypes that they have without a policy.

    A variable that existed ``before`` the method keeps its dtype. A new half-precision variable is cast to float32. The
    collections of computed values are an exception (see ``_ACTIVATIONS``).
    """
    for name in list(module.variables):
        if name == PARAMS or not module.is_mutable_collection(name):
            continue
        for key, value in list(module.variables[name].items()):
            if isinstance(value, Mapping) and not isinstance(children_of(module).get(key), str):
                continue  # belongs to a submodule
            stored = value
            if name not in _ACTIVATIONS:
                old = before.get(name, {}).get(key)
                stored = jax.tree.map(like, value, old) if same_structure(value, old) else _tree.widen(value)
            elif decision.is_float32 and name in _COMPUTED:
                stored = jax.tree.map(functools.partial(narrow, dtype=decision.policy.compute_dtype), value)
            if any(a is not b for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(value), strict=True)):
                module.put_variable(name, key, stored)


def store_params(
    module: Any, wanted: Callable[[Path], np.dtype | None], foreseen: Variables, make_bare: Callable[[], Variables]
) -> None:
    """Cast the initialised params of ``module`` and its submodules to their dtypes.

    A module may have rounded a param to fewer bits than the param dtype has, for example in ``nn.map_variables``. Such
    a param is initialised again without policies.

    Args:
      module: a module that is bound to a scope.
      wanted: a function from the path of a param to its param dtype, or to None for a param that is not cast.
      foreseen: the shapes and dtypes that the variables have without policies.
      make_bare: a function that initialises the variables without policies.
    """
    if not module.is_mutable_collection(PARAMS):
        return
    params = mutable_collection(module, PARAMS)
    bare_dtypes = {path: leaf.dtype for path, leaf in leaves(foreseen.get(PARAMS, {})) if hasattr(leaf, "dtype")}
    exact: dict[Path, Any] = {}

    def stored(above: Path, keys: Any, leaf: Any) -> Any:
        path = above + _path_of_keys(keys)
        dtype = wanted(path)
        if dtype is None or not _tree.is_float_array(leaf):
            return leaf
        if leaf.dtype.itemsize < dtype.itemsize and bare_dtypes.get(path) != leaf.dtype:
            exact.update(() if exact else leaves(make_bare()[PARAMS]))
            leaf = exact[path]
        return _tree.cast(leaf, dtype)

    def store(collection: Any, path: Path) -> None:
        for name, value in collection.items():
            if isinstance(value, dict):
                store(value, (*path, name))
            else:
                collection[name] = jax.tree.map_with_path(functools.partial(stored, (*path, name)), value)

    store(params, ())
