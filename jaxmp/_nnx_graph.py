"""The modules of an NNX model, before a policy is put on them: where they are and what their authors gave them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
from flax import nnx

from jaxmp._adapters import is_default, is_floating
from jaxmp._nnx_run import bare_class, decision_of
from jaxmp._nnx_variables import is_module, items, own_variables, submodules
from jaxmp.patterns import Path

DTYPES = ("param_dtype", "dtype")
_WRITE_PARAMS = (nnx.WeightNorm, nnx.SpectralNorm)  # their dtype is that of the Params of another that they write


@dataclasses.dataclass(eq=False)
class Node:
    """A module of a model.

    Attributes:
      module: the object itself.
      paths: all that lead to it, as a module may be shared.
      around: the modules that it lies in, by the first path.
      given: its ``dtype`` and ``param_dtype`` attributes as its author gave them, where it has them and they are
        floating or None.
    """

    module: Any
    paths: list[Path]
    around: list[Node]
    given: dict[str, Any]

    def is_filled(self, name: str, overridden: bool) -> bool:
        """Whether a policy sets the attribute ``name``: an override does, and any where its author left the default."""
        if name == "dtype" and isinstance(self.module, _WRITE_PARAMS):
            return False
        return overridden or self._is_default(name)

    def _is_default(self, name: str) -> bool:
        """Whether ``name`` has its default: its own, or one that a constructor around it handed down."""
        given = self.given[name]
        if is_default(given, _default(self.module, name)):
            return True
        for outer in self.around:
            default = _default(outer.module, name)
            if default is None or not is_floating(default) or not is_default(outer.given.get(name, default), default):
                continue
            if np.dtype(default) == np.dtype(given):
                return True
        return False

    def own_params(self) -> list[nnx.Param[Any]]:
        """The Params that belong to the module and not to its submodules."""
        return [var for var in own_variables(self.module) if isinstance(var, nnx.Param)]

    def is_parent(self) -> bool:
        """Whether a submodule has Variables other than the state of random number generators."""
        below = (var for module in submodules(self.module) for var in own_variables(module))
        return any(not isinstance(var, nnx.RngState) for var in below)


@dataclasses.dataclass
class Graph:
    """All modules of a model, the model itself first.

    Attributes:
      nodes: those that get a policy.
      classes: of all modules, by path.
      variables: the paths of all Variables.
      nested: modules that have policies of their own.
    """

    nodes: list[Node]
    classes: dict[Path, type]
    variables: list[Path]
    nested: list[nnx.Module]


def read_graph(model: nnx.Module) -> Graph:
    """The modules of ``model``, parents before children."""
    nodes: dict[int, Node] = {}
    graph = Graph([], {}, [], [])

    def visit(value: Any, path: Path, around: list[Node]) -> None:
        if isinstance(value, nnx.Variable):
            graph.variables.append(path)
        elif is_module(value):
            graph.classes[path] = bare_class(value)
            decision = decision_of(value)
            if decision is not None and decision.is_root and path:
                graph.nested.append(value)
            elif all(value is not outer.module for outer in around):
                node = nodes.setdefault(id(value), Node(value, [], around, _given(value)))
                node.paths.append(path)
                visit_items(value, path, [*around, node])
        else:
            visit_items(value, path, around)

    def visit_items(value: Any, path: Path, around: list[Node]) -> None:
        for name, item in items(value):
            visit(item, (*path, name), around)

    visit(model, (), [])
    graph.nodes.extend(nodes.values())
    return graph


def _given(module: nnx.Module) -> dict[str, Any]:
    decision = decision_of(module)
    attributes = vars(module) | dict(decision.given if decision is not None else ())
    given = {name: attributes[name] for name in DTYPES if name in attributes and is_floating(attributes[name])}
    # Without a dtype, an Embed gives itself that of its params.
    if isinstance(module, nnx.Embed) and given.get("dtype") == given.get("param_dtype"):
        given["dtype"] = None
    return given


def _default(module: nnx.Module, name: str) -> Any:
    """What the constructor takes for ``name`` when it is not given; a class may hand keywords on to its base."""
    for cls in bare_class(module).__mro__:
        parameter = inspect.signature(cls.__init__).parameters.get(name) if "__init__" in vars(cls) else None
        if parameter is not None:
            return None if parameter.default is inspect.Parameter.empty else parameter.default
    return None
