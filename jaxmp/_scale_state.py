"""Loss scales as data: fields that are checked, pytrees that check nothing, and flax serialization of every field."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import register_serialization_state

_C = TypeVar("_C", bound=type)

TINY = float(np.finfo(np.float32).tiny)  # a device may flush what is smaller to zero
HUGE = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """A pytree of the fields in ``_leaves``, arrays of that dtype; the other fields are hashable and static."""

    _leaves: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls) -> None:
        def flatten(x: Any) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, Any], ...]]:
            static = tuple(item for item in sorted(vars(x).items()) if item[0] not in cls._leaves)
            return [(jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in cls._leaves], static

        def unflatten(static: Iterable[tuple[str, Any]], leaves: Iterable[Any]) -> Any:
            return object.__new__(cls)._with(**dict(static), **dict(zip(cls._leaves, leaves, strict=True)))

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)

    def _with(self, **fields: Any) -> Self:
        # Past the constructor and its checks: a leaf may be a tracer, or whatever a tree is rebuilt with.
        new = object.__new__(type(self))
        new.__dict__.update(vars(self), **fields)
        return new

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if name not in _RULES or (x is None and name in ("backoff", "countdown")):
                continue
            if name in ("loss_scale", "min_loss_scale") and jnp.issubdtype(getattr(x, "dtype", float), np.integer):
                warnings.warn(f"Expected floating type for {name}, got {x.dtype}: it becomes float32", stacklevel=4)
            if name in self._leaves:
                if is_concrete(x):
                    require(name, x)
                value: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x, self._leaves[name])
            else:
                value = (int if name in ("period", "hysteresis") else float)(require(name, x))
            self.__dict__[name] = value
        scale, low, high = (vars(self)[name] for name in ("loss_scale", "min_loss_scale", "max_loss_scale"))
        if low > high:
            raise ValueError(f"min_loss_scale must not be above max_loss_scale, got {low} and {high}: move one of them")
        if is_concrete(scale) and not np.all((np.float32(low) <= scale) & (scale <= np.float32(high))):
            raise ValueError(
                f"loss_scale must lie between min_loss_scale and max_loss_scale, got {scale} outside of {low} to "
                f"{high}: start within them, or move them"
            )


def is_concrete(x: Any) -> bool:
    """Whether the value of ``x`` can be looked at here."""
    return not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) and getattr(x, "is_fully_addressable", True)


def require(name: str, x: Any) -> np.ndarray:
    """The value of field ``name``, float64.

    Raises:
      ValueError: it breaks the field's rule, is no number, or is a tracer.
    """
    holds, rule, remedy = _RULES[name]
    try:
        value = np.asarray(x, np.float64)
    except (TypeError, ValueError):
        value = np.asarray(np.nan)
    if not np.all(holds(value)):
        raise ValueError(f"{name} must be {rule}, got {x}: {remedy}")
    return value


def _whole(x: Any) -> Any:
    return (x >= 1) & (x < 2**31) & (x % 1 == 0)


_RULES: dict[str, tuple[Callable[[Any], Any], str, str]] = {  # whether it holds, "must be ...", remedy
    "loss_scale": (
        lambda x: (x >= TINY) & (x <= HUGE),
        "positive and finite, and normal in float32",
        "2**15 is a usual start, and NoOpLossScale() stands for no scaling",
    ),
    "counter": (lambda x: _whole(x + 1), "a whole number of steps, 0 or more", "a new scale starts at 0"),
    "countdown": (lambda x: _whole(x + 1), "a whole number of steps, 0 or more", "None starts it at hysteresis"),
    "running_max": (lambda x: (x >= 0) & (x <= HUGE), "finite in float32 and not negative", "0 stands for none yet"),
    "period": (_whole, "a whole number of steps, from 1 to 2**31 - 1", "2000 is usual"),
    "hysteresis": (_whole, "a whole number of steps, from 1 to 2**31 - 1", "1 backs off at every non-finite step"),
    "factor": (lambda x: (x > 1) & (x <= HUGE), "a finite number above 1", "growth multiplies by it, usually by 2"),
    "backoff": (lambda x: (x > 0) & (x < 1), "between 0 and 1, both excluded", "None stands for 1/factor"),
    "headroom": (lambda x: (x >= 0) & (x <= 128), "from 0 to 128 binary orders", "4 keeps a factor of 16 free"),
    "min_loss_scale": (lambda x: (x >= 0) & (x <= HUGE), "finite in float32 and not negative", "1 is usual"),
    "max_loss_scale": (lambda x: (x >= TINY) & (x <= HUGE), "positive and finite in float32", "2**24 is usual"),
}


def flax_state(cls: _C) -> _C:
    """Class decorator: ``flax.serialization`` saves and restores every field of the dataclass, static ones too."""

    def restore(target: Any, state: dict[str, Any]) -> Any:
        if state.keys() != vars(target).keys():
            raise ValueError(
                f"the state of a {cls.__name__} has the entries {sorted(vars(target))}, got {sorted(state)}: restore "
                "it into an object of the class it was saved from"
            )
        return dataclasses.replace(target, **state)

    register_serialization_state(cls, lambda x: dict(vars(x)), restore)
    return cls
