"""Checkpoints restore the whole state, and detect damage and other models."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_tools import Config, bits, prepare
from jax.sharding import NamedSharding, PartitionSpec
from optimizer_tools import bits as leaf_bits
from optimizer_tools import standard

import jaxmp
from experiments.training import checkpoints
from experiments.training.checkpoints import CheckpointError, Checkpoints, read, read_last

ABOUT = {"precision": {"policy": "float32"}, "metrics_bytes": 7}


def state(
    loss_scale: Any = None, dtype: Any = jnp.float32, params: Any = None, tx: Any = None, seed: int = 0
) -> jaxmp.TrainState:
    """Return a state with all kinds of leaves."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), dtype)

    return jaxmp.TrainState.create(
        params=params or {"dense": {"kernel": draw(3, 4), "bias": draw(4)}, "none": draw(0, 2)},
        tx=optax.chain(jaxmp.loss_scaling(tx or standard(optax.adam(0.1)), loss_scale or jaxmp.DynamicLossScale())),
        model_state={"mean": jnp.asarray(random.normal(size=4), jnp.bfloat16), "seen": jnp.array(True)},
        rng=seed,
        ema=True,
    )


def same(left: Any, right: Any) -> bool:
    """Return whether all leaves are equal bit for bit.

    The functions of the two states may differ.
    """
    return leaf_bits(left) == leaf_bits(right)


def save(folder: Path, state: jaxmp.TrainState, *steps: int, keep: int = 3) -> None:
    with Checkpoints(folder, keep) as manager:
        for step in steps:
            manager.save(step, state, ABOUT)


def test_every_leaf_and_the_record_are_restored_bit_for_bit(tmp_path):
    saved = state(seed=1)
    save(tmp_path, saved, 5)
    for item in (".", "state", "state/d", "about"):  # like a file manager
        (tmp_path / "5" / item / ".DS_Store").write_bytes(b"\0")
    checkpoint = read_last(tmp_path)
    fresh = state(seed=2)
    restored = checkpoint.restore(fresh, ABOUT["precision"])
    assert same(restored, saved) and not same(restored, fresh)
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    assert jax.random.normal(restored.rng) == jax.random.normal(saved.rng)
    assert checkpoint.step == 5
    assert {key: checkpoint.about[key] for key in ABOUT} == ABOUT


def test_sharded_params_come_back_where_they_were(tmp_path):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("data")))
    saved = state(params={"kernel": kernel})
    save(tmp_path, saved, 1)
    restored = read_last(tmp_path).restore(saved, ABOUT["precision"])
    assert same(restored, saved)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, saved)
    again = read_last(tmp_path).restore(restored, ABOUT["precision"], free=True)
    assert same(again, saved) and restored.params["kernel"].is_deleted()


def test_a_state_may_be_donated_while_it_is_written(tmp_path):
    experiment = prepare(Config(ballast=1_000_000))
    with jax.numpy_dtype_promotion("standard"), Checkpoints(tmp_path, keep=3) as manager:
        now, batches = experiment.init(0), experiment.train_batches(0)
        saved = {}
        for step in (1, 2, 3):
            saved[step] = leaf_bits(now)
            manager.save(step, now, ABOUT)
            for _ in range(5):
                now, _ = experiment.step(now, next(batches))
    for step, bits_at_step in saved.items():
        assert leaf_bits(read(tmp_path, step).restore(now, ABOUT["precision"])) == bits_at_step


def test_the_last_checkpoints_are_kept_and_the_next_run_removes_an_unfinished_one(tmp_path):
    save(tmp_path, state(), 0, 1, 2, keep=2)
    assert checkpoints.steps(tmp_path) == [1, 2]
    half = (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")
    assert checkpoints.unfinished(tmp_path) == [half] and read_last(tmp_path).step == 1
    save(tmp_path, state(), 2)
    assert checkpoints.steps(tmp_path) == [1, 2] and not checkpoints.unfinished(tmp_path)


# --- failed writes ---------------------------------------------------------------------------------------------------


def test_a_path_in_which_orbax_cannot_find_what_it_wrote_is_refused(tmp_path, monkeypatch):
    for name in ["a[1]", "a]", r"a\b"]:
        folder = tmp_path / name / "checkpoints"
        message = re.escape(f"checkpoints need a path without [, ] and \\, got {folder}; take another --run-dir, or")
        with pytest.raises(CheckpointError, match=message):
            Checkpoints(folder, keep=1)
        assert not folder.exists()

    monkeypatch.setattr(checkpoints, "_UNWRITABLE", "")
    folder = tmp_path / "a[1]"
    with pytest.raises(
        OSError, match=r"be written to .*/a\[1\] \(.*/manifest.ocdbt was not written, and the checkpoint"
    ):
        save(folder, state(), 1)
    assert not checkpoints.steps(folder) and not list(folder.rglob("checksums.sha256"))


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

    monkeypatch.setattr(Checkpoints, "_write_checksums", fail)
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path / "a", keep=1) as manager:
        manager.save(1, state(), ABOUT)
        raise KeyboardInterrupt
    message = rf"^a checkpoint cannot be written to {tmp_path}/b \(no space left\)$"
    with pytest.raises(OSError, match=message), Checkpoints(tmp_path / "b", keep=1) as manager:
        manager.save(1, state(), ABOUT)


