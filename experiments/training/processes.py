"""Run several processes of a job, which start and stop together.

All of them end if one of them ends or hangs. ``jax.distributed`` connects the processes. SLURM or Kubernetes starts
them, and restarts all when one of them has ended. If a process ends, JAX notices this after at most ``HEARTBEAT_S`` and
ends the others. JAX does not notice a process that hangs, so each process has a watchdog, which ends the process if it
makes no step for some time. An error before the first step, such as missing data on one machine, is raised in all
processes.
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
from jax._src.distributed import global_state  # has the client with which processes exchange texts without devices
from jax.experimental import multihost_utils

import jaxmp

T = TypeVar("T")

HEARTBEAT_S = 15
START_S = 600  # the limit for all processes to start, because the machines of a job start at different times
LONG = 20  # reading data, compiling, restoring, evaluating and saving may take this many times as long as a step
_LEAVE_S = 5.0
_OWN = ("process_id", "data_dir")  # flags in which processes may differ
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX")


def start(config: Any) -> None:
    """Connect to the other processes, if there are any.

    The flags or the environment say whether there are any.

    Raises:
      ValueError: a flag is missing or out of range, or not all processes started in time.
    """
    flags = {name: getattr(config, name) for name in ("coordinator", "processes", "process_id")}
    named = [name for name, value in flags.items() if value is not None]
    if not named and not _detected():
        return
    if named:
        _check(**flags)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service handles SIGTERM. Without checkpoints, SIGTERM should just end the process.
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
            "start --processes of them, with the same --coordinator and --processes, each with its --process-id"
        ) from error
    watch(config.stall_seconds)
    # Every process says this: when the first one is killed, JAX ends the others without running any more Python.
    print(
        f"note: process {global_state.process_id} of {global_state.num_processes}; if one of them ends, all end within "
        "a minute. Then start all again with --resume",
        file=sys.stderr,
    )
    # In this call, JAX exchanges the devices of all processes. If the call came later, the other processes would wait
    # in it while the first process prepares data.
    jax.devices()


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
        raise ValueError(
            f"--coordinator is HOST:PORT of process 0, got {coordinator!r}; write 10.0.0.1:4321, for example"
        )
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
    """Exchange a text between all processes, and return the texts by process number.

    All processes must make their calls in the same order.

    Raises:
      ValueError: a process does not call in time.
    """
    turn, process_id, said = next(_turns), global_state.process_id, []
    global_state.client.key_value_set(f"jaxmp/{turn}/{process_id}", f"={text}")
    for number in range(global_state.num_processes):
        try:
            said.append(global_state.client.blocking_key_value_get(f"jaxmp/{turn}/{number}", 1000 * START_S)[1:])
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"process {number} did not answer within {START_S} s ({str(error)[:200]})") from error
    return said


_turns = itertools.count()


def wait() -> None:
    """Wait until all processes have made this call."""
    if several():
        exchange("")


def together(make: Callable[[], T], *, first_before: bool = False) -> T:
    """Return ``make()``, or raise the same error on all processes if one fails.

    Args:
      make: the function that each process calls.
      first_before: whether the first process calls ``make`` before the others. They can then use files that it has
        written.

    Raises:
      ValueError: the error of the first process that failed.
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
    """Return the folder that ``make`` returns on the first process.

    All processes must share its disk.

    Raises:
      ValueError: ``make`` raised, or a process does not see the files that the first one writes there.
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
                f"all processes must see the folder of the run, but {folder} is not the same folder as on process 0; "
                "use a --run-dir on a disk that all machines share"
            )

    try:
        together(look)
    finally:
        if first():
            (folder / name).unlink()
    return folder


def require_alike(flags: Mapping[str, Any]) -> None:
    """Check that all processes have the same flags, the same code and the same JAX.

    Raises:
      ValueError: the processes differ.
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
    """Return whether all processes must stop after this step.

    All processes must stop if one of them received SIGTERM. Every process must call this function after every step.

    Args:
      step: the number of steps that this process has trained.
    """
    return several() and multihost_utils.reached_preemption_sync_point(step)


# --- watchdog ---------------------------------------------------------------------------------------------------------


class Watchdog:
    """A timer that ends the process if :meth:`alive` is not called in time.

    A thread prints the problem, the remedy and the stacks of all threads, and ends the process. This thread cannot run
    if the process hangs while it holds Python's lock. In that case ``faulthandler``, whose thread needs no lock, prints
    the stacks and ends the process two seconds later.
    """

    def __init__(self, seconds: int) -> None:
        self._seconds, self._deadline = seconds, math.inf
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def alive(self, times: int = 1) -> None:
        """Restart the timer. The next call must come within ``times * seconds``."""
        limit = times * self._seconds
        faulthandler.dump_traceback_later(limit + 2, exit=True)
        self._deadline = time.monotonic() + limit

    def end(self) -> None:
        """Stop the timer."""
        self._deadline = math.inf
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
        print(
            "error: this process has made no step for longer than --stall-seconds allows. The others wait for it, or "
            "it waits for one of them. It ends now, and so will the others. Start all again with --resume, or raise "
            "--stall-seconds if a step takes longer. It hangs here:",
            file=sys.stderr,
        )
        faulthandler.dump_traceback()
        sys.stderr.flush()
        os._exit(1)


_watchdog: Watchdog | None = None


def watch(seconds: int) -> None:
    """Start the watchdog, unless ``seconds`` is 0."""
    global _watchdog
    if seconds:
        _watchdog = Watchdog(seconds)
        alive(LONG)


def alive(times: int = 1) -> None:
    """Restart the timer of the watchdog, if there is one.

    The next call must come within ``times`` times the limit of a step.
    """
    if _watchdog:
        _watchdog.alive(times)


# --- the end ----------------------------------------------------------------------------------------------------------


def end() -> None:
    """Wait until all processes are done.

    The first process still draws and writes when the others are done.
    """
    if several():
        alive(LONG)
        wait()
        if _watchdog:
            _watchdog.end()


def leave(code: int) -> None:
    """End this process after an error, without a shutdown.

    In a shutdown, this process would wait for the other processes. Before it ends, it waits a few seconds, so that the
    others can print their errors too. When the first process ends, JAX ends the others.
    """
    if several():
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(Exception):
            global_state.client.wait_at_barrier("jaxmp/leave", int(1000 * _LEAVE_S))
        if first():
            time.sleep(0.5)
        os._exit(code)
