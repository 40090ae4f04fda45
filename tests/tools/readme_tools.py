"""Run the code blocks of docs/coming_from.md, for tests/docs/test_coming_from.py.

The module reads the blocks, has small programs in place of the reader's program, and computes the expected results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from places import ROOT

import jaxmp
from jaxmp.program.walk import product_dtypes

PAGE = ROOT / "docs" / "coming_from.md"
Scope = dict[str, Any]

FINITE = [True, True, True, False, True, False, False, True, True, True, True]  # whether each step's batch is finite
# Gradients of 1 would overflow under a scale of 2**16, so the errors are small.
# Smaller products than of 8 features and 8 outputs would be float32 under autocast. The outputs are 0.125 and -1.5.
X, Y = np.tile(np.float32([[1, 2], [-3, 0.5]]), 4), np.tile(np.float32([[0.625], [-2]]), 8)
WEIGHT, BIAS = np.tile(np.float32([[0.125], [-0.0625]]), (4, 8)), np.full(8, 0.125, np.float32)
LEARNING_RATE, MAX_NORM = 0.125, 2.0**-3


class Code(NamedTuple):
    """The code of a block: the lines that run once, and the lines of one step."""

    set_up: str
    step: str


def read_page() -> dict[str, tuple[Code, Code]]:
    """Return the reader's code and the code for jaxmp, for each heading of the page."""
    sections = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    pairs = {name: re.findall(r"```python\n(.*?)\n```", text, re.DOTALL) for name, text in texts.items()}
    return {name: (read_block(known), read_block(write)) for name, (known, write) in pairs.items()}


def read_block(text: str) -> Code:
    """Return the code of a block, with 2000 and 2001 replaced by short intervals."""
    text = text.replace("2000", "2").replace("2001", "3")
    set_up, _, step = text.partition("\n\n")
    return Code(text, "") if re.fullmatch(r"(import|from) .*", set_up) else Code(set_up, step)


def run(code: str, scope: Scope) -> Scope:
    """Run ``code`` with the names of ``scope``, and return the scope."""
    exec(compile(code, str(PAGE), "exec"), scope)
    return scope


# Expected results.


def expected_scales(start: float, period: int = 2, count: int = 0) -> list[float]:
    """Return the loss scale after each step, computed by hand.

    The scale doubles after ``period`` finite steps in a row, and halves after a non-finite step.
    """
    scales, scale = [], start
    for finite in FINITE:
        count = count + 1 if finite else 0
        if not finite:
            scale /= 2
        elif count == period:
            scale, count = scale * 2, 0
        scales.append(scale)
    return scales


def cosine(update: int) -> float:
    """Return the learning rate of an update, by the page's cosine schedule of 100 updates."""
    return LEARNING_RATE * (1 + math.cos(math.pi * update / 100)) / 2


def expected_params(
    max_norm: float = math.inf,
    rate: Callable[[int], float] = lambda update: LEARNING_RATE,
    bias_factor: float = 1.0,
    ema_decay: float = 0.0,
) -> list[float]:
    """Return the linear regression's params after the finite steps, in float64.

    ``rate`` is the learning rate of each update. That of the bias is ``bias_factor`` times as large. With
    ``ema_decay``, the result is the moving average of the params.
    """
    weight, bias = WEIGHT.astype(np.float64), BIAS.astype(np.float64)
    average = np.array([*weight.ravel(), *bias])
    for update in range(sum(FINITE)):
        grads = gradients(weight, bias)
        norm = np.sqrt(sum((grad**2).sum() for grad in grads))
        clip = min(1.0, max_norm / norm)
        weight, bias = weight - rate(update) * clip * grads[0], bias - rate(update) * bias_factor * clip * grads[1]
        average = ema_decay * average + (1 - ema_decay) * np.array([*weight.ravel(), *bias])
    return average.tolist()


