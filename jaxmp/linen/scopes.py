"""Linen scopes under a policy.

A flag of a scope has the models under a policy around it. Linen copies the flags of a scope to every scope that is
created below, even in lifted transforms, and they are part of the cache key of ``nn.jit``.

Each variable is converted when a module reads or writes it. When a call begins, the modules that decide how their
variables are converted do not exist yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from flax.core import Scope

from jaxmp.base.cache_keys import rounded_params
from jaxmp.engine.model_policy import ModelPolicy, Treatment, VariableKind
from jaxmp.policy.patterns import Path, is_class_pattern

_MODELS = "jaxmp_models"
_PATH = "jaxmp_path"  # keeps nn.jit from sharing a trace between modules of different policies
PARAMS = "params"
_KINDS: dict[str, VariableKind] = {
    PARAMS: "param",
    "cache": "cache",
    "intermediates": "activation",
    "perturbations": "activation",
}
"""The kinds of collections that have rules of their own."""
ACTIVATIONS = tuple(name for name, kind in _KINDS.items() if kind == "activation")


class PoliciedModel(NamedTuple):
    """A model under a policy: a module to which the user applied one.

    Attributes:
      policy: the policy.
      path: the path of the module.
    """

    policy: ModelPolicy
    path: Path

    def contains(self, path: Path) -> bool:
        """Return whether ``path`` is the path of the model or of a module inside."""
        return path[: len(self.path)] == self.path

    def relative(self, path: Path) -> Path:
        """Return the path of a module in the model, from the model down."""
        return path[len(self.path) :]


def models_around(scope: Any) -> tuple[PoliciedModel, ...]:
    """Return the models that a scope belongs to, outermost first."""
    models: tuple[PoliciedModel, ...] = scope.flags.get(_MODELS, ())
    return models


def add_model(scope: Any, model: PoliciedModel) -> None:
    """Make a scope, and the scopes that are created below it, belong to ``model``."""
    if model not in models_around(scope):
        _set_flag(scope, _MODELS, (*models_around(scope), model))


def without_models(scope: Any) -> Scope:
    """Return a copy of a scope that belongs to no model."""
    copy: Any = scope.rewound()
    copy.flags = copy.flags.copy({_MODELS: ()})
    return copy


@contextlib.contextmanager
def convert_variables(scope: Any, treatment: Treatment) -> Iterator[None]:
    """Convert the variables that a module reads from ``scope`` and writes to it, inside of the context.

    Args:
      scope: the scope of the module. Modules that share it may have other treatments.
      treatment: how the module is computed.
    """
    before = scope.__class__, vars(scope).get("jaxmp_treatment")
    scope.__class__, scope.jaxmp_treatment = _ConvertingScope, treatment
    try:
        yield
    finally:
        scope.__class__, scope.jaxmp_treatment = before


class _ConvertingScope(Scope):
    """The scope of a module under a policy.

    The code of the module reads variables in the dtypes in which it is traced. They are stored in their own dtypes.
    """

    jaxmp_treatment: Treatment

    def param(self, *args: Any, **kwargs: Any) -> Any:
        return self._for_code(PARAMS, super().param(*args, **kwargs))

    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        return self._for_code(col, super().get_variable(col, name, default))

    def put_variable(self, col: str, name: str, value: Any) -> None:
        kind = _KINDS.get(col, "other")
        if kind != "activation" and isinstance(value, Mapping) and col not in self.reservations.get(name, ()):
            kind = "other"  # the variables of a submodule, whose own scope has converted the new ones
        old = super().get_variable(col, name)
        super().put_variable(col, name, self.jaxmp_treatment.convert_for_storage(value, old, kind))

    def push(self, name: Any = None, *args: Any, **kwargs: Any) -> Scope:
        scope = super().push(name, *args, **kwargs)
        if any(_has_path_patterns(model.policy) for model in models_around(scope)):
            _set_flag(scope, _PATH, scope.path)
        return scope

    def _for_code(self, col: str, value: Any) -> Any:
        treatment = self.jaxmp_treatment
        if col == PARAMS and rounded_params.value:
            value = jax.tree.map(treatment.round_param, value)
        return jax.tree.map(lambda leaf: treatment.convert_for_code(leaf, col == PARAMS), value)


def _has_path_patterns(policy: ModelPolicy) -> bool:
    return not all(map(is_class_pattern, policy.policies.patterns))


def _set_flag(scope: Any, name: str, value: Any) -> None:
    if scope.flags.get(name) != value:
        scope.flags = scope.flags.copy({name: value})
