"""The code in docs/coming_from.md runs, and both columns agree.

Each section runs on stand-ins for the reader's model, optimizer and data. The results of both columns are compared
with the same naive computation. The left column runs only where its library is installed. In a block, an empty line
separates the setup from the code of each step. Growth intervals of 2000 steps are 2 here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import linen_zoo
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from readme_tools import (
    BIAS,
    FINITE,
    LEARNING_RATE,
    MAX_NORM,
    PAGE,
    WEIGHT,
    Code,
    Scope,
    TorchParams,
    X,
    Y,
    adjusted,
    close,
    cosine,
    expected_decay,
    expected_params,
    expected_scales,
    flat,
    jax_program,
    products,
    read_page,
    run,
    torch_program,
    train,
)

import jaxmp
from jaxmp.program.walk import equations, product_dtypes

pytestmark = [pytest.mark.once, pytest.mark.slow("runs the code of the docs")]

# torch: autocast and GradScaler.


def known_torch(code: Code) -> Any:
    scope = torch_program()
    scope["params"] = TorchParams(scope["model"])
    return train(code, scope, lambda: scope["scaler"].get_scale())


def write_torch(code: Code) -> Any:
    scope = jax_program()
    results = train(code, scope, lambda: scope["opt_state"].loss_scale.loss_scale)
    assert products(scope) == {"float16"}
    assert scope["params"]["kernel"].dtype == jnp.float32
    return results


TORCH_STATE = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2, "_growth_tracker": 1}


def known_torch_state(code: Code) -> Any:
    scope = torch_program()
    scaler, optimizer, model = scope["scaler"], scope["optimizer"], scope["model"]
    scaler.load_state_dict(TORCH_STATE)
    assert run(code.set_up, scope)["state_dict"] == TORCH_STATE
    scales = []
    for finite in FINITE:
        loss = model(scope["x"]).sum() * (1.0 if finite else float("inf"))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def write_torch_state(code: Code) -> Any:
    return adjusted(run(code.set_up, jax_program() | {"state_dict": TORCH_STATE})["loss_scale"])


# torch, Keras and accelerate: bfloat16, accumulation, schedules, several optimizers, several devices.

MICROBATCHES = 4


def known_steps(code: Code) -> Any:
    """Run the steps in torch; return the learning rates of finite steps, and the params or their average."""
    scope = torch_program()
    model, x, rates = scope["model"], scope["x"], []
    run(code.set_up if code.step else "", scope)
    for finite in FINITE:
        if finite or "scaler.step" in code.step:  # without a scaler, torch would update with NaN
            scope["x"] = x if finite else x * float("inf")
            scope["microbatches"] = [(scope["x"], scope["y"])] * MICROBATCHES
            run(code.step or code.set_up, scope)
            rates += [scope["learning_rate"]] if finite and "learning_rate" in scope else []
    return rates, flat(TorchParams(scope["averaged_model"].module if "averaged_model" in scope else model))


def known_average(code: Code) -> Any:
    """Run the steps in torch, with an average that starts at the initial params."""
    return known_steps(code._replace(set_up=f"{code.set_up}\naveraged_model.update_parameters(model)"))


def known_resumed(code: Code) -> Any:
    """Run each step in torch with a new model and optimizer, which read the saved file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for _ in range(sum(FINITE)):
            scope = torch_program() | {"os": os}
            run(code.set_up, scope)
            run(code.step, scope)
    return [], flat(TorchParams(scope["model"]))


def known_distributed(code: Code) -> Any:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0"}.items():
            environment.setenv(name, value)  # as torchrun does
        result = known_steps(code)
        import_module("torch").distributed.destroy_process_group()
    return result


def known_accelerate_steps(code: Code) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one precision
    return known_steps(code._replace(set_up=f"from accelerate import Accelerator\n{code.set_up}"))


def known_keras_steps(code: Code) -> Any:
    with keras_on_jax() as keras:
        scope: Scope = {"keras": keras, "x": X, "y": Y}
        model, rates = run(code.set_up, scope)["model"], []
        model.build(X.shape)
        model.set_weights([WEIGHT, BIAS])
        for _ in range(sum(FINITE)):
            rates.append(float(run(code.step, scope)["learning_rate"]))
        kernel, bias = (np.asarray(variable.value) for variable in model.trainable_variables)
        return rates, flat({"kernel": kernel, "bias": bias})


