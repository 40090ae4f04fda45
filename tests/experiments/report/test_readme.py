"""The README's figures, its main table, and how they were measured."""

from __future__ import annotations

import dataclasses
import re

import pytest

from experiments.benchmarks import gradient_sums
from experiments.benchmarks.train_step import report as train_step_report
from experiments.models.workloads import FULL, SMOKE
from experiments.report import headline, predictions, readme, step_tables
from experiments.report.json_files import write_json
from experiments.report.marked_text import read_marked, write_marked
from jaxmp.inspect._roofline import roofline

GPU = {"device": "1 × H200 (gpu)", "versions": "jax 1", "date": "2026-11-21 10:00 +0000", "command": "python -m some"}
MIB = 2**20


@pytest.mark.parametrize(("page", "marker"), readme.PAGES)
def test_the_readme_and_the_pages_have_what_the_script_writes(page, marker):
    text = read_marked(readme.ROOT / page, marker, readme.COMMAND)
    assert text == readme.PAGES[page, marker]().strip(), f"run {readme.COMMAND}"


def test_the_error_that_roofline_states_is_the_largest_on_record_and_orders_all_pairs_beyond_it():
    source = headline.newest(readme.ROOT / "experiments" / "results", "compile_only", lambda run: True)
    records = predictions.on_record(source.data["results"])
    assert len(records) == len(predictions.TIMES)
    largest = max(abs(record.error) for record in records)
    assert roofline.ERROR - 0.01 < largest <= roofline.ERROR
    ties = predictions.reversed_pairs(records)
    assert all(predictions.apart(*pair) <= roofline.ERROR for pair in ties)


def test_only_text_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "README.md"
    begin, end = "<!-- results: written by `make it` -->", "<!-- /results -->"
    page.write_text(f"before\n{begin}\n\nold\n\n{end}\nafter\n")
    write_marked(page, "results", "make it", "new\n")
    assert page.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="must have"):
        write_marked(page, "results", "make it", "")


def test_a_damaged_result_is_named(tmp_path):
    (tmp_path / "accuracy-1").mkdir()
    (tmp_path / "accuracy-1" / "accuracy.json").write_text('{"runs": [')
    with pytest.raises(
        ValueError, match=r"accuracy-1/accuracy.json is not a result of a run \(.*\); write it again, or"
    ):
        headline.Sources(tmp_path)


# The main table.


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(train_step_report.plots, "panels", lambda *_: None)


def cells(results):
    """Return the texts of the table by row and model, and the lines below the table."""
    lines, provenance = headline.lines(results, results.parent)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0][1:] == list(headline.MODELS.values())
    rows = {}
    for name, *texts in table[2:]:
        assert "" not in texts
        measured = ["" if text == headline.NOT_MEASURED else text for text in texts]
        rows[name] = dict(zip(headline.MODELS, measured, strict=True))
    return rows, "\n".join([*lines, *provenance])


def train_step(folder, sizes=FULL, environment=GPU, only=(), together=(), losses=None, model="gpt2"):
    """Write a result of a model's train step: torch.compile takes 30 ms, 8,000 MiB."""
    about = {
        "model": model, "text": model, "sizes": dataclasses.asdict(sizes[model]), "items": 1, "unit": "tokens",
        "model_flops": 1, "measured": "2026-11-21", "environment": environment, "setting": {"smoke": False},
    }  # fmt: skip
    rows = {  # ms, MiB
        "jaxmp-bf16": (27.0, 6000), "jaxmp-fp16": (28.0, 6100), "jaxmp-fp16-constant": (28.0, 6100),
        "jaxmp-bf16-remat": (30.0, 5000), "autocast-bf16": (27.0, 6000), "unprepared-bf16": (27.0, 12000),
        "hand-bf16": (26.0, 12000),
        "compile-bf16": (30.0, 8000), "compile-fp16": (33.0, 8000), "jaxmp-tf32": (81.0, 20000),
        "jaxmp-fp32": (297.0, 20000), "hand-fp32": (330.0, 40000),
    }  # fmt: skip
    folder.mkdir(parents=True)
    rows = {key: row for key, row in rows.items() if not only or key in only}
    for key, (_, mib) in rows.items():
        figures = {"compile_seconds": 1.0, "peak": mib * MIB, "flops": {"bfloat16": 995, "float32": 5}}
        write_json(folder / f"alone-{model}-{key}.json", {**about, "row": key, "train": figures})
    losses = losses or {}
    for i, keys in enumerate(together or (tuple(rows),)):
        times = {
            key: {"milliseconds": [ms, ms + 1, 2 * ms], "loss": losses.get(key, 1.0)}
            for key, (ms, _) in rows.items()
            if key in keys
        }
        write_json(folder / f"together-{model}-train-{i}.json", {**about, "pass": "train", "rows": times})
    train_step_report.write(folder)


