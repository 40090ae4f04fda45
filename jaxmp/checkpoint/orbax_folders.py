"""Write and read folders of checkpoints with Orbax.

A folder has one subfolder for each checkpoint, named by its step. Orbax gives a subfolder this name only when the
checkpoint is complete. A checkpoint has two items: ``state`` has the arrays by name, and ``record`` is a JSON object.

While a checkpoint is being replaced by another of the same step, it is in the subfolder ``replaced_checkpoints``. If
the process is killed then, the checkpoint is read from there, until the next write moves it back.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

ARRAYS, RECORD = "state", "record"
_REPLACED = "replaced_checkpoints"
_UNUSABLE = "[\\"  # special characters of the patterns with which Orbax looks for its files


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without its check for preemption.

    The check makes all processes agree on a step at which they stop. This is a matter of the training loop: two callers
    of the check would disagree on the step.
    """

    def reached_preemption(self, step: int) -> bool:
        """Return False."""
        return False


class Writing:
    """A checkpoint that is written in the background.

    Args:
      folder: the folder of the checkpoints, which is created if it does not exist.
      step: the step of the new checkpoint. A checkpoint of the same step is replaced when the new one is complete.
      arrays: the arrays by name. They may be deleted after this call.
      record: a JSON object.
      keep: the number of checkpoints to keep, or None.

    Raises:
      ValueError: the folder has a checkpoint of a later step, or a path that Orbax cannot write to.
      TypeError: Orbax cannot write the dtype of an array.
    """

    def __init__(
        self, folder: Any, step: int, arrays: Mapping[str, Any], record: Mapping[str, Any], keep: int | None
    ) -> None:
        self.folder = _as_path(folder)
        require_usable(self.folder)
        _require_writable(arrays)
        self._make_room_for(step)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True
        )
        self._manager = _Manager(self.folder, item_names=(ARRAYS, RECORD), options=options)
        items: dict[str, Any] = {RECORD: ocp.args.JsonSave({**record, "has_arrays": bool(arrays)})}
        if arrays:  # Orbax does not write an empty item
            items[ARRAYS] = ocp.args.PyTreeSave(dict(arrays))
        try:
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        except BaseException:
            if jax.process_count() == 1:  # else Orbax would wait here for the other processes
                with contextlib.suppress(Exception):
                    self._manager.close()
                self._clear_replaced()
            raise

    def _make_room_for(self, step: int) -> None:
        """Move a checkpoint of the same step to the subfolder of replaced checkpoints."""
        steps = steps_in(self.folder)
        if steps and steps[-1] > step:
            raise ValueError(
                f"steps must rise in a folder, got step {step} for {self.folder}, which has a checkpoint of step "
                f"{steps[-1]};\nsave to another folder, or remove the later checkpoints"
            )
        ocp.multihost.sync_global_processes("jaxmp.checkpoint:listed")
        self._clear_replaced()
        if step in steps and jax.process_index() == 0:
            (self.folder / _REPLACED).mkdir()
            (self.folder / str(step)).rename(self.folder / _REPLACED / str(step))
        ocp.multihost.sync_global_processes("jaxmp.checkpoint:moved")

    def _clear_replaced(self) -> None:
        """Delete the replaced checkpoints, but move one back if its replacement is incomplete."""
        replaced = self.folder / _REPLACED
        if jax.process_index() == 0 and replaced.exists():
            complete = _complete_checkpoints(self.folder)
            for step, path in _complete_checkpoints(replaced).items():
                if step not in complete:
                    path.rename(self.folder / str(step))
            replaced.rmtree()

    def is_running(self) -> bool:
        """Return whether the checkpoint is still being written."""
        is_running: bool = self._manager.is_saving_in_progress()
        return is_running

    def finish(self) -> None:
        """Wait until the checkpoint is complete, and raise the error of a failed write."""
        if jax.process_count() > 1:
            # If this process has failed, Orbax would wait here for the other processes.
            while self.is_running():
                self._manager.check_for_errors()
                time.sleep(0.01)
            self._manager.close()
            self._clear_replaced()
            return
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(self._clear_replaced)
            afterwards.callback(self._manager.close)
            self._manager.wait_until_finished()


def steps_in(folder: Any) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    return sorted(_checkpoints(folder))


def _checkpoints(folder: Any) -> dict[int, epath.Path]:
    """Return the complete checkpoints in a folder by step, also those that are being replaced."""
    path = _as_path(folder)
    return {**_complete_checkpoints(path / _REPLACED), **_complete_checkpoints(path)}


def _complete_checkpoints(path: epath.Path) -> dict[int, epath.Path]:
    if not path.exists():
        return {}
    return {found.step: found.path for found in ocp.path.step.standard_name_format().find_all(path)}


class Reading:
    """A complete checkpoint to read.

    Attributes:
      path: the folder of the checkpoint.
      record: the JSON object of the checkpoint.
      shapes: the shapes and dtypes of the arrays by name.

    Raises:
      ValueError: the folder has no record, because another program wrote it.
    """

    def __init__(self, folder: Any, step: int) -> None:
        self.path = _checkpoints(folder)[step]
        record = self.path / RECORD / "metadata"
        if not record.exists():
            raise ValueError(
                f"{self.path} was not written by jaxmp.checkpoint.save;\nread it with Orbax, and put the arrays into "
                "the state: state.replace(params=...)"
            )
        self.record: dict[str, Any] = json.loads(record.read_text())

    @functools.cached_property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the arrays by name."""
        if not self.record.get("has_arrays", True):
            return {}
        saved = ocp.PyTreeCheckpointHandler().metadata(self.path / ARRAYS).tree
        return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in saved.items()}

    def arrays(self, places: Mapping[str, jax.sharding.Sharding | None]) -> dict[str, Any]:
        """Read the arrays with the names in ``places``.

        An array gets the sharding in ``places``. If that is None, the result is a NumPy array.
        """
        if not places:
            return {}
        targets = {name: self.shapes[name] for name in places}
        restore_args = {
            name: ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else ocp.ArrayRestoreArgs(
                sharding=sharding, global_shape=self.shapes[name].shape, dtype=self.shapes[name].dtype
            )
            for name, sharding in places.items()
        }
        args = ocp.args.PyTreeRestore(item=targets, restore_args=restore_args, partial_restore=True)
        arrays: dict[str, Any] = ocp.PyTreeCheckpointHandler().restore(self.path / ARRAYS, args=args)
        return arrays


def _as_path(folder: Any) -> epath.Path:
    text = os.fspath(folder)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def require_usable(folder: Any) -> None:
    """Raise a ValueError if Orbax could write to a folder, but not read it again."""
    if any(character in str(folder) for character in _UNUSABLE):
        raise ValueError(f"Orbax cannot read a folder with [ or \\ in its path, got {folder};\nsave to another folder")


def _require_writable(arrays: Mapping[str, Any]) -> None:
    """Raise a TypeError if Orbax cannot write the dtype of an array."""
    for name, array in arrays.items():
        try:
            tensorstore.dtype(array.dtype.name)
        except ValueError:
            raise TypeError(
                f"Orbax cannot write {array.dtype}, got {name!r};\n"
                "convert it to another dtype, or save it with metadata={...}"
            ) from None
