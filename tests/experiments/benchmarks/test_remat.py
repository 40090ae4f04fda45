"""The remat benchmark: in pieces, its tables and goals, the largest batch, and what it says when it cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks.remat import report as remat_report
from experiments.benchmarks.remat import run as remat
from experiments.benchmarks.shared import targets
from experiments.benchmarks.shared.workloads import FULL
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Prepared
from experiments.measure.memory import NO_ROOM
from experiments.training.runs import write_json


@pytest.fixture
def steps(monkeypatch):
    """Train steps in place of the models', whose temporaries grow with the batch; returns those asked for."""
    asked = []
    monkeypatch.setattr(remat_report, "picture", lambda *_: None)

    def train_step(case, row):
        asked.append((case.name, row.precision, row.remat, row.scaled, case.sizes.batch_size))

        def step(state, batch):
            x = batch["inputs"].astype(jnp.float32) * state
            if row.remat == "none":  # as large as the batch, and needed whole
                x = jnp.sort(jnp.tile(x, (1, 8)), axis=0)
            return state + x.mean(), x.sum()

        return lambda: jnp.float32(1), step

    monkeypatch.setattr(jax_steps, "train_step", train_step)
    return asked


@pytest.fixture
def quick(monkeypatch):
    """Steps that do nothing, of 1 kB a sequence: nothing is compiled."""
    monkeypatch.setattr(remat_report, "picture", lambda *_: None)
    monkeypatch.setattr("gc.collect", lambda: 0)  # seconds each beside the other tests
    monkeypatch.setattr(remat.measure, "prepare", lambda *_: Prepared(lambda: None, None, 0.0, 2**20))
    monkeypatch.setattr(remat, "step_bytes", lambda step, device, batch=0: 1000 * (batch or 2))


def smoke(folder, **changes):
    flags = {"models": ("gpt2",), "policies": ("mixed_float16",), "remats": ("none", "attention"), "smoke": True}
    return remat.Config(**{**flags, "run_dir": folder, **changes})


def test_every_kind_has_memory_and_times_in_turn_and_the_report_says_where(steps, tmp_path, capsys):
    result = remat.main(smoke(tmp_path))
    (group,) = result["groups"]
    assert list(group["rows"]) == ["none", "attention"] and group["policy"] == "mixed_float16"
    assert {asked[:4] for asked in steps} == {("gpt2", "fp16", kind, True) for kind in group["rows"]}
    for row in group["rows"].values():
        assert len(row["milliseconds"]) == 2 and row["step_bytes"] > 0 and "largest" not in row
    assert group["rows"]["none"]["ratio"] == (1.0, 1.0, 1.0)
    assert group["rows"]["attention"]["step_bytes"] < group["rows"]["none"]["step_bytes"]
    text, printed = (tmp_path / "remat.md").read_text(), capsys.readouterr().out
    for name in ("device", "versions", "date", "command"):
        assert f"- {name}: {result['environment'][name]}" in text and f"- {name}: " in printed
    assert "SMOKE TEST, no result: GPT-2, 1 layers of 64, 2×32, mixed_float16" in text
    assert not group["goals"]  # its times mean nothing


def test_the_largest_batch_is_the_last_that_needs_no_more_than_the_limit(steps, tmp_path):
    config = smoke(tmp_path, remats=("none",), memory_limit="300KB")
    largest = remat.main(config)["groups"][0]["rows"]["none"]["largest"]
    step = remat.Step("gpt2", "mixed_float16", "none", config)
    assert largest["limit"] == 300_000 and largest["batch"] % 8 == 0
    assert remat.step_bytes(step, None, largest["batch"]) == largest["bytes"] <= 300_000
    assert remat.step_bytes(step, None, largest["batch"] + 8) > 300_000
    assert f"| {largest['batch']} |" in (tmp_path / "remat.md").read_text()


def test_a_limit_that_nothing_fits_in_is_said_below_the_table(steps, tmp_path):
    remat.main(smoke(tmp_path, memory_limit="100"))
    assert "a batch of 1 must fit in memory, but its step needs" in (tmp_path / "remat.md").read_text()


