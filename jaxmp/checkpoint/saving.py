"""Save states in the background."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Mapping
from os import PathLike
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxmp._internals.python.interpreter_exit import call_before_exit
from jaxmp.base.arguments import require_whole_number
from jaxmp.base.donation import require_not_deleted
from jaxmp.checkpoint.named_leaves import array_to_write, as_tree, leaves_by_name, record_of


def orbax_folders() -> ModuleType:
    """Return the module that uses Orbax, which is an optional dependency.

    Raises:
      ModuleNotFoundError: Orbax is not installed.
    """
    try:
        from jaxmp.checkpoint import orbax_folders
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("orbax", "etils"):
            raise
        raise ModuleNotFoundError(
            "jaxmp.checkpoint needs Orbax, which is not installed; write pip install orbax-checkpoint", name=error.name
        ) from error
    return orbax_folders


def save(
    folder: str | PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    keep: int | None = 3,
    wait: bool = False,
) -> None:
    """Save a train state, or an NNX model with its optimizer, with Orbax.

    The call copies the arrays to the host, and writes them to ``folder/<step>`` in the background. So the next step may
    donate the state at once. A checkpoint gets its name only when it is complete. The next call of ``save``,
    :func:`restore`, :func:`read_metadata` or :func:`wait` waits for the write, and raises its error if it fails. The
    end of the program waits, too.

    If there are several processes, all must call this function with the same arguments and a shared folder.

    Args:
      folder: the folder of all checkpoints of a run. It is created if it does not exist.
      state: a :class:`jaxmp.TrainState`; a pair ``(model, optimizer)`` with a :class:`jaxmp.nnx.Optimizer`; or any
        other pytree of arrays.
      step: the number of steps so far; None for that of the state. The steps in a folder must rise.
      metadata: JSON values to save with the state, such as ``{"policy": str(policy)}``. :func:`read_metadata` returns
        them.
      keep: the number of checkpoints to keep in the folder. The oldest are deleted. None keeps all.
      wait: whether to return only when the checkpoint is complete.

    Raises:
      ValueError: the folder has a checkpoint of this step or a later step; the state has no step and ``step`` is None;
        or the path has a character that Orbax cannot handle.
      TypeError: ``folder`` is not a path; a leaf of the state is not an array, or has a dtype that Orbax cannot write;
        the NNX model or its optimizer is missing; or the metadata are not JSON values.
      RuntimeError: the state was donated to an earlier step.
      ModuleNotFoundError: Orbax is not installed.

    >>> folder = tempfile.mkdtemp()
    >>> state = jaxmp.TrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    >>> jaxmp.checkpoint.save(folder, state, metadata={"policy": "mixed_bfloat16"}, wait=True)
    >>> jaxmp.checkpoint.list_steps(folder)
    [0]
    """
    global _writing
    path = os.fspath(folder)
    if keep is not None:
        require_whole_number("keep", keep)
    tree = as_tree(state)
    require_not_deleted(tree)
    step = _step_of(tree) if step is None else step
    require_whole_number("step", step, least=0)
    record = {**record_of(tree), "metadata": json.loads(json.dumps(dict(metadata or {})))}
    leaves = {name: array_to_write(leaf) for name, leaf in leaves_by_name(tree).items() if np.size(leaf)}
    with _lock:
        _finish_writing()
        _writing = orbax_folders().begin_writing(path, int(step), leaves, record, keep)
        if wait:
            _finish_writing()


def wait() -> None:
    """Wait until the last checkpoint is complete.

    Call it at the end of training, to see the error of a failed write.

    Raises:
      Exception: the write failed. The error is that of Orbax or of the operating system.

    >>> jaxmp.checkpoint.save(tempfile.mkdtemp(), {"w": jnp.ones(2)}, step=1)
    >>> jaxmp.checkpoint.wait()
    """
    with _lock:
        _finish_writing()


def _finish_writing() -> None:
    """Wait for the background write. The caller holds the lock."""
    global _writing
    if _writing is None:
        return
    manager, _writing = _writing, None
    try:
        orbax_folders().finish_writing(manager)
    except Exception as error:
        error.add_note(f"This error is from the checkpoint that was being written to {manager.directory}")
        raise


_writing: Any = None
_lock = threading.Lock()  # Orbax writes one checkpoint at a time


def _finish_or_print_error() -> None:
    try:
        wait()
    except Exception:  # an error here would keep Python from ending other threads
        traceback.print_exc()


call_before_exit(_finish_or_print_error)


def _step_of(tree: Any) -> int:
    step = getattr(tree, "step", None)
    if step is None or np.shape(step):
        raise ValueError(f"the step of a {type(tree).__name__} is unknown; write save(folder, state, step=...)")
    return int(jax.device_get(step))
