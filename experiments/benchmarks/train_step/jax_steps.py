"""Build the train steps that run in JAX.

Each row is written as users of the library write it:

- jaxmp: a model without a dtype under `jaxmp.linen.apply_policy`, and `make_train_step`
- autocast: the same model without a policy, and `make_train_step(policy=…)`
- hand, jmp, flax: :mod:`experiments.benchmarks.models.by_hand` in an ordinary optax step, with the loss scaling in the
  documentation of jmp or Flax if the row is scaled
- jmp without scaling: the float32 code of `hand` under a policy of jmp, in the same optax step
- unprepared: the float32 code of `hand` under `jaxmp.autocast`, in the same optax step
"""

from __future__ import annotations

import dataclasses
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
from experiments.measure import flops, timing
from experiments.models import attention
from jaxmp.inspect.compiled import compiling

WEIGHT_DECAY, CLIP = 0.01, 1.0
POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16", "tf32": "tensorfloat32", "fp32": "float32"}
HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


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
        if row.precision == "fp16" and not row.scaled:
            make_step = scaled_steps.with_constant_scale if row.constant_scale else scaled_steps.no_scaling
            return make_step(loss_fn, tx, case.init)
        if row.scaled:
            tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())
        policy = None if explicit else POLICIES[row.precision]
        return _made(loss_fn, tx, case.init, policy, row.compiler_options)
    model = _by_hand(case, row)
    loss_fn = by_hand.loss_fn_of(model)
    if row.library == "unprepared":
        loss_fn = jaxmp.autocast(loss_fn, POLICIES[row.precision])
    if _has_jmp_policy(row):
        loss_fn = _under_jmp_policy(loss_fn, HALF[row.precision])
    if row.precision == "fp32":
        loss_fn = jax.default_matmul_precision("highest")(loss_fn)
    init = functools.partial(by_hand.init, case, model)
    steps = {"jmp": scaled_steps.with_jmp, "flax": scaled_steps.with_flax}
    make_step = steps[row.library] if row.scaled else scaled_steps.no_scaling
    return make_step(loss_fn, tx, init)


def _has_jmp_policy(row: Row) -> bool:
    return row.library == "jmp" and not row.scaled


def _under_jmp_policy(loss_fn: LossFn, dtype: Any) -> LossFn:
    """Return a loss function under a policy of jmp, as in "Policies" in jmp's README."""
    import jmp

    policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=dtype, output_dtype=jnp.float32)

    def with_casts(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        params, batch = policy.cast_to_compute((params, batch))
        return policy.cast_to_output(loss_fn(params, model_state, batch, rng))

    return with_casts


def _by_hand(case: Workload, row: Row) -> Any:
    is_float32_code = row.library == "unprepared" or _has_jmp_policy(row)
    return by_hand.build(case, None if is_float32_code else HALF.get(row.precision))


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


def step_flops(case: Workload, row: Row) -> dict[str, int]:
    """Return the FLOPs of a train step's products by dtype.

    The FLOPs are counted with the portable attention, because a fused kernel hides its products.
    """
    inside_a_trace = dataclasses.replace(row, triton=True)  # JAX allows compiler options only in the outermost jit
    start, step = train_step(case, inside_a_trace)
    with attention.implementation("portable"):
        return flops.count(step, jax.eval_shape(start), case.batch)


@functools.cache
def model_flops(case: Workload) -> int:
    """Return the FLOPs of a step by convention.

    The FLOPs are three times those of the forward pass's products. Masked entries of attention count too, as in PaLM
    (Chowdhery et al. 2022, arXiv 2204.02311, appendix B). The padding of the vocabulary counts. Recomputation by remat
    does not count.
    """
    model = by_hand.build(case)
    params, model_state = jax.eval_shape(functools.partial(by_hand.init, case, model), jax.random.key(0))
    counted = flops.count(model.apply, {"params": params, **model_state}, case.batch["inputs"])
    return 3 * sum(counted.values())


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