def test_the_same_command_goes_on_and_measures_nothing_twice(steps, tmp_path, monkeypatch, capsys):
    assert remat.main(smoke(tmp_path, minutes=1e-9)) == {}
    assert "not all is measured: the same command goes on from here" in capsys.readouterr().out
    remat.main(smoke(tmp_path, remats=("none",)))
    with monkeypatch.context() as patched:
        measured = []
        alone = remat.measure_alone
        patched.setattr(remat, "measure_alone", lambda step, device: measured.append(step.name) or alone(step, device))
        whole = remat.main(smoke(tmp_path))
    assert measured == ["gpt2/mixed_float16/attention"]
    steps.clear()
    assert remat.main(smoke(tmp_path)) == whole and not steps
    assert whole["groups"][0]["rows"]["attention"]["ratio"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch_size": 4}, "sizes is {'batch_size': 2, .* there and {'batch_size': 4, "),
        ({"memory_limit": "2GB"}, "memory_limit is the device's there and 2GB here"),
        ({"rounds": 3}, "rounds is 20 there and 3 here"),
        ({"block_ms": 1.0}, "block_ms is 200.0 there and 1.0 here"),
        ({"policies": ("mixed_bfloat16",), "rounds": 3}, "rounds is 20 there and 3 here"),  # of the same model
    ],
)
def test_a_folder_is_gone_on_with_in_the_same_setting_only(quick, tmp_path, capsys, changes, text):
    remat.main(smoke(tmp_path, remats=("none",)))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        remat.main(smoke(tmp_path, **changes))
    said = capsys.readouterr().err
    assert re.search(rf"/gpt2-.*json {text}.*; take the device, .* or another --run-dir", said)
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["device", "versions", "target"])
def test_a_folder_is_of_one_device_or_target_and_of_the_same_versions(quick, tmp_path, monkeypatch, capsys, name):
    remat.main(smoke(tmp_path, remats=("none",)))
    environment = remat.environment
    monkeypatch.setattr(remat, "environment", lambda: {**environment(), name: "another"})
    with pytest.raises(SystemExit):
        remat.main(smoke(tmp_path))
    assert re.search(f"{name} is .* there and another here", capsys.readouterr().err)


def test_what_failed_or_was_not_looked_for_is_measured_anew_and_what_is_new_goes_first(quick, tmp_path, monkeypatch):
    measured, finds = [], {"none": {"error": "its process ended with code 1: no word on stderr"}}
    alone = remat.measure_alone

    def spy(step, device):
        measured.append(step.remat)
        return finds.get(step.remat) or alone(step, device)

    monkeypatch.setattr(remat, "measure_alone", spy)
    config = smoke(tmp_path, memory_limit="300KB", no_largest=True)
    (group,) = remat.main(config)["groups"]
    assert "ms" not in group["rows"]["none"] and group["rows"]["none"]["error"].endswith("no word on stderr")
    assert "largest" not in group["rows"]["attention"] and measured == ["none", "attention"]
    finds.clear()
    (group,) = remat.main(dataclasses.replace(config, remats=("none", "attention", "dots")))["groups"]
    assert measured[2:] == ["dots", "none"]
    assert group["rows"]["none"]["ms"] and "error" not in group["rows"]["none"]
    (group,) = remat.main(dataclasses.replace(config, no_largest=False))["groups"]
    assert measured[4:] == ["none", "attention"] and group["rows"]["attention"]["largest"]["batch"] == 296
    remat.main(dataclasses.replace(config, no_largest=False))
    assert len(measured) == 6


LARGEST = {"batch": 296, "bytes": 9, "limit": 10}


def test_what_is_measured_anew_keeps_what_the_folder_had_of_it(quick, tmp_path, monkeypatch):
    finds = [
        {"step_bytes": None, "peak": None, "largest": LARGEST, "error": "out of memory"},
        {"step_bytes": 5, "peak": None, "largest": None},
    ]
    monkeypatch.setattr(remat, "measure_alone", lambda *_: finds.pop(0))
    config = smoke(tmp_path, remats=("none",))
    remat.main(config)
    remat.main(dataclasses.replace(config, no_largest=True))
    found = json.loads((tmp_path / "gpt2-mixed_float16-none.json").read_text())
    assert (found["step_bytes"], found["largest"]) == (5, LARGEST) and "error" not in found


