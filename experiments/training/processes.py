"""Run several processes of one job.

They start together, agree, stop together, and end if one of them hangs or is gone.

``jax.distributed`` is the meeting point, SLURM or Kubernetes the launcher, which starts all again when one has ended.
A process that ends is missed after ``HEARTBEAT_S`` at most, and then JAX ends the others. One that hangs is alive to
JAX and would hold the others for ever, so that each ends itself when it makes no step for so long as its watchdog
waits. What can go wrong before the first step, such as data that one machine does not have, is an error of all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src.distributed import global_state  # the one place where processes meet without a device
from jax.experimental import multihost_utils

import jaxmp

T = TypeVar("T")

HEARTBEAT_S = 15
START_S = 600  # until all processes are there: a restarted job's machines come one after the other
LONG = 20  # times as long as a step may take: reading data, compiling, restoring, evaluating, saving
_LEAVE_S = 5.0
_OWN = ("process_id", "data_dir")  # flags that processes may have otherwise
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


def start(config: Any) -> None:
    """Joins the other processes, if the flags or the environment say that there are some.

    Raises:
      ValueError: the flags are not all there or out of range; or not all processes came.
    """
    flags = {name: getattr(config, name) for name in ("coordinator", "processes", "process_id")}
    named = [name for name, value in flags.items() if value is not None]
    if not named and not _detected():
        return
    if named:
        _check(**flags)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Without checkpoints there is nothing to do on SIGTERM but to end, as a process does by itself.
    jax.config.update("jax_enable_preemption_service", config.checkpoint_every > 0)
    try:
        jax.distributed.initialize(
            flags["coordinator"],
            flags["processes"],
            flags["process_id"],
            heartbeat_timeout_seconds=HEARTBEAT_S,
            initialization_timeout=START_S,
            shutdown_timeout_seconds=HEARTBEAT_S,
        )
    except (RuntimeError, ValueError) as error:
        where = f" at {flags['coordinator']}" if named else ""
        raise ValueError(
            f"all processes of a job must meet{where} within {START_S} s, but {' '.join(str(error).split())[:300]}; "
            "start as many as there are to be, with the same --coordinator and --processes and each its --process-id"
        ) from error
    watch(config.stall_seconds)
    if first():
        print(
            f"note: {global_state.num_processes} processes; should one of them end, all end within a minute: start all "
            "again with --resume",
            file=sys.stderr,
        )
    jax.devices()  # JAX tells the others what each has and waits for them: now, not while the first prepares alone


def _detected() -> bool:
    if all(name in os.environ for name in _SLURM):
        return os.environ["SLURM_NTASKS"] != "1"
    return all(name in os.environ for name in _KUBERNETES)


def _check(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    if coordinator is None or processes is None or process_id is None:
        raise ValueError(
            "--coordinator, --processes and --process-id go together, got "
            f"{coordinator}, {processes} and {process_id}; give all three, or none under SLURM and Kubernetes"
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator is HOST:PORT of process 0, got {coordinator!r}; write 10.0.0.1:4321, say")
    if not 0 <= process_id < processes:
        raise ValueError(
            f"--process-id counts from 0 to one less than --processes, got {process_id} of {processes} processes"
        )


def several() -> bool:
    """Return whether there are other processes, without looking for devices."""
    return jax.distributed.is_initialized()


def first() -> bool:
    """Return whether this process writes files and shows progress for all."""
    return global_state.process_id == 0


def exchange(text: str) -> list[str]:
    """Exchange a text between all processes; all must call it, in the same order.

    Raises:
      ValueError: one does not come.
    """
    turn, process_id, said = next(_turns), global_state.process_id, []
    global_state.client.key_value_set(f"jaxmp/{turn}/{process_id}", f"={text}")
    for number in range(global_state.num_processes):
        try:
            said.append(global_state.client.blocking_key_value_get(f"jaxmp/{turn}/{number}", 1000 * START_S)[1:])
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"process {number} did not come within {START_S} s ({str(error)[:200]})") from error
    return said


_turns = itertools.count()


def wait() -> None:
    """Returns when all processes have come here."""
    if several():
        exchange("")


def together(make: Callable[[], T], *, first_before: bool = False) -> T:
    """Return ``make()``, or raise the same error on all processes if one fails.

    Args:
      make: what each process does for itself.
      first_before: whether the first process does it before the others, which then find on disk what it has put there.

    Raises:
      ValueError: what was raised, by the first process that did.
    """
    if not several():
        return make()
    error, result = "", []
    if first_before and not first():
        wait()
    try:
        result.append(make())
    except (ValueError, TypeError, OSError, ImportError) as raised:
        error = str(raised) or type(raised).__name__
    if first_before and first():
        wait()
    said = exchange(error)
    failed = [number for number, text in enumerate(said) if text]
    if failed:
        where = "" if len(failed) == len(said) else f" (on process {', '.join(map(str, failed))} of {len(said)})"
        raise ValueError(said[failed[0]] + where)
    return result[0]


def folder_of_first(make: Callable[[], Path]) -> Path:
    """The folder that ``make`` returns on the first process, which all must see.

    Raises:
      ValueError: ``make`` raised, or a process does not see what the first one writes there.
    """
    if not several():
        return make()
    folder = together(lambda: make().absolute() if first() else Path())
    folder = Path(exchange(str(folder))[0])
    name = f".seen-{exchange(str(os.getpid()))[0]}"
    if first():
        (folder / name).touch()
    wait()

    def look() -> None:
        if not (folder / name).exists():
            raise ValueError(
                f"all processes must see the folder of the run, but {folder} of process 0 is another one here; put it "
                "on a disk that all machines share, with --run-dir"
            )

    try:
        together(look)
    finally:
        if first():
            (folder / name).unlink()
    return folder


def require_alike(flags: Mapping[str, Any]) -> None:
    """Checks that all processes have the same flags, the same code and the same JAX.

    Raises:
      ValueError: they have not.
    """
    if not several():
        return
    settings = {f"--{name.replace('_', '-')}": value for name, value in flags.items() if name not in _OWN}
    settings |= {"JAX": jax.__version__, "the code of jaxmp and experiments": _code()}
    said = [json.loads(text) for text in exchange(json.dumps(settings, default=str))]
    for name in settings:
        values = [process.get(name) for process in said]
        if any(value != values[0] for value in values):
            number, other = next((n, value) for n, value in enumerate(values) if value != values[0])
            raise ValueError(
                "all processes of a job must have the same flags and the same code, but "
                f"{name} is {values[0]} on process 0 and {other} on process {number}; start all in the same way"
            )


def _code() -> str:
    folders = Path(jaxmp.__file__).parent, Path(__file__).parents[1]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def asked_to_stop(step: int) -> bool:
    """Return whether all processes stop after this step, because one had SIGTERM.

    Args:
      step: counted from 1 where this process began; each process asks after each step.
    """
    return several() and multihost_utils.reached_preemption_sync_point(step)


# --- watchdog ---------------------------------------------------------------------------------------------------------


class Watchdog:
    """Ends the process, with the stacks of all its threads, if nobody says in time that it makes progress.

    A thread says what is the matter and what to do. Should Python's lock be held where the process hangs, it cannot:
    two seconds later ``faulthandler``'s own thread, which needs no lock, ends the process.
    """

    def __init__(self, seconds: int) -> None:
        self._seconds, self._deadline = seconds, math.inf
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def alive(self, times: int = 1) -> None:
        """From now on the next sign of life may take ``times`` as long as a step."""
        limit = times * self._seconds
        faulthandler.dump_traceback_later(limit + 2, exit=True)
        self._deadline = time.monotonic() + limit

    def end(self) -> None:
        """Waits for nothing any more."""
        self._deadline = math.inf
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
        print(
            "error: this process has made no step for longer than --stall-seconds allows, and the others wait for it, "
            "or it for one of them; it ends now, and so will they: start all again with --resume, or raise "
            "--stall-seconds if a step takes so long. Where it hangs:",
            file=sys.stderr,
        )
        faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(1)


_watchdog: Watchdog | None = None


def watch(seconds: int) -> None:
    """Begins to watch; 0 does not."""
    global _watchdog
    if seconds:
        _watchdog = Watchdog(seconds)
        alive(LONG)


def alive(times: int = 1) -> None:
    """Says that there was progress, if anybody watches; the next may take ``times`` as long as a step."""
    if _watchdog:
        _watchdog.alive(times)


# --- the end ----------------------------------------------------------------------------------------------------------


def end() -> None:
    """Waits until all processes are done: the first one draws and writes after the others."""
    if several():
        alive(LONG)
        wait()
        if _watchdog:
            _watchdog.end()


def leave(code: int) -> None:
    """Ends this process, which has said its error, without waiting for what others would have to do, too.

    If they have an error as well, all have said theirs before the first is gone, with which JAX ends the others.
    """
    if several():
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(Exception):
            global_state.client.wait_at_barrier("jaxmp/leave", int(1000 * _LEAVE_S))
        if first():
            time.sleep(0.5)
        os._exit(code)
