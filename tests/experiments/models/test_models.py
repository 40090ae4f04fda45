"""The experiments' ResNets, and NNX models that compute the same as Linen's."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from experiments.benchmarks.models.nnx_gpt2 import GPT2 as NNXGPT2
from experiments.models import images
from experiments.models import nnx as nnx_models
from experiments.models.images import CNN, ResNet, nnx_functions, resnet18, resnet50
from jaxmp.nnx import apply_policy

IMAGES = np.random.default_rng(9).standard_normal((4, 8, 8, 3), np.float32)
SLOW = pytest.mark.slow("compiles another network in both APIs")
TINY = ResNet((1, 1), "basic", width=4, small_images=True)


def count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@functools.cache
def variables_of(model: ResNet, size: int) -> Any:
    """Return the shapes of the params and of the outputs of all layers."""
    init = functools.partial(model.init, capture_intermediates=True)
    return jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, size, size, 3)))


def output_shapes(model: ResNet, size: int) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(variables_of(model, size)["intermediates"])
    return {"/".join(str(key.key) for key in path[:-2]): leaf.shape for path, leaf in leaves}


def test_residual_networks_have_the_published_number_of_params():
    for model, params in [(resnet18(1000), 11_689_512), (resnet50(1000), 25_557_032)]:
        assert count(variables_of(model, 224)["params"]) == params
    model = nnx.eval_shape(lambda: nnx_models.resnet18(3, 1000, rngs=nnx.Rngs(0)))
    assert count(nnx.state(model, nnx.Param)) == 11_689_512


def test_the_stem_for_large_images_divides_them_by_4_and_the_stride_of_a_bottleneck_is_in_its_3x3():
    large, small = output_shapes(resnet18(1000), 224), output_shapes(resnet18(small_images=True), 32)
    assert large["Conv_0"][1:3] == (112, 112) and large["Block_0"][1:3] == (56, 56)
    assert small["Conv_0"][1:3] == small["Block_0"][1:3] == (32, 32)
    assert large["Block_7"][1:] == (7, 7, 512) and small["Block_7"][1:] == (4, 4, 512)
    deep = output_shapes(resnet50(1000), 224)
    assert deep["Block_3/Conv_0"][1:] == (56, 56, 128) and deep["Block_3/Conv_1"][1:] == (28, 28, 128)
    assert deep["Block_3"][1:] == (28, 28, 512)


def test_a_fresh_block_is_its_shortcut():
    block = images.Block("bottleneck", 4)
    x = np.random.default_rng(0).standard_normal((2, 5, 5, 4 * images.WIDTHS["bottleneck"]), np.float32)
    y, _ = jax.jit(functools.partial(block.init_with_output, train=True))(jax.random.key(1), x)
    np.testing.assert_array_equal(y, jax.nn.relu(x))


def randomised(variables: Any) -> Any:
    """Replace zeros and ones, so that every scale and bias affects the result."""
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf + np.float32(0.3) * rng.random(leaf.shape, np.float32)), variables
    )


def copy_weights(variables: Any, model: Any) -> None:
    """Copy Linen's variables to the NNX model, whose modules have the same order."""

    def put(module: Any, name: str, place: tuple[str, ...] = ()) -> None:
        for collection in ("params", "batch_stats"):
            values = variables.get(collection, {})
            for key in (*place, name):
                values = values.get(key, {})
            for leaf, value in values.items():
                getattr(module, leaf)[...] = value

    if isinstance(model, nnx_models.CNN):
        for module, name in ((model.conv, "Conv_0"), (model.hidden, "Dense_0"), (model.head, "Dense_1")):
            put(module, name)
        return
    for module, name in ((model.conv, "Conv_0"), (model.norm, "BatchNorm_0"), (model.head, "Dense_0")):
        put(module, name)
    for i, block in enumerate(model.blocks):
        for j in range(2 + block.shortcut):
            put(getattr(block, f"conv{j + 1}"), f"Conv_{j}", (f"Block_{i}",))
            put(getattr(block, f"norm{j + 1}"), f"BatchNorm_{j}", (f"Block_{i}",))


def same_model(name: str, large: bool = False) -> tuple[Any, Any, Any]:
    """Return a Linen model, its variables, and the NNX model with the same weights."""
    rngs = nnx.Rngs(0)
    if name == "cnn":
        linen: Any = CNN(features=4, hidden=8)
        model: Any = nnx_models.CNN((8, 8, 3), features=4, hidden=8, rngs=rngs)
    else:
        linen = TINY.clone(small_images=not large)
        model = nnx_models.ResNet((1, 1), width=4, small_images=not large, rngs=rngs)
    variables = randomised(jax.jit(linen.init)(jax.random.key(0), IMAGES))
    copy_weights(variables, model)
    assert count(variables) == count(nnx.state(model))
    return linen, variables, model


