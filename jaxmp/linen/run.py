"""A call of a Linen model under a policy, and the calls of its modules.

While a model runs, a method interceptor handles every method call of its modules. For each module it decides how the
module is computed, and opens a scope with this decision as a mark on JAX's name stack, which ``jaxmp.engine`` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxmp._internals.flax.linen import is_checked
from jaxmp.base import trees as _tree
from jaxmp.engine.eager_calls import key_of
from jaxmp.engine.half_check import NotHalf, Reason
from jaxmp.engine.model_policy import TRACED, CallStack, MethodCall, Treatment, is_default, is_floating
from jaxmp.linen.bridge import is_bridge, require_policy_in_bridge
from jaxmp.linen.scopes import PARAMS, Root, converting, roots_around
from jaxmp.policy.patterns import Path

_REPLACED = "_jaxmp_replaced"  # the attribute with the ``dtype`` of a module that the policy replaced


def author_fields(module: Any) -> dict[str, Any]:
    """Return the fields of a module with the values that the author set."""
    names = [field.name for field in dataclasses.fields(module) if field.init]
    fields = {name: getattr(module, name) for name in names if name not in ("parent", "name")}
    return {**fields, **vars(module).get(_REPLACED, {})}


def key_of_module(module: Any) -> Any:
    """Return a key of a module and its fields; None if ``module`` is not a module."""
    if not isinstance(module, nn.Module):
        return None
    return (type(module), module.name, key_of(author_fields(module), key_of_module))


@dataclasses.dataclass(eq=False)
class _CalledModules:
    """The modules of a root that a run has called.

    Attributes:
      classes: the classes of the modules, by path below the root. Modules that share a scope have one path.
      not_half: the reason why each called module does not compute in half precision, or None.
    """

    classes: dict[Path, tuple[type, ...]] = dataclasses.field(default_factory=dict)
    not_half: dict[Path, Reason | None] = dataclasses.field(default_factory=dict)

    def add(self, root: Root, module: Any) -> dict[Path, tuple[type, ...]]:
        """Record a module; return its class and those of the modules that contain it, by path below the root.

        The body of a lifted transform has copies of modules without the modules around them. There, the classes of
        recorded modules take their place.
        """
        around: dict[Path, tuple[type, ...]] = {}
        while isinstance(module, nn.Module) and module.scope is not None and len(module.path) >= len(root.path):
            path = module.path[len(root.path) :]
            around[path] = (*around.get(path, ()), type(module))
            module = module.parent
        for path, classes in around.items():
            known = self.classes.get(path, ())
            self.classes[path] = (*known, *(cls for cls in classes if cls not in known))
        return {**self.classes, **around}


class Run:
    """A call of a model under a policy, from the outside until it returns."""

    def __init__(self) -> None:
        self.modules: dict[Root, _CalledModules] = {}
        self.active: list[Root] = []  # the roots whose methods are running, innermost last
        self.calls = CallStack(jax.tree.map)

    def modules_of(self, root: Root) -> _CalledModules:
        """Return the modules of a root that this run has called."""
        return self.modules.setdefault(root, _CalledModules())

    @contextlib.contextmanager
    def inside(self, root: Root) -> Iterator[None]:
        """Record that a method of a root is running in this context."""
        self.active.append(root)
        try:
            yield
        finally:
            self.active.pop()

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Call a method of a module, as its treatment says."""
        module = context.module
        root = self._root_of(module)
        if root is None:
            return method(*args, **kwargs)
        treatment = self._prepare(module, root)
        with converting(module.scope, treatment):
            if context.method_name == "setup" or _calls_itself(self.calls.innermost, module):
                return method(*args, **kwargs)
            self.modules_of(root).not_half.setdefault(module.path[len(root.path) :], treatment.not_half)
            return self.calls.run(MethodCall(module, module.path, treatment), method, args, kwargs)

    def _root_of(self, module: Any) -> Root | None:
        """Return the innermost root around a module; None if the module is under no policy."""
        roots = roots_around(module.scope) if module.scope is not None and not is_checked(module) else ()
        if not roots:
            return None
        # A lifted transform creates the scopes of inner modules before a model inside of another has set its flag.
        inner = self.active[self.active.index(roots[-1]) + 1 :] if roots[-1] in self.active else []
        around = [root for root in inner if module.path[: len(root.path)] == root.path]
        return around[-1] if around else roots[-1]

    def _prepare(self, module: Any, root: Root) -> Treatment:
        """Return how a module is computed, and prepare its ``dtype``."""
        path = module.path[len(root.path) :]
        classes = self.modules_of(root).add(root, module)
        defaults = {field.name: field.default for field in dataclasses.fields(module)}
        treatment = root.policy.treatment(
            path,
            classes,
            author_dtype=_set_by_author(module, "dtype", defaults),
            author_param_dtype=_set_by_author(module, "param_dtype", defaults),
            has_dtype=_has_dtype(module),
        )
        if not treatment.is_by_author:
            _replace_dtype(module, treatment)
        if is_bridge(type(module)) and root.policy.stores:
            require_policy_in_bridge(module, path)
            return dataclasses.replace(treatment, written="dtype", param_dtype=None, cache_dtype=None)
        return treatment

    def check(self, root: Root, module: Any) -> list[NotHalf]:
        """Raise an error if a pattern matched nothing; return the modules that are not half.

        The list is empty if a module of the model did not run, or if there is another policy inside.
        """
        called = self.modules_of(root)
        depth = len(root.path)
        nested = [other.path[depth:] for other in self.modules if other != root and other.path[:depth] == root.path]
        bridges = [path for path, classes in called.classes.items() if any(map(is_bridge, classes))]
        paths = [path for name in module.variables for path in _paths(module.variables[name])]
        paths = [path for path in paths if not _is_below(path, bridges)]
        nested += bridges
        owners = {path[:-1] for path in _paths(module.variables.get(PARAMS, {})) if not _is_below(path, nested)}
        root.policy.policies.check(called.classes, paths, owners <= called.classes.keys())
        if nested or not owners <= called.not_half.keys():
            return []
        return [
            NotHalf("/".join(path) or type(module).__name__, reason, path in owners)
            for path, reason in called.not_half.items()
            if reason is not None
        ]


