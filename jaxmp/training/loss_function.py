"""Check a loss function, and apply a policy to it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.arguments import require_function
from jaxmp.base.cache_keys import auto_chunks
from jaxmp.base.trees import path_name
from jaxmp.engine.autocast import computed
from jaxmp.engine.classifier import Classifier
from jaxmp.engine.overrides import policy_and_exceptions
from jaxmp.optim.checks import described, require_loss
from jaxmp.policy.off_switch import unless_policies_off
from jaxmp.policy.patterns import checked_overrides
from jaxmp.policy.policy_map import PolicyMap

LossFn = Callable[..., Any]
"""``loss_fn(params, batch)``, which returns ``loss`` or ``(loss, metrics)``; or
``loss_fn(params, model_state, batch, rng)``, which returns ``(loss, new_state)`` or ``(loss, new_state, metrics)``."""
CheckedLossFn = Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Mapping[str, Any]]]]
"""``loss_fn(params, model_state, batch, rng)``, which returns ``(loss, (model_state, metrics))``."""
FOUR_ARGUMENTS = "params, model_state, batch, rng"
"""The arguments of a loss function that uses the model state or the random key."""
OWN_METRICS = ("loss", "grad_norm", "loss_scale", "skipped")
"""The names of metrics that the step itself adds."""


def checked(loss_fn: LossFn) -> CheckedLossFn:
    """Return ``loss_fn`` in one form, with its result checked.

    Raises:
      TypeError: ``loss_fn`` is not a function, or takes neither two nor four arguments.
    """
    _require_function(loss_fn, FOUR_ARGUMENTS)
    if _takes_params_and_batch(loss_fn):
        loss_fn = _with_model_state(loss_fn)
    else:
        _require_signature(loss_fn, FOUR_ARGUMENTS)

    def of_checked_result(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        result = loss_fn(params, model_state, batch, rng)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            raise TypeError(
                "a loss function returns (loss, new_model_state) or (loss, new_model_state, metrics), got "
                f"{described(result)}; write return loss, model_state"
            )
        loss, new_model_state, metrics = (*result, {}) if len(result) == 2 else result
        require_loss(loss, "return (loss, new_model_state), in this order")
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"the metrics of a loss function are a dict, got {described(metrics)}; return {{'accuracy': …}}, say"
            )
        if taken := [name for name in metrics if name in OWN_METRICS]:
            raise ValueError(f"the step reports {taken[0]!r} itself, got a metric of this name; rename it")
        return loss, (new_model_state, metrics)

    return of_checked_result


def _takes_params_and_batch(loss_fn: Any) -> bool:
    """Return whether a loss function takes ``(params, batch)``, and not four arguments."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # no function, or written in C
        return False
    names = list(signature.parameters)
    if names[:1] == ["model"]:  # a loss function for NNX
        return False
    return _binds(signature, 2) and not _binds(signature, 4)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _with_model_state(loss_fn: Callable[[Any, Any], Any]) -> LossFn:
    """Return a loss function of ``(params, batch)`` as one of four arguments.

    The new function raises a ValueError for a state that the loss function could not use.
    """

    def with_model_state(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        for name, value in {"model_state": model_state, "rng": rng}.items():
            if value is not None:
                raise ValueError(
                    f"the train state has a {name}, which loss_fn(params, batch) cannot use; write def loss_fn(params, "
                    f"model_state, batch, rng), or create the state without {name}="
                )
        result = loss_fn(params, batch)
        loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        require_loss(loss, "return loss, or (loss, metrics)")
        return loss, model_state, metrics

    return with_model_state


def require_count(metrics: Mapping[str, Any], name: str) -> None:
    """Raise an error unless the metric ``name`` can count what a loss is a mean over.

    Raises:
      ValueError: there is no such metric, or it is not a real scalar.
    """
    remedy = f"return loss, {{{name!r}: mask.sum()}}, or after a model state, return loss, model_state, {{…}}"
    if name not in metrics:
        raise ValueError(f"mean_over={name!r} must be a metric of the loss function, got {sorted(metrics)}; {remedy}")
    metric = metrics[name]
    if jnp.shape(metric) != () or _kind(metric) not in (1, 2):
        raise ValueError(f"the metric of mean_over={name!r} must be a number, got {described(metric)}; {remedy}")


def as_key(rng: Any) -> Any:
    """Return a key made from ``rng`` if it is an integer seed, else ``rng`` itself."""
    is_seed = isinstance(rng, (int, np.integer)) and not isinstance(rng, bool)
    return jax.random.key(rng) if is_seed else rng


def require_loss_function(loss_fn: Any, names: str) -> None:
    """Raise a TypeError if ``loss_fn`` is not a function that takes the arguments ``names``."""
    _require_function(loss_fn, names)
    _require_signature(loss_fn, names)


def _require_function(loss_fn: Any, names: str) -> None:
    """Raise a TypeError if ``loss_fn`` is not a function.

    ``names`` are the arguments that a loss function takes, for the error message.
    """
    require_function(
        loss_fn,
        rule="a loss function is a function",
        remedy=f"write def loss_fn({names})",
        model_remedy="pass a function that calls the model, to jaxmp.make_train_step for Linen and to "
        "jaxmp.nnx.make_train_step for NNX",
        allows_nnx=False,
    )


def _require_signature(loss_fn: Any, names: str) -> None:
    """Raise a TypeError if the function ``loss_fn`` does not take the arguments ``names``."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*names.split(","))
    except TypeError as error:
        bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        takes = signature.replace(parameters=bare, return_annotation=signature.empty)
        forms, remedy = f"({names})", f"write def loss_fn({names})"
        if names == FOUR_ARGUMENTS:
            is_for_nnx = "model" in signature.parameters
            forms = f"(params, batch) or {forms}"
            remedy = "for an NNX model use jaxmp.nnx.make_train_step" if is_for_nnx else "put all data into one batch"
        raise TypeError(f"a loss function takes {forms}, got one of {takes}; {remedy}") from error


def compute_dtype_of(policy: Any) -> np.dtype | None:
    """Return the compute dtype of a policy; None without a policy."""
    return None if policy is None else PolicyMap(policy).compute_dtype


def under_policy(loss_fn: LossFn, policy: Any, overrides: Mapping[str, str] | None) -> CheckedLossFn:
    """Return a version of ``loss_fn`` that is checked and runs under the policy.

    The loss function runs under autocast, with two exceptions. There is no autocast if the policy is None, or if it is
    float32 and has no overrides.
    """
    checked_loss_fn = checked(loss_fn)
    override_of = checked_overrides(overrides)
    one_policy, exceptions = (None, {}) if policy is None else policy_and_exceptions(policy, overrides)
    is_as_written = one_policy is None or (one_policy.compute_dtype == np.float32 and not exceptions)
    if is_as_written and override_of:
        raise ValueError(
            f"overrides are exceptions from a half policy, got {override_of} and policy={policy!r}; pass "
            "policy='mixed_bfloat16', for example, or leave the overrides out"
        )
    if one_policy is None:
        return checked_loss_fn
    # A half-precision output dtype would round the loss and the batch statistics. With a float32 output dtype, all
    # results keep the dtypes that the loss function returns.
    widest = one_policy.with_output_dtype(np.float32)

    @unless_policies_off(checked_loss_fn)
    def run(*args: Any) -> Any:
        with widest.matmul_context():
            if is_as_written:
                return checked_loss_fn(*args)
            classifier = Classifier(widest.compute_dtype, exceptions, widest.float8)
            return computed(checked_loss_fn, classifier, args, {}, widest)

    return run


def with_loss_chunks(loss_fn: LossFn, number: int) -> LossFn:
    """Return ``loss_fn`` with ``number`` chunks in each :mod:`jaxmp.losses` loss with ``chunks="auto"``."""

    def run(*args: Any) -> Any:
        with auto_chunks(number):
            return loss_fn(*args)

    return run


def require_same_structure(new: Any, old: Any) -> Any:
    """Return the model state ``new`` if a later step can use it in place of ``old``.

    Raises:
      ValueError: ``new`` has another structure than ``old``, or a leaf has another shape.
      TypeError: a cast of a leaf to its old dtype would lose information, for example from complex to real.
    """
    rule = "the loss function must return a model state like its argument"
    after: Any = jax.tree.structure(new)
    if after != jax.tree.structure(old):
        name, had, has = _difference(new, old)
        raise ValueError(
            f"{rule}, but {name} was {had} and is {has}; pass the whole model state to "
            "TrainState.create(model_state=…), and return metrics as a third result"
        )
    for (path, leaf), before in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        name = repr(path_name(path))
        if jnp.shape(leaf) != jnp.shape(before):
            raise ValueError(f"{rule}, but {name} had the shape {jnp.shape(before)} and has {jnp.shape(leaf)}")
        if _kind(leaf) > _kind(before):
            was, now = jnp.result_type(before), jnp.result_type(leaf)
            raise TypeError(f"{rule}, but {name} was {was} and is {now}; start with {now}, or return {was}")
    return new


def _difference(new: Any, old: Any) -> tuple[str, str, str]:
    """Return the path of the first leaf that only one of two trees has.

    Also return descriptions of the old and the new leaf. If the trees have the same leaves, describe the trees.
    """
    befores, afters = (
        {path_name(path): described(leaf) for path, leaf in jax.tree.leaves_with_path(tree)} for tree in (old, new)
    )
    for name in {**befores, **afters}:
        if (name in befores) != (name in afters):
            return repr(name), befores.get(name, "absent"), afters.get(name, "absent")
    return "the model state", type(old).__name__, type(new).__name__


def _kind(leaf: Any) -> int:
    """Return 0 for bools, 1 for integers, 2 for real and 3 for complex numbers."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    return max([n for n, kind in enumerate(kinds, 1) if jnp.issubdtype(jnp.result_type(leaf), kind)], default=0)
