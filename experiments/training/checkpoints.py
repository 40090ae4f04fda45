"""Write checkpoints with Orbax, in the background and atomically.

Each file has a checksum. A checkpoint is a folder named by its step. Its item ``state`` holds the arrays of a
:class:`jaxmp.TrainState` by their paths. The arrays of the loss scale have the prefix ``loss_scale/``. They are left
out if a run resumes with a loss scale of another class, which starts fresh. The item ``about`` holds everything else
that a run needs. Orbax renames a folder to its step once it is complete, so a folder left by a killed process is not
mistaken for a checkpoint. Checksums detect files that are damaged later (:mod:`experiments.training.checksums`).

Several processes write a checkpoint together into a shared folder. Each process writes the arrays on its devices. The
first process also removes unfinished checkpoints, and adds the checksums when all processes have written. A checkpoint
can be restored on any number of devices, and each process reads only the arrays for its devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import jaxmp
from experiments.training import checksums, processes
from jaxmp.base.trees import path_name
from jaxmp.optim.scaling_state import LossScalingState

_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder while Orbax writes it
_LOSS_SCALE = "loss_scale/"
_UNWRITABLE = "[]\\"  # special characters of the glob with which Orbax looks for its files
_MERGED = "state/manifest.ocdbt"  # Orbax writes this file of the arrays last, and reads it first


class CheckpointError(ValueError):
    """A checkpoint is damaged, missing, or of another run."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
      folder: the folder of the checkpoint.
      step: the number of steps trained before it.
      about: the argument ``about`` of :meth:`Checkpoints.save`.
      shapes: the shapes and dtypes of the state's arrays by their paths. Paths of the loss scale begin with
        ``loss_scale/``. An array without elements is stored here in place of its shape.
    """

    folder: Path
    step: int
    about: dict[str, Any]
    shapes: dict[str, jax.ShapeDtypeStruct | np.ndarray]

    @functools.cached_property
    def leaves(self) -> dict[str, np.ndarray]:
        """Return the arrays of the state, on the host."""
        return self._read({})

    def _read(self, places: dict[str, jax.sharding.Sharding]) -> dict[str, Any]:
        """Read the arrays onto the host; arrays in ``places`` get the sharding there."""
        targets = {
            # For a NumPy array as target, Orbax returns a NumPy array. This target is a view of a single number, so it
            # needs no memory.
            name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=places[name])
            if name in places
            else np.broadcast_to(np.zeros((), shape.dtype), shape.shape)
            for name, shape in self.shapes.items()
            if isinstance(shape, jax.ShapeDtypeStruct)
        }
        with _quiet(), _orbax_failures_as_damage(self.folder):
            # Every array has an explicit target, because the shardings in the file are for other devices.
            handler = ocp.StandardCheckpointHandler()
            return self.shapes | handler.restore(
                epath.Path(self.folder.absolute() / "state"), args=ocp.args.StandardRestore(targets)
            )

    def restore(
        self, state: jaxmp.TrainState, precision: dict[str, str], override: Sequence[str] = (), *, free: bool = False
    ) -> jaxmp.TrainState:
        """Return the saved state, bit for bit, with the shardings of the fresh ``state``.

        The policy may differ if the dtypes are the same. A loss scale of the same class continues from its saved
        value, with the parameters of the loss scale in ``state``. Counters that were not saved start fresh. A loss
        scale of another class starts fresh.

        Args:
          state: a fresh state of the same model and optimizer. The new arrays get the shardings of its arrays.
          precision: the precision of ``state``, with the policy's name in ``precision["policy"]``, for errors.
          override: the overrides of the policy, as ``PATTERN=POLICY``, for errors.
          free: whether to delete the arrays of ``state`` that are replaced, to free their memory.

        Raises:
          CheckpointError: the params, or other arrays, have other paths, shapes or dtypes.
        """
        rest, scale = _split(state)
        saved = {name: shape for name, shape in self.shapes.items() if not name.startswith(_LOSS_SCALE)}
        fresh = {name: _data(leaf) for name, leaf in rest.items()}
        self._require_same_model(saved, fresh)
        self._require_same_dtypes(saved, fresh, precision["policy"], override)

        same_scale = self.about["loss_scale"] == _kind(state)
        wanted = rest | ({name: leaf for name, leaf in scale.items() if name in self.shapes} if same_scale else {})
        places = {name: _data(leaf).sharding for name, leaf in wanted.items() if leaf.committed}
        for leaf in wanted.values() if free else ():
            leaf.delete()
        arrays = self._read(places)
        leaves = scale | {name: _like(arrays[name], leaf) for name, leaf in wanted.items()}
        new = jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in _names(state)])
        # `stuck` counts how often the old loss scale could not fall, so a new loss scale resets it.
        return new if same_scale else new.replace(stuck=jnp.zeros_like(new.stuck))

    def _require_same_model(self, saved: dict[str, Any], fresh: dict[str, jax.Array]) -> None:
        for name in sorted(saved.keys() | fresh.keys(), key=lambda name: (not name.startswith("params/"), name)):
            there, here = _shape(saved.get(name)), _shape(fresh.get(name))
            if there != here:
                raise CheckpointError(
                    f"a checkpoint fits only the model and the optimizer it was made with, but {name!r} {there} in "
                    f"{self.folder} and {here} in this run; resume with the flags of that run"
                )

    def _require_same_dtypes(
        self, saved: dict[str, Any], fresh: dict[str, jax.Array], policy: str, override: Sequence[str]
    ) -> None:
        for name, leaf in fresh.items():
            if saved[name].dtype != leaf.dtype:
                then, before = self.about["precision"]["policy"], self.about.get("config", {}).get("override", [])
                flags = shlex.join(["--policy", then, *(word for text in before for word in ("--override", text))])
                flags += " and without --override" if override and not before else ""
                raise CheckpointError(
                    f"a checkpoint fits only policies with the same param dtypes, but {_policy(then, before)} made "
                    f"{self.folder}, in which {name!r} is {saved[name].dtype}, and under "
                    f"{_policy(policy, override)} it is {leaf.dtype}; resume with {flags}, or another policy with "
                    "these param dtypes"
                )


class _Manager(ocp.CheckpointManager):
    """Orbax's manager without its check for preemption.

    The training loop makes this check itself, with rising step numbers. Orbax would check in the background for an
    earlier step, and the processes would then agree to stop at a step that is already over.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """A context manager that writes the checkpoints of a run in the background.

    The context ends when the last checkpoint is written. All processes must create the manager with the same arguments
    and call its methods in the same order.

    Args:
      folder: the folder of the checkpoints, which is created if it does not exist. Unfinished checkpoints in it are
        removed.
      keep: the number of checkpoints to keep. The oldest are removed.

    Raises:
      CheckpointError: Orbax cannot write to a folder with this path.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if any(character in str(folder.absolute()) for character in _UNWRITABLE):
            raise CheckpointError(
                f"checkpoints need a path without [, ] and \\, got {folder.absolute()}; take another --run-dir, or "
                "--checkpoint-every 0"
            )
        if processes.first():
            for path in unfinished(folder):
                shutil.rmtree(path)
        processes.wait()
        self._folder = folder
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            # Called when a checkpoint is complete, before its folder gets its final name.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        self._manager = _Manager(folder.absolute(), item_names=checksums.ITEMS, options=options)
        self._held = contextlib.ExitStack()
        self._held.enter_context(_quiet())
        # If one write fails, asyncio logs the failures of the others when they are garbage collected.
        logging.getLogger("asyncio").addFilter(_was_retrieved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: Any) -> None:
        try:
            with self._held, self._failures_as_one_line():
                self._manager.close()
        except OSError:
            if kind is None:  # otherwise Python raises the error that ended the run
                raise

    def save(self, step: int, state: jaxmp.TrainState, about: dict[str, Any]) -> None:
        """Copy the state to the host, and write it in the background.

        Args:
          step: the number of steps trained so far.
          state: the state after these steps. It may be donated after this call.
          about: everything else that the run needs, as JSON values, with the policy's name in ``precision["policy"]``.

        Raises:
          OSError: this checkpoint, or the one before, cannot be written.
        """
        rest, scale = _split(state)
        leaves = {name: _data(leaf) for name, leaf in (rest | scale).items()}
        if jax.default_backend() == "cpu":  # Orbax keeps a view, and the next step overwrites the memory
            leaves = {name: jnp.copy(leaf) for name, leaf in leaves.items()}
        filled = {name: leaf for name, leaf in leaves.items() if leaf.size}  # Orbax does not write empty arrays
        empty = {name: [str(leaf.dtype), leaf.shape] for name, leaf in leaves.items() if not leaf.size}
        record = {**about, "loss_scale": _kind(state), "empty": empty}
        items = ocp.args.Composite(state=ocp.args.StandardSave(filled), about=ocp.args.JsonSave(record))
        self.wait()
        with self._failures_as_one_line():
            self._manager.save(step, args=items, force=True)

    def check(self) -> None:
        """Raise if the checkpoint that is being written has failed.

        Without this check, the other processes would wait for this process.

        Raises:
          OSError: a checkpoint cannot be written.
        """
        with self._failures_as_one_line():
            self._manager.check_for_errors()

    def _write_checksums(self) -> None:
        (folder,) = unfinished(self._folder)
        if not (folder / _MERGED).is_file():
            raise FileNotFoundError(f"{folder / _MERGED} was not written, and the checkpoint cannot be read without it")
        checksums.write(folder)

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
          OSError: a checkpoint cannot be written.
        """
        while processes.several() and self._manager.is_saving_in_progress():
            self.check()  # else the processes would wait for each other if this one failed
            time.sleep(0.01)
        with self._failures_as_one_line():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _failures_as_one_line(self) -> Iterator[None]:
        """Turn any failure of Orbax, such as a full disk, into a short OSError."""
        try:
            yield
        except Exception as error:
            what = " ".join(str(error).split()).rsplit('": ', 1)[-1]  # without tensorstore's list of files
            raise OSError(f"a checkpoint cannot be written to {self._folder} ({what[:300]})") from error


