"""The flag --batch-size auto: the largest batch whose compiled step fits into memory."""

from __future__ import annotations

import dataclasses
import json
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
from experiments.training.experiment import Experiment

MiB = 2**20


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


def bytes_of_step(config: Config) -> int:
    experiment = prepare(config)
    state = jax.eval_shape(experiment.init, 0)
    return jaxmp.inspect.memory(experiment.step)(state, next(experiment.train_batches(0))).peak


def test_the_step_of_the_batch_that_is_found_fits_and_that_of_the_next_does_not(capsys):
    config = batch_size.settled("line", Config(memory_limit="1MB", accumulate=2), prepare, lambda _: 2**20)
    chosen = config.batch_size
    assert chosen % 8 == 0
    assert f"--batch-size auto: {chosen}, the largest batch whose step fits into 977 KiB" in capsys.readouterr().out
    assert bytes_of_step(config) <= 10**6 < bytes_of_step(dataclasses.replace(config, batch_size=chosen + 8))


@pytest.mark.parametrize(("accumulate", "most", "batch"), [(1, 100, 96), (3, 100, 96), (1, 5, 5), (3, 5, 3)])
def test_the_batch_is_at_most_the_largest_useful_one(accumulate, most, batch):
    config = Config(memory_limit="1GB", accumulate=accumulate)
    assert batch_size.settled("line", config, prepare, lambda _: most).batch_size == batch


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
    with pytest.raises(ValueError, match="--memory-limit is for --batch-size auto, got --batch-size 8"):
        batch_size.settled("line", Config(batch_size=8, memory_limit="1MB"), pytest.fail, pytest.fail)

    message = (
        r"a batch of 3 must fit into 1000 B, but its step needs more; recompute more \(--remat layers\), use a half"
    )
    with pytest.raises(ValueError, match=message):
        batch_size.settled("line", Config(memory_limit="1kB", accumulate=3), prepare, lambda _: 2**20)
