"""Sentences and figures that the demo prints, from known numbers. test_comparison.py has the others."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from experiments import compare
from experiments.comparison import outcomes, report
from experiments.comparison.outcomes import BASELINE, Outcome
from experiments.report.progress import Progress
from experiments.training.experiment import Experiment

WHERE = {"device": "1 × cpu", "versions": "jax 1", "date": "2026-11-21 10:00 +0000", "command": "python -m some"}
ROOT = Path(__file__).resolve().parents[3]


def ended(loss: float, accuracy: float, policy="mixed_float16", scale="none", zeros=0.0, failure="") -> Outcome:
    """Return an outcome with one seed."""
    return Outcome(
        policy, scale, test=[{"loss": loss, "accuracy": accuracy}], curves=[[loss]], skipped=[3], final_scale=[8.0],
        failure=failure, milliseconds=[1.0], flops={"float32" if policy == "float32" else "float16": 1},
        zero_activations=zeros, zero_params=0.0625,
    )  # fmt: skip


FLOAT32 = ended(2.0, 0.75, "float32")
FAILED = ended(math.nan, math.nan, failure="the gradient of 'w' is nan")


@pytest.mark.parametrize(
    ("others", "metric", "sentences"),
    [
        (
            [ended(2.3, 0.7, zeros=0.686), ended(2.5, 0.7, "float16", zeros=0.2)],
            "loss",
            "mixed_float16 without scaling and float16 without scaling end 0.30 to 0.50 above float32. "
            "20 to 69 % of their activation gradients became zero.",
        ),
        (
            [ended(2.0, 0.72, zeros=0.004)],
            "accuracy",
            "mixed_float16 without scaling ends 3.00 points below float32. "
            "0 % of its activation gradients became zero.",
        ),
        ([ended(2.0014, 0.75)], "loss", "mixed_float16 without scaling ends within 0.002 of float32."),
        ([ended(1.9, 0.75)], "loss", "mixed_float16 without scaling ends within 0.100 of float32."),
        ([ended(2.0, 0.7488)] * 2, "accuracy", "All other variants end within 0.12 points of float32."),
        (
            [FAILED, ended(math.inf, 0.1, "float16", "dynamic")],
            "loss",
            "mixed_float16 without scaling and float16 with dynamic scaling did not stay finite.",
        ),
    ],
)
def test_the_conclusion_states_differences_to_float32_and_zero_gradients(others, metric, sentences):
    start = {"loss": "held-out loss of 2.00", "accuracy": "held-out accuracy of 75.0 %"}[metric]
    conclusion = report.conclusion("digits", [FLOAT32, *others], metric)
    assert conclusion == f"On digits, float32 ends at a {start}. {sentences}"


def test_the_table_has_the_figures_of_each_variant_and_differences_to_float32():
    (table,) = report.tables("digits", [FLOAT32, ended(1.75, 0.7, scale="dynamic", zeros=0.5)], tensor_cores=False)
    assert table.rows == [
        ("float32", "none", "2.000", "75.00", "", "", "", "", "3", "8"),
        ("mixed_float16", "dynamic", "1.750", "70.00", "-0.250", "-5.00", "50.00", "6.25", "3", "8"),
    ]


@pytest.mark.parametrize(
    ("results", "tensor_cores", "lesson"),
    [
        ([[FLOAT32, ended(2.0, 0.75)]], True, "Safe here, as good as float32: mixed_float16 without scaling."),
        ([[FLOAT32, FAILED]], True, "Worse than float32, or not finite: mixed_float16 without scaling."),
        (
            [[FLOAT32, ended(2.0, 0.75)], [FAILED, FLOAT32]],
            False,
            "float32 itself did not stay finite on task 1, so there is nothing to compare with.",
        ),
    ],
)
def test_the_last_sentence_names_policies_only_if_float32_is_finite(results, tensor_cores, lesson):
    named = {f"task {n}": of_task for n, of_task in enumerate(results)}
    assert report.takeaway(named, dict.fromkeys(named, "loss"), tensor_cores) == lesson


def test_the_last_lines_of_a_comparison_say_why_a_run_stopped_and_where_and_how_long_it_ran(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compare, "environment", lambda: WHERE)
    monkeypatch.setattr(compare, "picture", lambda *_: None)
    compare.report({"digits": [FLOAT32, FAILED]}, tmp_path, 83.6, ["digits of scikit-learn"])
    stopped, where, *_ = capsys.readouterr().out.splitlines()[-5:]
    assert stopped == "mixed_float16 stopped: the gradient of 'w' is nan"
    assert where == "1 × cpu, jax 1, 84 s"
    lines = (tmp_path / "compare.md").read_text().splitlines()
    assert "- data: digits of scikit-learn" in lines and "- duration: 84 s" in lines


# A loss whose gradient at each output of the product is one of these slopes, each of which occurs twice. In float16
# 2**-25 becomes zero below a loss scale of 2, and 2**-30 below a loss scale of 64.
SLOPES = np.repeat(np.array([1.0, 2.0**-10, 2.0**-25, 2.0**-30], np.float32), 2)


def experiment_of(variant: tuple[str, str]) -> Experiment:
    """Return a task with eight weights that count. Each falls by 0.25 in a step if its gradient is not zero."""
    policy, scale_text = variant
    scale = jaxmp.NoOpLossScale() if scale_text == "none" else jaxmp.StaticLossScale(float(scale_text))
    tx = jaxmp.loss_scaling(optax.chain(optax.scale_by_sign(), optax.scale(-0.25)), scale)

    def plain_loss(params, model_state, batch, rng):
        outputs = batch["x"] @ params["w"]
        return (outputs * SLOPES).sum(), model_state, {"accuracy": (outputs < 1).mean()}

    loss_fn = plain_loss if policy == "float32" else jaxmp.autocast(plain_loss, policy)
    batch = {"x": jnp.tile(jnp.eye(8)[0], (2, 1))}  # only the first row of the weights counts
    return Experiment(
        loss_fn=loss_fn,
        step=jaxmp.make_train_step(loss_fn),
        eval_step=jax.jit(lambda state, batch: {"loss": jnp.float32(0), **loss_fn(state.params, None, batch, None)[2]}),
        init_params=lambda seed: {"w": jnp.ones((8, 8))},
        create=lambda params: jaxmp.TrainState.create(params=params, tx=tx),
        train_batches=lambda seed: itertools.repeat(batch),
        test_batches=lambda: [batch],
        steps=2,
        batch_size=2,
        precision={},
    )


def test_a_comparison_states_the_zero_gradients_and_the_accuracy_that_follow_from_them():
    variants = [BASELINE, ("mixed_float16", "none"), ("mixed_float16", "16"), ("mixed_float16", "1024")]
    with Progress("", 100) as progress:
        compared = outcomes.compare({variant: experiment_of(variant) for variant in variants}, [0], 1, progress, "")
    assert [outcome.zero_activations for outcome in compared] == [0, 2 / 4, 1 / 4, 0]
    assert [outcome.zero_params for outcome in compared] == [0, 2 / 4, 1 / 4, 0]
    assert report.conclusion("slopes", compared, "accuracy") == (
        "On slopes, float32 ends at a held-out accuracy of 100.0 %. mixed_float16 without scaling and mixed_float16 "
        "with 16 scaling end 25.00 to 50.00 points below float32. 25 to 50 % of their activation gradients became "
        "zero. mixed_float16 with 1024 scaling ends within 0.01 points of float32."
    )


@pytest.mark.parametrize("page", ["README.md", "Makefile", "experiments/compare.py"])
def test_each_page_states_the_same_time_for_the_demo_as_the_recorded_demo_took(page):
    sentences = re.findall(r"demo.*(\d+) to (\d+) minutes on two cores", (ROOT / page).read_text())
    assert sentences == [("3", "6")]
    recorded = json.loads((ROOT / "experiments/results/demo/compare.json").read_text())
    assert 3 * 60 < recorded["seconds"] < 6 * 60
