"""Kill a job of two processes many times, and check its last state.

    PYTHONPATH=.:tests/tools JAX_PLATFORMS=cpu python tests/tools/kill_processes.py 20

The kills alternate between the two processes, and between training and saving. The last state must equal that of a job
without kills, bit for bit.
"""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
import time
from pathlib import Path

from checkpoint_tools import bits, last, rows
from process_tools import Job, flags, saving

import jaxmp
from experiments.training import processes


def main(kills: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, cases = folder / "killed", itertools.cycle(itertools.product((0, 1), (False, True)))

        def begin(run: str, steps: int, *more: str) -> Job:
            run_flags = ["--run-dir", str(folder / run), "--mesh", "fsdp=4", "--steps", str(steps)]
            return Job(folder, [*flags(folder), *run_flags, *more], heartbeat_s=processes.HEARTBEAT_S)

        def done() -> int:
            return max(jaxmp.checkpoint.list_steps(run / "checkpoints"), default=0)

        for number, in_save in itertools.islice(cases, kills):
            before = done()
            job = begin("killed", 100_000, *(["--resume"] if before else []))
            job.wait_for(lambda before=before: done() > before)
            job.wait_for(lambda in_save=in_save: saving(run) == in_save)
            job.send(number, signal.SIGKILL)
            killed = time.monotonic()
            codes, took = job.end(), time.monotonic() - killed
            place = "a save" if in_save else "training"
            print(
                f"killed process {number} in {place} after step {done()}: exit {codes} within {took:.0f} s", flush=True
            )
            assert took < 60
        steps = done() + 4
        assert begin("killed", steps, "--resume").end() == [0, 0]
        assert begin("alone", steps).end() == [0, 0]
        assert bits(last(folder / "alone")) == bits(last(run)) and rows(folder / "alone") == rows(run)
        print(f"after {kills} kills and {steps} steps, the state is bit for bit that of a run without kills")


if __name__ == "__main__":
    main(int(sys.argv[1]))
