"""Read the modules of an NNX model before a policy is applied."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmp._internals.flax.nnx_variables import is_module, items, modules_in, own_variables
from jaxmp.engine.module_border import is_default, is_floating
from jaxmp.nnx.run import bare_class, decision_of
from jaxmp.policy.patterns import Path

_DTYPES = ("param_dtype", "dtype")
_WRITE_PARAMS = (nnx.WeightNorm, nnx.SpectralNorm)  # these write Params of another module, in its dtype


@dataclasses.dataclass(eq=False)
class ModuleNode:
    """A module of a model.

    Attributes:
      module: the module.
      paths: all paths that lead to it; a shared module has several.
      around: the modules that contain it, along the first path.
      dtypes: its floating ``dtype`` and ``param_dtype`` attributes, as the author set them.
    """

    module: Any
    paths: list[Path]
    around: list[ModuleNode]
    dtypes: dict[str, Any]

    def is_filled(self, name: str, overridden: bool) -> bool:
        """Return whether a policy sets the attribute ``name``.

        An override always sets it. Any other policy sets it if the attribute has its default, or the default of a
        containing module, because that module's constructor may have passed its default on.
        """
        if name == "dtype" and isinstance(self.module, _WRITE_PARAMS):
            return False
        written = self.dtypes[name]
        if overridden or is_default(written, _default(self.module, name)):
            return True
        for outer in self.around:
            default = _default(outer.module, name)
            if default is None or not is_floating(default) or np.dtype(default) != np.dtype(written):
                continue
            if is_default(outer.dtypes.get(name, default), default):
                return True
        return False

    def own_params(self) -> list[nnx.Param[Any]]:
        """Return the Params that belong to the module and not to its submodules."""
        return [var for var in own_variables(self.module) if isinstance(var, nnx.Param)]

    def has_matrix(self) -> bool:
        """Return whether products may read a Param of the module.

        They may if the module wraps a Linen module.
        """
        leaves = jax.tree.leaves([var.get_raw_value() for var in self.own_params()])
        is_matrix = any(len(getattr(leaf, "shape", ())) >= 2 for leaf in leaves)
        return self.wraps_linen or (is_matrix and not isinstance(self.module, nnx.Embed))

    @property
    def wraps_linen(self) -> bool:
        """Return whether the module is an ``nnx.bridge.ToNNX``."""
        return isinstance(self.module, nnx.bridge.ToNNX)

    def has_linen_policy(self) -> bool:
        """Return whether the Linen module inside has its own policy."""
        return hasattr(self.module.to_nnx__module, "jaxmp_root")

    def is_parent(self) -> bool:
        """Return whether a submodule has Variables.

        The state of random number generators does not count.
        """
        below = [module for path, module in modules_in(self.module) if path and is_module(module)]
        return any(not isinstance(var, nnx.RngState) for module in below for var in own_variables(module))


@dataclasses.dataclass
class ModuleGraph:
    """The modules of a model.

    Attributes:
      nodes: the modules that get a policy, the model itself first.
      classes: the classes of all modules, by path.
      variables: the paths of all Variables, except those of Linen modules.
      nested: the modules that already have a policy.
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
            node = nodes.setdefault(id(value), ModuleNode(value, [], around, _author_dtypes(value)))
            node.paths.append(path)
            if node.wraps_linen:  # patterns do not match modules inside
                if node.has_linen_policy():
                    graph.nested.append(value)
                return
            around = [*around, node]
        for name, item in items(value):
            visit(item, (*path, name), around)

    visit(model, (), [])
    graph.nodes.extend(nodes.values())
    return graph


def _author_dtypes(module: nnx.Module) -> dict[str, Any]:
    """Return the floating dtype attributes of a module, as its author wrote them."""
    decision = decision_of(module)
    attributes = vars(module) | dict(decision.replaced if decision is not None else ())
    dtypes = {name: attributes[name] for name in _DTYPES if name in attributes and is_floating(attributes[name])}
    # An Embed without a dtype sets its dtype to that of its params.
    if isinstance(module, nnx.Embed) and dtypes.get("dtype") == dtypes.get("param_dtype"):
        dtypes["dtype"] = None
    return dtypes


def _default(module: nnx.Module, name: str) -> Any:
    """Return the default of the constructor's argument ``name``.

    The constructor may be that of a base class.
    """
    for cls in bare_class(module).__mro__:
        parameter = inspect.signature(cls.__init__).parameters.get(name) if "__init__" in vars(cls) else None
        if parameter is not None:
            return None if parameter.default is inspect.Parameter.empty else parameter.default
    return None
