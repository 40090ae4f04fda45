"""The command that runs all benchmarks of a GPU, piece by piece."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest

from experiments.benchmarks import gpu

HERE = {"device": "1 × cpu", "versions": "Python 3.11", "backend": "cpu"}


@pytest.fixture
def pieces(monkeypatch, tmp_path):
    """Return a function that makes pieces, each of which runs a line of Python in the run folder."""
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(gpu, "place", lambda: HERE)

    def make(**scripts):
        def command(piece, run_dir, small, minutes):
            begin = f"import sys, time; from pathlib import Path; folder = Path({str(run_dir)!r})"
            return [sys.executable, "-I", "-S", "-c", f"{begin}\n{scripts[piece.name]}"]  # it starts at once

        monkeypatch.setattr(gpu.Piece, "command", command)
        monkeypatch.setattr(gpu, "PIECES", tuple(gpu.Piece(name, f"a {name}", name, (), (), name) for name in scripts))

    return make


def test_a_piece_that_fails_or_is_not_finished_runs_again_and_the_others_do_not(pieces, tmp_path, capsys):
    once = "mark = folder / '{0}'; first = not mark.exists(); mark.touch(); "
    pieces(
        fails=once.format("a") + "sys.exit('error: no such kernel' if first else 0)",
        part=once.format("b") + f"print({gpu.UNFINISHED!r} if first else 'whole')",
        third="import os; (folder / 'cache.txt').write_text(os.environ['JAX_COMPILATION_CACHE_DIR'])",
    )
    config = gpu.Config(smoke=True, minutes=0, run_dir=tmp_path / "run")
    with pytest.raises(SystemExit, match="1"):
        gpu.main(config)
    out, err = capsys.readouterr()
    assert "== fails: failed: error: no such kernel" in out and "to do: fails, part; written to" in out
    assert err == "error: fails failed: see the logs\n"
    assert (tmp_path / "run" / "cache.txt").read_text() == str(tmp_path / "run" / "cache" / "jax")
    (tmp_path / "run" / "cache.txt").unlink()
    gpu.main(config)
    assert "to do: nothing" in capsys.readouterr().out and not (tmp_path / "run" / "cache.txt").exists()


def test_a_piece_is_stopped_when_the_minutes_are_up(pieces, tmp_path, capsys):
    pieces(slow="time.sleep(100)")
    assert not gpu.run(gpu.PIECES[0], tmp_path, True, 0.01)
    assert "== slow: stopped: the minutes were up" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.done"))


def test_every_piece_has_flags_that_its_benchmark_takes(tmp_path):
    for piece, small in itertools.product(gpu.PIECES, (False, True)):
        package = importlib.import_module(piece.module)
        script = importlib.import_module(f"{piece.module}.run") if hasattr(package, "__path__") else package
        _, _, _, *flags = piece.command(tmp_path, small, 5.0)
        config = gpu.cli.parse(script.Config, "", flags)
        assert config.run_dir == tmp_path / piece.folder
        assert config.minutes == 5.0
        if piece.benchmark == "compare":
            script.task_flags(config)
    assert gpu.PIECES[0].command(gpu.ROOT / "runs" / "gpu", True, 0.0)[-2:] == ["--run-dir", "runs/gpu/train_step"]
