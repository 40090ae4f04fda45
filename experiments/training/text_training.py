"""Flags, sizes and setup of the scripts that train on text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh, PartitionSpec

import jaxmp
from experiments.data import DataError
from experiments.data.tokens import Kind, Text
from experiments.data.tokens import load as load_text
from experiments.models.transformer import Remat
from experiments.training import cli, mesh
from experiments.training.experiment import Batch, Closing, Experiment
from experiments.training.precision import Precision, read_low_precision, read_overrides, split_overrides
from jaxmp.sharding import Sharding

_ROOM_TO_EVALUATE = 4096  # tokens per evaluation batch; their logits are in memory together
_HINT = tyro.conf.arg(help_behavior_hint="(default: depends on model and device)")
Number = Annotated[int | None, _HINT, tyro.conf.arg(metavar="INT")]
Real = Annotated[float | None, _HINT, tyro.conf.arg(metavar="FLOAT")]

_NEXT_TOKEN = {
    "vocabulary": 2048, "context": 4, "batch_size": 8192, "steps": 150, "learning_rate": 3e-3, "test_batches": 8,
    "schedule": "constant",
}  # fmt: skip
_TRAINING = {"test_batches": 16, "schedule": "cosine", "weight_decay": 0.1, "clip": 1.0}
_SMALL = {
    **_TRAINING, "layers": 4, "heads": 4, "width": 128, "context": 128, "batch_size": 16, "steps": 250,
    "learning_rate": 3e-3,
}  # fmt: skip
_BASE = {**_TRAINING, "layers": 12, "heads": 12, "width": 768, "steps": 2000}
# The default flags of each model, on a GPU and on other devices.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "next_token": {"gpu": _NEXT_TOKEN, "cpu": _NEXT_TOKEN},
    "gpt2": {"gpu": {**_BASE, "context": 1024, "batch_size": 16, "learning_rate": 6e-4}, "cpu": _SMALL},
    "bert": {"gpu": {**_BASE, "context": 512, "batch_size": 64, "learning_rate": 3e-4}, "cpu": _SMALL},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFlags:
    """The text, the transformer and its training."""

    dataset: Annotated[str, tyro.conf.arg(metavar="pysource|PATH")] = "pysource"
    """The text: pysource (the source code of Python's standard library), or the path of a text file or folder. The last
    tenth of a file is held out. In a folder, .txt, .py and .md files are read, and every tenth file is held out."""
    tokens: Annotated[Kind | None, _HINT, tyro.conf.arg(metavar="{bytes,pairs}")] = None
    """The tokens: bytes, or pairs of bytes."""
    layers: Number = None
    """Blocks of the transformer."""
    heads: Number = None
    """Attention heads per block."""
    width: Number = None
    """Width of the residual stream, a multiple of --heads."""
    context: Number = None
    """Tokens that the model sees."""
    vocabulary: Number = None
    """Size of the vocabulary. With --tokens pairs it is the number of tokens. With other --tokens it must be at least
    the number of different tokens."""
    steps: Number = None
    """Steps to train."""
    batch_size: Annotated[int | None, _HINT, tyro.conf.arg(metavar="INT", aliases=("--batch",))] = None
    """Sequences per step."""
    test_batches: Number = None
    """Batches of sequences, spread over the held-out text, to evaluate on."""
    learning_rate: Real = None
    """Learning rate of AdamW; with a schedule, the largest learning rate."""
    schedule: Annotated[Literal["constant", "cosine"] | None, _HINT, tyro.conf.arg(metavar="{constant,cosine}")] = None
    """Schedule of the learning rate. cosine rises for a twentieth of the steps and then falls to a tenth."""
    weight_decay: Real = None
    """Weight decay of AdamW, for params with more than one dimension."""
    clip: Real = None
    """Largest global norm of the gradients. Gradients with a larger norm are scaled down to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTraining(TextFlags, cli.Training):
    """Flags of the scripts that train on text."""


def settled(config: Any, model: str) -> Any:
    """Fill in the defaults of the model and device for flags that were not given."""
    defaults = DEFAULTS[model]["gpu" if jax.default_backend() == "gpu" else "cpu"]
    return dataclasses.replace(
        config, **{name: value for name, value in defaults.items() if getattr(config, name) is None}
    )


def check(config: Any) -> None:
    """Check the flags of a transformer after :func:`settled`.

    Raises:
      ValueError: the value of a flag is invalid.
    """
    cli.check(config)
    for name in ("layers", "heads", "width", "context", "steps", "test_batches"):
        cli.require(f"--{name.replace('_', '-')}", getattr(config, name), 1)
    cli.require("--weight-decay", config.weight_decay, 0)
    if not config.clip > 0:
        raise ValueError(f"--clip must be positive, got {config.clip:g}")
    if config.width % config.heads:
        raise ValueError(f"--width must be a multiple of --heads, got {config.width} for {config.heads} heads")


def load(config: Any) -> Text:
    """Return the text that the flags name, on the device.

    Raises:
      ValueError: the vocabulary is too small.
      DataError: the text or its tokenizer is not available, or the text is not longer than the context.
    """
    pairs = 2048 if config.vocabulary is None else config.vocabulary
    text = load_text(config.dataset, config.tokens or "bytes", pairs)
    if config.vocabulary is not None and config.vocabulary < text.tokenizer.size:
        raise ValueError(
            f"--vocabulary must be at least the {text.tokenizer.size} tokens of {text.tokenizer.name}, got "
            f"{config.vocabulary}; leave it out, or use --tokens pairs"
        )
    for split, part in (("training", text.train), ("held-out", text.test)):
        if len(part) <= config.context:
            raise DataError(
                f"a context must be shorter than the {split} text of {len(part)} tokens, got --context {config.context}"
            )
    return text


def split_remat(remat: str) -> tuple[Any, str]:
    """Split the flag ``--remat`` into the remat of the blocks and that of the step."""
    return (remat, "none") if remat in get_args(Remat) else ("none", remat)


def adamw(config: Any) -> optax.GradientTransformation:
    """Return AdamW with the usual settings for transformers.

    The flags must come from :func:`settled`.
    """
    learning_rate: Any = config.learning_rate
    if config.schedule == "cosine":
        rise = max(1, config.steps // 20)
        learning_rate = optax.warmup_cosine_decay_schedule(
            0, learning_rate, rise, max(config.steps, rise + 1), learning_rate / 10
        )

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda param: param.ndim > 1, params)

    decayed = optax.adamw(learning_rate, b2=0.95, weight_decay=config.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(config.clip), decayed)


def rows_to_evaluate(config: Any) -> int:
    """Return the number of sequences in a batch of the evaluation."""
    return min(config.batch_size, max(1, _ROOM_TO_EVALUATE // config.context))


class Task(NamedTuple):
    """A model with its loss, optimizer and batches, without its precision.

    Attributes:
      model: the model, which takes tokens (batch, context).
      losses: makes the loss functions for training and for evaluation from the model, with or without a policy.
      optimizer: the optimizer without loss scaling.
      train_batches: see :class:`experiments.training.experiment.Experiment`.
      test_batches: see :class:`experiments.training.experiment.Experiment`.
      tokens: the number of tokens that a step predicts.
      remat: the remat of the step.
      closing: makes further numbers and texts for the summary from the model, params and held-out metrics.
      tensor: the specs that split params over the mesh axis ``tensor``, keyed by patterns of the params' paths.
    """

    model: nn.Module
    losses: Callable[[nn.Module], tuple[Callable[..., Any], Callable[..., Any]]]
    optimizer: optax.GradientTransformation
    train_batches: Callable[..., Iterator[Batch]]
    test_batches: Callable[[], Iterable[Batch]]
    tokens: int
    remat: str
    closing: Callable[[nn.Module, Any, dict[str, float]], Closing] = lambda model, params, test: Closing({}, {})
    tensor: Mapping[str, PartitionSpec] = MappingProxyType({})


def split_products(first: Sequence[str], second: Sequence[str], embeddings: Sequence[str]) -> dict[str, PartitionSpec]:
    """Return the specs that split pairs of layers over the mesh axis ``tensor``.

    The first layer is split by columns, the second by rows.

    Args:
      first: the names of the first layers of the pairs.
      second: the names of the second layers of the pairs.
      embeddings: the names of the embeddings, which are split by rows.
    """
    return {
        **{f"**/{name}/kernel": PartitionSpec("fsdp", "tensor") for name in first},
        **{f"**/{name}/bias": PartitionSpec("tensor") for name in first},
        **{f"**/{name}/kernel": PartitionSpec("tensor", "fsdp") for name in second},
        **{f"{name}/embedding": PartitionSpec("tensor", "fsdp") for name in embeddings},
    }


@dataclasses.dataclass(frozen=True)
class Setup:
    """A task under its precision, on a mesh or on one device.

    A setup has everything that an experiment needs except its two steps. The script makes the train step and the
    evaluation step.

    Attributes:
      config: the flags, from :func:`settled`.
      task: the task.
      precision: the precision of the flags.
      model: the task's model. It has the policy, unless the loss functions run under autocast.
      tx: the optimizer, wrapped in loss scaling.
      init: makes fresh params from a seed; jitted.
      params: the shapes of the params.
      sharding: the sharding of the params; None for one device.
      loss_fn: the loss function for training.
      eval_loss_fn: the loss function for evaluation.
      autocast: the arguments of :func:`jaxmp.autocast` for ``loss_fn``; empty without autocast.
      eval_autocast: the arguments of :func:`jaxmp.autocast` for ``eval_loss_fn``; empty without autocast.
    """

    config: Any
    task: Task
    precision: Precision
    model: nn.Module
    tx: optax.GradientTransformationExtraArgs
    init: Callable[[int], Any]
    params: Any
    sharding: Sharding | None
    loss_fn: Callable[..., Any]
    eval_loss_fn: Callable[..., Any]
    autocast: dict[str, Any]
    eval_autocast: dict[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of the state that do not depend on the params."""
        return {"apply_fn": self.model.apply, "ema": self.config.ema > 0}

    def init_params(self, seed: int) -> Any:
        """Return the params that training starts from."""
        return self.init(seed)

    def create(self, params: Any) -> jaxmp.TrainState:
        """Return a state with ``params``, which must not be used again."""
        return jaxmp.TrainState.create(params=params, tx=self.tx, **self.fields)

    def create_on_mesh(self, seed: int) -> jaxmp.TrainState:
        """Return the state that training starts from, on the mesh."""
        assert self.sharding is not None
        return jaxmp.TrainState.create_sharded(lambda: self.init_params(seed), self.tx, self.sharding, **self.fields)

    def closing(self, state: jaxmp.TrainState, test: dict[str, float]) -> Closing:
        """Return the task's numbers and texts for the trained params."""
        params = state.params
        if state.ema_params is not None:
            params = jax.tree.map(lambda ema, param: ema.astype(param.dtype), state.ema_params, params)
        return self.task.closing(self.model, params, test)

    def experiment(self, step: Any, eval_step: Any, origin: str) -> Experiment:
        """Return the experiment with its steps and with data from ``origin``."""
        devices = None if self.sharding is None else self.sharding.mesh
        return Experiment(
            loss_fn=jaxmp.autocast(self.loss_fn, **self.autocast) if self.autocast else self.loss_fn,
            step=step,
            eval_step=eval_step,
            init_params=self.init_params,
            create=self.create,
            train_batches=lambda seed, start=0: mesh.placed(devices, self.task.train_batches(seed, start)),
            test_batches=lambda: mesh.placed(devices, iter(self.task.test_batches())),
            steps=self.config.steps,
            batch_size=self.task.tokens,
            precision=self.precision.description(origin),
            unit="tokens",
            closing=self.closing,
            create_on_mesh=None if self.sharding is None else self.create_on_mesh,
            cast_plan=jaxmp.cast_plan(self.loss_fn, **self.autocast) if self.autocast else None,
        )


def set_up(config: Any, task: Task, precision: Precision, devices: Mesh | None) -> Setup:
    """Put a task under its precision, on a mesh or on one device.

    Raises:
      ValueError: an override matches nothing.
    """
    policy, model = precision.policy, task.model
    if isinstance(policy, jaxmp.Policy):  # the model also returns its loss, which must be float32
        policy = policy.with_output_dtype("float32")
    if not precision.autocast:
        model = jaxmp.linen.apply_policy(model, policy, read_overrides(config.override))
    optimizer = read_low_precision(task.optimizer, config.low_precision, config.seed)

    @jax.jit
    def init(seed: int) -> Any:
        return model.init(jax.random.key(seed), jnp.zeros((1, config.context), jnp.int32))["params"]

    params = jax.eval_shape(init, 0)  # an override that matches nothing is an error here, before the run folder is made
    sharding = mesh.sharding(devices, params, task.tensor)
    loss_fn, eval_loss_fn = task.losses(model)
    eval_loss_fn = mesh.gathered(eval_loss_fn, sharding)

    autocast = eval_autocast = precision.autocast
    if autocast.get("overrides"):
        batches = next(task.train_batches(0)), next(iter(task.test_batches()))
        args = [(params, None, batch, None) for batch in batches]
        autocast, eval_autocast = split_overrides(autocast, [(loss_fn, args[0]), (eval_loss_fn, args[1])])
    return Setup(
        config=config,
        task=task,
        precision=precision,
        model=model,
        tx=jaxmp.loss_scaling(optimizer, precision.loss_scale),
        init=init,
        params=params,
        sharding=sharding,
        loss_fn=loss_fn,
        eval_loss_fn=eval_loss_fn,
        autocast=autocast,
        eval_autocast=eval_autocast,
    )
