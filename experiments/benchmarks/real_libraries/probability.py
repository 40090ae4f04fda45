"""Probabilistic models: numpyro, gpjax, dynamax, distrax, blackjax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from experiments.benchmarks.real_libraries.registry import Made, program

ROWS, FEATURES = 64, 8


def _features() -> jax.Array:
    return random.normal(random.key(7), (ROWS, FEATURES))


def _targets() -> jax.Array:
    x = _features()
    return jnp.sin(x @ jnp.arange(1.0, FEATURES + 1) / FEATURES) + 0.1 * random.normal(random.key(8), (ROWS,))


@program("numpyro", "logistic regression, potential energy")
def logistic_regression() -> Made:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    x, labels = _features(), (_targets() > 0).astype(jnp.int32)

    def model():
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(FEATURES), 1.0))
        numpyro.sample("labels", dist.Bernoulli(logits=x @ weights), obs=labels)

    initial, potential, *_ = initialize_model(random.key(0), model)
    return potential, initial.z


@program("numpyro", "Bayesian neural network, potential energy")
def bayesian_network() -> Made:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    x, y = _features(), _targets()

    def model():
        w1 = numpyro.sample("w1", dist.Normal(jnp.zeros((FEATURES, 16)), 1.0))
        w2 = numpyro.sample("w2", dist.Normal(jnp.zeros((16, 16)), 1.0))
        w3 = numpyro.sample("w3", dist.Normal(jnp.zeros((16, 1)), 1.0))
        mean = (jnp.tanh(jnp.tanh(x @ w1) @ w2) @ w3)[:, 0]
        precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
        numpyro.sample("y", dist.Normal(mean, 1 / jnp.sqrt(precision)), obs=y)

    initial, potential, *_ = initialize_model(random.key(0), model)
    return potential, initial.z


@program("numpyro", "variational autoencoder, ELBO")
def variational_autoencoder() -> Made:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO

    keys = random.split(random.key(0), 5)
    shapes = {"e1": (64, 32), "mean": (32, 8), "scale": (32, 8), "d1": (8, 32), "d2": (32, 64)}
    params = {
        name: random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    images = (random.uniform(random.key(3), (32, 64)) > 0.5).astype(jnp.float32)

    def model(images):
        d1, d2 = (numpyro.param(name, params[name]) for name in ("d1", "d2"))
        with numpyro.plate("batch", 32):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(8), 1.0).to_event(1))
            probabilities = jax.nn.sigmoid(jax.nn.softplus(z @ d1) @ d2)
            numpyro.sample("image", dist.Bernoulli(probabilities).to_event(1), obs=images)

    def guide(images):
        e1, mean, scale = (numpyro.param(name, params[name]) for name in ("e1", "mean", "scale"))
        with numpyro.plate("batch", 32):
            hidden = jax.nn.softplus(images @ e1)
            numpyro.sample("z", dist.Normal(hidden @ mean, jnp.exp(hidden @ scale)).to_event(1))

    def loss(params):
        return Trace_ELBO().loss(random.key(4), params, model, guide, images)

    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    return loss, svi.get_params(svi.init(random.key(5), images))


@program("numpyro", "Gaussian process, marginal likelihood")
def gaussian_process() -> Made:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    x, y = _features(), _targets()

    def model():
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
        length = numpyro.sample("length", dist.LogNormal(jnp.zeros(FEATURES), 1.0).to_event(1))
        scaled = x / length
        distances = jnp.sum(scaled**2, 1)[:, None] + jnp.sum(scaled**2, 1) - 2 * scaled @ scaled.T
        kernel = variance * jnp.exp(-0.5 * distances) + (noise + 1e-4) * jnp.eye(ROWS)
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(ROWS), covariance_matrix=kernel), obs=y)

    initial, potential, *_ = initialize_model(random.key(0), model)
    return potential, initial.z


@program("numpyro", "Gaussian mixture, potential energy")
def gaussian_mixture() -> Made:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import initialize_model

    x = _features()

    def model():
        weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
        means = numpyro.sample("means", dist.Normal(jnp.zeros((3, FEATURES)), 1.0).to_event(2))
        factor = numpyro.sample("factor", dist.LKJCholesky(FEATURES))
        parts = dist.MultivariateNormal(means, scale_tril=factor)
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=x)

    initial, potential, *_ = initialize_model(random.key(1), model)
    return potential, initial.z


def _gpjax(likelihood: str):
    import gpjax

    prior = gpjax.gps.Prior(mean_function=gpjax.mean_functions.Constant(), kernel=gpjax.kernels.RBF())
    x = jnp.linspace(-3.0, 3.0, ROWS)[:, None]
    y = jnp.sin(2 * x) + 0.1 * random.normal(random.key(0), x.shape)
    y = y if likelihood == "Gaussian" else (y > 0).astype(jnp.float32)
    return prior * getattr(gpjax.likelihoods, likelihood)(), gpjax.Dataset(X=x, y=y)


@program("gpjax", "Gaussian process, marginal likelihood")
def gpjax_regression() -> Made:
    import equinox as eqx
    import gpjax
    import paramax

    model, data = _gpjax("Gaussian")
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params):
        return -gpjax.objectives.conjugate_mll(paramax.unwrap(eqx.combine(params, static)), data)

    return loss, params


@program("gpjax", "sparse Gaussian process, ELBO of a classification")
def gpjax_classification() -> Made:
    import equinox as eqx
    import gpjax
    import paramax

    model, data = _gpjax("Bernoulli")
    points = jnp.linspace(-3.0, 3.0, 12)[:, None]
    family = gpjax.variational_families.VariationalGaussian(model=model, inducing_inputs=points)
    params, static = eqx.partition(family, eqx.is_inexact_array)

    def loss(params):
        return -gpjax.objectives.elbo(paramax.unwrap(eqx.combine(params, static)), data)

    return loss, params


@program("dynamax", "linear Gaussian state space model")
def linear_gaussian() -> Made:
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(state_dim=4, emission_dim=6)
    params, _ = model.initialize(random.key(0))
    _, emissions = model.sample(params, random.key(1), 50)
    return lambda params: -model.marginal_log_prob(params, emissions) / 50, params


@program("dynamax", "hidden Markov model of Gaussians")
def gaussian_hmm() -> Made:
    from dynamax.hidden_markov_model import GaussianHMM

    covariances = jnp.tile(jnp.eye(4), (5, 1, 1))
    return _markov_loss(GaussianHMM(num_states=5, emission_dim=4), emission_covariances=covariances)


@program("dynamax", "hidden Markov model of categories")
def categorical_hmm() -> Made:
    from dynamax.hidden_markov_model import CategoricalHMM

    return _markov_loss(CategoricalHMM(num_states=5, emission_dim=1, num_classes=10))


def _markov_loss(model: Any, **initial: Any) -> Made:
    """Return the loss that ``model.fit_sgd`` minimises.

    The loss is a function of unconstrained params, so that probabilities stay between 0 and 1.
    """
    from dynamax.parameters import from_unconstrained, to_unconstrained

    params, properties = model.initialize(random.key(0), **initial)
    _, emissions = model.sample(params, random.key(1), 100)

    def loss(unconstrained: Any) -> Any:
        return -model.marginal_log_prob(from_unconstrained(unconstrained, properties), emissions) / 100

    return loss, to_unconstrained(params, properties)


@program("distrax", "masked coupling flow")
def masked_coupling() -> Made:
    import distrax
    import haiku as hk

    x = _features()

    def log_prob(x):
        layers = []
        for layer in range(4):
            net = hk.nets.MLP([32, 32, FEATURES * 2], w_init=hk.initializers.VarianceScaling(0.1))
            mask = (jnp.arange(FEATURES) + layer) % 2 == 0

            def bijector(params):
                shift, scale = jnp.split(params, 2, axis=-1)
                return distrax.ScalarAffine(shift=shift, log_scale=jnp.tanh(scale))

            layers.append(distrax.MaskedCoupling(mask=mask, bijector=bijector, conditioner=net))
        base = distrax.Independent(distrax.Normal(jnp.zeros(FEATURES), jnp.ones(FEATURES)), 1)
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    network = hk.without_apply_rng(hk.transform(log_prob))
    return lambda params: -jnp.mean(network.apply(params, x)), network.init(random.key(0), x)


@program("distrax", "masked coupling flow of splines")
def spline_coupling() -> Made:
    import distrax
    import haiku as hk

    x, knots = _features(), 8

    def log_prob(x):
        layers = []
        for layer in range(3):
            net = hk.Sequential([hk.nets.MLP([32, 32]), hk.Linear(FEATURES * (3 * knots + 1), w_init=jnp.zeros),
                                 hk.Reshape((FEATURES, 3 * knots + 1))])  # fmt: skip
            mask = (jnp.arange(FEATURES) + layer) % 2 == 0

            def bijector(params):
                return distrax.RationalQuadraticSpline(params, range_min=-4.0, range_max=4.0)

            layers.append(distrax.MaskedCoupling(mask=mask, bijector=bijector, conditioner=net))
        base = distrax.Independent(distrax.Normal(jnp.zeros(FEATURES), jnp.ones(FEATURES)), 1)
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    network = hk.without_apply_rng(hk.transform(log_prob))
    params = network.init(random.key(0), x)
    leaves, tree = jax.tree.flatten(params)
    keys = random.split(random.key(1), len(leaves))
    leaves = [leaf + 0.02 * random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return lambda params: -jnp.mean(network.apply(params, x)), jax.tree.unflatten(tree, leaves)


@program("blackjax", "Hamiltonian trajectory of a logistic regression")
def hamiltonian() -> Made:
    import blackjax.mcmc.integrators as integrators
    import blackjax.mcmc.metrics as metrics

    x, labels = _features(), _targets() > 0

    def log_density(weights):
        logits = x @ weights
        return -jnp.sum(jax.nn.softplus(jnp.where(labels, -logits, logits))) - jnp.sum(weights**2) / 2

    metric = metrics.default_metric(jnp.ones(FEATURES))
    step = integrators.velocity_verlet(log_density, metric.kinetic_energy)

    def loss(start):
        state = integrators.new_integrator_state(log_density, start, jnp.ones(FEATURES) * 0.3)
        state = jax.lax.fori_loop(0, 10, lambda _, state: step(state, 0.05), state)
        return jnp.sum(state.position**2) - state.logdensity / ROWS

    return loss, random.normal(random.key(0), (FEATURES,))