# --- damage --------------------------------------------------------------------------------------------------------


def damages(content: bytes) -> Iterator[bytes | None]:
    """Yield damaged versions of a file's content, and None for a missing file."""
    yield None
    if content:
        yield b""
        yield content[: len(content) // 2]
        yield content[:-1]
        for position in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
            yield content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]


def test_a_file_of_a_checkpoint_that_is_damaged_in_any_way_is_noticed_or_does_not_matter(tmp_path):
    save(tmp_path, state(seed=1), 4)
    undamaged = bits(read_last(tmp_path))
    files = sorted(path for path in (tmp_path / "4").rglob("*") if path.is_file())
    assert len(files) > 8
    noticed = dict.fromkeys(files, 0)
    for file in files:
        content = file.read_bytes()
        for damaged in damages(content):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            try:
                checkpoint = read(tmp_path, 4)
            except CheckpointError as error:
                assert str(error).startswith(f"the checkpoint {tmp_path / '4'} is damaged: ")
                noticed[file] += 1
            else:
                assert bits(checkpoint) == undamaged and checkpoint.about["metrics_bytes"] == 7
        file.write_bytes(content)
    assert bits(read_last(tmp_path)) == undamaged
    assert all(noticed[file] == 8 for file in files if file.parent != tmp_path / "4" and file.stat().st_size > 3)


def test_a_folder_that_is_missing_or_of_another_checkpoint_is_damage_too(tmp_path):
    save(tmp_path / "a", state(seed=1), 4)
    save(tmp_path / "b", state(seed=2), 4)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "4" / "about")
    with pytest.raises(CheckpointError, match=r"/c/4 is damaged: "):
        read_last(tmp_path / "c")
    shutil.rmtree(tmp_path / "a" / "4" / "state")
    shutil.copytree(tmp_path / "b" / "4" / "state", tmp_path / "a" / "4" / "state")
    with pytest.raises(CheckpointError, match=r"/a/4 is damaged: state/\S+ (is missing|was changed)"):
        read_last(tmp_path / "a")


def test_checksums_that_are_damaged_are_named_and_no_file_that_is_whole(tmp_path):
    save(tmp_path, state(), 4)
    file = tmp_path / "4" / "checksums.sha256"
    content = file.read_bytes()
    for damaged in (
        b"",
        content[: len(content) // 2],
        content[:-1],
        content[:120] + bytes([content[120] ^ 1]) + content[121:],  # in the checksum of a file
        content[:-3] + b"~" + content[-2:],  # in the name of a file
        content.split(b"\n", 1)[1],
    ):
        file.write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match=r"/4 is damaged: checksums.sha256 was changed after it was written, so"
        ):
            read_last(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"/4 is damaged: checksums.sha256 is missing; "):
        read_last(tmp_path)


def damage(checkpoint: Path) -> None:
    for file in (checkpoint / "state" / "d").iterdir():
        file.write_bytes(file.read_bytes()[:-1])


def test_the_last_good_one_is_offered_and_following_the_offer_helps(tmp_path):
    save(tmp_path, state(), 1, 2, 3)
    for step in (2, 3):
        damage(tmp_path / str(step))
    offer = (
        rf"the checkpoint {tmp_path}/3 is damaged: .*; the checkpoint {tmp_path}/2 is damaged: .*; the last good one "
        rf"is of step 1; to resume from it, remove the later ones: rm -r {tmp_path}/3 {tmp_path}/2$"
    )
    with pytest.raises(CheckpointError, match=offer) as error:
        read_last(tmp_path)
    for path in re.findall(r"\S+", str(error.value).split("rm -r ")[1]):
        shutil.rmtree(path)
    assert read_last(tmp_path).step == 1

    with pytest.raises(CheckpointError, match="has no finished checkpoint to resume from; start again without --res"):
        read_last(tmp_path / "none")
    damage(tmp_path / "1")
    with pytest.raises(CheckpointError, match="there is no good one; start again without --resume, in another folder"):
        read_last(tmp_path)


# --- another policy, another model -----------------------------------------------------------------------------------


