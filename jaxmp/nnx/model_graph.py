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
_WRITE_PARAMS = (nnx.WeightNorm, nnx.SpectralNorm)  # these cast the Params of the wrapped layer to their ``dtype``


@dataclasses.dataclass(eq=False)
class ModuleNode:
    """A module of a model.

    Attributes:
      module: the module.
      paths: all paths of the module; a shared module has several.
      around: the modules that contain this module, along its first path.
      dtypes: the ``dtype`` and ``param_dtype`` attributes as the author set them, if they are floating or None.
    """

    module: Any
    paths: list[Path]
    around: list[ModuleNode]
    dtypes: dict[str, Any]

    def is_filled(self, name: str, overridden: bool) -> bool:
        """Return whether a policy sets the attribute ``name``.

        A policy from an override always sets the attribute. Any other policy sets the attribute if it has its default
        value. The default of a containing module counts too, because that module's constructor may have passed the
        default on. The ``dtype`` of ``nnx.WeightNorm`` and ``nnx.SpectralNorm`` is never set, because these modules
        cast the Params of the wrapped layer to it. The ``dtype`` of Flax's attention is not set if the author left it
        None.
        """
        if name == "dtype" and (isinstance(self.module, _WRITE_PARAMS) or self.is_attention()):
            return False
        dtype = self.dtypes[name]
        if overridden or is_default(dtype, _default(self.module, name)):
            return True
        for outer in self.around:
            default = _default(outer.module, name)
            if default is None or not is_floating(default) or np.dtype(default) != np.dtype(dtype):
                continue
            if is_default(outer.dtypes.get(name, default), default):
                return True
        return False

    def is_attention(self) -> bool:
        """Return whether the module is Flax's attention, with its ``dtype`` left None."""
        return isinstance(self.module, nnx.MultiHeadAttention) and self.dtypes.get("dtype") is None

    def own_params(self) -> list[nnx.Param[Any]]:
        """Return the Params that belong to the module and not to its submodules."""
        return [var for var in own_variables(self.module) if isinstance(var, nnx.Param)]

    def has_matrix(self) -> bool:
        """Return whether a product may read a Param of the module.

        For a module that wraps a Linen module, the answer is always yes.
        """
        leaves = jax.tree.leaves([var.get_raw_value() for var in self.own_params()])
        is_matrix = any(len(getattr(leaf, "shape", ())) >= 2 for leaf in leaves)
        return self.wraps_linen or (is_matrix and not isinstance(self.module, nnx.Embed))

    @property
    def wraps_linen(self) -> bool:
        """Return whether the module is an ``nnx.bridge.ToNNX``."""
        return isinstance(self.module, nnx.bridge.ToNNX)

    def has_linen_policy(self) -> bool:
        """Return whether the wrapped Linen module has a policy."""
        return hasattr(self.module.to_nnx__module, "jaxmp_root")

    def is_parent(self) -> bool:
        """Return whether a submodule has Variables, except those of random generators."""
        below = [module for path, module in modules_in(self.module) if path and is_module(module)]
        return any(not isinstance(var, nnx.RngState) for module in below for var in own_variables(module))


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
            node = nodes.setdefault(id(value), ModuleNode(value, [], around, _author_dtypes(value)))
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


def _author_dtypes(module: nnx.Module) -> dict[str, Any]:
    """Return the ``dtype`` and ``param_dtype`` of a module as the author set them.

    Only floating dtypes and None are included.
    """
    decision = decision_of(module)
    attributes = vars(module) | dict(decision.replaced if decision is not None else ())
    dtypes = {name: attributes[name] for name in _DTYPES if name in attributes and is_floating(attributes[name])}
    # If the author passes no dtype to an Embed, its constructor sets `dtype` to the `param_dtype`.
    if isinstance(module, nnx.Embed) and dtypes.get("dtype") == dtypes.get("param_dtype"):
        dtypes["dtype"] = None
    return dtypes


def _default(module: nnx.Module, name: str) -> Any:
    """Return the default of the argument ``name`` of the module's constructor.

    If the constructor has no such argument, search the constructors of the base classes.
    """
    for cls in bare_class(module).__mro__:
        parameter = inspect.signature(cls.__init__).parameters.get(name) if "__init__" in vars(cls) else None
        if parameter is not None:
            return None if parameter.default is inspect.Parameter.empty else parameter.default
    return None
