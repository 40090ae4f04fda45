"""Bind an equation of one program in another program, with its source and scopes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jax._src import source_info_util


@contextlib.contextmanager
def in_place_of(eqn: Any) -> Iterator[None]:
    """Bind operations with the source, the scopes and the context of ``eqn``.

    The scopes of ``eqn`` are nested in the scopes of the running code, as in :func:`jax.core.eval_jaxpr`. The context
    of ``eqn`` includes, for example, the mesh on which it was traced.
    """
    info = eqn.source_info
    scopes = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=scopes), eqn.ctx.manager:
        yield
