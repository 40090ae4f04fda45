"""Loss scales as data: fields that are checked, pytrees that check nothing, and flax serialization of every field."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import from_state_dict, register_serialization_state, to_state_dict

TINY = float(np.finfo(np.float32).tiny)  # a device may flush what is smaller to zero
HUGE = float(np.finfo(np.float32).max)


class Structure(tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]):
    """Names of the attributes that are leaves; names and values of those that are not.

    What was rebuilt has it as ``_structure``. ``fields`` are those that are not leaves, by name, and the structure
    itself: an object is rebuilt from them. Each call of a step takes its loss scale apart and makes the next one, so
    that all attributes are looked up at once.
    """

    fields: dict[str, Any]
    _values_in: Callable[[dict[str, Any]], tuple[Any, ...]]
    _leaves_in: Callable[[dict[str, Any]], tuple[Any, ...]]

    def __new__(cls, parts: tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]) -> Self:
        new = super().__new__(cls, parts)
        new.fields = {**dict(new[1]), "_structure": new}
        new._leaves_in, new._values_in = _getter(new[0]), _getter((*new.fields,))
        return new

    def __reduce__(self) -> Any:
        return type(self), (tuple(self),)

    def leaves_in(self, attributes: dict[str, Any]) -> tuple[Any, ...] | None:
        """The leaves of an object with these attributes; None if it has another structure by now.

        What copies and changes itself, in ``adjust`` say, takes the structure along.
        """
        fields = self.fields
        try:
            is_whole = len(attributes) == len(self[0]) + len(fields)
            if is_whole and self._values_in(attributes) == self._values_in(fields):
                return self._leaves_in(attributes)
        except KeyError:  # it has another attribute in place of one of these
            pass
        return None


def _getter(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What returns the values of names in a dict."""
    return operator.itemgetter(*names) if len(names) > 1 else lambda found: tuple([found[name] for name in names])


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """A dataclass whose fields are checked; those in ``_leaves`` become arrays of that dtype."""

    _leaves: ClassVar[Mapping[str, Any]]

    def _with(self, **fields: Any) -> Self:
        return rebuilt(type(self), {**vars(self), **fields})

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


@functools.cache
def register(cls: type) -> None:
    """Makes a class of loss scales a pytree, and has ``flax.serialization`` save and restore its instances.

    Leaves are the attributes that are numbers or arrays, or trees of them, but for those in ``static_fields``; all the
    rest is static and hashable. What the author of the class registered is left as it is.
    """
    has_slots = bool(_slots(cls))

    def flatten(x: Any) -> tuple[Sequence[Any], Structure]:
        attributes = _attributes(x) if has_slots else x.__dict__
        known = attributes.get("_structure")
        if isinstance(known, Structure) and (leaves := known.leaves_in(attributes)) is not None:
            return leaves, known
        structure = _structure(x)
        return [getattr(x, name) for name in structure[0]], structure

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Structure]:
        leaves, structure = flatten(x)
        return list(zip(map(jax.tree_util.GetAttrKey, structure[0]), leaves, strict=True)), structure

    def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
        return rebuilt(cls, structure.fields, zip(structure[0], leaves, strict=True))

    def save(x: Any) -> dict[str, Any]:
        return {name: to_state_dict(value) for name, value in _fields(x).items() if _is_saved(value)}

    def restore(target: Any, state: dict[str, Any]) -> Any:
        fields = _fields(target)
        if state.keys() != (expected := save(target)).keys():
            raise ValueError(
                f"the state of a {cls.__name__} has the entries {sorted(expected)}, got {sorted(state)}: restore it "
                "into an object of the class it was saved from"
            )
        new = {name: from_state_dict(fields[name], value, name) for name, value in state.items()}
        return dataclasses.replace(target, **new) if isinstance(target, ScaleState) else rebuilt(cls, {**fields, **new})

    with contextlib.suppress(ValueError):  # registered already
        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    with contextlib.suppress(ValueError):
        register_serialization_state(cls, save, restore)


def rebuilt(cls: type, fields: Mapping[str, Any], leaves: Iterable[tuple[str, Any]] = ()) -> Any:
    """An instance past the constructor and its checks: a leaf may be a tracer, or whatever a tree is rebuilt with."""
    new: Any = object.__new__(cls)
    if not _slots(cls):
        attributes = vars(new)
        attributes.update(fields)
        attributes.update(leaves)
        return new
    for name, value in (*fields.items(), *leaves):
        object.__setattr__(new, name, value)
    return new


def _slots(cls: type) -> list[str]:
    names: list[str] = copyreg._slotnames(cls)  # type: ignore[attr-defined]  # which pickle and copy go by
    return names


def _attributes(x: Any) -> dict[str, Any]:
    slots = {name: getattr(x, name) for name in names if hasattr(x, name)} if (names := _slots(type(x))) else {}
    return {**slots, **vars(x)}


def _fields(x: Any) -> dict[str, Any]:
    declared = dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()  # which may be class attributes
    names = [*(each.name for each in declared if each.init), *sorted(_attributes(x))]
    return {name: getattr(x, name) for name in dict.fromkeys(names) if name != "_structure"}


def _structure(x: Any) -> Structure:
    """The structure of ``x``; one that was rebuilt from leaves remembers it.

    For leaves may be no numbers there, and to look at every attribute took longer than to dispatch a small step.
    """
    fields = _fields(x)
    dynamic = [item for item in fields.items() if item[0] not in x.static_fields]
    names = tuple(name for name, value in dynamic if all(map(_is_number, jax.tree.leaves(value))))
    return Structure((names, tuple(sorted(item for item in fields.items() if item[0] not in names))))


def changed_fields(new: Any, old: Any) -> list[str]:
    """The names of what is no leaf of a loss scale and differs in another of its class."""
    leaves = {getattr(path[0], "name", None) for path, _ in jax.tree.leaves_with_path(old)}
    after = _fields(new)

    def is_changed(name: str, before: Any) -> bool:
        if isinstance(before, jax.Array):  # a leaf without a name
            return False
        if name not in after:
            return True
        now = after[name]
        structure: Any = jax.tree.structure(now)
        return isinstance(now, jax.Array) or structure != jax.tree.structure(before) or bool(now != before)

    return [name for name, value in _fields(old).items() if name not in leaves and is_changed(name, value)]


def _is_number(leaf: Any) -> bool:
    numbers = (int, float, complex, np.generic, np.ndarray, jax.Array, jax.ShapeDtypeStruct)
    return isinstance(leaf, numbers) and not isinstance(leaf, bool)


def _is_saved(value: Any) -> bool:
    return all(isinstance(leaf, (bool, str, bytes)) or _is_number(leaf) for leaf in jax.tree.leaves(value))
