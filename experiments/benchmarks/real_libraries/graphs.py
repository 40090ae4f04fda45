"""Graph networks: jraph, e3nn."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from experiments.benchmarks.real_libraries.registry import Made, program

NODES = 400  # many, because in a small graph one relu near zero can dominate the error of the gradient
EDGES_PER_NODE = 4
WIDTH = 16


def _graph(nodes: int):
    import jraph

    edges = EDGES_PER_NODE * nodes

    rng = np.random.default_rng(0)
    return jraph.GraphsTuple(
        nodes=random.normal(random.key(0), (nodes, WIDTH)),
        edges=random.normal(random.key(1), (edges, WIDTH)),
        senders=jnp.asarray(rng.integers(0, nodes, edges)),
        receivers=jnp.asarray(rng.integers(0, nodes, edges)),
        globals=jnp.zeros((1, WIDTH)),
        n_node=jnp.array([nodes]),
        n_edge=jnp.array([edges]),
    )


def _cross_entropy(logits: jax.Array) -> jax.Array:
    labels = jnp.arange(len(logits)) % logits.shape[-1]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1))


def _of_haiku(network, nodes: int = NODES) -> Made:
    import haiku as hk

    pure, graph = hk.without_apply_rng(hk.transform(network)), _graph(nodes)
    return lambda params: _cross_entropy(pure.apply(params, graph)), pure.init(random.key(2), graph)


@program("jraph", "graph convolution")
def graph_convolution() -> Made:
    import haiku as hk
    import jraph

    def network(graph):
        for layer in range(2):
            convolution = jraph.GraphConvolution(hk.Linear(WIDTH, name=f"layer{layer}"), add_self_edges=True)
            graph = convolution(graph)
            graph = graph._replace(nodes=jax.nn.relu(graph.nodes))
        return hk.Linear(5)(graph.nodes)

    return _of_haiku(network)


@program("jraph", "graph attention")
def graph_attention() -> Made:
    import haiku as hk
    import jraph

    def network(graph):
        for layer in range(2):

            def query(nodes, layer=layer):
                return hk.Linear(WIDTH, name=f"query{layer}")(nodes)

            def logits(sent, received, edges, layer=layer):
                both = jnp.concatenate([sent, received], axis=1)
                return jax.nn.leaky_relu(hk.Linear(1, name=f"logits{layer}")(both))

            graph = jraph.GAT(query, logits, node_update_fn=jax.nn.elu)(graph)
        return hk.Linear(5)(graph.nodes)

    return _of_haiku(network)


@program("jraph", "graph network")
def graph_network() -> Made:
    import haiku as hk
    import jraph

    def network(graph):
        for _ in range(3):

            @jraph.concatenated_args
            def update(features):
                return hk.LayerNorm(-1, True, True)(hk.nets.MLP([32, WIDTH])(features))

            new = jraph.GraphNetwork(update, update, update)(graph)
            graph = new._replace(nodes=graph.nodes + new.nodes, edges=graph.edges + new.edges)
        return hk.Linear(5)(graph.nodes)

    return _of_haiku(network)


@program("jraph", "deep sets")
def deep_sets() -> Made:
    import haiku as hk
    import jraph

    def network(graph):
        @jraph.concatenated_args
        def update(features):
            return hk.nets.MLP([32, WIDTH])(features)

        return hk.Linear(5)(jraph.DeepSets(update, update)(graph).globals)

    return _of_haiku(network, nodes=40)  # with more nodes the sums are so large that the loss is 0


@program("e3nn-jax", "equivariant message passing")
def equivariant() -> Made:
    import e3nn_jax as e3nn
    import flax.linen as nn

    positions = random.normal(random.key(0), (12, 3))
    senders, receivers = (jnp.asarray(index) for index in np.nonzero(~np.eye(12, dtype=bool)))

    class Layer(nn.Module):
        target: str

        @nn.compact
        def __call__(self, features, positions):
            vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
            lengths = e3nn.norm(vectors).array
            harmonics = e3nn.spherical_harmonics([0, 1, 2], vectors, True)
            messages = e3nn.concatenate([features[senders], e3nn.tensor_product(features[senders], harmonics)])
            messages = messages.regroup()
            radial = e3nn.flax.MultiLayerPerceptron((16, messages.irreps.num_irreps), jax.nn.gelu)
            messages = messages * radial(e3nn.bessel(lengths[:, 0], 8, 4.0))
            summed = e3nn.scatter_sum(messages, dst=receivers, output_size=12)
            return e3nn.gate(e3nn.flax.Linear(self.target)(summed / 3.0))

    class Network(nn.Module):
        @nn.compact
        def __call__(self, positions):
            features = e3nn.IrrepsArray("0e", jnp.ones((12, 1)))
            for target in ("16x0e + 8x0e + 8x1o", "16x0e + 8x0e + 8x1o", "4x0e"):
                features = Layer(target)(features, positions)
            return jnp.sum(features.array**2)

    model = Network()
    params = model.init(random.key(1), positions)
    return lambda params: model.apply(params, positions), params
