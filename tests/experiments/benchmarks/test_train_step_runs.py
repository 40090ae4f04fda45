"""Runs of the train step benchmark: complete, interrupted, resumed, sweeps."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re

import pytest
from benchmark_tools import SMALL

from experiments.benchmarks.measure import turns
from experiments.benchmarks.measure.turns import Prepared
from experiments.benchmarks.shared import measurements
from experiments.benchmarks.train_step import config as train_step_config
from experiments.benchmarks.train_step import looks, measure, report
from experiments.benchmarks.train_step import run as train_step
from jaxmp.inspect._profile import ceilings

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


# Runs. Compiling is replaced, and the timed steps do nothing.


@pytest.fixture
def quick(monkeypatch):
    """Replace the steps by empty ones, and the ceiling's products by small ones."""

    def prepare(case, row, which):
        if row.library == "flax":
            raise RuntimeError("no such kernel")
        return Prepared(lambda: None, (lambda: 2.5) if which == "train" else None, 1.5, 2**20)

    monkeypatch.setattr(measure, "prepare", prepare)
    monkeypatch.setattr("gc.collect", lambda: 0)  # a real one takes seconds
    monkeypatch.setattr(train_step_config, "SMOKE", SMALL)
    monkeypatch.setitem(ceilings._WIDTHS, "cpu", 8)


def test_a_run_writes_tables_a_picture_and_all_figures(quick, tmp_path, capsys):
    rows = ("jaxmp-bf16", "flax-fp16", "hand-fp32")
    with pytest.raises(SystemExit, match="1"):  # a row failed
        train_step.main(train_step.Config(smoke=True, models=("gpt2",), rows=rows, run_dir=tmp_path))
    written = json.loads((tmp_path / "train_step.json").read_text())
    model = written["models"]["gpt2"]
    assert len(model["train"]["jaxmp-bf16"]["milliseconds"]) == 2 and model["train"]["jaxmp-bf16"]["loss"] == 2.5
    assert model["train"]["jaxmp-bf16"]["tensor_flops"] == 1.0 and model["train"]["hand-fp32"]["tensor_flops"] == 0.0
    assert model["train"]["flax-fp16"]["error"] == "RuntimeError: no such kernel"
    assert "loss" not in model["forward"]["jaxmp-bf16"]
    assert model["goals"] == ["The goals are for the full sizes, so they are not judged here."]
    assert set(written["ceiling"]["best"]) == {"fp32", "bf16", "fp16"}
    markdown, (printed, said) = (tmp_path / "train_step.md").read_text(), capsys.readouterr()
    assert "RuntimeError: no such kernel\n" in said and "in prepare" in said  # the traceback
    assert said.endswith("error: in a smoke test every row must run, but flax-fp16 did not; see above\n")
    for text in (
        "the train step",
        "the forward pass alone",
        "jaxmp, bf16",
        "RuntimeError: no",
        "1.0 c",
        "device:",
    ):
        assert text in markdown and text in printed
    assert (tmp_path / "train_step.png").stat().st_size > 5000


