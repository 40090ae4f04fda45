"""States as lists of their leaves, which is what a compiled step takes and returns.

JAX flattens what a jitted function takes and builds what it returns, in every call; for a small model that takes as
long as its arithmetic. A state that goes from one step into the next need not be built at all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import jax

_KEY = "_flattened"  # of the attribute that stands for all others until one of them is read


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Flattened:
    """A pytree of a class of its own, flattened; a pytree whose leaves are the same."""

    leaves: list[Any]
    # The class and the structure: in a tuple, which finds the same object equal to itself without looking into it.
    form: tuple[type, Any] = dataclasses.field(metadata={"static": True})

    def built(self) -> Any:
        """The pytree."""
        return jax.tree.unflatten(self.form[1], self.leaves)

    def lazy(self) -> Any:
        """The pytree, an instance of :class:`Lazy`, built when one of its attributes is read."""
        if not _may_wait(self.form[0]):
            return self.built()
        new: Any = object.__new__(self.form[0])
        vars(new)[_KEY] = self
        return new


def flattened(tree: Any, like: Flattened | None = None) -> Flattened:
    """The leaves of ``tree``, and the form of it: that of ``like``, the same object, if it is equal."""
    if isinstance(tree, Lazy) and (known := vars(tree).get(_KEY)) is not None:
        return known
    leaves, structure = jax.tree.flatten(tree)
    form = type(tree), structure
    return Flattened(leaves, like.form if like is not None and like.form == form else form)


class Lazy:
    """A class whose instances may be flattened until one of their attributes is read.

    Its first fields, each of which is one array, are read without that.
    """

    _first: ClassVar[tuple[str, ...]] = ()

    def _build(self) -> dict[str, Any]:
        own = vars(self)
        if (known := own.get(_KEY)) is not None:
            own.update(vars(known.built()))
            own.pop(_KEY, None)  # last, as another thread may be here
        return own

    if not TYPE_CHECKING:  # else no attribute would be unknown

        def __getattr__(self, name: str) -> Any:
            if name in self._first and (known := vars(self).get(_KEY)) is not None:
                return known.leaves[self._first.index(name)]
            self._build()
            return object.__getattribute__(self, name)  # whose error names what is missing

    def __getstate__(self) -> dict[str, Any]:
        return self._build()  # for copies and pickles


@functools.cache
def _may_wait(cls: Any) -> bool:
    """Whether no field of a subclass is found otherwise: a default is an attribute of the class."""
    is_own = cls.__getattr__ is vars(Lazy)["__getattr__"] and cls.__getattribute__ is object.__getattribute__
    return is_own and not any(hasattr(cls, field.name) for field in dataclasses.fields(cls))
