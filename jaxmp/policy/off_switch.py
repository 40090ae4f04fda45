"""Functions under a policy, which run as they are written while policies are switched off.

``jaxmp.inspect.compare`` and ``jaxmp.inspect.tune`` switch policies off to compute in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jaxmp.base.cache_keys import policies_off

F = TypeVar("F", bound=Callable[..., Any])


def unless_policies_off(fun: F) -> Callable[[Callable[..., Any]], F]:
    """Return a decorator for a function that runs ``fun`` under a policy.

    The decorated function has the name and the signature of ``fun``. While policies are switched off, it calls ``fun``.
    """

    def decorate(under_policy: Callable[..., Any]) -> F:
        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return fun(*args, **kwargs) if policies_off.value else under_policy(*args, **kwargs)

        return cast(F, wrapped)

    return decorate