@pytest.mark.slow("a whole run of a benchmark")
def test_rows_without_their_library_say_so(quick, monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torch" else find_spec(name))
    monkeypatch.setattr(report.plots, "panels", lambda *_: None)
    monkeypatch.setattr(train_step.ceiling, "ceilings", lambda *_, **__: {"best": {}})
    rows = ("jaxmp-fp32", "compile-bf16")
    train_step.main(train_step.Config(smoke=True, models=("bert",), rows=rows, passes=("train",), run_dir=tmp_path))
    markdown = (tmp_path / "train_step.md").read_text()
    assert "| torch.compile AMP, bf16 | not installed: torch |" in markdown
    assert "| jaxmp, fp32 | " in markdown and "the forward pass alone" not in markdown


@pytest.fixture
def rows_alone(quick, monkeypatch, tmp_path):
    """Replace the processes of rows, as on a GPU.

    Return the rows that started, and the figures that tests may set for each row.
    """
    started, fake_figures, now = [], {}, [0.0]

    def in_processes(commands):
        for key, command in commands.items():
            model = command[command.index("--models") + 1]
            assert command[command.index("--alone") + 1] == key
            passes = command[command.index("--passes") + 1 :]

            def measured(key=key, model=model, passes=passes):
                started.append((model, key))
                now[0] += 60.0
                return fake_figures.get(key) or {name: {"joules": 1} for name in passes}

            yield key, measured

    monkeypatch.setattr(train_step.processes, "in_processes", in_processes)
    monkeypatch.setattr(train_step, "require_gpu", lambda _: None)
    monkeypatch.setattr(train_step.ceiling, "ceilings", lambda *_, **__: {"best": {}})
    monkeypatch.setattr(measurements.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(report.plots, "panels", lambda *_: None)
    monkeypatch.setattr(train_step_config, "FULL", SMALL)
    return started, fake_figures


CUT = train_step.Config(
    models=("gpt2",), rows=("jaxmp-bf16", "hand-bf16"), passes=("train",), rounds=2, block_ms=1, minutes=0.5
)
WHOLE = dataclasses.replace(CUT, minutes=0.0)


def test_an_interrupted_run_continues_where_it_stopped(rows_alone, tmp_path, capsys):
    started, _ = rows_alone
    config = dataclasses.replace(WHOLE, run_dir=tmp_path)
    train_step.main(dataclasses.replace(CUT, run_dir=tmp_path))
    assert started == [("gpt2", "jaxmp-bf16")] and not list(tmp_path.glob("together-*"))
    assert "the same command continues from here" in capsys.readouterr().out
    results = train_step.main(config)
    assert started == [("gpt2", "jaxmp-bf16"), ("gpt2", "hand-bf16")]  # the first row is not measured again
    assert results["gpt2"].ratio("train", "jaxmp-bf16", "hand-bf16") is not None
    (file,) = tmp_path.glob("together-*")
    before = file.stat().st_mtime_ns
    train_step.main(config)
    assert file.stat().st_mtime_ns == before and len(started) == 2
    train_step.main(dataclasses.replace(config, passes=("train", "forward"), rows=config.rows[:1]))
    assert started[2:] == [("gpt2", "jaxmp-bf16")]  # for the forward pass; the figures of the train step stay
    assert set(json.loads((tmp_path / "alone-gpt2-jaxmp-bf16.json").read_text())) >= {"train", "forward"}


def test_every_row_of_every_model_is_alone_before_rows_take_turns_and_each_model_leaves_room(
    rows_alone, monkeypatch, tmp_path
):
    started, _ = rows_alone
    prepare_all, start_anew = measure.prepare_all, measure.start_anew
    monkeypatch.setattr(
        measure, "prepare_all", lambda case, *args: started.append(f"{case.name}, in turn") or prepare_all(case, *args)
    )
    monkeypatch.setattr(measure, "start_anew", lambda rows: started.append("room") or start_anew(rows))
    config = dataclasses.replace(WHOLE, models=("bert", "gpt2"), rows=("hand-bf16",), run_dir=tmp_path)
    train_step.main(config)
    alone = [("bert", "hand-bf16"), ("gpt2", "hand-bf16")]
    assert started == [*alone, "bert, in turn", "room", "room", "gpt2, in turn", "room", "room"]


def test_rows_that_failed_are_tried_again_those_without_figures_first(rows_alone, monkeypatch, tmp_path):
    started, fake_figures = rows_alone
    fake_figures["jaxmp-bf16"] = {"error": "its process ended with code 1: no room"}
    config = dataclasses.replace(WHOLE, run_dir=tmp_path)
    failed = train_step.main(dataclasses.replace(config, rows=("jaxmp-bf16",)))
    assert failed["gpt2"].figures("train", "jaxmp-bf16")["error"].endswith("no room")
    fake_figures.clear()
    results = train_step.main(config)
    assert started == [("gpt2", "jaxmp-bf16"), ("gpt2", "hand-bf16"), ("gpt2", "jaxmp-bf16")]
    figures = results["gpt2"].figures("train", "jaxmp-bf16")
    assert "error" not in figures and figures["joules"] == 1
    assert "error" not in json.loads((tmp_path / "alone-gpt2-jaxmp-bf16.json").read_text())
    (file,) = tmp_path.glob("together-*")
    for why, again in (("RuntimeError: no kernel", True), ("out of memory", False)):
        there = json.loads(file.read_text())
        there["rows"]["hand-bf16"] = {"error": f"{why} beside the other rows"}
        file.write_text(json.dumps(there))
        figures = train_step.main(config)["gpt2"].figures("train", "hand-bf16")
        assert ("ms" in figures) == again and ("error" in figures) != again
        for second in tmp_path.glob("together-*-again.json"):
            second.unlink()


def test_a_second_try_comes_after_first_tries_and_keeps_earlier_times(rows_alone, monkeypatch, tmp_path):
    order, fails, together, prepare_all = [], ["hand-bf16"], turns.together, measure.prepare_all

    def spy(case, *args):
        order.append(case.name)
        return prepare_all(case, *args)

    def breaks(prepared, *args):
        return {
            key: {"error": "OSError: gone"} if key in fails else row for key, row in together(prepared, *args).items()
        }

    monkeypatch.setattr(measure, "prepare_all", spy)
    monkeypatch.setattr(turns, "together", breaks)
    config = dataclasses.replace(WHOLE, run_dir=tmp_path)
    train_step.main(dataclasses.replace(config, models=("bert",)))
    fails[:] = ["jaxmp-bf16"]
    results = train_step.main(dataclasses.replace(config, models=("bert", "gpt2")))
    assert order == ["bert", "gpt2", "bert"]
    assert all("ms" in results["bert"].figures("train", row) for row in ("jaxmp-bf16", "hand-bf16"))
    train_step.main(dataclasses.replace(config, models=("bert",)))
    assert order == ["bert", "gpt2", "bert"]  # all rows have times now


def test_a_run_continues_only_with_the_same_setting(rows_alone, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(WHOLE, rows=("hand-bf16",), run_dir=tmp_path)
    train_step.main(config)
    capsys.readouterr()
    for change, text in (
        ({"batch_size": 4}, "alone-gpt2-hand-bf16.json sizes is {'batch_size': 2, .* there and {'batch_size': 4, "),
        ({"rounds": 3}, "rounds is 2 there and 3 here; use the device, the versions and the flags of that run, or"),
        ({"block_ms": 2.0}, "block_ms is 1 there and 2.0 here"),
        ({"smoke": True}, "smoke is False there and True here"),
    ):
        with pytest.raises(SystemExit):
            train_step.main(dataclasses.replace(config, **change))
        said = capsys.readouterr().err
        assert re.search(text, said) and said.count("\n") == 1
    environment = train_step.environment
    monkeypatch.setattr(train_step, "environment", lambda *args: {**environment(*args), "versions": "others"})
    for file in ("ceiling.json", "alone-gpt2-hand-bf16.json"):
        with pytest.raises(SystemExit):
            train_step.main(config)
        said = capsys.readouterr().err
        assert file in said and "versions is " in said and "there and others here" in said
        (tmp_path / file).unlink()


def test_a_damaged_file_in_the_folder_is_named(rows_alone, tmp_path, capsys):
    file = tmp_path / "alone-gpt2-hand-bf16.json"
    for text, why, report_only in (
        ('{"row": ', r"is not a result of a run \(Expecting", False),
        ("{}", r"is not a result of a run \(it has no setting", True),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit):
            train_step.main(dataclasses.replace(WHOLE, run_dir=tmp_path, report_only=report_only))
        said = capsys.readouterr().err
        assert re.search(f"error: {file} {why}", said) and said.endswith("remove it, and it is measured again\n")


def test_nothing_to_measure_or_to_report_is_an_error_that_says_why(rows_alone, monkeypatch, tmp_path, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "torch" else find_spec(name))
    for changes, text in [
        ({"rows": ("compile-bf16",)}, "nothing to measure: torch.compile AMP, bf16 (not installed: torch); see --list"),
        (
            {"rows": ("jmp-fp16",), "passes": ("forward",)},
            "--rows jmp-fp16 --models gpt2 --passes forward: there is nothing",
        ),
        ({"models": ("resnet50",), "rows": ("jaxmp-bf16-remat",)}, "--models resnet50 --passes train: there is"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            train_step.main(dataclasses.replace(WHOLE, run_dir=tmp_path, **changes))
        assert text in capsys.readouterr().err

    with pytest.raises(SystemExit):
        train_step.main(train_step.Config(report_only=True, run_dir=tmp_path))
    assert f"a report needs results, but {tmp_path} has none" in capsys.readouterr().err


@pytest.mark.slow("compiles a transformer")
def test_a_real_row_runs_from_the_command_to_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(report.plots, "panels", lambda *_: None)
    monkeypatch.setattr(train_step_config, "SMOKE", SMALL)
    monkeypatch.setattr(train_step.ceiling, "ceilings", lambda *_, **__: {"best": {}})
    rows = ("hand-fp32",)
    config = train_step.Config(smoke=True, models=("gpt2",), rows=rows, passes=("forward",), run_dir=tmp_path)
    figures = train_step.main(config)["gpt2"].figures("forward", "hand-fp32")
    assert figures["compiled_bytes"] > 1e5 and figures["compile_seconds"] > 0 and len(figures["milliseconds"]) == 2


def test_the_sweeps_say_where_half_precision_is_faster(quick, tmp_path, capsys, monkeypatch):
    times = iter([2.0, 4.0, 2.0, 4.0])  # at the second value half precision is slower

    def one_each(prepared, *_):
        half = next(times)
        return {key: {"milliseconds": [half if key == "jaxmp-bf16" else 3.0]} for key in prepared}

    monkeypatch.setattr(turns, "together", one_each)
    rows = ("jaxmp-bf16", "jaxmp-tf32")
    for axis, values in (("width", "128, 64"), ("depth", "2, 1")):
        train_step.main(
            train_step.Config(smoke=True, models=("gpt2", "resnet50"), rows=rows, look=axis, run_dir=tmp_path)
        )
        first, second = values.split(", ")
        gains = f"by {axis}: 1.50× at {first}, 0.75× at {second} (does not pay)\n"
        assert f"jaxmp, bf16: faster than jaxmp, TF32 {gains}" in capsys.readouterr().out
        points = json.loads((tmp_path / f"train_step_{axis}.json").read_text())["models"]["gpt2"]["points"]
        assert [point["value"] for point in points] == [first, second]


def test_an_interrupted_sweep_continues_with_the_missing_widths(quick, tmp_path, capsys, monkeypatch):
    timed = []

    class ExpiredClock(measurements.Clock):
        def late(self, seconds=0.0):
            self.unfinished = bool(timed)
            return self.unfinished

    def one_each(prepared, *_):
        timed.append(1)
        return {key: {"milliseconds": [2.0]} for key in prepared}

    monkeypatch.setattr(turns, "together", one_each)
    config = train_step.Config(
        smoke=True, models=("gpt2",), rows=("jaxmp-bf16",), look="width", run_dir=tmp_path, minutes=5
    )
    with monkeypatch.context() as patched:
        patched.setattr(looks.measurements, "Clock", ExpiredClock)
        results = train_step.main(config)
        assert len(results["gpt2"]["points"]) == len(timed) == 1
    assert capsys.readouterr().out.endswith(f"{measurements.UNFINISHED}\n")
    results = train_step.main(config)
    assert [point["value"] for point in results["gpt2"]["points"]] == ["128", "64"] and len(timed) == 2
    assert measurements.UNFINISHED not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        train_step.main(dataclasses.replace(config, rounds=3))
    assert "rounds is 20 there and 3 here; use" in capsys.readouterr().err


def test_a_sweep_without_tf32_does_not_say_that_half_precision_is_slower():
    def point(value, *keys):
        return {"value": value, "milliseconds": {key: [5.0 if "tf32" in key else 4.0] for key in keys}, "errors": {}}

    def notes(*points):
        return looks.table({"axis": "width", "text": "GPT-2, small", "points": points}).notes

    alone, beside = point("64", "jaxmp-bf16", "torch-fp32"), point("128", "jaxmp-bf16", "jaxmp-tf32")
    start, missing = "jaxmp, bf16: faster than jaxmp, TF32 by width:", "not measured at 64"
    assert notes(alone) == (f"{start} {missing}",)  # torch's float32 row is not half precision
    assert notes(beside, alone) == (f"{start} 1.25× at 128, {missing}",)


@pytest.mark.parametrize(
    ("broken", "why"),
    [({"milliseconds": [1.0, 1.0], "loss": float("nan")}, "not judged: its loss is nan")],
)
def test_rows_that_failed_have_an_error_in_place_of_gains_and_times(quick, tmp_path, monkeypatch, broken, why):
    together = turns.together

    def breaks(prepared, *args):
        return {key: broken if key == "jaxmp-fp16" else row for key, row in together(prepared, *args).items()}

    monkeypatch.setattr(turns, "together", breaks)
    monkeypatch.setattr(looks.processes, "busy_cores", contextlib.nullcontext)
    config = train_step.Config(smoke=True, models=("gpt2",), rows=("jaxmp-fp16", "jaxmp-tf32"), run_dir=tmp_path)
    train_step.main(dataclasses.replace(config, look="width"))
    train_step.main(dataclasses.replace(config, look="busy"))
    for name in ("width", "busy"):
        model = json.loads((tmp_path / f"train_step_{name}.json").read_text())["models"]["gpt2"]
        for point in model["points"]:
            assert set(point["milliseconds"]) == {"jaxmp-tf32"}
            assert point["errors"] == {"jaxmp-fp16": why}
        assert why in (tmp_path / f"train_step_{name}.md").read_text()


def test_the_step_is_timed_with_idle_cores_and_with_busy_ones_in_turn(quick, tmp_path, monkeypatch):
    busy_counts, working = [], []
    together, busy_cores = turns.together, looks.processes.busy_cores

    @contextlib.contextmanager
    def watched():
        with busy_cores(1) as processes:
            working.extend(processes)
            yield

    monkeypatch.setattr(looks.processes, "busy_cores", watched)
    monkeypatch.setattr(
        turns,
        "together",
        lambda *args: busy_counts.append(sum(process.poll() is None for process in working)) or together(*args),
    )
    train_step.main(
        train_step.Config(smoke=True, models=("bert",), rows=("jaxmp-bf16",), look="busy", run_dir=tmp_path)
    )
    assert busy_counts == [0, 1, 0, 1] and all(process.poll() is not None for process in working)
    model = json.loads((tmp_path / "train_step_busy.json").read_text())["models"]["bert"]
    assert [point["value"] for point in model["points"]] == ["idle", "busy"]
    assert [len(point["milliseconds"]["jaxmp-bf16"]) for point in model["points"]] == [2, 2]
    assert "× on busy cores" in (tmp_path / "train_step_busy.md").read_text()
