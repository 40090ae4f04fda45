"""Read the arguments and results of calls of functions and train steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jaxmp.base.donation import require_not_deleted
from jaxmp.base.trees import path_name
from jaxmp.engine.autocast import autocast
from jaxmp.inspect.program import nnx_models
from jaxmp.nnx.training import TrainStep as NNXTrainStep
from jaxmp.nnx.training import state_of
from jaxmp.optim.checks import require_loss
from jaxmp.training.state import TrainState
from jaxmp.training.step import TrainStep

AS_WRITTEN = {"xla_allow_excess_precision": False}
"""Compiler options under which XLA keeps every rounding to half precision."""
_COMPILED_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jaxlib.__version__.startswith("0.10."):
    _COMPILED_FAST["xla_cpu_use_fusion_emitters"] = False  # later versions compile fusions faster


def options_of_few_runs() -> dict[str, Any]:
    """Return compiler options for a program that runs only a few times, and whose roundings XLA keeps.

    On a CPU, the optimizations of LLVM take longer than they save in a few runs.
    """
    return AS_WRITTEN | (_COMPILED_FAST if jax.default_backend() == "cpu" else {})


class StepCall(NamedTuple):
    """A call of a train step: the step (a function of pytrees), its state and batch."""

    step: TrainStep
    state: TrainState
    batch: Any

    @property
    def rng(self) -> Any:
        """The random key of the loss function in this step."""
        return None if self.state.rng is None else jax.random.split(self.state.rng)[1]

    @property
    def loss_scale(self) -> float:
        """The loss scale of this step."""
        return float(self.state.loss_scale)


def is_step(fun: Any) -> bool:
    """Return whether a function is a train step for Linen or NNX."""
    return isinstance(fun, (TrainStep, NNXTrainStep))


def step_call(fun: Any, args: Sequence[Any]) -> StepCall:
    """Return the call ``fun(*args)`` of a train step.

    Its state and batch are on the devices of the step.

    Raises:
      TypeError: a train step does not accept the arguments.
      RuntimeError: the state was donated to an earlier step.
    """
    fun.require_arguments(*args)
    if isinstance(fun, NNXTrainStep):
        call = StepCall(fun.of_trees, scoped_state_of(*args[:2]), *args[2:])
    else:
        call = StepCall(fun, *args)
    call.step.require_state(call.state)
    require_not_deleted(call.state)
    state, batch = call.step.place(call.state, call.batch)
    return call._replace(state=state, batch=batch)


def scoped_state_of(model: Any, optimizer: Any) -> Any:
    """Return the train state of an NNX model and its optimizer, with each module call in a named scope."""
    return state_of(nnx_models.scoped_copy(model) if nnx_models.is_module(model) else model, optimizer)


def loss_of_step(step: Any) -> Callable[..., Any]:
    """Return the loss function of a train step, as a function of the step's arguments.

    The loss function has the step's policy. It gathers no weights, also if the step is on a mesh.
    """

    def loss_fn(*args: Any) -> Any:
        call = step_call(step, args)
        state, update = call.state, call.step.update
        loss_of_step = update.devices.whole_loss(update.loss_fn)
        return loss_of_step(state.params, state.model_state, call.batch, call.rng)

    return loss_fn


def require_own_settings(**settings: Any) -> None:
    """Raise a ValueError if a setting is not None.

    A train step uses its own settings.
    """
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"a train step uses its own policy, optimizer and loss scale, got {name}; leave it out")


def step_under_policy(step: Any, policy: Any, overrides: Mapping[str, str] | None = None) -> Any:
    """Return a train step that runs its loss function under a policy. Without a policy, return ``step``.

    Raises:
      ValueError: the step was made with another policy.
    """
    if policy is None:
        return step
    if getattr(step, "of_trees", step).options.get("policy") is not None:
        raise ValueError(
            f"this train step already has a policy, got policy={policy!r}; leave it out, or inspect "
            "step.with_options(policy=…)"
        )
    return step.with_options(policy=policy, overrides=overrides)


def under_policy(fun: Callable[..., Any], policy: Any, overrides: Mapping[str, str] | None) -> Callable[..., Any]:
    """Return a function under :func:`jaxmp.autocast`, or a train step under a policy.

    Without a policy, return ``fun``.

    Raises:
      ValueError: there are overrides without a policy, or the train step was made with another policy.
    """
    require_policy_of(overrides, policy)
    if is_step(fun):
        return step_under_policy(fun, policy, overrides)
    return fun if policy is None else autocast(fun, policy, overrides)


def require_policy_of(overrides: Mapping[str, str] | None, policy: Any) -> None:
    """Raise a ValueError if there are overrides without a policy."""
    if overrides and policy is None:
        raise ValueError(f"overrides need a policy, got {overrides} and policy=None; pass the policy")


def named(args: Any) -> Any:
    """Put the module calls of all NNX models in ``args`` in named scopes.

    The models are changed in place, so no other code may use them. Return ``args``.
    """
    is_model = nnx_models.is_module
    return jax.tree.map(lambda node: nnx_models.with_scopes(node) if is_model(node) else node, args, is_leaf=is_model)


def names_of_arguments(fun: Any) -> list[str]:
    """Return the names of a function's positional arguments.

    The list is empty if the signature is unknown, for example because the function is written in C.
    """
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def argument_paths(fun: Any, args: Sequence[Any]) -> list[str]:
    """Return the path of each array among the arguments.

    A path begins with the name of the argument, or with the argument's number if the name is unknown.
    """
    names = _name_or_number(fun, args)
    paths = [path for path, _ in jax.tree.leaves_with_path(tuple(args))]
    return ["/".join(filter(None, (names[path[0].idx], path_name(path[1:])))) for path in paths]


def require_arguments_not_deleted(fun: Any, args: Sequence[Any]) -> None:
    """Raise an error if an argument was donated to an earlier step.

    The error names the path of the donated array.
    """
    require_not_deleted(dict(zip(_name_or_number(fun, args), args, strict=False)))


def _name_or_number(fun: Any, args: Sequence[Any]) -> list[str]:
    names = names_of_arguments(fun)
    return [*names, *map(str, range(len(names), len(args)))]


def differentiated(args: Sequence[Any]) -> list[int]:
    """Return the indices of the arrays whose gradients are computed.

    These arrays are the floating and complex arrays of one argument: the first argument that has such arrays. An index
    is the position of an array among the arrays of all arguments.
    """
    leaves = jax.tree.leaves_with_path(tuple(args))
    floats = [(n, path[0].idx) for n, (path, leaf) in enumerate(leaves) if is_inexact(leaf)]
    return [n for n, argument in floats if argument == floats[0][1]]


def with_leaves(leaves: Sequence[Any], numbers: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return ``leaves`` with ``new`` in place of the leaves at positions ``numbers``."""
    replaced = list(leaves)
    for number, leaf in zip(numbers, new, strict=True):
        replaced[number] = leaf
    return replaced


def is_inexact(value: Any) -> bool:
    """Return whether a value is floating or complex."""
    return bool(jnp.issubdtype(value.dtype if hasattr(value, "dtype") else jnp.result_type(value), jnp.inexact))


def in_double_precision(value: Any) -> np.ndarray:
    """Return a value as a NumPy array in float64, or in complex128 if it is complex."""
    array = np.asarray(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


RESULTS_ONLY = ", or check only the results: grad=False"
"""The remedy for a function without a loss, for tools with the argument ``grad``."""


def loss_and_rest(result: Any, alternative: str = "") -> tuple[Any, list[Any]]:
    """Return the loss and the other results of a function.

    The loss is the result, or its first element if the result is a tuple or a list. ``alternative`` is another remedy
    for the error message.

    Raises:
      TypeError: the loss is not a floating scalar.
    """
    loss, *rest = result if isinstance(result, (tuple, list)) and result else (result,)
    return require_loss(loss, "return the loss or (loss, …)", alternative), rest