def expected_decay() -> list[float]:
    """Return the params after the finite steps of the page's AdamW, in float64. Only the weight decays."""
    params = [WEIGHT.astype(np.float64), BIAS.astype(np.float64)]
    means, squares = [0.0, 0.0], [0.0, 0.0]
    for update in range(1, sum(FINITE) + 1):
        grads = gradients(*params)
        for number, weight_decay in enumerate([0.5, 0.0]):
            means[number] = 0.9 * means[number] + 0.1 * grads[number]
            squares[number] = 0.999 * squares[number] + 0.001 * grads[number] ** 2
            root = np.sqrt(squares[number] / (1 - 0.999**update)) + 1e-8
            direction = means[number] / (1 - 0.9**update) / root
            params[number] = params[number] - LEARNING_RATE * (direction + weight_decay * params[number])
    return [*params[0].ravel(), *params[1]]


def gradients(weight: np.ndarray, bias: np.ndarray) -> list[np.ndarray]:
    """Return the gradients of the mean squared error."""
    error = 2 * (X @ weight + bias - Y) / Y.size
    return [X.T @ error, error.sum(0)]


def close(params: list[float], tolerance: float = 2**-12) -> Any:
    return pytest.approx(params, rel=0, abs=tolerance)  # float16 rounds the params; they move by 2**-6 and more


# Small programs in place of the reader's program, in JAX and in torch.


def jax_program(model: nn.Module | None = None) -> Scope:
    """Return a float32 linear regression, with the names that the page uses."""
    scope: Scope = {"jax": jax, "jnp": jnp, "nn": nn, "optax": optax, "jaxmp": jaxmp, "partial": partial}
    scope |= {"model": model or nn.Dense(8), "tx": optax.sgd(LEARNING_RATE), "max_norm": MAX_NORM}
    scope |= {"params": {"kernel": jnp.array(WEIGHT), "bias": jnp.array(BIAS)}, "x": jnp.array(X), "y": jnp.array(Y)}
    prediction = 'model.apply({"params": params}, x)'
    return run(f"def loss_fn(params, x, y): return jnp.mean(({prediction} - y) ** 2)", scope)


def train(code: Code, scope: Scope, loss_scale: Callable[[], Any]) -> Scope:
    """Run a block's steps; return the loss scale after each step and the params."""
    batches = [scope["x"] if finite else scope["x"] * float("inf") for finite in FINITE]
    run(code.set_up, scope)
    scales = []
    for scope["x"] in batches:
        run(code.step, scope)
        scales.append(float(loss_scale()))
    return {"scales": scales, "params": flat(scope["params"])}


def adjusted(loss_scale: Any) -> list[float]:
    """Return the scale after each step, for the steps of FINITE."""
    scales = []
    for finite in FINITE:
        loss_scale = loss_scale.adjust(jnp.bool_(finite))
        scales.append(float(loss_scale.loss_scale))
    return scales


def flat(params: Any) -> list[float]:
    return [*np.ravel(params["kernel"]).tolist(), *np.ravel(params["bias"]).tolist()]


def products(scope: Scope) -> set[str]:
    """Return the dtypes of the products in the scope's loss function."""
    return product_dtypes(jax.make_jaxpr(scope["loss_fn"])(scope["params"], scope["x"], scope["y"]))


def torch_program() -> Scope:
    """Return the linear regression of ``jax_program`` in torch."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(8, 8, device=device)
    model.load_state_dict({"weight": torch.tensor(WEIGHT.T), "bias": torch.tensor(BIAS)})
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    scope: Scope = {"torch": torch, "device": device, "model": model, "optimizer": optimizer}
    scope |= {"x": torch.tensor(X, device=device), "y": torch.tensor(Y, device=device)}
    return scope | {
        "loss_fn": torch.nn.functional.mse_loss,
        "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
        "max_norm": MAX_NORM,
        "scaler": torch.amp.GradScaler(device, growth_interval=2),
    }


class TorchParams:
    """The current params of a torch model, under the names that Linen gives them."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getitem__(self, name: str) -> np.ndarray:
        param = {"kernel": self.model.weight.T, "bias": self.model.bias}[name]
        assert param.dtype.is_floating_point and param.element_size() == 4
        return param.detach().cpu().numpy()
