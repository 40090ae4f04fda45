"""How benchmarks.train_step measures: a row alone in a process of its own, and all rows of a model in turn."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Pass, Prepared, Row, broken
from experiments.measure import energy, flops, memory, profiling, timing
from experiments.models.workloads import Workload
from experiments.training.runs import strict_json

OUT_OF_MEMORY = "out of memory"
PATIENCE = 300.0
"""Seconds that a row alone may take: what hangs is not to take the time of all others."""


def reason(error: BaseException) -> str:
    """Why a row has no figures, in a few words."""
    text = str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {' '.join((text.splitlines() or [''])[0].split())[:160]}"


def failed(error: BaseException) -> str:
    """The same, and where it was raised on stderr: a row that fails does not end the run."""
    text = reason(error)
    if text != OUT_OF_MEMORY:
        traceback.print_exception(error)
    return text


def prepare(case: Workload, row: Row, which: Pass) -> Prepared:
    """A row's train step or forward pass, compiled, with its state and its batch on the device."""
    return (_torch_steps() if row.torch else jax_steps).prepare(case, row, which, case.random_batch())


def start_anew(rows: Iterable[Row]) -> None:
    """Makes room for ``rows`` where others have had their turns."""
    gc.collect()
    if any(row.torch for row in rows):
        _torch_steps().start_anew()


def describe(case: Workload, row: Row, which: Pass, prepared: Prepared, seconds: float = 3.0) -> dict[str, Any]:
    """All about a step but its time beside others; it runs so many ``seconds`` for its energy, 0 for none.

    Returns:
      ``compile_seconds``, ``compiled_bytes``, ``peak`` (bytes the process has had on the GPU), ``joules`` a call,
      ``tensor_time`` (the share of the kernels' time in tensor-core kernels), ``kernels`` (the longest, ms a call),
      ``flops`` by dtype and ``tensor_flops``, their share in tensor-core dtypes; None for what this device has not.
    """

    def run() -> Any:
        return jax.block_until_ready(prepared.turn())

    for _ in range(3):
        run()
    peak = _torch_steps().peak() if row.torch else memory.device_peak()
    read = energy.counter() if seconds and (jax.default_backend() == "gpu" or peak is not None) else None
    kernels: dict[str, float] = {}
    if peak is not None:  # a device that counts no memory has no kernels to trace either
        kernels = profiling.of_torch(prepared.turn) if row.torch else profiling.of_jax(prepared.turn)
    counted = jax_steps.step_flops(case, row) if which == "train" and not row.torch else {}
    return {
        "compile_seconds": prepared.compile_seconds,
        "compiled_bytes": prepared.compiled_bytes,
        "peak": peak,
        "joules": None if read is None else energy.joules(run, read, seconds),
        "tensor_time": profiling.tensor_core_share(kernels, row.precision),
        "kernels": collections.Counter(kernels).most_common(12),
        "flops": counted,
        "tensor_flops": flops.tensor_core_share(counted) if counted else None,
    }


def alone(case: Workload, row: Row, passes: Iterable[Pass], seconds: float) -> dict[str, Any]:
    """What ``describe`` tells of each pass, with nothing else on the device, the forward pass first.

    A process's peak never falls, and a train step's is the higher.
    """
    found: dict[str, Any] = {}
    for which in sorted(passes):  # "forward" before "train"
        if which == "forward" and not row.forward:
            continue
        prepared: Prepared | None = None
        try:
            prepared = prepare(case, row, which)
            found[which] = describe(case, row, which, prepared, seconds)
        except Exception as error:  # whatever a library raises: the other pass and the other rows go on
            found[which] = {"error": failed(error)}
        prepared = None
        gc.collect()
    return found