def _calls_itself(caller: MethodCall | None, module: nn.Module) -> bool:
    """Return whether a module calls itself, as in a helper method or the body of a lifted transform."""
    if caller is None or caller.path != module.path:
        return False
    return isinstance(module, type(caller.module)) or isinstance(caller.module, type(module))


def _has_dtype(module: Any) -> bool:
    """Return whether a module has a ``dtype`` field for a floating dtype."""
    return any(field.name == "dtype" for field in dataclasses.fields(module)) and is_floating(module.dtype)


def _set_by_author(module: Any, name: str, defaults: dict[str, Any]) -> np.dtype | None:
    """Return a dtype field if its author set it, otherwise None."""
    value = getattr(module, name) if name in defaults else None
    is_unset = value is None or value is TRACED or not is_floating(value) or is_default(value, defaults[name])
    return None if is_unset else np.dtype(value)


def _replace_dtype(module: Any, treatment: Treatment) -> None:
    """Replace the ``dtype`` of a module that its author did not set, or that an override replaces.

    The engine decides on code in float32. Code that runs as it is written gets the compute dtype, and Flax casts its
    operands.
    """
    if not _has_dtype(module) or (module.dtype is None and not treatment.written):
        return
    dtype = treatment.policy.compute_dtype if treatment.written else TRACED
    if module.dtype is not dtype:
        vars(module).setdefault(_REPLACED, {}).setdefault("dtype", module.dtype)
        object.__setattr__(module, "dtype", dtype)


def _paths(collection: Any) -> list[Path]:
    """Return the paths of all leaves of a collection."""
    leaves = jax.tree.leaves_with_path(nn.unbox(collection))
    return [tuple(_tree.path_name((key,)) for key in keys) for keys, _ in leaves]


def _is_below(path: Path, roots: list[Path]) -> bool:
    return any(path[: len(root)] == root for root in roots)


_run: ContextVar[Run | None] = ContextVar("jaxmp_linen_run", default=None)


def current_run() -> Run | None:
    """Return the run in which the code is, or None."""
    return _run.get()


@contextlib.contextmanager
def running() -> Iterator[Run]:
    """Start a run, which lasts until the end of the context."""
    run = Run()
    token = _run.set(run)
    try:
        with nn.intercept_methods(run.call):
            yield run
    finally:
        _run.reset(token)
