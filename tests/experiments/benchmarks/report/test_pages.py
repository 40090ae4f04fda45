"""The figures of the README and the docs: as the script writes them, and from known numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from experiments.benchmarks.report import gpu_steps, pages, predictions
from experiments.benchmarks.report.marked_text import read_marked, write_marked
from experiments.benchmarks.train_step.results import Results
from experiments.report.json_files import write_json
from jaxmp.inspect._roofline import roofline

MIB = 2**20
STEPS = {  # ms, MiB
    "jaxmp-bf16": (27.0, 6000), "jaxmp-fp16": (28.0, 6100), "jaxmp-fp16-constant": (28.0, 6100),
    "jaxmp-bf16-remat": (30.0, 5000), "autocast-bf16": (27.0, 6000), "unprepared-bf16": (27.0, 12000),
    "hand-bf16": (26.0, 12000), "compile-bf16": (30.0, 8000), "compile-fp16": (33.0, 8000),
    "jaxmp-tf32": (81.0, 20000), "jaxmp-fp32": (297.0, 20000), "hand-fp32": (330.0, 40000),
}  # fmt: skip
VARIANTS = {
    "jaxmp-bf16": {"label": "jaxmp, bf16", "peak": 11_000 * MIB, "half": 0.998},
    "jaxmp-bf16-remat": {"label": "remat", "peak": 9_000 * MIB, "half": 1.0},
    "hand-bf16": {"label": "JAX by hand, bf16", "peak": 22_000 * MIB, "half": 1.0},
    "hand-fp32": {"label": "JAX by hand, fp32", "peak": 44_000 * MIB, "half": 0.0},
}
NOTHING = Results({"model": "gpt2"}, {}, {}, {})


@pytest.mark.parametrize(("page", "block"), [(page, block) for page in pages.BLOCKS for block in pages.BLOCKS[page]])
def test_each_page_has_what_the_script_writes(page, block):
    text = read_marked(pages.ROOT / page, block, pages.COMMAND)
    assert text == pages.text_of(page, block), f"run {pages.COMMAND}"


def test_only_text_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "README.md"
    begin, end = "<!-- results: written by `make it` -->", "<!-- /results -->"
    page.write_text(f"before\n{begin}\n\nold\n\n{end}\nafter\n")
    write_marked(page, "results", "make it", "new\n")
    assert page.read_text() == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit, match="must have"):
        write_marked(page, "results", "make it", "")


def test_the_error_that_roofline_states_is_the_largest_on_record_and_orders_all_pairs_beyond_it():
    records = predictions.on_record(pages.newest("compile_only").data["results"])
    assert len(records) == len(predictions.TIMES)
    largest = max(abs(record.error) for record in records)
    assert roofline.ERROR - 0.01 < largest <= roofline.ERROR
    ties = predictions.reversed_pairs(records)
    assert all(predictions.apart(*pair) <= roofline.ERROR for pair in ties)


def measured(rows: dict[str, tuple[float, int]], together=None, **losses: float) -> Results:
    """Return train steps of GPT-2 with these milliseconds and peaks in MiB.

    The rows took turns in these groups, by default all together.
    """
    flops = {"bfloat16": 995, "float32": 5}
    alone = {key: {"train": {"peak": mib * MIB, "flops": flops}} for key, (_, mib) in rows.items()}
    turns = []
    for keys in together or [rows]:
        times = {key: [rows[key][0], rows[key][0] + 1, 2 * rows[key][0]] for key in keys}
        turns.append(
            {key: {"milliseconds": ms, "loss": losses.get(key.replace("-", "_"), 1.0)} for key, ms in times.items()}
        )
    return Results({"model": "gpt2"}, alone, {"train": turns}, {})


def compiled(name: str = "gpt2"):
    return [{"name": name, "full": True, "variants": VARIANTS}]


def cells(steps: Results, results=(), groups=()) -> dict[str, str]:
    """Return the cells of GPT-2 in the table of goals, by row."""
    results = results or compiled()
    lines = gpu_steps.goals_table({"gpt2": steps}, results, groups).partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["", gpu_steps.MODELS["gpt2"]]
    return dict(rows[2:])


def test_a_measured_step_gives_ratios_with_their_goals():
    assert cells(measured(STEPS), compiled()) == {
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
        "largest batch, without → with remat": "–",
    }


def test_compiled_steps_fill_the_rows_of_memory_and_are_marked():
    bert = {"bert": Results({"model": "bert"}, {}, {}, {})}
    text = gpu_steps.goals_table(bert, compiled("bert"), [])
    for row in (
        "| peak memory, relative to torch.compile AMP | ✓ 0.789ᶜʳ (≤ 1) |",
        "| peak memory with remat, relative to torch.compile AMP | ✗ 0.646ᶜʳ (≤ 0.45) |",
        "| memory saved, relative to float32 | ✓ 79%ᶜʳ (≥ 70%) |",
        "| FLOPs of products in half on tensor cores | ✓ 99.8%ᶜ (≥ 99%) |",
    ):
        assert row in text.splitlines()
    assert (
        "without cuDNN's workspaces, the memory saved is BERT-Base 75%. By hand, bfloat16 saves BERT-Base 50%:" in text
    )
    assert "BERT-Base 13,938 and 51,175" in gpu_steps.recorded_peaks()


def test_the_memory_saved_is_that_of_the_compiled_steps():
    light = {**VARIANTS, "jaxmp-bf16": {**VARIANTS["jaxmp-bf16"], "peak": 6_600 * MIB}}  # 85% less than 44,000 MiB
    results = [*compiled("gpt2"), {"name": "bert", "full": True, "variants": light}]
    steps = {"bert": Results({"model": "bert"}, {}, {}, {}), "gpt2": measured(STEPS)}
    text = gpu_steps.memory_sentence(steps, results, "an H200")
    assert "memory: BERT-Base 50 %, GPT-2 124M 50 %. This is the part of the precision." in text
    assert "own models save BERT-Base 85 %, GPT-2 124M 75 %: most of" in text and "compiled for an H200, not" in text


def test_the_readme_begins_with_the_recorded_figures_of_unchanged_code():
    with_row = []
    for result in pages.all_of("train_step"):
        models = result.data["models"].values()
        if any("milliseconds" in of_model["train"].get("unprepared-bf16", {}) for of_model in models):
            with_row.append(result)
    newest = with_row[0]
    recorded = newest.data["models"]["gpt2"]
    (rounds,) = (turns for turns in recorded["turns"]["train"] if "unprepared-bf16" in turns)
    times = {row: np.array(rounds[row]["milliseconds"]) for row in ("unprepared-bf16", "hand-bf16", "compile-bf16")}
    peaks = {row: recorded["train"][row]["peak"] for row in (*times, "hand-fp32")}
    expected = []
    for row in ("hand-bf16", "compile-bf16"):
        expected += [np.median(times["unprepared-bf16"] / times[row]), peaks["unprepared-bf16"] / peaks[row]]
    saved = [100 * (1 - peaks[row] / peaks["hand-fp32"]) for row in ("unprepared-bf16", "hand-bf16")]
    first, *_ = read_marked(pages.ROOT / "README.md", "results", pages.COMMAND).split("\n\n")
    assert first.startswith("`jaxmp.autocast` of unchanged float32 code (GPT-2 124M;")
    assert f"/{newest.file.parent.name}/" in first
    assert re.findall(r"\d\.\d\d(?= times)", first) == [f"{ratio:.2f}" for ratio in expected]
    assert re.findall(r"\d+(?= %)", first) == [f"{share:.0f}" for share in saved]


def test_the_readme_says_which_part_of_the_saved_memory_is_the_precision():
    variants = [result["variants"] for result in pages.newest("compile_only").data["results"]]
    text = read_marked(pages.ROOT / "README.md", "results", pages.COMMAND).split("\n\n")[-1]
    by_hand, ours = text.split("This is the part of the precision.")
    for sentence, row in ((by_hand, "hand-bf16"), (ours, "jaxmp-bf16")):
        saved = [1 - of_model[row]["peak"] / of_model["hand-fp32"]["peak"] for of_model in variants]
        assert sorted(re.findall(r"\d+(?= %)", sentence)) == sorted(f"{100 * share:.0f}" for share in saved)


def test_compiled_peaks_are_compared_with_measured_peaks_if_there_are_any():
    table = cells(measured({key: STEPS[key] for key in ("compile-bf16", "hand-fp32")}), compiled())
    assert table["peak memory, relative to torch.compile AMP"] == "✗ 1.375ᶜ (≤ 1)"  # 11,000 / 8,000 MiB
    assert table["memory saved, relative to float32"] == "✗ 72%ᶜ (≥ 75%)"  # relative to 40,000 MiB


def test_rows_that_took_no_turns_together_or_whose_loss_is_not_finite_give_no_ratio():
    apart = measured(STEPS, together=[("jaxmp-bf16", "jaxmp-tf32"), ("compile-bf16", "autocast-bf16")])
    table = cells(apart, compiled())
    assert "step time, relative to torch.compile AMP" not in table
    assert "step time of autocast, relative to a policy" not in table
    assert table["speed-up over TF32"] == "✗ 3.00 (≥ 3.2)"
    table = cells(measured(STEPS, jaxmp_fp16=float("nan"), jaxmp_bf16=2.5), compiled())
    assert "step time of fp16 with dynamic scaling, relative to a constant scale" not in table


def test_the_largest_batches_are_those_of_the_benchmark_remat():
    rows = {"none": {"largest": {"batch": 700}}, "attention": {"largest": {"batch": 1200}}}
    group = {"model": "gpt2", "policy": "mixed_bfloat16", "setting": {"target": "an H200"}, "rows": rows}
    assert cells(NOTHING, compiled(), [group])["largest batch, without → with remat"] == "700 → 1200ᶜ"


def test_the_table_of_steps_compares_the_rows_of_one_run_and_leaves_out_one_long_kernel():
    steps = measured({key: STEPS[key] for key in ("jaxmp-bf16", "hand-bf16", "compile-bf16")})
    steps.alone["hand-bf16"]["train"] |= {"kernel_ms": 10.0, "kernels": [["other", 1.0, 1], ["gemm", 6.0, 2]]}
    assert gpu_steps.table({"gpt2": steps}).splitlines()[2:] == [
        "| jaxmp, bf16 | 0.90 · 0.75 |",
        "| JAX by hand, bf16 | not compared: `gemm` takes 60% |",
        "| torch.compile AMP, bf16 | 31.0 ms · 7.8 GiB |",
    ]
    text = gpu_steps.sentence({"gpt2": steps}, "1 × H200")
    assert text.endswith("with torch.compile AMP, and 0.75 times the memory (GPT-2 124M; 1 × H200).")
    text = gpu_steps.sentence({"gpt2": measured({"jaxmp-bf16": STEPS["jaxmp-bf16"]})}, "1 × H200")
    assert text == "No train step was compared with torch.compile AMP on 1 × H200 yet."
    text = gpu_steps.unchanged_sentence({"gpt2": measured({"jaxmp-bf16": STEPS["jaxmp-bf16"]})}, "1 × H200")
    assert text == "Autocast of unchanged code was not measured on 1 × H200 yet."


# Files of results.


def write_result(folder, data, device="a CPU", date="2026-11-21", text="") -> None:
    """Write NAME.md and NAME.json to a folder NAME or NAME-…."""
    folder.mkdir(parents=True)
    facts = {"device": device, "versions": "jax 1", "date": f"{date} 10:00 +0000", "command": "python -m some"}
    name = re.match(r"train_step|tune|loss_scaling", folder.name)[0]
    lines = "".join(f"- {key}: {value}\n" for key, value in facts.items())
    (folder / f"{name}.md").write_text(f"# Title\n\n{lines}\n{text}")
    write_json(folder / f"{name}.json", data)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_each_model_has_the_newest_result_on_the_device_that_was_measured_last(results):
    for date, device, models in [
        ("2026-11-24", "1 × H200 (gpu)", ("bert",)),
        ("2026-11-23", "1 × A100 (gpu)", ("resnet50",)),
        ("2026-11-22", "1 × H200 (gpu)", ("bert", "gpt2")),
    ]:
        write_result(results / f"train_step-{date}", {"models": dict.fromkeys(models)}, device, date)
    chosen = {model: result.file.parent.name for model, result in pages.step_results().items()}
    assert chosen == {"bert": "train_step-2026-11-24", "gpt2": "train_step-2026-11-22"}
    assert pages.device() == "1 × H200"


def test_a_copied_table_states_where_it_comes_from(results):
    write_result(results / "tune-1", {}, date="2026-11-20", text="## Old\n\n| a |\n")
    write_result(results / "tune-2", {}, text="- target: an H200\n\n## New\n\n| b |\n| c |\n\nA note.\n")
    assert pages.copied("tune") == (
        "| b |\n| c |\n\nA note.\n\n"
        "[tune-2](results/tune-2/tune.md): compiled for an H200 on a CPU, not run; jax 1; 2026-11-21; `python -m some`"
    )


def test_the_cost_of_loss_scaling_is_relative_to_the_same_step_without_it(results):
    def step(name, **ratios):
        return {"model": name, "variants": {way: {"ratio": [1.0, ratio, 1.0]} for way, ratio in ratios.items()}}

    mlp = step("mlp", **{"jaxmp.loss_scaling": 1.0625, "jmp.DynamicLossScale": 1.2, "no scaling, again": 0.99})
    gpt2 = step("gpt2", **{"jaxmp.loss_scaling": 0.75})
    write_result(results / "loss_scaling", {"results": [mlp]})
    write_result(results / "loss_scaling_gpt2", {"results": [gpt2]}, "a GPU")
    assert pages.scaling_table().splitlines()[2:] == [
        "| mlp | +6.25 % | +20.00 % | – | -1.00 % |",
        "| gpt2 | -25.00 % | – | – | – |",
    ]