def moved(loss_scale: Any, **changes: Any) -> Any:
    """Return a loss scale as it is after some training."""
    return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(3), loss_scale)


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        (jaxmp.DynamicLossScale(), jaxmp.DynamicLossScale(2.0**10, period=7), True),
        (jaxmp.DynamicLossScale(), jaxmp.HeadroomLossScale(), False),
    ],
    ids=["period", "dynamic to headroom"],
)
def test_a_loss_scale_of_the_same_kind_continues_and_another_starts_fresh(before, after, goes_on, tmp_path):
    saved = state(moved(before), seed=1)
    saved = saved.replace(stuck=jnp.int32(9), skipped_steps=jnp.int32(11))
    save(tmp_path, saved, 1)
    fresh = state(after)
    restored = read_last(tmp_path).restore(fresh, {"policy": "mixed_bfloat16"})
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)  # the parameters are those of the new loss scale
    scale = jaxmp.get_loss_scale(restored.opt_state)
    assert same(scale, moved(before) if goes_on else after)
    assert restored.skipped_steps == 11 and restored.stuck == (9 if goes_on else 0)
    assert same(restored.params, saved.params)
    assert same(restored.opt_state[0].inner_state, saved.opt_state[0].inner_state)


def test_a_loss_scale_with_a_further_counter_continues_and_starts_that_counter_fresh(tmp_path):
    save(tmp_path, state(moved(jaxmp.DynamicLossScale(1024))), 1)
    fresh = state(jaxmp.DynamicLossScale(64, hysteresis=2))
    restored = read_last(tmp_path).restore(fresh, ABOUT["precision"])
    assert jax.tree.structure(restored) == jax.tree.structure(fresh)
    scale = jaxmp.get_loss_scale(restored.opt_state)
    assert (scale.loss_scale, scale.counter, scale.countdown) == (1027, 3, 2)
    save(tmp_path, restored, 2)
    back = read_last(tmp_path).restore(state(jaxmp.DynamicLossScale(64)), ABOUT["precision"])
    assert jaxmp.get_loss_scale(back.opt_state).loss_scale == 1027


@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_params_or_statistics_of_another_dtype_are_refused_with_both_policies_and_a_path(tmp_path):
    before, after = "bfloat16", "mixed_float16"
    dtypes = [jaxmp.get_policy(name).param_dtype for name in (before, after)]
    with Checkpoints(tmp_path, keep=1) as manager:
        manager.save(1, state(dtype=dtypes[0]), {"precision": {"policy": before}})
    message = (
        rf"with the same param dtypes, but policy '{before}' made {tmp_path}/1, in which 'params/dense/bias' is "
        rf"{dtypes[0].name}, and under policy '{after}' it is {dtypes[1].name}; resume with --policy {before}, or"
    )
    with pytest.raises(CheckpointError, match=message):
        read_last(tmp_path).restore(state(dtype=dtypes[1]), {"policy": after})
    other = state(dtype=dtypes[0]).replace(model_state={"mean": jnp.zeros(4), "seen": jnp.array(True)})
    with pytest.raises(CheckpointError, match=r"'model_state/mean' is bfloat16, and under .* it is float32"):
        read_last(tmp_path).restore(other, {"policy": before})


@pytest.mark.filterwarnings("ignore:updates below")  # of the half params
def test_an_override_that_gives_params_another_dtype_is_named(tmp_path):
    for then, now, policies, remedy in [
        (
            [],
            ["**/Dense_0=O3"],
            "policy 'O2' made .* under policy 'O2' with the override '\\*\\*/Dense_0=O3' it is",
            "--policy O2 and without --override, or",
        ),
        (
            ["a=float32", "b*=O2"],
            [],
            "'O2' with the override 'a=float32' and 'b\\*=O2' made .* under policy 'O2' it is",
            r"--policy O2 --override a=float32 --override 'b\*=O2', or",
        ),
    ]:
        about = {"precision": {"policy": "O2"}, "config": {"override": then}}
        folder = tmp_path / ("then" if then else "now")
        with Checkpoints(folder, keep=1) as manager:
            manager.save(1, state(), about)
        with pytest.raises(CheckpointError, match=f"{policies} .*; resume with {remedy}"):
            read_last(folder).restore(state(dtype=jnp.float16), about["precision"], now)


def test_another_model_or_optimizer_is_refused_with_the_first_path_that_differs(tmp_path):
    save(tmp_path, state(), 1)
    for params, tx, message in [
        (
            {"dense": {"kernel": (3, 4)}, "none": (0, 2)},
            None,
            r"'params/dense/bias' has shape \(4,\) in \S+/1 and is "
            "missing in",
        ),
        (
            {"dense": {"kernel": (3, 5), "bias": (4,)}, "none": (0, 2)},
            None,
            r"'params/dense/kernel' has shape \(3, 4\) "
            r"in \S+/1 and has shape \(3, 5\) in this run; resume with the flags of that run",
        ),
        ({"dense": {"alpha": (4,)}}, None, r"'params/dense/alpha' is missing in \S+/1 and has shape \(4,\) in this"),
        (None, optax.sgd(0.1), r"'opt_state/0/inner_state/0/count' has shape \(\) in \S+/1 and is missing in this run"),
    ]:
        params = params and jax.tree.map(jnp.zeros, params, is_leaf=lambda node: isinstance(node, tuple))
        other = state(params=params, tx=tx)
        with pytest.raises(CheckpointError, match=message):
            read_last(tmp_path).restore(other, ABOUT["precision"])
