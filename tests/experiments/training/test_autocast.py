"""``--opt-level O1`` and ``--autocast``: dtypes, summary, conflicting flags."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from linen_zoo import dtypes_of, same_bits

import jaxmp
from experiments import compare, image_classification, language_modeling
from experiments.measure import flops
from experiments.training.precision import read_autocast

SOURCES = str(Path(sysconfig.get_path("stdlib"), "asyncio"))  # reading the whole library takes seconds
SMALL = {
    image_classification: {"steps": 2, "batch_size": 32},
    language_modeling: {"steps": 2, "batch_size": 64, "vocabulary": 64, "test_batches": 1, "dataset": SOURCES},
}
O1 = {"opt_level": "O1"}
BF16 = {"autocast": True, "policy": "mixed_bfloat16"}


pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


@pytest.fixture
def prepare(data_dir):
    def prepare(script: Any, **flags: Any) -> Any:
        return script.prepare(script.Config(data_dir=data_dir, **{**SMALL[script], **flags}))

    return prepare


@pytest.mark.parametrize(
    ("script", "flags", "dtype", "scale"),
    [
        (image_classification, O1, "float16", jaxmp.DynamicLossScale),
        pytest.param(
            language_modeling, BF16, "bfloat16", jaxmp.NoOpLossScale, marks=pytest.mark.slow("another script")
        ),
    ],
    ids=["image_classification", "language_modeling"],
)
def test_the_loss_function_runs_under_autocast_and_the_model_is_bare(script, flags, dtype, scale, prepare):
    experiment = prepare(script, **flags)
    state, batch = experiment.init(0), next(experiment.train_batches(0))
    same_bits(state.params, prepare(script, policy="float32").init(0).params)
    assert type(jaxmp.get_loss_scale(state.opt_state)) is scale
    assert set(flops.count(experiment.step.jitted, state, batch)) == {dtype}
    assert set(flops.count(experiment.eval_step, state, batch)) == {dtype}
    assert set(flops.count(experiment.loss_fn, state.params, state.model_state, batch, state.rng)) == {dtype}
    assert experiment.precision["autocast"] == "yes"
    state, metrics = experiment.step(state, batch)
    assert dtypes_of(state.params) == {"float32"} and bool(jnp.isfinite(metrics["loss"]))


def test_an_nnx_model_runs_under_autocast_too(prepare):
    experiment = prepare(image_classification, api="nnx", **BF16)
    state = jax.eval_shape(experiment.init, 0)
    assert set(flops.count(experiment.step.jitted, state, next(experiment.train_batches(0)))) == {"bfloat16"}


def test_an_override_leaves_its_module_in_float32(prepare):
    experiment = prepare(image_classification, override=("**/Dense_1=O0",), **O1)
    state = jax.eval_shape(experiment.init, 0)
    assert set(flops.count(experiment.eval_step, state, next(iter(experiment.test_batches())))) == {
        "float16",
        "float32",
    }


@pytest.mark.usefixtures("empty_curves")
def test_a_run_names_it_in_its_summary(tmp_path, data_dir):
    flags = {**SMALL[image_classification], "checkpoint_every": 0, "run_dir": tmp_path}
    image_classification.train(image_classification.Config(data_dir=data_dir, **flags, **O1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["autocast"] == "yes" and summary["loss_scale_rule"] == "dynamic"
    assert summary["policy"] == "params=float32,compute=float16,output=float32"


def test_flags_that_contradict_each_other_are_an_error(prepare):
    for flags, text in [
        ({"autocast": True, "policy": "float32"}, "got a policy of float32 params that computes in float32; use"),
        ({"autocast": True, "policy": "float16"}, "got a policy of float16 params that computes in float16; use"),
        (
            {"autocast": True, "policy": "O2"},
            "--autocast takes one policy, got O2; name the exceptions with --override",
        ),
        (
            {"autocast": True, "opt_level": "O2"},
            "--opt-level O2 for each module, got both; leave out one of them, or use",
        ),
        ({"override": ("a=bfloat16",), **O1}, "computes in float32 or in float16, got 'a=bfloat16'; write 'a=float32'"),
        ({"override": ("**/Dens=float32",), **O1}, r"'\*\*/Dens' matched none; nearest paths: 'CNN/Dense_"),
        (
            {"api": "nnx", "override": ("head=float32",), **O1},
            "--api nnx puts no names there, got 'head=float32'; use --api linen",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            prepare(image_classification, **flags)


def test_no_flag_means_no_autocast(prepare):
    assert prepare(image_classification, opt_level="O2").precision["autocast"] == "no"
    assert read_autocast(False, None, jaxmp.get_policy("mixed_float16"), ()) == {}
    assert read_autocast(False, "O2", jaxmp.get_policy("O2"), ("a=float32",)) == {}


def test_compare_has_rows_for_it(data_dir):
    policies = ("autocast:mixed_float16", "autocast:mixed_bfloat16", "autocast:mixed_float16@static:8")
    assert compare.variants(compare.Config(policies=policies, loss_scales=("dynamic",))) == [
        ("float32", "none"),
        ("autocast:mixed_float16", "dynamic"),
        ("autocast:mixed_bfloat16", "none"),
        ("autocast:mixed_float16", "static:8"),
    ]
    config = compare.Config(policies=policies[1:2], steps=2, batch_size=32, data_dir=data_dir)
    autocast_by_policy = {
        policy: experiment.precision["autocast"] for (policy, _), experiment in compare.prepare(config).items()
    }
    assert autocast_by_policy == {"float32": "no", "autocast:mixed_bfloat16": "yes"}
