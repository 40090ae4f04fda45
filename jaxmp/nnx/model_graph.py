"""Read the modules of an NNX model before a policy is applied."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
from flax import nnx

from jaxmp._internals.flax.nnx_variables import is_module, items
from jaxmp.engine.model_policy import is_default, is_floating
from jaxmp.nnx.run import bare_class, decision_of
from jaxmp.policy.patterns import Path


@dataclasses.dataclass(eq=False)
class ModuleNode:
    """A module of a model.

    Attributes:
      module: the module.
      paths: all paths of the module; a shared module has several.
      around: the modules that contain this module, along its first path.
    """

    module: Any
    paths: list[Path]
    around: list[ModuleNode]

    def author_dtype(self, name: str) -> np.dtype | None:
        """Return the attribute ``name`` if it is a dtype that the author set, otherwise None.

        The author has not set it if it has the default of the constructor. The default of a containing module counts
        too, because that module's constructor may have passed the default on.
        """
        dtype = vars(self.module).get(name)
        if dtype is None or not is_floating(dtype) or self._is_default(name, dtype):
            return None
        for outer in self.around:
            outer_dtype = vars(outer.module).get(name, _default(outer.module, name))
            is_passed_on = outer_dtype is not None and is_floating(outer_dtype) and np.dtype(outer_dtype) == dtype
            if is_passed_on and outer._is_default(name, outer_dtype):
                return None
        return np.dtype(dtype)

    def _is_default(self, name: str, dtype: Any) -> bool:
        # If the author passes no dtype to an Embed, its constructor sets `dtype` to the `param_dtype`.
        is_embed = name == "dtype" and isinstance(self.module, nnx.Embed)
        return is_default(dtype, vars(self.module).get("param_dtype") if is_embed else _default(self.module, name))

    @property
    def wraps_linen(self) -> bool:
        """Return whether the module is an ``nnx.bridge.ToNNX``."""
        return isinstance(self.module, nnx.bridge.ToNNX)

    def has_linen_policy(self) -> bool:
        """Return whether the wrapped Linen module has a policy."""
        return hasattr(self.module.to_nnx__module, "jaxmp_policy")


@dataclasses.dataclass
class ModuleGraph:
    """The modules of a model.

    Attributes:
      nodes: the modules that get a policy, the model itself first.
      classes: the classes of all modules, by path.
      variables: the paths of all Variables, except those of wrapped Linen modules.
      nested: the submodules to which a policy was applied earlier.
    """

    nodes: list[ModuleNode]
    classes: dict[Path, type]
    variables: list[Path]
    nested: list[nnx.Module]


def read_graph(model: nnx.Module) -> ModuleGraph:
    """Return the modules of ``model``, parents before children."""
    nodes: dict[int, ModuleNode] = {}
    graph = ModuleGraph([], {}, [], [])

    def visit(value: Any, path: Path, around: list[ModuleNode]) -> None:
        if isinstance(value, nnx.Variable):
            graph.variables.append(path)
            return
        if is_module(value):
            graph.classes[path] = bare_class(value)
            decision = decision_of(value)
            if decision is not None and decision.is_root and value is not model:
                graph.nested.append(value)
                return
            if any(value is outer.module for outer in around):
                return
            node = nodes.setdefault(id(value), ModuleNode(value, [], around))
            node.paths.append(path)
            if node.wraps_linen:  # patterns do not match modules inside of the Linen module
                if node.has_linen_policy():
                    graph.nested.append(value)
                return
            around = [*around, node]
        for name, item in items(value):
            visit(item, (*path, name), around)

    visit(model, (), [])
    graph.nodes.extend(nodes.values())
    return graph


def _default(module: nnx.Module, name: str) -> Any:
    """Return the default of the argument ``name`` of the module's constructor.

    If the constructor has no such argument, search the constructors of the base classes.
    """
    for cls in bare_class(module).__mro__:
        parameter = inspect.signature(cls.__init__).parameters.get(name) if "__init__" in vars(cls) else None
        if parameter is not None:
            return None if parameter.default is inspect.Parameter.empty else parameter.default
    return None
