"""Trains BERT from scratch on any text, under any policy: it guesses tokens that are hidden from it.

python -m experiments.masked_lm --policy mixed_float16

python -m experiments.masked_lm --dataset shakespeare.txt --policy mixed_bfloat16 --remat attention --batch-size auto

15 % of the tokens are to be guessed: of these 80 % are [MASK] in what the model sees, 10 % any token, 10 % themselves
(Devlin et al. 2018, arXiv 1810.04805). They are drawn on the device from seed and step number; the held-out text has
the same ones every time. On a GPU the model is BERT-Base with 64 sequences of 512 tokens, elsewhere a small one (4
layers of 128, 16×128 tokens, 250 steps) that takes a minute or two. At the end it shows what it guessed.

The run folder holds config.json, metrics.csv, plan.json, memory.json, curves.png, checkpoints/, summary.json and
summary.md; --resume goes on with a run that was stopped, and jaxmp report makes a page of it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # started as a file: the folder above this one has the packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from experiments import data
from experiments.data import text, tokens
from experiments.data.masking import IGNORE, mask
from experiments.models import BERT
from experiments.models.weights import PUBLISHED_BERT
from experiments.training import cli, loop, mesh, text_training
from experiments.training.experiment import Batch, Closing, Experiment
from experiments.training.metrics import accuracy
from experiments.training.precision import read_precision
from experiments.training.text_training import Task

_SHOWN, _SHOWN_TOKENS = 4, 64  # pieces of text that are shown with guesses, and tokens of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(text_training.TextTraining):
    """Flags of masked language modeling."""


def prepare(config: Config) -> Experiment:
    """Everything that training needs.

    Raises:
      ValueError: a flag has a value that cannot be.
      DataError: the data cannot be had, or a sequence does not fit.
    """
    config = text_training.settled(config, "bert")
    text_training.check(config)
    precision = read_precision(config)
    devices, place = mesh.placing(config)
    dataset = text_training.load(config)
    task = bert(config, dataset, place)
    setup = text_training.set_up(config, task, precision, devices)  # model and optimizer under the precision
    step = jaxmp.make_train_step(
        setup.loss_fn,
        accumulate_steps=config.accumulate,
        ema_decay=config.ema or None,
        remat=None if task.remat == "none" else task.remat,
        sharding=setup.sharding,
        **setup.autocast,
    )
    eval_step = jaxmp.make_eval_step(setup.eval_loss_fn, use_ema=config.ema > 0, **setup.eval_autocast)
    return setup.experiment(step, eval_step, dataset.origin)


def bert(config: Config, dataset: tokens.Text, place: text.Place | None = None) -> Task:
    """BERT. Its vocabulary is the text's and [MASK].

    A batch says how many of its tokens are to be guessed, a row, so that every guess has the same weight in a step
    with microbatches, whose numbers of guesses differ, and in an evaluation.
    """
    blocks, remat = text_training.split_remat(config.remat)
    size = dataset.tokenizer.size
    vocabulary = max(config.vocabulary or 0, size + 1)

    @jax.jit
    def masked(key: jax.Array, step: int, batch: jax.Array) -> Batch:
        shown, targets = mask(jax.random.fold_in(key, step), batch, size, size, dataset.tokenizer.end)
        guesses = jnp.full(len(batch), (targets != IGNORE).sum() / len(batch), jnp.float32)
        return {"tokens": shown, "targets": targets, "guesses": guesses}

    def weight(batch: Batch) -> jax.Array:
        """Return a part's share of the guesses: weighted so, means of parts make the mean of all."""
        expected = batch["guesses"].sum()
        return (batch["targets"] != IGNORE).sum().astype(jnp.float32) / jnp.where(expected > 0, expected, 1)

    def losses(model: nn.Module) -> Any:
        def loss_fn(params: Any, model_state: Any, batch: Batch, rng: Any) -> Any:
            loss = model.apply({"params": params}, batch["tokens"], batch["targets"], method="loss")
            return loss * weight(batch), model_state

        def eval_loss_fn(params: Any, model_state: Any, batch: Batch, rng: Any) -> Any:
            logits = model.apply({"params": params}, batch["tokens"]).astype(jnp.float32).reshape(-1, vocabulary)
            targets = batch["targets"].reshape(-1)
            chosen = targets != IGNORE
            targets = jnp.where(chosen, targets, 0)
            token_losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            means = token_losses.mean(where=chosen), accuracy(logits, targets, chosen)
            loss, right = (jnp.where(chosen.any(), mean, 0) * weight(batch) for mean in means)
            return loss, model_state, {"accuracy": right}

        return loss_fn, eval_loss_fn

    def train_batches(seed: int, start: int = 0) -> Iterator[Batch]:
        key = jax.random.split(jax.random.key(seed))[1]  # places and masks are drawn from keys of their own
        batches = text.sequences(dataset.train, config.context, config.batch_size, seed, start, place=place)
        return (masked(key, step, batch) for step, batch in enumerate(batches, start))

    def test_batches() -> Iterator[Batch]:
        rows, key = text_training.rows_to_evaluate(config), jax.random.key(0)
        batches = text.spread_sequences(dataset.test, config.context, rows, config.test_batches, place=place)
        drawn = [masked(key, step, batch) for step, batch in enumerate(batches)]
        guesses = sum(batch["guesses"] for batch in drawn) / len(drawn)
        if not guesses.any():
            raise data.DataError(
                f"the held-out text has no token to guess in {len(drawn)} batches of {rows}×{config.context} tokens; "
                "raise --test-batches, --batch-size or --context"
            )
        return ({**batch, "guesses": guesses} for batch in drawn)

    def closing(model: nn.Module, params: Any, test: dict[str, float]) -> Closing:
        places = text.spread_sequences(dataset.test, config.context, _SHOWN, 1)
        batch = masked(jax.random.key(1), 0, next(places))
        guesses = jax.jit(functools.partial(_guess, model, size))(params, batch["tokens"])
        shown = mesh.on_host([batch["tokens"], batch["targets"], guesses])
        shown = [leaf[:, :_SHOWN_TOKENS] for leaf in shown]
        texts = [in_brackets(*row, dataset.tokenizer) for row in zip(*shown, strict=True)]
        return Closing({}, {"Guesses: [right], [wrong|what was there]": "\n\n".join(texts)})

    return Task(
        model=BERT(vocabulary, config.context, config.layers, config.heads, config.width, blocks),
        losses=losses,
        optimizer=text_training.adamw(config),
        train_batches=train_batches,
        test_batches=test_batches,
        tokens=config.batch_size * config.context,
        remat=remat,
        weights=PUBLISHED_BERT,
        closing=closing,
        tensor=text_training.split_products(
            ["query_key_value", "intermediate"], ["attention_output", "output"], ["word_embeddings"]
        ),
    )