def steps(folder: Path) -> list[int]:
    """Return the steps of the finished checkpoints in a folder, in order.

    The checkpoints are not checked for damage.
    """
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def unfinished(folder: Path) -> list[Path]:
    """Return the unfinished checkpoints of a process that was killed while saving."""
    return [path for path in folder.iterdir() if _UNFINISHED in path.name] if folder.is_dir() else []


def read_last(folder: Path, check: bool = True) -> Checkpoint:
    """Read the last checkpoint in a folder.

    With ``check``, verify the checksums of its files.

    Raises:
      CheckpointError: there is no checkpoint, or the last one is damaged. The error then names the last undamaged one.
    """
    damaged: list[tuple[Path, str]] = []
    for step in reversed(steps(folder)):
        try:
            checkpoint = read(folder, step, check)
        except CheckpointError as error:
            damaged.append((folder / str(step), str(error)))
            continue
        if not damaged:
            return checkpoint
        remove = shlex.join(["rm", "-r", *(str(path) for path, _ in damaged)])
        remedy = f"the last good one is of step {step}; to resume from it, remove the later ones: {remove}"
        break
    else:
        remedy = "there is no good one; start again without --resume, in another folder"
    if not damaged:
        raise CheckpointError(f"{folder} has no finished checkpoint to resume from; start again without --resume")
    raise CheckpointError("; ".join([*(text for _, text in damaged), remedy]))


