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
from jaxmp._internals.flax.nnx_if_imported import imported_nnx
from jaxmp.base import trees as _tree
from jaxmp.base.context_variables import setting
from jaxmp.engine.model_policy import AuthorDtypes, CallStack, MethodCall, Treatment, is_default, is_floating
from jaxmp.linen.scopes import PARAMS, PoliciedModel, convert_variables, models_around
from jaxmp.policy.patterns import Path

_REPLACED = "_jaxmp_replaced"  # the attribute with the ``dtype`` of a module that the policy replaced
_TRACED = np.dtype(np.float32, metadata={"jaxmp": "float32 while the model is traced"})
"""The float32 that replaces a ``dtype`` that the author has not set.

A module often passes its ``dtype`` to submodules. The metadata tells this float32 from the author's
``dtype=jnp.float32``.
"""


def author_fields(module: Any) -> dict[str, Any]:
    """Return the fields of a module with the values that the author set."""
    names = [field.name for field in dataclasses.fields(module) if field.init]
    fields = {name: getattr(module, name) for name in names if name not in ("parent", "name")}
    return {**fields, **vars(module).get(_REPLACED, {})}


@dataclasses.dataclass(eq=False)
class _CalledModules:
    """The modules of a model that a run has called, by their paths in the model.

    Attributes:
      classes: the classes of the modules. Modules that share a scope have one path.
    """

    classes: dict[Path, tuple[type, ...]] = dataclasses.field(default_factory=dict)

    def add(self, model: PoliciedModel, module: Any) -> dict[Path, tuple[type, ...]]:
        """Record a module; return its class and those of the modules that contain it, by path in the model.

        The body of a lifted transform has copies of modules without the modules around them. There, the classes of
        recorded modules take their place.
        """
        around: dict[Path, tuple[type, ...]] = {}
        while isinstance(module, nn.Module) and module.scope is not None and len(module.path) >= len(model.path):
            path = model.relative(module.path)
            around[path] = (*around.get(path, ()), type(module))
            module = module.parent
        for path, classes in around.items():
            known = self.classes.get(path, ())
            self.classes[path] = (*known, *(cls for cls in classes if cls not in known))
        return {**self.classes, **around}

    def bridges(self) -> list[Path]:
        """Return the paths of the modules that wrap an NNX module."""
        return [path for path, classes in self.classes.items() if any(map(_is_bridge, classes))]


