"""Split NNX models into arrays, and put their module calls in named scopes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx

from jaxmp._internals.flax.nnx import is_pytree_class
from jaxmp._internals.flax.nnx_variables import is_module as is_module
from jaxmp.base.context_variables import setting
from jaxmp.nnx.model_values import ModelForm, split_values
from jaxmp.nnx.run import decision_of
from jaxmp.policy.patterns import Path
from jaxmp.program.scopes import CALL_SCOPE

_caller: ContextVar[Path] = ContextVar("jaxmp_inspect_caller", default=())
_number = itertools.count()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Model:
    """An NNX model without its values."""

    form: ModelForm

    def params_and_rebuild(self, parts: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the Params, and a function that rebuilds the model from Params."""
        params, others = parts
        return params, lambda params: with_scopes(self.form.merge(params, others))


def split_model(model: Any) -> tuple[Any, Any]:
    """Return a model without its values, and its values: (Params, all others)."""
    form, parts = split_values(model, nnx.Param, ...)
    return _Model(form), parts


def with_scopes(model: Any) -> Any:
    """Put each module call of a model in a named scope, and return the model.

    The model is changed in place, so no other code may use the model. The root module gets no scope. Modules under a
    policy are not changed, because their calls already have scopes.
    """
    for path, module in nnx.iter_modules(model):
        if path and callable(module) and decision_of(module) is None:
            object.__setattr__(module, "__class__", _scoped(type(module), tuple(map(str, path))))
    return model


def scoped_copy(model: Any) -> Any:
    """Return a copy of a model in which each module call is in a named scope.

    The copy shares its Variables with the model.
    """
    return with_scopes(nnx.clone(model, variables=False, graph=True))


@functools.cache
def _scoped(bare: Any, path: Path) -> Any:
    """Return a subclass of a module's class whose calls are in a named scope.

    The scope is the path of the module relative to the module that calls it.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        around = _caller.get()
        inside = path[len(around) :] if path[: len(around)] == around else path
        scope = "/".join((*inside, f"{CALL_SCOPE}{next(_number)}"))
        with setting(_caller, path), jax.named_scope(scope):
            return bare.__call__(self, *args, **kwargs)

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__call__"] = functools.wraps(bare.__call__)(call)
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(bare, name)

    return types.new_class(bare.__name__, (bare,), {"pytree": is_pytree_class(bare)}, fill)
