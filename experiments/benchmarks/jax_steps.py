"""The rows of benchmarks.train_step that are JAX's: whole train steps and forward passes, each as its users write it.

jaxmp: a model without a dtype, `jaxmp.linen.apply_policy`, `TrainState` and `make_train_step`. autocast: the same model
as it is and `make_train_step(policy=…)`. By hand, jmp and flax: :mod:`experiments.benchmarks.by_hand` with an ordinary
optax step around it, and the loss scaling of their documentation.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import jaxmp
from experiments import flops, memory, timing
from experiments.benchmarks import by_hand
from experiments.benchmarks.train_step_rows import Pass, Prepared, Row
from experiments.benchmarks.workloads import LossFn, Workload, workload
from experiments.models import attention

LEARNING_RATE, WEIGHT_DECAY, CLIP = 3e-4, 0.01, 1.0
POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16", "tf32": "tensorfloat32", "fp32": "float32"}
HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}

Init = Callable[[], Any]
Step = Callable[[Any, Any], tuple[Any, jax.Array]]


def optimizer() -> optax.GradientTransformation:
    """AdamW after clipping by the global norm: the same for every row, torch's too."""
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY))


def train_step(case: Workload, row: Row, implementation: by_hand.Implementation = None) -> tuple[Init, Step]:
    """``init() -> state`` and ``step(state, batch) -> (state, loss)``, not yet jitted; the state may be donated.

    Args:
      case: the model.
      row: how to train it.
      implementation: of the attention by hand; None for the device's.
    """
    tx = optimizer()
    if row.library in ("jaxmp", "autocast"):
        case = workload(case.name, case.sizes, row.remat)
        explicit = row.library == "jaxmp"
        loss_fn = case.loss_fn(jaxmp.linen.apply_policy(case.model, POLICIES[row.precision]) if explicit else None)
        if row.precision == "fp16" and not row.scaled:
            return _plain(loss_fn, tx, case.init)
        if row.scaled:
            tx = jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())
        return _with_jaxmp(loss_fn, tx, case.init, None if explicit else POLICIES[row.precision])
    model = by_hand.build(case, HALF.get(row.precision), implementation)
    loss_fn = by_hand.loss_fn_of(model)
    if row.precision == "fp32":
        loss_fn = jax.default_matmul_precision("highest")(loss_fn)
    init = functools.partial(by_hand.init, case, model)
    return {"hand": _plain, "jmp": _with_jmp, "flax": _with_flax}[row.library](loss_fn, tx, init)


