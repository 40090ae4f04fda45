"""A comparison of known numbers: rule, tables, conclusion and picture."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re

import jax.numpy as jnp
import optax
import pytest
import rich.console
from PIL import Image

import jaxmp
from experiments import compare, image_classification, language_modeling, masked_lm
from experiments.comparison import report as comparison_report
from experiments.comparison.outcomes import RESERVED, Outcome, train
from experiments.comparison.picture import picture
from experiments.report.progress import Progress
from experiments.training import loop
from experiments.training.experiment import Experiment


def outcome(policy="mixed_float16", loss_scale="none", **changes) -> Outcome:
    values = {
        "test": [{"loss": 2.0, "accuracy": 0.5}, {"loss": 2.2, "accuracy": 0.52}],
        "curves": [[3.0, 2.5, 2.0], [3.0, 2.6, 2.2]],
        "skipped": [0, 0],
        "final_scale": [1.0, 1.0],
        "milliseconds": [10.0, 11.0, 9.0],
        "step_bytes": 100 * 2**20,
        "flops": {"float16": 100},
        "zero_activations": 0.0,
        "zero_params": 0.0,
    }
    return Outcome(policy, loss_scale, **{**values, **changes})


BASELINE = outcome("float32", flops={"float32": 100})
GOOD = outcome(milliseconds=[4.0, 5.0, 4.5], step_bytes=60 * 2**20)
WORSE = outcome(
    test=[{"loss": 2.5, "accuracy": 0.47}, {"loss": 2.7, "accuracy": 0.49}], zero_activations=0.77, skipped=[1, 2]
)
LOST = outcome(
    "float16",
    test=[{"loss": math.nan, "accuracy": math.nan}] * 2,
    curves=[[], []],
    failure="training must be finite",
    zero_activations=0.9,
)


def met(judged: Outcome, tensor_cores: bool = True) -> list[bool | None]:
    return [criterion.met for criterion in comparison_report.criteria(judged, BASELINE, tensor_cores)]


def test_a_fast_small_and_exact_variant_meets_all_criteria_and_each_can_fail_alone():
    assert met(GOOD) == [True] * 5
    assert [c.text for c in comparison_report.criteria(GOOD, BASELINE, True)] == ["2.22×", "40%", "0.00", "100%", ""]

    for changes, failing in [
        ({"milliseconds": [5.0, 5.0, 5.0]}, 0),  # exactly twice as fast is not more than twice
        ({"step_bytes": 71 * 2**20}, 1),
        ({"step_bytes": None}, 1),
        ({"test": [{"loss": 2.0, "accuracy": 0.494}, {"loss": 2.2, "accuracy": 0.514}]}, 2),
        ({"flops": {"float16": 80, "float32": 20}}, 3),
        ({"failure": "stopped"}, 4),
    ]:
        fast = {"milliseconds": [4.0, 4.0, 4.0], "step_bytes": 60 * 2**20}
        assert met(outcome(**{**fast, **changes})) == [i != failing for i in range(5)]
    # nan meets neither criterion.
    assert met(LOST)[2] is False and met(LOST)[4] is False


def test_tables_have_the_columns_that_are_promised_and_a_row_for_each_variant():
    tables = comparison_report.tables("digits", [BASELINE, GOOD, WORSE, LOST], tensor_cores=True)
    expected = (comparison_report.RESULT_COLUMNS, comparison_report.COST_COLUMNS, comparison_report.RULE_COLUMNS)
    assert tuple(table.columns for table in tables) == expected
    for table in tables:
        assert [row[:2] for row in table.rows] == [(o.policy, o.loss_scale) for o in (BASELINE, GOOD, WORSE, LOST)]
        assert all(len(row) == len(table.columns) for row in table.rows)
    result, cost, rule = (dict(zip(table.columns, table.rows[2], strict=True)) for table in tables)
    assert result["held-out loss"] == "2.600 ± 0.141"
    assert result["Δ loss"] == "+0.500" and result["Δ points"] == "-3.00"
    assert result["zero gradients %: activations"] == "77.00" and result["skipped"] == "3"
    assert cost["ms/step"] == "10" and cost["step MiB"] == "100.0" and cost["device MiB"] == "–"
    assert rule["accuracy loss < 0.5"] == "✗ 3.00" and rule["accepted"] == "no"
    assert tables[2].rows[1][-1] == "yes"
    bound = outcome(device_bytes=2**30, device_bytes_is_bound=True)  # another variant reached this peak before
    assert comparison_report.tables("digits", [BASELINE, bound], True)[1].rows[1][-1] == "≤ 1024.0"


def test_without_tensor_cores_costs_are_not_shown_and_the_table_says_so():
    assert met(GOOD, False) == [None, None, True, None, True] and met(LOST, False)[2::2] == [False, False]
    (table,) = comparison_report.tables("digits", [BASELINE, GOOD, WORSE], tensor_cores=False)
    assert table.columns == comparison_report.RESULT_COLUMNS
    assert "no tensor cores" in table.notes[-1] and table.notes[-1] in table.markdown()
    assert comparison_report.as_json(GOOD, BASELINE, False)["criteria"]["speed-up > 2"] == {
        "measured": "2.22×",
        "met": None,
    }


def test_the_conclusion_names_policies_as_good_as_float32_in_all_tasks():
    scaled = outcome(loss_scale="dynamic")
    results = {"digits": [BASELINE, WORSE, scaled], "pysource": [BASELINE, outcome(), scaled]}
    metrics = {"digits": "loss", "pysource": "loss"}
    assert comparison_report.takeaway(results, metrics, tensor_cores=False) == (
        "Safe here, as good as float32: mixed_float16 with dynamic scaling. "
        "Worse than float32, or not finite: mixed_float16 without scaling. "
        "Run it on a GPU to see the gains in time and memory."
    )


def test_a_table_is_the_same_on_the_terminal_and_in_markdown():
    table = comparison_report.tables("digits", [BASELINE, WORSE], True)[0]
    console = rich.console.Console(file=io.StringIO(), width=200)
    table.show(console)
    shown, markdown = console.file.getvalue(), table.markdown()
    for cell in table.rows[1]:
        assert cell in shown and f" {cell} " in markdown
    assert markdown.startswith("## digits: result\n\n| policy | loss scale |")
    assert markdown.splitlines()[3].startswith("| --- | --- | ---: |")


def test_the_conclusion_says_which_policies_are_worse_by_how_much_and_why_or_not_finite():
    scaled = outcome(loss_scale="dynamic")
    assert comparison_report.conclusion("pysource", [BASELINE, WORSE, scaled], "loss") == (
        "On pysource, float32 ends at a held-out loss of 2.10. mixed_float16 without scaling ends 0.50 above float32. "
        "77 % of its activation gradients became zero. mixed_float16 with dynamic scaling ends within 0.001 of float32."
    )

    bf16 = outcome("mixed_bfloat16", flops={"bfloat16": 1}, test=[{"loss": 2.0, "accuracy": 0.501}] * 2)
    assert comparison_report.conclusion("digits", [BASELINE, bf16], "accuracy") == (
        "On digits, float32 ends at a held-out accuracy of 51.0 %. mixed_bfloat16 ends within 0.90 points of float32."
    )

    variants = [outcome(loss_scale="dynamic"), outcome("mixed_bfloat16")]
    assert comparison_report.conclusion("digits", [BASELINE, *variants], "accuracy").endswith(
        " All other variants end within 0.01 points of float32."
    )

    conclusion = comparison_report.conclusion("pysource", [BASELINE, GOOD, LOST], "loss")
    assert conclusion.endswith("ends within 0.001 of float32. float16 without scaling did not stay finite.")
    conclusion = comparison_report.conclusion("pysource", [LOST, GOOD], "loss")
    assert conclusion == "On pysource, float32 itself did not stay finite."
    # A difference within the spread of the seeds is not called worse.
    noisy = outcome("float32", flops={}, test=[{"loss": 1.0, "accuracy": 0.5}, {"loss": 3.0, "accuracy": 0.5}])
    assert "above" not in comparison_report.conclusion("pysource", [noisy, WORSE], "loss")


def test_the_picture_is_drawn_and_small(tmp_path):
    outcomes = [BASELINE, GOOD, WORSE, LOST]
    metrics = {"pysource": "loss", "digits": "accuracy"}
    picture({"pysource": outcomes, "digits": outcomes}, metrics, tmp_path / "compare.png", "a device")
    with Image.open(tmp_path / "compare.png") as image:
        assert image.width > 1000 and len(image.convert("L").getcolors()) > 20
    assert (tmp_path / "compare.png").stat().st_size < 300_000


def test_the_progress_bar_shows_whole_fields_on_one_line_of_the_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # no progress bar on a dumb terminal
    make = rich.console.Console
    for width in [80, 60, 200]:
        console = make(file=io.StringIO(), width=width, force_terminal=True)
        monkeypatch.setattr(rich.console, "Console", lambda console=console, **_: console)
        fields = "loss 0.0607  accuracy 98.7%  12,345 examples/s  scale 32768  skipped 0  input wait 0.1%"
        progress = Progress("image_classification", 2000)
        progress.advance(5, fields)
        with console.capture() as capture:
            for renderable in progress._bar.get_renderables():
                console.print(renderable)
        first, second = re.sub(r"\x1b\[[\d;]*m", "", capture.get()).splitlines()
        assert fields.startswith(second) and (second == fields or fields[len(second) :].startswith("  "))
        assert len(second) <= width and ("input wait" in second) == (width > 90)
        assert len(first) <= width and "5/2000" in first


def test_variants_cross_float16_with_the_loss_scales_and_the_demo_has_five():
    variants = compare.variants(("mixed_float16", "mixed_bfloat16", "O3@static:8", "float32"), ("none", "dynamic"))
    assert variants == [
        ("float32", "none"),
        ("mixed_float16", "none"),
        ("mixed_float16", "dynamic"),
        ("mixed_bfloat16", "none"),
        ("O3", "static:8"),
    ]

    text, digits = compare.plan(compare.Config(demo=True))
    assert (text.task, len(text.seeds)) == ("pysource", 1)
    assert (digits.task, len(digits.seeds)) == ("digits", 3)
    for part in (text, digits):
        assert compare.variants(part.policies, part.loss_scales) == [
            ("float32", "none"),
            ("mixed_float16", "none"),
            ("mixed_float16", "dynamic"),
            ("mixed_bfloat16", "none"),
            ("float16", "none"),
        ]


def test_a_task_takes_the_flags_of_its_script_except_those_that_the_comparison_sets():
    for task in ["gpt2", "bert"]:
        config = compare.task_flags(
            compare.Config(task=task, flags=(("dataset=some.txt",),), steps=7, remat="attention")
        )
        assert (config.dataset, config.steps, config.remat) == ("some.txt", 7, "attention")
        assert getattr(config, "model", "bert") == task

    for task, flag in [
        ("cifar10", "dataset=digits"),  # the default of the script
        ("pysource", "dataset=some.txt"),
        ("gpt2", "model=next_token"),
        ("bert", "override=head=float32"),
        ("digits", "steps=3"),
        ("digits", "--keep=1"),
        ("digits", "resume"),
    ]:
        name = flag.lstrip("-").partition("=")[0]
        with pytest.raises(ValueError, match=f"--flags sets the task's flags, but --{name} is set by the comparison"):
            compare.task_flags(compare.Config(task=task, flags=((flag,),)))

    scripts = (image_classification, language_modeling, masked_lm)
    flags = {field.name for script in scripts for field in dataclasses.fields(script.Config)}
    assert flags >= loop.MAY_CHANGE and flags >= RESERVED


def test_training_that_stops_counts_as_nan_and_the_comparison_continues():
    class StopsAtTheThirdStep:
        calls = 0

        def __call__(self, state, batch):
            self.calls += 1
            if self.calls == 3:
                raise jaxmp.NonFiniteTrainingError("gradients of 'w'")
            return state, {"loss": jnp.float32(5.0), "accuracy": jnp.float32(0.1)}

    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8))
    experiment = Experiment(
        loss_fn=None,
        step=StopsAtTheThirdStep(),
        eval_step=None,
        init_params=lambda seed: {"w": jnp.ones(2)},
        create=lambda params: jaxmp.TrainState.create(params=params, tx=tx),
        train_batches=lambda seed: itertools.repeat({"x": jnp.ones(1)}),
        test_batches=lambda: [],
        steps=10,
        batch_size=1,
        precision={},
    )
    stopped_outcome = Outcome("float16", "static:8")
    with Progress("", 10) as progress:
        train(experiment, experiment, 0, stopped_outcome, progress, "")
    assert stopped_outcome.failure == "gradients of 'w'"
    assert stopped_outcome.curves == [[5.0, 5.0]] and math.isnan(stopped_outcome.test[0]["loss"])
    assert (stopped_outcome.skipped, stopped_outcome.final_scale) == ([0], [8.0])
