"""Build the train steps that run in JAX.

Each row is written as users of the library write it:

- jaxmp: a model without a dtype under `jaxmp.linen.apply_policy`, and `make_train_step`
- autocast: the same model without a policy, and `make_train_step(policy=…)`
- hand: :mod:`experiments.benchmarks.models.by_hand` in an ordinary optax step
- unprepared: the float32 code of `hand` under `jaxmp.autocast`, in the same optax step
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp
from experiments.benchmarks.measure.turns import Prepared
from experiments.benchmarks.models import by_hand
from experiments.benchmarks.models.workloads import LossFn, Workload, workload
from experiments.benchmarks.shared import scaled_steps
from experiments.benchmarks.shared.scaled_steps import LEARNING_RATE, Init, Start, Step
from experiments.benchmarks.train_step.rows import Row
from experiments.measure import timing
from jaxmp.inspect.compiled import compiling

WEIGHT_DECAY, CLIP = 0.01, 1.0
POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16", "tf32": "tensorfloat32", "fp32": "float32"}
HALF = {"bf16": jnp.bfloat16}


def optimizer() -> optax.GradientTransformation:
    """Return clipping by the global norm followed by AdamW.

    Every row has this optimizer, torch's rows too.
    """
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY))


def train_step(case: Workload, row: Row) -> tuple[Start, Step]:
    """Return the functions ``start`` and ``step`` of a row.

    ``start()`` returns a state. ``step(state, batch)`` returns ``(state, loss)``; it is not jitted, and may donate its
    state.
    """
    tx = optimizer()
    if row.library in ("jaxmp", "autocast"):
        case = workload(case.name, case.sizes, row.remat, row.chunks)
        explicit = row.library == "jaxmp"
        loss_fn = case.loss_fn(jaxmp.linen.apply_policy(case.model, POLICIES[row.precision]) if explicit else None)
        if row.constant_scale:
            return scaled_steps.with_constant_scale(loss_fn, tx, case.init)
        if row.scaled:
            tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())
        policy = None if explicit else POLICIES[row.precision]
        return _made(loss_fn, tx, case.init, policy, row.compiler_options)
    is_float32_code = row.library == "unprepared"
    model = by_hand.build(case, None if is_float32_code else HALF.get(row.precision))
    loss_fn = by_hand.loss_fn_of(model)
    if is_float32_code:
        loss_fn = jaxmp.autocast(loss_fn, POLICIES[row.precision])
    if row.precision == "fp32":
        loss_fn = jax.default_matmul_precision("highest")(loss_fn)
    return scaled_steps.no_scaling(loss_fn, tx, functools.partial(by_hand.init, case, model))


def prepare(case: Workload, row: Row, batch: Any) -> Prepared:
    """Compile a row's train step, and put its state on the device.

    A turn is the call that a user makes, including its Python code.
    """
    batch = jax.device_put(batch)
    start, step = train_step(case, row)
    state = start()
    if isinstance(step, Made):
        call, jitted = step, step.train
    else:
        call = jitted = jax.jit(step, donate_argnums=0, compiler_options=row.compiler_options)
    started = time.perf_counter()
    compiled = jitted.lower(state, batch).compile()  # the call reuses this program
    seconds = time.perf_counter() - started
    if row.constant_scale:
        state = scaled_steps.settled(start, compiled, batch)
    turn = timing.turn(call, state, batch)
    return Prepared(turn, lambda: float(turn()[1]), seconds, compiling.peak_bytes(compiled))


class Made:
    """A step of ``jaxmp.make_train_step`` that returns the loss, not the metrics.

    Attributes:
      train: the step of ``make_train_step``.
    """

    def __init__(self, train: Any) -> None:
        self.train = train

    def __call__(self, state: Any, batch: Any) -> tuple[Any, jax.Array]:
        state, metrics = self.train(state, batch)
        return state, metrics["loss"]


def _made(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    init: Init,
    policy: str | None,
    compiler_options: dict[str, bool] | None = None,
) -> tuple[Start, Step]:
    train = jaxmp.make_train_step(
        loss_fn,
        policy=policy,
        max_consecutive_skips=sys.maxsize,  # a non-finite loss is an error of this row, so it must not raise
        compiler_options=compiler_options,
    )

    def start() -> Any:
        params, model_state = jax.jit(init)(jax.random.key(0))
        return jaxmp.TrainState.create(params=params, tx=tx, model_state=model_state)

    return start, Made(train)