def in_processes(commands: Mapping[str, list[str]]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Measures each row in a process of its own, one after the other: a name, and the function that does it.

    While one measures, the next one's imports run. A process waits on stdin for the number of this process before it
    touches the device, and writes what it found to stdout's last line, JSON (see :func:`answer`).

    Args:
      commands: name to command line.
    """
    names, started, pipe = list(commands), list[subprocess.Popen[str]](), subprocess.PIPE
    start = functools.partial(
        subprocess.Popen, cwd=Path(__file__).parents[3], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        for i, name in enumerate(names):
            for later in names[len(started) : i + 2]:
                started.append(start(commands[later]))
            yield name, functools.partial(_finish, started[i])
    finally:
        for process in started:
            if process.poll() is None:  # nobody wanted its result
                process.kill()
                process.communicate()


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(f"{os.getpid()}\n", PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"its process had not ended after {PATIENCE:g} s"}
    if process.returncode:
        last = next(iter(err.strip().splitlines()[::-1]), "no word on stderr")
        return {"error": f"its process ended with code {process.returncode}: {last[:160]}"}
    return json.loads(out.splitlines()[-1])


def answer(measure: Callable[[], dict[str, Any]]) -> None:
    """What a process of :func:`in_processes` does: waits for its turn, measures, and prints what it found.

    It ends with the process that started it: it would measure beside the next run's rows.

    Raises:
      ValueError: there is no number on stdin.
    """
    line = sys.stdin.readline()
    if not line.strip().isdigit():
        raise ValueError("--alone is what a run starts for each row: it waits for the run's process number on stdin")
    threading.Thread(target=_end_after, args=(int(line),), daemon=True).start()
    print(json.dumps(strict_json(measure())), flush=True)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def together(
    prepared: dict[str, Prepared], rounds: int, block_ms: float, after_round: Callable[[int], None]
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each row, round for round and all in turn, and the loss that each ends with.

    A row that fails meanwhile has an ``error`` instead and is taken out of ``prepared``; the others go on.
    """
    names = list(prepared)
    turns = {name: each.turn for name, each in prepared.items()}
    found: dict[str, dict[str, Any]] = {}

    def fails(name: str, error: Exception) -> None:
        found[name] = {"error": failed(error)}
        del turns[name], prepared[name]  # the others may have its memory

    for name, times in timing.interleaved(turns, rounds, block_ms, after_round, fails).items():
        found[name] = {"milliseconds": times}
        if loss := prepared[name].loss:
            try:
                found[name]["loss"] = loss()
            except Exception as error:
                fails(name, error)
    return {name: found[name] for name in names}


def prepare_all(
    case: Workload, rows: Mapping[str, Row], which: Pass, before: Callable[[str], None]
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Every row ready to take its turns in this process, and why those that are not are not.

    The rows with the largest temporaries go first, so that the others find room in the memory these leave.
    """
    start_anew(rows.values())
    order = {"fp32": 0, "tf32": 1}
    names = sorted(rows, key=lambda name: order.get(rows[name].precision, 2))
    prepared, errors = _all_of({name: functools.partial(prepare, case, rows[name], which) for name in names}, before)
    return {name: prepared[name] for name in rows if name in prepared}, errors


def _all_of(
    make: Mapping[str, Callable[[], Prepared]], before: Callable[[str], None]
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Every way ready to take its turns after a first one, and why those that are not are not."""
    prepared, errors = dict[str, Prepared](), dict[str, str]()
    for name, ready in make.items():
        before(name)
        try:
            prepared[name] = ready()
            if prepared[name].turn:
                jax.block_until_ready(prepared[name].turn())
        except Exception as error:  # whatever a library raises: the others go on
            prepared.pop(name, None)
            errors[name] = failed(error)
            gc.collect()
    return prepared, errors


def compared(
    make: Mapping[str, Callable[[], Prepared]],
    rounds: int,
    block_ms: float,
    before: Callable[[str], None],
    after_round: Callable[[int], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """What is known of each way, its times and their ratio to the first one's; an ``error`` of one that failed.

    Args:
      make: name to what makes it ready.
      rounds: of timing; of none, nothing is run.
      block_ms: milliseconds of a turn.
      before: called with each name before it is made ready.
      after_round: called with the number of each round.
    """
    prepared, errors = _all_of(make, before)
    rows = {name: prepared[name].about if name in prepared else {"error": errors[name]} for name in make}
    for name, row in (together(prepared, rounds, block_ms, after_round) if rounds else {}).items():
        why = row.get("error") or broken(row)
        rows[name] = {"error": why} if why else rows[name] | row
    times = {name: row["milliseconds"] for name, row in rows.items() if "milliseconds" in row}
    if (first := next(iter(make))) in times:
        rows |= {name: rows[name] | row for name, row in timing.against(times, first).items()}
    return rows


@contextlib.contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """JAX and torch keep there what they compiled: the process that times need not compile it again."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def _torch_steps() -> Any:
    from experiments.benchmarks.train_step import torch_steps

    return torch_steps
