"""Refuse to train a model in float32 where its copy under a policy was meant.

``apply_policy`` and ``autocast`` return a copy and leave the model that they are called with as it is. Training that
model by mistake computes in float32. An optimizer therefore notes whether its model is under a policy, or has a copy
that is, and the loss must then be evaluated on a model under a policy.
"""

from __future__ import annotations

import weakref
from typing import Any

from jaxmp._internals.flax.nnx_variables import is_module, modules_in
from jaxmp.nnx.run import decision_of

_with_copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The models that have a copy under a policy, by their ids. A mark on the model itself would change its graphdef."""


def note_copy(model: Any) -> None:
    """Note that ``model`` has a copy under a policy."""
    _with_copies[id(model)] = model


def needs_policy(model: Any) -> bool:
    """Return whether training on ``model`` needs a policy: it, or a copy, is under one."""
    return decision_of(model) is not None or _with_copies.get(id(model)) is model


def require_policy(model: Any, optimizer: Any) -> None:
    """Raise a ValueError if ``model`` is under no policy, but training needs one.

    It does if the model that ``optimizer`` was made with needed one, or if ``model`` has a copy under a policy.
    """
    if not is_module(model) or not (optimizer._needs_policy or needs_policy(model)):
        return
    if any(decision_of(module) is not None for _, module in modules_in(model)):
        return
    name = type(model).__name__
    raise ValueError(
        f"training needs the model that apply_policy or autocast returned, got a {name} under no policy;\n"
        "write model = jaxmp.nnx.apply_policy(model, policy), with 'float32' to train in float32"
    )