@pytest.mark.parametrize(("why", "again"), [("RuntimeError: no kernel", True), ("out of memory", False)])
def test_steps_that_failed_in_turn_are_tried_again_unless_there_is_no_memory(quick, tmp_path, why, again):
    remat.main(smoke(tmp_path, remats=("none",)))
    (file,) = tmp_path.glob("*-times.json")
    write_json(file, {**json.loads(file.read_text()), "times": {}, "errors": {"none": why}})
    (group,) = remat.main(smoke(tmp_path, remats=("none",)))["groups"]
    assert ("ms" in group["rows"]["none"]) == again and ("error" in group["rows"]["none"]) != again


def test_a_second_try_loses_no_times_of_the_first(quick, tmp_path, monkeypatch):
    fails, together = ["attention"], remat.measure.together
    monkeypatch.setattr(
        remat.measure,
        "together",
        lambda *args: {k: {"error": "OSError: gone"} if k in fails else row for k, row in together(*args).items()},
    )
    remat.main(smoke(tmp_path))
    fails[:] = ["none"]
    (group,) = remat.main(smoke(tmp_path))["groups"]
    assert group["rows"]["none"]["ms"] and group["rows"]["attention"]["ms"]


def test_a_step_that_fails_in_its_turn_says_why_beside_the_others(quick, tmp_path, monkeypatch):
    together = remat.measure.together
    monkeypatch.setattr(
        remat.measure, "together", lambda *args: {**together(*args), "attention": {"error": "RuntimeError: no kernel"}}
    )
    (group,) = remat.main(smoke(tmp_path))["groups"]
    assert group["rows"]["attention"]["error"] == "RuntimeError: no kernel" and group["rows"]["none"]["ms"]


class Compiles:
    """A step in place of a jitted one, whose compiler says ``needs(batch)`` bytes, or raises it; None says nothing."""

    def __init__(self, needs):
        self._needs = needs

    def lower(self, state, batch):
        self._found = self._needs(jax.tree.leaves(batch)[0].shape[0])
        return self

    def compile(self, options=None):
        if isinstance(self._found, Exception):
            raise self._found
        return self

    def memory_analysis(self):
        if self._found is None:
            return None
        sizes = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
        return types.SimpleNamespace(**dict.fromkeys(sizes, 0) | {"temp_size_in_bytes": self._found})


NO_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")


@pytest.fixture
def compiler(steps, monkeypatch):
    """Puts a compiler in place of XLA that needs so much for a batch."""
    monkeypatch.setattr(remat.measure, "prepare", lambda *_: Prepared(lambda: None, None, 0.0, None))
    return lambda needs: monkeypatch.setattr(remat.jax, "jit", lambda *_, **__: Compiles(needs))


def test_a_batch_that_had_no_room_to_be_compiled_is_too_large_and_the_search_goes_on(compiler, tmp_path):
    step = remat.Step("gpt2", "mixed_bfloat16", "none", smoke(tmp_path, memory_limit="9000"))
    compiler(lambda batch: NO_MEMORY if batch > 480 else 10 * batch)
    assert remat.step_bytes(step, None, 481) == NO_ROOM and remat.step_bytes(step, None, 480) == 4800
    largest = remat.measure_alone(step, None)["largest"]
    assert 240 < largest["batch"] <= 480 and largest["bytes"] == 10 * largest["batch"]


def test_a_compiler_that_breaks_or_says_nothing_is_told_in_words_and_ends_nothing(compiler, tmp_path):
    step = remat.Step("gpt2", "mixed_bfloat16", "none", smoke(tmp_path, memory_limit="9000"))
    for needed, text in (
        (None, "the compiler must tell how much memory a step takes, but this device's says nothing; name a batch"),
        (jax.errors.JaxRuntimeError("INTERNAL: ptxas died"), "JaxRuntimeError: INTERNAL: ptxas died"),
    ):
        compiler(lambda batch, needed=needed: needed)
        assert remat.measure_alone(step, None)["largest"]["error"].startswith(text)