def in_brackets(shown: np.ndarray, targets: np.ndarray, guesses: np.ndarray, tokenizer: tokens.Tokenizer) -> str:
    """Return a text with the guesses in brackets.

    After a bar comes the truth if it differs from the guess.

    Args:
      shown: int (n,), what the model saw.
      targets: int (n,), the truth where there was something to guess, ``IGNORE`` elsewhere.
      guesses: int (n,), the likeliest token at every place.
      tokenizer: of the text.
    """
    parts: list[str] = []
    plain: list[int] = []  # decoded together: a letter may be several tokens
    for token, target, guess in zip(shown.tolist(), targets.tolist(), guesses.tolist(), strict=True):
        if target == IGNORE:
            plain.append(token)
            continue
        both = dict.fromkeys((guess, target))
        guessed = "|".join(tokenizer.decode([token]).replace(" ", "␣").replace("\n", "⏎") for token in both)
        parts += [tokenizer.decode(plain), f"[{guessed}]"]
        plain = []
    return "".join([*parts, tokenizer.decode(plain)])


def _guess(model: nn.Module, size: int, params: Any, shown: jax.Array) -> jax.Array:
    return jnp.argmax(model.apply({"params": params}, shown)[..., :size], axis=-1)


def largest_batch(config: Config) -> int:
    """Return the largest batch that makes sense: the training text once."""
    return len(text_training.load(config).train) // config.context


def train(config: Config) -> dict[str, Any]:
    """Train as the flags say, and return the summary."""
    with loop.running("masked_lm", text_training.settled(config, "bert"), prepare, largest_batch) as run:
        for batch in run.batches():
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
    return run.summary


if __name__ == "__main__":
    cli.main(Config, train, __doc__)
