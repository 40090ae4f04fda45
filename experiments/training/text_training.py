"""What the scripts that train on text have in common: their flags, the sizes they stand for, and what they build."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, PartitionSpec

import jaxmp
from experiments import data
from experiments.data.tokens import Kind, Text
from experiments.data.tokens import load as load_text
from experiments.models.transformer import Remat
from experiments.models.weights import Published
from experiments.training import cli, mesh, processes
from experiments.training.experiment import Batch, Closing, Experiment
from experiments.training.precision import (
    read_autocast,
    read_low_precision,
    read_overrides,
    read_policy,
    split_overrides,
)
from jaxmp.sharding import Sharding

_ROOM_TO_EVALUATE = 4096  # tokens whose logits are there at once, whole
_HINT = tyro.conf.arg(help_behavior_hint="(default: what suits model and device)")
Number = Annotated[int | None, _HINT, tyro.conf.arg(metavar="INT")]
Real = Annotated[float | None, _HINT, tyro.conf.arg(metavar="FLOAT")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: none)")]

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
# Model to what its flags are where they are not given, on a GPU and elsewhere.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "next_token": {"gpu": _NEXT_TOKEN, "cpu": _NEXT_TOKEN},
    "gpt2": {"gpu": {**_BASE, "context": 1024, "batch_size": 16, "learning_rate": 6e-4}, "cpu": _SMALL},
    "bert": {"gpu": {**_BASE, "context": 512, "batch_size": 64, "learning_rate": 3e-4}, "cpu": _SMALL},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTraining(cli.Training):
    """Flags of the scripts that train on text."""

    dataset: Annotated[str, tyro.conf.arg(metavar="pysource|PATH")] = "pysource"
    """The text: pysource, the standard library's own sources; or the path of a text file, whose last tenth is held out,
    or of a folder, every tenth of whose .txt, .py and .md files is."""
    tokens: Kind = "auto"
    """bytes; bpe, GPT-2's byte pairs, whose encoder.json and vocab.bpe lie in --data-dir or in gpt2_bpe there; pairs of
    bytes; or auto: bpe if its files are there, bytes otherwise."""
    layers: Number = None
    """Blocks of the transformer."""
    heads: Number = None
    """Attention heads in each."""
    width: Number = None
    """Of the residual stream, a multiple of --heads."""
    context: Number = None
    """Tokens that the model sees."""
    vocabulary: Number = None
    """Tokens of --tokens pairs; for others at least as many as they have, in place of just that many."""
    steps: Number = None
    """Steps to train."""
    batch_size: Annotated[
        int | Literal["auto"] | None, _HINT, tyro.conf.arg(metavar="INT|auto", aliases=("--batch",))
    ] = None
    """Sequences a step; auto for the most that fit in the device's memory."""
    test_batches: Number = None
    """Batches of sequences, spread over the held-out text, to evaluate on."""
    learning_rate: Real = None
    """AdamW's, or the largest one of the schedule."""
    schedule: Annotated[Literal["constant", "cosine"] | None, _HINT, tyro.conf.arg(metavar="{constant,cosine}")] = None
    """Of the learning rate; cosine rises for a twentieth of the steps and then falls to a tenth."""
    weight_decay: Real = None
    """AdamW's, for params of more than one dimension."""
    clip: Real = None
    """Largest norm of all gradients together; longer ones are scaled down to it."""
    weights: File = None
    """Params to begin from: one safetensors file as GPT-2's or BERT's are published. --layers, --heads, --width and the
    vocabulary must be the file's; --context may be shorter. GPT-2's tokens are those of --tokens bpe; BERT's are word
    pieces, which --tokens has not."""
    save_weights: File = None
    """Where to write the trained params in that form, which other libraries read."""


def settled(config: Any, model: str) -> Any:
    """The flags with what suits model and device in place of those that were not given."""
    defaults = DEFAULTS[model]["gpu" if jax.default_backend() == "gpu" else "cpu"]
    return dataclasses.replace(
        config, **{name: value for name, value in defaults.items() if getattr(config, name) is None}
    )


