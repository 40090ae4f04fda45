"""A saved run continues bit for bit, and a checkpoint is complete or ignored."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import concrete
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from error_tools import refused
from flax import nnx
from optimizer_tools import bits
from places import ROOT
from saved_runs import BAD, BATCH, linen_run, nnx_loss, nnx_run

import jaxmp
from jaxmp import checkpoint

pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.usefixtures("standard_promotion")


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nnx_step():
    """Return the train step of the NNX runs, which is compiled once for all of them."""
    return jaxmp.nnx.make_train_step(nnx_loss, ema_decay=0.9)


@pytest.mark.once
def test_a_restored_linen_run_continues_bit_for_bit_though_the_saved_state_is_donated_at_once(tmp_path, capsys):
    state, loss_fn = linen_run()
    step = jaxmp.make_train_step(loss_fn, ema_decay=0.9)
    for batch in (BATCH, BAD, BATCH):
        state, _ = step(state, batch)
    saved = bits(state)
    checkpoint.save(tmp_path, state)
    for batch in (BAD, BATCH, BATCH, BATCH):
        state, _ = step(state, batch)

    like, _ = linen_run(seed=5)
    restored = checkpoint.restore(tmp_path, like)
    assert bits(restored) == saved and restored.step == 3 and restored.skipped_steps == 1
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    for batch in (BAD, BATCH, BATCH, BATCH):
        restored, _ = step(restored, batch)
    assert bits(restored) == bits(state)
    assert capsys.readouterr().out == f"restored step 3 of {tmp_path}\n"  # nothing was converted


@pytest.mark.once
def test_a_restored_nnx_run_continues_bit_for_bit_in_place(nnx_step, tmp_path):
    model, optimizer = nnx_run()
    for batch in (BATCH, BAD, BATCH):
        nnx_step(model, optimizer, batch)
    saved = bits(nnx.state((model, optimizer)))
    checkpoint.save(tmp_path, (model, optimizer))
    for batch in (BAD, BATCH, BATCH):
        nnx_step(model, optimizer, batch)

    pair = nnx_run(seed=5)
    assert checkpoint.restore(tmp_path, pair) is pair
    assert bits(nnx.state(pair)) == saved and pair[1].step[...] == 3
    for batch in (BAD, BATCH, BATCH):
        nnx_step(*pair, batch)
    assert bits(nnx.state(pair)) == bits(nnx.state((model, optimizer)))


@pytest.mark.once
def test_several_nnx_models_are_restored_by_their_state(nnx_step, tmp_path):
    def make_runs(seed):
        names = ("generator", "generator_optimizer", "critic", "critic_optimizer")
        return dict(zip(names, (*nnx_run(seed=seed), *nnx_run(seed=seed + 1)), strict=True))

    runs, fresh = make_runs(seed=0), make_runs(seed=5)
    nnx_step(runs["generator"], runs["generator_optimizer"], BATCH)
    nnx_step(runs["critic"], runs["critic_optimizer"], BATCH)
    checkpoint.save(tmp_path, nnx.state(runs), step=3)
    nnx.update(fresh, checkpoint.restore(tmp_path, nnx.state(fresh)))
    assert bits(nnx.state(fresh)) == bits(nnx.state(runs))
    nnx_step(fresh["critic"], fresh["critic_optimizer"], BATCH)


@pytest.mark.once
def test_any_tree_of_arrays_and_numbers_can_be_saved_and_restored_to_shapes(tmp_path):
    tree = {
        "half": [concrete.arange(3, dtype=jnp.bfloat16), concrete.ones((2, 2), jnp.float8_e4m3fn)],
        "keys": (jax.random.key(1), jax.random.split(jax.random.key(2, impl="rbg"), 3), jax.random.PRNGKey(3)),
        "flag": jnp.array(True),
        "empty": concrete.zeros((0, 2), jnp.int32),
        "numpy": np.arange(4.0, dtype=np.float32),
        "count": 3,
    }
    checkpoint.save(tmp_path, tree, step=4)
    restored = checkpoint.restore(tmp_path, tree)
    assert bits(restored) == bits(tree) and isinstance(restored["numpy"], np.ndarray) and restored["count"] == 3
    restored["count"] = jnp.int32(3)
    checkpoint.save(tmp_path, restored, step=5)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    shapes = {
        "half": [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place) for leaf in restored["half"]],
        "keys": [jax.ShapeDtypeStruct(key.shape, key.dtype) for key in restored["keys"]],
        "flag": jax.ShapeDtypeStruct((), jnp.bool_),
        "empty": jax.ShapeDtypeStruct((0, 2), jnp.int32),
        "numpy": jax.ShapeDtypeStruct((4,), jnp.float32),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    again = checkpoint.restore(tmp_path, shapes)
    assert bits(again) == bits(restored) and again["half"][0].devices() == {jax.devices()[1]}
    assert str(jax.random.key_impl(again["keys"][1])) == "rbg" and not again["flag"].committed


def test_numpy_arrays_and_python_numbers_keep_their_64_bits(tmp_path):
    tree = {
        "position": np.array([2**40]),
        "seed": np.array([2**63, 2**63 + 1], np.uint64),
        "large": np.array([1e300]),
        "complex": np.array([1e300j]),
        "scalar": np.float64(0.1),
        "big_endian": np.array([2**40], ">i8"),
        "count": 2**40,
        "word": 2**64 - 1,
        "rate": 0.1,
        "root": 0.1j,
        "flag": True,
    }
    checkpoint.save(tmp_path, tree, step=1)
    like = {name: type(leaf)(0) if np.ndim(leaf) == 0 else np.zeros_like(leaf) for name, leaf in tree.items()}
    restored = checkpoint.restore(tmp_path, like)
    for name, leaf in tree.items():
        assert type(restored[name]) is type(leaf) and np.array_equal(restored[name], leaf), name
        assert np.result_type(restored[name]) == np.result_type(leaf), name


@pytest.mark.parametrize("leaf", [np.array(["text"]), np.ones(2, "M8[s]"), np.ones(2, np.longdouble), 2**64])
def test_a_dtype_that_orbax_cannot_write_is_refused(leaf, tmp_path):
    checkpoint.save(tmp_path, {"a": concrete.ones(2)}, step=1, wait=True)
    refused(lambda: checkpoint.save(tmp_path, {"a": leaf}, step=2), TypeError, "Orbax cannot write ", "got 'a'")
    assert checkpoint.list_steps(tmp_path) == [1]


@pytest.mark.parametrize("state", [{"a": np.zeros((0, 2))}, {}])
def test_a_state_without_elements_can_be_saved(state, tmp_path):
    checkpoint.save(tmp_path, state, step=4, metadata={"policy": "float32"})
    assert bits(checkpoint.restore(tmp_path, state)) == bits(state)
    assert checkpoint.read_metadata(tmp_path) == {"policy": "float32"}
    refused(lambda: checkpoint.restore(tmp_path, {"a": jnp.ones(2)}), ValueError, "'a'", "is in ", "but not in ")


@pytest.mark.parametrize(
    "kind",
    [
        jax.sharding.AxisType.Auto,
        pytest.param(jax.sharding.AxisType.Explicit, marks=pytest.mark.slow("the same for another type of axes")),
    ],
)
def test_a_sharded_state_is_restored_onto_other_devices(tmp_path, kind):
    def sharded(count: int, seed: int) -> jaxmp.TrainState:
        mesh = jax.make_mesh((count,), ("fsdp",), axis_types=(kind,), devices=jax.devices()[:count])

        def make_params():
            return {"w": jax.random.normal(jax.random.key(seed), (8, 4)), "b": jnp.full(4, float(seed))}

        specs = {"w": jax.P("fsdp"), "b": jax.P()}
        sharding = jaxmp.sharding.Sharding(mesh, specs)
        return jaxmp.TrainState.create_sharded(make_params, optax.adam(0.1), sharding, rng=seed, ema=True)

    saved = sharded(4, seed=1)
    checkpoint.save(tmp_path, saved)
    for count in (2, 1, 4):
        like = sharded(count, seed=2)
        restored = checkpoint.restore(tmp_path, like)
        assert bits(restored) == bits(saved)
        for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
            assert leaf.sharding == other.sharding and leaf.committed
        assert restored.params["w"].addressable_shards[0].data.shape == (8 // count, 4)


# --- complete or ignored ----------------------------------------------------------------------------------------------

SAVING = """
import sys, jax.numpy as jnp, jaxmp
folder, elements, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
state = {"w": jnp.arange(elements, dtype=jnp.float32)}
for step in range(first, first + 3):
    jaxmp.checkpoint.save(folder, state, step=step)
    print(step, flush=True)
