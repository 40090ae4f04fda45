"""``--opt-level O1`` and ``--autocast``: dtypes, summary, conflicting flags."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from linen_zoo import dtypes_of, same_bits

import jaxmp
from experiments import image_classification, language_modeling

SOURCES = str(Path(sysconfig.get_path("stdlib"), "asyncio"))  # reading the whole library takes seconds
SMALL = {
    image_classification: {"steps": 2, "batch_size": 32},
    language_modeling: {"steps": 2, "batch_size": 64, "vocabulary": 64, "test_batches": 1, "dataset": SOURCES},
}
O1 = {"opt_level": "O1"}
BF16 = {"autocast": True, "policy": "mixed_bfloat16"}


pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


def dtypes_of_products(fun: Any, *args: Any) -> set[str]:
    return set(jaxmp.inspect.audit(fun, compile=False)(*args).flops)


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
    assert dtypes_of_products(experiment.step, state, batch) == {dtype}
    assert dtypes_of_products(experiment.eval_step, state, batch) == {dtype}
    assert dtypes_of_products(experiment.loss_fn, state.params, state.model_state, batch, state.rng) == {dtype}
    assert experiment.precision["autocast"] == "yes"
    state, metrics = experiment.step(state, batch)
    assert dtypes_of(state.params) == {"float32"} and bool(jnp.isfinite(metrics["loss"]))


def test_an_nnx_model_runs_under_autocast_too(prepare):
    experiment = prepare(image_classification, api="nnx", **BF16)
    state = jax.eval_shape(experiment.init, 0)
    assert dtypes_of_products(experiment.step, state, next(experiment.train_batches(0))) == {"bfloat16"}


def test_an_override_leaves_its_module_in_float32(prepare):
    experiment = prepare(image_classification, override=("**/Dense_1=O0",), **O1)
    state = jax.eval_shape(experiment.init, 0)
    batch = next(iter(experiment.test_batches()))
    assert dtypes_of_products(experiment.eval_step, state, batch) == {"float16", "float32"}
