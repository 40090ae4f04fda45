"""How a row of the train step benchmark is measured: energy, process, memory."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import time
import types

import jax
import pytest

from experiments.benchmarks.measure import caches, energy, power, processes, turns
from experiments.benchmarks.measure.turns import Prepared
from experiments.benchmarks.models.workloads import workload
from experiments.benchmarks.train_step import measure
from experiments.benchmarks.train_step.rows import ROWS
from experiments.report.progress import Progress
from jaxmp.inspect._profile.trace import Event


def test_a_row_is_described_by_its_kernels_and_its_energy_unless_that_takes_zero_seconds(monkeypatch):
    monkeypatch.setattr(measure.memory, "device_peak", lambda: 1)
    ends = {"nvjet": 6.0, "loop_add": 3.0}  # milliseconds of three calls
    events = [Event(name, name, "jit_step", 1, 0.0, end) for name, end in ends.items()]
    monkeypatch.setattr(measure.profiling, "of_jax", lambda turn: events)
    monkeypatch.setattr(energy.power, "monitor", lambda: contextlib.nullcontext(types.SimpleNamespace(result=reading)))
    reading = functools.partial(power.PowerReading, 2.0, 600.0, 700.0, 1200.0, 1500.0, 1980.0, {}, 60.0)
    prepared = Prepared(lambda: None, None, 1.0, 3)
    without, measured = (
        measure.describe(workload("gpt2"), ROWS["hand-bf16"], "forward", prepared, seconds) for seconds in (0.0, 1e-9)
    )
    assert (without["joules"], without["power"]) == (None, None)
    assert measured["joules"] == 1200 / energy.CALLS and measured["power"]["watts"] == 600
    assert (measured["kernel_ms"], measured["groups"]["products"]["ms"], measured["tensor_time"]) == (3, 2, 2 / 3)
    assert list(measured["seconds"]) == ["warm-up", "trace", "energy", "count of FLOPs"]


def test_each_row_is_measured_in_a_new_process_in_order(tmp_path):
    def command(body):
        return [sys.executable, "-c", f"import json, sys; sys.stdin.readline(); {body}"]

    def says(text):
        return command(f"print('noise'); print(json.dumps(dict(said={text!r})))")

    commands = {"a": says("A"), "b": command("sys.exit('no room')"), "c": says("C"), "d": says("D")}
    results = {}
    for name, measured in (rows := processes.in_processes(commands)):
        if name == "d":
            rows.close()  # the last process is not waited for, so it is killed
            break
        results[name] = measured()
    assert results == {
        "a": {"said": "A"},
        "b": {"error": "its process ended with code 1: no room"},
        "c": {"said": "C"},
    }


def test_a_process_that_hangs_is_killed_and_the_next_row_is_measured(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    program = "import sys, time; sys.stdin.readline(); time.sleep({seconds}); print('{{}}')"
    commands = {
        row: [sys.executable, "-S", "-c", program.format(seconds=seconds)] for row, seconds in (("a", 999), ("b", 0))
    }
    started = time.monotonic()
    assert [find() for _, find in processes.in_processes(commands)] == [
        {"error": "its process had not ended after 0.5 s"},
        {},
    ]
    assert time.monotonic() - started < 500


def test_a_process_measures_only_after_its_turn_has_come(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(readline=lambda: f"{os.getppid()}\n"))
    processes.answer(lambda: {"loss": float("nan"), "peak": None})
    assert json.loads(capsys.readouterr().out) == {"loss": "nan", "peak": None}


_ROW = """
import time
from experiments.benchmarks.measure import processes
print("ready", flush=True)
time.sleep(1)  # the run is killed before the row may measure
processes.answer(lambda: print("measuring", flush=True) or time.sleep(999))
"""
_RUN = """
import os, subprocess, sys
row = subprocess.Popen([sys.executable, "-c", {row!r}], stdin=subprocess.PIPE, text=True)
print(os.getpid(), file=row.stdin, flush=True)
row.wait()
"""


@pytest.mark.slow("kills a process")
def test_a_row_does_not_outlive_the_run_that_was_killed():
    program = _RUN.format(row=_ROW)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "ready\n"
        run.kill()
        started = time.monotonic()
        output = run.stdout.read()  # ends with the row too: both write to the same pipe
        assert output in ("", "measuring\n")
    assert time.monotonic() - started < 500


def test_a_row_whose_turn_never_came_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(
        ValueError, match="--alone is for the benchmark's own use: it waits for the benchmark's process"
    ):
        processes.answer(lambda: {"ms": 1})
    assert capsys.readouterr().out == ""


def test_a_row_that_fails_says_why_and_the_others_are_still_timed(monkeypatch):
    def fails():
        raise OSError("libcudart.so: cannot open")

    def prepare(case, row, which):
        return fails() if row.library == "flax" else Prepared(lambda: None, lambda: 2.5, 1.0)

    monkeypatch.setattr(measure, "prepare", prepare)
    monkeypatch.setattr("gc.collect", lambda: 0)  # a real one takes seconds
    rows = {key: ROWS[key] for key in ("jaxmp-bf16", "hand-bf16", "hand-fp32", "flax-fp16")}
    prepared, errors = measure.prepare_all(workload("gpt2"), rows, "train", Progress("rows", 4))
    assert errors == {"flax-fp16": "OSError: libcudart.so: cannot open"}
    prepared["hand-bf16"].turn = prepared["hand-fp32"].loss = fails
    figures = turns.together(prepared, rounds=2, block_ms=0.1)
    assert list(figures) == ["jaxmp-bf16", "hand-bf16", "hand-fp32"]
    assert len(figures["jaxmp-bf16"]["milliseconds"]) == 2 and figures["jaxmp-bf16"]["loss"] == 2.5
    assert figures["hand-bf16"] == figures["hand-fp32"] == {"error": "OSError: libcudart.so: cannot open"}


def test_programs_are_cached_in_a_folder_only_inside_the_context(tmp_path, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    jax.jit(lambda x: x + 1)(1.0)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    with caches.caches_in(tmp_path):
        jax.jit(lambda x: x + 2)(1.0)
    cached = set((tmp_path / "jax").iterdir())
    jax.jit(lambda x: x + 3)(1.0)
    assert cached and set((tmp_path / "jax").iterdir()) == cached
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "all"))
    with caches.caches_in(tmp_path / "one"):
        assert jax.config.jax_compilation_cache_dir is None  # another process reads the variable when it starts
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == cached


def test_a_row_that_runs_out_of_memory_says_so(monkeypatch):
    def no_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 3 bytes")

    monkeypatch.setattr(measure, "prepare", no_room)
    monkeypatch.setattr("gc.collect", lambda: 0)  # a real one takes seconds
    figures = measure.alone(workload("gpt2"), ROWS["jaxmp-bf16"], ("train", "forward"), 0.0)
    assert figures == {"train": {"error": "out of memory"}, "forward": {"error": "out of memory"}}
    rows = {"hand-fp32": ROWS["hand-fp32"]}
    prepared, errors = measure.prepare_all(workload("gpt2"), rows, "train", Progress("rows", 1))
    assert prepared == {} and errors == {"hand-fp32": "out of memory"}
    assert turns.reason(RuntimeError("no kernel\nfor that")) == "RuntimeError: no kernel"
