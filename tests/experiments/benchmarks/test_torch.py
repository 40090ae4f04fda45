"""The models in torch equal those of the experiments: params, losses, steps."""

from __future__ import annotations

import re

import benchmark_tools
import flax.traverse_util
import jax
import numpy as np
import pytest
from benchmark_tools import drawn, once

from experiments.benchmarks.models import by_hand
from experiments.benchmarks.models.workloads import NAMES, Sizes, workload
from experiments.benchmarks.train_step import jax_steps
from experiments.benchmarks.train_step.rows import ROWS

torch = pytest.importorskip("torch")

from experiments.benchmarks.models import in_torch  # noqa: E402
from experiments.benchmarks.train_step import torch_steps  # noqa: E402

SMALL = {**benchmark_tools.SMALL, "resnet50": Sizes(4, 64, layers=1, width=8, vocabulary=10)}
NAMES_IN_TORCH = {
    r"^attention(\d+)/(qkv|out)": r"blocks.\1.attention.\2",
    r"^norm(\d)_(\d+)/": r"blocks.\2.norm\1/",
    r"^(up|down)(\d+)": r"blocks.\2.\1",
    r"^conv([123])_(\d)_0": r"blocks.\2.conv\1",
    r"^norm([123])_(\d)_0": r"blocks.\2.norm\1",
    r"^conv4_(\d)_0": r"blocks.\1.shortcut.0",
    r"^norm4_(\d)_0": r"blocks.\1.shortcut.1",
}
LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}


def converted(variables):
    """Convert params and running statistics of the model by hand to torch's model."""
    weights = {}
    for key, value in flax.traverse_util.flatten_dict(variables, sep="/").items():
        new = key
        for pattern in ("4", None):  # the names of shortcuts come first
            for regex, replacement in NAMES_IN_TORCH.items():
                if pattern is None or pattern in regex:
                    new = re.sub(regex, replacement, new)
        *path, leaf = new.replace("/", ".").split(".")
        array = np.array(value)
        if leaf == "kernel":
            array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        weights[".".join([*path, LEAVES.get(leaf, leaf)])] = torch.from_numpy(array.copy())
    return weights


def both(name):
    """Return a small workload, its model by hand, variables, and torch's model."""
    case = workload(name, SMALL[name])
    model = by_hand.build(case)
    params, state = drawn(case, model)
    theirs = in_torch.build(case)
    weights = converted(params) | converted(state.get("batch_stats", {}))
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and all(key.endswith("num_batches_tracked") for key in missing)
    return case, model, (params, state), theirs


@pytest.mark.parametrize("name", NAMES)
def test_the_same_weights_give_the_loss_of_the_models_by_hand(name):
    case, model, (params, state), theirs = both(name)
    batch = case.random_batch()
    expected, _ = once(by_hand.loss_fn_of(model), params, state, batch, None)
    loss = in_torch.loss_of(theirs, *torch_steps._on_device(case, batch)).detach()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_two_steps_with_the_same_weights_have_the_losses_of_the_models_by_hand(monkeypatch):
    case, _, variables, theirs = both("gpt2")
    batch = case.random_batch()
    monkeypatch.setattr(by_hand, "init", lambda *_: variables)
    monkeypatch.setattr(in_torch, "build", lambda _: theirs)
    for steps in (jax_steps, torch_steps):
        monkeypatch.setattr(steps, "LEARNING_RATE", 3e-4)  # with the benchmark's rate the second loss is the first
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        init, step = jax_steps.train_step(case, ROWS["hand-fp32"])
        state, first = (jitted := jax.jit(step))(init(), batch)
        _, second = jitted(state, batch)
    monkeypatch.setattr(torch, "compile", lambda fun, dynamic: fun)
    turn = torch_steps.train_step(case, batch)
    losses = [float(turn()), float(turn())]
    assert losses == pytest.approx([float(first), float(second)], rel=2e-2)  # bfloat16
    assert losses[1] < 0.999 * losses[0]  # clipping and AdamW changed the params
