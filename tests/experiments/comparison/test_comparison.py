"""A comparison of known numbers: training, table and picture."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from experiments import compare, image_classification, language_modeling, masked_lm
from experiments.comparison import report
from experiments.comparison.outcomes import Outcome, train
from experiments.report.progress import UNFINISHED, Progress
from experiments.training import loop
from experiments.training.experiment import Experiment

RUN = {
    "curve": [3.0, 2.5, 2.0], "skipped": 1, "final_scale": 8.0, "failure": "", "ms": 10.0, "step_bytes": 100 * 2**20,
    "zero_activations": 0.0, "zero_params": 0.0,
}  # fmt: skip
TESTS = [{"loss": 2.0, "accuracy": 0.5}, {"loss": 2.2, "accuracy": 0.52}]


def outcome(policy="mixed_float16", loss_scale="none", test=TESTS, **changes) -> Outcome:
    return Outcome(policy, loss_scale, [{**RUN, "seed": i, "test": of, **changes} for i, of in enumerate(test)])


BASELINE = outcome("float32")
FAST = outcome(ms=4.5, step_bytes=60 * 2**20)
WORSE = outcome(test=[{"loss": 2.5, "accuracy": 0.47}, {"loss": 2.7, "accuracy": 0.49}], zero_activations=0.77)
LOST = outcome(
    "float16", test=[{"loss": math.nan, "accuracy": math.nan}] * 2, curve=[], failure="training must be finite"
)


def test_the_table_has_a_row_for_each_variant_and_no_costs_without_tensor_cores():
    table = report.table("digits", [BASELINE, FAST, WORSE, LOST], tensor_cores=True)
    assert dict(zip(table.columns, table.rows[2], strict=True)) == {
        "policy": "mixed_float16", "loss scale": "none", "seeds": "2", "held-out loss": "2.600 ± 0.141",
        "accuracy %": "48.00 ± 1.41", "Δ loss": "+0.500", "Δ points": "-3.00", "zero gradients %: activations": "77.00",
        "params": "0.00", "skipped": "2", "final scale": "8",
        "ms/step": "10", "speed-up": "1.00", "step MiB": "100.0", "memory saved": "0%",
    }  # fmt: skip
    assert table.rows[1][-4:] == ("4.5", "2.22", "60.0", "40%")
    table = report.table("digits", [BASELINE, FAST], tensor_cores=False)
    assert table.columns == report.COLUMNS and "no tensor cores" in table.notes[-1]


def test_a_task_takes_the_flags_of_its_script_except_those_that_the_comparison_sets():
    for task in ["gpt2", "bert"]:
        flags = (("dataset=some.txt",),)
        config = compare.task_flags(compare.Config(task=task, flags=flags, steps=7, remat="attention"))
        assert (config.dataset, config.steps, config.remat) == ("some.txt", 7, "attention")
    for task, flag in [("cifar10", "dataset=digits"), ("gpt2", "model=next_token"), ("digits", "steps=3")]:
        name = flag.partition("=")[0]
        with pytest.raises(ValueError, match=f"--flags sets the task's flags, but --{name} is set by the comparison"):
            compare.task_flags(compare.Config(task=task, flags=((flag,),)))
    scripts = (image_classification, language_modeling, masked_lm)
    assert {field.name for script in scripts for field in dataclasses.fields(script.Config)} >= loop.OF_A_RUN


# A loss whose gradient at each output of the product is one of these slopes, each of which occurs twice. In float16
# 2**-25 becomes zero below a loss scale of 2, and 2**-30 below a loss scale of 64.
SLOPES = np.repeat(np.array([1.0, 2.0**-10, 2.0**-25, 2.0**-30], np.float32), 2)


def experiment_of(policy: str, scale: float) -> Experiment:
    """Return a task with eight weights that count. Each falls by 0.25 in a step if its gradient is not zero."""
    tx = optax.chain(optax.scale_by_sign(), optax.scale(-0.25))
    tx = jaxmp.loss_scaling(tx, jaxmp.NoOpLossScale() if scale == 1 else jaxmp.StaticLossScale(scale))

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


def test_training_states_the_zero_gradients_and_the_accuracy_that_follow_from_them():
    baseline = experiment_of("float32", 1.0)
    for scale, zeros in ((1.0, 2 / 4), (16.0, 1 / 4), (1024.0, 0.0)):
        with Progress("", 2) as progress:
            run = train(experiment_of("mixed_float16", scale), baseline, 0, progress, "")
        assert run["zero_activations"] == run["zero_params"] == zeros
        assert run["test"]["accuracy"] == 1 - zeros and len(run["curve"]) == 2


@pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it
def test_compare_writes_tables_and_a_picture_and_trains_no_run_twice(tmp_path, data_dir, capsys):
    config = compare.Config(policies=("mixed_float16@none",), seeds=(0,), steps=2, batch_size=32, run_dir=tmp_path)
    compare.main(dataclasses.replace(config, data_dir=data_dir, minutes=1e-6))
    assert capsys.readouterr().out.endswith(f"{UNFINISHED}\n")
    compare.main(dataclasses.replace(config, data_dir=data_dir))
    files = ["compare.md", "compare.png", "digits-float32-seed0.json", "digits-mixed_float16-seed0.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert "| float32 | none | 1 |" in (tmp_path / "compare.md").read_text()
    times = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*.json"))]
    compare.main(dataclasses.replace(config, data_dir=data_dir))
    assert times == [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("*.json"))]
    with pytest.raises(SystemExit):
        compare.main(dataclasses.replace(config, data_dir=data_dir, batch_size=16))
    assert "is a run with other flags" in capsys.readouterr().err
