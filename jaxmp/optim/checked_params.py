"""Turn off the warnings of optimizers about params that a caller has checked."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

from jaxmp.base.context_variables import setting

_are_checked: ContextVar[bool] = ContextVar("_are_checked", default=False)


def params_are_checked() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the ``init`` of an optimizer does not warn about params."""
    return setting(_are_checked, True)


def are_params_checked() -> bool:
    """Return whether the code runs in a context of :func:`params_are_checked`."""
    return _are_checked.get()
