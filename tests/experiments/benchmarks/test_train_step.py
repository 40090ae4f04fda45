"""The train step benchmark: models, precisions, flags, runs and figures."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmark_tools import SMALL

import jaxmp
from experiments.benchmarks.measure import processes
from experiments.benchmarks.measure.turns import Prepared
from experiments.benchmarks.models.workloads import FULL, workload
from experiments.benchmarks.shared import scaled_steps
from experiments.benchmarks.train_step import jax_steps, measure, report
from experiments.benchmarks.train_step import run as train_step
from experiments.benchmarks.train_step.rows import ROWS

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


# The models.

# The rows.


@pytest.mark.parametrize(
    ("key", "dtype"), [("jaxmp-bf16-remat", "bfloat16"), ("unprepared-bf16", "bfloat16"), ("jaxmp-fp16", "float16")]
)
def test_a_row_multiplies_in_the_precision_of_its_name(key, dtype):
    case = workload("gpt2", SMALL["gpt2"])
    start, step = jax_steps.train_step(case, ROWS[key])
    assert set(jaxmp.inspect.audit(step, compile=False)(jax.eval_shape(start), case.batch).flops) == {dtype}


def test_the_constant_scale_is_the_first_of_the_dynamic_scale_with_finite_gradients():
    def loss_fn(params, model_state, batch, rng):
        return jnp.mean((batch @ params).astype(jnp.float16)).astype(jnp.float32), model_state

    assert jaxmp.DynamicLossScale().loss_scale == scaled_steps.INITIAL_SCALE
    args = loss_fn, optax.sgd(1e-10), lambda key: (jnp.ones(3), None)
    batch = np.full((1, 3), 16, np.float32)  # the scaled gradients are 16 times the scale, cast to float16
    half = jax.jit(lambda state, batch: step(state, batch.astype(jnp.float16)))

    def with_half_gradients(params, model_state, batch, rng):
        return loss_fn(params.astype(jnp.float16), model_state, batch, rng)

    start, step = scaled_steps.with_constant_scale(with_half_gradients, *args[1:])
    *_, scale = scaled_steps.settled(start, half, batch)
    dynamic_start, dynamic_step = scaled_steps.with_jaxmp(with_half_gradients, *args[1:])
    state = dynamic_start()
    for _ in range(5):
        state, _ = dynamic_step(state, batch.astype(np.float16))
    assert scale == jaxmp.get_loss_scale(state[1]).loss_scale == 2**11
    with pytest.raises(FloatingPointError, match="even without a scale"):
        scaled_steps.settled(start, half, np.full((1, 3), np.inf, np.float32))


# Runs. Compiling is replaced, and the timed steps do nothing.


@pytest.fixture
def quick(monkeypatch):
    """Replace the steps by empty ones, and return the rows that were prepared."""
    prepared = []

    def prepare(case, row):
        prepared.append(row.label)
        if row.precision == "tf32" and len(prepared) < 3:
            raise RuntimeError("no such kernel")
        return Prepared(lambda: None, lambda: 2.5, 1.5, 2**20)

    monkeypatch.setattr(measure, "prepare", prepare)
    monkeypatch.setattr(train_step, "SMOKE", SMALL)
    monkeypatch.setattr(report.plots, "panels", lambda *_: None)
    return prepared


def test_a_run_writes_its_table_continues_and_tries_failed_rows_again(quick, tmp_path, capsys):
    config = train_step.Config(smoke=True, models=("gpt2",), rows=("hand-bf16", "hand-tf32"), run_dir=tmp_path)
    with pytest.raises(SystemExit, match="1"):  # a smoke test
        train_step.main(config)
    assert "every row must run, but hand-tf32 did not" in capsys.readouterr().err
    assert "RuntimeError: no such kernel" in (tmp_path / "train_step.md").read_text()
    results = train_step.main(config)["gpt2"]
    assert results.failed() == [] and results.figures("hand-tf32")["compiled_bytes"] == 2**20
    assert results.ratio("hand-bf16", "hand-tf32") is not None
    before = len(quick)
    train_step.main(dataclasses.replace(config, report_only=True))
    train_step.main(config)
    assert len(quick) == before
    with pytest.raises(SystemExit, match="2"):
        train_step.main(dataclasses.replace(config, rounds=3))
    assert "rounds is 20 there and 3 here" in capsys.readouterr().err


def test_each_row_is_measured_in_a_new_process_and_one_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.5)
    program = "import json, sys, time; sys.stdin.readline(); {}; print('noise'); print(json.dumps(dict(said='A')))"
    bodies = {"a": "pass", "b": "sys.exit('no room')", "c": "time.sleep(999)", "d": "pass"}
    commands = {row: [sys.executable, "-S", "-c", program.format(body)] for row, body in bodies.items()}
    results = {row: find() for row, find in processes.in_processes(commands)}
    assert results["a"] == results["d"] == {"said": "A"}
    assert results["b"] == {"error": "its process ended with code 1: no room"}
    assert results["c"] == {"error": "its process had not ended after 0.5 s"}


# Figures.


def results_of(**rows):
    """Return results of GPT-2 with the milliseconds and MiB of each row."""
    about = {"model": "gpt2", "text": "GPT-2", "sizes": dataclasses.asdict(FULL["gpt2"]), "items": 1000,
             "unit": "tokens", "setting": {"smoke": False}}  # fmt: skip
    rows = {name.replace("_", "-"): value for name, value in rows.items()}
    turns = {name: {"milliseconds": [ms, ms, ms]} for name, (ms, _) in rows.items()}
    alone = {name: {"peak": mib * 2**20} for name, (_, mib) in rows.items()}
    return report.Results(about, alone, [turns])


def test_rows_are_not_judged_if_their_loss_moved_or_is_not_near_the_others():
    results = results_of(jaxmp_bf16=(30, 70), jaxmp_fp16=(31, 70), hand_bf16=(32, 70), compile_bf16=(33, 100))
    losses = {"jaxmp-bf16": (10.8, 10.7), "jaxmp-fp16": (10.8, 9.0), "hand-bf16": (3.0, 3.0), "compile-bf16": (11, 11)}
    for row, (before, after) in losses.items():
        results.turns[0][row] |= {"loss_before": before, "loss": after}
    errors = {row: results.figures(row).get("error") for row in losses}
    assert errors == {
        "jaxmp-bf16": None,
        "jaxmp-fp16": "not judged: its loss moved from 10.8 to 9 while it was timed",
        "hand-bf16": "not judged: its loss is 3, and that of the other rows is 10.7",
        "compile-bf16": None,
    }
    assert results.ratio("jaxmp-bf16", "compile-bf16") is not None
    assert results.ratio("jaxmp-fp16", "compile-bf16") is None
    results.turns[0]["compile-bf16"]["loss"] = "nan"  # nan is a string in JSON
    assert results.memory("compile-bf16") is None


def test_the_table_has_times_memory_and_joules_and_why_a_row_failed():
    results = results_of(jaxmp_bf16=(30, 70), hand_fp32=(300, 400))
    del results.turns[0]["hand-fp32"]
    results.alone["hand-fp32"] = {"error": "out of memory"}
    results.alone["jaxmp-bf16"] |= {"joules": 25.71, "compiled_bytes": 2**21}
    ours, failed = report.table(results).rows
    assert failed == ("JAX by hand, fp32", "out of memory")
    assert dict(zip(report.COLUMNS, ours, strict=True)) | {"/ torch.compile": ""} == {
        "row": "jaxmp, bf16", "ms": "30", "quartiles": "30 to 30", "/ torch.compile": "", "{unit}/s": "33,333",
        "peak MiB": "70.0", "program MiB": "2.0", "J per call": "25.7", "loss": "", "compile s": "",
    }  # fmt: skip
    results.turns.append({"jaxmp-bf16": {"milliseconds": [20, 20, 20]}})
    assert results.figures("jaxmp-bf16")["ms"] == (20, 20, 20)
