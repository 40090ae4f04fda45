"""Write and read folders of checkpoints with Orbax.

A folder has one subfolder for each checkpoint, named by its step. Orbax gives a subfolder this name only when the
checkpoint is complete. A checkpoint has two items: ``state`` has the arrays by name, and ``record`` is a JSON object.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath

ARRAYS, RECORD = "state", "record"
_UNUSABLE = "[\\"  # special characters of the patterns with which Orbax looks for its files


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without its check for preemption.

    The check makes all processes agree on a step at which they stop. This is a matter of the training loop: two callers
    of the check would disagree on the step.
    """

    def reached_preemption(self, step: int) -> bool:
        """Return False."""
        return False


def begin_writing(
    folder: Any, step: int, arrays: Mapping[str, Any], record: Mapping[str, Any], keep: int | None
) -> ocp.CheckpointManager:
    """Write a checkpoint in the background, and return the manager for :func:`finish_writing`.

    Args:
      folder: the folder of the checkpoints, which is created if it does not exist.
      step: the step of the new checkpoint.
      arrays: the arrays by name. They may be deleted after this call.
      record: a JSON object.
      keep: the number of checkpoints to keep, or None.

    Raises:
      ValueError: the folder has a checkpoint of this step or a later step, or a path that Orbax cannot write to.
      TypeError: Orbax cannot write the dtype of an array.
    """
    require_usable(folder)
    _require_writable(arrays)
    steps = steps_in(folder)
    if steps and step <= steps[-1]:
        raise ValueError(
            f"steps must rise in a folder, got step {step} for {folder}, which has a checkpoint of step {steps[-1]};\n"
            "save to another folder, or remove the later checkpoints"
        )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True
    )
    manager = _Manager(_as_path(folder), item_names=(ARRAYS, RECORD), options=options)
    items: dict[str, Any] = {RECORD: ocp.args.JsonSave({**record, "has_arrays": bool(arrays)})}
    if arrays:  # Orbax does not write an empty item
        items[ARRAYS] = ocp.args.PyTreeSave(dict(arrays))
    manager.save(step, args=ocp.args.Composite(**items), force=True)
    return manager


def finish_writing(manager: ocp.CheckpointManager) -> None:
    """Wait until the checkpoint is complete, and raise the error of a failed write."""
    # If this process has failed, Orbax would wait for the other processes before it raises the error.
    while jax.process_count() > 1 and manager.is_saving_in_progress():
        manager.check_for_errors()
        time.sleep(0.01)
    manager.close()


def steps_in(folder: Any) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    path = _as_path(folder)
    if not path.exists():
        return []
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(path))


class Reading:
    """A complete checkpoint to read.

    Attributes:
      path: the folder of the checkpoint.
      record: the JSON object of the checkpoint.
      shapes: the shapes and dtypes of the arrays by name.
    """

    def __init__(self, folder: Any, step: int) -> None:
        self.path = _as_path(folder) / str(step)
        self.record: dict[str, Any] = json.loads((self.path / RECORD / "metadata").read_text())

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
        targets = {name: self.shapes[name].update(sharding=place) for name, place in places.items()}
        restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
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
