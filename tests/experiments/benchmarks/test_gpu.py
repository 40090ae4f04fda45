"""The command that runs all benchmarks of a GPU, piece by piece."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.util
import itertools
import json
import sys
import types

import pytest

from experiments.benchmarks import gpu
from experiments.benchmarks.shared import measurements

HERE = {"device": "1 × cpu", "versions": "Python 3.11", "backend": "cpu"}


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
    """Make pieces that run a line of Python, with the piece's folder as ``folder``."""

    def command(piece, run_dir, small, minutes):
        folder = run_dir / piece.name
        folder.mkdir(exist_ok=True)
        begin = f"import sys, time; from pathlib import Path; folder = Path({str(folder)!r})"
        return [sys.executable, "-I", "-S", "-c", f"{begin}\n{scripts[piece.name]}"]  # it starts at once

    monkeypatch.setattr(gpu.Piece, "command", command)
    monkeypatch.setattr(gpu, "PIECES", tuple(gpu.Piece(name, f"a {name}", name, (), (), name) for name in scripts))


def states(folder):
    return {name: piece["state"] for name, piece in json.loads((folder / "gpu.json").read_text())["pieces"].items()}


@pytest.mark.slow("a whole run of a benchmark")
def test_a_piece_runs_small_and_is_not_run_again(on, tmp_path, capsys):
    on()
    config = gpu.Config(smoke=True, minutes=0, pieces=("low_precision",), run_dir=tmp_path / "run")
    gpu.main(config)
    out = capsys.readouterr().out
    assert states(tmp_path / "run") == {"low_precision": "done"}
    assert "== low_precision: an update" in out and "stored B/param" in out  # the output of the piece
    assert (tmp_path / "run/low_precision/low_precision.md").exists() and not (tmp_path / "results").exists()
    gpu.main(config)
    assert "==" not in capsys.readouterr().out


def test_a_piece_that_fails_is_reported_at_the_end_and_the_others_still_run(on, tmp_path, capsys, monkeypatch):
    on()
    flag = tmp_path / "mended"
    fails = f"if not Path({str(flag)!r}).exists(): print('error: no such kernel', file=sys.stderr); sys.exit(3)"
    pieces(monkeypatch, first=fails, second="import os; print(os.environ['JAX_COMPILATION_CACHE_DIR'])")
    config = gpu.Config(smoke=True, minutes=0, run_dir=tmp_path / "run")
    with pytest.raises(SystemExit, match="1"):
        gpu.main(config)
    out, err = capsys.readouterr()
    assert f"{tmp_path}/run/cache/jax\n" in out and "to do: first; the same command continues" in out
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
    part = f"part = folder / 'part'; print('whole' if part.exists() else {measurements.UNFINISHED!r}); part.touch()"
    pieces(monkeypatch, part=part, slow=slow, last="pass")
    now, limits, follow = [0.0], {}, gpu.follow

    def follows(command, log, seconds, variables):
        """Advance a fake clock by a minute, or by all the time left if cut."""
        limits[log.stem] = seconds
        code, unfinished = follow(command, log, 2.0 if seconds and log.stem == "slow" else seconds, variables)
        now[0] += seconds if code == gpu.CUT else 60.0
        return code, unfinished

    monkeypatch.setattr(gpu, "follow", follows)
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    config = gpu.Config(smoke=True, minutes=9.0, run_dir=tmp_path / "run")
    gpu.main(config)
    out = capsys.readouterr().out
    assert "== slow: begun, cut: the minutes were up" in out and "to do: part, slow, last; the same" in out
    assert states(tmp_path / "run") == {"part": "begun", "slow": "begun"} and limits == {"part": 540.0, "slow": 480.0}
    gpu.main(dataclasses.replace(config, minutes=0))
    assert states(tmp_path / "run") == {"part": "done", "slow": "done", "last": "done"}


def test_a_piece_that_is_stopped_by_hand_keeps_the_seconds_that_it_took(on, tmp_path, monkeypatch):
    on()
    pieces(monkeypatch, one="time.sleep(100)")

    def stopped(*_):
        now[0] += 42.0
        raise KeyboardInterrupt

    now = [0.0]
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu, "follow", stopped)
    with pytest.raises(KeyboardInterrupt):
        gpu.main(gpu.Config(smoke=True, minutes=0, run_dir=tmp_path / "run"))
    (piece,) = json.loads((tmp_path / "run/gpu.json").read_text())["pieces"].values()
    assert piece == {"state": "begun", "seconds": 42.0, "reason": "stopped"}


def test_results_complete_or_not_are_copied_to_one_dated_folder(on, tmp_path, monkeypatch, capsys):
    on(backend="gpu", device="1 × NVIDIA H100 80GB HBM3 (gpu)")
    monkeypatch.chdir(tmp_path)
    writes = "(folder / 'one.md').touch(); (folder / 'one.json').touch(); (folder / 'alone-one.json').touch()"
    pieces(monkeypatch, one=writes, two="(folder / 'two.md').write_text('a part'); sys.exit('no such kernel')")
    monkeypatch.setattr(gpu, "datetime", types.SimpleNamespace(date=Noon))  # the date may change while the test runs
    (tmp_path / "results" / "one-20261122-h100-80gb-hbm3").mkdir(parents=True)  # from another run
    for _ in range(2):
        with pytest.raises(SystemExit, match="1"):
            gpu.main(gpu.Config(minutes=0))
    copied = [str(file.relative_to(tmp_path / "results")) for file in sorted((tmp_path / "results").glob("*/*"))]
    assert copied == [
        "one-20261122-h100-80gb-hbm3-2/one.json",
        "one-20261122-h100-80gb-hbm3-2/one.md",
        "two-20261122-h100-80gb-hbm3/two.md",
    ]
    assert states(tmp_path / "runs" / "gpu" / "h100-80gb-hbm3") == {"one": "done", "two": "failed"}


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


def test_pieces_are_listed_with_their_commands(capsys):
    gpu.main(gpu.Config(list=True, pieces=("step-gpt2",)))
    assert capsys.readouterr().out.startswith(
        "step-gpt2: GPT-2's train step: bf16 at three settings, by hand and torch.compile\n"
        "  python -m experiments.benchmarks.train_step --models gpt2 --rows jaxmp-bf16 jaxmp-bf16-"
    )
    with pytest.raises(SystemExit, match="2"):
        gpu.main(gpu.Config(list=True, pieces=("gpt2",)))
    assert "--pieces must be among cublas-bert, cublas-gpt2, step-bert, step-gpt2, " in capsys.readouterr().err


def test_every_piece_has_flags_that_its_benchmark_takes(tmp_path):
    for piece, small in itertools.product(gpu.PIECES, (False, True)):
        module = f"experiments.benchmarks.{piece.benchmark}"
        package = importlib.import_module(module)
        script = importlib.import_module(f"{module}.run") if hasattr(package, "__path__") else package
        _, _, _, *flags = piece.command(tmp_path, small, 5.0)
        config = gpu.cli.parse(script.Config, "", flags)
        assert config.run_dir == tmp_path / (piece.folder or piece.result)
        assert getattr(config, "minutes", 5.0) == 5.0 or not piece.limited
        if piece.benchmark == "train_step":
            assert config.smoke == small


def test_commands_name_a_run_folder_in_the_project_by_its_relative_path():
    assert gpu.PIECES[0].command(gpu.ROOT / "runs" / "gpu", True, 0.0)[-2:] == ["--run-dir", "runs/gpu/train_step"]


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
