"""Train a language model on any text, under any policy.

The model is a small next-token model, or GPT-2.

python -m experiments.language_modeling --policy mixed_float16 --loss-scale none

python -m experiments.language_modeling --model gpt2 --dataset shakespeare.txt --policy mixed_bfloat16 --remat attention

The default is a real task on which float16 needs a loss scale. The gradient of a logit is (p - y) / N. With a mean over
N = 8,192 tokens, every p below 2.4e-4 has a gradient of 0 in float16, so the logits of wrong tokens are not pushed
down. A run takes about 30 s on two CPU cores. The text is the source code of Python's standard library, and the tokens
are pairs of bytes.

--model gpt2 trains GPT-2. On a GPU it has 12 layers of width 768 and batches of 16 sequences of 1,024 tokens. That is
86M params with bytes as tokens. On other devices it is small (4 layers of width 128, 16×128 tokens,
250 steps) and takes a minute or two. --size has larger models, up to 7B. At the end the model writes a text.

The run folder holds config.json, metrics.csv, plan.json, memory.json, curves.png, checkpoints/ and summary.json.
--resume continues a run that was stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

if not __package__:  # started as a file, so add the folder with the packages to the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import flax.linen as nn
import jax.numpy as jnp
import optax
import tyro

import jaxmp
from experiments.data import DataError, text, tokens
from experiments.models.gpt2 import GPT2, SIZES
from experiments.models.next_token import NextToken
from experiments.training import cli, loop, mesh, sampling, text_training
from experiments.training.experiment import Batch, Closing, Experiment, accuracy
from experiments.training.precision import read_precision
from experiments.training.text_training import Task

Size = Literal["124M", "355M", "774M", "1558M", "1.3B", "1.8B", "7B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model, and the text that it writes at the end."""

    model: Literal["next_token", "gpt2"] = "next_token"
    """The model. next_token has one hidden layer and a context of 4 pairs of bytes, and trains with Adam. Its only
    size flags are --context and --vocabulary. gpt2 is the transformer."""
    size: Annotated[
        Size | None, tyro.conf.arg(metavar="{124M,355M,774M,1558M,1.3B,1.8B,7B}", help_behavior_hint="(default: none)")
    ] = None
    """Sizes of gpt2 by number of params. A size sets --layers, --heads, --width and --context, unless you set them.
    124M to 1558M are the published sizes. 1.3B has 24 layers of width 2048. 1.8B has 8 layers of width 4096. 7B has 32
    layers of width 4096. These three have a context of 2048."""
    sample_tokens: int = 200
    """Tokens of the sample that gpt2 writes at the end; 0 for no sample."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(default: an empty line)")] = ""
    """The text that the sample continues."""
    temperature: float = 0.8
    """Temperature of the sample, by which logits are divided; 0 takes the most likely token."""
    top_k: int = 40
    """Draw each token of the sample from this number of most likely tokens; 0 for all tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelFlags, text_training.TextTraining):
    """Flags of language modeling."""


def settled(config: Config) -> Config:
    """Fill in the flags that were not given.

    The values come from ``--size``, and from the defaults of the model and device.
    """
    of_size = {name: value for name, value in SIZES.get(config.size or "", {}).items() if getattr(config, name) is None}
    return text_training.settled(dataclasses.replace(config, **of_size), config.model)


def check(config: Config) -> None:
    """Check the flags after :func:`settled`.

    Raises:
      ValueError: the value of a flag is invalid, or the model does not have the flag.
    """
    cli.require("--sample-tokens", config.sample_tokens, 0)
    cli.require("--temperature", config.temperature, 0)
    cli.require("--top-k", config.top_k, 0)
    if config.model == "gpt2":
        text_training.check(config)
        return
    cli.check(config)
    cli.require("--steps", config.steps, 1)
    cli.require("--context", config.context, 1)
    for name in ("size", "layers", "heads", "width", "weight_decay", "clip"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"--model next_token has no --{name.replace('_', '-')}, got {getattr(config, name)}; --model gpt2 has"
            )
    if config.tokens not in (None, "pairs") or config.schedule != "constant":
        raise ValueError(
            "--model next_token has pairs of bytes as tokens and a constant learning rate, got --tokens "
            f"{config.tokens} and --schedule {config.schedule}; take --model gpt2 for others"
        )


def prepare(config: Config) -> Experiment:
    """Make everything that training needs.

    Raises:
      ValueError: the value of a flag is invalid.
      DataError: the data are not available, or the text is shorter than a window.
    """
    config = settled(config)
    check(config)
    precision = read_precision(config)
    devices = mesh.read(config)
    if config.model == "next_token":
        mesh.require_no_tensor(devices, "--model next_token")
    dataset = load(config)
    task = gpt2(config, dataset) if config.model == "gpt2" else next_token(config, dataset)
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


