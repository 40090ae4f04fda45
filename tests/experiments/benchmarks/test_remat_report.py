"""What the remat benchmark makes of known numbers: ratios, goals, the picture."""

from __future__ import annotations

import dataclasses
import json

import pytest
from PIL import Image

from experiments.benchmarks.remat import report as remat_report
from experiments.benchmarks.shared.workloads import FULL, SMOKE
from experiments.training.runs import write_json

PART = {
    "model": "gpt2", "policy": "mixed_bfloat16", "text": "GPT-2", "items": 16384, "unit": "tokens", "peak": None,
    "setting": {"smoke": False, "sizes": dataclasses.asdict(FULL["gpt2"]), "device": "one GPU"},
    "environment": {"device": "one GPU", "versions": "1", "date": "2026-11-20 10:00", "command": "python"},
}  # fmt: skip


def folder_of(tmp_path, attention_ms, attention_mib, peak=None, **setting):
    """The parts of a run: none takes 10 and 20 ms and 1,000 MiB."""
    for kind, mib in (("none", 1000), ("attention", attention_mib), ("full", 100)):
        part = {
            **PART,
            "setting": {**PART["setting"], **setting},
            "remat": kind,
            "step_bytes": mib * 2**20,
            "peak": peak,
        }
        largest = {"batch": 24, "bytes": 1, "limit": 2**30} if kind == "none" else {"error": "nothing fits"}
        write_json(tmp_path / f"gpt2-mixed_bfloat16-{kind}.json", {**part, "largest": largest})
    times = {"none": {"milliseconds": [10.0, 20.0]}, "attention": {"milliseconds": attention_ms}}
    part = {**PART, "setting": {**PART["setting"], **setting}, "remat": "none"}
    write_json(
        tmp_path / "gpt2-mixed_bfloat16-times.json", {**part, "times": times, "errors": {"full": "out of memory"}}
    )
    return tmp_path


def test_a_ratio_is_of_the_same_round_and_a_row_without_times_says_why(tmp_path):
    (group,) = remat_report.collect(folder_of(tmp_path, [11.0, 21.0], 500))["groups"]
    table = remat_report.table(group)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["attention"]["time ÷ none"] == "1.075" and rows["attention"]["ms"] == "16"
    assert (rows["attention"]["step MiB"], rows["attention"]["memory ÷ none"]) == ("500", "0.500")
    assert rows["none"]["largest batch"] == "24" and rows["none"]["peak MiB"] == ""
    assert rows["full"]["ms"] == "out of memory" and rows["full"]["step MiB"] == "100"
    assert "Largest batch: whose step needs at most 1,024 MiB, by compiling; near that limit" in " ".join(table.notes)
    assert table.notes.count("nothing fits") == 2


@pytest.mark.parametrize(
    ("ms", "mib", "goals"),
    [
        ([10.8, 21.6], 5300, [
            "met: step time with remat of all but attention / without is 1.080, the goal at most 1.08",
            "met: peak memory with remat of all but attention, 5,300 MiB, / the 8,648 MiB that torch.compile AMP took "
            "on one H200 is 0.613, the goal at most 0.62",
        ]),
        ([11.0, 22.0], 5500, [
            "NOT MET: step time with remat of all but attention / without is 1.100, the goal at most 1.08",
            "NOT MET: peak memory with remat of all but attention, 5,500 MiB, / the 8,648 MiB that torch.compile AMP "
            "took on one H200 is 0.636, the goal at most 0.62",
        ]),
    ],
)  # fmt: skip
def test_goals_say_whether_they_are_met(tmp_path, ms, mib, goals):
    assert remat_report.collect(folder_of(tmp_path, ms, mib))["groups"][0]["goals"] == goals


def test_the_devices_peak_counts_where_there_is_one_and_other_sizes_have_no_goal_of_memory(tmp_path):
    (group,) = remat_report.collect(folder_of(tmp_path, [10.0, 20.0], 500, peak=5000 * 2**20))["groups"]
    assert "5,000 MiB, / the 8,648 MiB that torch.compile AMP took on one H200 is 0.578" in group["goals"][1]
    small = {"sizes": dataclasses.asdict(SMOKE["gpt2"])}
    (group,) = remat_report.collect(folder_of(tmp_path, [10.0, 20.0], 500, **small))["groups"]
    assert len(group["goals"]) == 1


def test_a_picture_without_times_has_the_largest_batch_in_their_place(tmp_path):
    pictures = []
    for times in (True, False):
        folder = folder_of(tmp_path, [10.0, 20.0], 500)
        if not times:
            (folder / "gpt2-mixed_bfloat16-times.json").unlink()
        result = remat_report.write(folder)
        with Image.open(folder / "remat.png") as image:
            assert image.width > 400 and len(image.convert("L").getcolors()) > 20
        pictures.append((folder / "remat.png").read_bytes())
    assert "ratio" not in result["groups"][0]["rows"]["none"] and pictures[0] != pictures[1]
    assert json.loads((tmp_path / "remat.json").read_text())["groups"][0]["goals"] == result["groups"][0]["goals"]


def test_of_what_was_measured_twice_the_last_counts(tmp_path):
    folder_of(tmp_path, [11.0, 21.0], 500)
    path = tmp_path / "gpt2-mixed_bfloat16-times.json"
    part = json.loads(path.read_text())
    part["times"]["attention"]["milliseconds"] = [5.0, 5.0]
    earlier = {**part, "environment": {**part["environment"], "date": "2026-11-19 10:00"}}
    write_json(tmp_path / "gpt2-mixed_bfloat16-times2.json", earlier)
    result = remat_report.collect(tmp_path)
    assert result["groups"][0]["rows"]["attention"]["milliseconds"] == [11.0, 21.0]
    assert result["environment"]["date"] == "2026-11-20 10:00"
