"""Float32 regions that a tool tries, without a change of the user's code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from jaxmp._internals.jax.sources import Names
from jaxmp.base.cache_keys import planned
from jaxmp.base.context_variables import setting
from jaxmp.engine.marks import scope_of
from jaxmp.program.values import Equation

IsInside = Callable[[Equation], bool]
"""Whether an operation is in a region."""
_is_inside: ContextVar[IsInside | None] = ContextVar("jaxmp_trial_region", default=None)


@contextlib.contextmanager
def trial_region(is_inside: IsInside) -> Iterator[None]:
    """Decide as if the operations that ``is_inside`` accepts were in ``jaxmp.precision("float32")``.

    Programs in caches are not used.
    """
    with setting(_is_inside, is_inside), planned(object()):
        yield


def names_with_trial(equation: Equation) -> Names:
    """Return the scopes around an equation, with the region that a tool tries."""
    is_inside = _is_inside.get()
    if is_inside is None or equation.bodies is not None or not is_inside(equation):
        return equation.names
    return (*equation.names, scope_of("float32"))