def compiled(folder, name="bert", full=True):
    """Write results compiled for an H200: of a model and of a small ResNet-50."""
    variants = {
        "jaxmp-bf16": {"label": "jaxmp, bf16", "peak": 11_000 * MIB, "half": 0.998},
        "jaxmp-bf16-remat": {"peak": 9_000 * MIB, "half": 1.0},
    }
    folder.mkdir(parents=True)
    where = {"target": "H200", **GPU, "device": "a CPU"}
    results = [
        {"name": name, "full": full, "variants": variants},
        {"name": "resnet50", "full": False, "variants": variants},
    ]
    write_json(folder / "compile_only.json", {"environment": where, "results": results})


def accuracy(folder, smoke=False):
    """Write an accuracy result, in float32 and in half precision.

    Images have three seeds, and a run of GPT-2 failed.
    """
    folder.mkdir(parents=True)
    accuracies = {
        ("images", "float32", "none"): [0.80, 0.81, 0.82],
        ("images", "mixed_float16", "dynamic"): [0.80, 0.82, 0.82],
        ("images", "mixed_bfloat16", "none"): [0.81],
    }
    accuracies |= {("bert", "float32", "none"): [0.5] * 3, ("bert", "mixed_bfloat16", "none"): [0.5] * 3}
    accuracies |= {("gpt2", "float32", "none"): [0.5], ("gpt2", "mixed_bfloat16", "none"): ["nan"]}
    runs = [  # the runs of bert have other sizes
        {"task": task, "policy": policy, "loss_scale": scale, "seed": seed,
         "setting": {"whole": not smoke and task != "bert"}, "failure": "it stopped" if value == "nan" else "",
         "final": {"accuracy": value, "loss": value}}
        for (task, policy, scale), values in accuracies.items()
        for seed, value in enumerate(values)
    ]  # fmt: skip
    write_json(folder / "accuracy.json", {"environment": GPU, "runs": runs})


def remat(folder, sizes=FULL):
    """Write a result with the largest batch of BERT."""
    folder.mkdir(parents=True)
    rows = {"none": {"largest": {"batch": 700}}, "attention": {"largest": {"batch": 1200}}}
    setting = {"sizes": dataclasses.asdict(sizes["bert"]), "target": "an H200"}
    groups = [{"model": "bert", "policy": "mixed_bfloat16", "setting": setting, "rows": rows}]
    write_json(folder / "remat.json", {"environment": GPU, "groups": groups})


def test_without_any_result_there_is_no_row_and_the_page_names_the_command(tmp_path):
    table, text = cells(tmp_path)
    assert table == {} and "`make gpu` measures" in text


