"""The remat benchmark: runs in pieces, tables, the largest batch, and errors."""

from __future__ import annotations

import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from experiments.benchmarks import remat
from experiments.benchmarks.models.workloads import FULL, SMOKE, workload
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import Row
from jaxmp.inspect.compiled import gpu_targets

CASE, ROW = workload("gpt2", SMOKE["gpt2"]), Row("none", "jaxmp", "bf16")


@pytest.fixture
def steps(monkeypatch):
    """Replace the train steps by small ones; return the requests for them.

    The temporaries of the small steps grow with the batch.
    """
    requests = []

    def train_step(case, row):
        requests.append((case.name, row.precision, row.remat, row.scaled, case.sizes.batch_size))

        def step(state, batch):
            x = batch["inputs"].astype(jnp.float32) * state
            if row.remat == "none":  # as large as the batch, and needed at once
                x = jnp.sort(jnp.tile(x, (1, 8)), axis=0)
            return state + x.mean(), x.sum()

        return lambda: jnp.float32(1), step

    monkeypatch.setattr(jax_steps, "train_step", train_step)
    monkeypatch.setattr(remat.plots, "panels", lambda *_: None)
    return requests


@pytest.fixture
def quick(monkeypatch):
    """Make steps need 1 kB per sequence, without compiling."""
    monkeypatch.setattr(remat, "step_bytes", lambda case, row, device=None: 1000 * case.sizes.batch_size)
    monkeypatch.setattr(remat, "largest_batch", lambda case, row, device, limit: limit // 1000)
    monkeypatch.setattr(remat.plots, "panels", lambda *_: None)


def smoke(folder, **changes):
    flags = {"models": ("gpt2",), "policies": ("mixed_float16",), "remats": ("none", "attention"), "smoke": True}
    return remat.Config(**{**flags, "run_dir": folder, **changes})


def test_every_kind_of_remat_has_its_memory_and_the_report_has_the_device(steps, tmp_path):
    (group,) = remat.main(smoke(tmp_path))
    assert list(group["rows"]) == ["none", "attention"] and group["policy"] == "mixed_float16"
    assert steps == [("gpt2", "fp16", kind, True, 2) for kind in group["rows"]]
    assert 0 < group["rows"]["attention"]["step_bytes"] < group["rows"]["none"]["step_bytes"]
    assert "largest" not in group["rows"]["none"]
    result, text = json.loads((tmp_path / "remat.json").read_text()), (tmp_path / "remat.md").read_text()
    for name in ("device", "versions", "date", "command"):
        assert f"- {name}: {result['environment'][name]}" in text
    assert "SMOKE TEST, no result: GPT-2, 2 layers of 64, 2×32, mixed_float16" in text
    assert result["groups"] == [group]


def test_the_largest_batch_is_the_last_that_fits_within_the_limit(steps, tmp_path):
    (group,) = remat.main(smoke(tmp_path, remats=("none",), memory_limit="300KB"))
    largest = group["rows"]["none"]["largest"]
    assert largest["limit"] == 300_000 and largest["batch"] % 8 == 0
    sized = [workload("gpt2", SMOKE["gpt2"], batch_size=largest["batch"] + more) for more in (0, 8)]
    assert remat.step_bytes(sized[0], ROW) <= 300_000 < remat.step_bytes(sized[1], ROW)
    assert f"| {largest['batch']} |" in (tmp_path / "remat.md").read_text()
    remat.main(smoke(tmp_path / "less", remats=("none",), memory_limit="100"))
    assert "nothing fits" in (tmp_path / "less" / "remat.md").read_text()


def test_the_same_command_continues_and_compiles_nothing_twice(steps, tmp_path, capsys):
    assert remat.main(smoke(tmp_path, minutes=1e-9)) == [] and not steps
    assert "not everything is measured: the same command continues from here" in capsys.readouterr().out
    remat.main(smoke(tmp_path, remats=("none",)))
    groups = remat.main(smoke(tmp_path))
    assert [request[2] for request in steps] == ["none", "attention"]
    assert remat.main(smoke(tmp_path)) == groups and len(steps) == 2


def test_a_run_continues_only_with_the_same_setting(quick, tmp_path, monkeypatch, capsys):
    remat.main(smoke(tmp_path, remats=("none",)))
    capsys.readouterr()
    for changes, text in (
        ({"batch_size": 4}, "sizes is {'batch_size': 2, .* there and {'batch_size': 4, "),
        ({"memory_limit": "2GB"}, "memory_limit is the device's there and 2GB here"),
        ({"policies": ("mixed_bfloat16",), "layers": 1}, "sizes is .* there and "),  # for the same model
    ):
        with pytest.raises(SystemExit):
            remat.main(smoke(tmp_path, **changes))
        said = capsys.readouterr().err
        assert re.search(rf"/gpt2-.*json {text}.*; use the device, .* or another --run-dir", said)
        assert said.count("\n") == 1
    environment = remat.environment
    for name in ("device", "target"):
        monkeypatch.setattr(remat, "environment", lambda name=name, **_: {**environment(), name: "another"})
        with pytest.raises(SystemExit):
            remat.main(smoke(tmp_path))
        assert re.search(f"{name} is .* there and another here", capsys.readouterr().err)


def test_failed_rows_are_compiled_again(quick, tmp_path, monkeypatch):
    finds = [{"error": "JaxRuntimeError: INTERNAL"}, {"step_bytes": 2**20}]
    monkeypatch.setattr(remat, "measure", lambda *_: finds.pop(0))
    config = smoke(tmp_path, remats=("none",))
    assert remat.main(config)[0]["rows"]["none"] == {"error": "JaxRuntimeError: INTERNAL"}
    assert "| none | JaxRuntimeError: INTERNAL |" in (tmp_path / "remat.md").read_text()
    assert remat.main(config)[0]["rows"]["none"] == {"step_bytes": 2**20} and not finds


NO_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")


@pytest.fixture
def compiler(steps, monkeypatch):
    """Replace XLA by a compiler that reports ``needs(batch)`` bytes.

    If ``needs`` returns an exception, the compiler raises it. If it returns None, nothing is reported.
    """
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")

    def says(needs):
        def compiled(step, args, device):
            if isinstance(outcome := needs(jax.tree.leaves(args[1])[0].shape[0]), Exception):
                raise outcome
            stats = None if outcome is None else dict.fromkeys(sizes, 0) | {"temp_size_in_bytes": outcome}
            return types.SimpleNamespace(memory_analysis=lambda: stats and types.SimpleNamespace(**stats))

        monkeypatch.setattr(remat.memory, "compiled", compiled)

    return says


def test_the_largest_batch_is_searched_also_if_the_step_itself_needs_too_much_memory(compiler, monkeypatch):
    compiler(lambda batch: NO_MEMORY)
    assert remat.measure(CASE, ROW, None, None) == {"error": "out of memory"}
    monkeypatch.setattr(remat, "largest_batch", lambda *_: 24)
    figures = remat.measure(CASE, ROW, None, 9000)
    assert figures == {"error": "out of memory", "largest": {"batch": 24, "limit": 9000}}


def test_a_compiler_that_fails_or_reports_nothing_is_an_error_in_the_table(compiler):
    for needed, text in (
        (None, "the compiler must report how much memory a step needs, but this device's compiler does not"),
        (jax.errors.JaxRuntimeError("INTERNAL: ptxas died"), "JaxRuntimeError: INTERNAL: ptxas died"),
    ):
        compiler(lambda batch, needed=needed: needed)
        assert remat.measure(CASE, ROW, None, 9000)["error"].startswith(text)


def test_invalid_flags_are_an_error_of_one_line(tmp_path, capsys, monkeypatch):
    for changes, text in [
        ({"smoke": False}, "this benchmark needs a GPU, but JAX finds only cpu"),
        ({"remats": ()}, "the number of --remats must be at least 1, got 0"),
        ({"memory_limit": "much"}, "--memory-limit is a number of bytes, got 'much'"),
        ({"minutes": -1.0}, "--minutes must be at least 0, got -1"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            remat.main(smoke(tmp_path, **changes))
        said = capsys.readouterr().err
        assert stopped.value.code == 2 and said.count("\n") == 1 and text in said

    monkeypatch.setattr(gpu_targets, "PLUGINS", ("no_such_plugin",))
    with pytest.raises(SystemExit):
        remat.main(smoke(tmp_path, target="h200", smoke=False))
    assert "needs its CUDA plugin, which is not installed: pip install" in capsys.readouterr().err


def test_compiled_results_name_their_target_and_have_its_limit(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_targets.GpuTarget, "devices", lambda target: [])
    (group,) = remat.main(smoke(tmp_path, target="h200", memory_limit="1MB", smoke=False, remats=("none",)))
    where = json.loads((tmp_path / "remat.json").read_text())["environment"]
    assert where["target"] == group["setting"]["target"] == "NVIDIA H200 141GB HBM3e"
    assert "cpu" in where["device"] and "device" not in group["setting"]
    assert "- target: NVIDIA H200 141GB HBM3e\n- device: " in (tmp_path / "remat.md").read_text()

    assert remat.limit_of(remat.Config(target="h200")) == int(0.9 * 0.95 * jaxmp.hardware.GPUS["h200"].memory_bytes)


def group_of(attention_mib):
    largest = {"batch": 24, "limit": 2**30}
    rows = {
        "none": {"step_bytes": 10_000 * 2**20, "largest": largest},
        "attention": {"step_bytes": attention_mib * 2**20, "largest": {"error": "nothing fits"}},
        "full": {"error": "out of memory", "largest": {"error": "nothing fits"}},
    }
    setting = {"smoke": False, "sizes": dataclasses.asdict(FULL["gpt2"])}
    return {"model": "gpt2", "policy": "mixed_bfloat16", "text": "GPT-2", "setting": setting, "rows": rows}


def test_the_table_has_shares_of_the_step_without_remat_or_the_reason_why_there_is_none():
    table = remat.table(group_of(5000))
    assert table.rows == [
        ("none", "10,000", "1.000", "24"), ("attention", "5,000", "0.500", ""), ("full", "out of memory", "", ""),
    ]  # fmt: skip
    assert "Largest batch: the compiled step needs at most 1,024 MiB. Near this limit" in " ".join(table.notes)
    assert table.notes.count("nothing fits") == 1
