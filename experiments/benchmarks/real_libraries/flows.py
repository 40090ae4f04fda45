"""Normalising flows: flowjax, distrax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import random

from experiments.benchmarks.real_libraries.registry import Made, program


def _moons(rows: int) -> jax.Array:
    angle = random.uniform(random.key(1), (rows,), maxval=jnp.pi)
    upper = jnp.arange(rows) % 2 == 0
    x = jnp.where(upper, jnp.cos(angle), 1 - jnp.cos(angle))
    y = jnp.where(upper, jnp.sin(angle), 0.5 - jnp.sin(angle))
    return jnp.stack([x, y], axis=1) + 0.1 * random.normal(random.key(2), (rows, 2))


def _likelihood(name: str, **options) -> Made:
    import equinox as eqx
    from flowjax import distributions, flows

    base = distributions.Normal(jnp.zeros(2))
    flow = getattr(flows, name)(random.key(0), base_dist=base, **options)
    params, static = eqx.partition(flow, eqx.is_inexact_array)
    data = _moons(128)

    def loss(params):
        import paramax

        return -paramax.unwrap(eqx.combine(params, static)).log_prob(data).mean()

    return loss, params


@program("flowjax", "masked autoregressive flow")
def masked_autoregressive() -> Made:
    return _likelihood("masked_autoregressive_flow")


@program("flowjax", "masked autoregressive flow of splines")
def masked_autoregressive_spline() -> Made:
    from flowjax.bijections import RationalQuadraticSpline

    return _likelihood(
        "masked_autoregressive_flow", transformer=RationalQuadraticSpline(knots=8, interval=4), flow_layers=4
    )


@program("flowjax", "coupling flow")
def coupling() -> Made:
    return _likelihood("coupling_flow")


@program("flowjax", "block neural autoregressive flow")
def block_neural_autoregressive() -> Made:
    return _likelihood("block_neural_autoregressive_flow")


@program("flowjax", "planar flow")
def planar() -> Made:
    return _likelihood("planar_flow", width_size=16, depth=1)


@program("flowjax", "triangular spline flow")
def triangular_spline() -> Made:
    return _likelihood("triangular_spline_flow")