def check(config: Any) -> None:
    """Checks the flags of a transformer, settled.

    Raises:
      ValueError: one has a value that cannot be.
    """
    cli.check(config)
    for name in ("layers", "heads", "width", "context", "steps", "test_batches"):
        cli.require(f"--{name.replace('_', '-')}", getattr(config, name), 1)
    cli.require("--weight-decay", config.weight_decay, 0)
    if not config.clip > 0:
        raise ValueError(f"--clip must be positive, got {config.clip:g}")
    if (path := config.save_weights) is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--save-weights must be a file in a folder that is there, got {path}")
    if config.width % config.heads:
        raise ValueError(f"--width must be a multiple of --heads, got {config.width} for {config.heads} heads")


def load(config: Any) -> Text:
    """The text that the flags mean, on the device.

    Raises:
      ValueError: the vocabulary is too small.
      DataError: the text or its tokens cannot be had, or there are fewer of them than the model sees.
    """
    pairs = 2048 if config.vocabulary is None else config.vocabulary
    text = load_text(config.dataset, config.data_dir, config.tokens, pairs)
    if config.vocabulary is not None and config.vocabulary < text.tokenizer.size:
        raise ValueError(
            f"--vocabulary must be at least the {text.tokenizer.size} tokens of {text.tokenizer.name}, got "
            f"{config.vocabulary}; leave it away, or take --tokens pairs"
        )
    for split, held in (("training", text.train), ("held-out", text.test)):
        if len(held) <= config.context:
            raise data.DataError(
                f"a context must be shorter than the {split} text of {len(held)} tokens, got --context {config.context}"
            )
    return text


def split_remat(remat: str) -> tuple[Any, str]:
    """What a transformer's blocks compute again, and what the step does: the flag is one or the other's."""
    return (remat, "none") if remat in get_args(Remat) else ("none", remat)


