"""The search for the largest batch, from the memory of compiled steps."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from experiments import image_classification, language_modeling, masked_lm
from experiments.training import batch_size, cli
from experiments.training.batch_size import largest_batch
from experiments.training.experiment import Experiment

MiB = 2**20


def affine(base: float, slope: float):
    return lambda batch: int(base + slope * batch)


def bent(batch: int) -> int:
    """Return bytes on a line that is steeper from a batch of 100 on.

    A batch of one needs more than the line says.
    """
    return 500 + 90 * batch + (4000 if batch == 1 else 0) + 40 * max(0, batch - 100)


def stairs(batch: int) -> int:
    """Return bytes rounded up to pages, as allocators do."""
    return -(-(1000 + 37 * batch) // 512) * 512


@pytest.mark.parametrize(("least", "multiple", "limit"), [(3, 8, 100_000), (1, 1, 10_000)])
def test_the_largest_batch_that_fits_is_found_in_five_compilations(least, multiple, limit):
    step = math.lcm(least, multiple)
    sizes = [*range(least, step, least), *range(step, limit, step)]
    for needs in (affine(1000, 30), affine(0, 7), affine(9000, 200), bent, stairs):
        compiled = []

        def counted(batch: int, needs=needs, compiled=compiled) -> int:
            compiled.append(batch)
            return needs(batch)

        largest = largest_batch(counted, limit, least=least, multiple=multiple)
        best = max(size for size in sizes if needs(size) <= limit)
        assert len(compiled) == len(set(compiled)) <= 5
        assert largest[:3] == (largest.batch, needs(largest.batch), limit) and largest.bytes <= limit
        assert largest.batch in sizes
        assert largest.batch == best if needs not in (bent, stairs) else largest.batch >= 0.85 * best


def test_a_step_without_room_to_be_compiled_is_halved_and_not_taken_for_a_point_of_the_line():
    for room in [5, 100, 300, 479]:
        needs = affine(1000, 30)
        compiled = []

        def counted(batch, room=room, compiled=compiled, needs=needs):
            compiled.append(batch)
            return needs(batch) if batch <= room else batch_size.NO_ROOM

        largest = largest_batch(counted, 16_000)
        assert largest.batch >= 0.85 * (room if room < 8 else room // 8 * 8) and largest.bytes == needs(largest.batch)
        assert len(compiled) == len(set(compiled)) <= 12
        too_large = min(batch for batch in compiled if batch > room)
        assert str(largest).endswith(f"({too_large} would need more than there is)")


def test_a_batch_is_at_most_the_largest_useful_one_and_the_result_is_printed():
    assert largest_batch(affine(0, 1), 10**9, most=100).batch == 96
    assert largest_batch(affine(0, 1), 10**9, most=5).batch == 5
    assert largest_batch(affine(7, 0), 10**9, most=64).batch in (16, 32, 64)

    largest = largest_batch(affine(0, 10**7), 2 * 10**9)
    assert str(largest) == "200, whose step needs 2.00 GB of 2.00 GB (208 would need 2.08 GB)"
    tried = {1: 10, 1000: 10**10, 200: 3 * 10**9}
    # The smallest batch that does not fit, not the first in the dict.
    assert str(largest._replace(tried=tried)).endswith("(200 would need 3.00 GB)")


def test_bytes_are_read_with_their_unit_or_an_error():
    for text, size in [
        ("2GB", 2 * 10**9),
        ("512MiB", 512 * MiB),
        ("1.5 gib", 1.5 * 2**30),
        ("4096", 4096),
        ("10k", 10**4),
        ("7b", 7),
    ]:
        assert batch_size.read_bytes(text) == size

    for text in ["", "GB", "2 pounds", "-1GB", "0", "1.2.3", "i", "2ib"]:
        with pytest.raises(
            ValueError, match=r"--memory-limit is a number of bytes, got .*; write 20GB or 512MiB, for example"
        ):
            batch_size.read_bytes(text)


def test_the_free_memory_is_that_of_the_device_or_of_the_host(monkeypatch):
    host = batch_size.free_bytes()
    assert 10 * MiB < host < 2**50
    device = type("Device", (), {"memory_stats": lambda self: {"bytes_limit": 1000, "bytes_in_use": 200}})()
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert batch_size.free_bytes() == 720


def test_a_script_reads_a_number_or_auto(capsys):
    for script in [image_classification, language_modeling, masked_lm]:
        for text, value in (("auto", "auto"), ("24", 24)):
            for flag in ("--batch-size", "--batch"):
                assert cli.parse(script.Config, "", [flag, text]).batch_size == value
        with pytest.raises(SystemExit):
            cli.parse(script.Config, "", ["--batch-size", "automatic"])
        assert "--batch-size" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(cli.Training):
    """A linear model of 64 inputs. A batch of n has 256 n bytes."""

    batch_size: cli.BatchSize = "auto"


def prepare(config: Config) -> Experiment:
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch["x"] @ params) ** 2), model_state

    return Experiment(
        loss_fn=loss_fn,
        step=jaxmp.make_train_step(loss_fn, accumulate_steps=config.accumulate),
        eval_step=jaxmp.make_eval_step(loss_fn),
        init_params=lambda seed: jnp.zeros(64),
        create=lambda params: jaxmp.TrainState.create(params=params, tx=optax.sgd(0.1)),
        train_batches=lambda seed, start=0: iter([{"x": jnp.zeros((config.batch_size, 64))}]),
        test_batches=list,
        steps=1,
        batch_size=config.batch_size,
        precision={},
    )


def test_the_step_of_the_batch_that_is_found_fits_and_that_of_the_next_does_not(capsys):
    config = batch_size.settled("line", Config(memory_limit="1MB", accumulate=2), prepare, lambda _: 2**20)
    chosen = config.batch_size
    assert chosen % 8 == 0
    assert f"--batch-size auto: {chosen}, whose step needs " in capsys.readouterr().out
    experiment = prepare(config)
    assert batch_size.step_bytes(experiment, chosen) <= 10**6 < batch_size.step_bytes(experiment, chosen + 8)


@dataclasses.dataclass(frozen=True)
class Bare:
    """The flags of a script without a batch size."""


def test_a_script_has_most_of_a_gpu_and_without_room_names_flags_that_it_has(monkeypatch, capsys):
    for config, message in [
        (Config, r"out of memory; use a smaller --batch-size, --accumulate or --remat layers \(RESOURCE_.*\)"),
        (Bare, r"out of memory \(RESOURCE_EXHAUSTED: 3\)"),
    ]:
        monkeypatch.setattr(sys, "argv", ["script"])
        monkeypatch.setattr(cli, "plain_warnings", lambda: None)
        monkeypatch.setattr(cli, "plain_threads", lambda: None)
        monkeypatch.setattr(cli, "keep_freed_memory", lambda: None)
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)

        def train(config):
            assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.95"
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3\nand more")

        with pytest.raises(SystemExit):
            cli.main(config, train, "")
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
        assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err)


def test_a_resumed_run_keeps_the_batch_that_it_began_with(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"batch_size": 40}}))
    resumed = batch_size.settled("line", Config(run_dir=tmp_path, resume=True), pytest.fail, pytest.fail)
    assert resumed == Config(run_dir=tmp_path, resume=True, batch_size=40)


def test_a_limit_that_is_too_small_or_for_a_given_batch_size_is_an_error():
    remedies = r"recompute more \(--remat layers\), use a half-precision policy, .*, or raise --memory"
    message = rf"a batch of 4 must fit in memory, but its step needs 3.00 GB of 2.00 GB; {remedies}"
    with pytest.raises(ValueError, match=message):
        largest_batch(affine(10**9, 5 * 10**8), 2 * 10**9, least=4)

    with pytest.raises(ValueError, match="--memory-limit is for --batch-size auto, got --batch-size 8"):
        batch_size.settled("line", Config(batch_size=8, memory_limit="1MB"), pytest.fail, pytest.fail)

    with pytest.raises(ValueError, match="a batch of 3 must fit in memory, but its step needs"):
        batch_size.settled("line", Config(memory_limit="1kB", accumulate=3), prepare, lambda _: 2**20)