"""


def saving(folder, elements, first=0):
    """Start a program that saves three times, and ends without waiting."""
    command = [sys.executable, "-c", SAVING, str(folder), str(elements), str(first)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow("starts processes")
def test_a_program_that_ends_while_it_saves_writes_the_last_checkpoint(tmp_path):
    program = saving(tmp_path, 3_000_000)
    _, errors = program.communicate()
    assert program.returncode == 0 and errors == ""
    assert checkpoint.list_steps(tmp_path) == [0, 1, 2]
    restored = checkpoint.restore(tmp_path, {"w": jax.ShapeDtypeStruct((3_000_000,), jnp.float32)})
    assert jnp.array_equal(restored["w"], concrete.arange(3_000_000, dtype=jnp.float32))


@pytest.mark.slow("starts and kills processes")
def test_a_checkpoint_of_a_program_that_was_killed_while_it_saved_is_ignored_and_later_removed(tmp_path):
    elements = 20_000_000
    like = {"w": jax.ShapeDtypeStruct((elements,), jnp.float32)}
    unfinished = []
    for first in itertools.count(0, 10):
        program = saving(tmp_path, elements, first)
        while program.poll() is None and (not list(tmp_path.glob("*tmp*")) or program.stdout.readline() == ""):
            time.sleep(0.001)
        program.send_signal(signal.SIGKILL)
        _, errors = program.communicate()
        assert program.returncode in (0, -signal.SIGKILL), errors
        if unfinished := list(tmp_path.glob("*tmp*")):  # else the write ended just before the kill
            break
    complete = checkpoint.list_steps(tmp_path)
    assert int(unfinished[0].name.partition(".")[0]) not in complete
    if complete:
        assert checkpoint.restore(tmp_path, like)["w"][-1] == elements - 1
    checkpoint.save(tmp_path, {"w": concrete.ones(2)}, step=1000, wait=True)
    assert checkpoint.list_steps(tmp_path)[-1] == 1000 and not list(tmp_path.glob("*tmp*"))


def test_the_newest_checkpoints_are_kept_and_the_steps_of_a_folder_rise(tmp_path):
    def save(step, **settings):
        checkpoint.save(tmp_path / "a", {"w": concrete.full(2, step)}, step=step, **settings)

    for step in (1, 2, 3):
        save(step, keep=2, wait=True)
    assert checkpoint.list_steps(tmp_path / "a") == [2, 3]
    save(4, keep=None, metadata={"policy": "float32"})
    for step in (3, 4):
        refused(
            lambda step=step: save(step, keep=1),
            ValueError,
            f"steps must rise in a folder, got step {step} for ",
            "which has a checkpoint of step 4;\nsave to another folder, or remove the later checkpoints",
        )
    like = {"w": concrete.zeros(2, jnp.int32)}
    assert checkpoint.restore(tmp_path / "a", like)["w"][0] == 4
    assert checkpoint.restore(tmp_path / "a", like, step=3)["w"][0] == 3
    assert checkpoint.read_metadata(str(tmp_path / "a")) == {"policy": "float32"}
    assert checkpoint.read_metadata(tmp_path / "a", step=3) == {}
    assert checkpoint.list_steps(tmp_path / "a") == [2, 3, 4] and checkpoint.list_steps(tmp_path / "none") == []


def fail_to_complete(monkeypatch):
    """Let every write of Orbax fail at its end."""
    import orbax.checkpoint as ocp

    async def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(ocp.path.atomicity.AtomicRenameTemporaryPath, "finalize", fail)


def test_the_error_of_a_write_in_the_background_is_raised_by_a_later_call(tmp_path, monkeypatch):
    arrays = {"w": concrete.ones(2)}
    fail_to_complete(monkeypatch)
    later_calls = (
        lambda: checkpoint.wait(),
        lambda: checkpoint.save(tmp_path, arrays, step=2),
        lambda: checkpoint.restore(tmp_path, arrays),
    )
    for call in later_calls:
        checkpoint.save(tmp_path, arrays, step=1)
        with pytest.raises(OSError, match="no space left") as error:
            call()
        assert f"was being written to {tmp_path}" in error.value.__notes__[-1]
    checkpoint.wait()  # the error was raised already
    monkeypatch.undo()
    assert checkpoint.list_steps(tmp_path) == []
    checkpoint.save(tmp_path, arrays, step=1, wait=True)
    assert checkpoint.list_steps(tmp_path) == [1]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_wrong_argument_is_refused(tmp_path):
    state, _ = linen_run()
    model, _ = nnx_run()
    save = checkpoint.save
    refused(lambda: save(tmp_path, {"w": jnp.ones(2)}), ValueError, "step of a dict is unknown; write save(folder, st")
    refused(lambda: save(state, "run"), TypeError, "expected str, bytes or os.PathLike object, not TrainState")
    refused(lambda: save(tmp_path, state, keep=0), ValueError, "keep must be a whole number of at least 1, got 0")
    refused(lambda: save(tmp_path, state, step=-1), ValueError, "step must be a whole number of at least 0, got -1")
    refused(lambda: save(tmp_path, {"a": "text"}, step=1), TypeError, "arrays and numbers, got str at 'a'", "metadata=")
    refused(lambda: save(tmp_path, {"a/b": 1, "a": {"b": 2}}, step=1), ValueError, "got 'a/b' twice")
    for alone in (model, {"generator": model, "critic": model}):
        remedy = "got NNXNet without it;\npass the pair (model, optimizer), or nnx.state(...) of all NNX objects"
        refused(lambda alone=alone: save(tmp_path, alone, step=1), TypeError, remedy)
    refused(lambda: save(tmp_path, (model, state)), TypeError, "takes a jaxmp.nnx.Optimizer")
    refused(lambda: save(tmp_path / "a[1]", state), ValueError, "[ or \\ in its path", "save to another folder")
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, state, metadata={"policy": jaxmp.get_policy("float32")})
    state.params["Dense_0"]["bias"].delete()  # as a step that takes the state does
    with pytest.raises(RuntimeError, match="was donated to an earlier step"):
        save(tmp_path, state)
    assert checkpoint.list_steps(tmp_path) == []

    with pytest.raises(FileNotFoundError, match="has no complete checkpoint; pass the folder that"):
        checkpoint.restore(tmp_path, linen_run()[0])
    save(tmp_path, {"w": concrete.ones(2)}, step=5, wait=True)
    with pytest.raises(FileNotFoundError, match=r"has no complete checkpoint of step 4, only of \[5\]"):
        checkpoint.restore(tmp_path, linen_run()[0], step=4)


def test_without_orbax_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.delitem(sys.modules, "jaxmp.checkpoint.orbax_folders", raising=False)
    monkeypatch.delattr(checkpoint, "orbax_folders", raising=False)
    message = "needs Orbax, which is not installed; write pip install orbax-checkpoint"
    with pytest.raises(ModuleNotFoundError, match=message):
        checkpoint.list_steps(tmp_path)


def test_a_checkpoint_that_orbax_cannot_read_is_an_error_with_the_other_steps(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, {"w": concrete.ones(2)}, step=step)
    checkpoint.wait()
    for file in (tmp_path / "2" / "state" / "d").iterdir():
        file.write_bytes(b"")
    with pytest.raises(Exception) as error:
        checkpoint.restore(tmp_path, {"w": concrete.ones(2)})
    assert "restore an earlier one" in error.value.__notes__[-1] and "[1, 2]" in error.value.__notes__[-1]
    assert checkpoint.restore(tmp_path, {"w": concrete.zeros(2)}, step=1)["w"][0] == 1
    (tmp_path / "3").mkdir()
    with pytest.raises(FileNotFoundError, match="record/metadata"):  # another program wrote it
        checkpoint.read_metadata(tmp_path)
