"""Predictions stand beside what is on record, the fastest first."""

from __future__ import annotations

import pytest

from experiments.benchmarks import roofline

COPY = """HloModule step, is_scheduled=true

ENTRY %main (a: f32[SIZE]) -> f32[SIZE] {
  %a = f32[SIZE]{0} parameter(0)
  ROOT %b = f32[SIZE]{0} copy(%a)
}
"""


def test_a_row_for_each_program_on_record(tmp_path, capsys):
    for name, size in (("gpt2-hand-fp32", 10**9), ("gpt2-hand-bf16", 10**8), ("gpt2-else", 1)):
        (tmp_path / f"{name}.hlo.txt").write_text(COPY.replace("SIZE", str(size)))
    found = roofline.main(roofline.Config(programs=tmp_path, run_dir=tmp_path / "run"))
    assert list(found) == ["gpt2-hand-bf16", "gpt2-hand-fp32"]
    assert found["gpt2-hand-bf16"]["predicted"] == pytest.approx(0.8 / (0.9 * 4.8) + 0.002)  # GB at TB/s, and a launch
    text = (tmp_path / "run" / "roofline.md").read_text()
    assert "| gpt2-hand-fp32 | 331.7 | 1.9 | -99.4% |" in text and "predicted ms" in capsys.readouterr().out


def test_without_programs_the_error_says_how_to_make_them(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        roofline.main(roofline.Config(programs=tmp_path))
    assert "run benchmarks.compile_only with --hlo" in capsys.readouterr().err
