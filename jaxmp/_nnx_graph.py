"""The modules of an NNX model, before a policy is put on them: where they are and what their authors gave them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from jaxmp._dtype_fields import is_default, is_floating
from jaxmp._nnx_run import bare_class, decision_of, is_container, items, own_variables
from jaxmp.patterns import Path

DTYPES = ("param_dtype", "dtype")


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

    def is_default(self, name: str) -> bool:
        """Whether the attribute ``name`` was left to its default: its own, or one that was handed down from above."""
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
        below = (var for module in _submodules(self.module, set()) for var in own_variables(module))
        return any(not isinstance(var, nnx.RngState) for var in below)


@dataclasses.dataclass
class Graph:
    """All modules of a model by path, those that have policies of their own among the classes only."""

    nodes: list[Node]
    classes: dict[Path, type]
    variables: list[Path]
    has_nested_policies: bool


def read_graph(model: nnx.Module) -> Graph:
    """The modules of ``model``, parents before children."""
    nodes: dict[int, Node] = {}
    graph = Graph([], {}, [], False)

    def visit(value: Any, path: Path, around: list[Node]) -> None:
        if isinstance(value, nnx.Variable):
            graph.variables.append(path)
        elif isinstance(value, nnx.Module) and not is_container(value):
            graph.classes[path] = bare_class(value)
            decision = decision_of(value)
            if decision is not None and decision.is_root and path:
                graph.has_nested_policies = True
            elif all(value is not outer.module for outer in around):
                node = nodes.setdefault(id(value), Node(value, [], around, _given(value)))
                node.paths.append(path)
                visit_items(value, path, [*around, node])
        else:
            visit_items(value, path, around)

    def visit_items(value: Any, path: Path, around: list[Node]) -> None:
        for name, item in items(value):
            visit(item, (*path, str(name)), around)

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


def _submodules(node: Any, seen: set[int]) -> Iterator[nnx.Module]:
    for _, value in items(node):
        if isinstance(value, nnx.Variable) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nnx.Module) and not is_container(value):
            yield value
        yield from _submodules(value, seen)
