"""jaxmp: mixed precision for JAX and Flax, declared in one line.

>>> import jaxmp
>>> jaxmp.get_policy("mixed_float16").compute_dtype
dtype('float16')
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmp import checkpoint as checkpoint
    from jaxmp import inspect as inspect
    from jaxmp import jmp as jmp
    from jaxmp import linen as linen
    from jaxmp import losses as losses
    from jaxmp import nnx as nnx
    from jaxmp import sharding as sharding
    from jaxmp.base import hardware as hardware
    from jaxmp.engine.autocast import autocast as autocast
    from jaxmp.engine.marks import precision as precision
    from jaxmp.engine.overrides import UnknownOperationError as UnknownOperationError
    from jaxmp.engine.plan import CastPlan as CastPlan
    from jaxmp.engine.plan import cast_plan as cast_plan
    from jaxmp.engine.trace import autocast_dtype as autocast_dtype
    from jaxmp.optim.loss_scale import DynamicLossScale as DynamicLossScale
    from jaxmp.optim.loss_scale import HeadroomLossScale as HeadroomLossScale
    from jaxmp.optim.loss_scale import LossScale as LossScale
    from jaxmp.optim.loss_scale import NoOpLossScale as NoOpLossScale
    from jaxmp.optim.loss_scale import StaticLossScale as StaticLossScale
    from jaxmp.optim.loss_scaling import loss_scaling as loss_scaling
    from jaxmp.optim.low_precision import low_precision as low_precision
    from jaxmp.optim.scaled_grad import value_and_grad as value_and_grad
    from jaxmp.optim.scaling_state import LossScalingState as LossScalingState
    from jaxmp.optim.scaling_state import get_loss_scale as get_loss_scale
    from jaxmp.optim.scaling_state import keep_if_skipped as keep_if_skipped
    from jaxmp.optim.scaling_state import wrap_opt_state as wrap_opt_state
    from jaxmp.policy.float8 import Float8 as Float8
    from jaxmp.policy.patterns import UnmatchedOverrideError as UnmatchedOverrideError
    from jaxmp.policy.policies import Policy as Policy
    from jaxmp.policy.policy_map import PolicyMap as PolicyMap
    from jaxmp.policy.policy_map import get_policy as get_policy
    from jaxmp.training.evaluation import make_eval_step as make_eval_step
    from jaxmp.training.state import TrainState as TrainState
    from jaxmp.training.step import make_train_step as make_train_step
    from jaxmp.training.stuck_runs import NonFiniteTrainingError as NonFiniteTrainingError
    from jaxmp.training.stuck_runs import raise_if_stuck as raise_if_stuck

__version__ = "0.1.0"

# The module of each public name. It is imported when the name is first used, so `import jaxmp` is fast and does not
# load flax and optax.
_MODULES = {
    "checkpoint": "jaxmp.checkpoint",
    "hardware": "jaxmp.base.hardware",
    "inspect": "jaxmp.inspect",
    "jmp": "jaxmp.jmp",
    "linen": "jaxmp.linen",
    "losses": "jaxmp.losses",
    "nnx": "jaxmp.nnx",
    "sharding": "jaxmp.sharding",
}
_NAMES = {
    "jaxmp.engine.autocast": ("autocast",),
    "jaxmp.engine.marks": ("precision",),
    "jaxmp.engine.overrides": ("UnknownOperationError",),
    "jaxmp.engine.plan": (
        "cast_plan",
        "CastPlan",
    ),
    "jaxmp.engine.trace": ("autocast_dtype",),
    "jaxmp.optim.loss_scale": (
        "DynamicLossScale",
        "HeadroomLossScale",
        "LossScale",
        "NoOpLossScale",
        "StaticLossScale",
    ),
    "jaxmp.optim.loss_scaling": ("loss_scaling",),
    "jaxmp.optim.low_precision": ("low_precision",),
    "jaxmp.optim.scaled_grad": ("value_and_grad",),
    "jaxmp.optim.scaling_state": (
        "get_loss_scale",
        "keep_if_skipped",
        "LossScalingState",
        "wrap_opt_state",
    ),
    "jaxmp.policy.float8": ("Float8",),
    "jaxmp.policy.patterns": ("UnmatchedOverrideError",),
    "jaxmp.policy.policies": ("Policy",),
    "jaxmp.policy.policy_map": (
        "get_policy",
        "PolicyMap",
    ),
    "jaxmp.training.evaluation": ("make_eval_step",),
    "jaxmp.training.state": ("TrainState",),
    "jaxmp.training.step": ("make_train_step",),
    "jaxmp.training.stuck_runs": (
        "NonFiniteTrainingError",
        "raise_if_stuck",
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_ELSEWHERE = {
    "all_finite": "jaxmp.jmp.all_finite",
    "apply_policy": "jaxmp.linen.apply_policy or jaxmp.nnx.apply_policy",
    "audit": "jaxmp.inspect.audit",
    "cross_entropy": "jaxmp.losses.cross_entropy",
    "fsdp_specs": "jaxmp.sharding.fsdp_specs",
    "GradScaler": "jaxmp.loss_scaling(tx, jaxmp.DynamicLossScale())",
    "Optimizer": "jaxmp.nnx.Optimizer",
    "profile": "jaxmp.inspect.profile",
    "scale_loss": "jaxmp.value_and_grad(loss_fn, opt_state), or jaxmp.get_loss_scale(opt_state).scale(loss)",
    "select_tree": "jaxmp.jmp.select_tree, or jaxmp.keep_if_skipped for values that a skipped step must not change",
    "Sharding": "jaxmp.sharding.Sharding",
    "unscale": "jaxmp.value_and_grad(loss_fn, opt_state), whose gradients are unscaled",
}
"""The remedies for names that users expect here, by name."""

__all__ = sorted([*_MODULES, *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        remedy = f"; write {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'jaxmp' has no attribute {name!r}{remedy}")
    import_module("jaxmp.base.cache_keys")  # a later import would make JAX compile jitted functions again
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    else:
        value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
