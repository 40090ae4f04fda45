"""Kills a job of two processes again and again, either of them, in training and in saving, and looks what comes of it.

PYTHONPATH=.:tests/tools JAX_PLATFORMS=cpu python tests/tools/kill_processes.py 20

In the end the state is bit for bit that of a job that was left alone.
"""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
from pathlib import Path

from checkpoint_tools import bits, last, rows
from process_tools import Job, flags, saving, steps

from experiments.training import checkpoints


def main(kills: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, apart = Path(name), 7

        def begin(run: str, *more: str) -> Job:
            own = ["--run-dir", str(folder / run), "--mesh", "fsdp=4", "--steps", str(apart * (kills + 3))]
            return Job(folder, [*flags(folder), *own, *more])

        assert begin("alone").end() == [0, 0]
        run, cases = folder / "killed", itertools.cycle(itertools.product((0, 1), (False, True)))
        for number, in_save in itertools.islice(cases, kills):
            before = checkpoints.steps(run / "checkpoints")
            job = begin("killed", *(["--resume"] if before else []))
            stale, begun = steps(run), before[-1] if before else 0
            job.wait_for(lambda stale=stale: steps(run) != stale)  # one that is resumed cuts off its last rows
            job.wait_for(lambda begun=begun: steps(run) > begun + 1)
            if in_save:
                job.wait_for(lambda: saving(run))
            job.send(number, signal.SIGKILL)
            codes = job.end(60)
            inside, after = saving(run), checkpoints.steps(run / "checkpoints")
            print(f"killed process {number}{' in a save' if inside else ''}: exit {codes}, checkpoints {after[-2:]}")
        assert begin("killed", "--resume").end() == [0, 0]
        assert bits(last(folder / "alone")) == bits(last(run)) and rows(folder / "alone") == rows(run)
        print(f"after {kills} kills the same, bit for bit")


if __name__ == "__main__":
    main(int(sys.argv[1]))
