"""Check the fields of loss scales, and register loss scales with JAX and Flax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import from_state_dict, register_serialization_state, to_state_dict

TINY = float(np.finfo(np.float32).tiny)  # a device may flush smaller numbers to zero
HUGE = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """The base of loss scales with fields that are checked and converted.

    ``_leaves`` maps each field that becomes an array to its dtype.
    """

    _leaves: ClassVar[Mapping[str, Any]]

    def _with(self, **fields: Any) -> Self:
        return _new_instance(type(self), {**vars(self), **fields})

    def __post_init__(self) -> None:
        for name, x in vars(self).items():
            if name not in _RULES or (x is None and name in ("backoff", "countdown")):
                continue
            if name in ("loss_scale", "min_loss_scale") and jnp.issubdtype(getattr(x, "dtype", float), np.integer):
                warnings.warn(f"Expected floating type for {name}, got {x.dtype}: it becomes float32", stacklevel=4)
            self.__dict__[name] = self._checked(name, x)
        self._check_bounds()

    def within_bounds(self) -> Self:
        """Return the loss scale with its numbers moved into the bounds of its settings."""
        low, high = max(vars(self)["min_loss_scale"], TINY), vars(self)["max_loss_scale"]
        return self._with(loss_scale=jnp.clip(vars(self)["loss_scale"], low, high))

    def _checked(self, name: str, x: Any) -> Any:
        """Check a field, and return it as an array, an int or a float."""
        if name not in self._leaves:
            number = require(name, x)
            return int(number) if name in ("period", "hysteresis") else float(number)
        if is_concrete(x):
            require(name, x)
        return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x, self._leaves[name])

    def _check_bounds(self) -> None:
        """Raise a ValueError if the scale is outside its bounds, or they are swapped."""
        scale, low, high = (vars(self)[name] for name in ("loss_scale", "min_loss_scale", "max_loss_scale"))
        if low > high:
            raise ValueError(f"min_loss_scale must not be above max_loss_scale, got {low} and {high}: change one")
        if is_concrete(scale) and not np.all((np.float32(low) <= scale) & (scale <= np.float32(high))):
            raise ValueError(
                f"loss_scale must lie between min_loss_scale and max_loss_scale, got {scale} outside of {low} to "
                f"{high}: start within these bounds, or change them"
            )


def is_concrete(x: Any) -> bool:
    """Return whether the value of ``x`` is known and not traced."""
    return not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) and getattr(x, "is_fully_addressable", True)


def require(name: str, x: Any) -> np.ndarray:
    """Return the value of field ``name`` as float64.

    Raises:
      ValueError: ``x`` breaks the rule of the field in ``_RULES``, is not a number, or is a tracer.
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


_RULES: dict[str, tuple[Callable[[Any], Any], str, str]] = {  # a test, "must be ...", remedy
    "loss_scale": (
        lambda x: (x >= TINY) & (x <= HUGE),
        "positive and finite, and normal in float32",
        "2**15 is a usual start, and NoOpLossScale() stands for no scaling",
    ),
    "counter": (lambda x: _whole(x + 1), "a whole number of steps, 0 or more", "a new scale starts at 0"),
    "countdown": (lambda x: _whole(x + 1), "a whole number of steps, 0 or more", "with None, it starts at hysteresis"),
    "running_max": (lambda x: (x >= 0) & (x <= HUGE), "finite in float32 and not negative", "0 before any step"),
    "period": (_whole, "a whole number of steps, from 1 to 2**31 - 1", "2000 is usual"),
    "hysteresis": (_whole, "a whole number of steps, from 1 to 2**31 - 1", "1 backs off at every non-finite step"),
    "factor": (lambda x: (x > 1) & (x <= HUGE), "a finite number above 1", "growth multiplies by it, usually by 2"),
    "backoff": (lambda x: (x > 0) & (x < 1), "between 0 and 1, both excluded", "None stands for 1/factor"),
    "headroom": (lambda x: (x >= 0) & (x <= 128), "a number from 0 to 128", "4 leaves a factor of 16 before overflow"),
    "min_loss_scale": (lambda x: (x >= 0) & (x <= HUGE), "finite in float32 and not negative", "1 is usual"),
    "max_loss_scale": (lambda x: (x >= TINY) & (x <= HUGE), "positive and finite in float32", "2**24 is usual"),
}


@functools.cache
def register(cls: Any) -> None:
    """Register a dataclass as a pytree that Flax can save.

    The leaves are the fields that are not in ``static_fields``. If the author of the class has already registered the
    class with JAX or Flax, that registration stays. A class that is not a dataclass is not registered.
    """
    is_dataclass = dataclasses.is_dataclass(cls)
    if not is_dataclass:
        return
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    static_names = [name for name in names if name in cls.static_fields]
    leaf_names = [name for name in names if name not in cls.static_fields]
    keys = [jax.tree_util.GetAttrKey(name) for name in leaf_names]

    def flatten(x: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(x, name) for name in leaf_names], tuple(getattr(x, name) for name in static_names)

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, static = flatten(x)
        return list(zip(keys, leaves, strict=True)), static

    def unflatten(static: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        return _new_instance(cls, dict(zip((*static_names, *leaf_names), (*static, *leaves), strict=True)))

    def save(x: Any) -> dict[str, Any]:
        return {name: to_state_dict(getattr(x, name)) for name in names}

    def restore(target: Any, state: dict[str, Any]) -> Any:
        if state.keys() != {*names}:
            raise ValueError(
                f"the state of a {cls.__name__} has the entries {sorted(names)}, got {sorted(state)}: restore it "
                "into an object of the class that was saved"
            )
        fields = {name: from_state_dict(getattr(target, name), value, name) for name, value in state.items()}
        return dataclasses.replace(target, **fields)

    with contextlib.suppress(ValueError):  # registered already
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    with contextlib.suppress(ValueError):
        register_serialization_state(cls, save, restore)


def _new_instance(cls: type, fields: Mapping[str, Any]) -> Any:
    """Create an instance without calling the constructor, which refuses tracers."""
    new: Any = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new
