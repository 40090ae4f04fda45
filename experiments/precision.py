"""What the flags --policy, --opt-level, --override and --loss-scale say, as jaxmp's objects."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

import jaxmp
from jaxmp.dtypes import nearest

# The scale of each of Apex's opt levels; float16 params (O3) go without.
OPT_LEVELS = {"O0": "none", "O1": "dynamic", "O2": "dynamic", "O3": "none"}

_KINDS: dict[str, type] = {
    "none": jaxmp.NoOpLossScale,
    "static": jaxmp.StaticLossScale,
    "dynamic": jaxmp.DynamicLossScale,
    "headroom": jaxmp.HeadroomLossScale,
}
_NO_FLAGS = ("counter", "countdown", "running_max", "dtype")  # what training moves, and what is no number


def read_policy(policy: str, loss_scale: str, opt_level: str | None = None) -> tuple[Any, Any, str]:
    """The policy, the loss scale and the text of the loss scale (in place of ``auto``).

    An opt level stands for a policy and, unless ``loss_scale`` says otherwise, for the loss scale that Apex gives it.
    ``auto`` is dynamic where the policy computes in float16, and none elsewhere.

    Raises:
      ValueError: something is unknown or out of range, or both a policy and an opt level were given.
    """
    if opt_level is not None:
        if policy != "auto":
            raise ValueError(
                f"--opt-level names a policy, as --policy does: got --opt-level {opt_level} and --policy {policy}; "
                "leave one of them away"
            )
        policy, automatic = opt_level, OPT_LEVELS[opt_level]
        chosen = jaxmp.get_policy(policy)
    else:
        chosen = jaxmp.get_policy(policy)
        automatic = "dynamic" if compute_dtype(chosen) == jnp.float16 else "none"
    text = automatic if loss_scale == "auto" else loss_scale
    return chosen, read_loss_scale(text), text


def compute_dtype(policy: Any) -> Any:
    """The compute dtype of a policy, of a map's default."""
    return (policy.root if isinstance(policy, jaxmp.PolicyMap) else policy).compute_dtype


def read_loss_scale(text: str) -> Any:
    """The loss scale that ``text`` names: ``none``, ``static:4096``, ``dynamic``, ``headroom``.

    After a colon come the class's parameters, ``dynamic:loss_scale=1024,period=100``; the first needs no name.

    Raises:
      ValueError: the kind or a parameter is unknown, or a value out of range.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in _KINDS:
        known = nearest(kind, _KINDS)
        raise ValueError(f"unknown loss scale {text!r}; known, nearest first: {known}; write static:4096, say")
    names = [field.name for field in dataclasses.fields(_KINDS[kind]) if field.init and field.name not in _NO_FLAGS]
    values: dict[str, Any] = {}
    for position, part in enumerate(filter(None, rest.split(","))):
        name, _, value = part.partition("=") if "=" in part or position or not names else (names[0], "=", part)
        if name not in names:
            known = nearest(name, names) if names else "none at all"
            raise ValueError(f"the loss scale {kind!r} has no parameter {part!r}; its parameters: {known}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"a loss scale's parameters are numbers, got {part!r} in {text!r}") from None
        values[name] = int(number) if number.is_integer() and name in ("period", "hysteresis") else number
    if kind == "static" and not values:
        raise ValueError("a static loss scale needs its value, got 'static'; write static:4096")
    return _KINDS[kind](**values)


def read_overrides(texts: tuple[str, ...]) -> dict[str, str]:
    """``PATTERN=POLICY`` strings as the overrides of :func:`jaxmp.linen.apply_policy`.

    Raises:
      ValueError: one has no ``=``.
    """
    overrides = {}
    for text in texts:
        pattern, equals, policy = text.partition("=")
        if not (pattern and equals and policy):
            raise ValueError(f"an override is PATTERN=POLICY, got {text!r}; write '**/Dense_1=float32', say")
        overrides[pattern] = policy
    return overrides