def forward(
    case: Workload, row: Row, implementation: by_hand.Implementation = None
) -> tuple[Init, Callable[..., jax.Array]]:
    """``init() -> variables`` and ``forward(variables, inputs) -> logits``, which have the dtype of the products.

    The logits have the padding of the vocabulary, as those by hand and torch's do: to cut it off is to copy them.
    """
    if case.unit == "tokens":
        vocabulary = jaxmp.hardware.align_dim(case.sizes.vocabulary, 64)
        case = workload(case.name, dataclasses.replace(case.sizes, vocabulary=vocabulary), row.remat)
    policy: Any = jaxmp.get_policy(POLICIES[row.precision])
    policy = policy.with_output_dtype(policy.compute_dtype)
    if row.library in ("jaxmp", "autocast"):
        explicit = row.library == "jaxmp"
        model: Any = jaxmp.linen.apply_policy(case.model, policy) if explicit else case.model
        own = case.forward_fn(model)
        fun: Any = own if explicit else jaxmp.autocast(own, policy)
        return functools.partial(case.init, jax.random.key(0)), lambda variables, inputs: fun(*variables, inputs)
    model = by_hand.build(case, HALF.get(row.precision), implementation)

    def apply(variables: Any, inputs: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest" if row.precision == "fp32" else "default"):
            return model.apply({"params": variables[0], **variables[1]}, inputs)

    return functools.partial(by_hand.init, case, model, jax.random.key(0)), apply


def prepare(case: Workload, row: Row, which: Pass, batch: Any) -> Prepared:
    """Compiles a row's train step or forward pass and puts its state on the device.

    A turn of a train step is the call that a user makes, with what it does in Python.
    """
    if which == "train":
        init, step = train_step(case, row)
        state = init()
        call, jitted = (step, step.jitted) if isinstance(step, Made) else (jax.jit(step, donate_argnums=0),) * 2
        started = time.perf_counter()
        compiled = jitted.lower(state, batch).compile()  # the call finds it: nothing is compiled again
        seconds = time.perf_counter() - started
        turn = timing.turn(call, state, batch)
        return Prepared(turn, lambda: float(turn()[1]), seconds, memory.of_compiled(compiled))
    init, fun = forward(case, row)
    variables = jax.jit(init)()
    started = time.perf_counter()
    compiled = jax.jit(fun).lower(variables, batch["inputs"]).compile()
    seconds = time.perf_counter() - started
    return Prepared(
        functools.partial(compiled, variables, batch["inputs"]), None, seconds, memory.of_compiled(compiled)
    )


def compiled_bytes(case: Workload, row: Row) -> int:
    """Bytes that a train step needs, its batch too, by the compiler's account; ``sys.maxsize`` if it could not say."""
    init, step = train_step(case, row)
    try:
        compiled = jax.jit(step, donate_argnums=0).lower(jax.eval_shape(init), case.batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # the compiler tries kernels, and those had no room
            raise
        return sys.maxsize
    return memory.of_compiled(compiled) or sys.maxsize


def step_flops(case: Workload, row: Row) -> dict[str, int]:
    """FLOPs of a train step's products by dtype, attention's too: counted on the form that hides none in a kernel."""
    init, step = train_step(case, row, "xla")
    with attention.implementation("portable"):
        return flops.count(step, jax.eval_shape(init), case.batch)


def model_flops(case: Workload) -> int:
    """What a train step costs at least by convention: three times the products of the model's forward pass.

    Attention counts whole, its masked half too, as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B);
    padding of the vocabulary counts like the rest, what remat computes again does not.
    """
    model = by_hand.build(case, None, "xla")
    params, model_state = jax.eval_shape(functools.partial(by_hand.init, case, model), jax.random.key(0))
    counted = flops.count(model.apply, {"params": params, **model_state}, case.batch["inputs"])
    return 3 * sum(counted.values())


def _plain(loss_fn: LossFn, tx: optax.GradientTransformation, init: Callable[[Any], Any]) -> tuple[Init, Step]:
    """What a user writes without loss scaling: nothing is checked."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, model_state = state
        (loss, model_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, model_state, batch, None)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), loss

    def start() -> Any:
        params, model_state = init(jax.random.key(0))
        return params, tx.init(params), model_state

    return jax.jit(start), step


class Made:
    """The step of ``jaxmp.make_train_step``, its loss in place of its metrics.

    Attributes:
      jitted: what it compiles.
    """

    def __init__(self, train: Any) -> None:
        self._train, self.jitted = train, train.jitted

    def __call__(self, state: Any, batch: Any) -> tuple[Any, jax.Array]:
        state, metrics = self._train(state, batch)
        return state, metrics["loss"]


def _with_jaxmp(
    loss_fn: LossFn, tx: optax.GradientTransformation, init: Callable[[Any], Any], policy: str | None
) -> tuple[Init, Step]:
    # A loss that is not finite ends a row in the report, not the whole run.
    train = jaxmp.make_train_step(loss_fn, policy=policy, max_consecutive_skips=sys.maxsize)

    def start() -> Any:
        params, model_state = jax.jit(init)(jax.random.key(0))
        return jaxmp.TrainState.create(params=params, tx=tx, model_state=model_state)

    return start, Made(train)


def _with_jmp(loss_fn: LossFn, tx: optax.GradientTransformation, init: Callable[[Any], Any]) -> tuple[Init, Step]:
    """After jmp's README, with a float32 scale: the float16 one of that text raises in adjust.

    The state has the scale's two numbers in place of the object, which cannot be lowered.
    """
    import jmp

    inner_start, _ = _plain(loss_fn, tx, init)

    def step(state: Any, batch: Any) -> Any:
        (params, opt_state, model_state), (scale, counter) = state
        loss_scale = jmp.DynamicLossScale(scale, counter)

        def scaled(params: Any) -> Any:
            loss, new_model_state = loss_fn(params, model_state, batch, None)
            return loss_scale.scale(loss), new_model_state

        (loss, new_model_state), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        loss, grads = loss_scale.unscale(loss), loss_scale.unscale(grads)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_model_state
        finite = jmp.all_finite(grads)
        kept = jmp.select_tree(finite, new, (params, opt_state, model_state))
        loss_scale = loss_scale.adjust(finite)
        return (kept, (loss_scale.loss_scale, loss_scale.counter)), loss

    return lambda: (inner_start(), (jnp.float32(2**15), jnp.int32(0))), step


def _with_flax(loss_fn: LossFn, tx: optax.GradientTransformation, init: Callable[[Any], Any]) -> tuple[Init, Step]:
    """After the docstring of ``flax.training.dynamic_scale.DynamicScale`` and flax's ImageNet example."""
    inner_start, _ = _plain(loss_fn, tx, init)

    def step(state: Any, batch: Any) -> Any:
        (params, opt_state, model_state), dynamic_scale = state
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        dynamic_scale, finite, (loss, new_model_state), grads = grad_fn(params, model_state, batch, None)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, (params, opt_state))
        return ((params, opt_state, new_model_state), dynamic_scale), loss

    return lambda: (inner_start(), jax.tree.map(jnp.asarray, DynamicScale())), step
