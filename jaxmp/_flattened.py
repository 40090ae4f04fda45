"""States as lists of their leaves, which is what a compiled step takes and returns.

JAX flattens what a jitted function takes and builds what it returns, in every call; for a small model that takes as
long as its arithmetic. A state that goes from one step into the next need not be built at all.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import jax

_KEY = "_flattened"  # of the attribute that stands for all fields until one of them is read


@dataclasses.dataclass(eq=False, slots=True)
class Flattened:
    """A pytree as the list of its leaves; itself a pytree, with the same leaves under the same names."""

    form: tuple[type, Any]  # class and structure; two tuples of the same objects are equal without a look into these
    leaves: Any  # a sequence

    def built(self) -> Any:
        """The pytree."""
        return jax.tree.unflatten(self.form[1], self.leaves)

    def lazy(self) -> Any:
        """The pytree, an instance of :class:`Lazy`, whose fields are made when one of them is read."""
        cls: Any = self.form[0]
        if not cls._may_wait:
            return self.built()
        new: Any = object.__new__(cls)
        vars(new)[_KEY] = self
        return new


@dataclasses.dataclass(frozen=True)
class _Place:
    """The path of a leaf in the pytree, as one key."""

    path: Any

    def __str__(self) -> str:
        return jax.tree_util.keystr(self.path)


def _with_places(flat: Flattened) -> tuple[list[tuple[_Place, Any]], Any]:
    _, structure = flat.form
    paths = jax.tree.leaves_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))
    return [(_Place(path), leaf) for (path, _), leaf in zip(paths, flat.leaves, strict=True)], flat.form


# Both in every call of a step: the class itself, and a function written in C.
jax.tree_util.register_pytree_with_keys(Flattened, _with_places, Flattened, operator.attrgetter("leaves", "form"))


def flattened(tree: Any, like: Flattened | None = None) -> Flattened:
    """The leaves of ``tree``, and the form of it: that of ``like``, the same object, if it is equal."""
    if isinstance(tree, Lazy) and (known := vars(tree).get(_KEY)) is not None and len(vars(tree)) == 1:
        return known
    leaves, structure = jax.tree.flatten(tree)
    form = type(tree), structure
    return Flattened(like.form if like is not None and like.form == form else form, leaves)


class _Field:
    """A field of a class, found where an instance has none in its ``__dict__``: it is made with all the others."""

    def __init__(self, name: str, default: Any, position: int | None) -> None:
        self.name, self.default, self.position = name, default, position

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is not None and (known := vars(instance).get(_KEY)) is not None:
            return known.leaves[self.position] if self.position is not None else instance._build()[self.name]
        if instance is not None and self.name in vars(instance):  # made by another thread meanwhile
            return vars(instance)[self.name]
        if self.default is dataclasses.MISSING:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}")
        return self.default


class Lazy:
    """A dataclass whose instances may be flattened until one of their fields is read.

    Reading one of its first fields, each of which is one array, makes no others.
    """

    _first: ClassVar[tuple[str, ...]] = ()  # their names
    # Whether an instance may be flattened: not if its class finds or copies its fields in a way of its own.
    _may_wait: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # makes it a dataclass
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        for field in fields:
            if _found(cls, field) is field.default:  # no property, no slot
                position = cls._first.index(field.name) if field.name in cls._first else None
                setattr(cls, field.name, _Field(field.name, field.default, position))
        own = all(getattr(cls, name) is getattr(Lazy, name) for name in _PROTOCOL)
        cls._may_wait = own and all(isinstance(_found(cls, field), _Field) for field in fields)

    def _build(self) -> dict[str, Any]:
        own = vars(self)
        if (known := own.get(_KEY)) is not None:
            for name, value in vars(known.built()).items():
                own.setdefault(name, value)  # what was set in spite of all stays, and what another thread has made
            own.pop(_KEY, None)  # last, as another thread may be here
        return own

    def __getstate__(self) -> dict[str, Any]:
        return self._build()  # for copies and pickles


def _found(cls: type, field: Any) -> Any:
    """What classes have for a field; its default, or MISSING, if none has anything else."""
    return next((vars(base)[field.name] for base in cls.__mro__ if field.name in vars(base)), field.default)


_PROTOCOL = ("__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__")