def adamw(config: Any) -> optax.GradientTransformation:
    """AdamW as transformers are trained with it, for settled flags."""
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
    """Sequences in a batch of the evaluation."""
    return min(config.batch_size, max(1, _ROOM_TO_EVALUATE // config.context))


class Precision(NamedTuple):
    """What the flags say of precision, read before anything that takes long."""

    policy: Any
    loss_scale: Any
    loss_scale_name: str
    autocast: dict[str, Any]


def read_precision(config: Any) -> Precision:
    """The flags of precision.

    Raises:
      ValueError: one is unknown, or two do not go together.
    """
    policy, loss_scale, name = read_policy(config.policy, config.loss_scale, config.opt_level)
    return Precision(
        policy, loss_scale, name, read_autocast(config.autocast, config.opt_level, policy, config.override)
    )


class Task(NamedTuple):
    """What is trained, without its precision.

    Attributes:
      model: from tokens (batch, context).
      losses: the model, under its policy or bare, to the loss function to train and that to evaluate with.
      optimizer: without loss scaling.
      train_batches, test_batches: as those of :class:`experiments.training.experiment.Experiment`.
      tokens: predicted a step.
      remat: of the step.
      weights: reads and writes the model's published form; None if it has none.
      closing: the model, params and held-out metrics to what the summary says too.
      tensor: patterns of params to how the axis ``tensor`` of a mesh splits them.
    """

    model: nn.Module
    losses: Callable[[nn.Module], tuple[Callable[..., Any], Callable[..., Any]]]
    optimizer: optax.GradientTransformation
    train_batches: Callable[..., Iterator[Batch]]
    test_batches: Callable[[], Iterable[Batch]]
    tokens: int
    remat: str
    weights: Published | None = None
    closing: Callable[[nn.Module, Any, dict[str, float]], Closing] = lambda model, params, test: Closing({}, {})
    tensor: Mapping[str, PartitionSpec] = MappingProxyType({})


def split_products(first: Sequence[str], second: Sequence[str], embeddings: Sequence[str]) -> dict[str, PartitionSpec]:
    """How the axis ``tensor`` splits a transformer: the first of two layers by its columns, the second by its rows."""
    return {
        **{f"**/{name}/kernel": PartitionSpec("fsdp", "tensor") for name in first},
        **{f"**/{name}/bias": PartitionSpec("tensor") for name in first},
        **{f"**/{name}/kernel": PartitionSpec("tensor", "fsdp") for name in second},
        **{f"{name}/embedding": PartitionSpec("tensor", "fsdp") for name in embeddings},
    }


def placing(config: Any) -> tuple[Mesh | None, Any]:
    """The mesh of the flags, settled, and what puts a batch on it; twice None for one device.

    Raises:
      ValueError: the devices do not make the mesh, or do not divide a batch.
    """
    devices = mesh.read(config.mesh)
    mesh.require_rows(devices, config.batch_size, config.accumulate)
    return devices, devices and functools.partial(mesh.spread, devices)


def build(config: Any, task: Task, precision: Precision, origin: str, devices: Mesh | None) -> Experiment:
    """The experiment of a task under its precision, on a mesh or on one device.

    Raises:
      ValueError: a pattern of an override matches nothing, ``--remat`` is unknown, or the weights are another model's.
    """
    autocast, model, policy = precision.autocast, task.model, precision.policy
    if isinstance(policy, jaxmp.Policy):  # a model returns its loss, too, which is float32 whatever logits are
        policy = policy.with_output_dtype("float32")
    if not autocast:
        model = jaxmp.linen.apply_policy(model, policy, read_overrides(config.override))
    optimizer = read_low_precision(task.optimizer, config.low_precision, config.seed)
    tx = jaxmp.loss_scaling(optimizer, precision.loss_scale)

    @jax.jit
    def init_params(seed: int) -> Any:
        return model.init(jax.random.key(seed), jnp.zeros((1, config.context), jnp.int32))["params"]

    params = jax.eval_shape(init_params, 0)  # a pattern that matches nothing is an error before the folder is made
    fields = {"apply_fn": model.apply, "ema": config.ema > 0}
    begin, create_on_mesh, specs, sharding = init_params, None, None, None
    if devices is not None:
        rules = task.tensor if devices.shape["tensor"] > 1 else None
        specs = jaxmp.sharding.fsdp_specs(params, devices, rules=rules)
        sharding = Sharding(devices, specs)

        def create_on_mesh(seed: int) -> jaxmp.TrainState:
            return jaxmp.TrainState.create_sharded(lambda: init_params(seed), tx, sharding, **fields)

    loss_fn, eval_loss_fn = task.losses(model)
    eval_loss_fn = mesh.gathered(eval_loss_fn, devices, specs)

    if config.weights is not None and task.weights is not None:
        loaded = task.weights.load_for(params, config.weights)

        def begin(seed: int) -> Any:
            return jax.tree.map(lambda array, param: jnp.array(array, param.dtype), loaded, params)

        if devices is not None:

            def create_on_mesh(seed: int) -> jaxmp.TrainState:
                cast = jax.tree.map(lambda array, param: np.asarray(array, param.dtype), loaded, params)
                placed = mesh.place(cast, specs, devices)
                return jaxmp.TrainState.create(params=placed, tx=tx, **fields)

    to_train = to_evaluate = autocast
    if autocast.get("overrides"):
        batches = next(task.train_batches(0)), next(iter(task.test_batches()))
        args = [(params, None, batch, None) for batch in batches]
        to_train, to_evaluate = split_overrides(autocast, [(loss_fn, args[0]), (eval_loss_fn, args[1])])

    def closing(state: jaxmp.TrainState, test: dict[str, float]) -> Closing:
        params = state.params
        if state.ema_params is not None:
            params = jax.tree.map(lambda ema, param: ema.astype(param.dtype), state.ema_params, params)
        if config.save_weights is not None and task.weights is not None:
            whole = mesh.on_host(params)
            if processes.first():
                task.weights.save(whole, config.save_weights, vocabulary=task.model.vocabulary)
        return task.closing(model, params, test)

    return Experiment(
        loss_fn=jaxmp.autocast(loss_fn, **to_train) if autocast else loss_fn,
        step=jaxmp.make_train_step(
            loss_fn,
            accumulate_steps=config.accumulate,
            ema_decay=config.ema or None,
            remat=None if task.remat == "none" else task.remat,  # on a mesh weights are gathered again
            sharding=sharding,
            **to_train,
        ),
        eval_step=jaxmp.make_eval_step(eval_loss_fn, use_ema=config.ema > 0, **to_evaluate),
        init_params=begin,
        create=lambda params: jaxmp.TrainState.create(params=params, tx=tx, **fields),
        train_batches=task.train_batches,
        test_batches=task.test_batches,
        steps=config.steps,
        batch_size=task.tokens,
        precision={
            "policy": str(precision.policy),
            "loss_scale_rule": precision.loss_scale_name,
            "data": origin,
            "autocast": "yes" if autocast else "no",
        },
        unit="tokens",
        closing=closing,
        create_on_mesh=create_on_mesh,
    )