class Run:
    """A call of a model under a policy, from the outside until it returns.

    Attributes:
      active: the models whose methods are running, innermost last.
    """

    def __init__(self) -> None:
        self.active: list[PoliciedModel] = []
        self._stack = CallStack(jax.tree.map)
        self._called: dict[PoliciedModel, _CalledModules] = {}

    @contextlib.contextmanager
    def enter(self, model: PoliciedModel) -> Iterator[None]:
        """Record that a method of a model is running in this context."""
        self.active.append(model)
        try:
            yield
        finally:
            self.active.pop()

    def call(self, method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """Call a method of a module, as its treatment says."""
        module = context.module
        model = self._model_of(module)
        if model is None:
            return method(*args, **kwargs)
        treatment = self._decide(module, model)
        _replace_dtype(module, treatment)
        with convert_variables(module.scope, treatment):
            if context.method_name == "setup" or _calls_itself(self._stack.innermost, module):
                return method(*args, **kwargs)
            return self._stack.run(MethodCall(module, module.path, treatment), method, args, kwargs)

    def _model_of(self, module: Any) -> PoliciedModel | None:
        """Return the innermost model around a module; None if the module is under no policy."""
        models = models_around(module.scope) if module.scope is not None and not is_checked(module) else ()
        if not models:
            return None
        # A lifted transform may create a module's scope before a nested model has set its flag. Such a nested model is
        # running now, inside of the last model that the flag has.
        nested = self.active[self.active.index(models[-1]) + 1 :] if models[-1] in self.active else []
        return next((model for model in reversed(nested) if model.contains(module.path)), models[-1])

    def _decide(self, module: Any, model: PoliciedModel) -> Treatment:
        """Return how a module of a model is computed."""
        path = model.relative(module.path)
        classes = self._called_modules(model).add(model, module)
        author = AuthorDtypes(_author_dtype(module, "dtype"), _author_dtype(module, "param_dtype"), _has_dtype(module))
        treatment = model.policy.treatment(path, classes, author)
        if _is_bridge(type(module)) and model.policy.stores:
            _require_policy_in_bridge(module, path)
            return dataclasses.replace(treatment, written="dtype", param_dtype=None, cache_dtype=None)
        return treatment

    def check_patterns(self, model: PoliciedModel, module: Any) -> None:
        """Raise a ValueError if a pattern of the policy matched nothing in the model.

        ``module`` is the module of the model.
        """
        called = self._called_modules(model)
        bridges = called.bridges()
        variables = [path for collection in module.variables.values() for path in _paths(collection)]
        variables = [path for path in variables if not _is_below(path, bridges)]
        model.policy.policies.check(called.classes, variables, complete=self.called_all(model, module))

    def called_all(self, model: PoliciedModel, module: Any) -> bool:
        """Return whether every module with params was called.

        Nested models with policies of their own and bridges do not count. ``module`` is the module of the model.
        """
        inner = self._paths_of_inner_models(model)
        owners = {path for path in _owners_of_params(module) if not _is_below(path, inner)}
        return owners <= self._called_modules(model).classes.keys()

    def _called_modules(self, model: PoliciedModel) -> _CalledModules:
        return self._called.setdefault(model, _CalledModules())

    def _paths_of_inner_models(self, model: PoliciedModel) -> list[Path]:
        """Return the paths of nested models with policies of their own, and of bridges."""
        inner = [other for other in self._called if other != model and model.contains(other.path)]
        return [*(model.relative(other.path) for other in inner), *self._called_modules(model).bridges()]


def _calls_itself(caller: MethodCall | None, module: nn.Module) -> bool:
    """Return whether a module calls itself, as in a helper method or the body of a lifted transform."""
    if caller is None or caller.path != module.path:
        return False
    return isinstance(module, type(caller.module)) or isinstance(caller.module, type(module))


def _has_dtype(module: Any) -> bool:
    """Return whether a module has a ``dtype`` field for a floating dtype."""
    return any(field.name == "dtype" for field in dataclasses.fields(module)) and is_floating(module.dtype)


def _author_dtype(module: Any, name: str) -> np.dtype | None:
    """Return the dtype in the field ``name`` if the author set it, otherwise None."""
    defaults = {field.name: field.default for field in dataclasses.fields(module)}
    value = getattr(module, name) if name in defaults else None
    is_unset = value is None or _is_traced(value) or not is_floating(value) or is_default(value, defaults[name])
    return None if is_unset else np.dtype(value)


def _is_traced(dtype: Any) -> bool:
    """Return whether a dtype is the float32 that jaxmp puts in the place of an unset ``dtype``."""
    return isinstance(dtype, np.dtype) and dtype.metadata == _TRACED.metadata


def _replace_dtype(module: Any, treatment: Treatment) -> None:
    """Replace the ``dtype`` of a module that its author did not set, or that an override replaces."""
    if treatment.dtype is None or not _has_dtype(module):
        return
    if module.dtype is None and not treatment.written:  # the code computes in the dtype of its operands, float32
        return
    dtype = treatment.dtype if treatment.written else _TRACED
    if module.dtype is not dtype:
        vars(module).setdefault(_REPLACED, {}).setdefault("dtype", module.dtype)
        object.__setattr__(module, "dtype", dtype)


def _is_bridge(cls: type) -> bool:
    """Return whether ``cls`` is ``nnx.bridge.ToLinen`` or a subclass of it."""
    nnx = imported_nnx()
    return nnx is not None and issubclass(cls, nnx.bridge.ToLinen)


def _require_policy_in_bridge(module: Any, path: Path) -> None:
    """Raise a ValueError if the ``ToLinen`` at ``path`` wraps a class of NNX modules.

    A function that creates the NNX module may apply a policy to it. This case is not checked.
    """
    if not isinstance(module.nnx_class, type):
        return
    name = module.nnx_class.__name__
    at = f"{'/'.join(path)!r}, " if path else ""
    raise ValueError(
        f"a policy does not reach into nnx.bridge.ToLinen, got {at}ToLinen of {name}.\n"
        "Apply the policy to the inner module, then wrap it:\n"
        f"nnx.bridge.ToLinen(lambda *args, **kw: jaxmp.nnx.apply_policy({name}(*args, **kw), policy), ...)"
    )


def _owners_of_params(module: Any) -> set[Path]:
    """Return the paths of the modules that have params, below ``module``."""
    return {path[:-1] for path in _paths(module.variables.get(PARAMS, {}))}


def _paths(collection: Any) -> list[Path]:
    """Return the paths of all leaves of a collection."""
    leaves = jax.tree.leaves_with_path(nn.unbox(collection))
    return [tuple(_tree.path_name((key,)) for key in keys) for keys, _ in leaves]


def _is_below(path: Path, modules: list[Path]) -> bool:
    """Return whether ``path`` is one of the paths in ``modules``, or is below one."""
    return any(path[: len(module)] == module for module in modules)


_run: ContextVar[Run | None] = ContextVar("jaxmp_linen_run", default=None)


def current_run() -> Run | None:
    """Return the run in which the code is, or None."""
    return _run.get()


@contextlib.contextmanager
def start_run() -> Iterator[Run]:
    """Start a run, which lasts until the end of the context."""
    run = Run()
    with setting(_run, run), nn.intercept_methods(run.call):
        yield run
