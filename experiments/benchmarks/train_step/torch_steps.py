"""Build the row of benchmarks.train_step that runs in torch.

The row has torch's fastest settings for one GPU:

- fused AdamW, gradients set to None, and clipping by foreach
- scaled dot-product attention
- channels-last images, and cuDNN's search for convolutions
- inputs that stay on the device
- torch.compile around model and loss

This module needs torch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import torch

from experiments.benchmarks.measure.turns import Prepared
from experiments.benchmarks.models import in_torch
from experiments.benchmarks.models.workloads import Workload
from experiments.benchmarks.shared.scaled_steps import LEARNING_RATE
from experiments.benchmarks.train_step.jax_steps import CLIP, WEIGHT_DECAY


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


def train_step(case: Workload, batch: dict[str, np.ndarray]) -> Callable[[], torch.Tensor]:
    """Return a whole train step under AMP in bfloat16, on a batch in host memory.

    The step has forward, backward, clipping and AdamW.
    """
    torch.manual_seed(0)
    model, (inputs, labels) = in_torch.build(case).to(device()), _on_device(case, batch)
    loss_of = torch.compile(in_torch.loss_of, dynamic=False)
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW(params, LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    torch.set_float32_matmul_precision("high")  # the few float32 products may use TF32

    def step() -> torch.Tensor:
        with torch.autocast(device().type, torch.bfloat16):
            loss = loss_of(model, inputs, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def prepare(case: Workload, batch: dict[str, np.ndarray]) -> Prepared:
    """Prepare the train step, and call it once to compile it.

    :func:`peak` is reset after this call, because the memory in which cuDNN and torch.compile try kernels is not part
    of a step.
    """
    torch.backends.cudnn.benchmark = True
    run = train_step(case, batch)
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


def _on_device(case: Workload, batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = (torch.from_numpy(batch[name]).to(device()) for name in ("inputs", "labels"))
    # The images lie in memory as (batch, height, width, 3), which is channels-last already, so nothing is copied.
    return inputs.permute(0, 3, 1, 2) if case.images else inputs, labels.long()
