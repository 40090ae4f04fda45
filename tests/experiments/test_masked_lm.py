"""BERT from scratch: masked tokens, training, and the predictions shown."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxmp
from experiments import masked_lm
from experiments.data import DataError
from experiments.data.masking import IGNORE
from experiments.data.tokens import Bytes

SOON = {"xla_backend_optimization_level": 0}  # compiles faster


pytestmark = [pytest.mark.once, pytest.mark.usefixtures("standard_promotion")]  # optax's own Adam needs it


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    (folder / "text.txt").write_text("".join(30 * letter for letter in "abcdefgh") * 50)
    return masked_lm.Config(
        dataset=str(folder / "text.txt"), data_dir=folder / "data", run_dir=folder / "run", layers=1, heads=2, width=32,
        context=16, batch_size=16, steps=140, test_batches=4, learning_rate=0.01, policy="mixed_bfloat16",
        evaluate_every=140, checkpoint_every=0, ema=0.5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def experiment(config):
    return masked_lm.prepare(config)


@pytest.mark.slow("trains 140 steps")
def test_bert_learns_a_text_and_shows_its_guesses(config, experiment):
    summary = masked_lm.train(config)
    assert summary["test_accuracy"] > 0.5 and summary["test_loss"] < 1.5
    ((title, guesses),) = summary["texts"].items()
    assert title == "Predictions: [right], [wrong|right token]"
    assert len(guesses.split("\n\n")) == 4 and "[" in guesses
    assert summary["examples_are"] == "tokens"


def test_products_are_in_half_and_the_loss_is_in_float32(config):
    sizes = {name: getattr(config, name) for name in ("dataset", "data_dir", "layers", "heads", "width", "context")}
    flags = {"opt_level": "O2", "loss_scale": "static:128", "accumulate": 2, "remat": "full"}
    experiment = masked_lm.prepare(masked_lm.Config(**sizes, **flags))
    state, batch = jax.eval_shape(experiment.init, 0), next(experiment.train_batches(0))
    new_state, metrics = jax.eval_shape(experiment.step.jitted, state, batch)
    assert metrics["loss"].dtype == np.float32
    assert jax.tree.map(lambda leaf: leaf.dtype, new_state) == jax.tree.map(lambda leaf: leaf.dtype, state)
    assert set(jaxmp.inspect.audit(experiment.step, compile=False)(state, batch).flops) == {"float16"}
    assert experiment.batch_size == 16 * 16 and experiment.unit == "tokens"


@pytest.mark.slow("compiles a model twice")
def test_every_guess_has_the_same_weight_in_microbatches_and_in_an_evaluation(config):
    plain = dataclasses.replace(config, policy="float32", context=4, ema=0.0, test_batches=4)
    batched, single = (masked_lm.prepare(dataclasses.replace(plain, batch_size=n)) for n in (4, 1))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(batched.init_params, 0)
    params = jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape).astype(leaf.dtype), shapes)
    loss_fn = jax.jit(lambda batch: batched.loss_fn(params, None, batch, None)[0], compiler_options=SOON)

    batch = jax.tree.map(np.asarray, next(batched.train_batches(0)))
    guesses = (batch["targets"] != IGNORE).sum(1)
    assert 0 in guesses and len(set(guesses.tolist())) > 1  # including a microbatch without predictions
    parts = [loss_fn({name: leaf[i : i + 1] for name, leaf in batch.items()}) for i in range(4)]
    np.testing.assert_allclose(np.mean(parts), loss_fn(batch), rtol=1e-5)

    test_batch = jax.tree.map(lambda *leaves: np.concatenate(leaves), *single.test_batches())
    assert 0 in (test_batch["targets"] != IGNORE).sum(1)
    metrics = single.evaluate(single.create(params))
    assert metrics["loss"] == pytest.approx(float(loss_fn(test_batch)), rel=1e-5) and 0 <= metrics["accuracy"] <= 1


def test_predictions_are_in_brackets_with_the_right_token_if_wrong_and_there_must_be_some(config):
    shown = np.asarray([*b"he", 257, *b"lo", 257, 257, 256])
    targets = np.asarray([-100, -100, ord("l"), -100, -100, ord(" "), ord("w"), -100])
    guesses = np.asarray([0, 0, ord("l"), 0, 0, ord("\n"), ord("w"), 0])
    assert masked_lm.in_brackets(shown, targets, guesses, Bytes()) == "he[l]lo[⏎|␣][w]"

    few = dataclasses.replace(config, context=1, batch_size=1, test_batches=1)
    with pytest.raises(DataError, match="no token to predict in 1 batches of 1×1 tokens; raise --test-batches"):
        masked_lm.prepare(few).test_batches()