def read(folder: Path, step: int, check: bool = True) -> Checkpoint:
    """Read the checkpoint of a step.

    With ``check``, verify the checksums of its files.

    Raises:
      CheckpointError: the checkpoint is damaged.
    """
    path = folder / str(step)
    if check and (problem := checksums.find_damage(path)):
        raise CheckpointError(f"the checkpoint {path} is damaged: {problem}")
    with _quiet(), _orbax_failures_as_damage(path):
        about = json.loads((path / "about" / "metadata").read_text())
        saved = ocp.StandardCheckpointHandler().metadata(epath.Path(path.absolute() / "state")).tree
        shapes: dict[str, Any] = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in saved.items()}
        shapes |= {name: np.zeros(shape, jnp.dtype(dtype)) for name, (dtype, shape) in about.pop("empty").items()}
    return Checkpoint(path, step, about, shapes)


@contextlib.contextmanager
def _orbax_failures_as_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Orbax raises all kinds of errors for damaged files
        what = " ".join(str(error).split())[:200]
        raise CheckpointError(f"the checkpoint {folder} is damaged: {type(error).__name__}: {what}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Orbax's log.

    In each thread, Orbax logs an error that it also raises.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _was_retrieved(record: logging.LogRecord) -> bool:
    """Return False for asyncio's logs of exceptions that were never retrieved.

    Orbax raises the first of these exceptions.
    """
    return "exception was never retrieved" not in record.getMessage()


def _split(state: jaxmp.TrainState) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return two dictionaries of a state's leaves by name.

    The second dictionary has the leaves of the loss scale, the first has all others.
    """
    named = dict(zip(_names(state), jax.tree.leaves(state), strict=True))
    scale = {name: named.pop(name) for name in list(named) if name.startswith(_LOSS_SCALE)}
    return named, scale


def _names(state: jaxmp.TrainState) -> list[str]:
    """Return the paths of a state's leaves in order.

    Paths of the loss scale begin with ``loss_scale/``.
    """

    def name(path: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, LossScalingState):
            return path_name(path)
        scale = jax.tree_util.tree_map_with_path(lambda p, _: _LOSS_SCALE + path_name(p), node.loss_scale)
        rest = jax.tree_util.tree_map_with_path(lambda p, _: path_name((*path, *p)), node._replace(loss_scale=None))
        return rest._replace(loss_scale=scale)

    tree = jax.tree_util.tree_map_with_path(name, state, is_leaf=lambda node: isinstance(node, LossScalingState))
    return jax.tree.leaves(tree)


def _policy(policy: str, override: Sequence[str]) -> str:
    return f"policy {policy!r}" + (f" with the override {' and '.join(map(repr, override))}" if override else "")


def _kind(state: jaxmp.TrainState) -> str:
    return type(jaxmp.get_loss_scale(state.opt_state)).__name__


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _like(value: np.ndarray | jax.Array, leaf: jax.Array) -> jax.Array:
    """Return ``value`` as an array like ``leaf``.

    The new array gets the sharding of ``leaf``, and is a key if ``leaf`` is a key.
    """
    if isinstance(value, jax.Array):
        array = value
    elif leaf.committed:  # an array without elements, which was not read from the file
        array = jax.make_array_from_callback(value.shape, leaf.sharding, lambda index: value[index])
    else:
        array = jnp.array(value)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array


def _shape(leaf: Any) -> str:
    return "is missing" if leaf is None else f"has shape {leaf.shape}"
