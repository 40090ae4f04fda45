"""Measure each row in a separate process."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.report.json_files import strict_json

PATIENCE = 300.0
"""The seconds that a row may take in its process, so that a row that hangs does not block the others."""


def in_processes(commands: Mapping[str, list[str]]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield each row's name, and a function that measures it in a new process.

    The process of the next row starts early, so that its imports run during the current measurement. The new process
    waits for this process's id on stdin before it uses the device. Then it prints its figures as JSON in the last line
    of stdout (see :func:`answer`).

    Args:
      commands: the command line of each row, by the row's name.
    """
    names, started, pipe = list(commands), list[subprocess.Popen[str]](), subprocess.PIPE
    start = functools.partial(
        subprocess.Popen, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    try:
        for i, name in enumerate(names):
            for later in names[len(started) : i + 2]:
                started.append(start(commands[later]))
            yield name, functools.partial(_finish, started[i])
    finally:
        for process in started:
            if process.poll() is None:  # its result is not needed any more
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
        last = next(iter(err.strip().splitlines()[::-1]), "nothing on stderr")
        return {"error": f"its process ended with code {process.returncode}: {last[:160]}"}
    return json.loads(out.splitlines()[-1])


def answer(measure: Callable[[], dict[str, Any]]) -> None:
    """Wait for this process's turn, measure, and print the result.

    This process ends when the process that started it ends. Otherwise it could disturb the measurements of a later run.

    Raises:
      ValueError: there is no number on stdin.
    """
    line = sys.stdin.readline()
    if not line.strip().isdigit():
        raise ValueError("--alone is for the benchmark's own use: it waits for the benchmark's process number on stdin")
    threading.Thread(target=_end_after, args=(int(line),), daemon=True).start()
    print(json.dumps(strict_json(measure())), flush=True)


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
