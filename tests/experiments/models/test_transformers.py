"""GPT-2 and BERT: shapes, visible tokens, half products and remat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from experiments.benchmarks.models import workloads
from experiments.measure import memory
from experiments.models.bert import BERT
from experiments.models.gpt2 import GPT2

SIZES = (41, 8, 2, 2, 16)  # vocabulary, sequence, layers, heads, width
ONE_LAYER = (41, 8, 1, 2, 16)
TOKENS = np.random.default_rng(0).integers(0, 41, (2, 8)).astype(np.int32)
TARGETS = np.random.default_rng(1).integers(0, 41, (2, 8)).astype(np.int32)


SOON = {"xla_backend_optimization_level": 0}  # compiles faster


def random_variables(model: Any) -> Any:
    """Return random variables, without compiling the model's initialisation."""
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    return jax.tree.map(lambda leaf: 0.2 * rng.standard_normal(leaf.shape).astype(leaf.dtype), shapes)


def loss_of(model: Any, **options: Any) -> Any:
    return lambda params: model.apply({"params": params}, TOKENS, TARGETS, method="loss", **options)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield all equations of a program, those in the bodies of loops once."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(getattr(inner, "jaxpr", inner))


def products(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Return the dtypes of the operands of every product."""
    operands = (eqn.invars for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general")
    return ((left.aval.dtype.name, right.aval.dtype.name) for left, right in operands)


def test_they_have_the_published_number_of_params():
    for model, count in [(GPT2(), 124_439_808 + 47 * 768), (BERT(), 109_514_298 + 6 * 769)]:
        variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables)) == count


def test_the_loss_is_the_cross_entropy_of_the_logits_and_pads_have_no_part_in_it():
    model = BERT(*ONE_LAYER)
    params = random_variables(model)["params"]
    logits = np.asarray(jax.jit(model.apply, compiler_options=SOON)({"params": params}, TOKENS), np.float64)
    assert logits.shape == (2, 8, 41)
    labels = np.where(np.arange(8) % 3 == 0, -7, TARGETS)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    loss, gradients = jax.jit(
        jax.value_and_grad(
            lambda params: model.apply({"params": params}, TOKENS, labels, method="loss", ignore_index=-7)
        ),
        compiler_options=SOON,
    )(params)
    assert float(loss) == pytest.approx(losses[labels >= 0].mean(), rel=1e-5)
    rows = gradients["word_embeddings"]["embedding"]
    assert rows.shape == (64, 16) and not rows[41:].any() and rows[:41].any(axis=1).all()


@pytest.mark.slow("compiles a model twice")
def test_blocks_in_a_loop_with_remat_compute_what_they_do_one_by_one_without():
    params = random_variables(GPT2(*SIZES))["params"]
    loop_params = {name: leaf for name, leaf in params.items() if not name.startswith("h_")}
    loop_params["h_0"] = {"block": jax.tree.map(lambda *leaves: jnp.stack(leaves), params["h_0"], params["h_1"])}
    loop = GPT2(*SIZES, remat="attention", loop=True)
    shapes = jax.eval_shape(loop.init, jax.random.key(0), TOKENS)["params"]
    assert jax.tree.map(jnp.shape, loop_params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    looped, expected = (
        jax.jit(jax.value_and_grad(loss_of(model)), compiler_options=SOON)(values)
        for model, values in ((loop, loop_params), (GPT2(*SIZES), params))
    )
    assert float(looped[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    kernels = [expected[1][f"h_{i}"]["mlp"]["c_fc"]["kernel"] for i in range(2)]
    np.testing.assert_allclose(looped[1]["h_0"]["block"]["mlp"]["c_fc"]["kernel"], kernels, rtol=1e-4, atol=1e-6)


# The number of products that a block recomputes, counted by hand. With "attention": c_proj and c_fc, in BERT also the
# last product, whose sum is normalised. With "dots": the two products of attention. With "full": all products.


@pytest.mark.absent_gpu
@pytest.mark.usefixtures("standard_promotion")  # Flax's norm
def test_on_a_gpu_the_product_before_gelu_computes_it_and_q_k_and_v_are_not_sliced():
    case = workloads.workload("gpt2", layers=1, batch_size=8, length=512, vocabulary=512)
    model = jaxmp.linen.apply_policy(case.model, "mixed_bfloat16")
    params, _ = jax.eval_shape(case.init, jax.random.key(0))

    def gradients(params, batch):
        return jax.grad(lambda params: case.loss_fn(model)(params, {}, batch)[0])(params)

    text = memory.compiled(gradients, (params, case.batch), "h200").as_text()
    assert text.count('"epilogue":"BIAS_GELU_AUX"') == 1
    assert "bf16[4096,768]{1,0} slice(" not in text
