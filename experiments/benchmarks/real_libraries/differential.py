"""Differential equations: diffrax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import random

from experiments.benchmarks.real_libraries.registry import Made, program


def _vector_field(size: int):
    import equinox as eqx

    return eqx.nn.MLP(size, size, 64, 2, activation=jax.nn.softplus, key=random.key(0))


def _neural_ode(**solve) -> Made:
    import diffrax
    import equinox as eqx

    params, static = eqx.partition(_vector_field(2), eqx.is_inexact_array)
    times = jnp.linspace(0.0, 10.0, 20)
    starts = random.uniform(random.key(1), (8, 2), minval=-0.6, maxval=1.0)
    angle = times[:, None] * jnp.array([0.7, -0.7])
    targets = jnp.exp(-0.1 * times)[None, :, None] * jnp.cos(angle)[None] * starts[:, None]

    def loss(params):
        field = eqx.combine(params, static)
        term = diffrax.ODETerm(lambda t, y, field: field(y))

        def trajectory(start):
            options = {
                "solver": diffrax.Tsit5(),
                "dt0": times[1] - times[0],
                "stepsize_controller": diffrax.PIDController(rtol=1e-3, atol=1e-6),
                **{name: make(diffrax) for name, make in solve.items()},
            }
            saved = diffrax.SaveAt(ts=times)
            return diffrax.diffeqsolve(
                term, t0=times[0], t1=times[-1], y0=start, args=field, saveat=saved, **options
            ).ys

        return jnp.mean((jax.vmap(trajectory)(starts) - targets) ** 2)

    return loss, params


@program("diffrax", "neural ODE")
def neural_ode() -> Made:
    return _neural_ode()


@program("diffrax", "neural ODE, continuous adjoint")
def neural_ode_backsolve() -> Made:
    return _neural_ode(adjoint=lambda diffrax: diffrax.BacksolveAdjoint())


@program("diffrax", "neural ODE, constant steps")
def neural_ode_constant() -> Made:
    return _neural_ode(solver=lambda diffrax: diffrax.Heun(), stepsize_controller=lambda d: d.ConstantStepSize())


@program("diffrax", "neural ODE, implicit solver")
def neural_ode_implicit() -> Made:
    return _neural_ode(solver=lambda diffrax: diffrax.Kvaerno3())


@program("diffrax", "neural CDE")
def neural_cde() -> Made:
    import diffrax
    import equinox as eqx

    class Field(eqx.Module):
        mlp: eqx.nn.MLP

        def __call__(self, t, y, args):
            return self.mlp(y).reshape(8, 3)

    class CDE(eqx.Module):
        initial: eqx.nn.MLP
        field: Field
        linear: eqx.nn.Linear

        def __call__(self, times, coefficients):
            control = diffrax.CubicInterpolation(times, coefficients)
            solution = diffrax.diffeqsolve(
                diffrax.ControlTerm(self.field, control).to_ode(), diffrax.Tsit5(), times[0], times[-1], None,
                self.initial(control.evaluate(times[0])),
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
                saveat=diffrax.SaveAt(t1=True),
            )  # fmt: skip
            return jax.nn.sigmoid(self.linear(solution.ys[-1]))[0]

    keys = random.split(random.key(0), 4)
    field = eqx.nn.MLP(8, 24, 128, 1, activation=jax.nn.softplus, final_activation=jnp.tanh, key=keys[0])
    initial = eqx.nn.MLP(3, 8, 128, 1, key=keys[1])
    model = CDE(initial, Field(field), eqx.nn.Linear(8, 1, key=keys[2]))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    times = jnp.broadcast_to(jnp.linspace(0, 4 * jnp.pi, 50), (8, 50))
    phase = random.uniform(keys[3], (8, 1), maxval=2 * jnp.pi)
    turn = jnp.where(jnp.arange(8) % 2 == 0, 1.0, -1.0)[:, None]
    spiral = jnp.stack([times, jnp.cos(turn * times + phase) * 0.9**times, jnp.sin(turn * times + phase)], axis=-1)
    coefficients = jax.vmap(diffrax.backward_hermite_coefficients)(times, spiral)

    def loss(params):
        predicted = jax.vmap(eqx.combine(params, static))(times, coefficients)
        labels = turn[:, 0] > 0
        return -jnp.mean(jnp.where(labels, jnp.log(predicted), jnp.log(1 - predicted)))

    return loss, params


@program("diffrax", "neural SDE")
def neural_sde() -> Made:
    import diffrax
    import equinox as eqx

    keys = random.split(random.key(0), 3)
    drift = eqx.nn.MLP(5, 4, 32, 1, activation=jax.nn.silu, final_activation=jnp.tanh, key=keys[0])
    noise = eqx.nn.MLP(5, 12, 32, 1, activation=jax.nn.silu, final_activation=jnp.tanh, key=keys[1])
    params, static = eqx.partition((drift, noise), eqx.is_inexact_array)
    starts = random.normal(keys[2], (8, 4))

    def loss(params):
        drift, noise = eqx.combine(params, static)

        def with_time(t, y):
            return jnp.concatenate([jnp.asarray(t)[None], y])

        def end(start, key):
            path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=0.025, shape=(3,), key=key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, args: drift(with_time(t, y))),
                diffrax.ControlTerm(lambda t, y, args: noise(with_time(t, y)).reshape(4, 3), path),
            )
            return diffrax.diffeqsolve(terms, diffrax.ReversibleHeun(), 0.0, 1.0, 0.05, start).ys[-1]

        ends = jax.vmap(end)(starts, random.split(random.key(5), 8))
        return jnp.mean(ends**2) + jnp.mean(ends)

    return loss, params
