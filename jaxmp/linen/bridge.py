"""Raise an error for an ``nnx.bridge.ToLinen`` whose NNX module has no policy."""

from __future__ import annotations

from typing import Any

from jaxmp.policy.patterns import Path


def require_policy_in_bridge(module: Any, path: Path) -> None:
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