def write_steps(code: Code, model: nn.Module | None = None) -> Any:
    """Run the train steps; return the learning rates of finite steps, and the params or their average."""
    scope, rates = program_of_batches(model), []
    run(code.set_up, scope)
    for finite in FINITE:
        x = scope["x"] if finite else scope["x"] * float("inf")
        scope["batch"] = {"x": jnp.tile(x, (MICROBATCHES, 1)), "y": jnp.tile(scope["y"], (MICROBATCHES, 1))}
        run(code.step, scope)
        assert bool(scope["metrics"]["skipped"]) != finite
        rates += [float(scope["learning_rate"])] if finite and "learning_rate" in scope else []
    assert products_of_step(scope) == {"bfloat16" if "mixed_bfloat16" in code.set_up else "float16"}
    return rates, flat(scope.get("averaged_params", scope["state"].params))


def program_of_batches(model: nn.Module | None = None) -> Scope:
    """Return ``jax_program`` with a loss function that takes the params and the batch."""
    scope = jax_program(model)
    scope["loss_of_examples"] = scope["loss_fn"]
    return run('def loss_fn(params, batch): return loss_of_examples(params, batch["x"], batch["y"])', scope)


class TwoLayers(nn.Module):
    """A linear model of two equal layers that share their params."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.zeros, (8, 8))
        bias = self.param("bias", nn.initializers.zeros, 8)
        y = jnp.zeros((x.shape[0], 8))
        for number in range(2):
            with jax.named_scope(f"Block_{number}"):
                y = y + (x @ kernel + bias) / 2
        return y


def write_recomputed(code: Code) -> Any:
    return write_steps(code, TwoLayers())


def write_resumed(code: Code) -> Any:
    """Run each step with a new state, which is restored from the last checkpoint."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for _ in range(sum(FINITE)):
            scope = program_of_batches()
            scope["batch"] = {"x": scope["x"], "y": scope["y"]}
            run(code.set_up, scope)
            run(code.step, scope)
            jaxmp.checkpoint.wait()  # as the end of a program does
    return [], flat(scope["state"].params)


def products_of_step(scope: Scope) -> set[str]:
    return product_dtypes(jax.make_jaxpr(scope["loss_fn"])(scope["state"].params, scope["batch"]))


# Apex.


def known_apex(code: Code) -> Any:
    import torch
    from apex import amp

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)).to("cuda")
    scope = torch_program() | {"amp": amp, "model": model}
    scope["optimizer"] = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    run(code.set_up, scope)
    loss_scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    run(code.step, scope)  # creates the master weights
    params = {str(param.dtype).removeprefix("torch.") for param in amp.master_params(scope["optimizer"])}
    output = scope["model"](scope["x"])
    return params, str(output.dtype).removeprefix("torch."), loss_scale


def write_apex(code: Code) -> Any:
    scope = jax_program(nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=True), nn.Dense(8)]))
    variables = scope["model"].init(jax.random.key(0), X)

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((scope["model"].apply(variables | {"params": params}, x) - y) ** 2)

    scope |= {"loss_fn": loss_fn, "params": variables["params"]}
    model = run(code.set_up, scope)["model"]
    if not code.step:  # the params are no longer float32
        variables = model.init(jax.random.key(0), X)
        scope["params"] = variables["params"]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(variables["params"]["layers_1"])} == {"float32"}
    assert products(scope) == {"float16"}
    output, captured = model.apply(variables, X, capture_intermediates=True)
    assert captured["intermediates"]["layers_1"]["__call__"][0].dtype == jnp.float32
    run(code.step, scope)
    params = {str(leaf.dtype) for leaf in jax.tree.leaves(scope["params"])}
    with (
        contextlib.nullcontext()
        if code.step
        else pytest.warns(UserWarning, match="updates below 1/4096 of a weight are lost")
    ):
        opt_state = scope["tx"].init(scope["params"])
    return params, str(output.dtype), float(jaxmp.get_loss_scale(opt_state).loss_scale)


# Keras.


@contextmanager
def keras_on_jax() -> Iterator[Any]:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is imported
    import keras

    before = keras.mixed_precision.global_policy()
    yield keras
    keras.mixed_precision.set_global_policy(before)


