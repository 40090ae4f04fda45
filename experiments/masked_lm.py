"""Train BERT on any text, under any policy, to predict masked tokens.

python -m experiments.masked_lm --policy mixed_float16

python -m experiments.masked_lm --dataset shakespeare.txt --policy mixed_bfloat16 --remat attention

The model predicts 15 % of the tokens. Of the tokens to predict, 80 % are [MASK] in the input, 10 % are random tokens
and 10 % are unchanged (Devlin et al. 2018, arXiv 1810.04805). The tokens to predict are drawn on the device from the
seed and the step number. In the held-out text, the drawn tokens are the same every time. On a GPU the model is
BERT-Base with 64 sequences of 512 tokens. On other devices it is small (4 layers of width 128, 16×128 tokens, 250
steps) and takes a minute or two. At the end the script shows some predictions.

The run folder holds config.json, metrics.csv, plan.json, memory.json, curves.png, checkpoints/ and summary.json.
--resume continues a run that was stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # started as a file, so add the folder with the packages to the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from experiments.data import DataError, text, tokens
from experiments.data.masking import IGNORE, mask
from experiments.models.bert import BERT
from experiments.training import cli, loop, mesh, text_training
from experiments.training.experiment import Batch, Closing, Experiment, accuracy
from experiments.training.precision import read_precision
from experiments.training.text_training import Task

_SHOWN, _SHOWN_TOKENS = 4, 64  # pieces of text shown at the end, and tokens of each piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(text_training.TextTraining):
    """Flags of masked language modeling."""


def prepare(config: Config) -> Experiment:
    """Make everything that training needs.

    Raises:
      ValueError: the value of a flag is invalid.
      DataError: the data are not available, or the text is shorter than a sequence.
    """
    config = text_training.settled(config, "bert")
    text_training.check(config)
    precision = read_precision(config)
    devices = mesh.read(config)
    dataset = text_training.load(config)
    task = bert(config, dataset)
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


def bert(config: Config, dataset: tokens.Text) -> Task:
    """Return the task of BERT, with the text's vocabulary and [MASK].

    ``guesses`` in a batch is the number of predicted tokens per row. With this number all predicted tokens have the
    same weight, even though microbatches and evaluation batches have different numbers of them.
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
        """Return the weight of this batch's mean in the mean over all predictions.

        The batch may be a microbatch.
        """
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
        key = jax.random.split(jax.random.key(seed))[1]  # not the key that draws the order of the text
        batches = text.sequences(dataset.train, config.context, config.batch_size, seed, start)
        return (masked(key, step, batch) for step, batch in enumerate(batches, start))

    def test_batches() -> Iterator[Batch]:
        rows, key = text_training.rows_to_evaluate(config), jax.random.key(0)
        batches = text.spread_sequences(dataset.test, config.context, rows, config.test_batches)
        drawn = [masked(key, step, batch) for step, batch in enumerate(batches)]
        guesses = sum(batch["guesses"] for batch in drawn) / len(drawn)
        if not guesses.any():
            raise DataError(
                f"the held-out text has no token to predict in {len(drawn)} batches of {rows}×{config.context} tokens; "
                "raise --test-batches, --batch-size or --context"
            )
        return ({**batch, "guesses": guesses} for batch in drawn)

    def closing(model: nn.Module, params: Any, test: dict[str, float]) -> Closing:
        places = text.spread_sequences(dataset.test, config.context, _SHOWN, 1)
        batch = masked(jax.random.key(1), 0, next(places))
        guesses = jax.jit(functools.partial(_guess, model, size))(params, batch["tokens"])
        shown = jax.device_get([batch["tokens"], batch["targets"], guesses])
        shown = [leaf[:, :_SHOWN_TOKENS] for leaf in shown]
        texts = [in_brackets(*row, dataset.tokenizer) for row in zip(*shown, strict=True)]
        return Closing({}, {"Predictions: [right], [wrong|right token]": "\n\n".join(texts)})

    return Task(
        model=BERT(vocabulary, config.context, config.layers, config.heads, config.width, blocks),
        losses=losses,
        optimizer=text_training.adamw(config),
        train_batches=train_batches,
        test_batches=test_batches,
        tokens=config.batch_size * config.context,
        remat=remat,
        closing=closing,
        tensor=text_training.split_products(
            ["query_key_value", "intermediate"], ["attention_output", "output"], ["word_embeddings"]
        ),
    )


def in_brackets(shown: np.ndarray, targets: np.ndarray, guesses: np.ndarray, tokenizer: tokens.Tokenizer) -> str:
    """Return a text with the predictions in brackets.

    A wrong prediction is followed by a bar and the correct token.

    Args:
      shown: int (n,), the input of the model.
      targets: int (n,), the correct token where a token was predicted, ``IGNORE`` elsewhere.
      guesses: int (n,), the most likely token at every position.
      tokenizer: the tokenizer of the text.
    """
    parts: list[str] = []
    plain: list[int] = []  # decoded together, because a letter may be several tokens
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


def train(config: Config) -> dict[str, Any]:
    """Train as the flags say, and return the summary."""
    with loop.running("masked_lm", text_training.settled(config, "bert"), prepare) as run:
        for batch in run.batches():
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
    return run.summary


if __name__ == "__main__":
    cli.main(Config, train, __doc__)
