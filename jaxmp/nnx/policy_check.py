"""Raise an error if a model is trained in place of its copy under a policy.

``apply_policy`` and ``autocast`` return a copy and do not change the original model. A user who trains the original by
mistake would train in float32. So an optimizer records whether its model is under a policy, or has a copy under a
policy. In either case, the loss must be computed with a model under a policy.
"""

from __future__ import annotations

import weakref
from typing import Any

from jaxmp._internals.flax.nnx_variables import is_module, modules_in
from jaxmp.nnx.run import decision_of

_with_copies: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The models with a copy under a policy, by their ids. (An attribute of the model would change its graphdef.)"""


def note_copy(model: Any) -> None:
    """Record that ``model`` has a copy under a policy."""
    _with_copies[id(model)] = model


def needs_policy(model: Any) -> bool:
    """Return whether ``model`` is under a policy, or has a copy under one."""
    return decision_of(model) is not None or _with_copies.get(id(model)) is model


def require_policy(model: Any, optimizer: Any) -> None:
    """Raise a ValueError if ``model`` has no policy, but should have one.

    ``model`` should have a policy in two cases:

    - ``model`` has a copy under a policy.
    - The optimizer was created with a model that is under a policy or has a copy under a policy.
    """
    if not is_module(model) or not (optimizer._needs_policy or needs_policy(model)):
        return
    if any(decision_of(module) is not None for _, module in modules_in(model)):
        return
    name = type(model).__name__
    raise ValueError(
        f"training needs the model that apply_policy or autocast returned, got a {name} without a policy;\n"
        "write model = jaxmp.nnx.apply_policy(model, policy), with 'float32' to train in float32"
    )