def known_keras(code: Code) -> Any:
    with keras_on_jax() as keras:
        model = run(code.set_up, {"keras": keras})["model"]
        output = model(X)
        params = {variable.dtype for variable in model.trainable_variables}
        computed = [layer.compute_dtype for layer in model.layers]
        return params, computed, str(output.dtype), float(model.optimizer.initial_scale)


def write_keras(code: Code) -> Any:
    scope = run(code.set_up, jax_program())
    variables = scope["model"].init(jax.random.key(0), X)
    output = scope["model"].apply(variables, X)
    params = {str(leaf.dtype) for leaf in jax.tree.leaves(variables["params"])}
    computed = linen_zoo.products(scope["model"].apply, variables, X)
    opt_state = scope["tx"].init(variables["params"])
    return params, computed, str(output.dtype), float(jaxmp.get_loss_scale(opt_state).loss_scale)


# accelerate.


def known_accelerate(code: Code) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a process has one precision
    scope = torch_program() | {"Accelerator": Accelerator}
    run(code.set_up, scope)
    scaled = scope["accelerator"].scaler is not None  # without a GPU, it trains in float32 and skips no step
    batches = [scope["x"] if finite else scope["x"] * float("inf") for finite in FINITE if finite or scaled]
    skipped = [run(code.step, scope | {"x": x})["skipped"] for x in batches]
    assert not scaled or skipped == [not finite for finite in FINITE]
    return flat(TorchParams(scope["model"]))


def write_accelerate(code: Code) -> Any:
    scope = jax_program()
    bare = scope["loss_fn"]

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return bare(params, batch["x"], batch["y"]), model_state

    scope["loss_fn"] = loss_fn
    run(code.set_up, scope)
    skipped = []
    for finite in FINITE:
        scope["batch"] = {"x": scope["x"] if finite else scope["x"] * float("inf"), "y": scope["y"]}
        skipped.append(bool(run(code.step, scope)["skipped"]))
    assert skipped == [not finite for finite in FINITE]
    return flat(scope["state"].params)


# jmp.


def either_jmp(code: Code) -> Any:
    """Use jmp's objects alone, and pass them to jaxmp."""
    scope = run(code.set_up, jax_program())
    policy, loss_scale = scope["policy"], dataclasses.replace(scope["loss_scale"], period=2)
    cast = policy.cast_to_compute({"x": jnp.ones(2), "ids": jnp.arange(2)})
    scope["model"] = jaxmp.linen.apply_policy(scope["model"], policy)
    assert products(scope) == {"float16"}
    opt_state = jaxmp.loss_scaling(scope["tx"], loss_scale).init(scope["params"])
    start = float(jaxmp.get_loss_scale(opt_state).loss_scale)
    return {name: str(leaf.dtype) for name, leaf in cast.items()}, adjusted(loss_scale), start


# flax's DynamicScale.


def known_flax(code: Code) -> Any:
    scope = jax_program()
    scope["DynamicScale"] = DynamicScale
    return train(code, scope, lambda: scope["dynamic_scale"].scale)


def write_flax(code: Code) -> Any:
    scope = jax_program()
    return train(code, scope, lambda: scope["opt_state"].loss_scale.loss_scale)


def flax_train_state(code: Code, loss_scale: Callable[[Scope], Any]) -> Any:
    scope = jax_program() | {"DynamicScale": DynamicScale, "TrainState": TrainState}
    code = code._replace(step=f"{code.step}\nparams = state.params")
    return train(code, scope, lambda: loss_scale(scope))


def known_train_state(code: Code) -> Any:
    return flax_train_state(code, lambda scope: scope["dynamic_scale"].scale)


def write_train_state(code: Code) -> Any:
    return flax_train_state(code, lambda scope: scope["state"].opt_state.loss_scale.loss_scale)


FLAX_STATE = {"growth_interval": 2, "fin_steps": 1, "scale": 1024.0}


