"""A user's program for type checkers.

mypy reads it in `make types`. test_types.py runs it, and lets basedpyright read it.
"""

# The flags of mypy --strict that a file can set:
# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-decorators
# mypy: disallow-untyped-defs, extra-checks, no-implicit-reexport, strict-equality, warn-return-any

from __future__ import annotations

from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmp

Batch = dict[str, jax.Array]


class Classifier(nn.Module):
    """A Linen model."""

    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.relu(nn.Dense(16)(x))
        return nn.Dense(self.classes)(hidden)


class Network(nnx.Module):
    """A model in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


def make_batch() -> Batch:
    """Return a batch of random examples."""
    return {"x": jax.random.normal(jax.random.key(0), (4, 8)), "y": jnp.arange(4)}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean loss of a batch."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1).mean()


def use_policies() -> None:
    """Read policies, and cast with one."""
    policy = jaxmp.Policy("float32", "bfloat16", "float32")
    assert_type(policy, jaxmp.Policy)
    assert_type(policy.with_output_dtype("float32"), jaxmp.Policy)
    assert_type(jaxmp.get_policy(policy), jaxmp.Policy)
    assert_type(jaxmp.get_policy("mixed_float16"), jaxmp.Policy)
    assert_type(jaxmp.get_policy("auto"), jaxmp.Policy | jaxmp.PolicyMap)
    batch = make_batch()
    assert_type(policy.cast_to_compute(batch), Batch)


def train_linen() -> None:
    """Train a Linen model, and evaluate it."""
    batch = make_batch()
    model = jaxmp.linen.apply_policy(Classifier(), "mixed_float16", {"**/Dense_1": "float32"})
    assert_type(model, Classifier)
    assert_type(model.classes, int)

    def loss_fn(
        params: Any, model_state: None, batch: Batch, rng: jax.Array | None
    ) -> tuple[jax.Array, None, dict[str, jax.Array]]:
        logits = jnp.asarray(model.apply({"params": params}, batch["x"]))
        return cross_entropy(logits, batch["y"]), model_state, {"largest": logits.max()}

    loss_scale = jaxmp.DynamicLossScale(2.0**15, period=100)
    assert_type(loss_scale, jaxmp.DynamicLossScale)
    tx = jaxmp.loss_scaling(optax.adam(1e-3), loss_scale)
    state = jaxmp.TrainState.create(params=model.init(jax.random.key(1), batch["x"])["params"], tx=tx)
    assert_type(state, jaxmp.TrainState)

    step = jaxmp.make_train_step(loss_fn)
    state, metrics = step(state, batch)
    assert_type(state, jaxmp.TrainState)
    assert_type(state.skipped_steps, jax.Array)
    assert_type(state.loss_scale, jax.Array)
    assert_type(metrics, dict[str, jax.Array])
    assert_type(metrics["largest"], jax.Array)
    assert_type(jaxmp.get_loss_scale(state.opt_state), jaxmp.LossScale)

    evaluate = jaxmp.make_eval_step(loss_fn)
    assert_type(evaluate(state, batch), dict[str, jax.Array])
    print(f"loss {float(metrics['loss']):.3f}, skipped {int(state.skipped_steps)}")


class BestState(jaxmp.TrainState):
    """A subclass with a field of its own."""

    best_loss: jax.Array | None = None


def train_with_a_subclass() -> None:
    """Keep the class of the state in a step."""

    def loss_fn(params: dict[str, jax.Array], model_state: None, batch: Batch, rng: Any) -> tuple[jax.Array, None]:
        return jnp.mean((batch["x"] @ params["w"]) ** 2), model_state

    state = BestState.create(params={"w": jnp.ones((8, 1))}, tx=optax.sgd(0.1))
    assert_type(state, BestState)
    state, _ = jaxmp.make_train_step(loss_fn)(state, make_batch())
    assert_type(state, BestState)
    assert_type(state.with_tx(optax.sgd(0.1)), BestState)


def train_by_hand() -> None:
    """Write a step by hand."""
    params = {"w": jnp.ones((8, 10))}
    tx = jaxmp.loss_scaling(optax.sgd(0.1), jaxmp.StaticLossScale(8.0))
    opt_state = tx.init(params)
    batch = make_batch()

    def loss_of(params: dict[str, jax.Array], batch: Batch) -> jax.Array:
        return cross_entropy(batch["x"] @ params["w"], batch["y"])

    def loss_and_logits(params: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, jax.Array]:
        logits = batch["x"] @ params["w"]
        return cross_entropy(logits, batch["y"]), logits

    loss, grads = jaxmp.value_and_grad(loss_of, opt_state)(params, batch)
    assert_type(loss, jax.Array)
    (loss, logits), grads = jaxmp.value_and_grad(loss_and_logits, opt_state, has_aux=True)(params, batch)
    assert_type(loss, jax.Array)
    assert_type(logits, jax.Array)
    updates, opt_state = tx.update(grads, opt_state, params)
    new: dict[str, jax.Array] = jax.tree.map(jnp.add, params, updates)
    assert_type(jaxmp.keep_if_skipped(opt_state, new, params), dict[str, jax.Array])


def use_autocast() -> None:
    """Run a function under autocast, and read its plan."""

    def predict(weight: jax.Array, x: jax.Array) -> jax.Array:
        with jaxmp.precision("float32"):
            scale = jnp.mean(weight)
        return x @ weight * scale

    fast = jaxmp.autocast(predict, "mixed_bfloat16")
    assert_type(fast(jnp.ones((8, 2)), jnp.ones((4, 8))), jax.Array)
    assert_type(jaxmp.cast_plan(predict, "mixed_bfloat16")(jnp.ones((8, 2)), jnp.ones((4, 8))), jaxmp.CastPlan)
    assert_type(jaxmp.linen.autocast(Classifier(), "mixed_bfloat16"), Classifier)


def train_nnx() -> None:
    """Train an NNX model, with the ready step and by hand."""
    batch = make_batch()
    model = jaxmp.nnx.apply_policy(Network(nnx.Rngs(0)), "mixed_bfloat16")
    assert_type(model, Network)
    optimizer = jaxmp.nnx.Optimizer(model, optax.adam(1e-3), loss_scale=jaxmp.DynamicLossScale(), ema=True)
    assert_type(optimizer, jaxmp.nnx.Optimizer)
    assert_type(optimizer.skipped_steps, jax.Array)
    assert_type(optimizer.loss_scale, jax.Array)
    assert_type(optimizer.ema_model(model), Network)

    def loss_fn(model: Network, batch: Batch) -> jax.Array:
        return cross_entropy(model(batch["x"]), batch["y"])

    step = jaxmp.nnx.make_train_step(loss_fn, ema_decay=0.99)
    metrics = step(model, optimizer, batch)
    assert_type(metrics, dict[str, jax.Array])

    own_optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1))
    loss, grads = jaxmp.nnx.value_and_grad(loss_fn, own_optimizer)(model, batch)
    assert_type(loss, jax.Array)
    own_optimizer.update(model, grads)


def main() -> None:
    """Run all of it."""
    use_policies()
    train_linen()
    train_with_a_subclass()
    train_by_hand()
    use_autocast()
    train_nnx()


if __name__ == "__main__":
    main()
