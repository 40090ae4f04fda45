"""Derive the arguments of a command from the signature and the docstring of its function."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from typing import Any

_RETURNS = "a function without parameters that returns the arguments, as in def arguments(): return params, batch"
_ROLE = re.compile(r":\w+:`~?([^`]*)`|``([^`]*)``")
"""A reference or a name in the markup of a docstring."""


def add_function(command: argparse.ArgumentParser, runs: bool) -> None:
    """Add the function and its arguments; ``runs`` says whether they are run, or only traced."""
    how = "it is run" if runs else "it is traced, not run"
    command.add_argument("function", metavar="MODULE:FUNCTION", help=f"a function or a train step; {how}")
    command.add_argument("--args", metavar="MODULE:FUNCTION", help=f"{_RETURNS}; {how}")
    if not runs:
        shape = "a positional argument, such as float32[8,16], int32[] or key[] (a random key); repeat for more"
        command.add_argument("--arg", metavar="DTYPE[SHAPE]", action="append", default=[], help=shape)


def add_settings(
    command: argparse.ArgumentParser,
    fun: Callable[..., Any],
    left_out: tuple[str, ...] = (),
) -> None:
    """Add a flag for each parameter of a function, but not for the first one.

    A parameter without a default is a required flag.

    Args:
      command: the parser of the command.
      fun: a function with a docstring in Google's style.
      left_out: the names of parameters without a flag.
    """
    texts = help_of_parameters(fun)
    for parameter in list(inspect.signature(fun).parameters.values())[1:]:
        name, default = parameter.name, parameter.default
        if name in left_out:
            continue
        settings: dict[str, Any] = {"default": default, "help": texts.get(name, "").replace("%", "%%")}
        if default is inspect.Parameter.empty:
            settings = {"required": True, "help": settings["help"]}
        if isinstance(default, bool):
            settings["action"] = argparse.BooleanOptionalAction
        elif str(parameter.annotation).startswith("Mapping"):
            settings |= {"action": "append", "metavar": "KEY=LEVEL"}
        else:
            settings |= {"type": _type_of(parameter.annotation, default), "metavar": name.upper()}
        command.add_argument(f"--{name.replace('_', '-')}", **settings)


def _type_of(annotation: Any, default: Any) -> Callable[[str], Any]:
    """Return the type of a parameter whose annotation is a text, as it is with postponed evaluation."""
    for kind in (int, float):
        if isinstance(default, kind) or annotation == f"{kind.__name__} | None":
            return kind
    return str


def description(fun: Callable[..., Any]) -> str:
    """Return the paragraphs of a docstring before its sections and examples."""
    text = re.split(r"\n(?:Args|Returns|Raises|Example|Attributes)::?\n|\n *>>> ", inspect.getdoc(fun) or "")[0]
    return _plain(text).rstrip()


def help_of_parameters(fun: Callable[..., Any]) -> dict[str, str]:
    """Return the text of each parameter in the section Args of a docstring.

    >>> help_of_parameters(add_settings)["left_out"]
    'the names of parameters without a flag.'
    """
    section = re.search(r"\nArgs:\n(.*?)(?:\n\S|\Z)", inspect.getdoc(fun) or "", re.DOTALL)
    texts: dict[str, str] = {}
    name = ""
    for line in section[1].splitlines() if section else ():
        if start := re.match(r"  (\w+): (.*)", line):
            name, text = start.groups()
            texts[name] = text
        elif name:
            texts[name] += f" {line.strip()}"
    return {name: _plain(text) for name, text in texts.items()}


def _plain(text: str) -> str:
    return _ROLE.sub(lambda match: match[1] or match[2], text)