def test_a_measured_step_gives_ratios_with_their_goals_and_says_where(tmp_path):
    train_step(tmp_path / "results" / "train_step-2026")
    table, text = cells(tmp_path / "results")
    gpt2 = {name: row["gpt2"] for name, row in table.items() if row["gpt2"]}
    assert gpt2 == {
        "step time, relative to torch.compile AMP": "✓ 0.900 (≤ 0.93)",
        "peak memory, relative to torch.compile AMP": "✓ 0.750 (≤ 1)",
        "peak memory with remat, relative to torch.compile AMP": "✗ 0.625 (≤ 0.45)",
        "step time with remat, relative to torch.compile AMP": "✓ 1.000 (≤ 1.08)",
        "speed-up over float32 without tensor cores": "✓ 11.00 (≥ 10)",
        "speed-up over TF32": "✗ 3.00 (≥ 3.2)",
        "memory saved, relative to float32": "✓ 85% (≥ 75%)",
        "step time of fp16 with dynamic scaling, relative to a constant scale": "✓ 1.000 (≤ 1.01)",
        "step time of autocast, relative to code by hand": "✗ 1.038 (≤ 1.01)",
        "step time of autocast, relative to a policy": "✓ 1.000 (≤ 1.01)",
        "FLOPs of products in half on tensor cores": "✓ 99.5% (≥ 99%)",
    }
    assert not any(row["bert"] for row in table.values() if row["bert"] != "–")
    assert "[train_step-2026](results/train_step-2026/train_step.md): 1 × H200 (gpu); jax 1; 2026-11-21; " in text
    assert "`python -m some`" in text


def test_compiled_steps_fill_the_rows_of_memory_and_are_marked(tmp_path):
    compiled(tmp_path / "compile_only")
    table, text = cells(tmp_path)
    assert {name: row["bert"] for name, row in table.items() if row["bert"]} == {
        "peak memory, relative to torch.compile AMP": "✓ 0.789ᶜʳ (≤ 1)",
        "peak memory with remat, relative to torch.compile AMP": "✗ 0.646ᶜʳ (≤ 0.45)",
        "memory saved, relative to float32": "✓ 79%ᶜʳ (≥ 70%)",
        "FLOPs of products in half on tensor cores": "✓ 99.8%ᶜ (≥ 99%)",
    }
    assert not any(row["resnet50"].strip("–") for row in table.values())
    assert "ᶜ compiled for an H200; no GPU was used" in text and "compiled for H200 on a CPU, not run; jax 1" in text
    assert "ʳ relative to peaks that were measured once on one H200 with torch 2.11.0+cu130" in text
    assert "BERT-Base 13,938 and 51,175" in text


def test_compiled_peaks_are_compared_with_measured_peaks_if_there_are_any(tmp_path):
    compiled(tmp_path / "compile_only", "gpt2")
    train_step(tmp_path / "train_step", only=("compile-bf16", "compile-fp16", "hand-fp32"))
    table, text = cells(tmp_path)
    assert table["peak memory, relative to torch.compile AMP"]["gpt2"] == "✗ 1.375ᶜ (≤ 1)"  # 11,000 / 8,000 MiB
    assert table["peak memory with remat, relative to torch.compile AMP"]["gpt2"] == "✗ 1.125ᶜ (≤ 0.45)"
    assert table["memory saved, relative to float32"]["gpt2"] == "✗ 72%ᶜ (≥ 75%)"  # relative to 40,000 MiB
    assert "ᶜ compiled for an H200; no GPU was used" in text and "recorded peaks" not in text


def test_measured_figures_take_precedence_over_compiled_ones_and_a_peak_needs_no_time(tmp_path):
    compiled(tmp_path / "compile_only", "gpt2")
    train_step(tmp_path / "train_step", together=(("compile-bf16",),))
    table, _ = cells(tmp_path)
    assert {name: row["gpt2"] for name, row in table.items() if row["gpt2"]} == {
        "peak memory, relative to torch.compile AMP": "✓ 0.750 (≤ 1)",
        "peak memory with remat, relative to torch.compile AMP": "✗ 0.625 (≤ 0.45)",
        "memory saved, relative to float32": "✓ 85% (≥ 75%)",
        "FLOPs of products in half on tensor cores": "✓ 99.5% (≥ 99%)",
    }


