"""Build the rows of benchmarks.train_step that run in torch.

The rows have torch's fastest settings for one GPU:

- fused AdamW, gradients set to None, and clipping by foreach
- scaled dot-product attention
- channels-last images, and cuDNN's search for convolutions
- inputs that stay on the device
- torch.compile around model and loss

This module needs torch.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from experiments.benchmarks.measure.turns import Prepared
from experiments.benchmarks.models import in_torch
from experiments.benchmarks.models.workloads import Workload
from experiments.benchmarks.shared.scaled_steps import LEARNING_RATE
from experiments.benchmarks.train_step.jax_steps import CLIP, WEIGHT_DECAY
from experiments.benchmarks.train_step.rows import Row

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Result:
    """The result of a call.

    ``jax.block_until_ready`` waits for it, as for a JAX array.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def block_until_ready(self) -> Result:
        if self.value.is_cuda:
            torch.cuda.synchronize()
        return self


def device() -> torch.device:
    """Return the GPU, or the CPU if torch has no GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    torch.set_num_threads(1)  # more threads would compete with JAX's, which is a hundred times slower on few cores
    return torch.device("cpu")


def train_step(case: Workload, row: Row, batch: dict[str, np.ndarray]) -> Callable[[], torch.Tensor]:
    """Return a whole train step on a batch in host memory.

    The step has forward, backward, clipping, AdamW, and, if the row is scaled, the GradScaler.
    """
    model, (inputs, labels) = _build(case, row), _on_device(case, batch)
    loss_of: Callable[..., torch.Tensor] = in_torch.loss_of
    if row.library != "torch":
        loss_of = torch.compile(loss_of, mode=row.mode, dynamic=False)
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW(params, LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    scaler = torch.amp.GradScaler(device().type, enabled=row.scaled)

    def step() -> torch.Tensor:
        _float32_products(row)
        with _autocast(row):
            loss = loss_of(model, inputs, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, CLIP, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def layers(row: Row, width: int, blocks: int, shape: tuple[int, int]) -> Prepared:
    """Prepare blocks of GPT-2, or a single layer, with gradients.

    If ``blocks`` is 0, the function prepares a layer of width × 4·width. The inputs are random numbers in bfloat16.
    """
    stack = [in_torch.Block(width, max(1, width // 64), causal=True) for _ in range(blocks)]
    model = torch.nn.Sequential(*(stack or [torch.nn.Linear(width, 4 * width, bias=False)]))
    model = in_torch.of_library(model, row.library).to(device())
    call = torch.compile(model, dynamic=False)
    x = torch.randn(*shape, width, device=device(), dtype=torch.bfloat16, requires_grad=True)

    def run() -> Result:
        with _autocast(row):
            y = call(x)
        y.backward(y.detach())
        x.grad = None
        model.zero_grad(set_to_none=True)
        return Result(y.detach())

    return Prepared(run)


def prepare(case: Workload, row: Row, batch: dict[str, np.ndarray]) -> Prepared:
    """Prepare a row's train step, and call it once to compile it.

    :func:`peak` is reset after this call, because the memory in which cuDNN and torch.compile try kernels is not part
    of a step.
    """
    torch.backends.cudnn.benchmark = True
    run = train_step(case, row, batch)
    started = time.perf_counter()
    Result(run()).block_until_ready()
    seconds = time.perf_counter() - started
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return Prepared(lambda: Result(run()), lambda: float(run()), seconds)


def peak() -> int | None:
    """Return torch's peak bytes on the GPU since a row was last prepared.

    The result is None without a GPU.
    """
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def start_anew() -> None:
    """Clear torch.compile's programs, and free unused memory.

    Steps prepared before cannot be called any more. torch.compile stops compiling a function after a few programs, even
    if they are for different models. So its programs are cleared before the next model.
    """
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _build(case: Workload, row: Row) -> torch.nn.Module:
    torch.manual_seed(0)
    return in_torch.of_library(in_torch.build(case), row.library).to(device())


def _on_device(case: Workload, batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = (torch.from_numpy(batch[name]).to(device()) for name in ("inputs", "labels"))
    # The images lie in memory as (batch, height, width, 3), which is channels-last already, so nothing is copied.
    return inputs.permute(0, 3, 1, 2) if case.images else inputs, labels.long()


@contextlib.contextmanager
def _autocast(row: Row) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if row.precision in HALF:
            stack.enter_context(torch.autocast(device().type, HALF[row.precision]))
        if row.library == "transformer_engine":
            from transformer_engine import pytorch as te
            from transformer_engine.common import recipe

            stack.enter_context(te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()))
        yield


def _float32_products(row: Row) -> None:
    """Set whether float32 products may use tensor cores.

    torch's switches are global, so every row sets them.
    """
    torch.set_float32_matmul_precision("highest" if row.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = row.precision != "fp32"
