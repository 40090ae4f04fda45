"""jaxmp: mixed precision for JAX and Flax, declared in one line.

>>> import jaxmp
>>> jaxmp.get_policy("mixed_float16").compute_dtype
dtype('float16')
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmp import dtypes as dtypes
    from jaxmp import float8 as float8
    from jaxmp import formats as formats
    from jaxmp import hardware as hardware
    from jaxmp import inspect as inspect
    from jaxmp import jmp as jmp
    from jaxmp import linen as linen
    from jaxmp import loss_scale as loss_scale
    from jaxmp import losses as losses
    from jaxmp import nnx as nnx
    from jaxmp import optimizer as optimizer
    from jaxmp import policy as policy
    from jaxmp import sharding as sharding
    from jaxmp import training as training
    from jaxmp import tree as tree
    from jaxmp.engine.autocast import autocast as autocast
    from jaxmp.engine.plan import CastPlan as CastPlan
    from jaxmp.engine.plan import cast_plan as cast_plan
    from jaxmp.engine.rules import UnmatchedOverrideError as UnmatchedOverrideError
    from jaxmp.engine.trace import autocast_dtype as autocast_dtype
    from jaxmp.evaluation import make_eval_step as make_eval_step
    from jaxmp.float8 import Float8 as Float8
    from jaxmp.loss_scale import DynamicLossScale as DynamicLossScale
    from jaxmp.loss_scale import HeadroomLossScale as HeadroomLossScale
    from jaxmp.loss_scale import LossScale as LossScale
    from jaxmp.loss_scale import NoOpLossScale as NoOpLossScale
    from jaxmp.loss_scale import StaticLossScale as StaticLossScale
    from jaxmp.marks import precision as precision
    from jaxmp.optimizer import LossScalingState as LossScalingState
    from jaxmp.optimizer import get_loss_scale as get_loss_scale
    from jaxmp.optimizer import keep_if_skipped as keep_if_skipped
    from jaxmp.optimizer import loss_scaling as loss_scaling
    from jaxmp.optimizer import scale_loss as scale_loss
    from jaxmp.optimizer import unscale as unscale
    from jaxmp.optimizer import value_and_grad as value_and_grad
    from jaxmp.optimizer import wrap_opt_state as wrap_opt_state
    from jaxmp.overrides import UnknownOperationError as UnknownOperationError
    from jaxmp.policy import Policy as Policy
    from jaxmp.policy import PolicyMap as PolicyMap
    from jaxmp.policy import get_policy as get_policy
    from jaxmp.rounding import low_precision as low_precision
    from jaxmp.training import NonFiniteTrainingError as NonFiniteTrainingError
    from jaxmp.training import TrainState as TrainState
    from jaxmp.training import make_train_step as make_train_step

__version__ = "0.1.0"

# Name to the module that has it ("" for a module itself). Imported on first use: `import jaxmp` stays light, and flax
# and optax are loaded by those who use them.
_EXPORTS = {
    **dict.fromkeys(("dtypes", "float8", "formats", "hardware", "inspect", "jmp", "linen"), ""),
    **dict.fromkeys(("loss_scale", "losses", "nnx", "optimizer", "policy", "sharding", "training", "tree"), ""),
    "autocast": "engine.autocast",
    "UnknownOperationError": "overrides",
    **dict.fromkeys(("CastPlan", "cast_plan"), "engine.plan"),
    "precision": "marks",
    "UnmatchedOverrideError": "engine.rules",
    "Float8": "float8",
    "autocast_dtype": "engine.trace",
    **dict.fromkeys(("DynamicLossScale", "HeadroomLossScale", "LossScale"), "loss_scale"),
    **dict.fromkeys(("NoOpLossScale", "StaticLossScale"), "loss_scale"),
    "low_precision": "rounding",
    **dict.fromkeys(("LossScalingState", "get_loss_scale", "loss_scaling", "scale_loss"), "optimizer"),
    **dict.fromkeys(("keep_if_skipped", "unscale", "value_and_grad", "wrap_opt_state"), "optimizer"),
    **dict.fromkeys(("Policy", "PolicyMap", "get_policy"), "policy"),
    **dict.fromkeys(("NonFiniteTrainingError", "TrainState", "make_train_step"), "training"),
    "make_eval_step": "evaluation",
}


__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxmp' has no attribute {name!r}")
    import_module("jaxmp._contexts")  # before anything is jitted with what this name is
    module = import_module(f"jaxmp.{_EXPORTS[name] or name}")
    value = getattr(module, name) if _EXPORTS[name] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