def test_times_of_rows_that_took_no_turns_together_or_whose_loss_is_not_finite_give_no_ratio(tmp_path):
    train_step(tmp_path / "train_step", together=(("jaxmp-bf16", "jaxmp-tf32"), ("compile-bf16", "autocast-bf16")))
    table, _ = cells(tmp_path)
    assert "step time, relative to torch.compile AMP" not in table
    assert "step time of autocast, relative to a policy" not in table
    assert table["speed-up over TF32"]["gpt2"] == "✗ 3.00 (≥ 3.2)"
    train_step(tmp_path / "other" / "train_step", losses={"jaxmp-fp16": float("nan"), "jaxmp-bf16": 2.5})
    table, _ = cells(tmp_path / "other")
    assert "step time of fp16 with dynamic scaling, relative to a constant scale" not in table
    assert table["step time, relative to torch.compile AMP"]["gpt2"] == "✓ 0.900 (≤ 0.93)"


def test_accuracies_and_largest_batches_are_of_their_benchmarks(tmp_path):
    accuracy(tmp_path / "accuracy-1")
    remat(tmp_path / "remat_h200")
    table, text = cells(tmp_path)
    assert table["accuracy of mixed_float16, relative to float32"]["resnet50"] == "✓ +0.33 ± 0.58 points"
    assert table["accuracy of mixed_bfloat16, relative to float32"]["gpt2"] == "✗ stopped"
    assert table["accuracy of mixed_bfloat16, relative to float32"]["bert"] == ""
    assert (
        table["accuracy of mixed_bfloat16, relative to float32"]["resnet50"] == "+1.00 points, 1 of 3 seeds"
    )  # open: no mark
    assert table["largest batch, without → with remat"] == {"resnet50": "–", "bert": "700 → 1200ᶜ", "gpt2": ""}
    assert "`make gpu` measures" in text  # a figure is missing


def test_the_newest_result_counts_and_small_ones_do_not(tmp_path):
    train_step(tmp_path / "train_step-small", SMOKE, {**GPU, "date": "2026-12-31 10:00 +0000"})
    accuracy(tmp_path / "accuracy-smoke", smoke=True)
    compiled(tmp_path / "compile_only-small", full=False)
    remat(tmp_path / "remat-small", SMOKE)
    assert headline.Sources(tmp_path).all() == []
    for day in ("22", "24", "23"):
        train_step(tmp_path / f"train_step-{day}", environment={**GPU, "date": f"2026-11-{day} 10:00 +0000"})
    (source,) = headline.Sources(tmp_path).all()
    assert source.path.parent.name == "train_step-24"


def shown(lines):
    """Return the texts of a table in Markdown, by row."""
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in (table[0], *table[2:])}


def test_the_readme_compares_the_rows_of_one_run_on_each_device(tmp_path):
    train_step(tmp_path / "train_step-20261121")
    train_step(
        tmp_path / "train_step-20261122", environment={**GPU, "date": "2026-11-22 10:00 +0000"}, only=("hand-bf16",)
    )
    h100 = {**GPU, "device": "1 × H100 (gpu)", "date": "2026-11-20 10:00 +0000"}
    train_step(tmp_path / "train_step-20261120-h100", environment=h100, only=("jaxmp-bf16", "compile-bf16"))
    lines = step_tables.measured(tmp_path)
    assert lines[0].startswith("A train step on 1 × H100: step time · peak memory, relative to torch.compile AMP")
    assert shown(lines) == {
        "": ["GPT-2 124M, 16×1024"],
        "jaxmp, bf16": ["0.90 · 0.75"],
        "torch.compile AMP, bf16": ["31.0 ms · 7.8 GiB"],
    }
    # The newest result of the H200 lacks torch.compile, so it has no table.
    assert not any("H200" in line for line in lines)


def test_each_model_has_a_column_from_the_newest_run_that_measured_it(tmp_path):
    older = {**GPU, "date": "2026-11-20 10:00 +0000"}
    train_step(tmp_path / "train_step-20261120", environment=older, only=("hand-bf16", "compile-bf16"))
    train_step(tmp_path / "train_step-20261121", model="bert", only=("jaxmp-bf16", "compile-bf16"))
    assert shown(step_tables.measured(tmp_path)) == {
        "": ["BERT-Base, 64×512", "GPT-2 124M, 16×1024"],
        "jaxmp, bf16": ["0.90 · 0.75", "–"],
        "JAX by hand, bf16": ["–", "0.87 · 1.50"],
        "torch.compile AMP, bf16": ["31.0 ms · 7.8 GiB", "31.0 ms · 7.8 GiB"],
    }
    table, text = cells(tmp_path)
    assert table["step time, relative to torch.compile AMP"] == {"resnet50": "", "bert": "✓ 0.900 (≤ 0.93)", "gpt2": ""}
    assert "[train_step-20261120](" in text and "[train_step-20261121](" in text


