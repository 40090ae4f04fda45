"""Sentences and figures that the demo prints, and that the README and docs/measured.md state, from known numbers.

test_comparison.py and test_readme.py have the others.
"""

from __future__ import annotations

import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from experiments import compare
from experiments.benchmarks import loss_scaling
from experiments.benchmarks.train_step.results import Results
from experiments.comparison import outcomes, report
from experiments.comparison.outcomes import BASELINE, Outcome
from experiments.report import headline, readme, step_tables
from experiments.report.json_files import write_json
from experiments.report.progress import Progress
from experiments.training.experiment import Experiment

WHERE = {"device": "1 × cpu", "versions": "jax 1", "date": "2026-11-21 10:00 +0000", "command": "python -m some"}
MIB = 2**20


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
    sentences = re.findall(r"demo.*(\d+) to (\d+) minutes on two cores", (readme.ROOT / page).read_text())
    assert sentences == [("3", "6")]
    recorded = json.loads((readme.ROOT / "experiments/results/demo/compare.json").read_text())
    assert 3 * 60 < recorded["seconds"] < 6 * 60


# The README's section "Measured" and docs/measured.md.


def write_costs(folder, device: str, steps: dict[str, dict[str, float]]) -> None:
    """Write a result of the benchmark loss_scaling, with the ratios of each step's variants."""
    tables = [
        loss_scaling.table(
            {"model": step, "variants": {name: {"ms": [9.0, 10.0, 11.0], "ratio": [ratio] * 3}
             for name, ratio in ratios.items()}}
        )
        for step, ratios in steps.items()
    ]  # fmt: skip
    lines = "".join(f"- {name}: {value}\n" for name, value in {**WHERE, "device": device}.items())
    folder.mkdir()
    text = "\n".join(table.markdown() for table in tables)
    (folder / "loss_scaling.md").write_text(f"# What loss scaling adds to a train step\n\n{lines}\n{text}")


def test_the_cost_of_loss_scaling_names_the_steps_and_devices_of_the_smallest_and_the_largest_figure(tmp_path):
    write_costs(
        tmp_path / "loss_scaling",
        "a CPU",
        {
            "mlp, batch 8": {"no scaling": 1.0, "no scaling, again": 0.99, "jaxmp.loss_scaling": 1.0625},
            "mlp, batch 64": {"jaxmp.loss_scaling": 1.01, "jmp.DynamicLossScale": 1.2, "flax DynamicScale": 1.5},
        },
    )
    write_costs(tmp_path / "loss_scaling_gpt2", "a GPU", {"gpt2, batch 1": {"jaxmp.loss_scaling": 0.75}})
    assert readme.cost_of_scaling(tmp_path) == (
        "Loss scaling changes the time of a step by -25.0 % (gpt2, batch 1) to +6.2 % (mlp, batch 8), on a CPU and a "
        "GPU."
    )
    assert readme.cost_table(tmp_path)[2:] == [
        "| mlp, batch 8 | +6.25 % | – | – | -1.00 % |",
        "| mlp, batch 64 | +1.00 % | +20.00 % | +50.00 % | – |",
        "| gpt2, batch 1 | -25.00 % | – | – | – |",
    ]


def test_a_row_is_named_below_the_table_if_a_kernel_takes_more_than_half_of_its_time(monkeypatch):
    def steps(kernel_ms: float) -> Results:
        train = {"kernel_ms": 10.0, "kernels": [["other", 1.0, 1], ["gemm", kernel_ms, 2]], "ms": [9.0, 10.0, 11.0]}
        return Results({"model": "bert"}, {"hand-bf16": {"train": train}}, {}, {})

    for kernel_ms, notes in [
        (5.0, []),
        (6.0, ["BERT-Base, JAX by hand, bf16 is not compared, because a single kernel takes most of its time: `gemm`, "
               "60%."]),
    ]:  # fmt: skip
        monkeypatch.setattr(step_tables, "steps_of", lambda source, model, kernel_ms=kernel_ms: steps(kernel_ms))
        assert step_tables._dominant_kernels({"bert": None}) == notes


def test_the_option_for_products_outside_of_triton_is_written_below_a_table_with_such_a_row(monkeypatch):
    monkeypatch.setattr(step_tables, "by_device", lambda results: {"1 × H200 (gpu)": {}})
    for label, has_note in [("jaxmp, bf16, no product in Triton", True), ("jaxmp, bf16", False)]:
        monkeypatch.setattr(step_tables, "_measured_table", lambda by_model, label=label: [f"| {label} | 1 |"])
        option = 'make_train_step(…, compiler_options={"xla_gpu_enable_triton_gemm": False})'
        assert (f"No product in Triton: `{option}`." in step_tables.measured(None)) == has_note


def test_memory_saved_relative_to_a_compiled_float32_step_is_stated_below_the_goals(tmp_path):
    variants = {
        "jaxmp-bf16": {"label": "jaxmp, bf16", "peak": 11_000 * MIB, "half": 1.0},
        "hand-fp32": {"label": "JAX by hand, fp32", "peak": 44_000 * MIB, "half": 0.0},
    }
    (tmp_path / "compile_only").mkdir()
    results = [{"name": "bert", "full": True, "variants": variants}]
    write_json(tmp_path / "compile_only" / "compile_only.json", {"environment": WHERE, "results": results})
    lines, notes = headline.lines(tmp_path, tmp_path)
    assert "If float32 is compiled too, without cuDNN's workspaces, the memory saved is BERT-Base 75%." in lines
    # Relative to the peaks that were measured once: 51,175 MiB for float32 and 13,938 MiB for torch.compile.
    (row,) = [line for line in lines if line.startswith("| memory saved, relative to float32")]
    assert f"{1 - 11_000 / 51_175:.0%}ᶜʳ" in row
    assert "in MiB for torch.compile AMP and for float32 in plain JAX: BERT-Base 13,938 and 51,175." in notes[1]
