"""Reinforcement learning: rlax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import random

from experiments.benchmarks.real_libraries.registry import Made, program

STEPS, FEATURES, ACTIONS = 64, 8, 4


def _network(width: int) -> dict[str, jax.Array]:
    keys = random.split(random.key(0), 3)
    return {
        "w1": random.normal(keys[0], (FEATURES, 64)) / FEATURES**0.5,
        "w2": random.normal(keys[1], (64, 64)) / 8,
        "w3": random.normal(keys[2], (64, width)) / 8,
    }


def _apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.relu(jax.nn.relu(x @ params["w1"]) @ params["w2"]) @ params["w3"]


def _steps():
    observations = random.normal(random.key(1), (STEPS + 1, FEATURES))
    actions = random.randint(random.key(2), (STEPS,), 0, ACTIONS)
    rewards = random.normal(random.key(3), (STEPS,))
    return observations, actions, rewards, jnp.full(STEPS, 0.99)


@program("rlax", "double Q-learning")
def double_q() -> Made:
    import rlax

    observations, actions, rewards, discounts = _steps()
    target = _network(ACTIONS)

    def loss(params):
        values = _apply(params, observations)
        of_target = _apply(target, observations)[1:]
        errors = jax.vmap(rlax.double_q_learning)(values[:-1], actions, rewards, discounts, of_target, values[1:])
        return jnp.mean(rlax.huber_loss(errors))

    return loss, _network(ACTIONS)


@program("rlax", "categorical Q-learning")
def categorical_q() -> Made:
    import rlax

    observations, actions, rewards, discounts = _steps()
    atoms = jnp.linspace(-10.0, 10.0, 51)
    learn = jax.vmap(rlax.categorical_q_learning, in_axes=(None, 0, 0, 0, 0, None, 0))

    def loss(params):
        logits = _apply(params, observations).reshape(STEPS + 1, ACTIONS, 51)
        return jnp.mean(learn(atoms, logits[:-1], actions, rewards, discounts, atoms, logits[1:]))

    return loss, _network(ACTIONS * 51)


@program("rlax", "quantile Q-learning")
def quantile_q() -> Made:
    import rlax

    observations, actions, rewards, discounts = _steps()
    quantiles = (jnp.arange(20) + 0.5) / 20
    learn = jax.vmap(rlax.quantile_q_learning, in_axes=(0, None, 0, 0, 0, 0, 0, None))

    def loss(params):
        values = _apply(params, observations).reshape(STEPS + 1, 20, ACTIONS)
        return jnp.mean(learn(values[:-1], quantiles, actions, rewards, discounts, values[1:], values[1:], 1.0))

    return loss, _network(ACTIONS * 20)


@program("rlax", "advantage actor critic")
def actor_critic() -> Made:
    import rlax

    observations, actions, rewards, discounts = _steps()

    def loss(params):
        results = _apply(params, observations)
        logits, values = results[:-1, :ACTIONS], results[:, ACTIONS]
        returns = rlax.lambda_returns(rewards, discounts, jax.lax.stop_gradient(values[1:]), 0.9)
        advantages = jax.lax.stop_gradient(returns - values[:-1])
        policy = rlax.policy_gradient_loss(logits, actions, advantages, jnp.ones(STEPS))
        entropy = rlax.entropy_loss(logits, jnp.ones(STEPS))
        return policy + 0.5 * jnp.mean((returns - values[:-1]) ** 2) + 0.01 * entropy

    return loss, _network(ACTIONS + 1)


@program("rlax", "proximal policy optimisation")
def proximal() -> Made:
    import rlax

    observations, actions, rewards, discounts = _steps()
    old = jax.nn.log_softmax(_apply(_network(ACTIONS), observations[:-1]))
    old = jnp.take_along_axis(old, actions[:, None], axis=1)[:, 0]

    def loss(params):
        results = _apply(params, observations)
        log = jnp.take_along_axis(jax.nn.log_softmax(results[:-1, :ACTIONS]), actions[:, None], axis=1)[:, 0]
        values = results[:, ACTIONS]
        advantages = rlax.truncated_generalized_advantage_estimation(
            rewards, discounts, 0.95, jax.lax.stop_gradient(values)
        )
        policy = rlax.clipped_surrogate_pg_loss(jnp.exp(log - old), advantages, 0.2)
        return policy + 0.5 * jnp.mean((advantages + jax.lax.stop_gradient(values[:-1]) - values[:-1]) ** 2)

    params = _network(ACTIONS + 1)
    return loss, {**params, "w3": params["w3"].at[:, :ACTIONS].set(_network(ACTIONS)["w3"])}


@program("rlax", "V-trace")
def v_trace() -> Made:
    import rlax

    observations, actions, rewards, discounts = _steps()

    def loss(params):
        results = _apply(params, observations)
        log = jax.nn.log_softmax(results[:-1, :ACTIONS])
        log = jnp.take_along_axis(log, actions[:, None], axis=1)[:, 0]
        values = results[:, ACTIONS]
        ratios = jnp.exp(jax.lax.stop_gradient(log) + jnp.log(ACTIONS))
        trace = rlax.vtrace_td_error_and_advantage(values[:-1], values[1:], rewards, discounts, ratios, 0.95)
        return jnp.mean(trace.errors**2) - jnp.mean(log * jax.lax.stop_gradient(trace.pg_advantage))

    return loss, _network(ACTIONS + 1)


@program("rlax", "deterministic policy gradient")
def deterministic() -> Made:
    import rlax

    observations = _steps()[0]
    critic = random.normal(random.key(9), (ACTIONS, 32)) / 2

    def loss(params):
        actions = jnp.tanh(_apply(params, observations))

        def value(action):
            return jnp.mean(jnp.tanh(action @ critic) ** 2)

        return jnp.mean(jax.vmap(rlax.dpg_loss)(actions, jax.vmap(jax.grad(value))(actions)))

    return loss, _network(ACTIONS)