def test_the_readme_states_the_smallest_and_the_largest_ratio_of_the_newest_device(tmp_path):
    assert step_tables.sentence(tmp_path) == []
    older = {**GPU, "device": "1 × H100 (gpu)", "date": "2026-11-20 10:00 +0000"}
    train_step(tmp_path / "train_step-20261120", environment=older)
    train_step(tmp_path / "train_step-20261121", only=("jaxmp-bf16", "hand-bf16"))  # lacks torch.compile
    text, _ = step_tables.sentence(tmp_path)
    assert "0.90 to 0.90 times as long" in text
    assert text.endswith("0.75 to 0.75 times the memory (GPT-2 124M; 1 × H100).")


def test_the_block_has_the_sentences_in_front_and_links_to_all_else(tmp_path):
    results = tmp_path / "experiments" / "results"
    (results / "demo").mkdir(parents=True)
    (results / "other").mkdir()
    (results / "other" / "other.md").write_text("# Other\n")
    (results / "tried").mkdir()
    (results / "tried" / "tried.md").write_text("# Tried\n\n- command: python -m tried --smoke\n")
    facts = "".join(f"- {name}: {value}\n" for name, value in GPU.items())
    (results / "demo" / "compare.md").write_text(
        f"# Comparison\n\nAll is well.\n\n{facts}\n## pysource: result\n\n| a |\n"
    )
    sums = results / "gradient_sums"
    sums.mkdir()
    ways = {way: {"error": 0.5 if "hand" in way else 1e-4, "worst": 0.5} for way in gradient_sums.WAYS}
    result = {"case": "embedding", "text": "8 tokens", "half": "bfloat16", "rounding": 0.0, "ways": ways}
    write_json(sums / "gradient_sums.json", {"environment": GPU, "smoke": False, "results": [result]})
    title = "# Errors\n\n" + facts
    (sums / "gradient_sums.md").write_text(f"{title}\n{gradient_sums.table([result], 'bfloat16').markdown()}")
    scaling = results / "loss_scaling"
    scaling.mkdir()
    table_start = (
        "| step | ms | q | r | q | adds |\n| --- | --- | --- | --- | --- | --- |\n| jaxmp.loss_scaling | 1 | 1 | 1 | 1 "
    )
    (scaling / "loss_scaling.md").write_text(
        f"# What loss scaling adds to a train step\n\n{facts}\n"
        f"## mlp, batch 8: ms a step\n\n{table_start}| +0.50 % |\n\n"
        f"## mlp, batch 64: ms a step\n\n{table_start}| -0.10 % |\n"
    )
    first = readme.block(tmp_path)
    assert f"of a step by -0.1 % (mlp, batch 64) to +0.5 % (mlp, batch 8), on {GPU['device']}." in first
    assert "has an error of 50 % in bfloat16" in first and "(docs/measured.md)" in first
    block = readme.measured_block(tmp_path)
    assert "an embedding (8 tokens) has an error of 50 % in bfloat16 with Flax's `dtype=`, and of 0.01 % wi" in block
    page = readme.gradient_sums_block(tmp_path)
    assert page.startswith(
        "![Errors of the gradients of params, by case and method](../experiments/results/gradient_sums/"
    )
    assert "| embedding | 8 tokens | 0.01 % (× 0.5) |" in page and f"{GPU['device']}; {GPU['versions']}; 2026" in page
    assert re.search(r"`make gpu` measures.*All is well\..*\| a \|", block, re.DOTALL)
    assert "- [other](../experiments/results/other/other.md)" in block.splitlines()
    assert "| mlp, batch 8 | +0.50 % | – | – | – |" in block.splitlines()
