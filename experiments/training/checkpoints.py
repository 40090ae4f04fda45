"""Write checkpoints that survive a kill.

Orbax writes them in the background, whole or not at all; each file has a checksum.

A checkpoint is a folder named by its step. Its ``state`` holds the arrays of a :class:`jaxmp.TrainState` by their
paths, the loss scale's apart from the rest, because it alone may be started afresh under another policy; its ``about``
holds what else a run needs. Orbax gives a folder its name once all is in it, so that a kill leaves a folder that nobody
takes for a checkpoint. A file that is damaged later is found by its checksum (:mod:`experiments.training.checksums`).

Several processes write a checkpoint together, each what its devices hold, into a folder that all see; the first one
does the rest: it removes what was left half written, and adds the checksums when all have written. Any number of
devices restores it, each process reading what its own will hold.
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

_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of the folder that Orbax is still writing
_LOSS_SCALE = "loss_scale/"
_UNWRITABLE = "[]\\"  # Orbax looks for what it wrote with a glob, in which these have a meaning
_MERGED = "state/manifest.ocdbt"  # what Orbax writes last of the arrays, and reads first


class CheckpointError(ValueError):
    """A checkpoint is damaged, missing, or of another run."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole.

    Attributes:
      folder: where it lies.
      step: the steps trained before it.
      about: what :meth:`Checkpoints.save` was given, its ``precision`` among it.
      shapes: shapes and dtypes of the state's arrays by their paths; those of the loss scale begin with
        ``loss_scale/``. An array without elements is here itself.
    """

    folder: Path
    step: int
    about: dict[str, Any]
    shapes: dict[str, jax.ShapeDtypeStruct | np.ndarray]

    @functools.cached_property
    def leaves(self) -> dict[str, np.ndarray]:
        """The arrays of the state, on the host."""
        return self._read({})

    def _read(self, places: dict[str, jax.sharding.Sharding]) -> dict[str, Any]:
        """The arrays, those with a place there and the others on the host."""
        targets = {
            # A view of one number that has the shape asks for an array of NumPy's.
            name: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=places[name])
            if name in places
            else np.broadcast_to(np.zeros((), shape.dtype), shape.shape)
            for name, shape in self.shapes.items()
            if isinstance(shape, jax.ShapeDtypeStruct)
        }
        with _quiet(), _orbax_failures_as_damage(self.folder):
            # Never with the shardings that are in the file, which are those of other devices.
            handler = ocp.StandardCheckpointHandler()
            return self.shapes | handler.restore(
                epath.Path(self.folder.absolute() / "state"), args=ocp.args.StandardRestore(targets)
            )

    def restore(
        self, state: jaxmp.TrainState, precision: dict[str, str], override: Sequence[str] = (), *, free: bool = False
    ) -> jaxmp.TrainState:
        """The state that was saved, bit for bit, in the place of the fresh ``state``.

        The policy may be another one as long as the dtypes agree. A loss scale of the same class goes on from where it
        was, under the rule of ``state``, and what only the new rule counts starts afresh; so does a loss scale of
        another class.

        Args:
          state: a fresh one, of the same model and optimizer. Its arrays say where those of the new one go.
          precision: what made it, with ``precision["policy"]`` the policy's name; for errors.
          override: the overrides of that policy, as ``PATTERN=POLICY``; for errors.
          free: whether what takes the place of arrays of ``state`` may have their memory: they are deleted.

        Raises:
          CheckpointError: the params, or anything else, have other paths, shapes or dtypes.
        """
        rest, scale = _split(state)
        saved = {name: shape for name, shape in self.shapes.items() if not name.startswith(_LOSS_SCALE)}
        fresh = {name: _data(leaf) for name, leaf in rest.items()}
        self._require_same_model(saved, fresh)
        self._require_same_dtypes(saved, fresh, precision["policy"], override)

        goes_on = self.about["loss_scale"] == _kind(state)
        wanted = rest | ({name: leaf for name, leaf in scale.items() if name in self.shapes} if goes_on else {})
        places = {name: _data(leaf).sharding for name, leaf in wanted.items() if leaf.committed}
        for leaf in wanted.values() if free else ():
            leaf.delete()
        arrays = self._read(places)
        leaves = scale | {name: _like(arrays[name], leaf) for name, leaf in wanted.items()}
        new = jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in _names(state)])
        # What was counted is how often the old scale could not fall.
        return new if goes_on else new.replace(stuck=jnp.zeros_like(new.stuck))

    def _require_same_model(self, saved: dict[str, Any], fresh: dict[str, jax.Array]) -> None:
        for name in sorted(saved.keys() | fresh.keys(), key=lambda name: (not name.startswith("params/"), name)):
            there, here = _shape(saved.get(name)), _shape(fresh.get(name))
            if there != here:
                raise CheckpointError(
                    f"a checkpoint fits the model and the optimizer it was made with only, but {name!r} {there} in "
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
                    f"a checkpoint fits policies with the same param dtypes only, but {_policy(then, before)} made "
                    f"{self.folder}, in which {name!r} is {saved[name].dtype}, and under "
                    f"{_policy(policy, override)} it is {leaf.dtype}; resume with {flags}, or another policy with such "
                    "params"
                )


class _Manager(ocp.CheckpointManager):
    """Orbax's manager, which never asks whether the job is to stop.

    The loop asks, with numbers of steps that only rise.

    Orbax would ask in the background for a step that lies behind, and the processes would agree on one that is over.
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """A context manager that writes the checkpoints of one run.

    They are written in the background; it ends when the last one is written.

    All processes make one, with the same arguments, and call its methods in the same order.

    Args:
      folder: where; made if need be. What an earlier process left half written there is removed.
      keep: how many to keep, the last ones.

    Raises:
      CheckpointError: the folder has a path in which nothing can be kept.
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
            # Called when all of a checkpoint is written, before it gets its name.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        self._manager = _Manager(folder.absolute(), item_names=checksums.ITEMS, options=options)
        self._held = contextlib.ExitStack()
        self._held.enter_context(_quiet())
        # Of the writes beside one that failed asyncio tells when they are collected: any time, after the end even.
        logging.getLogger("asyncio").addFilter(_was_retrieved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *args: Any) -> None:
        try:
            with self._held, self._failures_as_one_line():
                self._manager.close()
        except OSError:
            if kind is None:  # otherwise what ended the run comes first
                raise

    def save(self, step: int, state: jaxmp.TrainState, about: dict[str, Any]) -> None:
        """Copies the state to the host, for which it waits, and has it written while training goes on.

        Args:
          step: the steps trained so far.
          state: the state after them; it may be donated afterwards.
          about: what else the run needs, as JSON, with ``precision["policy"]`` the policy's name.

        Raises:
          OSError: this checkpoint, or the one before, cannot be written.
        """
        rest, scale = _split(state)
        leaves = {name: _data(leaf) for name, leaf in (rest | scale).items()}
        if jax.default_backend() == "cpu":  # Orbax takes a view of a CPU's memory, which the next step overwrites
            leaves = {name: jnp.copy(leaf) for name, leaf in leaves.items()}
        filled = {name: leaf for name, leaf in leaves.items() if leaf.size}  # Orbax refuses to write nothing
        empty = {name: [str(leaf.dtype), leaf.shape] for name, leaf in leaves.items() if not leaf.size}
        record = {**about, "loss_scale": _kind(state), "empty": empty}
        items = ocp.args.Composite(state=ocp.args.StandardSave(filled), about=ocp.args.JsonSave(record))
        self.wait()
        with self._failures_as_one_line():
            self._manager.save(step, args=items, force=True)

    def check(self) -> None:
        """Raises if what is being written cannot be; of several processes the others would wait for this one.

        Raises:
          OSError: it cannot be.
        """
        with self._failures_as_one_line():
            self._manager.check_for_errors()

    def _write_checksums(self) -> None:
        (folder,) = unfinished(self._folder)
        if not (folder / _MERGED).is_file():
            raise FileNotFoundError(f"{folder / _MERGED} was not written, and the checkpoint cannot be read without it")
        checksums.write(folder)

    def wait(self) -> None:
        """Returns when all is written.

        Raises:
          OSError: it cannot be.
        """
        while processes.several() and self._manager.is_saving_in_progress():
            self.check()  # or this one would wait for the others, and they for it
            time.sleep(0.01)
        with self._failures_as_one_line():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _failures_as_one_line(self) -> Iterator[None]:
        """Turn any failure of Orbax, such as a full disk, into a short OSError."""
        try:
            yield
        except Exception as error:
            what = " ".join(str(error).split()).rsplit('": ', 1)[-1]  # tensorstore names every file on its way
            raise OSError(f"a checkpoint cannot be written to {self._folder} ({what[:300]})") from error


def steps(folder: Path) -> list[int]:
    """Return the steps of the finished checkpoints in a folder, in order.

    They may be damaged: nothing is read.
    """
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def unfinished(folder: Path) -> list[Path]:
    """Return the half-written checkpoints of a process that was killed while saving."""
    return [path for path in folder.iterdir() if _UNFINISHED in path.name] if folder.is_dir() else []


def read_last(folder: Path, check: bool = True) -> Checkpoint:
    """The last checkpoint in a folder; with ``check`` every file of it is what was written.

    Raises:
      CheckpointError: there is none, or it is damaged. The error names it, and the last one that is whole.
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
        remedy = f"the last good one is of step {step}; to resume from it, remove what comes after: {remove}"
        break
    else:
        remedy = "there is no good one: start again without --resume, in another folder"
    if not damaged:
        raise CheckpointError(f"{folder} has no finished checkpoint to resume from; start again without --resume")
    raise CheckpointError("; ".join([*(text for _, text in damaged), remedy]))


