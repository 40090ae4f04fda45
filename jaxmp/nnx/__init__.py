"""Policies for Flax NNX models, an optimizer with a loss scale, and a train step."""

from jaxmp.nnx.optimizer import Optimizer as Optimizer
from jaxmp.nnx.optimizer import value_and_grad as value_and_grad
from jaxmp.nnx.policied import apply_policy as apply_policy
from jaxmp.nnx.policied import autocast as autocast
from jaxmp.nnx.training import make_train_step as make_train_step

__all__ = ["Optimizer", "apply_policy", "autocast", "make_train_step", "value_and_grad"]


def __dir__() -> list[str]:
    return __all__
