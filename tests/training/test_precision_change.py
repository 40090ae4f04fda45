"""A run whose precision changes has the bits of a run that is restarted through a checkpoint."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_tools import bits, standard

import jaxmp
from jaxmp.checkpoint.named_leaves import as_tree

pytest.importorskip("orbax.checkpoint")
pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]

POLICIES = "compute=bfloat16,output=float32,float8(min_dim=16,min_tokens=16)", "mixed_bfloat16"
CHANGE, STEPS = 2, 4  # the number of steps in float8, and of all steps
BATCHES = np.random.default_rng(0).normal(size=(STEPS, 16, 16)).astype(np.float32)
ADAM = standard(optax.adamw(1e-2))


class NNXNet(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.hidden, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.hidden(x))))


def nnx_loss(model, batch):
    NNXRun.traces += 1
    return jnp.mean((model(batch) - 1) ** 2)


nnx_step = jaxmp.nnx.make_train_step(nnx_loss, ema_decay=0.9)


class NNXRun:
    """A run of an NNX model with one model for each policy; the models share their Variables.

    All runs share the step.
    """

    traces = 0

    def __init__(self, seed):
        net = NNXNet(seed)
        self.models = [jaxmp.nnx.apply_policy(net, policy) for policy in POLICIES]
        scale = jaxmp.DynamicLossScale(2.0**10, period=2)
        self.optimizer = jaxmp.nnx.Optimizer(self.models[0], ADAM, loss_scale=scale, ema=True)

    def number(self):
        return int(self.optimizer.step[...])

    def take_step(self, is_late, batch):
        nnx_step(self.models[is_late], self.optimizer, batch)

    def saved(self):
        return self.models[0], self.optimizer

    def restore(self, folder):
        jaxmp.checkpoint.restore(folder, self.saved())


def train(run, change=CHANGE):
    """Train to the end, and return the bits of the state."""
    while run.number() < STEPS:
        run.take_step(run.number() >= change, BATCHES[run.number()])
    return bits(as_tree(run.saved()))


def test_two_precisions_share_a_state_and_resume_at_every_step(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXMP_FLOAT8", "emulate")
    expected = train(NNXRun(seed=0))
    traces = NNXRun.traces
    assert expected not in (train(NNXRun(seed=0), change=0), train(NNXRun(seed=0), change=STEPS))
    run = NNXRun(seed=0)
    for number in range(1, STEPS):
        run.take_step(number > CHANGE, BATCHES[number - 1])
        jaxmp.checkpoint.save(tmp_path / str(number), run.saved())
        resumed = NNXRun(seed=5)
        resumed.restore(tmp_path / str(number))
        assert resumed.number() == number and train(resumed) == expected, number
    assert NNXRun.traces == traces  # two steps are compiled, and no others
