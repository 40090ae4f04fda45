"""The pictures of the tools: the script, the pages and the table of memory."""

import functools
import sysconfig
from pathlib import Path

import pytest

from experiments.benchmarks.models.workloads import workload
from experiments.benchmarks.report import inspect_pictures
from experiments.benchmarks.report.marked_text import read_marked
from jaxmp.inspect import Memory

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.slow("draws the pictures of the docs")
def test_the_script_draws_in_small(tmp_path, capsys, monkeypatch):
    sources = str(Path(sysconfig.get_path("stdlib"), "asyncio"))  # reading the whole library takes 15 seconds
    small = functools.partial(inspect_pictures.language_model, dataset=sources)
    monkeypatch.setattr(inspect_pictures, "language_model", small)
    inspect_pictures.main(inspect_pictures.Config(smoke=True, run_dir=tmp_path))
    names = {f"inspect_{picture}" for picture in inspect_pictures.PAGES}
    assert {file.stem for file in tmp_path.glob("*.png")} == names
    shown = capsys.readouterr().out
    assert all(f"](../{name}.png)" in shown for name in names) and "jax 0." in shown


def test_a_page_has_a_place_for_each_picture():
    for name, page in inspect_pictures.PAGES.items():
        text = read_marked(inspect_pictures.DOCS / "tools" / f"{page}.md", name, inspect_pictures.COMMAND)
        assert f"](../inspect_{name}.png)" in text
        assert (inspect_pictures.DOCS / f"inspect_{name}.png").stat().st_size < 300_000


def test_the_table_of_memory_adds_up_and_the_breakdown_beside_it_is_its_own_sum():
    def plan(activations):
        kinds = {
            "params": 10**9,
            "optimizer": 2 * 10**9,
            "activations": activations,
            "temporaries": 10**8,
            "batch": 10**7,
        }
        return Memory("a GPU", sum(kinds.values()), kinds, {}, (), 2, int)

    plans = {"float32": plan(4 * 10**9), "mixed_bfloat16": plan(2 * 10**9)}
    text = "\n".join(inspect_pictures.memory_text(workload("bert", layers=24, width=1024), plans))
    assert "| float32 | 1.00 | 2.00 | 4.00 | 0.10 | 0.01 | 7.11 | 100% |" in text
    assert "| mixed_bfloat16 | 1.00 | 2.00 | 2.00 | 0.10 | 0.01 | 5.11 | 72% |" in text
    assert (
        "With 2 + 2 + 8 bytes and half the activations, it is 6.04 GB." in text
        and "saves 28% of the memory here" in text
        and "It saves 50% of the activations." in text
    )