def known_flax_state(code: Code) -> Any:
    dynamic_scale = DynamicScale(**FLAX_STATE)
    scope = run(code.set_up, {"dynamic_scale": dynamic_scale})
    assert (scope["scale"], scope["fin_steps"]) == (1024.0, 1)
    scales = []
    for finite in FINITE:
        x = jnp.float32(1 if finite else np.inf)
        dynamic_scale, *_ = dynamic_scale.value_and_grad(lambda w, x: w * x)(jnp.float32(1), x)
        scales.append(float(dynamic_scale.scale))
    return scales


def write_flax_state(code: Code) -> Any:
    return adjusted(run(code.set_up, jax_program() | {"dynamic_scale": DynamicScale(**FLAX_STATE)})["loss_scale"])


# An optax optimizer in training.


def in_training(steps: int) -> Scope:
    """Return a scope in which Adam has taken ``steps`` steps of plain optax."""
    scope = jax_program() | {"tx": optax.adam(0.01)}
    scope["opt_state"] = scope["tx"].init(scope["params"])
    for _ in range(steps):
        grads = jax.grad(scope["loss_fn"])(scope["params"], scope["x"], scope["y"])
        updates, scope["opt_state"] = scope["tx"].update(grads, scope["opt_state"], scope["params"])
        scope["params"] = optax.apply_updates(scope["params"], updates)
    return scope


def known_optax(code: Code) -> Any:
    scope = in_training(3)
    for _ in range(4):
        run(code.set_up, scope)
    return state_of(scope["params"], scope["opt_state"])


def write_optax(code: Code) -> Any:
    scope = run(code.set_up, in_training(3))
    for _ in range(4):
        run(code.step, scope)
    return state_of(scope["params"], scope["opt_state"].inner_state)


def state_of(params: Any, opt_state: Any) -> list[Any]:
    return [leaf.tolist() for leaf in jax.tree.leaves((params, opt_state))]


# The wrapper written by hand.


def either_wrapper(code: Code) -> Any:
    apply = run(code.set_up, jax_program())["mixed_precision_apply"]
    result = apply(in_half)(jnp.array(X))
    products = []

    def closes_over_params(x: jax.Array) -> jax.Array:
        products.append(x @ WEIGHT)
        return products[0]

    apply(closes_over_params)(jnp.array(X))
    return result.tolist(), str(result.dtype), str(products[0].dtype)


def in_half(x: jax.Array) -> jax.Array:
    assert x.dtype == jnp.float16
    return jnp.tanh(x @ x.T / 3)


def expected_wrapper() -> Any:
    half = jnp.array(X).astype(jnp.float16)
    return jnp.tanh(half @ half.T / 3).astype(jnp.float32).tolist(), "float32", "float32"


# The rows.


class Row(NamedTuple):
    """The packages of the left column, a runner per column, and the result."""

    needs: tuple[str, ...]
    known: Callable[[Code], Any]
    write: Callable[[Code], Any]
    expected: Callable[[], Any]


def scaled_training(start: float, period: int, max_norm: float) -> Callable[[], Any]:
    return lambda: {"scales": expected_scales(start, period), "params": close(expected_params(max_norm))}


def steps(expected: list[float], rate: Callable[[int], float] | None = None, is_bfloat16: bool = False) -> Any:
    rates = [rate(update + 1) for update in range(sum(FINITE))] if rate else []
    return pytest.approx(rates, rel=1e-6), close(expected, 2**-8 if is_bfloat16 else 2**-10)


