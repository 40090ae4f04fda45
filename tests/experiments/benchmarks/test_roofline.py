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


def test_a_row_for_each_program_on_record(tmp_path):
    for name, size in (("gpt2-hand-fp32", 10**9), ("gpt2-hand-bf16", 10**8), ("gpt2-else", 1)):
        (tmp_path / f"{name}.hlo.txt").write_text(COPY.replace("SIZE", str(size)))
    assert roofline.table(tmp_path).rows == [
        ("gpt2-hand-bf16", "33.6", "0.2", "-99.4%"),  # 0.8 GB at 0.9 · 4.8 TB/s
        ("gpt2-hand-fp32", "331.7", "1.9", "-99.4%"),
    ]


def test_without_programs_the_error_says_how_to_make_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run benchmarks\.compile_only with --hlo"):
        roofline.table(tmp_path)
