"""Run a script of the experiments in several processes, which a test may kill.

The processes communicate by gloo.
"""

from __future__ import annotations

import atexit
import csv
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import checkpoint_tools
import jax
from ports import held_port

from experiments.training import checkpoints, cli, processes

PATIENCE_S = 300
# After this time without a heartbeat, the other processes take a process for dead. It is long, for busy machines.
HEARTBEAT_S = 60


def flags(folder: Path) -> list[str]:
    """Return the flags of a small GPT-2, and write its text into ``folder``.

    The GPT-2 sometimes skips a step.
    """
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{n} times {n % 7} is {n * (n % 7)}.\n" for n in range(2000)))
    return (
        f"--model gpt2 --dataset {text} --tokens bytes --layers 1 --heads 2 --width 128 --context 16 --batch-size 8 "
        "--policy mixed_float16 --loss-scale dynamic:loss_scale=65536,period=4 --ema 0.9 --schedule constant "
        f"--evaluate-every 0 --test-batches 1 --sample-tokens 0 --data-dir {folder} --checkpoint-every 4 --keep 99999"
    ).split()


class Job:
    """A script that runs in several processes with the same flags.

    Args:
      folder: the folder of the outputs.
      arguments: the flags of the script.
      processes: the number of processes.
      devices: the number of devices of each process.
      hang_at: the number of the batch before which the first process hangs.
      module: the script.
      heartbeat_s: see HEARTBEAT_S.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        processes: int = 2,
        devices: int = 2,
        hang_at: int | None = None,
        module: str = "experiments.language_modeling",
        heartbeat_s: int = HEARTBEAT_S,
    ) -> None:
        context, port = checkpoint_tools.processes(), held_port()
        at, self._port = f"127.0.0.1:{port.getsockname()[1]}", port.detach()
        self._started = time.monotonic()
        self._outputs = [folder / f"output-{time.monotonic_ns()}-{n}" for n in range(processes)]
        self.processes = []
        for n, output in enumerate(self._outputs):
            own_flags = f"--coordinator {at} --processes {processes} --process-id {n}".split() if processes > 1 else []
            # Only the first process hangs. If it ended first, JAX would end the others before they write an error.
            hang = hang_at if n == 0 else None
            target = (module, [*arguments, *own_flags], output, devices, folder / "compiled", hang, heartbeat_s)
            self.processes.append(context.Process(target=run_script, args=target, daemon=True))
            self.processes[-1].start()

    def wait_for(self, happened: Callable[[], Any]) -> None:
        """Wait until ``happened()`` is true, while all processes must be alive."""
        try:
            while not happened():
                assert time.monotonic() < self._started + PATIENCE_S, "the condition does not become true"
                assert all(process.is_alive() for process in self.processes), self.errors()
                time.sleep(0.002)
        except BaseException:
            self._kill()
            raise

    def send(self, number: int, kind: signal.Signals) -> None:
        os.kill(self.processes[number].pid, kind)

    def end(self) -> list[int | None]:
        """Wait until all processes have ended, and return their exit codes.

        A process that hangs sleeps longer than this method waits.
        """
        limit = time.monotonic() + PATIENCE_S
        for process in self.processes:
            process.join(max(0, limit - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self._kill()
        assert None not in codes, f"a process goes on: {codes}\n{self.errors()}"
        return codes

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        os.close(self._port)

    def said(self, number: int) -> str:
        """Return what the script itself wrote."""
        return self._outputs[number].read_text()

    def output(self, number: int) -> str:
        """Return what the script wrote, and then what its C++ libraries wrote."""
        return self.said(number) + _below(self._outputs[number]).read_text(errors="replace")

    def errors(self) -> list[str]:
        """Return the error lines of each process."""
        return ["\n".join(line for line in self.said(n).splitlines() if line.startswith("error: "))
                for n in range(len(self._outputs))]  # fmt: skip


def _below(output: Path) -> Path:
    return output.with_name(f"{output.name}-below")


def run_script(
    module: str, arguments: list[str], output: Path, devices: int, cache: Path, hang_at: int | None, heartbeat_s: int
) -> None:
    """Run a script as from a shell, with its output in a file.

    With ``hang_at``, it hangs before this batch.

    The texts of gloo, gRPC and XLA go into another file, because they may come from any thread in the middle of a line.
    """
    below = os.open(_below(output), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(below, stream)
    sys.stdout, sys.stderr = (output.open("a", buffering=1) for _ in range(2))
    processes.HEARTBEAT_S = heartbeat_s
    other_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    os.environ["XLA_FLAGS"] = " ".join([*other_flags, f"--xla_force_host_platform_device_count={devices}"])
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if hang_at is not None:
        _hang(hang_at)
    script: Any = importlib.import_module(module)
    sys.argv = [module, *arguments]
    cli.main(script.Config, script.train, script.__doc__)
    atexit._run_exitfuncs()  # child processes of multiprocessing do not run them


def _hang(batch: int) -> None:
    from experiments.training import mesh

    spread, calls = mesh.spread, 0

    def hanging(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == batch:
            time.sleep(10 * PATIENCE_S)
        return spread(*args)

    mesh.spread = hanging


def steps(run: Path) -> int:
    """Return the number of training rows in the metrics of a run."""
    file = run / "metrics.csv"
    return file.read_text().count(",train,") if file.exists() else 0


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["split"] == "train"]


def saving(run: Path) -> bool:
    return bool(checkpoints.unfinished(run / "checkpoints"))
