"""Models without faults have no findings, by policy, by autocast and in steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from experiments.benchmarks.models.mlp import MLP
from experiments.models import nnx as nnx_models
from experiments.models.bert import BERT
from experiments.models.gpt2 import GPT2
from experiments.models.images import CNN, ResNet
from jaxmp.inspect import Audit, audit

pytestmark = pytest.mark.usefixtures("standard_promotion")

LABELS = jax.ShapeDtypeStruct((512,), jnp.int32)
IMAGES = jax.ShapeDtypeStruct((512, 32, 32, 3), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((32, 64), jnp.int32)
BATCHES = {"images": {"x": IMAGES, "y": LABELS}, "tokens": {"x": TOKENS, "y": TOKENS}}
FEATURES = {"x": jax.ShapeDtypeStruct((512, 64), jnp.float32), "y": LABELS}
SMALL = {"vocabulary": 512, "sequence": 64, "heads": 2, "width": 32}
LINEN = {
    "mlp": (lambda: MLP(layers=2, width=512, classes=16), FEATURES),
    "cnn": (lambda: CNN(classes=16), BATCHES["images"]),
    "resnet": (lambda: ResNet((1, 1), "basic", classes=16, width=16), BATCHES["images"]),
    "gpt2-remat": (lambda: GPT2(layers=1, remat="full", **SMALL), BATCHES["tokens"]),
    "bert": (lambda: BERT(layers=1, **SMALL), BATCHES["tokens"]),
}
APPLY = {"policy": jaxmp.linen.apply_policy, "autocast": jaxmp.linen.autocast}
AUTOCAST, POLICY, STEP = ("autocast", "mixed_bfloat16"), ("policy", "mixed_float16"), ("step", "mixed_float16")
# Each model is tested in one form; each form is tested with several models.
FORMS = {"mlp": AUTOCAST, "cnn": STEP, "resnet": POLICY, "gpt2-remat": AUTOCAST, "bert": POLICY}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def linen_loss(model: Any, name: str, of_method: bool = False) -> Any:
    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        variables = {"params": params, **model_state}
        if of_method:
            return model.apply(variables, batch["x"], batch["y"], method="loss"), model_state
        if name in ("gpt2-remat", "bert", "mlp"):
            return cross_entropy(model.apply(variables, batch["x"]), batch["y"]), model_state
        logits, new = model.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]), dict(new)

    return loss_fn


def linen_state(model: Any, batch: Any, policy: str) -> Any:
    def create() -> Any:
        variables = dict(model.init(jax.random.key(0), jnp.zeros(batch["x"].shape, batch["x"].dtype)))
        scale = jaxmp.DynamicLossScale() if "float16" in policy.split("_") else jaxmp.NoOpLossScale()
        tx = jaxmp.loss_scaling(optax.adamw(1e-3), scale)
        return jaxmp.TrainState.create(params=variables.pop("params"), tx=tx, model_state=variables)

    return jax.eval_shape(create)


def assert_clean(report: Audit, half: str) -> None:
    assert [str(finding) for finding in report.findings] == []
    assert report.flops[half] > 0.98
    report.check(min_half_flops=0.98)


SLOW = pytest.mark.slow("traces a large model; each form has a smaller one")
CASES = [
    pytest.param(name, form, marks=[SLOW] * (name in ("bert", "gpt2-remat")), id=name) for name, form in FORMS.items()
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_linen_models_are_clean(name: str, form: tuple[str, str]) -> None:
    (form_name, policy), (build, batch) = form, LINEN[name]
    model = build() if form_name == "step" else APPLY[form_name](build(), policy)
    state, half = linen_state(model, batch, policy), policy.removeprefix("mixed_")
    loss_fn = linen_loss(model, name, of_method=hasattr(model, "loss") and form_name != "policy")
    options = {"policy": policy} if form_name == "step" else {}
    step = jaxmp.make_train_step(loss_fn, **options)
    if form_name != "autocast":  # a step contains the loss and its gradients
        assert_clean(audit(step, expect=policy, compile=False)(state, batch), half)
        return

    def loss(params: Any, model_state: Any, batch: Any, scale: Any) -> jax.Array:
        return loss_fn(params, model_state, batch, None)[0] * scale

    args = state.params, state.model_state, batch, jax.ShapeDtypeStruct((), jnp.float32)
    assert_clean(audit(jax.value_and_grad(loss), expect=policy, compile=False)(*args), half)
    if name == "mlp":
        assert_clean(audit(loss, expect=policy, compile=False)(*args), half)


NNX = {
    "autocast": lambda: nnx_models.CNN((32, 32, 3), 16, rngs=nnx.Rngs(0)),
    "policy": lambda: nnx_models.ResNet((1,), classes=16, width=16, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize(("form_name", "policy"), [("autocast", "mixed_float16"), ("policy", "mixed_bfloat16")])
def test_a_model_of_nnx_is_clean(form_name: str, policy: str) -> None:
    apply = jaxmp.nnx.apply_policy if form_name == "policy" else jaxmp.nnx.autocast
    scale = jaxmp.DynamicLossScale() if policy == "mixed_float16" else None

    def create() -> Any:
        model = apply(NNX[form_name](), policy)
        return model, jaxmp.nnx.Optimizer(model, optax.adamw(1e-3), loss_scale=scale)

    model, optimizer = nnx.eval_shape(create)
    half = policy.removeprefix("mixed_")

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return cross_entropy(model(batch["x"], train=True), batch["y"])

    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = jaxmp.nnx.value_and_grad(lambda model: loss_fn(model, batch), optimizer)(model)
        optimizer.update(model, grads)
        return loss

    batch = BATCHES["images"]
    if form_name == "autocast":
        assert_clean(audit(loss_fn, expect=policy, compile=False)(model, batch), half)
        assert_clean(audit(step, expect=policy, compile=False)(model, optimizer, batch), half)
    assert_clean(audit(jaxmp.nnx.make_train_step(loss_fn), expect=policy, compile=False)(model, optimizer, batch), half)
