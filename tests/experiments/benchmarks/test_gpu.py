"""The command that runs all benchmarks of a GPU, piece by piece."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types

import pytest

from experiments.benchmarks import gpu
from experiments.benchmarks.shared import foreseen, kept

HERE = {"device": "1 × cpu", "versions": "Python 3.11", "backend": "cpu", "bytes": None}


@pytest.fixture
def on(monkeypatch, tmp_path):
    """Set the device that is reported; results go to a folder of the test."""
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    return lambda **about: monkeypatch.setattr(gpu, "place", lambda: {**HERE, **about})


class Noon(datetime.date):
    @classmethod
    def today(cls):
        return cls(2026, 11, 22)


def pieces(monkeypatch, **scripts):
    """Make pieces that run a line of Python, with the run folder as ``folder``."""
    fake_pieces = tuple(gpu.Piece(name, f"a {name}", name, (), (), wants=(), limited=False) for name in scripts)

    def command(piece, run_dir, small, minutes):
        folder = run_dir / piece.name
        folder.mkdir(exist_ok=True)
        begin = f"import sys, time; from pathlib import Path; folder = Path({str(folder)!r})"
        return [sys.executable, "-I", "-S", "-c", f"{begin}\n{scripts[piece.name]}"]  # it starts at once

    monkeypatch.setattr(gpu.Piece, "command", command)
    monkeypatch.setattr(gpu, "PIECES", fake_pieces)
    return fake_pieces


def states(folder):
    return {name: piece["state"] for name, piece in json.loads((folder / "gpu.json").read_text())["pieces"].items()}


@pytest.mark.slow("a whole run of a benchmark")
def test_a_piece_runs_small_and_is_not_run_again(on, tmp_path, capsys):
    on()
    config = gpu.Config(smoke=True, minutes=0, pieces=("input_pipeline",), run_dir=tmp_path / "run")
    gpu.main(config)
    out = capsys.readouterr().out
    assert states(tmp_path / "run") == {"input_pipeline": "done"}
    assert "== input_pipeline: the images per second" in out and "images/s" in out  # the output of the piece
    assert (tmp_path / "run/input_pipeline/input_pipeline.md").exists() and not (tmp_path / "results").exists()
    gpu.main(config)
    assert "==" not in capsys.readouterr().out


def test_a_piece_that_fails_is_reported_at_the_end_and_the_others_still_run(on, tmp_path, capsys, monkeypatch):
    on()
    flag = tmp_path / "mended"
    fails = f"if not Path({str(flag)!r}).exists(): print('error: no such kernel', file=sys.stderr); sys.exit(3)"
    pieces(monkeypatch, first=fails, second="print('found')")
    config = gpu.Config(smoke=True, minutes=0, run_dir=tmp_path / "run")
    with pytest.raises(SystemExit, match="1"):
        gpu.main(config)
    out, err = capsys.readouterr()
    assert "found\n" in out and "to do: first; continue with: python -m experiments.benchmarks.gpu" in out
    assert f"error: no such kernel (exit code 3; {tmp_path}/run/first.log)" in out
    assert err == "error: first failed: the reasons and the logs are in the table\n"
    assert states(tmp_path / "run") == {"first": "failed", "second": "done"}
    flag.touch()
    gpu.main(config)
    assert states(tmp_path / "run") == {"first": "done", "second": "done"}


@pytest.mark.slow("stops processes")
def test_a_piece_that_runs_over_the_minutes_is_stopped_and_the_next_command_continues(
    on, tmp_path, capsys, monkeypatch
):
    on()
    slow = "began = folder / 'began'; again = began.exists(); began.touch(); time.sleep(0 if again else 100)"
    part = f"part = folder / 'part'; print('whole' if part.exists() else {kept.UNFINISHED!r}); part.touch()"
    pieces(monkeypatch, part=part, slow=slow, last="pass")
    now, limits, follow = [0.0], {}, gpu._follow

    def follows(command, log, seconds, variables):
        """Advance a fake clock by a minute, or by all the time left if cut."""
        limits[log.stem] = seconds
        code, unfinished = follow(command, log, 2.0 if seconds and log.stem == "slow" else seconds, variables)
        now[0] += seconds if code == gpu.CUT else 60.0
        return code, unfinished

    monkeypatch.setattr(gpu, "_follow", follows)
    for module in (gpu, kept):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    config = gpu.Config(smoke=True, minutes=4.0, run_dir=tmp_path / "run")
    gpu.main(config)
    out = capsys.readouterr().out
    assert "== slow: begun, cut: the minutes were up" in out and "to do: part, slow, last; continue with" in out
    assert states(tmp_path / "run") == {"part": "begun", "slow": "begun"} and limits == {"part": 240.0, "slow": 180.0}
    gpu.main(dataclasses.replace(config, minutes=0))
    assert states(tmp_path / "run") == {"part": "done", "slow": "done", "last": "done"}


def test_a_piece_has_four_minutes_and_another_turn_after_the_others(on, tmp_path, monkeypatch):
    on()
    pieces(monkeypatch, long="", short="")
    now, ran = [0.0], []

    def follows(command, log, seconds, variables):
        ran.append((log.stem, seconds))
        now[0] += 240.0 if ran.count(("long", 240.0)) == 1 and log.stem == "long" else 30.0
        return 0, log.stem == "long" and now[0] == 240.0  # the first turn of the long piece leaves something

    monkeypatch.setattr(gpu, "_follow", follows)
    for module in (gpu, kept):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    foreseen.save(gpu.RESULTS, HERE["device"], "short", 200.0)  # it may take a little longer than foreseen
    gpu.main(gpu.Config(smoke=True, minutes=12.0, run_dir=tmp_path / "run"))
    assert ran == [("long", 240.0), ("short", 360.0), ("long", 240.0)]
    assert states(tmp_path / "run") == {"long": "done", "short": "done"}


def test_in_the_last_command_a_piece_that_fits_runs_before_those_that_do_not(on, tmp_path, monkeypatch):
    on()
    pieces(monkeypatch, first="", second="", third="")
    for piece, seconds in (("first", 500), ("second", 200), ("third", 50)):
        foreseen.save(gpu.RESULTS, HERE["device"], piece, seconds)
    ran = []
    monkeypatch.setattr(gpu, "_follow", lambda command, log, *_: ran.append(log.stem) or (0, False))
    gpu.main(gpu.Config(smoke=True, minutes=2.0, whole=True, run_dir=tmp_path / "whole"))
    assert ran == ["third", "first", "second"]  # if nothing fits, the first piece keeps what it measures in time
    ran.clear()
    gpu.main(gpu.Config(smoke=True, minutes=2.0, run_dir=tmp_path / "run"))
    assert ran == ["first", "second", "third"]


def test_all_pieces_keep_their_programs_in_one_folder_and_their_seconds_in_the_results(
    on, tmp_path, monkeypatch, capsys
):
    on(backend="gpu", device="1 × NVIDIA H200 (gpu)")
    monkeypatch.chdir(tmp_path)
    say = "import os; folder.mkdir(exist_ok=True); print(os.environ['JAX_COMPILATION_CACHE_DIR'])"
    pieces(monkeypatch, one=say, two=f"{say}; sys.exit(1)")
    with pytest.raises(SystemExit, match="1"):
        gpu.main(gpu.Config(minutes=0))
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "gpu" / "h200"
    assert out.count(f"{folder}/cache/jax\n") == 2 and f"compiled programs: 0 MiB in {folder}/cache" in out
    recorded = json.loads((tmp_path / "results" / "gpu_seconds.json").read_text())
    assert list(recorded) == ["1 × NVIDIA H200 (gpu)"] and list(recorded["1 × NVIDIA H200 (gpu)"]) == ["one"]
    monkeypatch.setattr(gpu, "PIECES", gpu.PIECES)
    gpu.main(gpu.Config(list=True))
    first, *_, second, _, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"one: a one: \d+ s \(recorded on 1 × NVIDIA H200 \(gpu\), \d{4}-\d\d-\d\d\)", first)
    assert second == "two: a two: not recorded yet"


def test_a_piece_that_lacked_a_package_says_so_and_runs_again_once_it_is_installed(on, tmp_path, capsys, monkeypatch):
    on()
    fake_pieces = pieces(monkeypatch, one="print('measured')", two="pass")
    wants = [("json", "no_such_package"), ("json",)]
    fake_pieces = tuple(
        dataclasses.replace(piece, wants=packages) for piece, packages in zip(fake_pieces, wants, strict=True)
    )
    monkeypatch.setattr(gpu, "PIECES", fake_pieces)
    config = gpu.Config(smoke=True, minutes=0, run_dir=tmp_path / "run")
    gpu.main(config)
    out = capsys.readouterr().out
    assert states(tmp_path / "run") == {"one": "done, without no_such_package", "two": "done"}
    assert "it runs again once that is installed" in out and "to do: " not in out
    gpu.main(config)
    assert "== " not in capsys.readouterr().out  # no more packages can be installed
    (tmp_path / "no_such_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    gpu.main(config)
    out = capsys.readouterr().out
    assert out.count("measured\n") == 1 and "== two" not in out
    assert states(tmp_path / "run") == {"one": "done", "two": "done"}


def test_a_piece_that_is_stopped_by_hand_keeps_the_seconds_that_it_took(on, tmp_path, monkeypatch):
    on()
    pieces(monkeypatch, one="time.sleep(100)")

    def stopped(*_):
        now[0] += 42.0
        raise KeyboardInterrupt

    now = [0.0]
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu, "_follow", stopped)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(gpu.Config(smoke=True, minutes=0, run_dir=tmp_path / "run"))
    (piece,) = json.loads((tmp_path / "run/gpu.json").read_text())["pieces"].values()
    assert piece == {"state": "begun", "seconds": 42.0, "reason": "stopped"}


def test_the_command_to_continue_is_the_one_that_was_typed(on, tmp_path, capsys, monkeypatch):
    on()
    pieces(monkeypatch, one=f"print({kept.UNFINISHED!r})")
    (tmp_path / "build/wheelhouse").mkdir(parents=True)
    (tmp_path / ".ci").mkdir()
    for name in ("Makefile", ".ci/wheels.py"):
        shutil.copyfile(gpu.ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -m ] && echo "$MAKE_GPU" || true\n')
    python.chmod(0o755)
    typed = ["SMOKE=1", "ARGS=--pieces one --run-dir 'a folder'", f"PYTHON={python}"]
    # As typed by hand. Otherwise the flags of pytest would be in the command.
    env = {name: value for name, value in os.environ.items() if not re.match("MAKE|MFLAGS|PYTHON$", name)}
    done = subprocess.run(["make", "gpu", *typed], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    monkeypatch.setenv("MAKE_GPU", done.stdout.splitlines()[-1])
    gpu.main(gpu.Config(smoke=True, minutes=0, run_dir=tmp_path / "run"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to do: ")]
    start, command = line.split("; continue with: ")
    program, *arguments = shlex.split(command)
    assert start == "to do: one" and [program, *sorted(arguments)] == ["make", *sorted(["gpu", *typed])]


def test_results_are_copied_to_a_dated_folder_and_the_readme_is_written_at_the_end(on, tmp_path, monkeypatch, capsys):
    on(backend="gpu", device="1 × NVIDIA H100 80GB HBM3 (gpu)")
    writes = (
        "[(folder / f'one.{kind}').write_text('x') for kind in ('md', 'json')]; (folder / 'alone-one.json').touch()"
    )
    part = "(folder / 'two.md').write_text('a part'); sys.exit('no such kernel')"
    fake_pieces = pieces(monkeypatch, one=writes, two=part, three="sys.exit(1)")
    monkeypatch.setattr(gpu, "PIECES", tuple(dataclasses.replace(piece, result=piece.name) for piece in fake_pieces))
    ran, run = [], subprocess.run
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **flags: ran.append(command) or run(["true"]))
    monkeypatch.setattr(gpu, "datetime", types.SimpleNamespace(date=Noon))  # the date may change while the test runs
    (tmp_path / "results" / "one-20261122-h100-80gb-hbm3").mkdir(parents=True)  # from another run
    with pytest.raises(SystemExit, match="1"):
        gpu.main(gpu.Config(minutes=0, run_dir=tmp_path / "run"))
    (folder,) = (tmp_path / "results").glob("one-20261122-h100-80gb-hbm3-2")
    assert sorted(file.name for file in folder.iterdir()) == ["one.json", "one.md"]
    (folder,) = (tmp_path / "results").glob("two-*")
    assert [file.name for file in folder.iterdir()] == ["two.md"]
    assert ran == [[sys.executable, "-m", "experiments.benchmarks.report.pages"]]
    assert states(tmp_path / "run") == {"one": "done", "two": "failed", "three": "failed"}
    assert "no such kernel (exit code 1; " in capsys.readouterr().out


def test_a_readme_that_cannot_be_written_is_an_error_after_all_pieces(on, tmp_path, monkeypatch, capsys):
    on(backend="gpu")
    (piece,) = pieces(monkeypatch, one="(folder / 'one.md').write_text('x')")
    monkeypatch.setattr(gpu, "PIECES", (dataclasses.replace(piece, result="one"),))
    done = subprocess.CompletedProcess([], 1, "", "error: a result is damaged\n")
    monkeypatch.setattr(gpu, "_captured", lambda command: done)
    with pytest.raises(SystemExit, match="1"):
        gpu.main(gpu.Config(minutes=0, run_dir=tmp_path / "run"))
    assert capsys.readouterr().err == "error: the README's tables were not written: error: a result is damaged\n"
    assert states(tmp_path / "run") == {"one": "done"}


def test_a_folder_has_pieces_of_one_device_and_of_full_size_only_on_a_gpu(on, tmp_path, capsys, monkeypatch):
    pieces(monkeypatch, one="pass")
    config = gpu.Config(smoke=True, minutes=0, run_dir=tmp_path)
    on()
    with pytest.raises(SystemExit, match="2"):
        gpu.main(gpu.Config(run_dir=tmp_path / "run"))
    said = capsys.readouterr().err
    assert said.startswith("error: this benchmark needs a GPU, but JAX finds only 1 × cpu") and said.count("\n") == 1
    assert "make gpu SMOKE=1" in said and not (tmp_path / "run").exists()
    gpu.main(config)
    on(device="1 × another")
    with pytest.raises(SystemExit, match="2"):
        gpu.main(config)
    assert "device is 1 × cpu there and 1 × another here; use the device" in capsys.readouterr().err


def test_pieces_are_listed_with_their_commands_and_missing_packages(capsys, monkeypatch, tmp_path):
    gpu.main(gpu.Config(list=True, pieces=("step-gpt2",)))
    title, command = capsys.readouterr().out.splitlines()
    named = "step-gpt2: GPT-2's train step: bf16 at three settings, by hand and torch.compile: "
    assert re.match(re.escape(named) + r"\d+ s \(", title)
    assert command.startswith(
        "  python -m experiments.benchmarks.train_step --models gpt2 --rows jaxmp-bf16 jaxmp-bf16-"
    )
    with pytest.raises(SystemExit, match="2"):
        gpu.main(gpu.Config(list=True, pieces=("gpt2",)))
    assert "--pieces must be among cublas-bert, cublas-gpt2, step-bert, step-gpt2, " in capsys.readouterr().err

    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = [piece for piece in gpu.PIECES if piece.name in ("step-gpt2", "images-bf16", "remat")]
    assert gpu.warnings_of(chosen, HERE, small=True) == ["torch is not installed: wanted by step-gpt2"]
    _, data, memory = gpu.warnings_of(chosen, {**HERE, "bytes": 24 * 2**30}, small=False)
    assert data == f"CIFAR-10 is not in {tmp_path}/jaxmp/data: images-bf16 must download it"
    assert memory.startswith("the device gives JAX 24 GiB")


@pytest.fixture
def wheels():
    spec = importlib.util.spec_from_file_location("wheels", gpu.ROOT / ".ci" / "wheels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow("installs a package")
def test_missing_packages_are_taken_from_a_wheelhouse_for_the_same_python(wheels, tmp_path, monkeypatch):
    house = [tmp_path / f"{name}-1.0-py3-none-any.whl" for name in ("numpy", "no_such_package", "markdown_it_py")]
    assert wheels.lacking(house) == [house[1]]
    monkeypatch.setattr(wheels, "HOUSE", tmp_path)
    monkeypatch.setattr(wheels, "TARGET", tmp_path / "wheels")
    (tmp_path / "no_such_package-1.0-cp27-cp27m-manylinux1_x86_64.whl").touch()
    with pytest.raises(SystemExit, match=f"make wheelhouse WHEEL_PYTHON=3.{sys.version_info.minor}$"):
        wheels.main()


def test_every_piece_has_flags_that_its_benchmark_takes(tmp_path):
    for piece, small in itertools.product(gpu.PIECES, (False, True)):
        takes(piece, small, tmp_path)


def test_commands_name_a_run_folder_in_the_project_by_its_relative_path():
    assert gpu.PIECES[0].command(gpu.ROOT / "runs" / "gpu", True, 0.0)[-2:] == ["--run-dir", "runs/gpu/train_step"]


def takes(piece, small, tmp_path):
    module = f"experiments.benchmarks.{piece.benchmark}"
    package = importlib.import_module(module)
    script = importlib.import_module(f"{module}.run") if hasattr(package, "__path__") else package
    _, _, _, *flags = piece.command(tmp_path, small, 5.0)
    config = gpu.cli.parse(script.Config, "", flags)
    assert config.run_dir == tmp_path / (piece.folder or piece.name)
    assert getattr(config, "minutes", 5.0) == 5.0 or not piece.limited
    if piece.benchmark == "train_step" and piece.rows:
        assert config.models == (piece.model,) and config.rows == piece.rows and config.rounds == piece.rounds
        assert config.smoke == small
