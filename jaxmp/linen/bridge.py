"""Raise an error for an ``nnx.bridge.ToLinen`` whose NNX module has no policy."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from jaxmp.linen.fields import replace_field
from jaxmp.policy.patterns import Path


def is_bridge(cls: type) -> bool:
    """Return whether ``cls`` is ``nnx.bridge.ToLinen`` or a subclass of it."""
    return "flax.nnx" in sys.modules and issubclass(cls, sys.modules["flax.nnx"].bridge.ToLinen)


@dataclasses.dataclass(frozen=True)
class _PolicyRequired:
    """A function that creates an NNX module and checks that the module has a policy.

    It replaces the author's function in the field ``nnx_class`` of an ``nnx.bridge.ToLinen``. Flax calls the function
    in each call of the ``ToLinen``, so the NNX module does not exist before the call.

    Attributes:
      make: the function that the author passed to ``ToLinen``.
      path: the path of the ``ToLinen`` in the model.
    """

    make: Callable[..., Any]
    path: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.make(*args, **kwargs)
        if not hasattr(module, "jaxmp_decision"):
            self.fail(type(module).__name__)
        return module

    def fail(self, name: str) -> NoReturn:
        """Raise the error for an NNX module of the class ``name``."""
        at = f"{'/'.join(self.path)!r}, " if self.path else ""
        raise ValueError(
            f"a policy does not reach into nnx.bridge.ToLinen, got {at}ToLinen of {name}.\n"
            "Apply the policy to the inner module, then wrap it:\n"
            f"nnx.bridge.ToLinen(lambda *args, **kw: jaxmp.nnx.apply_policy({name}(*args, **kw), policy), ...)"
        )


def require_policy_in_bridge(module: Any, path: Path) -> None:
    """Raise a ValueError if a ``ToLinen`` wraps an NNX module without a policy.

    ``module`` is the ``ToLinen``. If its ``nnx_class`` is a function, the error is raised when Flax calls the function.
    """
    make = module.nnx_class
    checked = _PolicyRequired(make, path)
    if isinstance(make, type):
        checked.fail(make.__name__)
    if not isinstance(make, _PolicyRequired):
        replace_field(module, "nnx_class", checked)
