"""``jaxmp blame`` and ``jaxmp compare``: what runs a function that is named on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jaxmp.cli.loading import UsageError, function, in_current_folder, told
from jaxmp.engine.autocast import autocast
from jaxmp.inspect.blame import Blame, first_nonfinite
from jaxmp.inspect.compare import Comparison, compare


def blame(name: str, example: str | None, policy: str | None, loss_scale: float, grad: bool) -> Blame | None:
    """The blame of a function, under autocast with ``policy`` if there is one, on the arguments of ``example``.

    Raises:
      UsageError: one of them is wrong, or the function fails.
    """

    def prepared(fun: Callable[..., Any]) -> Any:
        return first_nonfinite(fun if policy is None else autocast(fun, policy), grad=grad, loss_scale=loss_scale)

    found: Blame | None = _run(name, example, prepared)
    return found


def comparison(
    name: str, example: str | None, policy: str, reference: str, overrides: Sequence[str], grad: bool
) -> Comparison:
    """The comparison of a function on the arguments of ``example``; ``overrides`` are ``"KEY=LEVEL"``.

    Raises:
      UsageError: one of them is wrong, or the function fails.
    """
    for text in overrides:
        if "=" not in text:
            raise UsageError(f"an --override is KEY=LEVEL, such as '**/head=float32', got {text!r}")
    levels = {key: level for key, _, level in (text.rpartition("=") for text in overrides)}
    result: Comparison = _run(
        name, example, lambda fun: compare(fun, policy, reference=reference, overrides=levels, grad=grad)
    )
    return result


def _run(name: str, example: str | None, prepared: Callable[[Callable[..., Any]], Any]) -> Any:
    with in_current_folder():
        fun = function(name)
        with told(ValueError, TypeError):
            run = prepared(fun)
        args: Any = ()
        if example is not None:
            with told(Exception, of=f"{example} failed"):
                args = function(example)()
        args = args if isinstance(args, tuple) else (args,)
        with told(ValueError, TypeError):
            signature = inspect.signature(fun)
        with told(TypeError, of=f"{name} takes {signature}, got {len(args)} by --args"):
            signature.bind(*args)
        with told(Exception, of=f"{name} failed with these arguments"):
            return run(*args)