def read(folder: Path, step: int, check: bool = True) -> Checkpoint:
    """The checkpoint of a step, with ``check`` once every file of it was found to be what was written.

    Raises:
      CheckpointError: it is damaged.
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
    except Exception as error:  # whatever it makes of the files
        what = " ".join(str(error).split())[:200]
        raise CheckpointError(f"the checkpoint {folder} is damaged: {type(error).__name__}: {what}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Orbax's log: it logs an error in each thread, and raises it in the end."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _was_retrieved(record: logging.LogRecord) -> bool:
    """Drop the logs of asyncio on exceptions that nobody asked for.

    Orbax raises the first one, which says the same.
    """
    return "exception was never retrieved" not in record.getMessage()


def _split(state: jaxmp.TrainState) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The leaves of a state by name: all but the loss scale's, and the loss scale's."""
    named = dict(zip(_names(state), jax.tree.leaves(state), strict=True))
    scale = {name: named.pop(name) for name in list(named) if name.startswith(_LOSS_SCALE)}
    return named, scale


def _names(state: jaxmp.TrainState) -> list[str]:
    """Return the paths of a state's leaves, in their order.

    Those of the loss scale, wherever they are, begin with ``loss_scale/``.
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
    """``value`` on the devices, of the kind and in the place of ``leaf``."""
    if isinstance(value, jax.Array):
        array = value
    elif leaf.committed:  # without elements
        array = jax.make_array_from_callback(value.shape, leaf.sharding, lambda index: value[index])
    else:
        array = jnp.array(value)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array


def _shape(leaf: Any) -> str:
    return "is missing" if leaf is None else f"has shape {leaf.shape}"
