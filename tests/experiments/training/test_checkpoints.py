"""A failed write of a checkpoint is one short error."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jaxmp
from experiments.training import checkpoints
from experiments.training.checkpoints import Checkpoints, read_last
from jaxmp.checkpoint import orbax_folders


def state() -> jaxmp.TrainState:
    return jaxmp.TrainState.create(params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))


def save(folder: Path, *steps: int) -> None:
    with Checkpoints(folder, keep=2) as manager:
        for step in steps:
            manager.save(step, state(), {"metrics_bytes": step})


def test_the_last_checkpoint_has_the_record_of_its_step(tmp_path):
    with pytest.raises(ValueError, match="has no finished checkpoint to resume from; start again without --resume"):
        read_last(tmp_path)
    save(tmp_path, 1, 2, 3)
    assert read_last(tmp_path) == (tmp_path / "3", 3, {"metrics_bytes": 3})
    half = (tmp_path / "3").rename(tmp_path / "3.orbax-checkpoint-tmp")
    assert checkpoints.unfinished(tmp_path) == [half] and read_last(tmp_path).step == 2


def test_writes_that_fail_beside_the_one_that_is_raised_are_not_logged_as_well(tmp_path, caplog):
    async def write() -> None:
        raise ValueError("the disk is full")

    async def leave_a_failed_write() -> None:
        asyncio.get_running_loop().create_task(write())
        await asyncio.sleep(0.01)
        gc.collect()

    gc.collect()  # left by the checkpoints of another test
    logging.getLogger("asyncio").removeFilter(checkpoints._was_retrieved)
    caplog.clear()
    asyncio.run(leave_a_failed_write())
    assert [record.name for record in caplog.records] == ["asyncio"]
    caplog.clear()
    with Checkpoints(tmp_path, keep=1):
        asyncio.run(leave_a_failed_write())
    assert not caplog.records


def test_the_error_that_ended_a_run_comes_before_that_of_a_checkpoint(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(orbax_folders, "finish_writing", fail)
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path / "a", keep=1) as manager:
        manager.save(1, state(), {})
        raise KeyboardInterrupt
    message = rf"^a checkpoint cannot be written to {tmp_path}/b \(no space left\)$"
    with pytest.raises(OSError, match=message):
        save(tmp_path / "b", 1)