def statistics_of(model: Any) -> list[np.ndarray]:
    """Return means and variances in the order of Linen's names."""
    norms = [model.norm]
    for block in model.blocks:
        norms += [block.norm1, block.norm2, getattr(block, "norm3", None)]
    statistics = []
    for norm in norms:
        if norm is not None:
            statistics += [np.asarray(norm.mean[...]), np.asarray(norm.var[...])]
    return statistics


@pytest.mark.slow("compiles two networks")
@pytest.mark.parametrize(("name", "train"), [("small", True), ("large", False)])
def test_with_the_same_weights_both_apis_give_the_same_logits_and_statistics(name, train):
    linen, variables, model = same_model(name, name == "large")
    apply = jax.jit(functools.partial(linen.apply, train=train, mutable=["batch_stats"]))
    expected, updates = apply(variables, IMAGES)
    logits = nnx.jit(lambda model, images: model(images, train=train))(model, IMAGES)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    if train:
        updates = updates["batch_stats"]
        norms = [updates["BatchNorm_0"], *(norm for i in range(2) for norm in updates[f"Block_{i}"].values())]
        wanted = [norm[leaf] for norm in norms for leaf in ("mean", "var")]
        for ours, theirs in zip(statistics_of(model), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "policy"), [("cnn", "float32"), pytest.param("small", "mixed_float16", marks=SLOW)])
def test_with_the_same_weights_and_policy_both_apis_give_the_same_logits_to_rounding(name, policy):
    linen, variables, model = same_model(name)
    apply = jaxmp.linen.apply_policy(linen, policy).apply
    with jax.numpy_dtype_promotion("standard"):  # which Flax's own BatchNorm needs to train in half precision
        ours = nnx.jit(lambda model, images: model(images, train=True))(apply_policy(model, policy), IMAGES)
        theirs, _ = jax.jit(functools.partial(apply, train=True, mutable=["batch_stats"]))(variables, IMAGES)
    assert ours.dtype == theirs.dtype == jnp.float32
    # Flax's BatchNorm rounds its scale to half precision in NNX, and not in Linen.
    rounds = name == "small" and policy != "float32"
    tolerance = 4 * float(jnp.finfo(policy.removeprefix("mixed_")).eps) if rounds else 1e-5
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.slow("compiles a network")
def test_as_functions_statistics_move_in_training_only_and_the_seed_decides_the_params():
    init, apply = nnx_functions(lambda rngs: nnx_models.ResNet((1, 1), width=4, small_images=True, rngs=rngs))
    apply = jax.jit(apply, static_argnums=3)
    params, state = init(0)
    assert count(params) == count(jax.eval_shape(TINY.init, jax.random.key(0), IMAGES)["params"])
    logits, same = apply(params, state, IMAGES, False)
    assert logits.shape == (4, 10)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, same))
    _, moved = apply(params, state, IMAGES, True)
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a != b).any()), state, moved))
    again, other = (jax.tree.leaves(init(seed)[0]) for seed in (0, 2))
    assert all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(params), again, strict=True))
    assert not all(bool((a == b).all()) for a, b in zip(again, other, strict=True))


@pytest.mark.slow("compiles two GPT-2s")
def test_gpt2_in_nnx_as_a_loop_is_its_layers_one_after_the_other():
    sizes = (32, 8, 2, 16, 2)
    layers, loop = (NNXGPT2(*sizes, loop, rngs=nnx.Rngs(0)) for loop in (False, True))
    params = nnx.as_pure(nnx.state(layers, nnx.Param))
    blocks = [params["blocks"][n] for n in range(2)]
    nnx.update(loop, {**params, "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)})
    tokens = np.random.default_rng(0).integers(0, 32, (2, 9))

    @nnx.jit
    def loss_and_gradients(model: NNXGPT2) -> Any:
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]))(model)
        return loss, nnx.as_pure(gradients)

    (loss, gradients), (loop_loss, loop_gradients) = loss_and_gradients(layers), loss_and_gradients(loop)
    np.testing.assert_allclose(loop_loss, loss, rtol=1e-6)
    logits = nnx.jit(NNXGPT2.__call__)(layers, tokens[:, :-1])
    np.testing.assert_allclose(jaxmp.losses.cross_entropy(logits, tokens[:, 1:]).mean(), loss, rtol=1e-6)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(gradients["blocks"][n] for n in range(2)))
    stacked_gradients = {**gradients, "blocks": stacked}
    for leaf, expected in zip(jax.tree.leaves(loop_gradients), jax.tree.leaves(stacked_gradients), strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-6 * np.abs(expected).max() + 1e-9)