ROWS = {
    "torch: autocast and GradScaler": Row(("torch",), known_torch, write_torch, scaled_training(2.0**16, 2, MAX_NORM)),
    "torch: a GradScaler's state": Row(
        ("torch",), known_torch_state, write_torch_state, lambda: expected_scales(1024, count=1)
    ),
    "torch: autocast with bfloat16": Row(
        ("torch",), known_steps, write_steps, lambda: steps(expected_params(), is_bfloat16=True)
    ),
    "torch: accumulation": Row(("torch",), known_steps, write_steps, lambda: steps(expected_params())),
    "torch: schedules and the learning rate": Row(
        ("torch",), known_steps, write_steps, lambda: steps(expected_params(rate=cosine), cosine)
    ),
    "torch: weight decay on matrices only": Row(
        ("torch",), known_steps, write_steps, lambda: steps(expected_decay(), is_bfloat16=True)
    ),
    "torch: several optimizers": Row(
        ("torch",), known_steps, write_steps, lambda: steps(expected_params(bias_factor=0.5))
    ),
    "torch: torch.utils.checkpoint": Row(
        ("torch",), known_steps, write_recomputed, lambda: steps(expected_params(), is_bfloat16=True)
    ),
    "torch: AveragedModel": Row(
        ("torch",), known_average, write_steps, lambda: steps(expected_params(ema_decay=0.5), is_bfloat16=True)
    ),
    "torch: saving and resuming": Row(
        ("torch",), known_resumed, write_resumed, lambda: steps(expected_params(), is_bfloat16=True)
    ),
    "torch: DistributedDataParallel": Row(
        ("torch",), known_distributed, write_steps, lambda: steps(expected_params(), is_bfloat16=True)
    ),
    "Apex: O2": Row(("apex.amp",), known_apex, write_apex, lambda: ({"float32"}, "float32", 2.0**16)),
    "Apex: O3": Row(("apex.amp",), known_apex, write_apex, lambda: ({"float16", "float32"}, "float32", 128.0)),
    "Keras: mixed_float16": Row(
        ("keras",), known_keras, write_keras, lambda: ({"float32"}, ["float16", "float32"], "float32", 2.0**15)
    ),
    "Keras: bfloat16, schedules and the learning rate": Row(
        ("keras",), known_keras_steps, write_steps, lambda: steps(expected_params(rate=cosine), cosine, True)
    ),
    "accelerate": Row(
        ("torch", "accelerate"), known_accelerate, write_accelerate, lambda: close(expected_params(MAX_NORM))
    ),
    "accelerate: accumulation, schedules and the learning rate": Row(
        ("torch", "accelerate"),
        known_accelerate_steps,
        write_steps,
        lambda: steps(expected_params(rate=cosine), cosine, True),
    ),
    "jmp": Row(
        ("jmp",),
        either_jmp,
        either_jmp,
        lambda: ({"x": "float16", "ids": "int32"}, expected_scales(2.0**15), 2.0**15),
    ),
    "flax: DynamicScale": Row((), known_flax, write_flax, scaled_training(2.0**16, 3, np.inf)),
    "flax: TrainState with DynamicScale": Row(
        (), known_train_state, write_train_state, scaled_training(2.0**16, 3, np.inf)
    ),
    "flax: a DynamicScale in training": Row(
        (), known_flax_state, write_flax_state, lambda: expected_scales(1024, period=3, count=1)
    ),
    "optax: an optimizer in training": Row(
        (), known_optax, write_optax, lambda: state_of(*map(in_training(7).get, ("params", "opt_state")))
    ),
    "A wrapper written by hand": Row((), either_wrapper, either_wrapper, expected_wrapper),
}
TABLE = read_page()


def runs_here(needs: tuple[str, ...]) -> bool:
    """Return whether the libraries are installed and can run on this machine.

    Newer releases of Apex have no amp, and amp runs on GPUs only.
    """
    try:
        if not all(importlib.util.find_spec(name) for name in needs):
            return False
    except ModuleNotFoundError:  # its parent package is not installed
        return False
    return "apex.amp" not in needs or import_module("torch").cuda.is_available()


def test_every_row_of_the_table_is_run() -> None:
    assert list(TABLE) == list(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_the_code_to_write_does_what_the_table_says(name: str) -> None:
    row, (known, write) = ROWS[name], TABLE[name]
    with jax.numpy_dtype_promotion("standard"):  # the reader's default, which flax and optax need
        assert row.write(write) == row.expected()
        if runs_here(row.needs):  # the left column has the same result
            assert row.known(known) == row.expected()


def test_a_softmax_between_modules_is_float32_under_o2() -> None:
    model = jaxmp.linen.apply_policy(nn.Sequential([nn.Dense(4), nn.softmax]), "O2")
    program = jax.make_jaxpr(model.apply)(model.init(jax.random.key(0), X), X)
    assert [eqn.outvars[0].aval.dtype.name for eqn in equations(program) if eqn.primitive.name == "exp"] == ["float32"]


def test_the_peers_extra_has_what_the_left_column_needs() -> None:
    extras = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {re.match(r"[\w-]+", requirement)[0] for requirement in extras["peers"]}
    assert named == {name for row in ROWS.values() for name in row.needs} - {"apex.amp"}  # not on PyPI
