"""Refuse an ``nnx.bridge.ToLinen`` of an NNX module without a policy."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from jaxmp.linen.fields import replace_field
from jaxmp.policy.patterns import Path


def is_bridge(cls: type) -> bool:
    """Return whether a class of modules is ``nnx.bridge.ToLinen``.

    Subclasses count too.
    """
    return "flax.nnx" in sys.modules and issubclass(cls, sys.modules["flax.nnx"].bridge.ToLinen)


@dataclasses.dataclass(frozen=True)
class _PolicyRequired:
    """A constructor for ``nnx.bridge.ToLinen`` that requires a policy.

    It raises an error if the NNX module has no policy. Flax creates the module in each call, so its policy is not known
    earlier.
    """

    make: Callable[..., Any]
    path: Path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.make(*args, **kwargs)
        if not hasattr(module, "jaxmp_decision"):
            self.fail(type(module).__name__)
        return module

    def fail(self, name: str) -> NoReturn:
        """Raise the error for an NNX module of a class with this name."""
        at = f"{'/'.join(self.path)!r}, " if self.path else ""
        raise ValueError(
            f"a policy does not reach into nnx.bridge.ToLinen, got {at}ToLinen of {name}.\n"
            "Apply the policy to the inner module, then wrap it:\n"
            f"nnx.bridge.ToLinen(lambda *args, **kw: jaxmp.nnx.apply_policy({name}(*args, **kw), policy), ...)"
        )


def require_policy_in_bridge(module: Any, path: Path) -> None:
    """Raise a ValueError if a ``ToLinen`` wraps an NNX module without a policy.

    The error may come only in the call, when Flax creates the module.
    """
    make = module.nnx_class
    checked = _PolicyRequired(make, path)
    if isinstance(make, type):
        checked.fail(make.__name__)
    if not isinstance(make, _PolicyRequired):
        replace_field(module, "nnx_class", checked)
