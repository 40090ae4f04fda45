"""The GPU that experiments compile for where there is none, and a train step lowered for it."""

from __future__ import annotations

from typing import Any

import jax

from experiments.models import attention
from jaxmp.inspect.targets import COMPILER_OPTIONS as COMPILER_OPTIONS
from jaxmp.inspect.targets import TARGETS, on, with_cudnn
from jaxmp.inspect.targets import device_of as device_of

H200 = TARGETS["h200"]


def lower(step: Any, device: Any, state: Any, batch: Any) -> Any:
    """A train step lowered for ``device``, its state donated, its half attention cuDNN's."""
    with attention.implementation("cudnn"), with_cudnn(H200.cudnn):
        traced = jax.jit(step, donate_argnums=0).trace(on(device, state), on(device, batch))
        return traced.lower(lowering_platforms=("cuda",))
