"""GPT-2 on any text: training, the optimizer and sampling."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import language_modeling
from experiments.data import tokens
from experiments.training import sampling, text_training

LINES = "to be or not to be, that is the question\n\nwhether tis nobler in the mind to suffer\n\n"


pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's own Adam needs it


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Return the flags of a tiny GPT-2, with every flag that changes the step."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "text.txt").write_text(LINES * 100)
    return language_modeling.Config(
        model="gpt2", dataset=str(folder / "text.txt"), data_dir=folder / "data", run_dir=folder / "run",
        layers=1, heads=2, width=32, context=16, batch_size=8, steps=160, test_batches=2, learning_rate=0.01,
        policy="mixed_bfloat16", loss_scale="dynamic:1024,period=10", accumulate=2, remat="attention",
        override=("ln_f=float32",), evaluate_every=120, checkpoint_every=120, sample_tokens=30, temperature=0.0,
    )  # fmt: skip


@pytest.mark.slow("trains 160 steps")
def test_gpt2_learns_a_text_and_writes_in_its_words(config):
    done = language_modeling.train(config)
    text = done["texts"]["Sample"]
    assert text.startswith("\n\n") and len(text) == 32
    assert any(word in text for word in (" to", " be", "the", "not", "whe"))
    assert done["test_loss"] < 2.2
    assert done["test_perplexity"] == pytest.approx(math.exp(done["test_loss"]))
    text_tokens = tokens.load(config.dataset, "bytes", 2048)
    assert done["test_bits_per_byte"] == pytest.approx(done["test_loss"] / math.log(2) / text_tokens.bytes_per_token)
    assert done["examples_are"] == "tokens" and done["data"].endswith(", bytes") and done["examples_per_s"] > 0
    flags = json.loads((config.run_dir / "config.json").read_text())["config"]
    assert (flags["schedule"], flags["clip"], flags["weight_decay"]) == ("cosine", 1.0, 0.1)
    assert (config.run_dir / "curves.png").stat().st_size > 10_000


# --- flags ----------------------------------------------------------------------------------------------------------


def test_only_matrices_decay_long_gradients_are_clipped_and_the_schedule_rises_and_falls(config):
    settled = dataclasses.replace(
        text_training.settled(config, "gpt2"), schedule="constant", learning_rate=0.1, weight_decay=0.5, clip=1.0
    )
    tx = text_training.adamw(settled)
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}

    @jax.jit
    def update(size):
        return tx.update(jax.tree.map(lambda p: size * p, params), tx.init(params), params)

    updates, _ = update(0.0)
    np.testing.assert_allclose(updates["w"], -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates["b"], 0)
    moments = [update(size)[1] for size in (1e3, 1e6)]
    np.testing.assert_allclose(moments[0][1][0].mu["w"], moments[1][1][0].mu["w"], rtol=1e-5)

    tx = text_training.adamw(dataclasses.replace(text_training.settled(config, "gpt2"), steps=100, weight_decay=0.0))
    params = jnp.zeros((1, 1))

    def step(state, _):
        update, state = tx.update(jnp.full((1, 1), 0.5), state, params)
        return state, -update[0, 0]

    sizes = np.asarray(jax.lax.scan(step, tx.init(params), length=101)[1])
    assert sizes[0] == 0 and np.argmax(sizes) == 5 and sizes[5] == pytest.approx(0.01, rel=1e-3)
    assert sizes[-1] == pytest.approx(0.001, rel=1e-3)


# --- sampling -------------------------------------------------------------------------------------------------------


def counting(params, window):
    """Predict the sum of the last two tokens modulo 7.

    Tokens before the window count as 0.
    """
    before = jnp.pad(window, ((0, 0), (1, 0)))[:, :-1]
    return params * jax.nn.one_hot((window + before) % 7, 7)


def test_a_sample_goes_on_from_its_prompt_through_a_window_that_moves():
    expected = [1, 2]
    for _ in range(20):
        expected.append((expected[-1] + expected[-2]) % 7)
    params = jnp.float32(50.0)
    assert sampling.sample(counting, params, [1, 2], 20, context=4, top_k=1) == expected[2:]
    assert sampling.sample(counting, params, [1, 2], 20, context=64, temperature=1.0) == expected[2:]
    assert sampling.sample(counting, params, [5, 6, 4, 1, 2], 20, context=3, temperature=0) == expected[2:]

    with pytest.raises(ValueError, match="a prompt of at least one token, got none; write --prompt"):
        sampling.sample(counting, jnp.float32(1.0), [], 3, context=4)
