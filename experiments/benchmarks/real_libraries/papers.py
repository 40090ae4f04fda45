"""Losses of papers, in plain JAX."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from experiments.benchmarks.real_libraries.registry import PAPER, Made, program

Layers = list[dict[str, jax.Array]]


def _layers(seed: int, *widths: int) -> Layers:
    shapes = list(itertools.pairwise(widths))
    keys = random.split(random.key(seed), len(shapes))
    return [
        {"w": random.normal(key, shape) / shape[0] ** 0.5, "b": jnp.zeros(shape[1])}
        for key, shape in zip(keys, shapes, strict=True)
    ]


def _apply(layers: Layers, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.relu) -> jax.Array:
    for layer in layers[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


@program(PAPER, "ArcFace, margin of angles (Deng et al., 2019)")
def arcface() -> Made:
    """Return the cross-entropy of scaled cosines, with a margin added to the angle of each true class.

    The loss is that of "ArcFace: Additive Angular Margin Loss for Deep Face Recognition". The centre of each class is
    close to one of its four embeddings, so 16 of 64 cosines are near 1.
    """
    classes, scale, margin = 16, 64.0, 0.5
    x, labels = random.normal(random.key(0), (64, 32)), jnp.arange(64) % classes
    network = _layers(1, 32, 64, 16)
    centres = _unit(_apply(network, x[:classes])) + 0.005 * random.normal(random.key(2), (classes, 16))

    def loss(params):
        cosines = _unit(_apply(params["network"], x)) @ _unit(params["centres"]).T
        sines = jnp.sqrt(1 - cosines**2)
        with_margin = cosines * math.cos(margin) - sines * math.sin(margin)
        largest_angle = cosines > math.cos(math.pi - margin)
        with_margin = jnp.where(largest_angle, with_margin, cosines - margin * math.sin(margin))
        is_true_class = jax.nn.one_hot(labels, classes) > 0
        return _cross_entropy(scale * jnp.where(is_true_class, with_margin, cosines), labels)

    return loss, {"network": network, "centres": centres}


@program(PAPER, "BYOL, negative cosines (Grill et al., 2020)")
def byol() -> Made:
    """Return 2 - 2 cosines of the predictions for one view and the embeddings of the other.

    The loss is that of "Bootstrap Your Own Latent". The predictor starts as the identity and the embeddings come from
    a moving average of the params, so the cosines are near 1, as late in training.
    """
    x = random.normal(random.key(0), (64, 32))
    views = [x + 0.1 * random.normal(random.key(seed), x.shape) for seed in (1, 2)]
    network, identity = _layers(3, 32, 64, 16), jnp.eye(16)
    predictor = [
        {"w": jnp.concatenate([identity, -identity], 1), "b": jnp.zeros(32)},
        {"w": jnp.concatenate([identity, -identity]), "b": jnp.zeros(16)},
    ]
    moving_average = jax.tree.map(lambda new, old: 0.98 * new + 0.02 * old, network, _layers(4, 32, 64, 16))

    def cosines(x, y):
        return jnp.einsum("nd,nd->n", x, y) / (jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1))

    def loss(params):
        total = 0.0
        for view, other in (views, views[::-1]):
            predictions = _apply(params["predictor"], _apply(params["network"], view))
            total += jnp.mean(2 - 2 * cosines(predictions, _apply(moving_average, other)))
        return total

    return loss, {"network": network, "predictor": predictor}


@program(PAPER, "radial basis functions (Broomhead & Lowe, 1988)")
def radial_basis() -> Made:
    """Return the squared error of a weighted sum of Gaussians around learned centres.

    The last two layers are those of "Multivariable Functional Interpolation and Adaptive Networks". The squared
    distances between features and centres are expanded: |a|² + |b|² - 2ab.
    """
    x, y = random.normal(random.key(0), (128, 8)), random.normal(random.key(1), (128, 1))
    network = _layers(2, 8, 32, 8)
    params = {
        "network": network,
        "centres": _apply(network, x[:32], jnp.tanh) + 0.1 * random.normal(random.key(3), (32, 8)),
        "log_precision": jnp.zeros(32),
        "weights": random.normal(random.key(4), (32, 1)),
    }

    def loss(params):
        features, centres = _apply(params["network"], x, jnp.tanh), params["centres"]
        squares = jnp.einsum("nd,nd->n", features, features)[:, None] + jnp.einsum("kd,kd->k", centres, centres)
        distances = squares - 2 * features @ centres.T
        basis = jnp.exp(-0.5 * jnp.exp(params["log_precision"]) * distances)
        return jnp.mean((basis @ params["weights"] - y) ** 2)

    return loss, params


def _sinusoids(times: jax.Array, width: int) -> jax.Array:
    """Return sines and cosines of times from 0 to 1, at frequencies between 0.1 and 1000."""
    frequencies = 1000 * jnp.exp(-math.log(1e4) * jnp.arange(width // 2, dtype=jnp.float32) / (width // 2))
    angles = times[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)


def _network_with_times(seed: int, features: int) -> dict[str, Layers]:
    return {
        "times": _layers(seed, 32, 64, 64),
        "first": _layers(seed + 1, features, 64),
        "rest": _layers(seed + 2, 64, 64, features),
    }


def _apply_with_times(params: dict[str, Layers], x: jax.Array, times: jax.Array) -> jax.Array:
    embedded = _apply(params["times"], _sinusoids(times, 32), jax.nn.silu)
    return _apply(params["rest"], jax.nn.silu(_apply(params["first"], x) + embedded), jax.nn.silu)


@program(PAPER, "flow matching (Lipman et al., 2023)")
def flow_matching() -> Made:
    """Return the squared error of a velocity on straight paths from noise to data, at uniform times.

    The loss is that of "Flow Matching for Generative Modeling", with its optimal transport paths.
    """
    data, noise = random.normal(random.key(0), (128, 16)) + 2, random.normal(random.key(1), (128, 16))
    times, least = random.uniform(random.key(2), (128,)), 1e-4

    def loss(params):
        points = (1 - (1 - least) * times[:, None]) * noise + times[:, None] * data
        velocities = data - (1 - least) * noise
        return jnp.mean((_apply_with_times(params, points, times) - velocities) ** 2)

    return loss, _network_with_times(3, 16)


@program(PAPER, "variational diffusion, learned schedule (Kingma et al., 2021)")
def variational_diffusion() -> Made:
    """Return the diffusion loss, with noise levels that a monotone network computes from uniform times.

    The loss and the schedule are those of "Variational Diffusion Models". The denoising network reads sinusoids of the
    noise levels.
    """
    data, noise = random.normal(random.key(0), (128, 16)), random.normal(random.key(1), (128, 16))
    times = random.uniform(random.key(2), (128,))
    smallest, largest = -13.3, 5.0

    def log_ratios(layers, times):
        def monotone(times):
            first, second, third = ({"w": jnp.abs(layer["w"]), "b": layer["b"]} for layer in layers)
            linear = _apply([first], times[:, None])
            return (linear + _apply([second, third], linear, jax.nn.sigmoid))[:, 0]

        start, end = monotone(jnp.array([0.0, 1.0]))
        return smallest + (largest - smallest) * (monotone(times) - start) / (end - start)

    def loss(params):
        ratios, slopes = jax.jvp(lambda times: log_ratios(params["schedule"], times), (times,), (jnp.ones(128),))
        signal, level = jnp.sqrt(jax.nn.sigmoid(-ratios)), jnp.sqrt(jax.nn.sigmoid(ratios))
        noisy = signal[:, None] * data + level[:, None] * noise
        scaled = (ratios - smallest) / (largest - smallest)
        errors = noise - _apply_with_times(params["network"], noisy, scaled)
        return 0.5 * jnp.mean(slopes * jnp.sum(errors**2, -1))

    schedule = [*_layers(6, 1, 1), *_layers(7, 1, 64, 1)]
    return loss, {"network": _network_with_times(3, 16), "schedule": schedule}


@program(PAPER, "noisy-or of words in regions (Fang et al., 2015)")
def noisy_or() -> Made:
    """Return the cross-entropy of words, each present in an image if it is present in one of its regions.

    The loss is that of "From Captions to Visual Concepts and Back". A noisy-or (Pearl, 1988) combines the
    probabilities of a word in 12 regions.
    """
    regions = random.normal(random.key(0), (16, 12, 32))
    is_present = random.uniform(random.key(1), (16, 24)) < 0.3
    params = {"network": _layers(2, 32, 64), "words": [{"w": _layers(3, 64, 24)[0]["w"], "b": jnp.full(24, -3.0)}]}

    def loss(params):
        scores = _apply(params["words"], jax.nn.relu(_apply(params["network"], regions)))
        log_absent = jnp.sum(jnp.log1p(-jnp.clip(jax.nn.sigmoid(scores), 0, 1 - 1e-6)), axis=1)
        return jnp.mean(jnp.where(is_present, -jnp.log(1 - jnp.exp(log_absent)), -log_absent))

    return loss, params


@program(PAPER, "neural message passing (Gilmer et al., 2017)")
def message_passing() -> Made:
    """Return the squared error of a property of molecules.

    The network is that of "Neural Message Passing for Quantum Chemistry": a matrix for each edge, a gated recurrent
    unit for each node, and a gated sum over the nodes of a molecule.
    """
    molecules, atoms, width = 32, 9, 16
    rng = np.random.default_rng(0)
    first_atoms = np.repeat(atoms * np.arange(molecules), 3 * atoms)
    senders, receivers = (jnp.asarray(first_atoms + rng.integers(0, atoms, first_atoms.size)) for _ in range(2))
    nodes, edges = random.normal(random.key(0), (molecules * atoms, 8)), random.normal(random.key(1), (len(senders), 4))
    molecule, targets = jnp.arange(molecules * atoms) // atoms, random.normal(random.key(2), (molecules,))
    params = {
        "nodes": _layers(3, 8, width),
        "edges": _layers(4, 4, 32, width * width),
        "gates": _layers(5, 2 * width, 2 * width),
        "update": _layers(6, 2 * width, width),
        "weights": _layers(7, width + 8, 32, 1),
        "values": _layers(8, width, 32, 1),
    }

    def updated(params, state, messages):
        gates = jax.nn.sigmoid(_apply(params["gates"], jnp.concatenate([messages, state], 1)))
        reset, update = jnp.split(gates, 2, axis=1)
        new = jnp.tanh(_apply(params["update"], jnp.concatenate([messages, reset * state], 1)))
        return (1 - update) * state + update * new

    def loss(params):
        state = _apply(params["nodes"], nodes)
        matrices = _apply(params["edges"], edges).reshape(-1, width, width) / width**0.5
        for _ in range(3):
            messages = jnp.einsum("eij,ej->ei", matrices, state[senders])
            state = updated(params, state, jax.ops.segment_sum(messages, receivers, len(nodes)))
        weights = jax.nn.sigmoid(_apply(params["weights"], jnp.concatenate([state, nodes], 1)))
        predictions = jax.ops.segment_sum((weights * _apply(params["values"], state))[:, 0], molecule, molecules)
        return jnp.mean((predictions - targets) ** 2)

    return loss, params


@program(PAPER, "mixture of experts with a capacity (Shazeer et al., 2017; Fedus et al., 2021)")
def experts() -> Made:
    """Return the cross-entropy of a mixture of experts, plus its load balancing loss.

    A gate chooses two of four experts for each token, as in "Outrageously Large Neural Networks". An expert drops the
    tokens beyond its capacity, as in "Switch Transformers".
    """
    tokens, width, count, capacity = 128, 16, 4, 72
    x, labels = random.normal(random.key(0), (tokens, width)), jnp.arange(tokens) % 10
    params = {
        "first": _layers(1, width, width),
        "gate": random.normal(random.key(2), (width, count)) / width**0.5,
        "up": random.normal(random.key(3), (count, width, 32)) / width**0.5,
        "down": random.normal(random.key(4), (count, 32, width)) / 32**0.5,
        "head": _layers(5, width, 10),
    }

    def loss(params):
        stream = x + jax.nn.relu(_apply(params["first"], x))
        probabilities = jax.nn.softmax(stream @ params["gate"])
        weights, chosen = lax.top_k(probabilities, 2)
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
        is_chosen = jax.nn.one_hot(chosen.T, count)  # first choices come before second ones
        rows = is_chosen.reshape(-1, count)
        places = (jnp.cumsum(rows, axis=0) * rows - 1).astype(jnp.int32)
        slots = jax.nn.one_hot(places, capacity).reshape(2, tokens, count, capacity)
        inputs = jnp.einsum("ktec,td->ecd", slots, stream)
        hidden = jax.nn.relu(jnp.einsum("ecd,edh->ech", inputs, params["up"]))
        outputs = jnp.einsum("ech,ehd->ecd", hidden, params["down"])
        stream = stream + jnp.einsum("ktec,tk,ecd->td", slots, weights, outputs)
        balance = count * jnp.sum(jnp.mean(is_chosen[0], axis=0) * jnp.mean(probabilities, axis=0))
        return _cross_entropy(_apply(params["head"], stream), labels) + 0.01 * balance

    return loss, params


_CORNERS = np.array(list(itertools.product((0, 1), repeat=3)))
_PRIMES = np.array((1, 2654435761, 805459861), np.uint32)


def _hash_features(tables: Sequence[jax.Array], points: jax.Array) -> jax.Array:
    """Return interpolated rows of a hash table for each resolution of a grid: 4, 8, 16, 32, 64."""
    levels = []
    for level, table in enumerate(tables):
        scaled = points * 4 * 2**level
        cells = jnp.floor(scaled)
        fractions = (scaled - cells)[:, None]
        weights = jnp.prod(jnp.where(_CORNERS > 0, fractions, 1 - fractions), axis=-1)
        corners = cells.astype(jnp.int32)[:, None] + _CORNERS
        x, y, z = jnp.unstack(corners.astype(jnp.uint32) * _PRIMES, axis=-1)
        rows = table[(x ^ y ^ z) % len(table)]
        levels.append(jnp.sum(weights[..., None] * rows, axis=1))
    return jnp.concatenate(levels, 1)


@program(PAPER, "hash grid with a learned pose (Müller et al., 2022)")
def hash_grid() -> Made:
    """Return the squared error of colours at points that a learned camera pose moves.

    The grid is that of "Instant Neural Graphics Primitives with a Multiresolution Hash Encoding". As in its
    implementations for images without known cameras, the pose is a parameter.
    """
    points = random.uniform(random.key(0), (256, 3), minval=-0.4, maxval=0.4)
    colours = random.uniform(random.key(1), (256, 3))
    params = {
        "quaternion": jnp.array([0.9, 0.2, -0.3, 0.1]),
        "shift": jnp.array([0.8, 0.9, 0.7]),
        "tables": list(random.normal(random.key(2), (5, 512, 2))),
        "network": _layers(3, 10, 32, 3),
    }

    def loss(params):
        a, b, c, d = _unit(params["quaternion"])
        rotation = jnp.array(
            [
                [1 - 2 * (c * c + d * d), 2 * (b * c - a * d), 2 * (b * d + a * c)],
                [2 * (b * c + a * d), 1 - 2 * (b * b + d * d), 2 * (c * d - a * b)],
                [2 * (b * d - a * c), 2 * (c * d + a * b), 1 - 2 * (b * b + c * c)],
            ]
        )
        features = _hash_features(params["tables"], points @ rotation.T + params["shift"])
        return jnp.mean((jax.nn.sigmoid(_apply(params["network"], features)) - colours) ** 2)

    return loss, params
