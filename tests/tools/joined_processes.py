"""Run a script in two processes that JAX joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from places import ROOT
from ports import held_port


def results_of_two(script: Path, folder: Path, *arguments: str) -> list[Any]:
    """Return the result of each process, which it writes as JSON.

    The arguments of the script are the address of the coordinator, the number of the process, ``arguments``, and the
    file of the result. The file is needed because gloo writes to the standard output.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    files = [folder / f"{number}.json" for number in range(2)]
    processes = []
    with held_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        for number, file in enumerate(files):
            command = [sys.executable, str(script), address, str(number), *arguments, str(file)]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        try:
            errors = [process.communicate(timeout=300)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [json.loads(file.read_text()) for file in files]