def load(config: Config) -> tokens.Text:
    """Load the text that the flags name onto the device.

    The flags must come from :func:`settled`.
    """
    if config.model == "next_token":
        return tokens.load(config.dataset, "pairs", config.vocabulary)
    return text_training.load(config)


def next_token(config: Config, dataset: tokens.Text) -> Task:
    """Return the task of the small model. Its ``--batch-size`` counts tokens."""
    if len(dataset.test) <= config.context:
        raise DataError(
            f"the held-out text must have more than the {config.context} pairs of bytes of --context, got "
            f"{len(dataset.test)}; take a longer text"
        )
    if config.batch_size > len(dataset.test):
        raise ValueError(
            f"--batch-size must be at most the {len(dataset.test)} tokens that are held out, got {config.batch_size}"
        )
    cli.require("--test-batches", config.test_batches, 1, len(dataset.test) // config.batch_size + 1)

    def losses(model: nn.Module) -> Any:
        def loss_fn(params: Any, model_state: Any, batch: text.Batch, rng: Any) -> Any:
            logits = model.apply({"params": params}, batch["context"]).astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean()
            return loss, model_state, {"accuracy": accuracy(logits, batch["target"])}

        return loss_fn, loss_fn

    return Task(
        model=NextToken(config.vocabulary),
        losses=losses,
        optimizer=optax.adam(config.learning_rate),
        train_batches=functools.partial(text.windows, dataset.train, config.context, config.batch_size),
        test_batches=lambda: text.spread(dataset.test, config.context, config.batch_size, config.test_batches),
        tokens=config.batch_size,
        remat=config.remat,
    )


def gpt2(config: Config, dataset: tokens.Text) -> Task:
    """Return the task of GPT-2.

    Sequences have one token more than the context, because the last token is only predicted.
    """
    blocks, remat = text_training.split_remat(config.remat)
    vocabulary = config.vocabulary or dataset.tokenizer.size
    prompt = dataset.tokenizer.encode((config.prompt or "\n\n").encode(errors="surrogateescape")).tolist()
    if config.sample_tokens and not prompt:
        raise ValueError(
            f"--prompt must have at least one token, got {config.prompt!r}, which has no {dataset.tokenizer.name}"
        )

    def losses(model: nn.Module) -> Any:
        def loss_fn(params: Any, model_state: Any, batch: Batch, rng: Any) -> Any:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            return model.apply({"params": params}, inputs, targets, method="loss"), model_state

        def eval_loss_fn(params: Any, model_state: Any, batch: Batch, rng: Any) -> Any:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:].reshape(-1)
            logits = model.apply({"params": params}, inputs).astype(jnp.float32).reshape(-1, vocabulary)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
            return loss, model_state, {"accuracy": accuracy(logits, targets)}

        return loss_fn, eval_loss_fn

    def train_batches(seed: int, start: int = 0) -> Iterator[Batch]:
        batches = text.sequences(dataset.train, config.context + 1, config.batch_size, seed, start)
        return ({"tokens": batch} for batch in batches)

    def test_batches() -> Iterator[Batch]:
        rows = text_training.rows_to_evaluate(config)
        batches = text.spread_sequences(dataset.test, config.context + 1, rows, config.test_batches)
        return ({"tokens": batch} for batch in batches)

    def closing(model: nn.Module, params: Any, test: dict[str, float]) -> Closing:
        numbers = {
            "test_perplexity": math.exp(min(test["loss"], 700.0)),
            "test_bits_per_byte": test["loss"] / math.log(2) / dataset.bytes_per_token,
        }
        if not config.sample_tokens:
            return Closing(numbers, {})
        written = sampling.sample(
            lambda params, window: model.apply({"params": params}, window)[..., : dataset.tokenizer.size],
            params,
            prompt,
            config.sample_tokens,
            context=config.context,
            temperature=config.temperature,
            top_k=config.top_k,
            seed=config.seed,
        )
        return Closing(numbers, {"Sample": dataset.tokenizer.decode([*prompt, *written])})

    return Task(
        model=GPT2(vocabulary, config.context, config.layers, config.heads, config.width, blocks),
        losses=losses,
        optimizer=text_training.adamw(config),
        train_batches=train_batches,
        test_batches=test_batches,
        tokens=config.batch_size * config.context,
        remat=remat,
        closing=closing,
        tensor=text_training.split_products(["c_attn", "c_fc"], ["c_proj"], ["wte"]),
    )


def train(config: Config) -> dict[str, Any]:
    """Train as the flags say, and return the summary."""
    with loop.running("language_modeling", settled(config), prepare) as run:
        for batch in run.batches():
            run.state, metrics = run.experiment.step(run.state, batch)
            run.log(metrics)
    return run.summary


if __name__ == "__main__":
    cli.main(Config, train, __doc__)
