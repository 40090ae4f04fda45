"""Measure this device's ceilings, to which the utilisation of train steps is relative.

The ceilings are measured speeds, not the peaks in a data sheet. :func:`jaxmp.inspect.profile` measures the same ones.
"""

from __future__ import annotations

from typing import Any

import jaxmp
from jaxmp.inspect._profile.ceilings import measure_ceilings

DTYPES = {"fp32": "float32", "tf32": "tensorfloat32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtype of the product for each precision."""


def ceilings() -> dict[str, Any]:
    """Measure the ceilings.

    Returns:
      ``"best"``: the TFLOP/s of a large product by precision, for the precisions that the device has. ``"copy"``: TB/s
      of a copy, read plus written; None for a CPU.
    """
    has_tf32 = "tensorfloat32" in jaxmp.hardware.detect().tensor_cores
    measured = measure_ceilings(dtype for kind, dtype in DTYPES.items() if kind != "tf32" or has_tf32)
    best = {kind: measured.flops[dtype] / 1e12 for kind, dtype in DTYPES.items() if dtype in measured.flops}
    return {"best": best, "copy": None if measured.bandwidth is None else measured.bandwidth / 1e12}


def sentence(figures: dict[str, Any]) -> str:
    """Return a sentence with the ceilings."""
    best = ", ".join(f"{kind} {tflops:.3g}" for kind, tflops in figures.get("best", {}).items())
    copy = f"; a copy moves {figures['copy']:.3g} TB/s" if figures.get("copy") else ""
    return f"Fastest product on this device, TFLOP/s: {best}{copy}."
