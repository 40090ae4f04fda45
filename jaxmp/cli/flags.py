"""The arguments of the commands, with their settings for ``argparse``."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any

Arguments = dict[str, dict[str, Any]]


def _named(name: str, **settings: Any) -> Arguments:
    return {name: settings}


_REPEATED: dict[str, Any] = {"action": "append", "default": []}
_SHAPE = "a positional argument, such as float32[8,16], int32[] or key[] (a random key); repeat for more"
_RETURNS = "a function without parameters that returns the arguments, as in def arguments(): return params, batch"
_EXAMPLE = f"{_RETURNS} (arrays, shapes or pytrees); it is traced, not run"
_ARGUMENTS = f"{_RETURNS}; it is run"
_TOPOLOGY = "of GPUs: slices x hosts x GPUs per host; the arguments must have shardings on a mesh"
_OVERRIDE = "an exception to the policy, such as '**/head=float32' or 'primitive:exp=half'; repeat for more"


def loss_scale(text: str) -> float:
    """Return the positive finite number that ``text`` describes."""
    return _positive(text, f"a loss scale must be a positive finite number, got {text!r}; write e.g. 1024")


def gibibytes(text: str) -> float:
    """Return the positive finite number of GiB that ``text`` describes."""
    return _positive(text, f"a memory limit must be a positive number of GiB, got {text!r}; write e.g. 40")


def share(text: str) -> float:
    """Return the share from 0 to 1 that ``text`` describes."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if 0 <= number <= 1:
            return number
    raise argparse.ArgumentTypeError(f"a share must be a number from 0 to 1, got {text!r}; write e.g. 0.9 for 90 %")


def _positive(text: str, message: str) -> float:
    """Return the positive finite number that ``text`` describes, or raise an error with ``message``."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if 0 < number < math.inf:
            return number
    raise argparse.ArgumentTypeError(message)


SHAPES = (
    _named("function", metavar="MODULE:FUNCTION", help="any function that JAX can trace")
    | _named("--arg", metavar="DTYPE[SHAPE]", help=_SHAPE, **_REPEATED)
    | _named("--args", metavar="MODULE:FUNCTION", help=_EXAMPLE)
)
"""A function that is traced, and the shapes of its arguments."""
ARRAYS = (
    _named("function", metavar="MODULE:FUNCTION", help="returns the loss, or a tuple that begins with the loss")
    | _named("--args", metavar="MODULE:FUNCTION", help=_ARGUMENTS)
)  # fmt: skip
"""A loss function that is run, and its arguments."""
CALL = (
    _named("function", metavar="MODULE:FUNCTION", help="a train step or any other function; it is run")
    | _named("--args", metavar="MODULE:FUNCTION", help=_ARGUMENTS)
)  # fmt: skip
"""A function that is run, and its arguments."""
DEVICE = _named(
    "--device",
    metavar="NAME",
    help="a device that is not attached: a GPU (h200, a100, l40s), a TPU (v5e, v5p, v6e) or a slice of TPUs (v5e:4x4)",
)
MEMORY = _named(
    "--memory", type=gibibytes, metavar="GIB", help="the limit of each device; default: the share that JAX takes, 75 %%"
)
MARGIN = _named(
    "--margin",
    type=share,
    default=0.07,
    metavar="SHARE",
    help="the room above the compiled peak, as a share of the peak; default: 0.07",
)
TOPOLOGY = _named("--topology", metavar="1x2x4", help=_TOPOLOGY)
POLICY = _named("--policy", help="run under autocast with this policy; default: run without autocast")
EXPECTED_POLICY = _named("--policy", help="the policy that the program should follow; the program does not change")
MIN_HALF = _named(
    "--min-half",
    type=share,
    default=0.0,
    metavar="SHARE",
    help="the smallest share of the products' FLOPs in half precision, such as 0.8; default: 0",
)
OVERRIDE = _named("--override", metavar="KEY=LEVEL", help=_OVERRIDE, **_REPEATED)
AUTOCAST = (
    _named("--policy", help="autocast's policy; default: the policies of the models, or mixed_bfloat16 without any")
    | OVERRIDE
)
REFERENCE = _named(
    "--reference",
    default="float32",
    metavar="REFERENCE",
    help="the dtype of the run without policies, float32 (default) or float64; or another MODULE:FUNCTION",
)
LOSS_SCALE = _named(
    "--loss-scale", type=loss_scale, default=1.0, metavar="NUMBER", help="a constant loss scale; default: 1"
)
TUNED_POLICY = _named("--policy", default="mixed_bfloat16", help="a half-precision policy; default: mixed_bfloat16")
TOLERANCE = _named(
    "--tolerance",
    type=float,
    metavar="NUMBER",
    help="the largest error to allow; default: twice the error of half-precision products alone",
)
SEEDS = _named("--seeds", type=int, default=1, metavar="N", help="the number of PRNG keys to measure with; default: 1")
NO_OPERATIONS = _named("--no-operations", action="store_true", help="choose only modules, not single operations")
OPERATIONS = _named("--operations", action="store_true", help="show each operation, not only each module")
SAVE = _named(
    "--save", metavar="FILE.toml", help="also write the policy to this file, which get_policy and --policy read"
)
STEPS = _named("--steps", type=int, default=5, metavar="N", help="the number of calls under the profiler; default: 5")
NO_GRAD = _named("--no-grad", action="store_true", help="check only the results, not the gradients")
PLOT = _named("--plot", metavar="FILE", help="also write a picture: .png, .pdf or .svg; needs matplotlib")
JSON = _named("--json", action="store_true", help="print JSON, for programs")
