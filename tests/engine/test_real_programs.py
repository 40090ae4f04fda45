"""Short versions of real libraries' programs, compared with half products alone."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from autocast_tools import HALVES, compiled, half, normal, products

from experiments.benchmarks.real_libraries.simulated import half_products

END, MOST = 5.0, 256


def gradient_errors(loss, policy, params):
    """Return the relative errors of two gradients: autocast's and half products'.

    The exact gradient is that of float32. With half products, all other operations are float32.
    """
    gradient = jax.grad(loss)
    ways = (gradient, jax.grad(half(loss, policy)), half_products(gradient, HALVES[policy]))
    exact, *results = compiled(lambda params: [flat(way(params)) for way in ways])(params)
    return [float(jnp.linalg.norm(result - exact) / jnp.linalg.norm(exact)) for result in results]


def flat(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


# -- saturating functions ----------------------------------------------------------------------------------------------


def network(seed, *sizes):
    pairs = enumerate(itertools.pairwise(sizes))
    return [normal(seed + n, first, last, scale=first**-0.5) for n, (first, last) in pairs]


def apply(weights, x):
    *hidden, last = weights
    for w in hidden:
        x = jax.nn.relu(x @ w)
    return x @ last


def soft_actor_critic(seed):
    """Return the policy's loss of Haarnoja et al. 2018, as in CleanRL. The critic reads the scaled action."""
    observations, noise = normal(seed, 64, 17), normal(seed + 1, 64, 6)

    def loss(params):
        hidden = jax.nn.relu(observations @ params["policy"])
        means, log_stds = hidden @ params["means"], jnp.clip(hidden @ params["log_stds"], -5, 2)
        stds = jnp.exp(log_stds)
        raw = means + stds * noise
        squashed = jnp.tanh(raw)
        log_probs = -0.5 * ((raw - means) / stds) ** 2 - log_stds - jnp.log(1.5 * (1 - squashed**2) + 1e-6)
        values = apply(params["critic"], jnp.concatenate([observations, 1.5 * squashed + 0.1], -1))
        return jnp.mean(0.2 * log_probs.sum(-1, keepdims=True) - values)

    (policy,), (means,), (log_stds,) = network(seed + 2, 17, 64), network(seed + 3, 64, 6), network(seed + 4, 64, 6)
    critic = network(seed + 5, 23, 64, 1)
    return loss, {"policy": policy, "means": 2 * means, "log_stds": log_stds / 2, "critic": critic}


def concept_bottleneck(seed):
    """Return the loss of Koh et al. 2020: the concepts have labels, and the last layer reads them."""
    images, labels, targets = normal(seed, 64, 16), normal(seed + 1, 64, 8) > 0, normal(seed + 2, 64, 1)

    def loss(params):
        concepts = jax.nn.sigmoid(4 * apply(params["concepts"], images))
        entropies = jnp.where(labels, -jnp.log(concepts + 1e-6), -jnp.log(1 - concepts + 1e-6))
        return jnp.mean(entropies) + jnp.mean((apply(params["task"], concepts) - targets) ** 2)

    return loss, {"concepts": network(seed + 3, 16, 64, 8), "task": network(seed + 5, 8, 32, 1)}


@pytest.mark.once
@pytest.mark.parametrize(
    ("make", "policy"), [(soft_actor_critic, "mixed_bfloat16"), (concept_bottleneck, "mixed_float16")]
)
def test_a_tanh_or_sigmoid_that_a_layer_and_a_logarithm_read_loses_no_digits(make, policy):
    loss, params = make(0)
    of_autocast, of_half_products = gradient_errors(loss, policy, params)
    assert of_autocast < 2 * of_half_products + 0.005
    *layers, head = products(half(loss, policy), params)  # the head has one column
    assert (set(layers), head) == ({HALVES[policy]}, "float32")


# -- float16 -----------------------------------------------------------------------------------------------------------


def linear_attention(seed):
    """Return a loss with the linear attention of Katharopoulos et al. 2020."""
    x = normal(seed, 64, 32)

    def loss(params):
        queries, keys = (jax.nn.elu(x @ params[name]) + 1 for name in ("queries", "keys"))
        mixed = jnp.einsum("nd,ne->de", keys, x @ params["values"])
        normaliser = jnp.einsum("nd,d->n", queries, keys.sum(0))
        attended = jnp.einsum("nd,de->ne", queries, mixed) / normaliser[:, None]
        return 2.0**14 * jnp.mean((attended @ params["out"]) ** 2)

    names = ("queries", "keys", "values", "out")
    return loss, {name: normal(seed + n, 32, 32, scale=32**-0.5) for n, name in enumerate(names, 1)}


def adam_in_the_loss(seed):
    """Return the loss after three steps of Adam, as in first-order MAML."""
    x = normal(seed, 64, 32)

    def loss(params):
        def inner(hidden):
            return jnp.mean((jnp.tanh(x @ hidden) @ params["out"]) ** 2)

        hidden = params["hidden"]
        first, second = jnp.zeros_like(hidden), jnp.zeros_like(hidden)
        for step in range(1, 4):
            gradient = jax.lax.stop_gradient(jax.grad(inner)(hidden))
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            root = jnp.sqrt(second / (1 - 0.999**step))
            hidden = hidden - 0.01 * first / (1 - 0.9**step) / (root + 1e-8)
        return inner(hidden)

    return loss, {"hidden": normal(seed + 1, 32, 32, scale=32**-0.5), "out": normal(seed + 2, 32, 4, scale=32**-0.5)}


@pytest.mark.once
@pytest.mark.parametrize("make", [linear_attention, adam_in_the_loss])
def test_normalisers_and_second_moments_neither_overflow_nor_vanish(make):
    loss, params = make(0)
    of_autocast, of_half_products = gradient_errors(loss, "mixed_float16", params)
    assert of_autocast < 2 * of_half_products or of_autocast < 0.005
