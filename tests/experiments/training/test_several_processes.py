"""Two processes train like one process, resume after a kill, stop together."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_tools import bits, last, leaves, rows
from process_tools import Job, flags, losses, saving, steps

import jaxmp
from experiments import language_modeling
from experiments.training import checkpoints, cli, mesh, processes
from jaxmp.checkpoint.named_leaves import array_to_write, leaves_by_name

STEPS = 32
AMPLE = 100_000  # enough steps, so that the job does not end before it is killed or stopped on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


def arguments(folder: Path, run: str, *more: str, steps: int = STEPS, mesh: str = "fsdp=4") -> list[str]:
    return [*flags(folder), "--run-dir", str(folder / run), "--mesh", mesh, "--steps", str(steps), *more]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Job:
    """Return an undisturbed job."""
    job = Job(folder, arguments(folder, "alone"))
    assert job.end() == [0, 0], [job.output(n) for n in range(2)]
    return job


@pytest.mark.slow("trains in two processes")
def test_two_processes_learn_what_one_learns(alone, folder, tmp_path):
    assert jax.device_count() == 4
    with jax.numpy_dtype_promotion("standard"):
        language_modeling.train(cli.parse(language_modeling.Config, "", arguments(folder, str(tmp_path), steps=8)))
    np.testing.assert_allclose(losses(folder / "alone")[:8], losses(tmp_path), rtol=2e-3)
    assert leaves(last(folder / "alone"))["opt_state/skipped_steps"] > 0
    single_config, job_config = (json.loads((run / "config.json").read_text()) for run in (tmp_path, folder / "alone"))
    assert single_config["precision"] == job_config["precision"]


@pytest.mark.slow("trains in two processes")
def test_the_first_process_alone_shows_and_writes(alone, folder):
    assert "held-out accuracy" in alone.said(0) and f"{STEPS}/{STEPS}" in alone.said(0)
    assert [line.split(";")[0] for line in alone.said(1).splitlines()] == ["note: process 1 of 2"]
    assert len(losses(folder / "alone")) == STEPS
    assert {path.name for path in (folder / "alone").iterdir()} == {
        ".lock", "checkpoints", "config.json", "curves.png", "metrics.csv", "summary.json", "summary.md",
    }  # fmt: skip


@pytest.mark.slow("trains in two processes")
@pytest.mark.parametrize("devices", [1, 4])
def test_a_checkpoint_of_two_processes_is_restored_bit_for_bit_on_any_number_of_devices(alone, folder, devices):
    checkpoint = checkpoints.Checkpoint(folder / "alone" / "checkpoints" / "12", 12, {})
    on = jax.make_mesh((1, devices, 1), mesh.AXES, devices=jax.devices()[:devices])
    config = cli.parse(language_modeling.Config, "", arguments(folder, "none", mesh=f"fsdp={jax.device_count()}"))
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setattr(mesh, "read", lambda _: on if devices > 1 else None)
        experiment = language_modeling.prepare(config)
        fresh = experiment.init(0)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, fresh)
        restored = checkpoint.restore(fresh)
    kernel = restored.params["h_0"]["mlp"]["c_fc"]["kernel"]
    assert len(kernel.sharding.device_set) == devices
    assert kernel.addressable_shards[0].data.size == kernel.size // devices
    assert jax.tree.map(lambda x: x.sharding, restored) == shardings
    saved = leaves(checkpoint)
    for name, leaf in leaves_by_name(restored).items():
        assert np.asarray(array_to_write(leaf)).tobytes() == saved[name].tobytes(), name


@pytest.fixture(scope="module")
def hanging(alone: Job, folder: Path) -> Job:
    """Start a job that hangs.

    It starts before the longest test, because the watchdog ends it only after a while.
    """
    return Job(folder, arguments(folder, "hangs", "--stall-seconds", "20"), hang_at=12)


@pytest.mark.slow("kills processes of a job")
def test_a_job_that_is_killed_and_stopped_has_the_steps_of_an_undisturbed_job_bit_for_bit(
    alone, hanging, folder, tmp_path
):
    run = tmp_path / "killed"

    job = Job(folder, arguments(folder, str(run), steps=AMPLE))
    job.wait_for(lambda: steps(run) > 5 and jaxmp.checkpoint.list_steps(run / "checkpoints") and saving(run))
    job.send(0, signal.SIGKILL)
    killed, other = job.end()
    assert killed == -signal.SIGKILL and other not in (0, None)
    assert "Then start all again with --resume" in job.said(1)
    saved, written = jaxmp.checkpoint.list_steps(run / "checkpoints")[-1], steps(run)
    assert saved < STEPS  # otherwise the comparison below would say nothing about the resumed job

    job = Job(folder, arguments(folder, str(run), "--resume", steps=AMPLE))
    job.wait_for(lambda: steps(run) > max(STEPS, written))
    job.send(1, signal.SIGTERM)
    assert job.end() == [0, 0], [job.output(n) for n in range(2)]
    said = re.search(r"stopped by SIGTERM after step (\d+), which is saved; .* --resume --run-dir (\S+)", job.said(0))
    assert said and int(said[1]) == last(run).step == len(losses(run)) and said[2] == str(run)
    assert f"resuming {run} at step {saved}" in job.said(0)
    assert not saving(run) and not (run / "summary.json").exists()
    folders = (run_folder / "checkpoints" / str(STEPS) for run_folder in (folder / "alone", run))
    expected, resumed = (checkpoints.Checkpoint(path, STEPS, {}) for path in folders)
    assert bits(expected) == bits(resumed) and rows(folder / "alone")[:STEPS] == rows(run)[:STEPS]


@pytest.mark.slow("waits until a process is taken for hung")
def test_a_process_that_hangs_ends_all_and_says_where(hanging):
    assert all(code not in (0, None) for code in hanging.end())
    said = hanging.said(0)
    assert "error: this process has made no step for longer than --stall-seconds allows" in said
    assert "Start all again with --resume" in said and "in hanging" in said.split("It hangs here:")[1]


# --- what a user gets wrong ------------------------------------------------------------------------------------------


@pytest.mark.slow("two processes")
def test_bad_input_is_one_error_on_every_process_and_none_hangs(folder):
    job = Job(folder, [str(folder), str(folder / "bad")], module="process_errors")
    assert job.end() == [2, 2], [job.output(n) for n in range(2)]
    expected = {
        "mesh": "the product of the numbers of --mesh must be the number of devices, got data=3 for 4 devices",
        "axis": "--mesh gives a number of devices to some of the axes data, fsdp, tensor, got 'row=4'; write",
        "batch": "times the 4 devices of --mesh that a batch is split over, got 6 and --accumulate 1; take",
        "weights": "(on process 1 of 2)",
        "flags": "must have the same flags and the same code, but --batch-size is 8 on process 0 and 16 on process 1",
        "data": "no such text (on process 1 of 2)",
        "folder": "all processes must see the folder of the run, but ",
    }
    for number in range(2):
        errors: dict[str, Any] = json.loads(job.said(number).split("found ")[1].splitlines()[0])
        assert errors.keys() == expected.keys()
        for name, text in expected.items():
            assert text in errors[name], (name, errors[name])
    assert job.errors() == ["error: the same on both"] * 2


def test_invalid_flags_of_processes_are_an_error_and_a_single_process_under_slurm_is_allowed(monkeypatch):
    for settings, message in [
        ({"coordinator": "a:1"}, "--coordinator, --processes and --process-id go together, got a:1, None and None; gi"),
        ({"coordinator": "a", "processes": 2, "process_id": 0}, "--coordinator is HOST:PORT of process 0, got 'a'; wr"),
        ({"coordinator": "a:1", "processes": 2, "process_id": 2}, "counts from 0 to one less .* got 2 of 2 processes"),
    ]:
        with pytest.raises(ValueError, match=message):
            processes.start(language_modeling.Config(**settings))

    for name in processes._SLURM:
        monkeypatch.setenv(name, "1")
    assert not processes._detected()
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert processes._detected()
    monkeypatch.delenv("SLURM_PROCID")
    assert not processes._detected()
