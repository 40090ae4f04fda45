"""A train step's loss function: what it must take and return, under a policy, with rematerialisation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.base.cache_keys import policies_off
from jaxmp.base.dtypes import nearest
from jaxmp.base.trees import path_name
from jaxmp.engine.autocast import computed
from jaxmp.engine.overrides import policy_and_exceptions
from jaxmp.engine.rules import Rules
from jaxmp.optim.loss_scaling import described, is_number, require_loss
from jaxmp.policy import float8
from jaxmp.policy.patterns import pairs_of
from jaxmp.policy.policies import check_backend

LossFn = Callable[[Any, Any, Any, Any], Any]
"""``loss_fn(params, model_state, batch, rng)`` returns ``(loss, new_model_state)``, or these two and ``metrics``."""
OWN_METRICS = ("loss", "grad_norm", "loss_scale", "skipped")
"""What a step reports itself."""

REMAT: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "float8": jax.checkpoint_policies.save_only_these_names(float8.RESIDUALS),
}


def checked(loss_fn: LossFn) -> LossFn:
    """``loss_fn`` in the form ``(loss, (model_state, metrics))`` that ``has_aux`` takes, its result checked.

    Raises:
      TypeError: it is no function, or does not take four arguments.
    """
    require_arguments(loss_fn, "params, model_state, batch, rng")

    def of_checked_result(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        result = loss_fn(params, model_state, batch, rng)
        if not isinstance(result, tuple) or len(result) not in (2, 3):
            is_scalar = is_number(result) and np.ndim(result) == 0
            raise TypeError(
                "a loss function returns (loss, new_model_state) or (loss, new_model_state, metrics), got "
                f"{'the loss alone' if is_scalar else described(result)}; write return loss, model_state, or "
                "return loss, None if there is no model state"
            )
        loss, new_model_state, metrics = (*result, {}) if len(result) == 2 else result
        require_loss(loss, "return (loss, new_model_state), in this order")
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"a loss function's metrics must be a dict of names and values, got {described(metrics)}; return "
                '{"accuracy": accuracy}, say'
            )
        require_metrics(metrics)
        if taken := [name for name in metrics if name in OWN_METRICS]:
            raise ValueError(f"the step reports {', '.join(OWN_METRICS)} itself, got a metric {taken[0]!r}; rename it")
        return loss, (new_model_state, metrics)

    return of_checked_result


@contextlib.contextmanager
def noting_none(**arguments: Any) -> Iterator[None]:
    """Notes on an error that tells of None, or of a key that is none, which ``arguments`` a state has none of."""
    try:
        yield
    except Exception as error:
        nones = [f"{name}=…" for name, value in arguments.items() if value is None]
        if nones and any(word in str(error) for word in ("NoneType", "PRNG")):
            error.add_note(
                "jaxmp: what TrainState.create is not given is None in the loss function; does this one need "
                f"TrainState.create({', '.join(nones)})?"
            )
        raise


def require_metrics(metrics: Mapping[Any, Any]) -> None:
    """Raises if a name of ``metrics`` is no string, or a value no array or number, or tree of them."""
    rule = "a loss function's metrics must be arrays or numbers by names that are strings"
    if others := [name for name in metrics if not isinstance(name, str)]:
        raise TypeError(f"{rule}, got the name {others[0]!r}; write {str(others[0])!r}, say")
    for path, leaf in jax.tree.leaves_with_path(dict(metrics)):
        dtype = getattr(leaf, "dtype", np.dtype(bool))
        if not is_number(leaf) or getattr(dtype, "kind", "O") in "OSU":  # a key's has none
            raise TypeError(
                f"{rule}, got {type(leaf).__name__} for {path_name(path)!r}; leave it out, or return a number for it"
            )


def as_key(rng: Any) -> Any:
    """The key that an int makes, or the one that ``rng`` is; None for None.

    Raises:
      TypeError: it is none of these.
    """
    if rng is None:
        return None
    if isinstance(rng, (int, np.integer)) and not isinstance(rng, bool):
        return jax.random.key(rng)
    is_array = isinstance(rng, (jax.Array, np.ndarray))
    is_typed = is_array and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if is_array and (rng.ndim == 0 if is_typed else rng.dtype == np.uint32 and rng.ndim == 1):
        return rng
    came = f"{rng.dtype.name} of shape {rng.shape}" if is_array else repr(rng) if np.isscalar(rng) else described(rng)
    raise TypeError(
        f"rng must be one PRNG key, or an int to make it of, got {came}; pass jax.random.key(0), say: a loss function "
        "makes more of it by jax.random.split or fold_in"
    )


_FOR_PARAMS = (
    ", in which model_state and rng are None where TrainState.create got none; the step is for params, Linen's or your "
    "own: an NNX model is trained by jaxmp.nnx.make_train_step(loss_fn) with loss_fn(model, batch), and evaluated by "
    "nnx.jit(loss_fn)(model, batch) after model.eval()"
)


def require_arguments(loss_fn: Any, names: str) -> None:
    """Raises if ``loss_fn`` does not take arguments of these ``names``, or is no function."""
    if not callable(loss_fn):
        raise TypeError(f"a loss function must be callable, got {loss_fn!r}; write def loss_fn({names})")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*names.split(","))
    except TypeError as error:
        bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        takes = signature.replace(parameters=bare, return_annotation=signature.empty)
        state = _FOR_PARAMS if "rng" in names else ""
        raise TypeError(
            f"a loss function takes ({names}), but this one takes {takes}; write def loss_fn({names}){state}"
        ) from error


def under_policy(loss_fn: LossFn, policy: Any, overrides: Mapping[str, str] | None) -> LossFn:
    """``loss_fn`` checked, as :func:`checked` does it, under autocast where something of it is to compute otherwise."""
    loss_fn = checked(loss_fn)
    given = dict(pairs_of(overrides))
    one_policy, exceptions = (None, {}) if policy is None else policy_and_exceptions(policy, overrides)
    if one_policy is None or (one_policy.compute_dtype == np.float32 and not exceptions):
        if given:
            raise ValueError(
                f"overrides are exceptions from autocast, but policy=None asks for none, got {given}; "
                'pass a half policy too ("mixed_bfloat16", say), or leave them out'
            )
        return loss_fn if one_policy is None else _within(one_policy.precision, loss_fn)
    # A pure policy would round the loss and the batch statistics on their way out. Nor is anything widened there, as by
    # jaxmp.autocast under float32: a half loss is refused and half metrics are handed on, with overrides as without.
    widest = one_policy.with_output_dtype(np.float32)

    def decided(*args: Any) -> Any:
        if policies_off.value:
            return loss_fn(*args)
        check_backend(widest)
        return computed(loss_fn, Rules(widest.compute_dtype, exceptions, float8=widest.float8), args, {}, widest)

    return _within(widest.precision, decided)


def _within(context: Callable[[], AbstractContextManager[Any]], loss_fn: LossFn) -> LossFn:
    def within(*args: Any) -> Any:
        with contextlib.nullcontext() if policies_off.value else context():
            return loss_fn(*args)

    return within


def with_remat(loss_fn: LossFn, remat: Any) -> LossFn:
    """Return a loss function whose backward pass recomputes what ``remat`` says.

    Raises:
      ValueError: there is no rematerialisation of that name.
      TypeError: ``remat`` is neither a name nor a policy.
    """
    if remat is None or remat == "none":
        return loss_fn
    if isinstance(remat, str):
        # Those that are policies and not functions that make one.
        names = [n for n in dir(jax.checkpoint_policies) if n.endswith("_saveable") or n.startswith("checkpoint_")]
        policies = {**REMAT, **{name: getattr(jax.checkpoint_policies, name) for name in names}}
        if remat not in policies:
            known = nearest(remat, ["none", *policies], 12)
            raise ValueError(f"unknown remat policy {remat!r}; known, nearest first: {known}")
        remat = policies[remat]
    if not callable(remat):
        raise TypeError(
            f"remat must be None, the name of a policy or a policy of jax.checkpoint_policies, got {remat!r}; "
            '"full" recomputes everything'
        )
    return jax.checkpoint(loss_fn, policy=remat)


def require_same_structure(new: Any, old: Any) -> Any:
    """The model state ``new``, if it has the structure, the shapes and the kinds of numbers of ``old``."""
    if old is None and isinstance(new, Mapping):
        raise ValueError(
            "the loss function must return a model state of the structure it was given, but it was given None and "
            f"returned a dict of {', '.join(map(repr, new)) or 'nothing'}: for metrics, return loss, model_state, "
            "metrics; for a model state, pass the whole of it to TrainState.create(model_state=…)"
        )
    returned: Any = jax.tree.structure(new)
    given: Any = jax.tree.structure(old)
    if returned != given:
        raise ValueError(
            f"the loss function must return a model state of the structure it was given, but it was given {given} and "
            f"returned {returned}; pass the whole of it to "
            "TrainState.create(model_state=…), or return None if there is none"
        )
    for (path, leaf), other in zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                "the loss function must return a model state of the shapes it was given, but "
                f"{path_name(path)!r} had {jnp.shape(other)} and has {jnp.shape(leaf)}; "
                "make it the same in every batch"
            )
        if _kind(leaf) > _kind(other):
            was, now = jnp.result_type(other), jnp.result_type(leaf)
            raise TypeError(
                "the loss function must return a model state of the kinds of numbers it was given, but "
                f"{path_name(path)!r} was {was} and is {now}, which a cast to {was} would cut; start with {now}, or "
                f"return {was}"
            )
    return new


def _kind(leaf: Any) -> int:
    """Of bools, integers, real and complex numbers: those of a kind hold all of the kinds before."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    return max([n for n, kind in enumerate(kinds, 1) if jnp.issubdtype(jnp.result_type(leaf), kind)], default=0)
