"""The functions that the tools return, and errors for tools that are called in the wrong way."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

from jaxmp.base.arguments import require_function

P = ParamSpec("P")
R = TypeVar("R")


class Inspection(Generic[R]):
    """A function that inspects a call of another function.

    ``audit(fun)``, ``profile(fun)`` and the other tools return it. It takes the arguments of ``fun``, and returns the
    report of the tool.

    Args:
      name: the name of the tool.
      fun: the inspected function.
      inspect_call: a function of ``fun``'s arguments that returns the report.

    >>> jaxmp.inspect.audit(jnp.matmul)
    <audit of matmul: call it with the arguments of matmul, audit(matmul)(...)>
    """

    def __init__(self, name: str, fun: Any, inspect_call: Callable[..., R]) -> None:
        functools.update_wrapper(self, inspect_call, updated=())
        self._name = name
        self._call = f"{name}({name_of(fun)})(...)"
        self._fun_name = name_of(fun)
        self._inspect_call = inspect_call

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Return the report of the call with these arguments.

        Raises:
          TypeError: a keyword argument is for the inspected function, which gets positional arguments only.
        """
        of_tool = inspect.signature(self._inspect_call).parameters
        for keyword in kwargs:
            if keyword not in of_tool:
                raise TypeError(
                    f"{self._name} passes positional arguments only, got the keyword argument {keyword!r}; write "
                    f"{self._name}(functools.partial({self._fun_name}, {keyword}=...))(...)"
                )
        return self._inspect_call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self._name} of {self._fun_name}: call it with the arguments of {self._fun_name}, {self._call}>"

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise AttributeError(
            f"{self._name} has not inspected a call yet, so it has no {attribute!r}; write {self._call}.{attribute}"
        )


def tool(
    make: Callable[Concatenate[Any, P], Callable[..., R]],
) -> Callable[Concatenate[Any, P], Inspection[R]]:
    """Turn a function of a function into a tool, which returns an :class:`Inspection`.

    The tool raises a TypeError if it gets the result of a function in place of the function, or the function together
    with its arguments.
    """
    name = make.__name__
    signature = inspect.signature(make)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    most = sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)

    @functools.wraps(make)
    def checked(fun: Any, *args: P.args, **kwargs: P.kwargs) -> Inspection[R]:
        remedy = f"write {name}(fun)(arguments of fun)"
        require_function(fun, f"{name} takes a function", remedy, f"write {name}(model.apply)(variables, x)")
        if 1 + len(args) > most:
            raise TypeError(f"{name} takes a function without its arguments, got {len(args)} more; {remedy}")
        return Inspection(name, fun, make(fun, *args, **kwargs))

    return checked


def name_of(fun: Any) -> str:
    """Return a short name of a function: ``step`` for a train step."""
    if type(fun).__name__ == "TrainStep":
        return "step"
    name = getattr(fun, "__name__", type(fun).__name__)
    return "fun" if name == "<lambda>" else name