def test_a_step_that_had_no_room_to_be_compiled_for_a_target_is_no_number(quick, monkeypatch):
    monkeypatch.setattr(remat, "step_bytes", lambda *_: NO_ROOM)
    config = remat.Config(target="h200", no_largest=True)
    found = remat.measure_alone(remat.Step("gpt2", "mixed_bfloat16", "none", config), None)
    assert found["step_bytes"] is None and found["error"] == "out of memory"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"smoke": False}, "this benchmark measures a GPU, but JAX finds only cpu"),
        ({"rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"remats": ()}, "the number of --remats must be at least 1, got 0"),
        ({"memory_limit": "much"}, "--memory-limit is a number of bytes, got 'much'"),
        ({"block_ms": 0.0}, "--block-ms must be at least 0.1, got 0"),
        ({"alone": "gpt2"}, "--alone is one of gpt2/mixed_bfloat16/none, gpt2/mixed_bfloat16/attention, "),
    ],
)
def test_what_cannot_be_ends_it_with_one_line(tmp_path, capsys, changes, text):
    with pytest.raises(SystemExit) as stopped:
        remat.main(smoke(tmp_path, **changes))
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and text in said


def test_what_is_compiled_names_its_target_wherever_it_was_compiled(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "device_of", lambda _: types.SimpleNamespace(device_kind="NVIDIA H200"))
    config = smoke(tmp_path, target="h200", smoke=False, no_largest=True, remats=("none",))
    result = remat.main(config)
    (group,) = result["groups"]
    assert result["environment"]["target"] == group["setting"]["target"] == "NVIDIA H200"
    assert "cpu" in result["environment"]["device"] and "device" not in group["setting"]
    assert "- target: NVIDIA H200\n- device: " in (tmp_path / "remat.md").read_text()


@pytest.mark.parametrize(("name", "platforms"), [("remat", "before"), ("__main__", "cpu")])
def test_only_the_command_itself_keeps_jax_off_the_gpu(monkeypatch, name, platforms):
    monkeypatch.setenv("JAX_PLATFORMS", "before")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", ["remat.py", "--target=h200"])
    monkeypatch.setattr("experiments.training.cli.main", lambda *_: None)
    if name == "__main__":
        runpy.run_module("experiments.benchmarks.remat", run_name=name)
    else:
        runpy.run_path(remat.__file__, run_name=name)
    assert os.environ["JAX_PLATFORMS"] == platforms


def test_compiling_for_a_gpu_without_its_packages_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(targets, "PLUGINS", ("no_such_plugin",))
    with pytest.raises(SystemExit):
        remat.main(smoke(tmp_path, target="h200", smoke=False))
    assert "needs its CUDA plugin, which is not installed: pip install" in capsys.readouterr().err


def test_the_steps_are_those_of_the_train_step_benchmark():
    config = remat.Config(policies=("mixed_bfloat16", "mixed_float16", "tensorfloat32", "float32"))
    found = remat.steps_of(config)
    assert len(found) == 32 and found[0].name == "gpt2/mixed_bfloat16/none"
    assert {(step.policy, step.row.precision, step.row.scaled) for step in found} == {
        ("mixed_bfloat16", "bf16", False),
        ("mixed_float16", "fp16", True),
        ("tensorfloat32", "tf32", False),
        ("float32", "fp32", False),
    }
    assert found[0].case().sizes == FULL["gpt2"] and found[0].case(3).sizes.batch_size == 3
    assert jax.tree.leaves(found[0].case(3).batch)[0].shape == (3, 1024)


def test_the_limit_of_a_gpu_that_is_not_there_is_what_its_own_scripts_would_have():
    limit = remat.limit_of(remat.Config(target="h200"))
    assert limit == int(0.9 * 0.95 * targets.TARGETS["h200"].memory_bytes)
